"""Launch the chunked rule in two steps, between which a rank exchanges states with others; see `Backend`.

    forward     begin: prepare; state passes without outputs, for N | M         finish: state pass, outputs
    backward    begin: pairs; backward state pass, for C                        finish: gradients

Only a rank with rows that enter and rows that leave has state passes twice: its C and N come from one with
dS = 0 and S_0 = 0, and a second one starts from the right state. Any other kernel runs once.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gdn.backends.backend import Borders, FinishBackward, FinishForward, Gradients, Kept
from gdn.backends.borders import begin_whole, row_index, saved_of, start_columns, states_at
from gdn.backends.triton.launch import allocate, device_guard, machine
from gdn.backends.triton.rule import choose, run
from gdn.backends.triton.rule.build import build_transfer
from gdn.backends.triton.rule.describe import describe, operand_dtype, tensors_of, to_kernel_layout
from gdn.backends.triton.rule.pool import NO_POOL
from gdn.backends.triton.rule.zero_unused import zero_unused_tiles
from gdn.notation import State, Values
from gdn.problem import Problem


def forward_begin(problem: Problem, borders: Borders, save: bool) -> tuple[Tensor | None, FinishForward]:
    """See `Backend`."""
    if borders.leaving and not borders.entering:
        return begin_whole(problem, borders, lambda p: _forward(p, save))
    p = to_kernel_layout(problem)
    # the state that will enter is in fp32: plan for it, without memory of its own
    state = p.v.new_zeros((), dtype=p.state_dtype).expand(p.state_shape)
    p = replace(p, layout_key=None, initial_state=state)
    with device_guard(p.device):
        plan = run.forward_plan(p, operand_dtype(p) if save else None)
        new = allocate(p.device, plan.specs)
        plan.run_prepare([*tensors_of(p), *new])
        transfers = None
        if borders.leaving:
            start = start_columns(problem, borders)[: 2 if borders.with_maps else 1]
            transfers = _transfers(p, start, new)[row_index(borders.leaving, p.device)]

    def finish(initial_state: State | None) -> tuple[Values, State | None, Kept]:
        assert initial_state is not None
        with device_guard(p.device):
            plan.run_state([*tensors_of(replace(p, initial_state=initial_state.contiguous())), *new])
        o, final, saved = run.forward_results(new, p)
        if save:
            zero_unused_tiles(p, saved)
        return o, final, tuple(saved) if save else ()

    return transfers, finish


def _forward(problem: Problem, save: bool) -> tuple[Values, State | None, Kept]:
    o, final, saved = run.chunk_forward(problem, save)
    return o, final, tuple(saved) if save else ()


def _transfers(p: Problem, start: tuple[Tensor, ...], new: list[Tensor | None]) -> Tensor:
    """Return N | M of all rows, [N, HV, K, V+K]: one state pass for each, from `start`; N alone from one.

    new: the tensors of the forward, of which `prepare` has written A_inv and the factors.
    """
    _, A_inv, _, factors, _, _, _, _, _, _, table, *rest = new
    none, rows = rest[: len(NO_POOL[0])], rest[len(NO_POOL[0]) :]
    # with a decay per key channel the state pass reads rows k_in and k_out in the place of k
    k = rows[1] if rows else p.k
    # M is the state of columns without values: one row of zeros in HBM serves all tokens
    zeros = p.v.new_zeros(p.K).expand(*p.v.shape[:3], p.K)
    ends = []
    for v, initial_state in zip((p.v, zeros), start, strict=False):
        columns = replace(p, layout_key=None, v=v)
        end = torch.empty_like(initial_state)
        launch = build_transfer(columns, describe(columns), choose.transfer_tiles(columns, machine(p.device)))
        launch(k, v, A_inv, factors, initial_state, p.cu_seqlens, table, None, None, end, *none)
        ends.append(end)
    return torch.cat(ends, -1)


def backward_begin(
    problem: Problem, kept: Kept, do: Tensor | None, dS: Tensor | None, borders: Borders
) -> tuple[Tensor | None, FinishBackward]:
    """See `Backend`."""
    p = to_kernel_layout(problem)
    saved, do, dS = run.backward_inputs(p, saved_of(kept), do, dS)
    given = (*tensors_of(p), *saved, do)
    C = None
    with device_guard(p.device):
        begun = run.backward_plan(p, saved, do, dS)
        new = allocate(p.device, begun.specs)
        begun.run_pairs([*given, dS, *new])
        if borders.entering:
            begun.run_state([*given, dS, *new])
            _, _, _, dinitial_state, *_ = new
            assert dinitial_state is not None
            C = states_at(dinitial_state, borders.entering, p.state_v_first)

    def finish(dS: Tensor | None) -> Gradients:
        dS = None if dS is None else dS.contiguous()
        with device_guard(p.device):
            plan = run.backward_plan(p, saved, do, dS)
            if borders.leaving or not borders.entering:
                plan.run_state([*given, dS, *new])
            # free P and P_rest before the late tensors are allocated: this lowers peak memory
            del new[-plan.num_early :]
            late = allocate(p.device, plan.late)
            plan.run_late([*given, dS, *new, *late])
        return run.backward_results(p, new, late)

    return C, finish
