"""Repeat a layer's decode step on whole fp32 states on a CPU: the arithmetic of `step` without its problems.

One token takes a CPU some 60 operators of a microsecond, so problems, slots and blocks of rows cost more than
the arithmetic. This form is for the call that a plain model makes: row n has slot n, nothing is padding, and
the states are fp32. The functions are those of `causal_conv1d_update`, `decode` and `rms_norm_gated`, in
their order, with their roundings to a dtype of 16 bits, so the bits are theirs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gdn.backends.eager.alignment import align_rows
from gdn.backends.eager.decode import advance_token
from gdn.backends.eager.norm import activate_gate, l2norm_, normalise
from gdn.problem.step import StepProblem

F32, F64 = torch.float32, torch.float64
FLOATS = {F32, torch.bfloat16, torch.float16}


def plan_dense_step(p: StepProblem) -> Callable[..., None] | None:
    """Return a function of the tensors of such a call, in their order, for repeats; None for other calls."""
    floats = (
        p.mixed_qkv, p.conv_state, p.conv_weight, p.conv_bias, p.a, p.b, p.A_log, p.dt_bias, p.z,
        p.norm_weight,
    )  # fmt: skip
    is_float = p.state.dtype == F32 and all(x is None or x.dtype in FLOATS for x in floats)
    is_by_row = p.conv_index is None and p.read_index is None and p.write_index is None
    is_dense = p.state.stride()[-2:] == p.state.shape[-1:] + (1,) and p.conv_state.shape[2] > 0
    is_usual = p.A_log is not None and p.lower_bound is None and not p.is_per_channel and p.null_slot is None
    if (
        p.x.device.type != "cpu"
        or not (is_float and is_by_row and is_dense and is_usual)
        or p.x.shape[0] == 0
    ):
        return None
    # the tensors of this call must not live as long as its plan
    options, constants = p.without_tensors(), Constants.from_problem(p)

    def launch(*tensors: Tensor | None) -> None:
        # without autograd's bookkeeping these operators take a CPU 15 % less time, and views half
        with torch.inference_mode():
            # the operators below are those of PyTorch, which autocast would run in 16 bits
            if torch.is_autocast_enabled("cpu"):
                with torch.autocast("cpu", enabled=False):
                    _run(options.with_tensors(tensors), constants)
            else:
                _run(options.with_tensors(tensors), constants)

    return launch


@dataclass(frozen=True)
class Constants:
    """Hold the numbers of a step as tensors: an operator takes a tensor in half the time of a number.

    order [2 HV] are the key and the query of each value head among the rows q | k [2 H, K].
    """

    order: Tensor
    scale: Tensor
    norm_eps: Tensor
    l2_eps: Tensor
    one: Tensor
    largest: Tensor

    @staticmethod
    def from_problem(p: StepProblem) -> "Constants":
        def number(x: float, dtype: torch.dtype) -> Tensor:
            return torch.tensor(x, dtype=dtype, device="cpu")

        head = torch.arange(p.HV, device="cpu") // (p.HV // p.H)
        return Constants(
            torch.stack((p.H + head, head), 1).flatten(), number(p.scale, F32), number(p.norm_eps, F32),
            number(1e-6, F32), number(1, F64), number(torch.finfo(F64).max, F64),
        )  # fmt: skip


def _run(p: StepProblem, constants: Constants) -> None:
    """Write p.conv_state, p.state and p.out."""
    B, H, HV, K, V = p.mixed_qkv.shape[0], p.H, p.HV, p.K, p.V
    qk, v = _convolve(p).split_with_sizes((2 * H * K, HV * V), 1)
    rows = qk.view(B, 2 * H, K)
    if p.use_qk_l2norm_in_kernel:
        l2norm_(rows, constants.l2_eps)
    # each key head once for each of its value heads
    kq = align_rows(rows.index_select(1, constants.order).view(B, HV, 2, K))
    # a single row has no axis of rows: a view costs as much as the arithmetic here
    lead = (HV,) if B == 1 else (B, HV)
    kq = kq.view(*lead, 2, K)
    k, q = kq.chunk(2, -2)
    decay, beta = (x.view(*lead, 1, 1) for x in _load_gates(p, constants))
    beta_v = beta * v.view(*lead, 1, V)
    o = torch.empty_like(beta_v)
    token = (kq, k, beta_v, o, beta, (k * q).sum(-1, keepdim=True), decay)
    if B == 1:
        advance_token(p.state[0], token, p.state_v_first)
    else:
        for S, *operands in zip(p.state.narrow(0, 0, B), *token, strict=True):
            advance_token(S, tuple(operands), p.state_v_first)
    y = o.mul_(constants.scale).view(B, HV, V)
    if p.has_norm:
        y, _ = normalise(_round(y, p.x.dtype), constants.norm_eps)
    if p.norm_weight is not None:
        y.mul_(p.norm_weight)
    if p.z is None:
        p.out.copy_(y)
    else:
        torch.mul(y, activate_gate(p.z.float(), p.norm_activation), out=p.out)


def _convolve(p: StepProblem) -> Tensor:
    """Return the convolved rows [B, D] in fp32; shift the inputs into the windows."""
    windows, B = p.conv_state, p.mixed_qkv.shape[0]
    windows = windows if windows.shape[0] == B else windows.narrow(0, 0, B)
    line = torch.cat((windows, p.mixed_qkv.unsqueeze(2)), 2).float()
    windows.copy_(line.narrow(2, 1, windows.shape[2]))
    first, *inputs = line.unbind(2)[-p.W :]
    tap, *taps = p.conv_weight.float().unbind(1)
    mixed = first * tap
    for x, tap in zip(inputs, taps, strict=True):
        mixed.addcmul_(x, tap)
    if p.conv_bias is not None:
        mixed.add_(p.conv_bias)
    if p.conv_activation == "silu":
        torch.nn.functional.silu(mixed, inplace=True)
    return _round(mixed, p.x.dtype)


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x, fp32, with the digits of a dtype."""
    return x if dtype == F32 else x.to(dtype).float()


def _load_gates(p: StepProblem, constants: Constants) -> tuple[Tensor, Tensor]:
    """Return e^g and beta [B, HV], computed in fp64 by the operators of `log_decay` and `sigmoid`."""
    assert p.A_log is not None
    x = p.a.double()
    if p.dt_bias is not None:
        x.add_(p.dt_bias)
    rate = p.A_log.double().exp_().clamp_max_(constants.largest)
    softplus = x.abs().neg_().exp_().log1p_()
    softplus.add_(x.relu_())
    beta = p.b.double().neg_().exp_().add_(constants.one).reciprocal_()
    if p.allow_neg_eigval:
        beta.add_(beta)
    return softplus.mul_(rate).neg_().exp_().float(), beta.float()
