# mypy: disable-error-code="assignment, var-annotated"
"""Fold the history of each slot, a ring of places, into its state, and empty it.

One launch: a program folds some columns of one state, and the last one of a slot stores its cursor. A slot
whose history is empty costs the latency of two loads. `fold` does the same for histories without a ring.
"""

from collections.abc import Hashable

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
from gdn.backends.triton.launch.pdl import launch_dependents_then_wait, pdl_options, supports_pdl
from gdn.backends.triton.lib import split_fp64
from gdn.backends.triton.serving import fold_channels, packet
from gdn.backends.triton.serving.fold import PLACES, fold_constants
from gdn.backends.triton.serving.history_lib import fold_strip, load_cursor, ring_places, store_cursor
from gdn.backends.triton.serving.packet import (
    fits_32_bits,
    index_strides,
    line_stride,
    sample_num_states,
    state_extents,
)
from gdn.backends.triton.serving.packet_lib import column_pointer
from gdn.backends.triton.serving.recurrent_lib import divide, locate_program
from gdn.backends.triton.serving.state_tiles import (
    magic_numbers,
    pool_strides,
    remainder_strides,
    scale_strides,
)
from gdn.backends.triton.serving.structs import ColumnScales, History, Strip, Sums, group_constants
from gdn.problem import FoldProblem

COLUMNS = 16  # value columns of a strip
CHANNEL_COLUMNS = fold_channels.COLUMNS  # with a decay per key channel, whose k_out a program computes once


@kernel
def fold_history_kernel(
    state_ptr, u_ptr, k_ptr, G_ptr, cursor_ptr, column_scale_ptr, remainder_ptr, index_ptr, accepted_ptr,
    state_n, state_h, state_k, state_v, u_n, u_p, u_h, k_n, k_p, k_h, G_n, G_p, G_h,
    cursor_n, index_n, accepted_n, HV, HV_magic, HV_s, ratio_magic, ratio_s, slots, lowest, places, room,
    scale_n, scale_h, scale_v, low_n, low_h, low_k, low_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr,
    PASTS: tl.constexpr, STRIPS: tl.constexpr, STAGES: tl.constexpr, AXIS: tl.constexpr, NEAR: tl.constexpr,
    LINE: tl.constexpr, STATE_UNIT: tl.constexpr, PAST_UNIT: tl.constexpr, FOLD_PRECISION: tl.constexpr,
    PDL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # S <- e^(G_P) S + sum_(j < P) e^(G_P - G_j) k_j u_j^T for some columns of one state; then P = 0.
    # CHANNELS: a decay per key channel, as in `fold_channels`.
    # Program (entry, head, block): STRIPS strips of BV value columns of S; grid: entries * HV * blocks;
    # 1 warp, 4 with CHANNELS.
    # PDL: it lets the next kernel start at once, and waits for the previous one before its first load.
    # Reads S once and P rows of k and u; writes S once. The last program of an entry stores the cursor.
    C: tl.constexpr = group_constants(
        K=K, V=V, BP=BP, BK=BK, PASTS=PASTS, STRIPS=STRIPS, AXIS=AXIS, NEAR=NEAR, LINE=LINE,
        STATE_UNIT=STATE_UNIT, PAST_UNIT=PAST_UNIT, FOLD_PRECISION=FOLD_PRECISION,
    )  # fmt: skip
    if PDL:
        launch_dependents_then_wait()
    BLOCKS: tl.constexpr = (V + BV * STRIPS - 1) // (BV * STRIPS)
    entry, head, block = locate_program(HV, HV_magic, HV_s, BLOCKS)
    slot = entry
    if index_ptr is not None:
        slot = tl.load(index_ptr + entry * index_n).to(tl.int64)
    if (slot < lowest) | (slot >= slots):
        return
    cursor_ptr += slot * cursor_n
    if accepted_ptr is not None:
        accepted_ptr += entry * accepted_n
    ring, used = load_cursor(cursor_ptr, accepted_ptr, room, places)
    if used == 0:
        return
    key_head = divide(head, ratio_magic, ratio_s)
    state_ptr += (slot * state_n + head.to(tl.int64) * state_h) * STATE_UNIT
    u_ptr += (slot * u_n + head * u_h) * PAST_UNIT
    k_ptr += (slot * k_n + key_head * k_h) * PAST_UNIT
    G_ptr += slot * G_n + head * G_h
    history = History(u_ptr, k_ptr, G_ptr, used, u_p, k_p, G_p, ring, places)
    end = None
    if not CHANNELS:
        G_at = G_ptr + ring_places(used - 1, history).to(tl.int64) * G_p
        high, low = split_fp64(tl.load(G_at).to(tl.float64))
        end = Sums(high, low)
    if column_scale_ptr is not None:
        column_scale_ptr += slot * scale_n + head.to(tl.int64) * scale_h
    if remainder_ptr is not None:
        remainder_ptr += slot * low_n + head.to(tl.int64) * low_h
    scales = ColumnScales(column_scale_ptr, scale_v, remainder_ptr, low_k, low_v)
    # the pipeliner keeps STAGES - 1 strips of S in flight from HBM
    for strip in tl.range(0, STRIPS, num_stages=STAGES):
        column, vs = (block * STRIPS + strip) * BV, tl.arange(0, BV)
        strip_ptr = column_pointer(state_ptr, column, state_v * STATE_UNIT, AXIS == "v")
        columns = Strip(strip_ptr, vs, V - column, state_k, state_v)
        fold_strip(columns, scales, history, end, column, C)
    store_cursor(cursor_ptr, 0, 0, HV * BLOCKS)


_folds: PlanCache[Launch] = PlanCache()


def fold_history(problem: FoldProblem) -> None:
    """See `Backend`; writes problem.state and problem.cursor."""
    p = problem
    with device_guard(p.state.device):
        _folds.get(_key(p), lambda: _first(p))(*fold_tensors(p))


def fold_tensors(p: FoldProblem) -> tuple[Tensor | None, ...]:
    """Return the problem's tensors in the order of the kernel's parameters."""
    return (
        p.state, p.history_u, p.history_k, p.history_G, p.cursor, p.column_scale, p.remainder, p.index,
        p.num_accepted,
    )  # fmt: skip


def _key(p: FoldProblem) -> Hashable:
    return (
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in fold_tensors(p)), p.state.device,
        p.room, p.state_v_first, p.null_slot,
    )  # fmt: skip


def _first(p: FoldProblem) -> Launch:
    one, tensors, sizes = plan_fold(p), fold_tensors(p), sample_num_states(machine(p.state.device))
    others = lambda: [(plan_fold(p, num_states), tensors) for num_states in sizes]  # noqa: E731
    compile_ahead(p.state.device, one.binary_key(tensors), others)
    return one


def plan_fold(p: FoldProblem, num_states: int | None = None) -> Launch:
    """Plan a fold. `num_states`: entries x heads for which tiles are chosen, if not the problem's."""
    axis, state_unit, state = pool_strides(p.state, p.K, p.V, p.state_v_first)
    n, _, h, k, v = state
    kept, gpu = (*p.history_u.stride()[:3], *p.history_k.stride()[:3]), machine(p.state.device)
    unit, entries = unit_of(*kept), p.N * p.HV
    scale_n, _, *scale = scale_strides(p.column_scale)
    scales = (scale_n, *scale, *remainder_strides(p.remainder, p.state_v_first))
    form = fold_constants(p)
    most = CHANNEL_COLUMNS if form["CHANNELS"] else COLUMNS
    BV = min(most, max(16, triton.next_power_of_2(p.V)))
    fills = (entries if num_states is None else num_states) >= packet.FILLED * gpu.num_sms
    takes_all = fills and not form["CHANNELS"]
    strips = triton.cdiv(p.V, BV) if takes_all else 1
    scalars = (
        n, h, k, v, *(s // unit for s in kept), *p.history_G.stride()[:3], *index_strides(p.cursor, 1),
        *index_strides(p.index, 1), *index_strides(p.num_accepted, 1), p.HV, *magic_numbers(p.HV),
        *magic_numbers(p.HV // p.H), p.state.shape[0], 0 if p.null_slot is None else 1, p.places, p.room,
        *scales,
    )  # fmt: skip
    constants = {
        "K": p.K, "V": p.V, "BV": BV, "BP": PLACES, "STRIPS": strips, "STAGES": 2 if gpu.kind == "hip" else 3,
        "AXIS": axis,
        "NEAR": fits_32_bits(
            *state_extents(state, state_unit, p), *(p.places * s for s in (kept[1], kept[4]))
        ),
        "LINE": line_stride(axis, state, state_unit, p), "STATE_UNIT": state_unit, "PAST_UNIT": unit,
        **form, "PDL": supports_pdl(gpu),
    }  # fmt: skip
    programs, warps = entries * triton.cdiv(p.V, BV * strips), 4 if form["CHANNELS"] else 1
    return Launch(fold_history_kernel, programs, scalars, constants, warps, options=pdl_options(gpu))
