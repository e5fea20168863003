"""Run the Hopper backend on a GPU: named cases, drawn problems, both paths, segments, prefills."""

import itertools
import os
import random
from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON

import gdn
from gdn.problem import parse
from gdn.testing import Case, accuracy, inputs, packed, rows

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit import one_launch
from kit.hopper import (
    BASE,
    CASES,
    CUT_CASES,
    FAST_CASES,
    LIMITS,
    LONG_CASES,
    check_checkpoints,
    check_nan_stays,
    checkpoint_options,
    error,
    forward,
    make_prefill,
    on_hopper,
    reference,
    run_prefill,
    set_consumers,
    set_fast_path,
    set_segments,
    simulated,
)

from gdn.backends.hopper import rule
from gdn.backends.hopper.cost import Cut
from gdn.backends.triton.rule import run as chunked
from gdn.backends.triton.rule.describe import to_kernel_layout


def is_as_close(x, y, expected, limit):
    """Return True if x is as close to `expected` as Triton's y, or within the limit."""
    return (x - expected).norm() <= max(1.2 * (y - expected).norm(), limit * expected.norm())


def check_on_gpu(case):
    """Compare o, states and gradients with the reference recurrence; demand the same bits every time.

    Gradients of many tokens are compared with Triton's: the reference would keep the state of each token.
    """
    given = inputs(case, torch.bfloat16, device="cuda")

    def run():
        return gdn.chunk_gated_delta_rule(**given.tensors, **given.options, backend="hopper")

    o, final = run()
    expected = reference(given)
    limit = LIMITS.get(case.keys, 5e-3)
    assert error(o, expected[0]) < limit and error(final, expected[1]) < limit
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(), (o, final), strict=True))
    leaves = [given.tensors[name].requires_grad_() for name in "qkv"]
    outputs = [
        gdn.chunk_gated_delta_rule(**given.tensors, **given.options, backend=backend)[0]
        for backend in ("hopper", "triton")
    ]
    assert error(outputs[0], expected[0]) < limit
    with pytest.MonkeyPatch.context() as patch:
        # the fast paths of forwards with and without a backward round differently; the general path is one
        set_fast_path(patch, False)
        assert torch.equal(run()[0], forward(given)[0])
    own, triton = (torch.autograd.grad(x, leaves, given.do) for x in outputs)
    if given.tensors["q"].shape[1] > 2000:
        assert all(error(x, y.double()) < 1e-2 for x, y in zip(own, triton, strict=True))
        return
    wide = given.double()
    exact = [wide.tensors[name].requires_grad_() for name in "qkv"]
    expected = torch.autograd.grad(reference(given, wide)[0], exact, wide.do)
    assert all(is_as_close(*three, 8e-3) for three in zip(own, triton, expected, strict=True))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("name", [*CASES, "many"])
def test_on_a_gpu(monkeypatch, name, consumers):
    """Scan whole sequences, by one consumer a CTA and by two."""
    set_consumers(monkeypatch, consumers)
    set_segments(monkeypatch, None)
    lengths = packed(1000, 1, 640, 407, *[70] * 20, 7000)
    check_on_gpu(CASES.get(name, replace(BASE, heads=(16, 32), lengths=lengths)))


def draw_kind(source):
    """Draw the options that pick the binaries."""
    pick = source.choice
    gate = pick(("mild", "mild", "absent"))
    return Case(
        sizes=pick(((64, 64), (128, 128))), lengths=pick((packed(1), rows(1))), gate=gate,
        raw_gate="off" if gate == "absent" else pick(("off", "on", "no_bias")),
        state=pick(("none", "wide", "narrow")), beta=pick(("given", "sigmoid", "negative", "absent")),
        use_qk_l2norm_in_kernel=pick((False, True)), state_v_first=pick((False, True)),
        has_narrow_gates=pick((False, True)),
    )  # fmt: skip


def draw_problem(source, kind):
    """Draw lengths and heads of a kind, and how sequences are cut into segments."""
    pick, H = source.choice, source.randint(1, 3)
    lengths = rows(source.randint(1, 300))
    if kind.lengths.ends is not None:
        some = [pick((0, 1, 63, 64, 65, source.randint(1, 400))) for _ in range(source.randint(1, 6))]
        lengths = packed(1, *some, tail=pick((0, 40)))
    gate = pick(("strong", "mild", "slow", "none", "reset", "model"))
    case = replace(
        kind, heads=(H, H * pick((1, 2, 3, 8))), lengths=lengths,
        gate="absent" if kind.gate == "absent" else gate, keys=pick(("random", "correlated", "identical")),
        is_strided=pick((False, True)), is_scaled=pick((False, True)),
    )  # fmt: skip
    return case, pick((None, 1, 2, 3, Cut(2, 1, 1), Cut(3, 2, 1)))


def reference_in_one_launch(given, number):
    """Compute the reference recurrence in one launch; compare the first with `accuracy`'s, token by token."""
    wide = given.double()
    options = {name: x for name, x in wide.options.items() if name not in accuracy.BACKEND_OPTIONS}
    found = one_launch.reference_recurrence(**wide.tensors, **options)
    if number == 0:
        assert all(error(x, y) < 1e-12 for x, y in zip(found, reference(given), strict=True) if y.norm() > 0)
    return found


SEEDS = range(int(os.environ.get("GDN_TEST_SEEDS", "4")))
PROBLEMS = range(int(os.environ.get("GDN_TEST_PROBLEMS", "8")))


def shorten(lengths):
    """Return lengths with an eighth of each sequence's tokens, rounded up."""
    if lengths.ends is None:
        return lengths._replace(T=-(-lengths.T // 8))
    parts = [-(-(end - begin) // 8) for begin, end in itertools.pairwise(lengths.ends)]
    return packed(*parts, tail=-(-(lengths.T - lengths.ends[-1]) // 8))


@pytest.mark.interpret
@simulated
def test_the_reference_in_one_launch():
    """Compare the recurrence in one launch with the reference recurrence, over an eighth of the tokens."""
    source = random.Random(0)
    for _ in range(4):
        case, _ = draw_problem(source, draw_kind(source))
        short = replace(case, lengths=shorten(case.lengths))
        reference_in_one_launch(inputs(short, torch.bfloat16), 0)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("seed", SEEDS)
def test_any_problem_on_a_gpu(monkeypatch, seed):
    """Be as accurate as Triton, also where rounding costs much: identical keys, beta near 1."""
    source = random.Random(seed)
    kind = draw_kind(source)
    for number in PROBLEMS:
        case, segment = draw_problem(source, kind)
        set_segments(monkeypatch, segment)
        set_consumers(monkeypatch, 1 + number % 2)
        given = inputs(case, torch.bfloat16, device="cuda")
        own, triton = (
            gdn.chunk_gated_delta_rule(**given.tensors, **given.options, backend=name)
            for name in ("hopper", "triton")
        )
        for three in zip(own, triton, reference_in_one_launch(given, number), strict=True):
            assert is_as_close(*three, 5e-3), f"{number}: {case}, segments of {segment}"


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("seed", SEEDS)
def test_any_well_conditioned_problem_on_a_gpu(monkeypatch, seed):
    """Be accurate on the fast path, or as accurate as Triton; the bits of the general path differ."""
    source, num_fast = random.Random(seed), 0
    kind = replace(draw_kind(source), sizes=(128, 128), lengths=packed(1))
    if kind.gate == "absent" and kind.beta in ("negative", "absent"):
        kind = replace(
            kind, beta="sigmoid"
        )  # beta to 2, or of 1, without decay: no chunk is well-conditioned
    for number in PROBLEMS:
        case, segment = draw_problem(source, kind)
        lengths = packed(*(source.randint(100, 700) for _ in range(3)))
        case = replace(case, lengths=lengths, keys=("random", "correlated")[number % 2])
        set_segments(monkeypatch, segment)
        set_consumers(monkeypatch, 1 + number // 2 % 2)
        given = inputs(case, torch.bfloat16, device="cuda")
        set_fast_path(monkeypatch)
        own = forward(given)[:2]
        set_fast_path(monkeypatch, False)
        num_fast += not torch.equal(own[0], forward(given)[0])
        p = parse(**given.tensors, **given.options, backend="triton")
        triton = chunked.chunk_forward(p, False)[:2]
        for three in zip(own, triton, reference_in_one_launch(given, number), strict=True):
            limit = 1e-2 if case.keys == "correlated" else 5e-3
            assert is_as_close(*three, limit), f"{number}: {case}, segments of {segment}"
    assert num_fast > 0


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("segment", [None, 1])
def test_nan_on_a_gpu(monkeypatch, segment):
    set_segments(monkeypatch, segment)
    check_nan_stays(
        "cuda", lambda given: gdn.chunk_gated_delta_rule(**given.tensors, **given.options, backend="hopper")
    )


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("every", [None, 64, 128])
def test_prefill_on_a_gpu(every, D):
    """Compare with Triton, with checkpoints every so many tokens, and snapshots."""
    for lengths in ((70, 0, 130, 64), (300, 5000, 40, 4096)):
        x = make_prefill((4, 8), D, *lengths) | checkpoint_options(every, 8, D, *lengths)
        found, expected = (run_prefill(name, "cuda", x) for name in ("hopper", "triton"))
        assert all(error(x, y.double()) < 5e-3 for x, y in zip(found, expected, strict=True))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("D, is_on", [(64, False), (128, False), (128, True)])
def test_checkpoints_on_a_gpu(monkeypatch, D, is_on):
    set_fast_path(monkeypatch, is_on)
    set_segments(monkeypatch, None)
    check_checkpoints("cuda", D)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", [*CUT_CASES, *LONG_CASES])
def test_segments_on_a_gpu(monkeypatch, name):
    """Cut sequences into segments of two chunks, or long ones as the cost model does."""
    if name in CUT_CASES:
        set_segments(monkeypatch, 2)
        set_consumers(monkeypatch, 2)
    check_on_gpu((CUT_CASES | LONG_CASES)[name])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize("name", ["options", "V first, narrow", "long, packed", "long, mixed"])
def test_one_consumer_has_the_bits_of_two(monkeypatch, name, is_on):
    """Compare bits, uncut and in segments, with saved tensors and with checkpoints."""
    set_fast_path(monkeypatch, is_on)
    given = inputs((CASES | CUT_CASES | LONG_CASES)[name], torch.bfloat16, device="cuda")
    problem = parse(**given.tensors, **given.options, backend="hopper")
    ends = given.tensors.get("cu_seqlens", torch.arange(problem.N + 1) * problem.T)
    chunks = (ends.diff() + 63) // 64
    for segment, kept in itertools.product((None, 3), (None, torch.bfloat16, torch.float32)):
        set_segments(monkeypatch, segment)
        found = []
        for consumers in (1, 2):
            set_consumers(monkeypatch, consumers)
            o, final, saved = rule.forward(to_kernel_layout(problem), kept)
            # tiles of no chunk are never written
            states = final if saved.S_in is None else saved.S_in[: int(chunks.sum())]
            found.append((o, final, states))
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", [*FAST_CASES, *LONG_CASES, "one chunk", "no decay, states K first"])
@pytest.mark.parametrize("consumers", [1, 2])
def test_well_conditioned_chunks_on_a_gpu(monkeypatch, name, consumers):
    """Compare with the reference recurrence; demand the same bits every time."""
    set_consumers(monkeypatch, consumers)
    set_fast_path(monkeypatch)
    case, segment = (
        FAST_CASES[name][:2] if name in FAST_CASES else ((CASES | CUT_CASES | LONG_CASES)[name], None)
    )
    if name not in LONG_CASES:
        set_segments(monkeypatch, segment)
    given = inputs(case, torch.bfloat16, device="cuda")
    expected, limit = reference(given), LIMITS.get(case.keys, 5e-3)
    first = [x.clone() for x in forward(given)[:2]]
    assert all(error(x, y) < limit for x, y in zip(first, expected, strict=True))
    for _ in range(100):
        assert all(torch.equal(x, y) for x, y in zip(forward(given)[:2], first, strict=True))
