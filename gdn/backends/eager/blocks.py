"""Which chunk belongs to which sequence, in blocks small enough for the cache.

A block is a grid [R, M] of chunks; `take` brings its tokens in as [R, M, C, ...], zero where a chunk is shorter than C,
`put` writes them back. Its steps advance the state: each holds one chunk of every sequence in `rows`, and comes after
the steps that hold these sequences' earlier chunks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn.problem import CHUNK, Problem, host_offsets

Rows = slice | Tensor  # of the state array: a run of rows, or an index


@dataclass(frozen=True)
class Step:
    """Chunks `start:stop` of the flattened grid belong to state rows `rows`; `rank` is their place in the sequence."""

    start: int
    stop: int
    rows: Rows
    rank: int


@dataclass(frozen=True)
class DenseBlock:
    """Ranks r0:r1 of sequences b0:b1 in a batch [B, T] of equal lengths: all views, a copy only at a ragged end."""

    b0: int
    b1: int
    r0: int
    r1: int
    C: int
    T: int

    @property
    def grid(self) -> tuple[int, int]:
        return (self.r1 - self.r0, self.b1 - self.b0)

    @property
    def steps(self) -> list[Step]:
        m = self.b1 - self.b0
        return [
            Step((r - self.r0) * m, (r - self.r0 + 1) * m, slice(self.b0, self.b1), r)
            for r in range(self.r0, self.r1)
        ]

    def take(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [R, M, C, ...]"""
        end = self.r1 * self.C
        y = x[self.b0 : self.b1, self.r0 * self.C : min(end, self.T)]
        if end > self.T:
            y = F.pad(y, (0, 0) * (x.dim() - 2) + (0, end - self.T))
        return y.unflatten(1, (self.r1 - self.r0, self.C)).transpose(0, 1)

    def put(self, out: Tensor, values: Tensor) -> None:
        """Write [R, M, C, ...] to its tokens in out [B, T, ...]."""
        end = min(self.r1 * self.C, self.T)
        out[self.b0 : self.b1, self.r0 * self.C : end] = values.transpose(0, 1).flatten(1, 2)[
            :, : end - self.r0 * self.C
        ]

    def states(self, S_in: Tensor) -> Tensor:
        """This block's rows of S_in as [R M, HV, K, V], a view where one sequence or one rank allows it."""
        return self._of(S_in)[self.b0 : self.b1, self.r0 : self.r1].transpose(0, 1).flatten(0, 1)

    def keep(self, S_in: Tensor, step: Step, S: Tensor) -> None:
        """Write one step's rows of S_in."""
        self._of(S_in)[self.b0 : self.b1, step.rank] = S

    def _of(self, S_in: Tensor) -> Tensor:
        return S_in.unflatten(0, (-1, -(-self.T // self.C)))


@dataclass(frozen=True)
class PackedBlock:
    """Any chunks of a packed batch [1, T], by index; `ids` are their numbers in S_in."""

    tokens: Tensor  # [M, C] token of each place, clamped into the batch
    is_token: Tensor  # [M, C] False past a chunk's end
    ids: Tensor  # [M]
    steps: list[Step]
    known: bool  # the lengths are known on the host, so masks may be read

    @property
    def grid(self) -> tuple[int, int]:
        return (1, self.tokens.shape[0])

    def take(self, x: Tensor) -> Tensor:
        """[1, T, ...] -> [1, M, C, ...]"""
        y = x[0].index_select(0, self.tokens.flatten()).unflatten(0, self.tokens.shape)
        return y.masked_fill_(~self.is_token.view(*self.tokens.shape, *(1,) * (x.dim() - 2)), 0).unsqueeze(0)

    def put(self, out: Tensor, values: Tensor) -> None:
        """Write [1, M, C, ...] to its tokens in out [1, T, ...], which starts as zeros."""
        y = values.flatten(0, 2).to(out.dtype)
        if self.known:
            place = self.is_token.flatten().nonzero().squeeze(1)
            out[0].index_copy_(0, self.tokens.flatten()[place], y[place])
        else:
            # every token is met once, so adding to zero is a store; places past a chunk's end add zero
            y = y.masked_fill(~self.is_token.view(-1, *(1,) * (y.dim() - 1)), 0)
            out[0].index_add_(0, self.tokens.flatten(), y)

    def states(self, S_in: Tensor) -> Tensor:
        """This block's rows of S_in as [M, HV, K, V], a copy."""
        return S_in.index_select(0, self.ids)

    def keep(self, S_in: Tensor, step: Step, S: Tensor) -> None:
        """Write one step's rows of S_in."""
        S_in.index_copy_(0, self.ids[step.start : step.stop], S)


Block = DenseBlock | PackedBlock


@dataclass(frozen=True)
class Plan:
    """All blocks in order, and the order in which the sequences' states are kept (None: as they are)."""

    blocks: list[Block]
    order: Tensor | None


def plan(problem: Problem) -> Plan:
    """Cut a problem into blocks.

    On the CPU a block holds about 16 chunks and value heads, whose 4 MB of fp32 at K = V = 128 stay in the cache;
    elsewhere 4096, for wide launches. With lengths on a device that nobody may read, chunks are one chain in token order.
    """
    if problem.T == 0:
        return Plan([], None)
    pairs = 16 if problem.device.type == "cpu" else 4096
    width = max(1, pairs // problem.HV)
    if problem.cu_seqlens is None:
        return Plan(list(_dense(problem, width)), None)
    offsets = host_offsets(problem.cu_seqlens, problem.cu_seqlens_cpu, problem.T, read_device=False)
    if offsets is None:
        return Plan(_chain(problem, problem.cu_seqlens, width), None)
    lengths = [b - a for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    blocks = list(_packed(problem, offsets, order, width))
    return Plan(blocks, torch.tensor(order, dtype=torch.long, device=problem.device))


def _dense(problem: Problem, width: int) -> Iterator[DenseBlock]:
    B, T = problem.B, problem.T
    # a short sequence takes a short chunk
    C = CHUNK if T > CHUNK // 2 else max(8, 1 << max(0, T - 1).bit_length())
    ranks = -(-T // C)
    for b0 in range(0, B, width):
        b1 = min(B, b0 + width)
        run = max(1, width // (b1 - b0))
        for r0 in range(0, ranks, run):
            yield DenseBlock(b0, b1, r0, min(ranks, r0 + run), C, T)


def _packed(problem: Problem, offsets: list[int], order: list[int], width: int) -> Iterator[PackedBlock]:
    """Sequences longest first in groups of `width`: the ones still running are always the group's first rows."""
    chunks = [-(-(b - a) // CHUNK) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    first = _exclusive_sum(chunks)
    for s0 in range(0, len(order), width):
        group = order[s0 : s0 + width]
        rows: list[tuple[int, int, int]] = []  # start token, length, chunk id
        steps: list[Step] = []
        for rank in range(chunks[group[0]]):
            running = [n for n in group if chunks[n] > rank]
            steps.append(Step(len(rows), len(rows) + len(running), slice(s0, s0 + len(running)), rank))
            for n in running:
                start = offsets[n] + rank * CHUNK
                rows.append((start, min(CHUNK, offsets[n + 1] - start), first[n] + rank))
            if len(rows) >= width:
                yield _block(problem, torch.tensor(rows), steps, known=True)
                rows, steps = [], []
        if rows:
            yield _block(problem, torch.tensor(rows), steps, known=True)


def _exclusive_sum(counts: list[int]) -> list[int]:
    sums, total = [], 0
    for count in counts:
        sums.append(total)
        total += count
    return sums


def _block(problem: Problem, rows: Tensor, steps: list[Step], *, known: bool) -> PackedBlock:
    start, length, ids = rows.to(problem.device).unbind(1)
    place = torch.arange(CHUNK, device=problem.device)
    tokens = (start[:, None] + place).clamp_(max=problem.T - 1)
    return PackedBlock(tokens, place < length[:, None], ids, steps, known)


def _chain(problem: Problem, cu_seqlens: Tensor, width: int) -> list[Block]:
    """One chunk per step, in token order, found on the device: chunk i belongs to the sequence whose chunks span i."""
    offsets = cu_seqlens.long()
    chunks = (offsets.diff() + CHUNK - 1) // CHUNK
    ends = chunks.cumsum(0)
    i = torch.arange(problem.num_chunks, device=problem.device)
    n = torch.searchsorted(ends, i, right=True).clamp_(max=max(0, problem.N - 1))
    start = offsets[n] + (i - (ends - chunks)[n]) * CHUNK
    length = (offsets[n + 1] - start).clamp_(0, CHUNK)
    rows = torch.stack([start.clamp_(max=problem.T), length, i], dim=1)
    blocks: list[Block] = []
    for c0 in range(0, problem.num_chunks, width):
        c1 = min(problem.num_chunks, c0 + width)
        steps = [Step(c - c0, c - c0 + 1, n[c : c + 1], c) for c in range(c0, c1)]
        blocks.append(_block(problem, rows[c0:c1], steps, known=False))
    return blocks
