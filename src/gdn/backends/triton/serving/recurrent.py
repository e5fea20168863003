"""Run the token recurrence: one program keeps some columns of one state in registers through a sequence.

    kS, qS = [k; q] S;   d = beta (v - e^g kS);   o = scale (e^g qS + <q, k> d);   S <- e^g S + k d^T

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

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton.launch import Launch, Machine, Plans, device_guard, kernel, machine, unit_of
from gdn.backends.triton.lib import activate_beta, softplus
from gdn.problem import Problem


@triton.jit
def product(x, y):
    """Return x y, rounded: written as an fma, it is never fused with a following sum."""
    return tl.fma(x, y, 0.0)


@triton.jit
def fours(x):
    """Split [A, J, B, W] into four [A, J, B, W / 4] by position in W mod 4; neighbours share a thread."""
    A: tl.constexpr = x.shape[0]
    J: tl.constexpr = x.shape[1]
    B: tl.constexpr = x.shape[2]
    W: tl.constexpr = x.shape[3]
    even, odd = tl.split(tl.reshape(x, [A, J, B, W // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def inner(x, y):
    """Return <x, y> over K of [A, J, B, W]: four neighbours in order, then pairs as in `over_keys`."""
    if x.shape[3] < 4:  # fewer than four neighbours in a thread
        return over_keys(product(x, y))
    else:
        x, y = tl.broadcast(x, y)
        x0, x1, x2, x3 = fours(x)
        y0, y1, y2, y3 = fours(y)
        return over_keys(tl.fma(x3, y3, tl.fma(x2, y2, tl.fma(x1, y1, product(x0, y0)))))


@triton.jit
def over_keys(x):
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


def inverse(n: int) -> tuple[int, int]:
    """Return the constants with which `divide` divides by n below 2**30: ceil(2**s / n) and s."""
    s = 30 + (n - 1).bit_length()
    return -(-(1 << s) // n), s


@triton.jit
def divide(x, inverse, s):
    """Return x // n by multiplication: a division is some 30 instructions before the first address."""
    return (x.to(tl.int64) * inverse >> s).to(tl.int32)


@triton.jit
def owner(HV, HV_inverse, HV_s, BLOCKS: tl.constexpr, AHEAD: tl.constexpr = 0):
    """Return row, value head and block of V of this program, or of the one AHEAD program ids later."""
    pid = tl.program_id(0) + AHEAD
    row = divide(pid // BLOCKS, HV_inverse, HV_s)
    return row.to(tl.int64), pid // BLOCKS - row * HV, pid % BLOCKS


@triton.jit
def span(cu_seqlens_ptr, row, N, T):
    """Return a row's first packed token and count; row N of packed rows has those past the last sequence."""
    if cu_seqlens_ptr is None:
        first = tl.full([], 0, tl.int64)  # dense rows start at token 0
        count = T
    else:
        first = tl.load(cu_seqlens_ptr + row).to(tl.int64)
        end = tl.load(cu_seqlens_ptr + tl.minimum(row + 1, N)).to(tl.int64)
        count = (tl.minimum(tl.where(row < N, end, T), T) - first).to(tl.int32)
    return first, count


@triton.jit
def places(
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


@triton.jit
def along_keys(
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


@triton.jit
def tile(ptr, keys, values, k, v, UNIT: tl.constexpr, AXIS: tl.constexpr):
    """Return pointers [A, J, B, W] to a state with strides k and v, in UNITs; it is contiguous along AXIS."""
    values = values[:, None, :, None]
    if AXIS == "k":
        return ptr + values.to(tl.int64) * (v * UNIT) + keys
    if AXIS == "v":
        return ptr + keys.to(tl.int64) * (k * UNIT) + values
    return ptr + values.to(tl.int64) * (v * UNIT) + keys.to(tl.int64) * (k * UNIT)


@triton.jit
def read(q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, t, q_t, k_t, v_t, g_t, beta_t, is_token, has_key, has_value):
    """Load one token as the caller gave it: q, k [., J, ., W], v [A, B], g, beta; zeros if there is none."""
    q = tl.load(q_ptr + t * q_t, mask=has_key & is_token, other=0.0)
    k = tl.load(k_ptr + t * k_t, mask=has_key & is_token, other=0.0)
    v = tl.load(v_ptr + t * v_t, mask=has_value & is_token, other=0.0)
    if g_ptr is None:
        g = tl.full([], 0.0, tl.float32)
    else:
        g = tl.load(g_ptr + t * g_t, mask=is_token, other=0.0)
    if beta_ptr is None:
        beta = tl.full([], 1.0, tl.float32)
    else:
        beta = tl.load(beta_ptr + t * beta_t, mask=is_token, other=0.0)
    return q, k, v, g, beta


@triton.jit
def step(
    S, q, k, v, g, beta, rate, bias, scale,
    NORM: tl.constexpr, DECAY: tl.constexpr, GATE: tl.constexpr, SIGMOID: tl.constexpr,
    NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Advance S by one token as loaded; return S and o [A, B]. rate = exp(A_log) and bias are for GATE.

    Every multiply-add is an explicit fma, so the code around a step cannot change its bits.
    """
    q, k, v, g = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32), g.to(tl.float32)
    beta = activate_beta(beta, SIGMOID, NEGATIVE)
    kS, qS, qk = inner(S, k), inner(S, q), inner(q, k)  # S comes from registers, not from HBM
    k_rstd, decay = 1.0, 1.0
    if NORM:
        # scale the sums over K and d instead of k and q: fewer registers and instructions
        k_rstd = tl.rsqrt(inner(k, k) + 1e-6)
        q_rstd = tl.rsqrt(inner(q, q) + 1e-6)
        kS, qS, qk = kS * k_rstd, qS * q_rstd, qk * q_rstd * k_rstd
    if DECAY:
        if GATE:
            g = -rate * softplus(g + bias)
        decay = tl.exp(g)
        S *= decay  # in place, after both products have used S
    d = beta * tl.fma(-decay, kS, v)
    o = scale * tl.fma(decay, qS, product(qk, d))
    return tl.fma(k, (d * k_rstd)[:, None, :, None], S), o


@kernel
def recurrent_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, initial_ptr, cu_seqlens_ptr, o_ptr,
    final_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, o_b, o_t, o_h,
    q_k, k_k, v_v, A_log_h, dt_bias_h, initial_n, initial_h, initial_k, initial_v, N, T,
    HV, HV_inverse, HV_s, ratio_inverse, ratio_s, scale,
    K: tl.constexpr, V: tl.constexpr, A: tl.constexpr, J: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    R_FIRST: tl.constexpr, AXIS: tl.constexpr, INITIAL_AXIS: tl.constexpr, DENSE: tl.constexpr,
    UNIT: tl.constexpr, INITIAL_UNIT: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr,
    NEGATIVE: tl.constexpr,
):  # fmt: skip
    # Program (row, head, block of V): A * B columns of S in registers, through all tokens of the row. Grid:
    # (N, + 1 if packed) * HV * BLOCKS; 1 warp. Reads S once and tokens; writes o per token and S at the end.
    BLOCKS: tl.constexpr = (V + A * B - 1) // (A * B)
    row, head, block = owner(HV, HV_inverse, HV_s, BLOCKS)
    first, count = span(cu_seqlens_ptr, row, N, T)
    keys, values = places(block, A, J, B, W, AXIS, R_FIRST)
    has_key, has_value = keys < K, values < V
    in_state = has_key & has_value[:, None, :, None]
    o_ptr += row * o_b + first * o_t + head * o_h + values
    if row == N:
        for _ in range(count):  # tokens past the last sequence have output zero
            tl.store(o_ptr, tl.zeros([A, B], o_ptr.dtype.element_ty), mask=has_value)
            o_ptr += o_t
        return
    key_head = divide(head, ratio_inverse, ratio_s)
    q_ptr += (row * q_b + first * q_t + key_head * q_h) * UNIT
    k_ptr += (row * k_b + first * k_t + key_head * k_h) * UNIT
    q_ptr += along_keys(keys, q_k, A, B, AXIS, R_FIRST, DENSE)
    k_ptr += along_keys(keys, k_k, A, B, AXIS, R_FIRST, DENSE)
    v_ptr += row * v_b + first * v_t + head * v_h + values * v_v
    if g_ptr is not None:
        g_ptr += row * g_b + first * g_t + head * g_h
    if beta_ptr is not None:
        beta_ptr += row * beta_b + first * beta_t + head * beta_h
    at = tl.full([], 0, tl.int64)  # token index; 64 bits because strides may be large
    q, k, v, g, beta = read(
        q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, at, q_t * UNIT, k_t * UNIT, v_t, g_t, beta_t, at < count,
        has_key, has_value,
    )  # fmt: skip
    S = tl.zeros([A, J, B, W], tl.float32)  # fp32 registers for the whole sequence
    if initial_ptr is not None:
        initial_ptr += (row * initial_n + head * initial_h) * INITIAL_UNIT
        start = tile(initial_ptr, keys, values, initial_k, initial_v, INITIAL_UNIT, INITIAL_AXIS)
        S = tl.load(start, mask=in_state, other=0.0).to(tl.float32)
    rate, bias = 0.0, 0.0
    if A_log_ptr is not None:
        rate = tl.exp(tl.load(A_log_ptr + head * A_log_h).to(tl.float32))
    if dt_bias_ptr is not None:
        bias = tl.load(dt_bias_ptr + head * dt_bias_h).to(tl.float32)
    for _ in range(count):
        # load the next token from HBM while this one is computed in registers
        q_next, k_next, v_next, g_next, beta_next = read(
            q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, at + 1, q_t * UNIT, k_t * UNIT, v_t, g_t, beta_t,
            at + 1 < count, has_key, has_value,
        )  # fmt: skip
        S, o = step(
            S, q, k, v, g, beta, rate, bias, scale,
            NORM, g_ptr is not None, A_log_ptr is not None, SIGMOID, NEGATIVE,
        )  # fmt: skip
        tl.store(o_ptr + at * o_t, o.to(o_ptr.dtype.element_ty), mask=has_value)
        at += 1
        q, k, v, g, beta = q_next, k_next, v_next, g_next, beta_next
    if final_ptr is not None:
        final_ptr += (row * HV + head) * (K * V)  # the only store of S to HBM
        tl.store(tile(final_ptr, keys, values, V, K, 1, AXIS), S, mask=in_state)


@dataclass(frozen=True)
class Tile:
    """Describe the tile of a state that a program keeps in registers, and the warps that share it."""

    R: int
    P: int
    J: int
    W: int
    num_warps: int

    @property
    def share(self) -> int:
        """Return the state elements per lane."""
        return self.R * self.P * self.J * self.W // (32 * self.num_warps)

    def blocks(self, V: int) -> int:
        return triton.cdiv(V, self.R * self.P)

    def constants(self) -> dict[str, int]:
        A, B = (self.R, self.P) if _R_FIRST else (self.P, self.R)
        return {"A": A, "J": self.J, "B": B, "W": self.W, "R_FIRST": _R_FIRST}


# Triton puts lanes along the first axis of a tensor up to 3.6, and along the last from 3.7 on
_R_FIRST = tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7)
# (contiguous axis, bytes of an element) -> state elements in a thread's registers. 16-bit states load faster,
# so a program amortises q, k and gates over more columns: 640 instructions for 8 columns, 920 for 16
SHARES = {("k", 4): 32, ("k", 2): 64, ("v", 4): 32, ("v", 2): 32}
WARPS = 1  # warps share no data; with more of them a program's q and k are merely loaded together
RESIDENT = 16  # programs of the largest tile that an SM holds at a time: 128 registers a thread


def tile_of(
    K: int, V: int, axis: str, width: int, unit: int, machine: Machine, warps: int = WARPS,
    pairs: int | None = None,
) -> Tile:  # fmt: skip
    """Choose the tile for states of `width` bytes per element, which are loaded `unit` elements at a time.

    J and W, which decide the order of sums over K, depend on K, axis and width alone. `pairs`: rows times
    heads; tiles have half the columns while all programs are resident at once: at B = 1, 32 heads of
    128 x 128 in bf16 2.7 us and not 2.9, at B = 8 7.6 and not 7.1 (H200).
    """
    lanes, vector = 64 if machine.kind == "hip" else 32, min(16 // width, unit)  # 16-byte loads
    K, V = triton.next_power_of_2(K), triton.next_power_of_2(V)
    columns = max(1, min(SHARES[axis, width] * lanes * warps // K, V))
    if pairs is not None and SHARES[axis, width] == max(SHARES.values()):
        half = max(1, columns // 2)
        columns = half if pairs * (V // half) <= RESIDENT * machine.num_sms else columns
    if axis == "v":
        P = min(vector, columns)
        return Tile(columns // P, P, K, 1, warps)
    W = min(K, 128 // width)
    R = max(1, lanes * warps * vector // W)
    return Tile(R, max(1, columns // R), K // W, W, warps)


def pool_of(x: Tensor, K: int, V: int, is_v_first: bool) -> tuple[str, int, tuple[int, ...]]:
    """Return the axis along which states are contiguous ("k", "v" or ""), the unit of strides, the strides.

    x is [slots, HV, V, K] or [slots, R, HV, V, K], or K first. Strides: slot, R, head, K, V.
    """
    v, k = x.stride()[-2:] if is_v_first else x.stride()[:-3:-1]
    axis = "k" if k == 1 or K == 1 else "v" if v == 1 or V == 1 else ""
    lead = (x.stride(0), x.stride(1) if x.dim() == 5 else 0, x.stride(-3))
    strides = (*lead, 0 if axis == "k" else k, 0 if axis == "v" else v)
    unit = unit_of(*strides)
    return axis, unit, tuple(s // unit for s in strides)


_plans: Plans[Launch] = Plans()


def recurrent_forward(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """See `Backend`. 6 K V flop per token and value head; HBM reads and writes the state once."""
    p = problem
    with device_guard(p.device):
        launch = _plans.get(_key(p), lambda: _plan(p))
        o = p.v.new_empty(p.v.shape)
        final = p.q.new_empty(p.state_shape, dtype=torch.float32) if p.output_final_state else None
        offsets = offsets_on(p.device, p.cu_seqlens)
        launch(p.q, p.k, p.v, p.g, p.beta, p.A_log, p.dt_bias, p.initial_state, offsets, o, final)
    return o, final


def offsets_on(device: torch.device, cu_seqlens: Tensor | None) -> Tensor | None:
    """Return cu_seqlens as the kernels read it: contiguous, on the device."""
    if cu_seqlens is None:
        return None
    return cu_seqlens.contiguous().to(device, non_blocking=True)


def _key(p: Problem) -> Hashable:
    """Return everything that the launch depends on, except the addresses of tensors."""
    tensors = (p.q, p.k, p.v, p.g, p.beta, p.A_log, p.dt_bias, p.initial_state, p.cu_seqlens)
    return (
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors), p.device, p.scale,
        p.output_final_state, p.use_qk_l2norm_in_kernel, p.use_beta_sigmoid_in_kernel, p.allow_neg_eigval,
        p.state_v_first,
    )  # fmt: skip


def _plan(p: Problem) -> Launch:
    axis, is_packed = "k" if p.state_v_first else "v", p.cu_seqlens is not None
    part = tile_of(p.K, p.V, axis, 4, 4, machine(p.device))
    start: tuple[str, int, tuple[int, ...]] = ("", 1, (0,) * 5)
    if p.initial_state is not None:
        start = pool_of(p.initial_state, p.K, p.V, p.state_v_first)
    # loads of q and k as wide as those of the state give each lane the same keys: no shuffles
    unit = min(4, unit_of(*p.q.stride()[:3], *p.k.stride()[:3]))
    o = (p.T * p.HV * p.V, p.HV * p.V, p.V)
    strides = [tuple(s // unit for s in x.stride()[:3]) for x in (p.q, p.k)]
    strides += [(0, 0, 0) if x is None else x.stride()[:3] for x in (p.v, p.g, p.beta)]
    numbers = [s for x in (*strides, o) for s in ((0, *x[1:]) if is_packed else x)]
    numbers += [x.stride(3) for x in (p.q, p.k, p.v)]
    numbers += [0 if x is None else x.stride(0) for x in (p.A_log, p.dt_bias)]
    numbers += [start[2][0], *start[2][2:]]
    return Launch(
        recurrent_kernel,
        (p.N + int(is_packed)) * p.HV * part.blocks(p.V),
        (*numbers, p.N, p.T, p.HV, *inverse(p.HV), *inverse(p.HV // p.H), p.scale),
        {
            "K": p.K, "V": p.V, **part.constants(), "AXIS": axis, "INITIAL_AXIS": start[0],
            "DENSE": p.q.stride(3) == p.k.stride(3) == 1, "UNIT": unit, "INITIAL_UNIT": start[1],
            "NORM": p.use_qk_l2norm_in_kernel, "SIGMOID": p.use_beta_sigmoid_in_kernel,
            "NEGATIVE": p.allow_neg_eigval,
        },
        part.num_warps,
    )  # fmt: skip
