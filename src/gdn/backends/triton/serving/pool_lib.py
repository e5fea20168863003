"""Load and store tiles of the states of a pool: of floats, or of int16 with an fp32 scale per column of V.

A program has all K elements of its columns in registers, so the largest one of a column is a maximum over
registers and a few shuffles, and only the scales are read and written beside the state. Integers become fp32
by one conversion each. Adding 1.5 * 2^23 rounds to integers, which are the low bits of the sum: a conversion
back would be another instruction of a quarter of the throughput.
"""

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.serving.recurrent_lib import LARGEST, tile_pointers

LEVELS = tl.constexpr(32767.0)
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
def store_state(S, pool, tile, slot, entry, UNIT: tl.constexpr, AXIS: tl.constexpr):
    """Store a state tile in the pool; for int16, also the scales of its columns."""
    target = pool.ptr + (slot * pool.slot_stride + entry * pool.entry_stride) * UNIT
    place = tile_pointers(target, tile.ks, tile.vs, pool.key_stride, pool.column_stride, UNIT, AXIS)
    if pool.scale_ptr is None:
        tl.store(place, S.to(pool.ptr.dtype.element_ty), mask=tile.in_state)
    else:
        n, column_scale = scale_columns(S)
        # the low 16 bits of 1.5 * 2^23 + n are n
        tl.store(place, n.to(tl.int32, bitcast=True).to(tl.int16), mask=tile.in_state)
        tl.store(scale_pointers(pool, tile, slot, entry), column_scale, mask=tile.has_value)


@jit
def round_columns(S):
    """Return the integers in fp32, and the scales of their columns, that are read after S has been stored."""
    n, column_scale = scale_columns(S)
    return n - MAGIC, column_scale


@jit
def scale_columns(S):
    """Return S / scale rounded to integers, plus MAGIC, and the scales [A, B] of a state tile.

    Where a step makes NaN or infinity, d is one, and its outer product reaches all keys of the column: no
    NaN is alone beside finite elements, whose maximum would drop it.
    """
    inverse, scale = rounding_of(tl.max(tl.max(tl.abs(S), 1), 2), LEVELS)
    # the sum rounds S / scale to the nearest integer, ties to even; |n| is at most 32767, without a clamp
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
def scale_pointers(pool, tile, slot, entry):
    """Return pointers [A, B] to the scales of a tile's columns."""
    place = slot * pool.scale_slot + entry * pool.scale_entry
    return pool.scale_ptr + place + tile.vs.to(tl.int64) * pool.scale_column
