"""Check that equal inputs give equal bits, forward and backward, run after run, on every backend."""

import pytest
import torch
from conftest import GPU

import gdn
from gdn.testing import Case, inputs, packed, rows
from gdn.testing.accuracy import run

REPEATS = 100
RAGGED = (3000, 0, 64, 1, 2047, 0, 65, 3, 1000, 0, 1983)  # with a tail of 29: 8,192 tokens
SMALL = (70, 0, 64, 1, 0, 33)
GATES = {
    "gates given": {},
    "gates in the kernel": {"raw_gate": "on", "beta": "sigmoid", "use_qk_l2norm_in_kernel": True},
}
each_gate = pytest.mark.parametrize("gate", GATES)
each_layout = pytest.mark.parametrize("layout", ["dense", "packed"])
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="expected sm_90"
)


def as_integers(x):
    """Return the bits of x as integers, so that NaN equals itself and -0 does not equal 0."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def first_difference(call, repeats):
    """Return (repeat, names) of the first repeat whose tensors differ from those of the first call, or None.

    Bits are compared on the tensors' device. The tensors of the previous repeat are alive while a call runs,
    so that a call does not always get the same memory.
    """
    expected = {name: as_integers(x) for name, x in call().items()}
    for repeat in range(1, repeats + 1):
        found = call()
        assert found.keys() == expected.keys()
        names = [name for name, x in found.items() if not torch.equal(as_integers(x), expected[name])]
        if names:
            return repeat, names
    return None


def assert_repeatable(backend, device, case, dtype, repeats=REPEATS):
    """Assert that o, the final state and every gradient keep their bits over many repeats."""
    given = inputs(case, dtype, device=device, is_drawn_there=True)

    def provider(q, k, v, g, beta, **options):
        return gdn.chunk_gated_delta_rule(q, k, v, g, beta, backend=backend, **options)

    wanted = {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0"}
    if case.raw_gate == "on":
        wanted |= {"dA_log", "ddt_bias"}
    first = run(provider, given)
    assert first.keys() == wanted
    assert all(x.isfinite().all() and x.any() for x in first.values())
    assert first_difference(lambda: run(provider, given), repeats) is None


def small_problem(layout, gate):
    lengths = packed(*SMALL, tail=5) if layout == "packed" else rows(129)
    return Case(heads=(2, 4), sizes=(16, 24), lengths=lengths, state="wide", **GATES[gate])


def large_problem(layout, gate):
    """Return the problem of a model's layer: 16 key and 32 value heads of 128, 8,192 tokens."""
    lengths = packed(*RAGGED, tail=29) if layout == "packed" else rows(8192)
    assert (lengths.B, lengths.T) == (1, 8192)
    return Case(heads=(16, 32), sizes=(128, 128), lengths=lengths, state="wide", **GATES[gate])


@each_gate
@each_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_100_repeats_of_forward_and_backward_are_bit_identical_on_eager(layout, gate, dtype):
    assert_repeatable("eager", "cpu", small_problem(layout, gate), dtype)


@pytest.mark.gpu
@each_gate
@each_layout
@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=on_hopper)])
def test_100_repeats_of_forward_and_backward_are_bit_identical_on_a_gpu(backend, layout, gate):
    """The forward of `hopper` is repeatable, and the backward, which is Triton's for both."""
    assert_repeatable(backend, GPU, large_problem(layout, gate), torch.bfloat16)


@pytest.mark.parametrize("change", ["one bit", "NaN", "sign of zero"])
def test_a_single_changed_number_is_found(change):
    """The comparison finds one changed element in one of 100 repeats, and ignores NaN that stays NaN."""
    values = {"one bit": (1.0, 1.0000001192092896), "NaN": (1.0, float("nan")), "sign of zero": (0.0, -0.0)}
    before, after = values[change]
    calls = iter(range(1000))

    def call(at=37):
        x = torch.full((5,), before)
        x[0] = float("nan")
        x[3] = after if next(calls) == at else before
        return {"o": torch.ones(2), "dg": x}

    assert first_difference(call, REPEATS) == (37, ["dg"])
    calls = iter(range(1000))
    assert first_difference(lambda: call(at=-1), REPEATS) is None
