"""Wrap `causal_conv1d` in a module that holds the parameters of the short convolution."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gdn.layers.projections import has_own_forward
from gdn.notation import Channels, ConvState, Offsets
from gdn.ops import conv as ops
from gdn.ops.conv import causal_conv1d, causal_conv1d_update
from gdn.problem import ContextParallel


class ShortConvolution(nn.Module):
    """Compute y_t = silu(bias + sum_j weight[:, j] x_{t-W+1+j}); weight is [D, W], bias [D] or None."""

    def __init__(
        self, channels: int, width: int, *, with_bias: bool = False, backend: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.backend = backend
        self.weight = nn.Parameter(torch.empty(channels, width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if with_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters uniformly in +-1 / sqrt(W), the initialisation of a depthwise nn.Conv1d."""
        bound = self.weight.shape[1] ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x: Channels,
        initial_state: ConvState | None = None,
        *,
        output_final_state: bool = False,
        cu_seqlens: Offsets | None = None,
        cu_seqlens_cpu: Offsets | None = None,
        cp_context: ContextParallel | None = None,
    ) -> tuple[Channels, ConvState | None]:
        """Convolve whole sequences; return y and, with output_final_state, the last W - 1 inputs of each."""
        return causal_conv1d(
            x, self.weight, self.bias, activation="silu", initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
            cp_context=cp_context, backend=self.backend,
        )  # fmt: skip

    def step(self, x: Channels, window: ConvState) -> tuple[Channels, ConvState]:
        """Convolve a few more tokens of each row, without gradient; return y and the next window."""
        window = window.clone()
        y = causal_conv1d_update(x, window, self.weight, self.bias, activation="silu", backend=self.backend)
        return y, window

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.weight.shape[1]}, bias={self.bias is not None}"


def convolve_and_split(
    module: nn.Module, sizes: Sequence[int], x: Channels, initial_state: ConvState | None, **options: Any
) -> tuple[tuple[Channels, ...], ConvState | None]:
    """Return what a ShortConvolution does, y split into parts of so many channels.

    Its backward needs no copy of the parts' gradients, unless the module is another one or has hooks.
    """
    if type(module) is not ShortConvolution or not has_own_forward(module):
        y, final_state = module(x, initial_state, **options)
        return y.split(sizes, dim=-1), final_state
    options |= {"activation": "silu", "initial_state": initial_state, "backend": module.backend}
    return ops.convolve_and_split(sizes, x, module.weight, module.bias, **options)
