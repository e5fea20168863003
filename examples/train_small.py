"""Train a small hybrid model on gdn through Transformers, let it write, and compare its speed without gdn.

    python examples/train_small.py                     1 to 2 minutes on two CPU cores, a picture in out/demo
    python examples/train_small.py --steps 20 --out x  fewer steps, another folder

The model is Transformers' own Qwen3.5 text class with random weights, three gated delta rule layers to one
of attention; the text is Python's own library, a token per byte. The same weights then run without gdn.
"""

import argparse
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import gdn
from thread_choice import ThreadControl

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from gdn_bench.commands.progress import Report, show_progress
from gdn_bench.timing import measure

STEPS, BATCH, T = 220, 6, 256  # training: rows and tokens per step
LONG = 2048  # tokens of the compared training step, and four times that: the fallback's backward is quadratic
WRITTEN, COMPARED = 400, 128  # tokens written with gdn, and for the comparison of decoding
LEARNING_RATE = 4e-3
PROMPT = b"import os\nimport sys\n\n\ndef main(args):\n"


@dataclass(frozen=True)
class Result:
    """Hold the outcome. speeds: (job, tokens per second with gdn, and with Transformers' own functions)."""

    parameters: int
    losses: list[float]
    picture: str
    prompt: str
    continuation: str
    speeds: list[tuple[str, float, float]]
    logit_difference: float


def run(
    out: Path, *, device: torch.device, steps: int = STEPS, report: Report = lambda *_: None,
    control: ThreadControl | None = None,
) -> Result:  # fmt: skip
    """Train a model, draw its loss, let it write, compare. control: sets the CPU threads before each part."""
    choose = control.choose if control else lambda: None
    report("prepare", 0, 1, "the text and the model")
    torch.manual_seed(0)
    text = sources().to(device)
    model = build().to(device)
    report("prepare", 1, 1, "")
    with gdn.patch_transformers():
        choose()
        losses = train(model, text, steps, report, control.observe if control else lambda seconds: None)
        model.eval()
        choose()
        report("write", 0, 1, "")
        written = write(model, PROMPT, WRITTEN)
        report("write", 1, 1, f"{WRITTEN} tokens")
    picture = draw(losses, out / "loss.png")
    choose()
    speeds, difference = compare(model, text, report)
    return Result(
        sum(p.numel() for p in model.parameters()), losses, str(picture), PROMPT.decode(),
        written.decode(errors="replace").replace("\t", "    "), speeds, difference,
    )  # fmt: skip


def sources() -> Tensor:
    """Return the tokens of the top-level modules of Python's library: one per byte, or per four spaces."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    if not files:
        raise FileNotFoundError(
            "demo: expected the Python library's sources, got an installation without them"
        )
    return torch.tensor(list(encode(b"".join(file.read_bytes() for file in files))), dtype=torch.uint8)


def encode(text: bytes) -> bytes:
    """Replace four spaces by a tab, one token: a small model learns last to count spaces."""
    return text.replace(b"    ", b"\t")


def build() -> Any:
    """Return a Qwen3.5 text model of 1.7 million random parameters, two value heads per key head."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, logging

    logging.set_verbosity_error()  # it warns that its own functions are slow, which this example shows
    config = Qwen3_5TextConfig(
        vocab_size=256, hidden_size=192, intermediate_size=384, num_hidden_layers=4, tie_word_embeddings=True,
        num_attention_heads=4, num_key_value_heads=2, head_dim=48, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config)


def train(
    model: Any, text: Tensor, steps: int, report: Report, observe: Callable[[float], None] = lambda _: None
) -> list[float]:
    """Train with AdamW on random windows of the text; return the loss of every step in nats per token.

    observe: gets the seconds of each step.
    """
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    losses: list[float] = []
    report("train", 0, steps, "")
    for step in range(steps):
        start = time.perf_counter()
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / 20) * (1 - 0.95 * step / steps)
        starts = torch.randint(len(text) - T, (BATCH,)).tolist()
        losses.append(learn(model, torch.stack([text[i : i + T] for i in starts]).long()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        observe(time.perf_counter() - start)
        report("train", step + 1, steps, f"loss {losses[-1]:.2f}")
    return losses


def learn(model: Any, tokens: Tensor) -> float:
    """Return the loss of predicting each next token; its gradients are left in the parameters."""
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


def write(model: Any, prompt: bytes, count: int) -> bytes:
    """Continue a prompt by `count` tokens: one prefill, then one decoding step for each."""
    tokens = torch.tensor([list(encode(prompt))], device=model.device)
    with torch.no_grad():
        whole = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=True,
            temperature=0.5, top_k=20,
        )  # fmt: skip
    return bytes(whole[0, tokens.shape[1] :].tolist())


def compare(model: Any, text: Tensor, report: Report) -> tuple[list[tuple[str, float, float]], float]:
    """Return tokens per second of each job on both sides, and the largest difference of a logit.

    A single CPU thread is timed by the process's own time, in which other work of the machine does not count.
    """
    is_single = model.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if is_single else time.perf_counter
    tokens = text[None, :LONG].long()
    longer = text[None, : 4 * LONG].long()
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "gdn": gdn.patch_transformers,
        "transformers": nullcontext,
    }

    def forward() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits

    jobs: dict[str, tuple[Callable[[], Any], int, int]] = {
        f"training step, {LONG} tokens": (lambda: learn(model, tokens), LONG, 3),
        f"training step, {4 * LONG} tokens": (lambda: learn(model, longer), 4 * LONG, 1),
        f"prefill, {LONG} tokens": (forward, LONG, 5),
        # some hundred milliseconds a run: other work of the machine moves their median less if they are many
        "decoding": (lambda: write(model, PROMPT, COMPARED), COMPARED, 11),
    }
    speeds = []
    for done, (name, (job, count, runs)) in enumerate(jobs.items()):
        report("compare", done, len(jobs), name)
        times = measure.interleaved(
            dict.fromkeys(contexts, job),
            dict.fromkeys(contexts, runs),
            cold=contexts if runs == 1 else (),
            clock=clock,
            contexts=contexts,
        )
        speeds.append((name, count / times["gdn"].p50, count / times["transformers"].p50))
    logits = []
    for context in contexts.values():
        with context():
            logits.append(forward())
    report("compare", len(jobs), len(jobs), "")
    return speeds, float((logits[0] - logits[1]).abs().max())


def draw(losses: list[float], path: Path) -> Path:
    """Draw the loss of every step and its running mean into a PNG; return its path."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = [(i + 1) * BATCH * T / 1e3 for i in range(len(losses))]
    width = max(1, len(losses) // 20)
    means = [sum(losses[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(losses))]
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(tokens, losses, color="#9ecae1", linewidth=1, label="each step")
    axes.plot(tokens, means, color="#08519c", linewidth=2, label=f"mean of {width} steps")
    axes.set_xlabel("tokens read, thousands")
    axes.set_ylabel("loss, nats per token")
    axes.set_title("A Qwen3.5-shaped model learns Python, with gdn")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)
    return path


def main() -> None:
    """Run the example as a script and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of the picture")
    parser.add_argument("--steps", type=positive, default=STEPS, help="training steps")
    parser.add_argument(
        "--threads", type=positive, help="CPU threads; by default the faster of 1 and PyTorch's own number"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    screen, status = Console(), Console(stderr=True)
    device, control = torch.device(options.device), None
    if device.type == "cpu" and options.threads is None:
        control = ThreadControl(lambda text: status.print(text, markup=False, highlight=False))
    with show_progress(status) as report, measure.threads(options.threads or torch.get_num_threads()):
        result = run(options.out, device=device, steps=options.steps, report=report, control=control)
    screen.print(result.prompt, style="dim", markup=False, highlight=False, end="")
    screen.print(result.continuation + "\n", style="bold", markup=False, highlight=False)
    table = Table("tokens per second (of CPU time with one thread)", "gdn", "transformers", "ratio")
    for name, ours, theirs in result.speeds:
        table.add_row(name, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}")
    screen.print(table)
    early, late = (sum(part) / len(part) for part in (result.losses[:5], result.losses[-5:]))
    screen.print(f"loss in nats per token: {early:.2f} -> {late:.2f}, drawn in {result.picture}")
    screen.print(f"largest difference of a logit between gdn and transformers: {result.logit_difference:.1e}")


def positive(text: str) -> int:
    """Return a number of at least 1; ValueError, which argparse prints, for others."""
    number = int(text)
    if number < 1:
        raise ValueError(f"expected at least 1, got {number}")
    return number


if __name__ == "__main__":
    main()
