"""Run the gated RMS norm of a Transformers layer by gdn.rms_norm_gated, where tensors are on a GPU.

The class of a model file computes it by ten PyTorch operators, and more backward, most of them on fp32
copies: 66 bytes forward and 144 backward for each element in bf16, where the kernels of gdn move 6 and 10.
Some files round the normalised value to the input's dtype before the weight; gdn rounds once, at the end.

Left to the class's own forward: tensors on a CPU, where gdn's function has more host time and takes longer
for a few tokens; compiled graphs, in which Inductor fuses the operators; export, fake and meta tensors;
tensor subclasses; subclasses that override what it uses; other activations.
"""

import functools
from collections.abc import Callable, Sized
from typing import Any

import torch
from torch import Tensor, nn

from gdn.integrations.fallback import call_with_fallback
from gdn.integrations.transformers_calls import warn
from gdn.ops.norm import rms_norm_gated

DEVICES = ("cuda",)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid}
ARGUMENTS = ("self", "hidden_states", "gate")
ATTRIBUTES = {"weight", "variance_epsilon", "activation"}


def activations_of(cls: type) -> frozenset[str]:
    """Return the activations with which a class's own forward computes the formula of rms_norm_gated.

    A class of the right attributes can multiply by the gate before it normalises, so the forward is called
    once for each activation, with eight numbers on the CPU. Every other class has none.
    """
    code = getattr(vars(cls).get("forward"), "__code__", None)
    if code is None or not issubclass(cls, nn.Module) or code.co_varnames[: code.co_argcount] != ARGUMENTS:
        return frozenset()
    if not ATTRIBUTES.issubset(code.co_names):
        return frozenset()
    return frozenset(name for name in ACTIVATIONS if _has_formula(cls, name))


def with_norm(cls: Any, activations: frozenset[str], active: Sized) -> Callable[..., Tensor]:
    """Return a forward of a norm that runs gdn for these activations while `active` holds a patch."""
    forward: Callable[..., Tensor] = vars(cls)["forward"]
    names = {"forward", *ATTRIBUTES, *forward.__code__.co_names}

    @functools.cache
    def inherits(kind: type) -> bool:
        """Return True if a class has the forward of cls and what that uses: FSDP2 makes such subclasses."""
        if not issubclass(kind, cls):
            return False
        above = kind.__mro__[: kind.__mro__.index(cls)]
        return names.isdisjoint(name for base in above for name in vars(base))

    @functools.wraps(forward)
    def forward_or_norm(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        # first, so that a compiler sees nothing but the original
        if torch.compiler.is_compiling() or len(active) == 0 or not inherits(self.__class__):
            return forward(self, hidden_states, gate)
        weight, activation = self.weight, self.activation
        plain = type(hidden_states) is type(gate) is Tensor and type(weight) in (Tensor, nn.Parameter)
        if not plain or hidden_states.device.type not in DEVICES or activation not in activations:
            return forward(self, hidden_states, gate)
        return call_with_fallback(
            "the gated norm",
            lambda: rms_norm_gated(
                hidden_states, gate, weight, eps=self.variance_epsilon, activation=activation
            ),
            lambda: forward(self, hidden_states, gate),
            warn,
        )

    return forward_or_norm


def _has_formula(cls: Any, activation: str) -> bool:
    """Return True if the forward of an instance with this activation has the values of the formula."""
    # no constructor, whose arguments differ, and no random numbers, which belong to the caller
    norm: Any = cls.__new__(cls)
    nn.Module.__init__(norm)
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    x = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.25, 1.5, -1.0, 0.125]], **options)
    gate = torch.tensor([[-1.0, 2.0, 0.5, 1.0], [3.0, -0.5, 1.25, -2.0]], **options)
    norm.weight = nn.Parameter(torch.tensor([0.5, -1.5, 2.0, 1.25], **options))
    # far from 0, so that its place counts
    norm.variance_epsilon, norm.activation = 0.5, activation
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        expected = norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.5)
        expected = expected * ACTIVATIONS[activation](gate)
        try:
            y = vars(cls)["forward"](norm, x, gate)
            return bool(y.shape == x.shape and torch.allclose(y, expected, rtol=1e-4, atol=1e-5))
        # a forward that is no such norm may raise anything
        except Exception:
            return False
