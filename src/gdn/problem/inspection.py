"""Inspect the contents of the tensors of a call, for debug mode (GDN_DEBUG=1); this reads device memory.

`inspect_problem` raises ValueError where the result would be undefined: two rows write one slot, a row reads
a slot that another row writes, a log decay is positive. It returns a message for each property that is
allowed but usually a mistake: a slot past the pool, keys that are not normalised, heads before tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gdn.problem.commit import CommitProblem
from gdn.problem.history import FoldProblem, HistoryProblem
from gdn.problem.layer import ConvProblem, ConvUpdateProblem
from gdn.problem.prefill import PrefillProblem
from gdn.problem.replay import KeepProblem, ReplayProblem
from gdn.problem.rule import Problem
from gdn.problem.serving import DecodeProblem
from gdn.problem.step import StepProblem

Ranges = Sequence[
    tuple[int, int]
]  # (first token, number of tokens) of each row, tokens counted over the batch
Places = Iterable[tuple[int, Any]]  # (row, the place that it reads or writes)
SLACK = 1.02  # rounding to bf16 gives normalised keys norms of up to 1.01


def inspect_problem(problem: Any) -> list[str]:
    """Return the messages about a checked call; raise ValueError where its result would be undefined."""
    inspect = _INSPECT.get(type(problem))
    return [] if inspect is None else inspect(problem)


def _rule(p: Problem) -> list[str]:
    T = p.T if p.cu_seqlens is None else int(p.cu_seqlens[-1])
    ranges = [(row * p.T, T) for row in range(p.B)]
    g = None if p.use_gate_in_kernel else p.g
    beta = p.beta
    if beta is not None and p.use_beta_sigmoid_in_kernel:
        beta = _write_strength(beta, p.allow_neg_eigval)
    messages = _tokens(p.k, g, beta, ranges, p.use_qk_l2norm_in_kernel)
    if p.H > p.T > 1 and p.HV == p.H and p.cu_seqlens is None:
        messages.append(f"q: T={p.T} tokens and H={p.H} heads; expected [B, T, H, K], tokens before heads")
    return messages


def _decode(p: DecodeProblem) -> list[str]:
    ranges = p.token_ranges(read_device=True) or ()
    rows = range(p.N)
    slots = _selected(p, rows)
    messages = _past_the_pool("read_index", slots, p.state.shape[0])
    valid = [n for n in rows if p.is_slot(slots[n]) and ranges[n][1] > 0]
    R = 1 if p.ring_pos is None else p.state.shape[1]
    start = [0] * p.N if p.ring_pos is None else p.ring_pos.tolist()
    reads = [(n, (slots[n], start[n] % R)) for n in valid]
    name = "read_index" if p.write_index is None else "write_index"
    writes: list[tuple[int, Any]] = []
    if p.write == "final" and p.write_index is None:
        writes = reads
    elif p.write == "all" and p.write_index is None:
        writes = [(n, (slots[n], (start[n] + 1 + t) % R)) for n in valid for t in range(ranges[n][1])]
    elif p.write_index is not None:
        targets = p.write_index.reshape(p.N, -1).tolist()
        messages += _past_the_pool(name, [x for row in targets for x in row], p.state.shape[0])
        count = {n: ranges[n][1] if p.write == "all" else 1 for n in valid}
        writes = [(n, (x, 0)) for n in valid for x in targets[n][: count[n]] if p.is_slot(x)]
    _require_own_slots(name, writes, reads)
    if p.intermediate is not None and p.intermediate_row is not None:
        kept = p.intermediate_row.tolist()
        messages += _past_the_pool("intermediate_row", kept, p.intermediate.shape[0], "rows")
        room = range(p.intermediate.shape[0])
        _require_own_slots("intermediate_row", [(n, kept[n]) for n in valid if kept[n] in room])
    live = [ranges[n] for n in valid]
    return messages + _pool_tokens(p, live)


def _prefill(p: PrefillProblem) -> list[str]:
    offsets = p.offsets(read_device=True) or [0]
    ranges = [(a, b - a) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    slots, size = p.state_index.tolist(), p.state.shape[0]
    messages = _past_the_pool("state_index", slots, size)
    targets, name = slots, "state_index"
    if p.out_state_index is not None:
        targets, name = p.out_state_index.tolist(), "out_state_index"
        messages += _past_the_pool(name, targets, size)
    valid = [n for n in range(p.N) if p.is_slot(slots[n])]
    continues = [True] * p.N if p.has_initial_state is None else p.has_initial_state.tolist()
    reads = [(n, slots[n]) for n in valid if continues[n] and ranges[n][1] > 0]
    stored = [n for n in valid if ranges[n][1] > 0 and p.is_slot(targets[n])] if p.update_state else []
    writes = [(n, targets[n]) for n in stored]
    _require_own_slots(name, writes, reads)
    if p.snapshot_pos is not None and p.snapshot_index is not None:
        positions, kept = p.snapshot_pos.tolist(), p.snapshot_index.tolist()
        taken = [n for n in valid if 0 <= positions[n] <= ranges[n][1]]
        messages += _past_the_pool("snapshot_index", [kept[n] for n in taken], size)
        snapshots = [(n, kept[n]) for n in taken if p.is_slot(kept[n])]
        _require_own_slots("snapshot_index", [*snapshots, *writes], reads)
    return messages + _pool_tokens(p, [ranges[n] for n in valid])


def _replay(p: ReplayProblem | HistoryProblem) -> list[str]:
    ranges = p.token_ranges(read_device=True) or ()
    slots = _selected(p, range(p.N))
    valid = [n for n in range(p.N) if p.is_slot(slots[n]) and ranges[n][1] > 0]
    _require_own_slots("read_index", [(n, slots[n]) for n in valid])
    messages = _past_the_pool("read_index", slots, p.state.shape[0])
    return messages + _pool_tokens(p, [ranges[n] for n in valid])


def _keep(p: KeepProblem) -> list[str]:
    return _slot_vector("index", p.index, p.state.shape[1], p.null_slot)


def _fold(p: FoldProblem) -> list[str]:
    return [] if p.index is None else _slot_vector("index", p.index, p.state.shape[0], p.null_slot)


def _commit(p: CommitProblem) -> list[str]:
    messages, writes = [], []
    for name, index, step in (
        ("dst_index", p.dst_index, p.step),
        ("extra_dst_index", p.extra_dst_index, p.extra_step),
    ):
        if index is None or step is None:
            continue
        messages += _past_the_pool(name, index.tolist(), p.dst.shape[1])
        entries = zip(index.tolist(), p.src_row.tolist(), step.tolist(), strict=True)
        for n, (slot, row, t) in enumerate(entries):
            if 0 <= slot < p.dst.shape[1] and 0 <= row < p.src.shape[1] and 0 <= t < p.src.shape[2]:
                writes.append((n, slot))
        _require_own_slots(name, writes)
    return messages


def _step(p: StepProblem) -> list[str]:
    messages: list[str] = []
    size = p.state.shape[0]
    slots: list[int] = list(range(len(p.x))) if p.read_index is None else p.read_index.tolist()
    messages += _past_the_pool("read_index", slots, size)
    reads = _valid(slots, size, p.null_slot)
    if p.write_index is None or p.conv_index is None:
        # the state, or the window, is written where it was read
        _require_own_slots("read_index", reads)
    if p.write_index is not None:
        targets = p.write_index.tolist()
        messages += _past_the_pool("write_index", targets, size)
        rows = {n for n, _ in reads}
        writes = [(n, slot) for n, slot in _valid(targets, size, p.null_slot) if n in rows]
        _require_own_slots("write_index", writes, reads)
    if p.conv_index is not None:
        messages += _slot_vector("conv_index", p.conv_index, p.conv_state.shape[0], p.null_slot)
    return messages


def _conv(p: ConvProblem | ConvUpdateProblem) -> list[str]:
    if p.state is None or p.state_index is None:
        return []
    return _slot_vector("state_index", p.state_index, p.state.shape[0], p.null_slot)


def _slot_vector(name: str, index: Tensor, slots: int, null_slot: int | None) -> list[str]:
    given = index.tolist()
    _require_own_slots(name, _valid(given, slots, null_slot))
    return _past_the_pool(name, given, slots)


def _valid(given: Sequence[int], slots: int, null_slot: int | None) -> list[tuple[int, int]]:
    """Return (row, slot) of the rows whose slot is in the pool and is not the null slot."""
    lowest = 0 if null_slot is None else 1
    return [(n, slot) for n, slot in enumerate(given) if lowest <= slot < slots]


def _selected(p: DecodeProblem | ReplayProblem | HistoryProblem, rows: range) -> list[int]:
    """Return the slot that each row reads, valid or not."""
    if p.read_index is None:
        return list(rows)
    given: list[Any] = p.read_index.tolist()
    if p.read_index.dim() == 1:
        return given
    columns = p.read_index.shape[1]
    accepted = getattr(p, "num_accepted", None)
    counts = [1] * len(given) if accepted is None else accepted.tolist()
    return [row[min(max(n, 1), columns) - 1] for row, n in zip(given, counts, strict=True)]


def _past_the_pool(name: str, values: Sequence[int], size: int, unit: str = "slots") -> list[str]:
    past = sorted({x for x in values if x >= size})
    return [f"{name}: {past} past the {size} {unit} there are; counted as padding"] if past else []


def _require_own_slots(name: str, writes: Places, reads: Places = ()) -> None:
    """Raise ValueError if two rows write one place, or one row reads a place that another row writes."""
    owner: dict[Any, int] = {}
    for row, place in writes:
        if owner.setdefault(place, row) != row:
            slot = place[0] if isinstance(place, tuple) else place
            raise ValueError(
                f"{name}: expected a slot of its own for each row that writes, got slot {slot} for rows "
                f"{owner[place]} and {row}"
            )
    for row, place in reads:
        if owner.get(place, row) != row:
            slot = place[0] if isinstance(place, tuple) else place
            raise ValueError(
                f"{name}: expected no row to write what another reads, got slot {slot} read by row {row} and "
                f"written by row {owner[place]}"
            )


def _pool_tokens(
    p: DecodeProblem | PrefillProblem | ReplayProblem | HistoryProblem, ranges: Ranges
) -> list[str]:
    beta = p.beta if p.b is None else _write_strength(p.b, p.allow_neg_eigval)
    return _tokens(p.k, p.g, beta, ranges, p.use_qk_l2norm_in_kernel)


def _write_strength(logits: Tensor, allow_neg_eigval: bool) -> Tensor:
    """Return beta of raw logits, in fp32."""
    return logits.float().sigmoid() * (2 if allow_neg_eigval else 1)


def _tokens(
    k: Tensor, g: Tensor | None, beta: Tensor | None, ranges: Ranges, is_normalised: bool
) -> list[str]:
    """Inspect the tokens of the rows that are computed; padding may hold any value."""
    chosen = [torch.arange(start, start + count, device=k.device) for start, count in ranges if count > 0]
    if not chosen:
        return []
    live = torch.cat(chosen)
    if g is not None:
        largest = float(g.flatten(0, 1)[live].amax())
        if largest > 0:
            raise ValueError(
                f"g: expected log decays <= 0, got {largest:.3g} (natural log; e^g is the decay)"
            )
    if is_normalised:
        return []
    squares = k.flatten(0, 1)[live].float().square().sum(-1)
    if beta is None:
        growth = squares
    else:
        strength = beta.flatten(0, 1)[live].float()
        growth = squares.repeat_interleave(strength.shape[1] // squares.shape[1], 1) * strength
    if growth.numel() == 0 or not float(growth.amax()) > 2 * SLACK:
        return []
    return [
        f"k: norms up to {float(squares.amax()) ** 0.5:.3g}, above sqrt(2 / beta) at some tokens, where the "
        "state grows; normalise k, or pass use_qk_l2norm_in_kernel=True"
    ]


_INSPECT: dict[type, Callable[[Any], list[str]]] = {
    Problem: _rule,
    DecodeProblem: _decode,
    PrefillProblem: _prefill,
    ReplayProblem: _replay,
    HistoryProblem: _replay,
    FoldProblem: _fold,
    KeepProblem: _keep,
    CommitProblem: _commit,
    StepProblem: _step,
    ConvProblem: _conv,
    ConvUpdateProblem: _conv,
}
