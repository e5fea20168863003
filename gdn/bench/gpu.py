"""The rule on a GPU against its peers: one row per problem and provider, no time for a wrong answer.

Every provider's outputs are held against the law first, on the very inputs that are timed: two key heads, and
where the law would take too long the first tokens of every sequence (each row says how many). Those that pass
are captured and replayed in turn.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gdn.bench import accuracy, coldstart, graph, hosttime, jobs, measure, providers
from gdn.bench.cases import Case, Inputs, packed
from gdn.bench.providers import Provider
from gdn.bench.targets import COLD, HOST, MIXED, OF_FLA, TARGETS, VARIANTS, WORSE, Target

PASSES = ("prefill", "train", "decode", "host", "cold", "accuracy")
Row = dict[str, Any]
# tokens of all sequences together that the law steps through, and those whose states it keeps for gradients:
# 32768 steps take some 5 s, 8192 with gradients too, and 12 GB
FORWARD_TOKENS, BACKWARD_TOKENS = 2**19, 2**13
JUDGED_HEADS = 2  # key heads; the last of them has value heads that do not decay
_BASE = replace(MIXED, heads=(16, 32), lengths=packed(1024))
ACCURACY: dict[str, Case] = {
    **{gate: replace(_BASE, gate=gate) for gate in ("mixed", "strong", "mild", "slow", "none", "model")},
    "mild, correlated keys": replace(_BASE, gate="mild", keys="correlated"),
    "mild, ragged": replace(_BASE, gate="mild", lengths=packed(1, 63, 64, 65, 127, 704)),
    "all options": replace(_BASE, **VARIANTS["gated"]),  # type: ignore[arg-type]
}


@dataclass
class Session:
    """What one run measures, with whom, and until when."""

    names: tuple[str, ...]
    device: torch.device
    only: tuple[str, ...] = ()  # row names must contain one of these
    deadline: float = float("inf")  # of time.monotonic(): no problem is begun after it
    is_named: bool = False  # the providers were asked for by name
    gate_tokens: int | None = None  # judge at most these tokens of each sequence
    providers: dict[str, Provider] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.names:
            found = providers.load(name)
            if isinstance(found, str):
                self.absent[name] = found
            else:
                self.providers[name] = found

    def targets(self, name: str) -> list[Target]:
        """The rows of a pass such as prefill or prefill:slow."""
        job, _, variant = name.partition(":")
        found = [t.variant(variant) if variant else t for t in TARGETS[job]]
        return [t for t in found if self.wants(t.name)]

    def wants(self, name: str) -> bool:
        return not self.only or any(part in name for part in self.only)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline


def warm(session: Session, passes: Sequence[str]) -> float:
    """Have everything compiled that these passes need, many processes at a time; seconds it took."""
    targets = [t for name in passes if name in TARGETS for t in session.targets(name)]
    with_options = "host" in passes or "accuracy" in passes
    if "accuracy" in passes and not any(t.job == "train" for t in targets):
        targets.append(TARGETS["train"][0])
    return coldstart.warm(session.providers, targets, with_options, os.cpu_count() or 1)


def run(session: Session, passes: Sequence[str]) -> Iterator[Row]:
    """All rows of these passes, as they are measured."""
    if any(name.partition(":")[0] in TARGETS for name in passes):
        session.ceilings = graph.ceilings(session.device)
    others: dict[str, Callable[[Session], Iterator[Row]]] = {"host": host, "cold": cold, "accuracy": errors}
    for name in passes:
        rows = others[name](session) if name in others else _all_timed(session, name)
        for row in rows:
            yield {"pass": name, **row}


def _all_timed(session: Session, name: str) -> Iterator[Row]:
    for target in session.targets(name):
        yield from timed(session, target)
        graph.release()


def timed(session: Session, target: Target) -> list[Row]:
    """One target with every provider that does the job: judged, then timed in turn."""
    taking = {name: p for name, p in session.providers.items() if target.job in p.binds}
    if session.is_over:
        return [_late(target.name, name) for name in taking]
    device, job = session.device, target.job
    given = jobs.given(target.case, device)
    rows = {name: _head(target) | {"provider": name} for name in taking}
    judge(session, target, given, taking, rows)
    footprint = target.cost.bytes / (2 if job == "decode" else 1)
    found = jobs.sets(job, given, graph.copies(footprint, device))
    prepared: dict[str, graph.Prepared] = {}
    for name, provider in taking.items():
        if rows[name].get("ok"):
            with _noted(rows[name]):
                calls = [jobs.call(provider, job, one) for one in found]
                if job != "decode":
                    rows[name]["peak_mb"] = round(graph.peak_memory(calls[0], device) / 1e6, 1)
                prepared[name] = graph.prepare(calls, device)
    times = graph.interleaved(prepared, device) if prepared else {}
    for name, seconds in times.items():
        rows[name] |= _speed(session, target, seconds, prepared[name])
    _compare(target, rows)
    return list(rows.values())


def judge(
    session: Session, target: Target, given: Inputs, taking: Mapping[str, Provider], rows: dict[str, Row]
) -> None:
    """Hold every provider against the law; fills in errors and `ok`, or why there are none."""
    with_backward, lengths = target.job == "train", target.case.lengths
    longest = lengths.T // (lengths.N if lengths.ends else 1)
    budget = (BACKWARD_TOKENS if with_backward else FORWARD_TOKENS) // lengths.N
    tokens = min(longest, budget, session.gate_tokens or longest)
    small = given if tokens == longest else given.prefix(tokens)

    def calm() -> Inputs:
        return jobs.given(replace(target.case, gate="none"), session.device).prefix(tokens)

    expected = accuracy.expect(small, calm, JUDGED_HEADS, with_backward, accuracy.law_side_by_side)
    for name, provider in taking.items():
        with _noted(rows[name]):
            results = accuracy.answers(provider.function(target.job), small, with_backward)
            rows[name] |= _verdict(accuracy.judge(results, expected, target.case))
            rows[name] |= {"judged_tokens": tokens, "judged_heads": len(expected.index)}


def host(session: Session) -> Iterator[Row]:
    """Host microseconds per eager call, and for gdn where they go."""
    for what, (job, case) in hosttime.CASES.items():
        if not session.wants(what):
            continue
        if session.is_over:
            yield _late(what)
            continue
        given = jobs.sets(job, jobs.given(case, session.device), 1)[0]
        for name, provider in session.providers.items():
            if job not in provider.binds:
                continue
            row: Row = {"row": what, "provider": name, "goal_us": HOST[what][0], "moonshot_us": HOST[what][1]}
            with _noted(row):
                t = hosttime.burst(jobs.call(provider, job, given), session.device)
                row |= {"p20_us": 1e6 * t.p20, "p50_us": 1e6 * t.p50, "p80_us": 1e6 * t.p80, "runs": t.runs}
                row["reached"] = row["p50_us"] <= row["goal_us"]
                if name.startswith("gdn"):
                    parts = hosttime.parts(what, given, name.partition(":")[2] or None)
                    known = sum(x for part, x in parts.items() if part != "launches")
                    row["parts_us"] = parts | {"dispatch and autograd": row["p50_us"] - known}
            yield row


def cold(session: Session) -> Iterator[Row]:
    """New processes with empty caches; peers only when asked for by name, since theirs take minutes."""
    for name in session.providers:
        if session.is_over:
            yield _late("new process", name)
        elif session.is_named or name.startswith("gdn"):
            row: Row = {"row": "new process", "provider": name, **coldstart.cold(name)}
            again = {
                what: count
                for what, count in row.get("compilations", {}).items()
                if not what.startswith("first")
            }
            if again:
                seconds = row["seconds"]
                row |= {"goal_s": COLD, "compiled_again": sum(again.values())}
                row["reached"] = row["compiled_again"] == 0 and all(
                    seconds.get(f"first: {part}", 0) <= limit for part, limit in COLD.items()
                )
            yield row


def errors(session: Session) -> Iterator[Row]:
    """Every provider's error in every output, on the same inputs, forward and backward where there is one."""
    for what, case in ACCURACY.items():
        if not session.wants(what):
            continue
        if session.is_over:
            yield _late(what)
            continue
        given = jobs.given(case, session.device)

        def calm(case: Case = case) -> Inputs:
            return jobs.given(replace(case, gate="none"), session.device)

        expected = accuracy.expect(given, calm, 2 * JUDGED_HEADS, True, accuracy.law_side_by_side)
        rows: dict[str, Row] = {}
        for name, provider in session.providers.items():
            with_backward = "train" in provider.binds
            row = rows[name] = {"row": what, "provider": name}
            with _noted(row):
                results = accuracy.answers(
                    provider.function("train" if with_backward else "prefill"), given, with_backward
                )
                partial = replace(expected, outputs={x: expected.outputs[x] for x in results})
                row |= _verdict(accuracy.judge(results, partial, case))
        for name, row in rows.items():
            if name.startswith("gdn") and "errors" in row:
                row |= against_peers(
                    row["errors"], {n: r["errors"] for n, r in rows.items() if "errors" in r}
                )
        yield from rows.values()
        graph.release()


def against_peers(ours: Mapping[str, float], found: Mapping[str, Mapping[str, float]]) -> Row:
    """Where our error is worse than the best peer's by more than 10 %, or dg and dbeta above 0.7 of FLA's."""
    peers = [errors for name, errors in found.items() if not name.startswith("gdn")]
    best = {output: min((e[output] for e in peers if output in e), default=None) for output in ours}
    ratios = {output: ours[output] / x for output, x in best.items() if x}
    of_fla = {x: ours[x] / found["fla"][x] for x in OF_FLA if x in ours and found.get("fla", {}).get(x)}
    worse = [x for x, ratio in ratios.items() if ratio > WORSE]
    worse += [f"{x} of fla's" for x, ratio in of_fla.items() if ratio > OF_FLA[x]]
    return {"of_best_peer": ratios, "of_fla": of_fla, "worse": worse, "reached": not worse}


def _late(what: str, provider: str = "all") -> Row:
    return {"row": what, "provider": provider, "skipped": "out of time"}


def _head(target: Target) -> Row:
    """What a row says about its problem."""
    case, L = target.case, target.case.lengths
    return {
        "row": target.name, "H": case.heads[0], "HV": case.heads[1], "K": case.sizes[0], "V": case.sizes[1],
        "N": L.N, "T": L.T // (L.N if L.ends else 1), "gate": case.gate, "dtype": "bfloat16",
        "state": "fp32" if case.state == "wide" else "bf16",
    }  # fmt: skip


def _verdict(rows: Sequence[accuracy.Row]) -> Row:
    return {
        "ok": all(row.ok for row in rows),
        "errors": {row.output: row.error for row in rows},
        "share_of_limit": max(row.error / row.limit for row in rows),
    }


def _speed(session: Session, target: Target, seconds: measure.Times, prepared: graph.Prepared) -> Row:
    cost, rates = target.cost, session.ceilings
    limit = max(cost.bytes / rates["copy"], cost.flop / rates["matmul"])
    return {
        "p20_ms": 1e3 * seconds.p20, "p50_ms": 1e3 * seconds.p50, "p80_ms": 1e3 * seconds.p80,
        "runs": seconds.runs, "calls": prepared.calls, "timer": prepared.timer, "why": prepared.why,
        "gb_per_s": cost.bytes / seconds.p50 / 1e9, "tflop_per_s": cost.flop / seconds.p50 / 1e12,
        "limit_ms": 1e3 * limit, "share_of_ceiling": limit / seconds.p50,
        "copy_gb_per_s": rates["copy"] / 1e9, "matmul_tflop_per_s": rates["matmul"] / 1e12,
    }  # fmt: skip


def _compare(target: Target, rows: Mapping[str, Row]) -> None:
    """Ratios to the peers of this run, and the goal in this run's milliseconds."""
    times = {name: row["p50_ms"] for name, row in rows.items() if "p50_ms" in row}
    scale = target.scale(times)
    for name, own in times.items():
        row = rows[name]
        row["ratio"] = {
            peer: x / own for peer, x in times.items() if peer in providers.PEERS and peer != name
        }
        if name.startswith("gdn") and target.goal is not None and target.moonshot is not None:
            row |= {"goal_ms": scale * target.goal, "moonshot_ms": scale * target.moonshot}
            row["reached"] = own <= row["goal_ms"]


class _noted:
    """What a provider raises becomes a note in its row: it refuses, or it fails."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        words = (str(error).splitlines() or [""])[0][:300]
        if isinstance(error, NotImplementedError):
            self.row["refused"] = words
        else:
            self.row["failed"] = f"{type(error).__name__}: {words}"
        self.row["ok"] = False
        return True
