# mypy: disable-error-code="assignment, var-annotated"
"""Provide the parts of the kernels that run a packet on a history, with a decay per key channel.

    q_in = e^G q,  k_in = e^G k;  k_out = e^(g_(j+1) + .. + g_(P-1)) k_j of the history;  D: e^G of it all
    XS = x_in D S + (x_in k_out^T) u for x = q, k;   A_tj = beta_t sum_c k_tc k_jc D_tjc for j < t
    r = beta (v - S_k);   d = (I + A)^-1 r;   o = scale (S_q + P d),  P as A of q and k, with j = t

q and k of the packet are one tensor of 32 rows in registers. Where all keys fit, the history is read once per
head if there are heads enough. Its places are taken from the newest one backwards, PAST at a time: a lane
holds 16 places of four channels, and sums g over them in registers. The pairs of the packet are computed by
the levels of `channels`. Where norms are in the kernel, u is d times the inverse norm of k, as in `replay`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from gdn.backends.triton.launch import jit, machine
from gdn.backends.triton.lib import activate_beta, column_mask, dot
from gdn.backends.triton.rule.channel_halves import lane_channels
from gdn.backends.triton.rule.channels import channel_decays, double_pieces, level_decays
from gdn.backends.triton.serving.history_lib import column_scale_pointers, ring_places
from gdn.backends.triton.serving.packet_lib import (
    ROWS,
    column_pointer,
    dot_mixed,
    dot_precise,
    dot_state,
    invert_unit_lower,
    row_pointers,
    strip_mask,
    strip_pointers,
)
from gdn.backends.triton.serving.pool_lib import STEPS
from gdn.backends.triton.serving.recurrent_lib import spoil_longer_row
from gdn.backends.triton.serving.structs import Strip
from gdn.problem import HistoryProblem, ReplayProblem

# Most keys in registers at once, for q in 16 bits and in fp32, whose MMAs are split. Compiled for sm_90 with
# histories in the dtype of q, 128 keys in fp32 would spill 1,848 bytes, and 256 keys up to 47,644
KEYS = {False: 128, True: 64}
COLUMNS = 32  # value columns of a strip
FILLED = 2  # programs of all columns per SM from which each head has one


@jit
def load_packet(packet, ks, C: tl.constexpr):
    """Load some keys of q and k of a packet [16, ks] in fp32; zeros past its end."""
    tokens = tl.arange(0, ROWS)
    mask = (tokens < packet.count)[:, None] & column_mask(ks, C.K)[None, :]
    q_at = row_pointers(packet.q_ptr, tokens, ks, packet.q_t, packet.q_k, C.UNIT, C.DENSE, C.NEAR)
    k_at = row_pointers(packet.k_ptr, tokens, ks, packet.k_t, packet.k_k, C.UNIT, C.DENSE, C.NEAR)
    q, k = tl.load(q_at, mask=mask, other=0.0), tl.load(k_at, mask=mask, other=0.0)
    return q.to(tl.float32), k.to(tl.float32)


@jit
def channel_pointers(ptr, rows, row_stride, ks, stride):
    """Return pointers to channels `ks` of rows; stride: of channels, None if they are next to each other."""
    if stride is not None:
        ks = ks * stride
    return ptr + (rows.to(tl.int64) * row_stride + ks)


@jit
def load_past_keys(history, newest, ks, later, C: tl.constexpr):
    """Load k of PAST places, the newest one first, decayed up to the history's end [PAST, ks] in fp32.

    ks: `lane_channels`; later [ks]: the sums of g over all places after `newest`. Also returns those over all
    places after the oldest one, which is at least 0.
    """
    N: tl.constexpr = ks.shape[0]
    BLOCKS: tl.constexpr = C.PAST // 16
    old = newest - 16 * tl.arange(0, BLOCKS)[:, None, None] - tl.arange(0, 16)[None, :, None]
    has_key = column_mask(ks, C.K)[None, None, :]
    places = ring_places(old, history)
    k_at = channel_pointers(history.k_ptr, places, history.k_p * C.PAST_UNIT, ks[None, None, :], None)
    k = tl.load(k_at, mask=(old >= 0) & has_key, other=0.0).to(tl.float32)
    # g of the place after: a sum from there on has terms of one sign, and nothing is subtracted
    places = ring_places(old + 1, history)
    g_at = channel_pointers(history.G_ptr, places, history.G_p * C.PAST_UNIT, ks[None, None, :], None)
    g = tl.load(g_at, mask=(old >= 0) & (old + 1 < history.count) & has_key, other=0.0).to(tl.float32)
    total = tl.sum(g, 1)
    n, m = tl.arange(0, BLOCKS)[:, None, None], tl.arange(0, BLOCKS)[None, :, None]
    newer = tl.sum(tl.where(m < n, tl.broadcast_to(total[None, :, :], (BLOCKS, BLOCKS, N)), 0.0), 1)
    after = tl.cumsum(g, 1) + (newer + later[None, :])[:, None, :]
    return tl.reshape(k * tl.exp(after), (C.PAST, N)), later + tl.sum(total, 0)


@jit
def load_past_u(history, column, newest, has_value, C: tl.constexpr):
    """Load BV columns of u of PAST places, the newest one first [PAST, BV]."""
    old = newest - tl.arange(0, C.PAST)
    places = ring_places(old, history)
    u_ptr, vs = history.u_ptr + column, tl.arange(0, C.BV)
    place = row_pointers(u_ptr, places, vs, history.u_p, 1, C.PAST_UNIT, True, C.NEAR)
    return tl.load(place, mask=(old >= 0)[:, None] & has_value, other=0.0)


@jit
def load_first_g(history, ks, C: tl.constexpr):
    """Load g of a history's first place, which the sums of `load_past_keys` lack; 0 if there is none."""
    place = ring_places(tl.full([], 0, tl.int32), history)
    g_at = channel_pointers(history.G_ptr, place, history.G_p * C.PAST_UNIT, ks, None)
    return tl.load(g_at, mask=(history.count > 0) & column_mask(ks, C.K), other=0.0).to(tl.float32)


@jit
def score_past(X, history, newest, ks, later, C: tl.constexpr):
    """Return the products of rows X [32, BK] with k of PAST places [32, PAST], and the sums of g."""
    k_out, later = load_past_keys(history, newest, ks, later, C)
    return dot(X, tl.trans(k_out), None, C.PRECISION), later


@jit
def stack_rows(q, k):
    """Return [32, N] of q, k [16, N]: q above k."""
    return tl.reshape(tl.permute(tl.join(q, k), (2, 0, 1)), (2 * ROWS, q.shape[1]))


@jit
def split_rows(x):
    """Return the rows of q and of k [16, N] of x [32, N]."""
    return tl.split(tl.permute(tl.reshape(x, (2, ROWS, x.shape[1])), (1, 2, 0)))


@jit
def load_decays(gates, count, ks, C: tl.constexpr):
    """Load g [16, ks] of a packet's tokens, or its logits if RAW; 0 past its end."""
    strides, tokens = gates.strides, tl.arange(0, ROWS)
    is_token, has_key = tokens < count, column_mask(ks, C.K)
    g_ptr = gates.given.a_ptr if C.RAW else gates.given.g_ptr
    g_ptr += (gates.n * strides.g_b + gates.first * strides.g_t + gates.head * strides.g_h) * C.UNIT
    g_at = channel_pointers(g_ptr, tokens[:, None], strides.g_t * C.UNIT, ks[None, :], gates.g_k)
    x = tl.load(g_at, mask=is_token[:, None] & has_key[None, :], other=0.0).to(tl.float32)
    if gates.given.dt_bias_ptr is not None:
        bias_ptr = gates.given.dt_bias_ptr + gates.head * strides.dt_bias_h
        bias_at = channel_pointers(bias_ptr, tl.full([], 0, tl.int32), 0, ks, gates.bias_k)
        x += tl.load(bias_at, mask=has_key, other=0.0).to(tl.float32)[None, :]
    bound = gates.lower_bound
    return channel_decays(x, gates.rate, bound, is_token, C.RAW, bound is not None, C.RESET)


@jit
def load_beta(gates, count, C: tl.constexpr):
    """Load beta of a packet's tokens, or its logits if RAW; 0 past its end."""
    strides, tokens = gates.strides, tl.arange(0, ROWS)
    beta_ptr = gates.given.b_ptr if C.RAW else gates.given.beta_ptr
    if beta_ptr is None:
        return tl.where(tokens < count, 1.0, 0.0)
    else:
        beta_ptr += gates.n * strides.beta_b + gates.first * strides.beta_t + gates.head * strides.beta_h
        x = tl.load(beta_ptr + tokens.to(tl.int64) * strides.beta_t, mask=tokens < count, other=0.0)
        return tl.where(tokens < count, activate_beta(x, C.RAW, C.NEGATIVE), 0.0)


@jit
def add_packet_pairs(q, k, g, pairs, C: tl.constexpr):
    """Add the products of q, k [16, N] with k over channels with decays g to pairs of q and of k [16, 16].

    Returns these, and the sums of g from the packet's start.
    """
    q_pairs, k_pairs = pairs
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    # a token's own pair has no decay
    q_pairs += tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
    before = tl.reshape(g, (1, ROWS, g.shape[1]))
    after = tl.zeros_like(before)
    for level in range(C.LEVELS):
        d = tl.reshape(level_decays(before, after, level), g.shape)
        columns = tl.trans(k * d)
        is_pair = ((i ^ j) >> level == 1) & (i > j)
        # 16 x 16 MMAs, of which a mask in registers keeps this level's pairs
        q_pairs += tl.where(is_pair, dot(q * d, columns, None, C.PRECISION), 0.0)
        k_pairs += tl.where(is_pair, dot(k * d, columns, None, C.PRECISION), 0.0)
        before, after = double_pieces(before, after, level)
    return (q_pairs, k_pairs), tl.reshape(before, g.shape)


@jit
def store_past(history, k, g, ks, new, has_k, C: tl.constexpr):
    """Append some keys of a packet's g to the history of a value head, and of its k where has_k."""
    mask = new.is_kept[:, None] & column_mask(ks, C.K)[None, :]
    g_at = channel_pointers(history.G_ptr, new.places[:, None], history.G_p * C.PAST_UNIT, ks[None, :], None)
    tl.store(g_at, g.to(history.G_ptr.dtype.element_ty), mask=mask)
    k_at = row_pointers(history.k_ptr, new.places, ks, history.k_p, 1, C.PAST_UNIT, True, C.NEAR)
    tl.store(k_at, k.to(history.k_ptr.dtype.element_ty), mask=mask & has_k)


@jit
def load_strip(state, column, ks, C: tl.constexpr):
    """Load some keys of BV value columns of a state [ks, BV] as they are stored."""
    ptr = column_pointer(state.ptr, column, state.outer * C.STATE_UNIT, C.AXIS == "v")
    strip = Strip(ptr, tl.arange(0, C.BV), C.V - column, state.inner, state.outer)
    place, in_state = strip_pointers(strip, ks, C)
    return tl.load(place, mask=in_state, other=0.0)


@jit
def add_state(X, S, XS, scales, column, C: tl.constexpr):
    """Return X S + XS for some value columns; scales: of the columns of a pool of integers."""
    if scales.ptr is None:
        return dot_mixed(X, S, XS, C.PRECISION)
    else:
        vs = tl.arange(0, C.BV)
        has_value = strip_mask(vs, C.V - column, C.V, C.STRIPS)
        column_scale = tl.load(column_scale_pointers(scales, column, vs), mask=has_value, other=0.0)
        # what is read is int8, in steps of 15 scales
        if scales.low_ptr is not None:
            column_scale *= STEPS
        return dot_state(X, S, None, C.PRECISION) * column_scale[None, :] + XS


@jit
def multiply_history(X, history, column, has_value, ks, C: tl.constexpr):
    """Return the products of rows X [32, ks] with a history [32, BV], and the decay [ks] over all of it."""
    XS, later = tl.zeros([2 * ROWS, C.BV], tl.float32), tl.zeros(ks.shape, tl.float32)
    for past in range(0, history.count, C.PAST):
        scores, later = score_past(X, history, history.count - 1 - past, ks, later, C)
        u = load_past_u(history, column, history.count - 1 - past, has_value, C)
        XS = dot_mixed(scores, u, XS, C.PRECISION)
    return XS, tl.exp(later + load_first_g(history, ks, C))


@jit
def run_channel_packet(packet, gates, scale, history, tensors, new, work, C: tl.constexpr):
    """Compute o and u for all columns of a program, and append u, k and g of the packet to the history.

    work: the number of the program among those of its head, and whether its value head stores k.
    """
    v, state, scales, out = tensors
    block, has_k = work
    tokens = tl.arange(0, ROWS)
    is_token = tokens < packet.count
    pairs = (tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([ROWS, ROWS], tl.float32))
    products = tl.zeros([2 * ROWS, C.BV], tl.float32)
    q_squares, k_squares = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    # all keys at once; if registers do not hold them, block by block for the one strip of a program
    for start in tl.static_range(0, C.K, C.BK):
        ks = start + lane_channels(C.BK)
        q, k = load_packet(packet, ks, C)
        g = load_decays(gates, packet.count, ks, C)
        if block == 0:
            # of the value heads that share a key head, only one stores k
            store_past(history, k, g, ks, new, has_k, C)
        pairs, G = add_packet_pairs(q, k, g, pairs, C)
        q_squares += tl.sum(q * q, 1)
        k_squares += tl.sum(k * k, 1)
        if C.BK < C.K:
            has_value = strip_mask(tl.arange(0, C.BV), C.V - block * C.BV, C.V, 1)[None, :]
            S = load_strip(state, block * C.BV, ks, C)
            X = stack_rows(q * tl.exp(G), k * tl.exp(G))
            past, whole = multiply_history(X, history, block * C.BV, has_value, ks, C)
            products = add_state(X * whole[None, :], S, products + past, scales, block * C.BV, C)
    q_rate, k_rate = tl.full([ROWS], scale, tl.float32), tl.full([ROWS], 1.0, tl.float32)
    if C.NORM:
        # norms scale the products in registers, instead of q and k
        q_rate *= tl.rsqrt(q_squares + 1e-6)
        k_rate *= tl.rsqrt(k_squares + 1e-6)
    beta = spoil_longer_row(load_beta(gates, packet.count, C), packet.count, packet.total)
    P = pairs[0] * q_rate[:, None] * k_rate[None, :]
    A = pairs[1] * (beta * k_rate)[:, None] * k_rate[None, :]
    A_inv = invert_unit_lower(A, C.LEVELS, C.FP32_PRECISION)
    if C.BK >= C.K:
        D = tl.exp(G)
        X = stack_rows(q * D, k * D)
        if C.IS_SHORT:
            later = tl.zeros([C.BK], tl.float32)
            first_g = load_first_g(history, ks, C)
            scores, later = score_past(X, history, history.count - 1, ks, later, C)
            X *= tl.exp(later + first_g)[None, :]
    # the pipeliner keeps STAGES - 1 strips of S in flight from HBM
    for strip in tl.range(0, C.STRIPS, num_stages=C.STAGES):
        column, vs = (block * C.STRIPS + strip) * C.BV, tl.arange(0, C.BV)
        has_value = strip_mask(vs, C.V - column, C.V, C.STRIPS)[None, :]
        if C.BK < C.K:
            XS = products
        else:
            S = load_strip(state, column, ks, C)
            if C.IS_SHORT:
                u = load_past_u(history, column, history.count - 1, has_value, C)
                XS = add_state(X, S, dot_mixed(scores, u, None, C.PRECISION), scales, column, C)
            else:
                past, whole = multiply_history(X, history, column, has_value, ks, C)
                XS = add_state(X * whole[None, :], S, past, scales, column, C)
        q_S, k_S = split_rows(XS)
        v_ptr = column_pointer(v.ptr, column, v.outer, C.DENSE)
        v_at = row_pointers(v_ptr, tokens, vs, v.inner, v.outer, C.UNIT, C.DENSE, C.NEAR)
        values = tl.load(v_at, mask=is_token[:, None] & has_value, other=0.0).to(tl.float32)
        r = beta[:, None] * (values - k_rate[:, None] * k_S)
        d = dot_precise(A_inv, r, None, C.FP32_PRECISION)
        o = dot_precise(P, d, q_rate[:, None] * q_S, C.FP32_PRECISION)
        o_ptr = column_pointer(out.ptr, column, out.outer, C.DENSE)
        o_at = row_pointers(o_ptr, tokens, vs, out.inner, out.outer, C.UNIT, C.DENSE, C.NEAR)
        tl.store(o_at, o.to(out.ptr.dtype.element_ty), mask=is_token[:, None] & has_value)
        u_ptr = history.u_ptr + column
        u_at = row_pointers(u_ptr, new.places, vs, history.u_p, 1, C.PAST_UNIT, True, C.NEAR)
        # u of places beyond the history is dropped
        u_new = (k_rate[:, None] * d).to(history.u_ptr.dtype.element_ty)
        tl.store(u_at, u_new, mask=new.is_kept[:, None] & has_value)


def channel_tiles(p: ReplayProblem | HistoryProblem, past: int, num_states: int | None) -> dict[str, Any]:
    """Return the sizes of tiles. past: places of a history at a time; num_states: as for `blocks`."""
    gpu, is_wide = machine(p.q.device), p.q.dtype == torch.float32
    num_states = p.N * p.HV if num_states is None else num_states
    BK, BV = (max(16, triton.next_power_of_2(n)) for n in (min(p.K, KEYS[is_wide]), min(p.V, COLUMNS)))
    is_short = p.places <= past and BK >= p.K
    takes_all = is_short and num_states >= FILLED * gpu.num_sms
    strips = triton.cdiv(p.V, BV) if takes_all else 1
    return {"BK": BK, "BV": BV, "PAST": past, "STRIPS": strips, "STAGES": 2, "IS_SHORT": is_short}


def gate_scalars(p: ReplayProblem | HistoryProblem) -> tuple[int | float | None, ...]:
    """Return the strides of channels of g and dt_bias, None where they are contiguous, and lower_bound."""
    g = p.g if p.a is None else p.a
    assert g is not None
    strides = (g.stride(3), 1 if p.dt_bias is None else p.dt_bias.stride(1))
    return (*(None if s == 1 else s for s in strides), p.lower_bound)
