"""Train a Transformers Qwen3.5, and time layers, on four GPUs beside one.

    python docs/lab/2026-11-28-four-gpus.py --out rows.jsonl

    curve    an unmodified Qwen3.5 learns the bytes of docs/**/*.md by FSDP2 and `gdn.context_parallel`, two
             sequences a step: dp x cp = 2 x 2, cp = 4, and one GPU, which is FSDP2 on a mesh of one rank
    errors   three layers by cp = 4, tp = 4, tp x cp = 2 x 2 and one GPU in bf16 beside one GPU in fp32
    times    the same layouts on one long sequence: forward, training step, memory
    wire     cp = 4 with copies in the place of the collectives: the communication that nothing hides

Each case has a time limit. A case that fails or takes longer ends the four processes, and new ones run the
cases after it. First, processes on torch's fake process group, which sends nothing, compile the kernels side
by side; the ranks find these in Triton's cache on disk. Rows are appended to `--out` as JSON lines at once.
`--cpu` runs toy sizes with gloo, where torch has no ring attention: the attention is that of
tests/test_distributed_transformers.py.
"""

import argparse
import contextlib
import functools
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
BEGAN = time.time()
RANKS = 4
# case, seconds at most on GPUs, after the start of the processes
CASES = {"curve bfloat16": 50, "curve float32": 60, "times": 45, "wire": 30, "errors": 30}
CPU_LIMIT = 200
START = 60  # seconds until the ranks have met
WARM = 50  # seconds that compiling takes at most
# what the processes on a fake group compile, as which rank, on which GPU: `layers` of a GPU's 80 GiB needs 45
WARM_RUNS = [
    ("curve bfloat16 ranks", 1, 0), ("curve bfloat16 ranks", 0, 0), ("curve float32 ranks", 1, 0),
    ("curve float32 ranks", 0, 0), ("curve float32 one", 0, 0), ("layers long", 1, 1), ("layers long", 0, 2),
    ("layers long", 3, 2), ("layers short", 1, 2), ("curve bfloat16 one", 0, 3), ("curve bfloat16 one", 1, 3),
    ("layers short", 0, 3),
]  # fmt: skip
LAYERS = 3


class Sizes:
    """Hold the sizes of all cases on GPUs, or toy sizes on CPUs."""

    def __init__(self, is_cpu, steps):
        self.steps = steps or (3 if is_cpu else 40)
        self.model_layers, self.width, self.tokens = (4, 32, 64) if is_cpu else (8, 1024, 8192)
        self.model_heads, self.model_dim = ((2, 4), 8) if is_cpu else ((8, 16), 128)
        self.attention = (2, 16) if is_cpu else (8, 128)
        self.hidden, self.heads, self.dim = (32, (4, 8), 8) if is_cpu else (2048, (16, 32), 128)
        self.short, self.long = (128, 256) if is_cpu else (8192, 131072)
        self.repeats = 3 if is_cpu else 9


class Rank:
    """Hold one process: its device, its sizes, and the meshes over all ranks, which are made once."""

    def __init__(self, number, args, device, is_fake=False):
        import torch
        from torch import distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        import gdn

        self.torch, self.dist, self.gdn = torch, dist, gdn
        self.number, self.is_cpu, self.is_fake = number, args.cpu, is_fake
        self.kind = "cpu" if args.cpu else "cuda"
        self.device = device
        self.sizes = Sizes(args.cpu, args.steps)
        text = b"\n".join(x.read_bytes() for x in sorted(ROOT.glob("docs/**/*.md")))
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
        self.meshes = {}
        self.init = init_device_mesh

    def mesh(self, a, b, names):
        """Return the mesh of a x b ranks with these names of its dimensions."""
        key = (a, b, names)
        if key not in self.meshes:
            self.meshes[key] = self.init(self.kind, (a, b), mesh_dim_names=names)
        return self.meshes[key]

    @functools.cached_property
    def alone(self):
        """Return the mesh of this rank alone."""
        return self.mesh(RANKS, 1, ("each", "one"))["one"]

    def sync(self):
        if not self.is_cpu:
            self.torch.cuda.synchronize()

    def clear(self):
        """Free memory, and begin to count its peak anew."""
        gc.collect()
        if not self.is_cpu:
            self.torch.cuda.empty_cache()
            self.torch.cuda.reset_peak_memory_stats()

    def peak(self):
        """Return the peak of memory since `clear` in MiB."""
        return 0.0 if self.is_cpu else self.torch.cuda.max_memory_allocated() / 2**20

    def every(self, value):
        """Return the values of all ranks."""
        values = [None] * RANKS
        if self.is_fake:
            return [value] * RANKS
        self.dist.all_gather_object(values, value)
        return values

    def mark(self):
        """Return a point in time: an event of the GPU, or the clock of the CPU."""
        if self.is_cpu:
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, a, b):
        """Return the milliseconds between two points in time that have passed."""
        return (b - a) * 1e3 if self.is_cpu else a.elapsed_time(b)

    def once(self, run):
        """Return the milliseconds of one run that all ranks begin together."""
        self.sync()
        self.dist.barrier()
        self.sync()
        start = self.mark()
        run()
        end = self.mark()
        self.sync()
        return self.between(start, end)

    def medians(self, runs):
        """Return the median of each run's milliseconds on the slowest rank; the runs take turns."""
        if self.is_fake:
            for run in runs:
                run()
            self.sync()
            return [1.0] * len(runs)
        for run in runs:
            run()
            run()
        columns = [[self.once(run) for run in runs] for _ in range(self.sizes.repeats)]
        mine = [statistics.median(x) for x in zip(*columns, strict=True)]
        return [max(x) for x in zip(*self.every(mine), strict=True)]


# ---------------------------------------------------------------- a Transformers model


def model_of(r):
    """Return a seeded Qwen3.5 in fp32 with the same weights on every rank."""
    import transformers

    transformers.logging.set_verbosity_error()
    s, torch = r.sizes, r.torch
    options = {
        "vocab_size": 256, "hidden_size": s.width, "intermediate_size": 2 * s.width,
        "num_hidden_layers": s.model_layers, "num_attention_heads": s.attention[0],
        "num_key_value_heads": s.attention[0], "head_dim": s.attention[1],
        "linear_num_key_heads": s.model_heads[0], "linear_num_value_heads": s.model_heads[1],
        "linear_key_head_dim": s.model_dim, "linear_value_head_dim": s.model_dim,
        "max_position_embeddings": 65536, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (s.model_layers // 4),
        "attn_implementation": "sdpa",
    }  # fmt: skip
    torch.manual_seed(3)
    with torch.device(r.device):
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**options)).float()


def sharded(r, mesh, dtype):
    """Return the model under FSDP2 on a mesh of one dimension, and its optimizer."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch, policy = r.torch, MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = model_of(r)
    r.gdn.distributed.fully_shard_layers(model, mesh=mesh, mp_policy=policy)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95))


def batch(r, step, rows):
    """Return the inputs of a step of two sequences, or of some of its rows; labels are shifted."""
    torch, T = r.torch, r.sizes.tokens
    pieces = []
    for row in rows:
        start = (2 * step + row) * T % (len(r.text) - T - 1)
        pieces.append(r.text[start : start + T + 1])
    ids = torch.stack(pieces)
    positions = torch.arange(T, device=r.device).repeat(len(rows), 1)
    return {"input_ids": ids[:, :-1].clone(), "position_ids": positions, "shift_labels": ids[:, 1:].clone()}


def backward(r, model, x, scale):
    """Run the forward and the backward; return the loss of these tokens, a part of the step's loss."""
    num_tokens = 2 * r.sizes.tokens
    loss = model(**x, labels=x["shift_labels"], use_cache=False, num_items_in_batch=num_tokens).loss
    # FSDP2 averages gradients over ranks whose losses are parts of one sum
    (loss * scale).backward()
    return loss.detach()


def on_one(r, model, step, groups):
    """Run a step on this rank alone; groups: the rows of each backward."""
    return sum(backward(r, model, batch(r, step, rows), 1) for rows in groups)


def on_ranks(r, model, step, mesh):
    """Run a step on the ranks of a mesh dp x cp."""
    attention = contextlib.nullcontext()
    if r.is_cpu:
        sys.path.insert(0, str(ROOT / "tests"))
        from test_distributed_transformers import attention_on_ranks

        attention = attention_on_ranks(mesh["cp"].get_group())
    share = 2 // mesh["dp"].size()
    first = mesh["dp"].get_local_rank() * share
    x = batch(r, step, range(first, first + share))
    options = {"buffers": list(x.values()), "buffer_seq_dims": [1, 1, 1]}
    with r.gdn.context_parallel(model, mesh["cp"], **options), attention:
        return backward(r, model, x, RANKS)


def train(r, mesh, dtype, run, steps=None):
    """Return losses of this rank, median milliseconds of a step, peak MiB; run(model, step) is a step."""
    model, optimizer = sharded(r, mesh, dtype)
    r.clear()
    steps, losses, marks = steps or r.sizes.steps, [], [r.mark()]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-4 * min(1.0, (step + 1) / 10)
        losses.append(run(model, step))
        optimizer.step()
        optimizer.zero_grad()
        marks.append(r.mark())
    r.sync()
    times = [r.between(a, b) for a, b in zip(marks, marks[1:], strict=False)]
    first = min(5, steps - 1)
    mixer = model.model.layers[0].linear_attn
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == r.torch.float32
    return r.torch.stack(losses).double().cpu(), statistics.median(times[first:]), r.peak()


def one_gpu(r, dtype):
    """Return the names of the four runs on one GPU, of which each rank has one, and that of this rank."""
    variants = {
        "one GPU": ([[0, 1]], {}),
        "one GPU, triton": ([[0, 1]], {"GDN_BACKEND": "triton"}),
        "one GPU, two backwards": ([[0], [1]], {}),
        "one GPU, again": ([[0, 1]], {}),
    }
    if dtype == "float32" or r.is_cpu:  # fp32 is run by `triton` without asking
        del variants["one GPU, triton"]
        variants["one GPU, rows swapped"] = ([[1, 0]], {})
    names = list(variants)
    return names, variants[names[r.number]]


def curve(r, dtype):
    """Yield losses, milliseconds and memory of each layout, and distances from one GPU."""
    names, (groups, environment) = one_gpu(r, dtype)
    with r.gdn.patch_transformers():
        with mock.patch.dict(os.environ, environment):
            mine = train(r, r.alone, dtype, lambda model, step: on_one(r, model, step, groups))
        results = dict(zip(names, r.every(mine), strict=True))
        base = results["one GPU"][0]
        for name, (losses, ms, mib) in results.items():
            yield curve_row(name, dtype, losses, ms, mib, base)
        for name, shape in (("dp x cp = 2 x 2", (2, 2)), ("cp = 4", (1, 4))):
            r.clear()
            mesh, flat = rank_mesh(r, shape)
            losses, ms, mib = train(
                r, flat, dtype, lambda model, step, mesh=mesh: on_ranks(r, model, step, mesh)
            )
            every = r.every((losses, ms, mib))
            total = sum(x[0] for x in every)
            yield curve_row(name, dtype, total, max(x[1] for x in every), max(x[2] for x in every), base)


def rank_mesh(r, shape):
    """Return a mesh dp x cp, and the same ranks in one dimension."""
    mesh = r.mesh(*shape, ("dp", "cp"))
    return mesh, mesh._flatten(f"dp_cp_{shape[0]}")


def curve_row(name, dtype, losses, ms, mib, base):
    distance = (losses - base).abs()
    return {
        "case": f"curve {dtype}", "layout": name, "first": float(losses[0]), "last": float(losses[-1]),
        "distance": float(distance.max()), "mean_distance": float(distance.mean()),
        "distance_of_first": float(distance[0]), "ms": ms, "mib": mib,
        "losses": [round(x, 8) for x in losses.tolist()],
    }  # fmt: skip


# ---------------------------------------------------------------- a stack of layers


def stack_of(r, dtype):
    """Return seeded layers whose weights are those of bf16, on CPUs of fp32, in any dtype."""
    torch, s = r.torch, r.sizes
    torch.manual_seed(5)
    narrow = torch.float32 if r.is_cpu else torch.bfloat16
    layers = torch.nn.ModuleList(
        r.gdn.GatedDeltaNet(s.hidden, *s.heads, s.dim, s.dim, device=r.device, dtype=narrow)
        for _ in range(LAYERS)
    )
    return layers.to(dtype) if dtype != narrow else layers


def apply_stack(layers, x, context):
    import torch

    for layer in layers:
        x = x + layer(torch.nn.functional.rms_norm(x, x.shape[-1:]), cp_context=context)
    return x


def layouts(r, T):
    """Return tp and the context of each layout of ranks, by its name."""
    made = {}
    for name, cp, tp in (("cp = 4", 4, 1), ("tp = 4", 1, 4), ("tp x cp = 2 x 2", 2, 2)):
        mesh = r.mesh(cp, tp, ("cp", "tp"))
        context = r.gdn.ContextParallel(mesh["cp"], num_tokens=T) if cp > 1 else None
        made[name] = (mesh["tp"] if tp > 1 else None, context)
    return made


def wide(r):
    return r.torch.float32


def narrow(r):
    return r.torch.float32 if r.is_cpu else r.torch.bfloat16


def drawn(r, T, seed):
    """Return random hidden states of all tokens, the same on all ranks."""
    generator = r.torch.Generator(r.device).manual_seed(seed)
    x = r.torch.randn(1, T, r.sizes.hidden, generator=generator, device=r.device)
    return x.to(narrow(r))


def gradients(r, layers, group):
    """Return the fp32 gradients of whole layers by name, summed over the ranks of a context."""
    torch, summed = r.torch, []
    for parameter in layers.parameters():
        gradient = parameter.grad
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        local = local.float()
        if group is not None:
            r.dist.all_reduce(local, group=group)
        summed.append(local)
    layers.zero_grad()
    layers.float()  # a bf16 parameter would round the sum
    with torch.no_grad():
        for parameter, local in zip(layers.parameters(), summed, strict=True):
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).copy_(local)
    state = layers.state_dict()
    return {n: (x.full_tensor() if hasattr(x, "full_tensor") else x).double() for n, x in state.items()}


def computed(r, dtype, tp, context):
    """Return output, input gradient and parameter gradients of all tokens, on every rank."""
    T = r.sizes.short
    layers = stack_of(r, dtype)
    if tp is not None:
        r.gdn.distributed.tensor_parallel(layers, tp)
    x, dy = (drawn(r, T, seed).to(dtype) for seed in (1, 2))
    if context is not None:
        x, dy = context.shard(x, 1), context.shard(dy, 1)
    x = x.clone().requires_grad_()
    y = apply_stack(layers, x, context)
    y.backward(dy)
    y, dx, group = y.detach(), x.grad, None
    if context is not None:
        y, dx, group = context.unshard(y, 1), context.unshard(dx, 1), context.mesh.get_group()
    return {"y": y.double(), "dx": dx.double(), **gradients(r, layers, group)}


def relative(pairs):
    """Return the distance of all pairs together over the norm of the second ones."""
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    return (apart / max(sum(float(b.square().sum()) for _, b in pairs), 1e-300)) ** 0.5


def errors(r):
    """Yield the errors of each layout in bf16 against one GPU in fp32."""
    exact = computed(r, wide(r), None, None)
    cases = {"one GPU": (None, None), **layouts(r, r.sizes.short)}
    for name, (tp, context) in cases.items():
        result = computed(r, narrow(r), tp, context)
        each = {n: relative([(x, exact[n])]) for n, x in result.items()}
        parameters = [n for n in result if n not in ("y", "dx")]
        worst = max(parameters, key=each.__getitem__)
        yield {
            "case": "errors", "layout": name, "T": r.sizes.short, "y": each["y"], "dx": each["dx"],
            "parameters": relative([(result[n], exact[n]) for n in parameters]),
            "largest": each[worst], "largest_of": worst, "each": each,
        }  # fmt: skip


def runs_of(r, layers, x, context):
    """Return the forward and the training step of the stack: gradients of the input and all parameters."""
    given = x.clone().requires_grad_()

    def forward():
        with r.torch.no_grad():
            apply_stack(layers, x, context)

    def step():
        apply_stack(layers, given, context).float().square().mean().backward()
        given.grad = None
        layers.zero_grad()

    return forward, step


def times(r):
    """Yield milliseconds and memory of each layout on one long sequence."""
    T, torch = r.sizes.long, r.torch
    for name, (tp, context) in {**layouts(r, T), "one GPU": (None, None)}.items():
        layers, x = stack_of(r, narrow(r)), drawn(r, T, 1)
        if tp is not None:
            r.gdn.distributed.tensor_parallel(layers, tp)
        x = x if context is None else context.shard(x, 1).clone()
        row = {"case": "times", "layout": name, "T": T}
        for what, run in zip(("forward", "train"), runs_of(r, layers, x, context), strict=True):
            r.clear()
            (row[f"{what}_ms"],) = r.medians([run])
            row[f"{what}_mib"] = max(r.every(r.peak()))
        del layers, x, run
        yield row
    torch.manual_seed(0)


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


def wire(r):
    """Yield the times of cp = 4 with and without communication, and of a quarter of the tokens alone."""
    T = r.sizes.long
    layers, x = stack_of(r, narrow(r)), drawn(r, T, 1)
    mesh = r.mesh(4, 1, ("cp", "tp"))
    x = r.gdn.ContextParallel(mesh["cp"], num_tokens=T).shard(x, 1).clone()
    r.clear()
    quarter = runs_of(r, layers, x, None)
    for exchange in (None, "gather", "owner"):
        context = r.gdn.ContextParallel(mesh["cp"], num_tokens=T, exchange=exchange)
        split = runs_of(r, layers, x, context)
        for i, what in enumerate(("forward", "train")):

            def silent(run=split[i]):
                with without_wire():
                    run()

            four, copies, part = r.medians([split[i], silent, quarter[i]])
            yield {
                "case": "wire", "what": what, "exchange": exchange or "automatic", "T": T, "cp4_ms": four,
                "copies_ms": copies, "quarter_ms": part, "not_hidden": (four - copies) / four,
            }  # fmt: skip


# ---------------------------------------------------------------- processes


def run_case(r, case):
    name, _, dtype = case.partition(" ")
    functions = {"curve": curve, "errors": errors, "times": times, "wire": wire}
    yield from functions[name](r, dtype) if dtype else functions[name](r)


def start(number, args, backend, gpu, **options):
    """Begin the process group of this process; return its Rank."""
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1 if args.cpu else 4)
    device = torch.device("cpu") if args.cpu else torch.device("cuda", gpu)
    if not args.cpu:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # a mesh would choose a device before the first tensor
    if backend == "nccl":
        options["device_id"] = device
    dist.init_process_group(backend, rank=number, world_size=RANKS, **options)
    return Rank(number, args, device, backend == "fake")


def serve(number, args, cases, store, pipe):
    """Run cases as one rank: send (what, case, value)."""
    case = "start"
    try:
        from torch import distributed as dist

        r = start(number, args, "gloo" if args.cpu else "nccl", number, store=dist.FileStore(store, RANKS))
        import transformers  # noqa: F401

        r.every(None)
        pipe.send(("ready", case, None))
        for case in cases:
            assert pipe.recv() == case
            r.clear()
            for row in run_case(r, case):
                if number == 0:
                    pipe.send(("row", case, row))
            pipe.send(("done", case, None))
    except BaseException:
        pipe.send(("failed", case, traceback.format_exc()))
    pipe.recv()  # the parent ends this process; the end of the process group would wait for other ranks


def warm(part, number, gpu, args, log):
    """Compile the kernels of one part as one rank of a fake process group, which sends nothing."""
    began, said = time.time(), "ok"
    sys.stdout = sys.stderr = open(log + ".err", "w")  # noqa: SIM115 - open for the life of the process
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        r = start(number, args, "fake", gpu, store=FakeStore())
        import gdn
        from gdn.integrations import transformers_cp

        gdn.ContextParallel = functools.partial(gdn.ContextParallel, check="never")

        def observed(order, num_tokens, mesh):
            return gdn.ContextParallel(mesh, order="headtail", num_tokens=num_tokens)

        with mock.patch.object(transformers_cp, "_observed", observed), without_wire():
            case, *rest = part.split()
            (warm_layers if case == "layers" else warm_curve)(r, *rest)
        r.sync()
    except Exception as error:
        said = f"{type(error).__name__} {str(error)[:200]}"
        traceback.print_exc()
    Path(log).write_text(f"{time.time() - began:.0f} s {said}")
    os._exit(0)


def warm_curve(r, dtype, where):
    """Run two steps of one GPU, or of both layouts of ranks."""
    with r.gdn.patch_transformers():
        if where == "one":
            _, (groups, environment) = one_gpu(r, dtype)
            with mock.patch.dict(os.environ, environment):
                train(r, r.alone, dtype, lambda model, step: on_one(r, model, step, groups), 2)
            return
        for shape in ((2, 2), (1, 4)):
            mesh, flat = rank_mesh(r, shape)
            train(r, flat, dtype, lambda model, step, mesh=mesh: on_ranks(r, model, step, mesh), 2)


def warm_layers(r, length):
    """Run the stack by each layout; one rank also on one GPU, which needs memory and time."""
    T = getattr(r.sizes, length)
    cases = layouts(r, T)
    if r.number == 1:
        cases["one GPU"] = None, None
        if length == "short":
            r.medians(runs_of(r, stack_of(r, wide(r)), drawn(r, T, 1).to(wide(r)), None))
    for tp, context in cases.values():
        layers, x = stack_of(r, narrow(r)), drawn(r, T, 1)
        if tp is not None:
            r.gdn.distributed.tensor_parallel(layers, tp, src_data_rank=None)
        r.medians(runs_of(r, layers, x if context is None else context.shard(x, 1).clone(), context))
        del layers, x
        r.clear()


class Pool:
    """Hold the processes of four ranks, which run cases one after the other."""

    def __init__(self, args, cases, folder):
        context = multiprocessing.get_context("spawn")
        store = tempfile.mktemp(dir=folder)
        self.pipes, self.processes, self.is_ready = [], [], False
        for number in range(RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(number, args, cases, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def start(self, take):
        """Wait until the ranks have met, once."""
        if self.is_ready:
            return None
        self.is_ready = True
        return self.receive(START, take)

    def receive(self, limit, take):
        """Wait until all ranks are done; take(row) their rows; return None or why one failed."""
        until, left = time.time() + limit, list(self.pipes)
        while left:
            ready = wait(left, timeout=max(0.0, until - time.time()))
            if not ready:
                return f"no end within {limit:.0f} s on ranks {[self.pipes.index(x) for x in left]}"
            for pipe in ready:
                try:
                    what, _, value = pipe.recv()
                except EOFError:
                    return f"rank {self.pipes.index(pipe)} ended"
                if what == "failed":
                    return f"rank {self.pipes.index(pipe)}: {value}"
                if what == "row":
                    take(value)
                else:
                    left.remove(pipe)
        return None

    def run(self, case, limit, take):
        for pipe in self.pipes:
            pipe.send(case)
        return self.receive(limit, take)

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()


def compile_all(args, folder):
    """Run `warm` for all parts side by side, and wait; return a line about them."""
    context, began, jobs = multiprocessing.get_context("spawn"), time.time(), []
    only = args.only.split(",")
    for i, (part, number, gpu) in enumerate(WARM_RUNS):
        if not any(x in part or part.startswith("layers") and not x.startswith("curve") for x in only):
            continue
        log = f"{folder}/warm{i}"
        process = context.Process(target=warm, args=(part, number, gpu, args, log), daemon=True)
        process.start()
        jobs.append((f"{part} {number}", process, log))
    said = []
    for name, process, log in jobs:
        process.join(max(0.1, began + WARM - time.time()))
        if process.is_alive():
            process.kill()
            process.join()
        said.append(f"{name}: {Path(log).read_text() if Path(log).exists() else 'ended'}")
    return said


def table(rows):
    """Print the rows of each case as a table."""
    one = next((x for x in rows if x.get("case") == "times" and x.get("layout") == "one GPU"), None)
    for row in rows:
        case = row["case"]
        if "failed" in row:
            lines = row["failed"].strip().splitlines()
            print(f"{case}: FAILED {lines[0]} ... {lines[-1][:300]}")
        elif case.startswith("curve"):
            print(
                f"{case:15} {row['layout']:24} {row['first']:.4f} to {row['last']:.4f}, "
                f"apart {row['distance']:.1e} (mean {row['mean_distance']:.1e}), {row['ms']:.1f} ms, "
                f"{row['mib']:.0f} MiB"
            )
        elif case == "errors":
            print(
                f"errors 1e-3     {row['layout']:24} y {1e3 * row['y']:.3f}, dx {1e3 * row['dx']:.3f}, "
                f"parameters {1e3 * row['parameters']:.3f}, largest {1e3 * row['largest']:.3f} "
                f"({row['largest_of']})"
            )
        elif case == "times":
            texts = []
            for what in ("forward", "train"):
                ms = row[f"{what}_ms"]
                speed = f" ({one[f'{what}_ms'] / ms:.2f}x)" if one else ""
                texts.append(f"{what} {ms:.2f} ms{speed}, {row[f'{what}_mib']:.0f} MiB")
            print(f"times 1x{row['T']:<7} {row['layout']:24} {'; '.join(texts)}")
        elif case == "wire":
            print(
                f"wire {row['what']:10} {row['exchange']:24} {row['cp4_ms']:.2f} ms, copies "
                f"{row['copies_ms']:.2f}, T/4 alone {row['quarter_ms']:.2f}: "
                f"{row['not_hidden']:.1%} not hidden"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", default="four-gpus.jsonl", help="where JSON lines are appended")
    parser.add_argument("--only", default="", help="cases whose names contain one of these, by commas")
    parser.add_argument("--steps", type=int, default=0, help="of a curve")
    parser.add_argument("--seconds", type=float, default=0, help="of all cases together")
    parser.add_argument("--no-warm", action="store_true", help="compile kernels in the cases")
    args = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast
    os.environ.setdefault("OMP_NUM_THREADS", "1" if args.cpu else "4")
    limit = args.seconds or (600 if args.cpu else 150)
    pending = [x for x in CASES if not args.only or any(y in x for y in args.only.split(","))]
    rows = []

    def take(row):
        rows.append(row)
        with open(args.out, "a") as file:
            file.write(json.dumps(row) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        pool = None
        if not args.no_warm:
            pool = None if args.cpu else Pool(args, pending, folder)
            said = compile_all(args, folder)
            print(f"{time.time() - BEGAN:.0f} s: compiled ({'; '.join(said)})", flush=True)
        while pending and time.time() - BEGAN < limit:
            pool = pool or Pool(args, pending, folder)
            failure = pool.start(take)
            case, began = pending.pop(0), time.time()
            if failure is None:
                most = CPU_LIMIT if args.cpu else CASES[case]
                failure = pool.run(case, min(most, limit + BEGAN - time.time()), take)
            state = "done" if failure is None else "FAILED"
            print(f"{time.time() - BEGAN:.0f} s: {case} {state} in {time.time() - began:.0f} s", flush=True)
            if failure is not None:
                take({"case": case, "failed": failure})
                pool.end()
                pool = None
        for case in pending:
            take({"case": case, "failed": f"not begun within {limit:.0f} s"})
        if pool is not None:
            pool.end()
    table(rows)
    print(f"{time.time() - BEGAN:.0f} s")


if __name__ == "__main__":
    main()
