"""Name what every compiled kernel depends on: the GPU, Triton, Python, and the source of gdn's kernels."""

import hashlib
import json
import os
import platform
import sysconfig
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime.cache import triton_key

COMPILER = ("compiler", "language", "runtime", "backends", "experimental")  # folders of Triton


def identity() -> dict[str, str | None]:
    """Return what binaries depend on; the GPU is None on a machine without one, as where images are built."""
    return {
        "gpu": _architecture(),
        "triton": triton.__version__,
        "compiler": _compiler_hash(),
        # Triton's launchers are extension modules
        "python": f"{platform.machine()} {sysconfig.get_config_var('EXT_SUFFIX')}",
        "kernels": _source_hash(),
    }


def _architecture() -> str | None:
    """Return the architecture of the current GPU in Triton's words, without Triton's driver.

    The driver's first use compiles a C module, which a folder of kernels contains.
    """
    if not torch.cuda.is_available():
        return None
    if torch.version.hip is not None:
        return f"hip:{torch.cuda.get_device_properties().gcnArchName.split(':')[0]}"
    major, minor = torch.cuda.get_device_capability()
    return f"cuda:{10 * major + minor}"


@cache
def _compiler_hash() -> str:
    """Return a hash of Triton: its Python files, the variables that change binaries, its libraries.

    The libraries have 400 MB. Their hashes are in the list that was installed with them; without such a list
    they are hashed here.
    """
    root, digest = Path(triton.__file__).parent, hashlib.sha256()
    for path in sorted(path for name in COMPILER for path in (root / name).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    try:
        record = distribution("triton").read_text("RECORD")
    except PackageNotFoundError:
        record = None
    binaries = [root / "_C/libtriton.so", root / "backends/nvidia/bin/ptxas"]
    sizes = [path.stat().st_size if path.exists() else 0 for path in binaries]
    lines = [f"{path.relative_to(root.parent)},sha256=" for path in binaries]
    listed = [line for line in (record or "").splitlines() if line.startswith(tuple(lines))]
    # a library of another size was replaced after it was installed
    is_listed = [line.rpartition(",")[2] for line in listed] == [str(size) for size in sizes]
    digest.update("\n".join(listed if is_listed else [triton_key()]).encode())
    digest.update(json.dumps(sorted(get_cache_invalidating_env_vars().items())).encode())
    if ptxas := os.environ.get("TRITON_PTXAS_PATH"):
        digest.update(Path(ptxas).read_bytes())
    return digest.hexdigest()[:16]


def _source_hash() -> str:
    """Return a hash of all modules of the backends."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
