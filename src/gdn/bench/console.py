"""What the commands share: where they print, their common options, JSON, progress bars."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

console = Console(stderr=False)
status = Console(stderr=True)  # progress goes here, so that --json - stays clean

Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write JSON to a file, or to the screen with -.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; the GPU if there is one.")]


def place(name: str | None) -> torch.device:
    """The device of that name, or the GPU if there is one."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


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


def progress() -> Progress:
    """A bar with its part, count and time; gone when done, where somebody watches."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=status, transient=not sys.stderr.isatty())


def show(columns: Iterable[str], cells: Iterable[Iterable[str]], title: str | None = None) -> None:
    """A table, wider than the screen where it must be."""
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 1))
    for row in cells:
        table.add_row(*row)
    Console(width=max(console.width, 168)).print(table)
