"""Plan the launch of the state scan: choose its kernel, and make the arguments of either.

`persistent_scan_kernel` scans everything. `short_scan_kernel` scans many short sequences: see `scan.short`.
Both compute the same bits, so the choice may depend on the batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdn.backends.hopper import cost
from gdn.backends.hopper.descriptors import is_aligned, make_descriptor, states_layout
from gdn.backends.hopper.scan.kernel import persistent_scan_kernel
from gdn.backends.hopper.scan.short import short_scan_kernel
from gdn.backends.triton.launch import Launch
from gdn.backends.triton.launch.pdl import PDL
from gdn.backends.triton.rule.pool import NO_POOL, StatePool
from gdn.problem import Problem

STATES_BY_TMA = True  # many short sequences take `short_scan_kernel`; off for tests and comparisons alone
STRIP = 64  # value rows of S^T of a consumer warpgroup
REGISTERS = {2: 128, 1: 120}  # maxnreg of the scan by consumers a CTA; warp_specialize distributes them


def moves_states(p: Problem, cuts: Any, kept: torch.dtype | None, pool: StatePool | None) -> bool:
    """Return True if `short_scan_kernel` scans the problem: the one rule of this choice.

    It takes over where `can_move_states` allows it, sequences are not cut into segments, and the CTAs have
    many short work items (`cost.has_short_items`).
    """
    return cuts is None and cost.has_short_items(p) and can_move_states(p, kept, pool)


def can_move_states(p: Problem, kept: torch.dtype | None, pool: StatePool | None) -> bool:
    """Return True if TMA can move initial and final states between HBM and shared memory.

    There must be such states, of one dtype, where TMA can read them. The states that enter chunks (`kept`)
    would need more shared memory.
    """
    if not STATES_BY_TMA or kept is not None:
        return False
    initial = p.initial_state
    if initial is None:
        return p.output_final_state
    # without a pool the final states are new, in fp32
    is_alike = initial.dtype == torch.float32 or not p.output_final_state or pool is not None
    return is_alike and initial.dtype in (torch.float32, torch.bfloat16) and is_aligned(initial)


def plan_scan(
    p: Problem, consumers: int, is_short: bool, num_items: int, fast_path: bool | int,
    scalars: Sequence[int], pool: StatePool | None,
) -> Launch:  # fmt: skip
    """Plan the launch of the scan of `num_items` sequences (or segments) and heads; is_short: by TMA."""
    constants = {"V_FIRST": p.state_v_first, "FAST_PATH": fast_path}
    if is_short:
        consumers = p.V // STRIP
    else:
        constants["CONSUMERS"] = consumers
    # with one consumer a CTA and V = 128, two CTAs share a work item
    num_items *= p.V // STRIP // consumers
    return Launch(
        short_scan_kernel if is_short else persistent_scan_kernel,
        # persistent: 1 CTA an SM, as a CTA takes nearly all of an SM's shared memory
        min(num_items, cost.num_sms(p.device)),
        (*scalars, num_items, *(NO_POOL[1] if pool is None else pool.scalars)),
        {**constants, "D": p.K},
        4,
        options={"maxnreg": REGISTERS[consumers], **PDL},
        num_descriptors=11 if is_short else 10,
        seconds=2.0 * consumers,
    )


def describe_states(x: Tensor | None, is_v_first: bool) -> Any:
    """Return the TMA descriptor of states [N, HV, D, D] in blocks of 64 value rows; None for None."""
    if x is None:
        return None
    D = x.shape[-1]
    block = (1, 1, STRIP, D) if is_v_first else (1, 1, D, STRIP)
    return make_descriptor(x, block, states_layout(x))
