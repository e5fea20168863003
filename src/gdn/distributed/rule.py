"""Compute the gated delta rule on the tokens of one rank, with states exchanged between runs.

    forward     begin: N | M of the runs of this rank; exchange; finish: o, S_out from the S_in of these runs
    backward    begin: C of the runs; exchange; finish: the gradients, from the dS_out of these runs

The backend does both halves (`gdn.ops.borders`), and keeps what they share on the device between them. One
autograd node does all of it. Every rank reaches it, also a rank without tokens and one whose gradients nobody
wants, so that a collective is in the backward of all ranks or of none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gdn.distributed import local
from gdn.distributed.exchange import Exchange
from gdn.distributed.local import NAMES
from gdn.distributed.plan import Place, Plan, index
from gdn.ops import borders
from gdn.problem import Problem

Outputs: TypeAlias = tuple[Tensor, Tensor | None, local.Saved]


@dataclass(frozen=True)
class Call:
    """Hold one checked call on the tokens of one rank, without the tensors of NAMES.

    problem    offsets are local, and states have a row for each piece
    exchange   None: no sequence crosses a border; every rank knows this, and there is no collective
    """

    problem: Problem
    plan: Plan
    exchange: Exchange | None


def rule(problem: Problem, plan: Plan, exchange: Exchange | None) -> tuple[Tensor, Tensor | None]:
    """Return o and the state after each local piece (None unless the problem asks for it), with gradients."""
    call = Call(local.with_tensors(problem, (None,) * len(NAMES)), plan, exchange)
    return _Rule.apply(call, *problem.differentiable)  # type: ignore[no-any-return]


class _Rule(torch.autograd.Function):
    """Differentiate `rule`."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        plan, exchange = call.plan, call.exchange
        problem = local.with_tensors(call.problem, tensors)
        save, maps = any(ctx.needs_input_grad), None
        transfers, finish = begin(problem, plan, exchange, save)
        if exchange is not None:
            states, maps = exchange.states(to_slots(problem, plan, transfers), problem.V)
            if plan.entering:
                problem = replace(problem, initial_state=entering_rows(problem, plan, states))
        o, final, saved = finish(problem.initial_state)
        given = problem.initial_state if tensors[-1] is None else tensors[-1]
        ctx.call, ctx.dtype = call, None if given is None else given.dtype
        ctx.save_for_backward(*tensors[:-1], problem.initial_state, maps, *saved)
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None) -> tuple[Any, ...]:
        call, plan, exchange = ctx.call, ctx.call.plan, ctx.call.exchange
        kept = ctx.saved_tensors  # read once: activation checkpointing unpacks each tensor once
        tensors, (maps, *saved) = kept[: len(NAMES)], kept[len(NAMES) :]
        problem = local.with_tensors(call.problem, tensors)
        C, finish = begin_backward(problem, call, saved, do, dS)
        if exchange is not None:
            d = exchange.gradients(maps, to_slots(problem, plan, C, plan.entering, num_maps=0))
            if plan.leaving:
                dS = add_rows(problem, plan, dS, d)
        gradients = finish(dS)
        if gradients[-1] is not None:
            # the state of these rows came from another rank: the caller's rows were not read
            entering = index([place.row for place in plan.entering], problem.device)
            gradients[-1] = gradients[-1].index_fill(0, entering, 0).to(ctx.dtype)
        needs = ctx.needs_input_grad[1:]
        return (None, *(x if need else None for x, need in zip(gradients, needs, strict=True)))


def begin(
    problem: Problem, plan: Plan, exchange: Exchange | None, save: bool
) -> tuple[Tensor | None, Callable[[Tensor | None], Outputs]]:
    """Begin the forward; return N | M of the rows that leave (None: there is none), and the rest of it."""
    if exchange is None or problem.N == 0:
        return None, lambda initial_state: local.forward(problem, save)
    return borders.forward_begin(problem, plan.borders, save)


def begin_backward(
    problem: Problem, call: Call, saved: Sequence[Tensor | None], do: Tensor | None, dS: Tensor | None
) -> tuple[Tensor | None, Callable[[Tensor | None], list[Tensor | None]]]:
    """Begin the backward; return C of the rows that enter, and the rest of it: from dS, the gradients."""
    if call.exchange is None or problem.N == 0:
        return None, lambda dS: local.backward(problem, tuple(saved), do, dS)
    return borders.backward_begin(problem, tuple(saved), do, dS, call.plan.borders)


def to_slots(
    problem: Problem, plan: Plan, rows: Tensor | None, places: Sequence[Place] | None = None,
    num_maps: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the rows [places, HV, K, ...] at their slots, zero elsewhere: [slots, B, HV, K, V + num_maps].

    places: those that leave, by default; num_maps: the columns of M, K by default.
    """
    p, places = problem, plan.leaving if places is None else places
    columns = p.V + (p.K if num_maps is None else num_maps)
    out = p.v.new_zeros(plan.table.num_slots, plan.batch, p.HV, p.K, columns, dtype=p.state_dtype)
    if rows is not None:
        slots, batch = (index([getattr(x, name) for x in places], p.device) for name in ("slot", "batch"))
        out[slots, batch, ..., : rows.shape[-1]] = rows
    return out


def take(states: Tensor | None, places: Sequence[Place], problem: Problem) -> Tensor:
    """Return the rows of local states at the places, [places, HV, K, V]."""
    assert states is not None
    rows = states[index([place.row for place in places], states.device)]
    return rows.mT if problem.state_v_first else rows


def entering_rows(problem: Problem, plan: Plan, states: Tensor) -> Tensor:
    """Return the initial states of the pieces: S_in [slots, B, HV, K, V] where one enters, the caller's."""
    p = problem
    rows = p.v.new_zeros(p.state_shape, dtype=p.state_dtype)
    if p.initial_state is not None:
        rows.copy_(p.initial_state)
    return _put(rows, plan.entering, states, p.state_v_first)


def add_rows(problem: Problem, plan: Plan, dS: Tensor | None, d: Tensor) -> Tensor:
    """Return dS plus dS_out [slots, B, HV, K, V] at the pieces that leave."""
    p = problem
    rows = p.v.new_zeros(p.state_shape, dtype=p.state_dtype)
    rows = _put(rows, plan.leaving, d, p.state_v_first)
    return rows if dS is None else rows + dS


def _put(rows: Tensor, places: Sequence[Place], states: Tensor, is_v_first: bool) -> Tensor:
    """Write states [slots, B, HV, K, V] to the rows of the places."""
    slots, batch, row = (
        index([getattr(x, name) for x in places], rows.device) for name in ("slot", "batch", "row")
    )
    received = states[slots, batch]
    rows[row] = received.mT if is_v_first else received
    return rows
