"""Repeat a layer's decode step of whole fp32 tensors on a CPU: the arithmetic of `step` without its problems.

One token takes a CPU some 50 operators of a microsecond or two, so problems, slots and blocks of rows cost
more than the arithmetic. This form is for the call that a plain model makes: row n has slot n, nothing is
padding, and all tensors are fp32 with contiguous states. The operators are those of `causal_conv1d_update`,
`decode` and `rms_norm_gated`, in their order, so the bits are theirs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gdn.backends.eager.alignment import align_rows
from gdn.backends.eager.decode import advance_token
from gdn.backends.eager.gate import gate_of, log_decay, sigmoid
from gdn.backends.eager.norm import activate_gate, l2norm_, normalise
from gdn.problem.step import StepProblem


def plan_dense_step(p: StepProblem) -> Callable[..., None] | None:
    """Return a function of the tensors of such a call, in their order, for repeats; None for other calls."""
    floats = (p.mixed_qkv, p.conv_state, p.conv_weight, p.conv_bias, p.state, p.z, p.norm_weight, p.out)
    is_fp32 = all(x is None or x.dtype == torch.float32 for x in floats)
    is_by_row = p.conv_index is None and p.read_index is None and p.write_index is None
    is_dense = p.state.stride()[-2:] == p.state.shape[-1:] + (1,) and p.conv_state.shape[2] > 0
    is_usual = p.A_log is not None and p.lower_bound is None and not p.is_per_channel and p.null_slot is None
    if p.x.device.type != "cpu" or not (is_fp32 and is_by_row and is_dense and is_usual) or p.x.shape[0] == 0:
        return None
    # the tensors of this call must not live as long as its plan
    options = p.without_tensors()

    def launch(*tensors: Tensor | None) -> None:
        # on a CPU the operators below are those of PyTorch, which autocast would run in 16 bits
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                _run(options.with_tensors(tensors))
        else:
            _run(options.with_tensors(tensors))

    return launch


def _run(p: StepProblem) -> None:
    """Write p.conv_state, p.state and p.out."""
    B, H, HV, K, V = p.mixed_qkv.shape[0], p.H, p.HV, p.K, p.V
    mixed, size = _convolve(p), H * K
    q, k, v = mixed.narrow(1, 0, size), mixed.narrow(1, size, size), mixed.narrow(1, 2 * size, HV * V)
    # each key head once for each of its value heads
    k, q = (x.view(B, H, 1, K).expand(B, H, HV // H, K) for x in (k, q))
    kq = torch.stack((k, q), 3).view(B, HV, 2, K)
    if p.use_qk_l2norm_in_kernel:
        l2norm_(kq)
    qk = (kq.select(2, 0) * kq.select(2, 1)).sum(-1)
    gate = gate_of(p, p.a, p.mixed_qkv.dtype)
    decay = log_decay(p.a, gate).exp().to(q.dtype).view(B, HV, 1, 1)
    beta = sigmoid(p.b.to(gate.dtype))
    beta = (beta.mul_(2) if p.allow_neg_eigval else beta).to(q.dtype).view(B, HV, 1, 1)
    beta_v = beta * v.view(B, HV, 1, V)
    qk, kq, o = qk.view(B, HV, 1, 1), align_rows(kq), torch.empty_like(beta_v)
    operands = (kq, kq.narrow(2, 0, 1), beta_v, o, beta, qk, decay)
    rows = zip(p.state.narrow(0, 0, B).unbind(0), *(x.unbind(0) for x in operands), strict=True)
    for S, *token in rows:
        advance_token(S, tuple(token), p.state_v_first)
    scaled = torch.mul(o, p.scale).view(B, HV, V)
    if not p.has_norm:
        p.out.copy_(scaled)
        return
    y, _ = normalise(scaled, p.norm_eps)
    if p.norm_weight is not None:
        y.mul_(p.norm_weight)
    if p.z is not None:
        y.mul_(activate_gate(p.z, p.norm_activation))
    p.out.copy_(y)


def _convolve(p: StepProblem) -> Tensor:
    """Return the convolved rows [B, D]; shift them into the windows."""
    windows, W = p.conv_state.narrow(0, 0, p.mixed_qkv.shape[0]), p.W
    line = torch.cat([windows.transpose(1, 2), p.mixed_qkv.unsqueeze(1)], dim=1)
    windows.copy_(line.narrow(1, 1, windows.shape[2]).transpose(1, 2))
    first, *inputs = line.unbind(1)[-W:]
    tap, *taps = p.conv_weight.unbind(1)
    mixed = first * tap
    for x, tap in zip(inputs, taps, strict=True):
        mixed.addcmul_(x, tap)
    if p.conv_bias is not None:
        mixed.add_(p.conv_bias)
    return torch.nn.functional.silu(mixed, inplace=True) if p.conv_activation == "silu" else mixed
