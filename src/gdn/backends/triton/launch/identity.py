"""Name what every compiled kernel depends on: the GPU, Triton, Python, and the source of gdn's kernels."""

import hashlib
import json
import platform
import sysconfig
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime.cache import triton_key

from gdn import settings

LIBRARIES = ("_C/libtriton.so", "backends/nvidia/bin/ptxas", "backends/nvidia/bin/ptxas-blackwell")
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
        lines = (distribution("triton").read_text("RECORD") or "").splitlines()
    except PackageNotFoundError:
        lines = []
    libraries = [path for path in (root / name for name in LIBRARIES) if path.exists()]
    names = tuple(f"{path.relative_to(root.parent)},sha256=" for path in libraries)
    listed = sorted(line for line in lines if line.startswith(names))
    # a library of another size was replaced after it was installed
    sizes = sorted(path.stat().st_size for path in libraries)
    is_listed = sorted(int(line.rpartition(",")[2]) for line in listed) == sizes
    digest.update("\n".join(listed if is_listed else [triton_key()]).encode())
    digest.update(json.dumps(sizes).encode())
    digest.update(json.dumps(sorted(get_cache_invalidating_env_vars().items())).encode())
    for assembler in map(Path, settings.assemblers()):
        if assembler.is_file():
            digest.update(assembler.read_bytes())
    # options for ptxas and the device library, which may come from the environment as well
    digest.update(CUDAOptions(arch="").hash().encode())
    return digest.hexdigest()[:16]


def _source_hash() -> str:
    """Return a hash of all modules of the backends."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
