"""Host time of an eager call: Python and launches, while the GPU is never waited for.

Calls come in bursts on problems so small that the GPU keeps up.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

import gdn

# where it is used: earlier trees, which `gdn bench compare` measures, have it in another module
from gdn.ops.prefill import parse_prefill
from gdn.problem import DecodeProblem, PrefillProblem, parse
from gdn.problem.serving import parse_decode
from gdn.testing.cases import Case, packed
from gdn.testing.tensors import Inputs
from gdn_bench.problems.catalog import MIXED, VARIANTS, step
from gdn_bench.providers.gdn_calls import prefill_arguments
from gdn_bench.timing.measure import Times, times
from gdn_bench.timing.settle import finish_background

CALLS, BURSTS = 10, 25
# gates and l2norm in the kernel, as a layer calls it; 16/32 heads
FULL = replace(MIXED, **VARIANTS["gated"], heads=(16, 32), lengths=packed(256))  # type: ignore[arg-type]
CASES: dict[str, tuple[str, Case]] = {  # name -> job, problem
    "decode": ("decode", step(8)),
    "forward": ("prefill", FULL),
    "forward+backward": ("train", FULL),
}


def burst(call: Callable[[], Any], device: torch.device) -> Times:
    """Return the seconds of host time per call, in bursts that the host does not wait for."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    call()
    finish_background()
    seconds = []
    for _ in range(BURSTS):
        wait()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        seconds.append((time.perf_counter() - start) / CALLS)
    wait()
    return times(seconds)


def rule_check(given: Inputs, backend: str | None) -> Callable[[], Any]:
    """Return a function that checks a call of the rule and returns its Problem."""
    arguments: dict[str, Any] = {**given.tensors, **given.options, "backend": backend}
    return lambda: parse(**arguments)


def decode_check(given: Inputs, backend: str | None) -> Callable[[], Any]:
    """Return a function that checks a decode on a pool and returns its DecodeProblem."""
    x, options = given.tensors, given.options
    call = inspect.signature(gdn.decode).bind(
        x["q"], x["k"], x["v"], x["pool"], a=x["g"], b=x["beta"], A_log=x["A_log"], dt_bias=x["dt_bias"],
        scale=options["scale"], use_qk_l2norm_in_kernel=options["use_qk_l2norm_in_kernel"],
        state_v_first=options["state_v_first"], read_index=x["read_index"], out=torch.empty_like(x["v"]),
        backend=backend,
    )  # fmt: skip
    call.apply_defaults()
    return _on_pool(parse_decode, DecodeProblem, call.arguments)


def int16_check(given: Inputs, backend: str | None) -> Callable[[], Any]:
    """Return a function that checks a decode on a pool in int16 and returns its DecodeProblem."""
    pool, options = given.tensors["pool"], given.options
    problem = decode_check(given, backend)()
    last = -1 if options["state_v_first"] else -2
    scale = pool.new_empty(pool.select(last, 0).shape, dtype=torch.float32)
    return lambda: replace(problem, state=pool.to(torch.int16), column_scale=scale)


def prefill_check(given: Inputs, backend: str | None) -> Callable[[], Any]:
    """Return a function that checks a prefill on a pool and returns its PrefillProblem."""
    arguments = prefill_arguments(given.tensors, given.options)
    call = inspect.signature(gdn.prefill).bind(**arguments, backend=backend)
    call.apply_defaults()
    return _on_pool(parse_prefill, PrefillProblem, call.arguments)


def _on_pool(check: Callable[..., Any], kind: type[Any], arguments: dict[str, Any]) -> Callable[[], Any]:
    """Return a check of a call on a pool of floats; older trees have no scales, remainders or histories."""
    parts = ("column_scale", "remainder", "history_u", "history_k", "history_G", "cursor", "room")
    absent = dict.fromkeys({field.name for field in fields(kind)}.intersection(parts))
    return lambda: check(**arguments, **absent)
