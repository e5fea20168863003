"""Decode with one CUDA graph for each static cache of a Transformers model, without a compiler.

`generate(cache_implementation="static")` on a GPU gets the callable of its decode steps from
`model.get_compiled_call`, which compiles the model. With `patch_transformers(graphs=True)` it gets a
`GraphedCall`: the first steps run as they are, then one is recorded, and later ones replay it. The kernels
are those of eager steps, so the bits are theirs.
"""

import warnings
import weakref
from collections.abc import Callable, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gdn.integrations.transformers_packing import CACHES

# kernels are compiled and cuBLAS allocates its workspaces in steps that run as they are
EAGER_STEPS = 2
DEVICES = ("cuda",)
# arguments whose outputs a graph would overwrite, or that a step of `generate` does not have
REFUSED = ("output_attentions", "output_hidden_states", "labels", "inputs_embeds")


def get_compiled_call(original: Callable[..., Any], active: Sized, is_served: Callable[[Any], bool]) -> Any:
    """Return a get_compiled_call of models that serves graphs while `active` holds a patch with them."""

    def get_compiled_call(self: Any, compile_config: Any) -> Any:
        if len(active) == 0 or self.device.type not in DEVICES or not is_served(self) or is_hooked(self):
            return original(self, compile_config)
        return _calls.setdefault(self, GraphedCall(self))

    return get_compiled_call


def is_hooked(model: nn.Module) -> bool:
    """Return True if a module has hooks, or a forward of its own: a replay would skip them."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ or hasattr(m, "_hf_hook")
        for m in model.modules()
    )


class Recording:
    """Hold a recorded step: its inputs at fixed addresses, its outputs, and the call that replays it."""

    def __init__(self, leaves: list[Any], run: Callable[[list[Any]], Any], pool: Any) -> None:
        """Record run(leaves) on copies of the tensors among leaves; nothing is executed."""
        self.inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        self.replay, self.output = record(lambda: run(self.inputs), pool)

    def step(self, leaves: list[Any]) -> Any:
        """Replay the step on new inputs; return its outputs, with logits of their own."""
        for buffer, x in zip(self.inputs, leaves, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(x)
        self.replay()
        output = type(self.output)(**dict(self.output))
        output["logits"] = self.output["logits"].clone()
        return output


def record(run: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
    """Record a CUDA graph of run() in the memory of `pool`; return its replay and its output."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = run()
    return graph.replay, output


class GraphedCall:
    """Call a model as `model(**inputs)` does, with a graph for each static cache and kind of inputs.

    A step is graphed if it has one token per row, a cache of buffers with fixed addresses, no gradients, and
    asks for nothing but logits. Everything else, and what cannot be recorded, runs as it is.
    """

    def __init__(self, model: nn.Module) -> None:
        # weak, as `_calls` holds this object as long as the model lives
        self.model = weakref.ref(model)
        # the graphs of a cache live as long as the cache, whose addresses they have
        self.steps: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self.pool: Any = None

    def __call__(self, **inputs: Any) -> Any:
        model, name = self.model(), next((n for n in CACHES if inputs.get(n) is not None), None)
        assert model is not None
        if name is None or not self._is_graphable(model, inputs, inputs[name]):
            return model(**inputs)
        cache = inputs.pop(name)
        leaves, spec = pytree.tree_flatten(inputs)
        steps, key = self.steps.setdefault(cache, {}), _key_of(leaves, spec)
        state = steps.get(key, 0)
        if isinstance(state, Recording):
            return _with_cache(state.step(leaves), name, cache)
        if state is None or state < EAGER_STEPS:
            # None: it cannot be recorded
            steps[key] = None if state is None else state + 1
            return model(**inputs, **{name: cache})
        # a graph must not keep its cache alive, whose end frees the graph
        alive = weakref.ref(cache)

        def run(given: list[Any]) -> Any:
            output = model(**pytree.tree_unflatten(given, spec), **{name: alive()})
            output[name] = None
            return output

        try:
            steps[key] = Recording(leaves, run, self._memory())
        except RuntimeError as error:
            torch.cuda.synchronize()
            steps[key] = None
            _warn(error)
            return model(**inputs, **{name: cache})
        return _with_cache(steps[key].step(leaves), name, cache)

    def _memory(self) -> Any:
        """Return the memory pool of all graphs of this model: they never run at the same time."""
        if self.pool is None and torch.cuda.is_available():
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool

    def _is_graphable(self, model: Any, inputs: dict[str, Any], cache: Any) -> bool:
        ids, config = inputs.get("input_ids"), model.config
        if ids is None or ids.dim() != 2 or ids.shape[1] != 1 or torch.is_grad_enabled() or model.training:
            return False
        if any(inputs.get(name) is not None and inputs[name] is not False for name in REFUSED):
            return False
        if getattr(config, "output_attentions", False) or getattr(config, "output_hidden_states", False):
            return False
        layers = getattr(cache, "layers", None)
        is_recording = any(getattr(layer, "record_past", False) for layer in layers or ())
        # a cache that grows is no such cache, whatever its layers say
        is_static = "Static" in type(cache).__name__ and getattr(cache, "is_compileable", False)
        return bool(layers) and is_static and not is_recording and not torch.compiler.is_compiling()


# not in the models: a copy of a model must not have its graphs
_calls: weakref.WeakKeyDictionary[Any, GraphedCall] = weakref.WeakKeyDictionary()


def _key_of(leaves: list[Any], spec: Any) -> Any:
    kinds = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return str(spec), kinds


def _with_cache(output: Any, name: str, cache: Any) -> Any:
    """Set the cache among a model's outputs, as the model does."""
    output[name] = cache
    return output


def _warn(error: Exception) -> None:
    warnings.warn(f"a decode step runs without a graph: {error}", RuntimeWarning, stacklevel=3)
