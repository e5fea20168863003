"""Compile binaries that no call waits for, in one thread that starts when no call compiles any more.

The thread holds Python's GIL while it traces a kernel, a tenth to half of a second. So it traces one kernel
after another, none while a call compiles its own, and none in the second after that: the first calls of a
process come one after another. It allocates no memory of the GPU and launches nothing, so that a CUDA graph
may be captured meanwhile. A binary is loaded onto the GPU where it is launched first.
"""

import atexit
import os
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Thread
from typing import Generic, TypeVar

from gdn._failures import log_failure

Job = TypeVar("Job")
QUIET = 1.0  # seconds after the last call that compiled


class Background(Generic[Job]):
    """Run jobs one after another in a thread, each known by a key. The thread ends with the last job."""

    def __init__(self, run: Callable[[Job], object]) -> None:
        self._run_one = run
        self._changed = Condition()
        self._waiting: dict[Hashable, Job] = {}
        self._running: Hashable = None
        self._num_calls = 0  # calls that compile now
        self._quiet_from = 0.0
        self._thread: Thread | None = None
        atexit.register(self.stop)
        # a forked process has no thread, and a lock that the thread may have held
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Start anew, without jobs."""
        self._changed, self._waiting = Condition(), {}
        self._running = self._thread = None
        self._num_calls = 0

    def add(self, jobs: dict[Hashable, Job]) -> None:
        """Run jobs later, after those that were added before."""
        with self._changed:
            self._waiting |= jobs
            # the call that adds them has its own to compile
            self._quiet_from = time.monotonic() + QUIET
            if self._thread is None and self._waiting:
                # a daemon: `stop` ends it before the interpreter does
                thread = Thread(target=self._run, name="gdn compiles ahead", daemon=True)
                # where the system starts no more threads, jobs wait for `take`
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    @contextmanager
    def call(self, keys: Collection[Hashable]) -> Iterator[None]:
        """Start no job while the context, in which a caller runs the jobs of these keys itself, is open.

        If one of them runs already, wait for its end.
        """
        with self._changed:
            self._num_calls += 1
        try:
            with self._changed:
                for key in keys:
                    self._waiting.pop(key, None)
                self._changed.wait_for(lambda: self._running is None or self._running not in keys)
            yield
        finally:
            with self._changed:
                self._num_calls -= 1
                self._quiet_from = time.monotonic() + QUIET
                self._changed.notify_all()

    def take(self) -> list[Job]:
        """Remove and return all jobs that have not begun, after the end of the one that has."""
        with self._changed:
            jobs = list(self._waiting.values())
            self._waiting.clear()
            self._changed.wait_for(lambda: self._running is None)
            # a thread that waits for its turn finds no job
            self._changed.notify_all()
        return jobs

    def stop(self) -> None:
        """Run no more jobs, and wait for the end of the thread: the interpreter ends."""
        self.take()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            # what raises here is compiled again, and raises again, where it is launched
            with log_failure("a compilation in the background"):
                self._run_one(job)
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _next(self) -> Job | None:
        """Return the next job when it may run; None if there is none."""
        with self._changed:
            while self._waiting:
                pause = self._quiet_from - time.monotonic()
                if self._num_calls == 0 and pause <= 0:
                    self._running = next(iter(self._waiting))
                    return self._waiting.pop(self._running)
                self._changed.wait(pause if self._num_calls == 0 else None)
            self._thread = None
            return None
