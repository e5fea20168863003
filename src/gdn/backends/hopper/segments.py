"""Cut a long sequence into segments of chunks, and scan all segments at once on many SMs.

    S_end = M S_start + N over a segment: M is scanned from the identity with v = 0, N from zero

    plan_segments      place the segments, see `cost.Cuts`. It drops each M whose decay is exactly 0 in fp32.
                       It sums the decays of chunks if `gates` has stored them, else g of tokens, so that it
                       need not wait for `solve`
    segment_transfer   compute M and N of all segments but each sequence's last: the scan without outputs. The
                       first segment has no M, and its N is scanned from the caller's state
    propagate_states   compute S_(j+1) = M_j S_j + N_j from segment to segment: the states that enter them
    the state scan     scan each segment from the state that enters it

M, N and the states are fp32. At K = 128 a product of them is three MMAs of split bf16 (error 1e-5), at K = 64
it is tf32x3. HBM bytes per segment and value head at K = V = 128: M and N written 128 Ki; N read 64 Ki, M
read 64 Ki by each CTA of `propagate_states`; states written and read 128 Ki. Per token that
`segment_transfer` scans: k, A_inv and factors 346 of a well-conditioned chunk, and v 256 for N.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gdn.backends.hopper import cost
from gdn.backends.hopper.factors import CHUNK_DECAY, MIN_G, NUM_ROWS
from gdn.backends.hopper.propagate import ENTERING, LEAVING, propagate_states_kernel
from gdn.backends.hopper.scan.kernel import segment_transfer_kernel
from gdn.backends.hopper.scan.scheduler import (
    FIRST_CHUNK,
    FIRST_TOKEN,
    ITEM_FIELDS,
    LENGTH,
    ROW,
    START_FROM,
    STORE_TO,
)
from gdn.backends.triton.chunks import count_chunks, sequence
from gdn.backends.triton.launch import Launch, Step, TensorSpec, jit, kernel, tensor_spec
from gdn.backends.triton.launch.pdl import PDL, wait_then_launch_dependents
from gdn.backends.triton.rule.describe import gate_strides
from gdn.backends.triton.rule.prepare import log_decay
from gdn.problem import CHUNK, Problem

# value columns of a CTA of `propagate_states`, for few CTAs and for many, and its warps, by K = V. At K = 64
# narrower blocks were miscompiled.
PROPAGATE = {128: ((16, 32), 8), 64: ((64,), 4)}
LOG_ZERO = tl.constexpr(-104.0)  # e^LOG_ZERO is 0 in fp32
ALIVE = tl.constexpr(cost.ALIVE)


@dataclass(frozen=True)
class Segments:
    """Hold the launches that precede the scan of segments, and the specs of the tensors they write."""

    # states that enter segments, work items of the scan and of `segment_transfer`, ranges, M and N
    specs: tuple[TensorSpec, ...]
    num_items: int  # of the scan
    has_decays: bool  # `gates` stores the decays of chunks, before `solve`
    plan: Launch
    transfer: Launch
    propagate: Launch
    borders: Tensor | None = None  # [N] ENTERING and LEAVING bits of sequences; None: none crosses a border

    def steps(
        self,
        p: Problem,
        tiles: tuple[Any, ...],
        factors: Tensor,
        table: Tensor | None,
        new: list[Tensor | None],
    ) -> Iterator[Step]:
        """Yield the launches and their tensors in order; `tiles`: TMA descriptors of k, v, A_inv, factors."""
        states, scan_items, transfer_items, ranges, transfers = new
        decays = (factors if self.has_decays else None, p.g, p.A_log, p.dt_bias)
        yield self.plan, (*decays, p.cu_seqlens, table, scan_items, transfer_items, ranges, self.borders)
        yield self.transfer, (*tiles, factors, p.initial_state, transfers, transfer_items)
        yield self.propagate, (transfers, ranges, p.initial_state, states, self.borders)


def propagation_width(p: Problem) -> int:
    """Return the value columns of a CTA of `propagate_states`: few if all CTAs then fit the SMs at once."""
    widths, _ = PROPAGATE[p.K]
    # an MMA of other columns may add up in another order: batch invariance counts one sequence, on an H200
    N, num_sms = (1, cost.H200_SMS) if p.batch_invariant else (p.N, cost.num_sms(p.device))
    return widths[0] if N * p.HV * (p.V // widths[0]) <= num_sms else widths[-1]


def plan_launches(
    p: Problem, cuts: cost.Cuts | cost.OwnCuts, scalars: tuple[int, ...], width: int, fast_path: bool,
    has_decays: bool,
) -> Segments:  # fmt: skip
    """Plan the segment launches of a problem; the device takes one of two cuts.

    `scalars` are the scan's T, HV, ratio, chunks_per_row, bound; `width` value columns of a CTA of
    `propagate_states`; `has_decays`: `gates` stores the decays of chunks.
    """
    T, HV, ratio, per_row, bound = scalars
    is_own = isinstance(cuts, cost.OwnCuts)
    segments, numbers = _bound_segments(p, cuts, per_row)
    num_items = segments * HV
    # with cuts of their own most sequences may be whole: only the segments before the last have M and N
    num_transfers = 2 * (segments - p.N if is_own else segments)
    states = (HV, p.K, p.V)
    return Segments(
        specs=(
            tensor_spec((segments, *states), torch.float32),
            tensor_spec((num_items, ITEM_FIELDS.value), torch.int32),
            tensor_spec((num_transfers * HV, ITEM_FIELDS.value), torch.int32),
            tensor_spec((p.N, 2), torch.int32),
            tensor_spec((num_transfers, *states), torch.float32),
        ),
        num_items=num_items,
        has_decays=has_decays,
        plan=Launch(
            plan_segments_kernel,
            num_items,
            (*gate_strides(p.g), T, HV, p.N, per_row, bound, *numbers),
            {
                "C": CHUNK,
                "FACTORS": NUM_ROWS.value * CHUNK,
                "DECAY": CHUNK_DECAY.value * CHUNK,
                "FIELDS": ITEM_FIELDS.value,
                "BLOCK": 64,
                "LANES": 512,
                "RESET": MIN_G,
                "OWN_FROM": cost.LONG_FROM if is_own else None,
            },  # fmt: skip
            1,
            options=PDL,
        ),
        transfer=Launch(
            segment_transfer_kernel,
            num_transfers * HV,
            (T, HV, ratio),
            {"V_FIRST": p.state_v_first, "FAST_PATH": fast_path, "D": p.K},
            4,
            options={"maxnreg": 168 if p.K == 128 else 128, **PDL},
            num_descriptors=7,
            seconds=2.0,
        ),
        propagate=Launch(
            propagate_states_kernel,
            p.N * HV * (p.V // width),
            (HV,),
            {"D": p.K, "BV": width, "V_FIRST": p.state_v_first, "STAGES": 3, "OWN": is_own},
            PROPAGATE[p.K][1],
            options=PDL,
        ),
    )


def _bound_segments(
    p: Problem, cuts: cost.Cuts | cost.OwnCuts, chunks_per_row: int
) -> tuple[int, tuple[int, ...]]:
    """Return the most segments that either cut can have, and the cuts as scalars of `plan_segments`."""
    if isinstance(cuts, cost.OwnCuts):
        return cuts.most(p.N, p.num_chunks), (*cuts.below, *cuts.above, cuts.least)
    numbers = (*cuts.many, *cuts.few, 0)
    if p.cu_seqlens is None or p.N == 1:
        most = max(1 + sum(count for count, _ in cut.segments(chunks_per_row)[0]) for cut in cuts)
        return p.N * most, numbers
    # packed lengths are only on the device
    return max(cut.most(p.N, p.num_chunks) for cut in cuts), numbers


@jit
def count_segments(chunks, long, longs, short):
    """Return the number of segments of a sequence of `chunks` chunks, see `cost.Cut`: 1 if it is empty."""
    left = chunks - longs * long
    most = longs + 1 + (left > short).to(tl.int32)
    return tl.where(left > 0, most, tl.maximum(tl.cdiv(chunks, long), 1))


class CutScalars(NamedTuple):
    """Hold a `cost.Cut` and the one for few M; or, where each sequence has its own, a `cost.OwnCuts`."""

    long: Any  # own: longs, halves and short of sequences below OWN_FROM chunks
    longs: Any
    short: Any
    few_long: Any = 0  # own: the same of longer sequences
    few_longs: Any = 0
    few_short: Any = 0
    least: Any = 0


@jit
def own_cut(chunks, cuts, FROM: tl.constexpr):
    """Return `long`, `longs` and `short` of sequences of `chunks` chunks, see `cost.OwnCuts.cut_of`."""
    is_long = chunks >= FROM
    longs = tl.where(is_long, cuts.few_long, cuts.long)
    long = tl.cdiv(2 * chunks, tl.where(is_long, cuts.few_longs, cuts.longs))
    is_equal = tl.where(is_long, cuts.few_short, cuts.short) == 2
    short = tl.where(is_equal, long, tl.cdiv(long, 2))
    # a sequence that is not cut is one long segment
    return tl.maximum(tl.where(chunks >= cuts.least, long, chunks), 1), longs, short


@jit
def first_chunk_of(segment, long, longs, short):
    """Return the first chunk of a segment within its sequence."""
    return tl.minimum(segment, longs) * long + tl.maximum(segment - longs, 0) * short


@jit
def has_few_maps(
    factors_ptr, chunks, HV, segment, FACTORS: tl.constexpr, DECAY: tl.constexpr, BLOCK: tl.constexpr
):
    """Return True if only a few heads have an M over segments of `segment` chunks, estimated from 16 chunks.

    Every CTA must come to the same result: END in HBM has the same bits before and after `solve` stores it
    again.
    """
    sample = (tl.arange(0, 16)[:, None] * chunks // 16).to(tl.int64)
    alive = 0
    for m in range(0, HV, BLOCK):
        heads = m + tl.arange(0, BLOCK)[None, :]
        place = (sample * HV + heads) * FACTORS + DECAY
        # an estimate: the mean of 16 chunks times `segment`
        G = tl.sum(tl.log(tl.load(factors_ptr + place, mask=heads < HV, other=0.0)), 0)
        alive += tl.sum((G * segment >= 16 * LOG_ZERO).to(tl.int32))
    return alive <= ALIVE * HV


@jit
def locate_segment(
    i, cu_seqlens_ptr, N, cuts, C: tl.constexpr, BLOCK: tl.constexpr, OWN_FROM: tl.constexpr = None
):  # fmt: skip
    """Return the sequence of segment i (N past the last), and the number of segments before that sequence."""
    n = 0
    first = 0
    total = 0
    for m in range(0, N, BLOCK):
        lanes = m + tl.arange(0, BLOCK)
        chunks = count_chunks(cu_seqlens_ptr, lanes, lanes < N, C)
        if OWN_FROM is None:
            num_segments = count_segments(chunks, cuts.long, cuts.longs, cuts.short)
        else:
            long, longs, short = own_cut(chunks, cuts, OWN_FROM)
            num_segments = count_segments(chunks, long, longs, short)
        num_segments = tl.where(lanes < N, num_segments, 0)
        is_before = (lanes < N) & (total + tl.cumsum(num_segments, 0) <= i)
        n += tl.sum(is_before.to(tl.int32))
        first += tl.sum(tl.where(is_before, num_segments, 0))
        total += tl.sum(num_segments)
    return n, first


@kernel
def plan_segments_kernel(
    factors_ptr, g_ptr, A_log_ptr, dt_bias_ptr, cu_seqlens_ptr, table_ptr, scan_items_ptr,
    transfer_items_ptr, ranges_ptr, borders_ptr,
    g_b, g_t, g_h, T, HV, N, chunks_per_row, bound, long, longs, short, few_long, few_longs, few_short, least,
    C: tl.constexpr, FACTORS: tl.constexpr, DECAY: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, RESET: tl.constexpr, OWN_FROM: tl.constexpr,
):  # fmt: skip
    """Write the work items of both scans, and (first segment, segments) of each sequence.

    One CTA: one segment and value head: its item of the scan, and its two of `segment_transfer`, N and M.
    Grid: the most segments that there can be x HV.  Warps: 1.  No TMA, no mbarrier: the CTA reads decays (or
    gates) from HBM and writes int32 fields to HBM.
    Cut: `few` if only a few heads have an M in its segments and decays of chunks are stored, else `many`.
    OWN_FROM: each sequence has a cut of its own; the scalars are then those of `cost.OwnCuts`, and items of
    `segment_transfer` are of the segments before the last alone.
    Order: a sequence's last segment, which may be the longest, is scanned first, short ones last.
    PDL: it waits at its end, as it needs nothing of `solve`, the launch before.
    """
    i = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    cuts = CutScalars(long, longs, short, few_long, few_longs, few_short, least)
    if OWN_FROM is None and factors_ptr is not None:
        _, _, total, chunk = sequence(N - 1, table_ptr, cu_seqlens_ptr, T, chunks_per_row, bound, C)
        if has_few_maps(factors_ptr, chunk + tl.cdiv(total, C), HV, few_long, FACTORS, DECAY, 32):
            long = few_long
            longs = few_longs
            short = few_short
    if table_ptr is None:
        if OWN_FROM is not None:
            long, longs, short = own_cut(chunks_per_row, cuts, OWN_FROM)
        num_segments = count_segments(chunks_per_row, long, longs, short)
        n = i // num_segments
        base = n * num_segments
    else:
        if OWN_FROM is None:
            cuts = CutScalars(long, longs, short)
        n, base = locate_segment(i, cu_seqlens_ptr, N, cuts, C, BLOCK, OWN_FROM)
    exists = n < N
    row, first, total, chunk = sequence(
        tl.minimum(n, N - 1), table_ptr, cu_seqlens_ptr, T, chunks_per_row, bound, C
    )
    if OWN_FROM is not None and table_ptr is not None:
        long, longs, short = own_cut(tl.cdiv(total, C), cuts, OWN_FROM)
    index = i - base
    num_segments = count_segments(tl.cdiv(total, C), long, longs, short)
    is_last = index == num_segments - 1
    begin = first_chunk_of(index, long, longs, short)
    past = tl.where(is_last, total, first_chunk_of(index + 1, long, longs, short) * C)
    length = tl.where(exists, past - begin * C, 0)
    chunk += begin

    # the last segment takes its sequence's first place: the persistent scan takes items in this order
    place = tl.where(exists & is_last, base, tl.where(exists, i + 1, i))
    item = scan_items_ptr + (place * HV + head) * FIELDS
    tl.store(item + ROW, row)
    tl.store(item + FIRST_TOKEN, first + begin * C)
    tl.store(item + LENGTH, length)
    tl.store(item + FIRST_CHUNK, chunk)
    tl.store(item + STORE_TO, tl.where(exists & is_last, n, -1))
    tl.store(item + START_FROM, i)
    if exists & (index == 0) & (head == 0):
        tl.store(ranges_ptr + 2 * n, base)
        tl.store(ranges_ptr + 2 * n + 1, num_segments)

    # nothing follows a last segment, so it needs neither M nor N; the first starts from a known state: only N
    if borders_ptr is None:
        has_end = exists & (is_last == 0)
        has_map = has_end & (index > 0)
        is_known = has_end & (index == 0)
    else:
        # a sequence that goes on at another rank needs both of its last segment; one that comes from there
        # both of its first
        bits = tl.load(borders_ptr + tl.minimum(n, N - 1))
        has_end = exists & ((is_last == 0) | ((bits & LEAVING) != 0))
        has_map = has_end & ((index > 0) | ((bits & ENTERING) != 0))
        is_known = has_end & (index == 0) & ((bits & ENTERING) == 0)
    # fp64 sums in registers, LANES at a time: the test below decides if M is exactly 0
    G = tl.zeros([LANES], tl.float64)
    if factors_ptr is not None:
        count = tl.cdiv(length, C)
        for c in range(0, tl.where(has_map, count, 0), LANES):
            chunks = c + tl.arange(0, LANES)
            end = ((chunk + chunks).to(tl.int64) * HV + head) * FACTORS + DECAY
            G += tl.log(tl.load(factors_ptr + end, mask=chunks < count, other=1.0))
    elif g_ptr is not None:
        g_ptr += row.to(tl.int64) * g_b + (first + begin * C).to(tl.int64) * g_t + head * g_h
        for t in range(0, tl.where(has_map, length, 0), LANES):
            tokens = t + tl.arange(0, LANES)
            g = tl.load(g_ptr + tokens.to(tl.int64) * g_t, mask=tokens < length, other=0.0)
            g = log_decay(g, A_log_ptr, dt_bias_ptr, head, RESET)
            G += tl.where(tokens < length, g, 0.0)
    # false for NaN, which M must propagate
    is_gone = tl.sum(G, 0) < LOG_ZERO
    # the segment whose place its items and M and N take, and the first of its sequence
    target = i
    start = base
    has_items = True
    if OWN_FROM is not None:
        # without the last segments of the sequences before; past the last sequence, after all others
        target -= tl.where(exists, n, N)
        start -= n
        num_segments -= 1
        has_items = (exists & is_last) == 0
    for is_map in tl.static_range(2):
        # an item without tokens leaves M zero, and costs `segment_transfer` no chunk
        is_scanned = has_map & (is_gone == 0) if is_map else has_end
        has_goal = has_map if is_map else has_end
        # N, then M of each segment; the first segment has no M, so its empty item goes last
        place = 2 * index + is_map - (index > 0).to(tl.int32)
        if is_map:
            place = tl.where(index == 0, 2 * num_segments - 1, place)
        place = tl.where(exists, 2 * start + place, 2 * target + is_map)
        if has_items:
            item = transfer_items_ptr + (place * HV + head) * FIELDS
            tl.store(item + ROW, row)
            tl.store(item + FIRST_TOKEN, first + begin * C)
            tl.store(item + LENGTH, tl.where(is_scanned, length, 0))
            tl.store(item + FIRST_CHUNK, chunk)
            tl.store(item + STORE_TO, tl.where(has_goal, 2 * target + is_map, -1))
            tl.store(item + START_FROM, -1 if is_map else tl.where(is_known, n, -1))
    # only now: the next launch may then rely on `solve` and all before it
    wait_then_launch_dependents()
