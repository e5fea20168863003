"""A packet of up to 16 tokens at once on the matrix units: decode with exact_packet=False, parts of replay.

    S_t = e^(G_t) S,  and in replay + sum_j e^(G_t - G_j) k_j u_j^T over the history
    r_t = beta_t (v_t - S_t^T k_t);    A_tj = beta_t e^(G_t - G_j) <k_t, k_j> for j < t;    (I + A) d = r
    o_t = scale (S_t^T q_t + sum_(j <= t) e^(G_t - G_j) <q_t, k_j> d_j)

A program takes some columns of one row and value head; 16 tokens are the rows of every product, however few
there are. Raw q and k go through the products and their norms scale what comes out, as in the chunked rule; u
is d times the norm of k, so that S gains k u^T with the raw k. Operands of two dtypes meet as fp32 in tf32:
a 16-bit operand is exact there and a state or u loses 2^-11, where in 16 bits it would lose 2^-8.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton.launch import Launch, Machine, kernel, machine, unit_of
from gdn.backends.triton.lib import decay, dot, exist, softplus, split, strength
from gdn.backends.triton.recurrent import divide, inverse, owner, pool_of, span
from gdn.problem import RESET, DecodeProblem

MOST = 16  # tokens of a packet: the rows of the smallest product
BYTES = 128  # of a state's row in memory that a product takes at a time
UPDATED = 32  # keys of a state that a product makes anew: from 64 rows on sm_90 uses wgmma, which Triton 3.6
# gives wrong addresses for narrow operands in loops


@triton.jit
def slot_of(
    row, N, columns, entries, read_index_ptr, num_accepted_ptr, ring_pos_ptr, read_n, read_c, accepted_n,
    ring_n,
):  # fmt: skip
    """The slot that a row reads, -1 where the row has none, and the entry of its ring."""
    slot = row
    if read_index_ptr is not None:
        read_index_ptr += row * read_n
        if num_accepted_ptr is not None:
            accepted = tl.load(num_accepted_ptr + row * accepted_n, mask=row < N, other=1).to(tl.int64)
            read_index_ptr += (tl.minimum(tl.maximum(accepted, 1), columns) - 1) * read_c
        slot = tl.load(read_index_ptr, mask=row < N, other=-1).to(tl.int64)
    entry = tl.full([], 0, tl.int64)
    if ring_pos_ptr is not None:
        entry = (tl.load(ring_pos_ptr + row * ring_n, mask=row < N, other=0) % entries).to(tl.int64)
        entry = tl.where(entry < 0, entry + entries, entry)
    return slot, entry


@triton.jit
def rows_at(ptr, rows, columns, row_stride, column_stride, UNIT: tl.constexpr, DENSE: tl.constexpr):
    """Pointers [rows, columns]; strides of rows are in UNITs."""
    ptr += (rows.to(tl.int64) * row_stride * UNIT)[:, None]
    if DENSE:
        return ptr + columns[None, :]
    else:
        return ptr + (columns.to(tl.int64) * column_stride)[None, :]


@triton.jit
def state_at(
    ptr, ks, vs, state_k, state_v, K: tl.constexpr, V: tl.constexpr, UNIT: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Pointers and mask [ks, vs] of a state with strides in UNITs; along AXIS it is contiguous."""
    mask = exist(ks, K)[:, None] & exist(vs, V)[None, :]
    along_k, along_v = ks.to(tl.int64), vs.to(tl.int64)
    if AXIS != "k":
        along_k = along_k * (state_k * UNIT)
    if AXIS != "v":
        along_v = along_v * (state_v * UNIT)
    return ptr + along_k[:, None] + along_v[None, :], mask


@triton.jit
def mixed(x, y, acc, PRECISION: tl.constexpr):
    """x y + acc; operands of two dtypes meet as fp32."""
    if x.dtype == y.dtype:
        return dot(x, y, acc, PRECISION)
    else:
        return dot(x.to(tl.float32), y.to(tl.float32), acc, PRECISION)


@triton.jit
def gates_of(
    g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, tokens, is_token, g_t, beta_t, RAW: tl.constexpr,
    NEGATIVE: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """Sums of g from the packet's start, fp64, and beta [16] of a row and head; beta is 0 past its end."""
    if g_ptr is None:
        g = tl.zeros(tokens.shape, tl.float32)
    else:
        g = tl.load(g_ptr + tokens.to(tl.int64) * g_t, mask=is_token, other=0.0).to(tl.float32)
        if RAW:
            if dt_bias_ptr is not None:
                g += tl.load(dt_bias_ptr).to(tl.float32)
            g = -tl.exp(tl.load(A_log_ptr).to(tl.float32)) * softplus(g)
    # a log decay of -inf counts as RESET does: e to it is 0, and its sum with others is a number. A NaN
    # stays one: on a GPU the maximum of it and RESET is RESET
    g = tl.where(is_token, tl.where(g < RESET, RESET, g), 0.0)
    if beta_ptr is None:
        beta = tl.full(tokens.shape, 1.0, tl.float32)
    else:
        beta = strength(
            tl.load(beta_ptr + tokens.to(tl.int64) * beta_t, mask=is_token, other=0.0), RAW, NEGATIVE
        )
    return tl.cumsum(g.to(tl.float64), 0), tl.where(is_token, beta, 0.0)


@triton.jit
def products(
    q_ptr, k_ptr, state_ptr, tokens, is_token, vs, q_t, k_t, q_k, k_k, state_k, state_v, scale,
    K: tl.constexpr, V: tl.constexpr, BS: tl.constexpr, UNIT: tl.constexpr, STATE_UNIT: tl.constexpr,
    AXIS: tl.constexpr, DENSE: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
    PRECISION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """q S, k S [16, V], q k^T, k k^T [16, 16], scale / |q| and 1 / |k| [16] (without the norm scale and 1).

    In blocks of keys, some of them on their way: at K = 256 in fp32 whole rows fill all registers.
    """
    BT: tl.constexpr = tokens.shape[0]
    qS, kS = tl.zeros([BT, vs.shape[0]], tl.float32), tl.zeros([BT, vs.shape[0]], tl.float32)
    qk, kk = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    q_sum, k_sum = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    for start in tl.range(0, K, BS, num_stages=STAGES):
        ks = start + tl.arange(0, BS)
        has_key = is_token[:, None] & exist(ks, K)[None, :]
        place, in_state = state_at(state_ptr, ks, vs, state_k, state_v, K, V, STATE_UNIT, AXIS)
        S = tl.load(place, mask=in_state, other=0.0)
        q = tl.load(rows_at(q_ptr, tokens, ks, q_t, q_k, UNIT, DENSE), mask=has_key, other=0.0)
        k = tl.load(rows_at(k_ptr, tokens, ks, k_t, k_k, UNIT, DENSE), mask=has_key, other=0.0)
        qS, kS = mixed(q, S, qS, PRECISION), mixed(k, S, kS, PRECISION)
        qk, kk = dot(q, tl.trans(k), qk, PRECISION), dot(k, tl.trans(k), kk, FINE)
        if NORM:
            q_wide, k_wide = q.to(tl.float32), k.to(tl.float32)
            q_sum += tl.sum(q_wide * q_wide, 1)
            k_sum += tl.sum(k_wide * k_wide, 1)
    q_scale, k_rstd = q_sum + scale, k_sum + 1.0
    if NORM:
        q_scale, k_rstd = scale * tl.rsqrt(q_sum + 1e-6), tl.rsqrt(k_sum + 1e-6)
    return qS, kS, qk, kk, q_scale, k_rstd


@triton.jit
def solve(
    qS, kS, qk, kk, v, beta, q_scale, k_rstd, high, low, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    FINE: tl.constexpr,
):  # fmt: skip
    """o and u [16, V] from what the tokens see of the state and what lies before them."""
    i = tl.arange(0, qk.shape[0])[:, None]
    j = tl.arange(0, qk.shape[0])[None, :]
    D = decay(high[None, :], low[None, :], high[:, None], low[:, None])
    r = beta[:, None] * (v.to(tl.float32) - kS * k_rstd[:, None])
    if LEVELS > 0:
        A = kk * (beta * k_rstd)[:, None] * k_rstd[None, :] * D
        r = dot(_inverse(tl.where(i > j, A, 0.0), LEVELS, FINE), r, None, FINE)
    u = r * k_rstd[:, None]
    P = tl.where(i >= j, qk * D, 0.0)
    return dot(P, u, qS, PRECISION) * q_scale[:, None], u


@triton.jit
def _inverse(A, LEVELS: tl.constexpr, FINE: tl.constexpr):
    """(I + A)^-1 by doubling, as in `tril`, of the first 2^LEVELS rows; beyond them A is zero."""
    i = tl.arange(0, A.shape[0])[:, None]
    j = tl.arange(0, A.shape[0])[None, :]
    X = tl.where(i == j, 1.0, tl.where((i ^ j) == 1, -A, 0.0))
    for level in tl.static_range(1, LEVELS):
        L = tl.where((i ^ j) >> level == 1, A, 0.0)
        X -= dot(dot(X, L, None, FINE), X, None, FINE)
    return X


@triton.jit
def clear(o_ptr, count, tokens, vs, has_value, o_t, o_v, UNIT: tl.constexpr, DENSE: tl.constexpr):
    """Zeros for all tokens of a row that has no slot."""
    for t in range(0, count, tokens.shape[0]):
        place = rows_at(o_ptr, t + tokens, vs, o_t, o_v, UNIT, DENSE)
        zeros = tl.zeros([tokens.shape[0], vs.shape[0]], o_ptr.dtype.element_ty)
        tl.store(place, zeros, mask=(t + tokens < count)[:, None] & has_value[None, :])


@kernel
def packet_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, cu_seqlens_ptr,
    read_index_ptr, num_accepted_ptr, ring_pos_ptr, write_index_ptr, intermediate_ptr, intermediate_row_ptr,
    parent_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, q_0, k_0, v_0, q_k, k_k, v_v, o_v,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h, state_n, state_r, state_h, state_k, state_v,
    read_n, read_c, accepted_n, ring_n, write_n,
    N, T, HV, HV_inverse, HV_s, ratio_inverse, ratio_s, slots, lowest, columns, entries, scale,
    K: tl.constexpr, V: tl.constexpr, BU: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    BT: tl.constexpr, STAGES: tl.constexpr, AXIS: tl.constexpr, DENSE: tl.constexpr, UNIT: tl.constexpr,
    STATE_UNIT: tl.constexpr, WRITE: tl.constexpr, NORM: tl.constexpr, NEGATIVE: tl.constexpr,
    LEVELS: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """One row's tokens, as `decode` takes them, when only the last state is wanted or none."""
    row, head, block = owner(HV, HV_inverse, HV_s, (V + BV - 1) // BV)
    first, count = span(cu_seqlens_ptr, row, N, T)
    slot, entry = slot_of(
        row, N, columns, entries, read_index_ptr, num_accepted_ptr, ring_pos_ptr, read_n, read_c, accepted_n,
        ring_n,
    )  # fmt: skip
    key_head = divide(head, ratio_inverse, ratio_s)
    tokens, vs = tl.arange(0, BT), block * BV + tl.arange(0, BV)
    has_value = exist(vs, V)
    o_ptr += (row * o_b + first * o_t + head * o_h) * UNIT
    q_ptr += (row * q_b + first * q_t + key_head * q_h + q_0) * UNIT
    k_ptr += (row * k_b + first * k_t + key_head * k_h + k_0) * UNIT
    v_ptr += (row * v_b + first * v_t + head * v_h + v_0) * UNIT
    if a_ptr is not None:
        g_ptr, beta_ptr = a_ptr, b_ptr
        A_log_ptr += head * A_log_h
    if g_ptr is not None:
        g_ptr += row * g_b + first * g_t + head * g_h
    if beta_ptr is not None:
        beta_ptr += row * beta_b + first * beta_t + head * beta_h
    if dt_bias_ptr is not None:
        dt_bias_ptr += head * dt_bias_h
    # not an early return: exporters look for the tensors that a kernel writes, and follow no jumps
    if (slot < lowest) | (slot >= slots) | (row >= N):
        clear(o_ptr, count, tokens, vs, has_value, o_t, o_v, UNIT, DENSE)
    else:
        is_token = tokens < count
        has_both = is_token[:, None] & has_value[None, :]
        G, beta = gates_of(
            g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, tokens, is_token, g_t, beta_t, a_ptr is not None,
            NEGATIVE, RESET,
        )  # fmt: skip
        high, low = split(G)
        v = tl.load(rows_at(v_ptr, tokens, vs, v_t, v_v, UNIT, DENSE), mask=has_both, other=0.0)
        pool = state_ptr + head * state_h * STATE_UNIT
        start_ptr = pool + (slot * state_n + entry * state_r) * STATE_UNIT
        qS, kS, qk, kk, q_scale, k_rstd = products(
            q_ptr, k_ptr, start_ptr, tokens, is_token, vs, q_t, k_t, q_k, k_k, state_k, state_v, scale, K, V,
            BS, UNIT, STATE_UNIT, AXIS, DENSE, STAGES, NORM, PRECISION, FINE,
        )  # fmt: skip
        grown = tl.exp(high)[:, None]
        o, u = solve(
            qS * grown, kS * grown, qk, kk, v, beta, q_scale, k_rstd, high, low, LEVELS, PRECISION, FINE
        )
        tl.store(
            rows_at(o_ptr, tokens, vs, o_t, o_v, UNIT, DENSE), o.to(o_ptr.dtype.element_ty), mask=has_both
        )
        if WRITE == "final":
            target = slot
            if write_index_ptr is not None:
                target = tl.load(write_index_ptr + row * write_n).to(tl.int64)
            if (target >= lowest) & (target < slots) & (count > 0):
                end_ptr = pool + (target * state_n + entry * state_r) * STATE_UNIT
                end_high, end_low = split(tl.sum(tl.where(tokens == BT - 1, G, 0.0), 0))
                u *= decay(high, low, end_high, end_low)[:, None]
                # the state a second time: it is still in the cache, and would not fit into registers
                for start in tl.range(0, K, BU, num_stages=STAGES):
                    ks = start + tl.arange(0, BU)
                    has_key = is_token[:, None] & exist(ks, K)[None, :]
                    place, in_state = state_at(start_ptr, ks, vs, state_k, state_v, K, V, STATE_UNIT, AXIS)
                    S = tl.load(place, mask=in_state, other=0.0).to(tl.float32) * tl.exp(end_high)
                    k = tl.load(rows_at(k_ptr, tokens, ks, k_t, k_k, UNIT, DENSE), mask=has_key, other=0.0)
                    S = mixed(tl.trans(k), u, S, PRECISION)
                    place, in_state = state_at(end_ptr, ks, vs, state_k, state_v, K, V, STATE_UNIT, AXIS)
                    tl.store(place, S.to(state_ptr.dtype.element_ty), mask=in_state)


def levels(longest: int) -> int:
    """Doublings that a packet of so many tokens takes."""
    return (longest - 1).bit_length() if longest > 0 else 0


def precisions(is_wide: bool, machine: Machine) -> dict[str, str]:
    """Of the large products, and of those of the triangular system, which are always exact."""
    fine = "ieee" if machine.kind == "hip" else "tf32x3"
    return {"PRECISION": fine if is_wide else "tf32", "FINE": fine}


def blocks(K: int, V: int, width: int, pairs: int, machine: Machine) -> dict[str, int]:
    """Sizes of a program's tiles for `pairs` of rows and heads, and the depth of its loads.

    What a program does for its tokens takes longer than to read 32 columns, so it has up to 64 of them (128
    spill 228 B); fewer where that would leave multiprocessors empty. No bit depends on it: a column is
    summed by itself.
    """
    most = 64 if pairs * triton.cdiv(V, 64) >= 2 * machine.num_sms else 32
    return {
        "BV": min(most, max(16, triton.next_power_of_2(V))),
        "BS": min(BYTES // width, max(16, triton.next_power_of_2(K))),
        "BT": MOST,
        "STAGES": 2 if machine.kind == "hip" else 4,
    }


def fills(machine: Machine) -> tuple[int, int]:
    """Rows times heads that leave a machine empty, and that fill it: one for each choice of `blocks`."""
    return 1, 2 * machine.num_sms


def token_strides(x: Tensor | None, is_packed: bool) -> tuple[int, int, int]:
    """Strides of row, token and head; packed rows lie behind one another."""
    return (0, 0, 0) if x is None else (0 if is_packed else x.stride(0), x.stride(1), x.stride(2))


def strides_of(x: Tensor | None, count: int) -> tuple[int, ...]:
    """The first strides of an index tensor, zeros for what it lacks."""
    found = () if x is None else x.stride()[:count]
    return (*found, *(0,) * (count - len(found)))


def longest_of(p: DecodeProblem) -> int | None:
    """Tokens in the longest row; None where that is no number, while tracing."""
    found = p.q.shape[1] if p.cu_seqlens is None else p.max_seqlen
    if p.cu_seqlens is not None and found is None:
        found = max((count for _, count in p.spans(read_device=False) or ()), default=0)
    return found if isinstance(found, int) else None


def takes(p: DecodeProblem) -> bool:
    """Whether a decode may and can be computed in this form."""
    if p.exact_packet or p.write == "all" or p.intermediate is not None:
        return False
    longest = longest_of(p)
    return longest is not None and 1 < longest <= MOST


def plan(p: DecodeProblem, starts: Sequence[int], pairs: int | None = None) -> Launch:
    """As `decode.plan_of`."""
    axis, state_unit, state = pool_of(p.state, p.K, p.V, p.state_v_first)
    is_packed, gpu = p.cu_seqlens is not None, machine(p.q.device)
    rows = [s for x in (p.q, p.k, p.v, p.out) for s in token_strides(x, is_packed)]
    gates = [
        token_strides(x, is_packed) for x in (p.g if p.a is None else p.a, p.beta if p.b is None else p.b)
    ]
    sizes = blocks(p.K, p.V, p.state.element_size(), p.N * p.HV if pairs is None else pairs, gpu)
    unit = unit_of(*rows, *starts)
    tails = (p.q.stride(3), p.k.stride(3), p.v.stride(3), p.out.stride(3))
    numbers = (
        *(s // unit for s in (*rows, *starts)), *tails, *(s for x in gates for s in x),
        *strides_of(p.A_log, 1), *strides_of(p.dt_bias, 1), *state, *strides_of(p.read_index, 2),
        *strides_of(p.num_accepted, 1), *strides_of(p.ring_pos, 1), *strides_of(p.write_index, 1), p.N,
        p.q.shape[1], p.HV, *inverse(p.HV), *inverse(p.HV // p.H), p.state.shape[0],
        0 if p.null_slot is None else 1,
        p.read_index.shape[1] if p.num_accepted is not None and p.read_index is not None else 1,
        p.state.shape[1] if p.ring_pos is not None else 1, p.scale,
    )  # fmt: skip
    constants = {
        "K": p.K, "V": p.V, "BU": min(UPDATED, sizes["BS"]), **sizes, "AXIS": axis,
        "DENSE": tails == (1, 1, 1, 1), "UNIT": unit, "STATE_UNIT": state_unit, "WRITE": p.write,
        "NORM": p.use_qk_l2norm_in_kernel, "NEGATIVE": p.allow_neg_eigval,
        "LEVELS": levels(longest_of(p) or MOST),
        **precisions(p.q.dtype == torch.float32, gpu), "RESET": RESET,
    }  # fmt: skip
    programs = (p.N + int(is_packed)) * p.HV * triton.cdiv(p.V, sizes["BV"])
    return Launch(packet_kernel, programs, numbers, constants, 4)
