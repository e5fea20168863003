"""Compute o and u of each item from its state, and fold its history where it is full.

[y_q; y_k] = e^G X S + scores u_j;   r = beta (v - y_k);   o = y_q + <q, k> r;   u = r / |k|
"""

# structs and tensors
# mypy: disable-error-code="attr-defined"
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.gluon import barrier, jit, mbarrier, mma_v2
from gdn.backends.hopper.scan.scheduler import stage_and_phase
from gdn.backends.hopper.serving.fold import fold
from gdn.backends.hopper.serving.items import (
    BETA,
    HALF,
    HEAD,
    IS_FULL,
    IS_ROW,
    K_FACTOR,
    K_RATE,
    PLACE,
    Q_FACTOR,
    RING,
    ROW,
    ROWS,
    SCORE,
    SLOT,
    UNIT,
    D,
    count_items,
)

# registers: an MMA of four warps that share the columns
WIDE = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, WIDE.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, WIDE.value, 2))


@jit
def split_rows(x):
    """Return the rows of q [8, D] and those of k, in the registers of the same lanes."""
    return gl.split(gl.permute(gl.reshape(x, [2, HALF, D]), (1, 2, 0)))


@jit
def multiply_state(x, S, config):
    """Return x S. An fp32 state is multiplied in tf32, and then x, which is exact, too."""
    zeros = gl.zeros([ROWS, D], gl.float32, WIDE)
    if config.SIZE == 4:
        return mma_v2(x.to(gl.float32), S, zeros, input_precision="tf32")
    else:
        return mma_v2(x, S, zeros)


@jit
def run_outputs(tensors, sizes, shared, config):
    """Compute the outputs of all items of the CTA."""
    for turn in range(count_items(sizes)):
        stage, phase = stage_and_phase(turn, shared.ready)
        at = turn % RING
        mbarrier.wait(shared.ready.index(stage), phase)
        row, head = shared.int_field(stage, ROW), shared.int_field(stage, HEAD)
        slot, place = shared.int_field(stage, SLOT).to(gl.int64), shared.int_field(stage, PLACE)
        is_row, is_full = shared.int_field(stage, IS_ROW) != 0, shared.int_field(stage, IS_FULL) != 0
        s_high, s_low = (
            shared.scores.index(2 * stage).load(LEFT),
            shared.scores.index(2 * stage + 1).load(LEFT),
        )
        u_past, x = shared.u.index(at).load(RIGHT), shared.x.index(at).load(LEFT)
        v = shared.v.index(at).load(gl.SliceLayout(0, WIDE)).to(gl.float32)
        is_q = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE)) < HALF
        factors = gl.where(is_q, shared.float_field(stage, Q_FACTOR), shared.float_field(stage, K_FACTOR))
        mbarrier.wait(shared.full.index(stage), phase)
        S = shared.S.index(stage).permute((1, 0)).load(RIGHT)
        y = multiply_state(x, S, config) * factors[:, None]
        # small terms first
        y = mma_v2(s_high, u_past, mma_v2(s_low, u_past, y))
        y_q, y_k = split_rows(y)
        _, v = split_rows(gl.broadcast(v[None, :], y)[0])
        r = shared.float_field(stage, BETA) * (v - y_k)
        o = gl.where(is_row, y_q + shared.float_field(stage, SCORE) * r, 0.0)
        u = r * shared.float_field(stage, K_RATE)
        # all eight rows are equal: lanes of the first one store
        TILE: gl.constexpr = o.type.layout
        column = (gl.arange(0, HALF, gl.SliceLayout(1, TILE)) * 0)[:, None]
        column += gl.arange(0, D, gl.SliceLayout(0, TILE))[None, :]
        stores = (gl.arange(0, HALF, gl.SliceLayout(1, TILE)) == 0)[:, None] & (column < D)
        gl.store(tensors.o.at(row, head, UNIT) + column, o.to(tensors.o.ptr.dtype.element_ty), mask=stores)
        past = tensors.u
        u_at = past.ptr + (slot * past.slot + head * past.head + place * past.place) * UNIT + column
        gl.store(u_at, u.to(past.ptr.dtype.element_ty), mask=stores & is_row)
        if is_full:
            fold(tensors.state.at(slot, head, UNIT), stage, at, shared, config)
        else:
            barrier()
            mbarrier.arrive(shared.empty.index(stage), count=1)
