"""Check and time histories on states in int16 on a GPU, beside `decode` on int16 and histories on floats.

    PYTHONPATH=src python docs/lab/2026-11-26-int16-histories.py              checks, then times; about 60 s
    PYTHONPATH=src python docs/lab/2026-11-26-int16-histories.py --check      only the checks

check: relative RMS errors in 1e-3 of o and of the states after the last fold against the recurrence in fp64,
       over four cycles of folds with rows at different cursors; `decode` on an int16 pool and a history on
       bf16 states beside them. With T tokens a call 0 to T of them are kept.
time:  us per token of 16/32 heads of 128 x 128 from CUDA graphs of one cycle of folds on several layers, so
       that states come from HBM; the graphs in turns, median of 7. In brackets over `decode` on int16.
"""

import importlib.util
import sys
from pathlib import Path

import torch

import gdn

SPEC = importlib.util.spec_from_file_location(
    "history_of_floats", Path(__file__).with_name("2026-11-25-decode-with-history.py")
)
old = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(old)
DEVICE, WHERE = "cuda", old.ENGINE | {"backend": "triton"}
CHECKS = [(1, 16, 1), (70, 16, 1), (70, 32, 1), (70, 16, 4), (70, 32, 16), (9, 8, 3)]  # rows, places, T
ROWS = (1, 8, 64, 128, 256, 512)


def make_pool(kind, B, places, room=1):
    """Return a pool of histories, or of states alone with places=None."""
    sizes = {name: value for name, value in old.HEADS.items() if places or name != "num_k_heads"}
    if places is None:
        pool = gdn.allocate_int16_pool(B, **sizes, state_v_first=True, device=DEVICE)
    else:
        pool = gdn.allocate_history_pool(
            B, **sizes, places=places, room=room, state_v_first=True, device=DEVICE,
            state_dtype=torch.int16 if kind == "int16" else old.STATES[kind],
        )  # fmt: skip
    S = torch.randn(B, old.HV, old.D, old.D, device=DEVICE) / 16
    if kind == "int16":
        slots = torch.arange(B, device=DEVICE)
        gdn.Int16Pool(pool.state, pool.column_scale).write(slots, S, state_v_first=True)
    else:
        pool.state.copy_(S)
    return pool


def states_of(pool):
    """Return the states of a pool in fp64."""
    scale = getattr(pool, "column_scale", None)
    return pool.state.double() if scale is None else pool.state.double() * scale.double()[..., None]


def check(B, places, T):
    """Return a line of errors; the pools begin with the same rounded states."""
    torch.manual_seed(0)
    mine, plain = make_pool("int16", B, places, T), make_pool("int16", B, None)
    floats = make_pool("bf16", B, places, T)
    plain.state.copy_(mine.state), plain.column_scale.copy_(mine.column_scale)
    exact = states_of(mine)
    floats.state.copy_(exact)
    for pool in (mine, floats):
        pool.cursor[:, 0] = torch.arange(B, device=DEVICE) % places
    slots = torch.randperm(B, device=DEVICE).int()
    where, order, last, errors = {"read_index": slots, **WHERE}, slots.long(), None, {}
    kept = torch.zeros(B, dtype=torch.int32, device=DEVICE)
    for _ in range(4 * places // T + 3):
        if T > 1 and last is not None:
            # the drafts that the last call kept
            S, new = exact[order], exact[order].clone()
            for t in range(T):
                _, S = old.recurrence(S, last, t)
                new[kept == t + 1] = S[kept == t + 1]
            exact[order] = new
        x, S, want = old.draw(B, T), exact[order], []
        for t in range(T):
            o, S = old.recurrence(S, x, t)
            want.append(o)
        want = torch.stack(want, 1)
        drafts = {"num_accepted": kept.clone()} if T > 1 else {"use_history": True}
        found = {
            "int16": gdn.decode_with_history(**x, pool=mine, **where, **drafts),
            "bf16": gdn.decode_with_history(**x, pool=floats, **where, **drafts),
        }
        if T == 1:
            exact[order] = S
            found["decode int16"] = gdn.decode(**x, state=plain, **where)
        for name, o in found.items():
            errors[name] = max(errors.get(name, 0.0), old.error(o, want))
        last, kept = x, torch.randint(0, T + 1, (B,), device=DEVICE, dtype=torch.int32)
    folded = {"num_accepted": torch.zeros_like(kept)} if T > 1 else {}
    pools = {"int16": mine, "bf16": floats} | ({"decode int16": plain} if T == 1 else {})
    for pool in (mine, floats):
        gdn.fold_history(pool, slots, state_v_first=True, backend="triton", **folded)
    ends = {name: old.error(states_of(pool), exact) for name, pool in pools.items()}
    # u and k of the history are bf16: 2e-3 of what a fold writes, whatever the state is
    is_right = errors["int16"] < 5 and ends["int16"] < 3 and not mine.cursor[:, 1:].any()
    line = "; ".join(f"{name}: o {errors[name]:.2f} S {ends[name]:.2f}" for name in errors)
    return f"{line}  {'ok' if is_right else 'WRONG'}"


def capture(calls):
    """Return a CUDA graph of some calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def time_rows(B):
    """Return the us per token of B rows in each form."""
    layers = max(1, min(32, -(-(3 * 2**27) // (B * old.HV * old.D * old.D * 2))))
    x = old.draw(B, 1)
    out = torch.empty(B, 1, old.HV, old.D, dtype=torch.bfloat16, device=DEVICE)
    where = {"read_index": torch.randperm(B, device=DEVICE).int(), **WHERE}
    graphs = {}
    for name, kind, places in (
        ("decode int16", "int16", None), ("int16 @16", "int16", 16), ("int16 @32", "int16", 32),
        ("bf16 @16", "bf16", 16), ("fp32 @16", "fp32", 16),
    ):  # fmt: skip
        pools, steps = (
            [make_pool(kind, B, places) for _ in range(layers)],
            4 if places is None else places - 1,
        )
        calls = []
        for pool in pools * steps:
            if places is None:
                calls.append(lambda p=pool: gdn.decode(**x, state=p, out=out, **where))
                continue
            pool.cursor[:, 1] = torch.arange(B, device=DEVICE) % (places - 1)
            calls.append(
                lambda p=pool: gdn.decode_with_history(**x, pool=p, use_history=True, out=out, **where)
            )
        graphs[name] = (capture(calls), steps * layers, pools)
    times = {name: [] for name in graphs}
    for _ in range(7):
        for name, (graph, count, _) in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / count)
    median = {name: sorted(values)[3] for name, values in times.items()}
    base = median["decode int16"]
    return "  ".join(f"{name} {us:.2f} ({us / base:.2f})" for name, us in median.items())


def main():
    """Print a line for each check and each number of rows."""
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for case in CHECKS:
        print("check {} rows, {} places, T={}:".format(*case), check(*case), flush=True)
    for B in () if "--check" in sys.argv else ROWS:
        print(f"time B={B}:", time_rows(B), flush=True)


if __name__ == "__main__":
    main()
