"""Check and time the backward of Hopper at K = V = 64 beside Triton's, on a GPU (sm_90).

    PYTHONPATH=src:tests python docs/lab/2026-11-25-few-keys.py           checks, then times
    PYTHONPATH=src:tests python docs/lab/2026-11-25-few-keys.py check     or times

check   errors in 1e-3 of the gradients against autograd through the reference in fp64, this backward /
        Triton's, and reruns with other bits (of 20)
times   us by CUDA-graph replays, L2 warm: both backwards and each launch of this one; the host's time of both

Each line runs in a process of its own with a time limit, so that a kernel that hangs costs one line; the
processes compile side by side, and take turns on the GPU where they measure. What is wrong comes last. If all
is right and times are below Triton's, `MEASURED_BACKWARD` in `hopper/__init__.py` may have 64.
"""

import fcntl
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0")
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
# key heads, value heads, rows, tokens
SIZES = {
    "16/32 1x8192": (16, 32, 1, 8192),
    "16/32 8x4096": (16, 32, 8, 4096),
    "2/8 1x32768": (2, 8, 1, 32768),
    "2/8 1x1024": (2, 8, 1, 1024),
}
# relative RMS error in 1e-3 of q, k, v and states, and of gates; or 1.6 times Triton's
LIMITS = {"random": (8.0, 6.0), "correlated": (20.0, 20.0), "identical": (60.0, 60.0)}


def cases():
    """Return the cases of the checks: (case, cut into segments)."""
    from gdn.testing import Case, packed, rows

    base = Case(sizes=(64, 64), heads=(1, 2), state="wide")
    more = {
        "use_qk_l2norm_in_kernel": True, "raw_gate": "on", "beta": "negative", "state": "narrow",
        "state_v_first": True, "is_strided": True, "is_scaled": True,
    }  # fmt: skip
    return {
        "one chunk": (replace(base, lengths=rows(64)), False),
        "ragged": (replace(base, lengths=rows(129)), False),
        "no decay": (replace(base, lengths=rows(512), gate="none", heads=(2, 4)), False),
        "slow": (replace(base, lengths=rows(640), gate="slow", heads=(2, 4)), False),
        "strong": (replace(base, lengths=rows(512), gate="strong", heads=(2, 2)), False),
        "packed": (replace(base, lengths=packed(70, 0, 33, 128, 300, tail=29), keys="correlated"), False),
        "options": (replace(base, lengths=packed(65, 1, 130), **more), False),
        "identical": (replace(base, lengths=rows(129), heads=(1, 4), keys="identical", gate="none"), False),
        "many": (replace(base, lengths=rows(450), heads=(16, 32), state="none"), False),
        "segments": (replace(base, lengths=packed(640, 0, 70), gate="none"), True),
        "segments, options": (replace(base, lengths=packed(450, 1, 330), **more), True),
    }


def error(x, y):
    return ((x.double() - y).norm() / y.norm().clamp(min=1e-30)).item() * 1e3


def check(name):
    """Print the errors of one case."""
    import torch

    from gdn.backends.hopper.backward import plan
    from gdn.backends.hopper.backward.cost import Segmentation
    from gdn.backends.hopper.cost import Cut
    from gdn.backends.triton.rule import run as chunked
    from gdn.problem import parse
    from gdn.testing import accuracy, inputs

    case, is_cut = cases()[name]
    given = inputs(case, torch.bfloat16, device="cuda")
    dfinal = None if case.state == "none" else given.dfinal_state
    problem = parse(**given.tensors, **given.options, backend="triton")
    saved = chunked.chunk_forward(problem, True)[2]
    if is_cut:
        plan.schedule_of = lambda p: (1, Segmentation(Cut(2, 9, 1), 1, 1))
    here = plan.chunk_backward(problem, saved, given.do, dfinal)
    triton = chunked.chunk_backward(problem, saved, given.do, dfinal)
    wide = given.double()
    leaves = {n: wide.tensors[n].requires_grad_() for n in NAMES if n in wide.tensors}
    outputs = accuracy.reference_rule(**(dict.fromkeys(("g", "beta")) | wide.tensors), **wide.options)
    ends = [(x, y.double()) for x, y in zip(outputs, (given.do, dfinal), strict=True) if y is not None]
    values, gradients = zip(*ends, strict=True)
    expected = dict(
        zip(
            leaves,
            torch.autograd.grad(values, list(leaves.values()), gradients, allow_unused=True),
            strict=True,
        )
    )
    cells, bad = [], []
    for label, leaf, x, y in zip(GRADIENTS, NAMES, here, triton, strict=True):
        z = expected.get(leaf)
        if x is None or z is None or z.norm() == 0:
            continue
        mine, other = error(x, z), error(y, z)
        cells.append(f"{label} {mine:.2f}/{other:.2f}")
        limit = LIMITS[case.keys][label in ("dg", "dbeta", "dA_log", "ddt_bias")]
        if not mine < max(limit, 1.6 * other):
            bad.append(label)
    changed = 0
    for _ in range(20):
        again = plan.chunk_backward(problem, saved, given.do, dfinal)
        changed += any(x is not None and not torch.equal(x, y) for x, y in zip(again, here, strict=True))
    mark = f" BAD {' '.join(bad)}" if bad else ""
    mark += f" OTHER BITS in {changed} of 20" if changed else ""
    print(f"{name:18s} {' '.join(cells)}{mark}", flush=True)


def timed(run, reps):
    """Return us of a call, the median over replays of a CUDA graph of `reps` calls."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(reps):
            run()
    graph.replay()
    rounds = []
    for _ in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        rounds.append(start.elapsed_time(stop) / reps * 1e3)
    return statistics.median(rounds)


def host_time(run):
    """Return us that the host takes to launch a call."""
    import torch

    rounds = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        rounds.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(rounds)


def times(name, lock):
    """Print us of both backwards at one size, and of each launch of this one."""
    import torch
    import torch.nn.functional as F

    from gdn.backends.hopper import rule
    from gdn.backends.hopper.backward import plan
    from gdn.backends.triton.launch import allocate
    from gdn.backends.triton.rule import describe as rules
    from gdn.backends.triton.rule import run as chunked
    from gdn.problem import parse

    H, HV, B, T = SIZES[name]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k = (F.normalize(draw(B, T, H, 64), dim=-1).bfloat16() for _ in range(2))
    v, do = draw(B, T, HV, 64).bfloat16(), draw(B, T, HV, 64).bfloat16()
    g, beta = F.logsigmoid(draw(B, T, HV)) / 16, draw(B, T, HV).sigmoid()
    problem = parse(q=q, k=k, v=v, g=g, beta=beta, backend="hopper")
    saved = rule.chunk_forward(problem, True)[2]

    def here():
        return plan.chunk_backward(problem, saved, do, None)

    def triton():
        return chunked.chunk_backward(problem, saved, do, None)

    here(), triton()
    torch.cuda.synchronize()
    reps = 4 if B * T > 16384 else 10
    with open(lock, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        forward = timed(lambda: rule.chunk_forward(problem, True), reps)
        us = [timed(run, reps) for run in (here, triton)]
        host = [host_time(run) for run in (here, triton)]
        p = rules.to_kernel_layout(problem)
        made = plan.plan_of(p, saved, do, None)
        new, late = allocate(p.device, made.specs), allocate(p.device, made.late)
        cells = []
        for launch, tensors in list(made.steps(p, saved, do, None, new, late)):
            launch(*tensors)
            each = timed(lambda: launch(*tensors), reps)  # noqa: B023
            cells.append(f"{launch.kernel.__name__.removesuffix('_kernel')} {each:.1f}")
        cut = "whole" if made.segments is None else f"segments, {made.segments.num_items} items"
        print(
            f"{name:14s} forward {forward:8.1f}  backward {us[0]:8.1f}  Triton's {us[1]:8.1f}"
            f"  ratio {us[1] / us[0]:.2f}  host {host[0]:.0f} and {host[1]:.0f}  {cut}\n"
            f"{'':14s} {', '.join(cells)}",
            flush=True,
        )


PARTS = {"check": check, "times": times}


def main(parts):
    """Run each line in a process of its own."""
    import torch

    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(8) as pool:
        lock = f"{folder}/lock"
        Path(lock).touch()

        paths = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))

        def run(arguments):
            try:
                done = subprocess.run(
                    [sys.executable, __file__, "--one", *arguments], timeout=90, capture_output=True,
                    text=True, env=os.environ | {"PYTHONPATH": paths},
                )  # fmt: skip
            except subprocess.TimeoutExpired as e:
                return f"{arguments} HUNG {(e.stdout or b'')[-300:]!r}\n"
            return done.stdout + (f"{arguments} FAILED {done.stderr[-1200:]}\n" if done.returncode else "")

        wrong = []
        for part in parts:
            jobs = [("check", n) for n in cases()] if part == "check" else [("times", n, lock) for n in SIZES]
            for text in pool.map(run, jobs):
                print(text, end="", flush=True)
                wrong += [
                    x for x in text.splitlines() if any(y in x for y in ("BAD", "HUNG", "FAILED", "OTHER"))
                ]
        print("\nwrong:", *(wrong or ["nothing"]), sep="\n  ", flush=True)


if __name__ == "__main__":
    if "--one" in sys.argv:
        part, *arguments = sys.argv[sys.argv.index("--one") + 1 :]
        PARTS[part](*arguments)
    else:
        main(sys.argv[1:] or list(PARTS))
