"""patch_fla(): FLA's layers and models run on gdn, on any device, without a change to them.

FLA 0.6.0 chooses among backends for `chunk_gated_delta_rule`: gdn becomes one of them, asked first. Its
other functions are replaced, in every module that holds them:

    fused_recurrent_gated_delta_rule(q, k, v, g, gk, gv, beta, ...)                up to 64 tokens
    causal_conv1d(x [B, T, D], weight [D, W], bias, residual, initial_state [N, D, W], ...)
    causal_conv1d_update(x, cache [N, D, W], residual, weight, bias, activation)   one token, cache in place
    rms_norm_gated(x, g, weight, bias, activation, residual, prenorm, ...)

What gdn does not have stays with FLA: context parallelism, decays per channel, residuals in the convolution.
"""

import functools
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any

from torch import Tensor, nn

from gdn.integrations import fla as ours
from gdn.integrations.transformers import Replaced
from gdn.ops.conv import causal_conv1d, causal_conv1d_update
from gdn.ops.norm import rms_norm_gated
from gdn.ops.rule import explain

OLDEST = (0, 6)
ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}
Function = Callable[..., Any]

# patching is process-wide by nature: what is in force, and what it replaced
_lock = threading.RLock()
_active: list["FLAPatch"] = []
_replaced: list[Replaced] = []


class FLAPatch:
    """A patch in force until `undo()` or the end of its `with`. The last to end restores the originals."""

    def undo(self) -> None:
        """End this patch; a second call does nothing. Patches may end in any order."""
        with _lock:
            _active[:] = [patch for patch in _active if patch is not self]
            if not _active:
                for entry in reversed(_replaced):
                    entry.restore()
                _replaced.clear()

    @property
    def is_active(self) -> bool:
        return any(patch is self for patch in _active)

    def __enter__(self) -> "FLAPatch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def patch_fla() -> FLAPatch:
    """Run FLA's GatedDeltaNet layers and models on gdn: the rule, the short convolution, the gated norm.

    The chunked rule is registered with FLA's own dispatch, ahead of its other backends; while a patch is in
    force FLA asks `gdn.explain` for each call, and keeps what gdn refuses. The other functions (see the head
    of this file) are replaced wherever an imported module holds them.

    Returns: an FLAPatch: call `undo()`, or use it in a `with` statement. Patches may be nested.
    Raises:  ImportError without FLA 0.6 or newer; RuntimeError where FLA_DISABLE_BACKEND_DISPATCH=1 has
             turned FLA's dispatch off.
    Cost:    imports fla. Process-wide.
    """
    package = import_module("fla")
    version = tuple(int(part) for part in package.__version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(f"fla: expected version 0.6 or newer, got {package.__version__}")
    backends = import_module("fla.backends")
    if backends._DISPATCH_DISABLED:
        raise RuntimeError("fla: expected its dispatch to be on, got FLA_DISABLE_BACKEND_DISPATCH=1")
    patch = FLAPatch()
    with _lock:
        if not _active:
            import_module("fla.ops.gated_delta_rule.backends")
            backends.register("gated_delta_rule")(_dispatched(backends.BaseBackend))
            for module, name, serve in SERVED:
                _replace_everywhere(vars(import_module(module))[name], serve)
        _active.append(patch)
    return patch


def _dispatched(base: type) -> type:
    """gdn as a backend of FLA's dispatch; enabled while a patch is in force."""

    class GdnBackend(base):  # type: ignore[misc]
        backend_type = "gdn"
        # lower is asked first; FLA's own begin at 0
        priority = -1

        def is_enabled(self) -> bool:
            return bool(_active)

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


SERVED: tuple[tuple[str, str, Function], ...] = (
    (
        "fla.ops.gated_delta_rule.fused_recurrent",
        "fused_recurrent_gated_delta_rule",
        ours.fused_recurrent_gated_delta_rule,
    ),
    ("fla.modules.causal_conv1d.ops", "causal_conv1d", _conv),
    ("fla.modules.causal_conv1d.ops", "causal_conv1d_update", _conv_update),
    ("fla.modules.norm.fused_norm_gate", "rms_norm_gated", _norm),
)


def _replace_everywhere(original: Function, serve: Function) -> None:
    """In every imported module that holds a function of FLA, under any name, put one that gdn serves."""

    @functools.wraps(original)
    def served(*args: Any, **kwargs: Any) -> Any:
        # somebody may have kept this function beyond its patch
        if not _active:
            return original(*args, **kwargs)
        try:
            return serve(*args, **kwargs)
        except (NotImplementedError, TypeError):
            # not ours, or a name that only FLA lets pass
            return original(*args, **kwargs)

    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and not module.__name__.startswith("gdn."):
            for name in [n for n, value in list(vars(module).items()) if value is original]:
                _replaced.append(Replaced(module, name, original, served))
                setattr(module, name, served)
