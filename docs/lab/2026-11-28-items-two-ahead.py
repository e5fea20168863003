"""Time forwards and prefills of many short sequences of several trees in turn, and compare bits (sm_90).

    python docs/lab/2026-11-28-items-two-ahead.py [--rounds 3] [--seconds 110] TREE [TREE ...]

TREE: a folder with `src`, or FOLDER:STATES=N with `rule.STATES_PER_SM = N`. The first is the one that all
others are compared with. Each has one child process.
The children compile at the same time, then measure one at a time, in turn: CUDA graphs of four calls, the
median of nine, the least of the rounds. The last table has us and ratios to the first tree. BITS: outputs,
states or pools differ from the first tree's, or after 36 replays from the first call's. HANGS: no answer
in 40 s; that child is killed, and the other trees go on. After `--seconds` no row begins.
DRY=1: on a CPU, `eager`, a few tokens, no times.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

DRY = "DRY" in os.environ


def drawn(count, least, most):
    return [least + 1237 * n % (most - least + 1) for n in range(count)]


ROWS = {
    "16/32 16x64": (16, 32, [64] * 16),
    "2/8 300 of 1..300": (2, 8, drawn(300, 1, 300)),
    "16/32 64x128": (16, 32, [128] * 64),
    "16/32 256 of 1..64": (16, 32, drawn(256, 1, 64)),
    "16/32 128x17": (16, 32, [17] * 128),
    "16/32 300 of 1..300": (16, 32, drawn(300, 1, 300)),
    "16/64 64x128": (16, 64, [128] * 64),
    # one long sequence among short ones: a CTA may hold two items that others could start
    "16/32 1x4000, 99 of 1..100": (16, 32, [4000, *drawn(99, 1, 100)]),
    "16/32 32 of 1..900": (16, 32, drawn(32, 1, 900)),
    # the other scan
    "16/32 8x1024": (16, 32, [1024] * 8),
    "16/32 1x256": (16, 32, [256]),
    "16/32 1000 of 1..300": (16, 32, drawn(1000, 1, 300)),
}
KINDS = ("forward", "no state", "pool fp32", "pool bf16")
# where a kind tells something of its own
PAIRS = [(row, kind) for row in list(ROWS)[:5] for kind in KINDS]
PAIRS += [(row, kind) for row in list(ROWS)[5:] for kind in ("forward", "pool bf16")]
OTHERS = ("16/32 8x1024", "16/32 1x256")
PAIRS = [(row, kind) for row, kind in PAIRS if kind == "forward" or row not in OTHERS]
COMPILED = [(row, kind) for row in ("16/32 16x64", "16/32 64x128") for kind in KINDS]
COMPILED += [("16/32 8x1024", "forward"), ("16/32 1x256", "forward")]


def calls_of(torch, gdn, row, kind):
    """Return a function that runs one call, and one that returns its tensors."""
    H, HV, lengths = ROWS[row]
    device, D = ("cpu", 16) if DRY else ("cuda", 128)
    lengths = [1 + n // 60 for n in lengths[:5]] if DRY else lengths
    torch.manual_seed(0)
    N, T = len(lengths), sum(lengths)

    def rand(*shape):
        return torch.randn(*shape, device=device)

    q, k = (torch.nn.functional.normalize(rand(1, T, H, D), dim=-1).bfloat16() for _ in range(2))
    v = rand(1, T, HV, D).bfloat16()
    given = {"q": q, "k": k, "v": v, "g": torch.nn.functional.logsigmoid(rand(1, T, HV)) / 16}
    given |= {"beta": rand(1, T, HV).sigmoid(), "backend": None if DRY else "hopper"}
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device)
    if kind in ("forward", "no state"):
        state = rand(N, HV, D, D) if kind == "forward" else None
        results = []

        def run():
            results[:] = gdn.chunk_gated_delta_rule(
                **given, initial_state=state, output_final_state=True, cu_seqlens=ends
            )

        return run, lambda: results, lambda: None
    first = rand(2 * N, HV, D, D).to(torch.float32 if kind.endswith("fp32") else torch.bfloat16)
    state, out = first.clone(), torch.full_like(v, float("nan"))
    index = torch.randperm(2 * N, generator=torch.Generator().manual_seed(0))[:N].to(device)

    def run():
        gdn.prefill(
            **given, state=state, out=out, cu_seqlens=ends.int(), state_index=index, state_v_first=True
        )

    def again():
        state.copy_(first)
        run()

    return run, lambda: [out, state], again


def child(tree, states):
    sys.path.insert(0, f"{tree}/src")
    import torch

    import gdn
    from gdn.backends.hopper import rule

    # only what is launched
    rule.compile_ahead = lambda *_: None
    if states:
        rule.STATES_PER_SM = int(states)

    def hashed(x):
        bits = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).flatten().long()
        return int((bits * (torch.arange(bits.numel(), device=bits.device) % 8191 + 1)).sum())

    def measure(row, kind):
        run, result, again = calls_of(torch, gdn, row, kind)
        for _ in range(2):
            run()
        again()
        bits = [hashed(x) for x in result()]
        if DRY:
            return 1.0, [*bits, True]
        torch.cuda.synchronize()
        graph, times = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for _ in range(4):
                run()
        for _ in range(9):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            graph.replay()
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b) * 250)
        again()
        return statistics.median(times), [*bits, [hashed(x) for x in result()] == bits]

    for line in sys.stdin:
        row, kind = json.loads(line)
        try:
            answer = measure(row, kind)
        except Exception as error:  # one row's failure leaves the others
            answer = None, [f"{type(error).__name__}: {str(error)[:200]}"]
        print(json.dumps(answer), flush=True)
        if not DRY:
            torch.cuda.empty_cache()


class Tree:
    def __init__(self, argument):
        tree, _, states = argument.partition(":STATES=")
        self.name = Path(tree).resolve().name + (f" {states}" if states else "")
        command = [sys.executable, __file__, "--child", str(Path(tree).resolve()), states]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.is_alive, self.answers = True, queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put(None)

    def send(self, row, kind):
        if self.is_alive:
            self.process.stdin.write(json.dumps([row, kind]) + "\n")
            self.process.stdin.flush()

    def receive(self, seconds=40.0):
        try:
            answer = self.answers.get(timeout=seconds) if self.is_alive else None
        except queue.Empty:
            answer = None
        if answer is not None:
            return answer
        if self.is_alive:
            self.process.kill()
        self.is_alive = False
        return None, ["HANGS or has died"]


def cell(mine, first):
    """Return us, ratio to the first tree and a remark."""
    if any(x[0] is None for x in mine):
        return "FAILED " + str(next(x[1][0] for x in mine if x[0] is None))[:120]
    us = min(x[0] for x in mine)
    if any(x[0] is None for x in first):
        return f"{us:8.1f}"
    is_same = all(x[1] == first[0][1] and x[1][-1] for x in mine)
    return f"{us:8.1f} {us / min(x[0] for x in first):.3f}{'' if is_same else ' BITS'}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("trees", nargs="+")
    given, began, lines = parser.parse_args(), time.time(), []
    trees = [Tree(argument) for argument in given.trees]
    for row, kind in COMPILED:
        for tree in trees:
            tree.send(row, kind)
    for _ in COMPILED:
        for tree in trees:
            answer = tree.receive(100.0)
            if answer[0] is None:
                print(tree.name, answer[1], flush=True)
    print(f"[{time.time() - began:.0f} s] compiled", flush=True)
    for row, kind in PAIRS:
        if time.time() - began > given.seconds:
            lines.append("out of time")
            break
        answers = {tree: [] for tree in trees}
        for i in range(given.rounds):
            for tree in trees if i % 2 == 0 else reversed(trees):
                tree.send(row, kind)
                answers[tree].append(tree.receive())
        cells = (cell(answers[tree], answers[trees[0]]) for tree in trees)
        lines.append(f"{kind:10s} {row:27s} " + " | ".join(cells))
        print(f"[{time.time() - began:3.0f}] {lines[-1]}", flush=True)
    print("\nkind       row                         " + " | ".join(tree.name for tree in trees))
    print("\n".join(lines))
    for tree in trees:
        tree.process.kill()


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(*sys.argv[2:])
    else:
        main()
