"""Pass states through runs with plain PyTorch, one product of each head; see `PropagateProblem`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn.problem.propagate import PropagateProblem, matrix


def propagate_states(problem: PropagateProblem) -> None:
    """Implement `Backend.propagate_states`."""
    p = problem
    W = p.dst.shape[-1]
    S = p.dst.new_zeros(p.dst.shape[2:]) if p.first is None else p.first
    for step in p.steps:
        if step.store >= 0:
            matrix(p.dst, step.store).copy_(S)
        if step.add < 0:
            continue
        N = matrix(p.add, step.add)
        N = F.pad(N, (0, W - p.V)) if W > p.V else N
        if step.map < 0:
            S = N
            continue
        M = matrix(p.map, step.map)
        S = multiply(M.mT if p.is_transposed else M, S) + N


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
