"""The state pass backwards: a strip of value columns of dS through all chunks of a sequence, last to first.

    dv_new = (e^(G_i - G_j) <q_i, k_j>)^T (scale do) + e^(G_C - G) k dS
    dr = A_inv^T dv_new
    dS <- e^(G_C) dS + (e^G q)^T (scale do) - (beta e^G k)^T dr

dS is held transposed as in `state`, for the same reason. What leaves are dr, in the place of dv (which is
beta dr), and for each chunk the gradient of the state that leaves it.
Bytes per token and value head at K = V = 128 in bf16, HV = H: q, k, do, dr 1024, A_inv 128, dS 512: 1680.
"""

import triton.language as tl

from gdn.backends.triton.chunks import sequence
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import decay, dot, load_sums
from gdn.backends.triton.state import columns_of, load_beta, load_rstd, rows_of, state_tile


@kernel
def state_bwd_kernel(
    q_ptr, k_ptr, beta_ptr, G_ptr, A_inv_ptr, q_rstd_ptr, k_rstd_ptr, do_ptr, dfinal_ptr, cu_seqlens_ptr, table_ptr,
    dS_out_ptr, dr_ptr, dinitial_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, do_b, do_t, do_h, beta_b, beta_t, beta_h, T, HV, ratio, chunks_per_row, bound,
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
    if dfinal_ptr is None:
        dS = tl.zeros([BV, BK], tl.float32)
    else:
        place, mask = state_tile(dfinal_ptr + state, vs, ks, K, V, V_FIRST)
        dS = tl.load(place, mask=mask, other=0.0).to(tl.float32)

    num_chunks = tl.cdiv(total, C)
    for step in tl.range(0, num_chunks, num_stages=STAGES):
        i = num_chunks - 1 - step
        first = start + i * C
        length = tl.minimum(total - i * C, C)
        tile = (chunk + i).to(tl.int64) * HV + head
        k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
        q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT)
        do = columns_of(do_ptr, row, first, length, head, do_b, do_t, do_h, vs, V, C, UNIT)
        A_inv = tl.load(A_inv_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :]).to(operand)
        beta = load_beta(beta_ptr, row, first, length, head, beta_b, beta_t, beta_h, C, SIGMOID, NEGATIVE)
        k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
        q_rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
        high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
        into = tl.exp(high)
        out = decay(high, low, end_high, end_low)

        P = dot(q, tl.trans(k), PRECISION=PRECISION) * (scale * q_rstd)[:, None] * k_rstd[None, :]
        P = P * decay(high[None, :], low[None, :], high[:, None], low[:, None])
        P = tl.where(tokens[:, None] >= tokens[None, :], P, 0.0)
        dS_operand = dS.to(operand)
        place, mask = state_tile(dS_out_ptr + tile * (K * V), vs, ks, K, V, False)
        tl.store(place, dS_operand, mask=mask)
        dv_new = dot(dS_operand, tl.trans(k), PRECISION=PRECISION) * (out * k_rstd)[None, :]
        dv_new = dot(do, P.to(operand), dv_new, PRECISION)
        dr = dot(dv_new.to(operand), A_inv, PRECISION=PRECISION)
        dr_base = dr_ptr + ((row.to(tl.int64) * T + first) * HV + head) * V
        dr_mask = (vs < V)[:, None] & (tokens < length)[None, :]
        tl.store(dr_base + tokens[None, :] * (HV * V) + vs[:, None], dr.to(operand), mask=dr_mask)
        from_q = (do.to(tl.float32) * (scale * into * q_rstd)[None, :]).to(operand)
        dS = dot(from_q, q, dS * tl.exp(end_high), PRECISION)
        from_k = (dr * (-beta * into * k_rstd)[None, :]).to(operand)
        dS = dot(from_k, k, dS, PRECISION)

    if dinitial_ptr is not None:
        place, mask = state_tile(dinitial_ptr + state, vs, ks, K, V, V_FIRST)
        tl.store(place, dS.to(dinitial_ptr.dtype.element_ty), mask=mask)
