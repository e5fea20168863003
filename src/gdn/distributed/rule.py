"""Compute the gated delta rule on the tokens of one rank, with states exchanged between runs.

    begin     N | M of the runs of this rank; exchange; S_in of these runs
    finish    o, S_out = rule(local tokens, first pieces start from S_in)
    backward  C of the runs; exchange; dS_out; the gradients of the local call, where dS_out is added

One autograd node does all of it. Every rank reaches it, also a rank without tokens and one whose gradients
nobody wants, so that a collective is in the backward of all ranks or of none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gdn.distributed import local
from gdn.distributed.exchange import Exchange
from gdn.distributed.local import NAMES
from gdn.distributed.plan import Place, Plan, index
from gdn.problem import Problem


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
        save, with_final = any(ctx.needs_input_grad), problem.output_final_state
        maps = None
        if exchange is None:
            o, final, saved = run(problem, with_final, save)
        elif plan.entering:
            N_M = local.transfers(problem, plan) if plan.leaving else None
            states, maps = exchange.states(to_slots(problem, plan, N_M), problem.V)
            problem = replace(problem, initial_state=entering_rows(problem, plan, states))
            o, final, saved = run(problem, with_final, save)
        else:
            # all sequences of this rank begin here: the local call gives the states that leave
            o, final, saved = run(problem, with_final or bool(plan.leaving), save)
            N = take(final, plan.leaving, problem) if plan.leaving else None
            _, maps = exchange.states(to_slots(problem, plan, N), problem.V)
        given = problem.initial_state if tensors[-1] is None else tensors[-1]
        ctx.call, ctx.dtype = call, None if given is None else given.dtype
        ctx.save_for_backward(*tensors[:-1], problem.initial_state, maps, *saved)
        ctx.set_materialize_grads(False)
        return o, final if with_final else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None) -> tuple[Any, ...]:
        call, plan, exchange = ctx.call, ctx.call.plan, ctx.call.exchange
        kept = ctx.saved_tensors  # read once: activation checkpointing unpacks each tensor once
        tensors, (maps, *saved) = kept[: len(NAMES)], kept[len(NAMES) :]
        problem = local.with_tensors(call.problem, tensors)
        gradients = None
        if exchange is not None:
            C = None
            if plan.entering:
                gradients = differentiate(problem, saved, do, dS)
                C = take(gradients[-1], plan.entering, problem)
            d = exchange.gradients(maps, to_slots(problem, plan, C, plan.entering, num_maps=0))
            if plan.leaving:
                dS = add_rows(problem, plan, dS, d)
                gradients = None
        if gradients is None:
            gradients = differentiate(problem, saved, do, dS)
        if gradients[-1] is not None:
            # the state of these rows came from another rank: the caller's rows were not read
            entering = index([place.row for place in plan.entering], problem.device)
            gradients[-1] = gradients[-1].index_fill(0, entering, 0).to(ctx.dtype)
        needs = ctx.needs_input_grad[1:]
        return (None, *(x if need else None for x, need in zip(gradients, needs, strict=True)))


def run(problem: Problem, with_final: bool, save: bool) -> tuple[Tensor, Tensor, local.Saved]:
    """Run the local call; a rank without pieces has nothing to run."""
    p = replace(problem, output_final_state=with_final)
    if p.N == 0:
        return p.v.new_zeros(p.v.shape), p.v.new_zeros(p.state_shape, dtype=p.state_dtype), ()
    return local.forward(p, save)


def differentiate(
    problem: Problem, saved: Sequence[Tensor | None], do: Tensor | None, dS: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of the local call, in the order of NAMES; None for a tensor that is None."""
    p = problem
    if p.N == 0 or (do is None and dS is None):
        return [None if x is None else torch.zeros_like(x) for x in p.differentiable]
    return local.backward(replace(p, output_final_state=dS is not None), tuple(saved), do, dS)


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
    found = states[slots, batch]
    rows[row] = found.mT if is_v_first else found
    return rows
