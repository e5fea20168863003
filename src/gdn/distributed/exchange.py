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
from gdn.distributed.folds import fold, fold_gradients, kept_maps
from gdn.distributed.plan import Plan, index


class Exchange(Protocol):
    """Describe an exchange of states: each direction starts, and finishes with what is pending."""

    def start_states(self, transfers: Tensor) -> Pending:
        """Send N | M of this rank's runs, [slots, B, HV, K, V+K]; zero where there is none."""
        ...

    def finish_states(self, pending: Pending, V: int) -> tuple[Tensor, Tensor]:
        """Return S_in of the runs of this rank, [slots, B, HV, K, V], and the M that the backward needs."""
        ...

    def start_gradients(self, C: Tensor) -> Pending:
        """Send C of this rank's runs, [slots, B, HV, K, V]: their dS_in for dS_out = 0."""
        ...

    def finish_gradients(self, pending: Pending, maps: Tensor) -> Tensor:
        """Return dS_out of the runs of this rank."""
        ...

    def maps_shape(self, HV: int, K: int) -> tuple[int, ...]:
        """Return the shape of the M that the backward needs."""
        ...


@dataclass(frozen=True)
class Gather:
    """Gather all transfers on every rank; each rank folds all heads."""

    plan: Plan
    group: ProcessGroup

    def start_states(self, transfers: Tensor) -> Pending:
        return start_all_gather(transfers, self.group)

    def finish_states(self, pending: Pending, V: int) -> tuple[Tensor, Tensor]:
        runs = self._in_order(pending.wait())
        return self._own(fold(runs, self.plan.passes, V)), kept_maps(runs, self.plan.passes, V)

    def start_gradients(self, C: Tensor) -> Pending:
        return start_all_gather(C, self.group)

    def finish_gradients(self, pending: Pending, maps: Tensor) -> Tensor:
        return self._own(fold_gradients(self._in_order(pending.wait()), maps, self.plan.passes))

    def maps_shape(self, HV: int, K: int) -> tuple[int, ...]:
        return sum(self.plan.passes), self.plan.batch, HV, K, K

    def _in_order(self, gathered: Tensor) -> Tensor:
        """Return [J, ...] in the order of runs, from [R, slots, ...]."""
        return gathered.flatten(0, 1)[index(slots_of_runs(self.plan), gathered.device)]

    def _own(self, runs: Tensor) -> Tensor:
        mine = self.plan.table.runs_of[self.plan.rank]
        return runs[index(list(mine), runs.device)]


@dataclass(frozen=True)
class Owner:
    """Send each head's transfers to the rank that owns the head; it folds them and returns the states."""

    plan: Plan
    group: ProcessGroup

    def start_states(self, transfers: Tensor) -> Pending:
        return start_to_owners(transfers, self.group)

    def finish_states(self, pending: Pending, V: int) -> tuple[Tensor, Tensor]:
        runs = self._in_order(pending.wait())
        entering = fold(runs, self.plan.passes, V)
        return self._from_owners(entering, pending.num_heads), kept_maps(runs, self.plan.passes, V)

    def start_gradients(self, C: Tensor) -> Pending:
        return start_to_owners(C, self.group)

    def finish_gradients(self, pending: Pending, maps: Tensor) -> Tensor:
        runs = self._in_order(pending.wait())
        return self._from_owners(fold_gradients(runs, maps, self.plan.passes), pending.num_heads)

    def maps_shape(self, HV: int, K: int) -> tuple[int, ...]:
        own = len(split_heads(HV, self.group.size())[self.plan.rank])
        return sum(self.plan.passes), self.plan.batch, own, K, K

    def _in_order(self, got: Tensor) -> Tensor:
        """Return [J, B, own heads, K, ...] in the order of runs, from [R, slots, ...]."""
        return got.flatten(0, 1)[index(slots_of_runs(self.plan), got.device)]

    def _from_owners(self, runs: Tensor, HV: int) -> Tensor:
        """Return [slots, B, HV, K, V] of this rank, from [J, B, own heads, K, V] on each owner."""
        table = self.plan.table
        slots = runs.new_zeros(table.num_ranks * table.num_slots, *runs.shape[1:])
        slots[index(slots_of_runs(self.plan), runs.device)] = runs
        got = from_owners(slots.unflatten(0, (table.num_ranks, table.num_slots)), HV, self.group)
        return got[: len(table.runs_of[self.plan.rank])]


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
