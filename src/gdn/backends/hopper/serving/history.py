"""Decode one token with a history, and fold the histories that are full: persistent, in Gluon.

    S_t = e^(G_t) S + sum_j e^(G_t - G_j) k_j u_j^T;   r = beta (v - S_t^T k);   o = scale (S_t^T q + <q, k> r)

The arithmetic, and so the bits, are those of `triton.serving.history`. There a program is a chain of latencies
(slot, cursor, history, state), and the next state is not asked for before the program ends. Here a CTA takes
row and head after row and head, and copies the state, the history and the token of the next one into shared
memory (cp.async) while it computes this one; slots and cursors are loaded one and two items earlier.
"""

# tuples and structs of tensors
# mypy: disable-error-code="attr-defined"
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from gdn.backends.hopper.gluon import barrier, gdc_launch_dependents, gdc_wait, jit, kernel, mbarrier, mma_v2, struct
from gdn.backends.triton.lib import activate_beta, decay, softplus, split_bf16, split_fp64
from gdn.backends.triton.serving.pool_lib import LEVELS as INT16_LEVELS
from gdn.backends.triton.serving.pool_lib import MAGIC, SHORT_LEVELS, STEPS, rounding_of

PLACES = gl.constexpr(16)  # of a history: the rows of an MMA
ROWS = gl.constexpr(16)  # of X: q in rows 0 to 7, k in rows 8 to 15, so that every lane has both results
K_ROW = gl.constexpr(8)
ROW, HEAD, SLOT, NEW, IS_ROW, IS_FULL = (gl.constexpr(i) for i in range(6))
Q_FACTOR, K_FACTOR, SCORE, BETA, K_RATE, FOLD_DECAY = (gl.constexpr(i) for i in range(6))
FIELDS = gl.constexpr(6)
COPIERS = gl.constexpr(2)
HALF = gl.constexpr(64)  # value columns of a tile of a state
ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@struct
class Item:
    """Say which row and head an item is, and what its cursor says."""

    index: Any
    row: Any
    head: Any
    slot: Any
    ring: Any
    used: Any
    is_row: Any


@struct
class Loaded:
    """Hold what the producer loads of an item into registers: gates, G of its history and at its end."""

    g: Any
    beta: Any
    G_end: Any
    G: Any
    k: Any


@struct
class Config:
    """Hold the constants of the kernel, and the layouts of its registers."""

    MMA: Any  # of X S: warps share the columns
    SMALL: Any  # of X k^T: each warp has all of it
    FOLD: Any
    UNIT: Any
    SIZE: Any
    NORM: Any
    NEGATIVE: Any
    RESET: Any


@struct
class Buffers:
    """Hold the shared memory of all stages."""

    S: Any  # [STAGES, HALF, D]
    x: Any  # [RING, 16, D]: q eight times, k eight times
    k: Any  # [RING, PLACES, D]
    u: Any  # [RING, PLACES, D]
    v: Any  # [RING, D]
    column_scale: Any  # [RING, D] or None
    scores: Any  # [STAGES, 2, 16, PLACES]
    still: Any  # [STAGES, PLACES]
    ints: Any  # [STAGES, INTS, 1]
    floats: Any  # [STAGES, FLOATS, 1]
    arrived: Any
    ready: Any
    free: Any
    full: Any
    empty: Any


@struct
class Token:
    """Hold what the consumer has of an item in registers."""

    x: Any
    s_high: Any
    s_low: Any
    factors: Any
    beta: Any
    score: Any
    k_rate: Any
    o_ptr: Any
    u_ptr: Any
    is_row: Any


@struct
class Sources:
    """Hold pointers and strides."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    state_ptr: Any
    u_ptr: Any
    past_ptr: Any
    G_ptr: Any
    cursor_ptr: Any
    g_ptr: Any
    beta_ptr: Any
    A_log_ptr: Any
    dt_bias_ptr: Any
    scale_ptr: Any
    low_ptr: Any
    index_ptr: Any
    o_ptr: Any
    q_b: Any
    q_h: Any
    k_b: Any
    k_h: Any
    v_b: Any
    v_h: Any
    o_b: Any
    o_h: Any
    g_b: Any
    g_h: Any
    beta_b: Any
    beta_h: Any
    A_log_h: Any
    dt_bias_h: Any
    state_n: Any
    state_h: Any
    state_v: Any
    u_n: Any
    u_p: Any
    u_h: Any
    past_n: Any
    past_p: Any
    past_h: Any
    G_n: Any
    G_p: Any
    G_h: Any
    cursor_n: Any
    read_n: Any
    scale_n: Any
    scale_h: Any
    scale_v: Any
    low_n: Any
    low_h: Any
    low_k: Any
    low_v: Any
    items: Any
    HV: Any
    ratio: Any
    slots: Any
    lowest: Any
    places: Any
    room: Any
    scale: Any


@jit
def load_slot(src, item):
    """Return the slot of an item, -1 past the last one."""
    row = item // src.HV
    if src.index_ptr is None:
        return gl.where(item < src.items, row, -1).to(gl.int64)
    else:
        return gl.load(src.index_ptr + row.to(gl.int64) * src.read_n, mask=item < src.items, other=-1).to(gl.int64)


@jit
def load_cursor(src, item, slot):
    """Return an item with its cursor as it is stored."""
    is_row = (slot >= src.lowest) & (slot < src.slots)
    slot = gl.where(is_row, slot, 0)
    at = src.cursor_ptr + slot * src.cursor_n
    ring = gl.load(at, mask=is_row, other=0)
    used = gl.load(at + 1, mask=is_row, other=0)
    row = item // src.HV
    return Item(item, row, item - row * src.HV, slot, ring, used, is_row)


@jit
def clamp_cursor(src, item):
    """Return the first place and the places in use of an item's history."""
    ring = gl.minimum(gl.maximum(item.ring, 0), src.places - 1)
    used = gl.minimum(gl.maximum(item.used, 0), src.places - src.room)
    return ring, used


@jit
def wrap(place, places):
    return gl.where(place >= places, place - places, place)


@jit
def issue_small(src, item, b, turn, L):
    """Copy an item's history and token into shared memory."""
    D: gl.constexpr = b.x.shape[2]
    UNIT: gl.constexpr = L.UNIT
    W: gl.constexpr = gl.num_warps()
    RING: gl.constexpr = b.x.shape[0]
    at = turn % RING
    mbarrier.wait(b.free.index(at), ((turn // RING) & 1) ^ 1)
    ring, used = clamp_cursor(src, item)
    key_head = item.head // src.ratio
    row = item.row.to(gl.int64)
    slot = item.slot
    PAST: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [W, 1], [1, 0])
    j = gl.arange(0, PLACES, gl.SliceLayout(1, PAST))
    xs = gl.arange(0, D, gl.SliceLayout(0, PAST))
    q_ptr = src.q_ptr + (row * src.q_b + key_head * src.q_h) * UNIT
    k_ptr = src.k_ptr + (row * src.k_b + key_head * src.k_h) * UNIT
    zero = (j * 0)[:, None] + xs[None, :]
    x_at = gl.where((j < K_ROW)[:, None], q_ptr + zero, k_ptr + zero)
    has_x = gl.full([ROWS, D], True, gl.int1, PAST) & item.is_row
    async_copy.async_copy_global_to_shared(b.x.index(at), x_at, mask=has_x)
    place = wrap(j + ring, src.places)
    is_used = ((j < used) & item.is_row)[:, None] & (xs < D)[None, :]
    u_ptr = src.u_ptr + (slot * src.u_n + item.head * src.u_h) * UNIT
    past_ptr = src.past_ptr + (slot * src.past_n + key_head * src.past_h) * UNIT
    u_at = u_ptr + ((place * (src.u_p * UNIT).to(gl.int32))[:, None] + xs[None, :])
    past_at = past_ptr + ((place * (src.past_p * UNIT).to(gl.int32))[:, None] + xs[None, :])
    async_copy.async_copy_global_to_shared(b.u.index(at), u_at, mask=is_used)
    async_copy.async_copy_global_to_shared(b.k.index(at), past_at, mask=is_used)
    FOUR: gl.constexpr = gl.BlockedLayout([4 // W], [32], [W], [0])
    cols = gl.arange(0, D, FOUR)
    has = (cols < D) & item.is_row
    v_at = src.v_ptr + (row * src.v_b + item.head * src.v_h) * UNIT + cols
    async_copy.async_copy_global_to_shared(b.v.index(at), v_at, mask=has)
    if src.scale_ptr is not None:
        scale_at = src.scale_ptr + slot * src.scale_n + item.head.to(gl.int64) * src.scale_h + cols.to(gl.int64) * src.scale_v
        async_copy.async_copy_global_to_shared(b.column_scale.index(at), scale_at, mask=has)
    async_copy.mbarrier_arrive(b.arrived.index(at), increment_count=False)


@jit
def load_registers(src, item, L, D: gl.constexpr):
    """Load what the scores of an item need, beside its copies."""
    UNIT: gl.constexpr = L.UNIT
    ring, used = clamp_cursor(src, item)
    key_head = item.head // src.ratio
    row = item.row.to(gl.int64)
    slot = item.slot
    FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    cols = gl.arange(0, D, FOUR)
    has = (cols < D) & item.is_row
    k_ptr = src.k_ptr + (row * src.k_b + key_head * src.k_h) * UNIT
    k = gl.load(k_ptr + cols, mask=has, other=0.0)
    old = gl.arange(0, PLACES, gl.SliceLayout(0, L.SMALL))
    G_ptr = src.G_ptr + slot * src.G_n + item.head * src.G_h
    G_at = G_ptr + wrap(old + ring, src.places).to(gl.int64) * src.G_p
    G = gl.load(G_at, mask=(old < used) & item.is_row, other=0.0).to(gl.float64)
    last = wrap(used - 1 + ring, src.places)
    G_end = gl.load(G_ptr + last.to(gl.int64) * src.G_p, mask=(used > 0) & item.is_row, other=0.0).to(gl.float64)
    g = 0.0
    if src.g_ptr is not None:
        g = gl.load(src.g_ptr + row * src.g_b + item.head * src.g_h, mask=item.is_row, other=0.0).to(gl.float32)
    beta = 1.0
    if src.beta_ptr is not None:
        beta = gl.load(src.beta_ptr + row * src.beta_b + item.head * src.beta_h, mask=item.is_row, other=0.0).to(gl.float32)
    return Loaded(g, beta, G_end, G, k)


@jit
def issue_state(src, item, b, turn, L):
    """Copy an item's state into a stage, once the stage is free."""
    D: gl.constexpr = b.x.shape[2]
    SIZE: gl.constexpr = L.SIZE
    STAGES: gl.constexpr = b.S.shape[0]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16 // SIZE], [32 * 16 // (D * SIZE), D * SIZE // 16], [gl.num_warps(), 1], [1, 0])
    state_ptr = src.state_ptr + (item.slot * src.state_n + item.head.to(gl.int64) * src.state_h) * L.UNIT
    vs = gl.arange(0, HALF, gl.SliceLayout(1, WIDE))
    ks = gl.arange(0, D, gl.SliceLayout(0, WIDE))
    has_row = gl.full([HALF, D], True, gl.int1, WIDE) & item.is_row
    for half in gl.static_range(D // HALF):
        tile = turn * (D // HALF) + half
        stage = tile % STAGES
        mbarrier.wait(b.empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        S_at = state_ptr + (vs[:, None] * D + (ks + half * HALF * D)[None, :])
        async_copy.async_copy_global_to_shared(b.S.index(stage), S_at, mask=has_row)
        async_copy.mbarrier_arrive(b.full.index(stage), increment_count=False)


@jit
def multiply(x, S, acc, L):
    """Return x S + acc, as `dot_state`; integers are exact."""
    if S.dtype == gl.int8:
        return mma_v2(x, S.to(gl.bfloat16), acc)
    elif S.dtype == gl.int16:
        high, low = split_bf16(S.to(gl.float32), gl.bfloat16)
        return mma_v2(x, high, mma_v2(x, low, acc))
    elif S.dtype == gl.float32:
        return mma_v2(x.to(gl.float32), S, acc, input_precision="tf32")
    else:
        return mma_v2(x, S, acc)


@jit
def pick(x, i, j, row: gl.constexpr, column: gl.constexpr):
    return gl.sum(gl.sum(gl.where((i == row)[:, None] & (j == column)[None, :], x, 0.0), 1), 0)


@jit
def put(fields, stage, FIELD: gl.constexpr, value, dtype: gl.constexpr):
    fields.index(stage * FIELDS + FIELD).store(gl.full((1,), value, dtype, ONE_WARP))


@jit
def prepare(src, item, loaded, b, turn, L):
    """Compute the scores of an item's token, and append k and G of it."""
    D: gl.constexpr = b.x.shape[2]
    SMALL: gl.constexpr = L.SMALL
    RING: gl.constexpr = b.x.shape[0]
    at = turn % RING
    ring, used = clamp_cursor(src, item)
    is_full = used + 1 > src.places - src.room
    lane = gl.arange(0, 32, ONE_WARP)
    cursor_at = src.cursor_ptr + item.slot * src.cursor_n + lane * 0
    done = gl.atomic_add(cursor_at + 2, lane * 0 + 1, mask=(lane == 0) & item.is_row, sem="relaxed")
    # the copies into this place waited until it was free
    mbarrier.wait(b.arrived.index(at), (turn // RING) & 1)
    x_s = b.x.index(at)
    x = x_s.load(gl.DotOperandLayout(0, SMALL, 2))
    zeros = gl.zeros([ROWS, ROWS], gl.float32, SMALL)
    XK = mma_v2(x, x_s.permute((1, 0)).load(gl.DotOperandLayout(1, SMALL, 2)), zeros)
    scores = mma_v2(x, b.k.index(at).permute((1, 0)).load(gl.DotOperandLayout(1, SMALL, 2)), zeros)
    i = gl.arange(0, ROWS, gl.SliceLayout(1, SMALL))
    j = gl.arange(0, ROWS, gl.SliceLayout(0, SMALL))
    q_rate = src.scale
    k_rate = 1.0
    if L.NORM:
        q_rate *= gl.rsqrt(pick(XK, i, j, 0, 0) + 1e-6)
        k_rate *= gl.rsqrt(pick(XK, i, j, 8, 8) + 1e-6)
    score = pick(XK, i, j, 0, 8) * q_rate * k_rate
    g = loaded.g
    if src.A_log_ptr is not None:
        if src.dt_bias_ptr is not None:
            g += gl.load(src.dt_bias_ptr + item.head * src.dt_bias_h).to(gl.float32)
        g = -gl.exp(gl.load(src.A_log_ptr + item.head * src.A_log_h).to(gl.float32)) * softplus(g)
    g = gl.where(g < L.RESET, L.RESET, g)
    beta = loaded.beta
    if src.beta_ptr is not None:
        beta = activate_beta(beta, src.A_log_ptr is not None, L.NEGATIVE)
    total = g.to(gl.float64) + loaded.G_end
    high, low = split_fp64(total)
    still = gl.exp(high)
    old_high, old_low = split_fp64(loaded.G)
    rates = gl.where(i < K_ROW, q_rate, k_rate)
    scores = scores * decay(old_high, old_low, high, low)[None, :] * rates[:, None]
    s_high, s_low = split_bf16(scores, gl.bfloat16)
    b.scores.index(2 * at).store(s_high)
    b.scores.index(2 * at + 1).store(s_low)
    end_high, end_low = split_fp64(loaded.G_end)
    new = wrap(used + ring, src.places)
    put(b.ints, at, ROW, item.row, gl.int32)
    put(b.ints, at, HEAD, item.head, gl.int32)
    put(b.ints, at, SLOT, item.slot.to(gl.int32), gl.int32)
    put(b.ints, at, NEW, new, gl.int32)
    put(b.ints, at, IS_ROW, item.is_row.to(gl.int32), gl.int32)
    put(b.ints, at, IS_FULL, (is_full & item.is_row).to(gl.int32), gl.int32)
    put(b.floats, at, Q_FACTOR, q_rate * still, gl.float32)
    put(b.floats, at, K_FACTOR, k_rate * still, gl.float32)
    put(b.floats, at, SCORE, score, gl.float32)
    put(b.floats, at, BETA, beta, gl.float32)
    put(b.floats, at, K_RATE, k_rate, gl.float32)
    put(b.floats, at, FOLD_DECAY, gl.exp(end_high), gl.float32)
    if is_full:
        b.still.index(at).store(decay(old_high, old_low, end_high, end_low))
    barrier()
    mbarrier.arrive(b.ready.index(at), count=1)
    if item.is_row:
        key_head = item.head // src.ratio
        if key_head * src.ratio == item.head:
            FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
            past_ptr = src.past_ptr + (item.slot * src.past_n + key_head * src.past_h + new * src.past_p) * L.UNIT
            gl.store(past_ptr + gl.arange(0, D, FOUR), loaded.k.to(src.past_ptr.dtype.element_ty))
        G_new = g.to(gl.float64) + gl.where(is_full, 0.0, loaded.G_end)
        G_ptr = src.G_ptr + item.slot * src.G_n + item.head * src.G_h + new.to(gl.int64) * src.G_p
        gl.store(G_ptr, G_new.to(src.G_ptr.dtype.element_ty))
        ring = gl.where(is_full, wrap(used + ring, src.places), ring)
        used = gl.where(is_full, 0, used) + 1
        is_last = (done == src.HV - 1) & (lane == 0)
        gl.store(cursor_at, ring + lane * 0, mask=is_last)
        gl.store(cursor_at + 1, used + lane * 0, mask=is_last)
        gl.store(cursor_at + 2, lane * 0, mask=is_last)


@jit
def run_copies(src, b, L):
    step = gl.num_programs(0)
    first = gl.program_id(0)
    now = load_cursor(src, first, load_slot(src, first))
    then = load_cursor(src, first + step, load_slot(src, first + step))
    slot = load_slot(src, first + 2 * step)
    issue_small(src, now, b, 0, L)
    turn = 0
    for _ in range(first, src.items, step):
        issue_state(src, now, b, turn, L)
        issue_small(src, then, b, turn + 1, L)
        later = load_cursor(src, then.index + step, slot)
        slot = load_slot(src, then.index + 2 * step)
        now, then, turn = then, later, turn + 1
    async_copy.commit_group()
    async_copy.wait_group(0)


@jit
def run_prepare(PARITY: gl.constexpr, src, b, L):
    D: gl.constexpr = b.x.shape[2]
    step = 2 * gl.num_programs(0)
    first = gl.program_id(0) + PARITY * gl.num_programs(0)
    now = load_cursor(src, first, load_slot(src, first))
    then = load_cursor(src, first + step, load_slot(src, first + step))
    slot = load_slot(src, first + 2 * step)
    loaded = load_registers(src, now, L, D)
    turn = PARITY + 0
    for _ in range(first, src.items, step):
        more = load_registers(src, then, L, D)
        later = load_cursor(src, then.index + step, slot)
        slot = load_slot(src, then.index + 2 * step)
        prepare(src, now, loaded, b, turn, L)
        now, then, loaded, turn = then, later, more, turn + 2


@jit
def get(fields, stage, FIELD: gl.constexpr):
    W: gl.constexpr = gl.num_warps()
    return gl.max(fields.index(stage * FIELDS + FIELD).load(gl.BlockedLayout([1], [32], [W], [0])), 0)


@jit
def get_float(fields, stage, FIELD: gl.constexpr):
    W: gl.constexpr = gl.num_warps()
    return gl.sum(fields.index(stage * FIELDS + FIELD).load(gl.BlockedLayout([1], [32], [W], [0])), 0)


@jit
def compute_half(src, b, token, at, tile, half: gl.constexpr, L):
    """Write o and u of half of an item's columns."""
    D: gl.constexpr = b.x.shape[2]
    STAGES: gl.constexpr = b.S.shape[0]
    MMA: gl.constexpr = L.MMA
    KW: gl.constexpr = 4 if L.SIZE == 1 else 2
    stage = tile % STAGES
    u_b = b.u.index(at).slice(half * HALF, HALF, 1).load(gl.DotOperandLayout(1, MMA, 2))
    v = b.v.index(at).slice(half * HALF, HALF, 0).load(gl.SliceLayout(0, MMA))
    mbarrier.wait(b.full.index(stage), (tile // STAGES) & 1)
    S = b.S.index(stage).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, KW))
    XS = multiply(token.x, S, gl.zeros([ROWS, HALF], gl.float32, MMA), L)
    XS = XS * token.factors[:, None]
    if src.scale_ptr is not None:
        by_column = b.column_scale.index(at).slice(half * HALF, HALF, 0).load(gl.SliceLayout(0, MMA))
        if src.low_ptr is not None:
            by_column *= STEPS
        XS = XS * by_column[None, :]
    XS = mma_v2(token.s_low, u_b, XS)
    XS = mma_v2(token.s_high, u_b, XS)
    y_q, y_k = split_rows(XS)
    _, v_k = split_rows(gl.broadcast(v.to(gl.float32)[None, :], XS)[0])
    r = token.beta * (v_k - y_k)
    o = gl.where(token.is_row, y_q + token.score * r, 0.0)
    ROW_LAYOUT: gl.constexpr = o.type.layout
    cols = gl.arange(0, HALF, gl.SliceLayout(0, ROW_LAYOUT)) + half * HALF
    first = (gl.arange(0, K_ROW, gl.SliceLayout(1, ROW_LAYOUT)) == 0)[:, None] & (cols < D)[None, :]
    place = gl.zeros([K_ROW, HALF], gl.int32, ROW_LAYOUT) + cols[None, :]
    gl.store(token.o_ptr + place, o.to(src.o_ptr.dtype.element_ty), mask=first)
    gl.store(token.u_ptr + place, (r * token.k_rate).to(src.u_ptr.dtype.element_ty), mask=first & token.is_row)


@jit
def run_consumer(src, b, L):
    D: gl.constexpr = b.x.shape[2]
    RING: gl.constexpr = b.x.shape[0]
    STAGES: gl.constexpr = b.S.shape[0]
    MMA: gl.constexpr = L.MMA
    KW: gl.constexpr = 4 if L.SIZE == 1 else 2
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    turn = 0
    for _ in range(gl.program_id(0), src.items, gl.num_programs(0)):
        at = turn % RING
        mbarrier.wait(b.ready.index(at), (turn // RING) & 1)
        row, head, slot = get(b.ints, at, ROW), get(b.ints, at, HEAD), get(b.ints, at, SLOT).to(gl.int64)
        new, is_row, is_full = get(b.ints, at, NEW), get(b.ints, at, IS_ROW) != 0, get(b.ints, at, IS_FULL) != 0
        s_high, s_low = b.scores.index(2 * at).load(LEFT), b.scores.index(2 * at + 1).load(LEFT)
        x = b.x.index(at).load(gl.DotOperandLayout(0, MMA, KW))
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
        factors = gl.where(rows < K_ROW, get_float(b.floats, at, Q_FACTOR), get_float(b.floats, at, K_FACTOR))
        beta, score, k_rate = get_float(b.floats, at, BETA), get_float(b.floats, at, SCORE), get_float(b.floats, at, K_RATE)
        o_ptr = src.o_ptr + (row.to(gl.int64) * src.o_b + head * src.o_h) * L.UNIT
        u_ptr = src.u_ptr + (slot * src.u_n + head * src.u_h + new * src.u_p) * L.UNIT
        token = Token(x, s_high, s_low, factors, beta, score, k_rate, o_ptr, u_ptr, is_row)
        for half in gl.static_range(D // HALF):
            tile = turn * (D // HALF) + half
            compute_half(src, b, token, at, tile, half, L)
            if is_full:
                fold(src, b, tile % STAGES, at, slot, head, half, L)
            barrier()
            mbarrier.arrive(b.empty.index(tile % STAGES), count=1)
        mbarrier.arrive(b.free.index(at), count=1)
        turn += 1


@jit
def split_rows(x):
    """Return the rows of q and those of k of a tile [16, n], in the registers of the same lanes."""
    N: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [2, K_ROW, N]), (1, 2, 0)))


@jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def fold(src, b, stage, at, slot, head, half: gl.constexpr, L):
    """S <- e^(G_P) S + sum_j e^(G_P - G_j) k_j u_j^T, for half of the columns."""
    D: gl.constexpr = b.x.shape[2]
    W: gl.constexpr = gl.num_warps()
    FOLD: gl.constexpr = L.FOLD
    LEFT: gl.constexpr = gl.DotOperandLayout(0, FOLD, 2)
    still = b.still.index(at).load(gl.SliceLayout(0, LEFT))
    end_decay = get_float(b.floats, at, FOLD_DECAY)
    u = b.u.index(at).slice(half * HALF, HALF, 1).permute((1, 0)).load(LEFT).to(gl.float32) * still[None, :]
    u_high, u_low = split_bf16(u, gl.bfloat16)
    k = b.k.index(at).load(gl.DotOperandLayout(1, FOLD, 2))
    S_s = b.S.index(stage)
    S = S_s.load(FOLD)
    if L.SIZE == 1:
        # exact, and without the slow conversion to fp32
        S = S.to(gl.bfloat16)
    S = S.to(gl.float32)
    vs = gl.arange(0, HALF, gl.SliceLayout(1, FOLD)) + half * HALF
    if src.scale_ptr is None:
        S = S * end_decay
    else:
        scale_at = src.scale_ptr + slot * src.scale_n + head.to(gl.int64) * src.scale_h + vs.to(gl.int64) * src.scale_v
        factor = gl.load(scale_at) * end_decay
        if src.low_ptr is not None:
            S = S * STEPS + load_low(src, slot, head, vs, L)
        S = S * factor[:, None]
    S = mma_v2(u_high, k, mma_v2(u_low, k, S))
    if src.scale_ptr is not None:
        largest = gl.reduce(gl.abs(S), 1, larger)
        IS_SHORT: gl.constexpr = L.SIZE == 1
        INT8: gl.constexpr = SHORT_LEVELS if src.low_ptr is None else SHORT_LEVELS * STEPS
        inverse, new_scale = rounding_of(largest, INT8 if IS_SHORT else INT16_LEVELS)
        n = gl.fma(S, gl.broadcast(inverse[:, None], S)[0], gl.full([HALF, D], MAGIC, gl.float32, FOLD))
        gl.store(scale_at, new_scale)
        S = n.to(gl.int32, bitcast=True)
    barrier()
    S_s.store(S.to(src.state_ptr.dtype.element_ty))
    barrier()
    SIZE: gl.constexpr = L.SIZE
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16 // SIZE], [32 * 16 // (D * SIZE), D * SIZE // 16], [W, 1], [1, 0])
    rows = gl.arange(0, HALF, gl.SliceLayout(1, WIDE)) + half * HALF
    ks = gl.arange(0, D, gl.SliceLayout(0, WIDE))
    state_ptr = src.state_ptr + (slot * src.state_n + head.to(gl.int64) * src.state_h) * L.UNIT
    gl.store(state_ptr + (rows[:, None] * D + ks[None, :]), S_s.load(WIDE))


@kernel
def history_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, u_history_ptr, k_history_ptr, G_history_ptr, cursor_ptr, g_ptr, beta_ptr,
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, column_scale_ptr, remainder_ptr, cu_seqlens_ptr, read_index_ptr,
    num_accepted_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, q_k, k_k, v_v, o_v,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h, state_n, state_h, state_k, state_v,
    u_n, u_p, u_h, past_n, past_p, past_h, G_n, G_p, G_h, cursor_n, read_n,
    N, T, HV, HV_magic, HV_s, ratio, ratio_magic, ratio_s, slots, lowest, places, scale,
    accepted_n, room, q_0, k_0, v_0, scale_n, scale_h, scale_v, low_n, low_h, low_k, low_v,
    D: gl.constexpr, STAGES: gl.constexpr, SIZE: gl.constexpr,
    REGISTERS: gl.constexpr, NORM: gl.constexpr, NEGATIVE: gl.constexpr, RESET: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    gdc_wait()
    UNIT: gl.constexpr = 16
    W: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    FOLD: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    SMALL: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    L = Config(MMA, SMALL, FOLD, UNIT, SIZE, NORM, NEGATIVE, RESET)
    gates_ptr = g_ptr if a_ptr is None else a_ptr
    betas_ptr = beta_ptr if a_ptr is None else b_ptr
    src = Sources(
        q_ptr + q_0 * UNIT, k_ptr + k_0 * UNIT, v_ptr + v_0 * UNIT, state_ptr, u_history_ptr, k_history_ptr, G_history_ptr, cursor_ptr,
        gates_ptr, betas_ptr, A_log_ptr, dt_bias_ptr, column_scale_ptr, remainder_ptr, read_index_ptr, o_ptr,
        q_b, q_h, k_b, k_h, v_b, v_h, o_b, o_h, g_b, g_h, beta_b, beta_h, A_log_h, dt_bias_h,
        state_n, state_h, state_v, u_n, u_p, u_h, past_n, past_p, past_h, G_n, G_p, G_h, cursor_n, read_n,
        scale_n, scale_h, scale_v, low_n, low_h, low_k, low_v,
        N * HV, HV, ratio, slots, lowest, places, room, scale,
    )  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(16 // SIZE, 1, 8, [1, 0])
    X_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN2: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    RING: gl.constexpr = 3
    scales_s = None
    if column_scale_ptr is not None:
        scales_s = gl.allocate_shared_memory(gl.float32, [RING, D], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    arrived = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(arrived.index(i), count=32 * COPIERS)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=32 * COPIERS)
        mbarrier.init(empty.index(i), count=1)
    b = Buffers(
        gl.allocate_shared_memory(state_ptr.dtype.element_ty, [STAGES, HALF, D], S_LAYOUT),
        gl.allocate_shared_memory(gl.bfloat16, [RING, ROWS, D], X_LAYOUT),
        gl.allocate_shared_memory(gl.bfloat16, [RING, PLACES, D], X_LAYOUT),
        gl.allocate_shared_memory(gl.bfloat16, [RING, PLACES, D], X_LAYOUT),
        gl.allocate_shared_memory(gl.bfloat16, [RING, D], PLAIN),
        scales_s,
        gl.allocate_shared_memory(gl.bfloat16, [2 * RING, ROWS, PLACES], PLAIN2),
        gl.allocate_shared_memory(gl.float32, [RING, PLACES], PLAIN),
        gl.allocate_shared_memory(gl.int32, [RING * FIELDS, 1], PLAIN),
        gl.allocate_shared_memory(gl.float32, [RING * FIELDS, 1], PLAIN),
        arrived, ready, free, full, empty,
    )  # fmt: skip
    gl.warp_specialize([(run_consumer, (src, b, L)), (run_prepare, (0, src, b, L)), (run_prepare, (1, src, b, L)), (run_copies, (src, b, L))], [1, 1, COPIERS], [REGISTERS, REGISTERS, REGISTERS])
