"""Check `prepare_channels` by halves of a chunk on a GPU, and time it beside levels, in one process.

    PYTHONPATH=src python docs/lab/2026-11-26-channel-halves.py

check: relative RMS errors in 1e-3 against autograd through the reference in fp64, and the largest share of a
limit. time: us of the launch in a forward and in a backward, and of a forward, each as CUDA graphs in turn.
"""

import functools
from dataclasses import replace

import torch

import gdn
import gdn.backends.triton.launch.launches as launches
from gdn.backends.triton.launch import PlanCache
from gdn.backends.triton.rule import build_channels
from gdn.testing import Case, check, rows

WAYS = {"levels": lambda *_: 16, "halves": build_channels.channel_block}
BF16, FP16 = torch.bfloat16, torch.float16
kda = functools.partial(gdn.chunk_kda, backend="triton", use_qk_l2norm_in_kernel=True)
BASE = Case("bounded", sizes=(128, 128), heads=(2, 2), is_per_channel=True, state="wide", lengths=rows(300))
GATES = ("none", "slow", "mild", "strong", "bounded", "rates", "wild", "reset", "turns")
TIMES = (  # heads, sequences, tokens, factor of the bounded gate (None: -5 everywhere), dtype
    (32, 1, 8192, 1.0, BF16),
    (32, 1, 8192, 1e-3, BF16),
    (32, 1, 8192, None, BF16),
    (32, 1, 8192, 1e-3, FP16),
    (12, 1, 2048, 1.0, BF16),
    (64, 4, 4096, 1.0, BF16),
)


def choose(way):
    build_channels.channel_block = WAYS[way]


def graph(run, reps):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(reps):
            run()
    return captured


def timed(captured, reps):
    times = []
    for _ in range(7):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        captured.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / reps)
    return sorted(times)[3]


def launches_of(run):
    """Return the launches of `prepare_channels` in a call, with their tensors."""
    found, call = [], launches.Launch.__call__

    def catch(self, *tensors):
        if self.kernel.__name__ == "prepare_channels_kernel":
            found.append((self, tensors))
        return call(self, *tensors)

    launches.Launch.__call__ = catch
    run()
    launches.Launch.__call__ = call
    return found


def measure(H, B, T, rate, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, 128, device="cuda", dtype=dtype) for _ in range(3))
    beta, logits = torch.rand(B, T, H, device="cuda"), torch.randn(B, T, H, 128, device="cuda")
    g = torch.full_like(logits, -5.0) if rate is None else -5 * rate * torch.sigmoid(logits)
    leaves, do = [x.requires_grad_() for x in (q, k, v, g, beta)], torch.randn_like(v)
    graphs, found = {}, []
    for way in WAYS:
        choose(way)
        found.append(launches_of(lambda: torch.autograd.grad(kda(*leaves)[0], leaves, do)))
        for name, (launch, tensors) in zip(("prepare", "prepare_bwd"), found[-1], strict=True):
            graphs[name, way] = graph(functools.partial(launch, *tensors), 10), 10
        with torch.no_grad():
            graphs["forward", way] = graph(lambda: kda(*leaves), 2), 2
    times = {key: [] for key in graphs}
    for _ in range(3):
        for key, captured in graphs.items():
            times[key].append(timed(*captured))
    cells = "  ".join(f"{name} {way} {sorted(x)[1]:.0f}" for (name, way), x in times.items())
    print(f"{H} heads {B}x{T} gate {rate} {dtype}: {cells}", flush=True)


def main():
    # each call has the launches of the way that is chosen now
    PlanCache.get = lambda self, key, make: make()
    cases = [(replace(BASE, gate=gate), BF16) for gate in GATES]
    cases += [(replace(BASE, keys="correlated"), BF16), (BASE, FP16), (replace(BASE, gate="slow"), FP16)]
    for case, dtype in cases:
        for way in WAYS:
            choose(way)
            found = check(
                kda, replace(case, use_qk_l2norm_in_kernel=True), dtype, device="cuda", budget=2**23
            )
            cells = " ".join(f"{x.output} {1e3 * x.error:.2f}{'' if x.ok else ' BAD'}" for x in found)
            print(
                f"{case.gate} {dtype} {way}: {max(x.error / x.limit for x in found):.2f} | {cells}",
                flush=True,
            )
    for size in TIMES:
        measure(*size)


if __name__ == "__main__":
    main()
