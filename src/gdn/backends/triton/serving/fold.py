# mypy: disable-error-code="assignment, var-annotated"
"""Fold a history into its state when the history is full.

    fold      S <- e^(G_P) S + sum_(j < P) e^(G_P - G_j) k_j u_j^T, for all layers
    cursor    advance the cursors, after all folds, which read them

A state is read and written once: 85 us for 128 rows of 32 heads of 128 x 128 in bf16 (H200); one token takes
70.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton.launch import (
    Launch,
    PlanCache,
    compile_ahead,
    device_guard,
    kernel,
    machine,
    unit_of,
)
from gdn.backends.triton.lib import split_fp64
from gdn.backends.triton.serving import fold_channels, packet
from gdn.backends.triton.serving.history_lib import history_length, load_history_k, load_history_u
from gdn.backends.triton.serving.packet import (
    fits_32_bits,
    index_strides,
    line_stride,
    precisions,
    sample_num_states,
    state_extents,
)
from gdn.backends.triton.serving.packet_lib import (
    add_outer_product,
    column_pointer,
    output_strip_pointers,
    strip_mask,
)
from gdn.backends.triton.serving.recurrent_lib import divide, locate_program
from gdn.backends.triton.serving.state_tiles import magic_numbers, pool_strides
from gdn.backends.triton.serving.structs import History, Strip, Sums, group_constants
from gdn.problem import FoldProblem, HistoryProblem, KeepProblem

PLACES = 16  # places of a history that one MMA takes
MOST_PASTS = 4  # most blocks of PLACES whose k (or scores) are held in registers over all strips of columns
# V-first -> keys and columns of a state that a fold has in registers at a time
FOLDED = {True: (128, 16), False: (64, 16)}


@kernel
def fold_kernel(
    state_ptr, u_ptr, k_ptr, G_ptr, cursor_ptr, index_ptr, accepted_ptr,
    state_l, state_n, state_h, state_k, state_v, u_l, u_n, u_p, u_h, k_l, k_n, k_p, k_h, G_l, G_n, G_p, G_h,
    cursor_n, index_n, accepted_n, layers, HV, HV_magic, HV_s, ratio_magic, ratio_s, slots, lowest,
    places, room,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr,
    PASTS: tl.constexpr, STRIPS: tl.constexpr, STAGES: tl.constexpr, AXIS: tl.constexpr, NEAR: tl.constexpr,
    LINE: tl.constexpr, STATE_UNIT: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # S <- e^(G_P) S + sum_(j < P) e^(G_P - G_j) k_j u_j^T for one block of keys and columns of one state.
    # Program (entry, layer, head, block): BK keys by STRIPS strips of BV columns of S, a strip at a time in
    # fp32 registers. Grid: entries * layers * HV * blocks of K and V; 1 warp; no PDL.
    # k of the history stays in registers over all strips, unless PASTS is 0.
    # Reads S once and P rows of k and u; writes S once. It does nothing if the history has space for
    # another packet.
    C: tl.constexpr = group_constants(
        K=K, V=V, BP=BP, STRIPS=STRIPS, AXIS=AXIS, NEAR=NEAR, LINE=LINE, STATE_UNIT=STATE_UNIT, PAST_UNIT=UNIT
    )
    BLOCKS: tl.constexpr = (V + BV * STRIPS - 1) // (BV * STRIPS)
    layer_and_entry, head, block = locate_program(HV, HV_magic, HV_s, BLOCKS * ((K + BK - 1) // BK))
    entry, layer = layer_and_entry // layers, layer_and_entry % layers
    slot = tl.load(index_ptr + entry * index_n).to(tl.int64)
    if (slot < lowest) | (slot >= slots):
        return
    end = history_length(
        tl.load(cursor_ptr + slot * cursor_n), tl.load(accepted_ptr + entry * accepted_n), room, places
    )
    if (end == 0) | (end + room <= places):
        return
    key_head = divide(head, ratio_magic, ratio_s)
    ks, vs = block // BLOCKS * BK + tl.arange(0, BK), tl.arange(0, BV)
    state_ptr += (layer * state_l + slot * state_n + head.to(tl.int64) * state_h) * STATE_UNIT
    u_ptr += (layer * u_l + slot * u_n + head * u_h) * UNIT
    k_ptr += (layer * k_l + slot * k_n + key_head * k_h) * UNIT
    G_ptr += layer * G_l + slot * G_n + head * G_h
    history = History(u_ptr, k_ptr, G_ptr, end, u_p, k_p, G_p, None, None)
    high, low = split_fp64(tl.load(G_ptr + (end - 1) * G_p).to(tl.float64))
    total = Sums(high, low)
    # k and decays stay in registers over all strips: they are the same for every column of S
    held = ()
    for part in tl.static_range(PASTS):
        held = held + (load_history_k(history, part * BP, total, ks, C),)
    # the pipeliner keeps STAGES - 1 strips of S in flight from HBM
    for strip in tl.range(0, STRIPS, num_stages=STAGES):
        column = (block % BLOCKS * STRIPS + strip) * BV
        left = V - column
        has_value = strip_mask(vs, left, V, STRIPS)[None, :]
        strip_ptr = column_pointer(state_ptr, column, state_v * STATE_UNIT, AXIS == "v")
        place, in_state = output_strip_pointers(Strip(strip_ptr, vs, left, state_k, state_v), ks, C)
        S = tl.load(place, mask=in_state, other=0.0).to(tl.float32) * tl.exp(high)
        # MMAs on tensor cores accumulate onto S in registers
        for part in tl.static_range(PASTS):
            k, still = held[part]
            u = load_history_u(history, u_ptr + column, part * BP, vs, has_value, C)
            S = add_outer_product(S, k, u.to(tl.float32) * still[:, None], AXIS, PRECISION)
        # a long history: its k are loaded again for each strip, from L2
        if PASTS == 0:
            for start in range(0, end, BP):
                k, still = load_history_k(history, start, total, ks, C)
                u = load_history_u(history, u_ptr + column, start, vs, has_value, C)
                S = add_outer_product(S, k, u.to(tl.float32) * still[:, None], AXIS, PRECISION)
        # one store of S to HBM
        tl.store(place, S.to(state_ptr.dtype.element_ty), mask=in_state)


@kernel
def cursor_kernel(
    cursor_ptr, index_ptr, accepted_ptr, cursor_n, index_n, accepted_n, n, slots, lowest, places, room,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # cursor <- places in use, or 0 if they are folded.
    # Program: BLOCK entries, one a thread. Grid: cdiv(n, BLOCK); 4 warps; no PDL.
    # Its launch follows that of `fold_kernel`, whose programs all read the cursor.
    # Reads index, accepted and cursor of each entry; writes cursor.
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(index_ptr + entry * index_n, mask=entry < n, other=-1).to(tl.int64)
    is_slot = (slot >= lowest) & (slot < slots) & (entry < n)
    accepted = tl.load(accepted_ptr + entry * accepted_n, mask=is_slot, other=0)
    end = history_length(tl.load(cursor_ptr + slot * cursor_n, mask=is_slot, other=0), accepted, room, places)
    end = tl.where(end + room > places, 0, end)
    tl.store(cursor_ptr + slot * cursor_n, end.to(cursor_ptr.dtype.element_ty), mask=is_slot)


def history_blocks(places: int) -> int:
    """Return the blocks of PLACES for so many places, a power of two, so that few binaries are needed.

    Return 0 for many places: their k are then loaded again, and scores computed again, for each strip.
    """
    blocks = 1 << (max(1, triton.cdiv(places, PLACES)) - 1).bit_length()
    return blocks if blocks <= MOST_PASTS else 0


def fold_constants(p: FoldProblem | HistoryProblem) -> dict[str, Any]:
    """Return the constants of a fold of one layer, with the keys of a state in registers at a time."""
    axis, _, _ = pool_strides(p.state, p.K, p.V, p.state_v_first)
    keys = fold_channels.KEYS if p.is_per_channel else FOLDED[axis == "k"][0]
    # remainders need registers, too: of 128 keys a program would spill 640 bytes, of 64 none
    keys = keys if p.remainder is None else min(keys, 64)
    dtypes = {p.history_u.dtype, p.history_k.dtype}
    # bf16 history: split bf16 MMAs (hi + lo), unless that would convert u. k with decays of channels is fp32
    is_wide = p.is_per_channel or axis != "k" or dtypes != {torch.bfloat16}
    return {
        "BK": min(keys, max(16, triton.next_power_of_2(p.K))), "PASTS": history_blocks(p.places),
        "FOLD_PRECISION": precisions(is_wide, machine(p.state.device))["PRECISION"],
        "CHANNELS": p.is_per_channel,
    }  # fmt: skip


@dataclass(frozen=True)
class FoldLaunches:
    """Hold the launches of one commit."""

    fold: Launch
    cursor: Launch


_folds: PlanCache[FoldLaunches] = PlanCache()


def replay_commit(problem: KeepProblem) -> None:
    """See `Backend`; writes problem.state and problem.cursor."""
    p = problem
    with device_guard(p.state.device):
        plan = _folds.get(_fold_key(p), lambda: _first(p))
        plan.fold(*_fold_tensors(p))
        if p.update_cursor:
            plan.cursor(p.cursor, p.index, p.accepted)


def _fold_tensors(p: KeepProblem) -> tuple[Tensor, ...]:
    return p.state, p.history_u, p.history_k, p.history_G, p.cursor, p.index, p.accepted


def _fold_key(p: KeepProblem) -> Hashable:
    return (
        *((x.shape, x.stride(), x.dtype) for x in _fold_tensors(p)), p.state.device, p.room, p.state_v_first,
        p.null_slot,
    )  # fmt: skip


def _first(p: KeepProblem) -> FoldLaunches:
    one, tensors, gpu = _plan_fold(p), _fold_tensors(p), machine(p.state.device)
    others = lambda: [(_plan_fold(p, num_states), tensors) for num_states in sample_num_states(gpu)]  # noqa: E731
    compile_ahead(p.state.device, one.binary_key(tensors), others)
    n, where = p.index.shape[0], _index_strides(p)
    scalars = (*where, n, p.state.shape[1], _lowest(p), p.places, p.room)
    return FoldLaunches(one, Launch(cursor_kernel, triton.cdiv(n, 128), scalars, {"BLOCK": 128}, 4))


def _index_strides(p: KeepProblem) -> tuple[int, ...]:
    return (*index_strides(p.cursor, 1), *index_strides(p.index, 1), *index_strides(p.accepted, 1))


def _lowest(p: KeepProblem) -> int:
    """Return the first slot that is not padding."""
    return 0 if p.null_slot is None else 1


def _plan_fold(p: KeepProblem, num_states: int | None = None) -> Launch:
    """Build a fold. `num_states`: entries x layers x heads that tiles are chosen for (None: its own)."""
    axis, state_unit, state = pool_strides(p.state, p.K, p.V, p.state_v_first)
    layers, slots = p.state.shape[:2]
    HV, H, gpu = p.history_u.shape[3], p.history_k.shape[3], machine(p.state.device)
    kept = (*p.history_u.stride()[:4], *p.history_k.stride()[:4])
    unit, entries = unit_of(*kept), p.index.shape[0] * layers * HV
    BK, BV = (
        min(most, max(16, triton.next_power_of_2(size)))
        for most, size in zip(FOLDED[axis == "k"], (p.K, p.V), strict=True)
    )
    dtypes = p.history_u.dtype, p.history_k.dtype
    takes_all = (entries if num_states is None else num_states) >= packet.FILLED * gpu.num_sms
    strips = triton.cdiv(p.V, BV) if takes_all else 1
    scalars = (
        *state, *(s // unit for s in kept), *p.history_G.stride(), *_index_strides(p), layers, HV,
        *magic_numbers(HV), *magic_numbers(HV // H), slots, _lowest(p), p.places, p.room,
    )  # fmt: skip
    constants = {
        "K": p.K, "V": p.V, "BP": PLACES, "AXIS": axis, "LINE": line_stride(axis, state, state_unit, p),
        "NEAR": fits_32_bits(
            *state_extents(state, state_unit, p), *(p.places * s for s in (kept[2], kept[6]))
        ),
        "STATE_UNIT": state_unit, "UNIT": unit,
    }  # fmt: skip
    if p.is_per_channel:
        return fold_channels.plan_channels_fold(entries, scalars, constants, gpu)
    return Launch(
        fold_kernel,
        entries * triton.cdiv(p.K, BK) * triton.cdiv(p.V, BV * strips),
        scalars,
        constants
        | {
            "BK": BK, "BV": BV, "PASTS": history_blocks(p.places), "STRIPS": strips,
            "STAGES": 2 if gpu.kind == "hip" else 3,
            # bf16 history: split bf16 MMAs (hi + lo), unless that would convert u
            "PRECISION": precisions(axis != "k" or set(dtypes) != {torch.bfloat16}, gpu)["PRECISION"],
        },
        1,
    )  # fmt: skip
