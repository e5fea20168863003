"""Time training steps with a decay per key channel of several trees in turn, on one GPU.

    python docs/lab/2026-11-27-channel-rows-instructions.py [--rows NAME,...] [--rounds N] TREE [TREE ...]

TREE: a checkout, or CHECKOUT+PATCH[+PATCH...] (its src is copied and the patches applied by `git apply`).
Each tree has one child process, which lives for the whole run; the children compile at the same time, and
then measure one at a time, in turn, N rounds a row. A line per row and tree: us of all kernels of a step
(torch.profiler, medians of the rounds), us of the kernels of the backward by name, ratio to the first tree,
a checksum of each gradient (sum of its fp64 values, and a hash of its bits, so equal hashes are equal
bits), and the relative RMS distance of each gradient from the first tree's. DRY=1: on a CPU, tiny, eager,
without a profiler.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS = {
    "32 heads 1x8192": (32, 1, 8192, None),
    "16 heads 8x2048": (16, 8, 2048, None),
    "64 heads 4x4096": (64, 4, 4096, None),
    "32 heads packed": (32, 1, 8192, [0, 128, 384, 896, 1920, 3968, 8192]),
}
NAMES = ("dq", "dk", "dv", "dg", "dbeta")
DRY = "DRY" in os.environ


def problem(row, torch, device):
    H, B, T, ends = ROWS[row]
    if DRY:
        H, T, ends = 1, 128, None if ends is None else [0, 40, 128]
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    beta = torch.rand(B, T, H, device=device)
    g = torch.randn(B, T, H, 128, device=device).sigmoid_().mul_(-5)
    cu = None if ends is None else torch.tensor(ends, device=device, dtype=torch.int64)
    return [x.requires_grad_() for x in (q, k, v, g, beta)], cu


def child(tree, shared):
    sys.path.insert(0, f"{tree}/src")
    import torch

    import gdn

    device = "cpu" if DRY else "cuda"

    def step(leaves, cu):
        o = gdn.chunk_kda(*leaves, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)[0]
        return torch.autograd.grad([o], leaves, [torch.ones_like(o)])

    def synchronize():
        if not DRY:
            torch.cuda.synchronize()

    def answer(x):
        print(json.dumps(x), flush=True)

    current = None
    for line in sys.stdin:
        command, row = json.loads(line)
        try:
            if command == "compile":
                for name in ROWS if row is None else row:
                    leaves, cu = problem(name, torch, device)
                    step(leaves, cu)
                    synchronize()
                    del leaves
                answer({"device": "cpu" if DRY else torch.cuda.get_device_name()})
            elif command == "open":
                current = problem(row, torch, device)
                grads = step(*current)
                synchronize()
                found = {}
                for i, x in enumerate(grads):
                    bits = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).long()
                    places = torch.arange(bits.numel(), device=device) % 8191 + 1
                    found[NAMES[i]] = [
                        float(x.double().sum()),
                        int((bits.flatten() * places).sum()),
                        bool(x.isfinite().all()),
                    ]
                    # a sample, for distances between trees
                    torch.save(x.flatten()[:: max(1, x.numel() // 2**21)].cpu(), f"{shared}/{NAMES[i]}")
                del grads
                again = step(*current)
                synchronize()
                answer(found)
                del again
            elif command == "time":
                if DRY:
                    answer({"kernel": 1.0})
                    continue
                from torch.profiler import ProfilerActivity, profile

                step(*current)
                synchronize()
                with profile(activities=[ProfilerActivity.CUDA]) as p:
                    for _ in range(5):
                        step(*current)
                    synchronize()
                us = {}
                for e in p.key_averages():
                    total = getattr(e, "self_device_time_total", 0) or getattr(e, "self_cuda_time_total", 0)
                    if total:
                        us[e.key] = us.get(e.key, 0) + total / 5
                answer(us)
            elif command == "close":
                current = None
                if not DRY:
                    torch.cuda.empty_cache()
                answer({})
        except Exception as e:  # one tree's failure leaves the others' numbers
            answer({"failed": f"{type(e).__name__}: {str(e)[-400:]}"})


class Tree:
    def __init__(self, argument, folder, number):
        base, *patches = argument.split("+")
        self.name = "+".join([Path(base).name or base, *(Path(p).stem for p in patches)])
        self.shared = Path(folder) / f"grads{number}"
        self.shared.mkdir()
        self.path = Path(base).resolve()
        if patches:
            self.path = Path(folder) / f"tree{number}"
            shutil.copytree(Path(base) / "src", self.path / "src")
            for patch in patches:
                include = ["git", "apply", "--include=src/*", str(Path(patch).resolve())]
                subprocess.run(include, cwd=self.path, check=True)
        env = os.environ | {"PYTHONPATH": f"{self.path}/src", "TRITON_CACHE_DIR": f"{folder}/cache{number}"}
        command = [sys.executable, __file__, "--child", str(self.path), str(self.shared)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def send(self, command, row=None):
        self.process.stdin.write(json.dumps([command, row]) + "\n")
        self.process.stdin.flush()

    def receive(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failed": "the process died"}

    def ask(self, command, row=None):
        self.send(command, row)
        return self.receive()


def distance(first, other):
    import torch

    found = []
    for name in NAMES:
        x, y = (torch.load(t.shared / name).double() for t in (first, other))
        found.append(f"{name} {float((x - y).norm() / x.norm().clamp(min=1e-300)):.1e}")
    return ", ".join(found)


def main():
    arguments, wanted, rounds = sys.argv[1:], list(ROWS), 3
    while arguments and arguments[0].startswith("--"):
        if arguments[0] == "--rows":
            wanted = arguments[1].split(",")
        else:
            rounds = int(arguments[1])
        arguments = arguments[2:]
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        trees = [Tree(a, folder, i) for i, a in enumerate(arguments)]
        for t in trees:
            t.send("compile", wanted)
        for t in trees:
            print(f"[{time.time() - began:3.0f}] {t.name}", t.receive(), flush=True)
        for row in wanted:
            sums = {t: t.ask("open", row) for t in trees}
            times = {t: [] for t in trees}
            for i in range(rounds):
                for t in trees if i % 2 == 0 else reversed(trees):
                    times[t].append(t.ask("time"))
            for t in trees:
                t.ask("close")
            print(f"[{time.time() - began:3.0f}] {row}", flush=True)
            base = None
            for t in trees:
                if "failed" in sums[t] or any("failed" in x for x in times[t]):
                    print("  ", t.name, sums[t].get("failed") or times[t], flush=True)
                    continue
                total = statistics.median(sum(x.values()) for x in times[t])
                base = base or total
                kernels = {k: statistics.median(x.get(k, 0.0) for x in times[t]) for k in times[t][0]}
                top = sorted(kernels.items(), key=lambda x: -x[1])[:9]
                spread = ", ".join(f"{sum(x.values()):.0f}" for x in times[t])
                print(f"  {t.name}: {total:.0f} us, {total / base:.3f} of the first (rounds {spread})")
                print("    ", ", ".join(f"{k.split('(')[0][:34]} {us:.0f}" for k, us in top))
                print(
                    "    ",
                    " ".join(
                        f"{n} {s:.9e} {h}{'' if ok else ' NOT FINITE'}" for n, (s, h, ok) in sums[t].items()
                    ),
                )
                if t is not trees[0]:
                    print("     distance:", distance(trees[0], t), flush=True)
        for t in trees:
            t.process.stdin.close()
            t.process.wait()
    print(f"[{time.time() - began:3.0f}] done")


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(*sys.argv[2:])
    else:
        main()
