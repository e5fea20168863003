"""Compute A of a chunk in blocks of 16 x 16, from the blocks of k k^T in registers and rows of factors.

    A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j

If the chunk's decay fits fp32, e^(G_i - G_j) = e^(G_i - G_C) e^(G_C - G_j) is a product of two factors of
tokens. Otherwise, and with l2norm, it takes one exponential a pair.
"""

# tuples of blocks grow as the kernel is traced
# mypy: disable-error-code="assignment"
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import BETA, LOG2_K, UPDATE_DECAY
from gdn.backends.hopper.gluon import jit
from gdn.backends.hopper.solve.decays import A_FACTOR
from gdn.backends.hopper.solve.inverse import BLOCKS, block_indices, zero_block


@jit
def block_factors(factors, a: gl.constexpr, n: gl.constexpr, HAS_FP32_DECAY: gl.constexpr):
    """Return the factors that turn block (a, n) of k k^T into -A; above the diagonal of a == n, into -A^T."""
    i, j = block_indices()
    if HAS_FP32_DECAY:
        # no exponential: e^(G_i - G_C) e^(G_C - G_j)
        below = factors.column(A_FACTOR, a) * factors.row(UPDATE_DECAY, n)
        if a == n:
            above = factors.row(A_FACTOR, a) * factors.column(UPDATE_DECAY, a)
            return gl.where(i > j, below, above)
        return below
    else:
        row = factors.column(LOG2_K, a)
        column = factors.row(LOG2_K, n)
        a_factor = factors.column(A_FACTOR, a)
        if a == n:
            # above the diagonal A^T: the exponent with i and j exchanged, so one exp2 serves both triangles
            power = gl.exp2(gl.where(i > j, row - column, column - row))
            return power * gl.where(i > j, a_factor, factors.row(A_FACTOR, a))
        return gl.exp2(row - column) * a_factor


@jit
def compute_L(kk, factors, HAS_FP32_DECAY: gl.constexpr):
    """Return blocks of L = -A below the diagonal (fp16), on it, on it transposed; sums of (beta_i A_ij)^2."""
    i, j = block_indices()
    L = ()
    L_aa = ()
    L_aa_t = ()
    # element by element in registers; `solve` reduces it over the warp once
    total = zero_block()
    for a in gl.static_range(BLOCKS):
        beta = factors.column(BETA, a)
        squares = zero_block()
        for n in gl.static_range(a):
            x = kk[a * (a + 1) // 2 + n] * block_factors(factors, a, n, HAS_FP32_DECAY)
            squares += x * x
            L = L + (x.to(gl.float16),)
        # k k^T is symmetric: the registers above the diagonal give L^T without a transpose in shared memory
        x = kk[a * (a + 3) // 2] * block_factors(factors, a, a, HAS_FP32_DECAY)
        L_aa = L_aa + (gl.where(i > j, x, 0.0),)
        L_aa_t = L_aa_t + (gl.where(i < j, x, 0.0),)
        squares += L_aa[a] * L_aa[a]
        total += squares * (beta * beta)
    return L, L_aa, L_aa_t, total
