"""Run the chunked rule: describe, choose, build once per problem; then allocate, launch, return.

Forward: `prepare`, the state pass, then all outputs in parallel; or, where sequences and heads fill the GPU,
`prepare` and one state scan that also computes the outputs. Backward: P and factors (`pairs`), the state pass
backwards (`state_bwd`), then the gradients per value head, per key head and of the gates. Packed sequences
need one more small launch, which makes the table of chunks.

A plan is built once for a problem's shapes, strides, dtypes and options. The first plan of its kind also
compiles, in parallel, the binaries that other numbers of heads, sequences and tokens would use.

Bytes per token and value head, K = V = 128 in bf16, HV = H, options on: forward 810 + 1430 + 1410 = 3650, or
810 + 1300 = 2110 (with S kept for a backward 2620); backward 830 + 2450 + 2730 + 3070 + 50 = 9130.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from gdn import settings
from gdn.backends.backend import Gradients, Saved
from gdn.backends.select import other_backward_launches, other_launches
from gdn.backends.triton.launch import (
    PlanCache,
    Step,
    allocate,
    allocate_placeholders,
    compile_ahead,
    device_guard,
    machine,
    unit_of,
)
from gdn.backends.triton.rule import choose
from gdn.backends.triton.rule.build import build_forward
from gdn.backends.triton.rule.describe import (
    Description,
    describe,
    kind_key,
    operand_dtype,
    problem_key,
    tensors_of,
    to_kernel_layout,
    with_dense_rows,
)
from gdn.backends.triton.rule.launches import Backward, Forward
from gdn.backends.triton.rule.launches_channels import ChannelBackward
from gdn.backends.triton.rule.pairs import NUM_FACTORS
from gdn.backends.triton.rule.pool import StatePool
from gdn.backends.triton.rule.zero_unused import zero_unused_tiles
from gdn.problem import Problem

_forwards: PlanCache[Forward] = PlanCache()
_backwards: PlanCache[Backward | ChannelBackward] = PlanCache()


def chunk_forward(problem: Problem, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
    """See `Backend`."""
    p = to_kernel_layout(problem)
    o, final, saved = forward(p, operand_dtype(p) if save else None)
    if not save:
        return o, final, Saved()
    if saved.factors is not None:
        # a copy without the rows that only a backward writes: 20 bytes of HBM a token and head, not 40
        saved = replace(saved, factors=saved.factors[:, :, :NUM_FACTORS].contiguous())
    zero_unused_tiles(p, saved)
    return o, final, saved


def recompute_saved(problem: Problem, saved: Saved) -> Saved:
    """Implement `Backend.recompute_saved`: run the state pass again, from the saved A_inv and factors."""
    p = replace(to_kernel_layout(problem), recompute=False, layout_key=None)
    kept = operand_dtype(p)
    if p.is_per_channel:
        return forward(p, kept)[2]
    given = (saved.G, saved.A_inv, None, None, saved.q_rstd, saved.k_rstd)
    with device_guard(p.device):
        plan = forward_plan(p, kept)
        # P stays unwritten: only o depends on it, which nobody reads
        new = allocate(p.device, [s if x is None else None for s, x in zip_longest(plan.specs, given)])
        new = [y if x is None else x.contiguous() for y, x in zip_longest(new, given)]
        _, _, _, factors, *_, table, _, _, _ = new  # before the slots of a pool
        # an operator returns no empty tensor: without chunks there are no factors
        if factors is not None and saved.factors is not None:
            factors[:, :, :NUM_FACTORS].copy_(saved.factors)
        if plan.table is not None:
            plan.table(p.cu_seqlens, table)
        state, tensors = next(plan.state_steps([*tensors_of(p), *new]))
        state(*tensors)
    return forward_results(new, p)[2]


def forward(
    p: Problem, kept: torch.dtype | None, pool: StatePool | None = None
) -> tuple[Tensor, Tensor | None, Saved]:
    """Run the forward of a problem in kernel layout. `kept`: the dtype of S_in; None: S_in is not kept.

    With a pool, which is then the problem's initial state, sequences read and write their slots, and o may
    be the pool's `out`.
    """
    with device_guard(p.device):
        plan = forward_plan(p, kept, pool)
        new = with_pool(allocate(p.device, plan.specs), pool)
        plan.run([*tensors_of(p), *new])
    return forward_results(new, p)


def forward_plan(p: Problem, kept: torch.dtype | None, pool: StatePool | None = None) -> Forward:
    """Return the plan of a forward, from the cache or built; `kept` and `pool` as in `forward`."""
    key = (problem_key(p), kept, None if pool is None else pool.key)
    return _forwards.get(key, lambda: first_forward(p, kept, pool))


def forward_results(new: Sequence[Tensor | None], p: Problem) -> tuple[Tensor, Tensor | None, Saved]:
    """Return o, the final state and the saved tensors among the tensors that a forward of p wrote."""
    # the order is that of `Forward.specs`
    G, A_inv, _, factors, q_rstd, k_rstd, S_in, _, final, o, *_ = new
    assert o is not None
    saved = Saved(G=G, A_inv=A_inv, S_in=S_in, q_rstd=q_rstd, k_rstd=k_rstd)
    # without `output_kernel` the plan has stored no states; else they are freed here
    factors = None if p.is_per_channel else factors
    return o, final, replace(saved, S_in=None, factors=factors) if p.recompute else saved


def chunk_backward(problem: Problem, saved: Saved, do: Tensor | None, dS: Tensor | None) -> Gradients:
    """See `Backend`."""
    p = to_kernel_layout(problem)
    saved, do, dS = backward_inputs(p, saved, do, dS)
    with device_guard(p.device):
        plan = backward_plan(p, saved, do, dS)
        new = allocate(p.device, plan.specs)
        given = (*tensors_of(p), *saved, do, dS)
        plan.run([*given, *new])
        # free P and P_rest before the late tensors are allocated: this lowers peak memory
        del new[-plan.num_early :]
        late = allocate(p.device, plan.late)
        plan.run_late([*given, *new, *late])
    return backward_results(p, new, late)


def backward_inputs(
    p: Problem, saved: Saved, do: Tensor | None, dS: Tensor | None
) -> tuple[Saved, Tensor, Tensor | None]:
    """Return the saved tensors and the gradients of the outputs as the kernels read them."""
    # what the forward did not keep in HBM is computed again
    if is_foreign(p, saved) or saved.A_inv is None or saved.S_in is None or lacks_norms(p, saved):
        saved = forward(p, operand_dtype(p))[2]
    elif saved.has_split_inverse:
        # of Hopper's forward at K = 64
        saved = replace(saved, A_inv=saved.A_inv.sum(2, dtype=torch.float32))
    # a missing do counts as zero: the kernels have no path without it
    do = torch.zeros_like(p.v) if do is None else with_dense_rows(do.to(p.v.dtype))
    if do.element_size() == 2 and unit_of(*do.stride()[:3]) == 1:
        # loaded element by element, rows would need other tiles (see `choose.equal_layouts`)
        do = do.contiguous()
    return saved, do, None if dS is None else dS.contiguous()


def backward_results(p: Problem, new: Sequence[Tensor | None], late: Sequence[Tensor | None]) -> Gradients:
    """Return the gradients among the tensors that a backward wrote."""
    dv, dg, dbeta, dS0, _, dA_log, ddt_bias, *_ = new
    dq, dk, *_ = late
    assert dq is not None and dk is not None and dv is not None
    return Gradients(dq, dk, dv.to(p.v.dtype), dg, dbeta, dA_log, ddt_bias, dS0)


def backward_plan(p: Problem, saved: Saved, do: Tensor, dS: Tensor | None) -> Any:
    """Return the plan of a backward, cached or built: Backward, or ChannelBackward per key channel."""
    # keyed by layout and dtype only: the addresses of tensors are arguments of the launch
    key = (problem_key(p), do.stride(), None if dS is None else dS.dtype, *_dtypes(saved))
    return _backwards.get(key, lambda: _first_backward(p, saved, do, dS))


def first_forward(p: Problem, kept: torch.dtype | None, pool: StatePool | None = None) -> Forward:
    """Build a forward; if it is the first of its kind, compile those of other sizes in parallel."""
    description = describe(p)

    def steps() -> Iterator[Step]:
        yield from forward_launches(p, kept, pool)
        yield from other_launches(p, kept, pool, "triton")

    # another backend's launches are among them only if the caller named no backend
    is_shared = settings.backend(p.backend) is None
    kind = ("forward", kind_key(p, description), kept, None if pool is None else pool.kind, is_shared)
    compile_ahead(p.device, kind, steps)
    return build_forward(p, kept, description, choose.forward_tiles(p, machine(p.device)), pool)


def forward_launches(p: Problem, kept: torch.dtype | None, pool: StatePool | None = None) -> Iterator[Step]:
    """Yield the launches of forwards of this kind, of any size, on placeholders for allocated tensors."""
    description = describe(p)
    for tiles in choose.all_forward_tiles(p, machine(p.device)):
        plan = build_forward(p, kept, description, tiles, pool)
        new = with_pool(allocate_placeholders(p.device, plan.specs), pool)
        yield from plan.steps([*tensors_of(p), *new])


def with_pool(new: list[Tensor | None], pool: StatePool | None) -> list[Tensor | None]:
    """Return the tensors of `Forward.specs` with those of a pool in their places."""
    if pool is None:
        return new
    o = new[9] if pool.out is None else pool.out
    # a plan with a decay per key channel has rows after the slots
    return [*new[:8], pool.state if pool.is_updated else None, o, new[10], *pool.tensors, *new[14:]]


def _first_backward(p: Problem, saved: Saved, do: Tensor, dS: Tensor | None) -> Backward | ChannelBackward:
    """Build a backward; if it is the first of its kind, compile those of other sizes in parallel."""
    description = describe(p, do)

    def steps() -> Iterator[Step]:
        yield from backward_launches(p, saved, do, dS)
        yield from other_backward_launches(p, saved, do, dS, "triton")

    dtypes = (do.dtype, *(None if x is None else x.dtype for x in (dS, *saved)))
    # another backend's launches are among them only if the caller named no backend
    is_shared = settings.backend(p.backend) is None
    compile_ahead(p.device, ("backward", kind_key(p, description), *dtypes, is_shared), steps)
    return _build_backward(p, do, description, choose.backward_tiles(p, machine(p.device)))


def _build_backward(
    p: Problem, do: Tensor, description: Description, tiles: choose.BackwardTiles
) -> Backward | ChannelBackward:
    """Build a backward; its kernels are imported here, as a process that serves has none."""
    plan: Backward | ChannelBackward
    plan = import_module("gdn.backends.triton.rule.build_bwd").build_backward(p, do, description, tiles)
    return plan


def backward_launches(p: Problem, saved: Saved, do: Tensor, dS: Tensor | None) -> Iterator[Step]:
    """Yield the launches of backwards of this kind, of any size, on placeholders for allocated tensors."""
    description = describe(p, do)
    for tiles in choose.all_backward_tiles(p, machine(p.device)):
        plan = _build_backward(p, do, description, tiles)
        new, late = (allocate_placeholders(p.device, specs) for specs in (plan.specs, plan.late))
        given = (*tensors_of(p), *saved, do, dS)
        yield from plan.steps([*given, *new])
        yield from plan.late_steps([*given, *new[: -plan.num_early], *late])


def is_foreign(p: Problem, saved: Saved) -> bool:
    """Return True if another backend's forward saved these tensors: A_inv has other values there.

    A forward here saves G, or with a decay per key channel neither G nor v_new.
    """
    return saved.v_new is not None if p.is_per_channel else saved.G is None


def lacks_norms(p: Problem, saved: Saved) -> bool:
    """Return True if the backward needs norms that the forward did not save."""
    return p.use_qk_l2norm_in_kernel and (saved.q_rstd is None or saved.k_rstd is None)


def _dtypes(saved: Saved) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of saved tensors that differ between forwards: a backward is compiled for them."""
    assert saved.A_inv is not None and saved.S_in is not None
    return saved.A_inv.dtype, saved.S_in.dtype
