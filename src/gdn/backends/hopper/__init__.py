"""Replace the Triton kernels of the chunked forward on sm_90 by Gluon kernels: bf16, K = V = 128 or 64.

`select` chooses this backend where the cost model predicts that it is faster, or where the caller names it.
Its backward follows the forward of any backend. It also decodes one token with a history, with the bits of
`triton`. Every other problem is refused. docs/design/hopper.md describes the kernels.
This file imports no Triton, so that a CPU user does not need it. Files in reading order:

    cost         predict the time of a forward: which backend, which segments, how many consumer warpgroups
    rule         plan the launches of a forward and run them; descriptors makes its TMA descriptors
    factors      the decays and norms of a chunk that the kernels exchange through HBM
    gates        G and beta of many heads at once, in Triton
    solve/       A_inv and the factors of each chunk: one warp a CTA, persistent, in Gluon
    scan/        the state scan: outputs and final states, persistent and warp-specialised, in Gluon
    scans        choose between its two kernels, and plan their launch
    backward/    the reverse state scan and the gradient kernel in Gluon, and the launches of a backward
    segments     cut long sequences: plan the segments, in Triton
    propagate    pass states from one segment to the next, in Triton
    serving/     decode with a history, persistent and warp-specialised, in Gluon
    borders      cut a forward between M, N and the scan, where a rank exchanges states with others
    gluon        names of Gluon in all supported versions of Triton, and `struct`
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import torch

from gdn import settings
from gdn.backends import triton
from gdn.backends.backend import Borders, FinishBackward, FinishForward, Gradients, Kept, Saved, Shape
from gdn.backends.hopper import cost
from gdn.backends.hopper.backward.cost import is_worth_launching
from gdn.problem import HistoryProblem, PrefillProblem, Problem
from gdn.problem.history import FoldProblem
from gdn.problem.propagate import PropagateProblem
from gdn.problem.step import StepProblem

SIZES = (64, 128)  # values of K = V that the kernels are written for
# rows x value heads from which a history is faster than `decode`: at 32 rows of 32 heads 0.69 of the time on
# fp32 states and 0.86 on bf16 (H200)
APPENDS_FROM = 32 * 32


def refuses(problem: Any) -> str | None:
    """Return why the problem is not supported or not predicted to be faster here; None if it is chosen."""
    is_named = settings.backend(problem.backend) == "hopper"
    if is_named and isinstance(problem, (PropagateProblem, FoldProblem)):
        # ranks and histories fold states for every backend by Triton's kernels
        return triton.refuses(problem)
    reason = _lacks(problem)
    if reason is not None or is_named or isinstance(problem, (HistoryProblem, StepProblem)):
        return reason
    is_prefill = isinstance(problem, PrefillProblem)
    problem = problem.rule if is_prefill else problem
    # the two backends round differently, and the faster one depends on the batch: with batch_invariant one of
    # them computes every size. For prefill it is this one, faster than triton in all sizes timed. The rule
    # stays on triton, where a forward with gradients has the bits of one without
    if problem.batch_invariant:
        return None if is_prefill else "expected no batch_invariant, or backend='hopper', or a prefill"
    if not cost.is_faster(problem):
        sizes = f"N={problem.N}, HV={problem.HV}, T={problem.T}"
        return f"expected a problem that it is faster at than triton, got {sizes}"
    return None


def refuses_backward(problem: Problem) -> str | None:
    """Return why the backward is not supported or not predicted to be faster here; None if it is chosen."""
    reason = _lacks(problem)
    if reason is not None:
        return reason
    if settings.backend(problem.backend) == "hopper":
        return None
    # the two backends round differently: see `refuses`
    if problem.batch_invariant:
        return "expected no batch_invariant, or backend='hopper'"
    if not is_worth_launching(problem):
        return "expected more chunks or heads: here launches take longer than Triton's backward"
    return None


def _lacks(problem: Any) -> str | None:
    """Return why the kernels do not support a problem, whatever its size; None if they do."""
    reason = triton.refuses(problem)
    if reason is not None:
        return reason
    if isinstance(problem, PrefillProblem):
        problem = problem.rule
    if isinstance(problem, StepProblem) and problem.has_history:
        problem = problem.with_history(problem.mixed_qkv, problem.out)
    if isinstance(problem, HistoryProblem):
        return _lacks_gpu(problem.q.device) or _module("serving.history").lacks(problem)
    if not isinstance(problem, Problem):
        return "expected the rule, a prefill or a history, got a problem that has no kernel here"
    if problem.is_per_channel:
        return "expected a decay per head, got one per key channel"
    if problem.K != problem.V or problem.K not in SIZES:
        return f"expected K = V of 64 or 128, got K={problem.K}, V={problem.V}"
    if problem.q.dtype != torch.bfloat16:
        return f"expected bf16, got {problem.q.dtype}"
    if problem.scale < 0:
        return f"expected a scale of at least 0, got {problem.scale}"
    return _lacks_gpu(problem.q.device)


def _lacks_gpu(device: torch.device) -> str | None:
    """Return why kernels do not run on a device, or None."""
    capability = _capability(device)
    if capability != (9, 0):
        return f"expected a GPU of compute capability (9, 0), got {capability or device.type}"
    try:
        # Gluon's mbarriers, TMA and WGMMA came with Triton 3.6: older ones fail while importing
        _module("rule")
    except (ImportError, AttributeError) as e:
        return f"expected Gluon of Triton 3.6 or newer, got {e}"
    return None


@cache
def _module(name: str) -> Any:
    """Return a module of this backend; cached, as `import_module` takes 1 us where it finds one."""
    return import_module(f"gdn.backends.hopper.{name}")


def _capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for others: AMD numbers its GPUs differently."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def _chunk_forward(problem: Problem, save: bool) -> tuple[torch.Tensor, torch.Tensor | None, Saved]:
    results: tuple[torch.Tensor, torch.Tensor | None, Saved]
    results = _module("rule").chunk_forward(problem, save)
    return results


def _saves(problem: Problem) -> tuple[Shape | None, ...]:
    shapes: tuple[Shape | None, ...] = _module("rule").saves(problem)
    return shapes


def _recompute_saved(problem: Problem, saved: Saved) -> Saved:
    complete: Saved = _module("rule").recompute_saved(problem, saved)
    return complete


def _chunk_backward(
    problem: Problem, saved: Saved, do: torch.Tensor | None, dS: torch.Tensor | None
) -> Gradients:
    gradients: Gradients
    gradients = _module("backward.plan").chunk_backward(problem, saved, do, dS)
    return gradients


def _forward_begin(
    problem: Problem, borders: Borders, save: bool
) -> tuple[torch.Tensor | None, FinishForward]:
    begun: tuple[torch.Tensor | None, FinishForward]
    begun = _module("borders").forward_begin(problem, borders, save)
    return begun


def _backward_begin(
    problem: Problem, kept: Kept, do: torch.Tensor | None, dS: torch.Tensor | None, borders: Borders
) -> tuple[torch.Tensor | None, FinishBackward]:
    begun: tuple[torch.Tensor | None, FinishBackward]
    begun = _module("backward.borders").backward_begin(problem, kept, do, dS, borders)
    return begun


def _prefill(problem: PrefillProblem) -> None:
    # the gather from the pool and the scatter into it are `triton`'s; only the forward between them differs.
    # Sequences that are not cut into segments read and update the pool in place.
    forward = _module("rule").forward
    is_in_place = cost.cuts_of(problem.rule, has_pool=True) is None
    import_module("gdn.backends.triton.serving.prefill").prefill(problem, forward, is_in_place)


def _appends_history(problem: HistoryProblem) -> bool:
    states = problem.N * problem.HV
    return states >= APPENDS_FROM if problem.use_history is None else problem.use_history


def _decode_with_history(problem: HistoryProblem) -> Any:
    decode = import_module("gdn.backends.triton.serving.history").decode_with_history
    chosen = replace(problem, use_history=_appends_history(problem))
    return decode(chosen, _module("serving.history").plan_append)


def _decode_step(problem: StepProblem) -> Any:
    decode = import_module("gdn.backends.triton.serving.step").decode_step
    if not problem.has_history:
        return decode(problem)
    rule = problem.with_history(problem.mixed_qkv, problem.out)
    chosen = replace(problem, use_history=_appends_history(rule))
    return decode(chosen, _module("serving.history").plan_append)


def _forward_launches(problem: Problem, kept: torch.dtype | None, pool: Any = None) -> Iterator[Any]:
    """Yield the launches that a larger problem of the kind would use; none if it is not supported here."""
    has_tokens = problem.q.numel() > 0 and problem.N > 0
    if has_tokens and not problem.batch_invariant and _lacks(problem) is None:
        yield from _module("rule").launches(problem, kept, pool)


def _backward_launches(
    problem: Problem, saved: Saved, do: torch.Tensor, dS: torch.Tensor | None
) -> Iterator[Any]:
    """Yield the launches that a larger backward of the kind would use; none if it is not supported here."""
    has_tokens = problem.q.numel() > 0 and problem.N > 0
    if has_tokens and not problem.batch_invariant and _lacks(problem) is None:
        plans = _module("backward.plan")
        yield from plans.launches(problem, saved, do, dS)


BACKEND = replace(
    triton.BACKEND,
    name="hopper",
    refuses=refuses,
    refuses_backward=refuses_backward,
    refuses_recurrent=None,
    chunk_forward=_chunk_forward,
    saves=_saves,
    recompute_saved=_recompute_saved,
    chunk_backward=_chunk_backward,
    forward_begin=_forward_begin,
    backward_begin=_backward_begin,
    forward_launches=_forward_launches,
    backward_launches=_backward_launches,
    prefill=_prefill,
    appends_history=_appends_history,
    decode_with_history=_decode_with_history,
    decode_step=_decode_step,
)
