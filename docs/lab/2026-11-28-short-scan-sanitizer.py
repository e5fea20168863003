"""Run the Hopper scan of many short sequences under compute-sanitizer, and 300 times with equal bits.

    PYTHONPATH=src python docs/lab/2026-11-28-short-scan-sanitizer.py problems      (compiles)
    PYTHONPATH=src compute-sanitizer --tool racecheck --print-limit 9999 python ... problems
    PYTHONPATH=src python docs/lab/2026-11-28-short-scan-sanitizer.py reruns [COUNT]

problems: 170 sequences of 0 to 130 tokens and 4 value heads, so that a CTA of 132 takes several work items;
states [K, V] and [V, K], K = V = 128 and 64, and a bf16 pool in place. `count` of
2026-11-27-training-sanitizer.py prints the races of a log by kernel and pair of lines.
"""

import sys

import torch

import gdn
from gdn.backends.triton import launch

LENGTHS = torch.randint(0, 131, (170,), generator=torch.Generator().manual_seed(0))
FORMS = [
    (D, is_v_first, dtype) for D in (128, 64) for is_v_first in (False, True) for dtype in ("fp32", "bf16")
]


def make_call(D, is_v_first, dtype, lengths=LENGTHS):
    """Return a call that writes a copy of a pool, and returns o and the pool."""
    T, H, HV = int(lengths.sum()), 2, 4
    torch.manual_seed(0)
    new = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v = new(1, T, H, D), torch.nn.functional.normalize(new(1, T, H, D), dim=-1), new(1, T, HV, D)
    g = -torch.rand(1, T, HV, device="cuda") * 0.1
    beta = torch.rand(1, T, HV, device="cuda")
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).cuda()
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    pool = torch.randn(len(lengths), HV, D, D, device="cuda").to(kind)

    slots = torch.arange(len(lengths), device="cuda")

    def run():
        states = pool.clone()
        with torch.no_grad():
            o = gdn.prefill(
                q, k, v, states, g=g, beta=beta, cu_seqlens=cu, state_index=slots, state_v_first=is_v_first,
                backend="hopper",
            )  # fmt: skip
        return o, states

    return run


def problems():
    for form in FORMS:
        call = make_call(*form)
        with launch.record_launches([]) as launches:
            call()
        names = [getattr(one.kernel, "__name__", str(one.kernel)) for one, _ in launches]
        call()
        torch.cuda.synchronize()
        print(*form, *names, flush=True)


def reruns(count):
    for form in FORMS:
        call = make_call(*form)
        o, states = call()
        same = all(torch.equal(x, o) and torch.equal(y, states) for x, y in (call() for _ in range(count)))
        print(*form, f"{count} reruns:", "equal bits" if same else "OTHER BITS", flush=True)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    {"problems": problems, "reruns": lambda n="300": reruns(int(n))}[what](*rest)
