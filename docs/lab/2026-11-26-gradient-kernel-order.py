"""Compare variants of the gradient kernel with the one in use, in one process on a GPU (sm_90).

    PYTHONPATH=src:tests python docs/lab/2026-11-26-gradient-kernel-order.py [NAME...]

NAME: one of VARIANTS (all by default), or /path/of/another/tree/src:128, its kernel with 128 registers.

A variant is a copy of gdn/backends/hopper/backward under another package name, with edits; or another tree's
with its own maxnreg. All run on the same tensors; graphs are replayed in turn. First come small problems of
every kind (l2norm, packed, K = V = 64, dr in the place of dv): bits beside the kernel in use, 10 reruns.
Compile first where time is short: each binary takes 5 to 15 s.
"""

import importlib
import statistics
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

SOURCE = Path(__file__).parents[2] / "src"
FOLDER = "gdn/backends/hopper/backward"
FILES = ("gradients", "values", "pairs", "rows", "shared", "load")
REGISTERS = 168  # of the kernel in use
DEFERRED = [  # k S of a head's second strip is issued before E and F of the first are there
    (
        "values.py",
        "    kS = issue_state_mma(k, w, stage, zeros)\n",
        "    kS = issue_state_mma(k, w, stage, zeros)\n"
        "    E, F = warpgroup_mma_wait(2 if w.D == STRIP else 1, deps=(sums.E, sums.F))\n"
        "    if strip > 0:\n        fence_async_shared()\n        arrive(count - 1, w.turns.empty)\n",
    ),
    ("values.py", "warpgroup_mma(do, hi, sums.E,", "warpgroup_mma(do, hi, E,"),
    ("values.py", "warpgroup_mma(d_tile, hi, sums.F,", "warpgroup_mma(d_tile, hi, F,"),
    (
        "values.py",
        "    E, F = warpgroup_mma_wait(0, deps=(E, F))\n    fence_async_shared()\n"
        "    arrive(count, w.turns.empty)\n",
        "",
    ),
    (
        "values.py",
        "    # opaque: else masks of pairs are made",
        "    E, F = warpgroup_mma_wait(2, deps=(sums.E, sums.F))\n    fence_async_shared()\n"
        "    arrive((count + 1) * (w.D // STRIP) - 1, w.turns.empty)\n"
        "    # opaque: else masks of pairs are made",
    ),
    ("values.py", "    E = sums.E\n    F = sums.F\n", ""),
]
LOOP = [  # <S, dS> in a loop that LLVM does not unroll: 182 instructions fewer in the row warpgroup's code
    (
        "rows.py",
        "    for n in gl.static_range(D // PIECE):\n"
        "        x = S.slice(n * PIECE, PIECE).load(TOKEN_ROWS).to(gl.float32)\n"
        "        through += x * dS.slice(n * PIECE, PIECE).load(TOKEN_ROWS).to(gl.float32)\n",
        "    S = recast(S, gl.bfloat16, [D // PIECE, PIECE, STRIP], BF16_TILE)\n"
        "    dS = recast(dS, gl.bfloat16, [D // PIECE, PIECE, STRIP], BF16_TILE)\n"
        "    for n in range(D // PIECE + zero):\n"
        "        x = S.index(n).load(TOKEN_ROWS).to(gl.float32)\n"
        "        through += x * dS.index(n).load(TOKEN_ROWS).to(gl.float32)\n",
    ),
    ("rows.py", "def add_through(S, dS, through, D:", "def add_through(S, dS, through, zero, D:"),
    ("rows.py", "(tiles.S.index(stage), dS, through, w.D)",
     "(tiles.S.index(stage), dS, through, zero_of(count), w.D)"),
    ("rows.py", "    opaque,\n", "    opaque,\n    recast,\n"),
    ("rows.py", "ACC_TOKENS, PER_ROW, TOKEN_ROWS\n", "ACC_TOKENS, BF16_TILE, PER_ROW, TOKEN_ROWS\n"),
]  # fmt: skip
VARIANTS = {"deferred": DEFERRED, "loop": LOOP, "both": [*DEFERRED, *LOOP]}
SIZES = {  # heads, sequences x tokens
    "16/32 8x4096": (16, 32, 8, 4096),
    "16/32 1x8192": (16, 32, 1, 8192),
    "16/32 1x32768": (16, 32, 1, 32768),
    "2/8 1x32768": (2, 8, 1, 32768),
}


def kernel_of(name, folder):
    """Import a variant's kernel from a copy of its files; return it and its registers a thread."""
    tree, _, registers = name.partition(":") if name.startswith("/") else (SOURCE, "", REGISTERS)
    package = f"variant_{len(list(Path(folder).iterdir()))}"
    target = Path(folder) / package
    target.mkdir()
    texts = {f"{n}.py": p.read_text() for n in FILES if (p := Path(tree) / FOLDER / f"{n}.py").exists()}
    for file, old, new in VARIANTS.get(name, []):
        assert texts[file].count(old) == 1, (name, file, old)
        texts[file] = texts[file].replace(old, new)
    for file, text in texts.items():
        for n in FILES:
            text = text.replace(f"gdn.backends.hopper.backward.{n} ", f"{package}.{n} ")
        (target / file).write_text(text)
    return importlib.import_module(f"{package}.gradients").gradients_kernel, int(registers)


def with_kernel(launch, kernel, registers):
    """Return the launch of another kernel; dataclasses.replace would keep the first one's binary."""
    given = (launch.grid, launch.scalars, launch.constants, launch.num_warps, launch.num_stages)
    return type(launch)(kernel, *given, {"maxnreg": registers}, launch.num_descriptors)


def differs(x, y):
    return any(
        (a is None) != (b is None) or (a is not None and not torch.equal(a, b))
        for a, b in zip(x, y, strict=True)
    )


def check(kernels, device="cuda", forward=None):
    """Print for each kind of problem which variants have other bits than the kernel in use."""
    from gdn.backends.hopper import rule
    from gdn.backends.hopper.backward import plan
    from gdn.backends.triton.launch import PlanCache
    from gdn.problem import parse
    from gdn.testing import Case, inputs, packed, rows

    main, whole = plan.gradients_kernel, plan.Launch
    base = Case(sizes=(128, 128), heads=(1, 2), state="wide")
    options = replace(
        base, lengths=packed(65, 1, 130), use_qk_l2norm_in_kernel=True, raw_gate="on", beta="negative",
        state="narrow", state_v_first=True, is_strided=True, is_scaled=True,
    )  # fmt: skip
    cases = {
        "ragged": replace(base, lengths=rows(129), heads=(2, 4)),
        "options": options,
        "K = V = 64": replace(options, sizes=(64, 64)),
        "dr": options,
        "many": replace(base, lengths=rows(200), heads=(16, 32), state="none"),
    }
    plan.compile_ahead = lambda *_: None
    for name, case in cases.items():
        plan.HAS_SCAN = name != "dr"
        given = inputs(case, torch.bfloat16, device=device)
        problem = parse(**given.tensors, **given.options, backend="hopper")
        saved = (forward or rule.chunk_forward)(problem, True)[2]
        found = {}
        for variant, (kernel, registers) in {"in use": (main, REGISTERS), **kernels}.items():

            def launch(k, *args, kernel=kernel, registers=registers, **kw):
                if k is main:
                    k, kw["options"] = kernel, {"maxnreg": registers}
                return whole(k, *args, **kw)

            plan.Launch, plan._plans = launch, PlanCache()
            call = partial(plan.chunk_backward, problem, saved, given.do, given.dfinal_state)
            found[variant] = [call() for _ in range(10 if device == "cuda" else 1)]
        other = {v: sum(differs(found["in use"][0], y) for y in x) for v, x in found.items()}
        print(f"{name:12s} calls with other bits: {other}", flush=True)
    plan.Launch, plan._plans, plan.HAS_SCAN = whole, PlanCache(), True


def times(kernels, size):
    """Print us of each variant's gradient kernel, and whether it has the bits of the one in use."""
    from gdn.backends.hopper import rule
    from gdn.backends.hopper.backward import plan
    from gdn.backends.triton.launch import allocate
    from gdn.backends.triton.rule import describe as rules
    from gdn.problem import parse

    H, HV, B, T = SIZES[size]
    gen = torch.Generator("cuda").manual_seed(0)

    def rn(*shape):
        return torch.randn(*shape, generator=gen, device="cuda")

    q, k = (torch.nn.functional.normalize(rn(B, T, H, 128), dim=-1).bfloat16() for _ in range(2))
    v, do = rn(B, T, HV, 128).bfloat16(), rn(B, T, HV, 128).bfloat16()
    g, beta = torch.nn.functional.logsigmoid(rn(B, T, HV)) / 16, rn(B, T, HV).sigmoid()
    problem = parse(q=q, k=k, v=v, g=g, beta=beta, backend="hopper")
    p, saved = rules.to_kernel_layout(problem), rule.chunk_forward(problem, True)[2]
    made = plan.plan_of(p, saved, do, None)
    new, late = allocate(p.device, made.specs), allocate(p.device, made.late)
    for launch, tensors in made.steps(p, saved, do, None, new, late):
        launch(*tensors)
        if launch.kernel is plan.gradients_kernel:
            break
    outputs = tensors[-4:]  # dq, dk, dv and gate terms, of which some rows stay unwritten
    first, graphs, cells = [x.clone() for x in outputs], {}, []
    for variant, (kernel, registers) in {"in use": (plan.gradients_kernel, REGISTERS), **kernels}.items():
        run, other = partial(with_kernel(launch, kernel, registers), *tensors), 0
        for _ in range(10):
            outputs[0].fill_(7.0), outputs[1].fill_(7.0)
            run()
            other += differs(first, outputs)
        graphs[variant] = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graphs[variant]):
            for _ in range(4):
                run()
        cells.append(f"{variant}: {other} of 10 reruns with other bits")
    found = {variant: [] for variant in graphs}
    for _ in range(9):
        for variant, graph in graphs.items():
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            graph.replay()
            b.record()
            torch.cuda.synchronize()
            found[variant].append(a.elapsed_time(b) * 1e3 / 4)
    cells += [f"{variant} {statistics.median(x):.1f} us" for variant, x in found.items()]
    print(f"{size:14s} {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        kernels = {name: kernel_of(name, folder) for name in sys.argv[1:] or VARIANTS}
        check(kernels)
        for size in SIZES:
            times(kernels, size)
