"""The whole layer and whole models: the same weights for everybody, wrong ones refused, who serves what."""

import contextlib
import copy
import importlib.util
import json
from dataclasses import replace

import pytest
import torch
from kit import stub_peers

pytest.importorskip("transformers")
pytest.importorskip("typer")

from typer.testing import CliRunner

import gdn
from gdn.cli.app import build_app
from gdn_bench.passes import end_to_end, gpu, layer, model
from gdn_bench.passes.layer import Held, Shape
from gdn_bench.problems import catalog
from gdn_bench.providers import fallback, models
from gdn_bench.providers.load import load_provider
from gdn_bench.providers.names import PEERS
from gdn_bench.results import rows, tables
from gdn_bench.timing import graph, kernels

CPU = torch.device("cpu")
SHAPE = Shape(48, (2, 4), 16, 150)
SIZE = end_to_end.Size(48, 4, 64, 96, (2, 4), 16, (4, 2, 16))


@pytest.fixture
def peers(monkeypatch):
    for name, module in stub_peers.modules().items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
        module.__spec__ = importlib.util.spec_from_loader(name, None)


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(graph, "ROUNDS", (2, 2))
    monkeypatch.setattr(layer, "JUDGED_TOKENS", 100)
    found = gpu.Session(("gdn", "gdn:eager", "transformers"), CPU)
    found.ceilings = {"copy": 1e9, "matmul": 1e9}
    return found


# the layer


def test_every_layer_holds_the_same_weights(peers, session):
    session.providers |= {"fla": load_provider("fla")}
    for job in layer.JOBS:
        found = layer.measured(session, SHAPE, job)
        assert [row["provider"] for row in found] == ["gdn", "gdn:eager", "transformers", "fla"]
        assert all(row["ok"] and row["ms"] > 0 for row in found), found
        assert set(found[0]["ratio"]) == {"fla", "transformers"}
        assert {row["error"] for row in found[:2]} == {found[0]["error"]}
    table = tables.build_table("layer", [{"pass": "layer", **row} for row in found])
    assert len(table.lines) == 2 and all(len(line) == len(table.columns) for line in table.lines)


def test_a_wrong_layer_has_no_time(session):
    def held(change):
        module = gdn.GatedDeltaNet(48, 2, 4, 16, 16, dtype=torch.bfloat16)
        torch.manual_seed(0)
        right = gdn.GatedDeltaNet(48, 2, 4, 16, 16, dtype=torch.bfloat16)
        module.load_state_dict(right.state_dict())
        return lambda law, shape: Held(lambda x: change(module(x), x), module)

    wrong = {
        "right": held(lambda y, x: y),
        "zeros": held(lambda y, x: y * 0),
        "late": held(lambda y, x: torch.cat([y[:, 1:], y[:, :1]], 1)),
        "no gradient": held(lambda y, x: y.detach() + 0 * x),
        "nan": held(lambda y, x: y / 0),
    }
    found = {row["provider"]: row for row in layer.measured(session, SHAPE, "forward", wrong)}
    assert ["ms" in row for row in found.values()] == [True, False, False, False, False]
    assert not any(row["ok"] for name, row in found.items() if name != "right")


def test_layers_are_measured_once(session, monkeypatch):
    """Those that are absent are not waited for; one that cannot be made has a row."""
    monkeypatch.setattr(layer, "transformers", lambda law, shape: 1 / 0)
    session.absent = {"fla": "not installed"}
    session.names = ("gdn", "fla", "flashinfer", "transformers")
    session.providers = {name: session.providers[name] for name in ("gdn", "transformers")}
    about = {"commit": "abc", "gpu": None}
    found = [{**row, **about} for row in layer.run(session, SHAPE)]
    assert ["ZeroDivisionError" in row.get("failed", "") for row in found] == [False, True] * 2
    session.done = frozenset(rows.done(found, about))
    assert list(layer.run(session, SHAPE)) == []


def test_what_a_layer_costs():
    one, both = (layer.cost(Shape(), with_backward) for with_backward in (False, True))
    projections = 2 * 16384 * 2048 * (2 * 16 * 128 + 3 * 32 * 128 + 64)
    assert one.flop > projections and 3 < both.flop / one.flop < 4 and both.bytes == 3 * one.bytes


# models


def test_plain_is_the_files_own_and_leaves_no_trace():
    module = __import__("importlib").import_module(fallback.FILE)
    before = {name: getattr(module, name) for name in models.FUNCTIONS}
    with gdn.patch_transformers(), models.plain():
        assert all(getattr(module, name) is fallback.function(name) for name in models.FUNCTIONS)
    assert all(getattr(module, name) is function for name, function in before.items())


def test_who_serves(peers, monkeypatch):
    found, absent = models.serving(("gdn", "fla", "flashinfer", "transformers"))
    assert list(found) == ["gdn", "fla", "transformers"] and not absent
    monkeypatch.setitem(PEERS, "fla", replace(PEERS["fla"], module="no_such_package"))
    assert models.serving(("fla",)) == ({}, {"fla": "not installed"})
    with pytest.raises(ValueError, match="expected some of"):
        models.serving(("flow",))


@pytest.fixture(scope="module")
def pair():
    model = end_to_end.build(SIZE, CPU, torch.bfloat16)
    return model, copy.deepcopy(model).float()


def test_a_model_is_judged_then_timed(session, pair, monkeypatch):
    monkeypatch.setattr(end_to_end, "ROUNDS", 1)
    served, _ = models.serving(("gdn", "transformers"))
    found = {row["provider"]: row for row in end_to_end.swept(session, served, pair, 70, 4)}
    for row in found.values():
        assert row["ok"] and row["same_tokens"] == 1 and row["tokens_per_s"] == pytest.approx(4e3 / row["ms"])
        assert row["first_token_ms"] > 0 and 0 < row["logit_error"] < 0.5
    assert set(found["gdn"]["ratio"]) == {"transformers"} and not gdn.patch_transformers().undo()
    table = tables.build_table("e2e", [{"pass": "e2e", "case": "x", **row} for row in found.values()])
    assert len(table.lines) == 2 and all(len(line) == len(table.columns) for line in table.lines)


def test_a_model_that_forgets_its_state_has_no_time(session, pair, monkeypatch):
    monkeypatch.setattr(end_to_end, "ROUNDS", 1)
    module = __import__("importlib").import_module(fallback.FILE)
    right = fallback.recurrent()

    def forgetful(*args, **options):
        return right(*args, **{**options, "initial_state": None})

    class Forgetting:
        def __enter__(self):
            self.held = module.torch_recurrent_gated_delta_rule
            module.torch_recurrent_gated_delta_rule = forgetful

        def __exit__(self, *error):
            module.torch_recurrent_gated_delta_rule = self.held

    (row,) = end_to_end.swept(session, {"liar": Forgetting}, pair, 70, 4)
    assert not row["ok"] and "ms" not in row and row["rms_error"] > 0.05


def test_tokens_count_where_they_are_decided():
    reference = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.4, 0.0]])
    close = end_to_end.compared(reference + torch.tensor([[0.1, 0.0, 0.0], [0.0, 0.2, 0.0]]), reference)
    assert close["logit_error"] == pytest.approx(0.2) and close["decided"] == 0.5
    assert close["same_tokens"] == 1.0 and close["same_all"] == 0.5
    assert not end_to_end.compared(reference * float("nan"), reference)["rms_error"] <= 1


def test_a_model_that_picks_another_token_has_no_time(session, pair, monkeypatch):
    """Two logits exchanged at one position: no error on the average, and decided by no error of its own."""
    monkeypatch.setattr(end_to_end, "ROUNDS", 1)
    margins = []

    class Liar:
        """Exchanges the two best logits of the call whose margin was the largest before, none at first."""

        def __enter__(self):
            at, calls = margins.index(max(margins)) if margins else None, iter(range(99))

            def exchange(head, inputs, logits):
                best = logits[0, -1].topk(2)
                if next(calls) == at:
                    logits[0, -1, best.indices] = best.values.flip(0)
                elif at is None:
                    margins.append(float(best.values[0] - best.values[1]))
                return logits

            self.hook = pair[0].lm_head.register_forward_hook(exchange)

        def __exit__(self, *error):
            self.hook.remove()

    with Liar(), models.plain(), torch.no_grad():
        generator = torch.Generator().manual_seed(70)
        tokens = torch.randint(1, SIZE.vocabulary, (1, 82), generator=generator)
        end_to_end.forced(pair[0], tokens, 70)
    (row,) = end_to_end.swept(session, {"liar": Liar}, pair, 70, 12)
    assert not row["ok"] and "ms" not in row, row
    assert row["same_tokens"] == 1 and row["decided_plain"] > 0 and row["same_plain"] < 1, row
    assert row["share_of_limit"] <= 1, row


def test_who_errs_more_than_plain_torch_and_elsewhere_picks_another_token_is_wrong():
    plain = {"rms_error": 1e-2, "logit_error": 0.1}
    right = {"rms_error": 1e-2, "logit_error": 0.3, "same_tokens": 1.0, "same_plain": 1.0}
    assert end_to_end.is_right(right, plain)
    assert not end_to_end.is_right({**right, "same_plain": 0.99}, plain)
    assert end_to_end.is_right({**right, "same_plain": 0.99, "logit_error": 0.19}, plain)
    assert not end_to_end.is_right({**right, "rms_error": 3e-2}, plain)
    assert not end_to_end.is_right({**right, "same_tokens": 0.99}, plain)
    assert not end_to_end.is_right({**right, "rms_error": float("nan")}, plain)


def test_both_commands_append_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "ROUNDS", (1, 1))
    monkeypatch.setattr(end_to_end, "ROUNDS", 1)
    monkeypatch.setattr(layer.run, "__defaults__", (replace(SHAPE, tokens=70),))
    monkeypatch.setattr(end_to_end.run, "__defaults__", (SIZE,))
    monkeypatch.setattr(model, "ROUNDS", 1)
    monkeypatch.setattr(model.run, "__defaults__", (replace(SIZE, layers=1), 20))
    monkeypatch.setattr(kernels, "profile", lambda *_: [("aten::mm", 1.0)])
    monkeypatch.setattr(catalog, "PROMPTS", (40,))
    monkeypatch.setattr(catalog, "STEPS", 3)
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--out", str(out), "--commit", "abc"]
    for job, count in (("layer", 4), ("e2e", 2), ("model", 2)):
        done = CliRunner().invoke(build_app(), ["bench", job, *options])
        assert done.exit_code == 0 and "transformers" in done.stdout.lower(), done.output
        held = [json.loads(line) for line in out.read_text().splitlines()]
        assert len([row for row in held if row["pass"] == job and row["ok"] and row["ms"] > 0]) == count
        done = CliRunner().invoke(
            build_app(), ["bench", job, *options, "--resume", "--providers", "gdn,transformers"]
        )
        assert done.exit_code == 0 and len(out.read_text().splitlines()) == len(held), done.output
    wrong = CliRunner().invoke(build_app(), ["bench", "e2e", *options, "--providers", "flow"])
    assert wrong.exit_code == 2


@contextlib.contextmanager
def reversed_rule():
    """Run the model file on plain PyTorch, with outputs of the rule in reverse order."""
    module = importlib.import_module(fallback.FILE)
    with models.plain():
        function = module.torch_chunk_gated_delta_rule

        def reverse(*args, **options):
            o, state = function(*args, **options)
            return o.flip(1), state

        module.torch_chunk_gated_delta_rule = reverse
        yield


def test_a_training_step_is_judged_timed_and_profiled(session, monkeypatch):
    """Wrong gradients have no time; a profile counts each kernel once."""
    monkeypatch.setattr(model, "ROUNDS", 1)
    served, _ = models.serving(("gdn",))
    served["wrong"] = reversed_rule
    small = end_to_end.build(replace(SIZE, layers=1), CPU, torch.bfloat16)
    right, wrong = model.measured(session, served, small, 20)
    assert not wrong["ok"] and "ms" not in wrong and wrong["error"] > 0.1
    assert right["ok"] and right["ms"] > 0 and right["kinds"]["matmuls"] > 0
    assert sum(right["kinds"].values()) >= sum(right["kernels"].values()) * 0.999
    table = tables.build_table("model", [{"pass": "model", "case": "x", **row} for row in (right, wrong)])
    assert len(table.lines) == 2 and all(len(line) == len(table.columns) for line in table.lines)


def test_kinds_of_kernels():
    names = {
        "gradients_kernel": "rule, backward", "persistent_scan_kernel": "rule, forward",
        "_conv_bwd_kernel": "convolution", "_norm_kernel": "norms", "chunk_fwd_kernel_o": "rule, forward",
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT": "matmuls", "add_kernel": "other",
        "void at::native::vectorized_elementwise_kernel<4": "elementwise",
    }  # fmt: skip
    assert {name: kernels.kind_of(name) for name in names} == names
    assert kernels.by_kind([("x", 1.0), ("y", 2.0), ("_norm_kernel", 3.0)]) == {"norms": 3.0, "other": 3.0}
