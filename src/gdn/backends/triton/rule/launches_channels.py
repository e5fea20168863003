"""List the launches of the chunked rule with a decay per key channel: other tensors around the same passes."""

from collections.abc import Sequence
from dataclasses import dataclass

from gdn.backends.triton.rule.launches import Forward, Steps, T


@dataclass(frozen=True)
class ChannelForward(Forward):
    """Launch one forward. `specs` ends with q_in and k_rows, and G is None.

    The state passes take these rows in the place of q and k.
    """

    def prepare_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the launches that need no state. `tensors`: the problem's, then those of `specs`."""
        q, k, _, g, beta, A_log, dt_bias, _, cu_seqlens, *new = tensors
        _, A_inv, P, factors, q_rstd, k_rstd, _, _, _, o, table, q_in, k_rows = new
        if self.table is not None:
            yield self.table, (cu_seqlens, table)
        tail = None if table is None else o
        inputs = (q, k, g, beta, A_log, dt_bias, table)
        yield self.prepare, (*inputs, q_in, k_rows, A_inv, P, None, factors, q_rstd, k_rstd, tail)

    def state_steps(self, tensors: Sequence[T | None]) -> Steps[T]:
        """Yield the launches from the initial state on. `tensors`: as in `prepare_steps`."""
        *rest, q_in, k_rows = tensors
        yield from super().state_steps([q_in, k_rows, *rest[2:]])
