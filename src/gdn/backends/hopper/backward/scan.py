"""Scan the gradient of the state backwards through the chunks of each sequence: dS of every chunk, and dv.

    dv_new = P^T do + e^(G_C - G) k dS;   dv = beta A_inv^T dv_new
    dS <- e^(G_C) dS + (scale e^G q)^T do - (e^G k)^T dv

The mirror of the forward's state scan: persistent and warp-specialised, dS^T in registers in fp32.

    run_producer    producer warp, 1 warp: the TMA loads of each chunk
    compute_scores  score warpgroup, 4 warps: P for every consumer
    run_consumer    consumer warpgroup, 4 warps, once or twice: 64 value rows of dS^T

HBM bytes per token and value head at K = V = 128 in bf16, HV = 2 H: q, k 256, do 256, A_inv 128, factors 32;
dS 512, dv 256: 1440. MMAs of 64 x 64 x 128 per chunk and value head: 1 for P, 15 of the consumers. At K = V =
64: q, k 128, do 128, A_inv 256, factors 32; dS 128, dv 128: 800. There the score warpgroup splits
A_inv, and MMAs of 64 x 64 x 64 are 1 and 11.
"""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.backward.factors import ROWS
from gdn.backends.hopper.backward.scan_consumer import run_consumer
from gdn.backends.hopper.backward.scan_scores import compute_scores
from gdn.backends.hopper.backward.scan_shared import (
    Scan,
    ScanInputs,
    ScanOutputs,
    ScanTiles,
    ScanTurns,
    Sequences,
    chunks_in,
    is_map,
    item_of,
    split_rows,
)
from gdn.backends.hopper.backward.shared import wait_empty
from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import fence_async_shared, jit, kernel, mbarrier, recast, tma_load
from gdn.backends.hopper.scan.operands import BF16_TILE
from gdn.backends.hopper.scan.scheduler import STRIP


@jit
def run_producer(w):
    """Run the producer warp: load the chunks of all work items of this CTA, last chunk of an item first."""
    at = 0
    for number in range(gl.program_id(0), w.sequences.items, gl.num_programs(0)):
        item = item_of(number, w)
        if w.sequences.slab_ptr is not None:
            item = split_rows(item, w.sequences)
        chunks = chunks_in(item)
        for i in range(chunks):
            load_chunk(w, item, chunks - 1 - i, at + i)
        at += chunks


@jit
def load_chunk(w, item, c, i):
    """Wait until the stage of the CTA's chunk i is empty, then issue its TMA loads."""
    x = w.inputs
    stage = wait_empty(i, w.turns.empty)
    ready = w.turns.full.index(stage)
    KEYS: gl.constexpr = (w.D // STRIP) * x.k.block_type.nbytes
    BYTES: gl.constexpr = KEYS + x.A_inv.block_type.nbytes + x.factors.block_type.nbytes
    # M of a segment is scanned with do = 0, and needs no q
    has_q = True
    if w.out.dS_d is None:
        has_q = is_map(item) == 0
    if has_q:
        mbarrier.expect(ready, BYTES + KEYS + w.CONSUMERS * x.do.block_type.nbytes)
    else:
        mbarrier.expect(ready, BYTES)
    token = item.first + c * C
    tile = (item.chunk + c) * w.sequences.HV + item.head
    key_head = item.head // w.sequences.ratio
    for n in gl.static_range(w.D // STRIP):
        corner = [item.row, token, key_head, n * STRIP]
        tma_load(x.k, corner, ready, w.tiles.k.index(stage).slice(n * STRIP, STRIP, 3))
    tma_load(x.factors, [tile * ROWS, 0], ready, w.tiles.boxes.index(stage))
    if has_q:
        for n in gl.static_range(w.D // STRIP):
            corner = [item.row, token, key_head, n * STRIP]
            tma_load(x.q, corner, ready, w.tiles.q.index(stage).slice(n * STRIP, STRIP, 3))
        for n in gl.static_range(w.CONSUMERS):
            corner = [item.row, token, item.head, (item.strip + n) * STRIP]
            tma_load(x.do, corner, ready, w.tiles.do.index(w.CONSUMERS * stage + n))
    tma_load(x.A_inv, [tile * x.A_inv.block_type.shape[0], 0], ready, w.tiles.A_inv.index(stage))


@jit
def run_partitions(x, out, sequences, V_FIRST: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr):
    """Allocate the shared memory of a CTA, initialise the mbarriers, and run the partitions."""
    STAGES: gl.constexpr = 3
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    boxes = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, C], x.factors.layout)
    dS_s = None
    if out.dS_d is not None:
        dS_s = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, D, STRIP], BF16_TILE)
    # two consumers leave shared memory for three stages if P has one buffer
    P_STAGES: gl.constexpr = 1 if CONSUMERS == 2 else STAGES
    tiles = ScanTiles(
        q=gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, C, 1, D], x.q.layout),
        k=gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, C, 1, D], x.q.layout),
        do=gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS * STAGES, 1, C, 1, STRIP], x.q.layout),
        A_inv=gl.allocate_shared_memory(
            x.A_inv.dtype, [STAGES, x.A_inv.block_type.shape[0], C], x.A_inv.layout
        ),
        boxes=boxes,
        factors=recast(boxes, gl.float32, [STAGES * ROWS, 1, C], x.factors.layout),
        P=gl.allocate_shared_memory(gl.bfloat16, [2 * P_STAGES, C, C], BF16_TILE),
        dS=dS_s,
    )
    turns = ScanTurns(
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        P_full=gl.allocate_shared_memory(gl.int64, [P_STAGES, 1], barrier),
        P_empty=gl.allocate_shared_memory(gl.int64, [P_STAGES, 1], barrier),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(turns.full.index(i), count=1)
        mbarrier.init(turns.empty.index(i), count=1 + CONSUMERS)
    for i in gl.static_range(P_STAGES):
        mbarrier.init(turns.P_full.index(i), count=1)
        mbarrier.init(turns.P_empty.index(i), count=CONSUMERS)
    # mbarriers are initialised in the generic proxy; TMA arrives on them in the async proxy
    fence_async_shared()
    w = Scan(x, out, tiles, turns, sequences, V_FIRST, CONSUMERS, D)
    # The first consumer gets the registers that the others leave of 512 (maxnreg 128 x 4), of 360 (120 x 3).
    # The score warpgroup needs 128 where it splits A_inv: with 88 it spills.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(run_consumer, (0, w)), (compute_scores, (w,)), (run_producer, (w,))],
            [4, 1],
            [128 if D == STRIP else 88, 24],
        )
    else:
        gl.warp_specialize(
            [(run_consumer, (0, w)), (run_consumer, (1, w)), (compute_scores, (w,)), (run_producer, (w,))],
            [4, 4, 1], [200, 88, 24],
        )  # fmt: skip


@kernel
def reverse_scan_kernel(
    q_d, k_d, do_d, A_inv_d, factors_d, dS_d, dv_d,
    table_ptr, items_ptr, slab_ptr, boundary_ptr, dfinal_ptr, dinitial_ptr, dv_ptr, T, HV, ratio,
    chunks_per_row, bound, items,
    V_FIRST: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    # One CTA: work items b, b + grid, ...: 64 or 128 value rows of dS^T through all chunks, and their dv.
    # Grid: min(work items, SMs), persistent, 1 CTA an SM.
    # Warps: 4 for each of CONSUMERS consumers, 4 for scores, 1 producer.
    # Shared memory: three stages of q, k, do, A_inv and factors; P (hi and lo); dS, then dv of each consumer.
    # The producer fills a stage by TMA. The score warpgroup reads q, k and factors, and writes P. A consumer
    # reads all of the stage, and stores dS and dv by TMA, dinitial from registers.
    # mbarriers: full[s], 1 arrival by the producer and its TMA bytes; empty[s], 1 + CONSUMERS by the score
    # warpgroup and each consumer; P_full[p], 1 by the score warpgroup; P_empty[p], 1 by each consumer.
    inputs = ScanInputs(q_d, k_d, do_d, A_inv_d, factors_d)
    if slab_ptr is not None:
        # how many a pass has is on the device: see `slabs`
        items = gl.load(slab_ptr) * (HV * (D // STRIP // CONSUMERS))
    out = ScanOutputs(dS_d, dv_d, dv_ptr, dfinal_ptr, dinitial_ptr, boundary_ptr)
    sequences = Sequences(table_ptr, items_ptr, slab_ptr, T, HV, ratio, chunks_per_row, bound, items)
    run_partitions(inputs, out, sequences, V_FIRST, CONSUMERS, D)


@kernel
def reverse_transfer_kernel(
    q_d, k_d, do_d, A_inv_d, factors_d, items_ptr, dfinal_ptr, transfers_ptr, T, HV, ratio, items,
    V_FIRST: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    # One CTA: M or N of one segment and value head, 64 or 128 value columns: see `segments`.
    # Grid: work items, of which many may be empty; one a CTA, as those for M skip P's mbarriers.
    # Warps: as in reverse_scan_kernel.
    # Shared memory: as in reverse_scan_kernel, but no dS.
    # mbarriers: as in reverse_scan_kernel.
    inputs = ScanInputs(q_d, k_d, do_d, A_inv_d, factors_d)
    out = ScanOutputs(None, None, None, dfinal_ptr, transfers_ptr, None)
    sequences = Sequences(None, items_ptr, None, T, HV, ratio, 0, 0, items)
    run_partitions(inputs, out, sequences, V_FIRST, CONSUMERS, D)
