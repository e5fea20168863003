"""Compute dq, dk and dg of 64 key channels of a chunk at once, where their decays fit fp32.

With a and m of `channel_sums`, e^a q, e^-a k and so on are operands in bf16, and

    dq = e^a (E_1 (e^-a k)) + e^m (E_2 (e^m k)) + ...        E_1: pairs within a half, E_2: between the halves

are MMAs of all tokens. dg adds up t = q dq - k dk of each part over the tokens that a row of weights marks.
Both dq and dk of a part have the factors that were rounded to bf16, and t multiplies by the same ones. So the
terms of a pair whose tokens are both behind a token cancel to fp32, and what is left is
the rounding of the factors.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdn.backends.triton.lib import column_mask, dot, load_rows, load_rstd, operand_dtype
from gdn.backends.triton.rule.channel_sums import (
    add_tokens,
    decay_in,
    decay_out,
    in_sum,
    middle_decay,
    opaque_tokens,
    round_bf16,
)
from gdn.backends.triton.rule.channels import channel_decays, gate_bwd, load_logits
from gdn.backends.triton.rule.gradients import state_block
from gdn.backends.triton.rule.pairs import BETA, factor


class Chunk(NamedTuple):
    """Say where a chunk of a value head is: its tokens, tiles of all chunks and of the group, and heads."""

    token_range: Any
    place: Any
    tile: Any
    group_tile: Any
    head: Any
    key_head: Any
    T: Any
    HV: Any
    num_heads: Any


class Gate(NamedTuple):
    """Hold the scalars of the gate, and the scale of q."""

    rate: Any
    lower_bound: Any
    scale: Any


class Tensors(NamedTuple):
    """Hold what the gradients of a strip read and write."""

    q: Any
    k: Any
    g: Any
    dt_bias_ptr: Any
    q_rstd_ptr: Any
    k_rstd_ptr: Any
    S_in_ptr: Any
    dS_ptr: Any
    do: Any
    dv_ptr: Any
    v_new_ptr: Any
    pairs_ptr: Any
    factors_ptr: Any
    dq_ptr: Any
    dk_ptr: Any
    dg_ptr: Any
    biases_ptr: Any


@triton.jit
def load_decays(
    x, at, gate, ks, K: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, RAW: tl.constexpr,
    BOUNDED: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """Return g [C, channels] of a chunk."""
    logits = load_logits(x.g, x.dt_bias_ptr, at.token_range, at.head, ks, K, C, UNIT)
    is_token = tl.arange(0, C) < at.token_range.length
    return channel_decays(logits, gate.rate, gate.lower_bound, is_token, RAW, BOUNDED, RESET)


@triton.jit
def load_normalized(x, at, ks, K: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr):
    """Return q and k [C, channels] of a chunk in fp32, normalised where the call asks for it."""
    span = at.token_range
    q = load_rows(x.q, span, at.key_head, ks, K, C, UNIT).to(tl.float32)
    k = load_rows(x.k, span, at.key_head, ks, K, C, UNIT).to(tl.float32)
    q_rstd = load_rstd(x.q_rstd_ptr, span.row, span.first, span.length, at.key_head, at.T, at.num_heads, C)
    k_rstd = load_rstd(x.k_rstd_ptr, span.row, span.first, span.length, at.key_head, at.T, at.num_heads, C)
    return q * q_rstd[:, None], k * k_rstd[:, None]


@triton.jit
def load_values(x, at, vs, V: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr):
    """Return do, dv and v_new [C, values] of a chunk."""
    tokens = tl.arange(0, C)
    is_value = column_mask(vs, V)[None, :]
    do = load_rows(x.do, at.token_range, at.head, vs, V, C, UNIT)
    dv_place = (at.place * at.HV + at.head) * V + (tokens[:, None] * (at.HV * V) + vs[None, :])
    is_token = (tokens < at.token_range.length)[:, None]
    dv = tl.load(x.dv_ptr + dv_place, mask=is_token & is_value, other=0.0)
    v_new_place = at.group_tile * (C * V) + (tokens[:, None] * V + vs[None, :])
    v_new = tl.load(x.v_new_ptr + v_new_place, mask=is_value, other=0.0)
    return do, dv, v_new


@triton.jit
def store_rows(ptr, at, ks, rows, K: tl.constexpr, C: tl.constexpr):
    """Store rows [C, channels] of a chunk in a tensor [B, T, HV, K]."""
    tokens = tl.arange(0, C)
    place = (at.place * at.HV + at.head) * K + (tokens[:, None] * (at.HV * K) + ks[None, :])
    # tokens of no sequence get zero gradients
    mask = (tokens < tl.abs(at.token_range.length))[:, None] & column_mask(ks, K)[None, :]
    tl.store(ptr + place, rows.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_gate(
    x, at, gate, ks, dg, K: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, RAW: tl.constexpr,
    BOUNDED: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """Store the gradient of g or its logits, and its sums for dt_bias; return the term of dA_log."""
    # loaded again, so that no register holds the logits meanwhile
    logits = load_logits(x.g, x.dt_bias_ptr, at.token_range, at.head, ks, K, C, UNIT)
    is_token = tl.arange(0, C) < at.token_range.length
    g = channel_decays(logits, gate.rate, gate.lower_bound, is_token, RAW, BOUNDED, RESET)
    dx, along = gate_bwd(dg, g, logits, gate.rate, gate.lower_bound, RAW, BOUNDED, RESET)
    dx = tl.where(is_token[:, None], dx, 0.0)
    store_rows(x.dg_ptr, at, ks, dx, K, C)
    if x.biases_ptr is not None:
        tl.store(x.biases_ptr + at.tile * K + ks, tl.sum(dx.to(tl.float64), 0), mask=column_mask(ks, K))
    along = tl.where(is_token[:, None], along, 0.0)
    return tl.sum(tl.sum(along.to(tl.float64), 1), 0)


@triton.jit
def strip_by_sums(
    x, at, gate, ks, g, a, lowest, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    RAW: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, RESET: tl.constexpr,
    FP32_STATE: tl.constexpr,
):  # fmt: skip
    """Store dq, dk and dg of a strip of 64 channels; return its shares of dbeta and of dA_log.

    g: in units of log(2); a and lowest: of `sum_from_middle`.
    """
    q, k = load_normalized(x, at, ks, K, C, UNIT)
    dq, dk, dg = through_states(x, at, gate, q, k, g, lowest, ks, K, V, C, UNIT, PRECISION, FP32_STATE)
    i, j = opaque_tokens(lowest, 3), tl.arange(0, C)[None, :]
    late = i >= 32
    beta = factor(x.factors_ptr, at.tile, BETA, C)[:, None]
    # Between the halves E and F are in one square: E^T at keys of the first half, F at queries of the second.
    # So a product takes queries for one and keys for the other; e^m k of the second half has its beta.
    E_t, F = load_operands(x.pairs_ptr, at.group_tile, False, C)
    decay = middle_decay(g, i)
    decay_k = tl.where(late, beta, 1.0) * decay
    rows, both = round_bf16(q * decay), round_bf16(k * decay_k)
    rows_16, both_16 = rows.to(tl.bfloat16), both.to(tl.bfloat16)
    drows = tl.dot(tl.trans(E_t), both_16)
    dq += drows * decay
    change = rows * drows
    dboth = tl.dot(F, both_16)
    share = tl.sum(k * decay * dboth, 1)
    dboth = tl.dot(tl.trans(F), both_16, tl.dot(E_t, rows_16, dboth))
    dk += dboth * decay_k
    change += both * dboth
    dg = add_tokens(in_sum(j, opaque_tokens(lowest, 4), 32), change, dg)
    # within a half
    E_t, F = load_operands(x.pairs_ptr, at.group_tile, True, C)
    decay = tl.exp2(a)
    columns = round_bf16(k * tl.exp2(-a))
    columns_16 = columns.to(tl.bfloat16)
    drows = tl.dot(tl.trans(E_t), columns_16)
    rows = round_bf16(q * decay)
    dq += drows * decay
    store_rows(x.dq_ptr, at, ks, dq, K, C)
    change = rows * drows
    dcolumns = tl.dot(E_t, rows.to(tl.bfloat16))
    drows = tl.dot(F, columns_16)
    share += tl.sum(k * decay * drows, 1)
    decay *= beta
    rows = round_bf16(k * decay)
    dcolumns = tl.dot(tl.trans(F), rows.to(tl.bfloat16), dcolumns)
    dk += drows * decay + dcolumns * tl.exp2(-a)
    store_rows(x.dk_ptr, at, ks, dk, K, C)
    change += rows * drows - columns * dcolumns
    i = opaque_tokens(lowest, 5)
    dg = add_tokens(in_sum(j, i, 16), tl.where((i & 16) != 0, change, -change), dg)
    return share, store_gate(x, at, gate, ks, dg, K, C, UNIT, RAW, BOUNDED, RESET)


@triton.jit
def load_operands(pairs_ptr, tile, WITHIN: tl.constexpr, C: tl.constexpr):
    """Return E^T and F [64, 64] in bf16 of pairs within a half, or else between halves; zero elsewhere."""
    a = tl.arange(0, C)[:, None]
    b = tl.arange(0, C)[None, :]
    # loaded and not selected, so that they go to shared memory and not through registers
    mask = ((a >= 32) & (b >= 32)) | ((a < 32) & (b < 32))
    if not WITHIN:
        mask = ((a >= 32) & (b < 32)) | ((a < 32) & (b >= 32))
    square = pairs_ptr + tile * (2 * C * C) + (a * C + b)
    return tl.load(square, mask=mask, other=0.0), tl.load(square + C * C, mask=mask, other=0.0)


@triton.jit
def through_states(
    x, at, gate, q, k, g, lowest, ks, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, FP32_STATE: tl.constexpr,
):  # fmt: skip
    """Return the parts of dq, dk and dg [C, channels] that pass through S_in and dS."""
    operand: tl.constexpr = operand_dtype(x.k.ptr, FP32_STATE)
    N: tl.constexpr = ks.shape[0]
    do_S = tl.zeros([C, N], tl.float32)
    dv_S = tl.zeros([C, N], tl.float32)
    v_dS = tl.zeros([C, N], tl.float32)
    SdS = tl.zeros([N], tl.float32)
    # unrolled: a loop around these MMAs would need two stages of buffers
    for strip in tl.static_range(0, V, 64):
        vs = strip + tl.arange(0, 64)
        S = state_block(x.S_in_ptr, at.tile, ks, vs, K, V).to(operand)
        dS = state_block(x.dS_ptr, at.tile, ks, vs, K, V).to(operand)
        do, dv, v_new = load_values(x, at, vs, V, C, UNIT)
        SdS += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        S, dS = tl.trans(S), tl.trans(dS)
        do_S = dot(do.to(operand), S, do_S, PRECISION)
        dv_S = dot(dv.to(operand), S, dv_S, PRECISION)
        v_dS = dot(v_new.to(operand), dS, v_dS, PRECISION)
    decay = decay_in(g, opaque_tokens(lowest, 0))
    dq = do_S * (decay * gate.scale)
    dk = -(dv_S * decay)
    # sums over the tokens from one on
    t = opaque_tokens(lowest, 1)
    i = tl.arange(0, C)[None, :]
    dg = add_tokens(i >= t, q * dq + k * dk)
    dk_out = v_dS * decay_out(g, opaque_tokens(lowest, 2))
    # sums over the tokens before one
    dg = add_tokens(i < opaque_tokens(lowest, 6), k * dk_out, dg)
    through = SdS * tl.exp2(tl.sum(g, 0))
    return dq, dk + dk_out, dg + through[None, :]
