"""Hold the sizes of a model for `warmup`, and make small tensors of them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn.ops.int16 import Int16Pool

LENGTH = 65  # tokens of a prompt: one whole chunk and one ragged chunk
LONG = 4096  # tokens of a prompt so long that dispatch may choose other kernels


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes, dtypes and options that all calls of a model share."""

    H: int
    HV: int
    K: int
    V: int
    W: int
    T: int
    rows: int
    device: torch.device
    dtype: torch.dtype
    dt_bias_dtype: torch.dtype
    backend: str | None
    gates: tuple[str, ...] = ("raw",)
    index_dtype: torch.dtype = torch.int32
    v_first: bool = True
    l2norm: bool = True
    is_per_channel: bool = False
    lower_bound: float | None = None

    @property
    def decay_shape(self) -> tuple[int, ...]:
        """Return the axes of a decay after those of the tokens."""
        return (self.HV, self.K) if self.is_per_channel else (self.HV,)

    @property
    def conventions(self) -> dict[str, Any]:
        """Return the options that every call on a pool shares."""
        return {
            "use_qk_l2norm_in_kernel": self.l2norm, "state_v_first": self.v_first, "backend": self.backend,
        }  # fmt: skip

    @property
    def channels(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V

    def mixed(self, *lead: int) -> Tensor:
        """Return zeros of shape [*lead, D], rows of q | k | v."""
        return torch.zeros(*lead, self.channels, dtype=self.dtype, device=self.device)

    def tokens(self, *lead: int) -> dict[str, Any]:
        """Return q, k, v as views of the rows of `mixed`."""
        widths = [self.H * self.K, self.H * self.K, self.HV * self.V]
        q, k, v = self.mixed(*lead).split(widths, -1)
        return {
            "q": q.unflatten(-1, (self.H, self.K)),
            "k": k.unflatten(-1, (self.H, self.K)),
            "v": v.unflatten(-1, (self.HV, self.V)),
        }

    def raw(self, *lead: int) -> dict[str, Any]:
        """Return the raw logits of the gates and their parameters."""
        a = torch.zeros(*lead, *self.decay_shape, dtype=self.dtype, device=self.device)
        b = torch.zeros(*lead, self.HV, dtype=self.dtype, device=self.device)
        A_log = torch.zeros(self.HV, device=self.device)
        dt_bias = torch.zeros(self.decay_shape, dtype=self.dt_bias_dtype, device=self.device)
        return {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": self.lower_bound}

    def active(self, *lead: int) -> dict[str, Any]:
        """Return g and beta in the dtype of the results of `gate`."""
        g = torch.zeros(*lead, *self.decay_shape, device=self.device)
        return {"g": g, "beta": torch.zeros(*lead, self.HV, device=self.device)}

    def pool(self, dtype: torch.dtype, *lead: int) -> Any:
        """Return states of zeros, an `Int16Pool` in int16."""
        if dtype != torch.int16:
            return self.states(dtype, *lead)
        scales = torch.zeros(*lead, self.HV, self.V, device=self.device)
        return Int16Pool(self.states(dtype, *lead), scales)

    def kept(self, dtype: torch.dtype, *lead: int) -> Tensor:
        """Return states of zeros as drafts keep them: in the pool's dtype, in fp32 for int16."""
        return self.states(torch.float32 if dtype == torch.int16 else dtype, *lead)

    def states(self, dtype: torch.dtype, *lead: int) -> Tensor:
        last = (self.V, self.K) if self.v_first else (self.K, self.V)
        return torch.zeros(*lead, self.HV, *last, dtype=dtype, device=self.device)

    def index(self, *lead: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return distinct slots 0, 1, 2, ... in the shape `lead`."""
        count = torch.Size(lead).numel()
        return torch.arange(count, dtype=dtype or self.index_dtype, device=self.device).view(*lead)

    def offsets(self, N: int, T: int) -> Tensor:
        return self.index(N + 1) * T

    def batches(self) -> list[int]:
        """Return numbers of prompts: powers of two, since tiles change once the GPU is full; 1 on a CPU."""
        if self.device.type == "cpu" and self.backend != "triton":
            return [1]
        return [n for n in (1 << i for i in range(self.rows.bit_length())) if n <= self.rows]

    def prompts(self) -> list[tuple[int, int]]:
        """Return (number of prompts, tokens of each); on a GPU the last is one long prompt."""
        prompts = [(N, LENGTH) for N in self.batches()]
        return [*prompts, (1, LONG)] if self.device.type == "cuda" else prompts

    def packets(self) -> list[int]:
        """Return the packet lengths that need their own kernels: powers of two up to the longest packet."""
        return sorted({min(1 << i, self.T) for i in range(self.T.bit_length() + 1)})
