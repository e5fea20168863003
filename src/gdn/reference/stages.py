"""Compute the stages of the chunked rule chunk by chunk; the stages of every backend must equal these.

Autograd through these functions is the reference for the adjoint stages, and `rule_by_stages` equals the
reference recurrence. The shapes are those of `gdn.stages`; everything is computed in the dtype of the inputs.
g and G may also be [B, T, HV, K], a decay per key channel, which no stage of a backend has.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gdn.notation import (
    AInv,
    AStrict,
    ChunkStates,
    Decay,
    GSum,
    HeadParam,
    Keys,
    Offsets,
    PerHead,
    Q,
    State,
    UValues,
    Values,
    WKeys,
)
from gdn.reference.recurrence import gate

C = 64


def chunks(B: int, T: int, cu_seqlens: Offsets | None) -> Iterator[tuple[int, int, int, slice]]:
    """Yield (chunk, sequence, batch row, slice of tokens) in order."""
    if cu_seqlens is None:
        ranges = [(b, 0, T) for b in range(B)]
    else:
        ends = cu_seqlens.tolist()
        ranges = [(0, start, end) for start, end in zip(ends[:-1], ends[1:], strict=True)]
    chunk = 0
    for n, (b, start, end) in enumerate(ranges):
        for first in range(start, end, C):
            yield chunk, n, b, slice(first, min(first + C, end))
            chunk += 1


def chunk_cumsum(g: Decay, cu_seqlens: Offsets | None = None) -> GSum:
    """Compute G_i = sum of g_j over j <= i in the chunk of i.

    A g below -1000 counts as -1000, because e^-1000 is already 0.
    """
    G = torch.zeros_like(g)
    for _, _, b, t in chunks(g.shape[0], g.shape[1], cu_seqlens):
        G[b, t] = g[b, t].clamp(min=-1000.0).cumsum(0)
    return G


def chunk_gate_cumsum(
    a: PerHead, A_log: HeadParam, dt_bias: HeadParam | None = None, cu_seqlens: Offsets | None = None
) -> GSum:
    """Compute G of g = -exp(A_log) softplus(a + dt_bias)."""
    return chunk_cumsum(gate(a, A_log, dt_bias), cu_seqlens)


def chunk_kkt(k: Keys, beta: PerHead, G: GSum, cu_seqlens: Offsets | None = None) -> AStrict:
    """Compute A_ij = beta_i e^(G_i - G_j) <k_i, k_j> for i > j, else 0."""
    A = beta.new_zeros(*beta.shape, C)
    for _, _, b, t in chunks(k.shape[0], k.shape[1], cu_seqlens):
        keys = _per_value_head(k[b, t], beta.shape[2])
        products = _decayed_products(keys, keys, G[b, t])
        A[b, t, :, : keys.shape[0]] = beta[b, t][..., None] * _lower(products, -1)
    return A


def solve_tril(A: AStrict, cu_seqlens: Offsets | None = None) -> AInv:
    """Compute A_inv = (I + A)^-1, row after row: x_i = e_i - sum of A_ij x_j over j < i."""
    A_inv = torch.zeros_like(A)
    for _, _, b, t in chunks(A.shape[0], A.shape[1], cu_seqlens):
        length = t.stop - t.start
        unit = torch.eye(C, dtype=A.dtype, device=A.device)
        rows = [unit[0].expand(A.shape[2], C)]
        for i in range(1, length):
            rows.append(unit[i] - torch.einsum("hj,jhc->hc", A[b, t.start + i, :, :i], torch.stack(rows)))
        A_inv[b, t] = torch.stack(rows)
    return A_inv


def wy_transform(
    k: Keys, v: Values, beta: PerHead, G: GSum, A_inv: AInv, cu_seqlens: Offsets | None = None
) -> tuple[WKeys, UValues]:
    """Compute w = A_inv (beta e^G k) and u = A_inv (beta v)."""
    w, u = v.new_zeros(*v.shape[:3], k.shape[3]), torch.zeros_like(v)
    for _, _, b, t in chunks(k.shape[0], k.shape[1], cu_seqlens):
        inverse = _lower(A_inv[b, t, :, : t.stop - t.start], 0)
        keys = beta[b, t][..., None] * _columns(G[b, t]).exp() * _per_value_head(k[b, t], v.shape[2])
        w[b, t] = torch.einsum("ihj,jhk->ihk", inverse, keys)
        u[b, t] = torch.einsum("ihj,jhv->ihv", inverse, beta[b, t][..., None] * v[b, t])
    return w, u


def chunk_state(
    k: Keys,
    w: WKeys,
    u: UValues,
    G: GSum,
    initial_state: State | None = None,
    cu_seqlens: Offsets | None = None,
) -> tuple[ChunkStates, Values, State]:
    """Compute v_new = u - w S and S <- e^(G_C) S + (e^(G_C - G) k)^T v_new, chunk after chunk.

    Returns S_in, v_new, final_state.
    """
    (B, T, HV, V), K = u.shape, k.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    num_chunks = B * -(-T // C) if cu_seqlens is None else (T + N * (C - 1)) // C
    S_in, v_new = u.new_zeros(num_chunks, HV, K, V), torch.zeros_like(u)
    states = list(u.new_zeros(N, HV, K, V) if initial_state is None else initial_state)
    for chunk, n, b, t in chunks(B, T, cu_seqlens):
        S = states[n]
        new = u[b, t] - torch.einsum("ihk,hkv->ihv", w[b, t], S)
        end = _columns(G[b, t])[-1]
        keys = (end - _columns(G[b, t])).exp() * _per_value_head(k[b, t], HV)
        S_in[chunk], v_new[b, t] = S, new
        states[n] = end.exp()[:, :, None] * S + torch.einsum("ihk,ihv->hkv", keys, new)
    return S_in, v_new, torch.stack(states) if states else u.new_zeros(0, HV, K, V)


def chunk_output(
    q: Q,
    k: Keys,
    v_new: Values,
    G: GSum,
    S_in: ChunkStates,
    scale: float | None = None,
    cu_seqlens: Offsets | None = None,
) -> Values:
    """Compute o_i = scale (e^(G_i) q_i S_in + sum over j <= i of e^(G_i - G_j) <q_i, k_j> v_new_j)."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    o = torch.zeros_like(v_new)
    for chunk, _, b, t in chunks(q.shape[0], q.shape[1], cu_seqlens):
        queries, keys = (_per_value_head(x[b, t], v_new.shape[2]) for x in (q, k))
        before = torch.einsum("ihk,hkv->ihv", _columns(G[b, t]).exp() * queries, S_in[chunk])
        products = _lower(_decayed_products(queries, keys, G[b, t]), 0)
        o[b, t] = scale * (before + torch.einsum("ihj,jhv->ihv", products, v_new[b, t]))
    return o


def rule_by_stages(
    q: Q,
    k: Keys,
    v: Values,
    g: Decay,
    beta: PerHead,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    cu_seqlens: Offsets | None = None,
) -> tuple[Values, State]:
    """Compute the gated delta rule stage after stage; return o and final_state like `gated_delta_rule`."""
    G = chunk_cumsum(g, cu_seqlens)
    A_inv = solve_tril(chunk_kkt(k, beta, G, cu_seqlens), cu_seqlens)
    w, u = wy_transform(k, v, beta, G, A_inv, cu_seqlens)
    S_in, v_new, final_state = chunk_state(k, w, u, G, initial_state, cu_seqlens)
    return chunk_output(q, k, v_new, G, S_in, scale, cu_seqlens), final_state


def _per_value_head(x: Tensor, HV: int) -> Tensor:
    """Repeat x [L, H, K] to [L, HV, K]: value head j reads key head j // (HV // H)."""
    return x.repeat_interleave(HV // x.shape[1], dim=1)


def _columns(G: Tensor) -> Tensor:
    """Return G [L, HV, 1] for a decay per head, [L, HV, K] for one per key channel."""
    return G if G.dim() == 3 else G[..., None]


def _decayed_products(x: Tensor, k: Tensor, G: Tensor) -> Tensor:
    """Return sum_c x_ic k_jc e^(G_ic - G_jc) as [L, HV, L] for i >= j; callers mask the rest."""
    if G.dim() == 2:
        return torch.einsum("ihk,jhk->ihj", x, k) * _decay(G)
    D = torch.stack([_decay(G_c) for G_c in G.unbind(-1)], -1)
    return torch.einsum("ihk,jhk,ihjk->ihj", x, k, D)


def _decay(G: Tensor) -> Tensor:
    """Return e^(G_i - G_j) as [L, HV, L] for i >= j, from G [L, HV]; callers mask the rest, which is 1."""
    return _lower(G[:, :, None] - G.T[None], 0).exp()


def _lower(x: Tensor, diagonal: int) -> Tensor:
    """Return x [i, HV, j] where j <= i + diagonal, else 0."""
    return x.transpose(0, 1).tril(diagonal).transpose(0, 1)
