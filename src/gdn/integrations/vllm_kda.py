"""Provide vLLM's functions for a decay per key channel (KDA) on gdn, by its names and positions (0.33.0).

The layers of Kimi-Linear and Kimi K3 call them. States, blocks, padding and speculation are those of
`gdn.integrations.vllm`. Logits are raw: raw_g [1, tokens, H, K] and raw_beta [1, tokens, H], and dt_bias or
g_bias is [H K] or [H, K].
"""

from typing import Any

from torch import Tensor

from gdn.integrations.engines import first
from gdn.integrations.vllm_conv import NULL_BLOCK_ID
from gdn.ops.rule import chunk_gated_delta_rule as chunk_rule
from gdn.ops.rule import has_kernel
from gdn.ops.serving import decode, decode_packed


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a few tokens per row on vLLM's state blocks, in place: `gdn.decode`; q and k are normalised.

    Args:                    shape
        initial_state        [blocks, H, V, K], updated in place
        ssm_state_indices    [N], a row's block, or [N, 1 + drafts]: token t is written to column t
        num_accepted_tokens  [N] with a table: the column that is read, counted from 1
        out                  [1, tokens, H, V] or None: gets the result
        fuse_gate            how vLLM's kernels run, not read

    Returns (o [1, tokens, H, V], initial_state).
    """
    N = cu_seqlens.shape[0] - 1
    index = first(ssm_state_indices, N)
    assert index is not None
    longest = q.shape[1]
    where: dict[str, Any] = {"read_index": index, "num_accepted": first(num_accepted_tokens, N)}
    if index.dim() == 2:
        # a row has no more tokens than the table has columns
        longest = index.shape[1]
        where |= {"write": "all", "write_index": index}
    o = decode(
        q, k, v, initial_state, a=raw_g, b=raw_beta, **_gate_parameters(A_log, dt_bias, raw_g),
        lower_bound=lower_bound, cu_seqlens=cu_seqlens, max_seqlen=longest, null_slot=NULL_BLOCK_ID, out=out,
        use_qk_l2norm_in_kernel=True, state_v_first=True, **where,
    )  # fmt: skip
    return o, initial_state


def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode one token per row from the convolution's output: `gdn.decode_packed`, nothing copied.

    mixed_qkv [B, 2 H K + H V], any row pitch; initial_state [blocks, H, V, K], updated in place;
    state_indices [B]; out [1, B, H, V] or None. Returns (out, initial_state).
    """
    H, V, K = initial_state.shape[-3:]
    o = decode_packed(
        mixed_qkv, raw_g[0], raw_beta[0], state=initial_state, **_gate_parameters(A_log, dt_bias, raw_g),
        lower_bound=lower_bound, num_k_heads=H, head_k_dim=K, head_v_dim=V, scale=scale,
        use_qk_l2norm_in_kernel=True, state_v_first=True, read_index=state_indices, null_slot=NULL_BLOCK_ID,
        out=None if out is None else out[0],
    )  # fmt: skip
    return (o.unsqueeze(0) if out is None else out), initial_state


def chunk_kda_with_fused_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run whole prompts: `gdn.chunk_kda` with states [N, H, V, K]; `out`, of the shape of v, gets o.

    Returns (o, final_state fp32 or None). Raises: TypeError for an argument that is not listed, which vLLM
    ignores; NotImplementedError on a GPU where `eager` alone computes the call: vLLM has a kernel.
    """
    if kwargs:
        raise TypeError(f"{next(iter(kwargs))}: expected no such argument, got one")
    if not has_kernel(q, v, raw_g):
        raise NotImplementedError(f"raw_g: expected a call with a kernel, got {list(raw_g.shape)}")
    o, final_state = chunk_rule(
        q, k, v, raw_g, raw_beta, **_gate_parameters(A_log, g_bias, raw_g), lower_bound=lower_bound,
        scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, state_v_first=True, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return (o if out is None else out.copy_(o)), final_state


def _gate_parameters(A_log: Tensor, bias: Tensor | None, raw_g: Tensor) -> dict[str, Any]:
    """Return A_log [H] and dt_bias [H, K]; checkpoints have further axes, or a flat bias."""
    return {
        "A_log": A_log.view(-1),
        "dt_bias": None if bias is None else bias.view(raw_g.shape[2:]),
    }


_KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
SERVED = (
    (f"{_KDA}.fused_recurrent", "fused_recurrent_kda", fused_recurrent_kda),
    (f"{_KDA}.fused_recurrent", "fused_recurrent_kda_packed_decode", fused_recurrent_kda_packed_decode),
    (f"{_KDA}.chunk", "chunk_kda_with_fused_gate", chunk_kda_with_fused_gate),
)
