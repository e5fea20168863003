"""List the launches of the chunked rule in order, with the tensors of each.

The tensors of a call come as one sequence that starts with those of the problem (`describe.tensors_of`).
These methods only use positions, never values: `LaunchSequence` calls them once with integers in place of
tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeVar

from gdn.backends.triton.launch import Launch, LaunchSequence, TensorSpec

T = TypeVar("T")
Steps = Iterator[tuple[Launch, tuple[T | None, ...]]]


@dataclass(frozen=True)
class Forward:
    """Launch one forward. `output` is None where `scan_kernel` computes the outputs itself."""

    # G, A_inv, P, factors, q_rstd, k_rstd, S_in, v_new, final, o, table; index, out_index and has_initial
    # of a pool, whose tensor is both the initial and the final state
    specs: tuple[TensorSpec | None, ...]
    table: Launch | None
    prepare: Launch
    state: Launch
    output: Launch | None

    def steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the launches with their tensors. `tensors`: the problem's, then those of `specs`."""
        yield from self.prepare_steps(tensors)
        yield from self.state_steps(tensors)

    def prepare_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the launches that need no state. `tensors`: as in `steps`."""
        q, k, _, g, beta, A_log, dt_bias, _, cu_seqlens, *new = tensors
        G, A_inv, P, factors, q_rstd, k_rstd, _, _, _, o, table, *_ = new
        if self.table is not None:
            yield self.table, (cu_seqlens, table)
        # prepare zeros the outputs of tokens past the last sequence, which only packed problems have
        tail = None if table is None else o
        inputs = (q, k, g, beta, A_log, dt_bias, table)
        yield self.prepare, (*inputs, G, A_inv, P, factors, q_rstd, k_rstd, tail)

    def state_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the launches from the initial state on. `tensors`: as in `steps`."""
        q, k, v, _, _, _, _, initial_state, cu_seqlens, *new = tensors
        _, A_inv, P, factors, _, _, S_in, v_new, final, o, table, *pool = new
        ends = (initial_state, cu_seqlens, table)
        # fused: v_new stays in registers; S_in goes to HBM only if a backward needs it
        if self.output is None:
            yield self.state, (q, k, v, A_inv, P, factors, *ends, S_in, o, final, *pool)
        else:
            # unfused: S_in and v_new pass through HBM (or L2) to output_kernel, which is parallel over chunks
            yield self.state, (k, v, A_inv, factors, *ends, S_in, v_new, final, *pool)
            yield self.output, (q, P, factors, S_in, v_new, table, o)

    @cached_property
    def run(self) -> LaunchSequence:
        """Return a callable that runs all launches of the forward."""
        return LaunchSequence(self.steps)

    @cached_property
    def run_prepare(self) -> LaunchSequence:
        """Return a callable that runs the launches of `prepare_steps`."""
        return LaunchSequence(self.prepare_steps)

    @cached_property
    def run_state(self) -> LaunchSequence:
        """Return a callable that runs the launches of `state_steps`."""
        return LaunchSequence(self.state_steps)


class BackwardParts(ABC):
    """List the launches of a backward in parts, and run each part by a callable that is made once."""

    @abstractmethod
    def pair_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the launches that need no gradient of a state. `tensors`: as in `steps`."""

    @abstractmethod
    def state_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the backward state pass. `tensors`: as in `steps`."""

    @abstractmethod
    def late_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the rest. `tensors`: as in `steps` without the last `num_early`, then those of `late`."""

    def steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the launches up to the backward state pass, after which the last `num_early` may be freed.

        `tensors`: the problem's, those of Saved, do, dS, then those of `specs`.
        """
        yield from self.pair_steps(tensors)
        yield from self.state_steps(tensors)

    @cached_property
    def run(self) -> LaunchSequence:
        """Return a callable that runs the launches of `steps`."""
        return LaunchSequence(self.steps)

    @cached_property
    def run_pairs(self) -> LaunchSequence:
        """Return a callable that runs the launches of `pair_steps`."""
        return LaunchSequence(self.pair_steps)

    @cached_property
    def run_state(self) -> LaunchSequence:
        """Return a callable that runs the launch of `state_steps`."""
        return LaunchSequence(self.state_steps)

    @cached_property
    def run_late(self) -> LaunchSequence:
        """Return a callable that runs the launches of `late_steps`."""
        return LaunchSequence(self.late_steps)


@dataclass(frozen=True)
class Backward(BackwardParts):
    """Launch one backward. `sums` is None where there is no A_log."""

    # dv, dg, dbeta, dS0, dS_out, dA_log, ddt_bias, partial, factors, table, P, P_rest
    specs: tuple[TensorSpec | None, ...]
    # dq, dk, scaled v_new (`grown`), its low bits, tiles of E and F (None where these are stored in dq)
    late: tuple[TensorSpec | None, ...]
    table: Launch | None
    pairs: Launch
    state: Launch
    gradients: tuple[tuple[Launch, Launch], ...]  # (pairs_bwd, rows_bwd) per group of chunks, in order
    gates: Launch
    sums: Launch | None
    num_early: ClassVar[int] = 2  # tensors at the end of `specs` that only `steps` needs: P and P_rest

    def pair_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the launches that need no gradient of a state. `tensors`: as in `steps`."""
        q, k, _, _, beta, _, _, _, cu_seqlens, G, _, _, _, q_rstd, k_rstd, _, _, _, *new = tensors
        _, _, _, _, _, _, _, _, factors, table, P, P_rest = new
        if self.table is not None:
            yield self.table, (cu_seqlens, table)
        yield self.pairs, (q, k, beta, G, q_rstd, k_rstd, table, P, P_rest, factors)

    def state_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the backward state pass. `tensors`: as in `steps`."""
        q, k, _, _, _, _, _, _, cu_seqlens, _, A_inv, S_in, _, _, _, _, do, dS, *new = tensors
        dv, _, _, dS0, dS_out, _, _, _, factors, table, P, P_rest = new
        read = (q, k, None, A_inv, P, P_rest, factors, S_in, do, dS, cu_seqlens, table)
        yield self.state, (*read, dS_out, dv, None, dS0)

    def late_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the other launches. `tensors`: as in `steps` without P and P_rest, then those of `late`."""
        q, k, v, g, beta, A_log, dt_bias, _, _, G, A_inv, S_in, _, q_rstd, k_rstd, _, do, _, *new = tensors
        dv, dg, dbeta, _, dS_out, dA_log, ddt_bias, partial, factors, table, *late = new
        dq, dk, grown, rest, tiles = late
        # E and F are stored in dq's memory if the C columns of each value head of a key head fit into its row
        tiles = dq if tiles is None else tiles
        read = (q, k, v, G, A_inv, q_rstd, k_rstd, S_in, do, table)
        rows = (q, k, q_rstd, k_rstd, S_in, dS_out, do, dv, grown, rest, table, tiles, factors, dq, dk)
        # group by group: scaled v_new and its low bits hold one group, which lowers peak memory in HBM
        for pairs_bwd, rows_bwd in self.gradients:
            yield pairs_bwd, (*read, tiles, dv, grown, rest, factors)
            yield rows_bwd, rows
        yield self.gates, (g, beta, A_log, dt_bias, G, table, factors, dg, dbeta, partial)
        # dA_log and ddt_bias: partial sums per chunk in HBM, added in a fixed order and without atomics
        if self.sums is not None:
            yield self.sums, (partial, *((None, dA_log) if ddt_bias is None else (dA_log, ddt_bias)))
