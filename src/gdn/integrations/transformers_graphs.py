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
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from gdn._torch_compat import has_global_hooks
from gdn.integrations.transformers_branches import with_branches
from gdn.integrations.transformers_capture import GraphMemory, StreamOrder
from gdn.integrations.transformers_model_key import (
    Attributes,
    ModelKey,
    Snapshot,
    is_hooked,
    modules_of,
    values_of,
)
from gdn.integrations.transformers_modes import is_unobserved, key_of_modes
from gdn.integrations.transformers_packing import CACHES
from gdn.integrations.transformers_recording import CacheState, Recording, describe

# kernels are compiled and cuBLAS allocates its workspaces in steps that run as they are
EAGER_STEPS = 2
# of which eager steps are counted
MOST_KINDS = 64
DEVICES = ("cuda",)
# the calls that a `generate` got for its steps, whose prompt may be replayed as well; None outside of one
calls_of_generate: ContextVar["list[GraphedCall] | None"] = ContextVar("calls_of_generate", default=None)
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
        call = _calls.get(self) or _calls.setdefault(self, GraphedCall(self))
        # `generate` asks once, before its prompt and its steps; another thread's recording changes forwards
        with call.lock:
            if not call.has_seen(self):
                modules = modules_of(self)
                if any(map(is_hooked, modules)):
                    return original(self, compile_config)
                call.look_at(modules)
        if (calls := calls_of_generate.get()) is not None:
            calls.append(call)
        return call

    return get_compiled_call


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
        self.memories: dict[int, GraphMemory] = {}  # by device
        self.prompt_kinds: dict[Hashable, Any] = {}
        self.is_new = True  # no prompt has run
        # graphs share a pool: a replay of another thread would write where this one's logits are
        self.lock = RLock()
        self.order = StreamOrder()

    def has_seen(self, model: nn.Module) -> bool:
        """Return True if the model is as at the last `look_at`, and without hooks."""
        return self.snapshot is not None and self.snapshot.is_of(model)

    def look_at(self, modules: list[nn.Module]) -> None:
        """Find out what a recording has of the model now: it takes longer than a step may."""
        values = values_of(modules)
        self.snapshot = Snapshot(modules)
        # an equal key stays the same object, which is compared at once
        if values != self.model_key.values:
            self.model_key = ModelKey(values)

    def __call__(self, **inputs: Any) -> Any:
        model, name = self.model(), next((n for n in CACHES if inputs.get(n) is not None), None)
        assert model is not None
        if name is None or not asks_for_logits(model, inputs):
            return model(**inputs)
        with self.lock:
            recordings = self.recordings_of(inputs[name])
            if recordings or is_static(inputs[name]):
                self.enter(recordings, inputs["input_ids"].device)
                return self._call(model, name, inputs, recordings)
        return model(**inputs)

    def recordings_of(self, cache: Any) -> list[Recording]:
        """Return the recordings whose tensors are those of a cache, or of the layers that it shares."""
        return [x for x in chain(*self.recordings.values()) if x.owner.serves(cache)]

    def enter(self, recordings: list[Recording], device: torch.device) -> None:
        """Let the current stream wait for the call before, and later calls on these tensors for this one."""
        self.order.enter(device)
        for recording in recordings:
            recording.owner.stream = self.order.last

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
            if recording.call_key == call_key and recording.is_current(cache):
                return with_cache(recording.step(tensors), name, cache)
        if recordings and not is_static(cache):
            return model(**inputs, **{name: cache})

        def run(given: dict[str, Any], cache: Any) -> Any:
            with with_branches(model):
                return run_for_graph(model, given, name, cache)

        state = CacheState(cache)
        key = (call_key, state.key())
        idle = next((x for x in self.recordings.get(key, ()) if x.may_serve), None)
        if idle is not None:
            self.order.wait_for(idle.owner.stream)
            idle.adopt(cache, state, self.order.last)
            return with_cache(idle.step(tensors), name, cache)
        steps = self.eager_steps.get(key, 0)
        if steps is None or steps < EAGER_STEPS:
            if len(self.eager_steps) >= MOST_KINDS:
                self.eager_steps.clear()
            self.eager_steps[key] = None if steps is None else steps + 1
            return model(**inputs, **{name: cache})
        recording = Recording(call_key, inputs, cache, state)
        # the cache, or one that had its layers before, may have a graph for other inputs or settings
        own = set(map(id, state.tensors()))
        owners = [x.owner for x in chain(*self.recordings.values()) if own & set(map(id, x.buffers))]
        recording.set_owner(owners[0] if owners else recording.owner)
        recording.own(cache, state, self.order.last)
        attributes = Attributes(model)
        try:
            self._free_idle()
            recording.record(run, self.memory_of(recording.device))
        except RuntimeError as error:
            torch.cuda.synchronize()
            attributes.restore()
            self.eager_steps[key] = None
            warn(error)
            return model(**inputs, **{name: cache})
        output = with_cache(recording.step(tensors), name, cache)
        if recording.is_current(cache) and not attributes.have_changed():
            self.recordings.setdefault(key, []).append(recording)
        else:
            # a step that changes the cache or the model in Python: a replay would not
            self.eager_steps[key] = None
        return output

    def key_of(self, inputs: dict[str, Any], others: list[Any]) -> tuple[Hashable, ...]:
        """Return what a recording depends on besides its cache; `others` is of `describe`."""
        return tuple(others), key_of_modes(inputs["input_ids"].device.type), self.model_key

    def memory_of(self, device: torch.device) -> GraphMemory | None:
        """Return the memory of the recordings on a device; None on a CPU, where tests record.

        The graphs of a model share it, as they never run at the same time.
        """
        if device.type != "cuda":
            return None
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self.memories:
            self.memories[index] = GraphMemory(index)
        return self.memories[index]

    def _free_idle(self) -> None:
        """Free the recordings of caches that are gone, and the memories that have no graph then.

        PyTorch refuses the pool of a memory whose last graph is gone.
        """
        kept = {key: [x for x in group if not x.is_idle] for key, group in self.recordings.items()}
        for index in self.memories:
            # a replay on another stream than that of the tensors may not have ended
            torch.cuda.synchronize(index)
        self.recordings = {key: group for key, group in kept.items() if group}
        used = {x.device.index for x in chain(*self.recordings.values())}
        self.memories = {index: memory for index, memory in self.memories.items() if index in used}


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
    return is_unobserved(ids)


def is_static(cache: Any) -> bool:
    """Return True for a cache of buffers with fixed addresses, none of which keeps its past."""
    layers = getattr(cache, "layers", None)
    is_recording = any(getattr(layer, "record_past", False) for layer in layers or ())
    # a cache that grows is no such cache, whatever its layers say; an offloaded one moves between devices
    is_fixed = "Static" in type(cache).__name__ and not getattr(cache, "offloading", False)
    if not layers or is_recording or not is_fixed or not getattr(cache, "is_compileable", False):
        return False
    # which a recording would not give to the next cache
    return not any(isinstance(x, Tensor) for x in vars(cache).values())


def with_cache(output: Any, name: str, cache: Any) -> Any:
    """Set the cache among a model's outputs, as the model does."""
    output[name] = cache
    return output


def warn(error: Exception, what: str = "a decode step") -> None:
    warnings.warn(f"{what} runs without a graph: {error}", RuntimeWarning, stacklevel=3)
