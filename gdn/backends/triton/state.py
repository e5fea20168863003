"""The state pass: one program takes a strip of value columns of S through all chunks of a sequence.

    r = beta (v - e^G k S);   v_new = A_inv r;   S <- e^(G_C) S + (e^(G_C - G) k)^T v_new

S is held transposed, [V, K]: S, r and v_new are then left operands of the products that use them, straight
from the registers in which the last product left them, and k and A_inv right operands as they lie in memory.
Where there are sequences and heads enough to fill the machine the output is computed here too,

    o = scale (e^G q S + (e^(G_i - G_j) <q_i, k_j>) v_new),

and neither S nor v_new of a chunk has to leave the chip unless a backward wants S.

Bytes per token and value head at K = V = 128 in bf16, HV = H: k, v 512, A_inv 128, gates 16; and either
S 512, v_new 256 (1420 in all), or q, o 512 (1170; with S kept for the backward 1680).
"""

import triton
import triton.language as tl

from gdn.backends.triton.chunks import sequence
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import decay, dot, load_sums, strength


@triton.jit
def load_beta(
    beta_ptr, row, first, length, head, beta_b, beta_t, beta_h, C: tl.constexpr, SIGMOID: tl.constexpr,
    NEGATIVE: tl.constexpr,
):  # fmt: skip
    """beta of a chunk's tokens, 0 past its end."""
    tokens = tl.arange(0, C)
    if beta_ptr is None:
        return tl.where(tokens < length, 1.0, 0.0)
    base = beta_ptr + row.to(tl.int64) * beta_b + first.to(tl.int64) * beta_t + head * beta_h
    beta = tl.load(base + tokens * beta_t, mask=tokens < length, other=0.0)
    return tl.where(tokens < length, strength(beta, SIGMOID, NEGATIVE), 0.0)


@triton.jit
def load_rstd(rstd_ptr, row, first, length, head, T, H, C: tl.constexpr):
    """1 / norm of a chunk's keys or queries, 0 past its end; ones where there is no normalisation."""
    tokens = tl.arange(0, C)
    if rstd_ptr is None:
        return tl.where(tokens < length, 1.0, 0.0)
    base = rstd_ptr + (row.to(tl.int64) * T + first) * H + head
    return tl.load(base + tokens * H, mask=tokens < length, other=0.0)


@triton.jit
def rows_of(
    x_ptr,
    row,
    first,
    length,
    head,
    x_b,
    x_t,
    x_h,
    columns,
    D: tl.constexpr,
    C: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A chunk's rows of x [C, len(columns)]; zeros past its end and past column D."""
    tokens = tl.arange(0, C)
    base = x_ptr + (row.to(tl.int64) * x_b + first.to(tl.int64) * x_t + head * x_h) * UNIT
    mask = (tokens < length)[:, None] & (columns < D)[None, :]
    return tl.load(base + tokens[:, None] * (x_t * UNIT) + columns[None, :], mask=mask, other=0.0)


@triton.jit
def columns_of(
    x_ptr,
    row,
    first,
    length,
    head,
    x_b,
    x_t,
    x_h,
    columns,
    D: tl.constexpr,
    C: tl.constexpr,
    UNIT: tl.constexpr,
):
    """The same, transposed: [len(columns), C]."""
    tokens = tl.arange(0, C)
    base = x_ptr + (row.to(tl.int64) * x_b + first.to(tl.int64) * x_t + head * x_h) * UNIT
    mask = (columns < D)[:, None] & (tokens < length)[None, :]
    return tl.load(base + tokens[None, :] * (x_t * UNIT) + columns[:, None], mask=mask, other=0.0)


@triton.jit
def state_tile(base, rows, columns, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Pointers and mask of S^T [rows of V, columns of K] in a state stored V first or K first."""
    mask = (rows < V)[:, None] & (columns < K)[None, :]
    if V_FIRST:
        return base + rows[:, None] * K + columns[None, :], mask
    return base + columns[None, :] * V + rows[:, None], mask


@kernel
def state_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, G_ptr, A_inv_ptr, k_rstd_ptr, q_rstd_ptr, initial_ptr, cu_seqlens_ptr, table_ptr,
    S_in_ptr, v_new_ptr, o_ptr, final_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, beta_b, beta_t, beta_h, T, HV, ratio, chunks_per_row, bound,
    scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr, V_FIRST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    strips = tl.cdiv(V, BV)
    strip = tl.program_id(0) % strips
    head = (tl.program_id(0) // strips) % HV
    n = tl.program_id(0) // (strips * HV)
    row, start, total, chunk = sequence(n, table_ptr, cu_seqlens_ptr, T, chunks_per_row, bound, C)
    key_head = head // ratio
    num_heads = HV // ratio
    operand: tl.constexpr = k_ptr.dtype.element_ty

    vs = strip * BV + tl.arange(0, BV)
    ks = tl.arange(0, BK)
    tokens = tl.arange(0, C)
    state = (n.to(tl.int64) * HV + head) * (K * V)
    if initial_ptr is None:
        S = tl.zeros([BV, BK], tl.float32)
    else:
        place, mask = state_tile(initial_ptr + state, vs, ks, K, V, V_FIRST)
        S = tl.load(place, mask=mask, other=0.0).to(tl.float32)

    for done in tl.range(0, total, C, num_stages=STAGES):
        first = start + done
        length = tl.minimum(total - done, C)
        tile = (chunk + done // C).to(tl.int64) * HV + head
        k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
        A_inv = tl.load(A_inv_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :])
        v = columns_of(v_ptr, row, first, length, head, v_b, v_t, v_h, vs, V, C, UNIT)
        beta = load_beta(beta_ptr, row, first, length, head, beta_b, beta_t, beta_h, C, SIGMOID, NEGATIVE)
        rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
        high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
        into = tl.exp(high)
        out = decay(high, low, end_high, end_low)

        S_operand = S.to(operand)
        if S_in_ptr is not None:
            place, mask = state_tile(S_in_ptr + tile * (K * V), vs, ks, K, V, False)
            tl.store(place, S_operand, mask=mask)
        kS = dot(S_operand, tl.trans(k), PRECISION=PRECISION)
        r = beta[None, :] * (v.to(tl.float32) - (into * rstd)[None, :] * kS)
        v_new = dot(r.to(operand), tl.trans(A_inv).to(operand), PRECISION=PRECISION)
        if v_new_ptr is not None:
            base = v_new_ptr + tile * (C * V)
            tl.store(base + tokens[None, :] * V + vs[:, None], v_new.to(operand), mask=(vs < V)[:, None])
        if o_ptr is not None:
            q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT)
            q_scale = tl.where(tokens < length, scale, 0.0)
            if k_rstd_ptr is not None:
                wide = q.to(tl.float32)
                q_rstd = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
                q_scale = q_scale * q_rstd
                if q_rstd_ptr is not None:
                    q_place = q_rstd_ptr + (row.to(tl.int64) * T + first + tokens) * num_heads + key_head
                    is_mine = (tokens < length) & (strip == 0) & (head % ratio == 0)
                    tl.store(q_place, q_rstd, mask=is_mine)
            o = dot(S_operand, tl.trans(q), PRECISION=PRECISION) * into[None, :]
            P = dot(k, tl.trans(q), PRECISION=PRECISION) * rstd[:, None]
            P = P * decay(high[:, None], low[:, None], high[None, :], low[None, :])
            P = tl.where(tokens[:, None] <= tokens[None, :], P, 0.0)
            o = dot(v_new.to(operand), P.to(operand), o, PRECISION) * q_scale[None, :]
            o_base = o_ptr + ((row.to(tl.int64) * T + first) * HV + head) * V
            o_mask = (vs < V)[:, None] & (tokens < length)[None, :]
            tl.store(o_base + tokens[None, :] * (HV * V) + vs[:, None], o.to(operand), mask=o_mask)
        grown = (v_new * (out * rstd)[None, :]).to(operand)
        S = dot(grown, k, S * tl.exp(end_high), PRECISION)

    if final_ptr is not None:
        place, mask = state_tile(final_ptr + state, vs, ks, K, V, V_FIRST)
        tl.store(place, S, mask=mask)
