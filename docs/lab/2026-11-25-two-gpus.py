"""Check and time context parallelism on two GPUs with NCCL: python docs/lab/2026-11-25-two-gpus.py

Two ranks run the cases one after another, each within its own time limit; after a hang or an error two new
ranks go on with the next case. Each line is printed as soon as it is known. Errors are relative: norm of the
difference over norm of the fp64 reference (short) or of one GPU's result (long). NVLink multicast is off.
`--only scale,profile` runs some cases, `--seconds` limits all of them. `--cpu` runs every case with gloo at
toy sizes: a check of this script alone, whose times say nothing.

    scale      training and forward: one GPU, two (strong), and as many tokens a rank as one GPU had (weak),
               by turns; memory; bits of 20 runs. One call at a time, and 8 calls in a row: the host then
               runs ahead of the GPU, as in a model. Predicted beside measured
    profile    the kernels of one forward and one step: when each was launched and began, how long it ran, the
               idle time before it; the largest gaps; the functions in which the host spends its time
    exchange   the exchanges of states alone, predicted beside measured
    layers     a stack of GatedDeltaNet: one GPU and two; with copies in place of the collectives: what is not
               hidden
    check      two ranks against the reference, by every exchange: runs of unequal length, packed, zig-zag,
               two rows, a rank without tokens, states with gradients; `nodes` on meshes 2x1 and 1x2;
               bits of 20 runs
    protocols  the bits of a step under values of NCCL_ALGO and NCCL_PROTO; the times show that they differ
    split      a layer by tensor parallelism; a layer under torch.compile(fullgraph=True) with aot_eager
    model      losses of 20 steps of Adam in fp32, a hybrid of three such layers and one of attention: one
               GPU; two by tokens (`gather`, `owner` in zig-zag), by heads, by tokens under FSDP2
    fla        flash-linear-attention's context parallelism on the same sizes, if it can be imported; it
               tunes its kernels at the first call, here at a size that takes little time
"""

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import queue
import subprocess
import sys
import threading
import time
from unittest import mock

START = 60  # seconds until both ranks have imported torch and met
# case, backend, dtype, seconds at most
RUNS = [
    ("scale", "auto", "bfloat16", 130), ("profile", "auto", "bfloat16", 40),
    ("exchange", "auto", "bfloat16", 20), ("layers", "auto", "bfloat16", 60),
    ("check", "hopper", "bfloat16", 60), ("check", "triton", "bfloat16", 45),
    ("check", "eager", "float64", 30), ("protocols", "auto", "bfloat16", 30),
    ("split", "auto", "float32", 30), ("model", "auto", "float32", 45), ("fla", "auto", "bfloat16", 120),
]  # fmt: skip
CPU_RUNS = [
    ("scale", "auto", "float32", 60), ("profile", "auto", "float32", 40),
    ("exchange", "auto", "float32", 30), ("layers", "auto", "float32", 40),
    ("check", "eager", "float64", 90), ("protocols", "auto", "float32", 30),
    ("split", "auto", "float32", 40), ("model", "auto", "float32", 60), ("fla", "auto", "float32", 20),
]  # fmt: skip
STACK = 8  # calls in a row, as the layers of a model
LAYERS = 3  # of the stack of layers
NAMES = ("o", "S", "dq", "dk", "dv", "dg", "dbeta", "dS0")


class Rank:
    """Hold what every case of one rank uses: modules, device, sizes."""

    def __init__(self, args, gdn, torch, dist):
        self.args, self.gdn, self.torch, self.dist = args, gdn, torch, dist
        self.cpu, self.rank = args.cpu, args.rank
        self.device = torch.device("cpu") if args.cpu else torch.device("cuda", args.rank)
        self.T = 512 if args.cpu else args.T
        self.heads, self.dim = ((2, 4), 16) if args.cpu else ((16, 32), 128)
        self.num_runs = 3 if args.cpu else 20

    def begin(self, backend, dtype):
        self.dtype = getattr(self.torch, dtype)
        self.name, self.backend = backend, None if backend == "auto" else backend

    def draw(self, *shape, seed=0):
        generator = self.torch.Generator(self.device).manual_seed(seed)
        return self.torch.randn(*shape, generator=generator, device=self.device)

    def inputs(self, T, heads, seed=0, B=1, has_channels=False, dim=None):
        """Return q, k, v, g, beta with a gate that keeps some state over a whole run."""
        torch, (H, HV), D = self.torch, heads, dim or self.dim
        q, k, v = (self.draw(B, T, n, D, seed=3 * seed + i) for i, n in enumerate((H, H, HV)))
        k = torch.nn.functional.normalize(k, dim=-1)
        g = torch.nn.functional.logsigmoid(self.draw(B, T, HV, *[D] * has_channels, seed=seed + 11) + 4) / 4
        q, k, v = (x.to(self.dtype) for x in (q, k, v))
        wide = self.dtype if self.dtype == torch.float64 else torch.float32
        return q, k, v, g.to(wide), self.draw(B, T, HV, seed=seed + 12).sigmoid().to(wide)

    def gradient(self, like):
        return self.draw(*like.shape, seed=7).to(like.dtype)

    def context(self, **options):
        return self.gdn.ContextParallel(self.dist.group.WORLD, **options)

    def sync(self):
        if not self.cpu:
            self.torch.cuda.synchronize()

    def time(self, run):
        """Return the ms of one call on this rank, with both ranks starting together."""
        torch = self.torch
        self.dist.barrier()
        self.sync()
        began = time.perf_counter()
        if self.cpu:
            run()
            return 1e3 * (time.perf_counter() - began)
        begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        done.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(done)

    def median(self, run, seconds=0.6, warm=2):
        """Return the median ms of a call on the slower rank."""
        for _ in range(warm):
            run()
        self.sync()
        times, end = [], time.time() + (0.1 if self.cpu else seconds)
        for _ in range(30):
            times.append(self.time(run))
            # every rank must stop at the same call
            if len(times) > 2 and self.worst(float(time.time() > end)):
                break
        return self.worst(sorted(times)[len(times) // 2])

    def by_turns(self, runs, rounds=2, seconds=0.6):
        """Return the mean of the medians of each call, by turns: the clock of a GPU falls with its work."""
        found = [[self.median(run, seconds) for run in runs] for _ in range(rounds)]
        return [sum(column) / rounds for column in zip(*found, strict=True)]

    def worst(self, value):
        """Return the largest value of all ranks."""
        found = self.torch.tensor([value], device=self.device, dtype=self.torch.float64)
        self.dist.all_reduce(found, self.dist.ReduceOp.MAX)
        return found.item()


def rel(x, want):
    x, want = x.double(), want.double()
    return float((x - want).norm() / want.norm().clamp(min=1e-30))


def train(r, x, do, dS=None, **options):
    """Return outputs and gradients of one step; x: q, k, v, g, beta and, with dS, the initial state."""
    leaves = [t.detach().requires_grad_() for t in x]
    if dS is not None:
        options["initial_state"] = leaves[5]
    o, S = r.gdn.chunk_gated_delta_rule(
        *leaves[:5], use_qk_l2norm_in_kernel=True, output_final_state=True, **options
    )
    outputs, given = ((o, S), (do, dS)) if dS is not None else ((o,), (do,))
    return (o.detach(), S.detach(), *r.torch.autograd.grad(outputs, leaves, given))


def judge(r, x, do, dS, cu):
    """Return outputs and gradients of the reference recurrence in fp64."""
    from gdn import reference

    leaves = [t.double().detach().clone().requires_grad_() for t in x]
    o, S = reference.gated_delta_rule(
        *leaves[:5], initial_state=leaves[5], use_qk_l2norm_in_kernel=True, cu_seqlens=cu
    )
    gradients = r.torch.autograd.grad((o, S), leaves, (do.double(), dS.double()))
    return (o.detach(), S.detach(), *gradients)


def same_bits(r, run):
    """Return whether further runs give the bits of the first one."""
    first = run()
    others = (run() for _ in range(r.num_runs))
    return all(all(map(r.torch.equal, other, first)) for other in others)


def check_cases(r):
    """Return the cases: options of the context, offsets, batch rows, further options of the inputs."""
    T = 256 if r.cpu else 2048
    cuts = [x * T // 2048 for x in (0, 100, 700, 1500, 2048)]
    runs = [(0, 0, cuts[2]), (1, cuts[2], T)]
    cases = {
        "contiguous": ({}, None, 1, {}),
        "unequal, packed": ({"runs": runs}, [0, cuts[1], cuts[3], T], 1, {}),
        "headtail": ({"order": "headtail", "num_tokens": T}, None, 1, {}),
        "two rows": ({}, None, 2, {}),
        "a rank without tokens": ({"runs": [(1, 0, T)]}, None, 1, {}),
    }  # fmt: skip
    if r.name == "hopper":
        cases["64 channels"] = ({}, None, 1, {"dim": 64})
    if r.name in ("triton", "eager"):
        cases["decay per channel"] = ({}, None, 1, {"has_channels": True})
    return T, cases


def contexts_of(r, where):
    """Yield the name of each exchange, and a context with it."""
    from torch.distributed.device_mesh import init_device_mesh

    for name in ("gather", "owner", "heads"):
        yield name, r.context(exchange=name, **where)
    kind = "cpu" if r.cpu else "cuda"
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("nodes", "ranks"))
        yield f"nodes {shape[0]}x{shape[1]}", r.gdn.ContextParallel(mesh, exchange="nodes", **where)


def check(r):
    """Compare two ranks with the fp64 reference, and 20 runs by their bits: a line for each case, with the
    largest errors of all exchanges."""
    T, cases = check_cases(r)
    for name, (where, offsets, B, others) in cases.items():
        cpu = None if offsets is None else r.torch.tensor(offsets)
        cu = None if cpu is None else cpu.to(r.device)
        whole, N = r.inputs(T, (2, 4), B=B, **others), B if cu is None else len(offsets) - 1
        states = (N, 4, *[whole[0].shape[-1]] * 2)
        wide = r.torch.float64 if r.dtype == r.torch.float64 else r.torch.float32
        S0, dS = (r.draw(*states, seed=s).to(wide) for s in (5, 6))
        do_all = r.gradient(whole[2])
        want = judge(r, (*whole, S0), do_all, dS, cu)
        errors, differ = dict.fromkeys(NAMES, 0.0), []
        for exchange, context in contexts_of(r, where):
            found, is_same = compare(r, context, whole, (S0, dS, do_all), want, cu, cpu)
            errors = {n: max(x, found[n]) for n, x in errors.items()}
            differ += [] if is_same else [exchange]
        text = " ".join(f"{n} {x:.1e}" for n, x in errors.items())
        label = name.replace("a rank", "one")
        yield f"check {r.name} {label}: {text}; bits differ: {', '.join(differ) or 'none'}"


def compare(r, context, whole, given, want, cu, cpu):
    """Return the errors of a step, those of the rank with larger ones, and whether its bits are the same."""
    S0, dS_all, do_all = given
    N = len(S0)
    pieces = context.pieces(cu, cpu, batch=whole[0].shape[0])
    rows = lambda x: context.shard_states(x, cu, cpu).clone() if pieces else x[:0]  # noqa: E731
    initial, dS = rows(S0), rows(dS_all)
    for i, piece in enumerate(pieces):
        if not piece.is_first:
            initial[i] = r.torch.nan  # no rank may read it
        if not piece.is_last:
            dS[i] = 0
    x, do = [context.shard(t, 1) for t in whole], context.shard(do_all, 1)
    options = {"cp_context": context, "backend": r.backend}
    if cu is not None:
        options |= {"cu_seqlens": cu, "cu_seqlens_cpu": cpu}

    def run():
        return train(r, (*x, initial), do, dS, **options)

    errors = {}
    for n, got, of_all in zip(NAMES, run(), want, strict=True):
        if n == "S":
            got = context.gather_states(got, cu, cpu, batch=whole[0].shape[0])
        elif n == "dS0":
            found = got.new_zeros(N, *got.shape[1:])
            for row, piece in enumerate(pieces):
                if piece.is_first:
                    found[piece.sequence] = got[row]
            r.dist.all_reduce(found)
            got = found
        else:
            got = context.unshard(got, 1)
        errors[n] = r.worst(rel(got, of_all))
    return errors, r.worst(float(not same_bits(r, run))) == 0


def protocols(r):
    """Compare the bits of a step under settings of NCCL, each in a process group of its own."""
    T = 256 if r.cpu else 16384
    settings = [{}]
    if not r.cpu:
        settings += [{"NCCL_ALGO": "Ring", "NCCL_PROTO": x} for x in ("LL", "LL128", "Simple")]
        settings += [{"NCCL_MAX_NCHANNELS": "1"}]
    x = r.inputs(T // 2, r.heads, r.rank)
    do = r.gradient(x[2])
    for exchange in ("gather", "owner"):
        first = None
        for setting in settings:
            with mock.patch.dict(os.environ, setting):
                group = r.dist.new_group([0, 1])
                context = r.gdn.ContextParallel(group, exchange=exchange)
                found = train(r, x, do, cp_context=context, backend=r.backend)
                us = [1e3 * r.median(run, 0.2) for run in exchange_runs(r, group, exchange, r.heads[1])]
            first = found if first is None else first
            is_same = r.worst(float(not all(map(r.torch.equal, found, first)))) == 0
            name = " ".join(f"{n[5:]}={v}" for n, v in setting.items()) or "default"
            yield f"protocols {exchange} {name}: bits {is_same}; exchange {us[0]:.0f}, {us[1]:.0f} us"


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


def peak(r, step):
    """Return the MiB that a step needs, of the rank that needs more."""
    step()
    if r.cpu:
        return 0.0
    r.torch.cuda.reset_peak_memory_stats()
    before = r.torch.cuda.memory_allocated()
    step()
    return r.worst((r.torch.cuda.max_memory_allocated() - before) / 2**20)


def scale(r):
    """Time one GPU and two, training and forward: strong at T tokens, weak at T/2 a rank; compare results."""
    T, names = r.T, ("one GPU", "one, T/2", "gather", "owner")
    contexts = {name: r.context(exchange=name) for name in names[2:]}
    sizes = ((T, None), (T // 2, None), (T // 2, contexts["gather"]), (T // 2, contexts["owner"]))
    runs = [step_of(r, *size, r.rank) for size in sizes]
    memory = [peak(r, step) for step, _ in runs]
    yield f"scale 1x{T} MiB of a step: " + ", ".join(
        f"{n} {x:.0f}" for n, x in zip(names, memory, strict=True)
    )
    for what, i in (("train", 0), ("forward", 1)):
        for how, count in (("one call", 1), (f"{STACK} in a row", STACK)):

            def repeated(run, count=count):
                return lambda: [run() for _ in range(count)]

            ms = [x / count for x in r.by_turns([repeated(pair[i]) for pair in runs], seconds=0.4)]
            text = "; ".join(
                f"{n} {x:.2f} ms, {ms[0] / x:.2f}x, weak {x / ms[1]:.3f}"
                for n, x in zip(names[2:], ms[2:], strict=True)
            )
            yield f"scale {what} {how}: one GPU {ms[0]:.3f} ms, of T/2 {ms[1]:.3f}; {text}"
            yield from predicted(r, what, how, ms)
    del runs
    context = r.context()
    x = r.inputs(T, r.heads)
    do = r.gradient(x[2])
    want = train(r, x, do, backend=r.backend)
    x, local_do = [context.shard(t, 1) for t in x], context.shard(do, 1)
    options = {"cp_context": context, "backend": r.backend}
    got = train(r, x, local_do, **options)
    text = [
        f"{n} {r.worst(rel(a, context.shard(b, 1))):.1e}"
        for n, a, b in zip(NAMES[:-1], got, want, strict=True)
        if n != "S"
    ]
    bits = r.worst(float(not same_bits(r, lambda: train(r, x, local_do, **options)))) == 0
    yield f"scale 1x{T} beside one GPU: {' '.join(text)} bits {bits}"


def predicted(r, what, how, ms):
    """Yield the model's times beside those that were measured."""
    from gdn.distributed.cost import ONE_CALL, Form
    from gdn.distributed.simulate import H100, simulate

    form, machine = Form(*r.heads), ONE_CALL if how == "one call" else None
    told = [1e3 * simulate(form, [n], work=H100, has_backward=what == "train").end for n in (r.T, r.T // 2)]
    for exchange in ("gather", "owner"):
        two = simulate(form, [r.T // 2] * 2, machine, H100, exchange=exchange, has_backward=what == "train")
        told.append(1e3 * two.end)
    text = ", ".join(f"{x:.2f} ({x / y:.2f})" for x, y in zip(told, ms, strict=True))
    yield f"scale {what} {how} predicted, and of measured: {text}"


def exchange_runs(r, group, name, HV):
    """Return functions that exchange states, forward and backward."""
    from gdn.distributed import calls
    from gdn.distributed.plan import make_plan
    from gdn.distributed.table import equal_runs

    K = r.dim
    plan = make_plan(equal_runs("contiguous", 4096, 2), None, 1, r.rank)
    one = calls.make_exchange(name, plan, calls.Groups(group))
    transfers = r.torch.randn(1, 1, HV, K, 2 * K, device=r.device)
    _, maps = one.finish_states(one.start_states(transfers), K)
    C = transfers[..., :K].contiguous()
    return (
        lambda: one.finish_states(one.start_states(transfers), K),
        lambda: one.finish_gradients(one.start_gradients(C), maps),
    )


def exchange(r):
    """Time the exchanges of states alone, beside the model's times; other links are then fitted by hand."""
    from gdn.distributed import cost

    for HV in (4,) if r.cpu else (16, 32, 64):
        for name in ("gather", "owner"):
            runs = exchange_runs(r, r.dist.group.WORLD, name, HV)
            got = [1e3 * x for x in r.by_turns(runs, seconds=0.2)]
            rows = [
                1e3 * x / STACK
                for x in r.by_turns([lambda f=f: [f() for _ in range(STACK)] for f in runs], 1, 0.2)
            ]
            told = [
                1e6 * x
                for x in cost.exchange_times(cost.Form(HV // 2, HV, r.dim, r.dim), 2, name, cost.Machine())
            ]
            rest = [(x - y) / cost.num_collectives(name, 2) for x, y in zip(got, told, strict=True)]
            yield (
                f"exchange {name} HV={HV}: forward {got[0]:.0f} us "
                f"({rows[0]:.0f} in a row, predicted {told[0]:.0f}); "
                f"backward {got[1]:.0f} us ({rows[1]:.0f}, {told[1]:.0f}); Machine.host of {rest[0]:.0f}, "
                f"{rest[1]:.0f} us a collective would fit"
            )


def profile(r):
    """Print the kernels of one forward and one step, without a context and with one, on each rank."""
    for what, i in (("forward", 0), ("step", 1)):
        for name, context in (
            ("one GPU", None),
            ("gather", r.context(exchange="gather")),
            ("owner", r.context(exchange="owner")),
        ):
            step, forward = step_of(r, r.T // 2, context, r.rank)
            run = (forward, step)[i]
            for _ in range(3):
                run()
            lines, total, gaps = kernels_of(r, run)
            # the kernels of `owner` are those of `gather` and a collective more
            for line in lines if name != "owner" else ():
                yield f"profile rank {r.rank} {name} {what}: {line}"
            yield f"profile rank {r.rank} {name} {what}: {total}"
            if name == "gather":
                yield f"profile rank {r.rank} {name} {what} ends, us of GPU (host): {phases_of(r, run)}"
            for gap in gaps:
                yield f"profile rank {r.rank} {name} {what} idle: {gap}"
    yield from host_of(r)


def kernels_of(r, run):
    """Return a line for each kernel of a call, one of all, one of each large gap: us since the call began.

    Operators are not recorded: that would double the time of the host. An empty kernel marks the beginning.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    r.dist.barrier()
    r.sync()
    began = time.perf_counter()
    run()
    host = 1e6 * (time.perf_counter() - began)
    r.sync()
    if r.cpu:
        return [], f"host {host:.0f} us", []
    recorder = recorded(activities=[ProfilerActivity.CUDA])
    recorder.start()
    r.dist.barrier()
    r.sync()
    r.torch.cuda._sleep(1)
    run()
    r.sync()
    recorder.stop()
    try:
        return read_trace(recorder, f"{r.args.store}-{r.rank}.json", host)
    except Exception as error:  # the other rank goes on
        return [], f"host {host:.0f} us; no trace: {error!r}", []


def read_trace(recorder, path, host):
    """Return the lines of `kernels_of` from a trace that the profiler writes to `path`."""
    recorder.export_chrome_trace(path)
    with open(path) as file:
        events = [x for x in json.load(file)["traceEvents"] if x.get("ph") == "X"]
    host_calls = [x for x in events if x.get("cat") in ("cuda_runtime", "cuda_driver")]
    launched = {x["args"]["correlation"]: x["ts"] for x in host_calls if "correlation" in x.get("args", {})}
    on_gpu = [x for x in events if x.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    mark = next(x for x in on_gpu if "spin_kernel" in x["name"])
    start = launched.get(mark["args"].get("correlation"), mark["ts"])
    on_gpu = [x for x in on_gpu if x["ts"] > mark["ts"]]
    lines, gaps, end, idle, busy, wire = [], [], start, 0.0, 0.0, 0.0
    for x in sorted(on_gpu, key=lambda x: x["ts"]):
        gap, stop = max(0.0, x["ts"] - end), x["ts"] + x["dur"]
        name = x["name"].replace("void ", "").replace("at::native::", "")[:40]
        at = launched.get(x["args"].get("correlation"), float("nan")) - start
        idle, busy = idle + gap, busy + max(0.0, stop - max(end, x["ts"]))
        wire += x["dur"] if "nccl" in name else 0.0
        lines.append(
            f"{at:5.0f} launched {x['ts'] - start:5.0f} begins {gap:4.0f} idle {x['dur']:5.0f} us "
            f"s{x['args'].get('stream')} {name}"
        )
        gaps.append(
            (gap, f"{gap:.0f} us before {name}, launched {x['ts'] - start - at:.0f} us before it began")
        )
        end = max(end, stop)
    total = (
        f"{len(on_gpu)} kernels, {len(host_calls)} calls of CUDA, {end - start:.0f} us: busy {busy:.0f}, "
        f"idle {idle:.0f}, NCCL's kernels {wire:.0f}; host {host:.0f} us without the profiler"
    )
    large = [text for gap, text in sorted(gaps, reverse=True)[:4] if gap >= 15]
    return lines, total, large


def phases_of(r, run):
    """Return when the parts of a call end on the GPU, and when the host has launched them, in us."""
    from gdn.distributed import exchange as states
    from gdn.ops import borders

    marks = []

    def mark(name):
        event = None if r.cpu else r.torch.cuda.Event(enable_timing=True)
        if event is not None:
            event.record()
        marks.append((name, event, time.perf_counter()))

    def marked(name, function, rest=None):
        def wrapped(*args, **options):
            result = function(*args, **options)
            mark(name)
            return result if rest is None else (result[0], marked(rest, result[1]))

        return wrapped

    with contextlib.ExitStack() as stack:
        patches = [
            (borders, "forward_begin", "segments", "outputs"), (states.Gather, "start_states", "sent", None),
            (states.Gather, "finish_states", "received", None), (borders, "backward_begin", "C", "gradients"),
            (states.Gather, "start_gradients", "C sent", None),
            (states.Gather, "finish_gradients", "C received", None),
        ]  # fmt: skip
        for owner, name, label, rest in patches:
            stack.enter_context(mock.patch.object(owner, name, marked(label, getattr(owner, name), rest)))
        found = []
        for _ in range(5):
            r.dist.barrier()
            r.sync()
            marks.clear()
            mark("begin")
            run()
            r.sync()
            _, first, start = marks[0]
            on_gpu = [0.0 if r.cpu else 1e3 * first.elapsed_time(event) for _, event, _ in marks[1:]]
            found.append([(g, 1e6 * (t - start)) for g, (*_, t) in zip(on_gpu, marks[1:], strict=True)])
    # medians of 5 runs
    middle = [[sorted(x)[2] for x in zip(*part, strict=True)] for part in zip(*found, strict=True)]
    names = [name for name, *_ in marks[1:]]
    return ", ".join(f"{n} {gpu:.0f} ({host:.0f})" for n, (gpu, host) in zip(names, middle, strict=True))


def host_of(r):
    """Yield the functions in which a forward and a step of few tokens spend the time of the host."""
    T = 64 if r.cpu else 4096
    for name, context in (("one GPU", None), ("gather", r.context(exchange="gather"))):
        for what, run in zip(("step", "forward"), step_of(r, T // 2, context, r.rank), strict=True):
            count = 5 if r.cpu else 20
            for _ in range(3):
                run()
            r.dist.barrier()
            r.sync()
            began = time.perf_counter()
            for _ in range(count):
                run()
            each = 1e6 * (time.perf_counter() - began) / count
            recorder = cProfile.Profile()
            recorder.enable()
            for _ in range(count):
                run()
            recorder.disable()
            r.sync()
            stats = pstats.Stats(recorder).stats
            largest = sorted(stats.items(), key=lambda item: -item[1][2])[: 12 if context else 3]
            text = ", ".join(
                f"{function} {1e6 * own / count:.0f} ({calls // count})"
                for (_, _, function), (_, calls, own, _, _) in largest
            )
            if r.rank == 0:
                yield f"profile host {name} {what} of {T} tokens: {each:.0f} us; own us (calls): {text}"


@contextlib.contextmanager
def without_wire():
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


def layers(r):
    """Time a stack of layers on one GPU and on two, and with copies in place of the collectives."""
    hidden, (H, HV), torch = (64 if r.cpu else 2048), r.heads, r.torch
    torch.manual_seed(0)
    model = torch.nn.ModuleList(
        r.gdn.GatedDeltaNet(hidden, H, HV, r.dim, r.dim, backend=r.backend, device=r.device, dtype=r.dtype)
        for _ in range(LAYERS)
    )
    x = torch.randn(1, r.T, hidden, device=r.device, dtype=r.dtype)
    whole, half = x.detach().requires_grad_(), x[:, : r.T // 2].clone().requires_grad_()

    def run(y, context):
        for layer in model:
            y = y + layer(torch.nn.functional.rms_norm(y, (hidden,)), cp_context=context)
        return y

    def step(x, context):
        torch.autograd.grad(run(x, context).square().mean(), [x, *model.parameters()])

    def forward(x, context):
        with torch.no_grad():
            run(x, context)

    context = r.context()

    def copied(what, x, context):
        with without_wire():
            what(x, context)

    for name, what in (("train", step), ("forward", forward)):
        runs = [
            lambda what=what: what(whole, None), lambda what=what: what(half, None),
            lambda what=what: what(half, context), lambda what=what: copied(what, half, context),
        ]  # fmt: skip
        one, part, two, silent = r.by_turns(runs, seconds=1.0)
        yield (
            f"layers {LAYERS} of 1x{r.T} {name}: one GPU {one:.2f} ms, of T/2 {part:.2f}; two {two:.2f} ms, "
            f"{one / two:.2f}x, weak {two / part:.3f}; without the wire {silent:.2f} ms: "
            f"{(two - silent) / two:.1%} not hidden"
        )


def split(r):
    """Compare a layer that is split over the heads, and a compiled one with a context, with a whole one."""
    from torch.distributed.device_mesh import init_device_mesh

    hidden, T, torch = (32, 128, r.torch) if r.cpu else (512, 4096, r.torch)
    H, HV = (2, 4) if r.cpu else (4, 8)
    D = 16 if r.cpu else 64

    def make():
        torch.manual_seed(1)
        return r.gdn.GatedDeltaNet(hidden, H, HV, D, D, device=r.device, dtype=r.dtype)

    x, dy = (r.draw(1, T, hidden, seed=s).to(r.dtype) for s in (1, 2))
    alone, given = make(), x.clone().requires_grad_()
    want = alone(given)
    want.backward(dy)
    mesh = init_device_mesh("cpu" if r.cpu else "cuda", (2,), mesh_dim_names=("tp",))
    for sequence_parallel in (False, True):
        model = r.gdn.distributed.tensor_parallel(make(), mesh, sequence_parallel=sequence_parallel)
        mine = slice(r.rank * T // 2, (r.rank + 1) * T // 2) if sequence_parallel else slice(None)
        local = x[:, mine].clone().requires_grad_()
        y = model(local)
        y.backward(dy[:, mine])
        found = {"y": rel(y, want[:, mine]), "dx": rel(local.grad, given.grad[:, mine])}
        with torch.no_grad():
            for p, q in (
                (p, p.grad)
                for m in (model, alone)
                for p in m.parameters()
                if m is model or not sequence_parallel
            ):
                p.copy_(q)
        grads, wanted = model.state_dict(), alone.state_dict()
        found["parameters"] = max(rel(x.full_tensor(), wanted[n]) for n, x in grads.items())
        text = ", ".join(f"{n} {r.worst(e):.1e}" for n, e in found.items())
        yield f"split tp 2, sequence_parallel {sequence_parallel}: beside a whole layer {text}"
    model, context = make(), r.context()
    mine = context.shard(x, 1).requires_grad_()
    compiled = torch.compile(lambda x: model(x, cp_context=context), backend="aot_eager", fullgraph=True)
    results = []
    for run in (lambda x: model(x, cp_context=context), compiled):
        y = run(mine)
        results.append(
            (y.detach(), *torch.autograd.grad(y, [mine, *model.parameters()], context.shard(dy, 1)))
        )
    errors = [r.worst(rel(a, b)) for a, b in zip(*results, strict=True)]
    yield (
        f"split compiled fullgraph with a context, beside eager: {max(errors):.1e}; beside a whole layer: "
        + (f"y {r.worst(rel(results[1][0], context.shard(want, 1))):.1e}")
    )


def hybrid(r, width, dim):
    """Return a model of three gated delta rule layers and one of attention, as Qwen3.5 is built."""
    torch, F = r.torch, r.torch.nn.functional

    class Hybrid(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(64, width)
            self.mixers = torch.nn.ModuleList(r.gdn.GatedDeltaNet(width, 2, 4, dim, dim) for _ in range(3))
            self.ups = torch.nn.ModuleList(torch.nn.Linear(width, 4 * width) for _ in range(4))
            self.downs = torch.nn.ModuleList(torch.nn.Linear(2 * width, width) for _ in range(4))
            self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
            self.head = torch.nn.Linear(width, 64)

        def forward(self, ids, positions, context):
            x = self.embed(ids)
            for i, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
                y = F.rms_norm(x, (width,))
                x = x + (
                    self.attend(y, positions, context) if i == 3 else self.mixers[i](y, cp_context=context)
                )
                gate, value = up(F.rms_norm(x, (width,))).chunk(2, -1)
                x = x + down(F.silu(gate) * value)
            return self.head(F.rms_norm(x, (width,)))

        def attend(self, x, positions, context):
            q, k, v = self.qkv(x).chunk(3, -1)
            if context is not None:
                k, v = context.unshard(torch.cat([k, v], -1), 1).chunk(2, -1)
            mask = torch.arange(k.shape[1], device=x.device) <= positions[:, None]
            return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    torch.manual_seed(3)
    return Hybrid().to(r.device)


def model(r):
    """Compare the losses of 20 steps of Adam on two GPUs with those on one."""
    from torch.distributed.device_mesh import init_device_mesh

    kind, (width, dim, T) = ("cpu", (32, 8, 96)) if r.cpu else ("cuda", (256, 64, 1024))
    want = losses(r, hybrid(r, width, dim), T, None)
    yield f"model one GPU: loss {want[0]:.4f} to {want[-1]:.4f} in {len(want)} steps"
    for exchange, order in (("gather", "contiguous"), ("owner", "headtail")):
        found = losses(r, hybrid(r, width, dim), T, r.context(exchange=exchange, order=order, num_tokens=T))
        yield f"model cp 2 {exchange} {order}: {distance(r, found, want)}"
    split = r.gdn.distributed.tensor_parallel(
        hybrid(r, width, dim), init_device_mesh(kind, (2,), mesh_dim_names=("tp",))
    )
    yield f"model tp 2: {distance(r, losses(r, split, T, None), want)}"
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(kind, (2,), mesh_dim_names=("cp",))
    sharded = hybrid(r, width, dim)
    r.gdn.distributed.fully_shard_layers(sharded, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    context = r.gdn.ContextParallel(mesh["cp"], num_tokens=T)
    yield f"model cp 2 under FSDP2: {distance(r, losses(r, sharded, T, context, is_sharded=True), want)}"


def distance(r, losses, want):
    errors = [abs(a - b) / b for a, b in zip(losses, want, strict=True)]
    largest, first = r.worst(max(errors)), r.worst(errors[0])
    return f"largest relative difference of a loss {largest:.1e}, of the first {first:.1e}"


def losses(r, model, T, context, is_sharded=False, num_steps=20):
    """Return the losses of steps of Adam; is_sharded: FSDP2 averages gradients over the ranks."""
    torch, F = r.torch, r.torch.nn.functional
    ids = torch.randint(0, 64, (1, T + 1), generator=torch.Generator().manual_seed(4))
    # a repeated piece of text: the loss falls
    ids = ids[:, : T // 4].repeat(1, 5)[:, : T + 1].to(r.device)
    positions, inputs, labels = torch.arange(T, device=r.device), ids[:, :-1], ids[:, 1:]
    if context is not None:
        inputs, labels, positions = (
            context.shard(inputs, 1),
            context.shard(labels, 1),
            context.shard(positions, 0),
        )
    optimizer, found = torch.optim.Adam(model.parameters(), 1e-3, foreach=False), []
    for _ in range(num_steps):
        logits = model(inputs, positions, context)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / T
        optimizer.zero_grad()
        (loss * 2 if is_sharded else loss).backward()
        total = loss.detach().clone()
        if context is not None:
            r.dist.all_reduce(total)
            for parameter in () if is_sharded else model.parameters():
                r.dist.all_reduce(parameter.grad)
        found.append(float(total))
        optimizer.step()
    return found


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

    def theirs(T):
        cu = r.torch.tensor([0, T], dtype=r.torch.int32, device=r.device)
        context = build_cp_context(cu, group=r.dist.group.WORLD)
        x = r.inputs(T // 2, r.heads, r.rank)
        leaves, do = [t.detach().requires_grad_() for t in x], r.gradient(x[2])

        def run(inputs):
            return chunk_gated_delta_rule(
                *inputs, use_qk_l2norm_in_kernel=True, cu_seqlens=context.cu_seqlens, cp_context=context
            )[0]

        def step():
            r.torch.autograd.grad(run(leaves), leaves, do)

        def forward():
            with r.torch.no_grad():
                run(x)

        return step, forward

    # forward first: a time limit then costs the training's line alone. Tune at few tokens, then see whether
    # the size tunes again
    for i, name in ((1, "forward"), (0, "train")):
        for T in (4096, r.T):
            began = time.time()
            their = theirs(T)[i]
            their()
            r.sync()
            yield f"fla 1x{T} {name}: its first call {time.time() - began:.1f} s"
        ours = step_of(r, r.T // 2, r.context(), r.rank)[i]
        a, b = r.by_turns([ours, their], seconds=1.0)
        yield f"fla 1x{r.T} {name}: gdn {a:.2f} ms, fla {b:.2f} ms, {b / a:.2f}x"


CASES = {
    "scale": scale, "profile": profile, "exchange": exchange, "layers": layers, "check": check,
    "protocols": protocols, "split": split, "model": model, "fla": fla,
}  # fmt: skip


def on_rank(args):
    """Run cases as one rank, and print their lines: "@" and the line, "#" and the case that begins."""
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
    r = Rank(args, gdn, torch, dist)
    for run in args.runs.split(","):
        case, backend, dtype = run.split(":")
        dist.barrier()
        print("#" + case, flush=True)
        r.begin(backend, dtype)
        for line in CASES[case](r):
            # the kernels are of each rank, all other lines of both
            if args.rank == 0 or " rank " in line:
                print("@" + line, flush=True)
        if not args.cpu:
            torch.cuda.empty_cache()
    dist.barrier()
    print("#", flush=True)
    os._exit(0)


class Pair:
    """Hold the processes of both ranks, and what they print."""

    def __init__(self, args, runs, number):
        self.lines, self.logs = queue.Queue(), ["", ""]
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, "--runs", ",".join(":".join(x[:3]) for x in runs)]
        command += ["--T", str(args.T), *(["--cpu"] if args.cpu else [])]
        command += ["--store", f"/tmp/two-gpus-{os.getpid()}-{number}"]
        self.processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]  # fmt: skip
        for rank, process in enumerate(self.processes):
            threading.Thread(target=self._read, args=(rank, process), daemon=True).start()

    def _read(self, rank, process):
        for line in process.stdout:
            if line[0] in "@#":
                self.lines.put((rank, line.rstrip()))
            else:
                self.logs[rank] += line
        self.lines.put((rank, None))

    def follow(self, runs, until):
        """Print the lines; return how many runs were completed, and why no more: None if all were."""
        done, deadline = -1, time.time() + START
        while True:
            try:
                rank, line = self.lines.get(timeout=max(0.1, min(deadline, until) - time.time()))
            except queue.Empty:
                return max(done, 0), "time limit"
            if line is None:
                return max(done, 0), f"rank {rank} ended with exit code {self.processes[rank].wait()}"
            if line[0] == "@":
                print(line[1:], flush=True)
            elif rank == 0:
                done += 1
                if done == len(runs):
                    return done, None
                deadline = time.time() + runs[done][3]

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()


def main(args):
    """Run all cases, or those named in `--only`."""
    start, number = time.time(), 0
    until = start + args.seconds
    runs = [x for x in (CPU_RUNS if args.cpu else RUNS) if not args.only or x[0] in args.only.split(",")]
    while runs and time.time() < until - 5:
        pair = Pair(args, runs, number)
        done, why = pair.follow(runs, until)
        pair.close()
        print(f"-- {time.time() - start:.0f} s: completed {', '.join(x[0] for x in runs[:done])}", flush=True)
        if why is not None:
            print(f"FAILED {runs[done][:3]}: {why}", flush=True)
            for rank, log in enumerate(pair.logs):
                print(f"--- rank {rank}\n{log[-1500:]}", flush=True)
        runs, number = runs[done + 1 :], number + 1
    for run in runs:
        print(f"LEFT OUT {run[:3]}: no time", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", default="")
    parser.add_argument("--store", default="")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--T", type=int, default=131072)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=540)
    args = parser.parse_args()
    if args.runs:
        on_rank(args)
    else:
        main(args)
