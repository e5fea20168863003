"""Compute A_inv and the factors of each chunk and value head.

    A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j;     A_inv = (I + A)^-1, stored as A_inv - 1
    well-conditioned chunk, if FAST_PATH is WITH_B: B_ij = e^(G_C - G_i) A_inv_ij beta_j; see `scan.chunk`

The kernel also zeroes the outputs of tokens that belong to no sequence, and the scan's work-item counter.

It is persistent, and a CTA is one warp that takes tile after tile. k arrives by TMA in halves of 64 keys: the
first half while the tile before is inverted, the second while the first is multiplied with itself.
The second half lies in the shared memory of A_inv, which leaves by TMA at the end. With l2norm the
raw q and k are multiplied, and the diagonals of q q^T and k k^T hold the squares of their norms. The diagonal
of A_inv - 1 holds what rounding took from the row's sum: see `triton.rule.prepare`.

HBM bytes per token and value head at K = V = 128 in bf16, HV = H: k 256, gates 6 (or 8 as `gates` stores
them), A_inv 80, factors 8 of a well-conditioned chunk, else 24: 352 or 368; l2norm adds 256, a backward 40.
"""

# `tile` is a tensor, not an int
# mypy: disable-error-code="attr-defined"
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import BETA, BOX_ROWS, LOG2_K, LOG2_Q, NUM_ROWS, WITH_B, C
from gdn.backends.hopper.gluon import (
    barrier,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    join_descriptors,
    kernel,
    mbarrier,
    recast,
    tma_load,
    tma_store,
    tma_store_wait,
)
from gdn.backends.hopper.solve.coupling import compute_L
from gdn.backends.hopper.solve.decays import (
    TOKEN_PAIRS,
    SharedFactors,
    compute_betas,
    compute_decays,
    load_gate,
    store_factors,
    store_first_box,
)
from gdn.backends.hopper.solve.gram import add_gram_blocks, store_rstd, zero_blocks
from gdn.backends.hopper.solve.inverse import BLOCKS, invert
from gdn.backends.hopper.solve.results import store_A_inv, store_B, store_flag, store_zeros
from gdn.backends.hopper.solve.tiles import Grid, zero_outputs

# shared memory: tiles of 128 bytes a row, swizzled as TMA writes them (what `mma` loads from), and plain rows
SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
UNSWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@kernel
def solve_kernel(
    A0_d, A1_d, A2_d, A3_d, q_d, k_d, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, table_ptr, factors_ptr,
    q_rstd_ptr, k_rstd_ptr, o_ptr, next_ptr,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, T, HV, ratio, chunks_per_row, scale, count, total_at,
    HAS_DECAYS: gl.constexpr, SIGMOID: gl.constexpr, NEGATIVE: gl.constexpr, RESET: gl.constexpr,
    NORM: gl.constexpr, FAST_PATH: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    # One CTA: tiles (chunk, value head) b, b + grid, ...: A_inv (or B) and the factors of each.
    # Grid: min(tiles, 12 CTAs an SM), 8 at K = 64, persistent.  Warps: 1, which produces and consumes. Of
    # packed sequences the host knows a bound of tiles alone: the table in HBM has their number at total_at.
    # Shared memory: 8 KiB for the first 64 keys; 8 KiB for the second, later A_inv (16 KiB at K = 64, where
    # A_inv is split bf16); the first box of factors; the row factor of A.
    # mbarriers: ready[0], ready[1], 1 arrival each and TMA bytes, for the halves of k (l2norm: q, then k).
    # A tile: k k^T by `mma` from shared memory to registers; A from it and the factors; A_inv in registers;
    # A_inv to shared memory, and to HBM by TMA stores.
    gl.static_assert(D == 2 * C or not FAST_PATH)
    # A_inv is split bf16 at 64 keys
    PARTS: gl.constexpr = 2 * C // D
    HALVES: gl.constexpr = D // C
    one_s = gl.allocate_shared_memory(gl.bfloat16, [1, C, 1, C], k_d.layout)
    A_d = join_descriptors(A0_d, A1_d, A2_d, A3_d)
    STORES: gl.constexpr = len(A_d)
    A_s = gl.allocate_shared_memory(gl.bfloat16, [STORES * PARTS, 1, C // STORES, C], A0_d.layout)
    box_s = gl.allocate_shared_memory(gl.float32, [BOX_ROWS, 1, C], UNSWIZZLED)
    two_s = recast(A_s, gl.bfloat16, [PARTS, 1, C, 1, C], k_d.layout).index(0)
    x_one = recast(one_s, gl.bfloat16, [C, C], SWIZZLED)
    tiles = recast(A_s, gl.bfloat16, [PARTS * C, C], SWIZZLED)
    x_two = tiles.slice(0, C, 0)
    a_factor_s = gl.allocate_shared_memory(gl.float32, [1, 1, C], UNSWIZZLED)
    shared = SharedFactors(box=box_s, a_factor=a_factor_s)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=1)
    fence_async_shared()
    SIZE: gl.constexpr = C * C * 2
    grid = Grid(table_ptr=table_ptr, T=T, HV=HV, ratio=ratio, chunks_per_row=chunks_per_row)
    at = grid.locate(gl.program_id(0))
    step = grid.locate(gl.num_programs(0))
    # Without `gates` the launch before may be `table`, whose entries are read next. With it, `table` has
    # completed, and k is the caller's: the first TMA load starts while `gates` still runs.
    if not HAS_DECAYS:
        gdc_wait()
    first, length = at.tokens(grid)
    count = grid.count_used(count, total_at)
    # no TMA load may be in flight when a CTA without a tile exits
    if gl.program_id(0) < count:
        mbarrier.expect(ready.index(0), SIZE)
        tma_load(q_d if NORM else k_d, [at.row, first, at.key, 0], ready.index(0), one_s)
    if HAS_DECAYS:
        gdc_wait()
    gdc_launch_dependents()
    # the scan's work-item counter in HBM; no CTA of the scan reads it before this kernel has completed
    if gl.program_id(0) == 0:
        gl.store(next_ptr, 0)
    phase = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        row, key, value = at.row, at.key, at.value
        token = first
        tokens = length
        head = key * ratio + value
        place = row.to(gl.int64) * T + token
        factors = factors_ptr + tile.to(gl.int64) * (NUM_ROWS * C)
        # the second half goes where the previous A_inv was, once its TMA store has read the shared memory
        tma_store_wait(0)
        if HALVES == 2:
            mbarrier.expect(ready.index(1), SIZE)
            tma_load(q_d if NORM else k_d, [row, token, key, C], ready.index(1), two_s)
        lane = gl.arange(0, C, TOKEN_PAIRS)
        if HAS_DECAYS:
            decay = gl.load(factors + LOG2_K * C + lane)
            beta = gl.load(factors + BETA * C + lane)
        else:
            decay = load_gate(g_ptr, row, token, tokens, head, g_b, g_t, g_h)
            beta = load_gate(beta_ptr, row, token, tokens, head, beta_b, beta_t, beta_h)
        if o_ptr is not None and tokens < 0:
            zero_outputs(o_ptr, place * HV + head, -tokens, HV, D)
        if NORM:
            # each barrier completes twice a tile, for q and for k: phases 0 and 1, whatever the tile
            mbarrier.wait(ready.index(0), 0)
            qq = add_gram_blocks(x_one, tokens, zero_blocks(BLOCKS), True)
            fence_async_shared()
            barrier()
            mbarrier.expect(ready.index(0), SIZE)
            tma_load(k_d, [row, token, key, 0], ready.index(0), one_s)
            if HALVES == 2:
                mbarrier.wait(ready.index(1), 0)
                qq = add_gram_blocks(x_two, tokens, qq, True)
                fence_async_shared()
                barrier()
                mbarrier.expect(ready.index(1), SIZE)
                tma_load(k_d, [row, token, key, C], ready.index(1), two_s)
            for n in gl.static_range(BLOCKS):
                store_rstd(qq[n], n, shared, LOG2_Q)
            mbarrier.wait(ready.index(0), 1)
        else:
            mbarrier.wait(ready.index(0), phase)
        kk = add_gram_blocks(x_one, tokens, zero_blocks(BLOCKS * (BLOCKS + 1) // 2), False)
        # order the warp's reads of the first half before the TMA load of the next tile that overwrites it
        fence_async_shared()
        barrier()
        if tile + gl.num_programs(0) < count:
            at = at.advance_by(step, grid)
            first, length = at.tokens(grid)
            mbarrier.expect(ready.index(0), SIZE)
            tma_load(q_d if NORM else k_d, [at.row, first, at.key, 0], ready.index(0), one_s)
        if HALVES == 2:
            mbarrier.wait(ready.index(1), 1 if NORM else phase)
            kk = add_gram_blocks(x_two, tokens, kk, False)
        if not HAS_DECAYS:
            decay = compute_decays(decay, A_log_ptr, dt_bias_ptr, tokens, head, RESET)
            beta = compute_betas(beta, tokens, beta_ptr is not None, SIGMOID, NEGATIVE)
        q_scale = gl.zeros((C,), gl.float32, TOKEN_PAIRS) + scale
        k_rstd = None
        if NORM:
            for n in gl.static_range(BLOCKS):
                store_rstd(kk[n * (n + 3) // 2], n, shared, LOG2_K)
            q_rstd = shared.vector_view(LOG2_Q).load(TOKEN_PAIRS)
            k_rstd = shared.vector_view(LOG2_K).load(TOKEN_PAIRS)
            q_scale = q_scale * q_rstd
            if q_rstd_ptr is not None and value == 0:
                norms = (place + lane) * (HV // ratio) + key
                gl.store(q_rstd_ptr + norms, q_rstd, mask=lane < tokens)
                gl.store(k_rstd_ptr + norms, k_rstd, mask=lane < tokens)
        has_fp32_decay = store_factors(factors, shared, decay, beta, q_scale, k_rstd)
        if NORM:
            # always one exponential a pair: a branch, or one more row of factors, is 1.5 % slower with norms
            L, L_aa, L_aa_t, total = compute_L(kk, shared, False)
        elif has_fp32_decay:
            L, L_aa, L_aa_t, total = compute_L(kk, shared, True)
        else:
            L, L_aa, L_aa_t, total = compute_L(kk, shared, False)
        is_well_conditioned = False
        if FAST_PATH:
            is_well_conditioned = store_flag(factors, total, has_fp32_decay, tokens)
        X = invert(L, L_aa, L_aa_t)
        if FAST_PATH == WITH_B and is_well_conditioned:
            store_B(tiles, X, shared)
        else:
            store_first_box(factors, shared)
            store_A_inv(tiles, X, PARTS)
        if FAST_PATH != WITH_B:
            store_zeros(tiles, PARTS)
        # make the writes of A_inv to shared memory visible to TMA
        fence_async_shared()
        for part in gl.static_range(PARTS):
            for n in gl.static_range(STORES):
                tma_store(A_d[n], [PARTS * tile + part, 0, 0], A_s.index(STORES * part + n))
        phase ^= 1
    tma_store_wait(0)
