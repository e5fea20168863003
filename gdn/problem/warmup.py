"""What `warmup` is asked for, checked."""

from collections.abc import Collection
from typing import Any


def check_engines(engines: Any, known: Collection[str]) -> None:
    """TypeError unless engines is a sequence of names, ValueError for one that is not known."""
    if isinstance(engines, str) or not all(isinstance(name, str) for name in engines):
        raise TypeError(f"engines: expected a sequence of names, got {engines!r}")
    for name in engines:
        if name not in known:
            raise ValueError(f"engines: expected some of {', '.join(known)}, got {name!r}")
