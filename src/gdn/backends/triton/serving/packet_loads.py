# mypy: disable-error-code="assignment, misc, var-annotated"
"""Load the gates of a packet, sum the log decays from its start, and order loads before MMAs."""

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.launch.pdl import ON_GPU
from gdn.backends.triton.lib import activate_beta, softplus


@jit
def load_gates(gates, strides, n, first, head, count, C: tl.constexpr):
    """Return fp64 sums of g from the packet's start, and beta, of a row and head; beta is 0 past its end."""
    return sum_gates(load_logits(gates, strides, n, first, head, count, C), gates, count, C)


@jit
def load_logits(gates, strides, n, first, head, count, C: tl.constexpr):
    """Load g, bias, A_log and beta [BT] of a row and head, a and b if raw; absent ones are numbers."""
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
    bias, A_log = 0.0, 0.0
    if g_ptr is None:
        g = tl.zeros(tokens.shape, tl.float32)
    else:
        g = tl.load(g_ptr + tokens.to(tl.int64) * strides.g_t, mask=is_token, other=0.0).to(tl.float32)
        if RAW:
            if dt_bias_ptr is not None:
                bias = tl.load(dt_bias_ptr).to(tl.float32)
            A_log = tl.load(A_log_ptr).to(tl.float32)
    if beta_ptr is None:
        beta = tl.full(tokens.shape, 1.0, tl.float32)
    else:
        beta = tl.load(beta_ptr + tokens.to(tl.int64) * strides.beta_t, mask=is_token, other=0.0)
    return g, bias, A_log, beta


@jit
def sum_gates(logits, gates, count, C: tl.constexpr):
    """Return what `load_gates` returns, of loaded logits."""
    g, bias, A_log, beta = logits
    RAW: tl.constexpr = gates.a_ptr is not None
    is_token = tl.arange(0, C.BT) < count
    if RAW:
        if gates.dt_bias_ptr is not None:
            g += bias
        g = -tl.exp(A_log) * softplus(g)
    # g = -inf counts as RESET: e^RESET is 0, and sums with it are finite. tl.where keeps NaN:
    # tl.maximum(NaN, RESET) is RESET on a GPU
    g = tl.where(is_token, tl.where(g < C.RESET, C.RESET, g), 0.0)
    if gates.beta_ptr is not None or gates.b_ptr is not None:
        beta = activate_beta(beta, RAW, C.NEGATIVE)
    return tl.cumsum(g.to(tl.float64), 0), tl.where(is_token, beta, 0.0)


@jit
def use_here(x):
    """Return x unchanged: its copy to shared memory, as an operand of an MMA, is not made before this place.

    Triton makes the copy right after the load, where it waits for HBM before later loads and MMAs are issued.
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
def use_parts_here(X):
    """Return all parts of a packet unchanged, as `use_here`."""
    outputs = ()
    for part in tl.static_range(len(X)):
        outputs = outputs + (use_here(X[part]),)
    return outputs
