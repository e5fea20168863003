# mypy: disable-error-code="assignment, var-annotated"
"""Run the strips of columns of a packet on a state and its history: parts of `replay` and `history`."""

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.lib import column_mask, decay, split_fp64
from gdn.backends.triton.serving.history_lib import (
    apply_column_scales,
    compute_token,
    fold_strip,
    load_history_G,
    load_history_u,
    ring_places,
)
from gdn.backends.triton.serving.packet_lib import (
    ROWS,
    column_pointer,
    compute_outputs,
    dot_mixed,
    load_rows,
    load_values,
    multiply_state,
    row_pointers,
    scale_rows,
    store_outputs,
    strip_mask,
)
from gdn.backends.triton.serving.packet_loads import late_count, multiply_held, use_here
from gdn.backends.triton.serving.structs import Strip, Sums


@jit
def load_past(history, column, has_value, C: tl.constexpr):
    """Load the first BP places of a history: all keys, G as hi and lo, and u of a strip of columns."""
    old = tl.arange(0, C.BP)
    high, low = load_history_G(history, old)
    u = load_history_u(history, history.u_ptr + column, 0, tl.arange(0, C.BV), has_value, C)
    return load_past_k(history, old, tl.arange(0, C.BS), C), high, low, u


@jit
def keep_past(past, history, C: tl.constexpr):
    """Return places as `load_past` loaded them before the cursor arrived, and which of them are in use.

    Places beyond the history may hold NaN: u and G are zero there, and `score_history` zeroes their products.
    """
    k, high, low, u = past
    is_used = tl.arange(0, C.BP) < history.count
    high, low = tl.where(is_used, high, 0.0), tl.where(is_used, low, 0.0)
    return use_here(k), high, low, tl.where(is_used[:, None], use_here(u), 0.0), is_used


@jit
def sum_rows(sums):
    """Return sums of g up to the rows of a packet since its history began, as hi + lo."""
    high, low = split_fp64(sums.packet + sums.past)
    return Sums(high, low)


@jit
def load_past_k(history, old, ks, C: tl.constexpr):
    """Load some keys of places `old` of a history [BP, ks]; zeros beyond the history."""
    places = ring_places(old, history)
    return tl.load(
        row_pointers(history.k_ptr, places, ks, history.k_p, 1, C.PAST_UNIT, True, C.NEAR),
        mask=(old < history.count)[:, None] & column_mask(ks, C.K)[None, :], other=0.0,
    )  # fmt: skip


@jit
def score_history(X, row_scales, packet, history, start, past, sums, C: tl.constexpr):
    """Return scores of rows and BP places of a history, by parts: <row, k_j> e^(G - G_j), scaled [16, BP].

    past: these places as `load_past` or `keep_past` returned them, or empty.
    """
    PARTS: tl.constexpr = 2 * C.BT // ROWS
    old = start + tl.arange(0, C.BP)
    last = tl.zeros([ROWS, C.BP], tl.float32)
    first = last
    for key in tl.range(0, C.K, C.BS):
        ks = key + tl.arange(0, C.BS)
        if len(past) == 0:
            past_k = load_past_k(history, old, ks, C)
        else:
            past_k = past[0]
        for part in tl.static_range(PARTS):
            if C.BS < C.K:
                x = load_rows(part, packet, ks, C)
            else:
                x = X[part]
            if part == PARTS - 1:
                last = dot_mixed(x, tl.trans(past_k), last, C.PRECISION)
            else:
                first = dot_mixed(x, tl.trans(past_k), first, C.PRECISION)
    if len(past) == 0:
        old_high, old_low = load_history_G(history, old)
    else:
        old_high, old_low = past[1], past[2]
    if len(past) == 5:
        # Before they are scaled. ptxas fuses the last scaling with the subtraction in `split_bf16`, and would
        # not across a selection: other bits than those of places that are masked where they are loaded
        last = tl.where(past[4][None, :], last, 0.0)
    # decays up to each row of the packet, from hi + lo sums
    D = decay(old_high[None, :], old_low[None, :], sums.high[:, None], sums.low[:, None])
    if PARTS == 2:
        return first * D * row_scales[0][:, None], last * D * row_scales[1][:, None]
    else:
        return (last * D * row_scales[0][:, None],)


@jit
def add_history(XS, scores, u, PRECISION: tl.constexpr):
    """Add the history's part, scores times u, to the products of rows and state, by parts."""
    outputs = ()
    for part in tl.static_range(len(XS)):
        outputs = outputs + (dot_mixed(scores[part], u, XS[part], PRECISION),)
    return outputs


@jit
def add_early_history(XS, X, row_scales, packet, history, past, sums, C: tl.constexpr):
    """Scale the products of rows and state, and add a history loaded by `load_past` before its cursor."""
    past, late = keep_past(past, history, C), sum_rows(sums)
    scores = score_history(X, row_scales, packet, history, 0, past, late, C)
    return add_history(scale_rows(XS, row_scales, tl.exp(late.high)), scores, past[3], C.PRECISION)


@jit
def run_strips(solved, packet, history, tensors, new, block, C: tl.constexpr, PASTS: tl.constexpr):
    """Compute o and u for all columns of a program, with PASTS blocks of a history, or all if PASTS is 0.

    tensors: v, the state, its scales and o; then what a program of one strip has in registers, or empty: its
    state and v, and the first places of the history. READS_PAST: these are all of its places; they and the
    sums, as `RowSums`, are used in the loop, where the state is waited for.
    """
    PARTS: tl.constexpr = 2 * C.BT // ROWS
    X, W, row_scales, beta, sums, end = solved
    v, state, scales, o, held, first_past = tensors
    # scores with the history stay in registers over all strips of columns
    scores = ()
    if not C.READS_PAST:
        for block_past in tl.static_range(PASTS):
            past = ()
            if block_past == 0:
                past = first_past
            score = score_history(X, row_scales, packet, history, block_past * C.BP, past, sums, C)
            scores = scores + (score,)
        decays = tl.exp(sums.high)
    # the pipeliner keeps STAGES - 1 strips of S in flight from HBM
    for strip in tl.range(0, late_count(C.STRIPS, packet.count, C.READS_PAST), num_stages=C.STAGES):
        column, vs = (block * C.STRIPS + strip) * C.BV, tl.arange(0, C.BV)
        left = C.V - column
        has_value = strip_mask(vs, left, C.V, C.STRIPS)[None, :]
        if len(held) == 0:
            values = load_values(v, column, packet.count, C)
        else:
            values = held[1]
        strip_ptr = column_pointer(state.ptr, column, state.outer * C.STATE_UNIT, C.AXIS == "v")
        if len(held) == 0:
            XS = multiply_state(X, packet, Strip(strip_ptr, vs, left, state.inner, state.outer), C)
        else:
            XS = multiply_held(X, held[0], C)
        if not C.READS_PAST:
            XS = scale_rows(XS, row_scales, decays)
        if scales.ptr is not None:
            XS = apply_column_scales(XS, scales, column, vs, has_value)
        past_u_ptr = history.u_ptr + column
        if C.READS_PAST:
            XS = add_early_history(XS, X, row_scales, packet, history, first_past, sums, C)
        else:
            for block_past in tl.static_range(PASTS):
                if len(first_past) > 0 and block_past == 0:
                    u_old = first_past[3]
                else:
                    u_old = load_history_u(history, past_u_ptr, block_past * C.BP, vs, has_value, C)
                XS = add_history(XS, scores[block_past], u_old, C.PRECISION)
            # a long history: its scores are recomputed for each strip, as they do not fit into registers
            if PASTS == 0:
                for start in range(0, history.count, C.BP):
                    score = score_history(X, row_scales, packet, history, start, (), sums, C)
                    u_old = load_history_u(history, past_u_ptr, start, vs, has_value, C)
                    XS = add_history(XS, score, u_old, C.PRECISION)
        if C.IS_SINGLE:
            outputs = compute_token(XS, values, beta, W)
        else:
            outputs = compute_outputs(XS, values, beta, W, C.BT, C.FP32_PRECISION)
        o_ptr = column_pointer(o.ptr, column, o.outer, C.DENSE)
        store_outputs(Strip(o_ptr, vs, left, o.inner, o.outer), outputs, packet.count, C)
        u_at = row_pointers(past_u_ptr, new.places, vs, history.u_p, 1, C.PAST_UNIT, True, C.NEAR)
        u = outputs[PARTS - 1].to(history.u_ptr.dtype.element_ty)
        # u of places beyond the history is dropped
        tl.store(u_at, u, mask=new.is_kept[:, None] & has_value)
        if C.FOLDS:
            # S of this strip is still in L2: it is loaded again, in the layout of its store
            columns = Strip(strip_ptr, vs, left, state.inner, state.outer)
            fold_strip(columns, scales, history, end, column, C)
