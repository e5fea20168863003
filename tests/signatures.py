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
