"""Start the ranks of a process group on this machine, run one function on all of them, and time calls.

The ranks meet in a file, so no port is needed. A GPU each with NCCL, or processes of one thread with gloo.
"""

import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gdn_bench.results.rows import Row
from gdn_bench.timing import measure

CLOCK = 2e9  # cycles per second of a GPU, about
Name = TypeVar("Name")
LIMIT = 300.0  # seconds without a row after which the ranks are ended: kernels compile at first


@dataclass(frozen=True)
class Rank:
    """Hold one rank of a process group, and time calls on all ranks together."""

    number: int
    num_ranks: int
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the group of all ranks."""
        group = dist.group.WORLD
        assert group is not None
        return group

    @cached_property
    def pairs(self) -> DeviceMesh:
        """Return a mesh of num_ranks / 2 nodes of two ranks; all ranks make it at once."""
        shape = (self.num_ranks // 2, 2)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("nodes", "ranks"))

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks."""
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x.tolist()  # type: ignore[no-any-return]

    def record(self, run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """Return a CUDA graph of a call. All ranks record together, and replay together."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's own thread asks for events while this one records
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        return graph

    def time_in_turn(
        self, runs: Mapping[Name, Callable[[], Any]], rounds: int, burst: int = 1, ahead: float = 0.0
    ) -> dict[Name, measure.Times]:
        """Return times of functions that are called in turn, each on all ranks at once: the slowest rank's.

        burst: calls in a row, whose mean counts: the host then runs ahead of a GPU, as in the layers of a
        model. With 1 the GPU waits for the launches. ahead: seconds for which a GPU is kept busy before the
        clock starts, so that the launches of short calls are not in their time.
        """
        for run in runs.values():
            run()
        seconds = [self._time_once(run, burst, ahead) / burst for _ in range(rounds) for run in runs.values()]
        slowest = self.largest(seconds)
        return {name: measure.times(slowest[i :: len(runs)]) for i, name in enumerate(runs)}

    def _time_once(self, run: Callable[[], Any], burst: int, ahead: float) -> float:
        """Return the seconds of `burst` calls on this rank, which all ranks begin together."""
        dist.barrier()
        if self.device.type != "cuda":
            began = time.perf_counter()
            for _ in range(burst):
                run()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if ahead:
            torch.cuda._sleep(int(ahead * CLOCK))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(burst):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def peak_mb(self, run: Callable[[], Any]) -> float | None:
        """Return the MB that a call allocates at its peak, of the rank that needs most; None on a CPU."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return self.largest([(torch.cuda.max_memory_allocated() - before) / 1e6])[0]


Work = Callable[..., Iterator[Row]]


def run_on_ranks(
    work: Work, num_ranks: int, device: torch.device, *arguments: Any, limit: float = LIMIT
) -> Iterator[Row]:
    """Yield the rows that `work(rank, *arguments)` yields on the first of so many ranks.

    work: a function of a module, called on each rank with its `Rank`. RuntimeError with the rank's traceback
    if one fails or ends, or if no row comes for `limit` seconds; all ranks are then ended.
    """
    context = multiprocessing.get_context("forkserver")
    # imported once, by the process that all ranks are forked from; it has no CUDA context
    context.set_forkserver_preload(["torch._dynamo", "gdn.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[Connection, int] = {}
        processes = []
        try:
            for number in range(num_ranks):
                here, there = context.Pipe(duplex=False)
                given = (number, num_ranks, device.type, str(Path(folder) / "store"), there, work, arguments)
                process = context.Process(target=_serve, args=given, daemon=True)
                process.start()
                there.close()
                pipes[here] = number
                processes.append(process)
            yield from _collect(pipes, limit)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: dict[Connection, int], limit: float) -> Iterator[Row]:
    """Yield the rows that come through the pipes, until every rank is done."""
    while pipes:
        ready = wait(list(pipes), timeout=limit)
        if not ready:
            raise RuntimeError(f"ranks: no row within {limit:.0f} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                what, value = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {pipes[pipe]} ended before it was done") from None
            if what == "failed":
                raise RuntimeError(f"rank {pipes[pipe]} failed:\n{value}")
            if what == "done":
                del pipes[pipe]
            else:
                yield value


def _end_with_the_parent() -> None:
    """End this process where its parent was killed: the others would wait for it in a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _serve(
    number: int, num_ranks: int, kind: str, store: str, pipe: Connection, work: Work,
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    """Run `work` as one rank; send its rows, then that it is done or how it failed."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        options: dict[str, Any] = {"backend": "gloo"}
        device = torch.device("cpu")
        if kind == "cuda":
            device = torch.device("cuda", number)
            torch.cuda.set_device(device)
            options = {"backend": "nccl", "device_id": device}
        else:
            torch.set_num_threads(1)
        place = dist.FileStore(store, num_ranks)
        dist.init_process_group(rank=number, world_size=num_ranks, store=place, **options)
        for row in work(Rank(number, num_ranks, device), *arguments):
            if number == 0:
                pipe.send(("row", row))
        dist.barrier()
        pipe.send(("done", None))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    # without the end of the process group: it waits for ranks that have failed
    os._exit(0)
