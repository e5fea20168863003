"""Run the score warpgroup of the reverse state scan: P of each chunk, as split bf16, for every consumer.

    P_ij = scale e^(G_i - G_j) <q_i, k_j> for j <= i

Rounding P once would cause half of dbeta's error where little passes through the state.
"""

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.backward.factors import DECAY, FROM, Q_SCALE
from gdn.backends.hopper.backward.scan_shared import chunks_in, is_map, item_of
from gdn.backends.hopper.backward.shared import (
    arrive,
    factor,
    split_bf16,
    split_tile,
    wait_empty,
    wait_full,
)
from gdn.backends.hopper.factors import C
from gdn.backends.hopper.gluon import fence_async_shared, jit, warpgroup_mma, warpgroup_mma_wait
from gdn.backends.hopper.scan.operands import ACC_TOKENS, PER_COLUMN, PER_ROW
from gdn.backends.hopper.scan.scheduler import STRIP


@jit
def compute_scores(w):
    """Run the score warpgroup over all work items of this CTA."""
    at = 0
    for number in range(gl.program_id(0), w.sequences.items, gl.num_programs(0)):
        item = item_of(number, w)
        chunks = chunks_in(item)
        for i in range(chunks):
            if w.out.dS_d is None and is_map(item):
                # M of a segment needs no P
                stage = wait_full(at + i, w.turns.full)
                if w.D == STRIP:
                    split_tile(w.tiles.A_inv.index(stage))
                    fence_async_shared()
                    arrive(at + i, w.turns.P_full)
                arrive(at + i, w.turns.empty)
            else:
                over_chunk(w, at + i, item.length - (chunks - 1 - i) * C)
        at += chunks


@jit
def over_chunk(w, i, left):
    """Compute P of the CTA's chunk i; only its first `left` tokens are the sequence's."""
    zeros = gl.zeros((C, C), gl.float32, ACC_TOKENS)
    stage = wait_full(i, w.turns.full)
    q = w.tiles.q.index(stage).reshape([C, w.D])
    k = w.tiles.k.index(stage).reshape([C, w.D])
    qk = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if w.D == STRIP:
        # while the tensor cores multiply
        split_tile(w.tiles.A_inv.index(stage))
    rows = gl.arange(0, C, PER_ROW)
    columns = gl.arange(0, C, PER_COLUMN)
    # while the tensor cores multiply: one exponential a pair
    decay = (
        factor(w.tiles, stage, DECAY, PER_ROW)[:, None] - factor(w.tiles, stage, FROM, PER_COLUMN)[None, :]
    )
    scale = gl.exp2(decay) * factor(w.tiles, stage, Q_SCALE, PER_ROW)[:, None]
    is_kept = (columns[None, :] <= rows[:, None]) & (rows < left)[:, None]
    hi, lo = split_bf16(gl.where(is_kept, warpgroup_mma_wait(0, deps=(qk,)) * scale, 0.0))
    place = wait_empty(i, w.turns.P_empty)
    w.tiles.P.index(2 * place).store(hi)
    w.tiles.P.index(2 * place + 1).store(lo)
    fence_async_shared()
    arrive(i, w.turns.P_full)
    arrive(i, w.turns.empty)
