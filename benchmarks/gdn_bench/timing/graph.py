"""GPU time: calls captured in a CUDA graph, replays of all providers in turn, medians.

A short call is captured many times over, so that a replay's start is not what is measured; inputs that would
stay in the L2 come in several copies. Where nothing can be captured, events around queued calls are the
fallback, and on a CPU the wall clock: every number says which timer it comes from.
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
ROTATION = 3  # copies of the inputs fill the L2 this many times
AGREES = 5e-3  # relative difference of a replay from the calls themselves: atomics in bf16 leave some 2e-3


@dataclass(frozen=True)
class Prepared:
    """A run of several calls, ready to be queued. `kept` holds what a graph reads and does not own."""

    run: Call
    calls: int
    timer: str  # graph, events, eager, wall
    kept: Sequence[Call]
    lead: float = 0.0  # seconds the host needs to queue a run; a graph needs none
    why: str = ""  # what kept the calls out of a graph


def prepare(
    calls: Sequence[Call],
    device: torch.device,
    *,
    is_eager: bool = False,
    moved: Sequence[torch.Tensor] = (),
) -> Prepared:
    """Warm the calls up, then capture them; each has its own inputs, in memory of their own.

    is_eager: they are queued as Python makes them, and what the host is late with counts.
    moved: inputs that the calls write, such as a pool of states.
    """

    def queue() -> Any:
        return [call() for call in calls][0]

    queue()
    if device.type != "cuda":
        return Prepared(queue, len(calls), "wall", calls)
    if is_eager:
        return Prepared(queue, len(calls), "eager", calls)
    try:
        # what the first call has left cached would lie beside what the capture takes
        release()
        graph, repeats = _captured(queue, 1, moved), 1
        seconds = _seconds(graph.replay, device)
        if seconds < RUN:
            repeats = max(1, min(math.ceil(RUN / seconds), MAX_CALLS // len(calls)))
            graph = _captured(queue, repeats, moved)
        return Prepared(graph.replay, repeats * len(calls), "graph", calls)
    except Exception as error:
        # peers fail to be captured in ways of their own
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        queue()
        lead = time.perf_counter() - start
        return Prepared(queue, len(calls), "events", calls, lead, str(error).splitlines()[0])


def interleaved(
    prepared: Mapping[Name, Prepared], device: torch.device, budget: float = 1.0
) -> dict[Name, Times]:
    """Seconds per call, all providers in turn, as many rounds as fit the budget of seconds."""
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
                # the GPU waits while the host queues: launches are not what is timed
                torch.cuda._sleep(int(4e9 * one.lead))
            begin = _mark(device)
            one.run()
            marks[name].append((begin, _mark(device)))
    _synchronize(device)
    return {name: times(_between(*pair) / prepared[name].calls for pair in marks[name]) for name in marks}


def peak_memory(call: Call, device: torch.device) -> int:
    """Most bytes allocated while a call runs, beyond what was there before."""
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
    """What this machine reaches today: bytes per second of a copy, flop per second of a bf16 product.

    A copy by the copy engine reaches less than one by a kernel: the faster counts.
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
    found = interleaved(jobs, device, budget=0.5)
    copy = min(found[name].p50 for name in ("engine", "kernel"))
    return {"copy": 2 * size / copy, "matmul": 2 * n**3 / found["matmul"].p50}


def copies(num_bytes: float, device: torch.device) -> int:
    """How many sets of inputs of that size rotate through more memory than the L2 holds."""
    if device.type != "cuda":
        return 1
    l2: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, math.ceil(ROTATION * l2 / num_bytes))


def release() -> None:
    """Give back what the last problem's graphs and tensors held."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _captured(queue: Call, repeats: int, moved: Sequence[torch.Tensor]) -> torch.cuda.CUDAGraph:
    """The queue as a graph whose replay has been seen to write what the calls themselves write."""

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
        found = run()
    for x in found:
        x.fill_(math.nan)
    for x, start in zip(moved, before, strict=True):
        x.copy_(start)
    graph.replay()
    for x, right in zip(found, wanted, strict=True):
        norms = [torch.linalg.vector_norm(y, dtype=torch.float32) for y in (x - right, right)]
        if not norms[0] <= AGREES * norms[1]:
            raise RuntimeError("expected a replay to write what the calls do, got a graph of other work")
    return graph


def _seconds(run: Call, device: torch.device) -> float:
    """The fastest of three runs."""
    marks = []
    for _ in range(3):
        begin = _mark(device)
        run()
        marks.append((begin, _mark(device)))
    _synchronize(device)
    return min(_between(*pair) for pair in marks)


def _mark(device: torch.device) -> Any:
    """A moment in the device's queue, or in time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    """Seconds from one mark to another."""
    if isinstance(begin, float):
        return float(end) - begin
    return float(begin.elapsed_time(end)) / 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
