"""`gdn verify` as a laboratory: metrics, profiles, wrong answers, peers beside ours, files and pictures."""

import csv
import importlib.util
import json
import math
from dataclasses import replace

import pytest
import torch
from kit import stub_peers

pytest.importorskip("typer")

from typer.testing import CliRunner

import gdn
from gdn.cli.app import build_app
from gdn.testing import accuracy, cases
from gdn.testing.cases import Case, packed
from gdn_bench.commands import verify
from gdn_bench.judging import metrics, portraits, pto, readings
from gdn_bench.problems import catalog
from gdn_bench.providers.gdn_calls import gdn_provider
from gdn_bench.providers.load import load_provider
from gdn_bench.providers.names import PROVIDERS
from gdn_bench.providers.provider import Bound, Provider
from gdn_bench.timing import measure

CPU, BF16 = torch.device("cpu"), torch.bfloat16
CASE = Case("slow", lengths=packed(100, 80), heads=(2, 4), sizes=(16, 16), state="wide")
TINY = ["verify", "--set", "quick", "--dtype", "fp32", "--max-cases", "2", "--device", "cpu"]


def run(*args):
    return CliRunner().invoke(build_app(), list(args))


def liar(change, name="liar"):
    """gdn, with something done to its arguments and answers."""

    def bind(tensors, options):
        def call():
            o, S = gdn.chunk_gated_delta_rule(**{**tensors, **options})
            return change(o, S)

        return Bound(call)

    return Provider(name, {"prefill": bind, "train": bind})


def dropping(tensors, options):
    beta = tensors["beta"].clone()
    beta[:, 64:128] = 0
    return Bound(lambda: gdn.chunk_gated_delta_rule(**{**tensors, **options, "beta": beta}))


LIES = {
    "zeros": liar(lambda o, S: (o * 0, S * 0)),
    "dropped chunk": Provider("liar", {"prefill": dropping}),
    "nan": liar(lambda o, S: (o * math.nan, S)),
    "swapped heads": liar(lambda o, S: (o.flip(2), S)),
}


def refuse(tensors, options):
    raise NotImplementedError("only on Sundays")


NO = {"fla": refuse, "flash_qla": lambda tensors, options: 1 / 0}


def examine(who, **options):
    return readings.examine("x", CASE, BF16, who, device=CPU, **options)


# metrics


def test_metrics_are_what_their_names_say():
    ref = torch.tensor([1.0, -2.0, 3.0, 4.0], dtype=torch.float64)
    found = metrics.metrics(ref + torch.tensor([0.1, -0.1, 0.1, 0.0]), ref)
    rmse = math.sqrt(0.03 / 4)
    assert found.rmse == pytest.approx(rmse) and found.rmse_over_mean == pytest.approx(rmse / 2.5)
    assert found.nrmse == pytest.approx(rmse / float(ref.std(correction=0)))
    assert found.r2 == pytest.approx(1 - 0.03 / float(((ref - 1.5) ** 2).sum()))
    assert (
        found.close == 0.25 and found.max_abs == pytest.approx(0.1) and found.mean_abs == pytest.approx(0.075)
    )
    x = ref + torch.tensor([0.1, -0.1, 0.1, 0.0])
    assert found.pearson == pytest.approx(float(torch.corrcoef(torch.stack([x, ref]))[0, 1]))


def test_metrics_of_what_is_no_answer():
    ref = torch.ones(3)
    assert metrics.metrics(None, ref).rmse == math.inf
    assert metrics.metrics(ref * math.nan, ref).max_abs == math.inf
    assert metrics.metrics(torch.ones(4), ref).rmse == math.inf
    assert metrics.metrics(ref, ref).rmse == 0 and math.isnan(metrics.metrics(ref, ref).r2)
    assert metrics.metrics(torch.ones(0), torch.ones(0)).r2 == 1
    assert metrics.metrics(torch.zeros(3), torch.zeros(3)).rmse_over_mean == 0
    assert metrics.metrics(ref, torch.zeros(3)).rmse_over_mean == math.inf


def test_ptos_gates():
    right = metrics.Metrics(rmse_over_mean=0.1, r2=0.995, pearson=0.999)
    assert pto.passes(right, 0.15) and not pto.passes(right, 0.09)
    assert not pto.passes(replace(right, r2=0.98), 0.15) and not pto.passes(right, 0.15, 0.999)
    assert not pto.passes(replace(right, pearson=0.9), 0.15)
    assert pto.passes(replace(right, pearson=-0.999), 0.15) and not pto.passes(metrics.Metrics(), 9.0)


# examining


@pytest.mark.parametrize("profile", verify.PROFILES)
@pytest.mark.parametrize("lie", LIES)
def test_wrong_answers_fail_every_profile(lie, profile):
    found = examine({"gdn": gdn_provider(), "liar": LIES[lie]}, profile=profile)
    ours, theirs = ([r for r in found.readings if r.provider == who] for who in ("gdn", "liar"))
    assert all(r.ok and r.backend == "eager" for r in ours) and not all(r.ok for r in theirs)
    assert not found.failed and len(ours) == (2 if profile == "pto" else 8)


def test_a_reading_is_the_protocols():
    found = examine({"gdn": gdn_provider()})
    judged = accuracy.check(gdn.chunk_gated_delta_rule, CASE, BF16)
    assert [(r.output, r.limit, r.ok) for r in found.readings] == [(r.output, r.limit, r.ok) for r in judged]
    assert [r.error for r in found.readings] == pytest.approx([r.error for r in judged], rel=1e-6)


def test_ours_is_held_against_peers_in_ptos_profile():
    found = examine({"gdn": gdn_provider(), "fla": LIES["swapped heads"]}, profile="pto")
    between = {r.output: r.ok for r in found.readings if r.provider == "gdn ~ fla"}
    assert between == {"o": False, "final_state": True}


STAGED = replace(CASE, gate="strong", state="none", sizes=(32, 16))


def staged(dtype=BF16):
    found = readings.examine("x", STAGED, dtype, {"gdn": gdn_provider()}, profile="pto", device=CPU)
    assert not found.failed
    return {r.output: r for r in found.readings if r.provider == "gdn stages"}


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_ptos_profile_holds_every_stage(dtype):
    found = staged(dtype)
    assert list(found) == [
        "G", "A", "A_inv", "w", "u", "S_in", "v_new", "final_state", "o", pto.WHOLE,
    ]  # fmt: skip
    assert all(r.ok for r in found.values()), found
    assert "gdn stages" not in {r.provider for r in examine({"gdn": gdn_provider()}, profile="pto").readings}


@pytest.mark.parametrize(
    "stage, output, change",
    [
        ("chunk_kkt", "A", lambda x: x * 1.1), ("solve_tril", "A_inv", lambda x: x * 0.9),
        ("wy_transform", "w", lambda x: (x[0].flip(1), x[1])),
        ("chunk_state", "v_new", lambda x: (x[0], x[1] + 1.5 * (x[1] == x[1].max()), x[2])),
        ("chunk_output", "o", lambda x: x * math.nan),
    ],
)  # fmt: skip
def test_a_wrong_stage_fails_its_own_gate(monkeypatch, stage, output, change):
    """And it alone, as the next is fed with what it made; but for the whole, which is held against them."""
    right = getattr(gdn.stages, stage)
    monkeypatch.setattr(gdn.stages, stage, lambda *x, **options: change(right(*x, **options)))
    wrong = {name for name, r in staged().items() if not r.ok}
    assert output in wrong and wrong <= {output, pto.WHOLE}


def test_gates_of_a_stage_and_of_the_whole():
    near = metrics.Metrics(rmse_over_mean=0.04, r2=0.995, close=0.5, max_abs=0.9)
    assert pto.passes_stage(near) and not pto.passes_stage(replace(near, r2=0.98))
    assert not pto.passes_stage(replace(near, rmse_over_mean=0.06))
    assert pto.passes_stage(replace(near, rmse_over_mean=0.06, close=1.0))
    assert not pto.passes_stage(replace(near, max_abs=1.1)) and not pto.passes_stage(metrics.Metrics())
    assert pto.passes_call(replace(near, rmse_over_mean=0.004)) and not pto.passes_call(near)
    assert pto.passes_call(replace(near, r2=0.99991))


def test_who_refuses_and_who_fails_is_named():
    def fail(tensors, options):
        raise AssertionError("line one\nline two")

    who = {"a": Provider("a", {"prefill": refuse}), "b": Provider("b", {"train": fail})}
    found = examine({"gdn": gdn_provider(), **who})
    assert found.refused == {"a": "only on Sundays"} and found.failed == {"b": "AssertionError: line one"}


def test_ours_may_not_be_worse_than_the_best_peer():
    found = {"fla": {"o": 4e-3, "dg": 4e-3}, "flashinfer": {"o": 2e-3}}
    good = readings.against_peers({"o": 2.1e-3, "dg": 2.7e-3}, found)
    assert not good["worse"] and good["of_best_peer"]["o"] == pytest.approx(1.05)
    assert readings.against_peers({"o": 2.3e-3, "dg": 2e-3}, found)["worse"] == ["o"]
    assert readings.against_peers({"o": 1e-3, "dg": 3e-3}, found)["worse"] == ["dg of fla's"]
    assert not readings.against_peers({"o": 1.0, "dg": 1.0}, {})["worse"]
    rounding = {"fla": {"o": 1e-7, "dg": 1e-8}}
    assert not readings.against_peers({"o": 9e-7, "dg": 9e-7}, rounding)["worse"]


def test_sets_are_named_problems():
    assert len(readings.NAMED["pto"]) == 15 and len(readings.NAMED["pto-gva"]) == 4 * 13
    assert {case.gate for case in readings.DISTRIBUTIONS.values()} <= {*cases.GATES, "mixed"}
    assert {case.keys for case in readings.DISTRIBUTIONS.values()} == set(cases.KEYS)
    assert readings.NAMED["pto"]["16/16 long ladder"].lengths is cases.LONG_LADDER
    assert set(readings.NAMED["ladders"]) == set(catalog.SETS["ladders"])


def test_an_error_is_where_it_is():
    ref = torch.ones(1, 600, 2, 3)
    x = ref.clone()
    x[:, 300] += 1
    places, errors = portraits.by_bin(x, ref)
    assert len(places) == 1 and abs(places[0] - 300) < 3 and errors[0] == pytest.approx(3**-0.5, rel=1e-3)


# the command


def test_verify_prints_a_verdict():
    done = run(*TINY)
    assert done.exit_code == 0 and "outputs within their limits" in done.stdout, done.output
    assert "final_state" in done.stdout and "RMSE/mean" in done.stdout


@pytest.mark.parametrize("entry", list(verify.ENTRIES))
def test_verify_writes_every_row(entry, tmp_path):
    file = tmp_path / "rows.json"
    assert run(*TINY, "--entry", entry, "--json", str(file)).exit_code == 0
    found = json.loads(file.read_text())
    assert found["ok"] and not found["refused"] and len({row["case"] for row in found["rows"]}) == 2
    assert {"case", "provider", "dtype", "output", "error", "limit", "ok", "r2", "close"} < set(
        found["rows"][0]
    )


def test_verify_leaves_a_folder(tmp_path):
    pytest.importorskip("matplotlib")
    assert run(*TINY, "--out", str(tmp_path)).exit_code == 0
    found = json.loads((tmp_path / "readings.json").read_text())
    with (tmp_path / "readings.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(found["rows"]) and float(lines[0]["error"]) == found["rows"][0]["error"]
    pictures = sorted(tmp_path.glob("*.png"))
    assert len(pictures) == 4 and all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)


def test_pictures_have_the_whole_name_of_a_case(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    titles = []
    for name in ("scatter", "over_time"):
        monkeypatch.setattr(portraits, name, lambda path, title, *_: titles.append(title))
    found = json.loads(run(*TINY, "--out", str(tmp_path), "--json", "-").stdout)
    assert set(titles) == {f"{row['case']} fp32" for row in found["rows"]} and len(titles) == 4


def test_a_title_is_whole_and_fits(monkeypatch, tmp_path):
    """Draw the longest name over one panel and over all panels."""
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    case = max(cases.covering(cases.QUICK), key=lambda case: len(str(case)))
    one = readings.examine("x", CASE, torch.float32, {"gdn": load_provider("gdn")}, device=CPU)
    only = replace(one, outputs={"gdn": {"o": one.outputs["gdn"]["o"]}})
    for examined in (one, only):
        verify._draw(tmp_path, f"000 {case} fp32", examined, CASE)
    assert len(drawn) == 4
    for picture in drawn:
        picture.draw_without_rendering()
        title = picture._suptitle
        assert title.get_text().replace("\n", " ") == f"{case} fp32"
        box = title.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= picture.bbox.x1 and box.y1 <= picture.bbox.y1


def test_verify_fails_on_a_wrong_answer(monkeypatch):
    right = verify.ENTRIES["chunk"]

    def wrong(*args, **options):
        o, S = right(*args, **options)
        return o * 1.01, S * float("nan")

    monkeypatch.setitem(verify.ENTRIES, "chunk", wrong)
    done = run(*TINY)
    assert done.exit_code == 1 and "fails" in done.stdout
    found = json.loads(run(*TINY, "--json", "-").stdout)
    states = {row["error"] for row in found["rows"] if row["output"] == "final_state"}
    assert not found["ok"] and states == {None}


def test_reasons_are_printed_as_they_are(monkeypatch):
    def refuse(tensors, options):
        raise NotImplementedError("needs [B, T] and [/no]")

    both = {"gdn": gdn_provider(), "fla": Provider("fla", {"train": refuse})}
    monkeypatch.setattr(verify, "_providers", lambda *_: (both, {}))
    done = run(*TINY)
    assert done.exit_code == 0 and "needs [B, T] and [/no]" in done.stdout.replace("\n", " "), done.output


def test_verify_says_why_a_backend_refuses():
    done = run(*TINY, "--providers", "gdn:triton")
    assert done.exit_code == 1 and "not supported" in done.stdout and "triton" in done.stdout


def test_a_wrong_peer_is_no_fault_of_ours(monkeypatch):
    monkeypatch.setattr(verify, "_providers", lambda *_: ({"gdn": gdn_provider(), "fla": LIES["zeros"]}, {}))
    done = run(*TINY)
    assert done.exit_code == 0 and "fails" in done.stdout, done.output


def test_a_better_peer_is(monkeypatch):
    worse = liar(lambda o, S: (o * 1.000005, S), "gdn")
    monkeypatch.setattr(verify, "_providers", lambda *_: ({"gdn": worse, "fla": gdn_provider()}, {}))
    done = run(*TINY)
    assert done.exit_code == 1 and "less accurate than a peer" in done.stdout, done.output


def test_ptos_profile_asks_its_own_gates_alone(monkeypatch):
    """Less accurate than a peer by more than 10 %, and within pto-kernels' gates."""
    worse = liar(lambda o, S: (o * 1.000005, S), "gdn")
    monkeypatch.setattr(verify, "_providers", lambda *_: ({"gdn": worse, "fla": gdn_provider()}, {}))
    done = run(*TINY, "--profile", "pto")
    assert done.exit_code == 0 and "less accurate than a peer" not in done.stdout, done.output


def test_a_failure_of_ours_fails(monkeypatch):
    broken = Provider("gdn", {"train": lambda tensors, options: 1 / 0})
    both = {"gdn": broken, "gdn:eager": gdn_provider("eager")}
    monkeypatch.setattr(verify, "_providers", lambda *_: (both, {}))
    done = run(*TINY)
    assert done.exit_code == 1 and "ZeroDivisionError" in done.stdout


def test_peers_take_their_part_and_rows_are_kept(monkeypatch, tmp_path):
    for name, module in stub_peers.modules().items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
        module.__spec__ = importlib.util.spec_from_loader(name, None)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    small = replace(readings.DISTRIBUTIONS["mild"], heads=(1, 2), lengths=packed(70))
    monkeypatch.setitem(readings.NAMED, "distributions", {"mild": small, "slow": replace(small, gate="slow")})
    done = run("verify", "--set", "distributions", "--only", "mild", "--append", "--device", "cpu")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "cpu.jsonl").read_text().splitlines()]
    *judged, last = rows
    assert [row["provider"] for row in judged] == [name for name in PROVIDERS if name != "flash_kda"]
    assert all(row["pass"] == "accuracy" and row["case"] == "mild" for row in rows)
    assert all(row["ok"] for row in judged)
    # its problems have a decay per key channel
    assert last["provider"] == "flash_kda" and "per key channel" in last["refused"] and not last["ok"]
    assert (
        rows[0]["backend"] == "eager"
        and rows[0]["of_best_peer"]
        and rows[3]["errors"].keys() == {"o", "final_state"}
    )


def test_a_part_goes_on_where_it_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr("gdn.cli.environment.commit", lambda: "abc")
    small = replace(readings.DISTRIBUTIONS["mild"], heads=(1, 2), lengths=packed(20))
    monkeypatch.setitem(readings.NAMED, "distributions", {"mild": small, "slow": replace(small, gate="slow")})
    arguments = [
        "verify",
        "--set",
        "distributions",
        "--providers",
        "gdn",
        "--append",
        "--device",
        "cpu",
        "--resume",
    ]
    late = run(*arguments, "--minutes", "0")
    assert late.exit_code == 1 and "out of time" in late.stdout and not (tmp_path / "cpu.jsonl").exists()
    assert run(*arguments, "--only", "slow").exit_code == 0 and run(*arguments).exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "cpu.jsonl").read_text().splitlines()]
    assert [row["case"] for row in rows] == ["slow", "mild"]
    again = run(*arguments)
    assert again.exit_code == 0 and "measured before" in again.stdout, again.output
    assert "measured before" not in run(*arguments, "--dtype", "fp32").stdout
    assert "measured before" in run(*arguments, "--dtype", "fp32").stdout
    monkeypatch.setattr("gdn.cli.environment.commit", lambda: None)
    assert "measured before" not in run(*arguments).stdout
    elsewhere = ["--results", str(tmp_path / "x.jsonl"), "--commit", "abc"]
    assert "measured before" not in run(*arguments, *elsewhere).stdout
    assert "measured before" in run(*arguments, *elsewhere).stdout


def test_who_refuses_or_fails_is_not_asked_again(monkeypatch, tmp_path):
    who = {"gdn": gdn_provider(), **{name: Provider(name, {"train": NO[name]}) for name in NO}}
    monkeypatch.setattr(verify, "_providers", lambda *_: (who, {}))
    arguments = [*TINY, "--results", str(tmp_path / "x.jsonl"), "--commit", "abc", "--resume"]
    assert run(*arguments).exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [row["provider"] for row in rows] == ["gdn", "fla", "flash_qla"] * 2
    assert [row["ok"] for row in rows[:3]] == [True, False, False]
    assert rows[1]["refused"] == "only on Sundays" and rows[2]["failed"].startswith("ZeroDivision")
    assert "measured before" in run(*arguments).stdout


def test_rows_say_their_set_and_profile(monkeypatch, tmp_path):
    """One name in three sets is three problems; rows of `distributions` keep the pass accuracy."""
    tiny = {"16/16 20,30": replace(CASE, gate="strong")}
    for name in ("distributions", "ladders", "pto"):
        monkeypatch.setitem(readings.NAMED, name, tiny)
    arguments = ["--device", "cpu", "--providers", "gdn", "--results", str(tmp_path / "x.jsonl"), "--dtype"]
    arguments += ["bf16", "--commit", "abc", "--resume"]
    sets = (["distributions"], ["ladders"], ["pto"], ["distributions", "--profile", "pto"])
    for _ in range(2):
        assert [run("verify", "--set", *one, *arguments).exit_code for one in sets] == [0] * 4
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [(row["pass"], row["set"], row["profile"]) for row in rows] == [
        ("accuracy", "distributions", "gdn"), ("accuracy:ladders", "ladders", "gdn"),
        ("accuracy:pto", "pto", "pto"), ("accuracy:distributions:pto", "distributions", "pto"),
    ]  # fmt: skip


def test_ptos_set_brings_its_profile_and_dtypes(monkeypatch):
    small = {"16/16 20,30": replace(CASE, gate="strong")}
    monkeypatch.setitem(readings.NAMED, "pto", small)
    found = json.loads(
        run("verify", "--set", "pto", "--device", "cpu", "--providers", "gdn", "--json", "-").stdout
    )
    assert found["ok"] and found["profile"] == "pto"
    assert {row["dtype"] for row in found["rows"]} == {"float16", "bfloat16"}


def test_verify_takes_a_sample_of_the_full_product():
    done = run("verify", "--set", "full", "--max-cases", "0", "--json", "-")
    assert done.exit_code == 1 and json.loads(done.stdout)["rows"] == []


@pytest.mark.parametrize(
    "wrong",
    [["--dtype", "int8"], ["--entry", "x"], ["--set", "x"], ["--providers", "x"], ["--profile", "x"]],
)
def test_wrong_arguments_are_refused(wrong):
    assert run("verify", "--max-cases", "1", *wrong).exit_code != 0
