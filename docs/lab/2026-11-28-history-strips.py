"""Time and compare a token on histories in wide strips of two warps and in narrow ones of one, on a GPU.

    PYTHONPATH=src python docs/lab/2026-11-28-history-strips.py [--rows 256 128 64]       about 60 s

Each line: us a token of `decode`, and of `decode_with_history` with `history.COLUMNS` empty and as it is; in
brackets over `decode` (of fp32 for fp32, else of bf16). `=`: outputs and states of 70 rows have equal bits.
Rows are at different places of their histories of 16, and a graph has 15 calls for each layer, so each row
folds once. States of 400 MB in turn, so that they come from HBM; the graphs in turns, median of 5.
"""

import argparse
import importlib.util
from pathlib import Path

import torch

import gdn
from gdn.backends.triton import launch
from gdn.backends.triton.serving import history
from gdn.ops import fastpath

SPEC = importlib.util.spec_from_file_location("times", Path(__file__).with_name("2026-11-27-int8-times.py"))
times = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(times)
KINDS = {  # dtype of states, places, has a remainder
    "int8 + 4": (torch.int8, 16, True),
    "int8": (torch.int8, 16, False),
    "int16": (torch.int16, 16, False),
    "bf16": (torch.bfloat16, 16, False),
    "fp32": (torch.float32, 16, False),
}
FORMS = {"narrow": {}, "in use": history.COLUMNS}


def use(columns):
    history.COLUMNS, history._plans = columns, launch.PlanCache()
    fastpath._calls.clear()


def one_call(run, kind):
    torch.manual_seed(0)
    rows = torch.arange(70, device="cuda")
    pool = run.pool(kind, 70)
    pool.cursor[:, 0], pool.cursor[:, 1] = (rows % 16).int(), (rows % 16).int()
    x = run.draw(70, 1)
    o = gdn.decode_with_history(**x, pool=pool, read_index=rows.int(), use_history=True, **run.where)
    return o, pool.read(rows, state_v_first=True)


def time_rows(run, B, name):
    kind = KINDS[name]
    plain = run.calls((torch.float32 if name == "fp32" else torch.bfloat16, None, False), B)
    calls = run.calls(kind, B)
    recorded = {"decode": (run.record(plain), len(plain))}
    for form, columns in FORMS.items():
        use(columns)
        recorded[form] = run.record(calls), len(calls)
    seconds = {form: [] for form in recorded}
    for _ in range(5):
        for form, (graph, count) in recorded.items():
            seconds[form].append(run.seconds(graph) / count)
    median = {form: 1e6 * sorted(values)[2] for form, values in seconds.items()}
    return "  ".join(f"{form} {us:.1f} ({us / median['decode']:.2f})" for form, us in median.items())


def main():
    """Print a line for each number of rows and kind of states."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 128, 64])
    asked, run, bits = parser.parse_args(), times.Run(False), {}
    for name, kind in KINDS.items():
        results = []
        for columns in FORMS.values():
            use(columns)
            results.append(one_call(run, kind))
        bits[name] = "=" if all(torch.equal(x, y) for x, y in zip(*results, strict=True)) else "OTHER BITS"
    for B in asked.rows:
        for name in KINDS:
            print(f"B={B} {name} {bits[name]}  {time_rows(run, B, name)}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
