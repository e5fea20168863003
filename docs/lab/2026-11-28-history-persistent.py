"""Compare and time decoding with a history by the persistent kernel and by Triton's, on an H200.

    PYTHONPATH=src python docs/lab/2026-11-28-history-persistent.py [--rows 512 256 128 64 32]     about 40 s

bits: 300 rows of permuted slots, some without a slot, 40 steps, so that each history folds at least twice.
time: us a token from CUDA graphs, as `2026-11-27-int8-times.py` times; in brackets over `decode`.
"""

import argparse
import importlib.util
from pathlib import Path

import torch

import gdn

SPEC = importlib.util.spec_from_file_location("times", Path(__file__).with_name("2026-11-27-int8-times.py"))
times = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(times)
KINDS = {"bf16": torch.bfloat16, "fp32": torch.float32}
BACKENDS = ("triton", "hopper")


def steps(run, dtype, count=40, rows=300):
    """Return the outputs of all steps and the pools after them, by backend."""
    results = []
    for backend in BACKENDS:
        torch.manual_seed(0)
        pool = run.pool((dtype, 16, False), rows)
        pool.cursor[:, 0] = torch.randint(0, 16, (rows,), device="cuda").int()
        pool.cursor[:, 1] = torch.randint(0, 16, (rows,), device="cuda").int()
        where = {**run.where, "backend": backend}
        outputs = []
        for step in range(count):
            slots = torch.randperm(rows, device="cuda").int()
            slots[step::37] = -1
            x = run.draw(rows, 1)
            outputs.append(
                gdn.decode_with_history(**x, pool=pool, read_index=slots, use_history=True, **where)
            )
        held = pool.state, pool.history_u, pool.history_k, pool.history_G, pool.cursor
        results.append((torch.stack(outputs), *held))
    names = ("o", "state", "u", "k", "G", "cursor")
    return [name for name, x, y in zip(names, *results, strict=True) if not torch.equal(x, y)]


def time_rows(run, B, dtype):
    """Return us a token of `decode` and of each backend."""
    kind, recorded = (dtype, 16, False), {}
    plain = run.calls((dtype, None, False), B)
    recorded["decode"] = run.record(plain), len(plain)
    for backend in BACKENDS:
        run.where = {**run.where, "backend": backend}
        calls = run.calls(kind, B)
        recorded[backend] = run.record(calls), len(calls), calls
    run.where = {**run.where, "backend": "triton"}
    seconds = {name: [] for name in recorded}
    for _ in range(7):
        for name, (graph, count, *_) in recorded.items():
            seconds[name].append(run.seconds(graph) / count)
    return {name: 1e6 * sorted(values)[3] for name, values in seconds.items()}


def main():
    """Print a line for each dtype of states and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 256, 128, 64, 32])
    asked, run = parser.parse_args(), times.Run(False)
    for name, dtype in KINDS.items():
        print(f"{name}: bits {steps(run, dtype) or '='}", flush=True)
        for B in asked.rows:
            us = time_rows(run, B, dtype)
            line = "  ".join(f"{way} {x:.1f} ({x / us['decode']:.3f})" for way, x in us.items())
            print(f"  B={B}  {line}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
