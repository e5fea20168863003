# mypy: disable-error-code="assignment, misc, var-annotated"
"""Provide the parts of the kernels of `packet` and `replay`.

An MMA takes 16 rows X: [q; k] of up to 8 tokens as one part, or q and then k of up to 16 tokens as two parts.
X S are the products of the rows with a state; X k^T has q k^T, k k^T and, on diagonals, squared norms. With
W = (P + I) (I + A)^-1, where P is in q's rows and I in k's,

    r = beta (v - e^G k S);   o = e^G q S + W r in q's rows;   u = W r in k's rows.

A program is one warp or two. It computes W once and loops over STRIPS strips of BV columns of the state;
where rows and heads are few, each strip has its own program.

MMAs use raw q and k, and norms scale their results, as in the chunked rule. u is d times the inverse norm of
k, so S gains k u^T with the raw k. Where operands of two dtypes meet, the 16-bit one is exact: an fp32 state
is rounded to 2^-11 (tf32), and u to 2^-16 as split bf16 (hi + lo); a single bf16 would round to 2^-8.
"""

import triton
import triton.language as tl

from gdn.backends.triton.lib import activate_beta, decay, dot, exist, softplus, split_bf16

ROWS = tl.constexpr(16)  # rows of an MMA on tensor cores


@triton.jit
def slot_of(
    row, N, columns, entries, read_index_ptr, num_accepted_ptr, ring_pos_ptr, read_n, read_c, accepted_n,
    ring_n,
):  # fmt: skip
    """Return the slot that a row reads, -1 if the row has none, and the entry of its ring."""
    slot = row  # without an index, row n has slot n
    if read_index_ptr is not None:
        read_index_ptr += row * read_n
        if num_accepted_ptr is not None:
            accepted = tl.load(num_accepted_ptr + row * accepted_n, mask=row < N, other=1).to(tl.int64)
            read_index_ptr += (tl.minimum(tl.maximum(accepted, 1), columns) - 1) * read_c
        slot = tl.load(read_index_ptr, mask=row < N, other=-1).to(tl.int64)
    entry = tl.full([], 0, tl.int64)
    if ring_pos_ptr is not None:  # a ring: the entry is taken modulo its length
        entry = (tl.load(ring_pos_ptr + row * ring_n, mask=row < N, other=0) % entries).to(tl.int64)
        entry = tl.where(entry < 0, entry + entries, entry)
    return slot, entry


@triton.jit
def rows_at(
    ptr, rows, columns, row_stride, column_stride, UNIT: tl.constexpr, DENSE: tl.constexpr, NEAR: tl.constexpr
):  # fmt: skip
    """Return pointers [rows, columns]; row strides are in UNITs. NEAR: all offsets fit into 32 bits."""
    if not DENSE:
        columns = _offsets(columns, column_stride, 1, NEAR)  # dense columns are constant offsets
    return ptr + (_offsets(rows, row_stride, UNIT, NEAR)[:, None] + columns[None, :])


@triton.jit
def _offsets(places, stride, UNIT: tl.constexpr, NEAR: tl.constexpr):
    if NEAR:
        return places * (stride * UNIT).to(tl.int32)  # 32-bit offsets: half the registers
    else:
        return places.to(tl.int64) * stride * UNIT


@triton.jit
def exist_in(vs, left, V: tl.constexpr, STRIPS: tl.constexpr):
    """Return a mask of the strip's columns below `left`; a constant True if V fills whole programs."""
    if (STRIPS * vs.shape[0] + V) % (STRIPS * vs.shape[0]) == 0:
        return tl.full(vs.shape, True, tl.int1)
    else:
        return vs < left


@triton.jit
def from_column(ptr, column, stride, DENSE: tl.constexpr):
    """Return a pointer to a column, so that the tiles of a strip have constant offsets from it."""
    if DENSE:
        return ptr + column
    else:
        return ptr + column.to(tl.int64) * stride


@triton.jit
def state_at(
    ptr, ks, vs, left, state_k, state_v, K: tl.constexpr, V: tl.constexpr, LINE: tl.constexpr,
    UNIT: tl.constexpr, AXIS: tl.constexpr, NEAR: tl.constexpr, STRIPS: tl.constexpr = 1,
):  # fmt: skip
    """Return pointers and mask [ks, vs] of a state with strides in UNITs; it is contiguous along AXIS.

    LINE: the stride of the other axis in elements if it is known to the compiler, else 0.
    """
    mask = exist(ks, K)[:, None] & exist_in(vs, left, V, STRIPS)[None, :]
    if AXIS != "k":
        ks = ks * LINE if LINE > 0 else _offsets(ks, state_k, UNIT, NEAR)
    if AXIS != "v":
        vs = vs * LINE if LINE > 0 else _offsets(vs, state_v, UNIT, NEAR)
    return ptr + (ks[:, None] + vs[None, :]), mask


@triton.jit
def tile_at(
    ptr, ks, vs, left, state_k, state_v, K: tl.constexpr, V: tl.constexpr, LINE: tl.constexpr,
    UNIT: tl.constexpr, AXIS: tl.constexpr, NEAR: tl.constexpr, STRIPS: tl.constexpr = 1,
):  # fmt: skip
    """Return pointers and mask of a tile to write: [vs, ks] if keys are contiguous, else [ks, vs]."""
    if AXIS == "k":
        mask = exist_in(vs, left, V, STRIPS)[:, None] & exist(ks, K)[None, :]
        vs = vs * LINE if LINE > 0 else _offsets(vs, state_v, UNIT, NEAR)
        return ptr + (vs[:, None] + ks[None, :]), mask
    else:
        return state_at(ptr, ks, vs, left, state_k, state_v, K, V, LINE, UNIT, AXIS, NEAR, STRIPS)


@triton.jit
def grown_by(S, k, u, AXIS: tl.constexpr, PRECISION: tl.constexpr):
    """Return S + k^T u for a tile laid out as in `tile_at`; k is [tokens, ks], u [tokens, vs]."""
    if AXIS == "k":
        return mixed(tl.trans(u), k, S, PRECISION)
    else:
        return mixed(tl.trans(k), u, S, PRECISION)


@triton.jit
def close(x, y, acc, FINE: tl.constexpr):
    """Return x y + acc of fp32 operands, to 2^-16 if FINE is "bf16": three MMAs of hi and lo halves."""
    if FINE == "bf16":
        x_high, x_low = split_bf16(x, tl.bfloat16)
        y_high, y_low = split_bf16(y, tl.bfloat16)
        acc = dot(x_low, y_high, acc, "tf32")  # small terms first
        acc = dot(x_high, y_low, acc, "tf32")
        return dot(x_high, y_high, acc, "tf32")
    else:
        return dot(x, y, acc, FINE)


@triton.jit
def mixed(x, y, acc, PRECISION: tl.constexpr):
    """Return x y + acc. In tf32, fp32 x meets bf16 y as split bf16 (hi + lo); other mixes become fp32."""
    if x.dtype == y.dtype:
        return dot(x, y, acc, PRECISION)
    elif (PRECISION == "tf32") & (x.dtype == tl.float32) & (y.dtype == tl.bfloat16):
        high, low = split_bf16(x, tl.bfloat16)
        return dot(high, y, dot(low, y, acc, PRECISION), PRECISION)
    else:
        return dot(x.to(tl.float32), y.to(tl.float32), acc, PRECISION)


@triton.jit
def gates_of(
    g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, n, first, head, count, g_b, g_t, g_h, beta_b,
    beta_t, beta_h, A_log_h, dt_bias_h, BT: tl.constexpr, NEGATIVE: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """Return fp64 sums of g from the packet's start, and beta, of a row and head; beta is 0 past its end."""
    tokens = tl.arange(0, BT)
    is_token = tokens < count
    RAW: tl.constexpr = a_ptr is not None
    if RAW:
        g_ptr, beta_ptr = a_ptr, b_ptr
        A_log_ptr += head * A_log_h
    if g_ptr is not None:
        g_ptr += n * g_b + first * g_t + head * g_h
    if beta_ptr is not None:
        beta_ptr += n * beta_b + first * beta_t + head * beta_h
    if dt_bias_ptr is not None:
        dt_bias_ptr += head * dt_bias_h
    if g_ptr is None:
        g = tl.zeros(tokens.shape, tl.float32)
    else:
        g = tl.load(g_ptr + tokens.to(tl.int64) * g_t, mask=is_token, other=0.0).to(tl.float32)
        if RAW:
            if dt_bias_ptr is not None:
                g += tl.load(dt_bias_ptr).to(tl.float32)
            g = -tl.exp(tl.load(A_log_ptr).to(tl.float32)) * softplus(g)
    # g = -inf counts as RESET: e^RESET is 0, and sums with it are finite. tl.where keeps NaN:
    # tl.maximum(NaN, RESET) is RESET on a GPU
    g = tl.where(is_token, tl.where(g < RESET, RESET, g), 0.0)
    if beta_ptr is None:
        beta = tl.full(tokens.shape, 1.0, tl.float32)
    else:
        beta = activate_beta(
            tl.load(beta_ptr + tokens.to(tl.int64) * beta_t, mask=is_token, other=0.0), RAW, NEGATIVE
        )
    return tl.cumsum(g.to(tl.float64), 0), tl.where(is_token, beta, 0.0)


@triton.jit
def by_rows(x):
    """Spread one value per token over the rows of a part."""
    BT: tl.constexpr = x.shape[0]
    if BT == ROWS:
        return x
    else:
        return tl.reshape(tl.broadcast_to(x[None, :], [ROWS // BT, BT]), [ROWS])


@triton.jit
def row(part: tl.constexpr, BT: tl.constexpr):
    """Return the token of each row of a part, and which rows hold keys."""
    rows = tl.arange(0, ROWS)
    if BT == ROWS:
        return rows, tl.full([ROWS], part == 1, tl.int1)
    else:
        return rows % BT, rows >= BT


@triton.jit
def operand(
    part: tl.constexpr, q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K: tl.constexpr, BT: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Load some keys of a part [16, ks]; zeros past the packet's end."""
    tokens, is_k = row(part, BT)
    mask = (tokens < count)[:, None] & exist(ks, K)[None, :]  # masked lanes load nothing from HBM
    q_at = rows_at(q_ptr, tokens, ks, q_t, q_k, UNIT, DENSE, NEAR)
    k_at = rows_at(k_ptr, tokens, ks, k_t, k_k, UNIT, DENSE, NEAR)
    if BT == ROWS:
        if part == 0:
            return tl.load(q_at, mask=mask, other=0.0)
        else:
            return tl.load(k_at, mask=mask, other=0.0)
    else:
        q = tl.load(q_at, mask=mask & (is_k == 0)[:, None], other=0.0)
        k = tl.load(k_at, mask=mask & is_k[:, None], other=0.0)
        return tl.where(is_k[:, None], k, q)


@triton.jit
def operands(
    q_ptr, k_ptr, count, q_t, k_t, q_k, k_k, K: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the first BS keys of all parts, X k^T by parts, and q q^T (X k^T itself if there is one part).

    Keys beyond BS do not fit into registers and are loaded again where they are needed.
    """
    PARTS: tl.constexpr = 2 * BT // ROWS
    ks = tl.arange(0, BS)
    first = operand(0, q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K, BT, UNIT, DENSE, NEAR)
    last = first
    if PARTS == 2:
        last = operand(1, q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K, BT, UNIT, DENSE, NEAR)
    kk = dot(last, tl.trans(last), None, PRECISION)  # 16 x 16 results in registers
    qk, qq = kk, kk
    if PARTS == 2:
        qk, qq = dot(first, tl.trans(last), None, PRECISION), dot(first, tl.trans(first), None, PRECISION)
    if BS < K:
        for start in range(BS, K, BS):
            ks = start + tl.arange(0, BS)
            k = operand(PARTS - 1, q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K, BT, UNIT, DENSE, NEAR)
            kk = dot(k, tl.trans(k), kk, PRECISION)
            if PARTS == 2:
                q = operand(0, q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K, BT, UNIT, DENSE, NEAR)
                qk, qq = dot(q, tl.trans(k), qk, PRECISION), dot(q, tl.trans(q), qq, PRECISION)
    if PARTS == 2:
        return (first, last), (qk, kk), qq
    else:
        return (last,), (kk,), kk


@triton.jit
def among(
    XK, QQ, high, low, beta, scale, BT: tl.constexpr, LEVELS: tl.constexpr, NORM: tl.constexpr,
    FINE: tl.constexpr,
):  # fmt: skip
    """Return, by parts, W with its row scales applied, and the scales of rows (scale and inverse norms)."""
    PARTS: tl.constexpr = 2 * BT // ROWS
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    # sums of log decays are hi + lo pairs: differences of large sums would cancel in fp32
    D = decay(high[None, :], low[None, :], high[:, None], low[:, None])  # one exponential per pair
    # D may be anything above the diagonal: A and P are masked
    rates = ()
    for part in tl.static_range(PARTS):
        _tokens, is_k = row(part, BT)
        rate = tl.where(is_k, 1.0, scale)
        if NORM:
            squares = XK[PARTS - 1] if part == PARTS - 1 else QQ
            rate *= tl.rsqrt(tl.sum(tl.where(i == j, squares, 0.0), 1) + 1e-6)
        rates = rates + (rate,)
    _tokens, is_k = row(PARTS - 1, BT)
    # A, its inverse and P are 16 x 16 in the registers of one warp
    A = XK[PARTS - 1] * D * (beta * rates[PARTS - 1])[:, None] * rates[PARTS - 1][None, :]
    A_inv = _inverse(tl.where(is_k[None, :] & (j < i), A, 0.0), LEVELS, FINE)
    P = XK[0] * D * rates[PARTS - 1][None, :]
    if PARTS == 2:
        W = close(tl.where(j <= i, P, 0.0), A_inv, None, FINE)
        return (W * rates[0][:, None], A_inv * rates[1][:, None]), rates
    else:
        # in q's columns, where r is zero, A_inv is the identity
        P = tl.where(is_k[None, :] & (j <= i + BT) & (i < BT), P, 0.0)
        return (close(P, A_inv, A_inv, FINE) * rates[0][:, None],), rates


@triton.jit
def seen_of(
    X, q_ptr, k_ptr, state_ptr, vs, left, count, q_t, k_t, q_k, k_k, state_k, state_v, K: tl.constexpr,
    V: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, STRIPS: tl.constexpr, STAGES: tl.constexpr,
    LINE: tl.constexpr, UNIT: tl.constexpr, STATE_UNIT: tl.constexpr, AXIS: tl.constexpr,
    DENSE: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return X S by parts, each [16, vs]."""
    PARTS: tl.constexpr = 2 * BT // ROWS
    last = tl.zeros([ROWS, vs.shape[0]], tl.float32)
    first = last
    if BS < K:
        for start in tl.range(0, K, BS, num_stages=STAGES):
            ks = start + tl.arange(0, BS)
            # the pipeliner keeps STAGES - 1 blocks of S in flight from HBM
            place, in_state = state_at(
                state_ptr, ks, vs, left, state_k, state_v, K, V, LINE, STATE_UNIT, AXIS, NEAR, STRIPS
            )
            S = tl.load(place, mask=in_state, other=0.0)
            k = operand(PARTS - 1, q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K, BT, UNIT, DENSE, NEAR)
            last = mixed(k, S, last, PRECISION)
            if PARTS == 2:
                q = operand(0, q_ptr, k_ptr, ks, count, q_t, k_t, q_k, k_k, K, BT, UNIT, DENSE, NEAR)
                first = mixed(q, S, first, PRECISION)
    else:
        ks = tl.arange(0, BS)
        place, in_state = state_at(
            state_ptr, ks, vs, left, state_k, state_v, K, V, LINE, STATE_UNIT, AXIS, NEAR, STRIPS
        )
        # all keys fit: X is already in registers, and S is loaded once
        S = tl.load(place, mask=in_state, other=0.0)
        last = mixed(X[PARTS - 1], S, last, PRECISION)
        if PARTS == 2:
            first = mixed(X[0], S, first, PRECISION)
    if PARTS == 2:
        return first, last
    else:
        return (last,)


@triton.jit
def scaled(seen, rates, grown):
    """Scale all parts by rows."""
    found = ()
    # elementwise on accumulators, in registers
    for part in tl.static_range(len(seen)):
        found = found + (seen[part] * (rates[part] * grown)[:, None],)
    return found


@triton.jit
def answered(seen, v, beta, W, BT: tl.constexpr, FINE: tl.constexpr):
    """Return by parts o in q's rows and u in k's rows, from v and the scaled products of rows and state."""
    PARTS: tl.constexpr = 2 * BT // ROWS
    _tokens, is_k = row(PARTS - 1, BT)
    r = beta[:, None] * (v.to(tl.float32) - seen[PARTS - 1])
    if PARTS == 2:
        return close(W[0], r, seen[0], FINE), close(W[1], r, None, FINE)
    else:
        # the products of q's rows may be NaN, and must not reach k's rows
        r = tl.where(is_k[:, None], r, 0.0)
        return (close(W[0], r, tl.where(is_k[:, None], 0.0, seen[0]), FINE),)


@triton.jit
def store_outputs(
    o_ptr, found, vs, left, count, o_t, o_v, V: tl.constexpr, BT: tl.constexpr, STRIPS: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Store o, which is in q's rows of the first part."""
    tokens, is_k = row(0, BT)
    mask = ((tokens < count) & (is_k == 0))[:, None] & exist_in(vs, left, V, STRIPS)[None, :]
    o_at = rows_at(o_ptr, tokens, vs, o_t, o_v, UNIT, DENSE, NEAR)
    tl.store(o_at, found[0].to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _inverse(A, LEVELS: tl.constexpr, FINE: tl.constexpr):
    """Return (I + A)^-1 by doubling, as in `tril`, of blocks of 2^LEVELS rows; A is zero beyond them."""
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    X = tl.where(i == j, 1.0, 0.0)
    if LEVELS > 0:  # the first doubling needs no MMA
        X = tl.where((i ^ j) == 1, -A, X)
    for level in tl.static_range(1, LEVELS):
        L = tl.where((i ^ j) >> level == 1, A, 0.0)
        X -= close(close(X, L, None, FINE), X, None, FINE)  # 16 x 16 MMAs by one warp
    return X


@triton.jit
def clear(
    o_ptr, count, block, o_t, o_v, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, STRIPS: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Store zeros for all tokens of a row without a slot, in STRIPS strips from `block` on."""
    zeros = tl.zeros([BT, BV], o_ptr.dtype.element_ty)
    for strip in range(block, block + STRIPS):
        vs = strip * BV + tl.arange(0, BV)
        for t in range(0, count, BT):
            tokens = t + tl.arange(0, BT)
            place = rows_at(o_ptr, tokens, vs, o_t, o_v, UNIT, DENSE, False)
            tl.store(place, zeros, mask=(tokens < count)[:, None] & (vs < V)[None, :])
