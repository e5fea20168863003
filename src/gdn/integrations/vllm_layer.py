"""Build a layer class for vLLM's own registry: the convolution, the rule and the norm of a layer on gdn.

vLLM instantiates a class that was registered with `PluggableLayer.register_oot` in the place of its own. Ours
is a subclass that overrides what runs between a layer's projections, so that no flag of vLLM's kernels
decides: prompts run in place on the pool, with the snapshot that prefix caching wants, a token per row is one
`decode_step`, and drafts follow protocol P2.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn import settings
from gdn.integrations import usage
from gdn.integrations.engines import activation_name
from gdn.integrations.vllm_conv import NULL_BLOCK_ID, causal_conv1d_update
from gdn.ops import conv as short_conv
from gdn.ops.norm import rms_norm_gated
from gdn.ops.prefill import prefill
from gdn.ops.serving import decode
from gdn.ops.step import decode_step

CHECKPOINT_ALIGNMENT = 64  # tokens: vLLM places snapshots on this grid, as for FlashInfer
# True for each layer of ours that was built and that gdn serves, False for one that it does not
built: list[bool] = []


@dataclass(frozen=True)
class ChannelWeights:
    """Hold the parameters of a layer with a decay per key channel, in the place of a layer of vLLM.

    conv_weight [D, W] and conv_bias [D] or None of q | k | v, A_log [H], dt_bias [H, K].
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    activation: str = "silu"


def reason_to_reject(layer: Any, states: tuple[torch.dtype, ...], is_cuda: bool) -> str | None:
    """Return None if gdn serves every call of this layer, else the reason.

    It is decided once: vLLM's own functions cannot take over in the middle of a layer, after the convolution.
    """
    if not is_cuda:
        return "expected a CUDA device"
    if not set(states) <= {torch.float32, torch.bfloat16, torch.float16}:
        return f"expected states in fp32, bf16 or fp16, got {[str(x) for x in states]}"
    if max(layer.head_k_dim, layer.head_v_dim) > 256:
        return f"expected K and V of at most 256, got {layer.head_k_dim} and {layer.head_v_dim}"
    try:
        activation_name(layer.activation)
    except NotImplementedError as error:
        return str(error)
    return None


def admit(
    name: str, layer: Any, states: tuple[torch.dtype, ...], is_cuda: bool, own_reason: str | None = None
) -> bool:
    """Return True if gdn serves a layer that vLLM has just built; count it, and a reason if there is one.

    own_reason: why gdn does not serve the layer, whatever its sizes.
    """
    reason = own_reason or reason_to_reject(layer, states, is_cuda)
    built.append(reason is None)
    if reason is not None:
        usage.count_rejected(name, reason)
    return reason is None


def metadata(layer: Any) -> Any:
    """Return vLLM's metadata of this step for a layer, None in a profile run."""
    from vllm.forward_context import get_forward_context

    every = get_forward_context().attn_metadata
    return every.get(layer.prefix) if isinstance(every, dict) else None


def make_layer(original: type) -> type:
    """Return a subclass of one of vLLM's layer classes, of the same constructor."""
    from vllm import envs
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.platforms import current_platform

    class Layer(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            is_cuda = current_platform.is_cuda()
            self.is_served = admit(original.__name__, self, self.get_state_dtype(), is_cuda)
            if not self.is_served:
                return
            # one operator with the norm inside; a quantised projection is left to vLLM's fusion with the norm
            if hasattr(self, "_forward_core_fused_norm_packed"):
                is_flat = not self.gqa_interleaved_layout and self.quant_config is None
                self.enable_fused_gdn_spec_decode = is_flat
            # vLLM's warm-up then compiles no kernel of FlashInfer
            self.gdn_prefill_backend = "triton"
            if hasattr(self, "_checkpoint_alignment") and self.cache_config.mamba_cache_mode == "align":
                self._checkpoint_alignment = CHECKPOINT_ALIGNMENT
                # snapshots go from the kernel to their blocks: no buffer of states is reserved
                self._checkpoint_buffer_spec = ((1,), torch.float32)

        def _pools(self) -> tuple[Tensor, Tensor]:
            windows, states = self.kv_cache[:2]
            return windows if is_conv_state_dim_first() else windows.transpose(-1, -2), states

        def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
            meta = metadata(self) if self.is_served else None
            if meta is None:
                super()._forward_core(mixed_qkv, b, a, core_attn_out)
                return
            run_step(self, meta, self._pools(), (mixed_qkv, b, a), core_attn_out, envs.VLLM_BATCH_INVARIANT)

        def _forward_core_fused_norm(
            self, mixed_qkv: Tensor, b: Tensor, a: Tensor, output_gate: Tensor, core_attn_out: Tensor
        ) -> None:
            meta = metadata(self) if self.is_served else None
            if meta is None:
                super()._forward_core_fused_norm(mixed_qkv, b, a, output_gate, core_attn_out)
                return
            run_with_norm(
                self, self.norm, meta, self._pools(), (mixed_qkv, b, a), output_gate, core_attn_out,
                envs.VLLM_BATCH_INVARIANT,
            )  # fmt: skip

        def _full_forward(self, hidden_states: Tensor, output: Tensor) -> None:
            # OLMo's operator contains the projections, too
            meta = metadata(self) if self.is_served else None
            if meta is None:
                super()._full_forward(hidden_states, output)
                return
            run_with_projections(self, meta, self._pools(), hidden_states, output, envs.VLLM_BATCH_INVARIANT)

    Layer.__name__ = Layer.__qualname__ = "Gdn" + original.__name__
    return Layer


def activation_name_of_gate(name: str) -> str | None:
    """Return gdn's name of the activation of an output gate."""
    return name if name == "sigmoid" else activation_name(name)


def run_with_projections(
    layer: Any, meta: Any, pools: tuple[Tensor, Tensor], x: Tensor, output: Tensor, is_invariant: bool
) -> None:
    """Run OLMo's whole layer on x [tokens, hidden], by vLLM's own projections; write to output."""
    projected, b, a = (part(x)[0] for part in (layer.in_proj_qkvg, layer.b_proj, layer.a_proj))
    heads = b.shape[1], layer.head_v_dim
    size = heads[0] * heads[1]
    mixed, gate = projected.split([projected.shape[1] - size, size], 1)
    # rows of a captured batch without a token stay zero
    out, gate = projected.new_zeros(x.shape[0], *heads), gate.unflatten(1, heads)
    run_with_norm(layer, layer.o_norm, meta, pools, (mixed, b, a), gate, out, is_invariant)
    output[: x.shape[0]], _ = layer.o_proj(out.flatten(1))


def run_with_norm(
    layer: Any, norm: Any, meta: Any, pools: tuple[Tensor, Tensor], tokens: tuple[Tensor, ...], gate: Tensor,
    out: Tensor, is_invariant: bool,
) -> None:  # fmt: skip
    """Run the tokens of one step and the gated norm: a step of single tokens as one `gdn.decode_step`."""
    n, activation = meta.num_actual_tokens, activation_name_of_gate(norm.activation)
    if meta.num_spec_decodes == 0 and meta.num_prefills == 0:
        options = {"norm_weight": norm.weight, "norm_eps": norm.eps, "norm_activation": activation}
        decode_tokens(layer, meta, pools, tokens, out, n, z=gate[:n], **options)
        return
    run_step(layer, meta, pools, tokens, out, is_invariant)
    out[:n] = rms_norm_gated(out[:n], gate[:n], norm.weight, eps=norm.eps, activation=activation)


def run_step(
    layer: Any, meta: Any, pools: tuple[Tensor, Tensor], tokens: tuple[Tensor, ...], out: Tensor,
    is_invariant: bool,
) -> None:  # fmt: skip
    """Run the tokens of one step: drafts, single tokens and prompts; write to out [tokens, HV, V]."""
    if meta.num_spec_decodes == 0:
        if meta.num_decodes > 0:
            count = meta.num_decode_tokens if meta.num_prefills else meta.num_actual_tokens
            decode_tokens(layer, meta, pools, tokens, out, count)
        if meta.num_prefills > 0:
            span = slice(meta.num_decode_tokens, meta.num_actual_tokens)
            prompts = tuple(x[span] for x in tokens)
            run_prompts(layer, meta, pools, prompts, out[span].unsqueeze(0), is_invariant)
        return
    tokens = tuple(x[: meta.num_actual_tokens] for x in tokens)
    if meta.num_prefills + meta.num_decodes == 0:
        out[: meta.num_actual_tokens] = verify(layer, meta, pools, tokens)
        return
    # drafts and other tokens lie between one another
    drafts, others = meta.spec_token_indx, meta.non_spec_token_indx
    out.index_copy_(0, drafts, verify(layer, meta, pools, tuple(x.index_select(0, drafts) for x in tokens)))
    some = tuple(x.index_select(0, others) for x in tokens)
    if meta.num_prefills > 0:
        o = run_prompts(layer, meta, pools, some, None, is_invariant)
    else:
        o = out.new_empty(others.shape[0], *out.shape[1:])
        decode_tokens(layer, meta, pools, some, o, others.shape[0])
    out.index_copy_(0, others, o)


def decode_tokens(
    layer: Any, meta: Any, pools: tuple[Tensor, Tensor], tokens: tuple[Tensor, ...], out: Tensor, count: int,
    **norm: Any,
) -> None:  # fmt: skip
    """Run one token of each of the first `count` rows: `gdn.decode_step`."""
    (windows, states), (mixed, b, a) = pools, (x[:count] for x in tokens)
    weight, bias = filters(layer)
    HV, V, K = states.shape[1:]
    decode_step(
        mixed, windows[..., : weight.shape[1] - 1], weight, bias, a, b, state=states, **gate_options(layer),
        num_k_heads=(mixed.shape[1] - HV * V) // (2 * K), head_k_dim=K, head_v_dim=V,
        conv_activation=activation_name(layer.activation), use_qk_l2norm_in_kernel=True, state_v_first=True,
        read_index=meta.non_spec_state_indices_tensor[:count], null_slot=NULL_BLOCK_ID, out=out[:count],
        **norm,
    )  # fmt: skip
    count_served(layer, "decode")


def run_prompts(
    layer: Any, meta: Any, pools: tuple[Tensor, Tensor], tokens: tuple[Tensor, ...], out: Tensor | None,
    is_invariant: bool,
) -> Tensor:  # fmt: skip
    """Run packed prompts in place: `gdn.causal_conv1d`, then `gdn.prefill`; return o [tokens, HV, V]."""
    (windows, states), (mixed, b, a) = pools, tokens
    weight, bias = filters(layer)
    offsets, slots = meta.prefill_query_start_loc, meta.prefill_state_indices
    N, mask = offsets.shape[0] - 1, meta.prefill_has_initial_state
    where: dict[str, Any] = {"state_index": slots[:N], "has_initial_state": mask[:N]}
    snapshot: dict[str, Any] = {}
    window = windows[..., : weight.shape[1] - 1]
    if meta.checkpoint is not None:
        # the checkpoints of a mixed batch begin with the rows that decode
        position, index = meta.checkpoint.checkpoint_offsets[-N:], meta.checkpoint.state_indices[-N:]
        position = torch.where(position > 0, position, -1)
        snapshot = {"snapshot_pos": position, "snapshot_index": index}
        store_windows(mixed, window, offsets, position, index)
    convolved, _ = short_conv.causal_conv1d(
        mixed.unsqueeze(0), weight, bias, activation=activation_name(layer.activation), cu_seqlens=offsets,
        state=window, null_slot=NULL_BLOCK_ID, **where,
    )  # fmt: skip
    q, k, v = split_heads(convolved, states)
    o = prefill(
        q, k, v, states, a=a.unsqueeze(0), b=b.unsqueeze(0), cu_seqlens=offsets, use_qk_l2norm_in_kernel=True,
        state_v_first=True, null_slot=NULL_BLOCK_ID, batch_invariant=is_invariant, out=out,
        **gate_options(layer), **where, **snapshot,
    )  # fmt: skip
    count_served(layer, "prefill")
    return o[0]


def verify(
    layer: Any, meta: Any, pools: tuple[Tensor, Tensor], tokens: tuple[Tensor, ...]
) -> Tensor:  # fmt: skip
    """Run the drafts of each row: protocol P2 on a table of blocks; return o [tokens, HV, V]."""
    (windows, states), (mixed, b, a) = pools, tokens
    weight, bias = filters(layer)
    N, table = meta.num_spec_decodes, meta.spec_state_indices_tensor
    offsets, accepted = meta.spec_query_start_loc[: N + 1], meta.num_accepted_tokens[:N]
    convolved = causal_conv1d_update(
        mixed, windows, weight, bias, layer.activation, table[:N, 0], accepted, offsets, table.shape[1],
        out=torch.empty_like(mixed),
    )  # fmt: skip
    q, k, v = split_heads(convolved.unsqueeze(0), states)
    o = decode(
        q, k, v, states, a=a.unsqueeze(0), b=b.unsqueeze(0), **gate_options(layer), cu_seqlens=offsets,
        max_seqlen=table.shape[1], read_index=table[:N], num_accepted=accepted, write="all",
        write_index=table[:N], use_qk_l2norm_in_kernel=True, state_v_first=True, null_slot=NULL_BLOCK_ID,
    )  # fmt: skip
    count_served(layer, "verify")
    return o[0]


def store_windows(x: Tensor, window: Tensor, offsets: Tensor, position: Tensor, index: Tensor) -> None:
    """Store the inputs before token position[n] of sequence n in window[index[n]]; -1: store none.

    x [tokens, D] is the input of the convolution. Positions are at least the window's length: they lie on a
    grid of 64 tokens. The host reads nothing, so a row that stores none writes what its slot has.
    """
    is_stored = ((position > 0) & (index != NULL_BLOCK_ID)).view(-1, 1, 1)
    length = window.shape[2]
    steps = torch.arange(-length, 0, device=x.device)
    places = (offsets[:-1] + position)[:, None] + steps
    values = x[places.clamp(0, max(x.shape[0] - 1, 0))].transpose(1, 2).to(window.dtype)
    slots = index.long().clamp(0, window.shape[0] - 1)
    slots = torch.where(is_stored[:, 0, 0], slots, NULL_BLOCK_ID)
    window[slots] = torch.where(is_stored, values, window[slots])


def filters(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return the filters [D, W] and the bias of a layer's convolution."""
    if isinstance(layer, ChannelWeights):
        return layer.conv_weight, layer.conv_bias
    return layer.conv1d.weight.flatten(1), getattr(layer.conv1d, "bias", None)


def count_served(layer: Any, role: str) -> None:
    """Count a call for a layer's tokens: role is one of `usage.ROLES`."""
    usage.count_served("vllm", usage.CHANNEL_ROLES[role] if isinstance(layer, ChannelWeights) else role)


def gate_options(layer: Any) -> dict[str, Any]:
    """Return the parameters of a layer's gates as arguments of gdn's functions."""
    if isinstance(layer, ChannelWeights):
        return {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "lower_bound": layer.lower_bound}
    neg = getattr(layer, "allow_neg_eigval", False)
    return {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "allow_neg_eigval": neg}


def split_heads(mixed: Tensor, states: Tensor) -> tuple[Tensor, ...]:
    """Return rows of q | k | v [1, tokens, D] as q, k [1, tokens, H, K] and v [1, tokens, HV, V], views."""
    HV, V, K = states.shape[1:]
    keys = (mixed.shape[2] - HV * V) // 2
    q, k, v = mixed.split([keys, keys, HV * V], 2)
    return q.unflatten(2, (-1, K)), k.unflatten(2, (-1, K)), v.unflatten(2, (HV, V))


LAYERS = (
    ("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention"),
    ("vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn", "OlmoHybridGatedDeltaNetAttention"),
)


def is_registered() -> bool:
    """Return True if vLLM would build our layer for its Qwen models."""
    registry = getattr(sys.modules.get("vllm.model_executor.custom_op"), "op_registry_oot", {})
    return "QwenGatedDeltaNetAttention" in registry


def needed_flags(capability: tuple[int, int], cuda: int) -> list[str]:
    """Return a sentence for each kernel of vLLM that takes calls away from `patch_vllm`, with its flag.

    capability: of the GPU. cuda: the major version of the CUDA runtime.
    """
    major, flags = capability[0], []
    if capability == (9, 0) or (major in (10, 12) and cuda >= 13):
        flags.append(
            "prefill runs on FlashInfer unless vLLM gets --gdn-prefill-backend triton "
            '(additional_config={"gdn_prefill_backend": "triton"})'
        )
    if (settings.of_engine("VLLM_GDN_DECODE_KERNEL") or "cuda").strip().lower() == "cuda":
        flags.append(
            "drafts of models with K = V = 128 in bf16 run on torch.ops._C.fused_gdn_decode_post_conv_mtp "
            "unless VLLM_GDN_DECODE_KERNEL=triton is set"
        )
    return flags
