"""Run the Hopper backward under compute-sanitizer, and 1,000 times with equal bits.

    PYTHONPATH=src:tests python docs/lab/2026-11-27-training-sanitizer.py problems      (compiles)
    PYTHONPATH=src:tests compute-sanitizer --tool racecheck --print-limit 9999 python ... problems
    PYTHONPATH=src python docs/lab/2026-11-27-training-sanitizer.py reruns [COUNT]
    python docs/lab/2026-11-27-training-sanitizer.py count LOG

problems: 42 packed sequences of one to four chunks, 4 value heads: 168 work items of the scan and 170 of the
gradient kernel, so CTAs of 132 SMs take a second one. With one and two consumers, whole and in segments, at
K = V = 128 and 64. count: the races of a log by kernel and pair of lines.
"""

import re
import sys
from collections import Counter
from pathlib import Path

import torch

import gdn
from gdn.testing import Case, accuracy, inputs, packed

FULL = Case(
    "mild", lengths=packed(*[70] * 40, 200, 1), heads=(2, 4), sizes=(128, 128), state="wide",
    use_qk_l2norm_in_kernel=True, raw_gate="on", beta="negative", state_v_first=True,
)  # fmt: skip


def rule(*args, **options):
    return gdn.chunk_gated_delta_rule(*args, **{**options, "backend": "hopper"})


def problems():
    from dataclasses import replace

    from gdn.backends.hopper.backward import plan
    from gdn.backends.hopper.backward.cost import Segmentation
    from gdn.backends.hopper.cost import Cut

    for D in (128, 64):
        given = inputs(replace(FULL, sizes=(D, D)), torch.bfloat16, device="cuda")
        for consumers in (1, 2)[: D // 64]:
            for cut in (None, Cut(1, 2, 1)):
                found = None if cut is None else Segmentation(cut, consumers, consumers)
                plan.schedule_of = lambda p, c=consumers, s=found: (c, s)
                accuracy.run(rule, given)
                torch.cuda.synchronize()
                print(D, consumers, cut, flush=True)


def reruns(count=1000):
    def tensors(H, HV, T, B=1, K=128):
        torch.manual_seed(0)
        q, k = torch.randn(2, B, T, H, K, device="cuda", dtype=torch.bfloat16)
        v = torch.randn(B, T, HV, K, device="cuda", dtype=torch.bfloat16)
        a, b = torch.randn(2, B, T, HV, device="cuda", dtype=torch.bfloat16)
        return [x.requires_grad_() for x in (q, k, v, a, b)]

    own = {
        "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    ends = torch.tensor([0, 70, 70, 3000, 3001, 20000, 32768], device="cuda")
    sizes = {
        "2/8 1x32768": ((2, 8, 32768), {}),
        "16/32 1x8192": ((16, 32, 8192), {}),
        "16/32 8x4096": ((16, 32, 4096, 8), {}),
        "16/32 8x4096, recompute": ((16, 32, 4096, 8), {"recompute": True}),
        "16/32 6 packed in 32768": ((16, 32, 32768), {"cu_seqlens": ends}),
        "4/8 1x8192, K = V = 64": ((4, 8, 8192, 1, 64), {"backend": "hopper"}),
    }
    for name, (size, options) in sizes.items():
        leaves = tensors(*size)
        HV = size[1]
        gates = {"A_log": torch.zeros(HV, device="cuda"), "dt_bias": torch.ones(HV, device="cuda")}
        gates = {n: x.requires_grad_() for n, x in gates.items()}
        do, dstate = torch.randn_like(leaves[2]), None

        def step(leaves=leaves, gates=gates, options=options, do=do):
            nonlocal dstate
            outputs = gdn.chunk_gated_delta_rule(*leaves, **gates, **own, **options, output_final_state=True)
            dstate = torch.ones_like(outputs[1]) if dstate is None else dstate
            found = torch.autograd.grad(outputs, [*leaves, *gates.values()], [do, dstate])
            return [*(x.detach() for x in outputs), *found]

        first = step()
        differ = torch.zeros((), device="cuda", dtype=torch.int64)
        for _ in range(count):
            for x, y in zip(first, step(), strict=True):
                # NaN would differ from itself
                differ += (x != y).any()
        explained = gdn.explain(*leaves, **gates, **own, **options)
        print(name, explained.backward, f"{count} reruns, {int(differ)} differ", flush=True)


def count(log):
    text = Path(log).read_text(errors="replace")
    found = Counter()
    for block in re.split(r"=========\s*\n", text):
        if "Race reported" in block or "Invalid" in block:
            where = re.findall(r"in ([\w./<>-]*:?\w+)|at .*?(\w+_kernel\w*).*?in (\S+:\d+)", block)
            lines = re.findall(r"(\w+\.py:\d+)", block)
            kernel = re.findall(r"(\w*kernel\w*)", block)
            found[(kernel[:1] or where[:1] or [""])[0][:40], tuple(dict.fromkeys(lines))[:4]] += 1
    for key, n in found.most_common(40):
        print(n, *key)
    print(*re.findall(r"=+ \w+ SUMMARY.*", text), sep="\n")


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    {"problems": problems, "reruns": lambda n="1000": reruns(int(n)), "count": count}[what](*rest)
