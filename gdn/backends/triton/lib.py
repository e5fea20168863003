"""What kernels share: products, gates, norms."""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc=None, PRECISION: tl.constexpr = "tf32"):
    """a b + acc in fp32; PRECISION holds for fp32 operands: tf32, tf32x3 or ieee."""
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def softplus(x):
    """log(1 + e^x): linear above 20; right for very negative x, where 1 + e^x is 1."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    # log1p(e): the rounding of 1 + e is taken out again
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), without overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def strength(x, SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr):
    """beta from what the caller gave: itself, sigmoid of it, or twice that."""
    x = x.to(tl.float32)
    if SIGMOID:
        x = sigmoid(x)
        if NEGATIVE:
            x = 2.0 * x
    return x


@triton.jit
def split(x):
    """An fp64 number as two of fp32, whose sum it is to some 48 bits."""
    high = x.to(tl.float32)
    return high, (x - high.to(tl.float64)).to(tl.float32)


@triton.jit
def load_sums(G_ptr, row, first, length, head, T, HV, C: tl.constexpr):
    """G of a chunk's tokens as (high, low), and of its last token; 0 past the chunk's end."""
    tokens = tl.arange(0, C)
    base = G_ptr + (row.to(tl.int64) * T + first) * HV + head
    G = tl.load(base + tokens * HV, mask=tokens < length, other=0.0)
    high, low = split(G)
    end_high, end_low = split(tl.load(base + (length - 1) * HV))
    return high, low, end_high, end_low


@triton.jit
def decay(from_high, from_low, to_high, to_low):
    """e^(to - from) of sums split in two; from >= to, or the caller masks it."""
    return tl.exp(tl.minimum((to_high - from_high) + (to_low - from_low), 0.0))
