"""Wrap the two collectives of torch.distributed that are used here. Both only copy: no bit depends on them.

They are torch's functional collectives, called by their operators: the Python functions over these have other
names in each version of PyTorch.
"""

from typing import Any, TypeAlias

import torch
import torch.distributed._functional_collectives
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from gdn._torch_compat import functional_collectives

Sizes: TypeAlias = list[int]
_operators = functional_collectives()


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tensors x of all ranks, of one shape, stacked in the order of ranks."""
    R = group.size()
    gathered = _operators.all_gather_into_tensor(x.contiguous().flatten(), R, group.group_name)
    return _operators.wait_tensor(gathered).view(R, *x.shape)  # type: ignore[no-any-return]


def all_to_all(x: Tensor, receive: Sizes, send: Sizes, group: ProcessGroup) -> Tensor:
    """Send the i-th block of rows of x to rank i; return the blocks from all ranks, in the order of ranks.

    send, receive: the number of rows to and from each rank; rows have the same shape on all ranks.
    """
    swapped = _operators.all_to_all_single(x.contiguous(), receive, send, group.group_name)
    return _operators.wait_tensor(swapped)  # type: ignore[no-any-return]


class Swap(torch.autograd.Function):
    """Differentiate `all_to_all`: its backward sends each gradient back to where the row came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, receive: Sizes, send: Sizes, group: ProcessGroup) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return all_to_all(x, receive, send, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return all_to_all(gradient, ctx.send, ctx.receive, ctx.group), None, None, None


def swap(x: Tensor, receive: Sizes, send: Sizes, group: ProcessGroup) -> Tensor:
    """Run `all_to_all` with a gradient for x."""
    return Swap.apply(x, receive, send, group)  # type: ignore[no-any-return]
