"""Provide the public functions of the gated delta rule: chunked, recurrent, and `explain`."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from gdn import settings
from gdn.backends import Report, report, select_recurrent
from gdn.notation import Decay, GateBias, HeadParam, Keys, Offsets, PerHead, Q, State, Values
from gdn.ops.fastpath import RuleFunction
from gdn.ops.library import CHUNK_FORWARD, RECURRENT_FORWARD, is_autocasting
from gdn.problem import ContextParallel, Problem, check_context, parse

P = ParamSpec("P")
R = TypeVar("R")


def with_fla_hint(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function: name the nearest argument and FLA's module in a TypeError about the arguments."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # no inner frame: Python raised it for the arguments, not the function's body
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                arguments = inspect.signature(function).parameters
                hints = [nearest_name(name, arguments) for name in kwargs if name not in arguments]
                # Python 3.13 and newer name it themselves
                message = str(error) if "Did you mean" in str(error) else "".join([str(error), *hints])
                raise TypeError(
                    f"{message} (options are keyword-only and tensors are [B, T, H, K]; functions with FLA's "
                    "positions, head_first and old names are in gdn.integrations.fla)"
                ) from None
            raise

    return call


def nearest_name(name: str, names: Iterable[str]) -> str:
    """Return " (did you mean x?)" for the name x that is like `name`; an empty string without one."""
    return "".join(f" (did you mean {match}?)" for match in difflib.get_close_matches(name, names, 1))


@with_fla_hint
def chunk_gated_delta_rule(
    q: Q,
    k: Keys,
    v: Values,
    g: Decay | None = None,
    beta: PerHead | None = None,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: HeadParam | None = None,
    dt_bias: GateBias | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Offsets | None = None,
    cu_seqlens_cpu: Offsets | None = None,
    cp_context: ContextParallel | None = None,
    exact: bool = True,
    batch_invariant: bool = False,
    recompute: bool = False,
    backend: str | None = None,
) -> tuple[Values, State | None]:
    """Compute the gated delta rule in chunks of 64 tokens, for training and prefill.

        S <- e^g S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q

    A decay per head multiplies S; a decay per key channel (KDA) multiplies its rows, S <- Diag(e^g) S.

    Args:                           shape                 dtype
        q, k                        [B, T, H, K]          bf16, fp16, fp32 (fp64 on eager), one for q, k, v
        v                           [B, T, HV, V]         dtype of q; value head j reads key head
                                                          j // (HV // H)
        g                           [B, T, HV] or         any float; natural log of the decay, <= 0, of a
                                    [B, T, HV, K] or None head or of each of its key channels; None: 0
        beta                        [B, T, HV] or None    any float; write strength; None: 1
        scale                       number or None        None: K ** -0.5
        initial_state               [N, HV, K, V] or None any float; None: zero
        output_final_state          bool                  True: return the state after each sequence
        use_qk_l2norm_in_kernel     bool                  q, k <- x * rsqrt(sum(x * x) + 1e-6), before scale
        use_gate_in_kernel          bool                  raw logits: g <- -exp(A_log) softplus(g + dt_bias)
        A_log                       [HV] or None          any float; only with use_gate_in_kernel
        dt_bias                     [HV] or None          any float; [HV, K] with a decay per key channel
        lower_bound                 number < 0 or None    g <- lower_bound sigmoid(exp(A_log) (g + dt_bias));
                                                          A_log may be None with it: exp(A_log) = 1
        use_beta_sigmoid_in_kernel  bool                  raw logits: beta <- sigmoid(beta)
        allow_neg_eigval            bool                  beta <- 2 sigmoid(beta); requires the line above
        state_v_first               bool                  states are [N, HV, V, K] in memory
        cu_seqlens                  [N+1] int32, int64    packed: tokens cu_seqlens[n]:cu_seqlens[n+1] of the
                                                          only batch row are sequence n, which may be empty
        cu_seqlens_cpu              [N+1] int32, int64    a copy on the CPU, if the caller has one, so that
                                                          the launch can be planned without a device read
        cp_context                  ContextParallel or    tensors hold the tokens of this rank, offsets are
                                    None                  global; see `gdn.ContextParallel`
        exact                       bool                  False: history decayed below exp(-20) may be dropped
                                                          when k is normalised in the kernel
        batch_invariant             bool                  True: the bits of a sequence do not depend on the
                                                          other sequences of the batch (docs/bits.md)
        recompute                   bool                  True: keep no states for the backward, which
                                                          computes them again: less memory, the same bits
        backend                     str or None           None: chosen automatically; a named one never falls
                                                          back

    Returns:
        o            [B, T, HV, V]   dtype of q; zero past cu_seqlens[-1]
        final_state  [N, HV, K, V]   fp32 (fp64 for fp64 inputs), or None; V first with state_v_first

    Gradients: q, k, v, g, beta, initial_state, A_log and dt_bias get gradients from both outputs, each in the
            dtype of its tensor.
    Autocast: q, k and v are cast to the autocast dtype; nothing else changes.
    Raises: TypeError, ValueError, NotImplementedError as in `gdn.problem.parse`, before anything is computed.
    Cost:   about (6 K V + 4 C (K + V)) flop per token and value head forward, twice that backward;
            memory linear in T.
    Source: arXiv:2412.06464, section 3.3; arXiv:2510.26692 for a decay per key channel.

    Example:
        >>> import torch, gdn
        >>> q, k, v = (torch.randn(1, 100, 2, 16) for _ in range(3))
        >>> g, beta = -torch.rand(1, 100, 2), torch.rand(1, 100, 2)
        >>> o, S = gdn.chunk_gated_delta_rule(
        ...     q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
        ... )
        >>> o.shape, S.shape
        (torch.Size([1, 100, 2, 16]), torch.Size([1, 2, 16, 16]))
    """
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    options = (
        scale, lower_bound, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, exact, batch_invariant, recompute,
        backend, cp_context,
    )  # fmt: skip
    if cp_context is not None:
        check_context(cp_context)
        return cp_context.rule(_arguments(tensors, options) | {"cp_context": None})
    return _chunk(q, tensors, options)


def chunk_on_own_keys(q: Q, k: Keys, v: Values, **options: Any) -> tuple[Values, State | None]:
    """Run `chunk_gated_delta_rule` on q and k that only this call reads, for layers.

    A backward that keeps no graph may store dq and dk over q and k. Gradients have the same bits.
    """
    given = _DEFAULTS | {"q": q, "k": k, "v": v} | options
    values = tuple([given[name] for name in _ARGUMENTS])
    count = len(Problem.declaration.tensors)
    return _chunk_on_own_keys(q, values[:count], values[count:])


@with_fla_hint
def fused_recurrent_gated_delta_rule(
    q: Q,
    k: Keys,
    v: Values,
    *,
    g: Decay | None = None,
    beta: PerHead | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: HeadParam | None = None,
    dt_bias: GateBias | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Offsets | None = None,
    cu_seqlens_cpu: Offsets | None = None,
    cp_context: ContextParallel | None = None,
    exact: bool = True,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> tuple[Values, State | None]:
    """Compute the gated delta rule token by token, for short sequences and single steps.

        S <- e^g S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q

    Arguments, results, gradients and errors are those of `chunk_gated_delta_rule`, but g and beta are
    keyword-only, there is no `recompute`, and a cp_context raises NotImplementedError. The backward is the
    chunked one. `decode` does the same on the state pool of an engine, in place.
    Cost:   6 K V flop per token and value head; the state is read and written once per token.
    Source: arXiv:2412.06464, equation 10.
    """
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu)
    # it keeps nothing but its inputs, so `recompute` is not an argument
    options = (
        scale, lower_bound, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, exact, batch_invariant, False,
        backend, cp_context,
    )  # fmt: skip
    return _recurrent(q, tensors, options)


def explain(
    q: Q, k: Keys, v: Values, g: Decay | None = None, beta: PerHead | None = None, **options: Any
) -> Report:
    """Explain which backend `chunk_gated_delta_rule(q, k, v, g, beta, **options)` gets, and why.

    Returns a Report: print it, or read `chosen` and `refusals`, the reason of each backend that does not
    support the call. With `cp_context` it is about the tokens of this rank, and `exchange` says what the
    exchange of states costs by a model, without communication. Raises as `chunk_gated_delta_rule` does for an
    invalid call.
    """
    arguments = inspect.signature(chunk_gated_delta_rule).parameters
    for name in options:
        if name not in arguments:
            hint = nearest_name(name, arguments)
            raise TypeError(
                f"explain: expected options of chunk_gated_delta_rule, got the unexpected {name}{hint}"
            )
    context = options.pop("cp_context", None)
    if context is None:
        problem: Problem = parse(q, k, v, g, beta, **options)
        return report(problem)
    check_context(context)
    problem, exchange = context.explain({"q": q, "k": k, "v": v, "g": g, "beta": beta, **options})
    return replace(report(problem), exchange=exchange)


def has_kernel(q: Tensor, v: Tensor, g: Tensor | None = None, *, is_recurrent: bool = False) -> bool:
    """Return True unless `eager` alone computes calls of these sizes and dtype on a GPU, or their backward.

    g: a decay whose rank matters. The patches of other packages call this, since on a GPU the kernels of a
    patched package are faster than `eager`.
    """
    if q.device.type == "cpu" or torch.compiler.is_compiling():
        return True
    channels = () if g is None else tuple(g.shape[3:])
    sizes = q.shape[-1], v.shape[-1], channels
    return _has_kernel(q.device, q.dtype, sizes, settings.backend(), is_recurrent)


@functools.cache
def _has_kernel(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, tuple[int, ...]], asked: str | None,
    is_recurrent: bool,
) -> bool:  # fmt: skip
    K, V, channels = sizes
    shapes = (1, 1, 1, K), (1, 1, 1, V), (1, 1, 1, *channels)
    q, v, g = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
    if asked == "eager":
        return True
    if is_recurrent:
        # its backward is that of the chunked form; other packages have none
        return select_recurrent(parse(q, q, v, g)).name != "eager"
    dispatched = explain(q, q, v, g)
    return "eager" not in (dispatched.chosen, dispatched.backward) and dispatched.chosen is not None


_ARGUMENTS = (*Problem.declaration.names, "cp_context")
_DEFAULTS = {x.name: x.default for x in inspect.signature(chunk_gated_delta_rule).parameters.values()}


def _parse(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Problem:
    """Check the arguments of a call."""
    return parse(**_arguments(tensors, options))


def _arguments(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of `parse` by name; under autocast q, k and v are cast first."""
    given = dict(zip(_ARGUMENTS, (*tensors, *options), strict=True))
    given["q"], given["k"], given["v"] = _autocast(given["q"], given["k"], given["v"])
    return given


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v in the autocast dtype under autocast, as torch does for attention; else unchanged."""
    if isinstance(q, Tensor) and is_autocasting(q.device):
        dtype = torch.get_autocast_dtype(q.device.type)
        if q.is_floating_point() and q.dtype != torch.float64:
            q, k, v = (
                x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in (q, k, v)
            )
    return q, k, v


_chunk = RuleFunction("chunk_gated_delta_rule", CHUNK_FORWARD, _parse)
_chunk_on_own_keys = replace(_chunk, owns_keys=True)
_recurrent = RuleFunction("fused_recurrent_gated_delta_rule", RECURRENT_FORWARD, _parse)
