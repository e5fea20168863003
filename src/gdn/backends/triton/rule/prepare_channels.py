"""Compute what does not depend on the state, per chunk and value head, with a decay per key channel.

    A_ij = beta_i sum_c k_ic k_jc D_ijc, i > j;   A_inv = (I + A)^-1
    P_ij = scale sum_c q_ic k_jc D_ijc, i >= j
    q_in = scale e^G q;   k_in = e^G k;   k_out = e^(G_C - G) k;   e^(G_C) per channel

D_ijc is e to the sum of g_c over the tokens j + 1 .. i, which `channels` computes exactly for any gate, and
`channel_halves` in a third of the instructions where decays fit fp32. The state passes read the rows q_in,
k_in and k_out in the place of q, k and factors, and are the same kernels as for a decay per head. The norms
are in the rows. A backward launches this kernel again without A_inv: its rows and P are not kept. It may also
store k_rest, what rounding k_out to bf16 drops.

Bytes per token and value head at K = V = 128 in bf16, HV = H, g in fp32: q, k 512, g 512, rows 768, A_inv and
P 256, beta, e^(G_C) 12: 2060.
"""

import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import jit, kernel
from gdn.backends.triton.lib import (
    Rows,
    TokenRange,
    column_mask,
    dot,
    inverse_norm,
    load_beta,
    load_rows,
    rounding_rest,
    split_bf16,
    sum_squares,
)
from gdn.backends.triton.rule.channel_halves import (
    Chunk,
    Keys,
    Outputs,
    fits_fp32,
    lane_channels,
    load_decays,
    prepare_by_halves,
)
from gdn.backends.triton.rule.channels import (
    block_totals,
    channel_decays,
    double_pieces,
    gate_rate,
    halves,
    in_blocks,
    is_late_block,
    is_odd_block,
    level_decays,
    load_logits,
    multiply_rows,
    of_tokens,
    pairs_of_level,
    swap_neighbours,
)
from gdn.backends.triton.rule.pairs import BETA, END, ROWS
from gdn.backends.triton.rule.prepare import clear_outputs, store_inverse
from gdn.backends.triton.rule.tril import inverse_of_blocks

LEVEL_BLOCK = tl.constexpr(16)  # channels that levels take at once: they bound the registers


@jit
def add_pairs(q, k, g, within, beside, across, PRECISION: tl.constexpr):
    """Add the products of q, k [4, 16, N] over channels with decays g to the pairs of q, and of k, with k.

    within [4, 16, 16]: pairs of a block; beside [4, 16, 16]: with the block before (blocks 1 and 3);
    across [32, 32]: of the second half of the chunk with the first. Each is a pair (of q, of k). Returns
    these three, and the sums of g in a block up to a token, and after it.
    """
    within_q, within_k = within
    beside_q, beside_k = beside
    across_q, across_k = across
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    # a token's own pair has no decay
    within_q += tl.where(i == j, tl.sum(q * k, 2)[:, :, None], 0.0)
    before = g
    after = tl.zeros_like(g)
    for level in range(4):
        d = level_decays(before, after, level)
        columns = k * d
        is_pair = pairs_of_level(level)
        within_q += tl.where(is_pair, multiply_rows(q * d, columns, None, PRECISION), 0.0)
        within_k += tl.where(is_pair, multiply_rows(columns, columns, None, PRECISION), 0.0)
        before, after = double_pieces(before, after, level)
    _, _, _, between = block_totals(g)
    d = tl.exp(tl.where(is_odd_block(), before, after))
    rows, columns = q * d, k * d
    # blocks 0 and 2 multiply by the block after: nothing reads these products
    others = swap_neighbours(columns)
    beside_q = multiply_rows(rows, others, beside_q, PRECISION)
    beside_k = multiply_rows(columns, others, beside_k, PRECISION)
    d = tl.exp(tl.where(is_late_block(), before, after) + between)
    first, second = halves(k * d)
    _, rows = halves(q * d)
    across_q = dot(rows, tl.trans(first), across_q, PRECISION)
    across_k = dot(second, tl.trans(first), across_k, PRECISION)
    return (within_q, within_k), (beside_q, beside_k), (across_q, across_k), before, after


@jit
def store_pairs(x_ptr, rest_ptr, tile, within, beside, across, C: tl.constexpr):
    """Store pairs [C, C] of a tile from its parts, zeros above the diagonal; rest_ptr: their low half."""
    n = tl.arange(0, 4)[:, None, None]
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    # offsets within a tile are 32 bits wide: 64 would take twice the registers
    x_ptr += tile * (C * C)
    if rest_ptr is not None:
        rest_ptr += tile * (C * C)
    _store_part(x_ptr, rest_ptr, (16 * n + i) * C + 16 * n + j, within)
    # blocks 1 and 3 have their pairs with the block before, blocks 0 and 2 zeros for the block after
    beside = tl.where(is_odd_block(), beside, 0.0)
    _store_part(x_ptr, rest_ptr, (16 * n + i) * C + 16 * (n ^ 1) + j, beside)
    i = tl.arange(0, 32)[:, None]
    j = tl.arange(0, 32)[None, :]
    _store_part(x_ptr, rest_ptr, (32 + i) * C + j, across)
    _store_part(x_ptr, rest_ptr, i * C + 32 + j, tl.zeros_like(across))


@jit
def _store_part(x_ptr, rest_ptr, place, x):
    """Store a part of the pairs; with rest_ptr as hi + lo in two tensors."""
    if rest_ptr is None:
        tl.store(x_ptr + place, x.to(x_ptr.dtype.element_ty))
    else:
        high, low = split_bf16(x, x_ptr.dtype.element_ty)
        tl.store(x_ptr + place, high)
        tl.store(rest_ptr + place, low)


@kernel
def prepare_channels_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, table_ptr, q_in_ptr, k_rows_ptr, k_rest_ptr,
    A_inv_ptr, P_ptr, P_rest_ptr, factors_ptr, q_rstd_ptr, k_rstd_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, T, HV,
    ratio, chunks_per_row, scale, lower_bound,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr, NORM: tl.constexpr, RAW: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    # Rows, A_inv, P, beta, e^(G_C) and norms of one chunk and value head; formulas at the top of the file.
    # Program (chunk, head). Grid: entries * HV, heads fastest, so that the value heads of a key head find q
    # and k in L2; 4 warps, one per block of 16 tokens; no PDL.
    # Reads q, k and g of 64 tokens, and beta. Writes q_in, k_in and k_out, A_inv and k_rest (unless these are
    # None), P [C, C], and beta and e^(G_C) among the factors. BK above 16: of all channels at once by halves,
    # if the decay of each 16 tokens fits fp32; else by levels in blocks of 16 channels, which bound the
    # registers.
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
    if BK > LEVEL_BLOCK:
        at = Chunk(token_range, place, chunk.to(tl.int64) * HV + head, head, HV, ratio)
        gate = (gate_rate(A_log_ptr, head), lower_bound) if RAW else None
        all_g = load_decays(
            Rows(g_ptr, g_b, g_t, g_h), dt_bias_ptr, gate, at, lane_channels(BK), K, UNIT, BOUNDED
        )
        # keep NaN: tl.maximum(NaN, RESET) is RESET on a GPU
        all_g = tl.where(all_g < RESET, RESET, all_g)
        # the same for all warps; other chunks take the levels below
        if fits_fp32(all_g, NORM):
            weights = load_beta(
                Rows(beta_ptr, beta_b, beta_t, beta_h), token_range, head, C, SIGMOID, NEGATIVE
            )
            tl.store(factors_ptr + at.tile * (ROWS * C) + BETA * C + tokens, weights)
            keys = Keys(Rows(q_ptr, q_b, q_t, q_h), Rows(k_ptr, k_b, k_t, k_h), scale, q_rstd_ptr, k_rstd_ptr)
            out = Outputs(q_in_ptr, k_rows_ptr, k_rest_ptr, A_inv_ptr, P_ptr, P_rest_ptr, factors_ptr)
            prepare_by_halves(keys, all_g, weights, at, out, K, UNIT, NORM)
            return
    is_token = tokens < length
    key_head = head // ratio
    num_heads = HV // ratio
    k_rstd = tl.where(is_token, 1.0, 0.0)
    q_scale = tl.full([C], scale, tl.float32)
    if NORM:
        # the rows hold the norms, so all of q and k is read before; the second load finds it in L1 or L2
        k_squares = tl.zeros([C], tl.float32)
        q_squares = tl.zeros([C], tl.float32)
        for block in range(0, K, LEVEL_BLOCK):
            ks = block + tl.arange(0, LEVEL_BLOCK)
            k_squares += sum_squares(
                load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT)
            )
            q_squares += sum_squares(
                load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT)
            )
        k_rstd = inverse_norm(k_squares)
        q_rstd = inverse_norm(q_squares)
        q_scale *= q_rstd
        if q_rstd_ptr is not None:
            # norms exist per key head: its first value head stores them
            is_mine = is_token & (head % ratio == 0)
            rstd_place = (place + tokens) * num_heads + key_head
            tl.store(k_rstd_ptr + rstd_place, k_rstd, mask=is_mine)
            tl.store(q_rstd_ptr + rstd_place, q_rstd, mask=is_mine)

    tile = chunk.to(tl.int64) * HV + head
    rate = gate_rate(A_log_ptr, head)
    within = (tl.zeros([4, 16, 16], tl.float32), tl.zeros([4, 16, 16], tl.float32))
    beside = (tl.zeros([4, 16, 16], tl.float32), tl.zeros([4, 16, 16], tl.float32))
    across = (tl.zeros([32, 32], tl.float32), tl.zeros([32, 32], tl.float32))
    for block in range(0, K, LEVEL_BLOCK):
        ks = block + tl.arange(0, LEVEL_BLOCK)
        x = load_logits(Rows(g_ptr, g_b, g_t, g_h), dt_bias_ptr, token_range, head, ks, K, C, UNIT)
        g = in_blocks(channel_decays(x, rate, lower_bound, is_token, RAW, BOUNDED, RESET))
        k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT)
        q = load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT)
        k = in_blocks(k).to(tl.float32) * of_tokens(k_rstd)
        q = in_blocks(q).to(tl.float32) * of_tokens(q_scale)
        within, beside, across, before, after = add_pairs(q, k, g, within, beside, across, PRECISION)
        total, earlier, later, _ = block_totals(g)
        decay_in = tl.exp(before + earlier)
        i = tl.reshape(tokens, (4, 16))[:, :, None]
        mask = (i < length) & column_mask(ks, K)[None, None, :]
        q_in = q_in_ptr + (place * HV + head) * K + (i * (HV * K) + ks[None, None, :])
        tl.store(q_in, (q * decay_in).to(q_in_ptr.dtype.element_ty), mask)
        # k_in and k_out of a token and head are neighbours in HBM
        k_rows = k_rows_ptr + (place * HV + head) * (2 * K) + (i * (HV * 2 * K) + ks[None, None, :])
        tl.store(k_rows, (k * decay_in).to(k_rows_ptr.dtype.element_ty), mask)
        k_out = k * tl.exp(after + later)
        tl.store(k_rows + K, k_out.to(k_rows_ptr.dtype.element_ty), mask)
        if k_rest_ptr is not None:
            k_rest = k_rest_ptr + (place * HV + head) * K + (i * (HV * K) + ks[None, None, :])
            tl.store(k_rest, rounding_rest(k_out, k_rest_ptr.dtype.element_ty), mask)
        through = tl.exp(tl.sum(tl.sum(total, 1), 0))
        tl.store(factors_ptr + tile * (ROWS * C) + END * C + ks, through, mask=column_mask(ks, K))

    beta = load_beta(Rows(beta_ptr, beta_b, beta_t, beta_h), token_range, head, C, SIGMOID, NEGATIVE)
    tl.store(factors_ptr + tile * (ROWS * C) + BETA * C + tokens, beta)
    within_q, within_k = within
    beside_q, beside_k = beside
    across_q, across_k = across
    store_pairs(P_ptr, P_rest_ptr, tile, within_q, beside_q, across_q, C)
    if A_inv_ptr is not None:
        # each part is multiplied by beta of its rows
        in_block = of_tokens(beta)
        _, late = tl.split(tl.permute(tl.reshape(beta, (2, 32)), (1, 0)))
        A_inv = inverse_of_blocks(
            within_k * in_block, beside_k * in_block, across_k * late[:, None], PRECISION
        )
        store_inverse(A_inv_ptr, tile, A_inv, C)
