"""Compute the masked scores P and the per-token factors that the state passes read.

    P_ij = scale e^(G_i - G_j) <q_i, k_j> for j <= i, norms included
    factors: OUT e^(G_C - G) k_rstd;  READ scale e^G q_rstd;  INTO e^G k_rstd;  BETA;  END e^(G_C)

The state passes are sequential over chunks, so everything that does not depend on the state is computed
outside them: by `prepare` in the forward, and by the kernel of this file in the backward. P is 128 bytes a
token in bf16, and saves an MMA and 4096 exponentials per chunk. The factors are 20 bytes a token, and save
four gathers and their arithmetic. The backward needs P as split bf16 (hi + lo): rounding P caused half of the
variance of dbeta's error where little passes through the state.
Bytes of the backward's kernel per token and value head at K = V = 128 in bf16, HV = H: q, k 512, P 256,
gates, G, factors 60: 830.
"""

import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import jit, kernel
from gdn.backends.triton.lib import (
    Rows,
    TokenRange,
    column_mask,
    decay,
    dot,
    load_beta,
    load_rows,
    load_rstd,
    load_sums,
    split_bf16,
)

# rows of a chunk's factors [ROWS, C], fp32 in HBM
OUT, READ, INTO, BETA, END = (tl.constexpr(i) for i in range(5))
NUM_FACTORS = 5  # the first rows: all that a forward writes
# Terms of the gates' gradients, which the backward stores in the same array. CROSSING replaces OUT. THROUGH
# is in END's row, after its one scalar: one value per strip of `state_bwd_kernel` if SPLIT, else one value.
CROSSING, THROUGH, ENTERING, LEAVING, DBETA, ALONG_Q, ALONG_K = (
    tl.constexpr(i) for i in (0, 4, 5, 6, 7, 8, 9)
)
ROWS = tl.constexpr(10)


@jit
def decays(high, low, k_rstd, C: tl.constexpr):
    """Return e^(G_i - G_j) k_rstd_j for j <= i, else 0 [C, C]."""
    tokens = tl.arange(0, C)
    D = decay(high[None, :], low[None, :], high[:, None], low[:, None]) * k_rstd[None, :]
    return tl.where(tokens[:, None] >= tokens[None, :], D, 0.0)


@jit
def store_factors(factors_ptr, tile, beta, q_scale, k_rstd, sums, C: tl.constexpr):
    """Store the factors of a chunk; END is one scalar per chunk."""
    tokens = tl.arange(0, C)
    base = factors_ptr + tile * (ROWS * C) + tokens
    # computed once per chunk here: each strip of the state pass would otherwise repeat the exponentials
    high, low, end_high, end_low = sums
    into = tl.exp(high)
    tl.store(base + OUT * C, decay(high, low, end_high, end_low) * k_rstd)
    tl.store(base + READ * C, into * q_scale)
    tl.store(base + INTO * C, into * k_rstd)
    tl.store(base + BETA * C, beta)
    tl.store(factors_ptr + tile * (ROWS * C) + END * C, tl.exp(end_high))


@jit
def factor(factors_ptr, tile, row: tl.constexpr, C: tl.constexpr):
    """Return one row of a chunk's factors [C]."""
    return tl.load(factors_ptr + tile * (ROWS * C) + row * C + tl.arange(0, C))


@jit
def through(factors_ptr, tile, C: tl.constexpr):
    """Return e^(G_C), the decay of the state over the whole chunk."""
    return tl.load(factors_ptr + tile * (ROWS * C) + END * C)


@jit
def channels_through(factors_ptr, tile, ks, K: tl.constexpr, C: tl.constexpr):
    """Return e^(G_C) of key channels, which takes the place of END and of the rows after it."""
    base = factors_ptr + tile * (ROWS * C) + END * C
    return tl.load(base + ks, mask=column_mask(ks, K), other=0.0)


@jit
def load_k_out(k, token_range, head, ks, K: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr):
    """Load the rows k_out [C, channels] of a chunk: each follows its k_in, at `k`, in HBM."""
    return load_rows(Rows(k.ptr + K, k.b, k.t, k.h), token_range, head, ks, K, C, UNIT)


@kernel
def pairs_kernel(
    q_ptr, k_ptr, beta_ptr, G_ptr, q_rstd_ptr, k_rstd_ptr, table_ptr, P_ptr, P_rest_ptr, factors_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, beta_b, beta_t, beta_h, T, HV, ratio, chunks_per_row, scale,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, SIGMOID: tl.constexpr,
    NEGATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # P_ij = scale e^(G_i - G_j) <q_i, k_j> for j <= i, and the factors, for one chunk and value head.
    # Program (chunk, head). Grid: entries * HV, heads fastest, so that the value heads of a key head find q
    # and k in L2; 4 warps; no PDL. q k^T is an accumulator in registers over blocks of K.
    # Reads q, k, G, beta and norms of 64 tokens; writes P (and its low half) [C, C] and five rows of factors.
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    token_range = TokenRange(row, first, length)
    if length <= 0:
        return
    key_head = head // ratio
    num_heads = HV // ratio
    tokens = tl.arange(0, C)
    qk = tl.zeros([C, C], tl.float32)
    # raw q and k go into the MMA on tensor cores; the norms scale its result in registers
    for block in range(0, K, BK):
        ks = block + tl.arange(0, BK)
        q = load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT)
        k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT)
        qk = dot(q, tl.trans(k), qk, PRECISION)
    q_rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    k_rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    high, low, end_high, end_low = load_sums(G_ptr, row, first, length, head, T, HV, C)
    beta = load_beta(Rows(beta_ptr, beta_b, beta_t, beta_h), token_range, head, C, SIGMOID, NEGATIVE)
    tile = chunk.to(tl.int64) * HV + head
    store_factors(factors_ptr, tile, beta, scale * q_rstd, k_rstd, (high, low, end_high, end_low), C)
    P = qk * decays(high, low, k_rstd, C) * (scale * q_rstd)[:, None]
    square = tokens[:, None] * C + tokens[None, :]
    if P_rest_ptr is not None:
        # hi + lo in two bf16 tensors: the state pass multiplies each on tensor cores
        high, low = split_bf16(P, P_ptr.dtype.element_ty)
        tl.store(P_ptr + tile * (C * C) + square, high)
        tl.store(P_rest_ptr + tile * (C * C) + square, low)
    else:
        tl.store(P_ptr + tile * (C * C) + square, P.to(P_ptr.dtype.element_ty))
