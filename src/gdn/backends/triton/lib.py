"""Provide what kernels share: MMAs, split bf16, gates, norms, tiles."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdn.backends.triton.launch import jit


class TokenRange(NamedTuple):
    """Say which tokens a chunk has: its row of the batch, the first token in it, and how many."""

    row: Any
    first: Any
    length: Any


class Rows(NamedTuple):
    """Hold a tensor [B, T, heads, .]: its pointer, None if absent, and its strides of row, token and head."""

    ptr: Any
    b: Any
    t: Any
    h: Any


@jit
def dot(a, b, acc=None, PRECISION: tl.constexpr = "tf32"):
    """Return a b + acc in fp32 by MMA. PRECISION applies to fp32 operands: tf32, tf32x3 or ieee."""
    # tensor cores accumulate in fp32, in registers
    return tl.dot(a, b, acc, input_precision=PRECISION)


@jit
def truncate(x, dtype: tl.constexpr):
    """Truncate fp32 x to the precision of a 16-bit dtype, and keep it in fp32.

    To bf16 it is a mask of bits: ptxas would convert a rounded value back to fp32 with F2F, eight cycles per
    scheduler. Truncation is biased, so only use it together with the remainder (`split_bf16`).
    """
    if dtype == tl.bfloat16:
        return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return x.to(dtype).to(tl.float32)


@jit
def split_bf16(x, dtype: tl.constexpr):
    """Split fp32 x into two operands of a 16-bit dtype, hi + lo: x truncated, and the remainder."""
    high = truncate(x, dtype)
    return high.to(dtype), (x - high).to(dtype)


@jit
def rounding_rest(x, dtype: tl.constexpr):
    """Return in a 16-bit dtype what rounding fp32 x to it drops."""
    return (x - x.to(dtype).to(tl.float32)).to(dtype)


@jit
def round_tf32(x):
    """Return fp32 x with the 11 bits of tf32, so that a tensor core truncates nothing; without bias.

    The product adds half of the last kept bit on average. Adding half to the bits would carry out of a NaN.
    """
    x *= 1.0 + 1.44 / 4096
    return (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)


@jit
def dot_split(a, x, acc, PRECISION: tl.constexpr, SPLIT: tl.constexpr):
    """Return a x + acc with x in fp32. SPLIT: x is split into hi + lo of a's 16-bit dtype, two MMAs."""
    if SPLIT:
        high = truncate(x, a.dtype)
        # two MMAs keep x to 2^-16; one tf32 MMA would keep 2^-11, and would need a in fp32
        acc = dot(a, high.to(a.dtype), acc, PRECISION)
        return dot(a, (x - high).to(a.dtype), acc, PRECISION)
    else:
        return dot(a, x.to(a.dtype), acc, PRECISION)


@jit
def dot_split_left(x, b, acc, PRECISION: tl.constexpr, SPLIT: tl.constexpr):
    """Return x b + acc as `dot_split`, with x on the left: hi and lo stay in registers."""
    if SPLIT:
        high, low = split_bf16(x, b.dtype)
        return dot(low, b, dot(high, b, acc, PRECISION), PRECISION)
    else:
        return dot(x.to(b.dtype), b, acc, PRECISION)


@jit
def softplus(x):
    """Return log(1 + e^x); right for very negative x, where 1 + e^x rounds to 1."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@jit
def log1p(x):
    """Return log(1 + x) for x in 0 .. 1, corrected for the rounding of 1 + x."""
    # u - 1 is what 1 + x kept of x; the quotient of x and it corrects the logarithm
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@jit
def sigmoid(x):
    """Return 1 / (1 + e^-x), without overflow."""
    # e is at most 1, so nothing overflows
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@jit
def activate_beta(x, SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr):
    """Return beta from the caller's value: itself, its sigmoid, or twice that."""
    x = x.to(tl.float32)
    if SIGMOID:
        x = sigmoid(x)
        if NEGATIVE:
            x = 2.0 * x
    return x


@jit
def split_fp64(x):
    """Split an fp64 value into two fp32 values, hi + lo, which keep some 48 bits."""
    # fp64 exponentials are slow on a GPU: later differences and exponentials are fp32
    high = x.to(tl.float32)
    return high, (x - high.to(tl.float64)).to(tl.float32)


@jit
def load_sums(G_ptr, row, first, length, head, T, HV, C: tl.constexpr):
    """Load G of a chunk's tokens as (hi, lo), and that of its last token; 0 past the chunk's end."""
    tokens = tl.arange(0, C)
    base = G_ptr + (row.to(tl.int64) * T + first) * HV + head
    # 8 bytes per token, strided by HV: the heads of a token share sectors in L2
    G = tl.load(base + tokens * HV, mask=tokens < length, other=0.0)
    high, low = split_fp64(G)
    end_high, end_low = split_fp64(tl.load(base + (length - 1) * HV))
    return high, low, end_high, end_low


@jit
def decay(from_high, from_low, to_high, to_low):
    """Return e^(to - from) of sums split into hi + lo; the caller masks entries with from < to."""
    # subtracting hi from hi is exact for close sums; lo then restores the bits below fp32
    return tl.exp(tl.minimum((to_high - from_high) + (to_low - from_low), 0.0))


@jit
def column_mask(columns, D: tl.constexpr):
    """Return a mask of columns below D; a constant True if all are, so that loads need no predicate."""
    if (columns.shape[0] + D) % columns.shape[0] == 0:
        return tl.full(columns.shape, True, tl.int1)
    else:
        return columns < D


@jit
def load_beta(
    beta, token_range, head, C: tl.constexpr, SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr
):  # fmt: skip
    """Load beta of a chunk's tokens; 0 past its end."""
    tokens = tl.arange(0, C)
    if beta.ptr is None:
        return tl.where(tokens < token_range.length, 1.0, 0.0)
    else:
        base = (
            beta.ptr
            + token_range.row.to(tl.int64) * beta.b
            + token_range.first.to(tl.int64) * beta.t
            + head * beta.h
        )
        x = tl.load(base + tokens * beta.t, mask=tokens < token_range.length, other=0.0)
        return tl.where(tokens < token_range.length, activate_beta(x, SIGMOID, NEGATIVE), 0.0)


@jit
def load_rstd(rstd_ptr, row, first, length, head, T, H, C: tl.constexpr):
    """Load the inverse norms of a chunk's keys or queries; 0 past its end, ones without normalisation."""
    tokens = tl.arange(0, C)
    if rstd_ptr is None:
        return tl.where(tokens < length, 1.0, 0.0)
    else:
        base = rstd_ptr + (row.to(tl.int64) * T + first) * H + head
        return tl.load(base + tokens * H, mask=tokens < length, other=0.0)


@jit
def load_rows(x, token_range, head, columns, D: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr):
    """Load a chunk's rows of x [C, len(columns)]; zeros past its end and past column D."""
    tokens = tl.arange(0, C)
    base = (
        x.ptr
        + (token_range.row.to(tl.int64) * x.b + token_range.first.to(tl.int64) * x.t + head * x.h) * UNIT
    )
    mask = (tokens < token_range.length)[:, None] & column_mask(columns, D)[None, :]
    # x.t * UNIT: a constant factor of the stride lets Triton emit 16-byte loads
    return tl.load(base + tokens[:, None] * (x.t * UNIT) + columns[None, :], mask=mask, other=0.0)


@jit
def state_pointers(
    base, rows, columns, NUM_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Return pointers, mask of a block of a matrix stored by rows, or by columns (TRANSPOSED)."""
    mask = column_mask(rows, NUM_ROWS)[:, None] & column_mask(columns, NUM_COLUMNS)[None, :]
    if TRANSPOSED:
        return base + columns[None, :] * NUM_ROWS + rows[:, None], mask
    else:
        return base + rows[:, None] * NUM_COLUMNS + columns[None, :], mask


@jit
def locate_strip(HV, V: tl.constexpr, BV: tl.constexpr):
    """Return sequence, value head and strip of BV value columns of this program; strips vary fastest."""
    strips = tl.cdiv(V, BV)
    strip = tl.program_id(0) % strips
    head = (tl.program_id(0) // strips) % HV
    n = tl.program_id(0) // (strips * HV)
    return n, head, strip


@jit
def load_state(state_ptr, place, mask):
    """Load a block of a state in fp32, in registers; zeros where there is no tensor."""
    if state_ptr is None:
        S = tl.zeros(mask.shape, tl.float32)
    else:
        S = tl.load(state_ptr + place, mask=mask, other=0.0).to(tl.float32)
    return S


@jit
def store_wide(x_ptr, rest_ptr, place, x, mask):
    """Store fp32 values in 24 bits: bf16 in x, ready as an MMA operand, and 8 more bits in `rest`, signed.

    Rounding must not carry out of a NaN, which has all bits set on a GPU. Without `rest`, store x's dtype.
    """
    if rest_ptr is None:
        tl.store(x_ptr + place, x.to(x_ptr.dtype.element_ty), mask=mask)
    else:
        bits = tl.where(x == x, x.to(tl.uint32, bitcast=True) + 128, 0x7FC00000)
        # rounded at bit 16, so that `rest` is a signed difference
        upper = ((bits + 0x8000) >> 16).to(tl.uint16)
        tl.store(x_ptr + place, upper.to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(rest_ptr + place, (bits >> 8).to(tl.uint8).to(tl.int8, bitcast=True), mask=mask)


@jit
def load_wide(x, rest_ptr, place, mask):
    """Return in fp32 what `store_wide` stored, given the loaded x; 0 where masked."""
    if rest_ptr is None:
        return x.to(tl.float32)
    else:
        rest = tl.load(rest_ptr + place, mask=mask, other=0).to(tl.int32)
        upper = x.to(tl.int16, bitcast=True).to(tl.int32)
        return ((upper << 16) + (rest << 8)).to(tl.float32, bitcast=True)


@jit
def sum_squares(x):
    """Return sum(x x) of each row, in fp32."""
    # products of bf16 are exact in fp32
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@jit
def inverse_norm(total):
    """Return the inverse norms of rows from the sums of their squares."""
    # one instruction (MUFU) per row, instead of a square root and a division
    return tl.rsqrt(total + 1e-6)


@jit
def apply_inverse(A_inv, r, PRECISION: tl.constexpr, SPLIT: tl.constexpr):
    """Return A_inv r from A_inv - 1 as `prepare` stores it; the unit diagonal takes r unrounded.

    SPLIT: r is split into hi + lo for the other entries, because its terms cancel where keys are alike.
    """
    # r is also the accumulator of the MMA: the unit diagonal costs no registers
    return dot_split(A_inv, r, r, PRECISION, SPLIT)


@triton.constexpr_function
def operand_dtype(x_ptr, FP32_STATE):
    """Return the dtype of MMA operands that read the state; FP32_STATE: fp32 for 16-bit inputs, in tf32 MMAs.

    It is worth its time where K is small. A state of 32 x V that holds thousands of tokens is written and
    read with errors that add up: 5.4e-3 at the end in bf16 where 5e-3 is allowed. With identical keys the
    error is 5.2e-2 where 3e-2 is allowed, from r = beta (v - k S), whose terms cancel, and from A_inv.
    """
    return tl.float32 if FP32_STATE else x_ptr.dtype.element_ty
