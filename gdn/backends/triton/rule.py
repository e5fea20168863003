"""The chunked rule: which kernels run, in which tiles, and what they hand on.

Forward: prepare, then the state pass, then all outputs at once; or, where sequences and heads fill the
machine, prepare and one walk that makes the outputs. Backward: what the state pass needs, the state pass
backwards, then the gradients of pairs, of rows and of the gates. Packed sequences cost one more small launch,
which finds the chunks.

Bytes per token and value head, K = V = 128 in bf16, HV = H, options on: forward 810 + 1430 + 1410 = 3650, or
810 + 1300 = 2110 (with S kept for a backward 2620); backward 700 + 1810 + 2730 + 3070 + 50 = 8360.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from gdn.backends.backend import Gradients, Saved, Shape
from gdn.backends.triton import tuned
from gdn.backends.triton.chunks import Table
from gdn.backends.triton.gates_bwd import gates_bwd_kernel
from gdn.backends.triton.gradients import pairs_bwd_kernel, rows_bwd_kernel
from gdn.backends.triton.launch import Launch, Plans, machine, on, unit_of
from gdn.backends.triton.output import output_kernel
from gdn.backends.triton.pairs import ROWS, pairs_kernel
from gdn.backends.triton.prepare import prepare_kernel
from gdn.backends.triton.scan import scan_kernel
from gdn.backends.triton.state import state_kernel
from gdn.backends.triton.state_bwd import state_bwd_kernel
from gdn.problem import CHUNK, RESET, Problem


@dataclass(frozen=True)
class Forward:
    """The launches of one forward. `output` is None where the state pass makes the outputs."""

    rooms: tuple[Shape | None, ...]  # G, A_inv, P, factors, q_rstd, k_rstd, S_in, v_new, final
    table: Table | None
    prepare: Launch
    state: Launch
    output: Launch | None


@dataclass(frozen=True)
class Backward:
    """The launches of one backward."""

    table: Table | None
    pairs: Launch
    state: Launch
    gradients: tuple[tuple[Launch, Launch], ...]  # of pairs and rows, of some chunks after the others
    gates: Launch
    blocks: int  # of key columns, each a program of rows_bwd
    grown: Shape


_forwards: Plans[Forward] = Plans()
_backwards: Plans[Backward] = Plans()


def saves(problem: Problem) -> tuple[Shape | None, ...]:
    """Shapes of Saved: all but v_new, which the backward makes again from S_in for two products."""
    p, operand = problem, _operand(problem)
    rstd = ((p.B, p.T, p.H), torch.float32) if p.use_qk_l2norm_in_kernel else None
    return (
        ((p.B, p.T, p.HV), torch.float64),
        ((p.num_chunks, p.HV, CHUNK, CHUNK), operand),
        ((p.num_chunks, p.HV, p.K, p.V), operand),
        None,
        rstd,
        rstd,
    )


def chunk_forward(problem: Problem, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
    """See `Backend`."""
    o, final, saved = forward(tidy(problem), _operand(problem) if save else None)
    return o, final, saved if save else Saved()


def forward(p: Problem, kept: torch.dtype | None) -> tuple[Tensor, Tensor | None, Saved]:
    """The forward of a tidy problem; `kept`: the dtype of states that enter chunks, where they are kept."""
    with on(p.device):
        plan = _forwards.get((_key(p), kept), lambda: _plan_forward(p, kept))
        G, A_inv, P, factors, q_rstd, k_rstd, S_in, v_new, final = (_room(p, x) for x in plan.rooms)
        o = p.v.new_empty(p.v.shape)
        table = _table(plan, p)
        tail = None if table is None else o
        ends = (p.initial_state, p.cu_seqlens, table)
        inputs = (p.q, p.k, p.g, p.beta, p.A_log, p.dt_bias, table)
        plan.prepare(*inputs, G, A_inv, P, factors, q_rstd, k_rstd, tail)
        if plan.output is None:
            plan.state(p.q, p.k, p.v, A_inv, P, factors, *ends, S_in, o, final)
        else:
            plan.state(p.k, p.v, A_inv, factors, *ends, S_in, v_new, final)
            plan.output(p.q, P, factors, S_in, v_new, table, o)
    return o, final, Saved(G=G, A_inv=A_inv, S_in=S_in, q_rstd=q_rstd, k_rstd=k_rstd)


def chunk_backward(problem: Problem, saved: Saved, do: Tensor | None, dS: Tensor | None) -> Gradients:
    """See `Backend`."""
    p = tidy(problem)
    if saved.G is None or saved.A_inv is None or saved.S_in is None or _lacks_norms(p, saved):
        saved = chunk_forward(p, True)[2]
    assert saved.A_inv is not None and saved.S_in is not None
    do = torch.zeros_like(p.v) if do is None else _rows(do.to(p.v.dtype))
    dS = None if dS is None else dS.contiguous()
    with on(p.device):
        key = (_key(p), do.stride(), None if dS is None else dS.dtype, saved.A_inv.dtype, saved.S_in.dtype)
        plan = _backwards.get(key, lambda: _plan_backward(p, do))
        dv = p.v.new_empty(p.v.shape, dtype=_narrow(p))
        dg, dbeta, dS0 = (None if x is None else x.new_empty(x.shape) for x in (p.g, p.beta, p.initial_state))
        dS_out = _room(p, saves(p)[2])
        table = _table(plan, p)
        entries = p.num_chunks if plan.table is None else plan.table.bound
        dA_log, ddt_bias = (
            None if x is None else x.new_empty(entries, p.HV, dtype=torch.float64)
            for x in (p.A_log, p.dt_bias)
        )
        norms = (saved.q_rstd, saved.k_rstd)
        P = p.q.new_empty(p.num_chunks, p.HV, CHUNK, CHUNK, dtype=_narrow(p))
        factors = p.q.new_empty(p.num_chunks, p.HV, ROWS.value, CHUNK, dtype=torch.float32)
        plan.pairs(p.q, p.k, p.beta, saved.G, *norms, table, P, factors)
        plan.state(p.q, p.k, saved.A_inv, P, factors, do, dS, p.cu_seqlens, table, dS_out, dv, dS0)
        del P
        dq, dk = (x.new_empty(x.shape) for x in (p.q, p.k))
        # E and F lie in the places of dq and dk where a key head's columns hold those of its value heads
        width, is_shared = _pairs_width(p, plan.blocks)
        E, F = (dq, dk) if is_shared else (p.q.new_empty(p.B, p.T, p.H, width) for _ in range(2))
        grown = _room(p, plan.grown)
        for pairs_bwd, rows_bwd in plan.gradients:
            pairs_bwd(
                p.q, p.k, p.v, saved.G, saved.A_inv, *norms, saved.S_in, do, table, E, F, dv, grown, factors
            )
            rows_bwd(p.q, p.k, *norms, saved.S_in, dS_out, do, dv, grown, table, E, F, factors, dq, dk)
        plan.gates(
            p.g, p.beta, p.A_log, p.dt_bias, saved.G, table, factors, dg, dbeta, dA_log, ddt_bias
        )  # fmt: skip
        totals = _total(dA_log, p.A_log), _total(ddt_bias, p.dt_bias)
        return Gradients(dq, dk, dv.to(p.v.dtype), dg, dbeta, *totals, dS0)


def tidy(problem: Problem) -> Problem:
    """The problem with every tensor as the kernels read it; copies only what has an unusual layout."""
    p = problem
    changed: dict[str, Tensor] = {}
    for name in ("q", "k", "v"):
        x = getattr(p, name)
        if x.stride(-1) != 1:
            changed[name] = _rows(x)
    for name in ("A_log", "dt_bias", "initial_state", "cu_seqlens"):
        x = getattr(p, name)
        if x is not None and not x.is_contiguous():
            changed[name] = x.contiguous()
    if p.cu_seqlens is not None and p.cu_seqlens.device != p.device:
        changed["cu_seqlens"] = p.cu_seqlens.to(p.device, non_blocking=True)
    return replace(p, **changed) if changed else p  # type: ignore[arg-type]


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _total(parts: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The sum over chunks of what each added to a gradient [HV]."""
    return None if parts is None or like is None else parts.sum(0).to(like.dtype)


def _table(plan: Forward | Backward, p: Problem) -> Tensor | None:
    return None if plan.table is None or p.cu_seqlens is None else plan.table.make(p.cu_seqlens)


def _lacks_norms(p: Problem, saved: Saved) -> bool:
    return p.use_qk_l2norm_in_kernel and (saved.q_rstd is None or saved.k_rstd is None)


def _room(p: Problem, shape: Shape | None) -> Tensor | None:
    return None if shape is None else p.q.new_empty(shape[0], dtype=shape[1])


def _pairs_width(p: Problem, blocks: int) -> tuple[int, bool]:
    """Columns that E and F take per token and key head, and whether they may lie in dq and dk.

    They may where one program fills all columns of those, and a multiple of 16 holds rows apart.
    """
    needed = p.HV // p.H * CHUNK
    is_shared = blocks == 1 and needed <= p.K and p.K % 16 == 0
    return (p.K if is_shared else needed), is_shared


def _operand(p: Problem) -> torch.dtype:
    """What products through the state are made of."""
    return torch.float32 if tuned.refines(p) else p.q.dtype


def _narrow(p: Problem) -> torch.dtype:
    """What passes from kernel to kernel without meeting a state."""
    return torch.float32 if tuned.is_exact(p) else p.q.dtype


def _key(p: Problem) -> Hashable:
    """Everything of a problem that its launches depend on, but for where its tensors lie."""
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


@dataclass(frozen=True)
class _Arguments:
    """What the launches of a problem share."""

    table: Table | None
    entries: int
    unit: int
    precision: str
    BK: int
    block: int  # key columns of one product, where a kernel can take them in turn
    activation: dict[str, bool]

    @property
    def sizes(self) -> dict[str, int]:
        return {"BK": self.BK, "C": CHUNK, "UNIT": self.unit}


def _arguments(p: Problem, *others: Tensor) -> _Arguments:
    table = None if p.cu_seqlens is None else Table(p)
    strides = [s for x in (p.q, p.k, p.v, *others) for s in x.stride()[:3]]
    kind = machine(p.device).kind
    BK, narrow = max(16, triton.next_power_of_2(p.K)), _narrow(p)
    return _Arguments(
        table=table,
        entries=p.num_chunks if table is None else table.bound,
        unit=unit_of(*strides),
        precision="tf32" if narrow.itemsize < 4 else "ieee" if kind == "hip" else "tf32x3",
        BK=BK,
        block=min(BK, 32 if p.q.dtype == torch.float32 else 128),
        activation={"SIGMOID": p.use_beta_sigmoid_in_kernel, "NEGATIVE": p.allow_neg_eigval},
    )


def _strides(unit: int, *tensors: Tensor) -> tuple[int, ...]:
    """Strides of row, token and head, in units."""
    return tuple(s // unit for x in tensors for s in x.stride()[:3])


def _gate_strides(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in ((0, 0, 0) if x is None else x.stride()))


def _strips(p: Problem, chosen: tuned.Pass) -> dict[str, Any]:
    """Constants of a kernel that takes the value columns in strips."""
    return {"BV": chosen.BV, "STAGES": chosen.stages, "REFINE": tuned.refines(p)}


def _numbers(p: Problem) -> tuple[int, ...]:
    """T, HV, ratio, chunks_per_row."""
    return (p.T, p.HV, p.HV // p.H, (p.T + CHUNK - 1) // CHUNK)


def _plan_forward(p: Problem, kept: torch.dtype | None) -> Forward:
    a = _arguments(p)
    chosen = tuned.forward(p, machine(p.device))
    numbers = _numbers(p)
    shared = {"K": p.K, "V": p.V, **a.sizes, "PRECISION": a.precision}
    prepare = Launch(
        prepare_kernel,
        a.entries * p.HV,
        (*_strides(a.unit, p.q, p.k), *_gate_strides(p.g, p.beta), *numbers, p.scale),
        {**shared, "BK": a.block, **a.activation, "RESET": RESET, "FORM": chosen.form},
        chosen.prepare_warps,
    )
    programs = p.N * p.HV * triton.cdiv(p.V, chosen.BV)
    walk = {**shared, "V_FIRST": p.state_v_first, **_strips(p, chosen)}
    if chosen.is_fused:
        strides = _strides(a.unit, p.q, p.k, p.v)
        scan = Launch(scan_kernel, programs, (*strides, *numbers, a.entries), walk, chosen.num_warps)
        return Forward(_rooms(p, kept, False), a.table, prepare, scan, None)
    strides = _strides(a.unit, p.k, p.v)
    state = Launch(state_kernel, programs, (*strides, *numbers, a.entries), walk, chosen.num_warps)
    output = Launch(
        output_kernel,
        a.entries * p.HV * triton.cdiv(p.V, chosen.output.BV),
        (*_strides(a.unit, p.q), *numbers),
        {**shared, "BK": a.block, "BV": chosen.output.BV, "REFINE": tuned.refines(p)},
        chosen.output.num_warps,
    )
    return Forward(_rooms(p, kept or _operand(p), True), a.table, prepare, state, output)


def _rooms(p: Problem, kept: torch.dtype | None, is_apart: bool) -> tuple[Shape | None, ...]:
    """What a forward allocates: see `Forward`."""
    G, A_inv, _, _, q_rstd, k_rstd = saves(p)
    narrow, tiles = _narrow(p), (p.num_chunks, p.HV)
    return (
        G,
        A_inv,
        ((*tiles, CHUNK, CHUNK), narrow),
        ((*tiles, ROWS.value, CHUNK), torch.float32),
        q_rstd,
        k_rstd,
        None if kept is None else ((*tiles, p.K, p.V), kept),
        ((*tiles, CHUNK, p.V), narrow) if is_apart else None,
        (p.state_shape, torch.float32) if p.output_final_state else None,
    )


def _plan_backward(p: Problem, do: Tensor) -> Backward:
    a = _arguments(p, do)
    chosen = tuned.backward(p, machine(p.device))
    numbers = _numbers(p)
    precision = {"PRECISION": a.precision}
    shared = {"K": p.K, "V": p.V, **a.sizes, **precision}
    pairs = Launch(
        pairs_kernel,
        a.entries * p.HV,
        (*_strides(a.unit, p.q, p.k), *_gate_strides(p.beta), *numbers, p.scale),
        {"K": p.K, **a.sizes, "BK": a.block, **a.activation, **precision},
        4,
    )
    state = Launch(
        state_bwd_kernel,
        p.N * p.HV * triton.cdiv(p.V, chosen.BV),
        (*_strides(a.unit, p.q, p.k, do), *numbers, a.entries),
        {**shared, "V_FIRST": p.state_v_first, **_strips(p, chosen)},
        chosen.num_warps,
    )
    BK = min(a.BK, chosen.BK)
    blocks = triton.cdiv(p.K, BK)
    width, _ = _pairs_width(p, blocks)
    gradients = []
    for begin in range(0, a.entries, chosen.part):
        entries = min(chosen.part, a.entries - begin)
        pairs_bwd = Launch(
            pairs_bwd_kernel,
            entries * p.HV,
            (*_strides(a.unit, p.q, p.k, p.v, do), *numbers, p.scale, width // 16, begin),
            {**shared, "BK": BK, **_strips(p, chosen.pairs)},
            chosen.pairs.num_warps,
        )
        rows_bwd = Launch(
            rows_bwd_kernel,
            entries * p.H * blocks,
            (*_strides(a.unit, p.q, p.k, do), *numbers, width // 16, begin),
            {**shared, "BK": BK, **_strips(p, chosen.rows)},
            chosen.rows.num_warps,
        )
        gradients.append((pairs_bwd, rows_bwd))
    grown = ((min(chosen.part, a.entries), p.HV, CHUNK, p.V), _operand(p))
    gates = Launch(
        gates_bwd_kernel,
        a.entries * p.HV,
        (*_gate_strides(p.g, p.beta), p.T, p.HV, numbers[-1]),
        {"C": CHUNK, **a.activation, "RESET": RESET},
        1,
    )
    return Backward(a.table, pairs, state, tuple(gradients), gates, blocks, grown)
