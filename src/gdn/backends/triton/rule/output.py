"""Compute the outputs of all chunks in parallel, from the states that enter them.

    o = scale e^G q S_in + P v_new

Bytes per token and value head at K = V = 128 in bf16, HV = H: q, v_new, o 768, S_in 512, P 128: 1410.
"""

import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import Rows, TokenRange, column_mask, dot, load_rows, operand_dtype
from gdn.backends.triton.rule.pairs import READ, factor


@kernel
def output_kernel(
    q_ptr, P_ptr, factors_ptr, S_in_ptr, v_new_ptr, table_ptr, o_ptr,
    q_b, q_t, q_h, T, HV, ratio, chunks_per_row,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, FP32_STATE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # o = scale e^G q S_in + P v_new for one chunk.
    # Program (chunk, head, strip): the C x BV outputs of BV value columns. Grid: entries * HV * cdiv(V, BV),
    # strips fastest, so that the programs of a chunk find q and P in L2; warps and BV from `choose`.
    # CHANNELS: a decay per key channel; q holds the rows q_in, which have the decays.
    # Reads q, P, factors and a strip of S_in and v_new; writes a strip of o. o [C, BV] is an accumulator in
    # registers; no PDL.
    strips = tl.cdiv(V, BV)
    strip = tl.program_id(0) % strips
    head = (tl.program_id(0) // strips) % HV
    chunk = tl.program_id(0) // (strips * HV)
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    token_range = TokenRange(row, first, length)
    if length <= 0:
        # an entry of no tokens; prepare has zeroed the outputs past the last sequence
        return
    operand: tl.constexpr = operand_dtype(q_ptr, FP32_STATE)
    vs = strip * BV + tl.arange(0, BV)
    tokens = tl.arange(0, C)
    tile = chunk.to(tl.int64) * HV + head
    o = tl.zeros([C, BV], tl.float32)
    # K is taken in blocks, so that q and S_in fit in registers and shared memory
    for block in range(0, K, BK):
        ks = block + tl.arange(0, BK)
        q = load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, head // ratio, ks, K, C, UNIT)
        S_place = tile * (K * V) + ks[:, None] * V + vs[None, :]
        S = tl.load(
            S_in_ptr + S_place, mask=column_mask(ks, K)[:, None] & column_mask(vs, V)[None, :], other=0.0
        )
        o = dot(q.to(operand), S.to(operand), o, PRECISION)
    P = tl.load(P_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :])
    v_new_place = v_new_ptr + tile * (C * V) + tokens[:, None] * V + vs[None, :]
    v_new = tl.load(v_new_place, mask=column_mask(vs, V)[None, :], other=0.0)
    if not CHANNELS:
        # scale e^G multiplies rows of the accumulator once, instead of every q
        o = o * factor(factors_ptr, tile, READ, C)[:, None]
    o = dot(P, v_new, o, PRECISION)
    place = (row.to(tl.int64) * T + first + tokens) * HV + head
    o_mask = (tokens < length)[:, None] & column_mask(vs, V)[None, :]
    tl.store(o_ptr + place[:, None] * V + vs[None, :], o.to(o_ptr.dtype.element_ty), mask=o_mask)
