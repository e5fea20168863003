"""Scan many short sequences: the state scan whose states move by TMA while chunks are computed.

A consumer of `persistent_scan_kernel` waits between two work items: it looks up the next one in L2, loads its
initial state from HBM behind the stores of the final one, and idles meanwhile. With one to eight chunks an
item, that is most of an item's time. Here two warps do all of it ahead of time, through shared memory that
holds one or two states:

    scheduler warp  takes and locates item t + 2, publishes it; stores the final state of item t - 1 by TMA,
                    and loads the initial state of item t + 1 or t + 2
    producer warp   loads the chunks of published items
    consumers       before item t + 1: read its initial state, and write the final state of item t there

Each consumer reads and writes its own 64 value rows, and each lane its own elements. The states take the
shared memory of the third pipeline stage. The arithmetic is that of `persistent_scan_kernel`, and so are the
bits.
"""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import (
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    join_descriptors,
    kernel,
    mbarrier,
    tma_store_wait,
)
from gdn.backends.hopper.scan.consumer import scan_chunks
from gdn.backends.hopper.scan.kernel import allocate_tiles
from gdn.backends.hopper.scan.operands import ACC_STATE, ACC_TOKENS
from gdn.backends.hopper.scan.producer import load_chunk
from gdn.backends.hopper.scan.scheduler import ONE_WARP, ONE_WARPGROUP, STRIP, Geometry
from gdn.backends.hopper.scan.scores import compute_chunk_scores
from gdn.backends.hopper.scan.structs import Config, Inputs, Outputs, Pipeline, Position, Scan, Slots
from gdn.backends.hopper.scan.swap import (
    CHUNK,
    FIELDS,
    GOAL,
    HEAD,
    LENGTH,
    ROW,
    SLOTS,
    SOURCE,
    TOKEN,
    States,
    WorkQueue,
)
from gdn.backends.triton.chunks import SEQUENCE


@jit
def past_states(scan):
    """Return an index past all states: a TMA load from there fills in zeros, a TMA store writes nothing."""
    if scan.slots is None:
        # there are at most as many states as work items
        return scan.geometry.num_items
    else:
        return scan.slots.slots


@jit
def locate_work(number, scan):
    """Return the fields of the work item of a scheduled number, all of them looked up in L2.

    Packed sequences are taken longest first by the sorted table.
    """
    geometry = scan.geometry
    item = gl.minimum(number, geometry.num_items - 1)
    n = item // geometry.HV
    if geometry.cu_seqlens_ptr is None:
        row, token, length, chunk = geometry.locate(item)
    else:
        # a long sequence that came last would leave the other SMs idle: entry n is the n-th longest
        entry = geometry.table_ptr + 2 * geometry.bound + SEQUENCE * n
        row, token, length, chunk = n * 0, gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4)
        n = gl.load(entry + 1)
    is_item = number < geometry.num_items
    is_read = is_item
    is_written = is_item
    source = n
    goal = n
    if scan.slots is not None:
        # the pool is the caller's: launches before `solve` have completed, so this needs no `gdc_wait`
        slots = scan.slots
        source = gl.load(slots.index_ptr + n * slots.index_n).to(gl.int64)
        is_read = is_read & slots.is_slot(source)
        goal = source
        # an empty sequence leaves its slot as it is
        is_written = is_read & (length > 0)
        if slots.out_index_ptr is not None:
            goal = gl.load(slots.out_index_ptr + n * slots.out_index_n).to(gl.int64)
            is_written = is_written & slots.is_slot(goal)
        if slots.has_initial_ptr is not None:
            is_read = is_read & (gl.load(slots.has_initial_ptr + n * slots.has_initial_n) != 0)
    past = past_states(scan)
    field = gl.arange(0, FIELDS, ONE_WARP)
    fields = gl.where(field == LENGTH, gl.where(is_item, length, -1), gl.where(field == ROW, row, token))
    fields = gl.where(field == HEAD, item % geometry.HV, gl.where(field == CHUNK, chunk, fields))
    fields = gl.where(field == SOURCE, gl.where(is_read, source, past).to(gl.int32), fields)
    fields = gl.where(field == GOAL, gl.where(is_written, goal, past).to(gl.int32), fields)
    return fields.to(gl.int32)


@jit
def run_producer(scan, queue):
    """Run the producer warp: load the chunks of published work items into the pipeline stages.

    `turn` counts the CTA's work items, `num_chunks` its chunks over all of them.
    """
    geometry = scan.geometry
    num_chunks = 0
    turn = 0
    length = queue.wait_length(turn, ONE_WARP)
    while length >= 0:
        row = queue.field(turn, ROW, ONE_WARP)
        head = queue.field(turn, HEAD, ONE_WARP)
        token = queue.field(turn, TOKEN, ONE_WARP)
        tile = queue.field(turn, CHUNK, ONE_WARP) * geometry.HV + head
        fence_async_shared()
        queue.release(turn)
        end = num_chunks + gl.cdiv(length, C)
        for i in range(num_chunks, end):
            load_chunk(i, (row, token, head // geometry.ratio), (row, token, head, 0), tile, scan)
            token += C
            tile += geometry.HV
        num_chunks = end
        turn += 1
        length = queue.wait_length(turn, ONE_WARP)


@jit
def run_scheduler(scan, queue, states):
    """Run the scheduler warp: take, locate and publish work items, load initial states, store final ones.

    An item is published while the consumers have two more: the latencies of the counter and of the look-ups
    in L2 pass while states move, and no chunk waits for them.
    """
    config = scan.config
    num_ctas = gl.num_programs(0)
    # The first two items of a CTA need no counter. The second ones in reverse, since the table begins with
    # the longest sequence: its CTA gets the shortest of them.
    queue.publish(locate_work(gl.program_id(0), scan), 0)
    # initial states are the caller's, and load while `solve` drains
    states.load_initial(0, queue, config)
    queue.publish(locate_work(2 * num_ctas - 1 - gl.program_id(0), scan), 1)
    BUFFERS: gl.constexpr = states.full.shape[0] // config.CONSUMERS
    if BUFFERS == 2:
        states.load_initial(1, queue, config)
    # Wait even if there is no chunk: `solve` zeroes the counter in HBM, and the next kernel relies on this
    # kernel to complete only after everything before it has completed.
    gdc_wait()
    turn = 0
    while queue.field(turn, LENGTH, ONE_WARP) >= 0:
        # the tile scheduler is this counter in L2
        number = 2 * num_ctas + gl.atomic_add(queue.next_ptr, 1, sem="relaxed")
        queue.publish(locate_work(number, scan), turn + 2)
        states.move(turn, queue, config)
        turn += 1
    states.store_final(turn, queue, config)
    # shared memory must outlive the last TMA store that reads it
    tma_store_wait(0)


@jit
def run_consumer(WG: gl.constexpr, scan, queue, states):
    """Run consumer warpgroup WG: advance its 64 value rows of S^T through all work items, and store o."""
    layout: gl.constexpr = ACC_TOKENS if scan.config.D == C else ACC_STATE
    S = gl.zeros((STRIP, scan.config.D), gl.float32, layout)
    i = 0
    turn = 0
    length = queue.wait_length(turn, ONE_WARPGROUP)
    while length >= 0:
        row = queue.field(turn, ROW, ONE_WARPGROUP)
        token = row * scan.geometry.T + queue.field(turn, TOKEN, ONE_WARPGROUP)
        head = queue.field(turn, HEAD, ONE_WARPGROUP)
        S = states.swap(S, turn, WG, scan.config)
        queue.release(turn)
        # chunk numbers count over all work items of the CTA: first token that chunk 0 would have
        position = Position(token=token - i * C, tile=0, head=head, first_v=WG * STRIP)
        S, i = scan_chunks(S, i, i + gl.cdiv(length, C), i * C + length, position, WG, scan)
        turn += 1
        length = queue.wait_length(turn, ONE_WARPGROUP)
    states.wait_full(turn, WG, scan.config)
    states.put_final(S, turn, WG, scan.config)
    # shared memory must outlive the last TMA store that reads it
    tma_store_wait(0)


@jit
def compute_scores(scan, queue):
    """Run the score warpgroup: compute P of all chunks of all work items, for every consumer warpgroup."""
    num_chunks = 0
    turn = 0
    length = queue.wait_length(turn, ONE_WARPGROUP)
    while length >= 0:
        fence_async_shared()
        queue.release(turn)
        end = num_chunks + gl.cdiv(length, C)
        for i in range(num_chunks, end):
            compute_chunk_scores(i, length - (i - num_chunks) * C, scan)
        num_chunks = end
        turn += 1
        length = queue.wait_length(turn, ONE_WARPGROUP)


@kernel
def short_scan_kernel(
    q_d, k_d, v_d, A0_d, A1_d, A2_d, A3_d, f_d, o_d, initial_d, final_d, cu_seqlens_ptr, table_ptr,
    o_ptr, factors_ptr, index_ptr, out_index_ptr, has_initial_ptr, next_ptr,
    T, HV, ratio, chunks_per_row, bound, num_items,
    state_n, state_h, index_n, out_index_n, has_initial_n, slots, lowest,
    V_FIRST: gl.constexpr, FAST_PATH: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    # One CTA: work item after work item, all value rows of S^T through all chunks, and their outputs o.
    # Grid: min(work items, SMs), persistent, 1 CTA an SM.
    # Warps: 4 for each 64 value rows, 4 for scores, 1 producer, 1 scheduler.
    # Shared memory: STAGES stages of q, k, v, A_inv, factors and P; o of each consumer; BUFFERS states; 4
    # items. The producer fills a stage by TMA. The scheduler publishes items, fills a buffer with an initial
    # state by TMA, and stores the final state from it by TMA. The score warpgroup reads q, k and factors, and
    # writes P. A consumer reads all of the stage, stores o by TMA, and swaps states. With index_ptr states
    # are slots of a pool, which the descriptors cover.
    # mbarriers: full[s], P_full[s] and empty[s] of `persistent_scan_kernel`; those of WorkQueue and States.
    CONSUMERS: gl.constexpr = D // STRIP
    # at K = V = 128 states take the shared memory of the third stage: one in fp32, or two in bf16
    STAGES: gl.constexpr = 2 if CONSUMERS == 2 else 3
    config = Config(CONSUMERS=CONSUMERS, D=D, V_FIRST=V_FIRST, FAST_PATH=FAST_PATH, IN_SEGMENTS=False)
    inputs = Inputs(
        q=q_d, k=k_d, v=v_d, A=join_descriptors(A0_d, A1_d, A2_d, A3_d), factors=f_d,
        factors_ptr=factors_ptr, initial_ptr=None,
    )  # fmt: skip
    outputs = Outputs(o=o_d, S=None, o_ptr=o_ptr, final_ptr=None)
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
    tiles = allocate_tiles(inputs, outputs, True, STAGES, config)
    state_d = final_d if initial_d is None else initial_d
    BUFFERS: gl.constexpr = 1 if CONSUMERS == 2 and state_d.dtype == gl.float32 else 2
    HALVES: gl.constexpr = BUFFERS * CONSUMERS
    shape: gl.constexpr = [HALVES, 1, 1, STRIP, D] if V_FIRST else [HALVES, 1, 1, D, STRIP]
    state_s = gl.allocate_shared_memory(state_d.dtype, shape, state_d.layout)
    items = gl.allocate_shared_memory(gl.int32, [SLOTS, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    P_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    item_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    item_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    state_full = gl.allocate_shared_memory(gl.int64, [HALVES, 1], barrier)
    state_empty = gl.allocate_shared_memory(gl.int64, [HALVES, 1], barrier)
    for i in gl.static_range(SLOTS):
        mbarrier.init(item_full.index(i), count=1)
        mbarrier.init(item_empty.index(i), count=2 + CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1 + CONSUMERS)
        mbarrier.init(P_full.index(i), count=1)
    for i in gl.static_range(HALVES):
        mbarrier.init(state_full.index(i), count=1)
        mbarrier.init(state_empty.index(i), count=1)
    # mbarriers are initialised in the generic proxy; TMA arrives on them in the async proxy
    fence_async_shared()
    # PDL: the next kernel may be scheduled at once; it waits for this one before it touches memory
    gdc_launch_dependents()
    scan = Scan(
        inputs=inputs, outputs=outputs, tiles=tiles, geometry=geometry, config=config,
        pipeline=Pipeline(full=full, empty=empty, P_full=P_full), queue=None, slots=pool,
    )  # fmt: skip
    queue = WorkQueue(items=items, full=item_full, empty=item_empty, next_ptr=next_ptr)
    states = States(initial=initial_d, final=final_d, tiles=state_s, full=state_full, empty=state_empty)
    # registers as in `persistent_scan_kernel`; producer and scheduler are warps of one warpgroup
    if CONSUMERS == 1:
        gl.warp_specialize([
            (run_consumer, (0, scan, queue, states)), (compute_scores, (scan, queue)),
            (run_producer, (scan, queue)), (run_scheduler, (scan, queue, states)),
        ], [4, 1, 1], [88, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (run_consumer, (0, scan, queue, states)), (run_consumer, (1, scan, queue, states)),
            (compute_scores, (scan, queue)), (run_producer, (scan, queue)),
            (run_scheduler, (scan, queue, states)),
        ], [4, 4, 1, 1], [200, 88, 24, 24])  # fmt: skip
