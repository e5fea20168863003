"""Compare lmdeploy's engine on its own kernels and on gdn's in many turns: do small batches differ?

    python docs/lab/2026-11-27-lmdeploy-engine-rounds.py --out DIR                  two rows, 25 turns
    python docs/lab/2026-11-27-lmdeploy-engine-rounds.py --out DIR --only 8x300+64 --rounds 40 --runs 8
    python docs/lab/2026-11-27-lmdeploy-engine-rounds.py --pretend                  no engine: times drawn

Six turns left the rows of small batches undecided, since runs of one side spread by 1.3 to 2.0 times
(2026-11-27-lmdeploy-engine-h100.md). Here each turn runs a row several times on both engines, one after the
other, and counts the median of each side; the order alternates by turn. The table has the median of the
turns' ratios, own time over gdn's, and a 95 % interval of that median (order statistics). A row is decided
if 1, or its goal, lies outside the interval. The model, the engines and the rows are those of
2026-11-25-lmdeploy-engine.py, and so is what must be importable. lmdeploy's engine is built and warmed alone,
because its kernels are autotuned. No turn begins that the seconds after both engines are built cannot hold.
"""

import argparse
import importlib.util
import json
import math
import pathlib
import random
import statistics
import tempfile
import time

SPEC = importlib.util.spec_from_file_location(
    "lmdeploy_engine", pathlib.Path(__file__).with_name("2026-11-25-lmdeploy-engine.py")
)
old = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(old)
ROWS = ("8x300+64", "1x64+256")  # those that six turns did not decide
SIDES = ("own", "gdn")
# seconds of a run as 2026-11-27-lmdeploy-engine-h100.md has them, for --pretend
PRETENDED = {
    "8x300+64": (0.275, 0.295), "1x64+256": (0.78, 0.88), "64x512+128": (1.06, 1.05),
    "128x128+128": (1.01, 0.89), "8x3000+1": (0.36, 0.27),
}  # fmt: skip


class Pretender:
    """Stand for an engine: draw its times, and advance a clock by them."""

    clock = 0.0

    def __init__(self, path, name):
        self.name, self.is_alive, self.draw = name, True, random.Random(name)

    def ask(self, limit, command, row):
        seconds = PRETENDED[row][SIDES.index(self.name)] * self.draw.lognormvariate(0, 0.15)
        Pretender.clock += seconds
        return seconds

    @classmethod
    def now(cls):
        return cls.clock


def median_of_runs(worker, row, runs):
    """Return the median seconds of some runs of a row; None if one has no time."""
    times = [worker.ask(old.LIMITS["row"], "row", row) for _ in range(runs)]
    return None if None in times else statistics.median(times)


def compare(make, now, asked):
    """Build the engines, run the turns; return {row: [(own, gdn) of each turn]} and the seconds of all."""
    workers = []
    for name in SIDES:
        workers.append(make(asked.model, name))
        # compiles, autotunes and captures; the other engine is not there yet, or waits
        for row in asked.only:
            median_of_runs(workers[-1], row, 2)
    start, longest, turns = now(), 0.0, {row: [] for row in asked.only}
    for turn in range(asked.rounds):
        begin = now()
        if begin - start + longest > asked.seconds:
            print(f"{turn} turns of {asked.rounds}: {asked.seconds:.0f} s do not hold another", flush=True)
            break
        for row in asked.only:
            order = workers if turn % 2 == 0 else workers[::-1]
            medians = {worker.name: median_of_runs(worker, row, asked.runs) for worker in order}
            if None not in medians.values():
                turns[row].append([medians[name] for name in SIDES])
        longest = max(longest, now() - begin)
        if not all(worker.is_alive for worker in workers):
            break
    return workers, turns, now() - start


def interval(ratios):
    """Return the smallest and largest of the order statistics that hold the median with 95 %."""
    n, tail, outside = len(ratios), 0.0, 0
    while outside < n // 2 and tail + math.comb(n, outside) / 2**n <= 0.025:
        tail += math.comb(n, outside) / 2**n
        outside += 1
    ordered = sorted(ratios)
    # with fewer than six turns the interval is all of them, and holds less than 95 %
    first = max(outside - 1, 0)
    return ordered[first], ordered[n - 1 - first]


def judged(turns, goal):
    """Return the median of the turns' ratios, its interval, and what these decide."""
    ratios = [own / ours for own, ours in turns]
    middle, (low, high) = statistics.median(ratios), interval(ratios)
    against_one = "gdn is faster" if low > 1 else "gdn is slower" if high < 1 else "no difference shown"
    of_goal = "met" if low >= goal else "missed" if high < goal else "undecided"
    return middle, low, high, against_one, of_goal


def print_table(found):
    print(f"{found['seconds']:.0f} s after both engines were built, {found['runs']} runs a turn")
    print(f"{'row':14}{'turns':>6}{'own tok/s':>11}{'gdn tok/s':>11}{'ratio':>8}   95 %")
    for row, turns in found["turns"].items():
        if not turns:
            print(f"{row:14} not measured")
            continue
        count, length, new = old.ROWS[row]
        tokens, goal = count * (length if row in old.PREFILL else new), 1.1 if row in old.PREFILL else 1.0
        own, ours = (tokens / statistics.median(times) for times in zip(*turns, strict=True))
        middle, low, high, against_one, of_goal = judged(turns, goal)
        print(
            f"{row:14}{len(turns):6}{own:11.0f}{ours:11.0f}{middle:8.3f}   {low:.3f} to {high:.3f}: "
            f"{against_one}; goal {goal} {of_goal}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--model", default=str(pathlib.Path(tempfile.gettempdir()) / "qwen3-next-24x2048"))
    parser.add_argument("--rounds", type=int, default=25, help="turns")
    parser.add_argument("--runs", type=int, default=5, help="runs of a row on each engine in a turn")
    parser.add_argument("--only", action="append", choices=list(old.ROWS), help="a row; may be repeated")
    parser.add_argument(
        "--seconds", type=float, default=500, help="of the turns, after the engines are built"
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--pretend", action="store_true")
    asked = parser.parse_args()
    asked.only = asked.only or list(ROWS)
    make, now = (Pretender, Pretender.now) if asked.pretend else (old.Worker, time.perf_counter)
    if not asked.pretend and not (pathlib.Path(asked.model) / "config.json").exists():
        sizes = ("--layers", str(asked.layers), "--hidden", str(asked.hidden))
        old.run_limited(old.LIMITS["model"], "--model", asked.model, *sizes, "--step", "model")
    workers, turns, seconds = compare(make, now, asked)
    found = {"turns": turns, "seconds": seconds, "runs": asked.runs}
    if not asked.pretend:
        found["calls"] = {w.name: w.ask(old.LIMITS["row"], "calls") for w in workers}
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "rounds.json").write_text(json.dumps(found))
        for worker in workers:
            worker.process.kill()
        print("calls", json.dumps(found["calls"]))
    print_table(found)


if __name__ == "__main__":
    main()
