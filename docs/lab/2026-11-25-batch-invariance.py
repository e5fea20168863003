"""Check and time batch invariance, pieces, prefill on the pool and ChunkDecoder on an sm_90 GPU.

    PYTHONPATH=src python docs/lab/2026-11-25-batch-invariance.py    checks, then times, then the table
    ... --check or --times         only these
    ... --one NAME                 one line, in this process
    ... --device cpu --one NAME    the logic of a check, on `eager` and a few tokens

Each line runs in a process of its own with a limit of 150 s, so that a kernel that hangs costs one line.
check: `bits` counts comparisons that are not equal bit for bit, of all; 0 is right. error: relative RMS in
1e-3 against the recurrence in fp64, of a batch-invariant forward / one without. time: us by CUDA-graph
replays (median of 5 of 20), L2 warm, in the table's columns:
    default     as it is chosen, lengths on the host       no lengths  the same with offsets on the GPU only
    invariant   batch_invariant=True, lengths on the host  uncut       the same with GDN_SEGMENTS=0
    gathered    prefill on gathered states, o copied       in place    prefill on the pool
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import torch

import gdn
from gdn.testing import Case, accuracy, inputs, packed

IS_CPU = "cpu" in sys.argv
DEVICE = "cpu" if IS_CPU else "cuda"
SIZE = 16 if IS_CPU else 128
NAMES = ("q", "k", "v", "g", "beta")
# sequences of 97 and 400 chunks are cut with 8 heads, one of 260 with 32
BATCHES = {
    "2/8": ((2, 8), (6200, 70, 0, 25600, 1, 6144, 6080, 64)),
    "16/32": ((16, 32), (16640, 70, 0, 2047, 64, 300)),
    "16/64": ((16, 64), (4000, 70, 0, 2047, 64, 300)),
}
GATES = ("mild", "none", "reset", "strong")
ROWS = {
    "2/8 1x32768": (2, 8, [32768]), "2/8 1x8192": (2, 8, [8192]), "2/8 8x4096": (2, 8, [4096] * 8),
    "16/64 1x32768": (16, 64, [32768]), "16/64 4x8192": (16, 64, [8192] * 4),
    "16/32 1x32768": (16, 32, [32768]), "16/32 1x8192": (16, 32, [8192]),
    "16/32 4x8192": (16, 32, [8192] * 4),
    "16/32 8x4096": (16, 32, [4096] * 8), "16/32 8x1024": (16, 32, [1024] * 8),
    "16/32 1x2048": (16, 32, [2048]), "16/16 16x16384": (16, 16, [16384] * 16),
    # outside the twelve: what the rule costs where many sequences are long
    "2/8 8x8192": (2, 8, [8192] * 8), "16/32 2x32768": (16, 32, [32768] * 2),
}  # fmt: skip
POOLED = {
    "16/32 64x128": (16, 32, [128] * 64), "16/32 16x64": (16, 32, [64] * 16),
    "16/32 1000 of 1..300": (16, 32, [1 + 119 * n % 300 for n in range(1000)]),
    "16/32 256 of 1..64": (16, 32, [1 + 37 * n % 64 for n in range(256)]),
    "2/8 300 of 1..300": (2, 8, [1 + 119 * n % 300 for n in range(300)]),
    "16/32 32 of 100..2000": (16, 32, [100 + 1237 * n % 1901 for n in range(32)]),
    "16/32 128x17": (16, 32, [17] * 128), "16/64 64x128": (16, 64, [128] * 64),
    "16/32 8x1024": (16, 32, [1024] * 8), "16/32 1x512": (16, 32, [512]),
}  # fmt: skip
CHECKS = [
    *(f"batch {name}" for name in BATCHES), "pieces 16/32", "pieces 2/8 uncut",
    "fp64 2/8", "fp64 16/32", "decoder triton", "decoder eager",
    *(f"pool {kind}" for kind in ("fp32 V first", "fp32 K first", "bf16 V first", "bf16 K first")),
]  # fmt: skip
TIMES = [*(f"time {name}" for name in ROWS), *(f"pooled {name}" for name in POOLED)]


def same(x, y):
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.contiguous().view(ints), y.contiguous().view(ints))


def ends_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def shorten(lengths):
    return [n // 40 for n in lengths] if IS_CPU else list(lengths)


def given_of(heads, lengths, gate="mild", **options):
    case = Case(
        gate, heads=heads, sizes=(SIZE, SIZE), lengths=packed(*lengths), state="wide", batch_invariant=True
    )
    return inputs(replace(case, **options), torch.bfloat16, device=DEVICE, is_drawn_there=True)


def part_of(given, order, lengths, is_known):
    ends = ends_of(lengths).tolist()
    tokens = torch.cat([torch.arange(ends[n], ends[n + 1]) for n in order]).to(DEVICE)
    x = given.tensors | {name: given.tensors[name][:, tokens] for name in NAMES}
    offsets = ends_of([lengths[n] for n in order])
    x |= {"cu_seqlens": offsets.to(DEVICE), "initial_state": given.tensors["initial_state"][order]}
    return tokens, x | ({"cu_seqlens_cpu": offsets} if is_known else {})


def batch(name):
    print("; ".join(f"{gate}: {batch_of(name, gate)}" for gate in GATES))


def batch_of(name, gate):
    """Compare a batch with it permuted, with some sequences removed, and with each alone."""
    heads, lengths = BATCHES[name]
    lengths = shorten(lengths)
    given = given_of(heads, lengths, gate)
    chosen = gdn.explain(**given.tensors, **given.options).chosen
    o, final = gdn.chunk_gated_delta_rule(**given.tensors, **given.options)
    everything, wrong, count = range(len(lengths)), 0, 0
    for order in ([*reversed(everything)], [0, 3], *([n] for n in everything if lengths[n])):
        for is_known in (True, False):
            tokens, x = part_of(given, order, lengths, is_known)
            found = gdn.chunk_gated_delta_rule(**x, **given.options)
            wrong += not same(found[0], o[:, tokens])
            wrong += not same(found[1], final[order])
            count += 2
    return f"{chosen}, bits {wrong} of {count}{' BAD' if wrong or chosen == 'triton' else ''}"


def pieces(heads):
    print("; ".join(f"{size}: {pieces_of(heads, size)}" for size in (64, 128, 192, 1024)))


def pieces_of(heads, size):
    """Compare a prefill in pieces with the whole; with few heads and GDN_SEGMENTS=0 it is not cut."""
    H, HV = (16, 32) if heads == "16/32" else (2, 8)
    if heads != "16/32":
        os.environ["GDN_SEGMENTS"] = "0"
    lengths = (300, 100, 50) if IS_CPU else (3000 if HV == 32 else 9000, 100, 500)
    given = given_of((H, HV), lengths)
    x = {name: given.tensors[name] for name in NAMES}
    slots = torch.tensor([3, 0, 2], device=DEVICE)
    pool, ends = torch.randn(4, HV, SIZE, SIZE, device=DEVICE), ends_of(lengths).tolist()

    def run(pool, tokens, offsets):
        part = {name: y[:, tokens] for name, y in x.items()}
        options = {"state_v_first": True, "batch_invariant": True, "state_index": slots}
        return gdn.prefill(**part, state=pool, cu_seqlens=torch.tensor(offsets, device=DEVICE), **options)

    whole, cut = pool.clone(), pool.clone()
    o = run(whole, torch.arange(ends[-1], device=DEVICE), ends)
    found = torch.empty_like(o)
    for begin in range(0, max(lengths), size):
        spans = [(a + min(begin, n), a + min(begin + size, n)) for a, n in zip(ends, lengths, strict=False)]
        tokens = torch.cat([torch.arange(a, b, device=DEVICE) for a, b in spans])
        found[:, tokens] = run(cut, tokens, ends_of([b - a for a, b in spans]).tolist())
    wrong = (not same(found, o)) + (not same(cut, whole))
    return f"bits {wrong} of 2{' BAD' if wrong else ''}"


def fp64(name):
    """Compare with the recurrence in fp64, sequences cut by their own length among them."""
    heads, lengths = ((2, 8), (6200, 70, 0, 129)) if name == "2/8" else ((2, 16), (16640, 70))
    given = given_of(heads, shorten(lengths), "slow")
    wide = given.double()
    tensors = dict.fromkeys(("g", "beta")) | wide.tensors
    expected = accuracy.reference_rule(**tensors, **wide.options)
    cells = []
    for options in ({}, {"batch_invariant": False}):
        found = gdn.chunk_gated_delta_rule(**given.tensors, **given.options | options)
        cells.append(
            [1e3 * float((x.double() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]
        )
    (o, S), (other_o, other_S) = cells
    bad = " BAD" if max(o, S) > 5 else ""
    print(f"error of o {o:.2f}/{other_o:.2f}, of the state {S:.2f}/{other_S:.2f}{bad}")


def decoder(backend):
    """Compare tokens decoded one at a time with the forward that is trained."""
    prompts, steps = (130, 0, 37), 100
    lengths = [n + steps for n in prompts]
    options = {"raw_gate": "on", "beta": "sigmoid", "use_qk_l2norm_in_kernel": True}
    given = given_of((4, 8), lengths, **options)
    x, ends = dict(given.tensors), ends_of(lengths).tolist()
    x["q"] = x["q"].requires_grad_()
    o = gdn.chunk_gated_delta_rule(**x, **given.options, backend=backend)[0].detach()
    x["q"] = x["q"].detach()
    rest = {name: x[name] for name in ("A_log", "dt_bias") if name in x}
    rest |= {n: y for n, y in given.options.items() if n not in ("batch_invariant", "output_final_state")}
    row = gdn.ChunkDecoder(x["initial_state"], backend=backend, **rest)
    first = [torch.cat([x[n][:, a : a + c] for a, c in zip(ends, prompts, strict=False)], 1) for n in NAMES]
    parts = row.prefill(*first, cu_seqlens=ends_of(prompts).to(DEVICE))[0].split(list(prompts))
    found = [[part] for part in parts]
    for step in range(steps):
        token = [
            torch.cat([x[n][:, a + c + step] for a, c in zip(ends, prompts, strict=False)])[:, None]
            for n in NAMES
        ]
        for outputs, y in zip(found, row.decode(*token), strict=True):
            outputs.append(y)
    wrong = sum(not same(torch.cat(outputs), o[0, ends[n] : ends[n + 1]]) for n, outputs in enumerate(found))
    print(f"rows with other bits {wrong} of {len(found)}{' BAD' if wrong else ''}")


def prompts(H, HV, lengths, pool=torch.float32, is_v_first=True):
    given = given_of((H, HV), lengths, "mild", state_v_first=is_v_first)
    N, generator = len(lengths), torch.Generator().manual_seed(0)
    index = torch.randperm(2 * N, generator=generator)[:N].to(DEVICE)
    state = torch.randn(2 * N, HV, SIZE, SIZE, device=DEVICE).to(pool)
    x = {name: given.tensors[name] for name in NAMES}
    x |= {"cu_seqlens": given.tensors["cu_seqlens"].int(), "state_index": index, "state_v_first": is_v_first}
    return x, state, torch.full_like(x["v"], float("nan"))


def pool(kind):
    """Compare prefill on the pool with prefill on gathered states, on both backends."""
    from gdn.backends.triton.serving import prefill

    dtype, is_v_first = getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[kind[:4]]), "V" in kind
    cells, in_place = [], prefill.pool_of
    for H, HV, lengths in ((16, 32, [700, 0, 64, 1, 129]), (2, 8, [3000, 5]), (16, 64, [64] * 40)):
        x, state, out = prompts(H, HV, shorten(lengths), dtype, is_v_first)
        x["has_initial_state"] = x["state_index"] % 3 > 0
        for backend in ("eager",) if IS_CPU else ("triton", "hopper"):
            found = []
            for pool_of in (in_place, lambda p: None):
                prefill.pool_of = pool_of
                states, o = state.clone(), out.clone()
                gdn.prefill(**x, state=states, out=o, backend=backend)
                found.append((o, states))
            (o, states), (other, others) = found
            wrong = (not same(o, other)) + (not same(states, others)) + bool(o.isnan().any())
            cells.append(f"{backend} {H}/{HV} {wrong}{' BAD' if wrong else ''}")
    print("bits", ", ".join(cells))


def timed(run, reps=20):
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(reps):
            run()
    times = []
    for _ in range(5):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / reps)
    return sorted(times)[2]


def measure(name):
    H, HV, lengths = ROWS[name]
    given = given_of((H, HV), lengths, "mixed")
    x, known = given.tensors, {"cu_seqlens_cpu": ends_of(lengths)}
    plain = given.options | {"batch_invariant": False}

    def run(options, more):
        return timed(lambda: gdn.chunk_gated_delta_rule(**x, **more, **options))

    row = {"default": run(plain, known), "invariant": run(given.options, known)}
    row["no lengths"] = run(given.options, {})
    os.environ["GDN_SEGMENTS"] = "0"
    row["uncut"] = run(given.options, known)
    # the clock falls with the work: the first again
    del os.environ["GDN_SEGMENTS"]
    row["default again"] = run(plain, known)
    print(json.dumps(row))


def measure_pooled(name):
    from gdn.backends.triton.serving import prefill

    x, state, out = prompts(*POOLED[name])
    in_place, row = prefill.pool_of, {}
    for what, pool_of in (
        ("gathered", lambda p: None),
        ("in place", in_place),
        ("gathered again", lambda p: None),
    ):
        prefill.pool_of = pool_of
        row[what] = timed(lambda: gdn.prefill(**x, state=state, out=out))
    forward = {n: x[n] for n in NAMES} | {"cu_seqlens": x["cu_seqlens"]}
    initial = state[x["state_index"]]
    row["forward alone"] = timed(
        lambda: gdn.chunk_gated_delta_rule(
            **forward, initial_state=initial, output_final_state=True, state_v_first=True
        )
    )
    print(json.dumps(row))


def one(name):
    kind, _, rest = name.partition(" ")
    torch.manual_seed(0)
    checks = {"batch": batch, "pieces": pieces, "fp64": fp64, "decoder": decoder, "pool": pool}
    (checks | {"time": measure, "pooled": measure_pooled})[kind](rest)


def launch(name):
    """Run one line in a process of its own; return the last line that it printed, or why there is none."""
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    except subprocess.TimeoutExpired:
        return "HUNG"
    if done.returncode:
        return "FAILED " + (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
    return done.stdout.strip().splitlines()[-1]


def main():
    if "--one" in sys.argv:
        one(sys.argv[sys.argv.index("--one") + 1])
        return
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    bad = []
    for name in () if "--times" in sys.argv else CHECKS:
        said = launch(name)
        bad += [name] if any(word in said for word in ("BAD", "HUNG", "FAILED")) else []
        print(f"{name:28s} {said}", flush=True)
    print(f"{len(bad)} bad of {len(CHECKS)} checks: {bad}", flush=True)
    if "--check" in sys.argv:
        return
    found = {name: launch(name) for name in TIMES}
    for names in ([f"time {name}" for name in ROWS], [f"pooled {name}" for name in POOLED]):
        rows = {name: json.loads(found[name]) for name in names if found[name].startswith("{")}
        columns = [*next(iter(rows.values()), {})]
        print(f"{'':34s}" + "".join(f"{column:>16s}" for column in columns) + f"{'second/first':>14s}")
        for name in names:
            row = rows.get(name)
            if row is None:
                print(f"{name:34s} {found[name]}")
                continue
            first, second, *_ = row.values()
            cells = "".join(f"{row[column]:16.1f}" for column in columns)
            print(f"{name:34s}{cells}{second / first:14.3f}")


if __name__ == "__main__":
    main()
