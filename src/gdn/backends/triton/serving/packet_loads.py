# mypy: disable-error-code="assignment, misc, var-annotated"
"""Load the gates of a packet, and what a program loads before its first MMA.

A program of one strip of columns is a chain of latencies: of HBM for loads, of tensor cores for MMAs. On
16-bit states it issues its loads first (LOADS_FIRST), and keeps the state of its strip in registers (HOLDS).
"""

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.launch.pdl import ON_GPU
from gdn.backends.triton.lib import activate_beta, softplus
from gdn.backends.triton.serving.packet_lib import (
    load_operands,
    load_parts,
    multiply_strip,
    output_strip_pointers,
)


@jit
def load_gates(gates, strides, n, first, head, count, C: tl.constexpr, LOADS_ONLY: tl.constexpr = False):
    """Return fp64 sums of g from the packet's start, and beta, of a row and head; beta is 0 past its end.

    LOADS_ONLY: return what was loaded, for `sum_gates`.
    """
    tokens = tl.arange(0, C.BT)
    is_token = tokens < count
    RAW: tl.constexpr = gates.a_ptr is not None
    g_ptr, beta_ptr = gates.g_ptr, gates.beta_ptr
    A_log_ptr, dt_bias_ptr = gates.A_log_ptr, gates.dt_bias_ptr
    if RAW:
        g_ptr, beta_ptr = gates.a_ptr, gates.b_ptr
        A_log_ptr += head * strides.A_log_h
    if g_ptr is not None:
        g_ptr += n * strides.g_b + first * strides.g_t + head * strides.g_h
    if beta_ptr is not None:
        beta_ptr += n * strides.beta_b + first * strides.beta_t + head * strides.beta_h
    if dt_bias_ptr is not None:
        dt_bias_ptr += head * strides.dt_bias_h
    A_log = 0.0
    if g_ptr is None:
        g = tl.zeros(tokens.shape, tl.float32)
    else:
        g = tl.load(g_ptr + tokens.to(tl.int64) * strides.g_t, mask=is_token, other=0.0).to(tl.float32)
        if RAW:
            if dt_bias_ptr is not None:
                g += tl.load(dt_bias_ptr).to(tl.float32)
            A_log = tl.load(A_log_ptr).to(tl.float32)
    if not LOADS_ONLY:
        g = activate_decays(g, A_log, gates, count, C)
    if beta_ptr is None:
        beta = tl.full(tokens.shape, 1.0, tl.float32)
    else:
        beta = tl.load(beta_ptr + tokens.to(tl.int64) * strides.beta_t, mask=is_token, other=0.0)
    if LOADS_ONLY:
        return g, A_log, beta
    else:
        beta = activate_betas(beta, gates, C)
        return tl.cumsum(g.to(tl.float64), 0), tl.where(is_token, beta, 0.0)


@jit
def sum_gates(loaded, gates, count, C: tl.constexpr):
    """Return what `load_gates` returns, of what it loaded."""
    g, A_log, beta = loaded
    g, beta = activate_decays(g, A_log, gates, count, C), activate_betas(beta, gates, C)
    return tl.cumsum(g.to(tl.float64), 0), tl.where(tl.arange(0, C.BT) < count, beta, 0.0)


@jit
def load_packet(packet, gates, strides, n, first, head, C: tl.constexpr, LOADS_FIRST: tl.constexpr):
    """Return the first BS keys of all parts, their products, and sums of g with beta, of a row and head.

    LOADS_FIRST: return what `multiply_parts` and `sum_gates` need, which the caller runs after further loads;
    there are no products then.
    """
    if LOADS_FIRST:
        return load_parts(packet, C), (), load_gates(gates, strides, n, first, head, packet.count, C, True)
    else:
        X, XK, QQ = load_operands(packet, C)
        return X, (XK, QQ), load_gates(gates, strides, n, first, head, packet.count, C)


@jit
def activate_decays(g, A_log, gates, count, C: tl.constexpr):
    """Return the log decays [BT] of g, or of logits g with their bias and A_log; 0 past the packet's end."""
    if gates.a_ptr is not None:
        g = -tl.exp(A_log) * softplus(g)
    # g = -inf counts as RESET: e^RESET is 0, and sums with it are finite. tl.where keeps NaN:
    # tl.maximum(NaN, RESET) is RESET on a GPU
    return tl.where(tl.arange(0, C.BT) < count, tl.where(g < C.RESET, C.RESET, g), 0.0)


@jit
def activate_betas(beta, gates, C: tl.constexpr):
    """Return beta [BT] of loaded beta or logits; ones if neither was given."""
    if gates.beta_ptr is not None or gates.b_ptr is not None:
        return activate_beta(beta, gates.a_ptr is not None, C.NEGATIVE)
    else:
        return beta


@jit
def use_here(x):
    """Return x unchanged, as an operand of MMAs that is copied to shared memory no earlier than here.

    Triton makes that copy right after the load, where it waits for HBM before later loads are issued.
    """
    if ON_GPU:
        # moves that ptxas removes
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK
        )  # fmt: skip
    else:
        return x


@jit
def late_count(STRIPS: tl.constexpr, count, IS_LATE: tl.constexpr):
    """Return STRIPS; IS_LATE: 1, or 0 for an empty packet, so that the loop over one strip is a loop.

    In one block of instructions ptxas moves the copies of a loaded state to shared memory, which wait for
    HBM, before MMAs that need no state. It moves none of them out of a loop.
    """
    if IS_LATE:
        return tl.minimum(tl.maximum(count, 0), 1)
    else:
        return STRIPS


@jit
def use_parts_here(X):
    """Return all parts of a packet as `use_here`."""
    outputs = ()
    for part in tl.static_range(len(X)):
        outputs = outputs + (use_here(X[part]),)
    return outputs


@jit
def load_strip(strip, C: tl.constexpr):
    """Load all keys of a strip of the state into registers, as `output_strip_pointers` orders them."""
    place, in_state = output_strip_pointers(strip, tl.arange(0, C.BS), C)
    return tl.load(place, mask=in_state, other=0.0)


@jit
def multiply_held(X, S, C: tl.constexpr):
    """Return X S by parts, of a strip that `load_strip` returned."""
    S = use_here(S)
    if C.AXIS == "k":
        return multiply_strip(X, tl.trans(S), C)
    else:
        return multiply_strip(X, S, C)
