"""Provide portable Triton kernels: every option, forward, backward, decode, on any GPU that Triton supports.

This file imports no Triton: `refuses` rejects a CPU problem before anything is loaded, and each slot imports
its kernels at its first call.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from gdn import settings
from gdn.backends import eager
from gdn.problem import (
    DecodeProblem,
    FoldProblem,
    HistoryProblem,
    KeepProblem,
    PrefillProblem,
    Problem,
    ReplayProblem,
)
from gdn.problem.propagate import PropagateProblem
from gdn.problem.stages import StageProblem
from gdn.problem.step import StepProblem

# problems whose kernels run token by token, and support a decay per key channel and a lower bound
ANY_GATE = (DecodeProblem, StepProblem)
# others whose kernels support a decay per key channel; of stages, the gate alone
EITHER_GATE = (
    Problem, PrefillProblem, StageProblem, ReplayProblem, KeepProblem, HistoryProblem, FoldProblem,
    StepProblem,
)  # fmt: skip
LARGEST = 256  # largest K and V
LARGEST_MAP = 128  # largest K of a map M [K, K] that a kernel holds in registers
MEASURED = 128  # largest K of backwards with a decay per key channel that GPU tests have passed
LONGEST = 16  # most tokens of a packet that is replayed
# The module here that implements each slot of Backend. The adjoints of single stages are those of `eager`.
SLOTS = {
    "saves": "rule.describe",
    "forward_launches": "rule.run",
    "backward_launches": "rule.run",
    "chunk_forward": "rule.run",
    "recompute_saved": "rule.run",
    "chunk_backward": "rule.run",
    "forward_begin": "rule.borders",
    "backward_begin": "rule.borders",
    "propagate_states": "rule.propagate",
    "recurrent_forward": "serving.recurrent",
    "decode": "serving.decode",
    "decode_step": "serving.step",
    "prefill": "serving.prefill",
    "commit": "serving.commit",
    "replay_decode": "serving.replay",
    "replay_commit": "serving.fold",
    "decode_with_history": "serving.history",
    "fold_history": "serving.fold_history",
    "appends_history": "serving.replay",
    "causal_conv1d": "layer.conv",
    "causal_conv1d_bwd": "layer.conv_bwd",
    "causal_conv1d_update": "layer.conv_update",
    "rms_norm_gated": "layer.norm",
    "rms_norm_gated_bwd": "layer.norm",
    "rms_norm_zero_centred": "layer.norm",
    "gate": "layer.gate",
    "gate_bwd": "layer.gate",
    "chunk_cumsum": "stages.cumsum",
    "chunk_cumsum_bwd": "stages.cumsum",
    "chunk_gate_cumsum": "stages.cumsum",
    "chunk_gate_cumsum_bwd": "stages.cumsum",
    "chunk_kkt": "stages.chunk",
    "solve_tril": "stages.chunk",
    "wy_transform": "stages.chunk",
    "chunk_state": "stages.chunk",
    "chunk_output": "stages.chunk",
}


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


def refuses(problem: Any) -> str | None:
    """Return why the backend does not support a problem, or None.

    It supports CUDA tensors (CPU tensors where Triton interprets) of at most fp32, with K, V of at most 256.
    """
    reason = refuses_any_gate(problem)
    # a step on slots with histories has the kernel of these
    has_history = getattr(problem, "cursor", None) is not None
    if reason is None and isinstance(problem, PropagateProblem) and problem.K > LARGEST_MAP:
        reason = f"expected K of at most {LARGEST_MAP}, got K={problem.K}"
    if reason is None and (has_history or not isinstance(problem, ANY_GATE)):
        reason = _refuses_gate(problem)
    return reason


def _refuses_gate(problem: Any) -> str | None:
    """Return why the kernels of whole chunks do not support the gate of a problem, or None."""
    if getattr(problem, "is_per_channel", False):
        is_supported = isinstance(problem, EITHER_GATE)
        return None if is_supported else "expected a decay per head, got one per key channel"
    if getattr(problem, "lower_bound", None) is not None:
        return f"expected lower_bound=None, got {problem.lower_bound}"
    return None


def refuses_any_gate(problem: Any) -> str | None:
    """Return why the kernels that run token by token do not support a problem, or None."""
    x = _leading(problem)
    device = x.device.type
    if device != "cuda" and not (device == "cpu" and settings.interprets()):
        return f"expected tensors on a CUDA device, got {device}"
    if not _is_installed():
        return "expected Triton, got no package of that name"
    if x.dtype == torch.float64:
        return "expected bf16, fp16 or fp32, got float64"
    # a step may have no history
    histories = [getattr(problem, name, None) for name in ("history_u", "history_k")]
    if any(h is not None and h.dtype == torch.float64 for h in histories):
        return "expected histories of at most fp32, got float64"
    if getattr(problem, "longest", 0) > LONGEST:
        return f"expected packets of at most {LONGEST} tokens, got {problem.longest}"
    K, V = getattr(problem, "K", 1), getattr(problem, "V", 1)
    if K > LARGEST or V > LARGEST:
        return f"expected K and V of at most {LARGEST}, got K={K}, V={V}"
    return None


def refuses_backward(problem: Problem) -> str | None:
    """Return why the backend does not support the backward of a problem, or None."""
    is_unmeasured = problem.is_per_channel and problem.K > MEASURED and problem.q.device.type == "cuda"
    if is_unmeasured and settings.backend(problem.backend) != "triton":
        return f"expected backend='triton' by name: K={problem.K} has not passed the GPU tests of gradients"
    return refuses(problem)


def _leading(problem: Any) -> Tensor:
    """Return the tensor that stands for the problem's device and dtype."""
    for name in ("q", "x", "dst", "state"):
        x: Tensor | None = getattr(problem, name, None)
        if x is not None:
            return x
    # problems of single stages keep their tensors in a dict
    first: Tensor = next(iter(problem.tensors.values()))
    return first


def _late(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports `name` from a module here at its first call."""
    imported: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if not imported:
            imported.append(getattr(import_module(f"{__name__}.{module}"), name))
        return imported[0](*args)

    return call


BACKEND = replace(
    eager.BACKEND,
    name="triton",
    refuses=refuses,
    refuses_backward=refuses_backward,
    refuses_recurrent=refuses_any_gate,
    **{slot: _late(module, slot) for slot, module in SLOTS.items()},
)
