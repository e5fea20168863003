"""Describe which rank holds which tokens of the global sequence axis. Plain Python, no process group.

A run is a contiguous range of tokens on one rank. A table lists all runs in the order of their tokens; a
rank keeps its runs side by side in that order.
"""

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

ORDERS = ("contiguous", "headtail")


class Run(NamedTuple):
    """Hold the tokens start : stop of the global axis, which lie on `rank`."""

    rank: int
    start: int
    stop: int


class Fragment(NamedTuple):
    """Hold the tokens start : stop of one sequence inside one run; empty for an empty sequence."""

    sequence: int
    start: int
    stop: int
    is_first: bool  # the sequence begins here
    is_last: bool  # the sequence ends here


@dataclass(frozen=True)
class Table:
    """Hold the runs in the order of their tokens: none is empty, neighbours are on different ranks."""

    runs: tuple[Run, ...]
    num_ranks: int

    @property
    def num_tokens(self) -> int:
        """Return T, the number of tokens on all ranks."""
        return self.runs[-1].stop

    @cached_property
    def runs_of(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the runs of each rank, in local order."""
        numbers: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for j, run in enumerate(self.runs):
            numbers[run.rank].append(j)
        return tuple(map(tuple, numbers))

    @cached_property
    def is_in_rank_order(self) -> bool:
        """Return True if the tokens of all ranks side by side are in global order."""
        ranks = [run.rank for run in self.runs]
        return ranks == sorted(ranks)

    @cached_property
    def num_slots(self) -> int:
        """Return the largest number of runs that a rank has."""
        return max(map(len, self.runs_of))

    @cached_property
    def num_local(self) -> tuple[int, ...]:
        """Return the number of tokens of each rank."""
        return tuple(sum(self.runs[j].stop - self.runs[j].start for j in mine) for mine in self.runs_of)

    @cached_property
    def local_start(self) -> tuple[int, ...]:
        """Return the place of each run's first token among the tokens of its rank."""
        places = [0] * len(self.runs)
        for mine in self.runs_of:
            place = 0
            for j in mine:
                places[j] = place
                place += self.runs[j].stop - self.runs[j].start
        return tuple(places)

    @cached_property
    def slots_of_runs(self) -> list[int]:
        """Return for each run its place among the slots of all ranks side by side."""
        slots = [0] * len(self.runs)
        for rank, mine in enumerate(self.runs_of):
            for slot, j in enumerate(mine):
                slots[j] = rank * self.num_slots + slot
        return slots

    @cached_property
    def _starts(self) -> list[int]:
        return [run.start for run in self.runs]

    def locate(self, token: int) -> tuple[int, int]:
        """Return the rank of a token and its place among the tokens of that rank."""
        j = bisect_right(self._starts, token) - 1
        return self.runs[j].rank, self.local_start[j] + token - self.runs[j].start

    def fragments(self, j: int, offsets: Sequence[int]) -> Iterator[Fragment]:
        """Yield the pieces of sequences in run j; `offsets` are the global cu_seqlens, from 0 to T.

        An empty sequence is in the run that holds the next token, or in the last run.
        """
        _, start, stop = self.runs[j]
        n = bisect_left(offsets, start)
        n -= offsets[n] != start  # a sequence that began in an earlier run
        is_end = j == len(self.runs) - 1
        while n < len(offsets) - 1 and (offsets[n] < stop or is_end):
            first, last = max(offsets[n], start), min(offsets[n + 1], stop)
            yield Fragment(n, first, last, offsets[n] >= start, offsets[n + 1] <= stop)
            n += 1


@functools.lru_cache(maxsize=256)
def equal_runs(order: str, num_tokens: int, num_ranks: int) -> Table:
    """Return the table of equal shards; the last blocks are shorter, or empty, where T does not divide.

    "contiguous": rank r holds block r of R. "headtail": rank r holds blocks r and 2R - 1 - r of 2R, the order
    of torch's ring attention.
    """
    blocks = list(range(num_ranks))
    if order == "headtail":
        blocks += blocks[::-1]
    size = -(-num_tokens // len(blocks))
    cuts = [min(i * size, num_tokens) for i in range(len(blocks) + 1)]
    return make_table(zip(blocks, cuts[:-1], cuts[1:], strict=True), num_ranks)


def make_table(runs: Iterable[Any], num_ranks: int) -> Table:
    """Return the table of runs (rank, start, stop), after merging neighbours on one rank.

    Raises TypeError for an entry that is no triple of ints; ValueError unless every token of 0 .. T is in one
    run and the runs are in the order of their tokens.
    """
    merged: list[Run] = []
    for entry in runs:
        run = _checked(entry, num_ranks)
        before = merged[-1] if merged else None
        end = 0 if before is None else before.stop
        if run.start != end:
            raise ValueError(_gap(run, before))
        if run.start == run.stop:
            continue
        if before is not None and before.rank == run.rank:
            merged[-1] = Run(run.rank, before.start, run.stop)
        else:
            merged.append(run)
    if not merged:
        raise ValueError("runs: expected at least one token on all ranks together, got 0")
    return Table(tuple(merged), num_ranks)


def _checked(entry: Any, num_ranks: int) -> Run:
    numbers = tuple(entry) if isinstance(entry, Sequence) and not isinstance(entry, str) else ()
    if len(numbers) != 3 or not all(isinstance(x, int) and not isinstance(x, bool) for x in numbers):
        raise TypeError(f"runs: expected triples of ints (rank, start, stop), got {entry!r}")
    run = Run(*numbers)
    if not 0 <= run.rank < num_ranks:
        raise ValueError(f"runs: expected ranks 0 .. {num_ranks - 1}, got rank {run.rank}")
    if not 0 <= run.start <= run.stop:
        raise ValueError(
            f"runs: expected 0 <= start <= stop, got {run.start} .. {run.stop} on rank {run.rank}"
        )
    return run


def _gap(run: Run, before: Run | None) -> str:
    end, ranks = (
        (0, f"rank {run.rank}") if before is None else (before.stop, f"ranks {before.rank} and {run.rank}")
    )
    words = "in the order of the tokens, every token once"
    if run.start > end:
        return f"runs: expected runs {words}, got no run with tokens {end} .. {run.start} (before {ranks})"
    again = f"tokens {run.start} .. {min(end, run.stop)} twice or too late on {ranks}"
    return f"runs: expected runs {words}, got {again}"
