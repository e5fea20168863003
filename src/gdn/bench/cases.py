"""Problems as data: what accuracy is judged on. A Case is one choice per factor; `inputs` makes its tensors.

Random numbers are rounded to the dtype of the call before anybody sees them: the fp64 law gets the same ones.
"""

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Lengths(NamedTuple):
    """B rows of T tokens, or one row holding the sequences ends[n] : ends[n + 1]."""

    T: int
    B: int = 1
    ends: tuple[int, ...] | None = None

    @property
    def N(self) -> int:
        return self.B if self.ends is None else len(self.ends) - 1


def rows(T: int) -> Lengths:
    """Two rows of T tokens, one row where T is long."""
    return Lengths(T, 2 if T <= 129 else 1)


def packed(*lengths: int, tail: int = 0) -> Lengths:
    """Sequences of these lengths in one row, and `tail` tokens that belong to none."""
    ends = (0, *itertools.accumulate(lengths))
    return Lengths(ends[-1] + tail, 1, ends)


GATES = ("strong", "mild", "slow", "none", "absent", "reset", "model")  # absent: g=None
# "mixed", what GPUs are timed on, is no regime of its own: every fourth head is 'none', the others 'mild'
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
    """One choice per factor: the regime, the shape, then the options of the call."""

    gate: str = "mild"
    keys: str = "random"
    lengths: Lengths = rows(129)
    heads: tuple[int, int] = (2, 2)
    sizes: tuple[int, int] = (64, 64)
    use_qk_l2norm_in_kernel: bool = False  # False: keys come normalised, queries do not
    raw_gate: str = "off"  # off, on, no_bias: use_gate_in_kernel, with and without dt_bias
    beta: str = "given"  # given, absent, sigmoid, negative (the two in-kernel sigmoids)
    state: str = "none"  # none, wide (fp32 or better), narrow (the dtype of q)
    state_v_first: bool = False
    is_scaled: bool = False  # a scale of the caller's own
    is_strided: bool = False  # q, k, v are views of one projection
    has_narrow_gates: bool = False  # g, beta and the gate's parameters in the dtype of q
    exact: bool = True
    batch_invariant: bool = False

    @property
    def cost(self) -> int:
        """Tokens times the state's elements: what the law pays."""
        (_, HV), (K, V) = self.heads, self.sizes
        return self.lengths.B * self.lengths.T * HV * K * V

    def __str__(self) -> str:
        """The factors that differ from the default, shape first."""
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
_REGIME, _SHAPE = ("gate", "keys"), ("lengths", "heads", "sizes")
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def is_contradiction(chosen: Mapping[str, Any]) -> bool:
    """True if two of these choices, some or all of a case's, cannot be made together."""
    keys, beta = chosen.get("keys"), chosen.get("beta")
    if chosen.get("gate") == "absent" and chosen.get("raw_gate", "off") != "off":
        return True
    if keys == "identical":
        # beta = 1, which no logit of a plain sigmoid reaches; and without an initial state every token
        # overwrites all there is, so that no decay matters and dg has nothing but rounding in it
        return beta == "sigmoid" or chosen.get("state") == "none"
    return keys == "negative" and beta in ("absent", "sigmoid")  # beta = 1.9


def pairs(factors: dict[str, tuple[Any, ...]]) -> Iterator[Pair]:
    """Every pair to be met: a regime with anything, an option with an option; shapes need not meet shapes."""
    for (a, xs), (b, ys) in itertools.combinations(factors.items(), 2):
        if a in _SHAPE and (b in _SHAPE or b not in _REGIME):
            continue
        for x, y in itertools.product(xs, ys):
            if not is_contradiction({a: x, b: y}):
                yield (a, x), (b, y)


def met(case: Case, factors: dict[str, tuple[Any, ...]]) -> set[Pair]:
    """The pairs, of any factors, that a case meets."""
    return set(itertools.combinations([(name, getattr(case, name)) for name in factors], 2))


def covering(
    factors: dict[str, tuple[Any, ...]] = FACTORS, *, max_cost: float = math.inf, tries: int = 40
) -> list[Case]:
    """Few cases that meet every pair, each of at most max_cost. Greedy, and the same list every time."""
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
    """Every case there is. Billions: for runs on demand, take a slice."""
    for values in itertools.product(*factors.values()):
        chosen = dict(zip(factors, values, strict=True))
        if not is_contradiction(chosen):
            yield Case(**chosen)


def sample(count: int, factors: dict[str, tuple[Any, ...]] = FACTORS, seed: int = 0) -> list[Case]:
    """`count` cases drawn evenly from the full product."""
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
    """A random case with these two choices, or None when none was found."""
    for _ in range(200):
        chosen = {name: rng.choice(values) for name, values in factors.items()} | dict(fixed)
        if not is_contradiction(chosen) and (case := Case(**chosen)).cost <= max_cost:
            return case
    return None


@dataclass(frozen=True)
class Inputs:
    """The tensors and options of one call, by argument name, and the gradients of its two outputs."""

    tensors: dict[str, Tensor]
    options: dict[str, Any]
    do: Tensor
    dfinal_state: Tensor

    def double(self) -> "Inputs":
        """The same numbers in fp64, so that gradients of them are not rounded."""
        wide = {name: x.double() if x.is_floating_point() else x for name, x in self.tensors.items()}
        return replace(self, tensors=wide, do=self.do.double(), dfinal_state=self.dfinal_state.double())

    def heads(self, index: list[int]) -> "Inputs":
        """The same problem with only these key heads and the value heads that read them."""
        ratio = self.tensors["v"].shape[2] // self.tensors["q"].shape[2]
        both = [h * ratio + j for h in index for j in range(ratio)]
        axis = {"A_log": 0, "dt_bias": 0, "initial_state": 1}

        def take(name: str, x: Tensor) -> Tensor:
            if name == "cu_seqlens":
                return x
            wanted = index if name in ("q", "k") else both
            return x.index_select(axis.get(name, 2), torch.tensor(wanted, device=x.device))

        return replace(
            self,
            tensors={name: take(name, x) for name, x in self.tensors.items()},
            do=take("do", self.do),
            dfinal_state=take("initial_state", self.dfinal_state),
        )

    def prefix(self, tokens: int) -> "Inputs":
        """The same problem with only the first tokens of every sequence; tokens of none are left out."""
        q, offsets = self.tensors["q"], self.tensors.get("cu_seqlens")
        tensors = dict(self.tensors)
        if offsets is None:
            index = torch.arange(min(tokens, q.shape[1]), device=q.device)
        else:
            ends = offsets.tolist()
            spans = [range(a, min(a + tokens, b)) for a, b in itertools.pairwise(ends)]
            index = torch.tensor([t for span in spans for t in span], dtype=torch.int64, device=q.device)
            lengths = [0, *itertools.accumulate(len(span) for span in spans)]
            tensors["cu_seqlens"] = torch.tensor(lengths, dtype=offsets.dtype, device=offsets.device)
        for name in ("q", "k", "v", "g", "beta"):
            if name in tensors:
                tensors[name] = tensors[name].index_select(1, index)
        return replace(self, tensors=tensors, do=self.do.index_select(1, index))


def inputs(
    case: Case,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    is_drawn_there: bool = False,
) -> Inputs:
    """The tensors of a case in a dtype: q, k, v in it, gates and states as the case says.

    is_drawn_there: random numbers are drawn on the device, in fp32: other ones on each kind of device, but a
    billion of them take no minute.
    """
    (H, HV), (K, V), (T, B, ends) = case.heads, case.sizes, case.lengths
    draw = _Draw(seed, device, torch.float32) if is_drawn_there else _Draw(seed)
    wide = torch.promote_types(dtype, torch.float32)
    gate_dtype = dtype if case.has_narrow_gates else wide
    q, k, v = draw.normal(B, T, H, K), _keys(case, draw, B, T, H, K), draw.normal(B, T, HV, V)
    if case.use_qk_l2norm_in_kernel:
        k = k * draw.uniform(0.5, 2.0, B, T, H, 1)
    if case.is_strided:
        flat = torch.cat([x.reshape(B, T, -1) for x in (q, k, v)], dim=-1).to(device, dtype)
        parts = flat.split([H * K, H * K, HV * V], dim=-1)
        q, k, v = (x.unflatten(-1, (heads, -1)) for x, heads in zip(parts, (H, H, HV), strict=True))
    else:
        q, k, v = (x.to(dtype) for x in (q, k, v))
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {name: _finite(x, gate_dtype) for name, x in _gates(case, draw, B, T, HV).items()}
    last = (V, K) if case.state_v_first else (K, V)
    shape = (case.lengths.N, HV, *last)
    if case.state != "none":
        tensors["initial_state"] = draw.normal(*shape).to(dtype if case.state == "narrow" else wide)
    if ends is not None:
        tensors["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32 if case.is_strided else torch.int64)
    options: dict[str, Any] = {
        "output_final_state": True,
        "scale": 0.3 if case.is_scaled else None,
        "use_qk_l2norm_in_kernel": case.use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": case.raw_gate != "off",
        "use_beta_sigmoid_in_kernel": case.beta in ("sigmoid", "negative"),
        "allow_neg_eigval": case.beta == "negative",
        "state_v_first": case.state_v_first,
        "exact": case.exact,
        "batch_invariant": case.batch_invariant,
    }
    do, dS = draw.normal(B, T, HV, V).to(dtype), draw.normal(*shape).to(wide)
    moved = {name: x.to(device) for name, x in tensors.items()}
    return Inputs(moved, options, do.to(device), dS.to(device))


class _Draw:
    """Random numbers from one seed; fp64 and made on the CPU, so that every device gets the same."""

    def __init__(
        self, seed: int, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float64
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.made: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, **self.made)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, **self.made)


def _keys(case: Case, draw: _Draw, B: int, T: int, H: int, K: int) -> Tensor:
    """Unit keys; any two tokens' keys have a cosine of about 0, 0.8 or 1."""
    cosine = {"random": 0.0, "correlated": 0.8, "identical": 1.0, "negative": 0.8}[case.keys]
    own = torch.nn.functional.normalize(draw.normal(B, T, H, K), dim=-1)
    shared = torch.nn.functional.normalize(draw.normal(1, 1, H, K), dim=-1)
    return torch.nn.functional.normalize(math.sqrt(1 - cosine) * own + math.sqrt(cosine) * shared, dim=-1)


def _gates(case: Case, draw: _Draw, B: int, T: int, HV: int) -> dict[str, Tensor]:
    """g, beta, A_log and dt_bias as the case's regime and options want them, in fp64."""
    tensors = {}
    A_log, dt_bias = _model_parameters(draw, HV)
    if case.gate != "absent":
        g = _decay(case.gate, draw, A_log, dt_bias, B, T, HV)
        if case.raw_gate == "off":
            tensors["g"] = g
        else:
            if case.gate == "none":
                A_log = torch.full_like(A_log, -math.inf)
            bias = dt_bias if case.raw_gate == "on" else torch.zeros_like(dt_bias)
            # the logit a with g = -exp(A_log) softplus(a + bias); any logit does where A_log = -inf
            rate = torch.where(A_log.isinf(), torch.ones_like(g), -g * torch.exp(-A_log))
            tensors["g"] = torch.where(rate > 20, rate, torch.log(torch.expm1(rate.clamp(max=20)))) - bias
            tensors["A_log"] = A_log
            if case.raw_gate == "on":
                tensors["dt_bias"] = dt_bias
    if case.beta != "absent":
        logit = draw.normal(B, T, HV)
        if case.keys in ("identical", "negative"):
            value = 1.0 if case.keys == "identical" else 1.9
            logit = torch.full_like(logit, math.log(value / (2 - value)))
        doubled = case.keys in ("identical", "negative")
        tensors["beta"] = logit.sigmoid() * (2 if doubled else 1) if case.beta == "given" else logit
    return tensors


def _model_parameters(draw: _Draw, HV: int) -> tuple[Tensor, Tensor]:
    """As Mamba initialises them: A_log = log U(0, 16); dt_bias = softplus^-1 of a step in [0.001, 0.1]."""
    step = torch.exp(draw.uniform(math.log(0.001), math.log(0.1), HV)).clamp(min=1e-4)
    return torch.log(draw.uniform(0, 16, HV)), step + torch.log(-torch.expm1(-step))


def _decay(gate: str, draw: _Draw, A_log: Tensor, dt_bias: Tensor, B: int, T: int, HV: int) -> Tensor:
    """Log decays of a regime."""
    x = torch.nn.functional.logsigmoid(draw.normal(B, T, HV))
    if gate == "model":
        return -torch.exp(A_log) * torch.nn.functional.softplus(draw.normal(B, T, HV) + dt_bias)
    rates = {"strong": 1.0, "mild": 1 / 16, "slow": 1 / 1024, "none": 0.0, "reset": 1 / 16, "mixed": 1 / 16}
    g = x * rates[gate]
    if gate == "mixed":
        g[..., 3::4] = 0
    if gate == "reset" and T > 0:
        # some tokens of some heads, and one token of every head, as an engine marks the start of a sequence
        is_start = draw.uniform(0, 1, B, T, HV) < 0.01
        is_start[:, T // 2] = True
        g = torch.where(is_start, torch.full_like(g, -1e6), g)
    return g


def _finite(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype, with finite numbers kept finite."""
    limit = torch.finfo(dtype).max
    return torch.where(x.isinf(), x, x.clamp(-limit, limit)).to(dtype)
