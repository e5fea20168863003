"""Compile ahead: build, after the first call of a kind, the binaries that calls of other sizes will use.

Tile sizes depend on how many programs fill the GPU, so another number of tokens, sequences or heads may need
another binary. The call itself compiles its own binaries only (`Launch`, `LaunchSequence`). A thread in the
background compiles the others, and a call that needs one before that compiles it itself.
"""

from collections.abc import Callable, Hashable, Iterable

import torch

from gdn._failures import log_failure
from gdn.backends.triton.launch.device import device_guard
from gdn.backends.triton.launch.kernels import INTERPRETED
from gdn.backends.triton.launch.launches import (
    BACKGROUND,
    Step,
    defer_ahead,
    is_recording,
    job_key,
    stand_in,
)
from gdn.backends.triton.launch.parallel import compile_all
from gdn.backends.triton.launch.saved import LOADING

_compiled_kinds: set[Hashable] = set()


def compile_ahead(device: torch.device, kind: Hashable, steps: Callable[[], Iterable[Step]]) -> None:
    """Compile the binaries of these launches in the background, the first time that `kind` occurs.

    Only the dtypes of the tensors matter, and no tensor is kept. A kernel that does not compile fails where
    it is launched. `finish_ahead` waits for all.
    """
    if INTERPRETED or device.type != "cuda" or (device, kind) in _compiled_kinds:
        return
    if is_recording():
        defer_ahead(device, kind, steps)
        return
    with LOADING:
        if (device, kind) in _compiled_kinds:
            return
        with device_guard(device):
            later = [(launch, tuple(map(stand_in, tensors))) for launch, tensors in steps()]
            BACKGROUND.add({job_key(device, *step): (device, step) for step in later})
        _compiled_kinds.add((device, kind))


def finish_ahead() -> None:
    """Compile what the background has not yet, in parallel, load all of it onto the GPU, and return."""
    with LOADING:
        jobs = BACKGROUND.take()
        for device in dict.fromkeys(device for device, _ in jobs):
            steps = [step for at, step in jobs if at == device]
            with device_guard(device):
                # those that compile longest come first, as they are traced one at a time
                for binary in compile_all(sorted(steps, key=lambda step: -step[0].seconds)):
                    with log_failure("the loading of a binary"):
                        # reading the property loads the binary onto the GPU
                        _ = binary.run
