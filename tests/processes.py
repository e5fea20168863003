"""Processes of a test's own, for what compiled code may crash."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(command: Sequence[str], cwd: Path = ROOT) -> None:
    """Fails with what the process said, and with its C frames where it crashed and a debugger is there."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    said = f"exit status {done.returncode}\n{done.stderr[-6000:]}"
    debugger = shutil.which("cuda-gdb") or shutil.which("gdb")
    if done.returncode < 0 and debugger is not None:
        again = [debugger, "-batch", "-ex", "run", "-ex", "bt", "--args", *command]
        frames = subprocess.run(again, capture_output=True, text=True, cwd=cwd)
        said += f"\nagain, in a debugger:\n{frames.stdout[-6000:]}"
    assert done.returncode == 0, said
