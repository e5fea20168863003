"""Calls of the rule with no operator around them, where nobody traces or transforms.

The dispatcher and the operators' autograd cost some 250 us of host time for a forward and a backward, the
checks 20: here one autograd function calls the backend, and a call that differs from an earlier one only in
where its tensors lie is not checked again.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn import settings
from gdn.backends import Backend, Saved, select
from gdn.ops.library import (
    CHUNK_BACKWARD,
    CHUNK_FORWARD,
    NUM_SAVED,
    NUM_TENSORS,
    RECURRENT_FORWARD,
    are_plain,
    check_offsets,
    chunk_backward,
    guarded,
    is_plain,
    settled,
    wanted,
)
from gdn.ops.repeats import found, looked_at
from gdn.problem import Problem

Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Call:
    """A checked call without its tensors: what all calls share that differ only in where these lie."""

    is_recurrent: bool
    problem: Problem  # with None for each tensor
    form: Hashable  # None where a call may be in debug mode or under autocast
    backend: Backend
    reads_offsets: bool

    def __call__(self, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        """o and final_state, with autograd. `tensors`: those of Problem, in order."""
        if torch.is_grad_enabled():
            for x in tensors:
                if x is not None and x.requires_grad:
                    return _Rule.apply(self, *tensors)  # type: ignore[no-any-return]
        return self.run(tensors, False)[:2]

    def run(self, tensors: Tensors, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
        """The backend's function, and what a backward needs of it."""
        problem = self.problem.of(tensors, self.form)
        if self.reads_offsets:
            check_offsets(problem)
        if self.form is not None:
            return self._forward(problem, save)
        signature, kept = RECURRENT_FORWARD if self.is_recurrent else CHUNK_FORWARD, Saved()

        def run() -> Tensors:
            nonlocal kept
            o, final, kept = self._forward(problem, save)
            return (o, final, *kept)

        o, final, *_ = guarded(signature, problem.device, tensors, run, problem)
        return o, final, kept

    def _forward(self, problem: Problem, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
        saved = Saved()
        if self.is_recurrent:
            o, final = self.backend.recurrent_forward(problem)
        else:
            o, final, saved = self.backend.chunk_forward(problem, save)
        return o.contiguous(), settled(final), saved


class _Rule(torch.autograd.Function):
    """The gradient of a call; both forms have one backward, for the two compute the same function."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        o, final, saved = call.run(tensors, True)
        ctx.call = call
        ctx.save_for_backward(*tensors, *saved)
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:]
        if do is None and dS is None:
            return (None,) * (1 + len(needs))
        tensors, call = ctx.saved_tensors, ctx.call
        given, saved = tensors[:NUM_TENSORS], tensors[-NUM_SAVED:]
        # no form: hooks may have laid what was saved in another way
        problem = call.problem.of(given, None)
        if torch.is_grad_enabled() or not are_plain(*given, do, dS):
            gradients = chunk_backward(*problem.arguments(), *saved, do, dS)
        else:

            def run() -> Tensors:
                gradients = call.backend.chunk_backward(problem, Saved(*saved), do, dS)
                return tuple([settled(x) for x in gradients])

            gradients = guarded(CHUNK_BACKWARD, problem.device, (do, dS), run)
        return (None, *wanted(gradients, needs))


def known(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Hashable, Call | None]:
    """All that the checks of a call look at, and such a call if it has passed them.

    (None, None) where they look at more: under a trace, in debug mode and under autocast.
    """
    q = tensors[0]
    if not is_plain(q) or settings.debug() or torch.is_autocast_enabled(q.device.type):
        return None, None
    try:
        key = looked_at(tensors, options)
        return key, found(key)
    except (AttributeError, TypeError, RuntimeError):
        # an argument of another kind: the checks will name it
        return None, None


def call_of(problem: Problem, *, is_recurrent: bool, is_known: bool) -> Call:
    """The call that a checked problem is one of; `is_known`: to be remembered."""
    p = problem
    form = object() if is_known else None
    has_offsets = p.cu_seqlens is not None and (
        p.cu_seqlens_cpu is not None or p.cu_seqlens.device.type == "cpu" or not is_known
    )
    return Call(is_recurrent, p.of((None,) * NUM_TENSORS, None), form, select(p), has_offsets)
