"""Decode rows of tokens by SGLang's conventions: what its functions and kernels have in common."""

from typing import Any

from torch import Tensor

from gdn.integrations.engines import first
from gdn.ops.serving import decode


def decode_rows(
    tokens: tuple[Tensor, Tensor, Tensor, float | None, bool],
    gates: dict[str, Any],
    state: Any,
    indices: Tensor | None,
    cu_seqlens: Tensor | None,
    is_read_only: bool,
    kept: Tensor | None,
    rows: Tensor | None,
    parent: Tensor | None,
) -> Tensor:
    """Run `gdn.decode` on slots of a pool; `kept` gets the state after each token, in the rows of `rows`.

    tokens: q, k, v, the scale, and True to normalise q and k.
    """
    q, k, v, scale, l2norm = tokens
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    where: dict[str, Any] = {"read_index": first(indices, N), "write": "none" if is_read_only else "final"}
    if kept is not None:
        where |= {"intermediate": kept, "intermediate_row": first(rows, N), "parent": first(parent, N)}
    if cu_seqlens is not None:
        # no row has more tokens than its buffer has steps
        bound = min([q.shape[1], *(x.shape[1] for x in (kept, parent) if x is not None)])
        where |= {"cu_seqlens": cu_seqlens, "max_seqlen": bound}
    return decode(
        q, k, v, state, **gates, **where, scale=scale, use_qk_l2norm_in_kernel=l2norm, state_v_first=True
    )
