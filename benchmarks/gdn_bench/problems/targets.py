"""What is timed on a GPU, as data: the problems, what peers took for them when the goals were set, the goals.

Times are milliseconds on one NVIDIA H200, bf16, K = V = 128, states in and out, 2026-11-21. Machines differ:
what counts is a ratio within one run, so a goal moves with the best peer of the day it was set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from gdn.testing.cases import Case
from gdn_bench.problems import catalog
from gdn_bench.problems.catalog import VARIANTS

CHUNK = 64  # tokens per chunk in the count of operations


@dataclass(frozen=True)
class Cost:
    """The least that any implementation must do: bytes moved, operations on matrix units."""

    bytes: float
    flop: float


@dataclass(frozen=True)
class Target:
    """A problem to time. `then`: milliseconds of each peer when `goal` and `moonshot` were set."""

    job: str  # prefill, train, decode
    name: str
    case: Case
    goal: float | None
    moonshot: float | None
    then: Mapping[str, float] = field(hash=False)

    @property
    def cost(self) -> Cost:
        (H, HV), (K, V), L = self.case.heads, self.case.sizes, self.case.lengths
        state = L.N * HV * K * V
        if self.job == "decode":
            # a state read and written
            return Cost(2 * state * (4 if self.case.state == "wide" else 2), 0)
        # per token and value head: v, o in two bytes, g and beta in four; q and k once per key head
        tokens, group = L.B * L.T * HV, HV / H
        forward = Cost(
            tokens * (4 * V + 8 + 4 * K / group) + 8 * state, tokens * (4 * CHUNK * (K + V) + 6 * K * V)
        )
        if self.job == "prefill":
            return forward
        # v, do, dv; g, beta and their gradients; A_inv; q, k, dq, dk; the state, its gradient, and dh0
        backward = tokens * (6 * V + 16 + 2 * CHUNK + 8 * K / group) + 12 * state
        return Cost(forward.bytes + backward, 4 * forward.flop)

    def scale(self, times: Mapping[str, float]) -> float:
        """What a goal is multiplied by: the best peer timed then and now, its milliseconds now over then."""
        both = sorted((self.then[name], name) for name in self.then if name in times)
        return times[both[0][1]] / both[0][0] if both else 1.0

    def variant(self, name: str) -> "Target":
        """The same shape under other gates or options, for which no goal was set."""
        changed = replace(self.case, **VARIANTS[name])  # type: ignore[arg-type]
        return replace(self, case=changed, goal=None, moonshot=None, then=MappingProxyType({}))


def _prompt(
    job: str, name: str, goal: float, moonshot: float, fla: float, flash_qla: float,
    flashinfer: float | None = None,
) -> Target:  # fmt: skip
    then = {"fla": fla, "flash_qla": flash_qla} | ({} if flashinfer is None else {"flashinfer": flashinfer})
    return Target(job, name, catalog.case(name), goal, moonshot, MappingProxyType(then))


def _step(B: int, fla: float, wide: float, narrow: float, goal: float, narrow_goal: float) -> list[Target]:
    """One token for B rows, in microseconds, on pools in fp32 and in bf16."""
    rows = (
        ("fp32", "wide", goal, {"fla": fla, "flashinfer": wide}),
        ("bf16", "narrow", narrow_goal, {"flashinfer": narrow}),
    )
    return [
        Target(
            "decode", f"B={B} {dtype}", catalog.step(B, state=state), wanted / 1e3, wanted / 1e3,
            MappingProxyType({name: us / 1e3 for name, us in then.items()}),
        )
        for dtype, state, wanted, then in rows
    ]  # fmt: skip


def packet_goal(way: str, B: int, T: int) -> float | None:
    """Of the time of one token with its state written, what T tokens may take, verified in a way."""
    if way == "states" and T == 4:
        return 2.6
    if way != "replay" or T not in (4, 16):
        return None
    if B == 1:
        return 1.3
    return {4: 0.75, 16: 0.9}[T] if B >= 64 else None


def chosen(job: str, names: Sequence[str]) -> list[Target]:
    """The targets of a job by the names of their problems; those without a goal have none."""
    known = {target.name: target for target in TARGETS[job]}
    return [
        known.get(name) or Target(job, name, catalog.case(name), None, None, MappingProxyType({}))
        for name in names
    ]


PREFILL = (
    _prompt("prefill", "2/8 1x32768", 0.17, 0.11, 0.921, 0.395, 0.238),
    _prompt("prefill", "2/8 1x8192", 0.075, 0.05, 0.238, 0.164, 0.114),
    _prompt("prefill", "2/8 8x4096", 0.17, 0.11, 0.484, 0.202, 0.301),
    _prompt("prefill", "16/64 1x32768", 1.05, 0.75, 3.449, 1.536, 1.411),
    _prompt("prefill", "16/64 4x8192", 0.68, 0.58, 3.474, 1.232, 0.728),
    _prompt("prefill", "16/32 1x32768", 0.55, 0.40, 1.937, 1.248, 0.753),
    _prompt("prefill", "16/32 1x8192", 0.16, 0.11, 0.517, 0.305, 0.234),
    _prompt("prefill", "16/32 4x8192", 0.35, 0.29, 1.941, 0.633, 0.371),
    _prompt("prefill", "16/32 8x4096", 0.35, 0.29, 1.965, 0.633, 0.378),
    _prompt("prefill", "16/32 8x1024", 0.105, 0.085, 0.533, 0.189, 0.114),
    _prompt("prefill", "16/32 1x2048", 0.06, 0.04, 0.136, 0.087, 0.104),
    _prompt("prefill", "16/16 16x16384", 1.40, 1.2, 6.996, 2.551, 1.513),
)
TRAIN = (
    _prompt("train", "16/32 1x8192", 0.75, 0.5, 2.06, 1.01),
    _prompt("train", "16/32 1x32768", 2.5, 1.8, 8.25, 3.61),
    _prompt("train", "16/32 8x4096", 1.9, 1.4, 8.32, 2.58),
)
_STEPS = (
    (3.7, 5.2, 4.0, 3.5, 3.3),
    (13.4, 12.2, 8.1, 9.5, 6.5),
    (49.5, 37.0, 22.1, 33, 18),
    (95.2, 69.3, 40.6, 65, 34),
    (187, 133.9, 76.1, 129, 67),
    (368, 263.3, 146.2, 258, 131),
)
DECODE = tuple(target for B, us in zip(catalog.BATCHES, _STEPS, strict=True) for target in _step(B, *us))
TARGETS = {"prefill": PREFILL, "train": TRAIN, "decode": DECODE}
# host microseconds of one eager call: goal, moonshot
HOST = {"decode": (25, 15), "forward": (120, 50), "forward+backward": (450, 150)}
# seconds of the first call in a new process with empty caches
COLD = {"forward": 5.0, "backward": 8.0}
