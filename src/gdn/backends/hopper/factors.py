"""Compute the factors of a chunk for the state scan from gates and norms: one warp, two tokens a lane.

    g = -exp(A_log) softplus(a + dt_bias)  or as given;   G = chunk sums of g, in fp64
    READ scale e^G q_rstd;  INTO -e^G k_rstd;  OUT e^(G_C - G) k_rstd;  BETA
    FROM (G - log k_rstd) / log 2;  TO (G + log(scale q_rstd)) / log 2
    END e^(G_C), a scalar; the element after it is `TAME`: 1 for a well-conditioned chunk, else 0

The scaled score e^(G_i - G_j) <q_i, k_j> of normalised rows is then 2^(TO_i - FROM_j) times the product of
the caller's rows: one exponential a pair. The rows form two boxes, as each box is one TMA load. The second is
written to HBM for chunks that are not well-conditioned, and only for these. A g below LEAST counts as LEAST:
e^LEAST is 0 in fp32, and G stays so small that a difference of two G in fp32 is off by at most 2^-10. Without
l2norm rstd is 1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.inverse import C
from gdn.backends.triton.lib import activate_beta
from gdn.backends.triton.rule.prepare import log_decay

# rows of a chunk's factors: the first box has rows 0 to 3 (3 is unused), the second rows 4 to 7
READ, INTO, END, OUT, BETA, FROM, TO = (gl.constexpr(i) for i in (0, 1, 2, 4, 5, 6, 7))
ROWS, BOX = gl.constexpr(8), gl.constexpr(4)
TAME = gl.constexpr(END.value * C.value + 1)  # its index among the chunk's factors: the element after END
GAIN = BOX  # the only row of a shared-memory buffer of its own
LEAST = -128.0  # e^LEAST is 0 in fp32
FORGOTTEN = gl.constexpr(-92.0)  # a chunk whose log2 of e^(G_C) is at least this has a decay that fits fp32
PER_LOG2 = gl.constexpr(1.4426950408889634)

# one warp holds a row of 64 factors in registers, two neighbours a lane
TOKENS = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))


@gluon.jit
def gate_of(gate_ptr, row, first, length, head, of_row, of_token, of_head):
    """Load the caller's gate of a chunk's tokens from HBM; 0 past the chunk's end, or without a gate."""
    token = gl.arange(0, C, TOKENS)
    if gate_ptr is None:
        return gl.zeros((C,), gl.float32, TOKENS)
    else:
        base = gate_ptr + row.to(gl.int64) * of_row + first.to(gl.int64) * of_token + head * of_head
        return gl.load(base + token * of_token, mask=token < length, other=0.0)


@gluon.jit
def added(a, b):
    return a + b


@gluon.jit
def decays_of(g, A_log_ptr, dt_bias_ptr, length, head, RESET: gl.constexpr):
    """Return G / log 2 of a chunk's tokens, the last token's past the chunk's end."""
    is_token = gl.arange(0, C, TOKENS) < length
    g = gl.where(is_token, log_decay(g, A_log_ptr, dt_bias_ptr, head, RESET), 0.0)
    # summed in fp64: the rounding of an fp32 sum would reach every difference G_i - G_j
    return (gl.associative_scan(g.to(gl.float64), 0, added) * PER_LOG2).to(gl.float32)


@gluon.jit
def strengths_of(beta, length, IS_GIVEN: gl.constexpr, SIGMOID: gl.constexpr, NEGATIVE: gl.constexpr):
    """Return beta of a chunk's tokens, 0 past the chunk's end."""
    beta = activate_beta(beta, SIGMOID, NEGATIVE) if IS_GIVEN else beta + 1.0
    return gl.where(gl.arange(0, C, TOKENS) < length, beta, 0.0)


@gluon.jit
def row_in(f_s, FACTOR: gl.constexpr):
    """Return the view of a row of the second box in shared memory."""
    return f_s.index(FACTOR - BOX).reshape([C])


@gluon.jit
def put_factors(factors_ptr, f_s, gain_s, decay, beta, q_scale, k_rstd):
    """Store the first box, without `TAME`, to HBM and the second to `f_s` in shared memory.

    q_scale is scale q_rstd. `gain_s` gets the row factor of -A_ij: it is multiplied with <k_i, k_j> and
    2^(FROM_i - FROM_j), or with <k_i, k_j> and OUT_j if the chunk's decay fits fp32 and there are no norms.
    Returns True if the chunk's decay fits fp32: e^(G_C) is so large that e^(G_i - G_C) cannot overflow.
    """
    token = gl.arange(0, C, TOKENS)
    end = gl.sum(gl.where(token == C - 1, decay, 0.0), 0)
    is_near = end >= FORGOTTEN
    grown = gl.exp2(decay)
    out = gl.exp2(end - decay)
    # the second box stays in shared memory: `solve` reads it for A, and stores it only if the scan needs it
    gl.store(factors_ptr + READ * C + token, grown * q_scale)
    gl.store(factors_ptr + END * C, gl.exp2(end))
    row_in(f_s, BETA).store(beta)
    row_in(f_s, TO).store(decay + gl.log2(q_scale))
    if k_rstd is None:
        gain = gl.where(is_near, beta * gl.exp2(decay - end), beta)
    else:
        grown = grown * k_rstd
        out = out * k_rstd
        decay = decay - gl.log2(k_rstd)
        # once for the norm of row i, once to cancel the norm that FROM_i divides by
        gain = beta * (k_rstd * k_rstd)
    gl.store(factors_ptr + INTO * C + token, -grown)
    row_in(f_s, OUT).store(out)
    row_in(f_s, FROM).store(decay)
    row_in(gain_s, GAIN).store(-gain)
    return is_near


@gluon.jit
def put_second_box(factors_ptr, f_s):
    """Copy the second box from shared memory to HBM, for a chunk that is not well-conditioned."""
    token = gl.arange(0, C, TOKENS)
    for row in gl.static_range(BOX, ROWS):
        gl.store(factors_ptr + row * C + token, row_in(f_s, row).load(TOKENS))
