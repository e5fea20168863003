# mypy: disable-error-code="assignment, var-annotated"
"""Replay with a decay per key channel: run a packet on a state that is only read, and on its history.

    q_in = e^G q,  k_in = e^G k;  k_out = e^(g_(j+1) + .. + g_(P-1)) k_j of the history;  D: e^G of it all
    XS = x_in D S + (x_in k_out^T) u for x = q, k;   A_tj = beta_t sum_c k_tc k_jc D_tjc for j < t
    r = beta (v - S_k);   d = (I + A)^-1 r;   o = scale (S_q + P d),  P as A of q and k, with j = t

Every product is a sum over key channels, so one pass over blocks of keys needs each block of S once, in
registers. The pairs of the packet are computed by the levels of `channels`. The history holds g itself, and
`load_past_rows` adds it up from the newest place backwards. Where norms are in the kernel, u is d times the
inverse norm of k, as in `replay`.
Bytes of a verification per row at 32 heads of 128 x 128, fp32 state, bf16 history: 2.1 MB of state read, and
32 KB for each token of history read or written, half of it g.
"""

from typing import Any

import triton
import triton.language as tl

from gdn.backends.triton.launch import Launch, jit, kernel, machine
from gdn.backends.triton.launch.pdl import launch_dependents_then_wait, pdl_options
from gdn.backends.triton.lib import activate_beta, column_mask, dot
from gdn.backends.triton.rule.channels import (
    channel_decays,
    double_pieces,
    gate_rate,
    level_decays,
)
from gdn.backends.triton.serving.fold_channels import load_past_rows
from gdn.backends.triton.serving.history_lib import load_history_u
from gdn.backends.triton.serving.packet_lib import (
    ROWS,
    column_pointer,
    dot_mixed,
    dot_precise,
    invert_unit_lower,
    load_slot,
    row_pointers,
    store_zeros,
    strip_mask,
    strip_pointers,
)
from gdn.backends.triton.serving.recurrent_lib import divide, locate_program, token_range
from gdn.backends.triton.serving.structs import Appended, History, Packet, Slots, Strip, group_constants
from gdn.problem import ReplayProblem

KEYS = 32  # keys of a block
# Value columns of a program, each of which reads and decays the history: 4 tokens of 64 rows with 32 heads
# and 33 places take 592 us with 64 columns on an H100, 340 with 128
FEW, MANY = 32, 128


@jit
def load_packet(packet, ks, C: tl.constexpr):
    """Load some keys of q and k of a packet [16, ks] in fp32; zeros past its end."""
    tokens = tl.arange(0, ROWS)
    mask = (tokens < packet.count)[:, None] & column_mask(ks, C.K)[None, :]
    q_at = row_pointers(packet.q_ptr, tokens, ks, packet.q_t, packet.q_k, C.UNIT, C.DENSE, C.NEAR)
    k_at = row_pointers(packet.k_ptr, tokens, ks, packet.k_t, packet.k_k, C.UNIT, C.DENSE, C.NEAR)
    q, k = tl.load(q_at, mask=mask, other=0.0), tl.load(k_at, mask=mask, other=0.0)
    return q.to(tl.float32), k.to(tl.float32)


@jit
def load_keys(state, start, BS: tl.constexpr, C: tl.constexpr):
    """Load some value columns of BS keys of a state from `start` on; zeros past the last key."""
    place, in_state = strip_pointers(state, start + tl.arange(0, BS), C)
    return tl.load(place, mask=in_state & (start < C.K), other=0.0)


@jit
def load_beta(beta_ptr, stride, count, RAW: tl.constexpr, NEGATIVE: tl.constexpr):
    """Load beta of a packet's tokens, or its logits if RAW; 0 past its end."""
    tokens = tl.arange(0, ROWS)
    if beta_ptr is None:
        return tl.where(tokens < count, 1.0, 0.0)
    else:
        x = tl.load(beta_ptr + tokens.to(tl.int64) * stride, mask=tokens < count, other=0.0)
        return tl.where(tokens < count, activate_beta(x, RAW, NEGATIVE), 0.0)


@jit
def add_packet_pairs(q, k, g, pairs, C: tl.constexpr):
    """Add the products of q, k [16, N] with k over channels with decays g to pairs of q and of k [16, 16].

    Returns these, and the sums of g from the packet's start.
    """
    q_pairs, k_pairs = pairs
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    # a token's own pair has no decay
    q_pairs += tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
    before = tl.reshape(g, (1, ROWS, g.shape[1]))
    after = tl.zeros_like(before)
    for level in range(C.LEVELS):
        d = tl.reshape(level_decays(before, after, level), g.shape)
        columns = tl.trans(k * d)
        is_pair = ((i ^ j) >> level == 1) & (i > j)
        # 16 x 16 MMAs, of which a mask in registers keeps this level's pairs
        q_pairs += tl.where(is_pair, dot(q * d, columns, None, C.PRECISION), 0.0)
        k_pairs += tl.where(is_pair, dot(k * d, columns, None, C.PRECISION), 0.0)
        before, after = double_pieces(before, after, level)
    return (q_pairs, k_pairs), tl.reshape(before, g.shape)


@jit
def add_products(XS, rows, operand, PRECISION: tl.constexpr):
    """Add the products of the rows of q and of k with an operand [., vs], by parts."""
    return (
        dot_mixed(rows[0], operand, XS[0], PRECISION),
        dot_mixed(rows[1], operand, XS[1], PRECISION),
    )


@jit
def store_past(history, G_k, k, g, ks, new, has_k, C: tl.constexpr):
    """Append some keys of a packet's g to the history of a value head, and of its k where has_k."""
    mask = new.is_kept[:, None] & column_mask(ks, C.K)[None, :]
    g_at = history.G_ptr + (new.places.to(tl.int64) * history.G_p)[:, None] + (ks * G_k)[None, :]
    tl.store(g_at, g.to(history.G_ptr.dtype.element_ty), mask=mask)
    k_at = row_pointers(history.k_ptr, new.places, ks, history.k_p, 1, C.PAST_UNIT, True, C.NEAR)
    tl.store(k_at, k.to(history.k_ptr.dtype.element_ty), mask=mask & has_k)


@kernel
def replay_channels_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, u_history_ptr, k_history_ptr, g_history_ptr, cursor_ptr, g_ptr, beta_ptr,
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, cu_seqlens_ptr, read_index_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, q_k, k_k, v_v, o_v,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h, state_n, state_h, state_k, state_v,
    u_n, u_p, u_h, past_n, past_p, past_h, G_n, G_p, G_h, G_k, cursor_n, read_n,
    N, T, HV, HV_magic, HV_s, ratio, ratio_magic, ratio_s, slots, lowest, places, scale,
    g_k, dt_bias_k, lower_bound,
    K: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    AXIS: tl.constexpr, DENSE: tl.constexpr, NEAR: tl.constexpr, LINE: tl.constexpr, UNIT: tl.constexpr,
    STATE_UNIT: tl.constexpr, PAST_UNIT: tl.constexpr, NORM: tl.constexpr, NEGATIVE: tl.constexpr,
    LEVELS: tl.constexpr, PRECISION: tl.constexpr, FP32_PRECISION: tl.constexpr, RESET: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # o, and u, k and g of a packet, from a state and its history; formulas at the top of the file.
    # Program (row, head, block): BV value columns, in one pass over blocks of BS keys. Grid: (N, + 1 if
    # packed) * HV * blocks; 4 warps. PDL: it lets the next kernel start at once, and waits before its first
    # load.
    # Reads S once; reads the packet, and k and g of the history, once per program: its first program of a
    # head leaves them in L2. Writes o, and appends u, k and g of the packet to the history.
    C: tl.constexpr = group_constants(
        K=K, V=V, BP=BP, BV=BV, BT=16, STRIPS=1, AXIS=AXIS, DENSE=DENSE, NEAR=NEAR, LINE=LINE, UNIT=UNIT,
        STATE_UNIT=STATE_UNIT, PAST_UNIT=PAST_UNIT, LEVELS=LEVELS, PRECISION=PRECISION,
    )  # fmt: skip
    RAW: tl.constexpr = a_ptr is not None
    if PDL:
        launch_dependents_then_wait()
    n, head, block = locate_program(HV, HV_magic, HV_s, (V + BV - 1) // BV)
    first, count = token_range(cu_seqlens_ptr, n, N, T)
    slot, _entry = load_slot(n, N, Slots(read_index_ptr, None, None, read_n, 0, 0, 0, 1, 1))
    key_head = divide(head, ratio_magic, ratio_s)
    o_ptr += (n * o_b + first * o_t + head * o_h) * UNIT
    q_ptr += (n * q_b + first * q_t + key_head * q_h) * UNIT
    k_ptr += (n * k_b + first * k_t + key_head * k_h) * UNIT
    v_ptr += (n * v_b + first * v_t + head * v_h) * UNIT
    packet = Packet(q_ptr, k_ptr, count, q_t, k_t, q_k, k_k)
    if RAW:
        g_ptr, beta_ptr = a_ptr, b_ptr
    g_ptr += n * g_b + first * g_t + head * g_h
    if beta_ptr is not None:
        beta_ptr += n * beta_b + first * beta_t + head * beta_h
    if dt_bias_ptr is not None:
        dt_bias_ptr += head * dt_bias_h
    rate = gate_rate(A_log_ptr, head * A_log_h)
    # not an early return: exporters look for the stores of a kernel, and do not follow jumps
    if (slot < lowest) | (slot >= slots) | (n >= N):
        store_zeros(o_ptr, count, block, o_t, o_v, C)
    else:
        # the history of the slot starts at place 0; the packet is appended at `base`
        base = tl.load(cursor_ptr + slot * cursor_n).to(tl.int64)
        base = tl.minimum(tl.maximum(base, 0), places).to(tl.int32)
        column, vs, tokens = block * BV, tl.arange(0, BV), tl.arange(0, ROWS)
        left = V - column
        is_token, has_value = tokens < count, strip_mask(vs, left, V, 1)[None, :]
        state_ptr += (slot * state_n + head.to(tl.int64) * state_h) * STATE_UNIT
        strip_ptr = column_pointer(state_ptr, column, state_v * STATE_UNIT, AXIS == "v")
        u_history_ptr += (slot * u_n + head * u_h) * PAST_UNIT + column
        k_history_ptr += (slot * past_n + key_head * past_h) * PAST_UNIT
        g_history_ptr += slot * G_n + head * G_h
        history = History(u_history_ptr, k_history_ptr, g_history_ptr, base, u_p, past_p, G_p, None, None)
        new = Appended(base + tokens, is_token & (base + tokens < places))
        pairs = (tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([ROWS, ROWS], tl.float32))
        XS = (tl.zeros([ROWS, BV], tl.float32), tl.zeros([ROWS, BV], tl.float32))
        q_squares, k_squares = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        state = Strip(strip_ptr, vs, left, state_k, state_v)
        S = load_keys(state, 0, BS, C)
        for start in range(0, K, BS):
            ks = start + tl.arange(0, BS)
            # the next keys of the state are on their way from HBM during all work on these
            S_next = load_keys(state, start + BS, BS, C)
            q, k = load_packet(packet, ks, C)
            has_key = column_mask(ks, K)[None, :]
            g_at = g_ptr + (tokens.to(tl.int64) * g_t)[:, None] + (ks * g_k)[None, :]
            x = tl.load(g_at, mask=is_token[:, None] & has_key, other=0.0).to(tl.float32)
            if dt_bias_ptr is not None:
                x += tl.load(dt_bias_ptr + ks * dt_bias_k, mask=ks < K, other=0.0).to(tl.float32)[None, :]
            g = channel_decays(x, rate, lower_bound, is_token, RAW, lower_bound is not None, RESET)
            if block == 0:
                # of the value heads that share a key head, only one stores k
                store_past(history, G_k, k, g, ks, new, key_head * ratio == head, C)
            q_squares += tl.sum(q * q, 1)
            k_squares += tl.sum(k * k, 1)
            pairs, G = add_packet_pairs(q, k, g, pairs, C)
            D = tl.exp(G)
            rows = (q * D, k * D)
            later = tl.zeros([BS], tl.float32)
            past = (base - 1) // BP * BP
            for _ in range((base + BP - 1) // BP):
                k_out, later = load_past_rows(history, G_k, past, ks, later, C)
                u = load_history_u(history, u_history_ptr, past, vs, has_value, C)
                k_out = tl.trans(k_out)
                scores = (dot(rows[0], k_out, None, PRECISION), dot(rows[1], k_out, None, PRECISION))
                XS = add_products(XS, scores, u, PRECISION)
                past -= BP
            whole = tl.exp(later)[None, :]
            XS = add_products(XS, (rows[0] * whole, rows[1] * whole), S, PRECISION)
            S = S_next
        q_rate, k_rate = tl.full([ROWS], scale, tl.float32), tl.full([ROWS], 1.0, tl.float32)
        if NORM:
            # norms scale the products in registers, instead of q and k
            q_rate *= tl.rsqrt(q_squares + 1e-6)
            k_rate *= tl.rsqrt(k_squares + 1e-6)
        beta = load_beta(beta_ptr, beta_t, count, RAW, NEGATIVE)
        P = pairs[0] * q_rate[:, None] * k_rate[None, :]
        A = pairs[1] * (beta * k_rate)[:, None] * k_rate[None, :]
        A_inv = invert_unit_lower(A, LEVELS, FP32_PRECISION)
        v_at = row_pointers(
            column_pointer(v_ptr, column, v_v, DENSE), tokens, vs, v_t, v_v, UNIT, DENSE, NEAR
        )
        v = tl.load(v_at, mask=is_token[:, None] & has_value, other=0.0).to(tl.float32)
        r = beta[:, None] * (v - k_rate[:, None] * XS[1])
        d = dot_precise(A_inv, r, None, FP32_PRECISION)
        o = dot_precise(P, d, q_rate[:, None] * XS[0], FP32_PRECISION)
        o_at = row_pointers(
            column_pointer(o_ptr, column, o_v, DENSE), tokens, vs, o_t, o_v, UNIT, DENSE, NEAR
        )
        tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=is_token[:, None] & has_value)
        u_at = row_pointers(u_history_ptr, new.places, vs, u_p, 1, PAST_UNIT, True, NEAR)
        # u of places beyond the history is dropped
        u = (k_rate[:, None] * d).to(u_history_ptr.dtype.element_ty)
        tl.store(u_at, u, mask=new.is_kept[:, None] & has_value)


def plan_channels_replay(
    p: ReplayProblem, scalars: tuple[int | float, ...], constants: dict[str, Any], num_states: int | None
) -> Launch:
    """Build a replay; scalars and constants: those of `replay_kernel`. num_states: as for `blocks`."""
    gpu, g = machine(p.q.device), p.g if p.a is None else p.a
    assert g is not None
    num_states = p.N * p.HV if num_states is None else num_states
    few = triton.cdiv(p.V, FEW) * num_states <= 2 * gpu.num_sms
    sizes = {
        "BV": min(FEW if few else MANY, max(16, triton.next_power_of_2(p.V))),
        "BS": min(KEYS, max(16, triton.next_power_of_2(p.K))),
    }
    unused = ("BT", "STRIPS", "STAGES")
    bias = (0, 1) if p.dt_bias is None else p.dt_bias.stride()
    return Launch(
        replay_channels_kernel,
        (p.N + int(p.cu_seqlens is not None)) * p.HV * triton.cdiv(p.V, sizes["BV"]),
        (*scalars, g.stride(3), bias[1], p.lower_bound),
        {name: x for name, x in constants.items() if name not in unused} | sizes,
        4,
        options=pdl_options(gpu),
    )
