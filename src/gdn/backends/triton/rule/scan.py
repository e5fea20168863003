"""Scan the state through all chunks and compute the outputs in the same kernel.

    r = beta (v - e^G k S);   v_new = A_inv r;   o = scale e^G q S + P v_new
    S <- e^(G_C) S + (e^(G_C - G) k)^T v_new

It is chosen where there are enough sequences and heads to fill the GPU. S is held transposed, [V, K]: S, r
and v_new are then left operands of their MMAs, read from the registers in which the previous MMA left them,
and k, q, A_inv and P are right operands in their memory layout. S and v_new never go to HBM, except S_in for
a backward.
Bytes per token and value head at K = V = 128 in bf16, HV = H: q, k, v, o 1024, A_inv and P 256, factors 20:
1300; with S kept for the backward 1810.
"""

import triton.language as tl

from gdn.backends.triton.chunks import sequence
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import (
    Rows,
    TokenRange,
    column_mask,
    dot,
    dot_split_left,
    load_rows,
    load_state,
    locate_strip,
    operand_dtype,
    state_pointers,
)
from gdn.backends.triton.rule.pairs import (
    BETA,
    INTO,
    OUT,
    READ,
    channels_through,
    factor,
    load_k_out,
    through,
)
from gdn.backends.triton.rule.pool import Slots, locate_final, locate_initial


@kernel
def scan_kernel(
    q_ptr, k_ptr, v_ptr, A_inv_ptr, P_ptr, factors_ptr, initial_ptr, cu_seqlens_ptr, table_ptr, S_in_ptr,
    o_ptr, final_ptr, index_ptr, out_index_ptr, has_initial_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, T, HV, ratio, chunks_per_row, bound,
    state_n, state_h, index_n, out_index_n, has_initial_n, slots, lowest,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    V_FIRST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FP32_STATE: tl.constexpr,
    SPLIT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # S <- e^(G_C) S + (e^(G_C - G) k)^T v_new and o, chunk after chunk of one sequence.
    # Program (n, head, strip): BV value columns of S^T, kept in registers in fp32 over all chunks.
    # Grid: N * HV * cdiv(V, BV), strips fastest; warps, BV and STAGES from `choose`; no PDL.
    # CHANNELS: a decay per key channel; q and k hold the rows q_in, k_in and k_out, which have the decays.
    # Reads per chunk q, k, a strip of v, A_inv, P and factors; writes a strip of o, and of S_in if kept.
    # Triton's pipeliner copies the next STAGES - 1 chunks to shared memory while this one is computed.
    n, head, strip = locate_strip(HV, V, BV)
    row, start, total, chunk = sequence(n, table_ptr, cu_seqlens_ptr, T, chunks_per_row, bound, C)
    key_head = head // ratio
    operand: tl.constexpr = operand_dtype(k_ptr, FP32_STATE)

    vs = strip * BV + tl.arange(0, BV)
    ks = tl.arange(0, BK)
    tokens = tl.arange(0, C)
    square = tokens[:, None] * C + tokens[None, :]
    pool = Slots(
        index_ptr, out_index_ptr, has_initial_ptr, state_n, state_h, index_n, out_index_n, has_initial_n,
        slots, lowest,
    )  # fmt: skip
    # HBM holds states V first or K first; S is transposed here, hence `not V_FIRST`
    state, is_read = locate_initial(pool, n, head, HV, K * V)
    state_place, state_mask = state_pointers(state, vs, ks, V, K, not V_FIRST)
    if index_ptr is not None:
        state_mask = state_mask & is_read
    S = load_state(initial_ptr, state_place, state_mask)

    for done in tl.range(0, total, C, num_stages=STAGES):
        first = start + done
        length = tl.minimum(total - done, C)
        token_range = TokenRange(row, first, length)
        tile = (chunk + done // C).to(tl.int64) * HV + head
        k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT).to(operand)
        q = load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT).to(operand)
        v = tl.trans(load_rows(Rows(v_ptr, v_b, v_t, v_h), token_range, head, vs, V, C, UNIT))
        A_inv = tl.load(A_inv_ptr + tile * (C * C) + square).to(operand)
        P = tl.load(P_ptr + tile * (C * C) + square).to(operand)

        # one conversion serves both MMAs that read S: kS and the output
        S_operand = S.to(operand)
        if S_in_ptr is not None:
            # S_in is always stored [K, V], hence transposed
            place, mask = state_pointers(tile * (K * V), vs, ks, V, K, True)
            tl.store(S_in_ptr + place, S.to(S_in_ptr.dtype.element_ty), mask=mask)
        kS = dot(S_operand, tl.trans(k), None, PRECISION)
        beta = factor(factors_ptr, tile, BETA, C)
        # r of tokens past the chunk's end is zero: beta is
        if CHANNELS:
            r = beta[None, :] * (v.to(tl.float32) - kS)
        else:
            into = factor(factors_ptr, tile, INTO, C)
            r = beta[None, :] * (v.to(tl.float32) - into[None, :] * kS)
        # `apply_inverse` transposed: r is the left operand in registers, and the diagonal takes r unrounded
        v_new = dot_split_left(r, tl.trans(A_inv), r, PRECISION, SPLIT)
        if CHANNELS:
            o = dot(S_operand, tl.trans(q), None, PRECISION)
        else:
            read = factor(factors_ptr, tile, READ, C)
            o = dot(S_operand, tl.trans(q), None, PRECISION)
            o = o * read[None, :]
        # v_new stays in registers between its two MMAs
        o = dot(v_new.to(operand), tl.trans(P), o, PRECISION)
        o_base = o_ptr + ((row.to(tl.int64) * T + first) * HV + head) * V
        o_mask = column_mask(vs, V)[:, None] & (tokens < length)[None, :]
        tl.store(o_base + tokens[None, :] * (HV * V) + vs[:, None], o.to(o_ptr.dtype.element_ty), mask=o_mask)
        # the decay of S is the accumulator of the MMA: no extra pass over the registers of S
        if CHANNELS:
            k_out = load_k_out(Rows(k_ptr, k_b, k_t, k_h), token_range, head, ks, K, C, UNIT).to(operand)
            S *= channels_through(factors_ptr, tile, ks, K, C)[None, :]
            S = dot(v_new.to(operand), k_out, S, PRECISION)
        else:
            out = factor(factors_ptr, tile, OUT, C)
            S = dot((v_new * out[None, :]).to(operand), k, S * through(factors_ptr, tile, C), PRECISION)

    if final_ptr is not None:
        if index_ptr is not None:
            state, is_written = locate_final(pool, n, head, total)
            state_place, state_mask = state_pointers(state, vs, ks, V, K, not V_FIRST)
            state_mask = state_mask & is_written
        tl.store(final_ptr + state_place, S.to(final_ptr.dtype.element_ty), mask=state_mask)
