"""Compare a decay per key channel with FLA's `chunk_kda` and `fused_recurrent_kda` in one process on a GPU.

    TRITON_CACHE_DIR=/tmp/cache PYTHONPATH=src:FLA python docs/lab/2026-11-26-channel-decay-beside-fla.py

FLA's kernels are tuned over some of their configurations (`TRIED`), which 14 processes compile into the cache
beforehand, without launching them. `err`: relative RMS errors in 1e-3 against the reference in fp64, the
larger one of two seeds. `time`: us of a forward and of a forward with backward, by CUDA events; `kernels`:
the sum of the kernels' times. `decode`: us of a launch in a CUDA graph on fp32 pools.
"""

import gc
import os
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import torch
import triton
from triton.runtime.autotuner import Autotuner

import gdn
from gdn.testing import Case, inputs, rows
from gdn.testing.accuracy import compare_outputs, expect_outputs, run

warnings.filterwarnings("ignore")
T0 = time.time()
DEV, DONE, N = "cuda", "/tmp/kda_done", 14
# kernel -> which of its configurations are tried: a predicate of arguments, warps and stages
TRIED = {
    "chunk_local_cumsum_vector_kernel": lambda a, w, s: True,
    "chunk_kda_fwd_kernel_intra_sub_chunk": lambda a, w, s: s == 3,
    "chunk_kda_fwd_kernel_intra_token_parallel": lambda a, w, s: w == a["BH"] or w == 4 and a["BH"] > 1,
    "chunk_kda_fwd_kernel_inter_solve_fused": lambda a, w, s: True,
    "recompute_w_u_fwd_kda_kernel": lambda a, w, s: s < 4,
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": lambda a, w, s: w == 4 or s == 3,
    "chunk_gla_fwd_kernel_o": lambda a, w, s: s == 3 and w > 2 or s == 2 and w == 4 and a["BK"] == 64,
    "chunk_kda_bwd_kernel_dAv": lambda a, w, s: True,
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": lambda a, w, s: w == 4 or s == 3,
    "chunk_kda_bwd_kernel_wy_dqkg_fused": lambda a, w, s: s < 4,
    "chunk_kda_bwd_kernel_intra": lambda a, w, s: s < 4,
    "l2norm_fwd_kernel": lambda a, w, s: w == 4 and a["BT"] in (16, 32) or w == 8 and a["BT"] in (32, 64),
    "l2norm_bwd_kernel": lambda a, w, s: w == 4 and a["BT"] in (16, 32) or w == 8 and a["BT"] in (32, 64),
}
COST = {
    "chunk_kda_bwd_kernel_wy_dqkg_fused": 4,
    "chunk_kda_bwd_kernel_intra": 3,
    "chunk_kda_fwd_kernel_inter_solve_fused": 3,
    "chunk_kda_fwd_kernel_intra_sub_chunk": 2,
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": 3,
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": 2,
}


def name_of(tuner):
    fn = tuner.fn
    while not hasattr(fn, "__name__"):
        fn = fn.fn
    return fn.__name__


def chosen(tuner):
    """Return the configurations of a tuner that are tried (its first two if its kernel is not listed)."""
    takes = TRIED.get(name_of(tuner), lambda *a: False)
    return [c for c in tuner.configs if takes(c.kwargs, c.num_warps, c.num_stages)] or tuner.configs[:2]


def shrink():
    found = {}
    for x in gc.get_objects():
        if isinstance(x, Autotuner):
            before = len(x.configs)
            x.configs = chosen(x)
            x._do_bench = lambda call, quantiles: triton.testing.do_bench(
                call, warmup=4, rep=16, quantiles=quantiles
            )
            found[name_of(x)] = (len(x.configs), before)
    return found


# name: heads, sequences, tokens, ends, safe_gate
LADDER = [0, 128, 384, 896, 1920, 3968, 8192]
ROWS = {
    "32 heads 1x8192": (32, 1, 8192, None, True),
    "16 heads 8x2048": (16, 8, 2048, None, True),
    "32 heads packed": (32, 1, 8192, LADDER, True),
    "64 heads 4x4096": (64, 4, 4096, None, True),
    "32 heads 1x8192 default": (32, 1, 8192, None, False),
}
ERRORS = {"errors": (2, 1, 512, None, False), "errors safe": (2, 1, 512, None, True)}
FIRST = "32 heads 1x8192"
ALL = {FIRST: ROWS[FIRST], **ERRORS, **ROWS}


def problem(name, grad=True, short=False):
    H, B, T, ends, _ = ALL[name]
    T = min(T, 1024) if short and B == 4 else T  # 16 processes at once
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, 128, device=DEV, dtype=torch.bfloat16) for _ in range(3))
    beta = torch.rand(B, T, H, device=DEV)
    g = torch.randn(B, T, H, 128, device=DEV).sigmoid_().mul_(-5)
    cu = None if ends is None else torch.tensor(ends, device=DEV, dtype=torch.int64)
    leaves = [x.requires_grad_(grad) for x in (q, k, v, g, beta)]
    return leaves, cu


def step(name, leaves, cu, backward=True, state=None):
    from fla.ops.kda import chunk_kda

    o, S = chunk_kda(
        *leaves,
        use_qk_l2norm_in_kernel=True,
        safe_gate=ALL[name][4],
        cu_seqlens=cu,
        initial_state=state,
        output_final_state=state is not None,
    )
    if backward:
        do = torch.ones_like(o)
        outs, gs = ([o], [do]) if state is None else ([o, S], [do, torch.ones_like(S)])
        return torch.autograd.grad(outs, leaves, gs)
    return o


def warm(index, count):
    """Compile a share of the kernels of the rows, launching none of FLA's."""
    import fla.ops.kda  # noqa: F401

    shrink()
    load = [0.0] * count
    current = [""]
    seen = set()

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        kernel = name_of(self)
        kwargs.pop("warmup", None)
        configs = self.configs[:1] if current[0].startswith("errors") else self.configs
        if self.early_config_prune:
            configs = self.early_config_prune(configs, self.nargs, **kwargs)
        for i, c in enumerate(configs):
            # two calls of a kernel in a step may differ in constants (REVERSE, NB): each has its own key
            constants = sorted((k, str(v)) for k, v in kwargs.items() if isinstance(v, (bool, int)))
            key = (current[0], kernel, i, str(constants))
            if key in seen:
                continue
            seen.add(key)
            at = min(range(count), key=lambda j: load[j])
            load[at] += COST.get(kernel, 1)
            if at == index:
                try:
                    self.fn.warmup(*args, **kwargs, **c.all_kwargs())
                except Exception as e:
                    print("warm", kernel, c, type(e).__name__, str(e)[:120], flush=True)

    Autotuner.run = run
    for cls in Autotuner.__subclasses__():
        if "run" in cls.__dict__:
            cls.run = run
    for name in ALL:
        current[0] = name
        t = time.time()
        try:
            leaves, cu = problem(name, short=True)
            H = ALL[name][0]
            state = torch.zeros(1, H, 128, 128, device=DEV).requires_grad_()
            state = state if name in ERRORS else None
            step(name, leaves, cu, state=state)
            del leaves
        except Exception as e:
            print("warm", name, type(e).__name__, str(e)[:300], flush=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        open(f"{DONE}/{name.replace(' ', '_')}.{index}", "w").close()
        if index == 0:
            print(f"warm {name}: {time.time() - t:.0f} s, at {time.time() - T0:.0f} s", flush=True)


OURS = {"use_qk_l2norm_in_kernel": True}
TABLE = []


def say(*cells):
    line = " ".join(str(c) for c in cells)
    TABLE.append(line)
    print(f"[{time.time() - T0:3.0f}]", line, flush=True)


def part(function, *args):
    try:
        return function(*args)
    except Exception as e:
        say(function.__name__, *args[:1], "FAILED", type(e).__name__, str(e)[:300])


BASE = Case("bounded", sizes=(128, 128), heads=(2, 2), is_per_channel=True, state="wide", lengths=rows(512))
GATES = ("bounded", "slow", "strong", "turns", "rates", "none")
problems = {}


def fla_provider(name):
    def call(q, k, v, g=None, beta=None, initial_state=None, scale=None, **options):
        from fla.ops.kda import chunk_kda

        return chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=options["use_qk_l2norm_in_kernel"],
            safe_gate=ALL[name][4],
        )

    return call


def errors_of(provider, gate, seed):
    if (gate, seed) not in problems:
        case = replace(BASE, gate=gate)
        given = inputs(case, torch.bfloat16, seed=seed, device=DEV)
        calm = lambda: inputs(replace(case, gate="none"), torch.bfloat16, seed=seed, device=DEV)  # noqa: E731
        problems[gate, seed] = case, given, expect_outputs(given, calm, 2, True)
    case, given, expected = problems[gate, seed]
    return {v.output: v.error for v in compare_outputs(run(provider, given), expected, case)}


def errors(who, provider, gates=GATES, seeds=(0, 1)):
    for gate in gates:
        found = [errors_of(provider, gate, s) for s in seeds]
        worst = {n: max(e[n] for e in found) for n in found[0]}
        say(f"err {gate:8s} {who:9s}", " ".join(f"{n} {1e3 * e:.3g}" for n, e in worst.items()))


def timed(call, reps=8):
    for _ in range(2):
        call()
    times = []
    for _ in range(5):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        a.record()
        for _ in range(reps):
            call()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / reps)
    return sorted(times)[2]


def kernels(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in found)
    return total, " ".join(f"{e.key[:34]} {e.self_device_time_total:.0f}" for e in found[:14])


results = {}


def row_of(who, name):
    leaves, cu = problem(name)
    do, xs = torch.randn_like(leaves[2]), leaves
    if who == "fla":
        calls = (lambda: step(name, leaves, cu, backward=False)), (lambda: step(name, leaves, cu))
    else:
        more = OURS if cu is None else {"cu_seqlens": cu, **OURS}
        forward = lambda: gdn.chunk_kda(*xs, **more)[0]  # noqa: E731
        calls = forward, (lambda: torch.autograd.grad(forward(), xs, do))
    with torch.no_grad():
        times = [timed(calls[0])]
        cells = [kernels(calls[0])]
    times.append(timed(calls[1], 4))
    cells.append(kernels(calls[1]))
    results[who, name] = times
    base = results.get(("gdn", name.replace(" default", ""))) if who == "fla" else None
    ratio = "" if base is None else " ".join(f"{x / y:.2f}" for x, y in zip(times, base, strict=True))
    totals = " ".join(f"{total:.0f}" for total, _ in cells)
    say(f"time {name:24s} {who:4s} {times[0]:7.0f} {times[1]:7.0f} kernels {totals} ratio {ratio}")
    print("   forward:", cells[0][1], "\n   step:", cells[1][1], flush=True)
    torch.cuda.empty_cache()


H, HV, K, V = 16, 32, 128, 128


def graph_timed(runs, reps=20):
    for r in runs[:3]:
        r()
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


def decode_runs(who, B):
    torch.manual_seed(0)
    rn = lambda *s: torch.randn(*s, device=DEV)  # noqa: E731
    q, k, v = rn(B, 1, H, K).bfloat16(), rn(B, 1, H, K).bfloat16(), rn(B, 1, HV, V).bfloat16()
    b, A_log = rn(B, 1, HV).bfloat16(), rn(HV) - 3
    a, bias = rn(B, 1, HV, K).bfloat16(), rn(HV, K)
    if who == "head":
        a, bias = a[..., 0].contiguous(), bias[:, 0].contiguous()
    count = max(2, min(20, 400 * 2**20 // (B * HV * K * V * 4)))
    pools = [rn(B, HV, V, K) for _ in range(count)]
    out = torch.empty_like(v)
    if who == "fla":
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        index = torch.arange(B, device=DEV, dtype=torch.int32)
        flat = bias.flatten()
        return out, pools, [
            lambda S=S: fused_recurrent_kda_fwd(
                q, k, v, a, b, A_log, flat, initial_state=S, inplace_final_state=True,
                output_final_state=True, state_v_first=True, ssm_state_indices=index,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                lower_bound=-5.0, out=out,
            )
            for S in pools
        ]  # fmt: skip
    more = {"lower_bound": -5.0} if who == "channel" else {}
    more |= {"backend": "triton", "use_qk_l2norm_in_kernel": True, "state_v_first": True}
    gates = {"a": a, "b": b, "A_log": A_log, "dt_bias": bias, "out": out}
    return out, pools, [lambda S=S: gdn.decode(q, k, v, S, **gates, **more) for S in pools]


def decode(whos, sizes=(1, 4, 16, 64, 128, 256)):
    for B in sizes:
        cells, kept = [], {}
        for who in whos:
            try:
                out, pools, runs = decode_runs(who, B)
                runs[0]()
                kept[who] = (out.clone(), pools[0].clone())
                cells.append(f"{who} {graph_timed(runs):.2f}")
                del pools, runs
                torch.cuda.empty_cache()
            except Exception as e:
                cells.append(f"{who} FAILED {type(e).__name__} {str(e)[:200]}")
        if "fla" in kept and "channel" in kept:
            x, y = kept["fla"], kept["channel"]
            errors = (
                ((p.float() - r.float()).norm() / r.float().norm()).item() for p, r in zip(x, y, strict=True)
            )
            cells.append("differ " + " ".join(f"{e:.1e}" for e in errors))
        say(f"decode B={B:3d}", " ".join(cells))


def same_bits():
    given = inputs(replace(BASE, lengths=rows(300)), torch.bfloat16, device=DEV)
    first = run(gdn.chunk_kda, given)
    other = sum(
        any(not torch.equal(x, again[n]) for n, x in first.items())
        for again in (run(gdn.chunk_kda, given) for _ in range(100))
    )
    say("reruns with other bits, of 100:", other)


def is_warm(name):
    return sum(f.startswith(name.replace(" ", "_") + ".") for f in os.listdir(DONE)) >= N


def main() -> None:
    shutil.rmtree(DONE, ignore_errors=True)
    os.makedirs(DONE)
    workers = [
        subprocess.Popen([sys.executable, __file__, "--worker", str(i)], stderr=subprocess.DEVNULL)
        for i in range(N)
    ]
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    part(errors, "gdn", gdn.chunk_kda)
    part(same_bits)
    limit = float(os.environ.get("KDA_WARM", 100))

    while time.time() - T0 < limit and any(w.poll() is None for w in workers):
        time.sleep(0.2)
    print("warm:", {n: is_warm(n) for n in ALL}, f"{time.time() - T0:.0f} s", flush=True)
    for w in workers:
        if w.poll() is None:
            w.kill()
    import fla.ops.kda  # noqa: F401

    counts = shrink()
    say("FLA configurations, of:", {n: c for n, c in counts.items() if n in TRIED})
    part(decode, ("channel", "head", "fla"))
    tuners = [x for x in __import__("gc").get_objects() if isinstance(x, Autotuner)]
    lists = [x.configs for x in tuners]
    for x in tuners:
        x.configs = x.configs[:1]
    for name, gates in (("errors", GATES), ("errors safe", ("bounded", "slow"))):
        if is_warm(name):
            part(errors, "fla" + name[6:], fla_provider(name), gates)
    for x, configs in zip(tuners, lists, strict=True):
        x.configs = configs
        x.cache.clear()
    for name in ROWS:
        if is_warm(name):
            if "default" not in name:
                part(row_of, "gdn", name)
            part(row_of, "fla", name)
        if name == "32 heads 1x8192":
            # the other rows try each kernel's three fastest of this row, and what another call of it chose
            for x in tuners:
                if x.cache and len(x.configs) > 1:
                    fastest = sorted(x.configs_timings, key=lambda c: x.configs_timings[c][0])[:3]
                    x.configs = list({str(c): c for c in [*fastest, *x.cache.values()]}.values())
                    times = [(str(c), round(1e3 * x.configs_timings[c][0])) for c in fastest]
                    print("   ", name_of(x), times, flush=True)
    best = {name_of(x): sorted({str(c) for c in x.cache.values()}) for x in tuners if x.cache}
    for n, c in best.items():
        print("best", n, c, flush=True)
    print("\n==== table")
    print("\n".join(TABLE))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        warm(int(sys.argv[2]), N)
    else:
        main()
