"""Measure what one persistent CTA that alternates `solve` and the state scan could gain, without building it.

    PYTHONPATH=src python docs/lab/2026-11-28-persistent-cta-bounds.py [part of a row's name]        (sm_90)

Such a CTA (A') solves the next 8 tiles of its own work in 8 consumer warps, then scans them. Per row, dense:

    forward     the whole forward as it is
    solve, scan     each launch alone; `2 stages`: `short_scan_kernel`, whose shared memory A' would need
    from L2     that scan, where every row reads A_inv, factors and k of row 0: they stay in L2
    8 a SM      `solve` with 8 one-warp CTAs an SM (by shared memory), us of a round of 8 tiles: steady (slope
                over rounds, k from HBM) and cold (one round less an empty launch, k from L2). A' assumes
                5.6; 7 falsifies it. Where a CTA has fewer tiles in all, rounds of as many.

    A' = gates + scan from L2 + phases x (round of `solve` + 2.1 us to park S and refill), at least the bytes
    that A' needs at 3.61 TB/s + 6 us;   phases = ceil(tiles of the CTA with most / 8).

Printed for the steady round and for the cold one, beside the forward and FlashInfer's recorded time. Results
of the scan from L2 mean nothing. All times: us, CUDA graphs, launches without PDL but for `forward`, medians.
DRY=1: on a CPU, plans and arguments alone.
"""

import copy
import os
import statistics
import sys
import time

import torch

import gdn
from gdn.backends.hopper import rule
from gdn.backends.hopper.descriptors import align
from gdn.backends.triton.launch import PlanCache, allocate
from gdn.problem import parse

DRY = "DRY" in os.environ
DEVICE = "cpu" if DRY else "cuda"
SMS, D, C = 132, 128, 64
PARK = 2.1  # us: S to shared memory and back, the stages drained and filled again; assumed, not measured
COPY = 3.61e6  # bytes per us: 85 % of the copy rate
ROWS = {  # key heads, value heads, sequences, tokens, FlashInfer's us on an H200, recorded
    "8x1024": (16, 32, 8, 1024, 112.0),
    "16x64": (16, 32, 16, 64, 44.1),
    "64x128": (16, 32, 64, 128, 193.0),
    "16x16384": (16, 16, 16, 16384, 1810.0),
    "4x8192": (16, 32, 4, 8192, 403.0),
}


def drawn(H, HV, N, T):
    """Return the tensors of a dense forward."""
    torch.manual_seed(0)

    def rand(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device=DEVICE, dtype=dtype)

    q, k = (torch.nn.functional.normalize(rand(N, T, H, D), dim=-1) for _ in range(2))
    g = torch.nn.functional.logsigmoid(rand(N, T, HV, dtype=torch.float32)) / 16
    beta = rand(N, T, HV, dtype=torch.float32).sigmoid()
    state = rand(N, HV, D, D, dtype=torch.float32)
    return {"q": q, "k": k, "v": rand(N, T, HV, D), "g": g, "beta": beta, "initial_state": state}


def graph_time(run, count):
    """Return the us of one of the `count` calls in run(), by a CUDA graph: median of seven."""
    if DRY:
        run()
        return 1.0
    run()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        run()
    for _ in range(8):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / count)
    return statistics.median(times[1:])


class Kernel:
    """Launch a compiled kernel without PDL, with another grid, other scalars, or more shared memory."""

    def __init__(self, launch, given):
        self.launch, self.given = launch, given
        if not DRY:
            self.run = copy.copy(launch._compiled.run)
            self.run.launch_pdl = False

    def scalars_with(self, name, value):
        """Return the launch's scalars with another value of one."""
        scalars = list(self.launch.scalars)
        scalars[self.launch.kernel.arg_names.index(name) - len(self.given)] = value
        return tuple(scalars)

    def __call__(self, grid=None, scalars=None, shared=0, changed=None):
        scalars = self.launch.scalars if scalars is None else scalars
        given = list(self.given)
        for i, x in (changed or {}).items():
            given[i] = x
        assert len(given) + len(scalars) + len(self.launch.constants) == len(self.launch.kernel.arg_names)
        if DRY:
            return
        first = self.launch.num_descriptors
        pointers = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given[first:]]
        arguments = (*given[:first], *pointers, *scalars, *(None for _ in self.launch.constants))
        compiled, stream = self.launch._compiled, torch._C._cuda_getCurrentRawStream(0)
        warps, ctas, own = compiled.packed_metadata
        metadata = (warps, ctas, max(own, shared))
        self.run(
            grid or self.launch.grid, 1, 1, stream, compiled.function, metadata, None, None, None, *arguments
        )


def kernels_of(p, is_short):
    """Plan a forward, run it once, and return its plan and its launches by name."""
    rule.moves_states, rule._forwards = (lambda *_: is_short), PlanCache()
    plan = rule.plan_of(p, None)
    assert plan.segments is None and plan.is_short == is_short
    new = allocate(p.device, plan.specs)
    steps = list(plan.steps(p, new))
    if not DRY:
        for launch, given in steps:
            launch(*given)
        torch.cuda.synchronize()
    names = {id(plan.table): "table", id(plan.gates): "gates", id(plan.solve): "solve", id(plan.scan): "scan"}
    return {names[id(launch)]: Kernel(launch, given) for launch, given in steps}, new


def scan_time(kernel, k_d=None):
    """Return the us of the scan alone; with a descriptor of k, all rows read A_inv and factors of row 0."""
    count = 3
    counters = torch.zeros(count, 4, dtype=torch.int32, device=DEVICE)
    scalars, changed = None, {}
    if k_d is not None:
        # the first chunk of every sequence is chunk 0
        scalars, changed = kernel.scalars_with("chunks_per_row", 0), {1: k_d}
    at = len(kernel.given) - 1  # the counter is the last tensor

    def run():
        counters.zero_()
        for i in range(count):
            kernel(scalars=scalars, changed={**changed, at: counters[i]})

    return graph_time(run, count)


def solve_rounds(kernel, tiles, a_sm):
    """Return us of a steady and of a cold round of `a_sm` tiles an SM: one-warp CTAs, limited in number."""
    # of 228 KiB an SM a CTA takes 1 KiB more than it asks for; the grid alone limits one and two
    shared = {1: 48_000, 2: 48_000, 4: 48_000, 8: 27_000, 12: 0}[a_sm]
    grid = SMS * a_sm

    def timed(rounds):
        scalars = kernel.scalars_with("count", grid * rounds)

        def run():
            for _ in range(3):
                kernel(grid=grid, scalars=scalars, shared=shared)

        return graph_time(run, 3)

    most = max(1, min(8, tiles // grid))
    one = timed(1) if grid <= tiles else float("nan")
    steady = (timed(most) - one) / (most - 1) if most > 1 else float("nan")
    return steady, one


def empty_launch():
    """Return the us of a launch that does next to nothing, in a graph."""
    x = torch.zeros(1, device=DEVICE)

    def run():
        for _ in range(20):
            x.add_(1.0)

    return graph_time(run, 20)


def forward_time(given):
    """Return the us of a forward, with PDL."""

    def run():
        for _ in range(3):
            gdn.chunk_gated_delta_rule(**given, output_final_state=True, backend="hopper")

    return 1.0 if DRY else graph_time(run, 3)


def main():
    began, lines, detail, rounds = time.time(), [], [], {}
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    # only what is launched
    rule.compile_ahead = lambda *_: None
    floor = empty_launch()
    chosen = rule.moves_states
    for name, (H, HV, N, T, peer) in ROWS.items():
        if part not in name:
            continue
        if DRY:
            T = min(T, 256)
        given = drawn(H, HV, N, T)
        rule.moves_states, rule._forwards = chosen, PlanCache()
        forward = forward_time(given)
        p = align(parse(**given, output_final_state=True, backend="hopper"))
        is_short = chosen(p, None, None, None)
        own, new = kernels_of(p, is_short)
        short, others = (own, new) if is_short else kernels_of(p, True)
        solve = own["solve"]
        gates = graph_time(lambda own=own: [own["gates"]() for _ in range(3)], 3) if "gates" in own else 0.0
        alone = graph_time(lambda solve=solve: [solve() for _ in range(3)], 3)
        # k of row n is k of row 0 from token n on: next to no bytes more, and no stride of 0
        k_d = copy.copy(short["scan"].given[1])
        k_d.strides = [k_d.strides[1], *k_d.strides[1:]]
        scans = [scan_time(own["scan"]), scan_time(short["scan"]), scan_time(short["scan"], k_d)]
        tiles = N * HV * -(-T // C)
        table = {a_sm: solve_rounds(solve, tiles, a_sm) for a_sm in (1, 2, 4, 8, 12)}
        detail.append(
            f"{name:9s} " + "  ".join(f"{a}: {x:5.2f} {y - floor:5.2f}" for a, (x, y) in table.items())
        )
        items = -(-N * HV // SMS)
        most = items * -(-T // C)
        phases = -(-most // 8)
        # fewer than 8 tiles in all: as many warps as there are tiles
        fewest = next(a for a in (1, 2, 4, 8) if a >= min(8, most))
        # 16x64 has too few tiles to measure a round
        rounds = rounds or table
        steady, cold = table[fewest] if table[fewest][0] == table[fewest][0] else rounds[fewest]
        tokens = N * T
        needed = 2 * (2 * tokens * H * D + 2 * tokens * HV * D) + 6 * tokens * HV + 8 * N * HV * D * D
        least = needed / COPY + 6.0
        models = [max(least, gates + scans[2] + phases * (x + PARK)) for x in (5.6, steady, cold - floor)]
        lines.append(
            f"{name:9s} {forward:7.1f} {gates:5.1f} {alone:7.1f} "
            + " ".join(f"{x:8.1f}" for x in scans)
            + f" {steady:7.2f} {cold - floor:6.2f} {phases:4d} {least:7.1f} "
            + " ".join(f"{x:7.1f}" for x in models)
            + f" {peer:7.1f} {peer / forward:6.2f} "
            + " ".join(f"{peer / x:5.2f}" for x in models)
        )
        print(f"[{time.time() - began:.0f} s] {name}", flush=True)
        if not DRY and not all(bool(x.isfinite().all()) for x in others[3]):
            print("   o of the scan from L2 is not finite: the clock may differ", flush=True)
        del given, p, own, short, solve, new, others, k_d
        if not DRY:
            torch.cuda.empty_cache()
    print(f"\nempty launch {floor:.2f} us. us of a round of `solve`, by CTAs an SM: steady, cold")
    print("\n".join(detail))
    print("\nrow       forward gates   solve     scan 2 stages  from L2 |8 a SM   cold phases  bytes |"
          "A' 5.6  steady    cold | peer  peer/now, peer/A' with 5.6, steady, cold")  # fmt: skip
    print("\n".join(lines))


if __name__ == "__main__":
    main()
