"""Time forwards of few or short sequences on both backends of a Hopper GPU: us on the GPU, and of the host.

    PYTHONPATH=src python docs/lab/2026-11-28-short-sequences-of-unknown-lengths.py [--size 64]

Kinds: dense rows; packed, whose lengths only the GPU has; a pool in place; no state, with l2norm. GPU: CUDA
graphs of several calls on inputs that do not fit in L2, the median of nine. Consecutive calls overlap where
they leave SMs idle. Host: the mean of 40 calls in a row, the median of five.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import gdn

KINDS = ("dense", "packed", "pool", "no state")
HEADS = ((16, 32), (2, 8), (1, 1), (16, 64))
LENGTHS = (
    (1, 1), (1, 16), (1, 64), (1, 128), (1, 512), (4, 64), (16, 17), (16, 64), (64, 5), (64, 64), (8, 256),
)  # fmt: skip
BACKENDS = ("hopper", "triton")


def make_call(kind, heads, lengths, D, seed):
    """Return a function of the backend's name."""
    (H, HV), (N, T) = heads, lengths
    torch.manual_seed(seed)
    is_packed = kind in ("packed", "pool")
    B, L = (1, N * T) if is_packed else (N, T)
    new = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v = new(B, L, H, D), torch.nn.functional.normalize(new(B, L, H, D), dim=-1), new(B, L, HV, D)
    g, beta = -torch.rand(B, L, HV, device="cuda") * 0.1, torch.rand(B, L, HV, device="cuda")
    states = torch.randn(N, HV, D, D, device="cuda")
    offsets = torch.arange(0, N * T + 1, T, device="cuda", dtype=torch.int32) if is_packed else None
    slots = torch.arange(N, device="cuda", dtype=torch.int32)

    def run(backend):
        with torch.no_grad():
            if kind == "pool":
                options = {"cu_seqlens": offsets, "state_index": slots, "backend": backend}
                return gdn.prefill(q, k, v, states, g=g, beta=beta, **options)
            more = {"initial_state": states, "output_final_state": True}
            if kind == "no state":
                more = {"use_qk_l2norm_in_kernel": True}
            return gdn.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=offsets, backend=backend, **more)

    return run


def gpu_us(runs):
    """Return us of a call, from a graph of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(3):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 3 / len(runs) * 1e3)
    return sorted(times)[4]


def host_us(run):
    """Return us that Python needs for a call."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(40):
            run()
        times.append((time.perf_counter() - began) / 40 * 1e6)
    return sorted(times)[2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=75, help="after which no row begins")
    parser.add_argument("--out", type=Path, default=Path("matrix.jsonl"))
    args, began = parser.parse_args(), time.time()
    rows = [(kind, heads, lengths) for kind in KINDS for heads in HEADS for lengths in LENGTHS]
    for kind, heads, lengths in rows:
        if heads[1] in (1, 64) and lengths not in ((1, 64), (16, 64), (1, 512)):
            continue
        if time.time() > began + args.seconds:
            break
        count = max(2, min(8, int(150e6 / (lengths[0] * heads[1] * args.size**2 * 8))))
        calls = [make_call(kind, heads, lengths, args.size, seed) for seed in range(count)]
        row = {"kind": kind, "heads": heads, "lengths": lengths, "size": args.size}
        for backend in BACKENDS:
            row[backend] = gpu_us([lambda call=call, name=backend: call(name) for call in calls])
            row[f"host {backend}"] = host_us(lambda name=backend, call=calls[0]: call(name))
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        name = f"{kind} {heads[0]}/{heads[1]} {lengths[0]}x{lengths[1]}"
        print(
            f"{name}: " + ", ".join(f"{n} {row[n]:.1f}, host {row[f'host {n}']:.0f}" for n in BACKENDS),
            flush=True,
        )


if __name__ == "__main__":
    main()
