"""GPU time: calls captured in CUDA graphs, graphs of all providers replayed in turn, medians.

A short call is captured many times, so that the start of a replay does not count; inputs that would stay in
the L2 have several copies. Calls that cannot be captured are timed by CUDA events, on a CPU by the wall
clock. Every row names its timer.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gdn_bench.timing.measure import Times, times

Call = Callable[[], Any]
Name = TypeVar("Name")
RUN = 500e-6  # seconds that one replay lasts at least, so that its start (some 5 us) does not count
MAX_CALLS = 512  # captured in one graph
ROUNDS = (10, 50)  # replays of each provider
ROTATION = 3  # times that the copies of the inputs fill the L2
AGREES = 5e-3  # relative difference of a replay from the calls: atomics in bf16 cause 2e-3


@dataclass(frozen=True)
class Prepared:
    """Hold a run of several calls. `kept` keeps the tensors alive that a graph reads."""

    run: Call
    calls: int
    timer: str  # graph, events, eager, wall
    kept: Sequence[Call]
    lead: float = 0.0  # seconds the host needs to launch a run; none for a graph
    why: str = ""  # the reason why the calls could not be captured


def prepare(
    calls: Sequence[Call],
    device: torch.device,
    *,
    is_eager: bool = False,
    moved: Sequence[torch.Tensor] = (),
) -> Prepared:
    """Run the calls once, then capture them in a graph. Each call has inputs of its own.

    is_eager: launch from Python without a graph, host time included. moved: inputs that the calls write, such
    as a pool of states.
    """

    def queue() -> Any:
        return [call() for call in calls][0]

    queue()
    if device.type != "cuda":
        return Prepared(queue, len(calls), "wall", calls)
    if is_eager:
        return Prepared(queue, len(calls), "eager", calls)
    try:
        # memory that the first call left in the cache would be added to that of the capture
        release()
        graph, repeats = _captured(queue, 1, moved), 1
        seconds = _seconds(graph.replay, device)
        if seconds < RUN:
            repeats = max(1, min(math.ceil(RUN / seconds), MAX_CALLS // len(calls)))
            graph = _captured(queue, repeats, moved)
        return Prepared(graph.replay, repeats * len(calls), "graph", calls)
    except Exception as error:
        # peers raise errors of any kind in a capture
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        queue()
        lead = time.perf_counter() - start
        return Prepared(queue, len(calls), "events", calls, lead, str(error).splitlines()[0])


def interleaved(
    prepared: Mapping[Name, Prepared], device: torch.device, budget: float = 1.0
) -> dict[Name, Times]:
    """Return the seconds per call of each provider, run in turn for about `budget` seconds."""
    start = time.perf_counter()
    for one in prepared.values():
        one.run()
    _synchronize(device)
    spent = time.perf_counter() - start + sum(2 * one.lead for one in prepared.values())
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(budget / max(spent, 1e-6))))
    marks: dict[Name, list[tuple[Any, Any]]] = {name: [] for name in prepared}
    for _ in range(rounds):
        for name, one in prepared.items():
            if one.lead > 0:
                # the GPU sleeps while the host launches, so that launches are not timed
                torch.cuda._sleep(int(4e9 * one.lead))
            begin = _mark(device)
            one.run()
            marks[name].append((begin, _mark(device)))
    _synchronize(device)
    return {name: times(_between(*pair) / prepared[name].calls for pair in marks[name]) for name in marks}


def peak_memory(call: Call, device: torch.device) -> int:
    """Return the peak memory of a call in bytes: what it allocates beyond its inputs."""
    if device.type != "cuda":
        return 0
    gc.collect()
    _synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = call()
    _synchronize(device)
    del kept
    return torch.cuda.max_memory_allocated(device) - before


def ceilings(device: torch.device) -> dict[str, float]:
    """Measure this machine: bytes per second of a copy, flop per second of a bf16 matrix product.

    The faster of a copy by the copy engine and one by a kernel counts.
    """
    size, n = (2**31, 8192) if device.type == "cuda" else (2**24, 256)
    x = torch.randn(size // 2, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    a, b = torch.randn(2, n, n, device=device, dtype=torch.bfloat16)
    c = torch.empty_like(a)
    jobs = {
        "engine": prepare([lambda: y.copy_(x)], device),
        "kernel": prepare([lambda: torch.neg(x, out=y)], device),
        "matmul": prepare([lambda: torch.mm(a, b, out=c)], device),
    }
    seconds = interleaved(jobs, device, budget=0.5)
    copy = min(seconds[name].p50 for name in ("engine", "kernel"))
    return {"copy": 2 * size / copy, "matmul": 2 * n**3 / seconds["matmul"].p50}


def copies(num_bytes: float, device: torch.device) -> int:
    """Return how many sets of inputs of that size exceed the L2 by ROTATION times."""
    if device.type != "cuda":
        return 1
    l2: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, math.ceil(ROTATION * l2 / num_bytes))


def release() -> None:
    """Free the memory of the last problem's graphs and tensors."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _captured(queue: Call, repeats: int, moved: Sequence[torch.Tensor]) -> torch.cuda.CUDAGraph:
    """Capture the calls; RuntimeError if a replay does not write the values that the calls write."""

    def run() -> list[torch.Tensor]:
        results = queue()
        for _ in range(repeats - 1):
            queue()
        outputs = results if isinstance(results, (tuple, list)) else [results]
        return [*(x.detach() for x in outputs), *moved]

    before = [x.clone() for x in moved]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = [x.clone() for x in run()]
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    release()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        written = run()
    for x in written:
        x.fill_(math.nan)
    for x, start in zip(moved, before, strict=True):
        x.copy_(start)
    graph.replay()
    for x, right in zip(written, wanted, strict=True):
        norms = [torch.linalg.vector_norm(y, dtype=torch.float32) for y in (x - right, right)]
        if not norms[0] <= AGREES * norms[1]:
            raise RuntimeError("expected a replay to write what the calls do, got a graph of other work")
    return graph


def _seconds(run: Call, device: torch.device) -> float:
    """Return the seconds of the fastest of three runs."""
    marks = []
    for _ in range(3):
        begin = _mark(device)
        run()
        marks.append((begin, _mark(device)))
    _synchronize(device)
    return min(_between(*pair) for pair in marks)


def _mark(device: torch.device) -> Any:
    """Return a recorded CUDA event, on a CPU the time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    """Return the seconds between two marks."""
    if isinstance(begin, float):
        return float(end) - begin
    return float(begin.elapsed_time(end)) / 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
