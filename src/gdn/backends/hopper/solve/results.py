"""Test a chunk, and move A_inv or B from registers to shared memory, which leave by TMA stores."""

# tuples of blocks grow as the kernel is traced
# mypy: disable-error-code="assignment,attr-defined,var-annotated"
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import BETA, UPDATE_DECAY, WELL_CONDITIONED, C
from gdn.backends.hopper.gluon import jit, mma_v2
from gdn.backends.hopper.solve.inverse import (
    ACC_BLOCK,
    BLOCK,
    BLOCK_B,
    BLOCKS,
    as_a_operand,
    block_indices,
    zero_block,
)

# A chunk is well-conditioned up to this sum of (beta_i A_ij)^2, if its decay fits fp32: that leaves 2^35 of
# fp32's range for e^(G_i - G_C) <q, k> v. Random keys without decay have 3 with beta drawn from 0 to 1, and
# 16 with beta = 1.
MAX_SUM = gl.constexpr(12.0)


@jit
def store_flag(factors_ptr, total, has_fp32_decay, length):
    """Test if a chunk is well-conditioned, store that to HBM; `total` sums to that of (beta_i A_ij)^2."""
    total = gl.sum(gl.sum(total, 1), 0)
    # false for NaN
    is_well_conditioned = (total <= MAX_SUM) & has_fp32_decay & (length == C)
    gl.store(factors_ptr + WELL_CONDITIONED, is_well_conditioned.to(gl.float32))
    return is_well_conditioned


@jit
def rounding_of_rows(X):
    """Return what rounding to bf16 takes from the row sums of a row of blocks, to the 11 bits of fp16."""
    ones = gl.convert_layout(gl.zeros((BLOCK, BLOCK), gl.float16, ACC_BLOCK) + 1.0, BLOCK_B)
    minus = gl.convert_layout(gl.zeros((BLOCK, BLOCK), gl.bfloat16, ACC_BLOCK) - 1.0, BLOCK_B)
    # MMAs with ones and with minus ones sum the rows on the tensor cores, in the layout of the blocks
    sums = zero_block()
    for n in gl.static_range(len(X)):
        sums = mma_v2(as_a_operand(X[n].to(gl.float16)), ones, sums)
        sums = mma_v2(as_a_operand(X[n].to(gl.bfloat16)), minus, sums)
    return sums


@jit
def block_view(tile, a: gl.constexpr, n: gl.constexpr):
    """Return the view of block (a, n) of a tile in shared memory."""
    return tile.slice(a * BLOCK, BLOCK, 0).slice(n * BLOCK, BLOCK, 1)


@jit
def store_B(tile, X, factors):
    """Store B = e^(G_C - G_i) A_inv_ij beta_j from registers to shared memory in bf16."""
    betas = ()
    for n in gl.static_range(BLOCKS):
        betas = betas + (factors.row(BETA, n),)
    for a in gl.static_range(BLOCKS):
        decay = factors.column(UPDATE_DECAY, a)
        for n in gl.static_range(a + 1):
            x = X[a * (a + 1) // 2 + n] * (decay * betas[n])
            block_view(tile, a, n).store(x.to(gl.bfloat16))


@jit
def store_A_inv(tiles, X, PARTS: gl.constexpr):
    """Store A_inv - 1 to shared memory: bf16 with the rounding of row sums on the diagonal, or split bf16."""
    i, j = block_indices()
    for a in gl.static_range(BLOCKS):
        row = ()
        for n in gl.static_range(a):
            row = row + (X[a * (a + 1) // 2 + n],)
        row = row + (gl.where(i > j, X[a * (a + 3) // 2], 0.0),)
        if PARTS == 1:
            row = row[:a] + (gl.where(i == j, rounding_of_rows(row), row[a]),)
        for n in gl.static_range(a + 1):
            block = row[n]
            for part in gl.static_range(PARTS):
                block_view(tiles, part * BLOCKS + a, n).store(block.to(gl.bfloat16))
                # the second part is what bf16 took from the first
                block = block - block.to(gl.bfloat16).to(gl.float32)


@jit
def store_zeros(tiles, PARTS: gl.constexpr):
    """Store the zero blocks that the TMA stores read, to shared memory; with B, HBM has no place for them."""
    for a in gl.static_range(BLOCKS):
        for n in gl.static_range(a + 1, BLOCKS):
            for part in gl.static_range(PARTS):
                block_view(tiles, part * BLOCKS + a, n).store(zero_block().to(gl.bfloat16))
