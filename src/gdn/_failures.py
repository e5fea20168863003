"""Log failures of work that a call does not need, such as compiling before a launch does.

A call that needs the result later meets the same failure again, or takes longer. A fault of gdn itself would
switch such work off unseen, so each failure is logged, and fails the test that runs (`tests/conftest.py`).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("gdn.failures")


@contextmanager
def log_failure(work: str) -> Iterator[None]:
    """Log an exception of the context with its traceback, at level INFO, and go on after it."""
    try:
        yield
    except Exception:
        logger.info("%s failed, and is left out", work, exc_info=True)
