"""Compute the stages of the chunked rule with plain PyTorch, each followed by its adjoint; see `gdn.stages`.

A name with `_c` is cut into chunks: keys [NC, H, 1, C, K], values [NC, H, r, C, V], scalars per token
[NC, H, r, C], where r value heads share a key head. Differences of G are taken in its own dtype, and
e^(G_i - G_j) is computed for i >= j only.
"""

import torch
from torch import Tensor

from gdn.backends.eager.gate import gate_dtype, gate_of_heads, log_decay, log_decay_bwd
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
    g = g.to(gate_dtype(g.device)).clamp(min=RESET)
    t = Tiling.from_tokens(g, cu_seqlens)
    return t.from_chunks(t.to_chunks(g).cumsum(-1))


def chunk_cumsum_bwd(g: PerHead, dG: GSum, cu_seqlens: Offsets | None) -> PerHead:
    dG = dG.to(gate_dtype(dG.device))
    t = Tiling.from_tokens(dG, cu_seqlens)
    # the adjoint of a prefix sum is a suffix sum
    dg = t.from_chunks(t.to_chunks(dG).flip(-1).cumsum(-1).flip(-1))
    return dg.masked_fill_(g < RESET, 0).to(g.dtype)


def chunk_gate_cumsum(
    a: PerHead, A_log: HeadParam, dt_bias: HeadParam | None, cu_seqlens: Offsets | None
) -> GSum:
    return chunk_cumsum(log_decay(a, gate_of_heads(a, A_log, dt_bias)), cu_seqlens)


def chunk_gate_cumsum_bwd(
    a: PerHead, A_log: HeadParam, dt_bias: HeadParam | None, dG: GSum, cu_seqlens: Offsets | None
) -> tuple[PerHead, HeadParam, HeadParam | None]:
    gate = gate_of_heads(a, A_log, dt_bias)
    da, dA_log, ddt_bias = log_decay_bwd(a, gate, chunk_cumsum_bwd(log_decay(a, gate), dG, cu_seqlens))
    assert dA_log is not None
    return da, dA_log, ddt_bias


def chunk_kkt(k: Keys, beta: PerHead, G: GSum, cu_seqlens: Offsets | None) -> AStrict:
    t = Tiling.from_tokens(k, cu_seqlens)
    k_c = t.to_chunks(k)
    return t.from_chunks(
        t.to_chunks(beta)[..., None]
        * _decay_matrix(t.sums_to_chunks(G), t.dtype, diagonal=-1)
        * (k_c @ k_c.mT)
    )


def chunk_kkt_bwd(
    k: Keys, beta: PerHead, G: GSum, dA: AStrict, cu_seqlens: Offsets | None
) -> tuple[Keys, PerHead, GSum]:
    t = Tiling.from_tokens(k, cu_seqlens)
    k_c, beta_c = t.to_chunks(k), t.to_chunks(beta)[..., None]
    # dA times A = beta D <k, k> without one of its factors
    without_kk = t.to_chunks(dA) * _decay_matrix(t.sums_to_chunks(G), t.dtype, diagonal=-1)
    without_beta = without_kk * (k_c @ k_c.mT)
    # value heads are summed before the matmuls: H BLAS batches of [C, C] [C, K], not HV
    dkk = (beta_c * without_kk).sum(2, keepdim=True)
    dlog = beta_c * without_beta
    return (
        t.from_chunks(dkk @ k_c + dkk.mT @ k_c, k.dtype),
        t.from_chunks(without_beta.sum(-1), beta.dtype),
        t.from_chunks(dlog.sum(-1) - dlog.sum(-2), G.dtype),
    )


def solve_tril(A: AStrict, cu_seqlens: Offsets | None) -> AInv:
    t = Tiling.from_tokens(A, cu_seqlens)
    eye = torch.eye(CHUNK, dtype=t.dtype, device=t.device)
    A_c = t.to_chunks(A)
    # reads below the diagonal only; 512 chunks on one CPU core: 5 ms, block recursion 10 ms
    return t.from_chunks(
        torch.linalg.solve_triangular(A_c, eye.expand_as(A_c), upper=False, unitriangular=True)
    )


def solve_tril_bwd(A_inv: AInv, dA_inv: AInv, cu_seqlens: Offsets | None) -> AStrict:
    t = Tiling.from_tokens(A_inv, cu_seqlens)
    A_inv_c = t.to_chunks(A_inv).tril()
    # d(X^-1) = -X^-1 dX X^-1, so dA = -A_inv^T dA_inv A_inv^T, below the diagonal
    dA = -(A_inv_c.mT @ t.to_chunks(dA_inv) @ A_inv_c.mT)
    return t.from_chunks(dA.tril(-1), A_inv.dtype)


def wy_transform(
    k: Keys, v: Values, beta: PerHead, G: GSum, A_inv: AInv, cu_seqlens: Offsets | None
) -> tuple[WKeys, UValues]:
    t = Tiling.from_tokens(k, cu_seqlens)
    beta_c, A_inv_c = t.to_chunks(beta)[..., None], t.to_chunks(A_inv).tril()
    start_decay = t.sums_to_chunks(G).to(t.dtype).exp()[..., None]
    return t.from_chunks(A_inv_c @ (beta_c * start_decay * t.to_chunks(k))), t.from_chunks(
        A_inv_c @ (beta_c * t.to_chunks(v))
    )


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
    t = Tiling.from_tokens(k, cu_seqlens)
    k_c, v_c, beta_c, A_inv_c = (
        t.to_chunks(k),
        t.to_chunks(v),
        t.to_chunks(beta)[..., None],
        t.to_chunks(A_inv).tril(),
    )
    dw_c, du_c = t.to_chunks(dw), t.to_chunks(du)
    start_decay = t.sums_to_chunks(G).to(t.dtype).exp()[..., None]
    dA_inv = dw_c @ (beta_c * start_decay * k_c).mT + du_c @ (beta_c * v_c).mT
    dkeys, dvalues = start_decay * (A_inv_c.mT @ dw_c), A_inv_c.mT @ du_c
    along_k = (dkeys * k_c).sum(-1)
    return (
        t.from_chunks((beta_c * dkeys).sum(2, keepdim=True), k.dtype),
        t.from_chunks(beta_c * dvalues, v.dtype),
        t.from_chunks(along_k + (dvalues * v_c).sum(-1), beta.dtype),
        t.from_chunks(beta_c[..., 0] * along_k, G.dtype),
        t.from_chunks(dA_inv.tril(), A_inv.dtype),
    )


def chunk_state(
    k: Keys, w: WKeys, u: UValues, G: GSum, initial_state: State | None, cu_seqlens: Offsets | None
) -> tuple[ChunkStates, Values, State]:
    t = Tiling.from_tokens(k, cu_seqlens)
    w_c, u_c = t.to_chunks(w), t.to_chunks(u)
    end_decay, chunk_decay = _end_decays(t.sums_to_chunks(G), t.dtype)
    # the decays to the end of all chunks in one pass: a step of the loop is two BLAS calls
    k_decayed = end_decay[..., None] * t.to_chunks(k)
    states = t.copy_states(initial_state, (*u_c.shape[1:3], k.shape[3], u.shape[3]))
    S_in, v_new = states.new_empty(t.num_chunks, *states.shape[1:]), torch.empty_like(u_c)
    for i in t.steps():
        n = t.sequence[i]
        S_in[i] = states[n]
        v_new[i] = u_c[i] - w_c[i] @ states[n]
        states[n] = chunk_decay[i] * states[n] + k_decayed[i].mT @ v_new[i]
    return S_in.flatten(1, 2), t.from_chunks(v_new), states[: t.N].flatten(1, 2)


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
    t = Tiling.from_tokens(k, cu_seqlens)
    w_c, S, dS_in_c = t.to_chunks(w), t.split_state(S_in), t.split_state(dS_in)
    end_decay, chunk_decay = _end_decays(t.sums_to_chunks(G), t.dtype)
    k_decayed = end_decay[..., None] * t.to_chunks(k)
    # gradients of the state that leaves each chunk, and of v_new through both of its uses
    dS_out, dv_c = torch.empty_like(S), t.to_chunks(dv_new)
    dstates = t.copy_states(dfinal_state, S.shape[1:])
    for i in reversed(t.steps()):
        n = t.sequence[i]
        dS_out[i] = dstates[n]
        dv_c[i] += k_decayed[i] @ dstates[n]
        dstates[n] = dS_in_c[i] + chunk_decay[i] * dstates[n] - w_c[i].mT @ dv_c[i]
    # all chunks in one BLAS call: only dS depends on the chunk after it
    dk_out = t.to_chunks(v_new) @ dS_out.mT
    along_k = (dk_out * k_decayed).sum(-1)
    dG_end = along_k.sum(-1) + chunk_decay[..., 0, 0] * (S * dS_out).sum((-1, -2))
    is_last = t.is_last[:, None, None]
    dinitial_state = None
    if initial_state is not None:
        dinitial_state = dstates[: t.N].flatten(1, 2).to(initial_state.dtype)
    return (
        t.from_chunks((end_decay[..., None] * dk_out).sum(2, keepdim=True), k.dtype),
        t.from_chunks(-(dv_c @ S.mT), w.dtype),
        t.from_chunks(dv_c, u.dtype),
        t.from_chunks(dG_end[..., None] * is_last - along_k, G.dtype),
        dinitial_state,
    )


def chunk_output(
    q: Q, k: Keys, v_new: Values, G: GSum, S_in: ChunkStates, scale: float, cu_seqlens: Offsets | None
) -> Values:
    t = Tiling.from_tokens(q, cu_seqlens)
    # scale on q: one pass over [C, K] serves both terms of o
    q_c, G_c = t.to_chunks(q) * scale, t.sums_to_chunks(G)
    scores = _decay_matrix(G_c, t.dtype, diagonal=0) * (q_c @ t.to_chunks(k).mT)
    start_decay = G_c.to(t.dtype).exp()[..., None]
    return t.from_chunks(start_decay * (q_c @ t.split_state(S_in)) + scores @ t.to_chunks(v_new), q.dtype)


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
    t = Tiling.from_tokens(q, cu_seqlens)
    q_c, k_c, S, G_c = t.to_chunks(q), t.to_chunks(k), t.split_state(S_in), t.sums_to_chunks(G)
    do_c = t.to_chunks(do) * scale
    do_decayed = G_c.to(t.dtype).exp()[..., None] * do_c
    D, qk = _decay_matrix(G_c, t.dtype, diagonal=0), q_c @ k_c.mT
    dqk_heads = D * (do_c @ t.to_chunks(v_new).mT)
    # value heads are summed before the matmuls with k and q: H BLAS batches, not HV
    dqk = dqk_heads.sum(2, keepdim=True)
    dlog = dqk_heads * qk
    return (
        t.from_chunks((do_decayed @ S.mT).sum(2, keepdim=True) + dqk @ k_c, q.dtype),
        t.from_chunks(dqk.mT @ q_c, k.dtype),
        t.from_chunks((D * qk).mT @ do_c, v_new.dtype),
        t.from_chunks(dlog.sum(-1) - dlog.sum(-2) + (do_decayed * (q_c @ S)).sum(-1), G.dtype),
        (q_c.mT @ do_decayed).flatten(1, 2).to(S_in.dtype),
    )


def _decay_matrix(G_c: Tensor, dtype: torch.dtype, *, diagonal: int) -> Tensor:
    """Return D [..., C, C]: e^(G_i - G_j) for j <= i + diagonal, else 0."""
    is_before = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=G_c.device).tril(diagonal)
    # subtracted in G's dtype (fp64 where the device has it), then rounded: only the difference counts
    difference = (G_c[..., :, None] - G_c[..., None, :]).to(dtype)
    # masked before exp: above the diagonal e^(G_i - G_j) may overflow, and inf times 0 is NaN
    return difference.masked_fill_(~is_before, -torch.inf).exp_()


def _end_decays(G_c: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return e^(G_C - G) [..., C], to the chunk's end, and e^(G_C) [..., 1, 1], through the chunk."""
    end = G_c[..., -1:]
    return (end - G_c).to(dtype).exp(), end.to(dtype).exp()[..., None]
