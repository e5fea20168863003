"""Check and time context parallelism on two GPUs with NCCL: python docs/lab/2026-11-25-two-gpus.py

Each case runs on two ranks in processes of their own with a time limit, so that a hang costs one line. Errors
are relative: norm of the difference over norm of the fp64 reference (short) or of one GPU's result (long).
NVLink multicast is off.
"""

import argparse
import os
import subprocess
import sys
import time

LIMIT, TOTAL = 90, 150  # seconds of one case, of all
SHORT = [("hopper", "bfloat16"), ("triton", "bfloat16"), ("eager", "float64")]


def inputs(torch, T, H, HV, dtype, device, seed=0):
    """Return q, k, v, g, beta of one row with a gate that keeps some state over a whole run."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(1, T, *shape, generator=generator, device=device)

    q, k, v = draw(H, 128), torch.nn.functional.normalize(draw(H, 128), dim=-1), draw(HV, 128)
    g = torch.nn.functional.logsigmoid(draw(HV) + 4) / 4
    q, k, v = (x.to(dtype) for x in (q, k, v))
    wide = dtype if dtype == torch.float64 else torch.float32
    return q, k, v, g.to(wide), draw(HV).sigmoid().to(wide)


def rel(x, want):
    x, want = x.double(), want.double()
    return float((x - want).norm() / want.norm().clamp(min=1e-30))


def train(gdn, torch, x, do, **options):
    """Return outputs and gradients of one step."""
    leaves = [t.detach().requires_grad_() for t in x]
    o, S = gdn.chunk_gated_delta_rule(
        *leaves, use_qk_l2norm_in_kernel=True, output_final_state=True, **options
    )
    grads = torch.autograd.grad(o, leaves, do)
    return (o.detach(), S.detach(), *grads)


def judge(torch, x, do, cu):
    """Return outputs and gradients of the reference recurrence in fp64."""
    from gdn import reference

    leaves = [t.double().detach().clone().requires_grad_() for t in x]
    o, S = reference.gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)
    return (o.detach(), S.detach(), *torch.autograd.grad(o, leaves, do.double()))


def check(args, gdn, torch, dist):
    """Compare two ranks with the fp64 reference, and 20 runs by their bits, on runs of unequal length."""
    dtype, device = getattr(torch, args.dtype), torch.device("cuda", args.rank)
    lines = []
    names = ("o", "S", "dq", "dk", "dv", "dg", "dbeta")
    cases = {
        "contiguous": ({}, None),
        "unequal, packed": ({"runs": [(0, 0, 700), (1, 700, 2048)]}, [0, 100, 1500, 2048]),
        "headtail": ({"order": "headtail", "num_tokens": 2048}, None),
    }
    whole = inputs(torch, 2048, 2, 4, dtype, device)
    do_all = torch.randn(whole[2].shape, generator=torch.Generator(device).manual_seed(7), device=device)
    do_all = do_all.to(dtype)
    for name, (where, offsets) in cases.items():
        cu = None if offsets is None else torch.tensor(offsets, device=device)
        cpu = None if offsets is None else torch.tensor(offsets)
        want = judge(torch, whole, do_all, cu)
        for exchange in ("gather", "owner"):
            context = gdn.ContextParallel(dist.group.WORLD, exchange=exchange, **where)
            x = [context.shard(t, 1) for t in whole]
            do = context.shard(do_all, 1)
            options = {"cp_context": context, "backend": args.backend}
            if cu is not None:
                options |= {"cu_seqlens": cu, "cu_seqlens_cpu": cpu}
            first = train(gdn, torch, x, do, **options)
            equal = all(
                all(
                    torch.equal(a, b) for a, b in zip(train(gdn, torch, x, do, **options), first, strict=True)
                )
                for _ in range(20)
            )
            found = {}
            for n, got, all_tokens in zip(names, first, want, strict=True):
                if n == "S":
                    rows = context.gather_states(got, cu, cpu)
                    found[n] = rel(rows, all_tokens)
                else:
                    found[n] = rel(got, context.shard(all_tokens, 1))
            text = " ".join(f"{n} {e:.1e}" for n, e in found.items())
            lines.append(
                f"{args.backend} {args.dtype} {name}, {exchange}, rank {args.rank}: {text} bits {equal}"
            )
    return lines


def median(torch, dist, run, seconds=2.0):
    """Return the median ms of a call, with all ranks starting together."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    end = time.time() + seconds
    for _ in range(30):
        dist.barrier()
        torch.cuda.synchronize()
        begin = torch.cuda.Event(enable_timing=True)
        done = torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        done.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(done))
        # every rank must stop at the same call
        stop = torch.tensor([float(time.time() > end)], device="cuda")
        dist.all_reduce(stop)
        if stop.item():
            break
    return sorted(times)[len(times) // 2]


def scale(args, gdn, torch, dist):
    """Time one GPU and two, training and forward alone: strong at args.T tokens, weak at args.T a rank."""
    device = torch.device("cuda", args.rank)
    H, HV = 16, 32
    lines = []

    def measure(T, context, backend):
        x = inputs(torch, T, H, HV, torch.bfloat16, device, seed=args.rank)
        do = torch.randn_like(x[2])
        options = {"use_qk_l2norm_in_kernel": True, "backend": backend, "cp_context": context}
        leaves = [t.detach().requires_grad_() for t in x]

        def step():
            o, _ = gdn.chunk_gated_delta_rule(*leaves, **options)
            torch.autograd.grad(o, leaves, do)

        def forward():
            with torch.no_grad():
                gdn.chunk_gated_delta_rule(*x, **options)

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        return median(torch, dist, step), median(torch, dist, forward, 1.0), peak

    def worst(values):
        found = torch.tensor(values, device=device, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    backend = None if args.backend == "auto" else args.backend
    T = args.T
    one = worst(measure(T, None, backend))
    half = worst(measure(T // 2, None, backend))
    for exchange in ("gather", "owner"):
        context = gdn.ContextParallel(dist.group.WORLD, exchange=exchange)
        two = worst(measure(T // 2, context, backend))
        lines.append(
            f"{args.backend} 1x{T} {exchange}: "
            f"train {one[0]:.2f} -> {two[0]:.2f} ms, {one[0] / two[0]:.2f}x; "
            f"forward {one[1]:.3f} -> {two[1]:.3f} ms, {one[1] / two[1]:.2f}x; "
            f"weak {two[0] / half[0]:.2f}, {two[1] / half[1]:.2f} of one GPU; "
            f"MiB {one[2]:.0f} -> {two[2]:.0f}"
        )
    # long sequences: compare with one GPU
    whole = inputs(torch, T, H, HV, torch.bfloat16, device)
    do = torch.randn(
        whole[2].shape, generator=torch.Generator(device).manual_seed(7), device=device
    ).bfloat16()
    want = train(gdn, torch, whole, do, backend=backend)
    context = gdn.ContextParallel(dist.group.WORLD)
    got = train(
        gdn,
        torch,
        [context.shard(t, 1) for t in whole],
        context.shard(do, 1),
        cp_context=context,
        backend=backend,
    )
    text = []
    for n, a, b in zip(("o", "S", "dq", "dk", "dv", "dg", "dbeta"), got, want, strict=True):
        if n != "S":
            text.append(f"{n} {rel(a, context.shard(b, 1)):.1e}")
    lines.append(f"{args.backend} 1x{T} rank {args.rank} beside one GPU: " + " ".join(text))
    return lines


def on_rank(args):
    """Run one case as one rank, and print its lines."""
    import torch
    from torch import distributed as dist

    import gdn

    torch.cuda.set_device(args.rank)
    store = dist.FileStore(args.store, 2)
    dist.init_process_group("nccl", rank=args.rank, world_size=2, store=store)
    lines = (check if args.case == "check" else scale)(args, gdn, torch, dist)
    for line in lines:
        # the lines of errors are of each rank, the times of the slower one
        if args.rank == 0 or " rank " in line:
            print("@" + line, flush=True)
    dist.barrier()
    os._exit(0)


def main():
    """Start the ranks of every case, and print all lines last."""
    found = []
    runs = [("scale", "auto", "bfloat16"), *(("check", *x) for x in SHORT), ("scale", "triton", "bfloat16")]
    start = time.time()
    for number, (case, backend, dtype) in enumerate(runs):
        store = f"/tmp/two-gpus-{os.getpid()}-{number}"
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, "--case", case, "--backend", backend, "--dtype", dtype]
        ranks = [
            subprocess.Popen(
                [*command, "--store", store, "--rank", str(rank)], env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]  # fmt: skip
        end = min(time.time() + LIMIT, start + TOTAL)
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
    args = parser.parse_args()
    if args.case:
        on_rank(args)
    else:
        main()
