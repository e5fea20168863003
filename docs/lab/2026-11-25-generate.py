"""Check and time generation in plain Transformers on a GPU: dynamic cache, static cache, recorded graphs.

    PYTHONPATH=src:WHEELS python docs/lab/2026-11-25-generate.py            checks, then times
    PYTHONPATH=src:WHEELS python docs/lab/2026-11-25-generate.py --check    only the checks
    PYTHONPATH=src:WHEELS python docs/lab/2026-11-25-generate.py --one NAME one line, here

A GPU machine without network has no Transformers. Carry it in an ignored folder WHEELS of the repository
(some 40 MB): on a machine with a package index, with Python 3.12,

    pip download --only-binary :all: --python-version 3.12 --no-deps -d wheels transformers==5.17.0 \\
        huggingface_hub==1.33.0 tokenizers safetensors regex pyyaml tqdm requests filelock packaging httpx \\
        httpcore h11 anyio sniffio idna certifi typer click shellingham rich
    pip install --no-deps --no-index --target WHEELS wheels/*.whl      (drop what the GPU machine has)

Each line runs in a process of its own with a limit, so that a hang costs one line. The model has Qwen3.5's
shape and random weights: 24 layers of 2,048, of which 18 have 16/32 heads of 128. No answer ends early.
check: a small model in fp32 against the whole sequence in fp64 without gdn (relative RMS of logits), and the
tokens and logits of graphs against eager steps, which must have equal bits.
times: seconds of the first generate in a new process (512 + 64 tokens), then tokens/s of the median of 5.
"""

import subprocess
import sys
import time
from contextlib import nullcontext

import torch

LIMIT = 200  # seconds of a line
PROMPT, NEW = 512, 64
SIDES = {  # patch, cache, compiled
    "plain dynamic": (None, "dynamic"),
    "plain static": (None, "static"),
    "gdn dynamic": ({}, "dynamic"),
    "gdn static": ({}, "static"),
    "gdn graphs": ({"graphs": True}, "static"),
}
BATCHES = (1, 32, 128)
LINES = {f"{side} x{rows}": (side, rows) for rows in BATCHES for side in SIDES}


def build(dtype, layers=24, hidden=2048):
    import transformers

    transformers.logging.set_verbosity_error()
    small = hidden < 512
    config = transformers.Qwen3_5TextConfig(
        vocab_size=512 if small else 32768, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 128, num_key_value_heads=1 if small else 4,
        head_dim=64 if small else 256, linear_num_key_heads=2 if small else 16,
        linear_num_value_heads=4 if small else 32, linear_key_head_dim=64 if small else 128,
        linear_value_head_dim=64 if small else 128, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.Qwen3_5ForCausalLM(config).to(dtype).eval()


def generate(model, ids, cache, new=NEW, **more):
    given = {} if cache == "dynamic" else {"cache_implementation": "static"}
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        **given, **more,
    )  # fmt: skip


def patched(options):
    import gdn

    return nullcontext() if options is None else gdn.patch_transformers(**options)


def check(dtype):
    model = build(dtype, layers=8, hidden=256)
    wide = build(torch.float32, layers=8, hidden=256).double()
    for p, q in zip(wide.parameters(), model.parameters(), strict=True):
        p.data.copy_(q.data)
    ids = torch.randint(1, 512, (3, 70), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    more = {"output_logits": True, "return_dict_in_generate": True, "new": 24}
    results = {}
    for side, (options, cache) in SIDES.items():
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


def measure(side, rows):
    options, cache = SIDES[side]
    model = build(torch.bfloat16)
    ids = torch.randint(1, 32768, (rows, PROMPT), device="cuda")
    times = []
    with patched(options):
        for _ in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            generate(model, ids, cache)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    median = sorted(times[1:])[2]
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{side:14s} x{rows:<4d} first {times[0]:6.1f} s, then {rows * NEW / median:8.0f} tokens/s "
        f"({1e3 * median / NEW:6.2f} ms a step, prompt included), {memory:.1f} GiB",
        flush=True,
    )


def main():
    if "--one" in sys.argv:
        name = sys.argv[sys.argv.index("--one") + 1]
        if name.startswith("check"):
            check(torch.float32 if name.endswith("fp32") else torch.bfloat16)
        else:
            measure(*LINES[name])
        return
    names = ["check fp32", "check bf16"] + ([] if "--check" in sys.argv else list(LINES))
    for name in names:
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--one", name], timeout=LIMIT, capture_output=True, text=True
            )
            failure = done.stderr.strip().splitlines()[-1:] if done.returncode else []
            print(done.stdout.strip(), *(f"{name}: {line}" for line in failure), sep="\n", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{name}: not done after {LIMIT} s", flush=True)


if __name__ == "__main__":
    main()
