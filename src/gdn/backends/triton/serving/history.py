# mypy: disable-error-code="assignment, var-annotated"
"""Decode with a history: read the state, append the tokens' u, k and G, and fold where the history is full.

The kernel is `replay` on a ring of places; it also folds the rows whose history is full, in the same launch.
Bytes of a token per row at 16/32 heads of 128 x 128, fp32 state, bf16 history of P tokens: 2.1 MB of state
read, 12.5 KB for each token of history read or written; a fold, once in places - room tokens, also writes the
state. `decode` moves 4.2 MB. With few rows the latency of the MMAs counts, not the bytes: `APPENDS_FROM` says
from how many states on the history is the faster way. Below, `fold_history` empties it, and `decode` runs.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton.launch import (
    CachedLaunch,
    Launch,
    PlanCache,
    compile_ahead,
    device_guard,
    is_recording,
    kernel,
    machine,
)
from gdn.backends.triton.launch.launches import Step
from gdn.backends.triton.launch.pdl import launch_dependents_then_wait, pdl_options
from gdn.backends.triton.lib import column_mask, split_fp64
from gdn.backends.triton.serving import decode as plain
from gdn.backends.triton.serving.fold import fold_constants
from gdn.backends.triton.serving.fold_history import fold_tensors, plan_fold
from gdn.backends.triton.serving.history_channels import plan_channels_append
from gdn.backends.triton.serving.history_lib import load_cursor, ring_places, solve_token, store_cursor
from gdn.backends.triton.serving.packet import (
    REGISTERS,
    index_strides,
    num_programs,
    options,
    sample_num_states,
)
from gdn.backends.triton.serving.packet_lib import (
    ROWS,
    fill_outputs,
    load_operands,
    load_rows,
    load_slot,
    row_pointers,
    solve_packet,
    spread_over_rows,
    tokens_of_rows,
)
from gdn.backends.triton.serving.packet_loads import load_gates
from gdn.backends.triton.serving.recurrent_lib import (
    divide,
    limit_tokens,
    locate_program,
    spoil_longer_row,
    token_range,
)
from gdn.backends.triton.serving.replay import appends_history, describe_replay
from gdn.backends.triton.serving.replay_lib import run_strips
from gdn.backends.triton.serving.state_tiles import (
    kernel_offsets,
    remainder_strides,
    scale_strides,
)
from gdn.backends.triton.serving.structs import (
    Appended,
    ColumnScales,
    Gates,
    GateStrides,
    History,
    Packet,
    Slots,
    Strip,
    Sums,
    group_constants,
)
from gdn.problem import HistoryProblem

# keys of a state in a program's registers, by the presence of a remainder: with 64 the fold would set the
# number of registers. Remainders are unpacked and packed beside them: with 32 keys 255 registers, not 166
FOLDED = {False: 32, True: 16}
# programs of a head that share the strips of a row that folds: one alone would end long after all others.
# More would slow the other rows, where all programs of a head but one have nothing to do
SPLITS = 4
# (compute capability, K, V) -> bytes of a state's element -> columns of a strip in programs of two warps, for
# one token, where states are V-first and programs fill the SMs. The bits are the same. us of 64 and 256 rows
# of 32 heads, folds included, for one warp with 16 columns (H200): fp32 51.8 and 173 for 59.6 and 202, bf16
# 32.2 and 105 for 35.1 and 113, int16 45.7 and 149 for 55.6 and 186, int8 31.3 and 101 for 43.8 and 144.
# int8 with a remainder loses: 74.4 and 180 for 61.4 and 181
COLUMNS = {(90, 128, 128): {1: 64, 2: 64, 4: 32}}


@kernel
def history_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, u_history_ptr, k_history_ptr, G_history_ptr, cursor_ptr, g_ptr, beta_ptr,
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, column_scale_ptr, remainder_ptr, cu_seqlens_ptr, read_index_ptr,
    num_accepted_ptr, o_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, q_k, k_k, v_v, o_v,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h, state_n, state_h, state_k, state_v,
    u_n, u_p, u_h, past_n, past_p, past_h, G_n, G_p, G_h, cursor_n, read_n,
    N, T, HV, HV_magic, HV_s, ratio, ratio_magic, ratio_s, slots, lowest, places, scale,
    accepted_n, room, q_0, k_0, v_0, scale_n, scale_h, scale_v, low_n, low_h, low_k, low_v,
    K: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, PASTS: tl.constexpr, BV: tl.constexpr,
    BS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, STRIPS: tl.constexpr, STAGES: tl.constexpr,
    AXIS: tl.constexpr, DENSE: tl.constexpr, NEAR: tl.constexpr, LINE: tl.constexpr, UNIT: tl.constexpr,
    STATE_UNIT: tl.constexpr, PAST_UNIT: tl.constexpr, NORM: tl.constexpr, NEGATIVE: tl.constexpr,
    LEVELS: tl.constexpr, PRECISION: tl.constexpr, FP32_PRECISION: tl.constexpr,
    FOLD_PRECISION: tl.constexpr, RESET: tl.constexpr, PDL: tl.constexpr, IS_SINGLE: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    # S_t = e^(G_t) S + sum_j e^(G_t - G_j) k_j u_j^T, then o and u of the tokens as in `packet`. Where the
    # history is full S <- e^(G_P) S + sum_(j < P) e^(G_P - G_j) k_j u_j^T, and the tokens begin the next one.
    # Program (row, head, block): STRIPS strips of BV value columns; grid: (N, + 1 if packed) * HV * blocks *
    # SPLITS; 1 or 2 warps. Of SPLITS programs the first does all strips, and the others exit, unless the row
    # folds: then each does a part. Scores with the history, at most PASTS blocks, stay in registers over all
    # strips.
    # PDL: it lets the next kernel start at once, and waits for the previous one before its first load.
    # Reads S, the history, the tokens; writes o, u, k and G of the tokens, the cursor, and a folded S.
    # No program writes what another one of its row may still read: the new places are not in use, and the
    # last program to finish stores the cursor.
    C: tl.constexpr = group_constants(
        K=K, V=V, BP=BP, BV=BV, BS=BS, BT=BT, STRIPS=STRIPS, STAGES=STAGES, AXIS=AXIS, DENSE=DENSE, NEAR=NEAR,
        LINE=LINE, UNIT=UNIT, STATE_UNIT=STATE_UNIT, PAST_UNIT=PAST_UNIT, NORM=NORM, NEGATIVE=NEGATIVE,
        LEVELS=LEVELS, PRECISION=PRECISION, FP32_PRECISION=FP32_PRECISION, RESET=RESET, IS_SINGLE=IS_SINGLE,
        FOLDS=False, SUBSTITUTES=False, READS_PAST=False,
    )  # fmt: skip
    # the constants of rows whose history is full. Without stages, since the loop with a fold would need twice
    # the shared memory, and so halve the programs on an SM for all rows
    FOLD_STRIPS: tl.constexpr = (STRIPS + SPLITS - 1) // SPLITS
    F: tl.constexpr = group_constants(
        K=K, V=V, BP=BP, BV=BV, BS=BS, BT=BT, STRIPS=FOLD_STRIPS, STAGES=1, AXIS=AXIS, DENSE=DENSE, NEAR=NEAR,
        LINE=LINE, UNIT=UNIT, STATE_UNIT=STATE_UNIT, PAST_UNIT=PAST_UNIT, PRECISION=PRECISION,
        FP32_PRECISION=FP32_PRECISION, IS_SINGLE=IS_SINGLE, FOLDS=True, BK=BK, PASTS=PASTS,
        FOLD_PRECISION=FOLD_PRECISION, READS_PAST=False,
    )  # fmt: skip
    if PDL:
        launch_dependents_then_wait()
    PROGRAMS: tl.constexpr = (V + BV * STRIPS - 1) // (BV * STRIPS) * SPLITS
    n, head, block = locate_program(HV, HV_magic, HV_s, PROGRAMS)
    first, total = token_range(cu_seqlens_ptr, n, N, T)
    count = limit_tokens(cu_seqlens_ptr, total, tl.minimum(room, 1 << LEVELS))
    slot, _ = load_slot(n, N, Slots(read_index_ptr, None, None, read_n, 0, 0, 0, 1, 1))
    is_row = (slot >= lowest) & (slot < slots) & (n < N)
    cursor_ptr += slot * cursor_n
    accepted_ptr = num_accepted_ptr
    if num_accepted_ptr is not None:
        accepted_ptr += n * accepted_n
    # the other programs of a head exit here unless the row folds, before they load tokens
    if SPLITS > 1:
        has_work = block == 0
        if is_row & (block > 0):
            ring, used = load_cursor(cursor_ptr, accepted_ptr, room, places)
            has_work = (used + count > places - room) & (count > 0)
            if not has_work:
                used += count if num_accepted_ptr is None else 0
                store_cursor(cursor_ptr, ring, used, HV * PROGRAMS)
        if not has_work:
            return
    key_head = divide(head, ratio_magic, ratio_s)
    o_ptr += (n * o_b + first * o_t + head * o_h) * UNIT
    q_ptr += (n * q_b + first * q_t + key_head * q_h + q_0) * UNIT
    k_ptr += (n * k_b + first * k_t + key_head * k_h + k_0) * UNIT
    v_ptr += (n * v_b + first * v_t + head * v_h + v_0) * UNIT
    # q, k and gates are loaded before the slot index arrives, so their latencies overlap
    PARTS: tl.constexpr = 2 * BT // ROWS
    packet = Packet(q_ptr, k_ptr, count, total, q_t, k_t, q_k, k_k)
    X, XK, QQ = load_operands(packet, C)
    now = tl.arange(0, BT)
    gates = Gates(g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr)
    gate_strides = GateStrides(g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h)
    G, beta = load_gates(gates, gate_strides, n, first, head, count, C)
    is_idle = not is_row
    if cu_seqlens_ptr is not None:
        # no token of a row that has a slot and no more tokens than promised
        begin, filler = tl.where(is_idle, 0, count), tl.where(is_idle, 0.0, float("nan"))
        fill_outputs(o_ptr, begin, total, filler, block * STRIPS, o_t, o_v, C)
    if is_idle:
        if cu_seqlens_ptr is None:
            fill_outputs(o_ptr, 0, total, 0.0, block * STRIPS, o_t, o_v, C)
    else:
        ring, used = load_cursor(cursor_ptr, accepted_ptr, room, places)
        is_full = (used + count > places - room) & (count > 0)
        u_history_ptr += (slot * u_n + head * u_h) * PAST_UNIT
        k_history_ptr += (slot * past_n + key_head * past_h) * PAST_UNIT
        G_history_ptr += slot * G_n + head * G_h
        history = History(u_history_ptr, k_history_ptr, G_history_ptr, used, u_p, past_p, G_p, ring, places)
        # the sum of g over the history, 0 for an empty one, whose last place is not loaded
        G_at = G_history_ptr + ring_places(used - 1, history).to(tl.int64) * G_p
        G_end = tl.load(G_at, mask=used > 0, other=0.0).to(tl.float64)
        high, low = split_fp64(spread_over_rows(G + G_end))
        beta_rows = spread_over_rows(spoil_longer_row(beta, count, total))
        if IS_SINGLE:
            W, row_scales = solve_token(XK, scale, C)
        else:
            W, row_scales = solve_packet(XK, QQ, high, low, beta_rows, scale, C)
        tokens, is_k = tokens_of_rows(PARTS - 1, BT)
        new, is_kept = ring_places(used + tokens, history), is_k & (tokens < count)
        state_ptr += (slot * state_n + head.to(tl.int64) * state_h) * STATE_UNIT
        v, state = Strip(v_ptr, None, None, v_t, v_v), Strip(state_ptr, None, None, state_k, state_v)
        if column_scale_ptr is not None:
            column_scale_ptr += slot * scale_n + head.to(tl.int64) * scale_h
        if remainder_ptr is not None:
            remainder_ptr += slot * low_n + head.to(tl.int64) * low_h
        scales = ColumnScales(column_scale_ptr, scale_v, remainder_ptr, low_k, low_v)
        tensors = (v, state, scales, Strip(o_ptr, None, None, o_t, o_v), (), ())
        end_high, end_low = split_fp64(G_end)
        solved = (X, W, row_scales, beta_rows, Sums(high, low), Sums(end_high, end_low))
        # one branch for all columns of a row and head: each loop is pipelined by itself
        if is_full:
            run_strips(solved, packet, history, tensors, Appended(new, is_kept), block, F, PASTS)
        else:
            run_strips(solved, packet, history, tensors, Appended(new, is_kept), block, C, PASTS)
        if block == 0:
            # after a fold the sums go on from the state that was just written
            G += tl.where(is_full, 0.0, G_end)
            new_G = G_history_ptr + ring_places(used + now, history).to(tl.int64) * G_p
            tl.store(new_G, G.to(G_history_ptr.dtype.element_ty), mask=now < count)
            # only one of the value heads that share a key head stores k
            if key_head * ratio == head:
                for start in tl.static_range(0, K, BS):
                    ks = start + tl.arange(0, BS)
                    if BS < K:
                        k = load_rows(PARTS - 1, packet, ks, C)
                    else:
                        k = X[PARTS - 1]
                    tl.store(
                        row_pointers(k_history_ptr, new, ks, past_p, 1, PAST_UNIT, True, NEAR),
                        k.to(k_history_ptr.dtype.element_ty),
                        mask=is_kept[:, None] & column_mask(ks, K)[None, :],
                    )  # fmt: skip
        ring = tl.where(is_full, ring_places(used, history), ring)
        used = tl.where(is_full, 0, used)
        if num_accepted_ptr is None:
            used += count
        store_cursor(cursor_ptr, ring, used, HV * PROGRAMS)


@dataclass(frozen=True)
class CachedFoldAndDecode:
    """Repeat the two launches of the plain way: the fold of what the histories hold, and the decode."""

    fold: Launch
    decode: Launch
    device: torch.device

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch with the tensors of a problem, in its order."""
        with device_guard(self.device):
            for one, given in self.steps(*tensors):
                one(*given)

    def steps(self, *tensors: Tensor | None) -> list[Step]:
        """Return the launches and the tensors of each."""
        q, k, v, state, u, past_k, G, cursor, *gates, offsets, index, accepted, out = tensors
        *gates, low = gates
        decoded = (q, k, v, state, *gates, offsets, index, None, None, None, None, None, None, out)
        return [
            (self.fold, (state, u, past_k, G, cursor, gates[-1], low, index, accepted)),
            (self.decode, decoded),
        ]  # fmt: skip


# plans the launch that appends to histories: see `plan_append` for its arguments
PlanAppend = Callable[[HistoryProblem, Sequence[int], int | None], Launch]
_plans: PlanCache[CachedLaunch | CachedFoldAndDecode] = PlanCache()


def decode_with_history(
    problem: HistoryProblem, plan: PlanAppend | None = None
) -> CachedLaunch | CachedFoldAndDecode | None:
    """See `Backend`. `plan`: plans the launch that appends, if not `plan_append`."""
    p, offsets = problem, kernel_offsets(problem.q.device, problem.cu_seqlens)
    cached = _plans.get((plan, *_key(p)), lambda: _first(p, plan or plan_append))
    cached(*(p if offsets is p.cu_seqlens else replace(p, cu_seqlens=offsets)).tensors())
    # offsets were copied, or the launch was recorded for another GPU: the launch cannot be repeated
    if offsets is not p.cu_seqlens or is_recording():
        return None
    return cached


def _first(p: HistoryProblem, plan: PlanAppend) -> CachedLaunch | CachedFoldAndDecode:
    tensors, sizes = p.tensors(), sample_num_states(machine(p.q.device))
    if appends_history(p):
        one = plan(p, (0, 0, 0), None)
        others = lambda: [(plan(p, (0, 0, 0), num), tensors) for num in sizes]  # noqa: E731
        compile_ahead(p.q.device, one.binary_key(tensors), others)
        return CachedLaunch(one, p.q.device)
    both = CachedFoldAndDecode(plan_fold(p.fold()), plain.plan_launch(p.decode()), p.q.device)
    kind = tuple(one.binary_key(given) for one, given in both.steps(*tensors))
    given = plain.launch_tensors(p.decode())
    folds = lambda: [(plan_fold(p.fold(), num), fold_tensors(p.fold())) for num in sizes]  # noqa: E731
    compile_ahead(
        p.q.device,
        kind,
        lambda: [*folds(), *((one, given) for one in plain.launches_of_other_sizes(p.decode()))],
    )
    return both


def _key(p: HistoryProblem) -> tuple[Hashable, ...]:
    """Return everything that the launches depend on, except the addresses of tensors."""
    return (
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in p.tensors()), p.q.device, p.longest,
        p.scale, p.lower_bound, p.use_qk_l2norm_in_kernel, p.allow_neg_eigval, p.state_v_first, p.room,
        p.null_slot, appends_history(p),
    )  # fmt: skip


def plan_append(
    p: HistoryProblem, starts: Sequence[int] = (0, 0, 0), num_states: int | None = None
) -> Launch:
    """Plan the launch that appends to the histories; arguments as for `decode.plan_launch`."""
    sizes, scalars, constants = describe_replay(p, starts, num_states)
    q_0, k_0, v_0 = (s // constants["UNIT"] for s in starts)
    scale_n, _, *scale = scale_strides(p.column_scale)
    scales = (scale_n, *scale, *remainder_strides(p.remainder, p.state_v_first))
    accepted = index_strides(p.num_accepted, 1)
    rest = (*scalars, *accepted, p.room, q_0, k_0, v_0, *scales)
    folds = fold_constants(p)
    if folds.pop("CHANNELS"):
        constants |= {"FOLD_PRECISION": folds["FOLD_PRECISION"]}
        return plan_channels_append(p, rest, constants, num_states)
    is_single = p.cu_seqlens is None and p.q.shape[1] == 1
    # no more programs than have a strip each: of V = 96, six strips, a fourth would write past the columns
    strips = triton.cdiv(sizes["STRIPS"], SPLITS)
    splits = triton.cdiv(sizes["STRIPS"], strips) if is_single else 1
    constants |= folds | {"BK": min(FOLDED[p.remainder is not None], constants["BS"])}
    constants |= {"IS_SINGLE": is_single, "SPLITS": splits}
    columns = wide_strip(p, sizes, constants)
    if columns is not None:
        constants |= {"BV": columns, "STRIPS": p.V // columns, "SPLITS": 2, "STAGES": 2}
        limit = {**pdl_options(machine(p.q.device)), "maxnreg": REGISTERS}
        return Launch(history_kernel, 2 * p.N * p.HV, rest, constants, 2, options=limit)
    programs = num_programs(p, sizes) * splits
    return Launch(history_kernel, programs, rest, constants, 1, options=options(sizes, p, False))


def wide_strip(p: HistoryProblem, sizes: Mapping[str, int], constants: Mapping[str, Any]) -> int | None:
    """Return the columns of a strip if programs of two warps are faster, as measured: see COLUMNS."""
    gpu = machine(p.q.device)
    by_width = COLUMNS.get((gpu.capability, p.K, p.V)) if gpu.kind == "cuda" else None
    is_filled = sizes["STRIPS"] > 1 and constants["IS_SINGLE"] and constants["AXIS"] == "k"
    is_short = all(x.element_size() == 2 for x in (p.q, p.history_u, p.history_k))
    is_measured = is_short and constants["PASTS"] == 1 and p.remainder is None
    return by_width.get(p.state.element_size()) if by_width and is_filled and is_measured else None
