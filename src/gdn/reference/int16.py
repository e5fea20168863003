"""Define states in int16 with an fp32 scale per column of V, and read and write states of any pool.

    scale_v = max_k |S_kv| / 32767, in fp32;   n_kv = S_kv / scale_v to the nearest integer, ties to even
    S_kv = n_kv scale_v

A column of V never mixes with another one in the recurrence, so each has a scale of its own. The division is
rounded correctly: a state that is read and stored again keeps all its bits. A column whose largest element is
below 2^-100 is stored as zeros with scale 0. A column that holds NaN or infinity, or an element above the
largest fp32 number, has the scale NaN: all of it reads as NaN.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LEVELS = 32767  # the largest integer: -32768 is not used, so that rounding is symmetric
SMALLEST = 2.0**-100  # of a column that is not zero: its scale is a normal fp32 number
LARGEST = torch.finfo(torch.float32).max


def round_columns(S: Tensor) -> tuple[Tensor, Tensor]:
    """Return n [..., K, V] in int16 and scale [..., V] in fp32 of states S [..., K, V]."""
    largest = S.abs().amax(-2)
    scale = (largest / LEVELS).to(torch.float32)
    is_stored = (largest >= SMALLEST) & (largest <= LARGEST)
    n = torch.round(S / scale.to(S.dtype).unsqueeze(-2))
    n = torch.where(is_stored.unsqueeze(-2), n, torch.zeros_like(n)).to(torch.int16)
    # NaN fails both comparisons
    empty = torch.where(largest < SMALLEST, 0.0, float("nan")).to(torch.float32)
    return n, torch.where(is_stored, scale, empty)


@dataclass(frozen=True)
class StoredStates:
    """Read and write single states of a pool: floats, or int16 with the scale of each column of V."""

    state: Tensor
    column_scale: Tensor | None
    is_v_first: bool
    dtype: torch.dtype

    def clone(self) -> "StoredStates":
        """Return a copy with memory of its own."""
        scale = None if self.column_scale is None else self.column_scale.clone()
        return StoredStates(self.state.clone(), scale, self.is_v_first, self.dtype)

    def read(self, place: Any) -> Tensor:
        """Return the state [HV, K, V] of a slot, or of (slot, entry), in `dtype`."""
        S = self.state[place]
        S = (S.transpose(-1, -2) if self.is_v_first else S).to(self.dtype)
        return S if self.column_scale is None else S * self.column_scale[place].to(self.dtype).unsqueeze(-2)

    def write(self, place: Any, S: Tensor) -> None:
        """Round the state S [HV, K, V] and store it in a slot, or in (slot, entry)."""
        if self.column_scale is not None:
            S, self.column_scale[place] = round_columns(S)
        self.state[place] = S.transpose(-1, -2) if self.is_v_first else S

    def round(self, S: Tensor) -> Tensor:
        """Return the state that `read` would return after `write`."""
        if self.column_scale is None:
            return S.to(self.state.dtype).to(self.dtype)
        n, scale = round_columns(S)
        return n.to(self.dtype) * scale.to(self.dtype).unsqueeze(-2)
