"""Time forwards and prefills of many short sequences of several trees in turn on an sm_90 GPU.

    python docs/lab/2026-11-27-states-by-tma.py [--rounds N] TREE [TREE:off ...]

TREE: a checkout; `:off` sets `scans.STATES_BY_TMA = False`. Each has one child process, which lives for the
whole run. The children compile at the same time, and then measure one at a time, in turn. us by CUDA graphs
of four calls, medians of nine, the least of the rounds; ratio to the first tree; OTHER BITS where outputs or
states have not those of the first tree. forward: initial and final states in fp32, K first. pool: `prefill`
in place, V first.
DRY=1: on a CPU, `eager`, a few tokens, no times.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

DRY = "DRY" in os.environ


def drawn(count, least, most):
    return [least + 1237 * n % (most - least + 1) for n in range(count)]


ROWS = {
    "16/32 64x128": (16, 32, [128] * 64),
    "16/32 16x64": (16, 32, [64] * 16),
    "16/32 1000 of 1..300": (16, 32, drawn(1000, 1, 300)),
    "16/32 256 of 1..64": (16, 32, drawn(256, 1, 64)),
    "16/32 128x17": (16, 32, [17] * 128),
    "16/32 300 of 1..300": (16, 32, drawn(300, 1, 300)),
    "2/8 300 of 1..300": (2, 8, drawn(300, 1, 300)),
    "16/64 64x128": (16, 64, [128] * 64),
    "16/32 32 of 100..2000": (16, 32, drawn(32, 100, 2000)),
    "16/32 8x1024": (16, 32, [1024] * 8),
    "16/32 1x8192": (16, 32, [8192]),
    "16/32 4x8192": (16, 32, [8192] * 4),
}
FIRST = ("16/32 16x64", "16/32 64x128", "16/32 1x8192", "16/32 8x1024", "2/8 300 of 1..300")
KINDS = ("forward", "pool fp32", "pool bf16")


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
    given["beta"] = rand(1, T, HV).sigmoid()
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device)
    if kind == "forward":
        state = rand(N, HV, D, D)
        found = []

        def run():
            found[:] = gdn.chunk_gated_delta_rule(
                **given, initial_state=state, output_final_state=True, cu_seqlens=ends
            )

        return run, lambda: found
    first = rand(2 * N, HV, D, D).to(torch.float32 if kind.endswith("fp32") else torch.bfloat16)
    state, out = first.clone(), torch.full_like(v, float("nan"))
    index = torch.randperm(2 * N, generator=torch.Generator().manual_seed(0))[:N].to(device)

    def run():
        gdn.prefill(
            **given, state=state, out=out, cu_seqlens=ends.int(), state_index=index, state_v_first=True
        )

    def result():
        state.copy_(first)
        run()
        return [out, state]

    return run, result


def child(tree, is_off):
    sys.path.insert(0, f"{tree}/src")
    import torch

    import gdn

    if is_off:
        from gdn.backends.hopper import scans

        scans.STATES_BY_TMA = False

    def hashed(x):
        bits = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).flatten().long()
        return int((bits * (torch.arange(bits.numel(), device=bits.device) % 8191 + 1)).sum())

    def measure(row, kind):
        run, result = calls_of(torch, gdn, row, kind)
        for _ in range(3):
            run()
        bits = [hashed(x) for x in result()]
        bits.append([hashed(x) for x in result()] == bits)
        if DRY:
            return 1.0, bits
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
        return statistics.median(times), bits

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
        tree, _, off = argument.partition(":")
        self.name = f"{Path(tree).name}{' off' if off else ''}"
        command = [sys.executable, __file__, "--child", str(Path(tree).resolve()), off]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, row, kind):
        self.process.stdin.write(json.dumps([row, kind]) + "\n")
        self.process.stdin.flush()

    def receive(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else (None, ["the process died"])


def main():
    arguments, rounds, began = sys.argv[1:], 2, time.time()
    if arguments[0] == "--rounds":
        rounds, arguments = int(arguments[1]), arguments[2:]
    trees = [Tree(argument) for argument in arguments]
    for row in FIRST:
        for kind in KINDS:
            for tree in trees:
                tree.send(row, kind)
            for tree in trees:
                tree.receive()
    print(f"[{time.time() - began:.0f} s] compiled", flush=True)
    for kind in KINDS:
        for row in ROWS:
            found = {tree: [] for tree in trees}
            for i in range(rounds):
                for tree in trees if i % 2 == 0 else reversed(trees):
                    tree.send(row, kind)
                    found[tree].append(tree.receive())
            first, cells = found[trees[0]], []
            for tree in trees:
                us = [x[0] for x in found[tree]]
                if None in us:
                    cells.append(f"{tree.name} FAILED {found[tree][0][1]}")
                    continue
                bits = [x[1] for x in found[tree]]
                same = all(x == first[0][1] for x in bits) and bits[0][-1]
                ratio = min(us) / min(x[0] for x in first) if first[0][0] else float("nan")
                cells.append(f"{tree.name} {min(us):.1f} us {ratio:.3f}{'' if same else ' OTHER BITS'}")
            print(f"[{time.time() - began:3.0f}] {kind:10s} {row:24s} " + "; ".join(cells), flush=True)
    for tree in trees:
        tree.process.kill()


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(sys.argv[2], sys.argv[3] == "off")
    else:
        main()
