"""Invert I - L for tiles of 64 x 64 with L strictly lower triangular: one warp a tile, blocks of 16 x 16.

An `mma` accumulator is, register by register, the left operand of its matrix and the right operand of its
transpose. So A B^T of two accumulators (`by`) needs no shared memory, and each block is computed together
with its transpose where that is needed. Blocks on the diagonal are inverted by doubling, two at once, as many
as the registers hold. Blocks below it follow by substitution, row by row:

    T_an^T = sum over m from n to a - 1 of X_mn^T L_am^T;   X_an = X_aa T_an;   X_an^T = T_an^T X_aa^T

Operands are fp16 with fp32 accumulation: fp16 has as many digits as tf32, and holds |L| < 65504. A recurrence
with a larger |L| grows by that factor from token to token.
"""

# tuples of blocks grow as the kernel is traced
# mypy: disable-error-code="assignment"
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.gluon import jit, mma_v2

BLOCK = gl.constexpr(16)  # tokens of a block
BLOCKS = gl.constexpr(4)  # blocks down a tile

# accumulator, left and right operand of the warp-level mma (m16n8k16 of 16 bits), in registers of one warp
ACC_BLOCK = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
BLOCK_A = gl.constexpr(gl.DotOperandLayout(0, ACC_BLOCK.value, 2))
BLOCK_B = gl.constexpr(gl.DotOperandLayout(1, ACC_BLOCK.value, 2))


@jit
def block_indices():
    """Return the row [16, 1] and column [1, 16] indices of a block."""
    i = gl.arange(0, BLOCK, gl.SliceLayout(1, ACC_BLOCK))
    j = gl.arange(0, BLOCK, gl.SliceLayout(0, ACC_BLOCK))
    return i[:, None], j[None, :]


@jit
def zero_block():
    return gl.zeros((BLOCK, BLOCK), gl.float32, ACC_BLOCK)


@jit
def as_a_operand(x):
    # no data moves: the registers of an accumulator are those of a left operand
    return gl.convert_layout(x, BLOCK_A)


@jit
def mma_transposed(a, b, acc):
    """Return acc + a b^T of three accumulators; the operands are rounded to fp16 in registers."""
    right = gl.convert_layout(gl.permute(b.to(gl.float16), (1, 0)), BLOCK_B)
    return mma_v2(as_a_operand(a.to(gl.float16)), right, acc)


@jit
def invert_diagonal(L, L_t):
    """Return X and X^T of blocks on the diagonal from L and L^T, by doubling from 2 x 2 to 16 x 16."""
    i, j = block_indices()
    eye = gl.where(i == j, zero_block() + 1.0, 0.0)
    X = ()
    X_t = ()
    for a in gl.static_range(len(L)):
        X = X + (gl.where((i ^ j) == 1, L[a], eye),)
        X_t = X_t + (gl.where((i ^ j) == 1, L_t[a], eye),)
    for level in gl.static_range(1, 4):
        # X inverts the diagonal blocks of size 2^level; of X L the blocks of that size beside them are needed
        is_across = ((i ^ j) >> level) == 1
        more = ()
        more_t = ()
        for a in gl.static_range(len(L)):
            XL = gl.where(is_across, mma_transposed(X[a], L_t[a], zero_block()), 0.0)
            more = more + (mma_transposed(XL, X_t[a], X[a]),)
            more_t = more_t + (mma_transposed(X_t[a], XL, X_t[a]),)
        X = more
        X_t = more_t
    return X, X_t


@jit
def invert(L, L_aa, L_aa_t):
    """Return the blocks of X on and below the diagonal, row by row; L has the blocks below it."""
    # two blocks at a time: their mma are independent, and the registers hold two with their transposes
    upper, upper_t = invert_diagonal(L_aa[:2], L_aa_t[:2])
    lower, lower_t = invert_diagonal(L_aa[2:], L_aa_t[2:])
    X_aa = upper + lower
    X_aa_t = upper_t + lower_t
    X = (X_aa[0],)
    X_t = (X_aa_t[0],)
    for a in gl.static_range(1, BLOCKS):
        for n in gl.static_range(a):
            T_t = zero_block()
            for m in gl.static_range(n, a):
                T_t = mma_transposed(X_t[m * (m + 1) // 2 + n], L[a * (a - 1) // 2 + m], T_t)
            X = X + (mma_transposed(X_aa[a], T_t, zero_block()),)
            X_t = X_t + (mma_transposed(T_t, X_aa[a], zero_block()),)
        X = X + (X_aa[a],)
        X_t = X_t + (X_aa_t[a],)
    return X
