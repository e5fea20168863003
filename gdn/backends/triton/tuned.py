"""Tile sizes and warps, keyed by problem and machine, measured once. Nothing is tuned at run time."""

from dataclasses import dataclass

import torch
import triton

from gdn.backends.triton.launch import Machine
from gdn.problem import Problem


@dataclass(frozen=True)
class Tile:
    """Value columns and warps of a program."""

    BV: int
    num_warps: int


@dataclass(frozen=True)
class Pass:
    """A state pass: its strip, warps and depth of load pipelining, and the kernels around it."""

    BV: int
    num_warps: int
    stages: int


@dataclass(frozen=True)
class ForwardTiles(Pass):
    """Forward. `is_fused`: the state pass makes the outputs."""

    is_fused: bool
    form: str
    prepare_warps: int
    output: Tile


@dataclass(frozen=True)
class BackwardTiles(Pass):
    """Backward."""

    BK: int  # key columns of a program of the gradients
    pairs: Tile
    rows: Tile


def forward(p: Problem, save: bool, machine: Machine) -> ForwardTiles:
    """One walk where strips of 64 columns fill the machine once; else the outputs come apart.

    H200, 16/32 heads of 128 x 128, 8192 tokens, us: state by 16, 32, 64 columns 216, 163, 223; at 2/8 heads
    132, 159, 230. scan at 8 x 1024 tokens: 130; three stages 253; 128 columns, 8 warps 142. Strips of 16 are
    for machines that strips of 32 leave three quarters empty.
    """
    pairs, wide = p.N * p.HV, p.q.dtype == torch.float32
    form = "blocks"
    output = Tile(_strip(p, 64), 4)
    if not p.batch_invariant and pairs * triton.cdiv(p.V, 64) >= 2 * machine.num_sms:
        return ForwardTiles(_strip(p, 64), 4, 2, True, form, 4, output)
    is_short = pairs * triton.cdiv(p.V, 32) * 4 <= machine.num_sms
    stages = 1 if machine.kind == "hip" else 2 if wide or p.K > 128 else 4
    return ForwardTiles(
        _strip(p, 16 if is_short and not p.batch_invariant else 32), 4, stages, False, form, 4, output
    )


def backward(p: Problem, machine: Machine) -> BackwardTiles:
    """Strips of the state pass as in the forward; H200, us: 32 columns 223, 64 311, at 2/8 heads 16 182."""
    pairs, wide = p.N * p.HV, p.q.dtype == torch.float32
    # 64 KB of shared memory on hip: what is loaded ahead does not fit
    stages = 1 if machine.kind == "hip" else 2 if wide or p.K > 128 else 3
    most = 32
    if not p.batch_invariant:
        is_short = pairs * triton.cdiv(p.V, 32) * 4 <= machine.num_sms
        most = 16 if is_short else 64 if pairs * triton.cdiv(p.V, 64) >= 2 * machine.num_sms else 32
    BK = 64 if wide or p.K > 128 else 128
    # never fewer than 64 columns of 16 bits: Triton 3.6 gives wgmma a wrong address in shared memory for
    # narrower blocks of a state (compute-sanitizer: out-of-bounds read at K = 192, 256 with 16 or 32 columns)
    gradients = Tile(_strip(p, 64) if wide else 64, 4)
    return BackwardTiles(_strip(p, most), 4, stages, BK, gradients, gradients)


def _strip(p: Problem, most: int) -> int:
    """Columns of S per program: fewer where an element is wide or K is large; S is to stay in registers."""
    wide = 2 if p.q.dtype == torch.float32 else 1
    large = 2 if p.K > 128 else 1
    return max(16, min(most // (wide * large), triton.next_power_of_2(p.V)))
