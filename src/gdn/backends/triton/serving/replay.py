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
    jit,
    kernel,
    machine,
    unit_of,
)
from gdn.backends.triton.launch.pdl import launch_dependents_then_wait, supports_pdl
from gdn.backends.triton.lib import column_mask, decay, split_fp64
from gdn.backends.triton.serving.fold import PLACES, history_blocks
from gdn.backends.triton.serving.history_lib import (
    apply_column_scales,
    compute_token,
    fold_strip,
    load_history_G,
    load_history_u,
    ring_places,
)
from gdn.backends.triton.serving.packet import (
    MAX_TOKENS,
    blocks,
    fits_32_bits,
    index_strides,
    levels,
    line_stride,
    num_programs,
    options,
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
    compute_outputs,
    dot_mixed,
    load_gates,
    load_operands,
    load_rows,
    load_slot,
    multiply_state,
    row_pointers,
    scale_rows,
    solve_packet,
    spread_over_rows,
    store_outputs,
    store_zeros,
    strip_mask,
    tokens_of_rows,
)
from gdn.backends.triton.serving.recurrent_lib import divide, locate_program, token_range
from gdn.backends.triton.serving.replay_channels import plan_channels_replay
from gdn.backends.triton.serving.state_tiles import kernel_offsets, magic_numbers, pool_strides
from gdn.backends.triton.serving.structs import (
    Appended,
    ColumnScales,
    Gates,
    GateStrides,
    History,
    Packet,
    Slots,
    Strip,
    Sums,
    group_constants,
)
from gdn.problem import RESET, HistoryProblem, ReplayProblem

# compute capability, K, V -> rows x value heads from which a history is faster than `decode`. Measured on an
# H100 with 32 heads: 0.73 (fp32) and 0.84 (bf16) of the time at 64 rows. One row takes twice the time (H200)
APPENDS_FROM = {(90, 128, 128): 64 * 32}


@jit
def score_history(X, row_scales, packet, history, start, sums, C: tl.constexpr):
    """Return scores of rows and BP places of a history, by parts: <row, k_j> e^(G - G_j), scaled [16, BP]."""
    PARTS: tl.constexpr = 2 * C.BT // ROWS
    old = start + tl.arange(0, C.BP)
    places = ring_places(old, history)
    last = tl.zeros([ROWS, C.BP], tl.float32)
    first = last
    for key in tl.range(0, C.K, C.BS):
        ks = key + tl.arange(0, C.BS)
        past_k = tl.load(
            row_pointers(history.k_ptr, places, ks, history.k_p, 1, C.PAST_UNIT, True, C.NEAR),
            mask=(old < history.count)[:, None] & column_mask(ks, C.K)[None, :], other=0.0,
        )  # fmt: skip
        for part in tl.static_range(PARTS):
            if C.BS < C.K:
                x = load_rows(part, packet, ks, C)
            else:
                x = X[part]
            if part == PARTS - 1:
                last = dot_mixed(x, tl.trans(past_k), last, C.PRECISION)
            else:
                first = dot_mixed(x, tl.trans(past_k), first, C.PRECISION)
    old_high, old_low = load_history_G(history, old)
    # decays up to each row of the packet, from hi + lo sums
    D = decay(old_high[None, :], old_low[None, :], sums.high[:, None], sums.low[:, None])
    if PARTS == 2:
        return first * D * row_scales[0][:, None], last * D * row_scales[1][:, None]
    else:
        return (last * D * row_scales[0][:, None],)


@jit
def add_history(XS, scores, u, PRECISION: tl.constexpr):
    """Add the history's part, scores times u, to the products of rows and state, by parts."""
    outputs = ()
    for part in tl.static_range(len(XS)):
        outputs = outputs + (dot_mixed(scores[part], u, XS[part], PRECISION),)
    return outputs


@jit
def run_strips(solved, packet, history, tensors, new, block, C: tl.constexpr, PASTS: tl.constexpr):
    """Compute o and u for all columns of a program, with PASTS blocks of a history, or all if PASTS is 0."""
    PARTS: tl.constexpr = 2 * C.BT // ROWS
    X, W, row_scales, beta, sums, end = solved
    v, state, scales, o = tensors
    # scores with the history stay in registers over all strips of columns
    scores = ()
    for held in tl.static_range(PASTS):
        scores = scores + (score_history(X, row_scales, packet, history, held * C.BP, sums, C),)
    decays = tl.exp(sums.high)
    tokens, is_k = tokens_of_rows(PARTS - 1, C.BT)
    # the pipeliner keeps STAGES - 1 strips of S in flight from HBM
    for strip in tl.range(0, C.STRIPS, num_stages=C.STAGES):
        column, vs = (block * C.STRIPS + strip) * C.BV, tl.arange(0, C.BV)
        left = C.V - column
        has_value = strip_mask(vs, left, C.V, C.STRIPS)[None, :]
        v_ptr = column_pointer(v.ptr, column, v.outer, C.DENSE)
        v_at = row_pointers(v_ptr, tokens, vs, v.inner, v.outer, C.UNIT, C.DENSE, C.NEAR)
        values = tl.load(v_at, mask=(is_k & (tokens < packet.count))[:, None] & has_value, other=0.0)
        strip_ptr = column_pointer(state.ptr, column, state.outer * C.STATE_UNIT, C.AXIS == "v")
        XS = multiply_state(X, packet, Strip(strip_ptr, vs, left, state.inner, state.outer), C)
        XS = scale_rows(XS, row_scales, decays)
        if scales.ptr is not None:
            XS = apply_column_scales(XS, scales, column, vs, has_value)
        past_u_ptr = history.u_ptr + column
        for held in tl.static_range(PASTS):
            u_old = load_history_u(history, past_u_ptr, held * C.BP, vs, has_value, C)
            XS = add_history(XS, scores[held], u_old, C.PRECISION)
        # a long history: its scores are recomputed for each strip, because they do not fit into registers
        if PASTS == 0:
            for start in range(0, history.count, C.BP):
                score = score_history(X, row_scales, packet, history, start, sums, C)
                u_old = load_history_u(history, past_u_ptr, start, vs, has_value, C)
                XS = add_history(XS, score, u_old, C.PRECISION)
        if C.IS_SINGLE:
            outputs = compute_token(XS, values, beta, W)
        else:
            outputs = compute_outputs(XS, values, beta, W, C.BT, C.FP32_PRECISION)
        o_ptr = column_pointer(o.ptr, column, o.outer, C.DENSE)
        store_outputs(Strip(o_ptr, vs, left, o.inner, o.outer), outputs, packet.count, C)
        u_at = row_pointers(past_u_ptr, new.places, vs, history.u_p, 1, C.PAST_UNIT, True, C.NEAR)
        u = outputs[PARTS - 1].to(history.u_ptr.dtype.element_ty)
        # u of places beyond the history is dropped
        tl.store(u_at, u, mask=new.is_kept[:, None] & has_value)
        if C.FOLDS:
            # S of this strip is still in L2: it is loaded again, in the layout of its store
            columns = Strip(strip_ptr, vs, left, state.inner, state.outer)
            fold_strip(columns, scales, history, end, column, C)


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
    IS_LONG: tl.constexpr,
):  # fmt: skip
    # S_t = e^(G_t) S + sum_j e^(G_t - G_j) k_j u_j^T, then o and u of the packet as in `packet`.
    # Program (row, head, block): STRIPS strips of BV value columns; grid: (N, + 1 if packed) * HV * blocks; 1
    # or 2 warps. Up to PASTS blocks of scores with the history stay in registers over all strips.
    # PDL: it lets the next kernel start at once, and waits for the previous one before its first load.
    # Reads S once, the history and the packet; writes o, and appends u, k and G of the packet.
    C: tl.constexpr = group_constants(
        K=K, V=V, BP=BP, BV=BV, BS=BS, BT=BT, STRIPS=STRIPS, STAGES=STAGES, AXIS=AXIS, DENSE=DENSE, NEAR=NEAR,
        LINE=LINE, UNIT=UNIT, STATE_UNIT=STATE_UNIT, PAST_UNIT=PAST_UNIT, NORM=NORM, NEGATIVE=NEGATIVE,
        LEVELS=LEVELS, PRECISION=PRECISION, FP32_PRECISION=FP32_PRECISION, RESET=RESET, IS_SINGLE=False,
        FOLDS=False,
    )  # fmt: skip
    if PDL:
        launch_dependents_then_wait()
    n, head, block = locate_program(HV, HV_magic, HV_s, (V + BV * STRIPS - 1) // (BV * STRIPS))
    first, count = token_range(cu_seqlens_ptr, n, N, T)
    slot, _ = load_slot(n, N, Slots(read_index_ptr, None, None, read_n, 0, 0, 0, 1, 1))
    key_head = divide(head, ratio_magic, ratio_s)
    o_ptr += (n * o_b + first * o_t + head * o_h) * UNIT
    q_ptr += (n * q_b + first * q_t + key_head * q_h) * UNIT
    k_ptr += (n * k_b + first * k_t + key_head * k_h) * UNIT
    v_ptr += (n * v_b + first * v_t + head * v_h) * UNIT
    # q, k and gates are loaded before the slot index arrives, so their latencies overlap
    PARTS: tl.constexpr = 2 * BT // ROWS
    packet = Packet(q_ptr, k_ptr, count, q_t, k_t, q_k, k_k)
    X, XK, QQ = load_operands(packet, C)
    now = tl.arange(0, BT)
    gates = Gates(g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr)
    gate_strides = GateStrides(g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h)
    G, beta = load_gates(gates, gate_strides, n, first, head, count, C)
    # not an early return: exporters look for the stores of a kernel, and do not follow jumps
    if (slot < lowest) | (slot >= slots) | (n >= N):
        store_zeros(o_ptr, count, block * STRIPS, o_t, o_v, C)
    else:
        # the history of the slot starts at place 0; the packet is appended at `base`
        base = tl.load(cursor_ptr + slot * cursor_n).to(tl.int64)
        base = tl.minimum(tl.maximum(base, 0), places).to(tl.int32)
        u_history_ptr += (slot * u_n + head * u_h) * PAST_UNIT
        k_history_ptr += (slot * past_n + key_head * past_h) * PAST_UNIT
        G_history_ptr += slot * G_n + head * G_h
        G += tl.load(G_history_ptr + (base - 1).to(tl.int64) * G_p, mask=base > 0, other=0.0).to(tl.float64)
        high, low = split_fp64(spread_over_rows(G))
        beta_rows = spread_over_rows(beta)
        W, row_scales = solve_packet(XK, QQ, high, low, beta_rows, scale, C)
        tokens, is_k = tokens_of_rows(PARTS - 1, BT)
        new = base + tokens
        is_kept = is_k & (tokens < count) & (new < places)
        state_ptr += (slot * state_n + head.to(tl.int64) * state_h) * STATE_UNIT
        history = History(u_history_ptr, k_history_ptr, G_history_ptr, base, u_p, past_p, G_p, None, None)
        solved = (X, W, row_scales, beta_rows, Sums(high, low), None)
        # all columns: `run_strips` takes a strip of them at a time
        v, state = Strip(v_ptr, None, None, v_t, v_v), Strip(state_ptr, None, None, state_k, state_v)
        tensors = (v, state, ColumnScales(None, None, None, None, None), Strip(o_ptr, None, None, o_t, o_v))
        # with space left for a packet, a history mostly has at most PASTS * BP places
        if IS_LONG & (base > PASTS * BP):
            run_strips(solved, packet, history, tensors, Appended(new, is_kept), block, C, 0)
        else:
            run_strips(solved, packet, history, tensors, Appended(new, is_kept), block, C, PASTS)
        if block == 0:
            G_at = G_history_ptr + (base + now).to(tl.int64) * G_p
            is_new = (now < count) & (base + now < places)
            tl.store(G_at, G.to(G_history_ptr.dtype.element_ty), mask=is_new)
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
    grid, rest = num_programs(p, sizes), options(sizes, p, False)
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
