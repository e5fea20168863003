"""Cut a long sequence into segments of chunks, and scan all segments at once on many SMs.

    S_end = M S_start + N over a segment: M is scanned from the identity with v = 0, N from zero

    `jobs`    place the segments (`plan_segments`), see `cost.Cuts`. It drops each M whose decay is exactly 0
              in fp32. It sums the decays of chunks if `gates` has stored them, else g of tokens, so that it
              need not wait for `solve`
    `ends`    compute M and N of all segments but each sequence's last (`segment_transfer`): the scan without
              outputs. The first segment has no M, and its N is scanned from the caller's state
    `combine` compute S_(j+1) = M_j S_j + N_j from segment to segment (`propagate_states`): the states that
              enter them
    `walk`    scan each segment from the state that enters it

M, N and the states are fp32. At K = 128 a product of them is three MMAs of split bf16 (error 1e-5), at K = 64
it is tf32x3. HBM bytes per segment and value head at K = V = 128: M and N written 128 Ki; N read 64 Ki, M
read 64 Ki by each CTA of `combine`; states written and read 128 Ki. Per token that `ends` scans: k, A_inv and
factors 384, and v 256 for N.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.hopper import cost
from gdn.backends.hopper.chunk import JOB
from gdn.backends.hopper.factors import END, LEAST, ROWS
from gdn.backends.hopper.walk import ends_kernel
from gdn.backends.triton.chunks import chunks_of, sequence
from gdn.backends.triton.launch import Launch, Step, TensorSpec, kernel, tensor_spec
from gdn.backends.triton.launch.pdl import PDL, wait_then_launch_dependents
from gdn.backends.triton.lib import dot, split_bf16, state_tile
from gdn.backends.triton.rule.describe import gate_strides
from gdn.backends.triton.rule.prepare import log_decay
from gdn.problem import CHUNK, Problem

# value columns of a CTA of combine, for few CTAs and for many, and its warps, by K = V. At K = 64 narrower
# blocks were miscompiled.
COMBINE = {128: ((16, 32), 8), 64: ((64,), 4)}
NOTHING = tl.constexpr(-104.0)  # e^NOTHING is 0 in fp32
ALIVE = tl.constexpr(cost.ALIVE)


@dataclass(frozen=True)
class Spans:
    """Hold the launches that precede the scan of segments, and the specs of the tensors they write."""

    specs: tuple[
        TensorSpec, ...
    ]  # states that enter segments, work items of the scan and of ends, ranges, M and N
    jobs_of_walk: int
    is_prepared: bool  # `gates` stores the decays of chunks, before `solve`
    jobs: Launch
    ends: Launch
    combine: Launch

    def steps(
        self,
        p: Problem,
        tiles: tuple[Any, ...],
        factors: Tensor,
        table: Tensor | None,
        new: list[Tensor | None],
    ) -> Iterator[Step]:
        """Yield the launches and their tensors in order; `tiles`: TMA descriptors of k, v, A_inv, factors."""
        states, jobs, end_jobs, ranges, ends = new
        known = factors if self.is_prepared else None
        yield self.jobs, (known, p.g, p.A_log, p.dt_bias, p.cu_seqlens, table, jobs, end_jobs, ranges)
        yield self.ends, (*tiles, factors, p.initial_state, ends, end_jobs)
        yield self.combine, (ends, ranges, p.initial_state, states)


def width_of(p: Problem) -> int:
    """Return the value columns of a CTA of combine: few, if all CTAs then fit the SMs at once, else many."""
    widths, _ = COMBINE[p.K]
    return widths[0] if p.N * p.HV * (p.V // widths[0]) <= cost.num_sms(p.device) else widths[-1]


def plan(
    p: Problem, cuts: cost.Cuts, numbers: tuple[int, ...], width: int, glides: bool, is_prepared: bool
) -> Spans:
    """Plan the segment launches of a problem; the device takes one of two cuts.

    `numbers` are the scan's T, HV, ratio, chunks_per_row, bound; `glides`: the fast path is on.
    """
    T, HV, ratio, per_row, bound = numbers
    # the most segments that either cut can have: packed lengths are only on the device
    if p.cu_seqlens is None or p.N == 1:
        spans = p.N * max(1 + sum(count for count, _ in cut.spans(per_row)[0]) for cut in cuts)
    else:
        spans = max(cut.most(p.N, p.num_chunks) for cut in cuts)
    programs = spans * HV
    steps = {"D": p.K, "BV": width, "V_FIRST": p.state_v_first, "STAGES": 3}
    states = (HV, p.K, p.V)
    return Spans(
        specs=(
            tensor_spec((spans, *states), torch.float32),
            tensor_spec((programs, JOB.value), torch.int32),
            tensor_spec((2 * programs, JOB.value), torch.int32),
            tensor_spec((p.N, 2), torch.int32),
            tensor_spec((2 * spans, *states), torch.float32),
        ),
        jobs_of_walk=programs,
        is_prepared=is_prepared,
        jobs=Launch(
            jobs_kernel,
            programs,
            (*gate_strides(p.g), T, HV, p.N, per_row, bound, *cuts.many, *cuts.few),
            {
                "C": CHUNK,
                "ROW": ROWS.value * CHUNK,
                "END": END.value * CHUNK,
                "JOB": JOB.value,
                "BLOCK": 64,
                "LANES": 512,
                "RESET": LEAST,
            },  # fmt: skip
            1,
            options=PDL,
        ),
        ends=Launch(
            ends_kernel,
            2 * programs,
            (T, HV, ratio),
            {"V_FIRST": p.state_v_first, "GLIDES": glides, "D": p.K},
            4,
            options={"maxnreg": 168 if p.K == 128 else 128, **PDL},
            num_descriptors=5,
            seconds=2.0,
        ),
        combine=Launch(combine_kernel, p.N * HV * (p.V // width), (HV,), steps, COMBINE[p.K][1], options=PDL),
    )


@triton.jit
def spans_of(chunks, long, longs, short):
    """Return the number of segments of a sequence of `chunks` chunks: `cost.Cut`. An empty one has one."""
    left = chunks - longs * long
    most = longs + 1 + (left > short).to(tl.int32)
    return tl.where(left > 0, most, tl.maximum(tl.cdiv(chunks, long), 1))


@triton.jit
def first_of(span, long, longs, short):
    """Return the first chunk of a segment within its sequence."""
    return tl.minimum(span, longs) * long + tl.maximum(span - longs, 0) * short


@triton.jit
def has_few(factors_ptr, chunks, HV, span, ROW: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """Return True if only a few heads have an M over segments of `span` chunks, estimated from 16 chunks.

    Every CTA must come to the same result: END in HBM has the same bits before and after `solve` stores it
    again.
    """
    sample = (tl.arange(0, 16)[:, None] * chunks // 16).to(tl.int64)
    alive = 0
    for m in range(0, HV, BLOCK):
        heads = m + tl.arange(0, BLOCK)[None, :]
        place = (sample * HV + heads) * ROW + END
        # an estimate: the mean of 16 chunks times `span`
        G = tl.sum(tl.log(tl.load(factors_ptr + place, mask=heads < HV, other=0.0)), 0)
        alive += tl.sum((G * span >= 16 * NOTHING).to(tl.int32))
    return alive <= ALIVE * HV


@triton.jit
def span_at(i, cu_seqlens_ptr, N, long, longs, short, C: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sequence of segment i (N past the last), and the number of segments before that sequence."""
    n = 0
    first = 0
    total = 0
    for m in range(0, N, BLOCK):
        lanes = m + tl.arange(0, BLOCK)
        spans = spans_of(chunks_of(cu_seqlens_ptr, lanes, lanes < N, C), long, longs, short)
        spans = tl.where(lanes < N, spans, 0)
        is_before = (lanes < N) & (total + tl.cumsum(spans, 0) <= i)
        n += tl.sum(is_before.to(tl.int32))
        first += tl.sum(tl.where(is_before, spans, 0))
        total += tl.sum(spans)
    return n, first


@kernel
def jobs_kernel(
    factors_ptr, g_ptr, A_log_ptr, dt_bias_ptr, cu_seqlens_ptr, table_ptr, walks_ptr, ends_ptr, ranges_ptr,
    g_b, g_t, g_h, T, HV, N, chunks_per_row, bound, long, longs, short, few_long, few_longs, few_short,
    C: tl.constexpr, ROW: tl.constexpr, END: tl.constexpr, JOB: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """Write the work items of the scan and of `ends`, and (first segment, segments) of each sequence.

    One CTA: one segment and value head: its item of the scan, and its two items of `ends`, N and M.
    Grid: the most segments that there can be x HV.  Warps: 1.  No TMA, no mbarrier: the CTA reads decays (or
    gates) from HBM and writes int32 fields to HBM.
    Cut: `few` if only a few heads have an M in its segments and decays of chunks are stored, else `many`.
    Order: a sequence's last segment, which may be the longest, is scanned first, short ones last.
    PDL: it waits at its end, as it needs nothing of `solve`, the launch before.
    """
    i = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    if factors_ptr is not None:
        _, _, total, chunk = sequence(N - 1, table_ptr, cu_seqlens_ptr, T, chunks_per_row, bound, C)
        if has_few(factors_ptr, chunk + tl.cdiv(total, C), HV, few_long, ROW, END, 32):
            long = few_long
            longs = few_longs
            short = few_short
    if table_ptr is None:
        spans = spans_of(chunks_per_row, long, longs, short)
        n = i // spans
        base = n * spans
    else:
        n, base = span_at(i, cu_seqlens_ptr, N, long, longs, short, C, BLOCK)
    exists = n < N
    row, first, total, chunk = sequence(
        tl.minimum(n, N - 1), table_ptr, cu_seqlens_ptr, T, chunks_per_row, bound, C
    )
    index = i - base
    spans = spans_of(tl.cdiv(total, C), long, longs, short)
    is_last = index == spans - 1
    begin = first_of(index, long, longs, short)
    past = tl.where(is_last, total, first_of(index + 1, long, longs, short) * C)
    length = tl.where(exists, past - begin * C, 0)
    chunk += begin

    # the last segment takes its sequence's first place: the persistent scan takes items in this order
    place = tl.where(exists & is_last, base, tl.where(exists, i + 1, i))
    job = walks_ptr + (place * HV + head) * JOB
    tl.store(job, row)
    tl.store(job + 1, first + begin * C)
    tl.store(job + 2, length)
    tl.store(job + 3, chunk)
    tl.store(job + 4, tl.where(exists & is_last, n, -1))
    tl.store(job + 5, i)
    if exists & (index == 0) & (head == 0):
        tl.store(ranges_ptr + 2 * n, base)
        tl.store(ranges_ptr + 2 * n + 1, spans)

    # nothing follows a last segment, so it needs neither M nor N; the first starts from a known state: only N
    has_end = exists & (is_last == 0)
    has_map = has_end & (index > 0)
    # fp64 sums in registers, LANES at a time: the test below decides if M is exactly 0
    G = tl.zeros([LANES], tl.float64)
    if factors_ptr is not None:
        count = tl.cdiv(length, C)
        for c in range(0, tl.where(has_map, count, 0), LANES):
            chunks = c + tl.arange(0, LANES)
            end = ((chunk + chunks).to(tl.int64) * HV + head) * ROW + END
            G += tl.log(tl.load(factors_ptr + end, mask=chunks < count, other=1.0))
    elif g_ptr is not None:
        g_ptr += row.to(tl.int64) * g_b + (first + begin * C).to(tl.int64) * g_t + head * g_h
        for t in range(0, tl.where(has_map, length, 0), LANES):
            tokens = t + tl.arange(0, LANES)
            g = tl.load(g_ptr + tokens.to(tl.int64) * g_t, mask=tokens < length, other=0.0)
            g = log_decay(g, A_log_ptr, dt_bias_ptr, head, RESET)
            G += tl.where(tokens < length, g, 0.0)
    # false for NaN, which M must propagate
    is_gone = tl.sum(G, 0) < NOTHING
    for is_map in tl.static_range(2):
        # an item without tokens leaves M zero, and costs `ends` no chunk
        is_walked = has_map & (is_gone == 0) if is_map else has_end
        has_goal = has_map if is_map else has_end
        # N, then M of each segment; the first segment has no M, so its empty item goes last
        place = 2 * index + is_map - (index > 0).to(tl.int32)
        if is_map:
            place = tl.where(index == 0, 2 * spans - 1, place)
        place = tl.where(exists, 2 * base + place, 2 * i + is_map)
        job = ends_ptr + (place * HV + head) * JOB
        tl.store(job, row)
        tl.store(job + 1, first + begin * C)
        tl.store(job + 2, tl.where(is_walked, length, 0))
        tl.store(job + 3, chunk)
        tl.store(job + 4, tl.where(has_goal, 2 * i + is_map, -1))
        tl.store(job + 5, -1 if is_map else tl.where(has_end & (index == 0), n, -1))
    # only now: the next launch may then rely on `solve` and all before it
    wait_then_launch_dependents()


@kernel
def combine_kernel(
    ends_ptr, ranges_ptr, initial_ptr, states_ptr,
    HV,
    D: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the states that enter the segments of a sequence, BV value columns of them.

    One CTA: one sequence, value head and BV columns, segment after segment; S stays in registers.
    Grid: sequences x HV x D / BV.  Warps: 8 at K = 128, 4 at K = 64.
    Shared memory: Triton's, for STAGES pipeline stages of the loop that loads M and N, and for MMA operands.
    """
    strip = tl.program_id(0) % (D // BV)
    head = (tl.program_id(0) // (D // BV)) % HV
    n = tl.program_id(0) // (D // BV * HV)
    first = tl.load(ranges_ptr + 2 * n)
    spans = tl.load(ranges_ptr + 2 * n + 1)
    ks = tl.arange(0, D)
    vs = strip * BV + tl.arange(0, BV)
    place, mask = state_tile(0, ks, vs, D, D, V_FIRST)
    if initial_ptr is None:
        S = tl.zeros([D, BV], tl.float32)
    else:
        S = tl.load(initial_ptr + (n.to(tl.int64) * HV + head) * (D * D) + place).to(tl.float32)
    # `ends` writes M and N to HBM; above, the caller's state and the ranges, two launches old, need no wait
    wait_then_launch_dependents()
    tl.store(states_ptr + (first.to(tl.int64) * HV + head) * (D * D) + place, S, mask=mask)
    # one segment: the scan only needs the initial state
    if spans == 1:
        return
    square = ks[:, None] * D + ks[None, :]
    columns = ks[:, None] * D + vs[None, :]
    S = tl.load(ends_ptr + (2 * first.to(tl.int64) * HV + head) * (D * D) + columns)
    for i in tl.range(1, spans - 1, num_stages=STAGES):
        span = (first + i).to(tl.int64)
        tl.store(states_ptr + (span * HV + head) * (D * D) + place, S, mask=mask)
        zero = 2 * span * HV + head
        M = tl.load(ends_ptr + (zero + HV) * (D * D) + square)
        N = tl.load(ends_ptr + zero * (D * D) + columns)
        if D == 64:
            S = dot(M, S, N, "tf32x3")
        else:
            # split bf16 on the tensor cores: hi hi + hi lo + lo hi; without lo lo the error is 1e-5
            M_high, M_low = split_bf16(M, tl.bfloat16)
            S_high, S_low = split_bf16(S, tl.bfloat16)
            S = tl.dot(M_high, S_high, tl.dot(M_high, S_low, tl.dot(M_low, S_high, N)))
    tl.store(states_ptr + ((first + spans - 1).to(tl.int64) * HV + head) * (D * D) + place, S, mask=mask)
