"""Compute dq, dk and the gradient of a decay per key channel, channel by channel.

With d_i, d_j of `channels`, E and F of `values_bwd`, and for a level X = d q, Y = d k:

    dq = scale e^G (do S_in^T) + sum of levels d (E Y)
    dk = e^(G_C - G) (v_new dS^T) - e^G (dv S_in^T) + sum of levels d (beta F Y + (beta F)^T Y + E^T X)
    dg = sums of q dq and k dk of each level, over the tokens whose decay is in d

No channel needs another one, so a program has a strip of K. A level's dg adds up the terms of its pairs from
the middle outwards, so no two large sums are subtracted; the textbook's suffix sum of q dq - k dk cancels.
With l2norm, or value heads that share a key head, dq and dk leave in fp32, as gradients of the normalised
rows of each value head: `finish_bwd` adds them up and has whole rows.

Bytes per token and value head at K = V = 128 in bf16, HV = H, g in fp32, strips of 16: do, dv, v_new 768
and E and F 256 (eight times from L2), S_in and dS 1024, q, k 512, g and dg 1024, dq and dk 512.
"""

import triton.language as tl

from gdn.backends.triton.chunks import locate
from gdn.backends.triton.launch import jit, kernel
from gdn.backends.triton.lib import (
    Rows,
    TokenRange,
    column_mask,
    dot,
    load_rows,
    load_rstd,
    operand_dtype,
)
from gdn.backends.triton.rule.channels import (
    add_within_block,
    block_totals,
    channel_decays,
    double_pieces,
    gate_rate,
    halves,
    in_blocks,
    is_late_block,
    is_odd_block,
    is_second,
    join_halves,
    level_decays,
    load_logits,
    logits_bwd,
    of_tokens,
    swap_neighbours,
)
from gdn.backends.triton.rule.gradients import state_block
from gdn.backends.triton.rule.pairs import BETA, factor


@jit
def in_level(LEVEL):
    """Return [16, 16]: at [i, t] True if g of token t is in the decay d_i of a level in blocks."""
    i = tl.arange(0, 16)[:, None]
    t = tl.arange(0, 16)[None, :]
    second = (i >> LEVEL) & 1 == 1
    return (i >> LEVEL == t >> LEVEL) & tl.where(second, t <= i, t > i)


@jit
def levels_in_blocks(q, k, g, pairs_ptr, beta, C: tl.constexpr, PRECISION: tl.constexpr):
    """Return dq, dk, dg of the pairs within blocks of 16 tokens, and their share of dbeta [4, 16].

    Also returns the sums of g in a block up to a token, and after it.
    """
    n = tl.arange(0, 4)[:, None, None]
    a = tl.arange(0, 16)[None, :, None]
    b = tl.arange(0, 16)[None, None, :]
    # at [a, b]: E of key a and query b if a <= b, else F of query a and key b
    pairs = tl.load(pairs_ptr + (16 * n + a) * C + 16 * n + b)
    # a token's own pair has no decay
    own = tl.sum(tl.where(a == b, pairs, 0.0), 2)[:, :, None]
    dq = own * k
    dk = own * q
    dg = tl.zeros_like(g)
    share = tl.zeros([4, 16], tl.float32)
    before = g
    after = tl.zeros_like(g)
    for level in range(4):
        d = level_decays(before, after, level)
        rows, columns = q * d, k * d
        is_level = (a ^ b) >> level == 1
        E_t = tl.where(is_level & (a < b), pairs, 0.0)
        F = tl.where(is_level & (a > b), pairs, 0.0)
        drows = dot(tl.permute(E_t, (0, 2, 1)), columns, None, PRECISION)
        # rows of F have beta after the product, because dbeta needs it without
        both = F + tl.permute(F * beta, (0, 2, 1))
        dcolumns = dot(both, columns, None, PRECISION)
        second = is_second(d, level)
        share += tl.sum(tl.where(second, dcolumns * columns, 0.0), 2)
        dcolumns = tl.where(second, dcolumns * beta, dcolumns)
        dcolumns = dot(E_t, rows, dcolumns, PRECISION)
        dq += drows * d
        dk += dcolumns * d
        dg = add_within_block(in_level(level), rows * drows + columns * dcolumns, dg, PRECISION)
        before, after = double_pieces(before, after, level)
    return dq, dk, dg, share, before, after


@jit
def level_of_neighbours(q, k, d, pairs_ptr, beta, C: tl.constexpr, PRECISION: tl.constexpr):
    """Return dq, dk, the gradient of log d and the share of dbeta of pairs between neighbouring blocks."""
    n = tl.arange(0, 4)[:, None, None]
    a = tl.arange(0, 16)[None, :, None]
    b = tl.arange(0, 16)[None, None, :]
    odd = is_odd_block()
    # odd blocks: F of their queries; even ones: E of their keys. `turned` has the others, transposed
    pairs = tl.load(pairs_ptr + (16 * n + a) * C + 16 * (n ^ 1) + b)
    turned = tl.load(pairs_ptr + (16 * (n ^ 1) + b) * C + 16 * n + a)
    other_beta = tl.permute(swap_neighbours(tl.broadcast_to(beta, (4, 16, 16))), (0, 2, 1))
    turned = tl.where(odd, turned, turned * other_beta)
    rows, columns = q * d, k * d
    other_rows, other_columns = swap_neighbours(rows), swap_neighbours(columns)
    drows = dot(tl.where(odd, turned, 0.0), other_columns, None, PRECISION)
    dcolumns = dot(tl.where(odd, pairs, turned), other_columns, None, PRECISION)
    share = tl.sum(tl.where(odd, dcolumns * columns, 0.0), 2)
    dcolumns = tl.where(odd, dcolumns * beta, dcolumns)
    dcolumns = dot(tl.where(odd, 0.0, pairs), other_rows, dcolumns, PRECISION)
    return drows * d, dcolumns * d, rows * drows + columns * dcolumns, share


@jit
def level_of_halves(q, k, d, pairs_ptr, beta, C: tl.constexpr, PRECISION: tl.constexpr):
    """Return dq, dk, the gradient of log d and the share of dbeta of pairs between halves of the chunk."""
    a = tl.arange(0, 32)[:, None]
    b = tl.arange(0, 32)[None, :]
    E_t = tl.load(pairs_ptr + a * C + 32 + b)
    F = tl.load(pairs_ptr + (32 + a) * C + b)
    _, rows = halves(q * d)
    first, second = halves(k * d)
    _, late_beta = halves(beta)
    drows = dot(tl.trans(E_t), first, None, PRECISION)
    dsecond = dot(F, first, None, PRECISION)
    share = tl.sum(dsecond * second, 1)
    dsecond *= late_beta
    dfirst = dot(tl.trans(F * late_beta), second, None, PRECISION)
    dfirst = dot(E_t, rows, dfirst, PRECISION)
    none = tl.zeros_like(drows)
    change = join_halves(first * dfirst, rows * drows + second * dsecond)
    dq, dk = join_halves(none, drows) * d, join_halves(dfirst, dsecond) * d
    share = tl.reshape(tl.permute(tl.join(tl.zeros_like(share), share), (1, 0)), (4, 16))
    return dq, dk, change, share


@jit
def totals_bwd(dearlier, dlater, dbetween, dall):
    """Return the gradient of the sums of g over blocks [4, 1, N], the adjoint of `block_totals`.

    dearlier, dlater, dbetween [4, 16, N]: of tokens whose decay has the sums over earlier blocks, over later
    ones, and over the block between theirs and the middle of the chunk. dall [N]: of the sum over all.
    """
    N: tl.constexpr = dearlier.shape[2]
    # [receiving block, block of the token, channel]
    m = tl.arange(0, 4)[:, None, None]
    n = tl.arange(0, 4)[None, :, None]
    earlier = tl.broadcast_to(tl.sum(dearlier, 1)[None, :, :], (4, 4, N))
    later = tl.broadcast_to(tl.sum(dlater, 1)[None, :, :], (4, 4, N))
    between = tl.broadcast_to(tl.sum(dbetween, 1)[None, :, :], (4, 4, N))
    total = tl.where(n > m, earlier, 0.0) + tl.where(n < m, later, 0.0)
    total += tl.where((n == 3) & (m == 2) | (n == 0) & (m == 1), between, 0.0)
    return (tl.sum(total, 1) + dall[None, :])[:, None, :]


@jit
def gate_bwd(
    dg, g, x, rate, lower_bound, RAW: tl.constexpr, BOUNDED: tl.constexpr, RESET: tl.constexpr
):  # fmt: skip
    """Return the gradient of logits x [C, channels], and its terms of dA_log, from dg; x as in `load_logits`.

    A reset passes no gradient.
    """
    # without the mask, a rounding error times g = -1e6 would show in dA_log
    dg = tl.where(g > RESET, dg, 0.0)
    if not RAW:
        return dg, tl.zeros_like(dg)
    else:
        return logits_bwd(dg, g, x, rate, lower_bound, BOUNDED)


@kernel
def rows_bwd_channels_kernel(
    q_ptr, k_ptr, g_ptr, A_log_ptr, dt_bias_ptr, q_rstd_ptr, k_rstd_ptr, S_in_ptr, dS_ptr, do_ptr, dv_ptr,
    v_new_ptr, table_ptr, pairs_ptr, factors_ptr, dq_ptr, dk_ptr, dg_ptr, shares_ptr, rates_ptr, biases_ptr,
    done_ptr, q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, do_b, do_t, do_h, T, HV, ratio, chunks_per_row,
    scale, lower_bound, begin,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    RAW: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, RESET: tl.constexpr,
    SUBS: tl.constexpr, FP32_STATE: tl.constexpr,
):  # fmt: skip
    # dq, dk and dg of one chunk, value head and strip of BK channels; formulas at the top of the file.
    # Program (chunk of the group, head, strip), strips fastest: those of a chunk find do, dv, v_new, E and F
    # in L2. Grid: entries of the group * HV * strips; 4 warps, one per block of 16 tokens; no PDL.
    # Reads q, k, g, E, F, S_in, dS, do, dv and v_new; writes dq, dk and dg, and partial sums: of dbeta over
    # the strip's channels, of dA_log and of ddt_bias over the chunk's tokens. A loop over the value heads of
    # a key head would hoist addresses and masks, and spill them; so would one over SUBS strips, which
    # `rows_bwd_mma_kernel` takes at once: where it is `done` with them, the program returns.
    blocks: tl.constexpr = (K + BK * SUBS - 1) // (BK * SUBS) * SUBS
    own = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks) % HV
    part = tl.program_id(0) // (blocks * HV)
    if done_ptr is not None:  # noqa: SIM102 - a constant, and what only then is compiled
        if tl.load(done_ptr + tl.program_id(0) // SUBS) != 0:
            return
    chunk = begin + part
    key_head = head // ratio
    row, first, length = locate(chunk, table_ptr, T, chunks_per_row, C)
    token_range = TokenRange(row, first, length)
    operand: tl.constexpr = operand_dtype(k_ptr, FP32_STATE)
    tokens = tl.arange(0, C)
    ks = own * BK + tl.arange(0, BK)
    is_channel = column_mask(ks, K)
    # tokens of no sequence get zero gradients, and chunks of no sequence zero partial sums
    is_given = (tokens < tl.abs(length))[:, None] & is_channel[None, :]
    place = row.to(tl.int64) * T + first
    tile = chunk.to(tl.int64) * HV + head
    row_place = (place * HV + head) * K + (tokens[:, None] * (HV * K) + ks[None, :])
    rates_place = (chunk.to(tl.int64) * blocks + own) * HV + head
    biases_place = tile * K + ks
    if length <= 0:
        tl.store(dq_ptr + row_place, tl.zeros([C, BK], dq_ptr.dtype.element_ty), mask=is_given)
        tl.store(dk_ptr + row_place, tl.zeros([C, BK], dk_ptr.dtype.element_ty), mask=is_given)
        tl.store(dg_ptr + row_place, tl.zeros([C, BK], dg_ptr.dtype.element_ty), mask=is_given)
        if rates_ptr is not None:
            tl.store(rates_ptr + rates_place, 0.0)
        if biases_ptr is not None:
            tl.store(biases_ptr + biases_place, tl.zeros([BK], tl.float64), mask=is_channel)
        return

    is_token = tokens < length
    rate = gate_rate(A_log_ptr, head)
    of_g = Rows(g_ptr, g_b, g_t, g_h)
    x = load_logits(of_g, dt_bias_ptr, token_range, head, ks, K, C, UNIT)
    g = in_blocks(channel_decays(x, rate, lower_bound, is_token, RAW, BOUNDED, RESET))
    num_heads = HV // ratio
    q = load_rows(Rows(q_ptr, q_b, q_t, q_h), token_range, key_head, ks, K, C, UNIT)
    k = load_rows(Rows(k_ptr, k_b, k_t, k_h), token_range, key_head, ks, K, C, UNIT)
    rstd = load_rstd(q_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    q = in_blocks(q).to(tl.float32) * of_tokens(rstd)
    rstd = load_rstd(k_rstd_ptr, row, first, length, key_head, T, num_heads, C)
    k = in_blocks(k).to(tl.float32) * of_tokens(rstd)
    beta = of_tokens(factor(factors_ptr, tile, BETA, C))
    group_tile = part.to(tl.int64) * HV + head
    E_F = pairs_ptr + group_tile * (C * C)
    dq, dk, dg, share, before, after = levels_in_blocks(q, k, g, E_F, beta, C, PRECISION)
    total, earlier, later, between = block_totals(g)
    # the gradients of `before` and `after`: of tokens whose decay has them
    d = tl.exp(tl.where(is_odd_block(), before, after))
    dq_new, dk_new, change, part_share = level_of_neighbours(q, k, d, E_F, beta, C, PRECISION)
    dq += dq_new
    dk += dk_new
    share += part_share
    dbefore = tl.where(is_odd_block(), change, 0.0)
    dafter = tl.where(is_odd_block(), 0.0, change)
    d = tl.exp(tl.where(is_late_block(), before, after) + between)
    dq_new, dk_new, dbetween, part_share = level_of_halves(q, k, d, E_F, beta, C, PRECISION)
    dq += dq_new
    dk += dk_new
    share += part_share
    dbefore += tl.where(is_late_block(), dbetween, 0.0)
    dafter += tl.where(is_late_block(), 0.0, dbetween)
    tl.store(shares_ptr + (tile * blocks + own) * C + tokens, tl.reshape(share, (C,)))

    do_S = tl.zeros([BK, C], tl.float32)
    dv_S = tl.zeros([BK, C], tl.float32)
    v_dS = tl.zeros([BK, C], tl.float32)
    SdS = tl.zeros([BK], tl.float32)
    for strip in range(0, V, BV):
        vs = strip + tl.arange(0, BV)
        is_value = column_mask(vs, V)[None, :]
        # channels down: a product of fewer than 64 rows uses mma.sync, not WGMMA with few columns
        S = state_block(S_in_ptr, tile, ks, vs, K, V).to(operand)
        dS = state_block(dS_ptr, tile, ks, vs, K, V).to(operand)
        do = load_rows(Rows(do_ptr, do_b, do_t, do_h), token_range, head, vs, V, C, UNIT)
        do_S = dot(S, tl.trans(do.to(operand)), do_S, PRECISION)
        dv_place = (place * HV + head) * V + (tokens[:, None] * (HV * V) + vs[None, :])
        dv = tl.load(dv_ptr + dv_place, mask=is_token[:, None] & is_value, other=0.0)
        dv_S = dot(S, tl.trans(dv.to(operand)), dv_S, PRECISION)
        v_new_place = group_tile * (C * V) + (tokens[:, None] * V + vs[None, :])
        v_new = tl.load(v_new_ptr + v_new_place, mask=is_value, other=0.0)
        v_dS = dot(dS, tl.trans(v_new.to(operand)), v_dS, PRECISION)
        SdS += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    decay_in = tl.exp(before + earlier)
    dq_new = in_blocks(tl.trans(do_S)) * (decay_in * scale)
    dk_new = in_blocks(tl.trans(dv_S)) * -decay_in
    change = q * dq_new + k * dk_new
    dq += dq_new
    dk += dk_new
    dk_new = in_blocks(tl.trans(v_dS)) * tl.exp(after + later)
    dk += dk_new
    through = SdS * tl.exp(tl.sum(tl.sum(total, 1), 0))
    dtotal = totals_bwd(change, k * dk_new, dbetween, through)
    # within a block: sums over the tokens from one on, and over those before one
    dg = add_within_block(in_level(4), dafter + k * dk_new, dg + dtotal, PRECISION)
    a = tl.arange(0, 16)
    dg = add_within_block(a[None, :] <= a[:, None], dbefore + change, dg, PRECISION)
    tl.store(dq_ptr + row_place, tl.reshape(dq, (C, BK)).to(dq_ptr.dtype.element_ty), mask=is_given)
    tl.store(dk_ptr + row_place, tl.reshape(dk, (C, BK)).to(dk_ptr.dtype.element_ty), mask=is_given)

    dg = tl.reshape(dg, (C, BK))
    # loaded again, so that no register holds the logits meanwhile
    x = load_logits(of_g, dt_bias_ptr, token_range, head, ks, K, C, UNIT)
    g = channel_decays(x, rate, lower_bound, is_token, RAW, BOUNDED, RESET)
    dx, along = gate_bwd(dg, g, x, rate, lower_bound, RAW, BOUNDED, RESET)
    dx = tl.where(is_token[:, None], dx, 0.0)
    tl.store(dg_ptr + row_place, dx.to(dg_ptr.dtype.element_ty), mask=is_given)
    if rates_ptr is not None:
        along = tl.where(is_token[:, None], along, 0.0)
        tl.store(rates_ptr + rates_place, tl.sum(tl.sum(along.to(tl.float64), 1), 0))
    if biases_ptr is not None:
        tl.store(biases_ptr + biases_place, tl.sum(dx.to(tl.float64), 0), mask=is_channel)
