"""Make gdn a backend of SGLang's linear attention: `--linear-attn-decode-backend gdn` and its relatives.

SGLang turns a name that it does not know into the member CUSTOM of its enumeration, and its dispatchers of
kernels reject CUSTOM. Ours are subclasses that put gdn's kernel in the phases whose flag says gdn.
"""

from typing import Any

NAME = "gdn"
BACKEND = "sglang.srt.layers.attention.linear.gdn_backend"
CHANNEL_BACKEND = "sglang.srt.layers.attention.linear.kda_backend"


def make_dispatcher(original: type, kernel: type) -> type:
    """Return a subclass of one of SGLang's dispatchers; kernel: gdn's subclass of its Triton kernel."""
    from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
    from sglang.srt.runtime_context import get_exec

    def is_ours(backend: Any, *flags: str | None) -> bool:
        """Return True if the first flag that is set names gdn; SGLang's enumeration has no such member."""
        return backend.is_custom() and next((flag for flag in flags if flag), None) == NAME

    class Dispatcher(original):  # type: ignore[misc, valid-type]
        def __init__(self, decode_backend: Any, prefill_backend: Any, verify_backend: Any = None) -> None:
            flags, triton = get_exec().mamba, LinearAttnKernelBackend.TRITON
            base, verify = flags.linear_attn_backend, flags.linear_attn_verify_backend
            decodes = is_ours(decode_backend, flags.linear_attn_decode_backend, base)
            extends = is_ours(prefill_backend, flags.linear_attn_prefill_backend, base)
            # without a flag of its own verification follows decode
            verifies = verify == NAME or (verify is None and decodes)
            super().__init__(
                triton if decodes else decode_backend,
                triton if extends else prefill_backend,
                triton if verifies else verify_backend,
            )
            if decodes or extends or verifies:
                ours = kernel()
                if decodes:
                    self.decode_kernel = ours
                if extends:
                    self.extend_kernel = ours
                for name in ("supports_packed_decode", "supports_packed_decode_safe_gate"):
                    setattr(self, name, getattr(self.decode_kernel, name, False))
                if verifies:
                    self.verify_kernel = self.tree_verify_kernel = ours
                    self.verify_kernel_is_flashinfer = False

    Dispatcher.__name__ = Dispatcher.__qualname__ = original.__name__
    return Dispatcher


def needed_flags(capability: tuple[int, int], cuda: int) -> list[str]:
    """Return a sentence for each phase that SGLang may take away from its Triton kernel, with the flag.

    capability: of the GPU. cuda: the major version of the CUDA runtime. What SGLang decides depends on the
    model and the dtype of its states, too, which are not known yet.
    """
    major, flags = capability[0], []
    if major == 9 or (major == 10 and cuda >= 13):
        states = "fp32" if major == 9 else "bf16"
        flags.append(
            f"prefill of models with K = V = 128 and {states} states runs on FlashInfer unless SGLang gets "
            "--linear-attn-prefill-backend triton"
        )
    if major == 10:
        flags.append(
            "prompts of models with a decay per key channel and a lower bound run on FlashInfer unless "
            "SGLang gets --linear-attn-prefill-backend triton"
        )
        flags.append(
            "decode and verification with bf16 states run on FlashInfer unless SGLang gets "
            "--linear-attn-decode-backend triton"
        )
    return flags
