"""Time the rule on the CPU beside Transformers' plain PyTorch functions: fp32, heads of 128 x 128.

There are 16 heads with a decay per head, and 4 with a decay per key channel (jobs named `kda`).

A provider is timed only if its outputs and gradients are within their limits on the inputs that are timed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import gdn
from gdn.testing import accuracy
from gdn.testing.cases import Case, Lengths
from gdn.testing.tensors import Inputs, inputs
from gdn_bench.providers import fallback
from gdn_bench.timing import measure

FALLBACK = "transformers"
CASE = Case(heads=(16, 16), sizes=(128, 128), use_qk_l2norm_in_kernel=True)
CHANNELS = replace(CASE, heads=(4, 4), gate="bounded", is_per_channel=True)


@dataclass(frozen=True)
class Job:
    """Describe a timed job: B rows of T tokens, the providers and the runs of each."""

    name: str
    T: int
    B: int
    providers: dict[str, accuracy.Provider]
    runs: dict[str, int]

    @property
    def title(self) -> str:
        """Return the name of its rows."""
        return f"{self.name} {self.B}x{self.T}"

    @property
    def with_backward(self) -> bool:
        """Return True for a job with gradients."""
        return self.name.endswith("forward+backward")

    @property
    def case(self) -> Case:
        """Return the problem."""
        is_step = self.name == "decode"
        base = CHANNELS if self.name.startswith("kda ") else CASE
        return replace(base, lengths=Lengths(self.T, self.B), state="wide" if is_step else "none")


def jobs(*, is_quick: bool = False) -> list[Job]:
    """Return the jobs of both providers, then those of gdn alone at growing lengths."""
    ours: dict[str, accuracy.Provider] = {"gdn": gdn.chunk_gated_delta_rule}
    chunks = {FALLBACK: fallback.chunk(), **ours}
    channels = {FALLBACK: fallback.chunk_channels(), **ours}
    steps: dict[str, accuracy.Provider] = {
        FALLBACK: fallback.recurrent(),
        "gdn": decode_in_place,
        "gdn recurrent": gdn.fused_recurrent_gated_delta_rule,
    }

    def runs(providers: dict[str, Any], count: int, of_fallback: int | None = None) -> dict[str, int]:
        count = max(3, count // 4) if is_quick else count
        return dict.fromkeys(providers, count) | ({FALLBACK: of_fallback} if of_fallback else {})

    selected = [
        Job("forward", 2048, 1, chunks, runs(chunks, 15)),
        Job("forward+backward", 2048, 1, chunks, runs(chunks, 9)),
        Job("kda forward", 2048, 1, channels, runs(channels, 15, of_fallback=3)),
        Job("kda forward+backward", 2048, 1, channels, runs(channels, 9, of_fallback=3)),
        *(Job("decode", 1, B, steps, runs(steps, 60)) for B in (1, 8)),
    ]
    if is_quick:
        return selected
    # the fallback's backward is quadratic in T: 20 s and more for one run at 8192
    selected.append(Job("forward+backward", 8192, 1, chunks, runs(chunks, 7, of_fallback=3)))
    selected += [Job("forward", T, 1, ours, runs(ours, 7)) for T in (4096, 8192, 16384)]
    selected += [Job("forward+backward", T, 1, ours, runs(ours, 5)) for T in (4096, 16384)]
    return selected


def run(job: Job) -> Iterator[dict[str, Any]]:
    """Yield a row per provider: its worst error over its limit, and its times if that is at most 1."""
    errors = {name: worst(provider, job) for name, provider in job.providers.items()}
    given = inputs(job.case, torch.float32)
    sound = {name: timed(job.providers[name], given, job) for name, error in errors.items() if error <= 1}
    cold = [FALLBACK] if job.T > 2048 else []
    burst = 20 if job.name == "decode" else 1
    seconds = measure.interleaved(sound, job.runs, cold=cold, burst=burst) if sound else {}
    for name, error in errors.items():
        (H, HV), (K, V) = job.case.heads, job.case.sizes
        row: dict[str, Any] = {
            "pass": "cpu", "case": job.title, "provider": name, "T": job.T, "N": job.B,
            "backend": None if name == FALLBACK else "eager", "H": H, "HV": HV, "K": K, "V": V,
            "dtype": "float32", "ok": error <= 1, "share_of_limit": round(error, 4),
        }  # fmt: skip
        if name in seconds:
            t = seconds[name]
            row |= {"ms": 1e3 * t.p50, "p20": 1e3 * t.p20, "p80": 1e3 * t.p80, "runs": t.runs}
            if FALLBACK in seconds and name != FALLBACK:
                row["ratio"] = {FALLBACK: seconds[FALLBACK].p50 / t.p50}
        yield row


def worst(provider: accuracy.Provider, job: Job) -> float:
    """Return the largest error over its limit, of all outputs of the job. The reference computes one head."""
    rows = accuracy.check(provider, job.case, torch.float32, with_backward=job.with_backward, budget=0)
    return max(row.error / row.limit for row in rows)


def timed(provider: accuracy.Provider, given: Inputs, job: Job) -> Callable[[], Any]:
    """Return the function to time: forward without autograd, or forward and backward through both outputs."""
    if job.with_backward:
        return lambda: accuracy.run(provider, given)
    q, k, v, g, beta = (given.tensors[name] for name in ("q", "k", "v", "g", "beta"))
    options = {**given.options, "initial_state": given.tensors.get("initial_state")}
    if provider is decode_in_place:
        pool = options["initial_state"].clone()
        return lambda: gdn.decode(q, k, v, pool, g=g, beta=beta, use_qk_l2norm_in_kernel=True)

    def forward() -> None:
        with torch.no_grad():
            provider(q, k, v, g=g, beta=beta, **options)

    return forward


def decode_in_place(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor, **_options: Any
) -> tuple[Tensor, Tensor]:
    """Run gdn.decode as a provider, on a copy of the state."""
    pool = initial_state.clone()
    return gdn.decode(q, k, v, pool, g=g, beta=beta, use_qk_l2norm_in_kernel=True), pool
