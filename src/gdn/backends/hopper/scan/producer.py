"""Run the producer warp of the state scan: take work items, publish them, load their chunks by TMA."""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import BOX_LINES, NUM_ROWS, WELL_CONDITIONED, WITH_B, C
from gdn.backends.hopper.gluon import gdc_wait, jit, mbarrier, tma_load
from gdn.backends.hopper.scan.scheduler import STRIP, split_work, stage_and_phase
from gdn.backends.triton.chunks import SEQUENCE


@jit
def run_producer(scan):
    """Run the producer warp: take work items, publish each, and load its chunks into the pipeline stages.

    `num_chunks` counts the CTA's chunks over all work items, `turn` the work items. `segment_transfer` has no
    queue: each CTA has one work item, and nothing is published.
    """
    num_chunks = 0
    turn = 0
    number = gl.program_id(0)
    while number < scan.geometry.num_items:
        num_chunks = load_item(number, turn, num_chunks, scan)
        turn += 1
        if scan.queue is None:
            number = scan.geometry.num_items
        else:
            # Wait even if no chunk was loaded: `solve` zeroes the counter in HBM, and the next kernel relies
            # on this kernel to complete only after everything before it has completed.
            gdc_wait()
            # item b was CTA b's first; the tile scheduler is this counter in L2
            number = gl.num_programs(0) + gl.atomic_add(scan.queue.next_ptr, 1, sem="relaxed")
    if scan.queue is not None:
        # a number past the last work item ends the other partitions
        scan.queue.publish_work(number, turn)


@jit
def load_item(number, turn, num_chunks, scan):
    """Publish one work item and load its chunks; return the CTA's chunk count after the last of them.

    `num_chunks` is the CTA's chunk count before the item. Packed sequences are taken longest first by the
    sorted table. Only the producer reads that order: it publishes the number of the original sequence.
    """
    geometry = scan.geometry
    HV = geometry.HV
    item, strip = split_work(number, 0, scan.config)
    is_map = False
    if scan.inputs.q is None:
        is_map = geometry.is_map(item)
    head = item % HV
    if geometry.cu_seqlens_ptr is None:
        if scan.queue is not None:
            scan.queue.publish_work(number, turn)
        # without `gdc_wait`: segments were written to HBM three launches before, which has completed
        row, token, length, chunk = geometry.locate(item)
    else:
        # a long sequence that came last would leave the other SMs idle: entry `place` is the place-th longest
        place = item // HV
        fields = geometry.table_ptr + 2 * geometry.bound + SEQUENCE * place
        row, token, length, chunk = 0, gl.load(fields + 2), gl.load(fields + 3), gl.load(fields + 4)
        PIECES: gl.constexpr = scan.config.D // STRIP // scan.config.CONSUMERS
        scan.queue.publish_work(number + (gl.load(fields + 1) - place) * (HV * PIECES), turn)
    tile = chunk * HV + head
    end = num_chunks + gl.cdiv(length, C)
    for i in range(num_chunks, end):
        # M is scanned with v = 0: past T a TMA load fills shared memory with zeros and reads nothing from HBM
        v_token = token + geometry.T if is_map else token
        load_chunk(i, (row, token, head // geometry.ratio), (row, v_token, head, strip), tile, scan)
        token += C
        tile += HV
    return end


@jit
def load_chunk(i, corner, corner_of_v, tile, scan):
    """Wait until the stage of chunk i is empty, then issue the chunk's TMA loads; full[s] counts their bytes.

    A well-conditioned chunk that has B needs only the second box of factors: the first is not loaded. Of the
    scan's first chunk both are: its `WELL_CONDITIONED` in HBM may not be read before `solve` has completed.
    """
    inputs = scan.inputs
    tiles = scan.tiles
    CONSUMERS: gl.constexpr = scan.config.CONSUMERS
    D: gl.constexpr = scan.config.D
    PARTS: gl.constexpr = 2 * STRIP // D  # A_inv is split bf16 at 64 keys
    LOADS: gl.constexpr = len(inputs.A)
    BYTES: gl.constexpr = (
        D // STRIP * ((0 if inputs.q is None else inputs.q.block_type.nbytes) + inputs.k.block_type.nbytes)
        + CONSUMERS * inputs.v.block_type.nbytes + LOADS * PARTS * inputs.A[0].block_type.nbytes
    )  # fmt: skip
    stage, phase = stage_and_phase(i, scan.pipeline.full)
    ready = scan.pipeline.full.index(stage)
    has_both = True
    # read the flag from HBM before the wait for `empty`, which hides its latency
    if scan.config.FAST_PATH == WITH_B and (inputs.q is None or i > 0):
        flag = inputs.factors_ptr + tile.to(gl.int64) * (NUM_ROWS * C) + WELL_CONDITIONED
        has_both = gl.load(flag) == 0.0
    scan.pipeline.wait_empty(stage, phase)
    # one arrival with the number of bytes: full[s] completes when TMA has written all of them
    if has_both:
        mbarrier.expect(ready, BYTES + 2 * inputs.factors.block_type.nbytes)
    else:
        mbarrier.expect(ready, BYTES + inputs.factors.block_type.nbytes)
    load_keys(inputs.k, corner, ready, 0 if inputs.q is None else C, tiles.qk.index(stage), D)
    row, token, head, strip = corner_of_v
    for n in gl.static_range(CONSUMERS):
        place = tiles.v.index(CONSUMERS * stage + n)
        tma_load(inputs.v, [row, token, head, (strip + n) * STRIP], ready, place)
    if inputs.q is not None:
        load_keys(inputs.q, corner, ready, 0, tiles.qk.index(stage), D)
        # q, k, v are the caller's and load while the kernel before drains; A_inv and factors are its results
        if i == 0:
            gdc_wait()
    boxes = tiles.factor_boxes
    tma_load(inputs.factors, [tile, BOX_LINES, 0], ready, boxes.index(2 * stage + 1))
    if has_both:
        tma_load(inputs.factors, [tile, 0, 0], ready, boxes.index(2 * stage))
    # A_inv comes in two halves, or in rows of blocks of 16: HBM then lacks its zero blocks, TMA fills them in
    for part in gl.static_range(PARTS):
        for n in gl.static_range(LOADS):
            place = tiles.A_rows.index(LOADS * (PARTS * stage + part) + n)
            tma_load(inputs.A[n], [PARTS * tile + part, 0, 0], ready, place)


@jit
def load_keys(x_d, corner, ready, ROW: gl.constexpr, tile, D: gl.constexpr):
    """Issue the TMA loads of a chunk's q or k, 64 keys each, into the stage's tile from row ROW on."""
    row, token, head = corner
    for strip in gl.static_range(D // STRIP):
        place = tile.slice(ROW, C, 1).slice(strip * STRIP, STRIP, 3)
        tma_load(x_d, [row, token, head, strip * STRIP], ready, place)
