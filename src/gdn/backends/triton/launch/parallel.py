"""Compile the binaries of several launches in parallel, for the caller who waits for them.

Triton traces a kernel in Python, under the GIL, so kernels are traced one at a time. The passes, LLVM, ptxas
and the C compiler of the launchers run without it.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import wraps
from inspect import getclosurevars
from threading import Lock, RLock, Thread
from types import FunctionType, SimpleNamespace
from typing import Any

import triton
from triton.compiler import ASTSource, code_generator
from triton.runtime import cache

from gdn._failures import log_failure
from gdn.backends.triton.launch.saved import is_saved, record_binary

_TRACING = RLock()
_PATCHING = Lock()
_originals: list[tuple[type, Any]] = []  # while some context is open: classes and their own `make_ir`
_num_open = 0
# for Triton's tracer: Python's module without the functions that change filters
_WARNINGS = SimpleNamespace(
    **{**vars(warnings), "catch_warnings": nullcontext, "simplefilter": lambda *arguments: None}
)


def compile_all(steps: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
    """Compile the launches in threads, in this order; return the binaries that were not compiled before."""
    mode = triton.AsyncCompileMode
    # saved binaries are loaded where they are launched first
    steps = [step for step in steps if not is_saved(*step)]
    if not steps:
        return []
    with trace_one_at_a_time(), _Compiler(os.cpu_count()) as pool, mode(pool, ignore_errors=True):
        pool.start()
        kernels = [launch.compile(tensors) for launch, tensors in steps]
    for (launch, tensors), x in zip(steps, kernels, strict=True):
        record_binary(launch, tensors, x.result(ignore_errors=True) if hasattr(x, "result") else x)
    futures = {id(x): x for x in kernels if hasattr(x, "result")}.values()
    binaries = (future.result(ignore_errors=True) for future in futures)
    return [x for x in binaries if x is not None]


class _Compiler(ThreadPoolExecutor):
    """Compile a kernel in a thread, and its launcher in another."""

    def start(self) -> None:
        """Hash Triton's library of 400 MB while Triton's driver compiles its C module, once a process."""
        hashed = super().submit(cache.triton_key)
        with log_failure("the compilation of Triton's driver"):
            _ = triton.runtime.driver.active.launcher_cls
        # Triton would hash it again while another thread does
        hashed.result()

    def submit(self, compile_it: Any) -> Any:  # type: ignore[override]
        def run() -> Any:
            launcher = Thread(target=_expect_launcher, args=(compile_it,))
            launcher.start()
            try:
                kernel = compile_it()
            finally:
                launcher.join()
            # finds it in Triton's cache, unless it was expected to be another
            build_launcher(kernel.src, kernel.metadata)
            return kernel

        return super().submit(run)


class _Expected:
    """Stand for the metadata of a kernel that is not compiled yet.

    A launcher's source needs `tensordesc_meta` alone; what its object keeps for launches is 0.
    """

    def __init__(self, tensordesc_meta: list[bool]) -> None:
        self.tensordesc_meta = tensordesc_meta

    def __getattr__(self, name: str) -> int:
        return 0


def _expect_launcher(compile_it: Callable[[], Any]) -> None:
    """Compile the launcher of a kernel that Triton's function compiles meanwhile.

    It depends on the types of the arguments, and on whether TMA reads the tensors of descriptors (on Hopper).
    """
    with log_failure("the compilation of a launcher beside its kernel"):
        source = getclosurevars(compile_it).nonlocals["src"]
        count = sum("tensordesc" in str(x) for x in source.signature.values())
        build_launcher(source, _Expected([True] * count))


@contextmanager
def trace_one_at_a_time() -> Iterator[None]:
    """Let only one thread at a time trace a kernel while the context is open; then restore Triton's methods.

    Triton 3.6 to 3.9 trace a kernel (`make_ir`, from Python's syntax tree to Triton's IR) in the thread that
    compiles it, and have no lock or hook there. Tracing holds the GIL: if threads traced at the same time,
    all would finish late, and the passes and ptxas, which release the GIL, would start late. With the lock
    the first kernel reaches ptxas while the second one is traced. Threads may have contexts open at once.
    """
    global _num_open
    with _PATCHING:
        if _num_open == 0:
            classes = [x for x in (ASTSource, *ASTSource.__subclasses__()) if "make_ir" in vars(x)]
            _originals[:] = [(x, vars(x)["make_ir"]) for x in classes]
            for source, trace in _originals:
                source.make_ir = _locked(trace)  # type: ignore[attr-defined]
        _num_open += 1
    try:
        yield
    finally:
        with _PATCHING:
            _num_open -= 1
            if _num_open == 0:
                for source, trace in _originals:
                    source.make_ir = trace  # type: ignore[attr-defined]


def _forget_threads() -> None:
    """Replace the locks in a forked process: a thread of its parent may have held them."""
    global _TRACING, _PATCHING
    _TRACING, _PATCHING = RLock(), Lock()


os.register_at_fork(after_in_child=_forget_threads)


def _locked(trace: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(trace)
    def call(*args: Any, **options: Any) -> Any:
        with _TRACING, _keep_filters():
            return trace(*args, **options)

    return call


@contextmanager
def _keep_filters() -> Iterator[None]:
    """Let Triton's tracer leave Python's warning filters alone.

    At each node of a syntax tree it sets and restores them, for the whole process. A thread that traces
    beside another one's `catch_warnings` would restore what that one has set.
    """
    before = code_generator.warnings
    code_generator.warnings = _WARNINGS  # type: ignore[assignment]
    try:
        yield
    finally:
        code_generator.warnings = before


def compile_one(launch: Any, tensors: tuple[Any, ...]) -> None:
    """Compile a launch and its launcher in this thread; neither is loaded."""
    with trace_one_at_a_time():
        if is_saved(launch, tensors):
            return
        compiled = launch.compile(tensors)
        record_binary(launch, tensors, compiled)
        build_launcher(compiled.src, compiled.metadata)


def build_launcher(source: Any, metadata: Any) -> None:
    """Compile a launcher into Triton's cache, where the first launch finds it. It is not loaded.

    All launchers are Python modules of one name. Loading one again writes into the module that was loaded
    last, from which another thread may be about to take its function (Triton 3.6, single-phase
    initialisation). So Triton's constructor runs here with a function that compiles a module only. Triton 3.9
    launches all kernels by one function of its own.
    """
    # what raises is compiled again, and raises again, where it is launched
    with log_failure("the compilation of a launcher"):
        init = triton.runtime.driver.active.launcher_cls.__init__
        build = init.__globals__.get("compile_module_from_src")
        if build is None:
            return
        module = SimpleNamespace(launch=None)
        build = _with_globals(build, _load_module_from_path=lambda name, path: module)
        _with_globals(init, compile_module_from_src=build)(SimpleNamespace(), source, metadata)


def _with_globals(function: Any, **values: Any) -> Any:
    """Return a copy of a function that finds these values in the place of its module's."""
    copy = FunctionType(
        function.__code__, {**function.__globals__, **values}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
