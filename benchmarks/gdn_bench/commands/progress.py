"""Show the progress of a long command: bars on a terminal, elsewhere a line about every ten seconds.

    train 120/220, loss 2.31, 45 s, about 38 s left

Both go to stderr, so that `--json -` stays clean.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

Report = Callable[[str, int, int | None, str], None]  # part, steps done, steps in all if known, a note
INTERVAL = 10.0  # seconds between two lines
NOTE_WIDTH = 60  # characters of a note that a bar or a line shows


@contextmanager
def show_progress(status: Console) -> Iterator[Report]:
    """Yield a function that reports progress: bars if stderr is a terminal, else lines."""
    if not sys.stderr.isatty():
        with LineReport() as lines:
            yield lines
        return
    # a long note is cut, never the count or the times
    note = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        TextColumn("{task.description}", markup=False, table_column=note), BarColumn(16),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=status, expand=True) as bars:

        def report(part: str, done: int, total: int | None, note: str) -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(part, total=total)
            bars.update(tasks[part], completed=done, description=f"{part} {note[:NOTE_WIDTH]}")

        yield report


class LineReport:
    """Print the progress of the current part at its start, about every `interval` seconds, and at its end.

    A thread prints, so that a line appears while a single step takes minutes.
    """

    def __init__(self, interval: float = INTERVAL, stream: TextIO | None = None) -> None:
        self._interval, self._stream = interval, stream
        self._part, self._done, self._note = "", 0, ""
        self._total: int | None = None
        self._start, self._first, self._printed = 0.0, 0, 0.0
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._print_regularly, daemon=True)

    def __enter__(self) -> "LineReport":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def __call__(self, part: str, done: int, total: int | None, note: str) -> None:
        """Note how far a part is. A new part and the end of one are printed at once."""
        with self._lock:
            is_new = part != self._part
            is_end = done == total and (is_new or self._done != total)
            if is_new:
                self._part, self._start, self._first = part, time.monotonic(), done
            self._done, self._total, self._note = done, total, note
            if is_new or is_end:
                self._print()

    def _print_regularly(self) -> None:
        while not self._ended.wait(self._interval / 10):
            with self._lock:
                if self._part and time.monotonic() - self._printed >= self._interval:
                    self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        line = progress_line(
            self._part, self._done, self._total, self._note, self._printed - self._start, self._first
        )
        print(line, file=self._stream or sys.stderr, flush=True)


def progress_line(part: str, done: int, total: int | None, note: str, seconds: float, first: int = 0) -> str:
    """Return one line of progress. first: the steps that were done when `seconds` began.

    >>> progress_line("train", 120, 220, "loss 2.31", 45.0)
    'train 120/220, loss 2.31, 45 s, about 38 s left'
    """
    count = f" {done}/{total}" if total is not None else f" {done}" if done else ""
    words = [part + count, note[:NOTE_WIDTH], format_duration(seconds)]
    if total is not None and first < done < total:
        words.append(f"about {format_duration(seconds * (total - done) / (done - first))} left")
    return ", ".join(word for word in words if word)


def format_duration(seconds: float) -> str:
    """Return a duration as people write it.

    >>> format_duration(45.2), format_duration(200)
    ('45 s', '3 min 20 s')
    """
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"
