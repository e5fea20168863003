"""Launch kernels: fix everything but the tensors, and reuse the compiled handle on later calls.

A kernel's parameters come in this order: tensors (`x_ptr`), scalars, constants (`tl.constexpr`, capitals).
Triton never specialises on scalars: another length, batch or head count runs the same binary. Because a
stride of unknown divisibility prevents vectorised loads, such strides are passed in UNITs of elements, and
UNIT is a constant (`unit_of`).
"""

import inspect
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache, reduce, wraps
from operator import itemgetter, or_
from threading import RLock
from typing import Any, Generic, TypeVar

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

# if set, launches are recorded here instead of run: kernels can be compiled for GPUs that are not present
recorder: list[tuple["Launch", tuple[Tensor | None, ...]]] | None = None
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels run on CPU tensors
ALIGNMENT = 16  # bytes: if every pointer is a multiple, the compiled handle of the first launch can be reused
Plan = TypeVar("Plan")
TensorSpec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


def kernel(function: Any) -> Any:
    """Apply triton.jit without specialisation on scalars: these stay runtime values."""
    names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if not name.endswith("_ptr") and parameter.annotation is not triton.language.constexpr
    ]
    return triton.jit(function, do_not_specialize=names)


@dataclass
class Launch:
    """Run kernel[grid](*tensors, *numbers, **constants) with some 6 us of host time from the second call on.

    A plan holds launches for one set of shapes, strides, dtypes and one device, so only the addresses of
    tensors can differ from call to call. The compiled handle is kept after the first launch whose tensors are
    all aligned; unaligned tensors go through Triton's own dispatch.
    """

    kernel: Any
    grid: int
    numbers: tuple[int | float, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # further compiler options, such as maxnreg
    described: int = 0  # leading arguments that are tensor descriptors (for TMA), aligned for any dtype
    seconds: float = 0.0  # about how long compilation takes after tracing, where that is long
    _compiled: Any = field(default=None, repr=False)
    _head: tuple[Any, ...] = ()
    _tail: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor | None) -> None:
        """Run on the current stream of the first tensor's device, which must be the current device."""
        if self.grid == 0:
            return
        if recorder is not None:
            recorder.append((self, tensors))
            return
        if self._compiled is None:
            self._first(tensors)
            return
        # the address of every tensor, and the OR of all addresses, so that one test checks alignment
        pointers: list[Any] = list(tensors[: self.described])
        bits = 0
        for x in tensors[self.described :]:
            if x is None:
                pointers.append(None)
            else:
                pointer = x.data_ptr()
                bits |= pointer
                pointers.append(pointer)
        # Triton compiled for aligned pointers; others need a binary with narrower loads
        if bits % ALIGNMENT:
            self._dispatch(tensors)
            return
        device, run, function, metadata = self._head
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(self.grid, 1, 1, stream, function, metadata, None, None, None, *pointers, *self._tail)

    @property
    def _constants(self) -> dict[str, Any]:
        """Return the constants of the kernel with the options of the compiler."""
        return {
            **self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages, **self.options,
        }  # fmt: skip

    def _dispatch(self, tensors: tuple[Tensor | None, ...]) -> Any:
        return self.kernel[(self.grid,)](*tensors, *self.numbers, **self._constants)

    def binary(self, tensors: tuple[Tensor | None, ...]) -> Hashable:
        """Return what identifies the binary that tensors of these dtypes need."""
        dtypes = tuple([None if x is None else x.dtype for x in tensors])
        return (self.kernel, *self.constants.items(), self.num_warps, *self.options.items(), dtypes)

    def compile(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """Compile the binary for tensors of these dtypes, all aligned, without running it."""
        described, plain = tensors[: self.described], tensors[self.described :]
        aligned = [x if x is None or x.data_ptr() % ALIGNMENT == 0 else x.new_empty(1) for x in plain]
        return self.kernel.warmup(*described, *aligned, *self.numbers, grid=(1,), **self._constants)

    def _first(self, tensors: tuple[Tensor | None, ...]) -> None:
        compiled = self._dispatch(tensors)
        plain = tensors[self.described :]
        aligned = all(x is None or x.data_ptr() % ALIGNMENT == 0 for x in plain)
        # integers beyond 32 bits would need another signature; leave them to Triton
        small = all(isinstance(x, float) or -(2**31) <= x < 2**31 for x in self.numbers)
        if INTERPRETED or not aligned or not small:
            return
        device = next(x.device.index for x in plain if x is not None)
        self._tail = (*self.numbers, *(None for _ in self.constants))
        self._head = (device, compiled.run, compiled.function, compiled.packed_metadata)
        self._compiled = compiled


Step = tuple[Launch, tuple[Tensor | None, ...]]


class Chain:
    """Run launches one after another on the tensors of one call, taking each tensor's address once.

    `steps`: maps a call's tensors to the launches and the tensors of each. The same tensors must be None in
    every call, each launch must take at least two tensors, and none may be a tensor descriptor. Once all
    launches are compiled, `steps` is called once more, with positions in place of tensors.
    """

    def __init__(self, steps: Callable[[Sequence[Any]], Iterable[tuple[Launch, tuple[Any, ...]]]]) -> None:
        self.steps = steps
        self._used: Callable[[Sequence[Any]], tuple[Tensor, ...]] = tuple
        self._ready: list[tuple[Any, ...]] = []

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        """Run on the current stream of the tensors' device, which must be the current device."""
        if self._ready and recorder is None:
            pointers = [x.data_ptr() for x in self._used(tensors)]
            if reduce(or_, pointers) % ALIGNMENT == 0:
                places = (*pointers, None)
                stream = torch._C._cuda_getCurrentRawStream(self._ready[0][1])
                for grid, _, run, function, metadata, take, numbers in self._ready:
                    run(grid, 1, 1, stream, function, metadata, None, None, None, *take(places), *numbers)
                return
        for launch, given in self.steps(tensors):
            launch(*given)
        if not self._ready:
            self._prepare([None if x is None else i for i, x in enumerate(tensors)])

    def _prepare(self, numbered: Sequence[int | None]) -> None:
        # positions instead of tensors: the result is which tensor each launch takes
        steps = [step for step in self.steps(numbered) if step[0].grid != 0]
        if steps and all(launch._compiled is not None for launch, _ in steps):
            used = sorted({i for _, given in steps for i in given if i is not None})
            places = {None: -1, **{i: place for place, i in enumerate(used)}}
            self._used = itemgetter(*used)
            self._ready = [
                (launch.grid, *launch._head, itemgetter(*(places[i] for i in given)), launch._tail)
                for launch, given in steps
            ]


class Plans(Generic[Plan]):
    """Cache plans by the values they depend on; it is emptied when it holds `limit` plans."""

    def __init__(self, limit: int = 2048) -> None:
        self.limit = limit
        self.found: dict[Hashable, Plan] = {}

    def get(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        plan = self.found.get(key)
        if plan is None:
            if len(self.found) >= self.limit:
                self.found.clear()
            plan = self.found[key] = make()
        return plan


def unit_of(*strides: int) -> int:
    """Return the largest of 16, 8, 4, 2, 1 that divides every stride: strides are counted in it."""
    bits = 16
    for stride in strides:
        bits |= stride
    return bits & -bits


def tensor_spec(shape: Sequence[int], dtype: torch.dtype) -> TensorSpec:
    """Return the buffer spec (shape, strides, dtype) of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(shape), tuple(reversed(strides)), dtype


def allocate(device: torch.device, specs: Iterable[TensorSpec | None]) -> list[Tensor | None]:
    """Allocate tensors on the current device, which must be `device`.

    It uses the allocator of compiled code, in a third of the time of `torch.empty`. Only `torch.empty`
    supports the deterministic mode, which fills new memory.
    """
    empty = _EMPTY.get(device.type)
    if empty is None or torch.are_deterministic_algorithms_enabled():
        return [
            None if x is None else torch.empty_strided(x[0], x[1], dtype=x[2], device=device) for x in specs
        ]
    return [None if x is None else empty(*x) for x in specs]


def allocate_placeholders(device: torch.device, specs: Iterable[TensorSpec | None]) -> list[Tensor | None]:
    """Allocate tensors of stride 0, which take almost no memory, for `compile_ahead`."""
    return allocate(device, [None if x is None else (x[0], (0,) * len(x[0]), x[2]) for x in specs])


def compile_ahead(device: torch.device, kind: Hashable, steps: Callable[[], Iterable[Step]]) -> None:
    """Compile the binaries of these launches in parallel, the first time that `kind` occurs.

    Only the dtypes of the tensors matter. A kernel that does not compile fails where it is launched. Kernels
    are traced one at a time, so those that compile longest after tracing are traced first.
    """
    if INTERPRETED or recorder is not None or device.type != "cuda" or (device, kind) in _compiled_kinds:
        return
    # one thread at a time (see `_build_launcher`); Triton compiles for the current device
    with _COMPILE_AHEAD, device_guard(device):
        if (device, kind) in _compiled_kinds:
            return
        longest_first = sorted(steps(), key=lambda step: -step[0].seconds)
        _trace_in_turn()
        with _Compiler(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            found = [launch.compile(tensors) for launch, tensors in longest_first]
        futures = {id(x): x for x in found if hasattr(x, "result")}.values()
        kernels = [x for x in (future.result(ignore_errors=True) for future in futures) if x is not None]
        for kernel in kernels:
            with suppress(Exception):
                # reading the property loads the binary onto the GPU
                _ = kernel.run
        _compiled_kinds.add((device, kind))


class _Compiler(ThreadPoolExecutor):
    """Compile a kernel in a thread, together with its launcher."""

    def submit(self, compile_it: Any) -> Any:  # type: ignore[override]
        def run() -> Any:
            kernel = compile_it()
            _build_launcher(kernel)
            return kernel

        return super().submit(run)


def _trace_in_turn() -> None:
    """Make threads trace kernels one at a time, from now on in the whole process.

    Tracing is Python: if threads traced concurrently, all would finish late and compilation would start late.
    """
    for source in (ASTSource, *ASTSource.__subclasses__()):
        trace = vars(source).get("make_ir")
        if trace is not None and not hasattr(trace, "__wrapped__"):
            source.make_ir = _alone(trace)


def _alone(trace: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(trace)
    def alone(*args: Any, **options: Any) -> Any:
        with _TRACING:
            return trace(*args, **options)

    return alone


def _build_launcher(kernel: Any) -> None:
    """Compile a binary's launcher, which Triton caches on disk. No thread may use what it loads here.

    All launchers are Python modules of one name. Loading one again writes into the module that was loaded
    last, from which another thread may be about to take its function (Triton 3.6, single-phase
    initialisation).
    """
    with suppress(Exception):
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


_compiled_kinds: set[Hashable] = set()
_COMPILE_AHEAD, _TRACING = RLock(), RLock()
_EMPTY = {
    type_: getattr(torch._C._dynamo.guards, f"_empty_strided_{type_}", None) for type_ in ("cpu", "cuda")
}


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which the tensors' device is current; it costs nothing if it already is."""
    # entering torch.cuda.device costs microseconds of host time
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _here
    return torch.cuda.device(device)


_here = nullcontext()


@dataclass(frozen=True)
class Machine:
    """Describe a GPU by what tile sizes and options depend on."""

    kind: str  # cuda or hip
    capability: int  # 10 * major + minor
    num_sms: int
    shared: int  # bytes of shared memory that a program may use


@lru_cache
def machine(device: torch.device) -> Machine:
    """Return the GPU of a device; the values of an H200 where kernels are interpreted on the CPU."""
    if device.type != "cuda":
        return Machine("cuda", 90, 132, 227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    kind = "hip" if torch.version.hip else "cuda"
    capability = 10 * properties.major + properties.minor
    shared = getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
    return Machine(kind, capability, properties.multi_processor_count, shared)
