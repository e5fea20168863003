"""Check and time pools in int16 with a scale per column of V, beside bf16, fp16 and fp32, on one GPU.

    PYTHONPATH=src python docs/lab/2026-11-25-int16-pools.py              checks, times, table
    PYTHONPATH=src python docs/lab/2026-11-25-int16-pools.py --check      only the checks
    PYTHONPATH=src python docs/lab/2026-11-25-int16-pools.py --one NAME   one line, in this process
    PYTHONPATH=src python docs/lab/2026-11-25-int16-pools.py --drift T    on the CPU: T tokens of `eager`

Each line runs in a process of its own with a limit of 60 s, so that a kernel that hangs costs one line.
check: relative RMS errors of o and of the states after N tokens against the recurrence in fp64 on the GPU, no
       decay or slow decay, int16 and bf16 pools. `bits`: a token that writes nothing leaves all bits of the
       pool, over 1,000 calls; 4 tokens with round_state equal 4 calls; a NaN stays in its column.
time:  us per token of 16/32 heads of 128 x 128, dense rows by slots, from CUDA graphs over several layers, so
       that states come from HBM; median of 9, the pools in turns. int16 is timed at three limits of registers
       per thread (`decode.REGISTERS`). Goal: at most 1.03 of bf16 at B = 64 and 256.
"""

import subprocess
import sys
import time
from functools import partial

import torch

import gdn

H, HV, D = 16, 32, 128
ENGINE = {"state_v_first": True, "use_qk_l2norm_in_kernel": True, "backend": "triton"}
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIMITS = (128, 136, 144)
ROWS = (1, 8, 64, 128, 256)
DECAYS = ("none", "slow")


def draw(B, T, decay, device="cuda", heads=(H, HV), dtype=torch.bfloat16):
    """Return tokens and gates of a call: beta = sigmoid(N), no decay or 1 / 1024 per token."""
    make = {"dtype": dtype, "device": device}
    x = {name: torch.randn(B, T, heads[0], D, **make) for name in ("q", "k")}
    x |= {"v": torch.randn(B, T, heads[1], D, **make), "beta": torch.randn(B, T, heads[1], **make).sigmoid()}
    g = 0.0 if decay == "none" else -1.0 / 1024
    return x | {"g": torch.full((B, T, heads[1]), g, device=device)}


def make_pool(kind, slots):
    """Return a zero pool of some kind on the GPU."""
    if kind == "int16":
        sizes = {"num_v_heads": HV, "head_k_dim": D, "head_v_dim": D}
        return gdn.allocate_int16_pool(slots, **sizes, state_v_first=True, device="cuda")
    return torch.zeros(slots, HV, D, D, dtype=FLOATS[kind], device="cuda")


def states_of(pool):
    """Return all states of a pool in fp64."""
    if isinstance(pool, torch.Tensor):
        return pool.double()
    return pool.state.double() * pool.column_scale.double()[..., None]


def advance(S, x, t):
    """Return o of token t, and the states after it, in fp64. S is [B, HV, V, K]."""
    q, k = (
        torch.nn.functional.normalize(x[n][:, t].double(), dim=-1).repeat_interleave(HV // H, 1) for n in "qk"
    )
    S = S * x["g"][:, t].double().exp()[..., None, None]
    d = x["beta"][:, t].double()[..., None] * (x["v"][:, t].double() - torch.einsum("bhvk,bhk->bhv", S, k))
    S = S + d[..., :, None] * k[..., None, :]
    return D**-0.5 * torch.einsum("bhvk,bhk->bhv", S, q), S


def error(x, y):
    return float((x.double() - y).norm() / y.norm())


def check(B, decay, N):
    """Decode N tokens one by one on pools of all kinds."""
    torch.manual_seed(0)
    pools = {kind: make_pool(kind, B) for kind in ("int16", *FLOATS)}
    S = torch.zeros(B, HV, D, D, dtype=torch.float64, device="cuda")
    slots, errors = torch.randperm(B, device="cuda").int(), {}
    for n in range(N):
        x = draw(B, 1, decay)
        want, S = advance(S, x, 0)
        for kind, pool in pools.items():
            o = gdn.decode(**x, state=pool, read_index=slots, **ENGINE)
            if n >= N - 20:
                # the outputs in bf16 have an error of their own, so the states are what is judged
                errors[kind] = error(states_of(pool)[slots.long()], S)
    line = ", ".join(f"{kind} {100 * e:.4f} %" for kind, e in errors.items())
    is_right = errors["int16"] < 1e-3 and errors["int16"] < errors["bf16"] / 5 and o.isfinite().all()
    return f"states after {N} tokens: {line}  {'ok' if is_right else 'WRONG'}"


def check_bits():
    torch.manual_seed(0)
    pool = make_pool("int16", 8)
    for _ in range(3):
        gdn.decode(**draw(8, 1, "slow"), state=pool, **ENGINE)
    before = [x.clone() for x in (pool.state, pool.column_scale)]
    idle = draw(8, 1, "none") | {"beta": torch.zeros(8, 1, HV, device="cuda")}
    for _ in range(1000):
        gdn.decode(**idle, state=pool, **ENGINE)
    stays = all(torch.equal(x, y) for x, y in zip(before, (pool.state, pool.column_scale), strict=True))
    whole, single = (gdn.Int16Pool(*(x.clone() for x in before)) for _ in range(2))
    x = draw(8, 4, "slow")
    o = gdn.decode(**x, state=whole, round_state=True, **ENGINE)
    parts = [
        gdn.decode(**{name: y[:, t : t + 1] for name, y in x.items()}, state=single, **ENGINE)
        for t in range(4)
    ]
    equals = torch.equal(o, torch.cat(parts, 1)) and torch.equal(whole.state, single.state)
    equals = equals and torch.equal(whole.column_scale, single.column_scale)
    x = draw(8, 1, "slow")
    x["v"][2, 0, 5, 7], x["v"][3, 0, 6, 8] = float("nan"), float("inf")
    gdn.decode(**x, state=whole, **ENGINE)
    stuck = whole.column_scale.isnan().nonzero().tolist() == [[2, 5, 7], [3, 6, 8]]
    verdict = "ok" if stays and equals and stuck else "WRONG"
    return f"nothing written {stays}, packet equals steps {equals}, NaN in its column {stuck}  {verdict}"


def capture(pools, x, slots, out):
    """Return a CUDA graph of one token on each pool."""

    def run():
        for pool in pools:
            gdn.decode(**x, state=pool, read_index=slots, out=out, **ENGINE)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(graph):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def time_rows(B):
    from gdn.backends.triton.serving import decode
    from gdn.ops import fastpath

    layers = max(1, min(64, -(-(3 * 2**27) // (B * HV * D * D * 2))))  # more bytes than three times the L2
    x, slots = draw(B, 1, "slow"), torch.randperm(B, device="cuda").int()
    out = torch.empty(B, 1, HV, D, dtype=torch.bfloat16, device="cuda")
    graphs, held = {}, []
    for kind in ("bf16", "int16", "fp32"):
        pools = [make_pool(kind, B) for _ in range(layers)]
        held.append(pools)
        for limit in LIMITS if kind == "int16" else (128,):
            # the plans of an earlier limit must not be repeated
            decode._plans, fastpath._calls = type(decode._plans)(), {}
            decode.REGISTERS[True, False] = limit
            graphs[f"{kind} {limit}" if kind == "int16" else kind] = capture(pools, x, slots, out)
    for graph in graphs.values():
        graph.replay()
    times = {name: [] for name in graphs}
    for _ in range(9):
        for name, graph in graphs.items():
            times[name].append(microseconds(graph) / layers)
    median = {name: sorted(values)[4] for name, values in times.items()}
    return "  ".join(
        f"{name} {us:.2f}" + ("" if name == "bf16" else f" ({us / median['bf16']:.3f})")
        for name, us in median.items()
    )


LINES = {f"check {B} rows, decay {decay}": partial(check, B, decay, 400) for B in (3, 70) for decay in DECAYS}
LINES |= {"check bits": check_bits} | {f"time B={B}": partial(time_rows, B) for B in ROWS}


def drift(T):
    """Print the errors of `eager` on one head over the last 1,000 of T tokens, against fp64."""
    for decay in DECAYS:
        torch.manual_seed(0)
        x = draw(1, T, decay, "cpu", (1, 1), torch.float32)
        options = ENGINE | {"backend": "eager", "round_state": True}
        exact = {name: y.double() for name, y in x.items()}
        want = gdn.decode(**exact, state=torch.zeros(1, 1, D, D, dtype=torch.float64), **options)[:, -1000:]
        sizes = {"num_v_heads": 1, "head_k_dim": D, "head_v_dim": D}
        pools = {"int16": gdn.allocate_int16_pool(1, **sizes, state_v_first=True)}
        pools |= {kind: torch.zeros(1, 1, D, D, dtype=dtype) for kind, dtype in FLOATS.items()}
        for kind, pool in pools.items():
            begin = time.perf_counter()
            o = gdn.decode(**x, state=pool, **options)[:, -1000:]
            seconds = time.perf_counter() - begin
            print(f"decay {decay}, {kind}: {100 * error(o, want):.5f} % of o, {seconds:.0f} s", flush=True)


def main():
    if "--drift" in sys.argv:
        drift(int(sys.argv[-1]))
        return
    if "--one" in sys.argv:
        print(LINES[sys.argv[-1]](), flush=True)
        return
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", flush=True)
    for name in LINES:
        if "--check" in sys.argv and not name.startswith("check"):
            continue
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=60
            )
            line = done.stdout.strip() or "FAILED " + done.stderr.strip()[-600:]
        except subprocess.TimeoutExpired:
            line = "FAILED: more than 60 s"
        print(f"{name:28} {line}", flush=True)


if __name__ == "__main__":
    main()
