"""Select the backend of a call.

The dispatch order is ORDER, and the first backend that supports the problem is selected. If the caller names
a backend, only that one is tried, and the call fails if it does not support the problem.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from gdn import settings
from gdn.backends.backend import Backend, Saved
from gdn.problem import Problem
from gdn.problem.check import BACKENDS as ORDER


class Named(Protocol):
    """Describe any checked problem: it has the name of the requested backend, or None."""

    @property
    def backend(self) -> str | None: ...


def load(name: str) -> Backend:
    """Return a backend by name. Its folder is imported on first use, so a CPU user never imports Triton."""
    if name not in ORDER:
        # a call's own name was checked with its other arguments
        raise ValueError(f"GDN_BACKEND (environment): expected one of {', '.join(ORDER)}, got {name!r}")
    backend: Backend = import_module(f"gdn.backends.{name}").BACKEND
    return backend


def select(problem: Named) -> Backend:
    """Return the first backend that supports the problem, or the one that the caller named.

    Raises:
        ValueError           no backend has the requested name
        NotImplementedError  the named backend, or no backend, supports the problem; lists each one's reason
    """
    return _select(problem, lambda backend: backend.refuses)


def select_recurrent(problem: Problem) -> Backend:
    """Return the first backend that computes the recurrent form of a problem; raises as `select`."""
    return _select(problem, lambda backend: backend.refuses_recurrent or backend.refuses)


def _select(problem: Named, refuses: Callable[[Backend], Callable[[Any], str | None]]) -> Backend:
    asked = settings.backend(problem.backend)
    reasons = []
    for name in (asked,) if asked else ORDER:
        backend = load(name)
        reason = refuses(backend)(problem)
        if reason is None:
            return backend
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError("no backend supports this call: " + "; ".join(reasons))


def select_backward(problem: Problem) -> Backend:
    """Return the first backend that computes the backward of a problem, whichever one ran its forward.

    Of the dispatch order, it starts with the backend that the caller named: one without a backward for the
    problem has that of the next one.
    """
    asked = settings.backend(problem.backend)
    backends = map(load, ORDER[ORDER.index(load(asked).name) if asked else 0 :])
    return next(x for x in backends if (x.refuses_backward or x.refuses)(problem) is None)


def other_launches(problem: Problem, kept: torch.dtype | None, pool: Any, name: str) -> Iterator[Any]:
    """Yield the forward launches of the backends to which this kind of problem may go at another size.

    The backend `name` compiles them ahead with its own, so that a longer prompt finds them compiled. There
    are none if the caller named a backend. `kept` is the dtype of S_in, or None where S_in is not kept;
    `pool` the `StatePool` of a prefill, or None.
    """
    for other in _other_backends(problem, name):
        yield from other.forward_launches(problem, kept, pool)


def other_backward_launches(
    problem: Problem, saved: Saved, do: Tensor, dS: Tensor | None, name: str
) -> Iterator[Any]:
    """Yield their backward launches: a small backward and a large one of a kind may run on two backends."""
    for other in _other_backends(problem, name):
        yield from other.backward_launches(problem, saved, do, dS)


def _other_backends(problem: Problem, name: str) -> Iterator[Backend]:
    """Yield the backends that another size of the problem may go to; none if the caller named one."""
    if settings.backend(problem.backend) is None:
        yield from (load(other) for other in ORDER if other != name)


@dataclass(frozen=True)
class Report:
    """Hold the selected backend (None: there is none), and the reasons for which others were not selected.

    `backward` is the backend of the backward, which may be another one: any backward follows any forward.
    `exchange` is the model of what a call with `cp_context` exchanges, else None.
    """

    asked: str | None
    chosen: str | None
    refusals: dict[str, str]
    backward: str | None = None
    exchange: Any = None

    def __str__(self) -> str:
        rows = [f"requested: {self.asked or 'the first that supports the call'}"]
        for name in ORDER:
            mark = "->" if name == self.chosen else "  "
            rows.append(f"{mark} {name:8} {self.refusals.get(name, 'supports it')}")
        if self.backward is not None:
            rows.append(f"   backward {self.backward}")
        if self.exchange is not None:
            rows.append(str(self.exchange))
        return "\n".join(rows)


def report(problem: Named) -> Report:
    """Return which backends support a problem, without raising if none does."""
    asked = settings.backend(problem.backend)
    refusals = {name: reason for name in ORDER if (reason := load(name).refuses(problem)) is not None}
    if asked is not None:
        load(asked)
    takers = [name for name in ((asked,) if asked else ORDER) if name not in refusals]
    backward = select_backward(problem).name if takers and isinstance(problem, Problem) else None
    return Report(asked, takers[0] if takers else None, refusals, backward)
