"""What kernels share: products, gates, norms."""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc=None, PRECISION: tl.constexpr = "tf32"):
    """a b + acc in fp32; PRECISION holds for fp32 operands: tf32, tf32x3 or ieee."""
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def cut(x, dtype: tl.constexpr):
    """x, in fp32, without the digits that a 16-bit dtype has no place for; no operand alone.

    To bf16 by a mask: where a rounded number is wanted in fp32 again, ptxas converts it by F2F, eight cycles
    a scheduler. What is cut off does not average out: it must be multiplied, too.
    """
    if dtype == tl.bfloat16:
        return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def parts(x, dtype: tl.constexpr):
    """x, in fp32, as two operands of a 16-bit dtype: x `cut` to it, and what that took."""
    high = cut(x, dtype)
    return high.to(dtype), (x - high).to(dtype)


@triton.jit
def dot_in_parts(a, x, acc, PRECISION: tl.constexpr, FINE: tl.constexpr):
    """a x + acc, x in fp32; FINE: x in two `parts` of a's 16-bit dtype."""
    if FINE:
        high = cut(x, a.dtype)
        acc = dot(a, high.to(a.dtype), acc, PRECISION)
        return dot(a, (x - high).to(a.dtype), acc, PRECISION)
    else:
        return dot(a, x.to(a.dtype), acc, PRECISION)


@triton.jit
def left_in_parts(x, b, acc, PRECISION: tl.constexpr, FINE: tl.constexpr):
    """x b + acc as `dot_in_parts`, x on the left: its parts are held in registers."""
    if FINE:
        high, low = parts(x, b.dtype)
        return dot(low, b, dot(high, b, acc, PRECISION), PRECISION)
    else:
        return dot(x.to(b.dtype), b, acc, PRECISION)


@triton.jit
def softplus(x):
    """log(1 + e^x): linear above 20; right for very negative x, where 1 + e^x is 1."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def log1p(x):
    """log(1 + x) for x in 0 .. 1: the rounding of 1 + x is taken out again."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


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


@triton.jit
def exist(columns, D: tl.constexpr):
    """Which columns of a block lie below D; a constant where all do, so that no mask is left of it."""
    if (columns.shape[0] + D) % columns.shape[0] == 0:
        return tl.full(columns.shape, True, tl.int1)
    else:
        return columns < D


@triton.jit
def load_beta(
    beta_ptr, row, first, length, head, beta_b, beta_t, beta_h, C: tl.constexpr, SIGMOID: tl.constexpr,
    NEGATIVE: tl.constexpr,
):  # fmt: skip
    """beta of a chunk's tokens, 0 past its end."""
    tokens = tl.arange(0, C)
    if beta_ptr is None:
        return tl.where(tokens < length, 1.0, 0.0)
    else:
        base = beta_ptr + row.to(tl.int64) * beta_b + first.to(tl.int64) * beta_t + head * beta_h
        beta = tl.load(base + tokens * beta_t, mask=tokens < length, other=0.0)
        return tl.where(tokens < length, strength(beta, SIGMOID, NEGATIVE), 0.0)


@triton.jit
def load_rstd(rstd_ptr, row, first, length, head, T, H, C: tl.constexpr):
    """1 / norm of a chunk's keys or queries, 0 past its end; ones where there is no normalisation."""
    tokens = tl.arange(0, C)
    if rstd_ptr is None:
        return tl.where(tokens < length, 1.0, 0.0)
    else:
        base = rstd_ptr + (row.to(tl.int64) * T + first) * H + head
        return tl.load(base + tokens * H, mask=tokens < length, other=0.0)


@triton.jit
def rows_of(
    x_ptr, row, first, length, head, x_b, x_t, x_h, columns, D: tl.constexpr, C: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """A chunk's rows of x [C, len(columns)]; zeros past its end and past column D."""
    tokens = tl.arange(0, C)
    base = x_ptr + (row.to(tl.int64) * x_b + first.to(tl.int64) * x_t + head * x_h) * UNIT
    mask = (tokens < length)[:, None] & exist(columns, D)[None, :]
    return tl.load(base + tokens[:, None] * (x_t * UNIT) + columns[None, :], mask=mask, other=0.0)


@triton.jit
def state_tile(base, rows, columns, NUM_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr, TURNED: tl.constexpr):
    """Places and mask of a block [rows, columns] of a matrix stored by rows, or TURNED by columns."""
    mask = exist(rows, NUM_ROWS)[:, None] & exist(columns, NUM_COLUMNS)[None, :]
    if TURNED:
        return base + columns[None, :] * NUM_ROWS + rows[:, None], mask
    else:
        return base + rows[:, None] * NUM_COLUMNS + columns[None, :], mask


@triton.jit
def store_wide(x_ptr, rest_ptr, place, x, mask):
    """fp32 numbers in 24 bits: rounded to bf16 in x, an operand as it is, and 8 bits more in `rest`, signed.

    Rounding must not carry out of a NaN, of which a GPU's has all bits set. Without `rest`, in x's dtype.
    """
    if rest_ptr is None:
        tl.store(x_ptr + place, x.to(x_ptr.dtype.element_ty), mask=mask)
    else:
        bits = tl.where(x == x, x.to(tl.uint32, bitcast=True) + 128, 0x7FC00000)
        upper = ((bits + 0x8000) >> 16).to(tl.uint16)
        tl.store(x_ptr + place, upper.to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(rest_ptr + place, (bits >> 8).to(tl.uint8).to(tl.int8, bitcast=True), mask=mask)


@triton.jit
def widened(x, rest_ptr, place, mask):
    """What `store_wide` stored, of which x has been loaded, in fp32; 0 where masked."""
    if rest_ptr is None:
        return x.to(tl.float32)
    else:
        rest = tl.load(rest_ptr + place, mask=mask, other=0).to(tl.int32)
        upper = x.to(tl.int16, bitcast=True).to(tl.int32)
        return ((upper << 16) + (rest << 8)).to(tl.float32, bitcast=True)


@triton.jit
def squares(x):
    """sum(x x) of each row, in fp32."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def rstd_of(total):
    """1 / norm of rows from the sums of their squares."""
    return tl.rsqrt(total + 1e-6)


@triton.jit
def solved(A_inv, r, PRECISION: tl.constexpr, FINE: tl.constexpr):
    """A_inv r from A_inv - 1 as `prepare` leaves it: the diagonal takes r unrounded.

    FINE: elsewhere r, whose terms cancel where keys are alike, is taken in two parts.
    """
    return dot_in_parts(A_inv, r, r, PRECISION, FINE)


@triton.constexpr_function
def operand_of(x_ptr, REFINE):
    """What products through the state are made of: REFINE gives 16-bit inputs fp32, one tf32 product each.

    Worth its price where K is small. A state of 32 x V that holds thousands of tokens is written and read
    with errors that add up: 5.4e-3 at the end in bf16 where 5e-3 is allowed, and with identical keys 5.2e-2
    of 3e-2, from r = beta (v - k S), whose terms cancel, and from A_inv.
    """
    return tl.float32 if REFINE else x_ptr.dtype.element_ty
