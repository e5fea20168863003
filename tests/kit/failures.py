"""Keep what `log_failure` logs in any thread, and name the test whose background work failed in a later one.

`gdn.backends.triton.launch` compiles in the background after the call that adds the work. Waiting for it at
the end of each test would take seconds, and without it later tests would compile the same kernels themselves.
"""

import logging
import re
import sys
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any


class Failures(logging.Handler):
    """Keep the texts of failures, each with its traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        # the test that added a job of the background, by the job's key, while the job has not ended
        self.tests: dict[Hashable, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; one of the background gets the name of the test that added the work."""
        text, background = logging.Formatter().format(record), self._background()
        if background is not None and threading.current_thread() is background._thread:
            test = self.tests.get(background._running)
            text = text if test is None else f"work that {test} has added: {text}"
        self.texts.append(text)

    @contextmanager
    def expects(self, *patterns: str) -> Iterator[None]:
        """Assert that as many failures as patterns are logged in the context, in this order; drop them."""
        count = len(self.texts)
        yield
        logged, self.texts[count:] = self.texts[count:], []
        matches = [re.search(*pair, re.DOTALL) for pair in zip(patterns, logged, strict=False)]
        if len(logged) != len(patterns) or not all(matches):
            raise AssertionError("\n".join([f"expected the failures {list(patterns)}, got:", *logged]))

    def end(self, test: str) -> list[str]:
        """Note which work that has not ended is of this test; return the texts so far, and drop them."""
        background = self._background()
        with nullcontext() if background is None else background._changed:
            pending = [] if background is None else [*background._waiting, background._running]
            self.tests = {key: self.tests.get(key, test) for key in pending if key is not None}
            texts, self.texts = self.texts, []
        return texts

    @staticmethod
    def _background() -> Any:
        # a test without kernels does not import Triton
        launches = sys.modules.get("gdn.backends.triton.launch.launches")
        return None if launches is None else vars(launches).get("BACKGROUND")
