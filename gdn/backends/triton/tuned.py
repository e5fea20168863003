"""Tile sizes and warps: plain tables keyed by problem and machine, measured once. Nothing is tuned at run time."""

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
    has_wy: bool
    form: str
    prepare_warps: int
    output: Tile


@dataclass(frozen=True)
class BackwardTiles(Pass):
    """Backward."""

    keys: Tile
    queries: Tile


def forward(p: Problem, save: bool, machine: Machine) -> ForwardTiles:
    """Fused where the strips of all sequences and heads fill the machine; else the outputs come apart."""
    BV = _strip(p, 64)
    programs = p.N * p.HV * triton.cdiv(p.V, BV)
    is_fused = not p.batch_invariant and programs >= 2 * machine.num_sms
    return ForwardTiles(BV, 4, _stages(p), is_fused, not is_fused, "whole", 4, Tile(_strip(p, 64), 4))


def backward(p: Problem, machine: Machine) -> BackwardTiles:
    """One strip for both passes; all gradients of a chunk need 8 warps to hold dq and dk."""
    return BackwardTiles(_strip(p, 64), 4, _stages(p), Tile(_strip(p, 32), 4), Tile(_strip(p, 64), 4))


def _strip(p: Problem, most: int) -> int:
    """Columns of S per program: fewer where an element is wide or K is large, so that S stays in registers."""
    wide = 2 if p.q.dtype == torch.float32 else 1
    large = 2 if p.K > 128 else 1
    return max(16, min(most // (wide * large), triton.next_power_of_2(p.V)))


def _stages(p: Problem) -> int:
    return 1 if p.q.dtype == torch.float32 or p.K > 128 else 2
