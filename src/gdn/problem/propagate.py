"""Describe how a rank passes a state, or the gradient of one, through runs or segments."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class RunStep(NamedTuple):
    """Hold the places of one run: S is stored at `store` of dst, then S <- M S + N. -1: none.

    Without `map` S is replaced by N, and not read: a NaN in it passes to no other sequence.
    """

    store: int
    add: int
    map: int


@dataclass(frozen=True)
class PropagateProblem:
    """Hold S <- M S + N of all batch rows and heads, run after run. It writes dst.

    Each tensor has matrices of neighbouring rows at [i, j, batch, head]. Place p of a tensor stands for
    [p // size, p % size], where size is that of its second dimension.

    dst             [., ., B, heads, K, W]   the states that steps store; V first in memory is allowed
    add             [., ., B, heads, K, V]   N; the columns of S beyond V have none
    map             [., ., B, heads, K, K]   M
    first           [B, heads, K, W] or None the state before the first step; None: zero
    is_transposed   True: S <- M^T S + N
    """

    dst: Tensor
    add: Tensor
    map: Tensor
    first: Tensor | None
    steps: tuple[RunStep, ...]
    is_transposed: bool = False
    backend: str | None = None

    @property
    def device(self) -> torch.device:
        return self.dst.device

    @property
    def K(self) -> int:
        return self.dst.shape[-2]

    @property
    def V(self) -> int:
        return self.add.shape[-1]


def matrix(x: Tensor, place: int) -> Tensor:
    """Return the matrices [B, heads, ...] of one place."""
    i, j = divmod(place, x.shape[1])
    return x[i, j]
