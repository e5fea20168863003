"""Compile the kernels of a model's first prompt and of its first step at the same time.

Triton compiles a kernel where it is launched first, so the first `generate` of a process would compile one
call's kernels after another's. Here the model runs once before, on a prompt and one token, while gdn's
launches are recorded instead of run. What was recorded is compiled in parallel. The results of that run are
of uninitialised memory, and nobody gets them; it has a cache of its own, and leaves the attributes of the
modules and the states of PyTorch's random numbers as they were.
"""

import copy
from collections.abc import Callable, Hashable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gdn._failures import log_failure
from gdn.integrations.transformers_model_key import Attributes
from gdn.ops.fastpath import forget_recorded

# rows x tokens of a prompt that is run once more
MOST_TOKENS = 8192
DEVICES = ("cuda",)


def compile_together(model: Any, inputs: dict[str, Any], name: str) -> int:
    """Compile what a prompt and a step need; return how many launches were compiled.

    `inputs` are the model's for a prompt, and `name` is that of their cache, which has no tokens.
    """
    ids = inputs["input_ids"]
    if ids.device.type not in DEVICES or ids.numel() > MOST_TOKENS:
        return 0
    try:
        # as `gdn.backends.triton` is imported where a call selects it
        launches = import_module("gdn.backends.triton.launch.launches")
        precompile = import_module("gdn.backends.triton.launch.precompile")
    except ImportError:
        return 0
    needed = Needed(launches.stand_in)
    attributes = Attributes(model)
    devices = [ids.device] if ids.is_cuda else []
    try:
        # what fails here fails again, for the caller to see, in the prompt itself
        with log_failure("the recorded run of a model"), torch.random.fork_rng(devices):
            spare = copy.deepcopy(inputs[name])
            with launches.record_launches(needed), forget_recorded():
                model(**{**inputs, name: spare})
                model(**step_inputs(inputs), **{name: spare})
    finally:
        attributes.restore()
    # the plans of these calls are made, so later calls do not come there
    for given in needed.ahead:
        precompile.compile_ahead(*given)
    if needed.steps:
        # it compiles for the current device
        with precompile.device_guard(ids.device):
            launches.compile_now(ids.device, list(needed.steps.values()))
    return len(needed.steps)


class Needed:
    """Keep the launches that need a compiler, each kernel once, without the memory of their tensors."""

    def __init__(self, stand_in: Callable[[Any], Any]) -> None:
        self.stand_in = stand_in
        self.steps: dict[Hashable, Any] = {}
        # what calls of other sizes will need: arguments of `compile_ahead`
        self.ahead: list[Any] = []

    def append(self, step: tuple[Any, tuple[Any, ...]]) -> None:
        """Take a launch and its tensors, as a list does."""
        launch, tensors = step
        if launch.needs_compiler(tensors):
            key = launch.binary_key(tensors), launch.num_stages
            if key not in self.steps:
                self.steps[key] = launch, tuple(map(self.stand_in, tensors))


def step_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of one more token without its cache; the model creates the masks."""
    names = inputs.keys() & {"use_cache", "return_dict", "logits_to_keep"}
    given: dict[str, Any] = {name: inputs[name] for name in names}
    positions = inputs.get("position_ids")
    if isinstance(positions, Tensor):
        given["position_ids"] = positions[..., -1:]
    return {**given, "input_ids": inputs["input_ids"][:, -1:]}
