"""Check and time decoding with a history on an H200, beside `decode` and `replay_decode`.

    PYTHONPATH=src python docs/lab/2026-11-25-decode-with-history.py             checks, times, table
    PYTHONPATH=src python docs/lab/2026-11-25-decode-with-history.py --check     only the checks
    PYTHONPATH=src python docs/lab/2026-11-25-decode-with-history.py --one NAME  one line, in this process

Each line runs in a process of its own with a limit of 150 s, so that a kernel that hangs costs one line.
check: relative RMS errors in 1e-3 of o (first and last cycle) and of the states after a fold, against the
       recurrence in fp64 on the GPU, over several cycles with rows at different cursors; `decode` beside it.
time:  us per token of 16/32 heads of 128 x 128 from CUDA graphs of one whole cycle of folds (places - 1 calls
       on each of several layers, so that states come from HBM), rows at different cursors; median of 7.
       Columns: decode; with a history of 16 and of 32 places, folds inside; the plain way
       (use_history=False), which has a second launch; replay_decode (it reads only, with 8 tokens in each
       history); decode_step, plain and with a history.
"""

import subprocess
import sys
from functools import partial

import torch

import gdn

H, HV, D, TAPS = 16, 32, 128, 4
HEADS = {"num_k_heads": H, "num_v_heads": HV, "head_k_dim": D, "head_v_dim": D}
ENGINE = {"state_v_first": True, "use_qk_l2norm_in_kernel": True}
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GATES = ("a", "b", "A_log", "dt_bias")
ROWS = (1, 8, 64, 128, 256, 512)
CHECKS = [
    (f"check {B} rows, {dtype}, {places} places, T={T}", B, dtype, places, T)
    for B, dtype, places, T in (
        (1, "fp32", 16, 1), (70, "fp32", 16, 1), (70, "bf16", 16, 1), (70, "fp32", 32, 1),
        (70, "fp32", 16, 4), (70, "bf16", 32, 16), (9, "fp32", 8, 3),
    )
]  # fmt: skip
TIMES = [(f"time B={B} {dtype}", B, dtype) for dtype in STATES for B in ROWS]


def draw(B, T):
    """Return tokens and gates of a call in bf16, with decays like those of a model."""
    make = {"dtype": torch.bfloat16, "device": "cuda"}
    x = {"q": torch.randn(B, T, H, D, **make), "k": torch.randn(B, T, H, D, **make)}
    x |= {"v": torch.randn(B, T, HV, D, **make), "a": torch.randn(B, T, HV, **make) - 3}
    rest = {"A_log": torch.zeros(HV, device="cuda"), "dt_bias": torch.zeros(HV, device="cuda")}
    return x | {"b": torch.randn(B, T, HV, **make)} | rest


def recurrence(S, x, t):
    """Return o of token t, and the states after it, in fp64. S is [B, HV, V, K]."""
    q, k = (
        torch.nn.functional.normalize(x[n][:, t].double(), dim=-1).repeat_interleave(HV // H, 1) for n in "qk"
    )
    g = -torch.nn.functional.softplus(x["a"][:, t].double())
    S = S * g.exp()[..., None, None]
    d = x["b"][:, t].double().sigmoid()[..., None] * (
        x["v"][:, t].double() - torch.einsum("bhvk,bhk->bhv", S, k)
    )
    S = S + d[..., :, None] * k[..., None, :]
    return D**-0.5 * torch.einsum("bhvk,bhk->bhv", S, q), S


def error(x, y):
    return ((x.double() - y).norm() / y.norm()).item() * 1e3


def make_pool(B, dtype, places, room=1):
    pool = gdn.allocate_history_pool(
        B, **HEADS, places=places, room=room, state_dtype=dtype, state_v_first=True, device="cuda"
    )
    pool.state.copy_(torch.randn(pool.state.shape, device="cuda") / 16)
    return pool


def check(B, dtype, places, T):
    torch.manual_seed(0)
    pool = make_pool(B, STATES[dtype], places, T)
    exact, plain = pool.state.double(), pool.state.clone()
    # rings that begin anywhere; rows fold at different calls, since some have kept more tokens
    pool.cursor[:, 0] = torch.arange(B, device="cuda") % places
    slots = torch.randperm(B, device="cuda").int()
    where = {"read_index": slots, **ENGINE, "backend": "triton"}
    kept, last, errors, beside = torch.zeros(B, dtype=torch.int32, device="cuda"), None, [], []
    order = slots.long()
    for _ in range(4 * places // T + 3):
        if T > 1 and last is not None:
            # the drafts that the last call kept
            S, new = exact[order], exact[order].clone()
            for t in range(T):
                _, S = recurrence(S, last, t)
                new[kept == t + 1] = S[kept == t + 1]
            exact[order] = new
        x, S, want = draw(B, T), exact[order], []
        for t in range(T):
            o, S = recurrence(S, x, t)
            want.append(o)
        want = torch.stack(want, 1)
        drafts = {"num_accepted": kept.clone()} if T > 1 else {"use_history": True}
        o = gdn.decode_with_history(**x, pool=pool, **where, **drafts)
        errors.append(error(o, want))
        if T == 1:
            exact[order] = S
            beside.append(error(gdn.decode(**x, state=plain, **where), want))
        last, kept = x, torch.randint(0, T + 1, (B,), device="cuda", dtype=torch.int32)
    folded = {"num_accepted": torch.zeros_like(kept)} if T > 1 else {}
    gdn.fold_history(pool, slots, state_v_first=True, backend="triton", **folded)
    cycle = max(places // T, 2)
    mean = lambda values: sum(values) / max(len(values), 1)  # noqa: E731
    line = (
        f"o {mean(errors[:cycle]):.2f} to {mean(errors[-cycle:]):.2f}, state {error(pool.state, exact):.2f}"
    )
    if T == 1:
        line += f"; decode: o {mean(beside[-cycle:]):.2f}, state {error(plain, exact):.2f}"
    limit = 5.0 if dtype == "fp32" else 10.0
    verdict = "ok" if max(errors) < limit and not pool.cursor[:, 1:].any() else "WRONG"
    return f"{line}  {verdict} (worst o {max(errors):.2f}, limit {limit})"


def seconds_of(calls, count):
    """Return the seconds per token of a graph of these calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / count)
    return sorted(found)[3]


def time_rows(B, dtype):
    state = STATES[dtype]
    size = B * HV * D * D * (4 if dtype == "fp32" else 2)
    layers = max(1, min(64, -(-(3 * 2**27) // size)))  # more bytes than three times the L2
    x, out = draw(B, 1), torch.empty(B, 1, HV, D, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(B, device="cuda").int()
    where = {"read_index": slots, **ENGINE, "backend": "triton"}
    pools = {P: [make_pool(B, state, P) for _ in range(layers)] for P in (16, 32)}
    for P, some in pools.items():
        for pool in some:
            # rows at every phase of a cycle, as in a batch whose requests began at any time
            pool.cursor[:, 1] = torch.arange(B, device="cuda") % (P - 1)
            for history in (pool.history_u, pool.history_k):
                history.normal_(std=0.1)
            pool.history_G.copy_(-torch.arange(P, device="cuda")[:, None] / 8)

    def history(pool, uses=True):
        gdn.decode_with_history(**x, pool=pool, use_history=uses, out=out, **where)

    def read(pool):
        history = (pool.history_u, pool.history_k, pool.history_G)
        gdn.replay_decode(
            x["q"], x["k"], x["v"], pool.state, *history, eight, **{n: x[n] for n in GATES}, out=out, **where
        )

    eight = torch.full((B,), 8, dtype=torch.int32, device="cuda")
    channels = 2 * H * D + HV * D
    windows = torch.zeros(B, channels, TAPS - 1, dtype=torch.bfloat16, device="cuda")
    mixed = torch.randn(B, channels, dtype=torch.bfloat16, device="cuda")
    layer = {
        "mixed_qkv": mixed, "conv_state": windows, "conv_bias": None, "A_log": x["A_log"],
        "conv_weight": torch.randn(channels, TAPS, dtype=torch.bfloat16, device="cuda"), "a": x["a"][:, 0],
        "b": x["b"][:, 0], "dt_bias": x["dt_bias"], "z": torch.randn_like(out[:, 0]), "out": out[:, 0],
        "norm_weight": torch.ones(D, dtype=torch.bfloat16, device="cuda"), "num_k_heads": H, "head_k_dim": D,
        "head_v_dim": D, **where,
    }  # fmt: skip

    def each(call, some, steps):
        return seconds_of([partial(call, p) for _ in range(steps) for p in some], steps * layers)

    some = pools[16]
    found = {
        "decode": each(lambda p: gdn.decode(**x, state=p.state, out=out, **where), some, 4),
        "16": each(history, some, 15),
        "32": each(history, pools[32], 31),
        "plain": each(lambda p: history(p, False), some, 4),
        "read": each(read, some, 4),
        "step": each(lambda p: gdn.decode_step(**layer, state=p.state), some, 4),
        "step 16": each(lambda p: gdn.decode_step(**layer, state=p, use_history=True), some, 15),
    }
    decode, step = found["decode"], found["step"]
    times = "  ".join(f"{name} {1e6 * s:.1f}" for name, s in found.items())
    ratios = "  ".join(f"{name} {found[name] / decode:.2f}" for name in ("16", "32", "plain", "read"))
    return f"us: {times} | over decode: {ratios}  | step 16 over step {found['step 16'] / step:.2f}"


def main() -> None:
    lines = {name: (check, rest) for name, *rest in CHECKS}
    if "--check" not in sys.argv:
        lines |= {name: (time_rows, rest) for name, *rest in TIMES}
    if "--one" in sys.argv:
        run, rest = lines[sys.argv[-1]]
        print(run(*rest), flush=True)
        return
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    table = []
    for name in lines:
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=150
            )
            said = done.stdout.strip() or f"FAILED {done.stderr.strip()[-300:]}"
        except subprocess.TimeoutExpired:
            said = "FAILED: over 150 s"
        table.append(f"{name:38} {said}")
        print(table[-1], flush=True)
    print(
        "\n--- short table: over decode; APPENDS_FROM in backends/triton/serving/history.py follows from it"
    )
    for line in table:
        if "over decode" in line:
            name, _, ratios = line.partition(" us:")
            print(f"{name.strip():20} {ratios.partition('| ')[2]}")
    wrong = [line for line in table if "WRONG" in line or "FAILED" in line]
    print(f"{len(wrong)} of {len(table)} lines wrong or failed")


if __name__ == "__main__":
    main()
