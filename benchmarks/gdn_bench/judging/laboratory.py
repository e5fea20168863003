"""Accuracy side by side: every provider's every output against the law in fp64, on the same inputs.

Beside the protocol's error each output is read as others publish theirs, over its elements x and the law's r:

    rmse = sqrt(mean((x - r)^2))     rmse_over_mean = rmse / mean|r|     nrmse = rmse / std(r)
    r2 = 1 - sum((x - r)^2) / sum((r - mean r)^2)                        pearson = correlation of x and r
    close = share of |x - r| <= 1e-5 + 1e-2 |r|                          max_abs, mean_abs of x - r

A profile says what passes: `gdn` is `accuracy.error_limits`; `pto` is what pto-kernels asks end to end of its
own kernels (0.15, 0.99, 0.995), of Triton's (0.09) and between the two (0.02, 0.999, 0.999); here the law is
the reference, and the final state is held to it as well. Of each stage it asks |x - r| <= 1e-5 + 1e-2 |r|
everywhere, or RMSE / mean|r| <= 0.05 and R2 >= 0.99, and never |x - r| > 1; of one call beside the stages it
could be made of, RMSE / mean|r| < 0.005 or R2 > 0.9999.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gdn.testing import accuracy, cases
from gdn.testing.accuracy import Expected
from gdn.testing.cases import Case, packed
from gdn.testing.tensors import Inputs, inputs
from gdn_bench.judging import stagewise
from gdn_bench.problems import catalog, jobs
from gdn_bench.providers.provider import Provider

RTOL, ATOL = 1e-2, 1e-5
STAGE, WHOLE = 0.05, 0.005  # RMSE / mean|r| of a stage, and of one call beside its stages
# never worse than the best peer by more than 10 %; dg and dbeta at most 0.7 of FLA's
WORSE, OF_FLA = 1.1, {"dg": 0.7, "dbeta": 0.7}
ROUNDING = 1e-6  # errors below are what fp32 leaves: no one's merit
# state elements over all tokens that the law keeps with gradients (24 bytes each); without, 8 times as many
BUDGET = {"cpu": 2**26, "cuda": 2**29}
_BASE = replace(catalog.MIXED, heads=(16, 32), lengths=packed(1024))
REGIMES: dict[str, Case] = {
    **{gate: replace(_BASE, gate=gate) for gate in ("mixed", "strong", "mild", "slow", "none", "model")},
    **{
        f"mild {keys} keys": replace(_BASE, gate="mild", keys=keys)
        for keys in ("correlated", "identical", "negative")
    },
    "mild ragged": replace(_BASE, gate="mild", lengths=packed(1, 63, 64, 65, 127, 704)),
    "all options": replace(_BASE, **catalog.VARIANTS["gated"]),  # type: ignore[arg-type]
}
_PTO = Case("strong", sizes=(128, 128))


def _pto(heads: tuple[int, int], lengths: cases.Lengths) -> tuple[str, Case]:
    words = next((n for n, ladder in catalog.LADDERS.items() if ladder == lengths), None)
    ends = lengths.ends or ()
    each = ",".join(str(b - a) for a, b in zip(ends, ends[1:], strict=False))
    name = f"{heads[0]}/{heads[1]} {words or each}"
    return name, replace(_PTO, heads=heads, lengths=lengths)


NAMED: dict[str, dict[str, Case]] = {
    "regimes": REGIMES,
    "ladders": {name: replace(catalog.case(name), gate="mild") for name in catalog.SETS["ladders"]},
    "pto": dict(_pto((16, 16), lengths) for lengths in catalog.PTO_LENGTHS),
    "pto-gva": dict(
        _pto(catalog.heads(name), lengths)
        for name in catalog.PTO_GVA
        for lengths in catalog.PTO_LENGTHS
        if lengths not in (packed(384), cases.LONG_LADDER)
    ),
}


@dataclass(frozen=True)
class Metrics:
    """How far x is from r, in fp64; infinite, and r2, pearson and close NaN, where x is no answer."""

    rmse: float = math.inf
    rmse_over_mean: float = math.inf
    nrmse: float = math.inf
    r2: float = math.nan
    pearson: float = math.nan
    close: float = math.nan
    max_abs: float = math.inf
    mean_abs: float = math.inf


@dataclass(frozen=True)
class Reading:
    """One output of one provider: `error` and `limit` are the protocol's, `ok` what the profile says."""

    name: str
    case: Case
    provider: str
    backend: str | None
    dtype: str
    output: str
    error: float
    limit: float
    metrics: Metrics
    ok: bool


@dataclass
class Examined:
    """What became of one case: readings, why others took no part, and the outputs themselves for pictures."""

    readings: list[Reading] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)
    found: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def metrics(x: Tensor | None, ref: Tensor) -> Metrics:
    """All of them. An empty output is right; a constant law has no r2 and no pearson (NaN)."""
    if x is None or x.shape != ref.shape or not bool(x.isfinite().all()):
        return Metrics()
    if ref.numel() == 0:
        return Metrics(0, 0, 0, 1, 1, 1, 0, 0)
    x, r = x.double().flatten(), ref.double().flatten()
    difference, centred = x - r, r - r.mean()
    rmse, mean, std = (
        float(y) for y in (difference.square().mean().sqrt(), r.abs().mean(), centred.square().mean().sqrt())
    )
    spread, own = float(centred.norm()), float((x - x.mean()).norm())
    product = float(((x - x.mean()) * centred).sum())
    return Metrics(
        rmse,
        _over(rmse, mean),
        _over(rmse, std),
        1 - (rmse / std) ** 2 if std > 0 else math.nan,
        product / (spread * own) if spread * own > 0 else math.nan,
        float((difference.abs() <= ATOL + RTOL * r.abs()).double().mean()),
        float(difference.abs().max()),
        float(difference.abs().mean()),
    )


def examine(
    name: str,
    case: Case,
    dtype: torch.dtype,
    providers: Mapping[str, Provider],
    *,
    profile: str = "gdn",
    seed: int = 0,
    device: torch.device,
    budget: int | None = None,
) -> Examined:
    """Run every provider on a case, forward and backward where it has one, and read every output.

    budget: as in `accuracy.check`; None: what the device has room for.
    """
    budget = BUDGET.get(device.type, BUDGET["cpu"]) if budget is None else budget

    def made(gate: str) -> Inputs:
        return inputs(replace(case, gate=gate), dtype, seed=seed, device=device)

    given, result = made(case.gate), Examined()
    with_backward = profile != "pto" and any("train" in p.binds for p in providers.values())
    if case.lengths.T <= 4096 and not with_backward:
        budget *= 8
    expected = accuracy.expect_outputs(
        given,
        lambda: made("none"),
        accuracy.affordable_heads(case, budget),
        with_backward,
        accuracy.reference_by_heads,
    )
    result.expected = expected.outputs
    for who, provider in providers.items():
        has_backward = with_backward and "train" in provider.binds
        try:
            answers = accuracy.run_poisoned(
                provider.function("train" if has_backward else "prefill"), given, has_backward
            )
        except NotImplementedError as error:
            result.refused[who] = _words(error)
            continue
        except Exception as error:
            # peers fail in ways of their own, and ours must not end the run
            result.failed[who] = f"{type(error).__name__}: {_words(error)}"
            continue
        own = replace(expected, outputs={x: expected.outputs[x] for x in answers})
        result.found[who] = {
            output: x for output, x, _ in accuracy.pair_outputs(answers, own) if x is not None
        }
        backend = jobs.backend(who, "train" if has_backward else "prefill", given)
        result.readings += _read(name, case, (who, backend), answers, own, profile)
    if profile == "pto":
        result.readings += list(_between(name, case, str(dtype), result.found))
        for who in [who for who in result.found if who.startswith("gdn") and stagewise.takes(case)]:
            _stages(name, case, who, given, result)
    return result


def _stages(name: str, case: Case, who: str, given: Inputs, result: Examined) -> None:
    """Adds the readings of our stages, on the backend of a provider, or why there are none."""
    backend, whose = who.partition(":")[2] or None, f"{who} stages"
    dtype = str(given.tensors["q"].dtype)
    try:
        for output, x, ref in stagewise.beside(given, backend):
            found, is_whole = metrics(x, ref), output == stagewise.WHOLE
            limit, ok = (WHOLE, pto_whole(found)) if is_whole else (STAGE, pto_stage(found))
            error = accuracy.measure_error(x, ref, limit, lambda: 0.0)[0]
            result.readings.append(
                Reading(name, case, whose, backend, dtype, output, error, limit, found, ok)
            )
    except NotImplementedError as error:
        result.refused[whose] = _words(error)
    except Exception as error:
        result.failed[whose] = f"{type(error).__name__}: {_words(error)}"


def _read(
    name: str,
    case: Case,
    who: tuple[str, str | None],
    answers: Mapping[str, Tensor],
    expected: Expected,
    profile: str,
) -> Iterator[Reading]:
    judged = accuracy.compare_outputs(answers, expected, case)
    for row, (output, x, ref) in zip(judged, accuracy.pair_outputs(answers, expected), strict=True):
        found = metrics(x, ref)
        ok = row.ok if profile == "gdn" else pto(found, 0.15 if who[0].startswith("gdn") else 0.09)
        yield Reading(name, case, *who, row.dtype, output, row.error, row.limit, found, ok)


def _between(
    name: str, case: Case, dtype: str, found: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[Reading]:
    """Ours against every peer, as pto-kernels holds its own against Triton's."""
    for ours, own in found.items():
        for peer, other in found.items():
            if not ours.startswith("gdn") or peer.startswith("gdn"):
                continue
            for output in own.keys() & other.keys():
                read = metrics(own[output], other[output])
                error = accuracy.measure_error(own[output], other[output].double(), 0.02, lambda: 0.0)[0]
                ok = pto(read, 0.02, 0.999, 0.999)
                yield Reading(name, case, f"{ours} ~ {peer}", None, dtype, output, error, 0.02, read, ok)


def pto(found: Metrics, ratio: float, r2: float = 0.99, pearson: float = 0.995) -> bool:
    """pto-kernels' gates: RMSE / mean|ref|, R2, |Pearson|; NaN fails."""
    return found.rmse_over_mean <= ratio and found.r2 >= r2 and abs(found.pearson) >= pearson


def pto_stage(found: Metrics) -> bool:
    """pto-kernels' gate of a stage; where the law is one number there is no R2 (NaN): the ratio decides."""
    is_near = found.rmse_over_mean <= STAGE and not found.r2 < 0.99
    return found.max_abs <= 1 and (found.close == 1 or is_near)


def pto_whole(found: Metrics) -> bool:
    """pto-kernels' gate of one call beside its stages."""
    return found.rmse_over_mean < WHOLE or found.r2 > 0.9999


def over_peer(own: float, peer: float) -> float:
    """Our error over a peer's, neither counted below fp32's rounding."""
    return max(own, ROUNDING) / max(peer, ROUNDING)


def against_peers(ours: Mapping[str, float], found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Where our error is worse than the best peer's by more than 10 %, or dg and dbeta above 0.7 of FLA's."""
    peers = [errors for name, errors in found.items() if not name.startswith("gdn")]
    best = {output: min((e[output] for e in peers if output in e), default=None) for output in ours}
    ratios = {x: over_peer(ours[x], least) for x, least in best.items() if least is not None}
    fla = found.get("fla", {})
    of_fla = {x: ours[x] / fla[x] for x in OF_FLA if ours.get(x, 0) > ROUNDING and fla.get(x, 0) > ROUNDING}
    worse = [x for x, ratio in ratios.items() if ratio > WORSE]
    worse += [f"{x} of fla's" for x, ratio in of_fla.items() if ratio > OF_FLA[x]]
    return {"of_best_peer": ratios, "of_fla": of_fla, "worse": worse, "reached": not worse}


def profile_of(problems: str) -> str:
    """The profile that a set is judged by where none is named."""
    return "pto" if problems.startswith("pto") else "gdn"


def label(problems: str, profile: str) -> dict[str, str]:
    """What rows say of their set and profile, and the pass they make: accuracy is `regimes` under `gdn`."""
    words = [problems, *([profile] if profile != profile_of(problems) else [])]
    name = ":".join(["accuracy", *([] if words == ["regimes"] else words)])
    return {"pass": name, "set": problems, "profile": profile}


def rows(one: Examined, head: Mapping[str, str]) -> list[dict[str, Any]]:
    """One case as rows of a results file, one per provider. head: `label`, and the case and dtype."""
    found: dict[str, dict[str, Any]] = {}
    for r in one.readings:
        row = found.setdefault(
            r.provider,
            {
                **head, "provider": r.provider, "backend": r.backend, "ok": True, "error": 0.0,
                "share_of_limit": 0.0, "errors": {},
            },
        )  # fmt: skip
        row["ok"] &= r.ok
        row["errors"][r.output] = r.error
        row["error"] = max(row["error"], r.error)
        row["share_of_limit"] = max(row["share_of_limit"], r.error / r.limit)
    beside = {who: row["errors"] for who, row in found.items() if "~" not in who}
    for who, errors in beside.items():
        # pto-kernels' gates say themselves how far from a peer ours may be
        if who.startswith("gdn") and head["profile"] == "gdn":
            found[who] |= against_peers(errors, beside)
    for kind, reasons in (("refused", one.refused), ("failed", one.failed)):
        found |= {
            who: {**head, "provider": who, "backend": None, "ok": False, kind: why}
            for who, why in reasons.items()
        }
    return list(found.values())


def flat(reading: Reading) -> dict[str, Any]:
    """A reading as a row of a table: numbers that are not finite are None."""
    values = {
        "name": reading.name, "case": str(reading.case), "provider": reading.provider,
        "backend": reading.backend, "dtype": reading.dtype.removeprefix("torch."), "output": reading.output,
        "error": reading.error, "limit": reading.limit, "ok": reading.ok, **asdict(reading.metrics),
    }  # fmt: skip
    return {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in values.items()}


def _over(x: float, size: float) -> float:
    with suppress(ZeroDivisionError):
        return x / size
    return 0.0 if x == 0 else math.inf


def _words(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
