"""Compute v_new again, and the gradients of pairs of tokens and of v, with a decay per key channel.

    v_new = A_inv beta (v - k_in S_in);   dv = beta dr
    E_ij = scale <do_i, v_new_j>, i >= j;   F_ij = -<dr_i, v_new_j>, i > j
    dbeta_i = <dr_i, v_new_i> / beta_i = <dr_i, (v - k_in S_in)_i> + sum_j F_ij A_ij / beta_i

dr is in the memory of dv: `state_bwd` left it. E and F have no decays, which differ from channel to channel:
`rows_bwd` multiplies them by keys and queries with their decays, and adds up the last sum of dbeta, which is
used where beta is tiny.

MMAs read dr in bf16; sums over value columns, and dv, read 8 more bits from dr_rest (unless it is None).

Bytes per token and value head at K = V = 128 in bf16, HV = H: k_in, v, do, dr, dv, v_new 1536, dr_rest 128,
S_in 512, A_inv 128, E and F 256: 2560.
"""

import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import (
    Rows,
    TokenRange,
    apply_inverse,
    column_mask,
    dot,
    dot_split_left,
    load_rows,
    load_wide,
    operand_dtype,
    round_tf32,
)
from gdn.backends.triton.rule.gradients import state_block, unrolled
from gdn.backends.triton.rule.pairs import BETA, ROWS, factor

# terms of dbeta, in rows of the factors that nothing else of a backward with channels uses
APART, WHOLE = tl.constexpr(0), tl.constexpr(1)


@kernel
def values_bwd_kernel(
    k_ptr, v_ptr, A_inv_ptr, S_in_ptr, do_ptr, table_ptr, dr_rest_ptr, pairs_ptr, dv_ptr, v_new_ptr,
    factors_ptr,
    k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    T, HV, ratio, chunks_per_row, scale, begin,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FP32_STATE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # E, F, dv, v_new and two terms of dbeta for one chunk and value head; formulas at the top of the file.
    # Program (chunk of the group, head); grid: entries of the group * HV; warps and strips from `choose`.
    # Reads k_in, v, do, dr (and dr_rest), S_in, A_inv and beta; writes dv over dr, E and F, v_new. E and F
    # [C, C] are accumulators in registers over all strips of value columns. No PDL.
    head = tl.program_id(0) % HV
    part = tl.program_id(0) // HV
    chunk = begin + part
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
            tl.store(dv_place, tl.zeros([C, BV], dv_ptr.dtype.element_ty), mask=is_past)
        return

    is_token = tokens < length
    ks = tl.arange(0, BK)
    tile = chunk.to(tl.int64) * HV + head
    k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, head // ratio, ks, K, C, UNIT).to(operand)
    beta = factor(factors_ptr, tile, BETA, C)
    blocks: tl.constexpr = (K + BK - 1) // BK
    at_once: tl.constexpr = unrolled(operand, blocks)
    A_inv = tl.load(A_inv_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :]).to(operand)
    E = tl.zeros([C, C], tl.float32)
    F = tl.zeros([C, C], tl.float32)
    apart = tl.zeros([C], tl.float32)
    whole = tl.zeros([C], tl.float32)
    group_tile = part.to(tl.int64) * HV + head
    for strip in tl.range(0, V, BV, num_stages=STAGES):
        vs = strip + tl.arange(0, BV)
        do = load_rows(Rows(do_ptr, do_b, do_t, do_h), token_range, head, vs, V, C, UNIT).to(operand)
        dr_place = dv_ptr + (place * HV + head)[:, None] * V + vs[None, :]
        dr_mask = is_token[:, None] & column_mask(vs, V)[None, :]
        dr = tl.load(dr_place, mask=dr_mask, other=0.0)
        wide_dr = load_wide(dr, dr_rest_ptr, (place * HV + head)[:, None] * V + vs[None, :], dr_mask)
        dr = dr.to(operand)
        v = load_rows(Rows(v_ptr, v_b, v_t, v_h), token_range, head, vs, V, C, UNIT)
        S = state_block(S_in_ptr, tile, ks, vs, K, V).to(operand)
        kS = tl.zeros([C, BV], tl.float32)
        for block in tl.range(0, blocks, loop_unroll_factor=at_once):
            if blocks > 1:
                ks = block * BK + tl.arange(0, BK)
                k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, head // ratio, ks, K, C, UNIT)
                k = k.to(operand)
                S = state_block(S_in_ptr, tile, ks, vs, K, V).to(operand)
            kS = dot(k, S, kS, PRECISION)
        error = v.to(tl.float32) - kS
        apart += tl.sum(wide_dr * error, 1)
        v_new = apply_inverse(A_inv, beta[:, None] * error, PRECISION, SPLIT)
        whole += tl.sum(wide_dr * v_new, 1)
        v_new_place = group_tile * (C * V) + tokens[:, None] * V + vs[None, :]
        tl.store(
            v_new_ptr + v_new_place, v_new.to(v_new_ptr.dtype.element_ty), mask=column_mask(vs, V)[None, :]
        )
        # [j, i]: key j down, query i across. hi + lo in registers, as in `gradients`
        E = dot_split_left(v_new, tl.trans(do), E, PRECISION, SPLIT)
        # added in registers, so that no MMA is in flight when the next loads overwrite its operands in shared
        # memory (tests: `in_flight`)
        F += dot_split_left(v_new, tl.trans(dr), None, PRECISION, SPLIT)
        # dr has been copied to shared memory for its MMA, so dv may overwrite it in HBM
        tl.store(dr_place, (wide_dr * beta[:, None]).to(dv_ptr.dtype.element_ty), mask=dr_mask)
    # at [a, b]: E of key a and query b if a <= b, else F of key b and query a
    pairs = tl.where(tokens[:, None] <= tokens[None, :], E * scale, -tl.trans(F))
    if PRECISION == "tf32":
        # tensor cores would truncate, which shortens all gradients alike
        pairs = round_tf32(pairs)
    tl.store(pairs_ptr + group_tile * (C * C) + tokens[:, None] * C + tokens[None, :], pairs)
    terms = factors_ptr + tile * (ROWS * C) + tokens
    tl.store(terms + APART * C, apart)
    tl.store(terms + WHOLE * C, whole)
