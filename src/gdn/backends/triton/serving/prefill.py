"""Prefill: run the chunked rule on the states of an engine's pool, in place or on copies, all on the GPU.

A pool of dense states is read and updated in place, and o is stored in the caller's tensor (`rule.pool`).
Otherwise, and where checkpoints or snapshots are stored, or `hopper` cuts sequences into segments:

    gather     pool slots -> initial states, fp32; zeros for a new sequence or an invalid slot
    the rule   its forward; it keeps S_in of each chunk if checkpoints or snapshots need it
    snapshot   the state inside a sequence: up to 63 steps from the state of its chunk
    scatter    final states -> pool slots, states inside prompts -> checkpoints
    clear      zero output for sequences without a slot
    reset      with histories: empty those of the slots that got a state

States in integers are rounded by scatter and snapshot, in the launch that stores them anyway.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from gdn.backends.backend import Saved
from gdn.backends.triton.launch import Launch, PlanCache, device_guard, machine, unit_of
from gdn.backends.triton.launch.launches import compile_with_next
from gdn.backends.triton.rule import run as chunked
from gdn.backends.triton.rule.describe import to_kernel_layout
from gdn.backends.triton.rule.pool import StatePool, pool_of
from gdn.backends.triton.serving.gates import gate_layout
from gdn.backends.triton.serving.prefill_kernels import (
    clear_kernel,
    gather_kernel,
    reset_kernel,
    scatter_kernel,
    snapshot_kernel,
)
from gdn.backends.triton.serving.state_tiles import (
    magic_numbers,
    pick_tile,
    pool_strides,
    remainder_strides,
    scale_strides,
)
from gdn.problem import CHUNK, PrefillProblem, Problem
from gdn.problem.history import COLUMNS


@dataclass(frozen=True)
class Prefill:
    """Hold the launches of one prefill around that of the rule.

    `snapshot` is None if none is requested, `reset` for a pool without histories.
    """

    gather: Launch
    snapshot: Launch | None
    scatter: Launch
    clear: Launch
    reset: Launch | None


_plans: PlanCache[Prefill] = PlanCache()
Forward = Callable[[Problem, torch.dtype | None, StatePool | None], tuple[Tensor, Tensor | None, Saved]]


def prefill(problem: PrefillProblem, forward: Forward = chunked.forward, is_in_place: bool = True) -> None:
    """See `Backend`; writes problem.state, problem.checkpoints, problem.out and problem.cursor.

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
            _finish(p, rule, plan, o)
            return
        initial = p.q.new_empty(rule.state_shape, dtype=torch.float32)
        plan.gather(p.state, p.column_scale, p.remainder, p.state_index, p.has_initial_state, initial)
        kept = torch.float32 if p.keeps_states else None
        o, final, saved = forward(replace(rule, initial_state=initial), kept, None)
        S_in = None if kept is None else saved.S_in
        if plan.snapshot is not None:
            plan.snapshot(
                rule.q, rule.k, rule.v, rule.g, rule.beta, rule.A_log, rule.dt_bias, initial, final,
                S_in, rule.cu_seqlens, p.state_index, p.snapshot_pos, p.snapshot_index, p.state,
                p.column_scale, p.remainder,
            )  # fmt: skip
        plan.scatter(
            final, S_in, rule.cu_seqlens, p.state_index, p.out_state_index, p.checkpoint_offsets,
            p.state, p.column_scale, p.remainder, p.checkpoints,
        )  # fmt: skip
        _finish(p, rule, plan, o)


def _finish(p: PrefillProblem, rule: Problem, plan: Prefill, o: Tensor) -> None:
    """Copy o to the caller's tensor, unless it is there already, and clear it where a sequence has no slot.

    Then empty the histories of the slots that got a state.
    """
    if o is not p.out:
        # the caller's tensor may have any strides
        p.out.copy_(o)
    plan.clear(p.out, rule.cu_seqlens, p.state_index)
    if plan.reset is not None:
        plan.reset(
            p.cursor, rule.cu_seqlens, p.state_index, p.out_state_index, p.snapshot_pos, p.snapshot_index
        )


def _key(p: PrefillProblem, rule: Problem) -> Hashable:
    """Return everything that the launches depend on, except the addresses of tensors."""
    tensors = (
        rule.q, rule.k, rule.v, rule.g, rule.beta, rule.A_log, rule.dt_bias, rule.cu_seqlens, p.state,
        p.state_index, p.out_state_index, p.has_initial_state, p.checkpoints, p.checkpoint_offsets,
        p.snapshot_pos, p.snapshot_index, p.out, p.column_scale, p.remainder, p.cursor,
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
    # int8 has the tiles of 16-bit states
    width = max(2, p.state.element_size())
    part = pick_tile(p.K, p.V, axis or "k", width, unit if axis else 1, machine(p.q.device))
    constants = {
        "K": p.K, "V": p.V, **part.constants(), "AXIS": axis, "OWN_AXIS": "k" if p.state_v_first else "v",
        "UNIT": unit,
    }  # fmt: skip
    counting = {"C": CHUNK, "BLOCK": 256}  # BLOCK: offsets of cu_seqlens loaded at once
    slots = (p.state.shape[0], 0 if p.null_slot is None else 1)
    programs = p.N * p.HV * part.blocks(p.V)
    index, heads = p.state_index.stride(0), (p.HV, *magic_numbers(p.HV))
    scale_n, _, *scale = scale_strides(p.column_scale)
    scales = (scale_n, *scale, *remainder_strides(p.remainder, p.state_v_first))
    gather = Launch(
        gather_kernel, programs, (n, h, k, v, index, _stride(p.has_initial_state), *heads, *slots, *scales),
        constants, part.num_warps,
    )  # fmt: skip
    scatter = Launch(
        scatter_kernel,
        programs,
        (
            n, h, k, v, kept[0], *kept[2:], index, _stride(p.out_state_index), _stride(p.checkpoint_offsets),
            *heads, *slots, 0 if p.checkpoints is None else p.checkpoints.shape[0], p.checkpoint_every,
            *scales,
        ),
        constants
        | counting
        | {"KEPT_AXIS": kept_axis, "KEPT_UNIT": kept_unit, "UPDATE": p.update_state},
        part.num_warps,
    )  # fmt: skip
    clear = _plan_clear(p, (*heads, *slots))
    compile_with_next([(clear, (p.out, rule.cu_seqlens, p.state_index))])
    reset = None if p.cursor is None else _plan_reset(p)
    if p.snapshot_pos is None:
        return Prefill(gather, None, scatter, clear, reset)
    most = min(16 // width, unit)  # loads of q and k are as wide as those of the state
    token_unit = min(most, unit_of(*rule.q.stride()[1:3], *rule.k.stride()[1:3]))
    gates = gate_layout(rule, rule.g, rule.beta, most)
    snapshot = Launch(
        snapshot_kernel,
        programs,
        (
            *(s // token_unit for s in (*rule.q.stride()[1:3], *rule.k.stride()[1:3])),
            *rule.v.stride()[1:3], *gates.g[1:], *gates.beta[1:], gates.dt_bias, 1,
            n, h, k, v, index, _stride(p.snapshot_pos), _stride(p.snapshot_index), *heads,
            *magic_numbers(p.HV // p.H), *slots, p.scale, p.lower_bound, *scales,
        ),
        {
            **constants, **counting, "TOKEN_UNIT": token_unit, "NORM": p.use_qk_l2norm_in_kernel,
            "RAW": p.a is not None, "NEGATIVE": p.allow_neg_eigval, "CHANNELS": gates.channels,
        },
        part.num_warps,
    )  # fmt: skip
    return Prefill(gather, snapshot, scatter, clear, reset)


def _plan_clear(p: PrefillProblem, heads_and_slots: tuple[int, ...]) -> Launch:
    scalars = (*p.out.stride()[1:], p.state_index.stride(0), *heads_and_slots)
    constants = {"V": p.V, "BV": triton.next_power_of_2(p.V), "C": 16}
    return Launch(clear_kernel, p.N * p.HV, scalars, constants, 4)


def _plan_reset(p: PrefillProblem) -> Launch:
    assert p.cursor is not None
    indices = (p.state_index, p.out_state_index, p.snapshot_pos, p.snapshot_index)
    scalars = (
        p.cursor.stride(0), *map(_stride, indices), p.N, p.state.shape[0], 0 if p.null_slot is None else 1,
    )  # fmt: skip
    constants = {"UPDATE": p.update_state, "COLUMNS": COLUMNS, "BLOCK": 128}
    return Launch(reset_kernel, triton.cdiv(p.N, 128), scalars, constants, 4)


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)
