"""Compute the stages of the chunked rule with plain PyTorch, each followed by its adjoint; see `gdn.stages`.

A name with `_c` is cut into chunks: keys [NC, H, 1, C, K], values [NC, H, r, C, V], scalars per token
[NC, H, r, C], where r value heads share a key head. Differences of G are taken in its own dtype, and
e^(G_i - G_j) is computed for i >= j only.
"""

import torch
from torch import Tensor

from gdn.backends.eager.gate import log_decay, log_decay_bwd, wide
from gdn.backends.eager.tiling import Tiling
from gdn.notation import (
    AInv,
    AStrict,
    ChunkStates,
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
from gdn.problem import CHUNK, RESET


def chunk_cumsum(g: PerHead, cu_seqlens: Offsets | None) -> GSum:
    g = g.to(wide(g.device)).clamp(min=RESET)
    t = Tiling.of(g, cu_seqlens)
    return t.join(t.cut(g).cumsum(-1))


def chunk_cumsum_bwd(g: PerHead, dG: GSum, cu_seqlens: Offsets | None) -> PerHead:
    dG = dG.to(wide(dG.device))
    t = Tiling.of(dG, cu_seqlens)
    # the adjoint of a prefix sum is a suffix sum
    dg = t.join(t.cut(dG).flip(-1).cumsum(-1).flip(-1))
    return dg.masked_fill_(g < RESET, 0).to(g.dtype)


def chunk_gate_cumsum(
    a: PerHead, A_log: HeadParam, dt_bias: HeadParam | None, cu_seqlens: Offsets | None
) -> GSum:
    return chunk_cumsum(log_decay(a, A_log, dt_bias), cu_seqlens)


def chunk_gate_cumsum_bwd(
    a: PerHead, A_log: HeadParam, dt_bias: HeadParam | None, dG: GSum, cu_seqlens: Offsets | None
) -> tuple[PerHead, HeadParam, HeadParam | None]:
    g = log_decay(a, A_log, dt_bias)
    return log_decay_bwd(a, A_log, dt_bias, chunk_cumsum_bwd(g, dG, cu_seqlens))


def chunk_kkt(k: Keys, beta: PerHead, G: GSum, cu_seqlens: Offsets | None) -> AStrict:
    t = Tiling.of(k, cu_seqlens)
    k_c = t.cut(k)
    return t.join(t.cut(beta)[..., None] * decay_within(t.cut_sums(G), t.dtype, diagonal=-1) * (k_c @ k_c.mT))


def chunk_kkt_bwd(
    k: Keys, beta: PerHead, G: GSum, dA: AStrict, cu_seqlens: Offsets | None
) -> tuple[Keys, PerHead, GSum]:
    t = Tiling.of(k, cu_seqlens)
    k_c, beta_c = t.cut(k), t.cut(beta)[..., None]
    # dA times A = beta D <k, k> without one of its factors
    without_kk = t.cut(dA) * decay_within(t.cut_sums(G), t.dtype, diagonal=-1)
    without_beta = without_kk * (k_c @ k_c.mT)
    # value heads are summed before the matmuls: H BLAS batches of [C, C] [C, K], not HV
    dkk = (beta_c * without_kk).sum(2, keepdim=True)
    dlog = beta_c * without_beta
    return (
        t.join(dkk @ k_c + dkk.mT @ k_c, k.dtype),
        t.join(without_beta.sum(-1), beta.dtype),
        t.join(dlog.sum(-1) - dlog.sum(-2), G.dtype),
    )


def solve_tril(A: AStrict, cu_seqlens: Offsets | None) -> AInv:
    t = Tiling.of(A, cu_seqlens)
    eye = torch.eye(CHUNK, dtype=t.dtype, device=t.device)
    A_c = t.cut(A)
    # reads below the diagonal only; 512 chunks on one CPU core: 5 ms, block recursion 10 ms
    return t.join(torch.linalg.solve_triangular(A_c, eye.expand_as(A_c), upper=False, unitriangular=True))


def solve_tril_bwd(A_inv: AInv, dA_inv: AInv, cu_seqlens: Offsets | None) -> AStrict:
    t = Tiling.of(A_inv, cu_seqlens)
    inverse = t.cut(A_inv).tril()
    # d(X^-1) = -X^-1 dX X^-1, so dA = -A_inv^T dA_inv A_inv^T, below the diagonal
    dA = -(inverse.mT @ t.cut(dA_inv) @ inverse.mT)
    return t.join(dA.tril(-1), A_inv.dtype)


def wy_transform(
    k: Keys, v: Values, beta: PerHead, G: GSum, A_inv: AInv, cu_seqlens: Offsets | None
) -> tuple[WKeys, UValues]:
    t = Tiling.of(k, cu_seqlens)
    beta_c, inverse = t.cut(beta)[..., None], t.cut(A_inv).tril()
    into = t.cut_sums(G).to(t.dtype).exp()[..., None]
    return t.join(inverse @ (beta_c * into * t.cut(k))), t.join(inverse @ (beta_c * t.cut(v)))


def wy_transform_bwd(
    k: Keys,
    v: Values,
    beta: PerHead,
    G: GSum,
    A_inv: AInv,
    dw: WKeys,
    du: UValues,
    cu_seqlens: Offsets | None,
) -> tuple[Keys, Values, PerHead, GSum, AInv]:
    t = Tiling.of(k, cu_seqlens)
    k_c, v_c, beta_c, inverse = t.cut(k), t.cut(v), t.cut(beta)[..., None], t.cut(A_inv).tril()
    dw_c, du_c = t.cut(dw), t.cut(du)
    into = t.cut_sums(G).to(t.dtype).exp()[..., None]
    dA_inv = dw_c @ (beta_c * into * k_c).mT + du_c @ (beta_c * v_c).mT
    dkeys, dvalues = into * (inverse.mT @ dw_c), inverse.mT @ du_c
    along_k = (dkeys * k_c).sum(-1)
    return (
        t.join((beta_c * dkeys).sum(2, keepdim=True), k.dtype),
        t.join(beta_c * dvalues, v.dtype),
        t.join(along_k + (dvalues * v_c).sum(-1), beta.dtype),
        t.join(beta_c[..., 0] * along_k, G.dtype),
        t.join(dA_inv.tril(), A_inv.dtype),
    )


def chunk_state(
    k: Keys, w: WKeys, u: UValues, G: GSum, initial_state: State | None, cu_seqlens: Offsets | None
) -> tuple[ChunkStates, Values, State]:
    t = Tiling.of(k, cu_seqlens)
    w_c, u_c = t.cut(w), t.cut(u)
    out, through = decay_out(t.cut_sums(G), t.dtype)
    # the decays to the end of all chunks in one pass: a step of the loop is two BLAS calls
    k_out = out[..., None] * t.cut(k)
    states = t.carry(initial_state, (*u_c.shape[1:3], k.shape[3], u.shape[3]))
    S_in, v_new = states.new_empty(t.num_chunks, *states.shape[1:]), torch.empty_like(u_c)
    for i in t.steps():
        n = t.sequence[i]
        S_in[i] = states[n]
        v_new[i] = u_c[i] - w_c[i] @ states[n]
        states[n] = through[i] * states[n] + k_out[i].mT @ v_new[i]
    return S_in.flatten(1, 2), t.join(v_new), states[: t.N].flatten(1, 2)


def chunk_state_bwd(
    k: Keys,
    w: WKeys,
    u: UValues,
    G: GSum,
    initial_state: State | None,
    S_in: ChunkStates,
    v_new: Values,
    dS_in: ChunkStates,
    dv_new: Values,
    dfinal_state: State | None,
    cu_seqlens: Offsets | None,
) -> tuple[Keys, WKeys, UValues, GSum, State | None]:
    t = Tiling.of(k, cu_seqlens)
    w_c, S, dS_in_c = t.cut(w), t.split_state(S_in), t.split_state(dS_in)
    out, through = decay_out(t.cut_sums(G), t.dtype)
    k_out = out[..., None] * t.cut(k)
    # gradients of the state that leaves each chunk, and of v_new through both of its uses
    dS_out, dv_c = torch.empty_like(S), t.cut(dv_new)
    dstates = t.carry(dfinal_state, S.shape[1:])
    for i in reversed(t.steps()):
        n = t.sequence[i]
        dS_out[i] = dstates[n]
        dv_c[i] += k_out[i] @ dstates[n]
        dstates[n] = dS_in_c[i] + through[i] * dstates[n] - w_c[i].mT @ dv_c[i]
    # all chunks in one BLAS call: only dS depends on the chunk after it
    dk_out = t.cut(v_new) @ dS_out.mT
    along_k = (dk_out * k_out).sum(-1)
    dG_end = along_k.sum(-1) + through[..., 0, 0] * (S * dS_out).sum((-1, -2))
    is_last = t.is_last[:, None, None]
    dinitial_state = None
    if initial_state is not None:
        dinitial_state = dstates[: t.N].flatten(1, 2).to(initial_state.dtype)
    return (
        t.join((out[..., None] * dk_out).sum(2, keepdim=True), k.dtype),
        t.join(-(dv_c @ S.mT), w.dtype),
        t.join(dv_c, u.dtype),
        t.join(dG_end[..., None] * is_last - along_k, G.dtype),
        dinitial_state,
    )


def chunk_output(
    q: Q, k: Keys, v_new: Values, G: GSum, S_in: ChunkStates, scale: float, cu_seqlens: Offsets | None
) -> Values:
    t = Tiling.of(q, cu_seqlens)
    # scale on q: one pass over [C, K] serves both terms of o
    q_c, G_c = t.cut(q) * scale, t.cut_sums(G)
    within = decay_within(G_c, t.dtype, diagonal=0) * (q_c @ t.cut(k).mT)
    into = G_c.to(t.dtype).exp()[..., None]
    return t.join(into * (q_c @ t.split_state(S_in)) + within @ t.cut(v_new), q.dtype)


def chunk_output_bwd(
    q: Q,
    k: Keys,
    v_new: Values,
    G: GSum,
    S_in: ChunkStates,
    do: Values,
    scale: float,
    cu_seqlens: Offsets | None,
) -> tuple[Q, Keys, Values, GSum, ChunkStates]:
    t = Tiling.of(q, cu_seqlens)
    q_c, k_c, S, G_c = t.cut(q), t.cut(k), t.split_state(S_in), t.cut_sums(G)
    do_c = t.cut(do) * scale
    do_into = G_c.to(t.dtype).exp()[..., None] * do_c
    D, qk = decay_within(G_c, t.dtype, diagonal=0), q_c @ k_c.mT
    dqk_heads = D * (do_c @ t.cut(v_new).mT)
    # value heads are summed before the matmuls with k and q: H BLAS batches, not HV
    dqk = dqk_heads.sum(2, keepdim=True)
    dlog = dqk_heads * qk
    return (
        t.join((do_into @ S.mT).sum(2, keepdim=True) + dqk @ k_c, q.dtype),
        t.join(dqk.mT @ q_c, k.dtype),
        t.join((D * qk).mT @ do_c, v_new.dtype),
        t.join(dlog.sum(-1) - dlog.sum(-2) + (do_into * (q_c @ S)).sum(-1), G.dtype),
        (q_c.mT @ do_into).flatten(1, 2).to(S_in.dtype),
    )


def decay_within(G_c: Tensor, dtype: torch.dtype, *, diagonal: int) -> Tensor:
    """Return D [..., C, C]: e^(G_i - G_j) for j <= i + diagonal, else 0."""
    is_before = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=G_c.device).tril(diagonal)
    # subtracted in G's dtype (fp64 where the device has it), then rounded: only the difference counts
    difference = (G_c[..., :, None] - G_c[..., None, :]).to(dtype)
    # masked before exp: above the diagonal e^(G_i - G_j) may overflow, and inf times 0 is NaN
    return difference.masked_fill_(~is_before, -torch.inf).exp_()


def decay_out(G_c: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return e^(G_C - G) [..., C], to the chunk's end, and e^(G_C) [..., 1, 1], through the chunk."""
    end = G_c[..., -1:]
    return (end - G_c).to(dtype).exp(), end.to(dtype).exp()[..., None]
