"""Scan the state through all chunks, and leave the outputs to `output_kernel`.

    r = beta (v - e^G k S);   v_new = A_inv r;   S <- e^(G_C) S + (e^(G_C - G) k)^T v_new

It is chosen where sequences and heads are few: the scan is then the critical path, so it does as little as
possible, and `output_kernel` computes all outputs in parallel from S_in and v_new. S is held as [K, V]: the
factors of tokens then scale rows, two scalars a thread; transposed, as in `scan`, it would be sixteen.
Computing w = A_inv (beta e^G k) and u = A_inv (beta v) beforehand removes one MMA from the critical path, 163
to 133 us at 128 chunks and 32 heads on an H200, but costs 104 us where they are computed.
Bytes per token and value head at K = V = 128 in bf16, HV = H: k, v 512, A_inv 128, factors 20, S_in 512,
v_new 256: 1430.
"""

import triton.language as tl

from gdn.backends.triton.chunks import sequence
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import (
    Rows,
    TokenRange,
    apply_inverse,
    column_mask,
    dot,
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
    channels_through,
    factor,
    load_k_out,
    through,
)
from gdn.backends.triton.rule.pool import Slots, locate_final, locate_initial


@kernel
def state_kernel(
    k_ptr, v_ptr, A_inv_ptr, factors_ptr, initial_ptr, cu_seqlens_ptr, table_ptr, S_in_ptr, v_new_ptr,
    final_ptr, index_ptr, out_index_ptr, has_initial_ptr,
    k_b, k_t, k_h, v_b, v_t, v_h, T, HV, ratio, chunks_per_row, bound,
    state_n, state_h, index_n, out_index_n, has_initial_n, slots, lowest,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    V_FIRST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FP32_STATE: tl.constexpr,
    SPLIT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # v_new = A_inv beta (v - e^G k S);  S <- e^(G_C) S + (e^(G_C - G) k)^T v_new, chunk after chunk.
    # Program (n, head, strip): BV value columns of S, kept in registers in fp32 over all chunks.
    # Grid: N * HV * cdiv(V, BV), strips fastest; warps, BV and STAGES from `choose`.
    # CHANNELS: a decay per key channel; k holds the rows k_in and k_out, which have the decays.
    # Reads per chunk k, a strip of v, A_inv and factors; writes a strip of S_in and v_new, unless they
    # are None (transfers of a rank: only the final state counts). No PDL: the launch begins when
    # `prepare_kernel` has finished.
    n, head, strip = locate_strip(HV, V, BV)
    row, start, total, chunk = sequence(n, table_ptr, cu_seqlens_ptr, T, chunks_per_row, bound, C)
    operand: tl.constexpr = operand_dtype(k_ptr, FP32_STATE)

    vs = strip * BV + tl.arange(0, BV)
    ks = tl.arange(0, BK)
    tokens = tl.arange(0, C)
    pool = Slots(
        index_ptr, out_index_ptr, has_initial_ptr, state_n, state_h, index_n, out_index_n, has_initial_n,
        slots, lowest,
    )  # fmt: skip
    state, is_read = locate_initial(pool, n, head, HV, K * V)
    state_place, state_mask = state_pointers(state, ks, vs, K, V, V_FIRST)
    if index_ptr is not None:
        state_mask = state_mask & is_read
    S = load_state(initial_ptr, state_place, state_mask)

    for done in tl.range(0, total, C, num_stages=STAGES):
        length = tl.minimum(total - done, C)
        tile = (chunk + done // C).to(tl.int64) * HV + head
        # these loads do not depend on S: Triton issues them STAGES - 1 chunks ahead, into shared memory
        token_range = TokenRange(row, start + done, length)
        k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, head // ratio, ks, K, C, UNIT)
        k = k.to(operand)
        v = load_rows(Rows(v_ptr, v_b, v_t, v_h), token_range, head, vs, V, C, UNIT)
        A_inv = tl.load(A_inv_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :]).to(operand)
        beta = factor(factors_ptr, tile, BETA, C)
        if CHANNELS:
            k_out = load_k_out(Rows(k_ptr, k_b, k_t, k_h), token_range, head, ks, K, C, UNIT).to(operand)
        else:
            into = factor(factors_ptr, tile, INTO, C)
            out = factor(factors_ptr, tile, OUT, C)

        # the state that enters the chunk goes to HBM for `output_kernel` and for a backward
        S_operand = S.to(operand)
        if S_in_ptr is not None:
            place, mask = state_pointers(tile * (K * V), ks, vs, K, V, False)
            tl.store(S_in_ptr + place, S.to(S_in_ptr.dtype.element_ty), mask=mask)
        kS = dot(k, S_operand, None, PRECISION)
        # the terms of r cancel, so it is computed in fp32, from the MMA's accumulator in registers
        if CHANNELS:
            r = beta[:, None] * (v.to(tl.float32) - kS)
        else:
            r = beta[:, None] * (v.to(tl.float32) - into[:, None] * kS)
        v_new = apply_inverse(A_inv, r, PRECISION, SPLIT)
        if v_new_ptr is not None:
            tile_place = tile * (C * V) + tokens[:, None] * V + vs[None, :]
            # past the chunk's end v_new is zero: whole tiles are stored, without a mask of tokens
            mask = column_mask(vs, V)[None, :]
            tl.store(v_new_ptr + tile_place, v_new.to(v_new_ptr.dtype.element_ty), mask=mask)
        # the decayed S is the accumulator of the MMA, so S needs no second copy in registers
        if CHANNELS:
            S *= channels_through(factors_ptr, tile, ks, K, C)[:, None]
            S = dot(tl.trans(k_out), v_new.to(operand), S, PRECISION)
        else:
            grown = (v_new * out[:, None]).to(operand)
            S = dot(tl.trans(k), grown, S * through(factors_ptr, tile, C), PRECISION)

    if final_ptr is not None:
        if index_ptr is not None:
            state, is_written = locate_final(pool, n, head, total)
            state_place, state_mask = state_pointers(state, ks, vs, K, V, V_FIRST)
            state_mask = state_mask & is_written
        tl.store(final_ptr + state_place, S.to(final_ptr.dtype.element_ty), mask=state_mask)
