"""Per chunk and value head, the inverse of what couples its tokens, and the norms put into its factors.

    A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j;     A_inv = (I + A)^-1, stored less 1
    of a tame chunk, where chunks may be glided over: e^(G_C - G_i) A_inv_ij beta_j; see `chunk`

A warp has a tile: see `inverse`. Programs stay and go from four tiles to the next. k comes by tensor copies
in halves of 64 keys: the first while the tiles before are inverted, the second, while the first is multiplied
with itself, to where A_inv will lie, which leaves by a tensor copy. With l2norm raw q and k go through the
product, whose diagonal has the squares of their norms; OUT, INTO and FROM of `factors` get k_rstd, READ and
TO q_rstd. The diagonal of A_inv less 1 has what rounding took from the row's sum: see `triton.prepare`. TAME
says which chunks are tame.

Bytes per token and value head at K = V = 128 in bf16, HV = H: k 256, A_inv 128, factors 32: 416; with l2norm
300 more.
"""

# tuples of blocks grow as the kernel is traced
# mypy: disable-error-code="assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import BETA, DECAY, END, FROM, INTO, OUT, READ, ROWS, TAME, TO
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
    W,
    left,
    on_diagonal,
    places,
    row_of,
    to_the_left,
    zeros,
)

# a chunk is tame up to this sum of A_ij^2, 60 for random keys and beta = 1.9, and from this decay on, which
# leaves 35 bits of fp32's exponent for e^(-G_C) <q, k> v
ALIKE = gl.constexpr(80.0)
FORGOTTEN = gl.constexpr(2.0**-92)

# tiles of 128 bytes a row as tensor copies swizzle them, and rows of factors
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
# 16 bytes a lane
BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 4, 8], [4, 1, 1], [2, 1, 0]))


@gluon.jit
def corners(group, table_ptr, T, HV, ratio, chunks_per_row, count):
    """Of W tiles: rows, first tokens, key heads, and how many tokens they have; 0 past the last one."""
    index = group * W
    chunk = gl.minimum(index, count - 1) // HV
    value_head = gl.minimum(index, count - 1) % HV
    key_head = value_head // ratio
    value_head = value_head % ratio
    row = chunk // chunks_per_row if table_ptr is None else chunk * 0
    chunk = chunk % chunks_per_row if table_ptr is None else chunk
    found = ()
    for n in gl.static_range(W):
        if table_ptr is None:
            first = chunk * C
            length = gl.minimum(T - first, C)
        else:
            first = gl.load(table_ptr + 2 * chunk)
            length = gl.maximum(gl.load(table_ptr + 2 * chunk + 1), 0)
        found = found + ((row, first, key_head, length * (index + n < count).to(gl.int32)),)
        # the next value head, unless there is none
        more = (index + n + 1 < count).to(gl.int32)
        value_head += more
        is_over = (value_head == ratio).to(gl.int32)
        value_head -= is_over * ratio
        key_head += is_over
        is_over = (key_head * ratio == HV).to(gl.int32)
        key_head -= is_over * key_head
        chunk += is_over
        if table_ptr is None:
            is_over = (chunk == chunks_per_row).to(gl.int32)
            chunk -= is_over * chunk
            row += is_over
    return found


@gluon.jit
def load(x_d, x_s, ready, found, HALF: gl.constexpr):
    """A half of the chunks' rows of q or k, whatever follows a sequence's end."""
    for n in gl.static_range(W):
        row, first, head, length = found[n]
        tma_load(x_d, [row, first, head, HALF * C], ready, x_s.index(n))


@gluon.jit
def warps(LAYOUT: gl.constexpr):
    """A tile's number, beside its blocks: [W, 1, 1]."""
    w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(w, 1), 2)


@gluon.jit
def lengths(found, LAYOUT: gl.constexpr):
    """How many tokens the tiles have, beside their blocks: [W, 1, 1]."""
    w = warps(LAYOUT)
    length = w * 0
    for n in gl.static_range(W):
        length += (w == n).to(gl.int32) * found[n][3]
    return length


@gluon.jit
def products(x_s, found, total, ONLY_DIAGONAL: gl.constexpr):
    """Blocks of x x^T on and, if asked, below the diagonal, row by row, added to `total`."""
    is_short = found[0][3] < C
    for n in gl.static_range(1, W):
        is_short = is_short | (found[n][3] < C)
    if is_short:
        # another sequence's tokens may be NaN
        i, j = places(BY_ROWS, C, C)
        x_s.store(gl.where(i < lengths(found, BY_ROWS), x_s.load(BY_ROWS), 0.0))
    for step in gl.static_range(C // BLOCK):
        keys = x_s.slice(step * BLOCK, BLOCK, 2)
        x_t = ()
        for n in gl.static_range(BLOCKS):
            x_t = x_t + (keys.slice(n * BLOCK, BLOCK, 1).permute((0, 2, 1)).load(RIGHT),)
        more = ()
        for a in gl.static_range(BLOCKS):
            x = keys.slice(a * BLOCK, BLOCK, 1).load(LEFT)
            for n in gl.static_range(a if ONLY_DIAGONAL else 0, a + 1):
                more = more + (mma_v2(x, x_t[n], total[len(more)]),)
        total = more
    return total


@gluon.jit
def nothing(COUNT: gl.constexpr):
    found = ()
    for _ in gl.static_range(COUNT):
        found = found + (zeros(),)
    return found


@gluon.jit
def down(f_s, FACTOR: gl.constexpr, n: gl.constexpr):
    """Of block n's rows in a row of the factors: [W, 16, 1]."""
    return f_s.slice(FACTOR, 1, 1).permute((0, 2, 1)).slice(n * BLOCK, BLOCK, 1).load(OF_BLOCK)


@gluon.jit
def across(f_s, FACTOR: gl.constexpr, n: gl.constexpr):
    """Of block n's columns: [W, 1, 16]."""
    return f_s.slice(FACTOR, 1, 1).slice(n * BLOCK, BLOCK, 2).load(OF_BLOCK)


@gluon.jit
def change(f_s, factors_ptr, group, count, FACTOR: gl.constexpr, x, IS_SHIFT: gl.constexpr):
    """A row of the factors times x, or with x added to it; x has [W, 16, 1] for each block."""
    i, j = places(OF_BLOCK, BLOCK, 1)
    tile = group * W + warps(OF_BLOCK)
    for n in gl.static_range(BLOCKS):
        before = down(f_s, FACTOR, n)
        place = tile.to(gl.int64) * (ROWS * C) + (FACTOR * C + n * BLOCK) + i
        gl.store(factors_ptr + place, before + x[n] if IS_SHIFT else before * x[n], mask=tile < count)


@gluon.jit
def tell(f_s, factors_ptr, group, count, total, length):
    """Whether tiles are tame, [W, 1, 1], to the walk, too; `total` adds up to the sum of A_ij^2."""
    total = gl.expand_dims(gl.expand_dims(gl.sum(gl.sum(total, 2), 1), 1), 2)
    end = f_s.slice(END, 1, 1).slice(0, 1, 2).load(OF_BLOCK)
    # NaN is not
    is_tame = (total <= ALIKE) & (end >= FORGOTTEN) & (length == C)
    tile = group * W + warps(OF_BLOCK)
    place = factors_ptr + (tile.to(gl.int64) * (ROWS * C) + TAME * C)
    gl.store(place, is_tame.to(gl.float32), mask=tile < count)
    return is_tame


@gluon.jit
def rstd_of(xx, n: gl.constexpr, length):
    """1 / norm of rows of x, from the block of x x^T that has them on its diagonal; 0 past the end."""
    i, j = places(OF_BLOCK, BLOCK, BLOCK)
    total = gl.expand_dims(gl.sum(gl.where(i == j, xx, 0.0), 2), 2)
    return gl.where(i + n * BLOCK < length, gl.rsqrt(total + 1e-6), 0.0)


@gluon.jit
def keep(rstd_ptr, rstd, found, group, T, HV, ratio):
    """Norms [B, T, H] of the first value head of each key head."""
    i, j = places(OF_BLOCK, BLOCK, 1)
    w = warps(OF_BLOCK)
    start = (w * 0).to(gl.int64)
    for m in gl.static_range(W):
        row, first, head, length = found[m]
        place = (row.to(gl.int64) * T + first) * (HV // ratio) + head
        start += (w == m).to(gl.int64) * place
    is_first = (group * W + w) % HV % ratio == 0
    for n in gl.static_range(BLOCKS):
        mask = is_first & (i + n * BLOCK < lengths(found, OF_BLOCK))
        gl.store(rstd_ptr + start + (i + n * BLOCK) * (HV // ratio), rstd[n], mask=mask)


@gluon.jit
def lost(X):
    """What rounding to bf16 takes from the sums of a row of blocks, to the 11 bits of fp16."""
    ones = gl.convert_layout(gl.zeros((W, BLOCK, BLOCK), gl.float16, OF_BLOCK) + 1.0, RIGHT)
    minus = gl.convert_layout(gl.zeros((W, BLOCK, BLOCK), gl.bfloat16, OF_BLOCK) - 1.0, RIGHT)
    found = zeros()
    for n in gl.static_range(len(X)):
        found = mma_v2(left(X[n].to(gl.float16)), ones, found)
        found = mma_v2(left(X[n].to(gl.bfloat16)), minus, found)
    return found


@kernel
def solve_kernel(
    A_d, q_d, k_d, f_d, table_ptr, factors_ptr, q_rstd_ptr, k_rstd_ptr,
    T, HV, ratio, chunks_per_row, count, NORM: gl.constexpr, GLIDES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    gl.static_assert(D == 2 * C or not GLIDES)
    # A_inv is in two parts at 64 keys
    PARTS: gl.constexpr = 2 * C // D
    HALVES: gl.constexpr = D // C
    one_s = gl.allocate_shared_memory(gl.bfloat16, [W, 1, C, 1, C], k_d.layout)
    A_s = gl.allocate_shared_memory(gl.bfloat16, [PARTS, W * C, C], A_d.layout)
    factors_s = gl.allocate_shared_memory(gl.float32, [1, W * ROWS, C], f_d.layout)
    two_s = recast(A_s, gl.bfloat16, [PARTS * W, 1, C, 1, C], k_d.layout)
    x_one = recast(one_s, gl.bfloat16, [W, C, C], SHARED)
    tiles = recast(A_s, gl.bfloat16, [W, PARTS * C, C], SHARED)
    L_s = recast(A_s, gl.float16, [W, PARTS * C, C], SHARED)
    blocks = ()
    for a in gl.static_range(BLOCKS):
        for n in gl.static_range(a + 1):
            blocks = blocks + (L_s.slice(a * BLOCK, BLOCK, 1).slice(n * BLOCK, BLOCK, 2),)
    f_s = recast(factors_s, gl.float32, [W, ROWS, C], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()
    SIZE: gl.constexpr = W * C * C * 2
    groups = gl.cdiv(count, W)
    found = corners(gl.program_id(0), table_ptr, T, HV, ratio, chunks_per_row, count)
    mbarrier.expect(ready.index(0), SIZE)
    load(q_d if NORM else k_d, one_s, ready.index(0), found, 0)
    phase = 0
    for group in range(gl.program_id(0), groups, gl.num_programs(0)):
        following = corners(group + gl.num_programs(0), table_ptr, T, HV, ratio, chunks_per_row, count)
        # the second half, to where the A_inv before was, and the factors
        tma_store_wait(0)
        mbarrier.expect(ready.index(1), (SIZE if HALVES == 2 else 0) + f_d.block_type.nbytes)
        if HALVES == 2:
            load(q_d if NORM else k_d, two_s, ready.index(1), found, 1)
        tma_load(f_d, [group * (W * ROWS), 0], ready.index(1), factors_s.index(0))
        length = lengths(found, OF_BLOCK)
        q_rstd = ()
        k_rstd = ()
        if NORM:
            mbarrier.wait(ready.index(0), 0)
            qq = products(x_one, found, nothing(BLOCKS), True)
            fence_async_shared()
            barrier()
            mbarrier.expect(ready.index(0), SIZE)
            load(k_d, one_s, ready.index(0), found, 0)
            mbarrier.wait(ready.index(1), 0 if HALVES == 2 else phase)
            if HALVES == 2:
                qq = products(tiles, found, qq, True)
                fence_async_shared()
                barrier()
                mbarrier.expect(ready.index(1), SIZE)
                load(k_d, two_s, ready.index(1), found, 1)
            shifts = ()
            for n in gl.static_range(BLOCKS):
                q_rstd = q_rstd + (rstd_of(qq[n], n, length),)
                shifts = shifts + (gl.log2(q_rstd[n]),)
            change(f_s, factors_ptr, group, count, READ, q_rstd, False)
            change(f_s, factors_ptr, group, count, TO, shifts, True)
            mbarrier.wait(ready.index(0), 1)
        else:
            mbarrier.wait(ready.index(0), phase)
        kk = products(x_one, found, nothing(BLOCKS * (BLOCKS + 1) // 2), False)
        fence_async_shared()
        barrier()
        if group + gl.num_programs(0) < groups:
            mbarrier.expect(ready.index(0), SIZE)
            load(q_d if NORM else k_d, one_s, ready.index(0), following, 0)
        if HALVES == 2:
            mbarrier.wait(ready.index(1), 1 if NORM else phase)
            kk = products(tiles, found, kk, False)
        elif not NORM:
            mbarrier.wait(ready.index(1), phase)
        columns = ()
        for n in gl.static_range(BLOCKS):
            columns = columns + (across(f_s, FROM, n),)
        if NORM:
            raw = columns
            columns = ()
            shifts = ()
            for n in gl.static_range(BLOCKS):
                k_rstd = k_rstd + (rstd_of(kk[n * (n + 3) // 2], n, length),)
                shifts = shifts + (-gl.log2(k_rstd[n]),)
                turned = gl.convert_layout(gl.permute(shifts[n], (0, 2, 1)), OF_BLOCK)
                columns = columns + (raw[n] + turned,)
            change(f_s, factors_ptr, group, count, OUT, k_rstd, False)
            change(f_s, factors_ptr, group, count, INTO, k_rstd, False)
            change(f_s, factors_ptr, group, count, FROM, shifts, True)
            if q_rstd_ptr is not None:
                keep(q_rstd_ptr, q_rstd, found, group, T, HV, ratio)
                keep(k_rstd_ptr, k_rstd, found, group, T, HV, ratio)
        i, j = places(OF_BLOCK, BLOCK, BLOCK)
        L_aa = ()
        if GLIDES:
            total = zeros()
        for a in gl.static_range(BLOCKS):
            decay = down(f_s, DECAY, a)
            gain = -down(f_s, BETA, a)
            if NORM:
                gain = gain * k_rstd[a]
            for n in gl.static_range(a + 1):
                L = kk[a * (a + 1) // 2 + n] * (gl.exp2(decay - columns[n]) * gain)
                if n == a:
                    L = gl.where(i > j, L, 0.0)
                    L_aa = L_aa + (L,)
                if GLIDES:
                    total += L * L
                blocks[a * (a + 1) // 2 + n].store(L.to(gl.float16))
        if GLIDES:
            is_tame = tell(f_s, factors_ptr, group, count, total, length)
        X_aa = on_diagonal(L_aa, blocks)
        Y = to_the_left(X_aa, blocks)
        rows = ()
        for a in gl.static_range(BLOCKS):
            X = row_of(Y, blocks, a) + (gl.where(i > j, X_aa[a], 0.0),)
            if GLIDES:
                out = down(f_s, OUT, a)
                if NORM:
                    out = out * k_rstd[a]
                out = gl.where(is_tame, out, 1.0)
                B = ()
                for n in gl.static_range(a + 1):
                    B = B + (X[n] * (out * gl.where(is_tame, across(f_s, BETA, n), 1.0)),)
                X = B
            if PARTS == 1:
                diagonal = lost(X)
                if GLIDES:
                    diagonal = gl.where(is_tame, down(f_s, BETA, a) * out, diagonal)
                X = X[:a] + (gl.where(i == j, diagonal, X[a]),)
            rows = rows + (X,)
        # nobody reads X in fp16 any more
        for a in gl.static_range(BLOCKS):
            for n in gl.static_range(BLOCKS):
                block = rows[a][n] if n <= a else zeros()
                for part in gl.static_range(PARTS):
                    place = tiles.slice(part * C + a * BLOCK, BLOCK, 1).slice(n * BLOCK, BLOCK, 2)
                    place.store(block.to(gl.bfloat16))
                    block = block - block.to(gl.bfloat16).to(gl.float32)
        fence_async_shared()
        # what lies past the last tile is not stored
        for part in gl.static_range(PARTS):
            tma_store(A_d, [(PARTS * group + part) * (W * C), 0], A_s.index(part))
        found = following
        phase ^= 1
    tma_store_wait(0)
