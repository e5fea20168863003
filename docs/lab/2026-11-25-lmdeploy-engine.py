"""Run a model through lmdeploy's PyTorch engine, its own kernels and gdn's in turn: check, time and profile.

    python docs/lab/2026-11-25-lmdeploy-engine.py --out DIR           # about 8 minutes on an H200
    python docs/lab/2026-11-25-lmdeploy-engine.py --out DIR --steps build --layers 4 --hidden 256   # on a CPU

lmdeploy 0.18, TileLang, flash-linear-attention and gdn must be importable (PYTHONPATH). The model is a
Qwen3-Next with random weights: 24 layers, 2,048 wide, 16/32 heads of 128, dense MLPs. Both engines live at
the same time, each in a process; the rows alternate between them, and the order alternates as well. Every
answer of a process has a time limit, so that a hang costs one line.

1. judge: log probabilities of both engines' texts against Transformers in fp32 (its plain torch code), beside
   the error of Transformers in bf16. Limit: twice that.
2. rows: throughput, best and median of five runs. Goals: 1.0 on every row, 1.1 where prompts dominate.
3. profile: launches, GPU us and wall us of one decode step at 1 and 64 rows, with its longest kernels.
"""

import argparse
import collections
import json
import os
import pathlib
import select
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
VOCAB, PROMPTS, NEW, ROUNDS = 512, 8, 64, 5
ROWS = {  # name: requests, tokens of a prompt, tokens to generate
    "8x300+64": (8, 300, 64),
    "64x512+128": (64, 512, 128),
    "128x128+128": (128, 128, 128),
    "8x3000+1": (8, 3000, 1),
    "1x64+256": (1, 64, 256),
}
PREFILL = ("8x3000+1",)
LIMITS = {"build": 200, "answers": 60, "row": 40, "profile": 60, "judge": 150, "model": 150}


def text(n: int, length: int) -> str:
    return " ".join(f"t{3 + (n * 7919 + i * i * 31 + i * 17) % (VOCAB - 3)}" for i in range(length))


def make_model(path: pathlib.Path, layers: int, hidden: int) -> None:
    """Write the model: gates and taps as in trained layers, some decay fast, some hardly."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM

    heads = max(1, hidden // 128)
    config = Qwen3NextConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=min(2, heads), head_dim=128,
        linear_num_key_heads=heads, linear_num_value_heads=2 * heads, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=hidden // 2, shared_expert_intermediate_size=hidden // 2,
        mlp_only_layers=list(range(layers)), max_position_embeddings=8192, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.05, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3NextForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(0.01, 8).log())
            elif name.endswith("dt_bias"):
                p.copy_(torch.empty_like(p).uniform_(-4, 1))
            elif name.endswith("conv1d.weight"):
                p.copy_(torch.randn_like(p) * 0.4)
    torch.set_default_dtype(torch.float32)
    model.to(torch.bfloat16).save_pretrained(path)
    # lmdeploy reads this name; Transformers 5 does not write it
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | {"full_attention_interval": 4}, indent=1))
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"t{n}": n for n in range(3, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(path)


class Engine:
    """Hold lmdeploy's pipeline in a worker process; gdn's patch comes before the model is built."""

    def __init__(self, path: str, patched: bool) -> None:
        if patched:
            from gdn.integrations.lmdeploy import patch_lmdeploy

            self.patch = patch_lmdeploy()
        from lmdeploy import PytorchEngineConfig, pipeline

        self.pipe = pipeline(path, backend_config=PytorchEngineConfig(
            dtype="bfloat16", cache_max_entry_count=0.15, max_batch_size=128, session_len=4096,
            logprobs_mode="raw_logprobs",
        ))  # fmt: skip

    def generate(self, prompts: list[str], new: int, logprobs: int | None = None):
        import torch
        from lmdeploy import GenerationConfig

        config = GenerationConfig(max_new_tokens=new, do_sample=False, ignore_eos=True, logprobs=logprobs)
        torch.cuda.synchronize()
        start = time.perf_counter()
        answers = self.pipe.infer(prompts, gen_config=config, do_preprocess=False)
        return answers, time.perf_counter() - start

    def answers(self) -> dict:
        prompts = [text(n, 20 + 37 * n) for n in range(PROMPTS)]
        first, _ = self.generate(prompts, NEW, 5)
        again, _ = self.generate(prompts, NEW, 5)
        return {
            "tokens": [list(map(int, a.token_ids)) for a in first],
            "logprobs": [[{int(k): float(v) for k, v in row.items()} for row in a.logprobs] for a in first],
            "same_twice": all(a.token_ids == b.token_ids for a, b in zip(first, again, strict=True)),
        }

    def row(self, name: str) -> float:
        count, length, new = ROWS[name]
        return self.generate([text(100 + n, length) for n in range(count)], new)[1]

    def calls(self) -> dict:
        from gdn.integrations import usage

        return {
            "served": [[*key, n] for key, n in usage.served.items()],
            "rejected": [[*key, n] for key, n in usage.rejected.items()],
        }

    def profile(self, rows: int) -> dict:
        """Return launches, GPU us and wall us of one decode step: the difference of 48 and 16 steps."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        prompts, kernels, walls = [text(300 + n, 64) for n in range(rows)], {}, {}
        for steps in (16, 48):
            self.generate(prompts, steps)
            walls[steps] = min(self.generate(prompts, steps)[1] for _ in range(3))
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                self.generate(prompts, steps)
                torch.cuda.synchronize()
            kernels[steps] = collections.Counter(), collections.Counter()
            for event in found.events():
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    name = event.name.split("(")[0].split("<")[0][-60:]
                    kernels[steps][0][name] += 1
                    kernels[steps][1][name] += event.device_time_total
        names = kernels[48][0]
        table = {name: [(kernels[48][i][name] - kernels[16][i][name]) / 32 for i in (0, 1)] for name in names}
        longest = sorted(table.items(), key=lambda item: -item[1][1])[:14]
        return {
            "launches": sum(count for count, _ in table.values()),
            "gpu_us": sum(us for _, us in table.values()),
            "wall_us": (walls[48] - walls[16]) / 32 * 1e6,
            "kernels": [[name, *values] for name, values in longest],
        }


def work(path: str, patched: bool) -> None:
    """Answer one command a line, as JSON on a pipe of its own: lmdeploy prints to stdout."""
    out = os.fdopen(int(os.environ["ANSWERS"]), "w")

    def answer(value) -> None:
        print(json.dumps(value), file=out, flush=True)

    start = time.perf_counter()
    engine = Engine(path, patched)
    answer({"build_s": time.perf_counter() - start})
    for line in sys.stdin:
        name, *args = json.loads(line)
        try:
            answer({"value": getattr(engine, name)(*args)})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"[:500]})
    os._exit(0)


class Worker:
    """Start an engine in a process and send it commands; each answer has a time limit."""

    def __init__(self, path: str, name: str) -> None:
        self.name, (read, write) = name, os.pipe()
        command = [sys.executable, __file__, "--worker", name, "--model", path]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=sys.stderr, text=True, pass_fds=[write],
            env=os.environ | {"ANSWERS": str(write)},
        )  # fmt: skip
        os.close(write)
        self.answers = os.fdopen(read)
        self.is_alive = True
        print(f"{name}: built in {self.wait(LIMITS['build']).get('build_s', float('nan')):.0f} s", flush=True)

    def wait(self, limit: float) -> dict:
        ready, _, _ = select.select([self.answers], [], [], limit)
        line = self.answers.readline() if ready else ""
        if not line:
            print(f"{self.name}: no answer within {limit} s, exit code {self.process.poll()}", flush=True)
            self.is_alive = False
            self.process.kill()
            return {}
        return json.loads(line)

    def ask(self, limit: float, *command):
        if not self.is_alive:
            return None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        found = self.wait(limit)
        if "error" in found:
            print(f"{self.name}: {command}: {found['error']}", flush=True)
        return found.get("value")


def judge(path: str, out: pathlib.Path) -> None:
    """Compare what both engines said with Transformers in fp32, forced over the same texts."""
    # Transformers would take FLA's kernels; the judge is its plain torch code
    sys.modules["fla"] = None  # type: ignore[assignment]
    import torch
    from transformers import AutoTokenizer, Qwen3NextForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(path)
    said = {name: json.loads((out / f"answers-{name}.json").read_text()) for name in ("own", "gdn")}
    texts = {
        (name, n): tokenizer(text(n, 20 + 37 * n))["input_ids"] + tokens
        for name, found in said.items()
        for n, tokens in enumerate(found["tokens"])
    }
    forced: dict = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = Qwen3NextForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
        for key, tokens in texts.items():
            with torch.no_grad():
                logits = model(torch.tensor([tokens], device=device)).logits[0, -NEW - 1 : -1]
            picked = torch.tensor(tokens[-NEW:], device=device)[:, None]
            forced[dtype, key] = logits.double().log_softmax(-1).gather(1, picked)[:, 0].cpu()
        del model
    report = {}
    for name, found in said.items():
        engine, limit = [], []
        for n, tokens in enumerate(found["tokens"]):
            rows = [row[str(t)] for t, row in zip(tokens, found["logprobs"][n], strict=True)]
            right = forced[torch.float32, (name, n)]
            engine += (right - torch.tensor(rows).double()).abs().tolist()
            limit += (right - forced[torch.bfloat16, (name, n)]).abs().tolist()
        report[name] = {"mean": statistics.mean(engine), "limit": 2 * statistics.mean(limit)}
        report[name]["p99"] = sorted(engine)[int(0.99 * len(engine))]
        report[name]["limit_p99"] = 2 * sorted(limit)[int(0.99 * len(limit))]
    (out / "judge.json").write_text(json.dumps(report))


def compare(path: str, out: pathlib.Path) -> None:
    """Run both engines in turn, and print the tables."""
    workers = [Worker(path, name) for name in ("own", "gdn")]
    found: dict = {"rows": {name: {w.name: [] for w in workers} for name in ROWS}, "profile": {}}
    for worker in workers:
        answers = worker.ask(LIMITS["answers"], "answers")
        if answers:
            (out / f"answers-{worker.name}.json").write_text(json.dumps(answers))
            print(f"{worker.name}: answers repeat: {answers['same_twice']}", flush=True)
    for turn in range(ROUNDS + 1):
        for name in ROWS:
            for worker in workers if turn % 2 == 0 else workers[::-1]:
                seconds = worker.ask(LIMITS["row"], "row", name)
                # the first turn compiles and captures
                if seconds is not None and turn > 0:
                    found["rows"][name][worker.name].append(seconds)
        (out / "engine.json").write_text(json.dumps(found))
    for rows in (1, 64):
        for worker in workers:
            found["profile"][f"{worker.name} {rows}"] = worker.ask(LIMITS["profile"], "profile", rows)
    found["calls"] = {worker.name: worker.ask(LIMITS["row"], "calls") for worker in workers}
    (out / "engine.json").write_text(json.dumps(found))
    for worker in workers:
        worker.process.kill()


def print_tables(out: pathlib.Path) -> None:
    found = json.loads((out / "engine.json").read_text())
    for key, step in found["profile"].items():
        if step:
            times = f"{step['gpu_us']:.0f} us on the GPU, {step['wall_us']:.0f} us wall"
            print(f"decode step of {key} rows: {step['launches']:.1f} launches, {times}")
            for name, count, us in step["kernels"]:
                print(f"    {us:8.1f} us {count:6.1f} x {name}")
    print("calls", json.dumps(found["calls"]))
    if (out / "judge.json").exists():
        for name, row in json.loads((out / "judge.json").read_text()).items():
            verdict = "ok" if row["mean"] <= row["limit"] and row["p99"] <= row["limit_p99"] else "ABOVE"
            print(f"|log probability - fp32| of {name}: mean {row['mean']:.4f} (limit {row['limit']:.4f}), "
                  f"p99 {row['p99']:.3f} (limit {row['limit_p99']:.3f}): {verdict}")  # fmt: skip
    print(f"{'row':14}{'own tok/s':>12}{'gdn tok/s':>12}{'median ratio':>14}{'best ratio':>12}   goal")
    for name, times in found["rows"].items():
        count, length, new = ROWS[name]
        tokens = count * (length if name in PREFILL else new)
        if not all(times.values()):
            print(f"{name:14} not measured")
            continue
        median = {w: statistics.median(values) for w, values in times.items()}
        ratio, goal = median["own"] / median["gdn"], 1.1 if name in PREFILL else 1.0
        print(
            f"{name:14}{tokens / median['own']:12.0f}{tokens / median['gdn']:12.0f}{ratio:14.3f}"
            f"{min(times['own']) / min(times['gdn']):12.3f}   {goal} {'ok' if ratio >= goal else 'MISSED'}"
        )


def build(path: str) -> None:
    """Build lmdeploy's modules with gdn's classes in them, and load the weights, on a CPU."""
    import lmdeploy.pytorch.config
    from lmdeploy.pytorch.config import DistConfig, ModelConfig
    from lmdeploy.pytorch.models.patch import BuildModelContext, build_patched_model
    from lmdeploy.pytorch.weight_loader.model_weight_loader import load_model_weights

    from gdn.integrations.lmdeploy import CausalConv1d, GatedDeltaRule, patch_lmdeploy

    # it asks the GPU
    lmdeploy.pytorch.config.is_bf16_supported = lambda *args: True
    config = ModelConfig.from_pretrained(path, dtype="bfloat16", dist_config=DistConfig(), device_type="cuda")
    patch_lmdeploy()
    model = build_patched_model(config, device="cpu", build_model_ctx=BuildModelContext())
    load_model_weights(model, path, device="cpu")
    kinds = {type(m.gated_delta.impl) for m in model.modules() if hasattr(m, "gated_delta")}
    kinds |= {type(m.causal_conv1d_func.impl) for m in model.modules() if hasattr(m, "causal_conv1d_func")}
    assert all(issubclass(kind, (GatedDeltaRule, CausalConv1d)) for kind in kinds) and len(kinds) == 2
    print(f"built {type(model).__name__} with {sorted(kind.__name__ for kind in kinds)}")


def run_limited(limit: float, *arguments: str) -> None:
    """Run a step of this script in a process with a time limit."""
    try:
        code = subprocess.run([sys.executable, __file__, *arguments], timeout=limit).returncode
        print(f"{arguments[-1]}: exit code {code}", flush=True)
    except subprocess.TimeoutExpired:
        print(f"{arguments[-1]}: no end within {limit} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--model", default=str(pathlib.Path(tempfile.gettempdir()) / "qwen3-next-24x2048"))
    parser.add_argument("--steps", default="model,compare,judge,print")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--worker", choices=("own", "gdn"))
    parser.add_argument("--step", choices=("model", "judge"))
    args = parser.parse_args()
    if args.worker:
        return work(args.model, args.worker == "gdn")
    if args.step == "model":
        return make_model(pathlib.Path(args.model), args.layers, args.hidden)
    if args.step == "judge":
        return judge(args.model, args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = ("--layers", str(args.layers), "--hidden", str(args.hidden))
    common = ("--model", args.model, "--out", str(args.out), *sizes)
    for step in args.steps.split(","):
        start = time.perf_counter()
        if step in ("model", "judge"):
            run_limited(LIMITS[step], *common, "--step", step)
        elif step == "build":
            make_model(pathlib.Path(args.model), args.layers, args.hidden)
            build(args.model)
        elif step == "compare":
            compare(args.model, args.out)
        elif step == "print":
            print_tables(args.out)
        print(f"[{step}: {time.perf_counter() - start:.0f} s]", flush=True)
    return None


if __name__ == "__main__":
    main()
