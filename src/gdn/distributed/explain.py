"""Say what the exchange of a call costs beside the local work of a rank, by models of both."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gdn.distributed import calls, cost, heads
from gdn.distributed.cost import Form, Machine, Times
from gdn.distributed.simulate import H100, Work
from gdn.problem import Problem

if TYPE_CHECKING:
    from gdn.distributed.context import ContextParallel


@dataclass(frozen=True)
class ExchangeReport:
    """Hold the model of an exchange; print it.

    exchange   the one that the call gets; None: no sequence crosses a border
    times      seconds of each exchange that the mesh and the heads allow, forward and backward
    received   bytes that a rank receives in the chosen one, forward and backward
    local      seconds of the slowest rank's local work; None: there is a model of `hopper`'s alone, in 16
               bits with K = V = 128
    """

    exchange: str | None
    num_ranks: int
    times: Mapping[str, Times]
    received: Times
    local: Times | None

    @property
    def share(self) -> float | None:
        """Return the exchange's time over that of the local work of a training step."""
        if self.local is None or self.exchange is None:
            return None
        return self.times[self.exchange].total / self.local.total

    def __str__(self) -> str:
        if self.exchange is None:
            return f"   exchange none: no sequence crosses a border of the {self.num_ranks} ranks"
        forward, backward = (x / 2**20 for x in self.received)
        costs = f"{_pair(self.times[self.exchange])} forward and backward"
        rows = [
            f"   exchange {self.exchange} of {self.num_ranks} ranks: {costs}; "
            f"each receives {forward:.1f}, {backward:.1f} MiB"
        ]
        if self.local is not None:
            rows.append(f"   local    {_pair(self.local)}; a training step exchanges {self.share:.1%} of it")
        others = [f"{name} {_pair(x)}" for name, x in self.times.items() if name != self.exchange]
        assumed = "(a model: links between nodes and local work are assumed)"
        rows.append(f"   others   {'; '.join(others)} {assumed}")
        return "\n".join(rows)


def explain(context: "ContextParallel", arguments: Mapping[str, Any]) -> tuple[Problem, ExchangeReport]:
    """Return the problem of this rank and the model of its exchange, without communication."""
    problem, plan, _ = calls.local_problem(context, arguments, None)
    R, slots, machine = context.world_size, context._num_slots, calls.machine_of(context)
    form = calls.form_of(problem, plan.table.num_tokens * plan.batch)
    chosen = context.exchange or calls.choose(context, form, slots)
    if chosen == "heads":
        heads.check_heads(form.H, R)
    names = [*calls.exchanges_of(context), *(("heads",) if form.H >= R else ())]
    times = {name: cost.exchange_times(form, R, name, machine, slots) for name in names}
    is_crossed = plan.has_exchange or chosen == "heads"
    return problem, ExchangeReport(
        chosen if is_crossed and R > 1 else None,
        R,
        times,
        received(form, R, chosen, machine, slots),
        local_work(form, max(plan.table.num_local) * plan.batch, problem.q.device),
    )


def received(form: Form, R: int, exchange: str, machine: Machine, num_runs: int) -> Times:
    """Return the bytes that a rank receives, forward and backward."""
    P, s, other = form.sent(R * num_runs) * num_runs, form.state * num_runs, (R - 1) / R
    if exchange == "gather":
        return Times((R - 1) * P, (R - 1) * s)
    if exchange == "owner":
        return Times(other * (P + s), other * 2 * s)
    if exchange == "nodes":
        g, nodes = machine.node, R // machine.node
        part = (g - 1) / g + (nodes - 1) / nodes / g
        return Times(part * (P + s), part * 2 * s)
    return Times(*[cost.heads_bytes(form, R)] * 2)


def work_on(device: torch.device) -> Work:
    """Return the model of local work on a device: an H100's, or else an H200's."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return H100 if "H100" in name else Work()


def local_work(form: Form, num_tokens: int, device: torch.device) -> Times | None:
    """Return the seconds of forward and backward of so many tokens, or None where there is no model."""
    if (form.K, form.V, form.width) != (128, 128, 2):
        return None
    *forward, begin, finish = work_on(device).halves(form, num_tokens)
    return Times(sum(forward), begin + finish)


def _pair(times: Times) -> str:
    return f"{1e6 * times.forward:.0f}, {1e6 * times.backward:.0f} us"
