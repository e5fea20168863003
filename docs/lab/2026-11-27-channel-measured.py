"""Draw problems with a decay per key channel, gradients included, on a GPU.

    PYTHONPATH=src python docs/lab/2026-11-27-channel-measured.py INDEX COUNT TOTAL SECONDS OUT

Process INDEX of COUNT draws its share of TOTAL problems for at most SECONDS, of three sets of sizes, dtype
and options, and writes a line of JSON for each: per output the error, its limit, the largest error, and the
norm and size of the reference. The reference runs on the CPU, and the kernels of all processes on one GPU.
"""

import json
import random
import sys
import time
import warnings
from dataclasses import replace
from functools import partial

import torch

import gdn
from gdn.testing import Case, inputs, packed, rows
from gdn.testing.accuracy import (
    Expected,
    error_limits,
    measure_error,
    pair_outputs,
    reference_by_heads,
    run,
    run_poisoned,
)
from gdn.testing.cases import CHANNEL_GATES, is_contradiction

warnings.filterwarnings("ignore")
index, count, total, seconds = (int(x) for x in sys.argv[1:5])
deadline, device = time.time() + seconds, "cuda"
torch.set_num_threads(1)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# what a kind's kernels are compiled for
SHAPES = [
    ((128, 128), BF16), ((64, 64), BF16), ((128, 128), FP16), ((128, 64), BF16), ((60, 20), FP32),
    ((64, 64), FP16), ((128, 128), BF16), ((100, 64), BF16), ((32, 32), BF16), ((128, 128), BF16),
    ((64, 64), FP32), ((256, 64), BF16),
]  # fmt: skip
KINDS = 3


def draw_kind(source, number):
    pick = source.choice
    sizes, dtype = SHAPES[(index + number * 5) % len(SHAPES)]
    raw = pick(("off", "off", "on", "no_bias", "lower_bound", "lower_bound", "bound_alone"))
    return Case(
        is_per_channel=True,
        sizes=sizes,
        raw_gate=raw,
        lengths=pick((packed(1), rows(1))),
        state=pick(("none", "wide", "wide", "narrow")),
        beta=pick(("given", "sigmoid", "negative", "absent")),
        use_qk_l2norm_in_kernel=pick((False, True)),
        state_v_first=pick((False, True)),
        has_narrow_gates=pick((False, False, True)),
        batch_invariant=pick((False, False, True)),
    ), dtype


def draw_problem(source, kind):
    pick, wide = source.choice, kind.sizes[0] * kind.sizes[1] > 4096
    H = source.randint(1, 1 if wide else 2)
    top = 100 if wide else 140
    lengths = rows(source.randint(1, top))._replace(B=pick((1, 2)))
    if kind.lengths.ends is not None:
        some = [
            pick((0, 1, 15, 16, 17, 63, 64, 65, source.randint(1, top))) for _ in range(source.randint(1, 3))
        ]
        lengths = packed(1, *some, tail=pick((0, 20)))
    while True:
        case = replace(
            kind,
            heads=(H, H * pick((1, 2) if wide else (1, 2, 3))),
            lengths=lengths,
            gate=pick(CHANNEL_GATES),
            keys=pick(("random", "random", "correlated", "identical", "negative")),
            is_scaled=pick((False, True)),
            is_strided=pick((False, True)),
        )
        if case.gate == "absent" and case.raw_gate != "off":
            continue
        if not is_contradiction({n: getattr(case, n) for n in ("gate", "raw_gate", "keys", "beta", "state")}):
            return case


def floor(calm, name):
    """Return 1e-6 of the norm of an output without decay."""
    return 1e-6 * float(run(reference_by_heads, calm())[name].double().norm())


def main():
    per_kind = -(-total // (count * KINDS))
    rule = lambda *a, **o: gdn.chunk_kda(*a, backend="triton", **o)  # noqa: E731
    with open(sys.argv[5], "w") as file:
        for number in range(KINDS):
            kind, dtype = draw_kind(random.Random(1000 * index + number), number)
            for n in range(per_kind):
                if time.time() > deadline:
                    return
                seed = 1000000 * index + 10000 * number + n
                case = draw_problem(random.Random(seed), kind)
                row = {"case": str(case), "seed": seed, "dtype": str(dtype), "v": {}}
                try:
                    # drawn on the CPU, so that the reference runs there while other processes have the GPU
                    given = inputs(case, dtype, seed=seed)
                    there = inputs(case, dtype, seed=seed, device=device)
                    found = {x: y.cpu() for x, y in run_poisoned(rule, there).items()}
                    calm = inputs(replace(case, gate="none"), dtype, seed=seed).double
                    heads = list(range(case.heads[0]))
                    expected = Expected(
                        given, heads, run(reference_by_heads, given.double()), partial(floor, calm)
                    )
                    limits = error_limits(dtype, case.keys)
                    for name, x, ref in pair_outputs(found, expected):
                        e, m = (float("inf"),) * 2
                        if x is not None:
                            e, m = measure_error(x, ref, limits[name], partial(expected.floor, name))
                        row["v"][name] = [e, limits[name], m, float(ref.norm()), ref.numel()]
                except Exception as e:
                    row["failed"] = f"{type(e).__name__} {str(e)[:200]}"
                file.write(json.dumps(row) + "\n")
                file.flush()


main()
