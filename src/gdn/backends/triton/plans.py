"""What a call of the chunked rule launches and allocates, for problems that differ only in where tensors lie.

A plan is made once for a problem's shapes, strides, dtypes and options. With the first of its kind go the
binaries that other numbers of heads, sequences and tokens would choose (`tuned`), compiled beside its own.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from gdn import settings
from gdn.backends.backend import Saved, Shape
from gdn.backends.triton import beside, sums, tuned
from gdn.backends.triton.chunks import Table
from gdn.backends.triton.gates_bwd import gates_bwd_kernel
from gdn.backends.triton.gradients import pairs_bwd_kernel, rows_bwd_kernel
from gdn.backends.triton.launch import (
    Launch,
    Plans,
    Room,
    Step,
    ahead,
    machine,
    room,
    stand_ins,
    unit_of,
)
from gdn.backends.triton.output import output_kernel
from gdn.backends.triton.pairs import ROWS, pairs_kernel
from gdn.backends.triton.prepare import prepare_kernel
from gdn.backends.triton.scan import scan_kernel
from gdn.backends.triton.state import state_kernel
from gdn.backends.triton.state_bwd import state_bwd_kernel
from gdn.backends.triton.steps import Backward, Forward
from gdn.problem import CHUNK, RESET, Problem

_forwards: Plans[Forward] = Plans()
_backwards: Plans[Backward] = Plans()


def forward_plan(p: Problem, kept: torch.dtype | None) -> Forward:
    """`kept`: the dtype of states that enter chunks, where they are kept."""
    return _forwards.get((key(p), kept), lambda: _first_forward(p, kept))


def backward_plan(p: Problem, saved: Saved, do: Tensor, dS: Tensor | None) -> Backward:
    assert saved.A_inv is not None and saved.S_in is not None
    found = (key(p), do.stride(), None if dS is None else dS.dtype, saved.A_inv.dtype, saved.S_in.dtype)
    return _backwards.get(found, lambda: _first_backward(p, saved, do, dS))


def _first_forward(p: Problem, kept: torch.dtype | None) -> Forward:
    a = arguments(p)
    is_shared = settings.backend(p.backend) is None

    def steps() -> Iterator[Step]:
        yield from launches(p, kept)
        for others in beside if is_shared else ():
            yield from others(p, kept)

    ahead(p.device, ("forward", kind_of(p, a), kept, is_shared), steps)
    return _plan_forward(p, kept, a, tuned.forward(p, machine(p.device)))


def launches(p: Problem, kept: torch.dtype | None) -> Iterator[Step]:
    """Of forwards of this kind of any size, on stand-ins for the tensors that they make."""
    a = arguments(p)
    for chosen in tuned.forwards(p, machine(p.device)):
        plan = _plan_forward(p, kept, a, chosen)
        yield from plan.steps([*tensors_of(p), *stand_ins(p.device, plan.rooms)])


def _first_backward(p: Problem, saved: Saved, do: Tensor, dS: Tensor | None) -> Backward:
    a, gpu = arguments(p, do), machine(p.device)
    plan = _plan_backward(p, do, a, tuned.backward(p, gpu))

    def steps() -> Iterator[Step]:
        for chosen in tuned.backwards(p, gpu):
            other = _plan_backward(p, do, a, chosen)
            new, late = stand_ins(p.device, other.rooms), stand_ins(p.device, other.late)
            given = (*tensors_of(p), *saved, do, dS)
            yield from other.steps([*given, *new])
            yield from other.late_steps([*given, *new[:-2], *late])

    more = (do.dtype, *(None if x is None else x.dtype for x in (dS, *saved)))
    ahead(p.device, ("backward", kind_of(p, a), *more), steps)
    return plan


def saves(problem: Problem) -> tuple[Shape | None, ...]:
    """Shapes of Saved: all but v_new, which the backward makes again from S_in for two products."""
    p, dtype = problem, operand(problem)
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
    """Columns that E and F take per token and key head, and whether they may lie in dq.

    They may where one program fills all columns of it, and a multiple of 16 holds rows apart.
    """
    needed = p.HV // p.H * CHUNK
    is_shared = blocks == 1 and needed <= p.K and p.K % 16 == 0
    return (p.K if is_shared else needed), is_shared


def operand(p: Problem) -> torch.dtype:
    """What products through the state are made of."""
    return torch.float32 if tuned.refines(p) else p.q.dtype


def _narrow(p: Problem) -> torch.dtype:
    """What passes from kernel to kernel without meeting a state."""
    return torch.float32 if tuned.is_exact(p) else p.q.dtype


def key(p: Problem) -> Hashable:
    """Everything of a problem that its launches depend on, but for where its tensors lie."""
    if p.form is not None:
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
    """A problem's tensors as `steps` takes them."""
    return (p.q, p.k, p.v, p.g, p.beta, p.A_log, p.dt_bias, p.initial_state, p.cu_seqlens)


def kind_of(p: Problem, a: "Arguments") -> Hashable:
    """All of a problem that tells its binaries, and those of its kind with other sizes, from others."""
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
    """What the launches of a problem share."""

    table: Table | None
    entries: int
    unit: int
    precision: str
    BK: int
    block: int  # key columns of one product, where a kernel can take them in turn
    activation: dict[str, bool]

    @property
    def launch(self) -> Launch | None:
        """What makes the table."""
        return None if self.table is None else self.table.launch

    @property
    def room(self) -> Room | None:
        """The table's."""
        return None if self.table is None else self.table.room

    @property
    def sizes(self) -> dict[str, int]:
        return {"BK": self.BK, "C": CHUNK, "UNIT": self.unit}


def arguments(p: Problem, *others: Tensor) -> Arguments:
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
    """Strides of row, token and head, in units."""
    return tuple(s // unit for x in tensors for s in x.stride()[:3])


def gate_strides(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in ((0, 0, 0) if x is None else x.stride()))


def _strips(p: Problem, chosen: tuned.Pass) -> dict[str, Any]:
    """Constants of a kernel that takes the value columns in strips."""
    return {"BV": chosen.BV, "STAGES": chosen.stages, "REFINE": tuned.refines(p)}


def numbers_of(p: Problem) -> tuple[int, ...]:
    """T, HV, ratio, chunks_per_row."""
    return (p.T, p.HV, p.HV // p.H, (p.T + CHUNK - 1) // CHUNK)


def _plan_forward(p: Problem, kept: torch.dtype | None, a: Arguments, chosen: tuned.ForwardTiles) -> Forward:
    numbers = numbers_of(p)
    shared = {"K": p.K, "V": p.V, **a.sizes, "PRECISION": a.precision}
    prepare = Launch(
        prepare_kernel,
        a.entries * p.HV,
        (*strides_of(a.unit, p.q, p.k), *gate_strides(p.g, p.beta), *numbers, p.scale),
        {**shared, "BK": a.block, **a.activation, "RESET": RESET},
        4,
        seconds=2.0,
    )
    programs = p.N * p.HV * triton.cdiv(p.V, chosen.BV)
    is_fine = tuned.is_fine(p, machine(p.device))
    walk = {**shared, "V_FIRST": p.state_v_first, **_strips(p, chosen), "FINE": is_fine}
    if chosen.is_fused:
        strides = strides_of(a.unit, p.q, p.k, p.v)
        scan = Launch(
            scan_kernel, programs, (*strides, *numbers, a.entries), walk, chosen.num_warps, seconds=1.3
        )
        return Forward(_rooms(p, kept, False, a), a.launch, prepare, scan, None)
    strides = strides_of(a.unit, p.k, p.v)
    state = Launch(state_kernel, programs, (*strides, *numbers, a.entries), walk, chosen.num_warps)
    output = Launch(
        output_kernel,
        a.entries * p.HV * triton.cdiv(p.V, chosen.output.BV),
        (*strides_of(a.unit, p.q), *numbers),
        {**shared, "BK": a.block, "BV": chosen.output.BV, "REFINE": tuned.refines(p)},
        chosen.output.num_warps,
    )
    return Forward(_rooms(p, kept or operand(p), True, a), a.launch, prepare, state, output)


def _rooms(p: Problem, kept: torch.dtype | None, is_apart: bool, a: Arguments) -> tuple[Room | None, ...]:
    """What a forward allocates: see `Forward`."""
    G, A_inv, _, _, q_rstd, k_rstd = saves(p)
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
    return (*(None if x is None else room(*x) for x in shapes), a.room)


def _plan_backward(p: Problem, do: Tensor, a: Arguments, chosen: tuned.BackwardTiles) -> Backward:
    numbers = numbers_of(p)
    shared = {"K": p.K, "V": p.V, **a.sizes, "PRECISION": a.precision}
    pairs = Launch(
        pairs_kernel,
        a.entries * p.HV,
        (*strides_of(a.unit, p.q, p.k), *gate_strides(p.beta), *numbers, p.scale),
        {"K": p.K, **a.sizes, "BK": a.block, **a.activation, "PRECISION": a.precision},
        4,
    )
    is_fine = tuned.is_fine(p, machine(p.device))
    state = Launch(
        state_bwd_kernel,
        p.N * p.HV * triton.cdiv(p.V, chosen.BV),
        (*strides_of(a.unit, p.q, p.k, do), *numbers, a.entries),
        {**shared, "V_FIRST": p.state_v_first, **_strips(p, chosen), "FINE": is_fine},
        chosen.num_warps,
    )
    BK = min(a.BK, chosen.BK)
    blocks = triton.cdiv(p.K, BK)
    width, is_shared = _pairs_width(p, blocks)
    gradients = []
    for begin in range(0, a.entries, chosen.part):
        entries = min(chosen.part, a.entries - begin)
        pairs_bwd = Launch(
            pairs_bwd_kernel,
            entries * p.HV,
            (*strides_of(a.unit, p.q, p.k, p.v, do), *numbers, p.scale, width // 16, begin),
            {**shared, "BK": BK, **_strips(p, chosen.pairs), "FINE": is_fine},
            chosen.pairs.num_warps,
        )
        rows_bwd = Launch(
            rows_bwd_kernel,
            entries * p.H * blocks,
            (*strides_of(a.unit, p.q, p.k, do), *numbers, width // 16, begin),
            {**shared, "BK": BK, **_strips(p, chosen.rows), "FINE": is_fine},
            chosen.rows.num_warps,
        )
        gradients.append((pairs_bwd, rows_bwd))
    gates = Launch(
        gates_bwd_kernel,
        a.entries * p.HV,
        (*gate_strides(p.g, p.beta), p.T, p.HV, numbers[-1], triton.cdiv(p.V, chosen.BV) if is_fine else 1),
        {"C": CHUNK, **a.activation, "RESET": RESET},
        1,
    )
    add = None
    if p.A_log is not None:
        num_sums = 1 if p.dt_bias is None else 2
        add = sums.add(a.entries, num_sums, p.HV, (0, 1), is_row_first=True)
    late = _late_rooms(p, min(chosen.part, a.entries), None if is_shared else width)
    return Backward(_first_rooms(p, a), late, a.launch, pairs, state, tuple(gradients), gates, add)


def _first_rooms(p: Problem, a: Arguments) -> tuple[Room | None, ...]:
    tiles = (p.num_chunks, p.HV)
    partial = [x for x in (p.A_log, p.dt_bias) if x is not None]
    S_in, P = saves(p)[2], room((*tiles, CHUNK, CHUNK), operand(p))
    assert S_in is not None
    return (
        room(p.v.shape, _narrow(p)),
        *(None if x is None else room(x.shape, x.dtype) for x in (p.g, p.beta, p.initial_state)),
        room(*S_in),
        *(None if x is None else room(x.shape, x.dtype) for x in (p.A_log, p.dt_bias)),
        room((len(partial), a.entries, p.HV), torch.float64) if partial else None,
        room((*tiles, ROWS.value, CHUNK), torch.float32),
        a.room,
        P,
        P if tuned.is_fine(p, machine(p.device)) else None,
    )


def _late_rooms(p: Problem, count: int, width: int | None) -> tuple[Room | None, ...]:
    """`count`: chunks of a part; `width`: columns of E and F per token and key head, where they lie apart."""
    pairs = None if width is None else room((p.B, p.T, p.H, width), p.q.dtype)
    shape = (count, p.HV, CHUNK, p.V)
    has_rest = p.q.dtype == torch.bfloat16 and tuned.is_fine(p, machine(p.device))
    return (
        room(p.q.shape, p.q.dtype),
        room(p.k.shape, p.k.dtype),
        room(shape, operand(p)),
        room(shape, torch.int8) if has_rest else None,
        pairs,
    )
