"""Compute A_inv and the factors of each chunk and value head.

    A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j;     A_inv = (I + A)^-1, stored as A_inv - 1
    well-conditioned chunk, fast path on: B_ij = e^(G_C - G_i) A_inv_ij beta_j in its place; see `chunk`

The kernel also zeroes the outputs of tokens that belong to no sequence, and the scan's work-item counter.

It is persistent, and a CTA is one warp that takes tile after tile; see `inverse`. k arrives by TMA in halves
of 64 keys: the first half while the tile before is inverted, the second while the first is multiplied with
itself. The second half lies in the shared memory of A_inv, which leaves by TMA at the end. With l2norm the
raw q and k are multiplied, and the diagonals of q q^T and k k^T hold the squares of their norms. The diagonal
of A_inv - 1 holds what rounding took from the row's sum: see `triton.rule.prepare`.

HBM bytes per token and value head at K = V = 128 in bf16, HV = H: k 256, gates 6 (or 8 as `gates` stores
them), A_inv 96, factors 8 of a well-conditioned chunk, else 24: 368 or 384; l2norm adds 256, a backward 40.
"""

# tuples of blocks grow as the kernel is traced, and `tile` is a tensor, not an int
# mypy: disable-error-code="assignment,attr-defined,var-annotated"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.coupling import across, coupled, down
from gdn.backends.hopper.factors import (
    BETA,
    BOX,
    FROM,
    OUT,
    ROWS,
    TAME,
    TO,
    TOKENS,
    decays_of,
    gate_of,
    put_factors,
    put_second_box,
    row_in,
    strengths_of,
)
from gdn.backends.hopper.gluon import (
    barrier,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    kernel,
    mbarrier,
    mma_v2,
    recast,
    tma_load,
    tma_store,
    tma_store_wait,
)
from gdn.backends.hopper.inverse import (
    BLOCK,
    BLOCKS,
    LEFT,
    OF_BLOCK,
    RIGHT,
    C,
    inverse,
    left,
    places,
    zeros,
)

# A chunk is well-conditioned up to this sum of (beta_i A_ij)^2, if its decay fits fp32: that leaves 2^35 of
# fp32's range for e^(G_i - G_C) <q, k> v. Random keys without decay have 3 with beta drawn from 0 to 1, and
# 16 with beta = 1.
ALIKE = gl.constexpr(12.0)

# shared memory: tiles of 128 bytes a row, swizzled as TMA writes them (what `mma` loads from), and plain rows
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# registers: 16 bytes a lane
BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))


@gluon.jit
def digits(n, table_ptr, HV, ratio, chunks_per_row):
    """Return row, chunk, key head, and value head within the key head, of tile n or of a step of n tiles."""
    chunk = n // HV
    head = n % HV
    if table_ptr is None:
        return chunk // chunks_per_row, chunk % chunks_per_row, head // ratio, head % ratio
    else:
        return n * 0, chunk, head // ratio, head % ratio


@gluon.jit
def after(at, step, table_ptr, HV, ratio, chunks_per_row):
    """Add two results of `digits` with carries, without an integer division."""
    value = at[3] + step[3]
    is_over = (value >= ratio).to(gl.int32)
    key = at[2] + step[2] + is_over
    value -= is_over * ratio
    is_over = (key * ratio >= HV).to(gl.int32)
    chunk = at[1] + step[1] + is_over
    key -= is_over * (HV // ratio)
    row = at[0] + step[0]
    if table_ptr is None:
        is_over = (chunk >= chunks_per_row).to(gl.int32)
        row += is_over
        chunk -= is_over * chunks_per_row
    return row, chunk, key, value


@gluon.jit
def tokens_of(at, table_ptr, T):
    """Return the first token of a chunk in its row, and its length; below 0: tokens of no sequence."""
    if table_ptr is None:
        return at[1] * C, gl.minimum(T - at[1] * C, C)
    else:
        return gl.load(table_ptr + 2 * at[1]), gl.load(table_ptr + 2 * at[1] + 1)


@gluon.jit
def products(x_s, length, total, ONLY_DIAGONAL: gl.constexpr):
    """Add blocks of x x^T to accumulators `total`: on the diagonal, unless ONLY_DIAGONAL also below it."""
    if length < C:
        # tokens past the end are another sequence's and may be NaN: zero them in shared memory
        i = gl.arange(0, C, gl.SliceLayout(1, BY_ROWS))[:, None]
        x_s.store(gl.where(i < length, x_s.load(BY_ROWS), 0.0))
    for step in gl.static_range(C // BLOCK):
        keys = x_s.slice(step * BLOCK, BLOCK, 1)
        x = ()
        x_t = ()
        for n in gl.static_range(BLOCKS):
            # the left operand holds the same values in other pairs of registers: loading the right operand
            # from shared memory is cheaper than exchanging registers
            x = x + (keys.slice(n * BLOCK, BLOCK, 0).load(LEFT),)
            x_t = x_t + (keys.slice(n * BLOCK, BLOCK, 0).permute((1, 0)).load(RIGHT),)
        more = ()
        for a in gl.static_range(BLOCKS):
            for n in gl.static_range(a if ONLY_DIAGONAL else 0, a + 1):
                more = more + (mma_v2(x[a], x_t[n], total[len(more)]),)
        total = more
    return total


@gluon.jit
def nothing(COUNT: gl.constexpr):
    found = ()
    for _ in gl.static_range(COUNT):
        found = found + (zeros(),)
    return found


@gluon.jit
def tell(factors_ptr, total, is_near, length):
    """Test if a chunk is well-conditioned, store that to HBM; `total` sums to that of (beta_i A_ij)^2."""
    total = gl.sum(gl.sum(total, 1), 0)
    # false for NaN
    is_tame = (total <= ALIKE) & is_near & (length == C)
    gl.store(factors_ptr + TAME, is_tame.to(gl.float32))
    return is_tame


@gluon.jit
def put_rstd(xx, n: gl.constexpr, f_s, FACTOR: gl.constexpr):
    """Store 1 / norm of 16 rows of x to `f_s`; the block xx of x x^T has their squares on its diagonal."""
    i, j = places()
    rstd = gl.rsqrt(gl.expand_dims(gl.sum(gl.where(i == j, xx, 0.0), 1), 1) + 1e-6)
    f_s.index(FACTOR - BOX).permute((1, 0)).slice(n * BLOCK, BLOCK, 0).store(rstd)


@gluon.jit
def clear_outputs(o_ptr, place, count, HV, D: gl.constexpr):
    """Store zeros to HBM for the outputs of a chunk's first `count` tokens."""
    i = gl.arange(0, C, gl.SliceLayout(1, BY_ROWS))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, BY_ROWS))[None, :]
    for column in gl.static_range(0, D, C):
        none = gl.zeros((C, C), gl.float32, BY_ROWS)
        gl.store(o_ptr + (place + i * HV) * D + (column + j), none, mask=i < count)


@gluon.jit
def lost(X):
    """Return what rounding to bf16 takes from the row sums of a row of blocks, to the 11 bits of fp16."""
    ones = gl.convert_layout(gl.zeros((BLOCK, BLOCK), gl.float16, OF_BLOCK) + 1.0, RIGHT)
    minus = gl.convert_layout(gl.zeros((BLOCK, BLOCK), gl.bfloat16, OF_BLOCK) - 1.0, RIGHT)
    # MMAs with ones and with minus ones sum the rows on the tensor cores, in the layout of the blocks
    found = zeros()
    for n in gl.static_range(len(X)):
        found = mma_v2(left(X[n].to(gl.float16)), ones, found)
        found = mma_v2(left(X[n].to(gl.bfloat16)), minus, found)
    return found


@gluon.jit
def place_of(tile, a: gl.constexpr, n: gl.constexpr):
    """Return the view of block (a, n) of a tile in shared memory."""
    return tile.slice(a * BLOCK, BLOCK, 0).slice(n * BLOCK, BLOCK, 1)


@gluon.jit
def put_B(tile, X, f_s):
    # B = e^(G_C - G_i) A_inv_ij beta_j, from registers to shared memory
    betas = ()
    for n in gl.static_range(BLOCKS):
        betas = betas + (across(f_s, BETA, n),)
    for a in gl.static_range(BLOCKS):
        out = down(f_s, OUT, a)
        for n in gl.static_range(a + 1):
            x = X[a * (a + 1) // 2 + n] * (out * betas[n])
            place_of(tile, a, n).store(x.to(gl.bfloat16))


@gluon.jit
def put_A_inv(tiles, X, PARTS: gl.constexpr):
    """Store A_inv - 1 to shared memory: bf16 with the rounding of row sums on the diagonal, or split bf16."""
    i, j = places()
    for a in gl.static_range(BLOCKS):
        row = ()
        for n in gl.static_range(a):
            row = row + (X[a * (a + 1) // 2 + n],)
        row = row + (gl.where(i > j, X[a * (a + 3) // 2], 0.0),)
        if PARTS == 1:
            row = row[:a] + (gl.where(i == j, lost(row), row[a]),)
        for n in gl.static_range(a + 1):
            block = row[n]
            for part in gl.static_range(PARTS):
                place_of(tiles, part * BLOCKS + a, n).store(block.to(gl.bfloat16))
                # the second part is what bf16 took from the first
                block = block - block.to(gl.bfloat16).to(gl.float32)


@kernel
def solve_kernel(
    upper_d, lower_d, q_d, k_d, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, table_ptr, factors_ptr,
    q_rstd_ptr, k_rstd_ptr, o_ptr, next_ptr,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, T, HV, ratio, chunks_per_row, scale, count,
    PREPARED: gl.constexpr, SIGMOID: gl.constexpr, NEGATIVE: gl.constexpr, RESET: gl.constexpr,
    NORM: gl.constexpr, GLIDES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    # One CTA: tiles (chunk, value head) b, b + grid, ...: A_inv (or B) and the factors of each.
    # Grid: min(tiles, 12 CTAs an SM), 8 at K = 64, persistent.  Warps: 1, which produces and consumes.
    # Shared memory: 8 KiB for the first 64 keys; 8 KiB for the second, later A_inv (16 KiB at K = 64, where
    # A_inv is split bf16); the second box of factors; the row factor of A.
    # mbarriers: ready[0], ready[1], 1 arrival each and TMA bytes, for the halves of k (l2norm: q, then k).
    # A tile: k k^T by `mma` from shared memory to registers; A from it and the factors; A_inv in registers;
    # A_inv to shared memory, and to HBM by TMA stores.
    gl.static_assert(D == 2 * C or not GLIDES)
    # A_inv is split bf16 at 64 keys
    PARTS: gl.constexpr = 2 * C // D
    HALVES: gl.constexpr = D // C
    one_s = gl.allocate_shared_memory(gl.bfloat16, [1, C, 1, C], k_d.layout)
    A_s = gl.allocate_shared_memory(gl.bfloat16, [2 * PARTS, 1, C // 2, C], upper_d.layout)
    f_s = gl.allocate_shared_memory(gl.float32, [ROWS - BOX, 1, C], PLAIN)
    two_s = recast(A_s, gl.bfloat16, [PARTS, 1, C, 1, C], k_d.layout).index(0)
    x_one = recast(one_s, gl.bfloat16, [C, C], SHARED)
    tiles = recast(A_s, gl.bfloat16, [PARTS * C, C], SHARED)
    x_two = tiles.slice(0, C, 0)
    gain_s = gl.allocate_shared_memory(gl.float32, [1, 1, C], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=1)
    fence_async_shared()
    SIZE: gl.constexpr = C * C * 2
    at = digits(gl.program_id(0), table_ptr, HV, ratio, chunks_per_row)
    step = digits(gl.num_programs(0), table_ptr, HV, ratio, chunks_per_row)
    # Without `gates` the launch before may be `table`, whose entries are read next. With it, `table` has
    # completed, and k is the caller's: the first TMA load starts while `gates` still runs.
    if not PREPARED:
        gdc_wait()
    first, length = tokens_of(at, table_ptr, T)
    mbarrier.expect(ready.index(0), SIZE)
    tma_load(q_d if NORM else k_d, [at[0], first, at[2], 0], ready.index(0), one_s)
    if PREPARED:
        gdc_wait()
    gdc_launch_dependents()
    # the scan's work-item counter in HBM; no CTA of the scan reads it before this kernel has completed
    if gl.program_id(0) == 0:
        gl.store(next_ptr, 0)
    phase = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        row, key, value = at[0], at[2], at[3]
        token = first
        tokens = length
        head = key * ratio + value
        place = row.to(gl.int64) * T + token
        factors = factors_ptr + tile.to(gl.int64) * (ROWS * C)
        # the second half goes where the previous A_inv was, once its TMA store has read the shared memory
        tma_store_wait(0)
        if HALVES == 2:
            mbarrier.expect(ready.index(1), SIZE)
            tma_load(q_d if NORM else k_d, [row, token, key, C], ready.index(1), two_s)
        lane = gl.arange(0, C, TOKENS)
        if PREPARED:
            decay = gl.load(factors + FROM * C + lane)
            beta = gl.load(factors + BETA * C + lane)
        else:
            decay = gate_of(g_ptr, row, token, tokens, head, g_b, g_t, g_h)
            beta = gate_of(beta_ptr, row, token, tokens, head, beta_b, beta_t, beta_h)
        if o_ptr is not None and tokens < 0:
            clear_outputs(o_ptr, place * HV + head, -tokens, HV, D)
        if NORM:
            # each barrier completes twice a tile, for q and for k: phases 0 and 1, whatever the tile
            mbarrier.wait(ready.index(0), 0)
            qq = products(x_one, tokens, nothing(BLOCKS), True)
            fence_async_shared()
            barrier()
            mbarrier.expect(ready.index(0), SIZE)
            tma_load(k_d, [row, token, key, 0], ready.index(0), one_s)
            if HALVES == 2:
                mbarrier.wait(ready.index(1), 0)
                qq = products(x_two, tokens, qq, True)
                fence_async_shared()
                barrier()
                mbarrier.expect(ready.index(1), SIZE)
                tma_load(k_d, [row, token, key, C], ready.index(1), two_s)
            for n in gl.static_range(BLOCKS):
                put_rstd(qq[n], n, f_s, TO)
            mbarrier.wait(ready.index(0), 1)
        else:
            mbarrier.wait(ready.index(0), phase)
        kk = products(x_one, tokens, nothing(BLOCKS * (BLOCKS + 1) // 2), False)
        # order the warp's reads of the first half before the TMA load of the next tile that overwrites it
        fence_async_shared()
        barrier()
        if tile + gl.num_programs(0) < count:
            at = after(at, step, table_ptr, HV, ratio, chunks_per_row)
            first, length = tokens_of(at, table_ptr, T)
            mbarrier.expect(ready.index(0), SIZE)
            tma_load(q_d if NORM else k_d, [at[0], first, at[2], 0], ready.index(0), one_s)
        if HALVES == 2:
            mbarrier.wait(ready.index(1), 1 if NORM else phase)
            kk = products(x_two, tokens, kk, False)
        if not PREPARED:
            decay = decays_of(decay, A_log_ptr, dt_bias_ptr, tokens, head, RESET)
            beta = strengths_of(beta, tokens, beta_ptr is not None, SIGMOID, NEGATIVE)
        q_scale = gl.zeros((C,), gl.float32, TOKENS) + scale
        k_rstd = None
        if NORM:
            for n in gl.static_range(BLOCKS):
                put_rstd(kk[n * (n + 3) // 2], n, f_s, FROM)
            q_rstd = row_in(f_s, TO).load(TOKENS)
            k_rstd = row_in(f_s, FROM).load(TOKENS)
            q_scale = q_scale * q_rstd
            if q_rstd_ptr is not None and value == 0:
                norms = (place + lane) * (HV // ratio) + key
                gl.store(q_rstd_ptr + norms, q_rstd, mask=lane < tokens)
                gl.store(k_rstd_ptr + norms, k_rstd, mask=lane < tokens)
        is_near = put_factors(factors, f_s, gain_s, decay, beta, q_scale, k_rstd)
        if NORM:
            # always one exponential a pair: a branch, or one more row of factors, is 1.5 % slower with norms
            L, L_aa, L_aa_t, total = coupled(kk, f_s, gain_s, False)
        elif is_near:
            L, L_aa, L_aa_t, total = coupled(kk, f_s, gain_s, True)
        else:
            L, L_aa, L_aa_t, total = coupled(kk, f_s, gain_s, False)
        is_tame = False
        if GLIDES:
            is_tame = tell(factors, total, is_near, tokens)
        X = inverse(L, L_aa, L_aa_t)
        if is_tame:
            put_B(tiles, X, f_s)
        else:
            put_second_box(factors, f_s)
            put_A_inv(tiles, X, PARTS)
        for a in gl.static_range(BLOCKS):
            # zeros for what the TMA stores read; the upper right quarter only if HBM has a place for it
            for n in gl.static_range(a + 1, a // 2 * 2 + 2 if GLIDES else BLOCKS):
                for part in gl.static_range(PARTS):
                    place_of(tiles, part * BLOCKS + a, n).store(zeros().to(gl.bfloat16))
        # make the writes of A_inv to shared memory visible to TMA
        fence_async_shared()
        for part in gl.static_range(PARTS):
            tma_store(upper_d, [PARTS * tile + part, 0, 0], A_s.index(2 * part))
            tma_store(lower_d, [PARTS * tile + part, 0, 0], A_s.index(2 * part + 1))
        phase ^= 1
    tma_store_wait(0)
