"""Scan the gradient of the state backwards through all chunks of a sequence, last to first.

    dv_new = P^T do + e^(G_C - G) k dS
    dr = A_inv^T dv_new
    dS <- e^(G_C) dS + (e^G q)^T (scale do) - (beta e^G k)^T dr

It stores dr in the memory of dv (dv = beta dr), and for each chunk the gradient of the state that leaves it.
With 16-bit inputs, SPLIT splits all operands but A_inv into hi + lo (split bf16). Rounding P caused half of
the variance of dbeta's error where little passes through the state, and rounding dS a third of it elsewhere.
Rounding e^G do caused all of dinitial_state's error under strong decay, and rounding beta e^G dr most of it
elsewhere. SPLIT also stores the part of dg that is <S_in, dS> of a strip: the 16-bit dS that the next kernel
reads caused a quarter of the variance of dg's error where much passes through the state.
With a decay per key channel, k_rest is the low half of k_out, which has one bf16 rounding per token and
channel, and dr_rest holds 8 more bits of dr. Where all channels decay strongly, the tokens before the final
state have nearly all of dbeta = <dr, v_new> / beta, and these two roundings were its error. In 16 bits q_in
and P have only the scale's power of two, so q_in is exact in channels that have not decayed: rounding scale q
caused all of dinitial_state's error there. The registers hold dS and dr divided by the rest of the scale.
Bytes per token and value head at K = V = 128 in bf16, HV = H: q, k, do, dr 1024, A_inv and P 384, S_in and dS
1024: 2450. Per key channel, k_out, k_rest and dr_rest 640 more, S_in 512 less.
"""

import triton.language as tl

from gdn.backends.triton.chunks import sequence
from gdn.backends.triton.launch import jit, kernel
from gdn.backends.triton.lib import (
    Rows,
    TokenRange,
    apply_inverse,
    column_mask,
    dot,
    dot_split,
    load_rows,
    load_state,
    locate_strip,
    operand_dtype,
    state_pointers,
    store_wide,
    truncate,
)
from gdn.backends.triton.rule.pairs import (
    BETA,
    INTO,
    OUT,
    READ,
    ROWS,
    THROUGH,
    channels_through,
    factor,
    load_k_out,
    through,
)


@jit
def load_without_prefetch(place, length):
    """Load a tile of a chunk, which has tokens, when it is used: no load inside an `if` is pipelined."""
    if length > 0:
        x = tl.load(place)
    else:
        x = tl.zeros(place.shape, place.dtype.element_ty)
    return x


@kernel
def state_bwd_kernel(
    q_ptr, k_ptr, k_rest_ptr, A_inv_ptr, P_ptr, P_rest_ptr, factors_ptr, S_in_ptr, do_ptr, dfinal_ptr,
    cu_seqlens_ptr, table_ptr, dS_out_ptr, dr_ptr, dr_rest_ptr, dinitial_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, do_b, do_t, do_h, T, HV, ratio, chunks_per_row, bound, scale_rest,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    V_FIRST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FP32_STATE: tl.constexpr,
    SPLIT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # dS <- e^(G_C) dS + (e^G q)^T (scale do) - (beta e^G k)^T dr, last chunk to first.
    # Program (n, head, strip): BV value columns of dS [K, BV], kept in registers in fp32 over all chunks.
    # Grid: N * HV * cdiv(V, BV), strips fastest; warps, BV and STAGES from `choose`; no PDL.
    # CHANNELS: a decay per key channel; q and k hold the rows q_in, k_in and k_out, which have the decays,
    # and the registers dS / scale_rest.
    # Reads per chunk q, k, A_inv, P (hi + lo if SPLIT), factors, a strip of do and, if SPLIT, of S_in; writes
    # a strip of dr and dS. k_rest_ptr and dr_rest_ptr may be None; a decay per head has neither.
    n, head, strip = locate_strip(HV, V, BV)
    row, start, total, chunk = sequence(n, table_ptr, cu_seqlens_ptr, T, chunks_per_row, bound, C)
    key_head = head // ratio
    operand: tl.constexpr = operand_dtype(k_ptr, FP32_STATE)

    vs = strip * BV + tl.arange(0, BV)
    ks = tl.arange(0, BK)
    tokens = tl.arange(0, C)
    square = tokens[:, None] * C + tokens[None, :]
    state = (n.to(tl.int64) * HV + head) * (K * V)
    state_place, state_mask = state_pointers(state, ks, vs, K, V, V_FIRST)
    dS = load_state(dfinal_ptr, state_place, state_mask)
    if CHANNELS:
        # without a token, dS0 is the given gradient, unrounded
        scale_rest = tl.where(total > 0, scale_rest, 1.0)
        dS *= 1.0 / scale_rest

    num_chunks = tl.cdiv(total, C)
    for step in tl.range(0, num_chunks, num_stages=STAGES):
        i = num_chunks - 1 - step
        first = start + i * C
        length = tl.minimum(total - i * C, C)
        token_range = TokenRange(row, first, length)
        tile = (chunk + i).to(tl.int64) * HV + head
        k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT).to(operand)
        q = load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT).to(operand)
        do = load_rows(Rows(do_ptr, do_b, do_t, do_h), token_range, head, vs, V, C, UNIT).to(operand)
        if CHANNELS and BK > 128:
            # two chunks of three rows fill the shared memory of sm_90
            A_inv = load_without_prefetch(A_inv_ptr + tile * (C * C) + square, length).to(operand)
            P = load_without_prefetch(P_ptr + tile * (C * C) + square, length).to(operand)
        else:
            A_inv = tl.load(A_inv_ptr + tile * (C * C) + square).to(operand)
            P = tl.load(P_ptr + tile * (C * C) + square).to(operand)

        # the gradient of the state that leaves chunk i, for the gradient kernels
        place, mask = state_pointers(tile * (K * V), ks, vs, K, V, False)
        dS_out = dS * scale_rest if CHANNELS else dS
        tl.store(dS_out_ptr + place, dS_out.to(dS_out_ptr.dtype.element_ty), mask=mask)
        if SPLIT and not CHANNELS:
            # dS is still fp32 in registers here; the copy in HBM is rounded
            S = tl.load(S_in_ptr + place, mask=mask, other=0.0)
            share = tl.sum(S.to(tl.float32) * dS)
            tl.store(factors_ptr + tile * (ROWS * C) + THROUGH * C + 1 + strip, share)
        if CHANNELS:
            k_out = load_k_out(Rows(k_ptr, k_b, k_t, k_h), token_range, head, ks, K, C, UNIT).to(operand)
            dv_new = dot_split(k_out, dS, None, PRECISION, SPLIT)
            if k_rest_ptr is not None:
                k_rest = load_rows(Rows(k_rest_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT)
                # the operand in shared memory that `dot_split` made
                dv_new = dot(k_rest, truncate(dS, k_rest.dtype).to(k_rest.dtype), dv_new, PRECISION)
            dv_new = dot(tl.trans(P), do, dv_new, PRECISION)
        else:
            out = factor(factors_ptr, tile, OUT, C)
            dv_new = dot_split(k, dS, None, PRECISION, SPLIT)
            dv_new = dot(tl.trans(P), do, dv_new * out[:, None], PRECISION)
        # P's low half: another MMA on tensor cores, instead of P in fp32 and tf32 MMAs
        if SPLIT:
            rest = tl.load(P_rest_ptr + tile * (C * C) + square).to(operand)
            dv_new = dot(tl.trans(rest), do, dv_new, PRECISION)
        # A_inv^T is a transposed view in shared memory; nothing is moved
        dr = apply_inverse(tl.trans(A_inv), dv_new, PRECISION, False)
        dr_begin = ((row.to(tl.int64) * T + first) * HV + head) * V
        dr_place = tokens[:, None] * (HV * V) + vs[None, :]
        dr_mask = (tokens < length)[:, None] & column_mask(vs, V)[None, :]
        dr_out = dr * scale_rest if CHANNELS else dr
        if dr_rest_ptr is None:
            tl.store(dr_ptr + dr_begin + dr_place, dr_out.to(dr_ptr.dtype.element_ty), mask=dr_mask)
        else:
            store_wide(dr_ptr + dr_begin, dr_rest_ptr + dr_begin, dr_place, dr_out, dr_mask)
        if CHANNELS:
            # q_in has the decays, so do is an exact operand
            dS *= channels_through(factors_ptr, tile, ks, K, C)[:, None]
            dS = dot(tl.trans(q), do, dS, PRECISION)
            carry = factor(factors_ptr, tile, BETA, C)
        else:
            read = factor(factors_ptr, tile, READ, C)
            from_q = do.to(tl.float32) * read[:, None]
            # the decayed dS is the accumulator of the first MMA
            dS = dot_split(tl.trans(q), from_q, dS * through(factors_ptr, tile, C), PRECISION, SPLIT)
            carry = factor(factors_ptr, tile, BETA, C) * factor(factors_ptr, tile, INTO, C)
        dS = dot_split(tl.trans(k), dr * -carry[:, None], dS, PRECISION, SPLIT)

    if dinitial_ptr is not None:
        if CHANNELS:
            dS *= scale_rest
        tl.store(dinitial_ptr + state_place, dS.to(dinitial_ptr.dtype.element_ty), mask=state_mask)
