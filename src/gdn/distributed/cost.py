"""Predict what an exchange costs, and choose one. Plain Python; links between nodes are assumed.

    step        latency of a collective's step: log2 R steps of an all-gather, 1 + log2(R)/2 of an all-to-all
    wire        bytes that a rank receives, over the bandwidth of its link
    fold        one product of a map and a state, J - 1 of them; in two levels above 32 runs
    memory      bytes that `heads` copies in HBM to pack what it sends and to join what it receives
    host        host time of an exchange that the GPU waits for: `Machine.host`

    exchange   bytes received, forward / backward     kept for the backward
    gather     (R-1) P / (R-1) s                      M of runs that pass a state on, all heads
    owner      (R-1)/R (P + s) / (R-1)/R 2 s          the same for the heads of this rank
    scan       log2(R) P / log2(R) P                  not built: as good as owner to 8 ranks, worse above
    relay      s / s, R-1 times one after another     not built: serial
    nodes      owner in a node, owner between nodes   M of its runs and of the groups, of a part of the heads
    heads      (R-1)/R of all tokens and outputs      nothing

P = 4 HV K (K + V) bytes is a run's transfer, s = 4 HV K V bytes a state (8 in place of 4 for fp64). Of two
runs none passes a state on: N travels without M, s bytes in the place of P.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Machine:
    """Hold the links of a machine. latency: seconds a step; bandwidth: bytes/s a rank; node: ranks in a node.

    host: seconds an exchange for which the GPU waits for the host; none by default, where launches are queued
    behind other work, as in the layers of a model. It holds for one or two collectives: the second is
    launched while the first waits for the other ranks. The link within a node is that of two H100s on NVLink,
    fitted to collectives of 4 KiB to 64 MiB; 8 GPUs a node and InfiniBand between nodes are assumptions.
    memory: bytes/s that a copy reads and writes in HBM, measured on an H200.
    """

    latency: float = 9.5e-6  # docs/lab/2026-11-27-two-gpus-ring-and-links.md
    bandwidth: float = 204e9
    node: int = 8
    latency_between: float = 15e-6
    bandwidth_between: float = 50e9
    fold: float = 2.5e-6
    memory: float = 4.25e12  # docs/lab/2026-11-24-hopper-limits.md
    host: float = 0.0

    def link(self, num_ranks: int) -> tuple[float, float]:
        """Return latency and bandwidth among so many ranks: the slower link as soon as they leave a node."""
        if num_ranks <= self.node:
            return self.latency, self.bandwidth
        return self.latency_between, self.bandwidth_between


# one call at a time, on two H100s: `host` is fitted to what whole calls take longer than their local work
ONE_CALL = Machine(host=370e-6)


class Form(NamedTuple):
    """Hold the sizes of a call: heads, dims, global tokens, bytes of an element of q and of a state."""

    H: int
    HV: int
    K: int = 128
    V: int = 128
    num_tokens: int = 0
    width: int = 2
    state_width: int = 4

    @property
    def transfer(self) -> int:
        """Return P, the bytes of N | M of one run."""
        return self.HV * self.K * (self.K + self.V) * self.state_width

    @property
    def state(self) -> int:
        """Return s, the bytes of one state."""
        return self.HV * self.K * self.V * self.state_width

    def sent(self, num_runs: int) -> int:
        """Return the bytes that each of all runs sends in the forward: N | M, of two runs N alone."""
        return self.state if num_runs == 2 else self.transfer

    @property
    def token(self) -> int:
        """Return the bytes of one token of q, k, v, g, beta and o."""
        return (2 * self.H * self.K + 2 * self.HV * self.V) * self.width + 2 * self.HV * 4


class Times(NamedTuple):
    """Hold seconds of an exchange that nothing hides, forward and backward."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Return the seconds of a training step's exchanges."""
        return self.forward + self.backward


FLAT = ("gather", "owner")  # the exchanges of states on any ranks
BUILT = (*FLAT, "nodes")  # those on a mesh of two dimensions
NAMES = (*FLAT, "scan", "relay", "nodes", "heads")


def exchange_times(form: Form, num_ranks: int, exchange: str, machine: Machine, num_runs: int = 1) -> Times:
    """Return what an exchange costs. num_runs: the largest number of runs that a rank has."""
    if num_ranks == 1:
        return Times(0.0, 0.0)
    if exchange not in NAMES:
        raise ValueError(f"exchange: expected one of {', '.join(NAMES)}, got {exchange!r}")
    times = _wire_and_folds(form, num_ranks, exchange, machine, num_runs)
    return Times(*(machine.host + x for x in times))


def _wire_and_folds(form: Form, num_ranks: int, exchange: str, machine: Machine, num_runs: int) -> Times:
    """Return what an exchange costs on the GPUs and between them."""
    R = num_ranks
    J = R * num_runs
    P, s = form.sent(J) * num_runs, form.state * num_runs
    latency, bandwidth = machine.link(R)
    folds = machine.fold * num_folds(J)
    if exchange == "gather":
        # every rank folds all heads, one run after another
        chain = machine.fold * (J - 1)
        return Times(*(all_gather_time(x, R, latency, bandwidth) + chain for x in (P, s)))
    if exchange == "nodes" and 1 < machine.node <= R // 2:
        return Times(*(_nodes_time(x, s, R, machine, num_runs) for x in (P, s)))
    if exchange in ("owner", "nodes"):
        # with one rank a node, or one node, `nodes` is `owner`
        out, back = (all_to_all_time(x, R, latency, bandwidth) for x in (P, s))
        return Times(out + back + folds, 2 * back + folds)
    if exchange == "scan":
        steps = math.ceil(math.log2(R))
        return Times(*[steps * (latency + P / bandwidth + 2 * machine.fold)] * 2)
    if exchange == "relay":
        return Times(*[(R - 1) * (latency + s / bandwidth + machine.fold)] * 2)
    if exchange == "heads":
        copies = heads_copied(form, R, 1 if num_runs == 1 else 2) / machine.memory
        return Times(*[heads_bytes(form, R) / bandwidth + copies + 2 * latency] * 2)
    raise AssertionError(exchange)


def heads_bytes(form: Form, num_ranks: int) -> float:
    """Return the bytes that a rank receives in the exchange of heads, forward or backward."""
    return form.num_tokens / num_ranks * form.token * (num_ranks - 1) / num_ranks


def heads_copied(form: Form, num_ranks: int, num_passes: int = 1) -> float:
    """Return the bytes that a rank's copies read and write in the exchange of heads, forward or backward.

    num_passes: passes over each tensor: q, k, v, g, beta and do are packed, o and the gradients are joined.
    A second pass puts tokens in order: where a rank has several runs, and for B > 1, which `exchange_times`
    does not know. It adds the time of all passes to the wire's, though one tensor is packed while another is
    on its way.
    """
    return 2 * num_passes * form.num_tokens / num_ranks * form.token


@functools.lru_cache(maxsize=256)
def choose(
    form: Form, num_ranks: int, machine: Machine | None = None, num_runs: int = 1,
    names: tuple[str, ...] = FLAT,
) -> str:  # fmt: skip
    """Return the exchange of states with the least time of forward and backward, of those that are named."""
    machine = Machine() if machine is None else machine
    return min(names, key=lambda name: exchange_times(form, num_ranks, name, machine, num_runs).total)


def num_folds(num_runs: int) -> int:
    """Return how many products are computed one after another: in groups of sqrt(J) above 32 runs."""
    return num_runs - 1 if num_runs <= 32 else 2 * math.ceil(math.sqrt(num_runs))


def all_gather_time(size: float, R: int, latency: float, bandwidth: float) -> float:
    """Return seconds of an all-gather of `size` bytes a rank."""
    return latency * math.ceil(math.log2(R)) + size * (R - 1) / bandwidth


def all_to_all_time(size: float, R: int, latency: float, bandwidth: float) -> float:
    """Return seconds of an all-to-all of `size` bytes a rank."""
    return latency * (1 + math.log2(R) / 2) + size * (R - 1) / R / bandwidth


def _nodes_time(sent: float, s: float, R: int, machine: Machine, num_runs: int) -> float:
    """Return seconds of `owner` in a node, between nodes on a part of the heads, and back.

    sent: the bytes that a rank sends first, P forward and s backward; s: those that come back.
    """
    g = machine.node
    nodes = R // g
    near, far = (machine.latency, machine.bandwidth), (machine.latency_between, machine.bandwidth_between)
    folds = machine.fold * (2 * (g * num_runs - 1) + num_folds(nodes * num_runs))
    inside = all_to_all_time(sent, g, *near) + all_to_all_time(s, g, *near)
    between = all_to_all_time(sent / g, nodes, *far) + all_to_all_time(s / g, nodes, *far)
    return inside + between + folds
