"""Define states in integers with an fp32 scale per column of V, and read and write states of any pool.

    scale_v = max_k |S_kv| / L, in fp32;   n_kv = S_kv / scale_v to the nearest integer, ties to even
    S_kv = n_kv scale_v

    state                      L        stored
    int16                      32767    n
    int8                       127      n
    int8 with a remainder      1905     h = n / 15 to the nearest integer, and n - 15 h, of -7 to 7, in 4 bits

A column of V never mixes with another one in the recurrence, so each has a scale of its own. The division is
rounded correctly: a state that is read and stored again keeps all its bits. A column whose largest element is
below 2^-100 is stored as zeros with scale 0. A column that holds NaN or infinity, or an element above the
largest fp32 number, has the scale NaN: all of it reads as NaN.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LEVELS = 32767  # the largest int16: -32768 is not used, so that rounding is symmetric
STEPS = 15  # of a remainder to one of its int8: odd, so that n / 15 is never halfway between two integers
SMALLEST = 2.0**-100  # of a column that is not zero: its scale is a normal fp32 number
LARGEST = torch.finfo(torch.float32).max


def largest_integer(state: Tensor, remainder: Tensor | None) -> int:
    """Return L of a pool of integers."""
    return LEVELS if state.dtype == torch.int16 else 127 if remainder is None else 127 * STEPS


def round_columns(S: Tensor, most: int = LEVELS) -> tuple[Tensor, Tensor]:
    """Return n [..., K, V] in int16 and scale [..., V] in fp32 of states S [..., K, V]; `most` is L."""
    largest = S.abs().amax(-2)
    scale = (largest / most).to(torch.float32)
    is_stored = (largest >= SMALLEST) & (largest <= LARGEST)
    n = torch.round(S / scale.to(S.dtype).unsqueeze(-2))
    n = torch.where(is_stored.unsqueeze(-2), n, torch.zeros_like(n)).to(torch.int16)
    # NaN fails both comparisons
    empty = torch.where(largest < SMALLEST, 0.0, float("nan")).to(torch.float32)
    return n, torch.where(is_stored, scale, empty)


def split_integers(n: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 part and the remainder of integers n [..., K, V]; of two keys in a byte, K rounded up.

    A byte holds the remainders of keys 2 j and 2 j + 1 in its low and high 4 bits, in two's complement.
    """
    high = torch.round(n.double() / STEPS)
    low = torch.nn.functional.pad((n - STEPS * high).to(torch.int16) & 15, (0, 0, 0, n.shape[-2] % 2))
    packed = low[..., 0::2, :] + 16 * low[..., 1::2, :]
    return high.to(torch.int8), packed.to(torch.uint8)


def join_integers(high: Tensor, packed: Tensor) -> Tensor:
    """Return n [..., K, V] of an int8 part [..., K, V] and its remainder [..., K / 2 rounded up, V]."""
    low = torch.stack((packed & 15, packed >> 4), -2).flatten(-3, -2)[..., : high.shape[-2], :]
    return STEPS * high.to(torch.int16) + ((low.to(torch.int16) ^ 8) - 8)


@dataclass(frozen=True)
class StoredStates:
    """Read and write single states of a pool: floats, or integers with the scale of each column of V."""

    state: Tensor
    column_scale: Tensor | None
    is_v_first: bool
    dtype: torch.dtype
    remainder: Tensor | None = None

    def clone(self) -> "StoredStates":
        """Return a copy with memory of its own."""
        scale, low = (None if x is None else x.clone() for x in (self.column_scale, self.remainder))
        return StoredStates(self.state.clone(), scale, self.is_v_first, self.dtype, low)

    def read(self, place: Any) -> Tensor:
        """Return the state [HV, K, V] of a slot, or of (slot, entry), in `dtype`."""
        S = self._with_keys_first(self.state[place])
        if self.remainder is not None:
            S = join_integers(S, self._with_keys_first(self.remainder[place]))
        S = S.to(self.dtype)
        return S if self.column_scale is None else S * self.column_scale[place].to(self.dtype).unsqueeze(-2)

    def write(self, place: Any, S: Tensor) -> None:
        """Round the state S [HV, K, V] and store it in a slot, or in (slot, entry)."""
        if self.column_scale is not None:
            S, self.column_scale[place] = round_columns(S, largest_integer(self.state, self.remainder))
        if self.remainder is not None:
            S, packed = split_integers(S)
            self.remainder[place] = self._with_keys_first(packed)
        self.state[place] = self._with_keys_first(S)

    def round(self, S: Tensor) -> Tensor:
        """Return the state that `read` would return after `write`."""
        if self.column_scale is None:
            return S.to(self.state.dtype).to(self.dtype)
        n, scale = round_columns(S, largest_integer(self.state, self.remainder))
        return n.to(self.dtype) * scale.to(self.dtype).unsqueeze(-2)

    def _with_keys_first(self, x: Tensor) -> Tensor:
        """Return x with its last two axes exchanged where those of the pool are V and K."""
        return x.transpose(-1, -2) if self.is_v_first else x
