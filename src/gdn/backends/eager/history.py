"""Decode with a history in plain PyTorch, row by row: `replay` on a ring of places; fold the full ones.

The history of a slot is a ring: `cursor` has its first place and how many places are in use. A fold empties
it, and the tokens of the same call stay behind it as the first ones of the next history.
"""

from torch import Tensor

from gdn.backends.eager.decode import decode
from gdn.backends.eager.integers import states_of
from gdn.backends.eager.replay import History, RowsOnHistory, active_rows, fold_past
from gdn.problem import FoldProblem, HistoryProblem


def appends_history(problem: HistoryProblem) -> bool:
    """Implement `Backend.appends_history`: without a choice of the caller no history is kept on a CPU."""
    return problem.must_append or problem.use_history is True


def decode_with_history(problem: HistoryProblem) -> None:
    """Implement `Backend.decode_with_history`: write states, histories, cursors and problem.out."""
    p = problem
    if not appends_history(p):
        fold_history(p.fold())
        decode(p.decode())
        return
    cursors, rows = p.cursor.tolist(), RowsOnHistory(p)
    accepted = None if p.num_accepted is None else p.num_accepted.tolist()
    slots = range(p.N) if p.read_index is None else p.read_index.tolist()
    held = {slot: 0 if accepted is None else accepted[n] for n, slot in enumerate(slots) if p.is_slot(slot)}
    counts = {slot: (first, count) for slot, first, count in active_rows(p)}
    for slot, kept in held.items():
        first, used = _in_use(p, cursors[slot], kept)
        start, count = counts.get(slot, (0, 0))
        if count > 0:
            order = _places(p, first, used)
            past = (p.history_u[slot][order], p.history_k[slot][order], p.history_G[slot][order])
            u, k, G = rows.run(slot, past, slice(start, start + count))
            fresh = _places(p, first + used, count)
            if used + count > p.places - p.room:
                fold_past(p, states_of(p)[slot], past)
                # the sums of the new tokens go on from the state that was just written
                G = G if p.is_per_channel else G - past[2][-1]
                first, used = (first + used) % p.places, 0
            for history, x in zip((p.history_u, p.history_k, p.history_G), (u, k, G), strict=True):
                history[slot, fresh] = x.to(history.dtype)
        _store_cursor(p, slot, first, used + (count if accepted is None else 0))
    rows.store()


def fold_history(problem: FoldProblem) -> None:
    """Implement `Backend.fold_history`: write problem.state and problem.cursor."""
    p, cursors = problem, problem.cursor.tolist()
    slots = range(p.N) if p.index is None else p.index.tolist()
    accepted = [0] * p.N if p.num_accepted is None else p.num_accepted.tolist()
    for slot, kept in zip(slots, accepted, strict=True):
        if p.is_slot(slot):
            first, used = _in_use(p, cursors[slot], kept)
            if used > 0:
                order = _places(p, first, used)
                past: History = (p.history_u[slot][order], p.history_k[slot][order], p.history_G[slot][order])
                fold_past(p, states_of(p)[slot], past)
                _store_cursor(p, slot, 0, 0)


def _in_use(p: HistoryProblem | FoldProblem, cursor: list[int], accepted: int) -> tuple[int, int]:
    """Return the first place of a slot's history and the number in use, each within its bounds."""
    first, used, _ = cursor
    used = max(used, 0) + min(max(accepted, 0), p.room)
    return min(max(first, 0), p.places - 1), min(used, p.places - p.room)


def _places(p: HistoryProblem | FoldProblem, first: int, count: int) -> Tensor:
    """Return the places of `count` tokens from `first` on, around the ring."""
    ring = p.cursor.new_tensor([(first + j) % p.places for j in range(count)])
    return ring.long()


def _store_cursor(p: HistoryProblem | FoldProblem, slot: int, first: int, used: int) -> None:
    p.cursor[slot] = p.cursor.new_tensor([first, used, 0])
