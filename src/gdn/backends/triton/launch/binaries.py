"""Ship compiled kernels: from Triton's cache to a folder, and from a folder to the cache of another machine.

Triton names an entry of its cache by a hash of the kernel's source and of all functions that it calls, the
types and constants of the call, the compiler's options, Triton's own files and the GPU's architecture. So a
shipped binary serves exactly the calls that it was compiled for, and no other call can ever find it. The
manifest names what a folder was made for, so that a folder that no call would use is refused. It also has the
index by which a process launches a kernel without the hash: see `saved`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import FileCacheManager

from gdn.backends.triton.launch.identity import identity
from gdn.backends.triton.launch.precompile import finish_ahead
from gdn.backends.triton.launch.saved import ENTRY, INDEX, add_to_cache, record_binaries

MANIFEST = "manifest.json"
GROUP = "__grp__"  # Triton's prefix of a file that lists the files of one binary by their absolute paths


@contextmanager
def separate_cache(folder: Path) -> Iterator[None]:
    """Compile into `folder`, and keep binaries without their intermediate code, while the context is open.

    A binary that this process has compiled or loaded before is not compiled again, so not written there.
    """
    # what earlier calls have left to the background is not of this folder
    finish_ahead()
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(folder)
        triton.knobs.compilation.store_binary_only = True
        # before the first kernel is read: its file may be edited meanwhile
        made_for = identity()
        with record_binaries() as launches:
            yield
            finish_ahead()
        if folder.exists():
            (folder / INDEX).write_text(json.dumps({"made_for": made_for, "launches": launches}))


def pack(cache: Path, folder: Path) -> int:
    """Copy the entries of a cache filled by `separate_cache` to `folder`; return how many binaries there are.

    Raises ValueError for a folder that holds other files: two sets of binaries would be mixed. Also where the
    source of the kernels has changed since: nobody knows which source a binary is of.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"folder: expected an empty or new one, got files in {folder}")
    index = json.loads((cache / INDEX).read_text())
    if index["made_for"] != identity():
        raise ValueError("kernels: expected the source that they were compiled from, got another; save again")
    entries, count = {}, 0
    for source in sorted(path for path in cache.iterdir() if path.is_dir() and path.name != ENTRY):
        groups = {}
        for file in sorted(path for path in source.iterdir() if path.is_file() and path.name != "lock"):
            if file.name.startswith(GROUP):
                children = json.loads(file.read_text())["child_paths"]
                groups[file.name.removeprefix(GROUP)] = sorted(x for x in children if not _is_source(x))
                continue
            if _is_source(file.name):
                continue
            target = folder / source.name / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
        entries[source.name] = groups
        count += len(groups)
    folder.mkdir(parents=True, exist_ok=True)
    # those of binaries that an earlier call of the process has compiled are elsewhere
    launches = {key: x for key, x in index["launches"].items() if x["group"] in entries.get(x["entry"], ())}
    manifest = {**index["made_for"], "entries": entries, "launches": launches}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return count


def unpack(folder: Path) -> int:
    """Copy the binaries of `folder` into Triton's cache and return how many it holds; keep what is there.

    Each file is written beside its place and moved there, as Triton does, so that several processes may do
    this at once. Raises ValueError for a folder made for another GPU, Triton, Python or source of kernels.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"folder: expected one written by `gdn warmup --save`, got {folder} without {MANIFEST}"
        )
    manifest: dict[str, Any] = json.loads(path.read_text())
    here = identity()  # reads the source of all kernels
    for name, value in here.items():
        if value is not None and manifest.get(name) != value:
            raise ValueError(f"folder: expected kernels for {name} {value}, got {name} {manifest.get(name)}")
    entries: dict[str, dict[str, list[str]]] = manifest["entries"]
    manager_class = triton.knobs.cache.manager_class or FileCacheManager
    for entry, groups in entries.items():
        manager = manager_class(entry)
        paths = {}
        for file in sorted((folder / entry).iterdir()):
            there = manager.get_file(file.name)
            paths[file.name] = manager.put(file.read_bytes(), file.name) if there is None else there
        for group, children in groups.items():
            # the files of a group that was moved or cleaned are missing
            if not set(children) <= set(manager.get_group(group) or ()):
                manager.put_group(group, {child: paths[child] for child in children})
    add_to_cache(manifest["launches"], {name: manifest[name] for name in here})
    return sum(map(len, entries.values()))


def _is_source(name: str) -> bool:
    """Return True for a kernel's first intermediate code, which Triton keeps beside a binary, unread."""
    return name.endswith(".source")
