"""Compute dq, dk and dg of chunks whose gate decays moderately, a strip of channels at once.

Within 32 tokens a decay is split at their middle m: e^(G_i - G_j) = e^L_i e^-L_j with L_i = G_i - G_m. Let

    X = e^L q;  Z = beta e^L k;  Y = e^-L k
    R = E Y;    Q = F Y;         C = E^T X + F^T Z
    dq = e^L R;  dk = beta e^L Q + e^-L C;  dG = X R + Z Q - Y C

Each product is one MMA of 64 x 64 tokens. Pairs of the late 32 tokens with the early 32 are split at both
middles: their products are the same, times the decay from one middle to the other, per channel. dg of a token
is the sum of dG from that token on. q_in, k_in and k_out add to dG in the same way.

This is right while |L| <= 72: no factor leaves fp32's range. Where 16 tokens of a channel decay by more, or
a result is not finite, `done` is 0, and `rows_bwd_channels_kernel` computes the strip by levels, which are
exact for any gate. The chunk alone decides, so the bits do not depend on the batch.

X, Y and Z are rounded to tf32 once, for the MMAs and for dG. So each pair adds to the dG of its query what it
takes from that of its key, but for fp32's rounding, and the sums of dG do not cancel digits. The textbook's
q dq - k dk, with products of other factors, loses three to ten times more. Sums over tokens are MMAs of
matrices of 0 and 1 with split bf16.

Bytes per token and value head at K = V = 128 in bf16: as `rows_bwd`, but do, dv, v_new, E and F from L2 for
each strip of 32 channels, not of 16.
"""

import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import jit, kernel
from gdn.backends.triton.lib import (
    Rows,
    TokenRange,
    column_mask,
    dot,
    load_rows,
    load_rstd,
    round_tf32,
    split_bf16,
)
from gdn.backends.triton.rule.channels import channel_decays, gate_rate, load_logits
from gdn.backends.triton.rule.gradients import state_block
from gdn.backends.triton.rule.pairs import BETA, factor
from gdn.backends.triton.rule.rows_bwd import gate_bwd

LARGEST_SUM = tl.constexpr(72.0)  # e^72 = 2^104, so that 2^24 are left for gradients times keys


@jit
def add_tokens(weights, x, acc=None):
    """Return acc + weights x of x (hi, lo) in bf16, with weights [C, C] of -1, 0 and 1."""
    high, low = x
    weights = weights.to(tl.bfloat16)
    return tl.dot(weights, low, tl.dot(weights, high, acc))


@jit
def load_pairs(pairs_ptr, C: tl.constexpr, OF_E: tl.constexpr, TURNED: tl.constexpr, NEAR: tl.constexpr):
    """Return E^T, or F, of a chunk [C, C] or its transpose (TURNED), zeros but for some pairs.

    NEAR: the pairs within 32 tokens; else those of the late 32 queries with the early 32 keys.
    """
    a = tl.arange(0, C)[:, None]
    b = tl.arange(0, C)[None, :]
    # E^T has its keys down, F its queries
    earlier, later = (a, b) if OF_E != TURNED else (b, a)
    if NEAR:
        is_pair = ((earlier <= later) if OF_E else (earlier < later)) & ((a ^ b) < 32)
    else:
        is_pair = (earlier < 32) & (later >= 32)
    # a mask of the load, not of its result: Triton keeps operands in shared memory only as they are loaded
    return tl.load(pairs_ptr + (b * C + a if TURNED else a * C + b), mask=is_pair, other=0.0)


@jit
def pair_gradients(rows, decays, beta, gradients, pairs_ptr, C: tl.constexpr, PRECISION: tl.constexpr):
    """Return dq, dk, dG with the pairs of a chunk added, and the pairs' share of dbeta [C].

    rows: q, k [C, N]; decays: e^L, e^-L [C, N] and the root of the decay from token 15 to token 47 [1, N];
    gradients: dq, dk, dG [C, N] of the state.
    """
    q, k = rows
    P, N, half = decays
    dq, dk, dG = gradients
    # twice the root: its square may be below fp32's range where the decays of the pairs are not
    Y = round_tf32(k * N)
    R = dot(load_pairs(pairs_ptr, C, True, True, False), Y, None, PRECISION) * half * half
    R = dot(load_pairs(pairs_ptr, C, True, True, True), Y, R, PRECISION)
    X = q * P
    dq += R * P
    X = round_tf32(X)
    dG += X * R
    Q = dot(load_pairs(pairs_ptr, C, False, False, False), Y, None, PRECISION) * half * half
    Q = dot(load_pairs(pairs_ptr, C, False, False, True), Y, Q, PRECISION)
    Z = k * P
    share = tl.sum(Z * Q, 1)
    Z = round_tf32(Z * beta)
    dk += Q * (P * beta)
    dG += Z * Q
    back = dot(load_pairs(pairs_ptr, C, True, False, False), X, None, PRECISION)
    back = dot(load_pairs(pairs_ptr, C, False, True, False), Z, back, PRECISION) * half * half
    back = dot(load_pairs(pairs_ptr, C, True, False, True), X, back, PRECISION)
    back = dot(load_pairs(pairs_ptr, C, False, True, True), Z, back, PRECISION)
    dk += back * N
    dG -= Y * back
    return dq, dk, dG, share


@kernel
def rows_bwd_mma_kernel(
    q_ptr, k_ptr, g_ptr, A_log_ptr, dt_bias_ptr, q_rstd_ptr, k_rstd_ptr, S_in_ptr, dS_ptr, do_ptr, dv_ptr,
    v_new_ptr, table_ptr, pairs_ptr, factors_ptr, dq_ptr, dk_ptr, dg_ptr, shares_ptr, rates_ptr, biases_ptr,
    done_ptr, q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, do_b, do_t, do_h, T, HV, ratio, chunks_per_row,
    scale, lower_bound, begin,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    RAW: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, RESET: tl.constexpr,
    SUBS: tl.constexpr,
):  # fmt: skip
    # dq, dk and dg of one chunk, value head and strip of BK channels, and `done` = 1; or `done` = 0 alone.
    # Program (chunk of the group, head, strip), strips fastest: those of a chunk find do, dv, v_new, E and F
    # in L2. Grid: entries of the group * HV * strips; 4 warps, two CTAs an SM; no PDL. Operands of MMAs are
    # in shared memory, accumulators [C, BK] in registers: at most six at a time, so S is read first, for dq,
    # and dS last. Partial sums of a strip are the first of SUBS of `rows_bwd_channels_kernel`.
    blocks: tl.constexpr = (K + BK - 1) // BK
    own = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks) % HV
    part = tl.program_id(0) // (blocks * HV)
    chunk = begin + part
    key_head = head // ratio
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    token_range = TokenRange(row, first, length)
    group_tile = part.to(tl.int64) * HV + head
    done_place = done_ptr + tl.program_id(0)
    if length <= 0:
        tl.store(done_place, 0)
        return

    operand: tl.constexpr = k_ptr.dtype.element_ty
    tokens = tl.arange(0, C)
    t = tokens[:, None]
    s = tokens[None, :]
    ks = own * BK + tl.arange(0, BK)
    is_token = tokens < length
    tile = chunk.to(tl.int64) * HV + head
    place = row.to(tl.int64) * T + first
    row_place = (place * HV + head) * K + (t * (HV * K) + ks[None, :])
    is_given = is_token[:, None] & column_mask(ks, K)[None, :]
    num_heads = HV // ratio
    rate = gate_rate(A_log_ptr, head)
    of_g = Rows(g_ptr, g_b, g_t, g_h)
    x = load_logits(of_g, dt_bias_ptr, token_range, head, ks, K, C, UNIT)
    g = channel_decays(x, rate, lower_bound, is_token, RAW, BOUNDED, RESET)
    # sums of g: over the first 16 tokens, the 32 between the middles, and the last 16
    before = tl.sum(tl.where(t < 16, g, 0.0), 0)
    between = tl.sum(tl.where((t >= 16) & (t < 48), g, 0.0), 0)
    behind = tl.sum(tl.where(t >= 48, g, 0.0), 0)
    g = split_bf16(g, tl.bfloat16)
    middle = (t & 32) + 16
    weights = tl.where((s > t) & (s < middle), -1.0, tl.where((s >= middle) & (s <= t), 1.0, 0.0))
    L = add_tokens(weights, g)
    if tl.max(tl.max(tl.abs(L), 1), 0) > LARGEST_SUM:
        tl.store(done_place, 0)
        return

    q = load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT).to(tl.float32)
    q *= load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)[:, None]
    k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT).to(tl.float32)
    k *= load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)[:, None]
    dq = tl.zeros([C, BK], tl.float32)
    dk = tl.zeros([C, BK], tl.float32)
    for strip in range(0, V, BV):
        vs = strip + tl.arange(0, BV)
        S = tl.trans(state_block(S_in_ptr, tile, ks, vs, K, V).to(operand))
        do = load_rows(Rows(do_ptr, do_b, do_t, do_h), token_range, head, vs, V, C, UNIT)
        dq = dot(do.to(operand), S, dq, PRECISION)
        dv_place = (place * HV + head) * V + (t * (HV * V) + vs[None, :])
        dv = tl.load(dv_ptr + dv_place, mask=is_token[:, None] & column_mask(vs, V)[None, :], other=0.0)
        dk = dot(dv.to(operand), S, dk, PRECISION)
    P = tl.exp(L)
    N = tl.exp(-L)
    # a factor below fp32's range has another above it, of at most e^72: the decay is below 1e-6
    decay_in = P * tl.where(t < 32, tl.exp(before)[None, :], tl.exp(before + between)[None, :])
    dq *= decay_in * scale
    dk *= -decay_in
    dG = q * dq + k * dk
    beta = factor(factors_ptr, tile, BETA, C)[:, None]
    half = tl.exp(0.5 * between)[None, :]
    E_F = pairs_ptr + group_tile * (C * C)
    dq, dk, dG, share = pair_gradients((q, k), (P, N, half), beta, (dq, dk, dG), E_F, C, PRECISION)
    tl.store(dq_ptr + row_place, dq.to(dq_ptr.dtype.element_ty), mask=is_given)
    slots = tl.arange(0, SUBS)[:, None]
    share_place = shares_ptr + (tile * (blocks * SUBS) + own * SUBS) * C + slots * C + s
    tl.store(share_place, tl.where(slots == 0, share[None, :], 0.0))

    out = tl.zeros([C, BK], tl.float32)
    SdS = tl.zeros([BK], tl.float32)
    size = tl.zeros([BK], tl.float32)
    for strip in range(0, V, BV):
        vs = strip + tl.arange(0, BV)
        dS = state_block(dS_ptr, tile, ks, vs, K, V)
        v_new_place = group_tile * (C * V) + (t * V + vs[None, :])
        v_new = tl.load(v_new_ptr + v_new_place, mask=column_mask(vs, V)[None, :], other=0.0)
        out = dot(v_new.to(operand), tl.trans(dS.to(operand)), out, PRECISION)
        S = state_block(S_in_ptr, tile, ks, vs, K, V).to(tl.float32)
        SdS += tl.sum(S * dS.to(tl.float32), 1)
        size += tl.sum(tl.abs(S), 1)
    out *= N * tl.where(t < 32, tl.exp(between + behind)[None, :], tl.exp(behind)[None, :])
    dk += out
    tl.store(dk_ptr + row_place, dk.to(dk_ptr.dtype.element_ty), mask=is_given)
    # of the sums of g from a token to the chunk's end: all of them are in k_out, less those up to its token
    out *= k
    dg = add_tokens(tl.where(s >= t, 1.0, 0.0), split_bf16(dG - out, tl.bfloat16))
    dg += (SdS * tl.exp(before + between + behind) + tl.sum(out, 0))[None, :]
    # each value that is not finite comes to dG: `rows_bwd_channels_kernel` then finds whether it is right
    is_finite = tl.sum(tl.sum(dg * 0.0, 1), 0) == 0
    tl.store(done_place, is_finite.to(tl.int32))
    # the first token decays only S: exactly 0 where a channel of S is 0, where the sums leave their rounding
    dg = tl.where((t == 0) & (size == 0)[None, :], 0.0, dg)
    # loaded again, so that no register holds the logits meanwhile
    x = load_logits(of_g, dt_bias_ptr, token_range, head, ks, K, C, UNIT)
    g = channel_decays(x, rate, lower_bound, is_token, RAW, BOUNDED, RESET)
    dx, along = gate_bwd(dg, g, x, rate, lower_bound, RAW, BOUNDED, RESET)
    dx = tl.where(is_token[:, None], dx, 0.0)
    tl.store(dg_ptr + row_place, dx.to(dg_ptr.dtype.element_ty), mask=is_given)
    if rates_ptr is not None:
        along = tl.sum(tl.sum(tl.where(is_token[:, None], along, 0.0).to(tl.float64), 1), 0)
        slots = tl.arange(0, SUBS)
        rates_place = (chunk.to(tl.int64) * (blocks * SUBS) + own * SUBS + slots) * HV + head
        tl.store(rates_ptr + rates_place, tl.where(slots == 0, along, 0.0))
    if biases_ptr is not None:
        tl.store(biases_ptr + tile * K + ks, tl.sum(dx.to(tl.float64), 0), mask=column_mask(ks, K))
