"""Launch the chunked forward: `gates` and `solve` for each chunk, then the state scan.

Where sequences and heads are few, `segments` cuts sequences into segments that are scanned at the same time.

HBM bytes per token and value head at K = V = 128 in bf16, HV = H: gates 14, solve 352; scan: q, k, v, o 1024,
A_inv 80, factors 10. Sum 1480; 32 more of chunks that are not well-conditioned, and 256 with l2norm. The
tensors saved for a backward add 576 (A_inv has its zeros then), or 1040 where states are kept in fp32.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn import settings
from gdn.backends.backend import Saved, Shape
from gdn.backends.hopper import cost
from gdn.backends.hopper.descriptors import (
    TOKENS,
    align,
    align_placeholders,
    describe_factors,
    describe_inverse_rows,
    inverse_tile,
    make_descriptor,
    state_layout,
)
from gdn.backends.hopper.factors import MIN_G, NUM_ROWS, WITH_A_INV
from gdn.backends.hopper.gates import gates_kernel
from gdn.backends.hopper.scan.operands import BF16_TILE
from gdn.backends.hopper.scans import STRIP, can_move_states, describe_states, moves_states, plan_scan
from gdn.backends.hopper.segments import PROPAGATE, Segments, plan_launches, propagation_width
from gdn.backends.hopper.solve.kernel import solve_kernel
from gdn.backends.select import other_launches
from gdn.backends.triton.launch import (
    Launch,
    LaunchSequence,
    PlanCache,
    Step,
    TensorSpec,
    allocate,
    allocate_placeholders,
    compile_ahead,
    device_guard,
    tensor_spec,
)
from gdn.backends.triton.launch.pdl import PDL
from gdn.backends.triton.rule import describe as rules
from gdn.backends.triton.rule import run as chunked
from gdn.backends.triton.rule.describe import to_kernel_layout
from gdn.backends.triton.rule.pool import NO_POOL, StatePool
from gdn.backends.triton.rule.zero_unused import zero_unused_tiles
from gdn.problem import CHUNK, Problem

FAST_PATH = True  # well-conditioned chunks take the fast path: see `scan.chunk`
# CTAs (of one warp) of `solve` that fit an SM, with 168 registers a thread and 18 or 26 KB each, by K = V
CTAS_PER_SM = {128: 12, 64: 8}
GATE_HEADS = 8  # of a CTA of `gates`


@dataclass(frozen=True)
class Forward:
    """Hold the launches of one forward and the specs of the tensors they write."""

    # A_inv, factors, final, o, table, next; G, S_in, q_rstd, k_rstd for a backward; those of `segments`
    specs: tuple[TensorSpec | None, ...]
    table: Launch | None
    gates: Launch | None
    solve: Launch
    segments: Segments | None
    scan: Launch
    is_short: bool  # `short_scan_kernel`
    problem: Problem  # without tensors

    @cached_property
    def run(self) -> LaunchSequence:
        """Return the launches as a function of the tensors of the problem, of `specs` and of a pool."""
        return LaunchSequence(self._steps_of)

    @cached_property
    def run_scan(self) -> LaunchSequence:
        """Return the launches after `solve`, of the same tensors."""
        before = (self.table, self.gates, self.solve)
        return LaunchSequence(
            lambda tensors: (
                step for step in self._steps_of(tensors) if all(step[0] is not x for x in before)
            )
        )

    def _steps_of(self, tensors: Sequence[Any]) -> Iterator[Step]:
        first = len(Problem.declaration.tensors)
        past = first + len(self.specs)
        p = self.problem.with_tensors(tensors[:first])
        return self.steps(p, tensors[first:past], tuple(tensors[past:]))

    def steps(
        self, p: Problem, new: Sequence[Tensor | None], pool: tuple[Tensor | None, ...] = NO_POOL[0]
    ) -> Iterator[Step]:
        """Yield the launches and their tensors, in order; `pool`: which slots sequences read and write."""
        A_inv, factors, final, o, table, next_item, G, S_in, q_rstd, k_rstd, *rest = new
        assert A_inv is not None and factors is not None and o is not None
        if self.table is not None:
            yield self.table, (p.cu_seqlens, table)
        # only a packed batch has tokens of no sequence, whose outputs `solve` zeroes
        tail = None if table is None else o
        q_d, k_d, v_d = (make_descriptor(x, (1, CHUNK, 1, STRIP), TOKENS) for x in (p.q, p.k, p.v))
        A_d = describe_inverse_rows(A_inv)
        tiles: tuple[Any, ...] = (k_d, v_d, *A_d, describe_factors(factors))
        solved: tuple[Any, ...] = (*A_d, q_d if p.use_qk_l2norm_in_kernel else None, k_d)
        gates = (p.g, p.beta, p.A_log, p.dt_bias, table, factors)
        if self.gates is not None:
            yield self.gates, (*gates, G)
        yield self.solve, (*solved, *gates, q_rstd, k_rstd, tail, next_item)
        # o and S_in are stored by TMA, [C, 64] and [K, 64] elements at a time
        out: tuple[Any, ...] = (
            make_descriptor(o.view(-1, p.HV * p.V), (CHUNK, STRIP), BF16_TILE.value),
            None if S_in is None else make_descriptor(S_in.view(-1, p.V), (p.K, STRIP), state_layout(S_in)),
        )
        if self.is_short:
            moved = (describe_states(x, p.state_v_first) for x in (p.initial_state, final))
            inner = (p.cu_seqlens, table, o, factors, *pool, next_item)
            yield self.scan, (q_d, *tiles, out[0], *moved, *inner)
        elif self.segments is None:
            ends = (p.initial_state, final, p.cu_seqlens, table)
            yield self.scan, (q_d, *tiles, *out, *ends, o, factors, *pool, next_item)
        else:
            yield from self.segments.steps(p, tiles, factors, table, rest)
            states, items, *_ = rest
            ends = (states, final, None, items)
            yield self.scan, (q_d, *tiles, *out, *ends, o, factors, *pool, next_item)


_forwards: PlanCache[Forward] = PlanCache()


def chunk_forward(problem: Problem, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
    """Implement `Backend.chunk_forward`."""
    o, final, saved = forward(to_kernel_layout(problem), rules.operand_dtype(problem) if save else None)
    return o, final, for_backward(problem, saved) if save else saved


def recompute_saved(problem: Problem, saved: Saved) -> Saved:
    """Implement `Backend.recompute_saved`: run the state scan again, from the saved A_inv and factors."""
    p = replace(to_kernel_layout(problem), recompute=False, layout_key=None)
    if saved.factors is None or p.q.numel() == 0 or p.N == 0:
        return chunk_forward(p, True)[2]
    kept, p = rules.operand_dtype(p), align(p)
    with device_guard(p.device):
        plan = plan_of(p, kept)
        given = {0: saved.A_inv, 1: saved.factors, 6: saved.G, 8: saved.q_rstd, 9: saved.k_rstd}
        new = allocate(p.device, [None if given.get(i) is not None else s for i, s in enumerate(plan.specs)])
        for i, x in given.items():
            new[i] = None if x is None else x.contiguous()
        _, _, _, _, table, next_item, *_ = new
        if plan.table is not None:
            plan.table(p.cu_seqlens, table)
        # `solve` also clears the scan's counter. By a kernel that ends before the next begins: PDL lets the
        # scan read the table of a packed batch before it waits for the launch before.
        assert next_item is not None
        next_item.zero_()
        plan.run_scan([*p.tensors(), *new, *NO_POOL[0]])
    return results(new, kept)[2]


def for_backward(problem: Problem, saved: Saved) -> Saved:
    """Return the saved tensors of a forward as every backward reads them."""
    if saved.A_inv is not None:
        zero_unused_tiles(problem, saved)
    return saved


def forward(
    p: Problem, kept: torch.dtype | None, pool: StatePool | None = None
) -> tuple[Tensor, Tensor | None, Saved]:
    """Compute o, the final state and the saved tensors like triton's forward, which runs empty problems.

    `kept` is the dtype of the saved states; None: nothing is saved. At K = 64 the saved A_inv is split bf16,
    [.., 2, C, C]. `pool` as in triton's forward, for sequences that are not cut into segments.
    """
    if p.q.numel() == 0 or p.N == 0:
        return chunked.forward(p, kept, pool)
    p = align(p)
    with device_guard(p.device):
        plan = plan_of(p, kept, pool)
        new = with_pool(allocate(p.device, plan.specs), pool)
        plan.run([*p.tensors(), *new, *(NO_POOL[0] if pool is None else pool.tensors)])
    o, final, saved = results(new, kept)
    # at K = 64 `recompute_saved` runs the whole forward again
    if p.recompute and kept is not None:
        assert new[1] is not None
        # without the entries of tokens that belong to no sequence
        saved = replace(saved, factors=new[1][: p.num_chunks]) if p.K == 2 * STRIP else Saved()
    return o, final, saved


def plan_of(p: Problem, kept: torch.dtype | None, pool: StatePool | None = None) -> Forward:
    """Return the plan of a forward, from the cache or built; `kept` and `pool` as in `forward`."""
    cuts = None if pool is not None else cost.cuts_of(p)
    consumers = cost.consumers_of(p, cuts)
    is_short = moves_states(p, cuts, kept, pool)
    slots = None if pool is None else pool.key
    key = (rules.problem_key(p), cuts, consumers, is_short, kept, FAST_PATH, slots)
    return _forwards.get(key, lambda: plan_first(p, cuts, consumers, kept, pool))


def saves(problem: Problem) -> tuple[Shape | None, ...]:
    """Implement `Backend.saves`: as `triton`, but for split A_inv and what `recompute_saved` reads."""
    shapes = rules.saves(problem)
    if problem.q.numel() == 0 or problem.N == 0:
        return shapes
    tiles = (problem.num_chunks, problem.HV)
    if problem.recompute and problem.K == STRIP:
        return (None,) * len(shapes)
    if problem.recompute:
        return (*shapes[:-1], ((*tiles, NUM_ROWS.value, CHUNK), torch.float32))
    if problem.K == STRIP:
        return (shapes[0], ((*tiles, 2, CHUNK, CHUNK), problem.q.dtype), *shapes[2:])
    return shapes


def with_pool(new: list[Tensor | None], pool: StatePool | None) -> list[Tensor | None]:
    """Return the tensors of `Forward.specs` with the pool as the final state, and its output."""
    if pool is None:
        return new
    o = new[3] if pool.out is None else pool.out
    return [*new[:2], pool.state if pool.is_updated else None, o, *new[4:]]


def results(new: list[Tensor | None], kept: torch.dtype | None) -> tuple[Tensor, Tensor | None, Saved]:
    """Return o, the final state and the saved tensors among the tensors that a forward wrote."""
    A_inv, _, final, o, _, _, G, S_in, q_rstd, k_rstd, *_ = new
    assert o is not None
    if kept is None:
        return o, final, Saved()
    # without its zeros, or with B in its place, it is of no use to a backward
    if A_inv is not None and A_inv.shape[-1] < CHUNK:
        A_inv = None
    return o, final, Saved(G, A_inv, S_in, None, q_rstd, k_rstd)


class Variant(NamedTuple):
    """Hold what distinguishes the binaries of two forwards of a kind."""

    cuts: cost.Cuts | cost.OwnCuts | None  # of sequences into segments; None: they are not cut
    consumers: int  # consumer warpgroups of a CTA of the scan, at most one for each 64 values
    width: int  # value columns of a CTA of `propagate_states`
    is_single_tile: bool  # no CTA of `solve` has more than one tile
    is_short: bool = False  # `short_scan_kernel` scans


def plan_first(
    p: Problem, cuts: cost.Cuts | cost.OwnCuts | None, consumers: int, kept: torch.dtype | None,
    pool: StatePool | None = None,
) -> Forward:  # fmt: skip
    """Compile the binaries of forwards of this kind ahead, and plan one."""
    a = rules.describe(p)
    # with no backend named, `triton` may get a smaller problem of the kind: compile its launches ahead, too
    is_shared = settings.backend(p.backend) is None and not p.batch_invariant

    def steps() -> Iterator[Step]:
        yield from launches(p, kept, pool)
        if is_shared:
            yield from other_launches(p, kept, pool, "hopper")

    kind = ("hopper", kept, rules.kind_key(p, a), None if pool is None else pool.kind, is_shared)
    compile_ahead(p.device, kind, steps)
    is_single_tile = a.entries * p.HV <= _num_solve_ctas(p)
    is_short = moves_states(p, cuts, kept, pool)
    variant = Variant(cuts, consumers, propagation_width(p), is_single_tile, is_short)
    return _plan(p, a, variant, kept, pool)


def launches(problem: Problem, kept: torch.dtype | None, pool: StatePool | None = None) -> Iterator[Step]:
    """Yield the launches of forwards of this kind at any size, with stand-ins for the tensors they write."""
    if pool is not None:
        # a longer prompt is cut into segments, on states that are gathered from the pool
        initial = pool.state.new_empty((1, *pool.state.shape[1:]), dtype=torch.float32)
        gathered = replace(problem, layout_key=None, initial_state=initial, output_final_state=True)
        yield from _launches(gathered, kept, None)
    yield from _launches(problem, kept, pool)


def _launches(problem: Problem, kept: torch.dtype | None, pool: StatePool | None) -> Iterator[Step]:
    p = align_placeholders(problem)
    a = rules.describe(p)
    widths, _ = PROPAGATE[p.K]
    some = cost.own_cuts(p.HV) if p.batch_invariant else cost.equal_cuts(1)
    all_cuts = (None,) if pool is not None else dict.fromkeys((None, some))
    variants = [
        Variant(cuts, *((1, widths[0]) if is_single_tile else (2, widths[-1])), is_single_tile)
        for cuts, is_single_tile in itertools.product(all_cuts, (True, False))
    ]
    if can_move_states(p, kept, pool):
        variants.append(variants[0]._replace(is_short=True))
    for variant in variants:
        plan = _plan(p, a, variant, kept, pool)
        new = with_pool(allocate_placeholders(p.device, plan.specs), pool)
        # TMA descriptors need real strides: one tile of each tensor that has a descriptor
        for i in (0, 1, 2, 3, 7):
            x = plan.specs[i]
            if x is not None:
                new[i] = allocate(p.device, [tensor_spec((1, 1, *x[0][2:]), x[2])])[0]
        yield from plan.steps(p, new, NO_POOL[0] if pool is None else pool.tensors)


def _num_solve_ctas(p: Problem) -> int:
    """Return the CTAs of `solve` that fit the GPU at once."""
    return CTAS_PER_SM[p.K] * cost.num_sms(p.device)


def _plan(
    p: Problem, a: rules.Description, variant: Variant, kept: torch.dtype | None, pool: StatePool | None
) -> Forward:
    """Plan the launches of a forward; `kept` and `pool` as in `forward`."""
    scalars, tiles = rules.shape_scalars(p), (p.num_chunks, p.HV)
    G, _, _, _, q_rstd, k_rstd, _ = rules.saves(p)
    # A forward for a backward (states in q's dtype at K = 128) stores A_inv whole. Any other at K = 128 omits
    # its six zero blocks of 16, 48 HBM bytes a token and head, and has B for well-conditioned chunks.
    is_spare = p.K == 2 * STRIP and kept is not p.q.dtype
    tile = inverse_tile(has_zeros=not is_spare)
    parts = (2,) if p.K == CHUNK else ()
    fast_path: bool | int = FAST_PATH and p.K == 2 * STRIP
    if fast_path and not is_spare:
        fast_path = WITH_A_INV.value
    S_in = None if kept is None or p.recompute else ((*tiles, p.K, p.V), kept)
    gates, solve = _plan_tiles(p, a, kept, fast_path, variant.is_single_tile)
    scalars = (*scalars, a.entries)
    segments = None
    if variant.cuts is not None:
        has_decays = gates is not None
        segments = plan_launches(p, variant.cuts, scalars, variant.width, fast_path is True, has_decays)
    num_items = p.N * p.HV if segments is None else segments.num_items
    consumers = min(variant.consumers, p.V // STRIP)
    scan = plan_scan(p, consumers, variant.is_short, num_items, fast_path, scalars, pool)
    specs = (
        tensor_spec((*tiles, *parts, *tile), p.q.dtype),
        tensor_spec((a.entries, p.HV, NUM_ROWS.value, CHUNK), torch.float32),
        tensor_spec(p.state_shape, torch.float32) if p.output_final_state and pool is None else None,
        tensor_spec(p.v.shape, p.v.dtype) if pool is None or pool.out is None else None,
        a.spec,
        tensor_spec((1,), torch.int32),
        *(None if kept is None or x is None else tensor_spec(*x) for x in (G, S_in, q_rstd, k_rstd)),
        *(() if segments is None else segments.specs),
    )
    return Forward(specs, a.launch, gates, solve, segments, scan, variant.is_short, p.without_tensors())


def _plan_tiles(
    p: Problem, a: rules.Description, kept: torch.dtype | None, fast_path: bool | int, is_single_tile: bool
) -> tuple[Launch | None, Launch]:
    """Plan `gates`, or None where `solve` reads the gates itself, and `solve`; arguments as in `_plan`."""
    T, HV, ratio, per_row = rules.shape_scalars(p)
    count = a.entries * HV
    # a backward needs G; with batch_invariant the kernel that sums G may not depend on the batch
    has_decays = kept is not None or not is_single_tile or p.batch_invariant
    strides, activation = rules.gate_strides(p.g, p.beta), {**a.activation, "RESET": MIN_G}
    gates = Launch(
        gates_kernel,
        a.entries * -(-HV // GATE_HEADS),
        (*strides, T, HV, per_row),
        {"C": CHUNK, "BH": GATE_HEADS, **activation},
        4,
        options=PDL,
    )
    # a backward may read every tile
    total_at = 0 if kept is not None or a.table is None else a.table.total_at
    kind = {"NORM": p.use_qk_l2norm_in_kernel, "FAST_PATH": fast_path, "D": p.K}
    solve = Launch(
        solve_kernel,
        min(count, _num_solve_ctas(p)),
        (*strides, T, HV, ratio, per_row, p.scale, count, total_at),
        {"HAS_DECAYS": has_decays, **activation, **kind},
        1,
        options={"maxnreg": 168, **PDL},
        num_descriptors=6,
        seconds=2.2,
    )
    return gates if has_decays else None, solve
