# mypy: disable-error-code="assignment, var-annotated"
"""Replay: run a packet on a state that is only read, and on the history of accepted tokens since then.

It is `packet` with the history as further keys and values, and it appends the packet's u, k and G to the
history. `fold` empties the history.
Bytes of a verification per row at 16/32 heads of 128 x 128, fp32 state, bf16 history of P tokens: 2.1 MB of
state read, 12.5 KB for each token of history read or written; `decode` with 4 states kept moves 10.5 MB.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl

from gdn.backends.triton.launch import (
    CachedLaunch,
    Launch,
    PlanCache,
    compile_ahead,
    is_recording,
    kernel,
    machine,
    unit_of,
)
from gdn.backends.triton.launch.pdl import launch_dependents_then_wait, supports_pdl
from gdn.backends.triton.lib import column_mask, split_fp64
from gdn.backends.triton.serving.fold import PLACES, history_blocks
from gdn.backends.triton.serving.packet import (
    MANY,
    MAX_TOKENS,
    blocks,
    fits_32_bits,
    index_strides,
    levels,
    line_stride,
    num_programs,
    options,
    order_loads,
    precisions,
    row_extents,
    sample_num_states,
    state_extents,
    token_strides,
    warps,
)
from gdn.backends.triton.serving.packet_lib import (
    ROWS,
    column_pointer,
    fill_outputs,
    load_rows,
    load_slot,
    load_values,
    multiply_parts,
    row_pointers,
    solve_packet,
    spread_over_rows,
    strip_mask,
    tokens_of_rows,
)
from gdn.backends.triton.serving.packet_loads import (
    load_packet,
    load_strip,
    sum_gates,
    use_parts_here,
)
from gdn.backends.triton.serving.recurrent_lib import (
    divide,
    limit_tokens,
    locate_program,
    prefetch_columns,
    spoil_longer_row,
    token_range,
)
from gdn.backends.triton.serving.replay_channels import plan_channels_replay
from gdn.backends.triton.serving.replay_lib import load_past, run_strips, sum_rows
from gdn.backends.triton.serving.state_tiles import kernel_offsets, magic_numbers, pool_strides
from gdn.backends.triton.serving.structs import (
    Appended,
    ColumnScales,
    Gates,
    GateStrides,
    History,
    Packet,
    RowSums,
    Slots,
    Strip,
    group_constants,
)
from gdn.problem import RESET, HistoryProblem, ReplayProblem

# compute capability, K, V -> rows x value heads from which a history is faster than `decode`. Measured on an
# H100 with 32 heads: 0.73 (fp32) and 0.84 (bf16) of the time at 64 rows. One row takes twice the time (H200)
APPENDS_FROM = {(90, 128, 128): 64 * 32}


@kernel
def replay_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, u_history_ptr, k_history_ptr, G_history_ptr, cursor_ptr, g_ptr, beta_ptr,
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, cu_seqlens_ptr, read_index_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, q_k, k_k, v_v, o_v,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h, state_n, state_h, state_k, state_v,
    u_n, u_p, u_h, past_n, past_p, past_h, G_n, G_p, G_h, cursor_n, read_n,
    N, T, HV, HV_magic, HV_s, ratio, ratio_magic, ratio_s, slots, lowest, places, scale,
    K: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, PASTS: tl.constexpr, BV: tl.constexpr,
    BS: tl.constexpr, BT: tl.constexpr, STRIPS: tl.constexpr, STAGES: tl.constexpr, AXIS: tl.constexpr,
    DENSE: tl.constexpr, NEAR: tl.constexpr, LINE: tl.constexpr, UNIT: tl.constexpr, STATE_UNIT: tl.constexpr,
    PAST_UNIT: tl.constexpr, NORM: tl.constexpr, NEGATIVE: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr, FP32_PRECISION: tl.constexpr, RESET: tl.constexpr, PDL: tl.constexpr,
    LOADS_FIRST: tl.constexpr, HOLDS: tl.constexpr, FETCHED: tl.constexpr, IS_LONG: tl.constexpr,
    SUBSTITUTES: tl.constexpr, SHUFFLES: tl.constexpr, READS_PAST: tl.constexpr,
):  # fmt: skip
    # S_t = e^(G_t) S + sum_j e^(G_t - G_j) k_j u_j^T, then o and u of the packet as in `packet`.
    # Program (row, head, block): STRIPS strips of BV value columns; grid: (N, + 1 if packed) * HV * blocks; 1
    # or 2 warps. Up to PASTS blocks of scores with the history stay in registers over all strips.
    # PDL: it lets the next kernel start at once, and waits for the previous one before its first load.
    # Reads S once, the history and the packet; writes o, and appends u, k and G of the packet.
    # LOADS_FIRST, HOLDS, FETCHED, SUBSTITUTES, SHUFFLES: see `order_loads`. READS_PAST: all BP places of the
    # history are loaded with the state, before the cursor says how many are in use.
    C: tl.constexpr = group_constants(
        K=K, V=V, BP=BP, BV=BV, BS=BS, BT=BT, STRIPS=STRIPS, STAGES=STAGES, AXIS=AXIS, DENSE=DENSE, NEAR=NEAR,
        LINE=LINE, UNIT=UNIT, STATE_UNIT=STATE_UNIT, PAST_UNIT=PAST_UNIT, NORM=NORM, NEGATIVE=NEGATIVE,
        LEVELS=LEVELS, PRECISION=PRECISION, FP32_PRECISION=FP32_PRECISION, RESET=RESET, IS_SINGLE=False,
        FOLDS=False, SUBSTITUTES=SUBSTITUTES, SHUFFLES=SHUFFLES, READS_PAST=READS_PAST,
    )  # fmt: skip
    if PDL:
        launch_dependents_then_wait()
    n, head, block = locate_program(HV, HV_magic, HV_s, (V + BV * STRIPS - 1) // (BV * STRIPS))
    first, total = token_range(cu_seqlens_ptr, n, N, T)
    count = limit_tokens(cu_seqlens_ptr, total, 1 << LEVELS)
    slot, _ = load_slot(n, N, Slots(read_index_ptr, None, None, read_n, 0, 0, 0, 1, 1))
    key_head = divide(head, ratio_magic, ratio_s)
    o_ptr += (n * o_b + first * o_t + head * o_h) * UNIT
    q_ptr += (n * q_b + first * q_t + key_head * q_h) * UNIT
    k_ptr += (n * k_b + first * k_t + key_head * k_h) * UNIT
    v_ptr += (n * v_b + first * v_t + head * v_h) * UNIT
    # q, k and gates are loaded before the slot index arrives, so their latencies overlap
    PARTS: tl.constexpr = 2 * BT // ROWS
    packet = Packet(q_ptr, k_ptr, count, total, q_t, k_t, q_k, k_k)
    gates = Gates(g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr)
    gate_strides = GateStrides(g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h)
    now = tl.arange(0, BT)
    X, products, sums = load_packet(packet, gates, gate_strides, n, first, head, C, LOADS_FIRST)
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
        state_ptr += (slot * state_n + head.to(tl.int64) * state_h) * STATE_UNIT
        # all columns: `run_strips` takes a strip of them at a time
        v, state = Strip(v_ptr, None, None, v_t, v_v), Strip(state_ptr, None, None, state_k, state_v)
        if FETCHED > 0:
            LINES: tl.constexpr = K * state_ptr.dtype.element_ty.primitive_bitwidth // (8 * 128)
            prefetch_columns(state_ptr, block * (STRIPS * BV), state_v, FETCHED, LINES, STATE_UNIT)
        # the history of the slot starts at place 0; the packet is appended at `base`
        base = tl.load(cursor_ptr + slot * cursor_n).to(tl.int64)
        held, past = (), ()
        if HOLDS:
            # S is on its way from HBM while the packet's system is solved in registers
            held_ptr = column_pointer(state_ptr, block * BV, state_v * STATE_UNIT, AXIS == "v")
            S = load_strip(Strip(held_ptr, tl.arange(0, BV), V - block * BV, state_k, state_v), C)
            held = (S, load_values(v, block * BV, count, C))
        u_history_ptr += (slot * u_n + head * u_h) * PAST_UNIT
        k_history_ptr += (slot * past_n + key_head * past_h) * PAST_UNIT
        G_history_ptr += slot * G_n + head * G_h
        has_value = strip_mask(tl.arange(0, BV), V - block * BV, V, STRIPS)[None, :]
        if READS_PAST:
            every = History(u_history_ptr, k_history_ptr, G_history_ptr, places, u_p, past_p, G_p, None, None)
            past = load_past(every, block * BV, has_value, C)
        if LOADS_FIRST:
            if HOLDS or PARTS == 2:
                X = use_parts_here(X)
            XK, QQ = multiply_parts(X, packet, C)
        else:
            XK, QQ = products
        base = tl.minimum(tl.maximum(base, 0), places).to(tl.int32)
        history = History(u_history_ptr, k_history_ptr, G_history_ptr, base, u_p, past_p, G_p, None, None)
        G_base = tl.load(G_history_ptr + (base - 1).to(tl.int64) * G_p, mask=base > 0, other=0.0)
        if HOLDS and BT == 8 and BV == ROWS:
            # few tokens of few columns leave the registers for the first places of the history
            past = load_past(history, block * BV, has_value, C)
        if LOADS_FIRST:
            G, beta = sum_gates(sums, gates, count, C)
        else:
            G, beta = sums
        # with the packet's own sums the triangular system waits for no cursor
        high, low = split_fp64(spread_over_rows(G))
        beta_rows = spread_over_rows(spoil_longer_row(beta, count, total))
        W, row_scales = solve_packet(XK, QQ, high, low, beta_rows, scale, C)
        G_base = G_base.to(tl.float64)
        all_sums = RowSums(spread_over_rows(G), G_base)
        if not READS_PAST:
            all_sums = sum_rows(all_sums)
        tokens, is_k = tokens_of_rows(PARTS - 1, BT)
        new = base + tokens
        is_kept = is_k & (tokens < count) & (new < places)
        solved = (X, W, row_scales, beta_rows, all_sums, None)
        scales = ColumnScales(None, None, None, None, None)
        tensors = (v, state, scales, Strip(o_ptr, None, None, o_t, o_v), held, past)
        # with space left for a packet, a history mostly has at most PASTS * BP places
        if IS_LONG & (base > PASTS * BP):
            run_strips(solved, packet, history, tensors, Appended(new, is_kept), block, C, 0)
        else:
            run_strips(solved, packet, history, tensors, Appended(new, is_kept), block, C, PASTS)
        if block == 0:
            G_at = G_history_ptr + (base + now).to(tl.int64) * G_p
            is_new = (now < count) & (base + now < places)
            tl.store(G_at, (G + G_base).to(G_history_ptr.dtype.element_ty), mask=is_new)
            # only one of the value heads that share a key head stores k
            if key_head * ratio == head:
                for start in tl.static_range(0, K, BS):
                    ks = start + tl.arange(0, BS)
                    if BS < K:
                        k = load_rows(PARTS - 1, packet, ks, C)
                    else:
                        k = X[PARTS - 1]
                    tl.store(
                        row_pointers(k_history_ptr, new, ks, past_p, 1, PAST_UNIT, True, NEAR),
                        k.to(k_history_ptr.dtype.element_ty),
                        mask=is_kept[:, None] & column_mask(ks, K)[None, :],
                    )  # fmt: skip


_replays: PlanCache[CachedLaunch] = PlanCache()


def replay_decode(problem: ReplayProblem) -> CachedLaunch | None:
    """See `Backend`; writes the history and problem.out."""
    p, offsets = problem, kernel_offsets(problem.q.device, problem.cu_seqlens)
    cached = _replays.get(_replay_key(p), lambda: _first(p))
    cached(*(p if offsets is p.cu_seqlens else replace(p, cu_seqlens=offsets)).tensors())
    # offsets were copied, or the launch was recorded for another GPU: the launch cannot be repeated
    if offsets is not p.cu_seqlens or is_recording():
        return None
    return cached


def _first(p: ReplayProblem) -> CachedLaunch:
    one, tensors, gpu = _plan_replay(p), p.tensors(), machine(p.q.device)
    others = lambda: [(_plan_replay(p, num_states), tensors) for num_states in sample_num_states(gpu)]  # noqa: E731
    compile_ahead(p.q.device, one.binary_key(tensors), others)
    return CachedLaunch(one, p.q.device)


def _replay_key(p: ReplayProblem) -> Hashable:
    """Return everything that the launch depends on, except the addresses of tensors."""
    return (
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in p.tensors()), p.q.device,
        p.longest, p.scale, p.lower_bound, p.use_qk_l2norm_in_kernel, p.allow_neg_eigval, p.state_v_first,
        p.null_slot,
    )  # fmt: skip


def _plan_replay(p: ReplayProblem, num_states: int | None = None) -> Launch:
    """Plan a replay. `num_states`: rows times heads for which tiles are chosen, if not the problem's."""
    sizes, scalars, constants = describe_replay(p, (0, 0, 0), num_states)
    if p.is_per_channel:
        return plan_channels_replay(p, scalars, constants, num_states)
    # With more than 8 tokens and 16-bit states, the main path is for 16 places less, which most histories do
    # not exceed; longer ones take the path of IS_LONG, which is worth its registers
    shorter = MAX_TOKENS if sizes["BT"] == MAX_TOKENS and p.state.element_size() == 2 else 0
    held = history_blocks(p.places - shorter)
    constants |= {"PASTS": held, "IS_LONG": 0 < held * PLACES < p.places}
    loads = order_loads(sizes, p, constants["AXIS"])
    grid, rest = num_programs(p, sizes), options(sizes, p, False, loads["HOLDS"])
    constants |= loads
    # at B = 8 6.69 us for 7.53 (4 tokens, bf16, H200); with few columns at B = 1 4.73 for 4.18
    # In fp16, whose u meets scores in fp32, MMAs would add the places in another order: see
    # `multiplies_as_loaded`
    is_short = sizes["BT"] == 8 and p.places <= PLACES and p.q.dtype == torch.bfloat16
    constants["READS_PAST"] = loads["HOLDS"] and sizes["BV"] == MANY and is_short
    return Launch(replay_kernel, grid, scalars, constants, warps(sizes), options=rest)


def appends_history(p: HistoryProblem) -> bool:
    """See `Backend`."""
    if p.must_append or p.use_history is not None:
        return p.must_append or bool(p.use_history)
    if p.is_per_channel:
        # not measured
        return False
    gpu = machine(p.q.device)
    least = APPENDS_FROM.get((gpu.capability, p.K, p.V)) if gpu.kind == "cuda" else None
    return least is not None and least <= p.N * p.HV


def describe_replay(
    p: ReplayProblem | HistoryProblem, starts: Sequence[int], num_states: int | None
) -> tuple[dict[str, int], tuple[int | float, ...], dict[str, Any]]:
    """Return the sizes of tiles, the scalars and the constants that a launch on a history has.

    `starts`: offsets of q, k and v in the tensors that will be given. `num_states`: as for `blocks`.
    """
    axis, state_unit, (n, _, h, k, v) = pool_strides(p.state, p.K, p.V, p.state_v_first)
    is_packed = p.cu_seqlens is not None
    rows = [s for x in (p.q, p.k, p.v, p.out) for s in token_strides(x, is_packed)]
    gates = [
        token_strides(x, is_packed) for x in (p.g if p.a is None else p.a, p.beta if p.b is None else p.b)
    ]
    kept, sums = (*p.history_u.stride()[:3], *p.history_k.stride()[:3]), p.history_G.stride()
    unit, past_unit, gpu = unit_of(*rows, *starts), unit_of(*kept), machine(p.q.device)
    if p.is_per_channel:
        # rows of g are read as those of k, in units; their channels are contiguous
        unit, past_unit = unit_of(unit, *gates[0]), unit_of(past_unit, *sums[:3])
        gates[0], sums = tuple(s // unit for s in gates[0]), tuple(s // past_unit for s in sums[:3])
    num_states = p.N * p.HV if num_states is None else num_states
    sizes = blocks(p.K, p.V, p.q.element_size(), p.longest, num_states, gpu, p.state.element_size(), False)
    tails = (p.q.stride(3), p.k.stride(3), p.v.stride(3), p.out.stride(3))
    scalars = (
        *(s // unit for s in rows), *tails, *(s for x in gates for s in x), *index_strides(p.A_log, 1),
        *index_strides(p.dt_bias, 1), n, h, k, v, *(s // past_unit for s in kept), *sums,
        *index_strides(p.cursor, 1), *index_strides(p.read_index, 1), p.N, p.q.shape[1], p.HV,
        *magic_numbers(p.HV),
        p.HV // p.H, *magic_numbers(p.HV // p.H), p.state.shape[0], 0 if p.null_slot is None else 1, p.places,
        p.scale,
    )  # fmt: skip
    constants = {
        "K": p.K, "V": p.V, "BP": PLACES, **sizes, "AXIS": axis, "DENSE": tails == (1, 1, 1, 1),
        "NEAR": fits_32_bits(
            *row_extents(rows, tails, p), *state_extents((n, 0, h, k, v), state_unit, p),
            *(p.places * s for s in (kept[1], kept[4])),
        ),
        "LINE": line_stride(axis, (n, 0, h, k, v), state_unit, p), "UNIT": unit, "STATE_UNIT": state_unit,
        "PAST_UNIT": past_unit, "NORM": p.use_qk_l2norm_in_kernel,
        "NEGATIVE": p.allow_neg_eigval, "LEVELS": levels(p.longest),
        **precisions(p.q.dtype == torch.float32, gpu), "RESET": RESET, "PDL": supports_pdl(gpu),
    }  # fmt: skip
    return sizes, scalars, constants
