"""Replay with plain PyTorch, row by row, in the chunk form: a history beside the state holds the writes.

    S_t = e^(G_t) S + sum_(j < P) e^(G_t - G_j) k_j u_j^T       the history, decayed up to token t
    r_t = beta_t (v_t - S_t^T k_t);    A_tj = beta_t e^(G_t - G_j) <k_t, k_j> for j < t;    (I + A) d = r
    o_t = scale (S_t^T q_t + sum_(j <= t) e^(G_t - G_j) <q_t, k_j> d_j)

That is for a decay per head, whose history is the sums G. For a decay per key channel the history is g
itself: it is first folded into a copy of the state, and the packet is a chunk of `channels`.

With the norm in the kernel the history holds the caller's k and u = d / |k|: k u^T is the same, and a k of
the history's dtype is stored exactly. Index tensors are read on the host.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gdn.backends.eager.alignment import align_start
from gdn.backends.eager.channels import compute_products
from gdn.backends.eager.gate import gate_dtype, load_decay, sigmoid
from gdn.backends.eager.integers import (
    ColumnStates,
    read_states,
    read_without_remainder,
    states_of,
)
from gdn.problem import RESET, HistoryProblem, KeepProblem, ReplayProblem

OnReplay = ReplayProblem | HistoryProblem
History = tuple[Tensor, Tensor, Tensor]  # u, k and G (or g) of some tokens


def replay_decode(problem: ReplayProblem) -> None:
    """Implement `Backend.replay_decode`: write the history and problem.out."""
    p, cursors = problem, problem.cursor.tolist()
    rows = RowsOnHistory(p)
    for slot, first, count in active_rows(p):
        base = min(max(cursors[slot], 0), p.places)
        past = (p.history_u[slot, :base], p.history_k[slot, :base], p.history_G[slot, :base])
        new = rows.run(slot, past, slice(first, first + count))
        # tokens past the last place of the history are not stored; their outputs are computed all the same
        num_stored = min(count, p.places - base)
        places = slice(base, base + num_stored)
        for held, x in zip((p.history_u, p.history_k, p.history_G), new, strict=True):
            held[slot, places].copy_(x[:num_stored])
    rows.store()


class RowsOnHistory:
    """Hold the tokens of a call, activated and scaled, and its outputs, for rows that run one by one."""

    def __init__(self, p: OnReplay) -> None:
        self.p = p
        self.o = torch.zeros(p.out.shape, dtype=p.dtype, device=p.q.device).flatten(0, 1)
        # in one layout: the sum of a product, and so the bits of a row, may depend on strides
        q, self.k, self.v = (x.flatten(0, 1).to(p.dtype).contiguous() for x in (p.q, p.k, p.v))
        q_rstd, self.k_rstd = ((x * x).sum(-1).add_(1e-6).rsqrt_() for x in (q, self.k))
        if not p.use_qk_l2norm_in_kernel:
            q_rstd, self.k_rstd = torch.ones_like(q_rstd), torch.ones_like(self.k_rstd)
        self.q = q * (p.scale * q_rstd).unsqueeze(-1)
        self.g, self.beta = _load_gates(p)

    def run(self, slot: int, past: History, tokens: slice) -> History:
        """Run a row's tokens on the state of a slot and its history; return u, k and G of each token."""
        row = (x[tokens] for x in (self.g, self.q, self.k, self.v, self.k_rstd, self.beta))
        run = _run_channel_packet if self.p.is_per_channel else _run_packet
        self.o[tokens], u, history = run(self.p, slot, past, *row)
        return u, self.k[tokens], history

    def store(self) -> None:
        """Write problem.out."""
        self.p.out.copy_(self.o.view(self.p.out.shape))


def _run_packet(
    p: OnReplay, slot: int, past: History, g: Tensor, q: Tensor, k: Tensor, v: Tensor, k_rstd: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o and u [T, HV, V] of one row, and G [T, HV]; q is scaled, k is the caller's."""
    past_u, past_k, past_G = past
    G = g.squeeze(-1).cumsum(0)
    if len(past_G) > 0:
        # G goes on from the history's last sum: e^(G_t - G_j) then holds for its tokens, too
        G += past_G[-1]
    T, H = q.shape[:2]
    S = align_start(read_without_remainder(states_of(p)[slot], p.dtype))
    S = S.mT if p.state_v_first else S
    # k above q: a BLAS call reads the state, and another one the history, once for both
    kq = _repeat_heads(torch.cat((k * k_rstd.unsqueeze(-1), q)), p.HV // H)  # [HV, 2 T, K]
    # e^G scales the products, 2 V values per token, not the K V values of the state
    state_read = torch.bmm(kq, S) * torch.cat((G, G)).exp().to(p.dtype).T.unsqueeze(-1)
    if len(past_G) > 0:
        weights = _decay_weights(torch.cat((G, G)), past_G, p.dtype) * torch.bmm(
            kq, _repeat_heads(past_k.to(p.dtype), p.HV // H).mT
        )
        past_u = align_start(past_u.to(p.dtype))
        state_read = state_read + torch.bmm(weights, past_u.transpose(0, 1))
    beta = beta.T.unsqueeze(-1)
    D = _decay_weights(G, G, p.dtype)
    pairs = torch.bmm(kq, kq[:, :T].mT)
    A = (beta * D * pairs[:, :T]).tril(-1)
    r = beta * (v.transpose(0, 1) - state_read[:, :T])
    # unitriangular: the solver takes the diagonal as 1, so A stands for I + A
    d = torch.linalg.solve_triangular(A, r, upper=False, unitriangular=True)
    o = state_read[:, T:] + torch.bmm((D * pairs[:, T:]).tril(), d)
    u = d * k_rstd.T.repeat_interleave(p.HV // H, 0).unsqueeze(-1)
    return o.transpose(0, 1), u.transpose(0, 1), G


def _run_channel_packet(
    p: OnReplay, slot: int, past: History, g: Tensor, q: Tensor, k: Tensor, v: Tensor, k_rstd: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o and u [T, HV, V] of one row with a decay per key channel, and its g [T, HV, K]."""
    T, ratio = q.shape[0], p.HV // p.H
    S = align_start(read_without_remainder(states_of(p)[slot], p.dtype))
    S = S.mT if p.state_v_first else S
    _, _, past_g = past
    if len(past_g) > 0:
        S = _fold_channels(S, *past)
    # a chunk of 1, 2, 4, ... tokens; those past the packet are zero and do nothing
    C = 1 << (T - 1).bit_length()
    X = torch.zeros(1, p.HV, 2, C, p.K, dtype=p.dtype, device=q.device)
    X[0, :, 0, :T] = _repeat_heads(q, ratio)
    X[0, :, 1, :T] = _repeat_heads(k * k_rstd.unsqueeze(-1), ratio)
    decays = torch.zeros(1, p.HV, C, p.K, dtype=p.dtype, device=q.device)
    decays[0, :, :T] = g.transpose(0, 1)
    pairs = compute_products(X, decays)
    scores, coupling = pairs.products[0, ..., :T, :T].unbind(1)
    state_read = torch.bmm(pairs.rows_in[0].flatten(1, 2), S).unflatten(1, (2, C))
    beta = beta.T.unsqueeze(-1)
    r = beta * (v.transpose(0, 1) - state_read[:, 1, :T])
    d = torch.linalg.solve_triangular(beta * coupling, r, upper=False, unitriangular=True)
    o = state_read[:, 0, :T] + torch.bmm(scores, d)
    u = d * k_rstd.T.repeat_interleave(ratio, 0).unsqueeze(-1)
    return o.transpose(0, 1), u.transpose(0, 1), g


def _fold_channels(S: Tensor, u: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Return S [HV, K, V] after a history u [P, HV, V], k [P, H, K], g [P, HV, K], in S's dtype."""
    g = g.to(S.dtype).transpose(0, 1)
    # sums from the newest token backwards: of one sign, and exact where a token further back is a reset
    to_end = g.flip(1).cumsum(1).flip(1)
    after = torch.cat((to_end[:, 1:], torch.zeros_like(g[:, :1])), 1)
    k_out = _repeat_heads(k.to(S.dtype), S.shape[0] // k.shape[1]) * after.exp()
    u = align_start(u.to(S.dtype)).transpose(0, 1)
    return to_end[:, 0].exp().unsqueeze(-1) * S + torch.bmm(k_out.mT, u)


def _repeat_heads(x: Tensor, ratio: int) -> Tensor:
    """Repeat x [T, H, K] for the value heads: [HV, T, K]."""
    return x.transpose(0, 1).repeat_interleave(ratio, 0)


def _decay_weights(to: Tensor, start: Tensor, dtype: torch.dtype) -> Tensor:
    """Return e^(to - start) [HV, T, P] of sums [T, HV] and [P, HV]; 1 where the difference is positive."""
    return (to.T.unsqueeze(-1) - start.T.unsqueeze(-2).to(to.dtype)).clamp(max=0).exp().to(dtype)


def _load_gates(p: OnReplay) -> tuple[Tensor, Tensor]:
    """Return g >= RESET [tokens, HV, 1 or K], and beta [tokens, HV]."""
    shape, dtype = p.v.shape[:3], gate_dtype(p.q.device)
    g, beta = load_decay(p, p.a, p.dtype), p.beta
    if p.b is not None:
        beta = sigmoid(p.b.to(dtype)).mul_(2 if p.allow_neg_eigval else 1)
    if g is None:
        g = torch.zeros((*shape, 1), dtype=dtype, device=p.q.device)
    else:
        g = g.to(p.dtype if p.is_per_channel else dtype)
    beta = torch.ones(shape, dtype=p.dtype, device=p.q.device) if beta is None else beta.to(p.dtype)
    return g.clamp(min=RESET).flatten(0, 1), beta.flatten(0, 1)


def active_rows(p: OnReplay) -> Iterator[tuple[int, int, int]]:
    """Yield (slot, first token, tokens) of the rows that compute anything."""
    ranges = p.token_ranges(read_device=True)
    assert ranges is not None
    slots = range(len(ranges)) if p.read_index is None else p.read_index.tolist()
    for slot, (first, count) in zip(slots, ranges, strict=True):
        if count > 0 and p.is_slot(slot):
            yield slot, first, count


def replay_commit(problem: KeepProblem) -> None:
    """Implement `Backend.replay_commit`: write problem.state and problem.cursor."""
    p = problem
    lowest, cursors = 0 if p.null_slot is None else 1, p.cursor.tolist()
    for slot, accepted in zip(p.index.tolist(), p.accepted.tolist(), strict=True):
        if not lowest <= slot < p.state.shape[1]:
            continue
        end = min(min(max(cursors[slot], 0), p.places) + min(max(accepted, 0), p.room), p.places)
        if end + p.room > p.places:
            for layer in range(p.state.shape[0]) if end > 0 else ():
                u, k, G = (x[layer, slot, :end] for x in (p.history_u, p.history_k, p.history_G))
                fold_past(p, p.state[layer, slot], (u, k, G))
            end = 0
        if p.update_cursor:
            p.cursor[slot] = end


def fold_past(p: Any, state: Tensor | ColumnStates, past: History) -> None:
    """Fold a history, u [P, HV, V], k [P, H, K] and G, into one state of a pool."""
    S = read_states(state, p.dtype)
    S = S.mT if p.state_v_first else S
    u, k, G = past
    if p.is_per_channel:
        S = _fold_channels(S, *past)
    else:
        k = _repeat_heads(k.to(p.dtype), S.shape[0] // k.shape[1])
        u = align_start(u.to(p.dtype)).transpose(0, 1)
        weights = _decay_weights(G[-1:], G, p.dtype)
        # one BLAS call adds the outer products of all tokens: the state is written once, not per token
        S = G[-1].exp().to(p.dtype)[:, None, None] * S + torch.bmm(k.mT * weights, u)
    state.copy_(S.mT if p.state_v_first else S)
