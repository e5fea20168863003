"""Replay the prompt of `generate` as a CUDA graph, where prompts of one shape come again.

A prompt of some hundred tokens launches over a thousand kernels, for which the host takes several times as
long as the GPU. With `patch_transformers(graphs=True)` two prompts of a kind run as they are. The third does
too, and is recorded beside; the recording is kept if its first replay has the bits of the run. Later ones
are replays.

A recorded prompt writes the tensors of a recorded decode step (`Recording`), whose cache is gone. It begins
with the reset of the cache to zeros, so the kernels are those of a prompt with a new cache. The new cache
gets these tensors, and the plain values that its layers have after a prompt.

Left to the model's own forward: prompts of other arguments than ids, masks and positions, continued texts,
caches that the caller has initialised, and more than MOST_TOKENS tokens, for which the GPU takes longer
than the host.
"""

import copy
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gdn.integrations import transformers_capture as capturing
from gdn.integrations import transformers_graphs as graphing
from gdn.integrations.transformers_compile import compile_together
from gdn.integrations.transformers_graphs import GraphedCall
from gdn.integrations.transformers_model_key import VALUES, Attributes
from gdn.integrations.transformers_packing import CACHES
from gdn.integrations.transformers_recording import CacheState, Recording, clone, copy_of, describe

# prompts of a kind that run as they are before one is recorded: few lengths come three times by chance
EAGER_PROMPTS = 2
# rows x tokens: a prompt's activations stay in the memory of its graph
MOST_TOKENS = 2048
# shapes of prompts whose number is kept, and graphs for one kind of cache
MOST_KINDS, MOST_GRAPHS = 256, 8
TENSORS = {"input_ids", "attention_mask", "position_ids", "cache_position"}


def with_prompts(prefill: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_prefill` of `generate` whose call of the model may be a replay."""

    @functools.wraps(prefill)
    def _prefill(self: Any, *args: Any, **given: Any) -> Any:
        calls = graphing.calls_of_generate.get()
        call = calls[-1] if calls else None
        if call is None or call.model() is not self:
            return prefill(self, *args, **given)
        return prefill(PromptCaller(self, call), *args, **given)

    return _prefill


def with_own_call(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_sample` of `generate` that knows the call of its steps; other loops do not ask for one."""

    @functools.wraps(sample)
    def _sample(*args: Any, **given: Any) -> Any:
        token = graphing.calls_of_generate.set([])
        try:
            return sample(*args, **given)
        finally:
            graphing.calls_of_generate.reset(token)

    return _sample


class PromptCaller:
    """Stand for a model in `_prefill`: it has the model's attributes, and a call of it may be a replay."""

    def __init__(self, model: Any, call: GraphedCall) -> None:
        self._model, self._call = model, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return call_with_prompt(self._call, self._model, inputs)


@dataclass
class PromptKind:
    """Hold how a cache is after prompts of one shape: which buffers and plain values it has got."""

    count: int = 0  # prompts that ran as they are
    is_refused: bool = False
    state_key: Hashable = None  # of the recorded steps that can follow
    # layer, attribute, key in it or None, and the value, or a tensor's place among the buffers
    values: tuple[tuple[int, str, Any, Any], ...] = ()
    tensors: tuple[tuple[int, str, Any, int], ...] = ()

    def learn(self, before: list[dict[Any, Any]], cache: Any) -> None:
        """Find out what a prompt has changed in the layers of a cache."""
        state, after = CacheState(cache), contents_of(cache)
        places = {id(x): place for place, x in enumerate(state.tensors())}
        changed = [
            (layer, *name, x)
            for layer, (old, new) in enumerate(zip(before, after, strict=True))
            for name, x in new.items()
            if isinstance(x, Tensor) or name not in old or old[name] is not x
        ]
        self.tensors = tuple((*at, places[id(x)]) for *at, x in changed if isinstance(x, Tensor))  # type: ignore[misc]
        self.values = tuple(x for x in changed if not isinstance(x[-1], Tensor))  # type: ignore[misc]
        # an object of another kind may hold what a later cache would share
        self.is_refused = not all(isinstance(x[-1], VALUES) for x in self.values)
        self.state_key = state.key()

    def fill(self, cache: Any, buffers: list[Tensor]) -> None:
        """Give the layers of a fresh cache the buffers and values that they have after a prompt."""
        layers = [vars(layer) for layer in cache.layers]
        for layer, name, key, x in self.values:
            if key is None:
                layers[layer][name] = x
            else:
                layers[layer][name][key] = x
        for layer, name, key, place in self.tensors:
            if key is None:
                layers[layer][name] = buffers[place]
            else:
                layers[layer][name][key] = buffers[place]


class PromptRecording:
    """Hold a recorded prompt: its inputs, its output, and what replays it into the buffers of a step."""

    def __init__(self, kind: PromptKind, inputs: dict[str, Any]) -> None:
        self.kind = kind
        self.given: list[Tensor] = []
        self.inputs = clone(inputs, self.given)
        self.replay: Callable[[], None]
        self.output: Any

    def step(self, tensors: list[Tensor]) -> Any:
        """Replay on new inputs; return the output, which is the caller's."""
        for buffer, x in zip(self.given, tensors, strict=True):
            buffer.copy_(x)
        self.replay()
        return copy_of(self.output)


def call_with_prompt(call: GraphedCall, model: Any, inputs: dict[str, Any]) -> Any:
    """Return the output of a model for a prompt: a replay, or a run that may be recorded."""
    name = next((n for n in CACHES if inputs.get(n) is not None), None)
    if name is None or not is_graphable(model, inputs, inputs[name]):
        return model(**inputs)
    cache = inputs[name]
    given = {key: x for key, x in inputs.items() if key != name}
    tensors: list[Tensor] = []
    others: list[Any] = []
    if (fresh := fresh_key(cache)) is None or not describe(given, tensors, others):
        # a prompt after the first one of its cache, whose tensors a recorded step may have
        with call.lock:
            if recordings := call.recordings_of(cache):
                call.enter(recordings, inputs["input_ids"].device)
        return model(**inputs)
    if call.is_new:
        call.is_new = False
        compile_together(model, inputs, name)
    if inputs["input_ids"].numel() > MOST_TOKENS:
        return model(**inputs)
    key = (*call.key_of(given, others), fresh)
    with call.lock:
        kind = call.prompt_kinds.get(key) or PromptKind()
        # the latest last
        call.prompt_kinds.pop(key, None)
        call.prompt_kinds[key] = kind
        if len(call.prompt_kinds) > MOST_KINDS:
            call.prompt_kinds.pop(next(iter(call.prompt_kinds)))
        target = None if kind.is_refused or kind.count < EAGER_PROMPTS else find_target(call, kind, key)
        recording = None if target is None else target.prompts.pop(key, None)
        if target is not None:
            call.order.enter(inputs["input_ids"].device)
            call.order.wait_for(target.owner.stream)
        if target is not None and recording is not None:
            target.prompts[key] = recording
            output = recording.step(tensors)
            kind.fill(cache, target.buffers)
            target.own(cache, CacheState(cache), call.order.last)
            return graphing.with_cache(output, name, cache)
        if target is not None:
            spare = copy.deepcopy(cache)
            output = model(**inputs)
            recording = record_prompt(call, model, kind, given, name, (cache, spare, target, output))
            if recording is not None:
                target.prompts[key] = recording
                if len(target.prompts) > MOST_GRAPHS:
                    target.prompts.pop(next(iter(target.prompts)))
            return output
    before = contents_of(cache)
    output = model(**inputs)
    if kind.count == 0:
        kind.learn(before, cache)
    kind.count += 1
    return output


def record_prompt(
    call: GraphedCall, model: Any, kind: PromptKind, inputs: dict[str, Any], name: str,
    run: tuple[Any, Any, Recording, Any],
) -> PromptRecording | None:  # fmt: skip
    """Record a prompt; None if it cannot be recorded, or a replay has other bits than the run.

    `run`: the cache of the run, a fresh one like it, the recorded step whose buffers are written, the output.
    """
    cache, spare, target, output = run
    recording = PromptRecording(kind, inputs)

    def run_again() -> Any:
        kind.fill(spare, target.buffers)
        spare.reset()
        return graphing.run_for_graph(model, recording.inputs, name, spare)

    attributes = Attributes(model)
    try:
        with capturing.on_device_of(inputs["input_ids"]):
            memory: Any = call.memory_of(target.device)
            recording.replay, recording.output = capturing.record(run_again, memory)
    except RuntimeError as error:
        torch.cuda.synchronize()
        graphing.warn(error, "a prompt")
        kind.is_refused = True
    finally:
        # a replay would not change them, and memory of the graph must not stay there
        kind.is_refused |= attributes.restore()
    if kind.is_refused:
        return None
    recording.replay()
    state, expected = CacheState(spare), CacheState(cache)
    pairs = zip(state.tensors(), expected.tensors(), strict=True)
    same = state.values() == expected.values() and all(torch.equal(x, y) for x, y in pairs)
    kind.is_refused = not (same and torch.equal(recording.output["logits"], output["logits"]))
    return None if kind.is_refused else recording


def is_graphable(model: Any, inputs: dict[str, Any], cache: Any) -> bool:
    """Return True for a prompt of text, with a static cache on its device, whose last logits are wanted."""
    if not graphing.asks_for_logits(model, inputs, is_prompt=True) or inputs.get("logits_to_keep") != 1:
        return False
    if any(isinstance(x, Tensor) and name not in TENSORS for name, x in inputs.items()):
        return False
    return graphing.is_static(cache) and hasattr(cache, "reset")


def find_target(call: GraphedCall, kind: PromptKind, key: tuple[Hashable, ...]) -> Recording | None:
    """Return a recorded step, whose cache is gone, that can follow a prompt: one with this prompt first."""
    idle: list[Recording] = []
    for step_key, group in call.recordings.items():
        call_key, state_key = cast(tuple[tuple[Hashable, ...], Hashable], step_key)
        # the same modes and model
        if call_key[1:] == key[1:3] and state_key == kind.state_key:
            idle += [x for x in group if x.may_serve]
    return next((x for x in idle if key in x.prompts), idle[0] if idle else None)


def contents_of(cache: Any) -> list[dict[Any, Any]]:
    """Return the attributes of each layer and the entries of its dictionaries, by (name, key or None)."""
    contents: list[dict[Any, Any]] = []
    for layer in cache.layers:
        own: dict[Any, Any] = {}
        for name, x in vars(layer).items():
            own |= {(name, key): y for key, y in x.items()} if type(x) is dict else {(name, None): x}
        contents.append(own)
    return contents


def fresh_key(cache: Any) -> Hashable | None:
    """Return what a cache without tokens has in Python; None if it has tensors on a device already."""
    contents: list[Any] = [type(cache)]
    for layer in cache.layers:
        own = vars(layer)
        contents += (type(layer), *own)
        for x in own.values():
            for y in x.values() if type(x) is dict else (x,):
                if isinstance(y, VALUES):
                    contents.append(y)
                elif isinstance(y, Tensor) and y.dim() == 0 and y.device.type == "cpu":
                    contents.append(y.item())
                else:
                    return None
    return tuple(contents)
