"""Define what the partitions of the reverse state scan share: structs and work items.

A work item is a sequence and a value head (or half of its values), longest sequences first. CTA b takes items
b, b + grid, ..., so every partition knows them without a scheduler.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import struct
from gdn.backends.hopper.scan.scheduler import STRIP
from gdn.backends.triton.chunks import SEQUENCE


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

    dS_d: Any
    dv_d: Any
    dv_ptr: Any
    dfinal_ptr: Any  # or None: zero
    dinitial_ptr: Any  # or None: not stored


@struct
class ScanTiles:
    """Hold the shared memory of a CTA: stages of chunks, and a buffer for each TMA store."""

    q: Any
    k: Any
    do: Any  # of each consumer
    A_inv: Any
    boxes: Any  # factors, as one TMA load writes them
    factors: Any  # the same, row by row
    P: Any  # hi and lo
    dS: Any
    dv: Any


@struct
class ScanTurns:
    """Hold the mbarriers of the stages."""

    full: Any
    empty: Any
    P_full: Any


@struct
class Sequences:
    """Hold the numbers of a problem that a partition needs."""

    table_ptr: Any
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
    """Hold a work item: its sequence, where its tokens and chunks lie, its head and first strip of values."""

    n: Any
    row: Any
    first: Any
    length: Any
    chunk: Any
    head: Any
    strip: Any


@gluon.jit
def item_of(number, w):
    """Return a work item."""
    # with one consumer a CTA, two consecutive numbers are the two halves of a head's values
    PIECES: gl.constexpr = w.D // STRIP // w.CONSUMERS
    x = w.sequences
    pair = number // PIECES  # sequence and head
    strip = number % PIECES
    n = pair // x.HV
    head = pair % x.HV
    if x.table_ptr is None:
        return Item(n, n, n * 0, x.T + n * 0, n * x.chunks_per_row, head, strip)
    else:
        numbers = x.table_ptr + 2 * x.bound + SEQUENCE * n
        first = gl.load(numbers + 2)
        return Item(
            gl.load(numbers + 1), n * 0, first, gl.load(numbers + 3), gl.load(numbers + 4), head, strip
        )


@gluon.jit
def chunks_in(item):
    """Return how many chunks an item has."""
    return gl.cdiv(item.length, C)
