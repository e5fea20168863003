"""The gated delta rule: training, prefill, decode and speculation, on CPU and GPU. The legend is `gdn.notation`."""

from gdn.ops import stages
from gdn.ops.gate import gate
from gdn.ops.rule import chunk_gated_delta_rule, explain, fused_recurrent_gated_delta_rule

chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "explain",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "gate",
    "stages",
]
