"""Run a consumer warpgroup of the reverse state scan: 64 value rows of dS^T, last chunk of an item to first.

    dv_new = P^T do + e^(G_C - G) k dS;   dr = A_inv^T dv_new;   dv = beta dr
    dS <- e^(G_C) dS + (scale e^G q)^T do - (e^G k)^T dv

dS^T [V, K] stays in registers in fp32, so dS, dv_new, do and dv are A operands of WGMMA straight from the
registers. All but dv_new are split bf16 (hi + lo), two MMAs each: see `triton.rule.state_bwd` for what each
part is worth. At K = V = 64 dv_new and A_inv are split, too. dS of the state that leaves a chunk is stored
for the gradient kernel, and so is dv. The transfer of segments stores neither, but what leaves the first
chunk: M or N, see `segments`.
"""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.backward.factors import BETA, DECAY, INTO, OUT, READ, ROWS
from gdn.backends.hopper.backward.scan_shared import chunks_in, is_map, item_of
from gdn.backends.hopper.backward.shared import TINY, arrive, factor, parts_of, split_bf16, wait_full
from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import (
    fence_async_shared,
    jit,
    opaque,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from gdn.backends.hopper.scan.consumer import state_pointers
from gdn.backends.hopper.scan.operands import A_OPERAND, ACC_STATE, ACC_TOKENS, PER_COLUMN, TOKEN_ROWS
from gdn.backends.hopper.scan.scheduler import ONE_WARPGROUP, STRIP
from gdn.backends.hopper.scan.structs import Position


@jit
def run_consumer(WG: gl.constexpr, w):
    """Run consumer warpgroup WG over all work items of this CTA."""
    at = 0
    for number in range(gl.program_id(0), w.sequences.items, gl.num_programs(0)):
        item = item_of(number, w)
        over_item(WG, w, item, at)
        at += chunks_in(item)
    if w.out.dS_d is not None:
        # shared memory must outlive the last TMA store that reads it
        tma_store_wait(0)


@jit
def over_item(WG: gl.constexpr, w, item, at):
    """Scan one work item whose last chunk is chunk `at` of the CTA."""
    first_v = (item.strip + WG) * STRIP
    if w.out.boundary_ptr is None or item.start >= 0:
        dS = load_gradient(w, item, first_v)
    else:
        # the bits that the pass before has stored
        state = (-1 - item.start).to(gl.int64) * w.sequences.HV + item.head
        dS = gl.load(state_pointers(w.out.boundary_ptr, state, first_v, True, w.D))
    chunks = chunks_in(item)
    for i in range(chunks):
        c = chunks - 1 - i
        token = item.row * w.sequences.T + item.first + c * C
        tile = (item.slot + c) * w.sequences.HV + item.head
        position = Position(token, tile, item.head, first_v)
        if w.out.dS_d is None and is_map(item):
            dS = over_map_chunk(dS, w, at + i)
        else:
            dS = over_chunk(dS, WG, w, at + i, item.length - c * C, position)
    if w.out.dinitial_ptr is not None and item.goal >= 0:
        state = item.goal.to(gl.int64) * w.sequences.HV + item.head
        # M and N of segments are stored keys down
        IS_V_FIRST: gl.constexpr = w.V_FIRST and w.out.dS_d is not None
        gl.store(state_pointers(w.out.dinitial_ptr, state, first_v, IS_V_FIRST, w.D), dS)
    if w.out.boundary_ptr is not None and item.goal < -1:
        state = (-2 - item.goal).to(gl.int64) * w.sequences.HV + item.head
        gl.store(state_pointers(w.out.boundary_ptr, state, first_v, True, w.D), dS)


@jit
def load_gradient(w, item, first_v):
    """Return dS^T behind an item's last chunk: zero, the identity for M of a segment, or loaded from HBM."""
    dfinal_ptr = w.out.dfinal_ptr
    layout: gl.constexpr = ACC_TOKENS if w.D == C else ACC_STATE
    state = item.start.to(gl.int64) * w.sequences.HV + item.head
    if w.out.dS_d is None:
        v = first_v + gl.arange(0, STRIP, gl.SliceLayout(1, layout))
        k = gl.arange(0, w.D, gl.SliceLayout(0, layout))
        # an empty item leaves M zero
        has_ones = is_map(item) & (item.length > 0)
        dS = (v[:, None] == k[None, :]).to(gl.float32) * has_ones.to(gl.float32)
        if dfinal_ptr is not None and item.start >= 0:
            dS = gl.load(state_pointers(dfinal_ptr, state, first_v, w.V_FIRST, w.D)).to(gl.float32)
    elif dfinal_ptr is None:
        dS = gl.zeros((STRIP, w.D), gl.float32, layout)
    else:
        dS = gl.load(state_pointers(dfinal_ptr, state, first_v, w.V_FIRST, w.D)).to(gl.float32)
    return dS


@jit
def over_chunk(dS, WG: gl.constexpr, w, i, left, position):
    """Take dS^T through the CTA's chunk i; `left` tokens of it are the sequence's. Stores dS and dv."""
    tiles = w.tiles
    stage = wait_full(i, w.turns.full)
    q = tiles.q.index(stage).reshape([C, w.D])
    k = tiles.k.index(stage).reshape([C, w.D])
    do = tiles.do.index(w.CONSUMERS * stage + WG).reshape([C, STRIP])
    if left < C:
        clear_past(q, k, do, left)
    zeros = gl.zeros((STRIP, C), gl.float32, ACC_TOKENS)
    do_t = do.permute((1, 0))
    k_t = k.permute((1, 0))
    # A lone consumer has registers for P^T do beside k dS: that needs no dS, so it is multiplied while dS is
    # split. With two consumers the other one keeps the tensor cores busy.
    Pdo = zeros
    if w.CONSUMERS == 1:
        Pdo = issue_scores_mma(do_t, tiles, i, zeros, w)
    hi, lo = split_bf16(dS)
    z = warpgroup_mma(gl.convert_layout(hi, A_OPERAND), k_t, zeros, use_acc=False, is_async=True)
    z = warpgroup_mma(gl.convert_layout(lo, A_OPERAND), k_t, z, is_async=True)
    if w.out.dS_d is not None:
        # the TMA stores before must have read the buffers
        tma_store_wait(0)
        tiles.dS.index(WG).permute((1, 0)).store(hi)
        fence_async_shared()
        tma_store(w.out.dS_d, [position.tile * w.D, position.first_v], tiles.dS.index(WG))
    out = factor(tiles, stage, OUT, PER_COLUMN)[None, :]
    if w.CONSUMERS == 1:
        z, Pdo = warpgroup_mma_wait(0, deps=(z, Pdo))
        arrive(i, w.turns.P_empty)
        z = mask_past(z * out + Pdo, left)
    else:
        z = mask_past(warpgroup_mma_wait(0, deps=(z,)) * out, left)
        z = issue_scores_mma(do_t, tiles, i, z, w)
    # while the tensor cores compute z
    dS = dS * gl.exp2(last_of(tiles, stage, DECAY))
    read = do_t.load(ACC_TOKENS).to(gl.float32) * factor(tiles, stage, READ, PER_COLUMN)[None, :]
    hi, lo = split_bf16(read)
    if w.CONSUMERS == 2:
        z = warpgroup_mma_wait(0, deps=(z,))
        # the score warpgroup may overwrite P
        arrive(i, w.turns.P_empty)
    dr = issue_inverse_mma(z, tiles, stage, w)
    # behind A_inv^T dv_new in the tensor cores, and while dv is made
    dS = warpgroup_mma(gl.convert_layout(hi, A_OPERAND), q, dS, is_async=True)
    dS = warpgroup_mma(gl.convert_layout(lo, A_OPERAND), q, dS, is_async=True)
    dr = warpgroup_mma_wait(2, deps=(dr,))
    beta = factor(tiles, stage, BETA, PER_COLUMN)
    dv = dr * beta[None, :]
    hi, lo = split_bf16(dv * factor(tiles, stage, INTO, PER_COLUMN)[None, :])
    dS = warpgroup_mma(gl.convert_layout(hi, A_OPERAND), k, dS, is_async=True)
    dS = warpgroup_mma(gl.convert_layout(lo, A_OPERAND), k, dS, is_async=True)
    if w.out.dv_d is not None:
        # bf16 would not hold dv of a beta next to 0, which the gradient kernel knows
        dv = gl.where((gl.abs(beta) < TINY)[None, :], dr, dv)
        # TMA has read dS by now
        tma_store_wait(0)
        dv_tile = tiles.dS.index(WG).slice(0, C)
        dv_tile.permute((1, 0)).store(dv.to(gl.bfloat16))
        column = position.head * w.D + position.first_v
        if left < C:
            store_values(w, dv_tile, position.token, column, left)
        else:
            fence_async_shared()
            tma_store(w.out.dv_d, [position.token, column], dv_tile)
    dS = warpgroup_mma_wait(0, deps=(dS,))
    # order this warpgroup's reads of the stage before the TMA loads that overwrite it
    fence_async_shared()
    arrive(i, w.turns.empty)
    return dS


@jit
def over_map_chunk(dS, w, i):
    """Take dS^T through the CTA's chunk i where do is 0, for M of a segment, whose chunks are all whole."""
    tiles = w.tiles
    stage = wait_full(i, w.turns.full)
    k = tiles.k.index(stage).reshape([C, w.D])
    z = gl.zeros((STRIP, C), gl.float32, ACC_TOKENS)
    z = mma_rounded_split(dS, k.permute((1, 0)), z)
    gain = factor(tiles, stage, BETA, PER_COLUMN) * factor(tiles, stage, INTO, PER_COLUMN)
    z = warpgroup_mma_wait(0, deps=(z,)) * factor(tiles, stage, OUT, PER_COLUMN)[None, :]
    if w.D == STRIP:
        # the score warpgroup has split A_inv
        wait_full(i, w.turns.P_full)
    dr = issue_inverse_mma(z, tiles, stage, w)
    # while the tensor cores compute dr
    dS = dS * gl.exp2(last_of(tiles, stage, DECAY))
    dr = warpgroup_mma_wait(0, deps=(dr,))
    dS = mma_rounded_split(dr * gain[None, :], k, dS)
    dS = warpgroup_mma_wait(0, deps=(dS,))
    fence_async_shared()
    arrive(i, w.turns.empty)
    return dS


@jit
def mma_rounded_split(x, b, acc):
    """Issue acc + x b as two asynchronous MMAs, x as split bf16."""
    hi, lo = split_bf16(x)
    acc = warpgroup_mma(gl.convert_layout(hi, A_OPERAND), b, acc, is_async=True)
    return warpgroup_mma(gl.convert_layout(lo, A_OPERAND), b, acc, is_async=True)


@jit
def issue_scores_mma(do_t, tiles, i, acc, w):
    """Wait for P of the CTA's chunk i and issue acc + do^T P as asynchronous MMAs."""
    stage = wait_full(i, w.turns.P_full)
    acc = warpgroup_mma(do_t, tiles.P.index(2 * stage), acc, is_async=True)
    return warpgroup_mma(do_t, tiles.P.index(2 * stage + 1), acc, is_async=True)


@jit
def issue_inverse_mma(z, tiles, stage, w):
    """Issue z + z (A_inv - 1) [64, C] as asynchronous MMAs; at K = 64 z and A_inv are split bf16."""
    if w.D == STRIP:
        A_inv = parts_of(tiles.A_inv.index(stage))
        hi, lo = split_bf16(z)
        hi = gl.convert_layout(hi, A_OPERAND)
        dr = warpgroup_mma(hi, A_inv.index(0), z, is_async=True)
        dr = warpgroup_mma(hi, A_inv.index(1), dr, is_async=True)
        return warpgroup_mma(gl.convert_layout(lo, A_OPERAND), A_inv.index(0), dr, is_async=True)
    else:
        rounded = gl.convert_layout(z.to(gl.bfloat16), A_OPERAND)
        return warpgroup_mma(rounded, tiles.A_inv.index(stage), z, is_async=True)


@jit
def mask_past(z, left):
    """Zero dv_new past the sequence's end: k dS may be NaN there, and A_inv^T would spread it."""
    if left < C:
        z = gl.where((opaque(gl.arange(0, C, PER_COLUMN)) < left)[None, :], z, 0.0)
    return z


@jit
def last_of(tiles, stage, ROW: gl.constexpr):
    """Load a factor of the chunk's last token from shared memory as a scalar."""
    row = tiles.factors.index(ROWS * stage + ROW).reshape([C])
    return gl.max(row.slice(C - 1, 1).load(ONE_WARPGROUP), 0)


@jit
def clear_past(q, k, do, left):
    """Zero q, k and do past the sequence's end: they may be NaN, and MMAs sum over tokens.

    Both consumers write the same zeros over q and k, and the score warpgroup masks the rows that it reads.
    """
    is_token = (opaque(gl.arange(0, C, gl.SliceLayout(1, TOKEN_ROWS))) < left)[:, None]
    q.store(gl.where(is_token, q.load(TOKEN_ROWS), 0.0))
    k.store(gl.where(is_token, k.load(TOKEN_ROWS), 0.0))
    do.store(gl.where(is_token, do.load(TOKEN_ROWS), 0.0))
    fence_async_shared()


@jit
def store_values(w, tile, token, column, left):
    """Store the rows of dv to HBM, for a ragged chunk: TMA would write past the sequence."""
    tokens = opaque(gl.arange(0, C, gl.SliceLayout(1, TOKEN_ROWS)))
    columns = gl.arange(0, STRIP, gl.SliceLayout(0, TOKEN_ROWS))
    place = (token + tokens[:, None]).to(gl.int64) * (w.sequences.HV * w.D) + (column + columns[None, :])
    gl.store(w.out.dv_ptr + place, tile.load(TOKEN_ROWS), mask=(tokens < left)[:, None])
