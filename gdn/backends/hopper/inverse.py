"""The inverse of a chunk's unit lower triangular matrix beside the walk, by the four warps of a partition.

    I + A = [[X^-1, 0], [L, Y^-1]]  ->  [[X, 0], [-Y L X, Y]]

Diagonal blocks of 16 by recursive doubling, a warp each, in its registers: see `triton.tril`. Then two merges
of the whole tile, X <- X - X L X, with L what A has between the blocks that are merged, by products in fp16
over shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.gluon import fence_async_shared, mma_v2, warpgroup_mma, warpgroup_mma_wait

C = gl.constexpr(64)
OF_TOKENS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, OF_TOKENS.value, 2))
# a block of 16 x 16 for each warp
OF_BLOCKS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
BLOCK_LEFT = gl.constexpr(gl.DotOperandLayout(0, OF_BLOCKS.value, 2))
BLOCK_RIGHT = gl.constexpr(gl.DotOperandLayout(1, OF_BLOCKS.value, 2))


@gluon.jit
def _times(a, b_t, acc):
    """acc + a b of blocks, with b^T: both operands lie as products leave them."""
    b = gl.permute(b_t, (0, 2, 1))
    a = gl.convert_layout(a.to(gl.float16), BLOCK_LEFT)
    return mma_v2(a, gl.convert_layout(b.to(gl.float16), BLOCK_RIGHT), acc)


@gluon.jit
def _inverse_of_blocks(A):
    """(I + A)^-1 of blocks A [4, 16, 16], read below their diagonals only."""
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, OF_BLOCKS)))[None, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, OF_BLOCKS)))[None, None, :]
    zeros = gl.zeros((4, 16, 16), gl.float32, OF_BLOCKS)
    A = gl.where(i > j, -A, 0.0)
    A_t = gl.convert_layout(gl.permute(A, (0, 2, 1)), OF_BLOCKS)
    eye = gl.where(i == j, zeros + 1.0, 0.0)
    X = gl.where((i ^ j) == 1, A, eye)
    X_t = gl.where((i ^ j) == 1, A_t, eye)
    for level in gl.static_range(1, 4):
        is_across = ((i ^ j) >> level) == 1
        XL = _times(X, gl.where(is_across, A_t, 0.0), zeros)
        XL_t = _times(X_t, gl.where(is_across, A, 0.0), zeros)
        X, X_t = _times(XL, X_t, X), _times(XL_t, X, X_t)
    return X


@gluon.jit
def _merge(X, SIZE: gl.constexpr, tile_s):
    """X - X L X in fp16, where L is what A has between two blocks of X of this size; -A lies in tile_s.

    What comes to X is zero where X is not: their sum rounds nothing.
    """
    i = gl.arange(0, C, gl.SliceLayout(1, LEFT))[:, None] // SIZE
    j = gl.arange(0, C, gl.SliceLayout(0, LEFT))[None, :] // SIZE
    zeros = gl.zeros((C, C), gl.float32, OF_TOKENS)
    tile_s.index(1).store(X)
    fence_async_shared()
    L = tile_s.index(0).load(LEFT)
    L = gl.where((i == j + 1) & (j % 2 == 0), L, 0.0)
    LX = warpgroup_mma(L, tile_s.index(1), zeros, use_acc=False, is_async=True)
    LX = warpgroup_mma_wait(0, deps=(LX,))
    tile_s.index(2).store(LX.to(gl.float16))
    fence_async_shared()
    # read again, as registers are few
    left = tile_s.index(1).load(LEFT)
    XLX = warpgroup_mma(left, tile_s.index(2), zeros, use_acc=False, is_async=True)
    X = tile_s.index(1).load(OF_TOKENS)
    return X + warpgroup_mma_wait(0, deps=(XLX,)).to(gl.float16)


@gluon.jit
def inverse(A, tile_s):
    """(I + A)^-1 of A [64, 64] in fp32; above and on its diagonal A may hold anything. tile_s [3, 64, 64]."""
    i = gl.arange(0, C, gl.SliceLayout(1, OF_TOKENS))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, OF_TOKENS))[None, :]
    tile_s.index(0).store((-A).to(gl.float16))
    is_block = i // 16 == j // 16
    blocks = gl.reshape(gl.where(is_block, A, 0.0), (4, 16, 4, 16))
    X = _inverse_of_blocks(gl.convert_layout(gl.sum(blocks, 2), OF_BLOCKS)).to(gl.float16)
    X = gl.expand_dims(gl.convert_layout(X, gl.SliceLayout(2, blocks.type.layout)), 2)
    X = gl.where(gl.reshape(is_block, (4, 16, 4, 16)), X, gl.zeros_like(blocks).to(gl.float16))
    X = gl.convert_layout(gl.reshape(X, (C, C)), OF_TOKENS)
    return _merge(_merge(X, 16, tile_s), 32, tile_s).to(gl.float32)


@gluon.jit
def rounded(X):
    """A_inv less 1 in bf16, on its diagonal what rounding took from the row's sum: see `triton.prepare`."""
    i = gl.arange(0, C, gl.SliceLayout(1, OF_TOKENS))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, OF_TOKENS))[None, :]
    kept = ((X.to(gl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000).to(gl.float32, bitcast=True)
    lost = gl.sum(X - kept, 1)
    return gl.where(i == j, lost[:, None], kept).to(gl.bfloat16)
