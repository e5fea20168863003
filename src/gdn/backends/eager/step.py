"""Run a layer's whole decode step, which is defined as convolution, decode and norm in sequence."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gdn.backends.eager.conv import causal_conv1d_update
from gdn.backends.eager.decode import decode
from gdn.backends.eager.dense_step import plan_dense_step
from gdn.backends.eager.history import decode_with_history
from gdn.backends.eager.norm import rms_norm_gated
from gdn.problem.layer import NormProblem
from gdn.problem.step import StepProblem


def decode_step(problem: StepProblem) -> Callable[..., None] | None:
    """Implement `Backend.decode_step`: write problem.conv_state, problem.state and problem.out."""
    rule = decode_with_history if problem.has_history else decode
    compose_step(problem, causal_conv1d_update, rule, rms_norm_gated)
    return None if problem.has_history else plan_dense_step(problem)


def compose_step(
    problem: StepProblem,
    conv: Callable[..., Any],
    rule: Callable[..., Any],
    norm: Callable[[NormProblem], Tensor],
) -> None:
    """Run the step by a backend's three functions; results between them are rounded to the inputs' dtype.

    rule: the backend's decode, or decode_with_history for slots with histories.
    """
    p = problem
    mixed = p.mixed_qkv.new_empty(p.mixed_qkv.shape)
    conv(p.conv(mixed))
    # without a norm the rule writes p.out itself: no pass for a copy
    o = p.out.new_empty(p.out.shape) if p.has_norm else p.out
    rule(p.with_history(mixed, o) if p.has_history else p.decode(mixed, o))
    if p.has_norm:
        p.out.copy_(norm(p.norm(o)))
