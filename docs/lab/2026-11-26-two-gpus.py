"""Check and time context parallelism on two GPUs within five minutes: python docs/lab/2026-11-26-two-gpus.py

The cases and the sizes are those of the script of 2026-11-25, beside this one; what differs:

First processes compile the kernels of all cases side by side, one case and rank each, on torch's fake process
group, which sends nothing. The two ranks then find the kernels in Triton's cache on disk, so a case takes
the time of its runs. The cases are in the order of their importance, each within its own time limit; an error
or a time limit costs the rest of that case alone. Four further cases, and three that differ:

    ideas      one call without each of the changes that shorten the exchange of two ranks
    nodes      calls with `exchange="nodes"`, one GPU a node (mesh 2x1) and one node of two (1x2); `gather`
    graph      CUDA graphs of a forward and a step with a context
    curve      losses in bf16 (autocast), by layout, and on one GPU with `triton` named
    profile    a forward alone
    exchange   `Machine.host` is no longer a collective's
    fla        autotuning within 30 ms a configuration, compiled before; its refusal of its backward with
               Triton 3.4 to 3.7.0 on Hopper ("incorrect results") is left out, so that its time can be read

`--cpu` runs every case with gloo at toy sizes; `--only`, `--seconds` as before; `--no-warm` compiles in the
cases.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from unittest import mock

BEGAN = time.time()
spec = importlib.util.spec_from_file_location("two_gpus", Path(__file__).with_name("2026-11-25-two-gpus.py"))
base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)
base.__file__ = __file__  # the ranks run this script
base.START = 90

WARM = 85  # seconds that compiling takes at most
FLA_SHARES = 20
# case, backend, dtype, seconds at most
RUNS = [
    ("scale", "auto", "bfloat16", 50), ("graph", "auto", "bfloat16", 25), ("fla", "auto", "bfloat16", 60),
    ("ideas", "auto", "bfloat16", 20), ("layers", "auto", "bfloat16", 25),
    ("profile", "auto", "bfloat16", 20), ("check", "hopper", "bfloat16", 40),
    ("nodes", "auto", "bfloat16", 15), ("exchange", "auto", "bfloat16", 10),
    ("model", "auto", "float32", 30), ("curve", "auto", "bfloat16", 30),
    ("protocols", "auto", "bfloat16", 20), ("check", "triton", "bfloat16", 40),
]  # fmt: skip
CPU_RUNS = [
    ("scale", "auto", "float32", 60), ("check", "eager", "float64", 90), ("model", "auto", "float32", 60),
    ("fla", "auto", "float32", 20), ("ideas", "auto", "float32", 30), ("nodes", "auto", "float32", 30),
    ("curve", "auto", "float32", 90), ("layers", "auto", "float32", 40), ("profile", "auto", "float32", 30),
    ("exchange", "auto", "float32", 30),
]  # fmt: skip
STEPS = 40  # of the curve


def nodes(r):
    """Time calls by nodes of one and of two GPUs beside `gather`, and what the model says."""
    from torch.distributed.device_mesh import init_device_mesh

    from gdn.distributed import cost

    contexts, kind = {"gather": r.context(exchange="gather")}, "cpu" if r.cpu else "cuda"
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("nodes", "ranks"))
        contexts[f"nodes {shape[0]}x{shape[1]}"] = r.gdn.ContextParallel(mesh, exchange="nodes")
    runs = {name: base.step_of(r, r.T // 2, context, r.rank) for name, context in contexts.items()}
    machine = cost.Machine(node=1, latency_between=8e-6, bandwidth_between=450e9)
    told = cost.exchange_times(cost.Form(*r.heads), 2, "nodes", machine)
    yield f"nodes 2x1 predicted exchange: {1e6 * told.forward:.0f}, {1e6 * told.backward:.0f} us"
    for what, i in (("train", 0), ("forward", 1)):
        for how, count in (("one call", 1), (f"{base.STACK} in a row", base.STACK)):

            def repeated(run, count=count):
                return lambda: [run() for _ in range(count)]

            times = r.by_turns([repeated(pair[i]) for pair in runs.values()], 2, 0.25)
            text = ", ".join(f"{n} {x / count:.3f}" for n, x in zip(runs, times, strict=True))
            yield f"nodes {what} {how}, ms: {text}"


def ideas(r):
    """Time one forward and one step with and without what shortens an exchange of two ranks, by turns."""
    from gdn.backends.triton.launch.launches import LaunchSequence
    from gdn.distributed import exchange, plan

    def one_by_one(sequence, tensors):
        for launch, given in sequence.steps(tensors):
            launch(*given)

    off = {
        "all": [],
        "N | M": [(plan, "Borders", lambda *rows: borders(*rows[:2]))],
        "a fold of one": [(exchange.Gather, "_has_two_runs", False)],
        "launches one by one": [(LaunchSequence, "__call__", one_by_one)],
    }
    off["none of them"] = [x for patches in off.values() for x in patches]
    borders, found = plan.Borders, {name: [] for name in off}
    for _ in range(3):
        for name, patches in off.items():
            with contextlib.ExitStack() as stack:
                for owner, attribute, value in patches:
                    stack.enter_context(mock.patch.object(owner, attribute, value))
                plan.make_plan.cache_clear()
                step, forward = base.step_of(r, r.T // 2, r.context(exchange="gather"), r.rank)
                found[name].append([r.median(run, 0.25) for run in (forward, step)])
            plan.make_plan.cache_clear()
    for name, rows in found.items():
        ms = [sorted(column)[1] for column in zip(*rows, strict=True)]
        yield f"ideas {'' if name == 'all' else 'with '}{name}: forward {ms[0]:.3f}, step {ms[1]:.3f} ms"


def graph(r):
    """Record a forward and a step in a CUDA graph: bits on other inputs, times without the host."""
    if r.cpu:
        yield "graph: needs a GPU"
        return
    torch = r.torch
    for name in ("one GPU", "gather", "owner"):
        context = None if name == "one GPU" else r.context(exchange=name)
        x, other = (r.inputs(r.T // 2, r.heads, seed) for seed in (r.rank, r.rank + 5))
        do = r.gradient(x[2])
        options = {"use_qk_l2norm_in_kernel": True, "backend": r.backend, "cp_context": context}

        def forward(x=x, options=options):
            with torch.no_grad():
                return (r.gdn.chunk_gated_delta_rule(*x, **options)[0],)

        def step(x=x, do=do, options=options):
            leaves = [t.detach().requires_grad_() for t in x]
            o, _ = r.gdn.chunk_gated_delta_rule(*leaves, **options)
            return (o.detach(), *torch.autograd.grad(o, leaves, do))

        text = []
        for what, run in (("forward", forward), ("step", step)):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            r.sync()
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
                out = run()
            kept = [t.clone() for t in x]
            for a, b in zip(x, other, strict=True):
                a.copy_(b)
            recorded.replay()
            r.sync()
            found = [t.clone() for t in out]
            is_same = r.worst(float(not all(map(torch.equal, found, run())))) == 0
            for a, b in zip(x, kept, strict=True):
                a.copy_(b)
            ms = r.median(recorded.replay, 0.3), r.median(run, 0.3)
            text.append(f"{what} {ms[0]:.3f} ms (one call {ms[1]:.3f}), bits of eager {is_same}")
            del recorded, out
        yield f"graph {name} 1x{r.T // 2} a rank: {'; '.join(text)}"


def curve(r):
    """Print the losses of each layout in bf16: one GPU, and two; and one GPU with `triton` alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch, kind = r.torch, "cpu" if r.cpu else "cuda"
    width, dim, T = (32, 8, 96) if r.cpu else (256, 64, 1024)
    steps = 4 if r.cpu else STEPS

    def make():
        model = base.hybrid(r, width, dim)
        # around the forward alone: autocast keeps copies of weights to its end
        forward = torch.autocast(kind, torch.bfloat16)(model.forward)
        model.forward = lambda *inputs: forward(*inputs).float()
        return model

    def run(name, model, context, **options):
        return name, base.losses(r, model, T, context, num_steps=steps, **options)

    results = [run("one GPU", make(), None)]
    if not r.cpu:
        with mock.patch.dict(os.environ, {"GDN_BACKEND": "triton"}):
            results.append(run("one GPU, triton", make(), None))
    for exchange, order in (("gather", "contiguous"), ("owner", "headtail")):
        context = r.context(exchange=exchange, order=order, num_tokens=T)
        results.append(run(f"cp 2 {exchange} {order}", make(), context))
    split = r.gdn.distributed.tensor_parallel(make(), init_device_mesh(kind, (2,), mesh_dim_names=("tp",)))
    results.append(run("tp 2", split, None))
    mesh = init_device_mesh(kind, (2,), mesh_dim_names=("cp",))
    sharded = make()
    r.gdn.distributed.fully_shard_layers(sharded, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    context = r.gdn.ContextParallel(mesh["cp"], num_tokens=T)
    results.append(run("cp 2 FSDP2", sharded, context, is_sharded=True))
    for name, found in results:
        yield f"curve {name}: {base.distance(r, found, results[0][1])}"
        yield f"curve {name} losses: {' '.join(f'{x:.5f}' for x in found)}"


def exchange(r):
    """Run the former case: the host's time is that of an exchange, whatever its collectives."""
    from gdn.distributed import cost

    with mock.patch.object(cost, "num_collectives", lambda name, R: 1, create=True):
        yield from base_exchange(r)


def profile(r):
    """Print the kernels of one forward with `gather` on both ranks, and the phases of it and of a step."""
    for name, context in (("one GPU", None), ("gather", r.context(exchange="gather"))):
        step, forward = base.step_of(r, r.T // 2, context, r.rank)
        for what, run in (("forward", forward), ("step", step)):
            for _ in range(3):
                run()
            lines, total, gaps = base.kernels_of(r, run)
            for line in lines if what == "forward" else ():
                yield f"profile rank {r.rank} {name} {what}: {line}"
            yield f"profile rank {r.rank} {name} {what}: {total}"
            if context is not None:
                yield f"profile rank {r.rank} {name} {what} ends, us of GPU (host): {base.phases_of(r, run)}"
            for gap in gaps:
                yield f"profile rank {r.rank} {name} {what} idle: {gap}"
    yield from base.host_of(r)


def fla(r, T=None, is_warm=False):
    """Time flash-linear-attention's context parallelism on the sizes of `scale`, beside ours."""
    if r.cpu:
        yield "fla: needs a GPU"
        return
    try:
        import triton.testing
        from fla.ops.common import chunk_o
        from fla.ops.cp import build_cp_context
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from triton.runtime.autotuner import Autotuner
    except ImportError as error:
        yield f"fla: not importable ({error})"
        return
    torch, T = r.torch, T or r.T
    chunk_o.TRITON_ABOVE_3_7_1 = True
    if not is_warm:
        bench = functools.partial(triton.testing.do_bench, warmup=5, rep=25)
        Autotuner.do_bench = property(lambda self: bench)
    cu = torch.tensor([0, T], dtype=torch.int32, device=r.device)
    context = build_cp_context(cu, group=r.dist.group.WORLD)
    x = r.inputs(T // 2, r.heads, r.rank)
    leaves, do = [t.detach().requires_grad_() for t in x], r.gradient(x[2])

    def theirs(inputs):
        return chunk_gated_delta_rule(
            *inputs, use_qk_l2norm_in_kernel=True, cu_seqlens=context.cu_seqlens, cp_context=context
        )[0]

    def step():
        o = theirs(leaves)
        return (o, *torch.autograd.grad(o, leaves, do))

    def forward():
        with torch.no_grad():
            return (theirs(x),)

    ours = base.step_of(r, T // 2, r.context(), r.rank)
    mine = base.train(r, x, do, cp_context=r.context(), backend=r.backend)
    mine = (mine[0], *mine[2:])
    for i, (name, their) in enumerate((("forward", forward), ("train", step))):
        began = time.time()
        found = their()
        r.sync()
        yield f"fla 1x{T} {name}: its first call {time.time() - began:.1f} s"
        for _ in range(0 if is_warm else 2):
            began = time.time()
            their()
            r.sync()
            yield f"fla 1x{T} {name}: its next call {1e3 * (time.time() - began):.1f} ms"
        errors = [r.worst(base.rel(a, b)) for a, b in zip(found, mine, strict=False)]
        text = " ".join(f"{n} {e:.1e}" for n, e in zip(("o", *base.NAMES[2:7]), errors, strict=False))
        yield f"fla 1x{T} {name}: differs from gdn by {text}"
        if is_warm:
            continue
        for how, count in (("one call", 1), (f"{base.STACK} in a row", base.STACK)):
            runs = [lambda f=f, n=count: [f() for _ in range(n)] for f in (ours[1 - i], their)]
            a, b = (x / count for x in r.by_turns(runs, 2, 0.4))
            yield f"fla 1x{T} {name} {how}: gdn {a:.3f} ms, fla {b:.3f} ms, {b / a:.2f}x"
        mib = [base.peak(r, f) for f in (ours[1 - i], their)]
        yield f"fla 1x{T} {name}: MiB a rank, gdn {mib[0]:.0f}, fla {mib[1]:.0f}"


base_exchange = base.CASES["exchange"]
base.CASES |= {
    "exchange": exchange,
    "ideas": ideas,
    "graph": graph,
    "nodes": nodes,
    "curve": curve,
    "profile": profile,
    "fla": fla,
}


def warm_runs(cpu):
    """Return the processes that compile: case, backend, dtype, its part, rank."""
    if cpu:
        names = ["scale:auto:float32:", "model:auto:float32:", "layers:auto:float32:"]
        names += ["check:eager:float64:" + x for x in ("contiguous", "unequal, packed")]
        return [f"{name}:{rank}" for name in names for rank in (0,)]
    large = [f"{case}:auto:bfloat16::{rank}" for case, rank in (("scale", 1), ("scale", 0), ("layers", 0))]
    peers = [f"fla:auto:bfloat16:{share}:{share % 2}" for share in range(FLA_SHARES)]
    cases = ("contiguous", "unequal, packed", "headtail", "two rows", "a rank without tokens", "64 channels")
    hopper = [f"check:hopper:bfloat16:{x}:{rank}" for x in cases for rank in (1, 0)]
    small = [*(f"ideas:auto:bfloat16::{rank}" for rank in (0, 1)), "model:auto:float32::0"]
    small += ["curve:auto:bfloat16::0", "nodes:auto:bfloat16::1", "graph:auto:bfloat16::0"]
    return [*large, *peers, *hopper, *small]


def compile_share(share):
    """Make FLA's autotuners compile a share of their configurations, and launch one of these."""
    from triton.runtime.autotuner import Autotuner

    done = set()

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs
        mine = configs[share % len(configs) :: FLA_SHARES]
        if self not in done:
            done.add(self)
            print(
                f"@{time.time() - BEGAN:.1f} s {self.base_fn.__name__}: {len(mine)} of {len(configs)}",
                flush=True,
            )
            for config in mine[1:]:
                with contextlib.suppress(Exception):
                    self.fn.run(*args, **{**kwargs, "warmup": True}, **config.all_kwargs())
        for config in (*mine, *configs):
            try:
                return self.fn.run(*args, **kwargs, **config.all_kwargs())
            except Exception:  # out of shared memory
                continue

    Autotuner.run = run
    try:
        from fla.ops.utils.cache import CachedAutotuner

        CachedAutotuner.run = run
    except ImportError:
        pass


def warm(args):
    """Run one case as one rank on a group that sends nothing: its kernels are then on disk."""
    import torch
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import gdn

    began = time.time()
    case, backend, dtype, part, rank = args.warm.split(":")
    args.rank = int(rank)
    if args.cpu:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(args.rank)
    dist.init_process_group("fake", rank=args.rank, world_size=2, store=FakeStore())
    gdn.ContextParallel = functools.partial(gdn.ContextParallel, check="never")
    r = base.Rank(args, gdn, torch, dist)
    r.begin(backend, dtype)
    r.num_runs = 1

    def by_turns(runs, *_, **__):
        for run in runs:
            run()
        r.sync()
        return [1.0] * len(runs)

    r.by_turns = by_turns
    r.median = lambda run, *_: by_turns([run])[0]
    whole_cases, whole_losses = base.check_cases, base.losses

    def one_case(r):
        T, cases = whole_cases(r)
        return T, {part: cases[part]}

    def few_steps(*given, **options):
        return whole_losses(*given, **options | {"num_steps": 2})

    patches = {"check_cases": one_case, "losses": few_steps, "STACK": 1,
               "judge": lambda r, x, *_: (x[2], x[5], *x)}  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch.object(base, name, value))
        # torch's fake group refuses to send nothing and receive something
        stack.enter_context(base.without_wire())
        run = base.CASES[case]
        if case in ("fla", "graph"):
            r.median = lambda run, *_: 1.0
        if case == "fla":
            compile_share(int(part))
            run = functools.partial(fla, T=8192, is_warm=True)
        text = "ok"
        try:
            for _ in run(r):
                pass
            r.sync()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__} {str(error)[:150]} at {where.filename[-40:]}:{where.lineno}"
    print(f"@{time.time() - began:.1f} s {text}", flush=True)
    os._exit(0)


def compile_all(args):
    """Start the processes of `warm_runs`, and wait for them; print those that failed or were slow."""
    began, jobs = time.time(), []
    only = args.only.split(",") if args.only else None
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
    for name in warm_runs(args.cpu):
        if only and name.split(":")[0] not in only:
            continue
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, __file__, "--warm", name, "--T", str(args.T), *["--cpu"] * args.cpu]
        jobs.append((name, subprocess.Popen(command, env=environment, stdout=log, stderr=log), log))
    times = []
    for name, process, log in jobs:
        try:
            process.wait(max(0.1, began + WARM - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.seek(0)
        lines = log.read().splitlines()
        said = [x[1:] for x in lines if x.startswith("@")]
        times.append(f"{name} {said[-1].split()[0] if said else 'ended'}")
        if not said or not said[-1].endswith("ok"):
            print(f"warm {name}: {said or lines[-3:]}", flush=True)
    print(f"-- {time.time() - began:.0f} s: compiled ({'; '.join(times)})", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", default="")
    parser.add_argument("--warm", default="")
    parser.add_argument("--store", default="")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--T", type=int, default=131072)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--no-warm", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=290)
    args = parser.parse_args()
    if args.warm:
        warm(args)
    elif args.runs:
        base.on_rank(args)
    else:
        start = time.time()
        base.RUNS, base.CPU_RUNS = RUNS, CPU_RUNS
        if not args.no_warm:
            compile_all(args)
        args.seconds -= time.time() - start
        base.main(args)
