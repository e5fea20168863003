"""Compute the reference recurrence in fp64 in one launch, for thousands of problems on a GPU.

It is the recurrence of `gdn.reference.gated_delta_rule`, token by token; tests compare the two.
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
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, bounds_ptr, S_ptr, o_ptr, HV,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(0) % (V // BV)
    head = (tl.program_id(0) // (V // BV)) % HV
    n = tl.program_id(0) // (V // BV * HV)
    ks = tl.arange(0, K)
    vs = strip * BV + tl.arange(0, BV)
    state = S_ptr + (n * HV + head) * (K * V) + ks[:, None] * V + vs[None, :]
    S = tl.load(state)
    for t in range(tl.load(bounds_ptr + 2 * n), tl.load(bounds_ptr + 2 * n + 1)):
        place = t * HV + head
        k = tl.load(k_ptr + place * K + ks)[:, None]
        S *= tl.load(decay_ptr + place)
        d = tl.load(beta_ptr + place) * (tl.load(v_ptr + place * V + vs) - tl.sum(S * k, 0))
        S += k * d[None, :]
        tl.store(o_ptr + place * V + vs, tl.sum(S * tl.load(q_ptr + place * K + ks)[:, None], 0))
    tl.store(state, S)


def reference_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, *,
    initial_state: Tensor | None = None, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and the final state like `gdn.reference.gated_delta_rule`; K and V are multiples of 16.

    There are no gradients.
    """
    (B, T, HV, V), K = v.shape, q.shape[3]
    q, k, v, g, beta = (x.contiguous() for x in effective(q, k, v, g, beta, **options))
    ends = torch.arange(B + 1, device=q.device) * T if cu_seqlens is None else cu_seqlens
    bounds = torch.stack((ends[:-1], ends[1:]), 1).to(q.device, torch.int64).contiguous()
    S = torch.zeros(len(bounds), HV, K, V, dtype=q.dtype, device=q.device)
    if initial_state is not None:
        S.copy_(initial_state.mT if state_v_first else initial_state)
    o = torch.zeros_like(v)
    grid = (len(bounds) * HV * (V // COLUMNS),)
    _kernel[grid](q, k, v, g.exp(), beta, bounds, S, o, HV, K, V, COLUMNS)
    return o, S.mT if state_v_first else S
