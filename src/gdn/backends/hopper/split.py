"""One sequence over many multiprocessors: the walk over spans of its chunks, all at the same time.

    S_end = M S_start + N for any span of chunks: M is its walk from the identity without values, N from zero

    jobs      where the spans lie, see `cost.Cuts`; whose M is nothing, as their decay is exactly 0 in fp32:
              that of chunks, if `gates` has it, else of tokens, so that nobody waits for `solve`
    ends      M and N of all spans but each sequence's last: the walk without outputs. The first has no M, and
              for N the walk from the caller's state
    combine   S_(j+1) = M_j S_j + N_j from span to span: the states that enter them
    walk      of each span from the state that enters it

M, N and the states are in fp32, a product of them is three of parts in bf16 (1e-5 off), over 64 keys in tf32.
Bytes per span and value head of 128: M and N written 128 K; read 64 K, and M again by each strip of columns;
states written and read 128 K. Per token that `ends` walks: k, A_inv, factors 384, and v 256 for N.
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
from gdn.backends.triton import plans
from gdn.backends.triton.chained import CHAINED, after_all_before
from gdn.backends.triton.chunks import chunks_of, sequence
from gdn.backends.triton.launch import Launch, Room, Step, kernel, room
from gdn.backends.triton.lib import dot, parts, state_tile
from gdn.backends.triton.prepare import log_decay
from gdn.problem import CHUNK, Problem

# columns of a program of combine, for few programs and for many, and its warps, by K = V: over 64 keys
# narrower blocks were miscompiled
COMBINE = {128: ((16, 32), 8), 64: ((64,), 4)}
NOTHING = tl.constexpr(-104.0)  # e^NOTHING is 0 in fp32
ALIVE = tl.constexpr(cost.ALIVE)


@dataclass(frozen=True)
class Spans:
    """What is launched before the walk of spans, and allocated for it."""

    rooms: tuple[Room, ...]  # states that enter spans, jobs of walk and of ends, ranges, M and N
    jobs_of_walk: int
    is_prepared: bool  # whether decays of chunks are known before `solve` is done
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
        """The launches and their tensors, in order; `tiles`: descriptors of k, v, A_inv and the factors."""
        states, jobs, end_jobs, ranges, ends = new
        known = factors if self.is_prepared else None
        yield self.jobs, (known, p.g, p.A_log, p.dt_bias, p.cu_seqlens, table, jobs, end_jobs, ranges)
        yield self.ends, (*tiles, factors, p.initial_state, ends, end_jobs)
        yield self.combine, (ends, ranges, p.initial_state, states)


def width_of(p: Problem) -> int:
    """Columns of a program of combine: few, unless programs would then wait for one another."""
    widths, _ = COMBINE[p.K]
    return widths[0] if p.N * p.HV * (p.V // widths[0]) <= cost.num_sms(p.device) else widths[-1]


def plan(
    p: Problem, cuts: cost.Cuts, numbers: tuple[int, ...], width: int, glides: bool, is_prepared: bool
) -> Spans:
    """For sequences cut in one of two ways; `numbers`: the walk's T, HV, ratio, chunks_per_row, bound."""
    T, HV, ratio, per_row, bound = numbers
    if p.cu_seqlens is None or p.N == 1:
        spans = p.N * max(1 + sum(count for count, _ in cut.spans(per_row)[0]) for cut in cuts)
    else:
        spans = max(cut.most(p.N, p.num_chunks) for cut in cuts)
    programs = spans * HV
    steps = {"D": p.K, "BV": width, "V_FIRST": p.state_v_first, "STAGES": 3}
    states = (HV, p.K, p.V)
    return Spans(
        rooms=(
            room((spans, *states), torch.float32),
            room((programs, JOB.value), torch.int32),
            room((2 * programs, JOB.value), torch.int32),
            room((p.N, 2), torch.int32),
            room((2 * spans, *states), torch.float32),
        ),
        jobs_of_walk=programs,
        is_prepared=is_prepared,
        jobs=Launch(
            jobs_kernel,
            programs,
            (*plans.gate_strides(p.g), T, HV, p.N, per_row, bound, *cuts.many, *cuts.few),
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
            options=CHAINED,
        ),
        ends=Launch(
            ends_kernel,
            2 * programs,
            (T, HV, ratio),
            {"V_FIRST": p.state_v_first, "GLIDES": glides, "D": p.K},
            4,
            options={"maxnreg": 168 if p.K == 128 else 128, **CHAINED},
            described=5,
            seconds=2.0,
        ),
        combine=Launch(
            combine_kernel, p.N * HV * (p.V // width), (HV,), steps, COMBINE[p.K][1], options=CHAINED
        ),
    )


@triton.jit
def spans_of(chunks, long, longs, short):
    """How many spans a sequence of so many chunks has: `cost.Cut`. One without tokens has one."""
    left = chunks - longs * long
    most = longs + 1 + (left > short).to(tl.int32)
    return tl.where(left > 0, most, tl.maximum(tl.cdiv(chunks, long), 1))


@triton.jit
def first_of(span, long, longs, short):
    """The first chunk of a sequence's span."""
    return tl.minimum(span, longs) * long + tl.maximum(span - longs, 0) * short


@triton.jit
def has_few(factors_ptr, chunks, HV, span, ROW: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """Whether spans of so many chunks have an M in few heads, as far as 16 of all chunks tell.

    All programs must find the same: END has the same bits before and after `solve` stores it again.
    """
    sample = (tl.arange(0, 16)[:, None] * chunks // 16).to(tl.int64)
    alive = 0
    for m in range(0, HV, BLOCK):
        heads = m + tl.arange(0, BLOCK)[None, :]
        place = (sample * HV + heads) * ROW + END
        G = tl.sum(tl.log(tl.load(factors_ptr + place, mask=heads < HV, other=0.0)), 0)
        alive += tl.sum((G * span >= 16 * NOTHING).to(tl.int32))
    return alive <= ALIVE * HV


@triton.jit
def span_at(i, cu_seqlens_ptr, N, long, longs, short, C: tl.constexpr, BLOCK: tl.constexpr):
    """Sequence of span i, N past the last; spans before that sequence."""
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
    """The jobs of `walk`, those of `ends`, N and M span by span, and (first span, spans) of each sequence.

    The other cut is taken where few heads have an M in its spans, if decays of chunks are known.
    A sequence's last span, which may be the longest, is walked first, short ones last.
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

    has_end = exists & (is_last == 0)
    has_map = has_end & (index > 0)
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
    # NaN is not
    is_gone = tl.sum(G, 0) < NOTHING
    for is_map in tl.static_range(2):
        # without tokens M is zero
        is_walked = has_map & (is_gone == 0) if is_map else has_end
        has_goal = has_map if is_map else has_end
        # the place of the first span's M, which there is not, is the last
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
    after_all_before()


@kernel
def combine_kernel(
    ends_ptr, ranges_ptr, initial_ptr, states_ptr,
    HV,
    D: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The states that enter the spans of a sequence, a strip of their columns."""
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
    after_all_before()
    tl.store(states_ptr + (first.to(tl.int64) * HV + head) * (D * D) + place, S, mask=mask)
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
            M_high, M_low = parts(M, tl.bfloat16)
            S_high, S_low = parts(S, tl.bfloat16)
            S = tl.dot(M_high, S_high, tl.dot(M_high, S_low, tl.dot(M_low, S_high, N)))
    tl.store(states_ptr + ((first + spans - 1).to(tl.int64) * HV + head) * (D * D) + place, S, mask=mask)
