"""What engines call today: parameters and defaults of the functions that gdn stands in for.

Recorded from the packages' sources, with version and date; where a package can be imported,
tests/test_integrations*.py hold the record against it. Names, order, kinds and defaults count.
"""

import importlib
import inspect

# (module, function) -> parameters
FLA = {  # fla-core 0.6.0, 2026-10-23
    ("fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule"): (
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, "
        "use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
        "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, "
        "**kwargs"
    ),
    ("fla.ops.gated_delta_rule.fused_recurrent", "fused_recurrent_gated_delta_rule"): (
        "q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, "
        "dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, "
        "cu_seqlens=None, **kwargs"
    ),
    ("fla.modules.causal_conv1d.ops", "causal_conv1d"): (
        "x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, "
        "activation=None, backend='triton', cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, "
        "cp_context=None, **kwargs"
    ),
    ("fla.modules.causal_conv1d.ops", "causal_conv1d_update"): (
        "x, cache, residual=None, weight=None, bias=None, activation=None"
    ),
    ("fla.modules.norm.fused_norm_gate", "rms_norm_gated"): (
        "x, g, weight, bias, activation='swish', residual=None, prenorm=False, residual_in_fp32=False, "
        "eps=1e-06"
    ),
}

_VLLM = "vllm.third_party.flash_linear_attention.ops"
VLLM = {  # vllm 0.33.0, wheel of 2026-11-21; fused_gdn_gating is of earlier versions
    (f"{_VLLM}.fused_recurrent", "fused_recurrent_gated_delta_rule"): (
        "q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, cu_seqlens=None, "
        "ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False"
    ),
    (f"{_VLLM}.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode"): (
        "mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, "
        "use_qk_l2norm_in_kernel=False"
    ),
    (f"{_VLLM}.fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update"): (
        "A_log, a, b, dt_bias, q, k, v, beta=1.0, threshold=20.0, scale=None, initial_state=None, "
        "inplace_final_state=True, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, "
        "use_qk_l2norm_in_kernel=False, is_kda=False"
    ),
    (f"{_VLLM}.chunk", "chunk_gated_delta_rule"): (
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, "
        "chunk_indices=None, chunk_offsets=None, use_qk_l2norm_in_kernel=False, core_attn_out=None"
    ),
    ("vllm.model_executor.layers.mamba.ops.causal_conv1d", "causal_conv1d_fn"): (
        "x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None, "
        "activation='silu', pad_slot_id=-1, null_block_id=0, metadata=None, validate_data=False"
    ),
    ("vllm.model_executor.layers.mamba.ops.causal_conv1d", "causal_conv1d_update"): (
        "x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, "
        "num_accepted_tokens=None, query_start_loc=None, max_query_len=-1, null_block_id=0, "
        "validate_data=False, out=None"
    ),
    ("vllm.model_executor.models.qwen3_next", "fused_gdn_gating"): (
        "A_log, a, b, dt_bias, beta=1.0, threshold=20.0"
    ),
}


def parameters(function):
    """ "a, b=1, *, c, **kwargs" of a function; of a method without self."""
    found = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    text = str(inspect.Signature([p for p in found if p.name != "self"]))
    return text[1:-1]


def real(module, function):
    """A function of an installed package, or None."""
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError):
        return None
