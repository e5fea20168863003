"""Gluon's names as they are in Triton 3.6 to 3.9, which renamed some of them."""

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

barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
# shared memory as another dtype, shape and layout; the name before it raises in 3.9
recast: Any = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)
# async_load and async_store since 3.8; the names before them raise in 3.9
tma_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait: Any = tma.store_wait


@gluon.jit
def here(x):
    """x, which no compiler has known before: what is made of it is made here, not held through a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


def kernel(function: Any) -> Any:
    """gluon.jit that specialises on no number: see `triton.launch`."""
    names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if not name.endswith(("_ptr", "_d")) and parameter.annotation is not gl.constexpr
    ]
    return gluon.jit(function, do_not_specialize=names)
