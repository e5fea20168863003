"""The gates from raw logits: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), and their gradients.

Computed in float64 where the device has it: there is one number per token and head, and softplus(-100) is
below the normal range of fp32.
"""

import torch

from gdn.backends.eager.gates import softplus, wide
from gdn.notation import HeadParam, PerHead


def log_decay(a: PerHead, A_log: HeadParam, dt_bias: HeadParam | None) -> PerHead:
    """g = -exp(A_log) softplus(a + dt_bias) [..., HV] in `wide`."""
    x = _shifted(a, dt_bias)
    return -A_log.to(x.dtype).exp() * softplus(x)


def log_decay_bwd(
    a: PerHead, A_log: HeadParam, dt_bias: HeadParam | None, dg: PerHead
) -> tuple[PerHead, HeadParam, HeadParam | None]:
    """da, dA_log, ddt_bias, each in its tensor's dtype, summed over tokens in `wide`."""
    x = _shifted(a, dt_bias)
    dg = dg.to(x.dtype)
    # 0 times NaN or inf must not reach the sums: a token of no sequence holds anything, a reset has g = -inf
    is_zero = dg == 0
    dA_log = (dg * log_decay(a, A_log, dt_bias)).masked_fill_(is_zero, 0).reshape(-1, A_log.shape[0]).sum(0)
    dx = (-A_log.to(x.dtype).exp() * torch.sigmoid(x) * dg).masked_fill_(is_zero, 0)
    ddt_bias = None if dt_bias is None else dx.reshape(-1, A_log.shape[0]).sum(0).to(dt_bias.dtype)
    return dx.to(a.dtype), dA_log.to(A_log.dtype), ddt_bias


def gate(a: PerHead, b: PerHead, A_log: HeadParam, dt_bias: HeadParam | None) -> tuple[PerHead, PerHead]:
    """See `gdn.gate`."""
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    beta = torch.sigmoid(b.to(wide(b.device)))
    return log_decay(a, A_log, dt_bias).to(dtype), beta.to(dtype)


def gate_bwd(
    a: PerHead, b: PerHead, A_log: HeadParam, dt_bias: HeadParam | None, dg: PerHead, dbeta: PerHead
) -> tuple[PerHead, PerHead, HeadParam, HeadParam | None]:
    """da, db, dA_log, ddt_bias."""
    da, dA_log, ddt_bias = log_decay_bwd(a, A_log, dt_bias, dg)
    y = b.to(wide(b.device))
    # sigmoid(-y), not 1 - sigmoid(y): the difference cancels for large y
    db = dbeta.to(y.dtype) * torch.sigmoid(y) * torch.sigmoid(-y)
    return da, db.to(b.dtype), dA_log, ddt_bias


def _shifted(a: PerHead, dt_bias: HeadParam | None) -> PerHead:
    x = a.to(wide(a.device))
    return x if dt_bias is None else x + dt_bias.to(x.dtype)
