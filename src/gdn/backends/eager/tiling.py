"""Cut tokens [B, T, ...] into chunks [NC, ...] and join them, for the stages; no length is read on the host.

Chunks are numbered sequence by sequence; a dense batch is B sequences of T tokens. The head axis of a tile is
split into [H, r]: r value heads share a key head, so keys [NC, H, 1, C, K] broadcast to values
[NC, H, r, C, V].
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gdn.notation import Offsets
from gdn.problem import CHUNK
from gdn.problem.shapes import Sequences


@dataclass(frozen=True)
class Tiling(Sequences):
    """Hold how B x T tokens with H (key) heads are cut into chunks; tiles are computed in `dtype`."""

    B: int
    T: int
    H: int
    dtype: torch.dtype
    device: torch.device
    cu_seqlens: Offsets | None

    @staticmethod
    def from_tokens(x: Tensor, cu_seqlens: Offsets | None) -> "Tiling":
        """Return the tiling of tokens x [B, T, H, ...], computing in fp32, or in fp64 for an fp64 x."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        return Tiling(x.shape[0], x.shape[1], x.shape[2], dtype, x.device, cu_seqlens)

    @cached_property
    def _offsets(self) -> Tensor:
        """Return [N+2], each sequence's first token, and the end twice: sequence N has the surplus chunks."""
        if self.cu_seqlens is None:
            offsets = torch.arange(self.B + 1, device=self.device) * self.T
        else:
            offsets = self.cu_seqlens.to(self.device, torch.long)
        return torch.cat([offsets, offsets[-1:]])

    @cached_property
    def _first_chunk(self) -> Tensor:
        """Return [N+2], the first chunk of each sequence."""
        ends = ((self._offsets.diff() + CHUNK - 1) // CHUNK).cumsum(0)
        return torch.cat([ends.new_zeros(1), ends])

    @cached_property
    def sequence(self) -> Tensor:
        """Return [NC], the sequence of each chunk; N for a surplus one."""
        chunk = torch.arange(self.num_chunks, device=self.device)
        # looked up on the device: the host does not wait for the lengths
        return torch.searchsorted(self._first_chunk[1:], chunk, right=True).clamp_(max=self.N)

    @cached_property
    def _token_range(self) -> tuple[Tensor, Tensor]:
        """Return the first token of each chunk and the number of its tokens, both [NC]."""
        n, chunk = self.sequence, torch.arange(self.num_chunks, device=self.device)
        start = self._offsets[n] + (chunk - self._first_chunk[n]) * CHUNK
        return start, (self._offsets[n + 1] - start).clamp(0, CHUNK)

    @cached_property
    def is_token(self) -> Tensor:
        """Return [NC, C], False past a chunk's end."""
        return torch.arange(CHUNK, device=self.device) < self._token_range[1][:, None]

    @cached_property
    def is_last(self) -> Tensor:
        """Return [NC, C], True at a chunk's last token."""
        return torch.arange(CHUNK, device=self.device) == self._token_range[1][:, None] - 1

    @cached_property
    def _token_index(self) -> Tensor:
        """Return [NC C], the token of each index; past a chunk's end the chunk's last token is repeated."""
        start, length = self._token_range
        last = (length - 1).clamp(min=0)[:, None]
        tokens = start[:, None] + torch.minimum(torch.arange(CHUNK, device=self.device), last)
        return tokens.clamp(0, max(0, self.B * self.T - 1)).flatten()

    @cached_property
    def _chunk_index(self) -> tuple[Tensor, Tensor]:
        """Return [B T], each token's index in the flattened chunks, and a mask of tokens in a sequence."""
        token = torch.arange(self.B * self.T, device=self.device)
        n = torch.searchsorted(self._offsets[1:-1], token, right=True)
        place = self._first_chunk[n] * CHUNK + token - self._offsets[n]
        return place.clamp(0, max(0, self.num_chunks * CHUNK - 1)), n < self.N

    def to_chunks(self, x: Tensor) -> Tensor:
        """Cut x [B, T, H r, ...] into [NC, H, r, C, ...] in the computing dtype; zero past a chunk's end."""
        y = self._gather(x).to(self.dtype)
        return y.masked_fill(~self.is_token.view(-1, 1, 1, CHUNK, *(1,) * (y.dim() - 4)), 0)

    def sums_to_chunks(self, G: Tensor) -> Tensor:
        """Cut G [B, T, H r] into [NC, H, r, C]; past the end the last value repeats: [..., -1] is G_C."""
        return self._gather(G).masked_fill((self._token_range[1] == 0).view(-1, 1, 1, 1), 0)

    def _gather(self, x: Tensor) -> Tensor:
        heads, rest = (self.H, x.shape[2] // max(1, self.H)), x.shape[3:]
        # no token has a valid index here, so index_select cannot gather
        if self.B * self.T == 0:
            return x.new_zeros(self.num_chunks, *heads, CHUNK, *rest)
        y = x.flatten(0, 1).index_select(0, self._token_index)
        return y.view(self.num_chunks, CHUNK, *heads, *rest).movedim(1, 3)

    def from_chunks(self, y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Join y [NC, H, r, C, ...] to [B, T, H r, ...] in dtype (None: y's), zero outside sequences."""
        heads, rest = y.shape[1] * y.shape[2], y.shape[4:]
        if self.B * self.T * self.num_chunks == 0:
            return y.new_zeros(self.B, self.T, heads, *rest, dtype=dtype)
        place, is_in_sequence = self._chunk_index
        y = y.to(dtype or y.dtype).movedim(3, 1).reshape(-1, heads, *rest).index_select(0, place)
        # tokens of no sequence have gathered a clamped index, and become zero
        y.masked_fill_(~is_in_sequence.view(-1, *(1,) * (y.dim() - 1)), 0)
        return y.view(self.B, self.T, heads, *rest)

    def split_state(self, S: Tensor) -> Tensor:
        """Return S [*, HV, K, V] as [*, H, r, K, V] in the computing dtype."""
        return S.to(self.dtype).unflatten(1, (self.H, S.shape[1] // max(1, self.H)))

    def copy_states(self, S: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return S [N, HV, K, V] (None: zeros) as a copy [N+1, *shape]; row N is for surplus chunks."""
        states = torch.zeros(self.N + 1, *shape, dtype=self.dtype, device=self.device)
        if S is not None:
            states[: self.N] = self.split_state(S)
        return states

    def steps(self) -> list[Tensor]:
        """Return the chunks of each step in order: one per sequence if dense, a single one if packed."""
        chunk = torch.arange(self.num_chunks, device=self.device)
        if self.num_chunks == 0:
            return []
        # dense sequences have equal lengths: chunk i of all of them is one batch of a BLAS call
        return list(chunk.view(1 if self.cu_seqlens is not None else self.B, -1).unbind(1))
