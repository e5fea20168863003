"""Time the Gluon backward beside Triton's on small problems, and the cold start of both, on an sm_90 GPU.

    PYTHONPATH=src:tests python docs/lab/2026-11-25-hopper-backward-rule.py          all parts
    PYTHONPATH=src:tests python docs/lab/2026-11-25-hopper-backward-rule.py --part NAME

times: us of a backward, Triton / Gluon, by CUDA-graph replays (median of 5 of 20 backwards), and us of host
time of a backward (median of 5 of 30 calls, not waited for). cold: seconds of the first forward and backward
in a process with an empty cache of Triton. again: kernels compiled for other sizes after the first call.
Each part runs in a process of its own with a time limit, so that a kernel that hangs costs one part.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

START = time.time()
SIZES = [  # key heads, value heads, sequences, tokens
    (1, 1, 1, 64), (1, 1, 1, 512), (1, 1, 1, 4096), (1, 2, 1, 64), (2, 4, 1, 64), (2, 8, 1, 1024),
    (1, 8, 1, 64), (4, 8, 1, 256), (4, 8, 1, 1024), (4, 8, 1, 2048), (8, 16, 1, 64), (8, 16, 1, 512),
    (8, 64, 1, 1024),
    (16, 32, 1, 64), (16, 32, 1, 256), (16, 32, 1, 1024), (16, 32, 1, 2048), (16, 32, 2, 1024),
    (16, 32, 32, 64), (1, 1, 64, 64), (1, 1, 256, 64), (32, 64, 1, 512),
]  # fmt: skip
LIMITS = {"times": 55, "cold gluon": 40, "again": 35, "cold triton": 35}


def make(H, HV, B, T, **options):
    import torch

    from gdn.problem import parse

    gen = torch.Generator("cuda").manual_seed(0)

    def rn(*shape):
        return torch.randn(*shape, generator=gen, device="cuda")

    q, k = (torch.nn.functional.normalize(rn(B, T, H, 128), dim=-1).bfloat16() for _ in range(2))
    v, do = rn(B, T, HV, 128).bfloat16(), rn(B, T, HV, 128).bfloat16()
    g, beta = torch.nn.functional.logsigmoid(rn(B, T, HV)) / 16, rn(B, T, HV).sigmoid()
    return parse(q=q, k=k, v=v, g=g, beta=beta, **options), do


def replays(run, reps=20):
    import torch

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
    return statistics.median(times)


def host(run):
    import torch

    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(30):
            run()
        times.append((time.perf_counter() - began) / 30 * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def times():
    import torch

    from gdn.backends import select
    from gdn.backends.hopper import rule
    from gdn.backends.hopper.backward import plan
    from gdn.backends.triton.rule import run as chunked

    print("sizes               backward, us: Triton   Gluon  ratio   host Triton  Gluon   forward of")
    for H, HV, B, T in SIZES:
        problem, do = make(H, HV, B, T)
        name = select(problem).name
        saved = (rule if name == "hopper" else chunked).chunk_forward(problem, True)[2]
        calls = [partial(x.chunk_backward, problem, saved, do, None) for x in (chunked, plan)]
        gpu = [replays(x) for x in calls]
        cpu = [host(x) for x in calls]
        print(
            f"{H:2}/{HV:2} {B:3}x{T:<6} {'':16}{gpu[0]:9.1f}{gpu[1]:9.1f}{gpu[0] / gpu[1]:7.2f}"
            f"{cpu[0]:12.1f}{cpu[1]:9.1f}    {name}",
            flush=True,
        )
        del saved, calls
    torch.cuda.synchronize()


def cold(backend):
    import torch

    import gdn
    from gdn.backends.triton.launch.compilations import compilations

    problem, do = make(16, 32, 1, 8192)
    leaves = [x.requires_grad_() for x in (problem.q, problem.k, problem.v, problem.g, problem.beta)]
    torch.cuda.synchronize()
    marks = [time.time()]
    with compilations() as names:
        o, _ = gdn.chunk_gated_delta_rule(*leaves, backend=backend)
        torch.cuda.synchronize()
        marks.append(time.time())
        torch.autograd.grad(o, leaves, do)
        torch.cuda.synchronize()
        marks.append(time.time())
    print(
        f"cold, backend {backend}: until the first call {marks[0] - START:.1f} s, forward"
        f" {marks[1] - marks[0]:.1f} s, backward {marks[2] - marks[1]:.1f} s; {len(names)} binaries",
        flush=True,
    )


def again():
    import torch

    import gdn
    from gdn.backends.triton.launch.compilations import compilations

    def call(H, HV, B, T, is_packed):
        problem, do = make(H, HV, 1 if is_packed else B, T * B if is_packed else T)
        leaves = [x.requires_grad_() for x in (problem.q, problem.k, problem.v, problem.g, problem.beta)]
        offsets = torch.arange(0, B + 1, device="cuda") * T if is_packed else None
        o, _ = gdn.chunk_gated_delta_rule(*leaves, cu_seqlens=offsets)
        torch.autograd.grad(o, leaves, do)

    for is_packed in (False, True):
        call(16, 32, 1, 8192, is_packed)
        with compilations() as names:
            for sizes in ((1, 1, 1, 1), (3, 3, 3, 257), (4, 12, 4, 64), (16, 64, 4, 4096), (1, 3, 16, 100)):
                call(*sizes, is_packed)
        torch.cuda.synchronize()
        print("again, packed" if is_packed else "again, dense", "compiled:", names or "nothing", flush=True)


PARTS = {
    "times": times,
    "cold gluon": lambda: cold(None),
    "again": again,
    "cold triton": lambda: cold("triton"),
}

if __name__ == "__main__":
    if "--part" in sys.argv:
        PARTS[sys.argv[sys.argv.index("--part") + 1]]()
        sys.exit()
    import torch

    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for part, limit in LIMITS.items():
        with tempfile.TemporaryDirectory() as folder:
            change = {"TRITON_CACHE_DIR": folder} if part.startswith("cold") else {}
            try:
                subprocess.run(
                    [sys.executable, __file__, "--part", part], timeout=limit, env={**os.environ, **change}
                )
            except subprocess.TimeoutExpired:
                print(f"{part}: not done after {limit} s", flush=True)
