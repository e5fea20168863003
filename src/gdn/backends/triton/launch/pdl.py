"""Programmatic dependent launch (PDL): start kernel N+1 while kernel N drains.

Kernel N+1 may be scheduled once every program of kernel N has executed `gdc_launch_dependents` or exited. It
must execute `gdc_wait` before it touches any memory: `gdc_wait` returns when kernel N has finished and its
stores to HBM are visible. Every kernel must wait, even one that needs nothing from kernel N; otherwise N+2
could start while N is still writing.

If kernel N waits before it lets N+1 start, everything before N has finished when N+1 starts. N+1 may then,
without waiting, read the results of those kernels and the caller's tensors, and write memory that N does not
touch. The launches of `hopper` rely on this. Its `persistent_scan_kernel` lets the next kernel start at
once, so the kernel that follows it must wait first.
"""

from typing import Any

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gdn.backends.triton.launch import INTERPRETED, Machine, jit

PDL = {"launch_pdl": True}  # options of a Launch that uses PDL
ON_GPU = tl.constexpr(not INTERPRETED)  # the interpreter runs no PTX: kernels skip inline assembly there


def supports_pdl(machine: Machine) -> bool:
    """Return whether a machine supports PDL: NVIDIA, sm_90 or newer."""
    return machine.kind == "cuda" and machine.capability >= 90


def pdl_options(machine: Machine) -> dict[str, Any]:
    """Return the PDL option of a Launch, or no options on machines without PDL."""
    return PDL if supports_pdl(machine) else {}


@jit
def launch_dependents():
    # gdc_launch_dependents: once all programs have executed it, the SMs may take programs of the next kernel
    if ON_GPU:
        gdc_launch_dependents()


@jit
def wait_previous():
    # gdc_wait: block until the previous kernel has finished and its stores to HBM are visible
    if ON_GPU:
        gdc_wait()


@jit
def launch_dependents_then_wait():
    """Let the next kernel start, then wait for the previous one.

    Use it where the programs of both kernels fit an SM's registers and shared memory together.
    """
    launch_dependents()
    wait_previous()


@jit
def wait_then_launch_dependents():
    """Wait for the previous kernel, then let the next one start.

    The next kernel may then assume that every kernel before this one has finished.
    """
    wait_previous()
    launch_dependents()
