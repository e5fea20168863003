# mypy: disable-error-code="assignment, var-annotated"
"""Decode with a history of a decay per key channel: read the state, append u, k and g, fold where it is full.

The kernel is `replay_channels` on a ring of places; it also folds the rows whose history is full, in the same
launch.
Bytes of a token per row at 32 heads of 128 x 128, fp32 state, bf16 history: as in `replay_channels`; a fold,
once in places - room tokens, also writes the state.
"""

from typing import Any

import triton.language as tl

from gdn.backends.triton.launch import Launch, kernel, machine
from gdn.backends.triton.launch.pdl import launch_dependents_then_wait, pdl_options
from gdn.backends.triton.rule.channels import gate_rate
from gdn.backends.triton.serving.channels_lib import (
    channel_tiles,
    gate_scalars,
    run_channel_packet,
)
from gdn.backends.triton.serving.history_lib import fold_strip, load_cursor, ring_places, store_cursor
from gdn.backends.triton.serving.packet import num_programs
from gdn.backends.triton.serving.packet_lib import ROWS, column_pointer, fill_outputs, load_slot
from gdn.backends.triton.serving.recurrent_lib import divide, limit_tokens, locate_program, token_range
from gdn.backends.triton.serving.structs import (
    Appended,
    ChannelGates,
    ColumnScales,
    Gates,
    GateStrides,
    History,
    Packet,
    Slots,
    Strip,
    group_constants,
)
from gdn.problem import HistoryProblem

PLACES = 32  # of a history at a time: all of a ring
FOLDED = 32  # keys of a state in a program's registers: an MMA of 64 rows would be a WGMMA of other layouts


@kernel
def history_channels_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, u_history_ptr, k_history_ptr, g_history_ptr, cursor_ptr, g_ptr, beta_ptr,
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, column_scale_ptr, remainder_ptr, cu_seqlens_ptr, read_index_ptr,
    num_accepted_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, q_k, k_k, v_v, o_v,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h, state_n, state_h, state_k, state_v,
    u_n, u_p, u_h, past_n, past_p, past_h, G_n, G_p, G_h, cursor_n, read_n,
    N, T, HV, HV_magic, HV_s, ratio, ratio_magic, ratio_s, slots, lowest, places, scale,
    accepted_n, room, q_0, k_0, v_0, scale_n, scale_h, scale_v, low_n, low_h, low_k, low_v,
    g_k, dt_bias_k, lower_bound,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr,
    PAST: tl.constexpr, FOLDED: tl.constexpr, STRIPS: tl.constexpr, STAGES: tl.constexpr, AXIS: tl.constexpr,
    DENSE: tl.constexpr, NEAR: tl.constexpr, LINE: tl.constexpr, UNIT: tl.constexpr, STATE_UNIT: tl.constexpr,
    PAST_UNIT: tl.constexpr, NORM: tl.constexpr, NEGATIVE: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr, FP32_PRECISION: tl.constexpr, FOLD_PRECISION: tl.constexpr, RESET: tl.constexpr,
    PDL: tl.constexpr, IS_SHORT: tl.constexpr,
):  # fmt: skip
    # o, and u, k and g of some tokens, from a state and its history as in `channels_lib`. A full history is
    # folded into the state as in `fold_channels`, and the tokens begin the next one.
    # Program (row, head, block): STRIPS strips of BV value columns. Grid: (N, + 1 if packed) * HV * blocks; 4
    # warps. PDL: it lets the next kernel start at once, and waits before its first load.
    # Reads S, the history, the tokens; writes o, u, k and g of the tokens, the cursor, and a folded S.
    # No program writes what another one of its row may still read: the new places are not in use, and the
    # last program to finish stores the cursor.
    C: tl.constexpr = group_constants(
        K=K, V=V, BK=BK, BV=BV, BT=16, PAST=PAST, STRIPS=STRIPS, STAGES=STAGES, AXIS=AXIS, DENSE=DENSE,
        NEAR=NEAR, LINE=LINE, UNIT=UNIT, STATE_UNIT=STATE_UNIT, PAST_UNIT=PAST_UNIT, NORM=NORM,
        NEGATIVE=NEGATIVE, LEVELS=LEVELS, PRECISION=PRECISION, FP32_PRECISION=FP32_PRECISION, RESET=RESET,
        IS_SHORT=IS_SHORT, RAW=a_ptr is not None,
    )  # fmt: skip
    F: tl.constexpr = group_constants(
        K=K, V=V, BK=FOLDED, BP=BP, STRIPS=STRIPS, AXIS=AXIS, NEAR=NEAR, LINE=LINE, STATE_UNIT=STATE_UNIT,
        PAST_UNIT=PAST_UNIT, FOLD_PRECISION=FOLD_PRECISION,
    )  # fmt: skip
    if PDL:
        launch_dependents_then_wait()
    PROGRAMS: tl.constexpr = (V + BV * STRIPS - 1) // (BV * STRIPS)
    n, head, block = locate_program(HV, HV_magic, HV_s, PROGRAMS)
    first, total = token_range(cu_seqlens_ptr, n, N, T)
    count = limit_tokens(cu_seqlens_ptr, total, tl.minimum(room, 1 << LEVELS))
    slot, _entry = load_slot(n, N, Slots(read_index_ptr, None, None, read_n, 0, 0, 0, 1, 1))
    key_head = divide(head, ratio_magic, ratio_s)
    o_ptr += (n * o_b + first * o_t + head * o_h) * UNIT
    q_ptr += (n * q_b + first * q_t + key_head * q_h + q_0) * UNIT
    k_ptr += (n * k_b + first * k_t + key_head * k_h + k_0) * UNIT
    v_ptr += (n * v_b + first * v_t + head * v_h + v_0) * UNIT
    packet = Packet(q_ptr, k_ptr, count, total, q_t, k_t, q_k, k_k)
    given = Gates(g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr)
    strides = GateStrides(g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h)
    rate = gate_rate(A_log_ptr, head * A_log_h)
    gates = ChannelGates(given, strides, n, first, head, g_k, dt_bias_k, rate, lower_bound)
    is_idle = (slot < lowest) | (slot >= slots) | (n >= N)
    if cu_seqlens_ptr is not None:
        # no token of a row that has a slot and no more tokens than promised
        begin, filler = tl.where(is_idle, 0, count), tl.where(is_idle, 0.0, float("nan"))
        fill_outputs(o_ptr, begin, total, filler, block * STRIPS, o_t, o_v, C)
    # not an early return: exporters look for the stores of a kernel, and do not follow jumps
    if is_idle:
        if cu_seqlens_ptr is None:
            fill_outputs(o_ptr, 0, total, 0.0, block * STRIPS, o_t, o_v, C)
    else:
        cursor_ptr += slot * cursor_n
        accepted_ptr = num_accepted_ptr
        if num_accepted_ptr is not None:
            accepted_ptr += n * accepted_n
        ring, used = load_cursor(cursor_ptr, accepted_ptr, room, places)
        tokens = tl.arange(0, ROWS)
        state_ptr += (slot * state_n + head.to(tl.int64) * state_h) * STATE_UNIT
        u_history_ptr += (slot * u_n + head * u_h) * PAST_UNIT
        k_history_ptr += (slot * past_n + key_head * past_h) * PAST_UNIT
        g_history_ptr += (slot * G_n + head * G_h) * PAST_UNIT
        history = History(u_history_ptr, k_history_ptr, g_history_ptr, used, u_p, past_p, G_p, ring, places)
        new = Appended(ring_places(used + tokens, history), tokens < count)
        v, state = Strip(v_ptr, None, None, v_t, v_v), Strip(state_ptr, None, None, state_k, state_v)
        if column_scale_ptr is not None:
            column_scale_ptr += slot * scale_n + head.to(tl.int64) * scale_h
        if remainder_ptr is not None:
            remainder_ptr += slot * low_n + head.to(tl.int64) * low_h
        scales = ColumnScales(column_scale_ptr, scale_v, remainder_ptr, low_k, low_v)
        tensors = (v, state, scales, Strip(o_ptr, None, None, o_t, o_v))
        work = (block, key_head * ratio == head)
        run_channel_packet(packet, gates, scale, history, tensors, new, work, C)
        if (used + count > places - room) & (count > 0):
            past = History(
                u_history_ptr, k_history_ptr, g_history_ptr, used, u_p, past_p, G_p * PAST_UNIT, ring, places
            )
            # S of these strips is still in L2: it is loaded again, in the layout of its store
            for strip in range(STRIPS):
                column, vs = (block * STRIPS + strip) * BV, tl.arange(0, BV)
                strip_ptr = column_pointer(state_ptr, column, state_v * STATE_UNIT, AXIS == "v")
                fold_strip(Strip(strip_ptr, vs, V - column, state_k, state_v), scales, past, None, column, F)
            ring, used = ring_places(used, history), 0
        if num_accepted_ptr is None:
            used += count
        store_cursor(cursor_ptr, ring, used, HV * PROGRAMS)


def plan_channels_append(
    p: HistoryProblem, scalars: tuple[int | float, ...], constants: dict[str, Any], num_states: int | None
) -> Launch:
    """Build the launch that appends; scalars and constants: those of `history_kernel`, without its folds'."""
    tiles = channel_tiles(p, PLACES, num_states)
    tiles["FOLDED"] = min(FOLDED, tiles["BK"])
    return Launch(
        history_channels_kernel,
        num_programs(p, tiles),
        (*scalars, *gate_scalars(p)),
        {name: x for name, x in constants.items() if name not in ("BS", "BT")} | tiles,
        4,
        options=pdl_options(machine(p.q.device)),
    )
