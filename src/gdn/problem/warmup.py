"""Check the arguments of `warmup`."""

from collections.abc import Collection
from typing import Any

import torch

from gdn.problem.check import FLOATS, INTS

# whose calls take states in integers
INTEGERS = {torch.int16: ("gdn", "history"), torch.int8: ("history",)}


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


def check_state_dtypes(dtypes: Any, engines: Collection[str]) -> None:
    """Raise TypeError for a dtype that no state has, ValueError for integers that an engine does not take."""
    for dtype in dtypes:
        if dtype not in (*FLOATS, *INTEGERS):
            raise TypeError(f"state_dtypes: expected floats, int16 or int8, got {dtype}")
        for engine in engines:
            takers = INTEGERS.get(dtype)
            if takers is not None and engine not in takers:
                raise ValueError(
                    f"state_dtypes: expected floats for engine {engine!r}, got {dtype}, "
                    f"which {' and '.join(takers)} alone take{'s' if len(takers) == 1 else ''}"
                )
