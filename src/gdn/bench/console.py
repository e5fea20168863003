"""Shared parts of the commands: consoles, common options, usage errors of one line, JSON, progress."""

import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from gdn.bench.progress import Report, show_progress

console = Console(stderr=False)
status = Console(stderr=True)  # progress goes here, so that --json - stays clean

Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write JSON to a file, or to the screen with -.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; the GPU if there is one.")]


SHOWN_WIDTH = 240  # characters of the names that a usage error lists


def place(name: str | None) -> torch.device:
    """Return the device of that name, or the GPU if there is one; a usage error if it is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = available_devices()
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or str(device) not in there:
        lacking = "" if len(there) > 1 else " (PyTorch finds no GPU)"
        raise typer.BadParameter(f"device: expected {_one_of(there)}, got {name}{lacking}")
    return device


def gpu_place(name: str | None) -> torch.device:
    """Return the device for a GPU benchmark; a usage error on a CPU that nobody asked for."""
    device = place(name)
    if name is None and device.type == "cpu":
        raise typer.BadParameter(
            "needs a GPU, and PyTorch finds none; --device cpu runs it on the CPU nevertheless"
        )
    return device


def available_devices() -> list[str]:
    """Return the names that --device takes here."""
    found = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        found += [kind.type, *(f"{kind.type}:{i}" for i in range(torch.accelerator.device_count()))]
    return found


def need_packages(extra: str, *packages: str) -> None:
    """Raise a usage error that names the extra to install where a package is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise typer.BadParameter(
            f"needs {' and '.join(missing)}, not installed here: pip install 'gdn[{extra}]'"
        )


def require_match(only: Sequence[str], names: Sequence[str]) -> None:
    """Raise a usage error if --only is given and no name holds any of its words."""
    if only and not any(word in name for word in only for name in names):
        raise typer.BadParameter(f"only: expected a part of {_one_of(names)}, got {','.join(only)!r}")


def _one_of(names: Sequence[str]) -> str:
    """Return the names, or how many there are and the first ones."""
    if len(names) == 1:
        return names[0]
    shown = list(itertools.accumulate(names, "{}, {}".format))
    count = max(1, sum(len(text) <= SHOWN_WIDTH for text in shown))
    of = "one of" if count == len(names) else f"one of {len(names)} names, such as"
    return f"{of} {shown[count - 1]}"


def choice(option: str, value: str, known: Iterable[str]) -> str:
    """The value, or a usage error that names what there is."""
    if value not in known:
        raise typer.BadParameter(f"{option}: expected one of {', '.join(known)}, got {value}")
    return value


def words(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(part for part in text.split(",") if part)


def wrote(file: str | None, value: Any) -> bool:
    """Write JSON where --json says; False without it."""
    if file is None:
        return False
    text = json.dumps(value, indent=1)
    if file == "-":
        print(text)
    else:
        Path(file).write_text(text + "\n", encoding="ascii")
    return True


def progress() -> AbstractContextManager[Report]:
    """Return a context whose function shows progress on stderr: (part, done, total, note)."""
    return show_progress(status)


def name_file(file: Path, count: int) -> None:
    """Say on stderr which file rows were appended to."""
    print(f"appended {count} {'row' if count == 1 else 'rows'} to {file}", file=sys.stderr)


def show(columns: Iterable[str], cells: Iterable[Iterable[str]], title: str | None = None) -> None:
    """A table, wider than the screen where it must be."""
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 1))
    for row in cells:
        table.add_row(*row)
    Console(width=max(console.width, 168)).print(table)
