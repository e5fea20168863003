"""The vocabulary of validation: every refusal reads `name: expected ..., got ...` and touches no tensor."""

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)


def tensor(name: str, x: Any) -> None:
    """TypeError unless x is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")


def floating(name: str, x: Any) -> None:
    """TypeError unless x is a tensor of a floating dtype the library computes with."""
    tensor(name, x)
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: expected a tensor of float16, bfloat16, float32 or float64, got {x.dtype}")


def integral(name: str, x: Any) -> None:
    """TypeError unless x is an int32 or int64 tensor."""
    tensor(name, x)
    if x.dtype not in INTS:
        raise TypeError(f"{name}: expected an int32 or int64 tensor, got {x.dtype}")


def number(name: str, x: Any) -> None:
    """TypeError unless x is a real number."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(x).__name__}")


def choice(name: str, value: Any, choices: tuple[str | None, ...]) -> None:
    """TypeError unless value is a name or None, ValueError unless it is one of the choices."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}: expected a name or None, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def flags(**values: Any) -> None:
    """TypeError unless every value is a bool."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


def same_device(reference: Tensor, reference_name: str, **tensors: Tensor | None) -> None:
    """ValueError unless all tensors lie on the device of `reference`."""
    for name, x in tensors.items():
        if x is not None and x.device != reference.device:
            raise ValueError(
                f"{name}: expected device {reference.device} (that of {reference_name}), got {x.device}"
            )


def same_dtype(reference: Tensor, reference_name: str, **tensors: Tensor) -> None:
    """ValueError unless all tensors have the dtype of `reference`."""
    for name, x in tensors.items():
        if x.dtype != reference.dtype:
            raise ValueError(
                f"{name}: expected dtype {reference.dtype} (that of {reference_name}), got {x.dtype}"
            )


def shape(name: str, x: Tensor, axes: str, dims: dict[str, int]) -> None:
    """Match x against axes such as "B T H K": a new letter takes x's size, a known one must equal it."""
    letters = axes.split()
    ok = x.dim() == len(letters)
    if ok:
        for letter, size in zip(letters, x.shape, strict=True):
            if letter not in dims:
                dims[letter] = size
            elif dims[letter] != size:
                ok = False
    if not ok:
        raise ValueError(f"{name}: expected shape [{describe(letters, dims)}], got {list(x.shape)}")


def describe(letters: list[str], dims: Mapping[str, int]) -> str:
    """'B=2, T=5, HV' : sizes where known."""
    return ", ".join(f"{a}={dims[a]}" if a in dims else a for a in letters)


def offsets(packed: str, cu_seqlens: Any, cu_seqlens_cpu: Any, dims: Mapping[str, int]) -> int:
    """Number of sequences; refuses offsets of the wrong kind or shape, and a batch beside them.

    `packed` names the tensor whose batch it is.
    """
    integral("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected shape [N+1], got {list(cu_seqlens.shape)}")
    if dims["B"] != 1:
        raise ValueError(f"{packed}: expected B=1 with cu_seqlens, got B={dims['B']}")
    if cu_seqlens_cpu is not None:
        integral("cu_seqlens_cpu", cu_seqlens_cpu)
        if cu_seqlens_cpu.device.type != "cpu":
            raise ValueError(f"cu_seqlens_cpu: expected a tensor on the CPU, got {cu_seqlens_cpu.device}")
        shape("cu_seqlens_cpu", cu_seqlens_cpu, "N+1", {"N+1": cu_seqlens.shape[0]})
    return cu_seqlens.shape[0] - 1


def no_gradient(function: str, **tensors: Tensor | None) -> None:
    """ValueError when autograd would record: the serving functions have no gradient."""
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name}: expected a tensor without gradient, got requires_grad=True ({function} has no "
                    "gradient; call it under torch.no_grad(), or train through chunk_gated_delta_rule)"
                )
