"""Finish the gradients of a decay per key channel where they need all channels: norms, and dbeta.

    dq = q_rstd (dn - n <n, dn>) of n = q q_rstd, and dk likewise
    dbeta = <dr, v_new> / beta, or the sum of terms where beta is tiny;   db = dbeta sigmoid(b) sigmoid(-b)

Bytes per token at K = 128 in bf16: q, k, dq, dk 1024 and the gradients of the normalised rows 1024 a key
head; terms of dbeta 24 a value head.
"""

import triton
import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import Rows, TokenRange, column_mask, load_rows, load_rstd, sigmoid
from gdn.backends.triton.rule.gradients import SMALL
from gdn.backends.triton.rule.pairs import BETA, ROWS, factor
from gdn.backends.triton.rule.values_bwd import APART, WHOLE


@triton.jit
def norm_bwd(x, dn_ptr, dx_ptr, rstd, token_range, place, head, num_heads, K: tl.constexpr, BK: tl.constexpr,
             C: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Store the gradient of raw rows x from that of the normalised rows, which is in fp32."""
    tokens = tl.arange(0, C)
    along = tl.zeros([C], tl.float32)
    for block in range(0, K, BK):
        ks = block + tl.arange(0, BK)
        n = load_rows(x, token_range, head, ks, K, C, UNIT).to(tl.float32) * rstd[:, None]
        dn_place = (place * num_heads + head) * K + (tokens[:, None] * (num_heads * K) + ks[None, :])
        mask = (tokens < tl.abs(token_range.length))[:, None] & column_mask(ks, K)[None, :]
        along += tl.sum(n * tl.load(dn_ptr + dn_place, mask=mask, other=0.0), 1)
    for block in range(0, K, BK):
        ks = block + tl.arange(0, BK)
        n = load_rows(x, token_range, head, ks, K, C, UNIT).to(tl.float32) * rstd[:, None]
        dn_place = (place * num_heads + head) * K + (tokens[:, None] * (num_heads * K) + ks[None, :])
        mask = (tokens < tl.abs(token_range.length))[:, None] & column_mask(ks, K)[None, :]
        dn = tl.load(dn_ptr + dn_place, mask=mask, other=0.0)
        dx = (dn - n * along[:, None]) * rstd[:, None]
        tl.store(dx_ptr + dn_place, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@kernel
def finish_bwd_kernel(
    q_ptr, k_ptr, beta_ptr, q_rstd_ptr, k_rstd_ptr, table_ptr, factors_ptr, shares_ptr, dq_norm_ptr,
    dk_norm_ptr, dq_ptr, dk_ptr, dbeta_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, beta_b, beta_t, beta_h, T, HV, ratio, chunks_per_row, strips,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, SIGMOID: tl.constexpr,
    NEGATIVE: tl.constexpr,
):  # fmt: skip
    # dbeta of one chunk and value head; its first value head also stores dq and dk of a normalised key head.
    # Program (chunk, head). Grid: entries * HV, heads fastest; 4 warps; no PDL. No MMAs: rows of q, k and
    # their gradients pass through registers in blocks of BK channels, twice, the second time from L2.
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    tokens = tl.arange(0, C)
    tile = chunk.to(tl.int64) * HV + head
    place = row.to(tl.int64) * T + first
    is_token = tokens < length
    if dbeta_ptr is not None:
        terms = factors_ptr + tile * (ROWS * C) + tokens
        apart = tl.load(terms + APART * C, mask=is_token, other=0.0)
        for strip in range(strips):
            apart += tl.load(shares_ptr + (tile * strips + strip) * C + tokens, mask=is_token, other=0.0)
        beta = tl.load(terms + BETA * C, mask=is_token, other=0.0)
        whole = tl.load(terms + WHOLE * C, mask=is_token, other=0.0)
        # <dr, v_new> / beta has no cancellation; for a tiny beta use the sum of the terms instead
        is_small = beta < SMALL
        dbeta = tl.where(is_small, apart, whole / tl.where(is_small, 1.0, beta))
        if SIGMOID:
            beta_place = beta_ptr + row.to(tl.int64) * beta_b + first.to(tl.int64) * beta_t + head * beta_h
            logit = tl.load(beta_place + tokens * beta_t, mask=is_token, other=0.0).to(tl.float32)
            # sigmoid(-b) instead of 1 - sigmoid(b), which cancels for large b
            slope = sigmoid(logit) * sigmoid(-logit)
            if NEGATIVE:
                slope = 2.0 * slope
            dbeta = tl.where(dbeta != 0, dbeta * slope, 0.0)
        dbeta = tl.where(is_token, dbeta, 0.0)
        dbeta_place = dbeta_ptr + (place + tokens) * HV + head
        tl.store(dbeta_place, dbeta.to(dbeta_ptr.dtype.element_ty), mask=tokens < tl.abs(length))
    if q_rstd_ptr is not None:
        if head % ratio == 0:
            key_head = head // ratio
            heads = HV // ratio
            token_range = TokenRange(row, first, length)
            rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, heads, C)
            x = Rows(q_ptr, q_b, q_t, q_h)
            norm_bwd(x, dq_norm_ptr, dq_ptr, rstd, token_range, place, key_head, heads, K, BK, C, UNIT)
            rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, heads, C)
            x = Rows(k_ptr, k_b, k_t, k_h)
            norm_bwd(x, dk_norm_ptr, dk_ptr, rstd, token_range, place, key_head, heads, K, BK, C, UNIT)
