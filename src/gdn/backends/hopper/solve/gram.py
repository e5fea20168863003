"""Multiply a chunk's rows with themselves: the blocks of x x^T, and the l2 norms from their diagonal."""

# tuples of blocks grow as the kernel is traced
# mypy: disable-error-code="assignment,attr-defined,var-annotated"
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import jit, mma_v2
from gdn.backends.hopper.solve.inverse import BLOCK, BLOCK_A, BLOCK_B, BLOCKS, block_indices, zero_block
from gdn.backends.hopper.solve.tiles import TILE_ROWS


@jit
def zero_blocks(COUNT: gl.constexpr):
    """Return COUNT accumulators of zeros in registers."""
    blocks = ()
    for _ in gl.static_range(COUNT):
        blocks = blocks + (zero_block(),)
    return blocks


@jit
def add_gram_blocks(x_s, length, total, ONLY_DIAGONAL: gl.constexpr):
    """Add blocks of x x^T to accumulators `total`: on the diagonal, unless ONLY_DIAGONAL also below it."""
    if length < C:
        # tokens past the end are another sequence's and may be NaN: zero them in shared memory
        i = gl.arange(0, C, gl.SliceLayout(1, TILE_ROWS))[:, None]
        x_s.store(gl.where(i < length, x_s.load(TILE_ROWS), 0.0))
    for step in gl.static_range(C // BLOCK):
        keys = x_s.slice(step * BLOCK, BLOCK, 1)
        x = ()
        x_t = ()
        for n in gl.static_range(BLOCKS):
            # the left operand holds the same values in other pairs of registers: loading the right operand
            # from shared memory is cheaper than exchanging registers
            x = x + (keys.slice(n * BLOCK, BLOCK, 0).load(BLOCK_A),)
            x_t = x_t + (keys.slice(n * BLOCK, BLOCK, 0).permute((1, 0)).load(BLOCK_B),)
        more = ()
        for a in gl.static_range(BLOCKS):
            for n in gl.static_range(a if ONLY_DIAGONAL else 0, a + 1):
                more = more + (mma_v2(x[a], x_t[n], total[len(more)]),)
        total = more
    return total


@jit
def store_rstd(xx, n: gl.constexpr, factors, FACTOR: gl.constexpr):
    """Store 1 / norm of 16 rows of x to shared memory; xx of x x^T has their squares on its diagonal."""
    i, j = block_indices()
    rstd = gl.rsqrt(gl.expand_dims(gl.sum(gl.where(i == j, xx, 0.0), 1), 1) + 1e-6)
    factors.column_view(FACTOR, n).store(rstd)
