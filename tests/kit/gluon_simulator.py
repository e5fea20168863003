"""Run Gluon kernels on the CPU: results, memory accesses, and the protocol of the mbarriers.

The source is the kernel's own: its functions are bound anew to the stand-ins below, torch tensors for values
and shared memory, a thread for each partition. New shared memory holds NaN, or -1. A barrier that does not
complete within SECONDS, or that has more arrivals than its count, fails. Layouts and fences are not
simulated. An MMA and a TMA load are done when they are issued; a copy by cp.async makes its shared memory NaN
when it is issued, and is done when its lanes arrive at an mbarrier.
"""

import operator
import random
import threading
import time
import types
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

SECONDS = 20.0
DELAYS: dict[int, float] = {}  # partition -> most seconds that it sleeps at barriers
_here = threading.local()
_atomics = threading.Lock()  # of partitions, which are threads


def _plain(x: Any) -> Any:
    return x.x if isinstance(x, Value) else x


class Value:
    """Hold a tensor in registers, or a scalar."""

    def __init__(self, x: Any) -> None:
        self.x = torch.as_tensor(x)

    dtype = property(lambda self: self.x.dtype)
    type = types.SimpleNamespace(layout="layout")

    def to(self, dtype: Any, bitcast: bool = False) -> "Value":
        return Value(self.x.view(dtype) if bitcast else self.x.to(dtype))

    def __and__(self, other: Any) -> "Value":
        other = _plain(other)
        # torch has no unsigned int32: a mask of 32 bits is a signed integer
        return Value(self.x & (other - 2**32 if isinstance(other, int) and other >= 2**31 else other))

    def __neg__(self) -> "Value":
        return Value(-self.x)

    def __getitem__(self, index: Any) -> "Value":
        return Value(self.x[index])

    def __bool__(self) -> bool:
        return bool(self.x)

    def __index__(self) -> int:
        return int(self.x)


def _operator(name: str, of: Callable[..., Any]) -> None:
    setattr(Value, f"__{name.rstrip('_')}__", lambda a, b: Value(of(a.x, _plain(b))))
    # unused for comparisons
    setattr(Value, f"__r{name}__", lambda a, b: Value(of(_plain(b), a.x)))


for _name in ("add", "sub", "mul", "truediv", "mod", "floordiv", "xor", "or_", "rshift"):
    _operator(_name, getattr(operator, _name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _operator(_name, getattr(operator, _name))


class Pointer:
    """Hold addresses in HBM: places in a tensor's memory."""

    def __init__(self, flat: torch.Tensor, places: Any = 0) -> None:
        self.flat, self.places = flat, places
        self.dtype = types.SimpleNamespace(element_ty=flat.dtype)

    @staticmethod
    def where(condition: torch.Tensor, x: "Pointer", y: "Pointer") -> "Pointer":
        """Return the addresses of x or y, element by element, in one tensor of both memories; for loads."""
        places = torch.where(condition, x.places, torch.as_tensor(y.places) + x.flat.numel())
        return Pointer(torch.cat((x.flat, y.flat)), places)

    @staticmethod
    def to(x: torch.Tensor) -> "Pointer":
        """Point to the first element of a tensor; all of its memory behind that can be reached."""
        size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return Pointer(x.as_strided((size,), (1,)))

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.flat, self.places + _plain(other))


class Shared:
    """Hold a view of shared memory."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    dtype = property(lambda self: self.x.dtype)

    def index(self, i: Any) -> Any:
        found = self.x[int(i)]
        return found[0] if isinstance(found, list) else Shared(found)

    def reshape(self, shape: Any) -> "Shared":
        return Shared(self.x.view([int(n) for n in shape]))

    def slice(self, begin: Any, size: Any, axis: int = 0) -> "Shared":
        return Shared(self.x.narrow(axis, int(begin), int(size)))

    def permute(self, order: Any) -> "Shared":
        return Shared(self.x.permute(*order))

    def load(self, layout: Any) -> Value:
        return Value(self.x.clone())

    def store(self, value: Value) -> None:
        assert value.x.dtype == self.x.dtype and value.x.shape == self.x.shape
        self.x.copy_(value.x)


class Barrier:
    """Complete a phase when all arrivals and all TMA bytes are there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.phase = 0

    def change(self, arrivals: int = 0, bytes: int = 0) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += bytes
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == 0 and self.bytes == 0:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]
        self.shape = (count, 1)

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


class Descriptor:
    """Describe a tensor for TMA, in blocks; loads from outside of the tensor read zeros."""

    def __init__(self, x: torch.Tensor, block: list[int]) -> None:
        self.x, self.block, self.layout, self.dtype = x, block, "layout", x.dtype
        size = torch.Size(block).numel() * x.element_size()
        self.block_type = types.SimpleNamespace(shape=block, nbytes=size)

    def both(self, corner: list[Any], tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the part of the tensor that a block at a corner covers, and that part of the block."""
        x = self.x
        for axis, (begin, size) in enumerate(zip(map(int, corner), self.block, strict=True)):
            begin, there = min(begin, x.shape[axis]), min(size, max(x.shape[axis] - begin, 0))
            x, tile = x.narrow(axis, begin, there), tile.narrow(axis, 0, there)
        return x, tile


class _Barriers:
    MBarrierLayout = staticmethod(lambda: "barrier")

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    @staticmethod
    def expect(barrier: Barrier, bytes: int) -> None:
        barrier.change(1, bytes)

    @staticmethod
    def arrive(barrier: Barrier, count: int) -> None:
        _delay()
        barrier.change(count)

    @staticmethod
    def wait(barrier: Barrier, parity: Any) -> None:
        _delay()
        with barrier.changed:
            done = barrier.changed.wait_for(lambda: barrier.phase % 2 != int(parity), SECONDS)
            assert done, "a barrier that is waited for does not complete"


def _delay() -> None:
    if DELAYS:
        # mostly short: other threads then do much between two of a partition's steps
        time.sleep(DELAYS.get(_here.partition, 0.0) * random.random() ** 4)


def _tma_load(descriptor: Descriptor, corner: list[Any], barrier: Barrier, shared: Shared) -> None:
    shared.x.zero_()
    there, here = descriptor.both(corner, shared.x)
    here.copy_(there)
    barrier.change(bytes=-descriptor.block_type.nbytes)


def _tma_store(descriptor: Descriptor, corner: list[Any], shared: Shared) -> None:
    there, here = descriptor.both(corner, shared.x)
    there.copy_(here)


def _warpgroup_mma(a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    assert isinstance(b, Shared) and a.x.dtype == b.x.dtype
    product = a.x.float() @ b.x.float()
    return Value(product + acc.x if use_acc else product)


def _mma_v2(a: Value, b: Value, acc: Value, input_precision: str | None = None) -> Value:
    assert a.dtype == b.dtype
    if input_precision == "tf32":
        # a tensor core drops the last 13 bits
        a, b = (
            (x.to(torch.int32, bitcast=True) & 0xFFFFE000).to(torch.float32, bitcast=True) for x in (a, b)
        )
    else:
        assert a.x.element_size() == 2
    return Value(a.x.float() @ b.x.float() + acc.x)


def _cp_async(shared: Shared, pointer: Pointer, mask: Value) -> None:
    # it may land at any time from now on, until the lanes that issued it arrive at a barrier
    _fill(shared.x)
    vars(_here).setdefault("copies", []).append((shared, pointer, mask))


def _cp_async_arrive(barrier: Barrier, increment_count: bool) -> None:
    assert not increment_count
    _delay()
    _cp_async_wait(0)
    barrier.change(32 * _here.warps)
    _delay()


def _cp_async_wait(pending: int) -> None:
    assert pending == 0
    for shared, pointer, mask in vars(_here).pop("copies", ()):
        shared.store(_load(pointer, mask))


def _store(pointer: Pointer, value: Any, mask: Value | None = None) -> None:
    places, x = torch.broadcast_tensors(torch.as_tensor(pointer.places), torch.as_tensor(_plain(value)))
    chosen = torch.ones_like(places, dtype=torch.bool) if mask is None else mask.x.expand(places.shape)
    pointer.flat[places[chosen]] = x[chosen].to(pointer.flat.dtype)


def _load(pointer: Pointer, mask: Value | None = None, other: float = 0.0) -> Value:
    places = torch.as_tensor(pointer.places)
    if mask is None:
        return Value(pointer.flat[places].clone())
    chosen = mask.x.expand(torch.broadcast_shapes(mask.x.shape, places.shape))
    x = pointer.flat[torch.where(chosen, places, 0)]
    return Value(torch.where(chosen, x, torch.as_tensor(other, dtype=x.dtype)))


def _atomic_add(pointer: Pointer, value: Any, sem: str, mask: Value | None = None) -> Value:
    """Add to chosen addresses, at most one of them, and return what was there; -1 in other lanes."""
    with _atomics:
        before = _load(pointer, mask, other=-1)
        places, value = torch.broadcast_tensors(*map(torch.as_tensor, (pointer.places, _plain(value))))
        chosen = torch.ones_like(places, dtype=torch.bool) if mask is None else mask.x
        assert chosen.sum() <= 1
        pointer.flat[places[chosen]] += value[chosen].to(pointer.flat.dtype)
    return before


def _allocate(dtype: Any, shape: list[Any], layout: Any) -> Any:
    shape = [int(n) for n in shape]
    if layout == "barrier":
        return Barriers(shape[0])
    return Shared(_fill(torch.empty(shape, dtype=dtype)))


def _fill(x: torch.Tensor) -> torch.Tensor:
    """Write what no kernel should read."""
    return x.fill_(float("nan") if x.dtype.is_floating_point else -1)


def _warp_specialize(partitions: Any, warps: Any, registers: Any) -> None:
    errors, here = [], dict(vars(_here))

    def go(function: Callable[..., None], arguments: tuple[Any, ...], warps: int, partition: int) -> None:
        vars(_here).update(here, warps=warps, partition=partition)
        try:
            function(*arguments)
        except BaseException as e:
            errors.append(e)

    threads = [
        threading.Thread(target=go, args=(*partition, count, i))
        for i, (partition, count) in enumerate(zip(partitions, (_here.warps, *warps), strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class _Language:
    bfloat16, float16, float32, float64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
    # masks of 32 bits are signed integers here
    int1, int32, int64, uint32 = torch.bool, torch.int32, torch.int64, torch.int32
    constexpr = gl.constexpr
    SliceLayout = staticmethod(lambda dim, parent: "layout")
    program_id = staticmethod(lambda axis: Value(_here.program))
    num_programs = staticmethod(lambda axis: Value(_here.programs))
    cdiv = staticmethod(lambda a, b: -(-int(a) // int(b)))
    static_range = staticmethod(range)
    arange = staticmethod(lambda begin, end, layout: Value(torch.arange(begin, end)))
    zeros = staticmethod(
        lambda shape, dtype, layout: Value(torch.zeros([int(n) for n in shape], dtype=dtype))
    )
    convert_layout = staticmethod(lambda x, layout: x)
    permute = staticmethod(lambda x, order: Value(x.x.permute(*order)))
    reshape = staticmethod(lambda x, shape: Value(x.x.reshape([int(n) for n in shape])))
    split = staticmethod(lambda x: tuple(map(Value, x.x.unbind(-1))))
    join = staticmethod(lambda x, y: Value(torch.stack((x.x, y.x), -1)))
    expand_dims = staticmethod(lambda x, axis: Value(x.x.unsqueeze(axis)))
    sum = staticmethod(lambda x, axis: Value(x.x.sum(axis)))
    rsqrt = staticmethod(lambda x: Value(torch.rsqrt(x.x)))
    minimum = staticmethod(
        lambda a, b: Value(torch.minimum(torch.as_tensor(_plain(a)), torch.as_tensor(_plain(b))))
    )
    maximum = staticmethod(
        lambda a, b: Value(torch.maximum(torch.as_tensor(_plain(a)), torch.as_tensor(_plain(b))))
    )
    max = staticmethod(lambda x, axis: Value(x.x.amax(axis)))
    BlockedLayout = SwizzledSharedLayout = staticmethod(lambda *shape: "layout")
    exp = staticmethod(lambda x: Value(torch.exp(x.x)))
    exp2 = staticmethod(lambda x: Value(torch.exp2(x.x)))
    log = staticmethod(lambda x: Value(torch.log(x.x)))
    log2 = staticmethod(lambda x: Value(torch.log2(x.x)))
    abs = staticmethod(lambda x: Value(x.x.abs()))
    # supports sums only
    associative_scan = staticmethod(lambda x, axis, added: Value(x.x.cumsum(axis)))
    load = staticmethod(_load)
    atomic_add = staticmethod(_atomic_add)
    full = staticmethod(
        lambda shape, x, dtype, layout: Value(torch.as_tensor(_plain(x)).to(dtype).expand(tuple(shape)))
    )
    num_warps = staticmethod(lambda: _here.warps)
    broadcast = staticmethod(lambda x, y: tuple(map(Value, torch.broadcast_tensors(x.x, y.x))))
    store = staticmethod(_store)
    allocate_shared_memory = staticmethod(_allocate)
    warp_specialize = staticmethod(_warp_specialize)

    @staticmethod
    def static_assert(condition: bool) -> None:
        assert condition

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Any:
        condition = torch.as_tensor(_plain(condition))
        if isinstance(x, Pointer):
            return Pointer.where(condition, x, y)
        return Value(torch.where(condition, _plain(x), _plain(y)))


STANDINS: dict[str, Any] = {
    "gl": _Language, "tl": _Language, "mbarrier": _Barriers, "tma_load": _tma_load, "tma_store": _tma_store,
    "tma_store_wait": lambda pending: None, "fence_async_shared": lambda: None,
    "gdc_launch_dependents": lambda: None, "gdc_wait": lambda: None,
    "warpgroup_mma": _warpgroup_mma, "mma_v2": _mma_v2,
    "cp_async": _cp_async, "cp_async_arrive": _cp_async_arrive, "cp_async_commit": lambda: None,
    "cp_async_wait": _cp_async_wait,
    "recast": lambda shared, dtype, shape, layout: Shared(shared.x.view(dtype).view([int(n) for n in shape])),
    "barrier": lambda: None, "opaque": lambda x: x, "widen_bf16": lambda x: x.to(torch.float32),
    "warpgroup_mma_wait": lambda pending, deps: deps[0] if len(deps) == 1 else deps,
}  # fmt: skip


def simulate(kernel: JITFunction[Any], grid: int, *arguments: Any, num_warps: int = 4) -> None:
    """Run a kernel's CTAs one after the other; tensors are passed as pointers."""
    bound: dict[int, Any] = {}

    def bind(function: JITFunction[Any]) -> Any:
        if id(function) not in bound:
            code, names = function.fn.__code__, {"range": lambda *ends: map(Value, range(*map(int, ends)))}
            bound[id(function)] = types.FunctionType(code, names, code.co_name)
            for name, x in function.fn.__globals__.items():
                if name in STANDINS:
                    names[name] = STANDINS[name]
                elif isinstance(x, (JITFunction, InterpretedFunction)):
                    names[name] = bind(x)
                elif hasattr(x, "__triton_aggregate__"):
                    names[name] = bind_struct(x)
                else:
                    names[name] = x.value if isinstance(x, gl.constexpr) else x
        return bound[id(function)]

    def bind_struct(struct: Any) -> Any:
        """Make a dataclass of a struct's fields and methods."""
        if id(struct) not in bound:
            made = bound[id(struct)] = make_dataclass(struct.__name__, struct.names)
            for name, x in vars(struct).items():
                if isinstance(x, (JITFunction, InterpretedFunction)):
                    setattr(made, name, bind(x))
        return bound[id(struct)]

    given = [Pointer.to(x) if isinstance(x, torch.Tensor) else x for x in arguments]
    _here.programs, _here.warps = grid, num_warps
    for _here.program in range(grid):
        bind(kernel)(*given)
