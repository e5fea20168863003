"""Run the zero-centred RMS norm of Qwen models in fewer operators, where nothing records gradients.

    y = (x * rsqrt(mean(x * x) + eps)) * (1 + weight)    in fp32, rounded once

A token passes through two of these norms in each layer. On a CPU each takes longer for its calls of operators
and its new tensors than for its arithmetic. The functions here are those of the class in its order, so the
bits are the same. A mean is its own sum and division, numbers are tensors, and results lie in the memory of
earlier ones: a prompt's norm allocates one tensor of its size for the class's four.

On a GPU the class launches ten kernels in bf16, each of which takes a token as long as the next: 610 of a
step of 24 layers. Here each norm is one of gdn's kernels, 61 of such a step. The sum has another order there,
so last bits of fp32 differ. Without Triton, and for rows that the kernel does not take, it is three kernels.

Left to the class's own forward: gradients, other devices, compiled graphs, export, traces, transforms and
dispatch modes, fake and meta tensors, tensor subclasses, and subclasses of the norm.
"""

import functools
from collections.abc import Callable, Sized
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from gdn._torch_compat import is_plain
from gdn.integrations.fallback import call_with_fallback
from gdn.integrations.transformers_calls import warn
from gdn.ops.norm import rms_norm_zero_centred

F32 = torch.float32
# all that the two functions of such a class name
FORWARD = {"_norm", "float", "weight", "type_as"}
NORM = {"torch", "rsqrt", "pow", "mean", "eps"}


def is_rms_norm(cls: type) -> bool:
    """Return True if a class's own functions name nothing but this formula and have its bits.

    The forward is called with eight numbers in fp32 and in bf16.
    """
    forward, norm = (getattr(vars(cls).get(name), "__code__", None) for name in ("forward", "_norm"))
    if not issubclass(cls, nn.Module) or forward is None or norm is None or forward.co_argcount != 2:
        return False
    return _names(forward) == FORWARD and _names(norm) == NORM and _has_formula(cls)


def with_rms_norm(cls: Any, active: Sized) -> Callable[..., Tensor]:
    """Return a forward that runs `normalise` while `active` holds a patch."""
    forward: Callable[..., Tensor] = vars(cls)["forward"]

    @functools.wraps(forward)
    def forward_or_norm(self: Any, x: Tensor) -> Tensor:
        # first, so that a compiler sees nothing but the original
        if torch.compiler.is_compiling() or not (x.is_cpu or x.is_cuda) or len(active) == 0:
            return forward(self, x)
        weight, eps = self._parameters.get("weight"), self.eps
        if (
            type(self) is not cls
            # an exported trace must not depend on `out`
            or torch.jit.is_tracing()
            or not is_plain(x)
            or type(weight) is not nn.Parameter
            or type(eps) is not float
            or weight.device != x.device
            or weight.shape != x.shape[-1:]
            or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        ):
            return forward(self, x)
        if x.is_cpu:
            return normalise(x, weight, eps)
        return call_with_fallback(
            "the zero-centred norm",
            lambda: rms_norm_zero_centred(x, weight, eps),
            lambda: forward(self, x),
            warn,
        )

    return forward_or_norm


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [..., D] in its dtype; weight [D]."""
    one, count, epsilon = _numbers(x.shape[-1], eps)
    wide = x if x.dtype == F32 else x.float()
    y = torch.mul(wide, wide)
    rstd = y.sum(-1, keepdim=True).div_(count).add_(epsilon).rsqrt_()
    torch.mul(wide, rstd, out=y).mul_(weight.float() + one)
    return y if x.dtype == F32 else y.to(x.dtype)


@functools.lru_cache(maxsize=64)
def _numbers(size: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1, a size and eps as tensors, which an operator takes in half the time of numbers."""
    return tuple(torch.tensor(x, dtype=F32, device="cpu") for x in (1, size, eps))  # type: ignore[return-value]


def _names(code: CodeType) -> set[str]:
    return set(code.co_names)


def _has_formula(cls: Any) -> bool:
    """Return True if the forward of an instance has the bits of `normalise`."""
    # no constructor, whose arguments differ, and no random numbers, which belong to the caller
    norm: Any = cls.__new__(cls)
    nn.Module.__init__(norm)
    x = torch.tensor([[1.0, -2.0, 0.3, 3.0], [0.25, 1.7, -1.1, 0.125]], dtype=F32, device="cpu")
    norm.weight = nn.Parameter(torch.tensor([0.5, -1.5, 0.1, 1.25], dtype=F32, device="cpu"))
    norm.eps = 0.5  # far from 0, so that its place counts
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            return all(
                torch.equal(vars(cls)["forward"](norm, t), normalise(t, norm.weight, norm.eps))
                for t in (x, x.bfloat16())
            )
        # a forward that is no such norm may raise anything
        except Exception:
            return False
