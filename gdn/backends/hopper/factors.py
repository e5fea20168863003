"""Factors of a chunk's tokens for the walk, from gates alone, for many heads at once; zeros for outputs of
tokens that belong to no sequence, and for the count of jobs that the walk's programs have taken.

    g = -exp(A_log) softplus(a + dt_bias)  or as given;   G = chunk sums of g, in fp64
    READ scale e^G;  INTO -e^G;  OUT e^(G_C - G);  BETA;  FROM G / log 2;  TO the same, and log2 of scale
    END e^(G_C), a number; beside it TAME, by `solve`: 1 for a tame chunk, else 0

so that e^(G_i - G_j) is 2^(FROM_i - FROM_j), scaled 2^(TO_i - FROM_j), an exponential a pair. Rows come in
two boxes; `solve` wants the second alone. A token's g counts as LEAST at least: e^LEAST is nothing in
fp32, and G stays so near 0 that a difference of it in fp32 is off by at most 2^-10. Where q and k are to be
normalised, `solve` puts their norms in, log2 of them in TO and FROM. Threads lie along heads and each has its
tokens: a sum over tokens then costs few exchanges.

Bytes per token and value head: gates 6, factors 24; G, where a backward wants it, 8.
"""

import triton.language as tl

from gdn.backends.triton.chained import after_all_before
from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import strength
from gdn.backends.triton.prepare import clear_outputs, log_decay

# rows of a chunk's factors, the fourth unused; of each of the two boxes
READ, INTO, END, OUT, BETA, FROM, TO = (tl.constexpr(i) for i in (0, 1, 2, 4, 5, 6, 7))
ROWS, BOX = tl.constexpr(8), tl.constexpr(4)
TAME = tl.constexpr(END.value * 64 + 1)  # where it is, from the first factor on: beside END
LEAST = -128.0
PER_LOG2 = tl.constexpr(1.4426950408889634)


@kernel
def factors_kernel(
    g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, table_ptr, factors_ptr, G_ptr, o_ptr, next_ptr,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, T, HV, ratio, chunks_per_row, scale,
    V: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr,
    RESET: tl.constexpr,
):  # fmt: skip
    after_all_before()
    if tl.program_id(0) == 0:
        tl.store(next_ptr, 0)
    blocks = tl.cdiv(HV, BH)
    chunk = tl.program_id(0) // blocks
    first_head = (tl.program_id(0) % blocks) * BH
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    if length <= 0:
        if o_ptr is not None:
            for head in range(first_head, tl.minimum(HV, first_head + BH)):
                clear_outputs(o_ptr, row.to(tl.int64) * T + first, -length, head, HV, V, C)
        return
    tokens = tl.arange(0, C)[:, None]
    heads = first_head + tl.arange(0, BH)[None, :]
    is_head = heads < HV
    is_token = is_head & (tokens < length)
    if g_ptr is None:
        g = tl.zeros([C, BH], tl.float32)
    else:
        g = tl.load(
            g_ptr + row.to(tl.int64) * g_b + (first + tokens).to(tl.int64) * g_t + heads * g_h,
            mask=is_token, other=0.0,
        )  # fmt: skip
        g = log_decay(g, A_log_ptr, dt_bias_ptr, tl.minimum(heads, HV - 1), RESET)
    if beta_ptr is None:
        beta = tl.full([C, BH], 1.0, tl.float32)
    else:
        beta = tl.load(
            beta_ptr + row.to(tl.int64) * beta_b + (first + tokens).to(tl.int64) * beta_t + heads * beta_h,
            mask=is_token, other=0.0,
        )  # fmt: skip
        beta = strength(beta, SIGMOID, NEGATIVE)
    beta = tl.where(is_token, beta, 0.0)
    G = tl.cumsum(tl.where(is_token, g, 0.0).to(tl.float64), 0)
    if G_ptr is not None:
        tl.store(G_ptr + (row.to(tl.int64) * T + first + tokens) * HV + heads, G, mask=is_token)
    G *= PER_LOG2
    end = tl.sum(tl.where(tokens == C - 1, G, 0.0), 0)[None, :]
    decay = G.to(tl.float32)
    grown = tl.exp2(decay)
    places = factors_ptr + (chunk.to(tl.int64) * HV + heads) * (ROWS * C) + tokens
    tl.store(places + OUT * C, tl.exp2((end - G).to(tl.float32)), mask=is_head)
    tl.store(places + READ * C, grown * scale, mask=is_head)
    tl.store(places + INTO * C, -grown, mask=is_head)
    tl.store(places + BETA * C, beta, mask=is_head)
    tl.store(places + FROM * C, decay, mask=is_head)
    tl.store(places + TO * C, decay + tl.log2(scale), mask=is_head)
    # the last token's decay is that of all
    tl.store(places + (END * C - (C - 1)), grown, mask=is_head & (tokens == C - 1))
