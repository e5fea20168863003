"""Compute dq, dk and the terms of the gates' gradients of all chunks in parallel, from S, dS and dv.

    dq = scale e^G do S^T + E k;   dk = w dS^T - e^G dv S^T + E^T q + (F + F^T) k

`values` and `rows` have the formulas of the two warpgroups. The value heads of a key head are added up in
registers, in order: neither dq nor dk of a value head leaves the SM, and there are no atomics. `d` is dv as
the reverse state scan stores it, or dr = dv / beta as Triton's does (GIVEN_DR); dv is then stored over it.

HBM bytes per token and value head at K = V = 128 in bf16, HV = 2 H: q, k, dq, dk 512, v, do, dv 768, S and dS
1024, A_inv 128, factors 32, gate terms 20: 2484; 256 more with GIVEN_DR. MMAs of 64 x 64 x 128: 22 per tile.
At K = V = 64: q, k, dq, dk 256, v, do, dv 384, S in fp32 and A_inv 512, dS 128, factors 32, gate terms 20:
1332. MMAs of 64 x 64 x 64: 22 per tile.
"""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.backward.factors import ROWS
from gdn.backends.hopper.backward.load import load_items
from gdn.backends.hopper.backward.rows import compute_rows
from gdn.backends.hopper.backward.shared import Inputs, Outputs, Problem, Tiles, Turns, Work
from gdn.backends.hopper.backward.values import compute_values
from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import fence_async_shared, kernel, mbarrier, recast
from gdn.backends.hopper.scan.operands import BF16_TILE
from gdn.backends.hopper.scan.scheduler import STRIP


@kernel
def gradients_kernel(
    q_d, k_d, v_d, do_d, d_d, S_d, dS_d, A_inv_d, factors_d, dq_d, dk_d,
    table_ptr, slab_ptr, dq_ptr, dk_ptr, dv_ptr, shares_ptr, T, HV, ratio, chunks_per_row, items,
    NORM: gl.constexpr, GIVEN_DR: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    # One CTA: dq, dk and gate terms of items (chunk, key head) b, b + grid, ...
    # Grid: min(items, SMs), persistent, 1 CTA an SM.
    # Warps: 4 for values (v_new, E, F), 4 for rows (dq, dk), 1 producer.
    # Shared memory: two stages of strips (64 columns of S, dS, v, do, dv), of heads (factors) and of k;
    # one A_inv and q; split operands; w, E and F from the value to the row warpgroup.
    # K = V = 64: the row warpgroup splits S in shared memory (S_full, 1 arrival), the value warpgroup A_inv,
    # which it alone reads: fp32 in registers, split bf16 in shared memory.
    # mbarriers: full, head_full, A_full, k_full, q_full, 1 arrival by the producer and its TMA bytes; empty,
    # head_empty, k_empty, q_empty, 2, by both warpgroups; A_empty, w_full, pairs_full, 1, by the value
    # warpgroup; w_empty, pairs_empty, 1, by the row warpgroup.
    STAGES: gl.constexpr = 2
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    boxes = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, C], factors_d.layout)
    tiles = Tiles(
        q=gl.allocate_shared_memory(gl.bfloat16, [1, 1, C, 1, D], q_d.layout),
        k=gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, C, 1, D], q_d.layout),
        v=gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, C, 1, STRIP], q_d.layout),
        do=gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, C, 1, STRIP], q_d.layout),
        d=gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, C, 1, STRIP], q_d.layout),
        S=gl.allocate_shared_memory(S_d.dtype, [STAGES, D, STRIP], S_d.layout),
        dS=gl.allocate_shared_memory(gl.bfloat16, [STAGES, D, STRIP], BF16_TILE),
        A_inv=gl.allocate_shared_memory(A_inv_d.dtype, [1, A_inv_d.block_type.shape[0], C], A_inv_d.layout),
        boxes=boxes,
        factors=recast(boxes, gl.float32, [STAGES * ROWS, 1, C], factors_d.layout),
        hi=gl.allocate_shared_memory(gl.bfloat16, [1, C, STRIP], BF16_TILE),
        lo=gl.allocate_shared_memory(gl.bfloat16, [1, C, STRIP], BF16_TILE),
        w=gl.allocate_shared_memory(gl.bfloat16, [2, C, STRIP], BF16_TILE),
        E=gl.allocate_shared_memory(gl.bfloat16, [1, C, C], BF16_TILE),
        F=gl.allocate_shared_memory(gl.bfloat16, [1, C, C], BF16_TILE),
        entering=gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    S_full = None
    if D == STRIP:
        S_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        for i in gl.static_range(STAGES):
            mbarrier.init(S_full.index(i), count=1)
    turns = Turns(
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        S_full=S_full,
        head_full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        head_empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        A_full=gl.allocate_shared_memory(gl.int64, [1, 1], barrier),
        A_empty=gl.allocate_shared_memory(gl.int64, [1, 1], barrier),
        k_full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        k_empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        q_full=gl.allocate_shared_memory(gl.int64, [1, 1], barrier),
        q_empty=gl.allocate_shared_memory(gl.int64, [1, 1], barrier),
        w_full=gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        w_empty=gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        pairs_full=gl.allocate_shared_memory(gl.int64, [1, 1], barrier),
        pairs_empty=gl.allocate_shared_memory(gl.int64, [1, 1], barrier),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(turns.full.index(i), count=1)
        mbarrier.init(turns.empty.index(i), count=2)
        mbarrier.init(turns.head_full.index(i), count=1)
        mbarrier.init(turns.head_empty.index(i), count=2)
        mbarrier.init(turns.k_full.index(i), count=1)
        mbarrier.init(turns.k_empty.index(i), count=2)
        mbarrier.init(turns.w_full.index(i), count=1)
        mbarrier.init(turns.w_empty.index(i), count=1)
    mbarrier.init(turns.A_full.index(0), count=1)
    mbarrier.init(turns.A_empty.index(0), count=1)
    mbarrier.init(turns.q_full.index(0), count=1)
    mbarrier.init(turns.q_empty.index(0), count=2)
    mbarrier.init(turns.pairs_full.index(0), count=1)
    mbarrier.init(turns.pairs_empty.index(0), count=1)
    # mbarriers are initialised in the generic proxy; TMA arrives on them in the async proxy
    fence_async_shared()
    inputs = Inputs(q_d, k_d, v_d, do_d, d_d, S_d, dS_d, A_inv_d, factors_d)
    out = Outputs(dq_d, dk_d, dq_ptr, dk_ptr, dv_ptr, shares_ptr)
    problem = Problem(table_ptr, slab_ptr, T, HV, ratio, chunks_per_row, items)
    w = Work(inputs, out, tiles, turns, problem, NORM, GIVEN_DR, D)
    # registers of the value warpgroup: what 240 and 24 leave of 168 x 3 for a lane of each warpgroup
    gl.warp_specialize([(compute_values, (w,)), (compute_rows, (w,)), (load_items, (w,))], [4, 1], [240, 24])
