"""Time the reverse state scan on an sm_90 GPU with parts of it removed, one at a time.

    PYTHONPATH=src:tests python docs/lab/2026-11-25-reverse-scan-ablation.py

Each variant is a copy of the package with lines of the scan replaced, in a process of its own; its results
are wrong. Variants compile at the same time, and take turns on the GPU. us: CUDA-graph replays, median of 5.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

CONSUMER, SCORES, SCAN = "scan_consumer.py", "scan_scores.py", "scan.py"
Q_LOW = (CONSUMER, "    dS = warpgroup_mma(gl.convert_layout(lo, A_OPERAND), q, dS, is_async=True)\n", "")
Q_WAIT = (CONSUMER, "dr = warpgroup_mma_wait(2, deps=(dr,))", "dr = warpgroup_mma_wait(1, deps=(dr,))")
DV_LOW = (CONSUMER, "    dS = warpgroup_mma(gl.convert_layout(lo, A_OPERAND), k, dS, is_async=True)\n", "")
DS_LOW = (CONSUMER, "    z = warpgroup_mma(gl.convert_layout(lo, A_OPERAND), k_t, z, is_async=True)\n", "")
P_LOW = (
    CONSUMER,
    "    return warpgroup_mma(do_t, tiles.P.index(2 * stage + 1), acc, is_async=True)\n",
    "    return acc\n",
)
NO_P = (
    CONSUMER,
    "    acc = warpgroup_mma(do_t, tiles.P.index(2 * stage), acc, is_async=True)\n"
    "    return warpgroup_mma(do_t, tiles.P.index(2 * stage + 1), acc, is_async=True)\n",
    "    return acc\n",
)
ONE_ACC = (
    CONSUMER,
    "        z = mask_past(warpgroup_mma_wait(0, deps=(z,)) * out, left)\n"
    "        z = issue_scores_mma(do_t, tiles, i, z, w)\n",
    "        z = issue_scores_mma(do_t, tiles, i, z, w)\n",
)
ONE_ACC_END = (
    CONSUMER,
    "        z = warpgroup_mma_wait(0, deps=(z,))\n",
    "        z = mask_past(warpgroup_mma_wait(0, deps=(z,)) * out, left)\n",
)
ONE_ACC_LONE = (
    CONSUMER,
    "        Pdo = issue_scores_mma(do_t, tiles, i, zeros, w)\n",
    "        Pdo = zeros\n",
)
ONE_ACC_LONE_END = (
    CONSUMER,
    "        z, Pdo = warpgroup_mma_wait(0, deps=(z, Pdo))\n        arrive(i, w.turns.P_empty)\n"
    "        z = mask_past(z * out + Pdo, left)\n",
    "        z = issue_scores_mma(do_t, tiles, i, z, w)\n"
    "        z = mask_past(warpgroup_mma_wait(0, deps=(z,)) * out, left)\n"
    "        arrive(i, w.turns.P_empty)\n",
)
DS_STORE = (
    CONSUMER,
    "        tiles.dS.index(WG).permute((1, 0)).store(hi)\n        fence_async_shared()\n"
    "        tma_store(w.out.dS_d, [position.tile * w.D, position.first_v], tiles.dS.index(WG))\n",
    "",
)
DS_TMA = (
    CONSUMER,
    "        tma_store(w.out.dS_d, [position.tile * w.D, position.first_v], tiles.dS.index(WG))\n",
    "",
)
DV_STORE = (
    CONSUMER,
    "            fence_async_shared()\n"
    "            tma_store(w.out.dv_d, [position.token, column], dv_tile)\n",
    "            fence_async_shared()\n",
)
READ_SCALE = (
    CONSUMER,
    "    hi, lo = split_bf16(read)\n",
    "    hi = read.to(gl.bfloat16)\n    lo = hi\n",
)
SCALE_DO = (
    CONSUMER,
    "do_t.load(ACC_TOKENS).to(gl.float32) * factor(tiles, stage, READ, PER_COLUMN)[None, :]",
    "zeros + out[None, :]",
)
EXPONENTIALS = (SCORES, "gl.exp2(decay)", "decay")
FENCE = (
    CONSUMER,
    "        dv_tile.permute((1, 0)).store(dv.to(gl.bfloat16))\n",
    "        if left < C:\n            dv_tile.permute((1, 0)).store(dv.to(gl.bfloat16))\n",
)
EARLY = (
    CONSUMER,
    "    if w.CONSUMERS == 1:\n        z, Pdo = warpgroup_mma_wait(0, deps=(z, Pdo))\n",
    "    if w.CONSUMERS == 1:\n        dS = dS * gl.exp2(last_of(tiles, stage, DECAY))\n"
    "        read = do_t.load(ACC_TOKENS).to(gl.float32) * factor(tiles, stage, READ, PER_COLUMN)[None, :]\n"
    "        hi, lo = split_bf16(read)\n        z, Pdo = warpgroup_mma_wait(0, deps=(z, Pdo))\n",
)
EARLY_END = (
    CONSUMER,
    "    dS = dS * gl.exp2(last_of(tiles, stage, DECAY))\n"
    "    read = do_t.load(ACC_TOKENS).to(gl.float32) * factor(tiles, stage, READ, PER_COLUMN)[None, :]\n"
    "    hi, lo = split_bf16(read)\n    if w.CONSUMERS == 2:\n",
    "    if w.CONSUMERS == 2:\n        dS = dS * gl.exp2(last_of(tiles, stage, DECAY))\n"
    "        read = do_t.load(ACC_TOKENS).to(gl.float32) * factor(tiles, stage, READ, PER_COLUMN)[None, :]\n"
    "        hi, lo = split_bf16(read)\n",
)
CLEAR = (CONSUMER, "    if left < C:\n        clear_past(q, k, do, left)\n", "")
ONE_PART = (Q_LOW, Q_WAIT, DV_LOW, DS_LOW, P_LOW)
ACC = (ONE_ACC, ONE_ACC_END, ONE_ACC_LONE, ONE_ACC_LONE_END)
VARIANTS = {
    "as it is": (),
    "q~ in one part": (Q_LOW, Q_WAIT),
    "e^G dv in one part": (DV_LOW,),
    "q~, e^G dv in one part": (Q_LOW, Q_WAIT, DV_LOW),
    "dS in one part": (DS_LOW,),
    "P in one part": (P_LOW,),
    "no P^T do": (NO_P,),
    "all in one part": ONE_PART,
    "one accumulator": ACC,
    "one accumulator, q~, e^G dv in one part": (*ACC, Q_LOW, Q_WAIT, DV_LOW),
    "one accumulator, all in one part": (*ACC, *ONE_PART),
    "dS not to HBM": (DS_TMA,),
    "dS not stored": (DS_STORE,),
    "nothing to HBM": (DS_TMA, DV_STORE),
    "nothing stored": (DS_STORE, DV_STORE, FENCE),
    "e^G do not made": (SCALE_DO,),
    "no exponentials": (EXPONENTIALS,),
    "e^G do made while k dS is multiplied": (EARLY_END, EARLY),
    "the same, e^G dv in one part": (EARLY_END, EARLY, DV_LOW),
    "no ragged chunks": (CLEAR,),
    "two stages": ((SCAN, "STAGES: gl.constexpr = 3", "STAGES: gl.constexpr = 2"),),
}
SHAPES = {  # heads, sequences x tokens, consumers
    "16/32 8x4096": ((16, 32), 8, 4096, 2),
    "16/32 1x8192": ((16, 32), 1, 8192, 1),
    "4/8 1x8192": ((4, 8), 1, 8192, 1),
    "4/8 1x8192, 2": ((4, 8), 1, 8192, 2),
}


def timed(torch, run, reps=5):
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(reps):
            run()
    times = []
    for _ in range(5):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / reps)
    return sorted(times)[2]


def measure(lock):
    import torch

    from gdn.backends.backend import Saved
    from gdn.backends.hopper.backward import plan
    from gdn.backends.hopper.backward.scan import reverse_scan_kernel
    from gdn.backends.triton.launch import allocate
    from gdn.backends.triton.rule import describe as rules
    from gdn.problem import parse

    def scan_of(shape):
        (H, HV), B, T, consumers = shape
        x = {"device": "cuda", "dtype": torch.bfloat16}
        q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, 128, **x), dim=-1) for _ in range(2))
        v, do = (torch.randn(B, T, HV, 128, **x) for _ in range(2))
        g, beta = (torch.full((B, T, HV), value, device="cuda") for value in (-0.05, 0.5))
        p = rules.to_kernel_layout(parse(q=q, k=k, v=v, g=g, beta=beta, backend="hopper"))
        G = -0.05 * (torch.arange(T, device="cuda").double() % 64 + 1)[None, :, None].expand(B, T, HV)
        A_inv = (torch.randn(B * T // 64, HV, 64, 64, **x) / 30).tril(-1)
        saved = Saved(G.contiguous(), A_inv, torch.empty(B * T // 64, HV, 128, 128, **x), None, None, None)
        made = plan._plan(p, None, consumers, None)
        new, late = allocate(p.device, made.specs), allocate(p.device, made.late)
        for launch, tensors in made.steps(p, saved, do, None, new, late):
            launch(*tensors)
            if launch.kernel is reverse_scan_kernel:
                return partial(launch, *tensors)

    small = dict.fromkeys(SHAPES)
    for shape in SHAPES.values():  # compile outside of the lock
        scan_of((shape[0], 1, 128, shape[3]))
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for name, shape in SHAPES.items():
            small[name] = timed(torch, scan_of(shape))
    print(" ".join(f"{us:9.1f}" for us in small.values()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
        sys.exit()
    source = next(Path(x) for x in os.environ["PYTHONPATH"].split(":") if (Path(x) / "gdn").is_dir())
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for i, (name, replacements) in enumerate(VARIANTS.items()):
            root = Path(folder) / str(i)
            shutil.copytree(source, root)
            for file, old, new in replacements:
                path = root / "gdn/backends/hopper/backward" / file
                text = path.read_text()
                assert text.count(old) == 1, (name, old, text.count(old))
                path.write_text(text.replace(old, new))
            env = os.environ | {
                "PYTHONPATH": f"{root}:{os.environ['PYTHONPATH']}",
                "TRITON_CACHE_DIR": f"{folder}/cache{i}",
            }
            command = [sys.executable, __file__, f"{folder}/lock"]
            running[name] = subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        print(" " * 42, " ".join(SHAPES), flush=True)
        for name, process in running.items():
            try:
                out, errors = process.communicate(timeout=90)
                failed = errors[-300:] if process.returncode else ""
            except subprocess.TimeoutExpired:
                process.kill()
                out, failed = "", "HUNG"
            print(f"{name:42s} {out.strip()}{failed}", flush=True)
