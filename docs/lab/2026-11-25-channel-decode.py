"""Check and time decode with a decay per key channel on a GPU, beside a decay per head.

    PYTHONPATH=src python docs/lab/2026-11-25-channel-decode.py              checks, then times
    PYTHONPATH=src python docs/lab/2026-11-25-channel-decode.py --check      only the checks
    PYTHONPATH=src python docs/lab/2026-11-25-channel-decode.py --one NAME   one line, in this process

Each line runs in a process of its own with a limit of 120 s, so that a kernel that hangs costs one line.
check: relative RMS error of outputs and states in 1e-3 against the reference in fp64; `bits`: a packet of
four tokens against single steps. time: us of a launch by CUDA-graph replays of 20 (median of 5), each on
another pool, so that states come from HBM; `host`: us of a call, of 2,000 in a row at B = 1. registers: the
largest tiles of 16-bit states under other limits of registers, and tiles of half the columns. serving: a
prefill of four prompts of 1,024 tokens, replay of 4 and 16 tokens on 64 rows with histories of 40 places, the
fold, and the gate for 8,192 tokens; each first checked against the reference on two value heads.
    PYTHONPATH=src python docs/lab/2026-11-25-channel-decode.py --serving    only these lines
"""

import subprocess
import sys
import time

import torch

import gdn
from gdn.backends.triton.serving import decode as serving
from gdn.reference import serving as reference

H, HV, K, V = 16, 32, 128, 128
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHECKS = {
    f"check {pool} {form} {size}": (pool, form, size)
    for pool in DTYPES
    for form in ("raw", "bound", "active")
    for size in ((128, 128), (60, 100), (256, 64))
}
TIMES = {
    f"time B={B} {pool} {gate}": (B, pool, gate)
    for B in (1, 8, 64, 256)
    for pool in DTYPES
    for gate in ("head", "channel")
}
LIMITS = {
    f"registers {limit} {tile}": (limit, tile)
    for limit, tile in ((128, "full"), (144, "full"), (152, "full"), (160, "full"), (128, "half"))
}
SERVING = [
    f"serving {what} {gate}"
    for what in ("prefill", "snapshots", "replay-4", "replay-16", "fold", "gate")
    for gate in ("head", "channel")
]
HOST = {f"host {gate}": gate for gate in ("head", "channel")}


def rn(*shape, seed=[0]):  # noqa: B006
    seed[0] += 1
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed[0]), device="cuda")


def call(B, T, form, sizes=(K, V), heads=(H, HV), per_channel=True):
    """Return the tensors of a call; the logits are views of a projection, as in a model."""
    (k_size, v_size), (h, hv) = sizes, heads
    x = {
        "q": rn(B, T, h, k_size).bfloat16(), "k": rn(B, T, h, k_size).bfloat16(),
        "v": rn(B, T, hv, v_size).bfloat16(),
    }  # fmt: skip
    decay = (hv, k_size) if per_channel else (hv,)
    logits = rn(B, T, *decay).bfloat16()
    if form == "active":
        g = -torch.nn.functional.softplus(logits.float())
        g[:, -1, :, ..., ::5] = -1e6
        return x | {"g": g, "beta": rn(B, T, hv).sigmoid()}
    x |= {"a": logits, "b": rn(B, T, hv).bfloat16(), "A_log": rn(hv) - 3, "dt_bias": rn(*decay)}
    return x | ({"lower_bound": -5.0} if form == "bound" else {})


OPTIONS = {"use_qk_l2norm_in_kernel": True, "state_v_first": True}


def error(x, y):
    return ((x.double().cpu() - y.double().cpu()).norm() / y.double().norm().cpu()).item() * 1e3


def check(name):
    pool, form, sizes = CHECKS[name]
    cells = []
    for B, T in ((1, 1), (5, 4), (256, 1)):
        heads = (2, 4) if B > 5 else (1, 2)
        x = call(B, T, form, sizes, heads)
        states = rn(B + 3, heads[1], sizes[1], sizes[0]).to(DTYPES[pool])
        index = torch.randperm(B + 3, device="cuda")[:B].int()
        expected = reference.decode(
            **{n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in x.items()}, state=states.cpu(),
            read_index=index.cpu(), **OPTIONS,
        )  # fmt: skip
        found = states.clone()
        o = gdn.decode(**x, state=found, read_index=index, backend="triton", **OPTIONS)
        e, f = error(o, expected.o), error(found, expected.state)
        bad = "" if e < 5 and f < (5 if pool == "bf16" else 0.1) else " BAD"
        cells.append(f"B={B} T={T} o {e:.3f} S {f:.3f}{bad}")
        if T > 1:
            more = {"round_state": pool == "bf16", "read_index": index, "backend": "triton", **OPTIONS}
            whole, single = states.clone(), states.clone()
            o = gdn.decode(**x, state=whole, **more)
            same = True
            for t in range(T):
                token = {
                    n: y[:, t : t + 1] if n in ("q", "k", "v", "g", "beta", "a", "b") else y
                    for n, y in x.items()
                }
                same &= torch.equal(gdn.decode(**token, state=single, **more), o[:, t : t + 1])
            cells.append(f"bits {'same' if same and torch.equal(whole, single) else 'BAD'}")
    print(f"{name:28s} {' | '.join(cells)}", flush=True)


def timed(runs, reps=20):
    for run in runs[:3]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(reps):
            runs[i % len(runs)]()
    times = []
    for _ in range(5):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / reps)
    return sorted(times)[2]


def runs_of(B, pool, gate):
    """Return calls on pools of 400 MB or more in all, which is beyond L2."""
    per_channel = gate == "channel"
    x = call(B, 1, "bound" if per_channel else "raw", per_channel=per_channel)
    size = B * HV * K * V * DTYPES[pool].itemsize
    pools = [rn(B, HV, V, K).to(DTYPES[pool]) for _ in range(max(2, min(20, 400 * 2**20 // size)))]
    out = torch.empty_like(x["v"])
    return [lambda S=S: gdn.decode(**x, state=S, out=out, backend="triton", **OPTIONS) for S in pools]


def measure(name):
    print(f"{name:28s} {timed(runs_of(*TIMES[name])):8.2f} us", flush=True)


def registers(name):
    limit, tile = LIMITS[name]
    serving.REGISTERS = dict.fromkeys(serving.REGISTERS, limit)
    if tile == "half":
        pick = serving.pick_tile
        # few states: half the columns while all programs are resident at once
        serving.pick_tile = lambda *a, num_states=None: pick(*a, num_states=1)
    cells = [f"B={B} {timed(runs_of(B, 'bf16', 'channel')):.2f}" for B in (8, 64, 256)]
    print(f"{name:28s} us {' | '.join(cells)}", flush=True)


def host(name):
    run = runs_of(1, "fp32", HOST[name])[0]
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(2000):
            run()
        best = min(best, (time.perf_counter() - start) / 2000 * 1e6)
        torch.cuda.synchronize()
    print(f"{name:28s} {best:8.2f} us a call", flush=True)


def on_cpu(x):
    return {n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in x.items()}


def prompts(per_channel, heads, lengths, has_snapshots):
    x = call(1, sum(lengths), "raw", heads=heads, per_channel=per_channel)
    N = len(lengths)
    index = torch.arange(N, device="cuda")
    x |= {
        "cu_seqlens": torch.tensor([0, *lengths], device="cuda").cumsum(0).int(), "state_index": index,
        "state": rn(2 * N, heads[1], V, K),
    }  # fmt: skip
    if has_snapshots:
        x |= {"snapshot_pos": 0 * index + lengths[-1] - 3, "snapshot_index": index + N}
    return x


def histories(T, per_channel, heads, B, places=40):
    """Return packets on histories of 33 tokens, of several blocks of 16."""
    x = call(B, T, "raw", heads=heads, per_channel=per_channel)
    decay = (heads[1], K) if per_channel else (heads[1],)
    g = -rn(B, places, *decay).sigmoid() / 8
    return x | {
        "history_u": (rn(B, places, heads[1], V) / 8).bfloat16(),
        "history_k": (rn(B, places, heads[0], K) / 8).bfloat16(),
        "history_G": g if per_channel else g.double().cumsum(1), "state": rn(B, heads[1], V, K),
        "cursor": torch.full((B,), min(33, places - T), device="cuda", dtype=torch.int32),
    }  # fmt: skip


def folding(x):
    """Return the arguments of a commit that folds every history."""
    names = ("state", "history_u", "history_k", "history_G")
    B = x["cursor"].shape[0]
    count = torch.full((B,), 33, device="cuda")
    return {
        **{n: x[n][None] for n in names}, "cursor": x["cursor"], "index": torch.arange(B, device="cuda"),
        "accepted": 0 * count, "room": 40, "update_cursor": False, "state_v_first": True,
    }  # fmt: skip


def gate_call(per_channel, heads, tokens):
    decay = (heads, K) if per_channel else (heads,)
    x = [rn(tokens, *decay).bfloat16(), rn(tokens, heads).bfloat16(), rn(heads), rn(*decay)]
    return [y.requires_grad_() for y in x]


def gate_steps(x):
    g, beta = gdn.gate(*x, backend="triton")
    return g, beta, *torch.autograd.grad((g, beta), x, (g.detach(), beta.detach()))


def check_serving(what, per_channel):
    """Return the errors in 1e-3 of outputs and states, or gradients, on two value heads."""
    heads = (1, 2)
    if what == "gate":
        x = gate_call(per_channel, 2, 300)
        y = [t.detach().cpu().double().requires_grad_() for t in x]
        g = gdn.reference.gate(y[0], y[2], y[3], is_per_channel=per_channel)
        beta = y[1].sigmoid()
        expected = (g, beta, *torch.autograd.grad((g, beta), y, (g.detach(), beta.detach())))
        return [error(a.detach(), b.detach()) for a, b in zip(gate_steps(x), expected, strict=True)]
    if what == "fold":
        x = folding(histories(4, per_channel, heads, 5))
        state, _ = reference.replay_commit(**on_cpu(x))
        gdn.replay_commit(**x, backend="triton")
        return [error(x["state"], state)]
    if what.startswith("replay"):
        x = histories(int(what[7:]), per_channel, heads, 5)
        expected = reference.replay_decode(**on_cpu(x), **OPTIONS)
        o = gdn.replay_decode(**x, backend="triton", **OPTIONS)
        return [error(o, expected.o), error(x["history_u"], expected.u), error(x["history_G"], expected.G)]
    x = prompts(per_channel, heads, (130, 70, 3), what == "snapshots")
    x |= {"snapshot_pos": x["snapshot_pos"] % 3} if what == "snapshots" else {}
    expected = reference.prefill(**on_cpu(x), **OPTIONS)
    o = gdn.prefill(**x, backend="triton", **OPTIONS)
    return [error(o, expected.o), error(x["state"], expected.state)]


def serve(name):
    _, what, gate = name.split()
    per_channel, heads = gate == "channel", (H, HV)
    errors = check_serving(what, per_channel)
    if what == "gate":
        x = gate_call(per_channel, HV, 8192)
        run = lambda: gdn.gate(*(y.detach() for y in x), backend="triton")  # noqa: E731
    elif what == "fold":
        x = folding(histories(4, per_channel, heads, 64))
        run = lambda: gdn.replay_commit(**x, backend="triton")  # noqa: E731
    elif what.startswith("replay"):
        x = histories(int(what[7:]), per_channel, heads, 64)
        run = lambda: gdn.replay_decode(**x, backend="triton", **OPTIONS)  # noqa: E731
    else:
        x = prompts(per_channel, heads, (1024,) * 4, what == "snapshots")
        run = lambda: gdn.prefill(**x, backend="triton", **OPTIONS)  # noqa: E731
    cells = " ".join(f"{e:.3f}" for e in errors)
    bad = "" if max(errors) < 6 else " BAD"
    print(f"{name:28s} errors {cells}{bad} | {timed([run]):8.2f} us", flush=True)


KINDS = {"check": check, "time": measure, "registers": registers, "host": host, "serving": serve}


def main():
    if "--one" in sys.argv:
        name = sys.argv[sys.argv.index("--one") + 1]
        KINDS[name.split()[0]](name)
        return
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    names = list(CHECKS) if "--check" in sys.argv else [*CHECKS, *TIMES, *LIMITS, *HOST, *SERVING]
    names = SERVING if "--serving" in sys.argv else names
    for name in names:
        try:
            done = subprocess.run([sys.executable, __file__, "--one", name], timeout=120)
            if done.returncode:
                print(f"{name:28s} FAILED with {done.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{name:28s} HANGS", flush=True)


if __name__ == "__main__":
    main()
