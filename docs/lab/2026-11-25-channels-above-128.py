"""Check and time the backward with more than 128 key channels, and the exchange of a context, on one GPU.

    PYTHONPATH=src python docs/lab/2026-11-25-channels-above-128.py              checks, then times
    PYTHONPATH=src python docs/lab/2026-11-25-channels-above-128.py --one NAME   one line, in this process

Each line runs in a process of its own with a limit of 60 s. A check compares with autograd through the
reference in fp64: the largest error as a share of its limit, `BAD` above it. `tiles` times state_bwd with the
tiles of `choose` and with others, `scan` scan_kernel with 4 and 8 warps, us of one launch; `eager` a forward
with backward beside `eager`, us; `rank` N | M of a rank, us.
"""

import subprocess
import sys
from dataclasses import replace

import torch

import gdn
from gdn.backends import Borders, eager
from gdn.backends.triton.launch import allocate, machine
from gdn.backends.triton.rule import borders, choose, run
from gdn.backends.triton.rule.build import build_backward, build_forward
from gdn.backends.triton.rule.describe import describe, tensors_of
from gdn.problem import parse
from gdn.testing import Case, check, inputs, packed, rows

DEVICE = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BASE = Case("bounded", sizes=(256, 256), heads=(2, 2), is_per_channel=True, state="wide")
CHECKS = {
    "bf16": (replace(BASE, lengths=rows(513)), BF16),
    "bf16 slow": (replace(BASE, gate="slow", lengths=rows(513), use_qk_l2norm_in_kernel=True), BF16),
    "fp16 192 packed": (replace(BASE, sizes=(192, 60), lengths=packed(70, 0, 300, 64)), FP16),
    "fp32": (replace(BASE, lengths=rows(130)), FP32),
    "fp32 many heads": (replace(BASE, heads=(64, 64), lengths=rows(65)), FP32),
    "bf16 many heads": (replace(BASE, heads=(80, 80), lengths=rows(130)), BF16),
}
LARGE = replace(BASE, gate="slow", heads=(16, 16), lengths=rows(2048)._replace(B=1))
# warps and stages of state_bwd
OTHERS = ((4, 2), (8, 2), (8, 1), (4, 1))


def check_one(name):
    case, dtype = CHECKS[name]
    verdicts = check(
        lambda *x, **o: gdn.chunk_kda(*x, backend="triton", **o), case, dtype, device=DEVICE, budget=2**24
    )
    worst = max(verdicts, key=lambda v: v.error / v.limit)
    bad = [f"{v.output} {v.error:.1e}" for v in verdicts if not v.ok]
    mark = f"BAD {bad}" if bad else ""
    print(f"{name:16s} worst {worst.output} {worst.error / worst.limit:.2f} of its limit {mark}")


def timed(call, reps=5):
    for _ in range(2):
        call()
    times = []
    for _ in range(5):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(reps):
            call()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / reps)
    return sorted(times)[2]


def problem_of(backend):
    given = inputs(LARGE, BF16, device=DEVICE)
    return given, parse(**given.tensors, **given.options, backend=backend)


def tiles():
    given, p = problem_of("triton")
    saved = run.chunk_forward(p, True)[2]
    chosen = choose.backward_tiles(p, machine(p.device))
    first = None
    for warps, stages in ((chosen.num_warps, chosen.stages), *OTHERS):
        plan = build_backward(
            p, given.do, describe(p, given.do), replace(chosen, num_warps=warps, stages=stages)
        )
        new = allocate(p.device, plan.specs)
        tensors = [*tensors_of(p), *saved, given.do, None, *new]
        plan.run_pairs(tensors)
        try:
            plan.run_state(tensors)
        except Exception as e:  # too much shared memory
            print(f"tiles {warps} warps {stages} stages: {type(e).__name__}")
            continue
        dv = new[0].clone()
        first = dv if first is None else first
        error = float((dv.double() - first.double()).norm() / first.double().norm())
        us = timed(lambda plan=plan, tensors=tensors: plan.run_state(tensors))
        print(f"tiles {warps} warps {stages} stages: {us:.0f} us, dr {error:.1e} from the first line")


def scans():
    """Time scan with 4 warps, which spill 1.4 KB a thread in bf16, and with 8, which spill none."""
    _, p = problem_of("triton")
    first = None
    for warps in (4, 8):
        plan = build_forward(
            p, None, describe(p), replace(choose.fused_tiles(p, machine(p.device)), num_warps=warps)
        )
        new = allocate(p.device, plan.specs)
        tensors = [*tensors_of(p), *new]
        plan.run_prepare(tensors)
        plan.run_state(tensors)
        o = new[9].clone()
        first = o if first is None else first
        error = float((o.double() - first.double()).norm() / first.double().norm())
        us = timed(lambda plan=plan, tensors=tensors: plan.run_state(tensors))
        print(f"scan {warps} warps: {us:.0f} us, o {error:.1e} from the first line")


def beside_eager():
    for backend in ("triton", "eager"):
        given = inputs(LARGE, BF16, device=DEVICE)
        x = [given.tensors[n].requires_grad_() for n in ("q", "k", "v", "g", "beta")]

        def step(x=x, given=given, backend=backend):
            torch.autograd.grad(gdn.chunk_kda(*x, backend=backend)[0], x, given.do)

        print(f"forward and backward, {backend}: {timed(step, 2):.0f} us")


def transfers():
    for name, begin in (("triton", borders.forward_begin), ("eager", eager.BACKEND.forward_begin)):
        _, p = problem_of("triton")
        us = timed(lambda p=p, begin=begin: begin(p, Borders((0,), (0,)), False), 2)
        print(f"N | M of a rank, {name}: {us:.0f} us")


LINES = {
    **{n: lambda n=n: check_one(n) for n in CHECKS},
    "tiles": tiles,
    "scan": scans,
    "eager": beside_eager,
    "rank": transfers,
}


def main() -> None:
    if "--one" in sys.argv:
        LINES[sys.argv[-1]]()
        return
    for name in LINES:
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--one", name], timeout=60, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            print(f"{name}: more than 60 s", flush=True)
            continue
        print(
            done.stdout, "" if done.returncode == 0 else f"{name}: {done.stderr[-600:]}", end="", flush=True
        )


if __name__ == "__main__":
    main()
