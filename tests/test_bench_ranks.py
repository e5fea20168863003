"""`gdn bench ranks` and `links` with gloo at toy sizes: rows, wrong answers, failing ranks, predictions."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

import gdn_bench.timing.ranks as starting
from gdn.cli.app import build_app
from gdn.distributed import cost
from gdn_bench.passes import links, ranks
from gdn_bench.results import pages, rows, tables

CPU = torch.device("cpu")
TOY = ranks.Scaling((2, 4), 16, tokens=128, local=64, dtype="float32", rounds=(1, 1))
TOY_OPTIONS = "--device cpu --heads 2/4 --size 16 --tokens 128 --local 64 --providers gdn,fla"


def quickly(work, num_ranks, device, chosen, start=starting.run_on_ranks):
    """Start the ranks with one time of each call."""
    return start(work, num_ranks, device, replace(chosen, rounds=(1, 1)))


def run_command(monkeypatch, folder, command):
    monkeypatch.setattr(starting, "run_on_ranks", quickly)
    out = folder / "rows.jsonl"
    done = CliRunner().invoke(build_app(), ["bench", *command.split(), "--out", str(out)])
    assert done.exit_code == 0, done.output
    return rows.read(out), done.output


def test_ranks_are_timed_beside_one_process(monkeypatch, tmp_path):
    found, output = run_command(monkeypatch, tmp_path, f"ranks {TOY_OPTIONS}")
    ours = [row for row in found if row["provider"] == "gdn"]
    names = [row["case"] for row in ours if " train" in row["case"]]
    assert names == [
        *(f"2/4 1x{T} train, one GPU" for T in (128, 64)),
        *(f"2/4 1x128 train, 2 ranks, {x}" for x in ranks.EXCHANGES),
    ]
    assert len(ours) == 2 * len(names) and all(row["ms"] > 0 and row["queued_ms"] > 0 for row in ours)
    many = [row for row in ours if row["num_ranks"] == 2]
    judged = {"train": set(ranks.OUTPUTS), "forward": {"o"}}
    assert all(row["ok"] and set(row["errors"]) == judged[row["case"].split()[2][:-1]] for row in many)
    assert all("speedup" in row and "queued_weak" in row for row in many)
    theirs = [row for row in found if row["provider"] == "fla"]
    assert len(theirs) == 2 and all("failed" in row and "ms" not in row for row in theirs)
    assert "speedup" in output and "CUDA graph" not in output.split("one call: alone")[0]
    assert pages.section(pages.Results("cpu", found), "ranks")


def test_links_are_timed_and_fitted(monkeypatch, tmp_path):
    command = "links --device cpu --heads 2 --size 16 --most 32768"
    found, output = run_command(monkeypatch, tmp_path, command)
    assert [row["case"] for row in found] == [
        *(f"{x} {n} KiB, 2 ranks" for x in ("all_gather", "all_to_all") for n in (4, 32)),
        *(f"{x} of states {y}, 2 heads, 2 ranks" for x in cost.FLAT for y in ("forward", "backward")),
    ]
    assert all(row["ms"] > 0 and row["predicted_ms"] > 0 for row in found)
    assert all("latency_us" in row for row in found[:4]) and "bandwidth" in output
    assert json.dumps(tables.build_table("links", found).lines)


def scaled(rank, scaling):
    """Return rows of ranks whose outputs are wrong by a thousandth."""
    calls = ranks.bind

    def wrong(*given):
        jobs = calls(*given)
        return {job: lambda run=run: tuple(1.001 * x for x in run()) for job, run in jobs.items()}

    ranks.bind = wrong
    yield from ranks.measure(rank, scaling)


def test_what_differs_from_one_process_has_no_time():
    found = list(starting.run_on_ranks(scaled, 2, CPU, replace(TOY, exchanges=("gather",))))
    wrong = [row for row in found if row["num_ranks"] == 2]
    assert len(wrong) == 2 and not any(row["ok"] or "ms" in row for row in wrong)
    assert all(tables.reason(row)[0] == "wrong" for row in wrong)


def off_by_more_than_a_limit(rank, scaling):
    """Return rows of gdn and of a peer that are both off by 1.5 limits of fp32."""
    calls = ranks.bind

    def off(rank, given, provider, *more):
        jobs = calls(rank, given, "gdn", *more)
        return {job: lambda run=run: tuple((1 + 1.5e-5) * x for x in run()) for job, run in jobs.items()}

    ranks.bind = off
    yield from ranks.measure(rank, scaling)


def test_a_peer_may_differ_by_two_limits():
    scaling = replace(TOY, exchanges=("gather",), providers=("gdn", "fla"))
    rows_of_ranks = [
        row
        for row in starting.run_on_ranks(off_by_more_than_a_limit, 2, CPU, scaling)
        if row["num_ranks"] == 2
    ]
    assert {(row["provider"], row["ok"]) for row in rows_of_ranks} == {("gdn", False), ("fla", True)}


def without_backward(rank, scaling):
    """Return rows of ranks whose training step is refused, as FLA refuses its backward."""
    calls = ranks.bind

    def refuse():
        raise RuntimeError("no backward here")

    ranks.bind = lambda *given: {**calls(*given), "train": refuse}
    yield from ranks.measure(rank, scaling)


def test_a_forward_has_a_time_where_the_step_is_refused():
    found = list(starting.run_on_ranks(without_backward, 2, CPU, replace(TOY, exchanges=("gather",))))
    step, forward = (
        next(row for row in found if row["num_ranks"] == 2 and f" {job}," in row["case"])
        for job in ranks.JOBS
    )
    assert "no backward here" in step["failed"] and "ms" not in step
    assert forward["ok"] and forward["ms"] > 0 and "speedup" in forward


def by_pairs(rank, scaling):
    """Return rows of ranks, then how many times each of them drew tensors."""
    draw, drawn = ranks.Scaling.draw, []

    def count(scaling, rank, num_tokens, seed):
        drawn.append(num_tokens)
        return draw(scaling, rank, num_tokens, seed)

    ranks.Scaling.draw = count
    yield from ranks.measure(rank, scaling)
    yield {"case": "drawn", "drawn": drawn}


def test_pairs_of_ranks_are_nodes_and_all_exchanges_are_judged_by_one_result():
    found = list(
        starting.run_on_ranks(by_pairs, 4, CPU, replace(TOY, local=32, exchanges=("gather", "nodes")))
    )
    assert found.pop()["drawn"] == [128, 128, 32]
    by_nodes = [row for row in found if row["exchange"] == "nodes"]
    assert [row["case"] for row in by_nodes] == [f"2/4 1x128 {job}, 4 ranks, nodes" for job in ranks.JOBS]
    assert all(row["ok"] and row["ms"] > 0 and "speedup" in row for row in by_nodes)


def fail_on_one(rank):
    if rank.number == 1:
        raise ValueError("this rank fails")
    yield {"case": "first"}
    rank.largest([0.0])  # waits for the other rank


def test_a_rank_that_fails_ends_all():
    found = []
    with pytest.raises(RuntimeError, match="(?s)rank 1 failed.*this rank fails"):
        found.extend(starting.run_on_ranks(fail_on_one, 2, CPU))


@pytest.mark.parametrize("options, words", [
    ("ranks --exchanges ring", "exchanges: expected some of gather, owner, heads, nodes, got ring"),
    ("ranks --exchanges nodes", "exchanges: expected an even number of ranks from 4 on for nodes, got 2"),
    ("ranks --exchanges nodes --ranks 5 --tokens 5", "from 4 on for nodes, got 5"),
    ("ranks --heads 3/4", "heads: expected H/HV"), ("ranks --tokens 127", "tokens: expected a multiple of 2"),
    ("ranks --gate soft", "gate: expected one of"), ("links --most 5000", "most: expected at least 32768"),
])  # fmt: skip
def test_a_usage_error(options, words):
    done = CliRunner().invoke(build_app(), ["bench", *options.split(), "--device", "cpu"])
    assert done.exit_code == 2 and words in " ".join(done.output.replace("│", " ").split())


def test_fit_finds_the_link():
    received = [2.0**n for n in (12, 18, 21, 26)]
    found = links.fit([1.5 * 9e-6 + x / 3e11 for x in received], 1.5, received)
    assert found == pytest.approx({"latency_us": 9, "link_gb_per_s": 300})
    assert links.fit([2e-5, 1e-5], 1.0, [1.0, 1e9])["link_gb_per_s"] is None


def test_predictions_stand_beside_sizes_of_the_model():
    row = {"ms": 10.0, "queued_ms": 8.0}
    rank = starting.Rank(0, 2, CPU)
    one, two = (
        ranks.predict(ranks.Scaling(), ranks.Way("gdn", x, 131072), "train", rank, row)
        for x in ("one GPU", "gather")
    )
    assert 1.7 < one["predicted_ms"] / two["predicted_ms"] < 2
    assert two["queued_predicted"] == pytest.approx(two["queued_predicted_ms"] / 8)
    assert two["predicted_ms"] - two["queued_predicted_ms"] == pytest.approx(2e3 * cost.ONE_CALL.host)
    assert ranks.predict(TOY, ranks.Way("gdn", "gather", 128), "train", rank, row) == {}


def test_pairs_of_ranks_are_predicted_with_the_links_of_one_host():
    """On a link of one speed two levels take longer than one, by latencies and not by that of InfiniBand."""
    rank = starting.Rank(0, 4, CPU)
    owner, nodes = (
        ranks.predict(ranks.Scaling(), ranks.Way("gdn", x, 131072), "train", rank, {"ms": 1, "queued_ms": 1})
        for x in ("owner", "nodes")
    )
    assert 0 < nodes["queued_predicted_ms"] - owner["queued_predicted_ms"] < 6e3 * cost.Machine().latency
