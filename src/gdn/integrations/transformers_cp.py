"""context_parallel(): train an unmodified Transformers hybrid model with its tokens split over ranks.

torch's `context_parallel` splits buffers in place and makes SDPA a ring over the ranks. Here the gated delta
rule and the short convolution of the model's file get a `gdn.ContextParallel` as well, for the token order
that torch's shards of an arange have.
"""

import inspect
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gdn.distributed.context import ContextParallel
from gdn.distributed.tensor import is_layer
from gdn.integrations.transformers import Replaced
from gdn.integrations.transformers_calls import ACTIVATIONS, between
from gdn.ops.rule import chunk_gated_delta_rule

RULE, CONV = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
# arguments that mark documents in a packed row: torch's ring attention has no mask for them
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
CACHES = ("cache", "past_key_values", "cache_params")

_lock = threading.Lock()  # patching is process-wide by nature
# a process group -> (T, starts of local runs) -> context: its ranks compare a kind of call once
_contexts: "weakref.WeakKeyDictionary[Any, dict[Any, ContextParallel]]" = weakref.WeakKeyDictionary()


@contextmanager
def context_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[ContextParallel]:
    """Split buffers over the ranks of a mesh, and run a Transformers model on them, until the end of `with`.

        x = [ids, positions, labels]
        with gdn.context_parallel(model, mesh["cp"], buffers=x, buffer_seq_dims=[1, 1, 1]):
            out = model(ids, position_ids=positions, labels=labels, shift_labels=labels, use_cache=False)
            out.loss.backward()

    Args:
        model                 a Qwen3-Next, Qwen3.5 or other model whose file has
                              torch_chunk_gated_delta_rule; it may be under FSDP2 and
                              `gdn.distributed.tensor_parallel`
        mesh                  DeviceMesh of one dimension: the ranks of one sequence
        buffers               tensors with all tokens, changed in place as by torch's `context_parallel`;
                              position_ids [B, T] must be one, labels are shifted before
        buffer_seq_dims       the axis of tokens of each buffer
        no_restore_buffers    those that need not be restored at the end

    Yields: the ContextParallel of this order of tokens, which is read from torch's shards and not assumed;
            its `unshard` gives outputs of all tokens.
    Raises: ValueError, NotImplementedError or RuntimeError that name the argument: another attention than
            SDPA, T % R, a model without such layers, a second context; in the model's call use_cache, a
            cache, a mask with padding, packed documents, labels without shift_labels, positions of other
            tokens; a backward after the end.
    Cost:   one gather of T / R integers for each new T; one host sync per call of the model.
    Process-wide, as is torch's: recomputation runs in threads of autograd.
    """
    from torch.distributed.tensor import experimental

    if not _lock.acquire(blocking=False):
        raise RuntimeError("context_parallel: expected no other one in this process, got a second")
    with ExitStack() as stack:
        stack.callback(_lock.release)
        _check(model, mesh, buffers, buffer_seq_dims)
        order = torch.arange(buffers[0].shape[buffer_seq_dims[0]], device=buffers[0].device)
        num_tokens = len(order)
        options: dict[str, Any] = {
            "buffers": [*buffers, order],
            "buffer_seq_dims": [*buffer_seq_dims, 0],
            "no_restore_buffers": {*(no_restore_buffers or ()), order},
        }
        stack.enter_context(experimental.context_parallel(mesh, **options))
        session = Session(_observed(order, num_tokens, mesh), order)
        stack.callback(session.end)
        for module in _model_files(model):
            for name, serve in ((RULE, session.rule), (CONV, session.conv)):
                entry = Replaced(module, name, vars(module)[name], serve)
                stack.callback(entry.restore)
                setattr(module, name, serve)
        for text_model in _text_models(model):
            hook = text_model.register_forward_pre_hook(session.check_text_model, with_kwargs=True)
            stack.callback(hook.remove)
        stack.callback(model.register_forward_pre_hook(_check_call, with_kwargs=True).remove)
        yield session.context


class Session:
    """Hold what runs between the entry and the end of one context: the functions of a model's file."""

    def __init__(self, context: Any, order: Tensor) -> None:
        self.context, self.order, self.is_active = context, order, True

    def end(self) -> None:
        self.is_active = False

    def rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Run the model file's torch_chunk_gated_delta_rule on the tokens of this rank."""
        if initial_state is not None or output_final_state:
            raise NotImplementedError("use_cache: expected False within context_parallel, got a cache")
        o, _ = chunk_gated_delta_rule(
            query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cp_context=self.context,
        )  # fmt: skip
        if o.requires_grad:
            # also reached by a recomputation after the end, whose layers have run without the context
            o.register_hook(self.check_backward)
        return o, None

    def conv(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the model file's causal_conv1d_fn on the tokens of this rank; hidden_states [B, D, T]."""
        if activation not in ACTIVATIONS:
            raise NotImplementedError(f"activation: expected silu, swish or None, got {activation!r}")
        y, _ = self.context.causal_conv1d(
            hidden_states.transpose(1, 2), weight, bias, activation=ACTIVATIONS[activation]
        )
        return y.transpose(1, 2)

    def check_backward(self, gradient: Tensor) -> None:
        if not self.is_active:
            raise RuntimeError("context_parallel: expected the backward within it, got one after its end")

    def check_text_model(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Check the positions and leave out the causal mask: torch's ring knows the order of its tokens."""
        given = _arguments(module, args, kwargs)
        positions = given.get("position_ids")
        if positions is None:
            raise ValueError("position_ids: expected one of the buffers of context_parallel, got None")
        rows = positions.reshape(-1, positions.shape[-1])
        if rows.shape[-1] != len(self.order) or not bool((rows == self.order).all()):
            raise ValueError("position_ids: expected 0 .. T as one of the buffers, got those of other tokens")
        return (), given | {"attention_mask": dict.fromkeys(module.config.layer_types)}


def _check(model: nn.Module, mesh: Any, buffers: Sequence[Tensor], buffer_seq_dims: Sequence[int]) -> None:
    """Raise unless the model and the buffers can be split."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if not _model_files(model):
        name = type(model).__name__
        raise ValueError(f"model: expected gated delta rule layers of Transformers, got none in {name}")
    if len(buffers) == 0 or len(buffers) != len(buffer_seq_dims):
        raise ValueError(
            f"buffer_seq_dims: expected one for each of at least one buffer, got {len(buffer_seq_dims)} for "
            f"{len(buffers)}"
        )
    lengths = {x.shape[dim] for x, dim in zip(buffers, buffer_seq_dims, strict=True)}
    if len(lengths) > 1:
        raise ValueError(f"buffers: expected one number of tokens, got {sorted(lengths)}")
    (num_tokens,) = lengths
    if num_tokens % mesh.size():
        raise ValueError(
            f"buffers: expected tokens divisible by the {mesh.size()} ranks, got {num_tokens}: pad them"
        )
    for module in model.modules():
        attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if hasattr(module, "q_proj") and attention not in (None, "sdpa"):
            raise NotImplementedError(f"attn_implementation: expected 'sdpa', got {attention!r}")
        function = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(function, "keywords", {}).get("use_reentrant"):
            raise NotImplementedError("use_reentrant: expected False for gradient checkpointing, got True")


def _check_call(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise for arguments of a model's call that the split of tokens does not allow."""
    given = _arguments(model, args, kwargs)
    if given.get("use_cache", True) is not False:
        raise NotImplementedError(
            "use_cache: expected False within context_parallel, got True or the default"
        )
    for name in (*CACHES, *PACKED):
        if given.get(name) is not None:
            raise NotImplementedError(f"{name}: expected None within context_parallel, got one")
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and not (mask.dim() == 2 and bool((mask != 0).all())):
        raise NotImplementedError("attention_mask: expected None or no padding, got a mask with zeros")
    if given.get("labels") is not None and given.get("shift_labels") is None:
        raise ValueError(
            "labels: expected shift_labels as well, shifted before they were split, got labels alone"
        )


def _arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a module's call by name."""
    names = list(inspect.signature(module.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _model_files(model: nn.Module) -> list[ModuleType]:
    """Return the modules with the functions that the model's gated delta rule layers call."""
    classes = [cls for layer in model.modules() if is_layer(layer) for cls in type(layer).__mro__]
    modules = {sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules}
    return [x for x in modules if callable(vars(x).get(RULE)) and callable(vars(x).get(CONV))]


def _text_models(model: nn.Module) -> list[nn.Module]:
    """Return the modules that make masks for decoder layers, of which some have the gated delta rule."""
    models = [
        x
        for x in model.modules()
        if isinstance(getattr(x, "layers", None), nn.ModuleList)
        and "position_ids" in inspect.signature(x.forward).parameters
    ]
    for module in models:
        names = inspect.unwrap(type(module).forward).__code__.co_names
        if "dict" not in names:
            kind = type(module).__name__
            raise NotImplementedError(f"model: expected masks by kind of layer, got {kind} without them")
    return models


def _observed(order: Tensor, num_tokens: int, mesh: DeviceMesh) -> ContextParallel:
    """Return the context whose runs are the tokens that torch gave to each rank: `order` is its shard."""
    group = mesh.get_group()
    cuts = between(order[1:] != order[:-1] + 1).long()
    starts = tuple(order[cuts[:-1]].tolist())
    key = (num_tokens, starts, tuple(cuts.tolist()))
    contexts = _contexts.setdefault(group, {})
    if key not in contexts:
        shards = [torch.empty_like(order) for _ in range(mesh.size())]
        dist.all_gather(shards, order, group=group)
        runs = []
        for rank, shard in enumerate(x.tolist() for x in shards):
            if shard != sorted(shard):
                raise NotImplementedError(
                    f"buffers: expected tokens in order on each rank, got others on {rank}"
                )
            begins = [i for i, x in enumerate(shard) if i == 0 or x != shard[i - 1] + 1]
            ends = [*begins[1:], len(shard)]
            runs += [(rank, shard[a], shard[b - 1] + 1) for a, b in zip(begins, ends, strict=True)]
        contexts[key] = ContextParallel(mesh, runs=sorted(runs, key=lambda run: run[1]))
    return contexts[key]
