"""List the launches of the chunked rule with a decay per key channel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gdn.backends.triton.launch import Launch, TensorSpec
from gdn.backends.triton.rule.launches import BackwardParts, Forward, Steps, T


@dataclass(frozen=True)
class ChannelForward(Forward):
    """Launch one forward. `specs` ends with q_in and k_rows, and G is None.

    The state passes take these rows in the place of q and k.
    """

    def prepare_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the launches that need no state. `tensors`: the problem's, then those of `specs`."""
        q, k, _, g, beta, A_log, dt_bias, _, cu_seqlens, *new = tensors
        _, A_inv, P, factors, q_rstd, k_rstd, _, _, _, o, table, _, _, _, q_in, k_rows = new
        if self.table is not None:
            yield self.table, (cu_seqlens, table)
        tail = None if table is None else o
        inputs = (q, k, g, beta, A_log, dt_bias, table)
        yield self.prepare, (*inputs, q_in, k_rows, None, A_inv, P, None, factors, q_rstd, k_rstd, tail)

    def state_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the launches from the initial state on. `tensors`: as in `prepare_steps`."""
        *rest, q_in, k_rows = tensors
        yield from super().state_steps([q_in, k_rows, *rest[2:]])


@dataclass(frozen=True)
class ChannelBackward(BackwardParts):
    """Launch one backward. `add_rates` and `add_biases` are None where there is no A_log and no dt_bias."""

    # dv, dg, dbeta, dS0, dS_out, dA_log, ddt_bias, partial sums of dA_log, ddt_bias and dbeta, factors,
    # table, the low bits of dr, k_rows, q_in, P, P_rest, the low half of k_out
    specs: tuple[TensorSpec | None, ...]
    # dq, dk, the gradients of the rows of each value head, or None, tiles of E and F, v_new, `done` or None
    late: tuple[TensorSpec | None, ...]
    table: Launch | None
    prepare: Launch
    state: Launch
    # (values_bwd, rows_bwd_mma or None, rows_bwd) per group of chunks, in order
    gradients: tuple[tuple[Launch, Launch | None, Launch], ...]
    finish: Launch
    add_rates: Launch | None
    add_biases: Launch | None
    num_early: ClassVar[int] = 4  # q_in, P, P_rest and k_rest

    def pair_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the launches that need no gradient of a state. `tensors`: as in `steps`."""
        q, k, _, g, beta, A_log, dt_bias, _, cu_seqlens, *rest = tensors
        *_, factors, table, _, k_rows, q_in, P, P_rest, k_rest = rest
        if self.table is not None:
            yield self.table, (cu_seqlens, table)
        inputs = (q, k, g, beta, A_log, dt_bias, table)
        # rows and P again, without A_inv and norms, which were saved
        yield self.prepare, (*inputs, q_in, k_rows, k_rest, None, P, P_rest, factors, None, None, None)

    def state_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the backward state pass. `tensors`: as in `steps`."""
        _, _, _, _, _, _, _, _, cu_seqlens, _, A_inv, S_in, _, _, _, _, do, dS, *new = tensors
        dv, _, _, dS0, dS_out, _, _, _, _, _, factors, table, dr_rest, k_rows, q_in, P, P_rest, k_rest = new
        read = (q_in, k_rows, k_rest, A_inv, P, P_rest, factors, S_in, do, dS, cu_seqlens, table)
        yield self.state, (*read, dS_out, dv, dr_rest, dS0)

    def late_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the other launches. `tensors`: as in `steps` without the last four, then those of `late`."""
        q, k, v, g, beta, A_log, dt_bias, _, _, *rest = tensors
        _, A_inv, S_in, _, q_rstd, k_rstd, _, do, _, *new = rest
        dv, dg, dbeta, _, dS_out, dA_log, ddt_bias, rates, biases, shares, factors, table, *new = new
        dr_rest, k_rows, *late = new
        dq, dk, dq_rows, dk_rows, pairs, v_new, done = late
        norms = (q_rstd, k_rstd)
        given = (q, k, g, A_log, dt_bias, *norms, S_in, dS_out, do, dv, v_new, table, pairs, factors)
        rows = (dq, dk) if dq_rows is None else (dq_rows, dk_rows)
        # group by group: E, F and v_new hold one group, which lowers peak memory in HBM
        written = (*rows, dg, shares, rates, biases, done)
        for values_bwd, rows_bwd_mma, rows_bwd in self.gradients:
            yield values_bwd, (k_rows, v, A_inv, S_in, do, table, dr_rest, pairs, dv, v_new, factors)
            if rows_bwd_mma is not None:
                yield rows_bwd_mma, (*given, *written)
            yield rows_bwd, (*given, *written)
        yield self.finish, (q, k, beta, *norms, table, factors, shares, dq_rows, dk_rows, dq, dk, dbeta)
        # partial sums per chunk in HBM, added in a fixed order and without atomics
        if self.add_rates is not None:
            yield self.add_rates, (rates, None, dA_log)
        if self.add_biases is not None:
            yield self.add_biases, (biases, None, ddt_bias)
