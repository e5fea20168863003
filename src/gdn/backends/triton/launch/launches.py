"""Run kernels with little host time: everything but the addresses of tensors is fixed in advance.

A `Launch` is one kernel with its grid, scalars and constants. A `LaunchSequence` runs several on the tensors
of one call. A `CachedLaunch` repeats the launch of a public call for later calls with other addresses.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from threading import get_ident, local
from typing import Any

import torch
from torch import Tensor

from gdn._failures import log_failure
from gdn.backends.triton.launch.background import Background
from gdn.backends.triton.launch.device import device_guard, loads_in_captures
from gdn.backends.triton.launch.kernels import INTERPRETED
from gdn.backends.triton.launch.launcher import DirectCall, direct_call, triton_call
from gdn.backends.triton.launch.parallel import compile_all, compile_one
from gdn.backends.triton.launch.ready import Ready, prepare
from gdn.backends.triton.launch.saved import LOADING, find_binary, launch_key, record_binary

ALIGNMENT = 16  # bytes: if every pointer is a multiple, the compiled handle of the first launch can be reused


@dataclass
class Launch:
    """Run kernel[grid](*tensors, *scalars, **constants) with some 6 us of host time from the second call on.

    A plan holds launches for one set of shapes, strides, dtypes and one device, so only the addresses of
    tensors can differ from call to call. The compiled handle is kept after the first launch whose tensors are
    all aligned; unaligned tensors go through Triton's own dispatch.
    """

    kernel: Any
    grid: int
    scalars: tuple[int | float | None, ...]  # None: not a parameter of the binary
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # further compiler options, such as maxnreg
    num_descriptors: int = 0  # leading arguments that are tensor descriptors (for TMA), aligned for any dtype
    seconds: float = 0.0  # about how long compilation takes after tracing, where that is long
    unaligned: "Launch | None" = None  # runs instead where tensors are not aligned; None: this one
    _compiled: Any = field(default=None, repr=False)
    _device: int = 0
    _call: DirectCall | None = field(default=None, repr=False)  # descriptors are Triton's, not encoded
    _direct: DirectCall | None = field(default=None, repr=False)  # descriptors are encoded; see `direct`
    _trailing: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor | None) -> None:
        """Run on the current stream of the first tensor's device, which must be the current device."""
        if self.grid == 0:
            return
        if _recorders and is_recording():
            _recorders[get_ident()].append((self, tensors))
            return
        call = self._call
        if call is None:
            with loads_in_captures():
                self._launch_first(tensors)
            return
        # the address of every tensor, and the OR of all addresses, so that one test checks alignment
        pointers: list[Any] = list(tensors[: self.num_descriptors])
        bits = 0
        for x in tensors[self.num_descriptors :]:
            if x is None:
                pointers.append(None)
            else:
                pointer = x.data_ptr()
                bits |= pointer
                pointers.append(pointer)
        # Triton compiled for aligned pointers; others need a binary with narrower loads
        if bits % ALIGNMENT:
            with loads_in_captures():
                (self.unaligned or self)._dispatch(tensors)
            return
        call(self.grid, torch._C._cuda_getCurrentRawStream(self._device), (*pointers, *self._trailing))

    @property
    def direct(self) -> DirectCall | None:
        """Return the call that takes addresses and encoded descriptors; None if there is none (yet)."""
        return self._direct if self.num_descriptors else self._call

    @property
    def _constants(self) -> dict[str, Any]:
        """Return the constants of the kernel with the options of the compiler."""
        return {
            **self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages, **self.options,
        }  # fmt: skip

    def _dispatch(self, tensors: tuple[Tensor | None, ...]) -> Any:
        return self.kernel[(self.grid,)](*tensors, *self.scalars, **self._constants)

    def binary_key(self, tensors: tuple[Tensor | None, ...]) -> Hashable:
        """Return what identifies the binary that tensors of these dtypes need."""
        dtypes = tuple([None if x is None else x.dtype for x in tensors])
        # the function: Triton would hash the kernel's source, which takes 10 to 40 ms
        return (self.kernel.fn, *self.constants.items(), self.num_warps, *self.options.items(), dtypes)

    def compile(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """Compile the binary for tensors of these dtypes, all aligned, without running it."""
        descriptors, plain = tensors[: self.num_descriptors], tensors[self.num_descriptors :]
        aligned = [x if x is None or x.data_ptr() % ALIGNMENT == 0 else x.new_empty(1) for x in plain]
        return self.kernel.warmup(*descriptors, *aligned, *self.scalars, grid=(1,), **self._constants)

    def trace(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Trace the launch into a graph, without PDL and what needs inline assembly; no bit depends on it."""
        assembly = ("PDL", "AHEAD", "LOADS_FIRST", "HOLDS", "FETCHED", "SHUFFLES")
        plain = {name: type(x)() if name in assembly else x for name, x in self.constants.items()}
        wrapped = torch.library.wrap_triton(self.kernel)[(self.grid,)]
        wrapped(*tensors, *self.scalars, **plain, num_warps=self.num_warps, num_stages=self.num_stages)

    def needs_compiler(self, tensors: tuple[Tensor | None, ...]) -> bool:
        """Return True before the first launch whose compiled handle is kept for later ones."""
        return not INTERPRETED and self._call is None and self.grid != 0 and self._is_usual(tensors)

    def _is_usual(self, tensors: tuple[Tensor | None, ...]) -> bool:
        # integers beyond 32 bits would need another signature; leave them to Triton
        is_small = all(not isinstance(x, int) or -(2**31) <= x < 2**31 for x in self.scalars)
        plain = tensors[self.num_descriptors :]
        return is_small and all(x is None or x.data_ptr() % ALIGNMENT == 0 for x in plain)

    def _launch_first(self, tensors: tuple[Tensor | None, ...]) -> None:
        plain = tensors[self.num_descriptors :]
        if INTERPRETED or not self._is_usual(tensors):
            (self.unaligned or self)._dispatch(tensors)
            return
        saved = find_binary(self, tensors)
        device = next(x.device for x in plain if x is not None)
        if saved is None:
            compile_now(device, [(self, tensors)])
        # no other thread may load a launcher meanwhile
        with LOADING:
            compiled = self._dispatch(tensors) if saved is None else saved
        record_binary(self, tensors, compiled)
        self._device = device.index
        self._trailing = (*self.scalars, *(None for _ in self.constants))
        self._compiled, self._direct = compiled, direct_call(compiled)
        # last: another thread that finds it finds the others, too
        self._call = triton_call(compiled) if self.num_descriptors or not self._direct else self._direct
        if saved is not None:
            self(*tensors)


Step = tuple[Launch, tuple[Any, ...]]
# compiles what calls of other sizes will need: see `precompile`
BACKGROUND: Background[tuple[torch.device, Step]] = Background(lambda job: compile_on(*job))
_expected = local()  # steps: what this thread compiles with the next launch


def compile_on(device: torch.device, step: Step) -> None:
    """Compile a launch for a device, in a thread whose current device may be another."""
    with device_guard(device):
        compile_one(*step)


def compile_now(device: torch.device, steps: Sequence[Step]) -> None:
    """Compile these launches of a call in parallel, for the current device, before they are launched."""
    steps = [*steps, *vars(_expected).pop("steps", ())]
    # one thread at a time: the others would compile the same
    with (
        LOADING,
        BACKGROUND.call([job_key(device, *step) for step in steps]),
        log_failure("the compilation of launches in parallel"),
    ):
        # what raises here raises again where it is launched
        compile_all(sorted(steps, key=lambda step: -step[0].seconds))


def compile_with_next(steps: Sequence[Step]) -> None:
    """Compile these launches of a call with the next one that this thread compiles, on the same device."""
    if not is_recording():
        missing = [(one, tuple(map(stand_in, given))) for one, given in steps if one.needs_compiler(given)]
        vars(_expected).setdefault("steps", []).extend(missing)


def stand_in(x: Any) -> Any:
    """Return a tensor or TMA descriptor without memory, for which Triton compiles as for an aligned x."""
    if x is None:
        return None
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    # without the constructor, which would check all fields again
    descriptor = object.__new__(type(x))
    descriptor.__dict__.update(vars(x), base=stand_in(x.base))
    return descriptor


def job_key(device: torch.device, launch: Launch, tensors: tuple[Any, ...]) -> Hashable:
    """Return what identifies the binary of a launch on a device, among the jobs of the background."""
    return device, launch_key(launch, tensors) or id(launch)


class LaunchSequence:
    """Run launches one after another on the tensors of one call, taking each tensor's address once.

    `steps`: maps a call's tensors to the launches and the arguments of each: tensors of the call, views of
    them, and TMA descriptors of such. The same tensors must be None in every call, and the others must have
    the shapes, strides and dtypes of the first call. Once all launches are compiled, `steps` is called once
    more, on the meta device, and never again.
    """

    def __init__(self, steps: Callable[[Sequence[Any]], Iterable[Step]]) -> None:
        self.steps = steps
        self._ready: Ready | None = None

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        """Run on the current stream of the tensors' device, which must be the current device."""
        ready = self._ready
        if ready is not None and not is_recording():
            pointers = [x.data_ptr() for x in ready.used(tensors)]
            if reduce(or_, pointers) % ALIGNMENT == 0:
                ready.launch(pointers)
                return
        launches, steps = [], list(self.steps(tensors))
        if ready is None and not is_recording():
            missing = [(launch, given) for launch, given in steps if launch.needs_compiler(given)]
            if len(missing) > 1:
                compile_now(next(x.device for x in tensors if x is not None), missing)
        for launch, given in steps:
            launch(*given)
            if launch.grid != 0:
                launches.append(launch)
        if ready is None and launches and all(launch.direct is not None for launch in launches):
            self._ready = prepare(self.steps, tensors)


@dataclass(frozen=True)
class CachedLaunch:
    """Repeat the launch of a call for later calls that differ only in the addresses of tensors."""

    launch: Launch
    device: torch.device

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch with the tensors of a problem, in its order."""
        with device_guard(self.device):
            self.launch(*tensors)


# by thread: launches are recorded here instead of run, so kernels compile for GPUs that are not present
_recorders: dict[int, list[tuple[Launch, tuple[Tensor | None, ...]]]] = {}


@contextmanager
def record_launches(into: list[Any]) -> Iterator[list[Any]]:
    """Append this thread's launches and their tensors to `into` instead of running them, while it is open."""
    thread = get_ident()
    before = _recorders.get(thread)
    _recorders[thread] = into
    try:
        yield into
    finally:
        if before is None:
            del _recorders[thread]
        else:
            _recorders[thread] = before


def is_recording() -> bool:
    """Return True if this thread's launches are recorded: what they would write is not written."""
    return bool(_recorders) and get_ident() in _recorders


def defer_ahead(*given: Any) -> None:
    """Append the arguments of a `compile_ahead` to the recorder's list `ahead`, if it has one."""
    ahead = getattr(_recorders[get_ident()], "ahead", None)
    if ahead is not None:
        ahead.append(given)
