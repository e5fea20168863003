"""Check the calls of the stages and of the gate.

A name has the same shape in all of them, so one table of axes is enough.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn.notation import Offsets
from gdn.problem import check
from gdn.problem.shapes import CHUNK, count_chunks

AXES = {
    "q": "B T H K",
    "k": "B T H K",
    "v": "B T HV V",
    "g": "B T HV",
    "a": "B T HV",
    "beta": "B T HV",
    "A_log": "HV",
    "dt_bias": "HV",
    "G": "B T HV",
    "A": "B T HV C",
    "A_inv": "B T HV C",
    "w": "B T HV K",
    "u": "B T HV V",
    "v_new": "B T HV V",
    "o": "B T HV V",
    "initial_state": "N HV K V",
    "S_in": "NC HV K V",
    "final_state": "N HV K V",
}
OPTIONAL = ("A_log", "dt_bias", "initial_state", "dfinal_state")


@dataclass(frozen=True)
class StageProblem:
    """Hold one checked call of a stage or of the gate; `select` passes it to each backend.

    `stage` is the name of the function in the backend and `tensors` its arguments in order. `sizes` has the
    sizes of the letters in their shapes, and N and NC for a stage. `backend` is as in the call.
    """

    stage: str
    tensors: dict[str, Tensor | None]
    sizes: dict[str, int]
    cu_seqlens: Offsets | None
    backend: str | None
    lower_bound: float | None = None

    @property
    def is_per_channel(self) -> bool:
        """Return True for a gate with logits of each key channel; a stage takes a decay per head."""
        a, b = self.tensors.get("a"), self.tensors.get("b")
        return a is not None and b is not None and a.dim() > b.dim()

    @property
    def device(self) -> torch.device:
        return next(x for x in self.tensors.values() if x is not None).device


def parse_stage(
    stage: str, tensors: dict[str, Any], *, cu_seqlens: Any = None, scale: Any = None, backend: Any = None
) -> StageProblem:
    """Check a call of a stage without reading tensor contents. `tensors` are in the order of its arguments.

    Raises:
        TypeError   for an argument of the wrong kind
        ValueError  for shapes, dtypes or devices that contradict each other, and if a gradient is required
    """
    _check_kinds(tensors, backend)
    sizes = {"C": CHUNK}
    for name, x in tensors.items():
        # states come last: the tokens determine the size of their first axis
        if x is not None and not _is_state(name):
            check.shape(name, x, AXES[_primal(name)], sizes)
    first = next(iter(tensors))
    for letter in ("H", "HV", "K", "V"):
        if sizes.get(letter, 1) < 1:
            raise ValueError(f"{first}: expected {letter} >= 1, got {letter}=0")
    if sizes["HV"] % sizes.get("H", 1):
        raise ValueError(f"G: expected HV to be a multiple of H={sizes['H']}, got HV={sizes['HV']}")
    sizes["N"], sizes["NC"] = _count(first, cu_seqlens, sizes)
    for name, x in tensors.items():
        if x is not None and _is_state(name):
            check.shape(name, x, AXES[_primal(name)], sizes)
    check.companions(tensors[first], first, **tensors)
    if cu_seqlens is not None and cu_seqlens.device.type != "cpu":
        check.companions(tensors[first], first, cu_seqlens=cu_seqlens)
    if scale is not None:
        check.number("scale", scale)
    for name in ("G", "dG"):
        x = tensors.get(name)
        if x is not None and x.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name}: expected dtype float64, or float32 where there is no float64, got {x.dtype}"
            )
    check.no_gradient(f"stages.{stage}", **tensors)
    return StageProblem(stage, tensors, sizes, cu_seqlens, backend)


def parse_gate(a: Any, b: Any, A_log: Any, dt_bias: Any, lower_bound: Any, backend: Any) -> StageProblem:
    """Check a call of the gate; a and b may have any leading axes. Raises like `parse_stage`."""
    tensors = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}
    _check_kinds(tensors, backend)
    problem = StageProblem("gate", tensors, {}, None, backend, lower_bound)
    if a.dim() < 1 or b.dim() < 1:
        raise ValueError(f"a: expected shape [..., HV], got {list(a.shape)}")
    *lead, HV = b.shape
    expected = [*lead, HV, a.shape[-1]] if problem.is_per_channel else list(a.shape)
    if list(a.shape if problem.is_per_channel else b.shape) != expected:
        raise ValueError(f"b: expected shape {list(a.shape)} (that of a), got {list(b.shape)}")
    problem.sizes.update({"HV": HV, "K": a.shape[-1]} if problem.is_per_channel else {"HV": HV})
    if A_log is None and lower_bound is None:
        raise TypeError("A_log: expected a tensor without lower_bound, got NoneType")
    check.gate_parameters(
        A_log, dt_bias, lower_bound, "HV K" if problem.is_per_channel else "HV", problem.sizes
    )
    check.companions(a, "a", b=b, A_log=A_log, dt_bias=dt_bias)
    return problem


def _check_kinds(tensors: dict[str, Any], backend: Any) -> None:
    for name, x in tensors.items():
        if x is not None or name not in OPTIONAL:
            check.floating(name, x)
    check.backend(backend)


def _primal(name: str) -> str:
    """Return the name of the tensor whose gradient `name` is, or `name` itself."""
    return name if name in AXES else name[1:]


def _is_state(name: str) -> bool:
    return AXES[_primal(name)].startswith("N")


def _count(first: str, cu_seqlens: Any, sizes: dict[str, int]) -> tuple[int, int]:
    """Return N and NC, the numbers of sequences and of chunks."""
    N = sizes["B"] if cu_seqlens is None else check.offsets(first, cu_seqlens, None, sizes)
    return N, count_chunks(sizes["B"], sizes["T"], None if cu_seqlens is None else N)
