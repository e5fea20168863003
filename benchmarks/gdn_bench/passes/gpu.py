"""Time the rule on a GPU beside its peers: one row per problem and provider, no time for a wrong answer.

The outputs of every provider are compared with the reference first, on the inputs that are timed: on four key
heads, and where the reference takes too long on the first tokens of every sequence (`judged_tokens`). The
calls of the right ones are captured in CUDA graphs and replayed in turn.
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
from gdn_bench.problems.workloads import WORKLOADS, Workload, choose_workloads
from gdn_bench.providers.load import load_provider
from gdn_bench.providers.provider import Provider
from gdn_bench.results import rows
from gdn_bench.results.rows import Row
from gdn_bench.timing import coldstart, graph, hosttime

PASSES = (*WORKLOADS, "host", "cold")
NEW_PROCESS = "new process"
# tokens of all sequences together on which the reference runs, forward and with gradients: 32768 steps take
# about 5 s; so do 8192 with gradients, whose states take 24 GB where two value heads share a key head
FORWARD_TOKENS, BACKWARD_TOKENS = 2**19, 2**13
# key heads; the last one has value heads without decay. With two, the error of dg depended on one number
JUDGED_HEADS = 4


@dataclass
class Session:
    """Describe one run: providers, device, wanted rows, deadline, rows measured before."""

    names: tuple[str, ...]
    device: torch.device
    only: tuple[str, ...] = ()  # parts of names of rows, one of which a row must contain
    deadline: float = float("inf")  # of time.monotonic(), after which no problem is begun
    is_named: bool = False  # --providers was given
    gate_tokens: int | None = None  # compare at most these tokens of each sequence
    problems: tuple[str, ...] = ()  # of prefill and train, in place of the standard ones
    is_eager: bool = False  # no CUDA graphs: launches from Python
    done: frozenset[tuple[Any, ...]] = frozenset()  # `rows.key` of rows measured before
    providers: dict[str, Provider] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.names:
            loaded = load_provider(name)
            if isinstance(loaded, str):
                self.absent[name] = loaded
            else:
                self.providers[name] = loaded

    def workloads(self, name: str) -> list[Workload]:
        """Return the wanted workloads of a pass such as prefill or prefill:slow."""
        return [x for x in self.all_workloads(name) if self.wants(x.name)]

    def all_workloads(self, name: str) -> list[Workload]:
        """Return the workloads of a pass, also those that --only leaves out."""
        job, _, variant = name.partition(":")
        of_job = WORKLOADS[job]
        if self.problems and job in ("prefill", "train"):
            of_job = tuple(choose_workloads(job, self.problems))
        if variant == "int16":
            # once for each number of rows, on the tokens and states that bf16 pools are timed with
            of_job = tuple(x for x in of_job if x.case.state == "narrow")
        return [x.with_variant(variant) if variant else x for x in of_job]

    def label(self, name: str) -> str:
        """Return the pass that the rows of this run have: prefill:eager without graphs."""
        return f"{name}:eager" if self.is_eager and name.partition(":")[0] in (*WORKLOADS, "spec") else name

    def has(self, name: str, provider: str, case: str) -> bool:
        """Return True if an earlier run has this row."""
        return rows.key({"pass": self.label(name), "case": case, "provider": provider}) in self.done

    def wants(self, name: str) -> bool:
        """Return True if --only chooses a row of this name."""
        return not self.only or any(part in name for part in self.only)

    @property
    def is_over(self) -> bool:
        """Return True past the deadline."""
        return time.monotonic() > self.deadline


def warm(session: Session, passes: Sequence[str]) -> float:
    """Compile what these passes need, in as many processes as there are cores; return the seconds."""
    workloads = [x for name in passes if name in WORKLOADS for x in session.workloads(name)]
    speculation = packets.groups(packets.SHAPE, session.wants) if "spec" in passes else []
    return coldstart.warm(session.providers, workloads, speculation, "host" in passes, os.cpu_count() or 1)


def run(session: Session, passes: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of these passes as they are measured."""
    if any(name.partition(":")[0] in WORKLOADS for name in passes):
        session.ceilings = graph.ceilings(session.device)
    others: dict[str, Callable[[Session], Iterator[Row]]] = {"host": host, "cold": cold}
    for name in passes:
        measured = others[name](session) if name in others else _all_timed(session, name)
        for row in measured:
            yield {"pass": session.label(name), **row}


def _all_timed(session: Session, name: str) -> Iterator[Row]:
    for workload in session.workloads(name):
        able = [p for p in session.providers if workload.job in session.providers[p].binds]
        if not all(session.has(name, provider, workload.name) for provider in able):
            yield from timed(session, workload)
            graph.release()


def timed(session: Session, workload: Workload) -> list[Row]:
    """Compare every provider with the reference, time the right ones in turn; return a row for each."""
    able = {name: p for name, p in session.providers.items() if workload.job in p.binds}
    if session.is_over:
        return [_late(workload.name, name) for name in able]
    device, job = session.device, workload.job
    given = jobs.given(workload.case, device)
    by_name = {
        name: rows.head(workload) | {"provider": name, "backend": jobs.backend(name, job, given)}
        for name in able
    }
    judge(session, workload, given, able, by_name)
    footprint = workload.cost.bytes / (2 if job in ("decode", "int16") else 1)
    problems = jobs.sets(job, given, graph.copies(footprint, device))
    prepared: dict[str, graph.Prepared] = {}
    for name, provider in able.items():
        if by_name[name].get("ok"):
            with noted(by_name[name]):
                calls = [jobs.call(provider, job, one) for one in problems]
                if job not in ("decode", "int16"):
                    by_name[name]["peak_mb"] = round(graph.peak_memory(calls[0], device) / 1e6, 1)
                moved = [x for name, x in problems[0].tensors.items() if name == "pool"]
                prepared[name] = graph.prepare(calls, device, is_eager=session.is_eager, moved=moved)
    times = graph.interleaved(prepared, device) if prepared else {}
    for name, seconds in times.items():
        by_name[name] |= rows.speed(workload.cost, session.ceilings, seconds, prepared[name])
    rows.add_ratios(by_name)
    return list(by_name.values())


def judge(
    session: Session, workload: Workload, given: Inputs, able: Mapping[str, Provider], by_name: dict[str, Row]
) -> None:
    """Compare every provider with the reference: add errors and `ok` to its row, or the reason of none."""
    with_backward, lengths = workload.job == "train", workload.case.lengths
    longest = lengths.T // (lengths.N if lengths.ends else 1)
    budget = (BACKWARD_TOKENS if with_backward else FORWARD_TOKENS) // lengths.N
    tokens = min(longest, budget, session.gate_tokens or longest)
    small = given if tokens == longest else given.prefix(tokens)

    def without_decay() -> Inputs:
        return jobs.given(replace(workload.case, gate="none"), session.device).prefix(tokens)

    expected = accuracy.expect_outputs(
        small, without_decay, JUDGED_HEADS, with_backward, accuracy.reference_by_heads
    )
    for name, provider in able.items():
        with noted(by_name[name]):
            results = accuracy.run_poisoned(provider.function(workload.job), small, with_backward)
            by_name[name] |= rows.verdict(accuracy.compare_outputs(results, expected, workload.case))
            by_name[name] |= {"judged_tokens": tokens, "judged_heads": len(expected.index)}


def host(session: Session) -> Iterator[Row]:
    """Yield the host time of an eager call of each provider, by job."""
    for what, (job, case) in hosttime.CASES.items():
        able = {name: p for name, p in session.providers.items() if job in p.binds}
        if not session.wants(what) or all(session.has("host", name, what) for name in able):
            continue
        if session.is_over:
            yield _late(what)
            continue
        workload, first = Workload(job, what, case), jobs.given(case, session.device)
        by_name = {
            name: rows.head(workload) | {"provider": name, "backend": jobs.backend(name, job, first)}
            for name in able
        }
        judge(session, workload, first, able, by_name)
        given = jobs.sets(job, first, 1)[0]
        for name, provider in able.items():
            if by_name[name].get("ok"):
                with noted(by_name[name]):
                    t = hosttime.burst(jobs.call(provider, job, given), session.device)
                    ms = {"ms": 1e3 * t.p50, "p20": 1e3 * t.p20, "p80": 1e3 * t.p80}
                    by_name[name] |= {**ms, "runs": t.runs, "timer": "host"}
        rows.add_ratios(by_name)
        yield from by_name.values()


def cold(session: Session) -> Iterator[Row]:
    """Yield a row per new process with empty caches; of peers, which take minutes, only if named."""
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
                row["compiled_again"] = sum(again.values())
            yield row


def _late(what: str, provider: str = "all") -> Row:
    return {"case": what, "provider": provider, "skipped": "out of time"}


@contextmanager
def noted(row: Row) -> Iterator[None]:
    """Turn what a provider raises into a field of its row: refused for NotImplementedError, else failed."""
    try:
        yield
    except Exception as error:
        words = (str(error).splitlines() or [""])[0][:300].encode("ascii", "replace").decode()
        if isinstance(error, NotImplementedError):
            row["refused"] = words
        else:
            row["failed"] = f"{type(error).__name__}: {words}"
        row["ok"] = False
