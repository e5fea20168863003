"""Provide SGLang's gated delta rule functions on gdn, by its names and conventions (SGLang 0.5.23).

States are [slots, HV, V, K] with any slot stride; negative slots are padding and give zeros. Drafts are
verified with protocols P3 and P4: the pool is read, the state after each token goes to an intermediate
buffer, and accepted states are moved into the pool for all layers at once.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gdn.integrations import sglang_dispatch, usage
from gdn.integrations.engines import check_gating, gate_of_channels, is_enabled, packed, per_token
from gdn.integrations.fallback import class_with_fallback, warn_caller
from gdn.integrations.patching import Package, Patch
from gdn.integrations.sglang_commit import (
    fused_mamba_state_scatter_with_mask,
    scatter_mamba_states_after_mtp_verify,
)
from gdn.integrations.sglang_decode import decode_rows
from gdn.integrations.sglang_kda import KDAKernel, fused_recurrent_kda_packed_decode, make_backend
from gdn.integrations.sglang_prefill import chunk_gated_delta_rule, chunk_gated_delta_rule_npu, tracked
from gdn.integrations.vllm import fused_gdn_gating
from gdn.ops.prefill import prefill

__all__ = ["chunk_gated_delta_rule", "chunk_gated_delta_rule_npu", "fused_gdn_gating"]


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
    match_cutedsl_decode: bool = False,
) -> Tensor:
    """Decode, or verify drafts, from raw logits: `gdn.decode`.

    Args:                           shape
        a, b                        [tokens, HV] or [B, T, HV], raw logits
        q, k, v                     [B, T, H, K], ..., or packed with cu_seqlens; strided views are not copied
        initial_state_source        [slots, HV, V, K]
        initial_state_indices       [N] or longer; negative: padding
        disable_state_update        True: the pool is only read
        intermediate_states_buffer  [rows, >= T, HV, V, K]; gets the state after each token
        intermediate_state_indices  [N] or longer, rows of the buffer; None: the row's number
        cache_steps                 not needed: the buffer's own strides count
        retrieve_parent_token       [N, T]: token t starts from the state after token parent[t] < t

        is_kda, lower_bound         a decay per key channel: a [.., HV K] or [.., HV, K], dt_bias [HV K]; its
                                    gate with a lower bound

    Returns o, the shape of v. NotImplementedError with lower_bound alone, cache_ring, match_cutedsl_decode,
    or another softplus than gdn's.
    """
    if lower_bound is not None and not is_kda:
        raise NotImplementedError(f"lower_bound: expected is_kda with it, got {lower_bound} alone")
    check_gating(softplus_beta, softplus_threshold)
    if cache_ring or match_cutedsl_decode:
        raise NotImplementedError("cache_ring, match_cutedsl_decode: expected False, got True")
    gates: dict[str, Any] = {"a": a, "A_log": A_log, "dt_bias": dt_bias}
    if is_kda:
        gates = gate_of_channels(a, A_log, dt_bias, torch.Size((v.shape[2], q.shape[3])))
        gates["lower_bound"] = lower_bound
    gates["a"], gates["b"] = per_token(gates["a"], q, 4 if is_kda else 3), per_token(b, q)
    return decode_rows(
        (q, k, v, scale, use_qk_l2norm_in_kernel), gates, initial_state_source, initial_state_indices,
        cu_seqlens, disable_state_update, intermediate_states_buffer, intermediate_state_indices,
        retrieve_parent_token,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    disable_state_update: bool = False,
    disable_output_calculation: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """Run `fused_sigmoid_gating_delta_rule_update` with activated gates: g and beta [B, T, HV].

    The output is computed even with disable_output_calculation.
    """
    if beta is not None and beta.dim() == v.dim():
        raise NotImplementedError(f"beta: expected shape [B, T, HV], got {list(beta.shape)}")
    return decode_rows(
        (q, k, v, scale, use_qk_l2norm_in_kernel), {"g": g, "beta": beta}, initial_state_source,
        initial_state_indices, cu_seqlens, disable_state_update, intermediate_states_buffer,
        intermediate_state_indices, retrieve_parent_token,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule_packed_decode(
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
) -> tuple[Tensor, Tensor]:
    """Decode one token per row from the convolution's output: `gdn.decode_packed`; beta is not rounded.

    mixed_qkv [B, 2 H K + HV V], any row pitch; a, b [B, HV]; initial_state [slots, HV, V, K], updated in
    place; out [B, 1, HV, V], written; ssm_state_indices [B], negative: padding. Returns (out, initial_state).
    """
    packed(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices,
        use_qk_l2norm_in_kernel, None,
    )  # fmt: skip
    return out, initial_state


class GDNKernel:
    """Implement SGLang's kernel interface (`LinearAttnKernelBase`) on gdn, for its GDNKernelDispatcher.

    Snapshots for prefix caching stay fp32; SGLang rounds them to bf16 on the way to an fp32 pool. Rings of
    SGLang's ReplaySSM raise NotImplementedError.
    """

    uses_state_checkpoints = False
    supports_fused_chain_verify = False
    supports_strided_target_verify_qkv = True
    supports_track_state_snapshot = True
    supports_packed_decode = True

    @staticmethod
    def arguments_of_original(
        original: type, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments for SGLang's method; None where it does not write the snapshots asked for."""
        if name == "extend" and kwargs.get("track_state") is not None:
            return (args, kwargs) if getattr(original, "supports_track_state_snapshot", False) else None
        if name == "target_verify" and not getattr(original, "supports_strided_target_verify_qkv", False):
            args = tuple([x.contiguous() if isinstance(x, Tensor) else x for x in args])
            kwargs = kwargs | {x: kwargs[x].contiguous() for x in "qkv" if isinstance(kwargs.get(x), Tensor)}
        return args, kwargs

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor,
        ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Decode one token per request; o has the shape of v."""
        o = fused_sigmoid_gating_delta_rule_update(
            A_log, a, dt_bias, 1.0, 20.0, q, k, v, b, ssm_states, cache_indices, None, True, query_start_loc
        )
        usage.count_served("sglang", "decode")
        return o

    def packed_decode(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, scale: float,
        ssm_states: Tensor, cache_indices: Tensor, num_v_heads: int, head_v_dim: int, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Decode one token per request from the convolution's output; return [1, B, HV, V]."""
        if any(value is not None for name, value in kwargs.items() if name.startswith("replayssm")):
            raise NotImplementedError("packed_decode: expected no ReplaySSM rings, got some")
        out = mixed_qkv.new_empty(mixed_qkv.shape[0], 1, num_v_heads, head_v_dim)
        packed(mixed_qkv, a, b, A_log, dt_bias, scale, ssm_states, out, cache_indices, True, None)
        usage.count_served("sglang", "decode")
        return out.transpose(0, 1)

    def target_verify(
        self, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *,
        ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor,
        intermediate_states_buffer: Tensor, intermediate_state_indices: Tensor | None,
        cache_steps: int | None, retrieve_parent_token: Tensor | None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Run drafts of each request; store their states in the buffer, not the pool; o has v's shape."""
        o = fused_sigmoid_gating_delta_rule_update(
            A_log, a, dt_bias, 1.0, 20.0, q, k, v, b, ssm_states, cache_indices, None, True, query_start_loc,
            disable_state_update=True, intermediate_states_buffer=intermediate_states_buffer,
            intermediate_state_indices=intermediate_state_indices, cache_steps=cache_steps,
            retrieve_parent_token=retrieve_parent_token,
        )  # fmt: skip
        usage.count_served("sglang", "verify")
        return o

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor,
        cache_indices: Tensor, query_start_loc: Tensor, inplace_update: bool = True, **kwargs: Any,
    ) -> tuple[Tensor, None, None]:  # fmt: skip
        """Run prompts in place. track_state [N, HV, V, K] fp32 in kwargs gets in row n the state before chunk
        track_chunk_idx[n] of that request (negative: none; the row is then undefined)."""
        slots, track = cache_indices[: query_start_loc.shape[0] - 1], kwargs.get("track_state")
        if track is None:
            o = prefill(
                q, k, v, ssm_states, g=g, beta=beta, cu_seqlens=query_start_loc, state_index=slots,
                use_qk_l2norm_in_kernel=True, state_v_first=True, update_state=inplace_update,
            )  # fmt: skip
        else:
            o = tracked(
                (q, k, v), {"g": g, "beta": beta}, ssm_states, slots, query_start_loc, track,
                kwargs["track_chunk_idx"], inplace_update, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
        usage.count_served("sglang", "prefill")
        return o, None, None


_LINEAR, _FLA = "sglang.kernels.ops.attention.linear", "sglang.kernels.ops.attention.fla"
_KERNELS = "sglang.srt.layers.attention.linear.kernels"
_SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
PACKAGE = Package(
    (
        (f"{_KERNELS}.gdn_triton", "TritonGDNKernel", GDNKernel),
        (f"{_KERNELS}.kda_triton", "TritonKDAKernel", KDAKernel),
        (
            f"{_LINEAR}.fused_sigmoid_gating_recurrent",
            "fused_sigmoid_gating_delta_rule_update",
            fused_sigmoid_gating_delta_rule_update,
        ),
        (f"{_LINEAR}.fused_gdn_gating", "fused_gdn_gating", fused_gdn_gating),
        (
            f"{_FLA}.fused_recurrent",
            "fused_recurrent_gated_delta_rule_packed_decode",
            fused_recurrent_gated_delta_rule_packed_decode,
        ),
        (
            f"{_FLA}.fused_recurrent",
            "fused_recurrent_gated_delta_rule_update",
            fused_recurrent_gated_delta_rule_update,
        ),
        (
            f"{_FLA}.fused_recurrent",
            "fused_recurrent_kda_packed_decode",
            fused_recurrent_kda_packed_decode,
        ),
        (f"{_FLA}.chunk", "chunk_gated_delta_rule", chunk_gated_delta_rule),
        (_SCATTER, "fused_mamba_state_scatter_with_mask", fused_mamba_state_scatter_with_mask),
        (_SCATTER, "scatter_mamba_states_after_mtp_verify", scatter_mamba_states_after_mtp_verify),
    )
)


def patch_sglang() -> Patch:
    """Run SGLang's gated delta rule layers on gdn, in this process: before the attention backend is made.

    The kernel classes that its dispatchers create for `--linear-attn-backend triton` become GDNKernel and
    KDAKernel, subclasses of them; the functions are replaced in every imported module. Calls that gdn rejects
    go to SGLang's own functions. On some GPUs SGLang's defaults name another kernel: the patch warns and
    names the flag.

    Returns: a Patch: call `undo()`, or use it in a `with` statement. Raises ImportError without SGLang.
    """
    if torch.cuda.is_available():
        cuda = int((torch.version.cuda or "0").split(".")[0])
        for sentence in sglang_dispatch.needed_flags(torch.cuda.get_device_capability(), cuda):
            warn_caller(f"patch_sglang: {sentence}", UserWarning)
    return PACKAGE.patch()


def register() -> None:
    """Register gdn with SGLang, if GDN_ENGINES names it: the entry point of `sglang.srt.plugins`."""
    if is_enabled("sglang"):
        register_backend()


def register_backend() -> None:
    """Add "gdn" to SGLang's kernel backends of linear attention; a second call does nothing.

    --linear-attn-decode-backend gdn, --linear-attn-prefill-backend gdn and --linear-attn-verify-backend gdn
    then select gdn's kernel, whatever SGLang's defaults are; without them nothing changes. With a decay per
    key channel the first one brings the convolution to gdn as well. Call it before SGLang's arguments are
    parsed. Raises ImportError without SGLang.
    """
    choices = import_module("sglang.srt.arg_groups.choices")
    if sglang_dispatch.NAME in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.add_linear_attn_kernel_backend_choices([sglang_dispatch.NAME])
    for path, name, own, ours in (
        (sglang_dispatch.BACKEND, "GDNKernelDispatcher", "TritonGDNKernel", GDNKernel),
        (sglang_dispatch.CHANNEL_BACKEND, "KDAKernelDispatcher", "TritonKDAKernel", KDAKernel),
    ):
        backend = import_module(path)
        kernel = class_with_fallback(ours, getattr(backend, own))
        dispatcher = sglang_dispatch.make_dispatcher(getattr(backend, name), kernel)
        HookRegistry.register(f"{path}.{name}", dispatcher, HookType.REPLACE)
    path, name = sglang_dispatch.CHANNEL_BACKEND, "KDAAttnBackend"
    made = make_backend(getattr(import_module(path), name))
    HookRegistry.register(f"{path}.{name}", made, HookType.REPLACE)
