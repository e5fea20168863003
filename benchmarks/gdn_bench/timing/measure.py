"""Measure times by the wall clock: functions in turn, medians with percentiles; append rows to a file."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gdn.cli.environment import CLONE, environment
from gdn_bench.timing.settle import finish_background

# without a clone, files are written to the current folder only
ROOT = CLONE or Path.cwd()
RESULTS = ROOT / "benchmarks" / "results" if CLONE else ROOT


@dataclass(frozen=True)
class Times:
    """Hold seconds per run: the median and the 20th and 80th percentile of `runs` runs."""

    p20: float
    p50: float
    p80: float
    runs: int


def times(seconds: Iterable[float]) -> Times:
    """Return percentiles of times; each is one of the times, the nearest, not interpolated."""
    ordered = sorted(seconds)
    p20, p50, p80 = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.5, 0.8))
    return Times(p20, p50, p80, len(ordered))


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    runs: Mapping[str, int],
    *,
    cold: Iterable[str] = (),
    burst: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
) -> dict[str, Times]:
    """Time functions in turn, so that a slow minute of the machine affects all of them.

    Each second round goes in the reverse order: work that grows or ends in a round favours no function.
    runs: how often each function runs, evenly spread. cold: functions that are not called once before, since
    they take too long. burst: calls of one run, whose mean counts; single short calls in turn would evict
    each other's caches. clock: returns seconds; that of the process leaves out the time of others. contexts:
    what a function runs in, entered before and left after its time is taken.
    """
    contexts = contexts or {}
    for name, function in functions.items():
        if name not in cold:
            with contexts.get(name, nullcontext)():
                function()
    finish_background()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    rounds, order = max(runs[name] for name in functions), list(functions.items())
    for i in range(rounds):
        for name, function in order if i % 2 == 0 else reversed(order):
            if (i + 1) * runs[name] // rounds == i * runs[name] // rounds:
                continue
            with contexts.get(name, nullcontext)():
                start = clock()
                for _ in range(burst):
                    function()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                seconds[name].append((clock() - start) / burst)
    return {name: times(values) for name, values in seconds.items()}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with a fixed number of torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_gpu(device: torch.device) -> dict[str, Any]:
    """Return `environment` with the kind of GPU and its CUDA version."""
    if device.type != "cuda":
        return {**environment(), "gpu": None, "cuda": None}
    return {**environment(), "gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}


def slug(device: torch.device) -> str:
    """Return the name of a results file: h200, a100-sxm4-80gb, cpu."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name.lower().removeprefix("nvidia ").replace(" ", "-")


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a JSON-lines file, numbers in six digits, null for Inf and NaN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="ascii") as file:
        for row in rows:
            file.write(json.dumps(plain(row)) + "\n")


def plain(value: Any) -> Any:
    """Return a value as JSON: six digits, null for Inf and NaN."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: plain(x) for name, x in value.items()}
    return [plain(x) for x in value] if isinstance(value, (list, tuple)) else value
