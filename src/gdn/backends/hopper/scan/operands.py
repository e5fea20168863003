"""Issue the MMAs of a chunk: register layouts of S^T, r, v_new and o, and the operands made from them.

WGMMA reads A from registers or shared memory, B from shared memory only. S is held transposed, [V, K]: S^T, r
and v_new are A operands straight from the registers in which the previous MMA left them.
"""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import jit, warpgroup_mma, warpgroup_mma_wait
from gdn.backends.hopper.scan.scheduler import STRIP

# WGMMA accumulators in registers, value rows down: [64, C tokens], [64, 128 keys or 2 C tokens], [64, C / 2]
ACC_TOKENS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ACC_STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ACC_HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
# the A operand of a WGMMA, in registers
A_OPERAND = gl.constexpr(gl.DotOperandLayout(0, ACC_TOKENS.value, 2))
# vectors of C factors in registers: one for each column, or each row, of an accumulator [64, C]
PER_COLUMN = gl.constexpr(gl.SliceLayout(0, ACC_TOKENS.value))
PER_ROW = gl.constexpr(gl.SliceLayout(1, ACC_TOKENS.value))
# a bf16 tile in shared memory, swizzled as TMA writes it and WGMMA reads it
BF16_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# rows of fp32 factors in shared memory, as TMA writes them
FP32_ROWS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))
# registers of a warpgroup, tokens down as they lie in HBM: 16 bytes a lane
TOKEN_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@jit
def mma_split_bf16(x, b, acc):
    """Issue acc + x b as two asynchronous MMAs, x as split bf16: hi is truncated, see `triton.lib`."""
    high = (x.to(gl.uint32, bitcast=True) & 0xFFFF0000).to(gl.float32, bitcast=True)
    low = gl.convert_layout((x - high).to(gl.bfloat16), A_OPERAND)
    acc = warpgroup_mma(gl.convert_layout(high.to(gl.bfloat16), A_OPERAND), b, acc, is_async=True)
    return warpgroup_mma(low, b, acc, is_async=True)


@jit
def key_tiles(qk_s, stage, HAS_Q: gl.constexpr, D: gl.constexpr):
    """Return views of a stage in shared memory: q over k [2C, K] (without q, k alone), and k [C, K]."""
    if HAS_Q:
        qk_tile = qk_s.index(stage).reshape([2 * C, D])
        return qk_tile, qk_tile.slice(C, C)
    else:
        k_tile = qk_s.index(stage).reshape([C, D])
        return k_tile, k_tile


@jit
def issue_key_mma(S, qk_tile, HAS_Q: gl.constexpr, SPLIT: gl.constexpr):
    """Issue S^T [q; k]^T [64, 2C] as asynchronous MMAs, or S^T k^T [64, C]; SPLIT: S^T as split bf16."""
    if HAS_Q:
        zeros = gl.zeros((STRIP, 2 * C), gl.float32, ACC_STATE)
    else:
        zeros = gl.zeros((STRIP, C), gl.float32, ACC_TOKENS)
    # one MMA of N = 128 for q and k: the tensor cores read S^T from registers once, not twice
    qk = qk_tile.permute((1, 0))
    if SPLIT:
        return mma_split_bf16(S, qk, zeros)
    else:
        S = gl.convert_layout(S.to(gl.bfloat16), A_OPERAND)
        return warpgroup_mma(S, qk, zeros, use_acc=False, is_async=True)


@jit
def split_columns(x, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Split x [64, 2 WIDTH] into its left and right half; each value stays in its register."""
    left, right = gl.split(gl.permute(gl.reshape(x, (STRIP, 2, WIDTH)), (0, 2, 1)))
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@jit
def wait_key_mma(qkS, HAS_Q: gl.constexpr):
    """Wait for the MMAs of `issue_key_mma`; return q S and k S, or k S twice without q.

    q S must be scaled before it becomes an accumulator: ptxas does not give the registers of one MMA's
    accumulator to a narrower MMA (C7511).
    """
    qkS = warpgroup_mma_wait(0, deps=(qkS,))
    if HAS_Q:
        return split_columns(qkS, C, ACC_TOKENS)
    else:
        return qkS, qkS


@jit
def join_columns(early, late):
    """Join the columns of a chunk's first and last 32 tokens to [64, C]; each value stays in its register."""
    x = gl.reshape(gl.permute(gl.join(early, late), (0, 2, 1)), (STRIP, C))
    return gl.convert_layout(x, ACC_TOKENS)


@jit
def issue_lower_mma(x, lower, early, late, ADDS: gl.constexpr):
    """Issue x lower^T as MMAs for the first and the last 32 tokens, skipping the zero upper right quarter."""
    first, _ = split_columns(x, C // 2, ACC_HALF)
    corner = lower.slice(0, C // 2).slice(0, C // 2, 1).permute((1, 0))
    early = warpgroup_mma(gl.convert_layout(first, A_OPERAND), corner, early, use_acc=ADDS, is_async=True)
    below = lower.slice(C // 2, C // 2).permute((1, 0))
    late = warpgroup_mma(gl.convert_layout(x, A_OPERAND), below, late, use_acc=ADDS, is_async=True)
    return early, late
