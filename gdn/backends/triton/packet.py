"""A packet of up to 16 tokens at once, on the matrix units: what decode and replay share.

    S_t = e^(G_t) S,  and in replay + sum_j e^(G_t - G_j) k_j u_j^T over the history
    r_t = beta_t (v_t - S_t^T k_t);    A_tj = beta_t e^(G_t - G_j) <k_t, k_j> for j < t;    (I + A) d = r
    o_t = scale (S_t^T q_t + sum_(j <= t) e^(G_t - G_j) <q_t, k_j> d_j)

A program takes some columns of one row and value head; 16 tokens are the rows of every product, however few
there are. Raw q and k go through the products and their norms scale what comes out, as in the chunked rule; u
is d times the norm of k, so that S gains k u^T with the raw k. Operands of two dtypes meet as fp32 in tf32:
a 16-bit operand is exact there and a state or u loses 2^-11, where in 16 bits it would lose 2^-8.
"""

import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton.launch import Machine
from gdn.backends.triton.lib import decay, dot, exist, softplus, strength

MOST = 16  # tokens of a packet: the rows of the smallest product
BYTES = 128  # of a state's row in memory that a product takes at a time


@triton.jit
def source(
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
    # a log decay of -inf counts as RESET does: e to it is 0, and its sum with others is a number
    g = tl.where(is_token, tl.maximum(g, RESET), 0.0)
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


def token_strides(x: Tensor | None, is_packed: bool) -> tuple[int, int, int]:
    """Strides of row, token and head; packed rows lie behind one another."""
    return (0, 0, 0) if x is None else (0 if is_packed else x.stride(0), x.stride(1), x.stride(2))
