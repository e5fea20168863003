"""Measure the first calls of new processes: with an empty cache, and with kernels from `gdn warmup --save`.

    PYTHONPATH=src python docs/lab/2026-11-25-prebuilt-kernels.py        on a GPU; about 150 s

Each line is a new process. `imports` is the time of Python, torch and gdn, `context` that of CUDA, `load`
that of `gdn.load_kernels`, then come the first calls; `misses` are the kernels that were compiled.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import sys, time
since = float(sys.argv[1])
import torch, gdn
times = {"imports": time.time() - since}
def timed(name, call):
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    times[name] = time.perf_counter() - start
    return result
timed("context", lambda: torch.zeros(1, device="cuda"))
import triton
misses = []
def listen(*, src, cache_hit, **rest):
    misses.extend([] if cache_hit else [src.name])
triton.knobs.compilation.listener = listen
if len(sys.argv) > 2:
    timed("load", lambda: gdn.load_kernels(sys.argv[2]))
H, HV, D, T = 16, 32, 128, 1024
def rand(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)
given = dict(a=rand(1, T, HV), b=rand(1, T, HV), A_log=rand(HV, dtype=torch.float32),
             dt_bias=rand(HV, dtype=torch.float32), use_qk_l2norm_in_kernel=True, state_v_first=True)
q, k, v, pool = rand(1, T, H, D), rand(1, T, H, D), rand(1, T, HV, D), rand(9, HV, D, D, dtype=torch.float32)
where = dict(cu_seqlens=torch.tensor([0, T], device="cuda", dtype=torch.int32),
             state_index=torch.tensor([3], device="cuda", dtype=torch.int32))
timed("prefill", lambda: gdn.prefill(q, k, v, pool, **where, **given))
rows = {name: given[name][:, :8].transpose(0, 1).contiguous() for name in "ab"}
tokens = [x[:, :8].transpose(0, 1).contiguous() for x in (q, k, v)]
index = torch.arange(1, 9, device="cuda", dtype=torch.int32)
timed("decode", lambda: gdn.decode(*tokens, pool, read_index=index, **{**given, **rows}))
timed("decode again", lambda: gdn.decode(*tokens, pool, read_index=index, **{**given, **rows}))
import json
print(json.dumps({"misses": misses, **{name: round(x, 3) for name, x in times.items()}}))
"""


def child(cache: Path, *arguments: str) -> dict[str, object]:
    """Run the calls in a new process with a cache of its own; return seconds by name."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", CHILD, str(time.time()), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Save the kernels of a Qwen3-Next layer, then print the times of new processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "gdn", "warmup", "--heads", "16/32", "--l2norm", "--state-v-first"]
        start = time.time()
        done = subprocess.run(
            [*command, "--save", str(folder / "saved")],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        print(done.stdout.strip().splitlines()[-1:], done.stderr[-500:], f"{time.time() - start:.0f} s")
        size = sum(path.stat().st_size for path in (folder / "saved").rglob("*") if path.is_file())
        print(f"{size / 1e6:.1f} MB")
        for i in range(2):
            print("empty ", child(folder / f"empty{i}"))
            print("loaded", child(folder / f"loaded{i}", str(folder / "saved")))
            print("filled", child(folder / f"loaded{i}"))


if __name__ == "__main__":
    main()
