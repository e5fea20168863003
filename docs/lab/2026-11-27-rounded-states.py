"""Measure how a rounded state drifts, for twelve distributions: errors of o over 100,000 tokens, by format.

    S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q / sqrt(K)       one head, K = V = 128

The stored state is rounded after every P tokens: P = 1 is decoding token by token, P = 16 decoding by replay,
where the rows of u that a fold adds are in bf16. All distributions of gates and keys run side by side as one
batch, in fp32, beside the recurrence in fp64 without rounding. One core takes 9 minutes; no GPU is needed.

    python docs/lab/2026-11-27-rounded-states.py [--tokens 100000] [--json FILE]
    python docs/lab/2026-11-27-rounded-states.py --json FILE --draw docs/design/rounded_states.svg
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

K = V = 128
# gate, cosine of two keys, beta -> a row of the batch
DISTRIBUTIONS = {
    "none/random/sigmoid": (None, 0.0, "sigmoid"),
    "none/correlated/sigmoid": (None, 0.8, "sigmoid"),
    "none/random/one": (None, 0.0, "one"),
    "none/correlated/one": (None, 0.8, "one"),
    "none/random/low": (None, 0.0, "low"),
    "none/correlated/low": (None, 0.8, "low"),
    "slow/random/sigmoid": (1 / 1024, 0.0, "sigmoid"),
    "slow/correlated/sigmoid": (1 / 1024, 0.8, "sigmoid"),
    "slow/random/low": (1 / 1024, 0.0, "low"),
    "slow/random/off": (1 / 1024, 0.0, "off"),
    "mild/random/sigmoid": (1 / 16, 0.0, "sigmoid"),
    "strong/random/sigmoid": (1.0, 0.0, "sigmoid"),
}
WRITTEN = 2_000  # tokens before beta is 0, in "off"
SMALLEST = 2.0**-100  # of the largest element of a column: a smaller one is stored as zeros


def column_scale(S: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Return the scale of each column of V, and the factor that divides by it: 0 for zeros."""
    largest = S.abs().amax(-2, keepdim=True)
    scale = torch.where(largest < SMALLEST, 0.0, largest / most)
    return scale, torch.where(largest < SMALLEST, 0.0, most / largest)


def round_columns(S: Tensor, most: int) -> Tensor:
    """Round S [..., K, V] to integers in -most .. most times an fp32 scale per column of V."""
    scale, inverse = column_scale(S, most)
    return (S * inverse).round_().mul_(scale)


def with_remainder(S: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 part of S, and S in 1905 levels: 15 times the int8 plus a remainder of -7 to 7."""
    scale, inverse = column_scale(S, 127 * 15)
    n = (S * inverse).round_()
    high = (n / 15).round_()
    return high.mul_(15 * scale), n.mul_(scale)


def round_e4m3(S: Tensor) -> Tensor:
    """Round S to 3 bits of mantissa in 2^-6 .. 448, and to steps of 2^-9 below, times a scale per column."""
    scale, inverse = column_scale(S, 448.0)
    x = S * inverse
    # to the nearest, ties to even, on the bits of fp32: 20 of the 23 bits of a mantissa are dropped
    bits = x.view(torch.int32)
    normal = ((bits + (((bits >> 20) & 1) + 0x7FFFF)) & -0x100000).view(torch.float32)
    return torch.where(x.abs() < 2.0**-6, (x * 512).round_().mul_(1 / 512), normal).mul_(scale)


def alone(rounded: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a rounding whose readers see all that is stored."""

    def both(S: Tensor) -> tuple[Tensor, Tensor]:
        stored = rounded(S)
        return stored, stored

    return both


ROUNDINGS = {
    "bf16": alone(lambda S: S.bfloat16().float()),
    "fp16": alone(lambda S: S.half().float()),
    "int16": alone(lambda S: round_columns(S, 32767)),
    "int12": alone(lambda S: round_columns(S, 2047)),
    "int8": alone(lambda S: round_columns(S, 127)),
    "e4m3": alone(round_e4m3),
    "int8 + 4 bits": with_remainder,
}
FORMS = (
    ("bf16", 1), ("fp16", 1), ("int16", 1), ("int12", 1), ("int8", 1), ("e4m3", 1),
    ("bf16", 16), ("int8", 16), ("int8", 32), ("int8 + 4 bits", 16), ("e4m3", 16),
)  # fmt: skip


@dataclass
class Tokens:
    """Hold q, k, v, decay, beta of the next tokens, each [tokens, distributions, ...], in fp64."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


def draw(generator: torch.Generator, common: Tensor, first: int, count: int) -> Tokens:
    """Draw `count` tokens of every distribution from token `first` on: q and v in bf16, keys of norm 1."""
    shape = (count, len(DISTRIBUTIONS))

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*shape, *sizes, generator=generator)

    unit = torch.nn.functional.normalize
    cosine = torch.tensor([cos for _, cos, _ in DISTRIBUTIONS.values()])[:, None]
    k = unit(cosine.sqrt() * common + (1 - cosine).sqrt() * unit(normal(K), dim=-1), dim=-1)
    q = unit(cosine.sqrt() * common + (1 - cosine).sqrt() * unit(normal(K), dim=-1), dim=-1)
    logits, g = normal(), torch.zeros(shape)
    beta = torch.empty(shape)
    is_written = torch.arange(first, first + count) < WRITTEN
    for i, (gate, _, kind) in enumerate(DISTRIBUTIONS.values()):
        if gate is not None:
            g[:, i] = torch.nn.functional.logsigmoid(normal()[:, i]) * gate
        beta[:, i] = 1 if kind == "one" else torch.sigmoid(logits[:, i] - (4 if kind == "low" else 0))
        if kind == "off":
            beta[:, i] *= is_written
    parts = (q.bfloat16(), k, normal(V).bfloat16(), g.exp(), beta)
    return Tokens(*(x.double() for x in parts))


class Decoder:
    """Decode the batch token by token on a stored state that is rounded after every P tokens."""

    def __init__(self, rounding: Callable[[Tensor], tuple[Tensor, Tensor]] | None, P: int) -> None:
        self.rounding, self.P, self.count = rounding, P, 0
        dtype = torch.float64 if rounding is None else torch.float32
        # what a reader sees, and what is stored: both between roundings, and one tensor where they are equal
        self.read = self.stored = torch.zeros(len(DISTRIBUTIONS), K, V, dtype=dtype)

    def step(self, x: Tokens, t: int) -> Tensor:
        """Advance by token t and return o [distributions, V]."""
        q, k, v, decay, beta = (y[t].to(self.read.dtype) for y in (x.q, x.k, x.v, x.decay, x.beta))
        decay = decay[:, None, None]
        apart = self.stored is not self.read
        S = self.read.mul_(decay)
        u = beta[:, None] * (v - (k[:, None] @ S)[:, 0])
        if self.P > 1:
            u = u.bfloat16().to(S.dtype)
        S.baddbmm_(k[:, :, None], u[:, None])
        if apart:
            self.stored.mul_(decay).baddbmm_(k[:, :, None], u[:, None])
        o = (q[:, None] @ S)[:, 0] / math.sqrt(K)
        self.count += 1
        if self.rounding is not None and self.count % self.P == 0:
            high, stored = self.rounding(self.stored)
            self.read, self.stored = (high, high) if high is stored else (high, stored)
        return o


def windows(tokens: int) -> dict[str, range]:
    """Return the tokens whose error is reported: around 1,000, 10,000 and 100,000."""
    ends = [n for n in (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000) if n <= tokens]
    return {f"{n:,}": range(max(0, n - 1_000), n) for n in ends}


def measure(tokens: int, seed: int = 0) -> dict[str, dict[str, dict[str, float]]]:
    """Return relative RMS errors of o in %, by form, distribution and window."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.nn.functional.normalize(torch.randn(K, generator=generator), dim=0)
    exact = Decoder(None, 1)
    decoders = {f"{name} @{P}": Decoder(ROUNDINGS[name], P) for name, P in FORMS}
    wanted = windows(tokens)
    squares = {name: {w: torch.zeros(len(DISTRIBUTIONS)).double() for w in wanted} for name in decoders}
    norms = {w: torch.zeros(len(DISTRIBUTIONS)).double() for w in wanted}
    start = time.time()
    for first in range(0, tokens, 1_000):
        x = draw(generator, common, first, min(1_000, tokens - first))
        for t in range(len(x.q)):
            ref = exact.step(x, t)
            inside = [w for w, window in wanted.items() if first + t in window]
            for w in inside:
                norms[w] += ref.square().sum(-1)
            for name, decoder in decoders.items():
                o = decoder.step(x, t)
                for w in inside:
                    squares[name][w] += (o.double() - ref).square().sum(-1)
        if first % 10_000 == 0:
            print(f"{first:,} tokens, {time.time() - start:.0f} s", flush=True)
    return {
        name: {
            label: {w: 100 * float((sums[w][i] / norms[w][i]).sqrt()) for w in wanted}
            for i, label in enumerate(DISTRIBUTIONS)
        }
        for name, sums in squares.items()
    }


DRAWN = ("none/random/sigmoid", "none/random/low", "none/correlated/low", "slow/random/low")
COLOURS = {
    "bf16 @1": "#0072b2", "fp16 @1": "#009e73", "int16 @1": "#000000", "int12 @1": "#999999",
    "int8 @1": "#d55e00", "e4m3 @1": "#882255", "bf16 @16": "#56b4e9", "int8 @16": "#e69f00",
    "int8 @32": "#f0c080", "int8 + 4 bits @16": "#cc79a7", "e4m3 @16": "#882255",
}  # fmt: skip
LIMITS = (4e-3, 300.0)  # of the picture, in percent: what diverges leaves it


def draw_curves(errors: dict[str, dict[str, dict[str, float]]], file: str) -> None:
    """Draw the error of o against the number of tokens, a panel for each of four distributions."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "gdn"
    figure, panels = pyplot.subplots(1, len(DRAWN), figsize=(13, 4), sharey=True, layout="constrained")
    for label, axes in zip(DRAWN, panels, strict=True):
        for name, by_label in errors.items():
            row = by_label[label]
            tokens = [int(w.replace(",", "")) for w in row]
            line = "-" if name.endswith("@1") else "--"
            axes.plot(tokens, list(row.values()), color=COLOURS[name], linestyle=line)
        axes.set(title=label, xlabel="tokens", xscale="log", yscale="log", ylim=LIMITS)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("relative RMS error of o, %")
    figure.legend(panels[0].get_lines(), list(errors), loc="outside right center", fontsize=9)
    figure.suptitle(
        "Errors of a rounded state: gate/keys/beta. @P: rounded after every P tokens (CPU, fp32, 2026-11-27)"
    )
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Run the measurement and print one row for each form, or draw what a run has written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--json")
    parser.add_argument("--draw")
    options = parser.parse_args()
    if options.draw:
        with open(options.json) as file:
            draw_curves(json.load(file), options.draw)
        return
    torch.set_num_threads(1)
    errors = measure(options.tokens)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(errors, file, indent=1)
    print("| form | " + " | ".join(DISTRIBUTIONS) + " |")
    for name, by_label in errors.items():
        cells = (" / ".join(f"{x:.2g}" for x in row.values()) for row in by_label.values())
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
