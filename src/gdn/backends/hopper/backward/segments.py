"""Cut a long sequence into segments for the reverse state scan, and scan all of them at once on many SMs.

    dS_start = M dS_end + N over a segment: M is scanned from the identity with do = 0, N from zero

M is the transpose of the forward's. Segments are counted from a sequence's end, in the order of the scan:

    plan_reverse_segments   place the segments. It drops each M whose decay is exactly 0 in fp32
    reverse_transfer        compute M and N of all segments but each sequence's first tokens: the scan without
                            dS and dv. The segment at the end has no M, and its N is scanned from dfinal
    propagate_states        compute the dS that leave the segments, see `hopper.segments`
    reverse_scan            scan each segment from the dS that leaves it

M, N and the states are fp32. HBM bytes per segment and value head at K = V = 128: as in `hopper.segments`.
Per token that `reverse_transfer` scans, HV = 2 H: q, k 256, A_inv 128, factors 32, and do 256 for N.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gdn.backends.hopper.backward.cost import Segmentation
from gdn.backends.hopper.backward.factors import DECAY, ROWS
from gdn.backends.hopper.backward.scan import reverse_transfer_kernel
from gdn.backends.hopper.factors import LOG2_E
from gdn.backends.hopper.propagate import propagate_states_kernel
from gdn.backends.hopper.scan.scheduler import (
    FIRST_CHUNK,
    FIRST_TOKEN,
    ITEM_FIELDS,
    LENGTH,
    ROW,
    START_FROM,
    STORE_TO,
)
from gdn.backends.hopper.scans import REGISTERS, STRIP
from gdn.backends.hopper.segments import (
    LOG_ZERO,
    PROPAGATE,
    CutScalars,
    count_segments,
    first_chunk_of,
    locate_segment,
    propagation_width,
)
from gdn.backends.triton.chunks import sequence
from gdn.backends.triton.launch import Launch, Step, TensorSpec, kernel, tensor_spec
from gdn.backends.triton.launch.pdl import PDL
from gdn.problem import CHUNK, Problem


@dataclass(frozen=True)
class Segments:
    """Hold the launches that precede the reverse scan of segments, and the specs of what they write."""

    # dS that leave the segments, work items of the scan and of the transfer, ranges, M and N
    specs: tuple[TensorSpec, ...]
    num_items: int  # of the scan
    plan: Launch
    transfer: Launch
    propagate: Launch

    def steps(
        self,
        p: Problem,
        described: tuple[Any, ...],
        factors: Tensor,
        table: Tensor | None,
        dfinal: Tensor | None,
        new: list[Tensor],
    ) -> Iterator[Step]:
        """Yield the launches in order; `described`: TMA descriptors of q, k, do, A_inv, factors."""
        states, scan_items, transfer_items, ranges, transfers = new
        yield self.plan, (factors, p.cu_seqlens, table, scan_items, transfer_items, ranges)
        yield self.transfer, (*described, transfer_items, dfinal, transfers)
        yield self.propagate, (transfers, ranges, dfinal, states, None)


def plan_launches(p: Problem, segmentation: Segmentation, scalars: tuple[int, ...]) -> Segments:
    """Plan the segment launches of a backward; `scalars`: T, HV, ratio, chunks_per_row, table entries."""
    T, HV, ratio, per_row, bound = scalars
    cut = segmentation.cut
    # packed lengths are only on the device: the most segments that there can be
    if p.cu_seqlens is None or p.N == 1:
        segments = p.N * (1 + sum(count for count, _ in cut.segments(per_row)[0]))
    else:
        segments = cut.most(p.N, p.num_chunks)
    num_items = segments * HV
    states = (HV, p.K, p.V)
    consumers = segmentation.transfer_consumers
    transfer_items = 2 * num_items * (p.V // STRIP // consumers)
    width = propagation_width(p)
    return Segments(
        specs=(
            tensor_spec((segments, *states), torch.float32),
            tensor_spec((num_items, ITEM_FIELDS.value), torch.int32),
            tensor_spec((2 * num_items, ITEM_FIELDS.value), torch.int32),
            tensor_spec((p.N, 2), torch.int32),
            tensor_spec((2 * segments, *states), torch.float32),
        ),
        num_items=num_items,
        plan=Launch(
            plan_reverse_segments_kernel,
            num_items,
            (T, HV, p.N, per_row, bound, *cut),
            {
                "C": CHUNK,
                "FACTORS": ROWS.value * CHUNK,
                # log2 of the chunk's decay: the last token's
                "DECAY": DECAY.value * CHUNK + CHUNK - 1,
                "FIELDS": ITEM_FIELDS.value,
                "BLOCK": 64,
                "LANES": 512,
            },
            1,
        ),
        transfer=plan_transfer(p, consumers, transfer_items, scalars[:3]),
        propagate=Launch(
            propagate_states_kernel,
            p.N * HV * (p.V // width),
            (HV,),
            {"D": p.K, "BV": width, "V_FIRST": p.state_v_first, "STAGES": 3, "OWN": False},
            PROPAGATE[p.K][1],
            # the forward's binary; it waits for the transfer, which lets it start only when it is done
            options=PDL,
        ),
    )


def plan_transfer(p: Problem, consumers: int, items: int, scalars: tuple[int, ...]) -> Launch:
    """Plan a launch of `reverse_transfer` with so many work items; `scalars`: T, HV, ratio."""
    return Launch(
        reverse_transfer_kernel,
        items,
        (*scalars, items),
        {"V_FIRST": p.state_v_first, "CONSUMERS": consumers, "D": p.K},
        4,
        options={"maxnreg": REGISTERS[consumers]},
        num_descriptors=5,
        seconds=4.0,
    )


@kernel
def plan_reverse_segments_kernel(
    factors_ptr, cu_seqlens_ptr, table_ptr, scan_items_ptr, transfer_items_ptr, ranges_ptr,
    T, HV, N, chunks_per_row, bound, long, longs, short,
    C: tl.constexpr, FACTORS: tl.constexpr, DECAY: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Write the work items of scan and transfer, and (first segment, segments) of each sequence.

    One CTA: one segment and value head: its item of the scan, and its two of the transfer, N and M.
    Grid: the most segments that there can be x HV.  Warps: 1.  No TMA, no mbarrier: the CTA reads decays of
    chunks from HBM and writes int32 fields to HBM.
    Segment 0 has a sequence's last tokens. Order: the segment of the first tokens, which may be the longest,
    is scanned first, short ones last.
    """
    i = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    if table_ptr is None:
        num_segments = count_segments(chunks_per_row, long, longs, short)
        n = i // num_segments
        base = n * num_segments
    else:
        n, base = locate_segment(i, cu_seqlens_ptr, N, CutScalars(long, longs, short), C, BLOCK)
    exists = n < N
    row, first, total, chunk = sequence(
        tl.minimum(n, N - 1), table_ptr, cu_seqlens_ptr, T, chunks_per_row, bound, C
    )
    index = i - base
    chunks = tl.cdiv(total, C)
    num_segments = count_segments(chunks, long, longs, short)
    # no segment is scanned after it, so it needs neither M nor N
    is_last = index == num_segments - 1
    end = chunks - first_chunk_of(index, long, longs, short)
    begin = tl.where(is_last, 0, chunks - first_chunk_of(index + 1, long, longs, short))
    length = tl.where(exists, tl.minimum(end * C, total) - begin * C, 0)
    first += begin * C
    chunk += begin

    place = tl.where(exists & is_last, base, tl.where(exists, i + 1, i))
    item = scan_items_ptr + (place * HV + head) * FIELDS
    tl.store(item + ROW, row)
    tl.store(item + FIRST_TOKEN, first)
    tl.store(item + LENGTH, length)
    tl.store(item + FIRST_CHUNK, chunk)
    tl.store(item + STORE_TO, tl.where(exists & is_last, n, -1))
    tl.store(item + START_FROM, i)
    if exists & (index == 0) & (head == 0):
        tl.store(ranges_ptr + 2 * n, base)
        tl.store(ranges_ptr + 2 * n + 1, num_segments)

    # segment 0 starts from a known gradient: only N
    has_end = exists & (is_last == 0)
    has_map = has_end & (index > 0)
    # fp64 sums in registers, LANES at a time: the test below decides if M is exactly 0
    G = tl.zeros([LANES], tl.float64)
    count = tl.cdiv(length, C)
    for c in range(0, tl.where(has_map, count, 0), LANES):
        lanes = c + tl.arange(0, LANES)
        decay = ((chunk + lanes).to(tl.int64) * HV + head) * FACTORS + DECAY
        G += tl.load(factors_ptr + decay, mask=lanes < count, other=0.0)
    # false for NaN, which M must propagate
    is_gone = tl.sum(G, 0) < LOG_ZERO * LOG2_E
    for is_map in tl.static_range(2):
        # an item without tokens leaves M zero, and costs the transfer no chunk
        is_scanned = has_map & (is_gone == 0) if is_map else has_end
        has_goal = has_map if is_map else has_end
        # N, then M of each segment; segment 0 has no M, so its empty item goes last
        place = 2 * index + is_map - (index > 0).to(tl.int32)
        if is_map:
            place = tl.where(index == 0, 2 * num_segments - 1, place)
        place = tl.where(exists, 2 * base + place, 2 * i + is_map)
        item = transfer_items_ptr + (place * HV + head) * FIELDS
        tl.store(item + ROW, row)
        tl.store(item + FIRST_TOKEN, first)
        tl.store(item + LENGTH, tl.where(is_scanned, length, 0))
        tl.store(item + FIRST_CHUNK, chunk)
        tl.store(item + STORE_TO, tl.where(has_goal, 2 * i + is_map, -1))
        tl.store(item + START_FROM, -1 if is_map else tl.where(has_end & (index == 0), n, -1))
