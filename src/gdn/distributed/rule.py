"""Compute the gated delta rule on the tokens of one rank, with states exchanged between runs.

    forward     begin: N | M of the runs of this rank; exchange; finish: o, S_out from the S_in of these runs
    backward    begin: C of the runs; exchange; finish: the gradients, from the dS_out of these runs

The backend does both halves (`gdn.ops.borders`), and keeps what they share on the device between them. Two
autograd nodes hold them, so that other work can be launched while the exchange is on its way: in the backward
autograd runs the nodes of that work between the two as well. Every rank reaches both, also a rank without
tokens and one whose gradients nobody wants, so that a collective is in the backward of all ranks or of none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gdn.distributed import local
from gdn.distributed.collectives import Link
from gdn.distributed.exchange import Exchange
from gdn.distributed.local import NAMES
from gdn.distributed.plan import Place, Plan, index
from gdn.ops import borders
from gdn.problem import Problem

Outputs: TypeAlias = tuple[Tensor, Tensor | None, local.Saved]
Gradients: TypeAlias = list[Tensor | None]


@dataclass(frozen=True)
class Call:
    """Hold one checked call on the tokens of one rank.

    problem    offsets are local, and states have a row for each piece; autograd nodes hold it without the
               tensors of NAMES
    exchange   None: no sequence crosses a border; every rank knows this, and there is no collective
    records    the call records gradients, on all ranks
    has_state  the caller gave an initial state: its gradient is wanted
    """

    problem: Problem
    plan: Plan
    exchange: Exchange | None
    records: bool = False
    has_state: bool = True

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> "Call":
        """Return the call with other tensors of NAMES."""
        return replace(self, problem=local.with_tensors(self.problem, tensors))

    def without_tensors(self) -> "Call":
        return self.with_tensors((None,) * len(NAMES))


class Forward(NamedTuple):
    """Hold the results of a forward and what its backward reads.

    initial_state   the rows that the pieces began from; None: zeros
    maps            M of the exchange; None without one
    """

    o: Tensor
    final: Tensor | None
    initial_state: Tensor | None
    maps: Tensor | None
    saved: local.Saved


def begin_forward(call: Call, save: bool, agree: Callable[[], None]) -> Callable[[], Forward]:
    """Compute N | M of the runs and start the exchange; return the rest of the forward.

    agree: waits for the comparison of the call on all ranks, while the local work runs
    """
    p, plan, exchange = call.problem, call.plan, call.exchange
    transfers, finish = begin(p, plan, exchange, save)
    agree()
    pending = None
    if exchange is not None:
        # where no run passes a state on, no fold reads an M: half of the bytes
        num_maps = p.K if plan.borders.with_maps else 0
        pending = exchange.start_states(to_slots(p, plan, transfers, num_maps=num_maps))

    def rest() -> Forward:
        initial_state, maps = p.initial_state, None
        if exchange is not None and pending is not None:
            states, maps = exchange.finish_states(pending, p.V)
            if plan.entering:
                assert states is not None
                initial_state = entering_rows(p, plan, states)
        o, final, saved = finish(initial_state)
        return Forward(o, final, initial_state, maps, saved)

    return rest


def begin_backward(
    call: Call, maps: Tensor | None, saved: Sequence[Tensor | None], do: Tensor | None, dS: Tensor | None
) -> Callable[[], Gradients]:
    """Compute C of the runs and start the exchange; return the rest of the backward.

    The initial state of the call's problem is that of `Forward`. A row of its gradient is zero where the
    state came from another rank: the caller's row was not read.
    """
    p, plan, exchange = call.problem, call.plan, call.exchange
    C, finish = begin_gradients(call, saved, do, dS)
    pending = None
    if exchange is not None:
        pending = exchange.start_gradients(to_slots(p, plan, C, plan.entering, num_maps=0))

    def rest() -> Gradients:
        leaving = dS
        if exchange is not None and pending is not None:
            assert maps is not None
            d = exchange.finish_gradients(pending, maps)
            if plan.leaving:
                assert d is not None
                leaving = add_rows(p, plan, dS, d)
        gradients = finish(leaving)
        if gradients[-1] is not None and plan.entering and call.has_state:
            entering = index([place.row for place in plan.entering], p.device)
            gradients[-1] = gradients[-1].index_fill(0, entering, 0)
        return gradients

    return rest


def begin_rule(
    call: Call, without: Call, agree: Callable[[], None]
) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """Begin a call; return the function that finishes it: o and the state after each local piece.

    The state is None unless the problem asks for it. Both have gradients if the call records them.
    without: the call without its tensors
    """
    if not call.records:
        # no autograd node: less host time before the first launch
        rest = begin_forward(call, False, agree)
        return lambda: rest()[:2]
    link = Link()
    link.put((call, agree))
    begun = _Begin.apply(without, link, *call.problem.differentiable)
    return lambda: _Finish.apply(without, link, begun)  # type: ignore[no-any-return]


class _Begin(torch.autograd.Function):
    """Begin the forward; in the backward, finish what `_Finish` has begun."""

    @staticmethod
    def forward(ctx: Any, call: Call, link: Link, *tensors: Tensor | None) -> Tensor:
        q, state = tensors[0], tensors[-1]
        assert q is not None
        ctx.link, ctx.dtype = link, None if state is None else state.dtype
        save = any(ctx.needs_input_grad)
        given, agree = link.take()
        link.put((tensors, begin_forward(given, save, agree)))
        return q.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        gradients = ctx.link.take()()
        if gradients[-1] is not None:
            gradients[-1] = None if ctx.dtype is None else gradients[-1].to(ctx.dtype)
        needs = ctx.needs_input_grad[2:]
        return (None, None, *(x if need else None for x, need in zip(gradients, needs, strict=True)))


class _Finish(torch.autograd.Function):
    """Finish the forward; in the backward, begin the backward."""

    @staticmethod
    def forward(ctx: Any, call: Call, link: Link, begun: Tensor) -> tuple[Tensor, Tensor | None]:
        tensors, finish = link.take()
        forward: Forward = finish()
        ctx.call, ctx.link = call, link
        ctx.save_for_backward(*tensors[:-1], forward.initial_state, forward.maps, *forward.saved)
        ctx.set_materialize_grads(False)
        return forward.o, forward.final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None) -> tuple[Any, ...]:
        kept = ctx.saved_tensors  # read once: activation checkpointing unpacks each tensor once
        tensors, (maps, *saved) = kept[: len(NAMES)], kept[len(NAMES) :]
        call = ctx.call.with_tensors(tensors)
        ctx.link.put(begin_backward(call, maps, saved, do, dS))
        return None, None, call.problem.q.new_zeros(0)


def begin(
    problem: Problem, plan: Plan, exchange: Exchange | None, save: bool
) -> tuple[Tensor | None, Callable[[Tensor | None], Outputs]]:
    """Begin the forward; return N | M of the rows that leave (None: there is none), and the rest of it."""
    if exchange is None or problem.N == 0:
        return None, lambda initial_state: local.forward(problem, save)
    return borders.forward_begin(problem, plan.borders, save)


def begin_gradients(
    call: Call, saved: Sequence[Tensor | None], do: Tensor | None, dS: Tensor | None
) -> tuple[Tensor | None, Callable[[Tensor | None], Gradients]]:
    """Begin the backward; return C of the rows that enter, and the rest of it: from dS, the gradients."""
    problem = call.problem
    if call.exchange is None or problem.N == 0:
        return None, lambda dS: local.backward(problem, tuple(saved), do, dS)
    return borders.backward_begin(problem, tuple(saved), do, dS, call.plan.borders)


def to_slots(
    problem: Problem, plan: Plan, rows: Tensor | None, places: Sequence[Place] | None = None,
    num_maps: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the rows [places, HV, K, ...] at their slots, zero elsewhere: [slots, B, HV, K, V + num_maps].

    Columns of the rows beyond these are left out.

    places: those that leave, by default; num_maps: the columns of M, K by default.
    """
    p, places = problem, plan.leaving if places is None else places
    is_all = plan.has_all_leaving if places is plan.leaving else plan.has_all_entering
    columns = p.V + (p.K if num_maps is None else num_maps)
    rows = rows if rows is None else rows[..., :columns]
    if rows is not None and is_all and rows.shape[-1] == columns:
        return rows.to(p.state_dtype)[None]
    out = p.v.new_zeros(plan.table.num_slots, plan.batch, p.HV, p.K, columns, dtype=p.state_dtype)
    if rows is not None:
        slots, batch = (index([getattr(x, name) for x in places], p.device) for name in ("slot", "batch"))
        out[slots, batch, ..., : rows.shape[-1]] = rows
    return out


def entering_rows(problem: Problem, plan: Plan, states: Tensor) -> Tensor:
    """Return the initial states of the pieces: S_in [slots, B, HV, K, V] where one enters, the caller's."""
    p = problem
    if plan.has_all_entering:
        (received,) = states
        return (received.mT if p.state_v_first else received).contiguous()
    rows = p.v.new_zeros(p.state_shape, dtype=p.state_dtype)
    if p.initial_state is not None:
        rows.copy_(p.initial_state)
    return _put(rows, plan.entering, states, p.state_v_first)


def add_rows(problem: Problem, plan: Plan, dS: Tensor | None, d: Tensor) -> Tensor:
    """Return dS plus dS_out [slots, B, HV, K, V] at the pieces that leave."""
    p = problem
    if plan.has_all_leaving:
        (received,) = d
        received = received.mT if p.state_v_first else received
        return received.contiguous() if dS is None else received + dS
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
