"""Simulate one training step of the rule on 2 to 512 ranks: who works when, and who waits. Plain Python.

    begin -> exchange -> finish        forward, then backward; `gdn.distributed.cost` has the exchange

An exchange begins when the last rank has come to it, and ends for all at once: nothing hides it. So the step
is the sum over its four halves of the slowest rank's time, and of both exchanges. The times of local work are
a model of `hopper` on an H200, and H100 those of one, from measurements on one GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gdn.distributed.cost import Form, Machine, choose, exchange_times

HALVES = ("begin forward", "finish forward", "begin backward", "finish backward")
HEADS = 32  # value heads for which `Work` is given


@dataclass(frozen=True)
class Work:
    """Hold the seconds a token of the local work at 32 value heads, K = V = 128 in bf16.

    solve       gates and A_inv
    transfer    M and N of the segments
    scan        the state scan with outputs
    reverse     one reverse state scan of all segments
    gradients   dq, dk and the gradients of the gates
    """

    solve: float = 3.3e-9
    transfer: float = 6e-9
    scan: float = 7e-9
    reverse: float = 16e-9
    gradients: float = 45e-9

    def halves(self, form: Form, num_tokens: int) -> tuple[float, ...]:
        """Return the seconds of HALVES for the tokens of one rank."""
        one = num_tokens * form.HV / HEADS
        forward = (self.solve + self.transfer) * one, self.scan * one
        return (*forward, self.reverse * one, (self.reverse + self.gradients) * one)


H100 = Work(solve=4.8e-9, transfer=8.7e-9, scan=10e-9, reverse=17e-9, gradients=46e-9)


class Event(NamedTuple):
    """Hold what one rank does from `start` to `stop`, in seconds since the step began."""

    rank: int
    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """Hold the events of a step, rank by rank within each half."""

    events: tuple[Event, ...]

    @property
    def end(self) -> float:
        """Return the seconds of the step: the slowest rank's."""
        return max(event.stop for event in self.events)

    def busy(self, rank: int) -> float:
        """Return the share of the step in which a rank computes."""
        mine = (e.stop - e.start for e in self.events if e.rank == rank and e.name in HALVES)
        return sum(mine) / self.end


def simulate(
    form: Form,
    num_local: Sequence[int],
    machine: Machine | None = None,
    work: Work | None = None,
    delays: Sequence[float] | None = None,
    exchange: str | None = None,
    has_backward: bool = True,
) -> Timeline:
    """Simulate a training step, or a forward alone.

    num_local: the tokens of each rank; delays: seconds by which each rank starts late, none by default;
    exchange: its name, that of the least time by default. `cost.ONE_CALL` is the machine of a call for whose
    launches the GPUs wait.
    """
    machine, work = machine or Machine(), work or Work()
    R = len(num_local)
    times = exchange_times(form, R, exchange or choose(form, R, machine), machine)
    # the backward begins where the forward ends, without an exchange between
    waits = (times.forward, 0.0, times.backward, 0.0)
    clocks = list(delays or [0.0] * R)
    events = []
    local = [work.halves(form, tokens) for tokens in num_local]
    for half, (name, wait) in enumerate(zip(HALVES, waits, strict=True)):
        if half == 2 and not has_backward:
            break
        for rank in range(R):
            start, clocks[rank] = clocks[rank], clocks[rank] + local[rank][half]
            events.append(Event(rank, name, start, clocks[rank]))
        if wait:
            begin = max(clocks)
            clocks = [begin + wait] * R
            events += [Event(rank, "exchange", begin, begin + wait) for rank in range(R)]
    return Timeline(tuple(events))
