"""Time the collectives that an exchange consists of, by size, and the exchanges of states themselves.

`gdn.distributed.cost` predicts them from a latency and a bandwidth; both are fitted here. Each is timed
alone, so that a GPU waits for its launch, and 8 in a row, which are launched while the GPU is busy: the first
time is mostly the host's, the second one that of the GPUs and of the wire.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gdn.distributed import calls, collectives, cost
from gdn.distributed.plan import make_plan
from gdn.distributed.table import equal_runs
from gdn_bench.results.rows import Row
from gdn_bench.results.tables import format_bytes
from gdn_bench.timing.ranks import Rank

SIZES = tuple(2**n for n in (12, 15, 18, 20, 21, 22, 24, 26))  # bytes that a rank sends
HEADS = (16, 32, 64)  # value heads of the states that are exchanged
BURST = 8
AHEAD = 10e-3  # seconds in which 8 exchanges are launched


@dataclass(frozen=True)
class Links:
    """Choose what is timed.

    sizes    bytes that a rank sends in a collective
    heads    value heads of exchanged states
    size     K = V
    rounds   times of one call, and of 8 in a row
    """

    sizes: tuple[int, ...] = SIZES
    heads: tuple[int, ...] = HEADS
    size: int = 128
    rounds: tuple[int, int] = (15, 5)


def measure(rank: Rank, links: Links) -> Iterator[Row]:
    """Yield a row for each collective and size, with the link fitted to all sizes, then for each exchange."""
    machine, R = cost.Machine(), rank.num_ranks
    latency, bandwidth = machine.link(R)
    for name, (bind, predict) in COLLECTIVES.items():
        runs = {format_bytes(size): bind(rank, size) for size in links.sizes}
        timed = _times(rank, runs, links)
        # the model's time is a sum of both: steps x latency + bytes / bandwidth
        steps = predict(0, R, 1.0, 1.0)
        received = [predict(size, R, 0.0, 1.0) for size in links.sizes]
        fitted = fit([row["queued_ms"] / 1e3 for row in timed.values()], steps, received)
        for size, bytes_, (text, times) in zip(links.sizes, received, timed.items(), strict=True):
            yield {
                **_head(rank, f"{name} {text}"), **times, "bytes": bytes_,
                "queued_gb_per_s": bytes_ / times["queued_ms"] / 1e6, **fitted,
                **_predicted(predict(size, R, latency, bandwidth), times),
            }  # fmt: skip
    for HV in links.heads:
        form = cost.Form(max(HV // 2, 1), HV, links.size, links.size)
        for exchange in cost.FLAT:
            timed = _times(rank, exchange_runs(rank, exchange, form), links)
            told = cost.exchange_times(form, R, exchange, machine)
            for seconds, (way, times) in zip(told, timed.items(), strict=True):
                name = f"{exchange} of states {way}, {HV} heads"
                yield {**_head(rank, name), **times, **_predicted(seconds, times)}


def fit(seconds: list[float], steps: float, received: list[float]) -> Row:
    """Return the latency of a step and the bandwidth that fit the times best, by their relative errors."""
    rows = [[steps / t, size / t] for t, size in zip(seconds, received, strict=True)]
    x = torch.tensor(rows, dtype=torch.float64)
    scale = x.norm(dim=0)
    best = torch.linalg.lstsq(x / scale, torch.ones(len(rows), 1, dtype=torch.float64)).solution[:, 0] / scale
    latency, each = best.tolist()
    # times that do not grow with the size have no bandwidth
    return {"latency_us": 1e6 * latency, "link_gb_per_s": 1e-9 / each if each > 0 else None}


def exchange_runs(rank: Rank, exchange: str, form: cost.Form) -> dict[str, Callable[[], Any]]:
    """Return functions that exchange the states of one sequence over all ranks, forward and backward."""
    plan = make_plan(equal_runs("contiguous", 64 * rank.num_ranks, rank.num_ranks), None, 1, rank.number)
    made = calls.make_exchange(exchange, plan, calls.Groups(rank.group))
    assert made is not None
    transfers = torch.randn(1, 1, form.HV, form.K, form.K + form.V, device=rank.device)
    _, maps = made.finish_states(made.start_states(transfers), form.K)
    gradients = transfers[..., : form.V].contiguous()
    return {
        "forward": lambda: made.finish_states(made.start_states(transfers), form.K),
        "backward": lambda: made.finish_gradients(made.start_gradients(gradients), maps),
    }


def _all_gather(rank: Rank, size: int) -> Callable[[], Any]:
    x = torch.randn(size // 4, device=rank.device)
    return lambda: collectives.start_all_gather(x, rank.group).wait()


def _all_to_all(rank: Rank, size: int) -> Callable[[], Any]:
    R = rank.num_ranks
    x = torch.randn(R, max(size // 4 // R, 1), device=rank.device)
    return lambda: collectives.all_to_all(x, [1] * R, [1] * R, rank.group)


COLLECTIVES = {
    "all_gather": (_all_gather, cost.all_gather_time),
    "all_to_all": (_all_to_all, cost.all_to_all_time),
}


def _times(rank: Rank, runs: Mapping[str, Callable[[], Any]], links: Links) -> dict[str, Row]:
    """Return the fields of the times of each run: alone, and in a row."""
    alone = rank.time_in_turn(runs, links.rounds[0])
    queued = rank.time_in_turn(runs, links.rounds[1], BURST, AHEAD)
    return {
        name: {
            "ms": 1e3 * t.p50, "p20": 1e3 * t.p20, "p80": 1e3 * t.p80, "runs": t.runs,
            "queued_ms": 1e3 * queued[name].p50,
        }
        for name, t in alone.items()
    }  # fmt: skip


def _head(rank: Rank, what: str) -> Row:
    provider = "nccl" if rank.device.type == "cuda" else "gloo"
    return {
        "pass": "links", "case": f"{what}, {rank.num_ranks} ranks", "provider": provider, "backend": None,
        "dtype": "float32", "num_ranks": rank.num_ranks, "ratio": {},
    }  # fmt: skip


def _predicted(seconds: float, times: Row) -> Row:
    return {"predicted_ms": 1e3 * seconds, "predicted": 1e3 * seconds / times["queued_ms"]}
