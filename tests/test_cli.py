"""The command line, through typer's own runner: what is printed, what is written, and the exit code."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from gdn import cli
from gdn.bench import cases, measure


def run(*args):
    return CliRunner().invoke(cli.app, list(args))


def test_info_names_who_takes_what():
    found = json.loads(run("info", "--device", "cpu", "--json", "-").stdout)
    assert found["versions"]["torch"] and found["threads"] >= 1 and found["devices"][0] == "cpu"
    assert {name: report["chosen"] for name, report in found["backends"].items()} == dict.fromkeys(
        cli.DTYPES, "eager"
    )
    assert found["backends"]["bf16"]["refusals"]["triton"]
    assert "eager" in run("info", "--device", "cpu").stdout


def test_bench_cpu_appends_rows(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    from gdn.bench import cpu

    row = {"pass": "cpu", "case": "forward 1x8", "provider": "gdn", "share_of_limit": 0.1}
    timed = {**row, "ms": 2.0, "p20": 1.0, "p80": 3.0, "runs": 3, "ratio": {"transformers": 2.0}}
    timed |= {"goal_ratio": 1.8}
    monkeypatch.setattr(cpu, "jobs", lambda is_quick: [cpu.Job("forward", 8, 1, {}, {})])
    monkeypatch.setattr(cpu, "run", lambda job: iter([row, timed]))
    results = tmp_path / "cpu.jsonl"
    done = run("bench", "cpu", "--quick", "--threads", "1", "--out", str(results))
    assert done.exit_code == 0 and " 2 " in done.stdout and "wrong" in done.stdout
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["threads"] for line in lines] == [1, 1] and set(measure.environment()) < set(lines[1])


@pytest.fixture
def gpu_rows(monkeypatch):
    """One small target per job, on the CPU."""
    from gdn.bench import gpu, graph, targets

    found = {}
    for job, of_job in targets.TARGETS.items():
        first = of_job[0]
        lengths = cases.Lengths(1, 3) if job == "decode" else cases.packed(70, 70)
        small = replace(first.case, sizes=(16, 16), heads=(2, 4), lengths=lengths)
        found[job] = (replace(first, case=small),)
    monkeypatch.setattr(gpu, "TARGETS", found)
    monkeypatch.setattr(graph, "ROUNDS", (2, 2))
    return ["--device", "cpu", "--providers", "gdn:eager,gdn:hopper"]


@pytest.mark.parametrize("job, name", [("prefill", "2/8 1x32768"), ("decode", "B=1 fp32")])
def test_bench_prints_and_appends(gpu_rows, tmp_path, job, name):
    out = tmp_path / "h200.jsonl"
    done = run("bench", job, *gpu_rows, "--out", str(out), "--commit", "abc")
    assert done.exit_code == 0 and name in done.stdout, done.output
    assert "gdn:hopper: refused" in done.stdout.replace("\n", " ")
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


def test_module_runs_without_a_script():
    done = subprocess.run([sys.executable, "-m", "gdn", "--help"], capture_output=True, text=True, check=True)
    assert all(command in done.stdout for command in ("info", "verify", "bench", "demo"))
