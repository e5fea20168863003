"""Define what the partitions of the gradient kernel share: structs, barriers' order, rows of factors.

A CTA takes items (chunk, key head) b, b + grid, ...; an item has `ratio` value heads, a head two strips of
64 value columns, or one at K = V = 64. Each partition counts them by itself, as items are known without a
scheduler.
"""

from typing import Any

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.backward.factors import BETA, ROWS
from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import barrier, jit, mbarrier, recast, struct, warpgroup_mma
from gdn.backends.hopper.scan.operands import BF16_TILE, PER_ROW, TOKEN_ROWS
from gdn.backends.hopper.scan.scheduler import STRIP, stage_and_phase

# below this beta the state scan stores dr = dv / beta in the place of dv, which bf16 would not hold
TINY = gl.constexpr(2.0**-100)


@struct
class Inputs:
    """Hold the TMA descriptors of what the gradient kernel loads."""

    q: Any
    k: Any
    v: Any
    do: Any
    d: Any  # dv, or dr
    S: Any
    dS: Any
    A_inv: Any
    factors: Any


@struct
class Outputs:
    """Hold the TMA descriptors and pointers of what the gradient kernel stores."""

    dq_d: Any
    dk_d: Any
    dq_ptr: Any
    dk_ptr: Any
    dv_ptr: Any
    shares_ptr: Any


@struct
class Tiles:
    """Hold the shared memory of a CTA: two stages of strips, of heads and of k, one of A_inv and q."""

    q: Any
    k: Any
    v: Any
    do: Any
    d: Any
    S: Any  # at K = 64 in fp32, which the row warpgroup splits in its place
    dS: Any
    A_inv: Any  # at K = 64 in fp32 or split bf16, which the value warpgroup splits
    boxes: Any  # factors, as one TMA load writes them
    factors: Any  # the same, row by row
    # Two stores to one allocation would have a barrier between them: Triton does not compare their indices
    hi: Any  # the value warpgroup's own: u in bf16, then hi of v_new, then rows of fp32: see `sum_columns`
    lo: Any  # of v_new
    w: Any  # OUT v_new, from the value to the row warpgroup
    E: Any  # of a head, from the value to the row warpgroup; later dq and dk for TMA, half in E, half in F
    F: Any
    entering: Any  # gate terms of a head, from the value to the row warpgroup


@struct
class Turns:
    """Hold the mbarriers, by the shared memory that they protect."""

    full: Any  # a strip
    empty: Any
    S_full: Any  # S of a strip in bf16, from the row to the value warpgroup; None but at K = 64
    head_full: Any
    head_empty: Any
    A_full: Any  # A_inv of a head, one buffer
    A_empty: Any
    k_full: Any  # k of an item, two buffers: the value warpgroup begins an item before the last one ends
    k_empty: Any
    q_full: Any
    q_empty: Any
    w_full: Any
    w_empty: Any
    pairs_full: Any
    pairs_empty: Any


@struct
class Problem:
    """Hold the numbers of a problem that a partition needs."""

    table_ptr: Any
    slab_ptr: Any  # the chunks of a pass, or None
    T: Any
    HV: Any
    ratio: Any
    chunks_per_row: Any
    items: Any


@struct
class Work:
    """Hold everything that a partition of the gradient kernel gets."""

    inputs: Inputs
    out: Outputs
    tiles: Tiles
    turns: Turns
    problem: Problem
    NORM: Any  # l2norm in the kernel
    GIVEN_DR: Any  # `d` is dr everywhere
    D: Any


@struct
class Sums:
    """Hold what the value warpgroup adds up over the strips of a head, in registers."""

    E: Any  # <do_i, v_new_j>
    F: Any  # <d_i, v_new_j>
    whole: Any  # <d, v_new>
    apart: Any  # <d, X>
    entering: Any
    leaving: Any
    small: Any  # of a head: see `smallness`


@struct
class Place:
    """Hold where an item lies: row, first token in it, tokens of its sequence, chunk, slot, key head."""

    row: Any
    first: Any
    length: Any  # below 0: tokens of no sequence; 0: nothing
    chunk: Any
    slot: Any  # of its dS in HBM: the chunk itself, but in a pass
    key_head: Any


@jit
def place_of(item, problem):
    """Return the place of an item: see `triton.chunks.locate`."""
    num_heads = problem.HV // problem.ratio
    chunk = item // num_heads
    key_head = item % num_heads
    if problem.slab_ptr is not None:
        # `plan_slabs` has written first token, length, chunk and slot to HBM
        entry = problem.slab_ptr + 4 * chunk
        first, length = gl.load(entry), gl.load(entry + 1)
        return Place(chunk * 0, first, length, gl.load(entry + 2), gl.load(entry + 3), key_head)
    elif problem.table_ptr is None:
        first = chunk % problem.chunks_per_row * C
        length = gl.minimum(problem.T - first, C)
        return Place(chunk // problem.chunks_per_row, first, length, chunk, chunk, key_head)
    else:
        entry = problem.table_ptr + 2 * chunk
        return Place(chunk * 0, gl.load(entry), gl.load(entry + 1), chunk, chunk, key_head)


@jit
def split_rows(place, problem):
    """Return a place with its row and the first token in it, as TMA needs them.

    A place of a pass counts tokens over all rows, so that the warpgroups hold a register less.
    """
    row = place.first // problem.T
    first = place.first - row * problem.T
    return Place(row, first, place.length, place.chunk, place.slot, place.key_head)


@jit
def zero_of(count):
    """Return 0, which the compiler does not know, from a counter.

    Of shared memory that has one buffer the compiler would make all WGMMA descriptors before the loops, two
    registers for each 16 columns, and hold or spill them. Indexed by this they are made where they are used.
    """
    return count >> 30


@jit
def wait_full(i, barriers):
    """Wait until the stage of i is filled, and return the stage."""
    stage, phase = stage_and_phase(i, barriers)
    mbarrier.wait(barriers.index(stage), phase)
    return stage


@jit
def wait_empty(i, barriers):
    """Wait until the stage of i has been released, and return the stage; the first pass does not block."""
    stage, phase = stage_and_phase(i, barriers)
    mbarrier.wait(barriers.index(stage), phase ^ 1)
    return stage


@jit
def arrive(i, barriers):
    """Arrive once at the barrier of i's stage."""
    stage, _ = stage_and_phase(i, barriers)
    mbarrier.arrive(barriers.index(stage), count=1)


@jit
def factor(tiles, stage, ROW: gl.constexpr, layout: gl.constexpr):
    """Load one row of a head's factors [C] from shared memory."""
    return tiles.factors.index(ROWS * stage + ROW).reshape([C]).load(layout)


@jit
def gains(tiles, stage, GIVEN_DR: gl.constexpr):
    """Return beta, and by what `d` is multiplied for dv and for dr."""
    beta = factor(tiles, stage, BETA, PER_ROW)
    if GIVEN_DR:
        return beta, beta, beta * 0.0 + 1.0
    else:
        is_dr = gl.abs(beta) < TINY
        return beta, gl.where(is_dr, beta, 1.0), 1.0 / gl.where(is_dr, 1.0, beta)


@jit
def split_bf16(x):
    """Split fp32 x into hi + lo in bf16. hi is rounded, so that it may be used alone."""
    # rounded by integers: ptxas would convert a rounded value back to fp32 with F2F, eight cycles a warp
    hi = ((x.to(gl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000).to(gl.float32, bitcast=True)
    return hi.to(gl.bfloat16), (x - hi).to(gl.bfloat16)


@jit
def parts_of(tile):
    """Return the shared memory of a tile as hi and lo in bf16: see `split_tile`."""
    return recast(tile, gl.bfloat16, [2, C, STRIP], BF16_TILE)


@jit
def split_tile(tile):
    """Overwrite a tile [64, 64] in shared memory by its hi and lo; return its values in registers.

    The tile is in fp32, or split bf16 over [128, 64] as `solve` stores A_inv. There lo is rounded, too, and
    may become half of hi's last digit: `split_bf16` of such a sum has another hi. As both forms of a matrix
    are split here, gradients do not depend on the form.
    """
    parts = parts_of(tile)
    if tile.dtype == gl.float32:
        x = tile.load(TOKEN_ROWS)
        # all warps have read what hi and lo overwrite
        barrier()
    else:
        # no barrier: a thread overwrites what it has read itself
        x = parts.index(0).load(TOKEN_ROWS).to(gl.float32) + parts.index(1).load(TOKEN_ROWS).to(gl.float32)
    hi, lo = split_bf16(x)
    parts.index(0).store(hi)
    parts.index(1).store(lo)
    return x


@jit
def issue_state_mma(x, w, stage, zeros):
    """Issue x S [C, 64 values] as asynchronous MMAs, x [C, K] in shared memory; at K = 64 S is split bf16."""
    S = w.tiles.S.index(stage)
    if w.D == STRIP:
        acc = warpgroup_mma(x, parts_of(S).index(0), zeros, use_acc=False, is_async=True)
        return warpgroup_mma(x, parts_of(S).index(1), acc, is_async=True)
    else:
        return warpgroup_mma(x, S, zeros, use_acc=False, is_async=True)
