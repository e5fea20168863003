"""Shorten the time of the host between two steps of `generate` with a static cache: masks, check for an end.

`generate` asks a model for a method `create_masks_for_generate` and calls its own function where there is
none. That function takes every kind of mask: for one new token it runs some twenty operators, each of which
costs the host as much as the next. Models of patched files get a method that computes this token's mask

    mask[b, 0, 0, s] = s <= number of tokens in the cache, and attention_mask[b, s]

in the same dtype, shape and strides. Left to the function of Transformers: several tokens, other caches than
a StaticCache of plain layers, other layers than full and linear attention, packed and blockwise masks, mask
functions and attention that somebody has registered, compiled graphs, export, traces and dispatch modes.

After each token `generate` asks whether all rows have ended, and waits for the GPU, which then has nothing to
do until the next token is prepared. Transformers can read the answer one token later, and does so on Apple's
GPUs alone; here it does on NVIDIA's as well.
"""

import functools
import inspect
from collections.abc import Callable, Sized
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from gdn._torch_compat import is_plain
from gdn.integrations.transformers_graphs import is_static
from gdn.integrations.transformers_packing import CACHES

NAME = "create_masks_for_generate"
CALLER = "prepare_inputs_for_generation"
# what two versions of Transformers name the arguments, without that of the cache
PARAMETERS = {
    "config", "inputs_embeds", "attention_mask", "position_ids", "or_mask_function", "and_mask_function",
    "block_sequence_ids", "kwargs",
}  # fmt: skip
OVERLAYS = ("or_mask_function", "and_mask_function", "block_sequence_ids")
# functions of Transformers' masking_utils for the layers of one kind, by name
KINDS = {"full_attention": "create_causal_mask", "linear_attention": "create_recurrent_attention_mask"}
ATTENTION = {"sdpa": "sdpa_mask", "eager": "eager_mask"}
# devices that compute while the host goes on
QUEUES = ("cuda",)
CHECK = ("device", "cache", "cache_is_returned", "is_assistant")
# True in a call of `generate` whose steps run no function of the caller and draw no random numbers
_is_deferrable: ContextVar[bool] = ContextVar("is_deferrable", default=False)


def masks_method(active: Sized) -> staticmethod | None:  # type: ignore[type-arg]
    """Return the method of models while `active` holds a patch; None if Transformers is not as expected."""
    from transformers import cache_utils, masking_utils
    from transformers.generation import utils

    library: dict[str, Any] = {**vars(cache_utils), **vars(masking_utils)}
    original: Callable[..., Any] | None = getattr(utils, NAME, None)
    needed = ("StaticCache", "StaticLayer", "LinearAttentionLayer", *KINDS.values(), *ATTENTION.values())
    if original is None or any(name not in library for name in needed):
        return None
    parameters = set(inspect.signature(original).parameters)
    if not any(parameters == {*PARAMETERS, cache} for cache in CACHES):
        return None
    masks = _Masks(library)

    @functools.wraps(original)
    def create_masks_for_generate(*args: Any, **given: Any) -> Any:
        # somebody may have replaced it
        function = getattr(utils, NAME)
        if len(active) == 0 or args or function is not original:
            return function(*args, **given)
        served = masks.find(**given)
        return function(**given) if served is None else served

    return staticmethod(create_masks_for_generate)


class _Masks:
    """Hold what Transformers has under its own names when a patch begins."""

    def __init__(self, library: dict[str, Any]) -> None:
        self.cache = library["StaticCache"]
        self.layer, self.other_layer = library["StaticLayer"], library["LinearAttentionLayer"]
        self.kinds = {kind: library[name] for kind, name in KINDS.items()}
        self.attention = {kind: library[name] for kind, name in ATTENTION.items()}
        # users register their own functions here
        self.kinds_in_use = library["LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING"]
        self.attention_in_use = library["ALL_MASK_ATTENTION_FUNCTIONS"]

    def find(
        self, config: Any, inputs_embeds: Tensor, attention_mask: Any, **given: Any
    ) -> dict[str, Tensor | None] | None:
        """Return the masks of a step by the kind of layer; None if it is not one that is served here."""
        tokens, padding = inputs_embeds, attention_mask
        layer = self._attention_layer(next((given[name] for name in CACHES if name in given), None))
        if layer is None or tokens.shape[1] != 1 or any(given.get(name) is not None for name in OVERLAYS):
            return None
        length, count = layer.max_cache_len, layer.cumulative_length
        if not (_is_served(count, tokens) and (padding is None or _is_served(padding, tokens))):
            return None
        config = config.get_text_config()
        kinds, attention = set(getattr(config, "layer_types", ())), config._attn_implementation
        is_known = self.attention_in_use.get(attention) is self.attention.get(attention, ATTENTION)
        if not (is_known and "full_attention" in kinds and getattr(config, "is_causal", True)):
            return None
        if any(self.kinds_in_use.get(kind) is not self.kinds.get(kind, KINDS) for kind in kinds):
            return None
        if padding is not None and (padding.dim() != 2 or padding.shape[0] != tokens.shape[0]):
            return None
        mask = causal_mask(length, count if layer.is_initialized else 0, padding, tokens)
        if attention == "eager":
            zero = torch.zeros((), device=mask.device, dtype=tokens.dtype)
            mask = torch.where(mask, zero, torch.finfo(tokens.dtype).min)
        # a token of a linear attention layer is never padding
        return {kind: mask if kind == "full_attention" else None for kind in kinds}

    def _attention_layer(self, cache: Any) -> Any:
        """Return the first layer of a static cache that holds keys; None if another kind is among them."""
        if type(cache) is not self.cache:
            return None
        kinds = [type(layer) for layer in cache.layers]
        if self.layer not in kinds or kinds.count(self.layer) + kinds.count(self.other_layer) < len(kinds):
            return None
        return cache.layers[kinds.index(self.layer)]


def causal_mask(length: int, count: Tensor | int, padding: Tensor | None, like: Tensor) -> Tensor:
    """Return the mask [B, 1, 1, length] of one token after `count` ones; padding [B, any length] or None."""
    rows, positions = like.shape[0], _positions(length, like.device, _stream_of(like.device))
    if padding is None:
        return (positions <= count).view(1, 1, 1, length).expand(rows, 1, 1, length)
    width = min(padding.shape[1], length)
    if width == length:
        return torch.logical_and(positions <= count, padding[:, :length]).view(rows, 1, 1, length)
    mask = torch.zeros((rows, length), dtype=torch.bool, device=like.device)
    torch.logical_and(positions[:width] <= count, padding, out=mask[:, :width])
    return mask.view(rows, 1, 1, length)


@functools.lru_cache(maxsize=16)
def _positions(length: int, device: torch.device, stream: int) -> Tensor:
    # one for each stream: another stream might read it before this one has written it
    return torch.arange(length, device=device)


def _stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _is_served(x: Any, tokens: Tensor) -> bool:
    """Return True for a plain tensor on the device of the tokens, outside of traces and recorded graphs."""
    if not isinstance(x, Tensor) or not is_plain(x) or x.device != tokens.device:
        return False
    if torch.compiler._is_exporting_flag or torch.jit.is_tracing():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def deferred_check() -> Any:
    """Return the class of Transformers that decides whether to defer the check; None if it is another one."""
    from transformers.generation import utils

    check = getattr(utils, "DeferredStopCheck", None)
    if check is None or tuple(inspect.signature(check.is_supported).parameters) != CHECK:
        return None
    return check


def sampling_class() -> Any:
    """Return the class of Transformers whose `_sample` is the loop over the steps."""
    from transformers.generation import utils

    return utils.GenerationMixin


def with_steps_noted(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_sample` that notes for `is_supported` whether a step more would be seen by the caller."""

    @functools.wraps(sample)
    def _sample(*args: Any, **given: Any) -> Any:
        token = _is_deferrable.set(_runs_unseen_steps(given))
        try:
            return sample(*args, **given)
        finally:
            _is_deferrable.reset(token)

    return _sample


def _runs_unseen_steps(given: dict[str, Any]) -> bool:
    """Return True if the caller of `generate` cannot tell a step after the end: see `is_supported`."""
    from transformers.generation import logits_process, stopping_criteria

    processors, criteria = given.get("logits_processor"), given.get("stopping_criteria")
    config = given.get("generation_config")
    # a step more that samples would leave other random numbers to the caller's next call
    if processors is None or criteria is None or config is None or config.do_sample:
        return False
    # prefix_allowed_tokens_fn of the caller
    if any(type(x) is logits_process.PrefixConstrainedLogitsProcessor for x in processors):
        return False
    own = (logits_process.__name__, stopping_criteria.__name__)
    return all(type(x).__module__ in own for x in (*processors, *criteria))


def is_supported(original: Callable[..., bool], active: Sized) -> staticmethod:  # type: ignore[type-arg]
    """Return a `DeferredStopCheck.is_supported` that includes GPUs while `active` holds a patch.

    The host prepares a token while the GPU computes the one before. A text that ends before its greatest
    length takes one step more, which `generate` cuts off, and a streamer gets each token one step later.
    Nothing is deferred where the caller gets the cache, which would hold that step, or has own functions for
    logits and ends: many refuse a text that has ended. Nor where tokens are sampled: that step would draw
    random numbers.
    """

    @functools.wraps(original)
    def is_supported(device: Any, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        if original(device, cache, cache_is_returned=cache_is_returned, is_assistant=is_assistant):
            return True
        if len(active) == 0 or device.type not in QUEUES or cache_is_returned or is_assistant:
            return False
        if not _is_deferrable.get():
            return False
        # the check records its event on the current device's stream: on another one it would wait for nothing
        if device.index is not None and device.index != torch.cuda.current_device():
            return False
        # models without linear attention have no such layers
        return is_static(cache) and any(hasattr(layer, "recurrent_states") for layer in cache.layers)

    return staticmethod(is_supported)
