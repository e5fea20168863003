"""Run the producer warp of the gradient kernel: issue the TMA loads of strips, heads and items."""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.backward.factors import ROWS
from gdn.backends.hopper.backward.shared import place_of, split_rows, wait_empty
from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import jit, mbarrier, opaque, tma_load
from gdn.backends.hopper.scan.scheduler import STRIP


@jit
def load_items(w):
    """Load the chunks of all items of this CTA, as far ahead as stages are empty.

    q of an item is loaded after its first head: it waits until the item before is done, and k and the strips
    need not. Loads are issued in the order in which shared memory becomes free.
    """
    item_count = 0
    head_count = 0
    for item in range(gl.program_id(0), w.problem.items, gl.num_programs(0)):
        place = place_of(item, w.problem)
        if w.problem.slab_ptr is not None:
            place = split_rows(place, w.problem)
        if place.length > 0:
            for j in range(w.problem.ratio):
                if j == 0:
                    load_tokens(w, place, item_count, w.inputs.k, w.tiles.k, w.turns.k_full, w.turns.k_empty)
                load_head(w, place, j, head_count)
                if j == 0:
                    load_tokens(w, place, item_count, w.inputs.q, w.tiles.q, w.turns.q_full, w.turns.q_empty)
                head_count += 1
            item_count += 1


@jit
def load_head(w, place, j, count):
    """Load the factors of one value head, its strips, and A_inv after the first strip."""
    head = place.key_head * w.problem.ratio + j
    tile = place.chunk * w.problem.HV + head
    stage = wait_empty(count, w.turns.head_empty)
    ready = w.turns.head_full.index(stage)
    mbarrier.expect(ready, w.inputs.factors.block_type.nbytes)
    tma_load(w.inputs.factors, [tile * ROWS, 0], ready, w.tiles.boxes.index(stage))
    STRIPS: gl.constexpr = w.D // STRIP
    for strip in range(STRIPS):
        load_strip(w, place, head, tile, strip, count * STRIPS + strip)
        if strip == 0:
            stage = wait_empty(count, w.turns.A_empty)
            ready = w.turns.A_full.index(stage)
            mbarrier.expect(ready, w.inputs.A_inv.block_type.nbytes)
            row = tile * C
            if w.inputs.A_inv.block_type.shape[0] > C:
                # split bf16; opaque: else the producer's 24 registers would hold this row beside `tile * C`
                row = opaque(row) * 2
            tma_load(w.inputs.A_inv, [row, 0], ready, w.tiles.A_inv.index(stage))


@jit
def load_strip(w, place, head, tile, strip, count):
    """Load 64 value columns of S, dS, v, do and dv (or dr)."""
    x = w.inputs
    stage = wait_empty(count, w.turns.empty)
    ready = w.turns.full.index(stage)
    BYTES: gl.constexpr = x.S.block_type.nbytes + x.dS.block_type.nbytes + 3 * x.v.block_type.nbytes
    mbarrier.expect(ready, BYTES)
    corner = [place.row, place.first, head, strip * STRIP]
    tma_load(x.S, [tile * w.D, strip * STRIP], ready, w.tiles.S.index(stage))
    tma_load(x.v, corner, ready, w.tiles.v.index(stage))
    slot = place.slot * w.problem.HV + head
    tma_load(x.dS, [slot * w.D, strip * STRIP], ready, w.tiles.dS.index(stage))
    tma_load(x.d, corner, ready, w.tiles.d.index(stage))
    tma_load(x.do, corner, ready, w.tiles.do.index(stage))


@jit
def load_tokens(w, place, count, x_d, tiles, full, empty):
    """Load q or k of an item, 64 keys at a time."""
    stage = wait_empty(count, empty)
    ready = full.index(stage)
    mbarrier.expect(ready, (w.D // STRIP) * x_d.block_type.nbytes)
    for i in gl.static_range(w.D // STRIP):
        corner = [place.row, place.first, place.key_head, i * STRIP]
        tma_load(x_d, corner, ready, tiles.index(stage).slice(i * STRIP, STRIP, 3))
