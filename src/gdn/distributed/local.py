"""Call the operators of the rule where no sequence crosses a border: forward and backward of one rank."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gdn.ops import library
from gdn.problem import Problem

# the tensors of a problem that have gradients, in the order of Problem.differentiable
NAMES = library.DIFFERENTIABLE

Saved: TypeAlias = tuple[Tensor | None, ...]


def with_tensors(problem: Problem, tensors: Sequence[Tensor | None]) -> Problem:
    """Return the problem with other tensors, in the order of NAMES."""
    # the offsets are the tensors after these
    return problem.with_tensors((*tensors, problem.cu_seqlens, problem.cu_seqlens_cpu))


def forward(problem: Problem, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
    """Return o, final_state (None unless the problem asks for it) and the tensors that a backward needs."""
    p = problem
    if p.N == 0:
        # a rank without pieces has nothing to run
        final = p.v.new_zeros(p.state_shape, dtype=p.state_dtype) if p.output_final_state else None
        return p.v.new_zeros(p.v.shape), final, ()
    o, final, *saved = library.chunk_forward(*problem.arguments(), save)
    kept = (None if x.dim() == 1 or not save else x for x in saved)
    return o, final if problem.output_final_state else None, tuple(kept)


def backward(problem: Problem, saved: Saved, do: Tensor | None, dS: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of `problem.differentiable`, in order; None for an argument that is None."""
    given = problem.differentiable
    if problem.N == 0 or (do is None and dS is None):
        return [None if x is None else torch.zeros_like(x) for x in given]
    gradients = library.chunk_backward(*problem.arguments(), *saved, do, dS)
    return [None if x is None else y for x, y in zip(given, gradients, strict=True)]
