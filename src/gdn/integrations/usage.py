"""Count the calls of engines that gdn served and those that it left to the engine, in this process.

A call inside a CUDA graph counts once, when it is captured: a replay runs no Python. With GDN_CALLS=FOLDER
each process writes its counts to FOLDER/<process id>.json, where `gdn info --engines` reads them.
"""

import atexit
import functools
import json
import os
from pathlib import Path

import torch

from gdn import settings

ROLES = ("prefill", "decode", "verify")
# of layers with a decay per key channel
CHANNEL_ROLES = {role: f"{role} by channel" for role in ROLES}
served: dict[tuple[str, str], int] = {}
rejected: dict[tuple[str, str], int] = {}


def count_served(engine: str, role: str) -> None:
    """Count a call of an engine that gdn serves: role is one of ROLES, or of the values of CHANNEL_ROLES."""
    _increment(served, (engine, role))


def count_rejected(name: str, reason: str) -> None:
    """Count a call of the function `name` that gdn rejected and the engine's own function ran."""
    # reasons contain shapes: the table stays small
    _increment(rejected, (name, reason if len(rejected) < 256 else "other reasons"))


def reset() -> None:
    """Forget all counts of this process."""
    served.clear()
    rejected.clear()


def _increment(counts: dict[tuple[str, str], int], key: tuple[str, str]) -> None:
    if torch.compiler.is_compiling():
        return
    count = counts[key] = counts.get(key, 0) + 1
    # a server may be killed, so the file is written before the end: at 1, 2, 4, 8, ... calls
    if count & (count - 1) == 0:
        _schedule()
        write()


@functools.cache
def _schedule() -> None:
    atexit.register(write)


def write() -> None:
    """Write the counts of this process to the folder in GDN_CALLS, if it is set."""
    folder = settings.calls_folder()
    if folder is None:
        return
    path = Path(folder) / f"{os.getpid()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {
        "served": [[*key, n] for key, n in served.items()],
        "rejected": [[*key, n] for key, n in rejected.items()],
    }
    # a reader never sees half a file
    part = path.with_suffix(".part")
    part.write_text(json.dumps(rows))
    part.replace(path)


def read(folder: str | None) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """Return the counts of the processes that wrote to the folder; without one, those of this process."""
    if folder is None:
        return dict(served), dict(rejected)
    totals: tuple[dict[tuple[str, str], int], ...] = ({}, {})
    for path in sorted(Path(folder).glob("*.json")):
        rows = json.loads(path.read_text())
        for total, name in zip(totals, ("served", "rejected"), strict=True):
            for first, second, n in rows[name]:
                total[first, second] = total.get((first, second), 0) + n
    return totals[0], totals[1]
