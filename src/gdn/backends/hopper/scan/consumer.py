"""Run a consumer warpgroup of the state scan: 64 value rows of S^T, every chunk of every work item.

S^T stays in registers from the first chunk of a work item to the last. The loops call functions, since
Triton traces the body of a loop twice and that of a nested loop four times, but a function once.
"""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import WITH_A_INV, C
from gdn.backends.hopper.gluon import gdc_wait, jit, tma_store_wait
from gdn.backends.hopper.scan.chunk import advance, advance_fast, advance_fast_saving, advance_fast_single
from gdn.backends.hopper.scan.operands import ACC_STATE, ACC_TOKENS
from gdn.backends.hopper.scan.scheduler import (
    ITEM_FIELDS,
    START_FROM,
    STORE_TO,
    STRIP,
    next_work,
    split_work,
)
from gdn.backends.hopper.scan.structs import Position


@jit
def run_consumer(WG: gl.constexpr, scan):
    """Run consumer warpgroup WG: advance its 64 value rows of S^T through all work items, and store o.

    `segment_transfer` has no outputs: chunks are whole and no o is stored. S then starts from the identity
    for M (from zero if the segment is empty), from zero for N, or from the caller's state where the work item
    names one. With outputs.S the states that enter the chunks are stored by TMA, keys down: in bf16 for a
    backward, in fp32 for checkpoints.
    """
    i = 0
    turn = 0
    number = next_work(turn, scan.queue)
    while number < scan.geometry.num_items:
        i = scan_item(number, i, WG, scan)
        turn += 1
        number = next_work(turn, scan.queue)
    if scan.outputs.o is not None:
        # shared memory must outlive the last TMA store that reads it
        tma_store_wait(0)


@jit
def scan_item(number, i, WG: gl.constexpr, scan):
    """Scan one work item whose first chunk is chunk i of the CTA; return the chunk count after its last."""
    geometry = scan.geometry
    item, strip = split_work(number, WG, scan.config)
    head = item % geometry.HV
    first_v = strip * STRIP
    row, first, length, chunk = geometry.locate(item)
    S = load_initial_state(item, length, head, first_v, scan)
    end = i + gl.cdiv(length, C)
    # chunk numbers count over all work items of the CTA: first token and tile that chunk 0 would have
    token = row * geometry.T + first - i * C
    tile = (chunk - i) * geometry.HV + head
    position = Position(token=token, tile=tile, head=head, first_v=first_v)
    S, i = scan_chunks(S, i, end, i * C + length, position, WG, scan)
    if scan.outputs.final_ptr is not None:
        store_final_state(S, item, length, head, first_v, scan)
    return i


@jit
def scan_chunks(S, i, end, past, position, WG: gl.constexpr, scan):
    """Advance S through all chunks of a work item; return S and the chunk count after its last.

    `past` is the end of the item's tokens, counted from the CTA's chunk 0.
    """
    # Each run of well-conditioned chunks and of others has its own loop: with both kinds in one loop ptxas
    # runs out of registers and serialises all MMAs.
    if scan.config.FAST_PATH:
        while i < end:
            S, i = scan_fast_chunks(S, i, end, position, WG, scan)
            S, i = scan_general_chunks(S, i, end, past, position, WG, scan)
    else:
        S, i = scan_general_chunks(S, i, end, past, position, WG, scan)
    return S, i


@jit
def scan_fast_chunks(S, i, end, position, WG: gl.constexpr, scan):
    """Advance S through chunks on the fast path until one is not well-conditioned, or the work item ends."""
    while is_next_chunk(True, True, i, end, scan):
        # a lone consumer has more registers (248, not 200), and a version of the fast path that uses them
        if scan.config.FAST_PATH == WITH_A_INV:
            S = advance_fast_saving(S, i, position.advance_by(i, scan.geometry.HV), WG, scan)
        elif scan.config.CONSUMERS == 1:
            S = advance_fast_single(S, i, position.advance_by(i, scan.geometry.HV), scan)
        else:
            S = advance_fast(S, i, position.advance_by(i, scan.geometry.HV), WG, scan)
        i += 1
    return S, i


@jit
def scan_general_chunks(S, i, end, past, position, WG: gl.constexpr, scan):
    """Advance S through chunks on the general path until one is well-conditioned, or the work item ends."""
    while is_next_chunk(False, scan.config.FAST_PATH, i, end, scan):
        S = advance(S, i, past - i * C, position.advance_by(i, scan.geometry.HV), WG, scan)
        i += 1
    return S, i


@jit
def is_next_chunk(IS_FAST: gl.constexpr, FAST_PATH: gl.constexpr, i, end, scan):
    """Return True if chunk i belongs to the work item and, with the fast path on, takes the path IS_FAST."""
    is_next = i < end
    if is_next:
        # from here on the stage's tiles and factors are in shared memory
        stage = scan.pipeline.wait_full(i)
        if FAST_PATH:
            is_next = scan.tiles.is_well_conditioned(stage) == IS_FAST
    return is_next


@jit
def state_pointers(states_ptr, state, first_v, IS_V_FIRST: gl.constexpr, D: gl.constexpr):
    """Return the addresses in HBM of 64 value rows of a state, as a tensor [64, D] with values down."""
    # the layout of the WGMMA accumulator: S moves between HBM and registers without shared memory
    layout: gl.constexpr = ACC_TOKENS if D == C else ACC_STATE
    v = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    k = gl.arange(0, D, gl.SliceLayout(0, layout))
    VALUE: gl.constexpr = D if IS_V_FIRST else 1
    KEY: gl.constexpr = 1 if IS_V_FIRST else D
    states_ptr += state * (D * D) + first_v * VALUE
    return states_ptr + v[:, None] * VALUE + k[None, :] * KEY


@jit
def load_initial_state(item, length, head, first_v, scan):
    """Return S^T before the first chunk of a work item: zero, the identity, or loaded from HBM."""
    geometry = scan.geometry
    initial_ptr = scan.inputs.initial_ptr
    D: gl.constexpr = scan.config.D
    V_FIRST: gl.constexpr = scan.config.V_FIRST
    layout: gl.constexpr = ACC_TOKENS if D == C else ACC_STATE
    if scan.outputs.o is None:
        v = first_v + gl.arange(0, STRIP, gl.SliceLayout(1, layout))
        k = gl.arange(0, D, gl.SliceLayout(0, layout))
        is_map = geometry.is_map(item) & (length > 0)
        S = (v[:, None] == k[None, :]).to(gl.float32) * is_map.to(gl.float32)
        if initial_ptr is not None:
            start = gl.load(geometry.table_ptr + item * ITEM_FIELDS + START_FROM)
            if start >= 0:
                state = start.to(gl.int64) * geometry.HV + head
                S = gl.load(state_pointers(initial_ptr, state, first_v, V_FIRST, D)).to(gl.float32)
    elif initial_ptr is None:
        S = gl.zeros((STRIP, D), gl.float32, layout)
    elif scan.slots is not None:
        # the pool is the caller's: launches before `solve` have completed, so this needs no `gdc_wait`
        n = item // geometry.HV
        slot = gl.load(scan.slots.index_ptr + n * scan.slots.index_n).to(gl.int64)
        is_read = scan.slots.is_slot(slot)
        if scan.slots.has_initial_ptr is not None:
            has_initial = gl.load(scan.slots.has_initial_ptr + n * scan.slots.has_initial_n) != 0
            is_read = is_read & has_initial
        S = gl.zeros((STRIP, D), gl.float32, layout)
        if is_read:
            states_ptr = initial_ptr + scan.slots.offset(slot, head)
            S = gl.load(state_pointers(states_ptr, 0, first_v, V_FIRST, D)).to(gl.float32)
    else:
        state = item.to(gl.int64)
        if scan.config.IN_SEGMENTS:
            # `propagate_states`, the launch before, writes the state that enters a segment to HBM
            gdc_wait()
            start = gl.load(geometry.table_ptr + item * ITEM_FIELDS + START_FROM)
            state = start.to(gl.int64) * geometry.HV + head
        S = gl.load(state_pointers(initial_ptr, state, first_v, V_FIRST, D)).to(gl.float32)
    return S


@jit
def store_final_state(S, item, length, head, first_v, scan):
    """Store S^T after the last chunk of a work item to HBM; M and N are stored keys down.

    A pool gets no state of an empty sequence.
    """
    geometry = scan.geometry
    final_ptr = scan.outputs.final_ptr
    D: gl.constexpr = scan.config.D
    V_FIRST: gl.constexpr = scan.config.V_FIRST
    if scan.config.IN_SEGMENTS:
        # below 0: not stored. Of the scan's segments only a sequence's last one has a final state
        goal = gl.load(geometry.table_ptr + item * ITEM_FIELDS + STORE_TO).to(gl.int64)
        if goal >= 0:
            state = goal * geometry.HV + head
            gl.store(state_pointers(final_ptr, state, first_v, V_FIRST and scan.outputs.o is not None, D), S)
    elif scan.slots is not None:
        n = item // geometry.HV
        slot = gl.load(scan.slots.index_ptr + n * scan.slots.index_n).to(gl.int64)
        is_written = scan.slots.is_slot(slot) & (length > 0)
        if scan.slots.out_index_ptr is not None:
            slot = gl.load(scan.slots.out_index_ptr + n * scan.slots.out_index_n).to(gl.int64)
            is_written = is_written & scan.slots.is_slot(slot)
        if is_written:
            states_ptr = final_ptr + scan.slots.offset(slot, head)
            # each consumer stores the value rows that it has loaded: no other one reads them
            place = state_pointers(states_ptr, 0, first_v, V_FIRST, D)
            gl.store(place, S.to(final_ptr.dtype.element_ty))
    else:
        gl.store(state_pointers(final_ptr, item.to(gl.int64), first_v, V_FIRST, D), S)
