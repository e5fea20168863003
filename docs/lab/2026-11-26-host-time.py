"""Time the host in training steps on hopper, for several trees in turn, and compare their bits (sm_90).

    python docs/lab/2026-11-26-host-time.py before=../before/src after=src [--profile]

Prints for each tree, in us a call at 16/32 heads 1x512: until the host has issued the work, until the GPU has
ended it, and the least of the first; the GPU alone, by a CUDA graph; with --profile, cProfile's rows of a
step of 24 calls on the caller's thread, and each launch by itself.

Each tree is a process, so that the trees take turns on one machine.
"""

import cProfile
import hashlib
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
import timeit

FORMS = {
    "24 calls, caller's thread": (24, True, {}, False),
    "24 calls, autograd's thread": (24, True, {}, True),
    "24 calls, recompute": (24, True, {"recompute": True}, False),
    "24 forwards": (24, False, {}, False),
    "one call, caller's thread": (1, True, {}, False),
    "one call, autograd's thread": (1, True, {}, True),
    "one forward": (1, False, {}, False),
}


def make_step():
    """Return a function that runs a form of FORMS and returns o and the gradients."""
    import torch

    import gdn

    H, HV, B, T = 16, 32, 1, 512
    gen = torch.Generator("cuda").manual_seed(0)

    def rn(*shape):
        return torch.randn(*shape, generator=gen, device="cuda")

    q, k = (rn(B, T, H, 128).bfloat16().requires_grad_() for _ in range(2))
    v = rn(B, T, HV, 128).bfloat16().requires_grad_()
    g, beta = (-rn(B, T, HV).abs()).requires_grad_(), rn(B, T, HV).sigmoid().requires_grad_()
    leaves, one = [q, k, v, g, beta], torch.ones_like(v)

    def step(form):
        calls, has_backward, options, is_threaded = FORMS[form]
        options = {"use_qk_l2norm_in_kernel": True, "backend": "hopper", **options}
        o = v
        with torch.set_grad_enabled(has_backward), torch.autograd.set_multithreading_enabled(is_threaded):
            for _ in range(calls):
                o, _ = gdn.chunk_gated_delta_rule(q, k, o, g, beta, **options)
            return o, *(torch.autograd.grad(o, leaves, one) if has_backward else ())

    return step


def worker():
    """Answer commands, one a line, in JSON."""
    import torch

    step = make_step()

    def bits():
        hashes = {}
        for form in FORMS:
            for _ in range(3):
                tensors = step(form)
            torch.cuda.synchronize()
            rows = [x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() for x in tensors]
            hashes[form] = hashlib.sha256(b"".join(rows)).hexdigest()[:12]
        return hashes

    def measure(form):
        calls = FORMS[form][0]
        issued, ended = [], []
        for _ in range(3):
            step(form)
        for _ in range(5 if calls > 1 else 40):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step(form)
            issued.append((time.perf_counter() - began) * 1e6 / calls)
            torch.cuda.synchronize()
            ended.append((time.perf_counter() - began) * 1e6 / calls)
        return statistics.median(issued), statistics.median(ended), min(issued)

    def gpu():
        form = "24 calls, caller's thread"
        step(form)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(form)
        graph.replay()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / 10 / 24 * 1e6

    def profile(count):
        profiler, form = cProfile.Profile(), "24 calls, caller's thread"
        step(form)
        torch.cuda.synchronize()
        profiler.enable()
        for _ in range(4):
            step(form)
        profiler.disable()
        torch.cuda.synchronize()
        rows = [
            (own / 96 * 1e6, total / 96 * 1e6, calls / 96, f"{file.split('/')[-1]}:{line} {name}")
            for (file, line, name), (_, calls, own, total, _) in pstats.Stats(profiler).stats.items()
        ]
        return sorted(rows, reverse=True)[:count]

    def parts():
        import triton

        from gdn.backends.triton.launch import record_launches

        x = torch.empty(512, 32, 128, dtype=torch.bfloat16, device="cuda")
        fill = triton.runtime.driver.active.utils.fill_tma_descriptor  # of Triton 3.6
        given = (x.data_ptr(), 3, 2, 10, [1, 64, 1, 64], [1, 512, 32, 128], [512 * 4096, 4096, 128, 1], 0)
        empty, spec = torch._C._dynamo.guards._empty_strided_cuda, ((64, 128), (128, 1), torch.float32)
        functions = {
            "encode a descriptor": lambda: fill(*given),
            "allocate": lambda: empty(*spec),
            "data_ptr": x.data_ptr,
            "view": lambda: x.view(-1, 128),
        }
        found = {name: timeit.timeit(f, number=2000) / 2000 * 1e6 for name, f in functions.items()}
        with record_launches([]) as steps:
            step("one call, caller's thread")
        for launch, tensors in steps:
            launch(*tensors)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(100):
                launch(*tensors)
            name = f"launch {launch.kernel.__name__}, {launch.num_descriptors} descriptors"
            found[name] = (time.perf_counter() - began) / 100 * 1e6
            torch.cuda.synchronize()
        return found

    commands = {"bits": bits, "measure": measure, "gpu": gpu, "profile": profile, "parts": parts}
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, *rest = json.loads(line)
        answers.write(json.dumps(commands[name](*rest)) + "\n")
        answers.flush()


def main(arguments):
    """Measure the trees in turn, and print a table last."""
    trees = dict(x.split("=", 1) for x in arguments if "=" in x)
    processes = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": src},
        )
        for name, src in trees.items()
    }  # fmt: skip

    def ask(name, *command):
        processes[name].stdin.write(json.dumps(command) + "\n")
        processes[name].stdin.flush()
        return json.loads(processes[name].stdout.readline())

    bits = {name: ask(name, "bits") for name in trees}
    first = next(iter(bits.values()))
    lines = [
        f"bits of {name}: {'equal' if x == first else f'OTHERS {x} {first}'}" for name, x in bits.items()
    ]
    lines.append("us a call: issued, ended, least issued")
    for form in FORMS:
        found = {name: [] for name in trees}
        for _ in range(3):
            for name in trees:
                found[name].append(ask(name, "measure", form))
        cells = []
        for name, rows in found.items():
            numbers = " ".join(f"{statistics.median(x):.0f}" for x in zip(*rows, strict=True))
            cells.append(f"{name} {numbers}")
        lines.append(f"{form:28s} {'; '.join(cells)}")
    lines.append("GPU, by a graph: " + "; ".join(f"{name} {ask(name, 'gpu'):.0f}" for name in trees))
    print("\n".join(lines), flush=True)
    if "--profile" in arguments:
        for name in trees:
            print(f"{name}: own us a call, with callees, calls")
            for own, total, calls, where in ask(name, "profile", 45):
                print(f"{own:6.1f} {total:7.1f} {calls:5.1f} {where}")
            for what, us in ask(name, "parts").items():
                print(f"{us:6.2f} {what}", flush=True)
        print("\n".join(lines), flush=True)
    for process in processes.values():
        process.stdin.close()


if __name__ == "__main__":
    worker() if "--worker" in sys.argv else main(sys.argv[1:])
