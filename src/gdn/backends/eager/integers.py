"""Round states to integers with an fp32 scale per column of V, and read them back, with plain PyTorch.

scale_v = max_k |S_kv| / L;   n_kv = S_kv / scale_v to the nearest integer;   S_kv = n_kv scale_v

L is 32767 in int16, 127 in int8, and 1905 in int8 with a remainder of 4 bits: n is then 15 times the int8
plus the remainder.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

STEPS = 15  # of a remainder to one of its int8: -7 to 7 fill them, and no quotient n / 15 is a tie
SMALLEST = 2.0**-100  # a column below it is stored as zeros: its scale would be subnormal
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class ColumnStates:
    """Hold some states in integers as views of a pool; indexing takes slots, or entries of a ring."""

    state: Tensor  # [..., HV, V, K], or [..., HV, K, V]
    column_scale: Tensor  # [..., HV, V]
    is_v_first: bool
    remainder: Tensor | None = None  # of two keys in a byte: [..., HV, V, K / 2], or [..., HV, K / 2, V]
    steps: int = 1  # scales in a step of `state`: STEPS for int8 with a remainder, also where only it is read

    def __getitem__(self, place: Any) -> "ColumnStates":
        low = None if self.remainder is None else self.remainder[place]
        return ColumnStates(self.state[place], self.column_scale[place], self.is_v_first, low, self.steps)

    @property
    def shape(self) -> torch.Size:
        return self.state.shape

    @property
    def levels(self) -> int:
        """Return L, the largest integer of a column."""
        return int(torch.iinfo(self.state.dtype).max) * self.steps

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the states in `dtype`, in the layout of the pool."""
        n = self.state.to(dtype)
        if self.steps > 1:
            n = n * self.steps
        if self.remainder is not None:
            n += self._unpack(self.remainder)
        return n * self._along_columns(self.column_scale).to(dtype)

    def copy_(self, S: Tensor) -> None:
        """Round states in the layout of the pool, and store them."""
        largest = S.abs().amax(-1 if self.is_v_first else -2)
        # the division is rounded correctly, so a state that was read has the scale that it is stored with
        scale = (largest / self.levels).float()
        is_stored = (largest >= SMALLEST) & (largest <= LARGEST)
        # NaN fails both comparisons
        empty = torch.where(largest < SMALLEST, 0.0, float("nan")).float()
        step = torch.where(is_stored, scale, 1.0).to(S.dtype)
        n = torch.where(self._along_columns(is_stored), S, 0.0).div_(self._along_columns(step)).round_()
        if self.remainder is not None:
            high = (n / STEPS).round_()
            self.remainder.copy_(self._pack(n.sub_(high, alpha=STEPS)))
            n = high
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

    def _pack(self, low: Tensor) -> Tensor:
        """Return remainders of -7 to 7 in bytes: key 2 j in the low 4 bits, key 2 j + 1 in the high ones."""
        low = (low.mT if self.is_v_first else low).to(torch.int16) & 15
        low = torch.nn.functional.pad(low, (0, 0, 0, low.shape[-2] % 2))
        packed = (low[..., 0::2, :] | low[..., 1::2, :] << 4).to(torch.uint8)
        return packed.mT if self.is_v_first else packed

    def _unpack(self, packed: Tensor) -> Tensor:
        """Return the remainders in int8, in the layout of the states."""
        packed = packed.mT if self.is_v_first else packed
        pairs = torch.stack((packed & 15, packed >> 4), -2).to(torch.int8)
        low = ((pairs ^ 8) - 8).flatten(-3, -2)
        return low[..., : self.shape[-1], :].mT if self.is_v_first else low[..., : self.shape[-2], :]


def states_of(p: Any, is_v_first: bool | None = None) -> Tensor | ColumnStates:
    """Return the states of a problem, or of a pool whose layout is given, as folds read and write them."""
    if p.column_scale is None:
        states: Tensor = p.state
        return states
    steps = 1 if p.remainder is None else STEPS
    is_v_first = p.state_v_first if is_v_first is None else is_v_first
    return ColumnStates(p.state, p.column_scale, is_v_first, p.remainder, steps)


def read_states(states: Tensor | ColumnStates, dtype: torch.dtype) -> Tensor:
    """Return some states of a pool in `dtype`."""
    return states.to(dtype) if isinstance(states, Tensor) else states.read(dtype)


def read_without_remainder(states: Tensor | ColumnStates, dtype: torch.dtype) -> Tensor:
    """Return some states of a pool as tokens read them: only folds read the remainder."""
    return read_states(states if isinstance(states, Tensor) else replace(states, remainder=None), dtype)
