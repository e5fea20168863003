"""The gates as the rule uses them, and the way back to the caller's tensors. Elementwise on [B, T, HV], in float64.

Float64 because the chunk sum of g is differenced: g = -1e6 on one token leaves the others' decays exact to 1e-10.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn.problem import Problem

# exp of it is 0 in every dtype, and 64 of them still resolve 1e-9
FLOOR = -1e5


def wide(device: torch.device) -> torch.dtype:
    """Float64, or float32 on devices that have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def activate(problem: Problem) -> tuple[Tensor, Tensor]:
    """g: log decay per token, at least FLOOR, float64; beta: write strength, in the computing dtype."""
    p, dtype = problem, wide(problem.device)
    shape = (p.B, p.T, p.HV)
    if p.g is None:
        g = torch.zeros(shape, dtype=dtype, device=p.device)
    elif p.use_gate_in_kernel:
        assert p.A_log is not None
        g = -torch.exp(p.A_log.to(dtype)) * softplus(_logits(p))
    else:
        g = p.g.to(dtype)
    if p.beta is None:
        beta = torch.ones(shape, dtype=p.state_dtype, device=p.device)
    elif p.use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(p.beta.to(dtype)).mul_(2 if p.allow_neg_eigval else 1).to(p.state_dtype)
    else:
        beta = p.beta.to(p.state_dtype)
    return g.clamp(min=FLOOR), beta


def activate_backward(
    problem: Problem, g: Tensor, beta: Tensor, dg: Tensor, dbeta: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dg, dbeta of the activated gates -> gradients of what the caller gave: g, beta, A_log, dt_bias.

    With g = -e^A softplus(x):  dx = -e^A sigmoid(x) dg;  dA_log = sum g dg;  ddt_bias = sum dx.
    """
    p, dtype = problem, wide(problem.device)
    # where e^g is 0 no gradient passes; what rounding left there would be multiplied by g in dA_log
    dg = dg.masked_fill(g < (-104 if p.state_dtype == torch.float32 else -746), 0)
    dA_log = ddt_bias = None
    if p.g is None:
        dg_in = None
    elif p.use_gate_in_kernel:
        assert p.A_log is not None
        wide_dg = dg.to(dtype)
        dx = -torch.exp(p.A_log.to(dtype)) * torch.sigmoid(_logits(p)) * wide_dg
        dg_in = dx.to(p.g.dtype)
        dA_log = (g * wide_dg).sum((0, 1)).to(p.A_log.dtype)
        ddt_bias = None if p.dt_bias is None else dx.sum((0, 1)).to(p.dt_bias.dtype)
    else:
        dg_in = dg.to(p.g.dtype)
    if p.beta is None:
        return dg_in, None, dA_log, ddt_bias
    if p.use_beta_sigmoid_in_kernel:
        top = 2 if p.allow_neg_eigval else 1
        dbeta = dbeta * beta * (1 - beta / top)
    return dg_in, dbeta.to(p.beta.dtype), dA_log, ddt_bias


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), exact in its dtype for very negative and very large x."""
    return F.relu(x) + torch.log1p(torch.exp(-x.abs()))


def _logits(problem: Problem) -> Tensor:
    dtype = wide(problem.device)
    assert problem.g is not None
    x = problem.g.to(dtype)
    return x if problem.dt_bias is None else x + problem.dt_bias.to(dtype)
