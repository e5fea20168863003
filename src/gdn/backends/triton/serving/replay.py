# mypy: disable-error-code="assignment, var-annotated"
"""Replay: run a packet on a state that is only read, and on the history of accepted tokens since then.

It is `packet` with the history as further keys and values, and it appends the packet's u, k and G to the
history. `fold` empties the history.
Bytes of a verification per row at 16/32 heads of 128 x 128, fp32 state, bf16 history of P tokens: 2.1 MB of
state read, 12.5 KB for each token of history read or written; `decode` with 4 states kept moves 10.5 MB.
"""

from collections.abc import Hashable
from dataclasses import replace

import torch
import triton
import triton.language as tl

from gdn.backends.triton import launch as launching
from gdn.backends.triton.launch import Launch, Plans, compile_ahead, kernel, machine, unit_of
from gdn.backends.triton.launch.pdl import launch_dependents_then_wait, supports_pdl
from gdn.backends.triton.lib import decay, exist, split
from gdn.backends.triton.serving.decode import CachedLaunch
from gdn.backends.triton.serving.fold import PLACES, past, pasts, u_of
from gdn.backends.triton.serving.packet import (
    MOST,
    are_near,
    blocks,
    fills,
    levels,
    line_of,
    options,
    precisions,
    reach_of_rows,
    reach_of_state,
    strides_of,
    token_strides,
    warps,
)
from gdn.backends.triton.serving.packet_lib import (
    ROWS,
    among,
    answered,
    by_rows,
    clear,
    exist_in,
    from_column,
    gates_of,
    mixed,
    operand,
    operands,
    row,
    rows_at,
    scaled,
    seen_of,
    slot_of,
    store_outputs,
)
from gdn.backends.triton.serving.recurrent import divide, inverse, offsets_on, owner, pool_of, span
from gdn.problem import RESET, ReplayProblem


@triton.jit
def gets_of(
    X, rates, q_ptr, k_ptr, k_history_ptr, G_history_ptr, start, base, count, high, low, q_t, k_t, q_k, k_k,
    past_p, G_p, K: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, UNIT: tl.constexpr,
    PAST_UNIT: tl.constexpr, DENSE: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return scores of rows and BP places of a history, by parts: <row, k_j> e^(G - G_j), scaled [16, BP]."""
    PARTS: tl.constexpr = 2 * BT // ROWS
    old = start + tl.arange(0, BP)
    last = tl.zeros([ROWS, BP], tl.float32)
    first = last
    for key in tl.range(0, K, BS):
        ks = key + tl.arange(0, BS)
        past_k = tl.load(
            rows_at(k_history_ptr, old, ks, past_p, 1, PAST_UNIT, True, NEAR),
            mask=(old < base)[:, None] & exist(ks, K)[None, :], other=0.0,
        )  # fmt: skip
        for part in tl.static_range(PARTS):
            if BS < K:
                x = operand(part, q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K, BT, UNIT, DENSE, NEAR)
            else:
                x = X[part]
            if part == PARTS - 1:
                last = mixed(x, tl.trans(past_k), last, PRECISION)
            else:
                first = mixed(x, tl.trans(past_k), first, PRECISION)
    old_high, old_low = past(G_history_ptr, old, base, G_p)
    # decays up to each row of the packet, from hi + lo sums
    D = decay(old_high[None, :], old_low[None, :], high[:, None], low[:, None])
    if PARTS == 2:
        return first * D * rates[0][:, None], last * D * rates[1][:, None]
    else:
        return (last * D * rates[0][:, None],)


@triton.jit
def with_past(seen, gets, u, PRECISION: tl.constexpr):
    """Add the history's part, scores times u, to the products of rows and state, by parts."""
    found = ()
    for part in tl.static_range(len(seen)):
        found = found + (mixed(gets[part], u, seen[part], PRECISION),)
    return found


@triton.jit
def strips(
    X, W, rates, high, low, beta, count, base, new, is_kept, q_ptr, k_ptr, v_ptr, state_ptr, u_history_ptr,
    k_history_ptr, G_history_ptr, o_ptr, block, q_t, k_t, v_t, o_t, q_k, k_k, v_v, o_v, state_k, state_v,
    u_p, past_p, G_p,
    K: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, PASTS: tl.constexpr, BV: tl.constexpr,
    BS: tl.constexpr, BT: tl.constexpr, STRIPS: tl.constexpr, STAGES: tl.constexpr, AXIS: tl.constexpr,
    DENSE: tl.constexpr, NEAR: tl.constexpr, LINE: tl.constexpr, UNIT: tl.constexpr, STATE_UNIT: tl.constexpr,
    PAST_UNIT: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Compute o and u for all columns of a program, with PASTS blocks of a history, or all if PASTS is 0."""
    PARTS: tl.constexpr = 2 * BT // ROWS
    # scores with the history stay in registers over all strips of columns
    gets = ()
    for held in tl.static_range(PASTS):
        gets = gets + (
            gets_of(
                X, rates, q_ptr, k_ptr, k_history_ptr, G_history_ptr, held * BP, base, count, high, low, q_t,
                k_t, q_k, k_k, past_p, G_p, K, BS, BT, BP, UNIT, PAST_UNIT, DENSE, NEAR, PRECISION,
            ),
        )  # fmt: skip
    grown = tl.exp(high)
    tokens, is_k = row(PARTS - 1, BT)
    # the pipeliner keeps STAGES - 1 strips of S in flight from HBM
    for strip in tl.range(0, STRIPS, num_stages=STAGES):
        column, vs = (block * STRIPS + strip) * BV, tl.arange(0, BV)
        left = V - column
        has_value = exist_in(vs, left, V, STRIPS)[None, :]
        v_at = rows_at(from_column(v_ptr, column, v_v, DENSE), tokens, vs, v_t, v_v, UNIT, DENSE, NEAR)
        v = tl.load(v_at, mask=(is_k & (tokens < count))[:, None] & has_value, other=0.0)
        strip_ptr = from_column(state_ptr, column, state_v * STATE_UNIT, AXIS == "v")
        seen = seen_of(
            X, q_ptr, k_ptr, strip_ptr, vs, left, count, q_t, k_t, q_k, k_k, state_k, state_v, K, V, BS, BT,
            STRIPS, STAGES, LINE, UNIT, STATE_UNIT, AXIS, DENSE, NEAR, PRECISION,
        )  # fmt: skip
        seen = scaled(seen, rates, grown)
        past_u_ptr = u_history_ptr + column
        for held in tl.static_range(PASTS):
            u_old = u_of(past_u_ptr, held * BP, base, vs, has_value, u_p, BP, PAST_UNIT, NEAR)
            seen = with_past(seen, gets[held], u_old, PRECISION)
        # a long history: its scores are recomputed for each strip, because they do not fit into registers
        if PASTS == 0:
            for start in range(0, base, BP):
                got = gets_of(
                    X, rates, q_ptr, k_ptr, k_history_ptr, G_history_ptr, start, base, count, high, low, q_t,
                    k_t, q_k, k_k, past_p, G_p, K, BS, BT, BP, UNIT, PAST_UNIT, DENSE, NEAR, PRECISION,
                )  # fmt: skip
                u_old = u_of(past_u_ptr, start, base, vs, has_value, u_p, BP, PAST_UNIT, NEAR)
                seen = with_past(seen, got, u_old, PRECISION)
        found = answered(seen, v, beta, W, BT, FINE)
        o_strip_ptr = from_column(o_ptr, column, o_v, DENSE)
        store_outputs(o_strip_ptr, found, vs, left, count, o_t, o_v, V, BT, STRIPS, UNIT, DENSE, NEAR)
        u_at = rows_at(past_u_ptr, new, vs, u_p, 1, PAST_UNIT, True, NEAR)
        u = found[PARTS - 1].to(u_history_ptr.dtype.element_ty)
        # u of places beyond the history is dropped
        tl.store(u_at, u, mask=is_kept[:, None] & has_value)


@kernel
def replay_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, u_history_ptr, k_history_ptr, G_history_ptr, cursor_ptr, g_ptr, beta_ptr,
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, cu_seqlens_ptr, read_index_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, q_k, k_k, v_v, o_v,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h, state_n, state_h, state_k, state_v,
    u_n, u_p, u_h, past_n, past_p, past_h, G_n, G_p, G_h, cursor_n, read_n,
    N, T, HV, HV_inverse, HV_s, ratio, ratio_inverse, ratio_s, slots, lowest, places, scale,
    K: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, PASTS: tl.constexpr, BV: tl.constexpr,
    BS: tl.constexpr, BT: tl.constexpr, STRIPS: tl.constexpr, STAGES: tl.constexpr, AXIS: tl.constexpr,
    DENSE: tl.constexpr, NEAR: tl.constexpr, LINE: tl.constexpr, UNIT: tl.constexpr, STATE_UNIT: tl.constexpr,
    PAST_UNIT: tl.constexpr, NORM: tl.constexpr, NEGATIVE: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr, FINE: tl.constexpr, RESET: tl.constexpr, PDL: tl.constexpr,
    IS_LONG: tl.constexpr,
):  # fmt: skip
    # S_t = e^(G_t) S + sum_j e^(G_t - G_j) k_j u_j^T, then o and u of the packet as in `packet`.
    # Program (row, head, block): STRIPS strips of BV value columns; grid: (N, + 1 if packed) * HV * blocks; 1
    # or 2 warps. Reads S, the history and the packet; writes o, and appends u, k and G of the packet.
    if PDL:
        launch_dependents_then_wait()
    n, head, block = owner(HV, HV_inverse, HV_s, (V + BV * STRIPS - 1) // (BV * STRIPS))
    first, count = span(cu_seqlens_ptr, n, N, T)
    slot, _ = slot_of(n, N, 1, 1, read_index_ptr, None, None, read_n, 0, 0, 0)
    key_head = divide(head, ratio_inverse, ratio_s)
    o_ptr += (n * o_b + first * o_t + head * o_h) * UNIT
    q_ptr += (n * q_b + first * q_t + key_head * q_h) * UNIT
    k_ptr += (n * k_b + first * k_t + key_head * k_h) * UNIT
    v_ptr += (n * v_b + first * v_t + head * v_h) * UNIT
    # q, k and gates are loaded before the slot index arrives, so their latencies overlap
    PARTS: tl.constexpr = 2 * BT // ROWS
    X, XK, QQ = operands(q_ptr, k_ptr, count, q_t, k_t, q_k, k_k, K, BS, BT, UNIT, DENSE, NEAR, PRECISION)
    now = tl.arange(0, BT)
    G, beta = gates_of(
        g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, n, first, head, count, g_b, g_t, g_h, beta_b,
        beta_t, beta_h, A_log_h, dt_bias_h, BT, NEGATIVE, RESET,
    )  # fmt: skip
    # not an early return: exporters look for the stores of a kernel, and do not follow jumps
    if (slot < lowest) | (slot >= slots) | (n >= N):
        clear(o_ptr, count, block * STRIPS, o_t, o_v, V, BT, BV, STRIPS, UNIT, DENSE)
    else:
        # the history of the slot starts at place 0; the packet is appended at `base`
        base = tl.load(cursor_ptr + slot * cursor_n).to(tl.int64)
        base = tl.minimum(tl.maximum(base, 0), places).to(tl.int32)
        u_history_ptr += (slot * u_n + head * u_h) * PAST_UNIT
        k_history_ptr += (slot * past_n + key_head * past_h) * PAST_UNIT
        G_history_ptr += slot * G_n + head * G_h
        G += tl.load(G_history_ptr + (base - 1).to(tl.int64) * G_p, mask=base > 0, other=0.0).to(tl.float64)
        high, low = split(by_rows(G))
        strength = by_rows(beta)
        W, rates = among(XK, QQ, high, low, strength, scale, BT, LEVELS, NORM, FINE)
        tokens, is_k = row(PARTS - 1, BT)
        new = base + tokens
        is_kept = is_k & (tokens < count) & (new < places)
        state_ptr += (slot * state_n + head.to(tl.int64) * state_h) * STATE_UNIT
        # with space left for a packet, a history mostly has at most PASTS * BP places
        if IS_LONG & (base > PASTS * BP):
            strips(
                X, W, rates, high, low, strength, count, base, new, is_kept, q_ptr, k_ptr, v_ptr, state_ptr,
                u_history_ptr, k_history_ptr, G_history_ptr, o_ptr, block, q_t, k_t, v_t, o_t, q_k, k_k, v_v,
                o_v, state_k, state_v, u_p, past_p, G_p, K, V, BP, 0, BV, BS, BT, STRIPS, STAGES, AXIS,
                DENSE, NEAR, LINE, UNIT, STATE_UNIT, PAST_UNIT, PRECISION, FINE,
            )  # fmt: skip
        else:
            strips(
                X, W, rates, high, low, strength, count, base, new, is_kept, q_ptr, k_ptr, v_ptr, state_ptr,
                u_history_ptr, k_history_ptr, G_history_ptr, o_ptr, block, q_t, k_t, v_t, o_t, q_k, k_k, v_v,
                o_v, state_k, state_v, u_p, past_p, G_p, K, V, BP, PASTS, BV, BS, BT, STRIPS, STAGES, AXIS,
                DENSE, NEAR, LINE, UNIT, STATE_UNIT, PAST_UNIT, PRECISION, FINE,
            )  # fmt: skip
        if block == 0:
            G_at = G_history_ptr + (base + now).to(tl.int64) * G_p
            is_new = (now < count) & (base + now < places)
            tl.store(G_at, G.to(G_history_ptr.dtype.element_ty), mask=is_new)
            # only one of the value heads that share a key head stores k
            if key_head * ratio == head:
                for start in tl.static_range(0, K, BS):
                    ks = start + tl.arange(0, BS)
                    if BS < K:
                        k = operand(
                            PARTS - 1, q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K, BT, UNIT, DENSE, NEAR
                        )
                    else:
                        k = X[PARTS - 1]
                    tl.store(
                        rows_at(k_history_ptr, new, ks, past_p, 1, PAST_UNIT, True, NEAR),
                        k.to(k_history_ptr.dtype.element_ty), mask=is_kept[:, None] & exist(ks, K)[None, :],
                    )  # fmt: skip


_replays: Plans[CachedLaunch] = Plans()


def replay_decode(problem: ReplayProblem) -> CachedLaunch | None:
    """See `Backend`; writes the history and problem.out."""
    p, offsets = problem, offsets_on(problem.q.device, problem.cu_seqlens)
    again = _replays.get(_replay_key(p), lambda: _first(p))
    again(*(p if offsets is p.cu_seqlens else replace(p, cu_seqlens=offsets)).arguments()[:17])
    # offsets were copied, or the launch was recorded for another GPU: the launch cannot be repeated
    if offsets is not p.cu_seqlens or launching.recorder is not None:
        return None
    return again


def _first(p: ReplayProblem) -> CachedLaunch:
    one, tensors, gpu = _plan_replay(p), p.arguments()[:17], machine(p.q.device)
    others = lambda: [(_plan_replay(p, pairs), tensors) for pairs in fills(gpu)]  # noqa: E731
    compile_ahead(p.q.device, one.binary(tensors), others)
    return CachedLaunch(one, p.q.device)


def _replay_key(p: ReplayProblem) -> Hashable:
    """Return everything that the launch depends on, except the addresses of tensors."""
    return (
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in p.arguments()[:17]), p.q.device,
        p.longest, p.scale, p.use_qk_l2norm_in_kernel, p.allow_neg_eigval, p.state_v_first, p.null_slot,
    )  # fmt: skip


def _plan_replay(p: ReplayProblem, pairs: int | None = None) -> Launch:
    """Plan a replay. `pairs`: rows times heads for which tiles are chosen, if not the problem's."""
    axis, state_unit, (n, _, h, k, v) = pool_of(p.state, p.K, p.V, p.state_v_first)
    is_packed = p.cu_seqlens is not None
    rows = [s for x in (p.q, p.k, p.v, p.out) for s in token_strides(x, is_packed)]
    gates = [
        token_strides(x, is_packed) for x in (p.g if p.a is None else p.a, p.beta if p.b is None else p.b)
    ]
    kept = (*p.history_u.stride()[:3], *p.history_k.stride()[:3])
    unit, past_unit, gpu = unit_of(*rows), unit_of(*kept), machine(p.q.device)
    pairs = p.N * p.HV if pairs is None else pairs
    sizes = blocks(p.K, p.V, p.q.element_size(), p.longest, pairs, gpu, p.state.element_size(), False)
    tails = (p.q.stride(3), p.k.stride(3), p.v.stride(3), p.out.stride(3))
    numbers = (
        *(s // unit for s in rows), *tails, *(s for x in gates for s in x), *strides_of(p.A_log, 1),
        *strides_of(p.dt_bias, 1), n, h, k, v, *(s // past_unit for s in kept), *p.history_G.stride(),
        *strides_of(p.cursor, 1), *strides_of(p.read_index, 1), p.N, p.q.shape[1], p.HV, *inverse(p.HV),
        p.HV // p.H, *inverse(p.HV // p.H), p.state.shape[0], 0 if p.null_slot is None else 1, p.places,
        p.scale,
    )  # fmt: skip
    # With more than 8 tokens and 16-bit states, the main path is for 16 places less, which most histories do
    # not exceed; longer ones take the path of IS_LONG, which is worth its registers
    shorter = MOST if sizes["BT"] == MOST and p.state.element_size() == 2 else 0
    held = pasts(p.places - shorter)
    constants = {
        "K": p.K, "V": p.V, "BP": PLACES, "PASTS": held, **sizes, "AXIS": axis,
        "DENSE": tails == (1, 1, 1, 1),
        "NEAR": are_near(
            *reach_of_rows(rows, tails, p), *reach_of_state((n, 0, h, k, v), state_unit, p),
            *(p.places * s for s in (kept[1], kept[4])),
        ),
        "LINE": line_of(axis, (n, 0, h, k, v), state_unit, p), "UNIT": unit, "STATE_UNIT": state_unit,
        "PAST_UNIT": past_unit, "NORM": p.use_qk_l2norm_in_kernel,
        "NEGATIVE": p.allow_neg_eigval, "LEVELS": levels(p.longest),
        **precisions(p.q.dtype == torch.float32, gpu), "RESET": RESET, "PDL": supports_pdl(gpu),
        "IS_LONG": 0 < held * PLACES < p.places,
    }  # fmt: skip
    programs = (p.N + int(is_packed)) * p.HV * triton.cdiv(p.V, sizes["BV"] * sizes["STRIPS"])
    return Launch(replay_kernel, programs, numbers, constants, warps(sizes), options=options(sizes, p, False))
