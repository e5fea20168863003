"""Decode with plain PyTorch: row by row and token by token, in place in the pool where that is possible.

    S <- e^g S;   kS, qS = [k; q] S;   d = beta v - beta kS;   o = scale (qS + <q, k> d);   S <- S + k d^T

There are three passes over the state: decay, both products, update. A row's bits do not depend on other rows:
each row has its own operations on the state, and operations on all tokens together are elementwise or sums
over K. The elementwise functions are those whose vector and scalar forms agree on the CPU: exp, log1p, rsqrt
and arithmetic, but not sigmoid or softplus. Index tensors are read on the host.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn.backends.eager.alignment import align_rows
from gdn.backends.eager.gate import gate_dtype, load_decay, sigmoid
from gdn.backends.eager.integers import ColumnStates, states_of
from gdn.backends.eager.norm import l2norm_
from gdn.problem import DecodeProblem

Token = tuple[Tensor, ...]


@dataclass(frozen=True)
class Row:
    """Hold what one row of a decode reads and writes, as views of the caller's tensors.

    `after` are the tensors written after each token (or empty), `final` is written after the last token.
    """

    first: int
    count: int
    source: Tensor | ColumnStates
    after: list[list[Tensor | ColumnStates]]
    final: Tensor | ColumnStates | None
    is_in_place: bool
    parents: list[int] | None
    history: Tensor | None  # [tokens, HV, V, K] the row's intermediate states


def decode(problem: DecodeProblem) -> None:
    """Implement `Backend.decode`: write problem.state, problem.intermediate and problem.out."""
    p = problem
    # in the computing dtype: the last pass scales and rounds once; rows without a slot stay zero
    o = torch.zeros(p.out.shape, dtype=p.dtype, device=p.q.device)
    steps = _token_operands(p, o)
    scratch: Tensor | None = None
    for row in _active_rows(p):
        if row.is_in_place:
            assert isinstance(row.source, Tensor)
            S = row.source
        else:
            # one buffer for the states of all rows: only the first row touches new memory
            if scratch is None:
                scratch = torch.empty(row.source.shape, dtype=p.dtype, device=p.q.device)
            stored = row.source
            S = scratch.copy_(stored if isinstance(stored, Tensor) else stored.read(p.dtype))
        # branches of a tree start again from this state, and a step overwrites S
        root = S.clone() if row.parents is not None else S
        for t in range(row.count):
            if row.parents is not None and t > 0:
                parent = min(row.parents[t], t - 1)
                assert row.history is not None
                S.copy_(root if parent < 0 else row.history[parent])
            advance_token(S, steps[row.first + t], p.state_v_first)
            if p.round_state and isinstance(row.source, ColumnStates):
                row.source.round_(S)
            elif p.round_state and S.dtype != p.state.dtype:
                S.copy_(S.to(p.state.dtype))
            for target in row.after[t] if row.after else ():
                target.copy_(S)
        if row.final is not None and not row.is_in_place:
            row.final.copy_(S)
    torch.mul(o, p.scale, out=p.out)


def advance_token(S: Tensor, token: Token, is_v_first: bool) -> None:
    """Advance S [HV, V, K] (or [HV, K, V]) of one row by one token in place, and write o."""
    kq, k, beta_v, o, beta, qk, *decay = token
    if decay:
        S.mul_(decay[0])
    # k S and q S in one BLAS call: a single read of the state
    kS, qS = torch.bmm(kq, S.mT if is_v_first else S).chunk(2, 1)
    d = torch.addcmul(beta_v, beta, kS, value=-1)
    # o = q S + <q, k> d needs no read of the updated state
    torch.addcmul(qS, qk, d, out=o)
    if is_v_first:
        S.addcmul_(d.mT, k)
    else:
        S.addcmul_(k.mT, d)


def _token_operands(p: DecodeProblem, o: Tensor) -> list[Token]:
    """Return the operands: [k; q] [HV, 2, K], k [HV, 1, K], beta v, o [HV, 1, V], others [HV, 1, 1].

    The last one, the decay, has one number for a head or one for each row of the state.
    """
    H, HV, K, V = p.H, p.HV, p.K, p.V
    # in one layout, on which the bits of a norm depend: torch.stack keeps one of few tokens
    kq = torch.stack((p.k, p.q), 3).reshape(-1, H, 2, K).to(p.dtype).contiguous()
    if p.use_qk_l2norm_in_kernel:
        l2norm_(kq)
    # <q, k> per key head, before the repeat: H sums over K, not HV
    qk = (kq.select(2, 0) * kq.select(2, 1)).sum(-1)
    if HV != H:
        kq, qk = kq.repeat_interleave(HV // H, 1), qk.repeat_interleave(HV // H, 1)
    decay, beta = _load_gates(p)
    v = p.v.to(p.dtype)
    beta_v = v if beta is None else beta * v
    beta = torch.ones_like(qk) if beta is None else beta
    # a single token has no token axis, so none is unbound: a view costs as much as the arithmetic here
    lead = (HV,) if kq.shape[0] == 1 else (-1, HV)
    # each token's gemm operand begins where that of a single token does
    kq = align_rows(kq).view(*lead, 2, K)
    lists = [kq, kq.narrow(-2, 0, 1), beta_v.reshape(*lead, 1, V), o.view(*lead, 1, V)]
    lists += [x.reshape(*lead, 1, 1) for x in (beta, qk)]
    if decay is not None:
        n = decay.shape[-1]
        lists.append(decay.reshape(*lead, *((1, n) if p.state_v_first else (n, 1))))
    return [tuple(lists)] if len(lead) == 1 else list(zip(*(x.unbind(0) for x in lists), strict=True))


def _load_gates(p: DecodeProblem) -> tuple[Tensor | None, Tensor | None]:
    """Return e^g [..., HV, 1 or K] and beta [..., HV, 1] of every token; None for no decay, and for ones."""
    g, beta = load_decay(p, p.a, p.dtype), p.beta
    if p.b is not None:
        beta = sigmoid(p.b.to(gate_dtype(p.b.device))).mul_(2 if p.allow_neg_eigval else 1)
    elif g is not None:
        g = g.to(p.dtype)
    decay = None if g is None else g.exp().to(p.dtype)
    return decay, None if beta is None else beta.to(p.dtype).unsqueeze(-1)


def _active_rows(p: DecodeProblem) -> Iterator[Row]:
    """Yield the rows with tokens and a valid slot to read; the others compute nothing."""
    ranges = p.token_ranges(read_device=True)
    assert ranges is not None
    indices = (p.read_index, p.num_accepted, p.ring_pos, p.write_index, p.intermediate_row, p.parent)
    # one transfer to the host per index tensor, not one per row
    numbers: list[Any] = [None if x is None else x.tolist() for x in indices]
    read, accepted, ring, write, rows, parents = numbers
    # a contiguous matrix in the computing dtype: the three passes can run on the pool, without a copy
    is_dense = p.state.dtype == p.dtype and p.state.stride()[-2:] == p.state.shape[-1:] + (1,)
    states = states_of(p)
    for n, (first, count) in enumerate(ranges):
        slot = n if read is None else read[n]
        if isinstance(slot, list):
            slot = slot[min(max(accepted[n] if accepted else 1, 1), len(slot)) - 1]
        if count == 0 or not p.is_slot(slot):
            continue
        history = None
        if p.intermediate is not None:
            i = n if rows is None else rows[n]
            history = p.intermediate[i] if 0 <= i < p.intermediate.shape[0] else None
            if history is None and parents is not None:
                continue
        after: list[list[Tensor | ColumnStates]] = (
            [] if history is None else [[history[t]] for t in range(count)]
        )
        final, source = None, states[slot]
        if ring is not None:
            entry, R = ring[n] % source.shape[0], source.shape[0]
            ring_of, source = source, source[entry]
        if p.write == "all":
            after = after or [[] for _ in range(count)]
            for t in range(count):
                if ring is not None:
                    after[t].append(ring_of[(entry + 1 + t) % R])
                elif p.is_slot(write[n][t]):
                    after[t].append(states[write[n][t]])
        elif p.write == "final":
            target = slot if write is None else write[n]
            final = source if target == slot else states[target] if p.is_slot(target) else None
        in_place = is_dense and final is source and parents is None
        yield Row(
            first, count, source, after, final, in_place, None if parents is None else parents[n], history
        )
