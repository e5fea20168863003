"""Compute the per-token factors that the backward kernels read, from what any forward saved.

    DECAY G / log 2;  FROM (G - log k_rstd) / log 2;  BETA
    Q_SCALE scale q_rstd;  K_RSTD;  READ scale e^G q_rstd;  INTO -e^G k_rstd;  OUT e^(G_C - G) k_rstd

e^(G_i - G_j) k_rstd_j is then 2^(DECAY_i - FROM_j): one exponential a pair. MMAs multiply the caller's rows
of q and k, and the factors hold the norms. G is summed again from differences of at least RESET: e^RESET is
0 in fp32, and G stays so small that a difference of two G in fp32 is off by at most 2^-10. The rows of a
chunk are one TMA box.

HBM bytes per token and value head: G 8, beta 2, norms 8, factors 32: 50.
"""

import triton.language as tl

from gdn.backends.hopper.factors import LOG2_E
from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import activate_beta

DECAY, FROM, BETA, Q_SCALE, K_RSTD, READ, INTO, OUT = (tl.constexpr(i) for i in range(8))
ROWS = tl.constexpr(8)


@kernel
def backward_factors_kernel(
    beta_ptr, G_ptr, q_rstd_ptr, k_rstd_ptr, table_ptr, factors_ptr,
    beta_b, beta_t, beta_h, T, HV, ratio, chunks_per_row, scale,
    C: tl.constexpr, BH: tl.constexpr, SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    # One program (CTA): the factors of one chunk and BH heads, by plain loads and stores to HBM.
    # Grid: chunks x ceil(HV / BH).  Warps: 4.  Neighbouring threads have neighbouring heads, which are
    # neighbours in HBM. No TMA, no mbarrier.
    blocks = tl.cdiv(HV, BH)
    chunk = tl.program_id(0) // blocks
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    # no sequence has this chunk, so no kernel reads its factors
    if length <= 0:
        return
    tokens = tl.arange(0, C)[:, None]
    heads = (tl.program_id(0) % blocks) * BH + tl.arange(0, BH)[None, :]
    is_head = heads < HV
    is_token = is_head & (tokens < length)
    place = row.to(tl.int64) * T + first + tokens
    G = tl.load(G_ptr + place * HV + heads, mask=is_token, other=0.0)
    before = tl.load(G_ptr + (place - 1) * HV + heads, mask=is_token & (tokens > 0), other=0.0)
    # in fp64, so that a reset on one token leaves the other tokens' differences of G exact
    g = tl.where(G - before < RESET, RESET, G - before)
    G = tl.cumsum(tl.where(is_token, g, 0.0), 0)
    end = (tl.sum(tl.where(tokens == C - 1, G, 0.0), 0) * LOG2_E).to(tl.float32)[None, :]
    decay = (G * LOG2_E).to(tl.float32)
    # 1 past the chunk's end where a logarithm is taken, else 0
    k_rstd = tl.where(is_token, 1.0, 0.0)
    q_scale = tl.where(is_token, scale, 0.0)
    if k_rstd_ptr is not None:
        norms = place * (HV // ratio) + heads // ratio
        k_rstd = tl.load(k_rstd_ptr + norms, mask=is_token, other=0.0)
        q_scale *= tl.load(q_rstd_ptr + norms, mask=is_token, other=0.0)
    beta = tl.where(is_token, 1.0, 0.0)
    if beta_ptr is not None:
        base = beta_ptr + row.to(tl.int64) * beta_b + first.to(tl.int64) * beta_t
        given = tl.load(base + tokens * beta_t + heads * beta_h, mask=is_token, other=0.0)
        beta = tl.where(is_token, activate_beta(given, SIGMOID, NEGATIVE), 0.0)
    grown = tl.exp2(decay)
    places = factors_ptr + (chunk.to(tl.int64) * HV + heads) * (ROWS * C) + tokens
    tl.store(places + DECAY * C, decay, mask=is_head)
    tl.store(places + FROM * C, decay - tl.log2(tl.where(is_token, k_rstd, 1.0)), mask=is_head)
    tl.store(places + BETA * C, beta, mask=is_head)
    tl.store(places + Q_SCALE * C, q_scale, mask=is_head)
    tl.store(places + K_RSTD * C, k_rstd, mask=is_head)
    tl.store(places + READ * C, grown * q_scale, mask=is_head)
    tl.store(places + INTO * C, -grown * k_rstd, mask=is_head)
    tl.store(places + OUT * C, tl.exp2(end - decay) * k_rstd, mask=is_head)
