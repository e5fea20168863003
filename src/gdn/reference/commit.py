"""Define the correct results of `gdn.commit`: a loop over entries, which copies its arguments and is slow."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gdn.notation import Index
from gdn.reference.integers import StoredStates


def commit(
    dst: Tensor,
    src: Tensor,
    dst_index: Index,
    src_row: Index,
    step: Index,
    *,
    extra_dst_index: Index | None = None,
    extra_step: Index | None = None,
) -> Tensor:
    """Compute `gdn.commit` entry by entry; return a copy of dst."""
    out = dst.clone()
    for d, r, t in _copies(dst, src, src_row, ((dst_index, step), (extra_dst_index, extra_step))):
        out[:, d] = src[:, r, t]
    return out


def commit_to_int16(
    dst: Tensor,
    column_scale: Tensor,
    src: Tensor,
    dst_index: Index,
    src_row: Index,
    step: Index,
    *,
    extra_dst_index: Index | None = None,
    extra_step: Index | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Compute `gdn.commit` into an Int16Pool entry by entry; return copies of its states and scales."""
    out = StoredStates(dst, column_scale, state_v_first, dtype).clone()
    for d, r, t in _copies(dst, src, src_row, ((dst_index, step), (extra_dst_index, extra_step))):
        S = src[:, r, t].to(dtype)
        out.write((slice(None), d), S.transpose(-1, -2) if state_v_first else S)
    assert out.column_scale is not None
    return out.state, out.column_scale


def _copies(
    dst: Tensor, src: Tensor, src_row: Index, places: tuple[tuple[Index | None, Index | None], ...]
) -> Iterator[tuple[int, int, int]]:
    """Yield (slot, row, step) of the entries of a commit that are in range."""
    for index, steps in places:
        if index is None or steps is None:
            continue
        for i in range(index.shape[0]):
            d, r, t = int(index[i]), int(src_row[i]), int(steps[i])
            if 0 <= d < dst.shape[1] and 0 <= r < src.shape[1] and 0 <= t < src.shape[2]:
                yield d, r, t
