"""Provide the layers that the package `kernels` puts in the place of functions of Transformers' model files.

A layer is a forward without members: `kernels` binds it to the module of the function that it replaces, whose
class has the original forward. Calls that gdn rejects go there (`integrations/transformers_calls.py`).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gdn.integrations import transformers_calls as calls
from gdn.ops.norm import rms_norm_gated

# a model that `kernels` has changed is served until it is changed back
ACTIVE = (True,)


def original(module: nn.Module) -> Any:
    """Return the forward of the function that a layer has replaced."""
    forward = type(module).forward
    if forward.__module__ == __name__:
        raise NotImplementedError("expected a call that gdn supports: this layer has replaced no function")
    return partial(forward, module)


class chunk_gated_delta_rule(nn.Module):
    """Run several tokens of the gated delta rule."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        serve = calls.chunk(lambda *args, **given: original(self)(*args, **given), ACTIVE)
        options = (chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel)
        return serve(query, key, value, g, beta, *options, **kwargs)


class recurrent_gated_delta_rule(nn.Module):
    """Run one token of the gated delta rule on a state."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        serve = calls.recurrent(lambda *args, **given: original(self)(*args, **given), ACTIVE)
        options = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
        return serve(query, key, value, g, beta, *options, **kwargs)


class causal_conv1d_fn(nn.Module):
    """Run the short convolution of several tokens."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        serve = calls.conv(lambda *args, **given: original(self)(*args, **given), ACTIVE)
        return serve(hidden_states, weight, bias, activation, **kwargs)


class causal_conv1d_update(nn.Module):
    """Run the short convolution of one token, in place on the window."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        serve = calls.conv_update(lambda *args, **given: original(self)(*args, **given), ACTIVE)
        return serve(hidden_states, conv_state, weight, bias, activation)


class FusedRMSNormGated(nn.Module):
    """Run the gated norm of a layer's outputs."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        activation = getattr(self, "activation", "silu")
        if activation not in ("silu", "sigmoid") or torch.compiler._is_exporting_flag:
            return original(self)(hidden_states, gate)
        return rms_norm_gated(
            hidden_states, gate, self.weight, eps=self.variance_epsilon, activation=activation
        )
