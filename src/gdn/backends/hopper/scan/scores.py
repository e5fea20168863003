"""Compute P in the score warpgroup of the state scan, up to STAGES - 1 chunks ahead of the consumers.

    P_ij = scale e^(G_i - G_j) <q_i, k_j> for j <= i
           scale e^(G_i - G_C) <q_i, k_j>            of a well-conditioned chunk

It multiplies k q^T, which is P^T but for the factors: P^T is the B operand of o^T += v_new^T P^T.
"""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import CHUNK_DECAY, LOG2_K, LOG2_Q, Q_DECAY, C
from gdn.backends.hopper.gluon import jit, warpgroup_mma, warpgroup_mma_wait
from gdn.backends.hopper.scan.operands import ACC_TOKENS, PER_COLUMN, PER_ROW, key_tiles
from gdn.backends.hopper.scan.scheduler import next_work, split_work


@jit
def compute_scores(scan):
    """Run the score warpgroup: compute P of all chunks of all work items, for every consumer warpgroup."""
    num_chunks = 0
    turn = 0
    number = next_work(turn, scan.queue)
    while number < scan.geometry.num_items:
        item, _ = split_work(number, 0, scan.config)
        _, _, length, _ = scan.geometry.locate(item)
        end = num_chunks + gl.cdiv(length, C)
        for i in range(num_chunks, end):
            compute_chunk_scores(i, length - (i - num_chunks) * C, scan)
        num_chunks = end
        turn += 1
        number = next_work(turn, scan.queue)


@jit
def compute_chunk_scores(i, left, scan):
    """Compute P of the CTA's chunk i into shared memory; only its first `left` tokens are the sequence's."""
    tiles = scan.tiles
    zeros = gl.zeros((C, C), gl.float32, ACC_TOKENS)
    is_kept = gl.arange(0, C, PER_ROW)[:, None] <= gl.arange(0, C, PER_COLUMN)[None, :]
    stage = scan.pipeline.wait_full(i)
    qk_tile, k_tile = key_tiles(tiles.qk, stage, True, scan.config.D)
    q_tile = qk_tile.slice(0, C).permute((1, 0))
    # both operands from shared memory: the warpgroup's registers hold only the accumulator and factors
    kq = warpgroup_mma(k_tile, q_tile, zeros, use_acc=False, is_async=True)
    if scan.config.FAST_PATH and tiles.is_well_conditioned(stage):
        # a factor per query, no exponential: e^(G_i - G_C), as w of the fast path holds e^(G_C - G_j)
        chunk_decay = tiles.load_scalar(stage, CHUNK_DECAY * C)
        scale = tiles.load_row(stage, Q_DECAY, PER_COLUMN) * (1.0 / chunk_decay)
        P = warpgroup_mma_wait(0, deps=(kq,)) * scale[None, :]
        P = gl.where(is_kept, P, 0.0)
    else:
        # while the tensor cores multiply: one exponential a pair
        log2_q = tiles.load_row(stage, LOG2_Q, PER_COLUMN)
        D_ij = gl.exp2(log2_q[None, :] - tiles.load_row(stage, LOG2_K, PER_ROW)[:, None])
        D_ij = gl.where(is_kept, D_ij, 0.0)
        P = warpgroup_mma_wait(0, deps=(kq,)) * D_ij
        if left < C:  # k is loaded past the sequence's end and may be NaN there
            P = gl.where((gl.arange(0, C, PER_ROW) < left)[:, None], P, 0.0)
    # P[s] needs no `empty` barrier of its own: full[s] completes only after every consumer has released the
    # stage, so none of them still reads the previous P in this shared memory
    tiles.P.index(stage).permute((1, 0)).store(P.to(gl.bfloat16))
    scan.pipeline.publish_scores(stage)
