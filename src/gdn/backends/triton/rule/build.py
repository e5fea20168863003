"""Build the launches of a forward or backward from a description and the tiles that were tiles."""

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from gdn.backends.triton import sums
from gdn.backends.triton.launch import Launch, TensorSpec, machine, tensor_spec
from gdn.backends.triton.rule.build_channels import (
    build_channel_backward,
    build_prepare_channels,
    row_specs,
)
from gdn.backends.triton.rule.choose import (
    BackwardTiles,
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
from gdn.backends.triton.rule.gates_bwd import gates_bwd_kernel
from gdn.backends.triton.rule.gradients import pairs_bwd_kernel, rows_bwd_kernel
from gdn.backends.triton.rule.launches import Backward, Forward
from gdn.backends.triton.rule.launches_channels import ChannelBackward, ChannelForward
from gdn.backends.triton.rule.output import output_kernel
from gdn.backends.triton.rule.pairs import ROWS, pairs_kernel
from gdn.backends.triton.rule.pool import NO_POOL, StatePool
from gdn.backends.triton.rule.prepare import prepare_kernel
from gdn.backends.triton.rule.scan import scan_kernel
from gdn.backends.triton.rule.state import state_kernel
from gdn.backends.triton.rule.state_bwd import state_bwd_kernel
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
    prepare = build_prepare_channels(p, d) if p.is_per_channel else _build_prepare(p, d)
    plan = ChannelForward if p.is_per_channel else Forward
    q_strides, k_strides = state_strides(p, d.unit)
    # one program per sequence, head and strip: S stays in its registers for all chunks
    programs = p.N * p.HV * triton.cdiv(p.V, tiles.BV)
    is_split = split_operands(p, machine(p.device))
    constants = {**shared, "V_FIRST": p.state_v_first, **_strip_constants(p, tiles), "SPLIT": is_split}
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
            **_strip_constants(p, tiles), "SPLIT": split_operands(p, machine(p.device)),
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
    rows = row_specs(p) if p.is_per_channel else ()
    return (*(None if x is None else tensor_spec(*x) for x in shapes), d.spec, *NO_POOL[0], *rows)


def build_backward(
    p: Problem, do: Tensor, d: Description, tiles: BackwardTiles
) -> Backward | ChannelBackward:
    """Build the launches of a backward; only the layout of do counts, as its address is an argument."""
    tiles = equal_layouts(p, machine(p.device), tiles, d.unit)
    scalars = shape_scalars(p)
    shared = {"K": p.K, "V": p.V, **d.sizes, "PRECISION": d.precision}
    state = _build_state_bwd(p, do, d, tiles)
    if p.is_per_channel:
        return build_channel_backward(p, do, d, tiles, state)
    # P and factors again, instead of keeping them in HBM from forward to backward
    pairs = Launch(
        pairs_kernel,
        d.entries * p.HV,
        (*unit_strides(d.unit, p.q, p.k), *gate_strides(p.beta), *scalars, p.scale),
        {"K": p.K, **d.sizes, "BK": d.block, **d.activation, "PRECISION": d.precision},
        4,
    )
    is_split = split_operands(p, machine(p.device))
    # blocks of K per program bound the registers of dq and dk
    BK = min(d.BK, tiles.BK)
    blocks = triton.cdiv(p.K, BK)
    width, is_in_dq = _EF_width(p, blocks)
    gradients = []
    # group by group, so that scaled v_new takes memory for one group of chunks only
    for begin in range(0, d.entries, tiles.group):
        entries = min(tiles.group, d.entries - begin)
        pairs_bwd = Launch(
            pairs_bwd_kernel,
            entries * p.HV,
            (*unit_strides(d.unit, p.q, p.k, p.v, do), *scalars, p.scale, width // 16, begin),
            {**shared, "BK": BK, **_strip_constants(p, tiles.pairs_bwd), "SPLIT": is_split},
            tiles.pairs_bwd.num_warps,
        )
        rows_bwd = Launch(
            rows_bwd_kernel,
            entries * p.H * blocks,
            (*unit_strides(d.unit, p.q, p.k, do), *scalars, width // 16, begin),
            {**shared, "BK": BK, **_strip_constants(p, tiles.rows_bwd), "SPLIT": is_split},
            tiles.rows_bwd.num_warps,
        )
        gradients.append((pairs_bwd, rows_bwd))
    num_terms = triton.cdiv(p.V, tiles.BV) if is_split else 1  # of dg through the state, per chunk
    # 1 warp: vectors of 64 tokens, no MMA
    gates = Launch(
        gates_bwd_kernel,
        d.entries * p.HV,
        (*gate_strides(p.g, p.beta), p.T, p.HV, scalars[-1], num_terms),
        {"C": CHUNK, **d.activation, "RESET": RESET},
        1,
    )
    add = None
    if p.A_log is not None:
        num_sums = 1 if p.dt_bias is None else 2
        # partial sums of all chunks, added in a fixed order
        add = sums.add(d.entries, num_sums, p.HV, (0, 1), is_row_first=True)
    late = _late_specs(p, min(tiles.group, d.entries), None if is_in_dq else width)
    return Backward(backward_specs(p, d), late, d.launch, pairs, state, tuple(gradients), gates, add)


def _build_state_bwd(p: Problem, do: Tensor, d: Description, tiles: BackwardTiles) -> Launch:
    q_strides, k_strides = state_strides(p, d.unit)
    return Launch(
        state_bwd_kernel,
        p.N * p.HV * triton.cdiv(p.V, tiles.BV),
        (*q_strides, *k_strides, *unit_strides(d.unit, do), *state_scalars(p), d.entries),
        {
            "K": p.K, "V": p.V, **d.sizes, "PRECISION": d.precision, "V_FIRST": p.state_v_first,
            **_strip_constants(p, tiles), "SPLIT": split_operands(p, machine(p.device)),
            "CHANNELS": p.is_per_channel,
        },
        tiles.num_warps,
    )  # fmt: skip


def backward_specs(p: Problem, d: Description) -> tuple[TensorSpec | None, ...]:
    """Return the buffer specs of a backward, in the order of `Backward.specs`.

    P and its low half come last, because `chunk_backward` frees them first.
    """
    tiles = (p.num_chunks, p.HV)
    # fp64 sums per chunk: their total may cancel
    partial = [x for x in (p.A_log, p.dt_bias) if x is not None]
    S_in, P = saves(replace(p, recompute=False))[2], tensor_spec((*tiles, CHUNK, CHUNK), operand_dtype(p))
    assert S_in is not None
    return (
        tensor_spec(p.v.shape, intermediate_dtype(p)),
        *(None if x is None else tensor_spec(x.shape, x.dtype) for x in (p.g, p.beta, p.initial_state)),
        tensor_spec(*S_in),
        *(None if x is None else tensor_spec(x.shape, x.dtype) for x in (p.A_log, p.dt_bias)),
        tensor_spec((len(partial), d.entries, p.HV), torch.float64) if partial else None,
        tensor_spec((*tiles, ROWS.value, CHUNK), torch.float32),
        d.spec,
        P,
        P if split_operands(p, machine(p.device)) else None,
    )


def _late_specs(p: Problem, count: int, width: int | None) -> tuple[TensorSpec | None, ...]:
    """Return the specs of `Backward.late`. `count`: chunks of a group; `width`: columns of E and F per token.

    `width` is None where E and F are stored in dq's memory.
    """
    EF = None if width is None else tensor_spec((p.B, p.T, p.H, width), p.q.dtype)
    # one group of chunks: scaled v_new, and its low 8 bits for bf16
    shape = (count, p.HV, CHUNK, p.V)
    has_rest = p.q.dtype == torch.bfloat16 and split_operands(p, machine(p.device))
    return (
        tensor_spec(p.q.shape, p.q.dtype),
        tensor_spec(p.k.shape, p.k.dtype),
        tensor_spec(shape, operand_dtype(p)),
        tensor_spec(shape, torch.int8) if has_rest else None,
        EF,
    )


def _strip_constants(p: Problem, tile: StripTile) -> dict[str, Any]:
    """Return the constants of a kernel that takes the value columns in strips."""
    return {"BV": tile.BV, "STAGES": tile.stages, "FP32_STATE": fp32_state_operands(p)}


def _EF_width(p: Problem, blocks: int) -> tuple[int, bool]:
    """Return how many columns E and F take per token and key head, and whether dq's memory can hold them.

    It can if one program computes whole rows of dq, and K is a multiple of 16, the unit of row strides.
    """
    needed = p.HV // p.H * CHUNK
    # E and F of a row fit into a row of dq: no memory of their own in HBM
    is_in_dq = blocks == 1 and needed <= p.K and p.K % 16 == 0
    return (p.K if is_in_dq else needed), is_in_dq
