# mypy: disable-error-code="assignment, var-annotated"
"""The kernels of a fused decode step: see `step`.

Bytes per row and value head beyond the state's: those of q, k, their windows and taps, once for each program.
"""

import triton
import triton.language as tl

from gdn.backends.triton.chained import after_the_one_before, let_the_next_begin, wait_for_the_one_before
from gdn.backends.triton.conv import filtered, load_bias, load_taps
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.norm import gated, normed
from gdn.backends.triton.recurrent import divide, owner, places, step, tile


@triton.jit
def slot_at(index_ptr, row, stride, lowest, slots):
    """A row's slot, and whether it is one."""
    slot = row
    if index_ptr is not None:
        slot = tl.load(index_ptr + row * stride).to(tl.int64)
    return slot, (slot >= lowest) & (slot < slots)


@triton.jit
def taken(
    x_ptr, weight_ptr, bias_ptr, slot_ptr, conv_d, conv_l, L, channels, is_channel, is_valid,
    CONV: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A row's channels as decode takes them, in fp32, and the last TAPS inputs, the oldest first.

    With CONV they are convolved and rounded to x's dtype; without it x has been, and there are no inputs.
    """
    if not CONV:
        return tl.load(x_ptr + channels, mask=is_channel, other=0.0).to(tl.float32), ()
    else:
        is_read = is_channel & is_valid
        x = tl.load(x_ptr + channels, mask=is_read, other=0.0)
        taps = load_taps(weight_ptr, channels, is_channel, TAPS)
        bias = load_bias(bias_ptr, channels, is_channel)
        window = ()
        at = slot_ptr + channels.to(tl.int64) * conv_d + (L - (TAPS - 1)) * conv_l
        for j in tl.static_range(TAPS - 1):
            window = window + (tl.load(at + j * conv_l, mask=is_read, other=0.0).to(tl.float32),)
        window = window + (x.to(tl.float32),)
        y = tl.where(is_valid, filtered(window, taps, bias, TAPS, SILU), 0.0)
        return y.to(x.dtype).to(tl.float32), window


@triton.jit
def strip(
    ptr, keys, values, first, k, v, is_there, K: tl.constexpr, V: tl.constexpr, UNIT: tl.constexpr,
    AXIS: tl.constexpr,
):  # fmt: skip
    """Pointers and mask of a state's columns first + values: all strips have their offsets in common."""
    if AXIS == "v":
        ptr += first
    else:
        ptr += first.to(tl.int64) * (v * UNIT)
    mask = below(first, values, V)[:, None, :, None] & is_there
    if keys.shape[1] * keys.shape[3] > K:
        mask = mask & (keys < K)
    return tile(ptr, keys, values, k, v, UNIT, AXIS), mask


@triton.jit
def below(first, values, V: tl.constexpr):
    """Which of first + values lie below V; a constant where tiles fit."""
    if (values.shape[0] * values.shape[1] + V) % (values.shape[0] * values.shape[1]) == 0:
        return tl.full(values.shape, True, tl.int1)
    else:
        return first + values < V


@triton.jit
def move(slot_ptr, conv_d, conv_l, L, channels, is_moved, window, TAPS: tl.constexpr, OLDER: tl.constexpr):
    """A slot a token older. All threads have read before any writes; nobody else may still want to read.

    OLDER: the slot has columns that the filter does not see; without any there is no loop for them.
    """
    at = slot_ptr + channels.to(tl.int64) * conv_d
    if OLDER:
        # column c is written when all threads have read a later one
        for c in range(L - TAPS):
            older = tl.load(at + (c + 1) * conv_l, mask=is_moved, other=0.0)
            tl.debug_barrier()
            tl.store(at + c * conv_l, older, mask=is_moved)
    tl.debug_barrier()
    for j in tl.static_range(TAPS):
        if OLDER or j > 0:
            kept = window[j].to(slot_ptr.dtype.element_ty)
            tl.store(at + (L - TAPS + j) * conv_l, kept, mask=is_moved)


@kernel
def step_kernel(
    x_ptr, weight_ptr, bias_ptr, conv_ptr, conv_index_ptr, state_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr,
    read_index_ptr, write_index_ptr, z_ptr, norm_weight_ptr, o_ptr,
    x_b, a_b, a_h, b_b, b_h, A_log_h, dt_bias_h, z_b, z_h, conv_n, conv_d, conv_l, L, conv_index_n,
    conv_slots, state_n, state_h, state_k, state_v, read_n, write_n, slots, lowest,
    H, HV, heads, parts, parts_inverse, parts_s, ratio_inverse, ratio_s, scale, eps,
    K: tl.constexpr, V: tl.constexpr, A: tl.constexpr, J: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    R_FIRST: tl.constexpr, AXIS: tl.constexpr, STATE_UNIT: tl.constexpr, STRIPS: tl.constexpr,
    IS_SINGLE: tl.constexpr, AHEAD: tl.constexpr, CONV: tl.constexpr, MOVE: tl.constexpr, OLDER: tl.constexpr,
    TAPS: tl.constexpr, SILU: tl.constexpr, L2NORM: tl.constexpr, NEGATIVE: tl.constexpr, NORM: tl.constexpr,
    GATE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        wait_for_the_one_before()
    # a program has `heads` value heads of one key head, and of each STRIPS tiles of columns
    BLOCKS: tl.constexpr = (V + A * B * STRIPS - 1) // (A * B * STRIPS)
    row, part, block = owner(parts, parts_inverse, parts_s, BLOCKS)
    if IS_SINGLE:
        # known to the compiler, one head leaves no loop
        heads = 1
    slot, is_held = slot_at(read_index_ptr, row, read_n, lowest, slots)
    target, is_written = slot_at(write_index_ptr, row, write_n, lowest, slots)
    if write_index_ptr is None:
        target, is_written = slot, is_held
    window_slot, is_valid = slot_at(conv_index_ptr, row, conv_index_n, lowest, conv_slots)
    conv = conv_ptr
    if CONV:
        conv = conv_ptr + window_slot * conv_n
    x_ptr += row * x_b
    head = part * heads
    key_head = divide(head, ratio_inverse, ratio_s)

    keys, values = places(0, A, J, B, W, AXIS, R_FIRST)
    first = block * (A * B * STRIPS)
    source = state_ptr + (slot * state_n + head * state_h) * STATE_UNIT
    goal = state_ptr + (target * state_n + head * state_h) * STATE_UNIT
    if AHEAD:
        place, mask = strip(source, keys, values, first, state_k, state_v, is_held, K, V, STATE_UNIT, AXIS)
        ahead = tl.load(place, mask=mask, other=0.0)

    channels = key_head * K + tl.arange(0, J * W)
    is_channel = tl.arange(0, J * W) < K
    q, q_window = taken(
        x_ptr, weight_ptr, bias_ptr, conv, conv_d, conv_l, L, channels, is_channel, is_valid,
        CONV, TAPS, SILU,
    )  # fmt: skip
    k, k_window = taken(
        x_ptr, weight_ptr, bias_ptr, conv, conv_d, conv_l, L, channels + H * K, is_channel, is_valid,
        CONV, TAPS, SILU,
    )  # fmt: skip
    if MOVE:
        move(conv, conv_d, conv_l, L, channels, is_channel & is_valid, q_window, TAPS, OLDER)
        move(conv, conv_d, conv_l, L, channels + H * K, is_channel & is_valid, k_window, TAPS, OLDER)
    if CHAINED:
        let_the_next_begin()
    # what is gathered has no layout of its own and takes the state's; else the state is laid as q is, through
    # shared memory: 3,466 instructions of PTX in place of 841 for `deferred` in bf16 at 128 x 128
    q = tl.reshape(tl.gather(q, tl.arange(0, J * W), 0), [1, J, 1, W])
    k = tl.reshape(tl.gather(k, tl.arange(0, J * W), 0), [1, J, 1, W])

    for _ in range(heads):
        a = tl.load(a_ptr + row * a_b + head * a_h)
        b = tl.load(b_ptr + row * b_b + head * b_h)
        rate, bias = tl.exp(tl.load(A_log_ptr + head * A_log_h).to(tl.float32)), 0.0
        if dt_bias_ptr is not None:
            bias = tl.load(dt_bias_ptr + head * dt_bias_h).to(tl.float32)
        made = ()
        for s in tl.static_range(STRIPS):
            column = first + s * (A * B)
            has_value = below(column, values, V)
            if AHEAD:
                S = ahead
            if not AHEAD or s + 1 < STRIPS:
                # where there is one head, the next tile comes in while this one is computed
                coming = column + AHEAD * (A * B)
                place, mask = strip(
                    source, keys, values, coming, state_k, state_v, is_held, K, V, STATE_UNIT, AXIS
                )
                ahead = tl.load(place, mask=mask, other=0.0)
            if not AHEAD:
                S = ahead
            own = 2 * H * K + head * V + column + values
            v, v_window = taken(
                x_ptr, weight_ptr, bias_ptr, conv, conv_d, conv_l, L, own, has_value, is_valid,
                CONV, TAPS, SILU,
            )  # fmt: skip
            S = S.to(tl.float32)
            S, o = step(S, q, k, v, a, b, rate, bias, scale, L2NORM, True, True, True, NEGATIVE)
            place, mask = strip(
                goal, keys, values, column, state_k, state_v, is_held & is_written, K, V, STATE_UNIT, AXIS
            )
            tl.store(place, S.to(state_ptr.dtype.element_ty), mask=mask)
            if MOVE:
                move(conv, conv_d, conv_l, L, own, has_value & is_valid, v_window, TAPS, OLDER)
            made = made + (tl.where(has_value & is_held, o, 0.0).to(o_ptr.dtype.element_ty),)
        o_at = o_ptr + (row * HV + head) * V
        rstd = 1.0
        if NORM:
            total = 0.0
            for s in tl.static_range(STRIPS):
                o = made[s].to(tl.float32)
                total += tl.sum(tl.sum(o * o, 1), 0)
            rstd = tl.rsqrt(total / V + eps)
        for s in tl.static_range(STRIPS):
            column = first + s * (A * B)
            vs, has_value = column + values, below(column, values, V)
            y = made[s]
            if NORM:
                y = y.to(tl.float32) * rstd
                if norm_weight_ptr is not None:
                    y = y * tl.load(norm_weight_ptr + vs, mask=has_value, other=0.0).to(tl.float32)
                if z_ptr is not None:
                    z = tl.load(z_ptr + row * z_b + head * z_h + vs, mask=has_value, other=0.0)
                    gate, _slope = gated(z.to(tl.float32), GATE)
                    y = y * gate
            tl.store(o_at + vs, y.to(o_ptr.dtype.element_ty), mask=has_value)
        head += 1
        source += state_h * STATE_UNIT
        goal += state_h * STATE_UNIT


@kernel
def finish_kernel(
    o_ptr, z_ptr, norm_weight_ptr, y_ptr, x_ptr, conv_ptr, conv_index_ptr,
    num_rows, inner, o_o, o_i, z_o, z_i, eps, blocks,
    x_b, conv_n, conv_d, conv_l, L, conv_index_n, conv_slots, lowest, channels,
    GATE: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, UNIT: tl.constexpr,
    TAPS: tl.constexpr, OLDER: tl.constexpr, BC: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The norm, and beside it the windows a token older."""
    if CHAINED:
        after_the_one_before()
    pid = tl.program_id(0)
    if pid < blocks:
        normed(
            o_ptr, z_ptr, norm_weight_ptr, y_ptr, pid, num_rows, inner, o_o, o_i, z_o, z_i, eps,
            GATE, D, BR, BD, UNIT,
        )  # fmt: skip
    else:
        strips = tl.cdiv(channels, BC)
        row = ((pid - blocks) // strips).to(tl.int64)
        own = (pid - blocks) % strips * BC + tl.arange(0, BC)
        slot, is_valid = slot_at(conv_index_ptr, row, conv_index_n, lowest, conv_slots)
        is_moved = (own < channels) & is_valid
        slot_ptr = conv_ptr + slot * conv_n
        window = ()
        at = slot_ptr + own.to(tl.int64) * conv_d + (L - (TAPS - 1)) * conv_l
        for j in tl.static_range(TAPS - 1):
            window = window + (tl.load(at + j * conv_l, mask=is_moved, other=0.0),)
        window = window + (tl.load(x_ptr + row * x_b + own, mask=is_moved, other=0.0).to(tl.float32),)
        move(slot_ptr, conv_d, conv_l, L, own, is_moved, window, TAPS, OLDER)
