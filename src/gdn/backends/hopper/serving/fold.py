"""Fold a full history into the state of an item, which is in shared memory, and store the state.

    S <- e^(G_P) S + sum_(j < P) e^(G_P - G_j) k_j u_j^T

u with its decays is split into hi + lo of bf16, as `add_outer_product` of `triton.serving` splits it.
"""

# structs and tensors
# mypy: disable-error-code="attr-defined,assignment,misc"
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.gluon import barrier, jit, mbarrier, mma_v2
from gdn.backends.hopper.serving.items import FOLD_DECAY, D
from gdn.backends.triton.lib import split_bf16

COLUMNS = gl.constexpr(64)  # value columns at a time: 64 fp32 registers a lane
# registers: an MMA of four warps that share the columns, which are its rows
TALL = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, TALL.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, TALL.value, 2))
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@jit
def load_columns(half: gl.constexpr, stage, at, still, shared):
    """Return some columns of the state, and u of the history there with its decays as hi and lo."""
    S = shared.S.index(stage).slice(half * COLUMNS, COLUMNS, 0).load(TALL)
    u = shared.u.index(at).slice(half * COLUMNS, COLUMNS, 1).permute((1, 0)).load(LEFT)
    high, low = split_bf16(u.to(gl.float32) * still[None, :], gl.bfloat16)
    return S, high, low


@jit
def add_history(given, k, factor):
    """Return columns of the folded state in fp32."""
    S, high, low = given
    return mma_v2(high, k, mma_v2(low, k, S.to(gl.float32) * factor))


@jit
def fold(state_ptr, stage, at, shared, config):
    """Fold and store the state of an item, and release its stage."""
    still = shared.still.index(stage).load(gl.SliceLayout(0, LEFT))
    factor = shared.float_field(stage, FOLD_DECAY)
    k = shared.k.index(at).load(RIGHT)
    element: gl.constexpr = state_ptr.dtype.element_ty
    PARTS: gl.constexpr = D // COLUMNS
    if config.SIZE == 4:
        # all of the state in registers: the next one is copied into the stage while this one is folded. Four
        # lanes store whole sectors of 32 bytes
        parts = ()
        for half in gl.static_range(PARTS):
            parts = parts + (load_columns(half, stage, at, still, shared),)
        barrier()
        mbarrier.arrive(shared.empty.index(stage), count=1)
        column = gl.arange(0, COLUMNS, gl.SliceLayout(1, TALL))[:, None]
        key = gl.arange(0, D, gl.SliceLayout(0, TALL))[None, :]
        for half in gl.static_range(PARTS):
            S = add_history(parts[half], k, factor)
            gl.store(state_ptr + ((half * COLUMNS + column) * D + key), S)
    else:
        # 16 bits: through shared memory, so that lanes store 16 bytes and not 4
        # all warps have read the state
        barrier()
        for half in gl.static_range(PARTS):
            S = add_history(load_columns(half, stage, at, still, shared), k, factor)
            shared.S.index(stage).slice(half * COLUMNS, COLUMNS, 0).store(S.to(element))
        barrier()
        column = gl.arange(0, D, gl.SliceLayout(1, LINES))[:, None]
        key = gl.arange(0, D, gl.SliceLayout(0, LINES))[None, :]
        gl.store(state_ptr + (column * D + key), shared.S.index(stage).load(LINES))
        barrier()
        mbarrier.arrive(shared.empty.index(stage), count=1)
