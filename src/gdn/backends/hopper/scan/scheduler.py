"""Schedule work items: where the tokens of an item are, and how the producer warp publishes it.

A work item is a sequence (or a segment of one) and a value head. A CTA takes items until none is left.
"""

from typing import Any

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.gluon import fence_async_shared, jit, mbarrier, struct
from gdn.backends.triton.chunks import SEQUENCE

STRIP = gl.constexpr(64)  # value rows of S^T of a consumer warpgroup
SLOTS = gl.constexpr(2)  # slots in shared memory for published work items

# int32 fields of a segment's work item in HBM: row, first token in it, tokens, first chunk, index of the
# state to store and of the state to start from (below 0: none)
ROW, FIRST_TOKEN, LENGTH, FIRST_CHUNK, STORE_TO, START_FROM = (gl.constexpr(i) for i in range(6))
ITEM_FIELDS = gl.constexpr(6)

# registers: one element of shared memory, in every lane of one warp, or of a warpgroup
ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
ONE_WARPGROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@jit
def stage_and_phase(i, barriers):
    """Return the pipeline stage (or slot) that i uses, and the mbarrier phase to wait for."""
    COUNT: gl.constexpr = barriers.shape[0]
    return i % COUNT, (i // COUNT) & 1


@struct
class Geometry:
    """Hold where sequences and their chunks are."""

    cu_seqlens_ptr: Any  # offsets of packed sequences, or None
    table_ptr: Any  # of packed sequences, or the work items of segments, or None
    T: Any
    HV: Any
    ratio: Any  # value heads of a key head
    chunks_per_row: Any
    bound: Any  # entries of chunks in the table, before those of sequences
    num_items: Any

    @jit
    def locate(self, item):
        """Return row, first token in it, length and first chunk of a work item: see `triton.chunks`."""
        n = item // self.HV
        if self.table_ptr is None:
            return n, n * 0, self.T, n * self.chunks_per_row
        elif self.cu_seqlens_ptr is None:
            # the work items of segments, which `plan_segments` writes to HBM
            fields = self.table_ptr + item * ITEM_FIELDS
            row, first = gl.load(fields + ROW), gl.load(fields + FIRST_TOKEN)
            return row, first, gl.load(fields + LENGTH), gl.load(fields + FIRST_CHUNK)
        else:
            first = gl.load(self.cu_seqlens_ptr + n).to(gl.int32)
            length = gl.load(self.cu_seqlens_ptr + n + 1).to(gl.int32) - first
            return n * 0, first, length, gl.load(self.table_ptr + 2 * self.bound + SEQUENCE * n)

    @jit
    def is_map(self, item):
        """Return True if an item of `segment_transfer` is a segment's M: its state index is odd (or -1)."""
        return (gl.load(self.table_ptr + item * ITEM_FIELDS + STORE_TO) & 1) == 1


@struct
class Queue:
    """Hold the published work items in shared memory, the mbarriers of the slots, the counter in HBM."""

    items: Any
    full: Any  # 1 arrival, by the producer
    empty: Any  # 1 arrival by each reader: the score warpgroup and the consumers
    next_ptr: Any  # the tile scheduler: items that were taken, beyond the first of each CTA

    @jit
    def publish_work(self, item, turn):
        """Write the turn-th work item of the CTA to shared memory; `read_work` reads it."""
        slot, phase = stage_and_phase(turn, self.full)
        # all partitions have read what this slot of shared memory held two turns before
        mbarrier.wait(self.empty.index(slot), phase ^ 1)
        self.items.index(slot).store(gl.full((1,), item, gl.int32, ONE_WARP))
        fence_async_shared()
        mbarrier.arrive(self.full.index(slot), count=1)

    @jit
    def read_work(self, turn):
        """Wait for the turn-th work item of the CTA and return it."""
        slot, phase = stage_and_phase(turn, self.full)
        mbarrier.wait(self.full.index(slot), phase)
        # a maximum over one element: every lane gets it as a scalar register
        item = gl.max(self.items.index(slot).load(ONE_WARPGROUP), 0)
        fence_async_shared()
        # the producer may overwrite the slot
        mbarrier.arrive(self.empty.index(slot), count=1)
        return item


@jit
def next_work(turn, queue):
    """Return the turn-th number that this CTA scans; without a queue it has only its first."""
    if queue is None:
        return gl.program_id(0) + turn * gl.num_programs(0)
    else:
        return queue.read_work(turn)


@jit
def split_work(number, WG: gl.constexpr, config):
    """Return the work item of a scheduled number, and which 64 value rows of it consumer WG holds."""
    # with one consumer a CTA and V = 128, two consecutive numbers are the two halves of one work item
    PIECES: gl.constexpr = config.D // STRIP // config.CONSUMERS
    return number // PIECES, number % PIECES + WG
