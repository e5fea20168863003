"""Workloads: a job (prefill, pool, train, decode) on a problem, and the least bytes and flop it takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gdn.testing.cases import Case
from gdn_bench.problems import catalog

CHUNK = 64  # tokens per chunk in the count of operations


@dataclass(frozen=True)
class Cost:
    """Count the least work of any implementation: bytes moved in HBM, flop of MMAs."""

    bytes: float
    flop: float


@dataclass(frozen=True)
class Workload:
    """A job on a problem. job: prefill, train, decode, pool, int16; spec and step have costs of their own."""

    job: str
    name: str
    case: Case

    @property
    def cost(self) -> Cost:
        """Return the least bytes and flop of the job."""
        (H, HV), (K, V), L = self.case.heads, self.case.sizes, self.case.lengths
        state = L.N * HV * K * V
        if self.job == "decode":
            # a state read and written
            return Cost(2 * state * (4 if self.case.state == "wide" else 2), 0)
        if self.job == "int16":
            # the same with the scales, four bytes for each column
            return Cost(2 * (2 * state + 4 * state // K), 0)
        # per token and value head: v, o in two bytes, g and beta in four or two; q and k once per key head
        tokens, group = L.B * L.T * HV, HV / H
        gates = (2 if self.case.has_narrow_gates else 4) * (1 + (K if self.case.is_per_channel else 1))
        forward = Cost(
            tokens * (4 * V + gates + 4 * K / group) + 8 * state, tokens * (4 * CHUNK * (K + V) + 6 * K * V)
        )
        if self.job in ("prefill", "pool"):
            return forward
        # v, do, dv; g, beta and their gradients; A_inv; q, k, dq, dk; the state, its gradient, and dh0
        backward = tokens * (6 * V + 2 * gates + 2 * CHUNK + 8 * K / group) + 12 * state
        return Cost(forward.bytes + backward, 4 * forward.flop)

    def with_variant(self, name: str) -> "Workload":
        """Return the same shape with the gates or options of a variant."""
        job = name if name in ("pool", "int16") else self.job
        return replace(self, job=job, case=replace(self.case, **catalog.VARIANTS[name]))  # type: ignore[arg-type]


def choose_workloads(job: str, names: Sequence[str]) -> list[Workload]:
    """Return the workloads of a job on problems by name."""
    return [Workload(job, name, catalog.case(name)) for name in names]


PREFILL = tuple(choose_workloads("prefill", catalog.TABLE))
TRAIN = tuple(choose_workloads("train", catalog.TRAIN))
DECODE = tuple(
    Workload("decode", f"B={B} {dtype}", catalog.step(B, state=state))
    for B in catalog.BATCHES
    for dtype, state in (("fp32", "wide"), ("bf16", "narrow"))
)
WORKLOADS = {"prefill": PREFILL, "train": TRAIN, "decode": DECODE}
