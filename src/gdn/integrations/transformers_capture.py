"""Capture CUDA graphs on the device of a model, and order their replays on several streams.

PyTorch has a cuBLAS workspace for each handle and stream. A capture that needs one first allocates it in the
memory pool of its graph, and later captures on that stream write its address into their graphs, too. PyTorch
2.13 frees the workspaces of a stream with each graph that was captured there. So two models whose graphs were
captured on one stream would write one workspace at the same time, or one that was freed with the other model.
Graphs of one `GraphMemory` have a pool of their own, and never run at the same time. They have streams of
their own where CUDA's driver creates these. On ROCm, and where libcuda.so.1 cannot be loaded, the streams are
among the 32 that PyTorch gives out in turn: there another model, or the caller, may have the same ones.
"""

import ctypes
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

# streams for branches of one graph: as many as the largest group of matmuls has besides its first
NUM_BRANCHES = 3
# streams whose graphs are gone, by device: cuBLAS keeps a workspace for each, so they are used again
_unused_streams: defaultdict[int, list[Any]] = defaultdict(list)
# by the handle of the stream that captures
_branch_streams: dict[int, list[Any]] = {}


class GraphMemory:
    """Hold the memory pool and the stream of graphs that never run at the same time."""

    def __init__(self, index: int) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle()
        unused = _unused_streams[index]
        try:
            self.stream = unused.pop()
        except IndexError:
            # none, or another thread was faster
            self.stream = _capture_stream(index)
        # each graph holds this object, so the stream serves others when the last graph is gone
        weakref.finalize(self, unused.append, self.stream)


def record(run: Callable[[], Any], memory: GraphMemory) -> tuple[Callable[[], None], Any]:
    """Record a CUDA graph of run() on the current device, which is that of `memory`.

    Return its replay and its output.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory.pool, stream=memory.stream):
        output = run()
    return functools.partial(_replay, memory, graph), output


def _replay(memory: GraphMemory, graph: torch.cuda.CUDAGraph) -> None:
    graph.replay()


def _capture_stream(index: int) -> Any:
    """Return a new stream with branches, which are created here as a capture may forbid it."""
    stream = _new_stream(index)
    _branch_streams[stream.cuda_stream] = [_new_stream(index) for _ in range(NUM_BRANCHES)]
    return stream


def _new_stream(index: int) -> Any:
    """Return a stream of a device that nobody else has, if CUDA's driver creates it.

    Else it is a `torch.cuda.Stream`, which is one of 32 in turn.
    """
    if torch.version.hip is None:
        handle = ctypes.c_void_p()
        with suppress(OSError), torch.cuda.device(index):
            non_blocking = 1  # CU_STREAM_NON_BLOCKING: a capture is not disturbed by the default stream
            ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), non_blocking)
        if handle.value:
            return torch.cuda.ExternalStream(handle.value, device=index)
    return torch.cuda.Stream(index)


def branch_stream(stream: torch.cuda.Stream, number: int) -> Any:
    """Return the stream of a branch of the graph that `stream` captures.

    Streams of the driver have other branches each (`_new_stream`).
    """
    branches = _branch_streams.setdefault(stream.cuda_stream, [])
    while len(branches) <= number:
        # of a capture of the caller
        branches.append(torch.cuda.Stream(stream.device))
    return branches[number]


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make the device of a tensor the current one: on another, a graph would be empty."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


class StreamOrder:
    """Order the work on buffers that all graphs of a model share, where its callers use several streams."""

    def __init__(self) -> None:
        self.last: Any = None

    def enter(self, device: torch.device) -> None:
        """Let the current stream of a device wait for the stream of the call before, if it is another."""
        if device.type != "cuda":
            return
        before, self.last = self.last, torch.cuda.current_stream(device)
        self.wait_for(before)

    def wait_for(self, stream: Any) -> None:
        """Let the stream of this call wait for another one, which may be None."""
        if stream is not None and stream != self.last:
            self.last.wait_stream(stream)
