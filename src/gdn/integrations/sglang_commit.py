"""Provide SGLang's functions that move the states of accepted drafts into their pools, by its names."""

from typing import Any

import torch
from torch import Tensor

from gdn.ops.prefill import commit


def fused_mamba_state_scatter_with_mask(
    dst: Tensor,
    src: Tensor,
    dst_indices_raw: Tensor,
    step_indices_raw: Tensor,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Move the states of accepted tokens into the pool, for all layers in one launch: `gdn.commit`.

    dst [L, slots, ...], src [L, rows, T, ...]; per request a slot, a step (negative: none) and a row of src
    (None: its number).
    """
    if src_indices_raw is None:
        src_indices_raw = torch.arange(step_indices_raw.shape[0], device=dst.device)
    commit(dst, src, dst_indices_raw, src_indices_raw, step_indices_raw)


def scatter_mamba_states_after_mtp_verify(
    mamba_caches: Any,
    state_indices_tensor: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Move accepted states and windows into their pools, and tracked ones into slots of their own.

    It runs `gdn.commit`: one launch for each pool, with all its layers and both slots.

    Args:                       shape
        mamba_caches            SGLang's SpeculativeState
          .temporal             [L, slots, HV, V, K]; .intermediate_ssm [L, rows, T, HV, V, K]
          .conv                 each [L, slots, D, W-1]; .intermediate_conv_window each [L, rows, T, D, W-1],
                                one after another in memory or overlapping
        state_indices_tensor    [n] slots; last_correct_step_indices [n] steps, negative: none
        mamba_track_indices     [n] slots or None; mamba_steps_to_track [n] steps, negative: none
        src_indices_raw         [n] rows; None: the request's number
    """
    c, steps, rows = mamba_caches, last_correct_step_indices, src_indices_raw
    if rows is None:
        rows = torch.arange(steps.shape[0], device=steps.device)
    extra_step = None if mamba_track_indices is None else mamba_steps_to_track
    pairs = [(c.temporal, c.intermediate_ssm), *zip(c.conv, c.intermediate_conv_window, strict=True)]
    for dst, src in pairs:
        if dst.numel() > 0:
            # if a later pair is rejected, SGLang's own function writes the same states once more
            commit(
                dst, src, state_indices_tensor, rows, steps, extra_dst_index=mamba_track_indices,
                extra_step=extra_step,
            )  # fmt: skip
