"""Compare every output and gradient of a function with the reference recurrence in fp64.

    error = norm(x - ref) / max(norm(ref), floor)
    floor = 1e-6 of the same output's norm under the gate 'none'

A provider is any callable with the signature of `gdn.chunk_gated_delta_rule`: q, k, v, and the rest by
keyword.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gdn import reference
from gdn.testing.cases import Case
from gdn.testing.memory import poison_memory
from gdn.testing.tensors import Inputs, inputs

Provider = Callable[..., tuple[Tensor, Tensor | None]]

GRADIENTS = {
    "q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta", "initial_state": "dh0", "A_log": "dA_log",
    "dt_bias": "ddt_bias",
}  # fmt: skip
_VALUES, _VECTORS = ("o", "final_state"), ("dq", "dk", "dv", "dh0")
_SCALARS = ("dg", "dbeta", "dA_log", "ddt_bias")
OUTPUTS = (*_VALUES, *_VECTORS, *_SCALARS)
# relative RMS against fp64: random keys, correlated keys
_BF16 = {_VALUES: (5e-3, 1e-2), _VECTORS: (8e-3, 2e-2), _SCALARS: (6e-3, 2e-2)}
_ANY = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-10, 1e-9)}


@dataclass(frozen=True)
class Verdict:
    """Hold the error of one output of one case beside its limit.

    Parameters:
        case     the problem
        dtype    dtype of q, k, v
        output   o, final_state, dq, dk, dv, dg, dbeta, dh0 (of initial_state), dA_log, ddt_bias
        error    norm(x - ref) / norm(ref); infinite for NaN, Inf, a wrong shape or a wrong dtype
        max_abs  largest |x - ref|
        limit    the limit of `error_limits`
        ok       error <= limit
    """

    case: Case
    dtype: str
    output: str
    error: float
    max_abs: float
    limit: float
    ok: bool


def error_limits(dtype: torch.dtype, keys: str) -> dict[str, float]:
    """Return the largest allowed error of each output by name.

    Args:
        dtype  dtype of q, k, v: bf16 has 5e-3 for outputs, 8e-3 for gradients of vectors, 6e-3 for those of
               gates; fp16 half of that, fp32 1e-5, fp64 1e-10
        keys   random as above; correlated 2 to 10 times as much; identical and negative 3 times that, as
               (I + A) is badly conditioned

    Returns: output -> norm(x - ref) / norm(ref) at most.
    """
    column = 0 if keys == "random" else 1
    factor = 3.0 if keys in ("identical", "negative") else 1.0
    if dtype in _ANY:
        return dict.fromkeys(OUTPUTS, factor * _ANY[dtype][column])
    factor *= {torch.bfloat16: 1.0, torch.float16: 0.5}[dtype]
    return {output: factor * limits[column] for names, limits in _BF16.items() for output in names}


BACKEND_OPTIONS = ("output_final_state", "exact", "batch_invariant")


def reference_rule(
    q: Tensor, k: Tensor, v: Tensor, *gates: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute the reference recurrence as a provider: options that only choose a kernel are ignored."""
    for name in BACKEND_OPTIONS:
        options.pop(name)
    return reference.gated_delta_rule(q, k, v, *gates, **options)


def reference_by_heads(
    q: Tensor, k: Tensor, v: Tensor, *gates: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute `reference_rule` with sequences of one length as heads: N times fewer steps, equal arithmetic.

    On a GPU the time of a step does not depend on the number of heads.
    """
    offsets, (B, T) = options.get("cu_seqlens"), q.shape[:2]
    lengths = [T] * B if offsets is None else offsets.diff().tolist()
    N = len(lengths)
    if N < 2 or len(set(lengths)) > 1 or N * lengths[0] != B * T or T == 0:
        return reference_rule(q, k, v, *gates, **options)
    options.pop("cu_seqlens", None)

    def beside(x: Tensor) -> Tensor:
        return x.reshape(N, -1, *x.shape[2:]).transpose(0, 1).flatten(1, 2)[None]

    for name in ("g", "beta"):
        if options.get(name) is not None:
            options[name] = beside(options[name])
    for name in ("A_log", "dt_bias"):
        if options.get(name) is not None:
            options[name] = torch.cat([options[name]] * N)
    S = options.get("initial_state")
    if S is not None:
        options["initial_state"] = S.flatten(0, 1)[None]
    o, final = reference_rule(
        beside(q), beside(k), beside(v), *(None if x is None else beside(x) for x in gates), **options
    )
    o = o[0].unflatten(1, (N, -1)).transpose(0, 1).reshape(v.shape)
    return o, final[0].unflatten(0, (N, -1))


def check(
    provider: Provider,
    case: Case,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    with_backward: bool = True,
    budget: int = 2**26,
) -> list[Verdict]:
    """Run a function on a case, forward and backward, and compare every output with the reference in fp64.

        error = norm(x - ref) / max(norm(ref), floor),  floor = 1e-6 of the norm without decay

    The function's memory holds NaN until it is written (`poison_memory`).

    Args:
        provider       function of q, k [B, T, H, K], v [B, T, HV, V] and the keyword arguments of
                       `gdn.chunk_gated_delta_rule`, returning o [B, T, HV, V] and the state [N, HV, K, V]
        case           the problem: `Case(gate="slow", heads=(2, 4), sizes=(128, 128), lengths=packed(100,
                       33))`
        dtype          dtype of q, k and v; gates and states are fp32 or wider unless the case narrows them
        seed           seed of the random inputs
        device         device of the inputs; the reference runs there, too
        with_backward  also compare the gradients of all differentiable inputs
        budget         state elements of all tokens that the reference keeps; past it, only evenly spread key
                       heads are computed and compared

    Returns: one `Verdict` per output: o, final_state, dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias.
    Raises: what the function raises.
    Cost: one step per token in fp64: about 10 s for 2**25 tokens times state elements on a CPU.

    Example:
        >>> import gdn
        >>> verdicts = check(gdn.chunk_gated_delta_rule, Case(gate="slow", heads=(2, 4)), torch.bfloat16)
        >>> [verdict.output for verdict in verdicts if not verdict.ok]
        []
    """

    def made(gate: str) -> Inputs:
        return inputs(replace(case, gate=gate), dtype, seed=seed, device=device)

    given = made(case.gate)
    results = run_poisoned(provider, given, with_backward)
    expected = expect_outputs(given, lambda: made("none"), affordable_heads(case, budget), with_backward)
    return compare_outputs(results, expected, case)


def run_poisoned(provider: Provider, given: Inputs, with_backward: bool = True) -> dict[str, Tensor]:
    """Return the outputs of `run`, with NaN in all memory that the provider does not write."""
    with poison_memory():
        return run(provider, given, with_backward)


@dataclass(frozen=True)
class Expected:
    """Hold the reference's outputs on some key heads of a problem, to compare many providers with."""

    given: Inputs
    index: list[int]
    outputs: dict[str, Tensor]
    floor: Callable[[str], float]


def expect_outputs(
    given: Inputs,
    calm: Callable[[], Inputs],
    num_heads: int,
    with_backward: bool,
    rule: Provider = reference_rule,
) -> Expected:
    """Compute the reference on `num_heads` evenly spread key heads.

    calm: makes the same problem without decay, for the floor. rule: the reference as a provider.
    """
    H = given.tensors["q"].shape[2]
    index = sorted({round(i * (H - 1) / max(num_heads - 1, 1)) for i in range(num_heads)})
    floors: dict[str, float] = {}

    def floor(output: str) -> float:
        if not floors:
            outputs = run(rule, calm().heads(index).double(), with_backward)
            floors.update({name: 1e-6 * _norm(x) for name, x in outputs.items()})
        return floors.get(output, 0.0)

    return Expected(given, index, run(rule, given.heads(index).double(), with_backward), floor)


def compare_outputs(results: Mapping[str, Tensor], expected: Expected, case: Case) -> list[Verdict]:
    """Return the verdict on each output of a provider: checked on all heads, compared on the reference's."""
    dtype = expected.given.tensors["q"].dtype
    limits, verdicts = error_limits(dtype, case.keys), []
    for output, x, ref in pair_outputs(results, expected):
        error = max_abs = math.inf
        if x is not None:
            error, max_abs = measure_error(x, ref, limits[output], partial(expected.floor, output))
        verdicts.append(
            Verdict(case, str(dtype), output, error, max_abs, limits[output], error <= limits[output])
        )
    return verdicts


def pair_outputs(
    results: Mapping[str, Tensor], expected: Expected
) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Yield (output, provider's tensor, reference's tensor) on the heads that the reference computed.

    The provider's tensor is None if it has NaN or Inf anywhere, a wrong dtype or a wrong number of heads.
    """
    q, v = (expected.given.tensors[name] for name in "qv")
    H, HV, index = q.shape[2], v.shape[2], expected.index
    ratio = HV // H
    for output, ref in expected.outputs.items():
        x = results[output]
        wanted = index if output in ("dq", "dk") else [h * ratio + j for h in index for j in range(ratio)]
        axis = {"dA_log": 0, "ddt_bias": 0, "dh0": 1, "final_state": 1}.get(output, 2)
        is_sound = _dtype(output, expected.given) == x.dtype and x.dim() == ref.dim()
        if not is_sound or x.shape[axis] != (H if output in ("dq", "dk") else HV) or not x.isfinite().all():
            yield output, None, ref
            continue
        yield output, x.index_select(axis, torch.tensor(wanted, device=x.device)), ref


def affordable_heads(case: Case, budget: int) -> int:
    """Return the number of key heads whose states, over all tokens, have at most `budget` elements."""
    return max(1, min(case.heads[0], budget * case.heads[0] // max(case.cost, 1)))


def measure_error(x: Tensor, ref: Tensor, limit: float, floor: Callable[[], float]) -> tuple[float, float]:
    """Return norm(x - ref) / max(norm(ref), floor()), and the largest |x - ref|.

    Both are infinite for NaN, Inf or a wrong shape. floor is called only where the error is above the limit.
    """
    if x.shape != ref.shape or not bool(x.isfinite().all()):
        return math.inf, math.inf
    if x.numel() == 0:
        return 0.0, 0.0
    difference = x.double() - ref.double()
    distance, size = _norm(difference), _norm(ref)
    if distance == 0:
        return 0.0, 0.0
    if distance > limit * size:
        size = max(size, floor())
    return (distance / size if size > 0 else math.inf), float(difference.abs().max())


def run(provider: Provider, given: Inputs, with_backward: bool = True) -> dict[str, Tensor]:
    """Return the outputs of one call by name, and the gradients of its differentiable arguments."""
    leaves = {
        name: x.detach().requires_grad_(with_backward) if name in GRADIENTS else x
        for name, x in given.tensors.items()
    }
    # by keyword but for the first three, as both forms of the rule take them
    arguments = {"g": None, "beta": None, **leaves, **given.options}
    q, k, v = (arguments.pop(name) for name in ("q", "k", "v"))
    o, final_state = provider(q, k, v, **arguments)
    assert final_state is not None
    results = {"o": o.detach(), "final_state": final_state.detach()}
    if with_backward:
        names = [name for name in leaves if name in GRADIENTS]
        gradients = torch.autograd.grad(
            [o, final_state],
            [leaves[name] for name in names],
            [given.do.to(o.dtype), given.dfinal_state.to(final_state.dtype)],
            allow_unused=True,
        )
        for name, x in zip(names, gradients, strict=True):
            results[GRADIENTS[name]] = torch.zeros_like(leaves[name]) if x is None else x
    return results


def _dtype(output: str, given: Inputs) -> torch.dtype:
    """Return the dtype of an output: q's for o, at least fp32 for states, for a gradient its tensor's."""
    q = given.tensors["q"]
    if output == "final_state":
        return torch.promote_types(q.dtype, torch.float32)
    names = {gradient: name for name, gradient in GRADIENTS.items()}
    return q.dtype if output == "o" else given.tensors[names[output]].dtype


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double()))
