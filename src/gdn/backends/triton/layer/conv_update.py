# mypy: disable-error-code="assignment, var-annotated"
"""Run the causal convolution's decode step: T tokens per row, with the windows in a pool, in one launch.

A program has a row and a strip of channels. It reads the slot, computes the packet with the last W inputs in
registers, and writes the slot in place. It reads x once, so `out` may be x.

Bytes per row and channel, in bf16 with T tokens and L columns: 4 (T + L).
"""

import triton
import triton.language as tl

from gdn.backends import eager
from gdn.backends.triton.launch import Launch, PlanCache, device_guard, jit, kernel, machine
from gdn.backends.triton.launch.pdl import launch_dependents_then_wait, pdl_options, supports_pdl
from gdn.backends.triton.layer.conv import (
    MAX_TAPS,
    apply_filter,
    drop_empty,
    layout_key,
    load_bias,
    load_taps,
    strides_or_zeros,
)
from gdn.problem.layer import ConvUpdateProblem


@jit
def _modulo(x, L):
    """Return x mod L in 0 .. L - 1 for x of either sign; 0 if L is 0."""
    L = tl.maximum(L, 1)
    remainder = x % L
    return tl.where(remainder < 0, remainder + L, remainder)


@kernel
def _update_kernel(
    x_ptr, state_ptr, weight_ptr, bias_ptr, index_ptr, position_ptr, out_ptr,
    x_b, x_t, x_d, out_b, out_t, out_d, D, T, state_n, state_d, state_l, index_b, position_b, L, slots,
    MODE: tl.constexpr, LOWEST: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, U: tl.constexpr,
    BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # y_t = act(bias + sum_j weight[:, j] x_{t-W+1+j}) for the tokens of a packet, and the next window.
    # Program (row, strip of BD channels), strips fastest; grid: B * cdiv(D, BD); 4 warps, a channel a thread.
    # The window and the taps stay in registers: W scalars of each per thread.
    # PDL: it lets the next kernel start at once, and waits for the previous one before its first load.
    # Reads x, the taps and the slot's window; writes out, and the slot in place.
    if PDL:
        launch_dependents_then_wait()
    strips = tl.cdiv(D, BD)
    row = (tl.program_id(0) // strips).to(tl.int64)
    channels = (tl.program_id(0) % strips) * BD + tl.arange(0, BD)
    is_channel = channels < D
    slot = row
    if index_ptr is not None:
        slot = tl.load(index_ptr + row * index_b).to(tl.int64)
    is_valid = (slot >= LOWEST) & (slot < slots)
    is_read = is_channel & is_valid
    x_t = x_t.to(tl.int64)
    out_t = out_t.to(tl.int64)
    x_ptr += row * x_b + channels * x_d.to(tl.int64)
    out_ptr += row * out_b + channels * out_d.to(tl.int64)
    # columns of the slot: of the oldest input before the packet, and of the packet's first token
    if MODE == "ring_pos":
        write_column = _modulo(tl.load(position_ptr + row * position_b).to(tl.int64), L).to(tl.int32)
        read_column = _modulo(write_column - (W - 1), L)
    elif MODE == "num_accepted":
        accepted = tl.load(position_ptr + row * position_b).to(tl.int64)
        read_column = (tl.minimum(tl.maximum(accepted, 1), L - W + 2) - 1).to(tl.int32)
        write_column = read_column * 0 + W - 2
    else:
        read_column = L - (W - 1)
        write_column = L - T
    taps = load_taps(weight_ptr, channels, is_channel, W)
    bias = load_bias(bias_ptr, channels, is_channel)
    window = ()
    if state_ptr is not None:
        state_dtype = state_ptr.dtype.element_ty
        state_ptr += slot * state_n + channels * state_d.to(tl.int64)
        for j in tl.static_range(W - 1):
            column = read_column + j
            if MODE == "ring_pos":
                column = _modulo(column, L)
            window = window + (tl.load(state_ptr + column * state_l, mask=is_read, other=0.0).to(tl.float32),)
        if MODE == "window":
            # columns older than the filter's: column c is stored after all threads have loaded a later one
            for c in range(L - (W - 1) - T):
                column_value = tl.load(state_ptr + (c + T) * state_l, mask=is_read, other=0.0)
                tl.debug_barrier()
                tl.store(state_ptr + c * state_l, column_value, mask=is_read)
        # all threads load the slot before any of them stores to it
        tl.debug_barrier()
        for j in tl.static_range(W - 1):
            if MODE == "window":
                column = read_column + j - T
                tl.store(
                    state_ptr + column * state_l, window[j].to(state_dtype), mask=is_read & (column >= 0)
                )
            if MODE == "num_accepted" and j > 0:
                tl.store(state_ptr + (j - 1) * state_l, window[j].to(state_dtype), mask=is_read)
    for t in range(0, T, U):
        # U tokens are loaded from HBM before the first is used
        inputs = ()
        for u in tl.static_range(U):
            inputs = inputs + (tl.load(x_ptr + (t + u) * x_t, mask=is_read & (t + u < T), other=0.0),)
        for u in tl.static_range(U):
            x = inputs[u].to(tl.float32)
            # the window is W scalars in a thread's registers: shifting it is renaming
            window = window + (x,)
            y = tl.where(is_valid, apply_filter(window, taps, bias, W, SILU), 0.0).to(
                out_ptr.dtype.element_ty
            )
            tl.store(out_ptr + (t + u) * out_t, y, mask=is_channel & (t + u < T))
            if state_ptr is not None:
                column = write_column + t + u
                is_stored = is_read & (t + u < T) & (column >= 0)
                if MODE == "ring_pos":
                    column = _modulo(column, L)
                    is_stored = is_stored & (t + u >= T - L)
                tl.store(state_ptr + column * state_l, x.to(state_dtype), mask=is_stored)
            window = window[1:]


_plans: PlanCache[Launch] = PlanCache()


def causal_conv1d_update(problem: ConvUpdateProblem) -> None:
    """See `Backend`: writes `out` and advances the windows."""
    p = problem
    if p.weight.shape[1] > MAX_TAPS:
        eager.BACKEND.causal_conv1d_update(p)
        return
    if p.state.shape[0] == 0:
        p.out.zero_()
        return
    weight = p.weight if p.weight.is_contiguous() else p.weight.contiguous()
    bias = p.bias if p.bias is None or p.bias.is_contiguous() else p.bias.contiguous()
    position = p.ring_pos if p.num_accepted is None else p.num_accepted
    with device_guard(p.x.device):
        key = (
            p.x.shape, p.x.stride(), p.x.dtype, p.x.device, p.state.shape, p.state.stride(), p.state.dtype,
            weight.shape, weight.dtype, p.out.stride(), p.activation, p.null_slot, p.ring_pos is None,
            None if bias is None else bias.dtype, layout_key(p.state_index), layout_key(position),
        )  # fmt: skip
        launch = _plans.get(key, lambda: plan_launch(p))
        launch(p.x, drop_empty(p.state), weight, bias, p.state_index, position, p.out)


def plan_launch(p: ConvUpdateProblem) -> Launch:
    B, T, D = p.x.shape
    slots, _, L = p.state.shape
    position = p.ring_pos if p.num_accepted is None else p.num_accepted
    mode = "window" if position is None else "ring_pos" if p.num_accepted is None else "num_accepted"
    # one channel a thread: with several, x and slots would have different layouts, and be converted
    BD, gpu = 128, machine(p.x.device)
    scalars = (
        *p.x.stride(), *p.out.stride(), D, T, *p.state.stride(),
        *strides_or_zeros(p.state_index, 1), *strides_or_zeros(position, 1), L, slots,
    )  # fmt: skip
    constants = {
        "MODE": mode, "LOWEST": 0 if p.null_slot is None else 1, "W": p.weight.shape[1],
        "SILU": p.activation == "silu", "U": 1 if T == 1 else 4, "BD": BD,
        "PDL": supports_pdl(gpu),
    }  # fmt: skip
    grid = B * triton.cdiv(D, BD)
    return Launch(_update_kernel, grid, scalars, constants, num_warps=4, options=pdl_options(gpu))
