"""Compute A of a chunk in blocks of 16 x 16, from the blocks of k k^T in registers and rows of factors.

    A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j

If the chunk's decay fits fp32, e^(G_i - G_j) = e^(G_i - G_C) e^(G_C - G_j) is a product of two factors of
tokens. Otherwise, and with l2norm, it takes one exponential a pair.
"""

# tuples of blocks grow as the kernel is traced
# mypy: disable-error-code="assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import BETA, BOX, FROM, GAIN, OUT
from gdn.backends.hopper.inverse import BLOCK, BLOCKS, OF_BLOCK, places, zeros


@gluon.jit
def down(f_s, FACTOR: gl.constexpr, n: gl.constexpr):
    """Load a factor of block n's 16 tokens from shared memory as a column [16, 1]."""
    return f_s.index(FACTOR - BOX).permute((1, 0)).slice(n * BLOCK, BLOCK, 0).load(OF_BLOCK)


@gluon.jit
def across(f_s, FACTOR: gl.constexpr, n: gl.constexpr):
    """Load a factor of block n's 16 tokens from shared memory as a row [1, 16]."""
    return f_s.index(FACTOR - BOX).slice(n * BLOCK, BLOCK, 1).load(OF_BLOCK)


@gluon.jit
def strength_of(f_s, gain_s, a: gl.constexpr, n: gl.constexpr, IS_NEAR: gl.constexpr):
    """Return the factors that turn block (a, n) of k k^T into -A; above the diagonal of a == n, into -A^T."""
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
            # above the diagonal A^T: the exponent with i and j exchanged, so one exp2 serves both triangles
            power = gl.exp2(gl.where(i > j, row - column, column - row))
            return power * gl.where(i > j, gain, across(gain_s, GAIN, a))
        return gl.exp2(row - column) * gain


@gluon.jit
def coupled(kk, f_s, gain_s, IS_NEAR: gl.constexpr):
    """Return blocks of L = -A below the diagonal (fp16), on it, on it transposed; sums of (beta_i A_ij)^2."""
    i, j = places()
    L = ()
    L_aa = ()
    L_aa_t = ()
    # element by element in registers; `solve` reduces it over the warp once
    total = zeros()
    for a in gl.static_range(BLOCKS):
        beta = down(f_s, BETA, a)
        squares = zeros()
        for n in gl.static_range(a):
            x = kk[a * (a + 1) // 2 + n] * strength_of(f_s, gain_s, a, n, IS_NEAR)
            squares += x * x
            L = L + (x.to(gl.float16),)
        # k k^T is symmetric: the registers above the diagonal give L^T without a transpose in shared memory
        x = kk[a * (a + 3) // 2] * strength_of(f_s, gain_s, a, a, IS_NEAR)
        L_aa = L_aa + (gl.where(i > j, x, 0.0),)
        L_aa_t = L_aa_t + (gl.where(i < j, x, 0.0),)
        squares += L_aa[a] * L_aa[a]
        total += squares * (beta * beta)
    return L, L_aa, L_aa_t, total
