"""Check the arguments of `warmup`."""

from collections.abc import Collection
from typing import Any

from gdn.problem.check import INTS


def check_names(name: str, given: Any, names: Collection[str]) -> None:
    """Raise TypeError unless given is a sequence of names, ValueError for a name that is not in names."""
    if isinstance(given, str) or not all(isinstance(x, str) for x in given):
        raise TypeError(f"{name}: expected a sequence of names, got {given!r}")
    for x in given:
        if x not in names:
            raise ValueError(f"{name}: expected some of {', '.join(names)}, got {x!r}")


def check_index_dtype(dtype: Any) -> None:
    """Raise TypeError unless dtype is int32 or int64."""
    if dtype not in INTS:
        raise TypeError(f"index_dtype: expected int32 or int64, got {dtype}")
