"""Time the six stages of a chunked forward, their sum and the whole, gdn's and FLA's, on PTO's shapes.

The inputs of a stage are the outputs of its provider's stage before, in the dtypes that this provider passes
on; their conversion is not timed. The whole is one call of the public function, which need not consist of
these stages.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gdn.reference import stages as reference
from gdn.testing import accuracy
from gdn.testing.memory import poison_memory
from gdn.testing.tensors import Inputs
from gdn_bench.passes.gpu import JUDGED_HEADS, Session, noted
from gdn_bench.problems import catalog, jobs
from gdn_bench.problems.workloads import CHUNK, Cost, Workload, choose_workloads
from gdn_bench.results import rows
from gdn_bench.results.rows import Row
from gdn_bench.timing import graph, measure

# stage -> names of its inputs and outputs, as `gdn.stages` has them
TABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cumsum": (("g",), ("G",)),
    "kkt": (("k", "beta", "G"), ("A",)),
    "solve": (("A",), ("A_inv",)),
    "wy": (("k", "v", "beta", "G", "A_inv"), ("w", "u")),
    "state": (("k", "w", "u", "G", "initial_state"), ("S_in", "v_new", "final_state")),
    "output": (("q", "k", "v_new", "G", "S_in"), ("o",)),
}
REFERENCE: dict[str, Callable[..., Any]] = {
    "cumsum": reference.chunk_cumsum,
    "kkt": reference.chunk_kkt,
    "solve": reference.solve_tril,
    "wy": reference.wy_transform,
    "state": reference.chunk_state,
    "output": reference.chunk_output,
}
INSIDE = "kernels of one captured call; Python, allocation and the hand-over between stages are outside"
WHOLE = "kernels of one chunk_gated_delta_rule, solve included; g given, keys normalised, states in and out"
JUDGED_TOKENS = 512  # of each sequence, stage by stage; the whole is compared to its last token
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Chain:
    """Hold one provider's stages.

    run: stage -> function of TABLE's inputs that returns TABLE's outputs as a tuple
    hand_on: (name, tensor) -> the tensor as the next stage reads it
    plain: (name, tensor) -> the tensor as `gdn.stages` returns it, for the comparison
    whole: the public function on the same problem: (o, final state)
    """

    provider: str
    run: Mapping[str, Callable[..., tuple[Tensor, ...]]]
    whole: Callable[[Inputs], Callable[[], Any]]
    hand_on: Callable[[str, Tensor], Tensor] = lambda name, x: x
    plain: Callable[[str, Tensor], Tensor] = lambda name, x: x


@dataclass
class Course:
    """Hold the tensors that a chain has computed so far, and the seconds of its stages."""

    chain: Chain
    values: Values
    seconds: dict[str, float] = field(default_factory=dict)
    is_right: bool = True
    share_of_limit: float = 0.0


def run(session: Session, chains: Mapping[str, Chain]) -> Iterator[Row]:
    """Yield the rows of all problems: six stages, their sum and the whole for each chain."""
    session.ceilings = session.ceilings or graph.ceilings(session.device)
    for workload in choose_workloads("prefill", session.problems or catalog.PTO_GVA):
        if not session.wants(workload.name) or all(
            session.has("stages", name, f"{workload.name} whole") for name in chains
        ):
            continue
        if session.is_over:
            yield {"pass": "stages", "case": workload.name, "provider": "all", "skipped": "out of time"}
            continue
        yield from ({"pass": "stages", **row} for row in measured(session, workload, chains))
        graph.release()


def measured(session: Session, workload: Workload, chains: Mapping[str, Chain]) -> Iterator[Row]:
    """Yield the rows of one problem. A wrong stage has no time, nor has a stage that reads its outputs."""
    given = jobs.given(workload.case, session.device)
    courses = {name: Course(chain, dict(given.tensors)) for name, chain in chains.items()}
    heads = {name: _head(workload, chain, given) for name, chain in chains.items()}
    verdicts = {name: compare_stages(chain, given) for name, chain in chains.items()}
    for stage, (_, made) in TABLE.items():
        about = {"case": f"{workload.name} {stage}", "inside": INSIDE}
        by_name = {name: {**heads[name], **about} for name in chains}
        prepared: dict[str, graph.Prepared] = {}
        for name, course in courses.items():
            row = by_name[name]
            row |= verdicts[name].get(stage, {"ok": False, "failed": "a stage before it did"})
            course.is_right &= bool(row["ok"])
            course.share_of_limit = max(course.share_of_limit, row.get("share_of_limit", 0.0))
            if course.is_right:
                with noted(row):
                    prepared[name] = graph.prepare([_call(course, stage, given)], session.device)
            course.is_right &= name in prepared
        _time(session, stage_cost(stage, workload), prepared, courses, by_name, stage)
        yield from by_name.values()
        for course in courses.values():
            if course.is_right:
                _advance(course, stage, made, given)
        prepared.clear()
        graph.release()
    yield from _sums(session, workload, courses, heads)
    courses.clear()
    yield from _whole(session, workload, given, chains, heads)


def compare_stages(chain: Chain, given: Inputs) -> dict[str, Row]:
    """Compare each stage with the fp64 reference on the inputs that this chain gave it; return verdicts.

    Only the first JUDGED_TOKENS of every sequence are computed.
    """
    small = given.prefix(JUDGED_TOKENS)
    limit = accuracy.error_limits(small.tensors["q"].dtype, "random")["o"]
    H = small.tensors["q"].shape[2]
    index = sorted({0, H - 1})[:JUDGED_HEADS]
    course, verdicts = Course(chain, dict(small.tensors)), {}
    for stage, (taken, made) in TABLE.items():
        row: Row = {"judged_tokens": JUDGED_TOKENS, "judged_heads": len(index)}
        verdicts[stage] = row
        with noted(row), poison_memory():
            results = _call(course, stage, small)()
            inputs = [_judged(chain, name, course.values[name], index, small) for name in taken]
            wanted = REFERENCE[stage](*inputs, cu_seqlens=small.tensors.get("cu_seqlens"))
            wanted = wanted if isinstance(wanted, tuple) else (wanted,)
            errors = {}
            for name, x, ref in zip(made, results, wanted, strict=True):
                x = _judged(chain, name, x, index, small)
                # some count as many chunks as there are, some as there might be
                x, ref = (x[: len(ref)], ref[: len(x)]) if name == "S_in" else (x, ref)
                errors[name] = accuracy.measure_error(x, ref, limit, lambda: 0.0)[0]
            _keep(course, made, results)
            row |= _verdict(errors, limit)
        if not row["ok"]:
            return verdicts
    return verdicts


def stage_cost(stage: str, workload: Workload) -> Cost:
    """Return the least bytes of a stage in 16 bits with fp32 gates, and its flop as in `gdn.stages`."""
    (H, HV), (K, V), L = workload.case.heads, workload.case.sizes, workload.case.lengths
    tokens, shared, C = L.B * L.T * HV, H / HV, CHUNK
    state = L.N * HV * K * V * 4
    return {
        "cumsum": Cost(8 * tokens, 0),
        "kkt": Cost(tokens * (2 * K * shared + 8 + 2 * C), tokens * 2 * C * K),
        "solve": Cost(tokens * 4 * C, tokens * C * C / 3),
        "wy": Cost(tokens * (2 * K * shared + 8 + 2 * C + 2 * K + 4 * V), tokens * 2 * C * (K + V)),
        "state": Cost(
            tokens * (2 * K * shared + 4 + 2 * K + 4 * V + 2 * K * V / C) + 2 * state, tokens * 4 * K * V
        ),
        "output": Cost(
            tokens * (4 * K * shared + 4 + 4 * V + 2 * K * V / C),
            tokens * (2 * K * V + 2 * C * (K + V)),
        ),
        "whole": workload.cost,
    }[stage]


def _head(workload: Workload, chain: Chain, given: Inputs) -> Row:
    backend = jobs.backend(chain.provider, "prefill", given)
    return {**rows.head(workload), "provider": chain.provider, "backend": backend}


def _call(course: Course, stage: str, given: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    arguments = [course.values[name] for name in TABLE[stage][0]]
    function, offsets = course.chain.run[stage], given.tensors.get("cu_seqlens")
    return lambda: function(*arguments, offsets)


def _advance(course: Course, stage: str, made: tuple[str, ...], given: Inputs) -> None:
    """Run a stage once more and keep only the tensors that later stages read."""
    _keep(course, made, _call(course, stage, given)())
    later = list(TABLE)[list(TABLE).index(stage) + 1 :]
    needed = {name for s in later for name in TABLE[s][0]}
    course.values = {name: x for name, x in course.values.items() if name in needed}


def _keep(course: Course, made: tuple[str, ...], results: tuple[Tensor, ...]) -> None:
    course.values |= {name: course.chain.hand_on(name, x) for name, x in zip(made, results, strict=True)}


def _time(
    session: Session,
    cost: Cost,
    prepared: Mapping[str, graph.Prepared],
    courses: Mapping[str, Course],
    by_name: Mapping[str, Row],
    stage: str,
) -> None:
    times = graph.interleaved(prepared, session.device) if prepared else {}
    for name, seconds in times.items():
        if name in courses:
            courses[name].seconds[stage] = seconds.p50
        by_name[name].update(rows.speed(cost, session.ceilings, seconds, prepared[name]))
    rows.add_ratios(by_name)


def _sums(
    session: Session, workload: Workload, courses: Mapping[str, Course], heads: Mapping[str, Row]
) -> Iterator[Row]:
    """Yield the sum of the six stages' medians where all six have one."""
    costs = [stage_cost(stage, workload) for stage in TABLE]
    cost = Cost(sum(c.bytes for c in costs), sum(c.flop for c in costs))
    by_name = {}
    for name, course in courses.items():
        if len(course.seconds) == len(TABLE):
            words = {
                "case": f"{workload.name} sum",
                "inside": "the medians of the six stages, added",
                "ok": True,
            }
            total = sum(course.seconds.values())
            added = graph.Prepared(lambda: None, 1, "sum", ())
            times = measure.Times(total, total, total, len(TABLE))
            by_name[name] = {**heads[name], **words, **rows.speed(cost, session.ceilings, times, added)}
            by_name[name] |= {"share_of_limit": course.share_of_limit}
    rows.add_ratios(by_name)
    yield from by_name.values()


def _whole(
    session: Session, workload: Workload, given: Inputs, chains: Mapping[str, Chain], heads: Mapping[str, Row]
) -> Iterator[Row]:
    """Yield the rows of the public functions: compared to the last token, then timed in turn."""

    def without_decay() -> Inputs:
        return jobs.given(replace(workload.case, gate="none"), session.device)

    expected = accuracy.expect_outputs(given, without_decay, JUDGED_HEADS, False, accuracy.reference_by_heads)
    by_name = {name: {**heads[name], "case": f"{workload.name} whole", "inside": WHOLE} for name in chains}
    prepared = {}
    for name, chain in chains.items():
        with noted(by_name[name]):
            call = chain.whole(given)
            with poison_memory():
                o, final = call()
            answers = {"o": o, "final_state": final}
            by_name[name] |= rows.verdict(accuracy.compare_outputs(answers, expected, workload.case))
            del o, final, answers
            if by_name[name]["ok"]:
                by_name[name]["peak_mb"] = round(graph.peak_memory(call, session.device) / 1e6, 1)
                prepared[name] = graph.prepare([call], session.device)
    _time(session, workload.cost, prepared, {}, by_name, "whole")
    yield from by_name.values()


def _judged(chain: Chain, name: str, x: Tensor, index: list[int], given: Inputs) -> Tensor:
    """Return a tensor as the reference reads it: in fp64, on the judged key heads and their value heads."""
    H, HV = given.tensors["q"].shape[2], given.tensors["v"].shape[2]
    wanted = index if name in ("q", "k") else [h * (HV // H) + j for h in index for j in range(HV // H)]
    axis = 1 if name in ("S_in", "initial_state", "final_state") else 2
    return chain.plain(name, x).double().index_select(axis, torch.tensor(wanted, device=x.device))


def _verdict(errors: Mapping[str, float], limit: float) -> Row:
    worst = max(errors.values(), default=0.0)
    return {"ok": worst <= limit, "error": worst, "errors": dict(errors), "share_of_limit": worst / limit}
