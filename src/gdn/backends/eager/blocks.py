"""Cut a problem into blocks of chunks that are small enough for the cache.

A block is a grid [R, M] of chunks. `take` gathers its tokens as [R, M, C, ...], zero where a chunk is shorter
than C; `put` writes them back. The steps of a block advance the state: a step has one chunk of every sequence
in `rows`, and follows the steps that have earlier chunks of these sequences.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn.problem import CHUNK, Problem, host_offsets

RowIndex = slice | Tensor  # rows of the state array: a slice, or an index tensor


@dataclass(frozen=True)
class Step:
    """Hold chunks start:stop of the flat grid and their state rows; each is chunk `rank` of its sequence."""

    start: int
    stop: int
    rows: RowIndex
    rank: int


@dataclass(frozen=True)
class DenseBlock:
    """Hold chunks r0:r1 of sequences b0:b1 in a batch [B, T] of equal lengths: views but for a ragged end."""

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
        """Return the block's tokens of x [B, T, ...] as [R, M, C, ...]."""
        end = self.r1 * self.C
        y = x[self.b0 : self.b1, self.r0 * self.C : min(end, self.T)]
        # a length that is no multiple of C: only its last block is copied by the padding, others are views
        if end > self.T:
            y = F.pad(y, (0, 0) * (x.dim() - 2) + (0, end - self.T))
        return y.unflatten(1, (self.r1 - self.r0, self.C)).transpose(0, 1)

    def put(self, out: Tensor, values: Tensor) -> None:
        """Write [R, M, C, ...] to its tokens in out [B, T, ...]."""
        end = min(self.r1 * self.C, self.T)
        out[self.b0 : self.b1, self.r0 * self.C : end] = values.transpose(0, 1).flatten(1, 2)[
            :, : end - self.r0 * self.C
        ]

    def read_chunks(self, x: Tensor) -> Tensor:
        """Return the block's chunks of x [NC, ...] as [R M, ...], a view for one sequence or one rank."""
        return self._by_sequence(x)[self.b0 : self.b1, self.r0 : self.r1].transpose(0, 1).flatten(0, 1)

    def save_chunks(self, x: Tensor, values: Tensor) -> None:
        """Write the block's chunks [R M, ...] into x [NC, ...]."""
        place = self._by_sequence(x)[self.b0 : self.b1, self.r0 : self.r1]
        place.copy_(values.unflatten(0, self.grid).transpose(0, 1))

    def save_step(self, x: Tensor, step: Step, values: Tensor) -> None:
        """Write the chunks [M, ...] of a step into x [NC, ...]."""
        self._by_sequence(x)[self.b0 : self.b1, step.rank] = values

    def _by_sequence(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, -(-self.T // self.C)))


@dataclass(frozen=True)
class PackedBlock:
    """Hold chunks of a packed batch [1, T] by index; `ids` are their numbers in S_in."""

    tokens: Tensor  # [M, C] index of each token, clamped into the batch
    is_token: Tensor  # [M, C] False past a chunk's end
    ids: Tensor  # [M]
    steps: list[Step]
    has_host_lengths: bool  # the lengths are known on the host, so masks may be read

    @property
    def grid(self) -> tuple[int, int]:
        return (1, self.tokens.shape[0])

    def take(self, x: Tensor) -> Tensor:
        """Return the block's tokens of x [1, T, ...] as [1, M, C, ...]."""
        # index_select copies whole rows of tokens, and the mask zeroes that copy: no second temporary
        y = x[0].index_select(0, self.tokens.flatten()).unflatten(0, self.tokens.shape)
        return y.masked_fill_(~self.is_token.view(*self.tokens.shape, *(1,) * (x.dim() - 2)), 0).unsqueeze(0)

    def put(self, out: Tensor, values: Tensor) -> None:
        """Write [1, M, C, ...] to its tokens in out [1, T, ...], which starts as zeros."""
        y = values.flatten(0, 2).to(out.dtype)
        if self.has_host_lengths:
            place = self.is_token.flatten().nonzero().squeeze(1)
            out[0].index_copy_(0, self.tokens.flatten()[place], y[place])
        else:
            # each token occurs once, so adding to zero is a store; past a chunk's end zero is added
            y = y.masked_fill(~self.is_token.view(-1, *(1,) * (y.dim() - 1)), 0)
            out[0].index_add_(0, self.tokens.flatten(), y)

    def read_chunks(self, x: Tensor) -> Tensor:
        """Return the block's chunks of x [NC, ...] as [M, ...], a copy."""
        return x.index_select(0, self.ids)

    def save_chunks(self, x: Tensor, values: Tensor) -> None:
        """Write the block's chunks [M, ...] into x [NC, ...]."""
        x.index_copy_(0, self.ids, values)

    def save_step(self, x: Tensor, step: Step, values: Tensor) -> None:
        """Write the chunks of a step into x [NC, ...]."""
        x.index_copy_(0, self.ids[step.start : step.stop], values)


Block = DenseBlock | PackedBlock


@dataclass(frozen=True)
class BlockPlan:
    """Hold all blocks in order, and the order of the sequences in the state array (None: the caller's)."""

    blocks: Sequence[Block]
    order: Tensor | None


def plan_blocks(problem: Problem) -> BlockPlan:
    """Cut a problem into blocks.

    On the CPU a block holds about 32 chunks x value heads, 8 MB of fp32 at K = V = 128: half as many are
    slower, twice as many no faster. Elsewhere it holds 4096, for wide launches. A matmul's bits may depend on
    its batch, so a batch-invariant block holds one sequence; off the CPU one chunk of 64 tokens, since cuBLAS
    selects its kernel by the number of matrices, so that no length changes the shape of a matmul. Where
    lengths are on a device and must not be read, each step has one chunk, in token order.
    """
    p = problem
    if p.T == 0 or p.N == 0:
        return BlockPlan([], None)
    size = max(1, (32 if p.device.type == "cpu" else 4096) // p.HV)
    if _has_single_chunks(p):
        size = 1
    width = 1 if p.batch_invariant else size
    if p.cu_seqlens is None:
        return BlockPlan(list(_dense_blocks(p, size, width)), None)
    # lengths on a device are not read: the host would wait for the device's queue
    offsets = host_offsets(p.cu_seqlens, p.cu_seqlens_cpu, p.T, read_device=False)
    if offsets is None:
        return BlockPlan(list(_blocks_in_token_order(p, p.cu_seqlens, size)), None)
    lengths = [b - a for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    # longest first: the sequences of a step are a slice of the states, so S[rows] is a view, not a copy
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    blocks = list(_packed_blocks(p, offsets, order, size, width))
    return BlockPlan(blocks, torch.tensor(order, dtype=torch.long, device=p.device))


def _has_single_chunks(p: Problem) -> bool:
    """Return True if every block is one chunk of 64 tokens, so that all matmuls have the same shapes."""
    return p.batch_invariant and p.device.type != "cpu"


def _dense_blocks(p: Problem, size: int, width: int) -> Iterator[DenseBlock]:
    """Yield blocks of about `size` chunks from at most `width` sequences."""
    # a short sequence gets a short chunk, unless batch-invariant: the bits of a BLAS may depend on its shape
    is_whole = p.T > CHUNK // 2 or p.batch_invariant
    C = CHUNK if is_whole else max(8, 1 << max(0, p.T - 1).bit_length())
    ranks = -(-p.T // C)
    for b0 in range(0, p.B, width):
        b1 = min(p.B, b0 + width)
        # fewer sequences leave more chunks of each: the block still has `size` chunks for its matmuls
        run = max(1, size // (b1 - b0))
        for r0 in range(0, ranks, run):
            yield DenseBlock(b0, b1, r0, min(ranks, r0 + run), C, p.T)


def _packed_blocks(
    p: Problem, offsets: list[int], order: list[int], size: int, width: int
) -> Iterator[PackedBlock]:
    """Yield blocks of packed sequences, longest first, in groups of `width`.

    In that order the sequences that still have chunks are the first rows of their group.
    """
    chunks = [-(-(b - a) // CHUNK) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    first = list(itertools.accumulate(chunks, initial=0))
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
            if len(rows) >= size:
                yield _packed_block(p, torch.tensor(rows, device="cpu"), steps, has_host_lengths=True)
                rows, steps = [], []
        if rows:
            yield _packed_block(p, torch.tensor(rows, device="cpu"), steps, has_host_lengths=True)


def _packed_block(
    problem: Problem, rows: Tensor, steps: list[Step], *, has_host_lengths: bool
) -> PackedBlock:
    start, length, ids = rows.to(problem.device).unbind(1)
    place = torch.arange(CHUNK, device=problem.device)
    # clamped, so that the gather stays inside x; `is_token` masks what is read there
    tokens = (start[:, None] + place).clamp_(max=problem.T - 1)
    return PackedBlock(tokens, place < length[:, None], ids, steps, has_host_lengths)


def _blocks_in_token_order(p: Problem, cu_seqlens: Tensor, size: int) -> Iterator[PackedBlock]:
    """Yield blocks with one chunk a step, in token order; the device looks up the sequence of each chunk."""
    offsets = cu_seqlens.long()
    chunks = (offsets.diff() + CHUNK - 1) // CHUNK
    ends = chunks.cumsum(0)
    i = torch.arange(p.num_chunks, device=p.device)
    # chunks beyond the last sequence get length 0: their k is zero and e^(G_C) = 1, so S does not change
    n = torch.searchsorted(ends, i, right=True).clamp_(max=max(0, p.N - 1))
    start = offsets[n] + (i - (ends - chunks)[n]) * CHUNK
    length = (offsets[n + 1] - start).clamp_(0, CHUNK)
    rows = torch.stack([start.clamp_(max=p.T), length, i], dim=1)
    for c0 in range(0, p.num_chunks, size):
        c1 = min(p.num_chunks, c0 + size)
        steps = [Step(c - c0, c - c0 + 1, n[c : c + 1], c) for c in range(c0, c1)]
        yield _packed_block(p, rows[c0:c1], steps, has_host_lengths=False)
