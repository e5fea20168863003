"""Compute dg, dbeta, dA_log and ddt_bias from the per-token terms that the gradient kernels left.

    dg_t = crossing_t + sum_{i >= t} entering_i + sum_{j < t} leaving_j + e^(G_C) sum through
    da = -exp(A_log) sigmoid(a + dt_bias) dg;   dA_log = sum g dg;   ddt_bias = sum da
    db = sigmoid(b) sigmoid(-b) dbeta, twice that with negative eigenvalues

It has no MMAs. Sums are fp64; dA_log and ddt_bias leave as one partial sum per chunk, which `sums` adds.
Bytes per token and value head: 30 to 50.
"""

import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import kernel
from gdn.backends.triton.lib import sigmoid
from gdn.backends.triton.rule.pairs import CROSSING, DBETA, ENTERING, LEAVING, ROWS, THROUGH
from gdn.backends.triton.rule.prepare import log_decay


@kernel
def gates_bwd_kernel(
    g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, G_ptr, table_ptr, shares_ptr, dg_ptr, dbeta_ptr, partial_ptr,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, T, HV, chunks_per_row, strips,
    C: tl.constexpr, SIGMOID: tl.constexpr, NEGATIVE: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    # dg, dbeta, and the chunk's part of dA_log and ddt_bias; formulas at the top of the file.
    # Program (chunk, head). Grid: entries * HV; 1 warp, two tokens a lane, so cumsum needs no shared memory.
    # Reads g, beta, G and five rows of terms: 30 to 50 bytes per token; writes dg, dbeta and up to two fp64
    # scalars. No PDL.
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    tokens = tl.arange(0, C)
    tile = chunk.to(tl.int64) * HV + head
    # tokens of no sequence get zero gradients, and a chunk that holds no token of a sequence gets zero sums
    is_token = tokens < length
    is_given = tokens < tl.abs(length)
    place = (row.to(tl.int64) * T + first + tokens) * HV + head
    shares = shares_ptr + tile * (ROWS * C) + tokens
    if dg_ptr is not None:
        crossing = tl.load(shares + CROSSING * C, mask=is_token, other=0.0)
        entering = tl.load(shares + ENTERING * C, mask=is_token, other=0.0).to(tl.float64)
        leaving = tl.load(shares + LEAVING * C, mask=is_token, other=0.0).to(tl.float64)
        has_any = length > 0
        # THROUGH starts at place 1 of END's row, whose place 0 is e^(G_C)
        is_share = has_any & (tokens > 0) & (tokens <= strips)
        through = tl.sum(tl.load(shares + THROUGH * C, mask=is_share, other=0.0).to(tl.float64), 0)
        end = tl.load(
            G_ptr + (row.to(tl.int64) * T + first + length - 1) * HV + head, mask=has_any, other=0.0
        )
        # prefix and suffix sums in registers, in fp64: terms of opposite sign cancel
        dg = crossing + tl.cumsum(entering, 0, reverse=True) + (tl.cumsum(leaving, 0) - leaving)
        dg = (dg + through * tl.exp(end)).to(tl.float32)
        g_place = g_ptr + row.to(tl.int64) * g_b + first.to(tl.int64) * g_t + head * g_h + tokens * g_t
        given = tl.load(g_place, mask=is_token, other=0.0).to(tl.float32)
        g = log_decay(given, A_log_ptr, dt_bias_ptr, head, RESET)
        # a reset passes no gradient; without the mask, a rounding error times g = -1e6 would show in dA_log
        passes = is_token & (g > RESET)
        dg = tl.where(passes, dg, 0.0)
        if A_log_ptr is not None:
            if dt_bias_ptr is not None:
                given += tl.load(dt_bias_ptr + head).to(tl.float32)
            slope = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32)) * sigmoid(given)
            dA_log = tl.sum(tl.where(passes, dg * g, 0.0).to(tl.float64), 0)
            tl.store(partial_ptr + tile, dA_log)
            dg = tl.where(passes, dg * slope, 0.0)
            if dt_bias_ptr is not None:
                tl.store(partial_ptr + tl.num_programs(0) + tile, tl.sum(dg.to(tl.float64), 0))
        tl.store(dg_ptr + place, dg.to(dg_ptr.dtype.element_ty), mask=is_given)
    if dbeta_ptr is not None:
        dbeta = tl.load(shares + DBETA * C, mask=is_token, other=0.0)
        if SIGMOID:
            beta_place = beta_ptr + row.to(tl.int64) * beta_b + first.to(tl.int64) * beta_t + head * beta_h
            logit = tl.load(beta_place + tokens * beta_t, mask=is_token, other=0.0).to(tl.float32)
            # sigmoid(-b) instead of 1 - sigmoid(b), which cancels for large b
            slope = sigmoid(logit) * sigmoid(-logit)
            if NEGATIVE:
                slope = 2.0 * slope
            dbeta = tl.where(is_token & (dbeta != 0), dbeta * slope, 0.0)
        tl.store(dbeta_ptr + place, dbeta.to(dbeta_ptr.dtype.element_ty), mask=is_given)
