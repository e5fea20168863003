"""Run `gdn bench ranks` with FLA's context parallelism beside gdn's, without minutes of FLA's tuning.

    PYTHONPATH=src:benchmarks:FLA python docs/lab/2026-11-28-four-gpus-fla.py --ranks 4 --out rows.jsonl

FLA's kernels are tuned over the configurations of the script of 2026-11-27, which `--workers` processes
compile first into Triton's cache, of every rank on torch's fake process group, launching none. FLA refuses
its backward with Triton 3.4 to 3.7.0 on Hopper ("incorrect results"); the check is left out, so that its
time can be read, and its gradients are compared with gdn's.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

BEGAN = time.time()
warnings.filterwarnings("ignore")
NAME = "2026-11-27-fla-context-parallelism.py"
spec = importlib.util.spec_from_file_location("before", Path(__file__).with_name(NAME))
before = importlib.util.module_from_spec(spec)
spec.loader.exec_module(before)


def scaling_of(args):
    from gdn_bench.passes import ranks

    return ranks.Scaling(
        tokens=args.tokens, local=args.local, gate="mild", exchanges=("gather",), providers=("gdn", "fla")
    )


def measure(rank, scaling):
    """Yield the rows of `gdn bench ranks` with FLA's tuning cut short."""
    import fla.ops.gated_delta_rule  # noqa: F401

    from gdn_bench.passes import ranks

    before.shrink()
    yield from ranks.measure(rank, scaling)


def warm(args):
    """Compile a share of FLA's kernels of all ranks, launching none."""
    import fla.ops.gated_delta_rule  # noqa: F401
    import torch
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from triton.runtime.autotuner import Autotuner

    from gdn_bench.passes import ranks
    from gdn_bench.timing.ranks import Rank

    torch.cuda.set_device(args.worker % torch.cuda.device_count())
    dist.init_process_group("fake", rank=0, world_size=args.ranks, store=FakeStore())
    before.shrink()
    load, seen, scaling = [0.0] * args.workers, set(), scaling_of(args)

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
            key = (before.name_of(self), i, str(constants), str(given))
            if key in seen:
                continue
            seen.add(key)
            at = min(range(args.workers), key=lambda j: load[j])
            load[at] += before.COST.get(before.name_of(self), 1)
            if at == args.worker:
                try:
                    self.fn.warmup(*inputs, **kwargs, **c.all_kwargs())
                except Exception as e:
                    print("@", before.name_of(self), c, type(e).__name__, str(e)[:120], flush=True)

    for cls in (Autotuner, *Autotuner.__subclasses__()):
        cls.run = run
    for number in range(args.ranks):
        dist.get_rank = lambda group=None, number=number: number
        rank = Rank(number, args.ranks, torch.device("cuda", torch.cuda.current_device()))
        given = scaling.draw(rank, args.tokens // args.ranks, 0)
        calls = ranks.bind(rank, given, "fla", "gather", args.tokens)
        for job in ("forward", "train"):
            calls[job]()
        torch.cuda.synchronize()


def main(args):
    import torch

    from gdn_bench.results import tables
    from gdn_bench.timing import measure as timing
    from gdn_bench.timing.ranks import run_on_ranks

    os.environ |= {"NCCL_NVLS_ENABLE": "0", "FLA_FLASH_QLA": "0"}
    command = [sys.executable, *sys.argv]
    logs = [tempfile.TemporaryFile("w+") for _ in range(args.workers)]  # noqa: SIM115
    workers = [
        subprocess.Popen([*command, "--worker", str(i)], stdout=log, stderr=log) for i, log in enumerate(logs)
    ]
    while time.time() < BEGAN + args.warm and any(w.poll() is None for w in workers):
        time.sleep(0.1)
    late = sum(w.poll() is None for w in workers)
    for i, (worker, log) in enumerate(zip(workers, logs, strict=True)):
        worker.kill() if worker.poll() is None else None
        log.seek(0)
        lines = log.read().splitlines()
        if worker.poll() or any(line.startswith("@") for line in lines):
            print(f"worker {i}: {[x for x in lines if x[:1] == '@'][:3] or lines[-3:]}", flush=True)
    print(f"[{time.time() - BEGAN:3.0f}] compiled, {late} of {args.workers} workers late", flush=True)
    about = {**timing.on_gpu(torch.device("cuda", 0)), **({"commit": args.commit} if args.commit else {})}
    for row in run_on_ranks(measure, args.ranks, torch.device("cuda"), scaling_of(args), limit=args.limit):
        timing.append(args.out, [{**row, **about}])
        print(f"[{time.time() - BEGAN:3.0f}] {tables.summarize(row)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("rows.jsonl"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--local", type=int, default=32768)
    parser.add_argument("--workers", type=int, default=40)
    parser.add_argument("--worker", type=int, default=-1)
    parser.add_argument("--warm", type=float, default=60, help="seconds that compiling takes at most")
    parser.add_argument("--limit", type=float, default=120, help="seconds without a row")
    args = parser.parse_args()
    if args.worker >= 0:
        warm(args)
        os._exit(0)
    main(args)
