"""Plan the launches and tensors of the chunked rule, once per problem up to the addresses of its tensors.

A plan is made once for a problem's shapes, strides, dtypes and options. The first plan of its kind also
compiles, in parallel, the binaries that other numbers of heads, sequences and tokens would use (`choose`).
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from gdn import settings
from gdn.backends.backend import Saved, Shape
from gdn.backends.triton import beside, sums
from gdn.backends.triton.chunks import Table
from gdn.backends.triton.launch import (
    Launch,
    Plans,
    Step,
    TensorSpec,
    allocate_placeholders,
    compile_ahead,
    machine,
    tensor_spec,
    unit_of,
)
from gdn.backends.triton.rule import choose as tuned
from gdn.backends.triton.rule.gates_bwd import gates_bwd_kernel
from gdn.backends.triton.rule.gradients import pairs_bwd_kernel, rows_bwd_kernel
from gdn.backends.triton.rule.output import output_kernel
from gdn.backends.triton.rule.pairs import ROWS, pairs_kernel
from gdn.backends.triton.rule.prepare import prepare_kernel
from gdn.backends.triton.rule.scan import scan_kernel
from gdn.backends.triton.rule.state import state_kernel
from gdn.backends.triton.rule.state_bwd import state_bwd_kernel
from gdn.backends.triton.rule.steps import Backward, Forward
from gdn.problem import CHUNK, RESET, Problem

_forwards: Plans[Forward] = Plans()
_backwards: Plans[Backward] = Plans()


def forward_plan(p: Problem, kept: torch.dtype | None) -> Forward:
    """Return the plan of a forward. `kept`: the dtype of S_in, or None where S_in is not kept."""
    return _forwards.get((key(p), kept), lambda: _first_forward(p, kept))


def backward_plan(p: Problem, saved: Saved, do: Tensor, dS: Tensor | None) -> Backward:
    # keyed by layout and dtype only: the addresses of tensors are arguments of the launch
    assert saved.A_inv is not None and saved.S_in is not None
    found = (key(p), do.stride(), None if dS is None else dS.dtype, saved.A_inv.dtype, saved.S_in.dtype)
    return _backwards.get(found, lambda: _first_backward(p, saved, do, dS))


def _first_forward(p: Problem, kept: torch.dtype | None) -> Forward:
    a = arguments(p)
    # if the caller fixed no backend, another length or batch may be dispatched to another backend
    is_shared = settings.backend(p.backend) is None

    def steps() -> Iterator[Step]:
        yield from launches(p, kept)
        for others in beside if is_shared else ():
            yield from others(p, kept)

    compile_ahead(p.device, ("forward", kind_of(p, a), kept, is_shared), steps)
    return _plan_forward(p, kept, a, tuned.forward(p, machine(p.device)))


def launches(p: Problem, kept: torch.dtype | None) -> Iterator[Step]:
    """Yield the launches of forwards of this kind, of any size, on stand-ins for allocated tensors."""
    a = arguments(p)
    for chosen in tuned.forwards(p, machine(p.device)):
        plan = _plan_forward(p, kept, a, chosen)
        yield from plan.steps([*tensors_of(p), *allocate_placeholders(p.device, plan.specs)])


def _first_backward(p: Problem, saved: Saved, do: Tensor, dS: Tensor | None) -> Backward:
    a, gpu = arguments(p, do), machine(p.device)
    plan = _plan_backward(p, do, a, tuned.backward(p, gpu))

    def steps() -> Iterator[Step]:
        for chosen in tuned.backwards(p, gpu):
            other = _plan_backward(p, do, a, chosen)
            new, late = (
                allocate_placeholders(p.device, other.specs),
                allocate_placeholders(p.device, other.late),
            )
            given = (*tensors_of(p), *saved, do, dS)
            yield from other.steps([*given, *new])
            yield from other.late_steps([*given, *new[:-2], *late])

    more = (do.dtype, *(None if x is None else x.dtype for x in (dS, *saved)))
    compile_ahead(p.device, ("backward", kind_of(p, a), *more), steps)
    return plan


def saves(problem: Problem) -> tuple[Shape | None, ...]:
    """Return the shapes of Saved: all but v_new, which the backward recomputes from S_in with two MMAs."""
    p, dtype = problem, operand(problem)
    # norms are per key head
    rstd = ((p.B, p.T, p.H), torch.float32) if p.use_qk_l2norm_in_kernel else None
    return (
        ((p.B, p.T, p.HV), torch.float64),
        ((p.num_chunks, p.HV, CHUNK, CHUNK), dtype),
        ((p.num_chunks, p.HV, p.K, p.V), dtype),
        None,
        rstd,
        rstd,
    )


def _pairs_width(p: Problem, blocks: int) -> tuple[int, bool]:
    """Return how many columns E and F take per token and key head, and whether dq's memory can hold them.

    It can if one program computes whole rows of dq, and K is a multiple of 16, the unit of row strides.
    """
    needed = p.HV // p.H * CHUNK
    # E and F of a row fit into a row of dq: no memory of their own in HBM
    is_shared = blocks == 1 and needed <= p.K and p.K % 16 == 0
    return (p.K if is_shared else needed), is_shared


def operand(p: Problem) -> torch.dtype:
    """Return the dtype of MMA operands that read the state."""
    return torch.float32 if tuned.fp32_state_operands(p) else p.q.dtype


def _narrow(p: Problem) -> torch.dtype:
    """Return the dtype of tensors that pass between kernels without being multiplied by a state."""
    return torch.float32 if tuned.fp32_mma(p) else p.q.dtype


def key(p: Problem) -> Hashable:
    """Return everything that the launches depend on, except the addresses of tensors."""
    if p.form is not None:
        # otherwise built from shapes, strides, dtypes and options: a Python tuple, no read of the GPU
        return p.form
    q, k, v, g, beta, cu = p.q, p.k, p.v, p.g, p.beta, p.cu_seqlens
    return (
        q.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device,
        None if g is None else (g.stride(), g.dtype),
        None if beta is None else (beta.stride(), beta.dtype),
        None if cu is None else (p.N, cu.dtype),
        None if p.A_log is None else p.A_log.dtype,
        None if p.dt_bias is None else p.dt_bias.dtype,
        None if p.initial_state is None else p.initial_state.dtype,
        p.scale, p.output_final_state, p.use_qk_l2norm_in_kernel, p.use_beta_sigmoid_in_kernel,
        p.allow_neg_eigval, p.state_v_first, p.batch_invariant,
    )  # fmt: skip


def tensors_of(p: Problem) -> tuple[Tensor | None, ...]:
    """Return a problem's tensors in the order that `steps` expects."""
    return (p.q, p.k, p.v, p.g, p.beta, p.A_log, p.dt_bias, p.initial_state, p.cu_seqlens)


def kind_of(p: Problem, a: "Arguments") -> Hashable:
    """Return what identifies the binaries of a problem, including those for other sizes."""
    dtypes = (
        None if x is None else x.dtype
        for x in (p.q, p.g, p.beta, p.A_log, p.dt_bias, p.initial_state, p.cu_seqlens)
    )
    return (
        *dtypes, p.K, p.V, a.unit, p.output_final_state, p.use_qk_l2norm_in_kernel,
        p.use_beta_sigmoid_in_kernel, p.allow_neg_eigval, p.state_v_first, p.batch_invariant,
    )  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """Hold what the launches of a problem share."""

    table: Table | None
    entries: int
    unit: int
    precision: str
    BK: int
    block: int  # key columns of one MMA, in kernels that loop over K: bounds registers and shared memory
    activation: dict[str, bool]

    @property
    def launch(self) -> Launch | None:
        """Return the launch that makes the table, or None for dense problems."""
        return None if self.table is None else self.table.launch

    @property
    def spec(self) -> TensorSpec | None:
        """Return the buffer spec of the table, or None for dense problems."""
        return None if self.table is None else self.table.spec

    @property
    def sizes(self) -> dict[str, int]:
        return {"BK": self.BK, "C": CHUNK, "UNIT": self.unit}


def arguments(p: Problem, *others: Tensor) -> Arguments:
    # packed sequences: the table of chunks is made on the device
    table = None if p.cu_seqlens is None else Table(p, machine(p.device))
    strides = [s for x in (p.q, p.k, p.v, *others) for s in x.stride()[:3]]
    kind = machine(p.device).kind
    BK, narrow = max(16, triton.next_power_of_2(p.K)), _narrow(p)
    return Arguments(
        table=table,
        entries=p.num_chunks if table is None else table.bound,
        unit=unit_of(*strides),
        precision="tf32" if narrow.itemsize < 4 else "ieee" if kind == "hip" else "tf32x3",
        BK=BK,
        block=min(BK, 32 if p.q.dtype == torch.float32 else 128),
        activation={"SIGMOID": p.use_beta_sigmoid_in_kernel, "NEGATIVE": p.allow_neg_eigval},
    )


def strides_of(unit: int, *tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of row, token and head, in units; a constant unit lets Triton vectorise loads."""
    return tuple(s // unit for x in tensors for s in x.stride()[:3])


def gate_strides(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in ((0, 0, 0) if x is None else x.stride()))


def _strips(p: Problem, chosen: tuned.Pass) -> dict[str, Any]:
    """Return the constants of a kernel that takes the value columns in strips."""
    return {"BV": chosen.BV, "STAGES": chosen.stages, "REFINE": tuned.fp32_state_operands(p)}


def numbers_of(p: Problem) -> tuple[int, ...]:
    """Return T, HV, ratio, chunks_per_row, which every kernel takes."""
    return (p.T, p.HV, p.HV // p.H, (p.T + CHUNK - 1) // CHUNK)


def _plan_forward(p: Problem, kept: torch.dtype | None, a: Arguments, chosen: tuned.ForwardTiles) -> Forward:
    numbers = numbers_of(p)
    shared = {"K": p.K, "V": p.V, **a.sizes, "PRECISION": a.precision}
    # 4 warps: one per 16 x 16 diagonal block of A, which `tril` inverts in registers
    prepare = Launch(
        prepare_kernel,
        a.entries * p.HV,
        (*strides_of(a.unit, p.q, p.k), *gate_strides(p.g, p.beta), *numbers, p.scale),
        {**shared, "BK": a.block, **a.activation, "RESET": RESET},
        4,
        seconds=2.0,
    )
    # one program per sequence, head and strip: S stays in its registers for all chunks
    programs = p.N * p.HV * triton.cdiv(p.V, chosen.BV)
    split_operands = tuned.split_operands(p, machine(p.device))
    walk = {**shared, "V_FIRST": p.state_v_first, **_strips(p, chosen), "FINE": split_operands}
    if chosen.is_fused:
        strides = strides_of(a.unit, p.q, p.k, p.v)
        scan = Launch(
            scan_kernel, programs, (*strides, *numbers, a.entries), walk, chosen.num_warps, seconds=1.3
        )
        return Forward(_forward_specs(p, kept, False, a), a.launch, prepare, scan, None)
    strides = strides_of(a.unit, p.k, p.v)
    # few sequences and heads: the scan is the critical path, and outputs get a kernel that fills all SMs
    state = Launch(state_kernel, programs, (*strides, *numbers, a.entries), walk, chosen.num_warps)
    output = Launch(
        output_kernel,
        a.entries * p.HV * triton.cdiv(p.V, chosen.output.BV),
        (*strides_of(a.unit, p.q), *numbers),
        {**shared, "BK": a.block, "BV": chosen.output.BV, "REFINE": tuned.fp32_state_operands(p)},
        chosen.output.num_warps,
    )
    return Forward(_forward_specs(p, kept or operand(p), True, a), a.launch, prepare, state, output)


def _forward_specs(
    p: Problem, kept: torch.dtype | None, is_apart: bool, a: Arguments
) -> tuple[TensorSpec | None, ...]:
    """Return the buffer specs of a forward, in the order of `Forward.specs`."""
    G, A_inv, _, _, q_rstd, k_rstd = saves(p)
    # tensors that only later kernels read are in the input's dtype, to save HBM traffic
    narrow, tiles = _narrow(p), (p.num_chunks, p.HV)
    shapes = (
        G,
        A_inv,
        ((*tiles, CHUNK, CHUNK), narrow),
        ((*tiles, ROWS.value, CHUNK), torch.float32),
        q_rstd,
        k_rstd,
        None if kept is None else ((*tiles, p.K, p.V), kept),
        ((*tiles, CHUNK, p.V), narrow) if is_apart else None,
        (p.state_shape, torch.float32) if p.output_final_state else None,
        (p.v.shape, p.v.dtype),
    )
    return (*(None if x is None else tensor_spec(*x) for x in shapes), a.spec)


def _plan_backward(p: Problem, do: Tensor, a: Arguments, chosen: tuned.BackwardTiles) -> Backward:
    numbers = numbers_of(p)
    shared = {"K": p.K, "V": p.V, **a.sizes, "PRECISION": a.precision}
    # P and factors again, instead of keeping them in HBM from forward to backward
    pairs = Launch(
        pairs_kernel,
        a.entries * p.HV,
        (*strides_of(a.unit, p.q, p.k), *gate_strides(p.beta), *numbers, p.scale),
        {"K": p.K, **a.sizes, "BK": a.block, **a.activation, "PRECISION": a.precision},
        4,
    )
    split_operands = tuned.split_operands(p, machine(p.device))
    state = Launch(
        state_bwd_kernel,
        p.N * p.HV * triton.cdiv(p.V, chosen.BV),
        (*strides_of(a.unit, p.q, p.k, do), *numbers, a.entries),
        {**shared, "V_FIRST": p.state_v_first, **_strips(p, chosen), "FINE": split_operands},
        chosen.num_warps,
    )
    # blocks of K per program bound the registers of dq and dk
    BK = min(a.BK, chosen.BK)
    blocks = triton.cdiv(p.K, BK)
    width, is_shared = _pairs_width(p, blocks)
    gradients = []
    # group by group, so that scaled v_new takes memory for one group of chunks only
    for begin in range(0, a.entries, chosen.part):
        entries = min(chosen.part, a.entries - begin)
        pairs_bwd = Launch(
            pairs_bwd_kernel,
            entries * p.HV,
            (*strides_of(a.unit, p.q, p.k, p.v, do), *numbers, p.scale, width // 16, begin),
            {**shared, "BK": BK, **_strips(p, chosen.pairs), "FINE": split_operands},
            chosen.pairs.num_warps,
        )
        rows_bwd = Launch(
            rows_bwd_kernel,
            entries * p.H * blocks,
            (*strides_of(a.unit, p.q, p.k, do), *numbers, width // 16, begin),
            {**shared, "BK": BK, **_strips(p, chosen.rows), "FINE": split_operands},
            chosen.rows.num_warps,
        )
        gradients.append((pairs_bwd, rows_bwd))
    num_terms = triton.cdiv(p.V, chosen.BV) if split_operands else 1  # of dg through the state, per chunk
    # 1 warp: vectors of 64 tokens, no MMA
    gates = Launch(
        gates_bwd_kernel,
        a.entries * p.HV,
        (*gate_strides(p.g, p.beta), p.T, p.HV, numbers[-1], num_terms),
        {"C": CHUNK, **a.activation, "RESET": RESET},
        1,
    )
    add = None
    if p.A_log is not None:
        num_sums = 1 if p.dt_bias is None else 2
        # partial sums of all chunks, added in a fixed order
        add = sums.add(a.entries, num_sums, p.HV, (0, 1), is_row_first=True)
    late = _late_specs(p, min(chosen.part, a.entries), None if is_shared else width)
    return Backward(_backward_specs(p, a), late, a.launch, pairs, state, tuple(gradients), gates, add)


# shapes of Backward.specs; P and its low half come last, because `chunk_backward` frees them first
def _backward_specs(p: Problem, a: Arguments) -> tuple[TensorSpec | None, ...]:
    tiles = (p.num_chunks, p.HV)
    # fp64 sums per chunk: their total may cancel
    partial = [x for x in (p.A_log, p.dt_bias) if x is not None]
    S_in, P = saves(p)[2], tensor_spec((*tiles, CHUNK, CHUNK), operand(p))
    assert S_in is not None
    return (
        tensor_spec(p.v.shape, _narrow(p)),
        *(None if x is None else tensor_spec(x.shape, x.dtype) for x in (p.g, p.beta, p.initial_state)),
        tensor_spec(*S_in),
        *(None if x is None else tensor_spec(x.shape, x.dtype) for x in (p.A_log, p.dt_bias)),
        tensor_spec((len(partial), a.entries, p.HV), torch.float64) if partial else None,
        tensor_spec((*tiles, ROWS.value, CHUNK), torch.float32),
        a.spec,
        P,
        P if tuned.split_operands(p, machine(p.device)) else None,
    )


def _late_specs(p: Problem, count: int, width: int | None) -> tuple[TensorSpec | None, ...]:
    """Return the specs of `Backward.late`. `count`: chunks of a group; `width`: columns of E and F per token.

    `width` is None where E and F are stored in dq's memory.
    """
    pairs = None if width is None else tensor_spec((p.B, p.T, p.H, width), p.q.dtype)
    # one group of chunks: scaled v_new, and its low 8 bits for bf16
    shape = (count, p.HV, CHUNK, p.V)
    has_rest = p.q.dtype == torch.bfloat16 and tuned.split_operands(p, machine(p.device))
    return (
        tensor_spec(p.q.shape, p.q.dtype),
        tensor_spec(p.k.shape, p.k.dtype),
        tensor_spec(shape, operand(p)),
        tensor_spec(shape, torch.int8) if has_rest else None,
        pairs,
    )
