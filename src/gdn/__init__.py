"""Provide the gated delta rule for training, prefill, decode and speculation, on CPU and GPU.

Every letter and tensor is defined in `gdn.notation`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gdn.integrations.fla_patch import patch_fla
from gdn.integrations.transformers import patch_transformers
from gdn.layers.cache import GatedDeltaNetCache
from gdn.layers.gated_deltanet import GatedDeltaNet
from gdn.layers.kimi_delta_attention import KimiDeltaAttention
from gdn.ops import stages
from gdn.ops.binaries import load_kernels
from gdn.ops.chunk_decoder import ChunkDecoder
from gdn.ops.conv import causal_conv1d, causal_conv1d_update
from gdn.ops.gate import gate
from gdn.ops.history import HistoryPool, allocate_history_pool, decode_with_history, fold_history
from gdn.ops.int16 import Int16Pool, allocate_int16_pool
from gdn.ops.norm import rms_norm_gated
from gdn.ops.prefill import commit, prefill
from gdn.ops.replay import replay_commit, replay_decode
from gdn.ops.rule import chunk_gated_delta_rule, explain, fused_recurrent_gated_delta_rule
from gdn.ops.serving import decode, decode_functional, decode_packed
from gdn.ops.step import decode_step
from gdn.ops.warmup import warmup

if TYPE_CHECKING:
    from gdn.distributed.context import ContextParallel
    from gdn.integrations.transformers_cp import context_parallel

# the version is defined here only: pyproject.toml reads it from this line
__version__ = "0.2.0"

# the rank of g chooses between a decay per head (GDN) and one per key channel (KDA)
chunk_gdn = chunk_kda = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_kda = fused_recurrent_gated_delta_rule

__all__ = [
    "ChunkDecoder",
    "ContextParallel",
    "GatedDeltaNet",
    "GatedDeltaNetCache",
    "HistoryPool",
    "Int16Pool",
    "KimiDeltaAttention",
    "allocate_history_pool",
    "allocate_int16_pool",
    "causal_conv1d",
    "causal_conv1d_update",
    "rms_norm_gated",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "commit",
    "context_parallel",
    "decode",
    "decode_functional",
    "decode_packed",
    "decode_step",
    "decode_with_history",
    "explain",
    "fold_history",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "gate",
    "load_kernels",
    "patch_fla",
    "patch_transformers",
    "prefill",
    "replay_commit",
    "replay_decode",
    "stages",
    "warmup",
]

if not TYPE_CHECKING:
    # a type checker would take every misspelt name for an attribute that this function returns
    def __getattr__(name: str) -> Any:
        """Import what is about many ranks, and torch's collectives with it, when it is first used."""
        if name == "ContextParallel":
            from gdn.distributed.context import ContextParallel

            return ContextParallel
        if name == "context_parallel":
            from gdn.integrations.transformers_cp import context_parallel

            return context_parallel
        if name == "distributed":
            return import_module("gdn.distributed")
        raise AttributeError(f"module 'gdn' has no attribute {name!r}")
