"""Provide lmdeploy's gated delta rule backend on gdn: three methods and the convolution (0.16 to 0.18).

States are [slots, HV, V, K], or [slots, HV, K, V] with transpose_state_layout=False. With speculation they
are a ring [slots, R, HV, V, K], where entry p % R is the state after p tokens (protocol P1). Slots below 0 or
past the pool, and ring entries outside 0 .. R - 1, are padding and give zeros.
"""

import math
from typing import Any

import torch
from torch import Tensor

from gdn.integrations.engines import activation_name
from gdn.integrations.patching import Package, Patch
from gdn.ops import conv as short_conv
from gdn.ops.gate import gate
from gdn.ops.prefill import prefill
from gdn.ops.serving import decode

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
        raw: dict[str, Any] = {"A_log": _A_log(a_log_exp), "dt_bias": dt_bias}
        if not meta.is_decoding:
            return self._prompts(
                five[:3], raw | dict(zip("ab", five[3:], strict=True)), recurrent_state,
                meta.origin_state_ids, meta.cu_seqlens, meta.spec_state_offsets,
                has_initial_state=None if meta.is_init is None else ~meta.is_init, state_v_first=True,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )  # fmt: skip
        rows = meta.origin_state_ids.shape[0]
        q, k, v, a, b = (x[0].unflatten(0, (rows, -1)) for x in five)
        where: dict[str, Any] = {}
        if meta.cache_seqlens is not None:
            where = {"ring_pos": meta.cache_seqlens, "write": "all", "round_state": True}
        o = decode(
            q, k, v, recurrent_state, a=a, b=b, **raw, read_index=meta.origin_state_ids, **where,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True,
        )  # fmt: skip
        return o.flatten(0, 1).unsqueeze(0)

    def _prompts(
        self, tokens: tuple[Tensor, ...], gates: dict[str, Any], pool: Any, slots: Any, offsets: Any,
        entries: tuple[Tensor, Tensor] | None, **options: Any,
    ) -> Tensor:  # fmt: skip
        q, k, v = tokens
        given = {**gates, "cu_seqlens": offsets, **options}
        if entries is None:
            return prefill(q, k, v, pool, state_index=slots, **given)
        flat, step = _flat(pool)
        read, write = (_flat_index(slots, entry, pool.shape, step) for entry in entries)
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


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Run the convolution of packed prompts: `gdn.causal_conv1d`.

    x [1, dim, tokens]; weight [dim, W]; seq_idx [tokens] or [1, tokens], the ascending sequence number of
    each token; initial_states [N, dim, W-1] of sequences 0 .. N-1, or None: zeros. Returns [1, dim, tokens].
    NotImplementedError for final states, which lmdeploy's own function does not return either.
    """
    if return_final_states or final_states_out is not None:
        raise NotImplementedError("return_final_states: expected False, got True")
    offsets = None
    if seq_idx is not None:
        # without initial states the number of sequences is unknown: at most one for each token
        N = seq_idx.shape[-1] if initial_states is None else initial_states.shape[0]
        numbers = torch.arange(N + 1, device=x.device, dtype=seq_idx.dtype)
        offsets = torch.searchsorted(seq_idx.reshape(-1).contiguous(), numbers)
    y, _ = short_conv.causal_conv1d(
        x.transpose(1, 2), weight, bias, activation=activation_name(activation),
        initial_state=initial_states, cu_seqlens=offsets,
    )  # fmt: skip
    return y.transpose(1, 2)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Run one step of the convolution: `gdn.causal_conv1d_update`.

    x [B, dim] or [B, dim, T]; conv_state [slots, dim, L], updated in place, newest input in the last column;
    with cache_seqlens [B] a ring, token t in column (cache_seqlens + t) % L. Returns the shape of x.
    """
    y = short_conv.causal_conv1d_update(
        x if x.dim() == 2 else x.transpose(1, 2), conv_state, weight, bias,
        activation=activation_name(activation), state_index=conv_state_indices, ring_pos=cache_seqlens,
    )  # fmt: skip
    return y if x.dim() == 2 else y.transpose(1, 2)


class CausalConv1d:
    """Implement lmdeploy's CausalConv1dImpl: its two functions, and `forward`."""

    def conv1d_fn(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        seq_idx: Tensor | None = None,
        initial_states: Tensor | None = None,
        return_final_states: bool = False,
        activation: str | None = None,
    ) -> Tensor:
        return causal_conv1d_fn(
            x, weight, bias, seq_idx, initial_states, return_final_states, None, activation
        )

    def update_fn(
        self,
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        conv_state_indices: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
    ) -> Tensor:
        return causal_conv1d_update(
            x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices
        )

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, gated_delta_meta: Any,
        activation: str,
    ) -> Tensor:  # fmt: skip
        """Run the convolution on x [1, tokens, dim] and update conv_state (lmdeploy 0.18).

        If a part of a prompt is shorter than the window, the window keeps earlier inputs.
        """
        meta, name = gated_delta_meta, activation_name(activation)
        weight = weight[:, 0] if weight.dim() == 3 else weight
        if meta.is_decoding:
            rows = meta.conv_state_indices.shape[0]
            y = short_conv.causal_conv1d_update(
                x[0].unflatten(0, (rows, -1)), conv_state, weight, bias, activation=name,
                state_index=meta.conv_state_indices, ring_pos=meta.cache_seqlens,
            )  # fmt: skip
            return y.flatten(0, 1).unsqueeze(0)
        options: dict[str, Any] = {"activation": name, "cu_seqlens": meta.cu_seqlens}
        if meta.spec_conv_offsets is None:
            y, _ = short_conv.causal_conv1d(
                x, weight, bias, **options, state=conv_state, state_index=meta.conv_state_indices,
                has_initial_state=~meta.is_init,
            )  # fmt: skip
            return y
        # a ring: one tap of zero in front of the others makes the window as wide as lmdeploy's
        read, write = meta.spec_conv_offsets
        slots = meta.conv_state_indices.long()
        rows, channels = torch.arange(len(slots), device=x.device), torch.arange(x.shape[2], device=x.device)
        is_valid = (slots >= 0) & (slots < conv_state.shape[0])
        columns = torch.cat([(read[:, :1] - 1) % conv_state.shape[2], read], 1)
        # adding padding repeats the write of the first other row; a mask would need the host to count rows
        rows_written = torch.where(is_valid, rows, is_valid.int().argmax() if len(slots) else 0)
        slots = slots.clamp(0, conv_state.shape[0] - 1)
        window = conv_state[slots[:, None, None], channels[:, None], columns[:, None]]
        y, _ = short_conv.causal_conv1d(
            x, torch.nn.functional.pad(weight, (1, 0)), bias, **options, state=window,
            state_index=torch.where(is_valid, rows, -1), has_initial_state=~meta.is_init,
        )  # fmt: skip
        at = (slots[rows_written, None, None], channels[:, None], write[rows_written, None])
        final = window[rows_written].to(x.dtype).to(conv_state.dtype)
        conv_state[at] = torch.where(is_valid.any(), final, conv_state[at])
        return y


PACKAGE = Package(
    (
        ("lmdeploy.pytorch.backends.cuda.gated_delta_rule", "CudaGatedDeltaRuleImpl", GatedDeltaRule),
        ("lmdeploy.pytorch.backends.cuda.causal_conv1d", "CausalConv1dTilelangImpl", CausalConv1d),
    )
)


def patch_lmdeploy() -> Patch:
    """Run lmdeploy's gated delta rule layers on gdn, in this process: before the model is built.

    The two classes that its CUDA backend creates are replaced; these layers then need no FLA and no TileLang.
    Piecewise CUDA graphs, for which lmdeploy's classes register themselves, are not supported.

    Returns: a Patch: call `undo()`, or use it in a `with` statement. Raises ImportError without lmdeploy.
    """
    return PACKAGE.patch()
