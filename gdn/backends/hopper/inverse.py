"""X = (I - L)^-1 of tiles of 64 x 64 with L below the diagonal, a warp a tile, by blocks of 16 x 16.

Blocks on the diagonal by doubling, all at once; to the left of them, with Y_am = X_aa L_am,

    X_an = sum over m from n to a - 1 of Y_am X_mn

so that left operands come from the registers in which a product left them, right ones from shared memory,
where X takes the place of L. Operands are in fp16, which is as exact as tf32 and has room for |L| < 65504: a
recurrence with larger ones grows by as much from token to token.
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
def on_diagonal(L, blocks):
    """X of the blocks on the diagonal, also in fp16 in their places, where L is; see `triton.tril`."""
    i, j = places()
    eye = gl.where(i == j, zeros() + 1.0, 0.0)
    found = ()
    right = ()
    for a in gl.static_range(BLOCKS):
        found = found + (gl.where((i ^ j) == 1, L[a], eye),)
        right = right + (blocks[a * (a + 3) // 2].load(RIGHT),)
    for level in gl.static_range(1, 4):
        # X has blocks of 2^level along its diagonal: of X L only those beside them are wanted
        is_across = ((i ^ j) >> level) == 1
        for a in gl.static_range(BLOCKS):
            blocks[a * (a + 3) // 2].store(found[a].to(gl.float16))
        more = ()
        for a in gl.static_range(BLOCKS):
            XL = mma_v2(left(found[a].to(gl.float16)), right[a], zeros())
            XL = left(gl.where(is_across, XL, 0.0).to(gl.float16))
            more = more + (mma_v2(XL, blocks[a * (a + 3) // 2].load(RIGHT), found[a]),)
        found = more
    for a in gl.static_range(BLOCKS - 1):
        blocks[a * (a + 3) // 2].store(found[a].to(gl.float16))
    return found


@gluon.jit
def to_the_left(X, blocks):
    """Y of all blocks below the diagonal, row by row, as left operands."""
    found = ()
    for a in gl.static_range(1, BLOCKS):
        X_aa = left(X[a].to(gl.float16))
        for m in gl.static_range(a):
            Y = mma_v2(X_aa, blocks[a * (a + 1) // 2 + m].load(RIGHT), zeros())
            found = found + (left(Y.to(gl.float16)),)
    return found


@gluon.jit
def row_of(Y, blocks, a: gl.constexpr):
    """Blocks of X in row a before the diagonal, also in fp16 in their places."""
    found = ()
    for n in gl.static_range(a):
        X_an = zeros()
        for m in gl.static_range(n, a):
            X_an = mma_v2(Y[a * (a - 1) // 2 + m], blocks[m * (m + 1) // 2 + n].load(RIGHT), X_an)
        found = found + (X_an,)
    if a < BLOCKS - 1:
        for n in gl.static_range(a):
            blocks[a * (a + 1) // 2 + n].store(found[n].to(gl.float16))
    return found
