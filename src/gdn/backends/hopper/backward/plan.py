"""Launch the chunked backward: the reverse state scan and the gradient kernel in Gluon, the rest in Triton.

    table               Triton   packed sequences only: first token and length of each chunk
    backward_factors    Triton   per-token factors of the Gluon kernels
    segments            both     few long sequences only: cut them into segments that are scanned at once
    plan_slabs          Triton   if SLABS is on: the next two launches in passes over the chunks, see `slabs`
    reverse_scan        Gluon    dS of every chunk, dv, and the gradient of the initial state
    gradients           Gluon    dq, dk, and the terms of the gates' gradients
    gates_bwd, sums     Triton   dg, dbeta, dA_log, ddt_bias

They take the place of Triton's `pairs`, `state_bwd`, `pairs_bwd` and `rows_bwd`, and P, E, F and v_new need
no HBM. With HAS_SCAN off, Triton's `pairs` and `state_bwd` run instead of `reverse_scan`; the gradient kernel
then reads dr, and stores dv.

HBM bytes per token and value head, K = V = 128 in bf16, HV = 2 H: factors 50, scan 1440, gradients 2484,
gates 50: 4024. Triton's backward: 7850.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Any

import torch
from torch import Tensor

from gdn import settings
from gdn.backends.backend import Gradients, Saved
from gdn.backends.hopper import cost
from gdn.backends.hopper.backward import segments, slabs
from gdn.backends.hopper.backward.cost import (
    Segmentation,
    segmentation_of,
    slab_kinds,
    slab_of,
    whole_consumers,
)
from gdn.backends.hopper.backward.factors import ROWS, backward_factors_kernel
from gdn.backends.hopper.backward.gradients import gradients_kernel
from gdn.backends.hopper.backward.memory import allocate_late
from gdn.backends.hopper.backward.saved import can_load, describe_inverse, inverse_dtype, saved_forms
from gdn.backends.hopper.backward.scan import reverse_scan_kernel
from gdn.backends.hopper.cost import Cut
from gdn.backends.hopper.descriptors import (
    FACTOR_ROWS,
    TOKENS,
    align,
    align_placeholders,
    is_aligned,
    make_aligned,
    make_descriptor,
    state_layout,
)
from gdn.backends.hopper.factors import MIN_G
from gdn.backends.hopper.propagate import propagate_states_kernel
from gdn.backends.hopper.scan.operands import BF16_TILE
from gdn.backends.hopper.scans import REGISTERS, STRIP
from gdn.backends.hopper.segments import PROPAGATE
from gdn.backends.select import other_backward_launches
from gdn.backends.triton import sums
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
from gdn.backends.triton.rule import build_bwd
from gdn.backends.triton.rule import describe as rules
from gdn.backends.triton.rule import run as chunked
from gdn.backends.triton.rule.gates_bwd import gates_bwd_kernel
from gdn.backends.triton.rule.launches import Backward
from gdn.problem import CHUNK, RESET, Problem

HAS_SCAN = True  # the reverse state scan in Gluon, not Triton's state pass
HEADS = 8  # value heads of a program of backward_factors_kernel


@dataclass(frozen=True)
class Plan:
    """Hold the launches of one backward, and the specs of the tensors they write."""

    before: Backward | None  # Triton's launches up to dr and dS, or None with a scan of our own
    # dv, dg, dbeta, dS0, dS, dA_log, ddt_bias, partial, shares, table, P, P_rest
    specs: tuple[TensorSpec | None, ...]
    late: tuple[TensorSpec, ...]  # factors, dq, dk, and those of `segments` and of `slabs`
    table: Launch | None
    factors: Launch
    segments: segments.Segments | None
    slabs: slabs.Slabs | None
    scan: Launch | None
    gradients: Launch
    gates: Launch
    sums: Launch | None
    problem: Problem  # without tensors

    @cached_property
    def run(self) -> LaunchSequence:
        """Return the launches as a function of the problem's tensors, Saved, do, dfinal, `late`, `new`."""
        ends = list(accumulate((len(Problem.declaration.tensors), len(fields(Saved)), 2, len(self.late))))

        def steps(tensors: Sequence[Any]) -> Iterator[Step]:
            own, saved, (do, dfinal), late = (tensors[i:j] for i, j in pairwise((0, *ends)))
            new = tensors[ends[-1] :]
            return self.steps(self.problem.with_tensors(own), Saved(*saved), do, dfinal, new, late)

        return LaunchSequence(steps)

    def steps(
        self,
        p: Problem,
        saved: Saved,
        do: Tensor,
        dfinal: Tensor | None,
        new: Sequence[Any],
        late: Sequence[Any],
    ) -> Iterator[Step]:
        """Yield the launches in order; `new` and `late`: the tensors of `specs` and of `late`."""
        dv, dg, dbeta, dinitial, dS, dA_log, ddt_bias, partial, shares, table, *_ = new
        factors, dq, dk, *rest = late
        assert saved.S_in is not None and saved.A_inv is not None
        if self.table is not None:
            yield self.table, (p.cu_seqlens, table)
        yield self.factors, (p.beta, saved.G, saved.q_rstd, saved.k_rstd, table, factors)
        q_d, k_d, v_d, do_d, dv_d = (_tokens(x) for x in (p.q, p.k, p.v, do, dv))
        S_d, dS_d = _states(saved.S_in), _states(dS)
        A_inv_d = describe_inverse(saved.A_inv)
        factors_d = make_descriptor(factors.view(-1, CHUNK), (ROWS.value, CHUNK), FACTOR_ROWS)
        given: tuple[Any, ...] = (q_d, k_d, do_d, A_inv_d, factors_d)
        items = None
        if self.segments is not None:
            count = len(self.segments.specs)
            yield from self.segments.steps(p, given, factors, table, dfinal, rest[:count])
            (dfinal, items, *_), rest = rest, rest[count:]
        scan = (*given, dS_d, _rows(dv)), (dfinal, dinitial, dv)
        given = (q_d, k_d, v_d, do_d, dv_d, S_d, dS_d, A_inv_d, factors_d, _rows(dq), _rows(dk))
        gradients = given, (dq, dk, dv, shares)
        if self.slabs is not None and self.scan is not None:
            passes = (self.scan, *scan), (self.gradients, *gradients)
            yield from self.slabs.steps(*passes, table, items, rest)
        else:
            if self.scan is not None:
                yield self.scan, (*scan[0], table, items, None, None, *scan[1])
            yield self.gradients, (*gradients[0], table, None, *gradients[1])
        gates = (p.g, p.beta, p.A_log, p.dt_bias, saved.G, table, shares)
        yield self.gates, (*gates, dg, dbeta, partial)
        if self.sums is not None:
            yield self.sums, (partial, *((None, dA_log) if ddt_bias is None else (dA_log, ddt_bias)))


_plans: PlanCache[Plan] = PlanCache()


def _tokens(x: Tensor) -> Any:
    """Return the TMA descriptor that loads 64 tokens and 64 columns of [B, T, heads, columns]."""
    return make_descriptor(x, (1, CHUNK, 1, STRIP), TOKENS)


def _states(x: Tensor) -> Any:
    """Return the TMA descriptor that moves all keys and 64 value columns of the states of chunks."""
    return make_descriptor(x.view(-1, x.shape[-1]), (x.shape[-2], STRIP), state_layout(x))


def _rows(x: Tensor) -> Any:
    """Return the TMA descriptor that stores 64 tokens and 64 columns of a contiguous tensor."""
    return make_descriptor(x.view(-1, x.shape[-1] * x.shape[-2]), (CHUNK, STRIP), BF16_TILE.value)


def lacks(p: Problem, saved: Saved) -> str | None:
    """Return why this backward does not support a problem and its saved tensors, or None if it does."""
    K, V = p.q.shape[-1], p.v.shape[-1]
    if K not in (STRIP, 2 * STRIP) or V != K or p.q.dtype != torch.bfloat16:
        return f"expected K = V of 64 or 128 in bf16, got K={K}, V={V}, {p.q.dtype}"
    if K == STRIP and not HAS_SCAN:
        return "expected the reverse state scan in Gluon at K = V = 64"
    if p.q.numel() == 0 or p.N == 0:
        return "expected tokens"
    if is_complete(p, saved) and not can_load(p, saved):
        return "expected A_inv and the states in the dtypes of a forward, contiguous and aligned for TMA"
    return None


def is_complete(p: Problem, saved: Saved) -> bool:
    """Return True if the forward saved all that this backward reads; else it is computed again."""
    is_saved = saved.G is not None and saved.A_inv is not None and saved.S_in is not None
    return is_saved and not chunked.lacks_norms(p, saved)


def chunk_backward(problem: Problem, saved: Saved, do: Tensor | None, dfinal: Tensor | None) -> Gradients:
    """Implement `Backend.chunk_backward`; fall back to Triton's where `lacks` has a reason."""
    if lacks(problem, saved) is not None:
        return chunked.chunk_backward(problem, saved, do, dfinal)
    p = align(rules.to_kernel_layout(problem))
    saved, do = backward_inputs(p, saved, do)
    dfinal = None if dfinal is None else dfinal.contiguous()
    with device_guard(p.device):
        plan = plan_of(p, saved, do, dfinal)
        new = allocate(p.device, plan.specs)
        if plan.before is not None:
            plan.before.run([*rules.tensors_of(p), *saved, do, dfinal, *new])
        del new[-2:]  # free P and P_rest before dq and dk are allocated: this lowers peak memory
        late = allocate_late(p, plan.late, plan.segments, new[4])
        plan.run([*p.tensors(), *saved, do, dfinal, *late, *new])
    return backward_results(new, late)


def backward_inputs(p: Problem, saved: Saved, do: Tensor | None) -> tuple[Saved, Tensor]:
    """Return the saved tensors, complete, and do as TMA loads it."""
    if not is_complete(p, saved):
        saved = chunked.forward(p, rules.operand_dtype(p))[2]
    do = torch.zeros_like(p.v) if do is None else make_aligned(rules.with_dense_rows(do.to(p.v.dtype)))
    return saved, do


def backward_results(new: list[Any], late: list[Any]) -> Gradients:
    """Return the gradients among the tensors that a backward wrote."""
    dv, dg, dbeta, dinitial, _, dA_log, ddt_bias, *_ = new
    _, dq, dk, *_ = late
    assert dq is not None and dk is not None and dv is not None
    return Gradients(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial)


def plan_of(p: Problem, saved: Saved, do: Tensor, dfinal: Tensor | None, *, is_cut: bool = False) -> Plan:
    """Return the plan of a backward; `is_cut`: the sequences are segments already, so none is cut again."""
    before = None if HAS_SCAN else chunked.backward_plan(p, saved, do, dfinal)
    schedule = (consumers_of(p), None) if is_cut else schedule_of(p) if HAS_SCAN else (2, None)
    dtype = None if dfinal is None else dfinal.dtype
    slab = slab_of(p) if before is None and not is_cut else None
    form = inverse_dtype(saved)
    key = (rules.problem_key(p), do.stride(), dtype, HAS_SCAN, schedule, slab, form)

    def steps() -> Iterator[Step]:
        yield from _all_steps(p, saved, do, dfinal)
        yield from other_backward_launches(p, saved_forms(p, saved)[-1], do, dfinal, "hopper")

    def make() -> Plan:
        if before is None:
            # with no backend named, `triton` may get a smaller backward of the kind
            is_shared = settings.backend(p.backend) is None
            sizes = rules.kind_key(p, rules.describe(p)), slab_kinds(p)
            compile_ahead(p.device, ("hopper backward", *sizes, dtype, form, is_shared), steps)
        return _plan(p, before, *schedule, slab)

    return _plans.get(key, make)


def schedule_of(p: Problem) -> tuple[int, Segmentation | None]:
    """Return the consumer warpgroups of a CTA of the scan, and its segments."""
    cut = segmentation_of(p)
    return (consumers_of(p), None) if cut is None else (cut.consumers, cut)


def launches(problem: Problem, saved: Saved, do: Tensor, dfinal: Tensor | None) -> Iterator[Step]:
    """Yield the launches of backwards of this kind at any size; none where `lacks` has a reason."""
    if lacks(problem, saved) is None:
        do = do if is_aligned(do) else do.new_empty((1, 1, *do.shape[2:]))
        yield from _all_steps(align_placeholders(problem), saved, do, dfinal)


def _all_steps(p: Problem, saved: Saved, do: Tensor, dfinal: Tensor | None) -> Iterator[Step]:
    """Yield the launches of backwards of this kind at any size, on placeholders for what they write."""
    for schedule, slab, form in product(_all_schedules(p), slab_kinds(p), saved_forms(p, saved)):
        plan = _plan(p, None, *schedule, slab)
        new = allocate_placeholders(p.device, plan.specs)
        # TMA descriptors need real strides: one tile of each tensor that has a descriptor
        for i in (0, 4):
            x = plan.specs[i]
            assert x is not None
            new[i] = allocate(p.device, [_tile_spec(x)])[0]
        late = allocate(p.device, map(_tile_spec, plan.late))
        for launch, tensors in plan.steps(p, form, do, dfinal, new, late):
            yield launch, tensors
            if launch.kernel is propagate_states_kernel:
                others = ({**launch.constants, "BV": width} for width in PROPAGATE[p.K][0])
                yield from ((replace(launch, constants=constants), tensors) for constants in others)


def _all_schedules(p: Problem) -> Iterator[tuple[int, Segmentation | None]]:
    """Yield the schedules of all binaries that a problem of another size may need."""
    for consumers in range(1, p.V // STRIP + 1):
        yield consumers, None
        if not p.batch_invariant:
            yield consumers, Segmentation(Cut(1, 1 << 16, 1), consumers, consumers)


def _tile_spec(spec: TensorSpec) -> TensorSpec:
    """Return the spec of a single tile of a tensor [., ., heads or rows, columns]."""
    shape, _, dtype = spec
    return tensor_spec((1, 1, *shape[2:]), dtype)


def consumers_of(p: Problem) -> int:
    """Return the consumer warpgroups of a CTA of the scan without segments.

    One adds up dv_new in another order than two, so with batch_invariant there are always two; at V = 64
    there is always one.
    """
    consumers = 2 if p.batch_invariant else whole_consumers(p.N * p.HV, cost.num_sms(p.device))
    return min(consumers, p.V // STRIP)


def _specs(p: Problem, a: rules.Description) -> tuple[TensorSpec | None, ...]:
    """Return the specs of `Plan.specs` with a scan of our own."""
    specs = build_bwd.backward_specs(p, a)
    # dS is bf16 at K = 64, too; P and its low half stay in shared memory
    dS = tensor_spec((p.num_chunks, p.HV, p.K, p.V), p.q.dtype)
    return (*specs[:4], dS, *specs[5:-2], None, None)


def _plan(
    p: Problem,
    before: Backward | None,
    consumers: int,
    segmentation: Segmentation | None = None,
    slab: int | None = None,
) -> Plan:
    """Plan the launches of a backward; `slab`: the chunks of a pass, or None: all in one."""
    a = rules.describe(p)
    numbers = rules.shape_scalars(p)
    specs = build_bwd.backward_specs(p, a) if before is not None else _specs(p, a)
    num_sms = cost.num_sms(p.device)
    factors = Launch(
        backward_factors_kernel,
        a.entries * -(-p.HV // HEADS),
        (*rules.gate_strides(p.beta), *numbers, p.scale),
        {"C": CHUNK, "BH": HEADS, **a.activation, "RESET": MIN_G},
        4,
    )
    # both Gluon kernels are persistent: 1 CTA an SM, as a CTA takes nearly all of an SM's shared memory
    scan, parts, passes = None, None, None
    if segmentation is not None:
        parts = segments.plan_launches(p, segmentation, (*numbers, a.entries))
    if before is None:
        pieces = p.HV * (p.V // STRIP // consumers)
        items = (p.N if parts is None else parts.num_items // p.HV) * pieces
        if slab is not None:
            group, count = max(1, num_sms // pieces), None if parts is None else parts.num_items // p.HV
            passes = slabs.plan_launches(p, slab, group, count, (*numbers, a.entries))
            items = min(items, slab * pieces)
            specs = (*specs[:4], passes.dS, *specs[5:])
        scan = Launch(
            reverse_scan_kernel,
            # of segments one item a CTA, as many may be empty: the GPU then balances the others
            items if parts is not None and passes is None else min(items, num_sms),
            (*numbers, a.entries, items),
            {"V_FIRST": p.state_v_first, "CONSUMERS": consumers, "D": p.K},
            4,
            options={"maxnreg": REGISTERS[consumers]},
            num_descriptors=7,
            seconds=4.0,
        )
    items = (a.entries if slab is None else slab) * p.H
    gradients = Launch(
        gradients_kernel,
        min(items, num_sms),
        (*numbers, items),
        {"NORM": p.use_qk_l2norm_in_kernel, "GIVEN_DR": before is not None, "D": p.K},
        4,
        options={"maxnreg": 168},
        num_descriptors=11,
        seconds=4.0,
    )
    late = (
        tensor_spec((a.entries, p.HV, ROWS.value, CHUNK), torch.float32),
        tensor_spec(p.q.shape, p.q.dtype),
        tensor_spec(p.k.shape, p.k.dtype),
        *(() if parts is None else parts.specs),
        *(() if passes is None else passes.specs),
    )
    table = a.launch if before is None else None
    gates = _gate_launches(p, a, 1 if before is None else before.gates.scalars[-1])
    return Plan(
        before, specs, late, table, factors, parts, passes, scan, gradients, *gates, p.without_tensors()
    )


def _gate_launches(p: Problem, a: rules.Description, strips: Any) -> tuple[Launch, Launch | None]:
    """Plan the launches of the gates' gradients, and of the sums over tokens if there are any."""
    gates = Launch(
        gates_bwd_kernel,
        a.entries * p.HV,
        (*rules.gate_strides(p.g, p.beta), p.T, p.HV, rules.shape_scalars(p)[-1], strips),
        {"C": CHUNK, **a.activation, "RESET": RESET},
        1,
    )
    if p.A_log is None:
        return gates, None
    # partial sums of all chunks, added in a fixed order
    return gates, sums.add(a.entries, 1 if p.dt_bias is None else 2, p.HV, (0, 1), is_row_first=True)
