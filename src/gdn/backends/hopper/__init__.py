"""Kernels for sm_90 in Gluon in the place of Triton's: of the chunked forward, 128 x 128 or 64 x 64 in bf16.

Taken where they are the faster ones, or asked for. The backward is Triton's; other problems are refused.
This file imports no Triton.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from gdn import settings
from gdn.backends import triton
from gdn.backends.backend import Saved
from gdn.backends.hopper import cost
from gdn.problem import PrefillProblem, Problem

SIZES = (64, 128)  # of K and of V


def refuses(problem: Any) -> str | None:
    """Takes the rule in bf16 with K = V of 64 or 128 on sm_90, where it is known to be the faster one."""
    reason = _lacks(problem)
    if reason is not None or settings.backend(problem.backend) == "hopper":
        return reason
    problem = problem.rule if isinstance(problem, PrefillProblem) else problem
    if problem.batch_invariant:
        return "expected no batch_invariant, or backend='hopper': who is faster depends on the batch"
    if not cost.is_faster(problem):
        sizes = f"N={problem.N}, HV={problem.HV}, T={problem.T}"
        return f"expected a problem that it is faster at than triton, got {sizes}"
    return None


def _lacks(problem: Any) -> str | None:
    """Why no kernel here could take it, whatever its size."""
    reason = triton.refuses(problem)
    if reason is not None:
        return reason
    if isinstance(problem, PrefillProblem):
        problem = problem.rule
    if not isinstance(problem, Problem):
        return "expected the rule or a prefill, got a problem that has no kernel here"
    if problem.K != problem.V or problem.K not in SIZES:
        return f"expected K = V of 64 or 128, got K={problem.K}, V={problem.V}"
    if problem.q.dtype != torch.bfloat16:
        return f"expected bf16, got {problem.q.dtype}"
    if problem.scale < 0:
        return f"expected a scale of at least 0, got {problem.scale}"
    found = _capability(problem.q.device)
    if found != (9, 0):
        return f"expected a GPU of compute capability (9, 0), got {found or problem.q.device.type}"
    try:
        import_module("gdn.backends.hopper.rule")
    except (ImportError, AttributeError) as e:
        return f"expected Gluon of Triton 3.6 or newer, got {e}"
    return None


def _capability(device: torch.device) -> tuple[int, int] | None:
    """Of an NVIDIA GPU; AMD's have numbers of their own."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def _chunk_forward(problem: Problem, save: bool) -> tuple[torch.Tensor, torch.Tensor | None, Saved]:
    found: tuple[torch.Tensor, torch.Tensor | None, Saved]
    found = import_module("gdn.backends.hopper.rule").chunk_forward(problem, save)
    return found


def _prefill(problem: PrefillProblem) -> None:
    forward = import_module("gdn.backends.hopper.rule").forward
    import_module("gdn.backends.triton.prefill").prefill(problem, forward)


def _launches(problem: Problem, kept: torch.dtype | None) -> Iterator[Any]:
    """Of a forward here that a larger problem of the kind would get: see `triton.beside`."""
    has_tokens = problem.q.numel() > 0 and problem.N > 0
    if has_tokens and not problem.batch_invariant and _lacks(problem) is None:
        yield from import_module("gdn.backends.hopper.rule").launches(problem, kept)


triton.beside.append(_launches)
BACKEND = replace(
    triton.BACKEND, name="hopper", refuses=refuses, chunk_forward=_chunk_forward, prefill=_prefill
)
