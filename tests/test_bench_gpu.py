"""`gdn bench` without a GPU: problems, stand-ins for peers, wrong answers, times, rows."""

import ast
import contextlib
import importlib.util
import inspect
import json
import math
import subprocess
import time
from dataclasses import make_dataclass, replace
from pathlib import Path

import pytest
import torch
from kit import stub_peers

import gdn
from gdn.testing import Lengths, accuracy, inputs, packed
from gdn_bench.passes import gpu
from gdn_bench.problems import catalog, jobs, workloads
from gdn_bench.providers.gdn_calls import gdn_provider
from gdn_bench.providers.load import load_provider
from gdn_bench.providers.names import PEERS, PROVIDERS
from gdn_bench.providers.peers import gather_pool
from gdn_bench.providers.provider import Bound, Provider
from gdn_bench.results import rows as rows_of
from gdn_bench.results import tables
from gdn_bench.timing import coldstart, graph, hosttime, measure

CPU = torch.device("cpu")
BF16 = torch.bfloat16
RULE = replace(catalog.MIXED, heads=(1, 4), lengths=packed(70, 70))
TINY = replace(RULE, sizes=(16, 16), heads=(2, 4))
STEP = replace(catalog.STEP, heads=(1, 4), lengths=Lengths(1, 3))
KDA = replace(RULE, heads=(2, 2), **catalog.VARIANTS["kda-gated"])


@pytest.fixture
def peers(monkeypatch):
    """Peers that are there: stand-ins for all three."""
    for name, module in stub_peers.modules().items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
        module.__spec__ = importlib.util.spec_from_loader(name, None)


@pytest.fixture
def small(monkeypatch):
    """Two targets per job, of a size for a CPU."""
    found = {}
    for job, rows in workloads.WORKLOADS.items():
        lengths = Lengths(1, 3) if job == "decode" else packed(70, 70)
        found[job] = tuple(
            replace(t, case=replace(t.case, sizes=(16, 16), heads=(2, 4), lengths=lengths)) for t in rows[:2]
        )
    monkeypatch.setattr(gpu, "WORKLOADS", found)
    monkeypatch.setattr(graph, "ROUNDS", (2, 2))
    return found


# problems


@pytest.mark.parametrize(
    "job, count, name, limit",
    [
        ("prefill", 12, "16/32 1x32768", 0.22), ("prefill", 12, "2/8 1x8192", 0.014),
        ("prefill", 12, "16/32 8x1024", 0.055), ("prefill", 12, "16/16 16x16384", 1.0),
        ("prefill", 12, "16/64 4x8192", 0.44), ("train", 3, "16/32 1x32768", 0.88),
        ("decode", 12, "B=256 fp32", 0.252),
    ],
)  # fmt: skip
def test_limits_are_those_of_the_table(job, count, name, limit):
    """At 4,254 GB/s and 779 TFLOP/s."""
    rows = {t.name: t for t in workloads.WORKLOADS[job]}
    cost = rows[name].cost
    assert len(rows) == count
    assert 1e3 * max(cost.bytes / 4254e9, cost.flop / 779e12) == pytest.approx(limit, rel=0.04)


def test_a_variant_has_other_gates_or_options():
    first = workloads.PREFILL[0]
    assert first.with_variant("slow").case.gate == "slow"
    assert first.with_variant("gated").case.raw_gate == "on" and first.with_variant("slow").name == first.name
    kda, gated = (first.with_variant(x) for x in ("kda", "kda-gated"))
    assert 1 < kda.cost.bytes / first.cost.bytes < 2
    # two bytes less for each logit of 128 channels and beta
    tokens, HV = first.case.lengths.T, first.case.heads[1]
    assert kda.cost.bytes - gated.cost.bytes == 2 * 129 * tokens * HV


def test_every_problem_of_kda_has_one_value_head_per_key_head():
    assert all(H == HV for H, HV in map(catalog.heads, catalog.SETS["kda"]))


@pytest.mark.parametrize("is_raw", [False, True])
def test_prompts_on_a_pool(is_raw):
    """gdn's prefill and a peer with gathered states read and write the same slots of a pool."""
    first = workloads.PREFILL[0].with_variant("pool")
    assert (first.job, first.case.state_v_first) == ("pool", True) and first.cost == workloads.PREFILL[0].cost
    gates = {"raw_gate": "on", "beta": "sigmoid"} if is_raw else {}
    given = inputs(replace(TINY, lengths=packed(70, 3), state="wide", state_v_first=True, **gates), BF16)
    own = load_provider("gdn:eager")
    peer = Provider("peer", {"pool": gather_pool(own.binds["prefill"])})
    expected = accuracy.run(own.function("prefill"), given, False)
    for provider in (own, peer):
        found = accuracy.run(provider.function("pool"), given, False)
        assert all(torch.equal(found[name], expected[name]) for name in ("o", "final_state"))
    one, two = jobs.sets("pool", given, 2)
    assert one.tensors["pool"] is two.tensors["pool"] and jobs.backend("gdn", "pool", one) == "eager"


def test_a_decode_on_states_in_int16():
    """The variant has one row for each number of rows; gdn's states stay within an int16's error."""
    session = gpu.Session(("gdn:eager",), torch.device("cpu"))
    found = session.all_workloads("decode:int16")
    assert [(x.job, x.name) for x in found[:2]] == [("int16", "B=1 bf16"), ("int16", "B=8 bf16")]
    assert 1 < found[0].cost.bytes / workloads.DECODE[1].cost.bytes < 1.02
    for v_first in (True, False):
        case = replace(
            found[0].case, heads=(1, 2), sizes=(8, 16), lengths=Lengths(1, 3), state_v_first=v_first
        )
        given, own = inputs(case, BF16), load_provider("gdn:eager")
        exact, results = (accuracy.run(own.function(job), given, False) for job in ("decode", "int16"))
        assert all((results[name] - exact[name]).abs().max() < 2e-2 for name in ("o", "final_state"))
        assert not torch.equal(results["final_state"], exact["final_state"])
        assert jobs.backend("gdn", "int16", given) == "eager"


def test_every_fourth_head_of_the_timed_gates_does_not_decay():
    g = inputs(replace(TINY, heads=(2, 8)), BF16).tensors["g"]
    assert (g[..., 3::4] == 0).all() and (g[..., [0, 1, 2, 4, 5, 6]] < 0).any((0, 1)).all()


def test_numbers_drawn_on_the_device_are_as_good():
    case = replace(TINY, lengths=packed(500), use_qk_l2norm_in_kernel=False)
    first, again = (inputs(case, BF16, is_drawn_there=True).tensors for _ in range(2))
    here = inputs(case, BF16).tensors
    assert all(torch.equal(first[x], again[x]) for x in here)
    for name, x in here.items():
        assert first[name].shape == x.shape and first[name].dtype == x.dtype
        assert first[name].double().std() == pytest.approx(float(x.double().std()), rel=0.1)


@pytest.mark.parametrize("lengths", [packed(5, 0, 30, tail=3), packed(20), Lengths(20, 2)], ids=str)
def test_a_prefix_is_the_start_of_every_sequence(lengths):
    given = inputs(replace(TINY, lengths=lengths), torch.float64)
    short = given.prefix(10)
    whole, part = (
        accuracy.run(accuracy.reference_rule, given, False),
        accuracy.run(accuracy.reference_rule, short, False),
    )
    if lengths.ends is None:
        assert torch.equal(whole["o"][:, :10], part["o"])
    else:
        spans = [
            whole["o"][:, a : min(a + 10, b)] for a, b in zip(lengths.ends, lengths.ends[1:], strict=False)
        ]
        assert torch.equal(torch.cat(spans, 1), part["o"])
    assert short.do.shape == part["o"].shape


@pytest.mark.parametrize(
    "case",
    [
        TINY,
        replace(TINY, lengths=Lengths(9, 3), gate="model", raw_gate="on", beta="sigmoid"),
        replace(TINY, lengths=packed(4, 5)),
        replace(TINY, lengths=packed(7, 7, tail=2), state="none"),
    ],
    ids=str,
)
def test_the_law_side_by_side_is_the_law(case):
    given = inputs(case, torch.float64)
    one, other = (accuracy.run(law, given) for law in (accuracy.reference_rule, accuracy.reference_by_heads))
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-13)


# peers


def expected_refusal(name, case):
    """Return words of the reason for which a peer does not support a case; None for one that it supports."""
    if name == "flash_kda":
        is_per_channel, is_single = case.is_per_channel, case.heads[0] == case.heads[1]
        return None if is_single else "one value head" if is_per_channel else "per key channel"
    if name == "transformers" and case.is_scaled:
        return "scale"
    return "per head" if name in ("flash_qla", "flashinfer") and case.is_per_channel else None


@pytest.mark.parametrize("name", ["gdn", "gdn:eager", *PEERS])
@pytest.mark.parametrize(
    "case",
    [
        RULE,
        replace(RULE, lengths=Lengths(40, 2)),
        replace(RULE, is_scaled=True, use_qk_l2norm_in_kernel=True, exact=False),
        replace(RULE, state_v_first=True),
        replace(RULE, gate="model", raw_gate="on", beta="sigmoid", use_qk_l2norm_in_kernel=True),
        replace(RULE, gate="model", raw_gate="no_bias", beta="negative"),
        replace(RULE, **catalog.VARIANTS["kda"]),
        replace(RULE, **catalog.VARIANTS["kda-rates"]),
        replace(RULE, **catalog.VARIANTS["kda-gated"]),
        replace(RULE, gate="model", raw_gate="on", beta="sigmoid", is_per_channel=True),
        KDA,
        replace(KDA, lengths=Lengths(40, 2), state_v_first=True, is_scaled=True),
    ],
    ids=str,
)
def test_a_provider_is_given_the_same_problem(peers, name, case):
    provider = load_provider(name)
    job = "train" if "train" in provider.binds else "prefill"
    if reason := expected_refusal(name, case):
        with pytest.raises(NotImplementedError, match=reason):
            accuracy.check(provider.function(job), case, BF16)
        return
    rows = accuracy.check(provider.function(job), case, BF16, with_backward=job == "train")
    assert len(rows) >= (8 if job == "train" else 2) and all(row.ok for row in rows), rows


@pytest.mark.parametrize("state", ["wide", "narrow"])
@pytest.mark.parametrize("name", ["gdn", "fla", "flashinfer", "transformers"])
def test_a_decode_steps_the_states_of_its_slots(peers, name, state):
    function = load_provider(name).function("decode")
    if (name, state) == ("fla", "narrow"):
        with pytest.raises(NotImplementedError, match="fp32"):
            accuracy.check(function, replace(STEP, state=state), BF16, with_backward=False)
        return
    rows = accuracy.check(function, replace(STEP, state=state), BF16, with_backward=False)
    assert [row.output for row in rows] == ["o", "final_state"] and all(row.ok for row in rows), rows


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"sizes": (64, 64)}, "K = V = 128"),
        ({"heads": (1, 2)}, "one value head"),
        ({"is_per_channel": False}, "per key channel"),
        ({"use_qk_l2norm_in_kernel": False}, "normalises"),
        ({"raw_gate": "off"}, "logits of g"),
        ({"raw_gate": "on"}, "logits of g"),
        ({"beta": "given"}, "logits of beta"),
        ({"beta": "negative"}, "logits of beta"),
        ({"has_narrow_gates": False}, "logits in bf16"),
        ({"raw_gate": "bound_alone"}, None),
        ({"state": "none"}, None),
        ({"is_strided": True, "lengths": Lengths(20, 2)}, None),
    ],
    ids=str,
)
def test_flash_kda_refuses_other_problems_than_its_own(peers, change, reason):
    function, case = load_provider("flash_kda").function("prefill"), replace(KDA, **change)
    if reason is None:
        assert all(row.ok for row in accuracy.check(function, case, BF16, with_backward=False))
        return
    with pytest.raises(NotImplementedError, match=reason):
        accuracy.check(function, case, BF16, with_backward=False)


def test_flash_kda_gets_no_bound_below_its_own(peers):
    given = inputs(KDA, BF16)
    deep = replace(given, options={**given.options, "lower_bound": -6.0})
    with pytest.raises(NotImplementedError, match="-5 to 0"):
        accuracy.run(load_provider("flash_kda").function("prefill"), deep, False)


@pytest.mark.parametrize("rule, library", [("gated_delta_rule", "QLA"), ("kda", "KDA")])
def test_fla_is_itself(peers, monkeypatch, rule, library):
    module = __import__("sys").modules[f"fla.ops.{rule}.backends.flash_{library.lower()}"]
    switch = getattr(module, f"Flash{library}Backend")
    assert switch().is_enabled()
    assert isinstance(load_provider("fla"), Provider) and not switch().is_enabled()
    monkeypatch.setattr(switch, "forced", True)
    assert f"FLA_FLASH_{library}" in load_provider("fla")


def test_peers_meet_one_offsets_tensor(peers):
    """They keep what they computed from it by identity: with another, it is computed within the capture."""
    found = jobs.sets("prefill", jobs.given(RULE, CPU), 3)
    offsets = {id(one.tensors["cu_seqlens"]) for one in found}
    assert len(offsets) == 1 and found[0].tensors["cu_seqlens"].dtype == torch.int32
    assert len({one.tensors["q"].data_ptr() for one in found}) == 3


def test_absent_peers_are_named_not_raised(monkeypatch):
    for name, peer in PEERS.items():
        if importlib.util.find_spec(peer.module) is None:
            assert load_provider(name) == "not installed"
    monkeypatch.setitem(PEERS, "fla", replace(PEERS["fla"], module="gdn"))
    monkeypatch.setattr("gdn_bench.providers.peers.fla", lambda: 1 / 0)
    assert load_provider("fla") == "ZeroDivisionError: division by zero"
    with pytest.raises(ValueError, match="expected some of gdn, fla"):
        load_provider("flow")


@pytest.mark.parametrize(
    "peer",
    [
        stub_peers.FLA, stub_peers.FLAChannels, stub_peers.FLAStages, stub_peers.FlashQLA,
        stub_peers.FlashKDA, stub_peers.FlashInfer, stub_peers.FlashInferOutputOnly,
        stub_peers.FlashInferReplay,
    ],
)  # fmt: skip
def test_stand_ins_have_the_signatures_of_the_real_ones(peer):
    """Read from their files: importing them needs compilers and devices."""
    for name, path in peer.PATHS.items():
        package, _, rest = path.partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"{package} is not installed")
        tree = ast.parse(Path(spec.submodule_search_locations[0], rest).read_text())
        real = next(x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name).args
        names = [x.arg for x in (*real.args, *real.kwonlyargs)] + ([real.kwarg.arg] if real.kwarg else [])
        assert names == list(inspect.signature(getattr(peer, name)).parameters)


# the gate


def dropping(name, chunk):
    """gdn, one chunk of whose tokens writes nothing."""

    def bind(tensors, options):
        beta = tensors["beta"].clone()
        beta[:, chunk] = 0
        return gdn_provider("eager").binds["prefill"]({**tensors, "beta": beta}, options)

    return Provider(name, {"prefill": bind, "train": bind})


def lying(change):
    """gdn, with something done to what it returns."""

    def bind(tensors, options):
        honest = gdn_provider("eager").binds["prefill"](tensors, options)
        return Bound(lambda: change(*honest()))

    return Provider("liar", {"prefill": bind, "train": bind})


def forgetful(tensors, options):
    """Decodes without writing a state."""
    tensors = {**tensors, "pool": tensors["pool"].clone()}
    kept = {**tensors, "pool": tensors["pool"].clone()}
    bound = gdn_provider("eager").binds["decode"](tensors, options)
    return Bound(bound.run, lambda o: (o, kept["pool"][tensors["read_index"].long()].float()))


def stubborn(tensors, options):
    raise NotImplementedError("only on Sundays")


def broken(tensors, options):
    raise RuntimeError("a kernel\nwith a long story")


LIES = {
    "zeros": lying(lambda o, S: (o * 0, S)),
    "no state": lying(lambda o, S: (o, S * 0)),
    "late tokens": lying(lambda o, S: (torch.cat([o[:, :-1], o[:, :1]], 1), S)),
    "nan": lying(lambda o, S: (o + math.nan, S)),
    "unwritten": lying(lambda o, S: (torch.empty_like(o) + 0 * o, S)),
    "swapped heads": lying(lambda o, S: (o.flip(2), S)),
    "dropped chunk": dropping("liar", slice(0, 64)),
}


def timed(monkeypatch, who, target):
    session = gpu.Session((), CPU)
    session.providers, session.ceilings = (
        {"gdn": gdn_provider("eager"), "other": who},
        {"copy": 1e9, "matmul": 1e9},
    )
    return {row["provider"]: row for row in gpu.timed(session, target)}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("job", ["prefill", "train"])
def test_no_time_for_a_wrong_answer(small, monkeypatch, job, lie):
    rows = timed(monkeypatch, LIES[lie], small[job][0])
    assert rows["gdn"]["ok"] and rows["gdn"]["p20"] <= rows["gdn"]["ms"] <= rows["gdn"]["p80"]
    assert not rows["other"]["ok"] and "ms" not in rows["other"] and rows["other"]["errors"]


def test_no_time_for_a_state_that_is_not_written(small, monkeypatch):
    rows = timed(monkeypatch, Provider("other", {"decode": forgetful}), small["decode"][0])
    assert rows["gdn"]["ok"] and not rows["other"]["ok"] and "ms" not in rows["other"]
    assert rows["other"]["errors"]["final_state"] > 0.1


def test_no_time_for_a_wrong_head_among_those_judged(small, monkeypatch):
    """The head that does not decay is one of them."""
    target = replace(small["prefill"][0], case=replace(small["prefill"][0].case, heads=(8, 8)))
    wrong = lying(lambda o, S: (torch.cat([o[:, :, :-1], o[:, :, -1:] * 1.1], 2), S))
    rows = timed(monkeypatch, wrong, target)
    assert rows["gdn"]["judged_heads"] == gpu.JUDGED_HEADS and not rows["other"]["ok"]


@pytest.mark.parametrize("bind, kind", [(stubborn, "refused"), (broken, "failed")])
def test_refusals_and_failures_are_rows(small, monkeypatch, bind, kind):
    rows = timed(monkeypatch, Provider("other", {"prefill": bind}), small["prefill"][0])
    assert rows["gdn"]["ms"] > 0 and rows["other"][kind] and "story" not in rows["other"][kind]
    assert any(kind in note for note in tables.notes([{"pass": "prefill", **rows["other"]}]))


def test_long_problems_are_judged_on_their_start(small, monkeypatch):
    session = gpu.Session(("gdn:eager",), CPU, gate_tokens=20)
    session.ceilings = {"copy": 1e9, "matmul": 1e9}
    assert gpu.timed(session, small["prefill"][0])[0]["judged_tokens"] == 20
    monkeypatch.setattr(gpu, "BACKWARD_TOKENS", 64)
    assert gpu.timed(replace(session, gate_tokens=None), small["train"][0])[0]["judged_tokens"] == 32


def test_nothing_is_begun_after_the_deadline(small):
    session = gpu.Session(("gdn",), CPU, deadline=0.0)
    assert [row["skipped"] for row in gpu.run(session, ["prefill"])] == ["out of time"] * 2
    rows = list(gpu.run(session, ["host", "cold"]))
    assert len(rows) == 3 + 1 and all(row["skipped"] for row in rows)
    assert len(tables.notes(rows)) == len(rows)


# times


def test_interleaved_takes_turns():
    order = []
    prepared = {
        name: graph.prepare([lambda name=name: order.append(name)] * calls, CPU)
        for name, calls in (("a", 2), ("b", 1))
    }
    order.clear()
    found = graph.interleaved(prepared, CPU, budget=0)
    assert "".join(order) == "aab" * (graph.ROUNDS[0] + 1)
    assert {name: t.runs for name, t in found.items()} == dict.fromkeys("ab", graph.ROUNDS[0])
    assert prepared["a"].timer == "wall" and prepared["a"].calls == 2


class PretendCuda:
    """Imitate torch.cuda for graphs: a clock that calls advance, graphs that run their calls again."""

    def __init__(self, monkeypatch):
        self.now, self.log, self.captured = 0.0, [], None
        cuda, me = torch.cuda, self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                self.at = me.now

            def elapsed_time(self, other):
                return 1e3 * (other.at - self.at)

        class Stream:
            def wait_stream(self, other):
                assert isinstance(other, Stream)

        class Graph:
            def replay(self):
                me.log.append("replay")
                for call in self.calls:
                    call()

        class Capture:
            def __init__(self, graph, stream, capture_error_mode):
                assert isinstance(stream, Stream) and capture_error_mode == "thread_local"
                self.graph = graph

            def __enter__(self):
                me.captured = []

            def __exit__(self, *error):
                self.graph.calls, me.captured = me.captured, None

        fakes = {"Event": Event, "Stream": Stream, "CUDAGraph": Graph, "graph": Capture}
        fakes |= {"stream": lambda stream: contextlib.nullcontext(), "current_stream": Stream}
        fakes |= {"synchronize": lambda device=None: None, "_sleep": lambda cycles: me.log.append("sleep")}
        fakes |= {"reset_peak_memory_stats": lambda device: None, "memory_allocated": lambda device: 100}
        fakes |= {"max_memory_allocated": lambda device: 350}
        for name, fake in fakes.items():
            assert hasattr(cuda, name)
            monkeypatch.setattr(cuda, name, fake)

    def call(self, seconds, out=None, is_capturable=True):
        """A call that takes so long and writes ones into `out`."""

        def work():
            self.now += seconds
            if out is not None:
                out.fill_(1)

        def call():
            if self.captured is None:
                work()
            elif not is_capturable:
                raise RuntimeError("operation not permitted when stream is capturing\nand so on")
            else:
                self.captured.append(work)
            return torch.zeros(3) if out is None else out

        return call


def test_short_calls_are_captured_many_times(monkeypatch):
    cuda, device = PretendCuda(monkeypatch), torch.device("cuda")
    calls = [cuda.call(20e-6, torch.zeros(3)) for _ in range(2)]
    short, long = graph.prepare(calls, device), graph.prepare([cuda.call(2e-3, torch.zeros(2))], device)
    assert (short.timer, short.calls, long.calls) == ("graph", 26, 1)
    found = graph.interleaved({"short": short, "long": long}, device, budget=0)
    assert found["short"].p50 == pytest.approx(20e-6) and found["long"].p80 == pytest.approx(2e-3)
    assert graph.prepare([cuda.call(1e-9, torch.zeros(1))], device).calls == graph.MAX_CALLS
    assert graph.peak_memory(calls[0], device) == 250


@pytest.mark.parametrize("is_capturable", [True, False])
def test_what_no_graph_holds_is_timed_by_events(monkeypatch, is_capturable):
    """A call that may not be captured, and one whose work a replay does not do."""
    cuda, device = PretendCuda(monkeypatch), torch.device("cuda")
    found = graph.prepare([cuda.call(1e-3, None, is_capturable)], device)
    assert found.timer == "events" and found.calls == 1 and found.lead > 0
    assert found.why.endswith("capturing") != is_capturable and "\n" not in found.why
    cuda.log.clear()
    assert graph.interleaved({"a": found}, device, budget=0)["a"].p50 == pytest.approx(1e-3)
    assert "replay" not in cuda.log and "sleep" in cuda.log


@pytest.mark.parametrize("is_replayed", [True, False])
def test_a_replay_writes_what_the_calls_write(monkeypatch, is_replayed):
    """Finite is not enough. A pool is put back before, as every call moves its states on."""
    cuda, device, pool = PretendCuda(monkeypatch), torch.device("cuda"), torch.ones(3)

    def call():
        out = pool.clone()

        def work(step):
            cuda.now += 20e-6
            pool.add_(step)
            out.copy_(pool)

        if cuda.captured is None:
            work(1.0)
        else:
            cuda.captured.append(lambda: work(1.0 if is_replayed else 2.0))
        return out

    found = graph.prepare([call], device, moved=[pool])
    assert found.timer == ("graph" if is_replayed else "events") and (found.calls > 1) == is_replayed
    assert is_replayed or "other work" in found.why


def test_sets_of_a_decode_lie_in_one_pool():
    first = jobs.given(STEP, CPU)
    found = jobs.sets("decode", first, 4)
    pools, index = {id(x.tensors["pool"]) for x in found}, torch.cat([x.tensors["read_index"] for x in found])
    assert len(pools) == 1 and sorted(index.tolist()) == list(range(12)) and index.tolist() != sorted(index)
    for one in found:
        held = one.tensors["pool"][one.tensors["read_index"].long()]
        assert torch.equal(held, first.tensors["initial_state"])


def test_a_training_call_returns_every_gradient():
    given = jobs.given(TINY, CPU)
    call = jobs.call(gdn_provider("eager"), "train", given)
    expected = accuracy.run(gdn.chunk_gated_delta_rule, given)
    for x, y in zip(
        call(), [expected[name] for name in ("dq", "dk", "dv", "dg", "dbeta", "dh0")], strict=True
    ):
        assert torch.equal(x, y)


def test_rows_have_ratios_within_the_run():
    rows = {"gdn": {"ms": 0.1}, "fla": {"ms": 0.3}, "flash_qla": {"ms": 0.174}, "flashinfer": {}}
    rows_of.add_ratios(rows)
    assert rows["gdn"]["ratio"] == pytest.approx({"fla": 3.0, "flash_qla": 1.74})
    assert rows["gdn"]["to_best_peer"] == pytest.approx(1.74) and "ratio" not in rows["flashinfer"]
    assert rows["fla"]["ratio"] == pytest.approx({"flash_qla": 0.58})


def test_host_time_is_that_of_right_calls(monkeypatch):
    monkeypatch.setattr(hosttime, "CALLS", 2)
    monkeypatch.setattr(hosttime, "BURSTS", 3)
    tiny = {
        name: (
            job,
            replace(
                case, heads=(1, 2), sizes=(8, 8), lengths=packed(9) if job != "decode" else Lengths(1, 2)
            ),
        )
        for name, (job, case) in hosttime.CASES.items()
    }
    monkeypatch.setattr(hosttime, "CASES", tiny)
    rows = list(gpu.host(gpu.Session(("gdn", "gdn:eager"), CPU)))
    assert len(rows) == 6 and all(row["ms"] > 0 for row in rows), rows
    assert all(row["ok"] and row["backend"] == "eager" for row in rows)
    liar = Provider("gdn:liar", {"prefill": LIES["zeros"].binds["prefill"]})
    session = gpu.Session((), CPU, providers={"gdn:liar": liar})
    (wrong,) = gpu.host(session)
    assert not wrong["ok"] and "ms" not in wrong
    about = {"commit": "abc", "gpu": None}
    held = rows_of.done([{"pass": "host", **row, **about} for row in rows[:4]], about)
    again = gpu.host(gpu.Session(("gdn", "gdn:eager"), CPU, done=frozenset(held)))
    assert [row["case"] for row in again] == ["forward+backward"] * 2
    assert tables.build_table("host", [{"pass": "host", **row} for row in rows]).lines


def test_an_earlier_tree_without_scales_has_a_backend(monkeypatch):
    """`gdn bench compare` measures trees whose DecodeProblem has no `column_scale`, and refuses the name."""
    given = jobs.given(catalog.step(3), CPU)
    expected, check = jobs.backend("gdn", "decode", given), hosttime.parse_decode

    def before(**arguments):
        assert "column_scale" not in arguments
        return check(**arguments, column_scale=None)

    monkeypatch.setattr(hosttime, "parse_decode", before)
    monkeypatch.setattr(hosttime, "DecodeProblem", make_dataclass("DecodeProblem", ["q", "state"]))
    assert jobs.backend("gdn", "decode", given) == expected == "eager"


# cold start


def test_a_new_process_says_what_it_compiled(monkeypatch, tmp_path):
    tiny = {"heads": (1, 2), "sizes": (8, 8)}
    monkeypatch.setattr(
        coldstart, "RULE", {k: replace(c, **tiny, lengths=packed(9)) for k, c in coldstart.RULE.items()}
    )
    monkeypatch.setattr(coldstart, "STEPS", {k: replace(c, **tiny) for k, c in coldstart.STEPS.items()})
    chunk = gdn.chunk_gated_delta_rule
    lengths = iter(range(100))

    def compiling(*args, **options):
        (tmp_path / f"kernel{next(lengths)}").mkdir()
        (tmp_path / "kernel0" / "x.cubin").touch()
        return chunk(*args, **options)

    monkeypatch.setattr(gdn, "chunk_gated_delta_rule", compiling)
    found = coldstart._cold("gdn:eager", tmp_path, time.time() - 100)
    # from before there was a process: Python's own start and torch's import count
    assert 100 <= found["start_s"] < 101
    assert (
        found["compilations"]["first: forward"] == 1 and found["compilations"]["another length: forward"] == 0
    )
    assert found["seconds"].keys() == found["compilations"].keys() and len(found["seconds"]) == 11
    assert found["ok"]
    assert not coldstart._is_right(LIES["zeros"], CPU)
    monkeypatch.setattr(coldstart, "cold", lambda name: {**found, "ok": False})
    row = next(gpu.cold(gpu.Session(("gdn:eager",), CPU)))
    assert row["failed"] and "seconds" not in row
    monkeypatch.setattr(coldstart, "cold", lambda name: found)
    row = next(gpu.cold(gpu.Session(("gdn:eager",), CPU)))
    assert row["compiled_again"] == 0
    assert tables.build_table("cold", [row]).lines[0][-1] == "0"


def test_a_child_knows_when_it_was_asked_for(monkeypatch):
    done = subprocess.CompletedProcess([], 0, "{}", "")
    asked = []
    monkeypatch.setattr(coldstart, "_child", lambda caches, *arguments: asked.append(arguments) or done)
    assert coldstart.cold("gdn") == {} and asked[0][:2] == ("cold", "gdn")
    assert 0 <= time.time() - float(asked[0][3]) < 10


@pytest.mark.parametrize(
    ("job", "name", "shape"),
    [("train", "2/8 3x64", (1, 192, 2, 128)), ("prefill", "2/4 1x9000", (1, 8192, 2, 128)),
     ("decode", "B=8 bf16", (8, 1, 16, 128))],
)  # fmt: skip
def test_problems_outside_of_the_table_are_compiled_first(job, name, shape):
    """A problem of any name of the catalog, with at most 8,192 tokens a sequence."""
    assert [x.tensors["q"].shape for _, x in coldstart._problems(job, [name], CPU)] == [shape]


def test_a_child_that_fails_is_a_row():
    found = coldstart.cold("nobody")
    assert "expected some of gdn" in found["error_message"]
    assert tables.notes([{"pass": "cold", "case": "new process", "provider": "nobody", **found}])


def test_warming_is_one_process_per_provider_and_head_count(monkeypatch):
    tasks = []
    monkeypatch.setattr(coldstart, "_child", lambda environment, *arguments: tasks.append(arguments))
    session = gpu.Session(("gdn",), CPU, only=("16/32",))
    gpu.warm(session, ["prefill", "train", "host"])
    assert sorted(task[2] for task in tasks) == ["host", "prefill", "train"]
    tasks.clear()
    gpu.warm(gpu.Session(("gdn",), CPU, only=("prefill", "16/32", "B=8")), ["prefill", "spec"])
    assert sorted(task[2] for task in tasks) == ["prefill", "spec", "spec"]
    assert coldstart.shortened(workloads.PREFILL[0].case).lengths == packed(8192)


# rows


def test_passes_print_and_append(small, monkeypatch, peers):
    session = gpu.Session(PROVIDERS, CPU)
    rows = list(gpu.run(session, ["prefill", "prefill:gated", "train", "decode"]))
    by_pass = {
        name: [row for row in rows if row["pass"] == name] for name in dict.fromkeys(r["pass"] for r in rows)
    }
    assert {name: len(found) for name, found in by_pass.items()} == {
        "prefill": 12, "prefill:gated": 12, "train": 8, "decode": 8,
    }  # fmt: skip
    assert [row["provider"] for row in by_pass["decode"]][:3] == ["gdn", "fla", "flashinfer"]
    assert by_pass["prefill"][2]["refused"] and by_pass["train"][0]["errors"].keys() >= {"dg", "dh0"}
    ours, *_, theirs = by_pass["prefill"][: len(PROVIDERS)]
    assert ours["backend"] == "eager" and theirs["provider"] == "transformers" and theirs["backend"] is None
    assert ours["to_best_peer"] == min(ours["ratio"].values()) and ours["error"] == max(
        ours["errors"].values()
    )
    wanted = {"pass", "case", "provider", "backend", "dtype", "ms", "p20", "p80", "bytes", "flop", "error"}
    assert all(wanted <= set(row) for row in rows if row["ok"])
    for name, found in by_pass.items():
        table = tables.build_table(name, found)
        assert table.lines and all(len(line) == len(table.columns) for line in table.lines)
        assert all(name in tables.summarize(row) for row in found)
    assert json.loads(json.dumps(measure.plain(rows)))


def test_rows_hold_six_digits_and_no_infinities():
    assert measure.plain({"a": [math.inf, 1 / 3], "b": math.nan, "c": (1, "x", None, True)}) == {
        "a": [None, 0.333333], "b": None, "c": [1, "x", None, True],
    }  # fmt: skip


# on a GPU


@pytest.mark.gpu
def test_a_graph_holds_the_work():
    device = torch.device("cuda")
    x = torch.randn(1 << 20, device=device)
    prepared = graph.prepare([lambda: x * 2], device)
    assert prepared.timer == "graph" and prepared.calls > 1
    other = torch.cuda.Stream()

    def elsewhere():
        y = torch.empty_like(x)
        with torch.cuda.stream(other):
            y.copy_(x)
        return y

    assert graph.prepare([elsewhere], device).timer == "events"
    assert graph.prepare([lambda: x.sum().item() or x], device).timer == "events"
    times = graph.interleaved({"double": prepared}, device)
    assert 1e-7 < times["double"].p50 < 1e-3
    assert graph.peak_memory(lambda: x * 2, device) >= 4 << 20


@pytest.mark.gpu
def test_a_provider_timed_twice_agrees_with_itself():
    """Within 3 % in the median, in one run."""
    device, target = torch.device("cuda"), workloads.choose_workloads("prefill", ["2/8 1x8192"])[0]
    sets = jobs.sets("prefill", jobs.given(target.case, device), graph.copies(target.cost.bytes, device))
    calls = [jobs.call(gdn_provider(), "prefill", one) for one in sets]
    times = graph.interleaved({name: graph.prepare(calls, device) for name in "ab"}, device)
    assert times["a"].p50 == pytest.approx(times["b"].p50, rel=0.03)


@pytest.mark.gpu
def test_ours_is_timed_on_a_gpu(small):
    session = gpu.Session(("gdn",), torch.device("cuda"))
    rows = list(gpu.run(session, ["prefill", "train", "decode"]))
    assert len(rows) == 6 and all(row["ok"] and row["ms"] > 0 for row in rows), rows
    assert all(row["copy_gb_per_s"] > 100 for row in rows)
