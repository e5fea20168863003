"""Spare Triton's interpreter the types that it constructs anew for every value. Call `install()` once.

The interpreter runs the frontend of the compiler for every operation of every program. An addition of
integers constructs some twenty types, their names and the tuples of their shapes, and a dozen more values to
look for an overflow. It then drops that result, since it asserts in debug mode only. Here the attributes of a
type are computed once for each name. numpy looks for the overflow, and an overflow fails.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def compute_once(construct: Callable[..., None], key: Callable[..., Any], *own: str) -> Callable[..., None]:
    """Wrap an __init__: objects of one key share their attributes, except `own`, the arguments' names."""
    known: dict[Any, dict[str, Any]] = {}

    @wraps(construct)
    def wrapped(self: Any, *args: Any) -> None:
        at = key(*args)
        if at not in known:
            construct(self, *args)
            known[at] = {name: x for name, x in vars(self).items() if name not in own}
        else:
            vars(self).update(known[at])
            vars(self).update(zip(own, args, strict=False))

    return wrapped


def _of_block(element_ty: Any, shape: Any) -> tuple[Any, ...]:
    return element_ty.name, *(s.value if isinstance(s, tl.constexpr) else s for s in shape)


def compare_identity_first(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Wrap the == of types: a type equals itself without a look at its name."""
    return wraps(equal)(lambda self, other: self is other or equal(self, other))


def compute_once_per_name(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a function of a type: its results are kept by the type's name."""
    known: dict[str, Any] = {}

    @wraps(convert)
    def wrapped(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = convert(dtype)
        return known[dtype.name]

    return wrapped


def broadcast_unless_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the broadcast of two values: two tiles of one shape need none."""

    @wraps(broadcast)
    def wrapped(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a is b or a.is_block() and b.is_block() and list(a.shape) == list(b.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return wrapped


def find_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Callable[..., Any]) -> None:
    """Fail if +, - or * of signed integers of fewer than 64 bits leaves their range; unsigned ones wrap."""
    dtype = lhs.type.scalar
    if dtype.int_bitwidth >= 64 or dtype.is_int_unsigned():
        return
    operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[binary_op.__name__]
    wide = operation(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
    fits = wide.min() >= dtype.get_int_min_value() and wide.max() <= dtype.get_int_max_value()
    assert fits, f"int{dtype.int_bitwidth} overflow detected for operation {binary_op.__name__}"


def install() -> None:
    """Patch the types and the overflow check in place."""
    core = tl.core
    core.block_type.__init__ = compute_once(core.block_type.__init__, _of_block, "element_ty")
    core.tensor.__init__ = compute_once(core.tensor.__init__, lambda _, type: type.name, "handle", "type")
    core.dtype.__eq__ = compare_identity_first(core.dtype.__eq__)
    core.pointer_type.__eq__ = compare_identity_first(core.pointer_type.__eq__)
    interpreter._get_np_dtype = compute_once_per_name(interpreter._get_np_dtype)
    TritonSemantic.broadcast_impl_value = broadcast_unless_alike(TritonSemantic.broadcast_impl_value)
    TritonSemantic.binary_op_sanitize_overflow_impl = find_overflow
