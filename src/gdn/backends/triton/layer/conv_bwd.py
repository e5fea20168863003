# mypy: disable-error-code="assignment"
"""Compute every gradient of the causal convolution in one pass over tokens.

    dpre_t = act'(pre_t) dy_t;   dx_t = sum_j weight[:, j] dpre_{t+W-1-j}
    dweight[:, j] = sum_t dpre_t x_{t-W+1+j};   dbias = sum_t dpre_t

The pass recomputes pre from the last W inputs, keeps the last W of dpre in registers, and computes dx W - 1
tokens behind. The sums over a program's tokens stay in registers; a second kernel adds those of all programs
in order. Programs own blocks of tokens as in the forward, and each reads W - 1 tokens of the next block.

Bytes per token and channel in bf16: 6.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gdn.backends import eager
from gdn.backends.triton import sums
from gdn.backends.triton.launch import Launch, PlanCache, device_guard, jit, kernel, machine, unit_of
from gdn.backends.triton.layer.conv import (
    MAX_TAPS,
    Source,
    apply_filter,
    choose_tiling,
    conv_key,
    drop_empty,
    find_sequence,
    layout_key,
    load_bias,
    load_taps,
    load_window,
    next_sequence,
    owned_range,
    program_block,
    sequence_range,
    strides_or_zeros,
    to_kernel_layout,
)
from gdn.backends.triton.lib import sigmoid
from gdn.notation import Channels, ConvState
from gdn.problem.layer import ConvProblem


@jit
def _zeros(COUNT: tl.constexpr, BD: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = zeros + (tl.zeros([BD], tl.float32),)
    return zeros


@jit
def _filter_transposed(past, taps, W: tl.constexpr):
    """Return dx of the token W - 1 before the newest of dpre `past`."""
    dx = taps[W - 1] * past[0]
    for i in tl.static_range(1, W):
        dx = tl.fma(taps[W - 1 - i], past[i], dx)
    return dx


class Part(NamedTuple):
    """Hold where a strip of channels reads dy: a tensor, its strides, and the first of its channels."""

    ptr: Any
    b: Any
    t: Any
    first: Any


@jit
def _choose_part(channel, part, other):
    """Return the part that holds this channel; `other` begins after `part`."""
    is_other = channel >= other.first
    return Part(
        tl.where(is_other, other.ptr, part.ptr), tl.where(is_other, other.b, part.b),
        tl.where(is_other, other.t, part.t), tl.where(is_other, other.first, part.first),
    )  # fmt: skip


@kernel
def _conv_bwd_kernel(
    x_ptr, weight_ptr, bias_ptr, initial_ptr, cu_seqlens_ptr, dy_ptr, dfinal_ptr, dx_ptr, dinitial_ptr,
    partial_ptr, dk_ptr, dv_ptr, x_b, x_t, dy_b, dy_t, D, T, N, initial_n, initial_d, initial_l, dfinal_n,
    dfinal_d, dfinal_l, tokens, num_blocks, dk_b, dk_t, k_first, dv_b, dv_t, v_first,
    W: tl.constexpr, SILU: tl.constexpr, U: tl.constexpr, BD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # dx, and partial sums of dweight and dbias; formulas at the top of the file.
    # Program (row, block of tokens, strip of channels), strips fastest; grid: B * blocks * strips; 1, 2 or 4
    # warps; no PDL. Taps, the last W inputs, the last W of dpre and the sums stay in registers.
    # Reads x and dy once, and W - 1 tokens of the next block; writes dx: 6 bytes per token and channel in
    # bf16. It also writes gradients of held windows, and W + 1 fp32 sums per channel and program.
    # With dk_ptr and dv_ptr, dy is three tensors, and each strip lies in one of them.
    row, first, channels, is_channel = program_block(D * UNIT, tokens, num_blocks, BD)
    taps = load_taps(weight_ptr, channels, is_channel, W)
    bias = load_bias(bias_ptr, channels, is_channel)
    if dk_ptr is not None:
        strip = (tl.program_id(0) % tl.cdiv(D * UNIT, BD)) * BD
        part = Part(dy_ptr, dy_b, dy_t, k_first * 0)
        part = _choose_part(strip, part, Part(dk_ptr, dk_b, dk_t, k_first * UNIT))
        part = _choose_part(strip, part, Part(dv_ptr, dv_b, dv_t, v_first * UNIT))
        dy_ptr = part.ptr - part.first
        dy_b = part.b
        dy_t = part.t
    x_t = x_t.to(tl.int64) * UNIT
    dy_t = dy_t.to(tl.int64) * UNIT
    dx_t = D.to(tl.int64) * UNIT
    x_ptr += row.to(tl.int64) * x_b * UNIT + channels
    dy_ptr += row.to(tl.int64) * dy_b * UNIT + channels
    dx_ptr += row.to(tl.int64) * T * dx_t + channels
    dtaps = _zeros(W, BD)
    dbias = tl.zeros([BD], tl.float32)
    n = find_sequence(cu_seqlens_ptr, N, row, first)
    start, end = sequence_range(cu_seqlens_ptr, N, n, T)
    while (n <= N) & (start < first + tokens):
        begin, stop = owned_range(start, end, first, tokens, W)
        is_valid = n < N
        is_read = is_channel & is_valid
        initial = initial_ptr
        if initial_ptr is not None:
            initial = initial_ptr + n.to(tl.int64) * initial_n + channels * initial_d.to(tl.int64)
        source = Source(x_ptr, x_t, initial, initial_l, W - 1)
        window = load_window(source, start, begin, is_read, is_valid, W)
        past = _zeros(W - 1, BD)
        for t in range(begin, stop + W - 1, U):
            inputs = ()
            seeds = ()
            # all loads of U tokens are issued before the first is used, to hide the latency of HBM
            for u in tl.static_range(U):
                is_token = is_read & (t + u < end)
                inputs = inputs + (tl.load(x_ptr + (t + u) * x_t, mask=is_token, other=0.0),)
                seeds = seeds + (tl.load(dy_ptr + (t + u) * dy_t, mask=is_token, other=0.0),)
            for u in tl.static_range(U):
                window = window + (inputs[u].to(tl.float32),)
                dpre = seeds[u].to(tl.float32)
                if SILU:
                    # pre from the window in registers: loading it from HBM would cost 2 bytes per input
                    pre = apply_filter(window, taps, bias, W, False)
                    s = sigmoid(pre)
                    dpre = dpre * s * (1.0 + pre * (1.0 - s))
                past = past + (dpre,)
                dx = _filter_transposed(past, taps, W)
                # tokens of the next block are summed by its program
                dpre_owned = tl.where(t + u < stop, dpre, 0.0)
                for j in tl.static_range(W):
                    dtaps = dtaps[1:] + (tl.fma(dpre_owned, window[j], dtaps[0]),)
                dbias += dpre_owned
                token = t + u - (W - 1)
                is_owned = is_channel & (token < stop)
                if dfinal_ptr is not None:
                    column = token - end + W - 1
                    dfinal = (
                        dfinal_ptr
                        + n.to(tl.int64) * dfinal_n
                        + channels * dfinal_d.to(tl.int64)
                        + column * dfinal_l
                    )
                    dx += tl.load(dfinal, mask=is_read & is_owned & (column >= 0), other=0.0).to(tl.float32)
                tl.store(
                    dx_ptr + token * dx_t, dx.to(dx_ptr.dtype.element_ty), mask=is_owned & (token >= begin)
                )
                if dinitial_ptr is not None:
                    # tokens before the sequence exist only in the program that owns its start
                    dinitial = (
                        dinitial_ptr + (n.to(tl.int64) * dx_t + channels) * (W - 1) + (token - start + W - 1)
                    )
                    is_before = is_read & (token < start) & (begin == start)
                    tl.store(dinitial, dx.to(dinitial_ptr.dtype.element_ty), mask=is_before)
                window = window[1:]
                past = past[1:]
        n = next_sequence(cu_seqlens_ptr, N, n)
        start, end = sequence_range(cu_seqlens_ptr, N, n, T)
    block = tl.program_id(0) // tl.cdiv(D * UNIT, BD)
    # partial sums to HBM, without atomics: `sums` adds them in a fixed order
    for j in tl.static_range(W):
        tl.store(
            partial_ptr + (block.to(tl.int64) * (W + 1) + j) * dx_t + channels, dtaps[j], mask=is_channel
        )
    tl.store(partial_ptr + (block.to(tl.int64) * (W + 1) + W) * dx_t + channels, dbias, mask=is_channel)


@dataclass(frozen=True)
class _BackwardPlan:
    gradients: Launch
    add: Launch
    num_blocks: int
    has_parts: bool  # the kernel reads the parts of dy, which lie in whole strips of channels


_plans: PlanCache[_BackwardPlan] = PlanCache()


def causal_conv1d_bwd(
    problem: ConvProblem, dy: Channels | tuple[Channels, ...], dfinal: ConvState | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight, bias and initial state, each in its tensor's dtype.

    dy may be parts of channels: three parts of whole strips are read where they are.
    """
    if problem.W > MAX_TAPS:
        return eager.BACKEND.causal_conv1d_bwd(problem, dy, dfinal)  # type: ignore[no-any-return]
    p = to_kernel_layout(problem)
    parts = [x if x.stride(2) == 1 else x.contiguous() for x in (dy if isinstance(dy, tuple) else (dy,))]
    if len({x.dtype for x in parts}) > 1 or len(parts) not in (1, 3):
        parts = [torch.cat(parts, -1)]
    initial = drop_empty(p.initial_state)
    with device_guard(p.x.device):
        key = (conv_key(p), *map(layout_key, parts), layout_key(dfinal))
        plan = _plans.get(key, lambda: _plan(p, parts, dfinal))
        if len(parts) > 1 and not plan.has_parts:
            parts = [torch.cat(parts, -1)]
        dx, dweight = p.x.new_empty(p.x.shape), p.weight.new_empty(p.weight.shape)
        dbias, dinitial = (None if x is None else x.new_empty(x.shape) for x in (p.bias, p.initial_state))
        partial = p.x.new_empty(plan.num_blocks, p.W + 1, p.x.shape[2], dtype=torch.float32)
        plan.gradients(
            p.x,
            p.weight,
            p.bias,
            initial,
            p.cu_seqlens,
            parts[0],
            drop_empty(dfinal),
            dx,
            drop_empty(dinitial),
            partial,
            *(parts[1:] or (None, None)),
        )
        plan.add(partial, dweight, dbias)
    return dx, dweight, dbias, dinitial


def _plan(p: ConvProblem, parts: Sequence[Tensor], dfinal: Tensor | None) -> _BackwardPlan:
    B, T, D = p.x.shape
    # registers: 8 channels per thread spill, and so do 4 tokens ahead next to the addresses of states
    unroll = 4 if p.initial_state is None and dfinal is None else 2
    tiling = choose_tiling(p, 4, unroll, max(64, p.W), 1 << 20, machine(p.x.device))
    firsts = list(accumulate((x.shape[2] for x in parts), initial=0))[1:-1]
    has_parts = len(parts) > 1 and not any(first % tiling.BD for first in firsts)
    dy_b, dy_t = parts[0].stride()[:2] if len(parts) == 1 or has_parts else (T * D, D)
    others = (
        [(*x.stride()[:2], first) for x, first in zip(parts[1:], firsts, strict=True)] if has_parts else []
    )
    unit = unit_of(*p.x.stride()[:2], dy_b, dy_t, D, *chain.from_iterable(others))
    scalars = (
        *(s // unit for s in (*p.x.stride()[:2], dy_b, dy_t)), D // unit, T, p.N,
        *strides_or_zeros(p.initial_state, 3), *strides_or_zeros(dfinal, 3), tiling.tokens, tiling.num_blocks,
        *(x // unit for x in chain.from_iterable(others or [(0, 0, 0)] * 2)),
    )  # fmt: skip
    constants = {"W": p.W, "SILU": p.activation == "silu", "U": tiling.U, "BD": tiling.BD, "UNIT": unit}
    # one partial sum per block of tokens: long blocks keep them few
    num_blocks = B * tiling.num_blocks
    gradients = Launch(_conv_bwd_kernel, num_blocks * tiling.strips, scalars, constants, tiling.num_warps)
    add = sums.add(num_blocks, p.W + 1, D, (1, p.W))
    return _BackwardPlan(gradients, add, num_blocks, has_parts)
