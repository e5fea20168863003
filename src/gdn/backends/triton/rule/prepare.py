"""Compute per chunk and value head everything that does not depend on the state.

    g = -exp(A_log) softplus(a + dt_bias)  or as given;   G = chunk sums of g, in fp64
    A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j;     A_inv = (I + A)^-1
    P and the factors of `pairs`

It is one kernel, so that q and k are loaded once from HBM and neither g nor A leaves the SM. With l2norm the
MMAs use raw q and k; rstd = rsqrt(sum(x x) + 1e-6) scales their results and is kept for the backward. Outputs
of tokens that belong to no sequence are zeroed here, so that no later kernel needs those tokens.

Bytes per token and value head at K = V = 128 in bf16, HV = H: q and k 512, A_inv and P 256, gates, G, factors
40: 810.
"""

import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import jit, kernel
from gdn.backends.triton.lib import (
    Rows,
    TokenRange,
    dot,
    inverse_norm,
    load_beta,
    load_rows,
    softplus,
    split_fp64,
    sum_squares,
)
from gdn.backends.triton.rule.pairs import decays, store_factors
from gdn.backends.triton.rule.tril import inverse


@jit
def log_decay(g, A_log_ptr, dt_bias_ptr, head, RESET: tl.constexpr):
    """Return max(g, RESET), with g as the caller gave it or -exp(A_log) softplus(g + dt_bias)."""
    g = g.to(tl.float32)
    if A_log_ptr is not None:
        if dt_bias_ptr is not None:
            g += tl.load(dt_bias_ptr + head).to(tl.float32)
        g = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32)) * softplus(g)
    # keep NaN: tl.maximum(NaN, RESET) is RESET on a GPU
    return tl.where(g < RESET, RESET, g)


@jit
def clear_outputs(o_ptr, place, count, head, HV, V: tl.constexpr, C: tl.constexpr):
    """Store zeros for the first `count` tokens of a chunk; they belong to no sequence."""
    tokens = tl.arange(0, C)
    for v in range(0, V, 16):
        vs = v + tl.arange(0, 16)
        o_place = ((place + tokens) * HV + head)[:, None] * V + vs[None, :]
        is_past = (tokens < count)[:, None] & (vs < V)[None, :]
        tl.store(o_ptr + o_place, tl.zeros([C, 16], o_ptr.dtype.element_ty), mask=is_past)


@jit
def chunk_sums(g, A_log_ptr, dt_bias_ptr, token_range, head, C: tl.constexpr, RESET: tl.constexpr):
    """Return G of a chunk's tokens in fp64; past the chunk's end that of the last token."""
    tokens = tl.arange(0, C)
    if g.ptr is None:
        return tl.zeros([C], tl.float64)
    else:
        base = g.ptr + token_range.row.to(tl.int64) * g.b + token_range.first.to(tl.int64) * g.t + head * g.h
        x = tl.load(base + tokens * g.t, mask=tokens < token_range.length, other=0.0)
        x = tl.where(tokens < token_range.length, log_decay(x, A_log_ptr, dt_bias_ptr, head, RESET), 0.0)
        return tl.cumsum(x.to(tl.float64), 0)


@jit
def store_inverse(A_inv_ptr, tile, A_inv, C: tl.constexpr):
    """Store A_inv [C, C] of a tile, less 1.

    A row of A_inv can sum to almost nothing where keys are identical, while the state sums thousands of such
    rows. The diagonal is known to be 1, so its place holds what rounding took from the row's sum.
    """
    tokens = tl.arange(0, C)
    A_inv = tl.where(tokens[:, None] > tokens[None, :], A_inv, 0.0)
    kept = A_inv.to(A_inv_ptr.dtype.element_ty)
    lost = tl.sum(A_inv - kept.to(tl.float32), 1)
    on_diagonal = tokens[:, None] == tokens[None, :]
    kept = tl.where(on_diagonal, lost[:, None].to(A_inv_ptr.dtype.element_ty), kept)
    square = tile * (C * C) + tokens[:, None] * C + tokens[None, :]
    tl.store(A_inv_ptr + square, kept)


@kernel
def prepare_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, table_ptr, G_ptr, A_inv_ptr, P_ptr,
    factors_ptr, q_rstd_ptr, k_rstd_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, T, HV,
    ratio, chunks_per_row, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr, PRECISION: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    # A_inv, P, G, factors and norms of one chunk and value head; formulas at the top of the file.
    # Program (chunk, head). Grid: entries * HV, heads fastest, so that the value heads of a key head find q
    # and k in L2; 4 warps, one per 16 x 16 diagonal block of A (see `tril`); no PDL.
    # Reads q, k, g and beta of 64 tokens; writes A_inv and P [C, C], ROWS factors per token, G, and norms.
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    token_range = TokenRange(row, first, length)
    tokens = tl.arange(0, C)
    place = row.to(tl.int64) * T + first
    if length <= 0:
        # a negative length marks tokens past the last sequence
        if o_ptr is not None:
            clear_outputs(o_ptr, place, -length, head, HV, V, C)
        return
    is_token = tokens < length

    G = chunk_sums(Rows(g_ptr, g_b, g_t, g_h), A_log_ptr, dt_bias_ptr, token_range, head, C, RESET)
    tl.store(G_ptr + (place + tokens) * HV + head, G, mask=is_token)
    beta = load_beta(Rows(beta_ptr, beta_b, beta_t, beta_h), token_range, head, C, SIGMOID, NEGATIVE)

    key_head = head // ratio
    num_heads = HV // ratio
    k_squares = tl.zeros([C], tl.float32)
    q_squares = tl.zeros([C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    # if one block holds all of K, k is loaded once and kept in registers or shared memory for both loops
    k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, tl.arange(0, BK), K, C, UNIT)
    for block in range(0, K, BK):
        ks = block + tl.arange(0, BK)
        q = load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT)
        if BK < K:
            k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT)
        if k_rstd_ptr is not None:
            k_squares += sum_squares(k)
            q_squares += sum_squares(q)
        qk = dot(q, tl.trans(k), qk, PRECISION)
    rstd_place = (place + tokens) * num_heads + key_head
    # norms exist per key head: its first value head stores them
    is_mine = is_token & (head % ratio == 0)
    k_rstd = tl.where(is_token, 1.0, 0.0)
    q_scale = tl.full([C], scale, tl.float32)
    if k_rstd_ptr is not None:
        k_rstd = inverse_norm(k_squares)
        tl.store(k_rstd_ptr + rstd_place, k_rstd, mask=is_mine)
        q_rstd = inverse_norm(q_squares)
        tl.store(q_rstd_ptr + rstd_place, q_rstd, mask=is_mine)
        q_scale *= q_rstd
    high, low = split_fp64(G)
    end_high, end_low = split_fp64(tl.sum(tl.where(tokens == length - 1, G, 0.0), 0))
    tile = chunk.to(tl.int64) * HV + head
    square = tile * (C * C) + tokens[:, None] * C + tokens[None, :]
    D = decays(high, low, k_rstd, C)
    P = qk * D * q_scale[:, None]
    tl.store(P_ptr + square, P.to(P_ptr.dtype.element_ty))
    store_factors(factors_ptr, tile, beta, q_scale, k_rstd, (high, low, end_high, end_low), C)
    kk = tl.zeros([C, C], tl.float32)
    for block in range(0, K, BK):
        if BK < K:
            ks = block + tl.arange(0, BK)
            k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT)
        kk = dot(k, tl.trans(k), kk, PRECISION)
    A = kk * D * (beta * k_rstd)[:, None]
    store_inverse(A_inv_ptr, tile, inverse(A, PRECISION), C)
