"""Build the launches of a backward. A process that runs forwards alone does not import this file."""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from gdn.backends.triton import sums
from gdn.backends.triton.launch import Launch, TensorSpec, machine, tensor_spec
from gdn.backends.triton.rule.build import strip_constants
from gdn.backends.triton.rule.build_channels import build_channel_backward, scale_rest
from gdn.backends.triton.rule.choose import BackwardTiles, equal_layouts, split_operands
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
from gdn.backends.triton.rule.launches import Backward
from gdn.backends.triton.rule.launches_channels import ChannelBackward
from gdn.backends.triton.rule.pairs import ROWS, pairs_kernel
from gdn.backends.triton.rule.state_bwd import state_bwd_kernel
from gdn.problem import CHUNK, RESET, Problem


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
            {**shared, "BK": BK, **strip_constants(p, tiles.pairs_bwd), "SPLIT": is_split},
            tiles.pairs_bwd.num_warps,
        )
        rows_bwd = Launch(
            rows_bwd_kernel,
            entries * p.H * blocks,
            (*unit_strides(d.unit, p.q, p.k, do), *scalars, width // 16, begin),
            {**shared, "BK": BK, **strip_constants(p, tiles.rows_bwd), "SPLIT": is_split},
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
        (*q_strides, *k_strides, *unit_strides(d.unit, do), *state_scalars(p), d.entries, scale_rest(p)),
        {
            "K": p.K, "V": p.V, **d.sizes, "PRECISION": d.precision, "V_FIRST": p.state_v_first,
            **strip_constants(p, tiles), "SPLIT": split_operands(p, machine(p.device)),
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


def _EF_width(p: Problem, blocks: int) -> tuple[int, bool]:
    """Return how many columns E and F take per token and key head, and whether dq's memory can hold them.

    It can if one program computes whole rows of dq, and K is a multiple of 16, the unit of row strides.
    """
    needed = p.HV // p.H * CHUNK
    # E and F of a row fit into a row of dq: no memory of their own in HBM
    is_in_dq = blocks == 1 and needed <= p.K and p.K % 16 == 0
    return (p.K if is_in_dq else needed), is_in_dq
