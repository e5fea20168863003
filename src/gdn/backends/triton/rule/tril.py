"""Invert a chunk's unit lower triangular matrix in registers by recursive doubling.

If X inverts the b x b diagonal blocks of I + A, and L is A below them within each 2b x 2b block, X - X L X
inverts the 2b x 2b blocks. No power of A is formed: with identical keys and beta = 2 every entry below A's
diagonal is 2, its powers overflow, and the inverse still has entries of at most 2.
"""

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.lib import dot


@jit
def inverse(A, PRECISION: tl.constexpr):
    """Return (I + A)^-1 of A [64, 64] in fp32; only entries below the diagonal are read.

    PRECISION is that of the MMAs: tf32 (error 1e-3 for correlated keys, as large as that of rounding the
    result to bf16), tf32x3 or ieee. Each of 4 warps inverts a 16 x 16 block without moving data; two merges
    follow. Five doublings of the whole tile would take 20 times the multiplications.
    """
    return inverse_of_blocks(_block(A, 0), _block(A, 1), _corner(A), PRECISION)


@jit
def inverse_of_blocks(D, E, F, PRECISION: tl.constexpr):
    """Return (I + A)^-1 [64, 64] from blocks of A, for callers that have them separately.

    D [4, 16, 16]: the diagonal blocks, read below their diagonals only. E [4, 16, 16]: the blocks left of
    these; blocks 0 and 2 may hold anything. F [32, 32]: the lower left quarter.
    """
    X, X_t = _diagonal(D, PRECISION)
    # transposed E X of the block before: every operand but `before` is in the registers where it is needed
    U_t = _batched(_before(X_t), E, PRECISION)
    X = _merge(X, _batched(X, -U_t, PRECISION))
    upper, lower = tl.split(tl.permute(X, (1, 2, 0)))
    Y = _product(_product(lower, F, PRECISION), upper, PRECISION)
    return _join(X, -Y)


@jit
def _diagonal(D, PRECISION: tl.constexpr):
    """Return (I + D)^-1 of blocks D [4, 16, 16], and its transpose.

    With both, the operands of each MMA are accumulators in their registers: a right operand is the transpose.
    """
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    D = tl.where(i > j, -D, 0.0)
    D_t = tl.permute(D, (0, 2, 1))
    eye = tl.where(i == j, 1.0, 0.0)
    X = tl.where((i ^ j) == 1, D, eye)
    X_t = tl.where((i ^ j) == 1, D_t, eye)
    # three doublings: 2, 4 and 8 rows to 16
    for level in tl.static_range(1, 4):
        is_across = (i ^ j) >> level == 1
        XL = _batched(X, tl.where(is_across, D_t, 0.0), PRECISION)
        XL_t = _batched(X_t, tl.where(is_across, D, 0.0), PRECISION)
        X, X_t = _batched(XL, X_t, PRECISION, X), _batched(XL_t, X, PRECISION, X_t)
    return X, X_t


@jit
def _block(A, SHIFT: tl.constexpr):
    """Return [4, 16, 16]: blocks (n, n - SHIFT) of A [64, 64]; zero if there is none."""
    n = tl.arange(0, 4)
    is_block = n[:, None, None, None] == n[None, None, :, None] + SHIFT
    return tl.sum(tl.where(is_block, tl.reshape(A, (4, 16, 4, 16)), 0.0), 2)


@jit
def _corner(A):
    """Return [32, 32]: the lower left quarter of A [64, 64]."""
    left, _ = tl.split(tl.permute(tl.reshape(A, (64, 2, 32)), (0, 2, 1)))
    _, lower = tl.split(tl.permute(tl.reshape(left, (2, 32, 32)), (1, 2, 0)))
    return lower


@jit
def _before(X):
    """Return [4, 16, 16]: blocks 0, 0, 2, 2 of X [4, 16, 16]."""
    even, _ = tl.split(tl.permute(tl.reshape(X, (2, 2, 16, 16)), (0, 2, 3, 1)))
    twice = tl.broadcast_to(tl.reshape(even, (2, 1, 16, 16)), (2, 2, 16, 16))
    return tl.reshape(twice, (4, 16, 16))


@jit
def _merge(X, Y):
    """Return [2, 32, 32]: diagonal blocks X [4, 16, 16], and below them the odd blocks of Y [4, 16, 16]."""
    n = tl.arange(0, 2)
    row = n[None, :, None, None, None]
    column = n[None, None, None, :, None]
    # selected by masks: no data moves between warps
    X = tl.reshape(X, (2, 2, 16, 1, 16))
    Y = tl.reshape(Y, (2, 2, 16, 1, 16))
    return tl.reshape(tl.where(row == column, X, tl.where(row > column, Y, 0.0)), (2, 32, 32))


@jit
def _join(D, Y):
    """Return [64, 64]: diagonal blocks D [2, 32, 32], and below them Y [32, 32]."""
    n = tl.arange(0, 2)
    row = n[:, None, None, None]
    column = n[None, None, :, None]
    D = tl.reshape(D, (2, 32, 1, 32))
    Y = tl.reshape(Y, (1, 32, 1, 32))
    return tl.reshape(tl.where(row == column, D, tl.where(row > column, Y, 0.0)), (64, 64))


@jit
def _batched(a, b_t, PRECISION: tl.constexpr, acc=None):
    """Return acc + a b for a, b^T [4, 16, 16]; each warp has a block."""
    b = tl.permute(b_t, (0, 2, 1))
    # an accumulator has columns 2 l, 2 l + 1 in the registers where a tf32 operand has l, l + 4: sum over K
    # in the accumulator's order, so that no register moves between lanes
    a = tl.reshape(tl.permute(tl.reshape(a, (4, 16, 2, 4, 2)), (0, 1, 2, 4, 3)), (4, 16, 16))
    b = tl.reshape(tl.permute(tl.reshape(b, (4, 2, 4, 2, 16)), (0, 1, 3, 2, 4)), (4, 16, 16))
    return dot(a, b, acc, PRECISION)


@jit
def _product(a, b, PRECISION: tl.constexpr):
    """Return a b for a, b [32, 32]; each warp computes a quarter; Triton would compute each half twice."""
    # quarters as a batch of 4, one per warp: rows and columns are duplicated through shared memory
    rows = tl.broadcast_to(tl.reshape(a, (2, 1, 16, 32)), (2, 2, 16, 32))
    a = tl.reshape(rows, (4, 16, 32))
    columns = tl.reshape(tl.permute(tl.reshape(b, (32, 2, 16)), (1, 0, 2)), (1, 2, 32, 16))
    b = tl.reshape(tl.broadcast_to(columns, (2, 2, 32, 16)), (4, 32, 16))
    # the order of the sum over K as in `_batched`
    a = tl.reshape(tl.permute(tl.reshape(a, (4, 16, 4, 4, 2)), (0, 1, 2, 4, 3)), (4, 16, 32))
    b = tl.reshape(tl.permute(tl.reshape(b, (4, 4, 4, 2, 16)), (0, 1, 3, 2, 4)), (4, 32, 16))
    quarters = dot(a, b, None, PRECISION)
    return tl.reshape(tl.permute(tl.reshape(quarters, (2, 2, 16, 16)), (0, 2, 1, 3)), (32, 32))
