"""Run the gated RMS norm with rows in registers: one read of each input, one write of each output.

    y = weight * n * act(z);   n = x * rstd;   rstd = rsqrt(mean(x * x) + eps)
    dn = weight * act(z) * dy;   dx = rstd * (dn - n * mean(n * dn));   dweight = sum(n * act(z) * dy)
    zero-centred, forward only:   y = n * (1 + weight)

Rows have two strides (outer and inner), so heads of a wider projection need no copy. Bytes per element in
bf16 with a gate: forward 6, backward 10; zero-centred 4.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends import eager
from gdn.backends.triton import sums
from gdn.backends.triton.launch import Launch, PlanCache, device_guard, jit, kernel, machine, unit_of
from gdn.backends.triton.launch.pdl import launch_dependents_then_wait, pdl_options, supports_pdl
from gdn.backends.triton.lib import column_mask, sigmoid
from gdn.problem.layer import NormProblem

# elements of a block of rows, at least one row; half in the backward, which needs more registers
ELEMENTS = 2048
MAX_COLUMNS = 8192  # columns of a row that fit in registers; `eager` runs wider rows


class StridedRows(NamedTuple):
    """Hold a tensor of rows: its pointer, and the strides of outer rows and of the rows within them."""

    ptr: Any
    outer: Any
    inner: Any


@jit
def _load(x, rows, num_rows, inner, D: tl.constexpr, BD: tl.constexpr, UNIT: tl.constexpr):
    """Load rows of x in fp32; zeros past the last row and column."""
    columns = tl.arange(0, BD)
    indices = ((rows // inner).to(tl.int64) * x.outer + (rows % inner).to(tl.int64) * x.inner) * UNIT
    mask = (rows < num_rows)[:, None] & column_mask(columns, D)[None, :]
    return tl.load(x.ptr + indices[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@jit
def _store(y_ptr, y, rows, num_rows, D: tl.constexpr, BD: tl.constexpr):
    columns = tl.arange(0, BD)
    mask = (rows < num_rows)[:, None] & column_mask(columns, D)[None, :]
    indices = y_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(indices, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _load_weight(weight_ptr, D: tl.constexpr, BD: tl.constexpr):
    columns = tl.arange(0, BD)
    if weight_ptr is None:
        weight = tl.full([BD], 1.0, tl.float32)
    else:
        weight = tl.load(weight_ptr + columns, mask=column_mask(columns, D), other=0.0).to(tl.float32)
    return weight


@jit
def gate_and_derivative(z, GATE: tl.constexpr):
    """Return act(z) and act'(z)."""
    if GATE == "none":
        return z, z * 0.0 + 1.0
    else:
        s = sigmoid(z)
        if GATE == "silu":
            return z * s, s * (1.0 + z * (1.0 - s))
        else:
            return s, s * (1.0 - s)


@kernel
def _norm_kernel(
    x_ptr, z_ptr, weight_ptr, y_ptr,
    num_rows, inner, x_o, x_i, z_o, z_i, eps,
    GATE: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, UNIT: tl.constexpr,
    ZERO_CENTRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # y = weight * n * act(z), or (1 + weight) * n.
    # Program: BR whole rows, max(ELEMENTS, BD) elements in registers. Grid: cdiv(rows, BR); 4 to 16 warps.
    # PDL: it lets the next kernel start at once, and waits for the previous one before its first load.
    # Reads x and z once, and weight; writes y: 6 bytes per element in bf16 with a gate. y may be x: a
    # program loads its rows before it stores them.
    if PDL:
        launch_dependents_then_wait()
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    x = _load(StridedRows(x_ptr, x_o, x_i), rows, num_rows, inner, D, BD, UNIT)
    if ZERO_CENTRED:
        # a token's one row takes as long as its loads from HBM and L2: the weight is loaded ahead of the
        # barriers of the sum, and in the layout of x, so that it does not pass through shared memory
        weight = _load(StridedRows(weight_ptr, 0, 0), rows, num_rows, inner, D, BD, UNIT)
    # rows are in registers: the mean needs no second read of x
    y = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    if ZERO_CENTRED:
        y = y * (1.0 + weight)
    elif weight_ptr is not None:
        y = y * _load_weight(weight_ptr, D, BD)[None, :]
    if z_ptr is not None:
        gate, _ = gate_and_derivative(
            _load(StridedRows(z_ptr, z_o, z_i), rows, num_rows, inner, D, BD, UNIT), GATE
        )
        y = y * gate
    _store(y_ptr, y, rows, num_rows, D, BD)


@kernel
def _norm_bwd_kernel(
    x_ptr, z_ptr, weight_ptr, dy_ptr, dx_ptr, dz_ptr, partial_ptr,
    num_rows, inner, x_o, x_i, z_o, z_i, dy_o, dy_i, rows_per_program, eps,
    GATE: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # dx, dz, and partial sums of dweight.
    # Program: a group of rows, BR at a time; dweight [BR, BD] is a sum in registers over the group.
    # Grid: num_partials, about four programs per SM; 4 to 16 warps; no PDL.
    # Reads x, z and dy once, and weight; writes dx and dz: 10 bytes per element in bf16 with a gate. Each
    # program also writes D fp32 partial sums.
    weight = _load_weight(weight_ptr, D, BD)
    dweight = tl.zeros([BR, BD], tl.float32)
    first = tl.program_id(0) * rows_per_program
    for i in range(first, tl.minimum(first + rows_per_program, num_rows), BR):
        rows = i + tl.arange(0, BR)
        x = _load(StridedRows(x_ptr, x_o, x_i), rows, num_rows, inner, D, BD, UNIT)
        dn = _load(StridedRows(dy_ptr, dy_o, dy_i), rows, num_rows, inner, D, BD, UNIT)
        # rstd is recomputed from the registers: saving it would cost HBM traffic in the forward
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        n = x * rstd
        if z_ptr is not None:
            z = _load(StridedRows(z_ptr, z_o, z_i), rows, num_rows, inner, D, BD, UNIT)
            gate, slope = gate_and_derivative(z, GATE)
            _store(dz_ptr, dn * n * weight[None, :] * slope, rows, num_rows, D, BD)
            dn = dn * gate
        dweight += dn * n
        # dweight has been added before: it needs dn without the weight
        dn = dn * weight[None, :]
        dx = rstd * (dn - n * (tl.sum(n * dn, 1) / D)[:, None])
        _store(dx_ptr, dx, rows, num_rows, D, BD)
    # one partial sum per program to HBM, without atomics: `sums` adds them in a fixed order
    if partial_ptr is not None:
        columns = tl.arange(0, BD)
        indices = partial_ptr + tl.program_id(0).to(tl.int64) * D + columns
        tl.store(indices, tl.sum(dweight, 0), mask=column_mask(columns, D))


@dataclass(frozen=True)
class _BackwardPlan:
    gradients: Launch
    add: Launch
    num_partials: int


_forwards: PlanCache[Launch] = PlanCache()
_zero_centred: PlanCache[Launch] = PlanCache()
_backwards: PlanCache[_BackwardPlan] = PlanCache()


def rms_norm_gated(problem: NormProblem) -> Tensor:
    """See `Backend`."""
    p = problem
    if p.x.shape[-1] > MAX_COLUMNS:
        return eager.BACKEND.rms_norm_gated(p)  # type: ignore[no-any-return]
    x, weight = _to_foldable(p.x), _to_contiguous(p.weight)
    z = None if p.z is None else _to_foldable(p.z)
    with device_guard(x.device):
        key = (
            x.shape,
            x.stride(),
            x.dtype,
            x.device,
            _layout_key(z),
            _dtype_key(weight),
            p.eps,
            p.activation,
        )
        launch = _forwards.get(key, lambda: plan_launch(p, x, z))
        y = x.new_empty(x.shape)
        launch(x, z, weight, y)
    return y


def rms_norm_zero_centred(problem: NormProblem) -> Tensor:
    """See `Backend`: one launch, where y has rows one after another and the strides of empty_like(x)."""
    p = problem
    x, y, weight = p.x, torch.empty_like(p.x), _to_contiguous(p.weight)
    has_rows = 0 < x.shape[-1] <= MAX_COLUMNS and x.stride(-1) == 1 and _is_foldable(x)
    if not has_rows or not y.is_contiguous():
        return eager.BACKEND.rms_norm_zero_centred(p)  # type: ignore[no-any-return]
    with device_guard(x.device):
        key = (x.shape, x.stride(), x.dtype, x.device, _dtype_key(weight), p.eps)
        launch = _zero_centred.get(key, lambda: plan_launch(p, x, None, is_zero_centred=True))
        launch(x, None, weight, y)
    return y


def rms_norm_gated_bwd(problem: NormProblem, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, z and weight, each in its tensor's dtype."""
    p = problem
    if p.x.shape[-1] > MAX_COLUMNS:
        return eager.BACKEND.rms_norm_gated_bwd(p, dy)  # type: ignore[no-any-return]
    x, weight, dy = _to_foldable(p.x), _to_contiguous(p.weight), _to_foldable(dy)
    z = None if p.z is None else _to_foldable(p.z)
    with device_guard(x.device):
        key = (
            x.shape, x.stride(), x.dtype, x.device, _layout_key(z), _dtype_key(weight), p.eps, p.activation,
            _layout_key(dy),
        )  # fmt: skip
        plan = _backwards.get(key, lambda: _plan_bwd(p, x, z, dy))
        dx = x.new_empty(x.shape)
        dz, dweight = (None if t is None else t.new_empty(t.shape) for t in (z, weight))
        partial = None
        if weight is not None:
            partial = x.new_empty(plan.num_partials, x.shape[-1], dtype=torch.float32)
        plan.gradients(x, z, weight, dy, dx, dz, partial)
        if partial is not None:
            plan.add(partial, None, dweight)
    return dx, dz, dweight


def _to_foldable(x: Tensor) -> Tensor:
    """Return x as the kernels read it: columns contiguous, all axes before the last two foldable into one."""
    return x if x.stride(-1) == 1 and _is_foldable(x) else x.contiguous()


def _is_foldable(x: Tensor) -> bool:
    sizes, strides = x.shape, x.stride()
    return all(strides[i] == sizes[i + 1] * strides[i + 1] for i in range(x.dim() - 3))


def _to_contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.is_contiguous() else x.contiguous()


def _layout_key(x: Tensor | None) -> object:
    return None if x is None else (x.stride(), x.dtype)


def _dtype_key(x: Tensor | None) -> object:
    return None if x is None else x.dtype


def _strides(x: Tensor | None) -> tuple[int, int]:
    """Return the strides of outer rows and of the rows within them."""
    if x is None or x.dim() == 1:
        return 0, 0
    return (0 if x.dim() == 2 else x.stride(-3)), x.stride(-2)


def _launch_arguments(
    p: NormProblem, elements: int, *tensors: Tensor | None
) -> tuple[tuple[int, ...], dict[str, Any]]:
    x, D = p.x, p.x.shape[-1]
    strides = [s for t in tensors for s in _strides(t)]
    # a constant unit lets Triton load 16 bytes of a row at once
    unit = unit_of(*strides)
    BD = triton.next_power_of_2(D)
    scalars = (x.numel() // D, x.shape[-2] if x.dim() > 1 else 1, *(s // unit for s in strides))
    gate = "none" if p.activation is None else p.activation
    return scalars, {"GATE": gate, "D": D, "BR": max(1, elements // BD), "BD": BD, "UNIT": unit}


def _num_warps(p: NormProblem) -> int:
    return max(4, min(16, triton.next_power_of_2(p.x.shape[-1]) // 512))


def plan_launch(p: NormProblem, x: Tensor, z: Tensor | None, is_zero_centred: bool = False) -> Launch:
    scalars, constants = _launch_arguments(p, ELEMENTS, x, z)
    # blocks of rows are independent: registers decide how many an SM holds
    grid = triton.cdiv(scalars[0], constants["BR"])
    gpu = machine(x.device)
    constants |= {"ZERO_CENTRED": is_zero_centred, "PDL": supports_pdl(gpu)}
    # 8 elements a thread: one load of 16 bytes for x in bf16, and one for the weight
    num_warps = min(16, constants["BR"] * constants["BD"] // 256) if is_zero_centred else _num_warps(p)
    return Launch(_norm_kernel, grid, (*scalars, p.eps), constants, num_warps, options=pdl_options(gpu))


def _plan_bwd(p: NormProblem, x: Tensor, z: Tensor | None, dy: Tensor) -> _BackwardPlan:
    scalars, constants = _launch_arguments(p, ELEMENTS // 2, x, z, dy)
    num_rows, BR = scalars[0], constants["BR"]
    # four programs per SM, each of which stores one partial sum
    blocks = triton.cdiv(triton.cdiv(num_rows, BR), 4 * machine(x.device).num_sms)
    rows = max(1, blocks) * BR
    num_partials = triton.cdiv(num_rows, rows)
    gradients = Launch(_norm_bwd_kernel, num_partials, (*scalars, rows, p.eps), constants, _num_warps(p))
    return _BackwardPlan(gradients, sums.add(num_partials, 1, p.x.shape[-1]), num_partials)
