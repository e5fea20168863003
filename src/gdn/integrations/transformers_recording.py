"""Record a step of a static cache, and keep what its replays need: its inputs, and the tensors of its cache.

A recording outlives its cache, whose tensors the graph writes. They are given to the next cache when nobody
else has them: neither the cache nor one of its layers, and no caller who keeps a tensor or a view of one.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from gdn._torch_compat import storage_uses, tensor_uses
from gdn.integrations import transformers_capture as capturing
from gdn.integrations.transformers_model_key import VALUES


class CacheState:
    """Hold where a cache and its layers have tensors and plain values: what a recorded step depends on."""

    def __init__(self, cache: Any) -> None:
        self.tensor_places: list[tuple[Any, Any]] = []
        self.value_places: list[tuple[Any, Any]] = []
        # a caller may keep them without their cache
        self.layers = [weakref.ref(layer) for layer in cache.layers]
        self.kinds = (type(cache), *map(type, cache.layers))
        self.own_values = own_values(cache)
        for layer in cache.layers:
            own = vars(layer)
            for holder in (own, *(x for x in own.values() if isinstance(x, dict))):
                self.tensor_places += [(holder, name) for name, x in holder.items() if isinstance(x, Tensor)]
                self.value_places += [(holder, name) for name, x in holder.items() if isinstance(x, VALUES)]

    def tensors(self) -> list[Tensor]:
        return [holder[name] for holder, name in self.tensor_places]

    def values(self) -> list[Any]:
        return [holder[name] for holder, name in self.value_places]

    def forget(self) -> None:
        """Drop the dictionaries of the layers, which keep their tensors when the layers are gone."""
        self.tensor_places.clear()
        self.value_places.clear()

    def key(self) -> Hashable:
        """Return what two caches have in common that one recording can serve."""
        names = tuple(name for _, name in self.tensor_places)
        # tensors of one memory must be so in both: the first one in each
        first: dict[int, int] = {}
        memories = [first.setdefault(x.untyped_storage().data_ptr(), i) for i, x in enumerate(self.tensors())]
        sizes = ((x.shape, x.stride(), x.storage_offset(), x.dtype) for x in self.tensors())
        values = (*self.values(), *self.own_values.items())
        return self.kinds, names, tuple(memories), tuple(sizes), values

    def move_to(self, buffers: list[Tensor]) -> None:
        """Copy the tensors of the cache to `buffers`, which take their places."""
        for (holder, name), buffer in zip(self.tensor_places, buffers, strict=True):
            buffer.copy_(holder[name])
            holder[name] = buffer


def own_values(cache: Any) -> dict[str, Any]:
    """Return the plain values that a cache has besides its layers."""
    return {name: x for name, x in vars(cache).items() if isinstance(x, VALUES)}


class BufferOwner:
    """Hold which cache has the buffers of a recording, or of several: one cache may have more than one."""

    def __init__(self, cache: Any, state: CacheState) -> None:
        # a graph must not keep its cache alive
        self.cache: Callable[[], Any] = weakref.ref(cache)
        self.state = state
        self.recordings: weakref.WeakSet[Recording] = weakref.WeakSet()
        # the stream of the cache's last step
        self.stream: Any = None

    def serves(self, cache: Any) -> bool:
        """Return True for a cache that has the layers whose tensors these are: the owner, or a copy of it."""
        layers, own = getattr(cache, "layers", None) or (), [layer() for layer in self.state.layers]
        return 0 < len(layers) == len(own) and all(map(is_, layers, own))

    @property
    def is_gone(self) -> bool:
        """Return True if nobody has the cache, one of its layers, one of their tensors, or a view of one."""
        if self.cache() is not None or any(layer() is not None for layer in self.state.layers):
            return False
        self.state.forget()
        return not are_held([x.buffers for x in self.recordings])


def are_held(lists: list[list[Tensor]]) -> bool:
    """Return True if others than `lists` refer to their tensors, or to tensors or storages of their memory.

    Objects that hold no reference are not seen, such as a number that is an address.
    """
    num_lists = Counter(map(id, chain(*lists)))
    tensors = list({id(x): x for x in chain(*lists)}.values())
    # a tensor that nobody else has: it has as many references as the list and the calls below make
    probe = [torch.empty(0, device="cpu")]
    (own,) = map(sys.getrefcount, probe)
    if list(map(sys.getrefcount, tensors)) != [own + num_lists[id(x)] for x in tensors]:
        return True
    # in C++: arrays of other libraries, by DLPack
    if any(count != tensor_uses(probe[0]) for count in map(tensor_uses, tensors)):
        return True
    uses = list(map(storage_uses, tensors))
    num_tensors = Counter(address for address, *_ in uses)
    _, one, own = storage_uses(probe[0])
    return any(count != one - 1 + num_tensors[address] or python != own for address, count, python in uses)


class Recording:
    """Hold a recorded step: the tensors of its cache, its inputs, its outputs, and what replays it."""

    def __init__(self, call_key: Hashable, inputs: dict[str, Any], cache: Any, state: CacheState) -> None:
        self.call_key = call_key
        # the tensors among the inputs of the graph, in the order of `describe`
        self.given: list[Tensor] = []
        self.inputs = clone(inputs, self.given)
        self.buffers, self.values, self.own_values = state.tensors(), state.values(), state.own_values
        self.addresses = list(map(Tensor.data_ptr, self.buffers))
        # recorded prompts that write the buffers, by their kind
        self.prompts: dict[Hashable, Any] = {}
        self.set_owner(BufferOwner(cache, state))
        self.replay: Callable[[], None]
        self.output: Any

    def set_owner(self, owner: BufferOwner) -> None:
        """Set the owner of the buffers, whose cache may have other recordings."""
        self.owner = owner
        owner.recordings.add(self)

    def record(self, run: Callable[[dict[str, Any], Any], Any], memory: Any) -> None:
        """Record run(inputs, cache); nothing is executed. Restore the cache's attributes if that fails."""
        cache = self.owner.cache()
        held = [vars(x) for x in (cache, *cache.layers)]
        # what is recorded must not keep its cache alive
        del cache
        held += [y for own in held for y in own.values() if isinstance(y, dict)]
        before = list(map(dict, held))
        try:
            with capturing.on_device_of(self.inputs["input_ids"]):
                self.replay, self.output = capturing.record(
                    lambda: run(self.inputs, self.owner.cache()), memory
                )
        except BaseException:
            # tensors as well: nothing has written those that a layer has created since
            for own, contents in zip(held, before, strict=True):
                own.clear()
                own.update(contents)
            raise

    @property
    def state(self) -> CacheState:
        return self.owner.state

    @property
    def is_idle(self) -> bool:
        """Return True if nobody has the buffers."""
        return self.owner.is_gone

    @property
    def is_in_place(self) -> bool:
        """Return True if the buffers have their memory: assignments to `.data` replace it."""
        return list(map(Tensor.data_ptr, self.buffers)) == self.addresses

    @property
    def may_serve(self) -> bool:
        """Return True if another cache may have the buffers."""
        return self.is_in_place and self.is_idle

    @property
    def device(self) -> torch.device:
        device: torch.device = self.inputs["input_ids"].device
        return device

    def is_current(self, cache: Any) -> bool:
        """Return True if a cache of the layers of the owner has the recorded tensors and plain values."""
        kept = all(map(is_, self.state.tensors(), self.buffers)) and own_values(cache) == self.own_values
        return kept and self.is_in_place and self.state.values() == self.values

    def adopt(self, cache: Any, state: CacheState, stream: Any = None) -> None:
        """Serve `cache`, whose state has the same key, in the place of a cache that is gone."""
        state.move_to(self.buffers)
        self.own(cache, state, stream)

    def own(self, cache: Any, state: CacheState, stream: Any = None) -> None:
        """Serve `cache`, which has the buffers; `stream`: that of the call, None on a CPU."""
        owner = self.owner
        owner.cache, owner.state, owner.stream = weakref.ref(cache), state, stream

    def step(self, tensors: list[Tensor]) -> Any:
        """Replay the step on new inputs; return its outputs, which are the caller's."""
        for buffer, x in zip(self.given, tensors, strict=True):
            buffer.copy_(x)
        self.replay()
        return copy_of(self.output)


def copy_of(recorded: Any) -> Any:
    """Return a recorded output with tensors of its own."""
    return type(recorded)(**{name: _copy_tensors(x) for name, x in recorded.items()})


def _copy_tensors(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.clone()
    if type(x) in (tuple, list):
        return type(x)(map(_copy_tensors, x))
    return {name: _copy_tensors(y) for name, y in x.items()} if type(x) is dict else x


def describe(given: dict[str, Any], tensors: list[Tensor], others: list[Any]) -> bool:
    """Append the tensors among a call's arguments, and all else that a recording depends on.

    Return False if there is an object that a replay would not see, or tensors on several devices: a number on
    the CPU is a constant of the kernels that read it.
    """
    for name, x in given.items():
        if isinstance(x, Tensor):
            tensors.append(x)
            if x.device != tensors[0].device:
                return False
            others += [name, x.shape, x.dtype]
        elif isinstance(x, VALUES):
            others += [name, type(x), x]
        elif type(x) is dict:
            others += [name, len(x)]
            if not describe(x, tensors, others):
                return False
        else:
            return False
    return True


def clone(given: dict[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    """Return arguments with tensors of their own, which are appended in the order of `describe`."""
    own: dict[str, Any] = {}
    for name, x in given.items():
        if isinstance(x, Tensor):
            tensors.append(x.clone())
            own[name] = tensors[-1]
        else:
            own[name] = clone(x, tensors) if type(x) is dict else x
    return own
