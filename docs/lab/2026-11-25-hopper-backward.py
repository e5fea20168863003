"""Check and time the Gluon backward on an sm_90 GPU, beside Triton's.

    PYTHONPATH=src:tests python docs/lab/2026-11-25-hopper-backward.py            checks, then times
    PYTHONPATH=src:tests python docs/lab/2026-11-25-hopper-backward.py --check    only the checks
    PYTHONPATH=src:tests python docs/lab/2026-11-25-hopper-backward.py --one NAME one line, in this process

Each line runs in a process of its own with a limit of 150 s, so that a kernel that hangs costs one line.
check: relative RMS error in 1e-3, ours / Triton's, against autograd through the reference in fp64;
`bits`: reruns with other bits, of 20. time: us of each launch by CUDA-graph replays (median of 5 of 20),
L2 warm.
"""

import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import torch

from gdn.backends.hopper import rule
from gdn.backends.hopper.backward import plan
from gdn.backends.triton.launch import PlanCache, allocate
from gdn.backends.triton.rule import describe as rules
from gdn.backends.triton.rule import run as chunked
from gdn.problem import parse
from gdn.testing import Case, accuracy, inputs, packed, rows

BASE = Case(sizes=(128, 128), heads=(1, 2), state="wide")
CHECKS = {
    "one chunk": replace(BASE, lengths=rows(64)),
    "ragged": replace(BASE, lengths=rows(129)),
    "no decay": replace(BASE, lengths=rows(512), gate="none", heads=(2, 4)),
    "mild": replace(BASE, lengths=rows(512), heads=(2, 4)),
    "strong": replace(BASE, lengths=rows(512), gate="strong", heads=(2, 2)),
    "packed": replace(BASE, lengths=packed(70, 0, 33, 128, 300, tail=29), keys="correlated"),
    "options": replace(
        BASE,
        lengths=packed(65, 1, 130),
        use_qk_l2norm_in_kernel=True,
        raw_gate="on",
        beta="negative",
        state="narrow",
        state_v_first=True,
        is_strided=True,
        is_scaled=True,
    ),
    "absent": replace(BASE, lengths=rows(129), gate="absent", beta="absent", heads=(1, 4)),
    "identical": replace(BASE, lengths=rows(129), heads=(1, 4), keys="identical", gate="none"),
    "many": replace(BASE, lengths=rows(450), heads=(16, 32), state="none"),
}
TIMES = {  # heads, sequences x tokens
    "16/32 1x8192": ((16, 32), 1, 8192),
    "16/32 8x4096": ((16, 32), 8, 4096),
    "16/32 1x32768": ((16, 32), 1, 32768),
    "16/16 8x4096": ((16, 16), 8, 4096),
    "16/64 4x8192": ((16, 64), 4, 8192),
    "4/8 1x8192": ((4, 8), 1, 8192),
    "2/8 8x4096": ((2, 8), 8, 4096),
    "2/8 1x32768": ((2, 8), 1, 32768),
    "16/32 64x128": ((16, 32), 64, 128),
    "16/32 8x1024": ((16, 32), 8, 1024),
}
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def error(x, y):
    return ((x.double() - y).norm() / y.norm().clamp(min=1e-30)).item() * 1e3


def ours(problem, saved, do, dfinal, has_scan=True):
    plan.HAS_SCAN = has_scan
    assert plan.lacks(problem, saved) is None, plan.lacks(problem, saved)
    return plan.chunk_backward(problem, saved, do, dfinal)


def reference(given):
    wide = given.double()
    leaves = {n: wide.tensors[n].requires_grad_() for n in NAMES if n in wide.tensors}
    o, final = accuracy.reference_rule(**(dict.fromkeys(("g", "beta")) | wide.tensors), **wide.options)
    found = torch.autograd.grad(
        [o, final], list(leaves.values()), [wide.do, wide.dfinal_state], allow_unused=True
    )
    by_name = dict(zip(leaves, found, strict=True))
    return [by_name.get(n) for n in NAMES]


def check(name):
    case = CHECKS[name]
    given = inputs(case, torch.bfloat16, device="cuda")
    problem = parse(**given.tensors, **given.options, backend="hopper")
    saved = rule.chunk_forward(problem, True)[2]
    expected = reference(given)
    triton = chunked.chunk_backward(problem, saved, given.do, given.dfinal_state)
    for has_scan in (False, True):
        for consumers in (1, 2) if has_scan else (2,):
            plan.consumers_of = lambda p, n=consumers: n
            plan._plans = PlanCache()
            here = ours(problem, saved, given.do, given.dfinal_state, has_scan)
            torch.cuda.synchronize()
            other = 0
            for _ in range(20):
                again = ours(problem, saved, given.do, given.dfinal_state, has_scan)
                other += any(
                    x is not None and not torch.equal(x, y) for x, y in zip(here, again, strict=True)
                )
            cells, bad = [], ""
            for n, x, y, z in zip(NAMES, here, triton, expected, strict=True):
                if x is None:
                    continue
                z = torch.zeros_like(x).double() if z is None else z
                a, b = error(x, z), error(y, z)
                worse = not (a < max(1.6 * b, 8.0 if n in ("q", "k", "v", "initial_state") else 6.0))
                bad += f" BAD:{n}" if worse else ""
                cells.append(f"{n} {a:.2f}/{b:.2f}")
            what = f"scan, {consumers} consumer" if has_scan else "Triton's state pass"
            print(f"{name:10s} {what:20s} bits {other} | {' '.join(cells)}{bad}", flush=True)


def timed(run, reps=20):
    for _ in range(3):
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
    (H, HV), B, T = TIMES[name]
    gen = torch.Generator("cuda").manual_seed(0)

    def rn(*shape):
        return torch.randn(*shape, generator=gen, device="cuda")

    q, k = (torch.nn.functional.normalize(rn(B, T, H, 128), dim=-1).bfloat16() for _ in range(2))
    v, do = rn(B, T, HV, 128).bfloat16(), rn(B, T, HV, 128).bfloat16()
    g, beta = torch.nn.functional.logsigmoid(rn(B, T, HV)) / 16, rn(B, T, HV).sigmoid()
    problem = parse(q=q, k=k, v=v, g=g, beta=beta, backend="hopper")
    saved = rule.chunk_forward(problem, True)[2]
    p = rules.to_kernel_layout(problem)
    triton = chunked.chunk_backward(problem, saved, do, None)
    here = ours(problem, saved, do, None)
    torch.cuda.synchronize()
    apart = " ".join(
        f"{n} {error(x, y.double()):.2f}"
        for n, x, y in zip(["dq", "dk", "dv", "dg", "dbeta"], here, triton, strict=False)
    )
    line = {}
    # launches one by one
    base = chunked.backward_plan(p, saved, do, None)
    new, late = allocate(p.device, base.specs), allocate(p.device, base.late)
    given = (*rules.tensors_of(p), *saved, do, None)
    for launch, tensors in [*base.steps([*given, *new])]:
        launch(*tensors)
        line["T " + launch.kernel.__name__.replace("_kernel", "")] = timed(partial(launch, *tensors))
    for launch, tensors in [*base.late_steps([*given, *new[:-2], *late])]:
        launch(*tensors)
        key = "T " + launch.kernel.__name__.replace("_kernel", "")
        line[key] = line.get(key, 0.0) + timed(partial(launch, *tensors))
    mine = plan.plan_of(p, saved, do, None)
    new2, late2 = allocate(p.device, mine.specs), allocate(p.device, mine.late)
    for launch, tensors in [*mine.steps(p, saved, do, None, new2, late2)]:
        launch(*tensors)
        line[launch.kernel.__name__.replace("_kernel", "")] = timed(partial(launch, *tensors))
    whole_t = timed(lambda: chunked.chunk_backward(problem, saved, do, None), 5)
    whole_h = timed(lambda: ours(problem, saved, do, None), 5)
    forward = timed(lambda: rule.chunk_forward(problem, True), 5)
    print(
        f"{name:15s} backward Triton {whole_t:8.1f}  Gluon {whole_h:8.1f}  ratio {whole_t / whole_h:.2f}"
        f"  forward {forward:.1f}  step {forward + whole_h:.1f}",
        flush=True,
    )
    print(" " * 15, "  ".join(f"{n} {t:.1f}" for n, t in line.items()))
    print(" " * 15, "from Triton's, 1e-3:", apart, flush=True)


if __name__ == "__main__":
    if "--one" in sys.argv:
        name = sys.argv[sys.argv.index("--one") + 1]
        (check if name in CHECKS else measure)(name)
        sys.exit()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for name in [*CHECKS, *(() if "--check" in sys.argv else TIMES)]:
        began = time.time()
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--one", name], timeout=150, capture_output=True, text=True
            )
            print(done.stdout, end="")
            if done.returncode:
                print(f"{name}: FAILED", done.stderr[-1500:])
        except subprocess.TimeoutExpired as e:
            print(f"{name}: HUNG after {time.time() - began:.0f} s", (e.stdout or b"")[-500:])
        sys.stdout.flush()
