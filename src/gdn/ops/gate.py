"""Provide the gate: the public function and its torch operators gdn::gate and gdn::gate_backward."""

from typing import Any

import torch
from torch import Tensor

from gdn.backends import select
from gdn.notation import Decay, GateBias, HeadParam, PerHead
from gdn.ops.library import (
    Signature,
    as_output,
    define,
    guarded,
    library,
    no_second_derivative,
    requested,
)
from gdn.problem import check
from gdn.problem.stages import parse_gate


def gate(
    a: Decay,
    b: PerHead,
    A_log: HeadParam | None,
    dt_bias: GateBias | None = None,
    *,
    lower_bound: float | None = None,
    backend: str | None = None,
) -> tuple[Decay, PerHead]:
    """Compute the log decay g and the write strength beta from raw logits.

        g = -exp(A_log) softplus(a + dt_bias);               beta = sigmoid(b)
        g = lower_bound sigmoid(exp(A_log) (a + dt_bias))    with a lower bound

    Args:           shape                      dtype
        a           [..., HV] or [..., HV, K]  any float; raw logits of a head, or of each key channel of a
                                               head: a has one axis more than b then
        b           [..., HV]                  any float; raw logits
        A_log       [HV] or None               any float; log of the decay rate, -inf: no decay; None: 0, only
                                               with lower_bound
        dt_bias     [HV] or [HV, K] or None    any float; None: 0
        lower_bound number < 0 or None         g is between it and 0
        backend     str or None                None: chosen automatically; a named one never falls back

    Returns:
        g           shape of a                 fp32 (fp64 if a is fp64), natural, <= 0
        beta        [..., HV]                  dtype of g; in [0, 1]

    Gradients: a, b, A_log and dt_bias get gradients in their own dtypes, summed in fp32 or better.
    softplus is computed as log1p(e^x), which is accurate for very negative x; log(1 + e^x) would be 0 there.
    Raises: TypeError, ValueError, NotImplementedError as in `gdn.problem`, before anything is computed.
    Cost:   2 reads and 2 writes per token and head; about 4 transcendental functions.
    Source: arXiv:2412.06464, section 3.4 (the gates of Mamba2, arXiv:2405.21060); arXiv:2510.26692.

    Example:
        >>> import torch, gdn
        >>> g, beta = gdn.gate(torch.zeros(1, 5, 2), torch.zeros(1, 5, 2), torch.zeros(2))
        >>> print(round(g[0, 0, 0].item(), 4), beta[0, 0, 0].item())
        -0.6931 0.5
    """
    parse_gate(a, b, A_log, dt_bias, lower_bound, backend)
    check.no_tangent("gate", a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    g, beta = _gate_forward(a, b, A_log, dt_bias, backend, lower_bound)
    return g, beta


def _forward(
    a: Tensor, b: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, backend: str | None,
    lower_bound: float | None = None,
) -> Any:  # fmt: skip
    problem = parse_gate(a, b, A_log, dt_bias, lower_bound, backend)

    def run() -> tuple[Tensor, ...]:
        return tuple(as_output(x, a) for x in select(problem).gate(a, b, A_log, dt_bias, lower_bound))

    return guarded(_SIGNATURE, a.device, run, tensors=(a, b))


def _forward_fake(a: Tensor, b: Tensor, *_others: Any) -> Any:
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    return a.new_empty(a.shape, dtype=dtype), b.new_empty(b.shape, dtype=dtype)


def _backward(
    a: Tensor, b: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dg: Tensor, dbeta: Tensor,
    backend: str | None, lower_bound: float | None = None,
) -> Any:  # fmt: skip
    problem = parse_gate(a, b, A_log, dt_bias, lower_bound, backend)

    def run() -> tuple[Tensor, ...]:
        gradients = select(problem).gate_bwd(a, b, A_log, dt_bias, lower_bound, dg, dbeta)
        return tuple(as_output(x, a) for x in gradients)

    return guarded(_BACKWARD_SIGNATURE, a.device, run, tensors=(a, b, dg, dbeta))


def _backward_fake(a: Tensor, b: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, *_others: Any) -> Any:
    return tuple(a.new_empty(0) if x is None else x.new_empty(x.shape) for x in (a, b, A_log, dt_bias))


_SIGNATURE = Signature("gate", ("a", "b"), ("g", "beta"))
_BACKWARD_SIGNATURE = Signature(
    "gate_backward", ("a", "b", "dg", "dbeta"), ("da", "db", "dA_log", "ddt_bias")
)
_gate_forward = define(
    "gate",
    "(Tensor a, Tensor b, Tensor? A_log, Tensor? dt_bias, str? backend, float? lower_bound=None) -> "
    "(Tensor g, Tensor beta)",
    _forward,
    _forward_fake,
)
_gate_backward = define(
    "gate_backward",
    "(Tensor a, Tensor b, Tensor? A_log, Tensor? dt_bias, Tensor dg, Tensor dbeta, str? backend, "
    "float? lower_bound=None) -> "
    "(Tensor da, Tensor db, Tensor dA_log, Tensor ddt_bias)",
    _backward,
    _backward_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # an option with a default may be left out
    a, b, A_log, dt_bias, ctx.backend, *bound = inputs
    (ctx.lower_bound,) = bound or (None,)
    ctx.save_for_backward(a, b, A_log, dt_bias)


def _differentiate(ctx: Any, dg: Tensor, dbeta: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _gate_backward(*ctx.saved_tensors, dg, dbeta, ctx.backend, ctx.lower_bound)
    return requested(gradients, ctx.needs_input_grad)


torch.library.register_autograd("gdn::gate", _differentiate, setup_context=_keep, lib=library)
no_second_derivative("gate_backward")
