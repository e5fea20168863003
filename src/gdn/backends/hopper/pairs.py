"""Compute P in the score warpgroup of the state scan, up to STAGES - 1 chunks ahead of the consumers.

    P_ij = scale e^(G_i - G_j) <q_i, k_j> for j <= i
           scale e^(G_i - G_C) <q_i, k_j>            of a well-conditioned chunk

It multiplies k q^T, which is P^T but for the factors: P^T is the B operand of o^T += v_new^T P^T.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.chunk import (
    ACROSS,
    DOWN,
    OF_TOKENS,
    C,
    is_tame,
    job_at,
    keys_of,
    number,
    parted,
    sequence,
    turn_of,
    vector,
)
from gdn.backends.hopper.factors import END, FROM, READ, TO
from gdn.backends.hopper.gluon import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def make_pairs(
    qk_s, f_s, P_s, full, empty, P_full, ring,
    cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound, jobs,
    GLIDES: gl.constexpr, CHAINS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Run the score warpgroup: compute P of all chunks of all work items, for every consumer warpgroup."""
    at = 0
    turn = 0
    taken = job_at(turn, ring)
    while taken < jobs:
        job, _ = parted(taken, 0, CHAINS, D)
        _, _, length, _ = sequence(job, cu_seqlens_ptr, table_ptr, T, HV, chunks_per_row, bound)
        past = at + gl.cdiv(length, C)
        for i in range(at, past):
            make_pair(i, length - (i - at) * C, qk_s, f_s, P_s, full, empty, P_full, GLIDES, D)
        at = past
        turn += 1
        taken = job_at(turn, ring)


@gluon.jit
def make_pair(i, left, qk_s, f_s, P_s, full, empty, P_full, GLIDES: gl.constexpr, D: gl.constexpr):
    """Compute P of the CTA's chunk i into shared memory; only its first `left` tokens are the sequence's."""
    zeros = gl.zeros((C, C), gl.float32, OF_TOKENS)
    is_kept = gl.arange(0, C, DOWN)[:, None] <= gl.arange(0, C, ACROSS)[None, :]
    stage, parity = turn_of(i, full)
    mbarrier.wait(full.index(stage), parity)
    qk_tile, k_tile = keys_of(qk_s, stage, True, D)
    q_tile = qk_tile.slice(0, C).permute((1, 0))
    # both operands from shared memory: the warpgroup's registers hold only the accumulator and factors
    kq = warpgroup_mma(k_tile, q_tile, zeros, use_acc=False, is_async=True)
    if GLIDES and is_tame(f_s, stage):
        # a factor per query, no exponential: e^(G_i - G_C), as w of the fast path holds e^(G_C - G_j)
        scale = vector(f_s, stage, READ, ACROSS) * (1.0 / number(f_s, stage, END * C))
        P = warpgroup_mma_wait(0, deps=(kq,)) * scale[None, :]
        P = gl.where(is_kept, P, 0.0)
    else:
        # while the tensor cores multiply: one exponential a pair
        D_ij = gl.exp2(vector(f_s, stage, TO, ACROSS)[None, :] - vector(f_s, stage, FROM, DOWN)[:, None])
        D_ij = gl.where(is_kept, D_ij, 0.0)
        P = warpgroup_mma_wait(0, deps=(kq,)) * D_ij
        if left < C:  # k is loaded past the sequence's end and may be NaN there
            P = gl.where((gl.arange(0, C, DOWN) < left)[:, None], P, 0.0)
    # P[s] needs no `empty` barrier of its own: full[s] completes only after every consumer has released the
    # stage, so none of them still reads the previous P in this shared memory
    P_s.index(stage).permute((1, 0)).store(P.to(gl.bfloat16))
    # order the reads of the stage before the TMA loads that overwrite it, and the writes of P before the MMA
    # that reads P: TMA and WGMMA access shared memory through the async proxy
    fence_async_shared()
    mbarrier.arrive(P_full.index(stage), count=1)
    mbarrier.arrive(empty.index(stage), count=1)
