"""Declare kernels so that no scalar is specialised on, and pass strides so that loads still vectorise.

Triton compiles another binary for an integer that is 1 or divisible by 16. Here another number of tokens,
sequences or heads must not compile anything, so scalars are plain runtime values. A stride of unknown
divisibility would prevent 16-byte loads from HBM; strides are therefore passed in UNITs of elements, and UNIT
is a constant of the kernel.
"""

import inspect
from typing import Any

import triton

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels run on CPU tensors


def kernel(function: Any) -> Any:
    """Apply triton.jit without specialisation on scalars: these stay runtime values."""
    names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if not name.endswith("_ptr") and parameter.annotation is not triton.language.constexpr
    ]
    return triton.jit(function, do_not_specialize=names)


def unit_of(*strides: int) -> int:
    """Return the largest of 16, 8, 4, 2, 1 that divides every stride: strides are counted in it."""
    bits = 16
    for stride in strides:
        bits |= stride
    return bits & -bits
