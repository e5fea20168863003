"""Compile each kernel variant in one process at a time, where several processes share Triton's disk cache.

Triton writes a compiled kernel to its disk cache, but two processes that miss the same entry both compile it.
Here a process takes a file lock, named by the kernel variant, around the lookup and the compilation: the
second process waits without using a processor and then reads the entry. The kernel releases the lock of a
process that dies.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any


@contextmanager
def file_lock(folder: Path, *key: object) -> Iterator[None]:
    """Hold the lock of a key among all processes that use the folder, and among the threads of each."""
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(repr(key).encode()).hexdigest()
    file = os.open(folder / name, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def install() -> None:
    """Lock what Triton calls on a miss of its in-memory caches: `compile`, and the launcher's build."""
    import triton
    from triton import compiler
    from triton.backends.nvidia import driver

    def folder() -> Path:
        return Path(triton.knobs.cache.dir) / "locks"

    def locked(function: Callable[..., Any], key: Callable[..., tuple[object, ...]]) -> Callable[..., Any]:
        if hasattr(function, "__wrapped__"):
            return function

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with file_lock(folder(), *key(*args, **options)):
                return function(*args, **options)

        return call

    def variant(
        src: Any, target: Any = None, options: Any = None, _env_vars: Any = None
    ) -> tuple[object, ...]:
        name = src if isinstance(src, str) else src.hash()
        return "kernel", name, str(target), sorted((options or {}).items(), key=str)

    # a JITFunction imports `compile` from here at its first launch on a device
    compiler.compile = locked(compiler.compile, variant)
    # Triton 3.8 and 3.9 launch all kernels by one function of their own
    if hasattr(driver, "compile_module_from_src"):
        driver.compile_module_from_src = locked(
            driver.compile_module_from_src, lambda src, name, *rest, **more: ("module", name, src)
        )
