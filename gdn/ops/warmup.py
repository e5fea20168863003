"""Meeting every kernel before the first request does."""

from collections.abc import Sequence
from typing import Any

import torch

from gdn.ops.conv import causal_conv1d, causal_conv1d_update
from gdn.ops.gate import gate
from gdn.ops.norm import rms_norm_gated
from gdn.ops.prefill import commit, prefill
from gdn.ops.rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from gdn.ops.serving import decode, decode_functional, decode_packed


def warmup(
    device: torch.device | str,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    conv_size: int = 4,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    state_dtypes: Sequence[torch.dtype] = (torch.float32,),
    max_tokens: int = 4,
    backend: str | None = None,
) -> list[str]:
    """Run every serving function and the rule once, on small tensors of its own, so nothing compiles later.

    Args:
        device                      where the model will run
        num_k_heads, num_v_heads    H, HV
        head_k_dim, head_v_dim      K, V
        conv_size                   width of the causal convolution
        dtypes, state_dtypes        of activations, and of the pools
        max_tokens                  longest packet that `decode` will see
        backend                     None: for each function the best that takes it; a name never falls back

    Returns: what was run, one line per function, dtypes and packet length.
    No tensor of the caller is touched. On `eager` nothing compiles and only torch's own set-up is met.
    Raises: as the functions themselves.
    """
    H, HV, K, V = num_k_heads, num_v_heads, head_k_dim, head_v_dim
    channels, warmed = 2 * H * K + HV * V, []
    for dtype in dtypes:
        like = torch.zeros(0, dtype=dtype, device=device)
        x = like.new_zeros(1, 65, channels)
        q, k, v = _split(x, (H, HV, K, V))
        a, A_log = like.new_zeros(1, 65, HV), torch.zeros(HV, device=device)
        g, beta = gate(a, a, A_log, A_log, backend=backend)
        chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, backend=backend)
        fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, output_final_state=True, backend=backend)
        rms_norm_gated(v, v, backend=backend)
        weight = like.new_zeros(channels, conv_size)
        causal_conv1d(x, weight, activation="silu", backend=backend)
        conv_state = like.new_zeros(2, channels, conv_size)
        causal_conv1d_update(x[:, 0], conv_state, weight, activation="silu", backend=backend)
        names = ("gate", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "rms_norm_gated")
        warmed += [f"{name} {dtype}" for name in (*names, "causal_conv1d", "causal_conv1d_update")]
        for state_dtype in state_dtypes:
            warmed += _serve(x, a, A_log, (H, HV, K, V), state_dtype, max_tokens, backend)
    return warmed


def _serve(
    x: torch.Tensor,
    a: torch.Tensor,
    A_log: torch.Tensor,
    heads: tuple[int, int, int, int],
    state_dtype: torch.dtype,
    max_tokens: int,
    backend: str | None,
) -> list[str]:
    """The functions that work on a pool."""
    H, HV, K, V = heads
    pool = torch.zeros(2, HV, V, K, dtype=state_dtype, device=x.device)
    ring = pool.new_zeros(2, 2, HV, V, K)
    index = torch.zeros(1, dtype=torch.int32, device=x.device)
    warmed = []
    for T in sorted({1, max(1, max_tokens)}):
        q, k, v = _split(x[:, :1].expand(1, T, x.shape[2]), heads)
        logits = a[:, :1].expand(1, T, HV)
        gates: dict[str, Any] = {"a": logits, "b": logits, "A_log": A_log, "dt_bias": A_log}
        kept = pool.new_zeros(1, T, HV, V, K)
        table = index[:, None].expand(1, T)
        decode(q, k, v, pool, read_index=index, **gates, backend=backend)
        decode(q, k, v, pool, read_index=table, write_index=table, write="all", **gates, backend=backend)
        decode(q, k, v, pool, write="none", intermediate=kept, **gates, backend=backend)
        decode(q, k, v, ring, ring_pos=index, write="all", round_state=True, **gates, backend=backend)
        decode_functional(q, k, v, pool[:1], **gates, backend=backend)
        commit(pool[None], kept[None], index, index, index)
        warmed += [
            f"{name} {x.dtype} {state_dtype} T={T}" for name in ("decode", "decode_functional", "commit")
        ]
    sizes: dict[str, Any] = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
    decode_packed(x[0, :1], a[0, :1], a[0, :1], A_log, A_log, pool, **sizes, backend=backend)
    q, k, v = _split(x, heads)
    prefill(
        q, k, v, pool, cu_seqlens=torch.tensor([0, 65], device=x.device), a=a, b=a, A_log=A_log,
        state_index=index, backend=backend,
    )  # fmt: skip
    return [*warmed, *(f"{name} {x.dtype} {state_dtype}" for name in ("decode_packed", "prefill"))]


def _split(
    x: torch.Tensor, heads: tuple[int, int, int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q | k | v side by side [1, T, 2 H K + HV V] -> views of each."""
    H, HV, K, V = heads
    q, k, v = x.split([H * K, H * K, HV * V], 2)
    return q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V))
