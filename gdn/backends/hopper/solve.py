"""Per chunk and value head, what the walk needs of its keys and gates: the inverse and factors.

    A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j;   A_inv = (I + A)^-1, stored less 1
    OUT e^(G_C - G) k_rstd;  READ e^G q_scale;  INTO e^G k_rstd;  BETA;  END e^(G_C), 64 times
    HIGH G / log 2 in fp32, of which LOW is the rest;  FROM e^-LOW k_rstd;  TO e^LOW q_scale

with q_scale = scale q_rstd. e^(G_i - G_j) k_rstd_j q_scale_i is 2^(HIGH_i - HIGH_j) FROM_j TO_i, which is how
A has it and how the walk makes P. As `triton.prepare`, but without P, and with products in fp16, which is as
exact as tf32 and has room for |A| < 65504: a recurrence with larger ones grows by as much from token to token.
The diagonal of A_inv has what rounding took from the row's sum: see there.

Bytes per token and value head at K = V = 128 in bf16, HV = H: k 256, A_inv 128, gates and factors 40: 424; q too
where it is to be normalised.
"""

import triton
import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import load_beta, rows_of, rstd_of, split, squares
from gdn.backends.triton.prepare import chunk_sums, clear_outputs
from gdn.backends.triton.tril import inverse

# rows of a chunk's factors
OUT, READ, INTO, BETA, END, HIGH, FROM, TO = (tl.constexpr(i) for i in range(8))
ROWS = tl.constexpr(8)
PER_LOG2 = tl.constexpr(1.4426950408889634)


@triton.jit
def _round(x):
    """x in fp32, rounded to what bf16 has a place for; ties away from zero. By masks: see `lib.cut`."""
    return ((x.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000).to(tl.float32, bitcast=True)


@kernel
def solve_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, table_ptr, A_inv_ptr, factors_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, T, HV, ratio, chunks_per_row, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, NORM: tl.constexpr,
    SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    if length <= 0:
        if o_ptr is not None:
            clear_outputs(o_ptr, row.to(tl.int64) * T + first, -length, head, HV, V, C)
        return
    tokens = tl.arange(0, C)
    ks = tl.arange(0, K)
    k = rows_of(k_ptr, row, first, length, head // ratio, k_b, k_t, k_h, ks, K, C, UNIT)
    G = chunk_sums(g_ptr, A_log_ptr, dt_bias_ptr, row, first, length, head, g_b, g_t, g_h, C, RESET)
    beta = load_beta(beta_ptr, row, first, length, head, beta_b, beta_t, beta_h, C, SIGMOID, NEGATIVE)
    k_rstd = tl.where(tokens < length, 1.0, 0.0)
    q_scale = tl.full([C], scale, tl.float32)
    if NORM:
        k_rstd = rstd_of(squares(k))
        q = rows_of(q_ptr, row, first, length, head // ratio, q_b, q_t, q_h, ks, K, C, UNIT)
        q_scale *= rstd_of(squares(q))

    G *= PER_LOG2
    high, low = split(G)
    # e^LOW and its inverse, LOW being at most 2^-8
    low *= 1.0 / PER_LOG2
    up = 1.0 + (low + 0.5 * low * low)
    down = 1.0 - (low - 0.5 * low * low)
    from_rows = k_rstd * down
    to_rows = q_scale * up
    end = tl.sum(tl.where(tokens == C - 1, G, 0.0), 0)
    tile = chunk.to(tl.int64) * HV + head
    factors = factors_ptr + tile * (ROWS * C) + tokens
    grown = tl.exp2(high)
    tl.store(factors + OUT * C, tl.exp2((end - G).to(tl.float32)) * k_rstd)
    tl.store(factors + READ * C, grown * to_rows)
    tl.store(factors + INTO * C, grown * up * k_rstd)
    tl.store(factors + BETA * C, beta)
    tl.store(factors + END * C, tl.exp2(end.to(tl.float32) + tl.zeros([C], tl.float32)))
    tl.store(factors + HIGH * C, high)
    tl.store(factors + FROM * C, from_rows)
    tl.store(factors + TO * C, to_rows)

    kk = tl.dot(k, tl.trans(k))
    # above the diagonal anything, infinity included: it is not read
    A = kk * tl.exp2(high[:, None] - high[None, :]) * from_rows[None, :]
    X = inverse(A * (beta * up * k_rstd)[:, None], "fp16")
    X = tl.where(tokens[:, None] > tokens[None, :], X, 0.0)
    kept = _round(X)
    lost = tl.sum(X - kept, 1)
    kept = tl.where(tokens[:, None] == tokens[None, :], lost[:, None], kept)
    tl.store(A_inv_ptr + tile * (C * C) + tokens[:, None] * C + tokens[None, :], kept.to(tl.bfloat16))
