"""Compute what does not depend on the state, per chunk and value head, with a decay per key channel.

    A_ij = beta_i sum_c k_ic k_jc D_ijc, i > j;   A_inv = (I + A)^-1
    P_ij = scale sum_c q_ic k_jc D_ijc, i >= j
    q_in = scale e^G q;   k_in = e^G k;   k_out = e^(G_C - G) k;   e^(G_C) per channel

D_ijc is e to the sum of g_c over the tokens j + 1 .. i, which `channels` computes exactly for any gate. The
state passes read the rows q_in, k_in and k_out in the place of q, k and factors, and are the same kernels as
for a decay per head. The norms are in the rows. A backward launches this kernel again without A_inv: its rows
and P are not kept.

Bytes per token and value head at K = V = 128 in bf16, HV = H, g in fp32: q, k 512, g 512, rows 768, A_inv and
P 256, beta, e^(G_C) 12: 2060.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import (
    Rows,
    TokenRange,
    column_mask,
    dot,
    inverse_norm,
    load_beta,
    load_rows,
    sum_squares,
)
from gdn.backends.triton.rule.channel_sums import (
    LOG2_E,
    LOWEST,
    decay_in,
    decay_out,
    middle_decay,
    sum_from_middle,
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
    pairs_of_level,
    swap_neighbours,
)
from gdn.backends.triton.rule.pairs import BETA, END, ROWS
from gdn.backends.triton.rule.prepare import clear_outputs, store_inverse
from gdn.backends.triton.rule.store_pairs import store_levels, store_square
from gdn.backends.triton.rule.tril import inverse


@triton.jit
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


@triton.jit
def add_chunk_pairs(q, k, g, pairs_q, pairs_k):
    """Add the products of q, k [64, N] with decays g / log(2) to pairs [64, 64] of q, and of k, with k.

    Also returns the smallest sum of g over tokens of a block: pairs i > j are right from LOWEST on, others
    never.
    """
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    is_half = (i ^ j) < 32
    a, lowest = sum_from_middle(g, i)
    # bf16: an accumulator has its elements in the registers where the left operand of an MMA has them
    columns = tl.trans((k * tl.exp2(-a)).to(tl.bfloat16))
    decay = tl.exp2(a)
    # selected and not added by the MMA: pairs outside a half may be inf or NaN
    pairs_q += tl.where(is_half, dot_rows(q * decay, columns), 0.0)
    pairs_k += tl.where(is_half, dot_rows(k * decay, columns), 0.0)
    decay = middle_decay(g, i)
    columns = tl.trans((k * decay).to(tl.bfloat16))
    pairs_q += tl.where(is_half, 0.0, dot_rows(q * decay, columns))
    pairs_k += tl.where(is_half, 0.0, dot_rows(k * decay, columns))
    return pairs_q, pairs_k, lowest


@triton.jit
def dot_rows(rows, columns):
    """Return rows [64, N] in fp32 times columns in bf16."""
    return tl.dot(rows.to(tl.bfloat16), columns)


class Chunk(NamedTuple):
    """Say where a chunk of a value head is: its tokens, its first row in the batch, its tile, and heads."""

    token_range: Any
    place: Any
    tile: Any
    head: Any
    key_head: Any
    HV: Any


class Gate(NamedTuple):
    """Hold what gives g: the tensor or its logits, the bias or None, and scalars of the activation."""

    g: Any
    dt_bias_ptr: Any
    rate: Any
    lower_bound: Any


class KeyRows(NamedTuple):
    """Hold q and k, and what scales their rows."""

    q: Any
    k: Any
    q_scale: Any
    k_rstd: Any


@triton.jit
def load_channels(
    rows, gate, at, ks, K: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, RAW: tl.constexpr,
    BOUNDED: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """Return q and k as given, and g [C, channels] of a chunk, in fp32."""
    x = load_logits(gate.g, gate.dt_bias_ptr, at.token_range, at.head, ks, K, C, UNIT)
    is_token = tl.arange(0, C) < at.token_range.length
    g = channel_decays(x, gate.rate, gate.lower_bound, is_token, RAW, BOUNDED, RESET)
    k = load_rows(rows.k, at.token_range, at.key_head, ks, K, C, UNIT)
    q = load_rows(rows.q, at.token_range, at.key_head, ks, K, C, UNIT)
    return q.to(tl.float32), k.to(tl.float32), g


@triton.jit
def normalize(q, k, rows):
    """Return q and k [C, channels] with norms and scale."""
    return q * rows.q_scale[:, None], k * rows.k_rstd[:, None]


@triton.jit
def store_rows(q_in_ptr, k_rows_ptr, at, tokens, ks, q_in, k_in, k_out, K: tl.constexpr):
    """Store the rows of a chunk [64, channels] or [4, 16, channels]; tokens broadcast to their shape."""
    # a constant True where no channel is past K, so before it gets more axes
    is_channel = column_mask(ks, K)
    if len(q_in.shape) == 3:
        ks, is_channel = ks[None, None, :], is_channel[None, None, :]
    else:
        ks, is_channel = ks[None, :], is_channel[None, :]
    mask = (tokens < at.token_range.length) & is_channel
    q_place = q_in_ptr + (at.place * at.HV + at.head) * K + (tokens * (at.HV * K) + ks)
    tl.store(q_place, q_in.to(q_in_ptr.dtype.element_ty), mask)
    # k_in and k_out of a token and head are neighbours in HBM
    k_place = k_rows_ptr + (at.place * at.HV + at.head) * (2 * K) + (tokens * (at.HV * 2 * K) + ks)
    tl.store(k_place, k_in.to(k_rows_ptr.dtype.element_ty), mask)
    tl.store(k_place + K, k_out.to(k_rows_ptr.dtype.element_ty), mask)


@triton.jit
def store_through(factors_ptr, tile, ks, through, K: tl.constexpr, C: tl.constexpr):
    """Store e^(G_C) of key channels among the factors of a tile."""
    tl.store(factors_ptr + tile * (ROWS * C) + END * C + ks, through, mask=column_mask(ks, K))


@triton.jit
def pairs_by_levels(
    rows, gate, at, q_in_ptr, k_rows_ptr, factors_ptr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    UNIT: tl.constexpr, RAW: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    RESET: tl.constexpr,
):  # fmt: skip
    """Return the parts of the pairs of q, and of k, with k, for any gate; store rows unless q_in_ptr is None.

    The parts are those of `add_pairs`, which needs q, k and g in blocks of BK channels: they bound registers.
    """
    within = (tl.zeros([4, 16, 16], tl.float32), tl.zeros([4, 16, 16], tl.float32))
    beside = (tl.zeros([4, 16, 16], tl.float32), tl.zeros([4, 16, 16], tl.float32))
    across = (tl.zeros([32, 32], tl.float32), tl.zeros([32, 32], tl.float32))
    for block in range(0, K, BK):
        ks = block + tl.arange(0, BK)
        q, k, g = load_channels(rows, gate, at, ks, K, C, UNIT, RAW, BOUNDED, RESET)
        q, k = normalize(q, k, rows)
        q, k, g = in_blocks(q), in_blocks(k), in_blocks(g)
        within, beside, across, before, after = add_pairs(q, k, g, within, beside, across, PRECISION)
        if q_in_ptr is not None:
            total, earlier, later, _ = block_totals(g)
            decay_in = tl.exp(before + earlier)
            tokens = tl.reshape(tl.arange(0, C), (4, 16))[:, :, None]
            k_out = k * tl.exp(after + later)
            store_rows(q_in_ptr, k_rows_ptr, at, tokens, ks, q * decay_in, k * decay_in, k_out, K)
            store_through(factors_ptr, at.tile, ks, tl.exp(tl.sum(tl.sum(total, 1), 0)), K, C)
    return within, beside, across


@triton.jit
def pairs_by_sums(
    rows, gate, at, q_in_ptr, k_rows_ptr, factors_ptr, K: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    RAW: tl.constexpr, BOUNDED: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """Return pairs [C, C] of q, and of k, with k, and the smallest sum as `add_chunk_pairs`; store the rows.

    The rows are right for any gate.
    """
    i = tl.arange(0, C)[:, None]
    t = tl.arange(0, C)[None, :]
    # two loops, so that fewer operands are in registers at once; the second finds q, k and g in L1 or L2
    own = tl.zeros([C], tl.float32)
    for block in range(0, K, 64):
        ks = block + tl.arange(0, 64)
        q, k, g = load_channels(rows, gate, at, ks, K, C, UNIT, RAW, BOUNDED, RESET)
        q, k = normalize(q, k, rows)
        g *= LOG2_E
        store_through(factors_ptr, at.tile, ks, tl.exp2(tl.sum(g, 0)), K, C)
        # a token's own pair has no decay
        own += tl.sum(q * k, 1)
        decay = decay_in(g, i)
        k_out = k * decay_out(g, i)
        store_rows(q_in_ptr, k_rows_ptr, at, i, ks, q * decay, k * decay, k_out, K)
    pairs_q = tl.zeros([C, C], tl.float32)
    pairs_k = tl.zeros([C, C], tl.float32)
    lowest = 0.0
    for block in range(0, K, 64):
        ks = block + tl.arange(0, 64)
        q, k, g = load_channels(rows, gate, at, ks, K, C, UNIT, RAW, BOUNDED, RESET)
        pairs_q, pairs_k, block_lowest = add_chunk_pairs(q, k, g * LOG2_E, pairs_q, pairs_k)
        lowest = tl.minimum(lowest, block_lowest)
    # norms scale the results: q and k stay in 16 bits until they are multiplied
    pairs_q = tl.where(i == t, own[:, None], pairs_q * rows.q_scale[:, None] * rows.k_rstd[None, :])
    pairs_k = pairs_k * rows.k_rstd[:, None] * rows.k_rstd[None, :]
    return pairs_q, pairs_k, lowest


@kernel
def prepare_channels_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, table_ptr, q_in_ptr, k_rows_ptr, A_inv_ptr, P_ptr,
    P_rest_ptr, factors_ptr, q_rstd_ptr, k_rstd_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, T, HV,
    ratio, chunks_per_row, scale, lower_bound,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr, NORM: tl.constexpr, RAW: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr, RESET: tl.constexpr, BY_SUMS: tl.constexpr,
):  # fmt: skip
    # Rows, A_inv, P, beta, e^(G_C) and norms of one chunk and value head; formulas at the top of the file.
    # Program (chunk, head). Grid: entries * HV, heads fastest, so that the value heads of a key head find q
    # and k in L2; 4 warps, one per block of 16 tokens; no PDL.
    # Reads q, k and g of 64 tokens in blocks of BK channels, which bound the registers, and beta. Writes
    # q_in, k_in and k_out, A_inv (unless it is None) and P [C, C], and beta and e^(G_C) among the factors.
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
    key_head = head // ratio
    num_heads = HV // ratio
    k_rstd = tl.where(is_token, 1.0, 0.0)
    q_scale = tl.full([C], scale, tl.float32)
    if NORM:
        # the rows hold the norms, so all of q and k is read before; the second load finds it in L1 or L2
        k_squares = tl.zeros([C], tl.float32)
        q_squares = tl.zeros([C], tl.float32)
        columns: tl.constexpr = 64 if BY_SUMS else BK
        for block in range(0, K, columns):
            ks = block + tl.arange(0, columns)
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

    beta = load_beta(Rows(beta_ptr, beta_b, beta_t, beta_h), token_range, head, C, SIGMOID, NEGATIVE)
    tile = chunk.to(tl.int64) * HV + head
    tl.store(factors_ptr + tile * (ROWS * C) + BETA * C + tokens, beta)
    at = Chunk(token_range, place, tile, head, key_head, HV)
    gate = Gate(Rows(g_ptr, g_b, g_t, g_h), dt_bias_ptr, gate_rate(A_log_ptr, head), lower_bound)
    rows = KeyRows(Rows(q_ptr, q_b, q_t, q_h), Rows(k_ptr, k_b, k_t, k_h), q_scale, k_rstd)
    if BY_SUMS:
        pairs_q, pairs_k, lowest = pairs_by_sums(
            rows, gate, at, q_in_ptr, k_rows_ptr, factors_ptr, K, C, UNIT, RAW, BOUNDED, RESET
        )
        if lowest >= LOWEST:
            store_square(P_ptr, P_rest_ptr, tile, pairs_q, C)
            if A_inv_ptr is not None:
                store_inverse(A_inv_ptr, tile, inverse(pairs_k * beta[:, None], PRECISION), C)
        else:
            parts = pairs_by_levels(
                rows, gate, at, None, None, None, K, BK, C, UNIT, RAW, BOUNDED, PRECISION, RESET
            )
            store_levels(P_ptr, P_rest_ptr, A_inv_ptr, tile, beta, parts, C, PRECISION)
    else:
        parts = pairs_by_levels(
            rows, gate, at, q_in_ptr, k_rows_ptr, factors_ptr, K, BK, C, UNIT, RAW, BOUNDED, PRECISION, RESET
        )
        store_levels(P_ptr, P_rest_ptr, A_inv_ptr, tile, beta, parts, C, PRECISION)
