"""The judge is judged: cases meet every pair and are what they claim, wrong answers are refused."""

import json
import math
import socket
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations

import pytest
import torch

import gdn
from gdn import reference
from gdn.problem import parse
from gdn.testing import Case, Lengths, accuracy, cases, inputs, packed, rows
from gdn_bench.timing import measure

right = gdn.chunk_gated_delta_rule
CASE = Case("slow", lengths=rows(130), heads=(2, 4), sizes=(16, 8), state="wide")


# cases


@pytest.mark.parametrize(
    "factors, max_cost", [(cases.FACTORS, 2**25), (cases.QUICK, math.inf)], ids=["whole", "quick"]
)
def test_covering_meets_every_pair(factors, max_cost):
    found = cases.covering(factors, max_cost=max_cost)
    assert found == cases.covering(factors, max_cost=max_cost)
    assert set(cases.pairs(factors)) <= set().union(*(cases.met(case, factors) for case in found))
    assert all(case.cost <= max_cost for case in found)
    assert len(found) < 200


def test_pairs_are_those_that_accuracy_asks_for():
    names = {frozenset((a, b)) for (a, _), (b, _) in cases.pairs(cases.QUICK)}
    inputs, shape = {"gate", "keys"}, {"lengths", "heads", "sizes"}
    options = set(cases.FACTORS) - inputs - shape
    wanted = [{a, b} for a in inputs for b in shape | options] + [set(p) for p in combinations(options, 2)]
    assert names >= {frozenset(pair) for pair in wanted}


def test_every_case_is_a_valid_call():
    for case in cases.covering(cases.QUICK) + cases.sample(20):
        given = inputs(
            replace(case, lengths=packed(0, 3, 2) if case.lengths.ends else rows(3)), torch.bfloat16
        )
        parse(**given.tensors, **given.options)


@pytest.mark.parametrize(
    "keys, cosine", [("random", 0), ("correlated", 0.8), ("identical", 1), ("negative", 0.8)]
)
def test_keys_have_the_cosine_they_claim(keys, cosine):
    case = Case(keys=keys, beta="negative", state="wide", sizes=(128, 16), use_qk_l2norm_in_kernel=True)
    given = inputs(case, torch.float64)
    k = torch.nn.functional.normalize(given.tensors["k"][0, :, 0], dim=-1)
    assert float((k @ k.T).fill_diagonal_(cosine).mean()) == pytest.approx(cosine, abs=0.02)
    beta = 2 * given.tensors["beta"].sigmoid()
    if keys in ("identical", "negative"):
        assert beta.allclose(torch.tensor({"identical": 1.0, "negative": 1.9}[keys], dtype=torch.float64))


@pytest.mark.parametrize("gate", [name for name in cases.GATES if name != "absent"])
@pytest.mark.parametrize("raw_gate", ["on", "no_bias"])
def test_raw_logits_make_the_same_decays(gate, raw_gate):
    ready = inputs(replace(CASE, gate=gate), torch.float64).tensors
    raw = inputs(replace(CASE, gate=gate, raw_gate=raw_gate), torch.float64).tensors
    torch.testing.assert_close(reference.gate(raw["g"], raw["A_log"], raw.get("dt_bias")), ready["g"])
    assert (ready["g"] <= 0).all() and bool((ready["g"] == -1e6).any()) == (gate == "reset")


def test_strided_inputs_are_views_of_one_projection():
    tensors = inputs(replace(CASE, is_strided=True), torch.float32).tensors
    q, k, v = (tensors[name] for name in "qkv")
    assert not any(x.is_contiguous() for x in (q, k, v))
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


# the gate


def zero_output(*args, **options):
    o, S = right(*args, **options)
    return o * 0, S


def dropped_initial_state(*args, **options):
    return right(*args, **options | {"initial_state": options["initial_state"] * 0})


def zero_final_state(*args, **options):
    o, S = right(*args, **options)
    return o, S * 0


def dropped_chunk(q, k, v, g, beta, **options):
    written = torch.ones(q.shape[1], 1)
    written[64:128] = 0
    return right(q, k, v, g, beta * written, **options)


def swapped_heads(*args, **options):
    o, S = right(*args, **options)
    return o[:, :, [1, 0, 2, 3]], S


def swapped_groups(q, k, *args, **options):
    return right(q.flip(2), k.flip(2), *args, **options)


def state_reset_per_chunk(q, k, v, g, beta, **options):
    outputs = []
    for i in range(0, q.shape[1], 64):
        o, S = right(*(x[:, i : i + 64] for x in (q, k, v, g, beta)), **options)
        outputs.append(o)
    return torch.cat(outputs, 1), S


def no_decay(q, k, v, g, beta, **options):
    return right(q, k, v, g * 0, beta, **options)


def unwritten_token(*args, **options):
    o, S = right(*args, **options)
    holes = torch.empty_like(o)
    return torch.cat([o[:, :-1], holes[:, -1:]], 1), S


def no_gradient_of_keys(q, k, *args, **options):
    return right(q, k.detach(), *args, **options)


def no_gradient_through_state(*args, **options):
    o, S = right(*args, **options)
    return o, S.detach() + 0 * o.sum()


def narrowed_state(*args, **options):
    o, S = right(*args, **options)
    return o, S.bfloat16()


WRONG = {
    zero_output: "o", dropped_initial_state: "o", zero_final_state: "final_state", dropped_chunk: "o",
    swapped_heads: "o", swapped_groups: "dq", state_reset_per_chunk: "o", no_decay: "o", unwritten_token: "o",
    no_gradient_of_keys: "dk", no_gradient_through_state: "dv", narrowed_state: "final_state",
}  # fmt: skip


def test_the_right_answer_passes():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        found = accuracy.check(right, CASE, dtype)
        assert [row.output for row in found] == ["o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0"]
        assert all(row.ok for row in found), found


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_wrong_answers_are_refused(wrong, dtype):
    failed = {row.output for row in accuracy.check(wrong, CASE, dtype) if not row.ok}
    assert WRONG[wrong] in failed


def test_fewer_heads_of_a_large_problem_still_see_a_wrong_one():
    def last_head_wrong(*args, **options):
        o, S = right(*args, **options)
        return torch.cat([o[:, :, :-1], o[:, :, -1:] * 1.1], 2), S

    case = replace(CASE, heads=(4, 8))
    assert all(row.ok for row in accuracy.check(right, case, torch.float32, budget=case.cost // 2))
    failed = [
        row
        for row in accuracy.check(last_head_wrong, case, torch.float32, budget=case.cost // 2)
        if not row.ok
    ]
    assert failed


def test_floor_only_saves_what_has_vanished():
    ref = torch.tensor([1e-12, 0.0], dtype=torch.float64)
    noise = ref + 1e-9
    assert (
        accuracy.measure_error(noise, ref, 1e-5, lambda: 1.0)[0]
        < 1e-5
        < accuracy.measure_error(noise, ref, 1e-5, lambda: 0.0)[0]
    )
    assert accuracy.measure_error(0 * ref, 0 * ref, 1e-5, lambda: 0.0) == (0.0, 0.0)
    assert accuracy.measure_error(noise, 0 * ref, 1e-5, lambda: 0.0)[0] == math.inf
    assert accuracy.measure_error(ref * math.nan, ref, 1e-5, lambda: 1.0)[0] == math.inf


def test_gates_follow_dtype_and_keys():
    bf16, fp16 = (accuracy.error_limits(dtype, "random") for dtype in (torch.bfloat16, torch.float16))
    assert set(bf16) == set(accuracy.OUTPUTS) and all(fp16[name] == bf16[name] / 2 for name in bf16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        correlated = accuracy.error_limits(dtype, "correlated")
        assert all(limit > accuracy.error_limits(dtype, "random")[name] for name, limit in correlated.items())
        for keys in ("identical", "negative"):
            assert accuracy.error_limits(dtype, keys) == pytest.approx(
                {name: 3 * x for name, x in correlated.items()}
            )


# times


def test_interleaved_runs_each_as_often_as_asked():
    order = []
    found = measure.interleaved(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, {"a": 4, "b": 2}, cold="ab"
    )
    assert order.count("a") == 4 and order.count("b") == 2 and order != sorted(order)
    assert {name: t.runs for name, t in found.items()} == {"a": 4, "b": 2}
    assert measure.times([5, 1, 2, 3, 4, 0]) == measure.Times(1, 2, 4, 6)


def test_interleaved_times_nothing_but_the_function_and_alternates():
    """A context is entered before the clock of its function starts; each second round is reversed."""
    events = []

    @contextmanager
    def within(name):
        events.append(f"enter {name}")
        yield
        events.append(f"leave {name}")

    functions = {name: lambda name=name: events.append(name) for name in "ab"}
    contexts = {"a": lambda: within("a")}
    clock = lambda: events.append("clock") or 0.0  # noqa: E731
    measure.interleaved(functions, {"a": 2, "b": 2}, cold="ab", clock=clock, contexts=contexts)
    a, b = ["enter a", "clock", "a", "clock", "leave a"], ["clock", "b", "clock"]
    assert events == [*a, *b, *b, *a]


def test_rows_are_json_and_never_name_the_machine(tmp_path):
    for _ in range(2):
        measure.append(tmp_path / "deep" / "x.jsonl", [measure.environment()])
    lines = (tmp_path / "deep" / "x.jsonl").read_text().splitlines()
    assert len(lines) == 2 and socket.gethostname() not in lines[0]
    assert {"date", "versions", "commit", "cpu", "threads"} == set(json.loads(lines[0]))


def test_no_time_for_a_wrong_answer(monkeypatch):
    pytest.importorskip("transformers")
    from gdn_bench.passes import cpu
    from gdn_bench.providers import fallback

    monkeypatch.setattr(cpu, "CASE", replace(cpu.CASE, heads=(2, 2), sizes=(16, 16)))
    providers = {cpu.FALLBACK: fallback.chunk(), "gdn": right, "wrong": zero_output}
    for name in ("forward", "forward+backward"):
        found = list(cpu.run(cpu.Job(name, 100, 1, providers, dict.fromkeys(providers, 3))))
        assert [("ms" in row) for row in found] == [True, True, False]
        assert found[1]["ratio"][cpu.FALLBACK] > 0
    monkeypatch.setattr(cpu, "CHANNELS", replace(cpu.CHANNELS, heads=(2, 2), sizes=(16, 16)))
    providers = {cpu.FALLBACK: fallback.chunk_channels(), "gdn": right}
    found = list(cpu.run(cpu.Job("kda forward+backward", 100, 1, providers, dict.fromkeys(providers, 3))))
    assert found[1]["ratio"][cpu.FALLBACK] > 0 and found[1]["HV"] == 2
    steps = {cpu.FALLBACK: fallback.recurrent(), "gdn": cpu.decode_in_place}
    found = list(cpu.run(cpu.Job("decode", 1, 2, steps, dict.fromkeys(steps, 3))))
    assert all(row["p20"] <= row["ms"] <= row["p80"] for row in found)


def test_fallback_is_the_original_even_when_patched():
    pytest.importorskip("transformers")
    from gdn_bench.providers import fallback

    with gdn.patch_transformers():
        fallback.function.cache_clear()
        assert "for i in range(num_chunks)" in __import__("inspect").getsource(fallback.chunk())


@pytest.mark.slow
def test_demo_learns_draws_and_compares(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    import train_small as demo

    for name, value in {"T": 64, "LONG": 128, "WRITTEN": 5, "COMPARED": 3}.items():
        monkeypatch.setattr(demo, name, value)
    result = demo.run(tmp_path, device=torch.device("cpu"), steps=6)
    assert result.losses[-1] < result.losses[0] and len(result.losses) == 6
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(result.speeds) == 4 and all(x > 0 for _, *speeds in result.speeds for x in speeds)
    assert result.logit_difference < 1e-3


def test_lengths_count_sequences():
    assert (
        packed(2, 0, 3, tail=4) == Lengths(9, 1, (0, 2, 2, 5)) and packed(2, 0, 3).N == 3 and rows(5).N == 2
    )
