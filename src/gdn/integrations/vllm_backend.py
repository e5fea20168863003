"""Provide the attention backend that vLLM imports by name for layers on gdn; vLLM is imported with it."""

import functools
from typing import Any

from gdn.integrations.vllm_layer import built


@functools.cache
def _make_backend() -> type:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend

    class GatedDeltaBackend(GDNAttentionBackend):  # type: ignore[misc]
        """Answer for vLLM's metadata of gated delta rule layers, which it builds as for its own kernels."""

        @classmethod
        def supports_batch_invariance(cls) -> bool:
            """Return True if every layer of this process that uses the backend is on gdn.

            A decoded row and a draft have the same bits in any batch, and `prefill` gets batch_invariant=True
            with VLLM_BATCH_INVARIANT=1. Kimi K3's layer has a backend of its own, which vLLM answers for.
            """
            return bool(built) and all(built)

    return GatedDeltaBackend


def __getattr__(name: str) -> Any:
    """Return GatedDeltaBackend, made when vLLM asks for it."""
    if name == "GatedDeltaBackend":
        return _make_backend()
    raise AttributeError(name)
