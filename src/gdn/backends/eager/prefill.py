"""Prefill and commit with plain PyTorch: gather from the pool, the chunked rule, scatter into the pool.

With batch_invariant=True each sequence runs by itself, since the rounding of a matmul may depend on its batch
size. Index tensors are read on the host, and every read of the pool precedes the first write.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gdn.backends.backend import Saved
from gdn.backends.eager.integers import ColumnStates, read_states, states_of
from gdn.backends.eager.rule import chunk_forward
from gdn.problem import CHUNK, CommitProblem, PrefillProblem, Problem


@dataclass(frozen=True)
class RuleCall:
    """Hold one call of the rule on neighbouring sequences: their offsets, and states in the pool's layout."""

    rule: Problem
    bounds: list[int]
    initial: Tensor
    final: Tensor
    saved: Saved

    def state_after(self, n: int, count: int) -> Tensor:
        """Return the state after `count` tokens of sequence n, from the saved state of the chunk before."""
        start, end = self.bounds[n], self.bounds[n + 1]
        if count == 0:
            return self.initial[n]
        if count == end - start:
            return self.final[n]
        assert self.saved.S_in is not None
        chunks = [-(-(b - a) // CHUNK) for a, b in zip(self.bounds[:n], self.bounds[1:], strict=False)]
        S = self.saved.S_in[sum(chunks) + count // CHUNK]
        S = S.mT if self.rule.state_v_first else S
        if count % CHUNK == 0:
            return S
        # at most 63 tokens from the saved state at the chunk's start, instead of the whole prefix
        rest = _slice_tokens(self.rule, start + count // CHUNK * CHUNK, start + count)
        final = chunk_forward(replace(rest, initial_state=S[None], cu_seqlens=None), False)[1]
        assert final is not None
        return final[0]


def prefill(problem: PrefillProblem) -> None:
    """Implement `Backend.prefill`: write problem.state, problem.checkpoints, problem.out and cursors."""
    p = problem
    bounds = p.offsets(read_device=True)
    assert bounds is not None
    slots = p.state_index.tolist()
    valid = [n for n in range(p.N) if p.is_slot(slots[n])]
    groups = [(n, n + 1) for n in valid] if p.batch_invariant else [(0, p.N)] if valid else []
    # tokens of sequences without a slot keep these zeros
    o = torch.zeros(p.out.shape, dtype=p.out.dtype, device=p.q.device)
    writes: list[tuple[Tensor | ColumnStates, Tensor]] = []
    for first, last in groups:
        out, call = _run_rule(p, slots, bounds, first, last)
        for n in range(first, last):
            if p.is_slot(slots[n]):
                tokens = slice(bounds[n] - bounds[first], bounds[n + 1] - bounds[first])
                o[0, bounds[n] : bounds[n + 1]] = out[0, tokens]
                writes += _state_writes(p, call, n, n - first, bounds[n + 1] - bounds[n])
    p.out.copy_(o)
    # after all reads of the pool: a slot may be one sequence's target and another one's source
    for target, S in writes:
        target.copy_(S)
    if p.cursor is not None:
        written = {slot for n in valid for slot in _written_slots(p, n, bounds[n + 1] - bounds[n])}
        for slot in written:
            p.cursor[slot] = 0


def _run_rule(
    p: PrefillProblem, slots: list[int], bounds: list[int], first: int, last: int
) -> tuple[Tensor, RuleCall]:
    """Run sequences first:last; one without a valid slot starts from zero, and its results are not used."""
    has_state = [True] * p.N if p.has_initial_state is None else p.has_initial_state.tolist()
    states = states_of(p)
    initial = torch.zeros(last - first, *p.state.shape[1:], dtype=p.dtype, device=p.q.device)
    for n in range(first, last):
        if has_state[n] and p.is_slot(slots[n]):
            initial[n - first].copy_(read_states(states[slots[n]], p.dtype))
    offsets = [x - bounds[first] for x in bounds[first : last + 1]]
    # one sequence is a dense batch: its blocks are views, those of a packed one are gathered copies
    cu_seqlens = None if len(offsets) == 2 else torch.tensor(offsets, device="cpu")
    rule = replace(
        _slice_tokens(p.rule, bounds[first], bounds[last]), initial_state=initial, cu_seqlens=cu_seqlens
    )
    out, final, saved = chunk_forward(rule, p.keeps_states)
    assert final is not None
    return out, RuleCall(rule, offsets, initial, final, saved)


def _state_writes(
    p: PrefillProblem, call: RuleCall, n: int, i: int, count: int
) -> Iterator[tuple[Tensor | ColumnStates, Tensor]]:
    """Yield (view of the caller's tensor, new state) for sequence n, the call's i-th, of `count` tokens."""
    if p.checkpoints is not None and p.checkpoint_offsets is not None:
        row = int(p.checkpoint_offsets[n])
        for end in range(p.checkpoint_every, count + 1, p.checkpoint_every) if row >= 0 else ():
            if row < p.checkpoints.shape[0]:
                yield p.checkpoints[row], call.state_after(i, end)
            row += 1
    for slot, position in _written_slots(p, n, count).items():
        yield states_of(p)[slot], call.state_after(i, position)


def _written_slots(p: PrefillProblem, n: int, count: int) -> dict[int, int]:
    """Return the slots that sequence n of `count` tokens writes, and after how many tokens."""
    written = {}
    if p.snapshot_pos is not None and p.snapshot_index is not None:
        written[int(p.snapshot_index[n])] = int(p.snapshot_pos[n])
    written = {slot: position for slot, position in written.items() if 0 <= position <= count}
    if p.update_state and count > 0:
        written[int((p.state_index if p.out_state_index is None else p.out_state_index)[n])] = count
    return {slot: position for slot, position in written.items() if p.is_slot(slot)}


def _slice_tokens(rule: Problem, start: int, end: int) -> Problem:
    """Return the problem with only tokens start:end."""
    q, k, v = (x[:, start:end] for x in (rule.q, rule.k, rule.v))
    g, beta = (None if x is None else x[:, start:end] for x in (rule.g, rule.beta))
    return replace(rule, q=q, k=k, v=v, g=g, beta=beta)


def commit(problem: CommitProblem) -> None:
    """Implement `Backend.commit`: write problem.dst, one strided copy of all layers per row, no temporary.

    States for an Int16Pool are rounded in fp32, or in fp64 where they are in fp64.
    """
    p, dst = problem, problem.dst
    wide = torch.promote_types(p.src.dtype, torch.float32)
    pool = None if p.column_scale is None else ColumnStates(dst, p.column_scale, p.state_v_first)
    slots, (rows, T) = p.dst.shape[1], p.src.shape[1:3]
    copies = [(p.dst_index, p.step)]
    if p.extra_dst_index is not None and p.extra_step is not None:
        copies.append((p.extra_dst_index, p.extra_step))
    for dst_index, step in copies:
        for d, r, t in zip(dst_index.tolist(), p.src_row.tolist(), step.tolist(), strict=True):
            if 0 <= d < slots and 0 <= r < rows and 0 <= t < T:
                if pool is None:
                    dst[:, d].copy_(p.src[:, r, t])
                else:
                    pool[:, d].copy_(p.src[:, r, t].to(wide))
