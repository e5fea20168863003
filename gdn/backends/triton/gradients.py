"""The gradients of all chunks at once, from what the two state passes left: S_in, dS (of the state that
leaves), and dr in the place of dv. With v_new = A_inv beta (v - e^G k S_in) made again, and for tokens j <= i

    E_ij = scale D_ij <do_i, v_new_j>;   F_ij = -beta_i D_ij <dr_i, v_new_j>, i > j;   D_ij = e^(G_i - G_j)
    dq = scale e^G do S_in^T + E k
    dk = e^(G_C - G) v_new dS^T - beta e^G dr S_in^T + E^T q + (F + F^T) k
    dv = beta dr;   dbeta = <dr, v - e^G k S_in> + row sums of F kk / beta
    dg_t = e^(G_C) <S_in, dS> + sum_{i >= t > j} (E qk + F kk)_ij
           + sum_{i >= t} (<q_i, dq_i through S> + <k_i, dk_i through S>) + sum_{j < t} <k_j, dk_j through dS>

in which nothing cancels; then back through the norm, the gate and the sigmoid. One program takes a chunk of a
key head through all its value heads, so that dq and dk leave once, summed. dq is held transposed: every
product then has its left operand in memory or in the registers where it was made, and none is transposed.
Bytes per token and value head at K = V = 128 in bf16, HV = H: q, k, v, do, dr 1280, S_in and dS 1024,
A_inv 128, dq, dk, dv 768, gates 24: 3220.
"""

import triton
import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import decay, dot, exist, load_beta, load_rstd, load_sums, rows_of


@triton.jit
def store_nothing(
    dk_ptr, dv_ptr, place, length, key_head, HV, ratio, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Zeros for the -length tokens of no sequence."""
    is_past = tl.arange(0, C) < -length
    ks = tl.arange(0, BK)
    key_place = (place * (HV // ratio) + key_head)[:, None] * K + ks[None, :]
    zeros = tl.zeros([C, BK], dk_ptr.dtype.element_ty)
    tl.store(dk_ptr + key_place, zeros, mask=is_past[:, None] & exist(ks, K)[None, :])
    for j in range(ratio):
        head = key_head * ratio + j
        for strip in range(0, V, BV):
            vs = strip + tl.arange(0, BV)
            v_place = (place * HV + head)[:, None] * V + vs[None, :]
            v_mask = is_past[:, None] & exist(vs, V)[None, :]
            tl.store(dv_ptr + v_place, tl.zeros([C, BV], dv_ptr.dtype.element_ty), mask=v_mask)


@triton.jit
def through_norm(dx, x, rstd, rstd_ptr):
    """Gradient of raw rows x from that of x rstd: what lies along x drops out."""
    if rstd_ptr is None:
        return dx
    else:
        normal = x.to(tl.float32) * rstd[:, None]
        return (dx - normal * tl.sum(normal * dx, 1)[:, None]) * rstd[:, None]


@kernel
def keys_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, G_ptr, A_inv_ptr, q_rstd_ptr, k_rstd_ptr, S_in_ptr, dS_ptr, do_ptr, table_ptr,
    E_ptr, dk_ptr, dv_ptr, shares_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, beta_b, beta_t, beta_h,
    T, HV, ratio, chunks_per_row, scale,
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
    if length <= 0:
        store_nothing(dk_ptr, dv_ptr, place, length, key_head, HV, ratio, K, V, BK, BV, C)
        return

    ks = tl.arange(0, BK)
    k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
    k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT)
    q_rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    dk = tl.zeros([C, BK], tl.float32)
    # fp32 rows and their halves for tf32x3, kept for every use, would take 400 KB of shared memory
    IS_WIDE: tl.constexpr = operand == tl.float32
    for j in range(ratio):
        head = key_head * ratio + j
        tile = chunk.to(tl.int64) * HV + head
        square = tile * (C * C) + tokens[:, None] * C + tokens[None, :]
        beta = load_beta(beta_ptr, row, first, length, head, beta_b, beta_t, beta_h, C, SIGMOID, NEGATIVE)
        high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
        into = tl.exp(high)
        out = decay(high, low, end_high, end_low)
        A_inv = tl.load(A_inv_ptr + square).to(operand)
        E = tl.zeros([C, C], tl.float32)
        F = tl.zeros([C, C], tl.float32)
        dbeta = tl.zeros([C], tl.float32)
        entering = tl.zeros([C], tl.float32)
        leaving = tl.zeros([C], tl.float32)
        through = 0.0
        for strip in range(0, V, BV):
            if IS_WIDE:
                k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
                q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT)
            vs = strip + tl.arange(0, BV)
            S_mask = exist(ks, K)[:, None] & exist(vs, V)[None, :]
            S_place = tile * (K * V) + ks[:, None] * V + vs[None, :]
            S = tl.load(S_in_ptr + S_place, mask=S_mask, other=0.0)
            dS = tl.load(dS_ptr + S_place, mask=S_mask, other=0.0)
            through += tl.sum(S.to(tl.float32) * dS.to(tl.float32))
            S = S.to(operand)
            dr_place = (place * HV + head)[:, None] * V + vs[None, :]
            dr_mask = is_token[:, None] & exist(vs, V)[None, :]
            dr = tl.load(dv_ptr + dr_place, mask=dr_mask, other=0.0)
            wide_dr = dr.to(tl.float32)
            kS = dot(k, S, None, PRECISION) * (into * k_rstd)[:, None]
            entering -= beta * tl.sum(wide_dr * kS, 1)
            v = rows_of(v_ptr, row, first, length, head, v_b, v_t, v_h, vs, V, C, UNIT)
            error = v.to(tl.float32) - kS
            dbeta += tl.sum(wide_dr * error, 1)
            v_new = dot(A_inv, (beta[:, None] * error).to(operand), None, PRECISION)
            do = rows_of(do_ptr, row, first, length, head, do_b, do_t, do_h, vs, V, C, UNIT)
            entering += scale * into * q_rstd * tl.sum(do.to(tl.float32) * dot(q, S, None, PRECISION), 1)
            leaving += out * k_rstd * tl.sum(v_new * dot(k, dS, None, PRECISION), 1)
            E = dot(v_new.to(operand), tl.trans(do), E, PRECISION)
            F = dot(v_new.to(operand), tl.trans(dr), F, PRECISION)
            dk = dot((v_new * out[:, None]).to(operand), tl.trans(dS), dk, PRECISION)
            wide_dr = wide_dr * beta[:, None]
            dk = dot((wide_dr * -into[:, None]).to(operand), tl.trans(S), dk, PRECISION)
            # every lane has read dr by now; dv goes where it lay
            tl.debug_barrier()
            tl.store(dv_ptr + dr_place, wide_dr.to(operand), mask=dr_mask)
        if IS_WIDE:
            k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
        # [j, i]: key j down, query i across
        is_below = tokens[:, None] < tokens[None, :]
        high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
        D = decay(high[:, None], low[:, None], high[None, :], low[None, :])
        E = tl.where(tokens[:, None] <= tokens[None, :], E * D * scale, 0.0)
        F = tl.where(is_below, -F * D, 0.0)
        kk = dot(k, tl.trans(k), None, PRECISION) * k_rstd[:, None]
        rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
        dbeta += tl.sum(F * kk, 0) * rstd
        beta = load_beta(beta_ptr, row, first, length, head, beta_b, beta_t, beta_h, C, SIGMOID, NEGATIVE)
        F = F * beta[None, :]
        tl.store(E_ptr + square, (F * k_rstd[:, None]).to(operand))
        F = F * rstd[None, :]
        dk = dot(F.to(operand), k, dk, PRECISION)
        # F transposed comes from memory: a product of products must not be transposed in registers
        tl.debug_barrier()
        F_rows = tl.load(E_ptr + tile * (C * C) + tokens[None, :] * C + tokens[:, None])
        dk = dot(F_rows, k, dk, PRECISION)
        tl.debug_barrier()
        if IS_WIDE:
            q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT)
        tl.store(E_ptr + square, (E * k_rstd[:, None]).to(operand))
        E = E * load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)[None, :]
        dk = dot(E.to(operand), q, dk, PRECISION)
        crossing = F * kk + E * dot(k, tl.trans(q), None, PRECISION) * k_rstd[:, None]
        # what g_t decays: the pairs with i >= t > j
        sums = tl.cumsum(tl.where(is_below, crossing, 0.0), 1, reverse=True)
        shares = shares_ptr + tile * (5 * C) + tokens
        tl.store(shares, tl.sum(tl.where(is_below, sums, 0.0), 0))
        tl.store(shares + C, entering)
        tl.store(shares + 2 * C, leaving)
        tl.store(shares + 3 * C, dbeta)
        tl.store(shares_ptr + tile * (5 * C) + 4 * C, through)
    dk = through_norm(dk, k, k_rstd, k_rstd_ptr)
    key_place = (place * num_heads + key_head)[:, None] * K + ks[None, :]
    tl.store(dk_ptr + key_place, dk.to(operand), mask=is_token[:, None] & exist(ks, K)[None, :])


@kernel
def queries_kernel(
    q_ptr, k_ptr, G_ptr, q_rstd_ptr, k_rstd_ptr, S_in_ptr, do_ptr, E_ptr, table_ptr, dq_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, do_b, do_t, do_h, T, HV, ratio, chunks_per_row, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    num_heads = HV // ratio
    key_head = tl.program_id(0) % num_heads
    chunk = tl.program_id(0) // num_heads
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    operand: tl.constexpr = k_ptr.dtype.element_ty
    tokens = tl.arange(0, C)
    place = row.to(tl.int64) * T + first + tokens
    ks = tl.arange(0, BK)
    dq_place = (place * num_heads + key_head)[:, None] * K + ks[None, :]
    if length <= 0:
        is_past = (tokens < -length)[:, None] & exist(ks, K)[None, :]
        tl.store(dq_ptr + dq_place, tl.zeros([C, BK], operand), mask=is_past)
        return
    k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
    k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    dq = tl.zeros([C, BK], tl.float32)
    for j in range(ratio):
        head = key_head * ratio + j
        tile = chunk.to(tl.int64) * HV + head
        high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
        into = scale * tl.exp(high)
        for strip in range(0, V, BV):
            vs = strip + tl.arange(0, BV)
            S_mask = exist(ks, K)[:, None] & exist(vs, V)[None, :]
            S_place = tile * (K * V) + ks[:, None] * V + vs[None, :]
            S = tl.load(S_in_ptr + S_place, mask=S_mask, other=0.0).to(operand)
            do = rows_of(do_ptr, row, first, length, head, do_b, do_t, do_h, vs, V, C, UNIT)
            do = (do.to(tl.float32) * into[:, None]).to(operand)
            dq = dot(do, tl.trans(S), dq, PRECISION)
        E = tl.load(E_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :])
        dq = dot(tl.trans(E), k, dq, PRECISION)
    q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT)
    q_rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    dq = through_norm(dq, q, q_rstd, q_rstd_ptr)
    tl.store(dq_ptr + dq_place, dq.to(operand), mask=(tokens < length)[:, None] & exist(ks, K)[None, :])
