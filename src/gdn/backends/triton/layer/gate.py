"""Compute the gates as functions of their own: elementwise, in fp32 to a few last places.

    g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)
    da = -exp(A_log) sigmoid(a + dt_bias) dg;   dA_log = sum g dg;   ddt_bias = sum da
    db = sigmoid(b) sigmoid(-b) dbeta

Bytes per token and head in bf16: forward 12, backward 16.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton import sums
from gdn.backends.triton.launch import Launch, PlanCache, device_guard, jit, kernel, machine, unit_of
from gdn.backends.triton.layer.gate_channels import gate_channels, gate_channels_bwd, to_rows
from gdn.backends.triton.lib import log1p, split_fp64
from gdn.notation import Decay, GateBias, HeadParam, PerHead

ELEMENTS = 1024  # tokens times heads of a block: 8 a thread
HEADS = 128  # most heads of a block


@jit
def _exp(x):
    """Return e^x of a float64 x in fp32; rounding x / log 2 to fp32 first would cost |x| last places.

    A GPU's exp2 is 0 below 2^-126, where fp32 has subnormal numbers; there 2^64 times the result is computed.
    """
    high, low = split_fp64(tl.where(x < -200.0, -200.0, x) * 1.4426950408889634)
    is_tiny = high < -100.0
    power = tl.exp2(tl.where(is_tiny, high + 64.0, high)) * (1.0 + low * 0.6931471805599453)
    return power * tl.where(is_tiny, 2.0**-64, 1.0)


@jit
def _softplus_sigmoid(x):
    """Return log(1 + e^x), 1 / (1 + e^-x) and its derivative, all without cancellation."""
    e = _exp(-tl.abs(x.to(tl.float64)))
    sigmoid = tl.where(x >= 0, 1.0, e) / (1.0 + e)
    return tl.maximum(x, 0.0) + log1p(e), sigmoid, e / ((1.0 + e) * (1.0 + e))


@jit
def decay_rate(a, A_log, bias):
    """Return exp(A_log) times softplus(a + bias) and times sigmoid(a + bias); A_log and bias by head."""
    x = a + bias[None, :]
    softplus, sigmoid, _ = _softplus_sigmoid(x)
    rate = _exp(A_log.to(tl.float64))[None, :]
    # both functions are e^x there, which may underflow in fp32 although the product with exp(A_log) does not
    is_small = x < -20.0
    product = _exp(A_log.to(tl.float64)[None, :] + tl.where(is_small, x, 0.0).to(tl.float64))
    return tl.where(is_small, product, rate * softplus), tl.where(is_small, product, rate * sigmoid)


@jit
def load_heads(A_log_ptr, dt_bias_ptr, heads, is_head):
    """Load A_log, and dt_bias or 0."""
    A_log = tl.load(A_log_ptr + heads, mask=is_head, other=0.0).to(tl.float32)
    if dt_bias_ptr is None:
        bias = tl.zeros(heads.shape, tl.float32)
    else:
        bias = tl.load(dt_bias_ptr + heads, mask=is_head, other=0.0).to(tl.float32)
    return A_log, bias


@jit
def _row_indices(rows, row_stride, heads, UNIT: tl.constexpr):
    return rows.to(tl.int64)[:, None] * (row_stride * UNIT) + heads[None, :]


@kernel
def _gate_kernel(
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, g_ptr, beta_ptr,
    num_rows, HV, a_r, b_r,
    BR: tl.constexpr, BH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # g = -exp(A_log) softplus(a + dt_bias);  beta = sigmoid(b), elementwise.
    # Program (block of BR rows, strip of BH heads); BR * BH = ELEMENTS, 8 per thread in registers.
    # Grid: cdiv(rows, BR) * strips, strips fastest; 4 warps; no PDL.
    # Reads a and b once from HBM; writes g and beta in fp32: 12 bytes per token and head in bf16.
    strips = tl.cdiv(HV * UNIT, BH)
    rows = (tl.program_id(0) // strips) * BR + tl.arange(0, BR)
    heads = (tl.program_id(0) % strips) * BH + tl.arange(0, BH)
    mask = (rows < num_rows)[:, None] & (heads < HV * UNIT)[None, :]
    A_log, bias = load_heads(A_log_ptr, dt_bias_ptr, heads, heads < HV * UNIT)
    a = tl.load(a_ptr + _row_indices(rows, a_r, heads, UNIT), mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + _row_indices(rows, b_r, heads, UNIT), mask=mask, other=0.0).to(tl.float32)
    decay, _ = decay_rate(a, A_log, bias)
    _, beta, _ = _softplus_sigmoid(b)
    out = _row_indices(rows, HV, heads, UNIT)
    tl.store(g_ptr + out, -decay, mask=mask)
    tl.store(beta_ptr + out, beta, mask=mask)


@kernel
def _gate_bwd_kernel(
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, dg_ptr, dbeta_ptr, da_ptr, db_ptr, partial_ptr,
    num_rows, HV, a_r, b_r, dg_r, dbeta_r, rows_per_program,
    BR: tl.constexpr, BH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # da, db, and partial sums of dA_log and ddt_bias.
    # Program (group of rows, strip of BH heads), BR rows at a time; the sums [BR, BH] stay in registers.
    # Grid: num_partials * strips, strips fastest, about two programs per SM; 4 warps; no PDL.
    # Reads a, b, dg, dbeta once; writes da and db, and two fp32 sums (8 bytes) per program and head.
    strips = tl.cdiv(HV * UNIT, BH)
    block = tl.program_id(0) // strips
    heads = (tl.program_id(0) % strips) * BH + tl.arange(0, BH)
    is_head = heads < HV * UNIT
    A_log, bias = load_heads(A_log_ptr, dt_bias_ptr, heads, is_head)
    # sums stay in registers over all rows of the program
    dA_log = tl.zeros([BR, BH], tl.float32)
    ddt_bias = tl.zeros([BR, BH], tl.float32)
    first = block * rows_per_program
    for i in range(first, tl.minimum(first + rows_per_program, num_rows), BR):
        rows = i + tl.arange(0, BR)
        mask = (rows < num_rows)[:, None] & is_head[None, :]
        a = tl.load(a_ptr + _row_indices(rows, a_r, heads, UNIT), mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + _row_indices(rows, b_r, heads, UNIT), mask=mask, other=0.0).to(tl.float32)
        dg = tl.load(dg_ptr + _row_indices(rows, dg_r, heads, UNIT), mask=mask, other=0.0).to(tl.float32)
        dbeta = tl.load(dbeta_ptr + _row_indices(rows, dbeta_r, heads, UNIT), mask=mask, other=0.0).to(
            tl.float32
        )
        decay, slope_a = decay_rate(a, A_log, bias)
        _, _, slope_b = _softplus_sigmoid(b)
        # 0 times NaN or inf must not reach the sums
        da = tl.where(dg == 0.0, 0.0, -slope_a * dg)
        dA_log += tl.where(dg == 0.0, 0.0, -decay * dg)
        ddt_bias += da
        db = tl.where(dbeta == 0.0, 0.0, dbeta * slope_b)
        out = _row_indices(rows, HV, heads, UNIT)
        tl.store(da_ptr + out, da.to(da_ptr.dtype.element_ty), mask=mask)
        tl.store(db_ptr + out, db.to(db_ptr.dtype.element_ty), mask=mask)
    # partial sums to HBM, without atomics: `sums` adds them in a fixed order
    partial_ptr += block.to(tl.int64) * (2 * HV * UNIT) + heads
    tl.store(partial_ptr, tl.sum(dA_log, 0), mask=is_head)
    tl.store(partial_ptr + HV * UNIT, tl.sum(ddt_bias, 0), mask=is_head)


@dataclass(frozen=True)
class _BackwardPlan:
    gradients: Launch
    add: Launch
    num_partials: int


_forwards: PlanCache[Launch] = PlanCache()
_backwards: PlanCache[_BackwardPlan] = PlanCache()


def gate(
    a: Decay, b: PerHead, A_log: HeadParam | None, dt_bias: GateBias | None, lower_bound: float | None
) -> tuple[Decay, PerHead]:
    """See `Backend`: g and beta in fp32. `refuses` lets a lower bound pass for key channels alone."""
    if a.dim() > b.dim():
        return gate_channels(a, b, A_log, dt_bias, lower_bound)
    assert A_log is not None
    a, b, A_log, dt_bias = to_rows(a), to_rows(b), A_log.contiguous(), _to_contiguous(dt_bias)
    with device_guard(a.device):
        launch = _forwards.get(_launch_key(a, b, A_log, dt_bias), lambda: _plan(a, b))
        g, beta = (x.new_empty(x.shape, dtype=torch.float32) for x in (a, b))
        launch(a, b, A_log, dt_bias, g, beta)
    return g, beta


def gate_bwd(
    a: Decay,
    b: PerHead,
    A_log: HeadParam | None,
    dt_bias: GateBias | None,
    lower_bound: float | None,
    dg: Decay,
    dbeta: PerHead,
) -> tuple[Decay, PerHead, HeadParam | None, GateBias | None]:
    """Return da, db, dA_log, ddt_bias, each in its tensor's dtype."""
    if a.dim() > b.dim():
        return gate_channels_bwd(a, b, A_log, dt_bias, lower_bound, dg, dbeta)
    assert A_log is not None
    a, b, A_log, dt_bias, dg, dbeta = (
        to_rows(a), to_rows(b), A_log.contiguous(), _to_contiguous(dt_bias),
        to_rows(dg), to_rows(dbeta)
    )  # fmt: skip
    with device_guard(a.device):
        plan = _backwards.get(
            _launch_key(a, b, A_log, dt_bias, dg, dbeta), lambda: _plan_bwd(a, b, dg, dbeta)
        )
        da, db, dA_log = (x.new_empty(x.shape) for x in (a, b, A_log))
        ddt_bias = None if dt_bias is None else dt_bias.new_empty(dt_bias.shape)
        partial = a.new_empty(plan.num_partials, 2, a.shape[-1], dtype=torch.float32)
        plan.gradients(a, b, A_log, dt_bias, dg, dbeta, da, db, partial)
        plan.add(partial, dA_log, ddt_bias)
    return da, db, dA_log, ddt_bias


def _to_contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _launch_key(*tensors: Tensor | None) -> tuple[object, ...]:
    first = tensors[0]
    assert first is not None
    return first.shape, first.device, *(None if x is None else (x.stride(), x.dtype) for x in tensors)


def _launch_arguments(*tensors: Tensor) -> tuple[tuple[int, ...], dict[str, Any], int]:
    """Return rows, heads and row strides; block sizes; the number of strips of heads."""
    HV = tensors[0].shape[-1]
    strides = [x.stride(-2) if x.dim() > 1 else 0 for x in tensors]
    unit = unit_of(HV, *strides)
    BH = min(HEADS, triton.next_power_of_2(max(1, HV)))
    scalars = (tensors[0].numel() // max(1, HV), HV // unit, *(s // unit for s in strides))
    return scalars, {"BR": ELEMENTS // BH, "BH": BH, "UNIT": unit}, triton.cdiv(HV, BH)


def _plan(a: Tensor, b: Tensor) -> Launch:
    scalars, constants, strips = _launch_arguments(a, b)
    return Launch(_gate_kernel, triton.cdiv(scalars[0], constants["BR"]) * strips, scalars, constants, 4)


def _plan_bwd(a: Tensor, b: Tensor, dg: Tensor, dbeta: Tensor) -> _BackwardPlan:
    scalars, constants, strips = _launch_arguments(a, b, dg, dbeta)
    num_rows, BR, HV = scalars[0], constants["BR"], a.shape[-1]
    # two programs per SM, each of which stores one partial sum
    blocks = triton.cdiv(triton.cdiv(num_rows, BR) * strips, 2 * machine(a.device).num_sms)
    rows = max(1, blocks) * BR
    num_partials = triton.cdiv(num_rows, rows)
    gradients = Launch(_gate_bwd_kernel, num_partials * strips, (*scalars, rows), constants, 4)
    return _BackwardPlan(gradients, sums.add(num_partials, 2, HV, (HV, 1)), num_partials)
