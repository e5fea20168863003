"""Launching: a kernel with everything but its tensors fixed, and a cheap way to find it again.

A kernel's parameters come in this order: tensors (`x_ptr`), numbers, constants (`tl.constexpr`, capitals).
Numbers are never specialised on: another length, batch or head count runs the same binary. A stride that
loads are vectorised along is therefore passed in UNITs of elements, UNIT being a constant (`unit_of`).
"""

import inspect
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
import triton
from torch import Tensor

# where set, launches are put here instead of run: how kernels are compiled for machines that are not there
recorder: list[tuple["Launch", tuple[Tensor | None, ...]]] | None = None
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels run on CPU tensors
ALIGNMENT = 16  # bytes that every pointer must be a multiple of for the compiled handle to be used again
Plan = TypeVar("Plan")


def kernel(function: Any) -> Any:
    """triton.jit that specialises on no number: all but pointers and constants are runtime values."""
    names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if not name.endswith("_ptr") and parameter.annotation is not triton.language.constexpr
    ]
    return triton.jit(function, do_not_specialize=names)


@dataclass
class Launch:
    """kernel[grid](*tensors, *numbers, **constants), some 6 us of host time from the second call on.

    A plan holds launches for one set of shapes, strides, dtypes and one device, so that all that can differ
    from call to call is where the tensors lie. The compiled handle is kept after the first launch whose
    tensors are all aligned; others go through Triton's own dispatch.
    """

    kernel: Any
    grid: int
    numbers: tuple[int | float, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 1
    _handle: Any = field(default=None, repr=False)
    _tail: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor | None) -> None:
        """Run on the current stream of the first tensor's device, which must be the current device."""
        if self.grid == 0:
            return
        if recorder is not None:
            recorder.append((self, tensors))
            return
        if self._handle is None:
            self._first(tensors)
            return
        pointers, bits = [], 0
        for x in tensors:
            pointer = None if x is None else x.data_ptr()
            bits |= pointer or 0
            pointers.append(pointer)
        if bits % ALIGNMENT:
            self._dispatch(tensors)
            return
        handle, (device, *rest) = self._handle, self._tail
        stream = torch._C._cuda_getCurrentRawStream(device)
        grid, hooks = (self.grid, 1, 1), (None, None, None)
        handle.run(*grid, stream, handle.function, handle.packed_metadata, *hooks, *pointers, *rest)

    def _dispatch(self, tensors: tuple[Tensor | None, ...]) -> Any:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return self.kernel[(self.grid,)](*tensors, *self.numbers, **self.constants, **options)

    def _first(self, tensors: tuple[Tensor | None, ...]) -> None:
        compiled = self._dispatch(tensors)
        aligned = all(x is None or x.data_ptr() % ALIGNMENT == 0 for x in tensors)
        small = all(isinstance(x, float) or -(2**31) <= x < 2**31 for x in self.numbers)
        if INTERPRETED or not aligned or not small:
            return
        device = next(x.device.index for x in tensors if x is not None)
        self._tail = (device, *self.numbers, *(None for _ in self.constants))
        self._handle = compiled


class Plans(Generic[Plan]):
    """Plans by the values they were made from, at most `limit`; then it starts anew."""

    def __init__(self, limit: int = 2048) -> None:
        self.limit = limit
        self.found: dict[Hashable, Plan] = {}

    def get(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        plan = self.found.get(key)
        if plan is None:
            if len(self.found) >= self.limit:
                self.found.clear()
            plan = self.found[key] = make()
        return plan


def unit_of(*strides: int) -> int:
    """The largest of 16, 8, 4, 2, 1 that divides every stride: what strides are counted in."""
    bits = 16
    for stride in strides:
        bits |= stride
    return bits & -bits


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the tensors' device the current one; costs nothing where it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _here
    return torch.cuda.device(device)


_here = nullcontext()


@dataclass(frozen=True)
class Machine:
    """What configurations are chosen by."""

    kind: str  # cuda or hip
    capability: int  # 10 * major + minor
    num_sms: int
    shared: int  # bytes of shared memory that a program may have


@lru_cache
def machine(device: torch.device) -> Machine:
    """The machine behind a device; an imaginary H200 where kernels are interpreted on the CPU."""
    if device.type != "cuda":
        return Machine("cuda", 90, 132, 227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    kind = "hip" if torch.version.hip else "cuda"
    capability = 10 * properties.major + properties.minor
    shared = getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
    return Machine(kind, capability, properties.multi_processor_count, shared)
