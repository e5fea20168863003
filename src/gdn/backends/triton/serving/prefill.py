"""Prefill: run the chunked rule on the states of an engine's pool, in place or on copies, all on the GPU.

A pool of dense states is read and updated in place, and o is stored in the caller's tensor (`rule.pool`).
Otherwise, and where checkpoints or snapshots are stored, or `hopper` cuts sequences into segments:

    gather     pool slots -> initial states, fp32; zeros for a new sequence or an invalid slot
    the rule   its forward; it keeps S_in of each chunk if checkpoints or snapshots need it
    snapshot   the state inside a sequence: up to 63 steps from the state of its chunk
    scatter    final states -> pool slots, states inside prompts -> checkpoints
    clear      zero output for sequences without a slot

A program has a tile of one state, as in `recurrent`, whose loads are coalesced for a pool in either order.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.backend import Saved
from gdn.backends.triton.launch import Launch, PlanCache, device_guard, jit, kernel, machine, unit_of
from gdn.backends.triton.launch.launches import compile_with_next
from gdn.backends.triton.rule import run as chunked
from gdn.backends.triton.rule.describe import to_kernel_layout
from gdn.backends.triton.rule.pool import StatePool, pool_of
from gdn.backends.triton.serving.gates import gate_layout
from gdn.backends.triton.serving.pool_lib import load_scales, scaled_state, store_state
from gdn.backends.triton.serving.recurrent_lib import (
    advance_token,
    decay_pointers,
    divide,
    key_offsets,
    load_gate_parameters,
    load_token,
    locate_program,
    tile_indices,
    tile_pointers,
)
from gdn.backends.triton.serving.state_tiles import magic_numbers, pick_tile, pool_strides, scale_strides
from gdn.backends.triton.serving.structs import (
    GateParameters,
    Gates,
    GateStrides,
    HeadStates,
    TileColumns,
    Token,
    Tokens,
    group_constants,
)
from gdn.problem import CHUNK, PrefillProblem, Problem


@jit
def first_chunk(cu_seqlens_ptr, n, C: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of chunks of all sequences before n."""
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int64)
    # the offsets come from L2 after the first program has read them
    for m in range(0, n, BLOCK):
        starts = tl.load(cu_seqlens_ptr + m + lanes, mask=m + lanes < n, other=0).to(tl.int64)
        ends = tl.load(cu_seqlens_ptr + m + lanes + 1, mask=m + lanes < n, other=0).to(tl.int64)
        count += (ends - starts + C - 1) // C
    return tl.sum(count)


@kernel
def gather_kernel(
    state_ptr, column_scale_ptr, index_ptr, has_initial_ptr, initial_ptr,
    state_n, state_h, state_k, state_v, index_n, has_initial_n,
    HV, HV_magic, HV_s, slots, lowest, scale_n, scale_h, scale_v,
    K: tl.constexpr, V: tl.constexpr, A: tl.constexpr, J: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    R_FIRST: tl.constexpr, AXIS: tl.constexpr, OWN_AXIS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # initial[n] = pool[slot], or zeros.
    # Program (n, head, block of V): a tile of A * B value columns, in registers.
    # Grid: N * HV * blocks, blocks fastest; warps of `pick_tile`, which is 1; no PDL.
    # Reads a tile in the pool's dtype and order; writes it in fp32, contiguous, for the chunked rule.
    n, head, block = locate_program(HV, HV_magic, HV_s, tl.cdiv(V, A * B))
    keys, values = tile_indices(block, A, J, B, W, AXIS, R_FIRST)
    mask = (keys < K) & (values < V)[:, None, :, None]
    slot = tl.load(index_ptr + n * index_n).to(tl.int64)
    is_read = (slot >= lowest) & (slot < slots)
    if has_initial_ptr is not None:
        is_read &= tl.load(has_initial_ptr + n * has_initial_n) != 0
    place = tile_pointers(
        state_ptr + (slot * state_n + head * state_h) * UNIT, keys, values, state_k, state_v, UNIT, AXIS
    )
    S = tl.load(place, mask=mask & is_read, other=0.0).to(tl.float32)
    if column_scale_ptr is not None:
        # a scale for each column of the tile, in registers; heads stand where a ring has its entries
        states = HeadStates(
            state_ptr, state_n, state_h, state_k, state_v, column_scale_ptr, scale_n, scale_h, scale_v
        )
        tile = TileColumns(keys, values, mask & is_read, (values < V) & is_read)
        S = scaled_state(S, load_scales(states, tile, slot, head))
    tl.store(
        tile_pointers(initial_ptr + (n * HV + head) * (K * V), keys, values, V, K, 1, OWN_AXIS), S, mask=mask
    )


@kernel
def scatter_kernel(
    final_ptr, S_in_ptr, cu_seqlens_ptr, index_ptr, out_index_ptr, offsets_ptr, state_ptr, column_scale_ptr,
    checkpoints_ptr,
    state_n, state_h, state_k, state_v, kept_n, kept_h, kept_k, kept_v, index_n, out_index_n, offsets_n,
    HV, HV_magic, HV_s, slots, lowest, rows, every, scale_n, scale_h, scale_v,
    K: tl.constexpr, V: tl.constexpr, A: tl.constexpr, J: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    R_FIRST: tl.constexpr, AXIS: tl.constexpr, OWN_AXIS: tl.constexpr, KEPT_AXIS: tl.constexpr,
    UNIT: tl.constexpr, KEPT_UNIT: tl.constexpr, UPDATE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # pool[slot] = final[n], and checkpoints every `every` tokens from S_in.
    # Program (n, head, block of V): a tile of A * B value columns; the final state stays in fp32 registers.
    # Grid: N * HV * blocks, blocks fastest; warps of `pick_tile`, which is 1; no PDL.
    # Reads the final state, and S_in at each checkpoint; writes the pool's slot and the checkpoints. A
    # checkpoint at the end of a sequence is the final state.
    n, head, block = locate_program(HV, HV_magic, HV_s, tl.cdiv(V, A * B))
    keys, values = tile_indices(block, A, J, B, W, AXIS, R_FIRST)
    mask = (keys < K) & (values < V)[:, None, :, None]
    slot = tl.load(index_ptr + n * index_n).to(tl.int64)
    count = (tl.load(cu_seqlens_ptr + n + 1) - tl.load(cu_seqlens_ptr + n)).to(tl.int64)
    if (slot < lowest) | (slot >= slots) | (count <= 0):
        return
    # loaded once into registers, for the pool and for a checkpoint at the end
    S = tl.load(
        tile_pointers(final_ptr + (n * HV + head) * (K * V), keys, values, V, K, 1, OWN_AXIS), mask=mask
    )
    if UPDATE:
        # the state may go to another slot than the one it came from
        if out_index_ptr is not None:
            slot = tl.load(out_index_ptr + n * out_index_n).to(tl.int64)
        is_written = (slot >= lowest) & (slot < slots)
        states = HeadStates(
            state_ptr, state_n, state_h, state_k, state_v, column_scale_ptr, scale_n, scale_h, scale_v
        )
        tile = TileColumns(keys, values, mask & is_written, (values < V) & is_written)
        store_state(S, states, tile, slot, head, UNIT, AXIS)
    if checkpoints_ptr is not None:
        # chunks before sequence n are counted on the device: the host does not know the lengths
        chunk = first_chunk(cu_seqlens_ptr, n, C, BLOCK)
        row = tl.load(offsets_ptr + n * offsets_n).to(tl.int64)
        done = tl.full([], 0, tl.int64) + every
        for _ in range(tl.where(row < 0, 0, tl.minimum(count // every, rows - row))):
            at = S_in_ptr + ((chunk + done // C) * HV + head) * (K * V)
            S_chunk = tl.load(
                tile_pointers(at, keys, values, V, K, 1, "v"), mask=mask & (done < count), other=0.0
            )
            state = tl.where(done < count, S_chunk.to(tl.float32), S)
            kept_place = tile_pointers(
                checkpoints_ptr + (row * kept_n + head * kept_h) * KEPT_UNIT, keys, values, kept_k, kept_v,
                KEPT_UNIT, KEPT_AXIS,
            )  # fmt: skip
            tl.store(kept_place, state, mask=mask)
            row += 1
            done += every


@kernel
def snapshot_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, initial_ptr, final_ptr, S_in_ptr,
    cu_seqlens_ptr, index_ptr, pos_ptr, snapshot_index_ptr, state_ptr, column_scale_ptr,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h, dt_bias_h, one,
    state_n, state_h, state_k, state_v, index_n, pos_n, snapshot_index_n,
    HV, HV_magic, HV_s, ratio_magic, ratio_s, slots, lowest, scale, lower_bound,
    scale_n, scale_h, scale_v,
    K: tl.constexpr, V: tl.constexpr, A: tl.constexpr, J: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    R_FIRST: tl.constexpr, AXIS: tl.constexpr, OWN_AXIS: tl.constexpr, UNIT: tl.constexpr,
    TOKEN_UNIT: tl.constexpr, NORM: tl.constexpr, RAW: tl.constexpr, NEGATIVE: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # pool[target] = state after pos tokens. CHANNELS: the unit of g's strides per key channel, or 0.
    # Program (n, head, block of V): a tile of A * B value columns of S, in fp32 registers over all tokens.
    # Grid: N * HV * blocks, blocks fastest; warps of `pick_tile`, which is 1; no PDL.
    # Reads one of initial, final and S_in, then up to C - 1 tokens; writes the tile of the snapshot.
    constants: tl.constexpr = group_constants(
        NORM=NORM, DECAY=g_ptr is not None, GATE=RAW, SIGMOID=RAW, NEGATIVE=NEGATIVE, CHANNELS=CHANNELS
    )
    n, head, block = locate_program(HV, HV_magic, HV_s, tl.cdiv(V, A * B))
    keys, values = tile_indices(block, A, J, B, W, AXIS, R_FIRST)
    has_key, has_value = keys < K, values < V
    mask = has_key & has_value[:, None, :, None]
    slot = tl.load(index_ptr + n * index_n).to(tl.int64)
    target = tl.load(snapshot_index_ptr + n * snapshot_index_n).to(tl.int64)
    pos = tl.load(pos_ptr + n * pos_n).to(tl.int64)
    first = tl.load(cu_seqlens_ptr + n).to(tl.int64)
    count = tl.load(cu_seqlens_ptr + n + 1).to(tl.int64) - first
    is_idle = (slot < lowest) | (slot >= slots) | (target < lowest) | (target >= slots)
    if is_idle | (pos < 0) | (pos > count):
        return
    # the state at the end needs no steps: it is the final state
    steps = tl.where(pos == count, 0, pos % C)
    state = (n * HV + head) * (K * V)
    chunk = first_chunk(cu_seqlens_ptr, n, C, BLOCK) + pos // C
    # three masked loads and a select: one of them reads HBM, the others are predicated off
    S_start = tl.load(
        tile_pointers(initial_ptr + state, keys, values, V, K, 1, OWN_AXIS), mask=mask & (pos < C), other=0.0
    )
    S_end = tl.load(
        tile_pointers(final_ptr + state, keys, values, V, K, 1, OWN_AXIS),
        mask=mask & (pos == count),
        other=0.0,
    )
    S_chunk = tl.load(
        tile_pointers(S_in_ptr + (chunk * HV + head) * (K * V), keys, values, V, K, 1, "v"),
        mask=mask & (pos >= C) & (pos < count), other=0.0,
    )  # fmt: skip
    S = tl.where(pos == count, S_end, tl.where(pos < C, S_start, S_chunk.to(tl.float32)))

    first += pos - steps
    key_head = divide(head, ratio_magic, ratio_s)
    along = key_offsets(keys, one, A, B, AXIS, R_FIRST, True)
    q_at = q_ptr + (first * q_t + key_head * q_h) * TOKEN_UNIT + along
    k_at = k_ptr + (first * k_t + key_head * k_h) * TOKEN_UNIT + along
    v_at = v_ptr + first * v_t + head * v_h + values
    gates = Gates(g_ptr, beta_ptr, None, None, A_log_ptr, dt_bias_ptr)
    strides = GateStrides(0, g_t, g_h, 0, beta_t, beta_h, 1, dt_bias_h)
    if g_ptr is not None:
        g_ptr = decay_pointers(g_ptr, first * g_t + head * g_h, along, CHANNELS)
    if beta_ptr is not None:
        beta_ptr += first * beta_t + head * beta_h
    rate, bias = load_gate_parameters(gates, strides, head, along, has_key, lower_bound, CHANNELS)
    gate = GateParameters(rate, bias, lower_bound)
    # the token recurrence with S in registers, from the start of the chunk that contains pos
    at = tl.full([], 0, tl.int64)
    tokens = Tokens(q_at, k_at, v_at, g_ptr, beta_ptr, q_t, k_t, v_t, g_t, beta_t, None)
    for _ in range(steps):
        q, k, v, g, beta = load_token(tokens, at, steps, has_key, has_value, TOKEN_UNIT, CHANNELS)
        S, _o = advance_token(S, Token(q, k, v, g, beta), gate, scale, constants)
        at += 1
    states = HeadStates(
        state_ptr, state_n, state_h, state_k, state_v, column_scale_ptr, scale_n, scale_h, scale_v
    )
    store_state(S, states, TileColumns(keys, values, mask, has_value), target, head, UNIT, AXIS)


@kernel
def clear_kernel(
    out_ptr, cu_seqlens_ptr, index_ptr, o_t, o_h, o_v, index_n, HV, HV_magic, HV_s, slots, lowest,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    # out = 0 where a sequence has no slot.
    # Program (n, head): all tokens of one head, C at a time. Grid: N * HV; 4 warps; no PDL.
    # Reads a slot index and two offsets; writes V zeros per token, or nothing if the slot is valid.
    n, head, _block = locate_program(HV, HV_magic, HV_s, 1)
    slot = tl.load(index_ptr + n * index_n).to(tl.int64)
    first = tl.load(cu_seqlens_ptr + n).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + n + 1).to(tl.int64)
    if (slot >= lowest) & (slot < slots):
        return
    values = tl.arange(0, BV)
    # C tokens at a time: a tile [C, V] of zeros in registers
    for _ in range(tl.cdiv(end - first, C)):
        tokens = first + tl.arange(0, C)
        place = out_ptr + (tokens * o_t)[:, None] + head * o_h + (values * o_v)[None, :]
        mask = (tokens < end)[:, None] & (values < V)[None, :]
        tl.store(place, tl.zeros([C, BV], out_ptr.dtype.element_ty), mask=mask)
        first += C


@dataclass(frozen=True)
class Prefill:
    """Hold the launches of one prefill around that of the rule; `snapshot` is None if none is requested."""

    gather: Launch
    snapshot: Launch | None
    scatter: Launch
    clear: Launch


_plans: PlanCache[Prefill] = PlanCache()
Forward = Callable[[Problem, torch.dtype | None, StatePool | None], tuple[Tensor, Tensor | None, Saved]]


def prefill(problem: PrefillProblem, forward: Forward = chunked.forward, is_in_place: bool = True) -> None:
    """See `Backend`; writes problem.state, problem.checkpoints and problem.out.

    forward: a function like `rule.forward`, of a problem in kernel layout and the dtype of S_in. That dtype
    is fp32: a state from which an engine resumes must not be rounded more than one that is carried on.
    is_in_place: the forward can read and update a pool in place. The bits are the same either way.
    """
    p = problem
    rule = to_kernel_layout(p.rule)
    with device_guard(p.q.device):
        plan = _plans.get(_key(p, rule), lambda: _plan(p, rule))
        pool = pool_of(p) if is_in_place else None
        if pool is not None:
            o, _, _ = forward(replace(rule, initial_state=p.state, output_final_state=False), None, pool)
            _store_outputs(p, rule, plan, o)
            return
        initial = p.q.new_empty(rule.state_shape, dtype=torch.float32)
        plan.gather(p.state, p.column_scale, p.state_index, p.has_initial_state, initial)
        kept = torch.float32 if p.keeps_states else None
        o, final, saved = forward(replace(rule, initial_state=initial), kept, None)
        S_in = None if kept is None else saved.S_in
        if plan.snapshot is not None:
            plan.snapshot(
                rule.q, rule.k, rule.v, rule.g, rule.beta, rule.A_log, rule.dt_bias, initial, final,
                S_in, rule.cu_seqlens, p.state_index, p.snapshot_pos, p.snapshot_index, p.state,
                p.column_scale,
            )  # fmt: skip
        plan.scatter(
            final, S_in, rule.cu_seqlens, p.state_index, p.out_state_index, p.checkpoint_offsets,
            p.state, p.column_scale, p.checkpoints,
        )  # fmt: skip
        _store_outputs(p, rule, plan, o)


def _store_outputs(p: PrefillProblem, rule: Problem, plan: Prefill, o: Tensor) -> None:
    """Copy o to the caller's tensor, unless it is there already; clear it where a sequence has no slot."""
    if o is not p.out:
        # the caller's tensor may have any strides
        p.out.copy_(o)
    plan.clear(p.out, rule.cu_seqlens, p.state_index)


def _key(p: PrefillProblem, rule: Problem) -> Hashable:
    """Return everything that the launches depend on, except the addresses of tensors."""
    tensors = (
        rule.q, rule.k, rule.v, rule.g, rule.beta, rule.A_log, rule.dt_bias, rule.cu_seqlens, p.state,
        p.state_index, p.out_state_index, p.has_initial_state, p.checkpoints, p.checkpoint_offsets,
        p.snapshot_pos, p.snapshot_index, p.out, p.column_scale,
    )  # fmt: skip
    return (
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors), p.q.device, p.scale,
        p.lower_bound, p.use_qk_l2norm_in_kernel, p.allow_neg_eigval, p.state_v_first, p.update_state,
        p.checkpoint_every, p.null_slot, p.a is None,
    )  # fmt: skip


def _plan(p: PrefillProblem, rule: Problem) -> Prefill:
    axis, unit, (n, _, h, k, v) = pool_strides(p.state, p.K, p.V, p.state_v_first)
    kept: tuple[int, ...] = (0, 0, 0, 0, 0)
    kept_axis, kept_unit = "", 1
    if p.checkpoints is not None:
        kept_axis, kept_unit, kept = pool_strides(p.checkpoints, p.K, p.V, p.state_v_first)
    part = pick_tile(p.K, p.V, axis or "k", p.state.element_size(), unit if axis else 1, machine(p.q.device))
    constants = {
        "K": p.K, "V": p.V, **part.constants(), "AXIS": axis, "OWN_AXIS": "k" if p.state_v_first else "v",
        "UNIT": unit,
    }  # fmt: skip
    counting = {"C": CHUNK, "BLOCK": 256}  # BLOCK: offsets of cu_seqlens loaded at once
    slots = (p.state.shape[0], 0 if p.null_slot is None else 1)
    programs = p.N * p.HV * part.blocks(p.V)
    index, heads = p.state_index.stride(0), (p.HV, *magic_numbers(p.HV))
    scale_n, _, *scale = scale_strides(p.column_scale)
    gather = Launch(
        gather_kernel, programs, (n, h, k, v, index, _stride(p.has_initial_state), *heads, *slots, scale_n,
        *scale), constants, part.num_warps,
    )  # fmt: skip
    scatter = Launch(
        scatter_kernel,
        programs,
        (
            n, h, k, v, kept[0], *kept[2:], index, _stride(p.out_state_index), _stride(p.checkpoint_offsets),
            *heads, *slots, 0 if p.checkpoints is None else p.checkpoints.shape[0], p.checkpoint_every,
            scale_n, *scale,
        ),
        constants
        | counting
        | {"KEPT_AXIS": kept_axis, "KEPT_UNIT": kept_unit, "UPDATE": p.update_state},
        part.num_warps,
    )  # fmt: skip
    clear = Launch(
        clear_kernel,
        p.N * p.HV,
        (*p.out.stride()[1:], index, *heads, *slots),
        {"V": p.V, "BV": triton.next_power_of_2(p.V), "C": 16},
        4,
    )
    compile_with_next([(clear, (p.out, rule.cu_seqlens, p.state_index))])
    if p.snapshot_pos is None:
        return Prefill(gather, None, scatter, clear)
    most = min(16 // p.state.element_size(), unit)  # loads of q and k are as wide as those of the state
    token_unit = min(most, unit_of(*rule.q.stride()[1:3], *rule.k.stride()[1:3]))
    gates = gate_layout(rule, rule.g, rule.beta, most)
    snapshot = Launch(
        snapshot_kernel,
        programs,
        (
            *(s // token_unit for s in (*rule.q.stride()[1:3], *rule.k.stride()[1:3])),
            *rule.v.stride()[1:3], *gates.g[1:], *gates.beta[1:], gates.dt_bias, 1,
            n, h, k, v, index, _stride(p.snapshot_pos), _stride(p.snapshot_index), *heads,
            *magic_numbers(p.HV // p.H), *slots, p.scale, p.lower_bound, scale_n, *scale,
        ),
        {
            **constants, **counting, "TOKEN_UNIT": token_unit, "NORM": p.use_qk_l2norm_in_kernel,
            "RAW": p.a is not None, "NEGATIVE": p.allow_neg_eigval, "CHANNELS": gates.channels,
        },
        part.num_warps,
    )  # fmt: skip
    return Prefill(gather, snapshot, scatter, clear)


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)
