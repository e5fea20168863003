"""Exchange states in two levels: within a node, then between nodes; see `exchange`.

    1  within a node, each rank gets N | M of a part of the heads, of all runs of the node
    2  it folds neighbouring runs into one N | M (a group); between nodes, each rank of the same place gets a
       part of these heads, of all groups
    3  it folds the groups; between nodes, each rank gets the states that enter the groups of its node
    4  it folds the runs of each group; within the node, each rank gets the states that enter its own runs

Between nodes a rank receives 1/g of the bytes of `owner`, g ranks a node. The sums associate otherwise than
those of `gather` and `owner`, so that states differ by roundings of fp32.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gdn.distributed.collectives import Pending
from gdn.distributed.exchange import from_owners, split_heads, start_to_owners
from gdn.distributed.folds import Runs, fold, fold_first, fold_gradients, fold_transfers, kept_maps
from gdn.distributed.plan import Plan, index
from gdn.distributed.table import Table, make_table


@dataclass(frozen=True)
class NodePlan:
    """Hold which runs a node has, and how they form groups.

    table          the groups over the nodes: neighbouring runs of one node are one group
    mine           the runs of this node, in order
    slots          their places among the slots of the ranks of this node
    groups         the places of each group's runs among those of this node
    group_passes   for each group of all nodes: every run of it passes a state on
    """

    plan: Plan
    table: Table
    mine: tuple[int, ...]
    slots: list[int]
    groups: tuple[slice, ...]
    group_passes: tuple[bool, ...]

    def passes(self, places: slice) -> list[bool]:
        """Return `Plan.passes` of some runs of this node."""
        return [self.plan.passes[j] for j in self.mine[places]]

    def maps_of_groups(self, maps: Tensor) -> Sequence[Tensor]:
        """Return the M of each group's runs from those of all runs of this node that pass a state on."""
        return maps.split([sum(self.passes(places)) for places in self.groups])


@functools.lru_cache(maxsize=256)
def make_node_plan(plan: Plan, g: int, num_nodes: int) -> NodePlan:
    """Return what the node of the plan's rank does; g: the ranks of a node."""
    runs, node = plan.table.runs, plan.rank // g
    table = make_table([(r // g, a, b) for r, a, b in runs], num_nodes)
    members: list[list[int]] = [[] for _ in table.runs]
    group = 0
    for j, run in enumerate(runs):
        group += run.start >= table.runs[group].stop
        members[group].append(j)
    mine = tuple(j for j, run in enumerate(runs) if run.rank // g == node)
    first = plan.table.num_slots * g * node
    return NodePlan(
        plan,
        table,
        mine,
        [plan.table.slots_of_runs[j] - first for j in mine],
        tuple(slice(mine.index(members[i][0]), mine.index(members[i][-1]) + 1) for i in table.runs_of[node]),
        tuple(all(plan.passes[j] for j in group) for group in members),
    )


@dataclass(frozen=True)
class Nodes:
    """Fold within each node first. Rank r of the plan is rank r % g of `within` and r // g of `between`."""

    plan: Plan
    between: ProcessGroup
    within: ProcessGroup
    backend: str | None = None

    def start_states(self, transfers: Tensor) -> Pending:
        return start_to_owners(transfers, self.within)

    def finish_states(self, pending: Pending, V: int) -> tuple[Tensor, Tensor]:
        runs = self._runs_of_node(pending.wait())
        whole = self._to_slots(
            [fold_transfers(runs[i], self._node.passes(i), V, self.backend) for i in self._node.groups], runs
        )
        wanted = start_to_owners(whole, self.between)
        groups = self._in_order(wanted.wait())
        entering = fold(groups, self._node.group_passes, V, backend=self.backend)
        first = self._from_other_nodes(entering, wanted.num_heads)
        inside = [
            fold(runs[i], self._node.passes(i), V, first[slot], self.backend)
            for slot, i in enumerate(self._node.groups)
        ]
        pairs = ((runs, self._node.passes(slice(None))), (groups, self._node.group_passes))
        maps = [kept_maps(Runs(x[:, None], range(len(x))), passes, V) for x, passes in pairs]
        # one tensor for the backward: maps of the node, then those of the groups, which have fewer heads
        kept = torch.cat([x.flatten(0, 2) for x in maps])
        return self._from_node(_join(inside, runs[..., :V]), pending.num_heads), kept

    def start_gradients(self, C: Tensor) -> Pending:
        return start_to_owners(C, self.within)

    def finish_gradients(self, pending: Pending, maps: Tensor) -> Tensor:
        runs = self._runs_of_node(pending.wait())
        _, B, heads, K, _ = runs.shape
        own = len(split_heads(heads, self.between.size())[self.between.rank()])
        num_inside, num_groups = sum(self._node.passes(slice(None))), sum(self._node.group_passes)
        inside, outside = maps.split([num_inside * B * heads, num_groups * B * own])
        inside = inside.view(num_inside, B, heads, K, K)
        outside = outside.view(num_groups, B, own, K, K)
        pairs = list(zip(self._node.groups, self._node.maps_of_groups(inside), strict=True))
        firsts = [fold_first(runs[i], part, self._node.passes(i), self.backend) for i, part in pairs]
        whole = self._to_slots(firsts, runs)
        wanted = start_to_owners(whole, self.between)
        groups = self._in_order(wanted.wait())
        d = fold_gradients(groups, outside, self._node.group_passes, backend=self.backend)
        last = self._from_other_nodes(d, wanted.num_heads)
        gradients = [
            fold_gradients(runs[i], part, self._node.passes(i), last[slot], self.backend)
            for slot, (i, part) in enumerate(pairs)
        ]
        return self._from_node(_join(gradients, runs), pending.num_heads)

    def maps_shape(self, HV: int, K: int) -> tuple[int, ...]:
        heads = len(split_heads(HV, self.within.size())[self.within.rank()])
        own = len(split_heads(heads, self.between.size())[self.between.rank()])
        inside, outside = sum(self._node.passes(slice(None))), sum(self._node.group_passes)
        return (inside * heads + outside * own) * self.plan.batch, K, K

    @property
    def _node(self) -> "NodePlan":
        return make_node_plan(self.plan, self.within.size(), self.between.size())

    def _runs_of_node(self, got: Tensor) -> Tensor:
        """Return [runs of the node, B, own heads, K, ...] in order, from [g, slots, ...]."""
        return got.flatten(0, 1)[index(self._node.slots, got.device)]

    def _to_slots(self, groups: list[Tensor], like: Tensor) -> Tensor:
        """Return what the groups of this node have at their slots, [slots of nodes, B, heads, K, ...]."""
        empty = like.new_zeros(like.shape[1:])
        return torch.stack([*groups, *[empty] * (self._node.table.num_slots - len(groups))])

    def _in_order(self, got: Tensor) -> Tensor:
        return got.flatten(0, 1)[index(self._node.table.slots_of_runs, got.device)]

    def _from_other_nodes(self, groups: Tensor, heads: int) -> Tensor:
        table = self._node.table
        slots = groups.new_zeros(table.num_ranks * table.num_slots, *groups.shape[1:])
        slots[index(table.slots_of_runs, groups.device)] = groups
        return from_owners(slots.unflatten(0, (table.num_ranks, table.num_slots)), heads, self.between)

    def _from_node(self, runs: Tensor, heads: int) -> Tensor:
        g, num_slots = self.within.size(), self.plan.table.num_slots
        slots = runs.new_zeros(g * num_slots, *runs.shape[1:])
        slots[index(self._node.slots, runs.device)] = runs
        got = from_owners(slots.unflatten(0, (g, num_slots)), heads, self.within)
        return got[: len(self.plan.table.runs_of[self.plan.rank])]


def _join(groups: list[Tensor], runs: Tensor) -> Tensor:
    """Return the runs of all groups of a node; `runs`, which is empty, where it has none."""
    return torch.cat(groups) if groups else runs
