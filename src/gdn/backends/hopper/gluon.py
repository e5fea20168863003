"""Import Gluon's operations under one name each for Triton 3.6 to 3.9, which renamed some of them."""

from typing import TYPE_CHECKING, Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import base_value
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITCallable

from gdn.backends.triton.launch.kernels import Unread, defer, scalar_names

__all__ = [
    "barrier",
    "cp_async",
    "cp_async_arrive",
    "cp_async_commit",
    "cp_async_wait",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "jit",
    "join_descriptors",
    "kernel",
    "mbarrier",
    "mma_v2",
    "opaque",
    "recast",
    "struct",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
    "widen_bf16",
]

# bar.sync among the warps of a partition
barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
# view shared memory with another dtype, shape and layout; the old name raises in 3.9
recast: Any = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)
# cp.async from HBM to shared memory: async_load since 3.8; the old name raises in 3.9
cp_async: Any = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
cp_async_arrive: Any = async_copy.mbarrier_arrive
cp_async_commit: Any = async_copy.commit_group
cp_async_wait: Any = async_copy.wait_group
# TMA between HBM and shared memory: async_load and async_store since 3.8; the old names raise in 3.9
tma_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait: Any = tma.store_wait


if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**options: Any) -> Any:
        return lambda function: function


class _FieldNames(JITCallable):
    """Put a struct's field names, in order, into the cache key of each kernel that uses the struct.

    Up to Triton 3.7 the key of an aggregate lacks them: after two fields change places, the binary of the old
    order would be found on disk.
    """

    cache_key: Any = None  # a property of JITCallable
    used_global_vals: Any

    def __init__(self, names: tuple[str, ...]) -> None:
        self.cache_key, self.used_global_vals, self.__name__ = repr(names), {}, "fields"


@dataclass_transform(eq_default=False)
def struct(cls: Any) -> Any:
    """Make a class of named values that kernels construct, pass and unpack; the binary has no trace of it.

    A field may hold a tensor, shared memory, a TMA descriptor, another struct, None or a constant;
    annotations are for the reader. Fields cannot be assigned: make a new struct. Methods are decorated with
    `jit`.
    """
    names = tuple(cls.__annotations__)

    def init(self: Any, *values: Any, **named: Any) -> None:
        fields = dict(zip(names[: len(values)], values, strict=True)) | named
        if fields.keys() != set(names):
            raise TypeError(f"{cls.__name__}: expected {names}, got {tuple(fields)}")
        for name in names:
            x = fields[name]
            setattr(self, name, x if isinstance(x, base_value) else gl.constexpr(x))

    # without it Triton 3.6 and 3.7 compile __init__ as a part of the kernel
    init.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__init__, cls.__annotations__ = init, dict.fromkeys(names, base_value)
    # public as gluon.aggregate since Triton 3.8
    made = (getattr(gluon, "aggregate", None) or triton.language.core._aggregate)(cls)
    made.hash_attrs.append(_FieldNames(names))
    made.names = names
    return made


class UnreadGluon(Unread, GluonJITFunction):  # type: ignore[type-arg]
    """Stand for what `gluon.jit` returns."""

    triton_type = GluonJITFunction


def jit(function: Any) -> Any:
    """Apply gluon.jit, which reads the function's source at its first use: see `triton.launch.kernels`."""
    return defer(UnreadGluon, function) or gluon.jit(function)


@jit
def opaque(x):
    """Return x unchanged but opaque to the compiler: an optimisation barrier.

    Values derived from the result are computed where they are used. Otherwise the compiler would hoist them
    out of a loop and hold them in registers.
    """
    # a move in inline assembly that is declared impure: neither Triton nor LLVM looks into it
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@jit
def widen_bf16(x):
    """Return bf16 x in fp32, by one instruction a value.

    Triton's conversion takes two for the second of the two values in a register.
    """
    # early clobber (&): the first output is written before the last read of the input
    asm: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return gl.inline_asm_elementwise(asm, "=&r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@jit
def join_descriptors(a_d, b_d, c_d, d_d):
    """Return the TMA descriptors of consecutive rows of a tile as a tuple: two, or four."""
    if c_d is None:
        return (a_d, b_d)
    else:
        return (a_d, b_d, c_d, d_d)


def kernel(function: Any) -> Any:
    """Compile a kernel by gluon.jit without specialising on any scalar: see `triton.launch`.

    Pointers (`_ptr`), TMA descriptors (`_d`) and constants are specialised on as usual.
    """
    # one binary then serves every length, batch and head count
    names = scalar_names(function, ("_ptr", "_d"))
    return defer(UnreadGluon, function, names) or gluon.jit(function, do_not_specialize=names)
