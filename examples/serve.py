"""A small engine on gdn: continuous batching, prefix reuse, drafts verified, text of several prompts at once.

    python examples/serve.py                     random weights: what is shown is the machinery, not the text
    python examples/serve.py --device cuda --requests 12 --drafts 3
    python examples/serve.py --spread 0.02       weights so small that the model repeats itself: drafts hold
    python examples/serve.py --drafts 0 --history 16       states that are written once in 15 tokens
    python examples/serve.py --model DIR --prompt "Why is the sky blue?" --temperature 0.7
    python examples/serve.py --model DIR --http 8000       an OpenAI-style endpoint (pip install 'gdn[serve]')

DIR holds a checkpoint of Qwen3-Next or Qwen3.5 in Transformers' format. Norms, MLPs, experts and rotary
positions are Transformers' modules; states, windows, keys and values are in the engine's own pool.
The engine itself is in examples/serving; `serving/__init__.py` lists its files in their reading order.

For one GPU or CPU. Not in it: tensor parallelism, preemption (a request gets all its pages when it starts),
paged attention kernels (PyTorch's attention reads gathered pages), draft heads (drafts come from the text).
"""

import argparse
import sys
import time
from typing import Any

import torch

from serving.engine import Engine
from serving.model import build_random_model, load_model
from serving.pool import Pool
from serving.request import Limits, Request
from serving.sampling import Sampling
from serving.text import ByteTokenizer, encode_chat, load_tokenizer

SHARED = "You are a careful assistant who answers in one sentence. Think before you speak, then say it. "
QUESTIONS = (
    "Why is the sky blue?", "What is a prime?", "Who was Ada?", "How do tides work?", "What is rust?",
    "Why do cats purr?", "What is a monad?", "Where is Ulm?",
)  # fmt: skip


class Screen:
    """A line for each request, rewritten in place on a terminal. Elsewhere a line for each step, with what
    every request got, and the requests at the end."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.is_live, self.drawn = tokenizer, sys.stdout.isatty(), 0
        self.said: dict[int, int] = {}  # tokens of each request that were printed

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens).replace("\n", " ")

    def draw(self, requests: list[Request], pool: Pool, is_last: bool = False) -> None:
        if not self.is_live and not is_last:
            texts = [(n, self.text(r.tokens[self.said.get(n, 0) :])) for n, r in enumerate(requests)]
            self.said = {n: len(r.tokens) for n, r in enumerate(requests)}
            print(pool, *(f" {n}: {text}" for n, text in texts if text), flush=True)
            return
        lines = [str(pool)]
        for number, r in enumerate(requests):
            shown = self.text(r.tokens)[-60:]
            state = "done" if r.finish else "runs" if r.slot >= 0 else "waits"
            about = f"{r.reused:4} reused {r.num_accepted:4}/{r.num_drafted} drafts"
            lines.append(f"{number:2} {state:5} {len(r.tokens):4} tokens {about}  {shown}")
        if self.is_live and self.drawn:
            print(f"\x1b[{self.drawn}A", end="")
        print("\n".join(f"{line}\x1b[K" if self.is_live else line for line in lines), flush=True)
        self.drawn = len(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIR", help="a checkpoint; without it weights are random")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--http", type=int, metavar="PORT", help="serve on 127.0.0.1, 0: any free port")
    parser.add_argument("--prompt", action="append", help="what to ask instead of the built-in questions")
    sizes = (
        ("requests", 8, "how many of the built-in questions"), ("new", 48, "most tokens of an answer"),
        ("slots", 10, "states in the pool: of requests and of snapshots"),
        ("rows", 4, "requests that run at a time"), ("drafts", 2, "draft tokens of a row in a step"),
        ("max-len", 512, "most tokens of a prompt and its answer"),
        ("budget", 512, "tokens of a step, decoded and prefilled"),
        ("pages", 0, "pages of keys and values; 0: as many as the rows need, and half as many again"),
        ("history", 0, "places of a slot's history, 2 to 32; 0: every decode writes the states"),
    )  # fmt: skip
    for name, value, text in sizes:
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token (default)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="mass of the likeliest tokens to sample from"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument("--state-dtype", choices=("float32", "bfloat16"), default="float32")
    # at 0.02 the model says one byte again and again and every draft holds, at 0.1 none does
    parser.add_argument("--spread", type=float, default=0.045, help="standard deviation of random weights")
    return parser.parse_args()


def load(args: argparse.Namespace) -> tuple[Any, Any, frozenset[int]]:
    """Return the model, its tokenizer, and the tokens that end an answer."""
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    if args.model is None:
        return build_random_model(args.device, dtype, args.spread), ByteTokenizer(), frozenset()
    model = load_model(args.model, args.device, dtype)
    stop = model.generation_config.eos_token_id
    stop_ids = frozenset(stop if isinstance(stop, list) else [] if stop is None else [stop])
    return model, load_tokenizer(args.model), stop_ids


def answer(engine: Engine, tokenizer: Any, stop_ids: frozenset[int], args: argparse.Namespace) -> None:
    """Answer all prompts at once, and show how."""
    if args.prompt:
        prompts = [encode_chat(tokenizer, [{"role": "user", "content": text}]) for text in args.prompt]
    else:
        texts = [SHARED + QUESTIONS[n % len(QUESTIONS)] for n in range(args.requests)]
        prompts = [list(tokenizer.encode(text)) for text in texts]
    sampling = Sampling(args.temperature, args.top_p, args.seed)
    requests = [engine.add(Request(prompt, args.new, sampling, stop_ids)) for prompt in prompts]
    screen, start, steps = Screen(tokenizer), time.perf_counter(), 0
    while not engine.is_idle:
        engine.step()
        steps += 1
        screen.draw(requests, engine.pool)
    seconds = time.perf_counter() - start
    screen.draw(requests, engine.pool, is_last=True)
    count, held = sum(len(r.tokens) for r in requests), sum(r.num_accepted for r in requests)
    print(
        f"{count} tokens in {steps} steps, {held} of {sum(r.num_drafted for r in requests)} drafts accepted, "
        f"{seconds:.2f} s, {count / seconds:.0f} tokens/s on {args.device}"
    )


def serve_http(engine: Engine, tokenizer: Any, stop_ids: frozenset[int], args: argparse.Namespace) -> None:
    """Serve until interrupted."""
    import uvicorn

    from serving.server import Server

    server = Server(engine, tokenizer, args.model or "random", stop_ids=stop_ids)
    try:
        uvicorn.run(server.app, host="127.0.0.1", port=args.http, log_level="warning")
    finally:
        server.close()


def main() -> None:
    args = parse()
    model, tokenizer, stop_ids = load(args)
    limits = Limits(
        rows=args.rows, slots=args.slots, max_len=args.max_len, pages=args.pages, drafts=args.drafts,
        budget=args.budget, state_dtype=getattr(torch, args.state_dtype), history=args.history,
    )  # fmt: skip
    engine, start = Engine(model, limits), time.perf_counter()
    calls = engine.warmup()
    compiled = sum("compiled" in call for call in calls)
    print(
        f"warmup: {len(calls)} calls, {compiled} compiled, {len(engine.graphs)} graphs, "
        f"{time.perf_counter() - start:.1f} s",
        flush=True,
    )
    run = answer if args.http is None else serve_http
    run(engine, tokenizer, stop_ids, args)


if __name__ == "__main__":
    main()
