"""Run the value warpgroup of the gradient kernel: v_new, E and F of each value head, and gate terms.

    X = v - e^G k S;   u = beta X;   v_new = A_inv u;   w = e^(G_C - G) v_new
    E_ij = scale D_ij <do_i, v_new_j>, j <= i;   F_ij = -D_ij <dv_i, v_new_j>, j < i;   D_ij = e^(G_i - G_j)
    dbeta = <dr, v_new> / beta, or <dr, X> + row sums of F kk / beta where beta is small
    H_ij = (E qk + F kk)_ij;   dg_t has sum_{i >= t > j} H_ij, a prefix sum of column sums less row sums of H
    leaving_i = <w_i, k_i dS> + sum_j (H_ji - H_ij);   entering = -e^G <dv, k S>

w goes to the row warpgroup for dk; E and F, with both norms in them, for dq and dk.
"""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.backward.factors import DECAY, FROM, INTO, K_RSTD, OUT, Q_SCALE
from gdn.backends.hopper.backward.shared import (
    TINY,
    Sums,
    arrive,
    factor,
    gains,
    issue_state_mma,
    parts_of,
    place_of,
    split_bf16,
    split_tile,
    wait_empty,
    wait_full,
    zero_of,
)
from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import fence_async_shared, jit, opaque, warpgroup_mma, warpgroup_mma_wait
from gdn.backends.hopper.scan.operands import A_OPERAND, ACC_TOKENS, PER_COLUMN, PER_ROW, TOKEN_ROWS
from gdn.backends.hopper.scan.scheduler import STRIP
from gdn.backends.triton.rule.gradients import SMALL
from gdn.backends.triton.rule.pairs import CROSSING, DBETA, LEAVING
from gdn.backends.triton.rule.pairs import ROWS as SHARES


@jit
def compute_values(w):
    """Run the value warpgroup over all items of this CTA."""
    item_count = 0
    head_count = 0
    for item in range(gl.program_id(0), w.problem.items, gl.num_programs(0)):
        place = place_of(item, w.problem)
        if place.length > 0:
            k_stage = wait_full(item_count, w.turns.k_full)
            for n in range(w.problem.ratio):
                over_head(w, place, place.key_head * w.problem.ratio + n, head_count, k_stage, item_count)
                head_count += 1
            fence_async_shared()
            arrive(item_count, w.turns.k_empty)
            arrive(item_count, w.turns.q_empty)
            item_count += 1
        elif place.length < 0:
            clear_values(w, place)


@jit
def over_head(w, place, head, count, k_stage, item_count):
    """Compute one value head: its strips, then E, F and the gate terms."""
    stage = wait_full(count, w.turns.head_full)
    square = gl.zeros((C, C), gl.float32, ACC_TOKENS)
    row = gl.zeros((C,), gl.float32, PER_ROW)
    sums = Sums(square, square, row, row, row, row)
    STRIPS: gl.constexpr = w.D // STRIP
    for strip in range(STRIPS):
        sums = over_strip(w, place, head, strip, stage, count * STRIPS + strip, sums, k_stage)
    wait_full(item_count, w.turns.q_full)
    finish_head(w, place, head, stage, count, sums, k_stage)


@jit
def over_strip(w, place, head, strip, head_stage, count, sums, k_stage):
    """Add 64 value columns to E, F and the gate terms; publish w of these columns."""
    tiles = w.tiles
    stage = wait_full(count, w.turns.full)
    is_token = opaque(gl.arange(0, C, PER_ROW)) < place.length
    zeros = gl.zeros((C, STRIP), gl.float32, ACC_TOKENS)
    zero = zero_of(count)
    k = tiles.k.index(k_stage).reshape([C, w.D])
    if w.D == STRIP:
        # the row warpgroup has split S
        wait_full(count, w.turns.S_full)
    kS = issue_state_mma(k, w, stage, zeros)
    d_tile = tiles.d.index(stage).reshape([C, STRIP])
    d = d_tile.load(ACC_TOKENS).to(gl.float32)
    v = tiles.v.index(stage).reshape([C, STRIP]).load(ACC_TOKENS).to(gl.float32)
    beta, gain, _ = gains(tiles, head_stage, w.GIVEN_DR)
    kS = warpgroup_mma_wait(0, deps=(kS,))
    entering = sums.entering + gl.sum(d * kS, 1)
    X = v + kS * factor(tiles, head_stage, INTO, PER_ROW)[:, None]
    apart = sums.apart + gl.sum(d * X, 1)
    # rows past the end are another sequence's, and may be NaN: A_inv would spread them
    u = beta[:, None] * X
    if place.length < C:
        u = gl.where(is_token[:, None], u, 0.0)
    if strip == 0:
        wait_full(count // (w.D // STRIP), w.turns.A_full)
    v_new = issue_inverse_mma(w, zero, u)
    # not with k S: the registers of both, of E and F and of u would be more than there are
    kdS = warpgroup_mma(k, tiles.dS.index(stage), zeros, use_acc=False, is_async=True)
    v_new, kdS = warpgroup_mma_wait(0, deps=(v_new, kdS))
    if strip == w.D // STRIP - 1:
        fence_async_shared()
        arrive(count // (w.D // STRIP), w.turns.A_empty)
    whole = sums.whole + gl.sum(d * v_new, 1)
    leaving = sums.leaving + gl.sum(v_new * kdS, 1)
    w_stage = wait_empty(count, w.turns.w_empty)
    out = factor(tiles, head_stage, OUT, PER_ROW)
    tiles.w.index(w_stage).store((v_new * out[:, None]).to(gl.bfloat16))
    # its fence also orders the writes of w before the other warpgroup's MMA reads them
    put_parts(w, v_new, zero)
    arrive(count, w.turns.w_full)
    hi = tiles.parts.index(zero).permute((1, 0))
    lo = tiles.parts.index(zero + 1).permute((1, 0))
    do = tiles.do.index(stage).reshape([C, STRIP])
    E = warpgroup_mma(do, hi, sums.E, is_async=True)
    E = warpgroup_mma(do, lo, E, is_async=True)
    F = warpgroup_mma(d_tile, hi, sums.F, is_async=True)
    if w.D == STRIP:
        # where keys are alike F cancels most of k dS: without this product it was most of dg's error. At
        # K = 128 ptxas spills 0 to 44 bytes more with it.
        F = warpgroup_mma(d_tile, lo, F, is_async=True)
    if w.GIVEN_DR:
        store_dv(w, place, head, strip, d, gain, is_token)
    else:
        is_dr = (gl.abs(beta) < TINY) & is_token
        if gl.max(is_dr.to(gl.int32), 0) > 0:
            store_dv(w, place, head, strip, d, gain, is_dr)
    E, F = warpgroup_mma_wait(0, deps=(E, F))
    fence_async_shared()
    arrive(count, w.turns.empty)
    return Sums(E, F, whole, apart, entering, leaving)


@jit
def issue_inverse_mma(w, zero, u):
    """Issue u + (A_inv - 1) u as asynchronous MMAs, u rounded; at K = 64 A_inv is split bf16."""
    parts = w.tiles.parts
    # fp32 is split in registers, split bf16 where it is: in registers it spills 48 bytes more
    IN_PLACE: gl.constexpr = w.D == STRIP and w.inputs.A_inv.dtype == gl.bfloat16
    if IN_PLACE:
        split_tile(w.tiles.A_inv.index(zero))
    parts.index(zero).store(u.to(gl.bfloat16))
    # it also orders the writes of `split_tile` before the MMAs read them
    fence_async_shared()
    A_inv = w.tiles.A_inv.index(zero)
    if IN_PLACE:
        v_new = warpgroup_mma(parts_of(A_inv).index(0), parts.index(zero), u, is_async=True)
        return warpgroup_mma(parts_of(A_inv).index(1), parts.index(zero), v_new, is_async=True)
    elif w.D == STRIP:
        hi, lo = split_bf16(A_inv.load(ACC_TOKENS))
        v_new = warpgroup_mma(gl.convert_layout(hi, A_OPERAND), parts.index(zero), u, is_async=True)
        return warpgroup_mma(gl.convert_layout(lo, A_OPERAND), parts.index(zero), v_new, is_async=True)
    else:
        return warpgroup_mma(A_inv, parts.index(zero), u, is_async=True)


@jit
def put_parts(w, x, zero):
    """Store fp32 x [C, 64] to shared memory as split bf16, for this warpgroup's own MMAs."""
    hi, lo = split_bf16(x)
    w.tiles.parts.index(zero).store(hi)
    w.tiles.parts.index(zero + 1).store(lo)
    fence_async_shared()


@jit
def store_dv(w, place, head, strip, d, gain, mask):
    """Store dv = gain d over d in HBM, which no other CTA reads, for the rows of a mask."""
    tokens = opaque(gl.arange(0, C, PER_ROW))
    columns = gl.arange(0, STRIP, PER_COLUMN)
    token = place.row.to(gl.int64) * w.problem.T + place.first
    rows = ((token + tokens) * w.problem.HV + head) * w.D + strip * STRIP
    where = w.out.dv_ptr + (rows[:, None] + columns[None, :])
    gl.store(where, (d * gain[:, None]).to(gl.bfloat16), mask=mask[:, None])


@jit
def finish_head(w, place, head, stage, count, sums, k_stage):
    """Scale E and F and publish them; store the gate terms of a head."""
    tiles = w.tiles
    zeros = gl.zeros((C, C), gl.float32, ACC_TOKENS)
    zero = zero_of(count)
    q = tiles.q.index(zero).reshape([C, w.D])
    k = tiles.k.index(k_stage).reshape([C, w.D])
    qk = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    kk = warpgroup_mma(k, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    # opaque: else masks of pairs are made before the loops, and hold registers in all of them
    i = opaque(gl.arange(0, C, PER_ROW))
    j = opaque(gl.arange(0, C, PER_COLUMN))
    is_token = i < place.length
    beta, gain, inverse = gains(tiles, stage, w.GIVEN_DR)
    # one exponential a pair; it includes the norm of k_j
    D = gl.exp2(
        factor(tiles, stage, DECAY, PER_ROW)[:, None] - factor(tiles, stage, FROM, PER_COLUMN)[None, :]
    )
    # masked here alone: products with E and F need no mask, but for NaN in rows and columns past the end
    E = sums.E
    F = sums.F
    is_pair = is_token[:, None] & (j < place.length)[None, :]
    if place.length < C:
        E = gl.where(is_pair, E, 0.0)
        F = gl.where(is_pair, F, 0.0)
    below = gl.where(j[None, :] < i[:, None], D, 0.0)
    D = gl.where(j[None, :] <= i[:, None], D, 0.0)
    E = E * (D * factor(tiles, stage, Q_SCALE, PER_ROW)[:, None])
    if w.NORM:
        below = below * factor(tiles, stage, K_RSTD, PER_ROW)[:, None]
    F = -F * below
    # the row warpgroup has read E and F of the head before
    wait_empty(count, w.turns.pairs_empty)
    tiles.pairs.index(zero).store(E.to(gl.bfloat16))
    tiles.pairs.index(zero + 1).store((F * gain[:, None]).to(gl.bfloat16))
    tiles.entering.store(sums.entering * factor(tiles, stage, INTO, PER_ROW) * gain)
    fence_async_shared()
    arrive(count, w.turns.pairs_full)
    qk, kk = warpgroup_mma_wait(0, deps=(qk, kk))
    if place.length < C:
        # the row warpgroup may not yet have zeroed the rows of q and k past the end when these MMAs read them
        qk = gl.where(is_pair, qk, 0.0)
        kk = gl.where(is_pair, kk, 0.0)
    F = F * kk
    H = E * qk + F * gain[:, None]
    # gates_bwd sums leaving_j over j < t in fp64: what crosses t is in it, and H's diagonal drops out
    crossing = gl.convert_layout(gl.sum(H, 0), PER_ROW) - gl.sum(H, 1)
    is_small = beta < SMALL
    # <dr, v_new> / beta has no cancellation; for a tiny beta use the sum of the two terms instead
    quotient = sums.whole / gl.where(is_small, 1.0, beta)
    dbeta = gl.where(is_small, sums.apart + gl.sum(F, 1), quotient) * inverse
    tile = (place.chunk * w.problem.HV + head).to(gl.int64)
    shares = w.out.shares_ptr + tile * (SHARES * C)
    gl.store(shares + DBETA * C + i, dbeta, mask=is_token)
    leaving = sums.leaving * factor(tiles, stage, OUT, PER_ROW) + crossing
    gl.store(shares + LEAVING * C + i, leaving, mask=is_token)
    gl.store(shares + CROSSING * C + i, gl.zeros((C,), gl.float32, PER_ROW), mask=is_token)
    fence_async_shared()
    arrive(count, w.turns.head_empty)


@jit
def clear_values(w, place):
    """Store zeros to dv at tokens of no sequence, for all value heads of a key head."""
    i = opaque(gl.arange(0, C, gl.SliceLayout(1, TOKEN_ROWS)))[:, None]
    j = gl.arange(0, STRIP, gl.SliceLayout(0, TOKEN_ROWS))[None, :]
    none = gl.zeros((C, STRIP), gl.bfloat16, TOKEN_ROWS)
    token = place.row.to(gl.int64) * w.problem.T + place.first
    for n in range(w.problem.ratio):
        rows = ((token + i) * w.problem.HV + place.key_head * w.problem.ratio + n) * w.D
        for strip in gl.static_range(w.D // STRIP):
            gl.store(w.out.dv_ptr + (rows + strip * STRIP + j), none, mask=i < -place.length)
