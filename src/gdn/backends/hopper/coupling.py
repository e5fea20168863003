"""What couples a tile's tokens, A, in blocks of 16 by 16 from those of k k^T and rows of factors.

    A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j

Where the chunk is near, e^(G_i - G_j) = e^(G_i - G_C) e^(G_C - G_j), two factors of tokens; else, or where
norms are to be taken, an exponential a pair.
"""

# tuples of blocks grow as the kernel is traced
# mypy: disable-error-code="assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import BETA, BOX, FROM, GAIN, OUT
from gdn.backends.hopper.inverse import BLOCK, BLOCKS, OF_BLOCK, places, zeros


@gluon.jit
def down(f_s, FACTOR: gl.constexpr, n: gl.constexpr):
    """Of block n's rows in a row of the factors: [16, 1]."""
    return f_s.index(FACTOR - BOX).permute((1, 0)).slice(n * BLOCK, BLOCK, 0).load(OF_BLOCK)


@gluon.jit
def across(f_s, FACTOR: gl.constexpr, n: gl.constexpr):
    """Of block n's columns: [1, 16]."""
    return f_s.index(FACTOR - BOX).slice(n * BLOCK, BLOCK, 1).load(OF_BLOCK)


@gluon.jit
def strength_of(f_s, gain_s, a: gl.constexpr, n: gl.constexpr, IS_NEAR: gl.constexpr):
    """What block n of row a of k k^T is to be multiplied with for -A; on the diagonal above it -A^T."""
    i, j = places()
    if IS_NEAR:
        # no exponential: e^(G_i - G_C) e^(G_C - G_j)
        below = down(gain_s, GAIN, a) * across(f_s, OUT, n)
        if a == n:
            above = across(gain_s, GAIN, a) * down(f_s, OUT, a)
            return gl.where(i > j, below, above)
        return below
    else:
        row = down(f_s, FROM, a)
        column = across(f_s, FROM, n)
        gain = down(gain_s, GAIN, a)
        if a == n:
            # by the same powers
            power = gl.exp2(gl.where(i > j, row - column, column - row))
            return power * gl.where(i > j, gain, across(gain_s, GAIN, a))
        return gl.exp2(row - column) * gain


@gluon.jit
def coupled(kk, f_s, gain_s, IS_NEAR: gl.constexpr):
    """Blocks of L = -A below the diagonal, in fp16, and on it, their transposes, sums of (beta_i A_ij)^2."""
    i, j = places()
    L = ()
    L_aa = ()
    L_aa_t = ()
    total = zeros()
    for a in gl.static_range(BLOCKS):
        beta = down(f_s, BETA, a)
        squares = zeros()
        for n in gl.static_range(a):
            x = kk[a * (a + 1) // 2 + n] * strength_of(f_s, gain_s, a, n, IS_NEAR)
            squares += x * x
            L = L + (x.to(gl.float16),)
        # k k^T is its transpose: above the diagonal L^T
        x = kk[a * (a + 3) // 2] * strength_of(f_s, gain_s, a, a, IS_NEAR)
        L_aa = L_aa + (gl.where(i > j, x, 0.0),)
        L_aa_t = L_aa_t + (gl.where(i < j, x, 0.0),)
        squares += L_aa[a] * L_aa[a]
        total += squares * (beta * beta)
    return L, L_aa, L_aa_t, total
