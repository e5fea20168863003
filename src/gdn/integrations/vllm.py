"""Provide vLLM's gated delta rule functions on gdn, by its names, positions and conventions (vLLM 0.33.0).

States are [blocks, HV, V, K] with any block stride; block 0 (NULL_BLOCK_ID) is padding. Speculation is
protocol P2: a table of blocks per row, read at column num_accepted - 1; token t is written to column t. Rows
of padding give zeros; vLLM's own functions do not write some of them.
"""

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gdn.integrations import vllm_kda, vllm_kda_layer, vllm_layer
from gdn.integrations.engines import check_gating, first, is_enabled, packed, per_token
from gdn.integrations.fallback import call_with_fallback, warn_caller
from gdn.integrations.patching import Package, Patch
from gdn.integrations.vllm_conv import NULL_BLOCK_ID, causal_conv1d_fn, causal_conv1d_update
from gdn.ops.gate import gate
from gdn.ops.prefill import prefill
from gdn.ops.rule import chunk_gated_delta_rule as chunk_rule
from gdn.ops.serving import decode


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run a few tokens per row on vLLM's state blocks: `gdn.decode`.

    Args:                    shape
        q, k, v, g, beta     as in `gdn.decode`; beta None: ones
        initial_state        [blocks, HV, V, K], updated in place; without ssm_state_indices [B, HV, V, K]
        inplace_final_state  False: the state after each token goes to a fresh [B T, HV, V, K] instead;
                             without cu_seqlens, or with one row
        ssm_state_indices    [N], a row's block, or [N, 1 + drafts], see above; rows beyond those of
                             cu_seqlens are not read
        num_accepted_tokens  [N] with a table: 1 .. columns, clamped; None: 1

    Returns (o [B, T, HV, V], initial_state or the states after each token).
    Raises: as `gdn.decode`; NotImplementedError for a beta per value channel.
    """
    if beta is not None and beta.dim() == v.dim():
        raise NotImplementedError(f"beta: expected shape [B, T, HV], got {list(beta.shape)}")
    return _decode(
        (q, k, v, scale, use_qk_l2norm_in_kernel), {"g": g, "beta": beta}, initial_state, inplace_final_state,
        cu_seqlens, ssm_state_indices, num_accepted_tokens,
    )  # fmt: skip


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run `fused_recurrent_gated_delta_rule` from raw logits a, b [tokens, HV] or [B, T, HV].

    g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), in fp32. `beta` and `threshold` are those of
    softplus; gdn has 1 and 20. NotImplementedError for others, and with is_kda.
    """
    check_gating(beta, threshold, is_kda)
    gates = {"a": per_token(a, q), "b": per_token(b, q), "A_log": A_log, "dt_bias": dt_bias}
    return _decode(
        (q, k, v, scale, use_qk_l2norm_in_kernel), gates, initial_state, inplace_final_state, cu_seqlens,
        ssm_state_indices, num_accepted_tokens,
    )  # fmt: skip


def _decode(
    tokens: tuple[Tensor, Tensor, Tensor, float | None, bool],
    gates: dict[str, Any],
    state: Any,
    is_inplace: bool,
    cu_seqlens: Tensor | None,
    indices: Tensor | None,
    num_accepted: Tensor | None,
) -> tuple[Tensor, Tensor]:
    q, k, v, scale, l2norm = tokens
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    indices, num_accepted = first(indices, N), first(num_accepted, N)
    where: dict[str, Any] = {"read_index": indices, "num_accepted": num_accepted}
    kept = None
    if not is_inplace:
        if cu_seqlens is not None and N > 1:
            raise NotImplementedError(f"inplace_final_state: expected True, got False with {N} packed rows")
        kept = q.new_empty(
            q.shape[0] * q.shape[1], *v.shape[2:], q.shape[3], dtype=getattr(state, "dtype", None)
        )
        where |= {"write": "none", "intermediate": kept.unflatten(0, q.shape[:2])}
    elif indices is not None and indices.dim() == 2:
        where |= {"write": "all", "write_index": indices}
    if cu_seqlens is not None:
        # a row has no more tokens than the table has columns
        bound = indices.shape[1] if where.get("write") == "all" and indices is not None else q.shape[1]
        where |= {"cu_seqlens": cu_seqlens, "max_seqlen": bound}
    o = decode(
        q, k, v, state, **gates, **where, scale=scale, use_qk_l2norm_in_kernel=l2norm, state_v_first=True,
        null_slot=None if indices is None else NULL_BLOCK_ID,
    )  # fmt: skip
    return o, state if kept is None else kept


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
    """Decode one token per row from the convolution's output: `gdn.decode_packed`, nothing copied.

    mixed_qkv [B, 2 H K + HV V], any row pitch; a, b [B, HV]; initial_state [blocks, HV, V, K], updated in
    place; out [B, 1, HV, V], written; ssm_state_indices [B]. Returns (out, initial_state).
    """
    packed(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices,
        use_qk_l2norm_in_kernel, NULL_BLOCK_ID,
    )  # fmt: skip
    return out, initial_state


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run whole prompts: `gdn.chunk_gated_delta_rule` with states [N, HV, V, K].

    chunk_indices and chunk_offsets are not needed and not read. core_attn_out, of the size of v, gets the
    output, which is then a view of it. Returns (o, final_state fp32 or None). An engine that may change its
    own call does better with `gdn.prefill`: states by block index, in place, none gathered or scattered.
    """
    if core_attn_out is None or cu_seqlens is None:
        o, final_state = chunk_rule(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return (o if core_attn_out is None else core_attn_out.view(v.shape).copy_(o)), final_state
    N = cu_seqlens.shape[0] - 1
    if initial_state is None:
        states = q.new_zeros(N, *v.shape[2:], q.shape[3], dtype=torch.float32)
    else:
        states = initial_state.to(torch.float32, copy=True)
    o = prefill(
        q, k, v, states, cu_seqlens=cu_seqlens, g=g, beta=beta, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True, update_state=output_final_state,
        state_index=torch.arange(N, device=q.device), out=core_attn_out.view(v.shape),
    )  # fmt: skip
    return o, states if output_final_state else None


def fused_gdn_gating(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Return g and beta [1, tokens, HV], both fp32, from raw logits a, b [tokens, HV]: `gdn.gate`."""
    check_gating(beta, threshold)
    g, strength = gate(a, b, A_log, dt_bias)
    return g.unsqueeze(0), strength.unsqueeze(0)


_OPS = "vllm.third_party.flash_linear_attention.ops"
_CONV = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
PACKAGE = Package(
    (
        (f"{_OPS}.fused_recurrent", "fused_recurrent_gated_delta_rule", fused_recurrent_gated_delta_rule),
        (
            f"{_OPS}.fused_recurrent",
            "fused_recurrent_gated_delta_rule_packed_decode",
            fused_recurrent_gated_delta_rule_packed_decode,
        ),
        (
            f"{_OPS}.fused_sigmoid_gating",
            "fused_sigmoid_gating_delta_rule_update",
            fused_sigmoid_gating_delta_rule_update,
        ),
        (f"{_OPS}.chunk", "chunk_gated_delta_rule", chunk_gated_delta_rule),
        (_CONV, "causal_conv1d_fn", causal_conv1d_fn),
        (_CONV, "causal_conv1d_update", causal_conv1d_update),
    ),
    loaded=vllm_kda.SERVED,
)


def patch_vllm() -> Patch:
    """Replace vLLM's gated delta rule functions by gdn's, in this process: import vllm's model files first.

    Every imported module that holds one of the six functions gets ours, the convolution of other models
    included, and so do the three functions of Kimi's layers where their module is imported. Calls that gdn
    rejects go to vLLM's own functions. Call it in each worker. vLLM's defaults compute prefill on Hopper, and
    drafts, without these functions: the plug-in (`register_layers`) does not depend on them, and this patch
    warns and names the flags.

    Returns: a Patch: call `undo()`, or use it in a `with` statement. Raises ImportError without vLLM.
    """
    if torch.cuda.is_available() and not vllm_layer.is_registered():
        cuda = int((torch.version.cuda or "0").split(".")[0])
        for sentence in vllm_layer.needed_flags(torch.cuda.get_device_capability(), cuda):
            warn_caller(f"patch_vllm: {sentence}", UserWarning)
    return PACKAGE.patch()


def register() -> None:
    """Register gdn with vLLM, if GDN_ENGINES names it: the entry point of `vllm.general_plugins`."""
    if is_enabled("vllm"):
        register_layers()


def register_layers() -> None:
    """Register gdn's layers, rule and attention backend with vLLM's registries; a second call does nothing.

    vLLM then builds subclasses of its own classes that run on gdn, whatever --gdn-prefill-backend and
    VLLM_GDN_DECODE_KERNEL say. Call it before a model is built. Raises ImportError without vLLM.
    """
    if vllm_layer.is_registered():
        return
    from vllm.model_executor.custom_op import CustomOp, PluggableLayer
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    for module, name in vllm_layer.LAYERS:
        original = getattr(import_module(module), name)
        PluggableLayer.register_oot(vllm_layer.make_layer(original), name=name)
    for name, layer in vllm_kda_layer.make_channel_layers().items():
        PluggableLayer.register_oot(layer, name=name)
    rule = import_module(vllm_layer.LAYERS[0][0]).ChunkGatedDeltaRule
    CustomOp.register_oot(_make_rule(rule), name="ChunkGatedDeltaRule")
    register_backend(
        MambaAttentionBackendEnum.GDN_ATTN, "gdn.integrations.vllm_backend.GatedDeltaBackend", is_mamba=True
    )


def _make_rule(original: type) -> type:
    """Return a subclass of vLLM's operator for prompts: layers that are not gdn's call it."""

    class GdnChunkGatedDeltaRule(original):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            own: Any = self._forward_method  # type: ignore[has-type]

            def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
                def serve() -> tuple[Tensor, Tensor | None]:
                    # AITER's metadata is of no use here
                    return _rule_of_vllm(*args, **{k: v for k, v in kwargs.items() if k != _AITER})

                return call_with_fallback(
                    "ChunkGatedDeltaRule", serve, functools.partial(own, *args, **kwargs)
                )

            if current_platform.is_cuda():
                self._forward_method = forward

    from vllm.platforms import current_platform

    return GdnChunkGatedDeltaRule


_AITER = "aiter_prefill_metadata"


def _rule_of_vllm(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor,
    output_final_state: bool, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None, use_qk_l2norm_in_kernel: bool = True,
    core_attn_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run `chunk_gated_delta_rule` with the arguments in the order of vLLM's operator."""
    return chunk_gated_delta_rule(
        q, k, v, g, beta, None, initial_state, output_final_state, cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, core_attn_out=core_attn_out,
    )  # fmt: skip
