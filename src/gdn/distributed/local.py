"""Call the operators of the rule on the tokens of one rank: forward, backward, transfers of its runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gdn.distributed.plan import Plan
from gdn.ops import library
from gdn.problem import Problem

MAX_COLUMNS = 256  # value columns of one call: the limit of the kernels

# the tensors of a problem that have gradients, in the order of Problem.differentiable
NAMES = library.DIFFERENTIABLE

Saved: TypeAlias = tuple[Tensor | None, ...]


def with_tensors(problem: Problem, tensors: Sequence[Tensor | None]) -> Problem:
    """Return the problem with other tensors, in the order of NAMES."""
    changes: dict[str, Any] = dict(zip(NAMES, tensors, strict=True))
    return replace(problem, **changes)


def forward(problem: Problem, save: bool) -> tuple[Tensor, Tensor, Saved]:
    """Return o, final_state and the tensors that a backward needs; no gradient is recorded."""
    o, final, *saved = library.chunk_forward(*problem.arguments(), save)
    kept = (None if x.dim() == 1 or not save else x for x in saved)
    return o, final, tuple(kept)


def backward(problem: Problem, saved: Saved, do: Tensor | None, dS: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of `problem.differentiable`, in order; None for an argument that is None."""
    found = library.chunk_backward(*problem.arguments(), *saved, do, dS)
    given = problem.differentiable
    return [None if x is None else y for x, y in zip(given, found, strict=True)]


def transfers(problem: Problem, plan: Plan) -> Tensor:
    """Return N | M of the pieces that leave this rank, [leaving, HV, K, V+K]; M = 0 where one begins here.

        [N | M] = final state of rule(q, k, [v | 0]) with the initial state [S_0 | 0] or [0 | I]

    Columns of a state do not mix, so one call of the ordinary operator gives both. It has V + K columns; more
    than 256 are one call for N and one for M. problem.initial_state: rows of the pieces, or None.
    """
    p, (K, V) = cut(problem, plan, [place.row for place in plan.leaving]), (problem.K, problem.V)
    enters = [not plan.pieces[place.row].is_first for place in plan.leaving]
    S = p.v.new_zeros(len(enters), p.HV, K, V + K, dtype=p.state_dtype)
    came_in = torch.tensor(enters, device=S.device)[:, None, None, None]
    if p.initial_state is not None:
        S[..., :V] = p.initial_state.mT if p.state_v_first else p.initial_state
        # a row that is not the start of its sequence may hold anything
        S[..., :V].masked_fill_(came_in, 0)
    S[..., V:] = torch.where(came_in, torch.eye(K, dtype=S.dtype, device=S.device), 0)
    p = replace(p, state_v_first=False, output_final_state=True)
    if not any(enters):
        N = forward(replace(p, initial_state=S[..., :V].contiguous()), False)[1]
        return torch.cat([N, S[..., V:]], -1)
    zeros = p.v.new_zeros(*p.v.shape[:3], K)
    if V + K <= MAX_COLUMNS:
        return forward(replace(p, v=torch.cat([p.v, zeros], -1), initial_state=S), False)[1]
    N, M = S.split([V, K], -1)
    _, N, _ = forward(replace(p, initial_state=N.contiguous()), False)
    _, M, _ = forward(replace(p, v=zeros, initial_state=M.contiguous()), False)
    return torch.cat([N, M], -1)


def cut(problem: Problem, plan: Plan, rows: Sequence[int]) -> Problem:
    """Return the problem of some pieces only, side by side."""
    if len(rows) == len(plan.pieces):
        return problem
    assert plan.offsets is not None, "pieces of one run each leave together"
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + plan.offsets[row + 1] - plan.offsets[row])
    parts = [slice(plan.offsets[row], plan.offsets[row + 1]) for row in rows]

    def tokens(x: Tensor | None) -> Any:
        return None if x is None else torch.cat([x[:, part] for part in parts], 1)

    p = problem
    S = p.initial_state
    return replace(
        p, q=tokens(p.q), k=tokens(p.k), v=tokens(p.v), g=tokens(p.g), beta=tokens(p.beta),
        initial_state=None if S is None else S[list(rows)],
        cu_seqlens=torch.tensor(ends, device=p.q.device), cu_seqlens_cpu=torch.tensor(ends),
    )  # fmt: skip
