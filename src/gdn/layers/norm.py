"""Wrap `rms_norm_gated` in a module that holds its weight."""

import torch
from torch import Tensor, nn

from gdn.ops.norm import rms_norm_gated


class GatedRMSNorm(nn.Module):
    """Compute weight * x * rsqrt(mean(x * x) + eps) * act(z) over the last axis, whose length is `size`."""

    def __init__(
        self, size: int, *, eps: float = 1e-6, activation: str | None = "silu", backend: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps, self.activation, self.backend = eps, activation, backend
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return rms_norm_gated(
            x, z, self.weight, eps=self.eps, activation=self.activation, backend=self.backend
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, activation={self.activation!r}"
