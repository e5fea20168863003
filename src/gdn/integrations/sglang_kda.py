"""Provide SGLang's packed decode for a decay per key channel (KDA) on gdn, by its name (SGLang 0.5.23)."""

import torch
from torch import Tensor

from gdn.integrations.engines import gate_of_channels, packed


def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode one token per request, with a decay per key channel: `gdn.decode_packed`, nothing copied.

    a [B, HV K], dt_bias [HV K]; the rest as `fused_recurrent_gated_delta_rule_packed_decode`.
    """
    HV, _, K = initial_state.shape[-3:]
    gate = gate_of_channels(a, A_log, dt_bias, torch.Size((HV, K)))
    packed(
        mixed_qkv, gate["a"], b, gate["A_log"], gate["dt_bias"], scale, initial_state, out, ssm_state_indices,
        use_qk_l2norm_in_kernel, None, lower_bound,
    )  # fmt: skip
    return out, initial_state
