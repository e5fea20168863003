"""Check, time and judge generation in plain Transformers: dynamic cache, static cache, recorded graphs, FLA.

    PYTHONPATH=src python docs/lab/2026-11-27-generate.py [--fla FOLDER] [--seconds 560] [--only x1]
    PYTHONPATH=src python docs/lab/2026-11-27-generate.py --cpu         a toy model: does the script work?
    PYTHONPATH=src python docs/lab/2026-11-27-generate.py --one NAME    one line, in this process

FOLDER holds an installed FLA with its metadata; the lines of other sides cannot import it. Lines run in the
order of what they decide, each in a process of its own with a limit, and none is started that the remaining
seconds cannot hold. The model has Qwen3.5's shape and random weights: 24 layers of 2,048, of which 18 have
16/32 heads of 128. No answer ends early.

check: a small model against the whole sequence in fp64 without gdn (relative RMS of logits), and the tokens
and logits of graphs against eager steps, which must have equal bits.
times: seconds of the first and second of six calls of `generate` in a new process (512 + 64 tokens), tokens/s
of the median of the last five. The first line of a side compiles if the caller's caches are empty.
judge: log probabilities of the tokens that each side wrote, beside the same weights in fp32 on Transformers'
own functions without TF32, forced over the same tokens. The limit is twice the error of Transformers in bf16
on these tokens. `others` are tokens that fp32 would not have written, `gap` the largest difference in log
probability there: a near tie where it is about the error.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch

ANSWERS = Path(os.environ.get("ANSWERS") or Path(tempfile.gettempdir()) / "generate-answers")
JUDGED = 4  # rows of a batch that are judged
SIDES = {  # options of the patch, or None without it; cache
    "plain dynamic": (None, "dynamic"),
    "plain static": (None, "static"),
    "gdn dynamic": ({}, "dynamic"),
    "gdn static": ({}, "static"),
    "gdn graphs": ({"graphs": True}, "static"),
    "fla dynamic": (None, "dynamic"),
    "fla static": (None, "static"),
}
ORDER = (
    "gdn graphs",
    "plain static",
    "gdn static",
    "gdn dynamic",
    "plain dynamic",
    "fla dynamic",
    "fla static",
)
LINES = {f"{side} x{rows}": (side, rows) for rows in (1, 32, 128) for side in ORDER}
# the second process of a side finds the kernels compiled
LINES["gdn graphs x1 again"] = LINES["gdn graphs x1"]
NAMES = [
    "check fp32", "check bf16", "gdn graphs x1", "gdn graphs x1 again",
    *(f"{side} x1" for side in ORDER[1:]), "judge x1",
    *(f"{side} x32" for side in ORDER), "judge x32",
    *(f"{side} x128" for side in ORDER), "judge x128",
]  # fmt: skip
LIMITS = {"check": 90, "judge": 60, "static": 150, "dynamic": 60, "graphs": 60}  # seconds of a line
FULL = {"layers": 24, "hidden": 2048, "vocab": 32768, "prompt": 512, "new": 64}
TOY = {"layers": 4, "hidden": 256, "vocab": 512, "prompt": 40, "new": 8}


def build(device, dtype, *, layers, hidden, vocab, **_):
    import transformers

    transformers.logging.set_verbosity_error()
    small = hidden < 512
    config = transformers.Qwen3_5TextConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 128, num_key_value_heads=1 if small else 4,
        head_dim=64 if small else 256, linear_num_key_heads=2 if small else 16,
        linear_num_value_heads=4 if small else 32, linear_key_head_dim=64 if small else 128,
        linear_value_head_dim=64 if small else 128, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.Qwen3_5ForCausalLM(config).to(dtype).eval()


def generate(model, ids, cache, new, **more):
    given = {} if cache == "dynamic" else {"cache_implementation": "static"}
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        **given, **more,
    )  # fmt: skip


def patched(options):
    import gdn

    return nullcontext() if options is None else gdn.patch_transformers(**options)


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def check(device, dtype):
    model, wide = build(device, dtype, **TOY), build(device, torch.float32, **TOY).double()
    for p, q in zip(wide.parameters(), model.parameters(), strict=True):
        p.data.copy_(q.data)
    ids = torch.randint(1, 512, (3, 70), generator=torch.Generator().manual_seed(1)).to(device)
    more = {"output_logits": True, "return_dict_in_generate": True, "new": 24}
    results = {}
    for side, (options, cache) in SIDES.items():
        if side.startswith("fla"):
            continue
        off = {"disable_compile": True} if cache == "static" and "graphs" not in side else {}
        with patched(options):
            results[side] = generate(model, ids, cache, **more, **off)
    # eager steps on the cache of the graphs
    with patched({}):
        eager = generate(model, ids, "static", **more, disable_compile=True)
    graphs = results["gdn graphs"]
    same = torch.equal(graphs.sequences, eager.sequences)
    same &= all(torch.equal(x, y) for x, y in zip(graphs.logits, eager.logits, strict=True))
    for side, out in results.items():
        with torch.no_grad():
            judge = wide(out.sequences[:, :-1], use_cache=False).logits[:, 69:]
        logits = torch.stack(out.logits, 1).double()
        error = ((logits - judge).norm() / judge.norm()).item()
        print(f"{side:14s} {str(dtype):15s} logits off by {error:.1e} of fp64", flush=True)
    print(f"graphs have the bits of eager steps: {same}{'' if same else '  BAD'}", flush=True)


def measure(device, size, side, rows):
    options, cache = SIDES[side]
    prompt, new = size["prompt"], size["new"]
    model = build(device, torch.bfloat16, **size)
    ids = torch.randint(1, size["vocab"], (rows, prompt), generator=torch.Generator().manual_seed(1)).to(
        device
    )
    times = []
    with patched(options):
        for _ in range(6):
            wait(device)
            start = time.perf_counter()
            generate(model, ids, cache, new)
            wait(device)
            times.append(time.perf_counter() - start)
        steps = sorted(1e3 * x / new for x in times[1:])
        memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        print(
            f"{side:14s} x{rows:<4d} first {times[0]:6.1f} s, second {times[1]:6.2f} s, then "
            f"{1e3 * rows / steps[2]:8.0f} tokens/s ({steps[2]:6.2f} ms a step, prompt included; "
            f"{steps[0]:.2f} to {steps[-1]:.2f}), {memory:.1f} GiB",
            flush=True,
        )
        out = generate(model, ids, cache, new, output_logits=True, return_dict_in_generate=True)
    logits = torch.stack(out.logits, 1)[:JUDGED].double().log_softmax(-1)
    tokens = out.sequences[:JUDGED]
    written = logits.gather(-1, tokens[:, prompt:, None])[..., 0]
    ANSWERS.mkdir(parents=True, exist_ok=True)
    torch.save({"tokens": tokens.cpu(), "written": written.cpu()}, ANSWERS / f"{side} x{rows}.pt")


def judge(device, size, rows):
    """Print how far each side's log probabilities are from those of fp32."""
    files = [ANSWERS / f"{side} x{rows}.pt" for side in ORDER]
    found = {file.stem: torch.load(file) for file in files if file.exists()}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = build(device, torch.bfloat16, **size)

    def force(tokens):
        with torch.no_grad():
            rows = [model(row[None].to(device), use_cache=False).logits[0].double() for row in tokens]
        return torch.stack(rows).log_softmax(-1)[:, size["prompt"] - 1 : -1].cpu()

    half = {name: force(x["tokens"]) for name, x in found.items()}
    model.float()
    for name, x in found.items():
        picked = x["tokens"][:, size["prompt"] :, None]
        exact = force(x["tokens"])
        right = exact.gather(-1, picked)[..., 0]
        errors = (x["written"] - right).abs().flatten()
        limit = 2 * (half[name].gather(-1, picked)[..., 0] - right).abs().mean().item()
        gaps = exact.amax(-1) - right
        mean = errors.mean().item()
        print(
            f"{name:19s} |log probability - fp32| mean {mean:.4f} (limit {limit:.4f}) "
            f"p99 {errors.quantile(0.99):.4f}, {int((gaps > 0).sum())} of {gaps.numel()} others, "
            f"gap {gaps.max():.4f}: {'ok' if mean <= limit else 'ABOVE'}",
            flush=True,
        )


def run_line(args):
    """Run one line in this process."""
    name = args.one
    if name.startswith("fla"):
        sys.path.insert(0, args.fla)
        import fla

        print(f"fla {fla.__version__}", flush=True)
    else:
        sys.modules["fla"] = None
    device, size = ("cpu", TOY) if args.cpu else ("cuda", FULL)
    word, _, rest = name.partition(" ")
    if word == "check":
        check(device, torch.float32 if rest == "fp32" else torch.bfloat16)
    elif word == "judge":
        judge(device, size, int(rest[1:]))
    else:
        measure(device, size, *LINES[name])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", metavar="NAME")
    parser.add_argument("--only", default="", help="texts separated by commas: lines whose names end in one")
    parser.add_argument("--fla", default="")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    if args.one:
        return run_line(args)
    end = time.monotonic() + args.seconds
    for name in NAMES:
        if args.only and not name.endswith(tuple(args.only.split(","))):
            continue
        if name.startswith("fla") and not args.fla:
            continue
        (limit,) = [LIMITS[word] * (4 if args.cpu else 1) for word in name.split() if word in LIMITS]
        left = end - time.monotonic()
        if left < min(limit, 30):
            print(f"{name}: no time is left", flush=True)
            continue
        command = [
            sys.executable,
            __file__,
            "--one",
            name,
            "--fla",
            args.fla,
            *(["--cpu"] if args.cpu else []),
        ]
        start = time.monotonic()
        try:
            done = subprocess.run(command, timeout=min(limit, left), capture_output=True, text=True)
            failure = done.stderr.strip().splitlines()[-3:] if done.returncode else []
            warned = [line for line in done.stderr.splitlines() if "RuntimeWarning: a decode step" in line]
            lines = [done.stdout.strip(), *(f"{name}: {line[:300]}" for line in (*failure, *warned[:2]))]
            print(*lines, f"    [{name}: {time.monotonic() - start:.0f} s]", sep="\n", flush=True)
        except subprocess.TimeoutExpired as late:
            said = (late.stdout or b"").decode().strip()
            print(said, f"{name}: not done after {min(limit, left):.0f} s", sep="\n", flush=True)
    return None


if __name__ == "__main__":
    main()
