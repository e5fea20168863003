"""How accuracy is judged: a provider against the law in fp64, output by output.

    error = norm(x - ref) / max(norm(ref), floor)
    floor = 1e-6 of the same output's norm under the gate 'none'

A provider is any callable that takes q, k, v and, by keyword, what `gdn.chunk_gated_delta_rule` takes.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gdn import reference
from gdn.bench.cases import Case, Inputs, inputs

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
class Row:
    """One output of one case against its limit. NaN, Inf, a wrong shape or a wrong dtype fail."""

    case: Case
    dtype: str
    output: str
    error: float
    max_abs: float
    limit: float
    ok: bool


def gates(dtype: torch.dtype, keys: str) -> dict[str, float]:
    """The largest error allowed for each output, with inputs of a dtype and keys of a kind."""
    column = 0 if keys == "random" else 1
    factor = 3.0 if keys in ("identical", "negative") else 1.0
    if dtype in _ANY:
        return dict.fromkeys(OUTPUTS, factor * _ANY[dtype][column])
    factor *= {torch.bfloat16: 1.0, torch.float16: 0.5}[dtype]
    return {output: factor * limits[column] for names, limits in _BF16.items() for output in names}


FREEDOM = ("output_final_state", "exact", "batch_invariant")


def law(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """The fp64 law as a provider: it has no use for the options that only a backend's freedom hangs on."""
    for name in FREEDOM:
        options.pop(name)
    return reference.gated_delta_rule(q, k, v, *gates, **options)


def law_side_by_side(
    q: Tensor, k: Tensor, v: Tensor, *gates: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """`law` with sequences of one length as further heads: N times fewer steps, the same arithmetic in each.

    On a GPU a step's time does not depend on how many heads take it.
    """
    offsets, (B, T) = options.get("cu_seqlens"), q.shape[:2]
    lengths = [T] * B if offsets is None else offsets.diff().tolist()
    N = len(lengths)
    if N < 2 or len(set(lengths)) > 1 or N * lengths[0] != B * T or T == 0:
        return law(q, k, v, *gates, **options)
    options.pop("cu_seqlens", None)

    def beside(x: Tensor) -> Tensor:
        return x.reshape(N, -1, *x.shape[2:]).transpose(0, 1).flatten(1, 2)[None]

    for name in ("g", "beta"):
        if options.get(name) is not None:
            options[name] = beside(options[name])
    for name in ("A_log", "dt_bias"):
        if options.get(name) is not None:
            options[name] = options[name].repeat(N)
    S = options.get("initial_state")
    if S is not None:
        options["initial_state"] = S.flatten(0, 1)[None]
    o, final = law(
        beside(q), beside(k), beside(v), *(None if x is None else beside(x) for x in gates), **options
    )
    o = o[0].unflatten(1, (N, -1)).transpose(0, 1).reshape(v.shape)
    return o, final[0].unflatten(0, (N, -1))


def law_of_packets(
    q: Tensor, k: Tensor, v: Tensor, *gates: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The law with the state after every token, [B * T, HV, ...], as speculation keeps them."""
    outputs, states, S = [], [], options.pop("initial_state")
    for t in range(q.shape[1]):
        one = {
            name: x[:, t : t + 1] if name in ("g", "beta") and x is not None else x
            for name, x in options.items()
        }
        token = (None if x is None else x[:, t : t + 1] for x in (q, k, v, *gates))
        o, S = law_side_by_side(*token, initial_state=S, **one)  # type: ignore[arg-type]
        outputs.append(o)
        states.append(S)
    return torch.cat(outputs, 1), torch.stack(states, 1).flatten(0, 1)


def check(
    provider: Provider,
    case: Case,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    with_backward: bool = True,
    budget: int = 2**26,
) -> list[Row]:
    """Run a provider on a case, forward and backward, and judge every output it has.

    budget: state elements over all tokens that the law may keep; past it fewer key heads of the same
    problem are compared. Raises what the provider raises.
    """

    def made(gate: str) -> Inputs:
        return inputs(replace(case, gate=gate), dtype, seed=seed, device=device)

    given = made(case.gate)
    results = answers(provider, given, with_backward)
    expected = expect(given, lambda: made("none"), affordable(case, budget), with_backward)
    return judge(results, expected, case)


def answers(provider: Provider, given: Inputs, with_backward: bool = True) -> dict[str, Tensor]:
    """`run` in poisoned memory."""
    with poisoned():
        return run(provider, given, with_backward)


@dataclass(frozen=True)
class Expected:
    """What the law answers on some key heads of a problem: found once, held against many providers."""

    given: Inputs
    index: list[int]
    outputs: dict[str, Tensor]
    floor: Callable[[str], float]


def expect(
    given: Inputs,
    calm: Callable[[], Inputs],
    num_heads: int,
    with_backward: bool,
    law: Provider = law,
) -> Expected:
    """Ask the law about `num_heads` evenly spread key heads; `calm` makes the same problem without decay."""
    H = given.tensors["q"].shape[2]
    index = sorted({round(i * (H - 1) / max(num_heads - 1, 1)) for i in range(num_heads)})
    floors: dict[str, float] = {}

    def floor(output: str) -> float:
        if not floors:
            found = run(law, calm().heads(index).double(), with_backward)
            floors.update({name: 1e-6 * _norm(x) for name, x in found.items()})
        return floors.get(output, 0.0)

    return Expected(given, index, run(law, given.heads(index).double(), with_backward), floor)


def judge(results: Mapping[str, Tensor], expected: Expected, case: Case) -> list[Row]:
    """A provider's outputs, all heads of them, against the law's on the heads that it was asked about."""
    dtype = expected.given.tensors["q"].dtype
    limits, rows = gates(dtype, case.keys), []
    for output, x, ref in side_by_side(results, expected):
        error = max_abs = math.inf
        if x is not None:
            error, max_abs = compare(x, ref, limits[output], lambda output=output: expected.floor(output))  # type: ignore[misc]
        rows.append(Row(case, str(dtype), output, error, max_abs, limits[output], error <= limits[output]))
    return rows


def side_by_side(
    results: Mapping[str, Tensor], expected: Expected
) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """(output, what a provider found, what the law says) on the heads that the law was asked about.

    None in place of what holds NaN or Inf anywhere, or has a wrong dtype or number of heads.
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


def affordable(case: Case, budget: int) -> int:
    """How many key heads of a case the law may be asked about for `budget` state elements over all tokens."""
    return max(1, min(case.heads[0], budget * case.heads[0] // max(case.cost, 1)))


def compare(x: Tensor, ref: Tensor, limit: float, floor: Callable[[], float]) -> tuple[float, float]:
    """Relative RMS error and largest difference. The floor is asked for only where it matters."""
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
    """Outputs of one call by name, and the gradients of every differentiable argument it was given."""
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
        found = torch.autograd.grad(
            [o, final_state],
            [leaves[name] for name in names],
            [given.do.to(o.dtype), given.dfinal_state.to(final_state.dtype)],
            allow_unused=True,
        )
        for name, x in zip(names, found, strict=True):
            results[GRADIENTS[name]] = torch.zeros_like(leaves[name]) if x is None else x
    return results


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory left unwritten holds NaN: torch fills it in its deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _dtype(output: str, given: Inputs) -> torch.dtype:
    """The dtype an output must have: q's for o, fp32 or better for states, its tensor's for a gradient."""
    q = given.tensors["q"]
    if output == "final_state":
        return torch.promote_types(q.dtype, torch.float32)
    names = {gradient: name for name, gradient in GRADIENTS.items()}
    return q.dtype if output == "o" else given.tensors[names[output]].dtype


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double()))
