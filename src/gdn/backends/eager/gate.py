"""Compute the gates g and beta = sigmoid(b), and their gradients.

    g = -exp(A_log) softplus(a + dt_bias)
    g = lower_bound sigmoid(exp(A_log) (a + dt_bias))    with a lower bound; A_log = None: exp(A_log) = 1

A decay per head is computed in float64 where the device has it. There is only one scalar per token and head,
softplus(-100) is below the normal range of fp32, and differences of the chunk sums of g are taken: a reset on
one token must leave the decays of the others exact. A decay per key channel has K numbers per token and head,
and no sum of them is subtracted (`channels`), so it is computed in the dtype of the rule.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn.notation import Decay, GateBias, HeadParam, PerHead
from gdn.problem import RESET, Problem


def gate_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on devices that have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x), exact in its dtype for very negative and very large x."""
    return F.relu(x) + torch.log1p(torch.exp(-x.abs()))


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x); unlike torch.sigmoid on a CPU, its bits do not depend on the index in x."""
    return (1 + torch.exp(-x)).reciprocal()


@dataclass(frozen=True)
class Gate:
    """Hold the parameters of the gate of one call; A_log is None only with a lower bound."""

    A_log: HeadParam | None
    dt_bias: GateBias | None
    lower_bound: float | None
    is_per_channel: bool
    dtype: torch.dtype  # of the computation

    def rate(self) -> Tensor | None:
        """Return exp(A_log) [HV], or [HV, 1] for a decay per key channel, finite; None: 1."""
        if self.A_log is None:
            return None
        # exp(A_log) above the largest number would make NaN of a logit 0
        rate = self.A_log.to(self.dtype).exp().clamp(max=torch.finfo(self.dtype).max)
        return rate[:, None] if self.is_per_channel else rate

    def shifted(self, a: Decay) -> Decay:
        """Return a + dt_bias in the computing dtype."""
        x = a.to(self.dtype)
        return x if self.dt_bias is None else x + self.dt_bias.to(x.dtype)


def gate_of(p: Any, a: Decay, dtype: torch.dtype) -> Gate:
    """Return the gate of a problem with logits a; dtype: that of the rule."""
    dtype = dtype if p.is_per_channel else gate_dtype(a.device)
    return Gate(p.A_log, p.dt_bias, p.lower_bound, p.is_per_channel, dtype)


def gate_of_heads(a: PerHead, A_log: HeadParam, dt_bias: HeadParam | None) -> Gate:
    """Return the gate of logits of heads, without a lower bound."""
    return Gate(A_log, dt_bias, None, is_per_channel=False, dtype=gate_dtype(a.device))


def log_decay(a: Decay, gate: Gate) -> Decay:
    """Return g [..., HV] or [..., HV, K] of raw logits in the computing dtype of the gate."""
    x, rate = gate.shifted(a), gate.rate()
    if gate.lower_bound is not None:
        return sigmoid(x if rate is None else rate * x).mul_(gate.lower_bound)
    assert rate is not None
    return -rate * softplus(x)


def log_decay_bwd(a: Decay, gate: Gate, dg: Decay) -> tuple[Decay, HeadParam | None, GateBias | None]:
    """Return the gradients of a, A_log and dt_bias, each in its tensor's dtype.

    softplus     dx = -e^A sigmoid(x) dg              dA_log = sum g dg
    bounded      dx = lower_bound e^A y' dg           dA_log = sum x dx      y' = sigmoid'(e^A x)
    """
    x, rate = gate.shifted(a), gate.rate()
    dg = dg.to(x.dtype)
    # 0 times NaN or inf must not reach the sums: a token of no sequence is undefined, a reset has g = -inf
    is_zero = dg == 0
    if gate.lower_bound is None:
        assert rate is not None
        along = (dg * log_decay(a, gate)).masked_fill_(is_zero, 0)
        dx = (-rate * sigmoid(x) * dg).masked_fill_(is_zero, 0)
    else:
        y = x if rate is None else rate * x
        # sigmoid(-y), not 1 - sigmoid(y): the difference cancels for large y
        slope = sigmoid(y) * sigmoid(-y)
        is_zero |= slope == 0
        dx = (slope * dg).mul_(gate.lower_bound)
        dx = (dx if rate is None else dx * rate).masked_fill_(is_zero, 0)
        along = (x * dx).masked_fill_(is_zero, 0)
    dA_log = ddt_bias = None
    if gate.A_log is not None:
        along = along.sum(-1) if gate.is_per_channel else along
        dA_log = along.reshape(-1, gate.A_log.shape[0]).sum(0).to(gate.A_log.dtype)
    if gate.dt_bias is not None:
        ddt_bias = dx.reshape(-1, *gate.dt_bias.shape).sum(0).to(gate.dt_bias.dtype)
    return dx.to(a.dtype), dA_log, ddt_bias


def beta_bwd(b: PerHead, dbeta: PerHead) -> PerHead:
    """Return db of beta = sigmoid(b)."""
    y, dbeta = b.to(gate_dtype(b.device)), dbeta.to(gate_dtype(b.device))
    # sigmoid(-y), not 1 - sigmoid(y): the difference cancels for large y
    return (dbeta * sigmoid(y) * sigmoid(-y)).masked_fill_(dbeta == 0, 0).to(b.dtype)


def gate(
    a: Decay, b: PerHead, A_log: HeadParam | None, dt_bias: GateBias | None, lower_bound: float | None
) -> tuple[Decay, PerHead]:
    """Return g and beta of `gdn.gate`."""
    form = _form(a, b, A_log, dt_bias, lower_bound)
    return log_decay(a, form).to(_output_dtype(a)), sigmoid(b.to(gate_dtype(b.device))).to(_output_dtype(a))


def gate_bwd(
    a: Decay, b: PerHead, A_log: HeadParam | None, dt_bias: GateBias | None, lower_bound: float | None,
    dg: Decay, dbeta: PerHead,
) -> tuple[Decay, PerHead, HeadParam | None, GateBias | None]:  # fmt: skip
    """Return da, db, dA_log, ddt_bias."""
    da, dA_log, ddt_bias = log_decay_bwd(a, _form(a, b, A_log, dt_bias, lower_bound), dg)
    return da, beta_bwd(b, dbeta), dA_log, ddt_bias


def _form(
    a: Decay, b: PerHead, A_log: HeadParam | None, dt_bias: GateBias | None, lower_bound: float | None
) -> Gate:
    is_per_channel = a.dim() > b.dim()
    dtype = _output_dtype(a) if is_per_channel else gate_dtype(a.device)
    return Gate(A_log, dt_bias, lower_bound, is_per_channel, dtype)


def _output_dtype(a: Tensor) -> torch.dtype:
    return torch.float64 if a.dtype == torch.float64 else torch.float32


def load_decay(p: Any, logits: Decay | None, dtype: torch.dtype) -> Tensor | None:
    """Return g [..., HV, 1 or K] of a problem: as given, or of its logits where it has any.

    With the last axis it broadcasts over the rows of a state, and no caller has to know the rank. A g of
    logits is in the dtype of `gate_of`; dtype: that of the rule. None where the problem has no g.
    """
    g = p.g if logits is None else log_decay(logits, gate_of(p, logits, dtype))
    return g if g is None or p.is_per_channel else g.unsqueeze(-1)


def activate(problem: Problem) -> tuple[Tensor, PerHead]:
    """Return g [B, T, HV, 1 or K] and beta in the computing dtype; g of a head is at least RESET."""
    p, shape = problem, (problem.B, problem.T, problem.HV)
    g = load_decay(p, p.g if p.use_gate_in_kernel else None, p.state_dtype)
    if g is None:
        g = torch.zeros((*shape, 1), dtype=gate_dtype(p.device), device=p.device)
    else:
        g = g.to(p.state_dtype if p.is_per_channel else gate_dtype(p.device))
    if p.beta is None:
        beta = torch.ones(shape, dtype=p.state_dtype, device=p.device)
    elif p.use_beta_sigmoid_in_kernel:
        # 2 sigmoid is in (0, 2): for |k| = 1 the eigenvalue 1 - beta of I - beta k k^T may be negative
        beta = sigmoid(p.beta.to(gate_dtype(p.device))).mul_(2 if p.allow_neg_eigval else 1).to(p.state_dtype)
    else:
        beta = p.beta.to(p.state_dtype)
    # e^-1000 is 0 in every dtype, and chunk sums of such g keep the resolution of the other tokens
    return g if p.is_per_channel else g.clamp(min=RESET), beta


def activate_bwd(
    problem: Problem, dg: Tensor, dbeta: PerHead
) -> tuple[Decay | None, PerHead | None, HeadParam | None, GateBias | None]:
    """Return dg, dbeta, dA_log, ddt_bias of the caller's tensors from the gradients of the rule's gates.

    dg is [B, T, HV, 1 or K].
    """
    p = problem
    dg = dg if p.is_per_channel else dg.squeeze(-1)
    dA_log = ddt_bias = None
    if p.g is None:
        dg_given = None
    elif p.use_gate_in_kernel:
        dg_given, dA_log, ddt_bias = log_decay_bwd(p.g, gate_of(p, p.g, p.state_dtype), dg)
    else:
        dg_given = dg.to(p.g.dtype)
    if p.beta is None:
        return dg_given, None, dA_log, ddt_bias
    if p.use_beta_sigmoid_in_kernel:
        dbeta = beta_bwd(p.beta, 2 * dbeta if p.allow_neg_eigval else dbeta)
    return dg_given, dbeta.to(p.beta.dtype), dA_log, ddt_bias
