"""Time the prompt of `generate` with recorded graphs, the first call, and the matmuls of a token, on a GPU.

    PYTHONPATH=src python docs/lab/2026-11-28-prompt-of-generate.py --part prompt      about 40 s
    PYTHONPATH=src python docs/lab/2026-11-28-prompt-of-generate.py --part matmuls     about 30 s
    PYTHONPATH=src python docs/lab/2026-11-28-prompt-of-generate.py --part first       about 40 s
    ... --cpu    a toy model with a stand-in for graphs: does the script work?

The model is that of 2026-11-27-generate.py. Profiles of Python go to $OUT/prompt-*.txt; tables are printed.

prompt: bits of replayed prompts beside runs; ms of 1 and 64 new tokens, replayed prompts off and on, in one
process; the GPU's time of a prompt; the memory of a recorded one; `get_compiled_call` with and without its
snapshot.
matmuls: us and GB/s of each product of one token in a CUDA graph, over copies of the weights that do not fit
in L2: F.linear, F.linear with cublasLt preferred, torch.mv, and a Triton kernel, which has other bits.
first: seconds of the first `generate` of a new process with an empty cache of Triton, kernels compiled
together or call after call.
"""

import argparse
import cProfile
import gc
import importlib.util
import io
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import triton
import triton.language as tl
from torch.profiler import ProfilerActivity, profile

SPEC = importlib.util.spec_from_file_location("generate", Path(__file__).with_name("2026-11-27-generate.py"))
lines = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lines)
REPEATS = 7
COLD = 200e6  # bytes of weights that a graph reads before it reads one again; L2 has 50 MB


def use_stand_in():
    """Record nothing: a replay runs the step again."""
    import transformers

    from gdn.integrations import transformers_graphs as graphing

    def record(run, pool):
        output = transformers.modeling_outputs.CausalLMOutputWithPast()

        def replay():
            output["logits"] = run().logits

        return replay, output

    graphing.DEVICES, graphing.record = ("cpu",), record
    torch.cuda.synchronize = lambda *args: None


class Lab:
    """Hold the model, and run `generate` on prompts of its length."""

    def __init__(self, device):
        self.device, self.size = device, lines.TOY if device == "cpu" else lines.FULL
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.model = lines.build(device, dtype, **self.size)
        self.more = {}
        if device == "cpu":
            import transformers

            self.more["compile_config"] = transformers.CompileConfig()
            self.more["compile_config"]._compile_all_devices = True

    def prompt(self, seed=1, rows=1):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, self.size["vocab"], (rows, self.size["prompt"]), generator=generator).to(
            self.device
        )

    def __call__(self, new, seed=1, **more):
        return lines.generate(self.model, self.prompt(seed), "static", new, **{**self.more, **more})

    def timed(self, new):
        lines.wait(self.device)
        start = time.perf_counter()
        self(new)
        lines.wait(self.device)
        return 1e3 * (time.perf_counter() - start)

    def check(self):
        """Return True if replayed prompts have the tokens and bits of runs, with and without padding."""
        more = {
            "output_logits": True,
            "return_dict_in_generate": True,
            "max_new_tokens": 8,
            "min_new_tokens": 8,
        }
        answers = []
        for padding in (0, 100 if self.device == "cuda" else 9):
            for seed in range(6):
                ids = self.prompt(seed)
                mask = torch.ones_like(ids)
                mask[:, :padding] = 0
                given = {"attention_mask": mask, "do_sample": False, "cache_implementation": "static", **more}
                one = self.model.generate(ids, **given, **self.more)
                other = self.model.generate(ids, **given, disable_compile=True)
                same = torch.equal(one.sequences, other.sequences)
                answers.append(
                    same and all(torch.equal(x, y) for x, y in zip(one.logits, other.logits, strict=True))
                )
                del one, other
                gc.collect()
        return all(answers)


def write_profile(lab, name, new):
    python = cProfile.Profile()
    python.enable()
    lab(new)
    lines.wait(lab.device)
    python.disable()
    text = io.StringIO()
    for key in ("cumtime", "tottime"):
        pstats.Stats(python, stream=text).sort_stats(key).print_stats(40)
    folder = Path(os.environ.get("OUT") or tempfile.gettempdir())
    (folder / f"prompt-{name}.txt").write_text(text.getvalue())
    own = io.StringIO()
    pstats.Stats(python, stream=own).sort_stats("tottime").print_stats(12)
    rows = own.getvalue().splitlines()
    first = next((i for i, row in enumerate(rows) if "ncalls" in row), 0)
    print(f"Python of {new} new tokens, {name}:", *(row[:120] for row in rows[first : first + 13]), sep="\n")


def gpu_time(lab, new):
    """Return the number of kernels of a `generate`, and the sum of their times in ms."""
    if lab.device == "cpu":
        return 0, 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as kernels:
        lab(new)
        torch.cuda.synchronize()
    times = [x.device_time_total for x in kernels.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    return len(times), sum(times) / 1e3


def time_prompt(device):
    import gdn
    from gdn.integrations import transformers_graphs as graphing
    from gdn.integrations import transformers_prompts as prompting

    lab, most = Lab(device), prompting.MOST_TOKENS
    table = []
    with gdn.patch_transformers(graphs=True):
        for name, tokens in (("runs", 0), ("replays", most)):
            prompting.MOST_TOKENS = tokens
            before = torch.cuda.memory_reserved() if device == "cuda" else 0
            firsts = [lab.timed(64 if device == "cuda" else 8) for _ in range(4)]
            after = torch.cuda.memory_reserved() if device == "cuda" else 0
            one = sorted(lab.timed(1) for _ in range(REPEATS))
            new = 64 if device == "cuda" else 8
            both = sorted(lab.timed(new) for _ in range(REPEATS))
            count, kernels = gpu_time(lab, 1)
            table.append(
                f"{name:8s} 1 token {median(one):6.1f} ms ({one[0]:.1f} to {one[-1]:.1f}), {new} tokens "
                f"{median(both):6.1f} ms ({both[0]:.1f} to {both[-1]:.1f}): {1e3 * new / median(both):5.0f} "
                f"tokens/s; {count} kernels of 1 token {kernels:.2f} ms; first calls "
                f"{', '.join(f'{x:.0f}' for x in firsts)} ms, {(after - before) / 2**20:.0f} MiB reserved"
            )
            write_profile(lab, name, 1)
        call = graphing._calls[lab.model]
        kinds = list(call.prompt_kinds.values())
        recorded = [len(x.prompts) for group in call.recordings.values() for x in group]
        costs = []
        for seen in (graphing.GraphedCall.has_seen, lambda self, model: False):
            graphing.GraphedCall.has_seen, kept = seen, graphing.GraphedCall.has_seen
            times = []
            for _ in range(30):
                start = time.perf_counter()
                lab.model.get_compiled_call(None)
                times.append(1e3 * (time.perf_counter() - start))
            costs.append(median(times))
            graphing.GraphedCall.has_seen = kept
        print(f"replayed prompts have the bits of runs: {lab.check()}", flush=True)
    print(f"recorded prompts {recorded}, refused {[x.is_refused for x in kinds]}")
    print("get_compiled_call {:.2f} ms, {:.2f} without the snapshot".format(*costs))
    print(*table, sep="\n")


@triton.jit
def matvec(w_ptr, x_ptr, y_ptr, N, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr):
    """Compute y = W x for one x; a CTA has R rows of W [N, K]."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    total = tl.zeros([R, BK], tl.float32)
    for k in tl.static_range(0, K, BK):
        columns = k + tl.arange(0, BK)
        w = tl.load(w_ptr + rows[:, None] * K + columns[None, :], mask=rows[:, None] < N, other=0.0)
        total += w.to(tl.float32) * tl.load(x_ptr + columns).to(tl.float32)[None, :]
    tl.store(y_ptr + rows, tl.sum(total, 1).to(y_ptr.dtype.element_ty), mask=rows < N)


def by_triton(w, x, tiling):
    R, BK, warps = tiling
    y = torch.empty(w.shape[0], device=w.device, dtype=w.dtype)
    matvec[(-(-w.shape[0] // R),)](w, x, y, *w.shape, R, BK if w.shape[1] % BK == 0 else 512, num_warps=warps)
    return y


TILINGS = ((1, 2048, 4), (2, 2048, 4), (4, 2048, 8), (8, 1024, 8), (16, 512, 8))
SHAPES = {  # rows and columns of the weights, and how many a token has; several: one product each
    "qkv | z": ([8192, 4096], 2048, 18),
    "qkv+z": ([12288], 2048, 18),
    "b | a": ([32, 32], 2048, 18),
    "out": ([2048], 4096, 24),
    "q | k | v": ([8192, 1024, 1024], 2048, 6),
    "q+k+v": ([10240], 2048, 6),
    "gate | up": ([6144, 6144], 2048, 24),
    "gate+up": ([12288], 2048, 24),
    "down": ([2048], 6144, 24),
    "lm_head": ([32768], 2048, 1),
}


def graph_time(run, count):
    """Return us of each of `count` products of run(), in a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / count)
    return median(times)


def time_side(call, weights, x, exact):
    """Return us of the products of x with the weights of one layer, and their error beside fp64."""
    ys = [call(w, x) for w in weights[0]]
    error = max(((y.double().view(-1) - e).norm() / e.norm()).item() for y, e in zip(ys, exact, strict=True))
    if not x.is_cuda:
        return 0.0, error
    return graph_time(lambda: [call(w, x) for group in weights for w in group], len(weights)), error


def time_matmuls(device):
    linear = torch.nn.functional.linear
    sides = {
        "F.linear": lambda w, x: linear(x, w),
        "cublasLt": lambda w, x: linear(x, w),
        "mv": lambda w, x: torch.mv(w, x[0]),
    }
    print(
        f"{'us (GB/s)':12s}"
        + "".join(f"{side:>17s}" for side in (*sides, "triton"))
        + "   R, BK, warps; errors"
    )
    sums = dict.fromkeys((*sides, "triton"), 0.0)
    for name, (rows, K, number) in SHAPES.items():
        if device == "cpu":
            rows, K = [x // 32 for x in rows], K // 32
        size = 2 * K * sum(rows)
        copies = min(256, max(2, int(COLD // size) + 1)) if device == "cuda" else 2
        torch.manual_seed(0)
        given = {"device": device, "dtype": torch.bfloat16}
        weights = [[torch.randn(n, K, **given) * K**-0.5 for n in rows] for _ in range(copies)]
        x = torch.randn(1, K, **given)
        exact = [w.double() @ x[0].double() for w in weights[0]]
        cells = {}
        for side, call in sides.items():
            if device == "cuda":
                torch.backends.cuda.preferred_blas_library("cublaslt" if side == "cublasLt" else "cublas")
            cells[side] = time_side(call, weights, x, exact)
        note = ""
        if device == "cuda":
            found = {
                tiling: time_side(lambda w, x, t=tiling: by_triton(w, x, t), weights, x, exact)
                for tiling in TILINGS
            }
            best = min(found, key=found.get)
            cells["triton"] = found[best]
            note = f"   {best}; " + ", ".join(f"{error:.1e}" for _, error in cells.values())
        for side, (us, _) in cells.items():
            sums[side] += number * us if "+" not in name else 0.0
        row = "".join(f"{us:9.2f} ({size / us / 1e3 if us else 0:5.0f}) " for us, _ in cells.values())
        print(f"{name:12s}{row}{note}", flush=True)
        del weights
    print("a token's, not joined: " + ", ".join(f"{side} {us:.0f} us" for side, us in sums.items()))


def first_call(device, together):
    import gdn
    from gdn.integrations import transformers_compile as compiling

    if not together:
        compiling.DEVICES = ()
    lab, counts, names = Lab(device), [], []
    # called for each binary, compiled or loaded from Triton's cache
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **rest: names.append(fn.name.split(".")[-1])
    compile_them = compiling.compile_together

    def counted(*given):
        start = time.perf_counter()
        counts.append((compile_them(*given), time.perf_counter() - start))
        return counts[-1][0]

    from gdn.integrations import transformers_prompts as prompting

    prompting.compile_together = counted
    new = 64 if device == "cuda" else 8
    with gdn.patch_transformers(graphs=True):
        first = lab.timed(new)
        later = names[counts[0][0] :]
        second, third, fourth = (lab.timed(new) for _ in range(3))
    ((number, seconds),) = counts
    side = "together" if together else "in turn"
    print(
        f"{side:9s} first {first / 1e3:5.2f} s, {seconds:.2f} of it to compile {number} kernels at once; "
        f"then {second:.0f}, {third:.0f}, {fourth:.0f} ms",
    )
    print("    compiled later:", ", ".join(later) or "nothing", flush=True)


def time_first_calls(cpu):
    for name in ("together", "in turn", "together"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--part", name, *(["--cpu"] if cpu else [])]
            environment = {**os.environ, "TRITON_CACHE_DIR": folder}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
            print(done.stdout.strip() or done.stderr.strip()[-800:], flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", required=True, help="prompt, matmuls, first")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.cpu else "cuda"
    if args.part == "matmuls":
        return time_matmuls(device)
    if args.part == "first":
        return time_first_calls(args.cpu)
    sys.modules["fla"] = None
    if args.cpu:
        use_stand_in()
    if args.part == "prompt":
        return time_prompt(device)
    return first_call(device, args.part == "together")


if __name__ == "__main__":
    main()
