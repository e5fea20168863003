"""Factors of a chunk's tokens for the walk, from gates and norms: a warp, two tokens a lane.

    g = -exp(A_log) softplus(a + dt_bias)  or as given;   G = chunk sums of g, in fp64
    READ scale e^G q_rstd;  INTO -e^G k_rstd;  OUT e^(G_C - G) k_rstd;  BETA
    FROM (G - log k_rstd) / log 2;  TO (G + log(scale q_rstd)) / log 2
    END e^(G_C), a number; beside it TAME: 1 for a tame chunk, else 0

so that the scaled e^(G_i - G_j) <q_i, k_j> of normalised rows is 2^(TO_i - FROM_j) times the product of those
that came, an exponential a pair. Rows lie in two boxes: the second is for chunks that are not tame, and is
written for these alone. A token's g counts as LEAST at least: e^LEAST is nothing in fp32, and G stays so near
0 that a difference of it in fp32 is off by at most 2^-10. Without norms to be taken rstd is 1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn.backends.hopper.inverse import C
from gdn.backends.triton.lib import strength
from gdn.backends.triton.prepare import log_decay

# rows of a chunk's factors, the fourth unused; of each of the two boxes
READ, INTO, END, OUT, BETA, FROM, TO = (gl.constexpr(i) for i in (0, 1, 2, 4, 5, 6, 7))
ROWS, BOX = gl.constexpr(8), gl.constexpr(4)
TAME = gl.constexpr(END.value * C.value + 1)  # where it is, from the first factor on: beside END
GAIN = BOX  # the only row of a tile of its own
LEAST = -128.0
FORGOTTEN = gl.constexpr(-92.0)  # log2 of e^(G_C), from which on a chunk is near
PER_LOG2 = gl.constexpr(1.4426950408889634)

TOKENS = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))


@gluon.jit
def gate_of(gate_ptr, row, first, length, head, of_row, of_token, of_head):
    """A chunk's numbers of a gate, as the caller gave them; 0 past the end, or where there are none."""
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
    """G / log 2 of a chunk's tokens; past its end that of its last."""
    is_token = gl.arange(0, C, TOKENS) < length
    g = gl.where(is_token, log_decay(g, A_log_ptr, dt_bias_ptr, head, RESET), 0.0)
    return (gl.associative_scan(g.to(gl.float64), 0, added) * PER_LOG2).to(gl.float32)


@gluon.jit
def strengths_of(beta, length, IS_GIVEN: gl.constexpr, SIGMOID: gl.constexpr, NEGATIVE: gl.constexpr):
    """beta of a chunk's tokens, 0 past its end."""
    beta = strength(beta, SIGMOID, NEGATIVE) if IS_GIVEN else beta + 1.0
    return gl.where(gl.arange(0, C, TOKENS) < length, beta, 0.0)


@gluon.jit
def row_in(f_s, FACTOR: gl.constexpr):
    """A row of the second box."""
    return f_s.index(FACTOR - BOX).reshape([C])


@gluon.jit
def put_factors(factors_ptr, f_s, gain_s, decay, beta, q_scale, k_rstd):
    """The first box to memory but for TAME, the second to `f_s`; q_scale: scale q_rstd.

    To `gain_s` what <k_i, k_j> is to be multiplied with for -A_ij, beside 2^(FROM_i - FROM_j); without norms
    beside OUT_j where the chunk is near. Returns whether e^(G_C) is so large, and so e^(G_i - G_C) is none
    that fp32 has no room for.
    """
    token = gl.arange(0, C, TOKENS)
    end = gl.sum(gl.where(token == C - 1, decay, 0.0), 0)
    is_near = end >= FORGOTTEN
    grown = gl.exp2(decay)
    out = gl.exp2(end - decay)
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
        # once for the row's norm, once for that in FROM
        gain = beta * (k_rstd * k_rstd)
    gl.store(factors_ptr + INTO * C + token, -grown)
    row_in(f_s, OUT).store(out)
    row_in(f_s, FROM).store(decay)
    row_in(gain_s, GAIN).store(-gain)
    return is_near


@gluon.jit
def put_second_box(factors_ptr, f_s):
    """What only chunks that are not tame want."""
    token = gl.arange(0, C, TOKENS)
    for row in gl.static_range(BOX, ROWS):
        gl.store(factors_ptr + row * C + token, row_in(f_s, row).load(TOKENS))
