"""One launch after another without the gap between them: programmatic dependent launch.

A kernel launched so may begin once all programs of the one before have come to `let_the_next_begin`, or are
done. There it waits until that one is done and what it stored is seen: no memory may be touched before. A
kernel that did not wait would let the next begin while the one before it still writes.

Where the one before waits before it lets the next begin, all before that one are done: without waiting, their
results and the caller's tensors may be read, and memory be written that the one before does not touch. So the
launches of `hopper` do, but the walk lets the next begin at once: who follows it waits before anything.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gdn.backends.triton.launch import INTERPRETED, Machine

CHAINED = {"launch_pdl": True}  # of a Launch
ON_GPU = tl.constexpr(not INTERPRETED)  # for kernels: whether there is assembly


def chains(machine: Machine) -> bool:
    """Whether a machine can."""
    return machine.kind == "cuda" and machine.capability >= 90


def chained(machine: Machine) -> dict[str, Any]:
    """CHAINED, where a machine can."""
    return CHAINED if chains(machine) else {}


@triton.jit
def let_the_next_begin():
    if ON_GPU:
        gdc_launch_dependents()


@triton.jit
def wait_for_the_one_before():
    if ON_GPU:
        gdc_wait()


@triton.jit
def after_the_one_before():
    """Both, for kernels whose programs leave room for the next one's."""
    let_the_next_begin()
    wait_for_the_one_before()


@triton.jit
def after_all_before():
    """Both the other way round: to the next one all but this launch are done."""
    wait_for_the_one_before()
    let_the_next_begin()
