# mypy: disable-error-code="assignment, misc, var-annotated"
"""Invert the triangular system of a packet, 16 x 16 in the registers of a warp, by MMAs of split operands."""

import triton.language as tl

from gdn.backends.triton.launch import jit
from gdn.backends.triton.lib import dot, split_bf16

ROWS = tl.constexpr(16)  # rows of an MMA on tensor cores


@jit
def dot_precise(x, y, acc, FP32_PRECISION: tl.constexpr):
    """Return x y + acc of fp32 operands; "bf16" is three MMAs of hi and lo halves, exact to 2^-16.

    "bf16 apart": none of the three waits for another, and their results are added in fp32.
    """
    IS_APART: tl.constexpr = FP32_PRECISION == "bf16 apart" or FP32_PRECISION == "bf16 apart, transposed"
    if IS_APART or FP32_PRECISION == "bf16" or FP32_PRECISION == "bf16, transposed":
        x_high, x_low = split_bf16(x, tl.bfloat16)
        y_high, y_low = split_bf16(y, tl.bfloat16)
        if IS_APART:
            small = dot(x_low, y_high, None, "tf32") + dot(x_high, y_low, None, "tf32")
            return small + dot(x_high, y_high, acc, "tf32")
        else:
            acc = dot(x_low, y_high, acc, "tf32")  # small terms first
            acc = dot(x_high, y_low, acc, "tf32")
            return dot(x_high, y_high, acc, "tf32")
    else:
        return dot(x, y, acc, FP32_PRECISION)


@jit
def invert_unit_lower(A, LEVELS: tl.constexpr, FP32_PRECISION: tl.constexpr):
    """Return (I + A)^-1 by doubling, as in `tril`, of blocks of 2^LEVELS rows; A is zero beyond them."""
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    X = tl.where(i == j, 1.0, 0.0)
    if LEVELS > 0:  # the first doubling needs no MMA
        X = tl.where((i ^ j) == 1, -A, X)
    for level in tl.static_range(1, LEVELS):
        L = tl.where((i ^ j) >> level == 1, A, 0.0)
        X -= dot_precise(
            dot_precise(X, L, None, FP32_PRECISION), X, None, FP32_PRECISION
        )  # 16 x 16 MMAs by one warp
    return X


@jit
def invert_with_transpose(A, A_t, LEVELS: tl.constexpr, FP32_PRECISION: tl.constexpr):
    """Return what `invert_unit_lower` returns, and its transpose, of A and its transpose.

    The accumulator of X^T has the lanes of X as a second operand: no MMA waits for a move between lanes.
    """
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    X = tl.where(i == j, 1.0, 0.0)
    X_t = X
    if LEVELS > 0:
        X = tl.where((i ^ j) == 1, -A, X)
        X_t = tl.where((i ^ j) == 1, -A_t, X_t)
    for level in tl.static_range(1, LEVELS):
        L_t = tl.where((i ^ j) >> level == 1, A_t, 0.0)
        XL = dot_precise(X, tl.trans(L_t), None, FP32_PRECISION)
        step = dot_precise(XL, tl.trans(X_t), None, FP32_PRECISION)
        X_t -= dot_precise(X_t, tl.trans(XL), None, FP32_PRECISION)
        X -= step
    return X, X_t
