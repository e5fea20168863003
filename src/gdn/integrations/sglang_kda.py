"""Provide SGLang's kernels for a decay per key channel (KDA) on gdn, by its names (SGLang 0.5.23)."""

from typing import Any

import torch
from torch import Tensor

from gdn.integrations import usage
from gdn.integrations.engines import gate_of_channels, packed, per_token
from gdn.integrations.fallback import call_with_fallback
from gdn.integrations.sglang_decode import decode_rows
from gdn.integrations.sglang_prefill import tracked, with_chunk_states
from gdn.ops.prefill import prefill
from gdn.ops.step import decode_step


def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode one token per request, with a decay per key channel: `gdn.decode_packed`, nothing copied.

    a [B, HV K], dt_bias [HV K]; the rest as `fused_recurrent_gated_delta_rule_packed_decode`.
    """
    HV, _, K = initial_state.shape[-3:]
    gate = gate_of_channels(a, A_log, dt_bias, torch.Size((HV, K)))
    packed(
        mixed_qkv, gate["a"], b, gate["A_log"], gate["dt_bias"], scale, initial_state, out, ssm_state_indices,
        use_qk_l2norm_in_kernel, None, lower_bound,
    )  # fmt: skip
    return out, initial_state


def gates_of(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, q: Tensor, states: Tensor, bound: float | None
) -> dict[str, Any]:
    """Return the gates of gdn's functions from raw logits, which SGLang stores with several axes.

    a [..., HV K] or [..., HV, K] and b [..., HV], of at least as many tokens as q [B, T, H, K] has.
    """
    HV, _, K = states.shape[1:]
    gates = gate_of_channels(a.reshape(-1, HV, K), A_log, dt_bias, torch.Size((HV, K)))
    gates["a"], gates["b"] = per_token(gates["a"], q, 4), per_token(b.reshape(-1, HV), q)
    return gates | {"lower_bound": bound}


class KDAKernel:
    """Implement SGLang's kernel interface (`LinearAttnKernelBase`) on gdn, for its KDAKernelDispatcher.

    Rings of SGLang's ReplaySSM, and gates that SGLang has activated before, raise NotImplementedError.
    """

    uses_state_checkpoints = False
    # SGLang's fused verification is a kernel of its own, which a dispatcher does not see
    supports_fused_chain_verify = False
    supports_track_state_snapshot = True
    supports_packed_decode = True
    supports_packed_decode_safe_gate = True

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor,
        ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, lower_bound: float | None = None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Decode one token per request; o has the shape of v."""
        gates = gates_of(a, b, A_log, dt_bias, q, ssm_states, lower_bound)
        tokens = (q, k, v, None, True)
        o = decode_rows(tokens, gates, ssm_states, cache_indices, query_start_loc, False, None, None, None)
        usage.count_served("sglang", usage.CHANNEL_ROLES["decode"])
        return o

    def packed_decode(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, scale: float,
        ssm_states: Tensor, cache_indices: Tensor, num_v_heads: int, head_v_dim: int,
        lower_bound: float | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Decode one token per request from the convolution's output; return [1, B, HV, V]."""
        if any(value is not None for name, value in kwargs.items() if name.startswith("replayssm")):
            raise NotImplementedError("packed_decode: expected no ReplaySSM rings, got some")
        B, HV = mixed_qkv.shape[0], num_v_heads
        out = mixed_qkv.new_empty(B, 1, HV, head_v_dim)
        fused_recurrent_kda_packed_decode(
            mixed_qkv, a.reshape(B, -1), b.reshape(B, HV), A_log, dt_bias, scale, ssm_states, out,
            cache_indices, True, lower_bound,
        )  # fmt: skip
        usage.count_served("sglang", usage.CHANNEL_ROLES["decode"])
        return out.transpose(0, 1)

    def target_verify(
        self, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *,
        ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor,
        intermediate_states_buffer: Tensor, intermediate_state_indices: Tensor | None,
        cache_steps: int | None, retrieve_parent_token: Tensor | None, lower_bound: float | None = None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Run drafts of each request; store their states in the buffer, not the pool; o has v's shape."""
        if kwargs.get("cache_ring") or kwargs.get("fused_accept_state_indices") is not None:
            raise NotImplementedError("target_verify: expected no ring and no accepted slots, got some")
        gates = gates_of(a, b, A_log, dt_bias, q, ssm_states, lower_bound)
        o = decode_rows(
            (q, k, v, None, True), gates, ssm_states, cache_indices, query_start_loc, True,
            intermediate_states_buffer, intermediate_state_indices, retrieve_parent_token,
        )  # fmt: skip
        usage.count_served("sglang", usage.CHANNEL_ROLES["verify"])
        return o

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor,
        cache_indices: Tensor, query_start_loc: Tensor, A_log: Tensor | None = None,
        dt_bias: Tensor | None = None, lower_bound: float | None = None, beta_is_raw: bool = False,
        return_intermediate_states: bool = False, **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor | None]:  # fmt: skip
        """Run prompts in place, from raw logits g and beta.

        track_state and track_chunk_idx in kwargs as in `GDNKernel.extend`. return_intermediate_states: return
        (o, h), h [1, rows, HV, V, K] in fp32 as in `chunk_gated_delta_rule`; None where nothing reads it.
        """
        if A_log is None or dt_bias is None or not beta_is_raw:
            raise NotImplementedError("A_log, dt_bias, beta_is_raw: expected raw logits of both gates")
        gates = gates_of(g, beta, A_log, dt_bias, q, ssm_states, lower_bound)
        slots, h = cache_indices[: query_start_loc.shape[0] - 1], None
        track, source = kwargs.get("track_state"), kwargs.get("track_ssm_h_src")
        where = (q, k, v), gates, ssm_states, slots, query_start_loc
        if track is not None:
            o = tracked(*where, track, kwargs["track_chunk_idx"], True, use_qk_l2norm_in_kernel=True)
        elif return_intermediate_states and (source is None or source.numel() > 0):
            o, h = with_chunk_states(*where, use_qk_l2norm_in_kernel=True)
            h = h.unsqueeze(0)
        else:
            o = prefill(
                q, k, v, ssm_states, **gates, cu_seqlens=query_start_loc, state_index=slots,
                use_qk_l2norm_in_kernel=True, state_v_first=True,
            )  # fmt: skip
        usage.count_served("sglang", usage.CHANNEL_ROLES["prefill"])
        return (o, h) if return_intermediate_states else o


def make_backend(original: type) -> type:
    """Return a subclass of SGLang's KDAAttnBackend that decodes with the convolution inside.

    SGLang calls its fused kernel of Kimi K3's decode, and the convolution of every model, before the
    dispatcher that its flags select. Where that dispatcher decodes on gdn, ours runs the convolution, the
    rule and K3's norm as one `gdn.decode_step`. A step that gdn rejects is the method of SGLang's class.
    """

    class Backend(original):  # type: ignore[misc, valid-type]
        def forward_decode(
            self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Tensor, b: Tensor, **kwargs: Any
        ) -> Tensor:
            decode = super().forward_decode

            def run_original() -> tuple[Tensor, bool]:
                return decode(layer, forward_batch, mixed_qkv, a, b, **kwargs), False

            if not isinstance(self.kernel_dispatcher.decode_kernel, KDAKernel):
                return run_original()[0]
            pool = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
            slots = self.forward_metadata.mamba_cache_indices

            def serve() -> tuple[Tensor, bool]:
                return _decode_layer(layer, pool, slots, mixed_qkv, a, b), True

            o, is_served = call_with_fallback("KDAAttnBackend.forward_decode", serve, run_original)
            if is_served:
                states = pool.conv[0], pool.temporal
                self._track_mamba_state_decode(forward_batch, *states, slots, layer.layer_id)
            return o

    Backend.__name__ = Backend.__qualname__ = original.__name__
    return Backend


def _decode_layer(layer: Any, pool: Any, slots: Tensor, mixed: Any, a: Tensor, b: Tensor) -> Tensor:
    """Run one token per request on SGLang's pools; return o [1, B, HV, V].

    The model of Kimi K3 offers the gate of its norm on the layer, where the layer has the sizes of SGLang's
    fused kernel. It applies the norm itself unless the step has set `_k3_onorm_consumed`.
    """
    if pool.replayssm_d is not None or getattr(layer, "_k3_deferred_f_b", False):
        raise NotImplementedError("layer: expected no ReplaySSM rings and a projected gate")
    if not isinstance(mixed, Tensor) or not isinstance(layer.conv_weights, Tensor):
        raise NotImplementedError("mixed_qkv, conv_weights: expected one tensor of q, k and v each")
    B, states = mixed.shape[0], pool.temporal
    if slots.shape[0] != B:
        raise NotImplementedError(f"mixed_qkv: expected {slots.shape[0]} rows, one per request, got {B}")
    HV, V, K = states.shape[-3:]
    gates = gate_of_channels(a.reshape(-1, HV, K), layer.A_log, layer.dt_bias, torch.Size((HV, K)))
    gate, static = getattr(layer, "_k3_onorm_gate", None), getattr(layer, "_k3_fused_decode_args", None)
    norm: dict[str, Any] = {}
    if gate is not None and static is not None:
        norm = {"z": gate.unflatten(-1, (HV, V)), "norm_weight": static[5], "norm_eps": static[6]}
        norm["norm_activation"] = "sigmoid"
    o = decode_step(
        mixed, pool.conv[0].transpose(-1, -2), layer.conv_weights, layer.bias, b=b.reshape(-1, HV), **gates,
        state=states, num_k_heads=layer.num_k_heads, head_k_dim=K, head_v_dim=V,
        lower_bound=layer.lower_bound, use_qk_l2norm_in_kernel=True, state_v_first=True, read_index=slots,
        **norm,
    )  # fmt: skip
    if norm:
        layer._k3_onorm_consumed = True
    usage.count_served("sglang", usage.CHANNEL_ROLES["decode"])
    return o.unsqueeze(0)
