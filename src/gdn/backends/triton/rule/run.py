"""Run the chunked rule: allocate the tensors and launch the kernels of the forward and backward.

Forward: `prepare`, the state pass, then all outputs in parallel; or, where sequences and heads fill the GPU,
`prepare` and one state scan that also computes the outputs. Backward: P and factors (`pairs`), the state pass
backwards (`state_bwd`), then the gradients per value head, per key head and of the gates. Packed sequences
need one more small launch, which makes the table of chunks.

Bytes per token and value head, K = V = 128 in bf16, HV = H, options on: forward 810 + 1430 + 1410 = 3650, or
810 + 1300 = 2110 (with S kept for a backward 2620); backward 830 + 2450 + 2730 + 3070 + 50 = 9130.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gdn.backends.backend import Gradients, Saved
from gdn.backends.triton.launch import allocate, device_guard
from gdn.backends.triton.rule import build as plans
from gdn.backends.triton.rule.build import operand, saves, tensors_of
from gdn.problem import Problem

__all__ = ["chunk_backward", "chunk_forward", "forward", "saves", "to_kernel_layout"]


def chunk_forward(problem: Problem, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
    """See `Backend`."""
    o, final, saved = forward(to_kernel_layout(problem), operand(problem) if save else None)
    return o, final, saved if save else Saved()


def forward(p: Problem, kept: torch.dtype | None) -> tuple[Tensor, Tensor | None, Saved]:
    """Run the forward of a problem in kernel layout. `kept`: the dtype of S_in; None: S_in is not kept."""
    with device_guard(p.device):
        plan = plans.forward_plan(p, kept)
        new = allocate(p.device, plan.specs)
        plan.run([*tensors_of(p), *new])
    # the order is that of `Forward.specs`
    G, A_inv, _, _, q_rstd, k_rstd, S_in, _, final, o, _ = new
    assert o is not None
    return o, final, Saved(G=G, A_inv=A_inv, S_in=S_in, q_rstd=q_rstd, k_rstd=k_rstd)


def chunk_backward(problem: Problem, saved: Saved, do: Tensor | None, dS: Tensor | None) -> Gradients:
    """See `Backend`."""
    p = to_kernel_layout(problem)
    # what the forward did not keep in HBM is computed again
    if saved.G is None or saved.A_inv is None or saved.S_in is None or _lacks_norms(p, saved):
        saved = chunk_forward(p, True)[2]
    # a missing do counts as zero: the kernels have no path without it
    do = torch.zeros_like(p.v) if do is None else _rows(do.to(p.v.dtype))
    dS = None if dS is None else dS.contiguous()
    with device_guard(p.device):
        plan = plans.backward_plan(p, saved, do, dS)
        new = allocate(p.device, plan.specs)
        given = (*tensors_of(p), *saved, do, dS)
        plan.run([*given, *new])
        # free P and P_rest before the late tensors are allocated: this lowers peak memory
        del new[-2:]
        late = allocate(p.device, plan.late)
        plan.run_late([*given, *new, *late])
    dv, dg, dbeta, dS0, _, dA_log, ddt_bias, *_ = new
    dq, dk, *_ = late
    assert dq is not None and dk is not None and dv is not None
    return Gradients(dq, dk, dv.to(p.v.dtype), dg, dbeta, dA_log, ddt_bias, dS0)


def to_kernel_layout(problem: Problem) -> Problem:
    """Return the problem with tensors in the layout that the kernels read; copy only unusual layouts.

    Loads of q, k and v are vectorised along the last axis, which must therefore have stride 1.
    """
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
    # an asynchronous copy: the host does not wait for the GPU
    if p.cu_seqlens is not None and p.cu_seqlens.device != p.device:
        changed["cu_seqlens"] = p.cu_seqlens.to(p.device, non_blocking=True)
    return replace(p, **changed) if changed else p  # type: ignore[arg-type]


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _lacks_norms(p: Problem, saved: Saved) -> bool:
    return p.use_qk_l2norm_in_kernel and (saved.q_rstd is None or saved.k_rstd is None)
