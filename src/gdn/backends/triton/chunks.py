"""Find a chunk's first token and length; for packed sequences, in a table that one launch makes on the GPU.

Entry c of the table is (first token, length) of chunk c. A negative length marks tokens past the last
sequence, and zero an unused entry. After the entries come SEQUENCE integers for each n: the first chunk of
sequence n; then the index, first token, length and first chunk of the n-th longest sequence, compared by
chunks >> `Table.shift`. The last integer is the number of entries in use. The host reads nothing back: grids
have the size of the upper bound, which is `Problem.num_chunks` plus entries for the tokens past the end.
"""

import torch
import triton.language as tl

from gdn.backends.triton.launch import Launch, Machine, allocate, jit, kernel, tensor_spec
from gdn.backends.triton.launch.pdl import pdl_options, supports_pdl, wait_then_launch_dependents
from gdn.problem import CHUNK, Problem

SEQUENCE = tl.constexpr(5)
_BLOCK = 128  # offsets of cu_seqlens that a program of the table's kernel (one warp) loads at once
_SHARES = 32  # sequences whose lengths differ by less than 1/32 of an SM's chunks count as equally long


@jit
def locate(chunk, table_ptr, T, chunks_per_row, C: tl.constexpr):
    """Return row, first token in it, and length of a chunk; dense chunks are numbered row by row."""
    if table_ptr is None:
        row = chunk // chunks_per_row
        first = (chunk % chunks_per_row) * C
        length = tl.minimum(T - first, C)
    else:
        row = 0
        first = tl.load(table_ptr + 2 * chunk)
        length = tl.load(table_ptr + 2 * chunk + 1)
    return row, first, length


@jit
def sequence(n, table_ptr, cu_seqlens_ptr, T, chunks_per_row, bound, C: tl.constexpr):
    """Return row, first token in it, length and first chunk of sequence n."""
    if table_ptr is None:
        row = n
        first = n * 0
        length = T
        chunk = n * chunks_per_row
    else:
        row = 0
        first = tl.load(cu_seqlens_ptr + n).to(tl.int32)
        length = tl.load(cu_seqlens_ptr + n + 1).to(tl.int32) - first
        chunk = tl.load(table_ptr + 2 * bound + SEQUENCE * n)
    return row, first, length, chunk


@jit
def count_chunks(cu_seqlens_ptr, n, is_sequence, C: tl.constexpr):
    """Return the number of chunks of each sequence in n; 0 where is_one is false."""
    start = tl.load(cu_seqlens_ptr + n, mask=is_sequence, other=0)
    end = tl.load(cu_seqlens_ptr + n + 1, mask=is_sequence, other=0)
    return tl.cdiv((end - start).to(tl.int32), C)


@jit
def count_chunks_before(cu_seqlens_ptr, n, C: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of chunks of all sequences before n; BLOCK offsets are loaded at once."""
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    for m in range(0, n, BLOCK):
        counts += count_chunks(cu_seqlens_ptr, m + lanes, m + lanes < n, C)
    return tl.sum(counts)


@jit
def first_chunk_and_rank(cu_seqlens_ptr, n, chunks, N, shift, C: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many chunks precede sequence n, and how many sequences come before it in order of length.

    `chunks` is the number of chunks of sequence n. Sequences with equal chunks >> shift keep their order.
    """
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    longer = tl.zeros([BLOCK], tl.int32)
    # every program reads all offsets, after the first one from L2; a sort would need more launches
    for m in range(0, N, BLOCK):
        others = count_chunks(cu_seqlens_ptr, m + lanes, m + lanes < N, C)
        is_before = m + lanes < n
        before += tl.where(is_before, others, 0)
        # lanes past the last sequence have no chunks, and never count as longer
        others = others >> shift
        longer += ((others > chunks >> shift) | ((others == chunks >> shift) & is_before)).to(tl.int32)
    return tl.sum(before), tl.sum(longer)


@kernel
def _table_kernel(
    cu_seqlens_ptr, table_ptr, T, N, bound, shift,
    C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # table: (first, length) of every chunk, SEQUENCE integers per sequence, the number of entries in use.
    # Program n writes the entries of sequence n; program N those of the tokens past the last sequence, and
    # zeros in the rest of the table. Grid: N + 1; 1 warp.
    # PDL: it waits for the previous kernel before its first load, and then lets the next one start.
    # Reads cu_seqlens; writes 8 bytes per chunk and 20 per sequence.
    if PDL:
        wait_then_launch_dependents()
    n = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    first = tl.load(cu_seqlens_ptr + n).to(tl.int32)
    is_tail = n == N
    end = tl.load(cu_seqlens_ptr + n + 1, mask=n < N, other=0).to(tl.int32)
    end = tl.where(is_tail, T, end)
    count = tl.cdiv(end - first, C)
    base, place = first_chunk_and_rank(cu_seqlens_ptr, n, count, N, shift, C, BLOCK)
    # program N also writes the unused entries, so that every entry of the bound is defined
    for i in range(0, tl.where(is_tail, bound - base, count), BLOCK):
        index = i + lanes
        start = first + index * C
        length = tl.maximum(tl.minimum(end - start, C), 0)
        length = tl.where(is_tail, -length, length)
        is_owned = index < tl.where(is_tail, bound - base, count)
        tl.store(table_ptr + 2 * (base + index), start, mask=is_owned)
        tl.store(table_ptr + 2 * (base + index) + 1, length, mask=is_owned)
    per_sequence_ptr = table_ptr + 2 * bound
    # sorted by length: if a persistent kernel took the longest one last, other SMs would idle at the end
    tl.store(per_sequence_ptr + SEQUENCE * n, tl.where(is_tail, base + count, base))
    per_sequence_ptr += SEQUENCE * place
    tl.store(per_sequence_ptr + 1, n, mask=n < N)
    tl.store(per_sequence_ptr + 2, first, mask=n < N)
    tl.store(per_sequence_ptr + 3, end - first, mask=n < N)
    tl.store(per_sequence_ptr + 4, base, mask=n < N)


class Table:
    """Launch the kernel that makes the table of a packed problem. `bound`: its entries, the size of grids."""

    def __init__(self, problem: Problem, gpu: Machine) -> None:
        p = problem
        self.bound = (p.T + (p.N + 1) * (CHUNK - 1)) // CHUNK
        # an exact order by length separates neighbouring sequences: 1,000 prompts took 2 % more
        self.shift = max((self.bound * p.HV // (_SHARES * gpu.num_sms)).bit_length() - 1, 0)
        self.launch = Launch(
            _table_kernel,
            p.N + 1,
            (p.T, p.N, self.bound, self.shift),
            {"C": CHUNK, "BLOCK": _BLOCK, "PDL": supports_pdl(gpu)},
            num_warps=1,
            options=pdl_options(gpu),
        )
        self.total_at = 2 * self.bound + SEQUENCE.value * p.N  # index of the number of entries in use
        self.spec = tensor_spec((self.total_at + 1,), torch.int32)

    def make(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        # the current stream orders the table before the kernels that read it
        (table,) = allocate(cu_seqlens.device, [self.spec])
        assert table is not None
        self.launch(cu_seqlens, table)
        return table
