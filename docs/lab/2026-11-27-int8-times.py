"""Check and time histories on states in int8 on a GPU, beside plain `decode` in bf16 and histories on int16.

    PYTHONPATH=src python docs/lab/2026-11-27-int8-times.py [--rows 64 128 256]   checks, then times
    PYTHONPATH=src python docs/lab/2026-11-27-int8-times.py --check               only the checks
    PYTHONPATH=src python docs/lab/2026-11-27-int8-times.py --cpu                 toy sizes: does it work?

check: relative RMS errors in 1e-3 of o and of the states after the last fold against the recurrence in fp64,
       over four cycles of folds with rows at different cursors; histories on int8 with and without the
       remainder of 4 bits, on int16 and on bf16. With T tokens a call 0 to T of them are kept.
time:  us per token of 16/32 heads of 128 x 128 from CUDA graphs of one cycle of folds (places - 1 calls) on
       as many layers as make 400 MB of states, so that states come from HBM; the graphs in turns, median of
       15. In brackets over `decode` in bf16. Goal at 256 rows: int8 with its remainder at most 0.45.
"""

import argparse
import importlib.util
import time
from pathlib import Path

import torch

import gdn

SPEC = importlib.util.spec_from_file_location(
    "history_of_floats", Path(__file__).with_name("2026-11-25-decode-with-history.py")
)
old = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(old)
GOAL, AT = 0.45, 256
FORMS = {  # dtype of the states, places of a history (None: `decode`), has a remainder
    "decode bf16": (torch.bfloat16, None, False),
    "int8 @16": (torch.int8, 16, True),
    "int8 @32": (torch.int8, 32, True),
    "int8 alone @16": (torch.int8, 16, False),
    "int16 @16": (torch.int16, 16, False),
    "bf16 @16": (torch.bfloat16, 16, False),
}
# of o and of the states, in 1e-3: at most 1.6 times what `eager` has on a CPU at K = V = 128
LIMITS = {"int8": (10.0, 4.0), "int8 alone": (12.0, 15.0), "int16": (5.0, 3.0), "bf16": (5.0, 5.0)}
CHECKS = [(1, 16, 1), (70, 16, 1), (70, 32, 1), (70, 16, 4), (70, 32, 16), (9, 8, 3)]  # rows, places, T


class Run:
    """Hold the device, the backend and the sizes of a run."""

    def __init__(self, is_toy):
        self.device, self.backend = ("cpu", "eager") if is_toy else ("cuda", "triton")
        self.turns, self.bytes = (3, 0) if is_toy else (15, 400 * 2**20)
        if is_toy:
            old.H, old.HV, old.D = 1, 2, 32
            old.HEADS.update(num_k_heads=1, num_v_heads=2, head_k_dim=32, head_v_dim=32)
        self.where = old.ENGINE | {"backend": self.backend}

    def draw(self, B, T):
        """Return tokens and gates of a call in bf16, with decays like those of a model."""
        make, H, HV, D = {"dtype": torch.bfloat16, "device": self.device}, old.H, old.HV, old.D
        x = {"q": torch.randn(B, T, H, D, **make), "k": torch.randn(B, T, H, D, **make)}
        x |= {"v": torch.randn(B, T, HV, D, **make), "a": torch.randn(B, T, HV, **make) - 3}
        rest = {name: torch.zeros(HV, device=self.device) for name in ("A_log", "dt_bias")}
        return x | {"b": torch.randn(B, T, HV, **make)} | rest

    def pool(self, form, B, room=1):
        """Return a pool of B slots with random states: a tensor for `decode`, else a HistoryPool."""
        dtype, places, has_remainder = form
        S = torch.randn(B, old.HV, old.D, old.D, device=self.device) / 16
        if places is None:
            return S.to(dtype)
        pool = gdn.allocate_history_pool(
            B, **old.HEADS, places=places, room=room, state_dtype=dtype, with_remainder=has_remainder,
            state_v_first=True, device=self.device,
        )  # fmt: skip
        pool.write(torch.arange(B, device=self.device), S, state_v_first=True)
        return pool

    def check(self, B, places, T):
        """Return lines of errors; each form has its own exact states, which begin as its rounded ones."""
        return [self.check_form(name, B, places, T) for name in LIMITS]

    def check_form(self, name, B, places, T):
        torch.manual_seed(0)
        dtype = getattr(torch, {"bf16": "bfloat16"}.get(name, name.partition(" ")[0]))
        pool = self.pool((dtype, places, name == "int8"), B, T)
        everything = torch.arange(B, device=self.device)
        exact = pool.read(everything, state_v_first=True).double()
        pool.cursor[:, 0] = (everything % places).int()
        slots = torch.randperm(B, device=self.device).int()
        order, last, worst = slots.long(), None, 0.0
        kept = torch.zeros(B, dtype=torch.int32, device=self.device)
        for _ in range(4 * places // T + 3):
            if T > 1 and last is not None:
                # the drafts that the last call kept
                S, new = exact[order], exact[order].clone()
                for t in range(T):
                    _, S = old.recurrence(S, last, t)
                    new[kept == t + 1] = S[kept == t + 1]
                exact[order] = new
            x, S, want = self.draw(B, T), exact[order], []
            for t in range(T):
                o, S = old.recurrence(S, x, t)
                want.append(o)
            drafts = {"num_accepted": kept.clone()} if T > 1 else {"use_history": True}
            o = gdn.decode_with_history(**x, pool=pool, read_index=slots, **self.where, **drafts)
            worst = max(worst, old.error(o, torch.stack(want, 1)))
            if T == 1:
                exact[order] = S
            last, kept = x, torch.randint(0, T + 1, (B,), device=self.device, dtype=torch.int32)
        folded = {"num_accepted": torch.zeros_like(kept)} if T > 1 else {}
        gdn.fold_history(pool, slots, state_v_first=True, backend=self.backend, **folded)
        end = old.error(pool.read(everything, state_v_first=True), exact)
        limits = LIMITS[name]
        is_right = worst < limits[0] and end < limits[1] and not pool.cursor[:, 1:].any()
        return f"  {name}: o {worst:.2f} S {end:.2f}  {'ok' if is_right else 'WRONG'}"

    def calls(self, form, B):
        """Return the calls of one cycle of folds, each row's fold in one of them, and their pools."""
        dtype, places, _ = form
        layers = max(1, -(-self.bytes // (B * old.HV * old.D * old.D * dtype.itemsize)))
        pools, x = [self.pool(form, B) for _ in range(layers)], self.draw(B, 1)
        where = {"read_index": torch.randperm(B, device=self.device).int(), **self.where}
        where["out"] = torch.empty(B, 1, old.HV, old.D, dtype=torch.bfloat16, device=self.device)
        if places is None:
            return [lambda p=p: gdn.decode(**x, state=p, **where) for p in pools * 4]
        for pool in pools:
            pool.cursor[:, 1] = (torch.arange(B, device=self.device) % (places - 1)).int()
        return [
            lambda p=p: gdn.decode_with_history(**x, pool=p, use_history=True, **where)
            for p in pools * (places - 1)
        ]

    def record(self, calls):
        """Return a function that runs some calls: the replay of a CUDA graph on a GPU."""

        def run():
            for call in calls:
                call()

        run()
        if self.device == "cpu":
            return run
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        return graph.replay

    def seconds(self, run):
        """Return the seconds of a run, by events on a GPU."""
        if self.device == "cpu":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def time(self, B):
        """Return a line of the us per token of B rows in each form."""
        recorded = {}
        for name, form in FORMS.items():
            calls = self.calls(form, B)
            recorded[name] = self.record(calls), len(calls), calls
        times = {name: [] for name in FORMS}
        for _ in range(self.turns):
            for name, (run, count, _) in recorded.items():
                times[name].append(self.seconds(run) / count)
        median = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
        share = {name: s / median["decode bf16"] for name, s in median.items()}
        line = "  ".join(f"{name} {s * 1e6:.2f} ({share[name]:.2f})" for name, s in median.items())
        if B == AT:
            line += f"  goal {GOAL}: {'ok' if share['int8 @16'] <= GOAL else 'MISSED'}"
        return line


def main():
    """Print the lines of each check, and a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128, 256])
    asked = parser.parse_args()
    run = Run(asked.cpu)
    print("toy" if asked.cpu else torch.cuda.get_device_name(), torch.__version__, flush=True)
    for case in CHECKS[-2:] if asked.cpu else CHECKS:
        print("check {} rows, {} places, T={}".format(*case), flush=True)
        print("\n".join(run.check(*case)), flush=True)
    for B in () if asked.check else [4] if asked.cpu else asked.rows:
        print(f"time B={B}:", run.time(B), flush=True)
        if not asked.cpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
