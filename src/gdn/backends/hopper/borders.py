"""Cut the chunked forward where a rank exchanges states with others: between `segment_transfer` and the scan.

    begin     gates, solve, plan_segments, segment_transfer; fold_transfers: N | M of the rows that leave
    finish    propagate_states, from the states that entered; the state scan

A rank cuts its tokens into segments as one GPU does, so that N | M of all its tokens is the fold of theirs,
and no token is scanned more often than on one GPU. Only the first segment of a row that enters has an M more,
and the last segment of a row that leaves an M and N.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import dropwhile, takewhile
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gdn.backends.backend import Borders, FinishForward, Kept
from gdn.backends.borders import row_index
from gdn.backends.hopper import cost
from gdn.backends.hopper.backward.cost import STRIP, rank_segments
from gdn.backends.hopper.descriptors import align
from gdn.backends.hopper.propagate import ENTERING, LEAVING, pass_segment
from gdn.backends.hopper.rule import Forward, for_backward, plan_first, results
from gdn.backends.hopper.segments import PROPAGATE, Segments
from gdn.backends.triton.launch import (
    Launch,
    LaunchSequence,
    PlanCache,
    Step,
    allocate,
    device_guard,
    kernel,
    tensor_spec,
)
from gdn.backends.triton.launch.pdl import PDL, wait_then_launch_dependents
from gdn.backends.triton.rule import borders as triton_borders
from gdn.backends.triton.rule.describe import operand_dtype, problem_key, to_kernel_layout
from gdn.notation import State, Values
from gdn.problem import CHUNK, Problem


@kernel
def fold_transfers_kernel(
    transfers_ptr, ranges_ptr, borders_ptr, rows_ptr, folded_ptr,
    HV,
    D: tl.constexpr, BV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Fold M and N of all segments of a sequence into one N | M: S_end = M S_start + N over its tokens.

    One CTA: one sequence of `rows`, value head and BV of the WIDTH = D + D columns, segment after segment;
    they stay in registers. M is zero where no state comes from another rank. WIDTH = D: N alone.
    Grid: rows x HV x WIDTH / BV.  Warps: 8 at K = 128, 4 at K = 64.
    Shared memory: Triton's, for MMA operands.
    """
    strips: tl.constexpr = WIDTH // BV
    strip = tl.program_id(0) % strips
    head = (tl.program_id(0) // strips) % HV
    row = tl.program_id(0) // (strips * HV)
    n = tl.load(rows_ptr + row)
    is_map = (strip >= D // BV).to(tl.int32)
    is_entering = tl.load(borders_ptr + n) & ENTERING
    # `segment_transfer` writes M and N to HBM
    wait_then_launch_dependents()
    first = tl.load(ranges_ptr + 2 * n).to(tl.int64)
    num_segments = tl.load(ranges_ptr + 2 * n + 1)
    ks = tl.arange(0, D)
    column = strip * BV + tl.arange(0, BV)
    place = ks[:, None] * D + (column - is_map * D)[None, :]
    # the M of a first segment that no state enters is not written: it may hold anything
    is_read = (is_map == 0) | (is_entering == 1)
    S = tl.load(transfers_ptr + ((2 * first + is_map) * HV + head) * (D * D) + place, mask=is_read, other=0.0)
    for i in range(1, num_segments):
        tile = 2 * (first + i) * HV + head
        M = tl.load(transfers_ptr + (tile + HV) * (D * D) + ks[:, None] * D + ks[None, :])
        N = tl.load(transfers_ptr + tile * (D * D) + place, mask=is_map == 0, other=0.0)
        S = pass_segment(M, S, N, D)
    place = ks[:, None] * WIDTH + column[None, :]
    tl.store(folded_ptr + (row.to(tl.int64) * HV + head) * (D * WIDTH) + place, S)


@dataclass(frozen=True)
class Plan:
    """Hold the launches of one forward with borders: those of any forward, and the fold of its transfers.

    bits    [N] ENTERING and LEAVING of each sequence
    rows    the rows that leave
    """

    forward: Forward
    segments: Segments
    fold: Launch
    width: int  # columns of N | M
    bits: Tensor
    rows: Tensor

    @cached_property
    def begin(self) -> LaunchSequence:
        """Return the launches before the exchange, of the tensors of `steps` and the memory of the fold."""
        return LaunchSequence(self._begin)

    @cached_property
    def finish(self) -> LaunchSequence:
        """Return the launches after the exchange, of the tensors of `steps`."""
        return LaunchSequence(
            lambda tensors: dropwhile(lambda step: not self.is_cut(step), self.steps(tensors))
        )

    def is_cut(self, step: Step) -> bool:
        """Return True for the first launch after the exchange."""
        return step[0] is self.segments.propagate

    def steps(self, tensors: Sequence[Any]) -> Iterator[Step]:
        """Yield all launches but the fold, of the problem's tensors, those of `specs`, and the bits."""
        *given, bits = tensors
        forward = replace(self.forward, segments=replace(self.segments, borders=bits))
        first = len(Problem.declaration.tensors)
        yield from forward.steps(self.forward.problem.with_tensors(given[:first]), given[first:])

    def _begin(self, tensors: Sequence[Any]) -> Iterator[Step]:
        *given, rows, folded = tensors
        yield from takewhile(lambda step: not self.is_cut(step), self.steps(given))
        if folded is not None:
            *_, ranges, transfers, bits = given
            yield self.fold, (transfers, ranges, bits, rows, folded)


_plans: PlanCache[Plan] = PlanCache()


def forward_begin(problem: Problem, borders: Borders, save: bool) -> tuple[Tensor | None, FinishForward]:
    """Implement `Backend.forward_begin`."""
    if problem.q.numel() == 0 or problem.N == 0:
        return triton_borders.forward_begin(problem, borders, save)
    p = align(to_kernel_layout(problem))
    # the state that will enter is in fp32: plan for it, whatever the caller's is
    p = replace(p, layout_key=None, initial_state=_start_states(p, borders))
    kept = operand_dtype(p) if save else None
    with device_guard(p.device):
        plan = _plans.get((problem_key(p), kept, borders, rank_cuts(p)), lambda: _plan(p, borders, kept))
        new = allocate(p.device, plan.forward.specs)
        transfers = None
        if borders.leaving:
            shape = (len(borders.leaving), p.HV, p.K, plan.width)
            (transfers,) = allocate(p.device, [tensor_spec(shape, torch.float32)])
        plan.begin([*p.tensors(), *new, plan.bits, plan.rows, transfers])

    def finish(initial_state: State | None) -> tuple[Values, State | None, Kept]:
        given = p if initial_state is None else replace(p, initial_state=initial_state.float().contiguous())
        with device_guard(p.device):
            plan.finish([*given.tensors(), *new, plan.bits])
        o, final, saved = results(new, kept)
        *_, kept_transfers = new
        # the backward passes gradients from segment to segment by the same M
        return o, final, (*for_backward(p, saved), kept_transfers) if save else ()

    return transfers, finish


def _start_states(p: Problem, borders: Borders) -> Tensor:
    """Return the caller's states in fp32, or zeros; where all rows enter nothing reads them."""
    if p.initial_state is not None:
        return p.initial_state.float()
    if len(borders.entering) == p.N:
        return p.v.new_empty((), dtype=torch.float32).expand(p.state_shape)
    return p.v.new_zeros(p.state_shape, dtype=torch.float32)


def rank_cuts(p: Problem) -> cost.Cuts:
    """Return equal cuts into about as many segments as take the least time forward and backward."""
    longest = p.T if p.cu_seqlens_cpu is None else int(p.cu_seqlens_cpu.diff().max())
    chunks = max(1, -(-longest // CHUNK))
    count = rank_segments(p.N * p.HV, chunks, cost.num_sms(p.device), p.V // STRIP)
    return cost.equal_cuts(-(-chunks // count))


def _plan(p: Problem, borders: Borders, kept: torch.dtype | None) -> Plan:
    bits = [0] * p.N
    for row in borders.entering:
        bits[row] |= ENTERING.value
    for row in borders.leaving:
        bits[row] |= LEAVING.value
    cuts = rank_cuts(p)
    forward = plan_first(p, cuts, cost.consumers_of(p, cuts), kept)
    assert forward.segments is not None
    # without PDL: the kernel before writes the state that entered, and `propagate_states` reads it at once
    segments = replace(forward.segments, propagate=replace(forward.segments.propagate, options={}))
    widths, num_warps = PROPAGATE[p.K]
    columns, width = widths[-1], p.V + p.K if borders.with_maps else p.V
    fold = Launch(
        fold_transfers_kernel,
        len(borders.leaving) * p.HV * (width // columns),
        (p.HV,),
        {"D": p.K, "BV": columns, "WIDTH": width},
        num_warps,
        options=PDL,
    )
    with torch.inference_mode(False):
        flags = torch.tensor(bits, dtype=torch.int32, device=p.device)
    return Plan(forward, segments, fold, width, flags, row_index(borders.leaving, p.device))
