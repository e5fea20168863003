"""Compute decays of single key channels between the tokens of a chunk, exactly for any gate.

A pair of tokens i > j belongs to the level 0 .. 5 of the highest bit in which i and j differ. At level l the
chunk is cut into pieces of 2 w tokens, w = 2^l, with i in the second half of a piece and j in the first. The
decay of the pair is split at the middle of the piece:

    d_i = e^(sum of g from the middle to i);   d_j = e^(sum of g from j to the middle);   D_ij = d_i d_j

Each exponent is a sum of terms of one sign, so nothing overflows and nothing cancels, whatever g is. One
tensor d holds both halves, so the pairs of a level are one product (q d) (k d)^T, of which a mask keeps the
pairs of this level. Levels 0 to 3 are inside blocks of 16 tokens, one a warp: tensors are [4, 16, channels].
Level 4 multiplies blocks by the block before, level 5 the halves of the chunk.
"""

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.lib import column_mask, dot, load_rows, sigmoid, softplus, split_bf16

LARGEST = tl.constexpr(3.4028234e38)  # of fp32


@jit
def gate_rate(A_log_ptr, head):
    """Return e^A_log of a head, finite, so that it times a logit of 0 is 0; 1 without A_log."""
    if A_log_ptr is None:
        return 1.0
    else:
        return tl.minimum(tl.exp(tl.load(A_log_ptr + head).to(tl.float32)), LARGEST)


@jit
def load_logits(g, dt_bias_ptr, token_range, head, ks, K: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr):
    """Load g + dt_bias [C, channels] of a chunk in fp32; the bias alone past its end."""
    x = load_rows(g, token_range, head, ks, K, C, UNIT).to(tl.float32)
    if dt_bias_ptr is not None:
        bias = tl.load(dt_bias_ptr + head * K + ks, mask=column_mask(ks, K), other=0.0)
        x += bias.to(tl.float32)[None, :]
    return x


@jit
def activate_logits(x, rate, lower_bound, BOUNDED: tl.constexpr):
    """Return the log decay g of logits x, in fp32."""
    if BOUNDED:
        return lower_bound * sigmoid(rate * x)
    else:
        return -rate * softplus(x)


@jit
def logits_bwd(dg, g, x, rate, lower_bound, BOUNDED: tl.constexpr):
    """Return the gradient of logits x, and its terms of dA_log, from dg; g as `activate_logits` returns it.

    0 times NaN or inf is 0: a saturated gate passes no gradient, whatever the logit is.
    """
    if BOUNDED:
        # sigmoid(-y), not 1 - sigmoid(y), which cancels for large y
        y = rate * x
        slope = sigmoid(y) * sigmoid(-y)
        is_zero = (dg == 0) | (slope == 0)
        dx = tl.where(is_zero, 0.0, slope * dg * lower_bound * rate)
        return dx, tl.where(is_zero, 0.0, x * dx)
    else:
        is_zero = dg == 0
        dx = tl.where(is_zero, 0.0, -rate * sigmoid(x) * dg)
        return dx, tl.where(is_zero, 0.0, g * dg)


@jit
def channel_decays(
    x, rate, lower_bound, is_token, RAW: tl.constexpr, BOUNDED: tl.constexpr, RESET: tl.constexpr
):
    """Return max(g, RESET) [C, channels] from `load_logits`; 0 past the chunk's end. RAW: x are logits."""
    if RAW:
        x = activate_logits(x, rate, lower_bound, BOUNDED)
    # keep NaN: tl.maximum(NaN, RESET) is RESET on a GPU
    x = tl.where(x < RESET, RESET, x)
    return tl.where(is_token[:, None], x, 0.0)


@jit
def in_blocks(x):
    """Return [4, 16, N] from [64, N]: blocks of 16 tokens."""
    return tl.reshape(x, (4, 16, x.shape[1]))


@jit
def of_tokens(x):
    """Return [4, 16, 1] from a vector of 64 tokens."""
    return tl.reshape(x, (4, 16, 1))


@jit
def is_second(x, LEVEL):
    """Return [1, 16, 1]: True for tokens of a block in the second half of their piece."""
    i = tl.arange(0, 16)[None, :, None]
    return (i >> LEVEL) & 1 == 1


@jit
def level_decays(before, after, LEVEL):
    """Return d [4, 16, N] of a level in blocks. before, after: the sums over pieces of 2^LEVEL tokens."""
    return tl.exp(tl.where(is_second(before, LEVEL), before, after))


@jit
def double_pieces(before, after, LEVEL):
    """Return the sums over pieces of 2^(LEVEL + 1) tokens from those of 2^LEVEL.

    before: the sum of g from the piece's start to the token; after: from the next token to the piece's end.
    """
    i = tl.broadcast_to(tl.arange(0, 16)[None, :, None], before.shape)
    second = is_second(before, LEVEL)
    # the last token of the other half holds the sum over that half
    end = i | ((2 << LEVEL) - 1)
    half = tl.gather(before, tl.where(second, end - (1 << LEVEL), end), 1)
    return tl.where(second, before + half, before), tl.where(second, after, after + half)


@jit
def pairs_of_level(LEVEL):
    """Return [1, 16, 16]: True for pairs i > j of a block that belong to a level."""
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    return ((i ^ j) >> LEVEL == 1) & (i > j)


@jit
def block_totals(g):
    """Return the sums of g [4, 16, N] over a block, over earlier blocks, and over later ones [4, 1, N].

    The fourth value is [4, 1, N], too: the sum between the middle of the chunk and a block not next to it.
    """
    total = tl.sum(g, 1)
    n = tl.arange(0, 4)[:, None, None]
    m = tl.arange(0, 4)[None, :, None]
    others = tl.broadcast_to(total[None, :, :], (4, 4, g.shape[2]))
    earlier = tl.sum(tl.where(m < n, others, 0.0), 1)
    later = tl.sum(tl.where(m > n, others, 0.0), 1)
    # block 0 lies block 1 before the middle, block 3 lies block 2 after it
    between = tl.sum(tl.where((n == 0) & (m == 1) | (n == 3) & (m == 2), others, 0.0), 1)
    return total[:, None, :], earlier[:, None, :], later[:, None, :], between[:, None, :]


@jit
def is_odd_block():
    """Return [4, 1, 1]: True for blocks in the second half of their 32 tokens."""
    return tl.arange(0, 4)[:, None, None] % 2 == 1


@jit
def is_late_block():
    """Return [4, 1, 1]: True for blocks in the second half of the chunk."""
    return tl.arange(0, 4)[:, None, None] >= 2


@jit
def halves(x):
    """Return the first and the second 32 tokens [32, N] of x [4, 16, N]."""
    return tl.split(tl.permute(tl.reshape(x, (2, 32, x.shape[2])), (1, 2, 0)))


@jit
def join_halves(first, second):
    """Return [4, 16, N] from its first and its second 32 tokens [32, N]."""
    return tl.reshape(tl.permute(tl.join(first, second), (2, 0, 1)), (4, 16, first.shape[1]))


@jit
def swap_neighbours(x):
    """Return x [4, 16, N] with blocks 0 and 1, and 2 and 3, exchanged."""
    N: tl.constexpr = x.shape[2]
    even, odd = tl.split(tl.permute(tl.reshape(x, (2, 2, 16, N)), (0, 2, 3, 1)))
    return tl.reshape(tl.permute(tl.join(odd, even), (0, 3, 1, 2)), (4, 16, N))


@jit
def multiply_rows(a, b, acc, PRECISION: tl.constexpr):
    """Return acc + a b^T of a, b [4, 16, N]: products of the tokens of each block, one block a warp."""
    return dot(a, tl.permute(b, (0, 2, 1)), acc, PRECISION)


@jit
def add_within_block(weights, x, acc, PRECISION: tl.constexpr):
    """Return acc + weights^T x of x [4, 16, N] in fp32, with weights [16, 16] of 0 and 1."""
    weights = tl.broadcast_to(tl.trans(weights)[None, :, :], (4, 16, 16))
    if PRECISION == "tf32":
        # hi + lo keeps x to 2^-16, for the time of one tf32 MMA
        high, low = split_bf16(x, tl.bfloat16)
        weights = weights.to(tl.bfloat16)
        return tl.dot(weights, low, tl.dot(weights, high, acc))
    else:
        return dot(weights.to(tl.float32), x, acc, PRECISION)
