"""Define the correct results of the serving functions: loops over rows and tokens, one state at a time.

These functions copy their arguments and are slow. A state is rounded to the dtype of its tensor when it is
stored; between stores it is in `dtype`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gdn.notation import Decay, GateBias, HeadParam, Index, Keys, Mask, Offsets, PerHead, Pool, Q, Values
from gdn.reference.integers import StoredStates
from gdn.reference.recurrence import gate, l2norm


@dataclass(frozen=True)
class Served:
    """Hold the results of a serving function.

    `extra` is the tensor `intermediate` of decode, or `checkpoints` of prefill.
    """

    o: Values
    state: Pool
    extra: Tensor | None
    column_scale: Tensor | None = None
    remainder: Tensor | None = None


@dataclass(frozen=True)
class _Tokens:
    """Hold all tokens of a call, each [tokens, HV, ...]: gates activated, heads of q and k repeated.

    g is [tokens, HV, K], or [tokens, HV, 1] for a decay per head.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def step(self, t: int, S: Tensor) -> tuple[Tensor, Tensor]:
        """Return o [HV, V] of token t and the state after it, from the state S [HV, K, V] before it."""
        S = torch.exp(self.g[t])[:, :, None] * S
        d = self.beta[t][:, None] * (self.v[t] - torch.einsum("hkv,hk->hv", S, self.k[t]))
        S = S + self.k[t][:, :, None] * d[:, None, :]
        return torch.einsum("hkv,hk->hv", S, self.q[t]), S


def decode(
    q: Q,
    k: Keys,
    v: Values,
    state: Pool,
    *,
    g: Decay | None = None,
    beta: PerHead | None = None,
    a: Decay | None = None,
    b: PerHead | None = None,
    A_log: HeadParam | None = None,
    dt_bias: GateBias | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Offsets | None = None,
    read_index: Tensor | None = None,
    num_accepted: Index | None = None,
    ring_pos: Index | None = None,
    write_index: Tensor | None = None,
    intermediate: Tensor | None = None,
    intermediate_row: Index | None = None,
    parent: Tensor | None = None,
    write: str = "final",
    null_slot: int | None = None,
    round_state: bool = False,
    column_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Served:
    """Compute `gdn.decode` row by row; return copies and leave the arguments unchanged."""
    tokens = _activate(
        q, k, v, g, beta, a, b, A_log, dt_bias, lower_bound, scale, use_qk_l2norm_in_kernel,
        allow_neg_eigval, dtype,
    )  # fmt: skip
    before, kept = StoredStates(state, column_scale, state_v_first, dtype), None
    pool = before.clone()
    if intermediate is not None:
        kept = StoredStates(intermediate, None, state_v_first, dtype).clone()
    o = torch.zeros(tokens.v.shape, dtype=dtype, device=q.device)
    lowest, slots = 0 if null_slot is None else null_slot + 1, state.shape[0]
    for n, (start, end) in enumerate(_spans(q, cu_seqlens)):
        slot = n if read_index is None else read_index[n]
        if read_index is not None and read_index.dim() == 2:
            accepted = 1 if num_accepted is None else int(num_accepted[n])
            slot = read_index[n, min(max(accepted, 1), read_index.shape[1]) - 1]
        slot = int(slot)
        row = n if intermediate_row is None else int(intermediate_row[n])
        has_row = kept is not None and 0 <= row < kept.state.shape[0]
        if not lowest <= slot < slots or (parent is not None and not has_row):
            continue
        where = (slot,) if ring_pos is None else (slot, int(ring_pos[n]) % state.shape[1])
        root = S = before.read(where)
        for t in range(end - start):
            if parent is not None and t > 0:
                earlier = min(int(parent[n, t]), t - 1)
                assert kept is not None
                S = root if earlier < 0 else kept.read((row, earlier))
            o[start + t], S = tokens.step(start + t, S)
            if round_state:
                S = pool.round(S)
            if kept is not None and has_row:
                kept.write((row, t), S)
            if write == "all" and ring_pos is not None:
                pool.write((slot, (int(ring_pos[n]) + 1 + t) % state.shape[1]), S)
            elif write == "all":
                assert write_index is not None
                if lowest <= write_index[n, t] < slots:
                    pool.write(int(write_index[n, t]), S)
        if write == "final" and end > start:
            target = slot if write_index is None else int(write_index[n])
            if write_index is None:
                pool.write(where, S)
            elif lowest <= target < slots:
                pool.write(target, S)
    return Served(o.view(v.shape), pool.state, None if kept is None else kept.state, pool.column_scale)


def prefill(
    q: Q,
    k: Keys,
    v: Values,
    state: Pool,
    *,
    cu_seqlens: Offsets,
    g: Decay | None = None,
    beta: PerHead | None = None,
    a: Decay | None = None,
    b: PerHead | None = None,
    A_log: HeadParam | None = None,
    dt_bias: GateBias | None = None,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    state_index: Index,
    out_state_index: Index | None = None,
    has_initial_state: Mask | None = None,
    update_state: bool = True,
    checkpoints: Tensor | None = None,
    checkpoint_every: int = 0,
    checkpoint_offsets: Index | None = None,
    snapshot_pos: Index | None = None,
    snapshot_index: Index | None = None,
    null_slot: int | None = None,
    column_scale: Tensor | None = None,
    remainder: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Served:
    """Compute `gdn.prefill` token by token; return copies and leave the arguments unchanged."""
    tokens = _activate(
        q, k, v, g, beta, a, b, A_log, dt_bias, lower_bound, scale, use_qk_l2norm_in_kernel,
        allow_neg_eigval, dtype,
    )  # fmt: skip
    before, kept = StoredStates(state, column_scale, state_v_first, dtype, remainder), None
    pool = before.clone()
    if checkpoints is not None:
        kept = StoredStates(checkpoints, None, state_v_first, dtype).clone()
    o = torch.zeros(tokens.v.shape, dtype=dtype, device=q.device)
    lowest, slots = 0 if null_slot is None else null_slot + 1, state.shape[0]
    for n, (start, end) in enumerate(_spans(q, cu_seqlens)):
        slot = int(state_index[n])
        if not lowest <= slot < slots:
            continue
        S = before.read(slot)
        if has_initial_state is not None and not has_initial_state[n]:
            S = torch.zeros_like(S)
        history = [S]
        for t in range(start, end):
            o[t], S = tokens.step(t, S)
            history.append(S)
        if snapshot_pos is not None and snapshot_index is not None:
            position, target = int(snapshot_pos[n]), int(snapshot_index[n])
            if 0 <= position <= end - start and lowest <= target < slots:
                pool.write(target, history[position])
        if kept is not None and checkpoint_offsets is not None and checkpoint_offsets[n] >= 0:
            for i in range((end - start) // checkpoint_every):
                if checkpoint_offsets[n] + i < kept.state.shape[0]:
                    kept.write(int(checkpoint_offsets[n]) + i, history[(i + 1) * checkpoint_every])
        target = slot if out_state_index is None else int(out_state_index[n])
        if update_state and end > start and lowest <= target < slots:
            pool.write(target, S)
    extra = None if kept is None else kept.state
    return Served(o.view(v.shape), pool.state, extra, pool.column_scale, pool.remainder)


@dataclass(frozen=True)
class Replayed:
    """Hold the results of `replay_decode`: the outputs and the three history tensors."""

    o: Values
    u: Tensor
    k: Tensor
    G: Tensor


def replay_decode(
    q: Q,
    k: Keys,
    v: Values,
    state: Pool,
    history_u: Tensor,
    history_k: Tensor,
    history_G: Tensor,
    cursor: Tensor,
    *,
    g: Decay | None = None,
    beta: PerHead | None = None,
    a: Decay | None = None,
    b: PerHead | None = None,
    A_log: HeadParam | None = None,
    dt_bias: GateBias | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Offsets | None = None,
    read_index: Index | None = None,
    null_slot: int | None = None,
    column_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Replayed:
    """Compute `gdn.replay_decode` row by row: history, then packet, token by token; return copies."""
    tokens = _activate(
        q, k, v, g, beta, a, b, A_log, dt_bias, lower_bound, scale, use_qk_l2norm_in_kernel,
        allow_neg_eigval, dtype,
    )  # fmt: skip
    kept = Replayed(
        torch.zeros(tokens.v.shape, dtype=dtype, device=q.device), history_u.clone(), history_k.clone(),
        history_G.clone(),
    )  # fmt: skip
    raw = k.flatten(0, 1).to(dtype)
    # with the l2norm inside, the history holds k before the norm, so u is divided by the norm of k
    rstd = (
        torch.rsqrt((raw * raw).sum(-1) + 1e-6) if use_qk_l2norm_in_kernel else torch.ones_like(raw[..., 0])
    )
    rstd = rstd.repeat_interleave(v.shape[2] // k.shape[2], dim=1)
    lowest, (slots, places) = 0 if null_slot is None else null_slot + 1, history_u.shape[:2]
    for n, (start, end) in enumerate(_spans(q, cu_seqlens)):
        slot = n if read_index is None else int(read_index[n])
        if not lowest <= slot < slots:
            continue
        base = min(max(int(cursor[slot]), 0), places)
        S = StoredStates(state, column_scale, state_v_first, dtype).read(slot)
        past = increments(history_G[slot, :base].to(dtype))
        S, G = replayed(S, history_u[slot, :base], history_k[slot, :base], past)
        for t in range(start, end):
            before = torch.exp(tokens.g[t])[:, :, None] * S
            kept.o[t], S = tokens.step(t, S)
            d = tokens.beta[t][:, None] * (tokens.v[t] - torch.einsum("hkv,hk->hv", before, tokens.k[t]))
            g_t = tokens.g[t].clamp(min=-1000.0)
            G = G + g_t[:, 0]
            at = base + t - start
            if at < places:
                kept.u[slot, at], kept.k[slot, at] = rstd[t][:, None] * d, raw[t]
                # sums for a decay per head, the decays themselves for one per key channel
                kept.G[slot, at] = g_t if history_G.dim() == 4 else G
    return Replayed(kept.o.view(v.shape), kept.u, kept.k, kept.G)


def increments(G: Tensor) -> Tensor:
    """Return the log decays of a history [P, HV, K or 1]: itself, or the differences of sums G [P, HV]."""
    if G.dim() == 3:
        return G
    return G.diff(dim=0, prepend=torch.zeros_like(G[:1]))[..., None]


def replayed(S: Tensor, u: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return S [HV, K, V] after a history u [P, HV, V], k [P, H, K], g [P, HV, K or 1], and sums g [HV]."""
    for t in range(u.shape[0]):
        wide = k[t].to(S.dtype).repeat_interleave(S.shape[0] // k.shape[1], dim=0)
        S = torch.exp(g[t])[:, :, None] * S
        S = S + wide[:, :, None] * u[t].to(S.dtype)[:, None, :]
    return S, g[..., 0].sum(0)


def replay_commit(
    state: Tensor,
    history_u: Tensor,
    history_k: Tensor,
    history_G: Tensor,
    cursor: Tensor,
    index: Index,
    accepted: Index,
    *,
    room: int,
    update_cursor: bool = True,
    state_v_first: bool = False,
    null_slot: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Compute `gdn.replay_commit` slot by slot; return copies of state and cursor."""
    pool = StoredStates(state, None, state_v_first, dtype).clone()
    moved, (slots, places) = cursor.clone(), history_u.shape[1:3]
    for slot, count in zip(index.tolist(), accepted.tolist(), strict=True):
        if not (0 if null_slot is None else null_slot + 1) <= slot < slots:
            continue
        end = min(min(max(int(cursor[slot]), 0), places) + min(max(count, 0), room), places)
        if end + room > places:
            for layer in range(state.shape[0]) if end > 0 else ():
                u, k, G = (x[layer, slot, :end] for x in (history_u, history_k, history_G))
                S, _ = replayed(pool.read((layer, slot)), u, k, increments(G.to(dtype)))
                pool.write((layer, slot), S)
            end = 0
        if update_cursor:
            moved[slot] = end
    return pool.state, moved


def _activate(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, a: Tensor | None,
    b: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None,
    scale: float | None, with_norm: bool, negative: bool, dtype: torch.dtype,
) -> _Tokens:  # fmt: skip
    (H, K), HV = q.shape[2:], v.shape[2]
    q, k, v = (x.flatten(0, 1).to(dtype) for x in (q, k, v))
    if with_norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (x.repeat_interleave(HV // H, dim=1) for x in (q, k))
    q = q * (K**-0.5 if scale is None else scale)
    g = v.new_zeros(v.shape[:2]) if g is None else g.flatten(0, 1).to(dtype)
    beta = v.new_ones(v.shape[:2]) if beta is None else beta.flatten(0, 1).to(dtype)
    if a is not None and b is not None:
        A_log, dt_bias = (None if x is None else x.to(dtype) for x in (A_log, dt_bias))
        g = gate(a.flatten(0, 1).to(dtype), A_log, dt_bias, lower_bound, is_per_channel=a.dim() == 4)
        beta = torch.sigmoid(b.flatten(0, 1).to(dtype)) * (2 if negative else 1)
    g = g if g.dim() == 3 else g[..., None]
    return _Tokens(q, k, v, g, beta)


def _spans(q: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int]]:
    """Return (first token, one past the last) of every row; tokens are numbered through the batch."""
    B, T = q.shape[:2]
    ends = [b * T for b in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    return list(zip(ends[:-1], ends[1:], strict=True))
