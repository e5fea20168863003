"""Run a call of the rule in two steps, between which a rank of context parallelism exchanges states.

    transfers, finish = forward_begin(problem, borders, save);    o, final_state, kept = finish(initial_state)
    C, finish = backward_begin(problem, kept, do, dS, borders);   gradients = finish(dS)

`Backend` describes the steps. They have no torch operator: nothing is recorded, and no compiler traces them.
Between them `propagate_states` folds what the runs of all ranks have sent.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from gdn.backends import Borders, FinishForward, Kept, select, select_backward
from gdn.notation import State, Values
from gdn.ops import library
from gdn.problem import Problem
from gdn.problem.propagate import PropagateProblem

__all__ = ["Borders", "Kept", "backward_begin", "forward_begin", "propagate_states"]

Results = Sequence[Tensor | None]


def forward_begin(problem: Problem, borders: Borders, save: bool) -> tuple[Tensor | None, FinishForward]:
    """Compute N | M [leaving, HV, K, V+K] of the rows that leave; return also the rest of the forward."""
    library.check_offsets(problem)
    device = problem.device
    backend = select(problem)
    transfers, finish = library.without_autocast(
        device, lambda: backend.forward_begin(problem, borders, save)
    )

    def run(initial_state: State | None) -> tuple[Values, State | None, Kept]:
        saved: list[Kept] = []

        def outputs() -> Results:
            o, final, kept = finish(initial_state)
            saved.append(kept)
            return o, final

        o, final = library.guarded(library.CHUNK_FORWARD, device, outputs, problem)
        (kept,) = saved
        return o.contiguous(), library.make_contiguous(final), kept

    return transfers, run


def backward_begin(
    problem: Problem, kept: Kept, do: Tensor | None, dS: Tensor | None, borders: Borders
) -> tuple[Tensor | None, Callable[[Tensor | None], list[Tensor | None]]]:
    """Compute C [entering, HV, K, V] of the rows that enter; return also the rest of the backward.

    The rest returns the gradients of `problem.differentiable`, in order; None for an argument that is None.
    """
    device = problem.device
    backend = select_backward(problem)
    C, finish = library.without_autocast(
        device, lambda: backend.backward_begin(problem, kept, do, dS, borders)
    )

    def run(dS: Tensor | None) -> list[Tensor | None]:
        gradients: Results = library.guarded(
            library.CHUNK_BACKWARD, device, lambda: tuple(finish(dS)), tensors=(do, dS)
        )
        given = problem.differentiable
        return [None if x is None else y for x, y in zip(given, gradients, strict=True)]

    return C, run


def propagate_states(problem: PropagateProblem) -> None:
    """Write the states, or gradients of states, that a fold of runs stores."""
    select(problem).propagate_states(problem)
