"""Divide a token of `generate` with recorded graphs into the GPU's and the host's time, on a GPU.

    PYTHONPATH=src python docs/lab/2026-11-27-replayed-step.py [--rows 1]       about 25 s, kernels compiled

The model is that of 2026-11-27-generate.py. Printed: seconds of `generate` for 1 and 64 new tokens; ms of a
replay alone, and its kernels by name; Python's time of a whole `generate` by function. A replay advances the
counters of the cache, and one past its length fails an assertion of PyTorch, so they are reset first.
"""

import argparse
import cProfile
import importlib.util
import io
import pstats
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import gdn
from gdn.integrations import transformers_graphs as graphs

SPEC = importlib.util.spec_from_file_location("generate", Path(__file__).with_name("2026-11-27-generate.py"))
lines = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lines)


def reset(recording):
    for buffer in recording.buffers:
        if buffer.dim() == 0:
            buffer.zero_()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1)
    rows = parser.parse_args().rows
    sys.modules["fla"] = None
    model = lines.build("cuda", torch.bfloat16, **lines.FULL)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, lines.FULL["vocab"], (rows, 512), generator=generator).cuda()

    def run(new):
        torch.cuda.synchronize()
        start = time.perf_counter()
        lines.generate(model, ids, "static", new)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    with gdn.patch_transformers(graphs=True):
        run(64)
        run(64)
        for new in (1, 64, 1, 64):
            print(f"{new} new tokens: {1e3 * run(new):.1f} ms", flush=True)
        python = cProfile.Profile()
        python.enable()
        run(64)
        python.disable()
        (recording,) = (x for group in graphs._calls[model].recordings.values() for x in group)
        reset(recording)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            recording.replay()
        torch.cuda.synchronize()
        print(f"a replay alone: {(time.perf_counter() - start) / 50 * 1e3:.3f} ms", flush=True)
        reset(recording)
        with profile(activities=[ProfilerActivity.CUDA]) as kernels:
            recording.replay()
            torch.cuda.synchronize()
    total: dict[str, list[float]] = {}
    for event in kernels.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = total.setdefault(event.name.replace("void ", "").replace("at::native::", "")[:80], [0, 0])
            entry[0] += 1
            entry[1] += event.device_time_total
    print(f"{sum(n for n, _ in total.values())} launches, {sum(us for _, us in total.values()):.0f} us")
    for name, (n, us) in sorted(total.items(), key=lambda item: -item[1][1])[:26]:
        print(f"{us:8.1f} us {n:4d} x {name}")
    text = io.StringIO()
    pstats.Stats(python, stream=text).sort_stats("cumtime").print_stats(45)
    print("\n".join(line[:150] for line in text.getvalue().splitlines()[4:52]))


if __name__ == "__main__":
    main()
