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
from gdn.backends.triton.lib import decay, dot, exist, load_beta, load_rstd, load_sums, rows_of, sigmoid
from gdn.backends.triton.prepare import log_decay


@triton.jit
def after(x, C: tl.constexpr):
    """sum_{i >= t} x_i, in fp64."""
    return tl.cumsum(x.to(tl.float64), 0, reverse=True)


@triton.jit
def before(x, C: tl.constexpr):
    """sum_{j < t} x_j, in fp64."""
    wide = x.to(tl.float64)
    return tl.cumsum(wide, 0) - wide


@triton.jit
def store_gates(
    dg, dbeta, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, dg_ptr, dbeta_ptr, dA_log_ptr, ddt_bias_ptr,
    row, first, length, head, chunk, g_b, g_t, g_h, beta_b, beta_t, beta_h, T, HV, C: tl.constexpr,
    SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """dg, dbeta of a chunk -> gradients of what the caller gave; dA_log and ddt_bias one number per chunk."""
    tokens = tl.arange(0, C)
    is_token = tokens < length
    place = (row.to(tl.int64) * T + first + tokens) * HV + head
    if dg_ptr is not None:
        g_place = g_ptr + row.to(tl.int64) * g_b + first.to(tl.int64) * g_t + head * g_h + tokens * g_t
        given = tl.load(g_place, mask=is_token, other=0.0).to(tl.float32)
        g = log_decay(given, A_log_ptr, dt_bias_ptr, head, RESET)
        # nothing passes a reset; the rounding of 0, times g = -1e6, would show in dA_log
        passes = is_token & (g > RESET)
        dg = tl.where(passes, dg, 0.0)
        if A_log_ptr is not None:
            logit = given
            if dt_bias_ptr is not None:
                logit += tl.load(dt_bias_ptr + head).to(tl.float32)
            slope = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32)) * sigmoid(logit)
            dA_log = tl.sum(tl.where(passes, dg * g, 0.0).to(tl.float64), 0)
            tl.store(dA_log_ptr + chunk.to(tl.int64) * HV + head, dA_log)
            dg = tl.where(passes, dg * slope, 0.0)
            if ddt_bias_ptr is not None:
                ddt_bias = tl.sum(dg.to(tl.float64), 0)
                tl.store(ddt_bias_ptr + chunk.to(tl.int64) * HV + head, ddt_bias)
        tl.store(dg_ptr + place, dg.to(dg_ptr.dtype.element_ty), mask=is_token)
    if dbeta_ptr is not None:
        if SIGMOID:
            beta_place = beta_ptr + row.to(tl.int64) * beta_b + first.to(tl.int64) * beta_t + head * beta_h
            logit = tl.load(beta_place + tokens * beta_t, mask=is_token, other=0.0).to(tl.float32)
            slope = sigmoid(logit) * sigmoid(-logit)
            if NEGATIVE:
                slope = 2.0 * slope
            dbeta = tl.where(is_token & (dbeta != 0), dbeta * slope, 0.0)
        tl.store(dbeta_ptr + place, dbeta.to(dbeta_ptr.dtype.element_ty), mask=is_token)


@triton.jit
def store_nothing(
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, dA_log_ptr, ddt_bias_ptr, place, length, key_head, chunk, HV,
    ratio, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Zeros for the -length tokens of no sequence, and for what an unused chunk adds to dA_log and ddt_bias."""
    is_past = tl.arange(0, C) < -length
    for first_k in range(0, K, BK):
        ks = first_k + tl.arange(0, BK)
        key_place = (place * (HV // ratio) + key_head)[:, None] * K + ks[None, :]
        mask = is_past[:, None] & exist(ks, K)[None, :]
        zeros = tl.zeros([C, BK], dq_ptr.dtype.element_ty)
        tl.store(dq_ptr + key_place, zeros, mask=mask)
        tl.store(dk_ptr + key_place, zeros, mask=mask)
    for j in range(ratio):
        head = key_head * ratio + j
        if dg_ptr is not None:
            tl.store(dg_ptr + place * HV + head, tl.zeros([C], dg_ptr.dtype.element_ty), mask=is_past)
        if dbeta_ptr is not None:
            tl.store(dbeta_ptr + place * HV + head, tl.zeros([C], dbeta_ptr.dtype.element_ty), mask=is_past)
        if dA_log_ptr is not None:
            tl.store(dA_log_ptr + chunk.to(tl.int64) * HV + head, 0.0)
        if ddt_bias_ptr is not None:
            tl.store(ddt_bias_ptr + chunk.to(tl.int64) * HV + head, 0.0)
        for strip in range(0, V, BV):
            vs = strip + tl.arange(0, BV)
            v_place = (place * HV + head)[:, None] * V + vs[None, :]
            v_mask = is_past[:, None] & exist(vs, V)[None, :]
            tl.store(dv_ptr + v_place, tl.zeros([C, BV], dv_ptr.dtype.element_ty), mask=v_mask)


@triton.jit
def block_of(S_ptr, tile, ks, vs, K: tl.constexpr, V: tl.constexpr):
    """A block [ks, vs] of a chunk's state."""
    mask = exist(ks, K)[:, None] & exist(vs, V)[None, :]
    return tl.load(S_ptr + tile * (K * V) + ks[:, None] * V + vs[None, :], mask=mask, other=0.0)


@kernel
def gradients_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, G_ptr, A_inv_ptr, q_rstd_ptr, k_rstd_ptr,
    S_in_ptr, dS_ptr, do_ptr, table_ptr, dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, dA_log_ptr, ddt_bias_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    T, HV, ratio, chunks_per_row, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, RESET: tl.constexpr,
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
        store_nothing(
            dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, dA_log_ptr, ddt_bias_ptr, place, length, key_head, chunk, HV,
            ratio, K, V, BK, BV, C,
        )  # fmt: skip
        return

    k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    q_rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    # <q, dq> and <k, dk> of each token, for the norms' adjoint: known after the first block of columns
    q_dot = tl.zeros([C], tl.float32)
    k_dot = tl.zeros([C], tl.float32)
    # [j, i]: key j down, query i across
    is_below = tokens[:, None] < tokens[None, :]
    is_pair = tokens[:, None] <= tokens[None, :]
    for first_k in range(0, K, BK):
        ks = first_k + tl.arange(0, BK)
        k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
        q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT)
        dqT = tl.zeros([BK, C], tl.float32)
        dk = tl.zeros([C, BK], tl.float32)
        F_sum = tl.zeros([C, C], tl.float32)
        for j in range(ratio):
            head = key_head * ratio + j
            tile = chunk.to(tl.int64) * HV + head
            beta = load_beta(beta_ptr, row, first, length, head, beta_b, beta_t, beta_h, C, SIGMOID, NEGATIVE)
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
                dr_place = (place * HV + head)[:, None] * V + vs[None, :]
                dr_mask = is_token[:, None] & exist(vs, V)[None, :]
                dr = tl.load(dv_ptr + dr_place, mask=dr_mask, other=0.0)
                do = rows_of(do_ptr, row, first, length, head, do_b, do_t, do_h, vs, V, C, UNIT)
                kS = tl.zeros([C, BV], tl.float32)
                for first_j in tl.static_range(0, K, BK):
                    js = first_j + tl.arange(0, BK)
                    k_part = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, js, K, C, UNIT)
                    kS = dot(k_part, block_of(S_in_ptr, tile, js, vs, K, V).to(operand), kS, PRECISION)
                v = rows_of(v_ptr, row, first, length, head, v_b, v_t, v_h, vs, V, C, UNIT)
                error = v.to(tl.float32) - kS * (into * k_rstd)[:, None]
                v_new = dot(A_inv, (beta[:, None] * error).to(operand), None, PRECISION)
                if first_k == 0:
                    wide = dr.to(tl.float32)
                    dbeta += tl.sum(wide * error, 1)
                    from_k -= tl.sum(wide * kS, 1)
                    qS = tl.zeros([C, BV], tl.float32)
                    kdS = tl.zeros([C, BV], tl.float32)
                    for first_j in tl.static_range(0, K, BK):
                        js = first_j + tl.arange(0, BK)
                        S = block_of(S_in_ptr, tile, js, vs, K, V)
                        dS = block_of(dS_ptr, tile, js, vs, K, V)
                        q_part = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, js, K, C, UNIT)
                        k_part = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, js, K, C, UNIT)
                        qS = dot(q_part, S.to(operand), qS, PRECISION)
                        kdS = dot(k_part, dS, kdS, PRECISION)
                        through += tl.sum(S.to(tl.float32) * dS.to(tl.float32))
                    from_q += tl.sum(do.to(tl.float32) * qS, 1)
                    leaving += tl.sum(v_new * kdS, 1)
                E = dot(v_new.to(operand), tl.trans(do), E, PRECISION)
                F = dot(v_new.to(operand), tl.trans(dr), F, PRECISION)
                S = block_of(S_in_ptr, tile, ks, vs, K, V).to(operand)
                dS = block_of(dS_ptr, tile, ks, vs, K, V)
                decayed = (do.to(tl.float32) * (scale * into)[:, None]).to(operand)
                dqT = dot(S, tl.trans(decayed), dqT, PRECISION)
                dk = dot((v_new * out[:, None]).to(operand), tl.trans(dS), dk, PRECISION)
                decayed = (dr.to(tl.float32) * (-beta * into)[:, None]).to(operand)
                dk = dot(decayed, tl.trans(S), dk, PRECISION)
                if first_k + BK >= K:
                    # every lane has read dr by now; dv goes where it lay
                    tl.debug_barrier()
                    tl.store(dv_ptr + dr_place, (dr.to(tl.float32) * beta[:, None]).to(operand), mask=dr_mask)
            # fetched again, and across: held through the strips they would cost 80 registers a thread
            tl.debug_barrier()
            high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
            D = decay(high[:, None], low[:, None], high[None, :], low[None, :])
            E = tl.where(is_pair, E * D * scale, 0.0)
            dqT = dot(tl.trans(k), (E * k_rstd[:, None]).to(operand), dqT, PRECISION)
            q_rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
            E = E * q_rstd[None, :]
            dk = dot(E.to(operand), q, dk, PRECISION)
            beta = load_beta(beta_ptr, row, first, length, head, beta_b, beta_t, beta_h, C, SIGMOID, NEGATIVE)
            k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
            F = tl.where(is_below, -F * D, 0.0)
            F_sum += F * beta[None, :]
            dk = dot((F * (beta * k_rstd)[None, :]).to(operand), k, dk, PRECISION)
            if first_k == 0:
                kk = tl.zeros([C, C], tl.float32)
                qk = tl.zeros([C, C], tl.float32)
                for first_j in tl.static_range(0, K, BK):
                    js = first_j + tl.arange(0, BK)
                    k_part = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, js, K, C, UNIT)
                    q_part = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, js, K, C, UNIT)
                    kk = dot(k_part, tl.trans(k_part), kk, PRECISION)
                    qk = dot(k_part, tl.trans(q_part), qk, PRECISION)
                E = E * qk * k_rstd[:, None]
                F = F * kk * k_rstd[:, None] * k_rstd[None, :]
                along = tl.sum(F, 0)
                dbeta += along
                F = F * beta[None, :]
                from_q *= scale * into * q_rstd
                from_k *= beta * into * k_rstd
                leaving *= out * k_rstd
                q_dot += from_q + tl.sum(E, 0)
                k_dot += from_k + leaving + tl.sum(E, 1) + tl.sum(F, 1) + along * beta
                # pairs that g_t decays: those with i >= t > j
                sums = tl.cumsum(tl.where(is_below, E + F, 0.0), 1, reverse=True)
                dg = tl.sum(tl.where(is_below, sums, 0.0), 0).to(tl.float64)
                dg += after(from_q + from_k, C) + before(leaving, C) + through * tl.exp(end_high)
                store_gates(
                    dg.to(tl.float32), dbeta, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, dg_ptr, dbeta_ptr,
                    dA_log_ptr, ddt_bias_ptr, row, first, length, head, chunk, g_b, g_t, g_h, beta_b, beta_t,
                    beta_h, T, HV, C, SIGMOID, NEGATIVE, RESET,
                )  # fmt: skip
        rows = (F_sum * k_rstd[:, None]).to(operand)
        dk += tl.trans(dot(tl.trans(k), rows, None, PRECISION))
        dq = tl.trans(dqT)
        if q_rstd_ptr is not None:
            # x / |x|: what lies along x drops out
            dq = (dq - q.to(tl.float32) * (q_rstd * q_dot)[:, None]) * q_rstd[:, None]
            dk = (dk - k.to(tl.float32) * (k_rstd * k_dot)[:, None]) * k_rstd[:, None]
        key_place = (place * num_heads + key_head)[:, None] * K + ks[None, :]
        mask = is_token[:, None] & exist(ks, K)[None, :]
        tl.store(dq_ptr + key_place, dq.to(operand), mask=mask)
        tl.store(dk_ptr + key_place, dk.to(operand), mask=mask)
