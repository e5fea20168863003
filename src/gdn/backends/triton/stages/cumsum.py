"""Sum log decays within chunks, and compute the adjoint; launch any stage of the chunked rule.

    G_i = sum of g_j over j <= i in i's chunk, in fp64;   g = -exp(A_log) softplus(a + dt_bias), or given
    dg_j = sum of dG_i over i >= j;   da = -exp(A_log) sigmoid(a + dt_bias) dg
    dA_log = sum g dg;   ddt_bias = sum da

A g below RESET counts as RESET and has no gradient. Bytes per token and head with fp32 logits: 12 forward, 16
backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton import sums
from gdn.backends.triton.chunks import Table, locate
from gdn.backends.triton.launch import Launch, PlanCache, device_guard, jit, kernel, machine
from gdn.backends.triton.layer.gate import decay_rate, load_heads
from gdn.notation import GSum, HeadParam, Offsets, PerHead
from gdn.problem import CHUNK, RESET

HEADS = 16  # heads of a program: 32 bytes of 16-bit gates per token, one sector of HBM


@jit
def _locate_tile(table_ptr, T, HV, chunks_per_row, C: tl.constexpr, BH: tl.constexpr):
    """Return this program's heads, and offsets and mask [C, BH] of its chunk's tokens and heads."""
    strips = tl.cdiv(HV, BH)
    row, first, length = locate(tl.program_id(0) // strips, table_ptr, T, chunks_per_row, C)
    heads = (tl.program_id(0) % strips) * BH + tl.arange(0, BH)
    tokens = tl.arange(0, C)
    indices = (row * T.to(tl.int64) + first + tokens)[:, None] * HV + heads[None, :]
    return heads, indices, (tokens < length)[:, None] & (heads < HV)[None, :]


@kernel
def _cumsum_kernel(
    table_ptr, g_ptr, A_log_ptr, dt_bias_ptr, G_ptr, T, HV, chunks_per_row,
    C: tl.constexpr, BH: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    # G for one chunk and BH heads.
    # Program (chunk, strip of heads): a tile [C, BH]. Grid: entries * cdiv(HV, BH), strips fastest; 4 warps;
    # no PDL. Reads g or a logit once; writes sums in fp64, 8 bytes per token and head.
    heads, indices, mask = _locate_tile(table_ptr, T, HV, chunks_per_row, C, BH)
    g = tl.load(g_ptr + indices, mask=mask, other=0.0).to(tl.float32)
    if A_log_ptr is not None:
        A_log, bias = load_heads(A_log_ptr, dt_bias_ptr, heads, heads < HV)
        g, _ = decay_rate(g, A_log, bias)
        g = tl.where(mask, -g, 0.0)
    g = tl.where(g < RESET, RESET, g).to(tl.float64)
    # fp64: a difference of sums is the exponent of a decay, and fp32 sums would lose it
    tl.store(G_ptr + indices, tl.cumsum(g, 0), mask=mask)


@kernel
def _cumsum_bwd_kernel(
    table_ptr, g_ptr, A_log_ptr, dt_bias_ptr, dG_ptr, dg_ptr, partial_ptr, T, HV, chunks_per_row,
    C: tl.constexpr, BH: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    # dg or da for one chunk and BH heads, with partial sums of dA_log and ddt_bias over the chunk.
    # Program (chunk, strip of heads): a tile [C, BH]. Grid: entries * cdiv(HV, BH), strips fastest; 4 warps;
    # no PDL. Reads dG and g or a once; writes dg or da, and, with A_log, two fp32 sums per chunk and head.
    heads, indices, mask = _locate_tile(table_ptr, T, HV, chunks_per_row, C, BH)
    g = tl.load(g_ptr + indices, mask=mask, other=0.0).to(tl.float32)
    # the adjoint of a prefix sum is a suffix sum, along tokens in registers and shared memory
    dg = tl.cumsum(tl.load(dG_ptr + indices, mask=mask, other=0.0).to(tl.float64), 0, reverse=True)
    dg = dg.to(tl.float32)
    if A_log_ptr is None:
        dg = tl.where(g < RESET, 0.0, dg)
    else:
        A_log, bias = load_heads(A_log_ptr, dt_bias_ptr, heads, heads < HV)
        decay, slope = decay_rate(g, A_log, bias)
        # 0 times NaN or inf must not reach the partial sums
        is_zero = (dg == 0.0) | (-decay < RESET) | ~mask
        dA_log = tl.where(is_zero, 0.0, -decay * dg)
        dg = tl.where(is_zero, 0.0, -slope * dg)
        chunk = tl.program_id(0) // tl.cdiv(HV, BH)
        # partial sums to HBM, without atomics: `sums` adds them in a fixed order
        partial = partial_ptr + chunk.to(tl.int64) * (2 * HV) + heads
        tl.store(partial, tl.sum(dA_log, 0), mask=heads < HV)
        tl.store(partial + HV, tl.sum(dg, 0), mask=heads < HV)
    tl.store(dg_ptr + indices, dg.to(dg_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class _PackedSizes:
    """Describe the packed problem that a table is made for."""

    T: int
    N: int
    HV: int


@dataclass(frozen=True)
class _Stage:
    table: Table | None
    entries: int
    launch: Launch


_stages: PlanCache[_Stage] = PlanCache()


def count_entries(x: Tensor, cu_seqlens: Offsets | None) -> int:
    """Return the chunks that a grid covers."""
    B, T = x.shape[:2]
    if cu_seqlens is None:
        return B * triton.cdiv(T, CHUNK)
    return (T + len(cu_seqlens) * (CHUNK - 1)) // CHUNK


def launch_stage(
    kernel: Any,
    cu_seqlens: Offsets | None,
    tensors: Sequence[Tensor | None],
    HV: int,
    constants: dict[str, Any],
    grid: Callable[[int], int],
    scalars: tuple[float, ...] = (),
    num_warps: int = 4,
) -> None:
    """Launch kernel(table, *tensors, T, HV, chunks_per_row, *scalars, C=64, **constants).

    tensors[0] is [B, T, ...]; all tensors are contiguous. grid: maps the number of chunks to programs.
    """
    x = tensors[0]
    assert x is not None
    B, T = x.shape[:2]
    N = None if cu_seqlens is None else len(cu_seqlens) - 1
    dtypes = tuple(None if t is None else t.dtype for t in tensors)
    # a launch is kept per shape and dtype: the tensors are contiguous, so strides follow
    key = (kernel.__name__, B, T, HV, N, dtypes, tuple(constants.items()), scalars, num_warps, x.device)

    def make() -> _Stage:
        table = None if N is None else Table(_PackedSizes(T, N, HV), machine(x.device))  # type: ignore[arg-type]
        entries = count_entries(x, cu_seqlens)
        all_scalars = (T, HV, triton.cdiv(T, CHUNK), *scalars)
        launch = Launch(kernel, grid(entries), all_scalars, {"C": CHUNK, **constants}, num_warps)
        return _Stage(table, entries, launch)

    with device_guard(x.device):
        stage = _stages.get(key, make)
        table = None
        if stage.table is not None and cu_seqlens is not None:
            table = stage.table.make(cu_seqlens)
        stage.launch(table, *tensors)


def kernel_offsets(cu_seqlens: Offsets | None, x: Tensor) -> Offsets | None:
    """Return cu_seqlens as the kernels read it: contiguous, on x's device."""
    return None if cu_seqlens is None else cu_seqlens.to(x.device, non_blocking=True).contiguous()


def allocate_output(
    x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, cu_seqlens: Offsets | None
) -> Tensor:
    """Allocate an output; it is zero for packed problems, where no program writes tokens of no sequence."""
    return x.new_empty(shape, dtype=dtype) if cu_seqlens is None else x.new_zeros(shape, dtype=dtype)


def _strip_grid(HV: int) -> Callable[[int], int]:
    return lambda entries: entries * triton.cdiv(HV, HEADS)


def chunk_cumsum(g: PerHead, cu_seqlens: Offsets | None) -> GSum:
    """See `gdn.stages`."""
    return _cumsum(g, None, None, cu_seqlens)


def chunk_gate_cumsum(
    a: PerHead, A_log: HeadParam, dt_bias: HeadParam | None, cu_seqlens: Offsets | None
) -> GSum:
    """See `gdn.stages`."""
    return _cumsum(a, A_log.contiguous(), None if dt_bias is None else dt_bias.contiguous(), cu_seqlens)


def _cumsum(
    g: PerHead, A_log: HeadParam | None, dt_bias: HeadParam | None, cu_seqlens: Offsets | None
) -> GSum:
    g, cu_seqlens, HV = g.contiguous(), kernel_offsets(cu_seqlens, g), g.shape[2]
    G = allocate_output(g, g.shape, torch.float64, cu_seqlens)
    constants = {"BH": HEADS, "RESET": RESET}
    launch_stage(_cumsum_kernel, cu_seqlens, (g, A_log, dt_bias, G), HV, constants, _strip_grid(HV))
    return G


def chunk_cumsum_bwd(g: PerHead, dG: GSum, cu_seqlens: Offsets | None) -> PerHead:
    """See `gdn.stages`."""
    return _cumsum_bwd(g, None, None, dG, cu_seqlens)[0]


def chunk_gate_cumsum_bwd(
    a: PerHead, A_log: HeadParam, dt_bias: HeadParam | None, dG: GSum, cu_seqlens: Offsets | None
) -> tuple[PerHead, HeadParam, HeadParam | None]:
    """See `gdn.stages`."""
    bias = None if dt_bias is None else dt_bias.contiguous()
    da, partial = _cumsum_bwd(a, A_log.contiguous(), bias, dG, cu_seqlens)
    dA_log = A_log.new_empty(A_log.shape)
    ddt_bias = None if dt_bias is None else dt_bias.new_empty(dt_bias.shape)
    with device_guard(a.device):
        sums.add(len(partial), 2, a.shape[2], (0, 1))(partial, dA_log, ddt_bias)
    return da, dA_log, ddt_bias


def _cumsum_bwd(
    g: PerHead, A_log: HeadParam | None, dt_bias: HeadParam | None, dG: GSum, cu_seqlens: Offsets | None
) -> tuple[PerHead, Tensor]:
    """Return dg and the partial sums per chunk [entries, 2, HV]."""
    g, dG, cu_seqlens, HV = g.contiguous(), dG.contiguous(), kernel_offsets(cu_seqlens, g), g.shape[2]
    dg = allocate_output(g, g.shape, g.dtype, cu_seqlens)
    partial = g.new_empty(count_entries(g, cu_seqlens), 2, HV, dtype=torch.float32)
    constants = {"BH": HEADS, "RESET": RESET}
    tensors = (g, A_log, dt_bias, dG, dg, partial)
    launch_stage(_cumsum_bwd_kernel, cu_seqlens, tensors, HV, constants, _strip_grid(HV))
    return dg, partial
