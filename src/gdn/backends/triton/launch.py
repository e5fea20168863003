"""Launching: a kernel with everything but its tensors fixed, and a cheap way to find it again.

A kernel's parameters come in this order: tensors (`x_ptr`), numbers, constants (`tl.constexpr`, capitals).
Numbers are never specialised on: another length, batch or head count runs the same binary. A stride that
loads are vectorised along is therefore passed in UNITs of elements, UNIT being a constant (`unit_of`).
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

# where set, launches are put here instead of run: how kernels are compiled for machines that are not there
recorder: list[tuple["Launch", tuple[Tensor | None, ...]]] | None = None
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels run on CPU tensors
ALIGNMENT = 16  # bytes that every pointer must be a multiple of for the compiled handle to be used again
Plan = TypeVar("Plan")
Room = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


def kernel(function: Any) -> Any:
    """triton.jit that specialises on no number: all but pointers and constants are runtime values."""
    names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if not name.endswith("_ptr") and parameter.annotation is not triton.language.constexpr
    ]
    return triton.jit(function, do_not_specialize=names)


@dataclass
class Launch:
    """kernel[grid](*tensors, *numbers, **constants), some 6 us of host time from the second call on.

    A plan holds launches for one set of shapes, strides, dtypes and one device, so that all that can differ
    from call to call is where the tensors lie. The compiled handle is kept after the first launch whose
    tensors are all aligned; others go through Triton's own dispatch.
    """

    kernel: Any
    grid: int
    numbers: tuple[int | float, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # of the compiler, beyond these
    described: int = 0  # tensors that come first, as tensor descriptors: aligned whatever they are of
    seconds: float = 0.0  # about what compiling takes beside tracing, where that is long
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
        pointers: list[Any] = list(tensors[: self.described])
        bits = 0
        for x in tensors[self.described :]:
            if x is None:
                pointers.append(None)
            else:
                pointer = x.data_ptr()
                bits |= pointer
                pointers.append(pointer)
        if bits % ALIGNMENT:
            self._dispatch(tensors)
            return
        device, run, function, metadata = self._head
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(self.grid, 1, 1, stream, function, metadata, None, None, None, *pointers, *self._tail)

    @property
    def _constants(self) -> dict[str, Any]:
        """Of the kernel and of its compiler."""
        return {
            **self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages, **self.options,
        }  # fmt: skip

    def _dispatch(self, tensors: tuple[Tensor | None, ...]) -> Any:
        return self.kernel[(self.grid,)](*tensors, *self.numbers, **self._constants)

    def binary(self, tensors: tuple[Tensor | None, ...]) -> Hashable:
        """What it runs for tensors of these dtypes."""
        dtypes = tuple([None if x is None else x.dtype for x in tensors])
        return (self.kernel, *self.constants.items(), self.num_warps, *self.options.items(), dtypes)

    def compile(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """The binary for tensors of these dtypes, all aligned; not run."""
        described, plain = tensors[: self.described], tensors[self.described :]
        aligned = [x if x is None or x.data_ptr() % ALIGNMENT == 0 else x.new_empty(1) for x in plain]
        return self.kernel.warmup(*described, *aligned, *self.numbers, grid=(1,), **self._constants)

    def _first(self, tensors: tuple[Tensor | None, ...]) -> None:
        compiled = self._dispatch(tensors)
        plain = tensors[self.described :]
        aligned = all(x is None or x.data_ptr() % ALIGNMENT == 0 for x in plain)
        small = all(isinstance(x, float) or -(2**31) <= x < 2**31 for x in self.numbers)
        if INTERPRETED or not aligned or not small:
            return
        device = next(x.device.index for x in plain if x is not None)
        self._tail = (*self.numbers, *(None for _ in self.constants))
        self._head = (device, compiled.run, compiled.function, compiled.packed_metadata)
        self._compiled = compiled


Step = tuple[Launch, tuple[Tensor | None, ...]]


class Chain:
    """Launches one after the other on tensors of one call, each of which says but once where it lies.

    `steps`: from a call's tensors, of which the same ones are None each time, to the launches and what they
    take, two tensors at least and none described. Once all are compiled it is asked for numbers instead.
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
    """Plans by the values they were made from, at most `limit`; then it starts anew."""

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
    """The largest of 16, 8, 4, 2, 1 that divides every stride: what strides are counted in."""
    bits = 16
    for stride in strides:
        bits |= stride
    return bits & -bits


def room(shape: Sequence[int], dtype: torch.dtype) -> Room:
    """A contiguous tensor to be."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(shape), tuple(reversed(strides)), dtype


def allocate(device: torch.device, rooms: Iterable[Room | None]) -> list[Tensor | None]:
    """New tensors on the current device, which must be `device`.

    As compiled code makes them, in a third of the time of `torch.empty`; which alone knows of the
    deterministic mode, where new memory is filled.
    """
    empty = _EMPTY.get(device.type)
    if empty is None or torch.are_deterministic_algorithms_enabled():
        return [
            None if x is None else torch.empty_strided(x[0], x[1], dtype=x[2], device=device) for x in rooms
        ]
    return [None if x is None else empty(*x) for x in rooms]


def stand_ins(device: torch.device, rooms: Iterable[Room | None]) -> list[Tensor | None]:
    """Tensors that take no room, for `ahead`."""
    return allocate(device, [None if x is None else (x[0], (0,) * len(x[0]), x[2]) for x in rooms])


def ahead(device: torch.device, kind: Hashable, steps: Callable[[], Iterable[Step]]) -> None:
    """Compile what these launches need, all at the same time, the first time that `kind` comes by.

    Of their tensors the dtypes count. What cannot be compiled fails where it is launched. As kernels are
    traced one by one, those that take longest after it begin.
    """
    if INTERPRETED or recorder is not None or device.type != "cuda" or (device, kind) in _met:
        return
    # one thread at a time: see `_build_launcher`. Binaries are kept for the current device
    with _AHEAD, on(device):
        if (device, kind) in _met:
            return
        longest_first = sorted(steps(), key=lambda step: -step[0].seconds)
        _trace_in_turn()
        with _Compiler(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            found = [launch.compile(tensors) for launch, tensors in longest_first]
        futures = {id(x): x for x in found if hasattr(x, "result")}.values()
        kernels = [x for x in (future.result(ignore_errors=True) for future in futures) if x is not None]
        for kernel in kernels:
            with suppress(Exception):
                # asked for: the binary is loaded
                _ = kernel.run
        _met.add((device, kind))


class _Compiler(ThreadPoolExecutor):
    """Compiles kernels, and what calls each."""

    def submit(self, compile_it: Any) -> Any:  # type: ignore[override]
        def run() -> Any:
            kernel = compile_it()
            _build_launcher(kernel)
            return kernel

        return super().submit(run)


def _trace_in_turn() -> None:
    """From now on no two threads trace a kernel at the same time.

    That is Python: side by side all would end last, and with them those that take longest after it.
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
    """Compile what calls a binary, which Triton keeps on disk. No thread may use what it loads here.

    All launchers are Python modules of one name; loading one again writes into the module loaded last, from
    which another thread may be about to take its function (Triton 3.6, single-phase initialisation).
    """
    with suppress(Exception):
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


_met: set[Hashable] = set()
_AHEAD, _TRACING = RLock(), RLock()
_EMPTY = {
    type_: getattr(torch._C._dynamo.guards, f"_empty_strided_{type_}", None) for type_ in ("cpu", "cuda")
}


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the tensors' device the current one; costs nothing where it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _here
    return torch.cuda.device(device)


_here = nullcontext()


@dataclass(frozen=True)
class Machine:
    """What configurations are chosen by."""

    kind: str  # cuda or hip
    capability: int  # 10 * major + minor
    num_sms: int
    shared: int  # bytes of shared memory that a program may have


@lru_cache
def machine(device: torch.device) -> Machine:
    """The machine behind a device; an imaginary H200 where kernels are interpreted on the CPU."""
    if device.type != "cuda":
        return Machine("cuda", 90, 132, 227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    kind = "hip" if torch.version.hip else "cuda"
    capability = 10 * properties.major + properties.minor
    shared = getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
    return Machine(kind, capability, properties.multi_processor_count, shared)
