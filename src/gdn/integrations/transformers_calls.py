"""Run the four functions of a Transformers model file on gdn; rejected calls go to the original.

Call sites (the layer's forward in every model file, Transformers 5.17 to 5.24):

    causal_conv1d_fn(x [B, D, T], weight [D, W], bias, activation=, **kwargs)          several tokens
    causal_conv1d_update(x [B, D, 1], conv_state [B, D, W], weight, bias, activation)  one token, in place
    torch_chunk_gated_delta_rule(q, k, v, g=, beta=, initial_state=, ..., cu_seqlens=, **kwargs)
    torch_recurrent_gated_delta_rule(the same)                                         one token, with a state
    chunk_kimi_delta_attention, recurrent_kimi_delta_attention: the same with g [B, T, H, K], and the offsets
    of documents under their name in kwargs, cu_seq_lens_q

With a cache the convolution sees the W cached columns in front of the new ones. 5.17 expands q and k to the
value heads, 5.23 does not. kwargs are the model's: cu_seq_lens_q, seq_idx, use_cache, ...
"""

import warnings
from collections.abc import Callable, Sized
from typing import Any

import torch
from torch import Tensor

from gdn.integrations.fallback import call_with_fallback
from gdn.ops import conv as short_conv
from gdn.ops.rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from gdn.ops.serving import decode

Function = Callable[..., Any]
ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


def chunk(original: Function, active: Sized) -> Function:
    """Return a torch_chunk_gated_delta_rule that runs gdn while `active` holds a patch."""

    def torch_chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        tensors = (query, key, value, g, beta)
        options = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
        return _rule(
            chunk_gated_delta_rule, original, active, tensors, options, kwargs, chunk_size=chunk_size
        )

    return torch_chunk_gated_delta_rule


def recurrent(original: Function, active: Sized) -> Function:
    """Return a torch_recurrent_gated_delta_rule that runs gdn while `active` holds a patch."""

    def torch_recurrent_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        tensors = (query, key, value, g, beta)
        options = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
        serve: Function = fused_recurrent_gated_delta_rule
        may_write = output_final_state and _given_offsets(kwargs) is None and kwargs.get("seq_idx") is None
        if may_write and _is_cache_buffer(initial_state) and not _needs_gradient(*tensors, initial_state):
            serve = _decode_in_place
        return _rule(serve, original, active, tensors, options, kwargs)

    return torch_recurrent_gated_delta_rule


def conv(original: Function, active: Sized) -> Function:
    """Return a causal_conv1d_fn that runs gdn while `active` holds a patch."""

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        cu_seqlens = _conv_offsets(hidden_states, weight, kwargs)
        if cu_seqlens is None and _belongs_to_original(hidden_states, active):
            return original(hidden_states, weight, bias, activation=activation, **kwargs)

        def serve() -> Tensor:
            y, _ = short_conv.causal_conv1d(
                hidden_states.transpose(1, 2),
                weight,
                bias,
                activation=_activation(activation),
                cu_seqlens=cu_seqlens,
            )
            return y.transpose(1, 2)

        def run_original() -> Tensor:
            return original(hidden_states, weight, bias, activation=activation, **kwargs)  # type: ignore[no-any-return]

        report = warn if cu_seqlens is None else _raise
        return call_with_fallback("causal_conv1d_fn", serve, run_original, report)

    return causal_conv1d_fn


def conv_update(original: Function, active: Sized) -> Function:
    """Return a causal_conv1d_update, in place on conv_state, that runs gdn while `active` holds a patch."""

    def causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        arguments = (hidden_states, conv_state, weight, bias, activation)
        # a decode step that autograd records: gdn's serving functions have no gradient
        if _needs_gradient(*arguments[:4]) or _belongs_to_original(hidden_states, active):
            return original(*arguments, **kwargs)

        def serve() -> Tensor:
            x = hidden_states.transpose(1, 2)
            y = short_conv.causal_conv1d_update(
                x, conv_state, weight, bias, activation=_activation(activation)
            )
            return y.transpose(1, 2)

        def run_original() -> Tensor:
            return original(*arguments, **kwargs)  # type: ignore[no-any-return]

        return call_with_fallback("causal_conv1d_update", serve, run_original, warn)

    return causal_conv1d_update


def _rule(
    serve: Function,
    original: Function,
    active: Sized,
    tensors: tuple[Tensor, ...],
    options: tuple[Tensor | None, bool, bool],
    kwargs: dict[str, Any],
    **own: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run one call of either form. `own`: arguments that only the original takes."""
    names = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
    named: dict[str, Any] = dict(zip(names, options, strict=True))
    q, k, v, g, beta = tensors
    cu_seqlens = _offsets(_given_offsets(kwargs), kwargs.get("seq_idx"))
    if cu_seqlens is None and _belongs_to_original(q, active):
        return original(q, k, v, g=g, beta=beta, **named, **own, **kwargs)

    def serve_rule() -> tuple[Tensor, Tensor | None]:
        o, final_state = serve(q, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens, **named)
        if final_state is not None and cu_seqlens is not None:
            # the cache has one row for the packed batch: it continues the last document
            final_state = final_state[-1:]
        return o, final_state

    def run_original() -> tuple[Tensor, Tensor | None]:
        return original(q, k, v, g=g, beta=beta, **named, **own, **kwargs)  # type: ignore[no-any-return]

    report = warn if cu_seqlens is None else _raise
    return call_with_fallback("the gated delta rule", serve_rule, run_original, report)


def _is_cache_buffer(state: Tensor | None) -> bool:
    """Return True for a state that belongs to a Transformers cache, known by its mark of a static address.

    The layer copies the returned state into that buffer, so the update may happen there: one token on a CPU
    is 1.7 times as fast as with a new state and a copy. No other tensor is written. Beam search creates new,
    unmarked buffers, and a compiled graph has no marks: both use the functional form.
    """
    return (
        state is not None
        and not torch.compiler.is_compiling()
        and getattr(state, "_dynamo_static_input_type", None) is not None
    )


def _decode_in_place(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: None, initial_state: Tensor,
    output_final_state: bool, use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the rule on one state per row; update the given state and return it."""
    o = decode(
        q, k, v, initial_state, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=False,
    )  # fmt: skip
    return o, initial_state


def _activation(name: str | None) -> str | None:
    if name not in ACTIVATIONS:
        raise NotImplementedError(f"activation: expected silu, swish or None, got {name!r}")
    return ACTIVATIONS[name]


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _belongs_to_original(x: Tensor, active: Sized) -> bool:
    """Return True under torch.export, for tensors without storage, and after the end of every patch."""
    # the flag itself: torch 2.11 compiles a call of is_exporting() to True, exporting or not
    return len(active) == 0 or x.is_meta or torch.compiler._is_exporting_flag


def warn(name: str, error: Exception) -> None:
    """Warn that the original runs; Python shows such a warning once for each line of a model file."""
    warnings.warn(f"{name} is left to Transformers: {error}", RuntimeWarning, stacklevel=4)


def _raise(name: str, error: Exception) -> None:
    """Raise for packed sequences: the original would silently mix documents."""
    raise error


def _given_offsets(kwargs: dict[str, Any]) -> Tensor | None:
    """Return the offsets of documents among the arguments of a function of the rule."""
    cu_seqlens: Tensor | None = kwargs.get("cu_seqlens")
    return kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens


def _offsets(cu_seqlens: Tensor | None, seq_idx: Tensor | None) -> Tensor | None:
    """Return cu_seqlens, or the offsets in seq_idx [1, T] (one host sync for their number), or None."""
    if cu_seqlens is not None or seq_idx is None:
        return cu_seqlens
    if seq_idx.dim() != 2 or seq_idx.shape[0] != 1:
        raise ValueError(f"seq_idx: expected shape [1, T], got {list(seq_idx.shape)}")
    return between(seq_idx[0, 1:] != seq_idx[0, :-1])


def between(is_start: Tensor) -> Tensor:
    """Return cu_seqlens [N+1] int32 from a mask [T-1] that is true where token t+1 starts a document."""
    starts = is_start.nonzero().flatten().to(torch.int32) + 1
    return torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), is_start.shape[0] + 1)])


def _conv_offsets(x: Tensor, weight: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the document offsets in the columns of x; columns before the tokens belong to the first one."""
    given, seq_idx = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
    cu_seqlens = _offsets(given, seq_idx)
    if cu_seqlens is None or cu_seqlens.shape[0] <= 2:
        return None
    columns, W = x.shape[2], weight.shape[1]
    if seq_idx is not None:
        in_front: Any = columns - seq_idx.shape[1]
    elif columns == W:
        # a prompt shorter than the filter arrives padded to W columns
        in_front = W - cu_seqlens[-1:]
    else:
        return cu_seqlens
    if isinstance(in_front, int) and in_front == 0:
        return cu_seqlens
    return torch.cat([cu_seqlens[:1], cu_seqlens[1:] + in_front])
