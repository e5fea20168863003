"""Find documents packed into one row by their restarting position_ids, or at least warn."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gdn.integrations.transformers_calls import between

WARNING = (
    "position_ids restart, so this row seems to hold several documents, but neither cu_seq_lens_q nor seq_idx"
    " came: the gated delta rule layers carry their state from one document into the next. Pass both "
    "(DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)), or call "
    "gdn.patch_transformers(infer_packing=True)"
)

CACHES = ("cache", "past_key_values")  # argument names of the cache since Transformers 5.24, and before


class Watch:
    """Hold the choice to infer packing, and the state of the one warning."""

    def __init__(self) -> None:
        self.is_inferring = False
        self.has_warned = False
        self.num_calls = 0

    def is_due(self, position_ids: Tensor) -> bool:
        """Return True to check a call: every one on the CPU; on a GPU (a host sync) calls 1, 2, 4, 8, ..."""
        if self.has_warned:
            return False
        if position_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        self.num_calls += 1
        return position_ids.device.type == "cpu" or self.num_calls & (self.num_calls - 1) == 0


def is_text_model(cls: type) -> bool:
    """Return True if the class's own forward runs decoder layers and passes on positions and keywords."""
    forward = vars(cls).get("forward")
    if not inspect.isfunction(forward):
        return False
    parameters = inspect.signature(forward).parameters
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return (
        has_kwargs and "position_ids" in parameters and "layers" in inspect.unwrap(forward).__code__.co_names
    )


def watched(forward: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    """Return a text model's forward that adds cu_seq_lens_q and seq_idx if only positions mark documents."""
    names = list(inspect.signature(forward).parameters)[1:]
    # not at import: it imports torch's compiler, which takes a second
    read_documents = torch.compiler.disable(
        find_documents,
        reason="where documents start is read from position_ids; give cu_seq_lens_q and seq_idx instead",
    )

    @functools.wraps(forward)
    def forward_with_documents(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        position_ids = given.get("position_ids")
        if position_ids is None or not _may_be_packed(given, position_ids):
            return forward(self, *args, **kwargs)
        if watch.is_inferring:
            kwargs.update(read_documents(given, position_ids))
        elif (
            not torch.compiler.is_compiling()
            and watch.is_due(position_ids)
            and read_documents(given, position_ids)
        ):
            watch.has_warned = True
            warnings.warn(WARNING, RuntimeWarning, stacklevel=2)
        return forward(self, *args, **kwargs)

    return forward_with_documents


def _may_be_packed(given: dict[str, Any], position_ids: Tensor) -> bool:
    """Return True for one row of several tokens without history and document offsets; read no tensor."""
    if given.get("cu_seq_lens_q") is not None or given.get("seq_idx") is not None:
        return False
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if tokens is None or tokens.shape[0] != 1 or tokens.shape[1] < 2:
        return False
    return position_ids.shape[-1] == tokens.shape[1]


def find_documents(given: dict[str, Any], position_ids: Tensor) -> dict[str, Tensor]:
    """Return cu_seq_lens_q [N+1] and seq_idx [1, T], both int32, or nothing if the positions never restart.

    Args:               shape                    meaning
        position_ids    [1, T] or [rows, 1, T]   rows 1 or 4: row 0 counts tokens; 3: temporal, height, width
        given           dict                     the model's other arguments. A 2-D attention_mask with zeros
                                                 marks padding, a cache with tokens in it a continued text: in
                                                 both cases a restart is no new document
    Cost: one host sync.
    """
    if any(map(_has_history, cache_of(given).values())):
        return {}
    is_start = restarts(position_ids)
    cu_seqlens = between(is_start)
    if cu_seqlens.shape[0] == 2:
        return {}
    mask = given.get("attention_mask")
    # `generate` with a static cache creates a mask for each kind of layer
    masks = mask.values() if isinstance(mask, dict) else [mask]
    if any(isinstance(x, Tensor) and x.dim() == 2 and bool((x == 0).any()) for x in masks):
        return {}
    seq_idx = torch.nn.functional.pad(is_start.cumsum(0), (1, 0)).to(torch.int32)
    return {"cu_seq_lens_q": cu_seqlens, "seq_idx": seq_idx[None]}


def cache_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cache among a model's arguments or outputs, under the name that its next call expects."""
    # outputs of 5.24 have both names
    names = [name for name in CACHES if given.get(name) is not None][:1]
    return {name: given[name] for name in names}


def _has_history(cache: Any) -> bool:
    """Return True if a cache holds tokens; its linear attention layers know this without a host sync."""
    for layer in getattr(cache, "layers", ()):
        has_state = getattr(layer, "has_previous_state", None)
        if isinstance(has_state, dict):
            return any(has_state.values())
    return bool(cache.get_seq_length() > 0)


def restarts(position_ids: Tensor) -> Tensor:
    """Return a mask [T-1] that is true where token t+1 does not come after token t.

    With three rows (temporal, height, width) an image repeats its temporal position: there a document starts
    where the temporal position falls, or where all three are zero.
    """
    rows = position_ids.reshape(-1, position_ids.shape[-1])
    step = rows[0].diff()
    if rows.shape[0] != 3:
        return step <= 0
    return (step < 0) | (rows[:, 1:] == 0).all(0)
