"""Move tokens and states between ranks by their tables: shard, unshard, convert, gather and shard states."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gdn.distributed.collectives import swap
from gdn.distributed.plan import Plan, index, make_plan
from gdn.distributed.table import Table


def shard(x: Tensor, table: Table, rank: int, dim: int) -> Tensor:
    """Return the tokens of a rank along `dim`, from all tokens."""
    parts = [x.narrow(dim, *_extent(table, j)) for j in table.runs_of[rank]]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def unshard(x: Tensor, table: Table, rank: int, dim: int, group: ProcessGroup) -> Tensor:
    """Return all tokens along `dim` on every rank; a gradient is the sum of those of all ranks."""
    tokens = x.movedim(dim, 0)
    R, counts = table.num_ranks, list(table.num_local)
    # one copy for each rank, so that its gradient comes back apart and is summed in the order of ranks
    copies = tokens.expand(R, *tokens.shape).flatten(0, 1)
    got = swap(copies, counts, [counts[rank]] * R, group)
    return to_global_order(got.split(counts), table, 0).movedim(0, dim)


def to_global_order(blocks: Sequence[Tensor], table: Table, axis: int) -> Tensor:
    """Return tokens in global order from the tokens of each rank."""
    places = zip(table.runs, table.local_start, strict=True)
    parts = [blocks[run.rank].narrow(axis, at, run.stop - run.start) for run, at in places]
    return torch.cat(parts, axis)


def to_rank_order(x: Tensor, table: Table) -> Tensor:
    """Return a block [B, local T, ...] for each rank, as rows of one tensor, from [B, T, ...]."""
    runs = [[table.runs[j] for j in mine] for mine in table.runs_of]
    return torch.cat([row[run.start : run.stop] for mine in runs for row in x for run in mine])


def convert(x: Tensor, source: Table, target: Table, rank: int, dim: int, group: ProcessGroup) -> Tensor:
    """Return the tokens of a rank by the target table, from those by the source table, in one all-to-all."""
    tokens = x.movedim(dim, 0)
    sent = [_common(source, rank, target, to) for to in range(source.num_ranks)]
    got = [_common(source, owner, target, rank) for owner in range(source.num_ranks)]
    send = [_slices(tokens, source, rank, parts) for parts in sent]
    num_got, num_sent = ([sum(b - a for a, b in parts) for parts in side] for side in (got, sent))
    moved = swap(torch.cat(send), num_got, num_sent, group)
    # pieces of all senders, sorted by their first token: the local order of the target
    starts, place = {}, 0
    for parts in got:
        for a, b in parts:
            starts[a] = (place, b - a)
            place += b - a
    ordered = [moved.narrow(0, *starts[a]) for a in sorted(starts)]
    return (torch.cat(ordered) if ordered else moved).movedim(0, dim)


def gather_states(states: Tensor, plan: Plan, offsets: tuple[int, ...] | None, group: ProcessGroup) -> Tensor:
    """Return the final states of all sequences on every rank, from the rows where a sequence ends."""
    R = plan.table.num_ranks
    plans = [make_plan(plan.table, offsets, plan.batch, r) for r in range(R)]
    lasts = [[(row, p.sequence) for row, p in enumerate(other.pieces) if p.is_last] for other in plans]
    mine = states[index([row for row, _ in lasts[plan.rank]], states.device)]
    copies = mine.expand(R, *mine.shape).flatten(0, 1)
    got = swap(copies, [len(rows) for rows in lasts], [len(mine)] * R, group)
    order = [0] * plan.num_sequences
    for place, (_, sequence) in enumerate(pair for rows in lasts for pair in rows):
        order[sequence] = place
    return got[index(order, states.device)]


def _extent(table: Table, j: int) -> tuple[int, int]:
    run = table.runs[j]
    return run.start, run.stop - run.start


def _common(source: Table, owner: int, target: Table, to: int) -> list[tuple[int, int]]:
    """Return the ranges of global tokens that `owner` has by the source and `to` by the target, in order."""
    ranges = []
    for i in source.runs_of[owner]:
        for j in target.runs_of[to]:
            a = max(source.runs[i].start, target.runs[j].start)
            b = min(source.runs[i].stop, target.runs[j].stop)
            if a < b:
                ranges.append((a, b))
    return sorted(ranges)


def _slices(tokens: Tensor, table: Table, rank: int, parts: list[tuple[int, int]]) -> Tensor:
    """Return ranges of global tokens from the local tokens of a rank, side by side."""
    slices = [tokens.narrow(0, table.locate(a)[1], b - a) for a, b in parts]
    return torch.cat(slices) if slices else tokens[:0]
