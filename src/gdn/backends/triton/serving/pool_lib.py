"""Load and store tiles of the states of a pool: of floats, or of integers with an fp32 scale per column of V.

A program has all K elements of its columns in registers, so the largest one of a column is a maximum over
registers and a few shuffles, and only the scales are read and written beside the state. Integers become fp32
by one conversion each. Adding 1.5 * 2^23 rounds to integers, which are the low bits of the sum: a conversion
back would be another instruction of a quarter of the throughput.
"""

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.serving.recurrent_lib import LARGEST, tile_pointers

LEVELS = tl.constexpr(32767.0)  # of int16
SHORT_LEVELS = tl.constexpr(127.0)  # of int8
STEPS = tl.constexpr(15.0)  # of a remainder of 4 bits to one of its int8
SMALLEST = tl.constexpr(2.0**-100)  # of a column that is not stored as zeros
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23, where the distance of fp32 numbers is 1


@jit
def load_state(pool, tile, slot, entry, UNIT: tl.constexpr, AXIS: tl.constexpr):
    """Load a state tile [A, J, B, W] as it is stored."""
    source = pool.ptr + (slot * pool.slot_stride + entry * pool.entry_stride) * UNIT
    place = tile_pointers(source, tile.ks, tile.vs, pool.key_stride, pool.column_stride, UNIT, AXIS)
    return tl.load(place, mask=tile.in_state, other=0.0)


@jit
def load_scales(pool, tile, slot, entry):
    """Load the scales [A, B] of a tile's columns."""
    return tl.load(scale_pointers(pool, tile, slot, entry), mask=tile.has_value, other=0.0)


@jit
def scaled_state(S, column_scale):
    """Return the state itself, of a tile and the scales of its columns."""
    if column_scale is None:
        return S
    else:
        return S * column_scale[:, None, :, None]


@jit
def store_state(S, pool, tile, slot, entry, UNIT: tl.constexpr, AXIS: tl.constexpr, low=None):
    """Store a state tile in the pool; for integers, also the scales of its columns.

    low: the Remainders of int8, or None.
    """
    target = pool.ptr + (slot * pool.slot_stride + entry * pool.entry_stride) * UNIT
    place = tile_pointers(target, tile.ks, tile.vs, pool.key_stride, pool.column_stride, UNIT, AXIS)
    if pool.scale_ptr is None:
        tl.store(place, S.to(pool.ptr.dtype.element_ty), mask=tile.in_state)
    else:
        IS_SHORT: tl.constexpr = pool.ptr.dtype.element_ty == tl.int8
        INT8: tl.constexpr = SHORT_LEVELS if low is None else SHORT_LEVELS * STEPS
        n, column_scale = scale_columns(S, INT8 if IS_SHORT else LEVELS)
        if low is not None:
            n = store_remainders(n, low, tile, slot, entry)
        # the low bits of 1.5 * 2^23 + n are n
        tl.store(place, n.to(tl.int32, bitcast=True).to(pool.ptr.dtype.element_ty), mask=tile.in_state)
        tl.store(scale_pointers(pool, tile, slot, entry), column_scale, mask=tile.has_value)


@jit
def round_columns(S):
    """Return the integers in fp32, and the scales of their columns, that are read after S has been stored."""
    n, column_scale = scale_columns(S, LEVELS)
    return n - MAGIC, column_scale


@jit
def scale_columns(S, LARGEST_INTEGER: tl.constexpr):
    """Return S / scale rounded to integers, plus MAGIC, and the scales [A, B] of a state tile.

    Where a step makes NaN or infinity, d is one, and its outer product reaches all keys of the column: no
    NaN is alone beside finite elements, whose maximum would drop it.
    """
    inverse, scale = rounding_of(tl.max(tl.max(tl.abs(S), 1), 2), LARGEST_INTEGER)
    # the sum rounds S / scale to the nearest integer, ties to even; none is past the largest, without a clamp
    return tl.fma(S, inverse[:, None, :, None], MAGIC), scale


@jit
def rounding_of(largest, LEVELS: tl.constexpr):
    """Return the factor that makes columns integers up to LEVELS, and the scales, of largest elements."""
    # in fp64 the quotient is rounded correctly, with three instructions: a state that was read gets the scale
    # that it had
    scale = (largest.to(tl.float64) * (1.0 / LEVELS)).to(tl.float32)
    is_zero = largest < SMALLEST
    inverse = tl.where(is_zero, 0.0, LEVELS / largest)
    return inverse, tl.where(is_zero, 0.0, tl.where(largest <= LARGEST, scale, float("nan")))


@jit
def load_remainders(low, tile, slot, entry):
    """Load the remainders of a tile's keys in fp32: each byte is loaded for both of its keys."""
    source = low.ptr + slot * low.slot_stride + entry * low.entry_stride
    at_column = tile.vs[:, None, :, None].to(tl.int64) * low.column_stride
    place = source + at_column + (tile.ks // 2).to(tl.int64) * low.pair_stride
    packed = tl.load(place, mask=tile.in_state, other=0).to(tl.int32)
    half = (packed >> (tile.ks % 2 * 4)) & 15
    return ((half ^ 8) - 8).to(tl.float32)


@jit
def store_remainders(n, low, tile, slot, entry):
    """Store the remainders of the integers n of a tile, plus MAGIC; return their int8 parts, plus MAGIC."""
    n -= MAGIC
    # STEPS is odd, so no quotient is halfway between two integers
    high = tl.fma(n, 1 / STEPS, MAGIC)
    rest = (n - (high - MAGIC) * STEPS + MAGIC).to(tl.int32, bitcast=True) & 15
    # keys are neighbours along W in a lane; a tile without W has them along J
    packed = sum_pairs(rest << (tile.ks % 2 * 4))
    pairs = sum_pairs(tile.ks // 2 * (1 - tile.ks % 2))
    has_pair = sum_pairs(tile.in_state.to(tl.int32)) > 0
    target = low.ptr + slot * low.slot_stride + entry * low.entry_stride
    at_column = tile.vs[:, None, :, None].to(tl.int64) * low.column_stride
    place = target + at_column + pairs.to(tl.int64) * low.pair_stride
    tl.store(place, packed.to(tl.uint8), mask=has_pair)
    return high


@jit
def sum_pairs(x):
    """Sum neighbouring keys of [A, J, B, W]: pairs along W, or along J where W is 1."""
    A: tl.constexpr = x.shape[0]
    J: tl.constexpr = x.shape[1]
    B: tl.constexpr = x.shape[2]
    W: tl.constexpr = x.shape[3]
    if W > 1:
        return tl.sum(tl.reshape(x, [A, J, B, W // 2, 2]), 4)
    elif J > 1:
        return tl.sum(tl.reshape(x, [A, J // 2, 2, B, W]), 2)
    else:
        return x


@jit
def scale_pointers(pool, tile, slot, entry):
    """Return pointers [A, B] to the scales of a tile's columns."""
    place = slot * pool.scale_slot + entry * pool.scale_entry
    return pool.scale_ptr + place + tile.vs.to(tl.int64) * pool.scale_column
