"""Decide on a GPU (sm_90) what is left of training: correctness first, then times, what is wrong last.

    PYTHONPATH=src:tests python docs/lab/2026-11-25-training-third-run.py             all parts
    PYTHONPATH=src:tests python docs/lab/2026-11-25-training-third-run.py PART...   check dg times ...

check   errors in 1e-3 of outputs and gradients against autograd through the reference in fp64, reruns with
        other bits (of 10), and whether recompute=True has the bits of a call that keeps its states
dg      error of dg and of its sum over tokens where nothing decays, over seeds
times   us by CUDA-graph replays, L2 warm: forwards (general, fast path, recompute), the pass that recomputes
        the states, backward, each launch; peak memory of a step
cycles  where the gradient kernel waits: clock cycles between points of a strip and of a head, of one CTA
host    us of the host for forward + backward: one call, a stack of 24 calls
slabs   the backward in one pass and in passes of 8 to 32 MiB of dS: bits; us of the backward, of the host, of
        all launches of each kernel; memory that the backward adds

Variants of the gradient kernel are copies of the package with the edits below. Each line runs in a process
of its own with a time limit, so that a kernel that hangs costs one line; processes compile side by side, and
take turns on the GPU where they measure.
"""

import fcntl
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
FOLDER = "gdn/backends/hopper/backward/"
WRONG = ("BAD", "HUNG", "FAILED", "OTHER BITS")
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def stamp(file, anchor, part, event, count="count", before=False):
    """Return the edit that stores the clock at a line, for the first 64 strips (or heads) of CTA 0."""
    line = f"    store_clock(w, {part}, {count}, {event})\n"
    return (file, anchor, line + anchor if before else anchor + line)


# values' strip, values' head, rows' strip, rows' head: the points between which cycles are counted
POINTS = (
    ("values, strip", ("S..dv loaded", "k S", "u", "v_new, k dS", "w free", "w, v_new stored", "E, F")),
    ("values, head end", ("E, F made", "E, F free", "published", "qk, kk", "end")),
    ("rows, strip", ("S..dv loaded", "q S", "do scaled", "w there", "<S, dS>", "MMAs")),
    ("rows, head end", ("E, F there", "MMAs")),
)
CLOCK = [
    (
        "shared.py",
        "@gluon.jit\ndef zero_of(count):",
        '''@gluon.jit
def store_clock(w, PART: gl.constexpr, count, EVENT: gl.constexpr):
    """Store the clock behind the gate terms in HBM."""
    now = gl.inline_asm_elementwise(
        "mov.u32 $0, %clock; // $1", "=r,r", [count], dtype=gl.int32, is_pure=False, pack=1
    )
    place = w.out.shares_ptr + w.problem.items * w.problem.ratio * 640 + (PART * 64 + count) * 16 + EVENT
    gl.store(place, now.to(gl.float32, bitcast=True), mask=(gl.program_id(0) == 0) & (count < 64))


@gluon.jit
def zero_of(count):''',
    ),
    ("values.py", "    TINY,\n", "    TINY,\n    store_clock,\n"),
    ("rows.py", "    arrive,\n", "    store_clock,\n    arrive,\n"),
    stamp(
        "values.py", "    tiles = w.tiles\n    stage = wait_full(count, w.turns.full)\n", 0, 0, before=True
    ),
    stamp("values.py", "    is_token = opaque(gl.arange(0, C, PER_ROW)) < place.length\n", 0, 1),
    stamp("values.py", "    X = v + kS", 0, 2, before=True),
    stamp("values.py", "    # not with k S: the registers", 0, 3, before=True),
    stamp("values.py", "    v_new, kdS = warpgroup_mma_wait(0, deps=(v_new, kdS))\n", 0, 4),
    stamp("values.py", "    w_stage = wait_empty(count, w.turns.w_empty)\n", 0, 5),
    stamp("values.py", "    arrive(count, w.turns.w_full)\n", 0, 6),
    stamp("values.py", "    E, F = warpgroup_mma_wait(0, deps=(E, F))\n", 0, 7),
    stamp("values.py", "    # opaque: else masks of pairs are made", 1, 0, before=True),
    stamp("values.py", "    # the row warpgroup has read E and F of the head before\n", 1, 1),
    stamp("values.py", "    wait_empty(count, w.turns.pairs_empty)\n", 1, 2),
    stamp("values.py", "    arrive(count, w.turns.pairs_full)\n", 1, 3),
    stamp("values.py", "    qk, kk = warpgroup_mma_wait(0, deps=(qk, kk))\n", 1, 4),
    stamp("values.py", "    fence_async_shared()\n    arrive(count, w.turns.head_empty)\n", 1, 5),
    stamp("rows.py", "    tiles = w.tiles\n    stage = wait_full(count, w.turns.full)\n", 2, 0, before=True),
    stamp("rows.py", "    zeros = gl.zeros((C, STRIP), gl.float32, ACC_TOKENS)\n", 2, 1, before=True),
    stamp("rows.py", "    qS = warpgroup_mma_wait(2 if w.D == STRIP else 1, deps=(qS,))\n", 2, 2),
    stamp("rows.py", "    w_stage = wait_full(count, w.turns.w_full)\n", 2, 3, before=True),
    stamp("rows.py", "    dk = warpgroup_mma(tiles.w.index(w_stage)", 2, 4, before=True),
    stamp("rows.py", "    dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))\n    fence", 2, 5, before=True),
    stamp("rows.py", "    arrive(count, w.turns.w_empty)\n", 2, 6, before=True),
    stamp("rows.py", "    wait_full(count, w.turns.pairs_full)\n", 3, 0, before=True),
    stamp("rows.py", "    E = tiles.pairs.index(zero)\n", 3, 1, before=True),
    stamp("rows.py", "    if (count + 1) % w.problem.ratio != 0:\n", 3, 2, before=True),
]
VARIANTS = {"in use": []}  # name: edits (file, old, new) of a copy of the package


def make_copy(edits, folder, name):
    """Write a copy of the package with edits."""
    target = Path(folder) / name.replace(" ", "-").replace(",", "")
    shutil.copytree(SOURCE, target, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in edits:
        path = target / FOLDER / file
        text = path.read_text()
        assert text.count(old) == 1, (name, file, old, text.count(old))
        path.write_text(text.replace(old, new))
    return str(target)


def error(x, y):
    return ((x.double() - y).norm() / y.norm().clamp(min=1e-30)).item() * 1e3


def cases():
    from gdn.testing import Case, packed, rows

    base = Case(sizes=(128, 128), heads=(1, 2), state="wide")
    more = {
        "use_qk_l2norm_in_kernel": True, "raw_gate": "on", "beta": "negative", "state": "narrow",
        "state_v_first": True, "is_strided": True, "is_scaled": True,
    }  # fmt: skip
    return {
        "ragged": replace(base, lengths=rows(129)),
        "no decay": replace(base, lengths=rows(512), gate="none", heads=(2, 4)),
        "slow": replace(base, lengths=rows(640), gate="slow", heads=(2, 4)),
        "mild": replace(base, lengths=rows(512), heads=(2, 4)),
        "packed": replace(base, lengths=packed(70, 0, 33, 128, 300, tail=29), keys="correlated"),
        "options": replace(base, lengths=packed(65, 1, 130), **more),
        "beta of 1": replace(base, lengths=rows(256), gate="none", beta="absent"),
        "identical": replace(base, lengths=rows(129), heads=(1, 4), keys="identical", gate="none"),
        "many": replace(base, lengths=rows(450), heads=(16, 32), state="none"),
    }


def reference(given):
    import torch

    from gdn.testing import accuracy

    wide = given.double()
    leaves = {n: wide.tensors[n].requires_grad_() for n in NAMES if n in wide.tensors}
    o, final = accuracy.reference_rule(**(dict.fromkeys(("g", "beta")) | wide.tensors), **wide.options)
    found = torch.autograd.grad(
        [o, final], list(leaves.values()), [wide.do, wide.dfinal_state], allow_unused=True
    )
    return o, final, [dict(zip(leaves, found, strict=True)).get(n) for n in NAMES]


def same(x, y):
    import torch

    pairs = list(zip(x, y, strict=True))
    return all(a is b is None or (None not in (a, b) and torch.equal(a, b)) for a, b in pairs)


def check(name):
    """Print a line for each forward: errors, reruns with other bits, and the bits of recompute=True."""
    import torch

    from gdn.backends.hopper import rule
    from gdn.backends.hopper.backward import plan
    from gdn.backends.triton.rule import run as chunked
    from gdn.problem import parse
    from gdn.testing import inputs

    given = inputs(cases()[name], torch.bfloat16, device="cuda")
    o, final, expected = reference(given)
    for is_fast in (False, True):
        rule.FAST_PATH = is_fast
        problem = parse(**given.tensors, **given.options, backend="hopper")
        first, S, saved = rule.chunk_forward(problem, True)
        again, S_again, less = rule.chunk_forward(replace(problem, recompute=True), True)
        restored = rule.recompute_saved(replace(problem, recompute=True), less)
        count = problem.num_chunks if problem.cu_seqlens is None else None
        pairs = [(first, again), (S, S_again)]
        if count is not None:
            pairs += list(zip(saved, restored, strict=True))
        is_same = same(*zip(*pairs, strict=True))
        call = partial(plan.chunk_backward, problem, saved, given.do, given.dfinal_state)
        here, other = call(), 0
        if count is None:
            is_same &= same(here, plan.chunk_backward(problem, restored, given.do, given.dfinal_state))
        for _ in range(10):
            other += not (same(here, call()) and torch.equal(first, rule.chunk_forward(problem, True)[0]))
        triton = chunked.chunk_backward(problem, saved, given.do, given.dfinal_state)
        cells, bad = [f"o {error(first, o):.2f} S {error(S, final):.2f}"], ""
        for n, x, y, z in zip(NAMES, here, triton, expected, strict=True):
            if x is None:
                continue
            z = torch.zeros_like(x).double() if z is None else z
            a, b = error(x, z), error(y, z)
            limit = 8.0 if n in ("q", "k", "v", "initial_state") else 6.0
            bad += "" if a < max(1.6 * b, limit) else f" BAD:{n}"
            cells.append(f"d{n} {a:.2f}/{b:.2f}")
        path = "saving fast path" if is_fast else "general path"
        print(
            f"{os.environ['VARIANT']:36s} {name:10s} {path:17s} other bits {other},"
            f" recompute {'same' if is_same else 'OTHER BITS'} | {' '.join(cells)}{bad}",
            flush=True,
        )


def dg(gate):
    """Print the errors of dg over seeds: RMS over tokens, and of the sum over tokens (as dA_log has it)."""
    import torch

    from gdn.backends.hopper import rule
    from gdn.backends.hopper.backward import plan
    from gdn.backends.triton.rule import run as chunked
    from gdn.problem import parse
    from gdn.testing import Case, inputs, rows

    case = Case(gate, sizes=(128, 128), heads=(2, 4), lengths=rows(512)._replace(B=1), state="wide")
    found = {}
    for seed in range(6):
        given = inputs(case, torch.bfloat16, device="cuda", seed=seed)
        problem = parse(**given.tensors, **given.options, backend="hopper")
        expected = reference(given)[2][3]
        for is_fast in (False, True):
            rule.FAST_PATH = is_fast
            saved = rule.chunk_forward(problem, True)[2]
            for name, backend in (("Triton", chunked), ("Gluon", plan)):
                x = backend.chunk_backward(problem, saved, given.do, given.dfinal_state).dg
                gap = (x.double() - expected).sum((0, 1)).norm() / expected.norm()
                key = f"{name}, {'saving fast path' if is_fast else 'general path'}"
                found.setdefault(key, []).append((error(x, expected), 1e3 * gap.item()))
    for key, pairs in found.items():
        rms, sums = (statistics.mean(x) for x in zip(*pairs, strict=True))
        print(f"dg, {gate:5s} {key:28s} RMS {rms:5.2f}   sums over tokens {sums:6.2f}", flush=True)


SIZES = {  # heads, sequences x tokens
    "16/32 1x8192": (16, 32, 1, 8192),
    "16/32 8x4096": (16, 32, 8, 4096),
    "16/32 1x32768": (16, 32, 1, 32768),
    "16/16 8x4096": (16, 16, 8, 4096),
    "16/64 4x8192": (16, 64, 4, 8192),
    "4/8 1x8192": (4, 8, 1, 8192),
    "2/8 8x4096": (2, 8, 8, 4096),
    "2/8 1x32768": (2, 8, 1, 32768),
    "16/32 8x1024": (16, 32, 8, 1024),
    "16/32 64x128": (16, 32, 64, 128),
}
GOALS = {"16/32 1x8192": 600, "16/32 8x4096": 1700, "16/32 1x32768": 2100}


def tensors_of(name, kind="mild"):
    import torch

    H, HV, B, T = SIZES[name]
    gen = torch.Generator("cuda").manual_seed(0)

    def rn(*shape):
        return torch.randn(*shape, generator=gen, device="cuda")

    q, k = (torch.nn.functional.normalize(rn(B, T, H, 128), dim=-1).bfloat16() for _ in range(2))
    v, do = rn(B, T, HV, 128).bfloat16(), rn(B, T, HV, 128).bfloat16()
    g, beta = torch.nn.functional.logsigmoid(rn(B, T, HV)) / (16 if kind == "mild" else 1024), rn(B, T, HV)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta.sigmoid()}
    if kind == "gated":
        given |= {
            "g": rn(B, T, HV), "beta": beta, "A_log": rn(HV), "dt_bias": rn(HV), "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True,
        }  # fmt: skip
    return given, do


def timed(run, reps):
    import torch

    for _ in range(2):
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
    return statistics.median(times)


def launches_of(steps, reps):
    """Return us of each launch of a plan, by kernel; equal kernels are added."""
    line = {}
    for launch, tensors in list(steps):
        launch(*tensors)
        name = launch.kernel.__name__.replace("_kernel", "")
        line[name] = line.get(name, 0.0) + timed(partial(launch, *tensors), reps)
    return "  ".join(f"{n} {t:.1f}" for n, t in line.items())


def times(name, lock):
    """Print the times of all passes of one size; for a variant only those of its gradient kernel."""
    import torch

    from gdn.backends.hopper import rule
    from gdn.backends.hopper.backward import plan
    from gdn.backends.triton.launch import allocate
    from gdn.backends.triton.rule import describe as rules
    from gdn.problem import parse

    variant = os.environ["VARIANT"]
    small, do = tensors_of("16/32 64x128")
    for size, kind in [(name, "mild"), *((name, x) for x in ("slow", "gated") if name == "16/32 8x4096")]:
        given, do = tensors_of(size, kind)
        problem = parse(**given, backend="hopper")
        p = rules.to_kernel_layout(problem)
        less = replace(problem, recompute=True)
        # compile everything before taking the GPU
        forwards = {}
        for is_fast in (False, True):
            rule.FAST_PATH = is_fast
            forwards[is_fast] = rule.chunk_forward(problem, True)[2]
            kept = rule.chunk_forward(less, True)[2]
            rule.recompute_saved(less, kept)
            plan.chunk_backward(problem, forwards[is_fast], do, None)
        rule.FAST_PATH = True
        kept, saved = rule.chunk_forward(less, True)[2], forwards[False]
        torch.cuda.synchronize()
        reps = 4 if name in ("16/32 8x4096", "16/32 1x32768", "16/64 4x8192") else 10
        with open(lock, "w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            backward = timed(lambda: plan.chunk_backward(problem, saved, do, None), reps)  # noqa: B023
            mine = plan.plan_of(p, saved, do, None)
            new, late = allocate(p.device, mine.specs), allocate(p.device, mine.late)
            steps = list(mine.steps(p, saved, do, None, new, late))
            label = f"{size} {kind}"
            if variant != "in use":
                gradients = [s for s in steps if s[0].kernel.__name__ == "gradients_kernel"]
                print(f"{label:20s} {variant:36s} backward {backward:8.1f}  {launches_of(gradients, reps)}")
                continue
            us = {}
            for is_fast in (False, True):
                rule.FAST_PATH = is_fast
                us[is_fast] = timed(lambda: rule.chunk_forward(problem, True), reps)  # noqa: B023
            short = timed(lambda: rule.chunk_forward(less, True), reps)  # noqa: B023
            rule.FAST_PATH = True
            inference = timed(lambda: rule.chunk_forward(problem, False), reps)  # noqa: B023
            again = timed(lambda: rule.recompute_saved(less, kept), reps)  # noqa: B023
            goal = f"  goal {GOALS[name]}" if name in GOALS and kind == "mild" else ""
            print(
                f"{label:20s} step {us[False] + backward:8.1f}{goal}: forward {us[False]:.1f}"
                f" (fast path {us[True]:.1f}, without states {short:.1f}, inference {inference:.1f}),"
                f" states again {again:.1f}, backward {backward:.1f}"
            )
            if kind == "mild":
                print(" " * 21 + launches_of(steps, reps))
                for is_fast in (False, True):
                    rule.FAST_PATH = is_fast
                    made = rule.plan_of(rule.align(p), torch.bfloat16)
                    tensors = allocate(p.device, made.specs)
                    runs = list(made.steps(rule.align(p), tensors))
                    print(f"{'':21s}{'fast path' if is_fast else 'forward'}: {launches_of(runs, reps)}")
                rule.FAST_PATH = True
            print(flush=True, end="")
            del new, late, steps
        del forwards, saved, kept
    if variant == "in use" and name in GOALS:
        memory(name)


def memory(name):
    """Print the peak memory of a step, its inputs included."""
    import torch

    import gdn

    cells = []
    for recompute in (False, True):
        given, do = tensors_of(name)
        leaves = [x.requires_grad_() for x in given.values()]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        o, _ = gdn.chunk_gated_delta_rule(*leaves, recompute=recompute)
        torch.autograd.grad(o, leaves, do)
        torch.cuda.synchronize()
        cells.append(f"{torch.cuda.max_memory_allocated() / 2**20:.0f}")
        del given, do, leaves, o
    print(f"{name:15s} peak memory, MiB: {cells[0]}, recompute=True {cells[1]}", flush=True)


def cycles(lock):
    """Print cycles between points of the gradient kernel, means over the strips (or heads) of CTA 0."""
    import torch

    from gdn.backends.hopper import rule
    from gdn.backends.hopper.backward import plan
    from gdn.backends.triton.launch import allocate
    from gdn.backends.triton.rule import describe as rules
    from gdn.problem import parse

    given, do = tensors_of("16/32 8x4096")
    problem = parse(**given, backend="hopper")
    p, saved = rules.to_kernel_layout(problem), rule.chunk_forward(problem, True)[2]
    made = plan.plan_of(p, saved, do, None)
    new, late = allocate(p.device, made.specs), allocate(p.device, made.late)
    shares = new[8]
    larger = torch.zeros(shares.numel() + 4 * 64 * 16, device="cuda")
    new[8] = larger
    with open(lock, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        for launch, tensors in made.steps(p, saved, do, None, new, late):
            for _ in range(2 if launch.kernel.__name__ == "gradients_kernel" else 1):
                launch(*tensors)
        torch.cuda.synchronize()
    stamps = larger[shares.numel() :].view(torch.int32).view(4, 64, 16).cpu().long() & 0xFFFFFFFF
    for part, (title, names) in enumerate(POINTS):
        # the first strips wait for HBM, and CTA 0 has more than 64 strips and heads
        rows = stamps[part, 8:64]
        spans = (rows[:, 1 : len(names) + 1] - rows[:, : len(names)]) % 2**32
        per = (rows[-1, 0] - rows[0, 0]) % 2**32 / (len(rows) - 1)
        cells = ", ".join(f"{n} {x:.0f}" for n, x in zip(names, spans.double().mean(0).tolist(), strict=True))
        print(f"{os.environ['VARIANT']:36s} {title:17s} every {per:.0f}: {cells}", flush=True)


def host(lock):
    """Print us of the host for a forward and backward of a small problem, which the GPU does not delay."""
    import torch

    import gdn

    H, HV, B, T = 16, 32, 1, 512
    gen = torch.Generator("cuda").manual_seed(0)

    def rn(*shape):
        return torch.randn(*shape, generator=gen, device="cuda")

    q, k = (rn(B, T, H, 128).bfloat16().requires_grad_() for _ in range(2))
    v = rn(B, T, HV, 128).bfloat16().requires_grad_()
    g, beta = (-rn(B, T, HV).abs()).requires_grad_(), rn(B, T, HV).sigmoid().requires_grad_()
    leaves = [q, k, v, g, beta]

    def step(layers, **options):
        o = v
        for _ in range(layers):
            o, _ = gdn.chunk_gated_delta_rule(
                q, k, o, g, beta, use_qk_l2norm_in_kernel=True, backend="hopper", **options
            )
        torch.autograd.grad(o, leaves, torch.ones_like(o))

    def measure(layers, **options):
        for _ in range(3):
            step(layers, **options)
        found = []
        for _ in range(7):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(4):
                step(layers, **options)
            found.append((time.perf_counter() - began) / 4 / layers * 1e6)
        torch.cuda.synchronize()
        return statistics.median(found)

    measure(1), measure(1, recompute=True)
    with open(lock, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        for layers in (1, 24):
            for is_threaded in (True, False):
                with torch.autograd.set_multithreading_enabled(is_threaded):
                    x, y = measure(layers), measure(layers, recompute=True)
                thread = "autograd's thread" if is_threaded else "the caller's thread"
                cells = f"us a call: {x:.0f}, recompute=True {y:.0f}"
                print(f"host, {layers:2d} calls, {thread:20s} {cells}", flush=True)


SLAB_SIZES = (
    "16/32 8x4096", "16/32 8x4096 packed", "16/32 1x32768", "16/64 4x8192", "2/8 8x4096",
)  # fmt: skip


def slabs(name, lock):
    """Print bits, times and memory of the backward in one pass and in passes, by the dS of a pass."""
    import torch

    from gdn.backends.hopper import rule
    from gdn.backends.hopper.backward import cost, plan
    from gdn.backends.triton.launch import allocate
    from gdn.backends.triton.rule import describe as rules
    from gdn.problem import parse

    size = name.removesuffix(" packed")
    given, do = tensors_of(size)
    if size != name:
        _, _, B, T = SIZES[size]
        given, do = {n: x.flatten(0, 1)[None] for n, x in given.items()}, do.flatten(0, 1)[None]
        given["cu_seqlens"] = torch.arange(B + 1, device="cuda") * T
    problem = parse(**given, backend="hopper")
    p, saved = rules.to_kernel_layout(problem), rule.chunk_forward(problem, True)[2]
    first = plan.chunk_backward(problem, saved, do, None)
    mib = {"one pass": 24, **{f"{x} MiB": x for x in (8, 16, 24, 32)}}
    bits = {}

    def select(kind):
        cost.SLABS, cost.SLAB_BYTES, cost.LEAST_PASSES = kind != "one pass", mib[kind] << 20, 2

    for kind in mib:
        select(kind)
        other = sum(not same(first, plan.chunk_backward(problem, saved, do, None)) for _ in range(5))
        bits[kind] = "same bits" if other == 0 else f"OTHER BITS {other} of 5"
    torch.cuda.synchronize()
    with open(lock, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        for kind in (*mib, "one pass"):
            select(kind)
            us = timed(lambda: plan.chunk_backward(problem, saved, do, None), 4)
            host = []
            for _ in range(5):
                torch.cuda.synchronize()
                began = time.perf_counter()
                plan.chunk_backward(problem, saved, do, None)
                host.append((time.perf_counter() - began) * 1e6)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            plan.chunk_backward(problem, saved, do, None)
            torch.cuda.synchronize()
            memory = (torch.cuda.max_memory_allocated() - before) / 2**20
            mine = plan.plan_of(p, saved, do, None)
            new, late = allocate(p.device, mine.specs), allocate(p.device, mine.late)
            launches = {}
            for launch, tensors in mine.steps(p, saved, do, None, new, late):
                launch(*tensors)
                launches.setdefault(launch.kernel.__name__.replace("_kernel", ""), []).append(
                    (launch, tensors)
                )

            def run(pairs):
                for launch, tensors in pairs:
                    launch(*tensors)

            cells = [f"{n} x{len(x)} {timed(partial(run, x), 4):.1f}" for n, x in launches.items()]
            print(
                f"{name:20s} {kind:8s} {bits[kind]}  backward {us:8.1f}  host {statistics.median(host):6.0f}"
                f"  {memory:6.0f} MiB  {'  '.join(cells)}",
                flush=True,
            )
            del new, late, launches


PARTS = {"check": check, "dg": dg, "times": times, "cycles": cycles, "host": host, "slabs": slabs}


def jobs_of(parts, folder):
    """Return (arguments, variant, path of the package, seconds) of each process, in order."""
    lock = f"{folder}/lock"
    Path(lock).touch()
    copies = {name: make_copy(edits, folder, name) for name, edits in VARIANTS.items()}
    clocked = {
        name: make_copy([*edits, *CLOCK], folder, f"clocks {name}")
        for name, edits in VARIANTS.items()
        if not edits
    }
    jobs = []
    for part in parts:
        if part == "check":
            jobs += [(("check", c), n, path, 120) for n, path in copies.items() for c in cases()]
        elif part == "dg":
            jobs += [(("dg", gate), "in use", copies["in use"], 120) for gate in ("none", "slow")]
        elif part == "times":
            large = [n for n in SIZES if n in GOALS]
            jobs += [(("times", s, lock), "in use", copies["in use"], 240) for s in SIZES]
            others = [n for n in copies if n != "in use"]
            jobs += [(("times", s, lock), n, copies[n], 240) for n in others for s in large[:2]]
        elif part == "slabs":
            jobs += [(("slabs", s, lock), "in use", copies["in use"], 120) for s in SLAB_SIZES]
        elif part == "cycles":
            jobs += [(("cycles", lock), n, path, 120) for n, path in clocked.items()]
        else:
            jobs += [((part, lock), "in use", copies["in use"], 120)]
    return jobs


def main(parts):
    import torch

    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    sys.path.insert(0, str(SOURCE))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(8) as pool:

        def run(job):
            arguments, variant, path, limit = job
            path = os.pathsep.join((path, str(SOURCE.parent / "tests"), os.environ.get("PYTHONPATH", "")))
            try:
                done = subprocess.run(
                    [sys.executable, __file__, "--one", *arguments], timeout=limit, capture_output=True,
                    text=True, env=os.environ | {"PYTHONPATH": path, "VARIANT": variant},
                )  # fmt: skip
            except subprocess.TimeoutExpired as e:
                return f"{variant}: {arguments} HUNG {(e.stdout or b'')[-300:]!r}\n"
            return done.stdout + (
                f"{variant}: {arguments} FAILED {done.stderr[-1200:]}\n" if done.returncode else ""
            )

        # checks of a variant come before its times; a table of everything that is wrong comes last
        wrong = []
        for part in parts:
            for text in pool.map(run, jobs_of([part], tempfile.mkdtemp(dir=folder))):
                print(text, end="", flush=True)
                wrong += [x for x in text.splitlines() if any(y in x for y in WRONG)]
        print("\nwrong:", *(wrong or ["nothing"]), sep="\n  ", flush=True)


if __name__ == "__main__":
    if "--one" in sys.argv:
        part, *arguments = sys.argv[sys.argv.index("--one") + 1 :]
        PARTS[part](*arguments)
    else:
        main(sys.argv[1:] or list(PARTS))
