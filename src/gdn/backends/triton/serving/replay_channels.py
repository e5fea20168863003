# mypy: disable-error-code="assignment, var-annotated"
"""Replay with a decay per key channel: run a packet on a state that is only read, and on its history.

`channels_lib` has the formulas and the work of a program. `fold_channels` empties the history.
Bytes of a verification per row at 32 heads of 128 x 128, fp32 state, bf16 history: 2.1 MB of state read, and
32 KB for each token of history read or written, half of it g.
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
from gdn.backends.triton.serving.packet import num_programs
from gdn.backends.triton.serving.packet_lib import ROWS, fill_outputs, load_slot
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
from gdn.problem import ReplayProblem

PLACES = 64  # of a history at a time


@kernel
def replay_channels_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, u_history_ptr, k_history_ptr, g_history_ptr, cursor_ptr, g_ptr, beta_ptr,
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, cu_seqlens_ptr, read_index_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, q_k, k_k, v_v, o_v,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h, state_n, state_h, state_k, state_v,
    u_n, u_p, u_h, past_n, past_p, past_h, G_n, G_p, G_h, cursor_n, read_n,
    N, T, HV, HV_magic, HV_s, ratio, ratio_magic, ratio_s, slots, lowest, places, scale,
    g_k, dt_bias_k, lower_bound,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PAST: tl.constexpr,
    STRIPS: tl.constexpr, STAGES: tl.constexpr, AXIS: tl.constexpr, DENSE: tl.constexpr, NEAR: tl.constexpr,
    LINE: tl.constexpr, UNIT: tl.constexpr, STATE_UNIT: tl.constexpr, PAST_UNIT: tl.constexpr,
    NORM: tl.constexpr, NEGATIVE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    FP32_PRECISION: tl.constexpr, RESET: tl.constexpr, PDL: tl.constexpr, IS_SHORT: tl.constexpr,
):  # fmt: skip
    # o, and u, k and g of a packet, from a state and its history; formulas in `channels_lib`.
    # Program (row, head, block): STRIPS strips of BV value columns. Grid: (N, + 1 if packed) * HV * blocks; 4
    # warps. PDL: it lets the next kernel start at once, and waits before its first load.
    # Rows of q and k [32, BK] stay in registers over all strips, as operands of MMAs; so do their products
    # with the history where it has at most PAST places (IS_SHORT): else a program has one strip.
    # Reads S once, and the packet, and k and g of the history, once per program: its first program of a
    # head leaves them in L2. Writes o, and appends u, k and g of the packet to the history.
    C: tl.constexpr = group_constants(
        K=K, V=V, BK=BK, BV=BV, BT=16, PAST=PAST, STRIPS=STRIPS, STAGES=STAGES, AXIS=AXIS, DENSE=DENSE,
        NEAR=NEAR, LINE=LINE, UNIT=UNIT, STATE_UNIT=STATE_UNIT, PAST_UNIT=PAST_UNIT, NORM=NORM,
        NEGATIVE=NEGATIVE, LEVELS=LEVELS, PRECISION=PRECISION, FP32_PRECISION=FP32_PRECISION, RESET=RESET,
        IS_SHORT=IS_SHORT, RAW=a_ptr is not None,
    )  # fmt: skip
    if PDL:
        launch_dependents_then_wait()
    n, head, block = locate_program(HV, HV_magic, HV_s, (V + BV * STRIPS - 1) // (BV * STRIPS))
    first, total = token_range(cu_seqlens_ptr, n, N, T)
    count = limit_tokens(cu_seqlens_ptr, total, 1 << LEVELS)
    slot, _entry = load_slot(n, N, Slots(read_index_ptr, None, None, read_n, 0, 0, 0, 1, 1))
    key_head = divide(head, ratio_magic, ratio_s)
    o_ptr += (n * o_b + first * o_t + head * o_h) * UNIT
    q_ptr += (n * q_b + first * q_t + key_head * q_h) * UNIT
    k_ptr += (n * k_b + first * k_t + key_head * k_h) * UNIT
    v_ptr += (n * v_b + first * v_t + head * v_h) * UNIT
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
        # the history of the slot starts at place 0; the packet is appended at `base`
        base = tl.load(cursor_ptr + slot * cursor_n).to(tl.int64)
        base = tl.minimum(tl.maximum(base, 0), places).to(tl.int32)
        tokens = tl.arange(0, ROWS)
        state_ptr += (slot * state_n + head.to(tl.int64) * state_h) * STATE_UNIT
        u_history_ptr += (slot * u_n + head * u_h) * PAST_UNIT
        k_history_ptr += (slot * past_n + key_head * past_h) * PAST_UNIT
        g_history_ptr += (slot * G_n + head * G_h) * PAST_UNIT
        history = History(u_history_ptr, k_history_ptr, g_history_ptr, base, u_p, past_p, G_p, None, None)
        new = Appended(base + tokens, (tokens < count) & (base + tokens < places))
        v, state = Strip(v_ptr, None, None, v_t, v_v), Strip(state_ptr, None, None, state_k, state_v)
        tensors = (v, state, ColumnScales(None, None, None, None, None), Strip(o_ptr, None, None, o_t, o_v))
        work = (block, key_head * ratio == head)
        run_channel_packet(packet, gates, scale, history, tensors, new, work, C)


def plan_channels_replay(
    p: ReplayProblem, scalars: tuple[int | float, ...], constants: dict[str, Any], num_states: int | None
) -> Launch:
    """Build a replay; scalars and constants: those of `replay_kernel`. num_states: as for `blocks`."""
    tiles = channel_tiles(p, PLACES, num_states)
    return Launch(
        replay_channels_kernel,
        num_programs(p, tiles),
        (*scalars, *gate_scalars(p)),
        {name: x for name, x in constants.items() if name not in ("BP", "BS", "BT")} | tiles,
        4,
        options=pdl_options(machine(p.q.device)),
    )
