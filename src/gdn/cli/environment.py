"""Facts about this machine and this library: versions, commit, processor, threads."""

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import gdn


def find_clone(module: Path = Path(gdn.__file__)) -> Path | None:
    """Return the root of the clone that gdn is imported from; None where it is installed."""
    root, package = module.resolve().parents[2], module.resolve().parent
    is_clone = (root / "pyproject.toml").is_file() and package == root / "src" / "gdn"
    return root if is_clone else None


CLONE = find_clone()


def versions() -> dict[str, str]:
    """Return the versions of all packages that change a time or an error, missing ones left out."""
    versions_of = {"python": platform.python_version()}
    # commits before 0.2, which `gdn bench compare` measures with this file, have none
    if own := getattr(gdn, "__version__", None):
        versions_of["gdn"] = own
    for name in (
        "torch", "triton", "transformers", "flash-linear-attention", "flash-qla", "flash-kda",
        "tilelang", "flashinfer-python", "nvidia-cutlass-dsl",
    ):  # fmt: skip
        try:
            versions_of[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions_of


def commit() -> str | None:
    """Return the short commit of this clone, with '+' if gdn or gdn_bench differ from it; None without git.

    Changes of results and pages, which the benchmarks write themselves, do not count.
    """
    if CLONE is None:
        return None
    try:
        # in a folder of another repository, as an unpacked sdist may be, the commit would be that one's
        if _git("rev-parse", "--show-prefix"):
            return None
        head = _git("rev-parse", "--short", "HEAD")
        folders = ("src/gdn", "benchmarks/gdn_bench")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--", *folders) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_model() -> str:
    """Return the name of the processor, never the name of the machine."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Return date, versions, commit, processor and threads, which each row of results has."""
    return {
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "commit": commit(),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
    }


def _git(*args: str) -> str:
    done = subprocess.run(("git", *args), cwd=CLONE, capture_output=True, text=True, check=True)
    return done.stdout.strip()
