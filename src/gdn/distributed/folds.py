"""Fold the transfers of runs, in the order of their tokens: states forward, gradients of states backward.

A run passes a state on if one sequence came in and goes on; any other run resets. The select is a branch and
no product by zero: 0 * NaN is NaN, and a NaN in one sequence must reach no other.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gdn.distributed.plan import index
from gdn.ops import borders
from gdn.problem.propagate import PropagateProblem, RunStep


class Runs(NamedTuple):
    """Hold a matrix of each run: that of run j at place places[j] of the first two dimensions; -1: none.

    values: [., ., B, heads, K, columns]; place p stands for [p // size, p % size], size the second dimension
    """

    values: Tensor
    places: Sequence[int]


def fold_states(
    transfers: Runs, passes: Sequence[bool], target: Runs, first: Tensor | None = None,
    backend: str | None = None,
) -> None:  # fmt: skip
    """Write S_in of every run [K, V] that has a place in `target`, from N | M of the runs, [K, V+K].

    first: the state that enters run 0, zero by default.
    """
    V = target.values.shape[-1]
    N, M = transfers.values[..., :V], transfers.values[..., V:]
    steps = [
        RunStep(place, source, source if passes[j] else -1)
        for j, (place, source) in enumerate(zip(target.places, transfers.places, strict=True))
    ]
    _propagate(PropagateProblem(target.values, N, M, first, _until_last(steps), backend=backend))


def fold_gradients_to(
    C: Runs, maps: Tensor, passes: Sequence[bool], target: Runs, last: Tensor | None = None,
    backend: str | None = None,
) -> None:  # fmt: skip
    """Write dS_out of every run [K, V] that has a place in `target`, from C of the runs.

    maps: M of the runs 1 .. J-1 that pass a state on, in order; last: dS_out of run J-1, zero by default.
    """
    steps = _backward_steps(target.places, C.places, passes, len(maps))
    problem = PropagateProblem(
        target.values, C.values, maps[:, None], last, _until_last(steps), True, backend
    )
    _propagate(problem)


def fold(
    transfers: Tensor, passes: Sequence[bool], V: int, first: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """Return S_in of every run, [J, B, heads, K, V], from N | M of every run, [J, B, heads, K, V+K]."""
    states = transfers.new_empty(*transfers.shape[:-1], V)
    fold_states(_in_order(transfers), passes, _in_order(states), first, backend)
    return states


def fold_transfers(transfers: Tensor, passes: Sequence[bool], V: int, backend: str | None = None) -> Tensor:
    """Return N | M of all runs together, [B, heads, K, V+K], from those of every run; M = 0 after a reset."""
    whole = transfers[0] if passes[0] else _without_map(transfers[0], V)
    N, M = (x[:, None] for x in (transfers[..., :V], transfers[..., V:]))
    steps = [RunStep(-1, j, j if passes[j] else -1) for j in range(1, len(transfers))]
    folded = whole.new_empty(1, 1, *whole.shape)
    _propagate(PropagateProblem(folded, N, M, whole, (*steps, RunStep(0, -1, -1)), backend=backend))
    return folded[0, 0]


def fold_gradients(
    C: Tensor, maps: Tensor, passes: Sequence[bool], last: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """Return dS_out of every run, [J, B, heads, K, V]; see `fold_gradients_to`."""
    leaving = torch.empty_like(C, memory_format=torch.contiguous_format)
    fold_gradients_to(_in_order(C), maps, passes, _in_order(leaving), last, backend)
    return leaving


def fold_first(C: Tensor, maps: Tensor, passes: Sequence[bool], backend: str | None = None) -> Tensor:
    """Return the gradient that enters run 0 if none comes from later runs, [B, heads, K, V].

    maps: M of all runs that pass a state on, in order.
    """
    J = len(C)
    steps = [*_backward_steps([-1] * J, range(J), passes, len(maps)), RunStep(0, -1, -1)]
    d = C.new_empty(1, 1, *C.shape[1:])
    _propagate(PropagateProblem(d, C[:, None], maps[:, None], None, tuple(steps), True, backend))
    return d[0, 0]


def kept_maps(transfers: Runs, passes: Sequence[bool], V: int) -> Tensor:
    """Return M of the runs that pass a state on, in the order of runs: the backward needs no other."""
    values = transfers.values
    places = [place for place, does_pass in zip(transfers.places, passes, strict=True) if does_pass]
    if not places:
        return values.new_empty(0, *values.shape[2:-1], values.shape[-2])
    rows, slots = zip(*(divmod(place, values.shape[1]) for place in places), strict=True)
    return values[..., V:][index(list(rows), values.device), index(list(slots), values.device)]


def _backward_steps(
    stores: Sequence[int], sources: Sequence[int], passes: Sequence[bool], num_maps: int
) -> list[RunStep]:
    """Return the steps from the last run to the first. Maps are those of the last runs that pass."""
    steps = []
    for j in range(len(passes) - 1, -1, -1):
        num_maps -= passes[j]
        steps.append(RunStep(stores[j], sources[j], num_maps if passes[j] else -1))
    return steps


def _until_last(steps: Iterable[RunStep]) -> tuple[RunStep, ...]:
    """Return the steps up to the last one that stores a state; that one only stores."""
    kept = list(steps)
    while kept and kept[-1].store < 0:
        kept.pop()
    return (*kept[:-1], RunStep(kept[-1].store, -1, -1)) if kept else ()


def _propagate(problem: PropagateProblem) -> None:
    """Run a fold, unless nothing is stored."""
    if problem.steps:
        borders.propagate_states(problem)


def _in_order(x: Tensor) -> Runs:
    """Return [J, B, heads, K, ...] as runs."""
    return Runs(x[:, None], range(len(x)))


def _without_map(transfer: Tensor, V: int) -> Tensor:
    return torch.cat([transfer[..., :V], torch.zeros_like(transfer[..., V:])], -1)
