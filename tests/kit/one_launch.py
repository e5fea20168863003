"""Compute the reference recurrence in fp64 in one launch, for thousands of problems on a GPU.

It is the recurrence of `gdn.reference.gated_delta_rule`, token by token, and its adjoint. Tests compare both.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.reference.recurrence import effective

COLUMNS = 16  # value columns of a program


@triton.jit
def _kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, bounds_ptr, S_ptr, o_ptr, states_ptr, HV,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(0) % (V // BV)
    head = (tl.program_id(0) // (V // BV)) % HV
    n = tl.program_id(0) // (V // BV * HV)
    ks = tl.arange(0, K)
    vs = strip * BV + tl.arange(0, BV)
    inside = ks[:, None] * V + vs[None, :]
    S = tl.load(S_ptr + (n * HV + head) * (K * V) + inside)
    for t in range(tl.load(bounds_ptr + 2 * n), tl.load(bounds_ptr + 2 * n + 1)):
        place = t * HV + head
        if states_ptr is not None:
            tl.store(states_ptr + place * (K * V) + inside, S)
        k = tl.load(k_ptr + place * K + ks)[:, None]
        S *= tl.load(decay_ptr + place)
        d = tl.load(beta_ptr + place) * (tl.load(v_ptr + place * V + vs) - tl.sum(S * k, 0))
        S += k * d[None, :]
        tl.store(o_ptr + place * V + vs, tl.sum(S * tl.load(q_ptr + place * K + ks)[:, None], 0))
    tl.store(S_ptr + (n * HV + head) * (K * V) + inside, S)


@triton.jit
def _adjoint_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, bounds_ptr, states_ptr, do_ptr, dS_ptr, dq_ptr, dk_ptr, dv_ptr,
    dg_ptr, dbeta_ptr, HV, tokens, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    # dS enters as the gradient of the final state and leaves as that of the initial one. Sums over value
    # columns, dq, dk, dg and dbeta, are stored for each strip.
    strip = tl.program_id(0) % (V // BV)
    head = (tl.program_id(0) // (V // BV)) % HV
    n = tl.program_id(0) // (V // BV * HV)
    ks = tl.arange(0, K)
    vs = strip * BV + tl.arange(0, BV)
    inside = ks[:, None] * V + vs[None, :]
    dS = tl.load(dS_ptr + (n * HV + head) * (K * V) + inside)
    first = tl.load(bounds_ptr + 2 * n)
    last = tl.load(bounds_ptr + 2 * n + 1) - 1
    for i in range(last - first + 1):
        place = (last - i) * HV + head
        share = strip * tokens * HV + place
        k = tl.load(k_ptr + place * K + ks)
        q = tl.load(q_ptr + place * K + ks)
        do = tl.load(do_ptr + place * V + vs)
        decay = tl.load(decay_ptr + place)
        beta = tl.load(beta_ptr + place)
        S = tl.load(states_ptr + place * (K * V) + inside) * decay
        error = tl.load(v_ptr + place * V + vs) - tl.sum(S * k[:, None], 0)
        d = beta * error
        dS += q[:, None] * do[None, :]
        tl.store(dq_ptr + share * K + ks, tl.sum((S + k[:, None] * d[None, :]) * do[None, :], 1))
        dd = tl.sum(dS * k[:, None], 0)
        tl.store(dv_ptr + place * V + vs, beta * dd)
        tl.store(dbeta_ptr + share, tl.sum(dd * error))
        tl.store(dk_ptr + share * K + ks, tl.sum(dS * d[None, :] - S * (beta * dd)[None, :], 1))
        dS -= k[:, None] * (beta * dd)[None, :]
        tl.store(dg_ptr + share, tl.sum(tl.sum(dS * S, 0)))
        dS *= decay
    tl.store(dS_ptr + (n * HV + head) * (K * V) + inside, dS)


class _Recurrence(torch.autograd.Function):
    """Compute o and the final state; for the adjoint, keep the state before each token."""

    @staticmethod
    def forward(ctx: Any, bounds: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        *operands, S = (x.contiguous() for x in tensors)
        q, k, v, g, beta = operands
        S, (B, T, HV, K), V = S.clone(), k.shape, v.shape[3]
        states = q.new_empty(B * T * HV * K * V) if any(ctx.needs_input_grad) else None
        ctx.operands = (q, k, v, g.exp(), beta, bounds)
        o = torch.zeros_like(v)
        grid = (len(bounds) * HV * (V // COLUMNS),)
        _kernel[grid](*ctx.operands, S, o, states, HV, K, V, COLUMNS)
        ctx.states = states
        return o, S

    @staticmethod
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _, bounds = ctx.operands
        (B, T, HV, K), V = k.shape, v.shape[3]
        strips = V // COLUMNS
        dq, dk = (q.new_zeros(strips, B, T, HV, K) for _ in range(2))
        dg, dbeta = (q.new_zeros(strips, B, T, HV) for _ in range(2))
        dv, dS = torch.zeros_like(v), dS.contiguous().clone()
        _adjoint_kernel[(len(bounds) * HV * strips,)](
            *ctx.operands, ctx.states, do.contiguous(), dS, dq, dk, dv, dg, dbeta, HV, B * T, K, V, COLUMNS
        )
        return None, dq.sum(0), dk.sum(0), dv, dg.sum(0), dbeta.sum(0), dS


def reference_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, *,
    initial_state: Tensor | None = None, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and the final state like `gdn.reference.gated_delta_rule`; K and V are multiples of 16.

    For gradients, the states before all tokens are kept.
    """
    (B, T, HV, V), K = v.shape, q.shape[3]
    ends = torch.arange(B + 1, device=q.device) * T if cu_seqlens is None else cu_seqlens
    bounds = torch.stack((ends[:-1], ends[1:]), 1).to(q.device, torch.int64).contiguous()
    S = q.new_zeros(len(bounds), HV, K, V, dtype=torch.float64)
    if initial_state is not None:
        S = (initial_state.mT if state_v_first else initial_state).to(S.dtype)
    q, k, v, g, beta = effective(q, k, v, g, beta, **options)
    o, S = _Recurrence.apply(bounds, q, k, v, g.squeeze(-1), beta, S)
    return o, S.mT if state_v_first else S
