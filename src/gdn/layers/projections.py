"""Compute the projections of one input, and let their matmuls add up its gradient."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gdn._torch_compat import has_function_mode, has_global_hooks, has_saved_tensor_hooks
from gdn.ops.library import are_plain, is_autocasting, without_autocast


class SharedInput:
    """Give an input x to several projections y = x W^T in turn, the last one by `project_last`.

    Autograd adds the gradients dy W of the projections: each sum reads two tensors of the size of x and
    writes a third, rounded. Here the projections form a chain: each returns x to the next one, and its
    backward adds dy W to the gradient of the next ones in its matmul, in the same order and with one rounding
    less. Outputs and gradients of weights have the bits of the modules.

    The modules themselves are called unless each is an nn.Linear without bias and hooks, in the dtype of x,
    and x needs a gradient; also under autocast, in a compiled graph, for subclasses of Tensor, and under
    checkpointing, whose second forward has to save the same tensors wherever it runs.
    """

    def __init__(self, x: Tensor, *modules: nn.Module) -> None:
        self._x, self._is_chained = x, _can_chain(x, modules)

    def project(self, *modules: nn.Module) -> tuple[Tensor, ...]:
        """Return the outputs of projections that others follow."""
        if not self._is_chained:
            return tuple(module(self._x) for module in modules)
        *outputs, self._x = _Projection.apply(self._x, *(module.weight for module in modules))
        return tuple(outputs)

    def project_last(self, module: nn.Module) -> Tensor:
        """Return the output of the last projection."""
        return module(self._x)  # type: ignore[no-any-return]


class _Projection(torch.autograd.Function):
    """Return x W^T for each weight, and x for the next projection."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        needs_x = any(ctx.needs_input_grad[1:])
        ctx.save_for_backward(x if needs_x else None, *weights)
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        return (*(F.linear(x, weight) for weight in weights), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        *given, dx = gradients
        present = [(dy.flatten(0, 1), w) for dy, w in zip(given, weights, strict=True) if dy is not None]

        def run() -> tuple[Tensor | None, ...]:
            dweights = [
                dy.flatten(0, 1).t() @ x.flatten(0, 1) if needed and dy is not None else None
                for dy, needed in zip(given, ctx.needs_input_grad[1:], strict=True)
            ]
            total = _add_products(None if dx is None else dx.flatten(0, 1), present)
            return None if total is None else total.view(ctx.shape), *dweights

        return without_autocast(weights[0].device, run)  # type: ignore[no-any-return]


def _add_products(dx: Tensor | None, pairs: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Return dx + sum dy W. dx belongs to the chain alone, so that the matmul writes into it."""
    if not pairs:
        return dx
    gradients, weights = zip(*pairs, strict=True)
    # small matmuls are joined: dx is read and written once
    dy = gradients[0] if len(pairs) == 1 else torch.cat(gradients, 1)
    w = weights[0] if len(pairs) == 1 else torch.cat(weights)
    if dx is None:
        return dy @ w
    # a graph of the backward itself keeps dx
    return torch.addmm(dx, dy, w) if torch.is_grad_enabled() else dx.addmm_(dy, w)


def _can_chain(x: Tensor, modules: tuple[nn.Module, ...]) -> bool:
    if not (are_plain(x) and x.requires_grad and torch.is_grad_enabled()) or is_autocasting(x.device):
        return False
    if has_saved_tensor_hooks() or has_function_mode():
        return False
    return all(_is_linear(module, x) for module in modules)


def _is_linear(module: nn.Module, x: Tensor) -> bool:
    if type(module) is not nn.Linear or not has_own_forward(module) or module.bias is not None:
        return False
    weight = module.weight
    return type(weight) is nn.Parameter and are_plain(x, weight) and weight.dtype == x.dtype


def has_own_forward(module: nn.Module) -> bool:
    """Return True if a call of the module is its class's forward alone: no hooks, no forward of its own."""
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return not any(hooks) and not has_global_hooks() and "forward" not in vars(module)
