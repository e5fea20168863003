"""Per chunk and value head, the inverse of what couples its tokens, and the norms put into its factors.

    A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j;     A_inv = (I + A)^-1, stored less 1

As `triton.prepare`, but without P, and with products in fp16, which is as exact as tf32 and has room for
|A| < 65504: a recurrence with larger ones grows by as much from token to token. With l2norm raw k go through
the product, whose diagonal has the squares of their norms, and OUT, INTO, FROM of `factors` are multiplied
with k_rstd, READ and TO with q_rstd. For walks that do not make A_inv themselves.

Bytes per token and value head at K = V = 128 in bf16, HV = H: k 256, A_inv 128, factors 12: 396; with l2norm
300 more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import FROM, GAIN, HIGH, INTO, OUT, READ, ROWS, TO
from gdn.backends.hopper.gluon import (
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    kernel,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from gdn.backends.hopper.inverse import OF_TOKENS, C, inverse, rounded

D = gl.constexpr(128)
ACROSS = gl.constexpr(gl.SliceLayout(0, OF_TOKENS.value))
DOWN = gl.constexpr(gl.SliceLayout(1, OF_TOKENS.value))


@gluon.jit
def product(x_s):
    """x x^T of a tile in shared memory."""
    x = x_s.reshape([C, D])
    zeros = gl.zeros((C, C), gl.float32, OF_TOKENS)
    found = warpgroup_mma(x, x.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(found,))


@gluon.jit
def rstd_of(xx, length):
    """1 / norm of rows from their products; 0 past the sequence's end, where anything may lie."""
    i = gl.arange(0, C, DOWN)
    total = gl.sum(gl.where(i[:, None] == gl.arange(0, C, ACROSS)[None, :], xx, 0.0), 1)
    return gl.where(i < length, gl.rsqrt(total + 1e-6), 0.0)


@gluon.jit
def scale_row(factors, ROW: gl.constexpr, x):
    place = factors + ROW * C + gl.arange(0, C, DOWN)
    gl.store(place, gl.load(place) * x)


@kernel
def solve_kernel(
    q_d, k_d, A_d, table_ptr, factors_ptr, q_rstd_ptr, k_rstd_ptr, T, HV, ratio, chunks_per_row,
):  # fmt: skip
    k_s = gl.allocate_shared_memory(gl.bfloat16, [1, C, 1, D], k_d.layout)
    tile_s = gl.allocate_shared_memory(gl.float16, [3, C, C], A_d.layout)
    A_s = gl.allocate_shared_memory(gl.bfloat16, [C, C], A_d.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()
    chunk = gl.program_id(0) // HV
    head = gl.program_id(0) % HV
    if table_ptr is None:
        row = chunk // chunks_per_row
        first = chunk % chunks_per_row * C
        length = gl.minimum(T - first, C)
    else:
        row = chunk * 0
        first = gl.load(table_ptr + 2 * chunk)
        length = gl.load(table_ptr + 2 * chunk + 1)
    if length > 0:
        mbarrier.expect(ready.index(0), k_d.block_type.nbytes)
        tma_load(k_d, [row, first, head // ratio, 0], ready.index(0), k_s)
        i, j = gl.arange(0, C, DOWN), gl.arange(0, C, ACROSS)
        tile = chunk * HV + head
        factors = factors_ptr + tile.to(gl.int64) * (ROWS * C)
        D_ij = gl.exp2(gl.load(factors + HIGH * C + i)[:, None] - gl.load(factors + HIGH * C + j)[None, :])
        columns = gl.load(factors + FROM * C + i)
        rows = gl.load(factors + GAIN * C + i)
        mbarrier.wait(ready.index(0), 0)
        kk = product(k_s)
        if q_d is not None:
            k_rstd = rstd_of(kk, length)
            mbarrier.expect(ready.index(1), q_d.block_type.nbytes)
            tma_load(q_d, [row, first, head // ratio, 0], ready.index(1), k_s)
            columns = columns * k_rstd
            rows = rows * k_rstd
            gl.store(factors + FROM * C + i, columns)
            scale_row(factors, OUT, k_rstd)
            scale_row(factors, INTO, k_rstd)
            mbarrier.wait(ready.index(1), 0)
            q_rstd = rstd_of(product(k_s), length)
            scale_row(factors, READ, q_rstd)
            scale_row(factors, TO, q_rstd)
            if q_rstd_ptr is not None:
                place = (row.to(gl.int64) * T + first + i) * (HV // ratio) + head // ratio
                is_mine = (i < length) & (head % ratio == 0)
                gl.store(q_rstd_ptr + place, q_rstd, mask=is_mine)
                gl.store(k_rstd_ptr + place, k_rstd, mask=is_mine)
        A = kk * D_ij * gl.convert_layout(columns, ACROSS)[None, :] * rows[:, None]
        A = gl.where((i < length)[:, None], A, 0.0)
        A_s.store(rounded(inverse(A, tile_s)))
        fence_async_shared()
        tma_store(A_d, [tile * C, 0], A_s)
        tma_store_wait(0)
