"""Time one long sequence on several ranks beside one GPU in the same processes: training and forward.

Outputs and gradients of the ranks are compared first with those of one process on all tokens. Strong scaling
is the time of one GPU with all tokens over that of the ranks. Weak scaling is the time of the ranks over that
of one GPU with the tokens of one rank. Each call is timed alone, so that GPUs wait for its launches, 8 in a
row, as in the layers of a model, and as a CUDA graph, which no host launches. All GPUs compute the rows of
one GPU at once, as clocks fall with work.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import gdn
from gdn.distributed import cost
from gdn.distributed.explain import local_work, work_on
from gdn.distributed.simulate import simulate
from gdn.testing.accuracy import error_limits
from gdn.testing.cases import Case, Lengths
from gdn.testing.tensors import Inputs, inputs
from gdn_bench.problems.catalog import MIXED
from gdn_bench.results import rows
from gdn_bench.results.rows import Row
from gdn_bench.timing.measure import Times
from gdn_bench.timing.ranks import Rank

ONE = "one GPU"
EXCHANGES = ("gather", "owner", "heads")
NODES = "nodes"  # on an even number of ranks from 4 on: pairs of ranks take the place of nodes
JOBS = ("train", "forward")
ARGUMENTS = ("q", "k", "v", "g", "beta")
OUTPUTS = ("o", "dq", "dk", "dv", "dg", "dbeta")
BURST = 8
TIMED = ("", "queued_", "graph_")  # what the fields of a row begin with: one call, 8 in a row, a CUDA graph

Run = Callable[[], tuple[torch.Tensor, ...]]
Calls = dict[str, Run]  # job -> the function that runs it


@dataclass(frozen=True)
class Scaling:
    """Choose the sizes.

    heads      H, HV
    size       K = V
    tokens     of the sequence in strong scaling
    local      tokens a rank in weak scaling
    gate       a distribution of `gdn.testing.Case`: heads that keep their state over many tokens cost more
    dtype      of q, k, v
    exchanges  names of `gdn.ContextParallel`: those of EXCHANGES, and NODES
    providers  gdn, and fla for its context parallelism
    rounds     times of one call or graph, and of 8 in a row
    """

    heads: tuple[int, int] = (16, 32)
    size: int = 128
    tokens: int = 131072
    local: int = 65536
    gate: str = "mixed"
    dtype: str = "bfloat16"
    exchanges: tuple[str, ...] = EXCHANGES
    providers: tuple[str, ...] = ("gdn",)
    rounds: tuple[int, int] = (11, 5)

    def case(self, num_tokens: int) -> Case:
        """Return the problem of so many tokens."""
        return replace(
            MIXED, gate=self.gate, heads=self.heads, sizes=(self.size, self.size), state="none",
            lengths=Lengths(num_tokens), use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    def draw(self, rank: Rank, num_tokens: int, seed: int) -> Inputs:
        """Return tensors of so many tokens on a rank's device."""
        dtype = getattr(torch, self.dtype)
        return inputs(self.case(num_tokens), dtype, seed=seed, device=rank.device, is_drawn_there=True)


@dataclass(frozen=True)
class Judged:
    """Hold what every provider and exchange is compared with: computed once, by one process for all tokens.

    given     the tokens of this rank
    expected  its part of outputs and gradients
    """

    given: Inputs
    expected: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Way:
    """Name a row: who computes it, how ranks exchange states (or ONE), tokens of the whole sequence."""

    provider: str
    exchange: str
    tokens: int


def measure(rank: Rank, scaling: Scaling) -> Iterator[Row]:
    """Yield a row for each job, provider, exchange and size, rows of one GPU first."""
    R = rank.num_ranks
    totals = dict.fromkeys((scaling.tokens, R * scaling.local))
    alone = dict.fromkeys((scaling.tokens, scaling.tokens // R, scaling.local))
    verdicts: dict[tuple[str, str, str], Row] = {}
    ways: dict[Way, Calls] = {}
    judged_by = expect(rank, scaling)
    # the ranks compute on tensors that one GPU computes on as well: those of totals // R tokens
    drawn = {tokens: scaling.draw(rank, tokens, rank.number) for tokens in alone}
    for tokens, given in drawn.items():
        ways[Way("gdn", ONE, tokens)] = gdn_calls(given, {})
    for provider, exchange in _kinds(scaling):
        judged = judge(rank, scaling, judged_by, provider, exchange)
        verdicts |= {(job, provider, exchange): verdict for job, verdict in judged.items()}
        right = [job for job, verdict in judged.items() if verdict.get("ok")]
        way = Way(provider, exchange, scaling.tokens)
        for job in (job for job in JOBS if job not in right):
            yield {**_head(rank, scaling, job, way), **judged[job], "ratio": {}}
        for total in totals if right else ():
            calls = bind(rank, drawn[total // R], provider, exchange, total)
            ways[Way(provider, exchange, total)] = {job: calls[job] for job in right}
    for job in JOBS:
        runs = {way: calls[job] for way, calls in ways.items() if job in calls}
        one_call = rank.time_in_turn(runs, scaling.rounds[0])
        queued = rank.time_in_turn(runs, scaling.rounds[1], BURST)
        graphs = time_graphs(rank, runs, scaling.rounds[0])
        measured: dict[Way, Row] = {}
        for way, run in runs.items():
            one = one_call[way]
            measured[way] = {
                **_head(rank, scaling, job, way), "ms": 1e3 * one.p50, "p20": 1e3 * one.p20,
                "p80": 1e3 * one.p80, "runs": one.runs, "queued_ms": 1e3 * queued[way].p50,
                **({"graph_ms": 1e3 * graphs[way].p50} if way in graphs else {}),
                **verdicts.get((job, way.provider, way.exchange), {}), "ratio": {},
            }  # fmt: skip
            if (peak := rank.peak_mb(run)) is not None:
                measured[way]["peak_mb"] = peak
        for way, row in measured.items():
            _add_scaling(row, way, measured, R)
            if way.provider == "gdn":
                row |= predict(scaling, way, job, rank, row)
        for total in totals:
            # FLA has one exchange, of the bytes of `gather`
            rows.add_ratios(
                {w.provider: x for w, x in measured.items() if (w.exchange, w.tokens) == ("gather", total)}
            )
        yield from measured.values()


def time_graphs(rank: Rank, runs: dict[Way, Run], rounds: int) -> dict[Way, Times]:
    """Return the times of gdn's calls as CUDA graphs; none on a CPU. FLA's exchange promises no graphs."""
    if rank.device.type != "cuda":
        return {}
    graphs = {way: rank.record(run) for way, run in runs.items() if way.provider == "gdn"}
    return rank.time_in_turn({way: graph.replay for way, graph in graphs.items()}, rounds)


def expect(rank: Rank, scaling: Scaling) -> Judged:
    """Return a rank's tokens of one sequence, with the outputs and gradients of one process there.

    The tensors of all tokens are freed: the parts of this rank are copies.
    """
    given = scaling.draw(rank, scaling.tokens, 0)
    context = gdn.ContextParallel(rank.group)
    own = {name: context.shard(x, 1) for name, x in given.tensors.items()}
    expected = gdn_calls(given, {})["train"]()
    local = replace(given, tensors=own, do=context.shard(given.do, 1))
    return Judged(local, tuple(context.shard(x, 1) for x in expected))


def judge(rank: Rank, scaling: Scaling, judged: Judged, provider: str, exchange: str) -> dict[str, Row]:
    """Return the verdict on each job of all ranks beside one process with all tokens.

    A training step is judged by outputs and gradients, a forward by its output: a provider may refuse one of
    them on a GPU. The limits are those of one library against the reference. A peer is allowed twice as much:
    it is compared with gdn's result in `dtype`, and both may be off by a limit.
    """
    allowed = 1.0 if provider == "gdn" else 2.0
    limits = error_limits(getattr(torch, scaling.dtype), "random")
    verdicts: dict[str, Row] = {}
    for job in JOBS:
        try:
            outputs = bind(rank, judged.given, provider, exchange, scaling.tokens)[job]()
        except (ImportError, ValueError, RuntimeError) as error:
            verdicts[job] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            continue
        pairs = zip(outputs, judged.expected[: len(outputs)], strict=True)
        distances = rank.largest([_distance(x, y) for x, y in pairs])
        errors = dict(zip(OUTPUTS, distances, strict=False))
        share = max(error / (allowed * limits[name]) for name, error in errors.items())
        verdicts[job] = {
            "ok": share <= 1, "error": max(distances), "errors": errors, "share_of_limit": share,
        }  # fmt: skip
    return verdicts


def bind(rank: Rank, given: Inputs, provider: str, exchange: str, tokens: int) -> Calls:
    """Return the jobs of a rank on its own tokens of a sequence."""
    if provider == "fla":
        return fla_calls(rank, given, tokens)
    mesh = rank.pairs if exchange == NODES else rank.group
    context = gdn.ContextParallel(mesh, exchange=exchange)
    return gdn_calls(given, {"cp_context": context})


def gdn_calls(given: Inputs, more: dict[str, Any]) -> Calls:
    """Return the jobs of gdn."""
    return _calls(given, lambda *x: gdn.chunk_gated_delta_rule(*x, use_qk_l2norm_in_kernel=True, **more)[0])


def fla_calls(rank: Rank, given: Inputs, tokens: int) -> Calls:
    """Return the jobs of FLA's context parallelism."""
    from fla.ops.cp import build_cp_context  # type: ignore[import-not-found]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    offsets = torch.tensor([0, tokens], dtype=torch.int32, device=rank.device)
    context = build_cp_context(offsets, group=rank.group)
    options = {
        "use_qk_l2norm_in_kernel": True, "cu_seqlens": context.cu_seqlens, "cp_context": context,
    }  # fmt: skip
    return _calls(given, lambda *x: chunk_gated_delta_rule(*x, **options)[0])


def _calls(given: Inputs, rule: Callable[..., torch.Tensor]) -> Calls:
    x = [given.tensors[name] for name in ARGUMENTS]
    leaves = [t.detach().requires_grad_() for t in x]

    def train() -> tuple[torch.Tensor, ...]:
        o = rule(*leaves)
        return (o.detach(), *torch.autograd.grad(o, leaves, given.do))

    def forward() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (rule(*x),)

    return {"train": train, "forward": forward}


def predict(scaling: Scaling, way: Way, job: str, rank: Rank, row: Row) -> Row:
    """Return the cost model's times of one call and in a row, and their shares of the measured ones.

    No fields where the model of local work does not hold: other sizes than K = V = 128, or fp32. The GPUs of
    one host have the link within a node among all of them, also where pairs of ranks are the nodes of NODES.
    """
    width = getattr(torch, scaling.dtype).itemsize
    form = cost.Form(*scaling.heads, scaling.size, scaling.size, way.tokens, width)
    R, device = 1 if way.exchange == ONE else rank.num_ranks, rank.device
    if local_work(form, way.tokens // R, device) is None:
        return {}
    fields: Row = {}
    for name, machine in (("", cost.ONE_CALL), ("queued_", cost.Machine())):
        if way.exchange == NODES:
            link = {"latency_between": machine.latency, "bandwidth_between": machine.bandwidth}
            machine = replace(machine, node=2, **link)
        timeline = simulate(
            form, [way.tokens // R] * R, machine, work_on(device), exchange=None if R == 1 else way.exchange,
            has_backward=job == "train",
        )  # fmt: skip
        fields[f"{name}predicted_ms"] = 1e3 * timeline.end
        fields[f"{name}predicted"] = 1e3 * timeline.end / row[f"{name}ms"]
    return fields


def _add_scaling(row: Row, way: Way, measured: dict[Way, Row], num_ranks: int) -> None:
    """Add strong and weak scaling to a row of several ranks, where one GPU was timed at that size."""
    if way.exchange == ONE:
        return
    for name in (name for name in TIMED if f"{name}ms" in row):
        if one := measured.get(Way("gdn", ONE, way.tokens)):
            row[f"{name}speedup"] = one[f"{name}ms"] / row[f"{name}ms"]
        if one := measured.get(Way("gdn", ONE, way.tokens // num_ranks)):
            row[f"{name}weak"] = row[f"{name}ms"] / one[f"{name}ms"]


def _kinds(scaling: Scaling) -> Iterator[tuple[str, str]]:
    for provider in scaling.providers:
        if provider == "gdn":
            yield from ((provider, exchange) for exchange in scaling.exchanges)
        else:
            yield provider, "gather"


def _head(rank: Rank, scaling: Scaling, job: str, way: Way) -> Row:
    """Return the fields that describe a row."""
    (H, HV), R = scaling.heads, 1 if way.exchange == ONE else rank.num_ranks
    how = ONE if R == 1 else f"{R} ranks, {way.exchange}"
    label = "ranks" if scaling.gate == MIXED.gate else f"ranks:{scaling.gate}"
    return {
        "pass": label, "case": f"{H}/{HV} 1x{way.tokens} {job}, {how}", "provider": way.provider,
        "backend": None,
        "H": H, "HV": HV, "K": scaling.size, "V": scaling.size, "N": 1, "T": way.tokens,
        "gate": scaling.gate, "dtype": scaling.dtype, "num_ranks": R,
        "exchange": None if R == 1 else way.exchange,
    }  # fmt: skip


def _distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return norm(x - y) / norm(y)."""
    y = y.double()
    return float((x.double() - y).norm() / y.norm().clamp(min=1e-30))
