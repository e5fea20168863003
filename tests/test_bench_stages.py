"""The six stages beside FLA's: one problem in both conventions, judged stage by stage, then the whole."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from kit import stub_peers

pytest.importorskip("typer")

from typer.testing import CliRunner

from gdn.cli.app import build_app
from gdn.testing.cases import packed
from gdn_bench.passes import gpu, stage_chains, stages
from gdn_bench.problems import catalog, jobs, workloads
from gdn_bench.results import rows, tables
from gdn_bench.timing import graph

CPU = torch.device("cpu")
SMALL = replace(
    workloads.choose_workloads("prefill", [catalog.PTO])[0],
    case=replace(catalog.case(catalog.PTO), heads=(2, 4), sizes=(16, 16), lengths=packed(70, 33)),
)


@pytest.fixture
def peers(monkeypatch):
    for name, module in stub_peers.modules().items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
        module.__spec__ = importlib.util.spec_from_loader(name, None)


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(graph, "ROUNDS", (2, 2))
    found = gpu.Session(("gdn",), CPU)
    found.ceilings = {"copy": 1e9, "matmul": 1e9}
    return found


def measured(session, chains):
    return {
        (row["provider"], row["case"].rpartition(" ")[2]): row
        for row in stages.measured(session, SMALL, chains)
    }


def test_every_stage_the_sum_and_the_whole_have_times(peers, session):
    chains, absent = stage_chains.load(("gdn", "fla"))
    found = measured(session, chains)
    assert not absent and {who for who, _ in found} == {"gdn", "fla"}
    assert len(found) == 2 * 8 and all(
        row["ok"] and row["ms"] > 0 and row["inside"] for row in found.values()
    ), found
    for what in (*stages.TABLE, "sum", "whole"):
        ours, theirs = found["gdn", what], found["fla", what]
        assert ours["ratio"] == {"fla": pytest.approx(theirs["ms"] / ours["ms"])} and theirs["ratio"] == {}
    parts = [found["gdn", stage]["ms"] for stage in stages.TABLE]
    assert found["gdn", "sum"]["ms"] == pytest.approx(sum(parts))
    table = tables.build_table("stages", list(found.values()))
    assert len(table.lines) == 8 and all(len(line) == len(table.columns) for line in table.lines)


def test_stages_are_judged_by_the_reference(peers):
    chains, _ = stage_chains.load(("gdn:eager", "fla"))
    given = jobs.given(SMALL.case, CPU)
    for name, chain in chains.items():
        found = stages.compare_stages(chain, given)
        assert list(found) == list(stages.TABLE) and all(row["ok"] for row in found.values()), (name, found)
        assert set(found["state"]["errors"]) == {"S_in", "v_new", "final_state"}


@pytest.mark.parametrize(
    "who, stage", [*(("gdn", stage) for stage in stages.TABLE), ("fla", "state"), ("fla", "solve")]
)
def test_a_wrong_stage_and_what_builds_on_it_have_no_time(peers, session, who, stage):
    """Zeros in place of what a stage makes."""
    chains, _ = stage_chains.load(("gdn", "fla"))
    right = chains[who].run[stage]

    def wrong(*arguments):
        return tuple(x * 0 for x in right(*arguments))

    bad = replace(chains[who], run={**chains[who].run, stage: wrong}, provider="liar")
    found = measured(session, {"gdn": chains["gdn"], "liar": bad})
    after = list(stages.TABLE)[list(stages.TABLE).index(stage) :]
    assert not any("ms" in found["liar", what] for what in after) and ("liar", "sum") not in found
    assert all("ms" in found["gdn", what] for what in (*stages.TABLE, "sum", "whole"))


def test_a_whole_that_is_wrong_or_fails_has_no_time(session):
    chain = stage_chains.ours("gdn")

    def dropped(given):
        def call():
            o, final = chain.whole(given)()
            o[:, 32:64] = 0
            return o, final

        return call

    found = measured(session, {"gdn": replace(chain, whole=dropped)})
    assert not found["gdn", "whole"]["ok"] and "ms" not in found["gdn", "whole"]
    found = measured(session, {"gdn": replace(chain, whole=lambda given: 1 / 0)})
    assert found["gdn", "whole"]["failed"].startswith("ZeroDivisionError")


def test_the_command_says_what_is_inside(monkeypatch, session, tmp_path):
    monkeypatch.setattr(stages, "choose_workloads", lambda job, names: [SMALL])
    out = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(build_app(), ["bench", "stages", "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0 and len(out.read_text().splitlines()) == 8, done.output
    assert "inside the time of whole:" in done.stdout and "fla: not installed" in done.stdout
    assert CliRunner().invoke(build_app(), ["bench", "stages", "--providers", "flow"]).exit_code == 2


def test_what_a_stage_costs_is_what_gdn_stages_says():
    target = workloads.choose_workloads("prefill", [catalog.PTO])[0]
    tokens = 262144 * 16
    flop = {stage: stages.stage_cost(stage, target).flop / tokens for stage in stages.TABLE}
    assert flop == {
        "cumsum": 0, "kkt": 2 * 64 * 128, "solve": pytest.approx(64**2 / 3), "wy": 2 * 64 * 256,
        "state": 4 * 128**2, "output": 2 * 128**2 + 2 * 64 * 256,
    }  # fmt: skip
    assert stages.stage_cost("state", target).bytes > stages.stage_cost("output", target).bytes > 0


def test_the_pass_goes_on_where_it_stopped(monkeypatch, session):
    monkeypatch.setattr(stages, "choose_workloads", lambda job, names: [SMALL])
    chains, absent = stage_chains.load(("gdn", "fla", "flashinfer"))
    assert set(chains) == {"gdn"} and absent == {"fla": "not installed"}
    found = list(stages.run(session, chains))
    assert [row["pass"] for row in found] == ["stages"] * 8
    about = {"commit": "abc", "gpu": None}
    session.done = frozenset(rows.done([{**row, **about} for row in found], about))
    assert not list(stages.run(session, chains))
    session.done, session.deadline = frozenset(), 0.0
    assert next(stages.run(session, chains))["skipped"]
    with pytest.raises(ValueError, match="expected gdn"):
        stage_chains.load(("flow",))
