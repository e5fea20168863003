"""Run FLA's own tests without and with gdn.patch_fla(), and compare the outcome of every test.

    python tests/fla_suite.py CHECKOUT [--workers 16] [--minutes 8] [--select EXPRESSION]

CHECKOUT is a checkout of flash-linear-attention, for its tests/ alone (no released archive holds them); the
package is the one that Python imports. Both passes run the same files in processes of their own, with one
Triton cache. A test that passes without the patch has to pass with it.

This file is also the plugin of both passes (`-p fla_suite`): it patches FLA before the tests are collected,
counts the calls that gdn served and those that it left to FLA, and writes each outcome at once: a pass that
is cut off leaves those it has.

Exit status: 0 where the patch breaks nothing; 1 where it breaks a test, or served no call; 2 where a pass was
cut off before its last test, or the arguments are wrong.
"""

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

FILES = (
    "tests/ops/test_gdn.py",
    "tests/layers/test_gated_deltanet.py",
    "tests/models/test_modeling_gated_deltanet.py",
)
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/tests/fla.jsonl"
PASSES = ("without", "with")

# the plugin

_calls = {"gdn": Counter(), "fla": Counter()}  # by function, since this process ended its last test


def pytest_addoption(parser):
    parser.addoption("--outcomes", help="JSON lines: what was collected, then each outcome as it comes.")
    parser.addoption("--with-gdn", action="store_true", help="Run with gdn.patch_fla().")
    parser.addoption("--max-configs", type=int, default=0, help="Of each autotuned kernel; 0: all.")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Limit the autotuner before FLA's conftest imports FLA's kernels."""
    count = early_config.known_args_namespace.max_configs
    if count > 0:
        limit_configs(count)


def pytest_configure(config):
    is_worker = hasattr(config, "workerinput")
    runs_tests = is_worker or not config.getoption("numprocesses", None)
    if not is_worker:
        config.pluginmanager.register(Recorder(Path(config.getoption("outcomes"))))
    if runs_tests and config.getoption("with_gdn"):
        patch_and_count()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Send the counts of this test along with its last report."""
    item.user_properties.append(("calls", {who: dict(counts) for who, counts in _calls.items()}))
    for counts in _calls.values():
        counts.clear()


def limit_configs(count):
    """Let Triton's autotuner try `count` configurations of each kernel, evenly spaced over its own."""
    from triton.runtime.autotuner import Autotuner

    make = Autotuner.__init__

    def make_with_few(self, fn, arg_names, configs, *args, **kwargs):
        kept = [configs[i * len(configs) // count] for i in range(count)] if len(configs) > count else configs
        make(self, fn, arg_names, kept, *args, **kwargs)

    Autotuner.__init__ = make_with_few


def patch_and_count():
    """Patch FLA for the rest of this process, each function of gdn counting its calls."""
    from gdn.integrations import fla_patch

    package = fla_patch.PACKAGE
    package.served = tuple((module, name, counted(name, serve)) for module, name, serve in package.served)
    chunk = "chunk_gated_delta_rule"
    setattr(fla_patch.ours, chunk, counted(chunk, getattr(fla_patch.ours, chunk)))
    fla_patch.patch_fla()


def counted(name, serve):
    """Return `serve`, counting the calls that it served and those that it left to FLA."""
    from gdn.integrations import fallback

    @functools.wraps(serve)
    def run(*args, **kwargs):
        try:
            outputs = serve(*args, **kwargs)
        except fallback.REJECTIONS as error:
            if fallback.is_rejection(error):
                _calls["fla"][name] += 1
            raise
        _calls["gdn"][name] += 1
        return outputs

    return run


class Recorder:
    """Write a line for each test as soon as it is done, in the one process that all reports reach."""

    def __init__(self, path):
        self._file = path.open("w", encoding="utf-8")
        self._reports = {}
        self._is_collected = False

    def _write(self, row):
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def _collected(self, ids):
        if not self._is_collected:
            self._is_collected = True
            self._write({"collected": list(ids)})

    def pytest_collection_finish(self, session):
        if not session.config.getoption("numprocesses", None):
            self._collected(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self._collected(ids)

    def pytest_runtest_logreport(self, report):
        reports = self._reports.setdefault(report.nodeid, [])
        reports.append(report)
        # "???" means that a worker crashed in this test
        if report.when in ("teardown", "???"):
            self._write(outcome_of(self._reports.pop(report.nodeid)))


def outcome_of(reports):
    """Return the row of one test from its reports: setup, call, teardown."""
    name, why = "passed", None
    for report in reports:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            name, why = "failed", (crash.message if crash else str(report.longrepr)).strip()[:300]
            break
        if report.skipped:
            name = "xfailed" if hasattr(report, "wasxfail") else "skipped"
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else None
    row = {
        "test": reports[0].nodeid,
        "outcome": name,
        "seconds": round(sum(getattr(r, "duration", 0.0) for r in reports), 2),
        "calls": dict(getattr(reports[-1], "user_properties", ())).get("calls", {}),
    }
    return row | ({"why": why} if why else {})


# the two passes


def run_pass(options, name, seconds):
    """Run the files once and leave out/NAME.jsonl; a pass that is not done by then is ended."""
    out = options.out
    (out / "pytest.ini").write_text("[pytest]\n")
    files = [str(options.checkout / file) for file in FILES if (options.checkout / file).exists()]
    command = [
        sys.executable, "-m", "pytest", *files, "-q", "-p", "fla_suite", "-p", "no:cacheprovider",
        "-c", str(out / "pytest.ini"), f"--rootdir={options.checkout}", f"--outcomes={out / name}.jsonl",
        f"--max-configs={options.max_configs}",
    ]  # fmt: skip
    if options.workers > 1:
        command += ["-n", str(options.workers), "--dist", "worksteal"]
    if options.select:
        command += ["-k", options.select]
    if name == "with":
        command.append("--with-gdn")
    env = child_environment(out)
    # do not run in the checkout: Python would import its package instead of the installed one
    process = subprocess.Popen(command, cwd=out, env=env, start_new_session=True)
    try:
        process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        print(f"{name} the patch: cut off after {seconds:.0f} s", flush=True)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def child_environment(out):
    """Return the environment of a pass, which runs in another folder: its paths are absolute."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [str(ROOT / "tests"), str(ROOT / "src"), *map(os.path.abspath, given)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTEST_ADDOPTS": ""}
    env.setdefault("TRITON_CACHE_DIR", str(out / "triton"))
    return env


def read_pass(path):
    """Return (collected test ids, row of each test that is done); both empty without the file."""
    collected, rows = [], {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            # a killed pass may leave an incomplete last line
            continue
        if "collected" in row:
            collected = row["collected"]
        else:
            rows[row["test"]] = row
    return collected, rows


def compare(out):
    """Return a summary of both passes: outcomes, the tests that the patch breaks, calls by function."""
    found = {name: read_pass(out / f"{name}.jsonl") for name in PASSES}
    ids = list(dict.fromkeys(test for collected, rows in found.values() for test in (*collected, *rows)))
    outcomes = {
        test: [found[name][1].get(test, {}).get("outcome", "not run") for name in PASSES] for test in ids
    }
    calls = {"gdn": Counter(), "fla": Counter()}
    for row in found["with"][1].values():
        for who, counts in row["calls"].items():
            calls[who].update(counts)
    return {
        "tests": outcomes,
        "broken": [t for t, (a, b) in outcomes.items() if a == "passed" and b not in ("passed", "not run")],
        "is_complete": bool(ids) and all("not run" not in pair for pair in outcomes.values()),
        "calls": {who: dict(counts) for who, counts in calls.items()},
        "why": {t: row.get("why") for t, row in found["with"][1].items() if row["outcome"] == "failed"},
    }


def rows_of(summary, where):
    """Yield one results row for each file: each test's outcome [without, with], the calls of the run."""
    for file in FILES:
        tests = {t.partition("::")[2]: pair for t, pair in summary["tests"].items() if t.startswith(file)}
        if tests:
            counts = {
                name: dict(Counter(pair[i] for pair in tests.values())) for i, name in enumerate(PASSES)
            }
            yield {
                "suite": "fla", "file": file, "counts": counts,
                "broken": [t for t in summary["broken"] if t.startswith(file)],
                "is_complete": summary["is_complete"], "calls": summary["calls"], "tests": tests, **where,
            }  # fmt: skip


def environment(options):
    """Return what a results row says of the machine, the packages and the source of the tests."""
    import torch

    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
    from gdn_bench.timing import measure

    where = measure.on_gpu(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    git = ("git", "-C", str(options.checkout), "rev-parse", "--short", "HEAD")
    source = options.tests_commit
    if source is None and (options.checkout / ".git").exists():
        source = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    fla = subprocess.run(
        [sys.executable, "-c", "import fla; print(fla.__version__)"], cwd=options.out, capture_output=True,
        text=True, env=child_environment(options.out),
    )  # fmt: skip
    where |= {"max_configs": options.max_configs}
    where |= {"fla": fla.stdout.strip().rpartition("\n")[2] or None, "tests_commit": source}
    return where | ({"commit": options.commit} if options.commit else {})


def parse(arguments):
    parser = argparse.ArgumentParser("fla_suite", description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a folder that holds FLA's tests/")
    parser.add_argument("--out", type=Path, default=ROOT / "build/fla_suite", help="outcomes, Triton's cache")
    parser.add_argument(
        "--append", type=Path, default=RESULTS, help="JSON lines that get a row for each file"
    )
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--minutes", type=float, default=20.0, help="for both passes together")
    parser.add_argument("--select", help="pytest's -k")
    parser.add_argument("--max-configs", type=int, default=0, help="of each autotuned kernel of FLA; 0: all")
    parser.add_argument("--commit", help="gdn's commit, where there is no git")
    parser.add_argument("--tests-commit", help="FLA's commit, where the tests are no checkout")
    parser.add_argument("--compare-only", action="store_true", help="of the outcomes that --out holds")
    parser.add_argument(
        "--without-gpu", action="store_true", help="FLA's kernels need one; its CPU tests do not"
    )
    options = parser.parse_args(arguments)
    options.checkout, options.out = options.checkout.resolve(), options.out.resolve()
    if not any((options.checkout / file).exists() for file in FILES):
        parser.error(f"checkout: expected a folder with {FILES[0]}, got {options.checkout}")
    return parser, options


def main(arguments=None):
    parser, options = parse(arguments)
    if not options.without_gpu and not options.compare_only:
        import torch

        if not torch.cuda.is_available():
            parser.error("expected a CUDA device, got none: FLA's kernels need one")
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.compare_only:
        for name in PASSES:
            (options.out / f"{name}.jsonl").unlink(missing_ok=True)
        # record the tests that are done, even if a signal ends the run
        handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        end = time.monotonic() + 60 * options.minutes
        try:
            # the first pass compiles FLA's kernels for both
            run_pass(options, "without", 0.65 * 60 * options.minutes)
            run_pass(options, "with", end - time.monotonic())
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        finally:
            signal.signal(signal.SIGTERM, handler)
    return report(options)


def report(options):
    """Print the comparison, append it to the results, and return the exit status."""
    summary, where = compare(options.out), environment(options)
    options.append.parent.mkdir(parents=True, exist_ok=True)
    with options.append.open("a", encoding="ascii") as file:
        for row in rows_of(summary, where):
            file.write(json.dumps(row) + "\n")
            print(row["file"], json.dumps(row["counts"]))
    served, left = (sum(summary["calls"][who].values()) for who in ("gdn", "fla"))
    print(f"with the patch: {served} calls served by gdn, {left} left to FLA: {json.dumps(summary['calls'])}")
    for test in summary["broken"]:
        print(f"broken by the patch: {test}: {summary['why'].get(test)}")
    missing = [t for t, pair in summary["tests"].items() if "not run" in pair]
    if not summary["is_complete"]:
        print(f"cut off: {len(missing)} of {len(summary['tests'])} tests have not run in both passes")
    if summary["broken"] or (served == 0 and summary["is_complete"]):
        return 1
    return 0 if summary["is_complete"] else 2


if __name__ == "__main__":
    sys.exit(main())
