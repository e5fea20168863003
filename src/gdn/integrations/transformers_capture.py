"""Capture CUDA graphs on the device of a model, and order their replays on several streams."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def record(run: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
    """Record a CUDA graph of run() on the current device in the memory of `pool`.

    Return its replay and its output.
    """
    graph = torch.cuda.CUDAGraph()
    # the default stream of captures is of the device that was current at a process's first capture
    with torch.cuda.graph(graph, pool=pool, stream=_capture_stream(torch.cuda.current_device())):
        output = run()
    return graph.replay, output


@functools.cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    # one for all graphs of a device, as graphs that share a pool need
    return torch.cuda.Stream(index)


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
        stream = torch.cuda.current_stream(device)
        if self.last is not None and stream != self.last:
            stream.wait_stream(self.last)
        self.last = stream
