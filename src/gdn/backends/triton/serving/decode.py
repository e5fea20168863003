"""Decode in one launch: the step of `recurrent` between a read from the engine's pool and a write to it.

A program takes some columns of the state of one row and value head through all of the row's tokens. The
state stays in fp32 registers; the launch also looks up the slots to read and write. At B = 1, 32 heads of
128 x 128, tiles of 8 columns make 512 programs of one warp: 16 KB of loads in flight on each of 132 SMs,
which is what their share of 4.2 TB/s needs at 0.5 us of latency.

The loads of the first token are issued before the slot index arrives, so their latencies overlap. Launches
use programmatic dependent launch (`launch.pdl`): the next kernel's programs start while this one's states are
in flight. At 128 registers a thread, too few programs are resident to saturate HBM, so each program
prefetches into L2 the state tile of the program that will take its place: at B = 256 139 us instead of 145 in
bf16, 266 instead of 271 in fp32 (H200). With exact_packet=False, `packet` runs packets that write at most one
state.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
import triton.language as tl
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from gdn.backends.triton.launch import (
    CachedLaunch,
    Launch,
    PlanCache,
    compile_ahead,
    device_guard,
    is_recording,
    kernel,
    machine,
    unit_of,
)
from gdn.backends.triton.launch.pdl import launch_dependents, pdl_options, supports_pdl, wait_previous
from gdn.backends.triton.lib import column_mask
from gdn.backends.triton.serving import packet
from gdn.backends.triton.serving.decode_strips import in_strips, length_key, strips_num_states
from gdn.backends.triton.serving.gates import gate_layout
from gdn.backends.triton.serving.packet import index_strides, supports_packet
from gdn.backends.triton.serving.packet_lib import load_slot
from gdn.backends.triton.serving.pool_lib import (
    load_scales,
    load_state,
    round_columns,
    scaled_state,
    store_state,
)
from gdn.backends.triton.serving.recurrent_lib import (
    advance_token,
    decay_pointers,
    divide,
    key_offsets,
    limit_tokens,
    load_gate_parameters,
    load_token,
    locate_program,
    prefetch_columns,
    spoil_longer_row,
    store_nan,
    tile_indices,
    tile_pointers,
    token_range,
)
from gdn.backends.triton.serving.state_tiles import (
    RESIDENT,
    kernel_offsets,
    magic_numbers,
    most_tokens,
    pick_tile,
    pool_strides,
    scale_strides,
)
from gdn.backends.triton.serving.structs import (
    GateParameters,
    Gates,
    GateStrides,
    HeadStates,
    Slots,
    TileColumns,
    Token,
    Tokens,
    group_constants,
)
from gdn.problem import DecodeProblem

# maxnreg of the largest tiles of 16-bit states, by "no next token in registers, at most 128 keys". Of more
# keys a lane holds twice as many of q and k: ptxas spills some 700 bytes a lane in 128 registers.
REGISTERS = {True: 128, False: 160}
INT16_REGISTERS = 136  # of many rows of one token, on states in int16 with their scales


@kernel
def decode_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, column_scale_ptr,
    cu_seqlens_ptr, read_index_ptr, num_accepted_ptr, ring_pos_ptr, write_index_ptr, intermediate_ptr,
    intermediate_row_ptr, parent_ptr, o_ptr,
    q_b, q_t, q_h, q_0, k_b, k_t, k_h, k_0, q_k, k_k, v_b, v_t, v_h, v_v, v_0, o_b, o_t, o_h, o_v,
    g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h,
    state_n, state_r, state_h, state_k, state_v, kept_n, kept_t, kept_h, kept_k, kept_v,
    read_n, read_c, accepted_n, ring_n, write_n, write_t, kept_row_n, parent_n, parent_t,
    N, T, HV, HV_magic, HV_s, ratio_magic, ratio_s, slots, lowest, columns, entries, kept_rows, scale,
    g_k, dt_bias_k, lower_bound, scale_n, scale_r, scale_h, scale_v, most,
    K: tl.constexpr, V: tl.constexpr, A: tl.constexpr, J: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    R_FIRST: tl.constexpr, AXIS: tl.constexpr, KEPT_AXIS: tl.constexpr, DENSE: tl.constexpr,
    UNIT: tl.constexpr, STATE_UNIT: tl.constexpr, KEPT_UNIT: tl.constexpr, WRITE: tl.constexpr,
    ROUND: tl.constexpr, NORM: tl.constexpr, NEGATIVE: tl.constexpr, IS_SINGLE: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr, HAS_NEXT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # S <- e^g S + k d^T,  d = beta (v - e^g k S),  o = scale q S, for each token of a row; Diag(e^g) S with
    # CHANNELS, the unit of the strides of a decay per key channel.
    # Program (row, head, block): A * B value columns of S in fp32 registers. Grid: (N, + 1 if packed) * HV *
    # BLOCKS; 1 warp. Reads the tile of S once from the pool, and q, k, v and gates per token.
    # Writes o per token; S to the pool once (WRITE "final") or per token ("all"), and to `intermediate`.
    # PDL: it waits for the previous kernel before its first load; the next one starts after its load of S.
    C: tl.constexpr = group_constants(
        NORM=NORM, DECAY=(a_ptr is not None) or (g_ptr is not None), GATE=a_ptr is not None,
        SIGMOID=a_ptr is not None, NEGATIVE=NEGATIVE, CHANNELS=CHANNELS,
    )  # fmt: skip
    if PDL:
        wait_previous()
    BLOCKS: tl.constexpr = (V + A * B - 1) // (A * B)
    row, head, block = locate_program(HV, HV_magic, HV_s, BLOCKS)
    first, total = token_range(cu_seqlens_ptr, row, N, T)
    if IS_SINGLE:
        total = 1  # a constant removes the loop and the registers of a next token
    count = limit_tokens(cu_seqlens_ptr, total, most)
    slots_read = Slots(
        read_index_ptr, num_accepted_ptr, ring_pos_ptr, read_n, read_c, accepted_n, ring_n, columns, entries
    )
    slot, entry = load_slot(row, N, slots_read)
    kept_row = row
    if intermediate_row_ptr is not None:
        kept_row = tl.load(intermediate_row_ptr + row * kept_row_n, mask=row < N, other=-1).to(tl.int64)
    is_kept = (kept_row >= 0) & (kept_row < kept_rows)

    keys, values = tile_indices(block, A, J, B, W, AXIS, R_FIRST)
    has_key, has_value = keys < K, values < V
    in_state = has_key & has_value[:, None, :, None]
    key_head = divide(head, ratio_magic, ratio_s)
    q_at = q_ptr + (row * q_b + first * q_t + key_head * q_h + q_0) * UNIT
    k_at = k_ptr + (row * k_b + first * k_t + key_head * k_h + k_0) * UNIT
    q_at += key_offsets(keys, q_k, A, B, AXIS, R_FIRST, DENSE)
    # these loads are issued before S: the latency of q, k, v and gates overlaps that of the slot index
    k_at += key_offsets(keys, k_k, A, B, AXIS, R_FIRST, DENSE)
    v_at = v_ptr + row * v_b + first * v_t + head * v_h + values * v_v + v_0
    o_at = o_ptr + row * o_b + first * o_t + head * o_h + values * o_v
    gates = Gates(g_ptr, beta_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr)
    strides = GateStrides(g_b, g_t, g_h, beta_b, beta_t, beta_h, A_log_h, dt_bias_h)
    if a_ptr is not None:
        g_ptr, beta_ptr = a_ptr, b_ptr
    # each channel's decay is computed once, in one lane; the lanes of a tile have each key A or B times
    channels, along, bias_along = tl.arange(0, J * W), 0, 0
    has_channel = column_mask(channels, K)
    if CHANNELS:
        along = channels if DENSE else channels * g_k
        bias_along = channels if DENSE else channels * dt_bias_k
    if g_ptr is not None:
        g_ptr = decay_pointers(g_ptr, row * g_b + first * g_t + head * g_h, along, CHANNELS)
    if beta_ptr is not None:
        beta_ptr += row * beta_b + first * beta_t + head * beta_h
    at = tl.full([], 0, tl.int64)
    tokens = Tokens(q_at, k_at, v_at, g_ptr, beta_ptr, q_t, k_t, v_t, g_t, beta_t, has_channel)
    q, k, v, g, beta = load_token(tokens, at, count, has_key, has_value, UNIT, CHANNELS)
    rate, bias = load_gate_parameters(gates, strides, head, bias_along, has_channel, lower_bound, CHANNELS)
    gate = GateParameters(rate, bias, lower_bound)

    # row N, the tokens past the last sequence, has no slot: output zero
    is_idle = (slot < lowest) | (slot >= slots) | (row >= N)
    if parent_ptr is not None:
        is_idle |= is_kept == 0
    # not an early return: exporters look for the stores of a kernel, and do not follow jumps
    if is_idle:
        for _ in range(total):
            tl.store(o_at + at * o_t, tl.zeros([A, B], o_ptr.dtype.element_ty), mask=has_value)
            at += 1
    else:
        store_nan(o_at, o_t, count, total, has_value)
        scale_ptr = column_scale_ptr
        if column_scale_ptr is not None:
            scale_ptr += head.to(tl.int64) * scale_h
        pool = HeadStates(
            state_ptr + head.to(tl.int64) * state_h * STATE_UNIT, state_n, state_r, state_k, state_v,
            scale_ptr, scale_n, scale_r, scale_v,
        )  # fmt: skip
        tile = TileColumns(keys, values, in_state, has_value)
        S, column_scale = load_state(pool, tile, slot, entry, STATE_UNIT, AXIS), None
        if column_scale_ptr is not None:
            column_scale = load_scales(pool, tile, slot, entry)
        if PDL:
            launch_dependents()
        # L2: the program AHEAD ids later runs when this one's registers are free; prefetch its state tile
        if AHEAD > 0:  # noqa: SIM102 - a constant, and what only then is compiled
            if tl.program_id(0) + AHEAD < tl.num_programs(0):
                row_then, head_then, block_then = locate_program(HV, HV_magic, HV_s, BLOCKS, AHEAD)
                slot_then, entry_then = load_slot(row_then, N, slots_read)
                if (slot_then >= lowest) & (slot_then < slots):
                    then = slot_then * state_n + entry_then * state_r + head_then * state_h
                    prefetch_columns(
                        state_ptr + then * STATE_UNIT, block_then * (A * B), state_v, A * B,
                        K * state_ptr.dtype.element_ty.primitive_bitwidth // (8 * 128), STATE_UNIT,
                    )  # fmt: skip
        S = S.to(tl.float32)
        root, root_scale = S, column_scale
        if intermediate_ptr is not None:
            kept = intermediate_ptr + (kept_row * kept_n + head.to(tl.int64) * kept_h) * KEPT_UNIT

        for _ in range(count):
            if HAS_NEXT:
                # load the next token from HBM while this one is computed in registers
                q_next, k_next, v_next, g_next, beta_next = load_token(
                    tokens, at + 1, count, has_key, has_value, UNIT, CHANNELS
                )
            if parent_ptr is not None:
                # the parent of the first token is ignored
                before = tl.load(parent_ptr + row * parent_n + at * parent_t, mask=at > 0, other=-1)
                before = tl.minimum(before.to(tl.int64), at - 1)
                if before < 0:
                    S = root
                    if column_scale_ptr is not None:
                        column_scale = root_scale
                else:
                    before_place = tile_pointers(
                        kept + before * kept_t * KEPT_UNIT, keys, values, kept_k, kept_v, KEPT_UNIT, KEPT_AXIS
                    )
                    S = tl.load(before_place, mask=in_state, other=0.0).to(tl.float32)
                    if column_scale_ptr is not None:
                        column_scale = tl.full([A, B], 1.0, tl.float32)
            S, o = advance_token(S, Token(q, k, v, g, beta), gate, scale, C, column_scale)
            if column_scale_ptr is not None:
                column_scale = tl.full([A, B], 1.0, tl.float32)
            if ROUND and column_scale_ptr is not None:
                S, column_scale = round_columns(S)
            elif ROUND:
                S = S.to(state_ptr.dtype.element_ty).to(tl.float32)
            tl.store(o_at + at * o_t, o.to(o_ptr.dtype.element_ty), mask=has_value)
            if intermediate_ptr is not None:
                kept_place = tile_pointers(
                    kept + at * kept_t * KEPT_UNIT, keys, values, kept_k, kept_v, KEPT_UNIT, KEPT_AXIS
                )
                if is_kept:
                    kept_state = scaled_state(S, column_scale).to(intermediate_ptr.dtype.element_ty)
                    tl.store(kept_place, kept_state, mask=in_state)
                    if parent_ptr is not None:
                        # another thread of this program may read this state from HBM for a later token
                        tl.debug_barrier()
            if WRITE == "all":
                target = slot
                if ring_pos_ptr is not None:
                    entry = tl.where(entry + 1 == entries, 0, entry + 1)
                else:
                    target = tl.load(write_index_ptr + row * write_n + at * write_t).to(tl.int64)
                if (target >= lowest) & (target < slots):
                    store_state(scaled_state(S, column_scale), pool, tile, target, entry, STATE_UNIT, AXIS)
            at += 1
            if HAS_NEXT:
                q, k, v, g, beta = q_next, k_next, v_next, g_next, beta_next
            else:
                q, k, v, g, beta = load_token(tokens, at, count, has_key, has_value, UNIT, CHANNELS)
        if WRITE == "final":
            S = spoil_longer_row(S, count, total)
            target = slot
            if write_index_ptr is not None:
                target = tl.load(write_index_ptr + row * write_n).to(tl.int64)
            if (target >= lowest) & (target < slots) & (total > 0):
                store_state(scaled_state(S, column_scale), pool, tile, target, entry, STATE_UNIT, AXIS)


@dataclass(frozen=True)
class CachedDecode(CachedLaunch):
    """Repeat the launch of a decode."""

    def packed(self, problem: DecodeProblem, mixed_qkv: Tensor) -> "CachedPacked":
        """Return the launch for calls that give one tensor for q, k and v, at the problem's offsets in it."""
        p, first = problem, mixed_qkv.storage_offset()
        starts = [int(x.storage_offset() - first) for x in (p.q, p.k, p.v)]
        return CachedPacked(plan_launch(p, starts), self.device)


class CachedPacked(CachedLaunch):
    """Repeat the launch of a decode whose q, k and v are in one tensor."""

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch with the tensors of `decode_packed`, in its order."""
        mixed_qkv, state, a, b, *rest = tensors
        with device_guard(self.device):
            self.launch(mixed_qkv, mixed_qkv, mixed_qkv, state, None, None, a, b, *rest)


_plans: PlanCache[CachedDecode] = PlanCache()


def decode(problem: DecodeProblem) -> CachedDecode | None:
    """Decode into problem.state, problem.intermediate and problem.out (see `Backend`).

    Return the launch for later calls. Under a compiler's trace the kernel itself becomes part of the graph.
    """
    p, offsets = problem, kernel_offsets(problem.q.device, problem.cu_seqlens)
    if isinstance(p.q, FunctionalTensor):
        plan_launch(p).trace(launch_tensors(p))
        return None
    cached = _plans.get(_key(p), lambda: _first(p))
    # the host passes addresses only: nothing is read from the GPU
    cached(*launch_tensors(p if offsets is p.cu_seqlens else replace(p, cu_seqlens=offsets)))
    # offsets were copied, or the launch was recorded for another GPU: the launch cannot be repeated
    if offsets is not p.cu_seqlens or is_recording():
        return None
    return cached


def _first(p: DecodeProblem) -> CachedDecode:
    one, tensors = plan_launch(p), launch_tensors(p)
    others = lambda: [(other, tensors) for other in launches_of_other_sizes(p)]  # noqa: E731
    compile_ahead(p.q.device, (one.binary_key(tensors), length_key(p)), others)
    return CachedDecode(one, p.q.device)


def launch_tensors(p: DecodeProblem) -> tuple[Tensor | None, ...]:
    """Return the problem's tensors in the order of the kernel's parameters."""
    return (
        p.q, p.k, p.v, p.state, p.g, p.beta, p.a, p.b, p.A_log, p.dt_bias, p.column_scale, p.cu_seqlens,
        p.read_index, p.num_accepted, p.ring_pos, p.write_index, p.intermediate, p.intermediate_row, p.parent,
        p.out,
    )  # fmt: skip


def _key(p: DecodeProblem) -> Hashable:
    """Return everything that the launch depends on, except the addresses of tensors."""
    return (
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in launch_tensors(p)),
        p.q.device, p.scale, p.lower_bound, p.use_qk_l2norm_in_kernel, p.allow_neg_eigval, p.write,
        p.null_slot, p.round_state, p.state_v_first, *length_key(p),
    )  # fmt: skip


def launches_of_other_sizes(p: DecodeProblem) -> list[Launch]:
    """Return the launches for few and for many rows: other numbers of rows and heads use these binaries."""
    sizes = {*packet.sample_num_states(machine(p.q.device)), *strips_num_states(p)}
    return [plan_launch(p, num_states=num_states) for num_states in sorted(sizes)]


def plan_launch(p: DecodeProblem, starts: Sequence[int] = (0, 0, 0), num_states: int | None = None) -> Launch:
    """Return the launch of a decode. `starts`: offsets of q, k and v in the tensors that will be given.

    `num_states`: rows times heads for which tiles are chosen, if not the problem's.
    """
    if supports_packet(p):
        return packet.plan(p, starts, num_states)
    axis, state_unit, state = pool_strides(p.state, p.K, p.V, p.state_v_first)
    kept_axis, kept_unit, kept = "", 1, tuple([0] * 5)
    if p.intermediate is not None:
        kept_axis, kept_unit, kept = pool_strides(p.intermediate, p.K, p.V, p.state_v_first)
    # fp32 and 16-bit states have different tiles: the registers of a tile are what counts
    width, gpu = p.state.element_size(), machine(p.q.device)
    num_states = p.N * p.HV if num_states is None else num_states
    part = pick_tile(p.K, p.V, axis or "k", width, state_unit if axis else 1, gpu, num_states=num_states)
    is_packed = p.cu_seqlens is not None
    # loads of q and k as wide as those of the state give each lane the same keys: no shuffles
    unit = min(16 // width, state_unit, unit_of(*p.q.stride()[:3], *p.k.stride()[:3], *starts[:2]))
    q, k, v, o = ((0 if is_packed else x.stride(0), *x.stride()[1:3]) for x in (p.q, p.k, p.v, p.out))
    gates = gate_layout(p, *((p.g, p.beta) if p.a is None else (p.a, p.b)), min(16 // width, state_unit))
    is_dense = p.q.stride(3) == p.k.stride(3) == 1 and gates.is_dense
    scalars = (
        *(s // unit for s in (*q, starts[0], *k, starts[1])), p.q.stride(3), p.k.stride(3),
        *v, p.v.stride(3), starts[2], *o, p.out.stride(3), *gates.g, *gates.beta, gates.A_log, gates.dt_bias,
        *state, *kept, *index_strides(p.read_index, 2), *index_strides(p.num_accepted, 1),
        *index_strides(p.ring_pos, 1), *index_strides(p.write_index, 2),
        *index_strides(p.intermediate_row, 1), *index_strides(p.parent, 2), p.N, p.q.shape[1], p.HV,
        *magic_numbers(p.HV), *magic_numbers(p.HV // p.H), p.state.shape[0],
        0 if p.null_slot is None else 1,
        p.read_index.shape[1] if p.num_accepted is not None and p.read_index is not None else 1,
        p.state.shape[1] if p.ring_pos is not None else 1,
        0 if p.intermediate is None else p.intermediate.shape[0], p.scale, *gates.rest,
        *scale_strides(p.column_scale), most_tokens(p),
    )  # fmt: skip
    is_single, is_full = not is_packed and p.q.shape[1] == 1, part.is_largest(p.K, p.V, axis, width, gpu)
    # a next token in registers hides the latency of its loads; without it an SM holds more programs. Few
    # programs have one, and those that spill in fewer registers: of more keys, int16, trees, channels in bf16
    is_crowded = is_full and 2 * num_states * part.blocks(p.V) > RESIDENT * gpu.num_sms
    is_lean = p.K <= 128 and p.column_scale is None and p.parent is None
    is_lean &= width == 4 or not gates.channels
    has_next = not is_single and not (is_crowded and is_lean)
    # where every token writes a state, these stores take the time, and the space in L2
    calls = is_full and (is_single or p.write != "all" and p.intermediate is None)
    constants = {
        "K": p.K, "V": p.V, **part.constants(), "AXIS": axis, "KEPT_AXIS": kept_axis, "DENSE": is_dense,
        "UNIT": unit, "STATE_UNIT": state_unit, "KEPT_UNIT": kept_unit, "WRITE": p.write,
        "ROUND": p.round_state and p.state.dtype != torch.float32, "NORM": p.use_qk_l2norm_in_kernel,
        "NEGATIVE": p.allow_neg_eigval, "IS_SINGLE": is_single, "PDL": supports_pdl(gpu),
        "AHEAD": RESIDENT * gpu.num_sms if calls else 0, "HAS_NEXT": has_next, "CHANNELS": gates.channels,
    }  # fmt: skip
    # fifteen programs an SM instead of sixteen: faster in many waves over the SMs, slower where one would do
    is_scaled = p.column_scale is not None and num_states >= RESIDENT * gpu.num_sms
    limit = {"maxnreg": max(REGISTERS[not has_next and p.K <= 128], INT16_REGISTERS if is_scaled else 0)}
    grid = (p.N + int(is_packed)) * p.HV * part.blocks(p.V)
    options = pdl_options(gpu) | (limit if is_full and width == 2 else {})
    one = Launch(decode_kernel, grid, scalars, constants, part.num_warps, options=options)
    return in_strips(one, p, part, num_states)
