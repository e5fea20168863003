"""Fold the transfers of runs, in the order of their tokens: states forward, gradients of states backward.

A run passes a state on if one sequence came in and goes on; any other run resets. The select is an `if` and
no product by zero: 0 * NaN is NaN, and a NaN in one sequence must reach no other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gdn.distributed.plan import index


def fold(transfers: Tensor, passes: Sequence[bool], V: int, first: Tensor | None = None) -> Tensor:
    """Return S_in of every run, [J, B, heads, K, V], from N | M of every run, [J, B, heads, K, V+K].

    first: the state that enters run 0, zero by default.
    """
    N, M = transfers[..., :V], transfers[..., V:]
    S = torch.zeros_like(N[0]) if first is None else first
    entering = [S]
    for j in range(len(transfers) - 1):
        S = multiply(M[j], S) + N[j] if passes[j] else N[j]
        entering.append(S)
    return torch.stack(entering)


def fold_transfers(transfers: Tensor, passes: Sequence[bool], V: int) -> Tensor:
    """Return N | M of all runs together, [B, heads, K, V+K], from those of every run; M = 0 after a reset."""
    whole = transfers[0] if passes[0] else _without_map(transfers[0], V)
    for j in range(1, len(transfers)):
        N = _without_map(transfers[j], V)
        whole = multiply(transfers[j, ..., V:], whole) + N if passes[j] else N
    return whole


def fold_gradients(C: Tensor, maps: Tensor, passes: Sequence[bool], last: Tensor | None = None) -> Tensor:
    """Return dS_out of every run, [J, B, heads, K, V].

    maps: M of the runs 1 .. J-1 that pass a state on, in order; last: dS_out of run J-1, zero by default.
    """
    d = torch.zeros_like(C[0]) if last is None else last
    leaving = [d]
    for j in range(len(C) - 1, 0, -1):
        d = _through(C[j], maps, passes, j, d)
        leaving.append(d)
    return torch.stack(leaving[::-1])


def fold_first(C: Tensor, maps: Tensor, passes: Sequence[bool]) -> Tensor:
    """Return the gradient that enters run 0 if none comes from later runs, [B, heads, K, V].

    maps: M of all runs that pass a state on, in order.
    """
    d = torch.zeros_like(C[0])
    for j in range(len(C) - 1, -1, -1):
        d = _through(C[j], maps, passes, j, d)
    return d


def _through(C: Tensor, maps: Tensor, passes: Sequence[bool], j: int, d: Tensor) -> Tensor:
    """Return dS_in of run j from its dS_out. `maps` are those of the last runs that pass."""
    if not passes[j]:
        return C
    place = len(maps) - sum(passes[j:])
    return multiply(maps[place].mT, d) + C


def kept_maps(transfers: Tensor, passes: Sequence[bool], V: int) -> Tensor:
    """Return M of the runs that pass a state on, in the order of runs: the backward needs no other."""
    places = [j for j, does_pass in enumerate(passes) if does_pass]
    return transfers[index(places, transfers.device)][..., V:].contiguous()


def _without_map(transfer: Tensor, V: int) -> Tensor:
    return torch.cat([transfer[..., :V], torch.zeros_like(transfer[..., V:])], -1)


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
