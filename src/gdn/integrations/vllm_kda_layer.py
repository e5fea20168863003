"""Build layer classes for vLLM's own registry from its layers with a decay per key channel (KDA).

vLLM 0.33.0 has a class for Kimi-Linear, one for Kimi K3, one for GLM-5.3-Flash and one for Ling-3.0, and each
calls kernels of its own. Ours are subclasses that run a step by the functions of `vllm_layer` and by none of
these kernels: one convolution for q, k and v, both gates inside the kernel, and prompts in place on the pool.
"""

import dataclasses
import logging
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gdn.integrations.vllm_layer import (
    CHECKPOINT_ALIGNMENT,
    ChannelWeights,
    admit,
    metadata,
    run_step,
    run_with_norm,
)

Step = tuple[ChannelWeights, Any, tuple[Tensor, Tensor], bool]
logger = logging.getLogger("gdn")


class ChannelLayer:
    """Hold what the layers have in common; a class of vLLM is the second base of a subclass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from vllm.platforms import current_platform

        super().__init__(*args, **kwargs)
        layer: Any = self
        sizes = SimpleNamespace(head_k_dim=layer.head_dim, head_v_dim=layer.head_dim, activation="silu")
        name = type(self).__name__.removeprefix("Gdn")
        self.is_served = admit(
            name, sizes, layer.get_state_dtype(), current_platform.is_cuda(), self.reason_to_reject
        )
        self.is_aligned = self.is_served and layer.cache_config.mamba_cache_mode == "align"
        if self.is_served:
            # vLLM's warm-up then compiles no kernel of FlashKDA, and reserves no workspace
            self.kda_prefill_backend = "triton"

    @property
    def bound(self) -> float | None:
        """Return the lower bound of the decay's gate."""
        raise NotImplementedError

    @property
    def reason_to_reject(self) -> str | None:
        """Return the reason of this class why gdn does not serve the layer, None without one."""
        return None

    def get_prefill_checkpoint_alignment(self) -> int | None:
        """Return the grid of positions, in tokens, at which a prompt's state can be stored."""
        own: int | None = super().get_prefill_checkpoint_alignment()  # type: ignore[misc]
        return CHECKPOINT_ALIGNMENT if self.is_aligned else own

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return vLLM's description of the blocks; `prefill` writes snapshots, so vLLM splits no prompt."""
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        if not self.is_aligned:
            return spec
        return dataclasses.replace(
            spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=CHECKPOINT_ALIGNMENT
        )

    def weights(self) -> ChannelWeights:
        """Return the layer's parameters, with the filters of q, k and v as one tensor.

        They are joined at each call, in CUDA graphs as well: weights may be loaded again in place.
        """
        layer: Any = self
        names = ("conv1d",) if hasattr(self, "conv1d") else ("q_conv1d", "k_conv1d", "v_conv1d")
        filters = [getattr(self, name).weight.detach().flatten(1) for name in names]
        joined = filters[0] if len(filters) == 1 else torch.cat(filters)
        A_log, bias = layer.A_log.view(-1), layer.dt_bias.view(-1, layer.head_dim)
        return ChannelWeights(joined, None, A_log, bias, self.bound)

    def step(self) -> Step | None:
        """Return the parameters, metadata and pools of this step, and True with VLLM_BATCH_INVARIANT=1.

        None where vLLM's own method runs: for a layer that is not served, and in a profile run.
        """
        if not self.is_served:
            return None
        from vllm import envs
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        meta, layer = metadata(self), self
        if meta is None:
            return None
        windows, states = layer.kv_cache[:2]  # type: ignore[attr-defined]
        pools = windows if is_conv_state_dim_first() else windows.mT, states
        return self.weights(), meta, pools, bool(envs.VLLM_BATCH_INVARIANT)


class KimiLayer(ChannelLayer):
    """Run the layer of Kimi-Linear: convolution, rule and norm."""

    @property
    def bound(self) -> float | None:
        bound: float | None = self.gate_lower_bound  # type: ignore[attr-defined]
        return bound

    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        step, layer = self.step(), self
        if step is None:
            super()._forward(mixed_qkv, g1, g2, beta, core_attn_out)  # type: ignore[misc]
            return
        weights, meta, pools, is_invariant = step
        norm = layer.o_norm  # type: ignore[attr-defined]
        tokens = mixed_qkv, beta[0], g1[0]
        run_with_norm(weights, norm, meta, pools, tokens, g2, core_attn_out[0], is_invariant)


class KimiK3Layer(KimiLayer):
    """Run the layer of Kimi K3, whose metadata has a builder of its own: convolution, rule and norm.

    vLLM's own layer runs one fused kernel for a step of single tokens, by --kda-decode-backend, and another
    one for drafts, by kda_spec_decode_backend; neither decides here.
    """

    @property
    def reason_to_reject(self) -> str | None:
        """Return a reason for a layer of RecoverSSM, which commits drafts from records of vLLM's kernels."""
        is_recovered = self.use_recoverssm  # type: ignore[attr-defined]
        return "expected no --use-replayssm with drafts (RecoverSSM), got it" if is_recovered else None

    def step(self) -> Step | None:
        """Return what `ChannelLayer.step` does, with the fields of a step's prompts in the metadata."""
        step = super().step()
        if step is not None:
            _describe_prompts(step[1])
        return step


def _describe_prompts(meta: Any) -> None:
    """Fill the fields of vLLM's metadata that describe prompts, which Kimi K3's builder leaves out.

    The first layer of a step does it for all that share the metadata. Rows of one token come before prompts.
    """
    if meta.num_prefills == 0 or meta.prefill_query_start_loc is not None:
        return
    offsets, decodes = meta.non_spec_query_start_loc, meta.num_decodes
    meta.prefill_query_start_loc = offsets[decodes:] - meta.num_decode_tokens if decodes else offsets
    meta.prefill_state_indices = meta.non_spec_state_indices_tensor[decodes:]
    meta.prefill_has_initial_state = meta.has_initial_state[decodes:]


class GlmLayer(ChannelLayer):
    """Run the layer of GLM-5.3-Flash: convolution and rule."""

    @property
    def bound(self) -> float | None:
        bound: float | None = self.kda_lower_bound  # type: ignore[attr-defined]
        return bound

    def _forward(self, qkv_proj_states: Tensor, g1: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
        step = self.step()
        if step is None:
            super()._forward(qkv_proj_states, g1, beta, core_attn_out)  # type: ignore[misc]
            return
        weights, meta, pools, is_invariant = step
        run_step(weights, meta, pools, (qkv_proj_states, beta[0], g1[0]), core_attn_out[0], is_invariant)


class LingLayer(ChannelLayer):
    """Run the layer of Ling-3.0 (Bailing): vLLM's own activates the gates before its operator."""

    @property
    def bound(self) -> float | None:
        layer: Any = self
        return layer.lower_bound if layer.safe_gate else None

    def forward(self, hidden_states: Tensor, positions: Tensor, output: Tensor) -> None:
        """Run vLLM's projections, its operator with raw logits, and its norm; write to output."""
        layer: Any = self
        if not self.is_served:
            super().forward(hidden_states, positions, output)  # type: ignore[misc]
            return
        H, K = layer.local_num_heads, layer.head_dim
        if layer.separate_b_proj:
            mixed, b = layer.qkv_proj(hidden_states)[0], layer.b_proj(hidden_states)[0]
        else:
            mixed, b = layer.qkvb_proj(hidden_states)[0].split([3 * H * K, H], -1)
        a, gate = (proj(hidden_states)[0].unflatten(-1, (H, K)) for proj in (layer.f_proj, layer.g_proj))
        out = hidden_states.new_zeros(1, hidden_states.shape[0], H, K)
        # the operator passes its arguments on: q, k and v are columns of the first one
        torch.ops.vllm.bailing_v3_kda_attention(mixed, mixed, mixed, a[None], b[None], out, layer.prefix)
        output[:] = layer.o_proj(layer.o_norm(out, gate)[0].flatten(1))[0]

    def _forward(
        self, q_proj_states: Tensor, k_proj_states: Tensor, v_proj_states: Tensor, g1: Tensor, beta: Tensor,
        core_attn_out: Tensor,
    ) -> None:  # fmt: skip
        step = self.step()
        if step is None:
            super()._forward(  # type: ignore[misc]
                q_proj_states, k_proj_states, v_proj_states, g1, beta, core_attn_out
            )
            return
        weights, meta, pools, is_invariant = step
        run_step(weights, meta, pools, (q_proj_states, beta[0], g1[0]), core_attn_out[0], is_invariant)


LAYERS = (
    (
        "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn",
        "KimiGatedDeltaNetAttention",
        KimiLayer,
    ),
    ("vllm.models.kimi_k3.nvidia.kda", "KimiK3DeltaAttention", KimiK3Layer),
    ("vllm.models.glm5next.common.kda", "Glm5NextLinearAttention", GlmLayer),
    ("vllm.model_executor.models.bailing_moe_v3", "BailingMoeV3KimiDeltaAttention", LingLayer),
)


def make_channel_layers() -> dict[str, type]:
    """Return a subclass for each of vLLM's classes whose file can be imported, by the name of the class."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    made = {}
    for module, name, layer in LAYERS:
        try:
            original = getattr(import_module(module), name)
        except Exception as error:
            # a model's file may need packages, or a device, that its users alone have
            logger.info("%s is left to vLLM, its file cannot be imported: %s", name, error)
            continue
        methods: dict[str, Any] = {"__module__": __name__}
        if hasattr(original._forward, "__wrapped__"):
            methods["_forward"] = eager_break_during_capture(layer._forward)  # type: ignore[attr-defined]
        made[name] = type("Gdn" + name, (layer, original), methods)
    return made
