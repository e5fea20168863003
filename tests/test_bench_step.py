"""The benchmark of the decode step compares every way with the references and times only the right ones."""

import json

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from gdn.cli.app import build_app
from gdn_bench.passes import step
from gdn_bench.passes.gpu import Session
from gdn_bench.results import tables
from gdn_bench.timing import graph

SMALL = step.Shape(heads=(1, 2), size=16, taps=3, rows=(1, 3))


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(graph, "ROUNDS", (2, 2))
    found = Session(("gdn",), torch.device("cpu"))
    found.ceilings = {"copy": 1e9, "matmul": 1e9}
    return found


@pytest.mark.interpret
def test_every_way_has_a_time(backend, device, session, monkeypatch):
    if device != "cpu":
        pytest.skip("the command itself is for a GPU")
    monkeypatch.setenv("GDN_BACKEND", backend)
    found = step.measured(session, SMALL, 3, "bf16")
    assert all(row["ok"] and row["ms"] > 0 and row["backend"] == backend for row in found), found
    names = [row["case"].removeprefix("B=3 bf16 ") for row in found]
    assert names == [step.FUNCTIONS, step.ONE]
    assert found[1]["to_functions"] == pytest.approx(found[0]["ms"] / found[1]["ms"])
    table = tables.build_table("step", found, more=tables.SCREEN)
    assert len(table.lines) == len(found) and "of functions" in table.columns
    assert all(len(line) == len(table.columns) for line in table.lines)


@pytest.mark.parametrize("stale", ["conv_state", "state", "z"])
def test_what_is_wrong_has_no_time(session, monkeypatch, stale):
    """Windows or states that stay as they were, an output that is not normed."""

    def bind(x):
        copy = {**x, stale: x[stale].clone()}
        return step.functions(copy if stale != "z" else {**x, "z": torch.ones_like(x["z"])})

    monkeypatch.setitem(step.WAYS, step.ONE, bind)
    right, wrong = step.measured(session, SMALL, 3, "fp32")
    assert right["ok"] and not wrong["ok"] and "ms" not in wrong and wrong["errors"]


def test_the_command_appends_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "ROUNDS", (1, 1))
    monkeypatch.setattr(step.run, "__defaults__", (SMALL,))
    out = tmp_path / "rows.jsonl"
    options = ["bench", "step", "--device", "cpu", "--out", str(out), "--commit", "abc", "--only", "fp32"]
    done = CliRunner().invoke(build_app(), options)
    assert done.exit_code == 0, done.output
    held = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"] for row in held] == [
        f"B={B} fp32 {name}" for B in SMALL.rows for name in (step.FUNCTIONS, step.ONE)
    ]
    assert CliRunner().invoke(build_app(), [*options, "--resume"]).exit_code == 0
    assert len(out.read_text().splitlines()) == len(held)
