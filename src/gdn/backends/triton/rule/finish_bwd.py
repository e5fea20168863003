"""Finish the gradients of a decay per key channel where they need all channels or value heads.

    dn = sum over value heads;   dq = q_rstd (dn - n <n, dn>) of n = q q_rstd, and dk likewise
    dbeta = <dr, v_new> / beta, or the sum of terms where beta is tiny;   db = dbeta sigmoid(b) sigmoid(-b)

Bytes per token at K = 128 in bf16: q, k, dq, dk 1024 a key head; the gradients of its rows 1024 and terms of
dbeta 24 a value head.
"""

from typing import Any, NamedTuple

import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import jit, kernel
from gdn.backends.triton.lib import Rows, TokenRange, column_mask, load_rows, load_rstd, sigmoid
from gdn.backends.triton.rule.gradients import SMALL
from gdn.backends.triton.rule.pairs import BETA, ROWS
from gdn.backends.triton.rule.values_bwd import APART, WHOLE


class Gradient(NamedTuple):
    """Hold pointers: gradients of rows of value heads, that of the key head's row, and the inverse norm."""

    rows_ptr: Any
    dx_ptr: Any
    rstd_ptr: Any


class KeyHead(NamedTuple):
    """Say where a key head's rows of a chunk are: in the batch, and among the value heads."""

    token_range: Any
    place: Any
    head: Any
    T: Any
    HV: Any
    ratio: Any


@jit
def sum_heads(rows_ptr, at, ks, K: tl.constexpr, C: tl.constexpr):
    """Return the sum [C, channels] of rows [B, T, HV, K] in fp32 over the value heads of a key head."""
    tokens = tl.arange(0, C)
    mask = (tokens < tl.abs(at.token_range.length))[:, None] & column_mask(ks, K)[None, :]
    total = tl.zeros([C, ks.shape[0]], tl.float32)
    for j in range(at.ratio):
        base = rows_ptr + (at.place * at.HV + at.head * at.ratio + j) * K
        total += tl.load(base + (tokens[:, None] * (at.HV * K) + ks[None, :]), mask=mask, other=0.0)
    return total


@jit
def finish_rows(x, to, at, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr):
    """Store the gradient of raw rows x from those of the normalised rows of each value head, in fp32."""
    tokens = tl.arange(0, C)
    num_heads = at.HV // at.ratio
    span = at.token_range
    rstd = load_rstd(to.rstd_ptr, span.row, span.first, span.length, at.head, at.T, num_heads, C)
    along = tl.zeros([C], tl.float32)
    if to.rstd_ptr is not None:
        for block in range(0, K, BK):
            ks = block + tl.arange(0, BK)
            n = load_rows(x, span, at.head, ks, K, C, UNIT).to(tl.float32) * rstd[:, None]
            along += tl.sum(n * sum_heads(to.rows_ptr, at, ks, K, C), 1)
    for block in range(0, K, BK):
        ks = block + tl.arange(0, BK)
        dx = sum_heads(to.rows_ptr, at, ks, K, C)
        if to.rstd_ptr is not None:
            n = load_rows(x, span, at.head, ks, K, C, UNIT).to(tl.float32) * rstd[:, None]
            dx = (dx - n * along[:, None]) * rstd[:, None]
        mask = (tokens < tl.abs(span.length))[:, None] & column_mask(ks, K)[None, :]
        base = to.dx_ptr + (at.place * num_heads + at.head) * K
        dx_place = base + (tokens[:, None] * (num_heads * K) + ks[None, :])
        tl.store(dx_place, dx.to(to.dx_ptr.dtype.element_ty), mask=mask)


@kernel
def finish_bwd_kernel(
    q_ptr, k_ptr, beta_ptr, q_rstd_ptr, k_rstd_ptr, table_ptr, factors_ptr, shares_ptr, dq_rows_ptr,
    dk_rows_ptr, dq_ptr, dk_ptr, dbeta_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, beta_b, beta_t, beta_h, T, HV, ratio, chunks_per_row, strips,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, SIGMOID: tl.constexpr,
    NEGATIVE: tl.constexpr,
):  # fmt: skip
    # dbeta of one chunk and value head; the first value head of a key head also stores dq and dk, unless
    # `rows_bwd` has. Program (chunk, head). Grid: entries * HV, heads fastest; 4 warps; no PDL. No MMAs: rows
    # of q, k and their gradients pass through registers in blocks of BK channels, with norms twice, the
    # second time from L2.
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
    if dq_rows_ptr is not None:  # noqa: SIM102 - a constant, and what only then is compiled
        if head % ratio == 0:
            at = KeyHead(TokenRange(row, first, length), place, head // ratio, T, HV, ratio)
            to = Gradient(dq_rows_ptr, dq_ptr, q_rstd_ptr)
            finish_rows(Rows(q_ptr, q_b, q_t, q_h), to, at, K, BK, C, UNIT)
            to = Gradient(dk_rows_ptr, dk_ptr, k_rstd_ptr)
            finish_rows(Rows(k_ptr, k_b, k_t, k_h), to, at, K, BK, C, UNIT)
