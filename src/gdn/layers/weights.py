"""Convert the weights of the Transformers layers of Qwen3-Next and Qwen3.5, and of those with KDA.

The names in the state_dict distinguish the two layers; Transformers is not imported.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

SHARED = {"A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight"}
QWEN3_5 = {"in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"}
QWEN3_NEXT = {"in_proj_qkvz.weight", "in_proj_ba.weight"}


def from_transformers(
    source: nn.Module | Mapping[str, Tensor],
    num_k_heads: int | None = None,
    norm_eps: float | None = None,
    output_gate: str | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the constructor arguments and the state_dict of the GatedDeltaNet that equals `source`."""
    weights = _state_dict(source)
    names = set(weights) - {"conv1d.bias"}
    if names not in (SHARED | QWEN3_5, SHARED | QWEN3_NEXT):
        raise ValueError(
            "source: expected the tensors of a Qwen3-Next or Qwen3.5 GatedDeltaNet layer, got "
            + (", ".join(sorted(names)) or "none")
        )
    if isinstance(source, nn.Module):
        if source.activation not in ("silu", "swish"):
            raise ValueError(f"source: expected the activation silu, got {source.activation!r}")
        num_k_heads = source.num_k_heads if num_k_heads is None else num_k_heads  # type: ignore[assignment]
        norm_eps = source.layer_norm_epsilon if norm_eps is None else norm_eps  # type: ignore[assignment]
        if output_gate is None:
            output_gate = getattr(source.norm, "activation", "silu")
    if num_k_heads is None:
        raise ValueError("num_k_heads: expected a number with a state_dict, got None")
    sizes = _sizes(weights, num_k_heads)
    weights["conv1d.weight"] = weights["conv1d.weight"].flatten(1)
    if "in_proj_qkvz.weight" in names:
        _split_interleaved(weights, sizes)
    options = {
        "with_conv_bias": "conv1d.bias" in weights,
        "norm_eps": 1e-6 if norm_eps is None else norm_eps,
        "output_gate": output_gate or "silu",
    }
    return sizes | options, weights


def _state_dict(source: Any) -> dict[str, Tensor]:
    """Return the tensors of a module, or a copy of its state_dict."""
    if not isinstance(source, (nn.Module, Mapping)):
        raise TypeError(f"source: expected a module or a state_dict, got {type(source).__name__}")
    return dict(source.state_dict() if isinstance(source, nn.Module) else source)


def _sizes(weights: Mapping[str, Tensor], H: int) -> dict[str, int]:
    hidden_size, value_dim = weights["out_proj.weight"].shape
    HV, V = weights["A_log"].shape[0], weights["norm.weight"].shape[0]
    channels, width = weights["conv1d.weight"].shape[0], weights["conv1d.weight"].shape[-1]
    K = (channels - value_dim) // max(1, 2 * H)
    if value_dim != HV * V or 2 * H * K + value_dim != channels:
        raise ValueError(
            f"source: expected HV V channels of values and 2 H K of queries and keys, got HV={HV}, V={V}, "
            f"H={H}, {value_dim} of values, {channels} in all"
        )
    return {
        "hidden_size": hidden_size, "num_k_heads": H, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V,
        "conv_size": width,
    }  # fmt: skip


def _split_interleaved(weights: dict[str, Tensor], sizes: Mapping[str, int]) -> None:
    """Split in_proj_qkvz and in_proj_ba of Qwen3-Next into one matrix per letter.

    Qwen3-Next stores the rows of each key head together, as q | k | v | z and as b | a.
    """
    H, K, V = sizes["num_k_heads"], sizes["head_k_dim"], sizes["head_v_dim"]
    r = sizes["num_v_heads"] // H
    qkvz = weights.pop("in_proj_qkvz.weight").unflatten(0, (H, 2 * K + 2 * r * V))
    q, k, v, z = (x.flatten(0, 1) for x in qkvz.split([K, K, r * V, r * V], dim=1))
    b, a = (
        x.flatten(0, 1) for x in weights.pop("in_proj_ba.weight").unflatten(0, (H, 2 * r)).split(r, dim=1)
    )
    weights |= {
        "in_proj_qkv.weight": torch.cat([q, k, v]),
        "in_proj_z.weight": z,
        "in_proj_b.weight": b,
        "in_proj_a.weight": a,
    }


KIMI = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "b_proj.weight", "conv1d.weight"}
KIMI |= {"forget_gate.A_log", "forget_gate.dt_bias", "o_norm.weight", "o_proj.weight"}
LOW_RANK = {
    "forget_gate.f_a_proj.weight",
    "forget_gate.f_b_proj.weight",
    "g_a_proj.weight",
    "g_b_proj.weight",
}
FULL_RANK = {"forget_gate.f_proj.weight", "g_proj.weight"}


def from_kimi(
    source: nn.Module | Mapping[str, Tensor], lower_bound: float | None, norm_eps: float | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the constructor arguments and the state_dict of the KimiDeltaAttention that equals `source`."""
    tensors = _state_dict(source)
    if set(tensors) not in (KIMI | LOW_RANK, KIMI | FULL_RANK):
        raise ValueError(
            "source: expected the tensors of a KimiLinear, Glm5NextText or BailingHybrid layer, got "
            + (", ".join(sorted(tensors)) or "none")
        )
    if isinstance(source, nn.Module):
        if source.activation not in ("silu", "swish"):
            raise ValueError(f"source: expected the activation silu, got {source.activation!r}")
        norm_eps = source.o_norm.variance_epsilon if norm_eps is None else norm_eps  # type: ignore
        lower_bound = _lower_bound(source.forget_gate) if lower_bound is None else lower_bound
    HV, K = tensors["forget_gate.A_log"].numel(), tensors["o_norm.weight"].shape[0]
    weights = {
        "in_proj_qkv.weight": torch.cat([tensors[f"{name}_proj.weight"] for name in "qkv"]),
        "in_proj_b.weight": tensors["b_proj.weight"],
        "conv1d.weight": tensors["conv1d.weight"].flatten(1),
        "A_log": tensors["forget_gate.A_log"].flatten(),
        "dt_bias": tensors["forget_gate.dt_bias"].view(HV, K),
        "norm.weight": tensors["o_norm.weight"],
        "out_proj.weight": tensors["o_proj.weight"],
    }
    gate_rank = None
    if "g_proj.weight" in tensors:
        weights["in_proj_a.weight"] = tensors["forget_gate.f_proj.weight"]
        weights["in_proj_z.weight"] = tensors["g_proj.weight"]
    else:
        gate_rank = tensors["g_a_proj.weight"].shape[0]
        for i, letter in enumerate("ab"):
            weights[f"in_proj_a.{i}.weight"] = tensors[f"forget_gate.f_{letter}_proj.weight"]
            weights[f"in_proj_z.{i}.weight"] = tensors[f"g_{letter}_proj.weight"]
    sizes = {
        "hidden_size": tensors["o_proj.weight"].shape[0], "num_k_heads": HV, "head_k_dim": K,
        "conv_size": tensors["conv1d.weight"].shape[-1], "gate_rank": gate_rank, "lower_bound": lower_bound,
        "norm_eps": 1e-6 if norm_eps is None else norm_eps,
    }  # fmt: skip
    return sizes, weights


def _lower_bound(gate: Any) -> float | None:
    """Return the lower bound of the forget gate of a layer; None for the gate with softplus."""
    if not getattr(gate, "safe_gate", True):
        return None
    bound: float | None = getattr(gate, "safe_gate_lower_bound", getattr(gate, "lower_bound", None))
    return bound
