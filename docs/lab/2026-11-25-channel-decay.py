"""Check a decay per key channel on a GPU, where `eager` computes it, and time it beside the decay per head.

    PYTHONPATH=src python docs/lab/2026-11-25-channel-decay.py

check: drawn problems against the reference in fp64, forward and backward, for 40 s; then each serving
function on the GPU beside the same call on the CPU. dispatch: which backend calls get. time: ms of a forward
and of a forward with backward, median of 5, of `eager` on this GPU and of the default with a decay per head.
"""

import statistics
import time

import torch

import gdn
from gdn.testing import check, covering
from gdn.testing.cases import CHANNEL_FACTORS, packed, rows

DEVICE = torch.device("cuda")
SECONDS = 40
FACTORS = CHANNEL_FACTORS | {
    "lengths": (*map(rows, (1, 17, 64, 69, 129)), packed(0, 5, 0, 64, 69, 3, tail=3)),
    "heads": ((2, 2), (2, 4)),
    "sizes": ((64, 64), (128, 128), (60, 20)),
}


def drawn() -> None:
    bad = count = 0
    cases, end, worst = covering(FACTORS, max_cost=2**21), time.monotonic() + SECONDS, 0.0
    for i, case in enumerate(cases):
        if time.monotonic() > end:
            break
        dtype = (torch.bfloat16, torch.float32, torch.float16)[i % 3]
        count += 1
        for verdict in check(gdn.chunk_kda, case, dtype, seed=i, device=DEVICE):
            worst = max(worst, verdict.error / verdict.limit)
            if not verdict.ok:
                bad += 1
                print("FAILED", verdict)
    found = f"{bad} outputs above their limits, worst {worst:.2f} of its limit"
    print(f"drawn problems: {count} of {len(cases)}, {found}")


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


def dispatch() -> None:
    x, g = (
        torch.randn(1, 128, 2, 64, device=DEVICE, dtype=torch.bfloat16),
        torch.zeros(1, 128, 2, 64, device=DEVICE),
    )
    print(gdn.explain(x, x, x, g))
    assert gdn.explain(x, x, x, g).chosen == "eager"
    try:
        gdn.chunk_kda(x, x, x, g, backend="triton")
    except NotImplementedError as error:
        print("named:", error)


def median_ms(call) -> float:
    call()
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def time_rule(H: int, T: int, *channels: int) -> tuple[float, float]:
    """Return ms of a forward and of a forward with backward."""
    q, k, v = (
        torch.randn(1, T, H, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    beta = torch.rand(1, T, H, device=DEVICE)
    g = (-5 * torch.sigmoid(torch.randn(1, T, H, *channels, device=DEVICE))).requires_grad_()

    def forward():
        return gdn.chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]

    forward_ms = median_ms(torch.no_grad()(forward))
    return forward_ms, median_ms(lambda: torch.autograd.grad(forward().sum(), (q, k, v, g)))


def times() -> None:
    print("heads tokens   kda fwd, fwd+bwd (eager)   gdn fwd, fwd+bwd (default)   ms")
    for H, T in ((16, 2048), (32, 8192)):
        kda, per_head = time_rule(H, T, 128), time_rule(H, T)
        print(f"{H:5d} {T:6d}   {kda[0]:8.2f} {kda[1]:8.2f}   {per_head[0]:8.2f} {per_head[1]:8.2f}")


if __name__ == "__main__":
    dispatch()
    serving()
    times()
    drawn()
