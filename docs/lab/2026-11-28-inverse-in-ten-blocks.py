"""Compare the Hopper forward of two checkouts on one GPU: bits of all results, and times by turns.

    python docs/lab/2026-11-28-inverse-in-ten-blocks.py --before TREE [--rounds N] [--after TREE]

TREE: a checkout. `--after` is by default the checkout of this script. Each tree has one child process with
its own `src` and `benchmarks`; the two measure in turn, never at the same time. Before that, one process for
each tree and kind of call fills Triton's cache, all at once.

Bits: the forward at the rows of `gdn bench prefill --set table` and short ones, the other KINDS at some
rows. OTHER BITS where a sum over the bits of any result, weighted by place, differs; RERUN where a call
differs from the call before it. All calls name `backend="hopper"`. Times: us of a forward by CUDA graphs, the
least over rounds of medians of nine; the last table has them, and the ratio after / before.
DRY=1: on a CPU, `eager`, a few tokens, no times.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

DRY = "DRY" in os.environ
TABLE = (
    "2/8 1x32768", "2/8 1x8192", "2/8 8x4096", "16/64 1x32768", "16/64 4x8192", "16/32 1x32768",
    "16/32 1x8192", "16/32 4x8192", "16/32 8x4096", "16/32 8x1024", "16/32 1x2048", "16/16 16x16384",
)  # fmt: skip
SHORT = (
    "16/32 64x128", "16/32 1000 prompts", "16/32 256 prompts", "16/32 300 prompts", "16/32 32 prompts",
    "16/32 16x64", "16/32 128x17", "16/32 1x512", "16/32 1x256", "2/8 300 prompts",
)  # fmt: skip
TIMED = (
    "16/16 16x16384", "16/32 4x8192", "16/32 8x1024", "16/32 8x4096", "16/32 1x8192", "16/64 4x8192",
    "16/32 64x128", "16/32 16x64",
)  # fmt: skip
# kind: rows beside which no others are run; the forward has TABLE and SHORT
KINDS = {
    "forward": (*TABLE, *SHORT),
    "correlated keys": ("16/32 8x1024", "2/8 1x8192", "16/32 64x128"),
    "raw gates, norms": ("16/32 8x1024", "2/8 1x8192", "16/32 300 prompts"),
    "pool fp32": ("16/32 8x1024", *SHORT),
    "pool bf16": ("16/32 8x1024", "16/32 64x128", "16/32 300 prompts"),
    "checkpoints": ("16/32 8x1024", "16/32 300 prompts"),
    "64 keys": ("16/32 8x1024", "2/8 1x8192", "16/32 300 prompts"),
    "gradients": ("16/32 8x1024", "2/8 1x8192"),
    "gradients, recomputed": ("16/32 8x1024",),
}
# rows that launch every binary of their kind; the other kinds have binaries of these
COMPILED = {"16/32 8x1024", "2/8 1x8192", "16/32 64x128"}
SHARED = ("correlated keys", "gradients, recomputed")


def calls_of(row, kind):
    """Return a function that runs one call, and one that returns the tensors of another call."""
    import torch

    import gdn
    from gdn.testing.cases import packed
    from gdn.testing.tensors import inputs
    from gdn_bench.problems import catalog

    case = catalog.case(row)
    device, sizes = "cuda", (64, 64) if kind == "64 keys" else (128, 128)
    if DRY:
        lengths = [1 + n % 70 for n in range(min(case.lengths.N, 3))]
        case, device, sizes = replace(case, lengths=packed(*lengths)), "cpu", (16, 16)
    case = replace(case, sizes=sizes)
    if kind == "correlated keys":
        case = replace(case, keys="correlated")
    if kind == "raw gates, norms":
        case = replace(case, **catalog.VARIANTS["gated"])
    given = inputs(case, torch.bfloat16, device=device, is_drawn_there=True)
    given.tensors["cu_seqlens"] = given.tensors["cu_seqlens"].int()
    tensors = {**given.tensors, **given.options, "backend": "eager" if DRY else "hopper"}

    if kind.startswith(("pool", "checkpoints")):
        initial = tensors.pop("initial_state")
        call = {x: tensors[x] for x in ("q", "k", "v", "g", "beta", "cu_seqlens", "backend")}
        N, HV, D = len(initial), initial.shape[1], initial.shape[2]
        first = torch.cat([initial, initial + 1]).to(torch.bfloat16 if kind == "pool bf16" else torch.float32)
        state = first.clone()
        call |= {"state": state, "out": torch.full_like(tensors["v"], float("nan")), "state_v_first": True}
        call["state_index"] = torch.randperm(2 * N, generator=torch.Generator().manual_seed(0))[:N].to(device)
        results = [call["out"], state]
        if kind == "checkpoints":
            counts = tensors["cu_seqlens"].diff() // 128
            offsets = (counts.cumsum(0) - counts).to(device)
            kept = torch.zeros(int(counts.sum()) + 1, HV, D, D, device=device)
            call |= {"checkpoints": kept, "checkpoint_every": 128, "checkpoint_offsets": offsets}
            results.append(kept)

        def run():
            gdn.prefill(**call)

        def result():
            state.copy_(first)
            run()
            return results

        return run, result

    ends = tensors["cu_seqlens"].cpu()

    def run():
        return gdn.chunk_gated_delta_rule(**tensors, cu_seqlens_cpu=ends)

    if not kind.startswith("gradients"):
        return run, lambda: list(run())
    names = ("q", "k", "v", "g", "beta", "initial_state")
    leaves = {name: tensors[name].detach().requires_grad_() for name in names}

    def trained():
        out = gdn.chunk_gated_delta_rule(
            **{**tensors, **leaves}, cu_seqlens_cpu=ends, recompute=kind.endswith("recomputed")
        )
        return [*out, *torch.autograd.grad(out, list(leaves.values()), [given.do, given.dfinal_state])]

    return trained, trained


def sum_bits(x):
    """Return a sum over the bits of a tensor, weighted by place."""
    import torch

    bits = x.detach().contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).flatten()
    total = 0
    for i, part in enumerate(bits.split(1 << 26)):
        weights = torch.arange(part.numel(), device=part.device) % 8191 + 1
        total = (total * 31 + int((part.long() * weights).sum()) + i) % (1 << 61)
    return total


def child(tree):
    """Answer requests (row, kind): bits; (row, "open"), "time" and "close": us of a forward."""
    import torch

    import gdn

    assert Path(gdn.__file__).is_relative_to(tree), gdn.__file__
    graph = run = None

    def answer(row, kind):
        # a graph reads the tensors that its call holds
        nonlocal graph, run
        if kind == "time":
            times = []
            for _ in range(0 if DRY else 9):
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record()
                graph.replay()
                b.record()
                torch.cuda.synchronize()
                times.append(a.elapsed_time(b) * 250)
            return statistics.median(times) if times else 1.0
        if kind == "close":
            graph = run = None
            return None
        if kind == "open":
            run, _ = calls_of(row, "forward")
            for _ in range(3):
                run()
            if not DRY:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(4):
                        run()
            return None
        _, result = calls_of(row, kind)
        one = [sum_bits(x) for x in result() if x is not None]
        two = [sum_bits(x) for x in result() if x is not None]
        return [one, one == two]

    for line in sys.stdin:
        try:
            reply = answer(*json.loads(line))
        except Exception as error:  # one row's failure leaves the others
            reply = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(reply), flush=True)
        if not DRY and graph is None:
            torch.cuda.empty_cache()


def start(tree, *arguments, **options):
    """Start this script as a process of a tree."""
    folders = [f"{tree}/src", f"{tree}/benchmarks", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, __file__, "--child", str(tree), *arguments]
    return subprocess.Popen(command, env=environment, text=True, **options)


class Tree:
    def __init__(self, tree):
        self.process = start(tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, row, kind):
        self.process.stdin.write(json.dumps([row, kind]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "the process died"}


def compare_bits(trees):
    """Compare the bits of all kinds and rows; return the lines of those that differ or fail."""
    faults = []
    for kind, rows in KINDS.items():
        for row in rows:
            a, b = (tree.ask(row, kind) for tree in trees)
            failed = [x["error"] for x in (a, b) if isinstance(x, dict)]
            if failed:
                faults.append(f"{kind}, {row}: FAILED {failed}")
            elif a[0] != b[0]:
                others = [n for n, (x, y) in enumerate(zip(a[0], b[0], strict=True)) if x != y]
                faults.append(f"{kind}, {row}: OTHER BITS of results {others} of {len(a[0])}")
            elif not (a[1] and b[1]):
                faults.append(f"{kind}, {row}: RERUN has other bits, before {a[1]}, after {b[1]}")
    return faults


def main(before, after, rounds):
    """Compile, compare bits, measure, and print the table."""
    began, paths = time.time(), [Path(before).resolve(), Path(after).resolve()]
    compiles = [
        start(tree, kind, stdout=subprocess.DEVNULL) for tree in paths for kind in KINDS.keys() - SHARED
    ]
    for process in compiles:
        process.wait()
    print(f"[{time.time() - began:3.0f} s] compiled", flush=True)
    trees = [Tree(tree) for tree in paths]
    faults = compare_bits(trees)
    print(f"[{time.time() - began:3.0f} s] bits compared", flush=True)
    lines = []
    for row in TIMED:
        failed = [x["error"] for x in (tree.ask(row, "open") for tree in trees) if x is not None]
        times = ([], [])
        for i in range(0 if failed else rounds):
            for n in (0, 1) if i % 2 == 0 else (1, 0):
                times[n].append(trees[n].ask(row, "time"))
        for tree in trees:
            tree.ask(row, "close")
        if failed:
            lines.append(f"{row:18s} FAILED {failed}")
            continue
        a, b = (min(x) for x in times)
        ratios = sorted(y / x for x, y in zip(*times, strict=True))
        lines.append(f"{row:18s} {a:9.1f} {b:9.1f} {b / a:7.4f}   {ratios[0]:.4f} to {ratios[-1]:.4f}")
    for tree in trees:
        tree.process.kill()
    count = sum(map(len, KINDS.values()))
    took = time.time() - began
    print(f"\n[{took:3.0f} s] {count - len(faults)} of {count} calls have equal bits", *faults, sep="\n")
    print(f"\n{'':18s} before us  after us   ratio   of single rounds", *lines, sep="\n")


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        if len(sys.argv) > 3:
            for name in KINDS[sys.argv[3]]:
                if name in COMPILED:
                    calls_of(name, sys.argv[3])[0]()
        else:
            child(sys.argv[2])
    else:
        given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
        here = Path(__file__).parents[2]
        main(given["--before"], given.get("--after", here), int(given.get("--rounds", 6)))
