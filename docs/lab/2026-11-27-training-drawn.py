"""Draw training problems with a decay per head on the Hopper backward, and compare all gradients with fp64.

    PYTHONPATH=src:tests python docs/lab/2026-11-27-training-drawn.py run INDEX COUNT TOTAL SECONDS OUT
    PYTHONPATH=src:tests python docs/lab/2026-11-27-training-drawn.py table OUT...

Process INDEX of COUNT draws its share of TOTAL problems for at most SECONDS, of two sets of sizes and
options, after the forward of `hopper` or `triton`, with one or two consumers, whole or cut into segments. It
writes a line of JSON for each: per gradient the error, Triton's error, the limit, and the size. The sums over
tokens (dA_log, ddt_bias) are relative to the larger one of the sum and dg. The reference runs on the GPU in
fp64.
"""

import json
import random
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from test_hopper_backward import NAMES
from test_hopper_gpu import draw_kind, draw_problem
from test_hopper_training import FORWARDS, SUMS, TINY, reference_gradients

from gdn.backends.hopper.backward import plan
from gdn.backends.hopper.backward.cost import Segmentation
from gdn.backends.hopper.cost import Cut
from gdn.backends.triton.rule import run as chunked
from gdn.problem import parse
from gdn.testing import accuracy, inputs
from gdn.testing.cases import is_contradiction

KINDS = 2


def draw(index, number, total):
    """Yield the problems of a kind: case, forward, sizes, schedule."""
    kind = replace(
        draw_kind(random.Random(f"kind {index} {number}")), sizes=((128, 128), (64, 64))[(index + number) % 2]
    )
    for n in range(total):
        source = random.Random(f"problem {index} {number} {n}")
        while True:
            case, cut = draw_problem(source, kind)
            if case.cost <= 2**26 and not is_contradiction(vars(case)):
                break
        if cut is not None:
            cut = source.choice((Cut(1, 2, 1), Cut(2, 1, 1), Cut(3, 2, 1)))
        consumers = 1 if kind.sizes[1] == 64 else source.choice((1, 2))
        yield n, source, case, cut, consumers


def measure(index, number, n, source, case, cut, consumers):
    cut = None if cut is None else Segmentation(cut, consumers, consumers)
    plan.schedule_of = lambda p: (consumers, cut)
    plan.consumers_of = lambda p: consumers
    seed = 1000000 * index + 10000 * number + n
    given = inputs(case, torch.bfloat16, device="cuda", seed=seed)
    do, dfinal = source.choice(
        ((given.do, given.dfinal_state),) * 3 + ((given.do, None), (None, given.dfinal_state))
    )
    forward = source.choice(("hopper", "hopper", "triton"))
    row = {
        "case": str(case),
        "seed": seed,
        "forward": forward,
        "cut": str(cut),
        "consumers": consumers,
        "v": {},
    }
    problem = parse(**given.tensors, **given.options, backend=forward)
    saved = FORWARDS[forward](problem, True)[2]
    here = plan.chunk_backward(problem, saved, do, dfinal)
    triton = chunked.chunk_backward(problem, saved, do, dfinal)
    expected = reference_gradients(given, do, dfinal)
    limits = accuracy.error_limits(torch.bfloat16, case.keys)
    terms = expected[NAMES.index("g")]
    for name, x, y, z in zip(NAMES, here, triton, expected, strict=True):
        if x is None or z is None:
            continue
        norm = z.double().norm()
        if name in SUMS:
            norm = max(norm, terms.double().norm())
        # what is zero in exact arithmetic has no relative error
        if norm <= TINY:
            row["v"][name] = [
                float(x.double().norm()),
                float(y.double().norm()),
                limits[accuracy.GRADIENTS[name]],
                0,
            ]
            continue
        e, t = (((w.double() - z).norm() / norm).item() for w in (x, y))
        row["v"][name] = [e, t, limits[accuracy.GRADIENTS[name]], z.numel()]
    return row


def run(index, count, total, seconds, out):
    deadline = time.time() + seconds
    share = -(-total // (count * KINDS))
    with open(out, "w") as file:
        for number in range(KINDS):
            for problem in draw(index, number, share):
                if time.time() > deadline:
                    return
                try:
                    row = measure(index, number, *problem)
                except Exception as e:
                    row = {"case": str(problem[2]), "failed": f"{type(e).__name__} {str(e)[:300]}", "v": {}}
                file.write(json.dumps(row) + "\n")
                file.flush()


def table(files):
    rows = [json.loads(line) for name in files for line in Path(name).read_text().splitlines()]
    cut = sum(r.get("cut", "None") != "None" for r in rows)
    narrow = sum("64/64" in r["case"] for r in rows)
    failed = [r for r in rows if "failed" in r]
    print(f"{len(rows)} problems, {cut} cut, {narrow} of K = V = 64, {len(failed)} raised {failed[:2]}")
    print("gradient, problems, above the limit, also above 1.6 x Triton's, median and p99 of error / limit")
    for name in NAMES:
        found = [(r["v"][name], r) for r in rows if name in r["v"]]
        if not found:
            continue
        ratios = sorted(e / limit if size else 0.0 for (e, _, limit, size), _ in found)
        above = [(v, r) for v, r in found if v[3] and not v[0] <= v[2]]
        worse = [(v, r) for v, r in above if not v[0] <= 1.6 * v[1]]
        most = ratios[int(0.99 * len(ratios))]
        print(f"d{name:16}{len(found):6}{len(above):6}{len(worse):6}{median(ratios):8.2f}{most:8.2f}")
        for v, r in worse[:4]:
            print("   ", [float(f"{x:.3g}") for x in v], r["case"], r["cut"], r["forward"], r["seed"])


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if sys.argv[1] == "run":
        run(*(int(x) for x in sys.argv[2:6]), sys.argv[6])
    else:
        table(sys.argv[2:])
