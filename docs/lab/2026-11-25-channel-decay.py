"""Check the kernels of a decay per key channel on a GPU, and time them beside a decay per head and FLA.

    PYTHONPATH=src python docs/lab/2026-11-25-channel-decay.py              checks, serving, then times
    PYTHONPATH=src python docs/lab/2026-11-25-channel-decay.py --check      only the checks
    PYTHONPATH=src python docs/lab/2026-11-25-channel-decay.py --one NAME   one line, in this process

Each line runs in a process of its own with a limit of 150 s, so that a kernel that hangs costs one line.
check: relative RMS errors in 1e-3 against autograd through the reference in fp64, `BAD` above the limits of
`gdn.testing`; `bits`: reruns with other bits, of 20. time: us of a forward and of a forward with backward,
median of 5 of 10 calls, CUDA events; then us of each kernel of one forward and one backward, by the profiler.
"""

import subprocess
import sys
import time
from dataclasses import replace

import torch

import gdn
from gdn.testing import Case, check, packed, rows

DEVICE = torch.device("cuda")
BASE = Case("bounded", sizes=(128, 128), heads=(2, 2), is_per_channel=True, state="wide")
RAW = {"use_qk_l2norm_in_kernel": True, "raw_gate": "lower_bound", "beta": "negative"}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CHECKS = {
    "one chunk": (replace(BASE, lengths=rows(64)), BF16),
    "one chunk fp32": (replace(BASE, lengths=rows(64)), FP32),
    "ragged": (replace(BASE, lengths=rows(129)), BF16),
    "ragged fp16": (replace(BASE, lengths=rows(129)), FP16),
    "none": (replace(BASE, gate="none", lengths=rows(512)), BF16),
    "slow": (replace(BASE, gate="slow", lengths=rows(1024)), BF16),
    "mild": (replace(BASE, gate="mild", lengths=rows(512)), BF16),
    "strong": (replace(BASE, gate="strong", lengths=rows(512)), BF16),
    "bounded": (replace(BASE, lengths=rows(512)), BF16),
    "rates": (replace(BASE, gate="rates", lengths=rows(512)), BF16),
    "wild fp32": (replace(BASE, gate="wild", lengths=rows(300)), FP32),
    "reset fp32": (replace(BASE, gate="reset", lengths=rows(300)), FP32),
    "turns": (replace(BASE, gate="turns", lengths=rows(300)), BF16),
    "correlated": (replace(BASE, gate="slow", keys="correlated", lengths=rows(512)), BF16),
    "packed, all": (
        replace(BASE, heads=(2, 4), lengths=packed(70, 0, 33, 128, 300, tail=29), is_strided=True, **RAW),
        BF16,
    ),
    "softplus": (replace(BASE, gate="model", raw_gate="on", lengths=rows(300)), BF16),
    "60": (replace(BASE, sizes=(60, 100), lengths=rows(300), **RAW), BF16),
    "256, forward": (replace(BASE, sizes=(256, 256), lengths=rows(129)), BF16),
    "many heads": (replace(BASE, heads=(80, 80), lengths=rows(300), state="none"), BF16),
}
TIMES = {  # heads, sequences, tokens
    "32 heads 1x8192": (32, 1, 8192),
    "64 heads 4x4096": (64, 4, 4096),
    "16 heads 8x2048": (16, 8, 2048),
}
NAMES = ("q", "k", "v", "g", "beta")


def check_one(name):
    case, dtype = CHECKS[name]
    verdicts = check(gdn.chunk_kda, case, dtype, device=DEVICE, budget=2**24)
    # the largest share of its limit, so that a line shows how much is left
    cells = [f"{v.output} {1e3 * v.error:.4g}{'' if v.ok else ' BAD'}" for v in verdicts]
    worst = max(v.error / v.limit for v in verdicts)
    print(f"{name:15s} worst {worst:.2f} of its limit, bits {reruns(case, dtype)} | {' '.join(cells)}")


def reruns(case, dtype):
    """Return how many of 20 reruns have other bits."""
    from gdn.testing import inputs
    from gdn.testing.accuracy import run

    given = inputs(case, dtype, device=DEVICE)
    first, other = run(gdn.chunk_kda, given), 0
    for _ in range(20):
        again = run(gdn.chunk_kda, given)
        other += any(not torch.equal(x, again[n]) for n, x in first.items())
    return other


def serving() -> None:
    torch.manual_seed(0)
    B, T, H, HV, K, V = 3, 4, 2, 4, 64, 64
    q, k, v = (torch.randn(B, T, heads, size) for heads, size in ((H, K), (H, K), (HV, V)))
    gates = {"a": torch.randn(B, T, HV, K), "b": torch.randn(B, T, HV), "dt_bias": torch.randn(HV, K)}
    options = {"lower_bound": -5.0, "use_qk_l2norm_in_kernel": True, "state_v_first": True}
    pool, rows_of = torch.randn(5, HV, V, K), torch.tensor([4, 1, 2])
    history = (torch.randn(5, 9, HV, V), torch.randn(5, 9, H, K), -torch.rand(5, 9, HV, K))
    flat = [x.flatten(0, 1)[None] for x in (q, k, v)]
    flat_gates = {n: x.flatten(0, 1)[None] if n != "dt_bias" else x for n, x in gates.items()}

    def decode(to):
        state = to(pool)
        o = gdn.decode(
            to(q),
            to(k),
            to(v),
            state,
            **{n: to(x) for n, x in gates.items()},
            **options,
            read_index=to(rows_of),
        )
        return o, state

    def prefill(to):
        state = to(pool)
        more = {"cu_seqlens": to(torch.tensor([0, 3, 3, 12])), "state_index": to(rows_of)}
        o = gdn.prefill(*map(to, flat), state, **{n: to(x) for n, x in flat_gates.items()}, **more, **options)
        return o, state

    def replay(to):
        u, keys, g = (to(x) for x in history)
        cursor = to(torch.tensor([0, 0, 2, 0, 4]))
        given = {n: to(x) for n, x in gates.items()}
        o = gdn.replay_decode(
            to(q), to(k), to(v), to(pool), u, keys, g, cursor, **given, **options, read_index=to(rows_of)
        )
        state = to(pool)[None]
        gdn.replay_commit(
            state,
            u[None],
            keys[None],
            g[None],
            cursor,
            to(rows_of),
            to(torch.tensor([3, 4, 1])),
            room=4,
            state_v_first=True,
        )
        return o, u, g, state

    for call in (decode, prefill, replay):
        ours, expected = call(lambda x: x.to(DEVICE, copy=True)), call(lambda x: x.clone())
        error = max(float((a.cpu() - b).norm() / b.norm()) for a, b in zip(ours, expected, strict=True))
        print(f"{call.__name__}: {error:.1e} from the CPU {'' if error < 1e-5 else 'FAILED'}")


def dispatch():
    x = torch.randn(1, 128, 2, 128, device=DEVICE, dtype=BF16)
    g = torch.zeros(1, 128, 2, 128, device=DEVICE)
    print(gdn.explain(x, x, x, g))
    assert gdn.explain(x, x, x, g).chosen == "triton"


def timed(run, reps=10):
    for _ in range(3):
        run()
    times = []
    for _ in range(5):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        a.record()
        for _ in range(reps):
            run()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / reps)
    return sorted(times)[2]


def kernels(run):
    """Return us of each kernel of one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    return "  ".join(f"{e.key[:28]} {e.self_device_time_total:.0f}" for e in found[:9])


def providers():
    """Yield a name, a function of q, k, v, g, beta, and whether g is per channel."""
    ours = {"use_qk_l2norm_in_kernel": True}
    yield "gdn kda", lambda *x: gdn.chunk_kda(*x, **ours)[0], True
    yield "gdn per head, triton", lambda *x: gdn.chunk_gdn(*x, backend="triton", **ours)[0], False
    yield "gdn per head", lambda *x: gdn.chunk_gdn(*x, **ours)[0], False
    try:
        from fla.ops.kda import chunk_kda
    except ImportError as e:
        print(f"no FLA: {e}")
        return
    yield "fla kda", lambda *x: chunk_kda(*x, **ours)[0], True


def measure(name):
    H, B, T = TIMES[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, 128, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(3))
    beta = torch.rand(B, T, H, device=DEVICE, requires_grad=True)
    logits = torch.randn(B, T, H, 128, device=DEVICE)
    # the bounded gate of a model, and one that decays slowly
    for gate, rate in (("bounded", 1.0), ("slow", 1e-3)):
        per_channel = (-5 * rate * torch.sigmoid(logits)).requires_grad_()
        for provider, function, is_per_channel in providers():
            g = per_channel if is_per_channel else per_channel.detach().mean(-1).requires_grad_()
            leaves = (q, k, v, g, beta)
            try:
                with torch.no_grad():
                    forward = timed(lambda f=function, x=leaves: f(*x))
                do = torch.randn_like(v)
                step = lambda f=function, x=leaves, do=do: torch.autograd.grad(f(*x), x, do)  # noqa: E731
                print(f"{name} {gate:8s} {provider:22s} {forward:9.0f} {timed(step):9.0f} us", flush=True)
                if provider == "gdn kda":
                    print("    ", kernels(step), flush=True)
            except Exception as e:
                print(f"{name} {gate} {provider}: {type(e).__name__}: {e}", flush=True)


def in_a_process(name):
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--one", name], timeout=150, capture_output=True, text=True
        )
        lines = done.stdout if done.returncode == 0 else done.stdout + done.stderr[-600:]
    except subprocess.TimeoutExpired:
        lines = f"{name}: no result after 150 s\n"
    print(lines.rstrip(), f"({time.monotonic() - start:.0f} s)", flush=True)


def main():
    if sys.argv[1:2] == ["--one"]:
        name = sys.argv[2]
        {"dispatch": dispatch, "serving": serving}.get(
            name, lambda: check_one(name) if name in CHECKS else measure(name)
        )()
        return
    for name in ("dispatch", *CHECKS):
        in_a_process(name)
    if "--check" not in sys.argv:
        for name in ("serving", *TIMES):
            in_a_process(name)


if __name__ == "__main__":
    main()
