"""Measure the first calls of new processes by stage: with saved kernels, and with the cache that they filled.

    PYTHONPATH=src python docs/lab/2026-11-27-saved-kernels.py        on an H100 or H200; about 60 s

Each line is a new process. The results of all processes must have the same bits.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import importlib, json, sys, time
from pathlib import Path
mode, folder, results = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
times = {}
def timed(name, call):
    start = time.perf_counter()
    result = call()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        sys.modules["torch"].cuda.synchronize()
    times[name] = round(time.perf_counter() - start, 3)
    return result
timed("torch", lambda: __import__("torch"))
import torch
gdn = timed("gdn", lambda: __import__("gdn"))
timed("context", lambda: torch.zeros(1, device="cuda"))
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
torch.cuda.synchronize()
timed("triton", lambda: __import__("triton"))
from gdn.backends.triton.launch import binaries, saved
cache = folder.with_suffix(".cache")
if mode == "save":
    scope = binaries.separate_cache(cache)
    scope.__enter__()
if mode == "load":
    timed("load", lambda: gdn.load_kernels(folder))
modules = ("triton.serving.prefill", "hopper.rule")
timed("kernels", lambda: [importlib.import_module(f"gdn.backends.{name}") for name in modules])
timed("driver", lambda: __import__("triton").runtime.driver.active.utils)
o = timed("prefill", lambda: gdn.prefill(q, k, v, pool, **where, **given))
timed("prefill again", lambda: gdn.prefill(q, k, v, pool, **where, **given))
d = timed("decode", lambda: gdn.decode(*tokens, pool, read_index=index, **{**given, **rows}))
if mode == "save":
    scope.__exit__(None, None, None)
    binaries.pack(cache, folder)
    torch.save((o, d, pool), results)
else:
    times["bits"] = all(torch.equal(a, b) for a, b in zip(torch.load(results), (o, d, pool)))
times["saved kernels launched"] = len(saved._binaries)
print(json.dumps(times))
"""


def child(mode: str, folder: Path, cache: Path) -> str:
    """Run the calls in a new process with a cache of its own; return its line."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", CHILD, mode, str(folder / "saved"), str(folder / "results.pt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return lines[-1]


def main() -> None:
    """Save the kernels of a prefill and a decode, then print the stages of new processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "saved.cache").mkdir()
        print("save  ", child("save", folder, folder / "unused"), flush=True)
        for i in range(2):
            print("load  ", child("load", folder, folder / f"cache{i}"), flush=True)
            print("filled", child("filled", folder, folder / f"cache{i}"), flush=True)


if __name__ == "__main__":
    main()
