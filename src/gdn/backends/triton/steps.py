"""The launches of the chunked rule in order, and which tensors each takes.

The tensors of a call come in one sequence, first those of its problem: `plans.tensors_of`. Nothing but where
one stands in it is looked at: see `launch.Chain`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from gdn.backends.triton.launch import Chain, Launch, Room

T = TypeVar("T")
Steps = Iterator[tuple[Launch, tuple[T | None, ...]]]


@dataclass(frozen=True)
class Forward:
    """The launches of one forward. `output` is None where the state pass makes the outputs."""

    rooms: tuple[Room | None, ...]  # G, A_inv, P, factors, q_rstd, k_rstd, S_in, v_new, final, o, table
    table: Launch | None
    prepare: Launch
    state: Launch
    output: Launch | None

    def steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """The launches and their tensors, in order. `tensors`: the problem's, and those of `rooms`."""
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *new = tensors
        G, A_inv, P, factors, q_rstd, k_rstd, S_in, v_new, final, o, table = new
        if self.table is not None:
            yield self.table, (cu_seqlens, table)
        tail = None if table is None else o
        inputs = (q, k, g, beta, A_log, dt_bias, table)
        yield self.prepare, (*inputs, G, A_inv, P, factors, q_rstd, k_rstd, tail)
        ends = (initial_state, cu_seqlens, table)
        if self.output is None:
            yield self.state, (q, k, v, A_inv, P, factors, *ends, S_in, o, final)
        else:
            yield self.state, (k, v, A_inv, factors, *ends, S_in, v_new, final)
            yield self.output, (q, P, factors, S_in, v_new, table, o)

    @cached_property
    def run(self) -> Chain:
        """All of it."""
        return Chain(self.steps)


@dataclass(frozen=True)
class Backward:
    """The launches of one backward. `sums` is None where there is no A_log."""

    # dv, dg, dbeta, dS0, dS_out, dA_log, ddt_bias, partial, factors, table, P, P_rest
    rooms: tuple[Room | None, ...]
    late: tuple[Room | None, ...]  # dq, dk, grown, its rest, tiles of E and F: where None, these lie in dq
    table: Launch | None
    pairs: Launch
    state: Launch
    gradients: tuple[tuple[Launch, Launch], ...]  # of pairs and rows, of some chunks after the others
    gates: Launch
    sums: Launch | None

    def steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """The launches up to the state pass, after which P and P_rest are done with.

        `tensors`: the problem's, those of Saved, do, dS, and those of `rooms`.
        """
        q, k, _, _, beta, _, _, _, cu_seqlens, G, A_inv, S_in, _, q_rstd, k_rstd, do, dS, *new = tensors
        dv, _, _, dS0, dS_out, _, _, _, factors, table, P, P_rest = new
        if self.table is not None:
            yield self.table, (cu_seqlens, table)
        yield self.pairs, (q, k, beta, G, q_rstd, k_rstd, table, P, P_rest, factors)
        read = (q, k, A_inv, P, P_rest, factors, S_in, do, dS, cu_seqlens, table)
        yield self.state, (*read, dS_out, dv, dS0)

    def late_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """The other launches. `tensors`: as before but for P and P_rest, and those of `late`."""
        q, k, v, g, beta, A_log, dt_bias, _, _, G, A_inv, S_in, _, q_rstd, k_rstd, do, _, *new = tensors
        dv, dg, dbeta, _, dS_out, dA_log, ddt_bias, partial, factors, table, *late = new
        dq, dk, grown, rest, tiles = late
        # E and F lie in the place of dq where a key head's columns hold those of its value heads
        tiles = dq if tiles is None else tiles
        read = (q, k, v, G, A_inv, q_rstd, k_rstd, S_in, do, table)
        rows = (q, k, q_rstd, k_rstd, S_in, dS_out, do, dv, grown, rest, table, tiles, factors, dq, dk)
        for pairs_bwd, rows_bwd in self.gradients:
            yield pairs_bwd, (*read, tiles, dv, grown, rest, factors)
            yield rows_bwd, rows
        yield self.gates, (g, beta, A_log, dt_bias, G, table, factors, dg, dbeta, partial)
        if self.sums is not None:
            yield self.sums, (partial, *((None, dA_log) if ddt_bias is None else (dA_log, ddt_bias)))

    @cached_property
    def run(self) -> Chain:
        """Of `steps`."""
        return Chain(self.steps)

    @cached_property
    def run_late(self) -> Chain:
        return Chain(self.late_steps)
