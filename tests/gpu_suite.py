"""Run one part of the GPU tests within a time limit, and append its outcome to a results file.

    make test-gpu PART=1/3
    PYTHONPATH=src:tests pytest -p gpu_suite --part 1/3 -m gpu -n 20 tests
    python tests/gpu_suite.py     write the recorded seconds of the last whole run to tests/gpu_seconds.json

This is a pytest plugin. The controller process schedules units of tests on the workers (`gpu_plan`), ends
the part when its time is over, and records which tests passed, failed, were skipped, or did not end. Each
worker selects the part's tests, shares compiled kernels with the others (`shared_compiles`) and ends itself
when a test hangs.
"""

import datetime
import faulthandler
import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kit import gpu_plan
from xdist.scheduler import LoadScopeScheduling

BEGAN = time.monotonic()
OUTCOMES = ("passed", "failed", "skipped", "unfinished")
KEPT_MEMORY = 2**29  # bytes of freed GPU memory that a worker may keep for later tests
SHOWN = 1500  # last characters of a failure that the summary shows
BUDGET = 5000  # characters of all failures in the summary
LISTED = 15  # functions whose tests did not start, as far as the summary names them
RECORDED = 4000  # last characters of a failure that the row stores


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu suite")
    group.addoption("--part", default="1/1", help="i/n: the tests of part i of n")
    group.addoption("--part-seconds", type=float, default=470, help="end the part after this time")
    group.addoption("--test-seconds", type=float, default=400, help="end a worker whose test takes longer")
    group.addoption("--results", help="append the outcome to this file of JSON lines")
    group.addoption("--commit", default="", help="the commit to record, where there is no git")
    group.addoption("--table", default=str(gpu_plan.TABLE), help="the recorded seconds of each function")


def pytest_configure(config: pytest.Config) -> None:
    try:
        gpu_plan.parse_part(config.getoption("part"))
    except ValueError as e:
        raise pytest.UsageError(str(e)) from None
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker(config))
    elif config.getoption("numprocesses", None):
        config.pluginmanager.register(Controller(config))
    elif not config.getoption("collectonly"):
        raise pytest.UsageError("gpu_suite: expected workers, -n")
    else:
        config.pluginmanager.register(Selection(config))


class Selection:
    """Select the tests of a part."""

    def __init__(self, config: pytest.Config) -> None:
        self.part, self.parts = gpu_plan.parse_part(config.getoption("part"))
        self.durations = gpu_plan.read_durations(Path(config.getoption("table")))
        self.division = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        names = [item.nodeid for item in items]
        self.division = gpu_plan.digest(names, self.parts, self.durations)
        chosen = set(gpu_plan.split_parts(names, self.parts, self.durations)[self.part - 1])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]


class Worker(Selection):
    """A worker process: one test at a time."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self.limit = config.getoption("test_seconds")
        path = Path(config.workerinput["stacks"]) / config.workerinput["workerid"]
        path.with_suffix(".pid").write_text(str(os.getpid()))
        self.stacks = path.open("w")
        self.output = config.workeroutput
        if importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1":
            from kit import shared_compiles

            shared_compiles.install()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.is_failed |= report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Print the stacks and end the process if the test hangs; free the GPU memory that it leaves."""
        self.is_failed = False
        faulthandler.dump_traceback_later(self.limit, exit=True, file=self.stacks)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._check_gpu()

    def _check_gpu(self) -> None:
        """End the process after an error of the GPU's, which every later test of the process would meet."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        try:
            if self.is_failed:
                torch.cuda.synchronize()
            if torch.cuda.memory_reserved() > KEPT_MEMORY:
                torch.cuda.empty_cache()
        except RuntimeError as e:
            self.stacks.write(f"the process is replaced: {e}")
            self.stacks.close()
            os._exit(1)

    def pytest_sessionfinish(self) -> None:
        self.output["division"] = self.division


class UnitScheduling(LoadScopeScheduling):
    """Give workers the units of a part in order, and never start a test again that ended its worker."""

    def __init__(self, config: pytest.Config, log: Any, durations: gpu_plan.Durations) -> None:
        super().__init__(config, log)
        self.durations = durations
        self.unit_of: dict[str, str] = {}

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        if not self.unit_of:
            units = gpu_plan.plan_units(collection, self.durations)
            self.unit_of = {name: unit for unit, names in units.items() for name in names}
        super().add_node_collection(node, collection)

    def _split_scope(self, nodeid: str) -> str:
        return self.unit_of[nodeid]

    def _reschedule(self, node: Any) -> None:
        # a worker starts a test only if it knows the one after it; any further test would wait behind it
        if self.workqueue and self._pending_of(self.assigned_work[node]) > 1:
            return
        super()._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Return the test that ended its worker, and give the rest of the worker's units to others."""
        unfinished = {
            unit: tests for unit, tests in self.assigned_work.pop(node).items() if not all(tests.values())
        }
        crashed = next((name for tests in unfinished.values() for name in tests if not tests[name]), None)
        for tests in unfinished.values():
            if crashed in tests:
                tests[crashed] = True
        self.workqueue.update((unit, tests) for unit, tests in unfinished.items() if not all(tests.values()))
        for other in self.assigned_work:
            if self.workqueue:
                self._reschedule(other)
        return crashed


class Controller:
    """The process that starts the workers: it keeps the outcomes and the time."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.durations = gpu_plan.read_durations(Path(config.getoption("table")))
        self.stacks = Path(tempfile.mkdtemp(prefix="gpu_suite_"))
        self.names: list[str] = []
        self.started: dict[str, float] = {}
        self.ended: set[str] = set()
        self.seconds: dict[str, float] = defaultdict(float)
        self.outcome: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.skips: Counter[str] = Counter()
        self.end = "complete"
        self.division = ""
        self.row: dict[str, Any] | None = None

    def pytest_sessionstart(self) -> None:
        limit = self.config.getoption("part_seconds") - (time.monotonic() - BEGAN)
        self.timer = threading.Timer(max(limit, 0.1), self._interrupt, ["out of time"])
        self.timer.daemon = True
        self.timer.start()
        # a shell ignores SIGINT in background processes, and Python inherits that
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda *_: self._interrupt("terminated"))

    def _interrupt(self, end: str) -> None:
        self.end = end
        os.kill(os.getpid(), signal.SIGINT)

    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["stacks"] = str(self.stacks)

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> UnitScheduling:
        config.option.loadscopereorder = False
        return UnitScheduling(config, log, self.durations)

    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.names = self.names or list(ids)

    def pytest_testnodedown(self, node: Any) -> None:
        self.division = getattr(node, "workeroutput", {}).get("division") or self.division

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.started[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self.seconds[name] += report.duration
        worse = {"passed": 0, "skipped": 1, "failed": 2}
        before = self.outcome.get(name, "passed")
        self.outcome[name] = max(before, report.outcome, key=lambda outcome: worse[outcome])
        if report.when in ("teardown", "???"):
            self.ended.add(name)
        if report.outcome == "skipped":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.skips[reason.removeprefix("Skipped: ")] += 1
        if report.outcome == "failed":
            text = report.longreprtext
            if report.when == "???":
                self.seconds[name] = time.monotonic() - self.started.get(name, BEGAN)
                stacks = self.stacks / report.node.gateway.id
                text += "\n" + (stacks.read_text() if stacks.exists() else "")
            self.failures[name] = f"{self.failures.get(name, '')}{text}\n"[-RECORDED:]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Append the row before the workers are ended, which may take time."""
        self.timer.cancel()
        if self.end == "complete" and (exitstatus > 1 or not self.names):
            self.end = f"exit code {int(exitstatus)}"
        self.row = self._make_row()
        results = self.config.getoption("results")
        if results:
            path = Path(results)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="ascii") as file:
                file.write(json.dumps(self.row) + "\n")
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            # xdist would wait 10 s for workers that are within a test
            for path in self.stacks.glob("*.pid"):
                with suppress(ProcessLookupError):
                    os.kill(int(path.read_text()), signal.SIGKILL)
        if not self.row["ok"] and session.exitstatus == 0:
            session.exitstatus = 1

    def _make_row(self) -> dict[str, Any]:
        files: dict[str, Counter[str]] = defaultdict(Counter)
        functions: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        running, waiting = {}, []
        for name in [*self.names, *(name for name in self.outcome if name not in set(self.names))]:
            is_ended = name in self.ended or self.outcome.get(name) == "failed"
            files[gpu_plan.file_of(name)][self.outcome[name] if is_ended else "unfinished"] += 1
            if is_ended:
                functions[gpu_plan.function_of(name)][0] += 1
                functions[gpu_plan.function_of(name)][1] += self.seconds[name]
            elif name in self.started:
                running[name] = round(time.monotonic() - self.started[name], 1)
            else:
                waiting.append(name)
        totals = {key: sum(counts[key] for counts in files.values()) for key in OUTCOMES}
        is_complete = self.end == "complete" and bool(self.names) and not totals["unfinished"]
        return {
            "part": self.config.getoption("part"), "division": self.division,
            "ok": is_complete and totals["passed"] > 0 == totals["failed"], "end": self.end, **totals,
            "seconds": round(time.monotonic() - BEGAN, 1), "workers": self.config.getoption("numprocesses"),
            "files": {
                file: {key: counts[key] for key in OUTCOMES if counts[key]}
                | {"seconds": round(self._file_seconds(file), 1)}
                for file, counts in sorted(files.items())
            },
            "skips": dict(self.skips), "failures": self.failures,
            "running": running, "not_started": _fold_names(waiting),
            "functions": {name: [count, round(x, 2)] for name, (count, x) in functions.items()},
            **self._environment(),
        }  # fmt: skip

    def _file_seconds(self, file: str) -> float:
        return sum(x for name, x in self.seconds.items() if gpu_plan.file_of(name) == file)

    def _environment(self) -> dict[str, Any]:
        found: dict[str, Any] = {"gpu": None, "versions": {}, "commit": None}
        # an outcome is recorded even if the package cannot be imported or the driver has failed
        with suppress(Exception):
            import torch

            from gdn_bench.timing import measure

            found = measure.on_gpu(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        found |= {"threads": os.cpu_count(), "commit": self.config.getoption("commit") or found["commit"]}
        now = datetime.datetime.now(datetime.timezone.utc)
        return found | {"date": now.date().isoformat(), "time": now.strftime("%H:%M")}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.row is not None:
            for line in summary_lines(self.row):
                terminalreporter.write_line(line)


def _fold_names(names: Sequence[str]) -> dict[str, int]:
    """Return the number of tests of each function."""
    return dict(Counter(gpu_plan.function_of(name) for name in names))


def summary_lines(row: dict[str, Any]) -> list[str]:
    """Return what the terminal shows of a part: failures, what did not end, and last the table of files."""
    lines, left = [], BUDGET
    for name, text in row["failures"].items():
        shown = text.strip()[-SHOWN:] if left > 0 else ""
        left -= len(shown)
        lines += [f"--- FAILED {name}", *shown.splitlines()] if shown else [f"--- FAILED {name}"]
    lines += [f"running for {seconds} s: {name}" for name, seconds in row["running"].items()]
    waiting = list(row["not_started"].items())
    lines += [f"not started: {count} x {name}" for name, count in waiting[:LISTED]]
    if len(waiting) > LISTED:
        lines.append(f"not started: {sum(count for _, count in waiting[LISTED:])} tests of other functions")
    lines += [f"skipped: {count} x {reason[:90]}" for reason, count in list(row["skips"].items())[:LISTED]]
    slowest = sorted(row["functions"].items(), key=lambda item: -item[1][1])[:10]
    lines.append(
        "slowest functions: "
        + ", ".join(f"{name.split('::')[-1]} {x:.0f} s / {n}" for name, (n, x) in slowest)
    )
    columns = "".join(f"{key:>11}" for key in (*OUTCOMES, "seconds"))
    lines.append(f"{'':40}{columns}")
    for file, counts in [*row["files"].items(), ("part " + row["part"], row)]:
        lines.append(f"{file:40}" + "".join(f"{counts.get(key, 0):>11}" for key in (*OUTCOMES, "seconds")))
    gpu, versions = row["gpu"], row["versions"]
    lines.append(
        f"{'green' if row['ok'] else 'NOT GREEN'}: {row['end']}, {gpu}, torch {versions.get('torch')}, "
        f"triton {versions.get('triton')}, commit {row['commit']}, division {row['division']}, {row['date']}"
    )
    return lines


def update_table(results: Path, table: Path = gpu_plan.TABLE) -> None:
    """Replace the seconds of each function in the table by the recorded ones; later rows win."""
    found = json.loads(table.read_text())
    for line in results.read_text().splitlines():
        for name, (count, seconds) in json.loads(line)["functions"].items():
            found["seconds"][name] = round(seconds / count, 2)
    table.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    update_table(Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/tests/gpu.jsonl"))
