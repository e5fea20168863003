"""Advance 64 value rows of S^T through one chunk, and compute their outputs, in a consumer warpgroup.

    r = beta (v - e^G k S);   v_new = A_inv r;   o = scale e^G q S + P v_new
    S <- e^(G_C) S + (e^(G_C - G) k)^T v_new

`advance` is the general path: any chunk, with r as split bf16 (hi + lo). `advance_fast` is the fast path, for
well-conditioned chunks. It has B in the place of A_inv, so that little but roundings separates the MMAs:

    w = e^(G_C - G) v_new = B (v - e^G k S);   B = e^(G_C - G) A_inv beta
    o = scale e^G q S + P w;   P = scale e^(G - G_C) q k^T;   S <- e^(G_C) S + k^T w

A forward for a backward stores A_inv, not B. `advance_fast_saving`, off by default, is its fast path:

    v_new = r + (A_inv - 1) r;   w = e^(G_C - G) v_new;   o and S as above

`solve` tests each chunk. A chunk is well-conditioned, and the fast path accurate, if it has 64 tokens, its A
is small, as it is where keys differ, and its decay is such that e^(G_i - G_C) fits fp32.
"""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.backward.shared import split_bf16
from gdn.backends.hopper.factors import BETA, CHUNK_DECAY, K_DECAY, Q_DECAY, UPDATE_DECAY, C
from gdn.backends.hopper.gluon import (
    fence_async_shared,
    jit,
    opaque,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from gdn.backends.hopper.scan.operands import (
    A_OPERAND,
    ACC_HALF,
    ACC_TOKENS,
    PER_COLUMN,
    TOKEN_ROWS,
    issue_key_mma,
    issue_lower_mma,
    join_columns,
    key_tiles,
    mma_split_bf16,
    split_columns,
    wait_key_mma,
)
from gdn.backends.hopper.scan.scheduler import STRIP, stage_and_phase


@jit
def store_entering_state(S, tile, first_v, WG: gl.constexpr, scan):
    """Store S as it enters a chunk to HBM, keys down: registers to shared memory, then a TMA store."""
    buffer = scan.tiles.S
    # the TMA store before must have read the buffer
    tma_store_wait(0)
    buffer.index(WG).permute((1, 0)).store(S.to(buffer.dtype))
    fence_async_shared()
    tma_store(scan.outputs.S, [tile * scan.config.D, first_v], buffer.index(WG))


@jit
def finish_chunk(S, stage, pipeline):
    """Wait for the MMA that updates S, release the stage, and return S."""
    S = warpgroup_mma_wait(0, deps=(S,))
    pipeline.release(stage)
    return S


@jit
def advance(S, i, left, position, WG: gl.constexpr, scan):
    """Advance S through the CTA's chunk i on the general path; store o. `left` tokens are the sequence's."""
    tiles = scan.tiles
    outputs = scan.outputs
    D: gl.constexpr = scan.config.D
    HAS_OUTPUT: gl.constexpr = outputs.o is not None
    # K = 64: bf16 is too coarse for S, A_inv, v_new and the update, so all are split (`lib.operand_dtype`)
    SPLIT: gl.constexpr = D == STRIP
    stage, phase = stage_and_phase(i, scan.pipeline.empty)
    column = position.head * D + position.first_v
    qk_tile, k_tile = key_tiles(tiles.qk, stage, HAS_OUTPUT, D)
    tokens = gl.arange(0, C, gl.SliceLayout(1, TOKEN_ROWS))
    if HAS_OUTPUT and left < C:
        # zero k past the end; both consumers write the same zeros to shared memory, so they need no barrier
        k_tile.store(gl.where((tokens < left)[:, None], k_tile.load(TOKEN_ROWS), 0.0))
        fence_async_shared()
    qkS = issue_key_mma(S, qk_tile, HAS_OUTPUT, SPLIT)
    if outputs.S is not None and outputs.S.dtype == gl.bfloat16:
        store_entering_state(S, position.tile, position.first_v, WG, scan)
    v_tile = tiles.v.index(scan.config.CONSUMERS * stage + WG).reshape([C, STRIP])
    v_tile = v_tile.permute((1, 0)).load(ACC_TOKENS)
    o, kS = wait_key_mma(qkS, HAS_OUTPUT)
    r = v_tile.to(gl.float32) + tiles.load_row(stage, K_DECAY, PER_COLUMN)[None, :] * kS
    r = r * tiles.load_row(stage, BETA, PER_COLUMN)[None, :]
    if HAS_OUTPUT and left < C:
        r = gl.where((gl.arange(0, C, PER_COLUMN) < left)[None, :], r, 0.0)
    A_inv = tiles.A.index(2 * stage if SPLIT else stage).permute((1, 0))
    # v_new = r + (A_inv - 1) r; written out, as ptxas compiles a call of `mma_split_bf16` to other code
    high = (r.to(gl.uint32, bitcast=True) & 0xFFFF0000).to(gl.float32, bitcast=True)
    low = gl.convert_layout((r - high).to(gl.bfloat16), A_OPERAND)
    v_new = warpgroup_mma(gl.convert_layout(high.to(gl.bfloat16), A_OPERAND), A_inv, r, is_async=True)
    v_new = warpgroup_mma(low, A_inv, v_new, is_async=True)
    if SPLIT:
        rest = tiles.A.index(2 * stage + 1).permute((1, 0))
        v_new = warpgroup_mma(gl.convert_layout(high.to(gl.bfloat16), A_OPERAND), rest, v_new, is_async=True)
    if outputs.S is not None and outputs.S.dtype == gl.float32:
        # not while S^T is an operand of an MMA: ptxas would wait for that MMA
        store_entering_state(S, position.tile, position.first_v, WG, scan)
    # while the tensor cores compute v_new
    S = S * tiles.load_scalar(stage, CHUNK_DECAY * C)
    if HAS_OUTPUT:
        o = o * tiles.load_row(stage, Q_DECAY, PER_COLUMN)[None, :]
        v_new = warpgroup_mma_wait(0, deps=(v_new,))
        P = tiles.P.index(stage).permute((1, 0))
        if SPLIT:
            scan.pipeline.wait_scores(stage, phase)
            o = mma_split_bf16(v_new, P, o)
        else:
            w = gl.convert_layout(v_new.to(gl.bfloat16), A_OPERAND)
            # only now, just before the MMA that reads P from shared memory: a late P delays nothing else
            scan.pipeline.wait_scores(stage, phase)
            o = warpgroup_mma(w, P, o, is_async=True)
    else:
        v_new = warpgroup_mma_wait(0, deps=(v_new,))
    update = v_new * tiles.load_row(stage, UPDATE_DECAY, PER_COLUMN)[None, :]
    if SPLIT:
        S = mma_split_bf16(update, k_tile, S)
    else:
        S = warpgroup_mma(gl.convert_layout(update.to(gl.bfloat16), A_OPERAND), k_tile, S, is_async=True)
    if HAS_OUTPUT:
        if outputs.S is None or outputs.S.dtype == gl.bfloat16:
            # the buffer holds the previous outputs, or S, until TMA has read it; else the store of S waited
            tma_store_wait(0)
        # the MMAs that update S stay in flight
        o = warpgroup_mma_wait(2 if SPLIT else 1, deps=(o,))
        o_tile = tiles.o.index(WG).slice(0, C)
        o_tile.permute((1, 0)).store(o.to(gl.bfloat16))
        if left < C:
            # TMA would write past the sequence. Opaque: else the index vector holds registers in every chunk
            tokens = opaque(tokens)
            # not opaque: the compiler must see that a lane's 8 columns are adjacent to store 16 bytes at once
            columns = gl.arange(0, STRIP, gl.SliceLayout(0, TOKEN_ROWS))
            rows = (position.token + tokens[:, None]).to(gl.int64) * (scan.geometry.HV * D)
            place = rows + (column + columns[None, :])
            gl.store(outputs.o_ptr + place, o_tile.load(TOKEN_ROWS), mask=(tokens < left)[:, None])
        else:
            fence_async_shared()
            tma_store(outputs.o, [position.token, column], o_tile)
    return finish_chunk(S, stage, scan.pipeline)


@jit
def advance_fast(S, i, position, WG: gl.constexpr, scan):
    """Advance S through a well-conditioned chunk, whose A_inv is B, in one of two consumers; store o."""
    tiles = scan.tiles
    outputs = scan.outputs
    D: gl.constexpr = scan.config.D
    HAS_OUTPUT: gl.constexpr = outputs.o is not None
    # a bf16 state would go through the shared memory of the outputs
    gl.static_assert(D == 2 * STRIP and (outputs.S is None or outputs.S.dtype == gl.float32))
    stage, phase = stage_and_phase(i, scan.pipeline.empty)
    zeros = gl.zeros((STRIP, C // 2), gl.float32, ACC_HALF)
    qk_tile, k_tile = key_tiles(tiles.qk, stage, HAS_OUTPUT, D)
    qkS = issue_key_mma(S, qk_tile, HAS_OUTPUT, False)
    v_tile = tiles.v.index(2 * stage + WG).reshape([C, STRIP]).permute((1, 0)).load(ACC_TOKENS)
    o, kS = wait_key_mma(qkS, HAS_OUTPUT)
    r = v_tile.to(gl.float32) + tiles.load_row(stage, K_DECAY, PER_COLUMN)[None, :] * kS
    early, late = issue_lower_mma(r.to(gl.bfloat16), tiles.A.index(stage), zeros, zeros, False)
    if outputs.S is not None:
        store_entering_state(S, position.tile, WG * STRIP, WG, scan)
    # while the tensor cores compute w
    S = S * tiles.load_scalar(stage, CHUNK_DECAY * C)
    if HAS_OUTPUT:
        o = o * tiles.load_row(stage, Q_DECAY, PER_COLUMN)[None, :]
        o_early, o_late = split_columns(o, C // 2, ACC_HALF)
    early, late = warpgroup_mma_wait(0, deps=(early, late))
    # rounded once: the same registers are the A operand for o and for S
    w = join_columns(early.to(gl.bfloat16), late.to(gl.bfloat16))
    if HAS_OUTPUT:
        scan.pipeline.wait_scores(stage, phase)
        o_early, o_late = issue_lower_mma(w, tiles.P.index(stage), o_early, o_late, True)
    S = warpgroup_mma(gl.convert_layout(w, A_OPERAND), k_tile, S, is_async=True)
    if HAS_OUTPUT:
        if outputs.S is None:
            # until TMA has read the previous outputs there; else the state's store has waited
            tma_store_wait(0)
        o_early, o_late = warpgroup_mma_wait(1, deps=(o_early, o_late))
        o = join_columns(o_early.to(gl.bfloat16), o_late.to(gl.bfloat16))
        o_tile = tiles.o.index(WG).slice(0, C)
        o_tile.permute((1, 0)).store(o)
        fence_async_shared()
        tma_store(outputs.o, [position.token, position.head * D + WG * STRIP], o_tile)
    return finish_chunk(S, stage, scan.pipeline)


@jit
def advance_fast_saving(S, i, position, WG: gl.constexpr, scan):
    """Advance S through a well-conditioned chunk of a forward for a backward; store S, which entered, and o.

    The backward reads A_inv, so `solve` stores no B. r is the accumulator's first value in fp32, and is
    rounded only where the small A_inv - 1 multiplies it. w is split bf16 in the update of S, whose rounding
    reaches the gradients of all later chunks.
    """
    tiles = scan.tiles
    outputs = scan.outputs
    D: gl.constexpr = scan.config.D
    gl.static_assert(D == 2 * STRIP and (outputs.S is None or outputs.S.dtype == gl.bfloat16))
    stage, phase = stage_and_phase(i, scan.pipeline.empty)
    qk_tile, k_tile = key_tiles(tiles.qk, stage, True, D)
    qkS = issue_key_mma(S, qk_tile, True, False)
    if outputs.S is not None:
        store_entering_state(S, position.tile, position.first_v, WG, scan)
    v_tile = tiles.v.index(scan.config.CONSUMERS * stage + WG).reshape([C, STRIP])
    v_tile = v_tile.permute((1, 0)).load(ACC_TOKENS)
    o, kS = wait_key_mma(qkS, True)
    r = v_tile.to(gl.float32) + tiles.load_row(stage, K_DECAY, PER_COLUMN)[None, :] * kS
    r = r * tiles.load_row(stage, BETA, PER_COLUMN)[None, :]
    early, late = split_columns(r, C // 2, ACC_HALF)
    early, late = issue_lower_mma(r.to(gl.bfloat16), tiles.A.index(stage), early, late, True)
    # while the tensor cores compute v_new
    S = S * tiles.load_scalar(stage, CHUNK_DECAY * C)
    o = o * tiles.load_row(stage, Q_DECAY, PER_COLUMN)[None, :]
    o_early, o_late = split_columns(o, C // 2, ACC_HALF)
    early, late = warpgroup_mma_wait(0, deps=(early, late))
    w = join_columns(early, late) * tiles.load_row(stage, UPDATE_DECAY, PER_COLUMN)[None, :]
    hi, lo = split_bf16(w)
    scan.pipeline.wait_scores(stage, phase)
    o_early, o_late = issue_lower_mma(hi, tiles.P.index(stage), o_early, o_late, True)
    S = warpgroup_mma(gl.convert_layout(hi, A_OPERAND), k_tile, S, is_async=True)
    S = warpgroup_mma(gl.convert_layout(lo, A_OPERAND), k_tile, S, is_async=True)
    # until TMA has read S, or the previous outputs, in the buffer
    tma_store_wait(0)
    # the MMAs that update S stay in flight
    o_early, o_late = warpgroup_mma_wait(2, deps=(o_early, o_late))
    o_tile = tiles.o.index(WG).slice(0, C)
    o_tile.permute((1, 0)).store(join_columns(o_early.to(gl.bfloat16), o_late.to(gl.bfloat16)))
    fence_async_shared()
    tma_store(outputs.o, [position.token, position.head * D + position.first_v], o_tile)
    return finish_chunk(S, stage, scan.pipeline)


@jit
def advance_fast_single(S, i, position, scan):
    """Advance S through a well-conditioned chunk in the CTA's only consumer warpgroup; store o.

    It has registers to load v and factors while S is rounded, and no other consumer competes for the tensor
    cores. k S is an MMA of its own, so that r is computed while q S is multiplied. One fence serves o and the
    release of the stage.
    """
    tiles = scan.tiles
    outputs = scan.outputs
    D: gl.constexpr = scan.config.D
    # a bf16 state would go through the shared memory of the outputs
    gl.static_assert(D == 2 * STRIP and (outputs.S is None or outputs.S.dtype == gl.float32))
    stage, phase = stage_and_phase(i, scan.pipeline.empty)
    none = gl.zeros((STRIP, C), gl.float32, ACC_TOKENS)
    zeros = gl.zeros((STRIP, C // 2), gl.float32, ACC_HALF)
    qk_tile, k_tile = key_tiles(tiles.qk, stage, True, D)
    v_tile = tiles.v.index(stage).reshape([C, STRIP]).permute((1, 0)).load(ACC_TOKENS)
    k_decay = tiles.load_row(stage, K_DECAY, PER_COLUMN)
    chunk_decay = tiles.load_scalar(stage, CHUNK_DECAY * C)
    # two MMAs in flight, k S first: r needs only k S, q S is needed later
    x = gl.convert_layout(S.to(gl.bfloat16), A_OPERAND)
    kS = warpgroup_mma(x, k_tile.permute((1, 0)), none, use_acc=False, is_async=True)
    o = warpgroup_mma(x, qk_tile.slice(0, C).permute((1, 0)), none, use_acc=False, is_async=True)
    if outputs.S is None:
        # until TMA has read the previous outputs there; else the state's store waits
        tma_store_wait(0)
        S = S * chunk_decay
    q_decay = tiles.load_row(stage, Q_DECAY, PER_COLUMN)
    # the MMA of q S may still run on the tensor cores
    kS = warpgroup_mma_wait(1, deps=(kS,))
    r = v_tile.to(gl.float32) + k_decay[None, :] * kS
    early, late = issue_lower_mma(r.to(gl.bfloat16), tiles.A.index(stage), zeros, zeros, False)
    if outputs.S is not None:
        # not while S^T is an operand of an MMA: ptxas would wait for that MMA
        store_entering_state(S, position.tile, position.first_v, 0, scan)
        S = S * chunk_decay
    o = warpgroup_mma_wait(2, deps=(o,))
    o_early, o_late = split_columns(o * q_decay[None, :], C // 2, ACC_HALF)
    early, late = warpgroup_mma_wait(0, deps=(early, late))
    w = join_columns(early.to(gl.bfloat16), late.to(gl.bfloat16))
    scan.pipeline.wait_scores(stage, phase)
    o_early, o_late = issue_lower_mma(w, tiles.P.index(stage), o_early, o_late, True)
    S = warpgroup_mma(gl.convert_layout(w, A_OPERAND), k_tile, S, is_async=True)
    o_early, o_late = warpgroup_mma_wait(1, deps=(o_early, o_late))
    o_tile = tiles.o.index(0).slice(0, C)
    o_tile.permute((1, 0)).store(join_columns(o_early.to(gl.bfloat16), o_late.to(gl.bfloat16)))
    # its fence also orders the writes of o to shared memory before the TMA store
    S = finish_chunk(S, stage, scan.pipeline)
    tma_store(outputs.o, [position.token, position.head * D + position.first_v], o_tile)
    return S
