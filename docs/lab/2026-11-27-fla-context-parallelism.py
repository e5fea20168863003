"""Time FLA's context parallelism beside gdn's on two GPUs within a minute.

    PYTHONPATH=src:FLA python docs/lab/2026-11-27-fla-context-parallelism.py

FLA's kernels are tuned over the configurations in `TRIED`, which 14 processes compile into Triton's cache
without launching them; three further processes compile gdn's, of either rank on torch's fake process group
and of one GPU. The two ranks have meanwhile met, and go on when all is compiled, or after `--warm` seconds.
FLA refuses its backward with Triton 3.4 to 3.7.0 on Hopper ("incorrect results"); the check is left out, so
that its time can be read, and the differences from gdn's gradients are printed. Sizes, inputs and clocks are
those of the script of 2026-11-25 for two GPUs.
"""

import argparse
import gc
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

BEGAN = time.time()
spec = importlib.util.spec_from_file_location("two_gpus", Path(__file__).with_name("2026-11-25-two-gpus.py"))
base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)
warnings.filterwarnings("ignore")

WORKERS = 14
# other modules have kernels of the same names
MODULES = (
    "fla.ops.cp.", "fla.ops.common.chunk_", "fla.ops.gated_delta_rule.", "fla.ops.utils.", "fla.modules.",
)  # fmt: skip
# kernel -> which of its configurations are tried: a predicate of arguments, warps and stages
TRIED = {
    "l2norm_fwd_kernel": lambda a, w, s: (w, a["BT"]) in ((4, 16), (4, 32), (8, 32), (8, 64)),
    "l2norm_bwd_kernel": lambda a, w, s: (w, a["BT"]) in ((4, 16), (4, 32), (8, 32), (8, 64)),
    "chunk_local_cumsum_scalar_kernel": lambda a, w, s: w < 8,
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": lambda a, w, s: True,
    "recompute_w_u_fwd_kernel": lambda a, w, s: s < 4,
    "chunk_cp_fwd_kernel_h": lambda a, w, s: s in (2, 3),
    "chunk_cp_fwd_bwd_kernel_merge": lambda a, w, s: w == 4 and s == 2,
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": lambda a, w, s: w == 4 and s < 4 or w == 2 and s == 3,
    "chunk_fwd_kernel_o": lambda a, w, s: True,
    "chunk_bwd_kernel_dv_local": lambda a, w, s: s < 4,
    "chunk_cp_bwd_kernel_dh": lambda a, w, s: s in (2, 3),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": lambda a, w, s: w == 4 and s < 4 or w == 2 and s == 3,
    "chunk_bwd_kernel_dqkwg": lambda a, w, s: s < 4,
    "prepare_wy_repr_bwd_kernel": lambda a, w, s: s < 4,
}
COST = {
    "chunk_cp_fwd_kernel_h": 4,
    "chunk_cp_bwd_kernel_dh": 4,
    "chunk_bwd_kernel_dqkwg": 4,
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": 2,
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": 3,
    "chunk_cp_fwd_bwd_kernel_merge": 2,
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": 2,
}


def name_of(tuner):
    fn = tuner.fn
    while not hasattr(fn, "__name__"):
        fn = fn.fn
    return fn.__name__ if fn.__module__.startswith(MODULES) else fn.__module__


def shrink():
    """Leave each of FLA's autotuners the configurations that are tried, and 16 ms for each."""
    import triton.testing
    from fla.ops.common import chunk_o
    from triton.runtime.autotuner import Autotuner

    def bench(call, quantiles):
        return triton.testing.do_bench(call, warmup=4, rep=16, quantiles=quantiles)

    chunk_o.TRITON_ABOVE_3_7_1 = True
    counts = {}
    for x in [x for x in gc.get_objects() if isinstance(x, Autotuner)]:
        takes, before = TRIED.get(name_of(x), lambda *a: False), len(x.configs)
        x.configs = [c for c in x.configs if takes(c.kwargs, c.num_warps, c.num_stages)] or x.configs[:2]
        x._do_bench = bench
        counts[name_of(x)] = (len(x.configs), before)
    return {name: counts[name] for name in TRIED}


def fla_calls(r, context):
    """Return FLA's forward and step on this rank's tokens, each returning what it computes."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    x = r.inputs(r.T // 2, r.heads, r.rank)
    leaves, do = [t.detach().requires_grad_() for t in x], r.gradient(x[2])
    options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": context.cu_seqlens, "cp_context": context}

    def forward():
        with r.torch.no_grad():
            return (chunk_gated_delta_rule(*x, **options)[0],)

    def step():
        o = chunk_gated_delta_rule(*leaves, **options)[0]
        return (o.detach(), *r.torch.autograd.grad(o, leaves, do))

    return forward, step


def fla_context(r):
    from fla.ops.cp import build_cp_context

    cu = r.torch.tensor([0, r.T], dtype=r.torch.int32, device=r.device)
    return build_cp_context(cu, group=r.dist.group.WORLD)


def fake_rank(args, rank):
    """Return the rank's cases on a process group that sends nothing."""
    import torch
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import gdn

    args.rank = rank
    torch.cuda.set_device(args.rank)
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    r = base.Rank(args, gdn, torch, dist)
    r.begin("auto", "bfloat16")
    return r


def warm_gdn(args, index):
    """Compile gdn's kernels of one rank, or of one GPU alone (2), by running them."""
    r = fake_rank(args, index % 2)
    with base.without_wire():
        size = (r.T, None) if index == 2 else (r.T // 2, r.context(check="never"))
        step, forward = base.step_of(r, *size)
        forward()
        step()
    r.sync()


def warm_fla(args, index):
    """Compile a share of FLA's kernels of both ranks, launching none."""
    r = fake_rank(args, index % 2)
    from triton.runtime.autotuner import Autotuner

    load, seen = [0.0] * WORKERS, set()
    fla_calls(r, fla_context(r))  # imports
    shrink()

    def run(self, *inputs, **kwargs):
        self.nargs = dict(zip(self.arg_names, inputs, strict=False))
        kwargs.pop("warmup", None)
        configs = self.configs
        if self.early_config_prune:
            configs = self.early_config_prune(configs, self.nargs, **kwargs)
        for i, c in enumerate(configs):
            # two calls of a kernel in a step may differ in constants (REVERSE, NB): each has its own key
            constants = sorted((k, str(v)) for k, v in kwargs.items() if isinstance(v, bool | int))
            given = [getattr(x, "dtype", type(x).__name__) for x in (*inputs, *kwargs.values())]
            key = (name_of(self), i, str(constants), str(given))
            if key in seen:
                continue
            seen.add(key)
            at = min(range(WORKERS), key=lambda j: load[j])
            load[at] += COST.get(name_of(self), 1)
            if at == index:
                try:
                    self.fn.warmup(*inputs, **kwargs, **c.all_kwargs())
                except Exception as e:
                    print("@", name_of(self), c, type(e).__name__, str(e)[:120], flush=True)

    for cls in (Autotuner, *Autotuner.__subclasses__()):
        cls.run = run
    for rank in (0, 1):
        r.dist.get_rank = lambda group=None, rank=rank: rank
        forward, step = fla_calls(r, fla_context(r))
        forward()
        step()


def measure(r):
    """Yield lines: differences from gdn, first calls, times by turns, memory."""
    context = fla_context(r)
    calls = fla_calls(r, context)
    yield f"configurations, of: {shrink()}"
    ours = base.step_of(r, r.T // 2, r.context(), r.rank)[::-1]
    alone = base.step_of(r, r.T, None, r.rank)[::-1]
    x = r.inputs(r.T // 2, r.heads, r.rank)
    mine = base.train(r, x, r.gradient(x[2]), cp_context=r.context())
    mine = (mine[0], *mine[2:])
    for name, our, one, their in zip(("forward", "train"), ours, alone, calls, strict=True):
        began = time.time()
        found = their()
        r.sync()
        yield f"{name}: FLA's first call {time.time() - began:.1f} s"
        errors = [r.worst(base.rel(a, b)) for a, b in zip(found, mine, strict=False)]
        text = " ".join(f"{n} {e:.1e}" for n, e in zip(("o", *base.NAMES[2:7]), errors, strict=False))
        yield f"{name}: FLA differs from gdn by {text}"
        del found
        for how, count in (("one call", 1), (f"{base.STACK} in a row", base.STACK)):
            runs = [lambda f=f, n=count: [f() for _ in range(n)] for f in (one, our, their)]
            g, a, b = (x / count for x in r.by_turns(runs, 2, 0.3))
            yield f"{name} {how}: one GPU {g:.3f} ms, gdn {a:.3f} ms, FLA {b:.3f} ms, {b / a:.2f}x"
        mib = [base.peak(r, f) for f in (our, their)]
        yield f"{name}: MiB a rank, gdn {mib[0]:.0f}, FLA {mib[1]:.0f}"


def on_rank(args):
    import torch
    from torch import distributed as dist

    import gdn

    torch.cuda.set_device(args.rank)
    store, device = dist.FileStore(args.store, 2), torch.device("cuda", args.rank)
    dist.init_process_group("nccl", rank=args.rank, world_size=2, store=store, device_id=device)
    r = base.Rank(args, gdn, torch, dist)
    r.begin("auto", "bfloat16")
    dist.barrier()
    import fla.ops.gated_delta_rule  # noqa: F401

    while not Path(args.store + ".go").exists():
        time.sleep(0.1)
    for line in measure(r):
        if args.rank == 0:
            print(f"[{time.time() - args.began:3.0f}] {line}", flush=True)
    dist.barrier()
    os._exit(0)


def main(args):
    store = f"{tempfile.mkdtemp()}/store"
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "FLA_FLASH_QLA": "0"}
    command = [sys.executable, __file__, "--T", str(args.T), "--store", store, "--began", str(BEGAN)]
    start = lambda *more, **options: subprocess.Popen([*command, *more], env=environment, **options)  # noqa: E731
    names = ["gdn:1", "gdn:0", "gdn:2", *(f"fla:{i}" for i in range(WORKERS))]
    logs = [tempfile.TemporaryFile("w+") for _ in names]  # noqa: SIM115
    warm = [start("--worker", n, stdout=x, stderr=x) for n, x in zip(names, logs, strict=True)]
    ranks = [start("--rank", str(rank), "--ranks") for rank in range(2)]
    while time.time() < BEGAN + args.warm and any(w.poll() is None for w in warm):
        time.sleep(0.1)
    late = [n for n, w in zip(names, warm, strict=True) if w.poll() is None]
    for name, w, log in zip(names, warm, logs, strict=True):
        if w.poll() is None:
            w.kill()
        log.seek(0)
        lines = log.read().splitlines()
        if w.poll() or any(line.startswith("@") for line in lines):
            print(f"warm {name}: {[x for x in lines if x[0:1] == '@'] or lines[-3:]}", flush=True)
    print(f"[{time.time() - BEGAN:3.0f}] compiled, but for {late}", flush=True)
    Path(store + ".go").touch()
    for rank in ranks:
        try:
            rank.wait(max(1, BEGAN + args.seconds - time.time()))
        except subprocess.TimeoutExpired:
            print("time limit", flush=True)
            rank.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", default="")
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", default="")
    parser.add_argument("--began", type=float, default=BEGAN)
    parser.add_argument("--T", type=int, default=131072)
    parser.add_argument("--warm", type=float, default=50, help="seconds that compiling takes at most")
    parser.add_argument("--seconds", type=float, default=85)
    args = parser.parse_args()
    args.cpu = False
    if args.worker:
        kind, number = args.worker.split(":")
        {"gdn": warm_gdn, "fla": warm_fla}[kind](args, int(number))
        os._exit(0)
    elif args.ranks:
        on_rank(args)
    else:
        main(args)
