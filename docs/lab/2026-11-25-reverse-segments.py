"""Check and time the reverse state scan in segments on an sm_90 GPU, beside the scan without segments.

It runs at commit d784b61, which also had the gradient kernel beside the scan.

    PYTHONPATH=src:tests python docs/lab/2026-11-25-reverse-segments.py

check: relative RMS error in 1e-3, in segments / without / Triton's, against autograd through the reference in
fp64; `bits`: reruns with other bits, of 20. long: relative RMS difference in 1e-3 from the backward without
segments. beside: reruns of the gradient kernel beside the scan, of 200, with other bits than after it, and
replays of a CUDA graph, of 20. time: us of each launch by CUDA-graph replays, median of 5. Each case has a
process of its own with a limit; checks run at the same time.
"""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import torch

from gdn.backends.hopper.backward import plan
from gdn.backends.hopper.backward.cost import Segmentation, items_beside, segmentation_of
from gdn.backends.hopper.cost import Cut
from gdn.backends.triton.launch import PlanCache, allocate
from gdn.backends.triton.rule import describe as rules
from gdn.backends.triton.rule import run as chunked
from gdn.problem import parse
from gdn.testing import Case, accuracy, inputs, packed, rows

BASE = Case(sizes=(128, 128), heads=(1, 2), state="wide")
CHECKS = {
    "dense": replace(BASE, lengths=rows(129)._replace(T=450)),
    "no decay": replace(BASE, lengths=packed(300, 0, 33, 256, 400, tail=29), gate="none"),
    "V first": replace(
        BASE,
        lengths=packed(385, 0, 130, 1),
        state="narrow",
        state_v_first=True,
        keys="correlated",
        use_qk_l2norm_in_kernel=True,
    ),
    "no state": replace(BASE, lengths=packed(400, 64, 0), state="none", gate="slow"),
    "strong": replace(BASE, lengths=rows(450), gate="strong", state_v_first=True),
    "gone": replace(BASE, lengths=packed(450, 0, 200), gate="reset"),
    "identical": replace(BASE, lengths=rows(450), keys="identical", gate="none", heads=(1, 1)),
}
LONG = {
    "long": replace(BASE, heads=(4, 8), lengths=rows(16384), gate="slow"),
    "long, packed": replace(
        BASE, heads=(4, 8), lengths=packed(9000, 0, 70, 5000, tail=30), gate="none", state_v_first=True
    ),
    "long, mixed": replace(BASE, heads=(4, 8), lengths=rows(16383), gate="mixed", state="none"),
}
CUTS = (Segmentation(Cut(2, 9, 2), 1, 2), Segmentation(Cut(3, 1, 1), 2, 1))
BESIDE = {
    "beside": replace(BASE, heads=(4, 8), lengths=rows(1000)._replace(B=1)),
    "beside 16/32": replace(BASE, heads=(16, 32), lengths=rows(4096)._replace(B=1), gate="slow"),
}
TIMES = {  # heads, sequences x tokens, chunks of equal segments to try
    "16/32 1x8192": ((16, 32), 1, 8192, (32, 43)),
    "16/32 1x32768": ((16, 32), 1, 32768, (128, 172)),
    "2/8 1x32768": ((2, 8), 1, 32768, (32, 64, 86)),
    "4/8 1x8192": ((4, 8), 1, 8192, (8, 16, 22)),
}
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def error(x, y):
    return ((x.double() - y).norm() / y.norm().clamp(min=1e-30)).item() * 1e3


def reference(given):
    wide = given.double()
    leaves = {n: wide.tensors[n].requires_grad_() for n in NAMES if n in wide.tensors}
    o, final = accuracy.reference_rule(**(dict.fromkeys(("g", "beta")) | wide.tensors), **wide.options)
    found = torch.autograd.grad(
        [o, final], list(leaves.values()), [wide.do, wide.dfinal_state], allow_unused=True
    )
    by_name = dict(zip(leaves, found, strict=True))
    return [by_name.get(n) for n in NAMES]


def backward(given, saved, problem, segmentation):
    consumers = segmentation.consumers if segmentation else plan.consumers_of(problem)
    plan.schedule_of = lambda p: (consumers, segmentation, 0)
    plan._plans = PlanCache()

    def run():
        return plan.chunk_backward(problem, saved, given.do, given.dfinal_state)

    first, other = run(), 0
    torch.cuda.synchronize()
    for _ in range(20):
        other += any(x is not None and not torch.equal(x, y) for x, y in zip(run(), first, strict=True))
    return first, other


def check(name):
    given = inputs((CHECKS | LONG)[name], torch.bfloat16, device="cuda")
    problem = parse(**given.tensors, **given.options, backend="hopper")
    saved = chunked.chunk_forward(problem, True)[2]
    assert plan.lacks(problem, saved) is None
    whole, _ = backward(given, saved, problem, None)
    if name in LONG:
        chosen = segmentation_of(problem)
        cut, other = backward(given, saved, problem, chosen)
        cells = [
            f"{n} {error(x, y.double()):.2f}"
            for n, x, y in zip(NAMES, cut, whole, strict=True)
            if x is not None
        ]
        print(f"{name:12s} {chosen and (*chosen.cut, *chosen[1:])} bits {other} | {' '.join(cells)}")
        return
    triton = chunked.chunk_backward(problem, saved, given.do, given.dfinal_state)
    expected = reference(given)
    for segmentation in CUTS:
        cut, other = backward(given, saved, problem, segmentation)
        cells, bad = [], ""
        for n, x, y, t, z in zip(NAMES, cut, whole, triton, expected, strict=True):
            if x is None or z is None:
                continue
            errors = [error(each, z) for each in (x, y, t)]
            if not errors[0] < max(1.2 * errors[1], 1.0):
                bad += f" BAD:{n}"
            cells.append(n + " " + "/".join(f"{e:.2f}" for e in errors))
        print(f"{name:12s} {segmentation.cut.long} chunks, bits {other} | {' '.join(cells)}{bad}")


def check_beside(name):
    given = inputs(BESIDE[name], torch.bfloat16, device="cuda")
    problem = parse(**given.tensors, **given.options, backend="hopper")
    saved = chunked.chunk_forward(problem, True)[2]
    whole, other = backward(given, saved, problem, None)
    cells = []
    chosen = items_beside(problem, plan.consumers_of(problem))
    for items in (chosen, 7, problem.num_chunks * problem.H):
        plan.schedule_of = lambda p, items=items: (plan.consumers_of(p), None, items)
        plan._plans = PlanCache()

        def run():
            return plan.chunk_backward(problem, saved, given.do, given.dfinal_state)

        bad = 0
        for _ in range(200):
            bad += any(x is not None and not torch.equal(x, y) for x, y in zip(run(), whole, strict=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [run() for _ in range(3)]
        replays = 0
        for _ in range(20):
            for x in found[-1]:
                if x is not None:
                    x.zero_()
            graph.replay()
            torch.cuda.synchronize()
            for one in found[-1:]:
                replays += any(
                    x is not None and not torch.equal(x, y) for x, y in zip(one, whole, strict=True)
                )
        cells.append(f"{items} items {bad}, {replays}")
    print(f"{name:12s} after the scan {other} | {' | '.join(cells)}")


def timed(run, reps=4):
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(reps):
            run()
    times = []
    for _ in range(5):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / reps)
    return sorted(times)[2]


def measure(name):
    (H, HV), B, T, sizes = TIMES[name]

    def rn(*shape):
        return torch.randn(*shape, device="cuda")

    q, k = (torch.nn.functional.normalize(rn(B, T, H, 128), dim=-1).bfloat16() for _ in range(2))
    v, do = rn(B, T, HV, 128).bfloat16(), rn(B, T, HV, 128).bfloat16()
    g, beta = torch.nn.functional.logsigmoid(rn(B, T, HV)) / 16, rn(B, T, HV).sigmoid()
    problem = parse(q=q, k=k, v=v, g=g, beta=beta, backend="hopper")
    saved = chunked.chunk_forward(problem, True)[2]
    p = rules.to_kernel_layout(problem)
    chosen = segmentation_of(p)
    at_once = items_beside(p, plan.consumers_of(p))
    tried = [None, *(at_once * n // 8 for n in (6, 7, 8, 9, 10)), *([chosen] if chosen else [])]
    for size in sizes:
        cut = Cut(size, 1 << 16, size)
        tried += [Segmentation(cut, a, b) for a, b in ((1, 1), (1, 2), (2, 2))]
    for segmentation in tried:
        if isinstance(segmentation, Segmentation):
            made = plan._plan(p, None, segmentation.consumers, segmentation)
        if segmentation is None or isinstance(segmentation, int):
            most = p.num_chunks * p.H
            made = plan._plan(p, None, plan.consumers_of(p), None, min(segmentation or 0, most))
        new, late = allocate(p.device, made.specs), allocate(p.device, made.late)
        steps = [*made.steps(p, saved, do, None, new, late)]
        cells = {}
        for launch, tensors in steps:
            launch(*tensors)
            if isinstance(segmentation, int):
                continue  # the gradient kernel waits for flags: only all together
            cells[launch.kernel.__name__.replace("_kernel", "")] = timed(partial(launch, *tensors))

        def run(steps=steps):
            for launch, tensors in steps:
                launch(*tensors)

        total = timed(run)
        if isinstance(segmentation, int):
            print(f"{name:14s} beside {segmentation:6d} items {'':22s} backward {total:7.1f}", flush=True)
            continue
        rest = cells["gradients"] + cells["gates_bwd"] + cells["backward_factors"]
        for kernel in ("gradients", "gates_bwd", "backward_factors"):
            del cells[kernel]
        label = (*segmentation.cut, *segmentation[1:]) if segmentation else "whole"
        print(
            f"{name:14s} {label!s:28s}{' chosen' if segmentation == chosen and chosen else '':7s}"
            f" backward {total:7.1f} scan and its launches {total - rest:7.1f} | "
            + " ".join(f"{n} {t:.1f}" for n, t in cells.items()),
            flush=True,
        )


if __name__ == "__main__":
    if "--one" in sys.argv:
        name = sys.argv[sys.argv.index("--one") + 1]
        (check if name in CHECKS | LONG else check_beside if name in BESIDE else measure)(name)
        sys.exit()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for group in ([*CHECKS, *LONG], [*BESIDE], *([name] for name in TIMES)):
        running = {
            name: subprocess.Popen(
                [sys.executable, __file__, "--one", name],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name in group
        }
        for name, process in running.items():
            try:
                out, errors = process.communicate(timeout=60)
                print(out, end="")
                if process.returncode:
                    print(f"{name}: FAILED", errors[-800:])
            except subprocess.TimeoutExpired:
                process.kill()
                print(f"{name}: HUNG", process.communicate()[0])
            sys.stdout.flush()
