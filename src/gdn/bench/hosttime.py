"""Host time of an eager call: what Python and the launches cost while the GPU is never waited for.

Calls come in bursts on problems so small that the GPU keeps up. For gdn the parts of a call are timed the
same way, each by itself, and so is autograd: a function of as many tensors that does nothing, whose backward
PyTorch runs in a thread of the device. The first call of a form alone pays for its checks and the choice of a
backend; what is left over is how a form is found again. A decode is found again before its checks: its parts
are those of a call like one before.
"""

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import gdn
from gdn.backends import Backend, select
from gdn.bench.cases import Case, Inputs, packed
from gdn.bench.catalog import MIXED, VARIANTS, step
from gdn.bench.measure import Times, times
from gdn.ops.fastpath import key_of
from gdn.problem import parse
from gdn.problem.serving import parse_decode

CALLS, BURSTS = 10, 25
# everything inside the call, as a layer calls it; 16/32 heads
FULL = replace(MIXED, **VARIANTS["gated"], heads=(16, 32), lengths=packed(256))  # type: ignore[arg-type]
CASES: dict[str, tuple[str, Case]] = {  # name -> job, problem
    "decode": ("decode", step(8)),
    "forward": ("prefill", FULL),
    "forward+backward": ("train", FULL),
}


def burst(call: Callable[[], Any], device: torch.device) -> Times:
    """Seconds of host time per call, in bursts of calls that nobody waits for."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    call()
    found = []
    for _ in range(BURSTS):
        wait()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - start) / CALLS)
    wait()
    return times(found)


def parts(name: str, given: Inputs, backend: str | None) -> dict[str, float]:
    """Microseconds of each part of gdn's call; `launches` is how many there are."""
    device = given.tensors["q"].device
    if name == "decode":
        return _decode_parts(given, backend)
    check = rule_check(given, backend)
    problem = check()
    chosen = select(problem)
    # as later calls find it
    problem = replace(problem, layout_key=object())
    bodies: list[Callable[[], Any]] = [lambda: chosen.chunk_forward(problem, name == "forward+backward")]
    if name == "forward+backward":
        saved = chosen.chunk_forward(problem, True)[2]
        gradients = chosen.chunk_backward(problem, saved, given.do, given.dfinal_state)
        bodies.append(lambda: chosen.chunk_backward(problem, saved, given.do, given.dfinal_state))

    def body() -> None:
        for one in bodies:
            one()

    whole = burst(body, device).p50
    with recorded(chosen) as launches:
        planned = whole if launches is None else burst(body, device).p50
    seconds = {
        "check": burst(check, device).p50,
        "choose": burst(lambda: select(problem), device).p50,
        "plan and allocate": planned,
        "launch": whole - planned,
    }
    if name == "forward+backward":
        both = zip(problem.differentiable, gradients, strict=True)
        kept = [x for x in saved if x is not None]
        asked = [(x, dx) for x, dx in both if x is not None and dx is not None]
        seconds["autograd"] = burst(_autograd(asked, kept, given), device).p50
    found = {part: 1e6 * x for part, x in seconds.items()}
    if launches is not None:
        found["launches"] = len(launches) / (CALLS * BURSTS + 2)
    return found


def _decode_parts(given: Inputs, backend: str | None) -> dict[str, float]:
    """Of a decode like one before: it is found by all that its checks would look at, and launched."""
    device, problem = given.tensors["q"].device, decode_check(given, backend)()
    tensors, options = problem.tensors(), problem.options()
    chosen = select(problem)
    again = chosen.decode(problem)
    run = (lambda: chosen.decode(problem)) if again is None else (lambda: again(*tensors))
    seconds = {
        "find again": burst(lambda: key_of(("decode", backend), tensors, options), device).p50,
        "launch": burst(run, device).p50,
    }
    return {part: 1e6 * x for part, x in seconds.items()} | {"launches": 1.0}


class _Nothing(torch.autograd.Function):
    """Outputs and gradients that were there before."""

    @staticmethod
    def forward(
        ctx: Any, outputs: list[Tensor], gradients: list[Tensor], saved: list[Tensor], *inputs: Tensor
    ) -> Any:
        ctx.save_for_backward(*inputs, *saved)
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return tuple([x.detach() for x in outputs])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        _ = ctx.saved_tensors
        return (None, None, None, *ctx.gradients)


def _autograd(asked: list[tuple[Tensor, Tensor]], saved: list[Tensor], given: Inputs) -> Callable[[], Any]:
    """What PyTorch itself takes for a function with these inputs and gradients, and with this saved."""
    inputs = [x.detach().requires_grad_() for x, _ in asked]
    ends, gradients = [given.do, given.dfinal_state], [dx for _, dx in asked]
    return lambda: torch.autograd.grad(_Nothing.apply(ends, gradients, saved, *inputs), inputs, ends)


def rule_check(given: Inputs, backend: str | None) -> Callable[[], Any]:
    """What checks a call of the rule: returns its Problem."""
    arguments: dict[str, Any] = {**given.tensors, **given.options, "backend": backend}
    return lambda: parse(**arguments)


def decode_check(given: Inputs, backend: str | None) -> Callable[[], Any]:
    """What checks a decode of states in a pool: returns its DecodeProblem."""
    x, options = given.tensors, given.options
    call = inspect.signature(gdn.decode).bind(
        x["q"], x["k"], x["v"], x["pool"], a=x["g"], b=x["beta"], A_log=x["A_log"], dt_bias=x["dt_bias"],
        scale=options["scale"], use_qk_l2norm_in_kernel=options["use_qk_l2norm_in_kernel"],
        state_v_first=options["state_v_first"], read_index=x["read_index"], out=torch.empty_like(x["v"]),
        backend=backend,
    )  # fmt: skip
    call.apply_defaults()
    return lambda: parse_decode(**call.arguments)


class _Launches(list[Any]):
    """Without their tensors: if these were kept, every call would have to ask the device for new memory."""

    def append(self, step: tuple[Any, ...]) -> None:
        super().append(step[0])


@contextmanager
def recorded(backend: Backend) -> Iterator[list[Any] | None]:
    """Launches are noted down instead of made, their tensors let go; None for a backend that has none."""
    if backend.name == "eager":
        yield None
        return
    from gdn.backends.triton.launch import record_launches

    with record_launches(_Launches()) as launches:
        yield launches
