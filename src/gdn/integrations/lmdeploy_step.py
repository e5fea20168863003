"""Provide what lmdeploy's classes need once for each step: metadata, and their place in its CUDA graphs."""

import sys
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

Value = TypeVar("Value")


class StepMeta:
    """Hold lmdeploy's GatedDeltaMeta; compute its index tensors only if somebody reads them.

    lmdeploy's constructor launches some dozen kernels for a decode step, inside its CUDA graph; gdn reads two
    fields of them, which are tensors of the step already. A class of both is made by `class_with_fallback`.
    """

    def __init__(self, num_tokens: int, conv_kernel_size: int, state_ids: Tensor, attn_metadata: Any) -> None:
        from lmdeploy.pytorch.model_inputs import get_step_ctx_manager

        self._arguments = (num_tokens, conv_kernel_size, state_ids, attn_metadata)
        self.is_decoding = attn_metadata.is_decoding
        self.cu_seqlens = attn_metadata.cu_seqlens_q
        self.num_spec_tokens = get_step_ctx_manager().build_ctx.num_spec_tokens
        self.origin_state_ids = self.conv_state_indices = state_ids
        self.cache_seqlens = self.spec_conv_offsets = self.spec_state_offsets = None
        if self.num_spec_tokens > 0:
            self._build()
        elif not self.is_decoding:
            self.has_initial_state = attn_metadata.kv_seqlens != attn_metadata.q_seqlens

    def __getattr__(self, name: str) -> Any:
        """Return a field that only lmdeploy's own functions read, after its constructor has run."""
        if name.startswith("_") or name == "has_initial_state" or "_arguments" not in vars(self):
            raise AttributeError(name)
        self._build()
        return vars(self)[name]

    def _build(self) -> None:
        arguments = vars(self).pop("_arguments")
        super().__init__(*arguments)


def once(meta: Any, name: str, key: Hashable, build: Callable[[], Value]) -> Value:
    """Return build(), computed for the first layer of a step and kept in its metadata for the others."""
    values = vars(meta).setdefault("_gdn_" + name, {})
    if key not in values:
        values[key] = build()
    return values[key]


def has_initial_state(meta: Any) -> Tensor | None:
    """Return True for each sequence that continues, computed once a step; None if all do."""
    if "has_initial_state" not in vars(meta):
        meta.has_initial_state = None if meta.is_init is None else ~meta.is_init
    return meta.has_initial_state


def register_graphs(operator: Any) -> None:
    """Register with lmdeploy's piecewise CUDA graphs, if lmdeploy is loaded and builds a model now.

    lmdeploy enables them if every operator that registered supports them, so one that does not register is
    captured with the metadata of one batch. The rule registers without step metadata: it needs no
    chunk indices, whose preparation waits for the device at every prefill.
    """
    operator._piecewise_forward = None
    module = sys.modules.get("lmdeploy.pytorch.backends.cuda.step_metadata")
    if module is not None:
        module.register_piecewise_graph_impl(operator)


def role(meta: Any) -> str:
    """Return the role of a call in `gdn.integrations.usage`."""
    if not meta.is_decoding:
        return "prefill"
    return "decode" if meta.cache_seqlens is None else "verify"
