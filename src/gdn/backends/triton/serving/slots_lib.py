"""Find the slots of rows, and prefetch states of a pool into L2."""

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.launch.pdl import ON_GPU


@jit
def load_slot(row, N, slots, PAST_L1: tl.constexpr = False):
    """Return the slot that a row reads, -1 if the row has none, and the entry of its ring.

    PAST_L1: keep what is read out of L1, for a read before the previous kernel has ended.
    """
    CACHE: tl.constexpr = ".cg" if PAST_L1 else ""
    slot = row  # without an index, row n has slot n
    if slots.read_index_ptr is not None:
        at = slots.read_index_ptr + row * slots.row_stride
        if slots.num_accepted_ptr is not None:
            accepted_at = slots.num_accepted_ptr + row * slots.accepted_stride
            accepted = tl.load(accepted_at, mask=row < N, other=1, cache_modifier=CACHE)
            accepted = tl.minimum(tl.maximum(accepted.to(tl.int64), 1), slots.columns)
            at += (accepted - 1) * slots.column_stride
        slot = tl.load(at, mask=row < N, other=-1, cache_modifier=CACHE).to(tl.int64)
    entry = tl.full([], 0, tl.int64)
    if slots.ring_pos_ptr is not None:  # a ring: the entry is taken modulo its length
        ring_at = slots.ring_pos_ptr + row * slots.ring_stride
        ring_pos = tl.load(ring_at, mask=row < N, other=0, cache_modifier=CACHE)
        entry = (ring_pos % slots.entries).to(tl.int64)
        entry = tl.where(entry < 0, entry + slots.entries, entry)
    return slot, entry


@jit
def prefetch_columns(ptr, columns, v, COLUMNS: tl.constexpr, LINES: tl.constexpr, UNIT: tl.constexpr):
    """Prefetch V-first columns of a state into L2; they are `v` UNITs apart and LINES * 128 bytes long."""
    lines = tl.arange(0, LINES) * (128 * 8 // ptr.dtype.element_ty.primitive_bitwidth)
    pointers = ptr + ((columns + tl.arange(0, COLUMNS)).to(tl.int64) * (v * UNIT))[:, None] + lines[None, :]
    if ON_GPU:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def prefetch_state(pool, slots, row, N, head, column, C: tl.constexpr, PAST_L1: tl.constexpr = False):
    """Prefetch C.COLUMNS columns of the state that a row reads into L2. C: COLUMNS, LINES, STATE_UNIT."""
    slot, entry = load_slot(row, N, slots, PAST_L1)
    if (slot >= pool.lowest) & (slot < pool.slots):
        at = slot * pool.slot_stride + entry * pool.entry_stride + head * pool.head_stride
        ptr = pool.ptr + at * C.STATE_UNIT
        prefetch_columns(ptr, column, pool.column_stride, C.COLUMNS, C.LINES, C.STATE_UNIT)
