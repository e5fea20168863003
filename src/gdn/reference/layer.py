"""Compute the operators around the rule in plain torch: the causal convolution and the gated norm."""

import torch
from torch import Tensor

from gdn.notation import Channels, ConvState, ConvWeight, Offsets

ACTIVATIONS = {None: lambda z: z, "silu": lambda z: z * torch.sigmoid(z), "sigmoid": torch.sigmoid}


def causal_conv1d(
    x: Channels,
    weight: ConvWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: ConvState | None = None,
    cu_seqlens: Offsets | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Channels, ConvState]:
    """Compute y_t = act(bias + sum_j weight[:, j] x_{t-W+1+j}), token by token.

    The inputs before the first token of a sequence are its initial state, or zeros.
    Returns y [B, T, D], zero past cu_seqlens[-1], and the last W - 1 inputs of each sequence [N, D, W-1].
    """
    (B, T, D), W = x.shape, weight.shape[1]
    x, weight = x.to(dtype), weight.to(dtype)
    y = [[torch.zeros(D, dtype=dtype, device=x.device)] * T for _ in range(B)]
    if cu_seqlens is None:
        ranges = [(b, 0, T) for b in range(B)]
    else:
        ends = cu_seqlens.tolist()
        ranges = [(0, start, end) for start, end in zip(ends[:-1], ends[1:], strict=True)]
    finals = []
    for n, (b, start, end) in enumerate(ranges):
        before = x.new_zeros(D, W - 1) if initial_state is None else initial_state[n].to(dtype)
        inputs = torch.cat([before, x[b, start:end].t()], dim=1)
        for t in range(start, end):
            pre = (weight * inputs[:, t - start : t - start + W]).sum(1)
            y[b][t] = ACTIVATIONS[activation](pre if bias is None else pre + bias.to(dtype))
        finals.append(inputs[:, inputs.shape[1] - (W - 1) :])
    flat = [token for row in y for token in row]
    final = torch.stack(finals) if finals else x.new_zeros(0, D, W - 1)
    return torch.stack(flat).view(B, T, D) if flat else x.new_zeros(B, T, D), final


def rms_norm_gated(
    x: Tensor,
    z: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Compute weight * x * rsqrt(mean(x * x) + eps) * act(z) over the last axis."""
    x = x.to(dtype)
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.to(dtype)
    return y if z is None else y * ACTIVATIONS[activation](z.to(dtype))
