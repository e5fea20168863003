"""Compare lmdeploy's engine on its own kernels and on gdn's: five rows, with the idle engine stopped.

    python docs/lab/2026-11-28-lmdeploy-five-rows.py --out DIR        about 8 minutes on an H200

Fourteen turns left small batches undecided, as medians of one side spread by two times
(2026-11-27-lmdeploy-engine-rounds.md). Kernels cannot do that, so it is the host: here the engine that does
not run is stopped (SIGSTOP), and each engine has half of the cores to itself. Short rows run three times in a
turn, long ones once. The table has, for each row, the median of the turns' ratios (own time over gdn's), its
95 % interval, and the ratio of the medians of each side's fastest quarter of runs. Then the texts of both are
judged in fp32 as in 2026-11-25-lmdeploy-engine.py. The rest is 2026-11-27-lmdeploy-engine-rounds.py.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import signal
import statistics
import tempfile
import time

SPEC = importlib.util.spec_from_file_location(
    "lmdeploy_rounds", pathlib.Path(__file__).with_name("2026-11-27-lmdeploy-engine-rounds.py")
)
rounds = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(rounds)
RUNS = {"8x300+64": 3, "64x512+128": 1, "128x128+128": 1, "8x3000+1": 3, "1x64+256": 3}


class AloneWorker(rounds.old.Worker):
    """Stop the engine's process wherever it is not asked."""

    def settle(self):
        """Keep to half of the cores from now on, and stop."""
        cores = sorted(os.sched_getaffinity(0))
        half = cores[: len(cores) // 2] if self.name == "own" else cores[len(cores) // 2 :]
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), half)
        self.process.send_signal(signal.SIGSTOP)

    def ask(self, limit, *command):
        if self.is_alive:
            self.process.send_signal(signal.SIGCONT)
        answer = super().ask(limit, *command)
        if self.is_alive:
            self.process.send_signal(signal.SIGSTOP)
        return answer


def turn(workers, row, runs):
    """Return each side's seconds of some runs, alternating."""
    times = {worker.name: [] for worker in workers}
    for _ in range(runs):
        for worker in workers:
            times[worker.name].append(worker.ask(rounds.old.LIMITS["row"], "row", row))
    return times


def fastest(times):
    """Return the median of the fastest quarter of all runs."""
    return statistics.median(sorted(times)[: max(1, len(times) // 4)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--model", default=str(pathlib.Path(tempfile.gettempdir()) / "qwen3-next-24x2048"))
    parser.add_argument("--seconds", type=float, default=200, help="of the turns")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    old = rounds.old
    if not (pathlib.Path(asked.model) / "config.json").exists():
        old.run_limited(old.LIMITS["model"], "--model", asked.model, "--step", "model")
    workers = []
    for name in rounds.SIDES:
        workers.append(AloneWorker(asked.model, name))
        start = time.perf_counter()
        for row in RUNS:
            turn(workers[-1:], row, 2)  # compiles, autotunes and captures
        workers[-1].settle()
        print(f"{name}: warmed in {time.perf_counter() - start:.0f} s", flush=True)
    start, longest, number = time.perf_counter(), 0.0, 0
    turns = {row: [] for row in RUNS}
    while time.perf_counter() - start + longest < asked.seconds and all(w.is_alive for w in workers):
        begin = time.perf_counter()
        for row, runs in RUNS.items():
            times = turn(workers if number % 2 == 0 else workers[::-1], row, runs)
            if not any(None in values for values in times.values()):
                turns[row].append([times[name] for name in rounds.SIDES])
        longest, number = max(longest, time.perf_counter() - begin), number + 1
        (asked.out / "five-rows.json").write_text(json.dumps(turns))
    calls = {worker.name: worker.ask(old.LIMITS["row"], "calls") for worker in workers}
    for worker in workers:
        answers = worker.ask(old.LIMITS["answers"], "answers")
        (asked.out / f"answers-{worker.name}.json").write_text(json.dumps(answers))
        print(f"{worker.name}: answers repeat: {answers and answers['same_twice']}")
        worker.process.kill()
    for name, counted in calls.items():
        if counted:
            served = sum(entry[-1] for entry in counted["served"])
            rejected = sum(entry[-1] for entry in counted["rejected"])
            print(f"{name}: served {served}, rejected {rejected}")
    print(f"{'row':14}{'turns':>6}{'own tok/s':>11}{'gdn tok/s':>11}{'ratio':>8}   95 %            fastest")
    for row, pairs in turns.items():
        if not pairs:
            print(f"{row:14} not measured")
            continue
        count, length, new = old.ROWS[row]
        tokens, goal = count * (length if row in old.PREFILL else new), 1.1 if row in old.PREFILL else 1.0
        own, ours = ([t for pair in pairs for t in pair[side]] for side in (0, 1))
        medians = [tuple(statistics.median(side) for side in pair) for pair in pairs]
        middle, low, high, against_one, of_goal = rounds.judged(medians, goal)
        speeds = [tokens / statistics.median(side) for side in (own, ours)]
        print(
            f"{row:14}{len(pairs):6}{speeds[0]:11.0f}{speeds[1]:11.0f}{middle:8.3f}   "
            f"{low:.3f} to {high:.3f}   {fastest(own) / fastest(ours):.3f}   "
            f"{against_one}; goal {goal} {of_goal}",
            flush=True,
        )
    old.run_limited(old.LIMITS["judge"], "--model", asked.model, "--out", str(asked.out), "--step", "judge")
    print((asked.out / "judge.json").read_text())


if __name__ == "__main__":
    main()
