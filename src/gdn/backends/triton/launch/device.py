"""Describe the GPU of a call, and make it the current device."""

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


def loads_in_captures() -> AbstractContextManager[Any]:
    """Return a context in which this thread may load a binary onto the GPU while it captures a CUDA graph.

    The driver refuses that in the capture modes `global` and `thread_local`, which exist to find calls that a
    replay would leave out. A loaded binary stays, and its launch is captured as any other.
    """
    if torch.version.hip is not None or not torch.cuda.is_initialized():
        return _NO_GUARD
    return _relaxed_capture() if torch.cuda.is_current_stream_capturing() else _NO_GUARD


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    # exchanges the mode of this thread with the argument
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


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
