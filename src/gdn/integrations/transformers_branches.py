"""Capture matmuls of one token that share their input as branches of a CUDA graph.

A matmul of one token to 512 columns takes 10 us on an H200, nearly all of it latency: an attention layer has
two, to k and to v. Those of a gated MLP read 25 MB each, at half of the rate of HBM. The kernels are those of
eager steps, and so are the bits.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gdn.integrations.transformers_capture import branch_stream

X = TypeVar("X")

# linear layers of one module that a model file applies to one tensor, in the order of their calls
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def in_parallel(device: torch.device, first: Callable[[], X], *others: Callable[[], X]) -> list[X]:
    """Return the results of all functions; where a CUDA graph is captured, `others` run beside `first`.

    Memory: what a branch allocates and frees, PyTorch's allocator gives to later branches alone. Each of
    these waits for the caller's stream first, and so for all kernels that read an earlier branch's results.
    The inputs live until the caller's stream has waited for the branch. cuBLAS has another workspace there.
    """
    # first, so that a compiler sees nothing but the calls
    if torch.compiler.is_compiling() or not is_captured(device):
        return [first(), *(run() for run in others)]
    stream, results = torch.cuda.current_stream(device), []
    for number, run in enumerate(others):
        branch = branch_stream(stream, number)
        branch.wait_stream(stream)
        with torch.cuda.stream(branch):
            results.append(run())
    results.insert(0, first())
    for number in range(len(others)):
        stream.wait_stream(branch_stream(stream, number))
    return results


def is_captured(device: torch.device) -> bool:
    """Return True while the current stream of a device, which is the current one, captures a CUDA graph."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return False
    return device.index == torch.cuda.current_device()


@contextmanager
def with_branches(model: nn.Module) -> Iterator[None]:
    """Let the linear layers of each group of `GROUPS` in a model run in parallel while a graph is captured.

    Groups with other kinds of layers, with hooks or with forwards of their own stay as they are.
    """
    with ExitStack() as stack:
        for module in model.modules():
            for names in GROUPS:
                parts = [module._modules.get(name) for name in names]
                # one layer under two names is called twice: it is no group
                is_group = len(set(parts)) == len(parts) and all(map(_is_plain, parts))
                if is_group and len({part.in_features for part in parts}) == 1:  # type: ignore[union-attr]
                    stack.enter_context(_Group(parts).entered())
        yield


def _is_plain(part: Any) -> bool:
    if type(part) is not nn.Linear or part._forward_hooks or part._forward_pre_hooks:
        return False
    return not (part._backward_hooks or part._backward_pre_hooks or "forward" in part.__dict__)


def _version_of(x: Tensor) -> int:
    """Return how often a tensor was written in place; PyTorch does not count it for inference tensors."""
    return 0 if x.is_inference() else x._version


class _Group:
    """Compute what all layers of a group make of a tensor when the first is called with it."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        # another thread may call the model meanwhile
        self.thread = threading.get_ident()
        # the input of the last call of the first layer, and what the others made of it
        self.x: Tensor | None = None
        self.version = 0
        self.results: list[Tensor] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        for number, part in enumerate(self.parts):
            part.forward = functools.partial(self.call, number)
        try:
            yield
        finally:
            for part in self.parts:
                del part.forward

    def call(self, number: int, x: Tensor) -> Tensor:
        is_ours = threading.get_ident() == self.thread
        if number == 0 and is_ours:
            runs = [functools.partial(nn.Linear.forward, part, x) for part in self.parts]
            y, *self.results = in_parallel(x.device, *runs)
            self.x, self.version = x, _version_of(x)
            return y
        if x is not self.x or not is_ours or _version_of(x) != self.version:
            return nn.Linear.forward(self.parts[number], x)
        y = self.results[number - 1]
        if number == len(self.results):
            # the allocator may have them back
            self.x, self.results = None, []
        return y
