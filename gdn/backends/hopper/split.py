"""One sequence over many multiprocessors: the walk over spans of its chunks, all at the same time.

    S_end = M S_start + N for any span of chunks: M is its walk from the identity without values, N from zero

    jobs      where the spans lie; whose M is nothing, as their decay is exactly 0 in fp32: that of chunks,
              if `gates` has it, else of tokens, so that nobody waits for `solve`
    ends      M and N of all spans but each sequence's last: the walk without outputs
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
from gdn.backends.triton.chunks import sequence
from gdn.backends.triton.launch import Launch, Room, Step, kernel, room
from gdn.backends.triton.lib import dot, parts, state_tile
from gdn.backends.triton.prepare import log_decay
from gdn.problem import CHUNK, Problem

# columns of a program of combine, for few programs and for many, and its warps, by K = V: over 64 keys
# narrower blocks were miscompiled
COMBINE = {128: ((16, 32), 8), 64: ((64,), 4)}
NOTHING = tl.constexpr(-104.0)  # e^NOTHING is 0 in fp32


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
        yield self.ends, (*tiles, factors, ends, end_jobs)
        yield self.combine, (ends, ranges, p.initial_state, states)


def width_of(p: Problem) -> int:
    """Columns of a program of combine: few, unless programs would then wait for one another."""
    widths, _ = COMBINE[p.K]
    return widths[0] if p.N * p.HV * (p.V // widths[0]) <= cost.num_sms(p.device) else widths[-1]


def plan(
    p: Problem, span: int, numbers: tuple[int, ...], width: int, glides: bool, is_prepared: bool
) -> Spans:
    """For spans of so many chunks; `numbers`: the walk's T, HV, ratio, chunks_per_row, bound."""
    T, HV, ratio, per_row, bound = numbers
    if p.cu_seqlens is None:
        spans = p.N * triton.cdiv(per_row, span)
    else:
        # sum of max(1, ceil(chunks / span)): most where one sequence has all chunks
        spans = p.N - 1 + max(1, triton.cdiv(p.num_chunks, span))
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
            (*plans.gate_strides(p.g), T, HV, p.N, per_row, bound, span),
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
            {"GLIDES": glides, "D": p.K},
            4,
            options={"maxnreg": 168 if p.K == 128 else 128, **CHAINED},
            described=5,
        ),
        combine=Launch(
            combine_kernel, p.N * HV * (p.V // width), (HV,), steps, COMBINE[p.K][1], options=CHAINED
        ),
    )


@triton.jit
def span_at(i, cu_seqlens_ptr, N, L, C: tl.constexpr, BLOCK: tl.constexpr):
    """Sequence of span i, N past the last; spans before that sequence. One without tokens has one span."""
    n = 0
    first = 0
    total = 0
    for m in range(0, N, BLOCK):
        lanes = m + tl.arange(0, BLOCK)
        start = tl.load(cu_seqlens_ptr + lanes, mask=lanes < N, other=0)
        end = tl.load(cu_seqlens_ptr + lanes + 1, mask=lanes < N, other=0)
        spans = tl.maximum(tl.cdiv(tl.cdiv((end - start).to(tl.int32), C), L), 1)
        spans = tl.where(lanes < N, spans, 0)
        is_before = (lanes < N) & (total + tl.cumsum(spans, 0) <= i)
        n += tl.sum(is_before.to(tl.int32))
        first += tl.sum(tl.where(is_before, spans, 0))
        total += tl.sum(spans)
    return n, first


@kernel
def jobs_kernel(
    factors_ptr, g_ptr, A_log_ptr, dt_bias_ptr, cu_seqlens_ptr, table_ptr, walks_ptr, ends_ptr, ranges_ptr,
    g_b, g_t, g_h, T, HV, N, chunks_per_row, bound, L,
    C: tl.constexpr, ROW: tl.constexpr, END: tl.constexpr, JOB: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """The jobs of `walk`, those of `ends`, (N, M) of each span, and (first span, spans) of each sequence."""
    i = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    if table_ptr is None:
        spans = tl.cdiv(chunks_per_row, L)
        n = i // spans
        base = n * spans
    else:
        n, base = span_at(i, cu_seqlens_ptr, N, L, C, BLOCK)
    exists = n < N
    row, first, total, chunk = sequence(
        tl.minimum(n, N - 1), table_ptr, cu_seqlens_ptr, T, chunks_per_row, bound, C
    )
    index = i - base
    spans = tl.maximum(tl.cdiv(tl.cdiv(total, C), L), 1)
    is_last = index == spans - 1
    begin = index * L
    length = tl.where(exists, tl.minimum(total - begin * C, L * C), 0)
    chunk += begin

    job = walks_ptr + (i * HV + head) * JOB
    tl.store(job, row)
    tl.store(job + 1, first + begin * C)
    tl.store(job + 2, length)
    tl.store(job + 3, chunk)
    tl.store(job + 4, tl.where(exists & is_last, n, -1))
    if exists & (index == 0) & (head == 0):
        tl.store(ranges_ptr + 2 * n, base)
        tl.store(ranges_ptr + 2 * n + 1, spans)

    has_end = exists & (is_last == 0)
    G = tl.zeros([LANES], tl.float64)
    if factors_ptr is not None:
        for c in range(0, tl.where(has_end, L, 0), LANES):
            chunks = c + tl.arange(0, LANES)
            place = ((chunk + chunks).to(tl.int64) * HV + head) * ROW + END
            G += tl.log(tl.load(factors_ptr + place, mask=chunks < L, other=1.0))
    elif g_ptr is not None:
        g_ptr += row.to(tl.int64) * g_b + (first + begin * C).to(tl.int64) * g_t + head * g_h
        for t in range(0, tl.where(has_end, length, 0), LANES):
            tokens = t + tl.arange(0, LANES)
            g = tl.load(g_ptr + tokens.to(tl.int64) * g_t, mask=tokens < length, other=0.0)
            g = log_decay(g, A_log_ptr, dt_bias_ptr, head, RESET)
            G += tl.where(tokens < length, g, 0.0)
    # NaN is not
    is_gone = tl.sum(G, 0) < NOTHING
    for is_map in tl.static_range(2):
        # without tokens M is zero
        is_walked = has_end & (is_gone == 0) if is_map else has_end
        job = ends_ptr + ((2 * i + is_map) * HV + head) * JOB
        tl.store(job, row)
        tl.store(job + 1, first + begin * C)
        tl.store(job + 2, tl.where(is_walked, length, 0))
        tl.store(job + 3, chunk)
        tl.store(job + 4, tl.where(has_end, 2 * i + is_map, -1))
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
    square = ks[:, None] * D + ks[None, :]
    columns = ks[:, None] * D + vs[None, :]
    for i in tl.range(0, spans - 1, num_stages=STAGES):
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
