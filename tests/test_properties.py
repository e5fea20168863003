"""Compare random problems with the reference, forward and backward: any sizes, any options, any lengths."""

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gdn
from gdn.testing.accuracy import error_limits as gates
from gdn.testing.accuracy import measure_error as compare
from gdn.testing.accuracy import reference_rule as law
from gdn.testing.accuracy import run
from gdn.testing.cases import GATES, KEYS, Case, Lengths, is_contradiction, packed
from gdn.testing.tensors import inputs

size = st.one_of(st.integers(1, 20), st.sampled_from([32, 60, 64, 100]))
single = st.builds(Lengths, st.integers(1, 140), st.integers(1, 2), st.none())
several = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 70)), min_size=1, max_size=5).filter(sum)
lengths = st.one_of(
    single, st.builds(lambda parts, tail: packed(*parts, tail=tail), several, st.integers(0, 9))
)
flag = st.booleans()


@st.composite
def cases(draw) -> Case:
    H, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    case = Case(
        gate=draw(st.sampled_from(GATES)), keys=draw(st.sampled_from(KEYS)), lengths=draw(lengths),
        heads=(H, H * ratio), sizes=(draw(size), draw(size)), use_qk_l2norm_in_kernel=draw(flag),
        raw_gate=draw(st.sampled_from(("off", "on", "no_bias"))),
        beta=draw(st.sampled_from(("given", "absent", "sigmoid", "negative"))),
        state=draw(st.sampled_from(("none", "wide", "narrow"))), state_v_first=draw(flag),
        is_scaled=draw(flag), is_strided=draw(flag), has_narrow_gates=draw(flag), exact=draw(flag),
        batch_invariant=draw(flag),
    )  # fmt: skip
    return case


def floor(expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the rounding error to allow: inputs are of order 1, but a gradient may be exactly 0 (K = 1)."""
    return (1e-4 if dtype == torch.float64 else 1.0) * expected.numel() ** 0.5


@pytest.mark.parametrize("part", range(4))
def test_random_problems(backend, device, part):
    """1,000 random problems agree (100 if kernels compile for each), in four parts."""
    dtype, count = (torch.float32, 25) if backend == "triton" else (torch.float64, 250)

    @hypothesis.seed(part)
    @settings(max_examples=count)
    @given(
        case=cases().filter(lambda case: not is_contradiction(vars(case))),
        seed=st.integers(0, 2**20),
    )
    def check(case, seed):
        problem = inputs(case, dtype, seed=seed, device=device)
        expected = run(law, problem.double())
        found = run(lambda *x, **options: gdn.chunk_gated_delta_rule(*x, backend=backend, **options), problem)
        for name, limit in gates(dtype, case.keys).items():
            if name in expected:
                error, largest = compare(
                    found[name], expected[name], limit, lambda x=expected[name]: floor(x, dtype)
                )
                assert error <= limit, f"{name}: {error:.1e} (max {largest:.1e})"

    check()
