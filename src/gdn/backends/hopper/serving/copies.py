"""Copy the token, the history and the state of each item into shared memory, by cp.async.

Per item, in bytes: q and k 8 times each from L1, u and k of the history's places in use 256 each, the state.
What is masked becomes zero in shared memory.
"""

# structs and tensors
# mypy: disable-error-code="attr-defined"
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.gluon import cp_async, cp_async_arrive, cp_async_commit, cp_async_wait, jit
from gdn.backends.hopper.scan.scheduler import stage_and_phase
from gdn.backends.hopper.serving.items import (
    COPIERS,
    HALF,
    PLACES,
    RING,
    ROWS,
    UNIT,
    D,
    count_items,
    load_item,
    load_slot,
    places_of,
    ring_place,
)
from gdn.backends.triton.serving.recurrent_lib import divide

# registers: 16 bytes of a row of 128 keys or columns of 16 bits to a lane
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [2, 1], [1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([2], [32], [2], [0]))


@jit
def run_copies(tensors, sizes, shared, config):
    """Keep the next state, and the token and history after it, on their way from HBM."""
    step = gl.num_programs(0)
    first = gl.program_id(0)
    now = load_item(first, load_slot(first, tensors, sizes), tensors, sizes)
    then = load_item(first + step, load_slot(first + step, tensors, sizes), tensors, sizes)
    slot = load_slot(first + 2 * step, tensors, sizes)
    copy_token(now, 0, tensors, sizes, shared)
    for turn in range(count_items(sizes)):
        shared.wait_until_empty(turn)
        copy_state(now, turn, tensors, shared, config)
        # its place was read with the stage of two items before
        copy_token(then, turn + 1, tensors, sizes, shared)
        # slots and cursors are loaded one and two items earlier than they are needed
        later = load_item(then.number + step, slot, tensors, sizes)
        slot = load_slot(then.number + 2 * step, tensors, sizes)
        now, then = then, later
    # no copy may be under way when a CTA exits
    cp_async_commit()
    cp_async_wait(0)


@jit
def copy_token(item, turn, tensors, sizes, shared):
    """Copy q, k and v of an item's token, and k and u of its history."""
    at = turn % RING
    first, used = places_of(item, sizes)
    key_head = divide(item.head, sizes.ratio_magic, sizes.ratio_shift)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    element = gl.arange(0, D, gl.SliceLayout(0, LINES))
    zero = (row * 0)[:, None] + element[None, :]
    q_at = tensors.q.at(item.row, key_head, UNIT) + zero
    k_at = tensors.k.at(item.row, key_head, UNIT) + zero
    is_token = gl.full([ROWS, D], True, gl.int1, LINES) & item.has_slot
    x_at = gl.where((row < HALF)[:, None], q_at, k_at)
    cp_async(shared.x.index(at), x_at, mask=is_token)
    place = gl.arange(0, PLACES, gl.SliceLayout(1, LINES))
    is_used = is_token & (place < used)[:, None]
    place = ring_place(place, first, sizes)
    u_at = places_at(tensors.u, item.slot, item.head, place, element)
    past_at = places_at(tensors.past_k, item.slot, key_head, place, element)
    cp_async(shared.u.index(at), u_at, mask=is_used)
    cp_async(shared.k.index(at), past_at, mask=is_used)
    column = gl.arange(0, D, LINE)
    v_at = tensors.v.at(item.row, item.head, UNIT) + column
    cp_async(shared.v.index(at), v_at, mask=(column < D) & item.has_slot)
    cp_async_arrive(shared.arrived.index(at), increment_count=False)


@jit
def places_at(past, slot, head, place, element):
    """Return pointers to the places [places, elements] of a slot and head; a slot's offsets have 32 bits."""
    places = (place * (past.place * UNIT).to(gl.int32))[:, None]
    return past.at(slot, head, UNIT) + (places + element[None, :])


@jit
def copy_state(item, turn, tensors, shared, config):
    """Copy an item's state [V, K]."""
    SIZE: gl.constexpr = config.SIZE
    LANES: gl.constexpr = D * SIZE // 16  # of a row
    TILE: gl.constexpr = gl.BlockedLayout([1, 16 // SIZE], [32 // LANES, LANES], [COPIERS, 1], [1, 0])
    stage, _ = stage_and_phase(turn, shared.full)
    column = gl.arange(0, D, gl.SliceLayout(1, TILE))
    key = gl.arange(0, D, gl.SliceLayout(0, TILE))
    S_at = tensors.state.at(item.slot, item.head, UNIT) + (column[:, None] * D + key[None, :])
    has_state = gl.full([D, D], True, gl.int1, TILE) & item.has_slot
    cp_async(shared.S.index(stage), S_at, mask=has_state)
    cp_async_arrive(shared.full.index(stage), increment_count=False)
