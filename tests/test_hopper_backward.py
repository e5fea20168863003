"""The Gluon backward of Hopper: simulated on the CPU against the reference, and on a GPU against Triton's."""

import itertools
import os
from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON

from gdn.problem import parse
from gdn.testing import Case, inputs, packed, rows

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit import gluon_simulator
from kit.hopper import Simulated, error, reference, simulated

from gdn.backends.hopper import BACKEND, cost
from gdn.backends.hopper.backward import plan, segments
from gdn.backends.hopper.backward.cost import Segmentation
from gdn.backends.hopper.cost import Cut
from gdn.backends.triton.launch import PlanCache
from gdn.backends.triton.rule import run as chunked

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
BASE = Case(sizes=(128, 128), heads=(1, 2), state="wide")
CASES = {
    "one chunk": replace(BASE, lengths=rows(64)),
    "rows with ragged ends": replace(BASE, lengths=rows(129)),
    "one short chunk": replace(BASE, lengths=rows(15), state="none"),
    "one value head": replace(BASE, lengths=rows(129), heads=(2, 2), gate="strong"),
    "four value heads": replace(BASE, lengths=rows(65), heads=(1, 4), gate="none"),
    "packed": replace(BASE, lengths=packed(70, 0, 33, 128, tail=29), keys="correlated"),
    "packed, l2norm": replace(BASE, lengths=packed(65, 1, 130), use_qk_l2norm_in_kernel=True, beta="sigmoid"),
    "no gates": replace(BASE, lengths=rows(129), gate="absent", beta="absent"),
    "states V first": replace(BASE, lengths=packed(128, 0, 64), state="narrow", state_v_first=True),
    "resets": replace(BASE, lengths=rows(129), gate="reset"),
    "options": replace(
        BASE, lengths=packed(65, 1, 130), use_qk_l2norm_in_kernel=True, raw_gate="on", beta="negative",
        state="narrow", state_v_first=True, is_strided=True, is_scaled=True,
    ),
    "gate without a bias": replace(BASE, lengths=rows(192), raw_gate="no_bias", has_narrow_gates=True),
    "identical keys": replace(BASE, lengths=rows(65), heads=(1, 4), keys="identical", gate="none"),
}  # fmt: skip
# at K = V = 64 the states, and A_inv of Triton's forward, are fp32, and a CTA of the scan has one consumer
FEW_KEYS = {name: replace(case, sizes=(64, 64)) for name, case in CASES.items()}
# relative RMS error of q, k, v and the states, and of the gates
LIMITS = {"random": (8e-3, 6e-3), "correlated": (2e-2, 2e-2), "identical": (6e-2, 6e-2)}

pytestmark = [pytest.mark.interpret, simulated]
# a simulated case takes 3 to 10 s: the suite runs some of them, GDN_TEST_SEEDS=1 all
thorough = pytest.mark.skipif("GDN_TEST_SEEDS" not in os.environ, reason="expected GDN_TEST_SEEDS")
IN_SUITE = (
    "one short chunk",
    "four value heads",
    "packed",
    "options",
    "gate without a bias",
    "states V first",
)


@pytest.fixture(autouse=True)
def simulated_backward(monkeypatch):
    """Simulate the Gluon kernels on the CPU."""
    monkeypatch.setattr(plan, "_plans", PlanCache())
    if not torch.cuda.is_available():
        monkeypatch.setattr(plan, "Launch", Simulated)


def with_consumers(monkeypatch, count):
    """Give each CTA of the scan so many consumer warpgroups."""
    monkeypatch.setattr(plan, "consumers_of", lambda problem: count)
    monkeypatch.setattr(plan, "_plans", PlanCache())


def expected_gradients(given, do, dfinal):
    """Differentiate the reference recurrence in fp64."""
    wide = given.double()
    leaves = {name: wide.tensors[name].requires_grad_() for name in NAMES if name in wide.tensors}
    outputs = [
        (x, y.double()) for x, y in zip(reference(given, wide), (do, dfinal), strict=True) if y is not None
    ]
    values, gradients = zip(*outputs, strict=True)
    found = torch.autograd.grad(values, list(leaves.values()), gradients, allow_unused=True)
    by_name = dict(zip(leaves, found, strict=True))
    return [by_name.get(name) for name in NAMES]


def run(given, do, dfinal, saves=True):
    """Return the gradients of this backward, and of Triton's."""
    problem = parse(**given.tensors, **given.options, backend="triton")
    saved = chunked.chunk_forward(problem, saves)[2]
    assert plan.lacks(problem, saved) is None
    return [f(problem, saved, do, dfinal) for f in (plan.chunk_backward, chunked.chunk_backward)]


def check(given, case, do, dfinal):
    """Compare all gradients with the reference: within the limits, or as near as Triton's."""
    here, triton = run(given, do, dfinal)
    expected = expected_gradients(given, do, dfinal)
    rows_limit, gates_limit = LIMITS[case.keys]
    for name, x, y, z in zip(NAMES, here, triton, expected, strict=True):
        assert (x is None) == (y is None), name
        if x is None:
            continue
        assert not x.isnan().any(), name
        if z is None or z.norm() == 0:
            assert not x.any(), name
            continue
        limit = gates_limit if name in ("g", "beta", "A_log", "dt_bias") else rows_limit
        # few tokens: the sums over them may cancel
        assert error(x, z) < max(limit, 1.6 * error(y, z)), f"{name}: {error(x, z)}, Triton {error(y, z)}"


@pytest.mark.parametrize(
    "name, consumers",
    [
        pytest.param(name, 1 + i % 2, marks=() if name in IN_SUITE else thorough)
        for i, name in enumerate(CASES)
    ],
)
def test_gradients(monkeypatch, name, consumers):
    """Gradients of every option match the reference."""
    with_consumers(monkeypatch, consumers)
    given = inputs(CASES[name], torch.bfloat16)
    dfinal = None if CASES[name].state == "none" else given.dfinal_state
    check(given, CASES[name], given.do, dfinal)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "options" else thorough) for x in FEW_KEYS]
)
def test_gradients_of_few_keys(name):
    """At K = V = 64 gradients of every option match the reference."""
    given = inputs(FEW_KEYS[name], torch.bfloat16)
    check(given, FEW_KEYS[name], given.do, None if FEW_KEYS[name].state == "none" else given.dfinal_state)


def split_inverse(A_inv):
    """Return split bf16 A_inv, as Hopper's forward saves it at K = V = 64."""
    hi = A_inv.bfloat16()
    return torch.stack([hi, (A_inv - hi).bfloat16()], 2)


@pytest.mark.parametrize("is_cut", [False, True])
def test_both_forms_of_a_saved_inverse_have_the_same_bits(monkeypatch, is_cut):
    """At K = V = 64 the kernels load split bf16 A_inv, as Hopper's forward saves it, or its sum in fp32."""
    if is_cut:
        monkeypatch.setattr(segments, "Launch", Simulated)
        monkeypatch.setattr(plan, "schedule_of", lambda p: (1, Segmentation(Cut(1, 9, 1), 1, 1)))
    given = inputs(FEW_KEYS["packed, l2norm"], torch.bfloat16)
    problem = parse(**given.tensors, **given.options, backend="triton")
    saved = chunked.chunk_forward(problem, True)[2]
    parts = split_inverse(saved.A_inv)
    # what hi and lo of the kernels' own split differ from: lo is half of hi's last digit
    total = parts.float().sum(2)
    assert ((total.view(torch.int32) & 0xFFFF) == 0x8000).any()
    found = [replace(saved, A_inv=x) for x in (parts, total)]
    # a plan prepares the launches of its first call
    first, second = (plan.plan_of(problem, x, given.do, given.dfinal_state) for x in found)
    assert first is not second
    for backward in (plan, chunked):
        first, second = (backward.chunk_backward(problem, x, given.do, given.dfinal_state) for x in found)
        for name, x, y in zip(NAMES, first, second, strict=True):
            assert (x is None) == (y is None) and (x is None or torch.equal(x, y)), name


@pytest.mark.parametrize("change", ["fp32", "padded rows", "one element further"])
def test_hooks_change_a_split_inverse(change):
    """Triton's backward runs where TMA cannot load split A_inv, and adds up its parts."""
    given = inputs(FEW_KEYS["packed, l2norm"], torch.bfloat16)
    problem = parse(**given.tensors, **given.options, backend="triton")
    saved = chunked.chunk_forward(problem, True)[2]
    parts = split_inverse(saved.A_inv)
    if change == "fp32":
        changed = parts.float()
    elif change == "padded rows":
        changed = parts.new_zeros(*parts.shape[:-1], 72)[..., :64].copy_(parts)
    else:
        changed = parts.new_zeros(parts.numel() + 1)[1:].view(parts.shape).copy_(parts)
    reason = plan.lacks(problem, replace(saved, A_inv=changed))
    # both forms are in the dtypes of a forward: the reason names none
    assert "contiguous and aligned for TMA" in reason and "float32" not in reason
    x, y = (
        backward.chunk_backward(problem, replace(saved, A_inv=A_inv), given.do, given.dfinal_state)
        for backward, A_inv in ((plan, changed), (chunked, parts.float().sum(2)))
    )
    for name, a, b in zip(NAMES, x, y, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), name


def test_dg_of_identical_keys():
    """At K = V = 64 dg is as near as Triton's where sums over pairs cancel what leaves through the state."""
    given = inputs(replace(FEW_KEYS["one chunk"], heads=(1, 1), keys="identical"), torch.bfloat16)
    expected = expected_gradients(given, given.do, given.dfinal_state)[3]
    here, triton = run(given, given.do, given.dfinal_state)
    assert error(here.dg, expected) < error(triton.dg, expected)


@pytest.mark.parametrize("name", ["options", *(pytest.param(x, marks=thorough) for x in IN_SUITE[1:3])])
def test_gradients_on_the_state_pass_of_triton(monkeypatch, name):
    """The gradient kernel reads dr, and stores dv over it."""
    monkeypatch.setattr(plan, "HAS_SCAN", False)
    given = inputs(CASES[name], torch.bfloat16)
    check(given, CASES[name], given.do, given.dfinal_state)


@pytest.mark.parametrize(
    "case, absent",
    [
        (CASES["packed"], "do"),
        pytest.param(CASES["rows with ragged ends"], "dfinal", marks=thorough),
        (FEW_KEYS["one chunk"], "do"),
        pytest.param(FEW_KEYS["rows with ragged ends"], "dfinal", marks=thorough),
    ],
)
def test_one_gradient_is_absent(case, absent):
    """A missing gradient of an output counts as zero."""
    given = inputs(case, torch.bfloat16)
    do, dfinal = (None, given.dfinal_state) if absent == "do" else (given.do, None)
    check(given, case, do, dfinal)


@pytest.mark.parametrize("cases", [CASES, pytest.param(FEW_KEYS, marks=thorough)], ids=["128", "64"])
def test_nothing_is_saved(cases):
    """The backward recomputes what the forward did not save."""
    given = inputs(replace(cases["packed, l2norm"], lengths=packed(33, 1)), torch.bfloat16)
    first, second = (run(given, given.do, given.dfinal_state, saves)[0] for saves in (True, False))
    assert all(x is None if y is None else torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "case, consumers",
    [
        pytest.param(CASES["packed"], 1, marks=thorough),
        (CASES["packed"], 2),
        pytest.param(FEW_KEYS["packed"], 1, marks=thorough),
    ],
)
def test_one_cta_has_the_bits_of_many(monkeypatch, case, consumers):
    """CTAs go on from item to item; stages and phases count over all of them."""
    with_consumers(monkeypatch, consumers)
    given = inputs(replace(case, heads=(2, 4)), torch.bfloat16)
    many = run(given, given.do, given.dfinal_state)[0]
    monkeypatch.setattr(cost, "num_sms", lambda device: 1)
    with_consumers(monkeypatch, consumers)
    one = run(given, given.do, given.dfinal_state)[0]
    assert all(torch.equal(x, y) for x, y in zip(one, many, strict=True) if y is not None)


@pytest.mark.parametrize(
    "D, has_scan",
    [pytest.param(128, False, marks=thorough), (128, True), pytest.param(64, True, marks=thorough)],
)
def test_nan_stays_in_its_sequence(monkeypatch, D, has_scan):
    """NaN of a sequence reaches none of its neighbours in memory."""
    monkeypatch.setattr(plan, "HAS_SCAN", has_scan)
    given = inputs(replace(BASE, sizes=(D, D), lengths=packed(40, 30, 70)), torch.bfloat16)
    for x in (*(given.tensors[name] for name in ("q", "k", "v")), given.do):
        x[:, 40:70] = float("nan")
    here = run(given, given.do, given.dfinal_state)[0]
    for x in (here.dq, here.dk, here.dv, here.dg, here.dbeta):
        assert not x[:, :40].isnan().any() and not x[:, 70:].isnan().any()
    assert not here.dinitial_state[[0, 2]].isnan().any() and here.dinitial_state[1].isnan().any()


@pytest.mark.parametrize("D", [128, pytest.param(64, marks=thorough)])
def test_small_beta(D):
    """dbeta does not lose its digits where beta, and with it dv, is small or zero."""
    given = inputs(replace(BASE, sizes=(D, D), lengths=rows(129)), torch.bfloat16)
    tokens = {beta: slice(3 + 7 * i, None, 28) for i, beta in enumerate((0.0, 2.0**-110, 2.0**-60, 5e-4))}
    for beta, some in tokens.items():
        given.tensors["beta"][:, some] = beta
    here, _ = run(given, given.do, given.dfinal_state)
    expected = expected_gradients(given, given.do, given.dfinal_state)
    for beta, some in tokens.items():
        assert error(here.dbeta[:, some], expected[4][:, some]) < 6e-3, beta
        if beta > 2.0**-100:
            assert error(here.dv[:, some], expected[2][:, some]) < 8e-3, beta


@pytest.mark.parametrize("D, has_scan", [(64, True), (128, True), pytest.param(128, False, marks=thorough)])
def test_heads_of_an_item_differ_in_small_betas(monkeypatch, D, has_scan):
    """Each value head takes its own branches for a small beta, and a NaN past its ragged end reaches none."""
    monkeypatch.setattr(cost, "num_sms", lambda device: 1)
    monkeypatch.setattr(plan, "HAS_SCAN", has_scan)
    given = inputs(replace(BASE, sizes=(D, D), heads=(1, 4), lengths=packed(70, 30)), torch.bfloat16)
    beta = given.tensors["beta"]
    beta[:, :, 0] = 0
    beta[:, :, 2].neg_()
    # one token of the last chunk
    beta[:, 69, 3] = 2.0**-110
    expected = expected_gradients(given, given.do, given.dfinal_state)
    for x in (*(given.tensors[name] for name in ("q", "k", "v", "beta")), given.do):
        x[:, 70:] = float("nan")
    here = run(given, given.do, given.dfinal_state)[0]
    for head in range(4):
        assert error(here.dbeta[:, :70, head], expected[4][:, :70, head]) < 6e-3, head
    assert error(here.dg[:, :70], expected[3][:, :70]) < 6e-3
    assert error(here.dbeta[:, 69, 3], expected[4][:, 69, 3]) < 2e-2
    for x, y in ((here.dq, expected[0]), (here.dk, expected[1]), (here.dv, expected[2])):
        assert error(x[:, :70], y[:, :70]) < 8e-3


def test_the_check_can_fail(monkeypatch):
    """A gradient without one value head, or without the through-state part, is seen."""
    given = inputs(CASES["one chunk"], torch.bfloat16)
    expected = expected_gradients(given, given.do, given.dfinal_state)
    whole_k = run(given, given.do, given.dfinal_state)[0].dk
    without = inputs(CASES["one chunk"], torch.bfloat16)
    without.do[:, :, 0] = 0
    assert error(whole_k, expected[1]) < 8e-3
    assert error(run(without, without.do, None)[0].dk, expected[1]) > 0.1


BARRIERS = (
    "empty", "head_empty", "A_empty", "k_empty", "q_empty", "w_empty", "pairs_empty", "w_full", "pairs_full",
)  # fmt: skip


@pytest.mark.parametrize("missing", [*BARRIERS[:2], *(pytest.param(x, marks=thorough) for x in BARRIERS[2:])])
def test_a_missing_arrival_is_seen(monkeypatch, missing):
    """The simulator reports a barrier that a partition does not arrive at."""
    monkeypatch.setattr(gluon_simulator, "SECONDS", 0.5)
    monkeypatch.setattr(cost, "num_sms", lambda device: 1)
    monkeypatch.setattr(plan, "HAS_SCAN", False)
    given = inputs(replace(BASE, lengths=rows(192), heads=(1, 4)), torch.bfloat16)
    init = gluon_simulator.STANDINS["mbarrier"].init
    order = itertools.count()
    # barriers in the order that the gradient kernel initialises them
    names = ("full", "empty", "head_full", "head_empty", "k_full", "k_empty", "w_full", "w_empty") * 2
    names += ("A_full", "A_empty", "q_full", "q_empty", "pairs_full", "pairs_empty")

    def more(barrier, count):
        init(barrier, count + (names[next(order) % len(names)] == missing))

    monkeypatch.setattr(gluon_simulator.STANDINS["mbarrier"], "init", staticmethod(more))
    with pytest.raises(AssertionError, match="does not complete"):
        run(given, given.do, given.dfinal_state)


def test_the_split_of_a_state_is_waited_for(monkeypatch):
    """At K = 64 the value warpgroup waits until the row warpgroup has split S in shared memory."""
    monkeypatch.setattr(gluon_simulator, "SECONDS", 0.5)
    given = inputs(FEW_KEYS["one chunk"], torch.bfloat16)
    init = gluon_simulator.STANDINS["mbarrier"].init
    order = itertools.count()

    def more(barrier, count):
        # S_full[0] is the first barrier that the gradient kernel initialises; the scan has initialised 12
        init(barrier, count + (next(order) == 12))

    monkeypatch.setattr(gluon_simulator.STANDINS["mbarrier"], "init", staticmethod(more))
    monkeypatch.setattr(cost, "num_sms", lambda device: 1)
    with pytest.raises(AssertionError, match="does not complete"):
        run(given, given.do, given.dfinal_state)


def test_where_it_does_not_run():
    """The gradients of other sizes have the bits of Triton's."""
    given = inputs(replace(BASE, sizes=(32, 32), lengths=rows(64)), torch.bfloat16)
    problem = parse(**given.tensors, **given.options, backend="triton")
    saved = chunked.chunk_forward(problem, True)[2]
    assert "K = V of 64 or 128" in plan.lacks(problem, saved)
    here = plan.chunk_backward(problem, saved, given.do, given.dfinal_state)
    triton = chunked.chunk_backward(problem, saved, given.do, given.dfinal_state)
    assert all(torch.equal(x, y) for x, y in zip(here, triton, strict=True) if y is not None)
    here = BACKEND.chunk_backward(problem, saved, given.do, given.dfinal_state)
    assert all(torch.equal(x, y) for x, y in zip(here, triton, strict=True) if y is not None)
