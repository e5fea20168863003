"""Build the launches of a forward from its description and tiles; those of a backward are in `build_bwd`."""

from importlib import import_module
from typing import Any

import torch
import triton

from gdn.backends.triton.launch import Launch, TensorSpec, machine, tensor_spec
from gdn.backends.triton.rule.choose import (
    ForwardTiles,
    StripTile,
    equal_layouts,
    fp32_state_operands,
    split_operands,
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
from gdn.backends.triton.rule.launches import Forward
from gdn.backends.triton.rule.launches_channels import ChannelForward
from gdn.backends.triton.rule.output import output_kernel
from gdn.backends.triton.rule.pairs import ROWS
from gdn.backends.triton.rule.pool import NO_POOL, StatePool
from gdn.backends.triton.rule.prepare import prepare_kernel
from gdn.backends.triton.rule.scan import scan_kernel
from gdn.backends.triton.rule.state import state_kernel
from gdn.problem import CHUNK, RESET, Problem


def build_forward(
    p: Problem, kept: torch.dtype | None, d: Description, tiles: ForwardTiles, pool: StatePool | None = None
) -> Forward:
    """Build the launches of a forward. `kept`: the dtype of S_in, or None where S_in is not kept."""
    if p.is_per_channel:
        tiles = equal_layouts(p, machine(p.device), tiles, d.unit)
    # of the state pass: with those of the pool
    scalars = (*state_scalars(p), d.entries, *(NO_POOL[1] if pool is None else pool.scalars))
    shared = {"K": p.K, "V": p.V, **d.sizes, "PRECISION": d.precision, "CHANNELS": p.is_per_channel}
    prepare = _channels().build_prepare_channels(p, d, p.scale) if p.is_per_channel else _build_prepare(p, d)
    plan = ChannelForward if p.is_per_channel else Forward
    q_strides, k_strides = state_strides(p, d.unit)
    # one program per sequence, head and strip: S stays in its registers for all chunks
    programs = p.N * p.HV * triton.cdiv(p.V, tiles.BV)
    is_split = split_operands(p, machine(p.device))
    constants = {**shared, "V_FIRST": p.state_v_first, **strip_constants(p, tiles), "SPLIT": is_split}
    if tiles.is_fused:
        strides = (*q_strides, *k_strides, *unit_strides(d.unit, p.v))
        scan = Launch(scan_kernel, programs, (*strides, *scalars), constants, tiles.num_warps, seconds=1.3)
        return plan(_forward_specs(p, kept, True, d, pool), d.launch, prepare, scan, None)
    strides = (*k_strides, *unit_strides(d.unit, p.v))
    # few sequences and heads: the state pass is the critical path, and a second kernel, which fills all SMs,
    # computes the outputs
    state = Launch(state_kernel, programs, (*strides, *scalars), constants, tiles.num_warps)
    output = Launch(
        output_kernel,
        d.entries * p.HV * triton.cdiv(p.V, tiles.output.BV),
        (*q_strides, *state_scalars(p)),
        {**shared, "BK": d.block, "BV": tiles.output.BV, "FP32_STATE": fp32_state_operands(p)},
        tiles.output.num_warps,
    )
    specs = _forward_specs(p, kept or operand_dtype(p), False, d, pool)
    return plan(specs, d.launch, prepare, state, output)


def _channels() -> Any:
    """Return the launches of a decay per key channel, imported where there is one: half of all kernels."""
    return import_module("gdn.backends.triton.rule.build_channels")


def _build_prepare(p: Problem, d: Description) -> Launch:
    # 4 warps: one per 16 x 16 diagonal block of A, which `tril` inverts in registers
    return Launch(
        prepare_kernel,
        d.entries * p.HV,
        (*unit_strides(d.unit, p.q, p.k), *gate_strides(p.g, p.beta), *shape_scalars(p), p.scale),
        {
            "K": p.K, "V": p.V, **d.sizes, "PRECISION": d.precision, "BK": d.block, **d.activation,
            "RESET": RESET,
        },
        4,
        seconds=2.0,
    )  # fmt: skip


def build_transfer(p: Problem, d: Description, tiles: StripTile) -> Launch:
    """Build the state pass that computes final states from initial ones, both K first, and nothing else."""
    if p.is_per_channel:
        tiles = equal_layouts(p, machine(p.device), tiles, d.unit)
    _, k_strides = state_strides(p, d.unit)
    return Launch(
        state_kernel,
        p.N * p.HV * triton.cdiv(p.V, tiles.BV),
        (*k_strides, *unit_strides(d.unit, p.v), *state_scalars(p), d.entries, *NO_POOL[1]),
        {
            "K": p.K, "V": p.V, **d.sizes, "PRECISION": d.precision, "V_FIRST": False,
            **strip_constants(p, tiles), "SPLIT": split_operands(p, machine(p.device)),
            "CHANNELS": p.is_per_channel,
        },
        tiles.num_warps,
    )  # fmt: skip


def _forward_specs(
    p: Problem, kept: torch.dtype | None, is_fused: bool, d: Description, pool: StatePool | None
) -> tuple[TensorSpec | None, ...]:
    """Return the buffer specs of a forward, in the order of `Forward.specs`; None: the caller has them."""
    G, A_inv, _, _, q_rstd, k_rstd, _ = saves(p)
    # tensors that only later kernels read are in the input's dtype, to save HBM traffic
    narrow, tiles = intermediate_dtype(p), (p.num_chunks, p.HV)
    shapes = (
        G,
        A_inv,
        ((*tiles, CHUNK, CHUNK), narrow),
        ((*tiles, ROWS.value, CHUNK), torch.float32),
        q_rstd,
        k_rstd,
        # with `recompute` only what `output_kernel` reads
        None if kept is None or (is_fused and p.recompute) else ((*tiles, p.K, p.V), kept),
        None if is_fused else ((*tiles, CHUNK, p.V), narrow),
        (p.state_shape, torch.float32) if p.output_final_state and pool is None else None,
        (p.v.shape, p.v.dtype) if pool is None or pool.out is None else None,
    )
    rows = _channels().row_specs(p) if p.is_per_channel else ()
    return (*(None if x is None else tensor_spec(*x) for x in shapes), d.spec, *NO_POOL[0], *rows)


def strip_constants(p: Problem, tile: StripTile) -> dict[str, Any]:
    """Return the constants of a kernel that takes the value columns in strips."""
    return {"BV": tile.BV, "STAGES": tile.stages, "FP32_STATE": fp32_state_operands(p)}
