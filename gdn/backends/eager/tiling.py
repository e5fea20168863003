"""Tokens [B, T, ...] to chunks [NC, ...] and back, for the stages. Reads no lengths on the host.

Chunks are numbered sequence by sequence. Heads of a tile are split [H, r]: `r` value heads share a key head, so a tile
of keys [NC, H, 1, C, K] meets a tile of values [NC, H, r, C, V] by broadcasting.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gdn.notation import Offsets
from gdn.problem import CHUNK


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of G: float64, so that a large decay spoils no other token's resolution; float32 where there is none."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Tiling:
    """How B x T tokens with H (key) heads fall into chunks. `dtype` is what tiles are computed in."""

    B: int
    T: int
    H: int
    dtype: torch.dtype
    device: torch.device
    cu_seqlens: Offsets | None

    @staticmethod
    def of(x: Tensor, cu_seqlens: Offsets | None) -> "Tiling":
        """For tokens x [B, T, H, ...], computing in fp32, or fp64 for an fp64 x."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        offsets = None if cu_seqlens is None else cu_seqlens.to(x.device, torch.long)
        return Tiling(x.shape[0], x.shape[1], x.shape[2], dtype, x.device, offsets)

    @property
    def N(self) -> int:
        return self.B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def rows(self) -> int:
        """Chunks that may advance together: one per sequence of a dense batch."""
        return self.B if self.cu_seqlens is None else 1

    @property
    def num_chunks(self) -> int:
        """As `Problem.num_chunks`: the surplus chunks of a packed batch hold no token."""
        if self.cu_seqlens is None:
            return self.B * ((self.T + CHUNK - 1) // CHUNK)
        return (self.T + self.N * (CHUNK - 1)) // CHUNK

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """Offsets and the first chunk of each sequence, both with an empty sequence N added; the end of its chunks."""
        assert self.cu_seqlens is not None
        offsets = torch.cat([self.cu_seqlens, self.cu_seqlens[-1:]])
        ends = ((offsets.diff() + CHUNK - 1) // CHUNK).cumsum(0)
        return offsets, torch.cat([ends.new_zeros(1), ends]), ends

    @cached_property
    def sequence(self) -> Tensor:
        """[NC] the sequence of each chunk; N for a surplus one."""
        chunk = torch.arange(self.num_chunks, device=self.device)
        if self.cu_seqlens is None:
            return chunk // max(1, self.num_chunks // max(1, self.B))
        return torch.searchsorted(self._ends[2], chunk, right=True).clamp_(max=self.N)

    @cached_property
    def _span(self) -> tuple[Tensor, Tensor]:
        """[NC] the first token of each chunk in its batch row, and the number of its tokens."""
        n = self.sequence
        chunk = torch.arange(self.num_chunks, device=self.device)
        if self.cu_seqlens is None:
            start = chunk % max(1, self.num_chunks // max(1, self.B)) * CHUNK
            return start, (self.T - start).clamp(max=CHUNK)
        offsets, first, _ = self._ends
        start = offsets[n] + (chunk - first[n]) * CHUNK
        end = torch.cat([offsets[1:], offsets[-1:]])[n]
        return start, (end - start).clamp(0, CHUNK)

    @cached_property
    def is_token(self) -> Tensor:
        """[NC, C] False past a chunk's end."""
        return torch.arange(CHUNK, device=self.device) < self._span[1][:, None]

    @cached_property
    def _token(self) -> Tensor:
        """[NC, C] the row in x.flatten(0, 1) of each place; a place past a chunk's end repeats its last token."""
        start, length = self._span
        last = (length - 1).clamp(min=0)[:, None]
        token = start[:, None] + torch.minimum(torch.arange(CHUNK, device=self.device), last)
        if self.cu_seqlens is None:
            token = token + self.sequence[:, None] * self.T
        return token.clamp(0, max(0, self.B * self.T - 1))

    def cut(self, x: Tensor) -> Tensor:
        """[B, T, H r, ...] -> [NC, H, r, C, ...] in the computing dtype; zero past a chunk's end."""
        y = self._tiles(x.to(self.dtype))
        return y.masked_fill(~self.is_token.view(-1, 1, 1, CHUNK, *(1,) * (y.dim() - 4)), 0)

    def cut_sums(self, G: Tensor) -> Tensor:
        """[B, T, H r] -> [NC, H, r, C] in G's dtype; past a chunk's end G of its last token, so [..., -1] is G_C."""
        return self._tiles(G).masked_fill((self._span[1] == 0).view(-1, 1, 1, 1), 0)

    def _tiles(self, x: Tensor) -> Tensor:
        rest = x.shape[3:]
        heads = (self.H, x.shape[2] // max(1, self.H))
        if self.B * self.T == 0:
            return x.new_zeros(self.num_chunks, *heads, CHUNK, *rest)
        y = x.flatten(0, 1).index_select(0, self._token.flatten())
        return y.view(self.num_chunks, CHUNK, *heads, *rest).movedim(1, 3)

    def join(self, y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[NC, H, r, C, ...] -> [B, T, H r, ...]; zero for tokens of no sequence."""
        rest = y.shape[4:]
        y = y.to(dtype or y.dtype).movedim(3, 1).reshape(-1, y.shape[1] * y.shape[2], *rest)
        if self.B * self.T == 0 or self.num_chunks == 0:
            return y.new_zeros(self.B, self.T, *y.shape[1:])
        token = torch.arange(self.T, device=self.device)
        if self.cu_seqlens is None:
            return y.unflatten(0, (self.B, -1))[:, : self.T].contiguous()
        offsets, first, _ = self._ends
        n = torch.searchsorted(offsets[1:-1], token, right=True).clamp_(max=self.N)
        place = first[n] * CHUNK + token - offsets[n]
        y = y.index_select(0, place.clamp(0, y.shape[0] - 1))
        return y.masked_fill(~(n < self.N).view(-1, *(1,) * (y.dim() - 1)), 0).unsqueeze(0)

    def split_state(self, S: Tensor) -> Tensor:
        """[*, HV, K, V] -> [*, H, r, K, V] in the computing dtype."""
        return S.to(self.dtype).unflatten(1, (self.H, S.shape[1] // max(1, self.H)))

    def carried(self, S: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """A fresh [N + 1, H, r, K, V] that starts as S (None: zero); row N is for the surplus chunks."""
        states = torch.zeros(self.N + 1, *shape, dtype=self.dtype, device=self.device)
        if S is not None:
            states[: self.N] = self.split_state(S)
        return states

    def steps(self) -> list[Tensor]:
        """Chunk numbers [rows] that advance together, in order."""
        return list(torch.arange(self.num_chunks, device=self.device).view(self.rows, -1).unbind(1)) if self.rows else []
