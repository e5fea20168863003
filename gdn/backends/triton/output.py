"""The outputs of all chunks at once, from the states that enter them:

    o = scale (e^G q S_in + (e^(G_i - G_j) <q_i, k_j>) v_new)

Also writes q_rstd for the backward.
Bytes per token and value head at K = V = 128 in bf16, HV = H: q, k, v_new, o 1024, S_in 512: 1550.
"""

import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import dot, exist, load_rstd, load_sums, rows_of, rstd_of
from gdn.backends.triton.pairs import pairs


@kernel
def output_kernel(
    q_ptr, k_ptr, G_ptr, k_rstd_ptr, table_ptr, S_in_ptr, v_new_ptr, q_rstd_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, T, HV, ratio, chunks_per_row, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    strips = tl.cdiv(V, BV)
    strip = tl.program_id(0) % strips
    head = (tl.program_id(0) // strips) % HV
    chunk = tl.program_id(0) // (strips * HV)
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    key_head = head // ratio
    num_heads = HV // ratio
    operand: tl.constexpr = k_ptr.dtype.element_ty
    vs = strip * BV + tl.arange(0, BV)
    ks = tl.arange(0, BK)
    tokens = tl.arange(0, C)
    place = (row.to(tl.int64) * T + first) + tokens
    o_place = o_ptr + (place * HV + head)[:, None] * V + vs[None, :]
    if length <= 0:
        return
    is_token = tokens < length
    q = rows_of(q_ptr, row, first, length, key_head, q_b, q_t, q_h, ks, K, C, UNIT)
    k = rows_of(k_ptr, row, first, length, key_head, k_b, k_t, k_h, ks, K, C, UNIT)
    tile = chunk.to(tl.int64) * HV + head
    S_place = tile * (K * V) + ks[:, None] * V + vs[None, :]
    S = tl.load(S_in_ptr + S_place, mask=exist(ks, K)[:, None] & exist(vs, V)[None, :], other=0.0)
    v_new_place = v_new_ptr + tile * (C * V) + tokens[:, None] * V + vs[None, :]
    v_new = tl.load(v_new_place, mask=exist(vs, V)[None, :], other=0.0)
    high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
    q_scale = tl.full([C], scale, tl.float32)
    if q_rstd_ptr is not None:
        q_rstd = rstd_of(q)
        q_scale *= q_rstd
        is_mine = is_token & (strip == 0) & (head % ratio == 0)
        tl.store(q_rstd_ptr + place * num_heads + key_head, q_rstd, mask=is_mine)
    k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    P = pairs(q, k, q_scale, k_rstd, high, low, C, PRECISION)
    o = dot(q, S, None, PRECISION) * (q_scale * tl.exp(high))[:, None]
    o = dot(P.to(operand), v_new, o, PRECISION)
    tl.store(o_place, o.to(operand), mask=(tokens < length)[:, None] & exist(vs, V)[None, :])
