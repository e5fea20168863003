"""The gradients of all chunks at once, from what the two state passes left: S_in, dS (of the state that
leaves), and dr in the place of dv. With v_new = A_inv beta (v - e^G k S_in) made again, and for tokens j <= i

    E_ij = scale D_ij <do_i, v_new_j>;   F_ij = -beta_i D_ij <dr_i, v_new_j>, i > j;   D_ij = e^(G_i - G_j)
    dq = scale e^G do S_in^T + E k
    dk = e^(G_C - G) v_new dS^T - beta e^G dr S_in^T + E^T q + (F + F^T) k
    dv = beta dr;   dbeta = <dr, v - e^G k S_in> + row sums of F kk / beta
    dg_t = e^(G_C) <S_in, dS> + sum_{i >= t > j} (E qk + F kk)_ij
           + sum_{i >= t} (<q_i, dq_i through S> + <k_i, dk_i through S>) + sum_{j < t} <k_j, dk_j through dS>

in which nothing cancels. The first kernel, a program per chunk and value head, makes E, F, dv and all that
the gates need; the second, a program per chunk and key head, dq and dk, summed over the value heads in
registers. One kernel for both would need twice the registers there are. E and F wait in the places of dq and
dk, which are the second kernel's to fill: rows i, and a block of columns j for each value head.

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
    rounded_off,
    rows_of,
    solved,
    through_state,
    through_state_turned,
)
from gdn.backends.triton.pairs import FACTORS, factor


@triton.jit
def state_block(S_ptr, tile, ks, vs, K: tl.constexpr, V: tl.constexpr):
    """A block [ks, vs] of the state at a chunk."""
    mask = exist(ks, K)[:, None] & exist(vs, V)[None, :]
    return tl.load(S_ptr + tile * (K * V) + ks[:, None] * V + vs[None, :], mask=mask, other=0.0)


@kernel
def pairs_bwd_kernel(
    q_ptr, k_ptr, v_ptr, G_ptr, A_inv_ptr, q_rstd_ptr, k_rstd_ptr, S_in_ptr, dS_ptr, do_ptr, table_ptr,
    E_ptr, F_ptr, dv_ptr, shares_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    T, HV, ratio, chunks_per_row, scale, width,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HV
    chunk = tl.program_id(0) // HV
    key_head = head // ratio
    num_heads = HV // ratio
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    operand: tl.constexpr = k_ptr.dtype.element_ty
    tokens = tl.arange(0, C)
    place = row.to(tl.int64) * T + first + tokens
    if length <= 0:
        # tokens of no sequence
        for strip in range(0, V, BV):
            vs = strip + tl.arange(0, BV)
            is_past = (tokens < -length)[:, None] & exist(vs, V)[None, :]
            dv_place = dv_ptr + (place * HV + head)[:, None] * V + vs[None, :]
            tl.store(dv_place, tl.zeros([C, BV], operand), mask=is_past)
        return

    is_token = tokens < length
    ks = tl.arange(0, BK)
    tile = chunk.to(tl.int64) * HV + head
    k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
    q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT)
    beta = factor(shares_ptr, tile, 3, C)
    k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    q_rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    blocks: tl.constexpr = (K + BK - 1) // BK
    high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
    into = tl.exp(high)
    out = decay(high, low, end_high, end_low)
    A_inv = tl.load(A_inv_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :]).to(operand)
    E = tl.zeros([C, C], tl.float32)
    F = tl.zeros([C, C], tl.float32)
    dbeta = tl.zeros([C], tl.float32)
    from_q = tl.zeros([C], tl.float32)
    from_k = tl.zeros([C], tl.float32)
    leaving = tl.zeros([C], tl.float32)
    through = 0.0
    for strip in range(0, V, BV):
        vs = strip + tl.arange(0, BV)
        kS = tl.zeros([C, BV], tl.float32)
        qS = tl.zeros([C, BV], tl.float32)
        for block in tl.static_range(blocks):
            if blocks > 1:
                ks = block * BK + tl.arange(0, BK)
                k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
                q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT)
            S = state_block(S_in_ptr, tile, ks, vs, K, V)
            qS = through_state(q, S, qS, PRECISION)
            kS = through_state(k, S, kS, PRECISION)
        do = rows_of(do_ptr, row, first, length, head, do_b, do_t, do_h, vs, V, C, UNIT)
        from_q += tl.sum(do.to(tl.float32) * qS, 1)
        kS *= (into * k_rstd)[:, None]
        dr_place = dv_ptr + (place * HV + head)[:, None] * V + vs[None, :]
        dr_mask = is_token[:, None] & exist(vs, V)[None, :]
        dr = tl.load(dr_place, mask=dr_mask, other=0.0)
        wide_dr = dr.to(tl.float32)
        from_k -= tl.sum(wide_dr * kS, 1)
        v = rows_of(v_ptr, row, first, length, head, v_b, v_t, v_h, vs, V, C, UNIT)
        error = v.to(tl.float32) - kS
        dbeta += tl.sum(wide_dr * error, 1)
        v_new = solved(A_inv, beta[:, None] * error, operand, PRECISION)
        kdS = tl.zeros([C, BV], tl.float32)
        for block in tl.static_range(blocks):
            if blocks > 1:
                ks = block * BK + tl.arange(0, BK)
                k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
                S = state_block(S_in_ptr, tile, ks, vs, K, V)
            dS = state_block(dS_ptr, tile, ks, vs, K, V)
            through += tl.sum(S.to(tl.float32) * dS.to(tl.float32))
            kdS = through_state(k, dS, kdS, PRECISION)
        leaving += tl.sum(v_new * kdS, 1)
        v_operand = v_new.to(operand)
        E = dot(v_operand, tl.trans(do), E, PRECISION)
        F = dot(v_operand, tl.trans(dr), F, PRECISION)
        if S_in_ptr.dtype.element_ty != operand:
            v_operand = rounded_off(v_new, v_operand)
            E = dot(v_operand, tl.trans(do), E, PRECISION)
            F = dot(v_operand, tl.trans(dr), F, PRECISION)
        # every lane has read dr by now; dv goes where it lay
        tl.debug_barrier()
        tl.store(dr_place, (wide_dr * beta[:, None]).to(operand), mask=dr_mask)
    from_q *= scale * into * q_rstd
    from_k *= beta
    leaving *= out * k_rstd
    # [j, i]: key j down, query i across; vectors across are fetched here: each would hold 16 registers above
    is_below = tokens[:, None] < tokens[None, :]
    high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
    D = decay(high[:, None], low[:, None], high[None, :], low[None, :])
    E = tl.where(tokens[:, None] <= tokens[None, :], E * D * scale, 0.0)
    # width comes in units of 16, so that the compiler knows rows to be aligned
    pairs_place = (place * num_heads + key_head) * (width * 16) + (head % ratio) * C
    pairs_mask = is_token[None, :] & (tokens[:, None] < C)
    tl.store(E_ptr + pairs_place[None, :] + tokens[:, None], E.to(operand), mask=pairs_mask)
    qk = tl.zeros([C, C], tl.float32)
    kk = tl.zeros([C, C], tl.float32)
    for block in tl.static_range(blocks):
        if blocks > 1:
            ks = block * BK + tl.arange(0, BK)
            k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
            q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT)
        qk = dot(k, tl.trans(q), qk, PRECISION)
        kk = dot(k, tl.trans(k), kk, PRECISION)
    rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    E = E * qk * k_rstd[:, None] * rstd[None, :]
    F = tl.where(is_below, -F * D, 0.0)
    rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    kk = kk * k_rstd[:, None] * rstd[None, :]
    dbeta += tl.sum(F * kk, 0)
    beta = factor(shares_ptr, tile, 3, C)
    F = F * beta[None, :]
    tl.store(F_ptr + pairs_place[None, :] + tokens[:, None], F.to(operand), mask=pairs_mask)
    F = F * kk
    # what g_t decays: the pairs with i >= t > j
    sums = tl.cumsum(tl.where(is_below, E + F, 0.0), 1, reverse=True)
    shares = shares_ptr + tile * (FACTORS * C) + tokens
    tl.store(shares, tl.sum(tl.where(is_below, sums, 0.0), 0))
    tl.store(shares + C, from_q + from_k)
    tl.store(shares + 2 * C, leaving)
    tl.store(shares + 7 * C, dbeta)
    if q_rstd_ptr is not None:
        # <q, dq> and <k, dk>, which the norms' adjoint takes off
        tl.store(shares + 4 * C, from_q + tl.sum(E, 0))
        tl.store(shares + 5 * C, from_k + leaving + tl.sum(E + F, 1) + tl.sum(F, 0))
    tl.store(shares_ptr + tile * (FACTORS * C) + 6 * C, through)


@triton.jit
def normal_rows(
    x_ptr, rstd_ptr, row, first, length, head, x_b, x_t, x_h, columns, T, H, D: tl.constexpr, C: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """A chunk's rows of q or k, normalised if they are to be."""
    x = rows_of(x_ptr, row, first, length, head, x_b, x_t, x_h, columns, D, C, UNIT)
    if rstd_ptr is None:
        return x
    else:
        return (x.to(tl.float32) * load_rstd(rstd_ptr, row, first, length, head, T, H, C)[:, None]).to(
            x.dtype
        )


@triton.jit
def through_norm(
    dx, along, x_ptr, rstd_ptr, row, first, length, head, x_b, x_t, x_h, columns, T, H, D: tl.constexpr,
    C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Gradient of raw rows x from that of n = x rstd: dx = (dn - n <n, dn>) rstd."""
    if rstd_ptr is None:
        return dx
    else:
        x = rows_of(x_ptr, row, first, length, head, x_b, x_t, x_h, columns, D, C, UNIT)
        rstd = load_rstd(rstd_ptr, row, first, length, head, T, H, C)
        return (dx - x.to(tl.float32) * (along * rstd)[:, None]) * rstd[:, None]


@kernel
def rows_bwd_kernel(
    q_ptr, k_ptr, v_ptr, G_ptr, A_inv_ptr, q_rstd_ptr, k_rstd_ptr, S_in_ptr, dS_ptr, do_ptr, dv_ptr,
    table_ptr, E_ptr, F_ptr, shares_ptr, dq_ptr, dk_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    T, HV, ratio, chunks_per_row, scale, width,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    num_heads = HV // ratio
    blocks: tl.constexpr = (K + BK - 1) // BK
    own = tl.program_id(0) % blocks
    key_head = (tl.program_id(0) // blocks) % num_heads
    chunk = tl.program_id(0) // (blocks * num_heads)
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    operand: tl.constexpr = k_ptr.dtype.element_ty
    tokens = tl.arange(0, C)
    is_token = tokens < length
    place = row.to(tl.int64) * T + first + tokens
    ks = own * BK + tl.arange(0, BK)
    key_place = (place * num_heads + key_head)[:, None] * K + ks[None, :]
    if length <= 0:
        is_past = (tokens < -length)[:, None] & exist(ks, K)[None, :]
        tl.store(dq_ptr + key_place, tl.zeros([C, BK], operand), mask=is_past)
        tl.store(dk_ptr + key_place, tl.zeros([C, BK], operand), mask=is_past)
        return

    k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
    k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
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
        out = decay(high, low, end_high, end_low)
        A_inv = tl.load(A_inv_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :]).to(operand)
        for strip in range(0, V, BV):
            vs = strip + tl.arange(0, BV)
            S = state_block(S_in_ptr, tile, ks, vs, K, V)
            dS = state_block(dS_ptr, tile, ks, vs, K, V)
            v = rows_of(v_ptr, row, first, length, head, v_b, v_t, v_h, vs, V, C, UNIT)
            do = rows_of(do_ptr, row, first, length, head, do_b, do_t, do_h, vs, V, C, UNIT)
            dv_mask = is_token[:, None] & exist(vs, V)[None, :]
            dv = tl.load(dv_ptr + (place * HV + head)[:, None] * V + vs[None, :], mask=dv_mask, other=0.0)
            kS = through_state(k, S, tl.zeros([C, BV], tl.float32), PRECISION)
            for other in tl.static_range(1, blocks):
                js = (own + other) % blocks * BK + tl.arange(0, BK)
                k_other = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, js, K, C, UNIT)
                kS = through_state(k_other, state_block(S_in_ptr, tile, js, vs, K, V), kS, PRECISION)
            error = v.to(tl.float32) - kS * (into * k_rstd)[:, None]
            v_new = solved(A_inv, beta[:, None] * error, operand, PRECISION)
            do = (do.to(tl.float32) * (scale * into)[:, None]).to(operand)
            dq = through_state_turned(do, S, dq, PRECISION)
            dv = (dv.to(tl.float32) * -into[:, None]).to(operand)
            dk = through_state_turned(dv, S, dk, PRECISION)
            dk = through_state_turned((v_new * out[:, None]).to(operand), dS, dk, PRECISION)
        pairs_place = ((place * num_heads + key_head) * (width * 16) + j * C)[:, None] + tokens[None, :]
        pairs_mask = is_token[:, None] & (tokens < C)[None, :]
        if q_rstd_ptr is not None:
            shares = shares_ptr + tile * (FACTORS * C) + tokens
            q_along += tl.load(shares + 4 * C)
            k_along += tl.load(shares + 5 * C)
        normal_k = normal_rows(
            k_ptr, k_rstd_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, T, num_heads, K, C, UNIT
        )
        F = tl.load(F_ptr + pairs_place, mask=pairs_mask, other=0.0)
        dk = dot(F, normal_k, dk, PRECISION)
        dk = dot(tl.trans(F), normal_k, dk, PRECISION)
        E = tl.load(E_ptr + pairs_place, mask=pairs_mask, other=0.0)
        dq = dot(E, normal_k, dq, PRECISION)
        normal_q = normal_rows(
            q_ptr, q_rstd_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, T, num_heads, K, C, UNIT
        )
        dk = dot(tl.trans(E), normal_q, dk, PRECISION)
    # E and F have been read by every lane; dq and dk go where they may have lain
    tl.debug_barrier()
    mask = is_token[:, None] & exist(ks, K)[None, :]
    dq = through_norm(
        dq, q_along, q_ptr, q_rstd_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, T, num_heads, K, C,
        UNIT,
    )  # fmt: skip
    tl.store(dq_ptr + key_place, dq.to(operand), mask=mask)
    dk = through_norm(
        dk, k_along, k_ptr, k_rstd_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, T, num_heads, K, C,
        UNIT,
    )  # fmt: skip
    tl.store(dk_ptr + key_place, dk.to(operand), mask=mask)
