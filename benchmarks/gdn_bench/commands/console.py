"""Options and outputs of the benchmark commands: names of rows, progress, tables on the screen."""

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table

from gdn.cli.console import console, find_device, list_names, status
from gdn_bench.commands.progress import Report, show_progress

MIN_WIDTH = 168  # characters of the widest table


def find_gpu(name: str | None) -> torch.device:
    """Return the device of a GPU benchmark; a usage error on a CPU that --device does not name."""
    device = find_device(name)
    if name is None and device.type == "cpu":
        raise typer.BadParameter(
            "needs a GPU, and PyTorch finds none; --device cpu runs it on the CPU nevertheless"
        )
    return device


def require_match(only: Sequence[str], names: Sequence[str]) -> None:
    """Raise a usage error if --only is given and no name contains any of its words."""
    if only and not any(word in name for word in only for name in names):
        raise typer.BadParameter(f"only: expected a part of {list_names(names)}, got {','.join(only)!r}")


def split_words(text: str) -> tuple[str, ...]:
    """Return the non-empty parts between commas."""
    return tuple(part for part in text.split(",") if part)


def open_progress() -> AbstractContextManager[Report]:
    """Return a context whose function shows progress on stderr: (part, done, total, note)."""
    return show_progress(status)


def name_file(file: Path, count: int) -> None:
    """Print on stderr the name of the file that rows were appended to."""
    print(f"appended {count} {'row' if count == 1 else 'rows'} to {file}", file=sys.stderr)


def show_table(columns: Iterable[str], cells: Iterable[Iterable[str]], title: str | None = None) -> None:
    """Print a table, wider than the screen where its columns need it."""
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 1))
    for row in cells:
        table.add_row(*row)
    Console(width=max(console.width, MIN_WIDTH)).print(table)
