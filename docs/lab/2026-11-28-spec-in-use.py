"""Check and time packets and replays before and after substitution, waiting and early histories.

    python docs/lab/2026-11-28-spec-in-use.py OLD_SRC            on an H200; OLD_SRC: `src` before the change
    TRITON_INTERPRET=1 python docs/lab/2026-11-28-spec-in-use.py OLD_SRC --pretend     toy rows, not timed

Two sources of one package do not fit into one process: a process for each has all tensors of a row, and both
time it in turn, TURNS times (`gdn_bench.timing.graph`). The table has us (medians of the turns); the error
against the fp64 reference, of rows of at most 8, over that before (`WRONG`: beyond the limit); whether all
bits are those before; and whether rows have the bits that they have alone, and in a call of eight rows.
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

if "--child" in sys.argv:
    import torch

    from gdn.backends.triton import launch
    from gdn.backends.triton.launch import launches, parallel
    from gdn.testing import accuracy
    from gdn_bench.passes.gpu import JUDGED_HEADS
    from gdn_bench.problems import jobs, packets
    from gdn_bench.providers.load import load_provider
    from gdn_bench.providers.provider import put_in_pool
    from gdn_bench.results import rows
    from gdn_bench.timing import graph

ROOT, IS_TOY = Path(__file__).resolve().parents[2], "--pretend" in sys.argv
TURNS, BUDGET = 5, 0.1  # seconds a turn
NAMES = [
    *(f"B={B} T={T} bf16 chunk" for B in (1, 8, 64, 128) for T in (4, 16)),
    *(f"B={B} T=4 bf16 chunk final" for B in (1, 8)), "B=128 T=4 bf16 replay",
    *(f"B={B} T={T} bf16 replay" for B in (1, 8, 64) for T in (1, 2, 4, 8, 16)),
]  # fmt: skip
if IS_TOY:
    NAMES = ["B=8 T=4 bf16 chunk", "B=8 T=4 bf16 replay", "B=1 T=16 bf16 replay"]
KEPT, PER_ROW = (
    ("pool", "history_u", "history_k", "history_G"),
    ("q", "k", "v", "g", "beta", "read_index", "accepted"),
)


class Trial:
    """Hold the provider, the inputs of one batch size, and the prepared graph of a row."""

    def __init__(self):
        self.device = torch.device("cpu" if IS_TOY else "cuda")
        self.shape = packets.Shape(heads=(1, 2), size=64) if IS_TOY else packets.Shape()
        self.gdn, self.prepared, self.first = load_provider("gdn:triton"), None, {}

    def problem(self, name):
        """Return the packet of a name, the inputs of its batch size, and its problem on a pool of its own."""
        B, T, dtype, way = name.split(" ", 3)
        one = packets.Packet(int(B[2:]), int(T[2:]), dtype, way)
        if (one.B, dtype) not in self.first:
            torch.manual_seed(0)
            self.first = {(one.B, dtype): jobs.given(self.shape.case(one.B, dtype), self.device)}
        first = self.first[one.B, dtype]
        x = {key: y for key, y in first.tensors.items() if key != "initial_state"}
        on_pool = replace(first, tensors=x | put_in_pool(first.tensors["initial_state"]))
        (problem,) = packets.problems(one, [on_pool])
        for key in KEPT[1:]:
            if key in problem.tensors:
                # no place that is not in use may reach a result
                problem.tensors[key].fill_(float("nan"))
        return one, first, problem

    def run(self, one, problem, batch=None):
        """Return o and states of a call of all rows or some, on a copy of the pool."""
        few = {key: y.clone() if key in KEPT else y for key, y in problem.tensors.items()}
        if batch is not None:
            few |= {key: y[batch] for key, y in few.items() if key.removeprefix("past_") in PER_ROW}
        bound = self.gdn.binds[one.way](few, problem.options)
        return [y.clone() for y in bound.restore(bound.run()) if y is not None]

    def batches(self, one):
        """Return rows that run without the others: the first, the last, and eight."""
        eight = range(one.B // 2, one.B // 2 + min(8, one.B // 2))
        return [[0], [one.B - 1], list(eight)] if one.B > 1 else []

    def compile(self, _):
        """Compile the kernels of all rows in threads."""
        steps = {}
        for name in NAMES:
            one, _, problem = self.problem(name)
            with launch.record_launches([]) as recorded:
                for batch in [None, *self.batches(one)]:
                    self.run(one, problem, batch)
            for step, tensors in recorded:
                steps[step.binary_key(tensors)] = step, tuple(map(launches.stand_in, tensors))
        if not IS_TOY:
            parallel.compile_all(list(steps.values()))
        return len(steps)

    def check(self, name):
        """Return a digest of a row's bits, sizes of batches with other bits, and the error."""
        one, first, problem = self.problem(name)
        got, case = self.run(one, problem), self.shape.case(one.B, one.dtype)
        data = b"".join(y.cpu().contiguous().view(torch.uint8).numpy().tobytes() for y in got)
        found = {"digest": hashlib.sha256(data).hexdigest(), "others": []}
        for batch in self.batches(one):
            if not all(
                torch.equal(y[batch], z) for y, z in zip(got, self.run(one, problem, batch), strict=True)
            ):
                found["others"].append(len(batch))
        if one.B <= 8:
            calm = lambda: jobs.given(replace(case, gate="none"), self.device)  # noqa: E731
            reference = accuracy.expect_outputs(
                first, calm, JUDGED_HEADS, False, packets.reference_of_packets
            )
            written = dict(zip(("o", "final_state"), got, strict=False))
            verdict = rows.verdict(accuracy.compare_outputs(written, packets.wanted(one, reference), case))
            found |= {"error": verdict["error"], "ok": bool(verdict["ok"])}
        return found

    def time(self, name):
        """Return us of one turn of a row; an empty name ends the row."""
        if not name:
            self.prepared = None
            graph.release()
            return 0.0
        if self.prepared is None:
            one, first, _ = self.problem(name)
            single = replace(one, T=1, way=packets.SINGLE)
            copies = graph.copies(single.cost(self.shape).bytes / 2, self.device)
            problems = packets.problems(one, jobs.sets(packets.SINGLE, first, copies))
            calls = [self.gdn.binds[one.way](x.tensors, x.options).run for x in problems]
            self.prepared = graph.prepare(calls, self.device, moved=[problems[0].tensors["pool"]])
        return 1e6 * graph.interleaved({"": self.prepared}, self.device, BUDGET)[""].p50


def child():
    """Answer each line of (method, row) by a line of JSON."""
    if IS_TOY:
        from kit import interpreter

        interpreter.install()
    trial = Trial()
    with torch.no_grad():
        for line in sys.stdin:
            method, name = json.loads(line)
            print("answer", json.dumps(getattr(trial, method)(name)), flush=True)


def main():
    """Ask both processes, to time in turn, and print a line for each row."""
    sides, pipe = {}, subprocess.PIPE
    for side, src in (("before", sys.argv[1]), ("after", f"{ROOT}/src")):
        env = os.environ | {"PYTHONPATH": f"{src}:{ROOT}/benchmarks:{ROOT}/tests"}
        command = [sys.executable, __file__, "--child", *sys.argv[2:]]
        sides[side] = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)

    def ask(method, name, in_turn=True):
        answers = []
        for side in sides.values():
            print(json.dumps([method, name]), file=side.stdin, flush=True)
            answers += [answer(side)] if in_turn else []
        return answers or [answer(side) for side in sides.values()]

    def answer(side):
        while not (line := side.stdout.readline()).startswith("answer"):
            assert line, "a process ended"
        return json.loads(line.removeprefix("answer"))

    print("kernels:", *ask("compile", "", in_turn=False), flush=True)
    lines = [
        "| row | us before | after | ratio | error | bits | rows alone |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for name in NAMES:
        old, new = ask("check", name, in_turn=False)
        turns = [ask("time", name) for _ in range(0 if IS_TOY else TURNS)] or [[1.0, 1.0]]
        ask("time", "")
        before, after = (statistics.median(x) for x in zip(*turns, strict=True))
        error = f"x{new['error'] / old['error']:.3f}{'' if new['ok'] else ' WRONG'}" if "error" in new else ""
        bits = "=" if new["digest"] == old["digest"] else "other"
        alone = f"OTHER in calls of {new['others']}" if new["others"] else "="
        times = f"{before:.2f} | {after:.2f} | {after / before:.3f}"
        lines.append(f"| {name} | {times} | {error} | {bits} | {alone} |")
        print(lines[-1], flush=True)
    print("", *lines, sep="\n")


if __name__ == "__main__":
    child() if "--child" in sys.argv else main()
