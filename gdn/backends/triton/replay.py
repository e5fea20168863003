# mypy: disable-error-code="assignment, var-annotated"
"""Replay: a packet on a state that is only read and the history of what other tokens wrote to it.

    replay     `packet`, with the history as further keys and values; appends the packet's u, k and G
    fold       S <- e^(G_P) S + sum_(j < P) e^(G_P - G_j) k_j u_j^T of slots whose history is full
    cursor     the cursors move; after all folds, which look at them

Bytes of a verification per row at 16/32 heads of 128 x 128, fp32 state, bf16 history of P tokens: 2.1 MB of
state read, 12.5 KB for each token of history read or written; `decode` with 4 states kept moves 10.5 MB.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton import launch as launching
from gdn.backends.triton.chained import after_the_one_before, chained, chains
from gdn.backends.triton.decode import Again
from gdn.backends.triton.launch import Launch, Plans, ahead, kernel, machine, on, unit_of
from gdn.backends.triton.lib import decay, exist, split
from gdn.backends.triton.packet import MOST, UPDATED, blocks, fills, levels, precisions, token_strides, warps
from gdn.backends.triton.packet_lib import (
    among,
    answered,
    clear,
    exist_in,
    gates_of,
    mixed,
    operand,
    operands,
    row,
    rows_at,
    seen_of,
    slot_of,
    state_at,
    twice,
)
from gdn.backends.triton.recurrent import divide, inverse, offsets_on, owner, pool_of, span
from gdn.problem import RESET, KeepProblem, ReplayProblem

PLACES = 16  # of a history that a product takes
MOST_PASTS = 4  # times PLACES: what rows get of so many is held in registers


@triton.jit
def past(G_ptr, places, count, G_t):
    """G of a history's places, split in two; 0 past its end."""
    return split(tl.load(G_ptr + places.to(tl.int64) * G_t, mask=places < count, other=0.0).to(tl.float64))


@triton.jit
def gets_of(
    X, q_ptr, k_ptr, k_history_ptr, G_history_ptr, start, base, count, high, low, q_t, k_t, q_k, k_k, past_p,
    G_p, K: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, UNIT: tl.constexpr,
    PAST_UNIT: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What rows get of BP places of a history: <row, k_j> e^(G - G_j) [2 BT, BP]."""
    old = start + tl.arange(0, BP)
    got = tl.zeros([2 * BT, BP], tl.float32)
    for key in tl.range(0, K, BS):
        ks = key + tl.arange(0, BS)
        past_k = tl.load(
            rows_at(k_history_ptr, old, ks, past_p, 1, PAST_UNIT, True),
            mask=(old < base)[:, None] & exist(ks, K)[None, :], other=0.0,
        )  # fmt: skip
        if BS < K:
            X = operand(q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K, BT, UNIT, DENSE)
        got = mixed(X, tl.trans(past_k), got, PRECISION)
    old_high, old_low = past(G_history_ptr, old, base, G_p)
    return got * decay(old_high[None, :], old_low[None, :], high[:, None], low[:, None])


@triton.jit
def u_of(u_history_ptr, start, base, vs, has_value, u_p, BP: tl.constexpr, PAST_UNIT: tl.constexpr):
    """u of BP places [BP, vs]."""
    old = start + tl.arange(0, BP)
    place = rows_at(u_history_ptr, old, vs, u_p, 1, PAST_UNIT, True)
    return tl.load(place, mask=(old < base)[:, None] & has_value, other=0.0)


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
    DENSE: tl.constexpr, UNIT: tl.constexpr, STATE_UNIT: tl.constexpr, PAST_UNIT: tl.constexpr,
    NORM: tl.constexpr, NEGATIVE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    FINE: tl.constexpr, RESET: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        after_the_one_before()
    n, head, block = owner(HV, HV_inverse, HV_s, (V + BV * STRIPS - 1) // (BV * STRIPS))
    first, count = span(cu_seqlens_ptr, n, N, T)
    slot, _ = slot_of(n, N, 1, 1, read_index_ptr, None, None, read_n, 0, 0, 0)
    key_head = divide(head, ratio_inverse, ratio_s)
    o_ptr += (n * o_b + first * o_t + head * o_h) * UNIT
    q_ptr += (n * q_b + first * q_t + key_head * q_h) * UNIT
    k_ptr += (n * k_b + first * k_t + key_head * k_h) * UNIT
    v_ptr += (n * v_b + first * v_t + head * v_h) * UNIT
    if a_ptr is not None:
        g_ptr, beta_ptr = a_ptr, b_ptr
        A_log_ptr += head * A_log_h
    if g_ptr is not None:
        g_ptr += n * g_b + first * g_t + head * g_h
    if beta_ptr is not None:
        beta_ptr += n * beta_b + first * beta_t + head * beta_h
    if dt_bias_ptr is not None:
        dt_bias_ptr += head * dt_bias_h
    # not an early return: exporters look for the tensors that a kernel writes, and follow no jumps
    if (slot < lowest) | (slot >= slots) | (n >= N):
        clear(o_ptr, count, block * STRIPS, o_t, o_v, V, BT, BV, STRIPS, UNIT, DENSE)
    else:
        base = tl.load(cursor_ptr + slot * cursor_n).to(tl.int64)
        base = tl.minimum(tl.maximum(base, 0), places).to(tl.int32)
        u_history_ptr += (slot * u_n + head * u_h) * PAST_UNIT
        k_history_ptr += (slot * past_n + key_head * past_h) * PAST_UNIT
        G_history_ptr += slot * G_n + head * G_h
        _rows, tokens, is_k = row(BT)
        X, XX = operands(q_ptr, k_ptr, count, q_t, k_t, q_k, k_k, K, BS, BT, UNIT, DENSE, FINE)
        now = tl.arange(0, BT)
        G, beta = gates_of(
            g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, now, now < count, g_t, beta_t, a_ptr is not None,
            NEGATIVE, RESET,
        )  # fmt: skip
        G += tl.load(G_history_ptr + (base - 1).to(tl.int64) * G_p, mask=base > 0, other=0.0).to(tl.float64)
        high, low = split(twice(G))
        beta = twice(beta)
        P, A_inv, rate = among(XX, high, low, beta, scale, BT, LEVELS, NORM, FINE)
        grown = tl.exp(high)[:, None]
        gets = ()
        for held in tl.static_range(PASTS):
            gets = gets + (
                gets_of(
                    X, q_ptr, k_ptr, k_history_ptr, G_history_ptr, held * BP, base, count, high, low, q_t,
                    k_t, q_k, k_k, past_p, G_p, K, BS, BT, BP, UNIT, PAST_UNIT, DENSE, PRECISION,
                ),
            )  # fmt: skip
        new = base + tokens
        is_kept = is_k & (tokens < count) & (new < places)
        state_ptr += (slot * state_n + head.to(tl.int64) * state_h) * STATE_UNIT
        for strip in tl.range(0, STRIPS, num_stages=STAGES):
            vs = (block * STRIPS + strip) * BV + tl.arange(0, BV)
            has_value = exist_in(vs, V, STRIPS)[None, :]
            has_both = (tokens < count)[:, None] & has_value
            v = tl.load(
                rows_at(v_ptr, tokens, vs, v_t, v_v, UNIT, DENSE), mask=has_both & is_k[:, None], other=0.0
            )
            seen = seen_of(
                X, q_ptr, k_ptr, state_ptr, vs, count, q_t, k_t, q_k, k_k, state_k, state_v, K, V, BS, BT,
                STRIPS, STAGES, UNIT, STATE_UNIT, AXIS, DENSE, PRECISION,
            )  # fmt: skip
            seen *= grown
            for held in tl.static_range(PASTS):
                u_old = u_of(u_history_ptr, held * BP, base, vs, has_value, u_p, BP, PAST_UNIT)
                seen = mixed(gets[held], u_old, seen, PRECISION)
            if PASTS == 0:
                for start in range(0, base, BP):
                    got = gets_of(
                        X, q_ptr, k_ptr, k_history_ptr, G_history_ptr, start, base, count, high, low, q_t,
                        k_t, q_k, k_k, past_p, G_p, K, BS, BT, BP, UNIT, PAST_UNIT, DENSE, PRECISION,
                    )  # fmt: skip
                    u_old = u_of(u_history_ptr, start, base, vs, has_value, u_p, BP, PAST_UNIT)
                    seen = mixed(got, u_old, seen, PRECISION)
            o, u = answered(seen, v, beta, rate, P, A_inv, LEVELS, PRECISION, FINE)
            o_at = rows_at(o_ptr, tokens, vs, o_t, o_v, UNIT, DENSE)
            tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=has_both & (is_k == 0)[:, None])
            u_at = rows_at(u_history_ptr, new, vs, u_p, 1, PAST_UNIT, True)
            tl.store(u_at, u.to(u_history_ptr.dtype.element_ty), mask=is_kept[:, None] & has_value)
        if block == 0:
            G_at = G_history_ptr + (base + now).to(tl.int64) * G_p
            is_new = (now < count) & (base + now < places)
            tl.store(G_at, G.to(G_history_ptr.dtype.element_ty), mask=is_new)
            # one of the value heads that share a key head
            if key_head * ratio == head:
                for start in tl.range(0, K, BS):
                    ks = start + tl.arange(0, BS)
                    if BS < K:
                        X = operand(q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K, BT, UNIT, DENSE)
                    tl.store(
                        rows_at(k_history_ptr, new, ks, past_p, 1, PAST_UNIT, True),
                        X.to(k_history_ptr.dtype.element_ty), mask=is_kept[:, None] & exist(ks, K)[None, :],
                    )  # fmt: skip


@triton.jit
def ending(cursor, accepted, room, places):
    """Places in use once the accepted tokens are."""
    start = tl.minimum(tl.maximum(cursor.to(tl.int64), 0), places)
    return tl.minimum(start + tl.minimum(tl.maximum(accepted.to(tl.int64), 0), room), places)


@kernel
def fold_kernel(
    state_ptr, u_ptr, k_ptr, G_ptr, cursor_ptr, index_ptr, accepted_ptr,
    state_l, state_n, state_h, state_k, state_v, u_l, u_n, u_p, u_h, k_l, k_n, k_p, k_h, G_l, G_n, G_p, G_h,
    cursor_n, index_n, accepted_n, layers, HV, HV_inverse, HV_s, ratio_inverse, ratio_s, slots, lowest,
    places, room,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    AXIS: tl.constexpr, STATE_UNIT: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = (V + BV - 1) // BV
    layer_and_entry, head, block = owner(HV, HV_inverse, HV_s, COLUMNS * ((K + BK - 1) // BK))
    entry, layer = layer_and_entry // layers, layer_and_entry % layers
    slot = tl.load(index_ptr + entry * index_n).to(tl.int64)
    if (slot < lowest) | (slot >= slots):
        return
    end = ending(
        tl.load(cursor_ptr + slot * cursor_n), tl.load(accepted_ptr + entry * accepted_n), room, places
    )
    if (end == 0) | (end + room <= places):
        return
    key_head = divide(head, ratio_inverse, ratio_s)
    tokens = tl.arange(0, BT)
    ks, vs = block // COLUMNS * BK + tl.arange(0, BK), block % COLUMNS * BV + tl.arange(0, BV)
    place, in_state = state_at(
        state_ptr + (layer * state_l + slot * state_n + head * state_h) * STATE_UNIT, ks, vs, state_k,
        state_v, K, V, STATE_UNIT, AXIS,
    )  # fmt: skip
    S = tl.load(place, mask=in_state, other=0.0).to(tl.float32)
    u_ptr += (layer * u_l + slot * u_n + head * u_h) * UNIT
    k_ptr += (layer * k_l + slot * k_n + key_head * k_h) * UNIT
    G_ptr += layer * G_l + slot * G_n + head * G_h
    high, low = split(tl.load(G_ptr + (end - 1) * G_p).to(tl.float64))
    S *= tl.exp(high)
    for start in range(0, end, BT):
        old = start + tokens
        is_old = (old < end)[:, None]
        k = tl.load(
            rows_at(k_ptr, old, ks, k_p, 1, UNIT, True), mask=is_old & exist(ks, K)[None, :], other=0.0
        )
        u = tl.load(
            rows_at(u_ptr, old, vs, u_p, 1, UNIT, True), mask=is_old & exist(vs, V)[None, :], other=0.0
        )
        old_high, old_low = past(G_ptr, old, end, G_p)
        grown = u.to(tl.float32) * decay(old_high, old_low, high, low)[:, None]
        S = mixed(tl.trans(k), grown, S, PRECISION)
    tl.store(place, S.to(state_ptr.dtype.element_ty), mask=in_state)


@kernel
def cursor_kernel(
    cursor_ptr, index_ptr, accepted_ptr, cursor_n, index_n, accepted_n, n, slots, lowest, places, room,
    BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(index_ptr + entry * index_n, mask=entry < n, other=-1).to(tl.int64)
    is_slot = (slot >= lowest) & (slot < slots) & (entry < n)
    accepted = tl.load(accepted_ptr + entry * accepted_n, mask=is_slot, other=0)
    end = ending(tl.load(cursor_ptr + slot * cursor_n, mask=is_slot, other=0), accepted, room, places)
    end = tl.where(end + room > places, 0, end)
    tl.store(cursor_ptr + slot * cursor_n, end.to(cursor_ptr.dtype.element_ty), mask=is_slot)


_replays: Plans[Again] = Plans()


def replay_decode(problem: ReplayProblem) -> Again | None:
    """See `Backend`; writes the history and problem.out."""
    p, offsets = problem, offsets_on(problem.q.device, problem.cu_seqlens)
    again = _replays.get(_replay_key(p), lambda: _first(p))
    again(*(p if offsets is p.cu_seqlens else replace(p, cu_seqlens=offsets)).arguments()[:17])
    # a copy was made, or a launch recorded that is meant for another machine
    if offsets is not p.cu_seqlens or launching.recorder is not None:
        return None
    return again


def _first(p: ReplayProblem) -> Again:
    one, tensors, gpu = _plan_replay(p), p.arguments()[:17], machine(p.q.device)
    others = lambda: [(_plan_replay(p, pairs), tensors) for pairs in fills(gpu)]  # noqa: E731
    ahead(p.q.device, one.binary(tensors), others)
    return Again(one, p.q.device)


def _replay_key(p: ReplayProblem) -> Hashable:
    """Everything of a problem that its launch depends on, but for where its tensors lie."""
    return (
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in p.arguments()[:17]), p.q.device,
        p.longest, p.scale, p.use_qk_l2norm_in_kernel, p.allow_neg_eigval, p.state_v_first, p.null_slot,
    )  # fmt: skip


def _plan_replay(p: ReplayProblem, pairs: int | None = None) -> Launch:
    """`pairs`: rows times heads that tiles are chosen for, if not the problem's."""
    axis, state_unit, (n, _, h, k, v) = pool_of(p.state, p.K, p.V, p.state_v_first)
    is_packed = p.cu_seqlens is not None
    rows = [token_strides(x, is_packed) for x in (p.q, p.k, p.v, p.out)]
    gates = [
        token_strides(x, is_packed) for x in (p.g if p.a is None else p.a, p.beta if p.b is None else p.b)
    ]
    kept = (*p.history_u.stride()[:3], *p.history_k.stride()[:3])
    unit, past_unit, gpu = unit_of(*(s for x in rows for s in x)), unit_of(*kept), machine(p.q.device)
    # a power of two, so that few numbers of places want a binary of their own; what rows get of more is made
    # again for each strip
    pasts = 1 << (triton.cdiv(p.places, PLACES) - 1).bit_length()
    pasts = pasts if pasts <= MOST_PASTS else 0
    sizes = blocks(p.K, p.V, p.q.element_size(), p.longest, p.N * p.HV if pairs is None else pairs, gpu)
    tails = (p.q.stride(3), p.k.stride(3), p.v.stride(3), p.out.stride(3))
    numbers = (
        *(s // unit for x in rows for s in x), *tails, *(s for x in gates for s in x), _stride(p.A_log),
        _stride(p.dt_bias), n, h, k, v, *(s // past_unit for s in kept), *p.history_G.stride(),
        _stride(p.cursor), _stride(p.read_index), p.N, p.q.shape[1], p.HV, *inverse(p.HV), p.HV // p.H,
        *inverse(p.HV // p.H), p.state.shape[0], 0 if p.null_slot is None else 1, p.places, p.scale,
    )  # fmt: skip
    constants = {
        "K": p.K, "V": p.V, "BP": PLACES, "PASTS": pasts, **sizes, "AXIS": axis,
        "DENSE": tails == (1, 1, 1, 1), "UNIT": unit,
        "STATE_UNIT": state_unit, "PAST_UNIT": past_unit, "NORM": p.use_qk_l2norm_in_kernel,
        "NEGATIVE": p.allow_neg_eigval, "LEVELS": levels(p.longest),
        **precisions(p.q.dtype == torch.float32, gpu), "RESET": RESET, "CHAINED": chains(gpu),
    }  # fmt: skip
    programs = (p.N + int(is_packed)) * p.HV * triton.cdiv(p.V, sizes["BV"] * sizes["STRIPS"])
    return Launch(replay_kernel, programs, numbers, constants, warps(sizes), options=chained(gpu))


@dataclass(frozen=True)
class Keep:
    """The launches of one commit."""

    fold: Launch
    cursor: Launch


_keeps: Plans[Keep] = Plans()


def replay_commit(problem: KeepProblem) -> None:
    """See `Backend`; writes problem.state and problem.cursor."""
    p = problem
    with on(p.state.device):
        plan = _keeps.get(_keep_key(p), lambda: _plan_keep(p))
        plan.fold(p.state, p.history_u, p.history_k, p.history_G, p.cursor, p.index, p.accepted)
        if p.update_cursor:
            plan.cursor(p.cursor, p.index, p.accepted)


def _keep_key(p: KeepProblem) -> Hashable:
    tensors = (p.state, p.history_u, p.history_k, p.history_G, p.cursor, p.index, p.accepted)
    return (
        *((x.shape, x.stride(), x.dtype) for x in tensors), p.state.device, p.room, p.state_v_first,
        p.null_slot,
    )  # fmt: skip


def _plan_keep(p: KeepProblem) -> Keep:
    axis, state_unit, state = pool_of(p.state, p.K, p.V, p.state_v_first)
    layers, slots = p.state.shape[:2]
    HV, H, n = p.history_u.shape[3], p.history_k.shape[3], p.index.shape[0]
    kept = (*p.history_u.stride()[:4], *p.history_k.stride()[:4])
    unit = unit_of(*kept)
    # no more than 32 rows to a product: see `packet.UPDATED`
    BK, BV = (min(most, max(16, triton.next_power_of_2(size))) for most, size in ((UPDATED, p.K), (64, p.V)))
    lowest = 0 if p.null_slot is None else 1
    where = (_stride(p.cursor), _stride(p.index), _stride(p.accepted))
    fold = Launch(
        fold_kernel,
        n * layers * HV * triton.cdiv(p.V, BV) * triton.cdiv(p.K, BK),
        (
            *state, *(s // unit for s in kept), *p.history_G.stride(), *where, layers, HV, *inverse(HV),
            *inverse(HV // H), slots, lowest, p.places, p.room,
        ),
        {
            "K": p.K, "V": p.V, "BK": BK, "BV": BV, "BT": MOST,
            "AXIS": axis, "STATE_UNIT": state_unit, "UNIT": unit,
            # a state in fp32 is carried in fp32, whatever its history is kept in
            "PRECISION": precisions(True, machine(p.state.device))["PRECISION"],
        },
        4,
    )  # fmt: skip
    cursor = Launch(
        cursor_kernel, triton.cdiv(n, 128), (*where, n, slots, lowest, p.places, p.room), {"BLOCK": 128}, 4
    )
    return Keep(fold, cursor)


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)
