"""Keep less for the backward of a layer: what is computed again from tensors that other nodes keep."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn._torch_compat import has_saved_tensor_hooks
from gdn.ops.library import are_plain, without_autocast


class Token(NamedTuple):
    """Stand for a saved view of an output: the output's number, and the view's place in its storage."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _Outputs:
    """Compute outputs again when a backward unpacks them, once for all that the forward has packed."""

    def __init__(self, compute: Callable[[], Sequence[Tensor]], outputs: Sequence[Tensor]) -> None:
        self.compute = compute
        # parts of one tensor share a storage, also when they are computed again
        self.numbers = {x.untyped_storage()._cdata: i for i, x in reversed(list(enumerate(outputs)))}
        self.fresh: Sequence[Tensor] = ()
        self.packed = self.left = 0

    def pack(self, x: Tensor) -> Any:
        number = self.numbers.get(x.untyped_storage()._cdata)
        if number is None:
            return x
        self.packed += 1
        return Token(number, x.shape, x.stride(), x.storage_offset())

    def unpack(self, x: Any) -> Tensor:
        if not isinstance(x, Token):
            return x  # type: ignore[no-any-return]
        if not self.fresh:
            with torch.no_grad():
                self.fresh = self.compute()
            self.left = self.packed
        view = self.fresh[x.number].as_strided(x.size, x.stride, x.offset)
        self.left -= 1
        if self.left == 0:
            self.fresh = ()
        return view


def recomputing(compute: Callable[[], Sequence[Tensor]], *outputs: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autograd saves none of `outputs`: a backward calls `compute` for them.

    `compute` returns tensors with their bits and strides. Where others replace what autograd saves, as
    activation checkpointing and compilers do, the context does nothing.
    """
    if not torch.is_grad_enabled() or not are_plain(*outputs) or has_saved_tensor_hooks():
        return nullcontext()
    device = outputs[0].device
    kept = _Outputs(lambda: without_autocast(device, compute), outputs)
    return torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack)
