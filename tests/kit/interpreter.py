"""Correct Triton's interpreter (3.6 to 3.9) for bfloat16 and tf32. Call `install()` before kernels run.

The interpreter stores a bf16 value as its bits in a uint16, and computes on these as if they were numbers.
Here an operation gets such operands as fp32, and its result is rounded to bf16, as the hardware does. Loads,
stores, reshapes and bit casts move the bits unchanged.

A dot in tf32 drops the last 13 bits of its fp32 operands, as tensor cores do. The maximum or minimum of a
number and NaN is the number, and exp2 is 0 below 2^-126, as on NVIDIA's GPUs.
"""

from functools import wraps

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from kit import interpreter_types

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder
# operations in which numpy computes with the numbers of an operand; all others move bits
ARITHMETIC = ("binary_op", "unary_op", "ternary_op", "create_fma", "create_rsqrt", "create_erf", "create_dot")


def is_bf16(handle):
    return handle.dtype.scalar.name == "bf16"


def widen(handle):
    """Return a bf16 handle as fp32, and any other handle unchanged."""
    if not isinstance(handle, Handle) or not is_bf16(handle):
        return handle
    return Handle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def round_to_bf16(handle, is_truncated=False):
    """Round fp32 numbers to the nearest bf16, ties to even, or towards zero."""
    bits = np.ascontiguousarray(handle.data, dtype=np.float32).view(np.uint32)
    # add half of the last kept bit, less 1 if that bit is even; a NaN would carry into its sign
    half = np.uint32(0) if is_truncated else np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    rounded = (bits + half) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)
    return Handle(np.where(np.isnan(handle.data), quiet, rounded).astype(np.uint16), tl.bfloat16)


def compute_in_fp32(operation):
    """Wrap an operation of the builder: operands are fp32, and the result has the last operand's dtype."""

    @wraps(operation)
    def wrapped(self, *args):
        for x in args:
            if type(x) is Handle and is_bf16(x):
                break
        else:
            return operation(self, *args)
        operands = [x for x in args if isinstance(x, Handle)]
        result = operation(self, *map(widen, args))
        if result.data.dtype == np.bool_ or not is_bf16(operands[-1]):
            return result
        return round_to_bf16(result)

    return wrapped


def truncate_dot_operands(dot):
    """Wrap a dot: where it asks for tf32, its fp32 operands are truncated to tf32."""

    @wraps(dot)
    def wrapped(self, a, b, acc, precision, *rest):
        if precision == interpreter._ir.INPUT_PRECISION.TF32:
            a, b = truncate_to_tf32(a), truncate_to_tf32(b)
        return dot(self, a, b, acc, precision, *rest)

    return wrapped


def truncate_to_tf32(handle):
    """Truncate fp32 to the 10 mantissa bits of tf32; 16-bit dtypes have no more bits."""
    if handle.dtype.scalar != tl.float32:
        return handle
    bits = np.ascontiguousarray(handle.data, dtype=np.float32).view(np.uint32)
    return Handle((bits & np.uint32(0xFFFFE000)).view(np.float32), tl.float32)


def cast_through_fp32(cast):
    """Wrap a cast: int, fp16 or fp64 to bf16 and back goes through fp32."""

    @wraps(cast)
    def wrapped(self, source, dtype):
        source = widen(source)
        if dtype.scalar != tl.bfloat16:
            return cast(self, source, dtype)
        return round_to_bf16(cast(self, source, tl.float32))

    return wrapped


def convert_with_rounding(convert):
    """Wrap a cast that has a rounding mode."""

    @wraps(convert)
    def wrapped(self, source, dtype, mode):
        if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            return round_to_bf16(source, is_truncated=mode == interpreter._ir.ROUNDING_MODE.RTZ)
        return convert(self, source, dtype, mode)

    return wrapped


def reduce_in_fp32(apply):
    """Wrap a reduction or scan of one or several tensors; each result has the dtype of its tensor."""

    @wraps(apply)
    def wrapped(self, tensors):
        if not isinstance(tensors, tuple):
            return wrapped(self, (tensors,))[0]
        results = apply(self, tuple(_tensor(x, widen) if is_bf16(x.handle) else x for x in tensors))
        pairs = zip(results, tensors, strict=False)
        return tuple(_tensor(y, round_to_bf16) if is_bf16(x.handle) else y for y, x in pairs)

    return wrapped


def _tensor(x, change):
    """Return a tensor with a changed handle."""
    handle = change(x.handle)
    shape = handle.dtype if not x.type.is_block() else tl.block_type(handle.dtype, list(x.type.shape))
    return tl.core.tensor(handle, shape)


def index_scalars(patch):
    """Wrap the patch of tensors: int() of an array of one element, which numpy 2.4 wants without axes."""

    @wraps(patch)
    def wrapped(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return wrapped


def patch_once_per_launch(patch):
    """Wrap the patch of a function's modules: a device function patches no module again within a launch.

    Triton patches the language at every call of a device function, though the launch has done it. Listing the
    members of its modules took a third of the time of an interpreted kernel.
    """
    patched, modules_of = set(), {}

    @wraps(patch)
    def wrapped(fn):
        if fn not in modules_of:
            modules_of[fn] = {id(x) for x in fn.__globals__.values() if x is tl or x is tl.core}
        modules = modules_of[fn]
        if patched and modules <= patched:
            return interpreter._LangPatchScope()
        scope, is_launch = patch(fn), not patched
        patched.update(modules)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (restore(), patched.clear())
        return scope

    return wrapped


def bf16_constant(self, value):
    return round_to_bf16(Handle(np.array([value], dtype=np.float32), tl.float32))


def flush_subnormals(exp2):
    """Wrap exp2 so that fp32 results below 2^-126 are 0."""

    @wraps(exp2)
    def wrapped(self, x):
        result = exp2(self, x)
        if result.dtype.scalar == tl.float32:
            result.data = np.where(result.data < np.float32(2.0**-126), np.float32(0), result.data)
        return result

    return wrapped


def prefer_numbers(operation):
    """Return a maximum or minimum that prefers a number to NaN."""
    return lambda self, x, y: self.binary_op(x, y, operation)


def install():
    """Patch the interpreter in place, once."""
    if hasattr(Builder.cast_impl, "__wrapped__"):
        return
    for name in ARITHMETIC:
        setattr(Builder, name, compute_in_fp32(getattr(Builder, name)))
    Builder.create_dot = truncate_dot_operands(Builder.create_dot)
    Builder.create_exp2 = flush_subnormals(Builder.create_exp2)
    Builder.create_maxnumf, Builder.create_minnumf = prefer_numbers(np.fmax), prefer_numbers(np.fmin)
    Builder.cast_impl = cast_through_fp32(Builder.cast_impl)
    Builder.create_fp_to_fp = convert_with_rounding(Builder.create_fp_to_fp)
    Builder.get_bf16 = bf16_constant
    scope = interpreter.ReduceScanOpInterface
    scope.apply = reduce_in_fp32(scope.apply)
    interpreter._patch_lang_tensor = index_scalars(interpreter._patch_lang_tensor)
    interpreter._patch_lang = patch_once_per_launch(interpreter._patch_lang)
    interpreter_types.install()
