"""Time the first calls of new processes on two trees: with empty caches, and with saved kernels.

    python docs/lab/2026-11-27-cold-processes.py BEFORE AFTER [--seconds 90]        on an H100 or H200

BEFORE and AFTER are checkouts. Each line is a new process; the two trees run in turn. A process that would
begin after 0.75 of the seconds is left out. All processes must have the same bits. Columns, in seconds:

    start     Python, torch, gdn, the CUDA context and the inputs
    load      gdn.load_kernels
    prefill   the first prefill (1,024 tokens, 16/32 heads, raw gates, a pool), or the first training forward
    decode    the first decode (8 rows)
    again     the second prefill or forward
    beside    the longest of the calls of the next 3 s: the thread that compiles ahead begins after one
    rest      what is left for other sizes, compiled in parallel (in BEFORE it is a part of the first call)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import json, sys, time
mode, folder, results, since = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
from pathlib import Path
import torch, gdn
times = {}
def timed(name, call):
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    times[name] = round(time.perf_counter() - start, 3)
    return result
torch.manual_seed(0)
H, HV, D, T = 16, 32, 128, 1024
def rand(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)
given = dict(a=rand(1, T, HV), b=rand(1, T, HV), A_log=rand(HV, dtype=torch.float32),
             dt_bias=rand(HV, dtype=torch.float32), use_qk_l2norm_in_kernel=True, state_v_first=True)
q, k, v, pool = rand(1, T, H, D), rand(1, T, H, D), rand(1, T, HV, D), rand(9, HV, D, D, dtype=torch.float32)
where = dict(cu_seqlens=torch.tensor([0, T], device="cuda", dtype=torch.int32),
             state_index=torch.tensor([3], device="cuda", dtype=torch.int32))
rows = {name: given[name][:, :8].transpose(0, 1).contiguous() for name in "ab"}
tokens = [x[:, :8].transpose(0, 1).contiguous() for x in (q, k, v)]
index = torch.arange(1, 9, device="cuda", dtype=torch.int32)
def train():
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return gdn.chunk_gated_delta_rule(*leaves, g=-given["a"].float().exp(), beta=given["b"].float().sigmoid(),
                                      use_qk_l2norm_in_kernel=True)
def prefill():
    return gdn.prefill(q, k, v, pool, **where, **given)
def decode():
    return gdn.decode(*tokens, pool, read_index=index, **{**given, **rows})
def watch(call):
    longest, end = 0.0, time.perf_counter() + 3
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        longest = max(longest, time.perf_counter() - start)
        time.sleep(0.001)
    times["beside"] = round(longest, 4)
def finish():
    module = sys.modules.get("gdn.backends.triton.launch.precompile")
    getattr(module, "finish_ahead", lambda: None)()
torch.cuda.synchronize()
if mode == "imports":
    import gdn.backends.triton.serving.prefill, gdn.backends.triton.serving.decode, gdn.backends.hopper.rule
    sys.exit(print("{}"))
times["start"] = round(time.time() - since, 3)
found = {}
if mode == "train":
    out = timed("prefill", train)
    found["o"] = out[0].detach()
    timed("again", train)
    watch(train)
    timed("rest", finish)
else:
    if mode == "empty":
        from gdn.backends.triton.launch import binaries
        cache = Path(folder + ".cache")
        scope = binaries.separate_cache(cache)
        scope.__enter__()
    else:
        timed("load", lambda: gdn.load_kernels(folder))
    found["prefill"] = timed("prefill", prefill)
    found["decode"] = timed("decode", decode)
    found["pool"] = pool.clone()
    timed("again", prefill)
    if mode == "empty":
        timed("rest", finish)
        scope.__exit__(None, None, None)
        binaries.pack(cache, Path(folder))
path = Path(results)
before = torch.load(path) if path.exists() else {}
times["bits"] = all(torch.equal(before[name], x) for name, x in found.items() if name in before)
torch.save({**before, **found}, path)
print(json.dumps(times))
"""
COLUMNS = ("start", "load", "prefill", "decode", "again", "beside", "rest", "bits")


def child(tree: str, mode: str, folder: Path, results: Path) -> dict[str, object]:
    """Run the calls in a new process with an empty cache of its own; return seconds by name."""
    with tempfile.TemporaryDirectory() as cache:
        variables = {
            "TRITON_CACHE_DIR": cache,
            "PYTHONPATH": str(Path(tree).resolve() / "src"),
            # as an installed package has it: no source of Python is compiled
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(results.with_name("bytecode")),
        }
        command = [sys.executable, "-c", CHILD, mode, str(folder), str(results), str(time.time())]
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False
        )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Print a line for each process, those of the two trees in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--seconds", type=float, default=90)
    asked = parser.parse_args()
    end = time.time() + 0.75 * asked.seconds
    print(f"{'':14}", *(f"{name:>8}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as name:
        results = Path(name) / "results.pt"
        # a process of each tree that is not timed: it reads torch from the disk, and writes Python's bytecode
        for tree in (asked.before, asked.after):
            child(tree, "imports", Path(name), results)
        for mode in ("empty", "load", "train", "load", "train"):
            for label, tree in (("before", asked.before), ("after", asked.after)):
                if time.time() > end:
                    print(f"{label:7}{mode:7} left out")
                    continue
                row = child(tree, mode, Path(name) / label, results)
                cells = (row.get(x, "") for x in COLUMNS)
                print(f"{label:7}{mode:7}", *(f"{x!s:>8}" for x in cells), row.get("error", ""), flush=True)


if __name__ == "__main__":
    main()
