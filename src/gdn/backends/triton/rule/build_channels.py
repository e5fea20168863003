"""Build the launches that are of a decay per key channel alone: `prepare_channels`, and the gradients."""

import math
from dataclasses import replace

import torch
import triton
from torch import Tensor

from gdn.backends.triton import sums
from gdn.backends.triton.launch import Launch, TensorSpec, machine, tensor_spec
from gdn.backends.triton.rule.choose import (
    BackwardTiles,
    channel_block,
    channel_strip,
    fp32_state_operands,
    keeps_low_bits,
    mma_strip,
    split_operands,
    values_bwd_columns,
)
from gdn.backends.triton.rule.describe import (
    Description,
    gate_strides,
    intermediate_dtype,
    operand_dtype,
    saves,
    shape_scalars,
    state_scalars,
    state_strides,
    unit_strides,
)
from gdn.backends.triton.rule.finish_bwd import finish_bwd_kernel
from gdn.backends.triton.rule.launches_channels import ChannelBackward
from gdn.backends.triton.rule.pairs import ROWS
from gdn.backends.triton.rule.prepare_channels import prepare_channels_kernel
from gdn.backends.triton.rule.rows_bwd import rows_bwd_channels_kernel
from gdn.backends.triton.rule.rows_bwd_mma import rows_bwd_mma_kernel
from gdn.backends.triton.rule.values_bwd import values_bwd_kernel
from gdn.problem import CHUNK, RESET, Problem


def scale_rest(p: Problem) -> float:
    """Return what the scale is beyond a power of two, which q_in of a 16-bit backward lacks; in fp32 1."""
    return (math.frexp(p.scale)[0] or 1.0) if p.q.dtype.itemsize == 2 else 1.0


def build_prepare_channels(p: Problem, d: Description, scale: float) -> Launch:
    """Build the launch of `prepare_channels_kernel`, for a forward or a backward; scale: of q_in and P."""
    assert p.g is not None
    return Launch(
        prepare_channels_kernel,
        d.entries * p.HV,
        (
            *unit_strides(d.unit, p.q, p.k, p.g), *gate_strides(p.beta), *shape_scalars(p), scale,
            bound_scalar(p),
        ),
        {
            "K": p.K, "V": p.V, **d.sizes, "BK": channel_block(p, machine(p.device)), **d.activation,
            "NORM": p.use_qk_l2norm_in_kernel, **gate_constants(p), "PRECISION": d.precision, "RESET": RESET,
        },
        4,
        seconds=3.0,
    )  # fmt: skip


def gate_constants(p: Problem) -> dict[str, bool]:
    """Return the constants of the gate: RAW logits, and their form."""
    return {"RAW": p.use_gate_in_kernel, "BOUNDED": p.lower_bound is not None}


def bound_scalar(p: Problem) -> float:
    """Return the lower bound of the gate as a scalar of a kernel."""
    return 0.0 if p.lower_bound is None else float(p.lower_bound)


def row_specs(p: Problem) -> tuple[TensorSpec, TensorSpec]:
    """Return the specs of q_in and of k_in beside k_out, [B, T, HV, K] and [B, T, HV, 2, K]."""
    dtype: torch.dtype = operand_dtype(p)
    return tensor_spec((p.B, p.T, p.HV, p.K), dtype), tensor_spec((p.B, p.T, p.HV, 2, p.K), dtype)


def build_channel_backward(
    p: Problem, do: Tensor, d: Description, tiles: BackwardTiles, state: Launch
) -> ChannelBackward:
    """Build the launches of a backward around those of the state pass."""
    assert p.g is not None
    shared = {"K": p.K, "V": p.V, **d.sizes, "PRECISION": d.precision}
    strip = channel_strip(p, d.BK)
    wide = mma_strip(p, machine(p.device))
    # strips of `rows_bwd_channels_kernel` in one of `rows_bwd_mma_kernel`
    subs = 1 if wide is None else wide.BK // strip.BK
    wide_strips = triton.cdiv(p.K, strip.BK * subs)
    strips = wide_strips * subs
    _, k_strides = state_strides(p, d.unit)
    gradients = []
    for begin in range(0, d.entries, tiles.group):
        entries = min(tiles.group, d.entries - begin)
        values_bwd = Launch(
            values_bwd_kernel,
            entries * p.HV,
            (*k_strides, *unit_strides(d.unit, p.v, do), *state_scalars(p), p.scale, begin),
            {
                **shared, "BK": min(d.BK, tiles.BK), "BV": values_bwd_columns(p, machine(p.device), tiles),
                "STAGES": tiles.pairs_bwd.stages, "FP32_STATE": fp32_state_operands(p),
                "SPLIT": split_operands(p, machine(p.device)),
            },
            tiles.pairs_bwd.num_warps,
        )  # fmt: skip
        scalars = (
            *unit_strides(d.unit, p.q, p.k, p.g, do), *shape_scalars(p), p.scale, bound_scalar(p), begin,
        )  # fmt: skip
        constants = {**shared, **gate_constants(p), "RESET": RESET, "SUBS": subs}
        rows_bwd_mma = None if wide is None else Launch(
            rows_bwd_mma_kernel,
            entries * p.HV * wide_strips,
            scalars,
            {**constants, "BK": wide.BK, "BV": wide.BV},
            4,
        )  # fmt: skip
        # 4 warps: one per block of 16 tokens
        rows_bwd = Launch(
            rows_bwd_channels_kernel,
            entries * p.HV * strips,
            scalars,
            {**constants, "BK": strip.BK, "BV": strip.BV, "FP32_STATE": fp32_state_operands(p)},
            4,
        )
        gradients.append((values_bwd, rows_bwd_mma, rows_bwd))
    finish = Launch(
        finish_bwd_kernel,
        d.entries * p.HV,
        (*unit_strides(d.unit, p.q, p.k), *gate_strides(p.beta), *shape_scalars(p), strips),
        {"K": p.K, **d.sizes, "BK": min(d.BK, 64), **d.activation},
        4,
    )
    return ChannelBackward(
        _backward_specs(p, d, strips),
        _late_specs(p, min(tiles.group, d.entries), None if wide is None else wide_strips),
        d.launch,
        build_prepare_channels(p, d, p.scale / scale_rest(p)),
        state,
        tuple(gradients),
        finish,
        None if p.A_log is None else sums.add(d.entries * strips, 1, p.HV),
        None if p.dt_bias is None else sums.add(d.entries, 1, p.HV * p.K),
    )


def _backward_specs(p: Problem, d: Description, strips: int) -> tuple[TensorSpec | None, ...]:
    """Return the buffer specs of a backward, in the order of `ChannelBackward.specs`."""
    tiles = (p.num_chunks, p.HV)
    S_in, P = saves(replace(p, recompute=False))[2], tensor_spec((*tiles, CHUNK, CHUNK), operand_dtype(p))
    assert S_in is not None
    q_in, k_rows = row_specs(p)
    is_split = split_operands(p, machine(p.device))
    return (
        tensor_spec(p.v.shape, intermediate_dtype(p)),
        *(None if x is None else tensor_spec(x.shape, x.dtype) for x in (p.g, p.beta, p.initial_state)),
        tensor_spec(*S_in),
        *(None if x is None else tensor_spec(x.shape, x.dtype) for x in (p.A_log, p.dt_bias)),
        # fp64 sums per chunk: their total may cancel
        None if p.A_log is None else tensor_spec((d.entries, strips, p.HV), torch.float64),
        None if p.dt_bias is None else tensor_spec((d.entries, p.HV, p.K), torch.float64),
        tensor_spec((*tiles, strips, CHUNK), torch.float32),
        tensor_spec((*tiles, ROWS.value, CHUNK), torch.float32),
        d.spec,
        tensor_spec(p.v.shape, torch.int8) if keeps_low_bits(p, machine(p.device)) else None,
        k_rows,
        q_in,
        P,
        P if is_split else None,
        q_in if is_split and p.q.dtype == torch.bfloat16 else None,
    )


def _late_specs(p: Problem, count: int, wide_strips: int | None) -> tuple[TensorSpec | None, ...]:
    """Return the specs of `ChannelBackward.late`.

    count: chunks of a group; wide_strips: strips of `rows_bwd_mma_kernel`, or None without it.
    """
    # gradients of rows in fp32, where `finish_bwd` reads them
    is_final = p.HV == p.H and not p.use_qk_l2norm_in_kernel
    rows = None if is_final else tensor_spec((p.B, p.T, p.HV, p.K), torch.float32)
    return (
        tensor_spec(p.q.shape, p.q.dtype),
        tensor_spec(p.k.shape, p.k.dtype),
        rows,
        rows,
        tensor_spec((count, p.HV, CHUNK, CHUNK), torch.float32),
        tensor_spec((count, p.HV, CHUNK, p.V), operand_dtype(p)),
        None if wide_strips is None else tensor_spec((count, p.HV, wide_strips), torch.int32),
    )
