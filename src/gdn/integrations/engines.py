"""Translate arguments that several engines have in common, without arithmetic on values."""

from typing import Any

import torch
from torch import Tensor

from gdn import settings
from gdn.ops.serving import decode_packed

ENGINES = ("vllm", "sglang", "lmdeploy")


def is_enabled(engine: str) -> bool:
    """Return True if GDN_ENGINES names the engine."""
    return engine in settings.engines(ENGINES)


def first(x: Tensor | None, count: int) -> Tensor | None:
    """Return the first `count` entries: engines pass buffers that are longer than the batch."""
    return x if x is None or x.shape[0] == count else x[:count]


def null_slot(null_block_id: int | None, name: str = "null_block_id") -> int | None:
    """Return gdn's null_slot for an engine's padding slot; negative numbers are padding in gdn anyway."""
    if null_block_id is None or null_block_id < 0:
        return None
    if null_block_id > 0:
        raise NotImplementedError(f"{name}: expected 0, a negative number or None, got {null_block_id}")
    return 0


def to_rows(x: Tensor, offsets: Tensor, T: int) -> Tensor:
    """Return [tokens, D] as [N, T, D]: row n begins with tokens offsets[n]:offsets[n+1]."""
    tokens = offsets[:-1, None] + torch.arange(T, device=x.device)
    return x[tokens.clamp(max=x.shape[0] - 1)]


def from_rows(y: Tensor, offsets: Tensor, count: int) -> Tensor:
    """Return [N, T, D] as [count, D], the inverse; zero past offsets[-1]. The host reads nothing."""
    tokens = torch.arange(count, device=y.device)
    row = torch.searchsorted(offsets[1:].contiguous(), tokens, right=True).clamp(max=y.shape[0] - 1)
    place = (tokens - offsets[row]).clamp(0, y.shape[1] - 1)
    return y[row, place].masked_fill((tokens >= offsets[-1])[:, None], 0)


def with_tokens(index: Tensor, offsets: Tensor, padding: int) -> Tensor:
    """Return the slots of rows, `padding` where a row has no token, so that its slot is not written."""
    return index.masked_fill(offsets[1:] == offsets[:-1], padding)


def packed(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float | None,
    state: Tensor,
    out: Tensor,
    indices: Tensor,
    l2norm: bool,
    null: int | None,
    lower_bound: float | None = None,
) -> None:
    """Run `gdn.decode_packed`, with the number of key heads computed from the columns; gdn checks them."""
    HV, V, K = state.shape[-3:]
    decode_packed(
        mixed_qkv, a, b, A_log, dt_bias, state, num_k_heads=max(1, (mixed_qkv.shape[-1] - HV * V) // (2 * K)),
        head_k_dim=K, head_v_dim=V, scale=scale, use_qk_l2norm_in_kernel=l2norm, state_v_first=True,
        read_index=indices, null_slot=null, out=out.squeeze(1), lower_bound=lower_bound,
    )  # fmt: skip


def activation_name(activation: bool | str | None) -> str | None:
    """Return "silu" for True, "silu" and "swish", None for False and None."""
    names = {True: "silu", "silu": "silu", "swish": "silu", False: None, None: None}
    if activation not in names:
        raise NotImplementedError(
            f"activation: expected silu, swish, True, False or None, got {activation!r}"
        )
    return names[activation]


def check_gating(beta: float, threshold: float, is_kda: bool = False) -> None:
    """Raise NotImplementedError for gates that gdn does not have."""
    if is_kda:
        raise NotImplementedError("is_kda: expected False, got True (a decay per key channel)")
    if beta != 1.0 or threshold != 20.0:
        raise NotImplementedError(
            f"beta, threshold: expected softplus with 1 and 20, got {beta}, {threshold}"
        )


def per_token(gates: Tensor, q: Tensor, axes: int = 3) -> Tensor:
    """Return logits [tokens, ...] or [B, T, ...] as [B, T, ...], which has so many axes.

    Engines pass more tokens than q has.
    """
    if gates.dim() == axes:
        return gates
    B, T = q.shape[:2]
    return gates[: B * T].unflatten(0, (B, T))


def gate_of_channels(a: Tensor, A_log: Tensor, dt_bias: Tensor | None, sizes: torch.Size) -> dict[str, Any]:
    """Return a, A_log and dt_bias of a decay per key channel, whose heads and keys engines store flat.

    a [..., HV K] or [..., HV, K]; A_log [HV], or with axes of size 1; dt_bias [HV K] or [HV, K].
    sizes: (HV, K)
    """
    flat = a if a.shape[-2:] == sizes else a.unflatten(-1, tuple(sizes))
    bias = None if dt_bias is None else dt_bias.view(sizes)
    return {"a": flat, "A_log": A_log.view(-1), "dt_bias": bias}
