"""Rows of `gdn bench ranks` and `links` with times of the cost model, for tests of pages and pictures."""

from dataclasses import replace

import torch

from gdn.distributed import cost
from gdn_bench.passes import links, ranks
from gdn_bench.results import rows, tables
from gdn_bench.timing.ranks import Rank

SLOWER = {"gather": 1.1, "owner": 1.2, "nodes": 1.25, "heads": 3.0, ranks.ONE: 1.0}  # than the cost model
FLA = 5.0  # FLA's time over gdn's by gather
GRAPH = 0.9  # a graph's time over that of a call in a row


def rows_of_ranks(num_ranks, about, scaling=None):
    """Return the rows of one run: each time is the predicted one times a constant of its exchange."""
    scaling = scaling or ranks.Scaling()
    rank, R = Rank(0, num_ranks, torch.device("cpu")), num_ranks
    totals = dict.fromkeys((scaling.tokens, R * scaling.local))
    alone = dict.fromkeys((scaling.tokens, scaling.tokens // R, scaling.local))
    ways = [ranks.Way("gdn", ranks.ONE, tokens) for tokens in alone]
    ways += [ranks.Way(p, x, total) for p, x in ranks._kinds(scaling) for total in totals]
    made = []
    for job in ranks.JOBS:
        measured = {way: _timed(rank, scaling, way, job) for way in ways}
        for way, row in measured.items():
            ranks._add_scaling(row, way, measured, R)
        for total in totals:
            rows.add_ratios(
                {w.provider: x for w, x in measured.items() if (w.exchange, w.tokens) == ("gather", total)}
            )
        made += [{**row, **about} for row in measured.values()]
    return made


def _timed(rank, scaling, way, job):
    own = replace(way, provider="gdn")
    model = ranks.predict(scaling, own, job, rank, {"ms": 1.0, "queued_ms": 1.0})
    slower = SLOWER[way.exchange] * (FLA if way.provider == "fla" else 1.0)
    ms, queued = slower * model["predicted_ms"], slower * model["queued_predicted_ms"]
    row = {**ranks._head(rank, scaling, job, way), "ms": ms, "p20": ms, "p80": ms, "queued_ms": queued}
    row |= {"runs": 11, "peak_mb": 8000 / row["num_ranks"], "ratio": {}}
    if way.exchange != ranks.ONE:
        row |= {"ok": True, "error": 1e-3, "errors": {"o": 1e-3}, "share_of_limit": 0.2}
    if way.provider == "gdn":
        row |= {"graph_ms": GRAPH * queued, **ranks.predict(scaling, way, job, rank, row)}
    return row


def rows_of_links(num_ranks, about):
    """Return the rows of one run, whose times in a row are 1.25 times the predicted ones."""
    rank, machine = Rank(0, num_ranks, torch.device("cpu")), cost.Machine()
    latency, bandwidth = machine.link(num_ranks)
    made = []
    for name, (_, predict) in links.COLLECTIVES.items():
        for size in links.SIZES:
            received = predict(size, num_ranks, 0.0, 1.0)
            row = _linked(
                rank, f"{name} {tables.format_bytes(size)}", predict(size, num_ranks, latency, bandwidth)
            )
            row |= {"bytes": received, "queued_gb_per_s": received / row["queued_ms"] / 1e6}
            made.append({**row, "latency_us": 11.9, "link_gb_per_s": 163.2, **about})
    for HV in links.HEADS:
        form = cost.Form(HV // 2, HV)
        for exchange in cost.FLAT:
            told = cost.exchange_times(form, num_ranks, exchange, machine)
            for way, seconds in zip(("forward", "backward"), told, strict=True):
                name = f"{exchange} of states {way}, {HV} heads"
                made.append({**_linked(rank, name, seconds), **about})
    return made


def _linked(rank, name, seconds):
    ms = 1.25e3 * seconds
    times = {"ms": 0.1 + ms, "p20": ms, "p80": ms, "runs": 15, "queued_ms": ms}
    return {**links._head(rank, name), **times, **links._predicted(seconds, times)}
