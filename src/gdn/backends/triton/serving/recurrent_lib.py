"""Provide the device functions of the kernels that run token by token: `recurrent`, `decode` and `prefill`.

A program's tile of a state is R x P of its V columns, with J x W = K elements each. The lanes and 16-byte
loads of a warp go first along the axis that is contiguous in memory, K (V-first) or V (K-first):

    V-first   v = p R + r,  k = j W + w    W elements are 128 bytes: 8 lanes of 16. The other 4 lanes, and the
                                           warps, are R; J and P are in a thread's own registers
    K-first   v = r P + p,  k = j          P elements are 16 bytes, on R lanes; the other lanes are J

So q and k, loaded once per r, have the state's layout, and nothing goes through shared memory. At K = 128 in
fp32 both sums over K cost 8 columns 12 shuffles; with 32 lanes along K they cost 80. Triton chooses which
axis gets lanes after the contiguous one: the first up to 3.6, then the last. So the axes are [R, J, P, W] or
[P, J, R, W]; in the code, [A, J, B, W].
"""

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.launch.pdl import ON_GPU
from gdn.backends.triton.lib import activate_beta, sigmoid, softplus

LARGEST = tl.constexpr(3.4028234663852886e38)  # of fp32


@jit
def rounded_product(x, y):
    """Return x y, rounded: written as an fma, it is never fused with a following sum."""
    return tl.fma(x, y, 0.0)


@jit
def split_by_four(x):
    """Split [A, J, B, W] into four [A, J, B, W / 4] by position in W mod 4; neighbours share a thread."""
    A: tl.constexpr = x.shape[0]
    J: tl.constexpr = x.shape[1]
    B: tl.constexpr = x.shape[2]
    W: tl.constexpr = x.shape[3]
    even, odd = tl.split(tl.reshape(x, [A, J, B, W // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@jit
def inner_product(x, y):
    """Return <x, y> over K of [A, J, B, W]: four neighbours in order, then pairs as in `sum_keys`."""
    if x.shape[3] < 4:  # fewer than four neighbours in a thread
        return sum_keys(rounded_product(x, y))
    else:
        x, y = tl.broadcast(x, y)
        x0, x1, x2, x3 = split_by_four(x)
        y0, y1, y2, y3 = split_by_four(y)
        return sum_keys(tl.fma(x3, y3, tl.fma(x2, y2, tl.fma(x1, y1, rounded_product(x0, y0)))))


@jit
def sum_keys(x):
    """Sum [A, J, B, W] over K: halves of J, then neighbours in W, always two elements at a time.

    Two elements have the same sum in either order: no tile, alignment or number of warps changes the bits.
    """
    A: tl.constexpr = x.shape[0]
    J: tl.constexpr = x.shape[1]
    B: tl.constexpr = x.shape[2]
    W: tl.constexpr = x.shape[3]
    for i in tl.static_range(0, 8):
        if (J >> i) > 1:
            x = tl.sum(tl.reshape(x, [A, 2, J >> (i + 1), B, W]), 1)  # J: in a thread's registers
    x = tl.reshape(x, [A, B, W])
    for i in tl.static_range(0, 8):
        if (W >> i) > 1:
            x = tl.sum(tl.reshape(x, [A, B, W >> (i + 1), 2]), 3)  # W: registers, then shuffles between lanes
    return tl.reshape(x, [A, B])


@jit
def divide(x, inverse, s):
    """Return x // n by multiplication: a division is some 30 instructions before the first address."""
    return (x.to(tl.int64) * inverse >> s).to(tl.int32)


@jit
def locate_program(HV, HV_magic, HV_s, BLOCKS: tl.constexpr, AHEAD: tl.constexpr = 0):
    """Return row, value head and block of V of this program, or of the one AHEAD program ids later."""
    pid = tl.program_id(0) + AHEAD
    row = divide(pid // BLOCKS, HV_magic, HV_s)
    return row.to(tl.int64), pid // BLOCKS - row * HV, pid % BLOCKS


@jit
def token_range(cu_seqlens_ptr, row, N, T):
    """Return a row's first packed token and count; row N of packed rows has those past the last sequence."""
    if cu_seqlens_ptr is None:
        first = tl.full([], 0, tl.int64)  # dense rows start at token 0
        count = T
    else:
        first = tl.load(cu_seqlens_ptr + row).to(tl.int64)
        end = tl.load(cu_seqlens_ptr + tl.minimum(row + 1, N)).to(tl.int64)
        count = (tl.minimum(tl.where(row < N, end, T), T) - first).to(tl.int32)
    return first, count


@jit
def limit_tokens(cu_seqlens_ptr, count, most):
    """Return how many of a row's tokens are computed; the host knows the tokens of a dense row.

    `max_seqlen` chooses binaries and tensors for `most` tokens (None: any number), and nothing checks it on a
    GPU. A longer row gets NaN in each output and state that needs a token past `most`.
    """
    if cu_seqlens_ptr is None or most is None:
        return count
    else:
        return tl.minimum(count, most)


@jit
def spoil_longer_row(x, count, total):
    """Return x, or NaN if not all tokens of a row are computed."""
    return tl.where(total > count, float("nan"), x)


@jit
def store_nan(o_at, o_t, start, end, mask):
    """Store NaN as o of the tokens from `start` to `end`."""
    at = tl.full([], 0, tl.int64) + start
    for _ in range(start, end):
        tl.store(o_at + at * o_t, tl.full(o_at.shape, float("nan"), o_at.dtype.element_ty), mask=mask)
        at += 1


@jit
def tile_indices(
    block, A: tl.constexpr, J: tl.constexpr, B: tl.constexpr, W: tl.constexpr, AXIS: tl.constexpr,
    R_FIRST: tl.constexpr,
):  # fmt: skip
    """Return the key indices [1, J, 1, W] and value indices [A, B] of a program's tile."""
    keys = tl.arange(0, J)[None, :, None, None] * W + tl.arange(0, W)[None, None, None, :]
    a, b = tl.arange(0, A)[:, None], tl.arange(0, B)[None, :]
    if (AXIS == "v") == R_FIRST:
        values = a * B + b
    else:
        values = b * A + a
    return keys, block * (A * B) + values


@jit
def key_offsets(
    keys, stride, A: tl.constexpr, B: tl.constexpr, AXIS: tl.constexpr, R_FIRST: tl.constexpr,
    DENSE: tl.constexpr,
):  # fmt: skip
    """Return offsets of q and k, once per r. For K-first states they must not look contiguous: Triton would
    put lanes along K for these loads, and would convert the state through shared memory."""
    if not DENSE or AXIS == "v":
        keys = keys * stride
    if R_FIRST:
        once = tl.zeros([A, 1, 1, 1], tl.int32)  # broadcast along r, so each lane loads its own keys
    else:
        once = tl.zeros([1, 1, B, 1], tl.int32)
    return keys + once


@jit
def tile_pointers(ptr, keys, values, k, v, UNIT: tl.constexpr, AXIS: tl.constexpr):
    """Return pointers [A, J, B, W] to a state with strides k and v, in UNITs; it is contiguous along AXIS."""
    values = values[:, None, :, None]
    if AXIS == "k":
        return ptr + values.to(tl.int64) * (v * UNIT) + keys
    if AXIS == "v":
        return ptr + keys.to(tl.int64) * (k * UNIT) + values
    return ptr + values.to(tl.int64) * (v * UNIT) + keys.to(tl.int64) * (k * UNIT)


@jit
def prefetch_columns(ptr, columns, v, COLUMNS: tl.constexpr, LINES: tl.constexpr, UNIT: tl.constexpr):
    """Prefetch V-first columns of a state into L2; they are `v` UNITs apart and LINES * 128 bytes long."""
    lines = tl.arange(0, LINES) * (128 * 8 // ptr.dtype.element_ty.primitive_bitwidth)
    pointers = ptr + ((columns + tl.arange(0, COLUMNS)).to(tl.int64) * (v * UNIT))[:, None] + lines[None, :]
    if ON_GPU:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def decay_pointers(g_ptr, place, along, CHANNELS: tl.constexpr):
    """Return the pointer to g at a place, or with CHANNELS the pointers to its keys at the offsets `along`.

    CHANNELS: the unit of g's strides if it is a decay per key channel; 0 for a decay per head.
    """
    if CHANNELS:
        # a constant factor of the strides lets Triton load 16 bytes of channels at once
        return g_ptr + place * CHANNELS + along
    else:
        return g_ptr + place


@jit
def load_gate_parameters(gates, strides, head, along, has_channel, lower_bound, CHANNELS: tl.constexpr):
    """Return exp(A_log) and dt_bias of a head, or of its keys at the offsets `along`; 1 and 0 if absent."""
    rate, bias = 1.0, 0.0
    if gates.A_log_ptr is not None:
        rate = tl.exp(tl.load(gates.A_log_ptr + head * strides.A_log_h).to(tl.float32))
        if lower_bound is not None:
            # infinity would make NaN of a logit 0; not tl.minimum, which drops NaN on a GPU
            rate = tl.where(rate > LARGEST, LARGEST, rate)
    if gates.dt_bias_ptr is not None:
        if CHANNELS:
            place = decay_pointers(gates.dt_bias_ptr, head * strides.dt_bias_h, along, CHANNELS)
            bias = tl.load(place, mask=has_channel, other=0.0).to(tl.float32)
        else:
            bias = tl.load(gates.dt_bias_ptr + head * strides.dt_bias_h).to(tl.float32)
    return rate, bias


@jit
def activate_decay(x, gate):
    """Return the log decay g of raw logits x, of a head or of its keys."""
    x += gate.bias
    if gate.lower_bound is None:
        return -gate.rate * softplus(x)
    else:
        return gate.lower_bound * sigmoid(gate.rate * x)


@jit
def load_token(tokens, t, count, has_key, has_value, UNIT: tl.constexpr, CHANNELS: tl.constexpr = 0):
    """Load token t as the caller gave it: q, k [., J, ., W], v [A, B], g, beta; zeros from `count` on.

    g is a number, or with CHANNELS [., J, ., W] in the lanes of k, or [J * W], each channel in one lane.
    """
    q_t, k_t = tokens.q_t * UNIT, tokens.k_t * UNIT
    is_token = t < count
    q = tl.load(tokens.q_ptr + t * q_t, mask=has_key & is_token, other=0.0)
    k = tl.load(tokens.k_ptr + t * k_t, mask=has_key & is_token, other=0.0)
    v = tl.load(tokens.v_ptr + t * tokens.v_t, mask=has_value & is_token, other=0.0)
    if tokens.g_ptr is None:
        g = tl.full([], 0.0, tl.float32)
    elif CHANNELS:
        has_channel = has_key if tokens.has_channel is None else tokens.has_channel
        g = tl.load(tokens.g_ptr + t * (tokens.g_t * CHANNELS), mask=has_channel & is_token, other=0.0)
    else:
        g = tl.load(tokens.g_ptr + t * tokens.g_t, mask=is_token, other=0.0)
    if tokens.beta_ptr is None:
        beta = tl.full([], 1.0, tl.float32)
    else:
        beta = tl.load(tokens.beta_ptr + t * tokens.beta_t, mask=is_token, other=0.0)
    return q, k, v, g, beta


@jit
def advance_token(S, token, gate, scale, C: tl.constexpr, column_scale=None):
    """Advance S by one token as loaded; return S and o [A, B]. The parameters of the gate are for GATE.

    Every multiply-add is an explicit fma, so the code around a step cannot change its bits. A decay per head
    scales both products of S; one per key channel scales the rows of S before them. With column_scale [A, B]
    the state is S * column_scale; the result is the state itself.
    """
    q, k, v, g = (
        token.q.to(tl.float32),
        token.k.to(tl.float32),
        token.v.to(tl.float32),
        token.g.to(tl.float32),
    )
    beta = activate_beta(token.beta, C.SIGMOID, C.NEGATIVE)
    if C.CHANNELS:
        if C.GATE:
            g = activate_decay(g, gate)
        decays = tl.exp(g)
        if len(g.shape) == 1:
            # a lane has channels of its own, 4 of 128; through shared memory it gets the decays of its keys
            decays = tl.reshape(decays, (1, S.shape[1], 1, S.shape[3]))
        S *= decays
    kS, qS, qk = (
        inner_product(S, k),
        inner_product(S, q),
        inner_product(q, k),
    )  # S comes from registers, not from HBM
    if column_scale is not None:
        # the columns' scales multiply sums over K and the decay: no instruction per element of the state
        kS, qS = kS * column_scale, qS * column_scale
    k_rstd, decay = 1.0, 1.0
    if C.NORM:
        # scale the sums over K and d instead of k and q: fewer registers and instructions
        k_rstd = tl.rsqrt(inner_product(k, k) + 1e-6)
        q_rstd = tl.rsqrt(inner_product(q, q) + 1e-6)
        kS, qS, qk = kS * k_rstd, qS * q_rstd, qk * q_rstd * k_rstd
    if C.DECAY and not C.CHANNELS:
        if C.GATE:
            g = activate_decay(g, gate)
        decay = tl.exp(g)
        # in place, after both products have used S
        S *= decay if column_scale is None else (decay * column_scale)[:, None, :, None]
    elif column_scale is not None:
        S *= column_scale[:, None, :, None]
    d = beta * tl.fma(-decay, kS, v)
    o = scale * tl.fma(decay, qS, rounded_product(qk, d))
    return tl.fma(k, (d * k_rstd)[:, None, :, None], S), o
