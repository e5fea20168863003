"""Advance 64 value rows of S^T through one chunk, and compute their outputs, in a consumer warpgroup.

    r = beta (v - e^G k S);   v_new = A_inv r;   o = scale e^G q S + P v_new
    S <- e^(G_C) S + (e^(G_C - G) k)^T v_new

`advance` is the general path: any chunk, with r as split bf16 (hi + lo). `glide` is the fast path, for
well-conditioned chunks. It has B in the place of A_inv, so that little but roundings separates the MMAs:

    w = e^(G_C - G) v_new = B (v - e^G k S);   B = e^(G_C - G) A_inv beta
    o = scale e^G q S + P w;   P = scale e^(G - G_C) q k^T;   S <- e^(G_C) S + k^T w

`solve` tests each chunk (`TAME`). A chunk is well-conditioned, and the fast path accurate, if it has 64
tokens, its A is small, as it is where keys differ, and its decay is such that e^(G_i - G_C) fits fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import BETA, END, INTO, OUT, READ, ROWS, TAME
from gdn.backends.hopper.gluon import (
    fence_async_shared,
    here,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from gdn.backends.triton.chunks import SEQUENCE

C = gl.constexpr(64)  # tokens of a chunk
STRIP = gl.constexpr(64)  # value rows of S^T of a consumer warpgroup
JOBS = gl.constexpr(2)  # slots in shared memory for published work items

# int32 fields of a segment's work item in HBM: row, first token, length, first chunk, index of the state to
# store, index of the state to start from (below 0: none)
JOB = gl.constexpr(6)

# WGMMA accumulators in registers, value rows down: [64, C tokens], [64, 128 keys or 2 C tokens], [64, C / 2]
OF_TOKENS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OF_STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
OF_HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, OF_TOKENS.value, 2))
ACROSS = gl.constexpr(gl.SliceLayout(0, OF_TOKENS.value))
DOWN = gl.constexpr(gl.SliceLayout(1, OF_TOKENS.value))
# a bf16 tile in shared memory, swizzled as TMA writes it and WGMMA reads it
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# tokens down, as they lie in HBM: 16 bytes a lane
BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def sequence(job, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound):
    """Return row, first token in it, length and first chunk of a work item's tokens: see `triton.chunks`.

    A table without cu_seqlens holds the work items of segments: see `split`.
    """
    n = job // HV
    if table_ptr is None:
        return n, n * 0, T, n * chunks_per_row
    elif cu_seqlens_ptr is None:
        numbers = table_ptr + job * JOB
        return gl.load(numbers), gl.load(numbers + 1), gl.load(numbers + 2), gl.load(numbers + 3)
    else:
        first = gl.load(cu_seqlens_ptr + n).to(gl.int32)
        length = gl.load(cu_seqlens_ptr + n + 1).to(gl.int32) - first
        return n * 0, first, length, gl.load(table_ptr + 2 * bound + SEQUENCE * n)


@gluon.jit
def parted(taken, MINE: gl.constexpr, CHAINS: gl.constexpr, D: gl.constexpr):
    """Return the work item of a scheduled number, and the 64 value rows of it that consumer MINE holds."""
    # with one consumer a CTA and V = 128, two consecutive numbers are the two halves of one work item
    PIECES: gl.constexpr = D // STRIP // CHAINS
    return taken // PIECES, taken % PIECES + MINE


@gluon.jit
def is_of_map(job, table_ptr):
    """Return True if a work item of `ends_kernel` is a segment's M: its state index is odd (or -1: none)."""
    return (gl.load(table_ptr + job * JOB + 4) & 1) == 1


@gluon.jit
def turn_of(i, barriers):
    """Return the pipeline stage (or slot) that i uses, and the mbarrier phase to wait for."""
    COUNT: gl.constexpr = barriers.shape[0]
    return i % COUNT, (i // COUNT) & 1


@gluon.jit
def job_at(turn, ring):
    """Return the work item of a turn as the producer published it; without a ring a CTA has only one."""
    if ring is None:
        return gl.program_id(0) + turn * gl.num_programs(0)
    else:
        job_s, job_full, job_empty = ring
        place, parity = turn_of(turn, job_full)
        mbarrier.wait(job_full.index(place), parity)
        # a maximum over one element: every lane gets it as a scalar register
        job = gl.max(job_s.index(place).load(ONE), 0)
        fence_async_shared()
        # the producer may overwrite the slot
        mbarrier.arrive(job_empty.index(place), count=1)
        return job


@gluon.jit
def vector(f_s, stage, ROW: gl.constexpr, layout: gl.constexpr):
    """Load one row of a chunk's factors [C] from shared memory."""
    return f_s.index(ROWS * stage + ROW).reshape([C]).load(layout)


@gluon.jit
def number(f_s, stage, PLACE: gl.constexpr):
    """Load one factor of a chunk from shared memory as a scalar."""
    row = f_s.index(ROWS * stage + PLACE // C).reshape([C])
    return gl.max(row.slice(PLACE % C, 1).load(ONE), 0)


@gluon.jit
def in_parts(x, b, acc):
    """Issue acc + x b as two asynchronous MMAs, x as split bf16, as `triton.lib.split_bf16` does."""
    high = (x.to(gl.uint32, bitcast=True) & 0xFFFF0000).to(gl.float32, bitcast=True)
    low = gl.convert_layout((x - high).to(gl.bfloat16), LEFT)
    acc = warpgroup_mma(gl.convert_layout(high.to(gl.bfloat16), LEFT), b, acc, is_async=True)
    return warpgroup_mma(low, b, acc, is_async=True)


@gluon.jit
def keys_of(qk_s, stage, HAS_Q: gl.constexpr, D: gl.constexpr):
    """Return views of a stage in shared memory: q over k [2C, K] (without q, k alone), and k [C, K]."""
    if HAS_Q:
        qk_tile = qk_s.index(stage).reshape([2 * C, D])
        return qk_tile, qk_tile.slice(C, C)
    else:
        k_tile = qk_s.index(stage).reshape([C, D])
        return k_tile, k_tile


@gluon.jit
def times_keys(S, qk_tile, HAS_Q: gl.constexpr, FEW: gl.constexpr):
    """Issue S^T [q; k]^T [64, 2C] as asynchronous MMAs, or S^T k^T [64, C]; FEW: S^T as split bf16."""
    if HAS_Q:
        zeros = gl.zeros((STRIP, 2 * C), gl.float32, OF_STATE)
    else:
        zeros = gl.zeros((STRIP, C), gl.float32, OF_TOKENS)
    # one MMA of N = 128 for q and k: the tensor cores read S^T from registers once, not twice
    qk = qk_tile.permute((1, 0))
    if FEW:
        return in_parts(S, qk, zeros)
    else:
        S = gl.convert_layout(S.to(gl.bfloat16), LEFT)
        return warpgroup_mma(S, qk, zeros, use_acc=False, is_async=True)


@gluon.jit
def apart(x, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Split x [64, 2 WIDTH] into its left and right half; each value stays in its register."""
    left, right = gl.split(gl.permute(gl.reshape(x, (STRIP, 2, WIDTH)), (0, 2, 1)))
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def keys_read(qkS, HAS_Q: gl.constexpr):
    """Wait for the MMAs of `times_keys`; return q S and k S, or k S twice without q.

    q S must be scaled before it becomes an accumulator: ptxas does not give the registers of one MMA's
    accumulator to a narrower MMA (C7511).
    """
    qkS = warpgroup_mma_wait(0, deps=(qkS,))
    if HAS_Q:
        return apart(qkS, C, OF_TOKENS)
    else:
        return qkS, qkS


@gluon.jit
def together(early, late):
    """Join the columns of a chunk's first and last 32 tokens to [64, C]; each value stays in its register."""
    x = gl.reshape(gl.permute(gl.join(early, late), (0, 2, 1)), (STRIP, C))
    return gl.convert_layout(x, OF_TOKENS)


@gluon.jit
def times_lower(x, lower, early, late, ADDS: gl.constexpr):
    """Issue x lower^T as MMAs for the first and the last 32 tokens, skipping the zero upper right quarter."""
    first, _ = apart(x, C // 2, OF_HALF)
    corner = lower.slice(0, C // 2).slice(0, C // 2, 1).permute((1, 0))
    early = warpgroup_mma(gl.convert_layout(first, LEFT), corner, early, use_acc=ADDS, is_async=True)
    below = lower.slice(C // 2, C // 2).permute((1, 0))
    late = warpgroup_mma(gl.convert_layout(x, LEFT), below, late, use_acc=ADDS, is_async=True)
    return early, late


@gluon.jit
def keep(S, S_d, S_s, tile, first_v, MINE: gl.constexpr, D: gl.constexpr):
    """Store S as it enters a chunk to HBM, keys down: registers to shared memory, then a TMA store."""
    # the TMA store before must have read the buffer
    tma_store_wait(0)
    S_s.index(MINE).permute((1, 0)).store(S.to(S_s.dtype))
    fence_async_shared()
    tma_store(S_d, [tile * D, first_v], S_s.index(MINE))


@gluon.jit
def leave(S, stage, empty):
    """Wait for the MMA that updates S, release the stage, and return S."""
    S = warpgroup_mma_wait(0, deps=(S,))
    # order this warpgroup's reads of the stage before the TMA loads that overwrite it
    fence_async_shared()
    mbarrier.arrive(empty.index(stage), count=1)
    return S


@gluon.jit
def advance(
    S, i, left, MINE: gl.constexpr, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s,
    empty, P_full, o_ptr, token, tile, head, first_v, HV, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Advance S through the CTA's chunk i on the general path; store o. `left` tokens are the sequence's."""
    stage, parity = turn_of(i, empty)
    # K = 64: bf16 is too coarse for S, A_inv, v_new and the update, so all are split: `triton.lib.operand_of`
    FEW: gl.constexpr = D == STRIP
    column = head * D + first_v
    qk_tile, k_tile = keys_of(qk_s, stage, o_d is not None, D)
    tokens = gl.arange(0, C, gl.SliceLayout(1, BY_ROWS))
    if o_d is not None and left < C:
        # zero k past the end; both consumers write the same zeros to shared memory, so they need no barrier
        k_tile.store(gl.where((tokens < left)[:, None], k_tile.load(BY_ROWS), 0.0))
        fence_async_shared()
    qkS = times_keys(S, qk_tile, o_d is not None, FEW)
    if S_d is not None and S_d.dtype == gl.bfloat16:
        keep(S, S_d, S_s, tile, first_v, MINE, D)
    v_tile = v_s.index(CHAINS * stage + MINE).reshape([C, STRIP]).permute((1, 0)).load(OF_TOKENS)
    o, kS = keys_read(qkS, o_d is not None)
    r = v_tile.to(gl.float32) + vector(f_s, stage, INTO, ACROSS)[None, :] * kS
    r = r * vector(f_s, stage, BETA, ACROSS)[None, :]
    if o_d is not None and left < C:
        r = gl.where((gl.arange(0, C, ACROSS) < left)[None, :], r, 0.0)
    A_inv = A_s.index(2 * stage if FEW else stage).permute((1, 0))
    # v_new = r + (A_inv - 1) r; written out, since ptxas compiles a call of `in_parts` to other code
    high = (r.to(gl.uint32, bitcast=True) & 0xFFFF0000).to(gl.float32, bitcast=True)
    low = gl.convert_layout((r - high).to(gl.bfloat16), LEFT)
    v_new = warpgroup_mma(gl.convert_layout(high.to(gl.bfloat16), LEFT), A_inv, r, is_async=True)
    v_new = warpgroup_mma(low, A_inv, v_new, is_async=True)
    if FEW:
        rest = A_s.index(2 * stage + 1).permute((1, 0))
        v_new = warpgroup_mma(gl.convert_layout(high.to(gl.bfloat16), LEFT), rest, v_new, is_async=True)
    if S_d is not None and S_d.dtype == gl.float32:
        # not while S^T is an operand of an MMA: ptxas would wait for that MMA
        keep(S, S_d, S_s, tile, first_v, MINE, D)
    # while the tensor cores compute v_new
    S = S * number(f_s, stage, END * C)
    if o_d is None:
        v_new = warpgroup_mma_wait(0, deps=(v_new,))
    else:
        o = o * vector(f_s, stage, READ, ACROSS)[None, :]
        v_new = warpgroup_mma_wait(0, deps=(v_new,))
        P = P_s.index(stage).permute((1, 0))
        if FEW:
            mbarrier.wait(P_full.index(stage), parity)
            o = in_parts(v_new, P, o)
        else:
            w = gl.convert_layout(v_new.to(gl.bfloat16), LEFT)
            # only now, just before the MMA that reads P from shared memory: a late P delays nothing else
            mbarrier.wait(P_full.index(stage), parity)
            o = warpgroup_mma(w, P, o, is_async=True)
    grown = v_new * vector(f_s, stage, OUT, ACROSS)[None, :]
    if FEW:
        S = in_parts(grown, k_tile, S)
    else:
        S = warpgroup_mma(gl.convert_layout(grown.to(gl.bfloat16), LEFT), k_tile, S, is_async=True)
    if o_d is not None:
        if S_d is None or S_d.dtype == gl.bfloat16:
            # the buffer holds the previous outputs, or S, until TMA has read it; else `keep` has waited
            tma_store_wait(0)
        # the MMAs that update S stay in flight
        o = warpgroup_mma_wait(2 if FEW else 1, deps=(o,))
        o_tile = o_s.index(MINE).slice(0, C)
        o_tile.permute((1, 0)).store(o.to(gl.bfloat16))
        if left < C:
            # TMA would write past the sequence. Opaque: else the index vectors hold registers in every chunk
            tokens = here(tokens)
            columns = here(gl.arange(0, STRIP, gl.SliceLayout(0, BY_ROWS)))
            place = (token + tokens[:, None]).to(gl.int64) * (HV * D) + (column + columns[None, :])
            gl.store(o_ptr + place, o_tile.load(BY_ROWS), mask=(tokens < left)[:, None])
        else:
            fence_async_shared()
            tma_store(o_d, [token, column], o_tile)
    return leave(S, stage, empty)


@gluon.jit
def is_tame(f_s, stage):
    """Return True if `solve` found the chunk of a stage well-conditioned."""
    return number(f_s, stage, TAME) > 0.0


@gluon.jit
def glide(
    S, i, MINE: gl.constexpr, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, empty, P_full,
    token, tile, head, D: gl.constexpr,
):  # fmt: skip
    """Advance S through a well-conditioned chunk, whose A_inv is B, in one of two consumers; store o."""
    # a bf16 state would go through the shared memory of the outputs
    gl.static_assert(D == 2 * STRIP and (S_d is None or S_d.dtype == gl.float32))
    stage, parity = turn_of(i, empty)
    zeros = gl.zeros((STRIP, C // 2), gl.float32, OF_HALF)
    qk_tile, k_tile = keys_of(qk_s, stage, o_d is not None, D)
    qkS = times_keys(S, qk_tile, o_d is not None, False)
    v_tile = v_s.index(2 * stage + MINE).reshape([C, STRIP]).permute((1, 0)).load(OF_TOKENS)
    o, kS = keys_read(qkS, o_d is not None)
    r = v_tile.to(gl.float32) + vector(f_s, stage, INTO, ACROSS)[None, :] * kS
    early, late = times_lower(r.to(gl.bfloat16), A_s.index(stage), zeros, zeros, False)
    if S_d is not None:
        keep(S, S_d, S_s, tile, MINE * STRIP, MINE, D)
    # while the tensor cores compute w
    S = S * number(f_s, stage, END * C)
    if o_d is not None:
        o_early, o_late = apart(o * vector(f_s, stage, READ, ACROSS)[None, :], C // 2, OF_HALF)
    early, late = warpgroup_mma_wait(0, deps=(early, late))
    # rounded once: the same registers are the A operand for o and for S
    w = together(early.to(gl.bfloat16), late.to(gl.bfloat16))
    if o_d is not None:
        mbarrier.wait(P_full.index(stage), parity)
        o_early, o_late = times_lower(w, P_s.index(stage), o_early, o_late, True)
    S = warpgroup_mma(gl.convert_layout(w, LEFT), k_tile, S, is_async=True)
    if o_d is not None:
        if S_d is None:
            tma_store_wait(0)  # until TMA has read the previous outputs there; else `keep` has waited
        o_early, o_late = warpgroup_mma_wait(1, deps=(o_early, o_late))
        o = together(o_early.to(gl.bfloat16), o_late.to(gl.bfloat16))
        o_tile = o_s.index(MINE).slice(0, C)
        o_tile.permute((1, 0)).store(o)
        fence_async_shared()
        tma_store(o_d, [token, head * D + MINE * STRIP], o_tile)
    return leave(S, stage, empty)


@gluon.jit
def glide_alone(
    S, i, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, empty, P_full,
    token, tile, head, first_v, D: gl.constexpr,
):  # fmt: skip
    """Advance S through a well-conditioned chunk in the CTA's only consumer warpgroup; store o.

    It has registers to load v and factors while S is rounded, and no other consumer competes for the tensor
    cores. k S is an MMA of its own, so that r is computed while q S is multiplied. One fence serves o and the
    release of the stage.
    """
    # a bf16 state would go through the shared memory of the outputs
    gl.static_assert(D == 2 * STRIP and (S_d is None or S_d.dtype == gl.float32))
    stage, parity = turn_of(i, empty)
    none = gl.zeros((STRIP, C), gl.float32, OF_TOKENS)
    zeros = gl.zeros((STRIP, C // 2), gl.float32, OF_HALF)
    qk_tile, k_tile = keys_of(qk_s, stage, True, D)
    v_tile = v_s.index(stage).reshape([C, STRIP]).permute((1, 0)).load(OF_TOKENS)
    into = vector(f_s, stage, INTO, ACROSS)
    decay = number(f_s, stage, END * C)
    # two MMAs in flight, k S first: r needs only k S, q S is needed later
    x = gl.convert_layout(S.to(gl.bfloat16), LEFT)
    kS = warpgroup_mma(x, k_tile.permute((1, 0)), none, use_acc=False, is_async=True)
    o = warpgroup_mma(x, qk_tile.slice(0, C).permute((1, 0)), none, use_acc=False, is_async=True)
    if S_d is None:
        tma_store_wait(0)  # until TMA has read the previous outputs there; else `keep` waits for them
        S = S * decay
    read = vector(f_s, stage, READ, ACROSS)
    # the MMA of q S may still run on the tensor cores
    kS = warpgroup_mma_wait(1, deps=(kS,))
    r = v_tile.to(gl.float32) + into[None, :] * kS
    early, late = times_lower(r.to(gl.bfloat16), A_s.index(stage), zeros, zeros, False)
    if S_d is not None:
        # not while S^T is an operand of an MMA: ptxas would wait for that MMA
        keep(S, S_d, S_s, tile, first_v, 0, D)
        S = S * decay
    o = warpgroup_mma_wait(2, deps=(o,))
    o_early, o_late = apart(o * read[None, :], C // 2, OF_HALF)
    early, late = warpgroup_mma_wait(0, deps=(early, late))
    w = together(early.to(gl.bfloat16), late.to(gl.bfloat16))
    mbarrier.wait(P_full.index(stage), parity)
    o_early, o_late = times_lower(w, P_s.index(stage), o_early, o_late, True)
    S = warpgroup_mma(gl.convert_layout(w, LEFT), k_tile, S, is_async=True)
    o_early, o_late = warpgroup_mma_wait(1, deps=(o_early, o_late))
    o_tile = o_s.index(0).slice(0, C)
    o_tile.permute((1, 0)).store(together(o_early.to(gl.bfloat16), o_late.to(gl.bfloat16)))
    # its fence also orders the writes of o to shared memory before the TMA store
    S = leave(S, stage, empty)
    tma_store(o_d, [token, head * D + first_v], o_tile)
    return S
