"""Derive from a table and the global offsets what one rank does for one call. Cached by value."""

import functools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gdn.distributed.table import Fragment, Table
from gdn.ops.borders import Borders


class Piece(NamedTuple):
    """Hold the tokens of one sequence inside one run of this rank: one row of the local states.

    `sequence` is the row of the global states; `start` and `stop` are global tokens of batch row `batch`.
    """

    run: int
    batch: int
    sequence: int
    start: int
    stop: int
    is_first: bool
    is_last: bool


class Place(NamedTuple):
    """Hold where the state at a run's border belongs: slot and batch row of the exchange, local state row."""

    slot: int
    batch: int
    row: int


@dataclass(frozen=True)
class Plan:
    """Hold what one rank does for one table, one set of sequences and one batch size.

    pieces         rows of the local states, in local order: batch row, then run, then sequence
    offsets        local cu_seqlens over the batch rows side by side; None: each batch row is one piece
    entering       places of the states that come from another run
    leaving        places of the states that another run needs
    has_entering   for each run of the table: its first sequence began in an earlier run
    has_leaving    for each run of the table: its last sequence goes on in a later run
    num_pieces     for each run of the table: how many sequences have a piece in it
    """

    table: Table
    rank: int
    batch: int
    num_sequences: int
    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...] | None
    entering: tuple[Place, ...]
    leaving: tuple[Place, ...]
    has_entering: tuple[bool, ...]
    has_leaving: tuple[bool, ...]
    num_pieces: tuple[int, ...]

    @cached_property
    def has_exchange(self) -> bool:
        """Return True if a sequence crosses from one run to another, on any rank."""
        return any(self.has_leaving)

    @cached_property
    def passes(self) -> tuple[bool, ...]:
        """Return for each run whether one sequence came in and goes on, so that M is needed."""
        return tuple(
            enters and leaves and count == 1
            for enters, leaves, count in zip(
                self.has_entering, self.has_leaving, self.num_pieces, strict=True
            )
        )

    @cached_property
    def borders(self) -> Borders:
        """Return the local state rows that another run begins or continues."""
        entering, leaving = (tuple(x.row for x in places) for places in (self.entering, self.leaving))
        return Borders(entering, leaving, any(self.passes))

    @cached_property
    def has_all_entering(self) -> bool:
        """Return True if row b of the local states enters from slot 0 of batch row b, for all rows."""
        return self._are_all_rows(self.entering)

    @cached_property
    def has_all_leaving(self) -> bool:
        """Return True if row b of the local states leaves to slot 0 of batch row b, for all rows."""
        return self._are_all_rows(self.leaving)

    def _are_all_rows(self, places: tuple[Place, ...]) -> bool:
        rows = tuple(Place(0, b, b) for b in range(self.batch))
        return self.table.num_slots == 1 and len(self.pieces) == self.batch and places == rows

    def padded(self, num_rows: int) -> "Plan":
        """Return the plan of packed sequences with so many rows of states: the last ones are empty pieces."""
        assert self.offsets is not None
        end, count = self.offsets[-1], num_rows - len(self.pieces)
        empty = Piece(len(self.table.runs), 0, self.num_sequences, end, end, False, False)
        return replace(self, pieces=(*self.pieces, *[empty] * count), offsets=(*self.offsets, *[end] * count))

    @property
    def num_local(self) -> int:
        """Return the number of tokens that this rank holds of each batch row."""
        return self.table.num_local[self.rank]

    def cu_seqlens(self, device: torch.device) -> Tensor | None:
        """Return the local offsets on a device, or None."""
        return None if self.offsets is None else _tensor(self.offsets, device)


@functools.lru_cache(maxsize=256)
def _tensor(values: tuple[int, ...], device: torch.device) -> Tensor:
    # autograd may save an index: one made in inference mode could not be saved later
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int64, device=device)


def index(values: list[int], device: torch.device) -> Tensor:
    """Return the values as an int64 index on a device; equal values share one tensor."""
    return _tensor(tuple(values), device)


@functools.lru_cache(maxsize=64)
def _fragments(table: Table, cuts: tuple[int, ...]) -> list[tuple[Fragment, ...]]:
    """Return the fragments of every run: once for the plans of all ranks, which a halo and `heads` need."""
    return [tuple(table.fragments(j, cuts)) for j in range(len(table.runs))]


@functools.lru_cache(maxsize=256)
def make_plan(table: Table, offsets: tuple[int, ...] | None, batch: int, rank: int) -> Plan:
    """Return the plan of a rank. offsets: the global cu_seqlens of the only batch row, or None."""
    cuts = (0, table.num_tokens) if offsets is None else offsets
    fragments = _fragments(table, cuts)
    mine = table.runs_of[rank]
    pieces: list[Piece] = []
    entering, leaving = [], []
    for b in range(batch):
        for slot, j in enumerate(mine):
            first = len(pieces)
            for n, start, stop, is_first, is_last in fragments[j]:
                sequence = b if offsets is None else n
                pieces.append(Piece(j, b, sequence, start, stop, is_first, is_last))
            if not pieces[first].is_first:
                entering.append(Place(slot, b, first))
            if not pieces[-1].is_last:
                leaving.append(Place(slot, b, len(pieces) - 1))
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + piece.stop - piece.start)
    return Plan(
        table, rank, batch,
        num_sequences=batch if offsets is None else len(offsets) - 1,
        pieces=tuple(pieces),
        offsets=None if offsets is None and len(mine) == 1 else tuple(ends),
        entering=tuple(entering),
        leaving=tuple(leaving),
        has_entering=tuple(not f[0].is_first for f in fragments),
        has_leaving=tuple(not f[-1].is_last for f in fragments),
        num_pieces=tuple(map(len, fragments)),
    )  # fmt: skip
