"""Exchange states between runs: transfers to entering states, and their gradients back.

The transfer of a run is (M, N): S_end = M S_start + N. With runs j = 0 .. J-1 in the order of their tokens

    S_in[0] = 0;        S_in[j+1]  = N_j  if run j resets, else  M_j S_in[j] + N_j
    dS_out[J-1] = 0;    dS_out[j-1] = dS_in[j],   dS_in[j] = C_j  if run j resets, else  M_j^T dS_out[j] + C_j

A run resets unless one sequence came in and goes on (`Plan.passes`). The select is an `if` and no product by
zero: 0 * NaN is NaN, and a NaN in one sequence must reach no other.

    exchange   a rank receives, forward / backward      steps   who computes the fold
    gather     (R-1) (M, N) / (R-1) C                   1 / 1   every rank, all heads
    owner      (R-1)/R ((M, N) + S) / (R-1)/R 2 C       2 / 2   rank i a part of the heads, for all ranks

Both fold each head by products of the same shape in the same order, so that their results have equal bits.
Layouts: [slots, B, HV, K, ...], one slot for each run of a rank, in fp32 (fp64 for fp64).
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gdn.distributed.collectives import all_gather, all_to_all
from gdn.distributed.plan import Plan, index


@dataclass(frozen=True)
class Gather:
    """Gather all transfers on every rank; each rank folds all heads."""

    plan: Plan
    group: ProcessGroup

    def states(self, transfers: Tensor, V: int) -> tuple[Tensor, Tensor]:
        """Return S_in of the runs of this rank, and the M that the backward needs.

        transfers  [slots, B, HV, K, V+K]   N | M of this rank's runs; zero where there is none
        """
        runs = self._in_order(all_gather(transfers, self.group))
        entering = fold(runs, self.plan, V)
        return self._own(entering), kept_maps(runs, self.plan, V)

    def gradients(self, maps: Tensor, C: Tensor) -> Tensor:
        """Return dS_out of the runs of this rank. C [slots, B, HV, K, V]: their dS_in for dS_out = 0."""
        runs = self._in_order(all_gather(C, self.group))
        return self._own(fold_gradients(runs, maps, self.plan))

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

    def states(self, transfers: Tensor, V: int) -> tuple[Tensor, Tensor]:
        """Return S_in of the runs of this rank, and the M of the heads that this rank owns."""
        runs = self._to_owners(transfers)
        entering = fold(runs, self.plan, V)
        return self._from_owners(entering, transfers.shape[2]), kept_maps(runs, self.plan, V)

    def gradients(self, maps: Tensor, C: Tensor) -> Tensor:
        """Return dS_out of the runs of this rank. C [slots, B, HV, K, V]: their dS_in for dS_out = 0."""
        runs = self._to_owners(C)
        return self._from_owners(fold_gradients(runs, maps, self.plan), C.shape[2])

    def _to_owners(self, x: Tensor) -> Tensor:
        """Return [J, B, own heads, K, ...] in the order of runs, from [slots, B, HV, K, ...] of each rank."""
        slots, B, HV, *size = x.shape
        heads = split_heads(HV, self.plan.table.num_ranks)
        own = len(heads[self.plan.rank])
        # heads first: the blocks for the ranks are then rows of one tensor
        send = x.movedim(2, 0)
        counts = [len(h) for h in heads]
        got = all_to_all(send, [own] * len(heads), counts, self.group)
        got = got.view(len(heads), own, slots, B, *size).movedim(1, 3).flatten(0, 1)
        return got[index(slots_of_runs(self.plan), x.device)]

    def _from_owners(self, runs: Tensor, HV: int) -> Tensor:
        """Return [slots, B, HV, K, V] of this rank, from [J, B, own heads, K, V] on each owner."""
        table = self.plan.table
        heads = split_heads(HV, table.num_ranks)
        slots = runs.new_zeros(table.num_ranks * table.num_slots, *runs.shape[1:])
        slots[index(slots_of_runs(self.plan), runs.device)] = runs
        # [R, own heads, slots, B, K, V]
        send = slots.unflatten(0, (table.num_ranks, table.num_slots)).movedim(3, 1).flatten(0, 1)
        got = all_to_all(send, [len(h) for h in heads], [runs.shape[2]] * table.num_ranks, self.group)
        return got.movedim(0, 2)[: len(table.runs_of[self.plan.rank])]


Exchange: TypeAlias = Gather | Owner
EXCHANGES: dict[str, type[Exchange]] = {"gather": Gather, "owner": Owner}


def split_heads(num_heads: int, num_ranks: int) -> list[range]:
    """Return the heads that each rank owns: neighbours, as equal in number as possible."""
    cuts = [i * num_heads // num_ranks for i in range(num_ranks + 1)]
    return [range(a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]


def slots_of_runs(plan: Plan) -> list[int]:
    """Return for each run its place among the slots of all ranks side by side."""
    table = plan.table
    slots = [0] * len(table.runs)
    for rank, mine in enumerate(table.runs_of):
        for slot, j in enumerate(mine):
            slots[j] = rank * table.num_slots + slot
    return slots


def fold(transfers: Tensor, plan: Plan, V: int) -> Tensor:
    """Return S_in of every run, [J, B, heads, K, V], from N | M of every run, [J, B, heads, K, V+K]."""
    N, M = transfers[..., :V], transfers[..., V:]
    S = torch.zeros_like(N[0])
    entering = [S]
    for j in range(len(transfers) - 1):
        S = multiply(M[j], S) + N[j] if plan.passes[j] else N[j]
        entering.append(S)
    return torch.stack(entering)


def fold_gradients(C: Tensor, maps: Tensor, plan: Plan) -> Tensor:
    """Return dS_out of every run, [J, B, heads, K, V]. maps: M of the runs that pass a state on, in order."""
    d = torch.zeros_like(C[0])
    leaving = [d]
    remaining = sum(plan.passes[1:])
    for j in range(len(C) - 1, 0, -1):
        if plan.passes[j]:
            remaining -= 1
            d = multiply(maps[remaining].mT, d) + C[j]
        else:
            d = C[j]
        leaving.append(d)
    return torch.stack(leaving[::-1])


def kept_maps(transfers: Tensor, plan: Plan, V: int) -> Tensor:
    """Return M of the runs that pass a state on, in the order of runs: the backward needs no other."""
    places = [j for j, passes in enumerate(plan.passes) if passes]
    return transfers[index(places, transfers.device)][..., V:].contiguous()


def multiply(M: Tensor, S: Tensor) -> Tensor:
    """Return M @ S for each batch row and head, as one product of the same shape each.

    A batched product may choose its order of sums by the number of heads; `gather` and `owner` would then
    differ in bits. Autocast would round states to 16 bits.
    """
    if M.numel() == 0 or S.numel() == 0:
        return torch.zeros_like(S)
    with torch.autocast(S.device.type, enabled=False):
        products = [m @ s for m, s in zip(M.flatten(0, 1), S.flatten(0, 1), strict=True)]
    return torch.stack(products).view_as(S)
