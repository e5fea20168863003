"""Calls that can be timed: the inputs of a problem on the device, copies of them, calls of a provider."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gdn.backends import select
from gdn.testing import accuracy
from gdn.testing.cases import Case, packed
from gdn.testing.tensors import Inputs, inputs
from gdn_bench.providers.provider import POOLED, Provider
from gdn_bench.timing import hosttime

DTYPE = torch.bfloat16
_OWN = ("q", "k", "v", "g", "beta", "initial_state")  # tensors that each set of inputs has copies of


def given(case: Case, device: torch.device) -> Inputs:
    """Return the tensors of a case, drawn on the device, offsets in int32."""
    drawn = inputs(case, DTYPE, device=device, is_drawn_there=True)
    tensors = {name: x.int() if name == "cu_seqlens" else x for name, x in drawn.tensors.items()}
    return replace(drawn, tensors=tensors)


def sets(job: str, first: Inputs, count: int) -> list[Inputs]:
    """Return `count` problems with equal numbers in different memory; they share one tensor of offsets.

    Peers cache what they compute from offsets by the tensor's identity. The states of a decode, and
    of prompts on a pool, lie in one pool, each set's in slots of its own, in random order.
    """
    problems = [first]
    for _ in range(count - 1):
        own = {name: x.clone() if name in _OWN else x for name, x in first.tensors.items()}
        problems.append(replace(first, tensors=own))
    return _pooled(problems) if job in POOLED else problems


def call(provider: Provider, job: str, given: Inputs) -> Callable[[], Any]:
    """Return the function to time: a forward, a forward and backward through both outputs, or a decode."""
    if job != "train":
        return provider.binds[job](given.tensors, given.options).run
    leaves = {
        name: x.detach().requires_grad_() for name, x in given.tensors.items() if name in accuracy.GRADIENTS
    }
    bound = provider.binds[job]({**given.tensors, **leaves}, given.options)
    wanted, gradients = list(leaves.values()), [given.do, given.dfinal_state]

    def step() -> Any:
        return torch.autograd.grad([x for x in bound() if x is not None], wanted, gradients)

    return step


def backend(provider: str, job: str, given: Inputs) -> str | None:
    """Return the backend of gdn that runs a job's problem; None for a peer, or if no backend supports it."""
    name, _, forced = provider.partition(":")
    if name != "gdn" or forced:
        return forced or None
    if job in POOLED and "pool" not in given.tensors:
        given = _pooled([given])[0]
    checks = {
        "decode": hosttime.decode_check, "pool": hosttime.prefill_check, "int16": hosttime.int16_check
    }  # fmt: skip
    check = checks.get(job, hosttime.rule_check)
    try:
        return select(check(given, None)()).name
    except NotImplementedError:
        return None


def default_backend(provider: str, heads: tuple[int, int], device: torch.device) -> str | None:
    """Return the backend of gdn that runs a short problem of these heads, 128 x 128."""
    case = Case("mild", sizes=(128, 128), heads=heads, lengths=packed(64))
    return backend(provider, "prefill", given(case, device))


def _pooled(problems: list[Inputs]) -> list[Inputs]:
    states = [x.tensors["initial_state"] for x in problems]
    (B, *shape), device = states[0].shape, states[0].device
    generator = torch.Generator(device).manual_seed(0)
    slots = torch.randperm(B * len(problems), generator=generator, device=device)
    pool = states[0].new_empty(len(slots), *shape)
    pooled = []
    for one, state, index in zip(problems, states, slots.split(B), strict=True):
        pool[index] = state
        own = {name: x for name, x in one.tensors.items() if name != "initial_state"}
        pooled.append(replace(one, tensors={**own, "pool": pool, "read_index": index.int()}))
    return pooled
