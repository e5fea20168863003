"""Run lmdeploy's whole layer on gdn: one `decode_step` a token, its gated norm, its builders."""

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from gdn.integrations import usage
from gdn.integrations.engines import activation_name
from gdn.integrations.fallback import call_with_fallback
from gdn.layers.norm import GatedRMSNorm
from gdn.ops.step import decode_step

Forward = Callable[..., Any]


def build_causal_conv1d() -> Any:
    """Return the convolution of lmdeploy's CUDA backend, without asking for TileLang first."""
    # the name is that of our class while the patch is in force
    return import_module("lmdeploy.pytorch.backends.cuda.causal_conv1d").CausalConv1dTilelangImpl()


def build_rmsnorm_gated(hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> GatedRMSNorm:
    """Return the gated norm of a layer, which is FLA's in lmdeploy. kwargs: activation, device, dtype."""
    kwargs["activation"] = activation_name(kwargs.get("activation", "silu"))
    return GatedRMSNorm(hidden_size, eps=eps, **kwargs)


def check_environment(device: str) -> None:
    """Require Triton on a CUDA device, in the place of FLA."""
    if device == "cuda" and find_spec("triton") is None:
        raise NotImplementedError("device: expected Triton with cuda, which is not installed")


def ordering_of_qwen3_next(original: Forward) -> Forward:
    """Return a replacement of Qwen3NextGatedDeltaNet.fix_query_key_value_ordering."""

    @functools.wraps(original)
    def reorder(self: Any, mixed_qkvz: Tensor, mixed_ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Copy q | k | v | z of each key head to q of all heads | k | v, and z; b and a to one block each.

        Four copies, as many as lmdeploy's, which copies q, k and v twice. b and a [..., H, HV / H] are views
        of one tensor, so that they are [..., HV] without a copy.
        """
        K, V, ratio = self.head_k_dim, self.head_v_dim, self.kv_ratio
        groups = mixed_qkvz.unflatten(-1, (-1, 2 * K + 2 * ratio * V))
        lead, H = groups.shape[:-2], groups.shape[-2]
        qk, v, z = groups.split([2 * K, ratio * V, ratio * V], -1)
        mixed = groups.new_empty(*lead, H * (2 * K + ratio * V))
        keys, values = mixed.split([2 * H * K, H * ratio * V], -1)
        keys.unflatten(-1, (2, H, K)).copy_(qk.unflatten(-1, (2, K)).transpose(-3, -2))
        values.unflatten(-1, (H, ratio * V)).copy_(v)
        return mixed, z.reshape(*lead, H * ratio, V), *_split_gates(mixed_ba, ratio)

    return reorder


def _split_gates(mixed_ba: Tensor, ratio: int) -> tuple[Tensor, ...]:
    """Return b and a [..., H, HV / H] of logits that lie by key head, as views of one copy."""
    return mixed_ba.unflatten(-1, (-1, 2, ratio)).transpose(-3, -2).contiguous().unbind(-3)


def _order_rows(layer: Any, mixed_qkvz: Tensor, mixed_ba: Tensor) -> tuple[Tensor, ...]:
    """Return q | k | v, z, b and a as `reorder` does, for `decode_step`, which reads rows of any stride.

    z lies behind v in one tensor, so one copy moves both: three launches, and a step of few rows waits for
    launches, not for HBM. Behind prompts z would be copied once more, by the norm.
    """
    K, V, ratio = layer.head_k_dim, layer.head_v_dim, layer.kv_ratio
    groups = mixed_qkvz.unflatten(-1, (-1, 2 * K + 2 * ratio * V))
    H = groups.shape[-2]
    rows = mixed_qkvz.new_empty(mixed_qkvz.shape)
    parts = rows.split([2 * H * K, 2 * H * ratio * V], -1)
    for part, group, width in zip(
        parts, groups.split([2 * K, 2 * ratio * V], -1), (K, ratio * V), strict=True
    ):
        part.unflatten(-1, (2, H, width)).copy_(group.unflatten(-1, (2, width)).transpose(-3, -2))
    mixed, z = rows.split([H * (2 * K + ratio * V), H * ratio * V], -1)
    return mixed, z.unflatten(-1, (H * ratio, V)), *_split_gates(mixed_ba, ratio)


def decode_of_qwen3_next(original: Forward) -> Forward:
    """Return a replacement of Qwen3NextGatedDeltaNet.forward."""

    def project(layer: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return _order_rows(layer, layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states))

    return _decode_by(project, original)


def decode_of_qwen3_5(original: Forward) -> Forward:
    """Return a replacement of Qwen3_5GatedDeltaNet.forward, the layer of Qwen3.5 and its relatives."""

    def project(layer: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
        mixed, z = layer.in_proj_qkv(hidden_states), layer.in_proj_z(hidden_states)
        b, a = layer.fix_ba_ordering(layer.in_proj_ba(hidden_states))
        return mixed, z.unflatten(-1, (-1, layer.head_v_dim)), b, a

    return _decode_by(project, original)


def _decode_by(project: Callable[[Any, Tensor], tuple[Tensor, ...]], original: Forward) -> Forward:
    """Return a forward that decodes one token per row by `decode_step`; prompts and drafts go to `original`.

    lmdeploy launches a convolution, a preparation of q, k and gates, a copy of v, a rule and a norm; here it
    is three launches, each of which starts before the one in front of it ends (PDL).
    """

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, past_key_value: Any, gated_delta_meta: Any) -> Tensor:
        run_original = functools.partial(
            original, self, hidden_states, past_key_value, gated_delta_meta=gated_delta_meta
        )
        meta = gated_delta_meta
        is_one_token = meta.is_decoding and meta.origin_state_ids.shape[0] == hidden_states.shape[1]
        if not is_one_token or meta.cache_seqlens is not None:
            return run_original()
        step = functools.partial(_decode_layer, self, project, hidden_states, past_key_value, meta)
        return call_with_fallback(f"{type(self).__name__}.forward", step, run_original)

    return forward


def _decode_layer(
    layer: Any, project: Callable[[Any, Tensor], tuple[Tensor, ...]], hidden_states: Tensor, caches: Any,
    meta: Any,
) -> Tensor:  # fmt: skip
    mixed, z, b, a = project(layer, hidden_states)
    conv, norm, (windows, states) = layer.conv1d, layer.norm, caches[:2]
    out = decode_step(
        mixed[0], windows, conv.weight[:, 0], conv.bias, _rows(a), _rows(b), layer.A_log,
        layer.dt_bias, states, num_k_heads=states.shape[1] // layer.kv_ratio, head_k_dim=layer.head_k_dim,
        head_v_dim=layer.head_v_dim, conv_activation=activation_name(conv.causal_conv1d_func.activation),
        z=z[0], norm_weight=norm.weight, norm_eps=norm.eps, norm_activation=activation_name(norm.activation),
        use_qk_l2norm_in_kernel=layer.gated_delta.use_qk_l2norm_in_kernel, state_v_first=True,
        read_index=meta.origin_state_ids,
    )  # fmt: skip
    usage.count_served("lmdeploy", "decode")
    return layer.out_proj(out.flatten(1).unsqueeze(0))


def _rows(gates: Tensor) -> Tensor:
    """Return logits [1, B, HV] or [1, B, H, HV / H] as [B, HV]."""
    return gates[0].flatten(1) if gates.dim() == 4 else gates[0]
