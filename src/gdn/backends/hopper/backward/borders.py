"""Cut the chunked backward where a rank exchanges gradients of states: before the reverse state scan.

    begin     backward_factors; reverse_transfer of all segments at once: C, the gradient of each one's start
              for no gradient of its end; C of the rows that enter, from those of the segments:
              dS_start = M^T dS_end + C
    finish    the gradients at the ends of all segments; reverse_scan from these; gradients, gates_bwd

The segments, and M of each, are those of the forward. To the kernels they are packed sequences: chunks keep
their numbers, as all segments but the last have whole chunks. A transfer and a scan of many segments on all
SMs take less time than one scan of a long sequence on some. Rows of a batch are not cut: `reverse_scan` then
takes the place of the transfer.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from gdn.backends.backend import Borders, FinishBackward, Gradients, Kept, Saved
from gdn.backends.borders import row_index, saved_of
from gdn.backends.hopper.backward import plan as backward
from gdn.backends.hopper.backward.saved import inverse_dtype
from gdn.backends.hopper.backward.segments import plan_transfer
from gdn.backends.hopper.borders import rank_cuts
from gdn.backends.hopper.descriptors import align
from gdn.backends.hopper.scans import STRIP
from gdn.backends.triton.launch import (
    Launch,
    LaunchSequence,
    PlanCache,
    Step,
    allocate,
    device_guard,
    tensor_spec,
)
from gdn.backends.triton.rule import borders as triton_borders
from gdn.backends.triton.rule.describe import problem_key, shape_scalars, to_kernel_layout
from gdn.backends.triton.rule.propagate import propagate_states
from gdn.problem import CHUNK, Problem
from gdn.problem.propagate import PropagateProblem, RunStep


def backward_begin(
    problem: Problem, kept: Kept, do: Tensor | None, dS: Tensor | None, borders: Borders
) -> tuple[Tensor | None, FinishBackward]:
    """Implement `Backend.backward_begin`."""
    saved = saved_of(kept)
    rest = kept[len(tuple(saved)) :]
    if backward.lacks(problem, saved) is not None or not backward.HAS_SCAN:
        return triton_borders.backward_begin(problem, kept, do, dS, borders)
    p = align(to_kernel_layout(problem))
    saved, do = backward.backward_inputs(p, saved, do)
    transfers = rest[0] if rest else None
    cut = _cut(p) if transfers is not None else None
    rows = tuple((n, n) for n in range(p.N)) if cut is None else cut.rows
    p = replace(p, layout_key=None, initial_state=_like_states(p, p.N)) if cut is None else cut.problem
    dS = None if dS is None else dS.float().contiguous()
    ends = p.v.new_empty((p.N, *p.state_shape[1:]), dtype=torch.float32)
    # rows whose last segment starts from the caller's gradient
    final = () if cut is None or dS is None else tuple(set(range(len(rows))) - set(borders.leaving))
    with device_guard(p.device):
        key = (
            problem_key(p), do.stride(), inverse_dtype(saved),
            None if cut is None else (cut, borders.entering, final),
        )  # fmt: skip
        plan = _plans.get(key, lambda: _plan(p, saved, do, ends, cut, borders, final))
        new, late = allocate(p.device, plan.backward.specs), allocate(p.device, plan.backward.late)
        given = [*p.tensors(), *saved, do, ends, *late, *new]
        if cut is None:
            write_rows(ends, dS)
            _, _, _, starts, *_ = new
            assert starts is not None
            C = starts.mT if p.state_v_first else starts
            plan.begin([*given, None, None, None])
        else:
            # N of a segment is at an even place; M, which the forward has computed, would be at the odd one
            (both,) = allocate(p.device, [tensor_spec((2 * p.N, p.HV, p.K, p.V), torch.float32)])
            assert both is not None
            C = both[::2]
            plan.begin([*given, plan.items, ends if dS is None else dS, both])
        fold = Fold(rows, borders, None if cut is None else transfers, C)
        entering = fold.starts(dS, p.state_v_first) if borders.entering else None

    def finish(dS: Tensor | None) -> Gradients:
        with device_guard(p.device):
            fold.write_ends(ends, dS, p.state_v_first)
            plan.finish(given)
        gradients = backward.backward_results(new, late)
        if problem.initial_state is None:
            return replace(gradients, dinitial_state=None)
        assert gradients.dinitial_state is not None
        firsts = gradients.dinitial_state[row_index(tuple(first for first, _ in rows), p.device)]
        return replace(gradients, dinitial_state=firsts.to(problem.initial_state.dtype))

    return entering, finish


@dataclass(frozen=True)
class Cut:
    """Hold a problem whose sequences are segments, and the first and last segment of each row."""

    problem: Problem = field(compare=False)
    offsets: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]


def _cut(p: Problem) -> Cut | None:
    """Return the problem in segments of the forward, or None if the host does not know them."""
    if p.B > 1 or (p.cu_seqlens is not None and p.cu_seqlens_cpu is None):
        return None
    ends = (0, p.T) if p.cu_seqlens_cpu is None else tuple(p.cu_seqlens_cpu.tolist())
    offsets, rows = _segments(ends, rank_cuts(p).many.long * CHUNK)
    device, host = row_index(offsets, p.device), row_index(offsets, torch.device("cpu"))
    states = _like_states(p, len(offsets) - 1)
    cut = replace(p, layout_key=None, cu_seqlens=device, cu_seqlens_cpu=host, initial_state=states)
    return Cut(cut, offsets, rows)


@lru_cache(maxsize=256)
def _segments(ends: tuple[int, ...], length: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Return the offsets of all segments of so many tokens, and the first and last segment of each row."""
    offsets, rows = [ends[0]], []
    for start, stop in itertools.pairwise(ends):
        first = len(offsets) - 1
        offsets += [*range(start + length, stop, length), stop]
        rows.append((first, len(offsets) - 2))
    return tuple(offsets), tuple(rows)


@dataclass(frozen=True)
class Plan:
    """Hold the launches of one backward with borders: those of any backward without cuts, and the transfer.

    transfer   `reverse_transfer` of all segments, and its work items; None: rows are not cut. It computes C,
               the gradient of the state that each segment starts from, for no gradient of its end; for the
               last segment of a row that does not leave, for the caller's. The C of a row's first segment is
               undefined unless the row enters: nothing reads it.
    """

    backward: backward.Plan
    transfer: Launch | None
    items: Tensor | None

    @cached_property
    def begin(self) -> LaunchSequence:
        """Return the launches before the exchange: of the tensors of `backward.Plan.run`, items, dS, C."""
        return LaunchSequence(self._begin)

    @cached_property
    def finish(self) -> LaunchSequence:
        """Return the launches after the exchange, of the tensors of `backward.Plan.run`."""
        steps = self.backward.run.steps
        return LaunchSequence(
            lambda tensors: itertools.dropwhile(lambda step: not self.is_scan(step), steps(tensors))
        )

    def is_scan(self, step: Step) -> bool:
        """Return True for the first launch after the exchange."""
        return step[0] is self.backward.scan

    def _begin(self, tensors: Sequence[Any]) -> Iterator[Step]:
        *given, items, dS, starts = tensors
        for step in self.backward.run.steps(given):
            if not self.is_scan(step):
                yield step
                continue
            # the scan of whole rows from the gradients before the exchange, or the transfer of segments
            yield step if self.transfer is None else (self.transfer, (*step[1][:5], items, dS, starts))
            return


_plans: PlanCache[Plan] = PlanCache()


def _plan(
    p: Problem, saved: Saved, do: Tensor, ends: Tensor, cut: Cut | None, borders: Borders,
    final: tuple[int, ...],
) -> Plan:  # fmt: skip
    # no segments of the plan's own: the segments are sequences of this one
    whole = backward.plan_of(p, saved, do, ends, is_cut=True)
    return Plan(whole, *((None, None) if cut is None else _plan_transfer(p, cut, borders, final)))


def _plan_transfer(
    p: Problem, cut: Cut, borders: Borders, final: tuple[int, ...]
) -> tuple[Launch, Tensor]:  # fmt: skip
    """Return the launch of `reverse_transfer` for N of all segments, and its work items."""
    unread = {first for row, (first, _) in enumerate(cut.rows) if row not in borders.entering}
    start_from = {cut.rows[row][1]: row for row in final}
    fields, chunk = [], 0
    for i, (start, stop) in enumerate(itertools.pairwise(cut.offsets)):
        length = 0 if i in unread else stop - start
        # row, first token, tokens, first chunk, where C is stored, where dS starts from: see `scheduler`
        fields.append([0, start, length, chunk, -1 if i in unread else 2 * i, start_from.get(i, -1)])
        chunk += -(-(stop - start) // CHUNK)
    consumers = backward.consumers_of(p)
    with torch.inference_mode(False):
        items = torch.tensor(fields, dtype=torch.int32, device=p.device).repeat_interleave(p.HV, 0)
    count = len(fields) * p.HV * (p.V // STRIP // consumers)
    return plan_transfer(p, consumers, count, shape_scalars(p)[:3]), items


def _like_states(p: Problem, count: int) -> Tensor:
    """Return states of so many rows, a view of one number: the kernels read only their dtype."""
    return p.v.new_empty((), dtype=torch.float32).expand(count, *p.state_shape[1:])


def write_rows(ends: Tensor, dS: Tensor | None) -> None:
    """Write the caller's gradients, or zeros."""
    if dS is None:
        ends.zero_()
    else:
        ends.copy_(dS)


@dataclass(frozen=True)
class Fold:
    """Pass the gradient of a row's last state back through its segments, in one launch.

    transfers  M of segment i at 2 i + 1, K first; None: a row is one segment, and its C has the caller's
               gradient
    C          gradient of the state that each segment starts from, for no gradient of its end; for the last
               segment of a row that does not leave, for the caller's
    """

    rows: tuple[tuple[int, int], ...]
    borders: Borders
    transfers: Tensor | None
    C: Tensor

    def starts(self, dS: Tensor | None, is_v_first: bool) -> Tensor:
        """Return the gradients at the starts of the rows that enter, [entering, HV, K, V]."""
        entering = self.borders.entering
        if self.transfers is None:
            return self.C[row_index(entering, self.C.device)]
        out = self.C.new_empty(len(entering), *self.C.shape[1:])
        for i, row in enumerate(entering):
            first, last = self.rows[row]
            d = self._row_gradient(row, dS, is_v_first)
            steps = [self._step(row, j, -1, d) for j in range(last, first - 1, -1)]
            self._pass_back(out, d, (*steps, RunStep(i, -1, -1)))
        return out

    def write_ends(self, ends: Tensor, dS: Tensor | None, is_v_first: bool) -> None:
        """Write the gradients at the ends of all segments, in the layout of the caller."""
        if self.transfers is None:
            write_rows(ends, dS)
            return
        out = ends.mT if is_v_first else ends
        for row, (first, last) in enumerate(self.rows):
            if first == last:
                write_rows(ends[last], None if dS is None else dS[row])
                continue
            d = self._row_gradient(row, dS, is_v_first)
            steps = [self._step(row, j, j, d) for j in range(last, first, -1)]
            self._pass_back(out, d, (*steps, RunStep(first, -1, -1)))

    def _row_gradient(self, row: int, dS: Tensor | None, is_v_first: bool) -> Tensor | None:
        """Return the gradient of a row's last state, K first; None: zero."""
        if dS is None:
            return None
        return (dS[row].mT if is_v_first else dS[row]).float()

    def _step(self, row: int, i: int, store: int, d: Tensor | None) -> RunStep:
        """Return dS_start = M_i^T dS_end + C_i. C of a last segment has the caller's gradient already."""
        is_last = i == self.rows[row][1]
        has_map = not is_last or (row in self.borders.leaving and d is not None)
        return RunStep(store, i, 2 * i + 1 if has_map else -1)

    def _pass_back(self, out: Tensor, d: Tensor | None, steps: tuple[RunStep, ...]) -> None:
        """Launch the steps of one row. out: [rows or segments, HV, K, V]."""
        assert self.transfers is not None
        C, maps, dst = (x[:, None, None] for x in (self.C, self.transfers, out))
        propagate_states(
            PropagateProblem(dst, C, maps, None if d is None else d[None], steps, is_transposed=True)
        )
