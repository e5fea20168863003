"""X = (I - L)^-1 of tiles of 64 x 64 with L below the diagonal, a warp a tile, by blocks of 16 x 16.

An accumulator is, lane by lane, the left operand of what it holds and the right operand of its transpose: of
two of them A B^T (`by`) takes nothing from memory. So blocks are had with their transposes where these are
wanted: on the diagonal by doubling, two blocks at once, for which there are registers; below it, row by row,

    T_an^T = sum over m from n to a - 1 of X_mn^T L_am^T;   X_an = X_aa T_an;   X_an^T = T_an^T X_aa^T

Operands are in fp16, which is as exact as tf32 and has room for |L| < 65504: a recurrence with larger ones
grows by as much from token to token.
"""

# tuples of blocks grow as the kernel is traced
# mypy: disable-error-code="assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.gluon import mma_v2

C = gl.constexpr(64)  # tokens of a chunk
BLOCK = gl.constexpr(16)  # tokens of a block
BLOCKS = gl.constexpr(4)  # blocks down a tile

OF_BLOCK = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, OF_BLOCK.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, OF_BLOCK.value, 2))


@gluon.jit
def places():
    """Rows [16, 1] and columns [1, 16] of a block."""
    i = gl.arange(0, BLOCK, gl.SliceLayout(1, OF_BLOCK))
    j = gl.arange(0, BLOCK, gl.SliceLayout(0, OF_BLOCK))
    return i[:, None], j[None, :]


@gluon.jit
def zeros():
    return gl.zeros((BLOCK, BLOCK), gl.float32, OF_BLOCK)


@gluon.jit
def left(x):
    return gl.convert_layout(x, LEFT)


@gluon.jit
def by(a, b, acc):
    """acc + a b^T."""
    right = gl.convert_layout(gl.permute(b.to(gl.float16), (1, 0)), RIGHT)
    return mma_v2(left(a.to(gl.float16)), right, acc)


@gluon.jit
def on_diagonal(L, L_t):
    """X and X^T of some blocks on the diagonal from L and L^T."""
    i, j = places()
    eye = gl.where(i == j, zeros() + 1.0, 0.0)
    X = ()
    X_t = ()
    for a in gl.static_range(len(L)):
        X = X + (gl.where((i ^ j) == 1, L[a], eye),)
        X_t = X_t + (gl.where((i ^ j) == 1, L_t[a], eye),)
    for level in gl.static_range(1, 4):
        # X has blocks of 2^level along its diagonal: of X L only those beside them are wanted
        is_across = ((i ^ j) >> level) == 1
        more = ()
        more_t = ()
        for a in gl.static_range(len(L)):
            XL = gl.where(is_across, by(X[a], L_t[a], zeros()), 0.0)
            more = more + (by(XL, X_t[a], X[a]),)
            more_t = more_t + (by(X_t[a], XL, X_t[a]),)
        X = more
        X_t = more_t
    return X, X_t


@gluon.jit
def inverse(L, L_aa, L_aa_t):
    """Blocks of X on and below the diagonal, row by row; of L those below it."""
    upper, upper_t = on_diagonal(L_aa[:2], L_aa_t[:2])
    lower, lower_t = on_diagonal(L_aa[2:], L_aa_t[2:])
    X_aa = upper + lower
    X_aa_t = upper_t + lower_t
    X = (X_aa[0],)
    X_t = (X_aa_t[0],)
    for a in gl.static_range(1, BLOCKS):
        for n in gl.static_range(a):
            T_t = zeros()
            for m in gl.static_range(n, a):
                T_t = by(X_t[m * (m + 1) // 2 + n], L[a * (a - 1) // 2 + m], T_t)
            X = X + (by(X_aa[a], T_t, zeros()),)
            X_t = X_t + (by(T_t, X_aa[a], zeros()),)
        X = X + (X_aa[a],)
        X_t = X_t + (X_aa_t[a],)
    return X
