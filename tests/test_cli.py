"""The command line, through typer's own runner: what is printed, what is written, and the exit code."""

import inspect
import itertools
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit import forks

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import gdn
from gdn.cli import app
from gdn.cli import console as cli_console
from gdn.cli.app import build_app
from gdn.testing import cases
from gdn_bench.commands import bench as commands
from gdn_bench.commands import verify
from gdn_bench.timing import measure

ROOT = Path(__file__).parent.parent


def run(*args):
    return CliRunner().invoke(build_app(), list(args))


def test_info_names_who_takes_what():
    found = json.loads(run("info", "--device", "cpu", "--json", "-").stdout)
    assert found["versions"]["torch"] and found["threads"] >= 1 and found["devices"][0] == "cpu"
    assert {name: report["chosen"] for name, report in found["backends"].items()} == dict.fromkeys(
        app.DTYPES, "eager"
    )
    assert found["backends"]["bf16"]["refusals"]["triton"]
    assert "eager" in run("info", "--device", "cpu").stdout


def test_bench_cpu_appends_rows(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    from gdn_bench.passes import cpu

    row = {"pass": "cpu", "case": "forward 1x8", "provider": "gdn", "share_of_limit": 0.1}
    timed = {**row, "ms": 2.0, "p20": 1.0, "p80": 3.0, "runs": 3, "ratio": {"transformers": 2.0}}
    monkeypatch.setattr(cpu, "jobs", lambda is_quick: [cpu.Job("forward", 8, 1, {}, {})])
    monkeypatch.setattr(cpu, "run", lambda job: iter([row, timed]))
    results = tmp_path / "cpu.jsonl"
    done = run("bench", "cpu", "--quick", "--threads", "1", "--out", str(results))
    assert done.exit_code == 0 and "4 ms (2.00)" in done.stdout, done.output
    assert f"appended 2 rows to {results}" in done.stderr
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["threads"] for line in lines] == [1, 1] and set(measure.environment()) < set(lines[1])


@pytest.fixture
def gpu_rows(monkeypatch):
    """One small target per job, on the CPU."""
    from gdn_bench.passes import gpu
    from gdn_bench.problems import workloads
    from gdn_bench.timing import graph

    found = {}
    for job, of_job in workloads.WORKLOADS.items():
        first = of_job[0]
        lengths = cases.Lengths(1, 3) if job == "decode" else cases.packed(70, 70)
        small = replace(first.case, sizes=(16, 16), heads=(2, 4), lengths=lengths)
        found[job] = (replace(first, case=small),)
    monkeypatch.setattr(gpu, "WORKLOADS", found)
    monkeypatch.setattr(graph, "ROUNDS", (2, 2))
    return ["--device", "cpu", "--providers", "gdn:eager,gdn:hopper"]


@pytest.mark.parametrize("job, name", [("prefill", "2/8 1x32768"), ("decode", "B=1 fp32")])
def test_bench_prints_and_appends(gpu_rows, tmp_path, job, name):
    out = tmp_path / "h200.jsonl"
    done = run("bench", job, *gpu_rows, "--out", str(out), "--commit", "abc")
    assert done.exit_code == 0 and name in done.stdout, done.output
    assert "gdn:hopper: refused" in done.stdout.replace("\n", " ")
    assert f"appended 2 rows to {out}" in done.stderr and f"{job} 1/1, {name}" in done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["pass"], "ms" in line) for line in lines] == [(job, True), (job, False)]
    about = {"date", "versions", "commit", "cpu", "threads", "gpu", "cuda"}
    assert all(about <= set(line) and line["commit"] == "abc" for line in lines)


def test_bench_takes_parts_and_goes_on_where_it_stopped(gpu_rows, tmp_path):
    file = tmp_path / "x.jsonl"
    out = [*gpu_rows, "--out", str(file), "--json", "-", "--commit", "abc"]
    found = json.loads(run("bench", "prefill", "--variant", "gated", "--only", "2/8", *out).stdout)
    assert [row["pass"] for row in found["rows"]] == ["prefill:gated"] * 2
    found = json.loads(run("bench", "prefill", "--minutes", "0", *out).stdout)
    assert {row["skipped"] for row in found["rows"]} == {"out of time"} and len(
        file.read_text().splitlines()
    ) == 2
    again = [*out, "--resume", "--variant", "gated"]
    assert json.loads(run("bench", "prefill", *again).stdout)["rows"] == []
    assert (
        len(json.loads(run("bench", "prefill", *again[:-3], "--commit", "abd", *again[-3:]).stdout)["rows"])
        == 2
    )


@pytest.mark.parametrize(
    "wrong",
    [["prefil"], ["prefill", "--variant", "fast"], ["decode", "--variant", "slow"], ["train", "--set", "x"],
     ["prefill", "--providers", "flow"], ["compare", "a.jsonl", "b.jsonl"], ["compare", "HEAD", "b.jsonl"]],
)  # fmt: skip
def test_bench_refuses_what_it_does_not_know(gpu_rows, wrong):
    assert run("bench", *wrong).exit_code == 2


def run_script(monkeypatch, capsys, *args):
    """Run the script itself; return its exit code and the lines on stderr."""
    monkeypatch.setattr(sys, "argv", ["gdn", *args])
    with pytest.raises(SystemExit) as left:
        app.main()
    captured = capsys.readouterr()
    assert not captured.out
    return left.value.code, captured.err.splitlines()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("verify --max-cases -3", "--max-cases.* 0"), ("bench cpu --threads 0", "--threads.* 1"),
        ("info --device gpu", "device: expected .*cpu.*, got gpu"),
        ("bench prefill --device cuda:99", "device: expected .*cpu.*, got cuda:99"),
        ("verify --device meta", "device: expected .*cpu.*, got meta"),
        ("verify --only zzz", "only: expected a part of one of [0-9]+ names, such as strong/.*, got 'zzz'"),
        ("verify --set distributions --only zzz,yyy", "a part of one of mixed, strong.*, got 'zzz,yyy'"),
        ("verify --set full --only zzz", "only: expected a part of one of [0-9]+ names.*, got 'zzz'"),
        ("bench prefill --device cpu --only zzz", "one of 2/8 1x32768, .*, got 'zzz'"),
        ("bench spec --device cpu --only zzz", "[0-9]+ names, such as B=1 T=1 fp32 decode, .*, got 'zzz'"),
        ("bench step --device cpu --only zzz", "one of B=1 fp32, .*, got 'zzz'"),
        ("bench stages --device cpu --only zzz", "one of 16/16 16x16384, .*, got 'zzz'"),
        ("bench layer --device cpu --only zzz", "one of 16/32 2048 wide 1x16384 forward, .*, got 'zzz'"),
        ("bench e2e --device cpu --only zzz", r"one of 128\+128, .*, got 'zzz'"),
        ("bench host --device cpu --only zzz", "one of decode, forward.*, got 'zzz'"),
        ("bench cold --device cpu --only zzz", "a part of new process, got 'zzz'"),
        ("benc", "Did you mean 'bench'"),
    ],
)  # fmt: skip
def test_a_usage_error_is_one_line(monkeypatch, capsys, arguments, words):
    code, lines = run_script(monkeypatch, capsys, *arguments.split())
    assert code == 2 and len(lines) == 1 and len(lines[0]) < 500
    assert re.search(words, lines[0]), lines[0]
    assert lines[0].startswith("gdn")


@pytest.mark.parametrize("job", [*commands.HELP, "ranks", "links", "compare HEAD~1 HEAD"])
def test_a_gpu_benchmark_refuses_a_cpu(monkeypatch, capsys, job):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, lines = run_script(monkeypatch, capsys, "bench", *job.split())
    assert code == 2 and len(lines) == 1 and "needs a GPU" in lines[0]


@pytest.mark.parametrize(
    "command, packages, extra",
    [
        ("bench plot", ["matplotlib"], "bench"), ("bench cpu", ["transformers"], "bench"),
        ("verify --set quick --out x", ["matplotlib"], "bench"),
    ],
)  # fmt: skip
def test_a_missing_package_names_its_extra(monkeypatch, capsys, command, packages, extra):
    monkeypatch.setattr(cli_console, "find_spec", lambda name: None if name in packages else object())
    code, lines = run_script(monkeypatch, capsys, *command.split())
    assert code == 2 and len(lines) == 1
    assert f"needs {packages[0]}, not installed here: pip install 'gdn[{extra}]'" in lines[0]


def test_only_chooses_from_the_whole_product():
    found = verify._cases("full", None, 0, ["heads 1/4"])
    assert all("heads 1/4" in name for name, _ in itertools.islice(found, 3))


def test_the_version_is_printed():
    assert run("--version").stdout == f"gdn {gdn.__version__}\n"
    assert json.loads(run("info", "--json", "-").stdout)["versions"]["gdn"] == gdn.__version__


INSTALLED = """
from pathlib import Path
from gdn_bench.commands import plot
from gdn_bench.timing import measure
from gdn.cli import environment
here = Path.cwd()
assert environment.CLONE is None and environment.commit() is None and plot.README is None
assert (measure.RESULTS, plot.DOCS) == (here, here / "results.md")
"""


def installed(tmp_path, *folders):
    """Copy the package away from its clone; return the environment of a process that imports the copy."""
    site = tmp_path / "site"
    shutil.copytree(Path(gdn.__file__).parent, site / "gdn", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "work").mkdir()
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [x for x in others if x and ROOT not in Path(x).parents]
    path = [str(site), *(str(folder) for folder in folders), *others]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def test_without_a_clone_everything_goes_into_the_current_folder(tmp_path):
    """Name no file beside an installed package as a default output."""
    environment = installed(tmp_path, ROOT / "benchmarks")
    forks.python("-c", INSTALLED, cwd=tmp_path / "work", env=environment, check=True)
    assert ROOT / "benchmarks" / "results" == measure.RESULTS


@pytest.mark.parametrize("command", [["bench", "prefill", "--eager"], ["verify"], ["bench"]])
def test_without_a_clone_the_benchmarks_are_named(tmp_path, command):
    """Print in one line where gdn_bench is; the other commands run."""
    environment = installed(tmp_path)
    done = forks.python("-m", "gdn", *command, cwd=tmp_path / "work", env=environment)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    words = "needs gdn_bench, which is no part of the installed package"
    assert done.stderr.startswith(f"gdn {command[0]}: {words}")


def test_the_benchmarks_run_without_the_script(tmp_path):
    """Run python -m gdn_bench; in a clone `gdn` finds it without PYTHONPATH."""
    for module, path in (("gdn_bench", "benchmarks"), ("gdn", "src")):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / x) for x in ("src", path))}
        command = ["-m", module, *(["bench"] if module == "gdn" else []), "--help"]
        done = forks.python(*command, cwd=tmp_path, env=environment)
        assert done.returncode == 0 and "prefill" in done.stdout and "compare" in done.stdout, done.stderr


def test_module_runs_without_a_script():
    done = forks.python("-m", "gdn", "--help", check=True)
    assert all(command in done.stdout for command in ("info", "verify", "bench"))


def test_warmup_has_the_arguments_of_the_function():
    """Each option is an argument of gdn.warmup, and reaches it."""
    from gdn.cli import warmup

    options = warmup.WarmupOptions(heads="2/4", decay="channel", lower_bound=-5.0, dtypes="fp32,bf16")
    given = warmup.arguments_of(options)
    assert (given["decay"], given["lower_bound"]) == ("channel", -5.0)
    assert given["dtypes"] == (torch.float32, torch.bfloat16)
    assert not set(given) - set(inspect.signature(gdn.warmup).parameters)
    done = run(
        "warmup", "--heads=2/4", "--head-dims=16", "--decay=channel", "--lower-bound=-5", "--device=cpu"
    )
    assert done.exit_code == 0 and "decode" in done.output
    # a softplus gate has no bound of this sign
    done = run(
        "warmup", "--heads=2/4", "--head-dims=16", "--decay=channel", "--lower-bound=5", "--device=cpu"
    )
    assert done.exit_code == 2 and "lower_bound" in done.output
