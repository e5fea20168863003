"""Cut the chunked forward where a rank exchanges states with others: between `segment_transfer` and the scan.

    begin     gates, solve, plan_segments, segment_transfer; fold_transfers: N | M of the rows that leave
    finish    propagate_states, from the states that entered; the state scan

A rank cuts its tokens into segments as one GPU does, so that N | M of all its tokens is the fold of theirs,
and no token is scanned more often than on one GPU. Only the first segment of a row that enters has an M more,
and the last segment of a row that leaves an M and N.
"""

from dataclasses import dataclass, replace

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
from gdn.backends.triton.launch import Launch, PlanCache, allocate, device_guard, kernel, tensor_spec
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
    Grid: rows x HV x WIDTH / BV.  Warps: 8 at K = 128, 4 at K = 64.  Shared memory: Triton's, for MMA operands.
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
    """Hold the launches of one forward with borders: those of any forward, and the fold of its transfers."""

    forward: Forward
    segments: Segments
    fold: Launch


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
        # each TMA descriptor is made before its first launch: the GPU begins while the host makes the next
        steps = plan.forward.steps(p, new)
        for launch, tensors in steps:
            if launch is plan.segments.propagate:
                break
            launch(*tensors)
        transfers = None
        if borders.leaving:
            transfers = _fold(p, plan, borders, new)

    def finish(initial_state: State | None) -> tuple[Values, State | None, Kept]:
        *before, given, states, bits = tensors
        given = given if initial_state is None else initial_state.float().contiguous()
        with device_guard(p.device):
            plan.segments.propagate(*before, given, states, bits)
            for launch, others in steps:
                launch(*others)
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


def _fold(p: Problem, plan: Plan, borders: Borders, new: list[Tensor | None]) -> Tensor:
    """Return N | M of the rows that leave, [leaving, HV, K, V+K]; N alone where no rank needs M."""
    *_, ranges, transfers = new
    shape = (len(borders.leaving), p.HV, p.K, _width(p, borders))
    (folded,) = allocate(p.device, [tensor_spec(shape, torch.float32)])
    assert folded is not None
    plan.fold(transfers, ranges, plan.segments.borders, row_index(borders.leaving, p.device), folded)
    return folded


def _width(p: Problem, borders: Borders) -> int:
    """Return the columns of N | M that ranks exchange."""
    return p.V + p.K if borders.with_maps else p.V


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
    segments = replace(
        forward.segments,
        borders=torch.tensor(bits, dtype=torch.int32, device=p.device),
        propagate=replace(forward.segments.propagate, options={}),
    )
    widths, num_warps = PROPAGATE[p.K]
    columns = widths[-1]
    fold = Launch(
        fold_transfers_kernel,
        len(borders.leaving) * p.HV * (_width(p, borders) // columns),
        (p.HV,),
        {"D": p.K, "BV": columns, "WIDTH": _width(p, borders)},
        num_warps,
        options=PDL,
    )
    return Plan(replace(forward, segments=segments), segments, fold)
