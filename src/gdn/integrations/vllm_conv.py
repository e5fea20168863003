"""Provide vLLM's causal convolution on gdn (vLLM 0.33.0); see `gdn.integrations.vllm`."""

from typing import Any

import torch
from torch import Tensor

from gdn.integrations.engines import activation_name, first, from_rows, null_slot, to_rows, with_tokens
from gdn.ops import conv as short_conv

PAD_SLOT_ID, NULL_BLOCK_ID = -1, 0


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    null_block_id: int = NULL_BLOCK_ID,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """Run the convolution of whole prompts: `gdn.causal_conv1d` on a pool.

    x [dim, tokens], any strides; conv_states [blocks, dim, >= W - 1], updated in place: a window lies in the
    first W - 1 columns. cache_indices [N]; has_initial_state [N] bool, None: none has. metadata is not read,
    nor is anything else on the host. Returns [dim, tokens], zero for padding.
    """
    N = query_start_loc.shape[0] - 1
    if has_initial_state is None:
        has_initial_state = torch.zeros(N, dtype=torch.bool, device=x.device)
    y, _ = short_conv.causal_conv1d(
        x.t().unsqueeze(0), weight, bias, activation=activation_name(activation), cu_seqlens=query_start_loc,
        state=conv_states[:, :, : weight.shape[1] - 1], state_index=first(cache_indices, N),
        has_initial_state=first(has_initial_state, N),
        null_slot=None if cache_indices is None else null_slot(null_block_id),
    )  # fmt: skip
    return y[0].t()


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = NULL_BLOCK_ID,
    validate_data: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Run one step of the convolution: `gdn.causal_conv1d_update`; the input is overwritten without `out`.

    x: [B, dim], [B, dim, T], or with query_start_loc [tokens, dim], rows of up to max_query_len tokens.
    conv_state [blocks, dim, L], updated in place, a window in its first W - 1 columns; with
    num_accepted_tokens [B] it slides, L >= W - 1 + T - 1. Padding gives zeros. Returns x or out.
    """
    null = None if conv_state_indices is None else null_slot(null_block_id)
    options: dict[str, Any] = {"activation": activation_name(activation), "null_slot": null}
    out = x if out is None else out
    window = conv_state if num_accepted_tokens is not None else conv_state[:, :, : weight.shape[1] - 1]
    if query_start_loc is not None:
        N = query_start_loc.shape[0] - 1
        where = (query_start_loc, first(conv_state_indices, N), first(num_accepted_tokens, N), max_query_len)
        return out.copy_(_packed(x, window, weight, bias, *where, **options))
    rows, y = (t if t.dim() == 2 else t.transpose(1, 2) for t in (x, out))
    short_conv.causal_conv1d_update(
        rows, window, weight, bias, state_index=first(conv_state_indices, x.shape[0]),
        num_accepted=first(num_accepted_tokens, x.shape[0]), out=y, **options,
    )  # fmt: skip
    return out


def _packed(
    x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, index: Tensor | None,
    num_accepted: Tensor | None, T: int, **options: Any,
) -> Tensor:  # fmt: skip
    """Run rows of any length, each shifting its window; with num_accepted, rows of up to T, each sliding it.

    A row shorter than T also writes to the columns of tokens that it does not have: accepted counts never
    reach those, and the next packet overwrites them.
    """
    if num_accepted is None or x.shape[0] == 0:
        y, _ = short_conv.causal_conv1d(
            x.unsqueeze(0), weight, bias, cu_seqlens=offsets, state=window, state_index=index, **options
        )
        return y[0]
    if index is None:
        index = torch.arange(offsets.shape[0] - 1, device=x.device)
    y = short_conv.causal_conv1d_update(
        to_rows(x, offsets, T), window, weight, bias, num_accepted=num_accepted,
        state_index=with_tokens(index, offsets, -1), **options,
    )  # fmt: skip
    return from_rows(y, offsets, x.shape[0])
