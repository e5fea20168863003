"""Time speculation: T tokens for B rows, verified in every way, beside one token of the same rows.

Every provider's outputs, and the states that a way leaves, are compared with the fp64 reference before
anything is timed. One token and all ways of a group are timed in turn: `to_single` is a row's time over one
token's. A decode with a history has the peers' plain decodes beside it (`peer_way`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from gdn.testing import accuracy
from gdn.testing.accuracy import Expected
from gdn.testing.cases import Case
from gdn.testing.memory import poison_memory
from gdn.testing.tensors import Inputs
from gdn_bench.passes.gpu import JUDGED_HEADS, Session, noted
from gdn_bench.problems import jobs, packets
from gdn_bench.problems.packets import HISTORY, SINGLE, Packet, Shape, places
from gdn_bench.problems.workloads import Workload
from gdn_bench.providers.names import PEERS
from gdn_bench.providers.provider import Provider, put_in_pool
from gdn_bench.results import rows
from gdn_bench.results.rows import Row
from gdn_bench.timing import graph

Rows = dict[tuple[Packet, str], Row]


def run(session: Session) -> Iterator[Row]:
    """Yield the rows of every group: a number of rows on states in fp32 or bf16."""
    session.ceilings = session.ceilings or graph.ceilings(session.device)
    name = session.label("spec")
    for group in packets.groups(packets.SHAPE, session.wants):
        left = [one for one in group if not _is_done(session, one)]
        if not left:
            continue
        if session.is_over:
            case = f"B={group[0].B} {group[0].dtype}"
            yield {"pass": name, "case": case, "provider": "all", "skipped": "out of time"}
            continue
        # one token is timed again with the packets that are left
        measured_rows = measured(session, packets.SHAPE, list(dict.fromkeys([group[0], *left])))
        yield from ({"pass": name, **row} for row in measured_rows)
        graph.release()


def _is_done(session: Session, packet: Packet) -> bool:
    able = [name for name, provider in session.providers.items() if packet.way in provider.binds]
    return all(session.has("spec", name, packet.name) for name in able)


def measured(session: Session, shape: Shape, group: Sequence[Packet]) -> list[Row]:
    """Return the rows of a group: compare every provider with the reference, time the right ones in turn."""
    device, case = session.device, shape.case(group[0].B, group[0].dtype)
    first = jobs.given(case, device)
    head = rows.head(Workload("spec", "", case))
    backends = {name: jobs.backend(name, SINGLE, first) for name in session.providers}
    reference = accuracy.expect_outputs(
        first, lambda: jobs.given(replace(case, gate="none"), device), JUDGED_HEADS, False,
        packets.reference_of_packets,
    )  # fmt: skip
    by_packet: Rows = {}
    for packet in group:
        for name, provider in session.providers.items():
            if packet.way in provider.binds:
                row = head | {"case": packet.name, "provider": name, "T": packet.T}
                by_packet[packet, name] = row = row | {"backend": backends[name]}
                with noted(row), torch.no_grad():
                    row |= judged(provider, packet, case, first, reference)
    problems = jobs.sets(SINGLE, first, graph.copies(group[0].cost(shape).bytes / 2, device))
    prepared: dict[tuple[Packet, str], graph.Prepared] = {}
    for (packet, name), row in by_packet.items():
        if row.get("ok"):
            with noted(row), torch.no_grad():
                provider = session.providers[name]
                calls = [jobs.call(provider, packet.way, x) for x in packets.problems(packet, problems)]
                prepared[packet, name] = graph.prepare(
                    calls, device, is_eager=session.is_eager, moved=[problems[0].tensors["pool"]]
                )
    for what, seconds in (graph.interleaved(prepared, device) if prepared else {}).items():
        by_packet[what] |= rows.speed(what[0].cost(shape), session.ceilings, seconds, prepared[what])
    for packet in group:
        rows.add_ratios(_side_by_side(by_packet, packet))
    _against_one_token(by_packet)
    return list(by_packet.values())


def judged(provider: Provider, packet: Packet, case: Case, first: Inputs, reference: Expected) -> Row:
    """Return the verdict on a packet, on a pool of its own with a slot of NaN."""
    x = {name: y for name, y in first.tensors.items() if name != "initial_state"}
    on_pool = replace(first, tensors=x | put_in_pool(first.tensors["initial_state"]))
    with poison_memory():
        (problem,) = packets.problems(packet, [on_pool])
        o, states = provider.binds[packet.way](problem.tensors, problem.options)()
    expected = packets.wanted(packet, reference)
    if states is None and not provider.name.startswith("gdn"):
        # the peer keeps its history in a form of its own
        expected = replace(expected, outputs={"o": expected.outputs["o"]})
    results = {"o": o} if states is None else {"o": o, "final_state": states}
    judged_by = {"judged_tokens": packet.T, "judged_heads": len(reference.index)}
    return rows.verdict(accuracy.compare_outputs(results, expected, case)) | judged_by


def _side_by_side(by_packet: Rows, packet: Packet) -> dict[str, Row]:
    """Return the rows whose times are compared: those of a packet, by provider.

    No peer decodes with a history: beside it stand the peers' plain decodes of the same rows.
    """
    own = {name: row for (one, name), row in by_packet.items() if one == packet}
    if packet.way != HISTORY:
        return own
    single = replace(packet, way=SINGLE)
    plain = {name: dict(row) for (one, name), row in by_packet.items() if one == single and name in PEERS}
    if any("ms" in row for row in plain.values()):
        for row in own.values():
            row["peer_way"] = SINGLE
    return plain | own


def _against_one_token(by_packet: Rows) -> None:
    """Add to each row its time over that of one token, with_folds for a replay with its share of folds."""
    for (packet, name), row in by_packet.items():
        single = by_packet.get((replace(packet, T=1, way=SINGLE), name), {})
        if packet.way == SINGLE or "ms" not in row or "ms" not in single:
            continue
        row["to_single"] = row["ms"] / single["ms"]
        fold = by_packet.get((replace(packet, way="fold"), name), {})
        if packet.way == "replay" and "ms" in fold:
            share = packet.T / places(packet.T)
            row["with_folds"] = (row["ms"] + share * fold["ms"]) / single["ms"]
