"""Compute the reference recurrence token by token; every result of this package is compared with it.

It is plain torch, differentiable, slow, and runs in any float dtype.
"""

import torch
from torch import Tensor

from gdn.notation import Decay, GateBias, HeadParam, Keys, Offsets, PerHead, Q, State, Values


def l2norm(x: Tensor) -> Tensor:
    """Compute x * rsqrt(sum(x * x) + 1e-6) over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gate(
    a: Decay,
    A_log: HeadParam | None,
    dt_bias: GateBias | None = None,
    lower_bound: float | None = None,
    *,
    is_per_channel: bool = False,
) -> Decay:
    """Compute the log decay from raw logits a [..., HV], or [..., HV, K] with is_per_channel.

    g = -exp(A_log) softplus(a + dt_bias)              softplus(x) = log(1 + e^x)
    g = lower_bound sigmoid(exp(A_log) (a + dt_bias))  with lower_bound; A_log=None: exp(A_log) = 1
    """
    x = a if dt_bias is None else a + dt_bias
    if is_per_channel and A_log is not None:
        A_log = A_log[:, None]
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(x if A_log is None else torch.exp(A_log) * x)
    assert A_log is not None
    return -torch.exp(A_log) * torch.logaddexp(x, torch.zeros_like(x))


def effective(
    q: Q,
    k: Keys,
    v: Values,
    g: Decay | None = None,
    beta: PerHead | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: HeadParam | None = None,
    dt_bias: GateBias | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Q, Keys, Values, Decay, PerHead]:
    """Return the operands of the recurrence, in `dtype`: q, k, v, g, beta.

    q is scaled. q and k are repeated for each value head, and normalised with use_qk_l2norm_in_kernel. g is
    the log decay, [B, T, HV, 1] for a decay per head, and beta the write strength, after their activations.
    """
    (B, T, H, K), HV = q.shape, v.shape[2]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    q = q * (K**-0.5 if scale is None else scale)
    g = torch.zeros(B, T, HV, dtype=dtype, device=q.device) if g is None else g.to(dtype)
    if use_gate_in_kernel:
        A_log, dt_bias = (None if x is None else x.to(dtype) for x in (A_log, dt_bias))
        g = gate(g, A_log, dt_bias, lower_bound, is_per_channel=g.dim() == 4)
    # one decay for all channels of a head, or one for each
    g = g if g.dim() == 4 else g[..., None]
    beta = torch.ones(B, T, HV, dtype=dtype, device=q.device) if beta is None else beta.to(dtype)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
    return q, k, v, g, beta


def gated_delta_rule(
    q: Q,
    k: Keys,
    v: Values,
    g: Decay | None = None,
    beta: PerHead | None = None,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: HeadParam | None = None,
    dt_bias: GateBias | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Offsets | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Values, State]:
    """Compute the gated delta rule token by token.

        S <- Diag(e^g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q

    g [B, T, HV] is the same number in all key channels, g [B, T, HV, K] one for each. The arguments are those
    of `gdn.chunk_gated_delta_rule`. Everything is computed in `dtype`. Gradients come from autograd.

    Returns:
        o            [B, T, HV, V]   outputs; zero past cu_seqlens[-1]
        final_state  [N, HV, K, V]   (or V first) the state after the last token of each sequence
    Cost: T steps of 8 HV K V flop; autograd keeps every state when gradients are required.
    Source: arXiv:2412.06464, equation 10; arXiv:2510.26692 for a decay per key channel.
    """
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    q, k, v, g, beta = effective(
        q, k, v, g, beta, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, dtype=dtype,
    )  # fmt: skip
    if cu_seqlens is None:
        ranges = [(b, 0, T) for b in range(B)]
    else:
        ends = cu_seqlens.tolist()
        ranges = [(0, start, end) for start, end in zip(ends[:-1], ends[1:], strict=True)]
    o = [[torch.zeros(HV, 1, V, dtype=dtype, device=q.device)] * T for _ in range(B)]
    # rows and columns of all tokens are views made once: a token's few operations take most of the time.
    # unbind: indexing x[b, t] would give every token a gradient tensor of the size of x
    rows = q[..., None, :], k[..., None, :], v[..., None, :]
    columns = k[..., None], g[..., None], beta[..., None, None]
    q_rows, k_rows, v_rows, k_columns, gs, betas = (
        [row.unbind(0) for row in x.unbind(0)] for x in (*rows, *columns)
    )
    finals = []
    for n, (b, start, end) in enumerate(ranges):
        S = torch.zeros(HV, K, V, dtype=dtype, device=q.device)
        if initial_state is not None:
            S = initial_state[n].to(dtype)
            S = S.transpose(-1, -2) if state_v_first else S
        for t in range(start, end):
            S = torch.exp(gs[b][t]) * S
            # bmm: `@` would add an expansion and a view of each operand, for autograd, too
            d = betas[b][t] * (v_rows[b][t] - torch.bmm(k_rows[b][t], S))
            S = S + k_columns[b][t] * d
            o[b][t] = torch.bmm(q_rows[b][t], S)
        finals.append(S.transpose(-1, -2) if state_v_first else S)
    shape = (0, HV, V, K) if state_v_first else (0, HV, K, V)
    final = torch.stack(finals) if finals else q.new_zeros(shape)
    if B * T == 0:
        return v.new_zeros(v.shape), final
    return torch.stack([x for row in o for x in row]).view(B, T, HV, V), final
