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

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.lib import column_mask, decay, dot, split_bf16
from gdn.backends.triton.serving.packet_solve import substitute

ROWS = tl.constexpr(16)  # rows of an MMA on tensor cores


@jit
def load_slot(row, N, slots):
    """Return the slot that a row reads, -1 if the row has none, and the entry of its ring."""
    slot = row  # without an index, row n has slot n
    if slots.read_index_ptr is not None:
        at = slots.read_index_ptr + row * slots.row_stride
        if slots.num_accepted_ptr is not None:
            accepted = tl.load(slots.num_accepted_ptr + row * slots.accepted_stride, mask=row < N, other=1)
            accepted = tl.minimum(tl.maximum(accepted.to(tl.int64), 1), slots.columns)
            at += (accepted - 1) * slots.column_stride
        slot = tl.load(at, mask=row < N, other=-1).to(tl.int64)
    entry = tl.full([], 0, tl.int64)
    if slots.ring_pos_ptr is not None:  # a ring: the entry is taken modulo its length
        ring_pos = tl.load(slots.ring_pos_ptr + row * slots.ring_stride, mask=row < N, other=0)
        entry = (ring_pos % slots.entries).to(tl.int64)
        entry = tl.where(entry < 0, entry + slots.entries, entry)
    return slot, entry


@jit
def row_pointers(
    ptr, rows, columns, row_stride, column_stride, UNIT: tl.constexpr, DENSE: tl.constexpr, NEAR: tl.constexpr
):  # fmt: skip
    """Return pointers [rows, columns]; row strides are in UNITs. NEAR: all offsets fit into 32 bits."""
    if not DENSE:
        columns = _offsets(columns, column_stride, 1, NEAR)  # dense columns are constant offsets
    return ptr + (_offsets(rows, row_stride, UNIT, NEAR)[:, None] + columns[None, :])


@jit
def _offsets(places, stride, UNIT: tl.constexpr, NEAR: tl.constexpr):
    if NEAR:
        return places * (stride * UNIT).to(tl.int32)  # 32-bit offsets: half the registers
    else:
        return places.to(tl.int64) * stride * UNIT


@jit
def strip_mask(vs, left, V: tl.constexpr, STRIPS: tl.constexpr):
    """Return a mask of the strip's columns below `left`; a constant True if V fills whole programs."""
    if (STRIPS * vs.shape[0] + V) % (STRIPS * vs.shape[0]) == 0:
        return tl.full(vs.shape, True, tl.int1)
    else:
        return vs < left


@jit
def column_pointer(ptr, column, stride, DENSE: tl.constexpr):
    """Return a pointer to a column, so that the tiles of a strip have constant offsets from it."""
    if DENSE:
        return ptr + column
    else:
        return ptr + column.to(tl.int64) * stride


@jit
def strip_pointers(strip, ks, C: tl.constexpr):
    """Return pointers and mask [ks, vs] of a state with strides in STATE_UNITs, contiguous along AXIS.

    LINE: the stride of the other axis in elements if it is known to the compiler, else 0.
    """
    mask = column_mask(ks, C.K)[:, None] & strip_mask(strip.vs, strip.left, C.V, C.STRIPS)[None, :]
    vs = strip.vs
    if C.AXIS != "k":
        ks = ks * C.LINE if C.LINE > 0 else _offsets(ks, strip.inner, C.STATE_UNIT, C.NEAR)
    if C.AXIS != "v":
        vs = vs * C.LINE if C.LINE > 0 else _offsets(vs, strip.outer, C.STATE_UNIT, C.NEAR)
    return strip.ptr + (ks[:, None] + vs[None, :]), mask


@jit
def output_strip_pointers(strip, ks, C: tl.constexpr):
    """Return pointers and mask of a tile to write: [vs, ks] if keys are contiguous, else [ks, vs]."""
    if C.AXIS == "k":
        mask = strip_mask(strip.vs, strip.left, C.V, C.STRIPS)[:, None] & column_mask(ks, C.K)[None, :]
        vs = strip.vs
        vs = vs * C.LINE if C.LINE > 0 else _offsets(vs, strip.outer, C.STATE_UNIT, C.NEAR)
        return strip.ptr + (vs[:, None] + ks[None, :]), mask
    else:
        return strip_pointers(strip, ks, C)


@jit
def add_outer_product(S, k, u, AXIS: tl.constexpr, PRECISION: tl.constexpr):
    """Return S + k^T u for a tile as in `output_strip_pointers`; k is [tokens, ks], u [tokens, vs]."""
    if AXIS == "k":
        return dot_mixed(tl.trans(u), k, S, PRECISION)
    else:
        return dot_mixed(tl.trans(k), u, S, PRECISION)


@jit
def dot_precise(x, y, acc, FP32_PRECISION: tl.constexpr):
    """Return x y + acc of fp32 operands; "bf16" is three MMAs of hi and lo halves, exact to 2^-16."""
    if FP32_PRECISION == "bf16":
        x_high, x_low = split_bf16(x, tl.bfloat16)
        y_high, y_low = split_bf16(y, tl.bfloat16)
        acc = dot(x_low, y_high, acc, "tf32")  # small terms first
        acc = dot(x_high, y_low, acc, "tf32")
        return dot(x_high, y_high, acc, "tf32")
    else:
        return dot(x, y, acc, FP32_PRECISION)


@jit
def dot_mixed(x, y, acc, PRECISION: tl.constexpr):
    """Return x y + acc. In tf32, fp32 x meets bf16 y as split bf16 (hi + lo); other mixes become fp32."""
    if x.dtype == y.dtype:
        return dot(x, y, acc, PRECISION)
    elif (PRECISION == "tf32") & (x.dtype == tl.float32) & (y.dtype == tl.bfloat16):
        high, low = split_bf16(x, tl.bfloat16)
        return dot(high, y, dot(low, y, acc, PRECISION), PRECISION)
    else:
        return dot(x.to(tl.float32), y.to(tl.float32), acc, PRECISION)


@jit
def dot_state(x, S, acc, PRECISION: tl.constexpr):
    """Return x S + acc as `dot_mixed`; integers S are exact: int16 as hi + lo of the dtype of x."""
    if S.dtype == tl.int8:
        return dot(x, S.to(x.dtype), acc, PRECISION)
    elif S.dtype == tl.int16:
        n = S.to(tl.float32)
        if x.dtype == tl.float32:
            return dot(x, n, acc, PRECISION)
        else:
            high, low = split_bf16(n, x.dtype)
            return dot(x, high, dot(x, low, acc, PRECISION), PRECISION)
    else:
        return dot_mixed(x, S, acc, PRECISION)


@jit
def spread_over_rows(x):
    """Spread one value per token over the rows of a part."""
    BT: tl.constexpr = x.shape[0]
    if BT == ROWS:
        return x
    else:
        return tl.reshape(tl.broadcast_to(x[None, :], [ROWS // BT, BT]), [ROWS])


@jit
def tokens_of_rows(part: tl.constexpr, BT: tl.constexpr):
    """Return the token of each row of a part, and which rows hold keys."""
    rows = tl.arange(0, ROWS)
    if BT == ROWS:
        return rows, tl.full([ROWS], part == 1, tl.int1)
    else:
        return rows % BT, rows >= BT


@jit
def load_rows(part: tl.constexpr, packet, ks, C: tl.constexpr):
    """Load some keys of a part [16, ks]; zeros past the packet's end."""
    tokens, is_k = tokens_of_rows(part, C.BT)
    mask = (tokens < packet.count)[:, None] & column_mask(ks, C.K)[
        None, :
    ]  # masked lanes load nothing from HBM
    q_at = row_pointers(packet.q_ptr, tokens, ks, packet.q_t, packet.q_k, C.UNIT, C.DENSE, C.NEAR)
    k_at = row_pointers(packet.k_ptr, tokens, ks, packet.k_t, packet.k_k, C.UNIT, C.DENSE, C.NEAR)
    if C.BT == ROWS:
        if part == 0:
            return tl.load(q_at, mask=mask, other=0.0)
        else:
            return tl.load(k_at, mask=mask, other=0.0)
    else:
        q = tl.load(q_at, mask=mask & (is_k == 0)[:, None], other=0.0)
        k = tl.load(k_at, mask=mask & is_k[:, None], other=0.0)
        return tl.where(is_k[:, None], k, q)


@jit
def load_operands(packet, C: tl.constexpr):
    """Return the first BS keys of all parts, X k^T by parts, and q q^T (X k^T if there is one part)."""
    X = load_parts(packet, C)
    XK, QQ = multiply_parts(X, packet, C)
    return X, XK, QQ


@jit
def load_parts(packet, C: tl.constexpr):
    """Load the first BS keys of all parts.

    Keys beyond BS do not fit into registers and are loaded again where they are needed.
    """
    ks = tl.arange(0, C.BS)
    first = load_rows(0, packet, ks, C)
    if 2 * C.BT == ROWS:
        return (first,)
    else:
        return first, load_rows(1, packet, ks, C)


@jit
def multiply_parts(X, packet, C: tl.constexpr):
    """Return X k^T by parts and q q^T, of all keys; X has the first BS."""
    PARTS: tl.constexpr = 2 * C.BT // ROWS
    first, last = X[0], X[PARTS - 1]
    kk = dot(last, tl.trans(last), None, C.PRECISION)  # 16 x 16 results in registers
    qk, qq = kk, kk
    if PARTS == 2:
        qk, qq = dot(first, tl.trans(last), None, C.PRECISION), dot(first, tl.trans(first), None, C.PRECISION)
    if C.BS < C.K:
        for start in range(C.BS, C.K, C.BS):
            ks = start + tl.arange(0, C.BS)
            k = load_rows(PARTS - 1, packet, ks, C)
            kk = dot(k, tl.trans(k), kk, C.PRECISION)
            if PARTS == 2:
                q = load_rows(0, packet, ks, C)
                qk, qq = dot(q, tl.trans(k), qk, C.PRECISION), dot(q, tl.trans(q), qq, C.PRECISION)
    if PARTS == 2:
        return (qk, kk), qq
    else:
        return (kk,), kk


@jit
def load_values(v, column, count, C: tl.constexpr):
    """Load v of a strip of columns [16, BV] in the rows that hold keys; other rows are zero."""
    tokens, is_k = tokens_of_rows(2 * C.BT // ROWS - 1, C.BT)
    vs = tl.arange(0, C.BV)
    has_value = strip_mask(vs, C.V - column, C.V, C.STRIPS)[None, :]
    v_ptr = column_pointer(v.ptr, column, v.outer, C.DENSE)
    v_at = row_pointers(v_ptr, tokens, vs, v.inner, v.outer, C.UNIT, C.DENSE, C.NEAR)
    return tl.load(v_at, mask=(is_k & (tokens < count))[:, None] & has_value, other=0.0)


@jit
def solve_packet(XK, QQ, high, low, beta, scale, C: tl.constexpr):
    """Return, by parts, W with its row scales applied, and the scales of rows (scale and inverse norms)."""
    PARTS: tl.constexpr = 2 * C.BT // ROWS
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    # sums of log decays are hi + lo pairs: differences of large sums would cancel in fp32
    D = decay(high[None, :], low[None, :], high[:, None], low[:, None])  # one exponential per pair
    # D may be anything above the diagonal: A and P are masked
    row_scales = ()
    for part in tl.static_range(PARTS):
        _tokens, is_k = tokens_of_rows(part, C.BT)
        rate = tl.where(is_k, 1.0, scale)
        if C.NORM:
            squares = XK[PARTS - 1] if part == PARTS - 1 else QQ
            rate *= tl.rsqrt(tl.sum(tl.where(i == j, squares, 0.0), 1) + 1e-6)
        row_scales = row_scales + (rate,)
    _tokens, is_k = tokens_of_rows(PARTS - 1, C.BT)
    # A, its inverse and P are 16 x 16 in the registers of one warp
    A = XK[PARTS - 1] * D * (beta * row_scales[PARTS - 1])[:, None] * row_scales[PARTS - 1][None, :]
    A = tl.where(is_k[None, :] & (j < i), A, 0.0)
    # of two tokens both need no MMA
    if C.SUBSTITUTES and C.LEVELS > 1:
        A_inv = substitute(A, C.LEVELS, C.SHUFFLES)
    else:
        A_inv = invert_unit_lower(A, C.LEVELS, C.FP32_PRECISION)
    P = XK[0] * D * row_scales[PARTS - 1][None, :]
    if PARTS == 2:
        W = dot_precise(tl.where(j <= i, P, 0.0), A_inv, None, C.FP32_PRECISION)
        return (W * row_scales[0][:, None], A_inv * row_scales[1][:, None]), row_scales
    else:
        # in q's columns, where r is zero, A_inv is the identity
        P = tl.where(is_k[None, :] & (j <= i + C.BT) & (i < C.BT), P, 0.0)
        return (dot_precise(P, A_inv, A_inv, C.FP32_PRECISION) * row_scales[0][:, None],), row_scales


@jit
def multiply_state(X, packet, strip, C: tl.constexpr):
    """Return X S by parts, each [16, vs]."""
    PARTS: tl.constexpr = 2 * C.BT // ROWS
    if C.BS >= C.K:
        # all keys fit: X is already in registers, and S is loaded once
        place, in_state = strip_pointers(strip, tl.arange(0, C.BS), C)
        return multiply_strip(X, tl.load(place, mask=in_state, other=0.0), C)
    else:
        last = tl.zeros([ROWS, strip.vs.shape[0]], tl.float32)
        first = last
        for start in tl.range(0, C.K, C.BS, num_stages=C.STAGES):
            ks = start + tl.arange(0, C.BS)
            # the pipeliner keeps STAGES - 1 blocks of S in flight from HBM
            place, in_state = strip_pointers(strip, ks, C)
            S = tl.load(place, mask=in_state, other=0.0)
            k = load_rows(PARTS - 1, packet, ks, C)
            last = dot_state(k, S, last, C.PRECISION)
            if PARTS == 2:
                q = load_rows(0, packet, ks, C)
                first = dot_state(q, S, first, C.PRECISION)
        if PARTS == 2:
            return first, last
        else:
            return (last,)


@jit
def multiply_strip(X, S, C: tl.constexpr):
    """Return X S by parts, of all keys of a strip [K, vs] of the state."""
    zeros = tl.zeros([ROWS, S.shape[1]], tl.float32)
    last = dot_state(X[len(X) - 1], S, zeros, C.PRECISION)
    if len(X) == 2:
        return dot_state(X[0], S, zeros, C.PRECISION), last
    else:
        return (last,)


@jit
def scale_rows(XS, row_scales, decays):
    """Scale all parts by rows."""
    outputs = ()
    # elementwise on accumulators, in registers
    for part in tl.static_range(len(XS)):
        outputs = outputs + (XS[part] * (row_scales[part] * decays)[:, None],)
    return outputs


@jit
def compute_outputs(XS, v, beta, W, BT: tl.constexpr, FP32_PRECISION: tl.constexpr):
    """Return by parts o in q's rows and u in k's rows, from v and the scaled products of rows and state."""
    PARTS: tl.constexpr = 2 * BT // ROWS
    _tokens, is_k = tokens_of_rows(PARTS - 1, BT)
    r = beta[:, None] * (v.to(tl.float32) - XS[PARTS - 1])
    if PARTS == 2:
        return dot_precise(W[0], r, XS[0], FP32_PRECISION), dot_precise(W[1], r, None, FP32_PRECISION)
    else:
        # the products of q's rows may be NaN, and must not reach k's rows
        r = tl.where(is_k[:, None], r, 0.0)
        return (dot_precise(W[0], r, tl.where(is_k[:, None], 0.0, XS[0]), FP32_PRECISION),)


@jit
def store_outputs(strip, outputs, count, C: tl.constexpr):
    """Store o, which is in q's rows of the first part."""
    tokens, is_k = tokens_of_rows(0, C.BT)
    mask = ((tokens < count) & (is_k == 0))[:, None] & strip_mask(strip.vs, strip.left, C.V, C.STRIPS)[
        None, :
    ]
    o_at = row_pointers(strip.ptr, tokens, strip.vs, strip.inner, strip.outer, C.UNIT, C.DENSE, C.NEAR)
    tl.store(o_at, outputs[0].to(strip.ptr.dtype.element_ty), mask=mask)


@jit
def invert_unit_lower(A, LEVELS: tl.constexpr, FP32_PRECISION: tl.constexpr):
    """Return (I + A)^-1 by doubling, as in `tril`, of blocks of 2^LEVELS rows; A is zero beyond them."""
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    X = tl.where(i == j, 1.0, 0.0)
    if LEVELS > 0:  # the first doubling needs no MMA
        X = tl.where((i ^ j) == 1, -A, X)
    for level in tl.static_range(1, LEVELS):
        L = tl.where((i ^ j) >> level == 1, A, 0.0)
        X -= dot_precise(
            dot_precise(X, L, None, FP32_PRECISION), X, None, FP32_PRECISION
        )  # 16 x 16 MMAs by one warp
    return X


@jit
def fill_outputs(o_ptr, start, end, value, block, o_t, o_v, C: tl.constexpr):
    """Store one value for a row's tokens from `start` to `end`, in STRIPS strips from `block` on.

    It is 0 for all tokens of a row without a slot, and NaN for those that a packet has no place for.
    """
    values = tl.full([C.BT, C.BV], value, o_ptr.dtype.element_ty)
    for strip in range(block, block + C.STRIPS):
        vs = strip * C.BV + tl.arange(0, C.BV)
        for t in range(start, end, C.BT):
            tokens = t + tl.arange(0, C.BT)
            place = row_pointers(o_ptr, tokens, vs, o_t, o_v, C.UNIT, C.DENSE, False)
            tl.store(place, values, mask=(tokens < end)[:, None] & (vs < C.V)[None, :])
