"""Provide lmdeploy's gated delta rule backend on gdn, and patch_lmdeploy() (lmdeploy 0.18).

States are [slots, HV, V, K], or [slots, HV, K, V] with transpose_state_layout=False. With speculation they
are a ring [slots, R, HV, V, K], where entry p % R is the state after p tokens (protocol P1). Slots below 0 or
past the pool, and ring entries outside 0 .. R - 1, are padding and give zeros.
"""

import math
from typing import Any

import torch
from torch import Tensor

from gdn.integrations import lmdeploy_layer as layer
from gdn.integrations import usage
from gdn.integrations.engines import is_enabled
from gdn.integrations.lmdeploy_conv import CausalConv1d, causal_conv1d_fn, causal_conv1d_update
from gdn.integrations.lmdeploy_step import StepMeta, has_initial_state, once, register_graphs, role
from gdn.integrations.patching import Package, Patch
from gdn.ops.gate import gate
from gdn.ops.prefill import prefill
from gdn.ops.serving import decode

__all__ = ["CausalConv1d", "causal_conv1d_fn", "causal_conv1d_update"]
NEW = -1e6  # g of the first token of a new sequence: lmdeploy's mark for a slot that must not be read


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_indices: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    transpose_state_layout: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run a few tokens per row on the pool: `gdn.decode`.

    Args:                   shape
        q, k, v, g, beta    as in `gdn.decode`; any strides with the last axis contiguous, g and beta any
        initial_state       [slots, HV, K, V] or [slots, R, HV, K, V], last axes V, K with
                            transpose_state_layout; updated in place if output_final_state, else only read
        state_indices       [B], None: the row's number
        cache_seqlens       [B]: read entry cache_seqlens % R, token t writes (cache_seqlens + 1 + t) % R, the
                            state rounded to the pool's dtype after every token. None: entry 0 alone

    Returns (o [B, T, HV, V], the pool or None). Raises as `gdn.decode`; no restriction on K.
    """
    state: Any = initial_state
    where: dict[str, Any] = {"write": "final" if output_final_state else "none"}
    if cache_seqlens is not None:
        state = state.unsqueeze(1) if state is not None and state.dim() == 4 else state
        where = {"ring_pos": cache_seqlens, "round_state": output_final_state}
        where["write"] = "all" if output_final_state else "none"
    elif state is not None and state.dim() == 5:
        state = state[:, 0]
    o = decode(
        q, k, v, state, g=g, beta=beta, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=transpose_state_layout, read_index=state_indices, **where,
    )  # fmt: skip
    return o, initial_state if output_final_state else None


class GatedDeltaRule:
    """Implement lmdeploy's GatedDeltaRuleImpl: `prepare_inputs`, two forms of the rule, and `forward`.

    Queries and keys are neither copied to every value head nor normalised beforehand: the kernel does both.
    """

    def __init__(self) -> None:
        register_graphs(self)
        self._rates: tuple[Any, Any] = (None, None)

    @staticmethod
    def arguments_of_original(
        original: type, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for lmdeploy's method, which has q and k copied to every value head."""
        named = dict(zip("qkv", args, strict=False)) | kwargs
        are_tensors = all(isinstance(named.get(x), Tensor) and named[x].dim() == 4 for x in "qkv")
        if not name.endswith("gated_delta_rule") or not are_tensors:
            return args, kwargs
        q, k, v = (named.pop(x) for x in "qkv")
        q, k = (x.repeat_interleave(max(1, v.shape[2] // max(1, x.shape[2])), dim=2) for x in (q, k))
        return (q, k, v, *args[3:]), named

    def prepare_inputs(
        self,
        q: Tensor,
        k: Tensor,
        b: Tensor,
        a: Tensor,
        dt_bias: Tensor,
        a_log_exp: Tensor,
        kv_ratio: int,
        use_qk_l2norm_in_kernel: bool = False,
        is_decoding: bool = False,
        init_token_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
        """Return q and k unchanged, g and beta [B, T, HV] in fp32, and False: the norm is not applied yet.

        a, b [B, T, HV] or [B, T, H, kv_ratio]; a_log_exp = -exp(A_log); g is NEW where init_token_mask [T].
        """
        g, beta = gate(_heads(a), _heads(b), _A_log(a_log_exp), dt_bias)
        if not is_decoding and init_token_mask is not None:
            g = g.masked_fill(init_token_mask[None, :, None], NEW)
        return q, k, g, beta, False

    def chunk_gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        initial_state: Tensor | None = None,
        state_indices: Tensor | None = None,
        scale: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = False,
        spec_state_offsets: tuple[Tensor, Tensor] | None = None,
        transpose_state_layout: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run packed prompts on the pool in place: `gdn.prefill`; the pool is written in any case.

        A sequence whose first g is NEW starts from zeros, and its slot is not read. spec_state_offsets:
        entries of the ring to read and to write, [N] each. Returns (o, the pool or None).
        """
        has_initial_state = None
        if g is not None and cu_seqlens is not None and q.shape[1] > 0:
            starts = cu_seqlens[:-1].clamp(max=q.shape[1] - 1)
            has_initial_state = g[0, starts, 0] > NEW
        o = self._prompts(
            (q, k, v), {"g": g, "beta": beta}, initial_state, state_indices, cu_seqlens, spec_state_offsets,
            has_initial_state=has_initial_state, scale=scale, state_v_first=transpose_state_layout,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip
        return o, initial_state if output_final_state else None

    def fused_recurrent_gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        initial_state: Tensor | None = None,
        state_indices: Tensor | None = None,
        scale: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        output_final_state: bool = False,
        cache_seqlens: Tensor | None = None,
        transpose_state_layout: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the function of that name, with the arguments in the order of the backend's method."""
        return fused_recurrent_gated_delta_rule(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            state_indices, cache_seqlens, transpose_state_layout,
        )  # fmt: skip

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, b: Tensor, a: Tensor, dt_bias: Tensor,
        a_log_exp: Tensor, recurrent_state: Tensor, gated_delta_meta: Any, kv_ratio: int,
        use_qk_l2norm_in_kernel: bool,
    ) -> Tensor:  # fmt: skip
        """Run a layer's rule from raw logits, [1, tokens, ...] in and out, in one call (lmdeploy 0.18).

        It reads these fields of gated_delta_meta: is_decoding, origin_state_ids, and cache_seqlens, or
        cu_seqlens, is_init and spec_state_offsets.
        """
        meta, five = gated_delta_meta, (query, key, value, _heads(a), _heads(b))
        if self._rates[0] is not a_log_exp:
            # lmdeploy computes -exp(A_log) once as well
            self._rates = (a_log_exp, _A_log(a_log_exp))
        raw: dict[str, Any] = {"A_log": self._rates[1], "dt_bias": dt_bias}
        if not meta.is_decoding:
            o = self._prompts(
                five[:3], raw | dict(zip("ab", five[3:], strict=True)), recurrent_state,
                meta.origin_state_ids, meta.cu_seqlens, meta.spec_state_offsets, meta=meta,
                has_initial_state=has_initial_state(meta), state_v_first=True,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )  # fmt: skip
            usage.count_served("lmdeploy", "prefill")
            return o
        rows = meta.origin_state_ids.shape[0]
        q, k, v, a, b = (x[0].unflatten(0, (rows, -1)) for x in five)
        where: dict[str, Any] = {}
        if meta.cache_seqlens is not None:
            where = {"ring_pos": meta.cache_seqlens, "write": "all", "round_state": True}
        o = decode(
            q, k, v, recurrent_state, a=a, b=b, **raw, read_index=meta.origin_state_ids, **where,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True,
        )  # fmt: skip
        usage.count_served("lmdeploy", role(meta))
        return o.flatten(0, 1).unsqueeze(0)

    def _prompts(
        self, tokens: tuple[Tensor, ...], gates: dict[str, Any], pool: Any, slots: Any, offsets: Any,
        entries: tuple[Tensor, Tensor] | None, meta: Any = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        q, k, v = tokens
        given = {**gates, "cu_seqlens": offsets, **options}
        if entries is None:
            return prefill(q, k, v, pool, state_index=slots, **given)
        flat, step = _flat(pool)

        def indices() -> tuple[Tensor, ...]:
            return tuple(_flat_index(slots, entry, pool.shape, step) for entry in entries)

        read, write = indices() if meta is None else once(meta, "ring", (pool.shape, step), indices)
        inner = zip(flat.shape[1:], flat.stride()[1:], strict=True)
        if flat.stride(0) > sum((size - 1) * stride for size, stride in inner):
            return prefill(q, k, v, flat, state_index=read, out_state_index=write, **given)
        # the distance of slots is no multiple of a state's size, so states of the flat pool overlap
        states = flat.index_select(0, read.clamp(min=0))
        rows = torch.arange(read.shape[0], device=read.device)
        o = prefill(q, k, v, states, state_index=rows.where(read >= 0, -1), **given)
        # this reads the number of written states on the host, which waits for the device
        is_written = (read >= 0) & (write >= 0) & (offsets.diff().to(read.device) > 0)
        flat.index_copy_(0, write[is_written], states[is_written])
        return o


def _flat(ring: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return a ring [slots, R, ...] as a pool of one axis: entry e of slot s is at s * step[0] + e * step[1].

    There may be gaps between slots, as in a cache of several layers; no index points into a gap.
    """
    (slot, entry), (slots, R) = ring.stride()[:2], ring.shape[:2]
    unit = math.gcd(slot, entry)
    count = ((slots - 1) * slot + (R - 1) * entry) // unit + 1
    flat = ring.as_strided((count, *ring.shape[2:]), (unit, *ring.stride()[2:]), ring.storage_offset())
    return flat, (slot // unit, entry // unit)


def _flat_index(slots: Tensor, entry: Tensor, shape: torch.Size, step: tuple[int, int]) -> Tensor:
    """Return the index of (slot, entry) in the pool of `_flat`, int64; -1 unless both lie in the ring."""
    slots, entry = slots.long(), entry.long()
    is_valid = (slots >= 0) & (slots < shape[0]) & (entry >= 0) & (entry < shape[1])
    return torch.where(is_valid, slots * step[0] + entry * step[1], -1)


def _heads(x: Tensor) -> Tensor:
    """Return logits [B, T, H, ratio] as [B, T, HV]."""
    return x.flatten(-2) if x.dim() == 4 else x


def _A_log(a_log_exp: Tensor) -> Tensor:
    """Return A_log from -exp(A_log), which lmdeploy stores."""
    return a_log_exp.neg().log()


_CUDA, _MODELS = "lmdeploy.pytorch.backends.cuda", "lmdeploy.pytorch.models"
PACKAGE = Package(
    (
        (f"{_CUDA}.gated_delta_rule", "CudaGatedDeltaRuleImpl", GatedDeltaRule),
        (f"{_CUDA}.causal_conv1d", "CausalConv1dTilelangImpl", CausalConv1d),
        (f"{_CUDA}.causal_conv1d", "_build_causal_conv1d", layer.build_causal_conv1d),
        ("lmdeploy.pytorch.backends.gated_delta_rule", "GatedDeltaMeta", StepMeta),
        ("lmdeploy.pytorch.nn.gated_delta", "build_rmsnorm_gated", layer.build_rmsnorm_gated),
        ("lmdeploy.pytorch.configurations.qwen3_next", "_check_env_qwen3_next", layer.check_environment),
    ),
    (
        (f"{_MODELS}.qwen3_next", "Qwen3NextGatedDeltaNet", "forward", layer.decode_of_qwen3_next),
        (
            f"{_MODELS}.qwen3_next",
            "Qwen3NextGatedDeltaNet",
            "fix_query_key_value_ordering",
            layer.ordering_of_qwen3_next,
        ),
        (f"{_MODELS}.qwen3_5", "Qwen3_5GatedDeltaNet", "forward", layer.decode_of_qwen3_5),
    ),
)


def patch_lmdeploy() -> Patch:
    """Run lmdeploy's gated delta rule layers on gdn, in this process: before the model is built.

    The rule, the convolution, the gated norm, a step's metadata and the decode step of a layer are replaced,
    and the check for FLA is dropped: these layers need no FLA and no TileLang. Our classes are subclasses
    of lmdeploy's and register for its piecewise CUDA graphs. Only the PyTorch engine is affected: lmdeploy
    chooses TurboMind for Qwen3.5 unless it gets a PytorchEngineConfig (docs/lmdeploy.md).

    Returns: a Patch: call `undo()`, or use it in a `with` statement. Raises ImportError without lmdeploy.
    """
    return PACKAGE.patch()


def register() -> None:
    """Call `patch_lmdeploy` if GDN_ENGINES names lmdeploy: for a start-up hook of worker processes."""
    if is_enabled("lmdeploy"):
        patch_lmdeploy()
