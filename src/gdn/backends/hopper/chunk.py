"""A chunk in the walk: S after it, and its outputs, of 64 value rows of S^T.

    r = beta (v - e^G k S);   v_new = A_inv r;   o = scale e^G q S + P v_new
    S <- e^(G_C) S + (e^(G_C - G) k)^T v_new

`advance` takes any chunk, r in two parts. `glide` takes tame ones, with B in the place of A_inv: little more
than roundings is then between the products of the chain,

    w = e^(G_C - G) v_new = B (v - e^G k S);   B = e^(G_C - G) A_inv beta
    o = scale e^G q S + P w;   P = scale e^(G - G_C) q k^T;   S <- e^(G_C) S + k^T w

A chunk is tame where that loses little, which `solve` finds out: whole, A small, as it is where keys are not
alike, and a decay that leaves e^(G_i - G_C) room.
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
STRIP = gl.constexpr(64)  # value rows of a chain
JOBS = gl.constexpr(2)  # told and not yet begun

# numbers of a job: row, first token, length, first chunk, where its last state goes and where its first comes
# from (below 0: nowhere)
JOB = gl.constexpr(6)

# value rows down, tokens or keys across
OF_TOKENS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OF_STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
OF_HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, OF_TOKENS.value, 2))
ACROSS = gl.constexpr(gl.SliceLayout(0, OF_TOKENS.value))
DOWN = gl.constexpr(gl.SliceLayout(1, OF_TOKENS.value))
# a tile of bf16 as tensor copies swizzle it
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# tokens down, as they lie in memory
BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def sequence(job, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound):
    """Row, first token in it, length and first chunk of a job's sequence: see `triton.chunks`.

    A table without cu_seqlens is one of jobs: see `split`.
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
    """The job of a number that a program has taken, and which strip of values is the chain's.

    Where a program has fewer chains than a state has strips, the job's programs have numbers in a row.
    """
    PIECES: gl.constexpr = D // STRIP // CHAINS
    return taken // PIECES, taken % PIECES + MINE


@gluon.jit
def is_of_map(job, table_ptr):
    """Whether a job of `ends_kernel` is a span's M: its goal is odd, as is -1 of jobs that have none."""
    return (gl.load(table_ptr + job * JOB + 4) & 1) == 1


@gluon.jit
def turn_of(i, barriers):
    """Which of the places that take turns is chunk i's, and the parity of its turn."""
    COUNT: gl.constexpr = barriers.shape[0]
    return i % COUNT, (i // COUNT) & 1


@gluon.jit
def job_at(turn, ring):
    """The program's job at this turn, of which load_chunks tells; its only one where that does not."""
    if ring is None:
        return gl.program_id(0) + turn * gl.num_programs(0)
    else:
        job_s, job_full, job_empty = ring
        place, parity = turn_of(turn, job_full)
        mbarrier.wait(job_full.index(place), parity)
        # a maximum over one is the same for all lanes
        job = gl.max(job_s.index(place).load(ONE), 0)
        fence_async_shared()
        mbarrier.arrive(job_empty.index(place), count=1)
        return job


@gluon.jit
def vector(f_s, stage, ROW: gl.constexpr, layout: gl.constexpr):
    """One row of a chunk's factors [C]."""
    return f_s.index(ROWS * stage + ROW).reshape([C]).load(layout)


@gluon.jit
def number(f_s, stage, PLACE: gl.constexpr):
    """One of a chunk's factors, the same for all lanes."""
    row = f_s.index(ROWS * stage + PLACE // C).reshape([C])
    return gl.max(row.slice(PLACE % C, 1).load(ONE), 0)


@gluon.jit
def in_parts(x, b, acc):
    """acc + x b, two products in flight, x in two parts as in `triton.lib.cut`."""
    high = (x.to(gl.uint32, bitcast=True) & 0xFFFF0000).to(gl.float32, bitcast=True)
    low = gl.convert_layout((x - high).to(gl.bfloat16), LEFT)
    acc = warpgroup_mma(gl.convert_layout(high.to(gl.bfloat16), LEFT), b, acc, is_async=True)
    return warpgroup_mma(low, b, acc, is_async=True)


@gluon.jit
def keys_of(qk_s, stage, HAS_Q: gl.constexpr, D: gl.constexpr):
    """q of a chunk's tokens with k below it, where there is q, and k alone."""
    if HAS_Q:
        qk_tile = qk_s.index(stage).reshape([2 * C, D])
        return qk_tile, qk_tile.slice(C, C)
    else:
        k_tile = qk_s.index(stage).reshape([C, D])
        return k_tile, k_tile


@gluon.jit
def times_keys(S, qk_tile, HAS_Q: gl.constexpr, FEW: gl.constexpr):
    """S [q; k]^T in flight, one product, so that S is read half as often; without q S k^T."""
    if HAS_Q:
        zeros = gl.zeros((STRIP, 2 * C), gl.float32, OF_STATE)
    else:
        zeros = gl.zeros((STRIP, C), gl.float32, OF_TOKENS)
    qk = qk_tile.permute((1, 0))
    if FEW:
        return in_parts(S, qk, zeros)
    else:
        S = gl.convert_layout(S.to(gl.bfloat16), LEFT)
        return warpgroup_mma(S, qk, zeros, use_acc=False, is_async=True)


@gluon.jit
def apart(x, WIDTH: gl.constexpr, layout: gl.constexpr):
    """The left and the right half of x, of so many columns each, in the registers where they are."""
    left, right = gl.split(gl.permute(gl.reshape(x, (STRIP, 2, WIDTH)), (0, 2, 1)))
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def keys_read(qkS, HAS_Q: gl.constexpr):
    """q S and k S from `times_keys` when it is done; without q k S for both.

    Of the first nothing may be the accumulator before it is scaled: ptxas gives no register of a product to a
    narrower one (C7511).
    """
    qkS = warpgroup_mma_wait(0, deps=(qkS,))
    if HAS_Q:
        return apart(qkS, C, OF_TOKENS)
    else:
        return qkS, qkS


@gluon.jit
def together(early, late):
    """Of the first 32 tokens and of the others: of all, in the registers where they are."""
    x = gl.reshape(gl.permute(gl.join(early, late), (0, 2, 1)), (STRIP, C))
    return gl.convert_layout(x, OF_TOKENS)


@gluon.jit
def times_lower(x, lower, early, late, ADDS: gl.constexpr):
    """x lower^T of the first 32 tokens, which have nothing of the others, and of these, in flight."""
    first, _ = apart(x, C // 2, OF_HALF)
    corner = lower.slice(0, C // 2).slice(0, C // 2, 1).permute((1, 0))
    early = warpgroup_mma(gl.convert_layout(first, LEFT), corner, early, use_acc=ADDS, is_async=True)
    below = lower.slice(C // 2, C // 2).permute((1, 0))
    late = warpgroup_mma(gl.convert_layout(x, LEFT), below, late, use_acc=ADDS, is_async=True)
    return early, late


@gluon.jit
def keep(S, S_d, S_s, tile, first_v, MINE: gl.constexpr, D: gl.constexpr):
    """S as it enters a chunk, keys down."""
    tma_store_wait(0)
    S_s.index(MINE).permute((1, 0)).store(S.to(S_s.dtype))
    fence_async_shared()
    tma_store(S_d, [tile * D, first_v], S_s.index(MINE))


@gluon.jit
def leave(S, stage, empty):
    """S when its product is done; the stage is free of this chain."""
    S = warpgroup_mma_wait(0, deps=(S,))
    # what was loaded from the stage comes before the tensor copies that overwrite it
    fence_async_shared()
    mbarrier.arrive(empty.index(stage), count=1)
    return S


@gluon.jit
def advance(
    S, i, left, MINE: gl.constexpr, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s,
    empty, P_full, o_ptr, token, tile, head, first_v, HV, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """S after chunk i of all that come, of which `left` tokens are the sequence's own; o is stored."""
    stage, parity = turn_of(i, empty)
    # of few keys S, A_inv, v_new and what S grows by are multiplied in two parts: see `triton.lib.operand_of`
    FEW: gl.constexpr = D == STRIP
    column = head * D + first_v
    qk_tile, k_tile = keys_of(qk_s, stage, o_d is not None, D)
    tokens = gl.arange(0, C, gl.SliceLayout(1, BY_ROWS))
    if o_d is not None and left < C:
        # each chain does: what they store is the same, whatever of it another has read
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
    # A_inv comes less 1; `in_parts`, but called ptxas makes other code of it than was measured
    high = (r.to(gl.uint32, bitcast=True) & 0xFFFF0000).to(gl.float32, bitcast=True)
    low = gl.convert_layout((r - high).to(gl.bfloat16), LEFT)
    v_new = warpgroup_mma(gl.convert_layout(high.to(gl.bfloat16), LEFT), A_inv, r, is_async=True)
    v_new = warpgroup_mma(low, A_inv, v_new, is_async=True)
    if FEW:
        rest = A_s.index(2 * stage + 1).permute((1, 0))
        v_new = warpgroup_mma(gl.convert_layout(high.to(gl.bfloat16), LEFT), rest, v_new, is_async=True)
    if S_d is not None and S_d.dtype == gl.float32:
        # not while S is multiplied: ptxas would wait for that
        keep(S, S_d, S_s, tile, first_v, MINE, D)
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
            mbarrier.wait(P_full.index(stage), parity)
            o = warpgroup_mma(w, P, o, is_async=True)
    grown = v_new * vector(f_s, stage, OUT, ACROSS)[None, :]
    if FEW:
        S = in_parts(grown, k_tile, S)
    else:
        S = warpgroup_mma(gl.convert_layout(grown.to(gl.bfloat16), LEFT), k_tile, S, is_async=True)
    if o_d is not None:
        if S_d is None or S_d.dtype == gl.bfloat16:
            # the outputs before, or S, lie there; else `keep` has waited for them
            tma_store_wait(0)
        o = warpgroup_mma_wait(2 if FEW else 1, deps=(o,))
        o_tile = o_s.index(MINE).slice(0, C)
        o_tile.permute((1, 0)).store(o.to(gl.bfloat16))
        if left < C:
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
    """Whether `solve` found the chunk tame."""
    return number(f_s, stage, TAME) > 0.0


@gluon.jit
def glide(
    S, i, MINE: gl.constexpr, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, empty, P_full,
    token, tile, head, D: gl.constexpr,
):  # fmt: skip
    """`advance` over a tame chunk, whose A_inv is B, by one of two chains."""
    # states in 16 bits lie where outputs do
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
    S = S * number(f_s, stage, END * C)
    if o_d is not None:
        o_early, o_late = apart(o * vector(f_s, stage, READ, ACROSS)[None, :], C // 2, OF_HALF)
    early, late = warpgroup_mma_wait(0, deps=(early, late))
    w = together(early.to(gl.bfloat16), late.to(gl.bfloat16))
    if o_d is not None:
        mbarrier.wait(P_full.index(stage), parity)
        o_early, o_late = times_lower(w, P_s.index(stage), o_early, o_late, True)
    S = warpgroup_mma(gl.convert_layout(w, LEFT), k_tile, S, is_async=True)
    if o_d is not None:
        if S_d is None:
            tma_store_wait(0)  # the outputs before lie there; else `keep` has waited for them
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
    """`glide` by the only chain of a program, which has registers for all that it reads and waits for nobody.

    All is read while S is rounded; k S is a product of its own, so that r is made beside q S; outputs and the
    stage have a fence together.
    """
    # states in 16 bits lie where outputs do
    gl.static_assert(D == 2 * STRIP and (S_d is None or S_d.dtype == gl.float32))
    stage, parity = turn_of(i, empty)
    none = gl.zeros((STRIP, C), gl.float32, OF_TOKENS)
    zeros = gl.zeros((STRIP, C // 2), gl.float32, OF_HALF)
    qk_tile, k_tile = keys_of(qk_s, stage, True, D)
    v_tile = v_s.index(stage).reshape([C, STRIP]).permute((1, 0)).load(OF_TOKENS)
    into = vector(f_s, stage, INTO, ACROSS)
    decay = number(f_s, stage, END * C)
    x = gl.convert_layout(S.to(gl.bfloat16), LEFT)
    kS = warpgroup_mma(x, k_tile.permute((1, 0)), none, use_acc=False, is_async=True)
    o = warpgroup_mma(x, qk_tile.slice(0, C).permute((1, 0)), none, use_acc=False, is_async=True)
    if S_d is None:
        tma_store_wait(0)  # the outputs before lie where these will; else `keep` waits for them
        S = S * decay
    read = vector(f_s, stage, READ, ACROSS)
    kS = warpgroup_mma_wait(1, deps=(kS,))
    r = v_tile.to(gl.float32) + into[None, :] * kS
    early, late = times_lower(r.to(gl.bfloat16), A_s.index(stage), zeros, zeros, False)
    if S_d is not None:
        # not while S is multiplied: ptxas would wait for that
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
    S = leave(S, stage, empty)
    tma_store(o_d, [token, head * D + first_v], o_tile)
    return S
