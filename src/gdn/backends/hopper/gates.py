"""Compute the decays and beta of each chunk for `solve`, many heads at once; see `factors`.

    LOG2_K G / log 2;  BETA;  CHUNK_DECAY e^(G_C)

Neighbouring threads have neighbouring heads, which are neighbours in HBM, and each sums over its own tokens.
In `solve` a warp has one head: it would read one cache line a token, and sum over lanes. Where no CTA of
`solve` has more than one tile that costs less than this launch, which is then skipped.

HBM bytes per token and value head: gates 6, LOG2_K and BETA 8; for a backward G 8.
"""

import triton.language as tl

from gdn.backends.hopper.factors import BETA, CHUNK_DECAY, LOG2_E, LOG2_K, NUM_ROWS
from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import jit, kernel
from gdn.backends.triton.launch.pdl import wait_then_launch_dependents
from gdn.backends.triton.lib import activate_beta
from gdn.backends.triton.rule.prepare import log_decay


@jit
def _load_tile(x_ptr, row, tokens, heads, of_row, of_token, of_head, mask):
    # a tile [tokens, heads] from HBM, 0 where masked; int64, as an offset may exceed 2^31 elements
    place = row.to(tl.int64) * of_row + tokens.to(tl.int64) * of_token + heads * of_head
    return tl.load(x_ptr + place, mask=mask, other=0.0)


@kernel
def gates_kernel(
    g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, table_ptr, factors_ptr, G_ptr,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, T, HV, chunks_per_row,
    C: tl.constexpr, BH: tl.constexpr, SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    # One program (CTA): G, e^(G_C) and beta of one chunk and BH heads, by plain loads and stores to HBM.
    # Grid: chunks x ceil(HV / BH).  Warps: 4.  No TMA, no mbarrier.
    # PDL: wait for the launch before, then release `solve`, which loads its first k while this kernel runs.
    wait_then_launch_dependents()
    blocks = tl.cdiv(HV, BH)
    chunk = tl.program_id(0) // blocks
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    # no sequence has this chunk, so the scan does not read its factors
    if length <= 0:
        return
    tokens = tl.arange(0, C)[:, None]
    heads = (tl.program_id(0) % blocks) * BH + tl.arange(0, BH)[None, :]
    is_head = heads < HV
    is_token = is_head & (tokens < length)
    if g_ptr is None:
        g = tl.zeros([C, BH], tl.float32)
    else:
        g = _load_tile(g_ptr, row, first + tokens, heads, g_b, g_t, g_h, is_token)
        g = log_decay(g, A_log_ptr, dt_bias_ptr, tl.minimum(heads, HV - 1), RESET)
    if beta_ptr is None:
        beta = tl.full([C, BH], 1.0, tl.float32)
    else:
        beta = _load_tile(beta_ptr, row, first + tokens, heads, beta_b, beta_t, beta_h, is_token)
        beta = activate_beta(beta, SIGMOID, NEGATIVE)
    # in fp64: a reset on one token must leave the other tokens' differences of G exact
    G = tl.cumsum(tl.where(is_token, g, 0.0).to(tl.float64), 0)
    if G_ptr is not None:
        tl.store(G_ptr + (row.to(tl.int64) * T + first + tokens) * HV + heads, G, mask=is_token)
    places = factors_ptr + (chunk.to(tl.int64) * HV + heads) * (NUM_ROWS * C) + tokens
    decay = (G * LOG2_E).to(tl.float32)
    tl.store(places + LOG2_K * C, decay, mask=is_head)
    # the last token's decay is that of the whole chunk
    tl.store(places + (CHUNK_DECAY * C - (C - 1)), tl.exp2(decay), mask=is_head & (tokens == C - 1))
    tl.store(places + BETA * C, tl.where(is_token, beta, 0.0), mask=is_head)
