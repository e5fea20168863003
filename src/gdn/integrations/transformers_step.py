"""Run one token through a gated delta rule layer of Transformers by gdn.decode_step, in place on the cache.

The forward of a layer class in a patched model file calls some 20 functions for a token. With a cache that
holds a state, all between the input projections and the output projection is one decode_step here, also
inside a compiled graph, where it is an operator that writes the cache's buffers: no new state, no copy.

Left to the class's own forward: several tokens, tokens without a state, padding masks, offsets of documents,
a cache that records its past, gradients, export, layers with hooks, adapters, or other linear layers, filters
or norms than those of the class.
"""

import functools
from collections.abc import Callable, Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gdn._torch_compat import has_global_hooks
from gdn.integrations.fallback import call_with_fallback
from gdn.integrations.transformers_branches import in_parallel
from gdn.integrations.transformers_calls import ACTIVATIONS, warn
from gdn.ops.step import decode_step

CACHES = ("cache", "cache_params")  # argument names since Transformers 5.24, and before
# the projections of two kinds of layers; Qwen3-Next has the rows of a key head side by side
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
GROUPED_PROJECTIONS = ("in_proj_qkvz", "in_proj_ba")
# what a layer has beside them
PARTS = ("conv1d", "norm", "out_proj")
PLAIN = {"conv1d": nn.Conv1d}  # the others are nn.Linear
PARAMETERS = {"A_log", "dt_bias"}
RECURRENT = "torch_recurrent_gated_delta_rule"


def is_layer(cls: type) -> bool:
    """Return True for a class whose own forward calls the rule for one token and gets a cache."""
    forward = vars(cls).get("forward")
    if not issubclass(cls, nn.Module) or not callable(forward):
        return False
    code = getattr(_innermost(forward), "__code__", None)
    return code is not None and RECURRENT in code.co_names


def _innermost(forward: Any) -> Any:
    """Return the function under decorators; accelerate's has no `__wrapped__` in some versions."""
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def with_step(forward: Callable[..., Tensor], active: Sized) -> Callable[..., Tensor]:
    """Return a layer's forward that runs a token with a state by decode_step while `active` holds a patch."""

    # a model file computes the gated norm by a class of its own
    file = _innermost(forward).__module__

    @functools.wraps(forward)
    def forward_or_step(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        # one model file passes the hidden states by position; the others pass all by name
        x = args[0] if len(args) == 1 else None if args else kwargs.get("hidden_states")
        if x is None or x.shape[1] != 1 or len(active) == 0:
            return forward(self, *args, **kwargs)
        buffers = _cache_buffers(self, x, kwargs)
        parts = None if buffers is None else _plain_parts(self, file)
        if buffers is None or parts is None:
            return forward(self, *args, **kwargs)
        return call_with_fallback(
            "a decode step of the gated delta rule layer",
            lambda: _step(self, parts, x, *buffers),
            lambda: forward(self, *args, **kwargs),
            warn,
        )

    return forward_or_step


def _cache_buffers(m: Any, x: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return this layer's window [B, D, W] and state [B, HV, K, V] in the cache, if it holds both."""
    given = kwargs.get
    if (
        given("attention_mask") is not None
        or given("cu_seq_lens_q") is not None
        or given("seq_idx") is not None
    ):
        return None
    if x.is_meta or torch.compiler._is_exporting_flag:
        return None
    if torch.is_grad_enabled() and (x.requires_grad or m.out_proj.weight.requires_grad):
        # autograd records; generate does not
        return None
    cache = next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
    layer: Any = getattr(cache, "layers", {m.layer_idx: None})[m.layer_idx]
    windows, states = getattr(layer, "conv_states", None), getattr(layer, "recurrent_states", None)
    if not windows or not states or getattr(layer, "record_past", False) or not layer.has_previous_state[0]:
        return None
    window, state = windows[0], states[0]
    if window is None or state is None or window.shape[0] != x.shape[0] or window.device != x.device:
        return None
    return window, state


def _plain_parts(m: Any, file: str) -> dict[str, Any] | None:
    """Return the modules of a layer of a model file, all plain ones that nobody has hooked or replaced."""
    # from the dictionaries: nn.Module's look-ups and calls cost a CPU as much as the operators
    parts: dict[str, Any] = m._modules
    if has_global_hooks() or not m._parameters.keys() >= PARAMETERS:
        return None
    names = PROJECTIONS if PROJECTIONS[0] in parts else GROUPED_PROJECTIONS
    for name in (*names, *PARTS):
        part = parts.get(name)
        if part is None or part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
            return None
        kind = type(part)
        is_own = kind.__module__ == file if name == "norm" else kind is PLAIN.get(name, nn.Linear)
        if not is_own:
            return None
    return parts


def _step(m: Any, parts: dict[str, Any], x: Tensor, window: Tensor, state: Tensor) -> Tensor:
    """Return the layer's output [B, 1, hidden] for one token per row; advance both buffers."""
    norm, conv, own = parts["norm"], parts["conv1d"]._parameters, m._parameters
    mixed, z, a, b = _project(m, parts, x)
    o = decode_step(
        mixed, window, conv["weight"].squeeze(1), conv["bias"], a, b, own["A_log"], own["dt_bias"], state,
        num_k_heads=m.num_k_heads, head_k_dim=m.head_k_dim, head_v_dim=m.head_v_dim,
        conv_activation=ACTIVATIONS.get(m.activation, m.activation), z=z,
        norm_weight=norm._parameters["weight"], norm_eps=norm.variance_epsilon,
        norm_activation=ACTIVATIONS.get(norm.activation, norm.activation), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return _linear(parts["out_proj"], o.view(x.shape[0], 1, -1))


def _project(m: Any, parts: dict[str, Any], x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q | k | v [B, D], z [B, HV, V], and the logits a and b [B, HV]."""
    if PROJECTIONS[0] in parts:
        rows = x.squeeze(1)
        mixed, z, b, a = in_parallel(
            rows.device, *(partial(_linear, parts[name], rows) for name in PROJECTIONS)
        )
        return mixed, z.view(x.shape[0], -1, m.head_v_dim), a, b
    qkvz, ba = in_parallel(x.device, *(partial(_linear, parts[name], x) for name in GROUPED_PROJECTIONS))
    q, k, v, z, b, a = m.fix_query_key_value_ordering(qkvz, ba)
    mixed = torch.cat([part.flatten(1) for part in (q, k, v)], -1)
    return mixed, z.squeeze(1), a.squeeze(1), b.squeeze(1)


def _linear(part: nn.Linear, x: Tensor) -> Tensor:
    parameters = part._parameters
    return nn.functional.linear(x, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]
