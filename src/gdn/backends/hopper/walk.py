"""Scan the chunks of each sequence with a persistent, warp-specialised kernel: pass S on, compute o.

A CTA takes work items until none is left. A work item is a sequence (or segment) and a value head. The warps
of a CTA form partitions:

    load_chunks    producer warp, 1 warp: takes and publishes work items, issues the TMA loads of each chunk
    make_pairs     score warpgroup, 4 warps: computes P for every consumer, see `pairs`
    carry          consumer warpgroup, 4 warps, once or twice: 64 value rows of S^T and their outputs

One consumer warpgroup runs at V = 64, and at V = 128 where there are few work items: two CTAs then share a
work item, half of the value rows each. S is held transposed, [V, K]: S^T, r and v_new are A operands of WGMMA
straight from the registers in which the previous MMA left them.

A_inv and the factors come from `solve` through HBM. Tokens past a sequence's end may belong to another
sequence, or be NaN: r is masked and k is zeroed there, and o is stored row by row, since a TMA store would
write past the end.
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
    """Run the producer warp: take work items, publish each, and load its chunks into the pipeline stages.

    `at` counts the CTA's chunks over all work items, `turn` the work items, `taken` is an item's number. For
    `ends_kernel` q_d and ring are None: each CTA has one work item, and nothing is published.
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
            # Wait even if no chunk was loaded: `solve` zeroes the counter in HBM, and the next kernel relies
            # on this kernel to complete only after everything before it has completed.
            gdc_wait()
            # item b was CTA b's first; the tile scheduler is this counter in L2
            taken = gl.num_programs(0) + gl.atomic_add(next_ptr, 1, sem="relaxed")
    if ring is not None:
        # a number past the last work item ends the other partitions
        tell(taken, turn, ring)


@gluon.jit
def load_job(
    taken, turn, at, q_d, k_d, v_d, upper_d, lower_d, f_d, qk_s, v_s, A_s, f_s, full, empty, ring,
    cu_seqlens_ptr, table_ptr, factors_ptr, T, HV, ratio, chunks_per_row, bound,
    GLIDES: gl.constexpr, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Publish one work item and load its chunks; return the CTA's chunk count after the last of them.

    `at` is the CTA's chunk count before the item. Packed sequences are taken longest first by the sorted
    table. Only the producer reads that order: it publishes the number of the original sequence.
    """
    job, strip = parted(taken, 0, CHAINS, D)
    is_map = False
    if q_d is None:
        is_map = is_of_map(job, table_ptr)
    head = job % HV
    if cu_seqlens_ptr is None:
        if ring is not None:
            tell(taken, turn, ring)
        # without `gdc_wait`: segments were written to HBM three launches before, which has completed
        row, token, length, chunk = sequence(job, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound)
    else:
        # a long sequence that came last would leave the other SMs idle: entry `place` is the place-th longest
        place = job // HV
        numbers = table_ptr + 2 * bound + SEQUENCE * place
        row, token, length, chunk = 0, gl.load(numbers + 2), gl.load(numbers + 3), gl.load(numbers + 4)
        tell(taken + (gl.load(numbers + 1) - place) * (HV * (D // STRIP // CHAINS)), turn, ring)
    tile = chunk * HV + head
    past = at + gl.cdiv(length, C)
    for i in range(at, past):
        # M is scanned with v = 0: past T a TMA load fills shared memory with zeros and reads nothing from HBM
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
    """Wait until the stage of chunk i is empty, then issue the chunk's TMA loads; full[s] counts their bytes.

    A well-conditioned chunk needs only the first box of factors, so the second is not loaded. Of the scan's
    first chunk both are: its `TAME` in HBM may not be read before `solve` has completed.
    """
    PARTS: gl.constexpr = 2 * STRIP // D
    BYTES: gl.constexpr = (
        D // STRIP * ((0 if q_d is None else q_d.block_type.nbytes) + k_d.block_type.nbytes)
        + CHAINS * v_d.block_type.nbytes + 2 * PARTS * upper_d.block_type.nbytes
    )  # fmt: skip
    stage, parity = turn_of(i, full)
    ready = full.index(stage)
    has_both = True
    # read `TAME` from HBM before the wait for `empty`, which hides its latency
    if GLIDES and (q_d is None or i > 0):
        has_both = gl.load(factors_ptr + tile.to(gl.int64) * (ROWS * C) + TAME) == 0.0
    # the opposite parity: the first pass over the stages does not block
    mbarrier.wait(empty.index(stage), parity ^ 1)
    # one arrival with the number of bytes: full[s] completes when TMA has written all of them
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
        # q, k, v are the caller's and load while the kernel before drains; A_inv and factors are its results
        if i == 0:
            gdc_wait()
    tma_load(f_d, [tile * ROWS, 0], ready, f_s.index(2 * stage))
    if has_both:
        tma_load(f_d, [tile * ROWS + BOX, 0], ready, f_s.index(2 * stage + 1))
    # A_inv comes in two halves of 32 rows: where HBM lacks its zero upper right quarter, TMA fills that in
    for part in gl.static_range(PARTS):
        place = 2 * (PARTS * stage + part)
        tma_load(upper_d, [PARTS * tile + part, 0, 0], ready, A_s.index(place))
        tma_load(lower_d, [PARTS * tile + part, 0, 0], ready, A_s.index(place + 1))


@gluon.jit
def load_keys(x_d, corner, ready, ROW: gl.constexpr, tile, D: gl.constexpr):
    """Issue the TMA loads of a chunk's q or k, 64 keys each, into the stage's tile from row ROW on."""
    row, token, head = corner
    for strip in gl.static_range(D // STRIP):
        place = tile.slice(ROW, C, 1).slice(strip * STRIP, STRIP, 3)
        tma_load(x_d, [row, token, head, strip * STRIP], ready, place)


@gluon.jit
def tell(job, turn, ring):
    """Publish the work item of a turn in shared memory; the other partitions read it by `job_at`."""
    job_s, job_full, job_empty = ring
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place, parity = turn_of(turn, job_full)
    # all partitions have read what this slot of shared memory held two turns before
    mbarrier.wait(job_empty.index(place), parity ^ 1)
    job_s.index(place).store(gl.full((1,), job, gl.int32, lane))
    fence_async_shared()
    mbarrier.arrive(job_full.index(place), count=1)


@gluon.jit
def tiles_of(
    k_d, v_d, upper_d, f_d,
    HAS_Q: gl.constexpr, STAGES: gl.constexpr, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Allocate the stages in shared memory: q over k, v, A_inv, factors.

    A_inv and the factors have two views each: `halves` and `boxes` are what one TMA load writes, A_s and f_s
    are what a consumer warpgroup indexes: a matrix [C, C], a row [1, C].
    """
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
    # One CTA: work item after work item, 64 or 128 value rows of S^T through all chunks, and their outputs o.
    # Grid: min(work items, SMs), persistent, 1 CTA an SM.
    # Warps: 4 for each of CHAINS consumers, 4 for scores, 1 producer.
    # Shared memory: STAGES stages of q, k, v, A_inv, factors and P; o (and S) of each consumer; 2 work items.
    # The producer fills a stage by TMA. The score warpgroup reads q, k and factors, and writes P. A consumer
    # reads all of the stage, stores o by TMA, and the final S from registers to HBM.
    # mbarriers: full[s], 1 arrival by the producer and its TMA bytes; P_full[s], 1 by the score warpgroup;
    # empty[s], 1 + CHAINS by the score warpgroup and each consumer; job_full[j], 1 by the producer;
    # job_empty[j], 1 + CHAINS by the score warpgroup and each consumer.

    # three stages, but two where the states of two consumers take the shared memory of the third
    STAGES: gl.constexpr = 3 if S_d is None or CHAINS == 1 else 2
    qk_s, v_s, halves, A_s, boxes, f_s = tiles_of(k_d, v_d, upper_d, f_d, True, STAGES, CHAINS, D)
    P_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], TILE)
    # bf16 states go through the shared memory of the outputs: one buffer of a consumer, for one TMA store
    place: gl.constexpr = D if S_d is not None and S_d.dtype == gl.bfloat16 else C
    o_s = gl.allocate_shared_memory(gl.bfloat16, [CHAINS, place, STRIP], o_d.layout)
    S_s = o_s
    # fp32 states (checkpoints, and a backward at K = 64) need a buffer of their own
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
    # mbarriers are initialised in the generic proxy; TMA arrives on them in the async proxy
    fence_async_shared()
    # PDL: the next kernel may be scheduled at once; it waits for this one before it touches memory
    gdc_launch_dependents()
    # The first partition is the consumer with MINE = 0. Its registers are what the others leave of 512 for a
    # lane of each warpgroup (maxnreg 128 x 4), or of 360 with one consumer (120 x 3).
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
    """Scan segments without outputs: M and N of S_end = M S_start + N, see `split` (`segment_transfer`).

    One CTA: M or N of one segment and value head, all D value columns.  Grid: 2 CTAs for each segment and
    head, one work item each.  Warps: 4 consumer for each 64 value rows, 1 producer; no score warpgroup.
    Shared memory: four stages of k, v, A_inv, factors.
    mbarriers: full[s] 1 arrival, by the producer, and its TMA bytes; empty[s] CHAINS, by each consumer.
    """
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
    # every CTA reads its work item from HBM first, which the launch before writes
    gdc_wait()
    gdc_launch_dependents()
    # registers of the consumers: what the producer's 24 leave of 168 x 3 a lane, of 128 x 2 with one consumer
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
