"""Check and time context parallelism on two GPUs with NCCL: python docs/lab/2026-11-25-two-gpus.py

Each case runs on two ranks in processes of their own with a time limit, so that a hang costs one line. Errors
are relative: norm of the difference over norm of the fp64 reference (short) or of one GPU's result (long).
NVLink multicast is off. It takes 400 s at most; `--only scale,profile` runs some cases. `--cpu` runs every
case with gloo at toy sizes: a check of this script alone, whose times say nothing.

    scale      training and forward: one GPU, two (strong), and as many tokens a rank as one GPU had (weak);
               memory; bits of 20 runs; predicted beside measured. One call at a time, and 8 calls in a row:
               the host then runs ahead of the GPU, as in a model
    profile    the kernels of one forward and one step: when each begins, how long it runs, the idle time
               before it, and when the host launched it
    check      two ranks against the reference, for runs of unequal length, packed and zig-zag
    exchange   the exchanges of states alone, predicted beside measured
    layer      GatedDeltaNet with its collectives, and with copies in their place: what is not hidden
    fla        flash-linear-attention's context parallelism on the same sizes, if it can be imported; it
               tunes its kernels at the first call, and 60 s were too few for forward and backward
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from unittest import mock

TOTAL = 400  # seconds of all cases
# case, backend, dtype, seconds at most
RUNS = [
    ("scale", "auto", "bfloat16", 90), ("profile", "auto", "bfloat16", 45),
    ("exchange", "auto", "bfloat16", 30), ("layer", "auto", "bfloat16", 45),
    ("check", "hopper", "bfloat16", 70), ("fla", "auto", "bfloat16", 100),
    ("check", "triton", "bfloat16", 45), ("check", "eager", "float64", 45),
]  # fmt: skip
CPU_RUNS = [
    ("check", "eager", "float64", 90), ("scale", "auto", "float32", 90), ("layer", "auto", "float32", 90),
    ("exchange", "auto", "float32", 90), ("profile", "auto", "float32", 60), ("fla", "auto", "float32", 60),
]  # fmt: skip
STACK = 8  # calls in a row, as the layers of a model
NAMES = ("o", "S", "dq", "dk", "dv", "dg", "dbeta")


class Rank:
    """Hold what every case of one rank uses: modules, device, sizes."""

    def __init__(self, args, gdn, torch, dist):
        self.args, self.gdn, self.torch, self.dist = args, gdn, torch, dist
        self.cpu = args.cpu
        self.device = torch.device("cpu") if args.cpu else torch.device("cuda", args.rank)
        self.dtype = getattr(torch, args.dtype)
        self.backend = None if args.backend == "auto" else args.backend
        self.T = 512 if args.cpu else args.T
        self.heads, self.dim = ((2, 4), 16) if args.cpu else ((16, 32), 128)
        self.num_runs = 3 if args.cpu else 20

    def inputs(self, T, heads, seed=0):
        """Return q, k, v, g, beta of one row with a gate that keeps some state over a whole run."""
        torch, (H, HV) = self.torch, heads
        generator = torch.Generator(self.device).manual_seed(seed)

        def draw(*shape):
            return torch.randn(1, T, *shape, generator=generator, device=self.device)

        q, v = draw(H, self.dim), draw(HV, self.dim)
        k = torch.nn.functional.normalize(draw(H, self.dim), dim=-1)
        g = torch.nn.functional.logsigmoid(draw(HV) + 4) / 4
        q, k, v = (x.to(self.dtype) for x in (q, k, v))
        wide = self.dtype if self.dtype == torch.float64 else torch.float32
        return q, k, v, g.to(wide), draw(HV).sigmoid().to(wide)

    def gradient(self, like):
        generator = self.torch.Generator(self.device).manual_seed(7)
        return self.torch.randn(like.shape, generator=generator, device=self.device).to(like.dtype)

    def sync(self):
        if not self.cpu:
            self.torch.cuda.synchronize()

    def median(self, run, seconds=2.0):
        """Return the median ms of a call on the slower rank, with both ranks starting together."""
        torch, dist = self.torch, self.dist
        for _ in range(3):
            run()
        self.sync()
        times, end = [], time.time() + (0.3 if self.cpu else seconds)
        for _ in range(30):
            dist.barrier()
            self.sync()
            began = time.perf_counter()
            if self.cpu:
                run()
                times.append(1e3 * (time.perf_counter() - began))
            else:
                begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                done.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(done))
            # every rank must stop at the same call
            if self.worst(float(time.time() > end)):
                break
        return self.worst(sorted(times)[len(times) // 2])

    def worst(self, value):
        """Return the largest value of all ranks."""
        found = self.torch.tensor([value], device=self.device, dtype=self.torch.float64)
        self.dist.all_reduce(found, self.dist.ReduceOp.MAX)
        return found.item()


def rel(x, want):
    x, want = x.double(), want.double()
    return float((x - want).norm() / want.norm().clamp(min=1e-30))


def train(r, x, do, **options):
    """Return outputs and gradients of one step."""
    leaves = [t.detach().requires_grad_() for t in x]
    o, S = r.gdn.chunk_gated_delta_rule(
        *leaves, use_qk_l2norm_in_kernel=True, output_final_state=True, **options
    )
    return (o.detach(), S.detach(), *r.torch.autograd.grad(o, leaves, do))


def judge(r, x, do, cu):
    """Return outputs and gradients of the reference recurrence in fp64."""
    from gdn import reference

    leaves = [t.double().detach().clone().requires_grad_() for t in x]
    o, S = reference.gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)
    return (o.detach(), S.detach(), *r.torch.autograd.grad(o, leaves, do.double()))


def same_bits(r, run):
    """Return whether further runs give the bits of the first one."""
    first = run()
    others = (run() for _ in range(r.num_runs))
    return all(all(map(r.torch.equal, other, first)) for other in others)


def check(r):
    """Compare two ranks with the fp64 reference, and 20 runs by their bits, on runs of unequal length."""
    T = 256 if r.cpu else 2048
    cuts = [x * T // 2048 for x in (0, 100, 700, 1500, 2048)]
    cases = {
        "contiguous": ({}, None),
        "unequal, packed": (
            {"runs": [(0, 0, cuts[2]), (1, cuts[2], T)]}, [0, cuts[1], cuts[3], T]
        ),
        "headtail": ({"order": "headtail", "num_tokens": T}, None),
    }  # fmt: skip
    whole = r.inputs(T, (2, 4))
    do_all, lines = r.gradient(whole[2]), []
    for name, (where, offsets) in cases.items():
        cpu = None if offsets is None else r.torch.tensor(offsets)
        cu = None if cpu is None else cpu.to(r.device)
        want = judge(r, whole, do_all, cu)
        for exchange in ("gather", "owner", "heads"):
            context = r.gdn.ContextParallel(r.dist.group.WORLD, exchange=exchange, **where)
            x, do = [context.shard(t, 1) for t in whole], context.shard(do_all, 1)
            options = {"cp_context": context, "backend": r.backend}
            if cu is not None:
                options |= {"cu_seqlens": cu, "cu_seqlens_cpu": cpu}
            found = {}
            for n, got, of_all in zip(NAMES, train(r, x, do, **options), want, strict=True):
                rows = context.gather_states(got, cu, cpu) if n == "S" else got
                found[n] = rel(rows, of_all if n == "S" else context.shard(of_all, 1))
            bits = same_bits(r, lambda x=x, do=do, options=options: train(r, x, do, **options))
            text = " ".join(f"{n} {e:.1e}" for n, e in found.items())
            lines.append(f"check {r.args.backend} {name}, {exchange}, rank {r.args.rank}: {text} bits {bits}")
    return lines


def step_of(r, T, context, seed=0):
    """Return functions that run a training step and a forward of T local tokens."""
    x = r.inputs(T, r.heads, seed)
    leaves, do = [t.detach().requires_grad_() for t in x], r.gradient(x[2])
    options = {"use_qk_l2norm_in_kernel": True, "backend": r.backend, "cp_context": context}

    def step():
        o, _ = r.gdn.chunk_gated_delta_rule(*leaves, **options)
        r.torch.autograd.grad(o, leaves, do)

    def forward():
        with r.torch.no_grad():
            r.gdn.chunk_gated_delta_rule(*x, **options)

    return step, forward


def measure(r, T, context):
    """Return ms of a step and of a forward, MiB that the step needs, ms of both within STACK of them."""
    step, forward = step_of(r, T, context, r.args.rank)
    step()
    peak = 0.0
    if not r.cpu:
        r.torch.cuda.reset_peak_memory_stats()
        before = r.torch.cuda.memory_allocated()
        step()
        peak = (r.torch.cuda.max_memory_allocated() - before) / 2**20

    def stack(run):
        return r.median(lambda: [run() for _ in range(STACK)], 1.0) / STACK

    return r.median(step), r.median(forward, 1.0), r.worst(peak), stack(step), stack(forward)


def scale(r):
    """Time one GPU and two, training and forward: strong at T tokens, weak at T/2 a rank; compare results."""
    from gdn.distributed.cost import Form, exchange_times
    from gdn.distributed.simulate import Machine, simulate

    T, lines = r.T, []
    one, half = measure(r, T, None), measure(r, T // 2, None)
    for exchange in ("gather", "owner"):
        context = r.gdn.ContextParallel(r.dist.group.WORLD, exchange=exchange)
        two = measure(r, T // 2, context)
        lines.append(
            f"scale {r.args.backend} 1x{T} {exchange}: "
            f"train {one[0]:.2f} -> {two[0]:.2f} ms, {one[0] / two[0]:.2f}x; "
            f"forward {one[1]:.3f} -> {two[1]:.3f} ms, {one[1] / two[1]:.2f}x; "
            f"weak {two[0] / half[0]:.3f}, {two[1] / half[1]:.3f} of one GPU; "
            f"MiB {one[2]:.0f} -> {two[2]:.0f}"
        )
        lines.append(
            f"scale {r.args.backend} 1x{T} {exchange} {STACK} in a row: "
            f"train {one[3]:.2f} -> {two[3]:.2f} ms, {one[3] / two[3]:.2f}x; "
            f"forward {one[4]:.3f} -> {two[4]:.3f} ms, {one[4] / two[4]:.2f}x; "
            f"weak {two[3] / half[3]:.3f}, {two[4] / half[4]:.3f} of one GPU"
        )
        if not r.cpu:
            form = Form(*r.heads)
            told = 1e3 * simulate(form, [T // 2] * 2, exchange=exchange).end
            alone = 1e3 * simulate(form, [T]).end
            cost = 1e3 * exchange_times(form, 2, exchange, Machine()).total
            lines.append(
                f"scale {r.args.backend} 1x{T} {exchange} predicted: train {alone:.2f} -> {told:.2f} ms "
                f"({told / two[0]:.2f} of measured), of which {cost:.3f} ms are the exchanges"
            )
    context = r.gdn.ContextParallel(r.dist.group.WORLD)
    step_inputs = r.inputs(T, r.heads)
    do = r.gradient(step_inputs[2])
    want = train(r, step_inputs, do, backend=r.backend)
    x, local_do = [context.shard(t, 1) for t in step_inputs], context.shard(do, 1)
    options = {"cp_context": context, "backend": r.backend}
    got = train(r, x, local_do, **options)
    text = [
        f"{n} {rel(a, context.shard(b, 1)):.1e}" for n, a, b in zip(NAMES, got, want, strict=True) if n != "S"
    ]
    bits = same_bits(r, lambda: train(r, x, local_do, **options))
    lines.append(
        f"scale {r.args.backend} 1x{T} rank {r.args.rank} beside one GPU: {' '.join(text)} bits {bits}"
    )
    return lines


def exchange(r):
    """Time the exchanges of states alone, beside the model's times; other links are then fitted by hand."""
    from gdn.distributed import calls, cost
    from gdn.distributed.plan import make_plan
    from gdn.distributed.table import equal_runs

    lines, K = [], r.dim
    plan = make_plan(equal_runs("contiguous", 4096, 2), None, 1, r.args.rank)
    groups = calls.Groups(r.dist.group.WORLD)
    for HV in (4,) if r.cpu else (16, 32, 64):
        transfers = r.torch.randn(1, 1, HV, K, 2 * K, device=r.device)
        for name in ("gather", "owner"):
            one = calls.make_exchange(name, plan, groups)
            _, maps = one.finish_states(one.start_states(transfers), K)
            C = transfers[..., :K].contiguous()
            runs = (
                lambda one=one, transfers=transfers: one.finish_states(one.start_states(transfers), K),
                lambda one=one, C=C, maps=maps: one.finish_gradients(one.start_gradients(C), maps),
            )
            got = [1e3 * r.median(run, 0.5) for run in runs]
            told = [
                1e6 * x for x in cost.exchange_times(cost.Form(HV // 2, HV, K, K), 2, name, cost.Machine())
            ]
            rest = [(x - y) / cost.num_collectives(name, 2) for x, y in zip(got, told, strict=True)]
            lines.append(
                f"exchange {name} HV={HV}: forward {got[0]:.0f} us, predicted {told[0]:.0f}; "
                f"backward {got[1]:.0f} us, predicted {told[1]:.0f}; Machine.host of {rest[0]:.0f}, "
                f"{rest[1]:.0f} us a collective would fit"
            )
    return lines


def profile(r):
    """Print the kernels of one forward and one step, without a context and with one, on each rank."""
    context = r.gdn.ContextParallel(r.dist.group.WORLD)
    for name, given in (("one GPU", None), ("gather", context)):
        step, forward = step_of(r, r.T // 2, given, r.args.rank)
        for what, run in (("forward", forward), ("step", step)):
            for _ in range(3):
                run()
            r.dist.barrier()
            r.sync()
            yield from kernels_of(r, f"profile rank {r.args.rank} {name} {what}", run)


def kernels_of(r, label, run):
    """Return a line for each kernel of a call, and one of all: us since the call began.

    Operators are not recorded: that would double the time of the host. The event that is recorded first marks
    the beginning.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    began = time.perf_counter()
    run()
    host = 1e6 * (time.perf_counter() - began)
    r.sync()
    if r.cpu:
        return [f"{label}: host {host:.0f} us"]
    r.dist.barrier()
    r.sync()
    with recorded(activities=[ProfilerActivity.CUDA]) as recorder:
        r.torch.cuda.Event(enable_timing=True).record()
        run()
        r.sync()
    path = f"{r.args.store}-{r.args.rank}.json"
    recorder.export_chrome_trace(path)
    with open(path) as file:
        events = [x for x in json.load(file)["traceEvents"] if x.get("ph") == "X"]
    calls = [x for x in events if x.get("cat") in ("cuda_runtime", "cuda_driver")]
    start = min(x["ts"] for x in calls)
    correlated = {x["args"]["correlation"]: x["ts"] for x in calls if "correlation" in x.get("args", {})}
    on_gpu = [x for x in events if x.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    lines, end, idle, busy = [], start, 0.0, 0.0
    for x in sorted(on_gpu, key=lambda x: x["ts"]):
        gap, stop = max(0.0, x["ts"] - end), x["ts"] + x["dur"]
        idle, busy = idle + gap, busy + max(0.0, stop - max(end, x["ts"]))
        launched = correlated.get(x["args"].get("correlation"), float("nan")) - start
        lines.append(
            f"{label}: at {x['ts'] - start:7.0f} us, launched {launched:7.0f}, idle before {gap:6.0f}, "
            f"runs {x['dur']:6.0f}, stream {x['args'].get('stream')}: {x['name'][:70]}"
        )
        end = max(end, stop)
    total = f"{len(on_gpu)} kernels, GPU busy {busy:.0f} us, idle {idle:.0f}, host {host:.0f} us"
    return [*lines, f"{label}: {total}"]


@contextlib.contextmanager
def without_wire(r):
    """Put copies of this rank's own tensors in the place of the collectives: the same work, nothing sent."""
    from gdn.distributed import collectives

    class Copies:
        @staticmethod
        def all_gather_into_tensor(x, size, group):
            return x.repeat(size)

        @staticmethod
        def all_to_all_single(x, receive, send, group):
            return x.new_zeros(sum(receive), *x.shape[1:])

        @staticmethod
        def wait_tensor(x):
            return x

    with mock.patch.object(collectives, "_operators", Copies):
        yield


def layer(r):
    """Time GatedDeltaNet with its collectives and with copies in their place: the rest is not hidden."""
    hidden, (H, HV) = (64 if r.cpu else 2048), r.heads
    r.torch.manual_seed(0)
    model = r.gdn.GatedDeltaNet(
        hidden, H, HV, r.dim, r.dim, backend=r.backend, device=r.device, dtype=r.dtype
    )
    context = r.gdn.ContextParallel(r.dist.group.WORLD)
    x = r.torch.randn(1, r.T // 2, hidden, device=r.device, dtype=r.dtype, requires_grad=True)

    def step():
        y = model(x, cp_context=context)
        r.torch.autograd.grad(y.square().mean(), [x, *model.parameters()])

    def forward():
        with r.torch.no_grad():
            model(x, cp_context=context)

    lines = []
    for name, run in (("train", step), ("forward", forward)):
        # alternating: the clock of a GPU falls with its work
        pairs = []
        for _ in range(2):
            sent = r.median(run, 2.0)
            with without_wire(r):
                pairs.append((sent, r.median(run, 2.0)))
        sent, copied = (sum(x) / len(pairs) for x in zip(*pairs, strict=True))
        lines.append(
            f"layer {r.args.backend} 1x{r.T} {name}: {sent:.3f} ms, without the wire {copied:.3f} ms: "
            f"{(sent - copied) / sent:.1%} not hidden"
        )
    return lines


def fla(r):
    """Time the context parallelism of flash-linear-attention on the same sizes as `scale`, beside ours."""
    try:
        from fla.ops.cp import build_cp_context
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        yield f"fla: not importable ({error})"
        return
    if r.cpu:
        yield "fla: needs a GPU"
        return
    cu = r.torch.tensor([0, r.T], dtype=r.torch.int32, device=r.device)
    theirs = build_cp_context(cu, group=r.dist.group.WORLD)
    x = r.inputs(r.T // 2, r.heads, r.args.rank)
    leaves, do = [t.detach().requires_grad_() for t in x], r.gradient(x[2])

    def run(inputs):
        return chunk_gated_delta_rule(
            *inputs, use_qk_l2norm_in_kernel=True, cu_seqlens=theirs.cu_seqlens, cp_context=theirs
        )[0]

    def step():
        r.torch.autograd.grad(run(leaves), leaves, do)

    def forward():
        with r.torch.no_grad():
            run(x)

    ours = step_of(r, r.T // 2, r.gdn.ContextParallel(r.dist.group.WORLD), r.args.rank)
    for name, mine, their in (("forward", ours[1], forward), ("train", ours[0], step)):
        began = time.time()
        their()
        r.sync()
        tuning = time.time() - began
        pairs = [(r.median(mine, 1.5), r.median(their, 1.5)) for _ in range(2)]
        a, b = (sum(x) / len(pairs) for x in zip(*pairs, strict=True))
        # at once: a time limit then costs the other line alone
        times = f"gdn {a:.2f} ms, fla {b:.2f} ms, {b / a:.2f}x"
        yield f"fla 1x{r.T} {name}: {times}; its first call {tuning:.0f} s"


def on_rank(args):
    """Run one case as one rank, and print its lines."""
    import torch
    from torch import distributed as dist

    import gdn

    if args.cpu:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(args.rank)
    store = dist.FileStore(args.store, 2)
    backend, device = ("gloo", None) if args.cpu else ("nccl", torch.device("cuda", args.rank))
    dist.init_process_group(backend, rank=args.rank, world_size=2, store=store, device_id=device)
    cases = {
        "check": check, "scale": scale, "profile": profile, "layer": layer, "exchange": exchange, "fla": fla,
    }  # fmt: skip
    for line in cases[args.case](Rank(args, gdn, torch, dist)):
        # the lines of errors are of each rank, the times of the slower one
        if args.rank == 0 or " rank " in line:
            print("@" + line, flush=True)
    dist.barrier()
    os._exit(0)


def main(cpu, T, only):
    """Start the ranks of every case, or of those named in `only`, and print all lines last."""
    found, start = [], time.time()
    chosen = [run for run in (CPU_RUNS if cpu else RUNS) if not only or run[0] in only.split(",")]
    for number, (case, backend, dtype, limit) in enumerate(chosen):
        left = start + TOTAL - time.time()
        if left < 15:
            found.append(f"LEFT OUT {case} {backend}: no time")
            continue
        store = f"/tmp/two-gpus-{os.getpid()}-{number}"
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, "--case", case, "--backend", backend, "--dtype", dtype]
        command += ["--T", str(T), *(["--cpu"] if cpu else [])]
        ranks = [
            subprocess.Popen(
                [*command, "--store", store, "--rank", str(rank)], env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]  # fmt: skip
        end = time.time() + min(limit, left)
        for rank, process in enumerate(ranks):
            try:
                out, _ = process.communicate(timeout=max(1, end - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                out = process.communicate()[0] + "\ntime limit"
            lines = [line[1:] for line in out.splitlines() if line.startswith("@")]
            found += lines
            if process.returncode != 0 or not lines and rank == 0:
                found.append(f"FAILED {case} {backend} rank {rank}: rc {process.returncode}")
                print(f"--- {case} {backend} rank {rank}\n{out[-2500:]}", flush=True)
        print(f"{case} {backend} {dtype}: {time.time() - start:.0f} s so far", flush=True)
    print("\n".join(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="")
    parser.add_argument("--backend", default="")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--store", default="")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--T", type=int, default=131072)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if args.case:
        on_rank(args)
    else:
        main(args.cpu, args.T, args.only)
