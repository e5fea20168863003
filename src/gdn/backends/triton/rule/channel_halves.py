"""Compute rows and pairs of a chunk by its halves, where the decay over each 16 tokens fits fp32.

`channels` has the levels, which are right for any gate. Here a half has 32 tokens. Its middle lies between
two blocks of 16 tokens, and m_i is the sum of g from the middle to token i, or less the sum from i to it:

    D_ij = e^(m_i) e^(-m_j)               tokens i >= j of one half
    D_ij = e^(m_i) between e^(-m_j)       i of the second half, j of the first
    between = e^(sum of g from the middle of the first half to that of the second)

So all levels are one product of rows e^m k (or q) and columns e^-m k over all channels, and one more with
`between` in the columns of the first half. One factor of a pair may be above 1: at most 2^116 where |g| adds
up to at most 116 log(2) = 80 over each block, as it does for lower_bound=-5. A difference of two sums of a
block has an error of 2^-17, much less than the rounding of rows to 16 bits.

One warp has a block, and one lane all 16 tokens of four channels, so sums over a block need no exchange.
"""

from typing import Any, NamedTuple

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.lib import column_mask, dot, inverse_norm, rounding_rest, split_bf16
from gdn.backends.triton.rule.pairs import END, ROWS
from gdn.backends.triton.rule.prepare import store_inverse
from gdn.backends.triton.rule.tril import inverse

LOG2_E = tl.constexpr(1.4426950408889634)
# largest sum of |g| over a block: factors of 2^116 leave 2^12 for an element of k, those of 2^96 leave 2^32
LARGEST_SUM = tl.constexpr(116 * 0.6931471805599453)
LARGEST_SUM_OF_ANY_KEYS = tl.constexpr(96 * 0.6931471805599453)
CHUNK = tl.constexpr(64)
# An MMA in tf32 drops 13 bits of each operand: 2^-11 / log(4) of it in the mean, for a product twice that
UNBIASED = tl.constexpr(1.0 + 2.0**-11 / 0.6931471805599453)
PRECISION = tl.constexpr("tf32")


class Chunk(NamedTuple):
    """Say where a chunk of a value head is: its tokens, its first row in the batch, its tile, and heads."""

    token_range: Any
    place: Any
    tile: Any
    head: Any
    HV: Any
    ratio: Any


class Keys(NamedTuple):
    """Hold q and k [B, T, H, K], the scale of q, and where norms go, or None."""

    q: Any
    k: Any
    scale: Any
    q_rstd_ptr: Any
    k_rstd_ptr: Any


class Outputs(NamedTuple):
    """Hold where rows, pairs and factors go.

    A_inv and the low halves of k_out and P are None where nobody reads them.
    """

    q_in_ptr: Any
    k_rows_ptr: Any
    k_rest_ptr: Any
    A_inv_ptr: Any
    P_ptr: Any
    P_rest_ptr: Any
    factors_ptr: Any


@jit
def lane_channels(N: tl.constexpr):
    """Return N channels, four in each lane: all tensors of a chunk get one layout, without conversions."""
    return tl.max_contiguous(tl.arange(0, N), 4)


@jit
def block_tokens():
    """Return the tokens of a chunk [4, 16, 1]."""
    return 16 * tl.arange(0, 4)[:, None, None] + tl.arange(0, 16)[None, :, None]


@jit
def load_blocks(x, token_range, head, ks, K: tl.constexpr, UNIT: tl.constexpr):
    """Load a chunk's rows of x in fp32 [4, 16, channels]; zeros past its end and past channel K."""
    base = (
        x.ptr
        + (token_range.row.to(tl.int64) * x.b + token_range.first.to(tl.int64) * x.t + head * x.h) * UNIT
    )
    tokens = block_tokens()
    mask = (tokens < token_range.length) & column_mask(ks, K)[None, None, :]
    return tl.load(base + tokens * (x.t * UNIT) + ks[None, None, :], mask=mask, other=0.0).to(tl.float32)


@jit
def store_blocks(base, stride, x, token_range, ks, K: tl.constexpr):
    """Store a chunk's rows x [4, 16, channels] at base, `stride` elements apart."""
    tokens = block_tokens()
    mask = (tokens < token_range.length) & column_mask(ks, K)[None, None, :]
    tl.store(base + (tokens * stride + ks[None, None, :]), x.to(base.dtype.element_ty), mask)


@jit
def softplus_by_polynomial(x):
    """Return log(1 + e^x) with a relative error of 3e-7, in 12 instructions; `lib.softplus` takes some 50."""
    e = tl.exp2(-LOG2_E * tl.abs(x))
    # of log(1 + e) / e on 0 .. 1, interpolated at Chebyshev's points
    p = -0.00837115253 * e + 0.0434938997
    p = p * e - 0.106850028
    p = p * e + 0.176874767
    p = p * e - 0.244747742
    p = p * e + 0.332719284
    p = p * e - 0.499971745
    p = p * e + 0.999999781
    return p * e + tl.maximum(x, 0.0)


@jit
def sigmoid_by_rsqrt(x):
    """Return 1 / (1 + e^-x) in 5 instructions, two on the special function unit; a division takes ten."""
    # e^-x may be inf: its inverse is the right 0
    root = tl.rsqrt(1.0 + tl.exp2(-LOG2_E * x))
    return root * root


@jit
def load_decays(g, dt_bias_ptr, gate, at, ks, K: tl.constexpr, UNIT: tl.constexpr, BOUNDED: tl.constexpr):
    """Return g of a chunk [4, 16, channels]; 0 past its end.

    gate: (rate, lower_bound) where g are logits, else None. dt_bias_ptr: None without a bias; a tuple of
    Triton's cannot hold it.
    """
    x = load_blocks(g, at.token_range, at.head, ks, K, UNIT)
    if gate is not None:
        rate, lower_bound = gate
        if dt_bias_ptr is not None:
            bias = tl.load(dt_bias_ptr + at.head * K + ks, mask=column_mask(ks, K), other=0.0)
            x += bias.to(tl.float32)[None, None, :]
        if BOUNDED:
            x = lower_bound * sigmoid_by_rsqrt(rate * x)
        else:
            x = -rate * softplus_by_polynomial(x)
        x = tl.where(block_tokens() < at.token_range.length, x, 0.0)
    return x


@jit
def fits_fp32(g, NORM: tl.constexpr):
    """Return True if the factors of a chunk fit fp32, from g [4, 16, N]; False for NaN.

    NORM: keys are normalised, so that none of their elements is above 1.
    """
    largest: tl.constexpr = LARGEST_SUM if NORM else LARGEST_SUM_OF_ANY_KEYS
    # of absolute values, so it bounds the sum over any part of a block
    return tl.max(tl.where(tl.sum(tl.abs(g), 1) <= largest, 0, 1)) == 0


@jit
def last_of_block(x):
    """Return x [4, 16, N] of the last token of each block."""
    # a sum of bits: the compiler drops zeros that are integers, and the sum is one register
    bits = tl.where(tl.arange(0, 16)[None, :, None] == 15, x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 1).to(tl.float32, bitcast=True)


@jit
def norms(x, rstd_ptr, at):
    """Return the inverse norms [4, 16, 1] of rows x [4, 16, N], and store them unless rstd_ptr is None."""
    rstd = inverse_norm(tl.sum(x * x, 2))[:, :, None]
    if rstd_ptr is not None:
        tokens = block_tokens()
        # norms exist per key head: its first value head stores them
        is_mine = (tokens < at.token_range.length) & (at.head % at.ratio == 0)
        tl.store(rstd_ptr + (at.place + tokens) * (at.HV // at.ratio) + at.head // at.ratio, rstd, is_mine)
    return rstd


@jit
def block_decays(g):
    """Return sums of g / log(2) from a block's start [4, 16, N], and decays [4, 1, N], from g [4, 16, N].

    The decays are those of the block itself, of earlier and of later blocks, of blocks between it and the
    middle of the second half (1 in the second half), and that of the chunk [N].
    """
    n = tl.arange(0, 4)[:, None]
    before = tl.cumsum(g * LOG2_E, 1)
    total = last_of_block(before)
    to_end = tl.cumsum(total, 0)
    of_chunk = tl.sum(total, 0)
    to_middle = tl.sum(tl.where(n < 3, total, 0.0), 0)[None, :] - to_end
    block = tl.exp2(total)[:, None, :]
    earlier = tl.exp2(to_end - total)[:, None, :]
    later = tl.exp2(of_chunk[None, :] - to_end)[:, None, :]
    between = tl.where(n < 2, tl.exp2(to_middle), 1.0)[:, None, :]
    return before, block, earlier, later, between, tl.exp2(of_chunk)


@jit
def multiply_halves(rows, columns, shifted):
    """Return the pairs of rows [4, 16, N] with columns [N, 64]; right are those of i >= j.

    shifted: the columns for rows of the second half.
    """
    rows = tl.reshape(rows, (CHUNK, rows.shape[2]))
    # both MMAs have 64 rows, of which half is used
    first = dot(rows, columns, None, PRECISION)
    is_first = tl.arange(0, CHUNK)[:, None] < CHUNK // 2
    return tl.where(is_first, first, dot(rows, shifted, None, PRECISION))


@jit
def store_pairs_of_halves(out, at, qk):
    """Store P of a chunk; unless P_rest_ptr is None as hi + lo in two tensors."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    # selected, not multiplied: pairs above the diagonal may be inf
    P = tl.where(i >= j, qk, 0.0)
    square = at.tile * (CHUNK * CHUNK) + (i * CHUNK + j)
    if out.P_rest_ptr is None:
        tl.store(out.P_ptr + square, P.to(out.P_ptr.dtype.element_ty))
    else:
        high, low = split_bf16(P, out.P_ptr.dtype.element_ty)
        tl.store(out.P_ptr + square, high)
        tl.store(out.P_rest_ptr + square, low)


@jit
def prepare_by_halves(keys, g, beta, at, out, K: tl.constexpr, UNIT: tl.constexpr, NORM: tl.constexpr):
    """Store the rows of a chunk, e^(G_C), norms, P and A_inv. g: from `load_decays`, if it `fits_fp32`."""
    N: tl.constexpr = g.shape[2]
    ks = lane_channels(N)
    before, block, earlier, later, between, of_chunk = block_decays(g)
    place = out.factors_ptr + at.tile * (ROWS * CHUNK) + END * CHUNK + ks
    tl.store(place, of_chunk, mask=column_mask(ks, K))
    n = tl.arange(0, 4)[:, None, None]
    # the middle of a half is the end of its first block, and the start of its second
    is_odd = n % 2 == 1
    key_head = at.head // at.ratio
    row = at.place * at.HV + at.head

    k = load_blocks(keys.k, at.token_range, key_head, ks, K, UNIT)
    if NORM:
        k *= norms(k, keys.k_rstd_ptr, at)
    # k_in and k_out of a token and head are neighbours in HBM
    k_place = out.k_rows_ptr + row * (2 * K)
    column = k * tl.exp2(-before)
    # products of two factors, where the product of the factors may be 0 and the result is not
    k_out = column * block * later
    store_blocks(k_place + K, at.HV * (2 * K), k_out, at.token_range, ks, K)
    if out.k_rest_ptr is not None:
        k_rest = rounding_rest(k_out, out.k_rest_ptr.dtype.element_ty)
        store_blocks(out.k_rest_ptr + row * K, at.HV * K, k_rest, at.token_range, ks, K)
    column *= tl.where(is_odd, 1.0, block)
    columns = tl.trans(tl.reshape(column, (CHUNK, N)))
    # those of the first half from the middle of the second
    column = column * tl.where(n == 1, block, 1.0) * between
    shifted = tl.trans(tl.reshape(column, (CHUNK, N)))
    to_rows = UNBIASED * tl.where(is_odd, 1.0, 1.0 / block)
    k *= tl.exp2(before)
    store_blocks(k_place, at.HV * (2 * K), k * earlier, at.token_range, ks, K)
    if out.A_inv_ptr is not None:
        kk = multiply_halves(k * to_rows, columns, shifted)

    # after the MMAs of k, whose registers and shared memory it takes
    q = load_blocks(keys.q, at.token_range, key_head, ks, K, UNIT)
    if NORM:
        q *= norms(q, keys.q_rstd_ptr, at)
    q *= tl.exp2(before)
    store_blocks(out.q_in_ptr + row * K, at.HV * K, q * (keys.scale * earlier), at.token_range, ks, K)
    store_pairs_of_halves(out, at, multiply_halves(q * (keys.scale * to_rows), columns, shifted))
    if out.A_inv_ptr is not None:
        store_inverse(out.A_inv_ptr, at.tile, inverse(kk * beta[:, None], PRECISION), CHUNK)
