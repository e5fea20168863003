# mypy: disable-error-code="assignment"
"""Run the causal depthwise convolution of whole sequences, with the last W inputs in registers.

    y_t = act(bias + sum_j weight[:, j] x_{t-W+1+j})

A program owns a block of tokens and channels, and reads each input once, so the cost is that of reading x and
writing y. The starts of packed sequences are looked up on the device. The first W - 1 tokens of a sequence,
and its final window, belong to the program that owns its first token. Only that program touches the slot in
the pool, so it can update the slot in place.

Bytes per token and channel in bf16: 4.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gdn.backends import eager
from gdn.backends.triton.launch import Launch, Machine, PlanCache, device_guard, jit, kernel, machine, unit_of
from gdn.notation import Channels, ConvState
from gdn.problem.layer import ConvProblem

MAX_TAPS = 8  # taps that fit in registers; `eager` runs wider windows


class Source(NamedTuple):
    """Hold where a program reads inputs: its channels in a row, and in a slot of L columns, newest last."""

    x_ptr: Any
    x_t: Any
    initial_ptr: Any  # None: zeros before each sequence
    initial_l: Any
    L: Any


@jit
def load_taps(weight_ptr, channels, is_channel, W: tl.constexpr):
    """Load W vectors of taps, that of the oldest input first."""
    taps = ()  # a tuple of vectors: each tap has its own register
    for j in tl.static_range(W):
        tap = tl.load(weight_ptr + channels * W + j, mask=is_channel, other=0.0)
        taps = taps + (tap.to(tl.float32),)
    return taps


@jit
def load_bias(bias_ptr, channels, is_channel):
    if bias_ptr is None:
        bias = tl.zeros(channels.shape, tl.float32)
    else:
        bias = tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    return bias


@jit
def apply_filter(window, taps, bias, W: tl.constexpr, SILU: tl.constexpr):
    """Return act(bias + sum_j taps[j] window[j]), in the same order for whole sequences and for steps."""
    y = bias
    for j in tl.static_range(W):
        # an explicit fma, so that Triton's choice of instructions cannot change the bits
        y = tl.fma(taps[j], window[j], y)
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    return y


@jit
def program_block(D, tokens, num_blocks, BD: tl.constexpr):
    """Return row, first token and channels of this program; channels vary fastest."""
    strips = tl.cdiv(D, BD)
    block = tl.program_id(0) // strips
    channels = (tl.program_id(0) % strips) * BD + tl.arange(0, BD)
    return block // num_blocks, (block % num_blocks) * tokens, channels, channels < D


@jit
def find_sequence(cu_seqlens_ptr, N, row, token):
    """Return the sequence of a block's first token: the last one that begins before `token`, or 0."""
    n = row
    if cu_seqlens_ptr is not None:
        low = row * 0
        high = N + 1
        # binary search: log2(N) dependent loads, mostly from L2
        while low < high:
            middle = (low + high) // 2
            is_before = tl.load(cu_seqlens_ptr + middle) < token
            low = tl.where(is_before, middle + 1, low)
            high = tl.where(is_before, high, middle)
        n = tl.maximum(low - 1, 0)
    return n


@jit
def next_sequence(cu_seqlens_ptr, N, n):
    """Return the sequence after n in its row; more than N if there is none."""
    if cu_seqlens_ptr is None:
        return N + 1
    else:
        return n + 1


@jit
def sequence_range(cu_seqlens_ptr, N, n, T):
    """Return first token and end of sequence n; number N has the tokens past the last sequence."""
    if cu_seqlens_ptr is None:
        start = n * 0
        end = T
    else:
        start = tl.load(cu_seqlens_ptr + tl.minimum(n, N)).to(tl.int32)
        end = tl.load(cu_seqlens_ptr + tl.minimum(n + 1, N)).to(tl.int32)
        end = tl.where(n < N, tl.minimum(end, T), T)
    return start, end


@jit
def owned_range(start, end, first, tokens, W: tl.constexpr):
    """Return the tokens of sequence start : end that the block of `tokens` tokens at `first` owns."""
    begin = tl.where(start < first, tl.maximum(first, start + W - 1), start)
    # the first W - 1 tokens need the held window, which one program reads
    return begin, tl.minimum(end, tl.maximum(first + tokens, start + W - 1))


@jit
def load_window(source, start, begin, is_read, has_initial, W: tl.constexpr):
    """Return the W - 1 inputs before token `begin`, oldest first; those before `start` are in the slot."""
    window = ()
    for j in tl.static_range(W - 1):
        token = begin - (W - 1) + j
        window = window + (load_input(source, token, start, is_read, has_initial),)
    return window


@jit
def load_input(source, token, start, is_read, has_initial):
    """Load the input of a token, from the slot if the token is before the sequence's first, `start`."""
    mask = is_read & (token >= start)
    value = tl.load(source.x_ptr + token * source.x_t, mask=mask, other=0.0).to(tl.float32)
    if source.initial_ptr is not None:
        is_initial = is_read & has_initial & (token < start)
        column = source.initial_ptr + (source.L + token - start) * source.initial_l
        initial = tl.load(column, mask=is_initial, other=0.0)
        value = tl.where(token < start, initial.to(tl.float32), value)
    return value


@kernel
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, initial_ptr, cu_seqlens_ptr, index_ptr, has_ptr, y_ptr, final_ptr, k_ptr,
    v_ptr, x_b, x_t, D, T, N, initial_n, initial_d, initial_l, final_n, final_d, final_l, index_n, has_n, L,
    slots, tokens, num_blocks, k_first, v_first,
    LOWEST: tl.constexpr, IN_PLACE: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, U: tl.constexpr,
    BD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # y_t = act(bias + sum_j weight[:, j] x_{t-W+1+j}).
    # Program (row, block of tokens, strip of channels), strips fastest; grid: B * blocks * strips; 1, 2 or 4
    # warps; no PDL. The W taps and the last W inputs of each channel stay in registers.
    # Reads x once, and W - 1 tokens before the block; writes y: 4 bytes per token and channel in bf16. For
    # each sequence that starts in the block it also writes the final window.
    # With k_ptr and v_ptr, y is three tensors, and each strip lies in one of them.
    row, first, channels, is_channel = program_block(D * UNIT, tokens, num_blocks, BD)
    taps = load_taps(weight_ptr, channels, is_channel, W)
    bias = load_bias(bias_ptr, channels, is_channel)
    x_t = x_t.to(tl.int64) * UNIT
    y_t = D.to(tl.int64) * UNIT
    if k_ptr is not None:
        strip = (tl.program_id(0) % tl.cdiv(D * UNIT, BD)) * BD
        is_q = strip < k_first * UNIT
        is_v = strip >= v_first * UNIT
        head = tl.where(is_v, v_first, tl.where(is_q, 0, k_first)) * UNIT
        y_t = tl.where(is_v, D, tl.where(is_q, k_first, v_first)).to(tl.int64) * UNIT - head
        y_ptr = tl.where(is_v, v_ptr, tl.where(is_q, y_ptr, k_ptr)) - head
    x_ptr += row.to(tl.int64) * x_b * UNIT + channels
    y_ptr += row.to(tl.int64) * T * y_t + channels
    n = find_sequence(cu_seqlens_ptr, N, row, first)
    start, end = sequence_range(cu_seqlens_ptr, N, n, T)
    while (n <= N) & (start < first + tokens):
        begin, stop = owned_range(start, end, first, tokens, W)
        is_sequence = n < N
        slot = n.to(tl.int64)
        if index_ptr is not None:
            slot = tl.load(index_ptr + slot * index_n, mask=is_sequence, other=-1).to(tl.int64)
        is_valid = is_sequence & (slot >= LOWEST) & (slot < slots)
        has_initial = is_valid
        if has_ptr is not None:
            has_initial = is_valid & (tl.load(has_ptr + n * has_n, mask=is_sequence, other=0) != 0)
        initial = initial_ptr
        if initial_ptr is not None:
            initial = initial_ptr + slot * initial_n + channels * initial_d.to(tl.int64)
        source = Source(x_ptr, x_t, initial, initial_l, L)
        window = load_window(source, start, begin, is_channel & is_valid, has_initial, W)
        # U tokens are loaded from HBM before the first is used: U loads in flight per thread
        for t in range(begin, stop, U):
            inputs = ()
            for u in tl.static_range(U):
                is_read = is_channel & is_valid & (t + u < stop)
                inputs = inputs + (tl.load(x_ptr + (t + u) * x_t, mask=is_read, other=0.0),)
            for u in tl.static_range(U):
                window = window + (inputs[u].to(tl.float32),)
                # padding slots get zero outputs
                y = tl.where(is_valid, apply_filter(window, taps, bias, W, SILU), 0.0).to(
                    y_ptr.dtype.element_ty
                )
                tl.store(y_ptr + (t + u) * y_t, y, mask=is_channel & (t + u < stop))
                window = window[1:]
        if final_ptr is not None:
            is_stored = is_valid & (begin == start)
            if IN_PLACE:
                is_stored = is_stored & (end > start)
            final = final_ptr + slot * final_n + channels * final_d.to(tl.int64)
            for c in range(tl.where(is_stored, L, 0)):
                last = load_input(source, end - L + c, start, is_channel, has_initial)
                # in place: column c is stored after all threads have loaded a later one
                tl.debug_barrier()
                tl.store(final + c * final_l, last.to(final_ptr.dtype.element_ty), mask=is_channel)
        n = next_sequence(cu_seqlens_ptr, N, n)
        start, end = sequence_range(cu_seqlens_ptr, N, n, T)


@dataclass(frozen=True)
class Tiling:
    """Describe a tiling: BD channels by `tokens` tokens a program, U of them loaded ahead."""

    BD: int
    num_warps: int
    U: int
    tokens: int
    num_blocks: int
    strips: int


def choose_tiling(
    problem: ConvProblem, vector: int, U: int, min_tokens: int, max_tokens: int, gpu: Machine
) -> Tiling:
    """Choose a tiling: `vector` channels a thread, and so many tokens a program that they fill the GPU."""
    B, T, D = problem.x.shape
    # the widest block of channels whose last strip wastes no lanes
    widths = [(-triton.cdiv(D, 32 * vector * n) * n, n) for n in (1, 2, 4)]
    num_warps = max(widths)[1]
    BD = 32 * vector * num_warps
    strips = triton.cdiv(D, BD)
    # 32 warps per SM, twice
    num_programs = 2 * 32 // num_warps * gpu.num_sms
    tokens = triton.next_power_of_2(triton.cdiv(max(1, T) * max(1, B) * strips, num_programs))
    tokens = max(min_tokens, min(max_tokens, tokens))
    # trailing empty sequences begin at T, and need a program
    num_blocks = T // tokens + 1 if problem.cu_seqlens is not None else max(1, triton.cdiv(T, tokens))
    return Tiling(BD, num_warps, U, tokens, num_blocks, strips)


@dataclass(frozen=True)
class _Plan:
    launch: Launch
    widths: tuple[int, ...]  # channels of the tensors that it writes: one, or three of whole strips each


_plans: PlanCache[_Plan] = PlanCache()


def causal_conv1d(
    problem: ConvProblem, sizes: tuple[int, ...] | None = None
) -> tuple[Channels | tuple[Channels, ...], ConvState | None]:
    """Return y, or its parts of so many channels, and the final state; update a pool's slots in place.

    Three parts of whole strips are tensors of their own, others views of one.
    """
    p = problem
    if p.W > MAX_TAPS:
        return eager.BACKEND.causal_conv1d(p, sizes)  # type: ignore[no-any-return]
    p = to_kernel_layout(p)
    with device_guard(p.x.device):
        final = p.x.new_empty(p.state_shape) if p.output_final_state else None
        initial = p.initial_state if p.state is None else p.state
        final_window = final if p.state is None else p.state
        plan = _plans.get((conv_key(p), sizes), lambda: _plan(p, initial, final_window, sizes))
        # every token is written by some program, padding included
        y = tuple([p.x.new_empty(*p.x.shape[:2], width) for width in plan.widths])
        plan.launch(
            p.x,
            p.weight,
            p.bias,
            drop_empty(initial),
            p.cu_seqlens,
            p.state_index,
            p.has_initial_state,
            y[0],
            drop_empty(final_window),
            *(y[1:] or (None, None)),
        )
    if sizes is None:
        return y[0], final
    return y if len(y) > 1 else y[0].split(sizes, -1), final


def to_kernel_layout(problem: ConvProblem) -> ConvProblem:
    """Return the problem as the kernels read it, with contiguous channels; copy only other layouts."""
    p = problem
    changed: dict[str, Any] = {}
    if p.x.stride(2) != 1:
        changed["x"] = p.x.contiguous()
    for name in ("weight", "bias", "cu_seqlens"):
        x = getattr(p, name)
        if x is not None and not x.is_contiguous():
            changed[name] = x.contiguous()
    if p.cu_seqlens is not None and p.cu_seqlens.device != p.x.device:
        changed["cu_seqlens"] = p.cu_seqlens.to(p.x.device, non_blocking=True)
    return replace(p, **changed) if changed else p


def drop_empty(x: Tensor | None) -> Tensor | None:
    """Return None for a tensor without elements, which has no address."""
    return None if x is None or x.numel() == 0 else x


def layout_key(x: Tensor | None) -> tuple[object, ...]:
    """Return what a launch depends on of an optional tensor."""
    return () if x is None else (x.shape, x.stride(), x.dtype)


def conv_key(p: ConvProblem) -> tuple[object, ...]:
    optional = (p.bias, p.initial_state, p.state, p.cu_seqlens, p.state_index, p.has_initial_state)
    return (
        p.x.shape, p.x.stride(), p.x.dtype, p.x.device, p.weight.shape, p.weight.dtype, p.activation,
        p.output_final_state, p.null_slot, *map(layout_key, optional),
    )  # fmt: skip


def strides_or_zeros(x: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if x is None else x.stride()


def first_channels(sizes: tuple[int, ...], BD: int) -> tuple[int, ...]:
    """Return the first channels of parts two and three; () unless they begin with a strip of BD channels."""
    firsts = tuple(accumulate(sizes[:-1]))
    return () if len(sizes) != 3 or any(first % BD for first in firsts) else firsts


def _plan(
    p: ConvProblem, initial: Tensor | None, final_window: Tensor | None, sizes: tuple[int, ...] | None
) -> _Plan:
    B, T, D = p.x.shape
    # 8 channels per thread next to the addresses of a slot spill 24 bytes of registers on sm_90
    vector = 16 // p.x.element_size() if initial is None and final_window is None else 4
    tiling = choose_tiling(p, vector, 4, max(16, p.W), 256, machine(p.x.device))
    firsts = first_channels(sizes or (), tiling.BD)
    # a constant unit lets Triton load 16 bytes of channels at once
    unit = unit_of(*p.x.stride()[:2], D, *firsts)
    L = p.W - 1 if p.state is None else p.state.shape[2]
    scalars = (
        p.x.stride(0) // unit, p.x.stride(1) // unit, D // unit, T, p.N, *strides_or_zeros(initial, 3),
        *strides_or_zeros(final_window, 3), *strides_or_zeros(p.state_index, 1),
        *strides_or_zeros(p.has_initial_state, 1), L,
        p.N if p.state is None else p.state.shape[0], tiling.tokens, tiling.num_blocks,
        *([first // unit for first in firsts] or (None, None)),
    )  # fmt: skip
    constants = {
        "LOWEST": 0 if p.null_slot is None else 1, "IN_PLACE": p.state is not None, "W": p.W,
        "SILU": p.activation == "silu", "U": tiling.U,
        "BD": tiling.BD, "UNIT": unit,
    }  # fmt: skip
    grid = B * tiling.num_blocks * tiling.strips
    launch = Launch(_conv_kernel, grid, scalars, constants, tiling.num_warps)
    return _Plan(launch, sizes if firsts and sizes is not None else (D,))
