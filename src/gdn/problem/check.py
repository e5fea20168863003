"""Define the checks of single arguments; a failed check modifies no tensor.

Every message reads `name: expected ..., got ...`.
"""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gdn._torch_compat import forward_tangent, intercepts_operators, is_forward_mode

BACKENDS = ("hopper", "triton", "eager")  # fastest first
LARGEST = torch.finfo(torch.float32).max
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)


def tensor(name: str, x: Any) -> None:
    """Raise TypeError unless x is a strided tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: expected a strided tensor, got layout {x.layout}")


def floating(name: str, x: Any) -> None:
    """Raise TypeError unless x is a tensor of one of the FLOATS."""
    tensor(name, x)
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: expected a tensor of float16, bfloat16, float32 or float64, got {x.dtype}")


def integral(name: str, x: Any) -> None:
    """Raise TypeError unless x is an int32 or int64 tensor."""
    tensor(name, x)
    if x.dtype not in INTS:
        raise TypeError(f"{name}: expected an int32 or int64 tensor, got {x.dtype}")


def number(name: str, x: Any) -> None:
    """Raise TypeError unless x is a real number, ValueError unless it is finite in fp32."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(x).__name__}")
    if not -LARGEST <= float(x) <= LARGEST:
        raise ValueError(f"{name}: expected a finite number of at most {LARGEST:.3g}, got {x}")


def eps(name: str, x: Any) -> None:
    """Raise as `number` does, and ValueError if x is negative: its root may be that of a negative number."""
    number(name, x)
    if x < 0:
        raise ValueError(f"{name}: expected at least 0, got {x}")


def backend(name: Any) -> None:
    """Raise TypeError unless name is a string or None, ValueError unless a backend has that name."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"backend: expected a name or None, got {type(name).__name__}")
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend: expected None or one of {', '.join(BACKENDS)}, got {name!r}")


def choice(name: str, value: Any, choices: tuple[str | None, ...]) -> None:
    """Raise TypeError unless value is a string or None, ValueError unless it is one of the choices."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}: expected a name or None, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def flags(given: dict[str, Any], names: Sequence[str]) -> None:
    """Make the values of these names Python bools; raise TypeError unless each is a bool or a NumPy bool."""
    for name in names:
        value = given[name]
        if not isinstance(value, bool):
            if not _is_numpy_bool(value):
                raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")
            given[name] = bool(value)


def _is_numpy_bool(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def companions(reference: Tensor, reference_name: str, **tensors: Tensor | None) -> None:
    """Check that each tensor can be an operand beside `reference`.

    Raises ValueError unless all are on its device. Raises TypeError for a tensor subclass that intercepts
    operators (`__torch_dispatch__`) beside a plain `reference`: a backend would run without the subclass.
    """
    is_plain = not intercepts_operators(reference)
    for name, x in tensors.items():
        if x is None:
            continue
        if x.device != reference.device:
            raise ValueError(
                f"{name}: expected device {reference.device} (that of {reference_name}), got {x.device}"
            )
        if is_plain and intercepts_operators(x):
            raise TypeError(
                f"{name}: expected a plain tensor like {reference_name}, got {type(x).__name__}, "
                "which intercepts operators"
            )


def same_dtype(reference: Tensor, reference_name: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have the dtype of `reference`."""
    for name, x in tensors.items():
        if x.dtype != reference.dtype:
            raise ValueError(
                f"{name}: expected dtype {reference.dtype} (that of {reference_name}), got {x.dtype}"
            )


def shape(name: str, x: Tensor, axes: str, dims: dict[str, int]) -> None:
    """Match x with axes such as "B T H K": a new letter gets the size from x, a known one must equal it."""
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


def decay(name: str, x: Any, axes: str, dims: dict[str, int]) -> None:
    """Check log decays or their logits: of a head with `axes`, or of each key channel with one axis more."""
    floating(name, x)
    per_channel = f"{axes} K"
    shape(name, x, per_channel if x.dim() == len(per_channel.split()) else axes, dims)


def gate_parameters(A_log: Any, dt_bias: Any, lower_bound: Any, bias_axes: str, dims: dict[str, int]) -> None:
    """Check the parameters of a call that computes the gate; each of them may be None."""
    for name, x, axes in (("A_log", A_log, "HV"), ("dt_bias", dt_bias, bias_axes)):
        if x is not None:
            floating(name, x)
            shape(name, x, axes, dims)
    if lower_bound is not None:
        number("lower_bound", lower_bound)
        if not lower_bound < 0:
            raise ValueError(f"lower_bound: expected a number below 0, got {lower_bound}")


def no_gate_parameters(p: Any, condition: str) -> None:
    """Raise ValueError for an argument of the gate in a call that does not compute it."""
    for name in ("A_log", "dt_bias", "lower_bound"):
        value = getattr(p, name)
        if value is not None:
            got = "a tensor" if isinstance(value, Tensor) else value
            raise ValueError(f"{name}: expected None without {condition}, got {got}")


def time_first(v: Tensor, dims: Mapping[str, int]) -> None:
    """Raise ValueError if the shape of v shows that heads precede tokens in q, k and v."""
    T, H = dims["T"], dims["H"]
    if v.dim() == 4 and v.shape[1] != T and v.shape[2] == H and T > 0 and v.shape[1] % T == 0:
        raise ValueError(
            f"q: expected tensors [B, T, H, K], tokens before heads; got H={H} heads in q and "
            f"T={v.shape[2]} tokens in v, as if heads came first"
        )


def describe(letters: list[str], dims: Mapping[str, int]) -> str:
    """Return the axes with their sizes where known, such as 'B=2, T=5, HV'."""
    return ", ".join(f"{a}={dims[a]}" if a in dims else a for a in letters)


def offsets(packed: str, cu_seqlens: Any, cu_seqlens_cpu: Any, dims: Mapping[str, int]) -> int:
    """Check the kind and shape of cu_seqlens and that B is 1; return the number of sequences.

    `packed` is the name of the tensor that has the batch axis.
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


def enough_slots(name: str, slots: int, rows: int, index: str) -> None:
    """Raise ValueError if there are fewer slots than rows; without an index, row n uses slot n."""
    if slots < rows:
        raise ValueError(
            f"{name}: expected at least {rows} slots for {rows} rows, got {slots} ({index} would name a slot "
            "for each row)"
        )


def no_tangent(function: str, **tensors: Tensor | None) -> None:
    """Raise NotImplementedError under forward-mode differentiation, which would see a constant silently."""
    if torch.compiler.is_compiling() or not is_forward_mode():
        return
    for name, x in tensors.items():
        if x is not None and forward_tangent(x) is not None:
            raise NotImplementedError(
                f"{function}: expected reverse-mode differentiation, got a forward-mode tangent of {name}"
            )


def writable(name: str, x: Tensor) -> None:
    """Raise ValueError unless x can be written in place.

    Each element must have memory of its own. Outside inference mode, x must not be an inference tensor.
    """
    if overlaps_itself(x):
        raise ValueError(
            f"{name}: expected memory of its own for every element, got shape {list(x.shape)} with strides "
            f"{list(x.stride())}"
        )
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return
    if x.is_inference():
        raise ValueError(
            f"{name}: expected a tensor that may be written outside inference mode, got an inference tensor"
        )


def overlaps_itself(x: Tensor) -> bool:
    """Return True unless every element of x is known to have memory of its own.

    In order of stride, each axis must step past all elements of the axes before it. The test is exact for
    memory in blocks, the layout of every pool, and also returns True for interleaved strides.
    """
    if x.is_contiguous() or x.numel() == 0:
        return False
    # compare pairs of axes: a compiler cannot sort symbolic sizes
    axes = [(stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    for i, (stride, _) in enumerate(axes):
        reach = 0
        for j, (other, size) in enumerate(axes):
            if other < stride or (other == stride and j < i):
                reach += (size - 1) * other
        if stride <= reach:
            return True
    return False


def records_gradient(*tensors: Tensor | None) -> bool:
    """Return True if autograd records a call with these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def no_gradient(function: str, **tensors: Tensor | None) -> None:
    """Raise ValueError if autograd would record the call: the serving functions have no gradient."""
    no_tangent(function, **tensors)
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name}: expected a tensor without gradient, got requires_grad=True ({function} has no "
                    "gradient; call it under torch.no_grad(), or train through chunk_gated_delta_rule)"
                )
