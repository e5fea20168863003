"""Provide the gated RMS norm, with its torch operator gdn::rms_norm_gated, and the zero-centred one."""

from typing import Any

import torch
from torch import Tensor

from gdn import settings
from gdn.backends import Backend, select
from gdn.ops.library import (
    Signature,
    as_output,
    define,
    guarded,
    library,
    no_second_derivative,
    requested,
    runs_directly,
)
from gdn.problem import check
from gdn.problem.layer import NormProblem, parse_norm


def rms_norm_gated(
    x: Tensor,
    z: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    activation: str | None = "silu",
    backend: str | None = None,
) -> Tensor:
    """Normalise x by its root mean square over the last axis, then multiply by a gate.

        y = weight * x * rsqrt(mean(x * x) + eps) * act(z)

    Args:            shape               dtype
        x            [..., D]            bf16, fp16, fp32, fp64
        z            [..., D] or None    any float; None: no gate
        weight       [D] or None         any float; None: ones
        eps          number of at least 0
        activation   "silu", "sigmoid", or None: act(z) = z
        backend      str or None         None: chosen automatically; a named one never falls back

    Returns y, with the shape and dtype of x; computed in fp32 (fp64 for fp64) and rounded once.
    Gradients: x, z and weight get gradients in their own dtypes, summed in fp32.
    Raises: TypeError, ValueError, NotImplementedError as `chunk_gated_delta_rule` does.
    Cost: about 10 flop per element; reads x and z once and writes y once.
    Source: arXiv:1910.07467, equation 4; gated as in arXiv:2412.06464, section 3.4.

    Example:
        >>> import torch, gdn
        >>> gdn.rms_norm_gated(torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.ones(8)).shape
        torch.Size([2, 5, 8])
    """
    problem = parse_norm(x=x, z=z, weight=weight, eps=eps, activation=activation, backend=backend)
    check.no_tangent("rms_norm_gated", x=x, z=z, weight=weight)
    run = _norm if runs_directly(problem.x, problem.z, problem.weight) else norm_operator
    return run(*problem.arguments())  # type: ignore[no-any-return]


_backends: dict[tuple[str, torch.dtype, str | None], Backend] = {}


def rms_norm_zero_centred(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return (x * rsqrt(mean(x * x) + eps)) * (1 + weight), computed in fp32 and rounded once.

    x [..., D] and weight [D], of any float dtypes, are plain tensors on one device: the caller has checked
    them. No operator, no gradients. The result has the dtype of x and the strides of torch.empty_like(x).

    Raises: NotImplementedError, ValueError as `select` does, for the backend in GDN_BACKEND.
    Cost: on `triton` one launch, which reads x once and writes y once; on `eager`, and there for rows
          of more than 8,192 numbers or of other strides than those of heads, three operators.
    """
    problem = NormProblem(x=x, z=None, weight=weight, eps=eps, activation=None, backend=None)
    # a selection takes 6 us of host time, half of a call, and reads no more of the problem
    key = x.device.type, x.dtype, settings.backend()
    backend = _backends.get(key)
    if backend is None:
        backend = _backends[key] = select(problem)
    return backend.rms_norm_zero_centred(problem)  # type: ignore[no-any-return]


def _norm(*args: Any) -> Tensor:
    problem = NormProblem(*args)
    function = select(problem).rms_norm_gated
    (y,) = guarded(_SIGNATURE, problem.x.device, lambda: (as_output(function(problem), problem.x),), problem)
    return y


def _norm_backward(*args: Any) -> tuple[Tensor, ...]:
    problem, (dy,) = NormProblem.split(args)

    def run() -> tuple[Tensor, ...]:
        gradients = select(problem).rms_norm_gated_bwd(problem, dy)
        return tuple(as_output(x, problem.x) for x in gradients)

    return guarded(_BACKWARD_SIGNATURE, problem.x.device, run, tensors=(dy,))


def _norm_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    problem, _ = NormProblem.split(args)
    x = problem.x
    return tuple(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in problem.tensors())


_NORM = NormProblem.declaration
_SIGNATURE = Signature("rms_norm_gated", _NORM.tensors, ("y",))
_BACKWARD_SIGNATURE = Signature("rms_norm_gated_backward", ("dy",), ("dx", "dz", "dweight"))
norm_operator = define(
    "rms_norm_gated", f"({_NORM.schema}) -> Tensor", _norm, lambda x, *_: x.new_empty(x.shape)
)
norm_backward_operator = define(
    "rms_norm_gated_backward",
    f"({_NORM.schema}, Tensor dy) -> (Tensor dx, Tensor dz, Tensor dweight)",
    _norm_backward,
    _norm_backward_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    count = len(_NORM.tensors)
    ctx.save_for_backward(*inputs[:count])
    ctx.options = inputs[count:]


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    gradients = norm_backward_operator(*ctx.saved_tensors, *ctx.options, dy)
    return requested(gradients, ctx.needs_input_grad)


torch.library.register_autograd("gdn::rms_norm_gated", _differentiate, setup_context=_keep, lib=library)
no_second_derivative("rms_norm_gated_backward")
