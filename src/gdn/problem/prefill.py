"""Check the prefills of a serving engine: packed prompts on its state pools.

The fields have the names of the arguments of `gdn.prefill`, where they are documented.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import torch
from torch import Tensor

from gdn.notation import Index, Mask, Offsets, Values
from gdn.problem import addressing, check
from gdn.problem.declaration import WRITTEN, Declared, declared
from gdn.problem.history import FoldProblem, check_ring
from gdn.problem.replay import check_history_dtypes
from gdn.problem.rule import Problem, host_offsets
from gdn.problem.serving import ColumnScale, Gates, Numerics, OnPool, PoolTokens, Remainder


@dataclass(frozen=True)
class Prompts:
    """Declare the prompts of a prefill, their slots, and the states that it stores on the way."""

    cu_seqlens: Offsets
    state_index: Index
    out_state_index: Index | None
    has_initial_state: Mask | None
    checkpoints: Annotated[Tensor | None, WRITTEN]
    checkpoint_offsets: Index | None
    snapshot_pos: Index | None
    snapshot_index: Index | None
    out: Annotated[Values, WRITTEN]


@dataclass(frozen=True)
class PromptHistories:
    """Declare the histories of the slots, which are folded before a prefill; None for pools without them."""

    history_u: Tensor | None
    history_k: Tensor | None
    history_G: Tensor | None
    cursor: Annotated[Tensor | None, WRITTEN]


@declared
@dataclass(frozen=True)
class PrefillProblem(
    Declared, Numerics, PromptHistories, Prompts, Remainder, ColumnScale, Gates, PoolTokens, OnPool
):
    """Hold one checked prefill of packed sequences, on a pool of states or of states with histories."""

    room: int | None
    batch_invariant: bool
    update_state: bool
    checkpoint_every: int
    null_slot: int | None
    backend: str | None

    def offsets(self, *, read_device: bool) -> list[int] | None:
        """Return cu_seqlens as checked ints; None if it is on a device and read_device is False."""
        return host_offsets(self.cu_seqlens, None, self.q.shape[1], read_device=read_device)

    @property
    def keeps_states(self) -> bool:
        """Return True if the call stores states between the first and last token: checkpoints, snapshots."""
        return self.checkpoints is not None or self.snapshot_pos is not None

    @property
    def places(self) -> int:
        """Return the number of tokens that the history of a slot can hold."""
        assert self.history_G is not None
        return self.history_G.shape[1]

    @property
    def has_history(self) -> bool:
        """Return True if the slots have histories."""
        return self.cursor is not None

    def fold(self) -> FoldProblem:
        """Return the fold of the histories of all slots that are read, each of them once."""
        assert self.history_u is not None and self.history_k is not None and self.history_G is not None
        assert self.cursor is not None and self.room is not None
        index = self.state_index
        if self.has_initial_state is not None:
            index = index.masked_fill(~self.has_initial_state, -1)
        # two prompts may continue one cached state: equal slots are neighbours in order, without a matrix
        index = index.sort().values
        is_first = torch.ones_like(index, dtype=torch.bool)
        is_first[1:] = index[1:] != index[:-1]
        return FoldProblem(
            state=self.state, history_u=self.history_u, history_k=self.history_k, history_G=self.history_G,
            cursor=self.cursor, column_scale=self.column_scale, remainder=self.remainder,
            index=index.masked_fill(~is_first, -1), num_accepted=None, room=self.room,
            state_v_first=self.state_v_first, null_slot=self.null_slot, backend=self.backend,
        )  # fmt: skip

    @cached_property
    def rule(self) -> Problem:
        """Return the Problem of the rule for the whole prefill, without initial states."""
        is_raw = self.a is not None
        g, beta = (self.a, self.b) if is_raw else (self.g, self.beta)
        # lengths that the host knows anyway; without batch_invariant they would change the choice of segments
        is_known = self.batch_invariant and self.cu_seqlens.device.type == "cpu"
        return Problem(
            q=self.q, k=self.k, v=self.v, g=g, beta=beta, A_log=self.A_log, dt_bias=self.dt_bias,
            initial_state=None, cu_seqlens=self.cu_seqlens,
            cu_seqlens_cpu=self.cu_seqlens if is_known else None, scale=self.scale,
            lower_bound=self.lower_bound, output_final_state=True,
            use_qk_l2norm_in_kernel=self.use_qk_l2norm_in_kernel,
            use_gate_in_kernel=is_raw, use_beta_sigmoid_in_kernel=is_raw,
            allow_neg_eigval=self.allow_neg_eigval, state_v_first=self.state_v_first, exact=True,
            batch_invariant=self.batch_invariant, recompute=False, backend=self.backend,
        )  # fmt: skip


def parse_prefill(**given: Any) -> PrefillProblem:
    """Check a call of `prefill` without reading tensor contents; allocate `out` if it is None."""
    p = PrefillProblem.draft(given)
    check.backend(p.backend)
    dims = addressing.tokens(p.q, p.k, p.v)
    addressing.gates(p, dims)
    dims["N"] = check.offsets("q", p.cu_seqlens, None, dims)
    addressing.pool(p, False, dims, p.has_history)
    if p.has_history:
        check_ring(p, dims)
        check_history_dtypes(p)
    addressing.index("state_index", p.state_index, "N", dims)
    if p.out_state_index is not None:
        if not p.update_state:
            raise ValueError("out_state_index: expected None with update_state=False, got a tensor")
        addressing.index("out_state_index", p.out_state_index, "N", dims)
    if p.has_initial_state is not None:
        check.tensor("has_initial_state", p.has_initial_state)
        if p.has_initial_state.dtype != torch.bool:
            raise TypeError(f"has_initial_state: expected a bool tensor, got {p.has_initial_state.dtype}")
        check.shape("has_initial_state", p.has_initial_state, "N", dims)
    addressing.checkpoints(p, dims)
    if p.snapshot_pos is not None or p.snapshot_index is not None:
        addressing.index("snapshot_pos", p.snapshot_pos, "N", dims)
        addressing.index("snapshot_index", p.snapshot_index, "N", dims)
    addressing.out(p.q, p.v, p.out)
    addressing.devices("prefill", p.q, p)
    if p.cu_seqlens.device.type != "cpu":
        check.companions(p.q, "q", cu_seqlens=p.cu_seqlens)
    p.complete(out=addressing.output(p.v, p.out), scale=addressing.scale(p.scale, dims))
    return p
