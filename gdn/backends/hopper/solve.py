"""Per chunk and value head, the inverse of what couples its tokens, and the norms put into its factors.

    A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j;     A_inv = (I + A)^-1, stored less 1

A warp has a tile, and all of it in registers: no shared memory, no barrier, no number that another warp made.
Blocks of 16 x 16 are operands as products leave them, right ones as their transposes. So a diagonal block's
inverse is made beside its transpose, and below the diagonal

    T_ij = sum over m of X_mj^T L_im^T;     X_ij = -X_ii T_ij^T;     X_ij^T = -T_ij X_ii^T;     L = A there

Operands are in fp16, which is as exact as tf32 and has room for |A| < 65504: a recurrence with larger ones
grows by as much from token to token. With l2norm raw k go through the product, whose diagonal has the squares
of their norms; OUT, INTO, FROM of `factors` are multiplied with k_rstd, READ and TO with q_rstd. The diagonal
of A_inv has what rounding took from the row's sum: see `triton.prepare`.

Bytes per token and value head at K = V = 128 in bf16, HV = H: k 256, A_inv 128, factors 12: 396; with l2norm
300 more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import FROM, GAIN, HIGH, INTO, OUT, READ, ROWS, TO
from gdn.backends.hopper.gluon import copy_async, copy_commit, copy_wait, gdc_launch_dependents, gdc_wait, kernel, mma_v2

TILES = 4  # of a program, a warp each
W = gl.constexpr(TILES)
C = gl.constexpr(64)
B = gl.constexpr(16)  # tokens of a block
N = gl.constexpr(4)  # blocks down a tile
D = gl.constexpr(128)  # keys

BLOCK = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, BLOCK.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, BLOCK.value, 2))
DOWN = gl.constexpr(gl.SliceLayout(2, BLOCK.value))  # a number for each of a block's rows
ACROSS = gl.constexpr(gl.SliceLayout(1, BLOCK.value))
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
LOADED = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 8, 4], [4, 1, 1], [2, 1, 0]))
FACTORS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
ROW_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
ZEROED = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 16, 2], [4, 1, 1], [2, 1, 0]))


@gluon.jit
def of_tiles(x, layout: gl.constexpr):
    """x [W] beside the rows of blocks: [W, 1, 1]."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    return gl.expand_dims(gl.expand_dims(x, 1), 2)


@gluon.jit
def places(layout: gl.constexpr, WIDTH: gl.constexpr):
    """Rows [1, 16, 1] and columns [1, 1, WIDTH] of a block."""
    i = gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    j = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return gl.expand_dims(gl.expand_dims(i, 0), 2), gl.expand_dims(gl.expand_dims(j, 0), 1)


@gluon.jit
def left(x):
    return gl.convert_layout(x, LEFT)


@gluon.jit
def right(x_t):
    return gl.convert_layout(gl.permute(x_t, (0, 2, 1)), RIGHT)


@gluon.jit
def zeros():
    return gl.zeros((W, B, B), gl.float32, BLOCK)


@gluon.jit
def times(a, b_t, acc):
    """acc + a b, with b^T."""
    return mma_v2(left(a.to(gl.float16)), right(b_t.to(gl.float16)), acc)


@gluon.jit
def load(x_s, x_ptr, start, pitch, length):
    """A chunk's rows of x; zeros past its end."""
    for block in gl.static_range(N):
        i, j = places(LOADED, D)
        i += block * B
        x = x_ptr + (of_tiles(start, LOADED) + i * pitch + j)
        copy_async(x_s.slice(block * B, B, 1), x, mask=i < of_tiles(length, LOADED))
    copy_commit()
    copy_wait(0)


@gluon.jit
def products(x_s, BELOW: gl.constexpr):
    """Blocks of x x^T on the diagonal and, BELOW, those below it, row by row."""
    found = ()
    for _ in gl.static_range(N * (N + 1) // 2 if BELOW else N):
        found = found + (zeros(),)
    for step in gl.static_range(D // B):
        columns = x_s.slice(step * B, B, 2)
        x = ()
        x_t = ()
        for a in gl.static_range(N):
            part = columns.slice(a * B, B, 1)
            x = x + (part.load(LEFT),)
            x_t = x_t + (part.permute((0, 2, 1)).load(RIGHT),)
        more = ()
        for a in gl.static_range(N):
            for b in gl.static_range(0 if BELOW else a, a + 1):
                more = more + (mma_v2(x[a], x_t[b], found[len(more)]),)
        found = more
    return found


@gluon.jit
def vector(factors_ptr, tile, ROW: gl.constexpr, block: gl.constexpr, layout: gl.constexpr):
    """Places of a block's numbers in a row of the factors."""
    tile = gl.expand_dims(gl.convert_layout(tile.to(gl.int64), gl.SliceLayout(1, layout)), 1)
    return factors_ptr + (tile * (ROWS * C) + (ROW * C + block * B) + gl.arange(0, B, gl.SliceLayout(0, layout))[None, :])


@gluon.jit
def copy_factors(f_s, factors_ptr, tile):
    """The rows from HIGH to GAIN."""
    row = gl.arange(0, 4 * C, gl.SliceLayout(0, FACTORS))[None, :]
    tile = gl.expand_dims(gl.convert_layout(tile.to(gl.int64), gl.SliceLayout(1, FACTORS)), 1)
    copy_async(f_s, factors_ptr + (tile * (ROWS * C) + HIGH * C + row), mask=row >= 0)


@gluon.jit
def part(f_s, ROW: gl.constexpr, block: gl.constexpr, layout: gl.constexpr):
    """A block's numbers of a row of the factors."""
    return f_s.slice((ROW - HIGH) * C + block * B, B, 1).load(layout)


@gluon.jit
def inverse_of_block(A):
    """(I - A)^-1 and its transpose by recursive doubling: see `triton.tril`. Only A below its diagonal is read."""
    i, j = places(BLOCK, B)
    A = gl.where(i > j, A, 0.0)
    A_t = gl.convert_layout(gl.permute(A, (0, 2, 1)), BLOCK)
    eye = gl.where(i == j, zeros() + 1.0, 0.0)
    X = gl.where((i ^ j) == 1, A, eye)
    X_t = gl.where((i ^ j) == 1, A_t, eye)
    for level in gl.static_range(1, 4):
        is_across = ((i ^ j) >> level) == 1
        XL = times(X, gl.where(is_across, A_t, 0.0), zeros())
        XL_t = times(X_t, gl.where(is_across, A, 0.0), zeros())
        X, X_t = times(XL, X_t, X), times(XL_t, X, X_t)
    return X, X_t


@gluon.jit
def store_row(A_ptr, tile, is_there, X, ROW: gl.constexpr):
    """A row of blocks of A_inv less 1, the last of X on the diagonal, which gets what rounding takes from the row."""
    i, j = places(BLOCK, B)
    place = A_ptr + of_tiles(tile.to(gl.int64), BLOCK) * (C * C) + ((i + ROW * B) * C + j)
    mask = of_tiles(is_there, BLOCK)
    ones = gl.convert_layout(gl.zeros((W, B, B), gl.bfloat16, BLOCK) + 1.0, RIGHT)
    last = gl.where(i > j, X[ROW], 0.0)
    total, kept = last, mma_v2(left(last.to(gl.bfloat16)), ones, zeros())
    for n in gl.static_range(ROW):
        total += X[n]
        block = X[n].to(gl.bfloat16)
        kept = mma_v2(left(block), ones, kept)
        gl.store(place + n * B, block, mask=mask)
    lost = gl.expand_dims(gl.sum(total, 2), 2) - kept
    gl.store(place + ROW * B, gl.where(i == j, lost, last).to(gl.bfloat16), mask=mask)
    i, j = places(ZEROED, B)
    place = A_ptr + of_tiles(tile.to(gl.int64), ZEROED) * (C * C) + ((i + ROW * B) * C + j)
    mask = of_tiles(is_there, ZEROED)
    for n in gl.static_range(ROW + 1, N):
        gl.store(place + n * B, gl.zeros((W, B, B), gl.bfloat16, ZEROED), mask=mask)


@gluon.jit
def rstds_of(x_s, length):
    """1 / norm of the rows of each block of x, whose squares lie on a product's diagonal; 0 past the chunk's end."""
    i, j = places(BLOCK, B)
    xx = products(x_s, False)
    found = ()
    for a in gl.static_range(N):
        total = gl.sum(gl.where(i == j, xx[a], 0.0), 2)
        rows = gl.arange(0, B, gl.SliceLayout(0, DOWN))[None, :] + a * B
        is_mine = rows < gl.expand_dims(gl.convert_layout(length, gl.SliceLayout(1, DOWN)), 1)
        found = found + (gl.where(is_mine, gl.rsqrt(total + 1e-6), 0.0),)
    return found


@gluon.jit
def scale(factors_ptr, tile, ROW: gl.constexpr, x, mask):
    for a in gl.static_range(N):
        place = vector(factors_ptr, tile, ROW, a, DOWN)
        gl.store(place, gl.load(place) * x[a], mask=mask)


@kernel
def solve_kernel(
    q_ptr, k_ptr, table_ptr, factors_ptr, A_inv_ptr, q_rstd_ptr, k_rstd_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, T, HV, ratio, chunks_per_row, count,
    UNIT: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    x_s = gl.allocate_shared_memory(gl.bfloat16, [W, C, D], SHARED)
    f_s = gl.allocate_shared_memory(gl.float32, [W, 4 * C], ROW_SHARED)
    gdc_launch_dependents()
    gdc_wait()
    number = gl.program_id(0) * W + gl.arange(0, W, gl.SliceLayout(1, DOWN))
    tile = gl.minimum(number, count - 1)
    chunk, head = tile // HV, tile % HV
    if table_ptr is None:
        row = chunk // chunks_per_row
        first = chunk % chunks_per_row * C
        length = gl.minimum(T - first, C)
    else:
        row = chunk * 0
        first = gl.load(table_ptr + 2 * chunk)
        length = gl.load(table_ptr + 2 * chunk + 1)
    length = gl.where(number < count, gl.maximum(length, 0), 0)
    if gl.max(length, 0) > 0:
        is_there = gl.expand_dims(length > 0, 1)
        copy_factors(f_s, factors_ptr, tile)
        if NORM:
            load(x_s, q_ptr, (row.to(gl.int64) * q_b + first.to(gl.int64) * q_t + head // ratio * q_h) * UNIT, q_t * UNIT, length)
            q_rstd = rstds_of(x_s, length)
            scale(factors_ptr, tile, READ, q_rstd, is_there)
            scale(factors_ptr, tile, TO, q_rstd, is_there)
        load(x_s, k_ptr, (row.to(gl.int64) * k_b + first.to(gl.int64) * k_t + head // ratio * k_h) * UNIT, k_t * UNIT, length)
        kk = products(x_s, True)
        if NORM:
            k_rstd = rstds_of(x_s, length)
            scale(factors_ptr, tile, FROM, k_rstd, is_there)
            scale(factors_ptr, tile, OUT, k_rstd, is_there)
            scale(factors_ptr, tile, INTO, k_rstd, is_there)
            if q_rstd_ptr is not None:
                for a in gl.static_range(N):
                    i = gl.arange(0, B, gl.SliceLayout(0, DOWN))[None, :] + a * B
                    token = gl.expand_dims(row.to(gl.int64) * T + first, 1) + i
                    place = token * (HV // ratio) + gl.expand_dims(head // ratio, 1)
                    is_mine = (i < gl.expand_dims(length, 1)) & gl.expand_dims(head % ratio == 0, 1)
                    gl.store(q_rstd_ptr + place, q_rstd[a], mask=is_mine)
                    gl.store(k_rstd_ptr + place, k_rstd[a], mask=is_mine)
        diagonal = ()
        below = ()
        for a in gl.static_range(N):
            high = part(f_s, HIGH, a, DOWN)
            gain = -part(f_s, GAIN, a, DOWN)
            if NORM:
                gain = gain * k_rstd[a]
            for n in gl.static_range(a + 1):
                columns = part(f_s, FROM, n, ACROSS)
                if NORM:
                    columns = columns * gl.convert_layout(k_rstd[n], ACROSS)
                D_ij = gl.exp2(gl.expand_dims(high, 2) - gl.expand_dims(part(f_s, HIGH, n, ACROSS), 1))
                A = kk[a * (a + 1) // 2 + n] * D_ij * gl.expand_dims(gain, 2) * gl.expand_dims(columns, 1)
                if n < a:
                    below = below + (A.to(gl.float16),)
                else:
                    diagonal = diagonal + (A,)
        X_t = ()
        for a in gl.static_range(N):
            X_aa, X_aa_t = inverse_of_block(diagonal[a])
            X = ()
            more = ()
            for n in gl.static_range(a):
                T_an = zeros()
                for m in gl.static_range(n, a):
                    T_an = times(X_t[m * (m + 1) // 2 + n], below[a * (a - 1) // 2 + m], T_an)
                X = X + (times(X_aa, T_an, zeros()),)
                if a < N - 1:
                    more = more + (times(T_an, X_aa, zeros()),)
            store_row(A_inv_ptr, tile, length > 0, X + (X_aa,), a)
            X_t = X_t + more + (X_aa_t,)
