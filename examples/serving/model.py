"""Run Transformers' modules of a Qwen3-Next or Qwen3.5 model around the mixers of an engine."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import gdn

KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def load_model(folder: str, device: str, dtype: torch.dtype) -> Any:
    """Return the text model of a checkpoint in Transformers' format."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def build_random_model(device: str, dtype: torch.dtype, spread: float) -> Any:
    """Return a small Qwen3.5 text model with random weights of that standard deviation, a token per byte."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, logging

    logging.set_verbosity_error()
    config = Qwen3_5TextConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32, tie_word_embeddings=True, initializer_range=spread,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(config).to(device, dtype).eval()


class Model:
    """Own a Transformers model: its four input projections become one, so it can no longer run by itself."""

    def __init__(self, causal: Any) -> None:
        self.config = causal.config
        if self.config.model_type not in KINDS:
            raise ValueError(f"model: expected one of {', '.join(KINDS)}, got {self.config.model_type}")
        self.body, self.head = causal.model, causal.lm_head
        self.device, self.dtype = causal.device, causal.dtype
        self.joined: list[Tensor] = []  # the rows of q, k, v, z, b and a, for each linear attention layer
        for layer in self.body.layers:
            if layer.block_type == "linear_attention":
                self.joined.append(join_projections(layer.linear_attn))

    def forward(self, tokens: Tensor, positions: Tensor, linear: Any, attention: Any) -> Tensor:
        """Return hidden states [B, T, hidden] of tokens at positions [B, T]."""
        counts = {"linear_attention": 0, "full_attention": 0}
        x = self.body.embed_tokens(tokens)
        rope = self.body.rotary_emb(x, self._rope_positions(positions))
        for layer in self.body.layers:
            index = counts[layer.block_type]
            counts[layer.block_type] += 1
            y = layer.input_layernorm(x)
            if layer.block_type == "linear_attention":
                x = x + self._mix_linear(index, layer.linear_attn, y, linear)
            else:
                x = x + self._attend(layer.self_attn, y, rope, partial(attention, index))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.body.norm(x)

    def _rope_positions(self, positions: Tensor) -> Tensor:
        # Qwen3.5 rotates by time, height and width, all equal for text: Transformers 5.17 takes only the
        # three, [3, B, T], and 5.24 takes them too. Qwen3-Next has one
        return positions if self.config.model_type == "qwen3_next" else positions.expand(3, -1, -1)

    def _mix_linear(self, index: int, m: Any, x: Tensor, mix: Callable[..., Tensor]) -> Tensor:
        sizes = [m.conv_dim, m.value_dim, m.num_v_heads, m.num_v_heads]
        rows = F.linear(x, self.joined[index])
        qkv, z, b, a = rows[..., : sum(sizes)].split(sizes, -1)
        return m.out_proj(mix(index, m, qkv, a, b, z.unflatten(-1, (m.num_v_heads, -1))).flatten(-2))

    def _attend(self, m: Any, x: Tensor, rope: Any, mix: Callable[..., Tensor]) -> Tensor:
        q, gate = m.q_proj(x).unflatten(-1, (-1, 2 * m.head_dim)).chunk(2, -1)
        k, v = (f(x).unflatten(-1, (-1, m.head_dim)) for f in (m.k_proj, m.v_proj))
        q, k = rotate(m.q_norm(q), *rope), rotate(m.k_norm(k), *rope)
        return m.o_proj(mix(q, k, v).flatten(-2) * gate.flatten(-2).sigmoid())


def join_projections(m: Any) -> Tensor:
    """Return the rows of q, k, v, z, b and a of a layer as one weight; the layer gives its own up."""
    # as engines hold it, and warmup expects
    m.A_log.data = m.A_log.data.float()
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    if hasattr(m, "in_proj_qkvz"):
        # Qwen3-Next: the rows of q, k, v and z of one key head are neighbours
        names = ("in_proj_qkvz", "in_proj_ba")
        group = m.num_v_heads // m.num_k_heads
        qkvz, ba = (getattr(m, name).weight.unflatten(0, (m.num_k_heads, -1)) for name in names)
        sizes = [m.head_k_dim, m.head_k_dim, group * m.head_v_dim, group * m.head_v_dim]
        rows = [x.flatten(0, 1) for x in (*qkvz.split(sizes, 1), *ba.split([group, group], 1))]
    else:
        rows = [getattr(m, name).weight for name in names]
    # a row of outputs begins at a multiple of 16 elements, as in the tensors that warmup compiles for
    padding = rows[0].new_zeros(-sum(map(len, rows)) % 16, rows[0].shape[1])
    joined = torch.cat([*rows, padding]).detach()
    for name in names:
        delattr(m, name)
    return joined


def split_heads(m: Any, qkv: Tensor) -> dict[str, Tensor]:
    """Return q, k and v [B, T, heads, size] of the convolved rows."""
    sizes = {"q": m.head_k_dim, "k": m.head_k_dim, "v": m.head_v_dim}
    parts = qkv.split([m.key_dim, m.key_dim, m.value_dim], -1)
    return {n: x.unflatten(-1, (-1, size)) for (n, size), x in zip(sizes.items(), parts, strict=True)}


def norm(m: Any, o: Tensor, z: Tensor) -> Tensor:
    """Return the gated norm of a layer's outputs [..., HV, V]."""
    return gdn.rms_norm_gated(o, z, m.norm.weight, eps=m.layer_norm_epsilon)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention, q [B, T, heads, D], k and v [B, keys, fewer, D]; mask [B, T, keys] or [T, keys]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = mask if mask.dim() == 2 else mask[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the first dimensions of each head."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos[:, :, None] + torch.cat([-second, first], -1) * sin[:, :, None]
    return torch.cat([turned, rest], -1)
