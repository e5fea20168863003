"""Exchange states between runs: transfers to entering states, and their gradients back.

The transfer of a run is (M, N): S_end = M S_start + N. With runs j = 0 .. J-1 in the order of their tokens

    S_in[0] = 0;        S_in[j+1]  = N_j  if run j resets, else  M_j S_in[j] + N_j
    dS_out[J-1] = 0;    dS_out[j-1] = dS_in[j],   dS_in[j] = C_j  if run j resets, else  M_j^T dS_out[j] + C_j

A run resets unless one sequence came in and goes on (`Plan.passes`).

    exchange   a rank receives, forward / backward      steps   who computes the fold
    gather     (R-1) (M, N) / (R-1) C                   1 / 1   every rank, all heads
    owner      (R-1)/R ((M, N) + S) / (R-1)/R 2 C       2 / 2   rank i a part of the heads, for all ranks
    nodes      `owner` in a node of g ranks, then       4 / 4   rank i of a node a part of the heads for its
               1/g of it between nodes (`nodes`)                node, and a part of these for all nodes

An exchange starts its first collective and returns what is pending; the caller launches other work, which
does not need the states, and finishes the exchange then. `gather` and `owner` fold each head by products of
the same shape in the same order, so that their results have equal bits.
Layouts: [slots, B, HV, K, ...], one slot for each run of a rank, in fp32 (fp64 for fp64).
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from gdn.distributed.collectives import Pending, start_all_gather, start_all_to_all
from gdn.distributed.folds import Runs, fold_gradients_to, fold_states, kept_maps
from gdn.distributed.plan import Plan
from gdn.problem.propagate import matrix


class Exchange(Protocol):
    """Describe an exchange of states: each direction starts, and finishes with what is pending."""

    def start_states(self, transfers: Tensor) -> Pending:
        """Send N | M of this rank's runs, [slots, B, HV, K, V+K]; zero where there is none.

        Without M, [slots, B, HV, K, V], where no run passes a state on.
        """
        ...

    def finish_states(self, pending: Pending, V: int) -> tuple[Tensor | None, Tensor]:
        """Return S_in of the runs of this rank, [slots, B, HV, K, V], and the M that the backward needs.

        The states may be None where none enters.
        """
        ...

    def start_gradients(self, C: Tensor) -> Pending:
        """Send C of this rank's runs, [slots, B, HV, K, V]: their dS_in for dS_out = 0."""
        ...

    def finish_gradients(self, pending: Pending, maps: Tensor) -> Tensor | None:
        """Return dS_out of the runs of this rank; it may be None where no state leaves."""
        ...

    def maps_shape(self, HV: int, K: int) -> tuple[int, ...]:
        """Return the shape of the M that the backward needs."""
        ...


@dataclass(frozen=True)
class Gather:
    """Gather all transfers on every rank; each rank folds all heads, up to its own last run.

    backend: the name of the backend that folds; None: chosen automatically
    """

    plan: Plan
    group: ProcessGroup
    backend: str | None = None

    def start_states(self, transfers: Tensor) -> Pending:
        return start_all_gather(transfers, self.group)

    def finish_states(self, pending: Pending, V: int) -> tuple[Tensor | None, Tensor]:
        runs = Runs(pending.wait(), slots_of_runs(self.plan))
        maps = kept_maps(runs, self.plan.passes, V)
        if not self.plan.entering:
            return None, maps
        if self._has_two_runs:
            return self._other(runs, V), maps
        own = self._own(runs, V)
        fold_states(runs, self.plan.passes, own, backend=self.backend)
        return own.values[:, 0], maps

    def start_gradients(self, C: Tensor) -> Pending:
        return start_all_gather(C, self.group)

    def finish_gradients(self, pending: Pending, maps: Tensor) -> Tensor | None:
        C = Runs(pending.wait(), slots_of_runs(self.plan))
        if not self.plan.leaving:
            return None
        if self._has_two_runs:
            return self._other(C, C.values.shape[-1])
        own = self._own(C, C.values.shape[-1])
        fold_gradients_to(C, maps, self.plan.passes, own, backend=self.backend)
        return own.values[:, 0]

    def maps_shape(self, HV: int, K: int) -> tuple[int, ...]:
        return sum(self.plan.passes), self.plan.batch, HV, K, K

    @property
    def _has_two_runs(self) -> bool:
        """Return True for one run on each of two ranks: a rank gets N, or C, of the other as it is."""
        return self.plan.table.num_ranks == len(self.plan.table.runs) == 2 and self.plan.table.num_slots == 1

    def _other(self, gathered: Runs, V: int) -> Tensor:
        """Return the columns of V that the other rank has sent, [1, B, HV, K, V]: a view, no kernel."""
        (j,) = self.plan.table.runs_of[self.plan.rank]
        return matrix(gathered.values, gathered.places[1 - j])[None, ..., :V]

    def _own(self, gathered: Runs, V: int) -> Runs:
        """Return memory for a state of each run of this rank."""
        table = self.plan.table
        places = [-1] * len(table.runs)
        for slot, j in enumerate(table.runs_of[self.plan.rank]):
            places[j] = slot
        shape = gathered.values.shape[2:-1]
        return Runs(gathered.values.new_empty(len(table.runs_of[self.plan.rank]), 1, *shape, V), places)


@dataclass(frozen=True)
class Owner:
    """Send each head's transfers to the rank that owns the head; it folds them and returns the states."""

    plan: Plan
    group: ProcessGroup
    backend: str | None = None

    def start_states(self, transfers: Tensor) -> Pending:
        return start_to_owners(transfers, self.group)

    def finish_states(self, pending: Pending, V: int) -> tuple[Tensor | None, Tensor]:
        runs = Runs(pending.wait(), slots_of_runs(self.plan))
        entering = self._to_send(runs, V)
        fold_states(runs, self.plan.passes, entering, backend=self.backend)
        maps = kept_maps(runs, self.plan.passes, V)
        return self._from_owners(entering, pending.num_heads), maps

    def start_gradients(self, C: Tensor) -> Pending:
        return start_to_owners(C, self.group)

    def finish_gradients(self, pending: Pending, maps: Tensor) -> Tensor | None:
        C = Runs(pending.wait(), slots_of_runs(self.plan))
        leaving = self._to_send(C, C.values.shape[-1])
        fold_gradients_to(C, maps, self.plan.passes, leaving, backend=self.backend)
        return self._from_owners(leaving, pending.num_heads)

    def maps_shape(self, HV: int, K: int) -> tuple[int, ...]:
        own = len(split_heads(HV, self.group.size())[self.plan.rank])
        return sum(self.plan.passes), self.plan.batch, own, K, K

    def _to_send(self, got: Runs, V: int) -> Runs:
        """Return memory for a state of every run, in the order of the wire: see `start_to_owners`."""
        R, slots, B, own, K, _ = got.values.shape
        shape = (R, own, slots, B, K, V)
        # a slot without a run is sent as well
        is_full = len(self.plan.table.runs) == R * slots
        send = got.values.new_empty(shape) if is_full else got.values.new_zeros(shape)
        return Runs(send.movedim(1, 3), got.places)

    def _from_owners(self, states: Runs, HV: int) -> Tensor:
        """Return [slots, B, HV, K, V] of this rank."""
        got = from_owners(states.values, HV, self.group)
        return got[: len(self.plan.table.runs_of[self.plan.rank])]


def start_to_owners(x: Tensor, group: ProcessGroup) -> Pending:
    """Send x [slots, B, heads, K, ...] to the owners of its heads: [R, slots, B, own heads, K, ...].

    Heads come first on the wire: the blocks for the ranks are then rows of one tensor.
    """
    slots, B, heads, *size = x.shape
    counts = [len(h) for h in split_heads(heads, group.size())]
    own = counts[group.rank()]

    def arrange(got: Tensor) -> Tensor:
        return got.view(len(counts), own, slots, B, *size).movedim(1, 3)

    return start_all_to_all(x.movedim(2, 0), [own] * len(counts), counts, group).then(arrange, heads)


def from_owners(x: Tensor, heads: int, group: ProcessGroup) -> Tensor:
    """Return [slots, B, heads, K, ...] of this rank, from [R, slots, B, own heads, K, ...] on each owner."""
    counts = [len(h) for h in split_heads(heads, group.size())]
    own = x.shape[3]
    send = x.movedim(3, 1).flatten(0, 1)  # [R, own heads, slots, B, K, V]
    return start_all_to_all(send, counts, [own] * len(counts), group).wait().movedim(0, 2)


def split_heads(num_heads: int, num_ranks: int) -> list[range]:
    """Return the heads that each rank owns: neighbours, as equal in number as possible."""
    cuts = [i * num_heads // num_ranks for i in range(num_ranks + 1)]
    return [range(a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]


def slots_of_runs(plan: Plan) -> list[int]:
    """Return for each run its place among the slots of all ranks side by side."""
    return plan.table.slots_of_runs
