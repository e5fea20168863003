"""Compile ahead: build, with the first call of a kind, the binaries that calls of other sizes will use.

Tile sizes depend on how many programs fill the GPU, so another number of tokens, sequences or heads may need
another binary. All of them are compiled in parallel by threads, and loaded onto the GPU by one thread.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import wraps
from threading import RLock
from typing import Any

import torch
import triton
from triton.compiler import ASTSource

from gdn.backends.triton.launch.device import device_guard
from gdn.backends.triton.launch.kernels import INTERPRETED
from gdn.backends.triton.launch.launches import Step, is_recording
from gdn.backends.triton.launch.saved import LOADING, is_saved, record_binary

_compiled_kinds: set[Hashable] = set()
_TRACING = RLock()


def compile_ahead(device: torch.device, kind: Hashable, steps: Callable[[], Iterable[Step]]) -> None:
    """Compile the binaries of these launches in parallel, the first time that `kind` occurs.

    Only the dtypes of the tensors matter. A kernel that does not compile fails where it is launched. Kernels
    are traced one at a time, so those that compile longest after tracing are traced first.
    """
    if INTERPRETED or is_recording() or device.type != "cuda" or (device, kind) in _compiled_kinds:
        return
    # one thread at a time (see `_build_launcher`); Triton compiles for the current device
    with LOADING, device_guard(device):
        if (device, kind) in _compiled_kinds:
            return
        for binary in _compile_all(sorted(steps(), key=lambda step: -step[0].seconds)):
            with suppress(Exception):
                # reading the property loads the binary onto the GPU
                _ = binary.run
        _compiled_kinds.add((device, kind))


def _compile_all(steps: list[Step]) -> list[Any]:
    """Compile the launches in threads, in this order; return the binaries that were not compiled before."""
    mode = triton.AsyncCompileMode
    with trace_one_at_a_time(), _Compiler(os.cpu_count()) as pool, mode(pool, ignore_errors=True):
        # saved binaries are loaded where they are launched first
        steps = [step for step in steps if not is_saved(*step)]
        kernels = [launch.compile(tensors) for launch, tensors in steps]
    for (launch, tensors), x in zip(steps, kernels, strict=True):
        record_binary(launch, tensors, x.result(ignore_errors=True) if hasattr(x, "result") else x)
    futures = {id(x): x for x in kernels if hasattr(x, "result")}.values()
    binaries = (future.result(ignore_errors=True) for future in futures)
    return [x for x in binaries if x is not None]


class _Compiler(ThreadPoolExecutor):
    """Compile a kernel in a thread, together with its launcher."""

    def submit(self, compile_it: Any) -> Any:  # type: ignore[override]
        def run() -> Any:
            kernel = compile_it()
            _build_launcher(kernel)
            return kernel

        return super().submit(run)


@contextmanager
def trace_one_at_a_time() -> Iterator[None]:
    """Let only one thread at a time trace a kernel while the context is open; then restore Triton's methods.

    Triton 3.6 to 3.9 trace a kernel (`make_ir`, from Python's syntax tree to Triton's IR) in the thread that
    compiles it, and have no lock or hook there. Tracing holds the GIL: if threads traced at the same time,
    all would finish late, and the passes and ptxas, which release the GIL, would start late. With the lock
    the first kernel reaches ptxas while the second one is traced.
    """
    classes = [x for x in (ASTSource, *ASTSource.__subclasses__()) if "make_ir" in vars(x)]
    originals = [(x, vars(x)["make_ir"]) for x in classes]
    try:
        for source, trace in originals:
            source.make_ir = _locked(trace)
        yield
    finally:
        for source, trace in originals:
            source.make_ir = trace


def _locked(trace: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(trace)
    def call(*args: Any, **options: Any) -> Any:
        with _TRACING:
            return trace(*args, **options)

    return call


def _build_launcher(kernel: Any) -> None:
    """Compile a binary's launcher, which Triton caches on disk. No thread may use what it loads here.

    All launchers are Python modules of one name. Loading one again writes into the module that was loaded
    last, from which another thread may be about to take its function (Triton 3.6, single-phase
    initialisation).
    """
    with suppress(Exception):
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
