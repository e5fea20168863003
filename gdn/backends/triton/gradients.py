"""The gradients of all chunks at once, from what the two state passes left: S_in, dS (of the state that
leaves), and dr in the place of dv. With v_new = A_inv beta (v - e^G k S_in) made again, and for tokens j <= i

    E_ij = scale D_ij <do_i, v_new_j>;   F_ij = -beta_i D_ij <dr_i, v_new_j>, i > j;   D_ij = e^(G_i - G_j)
    dq = scale e^G do S_in^T + E k
    dk = e^(G_C - G) v_new dS^T - beta e^G dr S_in^T + E^T q + (F + F^T) k
    dv = beta dr;   dbeta = <dr, v_new> / beta = <dr, v - e^G k S_in> + row sums of F kk / beta
    dg_t = e^(G_C) <S_in, dS> + sum_{i >= t > j} (E qk + F kk)_ij
           + sum_{i >= t} (<q_i, dq_i through S> + <k_i, dk_i through S>) + sum_{j < t} <k_j, dk_j through dS>

in which nothing cancels. The first kernel, a program per chunk and value head, makes E, F, dv and all that
the gates need; the second, a program per chunk and key head, dq and dk, summed over the value heads in
registers. One kernel for both would need twice the registers there are. E and F wait in the places of dq and
dk, which are the second kernel's to fill: rows i, and a block of columns j for each value head. With l2norm
they bring the norms of both sides, so that raw rows of q and k are the other operands.

Bytes per token and value head at K = V = 128 in bf16, HV = H: q, k, v, do, dr, dv 1536, S_in and dS 1024,
A_inv 128, E and F 256, factors 40: 2990; and q, k, v, do, dv 1280, S_in and dS 1024, A_inv, E and F 384, dq
and dk 512: 3200.
"""

import triton
import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import (
    decay,
    dot,
    exist,
    load_rstd,
    load_sums,
    operand_of,
    rows_of,
    solved,
)
from gdn.backends.triton.pairs import FACTORS, factor

SMALL = tl.constexpr(1e-3)  # below which beta is not divided by


@triton.constexpr_function
def unrolled(operand, blocks):
    """Of how many blocks of keys a loop writes out the products: in fp32 each takes too many registers."""
    return 1 if operand == tl.float32 else blocks


@triton.constexpr_function
def keeps_norms(x_ptr):
    """Whether E and F are stored without the norms of q and k: 1 / norm^2 leaves the range of fp16.

    Elsewhere they bring them, so that raw rows can be multiplied: these need not be normalised and rounded.
    """
    return x_ptr.dtype.element_ty == tl.float16


@triton.jit
def state_block(S_ptr, tile, ks, vs, K: tl.constexpr, V: tl.constexpr):
    """A block [ks, vs] of the state at a chunk."""
    mask = exist(ks, K)[:, None] & exist(vs, V)[None, :]
    return tl.load(S_ptr + tile * (K * V) + ks[:, None] * V + vs[None, :], mask=mask, other=0.0)


@triton.jit
def store_pairs(E_ptr, F_ptr, E, F, beta, place, mask):
    """E and beta F, laid out for the rows of dq and dk."""
    tl.store(E_ptr + place, E.to(E_ptr.dtype.element_ty), mask=mask)
    tl.store(F_ptr + place, (F * beta[None, :]).to(F_ptr.dtype.element_ty), mask=mask)


@triton.jit
def from_here_on(x, WIDE: tl.constexpr, C: tl.constexpr):
    """sum_{i >= t} x_ji for all t: a product with ones takes a third of a cumulative sum's shuffles."""
    if WIDE:
        return tl.cumsum(x, 1, reverse=True)
    else:
        tokens = tl.arange(0, C)
        ones = tl.where(tokens[:, None] >= tokens[None, :], 1.0, 0.0).to(tl.bfloat16)
        # two numbers of 8 bits each for one of fp32: 2^-17 of x is lost
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(low, ones, tl.dot(high, ones))


@kernel
def pairs_bwd_kernel(
    q_ptr, k_ptr, v_ptr, G_ptr, A_inv_ptr, q_rstd_ptr, k_rstd_ptr, S_in_ptr, dS_ptr, do_ptr, table_ptr,
    E_ptr, F_ptr, dv_ptr, shares_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    T, HV, ratio, chunks_per_row, scale, width,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, REFINE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HV
    chunk = tl.program_id(0) // HV
    key_head = head // ratio
    num_heads = HV // ratio
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    operand: tl.constexpr = operand_of(k_ptr, REFINE)
    tokens = tl.arange(0, C)
    place = row.to(tl.int64) * T + first + tokens
    if length <= 0:
        # tokens of no sequence
        for strip in range(0, V, BV):
            vs = strip + tl.arange(0, BV)
            is_past = (tokens < -length)[:, None] & exist(vs, V)[None, :]
            dv_place = dv_ptr + (place * HV + head)[:, None] * V + vs[None, :]
            tl.store(dv_place, tl.zeros([C, BV], k_ptr.dtype.element_ty), mask=is_past)
        return

    is_token = tokens < length
    ks = tl.arange(0, BK)
    tile = chunk.to(tl.int64) * HV + head
    k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT).to(operand)
    q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT).to(operand)
    beta = factor(shares_ptr, tile, 3, C)
    k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    q_rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    blocks: tl.constexpr = (K + BK - 1) // BK
    at_once: tl.constexpr = unrolled(operand, blocks)
    high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
    into = tl.exp(high)
    out = decay(high, low, end_high, end_low)
    A_inv = tl.load(A_inv_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :]).to(operand)
    E = tl.zeros([C, C], tl.float32)
    F = tl.zeros([C, C], tl.float32)
    apart = tl.zeros([C], tl.float32)
    whole = tl.zeros([C], tl.float32)
    from_q = tl.zeros([C], tl.float32)
    from_k = tl.zeros([C], tl.float32)
    leaving = tl.zeros([C], tl.float32)
    through = 0.0
    for strip in range(0, V, BV):
        vs = strip + tl.arange(0, BV)
        kS = tl.zeros([C, BV], tl.float32)
        qS = tl.zeros([C, BV], tl.float32)
        S = state_block(S_in_ptr, tile, ks, vs, K, V).to(operand)
        for block in tl.range(0, blocks, loop_unroll_factor=at_once):
            if blocks > 1:
                ks = block * BK + tl.arange(0, BK)
                k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT).to(operand)
                q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT).to(operand)
                S = state_block(S_in_ptr, tile, ks, vs, K, V).to(operand)
            qS = dot(q, S, qS, PRECISION)
            kS = dot(k, S, kS, PRECISION)
        do = rows_of(do_ptr, row, first, length, head, do_b, do_t, do_h, vs, V, C, UNIT).to(operand)
        from_q += tl.sum(do.to(tl.float32) * qS, 1)
        kS *= (into * k_rstd)[:, None]
        dr_place = dv_ptr + (place * HV + head)[:, None] * V + vs[None, :]
        dr_mask = is_token[:, None] & exist(vs, V)[None, :]
        dr = tl.load(dr_place, mask=dr_mask, other=0.0).to(operand)
        wide_dr = dr.to(tl.float32)
        from_k -= tl.sum(wide_dr * kS, 1)
        v = rows_of(v_ptr, row, first, length, head, v_b, v_t, v_h, vs, V, C, UNIT)
        error = v.to(tl.float32) - kS
        apart += tl.sum(wide_dr * error, 1)
        v_new = solved(A_inv, beta[:, None] * error, PRECISION)
        whole += tl.sum(wide_dr * v_new, 1)
        kdS = tl.zeros([C, BV], tl.float32)
        for block in tl.range(0, blocks, loop_unroll_factor=at_once):
            if blocks > 1:
                ks = block * BK + tl.arange(0, BK)
                k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT).to(operand)
                S = state_block(S_in_ptr, tile, ks, vs, K, V).to(operand)
            dS = state_block(dS_ptr, tile, ks, vs, K, V).to(operand)
            through += tl.sum(S.to(tl.float32) * dS.to(tl.float32))
            kdS = dot(k, dS, kdS, PRECISION)
        leaving += tl.sum(v_new * kdS, 1)
        v_operand = v_new.to(operand)
        E = dot(v_operand, tl.trans(do), E, PRECISION)
        F = dot(v_operand, tl.trans(dr), F, PRECISION)
        # every lane has read dr by now; dv goes where it lay
        tl.debug_barrier()
        tl.store(dr_place, (wide_dr * beta[:, None]).to(dv_ptr.dtype.element_ty), mask=dr_mask)
    from_q *= scale * into * q_rstd
    from_k *= beta
    leaving *= out * k_rstd
    # [j, i]: key j down, query i across; vectors across are fetched here: each would hold 16 registers above
    is_below = tokens[:, None] < tokens[None, :]
    high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
    D = decay(high[:, None], low[:, None], high[None, :], low[None, :])
    E = tl.where(tokens[:, None] <= tokens[None, :], E * D * scale, 0.0)
    F = tl.where(is_below, -F * D, 0.0)
    # width comes in units of 16, so that the compiler knows rows to be aligned
    pairs_place = (place * num_heads + key_head) * (width * 16) + (head % ratio) * C
    pairs_place = pairs_place[None, :] + tokens[:, None]
    pairs_mask = is_token[None, :] & (tokens[:, None] < C)
    if keeps_norms(E_ptr):
        store_pairs(E_ptr, F_ptr, E, F, factor(shares_ptr, tile, 3, C), pairs_place, pairs_mask)
    rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    E = E * k_rstd[:, None] * rstd[None, :]
    rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    F = F * k_rstd[:, None] * rstd[None, :]
    if not keeps_norms(E_ptr):
        store_pairs(E_ptr, F_ptr, E, F, factor(shares_ptr, tile, 3, C), pairs_place, pairs_mask)
    qk = tl.zeros([C, C], tl.float32)
    kk = tl.zeros([C, C], tl.float32)
    for block in tl.range(0, blocks, loop_unroll_factor=at_once):
        if blocks > 1:
            ks = block * BK + tl.arange(0, BK)
            k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT).to(operand)
            q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT).to(operand)
        qk = dot(k, tl.trans(q), qk, PRECISION)
        kk = dot(k, tl.trans(k), kk, PRECISION)
    E = E * qk
    F = F * kk
    beta = factor(shares_ptr, tile, 3, C)
    # <dr, v_new> / beta cancels nothing; where beta is next to nothing, its two parts
    is_small = beta < SMALL
    dbeta = tl.where(is_small, apart + tl.sum(F, 0), whole / tl.where(is_small, 1.0, beta))
    F = F * beta[None, :]
    # what g_t decays: the pairs with i >= t > j
    sums = from_here_on(tl.where(is_below, E + F, 0.0), k_ptr.dtype.element_ty == tl.float32, C)
    shares = shares_ptr + tile * (FACTORS * C) + tokens
    tl.store(shares, tl.sum(tl.where(is_below, sums, 0.0), 0))
    tl.store(shares + C, from_q + from_k)
    tl.store(shares + 2 * C, leaving)
    tl.store(shares + 7 * C, dbeta)
    if q_rstd_ptr is not None and blocks > 1:
        # <q, dq> and <k, dk>, which the norms' adjoint takes off
        tl.store(shares + 4 * C, from_q + tl.sum(E, 0))
        tl.store(shares + 5 * C, from_k + leaving + tl.sum(E + F, 1) + tl.sum(F, 0))
    tl.store(shares_ptr + tile * (FACTORS * C) + 6 * C, through)


@triton.jit
def through_norm(
    dx, along, x_ptr, rstd, row, first, length, head, x_b, x_t, x_h, columns,
    D: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Gradient of raw rows x from dx = rstd dn, dn being that of n = x rstd: dx - x rstd^2 <n, dn>.

    Of a whole row <n, dn> = <x, dx> is summed here, with dx's own rounding, so that what lies along x
    cancels; of a block of one, `along` has it.
    """
    x = rows_of(x_ptr, row, first, length, head, x_b, x_t, x_h, columns, D, C, UNIT).to(tl.float32)
    if columns.shape[0] >= D:
        along = tl.sum(x * dx, 1)
    return dx - x * (along * rstd * rstd)[:, None]


@kernel
def rows_bwd_kernel(
    q_ptr, k_ptr, v_ptr, G_ptr, A_inv_ptr, q_rstd_ptr, k_rstd_ptr, S_in_ptr, dS_ptr, do_ptr, dv_ptr,
    table_ptr, E_ptr, F_ptr, shares_ptr, dq_ptr, dk_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    T, HV, ratio, chunks_per_row, scale, width,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, REFINE: tl.constexpr,
):  # fmt: skip
    num_heads = HV // ratio
    blocks: tl.constexpr = (K + BK - 1) // BK
    own = tl.program_id(0) % blocks
    key_head = (tl.program_id(0) // blocks) % num_heads
    chunk = tl.program_id(0) // (blocks * num_heads)
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    operand: tl.constexpr = operand_of(k_ptr, REFINE)
    tokens = tl.arange(0, C)
    at_once: tl.constexpr = unrolled(operand, blocks)
    of_pairs: tl.constexpr = operand_of(k_ptr, REFINE or keeps_norms(k_ptr))
    is_token = tokens < length
    place = row.to(tl.int64) * T + first + tokens
    ks = own * BK + tl.arange(0, BK)
    key_place = (place * num_heads + key_head)[:, None] * K + ks[None, :]
    if length <= 0:
        is_past = (tokens < -length)[:, None] & exist(ks, K)[None, :]
        tl.store(dq_ptr + key_place, tl.zeros([C, BK], k_ptr.dtype.element_ty), mask=is_past)
        tl.store(dk_ptr + key_place, tl.zeros([C, BK], k_ptr.dtype.element_ty), mask=is_past)
        return

    k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT).to(operand)
    k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    q_rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    # of the normalised rows' gradients, times rstd
    dq = tl.zeros([C, BK], tl.float32)
    dk = tl.zeros([C, BK], tl.float32)
    q_along = tl.zeros([C], tl.float32)
    k_along = tl.zeros([C], tl.float32)
    for j in range(ratio):
        head = key_head * ratio + j
        tile = chunk.to(tl.int64) * HV + head
        beta = factor(shares_ptr, tile, 3, C)
        high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
        into = tl.exp(high)
        out = decay(high, low, end_high, end_low) * k_rstd
        A_inv = tl.load(A_inv_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :]).to(operand)
        for strip in range(0, V, BV):
            vs = strip + tl.arange(0, BV)
            S = state_block(S_in_ptr, tile, ks, vs, K, V).to(operand)
            dS = state_block(dS_ptr, tile, ks, vs, K, V).to(operand)
            v = rows_of(v_ptr, row, first, length, head, v_b, v_t, v_h, vs, V, C, UNIT)
            do = rows_of(do_ptr, row, first, length, head, do_b, do_t, do_h, vs, V, C, UNIT)
            dv_mask = is_token[:, None] & exist(vs, V)[None, :]
            dv = tl.load(dv_ptr + (place * HV + head)[:, None] * V + vs[None, :], mask=dv_mask, other=0.0)
            kS = dot(k, S, None, PRECISION)
            for other in tl.range(1, blocks, loop_unroll_factor=at_once):
                js = (own + other) % blocks * BK + tl.arange(0, BK)
                k_other = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, js, K, C, UNIT)
                S_other = state_block(S_in_ptr, tile, js, vs, K, V).to(operand)
                kS = dot(k_other.to(operand), S_other, kS, PRECISION)
            error = v.to(tl.float32) - kS * (into * k_rstd)[:, None]
            v_new = solved(A_inv, beta[:, None] * error, PRECISION)
            do = (do.to(tl.float32) * (scale * into * q_rstd)[:, None]).to(operand)
            dq = dot(do, tl.trans(S), dq, PRECISION)
            dv = (dv.to(tl.float32) * -(into * k_rstd)[:, None]).to(operand)
            dk = dot(dv, tl.trans(S), dk, PRECISION)
            dk = dot((v_new * out[:, None]).to(operand), tl.trans(dS), dk, PRECISION)
        pairs_place = ((place * num_heads + key_head) * (width * 16) + j * C)[:, None] + tokens[None, :]
        pairs_mask = is_token[:, None] & (tokens < C)[None, :]
        if q_rstd_ptr is not None and blocks > 1:
            shares = shares_ptr + tile * (FACTORS * C) + tokens
            q_along += tl.load(shares + 4 * C)
            k_along += tl.load(shares + 5 * C)
        F = tl.load(F_ptr + pairs_place, mask=pairs_mask, other=0.0)
        if keeps_norms(F_ptr):
            F = F.to(tl.float32) * k_rstd[:, None] * k_rstd[None, :]
        F = F.to(of_pairs)
        pairs_k = k.to(of_pairs)
        dk = dot(F, pairs_k, dk, PRECISION)
        dk = dot(tl.trans(F), pairs_k, dk, PRECISION)
        E = tl.load(E_ptr + pairs_place, mask=pairs_mask, other=0.0)
        if keeps_norms(E_ptr):
            E = E.to(tl.float32) * q_rstd[:, None] * k_rstd[None, :]
        E = E.to(of_pairs)
        dq = dot(E, pairs_k, dq, PRECISION)
        q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT).to(of_pairs)
        dk = dot(tl.trans(E), q, dk, PRECISION)
    # E and F have been read by every lane; dq and dk go where they may have lain
    tl.debug_barrier()
    mask = is_token[:, None] & exist(ks, K)[None, :]
    if q_rstd_ptr is not None:
        dq = through_norm(
            dq, q_along, q_ptr, q_rstd, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT
        )
        dk = through_norm(
            dk, k_along, k_ptr, k_rstd, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT
        )
    tl.store(dq_ptr + key_place, dq.to(dq_ptr.dtype.element_ty), mask=mask)
    tl.store(dk_ptr + key_place, dk.to(dk_ptr.dtype.element_ty), mask=mask)
