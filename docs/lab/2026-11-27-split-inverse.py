"""Time a training step of Hopper at K = V = 64 with A_inv as split bf16, and joined by a sum, on an H100.

    PYTHONPATH=src python docs/lab/2026-11-27-split-inverse.py

For each size: us of forward and backward by replays of a CUDA graph, the median of nine rounds in turn; a
hash of all gradients; us of each kernel by the profiler. `joined` sums hi and lo after the forward, so that
the backward loads fp32. Where the forward itself joins them, as it did before, both lines are `joined`.
"""

import hashlib
import statistics
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from gdn.backends.hopper import rule
from gdn.backends.hopper.backward import plan
from gdn.problem import parse

# key heads, value heads, rows, tokens
SIZES = {
    "16/32 8x4096": (16, 32, 8, 4096),
    "16/32 1x8192": (16, 32, 1, 8192),
    "16/32 1x32768": (16, 32, 1, 32768),
    "2/8 1x32768": (2, 8, 1, 32768),
    "16/32 3x1000": (16, 32, 3, 1000),
}
REPEATS, ROUNDS = 4, 9


def make_step(name, is_joined):
    """Return a training step of a size, as a function that returns the gradients."""
    H, HV, B, T = SIZES[name]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k = (F.normalize(draw(B, T, H, 64), dim=-1).bfloat16() for _ in range(2))
    v, do = draw(B, T, HV, 64).bfloat16(), draw(B, T, HV, 64).bfloat16()
    g, beta = F.logsigmoid(draw(B, T, HV)) / 16, draw(B, T, HV).sigmoid()
    problem = parse(q=q, k=k, v=v, g=g, beta=beta, backend="hopper")

    def step():
        saved = rule.chunk_forward(problem, True)[2]
        if is_joined and saved.A_inv.dim() == 5:
            saved = replace(saved, A_inv=saved.A_inv.sum(2, dtype=torch.float32))
        return plan.chunk_backward(problem, saved, do, None)

    return step


def capture(step):
    """Return a CUDA graph of some calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(REPEATS):
            step()
    graph.replay()
    return graph


def replay_time(graph):
    """Return us of one call in a replay."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / REPEATS * 1e3


def kernel_times(step):
    """Return us of each kernel of a call, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    rows = [(x.key, x.self_device_time_total / 5) for x in found.key_averages()]
    return sorted((row for row in rows if row[1] > 1), key=lambda row: -row[1])


def hash_of(gradients):
    """Return a hash of the bits of all gradients."""
    digest = hashlib.sha256()
    for x in gradients:
        if x is not None:
            digest.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def main():
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in SIZES:
        steps = {kind: make_step(name, kind == "joined") for kind in ("joined", "split")}
        hashes = {kind: hash_of(step()) for kind, step in steps.items()}
        graphs = {kind: capture(step) for kind, step in steps.items()}
        rounds = {kind: [] for kind in steps}
        for _ in range(ROUNDS):
            for kind, graph in graphs.items():
                rounds[kind].append(replay_time(graph))
        for kind, step in steps.items():
            kernels = ((key[:32].removesuffix("_kernel"), us) for key, us in kernel_times(step)[:7])
            cells = ", ".join(f"{key} {us:.0f}" for key, us in kernels)
            us = statistics.median(rounds[kind])
            print(f"{name:14s} {kind:6s} {us:8.1f} us  {hashes[kind]}  {cells}", flush=True)
        del graphs


if __name__ == "__main__":
    main()
