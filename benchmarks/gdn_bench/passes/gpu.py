"""The rule on a GPU against its peers: one row per problem and provider, no time for a wrong answer.

Every provider's outputs are held against the law first, on the very inputs that are timed: four key heads,
and where the law would take too long the first tokens of every sequence (each row says how many). Those that
pass are captured and replayed in turn.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gdn.testing import accuracy
from gdn.testing.tensors import Inputs
from gdn_bench.problems import jobs, packets
from gdn_bench.problems.targets import COLD, HOST, TARGETS, Target, chosen
from gdn_bench.providers.load import load_provider
from gdn_bench.providers.provider import Provider
from gdn_bench.results import rows
from gdn_bench.results.rows import Row
from gdn_bench.timing import coldstart, graph, hosttime

PASSES = (*TARGETS, "host", "cold")
NEW_PROCESS = "new process"
# tokens of all sequences together that the law steps through, and those whose states it keeps for gradients:
# 32768 steps take some 5 s, 8192 with gradients too, and 24 GB where two value heads share a key head
FORWARD_TOKENS, BACKWARD_TOKENS = 2**19, 2**13
# key heads; the last of them has value heads that do not decay. With two, dg of those was one number's luck
JUDGED_HEADS = 4


@dataclass
class Session:
    """What one run measures, with whom, and until when."""

    names: tuple[str, ...]
    device: torch.device
    only: tuple[str, ...] = ()  # row names must contain one of these
    deadline: float = float("inf")  # of time.monotonic(): no problem is begun after it
    is_named: bool = False  # the providers were asked for by name
    gate_tokens: int | None = None  # judge at most these tokens of each sequence
    problems: tuple[str, ...] = ()  # of prefill and train, in place of those that goals are set for
    is_eager: bool = False  # no graphs: calls as Python makes them
    done: frozenset[tuple[Any, ...]] = frozenset()  # `rows.key` of what need not be run again
    providers: dict[str, Provider] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.names:
            found = load_provider(name)
            if isinstance(found, str):
                self.absent[name] = found
            else:
                self.providers[name] = found

    def targets(self, name: str) -> list[Target]:
        """The wanted rows of a pass such as prefill or prefill:slow."""
        return [t for t in self.all_targets(name) if self.wants(t.name)]

    def all_targets(self, name: str) -> list[Target]:
        """Return the rows of a pass, also those that --only leaves out."""
        job, _, variant = name.partition(":")
        of_job = TARGETS[job]
        if self.problems and job in ("prefill", "train"):
            of_job = tuple(chosen(job, self.problems))
        return [t.variant(variant) if variant else t for t in of_job]

    def label(self, name: str) -> str:
        """A pass as its rows call it."""
        return f"{name}:eager" if self.is_eager and name.partition(":")[0] in (*TARGETS, "spec") else name

    def has(self, name: str, provider: str, case: str) -> bool:
        """True if an earlier run has this row already."""
        return rows.key({"pass": self.label(name), "case": case, "provider": provider}) in self.done

    def wants(self, name: str) -> bool:
        return not self.only or any(part in name for part in self.only)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline


def warm(session: Session, passes: Sequence[str]) -> float:
    """Have everything compiled that these passes need, many processes at a time; seconds it took."""
    targets = [t for name in passes if name in TARGETS for t in session.targets(name)]
    speculation = packets.groups(packets.SHAPE, session.wants) if "spec" in passes else []
    return coldstart.warm(session.providers, targets, speculation, "host" in passes, os.cpu_count() or 1)


def run(session: Session, passes: Sequence[str]) -> Iterator[Row]:
    """All rows of these passes, as they are measured."""
    if any(name.partition(":")[0] in TARGETS for name in passes):
        session.ceilings = graph.ceilings(session.device)
    others: dict[str, Callable[[Session], Iterator[Row]]] = {"host": host, "cold": cold}
    for name in passes:
        found = others[name](session) if name in others else _all_timed(session, name)
        for row in found:
            yield {"pass": session.label(name), **row}


def _all_timed(session: Session, name: str) -> Iterator[Row]:
    for target in session.targets(name):
        taking = [p for p in session.providers if target.job in session.providers[p].binds]
        if not all(session.has(name, provider, target.name) for provider in taking):
            yield from timed(session, target)
            graph.release()


def timed(session: Session, target: Target) -> list[Row]:
    """One target with every provider that does the job: judged, then timed in turn."""
    taking = {name: p for name, p in session.providers.items() if target.job in p.binds}
    if session.is_over:
        return [_late(target.name, name) for name in taking]
    device, job = session.device, target.job
    given = jobs.given(target.case, device)
    found = {
        name: rows.head(target) | {"provider": name, "backend": jobs.backend(name, job, given)}
        for name in taking
    }
    judge(session, target, given, taking, found)
    footprint = target.cost.bytes / (2 if job == "decode" else 1)
    problems = jobs.sets(job, given, graph.copies(footprint, device))
    prepared: dict[str, graph.Prepared] = {}
    for name, provider in taking.items():
        if found[name].get("ok"):
            with noted(found[name]):
                calls = [jobs.call(provider, job, one) for one in problems]
                if job != "decode":
                    found[name]["peak_mb"] = round(graph.peak_memory(calls[0], device) / 1e6, 1)
                moved = [x for name, x in problems[0].tensors.items() if name == "pool"]
                prepared[name] = graph.prepare(calls, device, is_eager=session.is_eager, moved=moved)
    times = graph.interleaved(prepared, device) if prepared else {}
    for name, seconds in times.items():
        found[name] |= rows.speed(target.cost, session.ceilings, seconds, prepared[name])
    rows.compare(found, target)
    return list(found.values())


def judge(
    session: Session, target: Target, given: Inputs, taking: Mapping[str, Provider], found: dict[str, Row]
) -> None:
    """Hold every provider against the law; fills in errors and `ok`, or why there are none."""
    with_backward, lengths = target.job == "train", target.case.lengths
    longest = lengths.T // (lengths.N if lengths.ends else 1)
    budget = (BACKWARD_TOKENS if with_backward else FORWARD_TOKENS) // lengths.N
    tokens = min(longest, budget, session.gate_tokens or longest)
    small = given if tokens == longest else given.prefix(tokens)

    def calm() -> Inputs:
        return jobs.given(replace(target.case, gate="none"), session.device).prefix(tokens)

    expected = accuracy.expect_outputs(small, calm, JUDGED_HEADS, with_backward, accuracy.reference_by_heads)
    for name, provider in taking.items():
        with noted(found[name]):
            results = accuracy.run_poisoned(provider.function(target.job), small, with_backward)
            found[name] |= rows.verdict(accuracy.compare_outputs(results, expected, target.case))
            found[name] |= {"judged_tokens": tokens, "judged_heads": len(expected.index)}


def host(session: Session) -> Iterator[Row]:
    """Host time per eager call, and for gdn where it goes."""
    for what, (job, case) in hosttime.CASES.items():
        taking = {name: p for name, p in session.providers.items() if job in p.binds}
        if not session.wants(what) or all(session.has("host", name, what) for name in taking):
            continue
        if session.is_over:
            yield _late(what)
            continue
        target, first = Target(job, what, case, None, None, {}), jobs.given(case, session.device)
        found = {
            name: rows.head(target) | {"provider": name, "backend": jobs.backend(name, job, first)}
            for name in taking
        }
        judge(session, target, first, taking, found)
        given = jobs.sets(job, first, 1)[0]
        for name, provider in taking.items():
            if found[name].get("ok"):
                with noted(found[name]):
                    found[name] |= _host_time(what, jobs.call(provider, job, given), name, given)
        rows.compare(found)
        yield from found.values()


def _host_time(what: str, call: Callable[[], object], name: str, given: Inputs) -> Row:
    t = hosttime.burst(call, given.tensors["q"].device)
    row: Row = {"ms": 1e3 * t.p50, "p20": 1e3 * t.p20, "p80": 1e3 * t.p80, "runs": t.runs, "timer": "host"}
    if name.startswith("gdn"):
        goal, moonshot = HOST[what]
        row |= {"goal_ms": goal / 1e3, "moonshot_ms": moonshot / 1e3, "reached": row["ms"] <= goal / 1e3}
        parts = hosttime.parts(what, given, name.partition(":")[2] or None)
        known = sum(x for part, x in parts.items() if part != "launches")
        row["parts_us"] = parts | {"rest": 1e3 * row["ms"] - known}
    return row


def cold(session: Session) -> Iterator[Row]:
    """New processes with empty caches; peers only when asked for by name, since theirs take minutes."""
    for name in session.providers:
        if session.is_over:
            yield _late(NEW_PROCESS, name)
        elif (session.is_named or name.startswith("gdn")) and not session.has("cold", name, NEW_PROCESS):
            row: Row = {"case": NEW_PROCESS, "provider": name, "dtype": "bfloat16"}
            row |= {"backend": jobs.default_backend(name, (16, 32), session.device), **coldstart.cold(name)}
            if not row.get("ok", True):
                row = {x: value for x, value in row.items() if x not in ("seconds", "compilations")}
                row["failed"] = "its answers are wrong"
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


def _late(what: str, provider: str = "all") -> Row:
    return {"case": what, "provider": provider, "skipped": "out of time"}


@contextmanager
def noted(row: Row) -> Iterator[None]:
    """What a provider raises becomes a note in its row: it refuses, or it fails."""
    try:
        yield
    except Exception as error:
        words = (str(error).splitlines() or [""])[0][:300].encode("ascii", "replace").decode()
        if isinstance(error, NotImplementedError):
            row["refused"] = words
        else:
            row["failed"] = f"{type(error).__name__}: {words}"
        row["ok"] = False
