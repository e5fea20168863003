"""Errors of many providers beside one another: every output, compared with the fp64 reference on equal
inputs.

Besides the error of `gdn.testing`, each output x has the numbers that others publish, r being the reference:

    rmse = sqrt(mean((x - r)^2))     rmse_over_mean = rmse / mean|r|     nrmse = rmse / std(r)
    r2 = 1 - sum((x - r)^2) / sum((r - mean r)^2)                        pearson = correlation of x and r
    close = share of |x - r| <= 1e-5 + 1e-2 |r|                          max_abs, mean_abs of x - r

The profile `gdn` holds each output to `error_limits`, the profile `pto` to the limits of `judging/pto.py`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gdn.testing import accuracy
from gdn.testing.accuracy import Expected
from gdn.testing.cases import Case, packed
from gdn.testing.tensors import Inputs, inputs
from gdn_bench.judging import pto
from gdn_bench.judging.metrics import Reading, metrics
from gdn_bench.problems import catalog, jobs
from gdn_bench.providers.provider import Provider

# allowed: 1.1 times the error of the best peer; for dg and dbeta 0.7 times that of FLA
WORSE, OF_FLA = 1.1, {"dg": 0.7, "dbeta": 0.7}
ROUNDING = 1e-6  # errors below it are rounding in fp32 and count as equal
# state elements of all tokens that the reference keeps with gradients, 24 bytes each; without, 8 times it
BUDGET = {"cpu": 2**26, "cuda": 2**29}
_BASE = replace(catalog.MIXED, heads=(16, 32), lengths=packed(1024))
DISTRIBUTIONS: dict[str, Case] = {
    **{gate: replace(_BASE, gate=gate) for gate in ("mixed", "strong", "mild", "slow", "none", "model")},
    **{
        f"mild {keys} keys": replace(_BASE, gate="mild", keys=keys)
        for keys in ("correlated", "identical", "negative")
    },
    "mild ragged": replace(_BASE, gate="mild", lengths=packed(1, 63, 64, 65, 127, 704)),
    "all options": replace(_BASE, **catalog.VARIANTS["gated"]),  # type: ignore[arg-type]
}
NAMED: dict[str, dict[str, Case]] = {
    "distributions": DISTRIBUTIONS,
    "ladders": {name: replace(catalog.case(name), gate="mild") for name in catalog.SETS["ladders"]},
    **pto.SETS,
}


@dataclass
class Examined:
    """Hold the readings of one case, the reasons of providers without any, and all outputs for pictures."""

    readings: list[Reading] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)


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
    """Run every provider on a case, forward and backward where it has one, and compare every output.

    budget: as in `gdn.testing.check`; None: BUDGET of the device.
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
            # peers raise errors of any kind, and an error of gdn must not end the run
            result.failed[who] = f"{type(error).__name__}: {_words(error)}"
            continue
        own = replace(expected, outputs={x: expected.outputs[x] for x in answers})
        result.outputs[who] = {
            output: x for output, x, _ in accuracy.pair_outputs(answers, own) if x is not None
        }
        backend = jobs.backend(who, "train" if has_backward else "prefill", given)
        result.readings += _read(name, case, (who, backend), answers, own, profile)
    if profile == "pto":
        result.readings += list(pto.read_pairs(name, case, str(dtype), result.outputs))
        for who in [who for who in result.outputs if who.startswith("gdn") and pto.has_stages(case)]:
            try:
                # readings before an error count
                for reading in pto.read_stages(name, case, who, given):
                    result.readings.append(reading)
            except NotImplementedError as error:
                result.refused[f"{who} stages"] = _words(error)
            except Exception as error:
                result.failed[f"{who} stages"] = f"{type(error).__name__}: {_words(error)}"
    return result


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
        scores = metrics(x, ref)
        ok = row.ok if profile == "gdn" else pto.passes_end_to_end(scores, who[0])
        yield Reading(name, case, *who, row.dtype, output, row.error, row.limit, scores, ok)


def over_peer(own: float, peer: float) -> float:
    """Return gdn's error over a peer's, both at least ROUNDING."""
    return max(own, ROUNDING) / max(peer, ROUNDING)


def against_peers(ours: Mapping[str, float], errors_of: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return gdn's errors over the best peer's and FLA's, and the outputs that are worse than allowed."""
    peers = [errors for name, errors in errors_of.items() if not name.startswith("gdn")]
    best = {output: min((e[output] for e in peers if output in e), default=None) for output in ours}
    ratios = {x: over_peer(ours[x], least) for x, least in best.items() if least is not None}
    fla = errors_of.get("fla", {})
    of_fla = {x: ours[x] / fla[x] for x in OF_FLA if ours.get(x, 0) > ROUNDING and fla.get(x, 0) > ROUNDING}
    worse = [x for x, ratio in ratios.items() if ratio > WORSE]
    worse += [f"{x} of fla's" for x, ratio in of_fla.items() if ratio > OF_FLA[x]]
    return {"of_best_peer": ratios, "of_fla": of_fla, "worse": worse}


def profile_of(problems: str) -> str:
    """Return the profile of a set where none is named."""
    return "pto" if problems.startswith("pto") else "gdn"


def label(problems: str, profile: str) -> dict[str, str]:
    """Return set, profile and pass of the rows of a run; `distributions` under `gdn` is the pass accuracy."""
    words = [problems, *([profile] if profile != profile_of(problems) else [])]
    name = ":".join(["accuracy", *([] if words == ["distributions"] else words)])
    return {"pass": name, "set": problems, "profile": profile}


def rows(one: Examined, head: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return one case as rows of a results file, one per provider. head: `label`, and the case and dtype."""
    rows_of: dict[str, dict[str, Any]] = {}
    for r in one.readings:
        row = rows_of.setdefault(
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
    beside = {who: row["errors"] for who, row in rows_of.items() if "~" not in who}
    for who, errors in beside.items():
        # the profile pto compares gdn with peers by itself
        if who.startswith("gdn") and head["profile"] == "gdn":
            rows_of[who] |= against_peers(errors, beside)
    for kind, reasons in (("refused", one.refused), ("failed", one.failed)):
        rows_of |= {
            who: {**head, "provider": who, "backend": None, "ok": False, kind: why}
            for who, why in reasons.items()
        }
    return list(rows_of.values())


def flat(reading: Reading) -> dict[str, Any]:
    """Return a reading as a row of a table, with None for numbers that are not finite."""
    values = {
        "name": reading.name, "case": str(reading.case), "provider": reading.provider,
        "backend": reading.backend, "dtype": reading.dtype.removeprefix("torch."), "output": reading.output,
        "error": reading.error, "limit": reading.limit, "ok": reading.ok, **asdict(reading.metrics),
    }  # fmt: skip
    return {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in values.items()}


def _words(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
