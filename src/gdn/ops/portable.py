"""Express operators of this package in torch operators, for programs that run without the package."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6


def decode_functional(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, g: Tensor | None, beta: Tensor | None, a: Tensor | None,
    b: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, cu_seqlens: Tensor | None,
    max_seqlen: int | None, scale: float, lower_bound: float | None, use_qk_l2norm_in_kernel: bool,
    allow_neg_eigval: bool, state_v_first: bool, write: str, null_slot: int | None, round_state: bool,
    exact_packet: bool, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute gdn::decode_functional for one token per row, in torch operators that a compiler can decompose.

        S <- e^g S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q

    Everything is computed in fp32 (fp64 for fp64). Raises NotImplementedError for packets and packed rows,
    because the number of tokens is not known in the graph.
    """
    if cu_seqlens is not None or q.shape[1] != 1:
        raise NotImplementedError(f"q: expected one token per row, got {list(q.shape)}")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    S = (state.mT if state_v_first else state).to(wide)
    keys, queries = (_heads(x, S.shape[1], use_qk_l2norm_in_kernel, wide) for x in (k, q))
    if a is not None and b is not None:
        g = _log_decay(a.to(wide), A_log, dt_bias, lower_bound)
        beta = b.to(wide).sigmoid() * (2 if allow_neg_eigval else 1)
    if g is not None:
        decay = g[:, 0].to(wide).exp()
        # one number for a head, or one for each of its key channels
        S = S * (decay if decay.dim() == 3 else decay[..., None])[..., None]
    d = v[:, 0].to(wide) - (keys[..., None] * S).sum(-2)
    d = d if beta is None else d * beta[:, 0].to(wide)[..., None]
    S = S + keys[..., None] * d[..., None, :]
    o = scale * (queries[..., None] * S).sum(-2)
    after = (S.mT if state_v_first else S).contiguous().to(state.dtype)
    return o.unsqueeze(1).to(v.dtype), after


def _log_decay(a: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Return g of raw logits a [B, 1, HV] or [B, 1, HV, K] in a's dtype."""
    x = a if dt_bias is None else a + dt_bias.to(a.dtype)
    rate = torch.ones((), dtype=a.dtype, device=a.device) if A_log is None else A_log.to(a.dtype).exp()
    rate = rate[:, None] if a.dim() == 4 and A_log is not None else rate
    return -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)


def _heads(x: Tensor, HV: int, is_normalised: bool, dtype: torch.dtype) -> Tensor:
    """Repeat x [B, 1, H, K] to [B, HV, K], after the l2norm if is_normalised."""
    x = x[:, 0].to(dtype)
    if is_normalised:
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)
    return x.repeat_interleave(HV // x.shape[1], dim=1)


def table() -> dict[Any, Any]:
    """Return {operator: function above}, for `ExportedProgram.run_decompositions`."""
    return {torch.ops.gdn.decode_functional.default: decode_functional}
