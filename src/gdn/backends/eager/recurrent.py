"""Run the token recurrence with plain PyTorch: one step advances all sequences by one token.

A step reads the state once for both products and updates it in place:

    kS, qS = [k; q] S;   d = beta (v - e^g kS);   o = scale (e^g qS + <q, k> d);   S <- e^g S + k d^T
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gdn.backends.eager.alignment import zero_aligned_rows
from gdn.backends.eager.gate import activate
from gdn.backends.eager.norm import l2norm_
from gdn.problem import Problem, host_offsets

RowIndex = slice | Tensor


def recurrent_forward(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Implement `Backend.recurrent_forward`: T steps of 6 K V flop per sequence and value head."""
    p = problem
    g, beta = activate(p)
    # the exponentials of all tokens in one call: a step of the loop has none
    decay = g.exp().to(p.state_dtype)
    o = torch.zeros(p.v.shape, dtype=p.v.dtype, device=p.device)
    order, steps = _plan_steps(p)
    S = _initial_states(p, order)
    q, k, v, e, b, out = (x.flatten(0, 1) for x in (p.q, p.k, p.v, decay, beta, o))
    for rows, tokens in steps:
        # k and q as one operand: one BLAS call reads the state once for both products
        X = torch.stack([k[tokens], q[tokens]], dim=2).to(S.dtype)
        if p.use_qk_l2norm_in_kernel:
            l2norm_(X)
        # a slice is a view, updated in place; an index makes a copy, which is written back
        S_t = S[rows]
        out[tokens] = advance_token(X, v[tokens].to(S.dtype), e[tokens], b[tokens], S_t, p.scale).to(o.dtype)
        if isinstance(rows, Tensor):
            S.index_copy_(0, rows, S_t)
    if p.cu_seqlens is not None:
        o.masked_fill_((torch.arange(p.T, device=p.device) >= p.cu_seqlens[-1])[:, None, None], 0)
    if not p.output_final_state:
        return o, None
    final = S.mT if p.state_v_first else S
    if order is None:
        # no view: a caller may change it in place, which autograd refuses for views among several outputs
        return o, final[: p.N].clone(memory_format=torch.contiguous_format)
    return o, torch.empty_like(final).index_copy_(0, order, final)


def advance_token(X: Tensor, v: Tensor, decay: Tensor, beta: Tensor, S: Tensor, scale: float) -> Tensor:
    """Advance each row by one token.

    X [M, H, 2, K] holds k and q; v [M, HV, V]; decay [M, HV, 1 or K]; beta [M, HV]; S [M, HV, K, V].
    Returns o [M, HV, V] and leaves the new state in S.
    """
    (M, H), (HV, V) = X.shape[:2], v.shape[1:]
    beta = beta[..., None]
    # <q, k> per key head, before the repeat: H sums over K, not HV
    qk = (X[:, :, 0] * X[:, :, 1]).sum(-1, keepdim=True)
    if HV != H:
        X, qk = X.repeat_interleave(HV // H, dim=1), qk.repeat_interleave(HV // H, dim=1)
    # e^g scales k S and q S, 2 V values, or the rows k and q, so the state need not be decayed before
    rows, read_decay = (X, decay) if decay.shape[-1] == 1 else (X * decay.unsqueeze(2), torch.ones_like(beta))
    XS = torch.bmm(rows.flatten(0, 1), S.flatten(0, 1)).view(M, HV, 2, V)
    d = torch.addcmul(v, read_decay, XS[:, :, 0], value=-1).mul_(beta)
    o = torch.addcmul(qk * d, read_decay, XS[:, :, 1]).mul_(scale)
    S.mul_(decay[..., None]).addcmul_(X[:, :, 0, :, None], d[:, :, None])
    return o


def _plan_steps(p: Problem) -> tuple[Tensor | None, Iterator[tuple[RowIndex, RowIndex]]]:
    """Return the order of the states (None: the caller's), and the state rows and tokens of each step."""
    if p.cu_seqlens is None and p.batch_invariant:
        # the bits of a matmul may depend on its batch, so each sequence advances alone
        return None, (
            (slice(b, b + 1), slice(t, t + 1)) for b in range(p.B) for t in range(b * p.T, (b + 1) * p.T)
        )
    if p.cu_seqlens is None:
        return None, ((slice(0, p.B), slice(t, None, p.T)) for t in range(p.T))
    offsets = host_offsets(p.cu_seqlens, p.cu_seqlens_cpu, p.T, read_device=False)
    if p.N == 0:
        return None, iter(())
    if offsets is None:
        # lengths on a device: one token a step, whose sequence the device looks up; past the end, spare row N
        owner = torch.searchsorted(p.cu_seqlens.long(), torch.arange(p.T, device=p.device), right=True) - 1
        return None, ((owner[t : t + 1], slice(t, t + 1)) for t in range(p.T))
    lengths = [b - a for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    if p.batch_invariant:
        ranges = enumerate(zip(offsets[:-1], offsets[1:], strict=True))
        return None, ((slice(n, n + 1), slice(t, t + 1)) for n, (a, b) in ranges for t in range(a, b))
    # longest first: the sequences that still run are a slice of S, a view and not a copy
    order = sorted(range(p.N), key=lambda n: -lengths[n])
    start = torch.tensor([offsets[n] for n in order], dtype=torch.long, device=p.device)
    running = [sum(length > t for length in lengths) for t in range(max(lengths, default=0))]
    return (
        torch.tensor(order, dtype=torch.long, device=p.device),
        ((slice(0, m), start[:m] + t) for t, m in enumerate(running)),
    )


def _initial_states(p: Problem, order: Tensor | None) -> Tensor:
    """Return a copy of the initial states [N, HV, K, V], K and V in the caller's memory order.

    A packed batch without an order has one spare row for tokens past the last sequence. With
    batch_invariant=True a gemm reads the states of one sequence: these begin at an aligned address, as those
    of a sequence alone do.
    """
    spare = p.cu_seqlens is not None and order is None
    zeros = zero_aligned_rows if p.batch_invariant else torch.zeros
    S = zeros((p.N + spare, *p.state_shape[1:]), dtype=p.state_dtype, device=p.device)
    if p.initial_state is not None:
        S[: p.N] = p.initial_state if order is None else p.initial_state[order]
    return S.mT if p.state_v_first else S
