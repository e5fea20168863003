"""Launch the chunked backward: Triton's passes up to dr and dS, then the Gluon gradient kernel.

    table, pairs, state_bwd   Triton   P and factors; dr and dS of every chunk
    backward_factors          Triton   per-token factors of the Gluon kernels
    gradients                 Gluon    dq, dk, dv, and the terms of the gates' gradients
    gates_bwd, sums           Triton   dg, dbeta, dA_log, ddt_bias

It replaces `pairs_bwd` and `rows_bwd`, and needs neither E, F nor v_new in HBM.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn.backends.backend import Gradients, Saved
from gdn.backends.hopper import cost, rule
from gdn.backends.hopper.backward.factors import ROWS, backward_factors_kernel
from gdn.backends.hopper.backward.gradients import gradients_kernel
from gdn.backends.hopper.chunk import TILE
from gdn.backends.triton.launch import Launch, Plans, Room, Step, allocate, on, room
from gdn.backends.triton.rule import build as plans
from gdn.backends.triton.rule import run as chunked
from gdn.backends.triton.rule.steps import Backward
from gdn.problem import CHUNK, Problem

# Whether `hopper` runs this backward. It has not been measured on a GPU, so Triton's is used.
IS_ON = False
HEADS = 8  # value heads of a program of backward_factors_kernel
STRIP = 64  # value columns that the gradient kernel loads at once


@dataclass(frozen=True)
class Gluon:
    """Hold the launches that follow Triton's state pass, and the specs of the tensors they write."""

    before: Backward  # Triton's launches; only its `gradients` are not used
    rooms: tuple[Room, ...]  # factors, dq, dk
    factors: Launch
    gradients: Launch

    def steps(self, p: Problem, saved: Saved, do: Tensor, new: list[Any], late: list[Any]) -> Iterator[Step]:
        """Yield the launches after the state pass; `new`: the tensors of `before.rooms`."""
        dv, dg, dbeta, _, dS, dA_log, ddt_bias, partial, shares, table, *_ = new
        factors, dq, dk = late
        assert saved.S_in is not None and saved.A_inv is not None
        yield self.factors, (p.beta, saved.G, saved.q_rstd, saved.k_rstd, table, factors)
        tokens = [rule._descriptor(x, (1, CHUNK, 1, STRIP), rule.TOKENS) for x in (p.q, p.k, p.v, do, dv)]
        states = [rule._descriptor(x.view(-1, p.V), (p.K, STRIP), TILE.value) for x in (saved.S_in, dS)]
        rows = [rule._descriptor(x.view(-1, p.H * p.K), (CHUNK, STRIP), TILE.value) for x in (dq, dk)]
        A_inv = rule._descriptor(saved.A_inv.view(-1, CHUNK), (CHUNK, CHUNK), TILE.value)
        box = rule._descriptor(factors.view(-1, CHUNK), (ROWS.value, CHUNK), rule.VECTOR)
        yield self.gradients, (*tokens, *states, A_inv, box, *rows, table, dq, dk, dv, shares)
        gates = (p.g, p.beta, p.A_log, p.dt_bias, saved.G, table, shares)
        yield self.before.gates, (*gates, dg, dbeta, partial)
        if self.before.sums is not None:
            yield self.before.sums, (partial, *((None, dA_log) if ddt_bias is None else (dA_log, ddt_bias)))


_plans: Plans[Gluon] = Plans()


def lacks(p: Problem, saved: Saved) -> str | None:
    """Return why this backward does not support a problem, or None if it does."""
    if not IS_ON:
        return "expected the Gluon backward to be on"
    if p.K != 2 * STRIP or p.V != p.K or p.q.dtype != torch.bfloat16:
        return f"expected K = V = 128 in bf16, got K={p.K}, V={p.V}, {p.q.dtype}"
    if any(x is not None and x.dtype != torch.bfloat16 for x in (saved.A_inv, saved.S_in)):
        return "expected A_inv and the states to be saved in bf16"
    if p.q.numel() == 0 or p.N == 0:
        return "expected tokens"
    return None


def chunk_backward(problem: Problem, saved: Saved, do: Tensor | None, dS: Tensor | None) -> Gradients:
    """Implement `Backend.chunk_backward`; fall back to Triton's where `lacks` has a reason."""
    if lacks(problem, saved) is not None:
        return chunked.chunk_backward(problem, saved, do, dS)
    p = rule._aligned(chunked.tidy(problem))
    if saved.G is None or saved.A_inv is None or saved.S_in is None or chunked._lacks_norms(p, saved):
        saved = chunked.chunk_forward(p, True)[2]
    do = torch.zeros_like(p.v) if do is None else rule._copyable(chunked._rows(do.to(p.v.dtype)))
    dS = None if dS is None else dS.contiguous()
    with on(p.device):
        before = plans.backward_plan(p, saved, do, dS)
        plan = _plans.get((plans.key(p), do.stride()), lambda: _plan(p, before))
        new = allocate(p.device, before.rooms)
        before.run([*plans.tensors_of(p), *saved, do, dS, *new])
        # free P and P_rest before dq and dk are allocated: this lowers peak memory
        del new[-2:]
        late = allocate(p.device, plan.rooms)
        for launch, tensors in plan.steps(p, saved, do, new, late):
            launch(*tensors)
    dv, dg, dbeta, dS0, _, dA_log, ddt_bias, *_ = new
    _, dq, dk = late
    assert dq is not None and dk is not None and dv is not None
    return Gradients(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dS0)


def _plan(p: Problem, before: Backward) -> Gluon:
    a = plans.arguments(p)
    numbers = plans.numbers_of(p)
    factors = Launch(
        backward_factors_kernel,
        a.entries * -(-p.HV // HEADS),
        (*plans.gate_strides(p.beta), *numbers, p.scale),
        {"C": CHUNK, "BH": HEADS, **a.activation},
        4,
    )
    items = a.entries * p.H
    gradients = Launch(
        gradients_kernel,
        # persistent: 1 CTA an SM, as a CTA takes nearly all of an SM's shared memory
        min(items, cost.num_sms(p.device)),
        (*numbers, items),
        {"NORM": p.use_qk_l2norm_in_kernel, "GIVEN_DR": True, "D": p.K},
        4,
        options={"maxnreg": 168},
        described=11,
        seconds=3.0,
    )
    rooms = (
        room((a.entries, p.HV, ROWS.value, CHUNK), torch.float32),
        room(p.q.shape, p.q.dtype),
        room(p.k.shape, p.k.dtype),
    )
    return Gluon(before, rooms, factors, gradients)
