"""Compute the causal depthwise convolution with plain PyTorch: W shifted multiply-adds.

    y_t = act(bias + sum_j weight[:, j] x_{t-W+1+j})

The first pass ignores where sequences begin and runs in blocks that stay in cache. The second overwrites the
first W - 1 tokens of each sequence, from windows gathered one by one that have zeros or the initial state
before the sequence. The gradient of x is the same sum with the taps reversed, so it has the same two passes
mirrored in time. No length is read from a device.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gdn.notation import Channels, ConvPool, ConvState, Index, Mask
from gdn.problem.layer import ConvProblem, ConvUpdateProblem

# elements of a block per thread: 0.5 MiB in fp32; 2**15 .. 2**19 are within 10 %
BLOCK = 1 << 17
STRIP = 64  # channels of a block when time is the contiguous axis: 256 bytes of each row of y


@dataclass(frozen=True)
class TokenRanges:
    """Hold the places of the N sequences: sequence n is tokens start[n] : end[n] of batch row row[n]."""

    row: Index
    start: Index
    end: Index

    @staticmethod
    def from_problem(problem: ConvProblem) -> "TokenRanges":
        device, N = problem.x.device, problem.N
        if problem.cu_seqlens is not None:
            offsets = problem.cu_seqlens.to(device, torch.long)
            return TokenRanges(torch.zeros(N, dtype=torch.long, device=device), offsets[:-1], offsets[1:])
        row = torch.arange(N, device=device)
        return TokenRanges(row, torch.zeros_like(row), torch.full_like(row, problem.T))

    def edge_tokens(self, count: int, at_end: bool) -> tuple[Index, Index, Mask]:
        """Return sequence, position and existence of the first (or last) `count` tokens of each sequence.

        A token that does not exist repeats one that does, so writing all of them needs no mask.
        """
        n = torch.arange(len(self.row), device=self.row.device).repeat_interleave(count)
        i = torch.arange(count, device=self.row.device).repeat(len(self.row))
        p = self.end[n] - 1 - i if at_end else self.start[n] + i
        is_token = (p >= self.start[n]) & (p < self.end[n])
        if len(n):
            n, p = repeat_valid(is_token, n, p)
        return n, p, is_token


def repeat_valid(valid: Mask, *indices: Index) -> tuple[Index, ...]:
    """Replace the invalid rows of each index by its first valid row, or by row 0 if none is valid."""
    first = valid.to(torch.uint8).argmax(0, keepdim=True)
    return tuple(torch.where(valid, i, i[first]) for i in indices)


def accumulator_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums: fp64 for an fp64 x, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def block_elements(x: Tensor) -> int:
    """Return the elements of a block: as many as stay in cache on a CPU, all on other devices."""
    return BLOCK * torch.get_num_threads() if x.device.type == "cpu" else max(1, x.numel())


def cache_blocks(x: Channels, T: int) -> Iterator[tuple[slice, slice, slice]]:
    """Cut [B, T, D] into blocks along x's contiguous axis: rows of channels, or strips of them over time."""
    B, _, D = x.shape
    size = block_elements(x)
    d = min(D, STRIP) if x.stride(2) > x.stride(1) and size < x.numel() else D
    t = max(1, min(T, size // d))
    b = max(1, min(B, size // (d * t)))
    for b0 in range(0, B, b):
        for d0 in range(0, D, d):
            for t0 in range(0, T, t):
                yield slice(b0, min(b0 + b, B)), slice(t0, min(t0 + t, T)), slice(d0, d0 + d)


def correlate(x: Tensor, taps: Tensor, bias: Tensor | None, is_silu: bool, out: Tensor) -> None:
    """Write out[b, t] = act(bias + sum_j taps[j] x[b, t + j]); x [B, T + W - 1, D], taps [W, D]."""
    W = taps.shape[0]
    in_place = out.dtype == taps.dtype and x.stride(2) == 1
    for b, t, d in cache_blocks(x, out.shape[1]):
        # one conversion for all taps: W multiply-adds read the block from the CPU cache, not from memory
        block = x[b, t.start : t.stop + W - 1, d].to(taps.dtype)
        num, target = t.stop - t.start, out[b, t, d]
        # accumulate in y's memory where it has the dtype of sums: no pass for a copy
        total = torch.mul(block[:, :num], taps[0, d], out=target if in_place else None)
        for j in range(1, W):
            total.addcmul_(block[:, j : j + num], taps[j, d])
        if bias is not None:
            total.add_(bias[d])
        if is_silu:
            torch.nn.functional.silu(total, inplace=True)
        if not in_place:
            # rounding and transposing in one copy is slower than in two (bf16: 68 ms, not 59, measured)
            target.copy_(total if total.stride(2) == 1 else total.to(out.dtype))


def gather_windows(
    x: Channels, ranges: TokenRanges, n: Index, p: Index, initial: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return x [m, w, D] at positions p [m, w] of sequences n [m]: `initial` before a sequence, 0 after it.

    initial [N, D, L] are the L inputs before each sequence's first, newest last; None: zeros.
    """
    start, end, T = ranges.start[n][:, None], ranges.end[n][:, None], x.shape[1]
    if T == 0:
        rows = x.new_zeros(*p.shape, x.shape[2], dtype=dtype)
    else:
        # the gather needs valid indices, so positions are clamped and rows outside the sequence zeroed
        inside = (p >= start) & (p < end)
        rows = x[ranges.row[n][:, None], p.clamp(0, T - 1)].to(dtype)
        rows = torch.where(inside[..., None], rows, 0)
    if initial is None or initial.shape[2] == 0:
        return rows
    # position start - 1 is the newest column of a window, L - 1
    column = (p - start + initial.shape[2]).clamp(0, initial.shape[2] - 1)
    return torch.where((p < start)[..., None], initial[n[:, None], :, column].to(dtype), rows)


def convolve_sequences(
    x: Channels, taps: Tensor, bias: Tensor | None, is_silu: bool, ranges: TokenRanges,
    initial: Tensor | None, y: Channels,
) -> None:  # fmt: skip
    """Write y for every token of every sequence; other rows of y are undefined."""
    W, T = taps.shape[0], x.shape[1]
    if T >= W:
        # all tokens as one sequence, in cache blocks; below, the first W - 1 of each sequence are overwritten
        correlate(x, taps, bias, is_silu, y[:, W - 1 :])
    if W == 1 or T == 0:
        return
    n, p, _ = ranges.edge_tokens(W - 1, at_end=False)
    steps = torch.arange(1 - W, 1, device=x.device)
    # a window has W x D elements: a part of them is as large as a block, and stays in the CPU cache
    for part in row_slices(n, p, block_elements(x) // (W * x.shape[2])):
        m, at = n[part], p[part]
        head = torch.empty(len(m), 1, x.shape[2], dtype=taps.dtype, device=x.device)
        correlate(
            gather_windows(x, ranges, m, at[:, None] + steps, initial, taps.dtype), taps, bias, is_silu, head
        )
        y[ranges.row[m], at] = head[:, 0].to(y.dtype)


def row_slices(n: Index, p: Index, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` of the rows of n and p."""
    for i in range(0, len(n), max(1, size)):
        yield slice(i, i + max(1, size))


def clear_tail(y: Channels, problem: ConvProblem) -> None:
    """Zero the tokens of y past cu_seqlens[-1]."""
    if problem.cu_seqlens is None:
        return
    if y.device.type == "cpu":
        # a slice writes the tail only; the mask below is a pass over all of y, but the host does not wait
        y[:, int(problem.cu_seqlens[-1]) :] = 0
    else:
        tail = torch.arange(problem.T, device=y.device) >= problem.cu_seqlens[-1].to(y.device)
        y.masked_fill_(tail[:, None], 0)


def last_inputs(
    x: Channels, ranges: TokenRanges, initial: Tensor | None, columns: int, dtype: torch.dtype
) -> Tensor:
    """Return the last `columns` inputs of each sequence and of `initial` [N, D, columns], newest last."""
    n = torch.arange(len(ranges.row), device=x.device)
    p = ranges.end[:, None] + torch.arange(-columns, 0, device=x.device)
    windows = gather_windows(x, ranges, n, p, initial, accumulator_dtype(x)).transpose(1, 2).to(dtype)
    # no view, which `contiguous` leaves of one channel: a caller may change it in place
    return windows.clone(memory_format=torch.contiguous_format)


def valid_slots(
    index: Index | None, rows: int, state: Tensor, null_slot: int | None
) -> tuple[Index | slice, Mask | None]:
    """Return each row's slot, clamped so that it can be read, and a mask of rows that have one; None: all."""
    slots = state.shape[0]
    if index is None:
        if null_slot is None and rows <= slots:
            return slice(rows), None
        index = torch.arange(rows, device=state.device)
    valid = (index >= (0 if null_slot is None else 1)) & (index < slots)
    # read on the CPU only: the host would wait for a device. None spares the caller masked passes over y
    if valid.device.type == "cpu" and bool(valid.all()):
        return index.to(torch.long), None
    return index.to(torch.long).clamp(0, slots - 1), valid


def store_slots(state: ConvPool, slot: Index | slice, valid: Mask | None, new: Tensor, old: Tensor) -> None:
    """Write state[slot] = new where valid. If no row is valid, row 0 writes back the `old` that was read."""
    new = new.to(state.dtype)
    if valid is not None:
        slot = torch.arange(len(new), device=new.device) if isinstance(slot, slice) else slot
        new = torch.where(valid[:, None, None], new, old)
        # invalid rows repeat the write of a valid one: the same slot and values, so no order matters
        slot, row = repeat_valid(valid, slot, torch.arange(len(slot), device=slot.device))
        new = new[row]
    state[slot] = new


def causal_conv1d(
    problem: ConvProblem, sizes: tuple[int, ...] | None = None
) -> tuple[Channels | tuple[Channels, ...], ConvState | None]:
    """Return y, or parts of `sizes` channels, and the last W - 1 inputs; update a pool's slots in place."""
    x, ranges, dtype = problem.x, TokenRanges.from_problem(problem), accumulator_dtype(problem.x)
    taps = problem.weight.t().to(dtype).contiguous()
    bias = None if problem.bias is None else problem.bias.to(dtype)
    y = x.new_empty(x.shape)
    initial = problem.initial_state
    if problem.state is not None:
        return _conv_pool(problem, ranges, taps, bias, y), None
    convolve_sequences(x, taps, bias, problem.activation == "silu", ranges, initial, y)
    clear_tail(y, problem)
    final = last_inputs(x, ranges, initial, problem.W - 1, x.dtype) if problem.output_final_state else None
    return y if sizes is None else y.split(sizes, -1), final


def _conv_pool(
    problem: ConvProblem, ranges: TokenRanges, taps: Tensor, bias: Tensor | None, y: Channels
) -> Channels:
    state, x = problem.state, problem.x
    assert state is not None
    if problem.N == 0 or state.shape[0] == 0:
        return y.zero_()
    slot, valid = valid_slots(problem.state_index, problem.N, state, problem.null_slot)
    old = state[slot]
    initial = old
    for is_read in (valid, problem.has_initial_state):
        initial = initial if is_read is None else torch.where(is_read[:, None, None], initial, 0)
    convolve_sequences(x, taps, bias, problem.activation == "silu", ranges, initial, y)
    clear_tail(y, problem)
    if valid is not None:
        token = torch.arange(problem.T, device=x.device)
        n = ranges.row if problem.cu_seqlens is None else torch.searchsorted(ranges.end, token, right=True)
        has_slot = valid[n.clamp(max=problem.N - 1)]
        y.masked_fill_(~(has_slot[:, None, None] if problem.cu_seqlens is None else has_slot[:, None]), 0)
    new = last_inputs(x, ranges, initial, state.shape[2], accumulator_dtype(x))
    is_written = ranges.end > ranges.start
    store_slots(state, slot, is_written if valid is None else is_written & valid, new, old)
    return y


def causal_conv1d_update(problem: ConvUpdateProblem) -> None:
    """Write `out` and advance the windows; history and packet are concatenated and convolved together."""
    x, state, out, W = problem.x, problem.state, problem.out, problem.weight.shape[1]
    (B, T, _), L, dtype = x.shape, state.shape[2], accumulator_dtype(problem.x)
    if B == 0 or T == 0 or state.shape[0] == 0:
        out.zero_()
        return
    slot, valid = valid_slots(problem.state_index, B, state, problem.null_slot)
    old = state[slot]
    past = (old if valid is None else torch.where(valid[:, None, None], old, 0)).to(dtype)
    if problem.ring_pos is not None or problem.num_accepted is not None:
        past = past.gather(2, _read_columns(problem)[:, None].expand(-1, past.shape[1], -1))
    # history and packet as one line: `correlate` sums in the same order as for whole sequences
    line = torch.cat([past.transpose(1, 2), x.to(dtype)], dim=1)
    bias = None if problem.bias is None else problem.bias.to(dtype)
    taps = problem.weight.t().to(dtype)
    correlate(line[:, line.shape[1] - T - W + 1 :], taps, bias, problem.activation == "silu", out)
    if valid is not None:
        out.masked_fill_(~valid[:, None, None], 0)
    if problem.ring_pos is not None:
        if L == 0:
            return
        # only the last L tokens: earlier ones share a column, and scatter writes duplicates in no order
        num_stored = min(T, L)
        step = torch.arange(T - num_stored, T, device=x.device)
        column = (problem.ring_pos.long()[:, None] + step) % L
        packet = line[:, line.shape[1] - num_stored :].transpose(1, 2).to(state.dtype)
        new = old.scatter(2, column[:, None].expand_as(packet), packet)
    elif problem.num_accepted is not None:
        new = old.clone()
        new[:, :, : W + T - 2] = line[:, 1:].transpose(1, 2)
    else:
        new = line[:, T:].transpose(1, 2)
    store_slots(state, slot, valid, new, old)


def _read_columns(problem: ConvUpdateProblem) -> Tensor:
    """Return the columns [B, W-1] of each row's slot that hold the inputs before the packet, oldest first."""
    L, W = problem.state.shape[2], problem.weight.shape[1]
    step = torch.arange(W - 1, device=problem.x.device)
    if problem.ring_pos is not None:
        return (problem.ring_pos.long()[:, None] - (W - 1) + step) % max(1, L)
    assert problem.num_accepted is not None
    return problem.num_accepted.long().clamp(1, L - W + 2)[:, None] - 1 + step


def causal_conv1d_bwd(
    problem: ConvProblem, dy: Channels | tuple[Channels, ...], dfinal: ConvState | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return dx, dweight, dbias, dinitial_state, summed in fp32 or fp64; dy may be parts of channels."""
    if isinstance(dy, tuple):
        dy = torch.cat(dy, dim=-1)
    x, W, dtype = problem.x, problem.W, accumulator_dtype(problem.x)
    ranges = TokenRanges.from_problem(problem)
    taps = problem.weight.t().to(dtype).contiguous()
    bias = None if problem.bias is None else problem.bias.to(dtype)
    dpre = torch.empty(x.shape, dtype=dtype, device=x.device)
    if problem.activation == "silu":
        # pre goes to dpre's memory; the next pass replaces it by act'(pre) dy, block by block in cache
        convolve_sequences(x, taps, bias, False, ranges, problem.initial_state, dpre)
        for b, t, d in cache_blocks(dpre, problem.T):
            part = dpre[b, t, d]
            part.copy_(torch.ops.aten.silu_backward(dy[b, t, d].to(dtype), part))
    else:
        dpre.copy_(dy)
    clear_tail(dpre, problem)
    dbias = None if problem.bias is None else dpre.sum((0, 1)).to(problem.bias.dtype)
    dx = _input_gradient(problem, ranges, taps, dpre, dfinal)
    initial, dinitial = problem.initial_state, None
    if initial is not None:
        n = torch.arange(problem.N, device=x.device).repeat_interleave(W - 1)
        p = ranges.start[n] + torch.arange(1 - W, 0, device=x.device).repeat(problem.N)
        dinitial = (
            _input_gradient_at(ranges, taps, dpre, dfinal, n, p)
            .view(problem.N, W - 1, x.shape[2])
            .transpose(1, 2)
        )
        dinitial = dinitial.to(initial.dtype).contiguous()
    dweight = _weight_gradient(problem, ranges, dpre)
    return dx, dweight.t().to(problem.weight.dtype).contiguous(), dbias, dinitial


def _input_gradient(
    problem: ConvProblem, ranges: TokenRanges, taps: Tensor, dpre: Channels, dfinal: ConvState | None
) -> Channels:
    """Return dx_t = sum_j taps[j] dpre_{t+W-1-j}: all tokens, then the last W - 1 of each sequence again."""
    W, T, dx = problem.W, problem.T, problem.x.new_empty(problem.x.shape)
    if T >= W:
        # the forward's pass with reversed taps: the same cache blocks, mirrored in time
        correlate(dpre, taps.flip(0), None, False, dx[:, : T - W + 1])
    if W > 1 and T > 0:
        n, p, _ = ranges.edge_tokens(W - 1, at_end=True)
        for part in row_slices(n, p, block_elements(dpre) // (W * dpre.shape[2])):
            rows = _input_gradient_at(ranges, taps, dpre, dfinal, n[part], p[part])
            dx[ranges.row[n[part]], p[part]] = rows.to(dx.dtype)
    clear_tail(dx, problem)
    return dx


def _input_gradient_at(
    ranges: TokenRanges, taps: Tensor, dpre: Channels, dfinal: ConvState | None, n: Index, p: Index
) -> Tensor:
    """Return the gradient [m, D] of the inputs at positions p; before the start is the initial state."""
    W, dtype = taps.shape[0], taps.dtype
    inputs = gather_windows(dpre, ranges, n, p[:, None] + torch.arange(W, device=p.device), None, dtype)
    rows = torch.empty(len(n), 1, dpre.shape[2], dtype=dtype, device=dpre.device)
    correlate(inputs, taps.flip(0), None, False, rows)
    if dfinal is not None and W > 1:
        column = p - ranges.end[n] + W - 1
        from_final = dfinal[n, :, column.clamp(0, W - 2)].to(dtype)
        rows[:, 0] += from_final.masked_fill_(((column < 0) | (column > W - 2))[:, None], 0)
    return rows[:, 0]


def _weight_gradient(problem: ConvProblem, ranges: TokenRanges, dpre: Channels) -> Tensor:
    """Return [W, D], the sum over tokens of dpre_t x_{t-W+1+j}.

    The first W - 1 tokens of each sequence are added first, and then zeroed in dpre.
    """
    x, W, T, dtype = problem.x, problem.W, problem.T, dpre.dtype
    total = torch.zeros(W, x.shape[2], dtype=dtype, device=x.device)
    if T == 0:
        return total
    if W > 1:
        n, p, is_token = ranges.edge_tokens(W - 1, at_end=False)
        steps = torch.arange(1 - W, 1, device=x.device)
        for part in row_slices(n, p, block_elements(x) // (W * x.shape[2])):
            m, at = n[part], p[part]
            head = gather_windows(x, ranges, m, at[:, None] + steps, problem.initial_state, dtype)
            grad = dpre[ranges.row[m], at].masked_fill_(~is_token[part][:, None], 0)
            total += (head * grad[:, None]).sum(0)
        # zero, so that the pass below cannot add them again with inputs of the sequence before
        dpre[ranges.row[n], p] = 0
    # 0 * NaN is NaN: tokens past the last sequence must not be read
    if problem.cu_seqlens is not None:
        if x.device.type == "cpu":
            T = int(problem.cu_seqlens[-1])
        else:
            tail = torch.arange(T, device=x.device) >= problem.cu_seqlens[-1].to(x.device)
            x = x.masked_fill(tail[:, None], 0)
    if T < W:
        return total
    for b, t, d in cache_blocks(x, T - W + 1):
        block, grad = (
            x[b, t.start : t.stop + W - 1, d].to(dtype),
            dpre[b, t.start + W - 1 : t.stop + W - 1, d],
        )
        # W products of a block in the CPU cache: x and dpre are read from memory once
        for j in range(W):
            total[j, d] += (block[:, j : j + t.stop - t.start] * grad).sum((0, 1))
    return total
