"""Cut the chunked backward where a rank exchanges gradients of states: between two reverse state scans.

    begin     backward_factors; reverse_scan of all segments at once, each from no gradient of its end; C of
              the rows that enter, from those of the segments:  dS_start = M^T dS_end + C
    finish    the gradients at the ends of all segments; reverse_scan from these; gradients, gates_bwd

The segments, and M of each, are those of the forward. To the kernels they are packed sequences: chunks keep
their numbers, as all segments but the last have whole chunks. Two scans of many segments on all SMs take less
time than one scan of a long sequence on some.
"""

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from gdn.backends.backend import Borders, FinishBackward, Gradients, Kept
from gdn.backends.borders import row_index, saved_of
from gdn.backends.hopper.backward import plan as backward
from gdn.backends.hopper.borders import rank_cuts
from gdn.backends.hopper.descriptors import align
from gdn.backends.triton.launch import allocate, device_guard
from gdn.backends.triton.rule import borders as triton_borders
from gdn.backends.triton.rule.describe import to_kernel_layout
from gdn.problem import CHUNK, Problem


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
    # from no gradient where one will come from another rank, so that C is right for any
    ends = _like_states(p, p.N).clone()
    if dS is not None:
        final = tuple(row for row in range(len(rows)) if cut is None or row not in borders.leaving)
        lasts = row_index(tuple(rows[row][1] for row in final), p.device)
        ends.index_copy_(0, lasts, dS[row_index(final, p.device)].float())
    with device_guard(p.device):
        # no segments of the plan's own: `finish` runs the scan again, from other ends
        plan = backward.plan_of(p, saved, do, ends, is_cut=True)
        new, late = allocate(p.device, plan.specs), allocate(p.device, plan.late)
        for launch, tensors in plan.steps(p, saved, do, ends, new, late):
            launch(*tensors)
            if launch is plan.scan:
                break
        _, _, _, starts, *_ = new
        assert starts is not None
        C = starts.mT if p.state_v_first else starts
        fold = Fold(
            rows, borders, None if cut is None else transfers, C.clone(memory_format=torch.contiguous_format)
        )
        entering = None
        if borders.entering:
            given = [None if dS is None else dS[row] for row in borders.entering]
            if p.state_v_first:
                given = [None if x is None else x.mT for x in given]
            passed = [fold.pass_back(row, d) for row, d in zip(borders.entering, given, strict=True)]
            entering = torch.stack([start for _, start in passed if start is not None])

    def finish(dS: Tensor | None) -> Gradients:
        with device_guard(p.device):
            for row, (first, last) in enumerate(rows):
                if first == last and row not in borders.leaving:
                    continue
                d = None if dS is None else dS[row].mT if p.state_v_first else dS[row]
                for i, end in zip(range(first, last + 1), fold.pass_back(row, d)[0], strict=True):
                    if end is not None:
                        ends[i] = end.mT if p.state_v_first else end
            steps = plan.steps(p, saved, do, ends, new, late)
            for launch, tensors in itertools.dropwhile(lambda step: step[0] is not plan.scan, steps):
                launch(*tensors)
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

    problem: Problem
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
    return Cut(cut, rows)


@lru_cache(maxsize=256)
def _segments(ends: tuple[int, ...], length: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Return the offsets of all segments of so many tokens, and the first and last segment of each row."""
    offsets, rows = [ends[0]], []
    for start, stop in itertools.pairwise(ends):
        first = len(offsets) - 1
        offsets += [*range(start + length, stop, length), stop]
        rows.append((first, len(offsets) - 2))
    return tuple(offsets), tuple(rows)


def _like_states(p: Problem, count: int) -> Tensor:
    """Return zero states of so many rows, a view of one number: the kernels read only their dtype."""
    return p.v.new_zeros((), dtype=torch.float32).expand(count, *p.state_shape[1:])


@dataclass(frozen=True)
class Fold:
    """Pass the gradient of a row's last state back through its segments.

    transfers  M of segment i at 2 i + 1, K first; None: a row is one segment, and C has the caller's gradient
    C          gradient of the state that each segment starts from, for no gradient of its end; for the last
               segment of a row that does not leave, for the caller's
    """

    rows: tuple[tuple[int, int], ...]
    borders: Borders
    transfers: Tensor | None
    C: Tensor

    def pass_back(self, row: int, d: Tensor | None) -> tuple[list[Tensor | None], Tensor | None]:
        """Return the gradients at the ends of the row's segments, and at its start if its state entered.

        d: the gradient of the row's last state; None: zero.
        """
        first, last = self.rows[row]
        ends, start = [d], self.C[last]
        is_entering = row in self.borders.entering
        if row in self.borders.leaving and d is not None and (first < last or is_entering):
            start = self._multiply(last, d)
        for i in range(last - 1, first - 1, -1):
            ends.append(start)
            if i > first or is_entering:
                start = self._multiply(i, start)
        return ends[::-1], start if is_entering else None

    def _multiply(self, i: int, d: Tensor) -> Tensor:
        """Return M_i^T d + C_i in fp32, one product of each head."""
        if self.transfers is None:
            return self.C[i]
        return torch.baddbmm(self.C[i], self.transfers[2 * i + 1].mT, d.float())
