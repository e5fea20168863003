"""Bring each run the W-1 inputs of the short convolution that precede it.

The window of a run holds the last W-1 inputs before its first token, of the same sequence. They may lie on
several ranks where runs are shorter than W-1, and reach into the sequence's initial state. One all-to-all
moves them; it is differentiable. The local convolution reads them as the initial state of the run's first
piece.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from gdn.distributed.collectives import all_to_all, start_swap
from gdn.distributed.plan import Plan, index, make_plan


@dataclass(frozen=True)
class Halo:
    """Hold which inputs one rank sends and where it puts those that it receives.

    source     places among its tokens [B * T], then its columns of initial states [rows * (W-1)], by receiver
    target     places among the columns of its windows [rows * (W-1)], by sender
    num_sent   how many inputs each rank gets from this one
    num_got    how many inputs this rank gets from each one
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    num_sent: tuple[int, ...]
    num_got: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def make_halo(plan: Plan, offsets: tuple[int, ...] | None, width: int, with_initial: bool) -> Halo:
    """Return what the rank of the plan sends and gets. with_initial: sequences have initial states."""
    table, me, W = plan.table, plan.rank, width
    cuts = (0, table.num_tokens) if offsets is None else offsets
    plans = [make_plan(table, offsets, plan.batch, r) for r in range(table.num_ranks)]
    sent: list[list[int]] = [[] for _ in plans]
    got: list[list[int]] = [[] for _ in plans]
    for to, other in enumerate(plans):
        for place in other.entering:
            piece = other.pieces[place.row]
            begin = cuts[piece.sequence if offsets is not None else 0]
            for column in range(W - 1):
                token = piece.start - (W - 1) + column
                if token < begin and not with_initial:
                    continue
                owner, local = table.locate(max(token, begin))
                if to == me:
                    got[owner].append(place.row * (W - 1) + column)
                if owner == me and token >= begin:
                    sent[to].append(piece.batch * plan.num_local + local)
                elif owner == me:
                    row = _first_row(plan, piece.batch, piece.sequence)
                    states = plan.batch * plan.num_local + row * (W - 1)
                    sent[to].append(states + token - begin + W - 1)
    return Halo(
        tuple(x for block in sent for x in block),
        tuple(x for block in got for x in block),
        tuple(map(len, sent)),
        tuple(map(len, got)),
    )


def _first_row(plan: Plan, batch: int, sequence: int) -> int:
    """Return the row of the piece that begins a sequence."""
    matches = (
        row
        for row, piece in enumerate(plan.pieces)
        if (piece.batch, piece.sequence, piece.is_first) == (batch, sequence, True)
    )
    return next(matches)


class Sources(NamedTuple):
    """Hold where the rows that a rank sends are: places among them, then in x [B, T], or among the states."""

    tokens: tuple[int, ...]
    batch: tuple[int, ...]
    token: tuple[int, ...]
    others: tuple[int, ...]
    state: tuple[int, ...]

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, source: tuple[int, ...], B: int, T: int) -> "Sources":
        """Return the places of `Halo.source`."""
        tokens = tuple(i for i, place in enumerate(source) if place < B * T)
        others = tuple(i for i, place in enumerate(source) if place >= B * T)
        batch, token = (tuple(f(source[i], T) for i in tokens) for f in (operator.floordiv, operator.mod))
        return cls(tokens, batch, token, others, tuple(source[i] - B * T for i in others))


class _Rows(torch.autograd.Function):
    """Return the inputs as they are, and the rows that other ranks need of them and of the states.

    The gradient of these rows is added to that of the inputs in its place. Apart it would be as large as the
    inputs, and so would be the sum of both: 4 more passes over them in HBM.
    """

    @staticmethod
    def forward(
        ctx: Any, sources: Sources, x: Tensor, states: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.sources, ctx.like_x = sources, (x.shape, x.dtype)
        ctx.like_states = None if states is None else (states.shape, states.dtype)
        ctx.set_materialize_grads(False)
        rows = _tokens_at(x, sources).to(dtype)
        if states is not None and sources.others:
            both = rows.new_empty(len(sources.tokens) + len(sources.others), x.shape[-1])
            both[index(list(sources.tokens), x.device)] = rows
            both[index(list(sources.others), x.device)] = states[index(list(sources.state), x.device)]
            rows = both
        return x, rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor | None, drows: Tensor) -> tuple[Any, ...]:
        sources, (shape, dtype) = ctx.sources, ctx.like_x
        dx = drows.new_zeros(shape, dtype=dtype) if dx is None else dx
        dstates = None
        if ctx.like_states is not None:
            dstates = drows.new_zeros(ctx.like_states[0], dtype=ctx.like_states[1])
            others, state = (index(list(x), dx.device) for x in (sources.others, sources.state))
            dstates.index_put_((state,), drows[others].to(dstates.dtype), accumulate=True)
        if sources.others:
            drows = drows[index(list(sources.tokens), dx.device)]
        # The convolution alone reads the inputs that this node returns: nobody else has this gradient.
        # An input may have gone to several ranks: this sum has one order, also on a GPU.
        places = (index(list(sources.batch), dx.device), index(list(sources.token), dx.device))
        dx.index_put_(places, drows.to(dtype), accumulate=True)
        return None, dx, dstates, None


def _tokens_at(x: Tensor, sources: Sources) -> Tensor:
    return x[index(list(sources.batch), x.device), index(list(sources.token), x.device)]


def start_windows(
    x: Tensor, initial_state: Tensor | None, plan: Plan, offsets: tuple[int, ...] | None, width: int,
    group: ProcessGroup,
) -> tuple[Tensor, Callable[[], Tensor]]:  # fmt: skip
    """Start to fetch the inputs before each run; return x, and the function that waits for them.

    It returns the initial state of each local piece, [rows, D, W-1], with a gradient for x and initial_state.
    The convolution must read the x that is returned, and nothing else may: see `_Rows`.

    x              [B, local T, D]      inputs of the convolution
    initial_state  [rows, D, W-1]       read where a sequence begins here; None: zeros
    """
    D, W, rows = x.shape[-1], width, len(plan.pieces)
    halo = make_halo(plan, offsets, W, initial_state is not None)
    states, dtype = None, x.dtype
    if initial_state is None:
        base = x.new_zeros(rows * (W - 1), D)
    else:
        dtype = torch.promote_types(x.dtype, initial_state.dtype)
        states = base = initial_state.to(dtype).mT.reshape(-1, D)
        # windows that another rank fills: the caller's row is not read, and may hold NaN
        filled = [p.row * (W - 1) + c for p in plan.entering for c in range(W - 1)]
        base = base.index_fill(0, index(filled, x.device), 0)
    x, send = _Rows.apply(Sources.of(halo.source, x.shape[0], x.shape[1]), x, states, dtype)
    wait = start_swap(send, list(halo.num_got), list(halo.num_sent), group)

    def finish() -> Tensor:
        # an index without entries keeps the exchange in the graph of a rank that receives nothing
        filled_rows = base.index_copy(0, index(list(halo.target), x.device), wait())
        return filled_rows.view(rows, W - 1, D).mT

    return x, finish


def windows_bwd(
    dwindows: Tensor, x: Tensor, initial_state: Tensor | None, plan: Plan, offsets: tuple[int, ...] | None,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of x and initial_state from that of the result of `start_windows`."""
    D, W = x.shape[-1], dwindows.shape[-1] + 1
    halo = make_halo(plan, offsets, W, initial_state is not None)
    d = dwindows.mT.reshape(-1, D)
    target = index(list(halo.target), x.device)
    back = all_to_all(d[target], list(halo.num_sent), list(halo.num_got), group)
    num_tokens = x.numel() // D
    num_inputs = num_tokens + (0 if initial_state is None else len(d))
    # an input may have gone to several ranks: this sum has one order, also on a GPU
    source = index(list(halo.source), x.device)
    dinputs = d.new_zeros(num_inputs, D).index_put_((source,), back, accumulate=True)
    dx = dinputs[:num_tokens].view(x.shape).to(x.dtype)
    if initial_state is None:
        return dx, None
    filled = [p.row * (W - 1) + c for p in plan.entering for c in range(W - 1)]
    drows = dinputs[num_tokens:] + d.index_fill(0, index(filled, x.device), 0)
    return dx, drows.view(-1, W - 1, D).mT.to(initial_state.dtype)
