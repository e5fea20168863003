# mypy: disable-error-code="assignment, var-annotated"
"""What the kernels of `packet` and `replay` are made of.

q and k are the rows of one operand, q's tokens first. X = [q; k] meets a state in one product; X X^T has
q k^T, k k^T and the norms on its diagonal; what q's rows get of k's is a product of matrices of rows by rows.
8 tokens make 16 rows, the fewest that a product takes. A program is one warp, which does all of that once and
walks over STRIPS times BV columns of the state; where rows and heads are few, each strip has a program.

Raw q and k go through the products and their norms scale what comes out, as in the chunked rule; u is d times
the norm of k, so that S gains k u^T with the raw k. Operands of two dtypes meet as fp32 in tf32: a 16-bit
operand is exact there and a state or u loses 2^-11, where in 16 bits it would lose 2^-8.
"""

import triton
import triton.language as tl

from gdn.backends.triton.lib import decay, dot, exist, softplus, strength


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
def exist_in(vs, V: tl.constexpr, STRIPS: tl.constexpr):
    """Which columns of a strip lie below V; a constant where whole programs do."""
    if (STRIPS * vs.shape[0] + V) % (STRIPS * vs.shape[0]) == 0:
        return tl.full(vs.shape, True, tl.int1)
    else:
        return vs < V


@triton.jit
def state_at(
    ptr, ks, vs, state_k, state_v, K: tl.constexpr, V: tl.constexpr, UNIT: tl.constexpr, AXIS: tl.constexpr,
    STRIPS: tl.constexpr = 1,
):  # fmt: skip
    """Pointers and mask [ks, vs] of a state with strides in UNITs; along AXIS it is contiguous."""
    mask = exist(ks, K)[:, None] & exist_in(vs, V, STRIPS)[None, :]
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
    """Sums of g from the packet's start, fp64, and beta, of a row and head; beta is 0 past its end."""
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
def twice(x):
    """A number for each token as one for each row: q's, then k's."""
    return tl.reshape(tl.broadcast_to(x[None, :], [2, x.shape[0]]), [2 * x.shape[0]])


@triton.jit
def row(BT: tl.constexpr):
    """Rows of q and k, the tokens that they are of, and which are k's."""
    rows = tl.arange(0, 2 * BT)
    return rows, rows % BT, rows >= BT


@triton.jit
def operand(
    q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K: tl.constexpr, BT: tl.constexpr, UNIT: tl.constexpr,
    DENSE: tl.constexpr,
):  # fmt: skip
    """[q; k] of some keys [2 BT, ks], zeros past the packet's end."""
    _rows, tokens, is_k = row(BT)
    mask = (tokens < count)[:, None] & exist(ks, K)[None, :]
    q = tl.load(
        rows_at(q_ptr, tokens, ks, q_t, q_k, UNIT, DENSE), mask=mask & (is_k == 0)[:, None], other=0.0
    )
    k = tl.load(rows_at(k_ptr, tokens, ks, k_t, k_k, UNIT, DENSE), mask=mask & is_k[:, None], other=0.0)
    return tl.where(is_k[:, None], k, q)


@triton.jit
def operands(
    q_ptr, k_ptr, count, q_t, k_t, q_k, k_k, K: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """X of the first keys, and X X^T. Where BS keys are not all, X is read again, block by block."""
    X = operand(q_ptr, k_ptr, tl.arange(0, BS), count, q_t, k_t, q_k, k_k, K, BT, UNIT, DENSE)
    XX = dot(X, tl.trans(X), None, FINE)
    if BS < K:
        for start in range(BS, K, BS):
            ks = start + tl.arange(0, BS)
            more = operand(q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K, BT, UNIT, DENSE)
            XX = dot(more, tl.trans(more), XX, FINE)
    return X, XX


@triton.jit
def among(
    XX, high, low, beta, scale, BT: tl.constexpr, LEVELS: tl.constexpr, NORM: tl.constexpr, FINE: tl.constexpr
):
    """What tokens are to one another, by rows: P, (I + A)^-1, and what scales rows of q and of k."""
    i, _tokens, is_k = row(BT)
    rstd = tl.full([2 * BT], 1.0, tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(tl.where(i[:, None] == i[None, :], XX, 0.0), 1) + 1e-6)
    D = decay(high[None, :], low[None, :], high[:, None], low[:, None])
    P = tl.where((i < BT)[:, None] & is_k[None, :] & (i[None, :] <= i[:, None] + BT), XX * D, 0.0)
    A = XX * D * (beta * rstd)[:, None] * rstd[None, :]
    A = tl.where(is_k[None, :] & (i[None, :] < i[:, None]), A, 0.0)
    if LEVELS > 0:
        A = _inverse(A, LEVELS, FINE)
    return P, A, rstd * tl.where(is_k, 1.0, scale)


@triton.jit
def seen_of(
    X, q_ptr, k_ptr, state_ptr, vs, count, q_t, k_t, q_k, k_k, state_k, state_v, K: tl.constexpr,
    V: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, STRIPS: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, STATE_UNIT: tl.constexpr, AXIS: tl.constexpr, DENSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """X S [2 BT, vs]."""
    seen = tl.zeros([2 * BT, vs.shape[0]], tl.float32)
    if BS < K:
        for start in tl.range(0, K, BS, num_stages=STAGES):
            ks = start + tl.arange(0, BS)
            place, in_state = state_at(state_ptr, ks, vs, state_k, state_v, K, V, STATE_UNIT, AXIS, STRIPS)
            S = tl.load(place, mask=in_state, other=0.0)
            X = operand(q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K, BT, UNIT, DENSE)
            seen = mixed(X, S, seen, PRECISION)
    else:
        place, in_state = state_at(
            state_ptr, tl.arange(0, BS), vs, state_k, state_v, K, V, STATE_UNIT, AXIS, STRIPS
        )
        seen = mixed(X, tl.load(place, mask=in_state, other=0.0), seen, PRECISION)
    return seen


@triton.jit
def answered(
    seen, v, beta, rate, P, A_inv, LEVELS: tl.constexpr, PRECISION: tl.constexpr, FINE: tl.constexpr
):
    """o in rows of q, and u in rows of k, from v in those and what all rows see of the state."""
    is_k = tl.arange(0, v.shape[0]) >= v.shape[0] // 2
    r = tl.where(is_k[:, None], beta[:, None] * (v.to(tl.float32) - seen * rate[:, None]), 0.0)
    if LEVELS > 0:
        r = dot(A_inv, r, None, FINE)
    # what scales a row of q may be NaN, and is of no k
    u = tl.where(is_k[:, None], r * rate[:, None], 0.0)
    return dot(P, u, seen, PRECISION) * rate[:, None], u


@triton.jit
def _inverse(A, LEVELS: tl.constexpr, FINE: tl.constexpr):
    """(I + A)^-1 by doubling, as in `tril`, of blocks of 2^LEVELS rows; beyond them A is zero."""
    i = tl.arange(0, A.shape[0])[:, None]
    j = tl.arange(0, A.shape[0])[None, :]
    X = tl.where(i == j, 1.0, tl.where((i ^ j) == 1, -A, 0.0))
    for level in tl.static_range(1, LEVELS):
        L = tl.where((i ^ j) >> level == 1, A, 0.0)
        X -= dot(dot(X, L, None, FINE), X, None, FINE)
    return X


@triton.jit
def clear(
    o_ptr, count, block, o_t, o_v, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, STRIPS: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Zeros for all tokens of a row that has no slot, in STRIPS strips from `block` on."""
    zeros = tl.zeros([BT, BV], o_ptr.dtype.element_ty)
    for strip in range(block, block + STRIPS):
        vs = strip * BV + tl.arange(0, BV)
        for t in range(0, count, BT):
            tokens = t + tl.arange(0, BT)
            place = rows_at(o_ptr, tokens, vs, o_t, o_v, UNIT, DENSE)
            tl.store(place, zeros, mask=(tokens < count)[:, None] & (vs < V)[None, :])
