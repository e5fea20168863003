"""Check and time packed rows as promised, before and after a longer row gives NaN.

    python docs/lab/2026-11-28-longer-rows.py OLD_SRC       a folder with the package `gdn` before the change

Two sources of one package do not fit into one process: a process for each runs in turn, three times. Prints a
table of times (us, the least of all), whether all bits are the same, and what a longer row gives.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROUNDS, REPLAYS = 3, 200
HERE = Path(__file__).resolve().parents[2] / "src"


def cases():
    """Return the calls by name: form, rows, tokens, dtype of the pool, write."""
    for rows in (8, 64, 128):
        for pool in ("bfloat16", "float32"):
            yield f"strips B={rows} T=4 {pool}", ("decode", rows, 4, pool, "final", True)
    for rows in (8, 64):
        for tokens in (4, 16):
            for write in ("none", "final"):
                yield f"chunk B={rows} T={tokens} {write}", ("decode", rows, tokens, "bfloat16", write, False)
        yield f"replay B={rows} T=4", ("replay", rows, 4, "bfloat16", "none", False)


def call_of(form, rows, tokens, pool, write, exact, longer=False):
    """Return a function that runs the call, its written tensors, and the promised number of tokens."""
    import torch

    import gdn

    torch.manual_seed(0)
    H, HV, D, options = 16, 32, 128, {"device": "cuda", "dtype": torch.bfloat16}
    lengths = torch.full((rows,), tokens)
    if longer:
        lengths[1] = 3 * tokens
    total = int(lengths.sum())
    x = {
        "q": torch.randn(1, total, H, D, **options), "k": torch.randn(1, total, H, D, **options),
        "v": torch.randn(1, total, HV, D, **options), "a": torch.randn(1, total, HV, **options),
        "b": torch.randn(1, total, HV, **options), "A_log": torch.zeros(HV, device="cuda"),
        "dt_bias": torch.zeros(HV, device="cuda"), "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": torch.cat((torch.zeros(1), lengths.cumsum(0))).int().cuda(), "max_seqlen": tokens,
        "read_index": torch.arange(rows, device="cuda").int(), "state_v_first": True, "backend": "triton",
    }  # fmt: skip
    out = torch.full((1, total, HV, D), 7.0, **options)
    state = torch.randn(rows, HV, D, D, device="cuda").to(getattr(torch, pool)) / 8
    if form == "decode":
        run = lambda: gdn.decode(**x, state=state, write=write, exact_packet=exact, out=out)  # noqa: E731
        return run, {"o": out, "state": state}
    held = {
        "history_u": torch.randn(rows, 32, HV, D, **options) / 8,
        "history_k": torch.randn(rows, 32, H, D, **options) / 8,
        "history_G": -torch.rand(rows, 32, HV, device="cuda", dtype=torch.float64).cumsum(1) / 8,
    }
    cursor = (torch.arange(rows, device="cuda") % 8).int()
    run = lambda: gdn.replay_decode(**x, state=state, **held, cursor=cursor, out=out)  # noqa: E731
    return run, {"o": out, **held}


def child():
    """Run all cases with the `gdn` of this process; print a line of JSON."""
    import torch

    found = {}
    for name, given in cases():
        run, written = call_of(*given)
        run()
        torch.cuda.synchronize()
        digest = hashlib.sha256()
        for x in written.values():
            digest.update(x.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / REPLAYS)
        run, written = call_of(*given, longer=True)
        run()
        B, tokens = given[1], given[2]
        o = written["o"][0]
        row = o[tokens : 4 * tokens]
        rest = torch.cat((o[:tokens], o[4 * tokens :]))
        is_loud = bool(row.isnan().flatten(1).all(1).any()) and bool((row[-1].isnan()).all())
        if given[4] == "final":
            is_loud &= bool(written["state"][1].isnan().all())
        is_other_right = not bool(rest.isnan().any()) and not bool((rest == 7).all())
        found[name] = [min(times), digest.hexdigest(), is_loud, is_other_right and B > 1]
    print(json.dumps(found))


def main():
    """Run both sources in turn and print the table."""
    sources = {"before": sys.argv[1], "after": str(HERE)}
    all_found = {name: [] for name in sources}
    for _ in range(ROUNDS):
        for name, path in sources.items():
            environment = os.environ | {"PYTHONPATH": path}
            text = subprocess.check_output([sys.executable, __file__, "--child"], env=environment, text=True)
            all_found[name].append(json.loads(text.splitlines()[-1]))
    print("| call | before | after | ratio | bits | longer row is NaN: before, after | others right |")
    print("|---|---:|---:|---:|---|---|---|")
    for name, _ in cases():
        before, after = (min(x[name][0] for x in all_found[key]) for key in sources)
        a, b = (all_found[key][0][name] for key in sources)
        bits = "=" if a[1] == b[1] else "other"
        times = f"{before:.2f} | {after:.2f} | {after / before:.3f}"
        print(f"| {name} | {times} | {bits} | {a[2]}, {b[2]} | {b[3]} |")


if __name__ == "__main__":
    child() if sys.argv[1:] == ["--child"] else main()
