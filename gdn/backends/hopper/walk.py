"""The state pass and all outputs in one walk over the chunks, see `chunk`, by four partitions of one program.

A program stays, and takes one sequence and value head after the other: its jobs. S lies transposed, [V, K],
so that S, r and v_new are left operands from the registers in which the last product left them:

    load_chunks    one warp: a chunk's tiles by tensor copies (TMA), two chunks deep; tells the others of jobs
    make_pairs     four warps: P, for both chains, see `pairs`
    carry          four warps, twice: the chain of 64 value rows of S, and their outputs; once at V = 64

A_inv and the factors come from `solve`. Tokens past a sequence's end may be another's, NaN among them: r
is masked and k cleared there, and o is stored by rows, for a tensor copy would write past the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.chunk import (
    JOB,
    OF_STATE,
    OF_TOKENS,
    STAGES,
    STRIP,
    TILE,
    C,
    advance,
    glide,
    is_tame,
    job_at,
    sequence,
)
from gdn.backends.hopper.factors import BOX, ROWS, TAME
from gdn.backends.hopper.gluon import (
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    kernel,
    mbarrier,
    recast,
    tma_load,
    tma_store_wait,
)
from gdn.backends.hopper.pairs import make_pairs


@gluon.jit
def load_chunks(
    q_d, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, A_s, f_s, full, empty, ring,
    cu_seqlens_ptr, table_ptr, factors_ptr, next_ptr, T, HV, ratio, chunks_per_row, bound, jobs,
    GLIDES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Tiles of each chunk into a stage that all others have left; which jobs are the program's.

    The second box of factors is left out where a chunk is known to be tame: not for the first of the walk,
    as that would be asked before the launch before is done.

    Without q for `ends_kernel`: no outputs, no values where the goal is odd, and one job.
    """
    PARTS: gl.constexpr = 2 * STRIP // D
    BYTES: gl.constexpr = (
        D // STRIP * (
            (0 if q_d is None else q_d.block_type.nbytes) + k_d.block_type.nbytes + v_d.block_type.nbytes
        ) + 2 * PARTS * upper_d.block_type.nbytes
    )  # fmt: skip
    at = 0
    turn = 0
    job = gl.program_id(0)
    is_map = False
    while job < jobs:
        if q_d is None:
            is_map = is_of_map(job, table_ptr)
        if ring is not None:
            tell(job, turn, ring)
        head = job % HV
        row, first, length, chunk = sequence(job, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound)
        token = first
        tile = chunk * HV + head
        for i in range(at, at + gl.cdiv(length, C)):
            stage = i % STAGES
            ready = full.index(stage)
            has_both = True
            if GLIDES and (q_d is None or i > 0):
                has_both = gl.load(factors_ptr + tile.to(gl.int64) * (ROWS * C) + TAME) == 0.0
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
            if has_both:
                mbarrier.expect(ready, BYTES + 2 * f_d.block_type.nbytes)
            else:
                mbarrier.expect(ready, BYTES + f_d.block_type.nbytes)
            # past T a tensor copy reads zeros, and nothing from memory
            v_token = token + T if is_map else token
            corner = (row, token, head // ratio)
            load_keys(k_d, corner, ready, 0 if q_d is None else C, qk_s.index(stage), D)
            for strip in gl.static_range(D // STRIP):
                tma_load(
                    v_d, [row, v_token, head, strip * STRIP], ready, v_s.index(D // STRIP * stage + strip)
                )
            if q_d is not None:
                load_keys(q_d, corner, ready, 0, qk_s.index(stage), D)
                if i == 0:
                    gdc_wait()
            tma_load(f_d, [tile * ROWS, 0], ready, f_s.index(2 * stage))
            if has_both:
                tma_load(f_d, [tile * ROWS + BOX, 0], ready, f_s.index(2 * stage + 1))
            for part in gl.static_range(PARTS):
                place = 2 * (PARTS * stage + part)
                tma_load(upper_d, [PARTS * tile + part, 0, 0], ready, A_s.index(place))
                tma_load(lower_d, [PARTS * tile + part, 0, 0], ready, A_s.index(place + 1))
            token += C
            tile += HV
        at += gl.cdiv(length, C)
        turn += 1
        if ring is None:
            job = jobs
        else:
            # also where there was no chunk: `solve` clears the count, and who comes next takes it that all
            # before are done
            gdc_wait()
            job = gl.num_programs(0) + gl.atomic_add(next_ptr, 1, sem="relaxed")
    if ring is not None:
        tell(job, turn, ring)


@gluon.jit
def is_of_map(job, table_ptr):
    """Whether a job of `ends_kernel` is a span's M: its goal is odd, as is -1 of jobs that have none."""
    return (gl.load(table_ptr + job * JOB + 4) & 1) == 1


@gluon.jit
def state_of(states_ptr, state, down, across, D: gl.constexpr):
    return gl.load(states_ptr + state * (D * D) + down[:, None] + across[None, :]).to(gl.float32)


@gluon.jit
def load_keys(x_d, corner, ready, ROW: gl.constexpr, tile, D: gl.constexpr):
    """q or k of a chunk's tokens, 64 keys a tensor copy, to a row of the stage's tile and those below."""
    row, token, head = corner
    for strip in gl.static_range(D // STRIP):
        place = tile.slice(ROW, C, 1).slice(strip * STRIP, STRIP, 3)
        tma_load(x_d, [row, token, head, strip * STRIP], ready, place)


@gluon.jit
def tell(job, turn, ring):
    """The others of the program's job at this turn, or that there is none left: see `job_at`."""
    job_s, job_full, job_empty = ring
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(job_empty.index(turn % STAGES), ((turn // STAGES) & 1) ^ 1)
    job_s.index(turn % STAGES).store(gl.full((1,), job, gl.int32, lane))
    fence_async_shared()
    mbarrier.arrive(job_full.index(turn % STAGES), count=1)


@gluon.jit
def is_next(WANTED: gl.constexpr, i, end, f_s, full):
    """Whether there is a whole chunk i, and it is tame or is not, as wanted."""
    found = i < end
    if found:
        mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
        found = is_tame(f_s, i % STAGES) == WANTED
    return found


@gluon.jit
def carry(
    MINE: gl.constexpr, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full, ring,
    o_ptr, initial_ptr, final_ptr, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, jobs,
    V_FIRST: gl.constexpr, GLIDES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The chains of 64 value rows of S, and their outputs.

    Without q for `ends_kernel`: whole chunks, no outputs; with an odd goal from the identity, and without
    tokens zero; with an even one from zero, or from the caller's state where the job names one. Where states
    that enter chunks are kept, they are copied out keys down: as a backward wants them, or in fp32.
    """
    # a table without cu_seqlens is one of jobs
    IN_SPANS: gl.constexpr = table_ptr is not None and cu_seqlens_ptr is None
    of_state: gl.constexpr = OF_TOKENS if D == C else OF_STATE
    v = gl.arange(0, STRIP, gl.SliceLayout(1, of_state)) + MINE * STRIP
    k = gl.arange(0, D, gl.SliceLayout(0, of_state))
    if V_FIRST:
        down = v * D
        across = k
    else:
        down = v
        across = k * D
    i = 0
    turn = 0
    job = job_at(turn, ring)
    while job < jobs:
        head = job % HV
        row, first, length, chunk = sequence(job, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound)
        state = job.to(gl.int64)
        if o_d is None:
            is_map = is_of_map(job, table_ptr) & (length > 0)
            S = (v[:, None] == k[None, :]).to(gl.float32) * is_map.to(gl.float32)
            if initial_ptr is not None:
                start = gl.load(table_ptr + job * JOB + 5)
                if start >= 0:
                    state = start.to(gl.int64) * HV + head
                    S = state_of(initial_ptr, state, down, across, D)
        elif initial_ptr is None:
            S = gl.zeros((STRIP, D), gl.float32, of_state)
        else:
            if IN_SPANS:
                gdc_wait()
                state = gl.load(table_ptr + job * JOB + 5).to(gl.int64) * HV + head
            S = state_of(initial_ptr, state, down, across, D)
        end = i + length // C
        # of chunk 0, were it the job's
        token = row * T + first - i * C
        tile = (chunk - i) * HV + head
        if GLIDES:
            while i < end:
                # run by run: with both kinds in one loop ptxas has no registers and makes all products wait
                while is_next(True, i, end, f_s, full):
                    S = glide(
                        S, i, MINE, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, empty, P_full,
                        token + i * C, tile + i * HV, head, D,
                    )  # fmt: skip
                    i += 1
                while is_next(False, i, end, f_s, full):
                    S = advance(
                        S, i, C, False, MINE, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, empty, P_full,
                        o_ptr, token + i * C, tile + i * HV, head, HV, D,
                    )  # fmt: skip
                    i += 1
        else:
            while i < end:
                mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
                S = advance(
                    S, i, C, False, MINE, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, empty, P_full,
                    o_ptr, token + i * C, tile + i * HV, head, HV, D,
                )  # fmt: skip
                i += 1
        if o_d is not None and length % C > 0:
            mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
            S = advance(
                S, i, length % C, True, MINE, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s,
                empty, P_full, o_ptr, token + i * C, tile + i * HV, head, HV, D,
            )  # fmt: skip
            i += 1
        if final_ptr is not None:
            if IN_SPANS:
                goal = gl.load(table_ptr + job * JOB + 4).to(gl.int64)
                if goal >= 0:
                    state = (goal * HV + head) * (D * D)
                    if o_d is None:  # M and N lie keys down
                        gl.store(final_ptr + state + v[:, None] + k[None, :] * D, S)
                    else:
                        gl.store(final_ptr + state + down[:, None] + across[None, :], S)
            else:
                state = job.to(gl.int64) * (D * D)
                gl.store(final_ptr + state + down[:, None] + across[None, :], S)
        turn += 1
        job = job_at(turn, ring)
    if o_d is not None:
        tma_store_wait(0)


@gluon.jit
def tiles_of(k_d, v_d, upper_d, f_d, HAS_Q: gl.constexpr, D: gl.constexpr):
    """Room for what every walk loads; A_inv and factors twice, as tensor copies and as chains have them."""
    qk_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 2 * C if HAS_Q else C, 1, D], k_d.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [D // STRIP * STAGES, 1, C, 1, STRIP], v_d.layout)
    halves = gl.allocate_shared_memory(gl.bfloat16, [4 * STRIP // D * STAGES, 1, C // 2, C], upper_d.layout)
    A_s = recast(halves, gl.bfloat16, [2 * STRIP // D * STAGES, C, C], TILE)
    boxes = gl.allocate_shared_memory(gl.float32, [STAGES * ROWS // BOX, BOX, C], f_d.layout)
    f_s = recast(boxes, gl.float32, [STAGES * ROWS, 1, C], f_d.layout)
    return qk_s, v_s, halves, A_s, boxes, f_s


@kernel
def walk_kernel(
    q_d, k_d, v_d, upper_d, lower_d, f_d, o_d, S_d, initial_ptr, final_ptr, cu_seqlens_ptr, table_ptr,
    o_ptr, factors_ptr, next_ptr, T, HV, ratio, chunks_per_row, bound, jobs,
    V_FIRST: gl.constexpr, GLIDES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    qk_s, v_s, halves, A_s, boxes, f_s = tiles_of(k_d, v_d, upper_d, f_d, True, D)
    P_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], TILE)
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
    job_s = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    job_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    job_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    ring = (job_s, job_full, job_empty)
    for i in gl.static_range(STAGES):
        mbarrier.init(job_full.index(i), count=1)
        mbarrier.init(job_empty.index(i), count=1 + D // STRIP)
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1 + D // STRIP)
        mbarrier.init(P_full.index(i), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    # registers of the first partition: what the others leave of 512 a lane, of 360 where there is one chain
    if D == STRIP:
        gl.warp_specialize([
            (carry, (
                0, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full, ring,
                o_ptr, initial_ptr, final_ptr,
                cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, jobs, V_FIRST, GLIDES, D,
            )),
            (make_pairs, (
                qk_s, f_s, P_s, full, empty, P_full, ring,
                cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, jobs, GLIDES, D,
            )),
            (load_chunks, (
                q_d, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, halves, boxes, full, empty, ring,
                cu_seqlens_ptr, table_ptr, factors_ptr, next_ptr, T, HV, ratio, chunks_per_row, bound, jobs,
                GLIDES, D,
            )),
        ], [4, 1], [88, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (carry, (
                0, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full, ring,
                o_ptr, initial_ptr, final_ptr,
                cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, jobs, V_FIRST, GLIDES, D,
            )),
            (carry, (
                1, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full, ring,
                o_ptr, initial_ptr, final_ptr,
                cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, jobs, V_FIRST, GLIDES, D,
            )),
            (make_pairs, (
                qk_s, f_s, P_s, full, empty, P_full, ring,
                cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, jobs, GLIDES, D,
            )),
            (load_chunks, (
                q_d, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, halves, boxes, full, empty, ring,
                cu_seqlens_ptr, table_ptr, factors_ptr, next_ptr, T, HV, ratio, chunks_per_row, bound, jobs,
                GLIDES, D,
            )),
        ], [4, 4, 1], [200, 88, 24])  # fmt: skip


@kernel
def ends_kernel(
    k_d, v_d, upper_d, lower_d, f_d, factors_ptr, initial_ptr, final_ptr, jobs_ptr, T, HV, ratio,
    V_FIRST: gl.constexpr, GLIDES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The walk without outputs, and without what only they need: M and N of spans, see `split`."""
    qk_s, v_s, halves, A_s, boxes, f_s = tiles_of(k_d, v_d, upper_d, f_d, False, D)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    jobs = gl.num_programs(0)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=D // STRIP)
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()
    if D == STRIP:
        gl.warp_specialize([
            (carry, (
                0, None, None, qk_s, v_s, A_s, f_s, None, None, None, full, empty, None, None,
                None, initial_ptr, final_ptr, None, jobs_ptr, T, HV, 0, 0, jobs, V_FIRST, GLIDES, D,
            )),
            (load_chunks, (
                None, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, halves, boxes, full, empty, None,
                None, jobs_ptr, factors_ptr, None, T, HV, ratio, 0, 0, jobs, GLIDES, D,
            )),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (carry, (
                0, None, None, qk_s, v_s, A_s, f_s, None, None, None, full, empty, None, None,
                None, initial_ptr, final_ptr, None, jobs_ptr, T, HV, 0, 0, jobs, V_FIRST, GLIDES, D,
            )),
            (carry, (
                1, None, None, qk_s, v_s, A_s, f_s, None, None, None, full, empty, None, None,
                None, initial_ptr, final_ptr, None, jobs_ptr, T, HV, 0, 0, jobs, V_FIRST, GLIDES, D,
            )),
            (load_chunks, (
                None, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, halves, boxes, full, empty, None,
                None, jobs_ptr, factors_ptr, None, T, HV, ratio, 0, 0, jobs, GLIDES, D,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
