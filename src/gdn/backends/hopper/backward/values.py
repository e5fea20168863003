"""Run the value warpgroup of the gradient kernel: v_new, E and F of each value head, and gate terms.

    X = v - e^G k S;   u = beta X;   v_new = A_inv u;   w = e^(G_C - G) v_new
    E_ij = scale D_ij <do_i, v_new_j>, j <= i;   F_ij = -D_ij <dv_i, v_new_j>, j < i;   D_ij = e^(G_i - G_j)
    dbeta = <dr, v_new> / beta, or <dr, X> + row sums of F kk / beta where beta is small
    H_ij = (E qk + F kk)_ij;   dg_t has sum_{i >= t > j} H_ij, a prefix sum of column sums less row sums of H
    leaving_i = <w_i, k_i dS> + sum_j (H_ji - H_ij);   entering = -e^G <dv, k S>

w goes to the row warpgroup for dk; E and F, with both norms in them, for dq and dk.
"""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.backward.factors import BETA, DECAY, FROM, INTO, K_RSTD, OUT, Q_SCALE
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
from gdn.backends.hopper.gluon import (
    barrier,
    fence_async_shared,
    jit,
    opaque,
    recast,
    warpgroup_mma,
    warpgroup_mma_wait,
    widen_bf16,
)
from gdn.backends.hopper.scan.operands import A_OPERAND, ACC_TOKENS, PER_COLUMN, PER_ROW, TOKEN_ROWS
from gdn.backends.hopper.scan.scheduler import STRIP
from gdn.backends.triton.rule.gradients import SMALL
from gdn.backends.triton.rule.pairs import CROSSING, DBETA, LEAVING
from gdn.backends.triton.rule.pairs import ROWS as SHARES

# fp32 rows in shared memory, and registers of the warpgroup for their sums: eight rows of two columns a lane,
# the same columns in four lanes. Neither stores nor loads have bank conflicts.
FP32_ROWS = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 4, [1, 0]))
COLUMN_PAIRS = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [1, 4], [1, 0]))


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
    sums = Sums(square, square, row, row, row, row, smallness(w, place, stage))
    STRIPS: gl.constexpr = w.D // STRIP
    for strip in range(STRIPS):
        sums = over_strip(w, place, head, strip, stage, count * STRIPS + strip, sums, k_stage)
    wait_full(item_count, w.turns.q_full)
    finish_head(w, place, head, stage, count, sums, k_stage)


@jit
def smallness(w, place, stage):
    """Return 1 if a token of the head needs the sums for a small beta, 2 if the scan stored a dr, else 0.

    Once a head, as a maximum over warps takes two barriers.
    """
    beta = factor(w.tiles, stage, BETA, PER_ROW)
    is_token = opaque(gl.arange(0, C, PER_ROW)) < place.length
    is_small, is_dr = is_token & (beta < SMALL), is_token & (gl.abs(beta) < TINY)
    return gl.max(is_small.to(gl.int32) + is_dr.to(gl.int32), 0)


@jit
def keep_branch():
    """Keep a rare branch a branch; all threads of the warpgroup must branch alike.

    Of short branches LLVM makes selects, and ptxas predicated instructions, which every chunk would execute.
    """
    barrier()


@jit
def over_strip(w, place, head, strip, head_stage, count, sums, k_stage):
    """Add 64 value columns to E, F and the gate terms; publish w of these columns."""
    tiles = w.tiles
    E = sums.E
    F = sums.F
    if w.D != STRIP:
        # of the strip before: those of the last strip run on while `finish_head` computes decays
        E, F = warpgroup_mma_wait(0, deps=(E, F))
        if strip > 0:
            fence_async_shared()
            arrive(count - 1, w.turns.empty)
    stage = wait_full(count, w.turns.full)
    zeros = gl.zeros((C, STRIP), gl.float32, ACC_TOKENS)
    zero = zero_of(count)
    k = tiles.k.index(k_stage + zero).reshape([C, w.D])
    if w.D == STRIP:
        # the row warpgroup has split S
        wait_full(count, w.turns.S_full)
    kS = issue_state_mma(k, w, stage, zeros)
    d_tile = tiles.d.index(stage).reshape([C, STRIP])
    d = widen_bf16(d_tile.load(ACC_TOKENS))
    v = widen_bf16(tiles.v.index(stage).reshape([C, STRIP]).load(ACC_TOKENS))
    beta, gain, _ = gains(tiles, head_stage, w.GIVEN_DR)
    kS = warpgroup_mma_wait(0, deps=(kS,))
    entering = sums.entering + gl.sum(d * kS, 1)
    X = v + kS * factor(tiles, head_stage, INTO, PER_ROW)[:, None]
    apart = sums.apart
    if sums.small > 0:
        apart += gl.sum(d * opaque(X), 1)
        keep_branch()
    # rows past the end are another sequence's, and may be NaN: A_inv would spread them
    u = beta[:, None] * X
    if place.length < C:
        is_token = opaque(gl.arange(0, C, PER_ROW)) < place.length
        u = gl.where(is_token[:, None], opaque(u), 0.0)
        keep_branch()
    if strip == 0:
        wait_full(count // (w.D // STRIP), w.turns.A_full)
    v_new = issue_inverse_mma(w, zero, u)
    # not with k S: the registers of both, of E and F and of u would be more than there are
    kdS = warpgroup_mma(k, tiles.dS.index(stage), zeros, use_acc=False, is_async=True)
    v_new, kdS = warpgroup_mma_wait(0, deps=(v_new, kdS))
    whole = sums.whole + gl.sum(d * v_new, 1)
    leaving = sums.leaving + gl.sum(v_new * kdS, 1)
    w_stage = wait_empty(count, w.turns.w_empty)
    out = factor(tiles, head_stage, OUT, PER_ROW)
    tiles.w.index(w_stage).store((v_new * out[:, None]).to(gl.bfloat16))
    # its fence also orders the writes of w before the other warpgroup's MMA reads them
    put_parts(w, v_new, zero)
    arrive(count, w.turns.w_full)
    if strip == w.D // STRIP - 1:
        arrive(count // (w.D // STRIP), w.turns.A_empty)
    hi = tiles.hi.index(zero).permute((1, 0))
    lo = tiles.lo.index(zero).permute((1, 0))
    do = tiles.do.index(stage).reshape([C, STRIP])
    E = warpgroup_mma(do, hi, E, is_async=True)
    E = warpgroup_mma(do, lo, E, is_async=True)
    F = warpgroup_mma(d_tile, hi, F, is_async=True)
    if w.D == STRIP:
        # where keys are alike F cancels most of k dS: without this product it was most of dg's error. At
        # K = 128 ptxas spills 0 to 44 bytes more with it.
        F = warpgroup_mma(d_tile, lo, F, is_async=True)
    if w.GIVEN_DR or sums.small > 1:
        store_dv(w, place, head, strip, d, gain, beta)
    return Sums(E, F, whole, apart, entering, leaving, sums.small)


@jit
def issue_inverse_mma(w, zero, u):
    """Issue u + (A_inv - 1) u as asynchronous MMAs, u rounded; at K = 64 A_inv is split bf16."""
    tile = w.tiles.hi.index(zero)
    # fp32 is split in registers, split bf16 where it is: in registers it spills 48 bytes more
    IN_PLACE: gl.constexpr = w.D == STRIP and w.inputs.A_inv.dtype == gl.bfloat16
    if IN_PLACE:
        split_tile(w.tiles.A_inv.index(zero))
    tile.store(u.to(gl.bfloat16))
    # it also orders the writes of `split_tile` before the MMAs read them
    fence_async_shared()
    A_inv = w.tiles.A_inv.index(zero)
    if IN_PLACE:
        v_new = warpgroup_mma(parts_of(A_inv).index(0), tile, u, is_async=True)
        return warpgroup_mma(parts_of(A_inv).index(1), tile, v_new, is_async=True)
    elif w.D == STRIP:
        hi, lo = split_bf16(A_inv.load(ACC_TOKENS))
        v_new = warpgroup_mma(gl.convert_layout(hi, A_OPERAND), tile, u, is_async=True)
        return warpgroup_mma(gl.convert_layout(lo, A_OPERAND), tile, v_new, is_async=True)
    else:
        return warpgroup_mma(A_inv, tile, u, is_async=True)


@jit
def put_parts(w, x, zero):
    """Store fp32 x [C, 64] to shared memory as split bf16, for this warpgroup's own MMAs."""
    hi, lo = split_bf16(x)
    w.tiles.hi.index(zero).store(hi)
    w.tiles.lo.index(zero).store(lo)
    fence_async_shared()


@jit
def store_dv(w, place, head, strip, d, gain, beta):
    """Store dv = gain d over d in HBM, which no other CTA reads, for the rows where `d` is dr."""
    tokens = opaque(gl.arange(0, C, PER_ROW))
    is_dr = tokens < place.length
    if not w.GIVEN_DR:
        is_dr = is_dr & (gl.abs(beta) < TINY)
    columns = gl.arange(0, STRIP, PER_COLUMN)
    token = place.row.to(gl.int64) * w.problem.T + place.first
    rows = ((token + tokens) * w.problem.HV + head) * w.D + strip * STRIP
    where = w.out.dv_ptr + (rows[:, None] + columns[None, :])
    gl.store(where, (d * gain[:, None]).to(gl.bfloat16), mask=is_dr[:, None])


@jit
def finish_head(w, place, head, stage, count, sums, k_stage):
    """Scale E and F and publish them; store the gate terms of a head."""
    tiles = w.tiles
    zeros = gl.zeros((C, C), gl.float32, ACC_TOKENS)
    zero = zero_of(count)
    q = tiles.q.index(zero).reshape([C, w.D])
    k = tiles.k.index(k_stage + zero).reshape([C, w.D])
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
    below = gl.where(j[None, :] < i[:, None], D, 0.0)
    D = gl.where(j[None, :] <= i[:, None], D, 0.0) * factor(tiles, stage, Q_SCALE, PER_ROW)[:, None]
    # the sign of F costs no instruction in a product; Triton's negation is a subtraction
    if w.NORM:
        below = below * (factor(tiles, stage, K_RSTD, PER_ROW) * -1.0)[:, None]
    else:
        below = below * -1.0
    # q k^T and k k^T may still run
    E, F = warpgroup_mma_wait(2, deps=(sums.E, sums.F))
    fence_async_shared()
    arrive((count + 1) * (w.D // STRIP) - 1, w.turns.empty)
    E = E * D
    F = F * below
    if place.length < C:
        E, F = mask_pairs(E, F, place)
        keep_branch()
    # the row warpgroup has read E and F of the head before
    wait_empty(count, w.turns.pairs_empty)
    tiles.E.index(zero).store(E.to(gl.bfloat16))
    if w.GIVEN_DR:
        tiles.F.index(zero).store((F * gain[:, None]).to(gl.bfloat16))
    else:
        tiles.F.index(zero).store(F.to(gl.bfloat16))
        # gain is 1 elsewhere
        if sums.small > 1:
            tiles.F.index(zero).store((F * gain[:, None]).to(gl.bfloat16))
    tiles.entering.store(sums.entering * factor(tiles, stage, INTO, PER_ROW) * gain)
    fence_async_shared()
    arrive(count, w.turns.pairs_full)
    qk, kk = warpgroup_mma_wait(0, deps=(qk, kk))
    if place.length < C:
        # the row warpgroup may not yet have zeroed the rows of q and k past the end when these MMAs read them
        qk, kk = mask_pairs(qk, kk, place)
        keep_branch()
    rows = gl.zeros((C,), gl.float32, PER_ROW)
    if sums.small > 0:
        rows = gl.sum(opaque(F) * kk, 1)
        keep_branch()
    F = F * kk
    if w.GIVEN_DR:
        F = F * gain[:, None]
    elif sums.small > 1:
        F = opaque(F) * gain[:, None]
        keep_branch()
    H = E * qk + F
    # gates_bwd sums leaving_j over j < t in fp64: what crosses t is in it, and H's diagonal drops out
    crossing = sum_columns(tiles, H, zero) - gl.sum(H, 1)
    is_small = beta < SMALL
    # <dr, v_new> / beta has no cancellation; for a tiny beta use the sum of the two terms instead
    quotient = sums.whole / gl.where(is_small, 1.0, beta)
    dbeta = gl.where(is_small, sums.apart + rows, quotient) * inverse
    tile = (place.chunk * w.problem.HV + head).to(gl.int64)
    shares = w.out.shares_ptr + tile * (SHARES * C)
    gl.store(shares + DBETA * C + i, dbeta, mask=is_token)
    leaving = sums.leaving * factor(tiles, stage, OUT, PER_ROW) + crossing
    gl.store(shares + LEAVING * C + i, leaving, mask=is_token)
    gl.store(shares + CROSSING * C + i, gl.zeros((C,), gl.float32, PER_ROW), mask=is_token)
    fence_async_shared()
    arrive(count, w.turns.head_empty)


@jit
def sum_columns(tiles, x, zero):
    """Return the column sums of x [C, C], through shared memory that holds v_new before.

    A lane has 2 rows and 16 columns: a reduction over lanes would take 48 shuffles, and as many additions.
    """
    # rows i and i + 8 are one lane's
    pairs = gl.reshape(gl.sum(gl.reshape(x, (4, 2, 8, C)), 1), (C // 2, C))
    space = recast(tiles.hi, gl.float32, [1, C // 2, C], FP32_ROWS).index(zero)
    space.store(pairs)
    return gl.convert_layout(gl.sum(space.load(COLUMN_PAIRS), 0), PER_ROW)


@jit
def mask_pairs(x, y, place):
    """Zero the rows and columns past a sequence's end of two [C, C] tensors.

    The masks are made here, from opaque values: else LLVM would make them outside of the branch around this.
    """
    i = opaque(gl.arange(0, C, PER_ROW))
    j = opaque(gl.arange(0, C, PER_COLUMN))
    is_pair = (i < place.length)[:, None] & (j < place.length)[None, :]
    return gl.where(is_pair, opaque(x), 0.0), gl.where(is_pair, opaque(y), 0.0)


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
