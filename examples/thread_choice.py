"""Choose the number of CPU threads on a machine that other work may share.

OpenMP threads wait by spinning. On cores that other processes use, each parallel operation then waits until
the scheduler brings back the thread that was set aside: two threads beside other work on two cores took 45
minutes for a demo that one thread does in 5. On a quiet machine two threads take 0.6 of the time of one. So
both counts are timed before each part, and a run that becomes slow falls back to one thread.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

SIZE, OPERATIONS, ROUNDS = 192, 40, 5  # of the timed operations: products of the demo's width
WINDOW = 0.25  # seconds in which idle cores are counted
SLOWER = 4.0  # a round with several threads is given up after so many times what one thread takes
GAIN = 1.1  # how much faster several threads must be than one
COLLAPSE, STEPS = 3.0, 2  # so many steps in a row, each so many times the fastest one: other work has begun


@dataclass(frozen=True)
class ThreadChoice:
    """Hold a number of threads and its reasons. seconds: number of threads -> time of the slowest round."""

    threads: int
    default: int
    cores: int
    free: int
    seconds: dict[int, float]

    def __str__(self) -> str:
        text = f"{self.threads} of {self.default} threads: {self.free} of {self.cores} cores free"
        if self.seconds:
            timed = (f"{1e3 * x:.0f} ms with {n}" for n, x in sorted(self.seconds.items()))
            text += f", a test takes {' and '.join(timed)}"
        return text


class ThreadControl:
    """Set PyTorch's threads before each part of a run, and set one thread when its steps become slow."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show, self._default = show, torch.get_num_threads()
        self._threads, self._fastest, self._slow = 0, float("inf"), 0

    def choose(self) -> None:
        """Set the faster of 1 and the default number of threads; show a choice that differs from the last."""
        if self._default == 1:
            return
        choice = choose_threads(self._default)
        if choice.threads != self._threads:
            self._show(str(choice))
        self._set(choice.threads)

    def observe(self, seconds: float) -> None:
        """Note the seconds of one more step; set one thread where steps have become slow."""
        self._fastest = min(self._fastest, seconds)
        self._slow = self._slow + 1 if seconds > COLLAPSE * self._fastest else 0
        if self._threads > 1 and self._slow >= STEPS:
            factor = seconds / self._fastest
            self._show(f"1 of {self._default} threads: a step takes {factor:.0f} times as long as before")
            self._set(1)

    def _set(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._threads, self._fastest, self._slow = threads, float("inf"), 0


def choose_threads(default: int) -> ThreadChoice:
    """Return 1, or at most `default` threads and as many as cores are free, whichever is faster now."""
    cores, free = count_cores(), count_free_cores()
    several = max(1, min(default, free))
    seconds: dict[int, float] = {}
    if several > 1:
        seconds[1] = time_threads(1, float("inf"))
        seconds[several] = time_threads(several, SLOWER * seconds[1])
    is_faster = several > 1 and seconds[several] * GAIN < seconds[1]
    return ThreadChoice(several if is_faster else 1, default, cores, free, seconds)


def count_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_free_cores() -> int:
    """Return how many cores are idle while this process sleeps; all of them where no system file tells."""
    try:
        idle, every = cpu_times()
        time.sleep(WINDOW)
        later_idle, later_every = cpu_times()
    except (OSError, ValueError, IndexError):
        return count_cores()
    share = (later_idle - idle) / max(later_every - every, 1)
    return min(round(share * (os.cpu_count() or 1)), count_cores())


def cpu_times() -> tuple[int, int]:
    """Return the idle ticks and all ticks of all cores since the machine was started (Linux)."""
    line = Path("/proc/stat").read_text().splitlines()[0]
    # user, nice, system, idle, waiting for disks, interrupts (2), stolen by other virtual machines
    ticks = [int(word) for word in line.split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def time_threads(threads: int, limit: float) -> float:
    """Return the seconds of the slowest of some rounds of small operations; at most about `limit` a round."""
    x, before = torch.rand(6 * SIZE, SIZE), torch.get_num_threads()
    weight = torch.rand(SIZE, SIZE) / SIZE
    torch.set_num_threads(threads)
    slowest = 0.0
    try:
        for i in range(ROUNDS + 1):
            start = time.perf_counter()
            for _ in range(OPERATIONS):
                x = torch.tanh(x @ weight + x)
                if time.perf_counter() - start > limit:
                    break
            # the first round starts the threads
            slowest = max(slowest, time.perf_counter() - start) if i > 0 else 0.0
            if slowest > limit:
                break
    finally:
        torch.set_num_threads(before)
    return slowest
