"""Compute what the outputs of an item need beside the state, and append k and G of its token.

    X = [q; k];   X X^T has <q, k> and the squared norms
    scores = X k_j^T e^(G - G_j) of the history's places j

Scores are split into hi + lo of bf16, as `add_history` of `triton.serving` splits them.
"""

# structs and tensors
# mypy: disable-error-code="attr-defined"
from typing import Any

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.gluon import barrier, jit, mbarrier, mma_v2, struct
from gdn.backends.hopper.scan.scheduler import ONE_WARP, stage_and_phase
from gdn.backends.hopper.serving.items import (
    BETA,
    FOLD_DECAY,
    HALF,
    HEAD,
    IS_FULL,
    IS_ROW,
    K_FACTOR,
    K_RATE,
    PLACE,
    PLACES,
    Q_FACTOR,
    ROW,
    ROWS,
    SCORE,
    SCORERS,
    SLOT,
    SMALL,
    UNIT,
    D,
    count_items,
    load_item,
    load_slot,
    places_of,
    ring_place,
)
from gdn.backends.triton.lib import activate_beta, decay, softplus, split_bf16, split_fp64
from gdn.backends.triton.serving.recurrent_lib import divide

LEFT = gl.constexpr(gl.DotOperandLayout(0, SMALL.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, SMALL.value, 2))
KEYS = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))  # k of a token in one warp
ONE_ELEMENT = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0]))


@struct
class Loaded:
    """Hold what was loaded for an item's scores, an item earlier: gates, k, G of the history and its end."""

    g: Any
    beta: Any
    k: Any
    G: Any
    G_end: Any


@jit
def run_scores(WARP: gl.constexpr, tensors, sizes, shared, config):
    """Compute the scores of the CTA's items WARP, WARP + SCORERS, ..."""
    step = SCORERS * gl.num_programs(0)
    first = gl.program_id(0) + WARP * gl.num_programs(0)
    now = load_item(first, load_slot(first, tensors, sizes), tensors, sizes)
    then = load_item(first + step, load_slot(first + step, tensors, sizes), tensors, sizes)
    slot = load_slot(first + 2 * step, tensors, sizes)
    loaded = load_rest(now, tensors, sizes)
    for turn in range(WARP, count_items(sizes), SCORERS):
        more = load_rest(then, tensors, sizes)
        later = load_item(then.number + step, slot, tensors, sizes)
        slot = load_slot(then.number + 2 * step, tensors, sizes)
        compute_scores(now, loaded, turn, tensors, sizes, shared, shared.gram.index(WARP), config)
        now, then, loaded = then, later, more


@jit
def load_rest(item, tensors, sizes):
    """Load what `Loaded` holds."""
    first, used = places_of(item, sizes)
    key_head = divide(item.head, sizes.ratio_magic, sizes.ratio_shift)
    key = gl.arange(0, D, KEYS)
    k = gl.load(tensors.k.at(item.row, key_head, UNIT) + key, mask=(key < D) & item.has_slot, other=0.0)
    G = tensors.G
    G_ptr = G.at(item.slot, item.head, 1)
    token = gl.arange(0, PLACES, gl.SliceLayout(0, SMALL))
    G_at = G_ptr + ring_place(token, first, sizes).to(gl.int64) * G.place
    G_past = gl.load(G_at, mask=(token < used) & item.has_slot, other=0.0).to(gl.float64)
    end_at = G_ptr + ring_place(used - 1, first, sizes).to(gl.int64) * G.place
    G_end = gl.load(end_at, mask=(used > 0) & item.has_slot, other=0.0).to(gl.float64)
    g, beta = 0.0, 1.0
    if tensors.g.ptr is not None:
        g = gl.load(tensors.g.at(item.row, item.head, 1), mask=item.has_slot, other=0.0).to(gl.float32)
    if tensors.beta.ptr is not None:
        beta = gl.load(tensors.beta.at(item.row, item.head, 1), mask=item.has_slot, other=0.0).to(gl.float32)
    return Loaded(g, beta, k, G_past, G_end)


@jit
def compute_gates(item, loaded, tensors, config):
    """Return g and beta of an item's token, as `load_gates` of `triton.serving`."""
    g, beta = loaded.g, loaded.beta
    if tensors.A_log_ptr is not None:
        if tensors.dt_bias_ptr is not None:
            g += gl.load(tensors.dt_bias_ptr + item.head * tensors.dt_bias_head).to(gl.float32)
        A_log = gl.load(tensors.A_log_ptr + item.head * tensors.A_log_head).to(gl.float32)
        g = -gl.exp(A_log) * softplus(g)
    # keeps NaN
    g = gl.where(g < config.RESET, config.RESET, g)
    if tensors.beta.ptr is not None:
        beta = activate_beta(beta, tensors.A_log_ptr is not None, config.NEGATIVE)
    return g, beta


@jit
def _element(tile, I: gl.constexpr, J: gl.constexpr):
    # one element of shared memory, in every lane
    return gl.sum(gl.sum(tile.slice(I, 1, 0).slice(J, 1, 1).load(ONE_ELEMENT), 1), 0)


@jit
def compute_scores(item, loaded, turn, tensors, sizes, shared, gram, config):
    """Compute the fields and scores of an item, and append its token to the history, but for u."""
    at, phase = stage_and_phase(turn, shared.arrived)
    stage, _ = stage_and_phase(turn, shared.ready)
    first, used = places_of(item, sizes)
    is_full = used + 1 > sizes.places - sizes.room
    place = ring_place(used, first, sizes)
    g, beta = compute_gates(item, loaded, tensors, config)
    high, low = split_fp64(g.to(gl.float64) + loaded.G_end)
    still = gl.exp(high)
    old_high, old_low = split_fp64(loaded.G)
    mbarrier.wait(shared.arrived.index(at), phase)
    # Count the item now: this warp has used the cursor, and so have those that copied the token. Earlier, the
    # last item of a row could store the cursor before they load it. The count is not needed before the end
    lane = gl.arange(0, 32, ONE_WARP)
    cursor_at = tensors.cursor_ptr + item.slot * tensors.cursor_slot + lane * 0
    done = gl.atomic_add(cursor_at + 2, lane * 0 + 1, mask=(lane == 0) & item.has_slot, sem="relaxed")
    # the item that had the stage before has been read
    shared.wait_until_empty(turn)
    x_s = shared.x.index(at)
    x = x_s.load(LEFT)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, SMALL)
    gram.store(mma_v2(x, x_s.permute((1, 0)).load(RIGHT), zeros))
    scores = mma_v2(x, shared.k.index(at).permute((1, 0)).load(RIGHT), zeros)
    q_rate, k_rate = sizes.scale, 1.0
    if config.NORM:
        q_rate *= gl.rsqrt(_element(gram, 0, 0) + 1e-6)
        k_rate *= gl.rsqrt(_element(gram, HALF, HALF) + 1e-6)
    rates = gl.where(gl.arange(0, ROWS, gl.SliceLayout(1, SMALL)) < HALF, q_rate, k_rate)
    scores = scores * decay(old_high, old_low, high, low)[None, :] * rates[:, None]
    s_high, s_low = split_bf16(scores, gl.bfloat16)
    shared.scores.index(2 * stage).store(s_high)
    shared.scores.index(2 * stage + 1).store(s_low)
    shared.set_int(stage, ROW, item.row)
    shared.set_int(stage, HEAD, item.head)
    shared.set_int(stage, SLOT, item.slot.to(gl.int32))
    shared.set_int(stage, PLACE, place)
    shared.set_int(stage, IS_ROW, item.has_slot.to(gl.int32))
    shared.set_int(stage, IS_FULL, (is_full & item.has_slot).to(gl.int32))
    shared.set_float(stage, Q_FACTOR, q_rate * still)
    shared.set_float(stage, K_FACTOR, k_rate * still)
    shared.set_float(stage, SCORE, _element(gram, 0, HALF) * q_rate * k_rate)
    shared.set_float(stage, BETA, beta)
    shared.set_float(stage, K_RATE, k_rate)
    if is_full:
        end_high, end_low = split_fp64(loaded.G_end)
        shared.set_float(stage, FOLD_DECAY, gl.exp(end_high))
        shared.still.index(stage).store(decay(old_high, old_low, end_high, end_low))
    barrier()
    mbarrier.arrive(shared.ready.index(stage), count=1)
    if item.has_slot:
        # only one of the value heads that share a key head stores k
        key_head = divide(item.head, sizes.ratio_magic, sizes.ratio_shift)
        if key_head * sizes.ratio == item.head:
            past = tensors.past_k
            past_ptr = past.ptr + (item.slot * past.slot + key_head * past.head + place * past.place) * UNIT
            gl.store(past_ptr + gl.arange(0, D, KEYS), loaded.k.to(past.ptr.dtype.element_ty))
        # after a fold the sums go on from the state that the outputs' warps write
        G = tensors.G
        G_at = G.ptr + (item.slot * G.slot + item.head * G.head + place.to(gl.int64) * G.place)
        sums = g.to(gl.float64) + gl.where(is_full, 0.0, loaded.G_end)
        gl.store(G_at, sums.to(G.ptr.dtype.element_ty))
        # the last item of a row stores the cursor: nobody reads it any more
        is_last = (done == sizes.HV - 1) & (lane == 0)
        gl.store(cursor_at, gl.where(is_full, place, first) + lane * 0, mask=is_last)
        gl.store(cursor_at + 1, gl.where(is_full, 0, used) + 1 + lane * 0, mask=is_last)
        gl.store(cursor_at + 2, lane * 0, mask=is_last)
