"""Provide what the backends share of context parallelism: rows of states, and the run of a whole forward."""

import functools
from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from gdn.backends.backend import Borders, FinishForward, Kept, Saved
from gdn.notation import State, Values
from gdn.problem import Problem


@functools.lru_cache(maxsize=256)
def row_index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the rows as an int64 index on a device, one tensor for equal rows: a new one stops the host."""
    # autograd may save an index: one made in inference mode could not be saved later
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=torch.int64, device=device)


def saved_of(kept: Kept) -> Saved:
    """Return the saved tensors among those that a forward kept: another backend's may have kept more."""
    return Saved(*kept[: len(fields(Saved))])


def states_at(states: State, rows: tuple[int, ...], is_v_first: bool) -> Tensor:
    """Return the rows of states in the caller's layout as [rows, HV, K, V]."""
    selected = states[row_index(rows, states.device)]
    return selected.mT if is_v_first else selected


def with_initial(problem: Problem, initial_state: State | None) -> Problem:
    """Return the problem with another initial state."""
    return replace(problem, layout_key=None, initial_state=initial_state)


def start_columns(problem: Problem, borders: Borders) -> tuple[Tensor, Tensor]:
    """Return the states that N and M start from, K first, for all rows: [N, HV, K, V] and [N, HV, K, K].

    N starts from the caller's state, and from zero where a row enters: the caller's row may hold anything
    there. M starts from the identity where a row enters, else from zero.
    """
    p = problem
    N = p.v.new_zeros(p.N, p.HV, p.K, p.V, dtype=p.state_dtype)
    if p.initial_state is not None:
        N.copy_(p.initial_state.mT if p.state_v_first else p.initial_state)
    M = torch.zeros(p.N, p.HV, p.K, p.K, dtype=N.dtype, device=N.device)
    entering = row_index(borders.entering, N.device)
    M.index_copy_(
        0, entering, torch.eye(p.K, dtype=N.dtype, device=N.device).expand(len(entering), *M.shape[1:])
    )
    return N.index_fill_(0, entering, 0), M


def begin_whole(
    problem: Problem,
    borders: Borders,
    forward: Callable[[Problem], tuple[Values, State | None, Kept]],
) -> tuple[Tensor, FinishForward]:
    """Implement `Backend.forward_begin` where no row enters: run the whole forward; N is its final state."""
    p = problem
    o, final, kept = forward(replace(p, layout_key=None, output_final_state=True))
    assert final is not None
    N = states_at(final, borders.leaving, p.state_v_first)
    returned = final if p.output_final_state else None
    return torch.cat([N, N.new_zeros(*N.shape[:-1], p.K)], -1), lambda initial_state: (o, returned, kept)
