"""Provide lmdeploy's causal convolution on gdn (0.18): its two functions and its backend's class."""

from typing import Any

import torch
from torch import Tensor

from gdn.integrations.engines import activation_name
from gdn.integrations.lmdeploy_step import has_initial_state, once, register_graphs
from gdn.ops import conv as short_conv


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Run the convolution of packed prompts: `gdn.causal_conv1d`.

    x [1, dim, tokens]; weight [dim, W]; seq_idx [tokens] or [1, tokens], the ascending sequence number of
    each token; initial_states [N, dim, W-1] of sequences 0 .. N-1, or None: zeros. Returns [1, dim, tokens].
    NotImplementedError for final states, which lmdeploy's own function does not return either.
    """
    if return_final_states or final_states_out is not None:
        raise NotImplementedError("return_final_states: expected False, got True")
    offsets = None
    if seq_idx is not None:
        # without initial states the number of sequences is unknown: at most one for each token
        N = seq_idx.shape[-1] if initial_states is None else initial_states.shape[0]
        numbers = torch.arange(N + 1, device=x.device, dtype=seq_idx.dtype)
        offsets = torch.searchsorted(seq_idx.reshape(-1).contiguous(), numbers)
    y, _ = short_conv.causal_conv1d(
        x.transpose(1, 2), weight, bias, activation=activation_name(activation),
        initial_state=initial_states, cu_seqlens=offsets,
    )  # fmt: skip
    return y.transpose(1, 2)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Run one step of the convolution: `gdn.causal_conv1d_update`.

    x [B, dim] or [B, dim, T]; conv_state [slots, dim, L], updated in place, newest input in the last column;
    with cache_seqlens [B] a ring, token t in column (cache_seqlens + t) % L. Returns the shape of x.
    """
    y = short_conv.causal_conv1d_update(
        x if x.dim() == 2 else x.transpose(1, 2), conv_state, weight, bias,
        activation=activation_name(activation), state_index=conv_state_indices, ring_pos=cache_seqlens,
    )  # fmt: skip
    return y if x.dim() == 2 else y.transpose(1, 2)


class CausalConv1d:
    """Implement lmdeploy's CausalConv1dImpl: its two functions, and `forward`."""

    def __init__(self) -> None:
        register_graphs(self)

    def conv1d_fn(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        seq_idx: Tensor | None = None,
        initial_states: Tensor | None = None,
        return_final_states: bool = False,
        activation: str | None = None,
    ) -> Tensor:
        return causal_conv1d_fn(
            x, weight, bias, seq_idx, initial_states, return_final_states, None, activation
        )

    def update_fn(
        self,
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        conv_state_indices: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
    ) -> Tensor:
        return causal_conv1d_update(
            x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices
        )

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, gated_delta_meta: Any,
        activation: str,
    ) -> Tensor:  # fmt: skip
        """Run the convolution on x [1, tokens, dim] and update conv_state (lmdeploy 0.18).

        If a part of a prompt is shorter than the window, the window keeps earlier inputs.
        """
        meta, name = gated_delta_meta, activation_name(activation)
        weight = weight[:, 0] if weight.dim() == 3 else weight
        if meta.is_decoding:
            rows = meta.conv_state_indices.shape[0]
            y = short_conv.causal_conv1d_update(
                x[0].unflatten(0, (rows, -1)), conv_state, weight, bias, activation=name,
                state_index=meta.conv_state_indices, ring_pos=meta.cache_seqlens,
            )  # fmt: skip
            return y.flatten(0, 1).unsqueeze(0)
        options: dict[str, Any] = {"activation": name, "cu_seqlens": meta.cu_seqlens}
        if meta.spec_conv_offsets is None:
            y, _ = short_conv.causal_conv1d(
                x, weight, bias, **options, state=conv_state, state_index=meta.conv_state_indices,
                has_initial_state=has_initial_state(meta),
            )  # fmt: skip
            return y
        # a ring: one tap of zero in front of the others makes the window as wide as lmdeploy's
        ring = once(
            meta, "windows", (conv_state.shape, x.device), lambda: _RingWindows(meta, conv_state.shape)
        )
        window = conv_state[ring.read]
        y, _ = short_conv.causal_conv1d(
            x, torch.nn.functional.pad(weight, (1, 0)), bias, **options, state=window,
            state_index=ring.rows, has_initial_state=has_initial_state(meta),
        )  # fmt: skip
        final = window[ring.rows_written].to(x.dtype).to(conv_state.dtype)
        conv_state[ring.write] = torch.where(ring.has_rows, final, conv_state[ring.write])
        return y


class _RingWindows:
    """Hold the indices of the windows of one step in rings [slots, dim, columns], the same for all layers."""

    def __init__(self, meta: Any, shape: torch.Size) -> None:
        (read, write), slots = meta.spec_conv_offsets, meta.conv_state_indices.long()
        rows = torch.arange(len(slots), device=slots.device)
        channels = torch.arange(shape[1], device=slots.device)[:, None]
        is_valid = (slots >= 0) & (slots < shape[0])
        # adding padding repeats the write of the first other row; a mask would need the host to count rows
        self.rows_written = torch.where(is_valid, rows, is_valid.int().argmax() if len(slots) else 0)
        self.rows, self.has_rows = torch.where(is_valid, rows, -1), is_valid.any()
        slots = slots.clamp(0, shape[0] - 1)
        columns = torch.cat([(read[:, :1] - 1) % shape[2], read], 1)
        self.read = (slots[:, None, None], channels, columns[:, None])
        self.write = (slots[self.rows_written, None, None], channels, write[self.rows_written, None])
