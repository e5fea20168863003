"""Compute the gradients of all chunks in parallel, from S_in, dS (of the state that leaves) and dr.

The two state passes left these; dr is in the memory of dv. v_new = A_inv beta (v - e^G k S_in) is recomputed.
For tokens j <= i of a chunk

    E_ij = scale D_ij <do_i, v_new_j>;   F_ij = -beta_i D_ij <dr_i, v_new_j>, i > j;   D_ij = e^(G_i - G_j)
    dq = scale e^G do S_in^T + E k
    dk = e^(G_C - G) v_new dS^T - beta e^G dr S_in^T + E^T q + (F + F^T) k
    dv = beta dr;   dbeta = <dr, v_new> / beta = <dr, v - e^G k S_in> + row sums of F kk / beta
    dg_t = e^(G_C) <S_in, dS> + sum_{i >= t > j} (E qk + F kk)_ij
           + sum_{i >= t} (<q_i, dq_i through S> + <k_i, dk_i through S>) + sum_{j < t} <k_j, dk_j through dS>

and nothing cancels. `pairs_bwd_kernel` computes v_new, E, F, dv and the terms of the gates that need S_in. It
stores e^(G_C - G) v_new in bf16 and 8 more bits: rounding to bf16 caused a third of the variance of dg's
error where <k, dk through dS> is most of it. `rows_bwd_kernel` computes dq and dk, summed over value heads in
registers, and the terms that need dS (<S_in, dS> too, unless SPLIT: see `state_bwd`). None of its MMAs waits
for another, and E and F of all value heads are summed before their MMAs. Both kernels loop over strips of
value columns and load the next strip while one is multiplied. E and F^T, one below and one above the diagonal
of a tile, are stored in dq's memory until the second kernel overwrites it: rows i, and a block of columns j
per value head. With l2norm they include both norms, so that the other operands are raw q and k. The kernels
alternate over groups of chunks, so that v_new takes memory for one group only.

Bytes per token and value head at K = V = 128 in bf16, HV = H: q, k, v, do, dr, dv 1536, S_in 512, A_inv
128, E and F 128, v_new 384, factors 40: 2730; and q, k, do, dv 1024, v_new 384, S_in and dS 1024, E and F
128, dq and dk 512: 3070.
"""

import triton
import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import jit, kernel
from gdn.backends.triton.lib import (
    Rows,
    TokenRange,
    apply_inverse,
    column_mask,
    decay,
    dot,
    dot_split_left,
    load_rows,
    load_rstd,
    load_sums,
    load_wide,
    operand_dtype,
    split_bf16,
    store_wide,
)
from gdn.backends.triton.rule.pairs import (
    ALONG_K,
    ALONG_Q,
    BETA,
    CROSSING,
    DBETA,
    ENTERING,
    INTO,
    LEAVING,
    OUT,
    READ,
    ROWS,
    THROUGH,
    factor,
)

SMALL = tl.constexpr(1e-3)  # dbeta is not divided by a beta below this


@triton.constexpr_function
def unrolled(operand, blocks):
    """Return how many blocks of keys a loop unrolls: one in fp32, whose MMAs take too many registers."""
    return 1 if operand == tl.float32 else blocks


@triton.constexpr_function
def keeps_norms(x_ptr):
    """Return True if E and F are stored without the norms of q and k: 1 / norm^2 may overflow fp16.

    Otherwise they include the norms, so that MMAs use raw q and k without normalising and rounding them.
    """
    return x_ptr.dtype.element_ty == tl.float16


@jit
def state_block(S_ptr, tile, ks, vs, K: tl.constexpr, V: tl.constexpr):
    """Load a block [ks, vs] of the state at a chunk."""
    mask = column_mask(ks, K)[:, None] & column_mask(vs, V)[None, :]
    return tl.load(S_ptr + tile * (K * V) + ks[:, None] * V + vs[None, :], mask=mask, other=0.0)


@jit
def store_pairs(pairs_ptr, E, F, beta, place, mask, C: tl.constexpr):
    """Store E, beta F [key, query] as one tile: at [a, b] E of key a if a <= b, else F of key b, query a."""
    tokens = tl.arange(0, C)
    kept: tl.constexpr = pairs_ptr.dtype.element_ty
    turned = tl.trans((F * beta[None, :]).to(kept))
    pairs = tl.where(tokens[:, None] <= tokens[None, :], E.to(kept), turned)
    tl.store(pairs_ptr + place, pairs, mask=mask)


@jit
def from_here_on(x, WIDE: tl.constexpr, C: tl.constexpr):
    """Return sum_{i >= t} x_ji for all t: an MMA with ones takes a third of a cumulative sum's shuffles."""
    if WIDE:
        return tl.cumsum(x, 1, reverse=True)
    else:
        tokens = tl.arange(0, C)
        ones = tl.where(tokens[:, None] >= tokens[None, :], 1.0, 0.0).to(tl.bfloat16)
        # hi + lo keeps x to 2^-16
        high, low = split_bf16(x, tl.bfloat16)
        return tl.dot(low, ones, tl.dot(high, ones))


@kernel
def pairs_bwd_kernel(
    q_ptr, k_ptr, v_ptr, G_ptr, A_inv_ptr, q_rstd_ptr, k_rstd_ptr, S_in_ptr, do_ptr, table_ptr,
    pairs_ptr, dv_ptr, grown_ptr, rest_ptr, shares_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    T, HV, ratio, chunks_per_row, scale, width, begin,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FP32_STATE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # E, F, dv, scaled v_new, and terms of dbeta and dg for one chunk and value head.
    # Program (chunk of the group, head); grid: entries of the group * HV; warps and strips from `choose`.
    # Reads q, k, v, do, dr, S_in, A_inv, G, norms and factors; writes dv over dr, E and F, v_new, three or
    # five rows of terms. E and F [C, C] are accumulators in registers over all strips of value columns.
    # No PDL.
    head = tl.program_id(0) % HV
    part = tl.program_id(0) // HV
    chunk = begin + part
    key_head = head // ratio
    num_heads = HV // ratio
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    token_range = TokenRange(row, first, length)
    operand: tl.constexpr = operand_dtype(k_ptr, FP32_STATE)
    tokens = tl.arange(0, C)
    place = row.to(tl.int64) * T + first + tokens
    if length <= 0:
        # tokens of no sequence have zero gradients
        for strip in range(0, V, BV):
            vs = strip + tl.arange(0, BV)
            is_past = (tokens < -length)[:, None] & column_mask(vs, V)[None, :]
            dv_place = dv_ptr + (place * HV + head)[:, None] * V + vs[None, :]
            tl.store(dv_place, tl.zeros([C, BV], k_ptr.dtype.element_ty), mask=is_past)
        return

    is_token = tokens < length
    # if one block holds all of K, k and q are loaded once from HBM for all strips
    ks = tl.arange(0, BK)
    tile = chunk.to(tl.int64) * HV + head
    k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT).to(operand)
    q = load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT).to(operand)
    beta = factor(shares_ptr, tile, BETA, C)
    into = factor(shares_ptr, tile, INTO, C)
    out = factor(shares_ptr, tile, OUT, C)
    blocks: tl.constexpr = (K + BK - 1) // BK
    at_once: tl.constexpr = unrolled(operand, blocks)
    A_inv = tl.load(A_inv_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :]).to(operand)
    E = tl.zeros([C, C], tl.float32)
    F = tl.zeros([C, C], tl.float32)
    apart = tl.zeros([C], tl.float32)
    whole = tl.zeros([C], tl.float32)
    from_q = tl.zeros([C], tl.float32)
    from_k = tl.zeros([C], tl.float32)
    for strip in tl.range(0, V, BV, num_stages=STAGES):
        vs = strip + tl.arange(0, BV)
        do = load_rows(Rows(do_ptr, do_b, do_t, do_h), token_range, head, vs, V, C, UNIT).to(operand)
        dr_place = dv_ptr + (place * HV + head)[:, None] * V + vs[None, :]
        dr_mask = is_token[:, None] & column_mask(vs, V)[None, :]
        dr = tl.load(dr_place, mask=dr_mask, other=0.0).to(operand)
        v = load_rows(Rows(v_ptr, v_b, v_t, v_h), token_range, head, vs, V, C, UNIT)
        S = state_block(S_in_ptr, tile, ks, vs, K, V).to(operand)
        kS = tl.zeros([C, BV], tl.float32)
        for block in tl.range(0, blocks, loop_unroll_factor=at_once):
            if blocks > 1:
                ks = block * BK + tl.arange(0, BK)
                k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT).to(operand)
                S = state_block(S_in_ptr, tile, ks, vs, K, V).to(operand)
            kS = dot(k, S, kS, PRECISION)
        kS *= into[:, None]
        wide_dr = dr.to(tl.float32)
        from_k -= tl.sum(wide_dr * kS, 1)
        error = v.to(tl.float32) - kS
        apart += tl.sum(wide_dr * error, 1)
        v_new = apply_inverse(A_inv, beta[:, None] * error, PRECISION, SPLIT)
        whole += tl.sum(wide_dr * v_new, 1)
        grown_place = (part.to(tl.int64) * HV + head) * (C * V) + tokens[:, None] * V + vs[None, :]
        store_wide(grown_ptr, rest_ptr, grown_place, v_new * out[:, None], column_mask(vs, V)[None, :])
        # hi + lo in registers: rounding v_new caused most of dg's error where little passes through the state
        E = dot_split_left(v_new, tl.trans(do), E, PRECISION, SPLIT)
        F = dot(v_new.to(operand), tl.trans(dr), F, PRECISION)
        # last in the loop, because its sum waits for all MMAs: the next loads overwrite their shared memory
        # (tests: `in_flight`)
        qS = tl.zeros([C, BV], tl.float32)
        for block in tl.range(0, blocks, loop_unroll_factor=at_once):
            if blocks > 1:
                ks = block * BK + tl.arange(0, BK)
                q = load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT).to(operand)
                S = state_block(S_in_ptr, tile, ks, vs, K, V).to(operand)
            qS = dot(q, S, qS, PRECISION)
        from_q += tl.sum(do.to(tl.float32) * qS, 1)
        # dr has been copied to shared memory for its MMA, so dv may overwrite it in HBM
        tl.store(dr_place, (wide_dr * beta[:, None]).to(dv_ptr.dtype.element_ty), mask=dr_mask)
    from_q *= factor(shares_ptr, tile, READ, C)
    from_k *= beta
    # [j, i]: key j down, query i across. Vectors along i are loaded only here: each takes 16 registers
    is_below = tokens[:, None] < tokens[None, :]
    high, low, _, _ = load_sums(G_ptr, row, first, length, head, T, HV, C)
    k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    D = decay(high[:, None], low[:, None], high[None, :], low[None, :])
    E = tl.where(tokens[:, None] <= tokens[None, :], E * D * scale, 0.0)
    F = tl.where(is_below, -F * D, 0.0)
    # width is in units of 16, so that the compiler knows that rows are aligned
    pairs_place = (place * num_heads + key_head) * (width * 16) + (head % ratio) * C
    pairs_place = pairs_place[None, :] + tokens[:, None]
    pairs_mask = is_token[None, :] & (tokens[:, None] < C)
    if keeps_norms(pairs_ptr):
        store_pairs(pairs_ptr, E, F, factor(shares_ptr, tile, BETA, C), pairs_place, pairs_mask, C)
    rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    E = E * k_rstd[:, None] * rstd[None, :]
    rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    F = F * k_rstd[:, None] * rstd[None, :]
    if not keeps_norms(pairs_ptr):
        store_pairs(pairs_ptr, E, F, factor(shares_ptr, tile, BETA, C), pairs_place, pairs_mask, C)
    qk = tl.zeros([C, C], tl.float32)
    kk = tl.zeros([C, C], tl.float32)
    for block in tl.range(0, blocks, loop_unroll_factor=at_once):
        if blocks > 1:
            ks = block * BK + tl.arange(0, BK)
            k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT).to(operand)
            q = load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT).to(operand)
        qk = dot(k, tl.trans(q), qk, PRECISION)
        kk = dot(k, tl.trans(k), kk, PRECISION)
    E = E * qk
    F = F * kk
    beta = factor(shares_ptr, tile, BETA, C)
    # <dr, v_new> / beta has no cancellation; for a tiny beta use the sum of the two terms instead
    is_small = beta < SMALL
    dbeta = tl.where(is_small, apart + tl.sum(F, 0), whole / tl.where(is_small, 1.0, beta))
    F = F * beta[None, :]
    # the decay of token t multiplies the pairs with i >= t > j
    sums = from_here_on(tl.where(is_below, E + F, 0.0), k_ptr.dtype.element_ty == tl.float32, C)
    shares = shares_ptr + tile * (ROWS * C) + tokens
    tl.store(shares + CROSSING * C, tl.sum(tl.where(is_below, sums, 0.0), 0))
    tl.store(shares + ENTERING * C, from_q + from_k)
    tl.store(shares + DBETA * C, dbeta)
    if q_rstd_ptr is not None and blocks > 1:
        # <q, dq> and <k, dk> without the part of dS: the adjoint of the norm subtracts them
        tl.store(shares + ALONG_Q * C, from_q + tl.sum(E, 0))
        tl.store(shares + ALONG_K * C, from_k + tl.sum(E + F, 1) + tl.sum(F, 0))


@jit
def through_norm(dx, along, x, rstd, D: tl.constexpr):
    """Return the gradient of raw rows x from dx = rstd dn, with dn that of n = x rstd: dx - x rstd^2 <n, dn>.

    For whole rows <n, dn> = <x, dx> is summed here, with dx's own rounding, so that the part along x cancels.
    For a block of a row, `along` holds it.
    """
    x = x.to(tl.float32)
    if x.shape[1] >= D:
        along = tl.sum(x * dx, 1)
    return dx - x * (along * rstd * rstd)[:, None]


@kernel
def rows_bwd_kernel(
    q_ptr, k_ptr, q_rstd_ptr, k_rstd_ptr, S_in_ptr, dS_ptr, do_ptr, dv_ptr, grown_ptr, rest_ptr, table_ptr,
    pairs_ptr, shares_ptr, dq_ptr, dk_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, do_b, do_t, do_h, T, HV, ratio, chunks_per_row, width, begin,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FP32_STATE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # dq and dk of one chunk and key head, and terms of dg that need dS.
    # Program (chunk of the group, key head, block of K); grid: entries of the group * H * blocks; warps and
    # strips from `choose`. Reads per value head S_in, dS, do, dv, scaled v_new, E and F; once q and k. Writes
    # dq and dk, which are accumulators in registers over value heads and strips. No PDL.
    num_heads = HV // ratio
    blocks: tl.constexpr = (K + BK - 1) // BK
    own = tl.program_id(0) % blocks
    key_head = (tl.program_id(0) // blocks) % num_heads
    part = tl.program_id(0) // (blocks * num_heads)
    chunk = begin + part
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    token_range = TokenRange(row, first, length)
    operand: tl.constexpr = operand_dtype(k_ptr, FP32_STATE)
    tokens = tl.arange(0, C)
    at_once: tl.constexpr = unrolled(operand, blocks)
    of_pairs: tl.constexpr = operand_dtype(k_ptr, FP32_STATE or keeps_norms(k_ptr))
    is_token = tokens < length
    place = row.to(tl.int64) * T + first + tokens
    ks = own * BK + tl.arange(0, BK)
    key_place = (place * num_heads + key_head)[:, None] * K + ks[None, :]
    if length <= 0:
        is_past = (tokens < -length)[:, None] & column_mask(ks, K)[None, :]
        tl.store(dq_ptr + key_place, tl.zeros([C, BK], k_ptr.dtype.element_ty), mask=is_past)
        tl.store(dk_ptr + key_place, tl.zeros([C, BK], k_ptr.dtype.element_ty), mask=is_past)
        return

    k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT).to(operand)
    # gradients of the normalised rows, times rstd
    dq = tl.zeros([C, BK], tl.float32)
    dk = tl.zeros([C, BK], tl.float32)
    q_along = tl.zeros([C], tl.float32)
    k_along = tl.zeros([C], tl.float32)
    for j in range(ratio):
        head = key_head * ratio + j
        tile = chunk.to(tl.int64) * HV + head
        leaving = tl.zeros([C], tl.float32)
        through = 0.0
        of_q = factor(shares_ptr, tile, READ, C)
        of_k = -factor(shares_ptr, tile, INTO, C)
        for strip in tl.range(0, V, BV, num_stages=STAGES):
            vs = strip + tl.arange(0, BV)
            S = state_block(S_in_ptr, tile, ks, vs, K, V).to(operand)
            dS = state_block(dS_ptr, tile, ks, vs, K, V).to(operand)
            do = load_rows(Rows(do_ptr, do_b, do_t, do_h), token_range, head, vs, V, C, UNIT)
            dv_mask = is_token[:, None] & column_mask(vs, V)[None, :]
            dv = tl.load(dv_ptr + (place * HV + head)[:, None] * V + vs[None, :], mask=dv_mask, other=0.0)
            grown_place = (part.to(tl.int64) * HV + head) * (C * V) + tokens[:, None] * V + vs[None, :]
            grown_mask = column_mask(vs, V)[None, :]
            grown = tl.load(grown_ptr + grown_place, mask=grown_mask, other=0.0)
            wide_grown = load_wide(grown, rest_ptr, grown_place, grown_mask)
            grown = grown.to(operand)
            dq = dot((do.to(tl.float32) * of_q[:, None]).to(operand), tl.trans(S), dq, PRECISION)
            dk = dot((dv.to(tl.float32) * of_k[:, None]).to(operand), tl.trans(S), dk, PRECISION)
            dk = dot(grown, tl.trans(dS), dk, PRECISION)
            # last in the loop, as in pairs_bwd_kernel
            kdS = dot(k, dS, None, PRECISION)
            if not SPLIT:
                through += tl.sum(S.to(tl.float32) * dS.to(tl.float32))
            for other in tl.range(1, blocks, loop_unroll_factor=at_once):
                js = (own + other) % blocks * BK + tl.arange(0, BK)
                k_other = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, js, K, C, UNIT)
                dS_other = state_block(dS_ptr, tile, js, vs, K, V)
                if not SPLIT:
                    S_other = state_block(S_in_ptr, tile, js, vs, K, V)
                    through += tl.sum(S_other.to(tl.float32) * dS_other.to(tl.float32))
                kdS = dot(k_other.to(operand), dS_other.to(operand), kdS, PRECISION)
            leaving += tl.sum(wide_grown * kdS, 1)
        shares = shares_ptr + tile * (ROWS * C) + tokens
        tl.store(shares + LEAVING * C, leaving, mask=is_token & (own == 0))
        if not SPLIT:
            tl.store(shares_ptr + tile * (ROWS * C) + THROUGH * C + 1, through, mask=own == 0)
        if q_rstd_ptr is not None and blocks > 1:
            q_along += tl.load(shares + ALONG_Q * C)
            k_along += tl.load(shares + ALONG_K * C) + leaving
    # summed over value heads before the MMAs: E k + E' k = (E + E') k
    pairs_place = ((place * num_heads + key_head) * (width * 16))[:, None] + tokens[None, :]
    pairs_mask = is_token[:, None] & (tokens < C)[None, :]
    pairs = tl.zeros([C, C], tl.float32)
    for j in range(ratio):
        pairs += tl.load(pairs_ptr + pairs_place + j * C, mask=pairs_mask, other=0.0).to(tl.float32)
    is_query = tokens[:, None] >= tokens[None, :]
    if keeps_norms(pairs_ptr):
        k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
        q_rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
        pairs *= tl.where(is_query, q_rstd[:, None], k_rstd[:, None]) * k_rstd[None, :]
    F_t = tl.where(is_query, 0.0, pairs).to(of_pairs)
    E = tl.where(is_query, pairs, 0.0).to(of_pairs)
    pairs_k = k.to(of_pairs)
    q = load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT).to(of_pairs)
    dk = dot(F_t, pairs_k, dk, PRECISION)
    dk = dot(tl.trans(F_t), pairs_k, dk, PRECISION)
    dq = dot(E, pairs_k, dq, PRECISION)
    dk = dot(tl.trans(E), q, dk, PRECISION)
    # all threads have read E and F: dq may now overwrite them in HBM
    tl.debug_barrier()
    mask = is_token[:, None] & column_mask(ks, K)[None, :]
    if q_rstd_ptr is not None:
        k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
        q_rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
        q = load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT)
        dq = through_norm(dq, q_along, q, q_rstd, K)
        k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT)
        dk = through_norm(dk, k_along, k, k_rstd, K)
    tl.store(dq_ptr + key_place, dq.to(dq_ptr.dtype.element_ty), mask=mask)
    tl.store(dk_ptr + key_place, dk.to(dk_ptr.dtype.element_ty), mask=mask)
