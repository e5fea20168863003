"""Describe what a recorded step or prompt has of PyTorch's modes and flags, and of gdn's settings.

A replay runs the kernels that were selected at its recording. So the key of a recording has all of these, and
a call under other ones gets a recording of its own.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from gdn import settings
from gdn._torch_compat import function_devices, is_plain, kernel_flags


def key_of_modes(kind: str) -> Hashable:
    """Return PyTorch's modes and flags and gdn's settings that the kernels of a call depend on.

    `kind` is the type of the device. Each replayed step reads them.
    """
    return (
        torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), function_devices(),
        settings.of_call(), settings.allows_segments(), kernel_flags(),
    )  # fmt: skip


def is_unobserved(x: Tensor) -> bool:
    """Return True if no mode of the caller must see functions or operators, of which a replay has none.

    The mode of a default device sees nothing: it only adds an argument.
    """
    return is_plain(x) and function_devices() is not None
