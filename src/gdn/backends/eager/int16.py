"""Round states to int16 with an fp32 scale per column of V, and read them back, with plain PyTorch.

scale_v = max_k |S_kv| / 32767;   n_kv = S_kv / scale_v to the nearest integer;   S_kv = n_kv scale_v
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LEVELS = 32767
SMALLEST = 2.0**-100  # a column below it is stored as zeros: its scale would be subnormal
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class ColumnStates:
    """Hold some states in int16 as views of a pool; indexing takes slots, or entries of a ring."""

    state: Tensor  # [..., HV, V, K], or [..., HV, K, V]
    column_scale: Tensor  # [..., HV, V]
    is_v_first: bool

    def __getitem__(self, place: Any) -> "ColumnStates":
        return ColumnStates(self.state[place], self.column_scale[place], self.is_v_first)

    @property
    def shape(self) -> torch.Size:
        return self.state.shape

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the states in `dtype`, in the layout of the pool."""
        return self.state.to(dtype) * self._along_columns(self.column_scale).to(dtype)

    def copy_(self, S: Tensor) -> None:
        """Round states in the layout of the pool, and store them."""
        largest = S.abs().amax(-1 if self.is_v_first else -2)
        # the division is rounded correctly, so a state that was read has the scale that it is stored with
        scale = (largest / LEVELS).float()
        is_stored = (largest >= SMALLEST) & (largest <= LARGEST)
        # NaN fails both comparisons
        empty = torch.where(largest < SMALLEST, 0.0, float("nan")).float()
        step = torch.where(is_stored, scale, 1.0).to(S.dtype)
        n = torch.where(self._along_columns(is_stored), S, 0.0).div_(self._along_columns(step)).round_()
        self.state.copy_(n)
        self.column_scale.copy_(torch.where(is_stored, scale, empty))

    def round_(self, S: Tensor) -> None:
        """Round states in place, as if they were stored and read."""
        rounded = ColumnStates(
            torch.empty_like(S, dtype=torch.int16),
            S.new_empty(self.column_scale.shape, dtype=torch.float32),
            self.is_v_first,
        )
        rounded.copy_(S)
        S.copy_(rounded.read(S.dtype))

    def _along_columns(self, x: Tensor) -> Tensor:
        """Return x [..., V] as a factor of states."""
        return x.unsqueeze(-1 if self.is_v_first else -2)


def states_of(p: Any) -> Tensor | ColumnStates:
    """Return the states of a problem's pool."""
    return p.state if p.column_scale is None else ColumnStates(p.state, p.column_scale, p.state_v_first)


def read_states(states: Tensor | ColumnStates, dtype: torch.dtype) -> Tensor:
    """Return some states of a pool in `dtype`."""
    return states.to(dtype) if isinstance(states, Tensor) else states.read(dtype)
