"""Compute the gates g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), and their gradients.

They are computed in float64 where the device has it. There is only one scalar per token and head,
softplus(-100) is below the normal range of fp32, and differences of the chunk sums of g are taken: a reset on
one token must leave the decays of the others exact.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn.notation import HeadParam, PerHead
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


def log_decay(a: PerHead, A_log: HeadParam, dt_bias: HeadParam | None) -> PerHead:
    """Return g = -exp(A_log) softplus(a + dt_bias) [..., HV] in `gate_dtype`."""
    x = _add_bias(a, dt_bias)
    return -A_log.to(x.dtype).exp() * softplus(x)


def log_decay_bwd(
    a: PerHead, A_log: HeadParam, dt_bias: HeadParam | None, dg: PerHead
) -> tuple[PerHead, HeadParam, HeadParam | None]:
    """Return dx = -e^A sigmoid(x) dg, dA_log = sum g dg, ddt_bias = sum dx, each in its tensor's dtype."""
    x = _add_bias(a, dt_bias)
    dg = dg.to(x.dtype)
    # 0 times NaN or inf must not reach the sums: a token of no sequence is undefined, a reset has g = -inf
    is_zero = dg == 0
    dA_log = (dg * log_decay(a, A_log, dt_bias)).masked_fill_(is_zero, 0).reshape(-1, A_log.shape[0]).sum(0)
    dx = (-A_log.to(x.dtype).exp() * sigmoid(x) * dg).masked_fill_(is_zero, 0)
    ddt_bias = None if dt_bias is None else dx.reshape(-1, A_log.shape[0]).sum(0).to(dt_bias.dtype)
    return dx.to(a.dtype), dA_log.to(A_log.dtype), ddt_bias


def beta_bwd(b: PerHead, dbeta: PerHead) -> PerHead:
    """Return db of beta = sigmoid(b)."""
    y, dbeta = b.to(gate_dtype(b.device)), dbeta.to(gate_dtype(b.device))
    # sigmoid(-y), not 1 - sigmoid(y): the difference cancels for large y
    return (dbeta * sigmoid(y) * sigmoid(-y)).masked_fill_(dbeta == 0, 0).to(b.dtype)


def gate(a: PerHead, b: PerHead, A_log: HeadParam, dt_bias: HeadParam | None) -> tuple[PerHead, PerHead]:
    """Return g and beta of `gdn.gate`."""
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    return log_decay(a, A_log, dt_bias).to(dtype), sigmoid(b.to(gate_dtype(b.device))).to(dtype)


def gate_bwd(
    a: PerHead, b: PerHead, A_log: HeadParam, dt_bias: HeadParam | None, dg: PerHead, dbeta: PerHead
) -> tuple[PerHead, PerHead, HeadParam, HeadParam | None]:
    """Return da, db, dA_log, ddt_bias."""
    da, dA_log, ddt_bias = log_decay_bwd(a, A_log, dt_bias, dg)
    return da, beta_bwd(b, dbeta), dA_log, ddt_bias


def activate(problem: Problem) -> tuple[PerHead, PerHead]:
    """Return the gates of the rule: g in `gate_dtype`, at least RESET, and beta in the computing dtype."""
    p, shape = problem, (problem.B, problem.T, problem.HV)
    if p.g is None:
        g = torch.zeros(shape, dtype=gate_dtype(p.device), device=p.device)
    elif p.use_gate_in_kernel:
        assert p.A_log is not None
        g = log_decay(p.g, p.A_log, p.dt_bias)
    else:
        g = p.g.to(gate_dtype(p.device))
    if p.beta is None:
        beta = torch.ones(shape, dtype=p.state_dtype, device=p.device)
    elif p.use_beta_sigmoid_in_kernel:
        # 2 sigmoid is in (0, 2): for |k| = 1 the eigenvalue 1 - beta of I - beta k k^T may be negative
        beta = sigmoid(p.beta.to(gate_dtype(p.device))).mul_(2 if p.allow_neg_eigval else 1).to(p.state_dtype)
    else:
        beta = p.beta.to(p.state_dtype)
    # e^-1000 is 0 in every dtype, and chunk sums of such g keep the resolution of the other tokens
    return g.clamp(min=RESET), beta


def activate_bwd(
    problem: Problem, dg: PerHead, dbeta: PerHead
) -> tuple[PerHead | None, PerHead | None, HeadParam | None, HeadParam | None]:
    """Return dg, dbeta, dA_log, ddt_bias of the caller's tensors from the gradients of the rule's gates."""
    p = problem
    dA_log = ddt_bias = None
    if p.g is None:
        dg_given = None
    elif p.use_gate_in_kernel:
        assert p.A_log is not None
        dg_given, dA_log, ddt_bias = log_decay_bwd(p.g, p.A_log, p.dt_bias, dg)
    else:
        dg_given = dg.to(p.g.dtype)
    if p.beta is None:
        return dg_given, None, dA_log, ddt_bias
    if p.use_beta_sigmoid_in_kernel:
        dbeta = beta_bwd(p.beta, 2 * dbeta if p.allow_neg_eigval else dbeta)
    return dg_given, dbeta.to(p.beta.dtype), dA_log, ddt_bias


def _add_bias(a: PerHead, dt_bias: HeadParam | None) -> PerHead:
    x = a.to(gate_dtype(a.device))
    return x if dt_bias is None else x + dt_bias.to(x.dtype)
