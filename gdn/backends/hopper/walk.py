"""The state pass and all outputs in one walk over the chunks, by four partitions of one program.

    r = beta (v - e^G k S);   v_new = A_inv r;   o = scale e^G q S + P v_new
    S <- e^(G_C) S + (e^(G_C - G) k)^T v_new

A program has one sequence and value head, S transposed, [V, K], so that S, r and v_new are left operands from
the registers in which the last product left them:

    load_chunks    one warp: a chunk's tiles by tensor copies (TMA), two chunks deep
    make_pairs     four warps: P, for both chains
    carry          four warps, twice: the chain of 64 value rows of S, and their outputs; once at V = 64

A_inv and the factors come from `solve`. Tokens past a sequence's end may be another's, NaN among them: r
is masked and k cleared there, and o is stored by rows, for a tensor copy would write past the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import BETA, END, FROM, INTO, OUT, READ, ROWS, TO
from gdn.backends.hopper.gluon import (
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    kernel,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

C = gl.constexpr(64)  # tokens of a chunk
STRIP = gl.constexpr(64)  # value rows of a chain; D // STRIP chains
STAGES = gl.constexpr(2)

# numbers of a job: row, first token, length, first chunk, and where its last state goes (below 0: nowhere)
JOB = gl.constexpr(5)

# value rows down, tokens or keys across
OF_TOKENS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OF_STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, OF_TOKENS.value, 2))
ACROSS = gl.constexpr(gl.SliceLayout(0, OF_TOKENS.value))
DOWN = gl.constexpr(gl.SliceLayout(1, OF_TOKENS.value))
# tokens down, as they lie in memory
BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def sequence(n, cu_seqlens_ptr, table_ptr, T, chunks_per_row, bound):
    """Row, first token in it, length and first chunk of sequence n: see `triton.chunks`.

    A table without cu_seqlens is one of jobs, one for each program: see `split`.
    """
    if table_ptr is None:
        return n, n * 0, T, n * chunks_per_row
    elif cu_seqlens_ptr is None:
        job = table_ptr + gl.program_id(0) * JOB
        return gl.load(job), gl.load(job + 1), gl.load(job + 2), gl.load(job + 3)
    else:
        first = gl.load(cu_seqlens_ptr + n).to(gl.int32)
        length = gl.load(cu_seqlens_ptr + n + 1).to(gl.int32) - first
        return n * 0, first, length, gl.load(table_ptr + 2 * bound + n)


@gluon.jit
def vector(f_s, stage, ROW: gl.constexpr, layout: gl.constexpr):
    """One row of a chunk's factors [C]."""
    return f_s.index(ROWS * stage + ROW).reshape([C]).load(layout)


@gluon.jit
def load_chunks(
    q_d, k_d, v_d, A_d, f_d, q_s, k_s, v_s, A_s, f_s, full, empty,
    cu_seqlens_ptr, table_ptr, T, HV, ratio, chunks_per_row, bound, D: gl.constexpr,
):  # fmt: skip
    """Tiles of each chunk into a stage that all others have left.

    Without q for `ends_kernel`: no outputs, and no values for the odd ones.
    """
    PARTS: gl.constexpr = 2 * STRIP // D
    head = gl.program_id(0) % HV
    n = gl.program_id(0) // HV
    row, first, length, chunk = sequence(n, cu_seqlens_ptr, table_ptr, T, chunks_per_row, bound)
    for i in range(gl.cdiv(length, C)):
        stage = i % STAGES
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(ready, (
            (0 if q_d is None else q_d.block_type.nbytes) + k_d.block_type.nbytes
            + D // STRIP * v_d.block_type.nbytes + PARTS * A_d.block_type.nbytes
            + ROWS * f_d.block_type.nbytes
        ))  # fmt: skip
        token = first + i * C
        # past T a tensor copy reads zeros, and nothing from memory
        v_token = token + (n % 2) * T if q_d is None else token
        tile = (chunk + i) * HV + head
        tma_load(k_d, [row, token, head // ratio, 0], ready, k_s.index(stage))
        for factor in gl.static_range(ROWS):
            tma_load(f_d, [tile * ROWS + factor, 0], ready, f_s.index(ROWS * stage + factor))
        for strip in gl.static_range(D // STRIP):
            tma_load(v_d, [row, v_token, head, strip * STRIP], ready, v_s.index(D // STRIP * stage + strip))
        for part in gl.static_range(PARTS):
            tma_load(A_d, [(PARTS * tile + part) * C, 0], ready, A_s.index(PARTS * stage + part))
        if q_d is not None:
            tma_load(q_d, [row, token, head // ratio, 0], ready, q_s.index(stage))


@gluon.jit
def in_parts(x, b, acc):
    """acc + x b, two products in flight, x in two parts as in `triton.lib.cut`."""
    high = (x.to(gl.uint32, bitcast=True) & 0xFFFF0000).to(gl.float32, bitcast=True)
    low = gl.convert_layout((x - high).to(gl.bfloat16), LEFT)
    acc = warpgroup_mma(gl.convert_layout(high.to(gl.bfloat16), LEFT), b, acc, is_async=True)
    return warpgroup_mma(low, b, acc, is_async=True)


@gluon.jit
def keep(S, S_d, S_s, tile, MINE: gl.constexpr, D: gl.constexpr):
    """S as it enters a chunk, keys down."""
    tma_store_wait(0)
    S_s.index(MINE).permute((1, 0)).store(S.to(S_s.dtype))
    fence_async_shared()
    tma_store(S_d, [tile * D, MINE * STRIP], S_s.index(MINE))


@gluon.jit
def advance(
    S, i, left, IS_RAGGED: gl.constexpr, MINE: gl.constexpr, o_d, S_d, q_s, k_s, v_s, A_s, f_s, P_s, o_s, S_s,
    full, empty, P_full, o_ptr, token, tile, HV, D: gl.constexpr,
):  # fmt: skip
    """S after chunk i, of which `left` tokens are the sequence's own; its outputs are stored."""
    stage = i % STAGES
    # of few keys S, what it grows by and A_inv are multiplied in two parts: see `triton.lib.operand_of`
    FEW: gl.constexpr = D == STRIP
    column = gl.program_id(0) % HV * D + MINE * STRIP
    zeros = gl.zeros((STRIP, C), gl.float32, OF_TOKENS)
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    k_tile = k_s.index(stage).reshape([C, D])
    tokens = gl.arange(0, C, gl.SliceLayout(1, BY_ROWS))
    if IS_RAGGED:
        # both chains do: what they store is the same, whatever of it the other has read
        k_tile.store(gl.where((tokens < left)[:, None], k_tile.load(BY_ROWS), 0.0))
        fence_async_shared()
    if FEW:
        kS = in_parts(S, k_tile.permute((1, 0)), zeros)
        if q_s is not None:
            o = in_parts(S, q_s.index(stage).reshape([C, D]).permute((1, 0)), zeros)
    else:
        S_operand = gl.convert_layout(S.to(gl.bfloat16), LEFT)
        kS = warpgroup_mma(S_operand, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if q_s is not None:
            q_tile = q_s.index(stage).reshape([C, D])
            o = warpgroup_mma(S_operand, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if S_d is not None and S_d.dtype == gl.bfloat16:
        keep(S, S_d, S_s, tile, MINE, D)
    v_tile = v_s.index(D // STRIP * stage + MINE).reshape([C, STRIP]).permute((1, 0)).load(OF_TOKENS)
    # both at once: with one in flight the rest wants more registers than there are
    kS = warpgroup_mma_wait(0, deps=(kS,))
    r = v_tile.to(gl.float32) - vector(f_s, stage, INTO, ACROSS)[None, :] * kS
    r = r * vector(f_s, stage, BETA, ACROSS)[None, :]
    if IS_RAGGED:
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
        keep(S, S_d, S_s, tile, MINE, D)
    of_state: gl.constexpr = OF_TOKENS if D == C else OF_STATE
    S = S * vector(f_s, stage, END, gl.SliceLayout(1, of_state))[:, None]
    if q_s is None:
        v_new = warpgroup_mma_wait(0, deps=(v_new,))
    else:
        o = warpgroup_mma_wait(3 if FEW else 2, deps=(o,)) * vector(f_s, stage, READ, ACROSS)[None, :]
        v_new = warpgroup_mma_wait(0, deps=(v_new,))
        w = gl.convert_layout(v_new.to(gl.bfloat16), LEFT)
        mbarrier.wait(P_full.index(stage), (i // STAGES) & 1)
        o = warpgroup_mma(w, P_s.index(stage).permute((1, 0)), o, is_async=True)
    grown = v_new * vector(f_s, stage, OUT, ACROSS)[None, :]
    if FEW:
        S = in_parts(grown, k_tile, S)
    else:
        S = warpgroup_mma(gl.convert_layout(grown.to(gl.bfloat16), LEFT), k_tile, S, is_async=True)
    if q_s is not None:
        if S_d is None or S_d.dtype == gl.bfloat16:
            # the outputs before, or S, lie there; else `keep` has waited for them
            tma_store_wait(0)
        o = warpgroup_mma_wait(2 if FEW else 1, deps=(o,))
        o_tile = o_s.index(MINE).slice(0, C)
        o_tile.permute((1, 0)).store(o.to(gl.bfloat16))
        if IS_RAGGED:
            columns = gl.arange(0, STRIP, gl.SliceLayout(0, BY_ROWS))
            place = (token + tokens[:, None]).to(gl.int64) * (HV * D) + (column + columns[None, :])
            gl.store(o_ptr + place, o_tile.load(BY_ROWS), mask=(tokens < left)[:, None])
        else:
            fence_async_shared()
            tma_store(o_d, [token, column], o_tile)
    S = warpgroup_mma_wait(0, deps=(S,))
    # what was loaded from the stage comes before the tensor copies that overwrite it
    fence_async_shared()
    mbarrier.arrive(empty.index(stage), count=1)
    return S


@gluon.jit
def carry(
    MINE: gl.constexpr, o_d, S_d, q_s, k_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full,
    o_ptr, initial_ptr, final_ptr, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound,
    V_FIRST: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The chain of 64 value rows of S, and their outputs.

    Without q for `ends_kernel`: whole chunks, no outputs; odd ones begin with the identity, and without
    tokens are zero. Where states that enter chunks are kept, they are copied out keys down: as a backward
    wants them, or in fp32.
    """
    n = gl.program_id(0) // HV
    head = gl.program_id(0) % HV
    row, first, length, chunk = sequence(n, cu_seqlens_ptr, table_ptr, T, chunks_per_row, bound)
    of_state: gl.constexpr = OF_TOKENS if D == C else OF_STATE
    v = gl.arange(0, STRIP, gl.SliceLayout(1, of_state)) + MINE * STRIP
    k = gl.arange(0, D, gl.SliceLayout(0, of_state))
    if V_FIRST:
        place = v[:, None] * D + k[None, :]
    else:
        place = k[None, :] * D + v[:, None]
    state = (n.to(gl.int64) * HV + head) * (D * D)
    if q_s is None:
        S = (v[:, None] == k[None, :]).to(gl.float32) * ((n % 2 == 1) & (length > 0)).to(gl.float32)
    elif initial_ptr is None:
        S = gl.zeros((STRIP, D), gl.float32, of_state)
    else:
        S = gl.load(initial_ptr + state + place).to(gl.float32)
    whole = length // C
    for i in range(whole):
        S = advance(
            S, i, C, False, MINE, o_d, S_d, q_s, k_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full,
            o_ptr, row * T + first + i * C, (chunk + i) * HV + head, HV, D,
        )  # fmt: skip
    if q_s is not None:
        if whole * C < length:
            S = advance(
                S, whole, length - whole * C, True, MINE, o_d, S_d, q_s, k_s, v_s, A_s, f_s, P_s, o_s, S_s,
                full, empty, P_full,
                o_ptr, row * T + first + whole * C, (chunk + whole) * HV + head, HV, D,
            )  # fmt: skip
        tma_store_wait(0)
    if final_ptr is not None:
        if table_ptr is not None and cu_seqlens_ptr is None:
            goal = gl.load(table_ptr + gl.program_id(0) * JOB + 4).to(gl.int64)
            if goal >= 0:
                gl.store(final_ptr + (goal * HV + head) * (D * D) + place, S)
        else:
            gl.store(final_ptr + state + place, S)


@gluon.jit
def make_pairs(
    q_s, k_s, f_s, P_s, full, empty, P_full, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound,
    D: gl.constexpr,
):  # fmt: skip
    """P[i, j] = scale e^(G_i - G_j) q_i . k_j for j <= i, transposed, at most a chunk ahead of the chains."""
    n = gl.program_id(0) // HV
    row, first, length, chunk = sequence(n, cu_seqlens_ptr, table_ptr, T, chunks_per_row, bound)
    zeros = gl.zeros((C, C), gl.float32, OF_TOKENS)
    for i in range(gl.cdiv(length, C)):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        q_tile = q_s.index(stage).reshape([C, D]).permute((1, 0))
        P = warpgroup_mma(k_s.index(stage).reshape([C, D]), q_tile, zeros, use_acc=False, is_async=True)
        D_ij = gl.exp2(vector(f_s, stage, TO, ACROSS)[None, :] - vector(f_s, stage, FROM, DOWN)[:, None])
        D_ij = gl.where(gl.arange(0, C, DOWN)[:, None] <= gl.arange(0, C, ACROSS)[None, :], D_ij, 0.0)
        P = warpgroup_mma_wait(0, deps=(P,)) * D_ij
        if length - i * C < C:  # keys past the sequence's end may be NaN
            P = gl.where((gl.arange(0, C, DOWN) < length - i * C)[:, None], P, 0.0)
        # that the stage is loaded anew says that both chains have left the P that lay there
        P_s.index(stage).permute((1, 0)).store(P.to(gl.bfloat16))
        # what was loaded from the stage comes before the tensor copies that overwrite it, too
        fence_async_shared()
        mbarrier.arrive(P_full.index(stage), count=1)
        mbarrier.arrive(empty.index(stage), count=1)


@kernel
def walk_kernel(
    q_d, k_d, v_d, A_d, f_d, o_d, S_d, initial_ptr, final_ptr, cu_seqlens_ptr, table_ptr, o_ptr,
    T, HV, ratio, chunks_per_row, bound, V_FIRST: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, C, 1, D], q_d.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, C, 1, D], k_d.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [D // STRIP * STAGES, 1, C, 1, STRIP], v_d.layout)
    A_s = gl.allocate_shared_memory(gl.bfloat16, [2 * STRIP // D * STAGES, C, C], A_d.layout)
    f_s = gl.allocate_shared_memory(gl.float32, [STAGES * ROWS, 1, C], f_d.layout)
    P_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], A_d.layout)
    # outputs lie where states in 16 bits do
    place: gl.constexpr = D if S_d is not None and S_d.dtype == gl.bfloat16 else C
    o_s = gl.allocate_shared_memory(gl.bfloat16, [D // STRIP, place, STRIP], o_d.layout)
    S_s = o_s
    if S_d is not None and S_d.dtype == gl.float32:
        S_s = gl.allocate_shared_memory(gl.float32, [D // STRIP, D, STRIP], S_d.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    P_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1 + D // STRIP)
        mbarrier.init(P_full.index(i), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()
    # registers of the first partition: what the others leave of 512 a lane, of 360 where there is one chain
    if D == STRIP:
        gl.warp_specialize([
            (carry, (
                0, o_d, S_d, q_s, k_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full, o_ptr, initial_ptr,
                final_ptr, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, V_FIRST, D,
            )),
            (make_pairs, (
                q_s, k_s, f_s, P_s, full, empty, P_full,
                cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, D,
            )),
            (load_chunks, (
                q_d, k_d, v_d, A_d, f_d, q_s, k_s, v_s, A_s, f_s, full, empty,
                cu_seqlens_ptr, table_ptr, T, HV, ratio, chunks_per_row, bound, D,
            )),
        ], [4, 1], [88, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (carry, (
                0, o_d, S_d, q_s, k_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full, o_ptr, initial_ptr,
                final_ptr, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, V_FIRST, D,
            )),
            (carry, (
                1, o_d, S_d, q_s, k_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full, o_ptr, initial_ptr,
                final_ptr, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, V_FIRST, D,
            )),
            (make_pairs, (
                q_s, k_s, f_s, P_s, full, empty, P_full,
                cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, D,
            )),
            (load_chunks, (
                q_d, k_d, v_d, A_d, f_d, q_s, k_s, v_s, A_s, f_s, full, empty,
                cu_seqlens_ptr, table_ptr, T, HV, ratio, chunks_per_row, bound, D,
            )),
        ], [4, 4, 1], [200, 88, 24])  # fmt: skip


@kernel
def ends_kernel(k_d, v_d, A_d, f_d, final_ptr, jobs_ptr, T, HV, ratio, D: gl.constexpr):
    """The walk without outputs, and without what only they need: M and N of spans, see `split`."""
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, C, 1, D], k_d.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [D // STRIP * STAGES, 1, C, 1, STRIP], v_d.layout)
    A_s = gl.allocate_shared_memory(gl.bfloat16, [2 * STRIP // D * STAGES, C, C], A_d.layout)
    f_s = gl.allocate_shared_memory(gl.float32, [STAGES * ROWS, 1, C], f_d.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=D // STRIP)
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()
    if D == STRIP:
        gl.warp_specialize([
            (carry, (
                0, None, None, None, k_s, v_s, A_s, f_s, None, None, None, full, empty, None,
                None, None, final_ptr, None, jobs_ptr, T, HV, 0, 0, False, D,
            )),
            (load_chunks, (
                None, k_d, v_d, A_d, f_d, None, k_s, v_s, A_s, f_s, full, empty,
                None, jobs_ptr, T, HV, ratio, 0, 0, D,
            )),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (carry, (
                0, None, None, None, k_s, v_s, A_s, f_s, None, None, None, full, empty, None,
                None, None, final_ptr, None, jobs_ptr, T, HV, 0, 0, False, D,
            )),
            (carry, (
                1, None, None, None, k_s, v_s, A_s, f_s, None, None, None, full, empty, None,
                None, None, final_ptr, None, jobs_ptr, T, HV, 0, 0, False, D,
            )),
            (load_chunks, (
                None, k_d, v_d, A_d, f_d, None, k_s, v_s, A_s, f_s, full, empty,
                None, jobs_ptr, T, HV, ratio, 0, 0, D,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
