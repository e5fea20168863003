"""Numbers that say how far one output of a provider is from the reference."""

import math
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from gdn.testing.cases import Case

RTOL, ATOL = 1e-2, 1e-5


@dataclass(frozen=True)
class Metrics:
    """Hold the differences of x from r in fp64: infinite, or NaN, if x has NaN, Inf or another shape."""

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
    """Hold one output of one provider: error and limit of `gdn.testing`, and `ok` of the profile."""

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


def metrics(x: Tensor | None, ref: Tensor) -> Metrics:
    """Return the metrics of x. An empty output is right; a constant reference has no r2 and pearson (NaN)."""
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


def _over(x: float, size: float) -> float:
    with suppress(ZeroDivisionError):
        return x / size
    return 0.0 if x == 0 else math.inf
