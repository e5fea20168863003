"""Check and time candidates for the rows of `gdn bench spec` that are slower than FlashInfer's.

    git apply docs/lab/2026-11-27-spec.patch                                    first
    PYTHONPATH=src:benchmarks python docs/lab/2026-11-27-spec-candidates.py     on an H200
    PYTHONPATH=src:benchmarks python docs/lab/2026-11-27-spec-candidates.py --only B=8
    TRITON_INTERPRET=1 PYTHONPATH=src:benchmarks:tests python docs/lab/2026-11-27-spec-candidates.py --pretend

A candidate is a value of `loading.LOADING`, with other tiles, warps or registers where named. The table has
for each row the us of the code in use, of each candidate and of FlashInfer, from CUDA graphs that run in turn
(`gdn_bench.timing.graph`), and FlashInfer's time over the best of gdn's. Without FlashInfer its time is that
of the recorded row. `=` after a time: o and states have the bits of the code in use. `ok`: the errors against
the fp64 reference are within the limits (rows of at most 8 states a head). --only: rows with this in their
names. --pretend: toy sizes in Triton's interpreter on a CPU, no times.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any
from unittest import mock

import torch

from gdn.backends.triton import launch
from gdn.backends.triton.launch import parallel
from gdn.backends.triton.serving import loading, packet, replay, state_tiles
from gdn.ops import fastpath
from gdn.testing import accuracy
from gdn_bench.passes.gpu import JUDGED_HEADS
from gdn_bench.problems import jobs, packets
from gdn_bench.problems.packets import Packet, Shape
from gdn_bench.providers.load import load_provider
from gdn_bench.providers.provider import Bound, put_in_pool
from gdn_bench.results import rows
from gdn_bench.timing import coldstart, graph, measure

BUDGET = 0.5  # seconds of timing per row


@dataclass(frozen=True)
class Candidate:
    """Hold a way to launch: options of loads, sizes of a packet's tiles, elements of a decode's."""

    name: str
    loads: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    warps: int | None = None
    registers: int | None = None
    share: int | None = None  # elements of an fp32 state in a lane of `decode`

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let plans use this candidate, and nothing that was planned before."""
        blocks = packet.blocks

        def tiles(*given: Any) -> dict[str, int]:
            own = blocks(*given) | dict(self.sizes)
            if "BV" in self.sizes and own["STRIPS"] > 1 and "STRIPS" not in self.sizes:
                own["STRIPS"] = -(-given[1] // own["BV"])
            return own

        with ExitStack() as stack:
            swap = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
            swap(loading, "LOADING", loading.Loading(**self.loads))
            swap(launch.PlanCache, "get", lambda cache, key, make: make())
            for module in (packet, replay):
                swap(module, "blocks", tiles)
                if self.warps is not None:
                    swap(module, "warps", lambda sizes: self.warps)
            if self.share is not None:
                swap(state_tiles, "SHARES", state_tiles.SHARES | {("k", 4): self.share})
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


FIRST, EARLY = {"has_loads_first": True}, {"is_early": True, "strips": 1}
NOW = Candidate("now")
FEW = [NOW, Candidate("first", FIRST), Candidate("early", EARLY), Candidate("both", FIRST | EARLY)]
SOME = [*FEW, Candidate("both/16", FIRST | EARLY, {"BV": 16}, 1)]
WIDE = [*SOME, Candidate("2w", warps=2), Candidate("2w early", EARLY, warps=2)]
TWO, THREE = EARLY | {"strips": 2}, {"BV": 16, "STAGES": 3}
MANY = [
    NOW, Candidate("first", FIRST), Candidate("first, 2 strips", FIRST | {"strips": 2}),
    Candidate("both", FIRST | TWO),
]  # fmt: skip
LONG = [
    *MANY, Candidate("16x3", {}, THREE), Candidate("16x3 both", FIRST | TWO, THREE),
    Candidate("32x2", {}, {"STAGES": 2}), Candidate("16x3@128", FIRST, THREE, registers=128),
]  # fmt: skip
NO_NEXT = {"has_next_token": False}
TOKENS = [
    NOW, Candidate("early", EARLY), Candidate("no next", NO_NEXT, registers=128),
    Candidate("no next 136", NO_NEXT, registers=136),
    Candidate("no next early", NO_NEXT | EARLY, registers=128),
]  # fmt: skip
FP32_TOKENS = [NOW, Candidate("no next", NO_NEXT), Candidate("no next early", NO_NEXT | EARLY)]
SINGLE = [
    NOW, Candidate("early", EARLY), Candidate("16 columns", share=64, registers=128),
    Candidate("16 early", EARLY, share=64, registers=128), Candidate("80 registers", registers=80),
]  # fmt: skip
ROWS = {
    "B=1 T=4 bf16 chunk final": FEW, "B=1 T=4 fp32 chunk final": FEW, "B=1 T=4 bf16 replay": FEW,
    "B=1 T=1 bf16 decode": [NOW, Candidate("early", EARLY)],
    "B=8 T=4 bf16 chunk": SOME, "B=8 T=16 bf16 chunk": WIDE, "B=8 T=4 bf16 replay": SOME,
    "B=8 T=4 bf16 chunk final": SOME, "B=8 T=4 fp32 chunk": SOME, "B=8 T=4 fp32 chunk final": SOME,
    "B=8 T=16 bf16 states": TOKENS, "B=8 T=1 fp32 decode": SINGLE,
    "B=64 T=16 bf16 chunk": LONG, "B=64 T=4 bf16 replay": MANY, "B=64 T=4 bf16 chunk": MANY,
    "B=64 T=4 bf16 final": TOKENS, "B=64 T=4 fp32 final": FP32_TOKENS,
    "B=128 T=16 bf16 chunk": LONG, "B=128 T=4 bf16 replay": MANY, "B=128 T=4 bf16 final": TOKENS,
}  # fmt: skip


class Trial:
    """Hold the device, the sizes and the provider of a run."""

    def __init__(self, is_toy: bool) -> None:
        self.is_toy, self.device = is_toy, torch.device("cpu" if is_toy else "cuda")
        self.shape = Shape(heads=(1, 2), size=64) if is_toy else Shape()
        self.gdn = load_provider("gdn:triton")
        self.peer = "toy" if is_toy else load_provider("flashinfer")
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
        marks, usual = {}, None
        for candidate in candidates:
            pool.copy_(before)
            results = run(*candidate.record(bound))
            with NOW.active():
                o, states = bound.restore(results)
            got = [x.clone() for x in (o, states) if x is not None]
            usual = usual or got
            marks[candidate.name] = "=" if all(map(torch.equal, got, usual)) else " OTHER BITS"
            if expected is not None:
                written = {"o": o} if states is None else {"o": o, "final_state": states}
                verdict = rows.verdict(accuracy.compare_outputs(written, expected, case))
                marks[candidate.name] += "ok" if verdict["ok"] else " WRONG"
        return marks

    def times(self, one: Packet, candidates: list[Candidate]) -> dict[str, float]:
        """Return us per call of each candidate, and of FlashInfer where it runs."""
        first = self.inputs(one)
        single = replace(one, T=1, way=packets.SINGLE)
        copies = graph.copies(single.cost(self.shape).bytes / 2, self.device)
        problems = packets.problems(one, jobs.sets(packets.SINGLE, first, copies))
        moved, prepared = [problems[0].tensors["pool"]], {}
        with NOW.active():
            bounds = [self.gdn.binds[one.way](x.tensors, x.options) for x in problems]
        for candidate in candidates:
            calls = [self.call(candidate, bound) for bound in bounds]
            prepared[candidate.name] = graph.prepare(calls, self.device, moved=moved)
        if not isinstance(self.peer, str) and one.way in self.peer.binds:
            # a peer without this way or dtype raises errors of any kind
            with suppress(Exception):
                calls = [jobs.call(self.peer, one.way, x) for x in problems]
                prepared["flashinfer"] = graph.prepare(calls, self.device, moved=moved)
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
    """Compile the kernels of all candidates in threads, and FlashInfer's in processes beside them."""
    peers = Thread(target=lambda: None, daemon=True)
    if not isinstance(trial.peer, str):
        groups: dict[Any, list[Packet]] = {}
        for one in map(by_name, table):
            groups.setdefault((one.B, one.dtype), []).append(one)
        warm = lambda: coldstart.warm(["flashinfer"], [], groups.values(), False, 6)  # noqa: E731
        peers = Thread(target=warm, daemon=True)
    peers.start()
    steps = {}
    for name, candidates in table.items():
        bound, _ = trial.bound(by_name(name))
        for candidate in candidates:
            for one, tensors in candidate.record(bound)[0]:
                steps[one.binary_key(tensors)] = one, tensors
    if not trial.is_toy:
        parallel.compile_all(list(steps.values()))
    peers.join(60)
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
    table = {name: x for name, x in ROWS.items() if asked.only in name}
    if asked.pretend:
        table = {name: x for name, x in table.items() if name.startswith("B=1 ") or "states" in name}
        table = {name.replace("B=8", "B=1"): x for name, x in table.items()}
    head = "interpreter" if asked.pretend else torch.cuda.get_device_name()
    print(head, torch.__version__, "flashinfer:", trial.peer if isinstance(trial.peer, str) else "beside")
    with torch.no_grad():
        count = compile_all(trial, table)
        print(f"{count} kernels, {time.perf_counter() - start:.0f} s", flush=True)
        past = recorded()
        for name, candidates in table.items():
            marks, times = trial.check(by_name(name), candidates), {}
            if not asked.pretend:
                times = trial.times(by_name(name), candidates)
            peer = times.pop("flashinfer", None)
            us = peer or past.get(name, float("nan"))
            ratio = us / min(times.values(), default=float("nan"))
            line = "  ".join(f"{x} {times.get(x, 0.0):.2f}{mark}" for x, mark in marks.items())
            print(
                f"{name}: {line}  flashinfer {us:.2f}{'' if peer else ' (recorded)'} {ratio:.2f}x", flush=True
            )
            graph.release()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
