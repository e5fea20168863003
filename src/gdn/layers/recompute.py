"""Keep less for the backward of a layer: what is computed again from tensors that other nodes keep."""

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gdn._torch_compat import has_saved_tensor_hooks
from gdn.ops.library import are_plain, without_autocast


class Token(NamedTuple):
    """Stand for a saved view of an output: the output's number, and the view's place in its storage."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class Kept(NamedTuple):
    """Hold a tensor that is not computed again, and its version, which autograd compares outside of hooks."""

    tensor: Tensor
    version: int

    def unchanged(self) -> Tensor:
        """Return the tensor; raise RuntimeError, as autograd does, if it was changed in place."""
        x, version = self.tensor, self.tensor._version
        if version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor {tuple(x.shape)} is at version {version}, expected {self.version}"
            )
        return x


class _Outputs:
    """Compute outputs again when a backward unpacks them, once for all that the forward has packed."""

    def __init__(
        self, compute: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        self.compute = compute
        self.inputs = [Kept(x, x._version) for x in inputs]
        # parts of one tensor share a storage
        self.numbers = _numbers(outputs)
        self.places = _places(outputs)
        self.sizes = [x.untyped_storage().nbytes() // x.element_size() for x in outputs]
        self.given = [(weakref.ref(x), x._version) for x in outputs]
        self.fresh: Sequence[Tensor] = ()
        self.packed = self.left = 0

    def pack(self, x: Tensor) -> Any:
        # other layouts, as of a sparse weight, have no storage
        number = self.numbers.get(x.untyped_storage()._cdata) if x.layout == torch.strided else None
        if number is not None:
            output, version = self.given[number]
            now = output()
            # a replaced module may write to its input, or look at its bits
            if now is not None and now._version == version and now.dtype == x.dtype:
                self.packed += 1
                return Token(number, x.shape, x.stride(), x.storage_offset())
        return Kept(x, x._version)

    def unpack(self, x: Any) -> Tensor:
        if not isinstance(x, Token):
            return x.unchanged()  # type: ignore[no-any-return]
        fresh = self.fresh
        if not fresh:
            for given in self.inputs:
                given.unchanged()
            with torch.no_grad():
                fresh = self.fresh = self._as_before(self.compute())
            self.left = self.packed
        view = fresh[x.number].as_strided(x.size, x.stride, x.offset)
        self.left -= 1
        if self.left == 0:
            self.fresh = ()
        return view

    def _as_before(self, fresh: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return computed outputs with the places in storages that `outputs` had.

        A backward within hooks of saved tensors or a dispatch mode computes the parts as one tensor.
        """
        if _places(fresh) == self.places:
            return fresh
        buffers = {number: fresh[number].new_empty(self.sizes[number]) for number, *_ in self.places}
        views = [buffers[number].as_strided(*place) for number, *place in self.places]
        for view, x in zip(views, fresh, strict=True):
            view.copy_(x)
        return views


def _numbers(outputs: Sequence[Tensor]) -> dict[int, int]:
    """Return the number of the first output in each storage."""
    return {x.untyped_storage()._cdata: i for i, x in reversed(list(enumerate(outputs)))}


def _places(outputs: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return the first output in the storage of each one, and its size, strides and offset there."""
    numbers = _numbers(outputs)
    return [(numbers[x.untyped_storage()._cdata], x.shape, x.stride(), x.storage_offset()) for x in outputs]


def freeze(module: nn.Module) -> Any:
    """Return a module with the parameters of now: `torch.func.functional_call` puts the others back."""
    frozen = copy.copy(module)
    frozen._parameters = dict(module._parameters)
    return frozen


def can_recompute(*outputs: Tensor) -> bool:
    """Return True if `recomputing` may replace what autograd saves.

    It may not where others do, as activation checkpointing and compilers.
    """
    return torch.is_grad_enabled() and are_plain(*outputs) and not has_saved_tensor_hooks()


def recomputing(
    compute: Callable[[], Sequence[Tensor]], module: nn.Module, inputs: Sequence[Tensor], *outputs: Tensor
) -> AbstractContextManager[Any]:
    """Return a context in which autograd saves none of `outputs`: a backward calls `compute` for them.

    `compute` returns tensors with their bits and shapes, from `inputs` and the parameters of `module`. The
    backward raises RuntimeError if one of these, or a tensor that autograd saves, was changed in place.
    """
    device = outputs[0].device
    given = (*inputs, *module.parameters(recurse=False))
    kept = _Outputs(lambda: without_autocast(device, compute), given, outputs)
    return torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack)
