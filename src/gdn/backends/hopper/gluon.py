"""Import Gluon's operations under one name each for Triton 3.6 to 3.9, which renamed some of them."""

import inspect
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "barrier",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "here",
    "kernel",
    "mbarrier",
    "mma_v2",
    "recast",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

# bar.sync among the warps of a partition
barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
# view shared memory with another dtype, shape and layout; the old name raises in 3.9
recast: Any = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)
# TMA between HBM and shared memory: async_load and async_store since 3.8; the old names raise in 3.9
tma_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait: Any = tma.store_wait


@gluon.jit
def here(x):
    """Return x unchanged but opaque to the compiler: an optimisation barrier.

    Values derived from the result are computed where they are used. Otherwise the compiler would hoist them
    out of a loop and hold them in registers.
    """
    # a move in inline assembly that is declared impure: neither Triton nor LLVM looks into it
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


def kernel(function: Any) -> Any:
    """Compile a kernel by gluon.jit without specialising on any scalar: see `triton.launch`.

    Pointers (`_ptr`), TMA descriptors (`_d`) and constants are specialised on as usual.
    """
    # one binary then serves every length, batch and head count
    names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if not name.endswith(("_ptr", "_d")) and parameter.annotation is not gl.constexpr
    ]
    return gluon.jit(function, do_not_specialize=names)
