"""Choose tile sizes and warps by problem and GPU, from past measurements. Nothing is tuned at run time."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import triton

from gdn.backends.triton.launch import Machine
from gdn.problem import Problem

# what Triton's host functions wrap: the wrapper of a constexpr function takes 10 us, and here run hundreds
cdiv, next_power_of_2 = triton.cdiv.fn, triton.next_power_of_2.fn

# us that a state scan takes per chunk, by the columns of its strips: H200, 128 keys, bf16, in one wave
STATE_US = {16: 1.1, 32: 1.4}
STATE_BWD_US = {16: 2.3, 32: 2.9, 64: 5.2}


@dataclass(frozen=True)
class OutputTile:
    """Hold the value columns and warps of a program."""

    BV: int
    num_warps: int


@dataclass(frozen=True)
class StripTile:
    """Hold a state pass's strip width, warps and depth of the load pipeline (shared memory)."""

    BV: int
    num_warps: int
    stages: int


TileT = TypeVar("TileT", bound=StripTile)


@dataclass(frozen=True)
class ForwardTiles(StripTile):
    """Hold the tiles of a forward. `is_fused`: the state pass computes the outputs."""

    is_fused: bool
    output: OutputTile


@dataclass(frozen=True)
class BackwardTiles(StripTile):
    """Hold the tiles of a backward."""

    BK: int  # key columns of a program of the gradient kernels
    pairs_bwd: StripTile
    rows_bwd: StripTile
    group: (
        int  # chunks of a group that runs through both gradient kernels before the next: bounds peak memory
    )


def fp32_state_operands(p: Problem) -> bool:
    """Return True if 16-bit inputs are multiplied with states in fp32: see `lib.operand_dtype`."""
    return p.K <= 64 and p.q.dtype != torch.float32


def fp32_mma(p: Problem) -> bool:
    """Return True if 16-bit inputs with few keys use fp32 MMAs, and their results stay in fp32.

    The gradients of A_log and dt_bias are sums of dg over all tokens, which may cancel to a twentieth: 6.6e-3
    where 6e-3 is allowed with 32 keys, both from dr and P in bf16 and from tf32's truncation. No model has so
    few keys.
    """
    return p.K <= 32 and fp32_state_operands(p)


def has_fp32_operands(p: Problem) -> bool:
    """Return True if MMAs that read the state have fp32 operands."""
    return fp32_state_operands(p) or p.q.dtype == torch.float32


def has_large_rows(p: Problem) -> bool:
    """Return True if the state passes load more than 128 channels of q_in, k_in and k_out of each token."""
    return p.is_per_channel and p.K > 128


def split_operands(p: Problem, machine: Machine) -> bool:
    """Return True if 16-bit operands that cause errors are split into hi + lo, and <S_in, dS> uses fp32 dS.

    It needs operands in shared memory: sm_80 and sm_120 would hold them in registers and spill 2 to 26 KB a
    thread.
    """
    return _has_shared_operands(machine) and p.K <= 128 and not has_fp32_operands(p)


def _has_shared_operands(machine: Machine) -> bool:
    """Return True if MMAs read their operands from shared memory: Hopper, and Blackwell of data centres."""
    return machine.kind == "cuda" and machine.capability // 10 in (9, 10)


def equal_layouts(p: Problem, machine: Machine, tiles: TileT, unit: int) -> TileT:
    """Return tiles of a state pass that give all operands one layout, where rows are loaded by elements.

    Triton pipelines no load of less than 4 bytes. The rows of such a pass then share shared memory with later
    operands of its MMAs, and ptxas 12.8 loses the addresses of an operand that begins where one of another
    layout began: the MMA reads elsewhere (tests: `descriptors`). 64 columns of 16 bits have 128 bytes a row,
    as all other operands do. 8 warps: with 4 the registers of S spill two to four times as much.
    """
    is_scalar = unit % 2 or p.K % 2 or p.V % 2
    if not (is_scalar and _has_16_bit_wgmma(p, machine)):
        return tiles
    return replace(tiles, BV=64, num_warps=8, stages=min(tiles.stages, 2))


def values_bwd_columns(p: Problem, machine: Machine, tiles: BackwardTiles) -> int:
    """Return the value columns that `values_bwd_kernel` takes at once.

    A loop of one iteration is not pipelined, and its operands share shared memory: 64 columns of 16 bits have
    the layout of all others, but 32 have another (see `equal_layouts`).
    """
    return 64 if p.V <= 32 and _has_16_bit_wgmma(p, machine) else tiles.pairs_bwd.BV


def _has_16_bit_wgmma(p: Problem, machine: Machine) -> bool:
    """Return True if MMAs that read the state are WGMMA on 16-bit operands."""
    return _is_hopper(machine) and not has_fp32_operands(p)


def _is_hopper(machine: Machine) -> bool:
    return machine.kind == "cuda" and machine.capability == 90


def keeps_low_bits(p: Problem, machine: Machine) -> bool:
    """Return True if dr of a decay per key channel keeps 8 bits more than bf16, for dbeta.

    On the GPUs of `split_operands`, for all K whose results between kernels are not in fp32.
    """
    return _has_shared_operands(machine) and p.q.dtype == torch.bfloat16 and not fp32_mma(p)


def channel_block(p: Problem, machine: Machine) -> int:
    """Return the key channels that `prepare_channels_kernel` takes at once: [64, channels] in registers.

    128 where chunks are computed by halves, whose operands in fp32 take 96 KB of shared memory, so that two
    programs fit an SM. Else 16: levels alone.
    """
    return 128 if has_wide_kernels(p, machine) else 16


def has_wide_kernels(p: Problem, machine: Machine) -> bool:
    """Return True for 65 to 128 channels in 16 bits on sm_90: they have kernels beside those of 16."""
    return _is_hopper(machine) and 64 < p.K <= 128 and p.q.dtype != torch.float32


@dataclass(frozen=True)
class ChannelStrip:
    """Hold the key channels of a program of `rows_bwd_channels_kernel`, and its value columns at once."""

    BK: int
    BV: int


def channel_strip(p: Problem, BK: int) -> ChannelStrip:
    """Return the strip of the gradients per key channel: some ten [64, BK] are in registers."""
    return ChannelStrip(min(BK, 16), max(16, min(32, next_power_of_2(p.V))))


def mma_strip(p: Problem, machine: Machine) -> ChannelStrip | None:
    """Return the strip of `rows_bwd_mma_kernel`; None where `rows_bwd_channels_kernel` runs alone.

    It needs MMAs whose operands are in shared memory: others would hold them in registers.
    H100, 32 heads of 128 x 128, 8192 tokens, us: 16 channels by levels 3,191; strips of 32 channels and 128
    value columns 1,617, of 64 and 64 2,845, with 8 warps 2,976.
    """
    return ChannelStrip(32, 128) if has_wide_kernels(p, machine) else None


def forward_tiles(p: Problem, machine: Machine) -> ForwardTiles:
    """Return the tiles of a forward."""
    return _choose_forward(p, machine, p.N * p.HV)


def all_forward_tiles(p: Problem, machine: Machine) -> list[ForwardTiles]:
    """Return all tiles that `forward_tiles` chooses for problems that differ from p only in size."""
    return list(dict.fromkeys(_choose_forward(p, machine, n) for n in _all_num_states(machine)))


def transfer_tiles(p: Problem, machine: Machine) -> StripTile:
    """Return the strips of a state pass that stores no S_in and no v_new: N | M of a rank."""
    return StripTile(_strip_columns(p, 32), *_warps_and_stages(p, machine, 4))


def fused_tiles(p: Problem, machine: Machine) -> ForwardTiles:
    """Return the tiles of a forward whose state scan computes the outputs."""
    columns = _strip_columns(p, 64)
    return ForwardTiles(columns, *_warps_and_stages(p, machine, 2), True, OutputTile(columns, 4))


def backward_tiles(p: Problem, machine: Machine) -> BackwardTiles:
    """Return the tiles of a backward; its `group` does not affect which binaries are compiled."""
    return replace(_choose_backward(p, machine, p.N * p.HV), group=_group_size(p, machine))


def all_backward_tiles(p: Problem, machine: Machine) -> list[BackwardTiles]:
    """Return all tiles that `backward_tiles` chooses for problems that differ from p only in size."""
    return list(dict.fromkeys(_choose_backward(p, machine, n) for n in _all_num_states(machine)))


def _all_num_states(machine: Machine) -> range:
    """Return sequences times value heads from 1 to a number that fills the GPU for any V."""
    return range(1, 2 * machine.num_sms + 1)


def _choose_forward(p: Problem, machine: Machine, num_states: int) -> ForwardTiles:
    """Fuse scan and outputs if there are more strips of 64 columns than SMs; else run them as two kernels.

    On an H200 a chunk takes 4.9 us in scan, two programs an SM, and 2.9 and 1.5 us in two waves of state and
    of output. scan at 8 x 1024 tokens, 16/32 heads: 130 us; with three stages 253; with 128 columns and 8
    warps 142.
    """
    output = OutputTile(_strip_columns(p, 64), 4)
    # batch invariance: the choice must not depend on the number of sequences
    is_full = num_states * cdiv(p.V, 64) > machine.num_sms
    # scan in fp32 has three rows of 1 KB a token: two chunks of them exceed the shared memory of sm_90
    fits = not (has_large_rows(p) and has_fp32_operands(p))
    if is_full and fits and not p.batch_invariant:
        return fused_tiles(p, machine)
    warps, stages = _warps_and_stages(p, machine, 4)
    columns = _strip_columns(p, _fastest_strip(p, machine, num_states, STATE_US))
    return ForwardTiles(columns, warps, stages, False, output)


def _choose_backward(p: Problem, machine: Machine, num_states: int) -> BackwardTiles:
    """Choose the backward's tiles. 64 columns spill on sm_80 (20 KB a thread), sm_100 (1.5 KB) and sm_120."""
    is_allowed = (machine.kind == "hip" or machine.capability == 90) and not has_large_rows(p)
    us_per_chunk = {most: us for most, us in STATE_BWD_US.items() if most < 64 or is_allowed}
    most = _fastest_strip(p, machine, num_states, us_per_chunk)
    # shared memory: three stages of 64 columns leave no space for split bf16 operands
    # or for rows k_out beside k_in
    warps, stages = _warps_and_stages(p, machine, 2 if most == 64 or p.is_per_channel else 3)
    if has_large_rows(p) and has_fp32_operands(p):
        stages = 1
    elif has_large_rows(p) and machine.kind == "cuda" and machine.capability != 90:
        # operands in registers, or in tensor memory: 4 warps spill 15 KB a thread on sm_80, 8 warps 80 bytes
        warps = 8
    # one group of all chunks; `backward_tiles` sets the real size
    return BackwardTiles(_strip_columns(p, most), warps, stages, *_gradient_tiles(p, machine), 1 << 30)


def _fastest_strip(p: Problem, machine: Machine, num_states: int, us_per_chunk: Mapping[int, float]) -> int:
    """Return the strip width with the shortest state pass, counted in waves of one program per SM."""
    if p.batch_invariant:
        return 32
    # a strip is a program, and S of a strip is in its registers
    strips = {most: cdiv(p.V, _strip_columns(p, most)) for most in us_per_chunk}
    # wider strips take longer per chunk but need fewer waves over the SMs
    waves = {most: cdiv(num_states * strips[most], machine.num_sms) for most in us_per_chunk}
    return min(us_per_chunk, key=lambda most: waves[most] * us_per_chunk[most])


def _group_size(p: Problem, machine: Machine) -> int:
    """Return the chunks of a group: a quarter of all, rounded to full waves of two programs per SM.

    On an H200 at 16/32 heads and 8192 tokens, four groups of two waves save a tenth of a training step's peak
    memory. Eight groups of one wave save 2 % more and cost 30 us of 1,420; seven, of 1.2 waves, cost 18 %.
    """
    at_once = 2 * machine.num_sms
    waves = cdiv(p.num_chunks * p.H, 4 * at_once)
    return max(1, waves * at_once // p.H)


def _gradient_tiles(p: Problem, machine: Machine) -> tuple[int, StripTile, StripTile]:
    """Return the key columns of a program of the gradient kernels, and the strips of both.

    H200, 16/32 heads of 128 x 128, 8192 tokens, us of pairs_bwd + rows_bwd: 32 columns in 1, 2, 3 or 4 stages
    433 + 404, 341 + 295, 301 + 269, 296 + 266; 64 in 1 or 2 431 + 380, 384 + 340; 16 in 3 362 + 318; all
    measured before MMAs were ordered so that none is in flight at the end of an iteration.
    Hopper does not get blocks of 64 keys by 32 or 16 columns: Triton 3.6 gives wgmma a wrong shared-memory
    address for them in 16 bits (compute-sanitizer: out-of-bounds read). Other GPUs lack registers for more
    columns or four warps: on sm_80 ptxas falls back to 32 registers and spills 44 KB a thread. sm_100 lacks
    tensor memory for more.
    """
    is_wide = has_fp32_operands(p)
    if machine.kind == "hip":
        strips = StripTile(_strip_columns(p, 64) if is_wide else 64, 4, 1)
        return (32 if is_wide else 64 if p.K > 128 else 128), strips, strips
    if machine.capability == 90 and (is_wide or p.K > 128):
        strips = StripTile(_strip_columns(p, 64) if is_wide else 64, 4, 1)
        return 64, strips, strips
    if machine.capability == 90:
        # Hopper in 16 bits: a program has whole rows of K, and its loads to shared memory are 3 stages deep
        return 128, StripTile(32, 4, 3), StripTile(32, 4, 3)
    strips = StripTile(16, 8, 1) if is_wide else StripTile(32, 8, 1)
    return (32 if is_wide else 64), strips, strips


def _warps_and_stages(p: Problem, machine: Machine, stages: int) -> tuple[int, int]:
    """Return the warps of a state pass and its pipeline depth: `stages` if shared memory allows."""
    is_wide = has_fp32_operands(p)
    if machine.kind == "hip":
        return 4, 1
    if is_wide and machine.capability != 90:
        # 16 warps use mma instead of tcgen05, which would need 528 columns of tensor memory
        return (16 if p.K > 128 and machine.capability // 10 == 10 else 8), 1
    # no shared memory for a second chunk
    if machine.shared < 128 * 1024:
        return 4, 1
    return 4, 2 if is_wide or p.K > 128 else stages


def _strip_columns(p: Problem, most: int) -> int:
    """Return the columns of S per program: fewer if elements are wide or K large, to keep S in registers."""
    is_wide = 2 if has_fp32_operands(p) else 1
    large = 2 if p.K > 128 else 1
    return max(16, min(most // (is_wide * large), next_power_of_2(p.V)))
