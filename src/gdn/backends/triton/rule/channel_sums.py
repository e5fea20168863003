"""Compute decays of 64 key channels of a chunk at once, from sums of g by MMA.

A sum of g over tokens of the chunk is a row of 0 and 1 times g, so one MMA [64, 64] x [64, channels] on
tensor cores adds up all of them. Each sum has terms of one sign, and nothing cancels. Of a token i:

    a_i   from the middle of its half (32 tokens) to i, of either sign
    m_i   between the middle of the chunk and i, as level 5 of `channels`
    G_i   from the start of the chunk to i;   G_C - G_i, from i to its end

For pairs within a half the decay is split at the middle of the half, D_ij = e^(a_i) e^(-a_j): one factor is
above 1 where both tokens are on one side. While each block of 16 tokens decays by less than 2^-104 in each
channel, both factors are in the range of fp32, so these pairs are one MMA instead of the levels 0 to 4. Other
chunks take the levels, which are right for any gate; their rows are right here, too.
"""

import triton
import triton.language as tl

from gdn.backends.triton.lib import split_bf16

LOG2_E = tl.constexpr(1.4426950408889634)
# factors up to 2^104 leave 2^23 for the size of q and k
LOWEST = tl.constexpr(-104.0)


@triton.jit
def in_sum(i, t, WIDTH: tl.constexpr):
    """Return True where g of token t lies between token i and the middle of its piece of 2 WIDTH tokens."""
    return ((i ^ t) < WIDTH) & ((t <= i) == ((i & WIDTH) != 0))


@triton.jit
def add_tokens(is_term, x, acc=None):
    """Return [64, N]: acc + sums of x [64, N] in fp32 over the tokens that rows of is_term [64, 64] mark."""
    # hi + lo keeps x to 2^-16; differences of sums of the same terms are exact to fp32
    high, low = split_bf16(x, tl.bfloat16)
    weights = tl.where(is_term, 1.0, 0.0).to(tl.bfloat16)
    return tl.dot(weights, low, tl.dot(weights, high, acc))


@triton.jit
def sum_from_middle(g, i):
    """Return a [64, N] from g / log(2), and the smallest sum over tokens of a block."""
    sums = add_tokens(in_sum(i, tl.arange(0, 64)[None, :], 16), g)
    return tl.where((i & 16) != 0, sums, -sums), tl.min(tl.min(sums, 1), 0)


@triton.jit
def middle_decay(g, i):
    """Return the decays [64, N] between tokens and the middle of the chunk, from g / log(2)."""
    return tl.exp2(add_tokens(in_sum(i, tl.arange(0, 64)[None, :], 32), g))


@triton.jit
def decay_in(g, i):
    """Return the decays [64, N] from the start of the chunk to each token, from g / log(2)."""
    return tl.exp2(add_tokens(tl.arange(0, 64)[None, :] <= i, g))


@triton.jit
def decay_out(g, i):
    """Return the decays [64, N] from each token to the end of the chunk, from g / log(2)."""
    return tl.exp2(add_tokens(tl.arange(0, 64)[None, :] > i, g))


@triton.jit
def opaque_tokens(lowest, N: tl.constexpr):
    """Return the tokens [64, 1] of a chunk; for another N the compiler takes them for other values.

    It does not know that lowest <= 0. So it makes weights where they are used, and does not keep them in
    registers from one use to another.
    """
    return tl.arange(0, 64)[:, None] + (lowest > N).to(tl.int32)


@triton.jit
def round_bf16(x):
    """Round finite fp32 x to bf16, and keep it in fp32."""
    # a mask of bits, as in `truncate`: rounding back and forth would convert with F2F
    return ((x.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000).to(tl.float32, bitcast=True)
