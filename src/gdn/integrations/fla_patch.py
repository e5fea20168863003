"""patch_fla(): run FLA's layers and models on gdn, on any device, without a change to them.

FLA 0.6.0 chooses among backends for `chunk_gated_delta_rule` and `chunk_kda`: gdn becomes the first in the
dispatch order.
FLA's other functions are replaced in every module that holds them:

    fused_recurrent_gated_delta_rule(q, k, v, g, gk, gv, beta, ...)                up to 64 tokens
    fused_recurrent_kda(q, k, v, g, beta, A_log, dt_bias, ...)                     up to 64 tokens
    causal_conv1d(x [B, T, D], weight [D, W], bias, residual, initial_state [N, D, W], ...)
    causal_conv1d_update(x, cache [N, D, W], residual, weight, bias, activation)   one token, cache in place
    rms_norm_gated(x, g, weight, bias, activation, residual, prenorm, ...)

A call that gdn rejects goes to FLA's own function (`gdn.integrations.fallback`): a zig-zag context, decays
per value channel, residuals in the convolution, and whatever else FLA accepts.
"""

import functools
import threading
import weakref
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from gdn.integrations import fla as ours
from gdn.integrations.engines import activation_name
from gdn.integrations.fallback import call_with_fallback
from gdn.integrations.patching import Package, Patch
from gdn.ops.conv import causal_conv1d, causal_conv1d_update
from gdn.ops.norm import rms_norm_gated
from gdn.ops.rule import has_kernel

OLDEST = (0, 6)
# the functions that FLA dispatches, and their modules
CHUNKED = {"chunk_gated_delta_rule": "fla.ops.gated_delta_rule.chunk", "chunk_kda": "fla.ops.kda.chunk"}
RECURRENT_KDA = "fla.ops.kda.fused_recurrent"
_dispatch = threading.local()  # is_fallback: this thread runs FLA's dispatch for a call that gdn rejected
# the modules fla.backends in which `register_backend` was called: one, but for tests
_registered: weakref.WeakSet[ModuleType] = weakref.WeakSet()


def patch_fla() -> Patch:
    """Run FLA's GatedDeltaNet and KimiDeltaAttention layers and models on gdn.

    They are the rule, the short convolution and the gated norm. The chunked rule is registered with FLA's own
    dispatch, ahead of its other backends. The other functions (see the head of this file) are replaced
    wherever an imported module holds them. A call that gdn rejects, for whatever reason, goes to FLA's own
    function.

    Returns: a Patch: call `undo()`, or use it in a `with` statement. Patches may be nested.
    Raises:  ImportError without FLA 0.6 or newer; RuntimeError where FLA_DISABLE_BACKEND_DISPATCH=1 has
             turned FLA's dispatch off.
    Cost:    imports fla. Process-wide. FLA_GDN=0 in the environment leaves the chunked rule to FLA.
    """
    backends = _import_backends()
    if not PACKAGE.is_patched:
        _register(backends)
    return PACKAGE.patch()


def register_backend() -> None:
    """Register gdn with FLA's own dispatch of the chunked rule, for the rest of the process.

    Nothing in FLA is replaced; its dispatch tries gdn first, unless the environment has FLA_GDN=0. FLA finds
    gdn by itself if a file of its folder `fla/ops/gated_delta_rule/backends` calls this function.

    Raises: as `patch_fla`. A second call changes nothing.
    Cost:   imports fla. Process-wide.
    """
    backends = _import_backends()
    _register(backends)
    _registered.add(backends)


def _import_backends() -> ModuleType:
    """Return fla.backends of FLA 0.6 or newer, whose dispatch is on."""
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
    return backends


def _register(backends: ModuleType) -> None:
    """Register gdn with FLA's registry, which holds one backend of each type."""
    # FLA's own backends register themselves when their package is imported
    import_module("fla.ops.gated_delta_rule.backends")
    if backends not in _registered:
        backend = _dispatched(backends)
        backends.register("gated_delta_rule")(backend)
        # an FLA without a decay per key channel is served all the same
        with suppress(ModuleNotFoundError):
            import_module(RECURRENT_KDA)
            # FLA registers the backends of this one by the function
            backends.register(import_module(CHUNKED["chunk_kda"]).chunk_kda)(backend)


def _dispatched(backends: ModuleType) -> type:
    """Return gdn as a backend of FLA's dispatch; it is enabled while it is registered or patched."""

    class GdnBackend(backends.BaseBackend):  # type: ignore[misc, name-defined]
        backend_type = "gdn"
        package_name = "gdn"
        # FLA's convention: FLA_GDN=0 turns the backend off
        env_var = "FLA_GDN"
        # lowest first in the dispatch order; FLA's own begin at 0
        priority = -1

        def is_enabled(self) -> bool:
            if getattr(_dispatch, "is_fallback", False):
                return False
            return (PACKAGE.is_patched or backends in _registered) and bool(super().is_enabled())

        @staticmethod
        def chunk_gated_delta_rule(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            return call_with_fallback(
                "chunk_gated_delta_rule",
                functools.partial(_chunk, *args, **kwargs),
                functools.partial(_chunk_without_gdn, "chunk_gated_delta_rule", *args, **kwargs),
            )

        @staticmethod
        def chunk_kda(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            return call_with_fallback(
                "chunk_kda",
                functools.partial(_chunk_kda, *args, **kwargs),
                functools.partial(_chunk_without_gdn, "chunk_kda", *args, **kwargs),
            )

    return GdnBackend


@functools.wraps(ours.chunk_gated_delta_rule)
def _chunk(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    _require_kernel(q, v)
    return ours.chunk_gated_delta_rule(q, k, v, *args, **kwargs)


@functools.wraps(ours.fused_recurrent_gated_delta_rule)
def _fused_recurrent(
    q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    _require_kernel(q, v)
    return ours.fused_recurrent_gated_delta_rule(q, k, v, *args, **kwargs)


@functools.wraps(ours.chunk_kda)
def _chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    _require_kernel(q, v, g)
    return ours.chunk_kda(q, k, v, g, *args, **kwargs)


@functools.wraps(ours.fused_recurrent_kda)
def _fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    _require_kernel(q, v, g, is_recurrent=True)
    return ours.fused_recurrent_kda(q, k, v, g, *args, **kwargs)


def _require_kernel(q: Tensor, v: Tensor, g: Tensor | None = None, *, is_recurrent: bool = False) -> None:
    """Raise NotImplementedError on a GPU for a call that only `eager` supports: FLA has kernels for it."""
    if not has_kernel(q, v, g, is_recurrent=is_recurrent):
        raise NotImplementedError(
            f"v: expected a call that a kernel of gdn supports, got K={q.shape[-1]}, V={v.shape[-1]}"
            + ("" if g is None else f", g {list(g.shape)}")
        )


def _chunk_without_gdn(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call FLA's function again, with gdn left out of its dispatch."""
    _dispatch.is_fallback = True
    try:
        return getattr(import_module(CHUNKED[name]), name)(*args, **kwargs)
    finally:
        _dispatch.is_fallback = False


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
    """Run FLA's convolution: its states hold W inputs, gdn's W - 1, so one tap of zero goes in front."""
    if weight is None or residual is not None or cp_context is not None or x.dim() != 3:
        raise NotImplementedError("causal_conv1d: a residual or context parallelism is FLA's own")
    if kwargs.get("seq_idx") is not None and cu_seqlens is None:
        raise NotImplementedError("seq_idx: expected cu_seqlens with it, got None")
    if initial_state is not None or output_final_state:
        weight = nn.functional.pad(weight, (1, 0))
    return causal_conv1d(
        x, weight, bias, activation=activation_name(activation), initial_state=initial_state,
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
    y = causal_conv1d_update(rows, cache, weight, bias, activation=activation_name(activation))
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
    gate = "silu" if activation == "swish" else activation
    return rms_norm_gated(x, g, weight, eps=eps, activation=gate)


PACKAGE = Package(
    (
        (
            "fla.ops.gated_delta_rule.fused_recurrent",
            "fused_recurrent_gated_delta_rule",
            _fused_recurrent,
        ),
        ("fla.modules.causal_conv1d.ops", "causal_conv1d", _conv),
        ("fla.modules.causal_conv1d.ops", "causal_conv1d_update", _conv_update),
        ("fla.modules.norm.fused_norm_gate", "rms_norm_gated", _norm),
    ),
    loaded=((RECURRENT_KDA, "fused_recurrent_kda", _fused_recurrent_kda),),
)
