"""Problems as data: a `Case` is one choice per factor; `covering` chooses few cases that have every pair."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple


class Lengths(NamedTuple):
    """Describe a batch: B rows of T tokens, or in one row the sequences ends[n] : ends[n + 1]."""

    T: int
    B: int = 1
    ends: tuple[int, ...] | None = None

    @property
    def N(self) -> int:
        """Return the number of sequences."""
        return self.B if self.ends is None else len(self.ends) - 1


def rows(T: int) -> Lengths:
    """Return two rows of T tokens, or one row where T > 129."""
    return Lengths(T, 2 if T <= 129 else 1)


def packed(*lengths: int, tail: int = 0) -> Lengths:
    """Return sequences of these lengths packed in one row, and `tail` tokens after them that belong to none.

    >>> packed(2, 0, 3).ends
    (0, 2, 2, 5)
    """
    ends = (0, *itertools.accumulate(lengths))
    return Lengths(ends[-1] + tail, 1, ends)


GATES = ("strong", "mild", "slow", "none", "absent", "reset", "model")  # absent: g=None
# of a decay per key channel only: a rate for each channel, up to thousands of nats a token, halves of the
# channels that take turns to decay, and between -5 and 0
CHANNEL_GATES = (*GATES, "rates", "wild", "turns", "bounded")
# "mixed", the gates of the benchmarks, is not among them: every fourth head is 'none', the others 'mild'
KEYS = ("random", "correlated", "identical", "negative")
SINGLE = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 447, 512, 640, 1000, 1920, 4096)
LONG_LADDER = packed(1, 63, 64, 65, 127, 128, 129, 447, 512, 640, 1920)
SHORT_LADDER = packed(1, 17, 31, 32, 33, 95, 127, 128, 129, 191, 192, 193, 367)
EMPTY = packed(0, 5, 0, 0, 64, 130, 0)
TAIL = packed(70, 0, 33, tail=29)
LENGTHS = (*(rows(T) for T in SINGLE), LONG_LADDER, SHORT_LADDER, EMPTY, TAIL)
HEADS = ((2, 2), (2, 4), (2, 6), (1, 4), (1, 8))  # H, HV
SIZES = (
    (32, 32), (60, 60), (64, 64), (100, 100), (128, 128), (192, 192), (256, 256), (64, 128), (192, 60),
    (32, 256),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Choose one problem: distributions of gates and keys, shape, then the options of the call.

    Parameters:
        gate             strong, mild, slow, none, absent (g is None), reset (some g = -1e6), model (Mamba's);
                         with is_per_channel also rates, wild, turns, bounded
        keys             random, correlated (cosine 0.8), identical (beta = 1), negative (beta = 1.9)
        lengths          `rows(T)` or `packed(T0, T1, ...)`
        heads            (H, HV), HV a multiple of H
        sizes            (K, V)
        raw_gate         off, on, no_bias: logits for use_gate_in_kernel, with and without dt_bias;
                         lower_bound, bound_alone: logits for a bound of -5, the first with A_log and dt_bias
        beta             given, absent, sigmoid, negative: the last two are logits
        state            none, wide (fp32 or wider), narrow (the dtype of q): initial_state
        is_scaled        scale = 0.3 instead of K ** -0.5
        is_strided       q, k, v are views of one projection
        has_narrow_gates g, beta, A_log and dt_bias have the dtype of q
        is_per_channel   g decays each key channel by itself: g [B, T, HV, K], dt_bias [HV, K]
    """

    gate: str = "mild"
    keys: str = "random"
    lengths: Lengths = rows(129)
    heads: tuple[int, int] = (2, 2)
    sizes: tuple[int, int] = (64, 64)
    use_qk_l2norm_in_kernel: bool = False  # False: keys come normalised, queries do not
    raw_gate: str = "off"  # off, on, no_bias, lower_bound, bound_alone: use_gate_in_kernel
    beta: str = "given"  # given, absent, sigmoid, negative (the two in-kernel sigmoids)
    state: str = "none"  # none, wide (fp32 or better), narrow (the dtype of q)
    state_v_first: bool = False
    is_scaled: bool = False  # a scale of the caller's own
    is_strided: bool = False  # q, k, v are views of one projection
    has_narrow_gates: bool = False  # g, beta and the gate's parameters in the dtype of q
    exact: bool = True
    batch_invariant: bool = False
    is_per_channel: bool = False

    @property
    def cost(self) -> int:
        """Return tokens times state elements, to which the time of the reference is proportional."""
        (_, HV), (K, V) = self.heads, self.sizes
        return self.lengths.B * self.lengths.T * HV * K * V

    def __str__(self) -> str:
        """Return the factors that differ from the default, shape first."""
        L, (H, HV), (K, V) = self.lengths, self.heads, self.sizes
        tokens = f"{L.B}x{L.T}" if L.ends is None else f"{L.N} packed in {L.T}"
        words = [f"{self.gate}/{self.keys} {tokens} heads {H}/{HV} sizes {K}/{V}"]
        for f in fields(self)[5:]:
            value = getattr(self, f.name)
            if value != f.default:
                words.append(f"{f.name}={value}")
        return " ".join(words)


FACTORS: dict[str, tuple[Any, ...]] = {
    "gate": GATES,
    "keys": KEYS,
    "lengths": LENGTHS,
    "heads": HEADS,
    "sizes": SIZES,
    "use_qk_l2norm_in_kernel": (False, True),
    "raw_gate": ("off", "on", "no_bias"),
    "beta": ("given", "absent", "sigmoid", "negative"),
    "state": ("none", "wide", "narrow"),
    "state_v_first": (False, True),
    "is_scaled": (False, True),
    "is_strided": (False, True),
    "has_narrow_gates": (False, True),
    "exact": (True, False),
    "batch_invariant": (False, True),
}
QUICK = {
    **FACTORS,
    "lengths": (rows(1), rows(63), rows(65), packed(0, 5, 0, 64, 70, 0)),
    "heads": ((2, 4), (1, 3)),
    "sizes": ((32, 32), (60, 20)),
}
# problems with a decay per key channel
CHANNEL_FACTORS: dict[str, tuple[Any, ...]] = FACTORS | {
    "gate": CHANNEL_GATES,
    "raw_gate": (*FACTORS["raw_gate"], "lower_bound", "bound_alone"),
    "is_per_channel": (True,),
}
_REGIME, _SHAPE = ("gate", "keys"), ("lengths", "heads", "sizes")
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def is_contradiction(chosen: Mapping[str, Any]) -> bool:
    """Return True if two of these choices, some or all of a case's, exclude each other."""
    keys, beta = chosen.get("keys"), chosen.get("beta")
    if chosen.get("gate") == "absent" and chosen.get("raw_gate", "off") != "off":
        return True
    if keys == "identical":
        # beta = 1, which no logit of a plain sigmoid reaches; and without an initial state every token
        # overwrites all there is, so that no decay matters and dg has nothing but rounding in it
        return beta == "sigmoid" or chosen.get("state") == "none"
    return keys == "negative" and beta in ("absent", "sigmoid")  # beta = 1.9


def pairs(factors: dict[str, tuple[Any, ...]]) -> Iterator[Pair]:
    """Yield all pairs to cover: a distribution with anything, an option with an option, no two shapes."""
    for (a, xs), (b, ys) in itertools.combinations(factors.items(), 2):
        if a in _SHAPE and (b in _SHAPE or b not in _REGIME):
            continue
        for x, y in itertools.product(xs, ys):
            if not is_contradiction({a: x, b: y}):
                yield (a, x), (b, y)


def met(case: Case, factors: dict[str, tuple[Any, ...]]) -> set[Pair]:
    """Return the pairs, of any factors, that a case covers."""
    return set(itertools.combinations([(name, getattr(case, name)) for name in factors], 2))


def covering(
    factors: dict[str, tuple[Any, ...]] = FACTORS, *, max_cost: float = math.inf, tries: int = 40
) -> list[Case]:
    """Return few cases that together have every pair of options, each of at most max_cost (`Case.cost`).

    The search is greedy and deterministic: equal arguments give equal lists. ValueError if max_cost is too
    small for some pair.
    """
    rng = random.Random(0)
    missing = dict.fromkeys(pairs(factors))
    cases = []
    while missing:
        pair = next(iter(missing))
        candidates = [_complete(pair, factors, max_cost, rng) for _ in range(tries)]
        gains = [
            (sum(p in missing for p in met(case, factors)), -case.cost, case) for case in candidates if case
        ]
        if not gains:
            raise ValueError(f"max_cost: expected room for {pair}, got {max_cost}")
        best = max(gains, key=lambda gain: gain[:2])[2]
        for p in met(best, factors):
            missing.pop(p, None)
        cases.append(best)
    return cases


def product(factors: dict[str, tuple[Any, ...]] = FACTORS) -> Iterator[Case]:
    """Yield every case of the full product: millions, so take a slice."""
    for values in itertools.product(*factors.values()):
        chosen = dict(zip(factors, values, strict=True))
        if not is_contradiction(chosen):
            yield Case(**chosen)


def sample(count: int, factors: dict[str, tuple[Any, ...]] = FACTORS, seed: int = 0) -> list[Case]:
    """Return `count` cases drawn uniformly from the full product."""
    rng = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        case = _complete((), factors, math.inf, rng)
        if case is not None:
            cases.append(case)
    return cases


def _complete(
    fixed: Pair | tuple[()], factors: dict[str, tuple[Any, ...]], max_cost: float, rng: random.Random
) -> Case | None:
    """Return a random case with these two choices, or None after 200 attempts."""
    for _ in range(200):
        chosen = {name: rng.choice(values) for name, values in factors.items()} | dict(fixed)
        if not is_contradiction(chosen) and (case := Case(**chosen)).cost <= max_cost:
            return case
    return None
