"""The launches of the chunked rule in order, and which tensors each takes."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from gdn.backends.backend import Saved
from gdn.backends.triton.launch import Launch, Room, Step
from gdn.problem import Problem

Rooms = list[Tensor | None]


@dataclass(frozen=True)
class Forward:
    """The launches of one forward. `output` is None where the state pass makes the outputs."""

    rooms: tuple[Room | None, ...]  # G, A_inv, P, factors, q_rstd, k_rstd, S_in, v_new, final, o, table
    table: Launch | None
    prepare: Launch
    state: Launch
    output: Launch | None

    def steps(self, p: Problem, new: Rooms) -> Iterator[Step]:
        """The launches and their tensors, in order."""
        G, A_inv, P, factors, q_rstd, k_rstd, S_in, v_new, final, o, table = new
        if self.table is not None:
            yield self.table, (p.cu_seqlens, table)
        tail = None if table is None else o
        inputs = (p.q, p.k, p.g, p.beta, p.A_log, p.dt_bias, table)
        yield self.prepare, (*inputs, G, A_inv, P, factors, q_rstd, k_rstd, tail)
        ends = (p.initial_state, p.cu_seqlens, table)
        if self.output is None:
            yield self.state, (p.q, p.k, p.v, A_inv, P, factors, *ends, S_in, o, final)
        else:
            yield self.state, (p.k, p.v, A_inv, factors, *ends, S_in, v_new, final)
            yield self.output, (p.q, P, factors, S_in, v_new, table, o)


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

    def steps(self, p: Problem, saved: Saved, do: Tensor, dS: Tensor | None, new: Rooms) -> Iterator[Step]:
        """The launches up to the state pass, after which the last of `new`, P and P_rest, are done with."""
        dv, _, _, dS0, dS_out, _, _, _, factors, table, P, P_rest = new
        if self.table is not None:
            yield self.table, (p.cu_seqlens, table)
        yield self.pairs, (p.q, p.k, p.beta, saved.G, saved.q_rstd, saved.k_rstd, table, P, P_rest, factors)
        tensors = (p.q, p.k, saved.A_inv, P, P_rest, factors, saved.S_in, do, dS, p.cu_seqlens, table)
        yield self.state, (*tensors, dS_out, dv, dS0)

    def late_steps(self, p: Problem, saved: Saved, do: Tensor, new: Rooms, late: Rooms) -> Iterator[Step]:
        """The other launches; P and P_rest are not looked for in `new`."""
        dv, dg, dbeta, _, dS_out, dA_log, ddt_bias, partial, factors, table, *_ = new
        dq, dk, grown, rest, tiles = late
        # E and F lie in the place of dq where a key head's columns hold those of its value heads
        tiles = dq if tiles is None else tiles
        norms = (saved.q_rstd, saved.k_rstd)
        read = (p.q, p.k, p.v, saved.G, saved.A_inv, *norms, saved.S_in, do, table)
        rows = (p.q, p.k, *norms, saved.S_in, dS_out, do, dv, grown, rest, table, tiles, factors, dq, dk)
        for pairs_bwd, rows_bwd in self.gradients:
            yield pairs_bwd, (*read, tiles, dv, grown, rest, factors)
            yield rows_bwd, rows
        yield self.gates, (p.g, p.beta, p.A_log, p.dt_bias, saved.G, table, factors, dg, dbeta, partial)
        if self.sums is not None:
            yield self.sums, (partial, *((None, dA_log) if ddt_bias is None else (dA_log, ddt_bias)))
