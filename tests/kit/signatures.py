"""Record the signatures of today's engines: parameters and defaults of the functions that gdn replaces.

They are recorded from the packages' sources, with version and date. If a package can be imported,
tests/test_integrations*.py compare the record with it. Names, order, kinds and defaults count.

FLA is 1.5 MB of Python, and `make test` installs it (`make fla`). The others are not installed for a test:
the wheel of vLLM 0.33.0 has 336 MB, that of lmdeploy 0.18.0 107 MB, and SGLang 0.5.23, 39 MB, needs torch
2.14.1, sglang-kernel and FlashInfer as well.
"""

import importlib
import inspect

# (module, function) -> parameters
FLA = {  # fla-core 0.6.0, recorded 2026-11-21
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
    ("fla.ops.kda.chunk", "chunk_kda"): (
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, "
        "use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
        "allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False, "
        "return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, "
        "cp_context=None, use_graph=False, max_num_seqs=None, **kwargs"
    ),
    ("fla.ops.kda.fused_recurrent", "fused_recurrent_kda"): (
        "q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, state_v_first=False, "
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
VLLM = {  # vllm 0.33.0, recorded 2026-11-21; fused_gdn_gating is of earlier versions
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

_KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
VLLM_KDA = {  # vllm 0.33.0, recorded 2026-11-25: what the layers of Kimi-Linear and Kimi K3 call
    (f"{_KDA}.fused_recurrent", "fused_recurrent_kda"): (
        "q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, "
        "ssm_state_indices, num_accepted_tokens=None, out=None, fuse_gate=None"
    ),
    (f"{_KDA}.fused_recurrent", "fused_recurrent_kda_packed_decode"): (
        "mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, state_indices, scale=None, "
        "out=None"
    ),
    (f"{_KDA}.chunk", "chunk_kda_with_fused_gate"): (
        "q, k, v, raw_g, raw_beta, A_log, g_bias, scale=None, initial_state=None, output_final_state=False, "
        "lower_bound=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, out=None, **kwargs"
    ),
}

_SGL = "sglang.kernels.ops"
SGLANG = {  # sglang 0.5.23, recorded 2026-11-22; sgl-kernel-npu at 07aa7757
    (f"{_SGL}.attention.linear.fused_sigmoid_gating_recurrent", "fused_sigmoid_gating_delta_rule_update"): (
        "A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, "
        "initial_state_indices, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, is_kda=False, "
        "lower_bound=None, disable_state_update=False, intermediate_states_buffer=None, "
        "intermediate_state_indices=None, cache_steps=None, retrieve_parent_token=None, cache_ring=False, "
        "replayssm_rawv=None, replayssm_rawk=None, replayssm_g=None, replayssm_beta=None, "
        "match_cutedsl_decode=False"
    ),
    (f"{_SGL}.attention.fla.fused_recurrent", "fused_recurrent_gated_delta_rule_update"): (
        "q, k, v, g, beta=None, scale=None, initial_state_source=None, initial_state_indices=None, "
        "cu_seqlens=None, use_qk_l2norm_in_kernel=False, disable_state_update=False, "
        "disable_output_calculation=False, intermediate_states_buffer=None, intermediate_state_indices=None, "
        "cache_steps=None, retrieve_parent_token=None"
    ),
    (f"{_SGL}.attention.fla.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode"): (
        "mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, "
        "use_qk_l2norm_in_kernel=False"
    ),
    (f"{_SGL}.attention.fla.fused_recurrent", "fused_recurrent_kda_packed_decode"): (
        "mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, "
        "use_qk_l2norm_in_kernel=False, lower_bound=None"
    ),
    (f"{_SGL}.attention.fla.chunk", "chunk_gated_delta_rule"): (
        "q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None, cu_seqlens=None, "
        "head_first=False, use_qk_l2norm_in_kernel=False, inplace_update=True"
    ),
    (f"{_SGL}.attention.linear.fused_gdn_gating", "fused_gdn_gating"): (
        "A_log, a, b, dt_bias, beta=1.0, threshold=20.0"
    ),
    (f"{_SGL}.mamba.mamba_state_scatter_triton", "fused_mamba_state_scatter_with_mask"): (
        "dst, src, dst_indices_raw, step_indices_raw, src_indices_raw=None"
    ),
    (f"{_SGL}.mamba.mamba_state_scatter_triton", "scatter_mamba_states_after_mtp_verify"): (
        "mamba_caches, state_indices_tensor, last_correct_step_indices, mamba_track_indices, "
        "mamba_steps_to_track, src_indices_raw=None"
    ),
    ("sgl_kernel_npu.fla.chunk", "chunk_gated_delta_rule_npu"): (
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=True, cu_seqlens=None, "
        "head_first=False, use_qk_l2norm_in_kernel=False"
    ),
}
# the class TritonGDNKernel of the same version; kwargs are the backend's other arguments, of which extend
# reads track_state and track_chunk_idx if a kernel has supports_track_state_snapshot
SGLANG_KERNEL = {
    "decode": "q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, **kwargs",
    "packed_decode": (
        "mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, cache_indices, num_v_heads, head_v_dim, "
        "**kwargs"
    ),
    "target_verify": (
        "A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, query_start_loc, "
        "intermediate_states_buffer, intermediate_state_indices, cache_steps, retrieve_parent_token, **kwargs"
    ),
    "extend": (
        "q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, inplace_update=True, **kwargs"
    ),
}

_LMD = "lmdeploy.pytorch"
LMDEPLOY = {  # lmdeploy 0.18.0, recorded 2026-11-21
    (f"{_LMD}.kernels.cuda.gated_delta_rule", "fused_recurrent_gated_delta_rule"): (
        "q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, "
        "use_qk_l2norm_in_kernel=False, state_indices=None, cache_seqlens=None, transpose_state_layout=False"
    ),
    (f"{_LMD}.kernels.cuda.causal_conv1d", "causal_conv1d_fn"): (
        "x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, "
        "final_states_out=None, activation=None"
    ),
    (f"{_LMD}.kernels.cuda.causal_conv1d", "causal_conv1d_update"): (
        "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None"
    ),
}
# (class of ours, method) -> parameters of the abstract method of lmdeploy.pytorch.backends
LMDEPLOY_METHODS = {
    ("GatedDeltaRule", "prepare_inputs"): (
        "q, k, b, a, dt_bias, a_log_exp, kv_ratio, use_qk_l2norm_in_kernel=False, is_decoding=False, "
        "init_token_mask=None"
    ),
    ("GatedDeltaRule", "chunk_gated_delta_rule"): (
        "q, k, v, g=None, beta=None, initial_state=None, state_indices=None, scale=None, "
        "use_qk_l2norm_in_kernel=False, cu_seqlens=None, output_final_state=False, spec_state_offsets=None, "
        "transpose_state_layout=False"
    ),
    ("GatedDeltaRule", "fused_recurrent_gated_delta_rule"): (
        "q, k, v, g=None, beta=None, initial_state=None, state_indices=None, scale=None, "
        "use_qk_l2norm_in_kernel=False, output_final_state=False, cache_seqlens=None, "
        "transpose_state_layout=False"
    ),
    ("GatedDeltaRule", "forward"): (
        "query, key, value, b, a, dt_bias, a_log_exp, recurrent_state, gated_delta_meta, kv_ratio, "
        "use_qk_l2norm_in_kernel"
    ),
    ("CausalConv1d", "conv1d_fn"): (
        "x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, activation=None"
    ),
    ("CausalConv1d", "update_fn"): (
        "x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, cache_seqlens=None"
    ),
    ("CausalConv1d", "forward"): "x, weight, bias, conv_state, gated_delta_meta, activation",
}


def parameters(function):
    """Return "a, b=1, *, c, **kwargs" of a function, or of a method without self."""
    found = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    text = str(inspect.Signature([p for p in found if p.name != "self"]))
    return text[1:-1]


def real(module, function):
    """Return a function of an installed package, or None."""
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError):
        return None
