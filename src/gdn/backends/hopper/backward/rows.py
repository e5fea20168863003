"""Run the row warpgroup of the gradient kernel: dq and dk, added up over value heads in registers.

    dq = scale e^G do S^T + E k;   dk = w dS^T - e^G dv S^T + E^T q + (F + F^T) k
    entering += scale e^G <do, q S>;   through = <S, dS>

The factors of do and dv are multiplied in before the MMA, so that it adds to dq and dk themselves. With
l2norm the gradient x' of a raw row x is x' - x <x, x'> / <x, x>, with x' as it would be without a norm of x.
At K = V = 64 S comes in fp32: it is split in shared memory first, for both warpgroups.
"""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.backward.factors import INTO, READ
from gdn.backends.hopper.backward.shared import (
    arrive,
    factor,
    gains,
    issue_state_mma,
    parts_of,
    place_of,
    split_tile,
    wait_full,
    zero_of,
)
from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import (
    fence_async_shared,
    jit,
    opaque,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
    widen_bf16,
)
from gdn.backends.hopper.scan.operands import A_OPERAND, ACC_STATE, ACC_TOKENS, PER_ROW, TOKEN_ROWS
from gdn.backends.hopper.scan.scheduler import STRIP
from gdn.backends.triton.rule.pairs import ENTERING, THROUGH
from gdn.backends.triton.rule.pairs import ROWS as SHARES

PIECE = gl.constexpr(32)  # rows of S and dS that are multiplied at once for <S, dS>


@jit
def compute_rows(w):
    """Run the row warpgroup over all items of this CTA."""
    item_count = 0
    head_count = 0
    for item in range(gl.program_id(0), w.problem.items, gl.num_programs(0)):
        place = place_of(item, w.problem)
        if place.length > 0:
            wait_full(item_count, w.turns.k_full)
            wait_full(item_count, w.turns.q_full)
            over_item(w, place, item_count, head_count)
            head_count += w.problem.ratio
            item_count += 1
        elif place.length < 0:
            clear_rows(w, place)
    # shared memory must outlive the last TMA store that reads it
    tma_store_wait(0)


@jit
def over_item(w, place, item_count, head_count):
    """Compute dq and dk of one chunk and key head, and store them."""
    q = w.tiles.q.index(0).reshape([C, w.D])
    k_stage = item_count & 1
    k = w.tiles.k.index(k_stage).reshape([C, w.D])
    if place.length < C:
        # E^T q and the like sum over tokens: zero the rows past the end. The value warpgroup's MMAs may read
        # them at the same time, but use none of them.
        is_token = (opaque(gl.arange(0, C, gl.SliceLayout(1, TOKEN_ROWS))) < place.length)[:, None]
        q.store(gl.where(is_token, q.load(TOKEN_ROWS), 0.0))
        k.store(gl.where(is_token, k.load(TOKEN_ROWS), 0.0))
        fence_async_shared()
    layout: gl.constexpr = ACC_TOKENS if w.D == C else ACC_STATE
    dq = gl.zeros((C, w.D), gl.float32, layout)
    dk = gl.zeros((C, w.D), gl.float32, layout)
    for n in range(w.problem.ratio):
        dq, dk = over_head(w, place, n, head_count + n, dq, dk, k_stage)
    if w.NORM:
        dq = subtract_along(q, dq, w.D)
        dk = subtract_along(k, dk, w.D)
    # the producer may load the next q and k; E's and F's shared memory holds dq, then dk
    fence_async_shared()
    arrive(item_count, w.turns.k_empty)
    arrive(item_count, w.turns.q_empty)
    store_rows(w, place, dq, w.out.dq_d, w.out.dq_ptr)
    store_rows(w, place, dk, w.out.dk_d, w.out.dk_ptr)
    fence_async_shared()
    arrive(head_count + w.problem.ratio - 1, w.turns.pairs_empty)


@jit
def over_head(w, place, n, count, dq, dk, k_stage):
    """Add one value head to dq and dk."""
    tiles = w.tiles
    stage = wait_full(count, w.turns.head_full)
    entering = gl.zeros((C,), gl.float32, PER_ROW)
    if w.D == STRIP:
        through = gl.zeros((C,), gl.float32, gl.SliceLayout(1, TOKEN_ROWS))
    else:
        through = gl.zeros((PIECE, STRIP), gl.float32, TOKEN_ROWS)
    STRIPS: gl.constexpr = w.D // STRIP
    for strip in range(STRIPS):
        dq, dk, entering, through = over_strip(w, stage, count * STRIPS + strip, dq, dk, entering, through)
    entering = entering * factor(tiles, stage, READ, PER_ROW)
    fence_async_shared()
    arrive(count, w.turns.head_empty)
    zero = zero_of(count)
    q = tiles.q.index(zero).reshape([C, w.D])
    k = tiles.k.index(k_stage).reshape([C, w.D])
    wait_full(count, w.turns.pairs_full)
    E = tiles.E.index(zero)
    F = tiles.F.index(zero)
    dq = warpgroup_mma(E, k, dq, is_async=True)
    dk = warpgroup_mma(E.permute((1, 0)), q, dk, is_async=True)
    dk = warpgroup_mma(F, k, dk, is_async=True)
    dk = warpgroup_mma(F.permute((1, 0)), k, dk, is_async=True)
    head = place.key_head * w.problem.ratio + n
    tile = (place.chunk * w.problem.HV + head).to(gl.int64)
    shares = w.out.shares_ptr + tile * (SHARES * C)
    i = opaque(gl.arange(0, C, PER_ROW))
    entering += tiles.entering.load(PER_ROW)
    gl.store(shares + ENTERING * C + i, entering, mask=i < place.length)
    if not w.GIVEN_DR:
        if w.D != STRIP:
            through = gl.sum(through, 1)
        gl.store(shares + (THROUGH * C + 1), gl.sum(through, 0))
    dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
    if (count + 1) % w.problem.ratio != 0:
        # after the last head the same shared memory holds dq and dk first
        fence_async_shared()
        arrive(count, w.turns.pairs_empty)
    return dq, dk


@jit
def over_strip(w, head_stage, count, dq, dk, entering, through):
    """Add 64 value columns of a head to dq, dk and the gate terms."""
    tiles = w.tiles
    stage = wait_full(count, w.turns.full)
    zeros = gl.zeros((C, STRIP), gl.float32, ACC_TOKENS)
    dS = tiles.dS.index(stage)
    if w.D == STRIP:
        S = split_tile(tiles.S.index(stage))
        fence_async_shared()
        arrive(count, w.turns.S_full)
        through = gl.sum(S * widen_bf16(dS.load(TOKEN_ROWS)), 1)
    q = tiles.q.index(zero_of(count)).reshape([C, w.D])
    qS = issue_state_mma(q, w, stage, zeros)
    _, gain, _ = gains(tiles, head_stage, w.GIVEN_DR)
    gain = gain * factor(tiles, head_stage, INTO, PER_ROW)
    d = widen_bf16(tiles.d.index(stage).reshape([C, STRIP]).load(ACC_TOKENS))
    scaled = (d * gain[:, None]).to(gl.bfloat16)
    dk = issue_transposed_state_mma(scaled, w, stage, dk)
    # the MMAs of dk may still run on the tensor cores
    qS = warpgroup_mma_wait(2 if w.D == STRIP else 1, deps=(qS,))
    do = widen_bf16(tiles.do.index(stage).reshape([C, STRIP]).load(ACC_TOKENS))
    entering += gl.sum(do * qS, 1)
    scaled = (do * factor(tiles, head_stage, READ, PER_ROW)[:, None]).to(gl.bfloat16)
    dq = issue_transposed_state_mma(scaled, w, stage, dq)
    if not w.GIVEN_DR and w.D != STRIP:
        # before w is there, while the tensor cores multiply; Triton's state pass has stored <S, dS> with dS
        # in fp32
        through = add_through(tiles.S.index(stage), dS, through, w.D)
    w_stage = wait_full(count, w.turns.w_full)
    dk = warpgroup_mma(tiles.w.index(w_stage), dS.permute((1, 0)), dk, is_async=True)
    dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
    fence_async_shared()
    arrive(count, w.turns.w_empty)
    arrive(count, w.turns.empty)
    return dq, dk, entering, through


@jit
def issue_transposed_state_mma(x, w, stage, acc):
    """Issue acc + x S^T [C, K] as asynchronous MMAs, x [C, 64] in registers; at K = 64 S is split bf16."""
    S = w.tiles.S.index(stage)
    x = gl.convert_layout(x, A_OPERAND)
    if w.D == STRIP:
        acc = warpgroup_mma(x, parts_of(S).index(0).permute((1, 0)), acc, is_async=True)
        return warpgroup_mma(x, parts_of(S).index(1).permute((1, 0)), acc, is_async=True)
    else:
        return warpgroup_mma(x, S.permute((1, 0)), acc, is_async=True)


@jit
def add_through(S, dS, through, D: gl.constexpr):
    """Add the products of S and dS, 32 keys at a time."""
    for n in gl.static_range(D // PIECE):
        x = widen_bf16(S.slice(n * PIECE, PIECE).load(TOKEN_ROWS))
        through += x * widen_bf16(dS.slice(n * PIECE, PIECE).load(TOKEN_ROWS))
    return through


@jit
def subtract_along(x_tile, dx, D: gl.constexpr):
    """Subtract from the gradients dx of raw rows x their part along x, as the adjoint of the norm does."""
    layout: gl.constexpr = ACC_TOKENS if D == C else ACC_STATE
    x = widen_bf16(x_tile.load(layout))
    along = gl.sum(x * dx, 1) / (gl.sum(x * x, 1) + 1e-6)
    return dx - x * along[:, None]


@jit
def store_rows(w, place, x, x_d, x_ptr):
    """Store the rows of dq or dk to HBM through shared memory: by TMA, or row by row in a ragged chunk."""
    tma_store_wait(0)
    if w.D == STRIP:
        w.tiles.E.index(0).store(x.to(gl.bfloat16))
    else:
        half = gl.permute(gl.reshape(x.to(gl.bfloat16), (C, 2, STRIP)), (0, 2, 1))
        left, right = gl.split(half)
        w.tiles.E.index(0).store(gl.convert_layout(left, ACC_TOKENS))
        w.tiles.F.index(0).store(gl.convert_layout(right, ACC_TOKENS))
    token = place.row * w.problem.T + place.first
    if place.length < C:
        i = opaque(gl.arange(0, C, gl.SliceLayout(1, TOKEN_ROWS)))[:, None]
        j = gl.arange(0, STRIP, gl.SliceLayout(0, TOKEN_ROWS))[None, :]
        num_heads = w.problem.HV // w.problem.ratio
        where = x_ptr + ((token + i).to(gl.int64) * num_heads + place.key_head) * w.D + j
        for n in gl.static_range(w.D // STRIP):
            rows = half_tile(w.tiles, n).load(TOKEN_ROWS)
            gl.store(where + n * STRIP, rows, mask=i < place.length)
    else:
        fence_async_shared()
        for n in gl.static_range(w.D // STRIP):
            tma_store(x_d, [token, place.key_head * w.D + n * STRIP], half_tile(w.tiles, n))
        tma_store_wait(0)


@jit
def half_tile(tiles, n: gl.constexpr):
    """Return the shared memory of columns 64 n to 64 n + 63 of dq or dk."""
    if n == 0:
        return tiles.E.index(0)
    else:
        return tiles.F.index(0)


@jit
def clear_rows(w, place):
    """Store zeros to dq and dk at tokens of no sequence."""
    i = opaque(gl.arange(0, C, gl.SliceLayout(1, TOKEN_ROWS)))[:, None]
    j = gl.arange(0, STRIP, gl.SliceLayout(0, TOKEN_ROWS))[None, :]
    none = gl.zeros((C, STRIP), gl.bfloat16, TOKEN_ROWS)
    token = place.row.to(gl.int64) * w.problem.T + place.first
    num_heads = w.problem.HV // w.problem.ratio
    rows = ((token + i) * num_heads + place.key_head) * w.D
    for strip in gl.static_range(w.D // STRIP):
        gl.store(w.out.dq_ptr + (rows + strip * STRIP + j), none, mask=i < -place.length)
        gl.store(w.out.dk_ptr + (rows + strip * STRIP + j), none, mask=i < -place.length)
