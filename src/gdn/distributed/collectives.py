"""Wrap the two collectives of torch.distributed that are used here. Both only copy: no bit depends on them.

They are torch's functional collectives, called by their operators: the Python functions over these have other
names in each version of PyTorch. Each starts at once and is waited for later, so that the caller launches
other work in between: with NCCL the collective runs on a stream of its own, with gloo in a thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed._functional_collectives
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from gdn._torch_compat import functional_collectives, run_collective

Sizes: TypeAlias = list[int]
_operators = functional_collectives()


@dataclass(frozen=True)
class Pending:
    """Hold the output of a collective that may not be complete.

    arrange     returns the view of it, or the copy, that `wait` returns
    num_heads   the heads of the tensor that was sent; 0 where nobody asks
    """

    output: Tensor
    arrange: Callable[[Tensor], Tensor]
    num_heads: int = 0

    def wait(self) -> Tensor:
        """Make the current stream (the host for gloo) wait for the collective; return its output."""
        return self.arrange(run_collective(_operators.wait_tensor, self.output))

    def then(self, arrange: Callable[[Tensor], Tensor], num_heads: int = 0) -> "Pending":
        """Return the same collective with another view, or a copy, of its output."""
        return replace(self, arrange=arrange, num_heads=num_heads)


def start_all_gather(x: Tensor, group: ProcessGroup) -> Pending:
    """Start to gather the tensors x of all ranks, of one shape: [R, *x.shape], in the order of ranks."""
    R, shape = group.size(), x.shape
    flat = x.contiguous().view(-1)
    gathered = run_collective(_operators.all_gather_into_tensor, flat, R, group.group_name)
    return Pending(gathered, lambda got: got.view(R, *shape))


def start_all_to_all(x: Tensor, receive: Sizes, send: Sizes, group: ProcessGroup) -> Pending:
    """Start to send the i-th block of rows of x to rank i; the blocks of all ranks come in their order.

    send, receive: the number of rows to and from each rank; rows have the same shape on all ranks.
    """
    name = group.group_name
    swapped = run_collective(_operators.all_to_all_single, x.contiguous(), receive, send, name)
    return Pending(swapped, lambda got: got)


def all_to_all(x: Tensor, receive: Sizes, send: Sizes, group: ProcessGroup) -> Tensor:
    """Run `start_all_to_all` and wait for it."""
    return start_all_to_all(x, receive, send, group).wait()


class Link:
    """Pass what one autograd node begins to the node that finishes it, forward or backward, once."""

    def __init__(self) -> None:
        self._held: Any = None

    def put(self, value: Any) -> None:
        self._held = value

    def take(self) -> Any:
        """Return what was put; hold it no longer, so that its memory is free after use."""
        value, self._held = self._held, None
        return value


class _Start(torch.autograd.Function):
    """Start `all_to_all`; in the backward, wait for the gradients that `_Wait` has sent."""

    @staticmethod
    def forward(ctx: Any, link: Link, x: Tensor, receive: Sizes, send: Sizes, group: ProcessGroup) -> Tensor:
        ctx.link = link
        link.put(start_all_to_all(x, receive, send, group))
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return None, ctx.link.take().wait(), None, None, None


class _Wait(torch.autograd.Function):
    """Wait for `all_to_all`; in the backward, start to send each gradient back to where the row came from."""

    @staticmethod
    def forward(
        ctx: Any, link: Link, started: Tensor, receive: Sizes, send: Sizes, group: ProcessGroup
    ) -> Tensor:
        ctx.link, ctx.receive, ctx.send, ctx.group = link, receive, send, group
        return link.take().wait()  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        ctx.link.put(start_all_to_all(gradient, ctx.send, ctx.receive, ctx.group))
        return None, gradient.new_zeros(0), None, None, None


def start_swap(x: Tensor, receive: Sizes, send: Sizes, group: ProcessGroup) -> Callable[[], Tensor]:
    """Start `all_to_all` with a gradient for x; return the function that waits for it.

    Autograd runs the node of later work first: in the backward, work that was launched between start and wait
    runs between them as well.
    """
    link = Link()
    started = _Start.apply(link, x, receive, send, group)
    return lambda: _Wait.apply(link, started, receive, send, group)  # type: ignore[no-any-return]


def swap(x: Tensor, receive: Sizes, send: Sizes, group: ProcessGroup) -> Tensor:
    """Run `all_to_all` with a gradient for x."""
    return start_swap(x, receive, send, group)()
