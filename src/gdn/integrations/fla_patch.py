"""patch_fla(): FLA's layers and models run on gdn, on any device, without a change to them.

FLA 0.6.0 chooses among backends for `chunk_gated_delta_rule`: gdn becomes one of them, asked first. Its
other functions are replaced, in every module that holds them:

    fused_recurrent_gated_delta_rule(q, k, v, g, gk, gv, beta, ...)                up to 64 tokens
    causal_conv1d(x [B, T, D], weight [D, W], bias, residual, initial_state [N, D, W], ...)
    causal_conv1d_update(x, cache [N, D, W], residual, weight, bias, activation)   one token, cache in place
    rms_norm_gated(x, g, weight, bias, activation, residual, prenorm, ...)

What gdn does not have stays with FLA: context parallelism, decays per channel, residuals in the convolution.
"""

from importlib import import_module
from typing import Any

from torch import Tensor, nn

from gdn.integrations import fla as ours
from gdn.integrations.patching import Package, Patch
from gdn.ops.conv import causal_conv1d, causal_conv1d_update
from gdn.ops.norm import rms_norm_gated
from gdn.ops.rule import explain

OLDEST = (0, 6)
ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


def patch_fla() -> Patch:
    """Run FLA's GatedDeltaNet layers and models on gdn: the rule, the short convolution, the gated norm.

    The chunked rule is registered with FLA's own dispatch, ahead of its other backends; while a patch is in
    force FLA asks `gdn.explain` for each call, and keeps what gdn refuses. The other functions (see the head
    of this file) are replaced wherever an imported module holds them.

    Returns: a Patch: call `undo()`, or use it in a `with` statement. Patches may be nested.
    Raises:  ImportError without FLA 0.6 or newer; RuntimeError where FLA_DISABLE_BACKEND_DISPATCH=1 has
             turned FLA's dispatch off.
    Cost:    imports fla. Process-wide.
    """
    try:
        package = import_module("fla")
    except ModuleNotFoundError as error:
        if error.name != "fla":
            raise
        message = "patch_fla needs FLA, which is not installed: pip install flash-linear-attention"
        raise ModuleNotFoundError(message, name="fla") from None
    version = tuple(int(part) for part in package.__version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(f"fla: expected version 0.6 or newer, got {package.__version__}")
    backends = import_module("fla.backends")
    if backends._DISPATCH_DISABLED:
        raise RuntimeError("fla: expected its dispatch to be on, got FLA_DISABLE_BACKEND_DISPATCH=1")
    if not PACKAGE.is_patched:
        import_module("fla.ops.gated_delta_rule.backends")
        backends.register("gated_delta_rule")(_dispatched(backends.BaseBackend))
    return PACKAGE.patch()


def _dispatched(base: type) -> type:
    """gdn as a backend of FLA's dispatch; enabled while a patch is in force."""

    class GdnBackend(base):  # type: ignore[misc]
        backend_type = "gdn"
        # lower is asked first; FLA's own begin at 0
        priority = -1

        def is_enabled(self) -> bool:
            return PACKAGE.is_patched

        @staticmethod
        def chunk_gated_delta_rule_verifier(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            return _takes(*args, **kwargs)

        chunk_gated_delta_rule = staticmethod(ours.chunk_gated_delta_rule)

    return GdnBackend


def _takes(
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
) -> tuple[bool, str | None]:
    """Whether gdn takes a call of chunk_gated_delta_rule, and why not; FLA takes an exception for a no."""
    if cp_context is not None:
        return False, "gdn has no context parallelism yet"
    found = explain(
        q, k, v, g, beta, scale=scale, initial_state=initial_state,
        output_final_state=bool(output_final_state),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, **ours.rule_options(kwargs, state_v_first),
    )  # fmt: skip
    return found.chosen is not None, None if found.chosen else str(found)


def _conv(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """FLA's states hold W inputs, gdn's W - 1: a tap of zero in front of the others makes them the same."""
    if weight is None or residual is not None or cp_context is not None or x.dim() != 3:
        raise NotImplementedError("causal_conv1d: a residual or context parallelism is FLA's own")
    if initial_state is not None or output_final_state:
        weight = nn.functional.pad(weight, (1, 0))
    return causal_conv1d(
        x, weight, bias, activation=ACTIVATIONS[activation], initial_state=initial_state,
        output_final_state=bool(output_final_state), cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
    )  # fmt: skip


def _conv_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    if weight is None or residual is not None:
        raise NotImplementedError("causal_conv1d_update: a residual is FLA's own")
    # [N, D], [N, 1, D], or the packed [1, N, D]: a token per sequence either way
    rows = x.reshape(-1, weight.shape[0])
    y = causal_conv1d_update(rows, cache, weight, bias, activation=ACTIVATIONS[activation])
    return y.view(x.shape), cache


def _norm(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    if bias is not None or residual is not None or prenorm:
        raise NotImplementedError("rms_norm_gated: bias, residual and prenorm are FLA's own")
    gate = ACTIVATIONS.get(activation, activation)
    return rms_norm_gated(x, g, weight, eps=eps, activation=gate)


PACKAGE = Package(
    (
        (
            "fla.ops.gated_delta_rule.fused_recurrent",
            "fused_recurrent_gated_delta_rule",
            ours.fused_recurrent_gated_delta_rule,
        ),
        ("fla.modules.causal_conv1d.ops", "causal_conv1d", _conv),
        ("fla.modules.causal_conv1d.ops", "causal_conv1d_update", _conv_update),
        ("fla.modules.norm.fused_norm_gate", "rms_norm_gated", _norm),
    )
)
