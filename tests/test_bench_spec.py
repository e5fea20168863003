"""The benchmark of speculation compares every way with the reference and times only the right ones."""

import importlib.util
import json
import sys
from dataclasses import replace

import pytest
import torch
from kit import stub_peers

pytest.importorskip("typer")

from typer.testing import CliRunner

from gdn.cli.app import build_app
from gdn.testing import accuracy
from gdn_bench.passes import spec
from gdn_bench.passes.gpu import Session
from gdn_bench.problems import jobs, packets
from gdn_bench.problems.packets import HISTORY, SINGLE, WAYS, Packet
from gdn_bench.providers.gdn_calls import gdn_provider
from gdn_bench.providers.provider import Bound, Provider
from gdn_bench.results import pages, rows, tables
from gdn_bench.results.pages import Results
from gdn_bench.timing import graph

CPU = torch.device("cpu")
SMALL = packets.Shape(heads=(1, 2), size=16, rows=(3,), tokens=(4, 16), history_rows=(3,))


@pytest.fixture
def peers(monkeypatch):
    for name, module in stub_peers.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
        module.__spec__ = importlib.util.spec_from_loader(name, None)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(graph, "ROUNDS", (2, 2))
    monkeypatch.setattr(packets, "SHAPE", SMALL)


def session(*names, **options):
    return Session(names, CPU, ceilings={"copy": 1e9, "matmul": 1e9}, **options)


def group(dtype="fp32", shape=SMALL, only=""):
    found = packets.groups(shape, lambda name: only in name)
    return next(one for one in found if one[0].dtype == dtype)


# problems


def test_what_is_measured():
    found = packets.groups(packets.Shape(), lambda name: True)
    assert [len(one) for one in found] == 8 * [2 + 2 * len(WAYS)] + 4 * [2]
    assert [one.name for one in found[-1]] == ["B=512 T=1 bf16 decode", "B=512 T=1 bf16 history"]
    (some,) = packets.groups(packets.Shape(), lambda name: name == "B=64 T=4 bf16 replay")
    assert [one.name for one in some] == ["B=64 T=1 bf16 decode", "B=64 T=4 bf16 replay"]
    assert packets.groups(packets.Shape(), lambda name: False) == []


def test_what_speculation_moves():
    shape = packets.Shape()
    state, tokens = 8 * 32 * 128 * 128 * 4, 8 * 4 * (4 * 16 * 128 + 4 * 32 * 128 + 4 * 32)
    cost = {way: Packet(8, 4, "fp32", way).cost(shape).bytes for way in WAYS}
    assert [cost[way] - tokens for way in ("states", "final", "chunk")] == [5 * state, 2 * state, state]
    history = 2 * 32 * 128 + 2 * 16 * 128 + 8 * 32
    assert cost["replay"] == state + tokens + (2 * (4 + 8 + 12 + 0) + 8 * 4) * history
    assert cost["fold"] == 2 * state + 8 * 16 * history
    one = 64 * (4 * 16 * 128 + 4 * 32 * 128 + 4 * 32) + (4 * sum(range(16)) + 64) * history
    assert Packet(64, 1, "fp32", HISTORY).cost(shape).bytes == (64 + 4) * 32 * 128 * 128 * 4 + one
    assert Packet(8, 4, "bf16", "chunk").cost(shape).bytes - tokens == state / 2


@pytest.mark.parametrize("T", [2, 4, 8, 16])
def test_histories_are_those_of_an_engine(T):
    """Whole packets, all numbers of them that leave room for one more; a fold's history is full after it."""
    accepted = Packet(64, T, "fp32", "replay").accepted
    assert set(accepted.tolist()) == set(range(0, packets.places(T), T))
    assert Packet(1, T, "fp32", "replay").accepted > 0
    assert (Packet(3, T, "fp32", "fold").accepted + T == packets.places(T)).all()


def test_the_law_keeps_the_state_after_every_token():
    given = jobs.given(SMALL.case(3, "fp32"), CPU)
    whole = accuracy.run(packets.reference_of_packets, given, False)
    states = whole["final_state"].unflatten(0, (3, -1))
    for tokens in (1, 5, 32):
        part = accuracy.run(accuracy.reference_by_heads, given.prefix(tokens), False)
        torch.testing.assert_close(part["o"], whole["o"][:, :tokens], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(part["final_state"], states[:, tokens - 1], rtol=1e-12, atol=1e-13)


# the pass


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", packets.STATES)
def test_every_way_has_a_time_over_one_token(backend, device, peers, monkeypatch, dtype):
    if device != "cpu":
        pytest.skip("the command itself is for a GPU")
    monkeypatch.setenv("GDN_BACKEND", backend)
    shape = replace(SMALL, rows=(1,), tokens=(4,), history_rows=(1,)) if backend == "triton" else SMALL
    found = spec.measured(session("gdn", "flashinfer"), shape, group(dtype, shape))
    ours = {row["case"]: row for row in found if row["provider"] == "gdn"}
    assert all(row["ok"] and row["ms"] > 0 and row["backend"] == backend for row in ours.values()), found
    assert list(ours) == [one.name for one in group(dtype, shape)]
    single = found[0]["ms"]
    for row in list(ours.values())[1:]:
        assert row["to_single"] == pytest.approx(row["ms"] / single) and row["state"] == dtype
    B = shape.rows[0]
    replay, fold = (ours[f"B={B} T=4 {dtype} {way}"] for way in ("replay", "fold"))
    assert replay["with_folds"] == pytest.approx((replay["ms"] + fold["ms"] / 4) / single)
    table = tables.build_table("spec", found)
    assert table.lines and all(len(line) == len(table.columns) for line in table.lines)


@pytest.mark.parametrize("dtype", packets.STATES)
def test_flashinfer_is_given_the_same_problem(peers, dtype):
    found = spec.measured(session("gdn", "flashinfer"), SMALL, group(dtype))
    theirs = {row["case"]: row for row in found if row["provider"] == "flashinfer"}
    refused = {case for case, row in theirs.items() if "refused" in row}
    assert refused == {f"B=3 T={T} {dtype} replay" for T in ((4, 16) if dtype == "fp32" else (16,))}
    timed = {case for case in theirs if case not in refused}
    assert all(theirs[case]["ok"] for case in timed)
    beside = {row["case"] for row in found if row["provider"] == "gdn" and row["ratio"]}
    assert beside == timed | {f"B=3 T=1 {dtype} {HISTORY}"}
    assert not any("fold" in case for case in theirs) and len(theirs) == 1 + 2 * (len(WAYS) - 1)


@pytest.mark.parametrize("dtype, peers_of_it", [("fp32", {"fla", "flashinfer"}), ("bf16", {"flashinfer"})])
def test_beside_a_history_stands_the_peers_plain_decode(peers, dtype, peers_of_it):
    """FLA decodes on states in fp32 alone."""
    only = session("gdn", "fla", "flashinfer")
    found = spec.measured(only, SMALL, group(dtype, only="T=1 "))
    by = {(row["case"].rpartition(" ")[2], row["provider"]): row for row in found}
    assert {name for way, name in by if way == HISTORY} == {"gdn"}
    ratio = {name: by[SINGLE, name]["ms"] / by[HISTORY, "gdn"]["ms"] for name in peers_of_it}
    assert by[HISTORY, "gdn"]["ratio"] == pytest.approx(ratio)
    assert by[HISTORY, "gdn"]["to_best_peer"] == pytest.approx(min(ratio.values()))
    assert by[HISTORY, "gdn"]["peer_way"] == SINGLE and "peer_way" not in by[SINGLE, "gdn"]
    # the rows of the peers keep ratios of their own
    assert by[SINGLE, "flashinfer"]["ms"] and "gdn" not in by[SINGLE, "flashinfer"]["ratio"]


def made_up(way, provider, ms, **fields):
    row = {
        "pass": "spec",
        "case": f"B=256 T=1 bf16 {way}",
        "provider": provider,
        "dtype": "bfloat16",
        "ms": ms,
    }
    return (
        row
        | {"p20": ms, "p80": ms, "ok": True, "date": "2026-11-27", "commit": "abc", "versions": {}}
        | fields
    )


def test_the_tables_show_the_peers_decode_beside_a_history():
    """Times in ms: 0.137 of gdn's decode, 0.148 of FlashInfer's, 0.096 with a history."""
    single = made_up(SINGLE, "gdn", 0.137, ratio={"flashinfer": 0.148 / 0.137})
    theirs = made_up(SINGLE, "flashinfer", 0.148, ratio={})
    ours = made_up(HISTORY, "gdn", 0.096)
    one, two, three = Packet(256, 1, "bf16", SINGLE), Packet(256, 1, "bf16", HISTORY), "flashinfer"
    by_packet = {(one, "gdn"): single, (one, three): theirs, (two, "gdn"): ours}
    rows.add_ratios(spec._side_by_side(by_packet, two))
    assert theirs["ratio"] == {} and single["ratio"] == {"flashinfer": 0.148 / 0.137}
    text = "\n".join(pages.section(Results("h200", [single, theirs, ours]), "spec"))
    assert "| B=256 T=1 bf16 history | 96 us | 96 us to 96 us | 0.148 ms (1.54) |" in text
    assert "| B=256 T=1 bf16 decode | 0.137 ms | 0.137 ms to 0.137 ms | 0.148 ms (1.08) |" in text
    assert "in the rows of history the other libraries' time is that of decode." in text
    # without a peer's time there is nothing beside it
    rows.add_ratios(spec._side_by_side({(two, "gdn"): (alone := made_up(HISTORY, "gdn", 0.096))}, two))
    assert alone["ratio"] == {} and "peer_way" not in alone and "to_best_peer" not in alone


def changed(way, change):
    """gdn, with something done to what a way is given or to what it returns."""
    honest = gdn_provider("eager").binds

    def bind(tensors, options):
        return change(honest[way], dict(tensors), options)

    return Provider("gdn:liar", {**honest, way: bind})


def returning(change):
    def changed(bind, tensors, options):
        bound = bind(tensors, options)
        return Bound(bound.run, lambda results: change(*bound.restore(results)))

    return changed


def dropping(bind, tensors, options):
    """The second token of a packet writes nothing."""
    tensors["beta"] = tensors["beta"].clone()
    tensors["beta"][:, 1] = -1e4
    return bind(tensors, options)


def forgetting(bind, tensors, options):
    """The states as they were."""
    pool, index = tensors["pool"].clone(), tensors["read_index"].long()
    bound = bind(tensors, options)
    return Bound(bound.run, lambda results: (bound.restore(results)[0], pool[index].float()))


def empty(bind, tensors, options):
    """No history."""
    return bind({**tensors, "accepted": 0 * tensors["accepted"]}, options)


LIES = [  # of a way, what, how
    *((way, "zeros", returning(lambda o, S: (0 * o, S))) for way in (SINGLE, *WAYS, HISTORY)),
    *((way, "dropped token", dropping) for way in WAYS),
    *((way, "old states", forgetting) for way in (SINGLE, "final", "chunk final", "replay", "fold")),
    ("states", "one state for all", returning(lambda o, S: (o, S[:1].expand_as(S)))),
    ("replay", "no history", empty),
    ("fold", "no history", empty),
    (HISTORY, "no history", empty),
]


@pytest.mark.parametrize("way, what, lie", LIES)
def test_what_is_wrong_has_no_time(way, what, lie):
    liar = session()
    liar.providers = {"gdn:liar": changed(way, lie)}
    shape = replace(SMALL, tokens=(4,))
    found = {row["case"]: row for row in spec.measured(liar, shape, group(shape=shape))}
    for case, row in found.items():
        is_wrong = case.endswith(f" {way}") and not (way == "final" and case.endswith("chunk final"))
        assert row["ok"] != is_wrong and ("ms" in row) != is_wrong and row["errors"], (case, row)
    if way == SINGLE:
        assert not any("to_single" in row for row in found.values())


def test_the_command_appends_rows(tmp_path):
    out = tmp_path / "rows.jsonl"
    options = ["bench", "spec", "--device", "cpu", "--out", str(out), "--commit", "abc", "--providers", "gdn"]

    def held(*more):
        done = CliRunner().invoke(build_app(), [*options, *more])
        assert done.exit_code == 0, done.output
        return [json.loads(line)["case"] for line in out.read_text().splitlines()] if out.exists() else []

    assert held("--minutes", "0") == []
    first = ["B=3 T=1 bf16 decode", "B=3 T=4 bf16 replay"]
    assert held("--only", "T=4 bf16 replay") == first
    rest = [one.name for dtype in packets.STATES for one in group(dtype) if one.name != first[1]]
    assert held("--resume") == first + rest
    assert held("--resume") == first + rest


def test_packets_are_compiled_by_name():
    names = ["B=3 T=1 bf16 decode", "B=3 T=16 bf16 replay"]
    found = list(packets.named(names, CPU))
    assert [way for way, _ in found] == [SINGLE, "replay"]
    for way, problem in found:
        jobs.call(gdn_provider(), way, problem)()
