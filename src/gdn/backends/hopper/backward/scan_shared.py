"""Define what the partitions of the reverse state scan share: structs and work items.

A work item is a sequence (or a segment of one, see `segments`, or its chunks in a pass, see `slabs`) and a
value head (or half of its values), longest sequences first. CTA b takes items b, b + grid, ..., so that
partitions know them without a scheduler.
"""

from typing import Any

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import jit, struct
from gdn.backends.hopper.scan.scheduler import (
    FIRST_CHUNK,
    FIRST_TOKEN,
    ITEM_FIELDS,
    LENGTH,
    ROW,
    START_FROM,
    STORE_TO,
    STRIP,
)
from gdn.backends.triton.chunks import SEQUENCE

# int32 fields of a work item of a pass in HBM: those of a segment's and the slot of the first chunk's dS.
# FIRST_TOKEN counts over all rows, which takes a register less; START_FROM -1 - n: boundary state n;
# STORE_TO -2 - n: also, for the next pass
SLOT, SLAB_FIELDS = gl.constexpr(6), gl.constexpr(8)


@struct
class ScanInputs:
    """Hold the TMA descriptors of what the scan loads."""

    q: Any
    k: Any
    do: Any
    A_inv: Any
    factors: Any


@struct
class ScanOutputs:
    """Hold the TMA descriptors and pointers of the states and values that enter and leave the scan."""

    dS_d: Any  # or None, as dv_d and dv_ptr: only what leaves the first chunk is stored
    dv_d: Any
    dv_ptr: Any
    dfinal_ptr: Any  # or None: zero
    dinitial_ptr: Any  # or None: not stored
    boundary_ptr: Any  # dS between two passes, values first in fp32, or None


@struct
class ScanTiles:
    """Hold the shared memory of a CTA: stages of chunks, and a buffer for each TMA store."""

    q: Any
    k: Any
    do: Any  # of each consumer
    A_inv: Any  # at K = 64 in fp32 or split bf16, which the score warpgroup splits in its place
    boxes: Any  # factors, as one TMA load writes them
    factors: Any  # the same, row by row
    P: Any  # hi and lo
    dS: Any  # of each consumer; later in a chunk the first rows hold dv. None: neither is stored


@struct
class ScanTurns:
    """Hold the mbarriers of the stages."""

    full: Any
    empty: Any
    P_full: Any
    P_empty: Any


@struct
class Sequences:
    """Hold the numbers of a problem that a partition needs."""

    table_ptr: Any
    items_ptr: Any  # the work items of segments, or None
    slab_ptr: Any  # how many work items the pass has, and these, or None
    T: Any
    HV: Any
    ratio: Any
    chunks_per_row: Any
    bound: Any
    items: Any


@struct
class Scan:
    """Hold everything that a partition of the reverse state scan gets."""

    inputs: ScanInputs
    out: ScanOutputs
    tiles: ScanTiles
    turns: ScanTurns
    sequences: Sequences
    V_FIRST: Any
    CONSUMERS: Any  # consumer warpgroups of a CTA
    D: Any


@struct
class Item:
    """Hold a work item: its states, where its tokens and chunks lie, its head and first strip of values."""

    start: Any  # the state that dS starts from, counted without heads; below 0: none, or a boundary state
    goal: Any  # the state that dS is stored to; -1: none, below: a boundary state
    row: Any
    first: Any
    length: Any
    chunk: Any
    slot: Any  # of the first chunk's dS in HBM: the chunk itself, but in a pass
    head: Any
    strip: Any


@jit
def item_of(number, w):
    """Return a work item."""
    # with one consumer a CTA, two consecutive numbers are the two halves of a head's values
    PIECES: gl.constexpr = w.D // STRIP // w.CONSUMERS
    x = w.sequences
    pair = number // PIECES  # sequence (or segment) and head
    strip = number % PIECES
    n = pair // x.HV
    head = pair % x.HV
    if x.slab_ptr is not None:
        # `plan_slabs` has written them to HBM
        fields = x.slab_ptr + (1 + n) * SLAB_FIELDS
        start, goal = gl.load(fields + START_FROM), gl.load(fields + STORE_TO)
        first, slot = gl.load(fields + FIRST_TOKEN), gl.load(fields + SLOT)
        length, chunk = gl.load(fields + LENGTH), gl.load(fields + FIRST_CHUNK)
        return Item(start, goal, n * 0, first, length, chunk, slot, head, strip)
    elif x.items_ptr is not None:
        # `plan_reverse_segments` has written them to HBM
        fields = x.items_ptr + pair * ITEM_FIELDS
        start, goal = gl.load(fields + START_FROM), gl.load(fields + STORE_TO)
        row, first = gl.load(fields + ROW), gl.load(fields + FIRST_TOKEN)
        length, chunk = gl.load(fields + LENGTH), gl.load(fields + FIRST_CHUNK)
        return Item(start, goal, row, first, length, chunk, chunk, head, strip)
    elif x.table_ptr is None:
        chunk = n * x.chunks_per_row
        return Item(n, n, n, n * 0, x.T + n * 0, chunk, chunk, head, strip)
    else:
        numbers = x.table_ptr + 2 * x.bound + SEQUENCE * n
        sequence = gl.load(numbers + 1)
        first, length, chunk = gl.load(numbers + 2), gl.load(numbers + 3), gl.load(numbers + 4)
        return Item(sequence, sequence, n * 0, first, length, chunk, chunk, head, strip)


@jit
def split_rows(item, x):
    """Return a work item with its row and the first token in it, as TMA needs them."""
    row = item.first // x.T
    first = item.first - row * x.T
    return Item(item.start, item.goal, row, first, item.length, item.chunk, item.slot, item.head, item.strip)


@jit
def is_map(item):
    """Return True if an item of the transfer is a segment's M: its goal is odd (or -1)."""
    return (item.goal & 1) == 1


@jit
def chunks_in(item):
    """Return how many chunks an item has."""
    return gl.cdiv(item.length, C)
