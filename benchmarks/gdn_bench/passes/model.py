"""Time a training step of a random-weight Qwen3.5-shaped model in Transformers, and say where the time goes.

Four layers, 2048 wide, 1 x 16,384 tokens in bf16: three of the gated delta rule and one of attention. A step
is forward, loss of the next token, backward and AdamW, whose rate of 0 leaves equal weights to all providers.
The functions of the gated delta rule and its convolution are those of gdn, FLA or plain PyTorch.

First the gradients of all parameters for the loss of some tokens are compared with those of the model in fp32
on plain PyTorch: `error` is their RMS difference over the reference's RMS. A provider whose error is more
than twice that of plain PyTorch in bf16 is wrong, and has no time. The layers of a random model amplify
rounding, so this finds blunders; `gdn bench layer` compares one layer with fp64.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gdn_bench.passes.end_to_end import SIZE, WORSE, Size, build
from gdn_bench.passes.gpu import Session, noted
from gdn_bench.problems import jobs
from gdn_bench.providers import models
from gdn_bench.providers.models import Serving
from gdn_bench.results import rows
from gdn_bench.results.rows import Row
from gdn_bench.timing import graph, kernels, measure

MODEL, TOKENS, JUDGED_TOKENS, ROUNDS = replace(SIZE, layers=4), 16384, 256, 5
MOST_KERNELS = 12  # of a row, longest first


def case_name(size: Size = MODEL, tokens: int = TOKENS) -> str:
    """Return the name of the only case."""
    return f"{size} 1x{tokens}"


def run(
    session: Session, served: Mapping[str, Serving], size: Size = MODEL, tokens: int = TOKENS
) -> Iterator[Row]:
    """Yield a row for each provider."""
    case = case_name(size, tokens)
    if not session.wants(case) or all(session.has("model", name, case) for name in served):
        return
    model = build(size, session.device, torch.bfloat16).train()
    yield from ({"pass": "model", "case": case, **row} for row in measured(session, served, model, tokens))


def measured(session: Session, served: Mapping[str, Serving], model: Any, tokens: int) -> list[Row]:
    """Return the rows of all providers: gradients compared, then timed in turn, then profiled."""
    device, vocabulary = session.device, model.config.vocab_size
    drawn = torch.randint(1, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    batch, few = drawn.to(device), drawn[:, :JUDGED_TOKENS].to(device)
    exact = copy.deepcopy(model).float()
    with models.plain():
        expected = gradients(exact, few)
        limit = WORSE * distance(gradients(model, few), expected)
    del exact
    # a rate of 0: every provider trains the same weights
    fused = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    steps: dict[str, Callable[[], None]] = {}
    by_name: dict[str, Row] = {}
    for name, context in served.items():
        row = by_name[name] = {"provider": name, "dtype": "bfloat16", "T": tokens, "N": 1}
        row["backend"] = jobs.default_backend(name, SIZE.heads, device)
        with noted(row):
            with context():
                row["error"] = distance(gradients(model, few), expected)
            row |= {"ok": row["error"] <= limit, "share_of_limit": row["error"] / limit}
            if row["ok"]:
                step = stepper(model, context, batch, fused)
                step()
                row["peak_mb"] = round(graph.peak_memory(step, device) / 1e6, 1)
                steps[name] = step
    for name, seconds in _interleaved(steps, device).items():
        ms = {"ms": 1e3 * seconds.p50, "p20": 1e3 * seconds.p20, "p80": 1e3 * seconds.p80}
        by_name[name] |= {**ms, "runs": seconds.runs, "timer": "host"}
        with noted(by_name[name]):
            times = kernels.profile(steps[name], device)
            by_name[name] |= {"kinds": kernels.by_kind(times), "kernels": dict(times[:MOST_KERNELS])}
    rows.add_ratios(by_name)
    return list(by_name.values())


def gradients(model: Any, tokens: Tensor) -> list[Tensor]:
    """Return the gradients of all parameters for the mean loss of the next token."""
    model.zero_grad(set_to_none=True)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    grads = [x.grad for x in model.parameters() if x.grad is not None]
    model.zero_grad(set_to_none=True)
    return grads


def distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the RMS difference of all gradients over the RMS of the expected ones."""
    pairs = list(zip(actual, expected, strict=True))
    far = sum(float((x.double() - y.double()).square().sum()) for x, y in pairs)
    return float((far / sum(float(y.double().square().sum()) for _, y in pairs)) ** 0.5)


def stepper(model: Any, context: Serving, tokens: Tensor, optimizer: Any) -> Callable[[], None]:
    """Return a training step of a provider."""

    def step() -> None:
        with context():
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _interleaved(steps: Mapping[str, Callable[[], None]], device: torch.device) -> dict[str, measure.Times]:
    """Time every provider's step in turn, from the call until the device has run it."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken[name].append(time.perf_counter() - start)
    return {name: measure.times(seconds) for name, seconds in taken.items()}
