"""Rows of a results file: their fields, ratios within one run, reading of files.

Every row has pass, case, provider, backend, dtype, and of its run gpu, versions, commit, date. A time adds
ms, p20, p80 (milliseconds; ms is the median), bytes and flop (the least of the job), of_limit (the share of
the speed that copies and MMAs of this run allow), ratio (each peer's time over this one) and to_best_peer. A
verdict adds ok, error (the largest relative RMS error against the reference) and errors (of each output).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gdn.testing import accuracy
from gdn_bench.problems.workloads import Cost, Workload
from gdn_bench.providers.names import PEERS
from gdn_bench.timing import measure
from gdn_bench.timing.graph import Prepared

Row = dict[str, Any]
SAME = ("pass", "case", "provider", "dtype")  # rows with equal values of these measure the same


def head(workload: Workload) -> Row:
    """Return the fields of a row that describe its problem."""
    case, L = workload.case, workload.case.lengths
    return {
        "case": workload.name, "H": case.heads[0], "HV": case.heads[1], "K": case.sizes[0], "V":
        case.sizes[1], "N": L.N, "T": L.T // (L.N if L.ends else 1), "gate": case.gate, "dtype": "bfloat16",
        "state": "int16" if workload.job == "int16" else "fp32" if case.state == "wide" else "bf16",
    }  # fmt: skip


def verdict(rows: Sequence[accuracy.Verdict]) -> Row:
    """Return the fields of the verdicts on one provider."""
    return {
        "ok": all(row.ok for row in rows),
        "error": max(row.error for row in rows),
        "errors": {row.output: row.error for row in rows},
        "share_of_limit": max(row.error / row.limit for row in rows),
    }


def speed(cost: Cost, rates: Mapping[str, float], seconds: measure.Times, prepared: Prepared) -> Row:
    """Return the fields of a time. rates: this run's bytes per second of a copy and flop per second."""
    limit = max(cost.bytes / rates["copy"], cost.flop / rates["matmul"])
    return {
        "ms": 1e3 * seconds.p50, "p20": 1e3 * seconds.p20, "p80": 1e3 * seconds.p80,
        "runs": seconds.runs, "calls": prepared.calls, "timer": prepared.timer, "why": prepared.why,
        "bytes": cost.bytes, "flop": cost.flop,
        "gb_per_s": cost.bytes / seconds.p50 / 1e9, "tflop_per_s": cost.flop / seconds.p50 / 1e12,
        "limit_ms": 1e3 * limit, "of_limit": limit / seconds.p50,
        "copy_gb_per_s": rates["copy"] / 1e9, "matmul_tflop_per_s": rates["matmul"] / 1e12,
    }  # fmt: skip


def add_ratios(rows: Mapping[str, Row]) -> None:
    """Add to rows by provider the ratios of the peers that this run timed."""
    times = {name: row["ms"] for name, row in rows.items() if "ms" in row}
    for name, own in times.items():
        ratio = {peer: x / own for peer, x in times.items() if peer in PEERS and peer != name}
        rows[name].update({"ratio": ratio} | ({"to_best_peer": min(ratio.values())} if ratio else {}))


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of SAME of a row; rows of old files without a dtype are in bfloat16."""
    return tuple({"dtype": "bfloat16", **row}[name] for name in SAME)


def read(*paths: Path) -> list[Row]:
    """Return the rows of some files in order. ValueError, with file and line, for a line that is no row."""
    rows = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), 1):
            try:
                row = json.loads(line)
                row["pass"], row["case"], row["provider"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number}: expected a row with pass, case and provider, got {line[:60]!r}"
                ) from error
            rows.append(row)
    return rows


def is_measured(row: Mapping[str, Any]) -> bool:
    """Return True if a row has numbers: a time, a verdict, seconds of a cold start."""
    return any(name in row for name in ("ms", "errors", "seconds", "tokens_per_s"))


def done(rows: Iterable[Row], about: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    """Return the keys of the rows of this commit on this kind of GPU, for `--resume`."""
    commit = about.get("commit")
    if not commit or commit.endswith("+"):
        return set()
    same = [row for row in rows if (row.get("commit"), row.get("gpu")) == (commit, about.get("gpu"))]
    return {key(row) for row in same}
