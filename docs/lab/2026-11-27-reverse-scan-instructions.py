"""Time variants of the reverse scan in one process on a GPU (sm_90), and compare their bits.

    PYTHONPATH=/base/src python docs/lab/2026-11-27-reverse-scan-instructions.py /base /variant ...

The first tree is the one that others are compared with. A variant's reverse_scan_kernel and
reverse_transfer_kernel are imported from a copy of its files under another package name; everything else is
that of PYTHONPATH. Tensors are random, with initial states, so that there is a dh0. For each size: us of
all launches of the scan (its segments, where it is cut, and the scan) and of the scan alone. Graphs of four
runs are replayed in turn, nine times; times are medians. DRY=1: on a CPU, records launches and prints them,
runs none.
"""

import importlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

FOLDER = "gdn/backends/hopper"
FILES = ("scan", "scan_consumer", "scan_scores", "scan_shared", "shared")
KERNELS = ("reverse_scan_kernel", "reverse_transfer_kernel")
SIZES = {  # key heads, value heads, sequences, tokens
    "16/32 8x4096": (16, 32, 8, 4096),
    "16/32 1x8192": (16, 32, 1, 8192),
    "16/32 1x32768": (16, 32, 1, 32768),
    "2/8 1x32768": (2, 8, 1, 32768),
    "16/16 8x4096": (16, 16, 8, 4096),
}
DRY = "DRY" in os.environ
DEVICE = "cpu" if DRY else "cuda"


def kernels_of(tree, folder, number):
    """Import a tree's two kernels from a copy of its files."""
    package = f"variant_{number}"
    target = Path(folder) / package
    target.mkdir()
    (target / "__init__.py").write_text("")
    source = Path(tree) / "src" / FOLDER
    texts = {"gluon": (source / "gluon.py").read_text()}
    texts |= {n: (source / "backward" / f"{n}.py").read_text() for n in FILES}
    for name, text in texts.items():
        for n in FILES:
            text = text.replace(f"gdn.backends.hopper.backward.{n} import", f"{package}.{n} import")
        text = text.replace("gdn.backends.hopper.gluon import", f"{package}.gluon import")
        (target / f"{name}.py").write_text(text)
    module = importlib.import_module(f"{package}.scan")
    return {n: getattr(module, n) for n in KERNELS}


def launches_of(size):
    """Return the launches from the factors to the scan with their tensors, and what the scan writes."""
    from gdn.backends.backend import Saved
    from gdn.backends.hopper.backward import plan
    from gdn.backends.triton.launch import allocate
    from gdn.backends.triton.rule import describe as rules
    from gdn.problem import parse

    H, HV, B, T = SIZES[size]
    if DRY:
        T = min(T, 2048)
    gen = torch.Generator(DEVICE).manual_seed(0)

    def rn(*shape):
        return torch.randn(*shape, generator=gen, device=DEVICE)

    q, k = (torch.nn.functional.normalize(rn(B, T, H, 128), dim=-1) for _ in range(2))
    q, k = ((x * (1 + rn(B, T, H, 1).abs())).bfloat16() for x in (q, k))
    rstd = [torch.rsqrt(x.float().square().sum(-1) + 1e-6) for x in (q, k)]
    v, do = rn(B, T, HV, 128).bfloat16(), rn(B, T, HV, 128).bfloat16()
    g, beta = torch.nn.functional.logsigmoid(rn(B, T, HV)) / 16, rn(B, T, HV).sigmoid()
    state = rn(B, HV, 128, 128)
    problem = parse(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=state, use_qk_l2norm_in_kernel=True, backend="hopper"
    )
    G = g.double().view(B, T // 64, 64, HV).cumsum(2).view(B, T, HV).contiguous()
    chunks = B * T // 64
    A_inv = (rn(chunks, HV, 64, 64).tril(-1) * 0.05).bfloat16()
    S = (rn(chunks, HV, 128, 128) * 0.2).bfloat16()
    saved = Saved(G, A_inv, S, None, *rstd)
    p = rules.to_kernel_layout(problem)
    made = plan.plan_of(p, saved, do, None)
    assert made.slabs is None
    new, late = allocate(p.device, made.specs), allocate(p.device, made.late)
    steps = []
    for launch, tensors in made.steps(p, saved, do, None, new, late):
        if launch is made.gradients:
            break
        steps.append((launch, tensors))
    return steps, {"dv": new[0], "dS": new[4], "dh0": new[3]}


def with_kernels(steps, kernels):
    """Return the launches with a variant's kernels; dataclasses.replace would keep the first one's binary."""
    made = []
    for launch, tensors in steps:
        kernel = kernels.get(launch.kernel.__name__)
        if kernel is not None:
            given = (launch.grid, launch.scalars, launch.constants, launch.num_warps, launch.num_stages)
            launch = type(launch)(
                kernel, *given, dict(launch.options), launch.num_descriptors, launch.seconds
            )
        made.append((launch, tensors))
    return made


def checksum(x):
    bits = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)
    return int(bits.long().sum()) & 0xFFFFFFFF


def graph_of(steps):
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(4):
            for launch, tensors in steps:
                launch(*tensors)
    return graph


def times(trees, size):
    """Print us and checksums of each variant for one problem."""
    steps, out = launches_of(size)
    names = [launch.kernel.__name__ for launch, _ in steps]
    at = names.index("backward_factors_kernel") + 1
    consumers = steps[-1][0].constants["CONSUMERS"]
    print(f"{size}: {', '.join(names[at:])}; consumers {consumers}", flush=True)
    for launch, tensors in steps[:at]:
        launch(*tensors)
    first, graphs, notes = {}, {}, {}
    for name, kernels in trees.items():
        own = with_kernels(steps[at:], kernels)
        other = set()
        for rerun in range(3):
            for x in out.values():
                x.fill_(7.0)
            for launch, tensors in own:
                launch(*tensors)
            if DRY:
                continue
            got = {n: x.clone() for n, x in out.items()}
            first = first or got
            if rerun == 0:
                mine = got
            other |= {f"{n} OF RERUN" for n in got if not torch.equal(got[n], mine[n])}
        if DRY:
            continue
        words = []
        for n, x in mine.items():
            assert bool(x.isfinite().all()), f"{name}: {n} is not finite"
            words.append(f"{n} {checksum(x):08x}")
            if not torch.equal(x, first[n]):
                a, b = x.double(), first[n].double()
                words[-1] += f" DIFFERS by {((a - b).norm() / b.norm()).item():.1e}"
        notes[name] = ", ".join([*words, *sorted(other)])
        graphs[name] = graph_of(own), graph_of(own[-1:])
    found = {name: ([], []) for name in graphs}
    for _ in range(9):
        for name, both in graphs.items():
            for graph, into in zip(both, found[name], strict=True):
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record()
                graph.replay()
                b.record()
                torch.cuda.synchronize()
                into.append(a.elapsed_time(b) * 1e3 / 4)
    base = None
    for name, both in found.items():
        us, alone = (statistics.median(x) for x in both)
        base = base or (us, alone)
        print(
            f"    {name:24s} {us:8.1f} us {us / base[0]:.3f}   scan alone {alone:8.1f} us"
            f" {alone / base[1]:.3f}   {notes[name]}",
            flush=True,
        )


def main():
    began = time.time()
    from gdn.backends.hopper.backward import plan
    from gdn.backends.triton.launch import compile_ahead

    plan.compile_ahead = lambda *_: None
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        trees = {Path(tree).name: kernels_of(tree, folder, i) for i, tree in enumerate(sys.argv[1:])}

        def all_steps():
            for size in SIZES:
                steps, _ = launches_of(size)
                yield from (step for step in steps if step[0].kernel.__name__ not in KERNELS)
                for kernels in trees.values():
                    yield from with_kernels(steps, kernels)[1:]

        if DRY:
            sys.path.insert(0, os.environ["DRY"] + "/tests")
            from kit import compiling

            with compiling.recording(compiling.TARGETS["cuda:90"].machine) as launches:
                for size in SIZES:
                    times(trees, size)
            jobs = compiling.jobs_of(launches, "cuda:90")
            print(len(launches), "launches", len(jobs), "binaries")
            for job in jobs:
                print(job.kernel.__module__, job.name[:60])
            return
        compile_ahead(torch.device("cuda", torch.cuda.current_device()), "variants", all_steps)
        print(torch.cuda.get_device_name(), f"compiled after {time.time() - began:.1f} s", flush=True)
        for size in SIZES:
            times(trees, size)
            torch.cuda.empty_cache()
        print(f"{time.time() - began:.1f} s")


if __name__ == "__main__":
    main()
