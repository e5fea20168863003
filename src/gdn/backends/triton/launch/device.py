"""Describe the GPU of a call, and make it the current device."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

_NO_GUARD = nullcontext()


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which the tensors' device is current; it costs nothing if it already is."""
    # entering torch.cuda.device costs microseconds of host time
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(device)


@dataclass(frozen=True)
class Machine:
    """Describe a GPU by what tile sizes and options depend on."""

    kind: str  # cuda or hip
    capability: int  # 10 * major + minor
    num_sms: int
    shared: int  # bytes of shared memory that a program may use


@lru_cache
def machine(device: torch.device) -> Machine:
    """Return the GPU of a device; the values of an H200 where kernels are interpreted on the CPU."""
    if device.type != "cuda":
        return Machine("cuda", 90, 132, 227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    kind = "hip" if torch.version.hip else "cuda"
    capability = 10 * properties.major + properties.minor
    shared = getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
    return Machine(kind, capability, properties.multi_processor_count, shared)
