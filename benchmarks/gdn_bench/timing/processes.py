"""Run a module of gdn_bench in a new process that finds the same packages as this one."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2]  # the folder that contains gdn_bench
# puts folders before PYTHONPATH, which the processes that the new one starts inherit
WITH_PATH = 'PYTHONPATH="$0${PYTHONPATH:+:$PYTHONPATH}" exec "$@"'


def run_module(
    arguments: Sequence[str],
    timeout: float,
    *,
    first: Sequence[Path] = (),
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m arguments` and return the finished process with its outputs.

    first: folders that come before all others on PYTHONPATH. folder: the current folder of the process.
    variables: set in addition to the environment of this process. Raises subprocess.TimeoutExpired.
    """
    path = ":".join(str(x) for x in (*first, BENCHMARKS))
    settings = [f"{name}={value}" for name, value in (variables or {}).items()]
    command = ["sh", "-c", WITH_PATH, path, "env", *settings, sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)
