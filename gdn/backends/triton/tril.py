"""The inverse of a chunk's unit lower triangular matrix, in registers, by recursive doubling.

Where X inverts the b x b diagonal blocks of I + A and L is A below them within each 2b x 2b block, X - X L X
inverts the 2b x 2b blocks. No power of A is formed: with identical keys and beta = 2 every entry below A's
diagonal is 2, its powers overflow, and the inverse still has entries of at most 2.
"""

import triton
import triton.language as tl

from gdn.backends.triton.lib import dot


@triton.jit
def inverse(A, PRECISION: tl.constexpr):
    """(I + A)^-1 of A [64, 64] in fp32; only what is below the diagonal is read, and nothing rounded."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    X = tl.where(i == j, 1.0, 0.0) - tl.where((i >> 1 == j >> 1) & (i > j), A, 0.0)
    for level in tl.static_range(1, 6):
        is_below = (i >> level + 1 == j >> level + 1) & (i >> level > j >> level)
        L = tl.where(is_below, A, 0.0)
        X -= dot(dot(X, L, None, PRECISION), X, None, PRECISION)
    return X
