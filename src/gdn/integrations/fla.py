"""Provide four functions of flash-linear-attention on gdn, with FLA's names and positions.

Signatures are those of FLA 0.6.0; `fla_patch` has the patch. `gdn.chunk_gated_delta_rule` documents the rule.
"""

from importlib import import_module
from typing import Any

from torch import Tensor

from gdn.integrations.fallback import warn_caller
from gdn.ops.rule import ContextParallel
from gdn.ops.rule import chunk_gated_delta_rule as chunk_rule
from gdn.ops.rule import fused_recurrent_gated_delta_rule as recurrent_rule

# keyword arguments of chunk_gated_delta_rule that its signature does not name
GATE = ("use_gate_in_kernel", "A_log", "dt_bias")
CHUNKS = (16, 32, 64)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run `gdn.chunk_gated_delta_rule` with the positions of FLA's function of that name.

    Args beyond those of `gdn.chunk_gated_delta_rule`, and their effect:
        chunk_indices           not needed, not read
        chunk_size              16, 32 or 64: the same function; gdn's chunks have 64 tokens
        transpose_state_layout  FLA's old name of state_v_first; DeprecationWarning, as in FLA

    Returns: o [B, T, HV, V] in the dtype of q; final_state [N, HV, K, V] fp32 ([N, HV, V, K] with
        state_v_first), or None.
    Raises: as `gdn.chunk_gated_delta_rule`; TypeError for a name that neither library knows, which FLA
        ignores; NotImplementedError for FLA's zig-zag context. `cp_context` is FLA's own otherwise, whose
        first call gathers the offsets of all ranks, or a `gdn.ContextParallel`. Rows of states are those of
        the pieces on this rank, as in `gdn.ContextParallel`.
    """
    options = rule_options(kwargs, state_v_first)
    if cp_context is not None and not isinstance(cp_context, ContextParallel) and _is_fla(cp_context):
        # FLA's own context holds the offsets of this rank; gdn's calls have those of all tokens
        cp_context, cu_seqlens = import_module("gdn.integrations.fla_cp").read_context(cp_context)
        cu_seqlens_cpu = None
    if cp_context is not None and not isinstance(cp_context, ContextParallel):
        raise NotImplementedError(
            f"cp_context: expected a gdn.ContextParallel or None, got {type(cp_context).__name__}"
        )
    outputs = chunk_rule(
        q, k, v, g, beta, scale=scale, initial_state=initial_state,
        output_final_state=bool(output_final_state),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context, **options,
    )  # fmt: skip
    warn_of_old_names(kwargs)
    return outputs


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run `gdn.fused_recurrent_gated_delta_rule` with the positions of FLA's function of that name.

    Note the order: after g come gk and gv, decays per key row and per value column, which gdn does not have.
    Unlike FLA's function, this one has gradients.

    Returns, raises: as `chunk_gated_delta_rule` here; NotImplementedError with gk, gv, or a beta per value
        channel [B, T, HV, V].
    """
    if gk is not None or gv is not None:
        raise NotImplementedError("gk, gv: expected None, got a tensor (per key channel: g of rank 4)")
    if beta is not None and beta.dim() == v.dim():
        raise NotImplementedError(f"beta: expected shape [B, T, HV], got {list(beta.shape)}")
    gate = dict(zip(GATE, (use_gate_in_kernel, A_log, dt_bias), strict=True))
    outputs = recurrent_rule(
        q, k, v, g=g, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=bool(output_final_state), use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        cu_seqlens=cu_seqlens, **rule_options({**kwargs, **gate}, state_v_first),
    )  # fmt: skip
    warn_of_old_names(kwargs)
    return outputs


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run `gdn.chunk_kda` with the positions of FLA's function of that name.

    Args beyond those of `gdn.chunk_gated_delta_rule`, and their effect:
        safe_gate, disable_recompute, use_graph, max_num_seqs
                            not needed: gdn is exact for any gate, and packed rows of any number are a graph
        lower_bound         decides the form of the gate, as in FLA; without use_gate_in_kernel not read
        dt_bias             [HV K] or [HV, K]; A_log may have further axes of size 1
        chunk_size          32 or 64: the same function

    Returns, raises: as `chunk_gated_delta_rule` here; NotImplementedError for return_intermediate_states.
    """
    if return_intermediate_states:
        raise NotImplementedError("return_intermediate_states: expected False, got True")
    if cp_context is not None:
        raise NotImplementedError(f"cp_context: expected None, got {type(cp_context).__name__}")
    if kwargs.get("chunk_size", 64) not in CHUNKS[1:]:
        raise ValueError(f"chunk_size: expected 32 or 64, got {kwargs['chunk_size']}")
    kwargs = {**kwargs, "use_gate_in_kernel": use_gate_in_kernel}
    outputs = chunk_rule(
        q, k, v, g, beta, scale=scale, initial_state=initial_state,
        output_final_state=bool(output_final_state), use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        **channel_options(kwargs, g, lower_bound, state_v_first),
    )  # fmt: skip
    warn_of_old_names(kwargs)
    return outputs


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run `gdn.fused_recurrent_kda` with the positions of FLA's function of that name.

    Unlike FLA's function, this one has gradients. Returns, raises: as `chunk_kda` here.
    """
    gate = dict(zip(GATE, (use_gate_in_kernel, A_log, dt_bias), strict=True))
    outputs = recurrent_rule(
        q, k, v, g=g, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=bool(output_final_state), use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        cu_seqlens=cu_seqlens, **channel_options({**kwargs, **gate}, g, lower_bound, state_v_first),
    )  # fmt: skip
    warn_of_old_names(kwargs)
    return outputs


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def _is_fla(context: Any) -> bool:
    """Return True for FLA's own context; torch.distributed is imported for one alone."""
    return hasattr(context, "is_first_rank") and import_module("gdn.integrations.fla_cp").is_fla_context(
        context
    )


def warn_of_old_names(kwargs: dict[str, Any]) -> None:
    """Give FLA's DeprecationWarning; called after the rule, because FLA warns if gdn rejects the call."""
    if "transpose_state_layout" in kwargs:
        warn_caller(
            "`transpose_state_layout` is deprecated and renamed to `state_v_first`.", DeprecationWarning
        )


def rule_options(kwargs: dict[str, Any], state_v_first: bool) -> dict[str, Any]:
    """Return FLA's **kwargs under gdn's names; raise TypeError for names that FLA would silently ignore."""
    supported = {*GATE, "chunk_size", "transpose_state_layout", "head_first"}
    unknown = sorted(set(kwargs) - supported)
    if unknown:
        raise TypeError(f"{unknown[0]}: expected no such argument, got one (FLA would ignore it)")
    if kwargs.get("head_first"):
        raise ValueError("head_first: expected False, got True (tensors are [B, T, H, ...])")
    if kwargs.get("chunk_size", 64) not in CHUNKS:
        raise ValueError(f"chunk_size: expected 16, 32 or 64, got {kwargs['chunk_size']}")
    if state_v_first and "transpose_state_layout" in kwargs:
        raise ValueError("transpose_state_layout: expected one of it and state_v_first, got both")
    options: dict[str, Any] = {"state_v_first": kwargs.get("transpose_state_layout", state_v_first)}
    # without use_gate_in_kernel FLA ignores A_log and dt_bias
    if kwargs.get("use_gate_in_kernel"):
        options |= {name: kwargs[name] for name in GATE if name in kwargs}
    return options


def channel_options(
    kwargs: dict[str, Any], g: Tensor, lower_bound: float | None, state_v_first: bool
) -> dict[str, Any]:
    """Return `rule_options` of a decay per key channel, with the parameters of its gate in gdn's shapes."""
    options = rule_options(kwargs, state_v_first)
    if options.get("use_gate_in_kernel"):
        options["lower_bound"] = lower_bound
        A_log, dt_bias = options.get("A_log"), options.get("dt_bias")
        if A_log is not None:
            options["A_log"] = A_log.flatten()
        # another number of elements is an error that names the tensor
        if dt_bias is not None and dt_bias.numel() == g.shape[2:].numel():
            options["dt_bias"] = dt_bias.reshape(g.shape[2:])
    return options
