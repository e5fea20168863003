"""Launch the kernels of `load_kernels` without Triton's JIT, which would take a second of a new process.

Before Triton looks into its cache, it hashes its own library of 400 MB, hashes the syntax tree of the kernel
and of all functions that it calls, and runs ptxas for its version. An index in the cache names binaries by
properties of a launch instead: the kernel's name, the types of its arguments, constants and options. The
index is valid for one source of gdn's kernels, one Triton and one GPU architecture (`identity`). A launch
that is not in it goes to Triton.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.cache import FileCacheManager

from gdn.backends.triton.launch.identity import identity

ENTRY, INDEX = "gdn", "launches.json"  # folder in the cache, and its file
PACKAGE = "gdn.backends."  # the kernels whose source `identity` hashes
CONSTANTS = (bool, int, float, str, type(None))

Index = dict[str, dict[str, Any]]  # by `launch_key`: where the binary is, and its signature
# all launchers are modules of one name, which threads may not load side by side
LOADING = RLock()
_recorded: Index | None = None  # None: nothing is recorded
_indices: dict[int, Index] = {}  # by device: GPUs of one machine may differ
_binaries: dict[tuple[int, str], Any] = {}  # by device and key


@contextmanager
def record_binaries() -> Iterator[Index]:
    """Collect the binaries that launches compile while the context, which has a cache of its own, is open."""
    global _recorded
    before, _recorded = _recorded, {}
    # the context has another cache, whose index counts
    _indices.clear()
    try:
        yield _recorded
    finally:
        _recorded = before
        _indices.clear()


def record_binary(launch: Any, tensors: tuple[Any, ...], compiled: Any) -> None:
    """Add the binary of a launch to the index that is being recorded, if there is one."""
    # a changed binary is not one for all launches
    if _recorded is None or compiled is None or not _is_usual():
        return
    key, signature = launch_key(launch, tensors), list(compiled.src.signature.values())
    # nested arguments have no text of their own; no kernel of gdn has them
    if key is None or not all(isinstance(x, str) for x in signature):
        return
    group = next(name for name in compiled.metadata_group if name.endswith(".json"))
    entry = Path(compiled.metadata_group[group]).parent.name
    _recorded[key] = {"entry": entry, "group": group, "signature": signature}


def find_binary(launch: Any, tensors: tuple[Any, ...]) -> Any:
    """Return the saved binary of a launch, loaded onto the current device; None if there is none.

    All tensors are aligned, and no integer among the scalars needs more than 32 bits.
    """
    record = _find_record(launch, tensors)
    if record is None:
        return None
    place = (torch.cuda.current_device(), f"{record['entry']} {record['group']}")
    if place not in _binaries:
        with LOADING:
            if place not in _binaries:
                files = _find_files(record)
                if files is None:
                    return None
                compiled = CompiledKernel(
                    _source(launch, tensors, record["signature"]), files, record["entry"]
                )
                _ = compiled.run  # loads the binary onto the GPU
                _binaries[place] = compiled
    return _binaries[place]


def is_saved(launch: Any, tensors: tuple[Any, ...]) -> bool:
    """Return True if the cache has the binary of a launch on tensors of these dtypes, all aligned."""
    record = _find_record(launch, tensors)
    return record is not None and _find_files(record) is not None


def launch_key(launch: Any, tensors: tuple[Any, ...]) -> str | None:
    """Return a text that names the binary of a launch on aligned tensors; None for what cannot be saved."""
    function = launch.kernel.fn
    constants = {**launch.constants, **launch.options}
    # such an integer has another type in the signature
    is_large = any(isinstance(x, int) and not -(2**31) <= x < 2**31 for x in launch.scalars)
    if is_large or not function.__module__.startswith(PACKAGE):
        return None
    if not all(_is_constant(x) for x in constants.values()):
        return None
    return repr(
        (
            f"{function.__module__}.{function.__qualname__}",
            [_type_of(x) for x in tensors],
            [None if x is None else type(x).__name__ for x in launch.scalars],
            sorted((name, repr(x)) for name, x in constants.items()),
            (launch.num_warps, launch.num_stages),
        )
    )


def add_to_cache(launches: Index, identity: dict[str, Any]) -> None:
    """Add binaries that the cache holds to its index, for processes with this identity."""
    indices, name = _read_file(), name_of(identity)
    before = indices.get(name, {})
    indices[name] = before | launches
    if indices[name] != before:
        _manager(ENTRY).put(json.dumps(indices), INDEX, binary=False)
    _indices.clear()


def name_of(identity: dict[str, Any]) -> str:
    """Return a name for all that binaries depend on besides the launch."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _find_record(launch: Any, tensors: tuple[Any, ...]) -> dict[str, Any] | None:
    index = _read_index()
    return index.get(launch_key(launch, tensors) or "") if index and _is_usual() else None


def _read_index() -> Index:
    """Return the index for the current device; it is read once."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return {}
    device = torch.cuda.current_device()
    if device not in _indices:
        indices = _read_file()
        # most processes have no index, and need no hash of sources
        _indices[device] = indices.get(name_of(identity()), {}) if indices else {}
    return _indices[device]


def _read_file() -> dict[str, Index]:
    """Return the indices by `name_of`; none where the cache cannot be written, or the file is torn."""
    try:
        path = _manager(ENTRY).get_file(INDEX)
        indices: dict[str, Index] = {} if path is None else json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return {}
    return indices


def _find_files(record: dict[str, Any]) -> dict[str, str] | None:
    """Return the files of a binary by name; None where a launch would miss one: Triton compiles it again.

    A group names its files by absolute paths, which do not exist where the cache was moved or cleaned.
    """
    try:
        files: dict[str, str] = _manager(record["entry"]).get_group(record["group"]) or {}
    except (OSError, ValueError):
        return None
    is_whole = record["group"] in files and any(name.endswith(".cubin") for name in files)
    return files if is_whole else None


def _manager(entry: str) -> Any:
    return (triton.knobs.cache.manager_class or FileCacheManager)(entry)


def _is_usual() -> bool:
    """Return True if Triton would neither change a kernel while it compiles nor compile it anew."""
    compilation, runtime = triton.knobs.compilation, triton.knobs.runtime
    options = (compilation.always_compile, compilation.override, compilation.dump_ir, runtime.debug)
    hooks = (runtime.jit_cache_hook, getattr(runtime, "add_stages_inspection_hook", None))
    return not any(options) and not compilation.instrumentation_mode and hooks == (None, None)


def _is_constant(x: Any) -> bool:
    """Return True if the text of x says all that a binary depends on."""
    value = x.value if isinstance(x, triton.language.constexpr) else x
    return isinstance(value, (*CONSTANTS, triton.language.dtype))


def _type_of(x: Any) -> str | None:
    """Return what a binary depends on of an aligned tensor or a TMA descriptor."""
    if x is None or isinstance(x, Tensor):
        return None if x is None else str(x.dtype)
    return f"{x.base.dtype} {list(x.block_shape)} {x.padding} {getattr(x, 'layout', None)!r}"


def _source(launch: Any, tensors: tuple[Any, ...], signature: list[str]) -> Any:
    """Return what Triton's launcher reads of a kernel's source: names, types and constants of arguments."""
    names = launch.kernel.arg_names
    values = dict(zip(names, (*tensors, *launch.scalars), strict=False)) | launch.constants
    constants = {(i,): values[name] for i, name in enumerate(names) if signature[i] == "constexpr"}
    return SimpleNamespace(
        fn=launch.kernel, signature=dict(zip(names, signature, strict=True)), constants=constants
    )
