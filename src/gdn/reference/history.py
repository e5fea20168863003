"""Compute the reference of decoding with a history: what each token writes is kept beside the state.

These functions copy their arguments and are slow. The arithmetic is that of `reference.serving`; this file
has what the history of a slot adds to it: the ring of places, the cursor and the fold.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gdn.notation import Index, Keys, Pool, Q, Values
from gdn.reference.integers import STEPS, StoredStates
from gdn.reference.serving import decode, increments, replay_decode, replayed


@dataclass(frozen=True)
class Slots:
    """Hold the states, histories and cursors of all slots, as `gdn.HistoryPool` does."""

    state: Pool
    history_u: Tensor
    history_k: Tensor
    history_G: Tensor
    cursor: Tensor
    column_scale: Tensor | None = None
    remainder: Tensor | None = None

    def clone(self) -> "Slots":
        return replace(self, **{name: x.clone() for name, x in vars(self).items() if x is not None})

    @property
    def read_scale(self) -> Tensor | None:
        """Return the scale of what tokens read: without its remainder a state is int8 in larger steps."""
        scale = self.column_scale
        return scale if scale is None or self.remainder is None else STEPS * scale.double()

    def in_use(self, slot: int, accepted: int, room: int) -> tuple[int, Tensor]:
        """Return the first place of a slot's history, and the places in use, in order of their tokens."""
        places = self.history_u.shape[1]
        first, used, _ = self.cursor[slot].tolist()
        first, used = min(max(first, 0), places - 1), max(used, 0) + min(max(accepted, 0), room)
        return first, (first + torch.arange(min(used, places - room))) % places

    def fold(self, slot: int, order: Tensor, is_v_first: bool, dtype: torch.dtype) -> None:
        """Fold the places `order` of a slot's history into its state."""
        u, k, G = (x[slot][order] for x in (self.history_u, self.history_k, self.history_G))
        states = StoredStates(self.state, self.column_scale, is_v_first, dtype, self.remainder)
        S, _ = replayed(states.read(slot), u, k, increments(G.to(dtype)))
        states.write(slot, S)


def decode_with_history(
    q: Q,
    k: Keys,
    v: Values,
    pool: Any,
    *,
    read_index: Index | None = None,
    num_accepted: Index | None = None,
    use_history: bool = True,
    null_slot: int | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[Values, Slots]:
    """Compute `gdn.decode_with_history`; return o and copies of the pool's tensors, which stay unchanged."""
    new = _slots_of(pool)
    options |= {"null_slot": null_slot, "state_v_first": state_v_first, "cu_seqlens": cu_seqlens}
    (slots, places), (B, T) = new.history_u.shape[:2], q.shape[:2]
    counts = [T] * B if cu_seqlens is None else cu_seqlens.diff().tolist()
    index = list(range(len(counts))) if read_index is None else read_index.tolist()
    accepted = [0] * len(counts) if num_accepted is None else num_accepted.tolist()
    rows = {s: n for n, s in enumerate(index) if (0 if null_slot is None else 1) <= s < slots}
    held = {s: new.in_use(s, accepted[n], pool.room) for s, n in rows.items()}
    if not use_history:
        for slot, (_, order) in held.items():
            if len(order) > 0:
                new.fold(slot, order, state_v_first, dtype)
                new.cursor[slot] = 0
        options |= {"column_scale": new.column_scale}
        done = decode(q, k, v, new.state, read_index=read_index, dtype=dtype, **options)
        return done.o, replace(new, state=done.state, column_scale=done.column_scale)
    # replay on histories that begin at place 0: their tokens in order, then the new ones
    rings = {s: (held[s][0] + torch.arange(places)) % places for s in rows}
    flat, base = new.clone(), torch.zeros(slots, dtype=torch.int64)
    for slot in rows:
        for x in (flat.history_u, flat.history_k, flat.history_G):
            x[slot] = x[slot][rings[slot]]
        base[slot] = len(held[slot][1])
    options |= {"column_scale": flat.read_scale}
    given = (flat.state, flat.history_u, flat.history_k, flat.history_G, base)
    run = replay_decode(q, k, v, *given, read_index=read_index, dtype=dtype, **options)
    for slot, n in rows.items():
        used, count = len(held[slot][1]), counts[n]
        fresh, G = rings[slot][used : used + count], run.G[slot, used : used + count]
        first, kept = held[slot][0], count if num_accepted is None else 0
        if used + count + pool.room > places and count > 0:
            last = flat.history_G[slot, used - 1]
            new.fold(slot, held[slot][1], state_v_first, dtype)
            # the sums of the new tokens go on from the state that was just written
            G = G if flat.history_G.dim() == 4 else G - last
            first, used = (first + used) % places, 0
        new.history_u[slot, fresh] = run.u[slot, base[slot] : base[slot] + count]
        new.history_k[slot, fresh] = run.k[slot, base[slot] : base[slot] + count]
        new.history_G[slot, fresh] = G
        new.cursor[slot] = torch.tensor([first, used + kept, 0])
    return run.o, new


def fold_history(
    pool: Any,
    index: Index,
    *,
    num_accepted: Index | None = None,
    state_v_first: bool = False,
    null_slot: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Slots:
    """Compute `gdn.fold_history`; return copies of the pool's tensors, which stay unchanged."""
    new = _slots_of(pool)
    accepted = [0] * len(index) if num_accepted is None else num_accepted.tolist()
    for slot, count in zip(index.tolist(), accepted, strict=True):
        if (0 if null_slot is None else 1) <= slot < len(new.state):
            _, order = new.in_use(slot, count, pool.room)
            if len(order) > 0:
                new.fold(slot, order, state_v_first, dtype)
                new.cursor[slot] = 0
    return new


def _slots_of(pool: Any) -> Slots:
    """Return copies of the tensors of a pool."""
    names = [f.name for f in fields(Slots)]
    return Slots(**{name: getattr(pool, name) for name in names}).clone()
