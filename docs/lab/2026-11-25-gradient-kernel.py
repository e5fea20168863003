"""Time variants of the gradient kernel on an sm_90 GPU, each a patched copy of the package.

    PYTHONPATH=src python docs/lab/2026-11-25-gradient-kernel.py [variant ...]

Each variant runs in a process of its own with a time limit, on random inputs; all compile side by side and
take turns on the GPU by a file lock. Then some of the checks of 2026-11-25-hopper-backward.py run, too.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
FOLDER = "gdn/backends/hopper/backward/"


def sub(file, old, new=""):
    """Return the edit that puts `new` in the place of `old`."""
    return (file, old, new)


def skip(file, name, new):
    """Return the edit that ends a function before its work."""
    text = (SOURCE / FOLDER / file).read_text()
    begin = text.index(f"def {name}(")
    head = text[begin : text.index('"""\n', text.index('"""', begin) + 3) + 4]
    return (file, head, f"{head}{new}\n\n\n@gluon.jit\ndef unused_{head[4:]}")


FINISH = """    wait_empty(count, w.turns.pairs_empty)
    fence_async_shared()
    arrive(count, w.turns.pairs_full)
    arrive(count, w.turns.head_empty)"""
ROWS = """    wait_full(count, w.turns.full)
    arrive(count, w.turns.empty)
    wait_full(count, w.turns.dS_full)
    wait_full(count, w.turns.v_new_full)
    arrive(count, w.turns.v_new_empty)
    arrive(count, w.turns.dS_empty)
    return sums, entering, leaving"""
PAIRS = """    wait_full(count, w.turns.full)
    wait_full(count, w.turns.v_new_full)
    wait_full(count, w.turns.dS_full)
    arrive(count, w.turns.dS_empty)
    arrive(count, w.turns.v_new_empty)
    arrive(count, w.turns.empty)
    return E, F, through"""
NO_THROUGH = [
    sub(
        "pairs.py",
        "through = add_through(tiles.S.index(stage), tiles.dS.index(dS_stage), through, w.D)",
        "through = through",
    )
]
NO_LO_ROWS = [sub("rows.py", "    y = warpgroup_mma(lo, half, y, is_async=True)\n")]
NO_LO_PAIRS = [sub("pairs.py", "    E = warpgroup_mma(do, lo, E, is_async=True)\n")]
NO_TAIL = [
    sub("rows.py", "    dq_l, dq_r, dk_l, dk_r = warpgroup_mma_wait(0, deps=(dq_l, dq_r, dk_l, dk_r))\n"),
    sub("rows.py", "    dq_l = warpgroup_mma(E, k.slice(0, STRIP, 1), sums.dq_left, is_async=True)\n"),
    sub("rows.py", "    dq_r = warpgroup_mma(E, k.slice(STRIP, STRIP, 1), sums.dq_right, is_async=True)\n"),
    sub("rows.py", "    dk_l = multiply_pairs(E, F, q, k, 0, sums.dk_left)\n"),
    sub("rows.py", "    dk_r = multiply_pairs(E, F, q, k, 1, sums.dk_right)\n"),
    sub(
        "rows.py",
        "    return Halves(dq_l, dq_r, dk_l, dk_r)\n\n\n@gluon.jit\ndef multiply_pairs",
        "    return sums\n\n\n@gluon.jit\ndef multiply_pairs",
    ),
]
NO_ROWS = [skip("rows.py", "over_strip", ROWS)]
NO_PAIRS = [skip("pairs.py", "over_strip", PAIRS)]
NO_FINISH = [skip("pairs.py", "finish_head", FINISH)]
VARIANTS = {
    "base": [],
    "no <S, dS>": NO_THROUGH,
    "no lo in dk": NO_LO_ROWS,
    "no lo": [*NO_LO_ROWS, *NO_LO_PAIRS],
    "no lo, no <S, dS>": [*NO_LO_ROWS, *NO_LO_PAIRS, *NO_THROUGH],
    "no tail MMAs": NO_TAIL,
    "no strips of rows": NO_ROWS,
    "no rows": [*NO_ROWS, *NO_TAIL],
    "no strips of pairs": NO_PAIRS,
    "no pairs": [*NO_PAIRS, *NO_FINISH, *NO_TAIL],
    "values only": [*NO_PAIRS, *NO_FINISH, *NO_TAIL, *NO_ROWS],
}
CHECKS = ("no decay", "mild", "packed", "options", "many")


def make_copy(name, folder):
    """Write the package with a variant's edits."""
    target = Path(folder) / name
    shutil.copytree(SOURCE, target)
    for file, old, new in VARIANTS[name]:
        path = target / FOLDER / file
        text = path.read_text()
        assert text.count(old) == 1, (name, file, old)
        path.write_text(text.replace(old, new))
    return target


def launch_of(H, HV, B, T, device):
    """Return the launch of the gradient kernel on random inputs."""
    import torch

    from gdn.backends.hopper.backward.gradients import gradients_kernel
    from gdn.backends.hopper.backward.plan import _rows, _states, _tokens
    from gdn.backends.hopper.descriptors import FACTOR_ROWS, make_descriptor
    from gdn.backends.hopper.scan.operands import BF16_TILE
    from gdn.backends.triton.launch import Launch

    gen = torch.Generator(device).manual_seed(0)
    D, n = 128, B * (T // 64)

    def rn(*shape):
        x = torch.empty(*shape, dtype=torch.bfloat16, device=device)
        return x.normal_(generator=gen) * 0.1

    q, k, dq, dk = (rn(B, T, H, D) for _ in range(4))
    v, do, dv = (rn(B, T, HV, D) for _ in range(3))
    S, dS = rn(n, HV, D, D), rn(n, HV, D, D)
    A_inv = rn(n, HV, 64, 64)
    factors = torch.rand(n, HV, 8, 64, device=device)
    shares = torch.zeros(n * HV * 640, device=device)
    A_inv_d = make_descriptor(A_inv.view(-1, 64), (64, 64), BF16_TILE.value)
    factors_d = make_descriptor(factors.view(-1, 64), (8, 64), FACTOR_ROWS)
    tokens = [_tokens(x) for x in (q, k, v, do, dv)]
    tensors = (
        *tokens,
        _states(S),
        _states(dS),
        A_inv_d,
        factors_d,
        _rows(dq),
        _rows(dk),
        None,
        dq,
        dk,
        dv,
        shares,
    )
    items = n * H
    launch = Launch(
        gradients_kernel, min(items, 132), (T, HV, HV // H, T // 64, items),
        {"NORM": False, "GIVEN_DR": False, "D": D}, 4, options={"maxnreg": 128}, num_descriptors=11,
    )  # fmt: skip
    return launch, tensors


def timed(run, reps=10):
    import torch

    for _ in range(3):
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


def one(name, lock):
    """Time one variant in this process."""
    import torch

    launch, tensors = launch_of(16, 32, 1, 256, "cuda")
    launch(*tensors)
    torch.cuda.synchronize()
    with open(lock, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        cells = []
        for H, HV, B, T in ((16, 32, 1, 8192), (16, 32, 8, 4096)):
            launch, tensors = launch_of(H, HV, B, T, "cuda")
            cells.append(f"{H}/{HV} {B}x{T} {timed(lambda: launch(*tensors)):7.1f}")  # noqa: B023
        print(f"{name:20s} {'   '.join(cells)}", flush=True)


def check(name):
    """Compare the gradients of a case with the reference in fp64."""
    script = Path(__file__).with_name("2026-11-25-hopper-backward.py")
    path = f"{SOURCE}:{SOURCE.parent / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    try:
        done = subprocess.run(
            [sys.executable, str(script), "--one", name], timeout=90, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{name}: HUNG\n"
    return done.stdout + (f"{name}: FAILED {done.stderr[-1500:]}\n" if done.returncode else "")


def main(names):
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(14) as pool:
        lock = f"{folder}/lock"
        Path(lock).touch()

        def run(name):
            path = f"{make_copy(name, folder)}:{os.environ.get('PYTHONPATH', '')}"
            try:
                done = subprocess.run(
                    [sys.executable, __file__, "--one", name, lock],
                    timeout=90, capture_output=True, text=True,
                    env=os.environ | {"PYTHONPATH": path},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"{name}: HUNG\n"
            return done.stdout + (f"{name}: FAILED {done.stderr[-1500:]}\n" if done.returncode else "")

        for text in pool.map(run, names):
            print(text, end="", flush=True)
        for text in pool.map(check, CHECKS):
            print(text, end="", flush=True)


if __name__ == "__main__":
    if "--one" in sys.argv:
        one(*sys.argv[2:])
    else:
        main(sys.argv[1:] or list(VARIANTS))
