"""Call a backend directly, without a torch operator, when no tracer or transform is active.

The dispatcher and the autograd of the operators cost some 250 us of host time for a forward and a backward;
the checks cost 20 us. Here one autograd function calls the backend. A call that differs from an earlier one
only in the addresses of its tensors is not checked again.
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
    """Hold a checked call without its tensors, for all calls that differ only in the addresses of tensors."""

    is_recurrent: bool
    problem: Problem  # each tensor replaced by None
    form: Hashable  # None: debug mode and autocast are possible, so run `guarded`
    backend: Backend
    reads_offsets: bool

    def __call__(self, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        """Return o and final_state, with autograd. `tensors`: the tensors of Problem, in order."""
        if torch.is_grad_enabled():
            for x in tensors:
                if x is not None and x.requires_grad:
                    return _Rule.apply(self, *tensors)  # type: ignore[no-any-return]
        return self.run(tensors, False)[:2]

    def run(self, tensors: Tensors, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
        """Run the function of the backend; return o, final_state and the tensors saved for a backward."""
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
    """Differentiate a call. Both forms use the chunked backward, since they compute the same function."""

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
        # no form: saved-tensor hooks may have changed the strides
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
    """Return the key of a call and the Call stored for this key, or None.

    The key holds all values that the checks read. Under a trace, in debug mode and under autocast the checks
    read more; this returns (None, None) there.
    """
    q = tensors[0]
    if not is_plain(q) or settings.debug() or torch.is_autocast_enabled(q.device.type):
        return None, None
    try:
        key = looked_at(tensors, options)
        return key, found(key)
    except (AttributeError, TypeError, RuntimeError):
        # an argument of the wrong kind: the checks raise the error that names it
        return None, None


def call_of(problem: Problem, *, is_recurrent: bool, is_known: bool) -> Call:
    """Build the Call of a checked problem; `is_known`: the caller will store it for later calls."""
    p = problem
    form = object() if is_known else None
    has_offsets = p.cu_seqlens is not None and (
        p.cu_seqlens_cpu is not None or p.cu_seqlens.device.type == "cpu" or not is_known
    )
    return Call(is_recurrent, p.of((None,) * NUM_TENSORS, None), form, select(p), has_offsets)
