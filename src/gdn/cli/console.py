"""Options and outputs that the commands share: devices, usage errors of one line, JSON files."""

import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

console = Console(stderr=False)
status = Console(stderr=True)  # progress goes here, so that stdout holds nothing but the JSON of --json -

Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write JSON to a file, or to the screen with -.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; the GPU if there is one.")]


SHOWN_WIDTH = 240  # characters of the names that a usage error lists


def run_app(app: typer.Typer, name: str) -> None:
    """Run a command line under a name and exit; a usage error is one line on stderr, exit code 2."""
    try:
        code = app(prog_name=name, standalone_mode=False)
    except typer.Abort:
        sys.exit(f"{name}: aborted")
    except Exception as error:
        # click's errors; newer versions of typer hold click inside, so its classes have no common place
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
        else:
            print(usage_line(error, name), file=sys.stderr)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


def usage_line(error: Any, name: str) -> str:
    """Return a usage error in one line, after the command that it belongs to."""
    command = error.ctx.command_path if getattr(error, "ctx", None) else name
    text = " ".join(error.format_message().split()).removeprefix("Invalid value: ")
    return f"{command}: {text} (see {command} --help)"


def find_device(name: str | None) -> torch.device:
    """Return the device of that name, or the GPU if there is one; a usage error if it does not exist."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = available_devices()
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or str(device) not in there:
        lacking = "" if len(there) > 1 else " (PyTorch finds no GPU)"
        raise typer.BadParameter(f"device: expected {list_names(there)}, got {name}{lacking}")
    return device


def available_devices() -> list[str]:
    """Return the devices that --device accepts on this machine."""
    devices = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        devices += [kind.type, *(f"{kind.type}:{i}" for i in range(torch.accelerator.device_count()))]
    return devices


def need_packages(extra: str, *packages: str) -> None:
    """Raise a usage error that names the extra to install where a package is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise typer.BadParameter(
            f"needs {' and '.join(missing)}, not installed here: pip install 'gdn[{extra}]'"
        )


def list_names(names: Sequence[str]) -> str:
    """Return the names, or their number and the first ones, for a usage error."""
    if len(names) == 1:
        return names[0]
    shown = list(itertools.accumulate(names, "{}, {}".format))
    count = max(1, sum(len(text) <= SHOWN_WIDTH for text in shown))
    of = "one of" if count == len(names) else f"one of {len(names)} names, such as"
    return f"{of} {shown[count - 1]}"


def check_choice(option: str, value: str, choices: Iterable[str]) -> str:
    """Return the value of an option, or raise a usage error that lists the known ones."""
    if value not in choices:
        raise typer.BadParameter(f"{option}: expected one of {', '.join(choices)}, got {value}")
    return value


def write_json(file: str | None, value: Any) -> bool:
    """Write a value to the file of --json; return False where the option is absent."""
    if file is None:
        return False
    text = json.dumps(value, indent=1)
    if file == "-":
        print(text)
    else:
        Path(file).write_text(text + "\n", encoding="ascii")
    return True
