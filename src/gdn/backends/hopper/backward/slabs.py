"""Run the backward in passes over the chunks, so that dS of one pass fits L2 and its memory is used again.

    plan_slabs      once: the work items and the chunks of every pass
    reverse_scan    of a pass: dS and dv of its chunks, from the boundary states that the pass before stored
    gradients       of the same chunks, those first that were scanned last

A pass has `size` chunks. Chunks are ordered by groups of sequences (or segments), as many as fill the SMs; in
a group by their distance from the end of their sequence, then by sequence. So those of a group get shorter
together, a short sequence may lie in one pass, and the number of passes follows from the number of chunks, of
which the host has an upper bound. An empty sequence counts as one chunk: its gradient goes from dfinal to
dinitial.

dS has the bits that it has without passes: the order of the sums is the same, and boundary states are fp32.
Bytes per pass, sequence and value head at K = V = 128: 128 KB of boundary states. Between the store and the
load of dS at most 7.7 times the bytes of dS of a pass go through L2, all that both kernels read and write.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gdn.backends.hopper.backward.scan_shared import SLAB_FIELDS, SLOT
from gdn.backends.hopper.factors import C
from gdn.backends.hopper.scan.scheduler import (
    FIRST_CHUNK,
    FIRST_TOKEN,
    ITEM_FIELDS,
    LENGTH,
    ROW,
    START_FROM,
    STORE_TO,
)
from gdn.backends.triton.chunks import SEQUENCE
from gdn.backends.triton.launch import Launch, Step, TensorSpec, jit, kernel, tensor_spec
from gdn.problem import CHUNK, Problem

LANES = 128  # the most sequences of a group: a program loads them at once


@dataclass(frozen=True)
class Slabs:
    """Hold what passes need beyond the launches of a backward, and the specs of what is written."""

    # work items of each pass, chunks of each pass, boundary states
    specs: tuple[TensorSpec, ...]
    dS: TensorSpec  # of one pass
    plan: Launch

    def steps(
        self,
        scan: tuple[Launch, tuple[Any, ...], tuple[Any, ...]],
        gradients: tuple[Launch, tuple[Any, ...], tuple[Any, ...]],
        table: Tensor | None,
        items: Tensor | None,
        new: list[Tensor],
    ) -> Iterator[Step]:
        """Yield the launches in order.

        scan, gradients: a launch, its tensors before the table, and from dfinal or dq on.
        items: of the scan of segments, or None.
        """
        work, chunks, boundary = new
        yield self.plan, (table, items, work, chunks)
        for work_of_pass, chunks_of_pass in zip(work, chunks, strict=True):
            launch, first, last = scan
            yield launch, (*first, None, None, work_of_pass, boundary, *last)
            launch, first, last = gradients
            yield launch, (*first, None, chunks_of_pass, *last)


def plan_launches(p: Problem, size: int, group: int, segments: int | None, scalars: tuple[int, ...]) -> Slabs:
    """Plan the passes of a backward, of `size` chunks each.

    group: sequences, or segments, that are scanned at once; segments: how many, or None if there are none.
    scalars: T, HV, ratio, chunks_per_row, table entries.
    """
    T, HV, _, per_row, bound = scalars
    # packed lengths are only on the device: besides whole chunks, one of each sequence and of the tail
    most = p.N * per_row if p.cu_seqlens is None else T // CHUNK + p.N + 1
    passes = -(-most // size)
    count = p.N if segments is None else segments
    return Slabs(
        specs=(
            tensor_spec((passes, 1 + size, SLAB_FIELDS.value), torch.int32),
            tensor_spec((passes, size, 4), torch.int32),
            tensor_spec((count, HV, p.V, p.K), torch.float32),
        ),
        dS=tensor_spec((size, HV, p.K, p.V), torch.bfloat16),
        plan=Launch(
            plan_slabs_kernel,
            passes * count,
            (T, HV, count, per_row, bound, min(group, LANES), size, per_row.bit_length()),
            {"LANES": LANES},
            1,
        ),
    )


@jit
def load_sequences(n, mask, table_ptr, items_ptr, T, HV, chunks_per_row, bound):
    """Return the state to start from and to store, row, first token, length and first chunk of sequences n.

    They are the segments of work items, or packed sequences in order of length, or rows.
    """
    if items_ptr is not None:
        fields = items_ptr + n * HV * ITEM_FIELDS
        start = tl.load(fields + START_FROM, mask=mask, other=-1)
        goal = tl.load(fields + STORE_TO, mask=mask, other=-1)
        row = tl.load(fields + ROW, mask=mask, other=0)
        first = tl.load(fields + FIRST_TOKEN, mask=mask, other=0)
        length = tl.load(fields + LENGTH, mask=mask, other=0)
        chunk = tl.load(fields + FIRST_CHUNK, mask=mask, other=0)
    elif table_ptr is not None:
        numbers = table_ptr + 2 * bound + SEQUENCE * n
        start = tl.load(numbers + 1, mask=mask, other=-1)
        goal = start
        row = n * 0
        first = tl.load(numbers + 2, mask=mask, other=0)
        length = tl.load(numbers + 3, mask=mask, other=0)
        chunk = tl.load(numbers + 4, mask=mask, other=0)
    else:
        start = tl.where(mask, n, -1)
        goal = start
        row = n
        first = n * 0
        length = tl.where(mask, T, 0)
        chunk = n * chunks_per_row
    return start, goal, row, first, length, chunk


@jit
def count_slots(n, mask, table_ptr, items_ptr, T, HV, chunks_per_row, bound):
    """Return the chunks of sequences n; 1 for an empty one whose gradient is stored."""
    _, goal, _, _, length, _ = load_sequences(n, mask, table_ptr, items_ptr, T, HV, chunks_per_row, bound)
    return tl.maximum(tl.cdiv(length, C), (goal >= 0).to(tl.int32))


@jit
def count_before(slots, count, bits):
    """Return how many slots of each sequence are among the first `count` of their group; all have `bits`."""
    # the largest distance from the ends such that all chunks that are nearer are among the first `count`
    depth = 0
    for i in range(bits):
        deeper = depth + (1 << (bits - 1 - i))
        depth = tl.where(tl.sum(tl.minimum(slots, deeper)) <= count, deeper, depth)
    # what is left goes to the first sequences that have a chunk at this distance
    left = count - tl.sum(tl.minimum(slots, depth))
    has_more = (slots > depth).to(tl.int32)
    return tl.minimum(slots, depth) + has_more * (tl.cumsum(has_more, 0) <= left).to(tl.int32)


@jit
def pick_lane(x, lanes, lane):
    """Return one element of x as a scalar."""
    return tl.sum(tl.where(lanes == lane, x, 0))


@kernel
def plan_slabs_kernel(
    table_ptr, items_ptr, work_ptr, chunks_ptr, T, HV, sequences, chunks_per_row, bound, group, size, bits,
    LANES: tl.constexpr,
):  # fmt: skip
    """Write the work items of each pass after their number; first token, length, chunk, slot of its chunks.

    One program (CTA): one pass and one sequence or segment. Grid: passes x sequences.  Warps: 1.  No TMA, no
    mbarrier: it reads lengths from L2, and writes int32 fields to HBM.
    Items may be followed by empty ones, where a group ends within the pass.
    """
    index = tl.program_id(0) % sequences
    begin = tl.program_id(0) // sequences * size
    end = begin + size
    work_ptr += (tl.program_id(0) // sequences).to(tl.int64) * ((1 + size) * SLAB_FIELDS)
    chunks_ptr += (tl.program_id(0) // sequences).to(tl.int64) * (4 * size)
    lanes = tl.arange(0, LANES)
    head = index // group * group
    before = tl.zeros([LANES], tl.int32)
    for m in range(0, head, LANES):
        before += count_slots(m + lanes, m + lanes < head, table_ptr, items_ptr, T, HV, chunks_per_row, bound)
    base = tl.sum(before)
    mask = (lanes < group) & (head + lanes < sequences)
    slots = count_slots(head + lanes, mask, table_ptr, items_ptr, T, HV, chunks_per_row, bound)
    stop = base + tl.sum(slots)
    # most programs have a group that is in other passes: they search nothing
    is_here = (base < end) & (stop > begin)
    bits = tl.where(is_here, bits, 0)
    low = count_before(slots, begin - base, bits)
    counts = count_before(slots, end - base, bits) - low
    lane = index - head
    count = tl.where(is_here, pick_lane(counts, lanes, lane), 0)
    # earlier groups fill the slots of the pass that precede this group
    offset = tl.maximum(base - begin, 0)
    if count > 0:
        start, goal, row, first, length, chunk = load_sequences(
            index, True, table_ptr, items_ptr, T, HV, chunks_per_row, bound
        )
        is_before = lanes < lane
        place = offset + tl.sum(tl.where(is_before & (counts > 0), 1, 0))
        slot = offset + tl.sum(tl.where(is_before, counts, 0))
        skipped = pick_lane(low, lanes, lane)
        chunks = tl.cdiv(length, C)
        # max: an empty sequence has a slot, but no chunk
        first_chunk = tl.maximum(chunks - skipped - count, 0)
        last_token = tl.minimum(tl.maximum(chunks - skipped, 0) * C, length)
        is_done = skipped + count == pick_lane(slots, lanes, lane)
        item = work_ptr + (1 + place) * SLAB_FIELDS
        tl.store(item + FIRST_TOKEN, row * T + first + first_chunk * C)
        tl.store(item + LENGTH, last_token - first_chunk * C)
        tl.store(item + FIRST_CHUNK, chunk + first_chunk)
        tl.store(item + STORE_TO, tl.where(is_done, goal, -2 - index))
        tl.store(item + START_FROM, tl.where(skipped == 0, start, -1 - index))
        tl.store(item + SLOT, slot)
        for distance in range(skipped, skipped + count):
            # chunks of the group that are scanned before it; the gradient kernel begins with the last of the
            # pass, whose dS has been in L2 for the shortest time
            rank = base + tl.sum(tl.minimum(slots, distance) + (is_before & (slots > distance)).to(tl.int32))
            entry = chunks_ptr + 4 * (end - 1 - rank)
            c = tl.maximum(chunks - 1 - distance, 0)
            tl.store(entry, row * T + first + c * C)
            tl.store(entry + 1, tl.minimum(length - c * C, C))
            tl.store(entry + 2, chunk + c)
            tl.store(entry + 3, slot + c - first_chunk)
        if tl.sum(tl.where(lanes > lane, counts, 0)) == 0:
            # the group's last item: those of the next group come after the slots of this one
            if stop >= end:
                tl.store(work_ptr, place + 1)
            for i in range(place + 1, tl.where(stop < end, stop - begin, 0)):
                empty = work_ptr + (1 + i) * SLAB_FIELDS
                tl.store(empty + LENGTH, 0)
                tl.store(empty + STORE_TO, -1)
                tl.store(empty + START_FROM, -1)
    if (index == sequences - 1) & (stop < end):
        # no group fills the pass: empty items, then tokens of no sequence, whose gradients are zeros
        tl.store(work_ptr, tl.maximum(stop - begin, 0))
        used = tl.zeros([LANES], tl.int32)
        for m in range(0, sequences, LANES):
            _, _, _, _, length, _ = load_sequences(
                m + lanes, m + lanes < sequences, table_ptr, items_ptr, T, HV, chunks_per_row, bound
            )
            used += tl.cdiv(length, C)
        after = tl.sum(used) - stop
        for i in range(tl.maximum(stop, begin), end, LANES):
            at = i + lanes
            is_owned = at < end
            entry = chunks_ptr + 4 * (end - 1 - at)
            first = at * 0
            length = at * 0
            if table_ptr is not None:
                has_chunk = is_owned & (at + after < bound)
                first = tl.load(table_ptr + 2 * (at + after), mask=has_chunk, other=0)
                length = tl.load(table_ptr + 2 * (at + after) + 1, mask=has_chunk, other=0)
            tl.store(entry, first, mask=is_owned)
            tl.store(entry + 1, length, mask=is_owned)
            tl.store(entry + 2, at + after, mask=is_owned)
            tl.store(entry + 3, at - begin, mask=is_owned)
