"""Tile sizes and warps, keyed by problem and machine, measured once. Nothing is tuned at run time."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import triton

from gdn.backends.triton.launch import Machine
from gdn.problem import Problem

# us that a walk takes for a chunk by the columns of its strips: H200, 128 keys, bf16, in one wave
STATE = {16: 1.1, 32: 1.4}
STATE_BWD = {16: 2.3, 32: 2.9, 64: 5.2}


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
    output: Tile


@dataclass(frozen=True)
class BackwardTiles(Pass):
    """Backward."""

    BK: int  # key columns of a program of the gradients
    pairs: Pass
    rows: Pass
    part: int  # chunks that go through both before others do: what pairs leave for rows takes less room


def refines(p: Problem) -> bool:
    """Whether 16-bit inputs are multiplied with states in fp32: see `lib.operand_of`."""
    return p.K <= 64 and p.q.dtype != torch.float32


def is_exact(p: Problem) -> bool:
    """Whether 16-bit inputs with few keys are multiplied as fp32 is, and what is made of them kept in fp32.

    The gradients of A_log and dt_bias are sums of dg over all tokens, which may cancel to a twentieth: 6.6e-3
    of 6e-3 with 32 keys, from dr and P in bf16 and tf32's truncation alike. No model has so few.
    """
    return p.K <= 32 and refines(p)


def is_wide(p: Problem) -> bool:
    """Whether products through the state have operands of fp32."""
    return refines(p) or p.q.dtype == torch.float32


def is_fine(p: Problem, machine: Machine) -> bool:
    """Whether 16-bit operands that errors come from are taken in two parts, and <S_in, dS> of fp32.

    Only where operands wait in shared memory: on sm_80 and sm_120 they would be held in registers, of which
    2 to 26 KB a thread are spilled then.
    """
    has_room = machine.kind == "cuda" and machine.capability // 10 in (9, 10) and p.K <= 128
    return has_room and not is_wide(p)


def forward(p: Problem, machine: Machine) -> ForwardTiles:
    """What a forward is to take."""
    return _forward(p, machine, p.N * p.HV)


def forwards(p: Problem, machine: Machine) -> list[ForwardTiles]:
    """All that `forward` chooses for problems which differ from p in sequences, tokens and heads alone."""
    return list(dict.fromkeys(_forward(p, machine, pairs) for pairs in _fills(machine)))


def fused(p: Problem, machine: Machine) -> ForwardTiles:
    """A forward of one walk that makes the outputs."""
    return ForwardTiles(_strip(p, 64), *_walk(p, machine, 2), True, Tile(_strip(p, 64), 4))


def backward(p: Problem, machine: Machine) -> BackwardTiles:
    """What a backward is to take; in what parts is no matter of its binaries."""
    return replace(_backward(p, machine, p.N * p.HV), part=_part(p, machine))


def backwards(p: Problem, machine: Machine) -> list[BackwardTiles]:
    """As `forwards`."""
    return list(dict.fromkeys(_backward(p, machine, pairs) for pairs in _fills(machine)))


def _fills(machine: Machine) -> range:
    """Numbers of sequences times value heads up to one that fills the machine whatever V is."""
    return range(1, 2 * machine.num_sms + 1)


def _forward(p: Problem, machine: Machine, pairs: int) -> ForwardTiles:
    """One walk where strips of 64 columns are more than multiprocessors; else the outputs come apart.

    On an H200 a chunk takes 4.9 us in scan, two programs a multiprocessor, and 2.9 and 1.5 in two waves of
    state and in output. scan at 8 x 1024 tokens, 16/32 heads, us: 130; three stages 253; 128 columns, 8 warps
    142.
    """
    output = Tile(_strip(p, 64), 4)
    if not p.batch_invariant and pairs * triton.cdiv(p.V, 64) > machine.num_sms:
        return fused(p, machine)
    warps, stages = _walk(p, machine, 4)
    return ForwardTiles(_strip(p, _columns(p, machine, pairs, STATE)), warps, stages, False, output)


def _backward(p: Problem, machine: Machine, pairs: int) -> BackwardTiles:
    """64 columns are not for sm_80, where ptxas gives up and spills 20 KB, nor sm_100 (1.5 KB) and sm_120."""
    has_room = machine.kind == "hip" or machine.capability == 90
    turns = {most: turn for most, turn in STATE_BWD.items() if most < 64 or has_room}
    most = _columns(p, machine, pairs, turns)
    # three times what strips of 64 columns load leaves no room for operands in two parts
    warps, stages = _walk(p, machine, 2 if most == 64 else 3)
    # in one part
    return BackwardTiles(_strip(p, most), warps, stages, *_gradients(p, machine), 1 << 30)


def _columns(p: Problem, machine: Machine, pairs: int, turns: Mapping[int, float]) -> int:
    """Columns of the strips in which a walk ends first, wave after wave, a program a multiprocessor."""
    if p.batch_invariant:
        return 32
    strips = {most: triton.cdiv(p.V, _strip(p, most)) for most in turns}
    return min(turns, key=lambda most: triton.cdiv(pairs * strips[most], machine.num_sms) * turns[most])


def _part(p: Problem, machine: Machine) -> int:
    """Chunks of a part: a quarter of all, such that two programs a multiprocessor come out even.

    On an H200 at 16/32 heads and 8192 tokens four parts of two waves save a tenth of a step's room; eight,
    of one wave, 2 % more and cost 30 us of 1,420; seven, of 1.2 waves, 18 %.
    """
    at_once = 2 * machine.num_sms
    waves = triton.cdiv(p.num_chunks * p.H, 4 * at_once)
    return max(1, waves * at_once // p.H)


def _gradients(p: Problem, machine: Machine) -> tuple[int, Pass, Pass]:
    """Key columns of a program, and its strips of value columns for pairs and for rows.

    H200, 16/32 heads of 128 x 128, 8192 tokens, us of pairs and rows: 32 columns in 1, 2, 3 or 4 stages
    433 + 404, 341 + 295, 301 + 269, 296 + 266; 64 in 1 or 2 431 + 380, 384 + 340; 16 in 3 362 + 318; all
    before the products were put in an order in which none is in flight at a turn's end.
    Blocks of 64 keys by 32 or 16 columns are for other machines than Hopper: there Triton 3.6 gives wgmma a
    wrong address in shared memory for them, in 16 bits (compute-sanitizer: out-of-bounds read). Elsewhere
    more columns, or four warps, want more registers than there are: on sm_80 ptxas then gives up and makes
    do with 32, spilling 44 KB a thread. sm_100 has tensor memory for no more than these, either.
    """
    wide = is_wide(p)
    if machine.kind == "hip":
        strips = Pass(_strip(p, 64) if wide else 64, 4, 1)
        return (32 if wide else 64 if p.K > 128 else 128), strips, strips
    if machine.capability == 90 and (wide or p.K > 128):
        strips = Pass(_strip(p, 64) if wide else 64, 4, 1)
        return 64, strips, strips
    if machine.capability == 90:
        return 128, Pass(32, 4, 3), Pass(32, 4, 3)
    strips = Pass(16, 8, 1) if wide else Pass(32, 8, 1)
    return (32 if wide else 64), strips, strips


def _walk(p: Problem, machine: Machine, stages: int) -> tuple[int, int]:
    """Warps of a state pass and how many chunks it loads ahead, `stages` if there is room."""
    wide = is_wide(p)
    if machine.kind == "hip":
        return 4, 1
    if wide and machine.capability != 90:
        # 16 warps keep to mma, as 528 columns of tensor memory would be wanted
        return (16 if p.K > 128 and machine.capability // 10 == 10 else 8), 1
    if machine.shared < 128 * 1024:
        return 4, 1
    return 4, 2 if wide or p.K > 128 else stages


def _strip(p: Problem, most: int) -> int:
    """Columns of S per program: fewer where an element is wide or K is large; S is to stay in registers."""
    wide = 2 if is_wide(p) else 1
    large = 2 if p.K > 128 else 1
    return max(16, min(most // (wide * large), triton.next_power_of_2(p.V)))
