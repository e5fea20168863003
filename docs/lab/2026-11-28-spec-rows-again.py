"""Check and time more candidates for the rows of `gdn bench spec` that are slower than FlashInfer's.

    PYTHONPATH=src:benchmarks python docs/lab/2026-11-28-spec-rows-again.py                   on an H200
    PYTHONPATH=src:benchmarks python docs/lab/2026-11-28-spec-rows-again.py --only "replay"
    TRITON_INTERPRET=1 PYTHONPATH=src:benchmarks:tests python docs/lab/2026-11-28-spec-rows-again.py --pretend

A candidate is a set of values of module constants of `serving/packet.py` and `replay.py`. The table has for
each row the us of the code in use, of each candidate, and FlashInfer's recorded time over the best; times are
from CUDA graphs that run in turn (`gdn_bench.timing.graph`). `=` after a time: o and states have the bits of
the code in use. `x1.00`: largest error against the fp64 reference over that of the code in use, `WRONG`:
beyond the limit (rows of at most 8 states a head; else the largest difference from the code in use over its
largest value). --only: rows with one of these words in their names, separated by commas. --pretend: toy sizes
in Triton's interpreter on a CPU, no times.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from gdn.backends.triton import launch
from gdn.backends.triton.launch import parallel
from gdn.backends.triton.serving import packet, replay
from gdn.ops import fastpath
from gdn.testing import accuracy
from gdn_bench.passes.gpu import JUDGED_HEADS
from gdn_bench.problems import jobs, packets
from gdn_bench.problems.packets import Packet, Shape
from gdn_bench.providers.load import load_provider
from gdn_bench.providers.provider import Bound, put_in_pool
from gdn_bench.results import rows
from gdn_bench.timing import graph, measure

BUDGET = 0.3  # seconds of timing per row
MODULES = {"packet": packet, "replay": replay}


@dataclass(frozen=True)
class Candidate:
    """Hold a way to launch: values of constants, by "module.NAME", and registers."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    registers: int | None = None  # maxnreg

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let plans use this candidate, and nothing that was planned before."""
        with ExitStack() as stack:
            swap = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
            swap(launch.PlanCache, "get", lambda cache, key, make: make())
            for name, value in self.values.items():
                module, constant = name.split(".")
                swap(MODULES[module], constant, value)
            fastpath._calls.clear()
            yield
            fastpath._calls.clear()

    def record(self, bound: Bound) -> tuple[list[Any], Any]:
        """Return the launches of a call with their tensors, and what the call returns."""
        with self.active(), launch.record_launches([]) as launches:
            results = bound.run()
        for one, _ in launches:
            if self.registers is not None:
                one.options = {**one.options, "maxnreg": self.registers}
        return launches, results


def run(launches: list[Any], results: Any) -> Any:
    """Run recorded launches; return what the call returned."""
    for one, tensors in launches:
        one(*tensors)
    return results


NOW = Candidate("now")
SUBSTITUTES, WAITS = {"packet.SUBSTITUTES": True}, {"packet.WAITS": True}
PAST, ONE_WARP = {"replay.READS_PAST": True}, {"packet.ONE_WARP": True}
BOTH = SUBSTITUTES | WAITS
FEW = [NOW, Candidate("substitutes", SUBSTITUTES), Candidate("waits", WAITS), Candidate("both", BOTH)]
MANY = [NOW, Candidate("substitutes", SUBSTITUTES)]
ROWS = {
    "B=8 T=16 bf16 chunk": [
        *FEW, Candidate("both, 168 registers", BOTH, registers=168),
        Candidate("both, 248 registers", BOTH, registers=248),
    ],
    "B=8 T=4 bf16 replay": [
        *FEW, Candidate("past", PAST), Candidate("past waits", PAST | WAITS), Candidate("all", PAST | BOTH),
        Candidate("all, one warp", PAST | BOTH | ONE_WARP),
        Candidate("all but waits, one warp", PAST | SUBSTITUTES | ONE_WARP),
    ],
    "B=8 T=4 bf16 chunk": [*FEW, Candidate("both, one warp", BOTH | ONE_WARP)],
    "B=8 T=4 bf16 chunk final": MANY,
    "B=1 T=4 bf16 replay": [*FEW, Candidate("past waits", PAST | WAITS), Candidate("all", PAST | BOTH)],
    "B=1 T=4 bf16 chunk": FEW, "B=1 T=16 bf16 chunk": FEW, "B=1 T=4 bf16 chunk final": MANY,
    "B=64 T=16 bf16 chunk": MANY, "B=64 T=4 bf16 replay": MANY, "B=64 T=4 bf16 chunk": MANY,
    "B=128 T=16 bf16 chunk": MANY, "B=128 T=4 bf16 replay": MANY, "B=128 T=4 bf16 chunk": MANY,
}  # fmt: skip


class Trial:
    """Hold the device, the sizes and the provider of a run."""

    def __init__(self, is_toy: bool) -> None:
        self.is_toy, self.device = is_toy, torch.device("cpu" if is_toy else "cuda")
        self.shape = Shape(heads=(1, 2), size=64) if is_toy else Shape()
        self.gdn = load_provider("gdn:triton")
        self.first: dict[tuple[int, str], Any] = {}

    def inputs(self, one: Packet) -> Any:
        """Return the inputs of a group: those of all its rows."""
        key = one.B, one.dtype
        if key not in self.first:
            # one group at a time is in memory
            self.first = {key: jobs.given(self.shape.case(*key), self.device)}
        return self.first[key]

    def bound(self, one: Packet) -> tuple[Bound, torch.Tensor]:
        """Return a call on a pool of its own with a slot of NaN, and the pool."""
        first = self.inputs(one)
        x = {name: y for name, y in first.tensors.items() if name != "initial_state"}
        on_pool = replace(first, tensors=x | put_in_pool(first.tensors["initial_state"]))
        (problem,) = packets.problems(one, [on_pool])
        for name in ("history_u", "history_k", "history_G"):
            if name in problem.tensors:
                # no place that is not in use may reach a result
                problem.tensors[name].fill_(float("nan"))
        with NOW.active():
            return self.gdn.binds[one.way](problem.tensors, problem.options), problem.tensors["pool"]

    def check(self, one: Packet, candidates: list[Candidate]) -> dict[str, str]:
        """Return a mark for each candidate: `=` for equal bits, `ok` or what is wrong against fp64."""
        bound, pool = self.bound(one)
        before, first, expected = pool.clone(), self.inputs(one), None
        case = self.shape.case(one.B, one.dtype)
        if one.B <= 8:
            reference = accuracy.expect_outputs(
                first, lambda: jobs.given(replace(case, gate="none"), self.device), JUDGED_HEADS, False,
                packets.reference_of_packets,
            )  # fmt: skip
            expected = packets.wanted(one, reference)
        marks, usual, usual_error = {}, None, 0.0
        for candidate in candidates:
            pool.copy_(before)
            results = run(*candidate.record(bound))
            with NOW.active():
                o, states = bound.restore(results)
            got = [x.clone() for x in (o, states) if x is not None]
            usual = usual or got
            is_same = all(map(torch.equal, got, usual))
            marks[candidate.name] = "=" if is_same else " other bits"
            if expected is None and not is_same:
                far = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(got, usual, strict=True))
                marks[candidate.name] += f" {far:.1e}"
            if expected is not None:
                written = {"o": o} if states is None else {"o": o, "final_state": states}
                verdict = rows.verdict(accuracy.compare_outputs(written, expected, case))
                usual_error = usual_error or verdict["error"]
                marks[candidate.name] += f" x{verdict['error'] / usual_error:.3f}"
                marks[candidate.name] += "" if verdict["ok"] else " WRONG"
        return marks

    def times(self, one: Packet, candidates: list[Candidate]) -> dict[str, float]:
        """Return us per call of each candidate, and of FlashInfer where it runs."""
        first = self.inputs(one)
        single = replace(one, T=1, way=packets.SINGLE)
        copies = graph.copies(single.cost(self.shape).bytes / 2, self.device)
        problems = packets.problems(one, jobs.sets(packets.SINGLE, first, copies))
        moved: list[torch.Tensor] = [problems[0].tensors["pool"]]
        prepared: dict[str, graph.Prepared] = {}
        with NOW.active():
            bounds = [self.gdn.binds[one.way](x.tensors, x.options) for x in problems]
        for candidate in candidates:
            calls = [self.call(candidate, bound) for bound in bounds]
            prepared[candidate.name] = graph.prepare(calls, self.device, moved=moved)
        late = [name for name, x in prepared.items() if x.timer == "events"]
        if late:
            print(f"  not captured: {', '.join(late)}", flush=True)
        seconds = graph.interleaved(prepared, self.device, BUDGET)
        return {name: 1e6 * x.p50 for name, x in seconds.items()}

    def call(self, candidate: Candidate, bound: Bound) -> Callable[[], Any]:
        """Return a function that runs a candidate's launches."""
        launches, results = candidate.record(bound)
        return lambda: run(launches, results)


def by_name(name: str) -> Packet:
    """Return the packet of a row's name."""
    B, T, dtype, way = name.split(" ", 3)
    return Packet(int(B[2:]), int(T[2:]), dtype, way)


def compile_all(trial: Trial, table: Mapping[str, list[Candidate]]) -> int:
    """Compile the kernels of all candidates in threads."""
    steps = {}
    for name, candidates in table.items():
        bound, _ = trial.bound(by_name(name))
        for candidate in candidates:
            for one, tensors in candidate.record(bound)[0]:
                steps[one.binary_key(tensors)] = one, tensors
    if not trial.is_toy:
        parallel.compile_all(list(steps.values()))
    return len(steps)


def recorded() -> dict[str, float]:
    """Return FlashInfer's us of the rows that were recorded on an H200."""
    found = {}
    for line in (measure.RESULTS / "h200.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("pass") == "spec" and row.get("provider") == "flashinfer" and "ms" in row:
            found[row["case"]] = 1e3 * row["ms"]
    return found


def main() -> None:
    """Print a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="rows with this in their names")
    parser.add_argument("--pretend", action="store_true", help="toy sizes in Triton's interpreter, no times")
    asked = parser.parse_args()
    if asked.pretend:
        from kit import interpreter

        interpreter.install()
    torch.manual_seed(0)
    start, trial = time.perf_counter(), Trial(asked.pretend)
    words = asked.only.split(",")
    table = {name: x for name, x in ROWS.items() if any(word in name for word in words)}
    if asked.pretend:
        # rows of one toy shape, each once
        table = {
            name.replace("B=8", "B=1"): x for name, x in table.items() if "B=1 " in name or "B=8" in name
        }
    lines = []
    with torch.no_grad():
        count = compile_all(trial, table)
        print(f"{count} kernels, {time.perf_counter() - start:.0f} s", flush=True)
        past = recorded()
        for name, candidates in table.items():
            marks, times = trial.check(by_name(name), candidates), {}
            if not asked.pretend:
                times = trial.times(by_name(name), candidates)
            us = past.get(name, float("nan"))
            best = min(times, key=times.__getitem__, default="now")
            ratio = us / times.get(best, float("nan"))
            line = "  ".join(f"{x} {times.get(x, 0.0):.2f}{mark}" for x, mark in marks.items())
            lines.append(f"{name}: {line}  | flashinfer {us:.2f}, {ratio:.2f}x by {best}")
            print(lines[-1], flush=True)
            graph.release()
    head = "interpreter" if asked.pretend else torch.cuda.get_device_name()
    print(f"{head} {torch.__version__}, {time.perf_counter() - start:.0f} s", *lines, sep="\n")


if __name__ == "__main__":
    main()
