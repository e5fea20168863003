"""patch_transformers(): run Transformers models with gated delta rule layers on gdn, by one call.

A model file calls four functions through its own globals: the two forms of the rule, with a decay per head or
per key channel, and the two of the short convolution. These are replaced in files that are already
imported, and in files imported later: every model file defines a PreTrainedModel, and the patch runs when
that class is created. The forwards of layers and of their norms are replaced in the classes, and models get
the method by which `generate` lets them create their masks.
"""

import sys
import threading
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

from torch import nn

from gdn.integrations import transformers_calls as calls
from gdn.integrations import transformers_generate as generating
from gdn.integrations import transformers_graphs as graphing
from gdn.integrations import transformers_norm as norms
from gdn.integrations import transformers_packing as packing
from gdn.integrations import transformers_prompts as prompts
from gdn.integrations import transformers_rms_norm as rms_norms
from gdn.integrations import transformers_step as steps

OLDEST = (5, 17)
# both forms of the rule in a model file: with a decay per head, or per key channel
PER_HEAD = {
    "torch_chunk_gated_delta_rule": calls.chunk,
    "torch_recurrent_gated_delta_rule": calls.recurrent,
}
PER_CHANNEL = {
    "chunk_kimi_delta_attention": calls.chunk,
    "recurrent_kimi_delta_attention": calls.recurrent,
}
RULES = tuple((next(iter(rule)), rule) for rule in (PER_HEAD, PER_CHANNEL))
FUNCTIONS = {
    **PER_HEAD,
    **PER_CHANNEL,
    "causal_conv1d_fn": calls.conv,
    "causal_conv1d_update": calls.conv_update,
}


MISSING = object()  # the original of an attribute that its owner did not have


@dataclass(frozen=True)
class Replaced:
    """Hold one attribute that was replaced."""

    owner: Any
    name: str
    original: Any
    replacement: Any

    def restore(self) -> None:
        """Restore the original, unless somebody else has replaced ours in the meantime."""
        if vars(self.owner).get(self.name) is not self.replacement:
            return
        if self.original is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


# patching is process-wide by nature: the patches in force, and the originals
_lock = threading.RLock()
_active: list["Patch"] = []
_graphing: list["Patch"] = []  # those with graphs
_replaced: list[Replaced] = []
_watch = packing.Watch()


class Patch:
    """Keep a patch in force until `undo()` or the end of `with`. The last to end restores the originals."""

    def __init__(self, *, infer_packing: bool, graphs: bool = False) -> None:
        self.infer_packing, self.graphs = infer_packing, graphs

    @property
    def is_active(self) -> bool:
        return any(patch is self for patch in _active)

    @property
    def modules(self) -> list[str]:
        """Return the names of the model files that run on gdn now."""
        names = {r.owner.__name__ for r in _replaced if isinstance(r.owner, ModuleType)}
        return sorted(names) if self.is_active else []

    def undo(self) -> None:
        """End this patch; a second call does nothing. Patches may end in any order."""
        with _lock:
            _active[:] = [patch for patch in _active if patch is not self]
            _graphing[:] = [patch for patch in _active if patch.graphs]
            if not _graphing:
                graphing.forget()
            _choose_inference()
            if not _active:
                for entry in reversed(_replaced):
                    entry.restore()
                _replaced.clear()

    def __enter__(self) -> "Patch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        if not self.is_active:
            return "Patch(undone)"
        graphs = ", graphs=True" if self.graphs else ""
        return f"Patch(infer_packing={self.infer_packing}{graphs}, modules={self.modules})"


def patch_transformers(*, infer_packing: bool = False, graphs: bool = False) -> Patch:
    """Run the gated delta rule and the short convolution of Transformers models on gdn, on any device.

    It also runs the RMS norms of Qwen models where no gradient is recorded, and on a GPU the gated RMS norm
    of the layers, both outside of compiled graphs. It replaces the functions in
    qwen3_next, qwen3_5, qwen3_5_moe, qwen4_exp, olmo_hybrid, in kimi_linear, glm5_next and bailing_hybrid,
    which have a decay per key channel, and in every other model file, imported before or later, that has
    torch_chunk_gated_delta_rule and torch_recurrent_gated_delta_rule, or chunk_kimi_delta_attention and
    recurrent_kimi_delta_attention; existing models run on gdn, too.
    With a static cache `generate` creates a token's masks in fewer operators, and on a GPU reads one token
    later whether all rows have ended.
    torch.export, meta tensors and calls that gdn rejects use the originals, with a RuntimeWarning; packed
    sequences that gdn rejects are an error, because the originals would mix the documents.

    Args:
        infer_packing    bool    True: where a batch of one row has restarting position_ids and neither
                                 cu_seq_lens_q nor seq_idx, derive both, so that documents stay apart (one
                                 host sync per forward). False: warn once
        graphs           bool    True: `generate(cache_implementation="static")` on a GPU replays one CUDA
                                 graph per cache instead of compiling the model, and one for each shape of
                                 prompts that comes a third time; the bits are those of eager steps. Beam
                                 search, models with hooks, and steps that ask for attentions or hidden
                                 states run without a graph

    Returns: a Patch: call `undo()`, or use it in a `with` statement. Patches may be nested and end in any
        order; with several in force, packing is inferred if any asked for it. The last to end restores all.
    Raises:  ImportError without Transformers 5.17 or newer; TypeError if an option is no bool.
    Cost:    imports transformers.modeling_utils. Process-wide.

    Example:
        >>> import gdn
        >>> with gdn.patch_transformers() as patch:
        ...     patch.is_active
        True
    """
    for name, value in {"infer_packing": infer_packing, "graphs": graphs}.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")
    try:
        import transformers
        from transformers.modeling_utils import PreTrainedModel
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        message = "patch_transformers needs Transformers, not installed here: pip install 'gdn[transformers]'"
        raise ModuleNotFoundError(message, name="transformers") from None

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(f"transformers: expected version 5.17 or newer, got {transformers.__version__}")
    patch = Patch(infer_packing=infer_packing, graphs=graphs)
    with _lock:
        if not _active:
            _watch.has_warned, _watch.num_calls = False, 0
            _replace(
                PreTrainedModel, "__init_subclass__", _scan_on_subclass(PreTrainedModel.__init_subclass__)
            )
            original = PreTrainedModel.get_compiled_call
            _replace(
                PreTrainedModel, "get_compiled_call",
                graphing.get_compiled_call(original, _graphing, _has_layers),
            )  # fmt: skip
        _active.append(patch)
        _graphing[:] = [patch for patch in _active if patch.graphs]
        _choose_inference()
        _scan()
    return patch


def _choose_inference() -> None:
    """Infer packing if an active patch asks for it. Recordings were made with the choice before."""
    before, _watch.is_inferring = _watch.is_inferring, any(patch.infer_packing for patch in _active)
    if _watch.is_inferring is not before:
        graphing.forget()


def _scan_on_subclass(original: Any) -> classmethod:
    """Return a __init_subclass__ that also patches the file in which the new class is being defined."""

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        original.__func__(cls, **kwargs)
        with _lock:
            if _active:
                _scan()
                _serve_class(cls)

    return classmethod(__init_subclass__)


def _scan() -> None:
    """Patch every model file among the imported modules that is not patched yet."""
    per_head, per_channel = (first for first, _ in RULES)
    for name, module in list(sys.modules.items()):
        # two look-ups and no call for most modules: a process with Transformers has thousands
        if not isinstance(module, ModuleType) or (
            per_head not in module.__dict__ and per_channel not in module.__dict__
        ):
            continue
        if _is_model_file(name, module):
            for function, make in FUNCTIONS.items():
                original = vars(module).get(function)
                if callable(original) and not _is_ours(module, function):
                    _replace(module, function, make(original, _active))
            for cls in list(vars(module).values()):
                if isinstance(cls, type) and cls.__module__ == name:
                    _serve_class(cls)


def _is_model_file(name: str, module: ModuleType) -> bool:
    """Return True for a module with both functions of a rule and own layers; scripts only import them."""
    names = vars(module)
    has_rule = any(all(callable(names.get(x)) for x in rule) for _, rule in RULES)
    if not has_rule or name.split(".")[0] == "gdn":
        return False
    return any(
        isinstance(x, type) and issubclass(x, nn.Module) and x.__module__ == name
        for x in list(names.values())
    )


def _serve_class(cls: type) -> None:
    """Wrap the forward of a class of a patched file: a text model, a layer with the rule, or its norm."""
    module = sys.modules.get(cls.__module__)
    is_served = module is not None and any(_is_ours(module, x) for x in (*PER_HEAD, *PER_CHANNEL))
    if (
        is_served
        and issubclass(cls, nn.Module)
        and packing.is_text_model(cls)
        and not _is_ours(cls, "forward")
    ):
        _replace(cls, "forward", packing.watched(vars(cls)["forward"], _watch))
    elif is_served and steps.is_layer(cls) and not _is_ours(cls, "forward"):
        _replace(cls, "forward", steps.with_step(vars(cls)["forward"], _active))
    elif is_served and not _is_ours(cls, "forward") and (activations := norms.activations_of(cls)):
        _replace(cls, "forward", norms.with_norm(cls, activations, _active))
    elif is_served and not _is_ours(cls, "forward") and rms_norms.is_rms_norm(cls):
        _replace(cls, "forward", rms_norms.with_rms_norm(cls, _active))
    if is_served and hasattr(cls, generating.CALLER):
        _shorten_generate(cls)


def _shorten_generate(cls: type) -> None:
    """Give a class that generates a method for its masks, unless it has one; wrap the loop over the steps."""
    # not when the patch begins: the class's file has imported the functions of `generate`
    if not hasattr(cls, generating.NAME) and (method := generating.masks_method(_active)) is not None:
        _replace(cls, generating.NAME, method)
    check = generating.deferred_check()
    if check is not None and not _is_ours(check, "is_supported"):
        _replace(check, "is_supported", generating.is_supported(check.is_supported, _active))
        mixin = generating.sampling_class()
        _replace(mixin, "_sample", generating.with_steps_noted(mixin._sample))
    mixin = generating.sampling_class()
    if hasattr(mixin, "_prefill") and not _is_ours(mixin, "_prefill"):
        _replace(mixin, "_prefill", prompts.with_prompts(mixin._prefill))
        _replace(mixin, "_sample", prompts.with_own_call(mixin._sample))


def _has_layers(model: nn.Module) -> bool:
    """Return True for a model with layers of a patched file."""
    return any(steps.is_layer(type(module)) for module in model.modules())


def _is_ours(owner: Any, name: str) -> bool:
    """Return True if we have replaced this attribute, even if somebody has wrapped our replacement since."""
    return any(r.owner is owner and r.name == name for r in _replaced)


def _replace(owner: Any, name: str, replacement: Any) -> None:
    _replaced.append(Replaced(owner, name, vars(owner).get(name, MISSING), replacement))
    setattr(owner, name, replacement)
