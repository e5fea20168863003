"""Tensors of a case: q, k, v, gates and states from one seed.

Random numbers are rounded to the dtype of the call first, so the kernel and the fp64 reference get equal
inputs.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gdn.testing.cases import Case


@dataclass(frozen=True)
class Inputs:
    """Hold the tensors and options of one call by argument name, and the gradients of its two outputs."""

    tensors: dict[str, Tensor]
    options: dict[str, Any]
    do: Tensor
    dfinal_state: Tensor

    def double(self) -> "Inputs":
        """Return equal numbers in fp64, so that their gradients are not rounded."""
        wide = {name: x.double() if x.is_floating_point() else x for name, x in self.tensors.items()}
        return replace(self, tensors=wide, do=self.do.double(), dfinal_state=self.dfinal_state.double())

    def heads(self, index: list[int]) -> "Inputs":
        """Return the problem restricted to these key heads and the value heads that read them."""
        ratio = self.tensors["v"].shape[2] // self.tensors["q"].shape[2]
        both = [h * ratio + j for h in index for j in range(ratio)]
        axis = {"A_log": 0, "dt_bias": 0, "initial_state": 1}

        def take(name: str, x: Tensor) -> Tensor:
            if name == "cu_seqlens":
                return x
            wanted = index if name in ("q", "k") else both
            return x.index_select(axis.get(name, 2), torch.tensor(wanted, device=x.device))

        return replace(
            self,
            tensors={name: take(name, x) for name, x in self.tensors.items()},
            do=take("do", self.do),
            dfinal_state=take("initial_state", self.dfinal_state),
        )

    def prefix(self, tokens: int) -> "Inputs":
        """Return the problem restricted to the first tokens of every sequence."""
        q, offsets = self.tensors["q"], self.tensors.get("cu_seqlens")
        tensors = dict(self.tensors)
        if offsets is None:
            index = torch.arange(min(tokens, q.shape[1]), device=q.device)
        else:
            ends = offsets.tolist()
            pieces = [range(a, min(a + tokens, b)) for a, b in itertools.pairwise(ends)]
            index = torch.tensor([t for piece in pieces for t in piece], dtype=torch.int64, device=q.device)
            lengths = [0, *itertools.accumulate(len(piece) for piece in pieces)]
            tensors["cu_seqlens"] = torch.tensor(lengths, dtype=offsets.dtype, device=offsets.device)
        for name in ("q", "k", "v", "g", "beta"):
            if name in tensors:
                tensors[name] = tensors[name].index_select(1, index)
        return replace(self, tensors=tensors, do=self.do.index_select(1, index))


def inputs(
    case: Case,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    is_drawn_there: bool = False,
) -> Inputs:
    """Return the tensors and options of a case, by the argument names of `gdn.chunk_gated_delta_rule`.

    Args:
        case            the problem
        dtype           dtype of q, k, v
        seed            equal seeds give equal numbers on every device
        device          where the tensors are
        is_drawn_there  draw the numbers on the device in fp32: fast for a billion of them, but other numbers
                        on each kind of device

    Returns: `Inputs` with tensors, options, and the gradients do and dfinal_state.

    Example:
        >>> from gdn.testing import packed
        >>> given = inputs(Case(gate="slow", lengths=packed(5, 3)), torch.bfloat16)
        >>> given.tensors["q"].shape, given.tensors["cu_seqlens"].tolist()
        (torch.Size([1, 8, 2, 64]), [0, 5, 8])
    """
    (H, HV), (K, V), (T, B, ends) = case.heads, case.sizes, case.lengths
    draw = _Draw(seed, device, torch.float32) if is_drawn_there else _Draw(seed)
    wide = torch.promote_types(dtype, torch.float32)
    gate_dtype = dtype if case.has_narrow_gates else wide
    q, k, v = draw.normal(B, T, H, K), _keys(case, draw, B, T, H, K), draw.normal(B, T, HV, V)
    if case.use_qk_l2norm_in_kernel:
        k = k * draw.uniform(0.5, 2.0, B, T, H, 1)
    if case.is_strided:
        flat = torch.cat([x.reshape(B, T, -1) for x in (q, k, v)], dim=-1).to(device, dtype)
        parts = flat.split([H * K, H * K, HV * V], dim=-1)
        q, k, v = (x.unflatten(-1, (heads, -1)) for x, heads in zip(parts, (H, H, HV), strict=True))
    else:
        q, k, v = (x.to(dtype) for x in (q, k, v))
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {name: _finite(x, gate_dtype) for name, x in _gates(case, draw, (B, T, HV)).items()}
    last = (V, K) if case.state_v_first else (K, V)
    shape = (case.lengths.N, HV, *last)
    if case.state != "none":
        tensors["initial_state"] = draw.normal(*shape).to(dtype if case.state == "narrow" else wide)
    if ends is not None:
        tensors["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32 if case.is_strided else torch.int64)
    options: dict[str, Any] = {"lower_bound": -5.0} if case.raw_gate in BOUNDED else {}
    options |= {
        "output_final_state": True,
        "scale": 0.3 if case.is_scaled else None,
        "use_qk_l2norm_in_kernel": case.use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": case.raw_gate != "off",
        "use_beta_sigmoid_in_kernel": case.beta in ("sigmoid", "negative"),
        "allow_neg_eigval": case.beta == "negative",
        "state_v_first": case.state_v_first,
        "exact": case.exact,
        "batch_invariant": case.batch_invariant,
    }
    do, dS = draw.normal(B, T, HV, V).to(dtype), draw.normal(*shape).to(wide)
    moved = {name: x.to(device) for name, x in tensors.items()}
    return Inputs(moved, options, do.to(device), dS.to(device))


BOUNDED = ("lower_bound", "bound_alone")  # values of raw_gate


class _Draw:
    """Draw random numbers from one seed: fp64 on the CPU, so that every device gets equal ones."""

    def __init__(
        self, seed: int, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float64
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.made: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, **self.made)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, **self.made)


def _keys(case: Case, draw: _Draw, B: int, T: int, H: int, K: int) -> Tensor:
    """Return unit keys; the keys of any two tokens have a cosine of about 0, 0.8 or 1."""
    cosine = {"random": 0.0, "correlated": 0.8, "identical": 1.0, "negative": 0.8}[case.keys]
    own = torch.nn.functional.normalize(draw.normal(B, T, H, K), dim=-1)
    shared = torch.nn.functional.normalize(draw.normal(1, 1, H, K), dim=-1)
    return torch.nn.functional.normalize(math.sqrt(1 - cosine) * own + math.sqrt(cosine) * shared, dim=-1)


def _gates(case: Case, draw: _Draw, shape: tuple[int, int, int]) -> dict[str, Tensor]:
    """Return g, beta, A_log and dt_bias of a case in fp64; beta is [B, T, HV], `shape`."""
    tensors = {}
    channels = (case.sizes[0],) if case.is_per_channel else ()
    A_log, dt_bias = _model_parameters(draw, shape[2], channels)
    if case.gate != "absent":
        g = _decay(case.gate, draw, A_log, dt_bias, (*shape, *channels))
        rate = A_log[:, None] if channels else A_log
        if case.raw_gate in BOUNDED:
            # any logits: the bounded gate of normal ones is neither 0 nor the bound
            tensors["g"] = draw.normal(*g.shape)
            if case.raw_gate == "lower_bound":
                tensors |= {"A_log": A_log.clamp(-1, 1), "dt_bias": dt_bias}
        elif case.raw_gate == "off":
            tensors["g"] = g
        else:
            if case.gate == "none":
                A_log = torch.full_like(A_log, -math.inf)
                rate = torch.full_like(rate, -math.inf)
            bias = dt_bias if case.raw_gate == "on" else torch.zeros_like(dt_bias)
            # the logit a with g = -exp(A_log) softplus(a + bias); any logit does where A_log = -inf
            speed = torch.where(rate.isinf(), torch.ones_like(g), -g * torch.exp(-rate))
            logit = torch.log(torch.expm1(speed.clamp(max=20)))
            tensors["g"] = torch.where(speed > 20, speed, logit) - bias
            tensors["A_log"] = A_log
            if case.raw_gate == "on":
                tensors["dt_bias"] = dt_bias
    if case.beta != "absent":
        logit = draw.normal(*shape)
        if case.keys in ("identical", "negative"):
            value = 1.0 if case.keys == "identical" else 1.9
            logit = torch.full_like(logit, math.log(value / (2 - value)))
        doubled = case.keys in ("identical", "negative")
        tensors["beta"] = logit.sigmoid() * (2 if doubled else 1) if case.beta == "given" else logit
    return tensors


def _model_parameters(draw: _Draw, HV: int, channels: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return Mamba's initial A_log = log U(0, 16) and dt_bias = softplus^-1 of a step in [0.001, 0.1]."""
    step = torch.exp(draw.uniform(math.log(0.001), math.log(0.1), HV, *channels)).clamp(min=1e-4)
    return torch.log(draw.uniform(0, 16, HV)), step + torch.log(-torch.expm1(-step))


def _decay(gate: str, draw: _Draw, A_log: Tensor, dt_bias: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the log decays [B, T, HV] or [B, T, HV, K] of a distribution of gates."""
    T, is_per_channel = shape[1], len(shape) == 4
    if gate in _CHANNEL_DECAYS:
        return _CHANNEL_DECAYS[gate](draw.normal(*shape))
    x = torch.nn.functional.logsigmoid(draw.normal(*shape))
    if gate == "model":
        rate = torch.exp(A_log[:, None] if is_per_channel else A_log)
        return -rate * torch.nn.functional.softplus(draw.normal(*shape) + dt_bias)
    rates = {"strong": 1.0, "mild": 1 / 16, "slow": 1 / 1024, "none": 0.0, "reset": 1 / 16, "mixed": 1 / 16}
    g = x * rates[gate]
    if gate == "mixed":
        g[:, :, 3::4] = 0
    if gate == "reset" and T > 0:
        # some tokens of some heads or channels, and one token of all, as an engine marks a sequence's start
        is_start = draw.uniform(0, 1, *shape) < (0.05 if is_per_channel else 0.01)
        is_start[:, T // 2] = True
        g = torch.where(is_start, torch.full_like(g, -1e6), g)
    return g


def _rates(x: Tensor) -> Tensor:
    """Return decays with a rate for each channel, e^-10 to e nats a token."""
    exponents = torch.linspace(-10, 1, x.shape[-1], dtype=x.dtype, device=x.device)
    return exponents.exp() * torch.nn.functional.logsigmoid(x)


def _turns(x: Tensor) -> Tensor:
    """Return decays of -2.1 in one half of the channels at even tokens and in the other half at odd ones.

    No channel keeps anything for long, yet the state survives: what one half hands to the other does.
    """
    g = torch.zeros_like(x)
    g[:, 0::2, :, : x.shape[-1] // 2] = -2.1
    g[:, 1::2, :, x.shape[-1] // 2 :] = -2.1
    return g


_CHANNEL_DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "rates": _rates,
    "turns": _turns,
    "wild": lambda x: -torch.exp(4 * x),
    "bounded": lambda x: -5 * torch.sigmoid(x),
}


def _finite(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert x to a dtype; finite numbers stay finite."""
    limit = torch.finfo(dtype).max
    return torch.where(x.isinf(), x, x.clamp(-limit, limit)).to(dtype)
