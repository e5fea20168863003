"""The state pass and all outputs in one walk over the chunks, see `chunk`, by four partitions of one program.

A program stays, and takes one sequence and value head after the other: its jobs. S lies transposed, [V, K],
so that S, r and v_new are left operands from the registers in which the last product left them:

    load_chunks    one warp: a chunk's tiles by tensor copies (TMA), some chunks deep; tells others of jobs
    make_pairs     four warps: P, for all chains, see `pairs`
    carry          four warps, twice: the chain of 64 value rows of S, and their outputs, see `carry`

There is one carry at V = 64, and at V = 128 where programs are few: then two of them share a job.

A_inv and the factors come from `solve`. Tokens past a sequence's end may be another's, NaN among them: r
is masked and k cleared there, and o is stored by rows, for a tensor copy would write past the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.carry import carry
from gdn.backends.hopper.chunk import (
    JOBS,
    STRIP,
    TILE,
    C,
    is_of_map,
    parted,
    sequence,
    turn_of,
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
)
from gdn.backends.hopper.pairs import make_pairs
from gdn.backends.triton.chunks import SEQUENCE


@gluon.jit
def load_chunks(
    q_d, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, A_s, f_s, full, empty, ring,
    cu_seqlens_ptr, table_ptr, factors_ptr, next_ptr, T, HV, ratio, chunks_per_row, bound, jobs,
    GLIDES: gl.constexpr, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Tiles of each chunk into a stage that all others have left; which jobs are the program's.

    Without q for `ends_kernel`: no outputs, no values where the goal is odd, and one job.
    """
    at = 0
    turn = 0
    taken = gl.program_id(0)
    while taken < jobs:
        at = load_job(
            taken, turn, at, q_d, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, A_s, f_s, full, empty, ring,
            cu_seqlens_ptr, table_ptr, factors_ptr, T, HV, ratio, chunks_per_row, bound, GLIDES, CHAINS, D,
        )  # fmt: skip
        turn += 1
        if ring is None:
            taken = jobs
        else:
            # also where there was no chunk: `solve` clears the count, and who comes next takes it that all
            # before are done
            gdc_wait()
            taken = gl.num_programs(0) + gl.atomic_add(next_ptr, 1, sem="relaxed")
    if ring is not None:
        tell(taken, turn, ring)


@gluon.jit
def load_job(
    taken, turn, at, q_d, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, A_s, f_s, full, empty, ring,
    cu_seqlens_ptr, table_ptr, factors_ptr, T, HV, ratio, chunks_per_row, bound,
    GLIDES: gl.constexpr, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The chunks of one job, the first of which is the program's chunk `at`; the number after its last.

    Packed sequences come from the longest on, and the others hear of the job's own number.
    """
    job, strip = parted(taken, 0, CHAINS, D)
    is_map = False
    if q_d is None:
        is_map = is_of_map(job, table_ptr)
    head = job % HV
    if cu_seqlens_ptr is None:
        if ring is not None:
            tell(taken, turn, ring)
        row, token, length, chunk = sequence(job, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound)
    else:
        place = job // HV
        numbers = table_ptr + 2 * bound + SEQUENCE * place
        row, token, length, chunk = 0, gl.load(numbers + 2), gl.load(numbers + 3), gl.load(numbers + 4)
        tell(taken + (gl.load(numbers + 1) - place) * (HV * (D // STRIP // CHAINS)), turn, ring)
    tile = chunk * HV + head
    past = at + gl.cdiv(length, C)
    for i in range(at, past):
        # past T a tensor copy reads zeros, and nothing from memory
        v_token = token + T if is_map else token
        load_chunk(
            i, (row, token, head // ratio), (row, v_token, head, strip), tile,
            q_d, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, A_s, f_s, full, empty, factors_ptr,
            GLIDES, CHAINS, D,
        )  # fmt: skip
        token += C
        tile += HV
    return past


@gluon.jit
def load_chunk(
    i, corner, corner_of_v, tile, q_d, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, A_s, f_s, full, empty,
    factors_ptr, GLIDES: gl.constexpr, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """A chunk into its stage.

    The second box of factors is left out where a chunk is known to be tame: not for the first of the walk,
    as that would be asked before the launch before is done.
    """
    PARTS: gl.constexpr = 2 * STRIP // D
    BYTES: gl.constexpr = (
        D // STRIP * ((0 if q_d is None else q_d.block_type.nbytes) + k_d.block_type.nbytes)
        + CHAINS * v_d.block_type.nbytes + 2 * PARTS * upper_d.block_type.nbytes
    )  # fmt: skip
    stage, parity = turn_of(i, full)
    ready = full.index(stage)
    has_both = True
    if GLIDES and (q_d is None or i > 0):
        has_both = gl.load(factors_ptr + tile.to(gl.int64) * (ROWS * C) + TAME) == 0.0
    mbarrier.wait(empty.index(stage), parity ^ 1)
    if has_both:
        mbarrier.expect(ready, BYTES + 2 * f_d.block_type.nbytes)
    else:
        mbarrier.expect(ready, BYTES + f_d.block_type.nbytes)
    load_keys(k_d, corner, ready, 0 if q_d is None else C, qk_s.index(stage), D)
    row, token, head, strip = corner_of_v
    for n in gl.static_range(CHAINS):
        place = v_s.index(CHAINS * stage + n)
        tma_load(v_d, [row, token, head, (strip + n) * STRIP], ready, place)
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
    place, parity = turn_of(turn, job_full)
    mbarrier.wait(job_empty.index(place), parity ^ 1)
    job_s.index(place).store(gl.full((1,), job, gl.int32, lane))
    fence_async_shared()
    mbarrier.arrive(job_full.index(place), count=1)


@gluon.jit
def tiles_of(
    k_d, v_d, upper_d, f_d,
    HAS_Q: gl.constexpr, STAGES: gl.constexpr, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Room for what every walk loads; A_inv and factors twice, as tensor copies and as chains have them."""
    qk_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 2 * C if HAS_Q else C, 1, D], k_d.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [CHAINS * STAGES, 1, C, 1, STRIP], v_d.layout)
    halves = gl.allocate_shared_memory(gl.bfloat16, [4 * STRIP // D * STAGES, 1, C // 2, C], upper_d.layout)
    A_s = recast(halves, gl.bfloat16, [2 * STRIP // D * STAGES, C, C], TILE)
    boxes = gl.allocate_shared_memory(gl.float32, [STAGES * ROWS // BOX, BOX, C], f_d.layout)
    f_s = recast(boxes, gl.float32, [STAGES * ROWS, 1, C], f_d.layout)
    return qk_s, v_s, halves, A_s, boxes, f_s


@kernel
def walk_kernel(
    q_d, k_d, v_d, upper_d, lower_d, f_d, o_d, S_d, initial_ptr, final_ptr, cu_seqlens_ptr, table_ptr,
    o_ptr, factors_ptr, next_ptr, T, HV, ratio, chunks_per_row, bound, jobs,
    V_FIRST: gl.constexpr, GLIDES: gl.constexpr, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    # three, but where the states of two chains leave no room
    STAGES: gl.constexpr = 3 if S_d is None or CHAINS == 1 else 2
    qk_s, v_s, halves, A_s, boxes, f_s = tiles_of(k_d, v_d, upper_d, f_d, True, STAGES, CHAINS, D)
    P_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], TILE)
    # outputs lie where states in 16 bits do
    place: gl.constexpr = D if S_d is not None and S_d.dtype == gl.bfloat16 else C
    o_s = gl.allocate_shared_memory(gl.bfloat16, [CHAINS, place, STRIP], o_d.layout)
    S_s = o_s
    if S_d is not None and S_d.dtype == gl.float32:
        S_s = gl.allocate_shared_memory(gl.float32, [CHAINS, D, STRIP], S_d.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    P_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    job_s = gl.allocate_shared_memory(gl.int32, [JOBS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    job_full = gl.allocate_shared_memory(gl.int64, [JOBS, 1], barrier)
    job_empty = gl.allocate_shared_memory(gl.int64, [JOBS, 1], barrier)
    ring = (job_s, job_full, job_empty)
    for i in gl.static_range(JOBS):
        mbarrier.init(job_full.index(i), count=1)
        mbarrier.init(job_empty.index(i), count=1 + CHAINS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1 + CHAINS)
        mbarrier.init(P_full.index(i), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    # registers of the first partition: what the others leave of 512 a lane, of 360 where there is one chain
    if CHAINS == 1:
        gl.warp_specialize([
            (carry, (
                0, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full, ring,
                o_ptr, initial_ptr, final_ptr,
                cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, jobs, V_FIRST, GLIDES, CHAINS, D,
            )),
            (make_pairs, (
                qk_s, f_s, P_s, full, empty, P_full, ring,
                cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, jobs, GLIDES, CHAINS, D,
            )),
            (load_chunks, (
                q_d, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, halves, boxes, full, empty, ring,
                cu_seqlens_ptr, table_ptr, factors_ptr, next_ptr, T, HV, ratio, chunks_per_row, bound, jobs,
                GLIDES, CHAINS, D,
            )),
        ], [4, 1], [88, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (carry, (
                0, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full, ring,
                o_ptr, initial_ptr, final_ptr,
                cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, jobs, V_FIRST, GLIDES, CHAINS, D,
            )),
            (carry, (
                1, o_d, S_d, qk_s, v_s, A_s, f_s, P_s, o_s, S_s, full, empty, P_full, ring,
                o_ptr, initial_ptr, final_ptr,
                cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, jobs, V_FIRST, GLIDES, CHAINS, D,
            )),
            (make_pairs, (
                qk_s, f_s, P_s, full, empty, P_full, ring,
                cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, jobs, GLIDES, CHAINS, D,
            )),
            (load_chunks, (
                q_d, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, halves, boxes, full, empty, ring,
                cu_seqlens_ptr, table_ptr, factors_ptr, next_ptr, T, HV, ratio, chunks_per_row, bound, jobs,
                GLIDES, CHAINS, D,
            )),
        ], [4, 4, 1], [200, 88, 24])  # fmt: skip


@kernel
def ends_kernel(
    k_d, v_d, upper_d, lower_d, f_d, factors_ptr, initial_ptr, final_ptr, jobs_ptr, T, HV, ratio,
    V_FIRST: gl.constexpr, GLIDES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The walk without outputs, and without what only they need: M and N of spans, see `split`."""
    CHAINS: gl.constexpr = D // STRIP
    STAGES: gl.constexpr = 4
    qk_s, v_s, halves, A_s, boxes, f_s = tiles_of(k_d, v_d, upper_d, f_d, False, STAGES, CHAINS, D)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    jobs = gl.num_programs(0)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CHAINS)
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()
    if CHAINS == 1:
        gl.warp_specialize([
            (carry, (
                0, None, None, qk_s, v_s, A_s, f_s, None, None, None, full, empty, None, None,
                None, initial_ptr, final_ptr, None, jobs_ptr, T, HV, 0, 0, jobs, V_FIRST, GLIDES, CHAINS, D,
            )),
            (load_chunks, (
                None, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, halves, boxes, full, empty, None,
                None, jobs_ptr, factors_ptr, None, T, HV, ratio, 0, 0, jobs, GLIDES, CHAINS, D,
            )),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (carry, (
                0, None, None, qk_s, v_s, A_s, f_s, None, None, None, full, empty, None, None,
                None, initial_ptr, final_ptr, None, jobs_ptr, T, HV, 0, 0, jobs, V_FIRST, GLIDES, CHAINS, D,
            )),
            (carry, (
                1, None, None, qk_s, v_s, A_s, f_s, None, None, None, full, empty, None, None,
                None, initial_ptr, final_ptr, None, jobs_ptr, T, HV, 0, 0, jobs, V_FIRST, GLIDES, CHAINS, D,
            )),
            (load_chunks, (
                None, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, halves, boxes, full, empty, None,
                None, jobs_ptr, factors_ptr, None, T, HV, ratio, 0, 0, jobs, GLIDES, CHAINS, D,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
