"""Scan the chunks of each sequence with a persistent, warp-specialised kernel: pass S on, compute o.

A CTA takes work items until none is left. A work item is a sequence (or segment) and a value head. The warps
of a CTA form partitions:

    run_producer     producer warp, 1 warp: takes and publishes work items, issues the TMA loads of each chunk
    compute_scores   score warpgroup, 4 warps: computes P for every consumer
    run_consumer     consumer warpgroup, 4 warps, once or twice: 64 value rows of S^T and their outputs

One consumer warpgroup runs at V = 64, and at V = 128 where there are few work items: two CTAs then share a
work item, half of the value rows each.

A_inv and the factors come from `solve` through HBM. Tokens past a sequence's end may belong to another
sequence, or be NaN: r is masked and k is zeroed there, and o is stored row by row, since a TMA store would
write past the end.
"""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import BOX_LINES, BOX_ROWS, LINE, NUM_ROWS, C
from gdn.backends.hopper.gluon import (
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    join_descriptors,
    kernel,
    mbarrier,
    recast,
)
from gdn.backends.hopper.scan.consumer import run_consumer
from gdn.backends.hopper.scan.operands import BF16_TILE, FP32_ROWS
from gdn.backends.hopper.scan.producer import run_producer
from gdn.backends.hopper.scan.scheduler import SLOTS, STRIP, Geometry, Queue
from gdn.backends.hopper.scan.scores import compute_scores
from gdn.backends.hopper.scan.structs import Config, Inputs, Outputs, Pipeline, Scan, Slots, Tiles


@jit
def allocate_tiles(inputs, outputs, HAS_Q: gl.constexpr, STAGES: gl.constexpr, config):
    """Allocate the stages in shared memory: q over k, v, A_inv, factors, P; and the buffers of o and S.

    A_inv and the factors have two views each: `A_rows` and `factor_boxes` are what one TMA load writes, `A`
    and `factors` are what a consumer warpgroup indexes: a matrix [C, C], a row [1, C].
    """
    CONSUMERS: gl.constexpr = config.CONSUMERS
    D: gl.constexpr = config.D
    keys: gl.constexpr = 2 * C if HAS_Q else C
    qk_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, keys, 1, D], inputs.k.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS * STAGES, 1, C, 1, STRIP], inputs.v.layout)
    count: gl.constexpr = 2 * STRIP // D * STAGES
    loads: gl.constexpr = len(inputs.A)
    rows_s = gl.allocate_shared_memory(
        gl.bfloat16, [loads * count, 1, C // loads, C], inputs.A[0].layout
    )  # fmt: skip
    A_s = recast(rows_s, gl.bfloat16, [count, C, C], BF16_TILE)
    boxes = gl.allocate_shared_memory(
        gl.float32, [STAGES * NUM_ROWS // BOX_ROWS, 1, BOX_LINES, LINE], inputs.factors.layout
    )  # fmt: skip
    f_s = recast(boxes, gl.float32, [STAGES * NUM_ROWS, 1, C], FP32_ROWS)
    P_s = None
    o_s = None
    S_s = None
    if HAS_Q:
        P_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], BF16_TILE)
        # bf16 states go through the shared memory of the outputs: one buffer of a consumer, for one TMA store
        rows: gl.constexpr = D if outputs.S is not None and outputs.S.dtype == gl.bfloat16 else C
        o_s = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, rows, STRIP], outputs.o.layout)
        S_s = o_s
        # fp32 states (checkpoints, and a backward at K = 64) need a buffer of their own
        if outputs.S is not None and outputs.S.dtype == gl.float32:
            S_s = gl.allocate_shared_memory(gl.float32, [CONSUMERS, D, STRIP], outputs.S.layout)
    return Tiles(
        qk=qk_s, v=v_s, A_rows=rows_s, A=A_s, factor_boxes=boxes, factors=f_s, P=P_s, o=o_s, S=S_s
    )  # fmt: skip


@kernel
def persistent_scan_kernel(
    q_d, k_d, v_d, A0_d, A1_d, A2_d, A3_d, f_d, o_d, S_d, initial_ptr, final_ptr, cu_seqlens_ptr, table_ptr,
    o_ptr, factors_ptr, index_ptr, out_index_ptr, has_initial_ptr, next_ptr,
    T, HV, ratio, chunks_per_row, bound, num_items,
    state_n, state_h, index_n, out_index_n, has_initial_n, slots, lowest,
    V_FIRST: gl.constexpr, FAST_PATH: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    # One CTA: work item after work item, 64 or 128 value rows of S^T through all chunks, and their outputs o.
    # Grid: min(work items, SMs), persistent, 1 CTA an SM.
    # Warps: 4 for each consumer, 4 for scores, 1 producer.
    # Shared memory: STAGES stages of q, k, v, A_inv, factors and P; o (and S) of each consumer; 2 work items.
    # The producer fills a stage by TMA. The score warpgroup reads q, k and factors, and writes P. A consumer
    # reads all of the stage, stores o by TMA, and the final S from registers to HBM. With index_ptr the
    # initial and final states are slots of a pool.
    # mbarriers: full[s], 1 arrival by the producer and its TMA bytes; P_full[s], 1 by the score warpgroup;
    # empty[s], 1 + CONSUMERS by the score warpgroup and each consumer; of the queue full[j], 1 by the
    # producer, and empty[j], 1 + CONSUMERS by the score warpgroup and each consumer.
    IN_SEGMENTS: gl.constexpr = table_ptr is not None and cu_seqlens_ptr is None
    config = Config(
        CONSUMERS=CONSUMERS, D=D, V_FIRST=V_FIRST, FAST_PATH=FAST_PATH, IN_SEGMENTS=IN_SEGMENTS
    )  # fmt: skip
    inputs = Inputs(
        q=q_d, k=k_d, v=v_d, A=join_descriptors(A0_d, A1_d, A2_d, A3_d), factors=f_d,
        factors_ptr=factors_ptr, initial_ptr=initial_ptr,
    )  # fmt: skip
    outputs = Outputs(o=o_d, S=S_d, o_ptr=o_ptr, final_ptr=final_ptr)
    pool = None
    if index_ptr is not None:
        pool = Slots(
            index_ptr=index_ptr, out_index_ptr=out_index_ptr, has_initial_ptr=has_initial_ptr,
            state_n=state_n, state_h=state_h, index_n=index_n, out_index_n=out_index_n,
            has_initial_n=has_initial_n, slots=slots, lowest=lowest,
        )  # fmt: skip
    geometry = Geometry(
        cu_seqlens_ptr=cu_seqlens_ptr, table_ptr=table_ptr, T=T, HV=HV, ratio=ratio,
        chunks_per_row=chunks_per_row, bound=bound, num_items=num_items,
    )  # fmt: skip
    # three stages, but two where the states of two consumers take the shared memory of the third
    STAGES: gl.constexpr = 3 if S_d is None or CONSUMERS == 1 else 2
    tiles = allocate_tiles(inputs, outputs, True, STAGES, config)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    P_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    items = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    item_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    for i in gl.static_range(SLOTS):
        mbarrier.init(item_full.index(i), count=1)
        mbarrier.init(item_empty.index(i), count=1 + CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1 + CONSUMERS)
        mbarrier.init(P_full.index(i), count=1)
    # mbarriers are initialised in the generic proxy; TMA arrives on them in the async proxy
    fence_async_shared()
    # PDL: the next kernel may be scheduled at once; it waits for this one before it touches memory
    gdc_launch_dependents()
    scan = Scan(
        inputs=inputs, outputs=outputs, tiles=tiles, geometry=geometry, config=config,
        pipeline=Pipeline(full=full, empty=empty, P_full=P_full),
        queue=Queue(items=items, full=item_full, empty=item_empty, next_ptr=next_ptr), slots=pool,
    )  # fmt: skip
    # The first partition is the consumer with WG = 0. It gets the registers that the others leave of 512 for
    # a lane of each warpgroup (maxnreg 128 x 4), or of 360 with one consumer (120 x 3).
    if CONSUMERS == 1:
        gl.warp_specialize([
            (run_consumer, (0, scan)), (compute_scores, (scan,)), (run_producer, (scan,)),
        ], [4, 1], [88, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (run_consumer, (0, scan)), (run_consumer, (1, scan)),
            (compute_scores, (scan,)), (run_producer, (scan,)),
        ], [4, 4, 1], [200, 88, 24])  # fmt: skip


@kernel
def segment_transfer_kernel(
    k_d, v_d, A0_d, A1_d, A2_d, A3_d, f_d, factors_ptr, initial_ptr, final_ptr, items_ptr, T, HV, ratio,
    V_FIRST: gl.constexpr, FAST_PATH: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Scan segments without outputs: M and N of S_end = M S_start + N, see `segments`.

    One CTA: M or N of one segment and value head, all D value columns.  Grid: 2 CTAs for each segment and
    head, one work item each.  Warps: 4 consumer for each 64 value rows, 1 producer; no score warpgroup.
    Shared memory: four stages of k, v, A_inv, factors.
    mbarriers: full[s] 1 arrival, by the producer, and its TMA bytes; empty[s] CONSUMERS, by each consumer.
    """
    CONSUMERS: gl.constexpr = D // STRIP
    STAGES: gl.constexpr = 4
    config = Config(CONSUMERS=CONSUMERS, D=D, V_FIRST=V_FIRST, FAST_PATH=FAST_PATH, IN_SEGMENTS=True)
    inputs = Inputs(
        q=None, k=k_d, v=v_d, A=join_descriptors(A0_d, A1_d, A2_d, A3_d), factors=f_d,
        factors_ptr=factors_ptr, initial_ptr=initial_ptr,
    )  # fmt: skip
    outputs = Outputs(o=None, S=None, o_ptr=None, final_ptr=final_ptr)
    tiles = allocate_tiles(inputs, outputs, False, STAGES, config)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    num_items = gl.num_programs(0)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    # every CTA reads its work item from HBM first, which the launch before writes
    gdc_wait()
    gdc_launch_dependents()
    geometry = Geometry(
        cu_seqlens_ptr=None, table_ptr=items_ptr, T=T, HV=HV, ratio=ratio, chunks_per_row=0, bound=0,
        num_items=num_items,
    )  # fmt: skip
    pipeline = Pipeline(full=full, empty=empty, P_full=None)
    scan = Scan(
        inputs=inputs, outputs=outputs, tiles=tiles, pipeline=pipeline, queue=None, geometry=geometry,
        config=config, slots=None,
    )  # fmt: skip
    # registers of the consumers: what the producer's 24 leave of 168 x 3 a lane, of 128 x 2 with one consumer
    if CONSUMERS == 1:
        gl.warp_specialize([(run_consumer, (0, scan)), (run_producer, (scan,))], [1], [24])
    else:
        gl.warp_specialize(
            [(run_consumer, (0, scan)), (run_consumer, (1, scan)), (run_producer, (scan,))], [4, 1], [240, 24]
        )  # fmt: skip
