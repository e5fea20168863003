"""Spare Triton's interpreter the types that it constructs anew for every value. Call `install()` once.

The interpreter runs the frontend of the compiler for every operation of every program. An addition of
integers constructs some twenty types, their names and the tuples of their shapes, and a dozen more values to
look for an overflow. It then drops that result, since it asserts in debug mode only. Here the attributes of a
type are computed once for each name. numpy looks for the overflow, and an overflow fails. Operands of one
dtype are not promoted, and a function of the language is called without a wrapper.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

BUILTIN = tl.core.builtin(lambda: None).__code__  # of the wrapper that `builtin` puts around each function


def construct_once_per_shape(construct: Callable[..., None]) -> Callable[..., None]:
    """Wrap the __init__ of blocks: those of one name and shape share all but their element type."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    @wraps(construct)
    def wrapped(self: Any, element_ty: Any, shape: Any) -> None:
        at = element_ty.name, *shape
        attributes = known.get(at)
        if attributes is None:
            construct(self, element_ty, shape)
            known[at] = dict(vars(self))
            return
        own = self.__dict__
        own.update(attributes)
        own["element_ty"] = element_ty

    return wrapped


def construct_once_per_type(construct: Callable[..., None]) -> Callable[..., None]:
    """Wrap the __init__ of tensors: those of one type share all attributes but their handle."""
    known: dict[str, dict[str, Any]] = {}

    @wraps(construct)
    def wrapped(self: Any, handle: Any, type: Any) -> None:
        attributes = known.get(type.name)
        if attributes is None:
            construct(self, handle, type)
            known[type.name] = {**vars(self), "handle": None}
            return
        own = self.__dict__
        own.update(attributes)
        own["handle"], own["type"] = handle, type

    return wrapped


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


def convert_once(convert: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap the change of a block's element type: one result for each pair of names."""
    known: dict[tuple[str, str], Any] = {}

    @wraps(convert)
    def wrapped(self: Any, element_ty: Any) -> Any:
        at = self.name, element_ty.name
        if at not in known:
            known[at] = convert(self, element_ty)
        return known[at]

    return wrapped


def broadcast_by_name(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the broadcast of two values: Triton says once for two names of types which types they become.

    A type that stays needs nothing, a tile is a view, and a scalar fills a tile.
    """
    known: dict[tuple[str, str], tuple[Any, Any]] = {}
    handle_of, tensor_of, full = interpreter.TensorHandle, tl.core.tensor, np.full

    def change(x: Any, ty: Any) -> Any:
        data = x.handle.data
        if x.type.is_block():
            data = np.broadcast_to(data, ty.shape)
        else:
            data = full(ty.shape, data[0] if data.ndim else data, interpreter._get_np_dtype(x.handle.dtype))
        return tensor_of(handle_of(data, x.handle.dtype.scalar), ty)

    @wraps(broadcast)
    def wrapped(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a is b:
            return lhs, rhs
        found = known.get((a.name, b.name))
        if found is None:
            wide = broadcast(self, lhs, rhs)
            # the result of tiles of different ranks is left to Triton
            if not (a.is_block() and b.is_block()) or len(a.shape) == len(b.shape):
                known[a.name, b.name] = tuple(
                    None if x is y else y.type for x, y in zip((lhs, rhs), wide, strict=True)
                )
            return wide
        left, right = found
        return (lhs if left is None else change(lhs, left)), (rhs if right is None else change(rhs, right))

    return wrapped


def check_size(self: Any) -> None:
    """Check as the __post_init__ of handles does that the elements of an array fit their type."""
    dtype = self.dtype
    if type(dtype) is not tl.core.pointer_type and self.data.itemsize > max(dtype.primitive_bitwidth, 8) // 8:
        raise ValueError(f"{self.data.dtype} exceeds {dtype}")


def promote_unless_alike(promote: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the promotion of two operands: of one dtype, or pointer and offset, they need a broadcast alone.

    A number takes the dtype of the fp32 or int32 operand beside it. All other operands are left to Triton.
    """
    tensor, fp32, int32 = tl.core.tensor, tl.float32, tl.int32

    @wraps(promote)
    def wrapped(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if type(lhs) is tensor:
            dtype = lhs.dtype
            if type(rhs) is tensor:
                # Triton divides two numbers of 16 bits in fp32
                alike = rhs.dtype is dtype and (dtype is fp32 or not div_or_mod) and not dtype.is_ptr()
                if alike or allow_lhs_ptr and dtype.is_ptr() and rhs.dtype.is_int():
                    return self.broadcast_impl_value(lhs, rhs)
            elif arithmetic_check and (
                dtype is fp32 and type(rhs) in (int, float)
                or dtype is int32 and type(rhs) is int and -(2**31) <= rhs < 2**31
            ):  # fmt: skip
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, dtype))
        return promote(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return wrapped


def call_without_wrapper(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Patch a function of the language as Triton's `_patch_attr` does, without the check of its wrapper."""
    semantic = TritonSemantic(builder)
    function = member.__wrapped__ if member.__code__ is BUILTIN else member

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


def unwrap_tensors_first(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap the search of an argument for constants: a tensor, a number and None hold none."""
    plain = frozenset((tl.core.tensor, int, float, bool, str, type(None)))
    return wraps(unwrap)(lambda o: o if type(o) in plain else unwrap(o))


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
    """Patch the types, the promotion of operands and the overflow check in place."""
    core = tl.core
    core.block_type.__init__ = construct_once_per_shape(core.block_type.__init__)
    interpreter.TensorHandle.__post_init__ = check_size
    core.tensor.__init__ = construct_once_per_type(core.tensor.__init__)
    core.block_type.with_element_ty = convert_once(core.block_type.with_element_ty)
    core.dtype.__eq__ = compare_identity_first(core.dtype.__eq__)
    core.pointer_type.__eq__ = compare_identity_first(core.pointer_type.__eq__)
    interpreter._get_np_dtype = compute_once_per_name(interpreter._get_np_dtype)
    TritonSemantic.broadcast_impl_value = broadcast_by_name(TritonSemantic.broadcast_impl_value)
    TritonSemantic.binary_op_sanitize_overflow_impl = find_overflow
    TritonSemantic.binary_op_type_checking_impl = promote_unless_alike(
        TritonSemantic.binary_op_type_checking_impl
    )
    interpreter._patch_attr = call_without_wrapper
    core._unwrap_if_constexpr = unwrap_tensors_first(core._unwrap_if_constexpr)
