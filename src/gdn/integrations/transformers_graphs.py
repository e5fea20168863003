"""Decode with one CUDA graph for each kind of static cache of a Transformers model, without a compiler.

`generate(cache_implementation="static")` on a GPU gets the callable of its decode steps from
`model.get_compiled_call`, which compiles the model. With `patch_transformers(graphs=True)` it gets a
`GraphedCall`: the first steps run as they are, then one is recorded, and later ones replay it. The kernels
are those of eager steps, so the bits are theirs.

A graph has the addresses of a cache, and `generate` makes a cache for each call. So a recording keeps the
tensors of its cache. When that cache is gone, the next one of the same sizes copies its contents into them
and has them from then on: its first decode step is a replay. `transformers_prompts` records prompts that
write these tensors.
"""

import warnings
import weakref
from collections.abc import Callable, Hashable, Sized
from contextvars import ContextVar
from itertools import chain
from operator import is_
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from gdn import settings
from gdn._torch_compat import has_global_hooks
from gdn.integrations.transformers_branches import with_branches
from gdn.integrations.transformers_capture import StreamOrder, on_device_of, record
from gdn.integrations.transformers_model_key import (
    VALUES,
    ModelKey,
    Snapshot,
    is_hooked,
    modules_of,
    values_of,
)
from gdn.integrations.transformers_packing import CACHES

# kernels are compiled and cuBLAS allocates its workspaces in steps that run as they are
EAGER_STEPS = 2
# of which eager steps are counted
MOST_KINDS = 64
DEVICES = ("cuda",)
# the call that a `generate` got for its steps: its prompt may be replayed as well
call_of_generate: ContextVar["GraphedCall | None"] = ContextVar("call_of_generate", default=None)
# kernels of attention that a caller may switch off
SDPA = ("flash", "mem_efficient", "math", "cudnn")
# arguments whose outputs a graph would overwrite, or that a step of `generate` does not have
REFUSED = ("output_attentions", "output_hidden_states", "labels", "inputs_embeds")


def get_compiled_call(original: Callable[..., Any], active: Sized, is_served: Callable[[Any], bool]) -> Any:
    """Return a get_compiled_call of models that serves graphs while `active` holds a patch with them."""

    def get_compiled_call(self: Any, compile_config: Any) -> Any:
        if len(active) == 0 or self.device.type not in DEVICES or not is_served(self):
            return original(self, compile_config)
        if has_global_hooks():
            # of all modules: a replay would skip them
            return original(self, compile_config)
        call = _calls.get(self)
        # `generate` asks once, before its prompt and its steps
        if call is None or not call.has_seen(self):
            modules = modules_of(self)
            if any(map(is_hooked, modules)):
                return original(self, compile_config)
            if call is None:
                call = _calls.setdefault(self, GraphedCall(self))
            call.look_at(self, modules)
        call_of_generate.set(call)
        return call

    return get_compiled_call


class CacheState:
    """Hold where the layers of a cache have tensors and plain values: what a recorded step depends on."""

    def __init__(self, cache: Any) -> None:
        self.tensor_places: list[tuple[Any, Any]] = []
        self.value_places: list[tuple[Any, Any]] = []
        # a caller may keep them without their cache
        self.layers = [weakref.ref(layer) for layer in cache.layers]
        self.kinds = (type(cache), *map(type, cache.layers))
        for layer in cache.layers:
            own = vars(layer)
            for holder in (own, *(x for x in own.values() if isinstance(x, dict))):
                self.tensor_places += [(holder, name) for name, x in holder.items() if isinstance(x, Tensor)]
                self.value_places += [(holder, name) for name, x in holder.items() if isinstance(x, VALUES)]

    def tensors(self) -> list[Tensor]:
        return [holder[name] for holder, name in self.tensor_places]

    def values(self) -> list[Any]:
        return [holder[name] for holder, name in self.value_places]

    def restore(self, values: list[Any]) -> None:
        for (holder, name), value in zip(self.value_places, values, strict=True):
            holder[name] = value

    def key(self) -> Hashable:
        """Return what two caches have in common that one recording can serve."""
        names = tuple(name for _, name in self.tensor_places)
        # tensors of one memory must be so in both: the first one in each
        first: dict[int, int] = {}
        memories = [first.setdefault(x.untyped_storage().data_ptr(), i) for i, x in enumerate(self.tensors())]
        sizes = ((x.shape, x.stride(), x.storage_offset(), x.dtype) for x in self.tensors())
        return self.kinds, names, tuple(memories), tuple(sizes), tuple(self.values())

    def move_to(self, buffers: list[Tensor]) -> None:
        """Copy the tensors of the cache to `buffers`, which take their places."""
        for (holder, name), buffer in zip(self.tensor_places, buffers, strict=True):
            buffer.copy_(holder[name])
            holder[name] = buffer


class Tenant:
    """Hold which cache has the tensors of a recording, or of several: one cache may have more than one."""

    def __init__(self, cache: Any, state: CacheState) -> None:
        # a graph must not keep its cache alive
        self.owner: Callable[[], Any] = weakref.ref(cache)
        self.state = state


class Recording:
    """Hold a recorded step: the tensors of its cache, its inputs, its outputs, and what replays it."""

    def __init__(self, call_key: Hashable, inputs: dict[str, Any], cache: Any, state: CacheState) -> None:
        self.call_key = call_key
        # the tensors among the inputs of the graph, in the order of `describe`
        self.given: list[Tensor] = []
        self.inputs = clone(inputs, self.given)
        self.buffers, self.values = state.tensors(), state.values()
        # recorded prompts that write the buffers, by their kind
        self.prompts: dict[Hashable, Any] = {}
        self.tenant = Tenant(cache, state)
        self.replay: Callable[[], None]
        self.output: Any

    def record(self, run: Callable[[dict[str, Any], Any], Any], pool: Any) -> None:
        """Record run(inputs, cache); nothing is executed. Restore the cache's plain values if that fails."""
        try:
            with on_device_of(self.inputs["input_ids"]):
                self.replay, self.output = record(lambda: run(self.inputs, self.owner()), pool)
        except BaseException:
            self.state.restore(self.values)
            raise

    @property
    def owner(self) -> Callable[[], Any]:
        return self.tenant.owner

    @property
    def state(self) -> CacheState:
        return self.tenant.state

    @property
    def is_idle(self) -> bool:
        """Return True if the cache and its layers are gone."""
        return self.owner() is None and all(layer() is None for layer in self.state.layers)

    @property
    def is_current(self) -> bool:
        """Return True if the cache has the recorded tensors and plain values."""
        kept = all(map(is_, self.state.tensors(), self.buffers))
        return kept and self.state.values() == self.values

    def adopt(self, cache: Any, state: CacheState) -> None:
        """Serve `cache`, whose state has the same key, in the place of a cache that is gone."""
        state.move_to(self.buffers)
        self.own(cache, state)

    def own(self, cache: Any, state: CacheState) -> None:
        """Serve `cache`, which has the buffers."""
        self.tenant.owner, self.tenant.state = weakref.ref(cache), state

    def step(self, tensors: list[Tensor]) -> Any:
        """Replay the step on new inputs; return its outputs, with logits of their own."""
        for buffer, x in zip(self.given, tensors, strict=True):
            buffer.copy_(x)
        self.replay()
        return copy_of(self.output)


def copy_of(recorded: Any) -> Any:
    """Return a recorded output with logits of its own."""
    output = type(recorded)(**dict(recorded))
    output["logits"] = recorded["logits"].clone()
    return output


class GraphedCall:
    """Call a model as `model(**inputs)` does, with a graph for each kind of static cache and inputs.

    A step is graphed if it has one token per row, a cache of buffers with fixed addresses, no gradients, and
    asks for nothing but logits. Everything else, and what cannot be recorded, runs as it is. A recording
    outlives its cache, whose memory it holds, until the next one is made.
    """

    def __init__(self, model: nn.Module) -> None:
        # weak, as `_calls` holds this object as long as the model lives
        self.model = weakref.ref(model)
        self.model_key = ModelKey(())
        self.snapshot: Snapshot | None = None
        self.recordings: dict[Hashable, list[Recording]] = {}
        # how many steps of a kind ran as they are; None: it cannot be recorded
        self.eager_steps: dict[Hashable, int | None] = {}
        self.pool: Any = None
        self.prompt_kinds: dict[Hashable, Any] = {}
        self.is_new = True  # no prompt has run
        # graphs share a pool: a replay of another thread would write where this one's logits are
        self.lock = RLock()
        self.order = StreamOrder()

    def has_seen(self, model: nn.Module) -> bool:
        """Return True if the model is as at the last `look_at`, and without hooks."""
        return self.snapshot is not None and self.snapshot.is_of(model)

    def look_at(self, model: nn.Module, modules: list[nn.Module]) -> None:
        """Find out what a recording has of the model now: it takes longer than a step may."""
        values = values_of(model, modules)
        self.snapshot = Snapshot(model, modules)
        # an equal key stays the same object, which is compared at once
        if values != self.model_key.values:
            self.model_key = ModelKey(values)

    def __call__(self, **inputs: Any) -> Any:
        model, name = self.model(), next((n for n in CACHES if inputs.get(n) is not None), None)
        assert model is not None
        if name is None or not asks_for_logits(model, inputs):
            return model(**inputs)
        with self.lock:
            recordings = [x for x in chain(*self.recordings.values()) if x.owner() is inputs[name]]
            if recordings or is_static(inputs[name]):
                self.order.enter(inputs["input_ids"].device)
                return self._call(model, name, inputs, recordings)
        return model(**inputs)

    def _call(self, model: Any, name: str, inputs: dict[str, Any], recordings: list[Recording]) -> Any:
        """Replay, record, or run a step that is graphable; `name` is that of the cache among the inputs."""
        cache: Any = inputs.pop(name)
        tensors: list[Tensor] = []
        others: list[Any] = []
        if not describe(inputs, tensors, others):
            # an object, as the mask of flex attention, may hold what a replay would not see
            return model(**inputs, **{name: cache})
        call_key = self.key_of(inputs, others)
        for recording in recordings:
            if recording.call_key == call_key and recording.is_current:
                return with_cache(recording.step(tensors), name, cache)
        if recordings and not is_static(cache):
            return model(**inputs, **{name: cache})

        def run(given: dict[str, Any], cache: Any) -> Any:
            with with_branches(model):
                return run_for_graph(model, given, name, cache)

        state = CacheState(cache)
        key = (call_key, state.key())
        idle = next((x for x in self.recordings.get(key, ()) if x.is_idle), None)
        if idle is not None:
            idle.adopt(cache, state)
            return with_cache(idle.step(tensors), name, cache)
        steps = self.eager_steps.get(key, 0)
        if steps is None or steps < EAGER_STEPS:
            if len(self.eager_steps) >= MOST_KINDS:
                self.eager_steps.clear()
            self.eager_steps[key] = None if steps is None else steps + 1
            return model(**inputs, **{name: cache})
        recording = Recording(call_key, inputs, cache, state)
        # the cache may have a graph for other inputs or settings
        own = set(map(id, state.tensors()))
        tenants = [x.tenant for x in recordings if own & set(map(id, x.buffers))]
        recording.tenant = tenants[0] if tenants else recording.tenant
        try:
            recording.record(run, self._memory())
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.eager_steps[key] = None
            warn(error)
            return model(**inputs, **{name: cache})
        output = with_cache(recording.step(tensors), name, cache)
        if recording.is_current:
            self.recordings.setdefault(key, []).append(recording)
        else:
            # a step that changes plain values or tensors of the cache in Python: a replay would not
            self.eager_steps[key] = None
        return output

    def key_of(self, inputs: dict[str, Any], others: list[Any]) -> tuple[Hashable, ...]:
        """Return what a recording depends on besides its cache; `others` is of `describe`."""
        return tuple(others), _key_of_modes(inputs["input_ids"].device.type), self.model_key

    def _memory(self) -> Any:
        """Free the recordings of caches that are gone; return the memory pool of the others and the next.

        The graphs of a model share a pool, as they never run at the same time. PyTorch refuses the handle of
        a pool whose last graph is gone.
        """
        kept = {key: [x for x in group if not x.is_idle] for key, group in self.recordings.items()}
        self.recordings = {key: group for key, group in kept.items() if group}
        if not self.recordings and torch.cuda.is_available():
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool


# not in the models: a copy of a model must not have its graphs
_calls: weakref.WeakKeyDictionary[Any, GraphedCall] = weakref.WeakKeyDictionary()


def forget() -> None:
    """Free all recordings."""
    _calls.clear()


def run_for_graph(model: Any, given: dict[str, Any], name: str, cache: Any) -> Any:
    """Return the output of a model without its cache, whose argument has this name."""
    kind = given["input_ids"].device.type
    # autocast keeps its copies of weights until the caller's `with` block ends: a graph makes its own
    with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False):
        output = model(**given, **{name: cache})
    output[name] = None
    return output


def asks_for_logits(model: Any, inputs: dict[str, Any], *, is_prompt: bool = False) -> bool:
    """Return True for tokens without gradients of which only logits are wanted; a step has one per row."""
    ids, config = inputs.get("input_ids"), model.config
    if ids is None or ids.dim() != 2 or torch.is_grad_enabled() or model.training:
        return False
    if (ids.shape[1] != 1) != is_prompt:
        return False
    if any(inputs.get(name) is not None and inputs[name] is not False for name in REFUSED):
        return False
    if getattr(config, "output_attentions", False) or getattr(config, "output_hidden_states", False):
        return False
    return not torch.compiler.is_compiling()


def is_static(cache: Any) -> bool:
    """Return True for a cache of buffers with fixed addresses, none of which keeps its past."""
    layers = getattr(cache, "layers", None)
    is_recording = any(getattr(layer, "record_past", False) for layer in layers or ())
    # a cache that grows is no such cache, whatever its layers say
    is_fixed = "Static" in type(cache).__name__ and getattr(cache, "is_compileable", False)
    return bool(layers) and is_fixed and not is_recording


def describe(given: dict[str, Any], tensors: list[Tensor], others: list[Any]) -> bool:
    """Append the tensors among a call's arguments, and all else that a recording depends on.

    Return False if there is an object that a replay would not see.
    """
    for name, x in given.items():
        if isinstance(x, Tensor):
            tensors.append(x)
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


def _key_of_modes(kind: str) -> Hashable:
    """Return PyTorch's modes and gdn's settings that the kernels of a step depend on."""
    return (
        torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        settings.of_call(), *(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in SDPA),
    )  # fmt: skip


def with_cache(output: Any, name: str, cache: Any) -> Any:
    """Set the cache among a model's outputs, as the model does."""
    output[name] = cache
    return output


def warn(error: Exception, what: str = "a decode step") -> None:
    warnings.warn(f"{what} runs without a graph: {error}", RuntimeWarning, stacklevel=3)
