"""The gradients of all chunks at once, from what the two state passes left: S_in, dS (of the state that
leaves), and dr in the place of dv. With v_new = A_inv beta (v - e^G k S_in) made again, and for tokens j <= i

    E_ij = scale D_ij <do_i, v_new_j>;   F_ij = -beta_i D_ij <dr_i, v_new_j>, i > j;   D_ij = e^(G_i - G_j)
    dq = scale e^G do S_in^T + E k
    dk = e^(G_C - G) v_new dS^T - beta e^G dr S_in^T + E^T q + (F + F^T) k
    dv = beta dr;   dbeta = <dr, v - e^G k S_in> + row sums of F kk / beta
    dg_t = e^(G_C) <S_in, dS> + sum_{i >= t > j} (E qk + F kk)_ij
           + sum_{i >= t} (<q_i, dq_i through S> + <k_i, dk_i through S>) + sum_{j < t} <k_j, dk_j through dS>

in which nothing cancels. The first kernel, a program per chunk and value head, makes E, F, dv and all that the
gates need; the second, a program per chunk and key head, dq and dk, summed over the value heads in registers.
One kernel for both would need twice the registers there are. E and F wait in the places of dq and dk, which
are the second kernel's to fill: rows i, and a block of columns j for each value head.

Bytes per token and value head at K = V = 128 in bf16, HV = H: q, k, v, do, dr, dv 1536, S_in and dS 1024,
A_inv 128, E and F 256, factors 40: 2990; and q, k, v, do, dv 1280, S_in and dS 1024, A_inv, E and F 384, dq
and dk 512: 3200.
"""

import triton
import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import decay, dot, exist, load_beta, load_rstd, load_sums, rows_of


@triton.jit
def state_block(S_ptr, tile, ks, vs, K: tl.constexpr, V: tl.constexpr):
    """A block [ks, vs] of the state at a chunk."""
    mask = exist(ks, K)[:, None] & exist(vs, V)[None, :]
    return tl.load(S_ptr + tile * (K * V) + ks[:, None] * V + vs[None, :], mask=mask, other=0.0)


@kernel
def pairs_bwd_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, G_ptr, A_inv_ptr, q_rstd_ptr, k_rstd_ptr, S_in_ptr, dS_ptr, do_ptr, table_ptr,
    E_ptr, F_ptr, dv_ptr, shares_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, beta_b, beta_t, beta_h,
    T, HV, ratio, chunks_per_row, scale, width,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr,
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
    beta = load_beta(beta_ptr, row, first, length, head, beta_b, beta_t, beta_h, C, SIGMOID, NEGATIVE)
    k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    q_rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
    into = tl.exp(high)
    out = decay(high, low, end_high, end_low)
    A_inv = tl.load(A_inv_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :]).to(operand)
    E = tl.zeros([C, C], tl.float32)
    F = tl.zeros([C, C], tl.float32)
    dbeta = tl.zeros([C], tl.float32)
    entering = tl.zeros([C], tl.float32)
    leaving = tl.zeros([C], tl.float32)
    through = 0.0
    for strip in range(0, V, BV):
        vs = strip + tl.arange(0, BV)
        S = state_block(S_in_ptr, tile, ks, vs, K, V).to(operand)
        dS = state_block(dS_ptr, tile, ks, vs, K, V)
        dr_place = dv_ptr + (place * HV + head)[:, None] * V + vs[None, :]
        dr_mask = is_token[:, None] & exist(vs, V)[None, :]
        dr = tl.load(dr_place, mask=dr_mask, other=0.0)
        v = rows_of(v_ptr, row, first, length, head, v_b, v_t, v_h, vs, V, C, UNIT)
        do = rows_of(do_ptr, row, first, length, head, do_b, do_t, do_h, vs, V, C, UNIT)
        through += tl.sum(S.to(tl.float32) * dS.to(tl.float32))
        entering += scale * into * q_rstd * tl.sum(do.to(tl.float32) * dot(q, S, None, PRECISION), 1)
        kS = dot(k, S, None, PRECISION) * (into * k_rstd)[:, None]
        wide_dr = dr.to(tl.float32)
        entering -= beta * tl.sum(wide_dr * kS, 1)
        error = v.to(tl.float32) - kS
        dbeta += tl.sum(wide_dr * error, 1)
        v_new = dot(A_inv, (beta[:, None] * error).to(operand), None, PRECISION)
        leaving += out * k_rstd * tl.sum(v_new * dot(k, dS, None, PRECISION), 1)
        E = dot(v_new.to(operand), tl.trans(do), E, PRECISION)
        F = dot(v_new.to(operand), tl.trans(dr), F, PRECISION)
        # every lane has read dr by now; dv goes where it lay
        tl.debug_barrier()
        tl.store(dr_place, (wide_dr * beta[:, None]).to(operand), mask=dr_mask)
    # [j, i]: key j down, query i across; vectors across are fetched here, as each would hold 16 registers above
    is_below = tokens[:, None] < tokens[None, :]
    high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
    D = decay(high[:, None], low[:, None], high[None, :], low[None, :])
    E = tl.where(tokens[:, None] <= tokens[None, :], E * D * scale, 0.0)
    pairs_place = (place * num_heads + key_head) * width + (head % ratio) * C
    pairs_mask = is_token[None, :] & (tokens[:, None] < C)
    tl.store(E_ptr + pairs_place[None, :] + tokens[:, None], E.to(operand), mask=pairs_mask)
    rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    crossing = E * dot(k, tl.trans(q), None, PRECISION) * rstd[None, :]
    F = tl.where(is_below, -F * D, 0.0)
    rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    kk = dot(k, tl.trans(k), None, PRECISION) * k_rstd[:, None] * rstd[None, :]
    dbeta += tl.sum(F * kk, 0)
    beta = load_beta(beta_ptr, row, first, length, head, beta_b, beta_t, beta_h, C, SIGMOID, NEGATIVE)
    F = F * beta[None, :]
    tl.store(F_ptr + pairs_place[None, :] + tokens[:, None], F.to(operand), mask=pairs_mask)
    # what g_t decays: the pairs with i >= t > j
    crossing = tl.where(is_below, crossing * k_rstd[:, None] + F * kk, 0.0)
    sums = tl.cumsum(crossing, 1, reverse=True)
    shares = shares_ptr + tile * (5 * C) + tokens
    tl.store(shares, tl.sum(tl.where(is_below, sums, 0.0), 0))
    tl.store(shares + C, entering)
    tl.store(shares + 2 * C, leaving)
    tl.store(shares + 3 * C, dbeta)
    tl.store(shares_ptr + tile * (5 * C) + 4 * C, through)


@triton.jit
def normalised(x, rstd, rstd_ptr):
    """Rows x rstd."""
    if rstd_ptr is None:
        return x
    else:
        return (x.to(tl.float32) * rstd[:, None]).to(x.dtype)


@triton.jit
def through_norm(dx, x, rstd, rstd_ptr):
    """Gradient of raw rows x from that of x rstd: what lies along x drops out."""
    if rstd_ptr is None:
        return dx
    else:
        normal = x.to(tl.float32) * rstd[:, None]
        return (dx - normal * tl.sum(normal * dx, 1)[:, None]) * rstd[:, None]


@kernel
def rows_bwd_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, G_ptr, A_inv_ptr, q_rstd_ptr, k_rstd_ptr, S_in_ptr, dS_ptr, do_ptr, dv_ptr,
    table_ptr, E_ptr, F_ptr, dq_ptr, dk_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, beta_b, beta_t, beta_h,
    T, HV, ratio, chunks_per_row, scale, width,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    num_heads = HV // ratio
    key_head = tl.program_id(0) % num_heads
    chunk = tl.program_id(0) // num_heads
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    operand: tl.constexpr = k_ptr.dtype.element_ty
    tokens = tl.arange(0, C)
    is_token = tokens < length
    place = row.to(tl.int64) * T + first + tokens
    ks = tl.arange(0, BK)
    key_place = (place * num_heads + key_head)[:, None] * K + ks[None, :]
    if length <= 0:
        is_past = (tokens < -length)[:, None] & exist(ks, K)[None, :]
        tl.store(dq_ptr + key_place, tl.zeros([C, BK], operand), mask=is_past)
        tl.store(dk_ptr + key_place, tl.zeros([C, BK], operand), mask=is_past)
        return

    k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
    q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT)
    k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    q_rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    dq = tl.zeros([C, BK], tl.float32)
    dk = tl.zeros([C, BK], tl.float32)
    for j in range(ratio):
        head = key_head * ratio + j
        tile = chunk.to(tl.int64) * HV + head
        beta = load_beta(beta_ptr, row, first, length, head, beta_b, beta_t, beta_h, C, SIGMOID, NEGATIVE)
        high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
        into = tl.exp(high)
        out = decay(high, low, end_high, end_low)
        A_inv = tl.load(A_inv_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :]).to(operand)
        for strip in range(0, V, BV):
            vs = strip + tl.arange(0, BV)
            S = state_block(S_in_ptr, tile, ks, vs, K, V).to(operand)
            dS = state_block(dS_ptr, tile, ks, vs, K, V)
            v = rows_of(v_ptr, row, first, length, head, v_b, v_t, v_h, vs, V, C, UNIT)
            do = rows_of(do_ptr, row, first, length, head, do_b, do_t, do_h, vs, V, C, UNIT)
            dv_mask = is_token[:, None] & exist(vs, V)[None, :]
            dv = tl.load(dv_ptr + (place * HV + head)[:, None] * V + vs[None, :], mask=dv_mask, other=0.0)
            error = v.to(tl.float32) - dot(k, S, None, PRECISION) * (into * k_rstd)[:, None]
            v_new = dot(A_inv, (beta[:, None] * error).to(operand), None, PRECISION)
            do = (do.to(tl.float32) * (scale * into)[:, None]).to(operand)
            dq = dot(do, tl.trans(S), dq, PRECISION)
            dv = (dv.to(tl.float32) * -into[:, None]).to(operand)
            dk = dot(dv, tl.trans(S), dk, PRECISION)
            dk = dot((v_new * out[:, None]).to(operand), tl.trans(dS), dk, PRECISION)
        pairs_place = ((place * num_heads + key_head) * width + j * C)[:, None] + tokens[None, :]
        pairs_mask = is_token[:, None] & (tokens < C)[None, :]
        E = tl.load(E_ptr + pairs_place, mask=pairs_mask, other=0.0)
        dq = dot(E, normalised(k, k_rstd, k_rstd_ptr), dq, PRECISION)
        dk = dot(tl.trans(E), normalised(q, q_rstd, q_rstd_ptr), dk, PRECISION)
        F = tl.load(F_ptr + pairs_place, mask=pairs_mask, other=0.0)
        dk = dot(F, normalised(k, k_rstd, k_rstd_ptr), dk, PRECISION)
        dk = dot(tl.trans(F), normalised(k, k_rstd, k_rstd_ptr), dk, PRECISION)
    # E and F have been read by every lane; dq and dk go where they lay
    tl.debug_barrier()
    mask = is_token[:, None] & exist(ks, K)[None, :]
    dq = through_norm(dq, q, q_rstd, q_rstd_ptr)
    tl.store(dq_ptr + key_place, dq.to(operand), mask=mask)
    dk = through_norm(dk, k, k_rstd, k_rstd_ptr)
    tl.store(dk_ptr + key_place, dk.to(operand), mask=mask)
