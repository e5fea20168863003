"""Time a random-weight Qwen3.5-shaped model in Transformers on gdn, on FLA, on plain PyTorch.

One model in one process: only the functions of the gated delta rule and its convolution change. First, given
tokens go through the cached path (a prefill of the prompt, a step for each token), and the logits are
compared with those of the model in fp32 on plain PyTorch:

    logit_error    largest difference of a logit
    rms_error      RMS difference over the reference's RMS
    decided        share of positions where the reference's margin exceeds twice logit_error
    same_tokens    share of these with the reference's greedy token: rounding cannot change it there
    decided_plain  share of positions where the margin exceeds twice the logit_error of plain PyTorch in bf16
    same_plain     share of these with the reference's greedy token
    same_all       share of all positions with it

Plain PyTorch in bf16 is the scale, as it rounds where the model does. A provider is wrong, and has no time,
if its rms_error is more than twice that of plain PyTorch, if its logit_error is and same_plain is below 1,
or if same_tokens is below 1.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn.integrations.transformers_packing import cache_of
from gdn_bench.passes.gpu import Session, noted
from gdn_bench.problems import catalog, jobs
from gdn_bench.providers import models
from gdn_bench.providers.models import Serving
from gdn_bench.results import rows
from gdn_bench.results.rows import Row
from gdn_bench.timing import measure

WORSE = 2.0  # times the error of plain PyTorch in bf16
ROUNDS = 5


@dataclass(frozen=True)
class Size:
    """Describe a model: 1.7 billion parameters, three gated delta rule layers to one of attention."""

    hidden: int = 2048
    layers: int = 24
    intermediate: int = 6144
    vocabulary: int = 32768
    heads: tuple[int, int] = (16, 32)
    head: int = 128
    attention: tuple[int, int, int] = (8, 2, 256)  # heads, key heads, size

    def __str__(self) -> str:
        return f"{self.layers} layers {self.hidden} wide"


SIZE = Size()


def build(size: Size, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the model with random weights, in eval mode."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, logging

    logging.set_verbosity_error()  # it warns that plain PyTorch is slow, which this benchmark measures
    heads, key_heads, head = size.attention
    config = Qwen3_5TextConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=size.intermediate,
        num_hidden_layers=size.layers, num_attention_heads=heads, num_key_value_heads=key_heads,
        head_dim=head, initializer_range=size.hidden**-0.5,  # so that every layer changes the logits
        linear_num_key_heads=size.heads[0], linear_num_value_heads=size.heads[1],
        linear_key_head_dim=size.head, linear_value_head_dim=size.head, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen3_5ForCausalLM(config)
    return model.to(dtype).eval()


def case_names(size: Size = SIZE) -> dict[int, str]:
    """Return the row's name for each prompt length."""
    return {prompt: f"{prompt}+{catalog.STEPS}, {size}" for prompt in catalog.PROMPTS}


def run(session: Session, served: Mapping[str, Serving], size: Size = SIZE) -> Iterator[Row]:
    """Yield the rows of every prompt length with the same number of steps."""
    cases = case_names(size)
    wanted = [
        prompt
        for prompt, case in cases.items()
        if session.wants(case) and not all(session.has("e2e", name, case) for name in served)
    ]
    if not wanted or not served:
        return
    model = build(size, session.device, torch.bfloat16)
    exact = copy.deepcopy(model).float()
    for prompt in wanted:
        if session.is_over:
            yield {"pass": "e2e", "case": cases[prompt], "provider": "all", "skipped": "out of time"}
            continue
        rows_of = swept(session, served, (model, exact), prompt, catalog.STEPS)
        yield from ({"pass": "e2e", "case": cases[prompt], **row} for row in rows_of)


def swept(
    session: Session, served: Mapping[str, Serving], pair: tuple[Any, Any], prompt: int, steps: int
) -> list[Row]:
    """Return the rows of one prompt length: logits compared, then timed. pair: the model, its fp32 copy."""
    model, exact = pair
    generator = torch.Generator().manual_seed(prompt)
    tokens = torch.randint(1, model.config.vocab_size, (1, prompt + steps), generator=generator)
    tokens = tokens.to(session.device)
    with models.plain():
        reference = forced(exact, tokens, prompt)
        plain_row = compared(forced(model, tokens, prompt), reference)
    by_name: dict[str, Row] = {}
    weights = sum(p.numel() for p in model.parameters())
    timed: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {}
    for name, context in served.items():
        row = by_name[name] = {"provider": name, "dtype": "bfloat16", "T": prompt, "steps": steps, "N": 1}
        row["backend"] = jobs.default_backend(name, SIZE.heads, session.device)
        # every weight is read for the prompt and for each step, and meets every token
        row |= {"bytes": 2 * weights * steps, "flop": 2 * weights * (prompt + steps)}
        with noted(row), context():
            row |= compared(forced(model, tokens, prompt), reference, plain_row["logit_error"])
            row["ok"] = is_right(row, plain_row)
            row |= {"error": row["rms_error"], "errors": {"logits": row["rms_error"]}}
            row["share_of_limit"] = row["rms_error"] / (WORSE * plain_row["rms_error"])
            if row["ok"]:
                timed[name] = (
                    _timer(model, context, tokens[:, :prompt], 1),
                    _timer(model, context, tokens[:, :prompt], steps),
                )
    for name, (first, whole) in _interleaved(timed).items():
        speed = steps / whole.p50
        by_name[name] |= {
            "ms": 1e3 * whole.p50,
            "p20": 1e3 * whole.p20,
            "p80": 1e3 * whole.p80,
            "timer": "host",
        }
        by_name[name] |= {"tokens_per_s": speed, "first_token_ms": 1e3 * first.p50, "runs": whole.runs}
        by_name[name]["step_ms"] = 1e3 * (whole.p50 - first.p50) / max(steps - 1, 1)
    rows.add_ratios(by_name)
    return list(by_name.values())


def forced(model: Any, tokens: Tensor, prompt: int) -> Tensor:
    """Return fp32 logits [positions, vocabulary] of the cached path, from the last token of the prompt on."""
    with torch.no_grad():
        out = model(input_ids=tokens[:, :prompt], use_cache=True)
        logits = [out.logits[:, -1]]
        for i in range(prompt, tokens.shape[1]):
            out = model(input_ids=tokens[:, i : i + 1], use_cache=True, **cache_of(out))
            logits.append(out.logits[:, -1])
    return torch.cat(logits).float()


def compared(logits: Tensor, reference: Tensor, plain: float | None = None) -> Row:
    """Return errors of logits, and the shares of positions with the reference's greedy token.

    plain: logit_error of plain PyTorch in bf16; None: these logits are its own.
    """
    difference = logits.double() - reference.double()
    error = float(difference.abs().max())
    best = reference.double().topk(2).values
    margin, same = best[:, 0] - best[:, 1], logits.argmax(-1) == reference.argmax(-1)
    decided, decided_plain = (margin > 2 * x for x in (error, error if plain is None else plain))

    def share(which: Tensor) -> float:
        return float(same[which].double().mean()) if which.any() else 1.0

    return {
        "logit_error": error,
        "rms_error": float(difference.norm() / reference.double().norm()),
        "decided": float(decided.double().mean()),
        "same_tokens": share(decided),
        "decided_plain": float(decided_plain.double().mean()),
        "same_plain": share(decided_plain),
        "same_all": float(same.double().mean()),
    }


def is_right(row: Row, plain_row: Row) -> bool:
    """Return True if a row's errors are at most WORSE times plain PyTorch's and its decided tokens equal."""
    is_close, is_near = (row[x] <= WORSE * plain_row[x] for x in ("rms_error", "logit_error"))
    return bool(is_close and row["same_tokens"] == 1 and (is_near or row["same_plain"] == 1))


def _timer(model: Any, context: Serving, prompt: Tensor, steps: int) -> Callable[[], float]:
    """Return a function that times a greedy generation, from the call to the last token on the host."""

    def seconds() -> float:
        with context(), torch.no_grad():
            start = time.perf_counter()
            written = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=steps, min_new_tokens=steps,
                do_sample=False,
            )  # fmt: skip
            written.cpu()
            return time.perf_counter() - start

    return seconds


def _interleaved(
    timed: Mapping[str, tuple[Callable[[], float], Callable[[], float]]],
) -> dict[str, tuple[measure.Times, measure.Times]]:
    """Time every provider's two generations in turn, after one run of the first."""
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in timed}
    for first, _ in timed.values():
        first()
    for _ in range(ROUNDS):
        for name, pair in timed.items():
            for job, into in zip(pair, taken[name], strict=True):
                into.append(job())
    return {name: (measure.times(first), measure.times(whole)) for name, (first, whole) in taken.items()}
