"""Launch kernels: fix everything but the tensors, and reuse the compiled handle on later calls.

A kernel's parameters come in this order: tensors (`x_ptr`), scalars, constants (`tl.constexpr`, capitals).
Triton never specialises on scalars: another length, batch or head count runs the same binary.

Read in this order:

    kernels       declare a kernel without reading its source; count strides in units so that loads vectorise
    device        the GPU that a call runs on, and what tile sizes depend on
    specs         shapes and dtypes of the tensors that a plan allocates
    launcher      call Triton's C function without its Python code, with descriptors encoded before
    ready         a sequence of compiled launches as a function of the addresses of tensors
    parallel      compile the binaries of several launches in parallel
    background    compile binaries that no call waits for, in a thread
    launches      Launch, LaunchSequence, CachedLaunch: run kernels with little host time
    plans         the cache of plans, which hold launches
    pdl           programmatic dependent launch
    precompile    compile what a problem of another size will need, in the background
    compilations  count what Triton compiles
    identity      what every compiled kernel depends on: the GPU, Triton, Python, gdn's source
    binaries      ship compiled kernels to another process or machine
    saved         launch shipped kernels without Triton's JIT
"""

from gdn.backends.triton.launch.device import Machine, device_guard, machine
from gdn.backends.triton.launch.kernels import INTERPRETED, jit, kernel, unit_of
from gdn.backends.triton.launch.launches import (
    CachedLaunch,
    Launch,
    LaunchSequence,
    Step,
    is_recording,
    record_launches,
)
from gdn.backends.triton.launch.plans import PlanCache
from gdn.backends.triton.launch.precompile import compile_ahead
from gdn.backends.triton.launch.specs import TensorSpec, allocate, allocate_placeholders, tensor_spec

__all__ = [
    "INTERPRETED",
    "CachedLaunch",
    "Launch",
    "LaunchSequence",
    "Machine",
    "PlanCache",
    "Step",
    "TensorSpec",
    "allocate",
    "allocate_placeholders",
    "compile_ahead",
    "device_guard",
    "is_recording",
    "jit",
    "kernel",
    "machine",
    "record_launches",
    "tensor_spec",
    "unit_of",
]
