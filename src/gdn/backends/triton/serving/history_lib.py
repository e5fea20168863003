# mypy: disable-error-code="assignment, var-annotated"
"""Provide the parts of the kernels that read histories: places, cursor, fold of one strip, a single token."""

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.lib import column_mask, decay, split_fp64
from gdn.backends.triton.rule.channels import double_pieces
from gdn.backends.triton.serving.packet_lib import (
    ROWS,
    add_outer_product,
    output_strip_pointers,
    row_pointers,
    strip_mask,
    tokens_of_rows,
)
from gdn.backends.triton.serving.pool_lib import LEVELS, MAGIC, SHORT_LEVELS, STEPS, rounding_of


@jit
def ring_places(old, history):
    """Return the places of a history's tokens `old`, which are counted from its first one."""
    if history.first is None:
        return old
    else:
        places = old + history.first
        return tl.where(places >= history.places, places - history.places, places)


@jit
def load_history_G(history, old):
    """Load G of a history's tokens, split into hi + lo; 0 past its end."""
    places = ring_places(old, history).to(tl.int64)
    return split_fp64(
        tl.load(history.G_ptr + places * history.G_p, mask=old < history.count, other=0.0).to(tl.float64)
    )


@jit
def load_history_u(history, u_ptr, start, vs, has_value, C: tl.constexpr):
    """Load u of BP places [BP, vs]; u_ptr points to the strip's first column."""
    old = start + tl.arange(0, C.BP)
    places = ring_places(old, history)
    place = row_pointers(u_ptr, places, vs, history.u_p, 1, C.PAST_UNIT, True, C.NEAR)
    return tl.load(place, mask=(old < history.count)[:, None] & has_value, other=0.0)


@jit
def history_length(cursor, accepted, room, places):
    """Return how many places are in use after the accepted tokens are added."""
    start = tl.minimum(tl.maximum(cursor.to(tl.int64), 0), places)
    return tl.minimum(start + tl.minimum(tl.maximum(accepted.to(tl.int64), 0), room), places)


@jit
def load_history_k(history, start, end, ks, C: tl.constexpr):
    """Load k of BP places [BP, ks], and return the decay of each up to the end."""
    old = start + tl.arange(0, C.BP)
    mask = (old < history.count)[:, None] & column_mask(ks, C.K)[None, :]
    places = ring_places(old, history)
    k = tl.load(
        row_pointers(history.k_ptr, places, ks, history.k_p, 1, C.PAST_UNIT, True, C.NEAR),
        mask=mask,
        other=0.0,
    )
    old_high, old_low = load_history_G(history, old)
    return k, decay(old_high, old_low, end.high, end.low)


@jit
def load_past_rows(history, G_k, start, ks, later, C: tl.constexpr):
    """Load BP places of a history: return k, decayed up to its end, in fp32 [BP, ks], and the sums of g.

    later [ks]: the sums of g over the places after these. The sums that are returned begin at `start`.
    """
    old = start + tl.arange(0, C.BP)
    places = ring_places(old, history)
    mask = (old < history.count)[:, None] & column_mask(ks, C.K)[None, :]
    k_at = row_pointers(history.k_ptr, places, ks, history.k_p, 1, C.PAST_UNIT, True, C.NEAR)
    k = tl.load(k_at, mask=mask, other=0.0).to(tl.float32)
    channels = ks if G_k is None else ks * G_k
    g_at = history.G_ptr + (places.to(tl.int64) * history.G_p)[:, None] + channels[None, :]
    g = tl.load(g_at, mask=mask, other=0.0).to(tl.float32)
    before = tl.reshape(g, (1, C.BP, ks.shape[0]))
    after = tl.zeros_like(before)
    # sums over 2, 4, 8, 16 places, in registers
    for level in range(4):
        before, after = double_pieces(before, after, level)
    after = tl.reshape(after, (C.BP, ks.shape[0])) + later[None, :]
    return k * tl.exp(after), later + tl.sum(g, 0)


@jit
def fold_channels(S, history, G_k, column, tile, C: tl.constexpr):
    """Return a tile of a state in fp32 after a history with a decay per key channel; tile: ks, vs, has_value.

    S <- Diag(e^(g_0 + .. + g_(P-1))) S + sum_(j < P) (e^(g_(j+1) + .. + g_(P-1)) k_j) u_j^T

    The sums go from the newest place backwards, 16 places at a time. They have terms of one sign, so a reset
    of a channel leaves the digits of all later tokens, and the exponents are never positive.
    """
    ks, vs, has_value = tile
    sums = tl.zeros(ks.shape, tl.float32)
    added = tl.zeros(S.shape, tl.float32)
    start = (history.count - 1) // C.BP * C.BP
    for _ in range((history.count + C.BP - 1) // C.BP):
        k_out, sums = load_past_rows(history, G_k, start, ks, sums, C)
        u = load_history_u(history, history.u_ptr + column, start, vs, has_value, C).to(tl.float32)
        # MMAs on tensor cores accumulate in registers
        added = add_outer_product(added, k_out, u, C.AXIS, C.FOLD_PRECISION)
        start -= C.BP
    if C.AXIS == "k":
        return S.to(tl.float32) * tl.exp(sums)[None, :] + added
    else:
        return S.to(tl.float32) * tl.exp(sums)[:, None] + added


@jit
def load_cursor(cursor_ptr, accepted_ptr, room, places):
    """Load the first place of a slot's history, and the places in use with the drafts that are kept."""
    first = tl.minimum(tl.maximum(tl.load(cursor_ptr), 0), places - 1)
    used = tl.maximum(tl.load(cursor_ptr + 1), 0)
    if accepted_ptr is not None:
        # clamped before it becomes 32 bits wide: any count is safe
        used += tl.minimum(tl.maximum(tl.load(accepted_ptr).to(tl.int64), 0), room).to(tl.int32)
    return first, tl.minimum(used, places - room)


@jit
def store_cursor(cursor_ptr, first, used, programs):
    """Count one more of a row's programs as done; the last one stores the cursor.

    Call it last. Every program has then used the cursor that it loaded from HBM, so the store reaches none of
    them. Nothing else is read by other programs of the launch, so the atomic orders no other memory.
    """
    tl.debug_barrier()
    done = tl.atomic_add(cursor_ptr + 2, 1, sem="relaxed")
    if done == programs - 1:
        tl.store(cursor_ptr, first)
        tl.store(cursor_ptr + 1, used)
        tl.store(cursor_ptr + 2, 0)


@jit
def fold_strip(state, scales, history, end, column, C: tl.constexpr):
    """Fold a history into some value columns of a state: S <- e^(G_P) S + sum_j e^(G_P - G_j) k_j u_j^T.

    end: the sums G_P; None for a decay per key channel, which is folded as in `fold_channels`.
    A tile of BK keys is in fp32 registers at a time; k and u of the history come from L2. The scale of a
    column of integers needs its largest element, and registers do not hold all tiles, so they are made twice.
    """
    if scales.ptr is None:
        for start in range(0, C.K, C.BK):
            factor = None if end is None else tl.exp(end.high)
            place, in_state, S = fold_tile(state, scales, history, end, column, start, factor, C)
            tl.store(place, S.to(state.ptr.dtype.element_ty), mask=in_state)
    else:
        at = column_scale_pointers(scales, column, state.vs)
        has_value = strip_mask(state.vs, state.left, C.V, C.STRIPS)
        factor = tl.load(at, mask=has_value, other=0.0)
        factor = across_keys(factor if end is None else factor * tl.exp(end.high), C.AXIS)
        largest = tl.zeros(state.vs.shape, tl.float32)
        for start in range(0, C.K, C.BK):
            _, _, S = fold_tile(state, scales, history, end, column, start, factor, C)
            # where a column has NaN all of it is NaN or infinite, so its scale is NaN
            most = tl.max(tl.abs(S), 1 if C.AXIS == "k" else 0)
            largest = tl.maximum(largest, most, propagate_nan=tl.PropagateNan.ALL)
        IS_SHORT: tl.constexpr = state.ptr.dtype.element_ty == tl.int8
        INT8: tl.constexpr = SHORT_LEVELS if scales.low_ptr is None else SHORT_LEVELS * STEPS
        inverse, new_scale = rounding_of(largest, INT8 if IS_SHORT else LEVELS)
        for start in range(0, C.K, C.BK):
            place, in_state, S = fold_tile(state, scales, history, end, column, start, factor, C)
            n = tl.fma(S, across_keys(inverse, C.AXIS), MAGIC)
            if scales.low_ptr is not None:
                n = store_remainder(n, scales, state, column, start, C)
            # the low bits of 1.5 * 2^23 + n are n
            tl.store(place, n.to(tl.int32, bitcast=True).to(state.ptr.dtype.element_ty), mask=in_state)
        tl.store(at, new_scale, mask=has_value)


@jit
def fold_tile(state, scales, history, end, column, start, factor, C: tl.constexpr):
    """Return pointers and mask of BK keys of a strip from `start` on, and S there after the fold, in fp32."""
    ks = start + tl.arange(0, C.BK)
    place, in_state = output_strip_pointers(state, ks, C)
    has_value = strip_mask(state.vs, state.left, C.V, C.STRIPS)[None, :]
    S = tl.load(place, mask=in_state, other=0.0).to(tl.float32)
    if scales.low_ptr is not None:
        S = S * STEPS + load_remainder(scales, state, column, start, C)
    if factor is not None:
        S *= factor
    if end is None:
        S = fold_channels(S, history, None, column, (ks, state.vs, has_value), C)
    else:
        for part in tl.static_range(C.PASTS):
            k, still = load_history_k(history, part * C.BP, end, ks, C)
            u = load_history_u(history, history.u_ptr + column, part * C.BP, state.vs, has_value, C)
            S = add_outer_product(S, k, u.to(tl.float32) * still[:, None], C.AXIS, C.FOLD_PRECISION)
    return place, in_state, S


@jit
def remainder_pointers(scales, state, column, start, C: tl.constexpr):
    """Return pointers and mask of the bytes of BK keys of a strip: [vs, BK / 2], or [BK / 2, vs]."""
    pairs = start // 2 + tl.arange(0, C.BK // 2)
    at_pair = pairs.to(tl.int64) * scales.low_pair
    at_column = (column + state.vs).to(tl.int64) * scales.low_column
    has_pair = column_mask(pairs, (C.K + 1) // 2)
    has_value = strip_mask(state.vs, state.left, C.V, C.STRIPS)
    if C.AXIS == "k":
        place = scales.low_ptr + at_column[:, None] + at_pair[None, :]
        return place, has_value[:, None] & has_pair[None, :]
    else:
        place = scales.low_ptr + at_pair[:, None] + at_column[None, :]
        return place, has_pair[:, None] & has_value[None, :]


@jit
def load_remainder(scales, state, column, start, C: tl.constexpr):
    """Load the remainders of a tile as in `fold_tile`, in fp32."""
    place, is_stored = remainder_pointers(scales, state, column, start, C)
    packed = tl.load(place, mask=is_stored, other=0).to(tl.int32)
    BV: tl.constexpr = state.vs.shape[0]
    # each byte goes to its two keys, in the registers of one lane
    if C.AXIS == "k":
        pairs = tl.reshape(tl.broadcast_to(packed[:, :, None], [BV, C.BK // 2, 2]), [BV, C.BK])
    else:
        pairs = tl.reshape(tl.broadcast_to(packed[:, None, :], [C.BK // 2, 2, BV]), [C.BK, BV])
    low = (pairs >> half_shifts(C)) & 15
    return ((low ^ 8) - 8).to(tl.float32)


@jit
def store_remainder(n, scales, state, column, start, C: tl.constexpr):
    """Store the remainders of the integers n of a tile, plus MAGIC; return their int8 parts, plus MAGIC."""
    n -= MAGIC
    # STEPS is odd, so no quotient is halfway between two integers
    high = tl.fma(n, 1 / STEPS, MAGIC)
    low = n - (high - MAGIC) * STEPS + MAGIC
    half = (low.to(tl.int32, bitcast=True) & 15) << half_shifts(C)
    BV: tl.constexpr = state.vs.shape[0]
    if C.AXIS == "k":
        packed = tl.sum(tl.reshape(half, [BV, C.BK // 2, 2]), 2)
    else:
        packed = tl.sum(tl.reshape(half, [C.BK // 2, 2, BV]), 1)
    place, is_stored = remainder_pointers(scales, state, column, start, C)
    tl.store(place, packed.to(tl.uint8), mask=is_stored)
    return high


@jit
def half_shifts(C: tl.constexpr):
    """Return the shift of each key's remainder in its byte, as a factor of tiles: 0 or 4."""
    shifts = tl.arange(0, C.BK) % 2 * 4
    return shifts[None, :] if C.AXIS == "k" else shifts[:, None]


@jit
def across_keys(x, AXIS: tl.constexpr):
    """Return a value per column as a factor of tiles as in `output_strip_pointers`."""
    return x[:, None] if AXIS == "k" else x[None, :]


@jit
def column_scale_pointers(scales, column, vs):
    """Return pointers to the scales of a strip's columns."""
    return scales.ptr + (column + vs).to(tl.int64) * scales.column


@jit
def apply_column_scales(XS, scales, column, vs, has_value):
    """Scale the products of rows with states in integers by the scales of columns, by parts."""
    column_scale = tl.load(column_scale_pointers(scales, column, vs)[None, :], mask=has_value, other=0.0)
    # what is read is int8, in steps of 15 scales
    if scales.low_ptr is not None:
        column_scale *= STEPS
    outputs = ()
    for part in tl.static_range(len(XS)):
        outputs = outputs + (XS[part] * column_scale,)
    return outputs


@jit
def solve_token(XK, scale, C: tl.constexpr):
    """Return the scores <q, k> and the scales of u by rows, and the scales of rows, as `solve_packet`.

    One token has no triangular system: r is d itself.
    """
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    _tokens, is_k = tokens_of_rows(0, C.BT)
    rate = tl.where(is_k, 1.0, scale)
    if C.NORM:
        rate *= tl.rsqrt(tl.sum(tl.where(i == j, XK[0], 0.0), 1) + 1e-6)
    score = tl.sum(tl.where(j == i + C.BT, XK[0], 0.0), 1) * rate * swap_halves(tl.where(is_k, rate, 0.0))
    return (tl.where(is_k, 0.0, score), rate), (rate,)


@jit
def swap_halves(x):
    """Return x, whose first 8 rows are zero, with its last 8 rows in both halves.

    In the layout of an MMA's result a lane holds rows i and i + 8, so nothing moves between lanes.
    """
    if len(x.shape) == 1:
        half = tl.sum(tl.reshape(x, [2, ROWS // 2]), 0)
        return tl.reshape(tl.broadcast_to(half[None, :], [2, ROWS // 2]), [ROWS])
    else:
        half = tl.sum(tl.reshape(x, [2, ROWS // 2, x.shape[1]]), 0)
        return tl.reshape(tl.broadcast_to(half[None, :, :], [2, ROWS // 2, x.shape[1]]), [ROWS, x.shape[1]])


@jit
def compute_token(XS, v, beta, W):
    """Return o in q's rows and u in k's rows, as `compute_outputs`, of one token: without an MMA."""
    scores, u_scale = W
    _tokens, is_k = tokens_of_rows(0, ROWS // 2)
    # the products of q's rows may be NaN, and must not reach k's rows
    r = tl.where(is_k[:, None], beta[:, None] * (v.to(tl.float32) - XS[0]), 0.0)
    o = XS[0] + scores[:, None] * swap_halves(r)
    return (tl.where(is_k[:, None], r * u_scale[:, None], o),)
