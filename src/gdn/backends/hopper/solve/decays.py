"""Compute the factors of a chunk (see `factors`) from gates and norms: one warp, two tokens a lane."""

from typing import Any

from triton.experimental.gluon import language as gl

from gdn.backends.hopper.factors import (
    BETA,
    BOX_ROWS,
    CHUNK_DECAY,
    K_DECAY,
    LOG2_E,
    LOG2_K,
    LOG2_Q,
    MIN_LOG2_DECAY,
    NUM_ROWS,
    Q_DECAY,
    UPDATE_DECAY,
    C,
)
from gdn.backends.hopper.gluon import jit, struct
from gdn.backends.hopper.solve.inverse import ACC_BLOCK, BLOCK
from gdn.backends.triton.lib import activate_beta
from gdn.backends.triton.rule.prepare import log_decay

# the row factor of -A: a row of shared memory alone
A_FACTOR = NUM_ROWS
# one warp holds a row of 64 factors in registers, two neighbours a lane
TOKEN_PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))


@struct
class SharedFactors:
    """Hold rows of factors in shared memory, plain [1, C] of fp32."""

    box: Any  # the first box: UPDATE_DECAY, BETA, LOG2_K, LOG2_Q
    a_factor: Any

    @jit
    def view(self, FACTOR: gl.constexpr):
        """Return the view [1, C] of a row."""
        if FACTOR == A_FACTOR:
            return self.a_factor.index(0)
        else:
            return self.box.index(FACTOR)

    @jit
    def vector_view(self, FACTOR: gl.constexpr):
        """Return the view [C] of a row."""
        return self.view(FACTOR).reshape([C])

    @jit
    def column_view(self, FACTOR: gl.constexpr, n: gl.constexpr):
        """Return the view [16, 1] of the factors of block n's tokens."""
        return self.view(FACTOR).permute((1, 0)).slice(n * BLOCK, BLOCK, 0)

    @jit
    def column(self, FACTOR: gl.constexpr, n: gl.constexpr):
        """Load the factors of block n's 16 tokens from shared memory as a column [16, 1]."""
        return self.column_view(FACTOR, n).load(ACC_BLOCK)

    @jit
    def row(self, FACTOR: gl.constexpr, n: gl.constexpr):
        """Load the factors of block n's 16 tokens from shared memory as a row [1, 16]."""
        return self.view(FACTOR).slice(n * BLOCK, BLOCK, 1).load(ACC_BLOCK)


@jit
def load_gate(gate_ptr, row, first, length, head, of_row, of_token, of_head):
    """Load the caller's gate of a chunk's tokens from HBM; 0 past the chunk's end, or without a gate."""
    token = gl.arange(0, C, TOKEN_PAIRS)
    if gate_ptr is None:
        return gl.zeros((C,), gl.float32, TOKEN_PAIRS)
    else:
        # int64: an offset into HBM may exceed 2^31 elements
        base = gate_ptr + row.to(gl.int64) * of_row + first.to(gl.int64) * of_token + head * of_head
        return gl.load(base + token * of_token, mask=token < length, other=0.0)


@jit
def add(a, b):
    """Add; the associative operation of the scan over a warp's registers."""
    return a + b


@jit
def compute_decays(g, A_log_ptr, dt_bias_ptr, length, head, RESET: gl.constexpr):
    """Return G / log 2 of a chunk's tokens, the last token's past the chunk's end."""
    is_token = gl.arange(0, C, TOKEN_PAIRS) < length
    g = gl.where(is_token, log_decay(g, A_log_ptr, dt_bias_ptr, head, RESET), 0.0)
    # summed in fp64: the rounding of an fp32 sum would reach every difference G_i - G_j
    return (gl.associative_scan(g.to(gl.float64), 0, add) * LOG2_E).to(gl.float32)


@jit
def compute_betas(beta, length, IS_GIVEN: gl.constexpr, SIGMOID: gl.constexpr, NEGATIVE: gl.constexpr):
    """Return beta of a chunk's tokens, 0 past the chunk's end."""
    # without a tensor `load_gate` leaves zeros in the registers, and beta is 1
    beta = activate_beta(beta, SIGMOID, NEGATIVE) if IS_GIVEN else beta + 1.0
    return gl.where(gl.arange(0, C, TOKEN_PAIRS) < length, beta, 0.0)


@jit
def store_factors(factors_ptr, factors, decay, beta, q_scale, k_rstd):
    """Store the second box, without WELL_CONDITIONED, to HBM and the first to shared memory.

    q_scale is scale q_rstd. A_FACTOR is the row factor of -A_ij: it is multiplied with <k_i, k_j> and
    2^(LOG2_K_i - LOG2_K_j), or with <k_i, k_j> and UPDATE_DECAY_j if the chunk's decay fits fp32 and there
    are no norms. Returns True if the chunk's decay fits fp32: e^(G_C) is so large that e^(G_i - G_C) cannot
    overflow.
    """
    token = gl.arange(0, C, TOKEN_PAIRS)
    end = gl.sum(gl.where(token == C - 1, decay, 0.0), 0)
    has_fp32_decay = end >= MIN_LOG2_DECAY
    exp_G = gl.exp2(decay)
    out = gl.exp2(end - decay)
    # the first box stays in shared memory: `solve` reads it for A, and stores it only if the scan needs it
    gl.store(factors_ptr + Q_DECAY * C + token, exp_G * q_scale)
    gl.store(factors_ptr + CHUNK_DECAY * C, gl.exp2(end))
    factors.vector_view(BETA).store(beta)
    factors.vector_view(LOG2_Q).store(decay + gl.log2(q_scale))
    if k_rstd is None:
        a_factor = gl.where(has_fp32_decay, beta * gl.exp2(decay - end), beta)
    else:
        exp_G = exp_G * k_rstd
        out = out * k_rstd
        decay = decay - gl.log2(k_rstd)
        # once for the norm of row i, once to cancel the norm that LOG2_K_i divides by
        a_factor = beta * (k_rstd * k_rstd)
    gl.store(factors_ptr + K_DECAY * C + token, -exp_G)
    factors.vector_view(UPDATE_DECAY).store(out)
    factors.vector_view(LOG2_K).store(decay)
    factors.vector_view(A_FACTOR).store(-a_factor)
    return has_fp32_decay


@jit
def store_first_box(factors_ptr, factors):
    """Copy the first box from shared memory to HBM, for a chunk that is not well-conditioned."""
    token = gl.arange(0, C, TOKEN_PAIRS)
    for row in gl.static_range(BOX_ROWS):
        gl.store(factors_ptr + row * C + token, factors.vector_view(row).load(TOKEN_PAIRS))
