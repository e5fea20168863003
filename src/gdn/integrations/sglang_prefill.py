"""Provide SGLang's functions for whole prompts: in place by slot, with states for its prefix cache."""

from typing import Any

import torch
from torch import Tensor

from gdn.ops.prefill import commit, prefill

CHUNK = 64  # tokens between the states that prefix caching may store


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:
    """Run whole prompts on the pool, in place: `gdn.prefill`, with the state before every chunk of 64 tokens.

    initial_state [slots, HV, V, K] or None: zeros; initial_state_indices [N], None: in order; inplace_update
    False: the pool is only read. head_first: q, k, v [B, H, T, K] and so on.

    Returns (o, None, h): h [1, rows, HV, V, K] in fp32, where SGLang rounds to the dtype of q; the chunks of
    a sequence are consecutive, followed by those of the next; rows past the last chunk are undefined.
    Cost: memory for h, (tokens / 64 + N) HV K V x 4 bytes, which `tracked` does not need.
    """
    if head_first:
        q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    (B, T), offsets, shape = q.shape[:2], cu_seqlens, v.shape
    if offsets is None:
        offsets = torch.arange(B + 1, device=q.device) * T
    if initial_state is None:
        N = offsets.shape[0] - 1
        initial_state = q.new_zeros(N, *v.shape[2:], q.shape[3], dtype=torch.float32)
    q, k, v, g, beta = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g, beta))
    o, h = with_chunk_states(
        (q, k, v), {"g": g, "beta": beta}, initial_state, initial_state_indices, offsets, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, update_state=inplace_update,
    )  # fmt: skip
    o = o.view(shape)
    return o.transpose(1, 2) if head_first else o, None, h.unsqueeze(0)


def with_chunk_states(
    tokens: tuple[Tensor, Tensor, Tensor], gates: dict[str, Any], pool: Tensor, indices: Tensor | None,
    offsets: Tensor, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `gdn.prefill` on q, k, v and gates; return o and the state before each chunk [rows, ...]."""
    q, k, v = tokens
    N = offsets.shape[0] - 1
    indices = torch.arange(N, device=q.device) if indices is None else indices[:N]
    chunks = (offsets.diff() + CHUNK - 1) // CHUNK
    at = chunks.cumsum(0, dtype=chunks.dtype) - chunks
    # an upper bound: the host does not read the number of chunks
    rows = q.shape[1] // CHUNK + N
    h = q.new_empty(rows + 1, *pool.shape[1:], dtype=torch.float32)
    begin = pool.index_select(0, indices.clamp(0, pool.shape[0] - 1)).to(torch.float32)
    o = prefill(
        q, k, v, pool, **gates, cu_seqlens=offsets, state_index=indices, state_v_first=True,
        checkpoints=h, checkpoint_every=CHUNK, checkpoint_offsets=at + 1, **options,
    )  # fmt: skip
    # the state after a full last chunk is stored where the next sequence begins; an empty one has no chunk
    h[torch.where(chunks > 0, at, rows)] = begin
    return o, h[:rows]


def chunk_gated_delta_rule_npu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run sgl-kernel-npu's function of that name: states [N, HV, K, V] that the caller gathers, only read.

    Returns (o, final_state fp32 or None, h [1, rows, HV, K, V] as in `chunk_gated_delta_rule`).
    """
    if initial_state is None:
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        HV, V = (v.shape[1] if head_first else v.shape[2]), v.shape[3]
        states = q.new_zeros(N, HV, V, q.shape[3], dtype=torch.float32)
    else:
        states = initial_state.mT.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    o, _, h = chunk_gated_delta_rule(
        q, k, v, g, beta, scale, states, None, cu_seqlens, head_first, use_qk_l2norm_in_kernel
    )
    return o, states.mT if output_final_state else None, h.mT


def tracked(
    tokens: tuple[Tensor, Tensor, Tensor], gates: dict[str, Any], pool: Tensor, indices: Tensor,
    offsets: Tensor, track_state: Tensor, track_chunk_idx: Tensor, inplace_update: bool, **options: Any,
) -> Tensor:  # fmt: skip
    """Run `gdn.prefill` on q, k, v and gates; store one more state of each sequence in track_state [N, ...].

    The states go through an fp32 pool of 2 N slots, because a snapshot is stored in the pool of its state.
    The tracked states are never rounded, and no other chunk's state is stored.
    """
    (q, k, v), N, slots = tokens, indices.shape[0], pool.shape[0]
    rows = torch.arange(N, dtype=indices.dtype, device=pool.device)
    states = pool.new_empty(2 * N, *pool.shape[1:], dtype=torch.float32)
    states[:N] = pool.index_select(0, indices.clamp(0, slots - 1))
    is_row = (indices >= 0) & (indices < slots)
    o = prefill(
        q, k, v, states, **gates, cu_seqlens=offsets, state_index=rows.where(is_row, -1),
        state_v_first=True, snapshot_pos=track_chunk_idx[:N] * CHUNK, snapshot_index=rows + N, **options,
    )  # fmt: skip
    track_state[:N] = states[N:]
    if inplace_update:
        commit(pool[None], states[None, :, None], indices, rows, torch.zeros_like(rows))
    return o
