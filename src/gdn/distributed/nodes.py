"""Exchange states in two levels: within a node, then between nodes; see `exchange`.

    1  within a node, each rank gets N | M of a part of the heads, of all runs of the node
    2  it folds neighbouring runs into one N | M (a group); between nodes, each rank of the same place gets a
       part of these heads, of all groups
    3  it folds the groups; between nodes, each rank gets the states that enter the groups of its node
    4  it folds the runs of each group; within the node, each rank gets the states that enter its own runs

Between nodes a rank receives 1/g of the bytes of `owner`, g ranks a node. The sums associate otherwise than
those of `gather` and `owner`, so that states differ by roundings of fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gdn.distributed.collectives import Pending
from gdn.distributed.exchange import from_owners, split_heads, start_to_owners
from gdn.distributed.folds import fold, fold_first, fold_gradients, fold_transfers, kept_maps
from gdn.distributed.plan import Plan, index
from gdn.distributed.table import Table, make_table


@dataclass(frozen=True)
class Nodes:
    """Fold within each node first. Rank r of the plan is rank r % g of `within` and r // g of `between`."""

    plan: Plan
    between: ProcessGroup
    within: ProcessGroup

    def start_states(self, transfers: Tensor) -> Pending:
        return start_to_owners(transfers, self.within)

    def finish_states(self, pending: Pending, V: int) -> tuple[Tensor, Tensor]:
        runs = self._runs_of_node(pending.wait())
        whole = self._to_slots([fold_transfers(runs[i], self._passes(i), V) for i in self._groups], runs)
        wanted = start_to_owners(whole, self.between)
        groups = self._in_order(wanted.wait())
        first = self._from_other_nodes(fold(groups, self._group_passes, V), wanted.num_heads)
        inside = [fold(runs[i], self._passes(i), V, first[slot]) for slot, i in enumerate(self._groups)]
        maps = [kept_maps(runs, self._passes(slice(None)), V)]
        maps.append(kept_maps(groups, self._group_passes, V))
        # one tensor for the backward: maps of the node, then those of the groups, which have fewer heads
        kept = torch.cat([x.flatten(0, 2) for x in maps])
        return self._from_node(torch.cat(inside), pending.num_heads), kept

    def start_gradients(self, C: Tensor) -> Pending:
        return start_to_owners(C, self.within)

    def finish_gradients(self, pending: Pending, maps: Tensor) -> Tensor:
        runs = self._runs_of_node(pending.wait())
        _, B, heads, K, _ = runs.shape
        own = len(split_heads(heads, self.between.size())[self.between.rank()])
        num_inside, num_groups = sum(self._passes(slice(None))), sum(self._group_passes)
        inside, outside = maps.split([num_inside * B * heads, num_groups * B * own])
        inside, outside = inside.view(-1, B, heads, K, K), outside.view(-1, B, own, K, K)
        pairs = list(zip(self._groups, self._maps_of_groups(inside), strict=True))
        whole = self._to_slots([fold_first(runs[i], part, self._passes(i)) for i, part in pairs], runs)
        wanted = start_to_owners(whole, self.between)
        d = fold_gradients(self._in_order(wanted.wait()), outside, self._group_passes)
        last = self._from_other_nodes(d, wanted.num_heads)
        found = [
            fold_gradients(runs[i], part, self._passes(i), last[slot]) for slot, (i, part) in enumerate(pairs)
        ]
        return self._from_node(torch.cat(found), pending.num_heads)

    def maps_shape(self, HV: int, K: int) -> tuple[int, ...]:
        heads = len(split_heads(HV, self.within.size())[self.within.rank()])
        own = len(split_heads(heads, self.between.size())[self.between.rank()])
        inside, outside = sum(self._passes(slice(None))), sum(self._group_passes)
        return (inside * heads + outside * own) * self.plan.batch, K, K

    @cached_property
    def _table(self) -> Table:
        """Return the table of groups over the nodes: neighbouring runs of one node are one group."""
        g = self.within.size()
        return make_table([(r // g, a, b) for r, a, b in self.plan.table.runs], self.between.size())

    @property
    def _mine(self) -> list[int]:
        """Return the runs of this node, in order."""
        g, node = self.within.size(), self.between.rank()
        return [j for j, run in enumerate(self.plan.table.runs) if run.rank // g == node]

    @cached_property
    def _groups(self) -> list[slice]:
        """Return the places of each group's runs among those of this node."""
        runs, mine = self.plan.table.runs, self._mine
        found = []
        for group in (self._table.runs[j] for j in self._table.runs_of[self.between.rank()]):
            places = [i for i, j in enumerate(mine) if group.start <= runs[j].start < group.stop]
            found.append(slice(places[0], places[-1] + 1))
        return found

    def _passes(self, places: slice) -> list[bool]:
        """Return `Plan.passes` of some runs of this node."""
        return [self.plan.passes[j] for j in self._mine[places]]

    @cached_property
    def _group_passes(self) -> list[bool]:
        """Return for each group of all nodes whether every run of it passes a state on."""
        pairs = list(zip(self.plan.table.runs, self.plan.passes, strict=True))
        return [
            all(does_pass for run, does_pass in pairs if group.start <= run.start < group.stop)
            for group in self._table.runs
        ]

    def _maps_of_groups(self, maps: Tensor) -> Sequence[Tensor]:
        return maps.split([sum(self._passes(places)) for places in self._groups])

    def _runs_of_node(self, got: Tensor) -> Tensor:
        """Return [runs of the node, B, own heads, K, ...] in order, from [g, slots, ...]."""
        g, node, slots = self.within.size(), self.between.rank(), self.plan.table.num_slots
        places = [self.plan.table.slots_of_runs[j] - node * g * slots for j in self._mine]
        return got.flatten(0, 1)[index(places, got.device)]

    def _to_slots(self, groups: list[Tensor], like: Tensor) -> Tensor:
        """Return what the groups of this node have at their slots, [slots of nodes, B, heads, K, ...]."""
        empty = like.new_zeros(like.shape[1:])
        return torch.stack([*groups, *[empty] * (self._table.num_slots - len(groups))])

    def _in_order(self, got: Tensor) -> Tensor:
        return got.flatten(0, 1)[index(self._table.slots_of_runs, got.device)]

    def _from_other_nodes(self, groups: Tensor, heads: int) -> Tensor:
        table = self._table
        slots = groups.new_zeros(table.num_ranks * table.num_slots, *groups.shape[1:])
        slots[index(table.slots_of_runs, groups.device)] = groups
        return from_owners(slots.unflatten(0, (table.num_ranks, table.num_slots)), heads, self.between)

    def _from_node(self, runs: Tensor, heads: int) -> Tensor:
        g, node, num_slots = self.within.size(), self.between.rank(), self.plan.table.num_slots
        places = [self.plan.table.slots_of_runs[j] - node * g * num_slots for j in self._mine]
        slots = runs.new_zeros(g * num_slots, *runs.shape[1:])
        slots[index(places, runs.device)] = runs
        got = from_owners(slots.unflatten(0, (g, num_slots)), heads, self.within)
        return got[: len(self.plan.table.runs_of[self.plan.rank])]
