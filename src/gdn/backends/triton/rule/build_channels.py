"""Build the launches that are of a decay per key channel alone: `prepare_channels`, and the gradients."""

import torch

from gdn.backends.triton.launch import Launch, TensorSpec, tensor_spec
from gdn.backends.triton.rule.choose import channel_block
from gdn.backends.triton.rule.describe import (
    Description,
    gate_strides,
    operand_dtype,
    shape_scalars,
    unit_strides,
)
from gdn.backends.triton.rule.prepare_channels import prepare_channels_kernel
from gdn.problem import RESET, Problem


def build_prepare_channels(p: Problem, d: Description) -> Launch:
    """Build the launch of `prepare_channels_kernel`, for a forward or a backward."""
    assert p.g is not None
    return Launch(
        prepare_channels_kernel,
        d.entries * p.HV,
        (
            *unit_strides(d.unit, p.q, p.k, p.g), *gate_strides(p.beta), *shape_scalars(p), p.scale,
            bound_scalar(p),
        ),
        {
            "K": p.K, "V": p.V, **d.sizes, "BK": min(d.BK, channel_block(p)), **d.activation,
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
