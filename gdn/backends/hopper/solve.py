"""Per chunk and value head, the inverse of what couples its tokens, and the norms put into its factors.

    A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j;     A_inv = (I + A)^-1, stored less 1

A warp has a tile, by blocks of 16 x 16 tokens, and from k k^T on all of it in registers. Blocks are operands
as products leave them, right ones as their transposes. So a diagonal block's inverse is made beside its
transpose, and to the left of it, with L = -A there,

    T_ij = sum over m of X_mj^T L_im^T;     X_ij = X_ii T_ij^T;     X_ij^T = T_ij X_ii^T

Operands are in fp16, which is as exact as tf32 and has room for |A| < 65504: a recurrence with larger ones
grows by as much from token to token. With l2norm raw k go through the product, whose diagonal has the squares
of their norms; OUT, INTO, FROM of `factors` are multiplied with k_rstd, READ and TO with q_rstd. The diagonal
of A_inv has what rounding took from the row's sum: see `triton.prepare`.

Bytes per token and value head at K = V = 128 in bf16, HV = H: k 256, A_inv 128, factors 12: 396; with l2norm
300 more.
"""

# tuples of blocks grow as the kernel is traced
# mypy: disable-error-code="assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import FROM, GAIN, HIGH, INTO, OUT, READ, ROWS, TO
from gdn.backends.hopper.gluon import (
    barrier,
    copy_async,
    copy_commit,
    copy_wait,
    gdc_launch_dependents,
    gdc_wait,
    kernel,
    mma_v2,
)

TILES = 4  # of a program, whose four warps the layouts name
W = gl.constexpr(TILES)
C = gl.constexpr(64)  # tokens of a chunk
BLOCK = gl.constexpr(16)  # tokens of a block
BLOCKS = gl.constexpr(4)  # blocks down a tile

# a block a warp; of each, numbers for its rows and for its columns
OF_BLOCK = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, OF_BLOCK.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, OF_BLOCK.value, 2))
DOWN = gl.constexpr(gl.SliceLayout(2, OF_BLOCK.value))
ACROSS = gl.constexpr(gl.SliceLayout(1, OF_BLOCK.value))
# 16 bytes a lane: rows of q or k on their way to shared memory, and blocks of zeros
COPIED = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 8, 4], [4, 1, 1], [2, 1, 0]))
CLEARED = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 16, 2], [4, 1, 1], [2, 1, 0]))
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))


@gluon.jit
def of_tiles(x, layout: gl.constexpr):
    """x [W], a number for each tile, beside its blocks: [W, 1, 1]."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    return gl.expand_dims(gl.expand_dims(x, 1), 2)


@gluon.jit
def of_rows(x, layout: gl.constexpr):
    """As `of_tiles`, beside the rows or the columns of blocks: [W, 1]."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def places(layout: gl.constexpr, WIDTH: gl.constexpr):
    """Rows [1, 16, 1] and columns [1, 1, WIDTH]."""
    i = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    j = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return gl.expand_dims(gl.expand_dims(i, 0), 2), gl.expand_dims(gl.expand_dims(j, 0), 1)


@gluon.jit
def zeros():
    return gl.zeros((W, BLOCK, BLOCK), gl.float32, OF_BLOCK)


@gluon.jit
def left(x):
    return gl.convert_layout(x, LEFT)


@gluon.jit
def times(a, b_t, acc):
    """acc + a b, with b^T."""
    b = gl.permute(b_t.to(gl.float16), (0, 2, 1))
    return mma_v2(left(a.to(gl.float16)), gl.convert_layout(b, RIGHT), acc)


@gluon.jit
def load(x_s, x_ptr, row, first, head, length, x_b, x_t, x_h, UNIT: gl.constexpr, D: gl.constexpr):
    """A chunk's rows of x; zeros past its end."""
    start = of_tiles((row.to(gl.int64) * x_b + first.to(gl.int64) * x_t + head * x_h) * UNIT, COPIED)
    i, j = places(COPIED, D)
    for n in gl.static_range(BLOCKS):
        token = i + n * BLOCK
        place = x_ptr + (start + token * (x_t * UNIT) + j)
        copy_async(x_s.slice(n * BLOCK, BLOCK, 1), place, mask=token < of_tiles(length, COPIED))
    copy_commit()
    copy_wait(0)


@gluon.jit
def products(x_s, ROW: gl.constexpr, FIRST: gl.constexpr, D: gl.constexpr):
    """A row of blocks of x x^T, from FIRST to the one on the diagonal."""
    found = ()
    for _ in gl.static_range(FIRST, ROW + 1):
        found = found + (zeros(),)
    for step in gl.static_range(D // BLOCK):
        keys = x_s.slice(step * BLOCK, BLOCK, 2)
        x = keys.slice(ROW * BLOCK, BLOCK, 1).load(LEFT)
        more = ()
        for n in gl.static_range(FIRST, ROW + 1):
            x_t = keys.slice(n * BLOCK, BLOCK, 1).permute((0, 2, 1)).load(RIGHT)
            more = more + (mma_v2(x, x_t, found[n - FIRST]),)
        found = more
    return found


@gluon.jit
def places_of(factors_ptr, tile, FACTOR: gl.constexpr, n: gl.constexpr, layout: gl.constexpr):
    """Of block n's numbers in a row of the factors."""
    start = of_rows(tile.to(gl.int64), layout) * (ROWS * C) + (FACTOR * C + n * BLOCK)
    return factors_ptr + (start + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :])


@gluon.jit
def scale(factors_ptr, tile, FACTOR: gl.constexpr, x, is_there):
    """A row of the factors times x, which has a vector for each block."""
    for n in gl.static_range(BLOCKS):
        place = places_of(factors_ptr, tile, FACTOR, n, DOWN)
        gl.store(place, gl.load(place) * x[n], mask=of_rows(is_there, DOWN))


@gluon.jit
def rstds_of(x_s, length, D: gl.constexpr):
    """1 / norm of the rows of x, for each block; 0 past the chunk's end."""
    i, j = places(OF_BLOCK, BLOCK)
    token = gl.arange(0, BLOCK, gl.SliceLayout(0, DOWN))[None, :]
    found = ()
    for n in gl.static_range(BLOCKS):
        xx = products(x_s, n, n, D)
        total = gl.sum(gl.where(i == j, xx[0], 0.0), 2)
        found = found + (gl.where(token + n * BLOCK < of_rows(length, DOWN), gl.rsqrt(total + 1e-6), 0.0),)
    return found


@gluon.jit
def inverse_of(L):
    """(I - L)^-1 of blocks and its transpose, of L below its diagonal, by doubling: see `triton.tril`."""
    i, j = places(OF_BLOCK, BLOCK)
    L = gl.where(i > j, L, 0.0)
    L_t = gl.convert_layout(gl.permute(L, (0, 2, 1)), OF_BLOCK)
    eye = gl.where(i == j, zeros() + 1.0, 0.0)
    X = gl.where((i ^ j) == 1, L, eye)
    X_t = gl.where((i ^ j) == 1, L_t, eye)
    for level in gl.static_range(1, 4):
        is_across = ((i ^ j) >> level) == 1
        XL = times(X, gl.where(is_across, L_t, 0.0), zeros())
        XL_t = times(X_t, gl.where(is_across, L, 0.0), zeros())
        X, X_t = times(XL, X_t, X), times(XL_t, X, X_t)
    return X, X_t


@gluon.jit
def store_row(A_inv_ptr, tile, is_there, X, ROW: gl.constexpr, PARTS: gl.constexpr):
    """A row of blocks of A_inv less 1. The last of X is on the diagonal, where what rounding took goes.

    In two parts each tile is followed by what rounding took of it.
    """
    i, j = places(OF_BLOCK, BLOCK)
    place = A_inv_ptr + (of_tiles(tile.to(gl.int64), OF_BLOCK) * (PARTS * C * C) + (i + ROW * BLOCK) * C + j)
    mask = of_tiles(is_there, OF_BLOCK)
    ones = gl.convert_layout(gl.zeros((W, BLOCK, BLOCK), gl.bfloat16, OF_BLOCK) + 1.0, RIGHT)
    last = gl.where(i > j, X[ROW], 0.0)
    total, kept = last, mma_v2(left(last.to(gl.bfloat16)), ones, zeros())
    for n in gl.static_range(ROW):
        block = X[n].to(gl.bfloat16)
        total += X[n]
        kept = mma_v2(left(block), ones, kept)
        gl.store(place + n * BLOCK, block, mask=mask)
    if PARTS == 1:
        lost = gl.expand_dims(gl.sum(total, 2), 2) - kept
        last = gl.where(i == j, lost, last)
    gl.store(place + ROW * BLOCK, last.to(gl.bfloat16), mask=mask)
    if PARTS == 2:
        for n in gl.static_range(ROW + 1):
            x = X[n] if n < ROW else last
            rest = (x - x.to(gl.bfloat16).to(gl.float32)).to(gl.bfloat16)
            gl.store(place + (C * C + n * BLOCK), rest, mask=mask)
    i, j = places(CLEARED, BLOCK)
    place = A_inv_ptr + (of_tiles(tile.to(gl.int64), CLEARED) * (PARTS * C * C) + (i + ROW * BLOCK) * C + j)
    for part in gl.static_range(PARTS):
        for n in gl.static_range(ROW + 1, BLOCKS):
            nothing = gl.zeros((W, BLOCK, BLOCK), gl.bfloat16, CLEARED)
            gl.store(place + (part * C * C + n * BLOCK), nothing, mask=of_tiles(is_there, CLEARED))


@kernel
def solve_kernel(
    q_ptr, k_ptr, table_ptr, factors_ptr, A_inv_ptr, q_rstd_ptr, k_rstd_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, T, HV, ratio, chunks_per_row, count,
    UNIT: gl.constexpr, NORM: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    x_s = gl.allocate_shared_memory(gl.bfloat16, [W, C, D], SHARED)
    gdc_launch_dependents()
    gdc_wait()
    number = gl.program_id(0) * W + gl.arange(0, W, gl.SliceLayout(1, DOWN))
    tile = gl.minimum(number, count - 1)
    chunk = tile // HV
    head = tile % HV // ratio
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
        is_there = length > 0
        columns = ()
        for n in gl.static_range(BLOCKS):
            columns = columns + (gl.load(places_of(factors_ptr, tile, FROM, n, ACROSS)),)
        if NORM:
            load(x_s, q_ptr, row, first, head, length, q_b, q_t, q_h, UNIT, D)
            q_rstd = rstds_of(x_s, length, D)
        load(x_s, k_ptr, row, first, head, length, k_b, k_t, k_h, UNIT, D)
        if NORM:
            k_rstd = rstds_of(x_s, length, D)
            # no lane of the warp has FROM still to read
            barrier()
            scale(factors_ptr, tile, READ, q_rstd, is_there)
            scale(factors_ptr, tile, TO, q_rstd, is_there)
            scale(factors_ptr, tile, OUT, k_rstd, is_there)
            scale(factors_ptr, tile, INTO, k_rstd, is_there)
            scale(factors_ptr, tile, FROM, k_rstd, is_there)
            raw = columns
            columns = ()
            for n in gl.static_range(BLOCKS):
                columns = columns + (raw[n] * gl.convert_layout(k_rstd[n], ACROSS),)
            if q_rstd_ptr is not None:
                token = gl.arange(0, BLOCK, gl.SliceLayout(0, DOWN))[None, :]
                start = of_rows(row.to(gl.int64) * T + first, DOWN)
                is_first = of_rows(tile % HV % ratio == 0, DOWN)
                for n in gl.static_range(BLOCKS):
                    place = (start + token + n * BLOCK) * (HV // ratio) + of_rows(head, DOWN)
                    mask = is_first & (token + n * BLOCK < of_rows(length, DOWN))
                    gl.store(q_rstd_ptr + place, q_rstd[n], mask=mask)
                    gl.store(k_rstd_ptr + place, k_rstd[n], mask=mask)
        # blocks left of the diagonal and on it, row by row
        X_t = ()
        for a in gl.static_range(BLOCKS):
            kk = products(x_s, a, 0, D)
            high = gl.expand_dims(gl.load(places_of(factors_ptr, tile, HIGH, a, DOWN)), 2)
            gain = -gl.load(places_of(factors_ptr, tile, GAIN, a, DOWN))
            if NORM:
                gain = gain * k_rstd[a]
            L = ()
            for n in gl.static_range(a + 1):
                high_j = gl.load(places_of(factors_ptr, tile, HIGH, n, ACROSS))
                D_ij = gl.exp2(high - gl.expand_dims(high_j, 1))
                L = L + (kk[n] * D_ij * gl.expand_dims(gain, 2) * gl.expand_dims(columns[n], 1),)
            X_aa, X_aa_t = inverse_of(L[a])
            X = ()
            more = ()
            for n in gl.static_range(a):
                T_an = zeros()
                for m in gl.static_range(n, a):
                    T_an = times(X_t[m * (m + 1) // 2 + n], L[m], T_an)
                X = X + (times(X_aa, T_an, zeros()),)
                if a < BLOCKS - 1:
                    more = more + (times(T_an, X_aa, zeros()),)
            store_row(A_inv_ptr, tile, is_there, X + (X_aa,), a, 2 * C // D)
            X_t = X_t + more + (X_aa_t,)
