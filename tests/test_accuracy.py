"""Compare every backend with the reference in fp64, forward and backward, over every pair of choices."""

from dataclasses import replace

import pytest
import torch

import gdn
from gdn.testing.accuracy import check
from gdn.testing.accuracy import error_limits as gates
from gdn.testing.cases import LENGTHS, QUICK, Case, covering

COVERING, SMALL = covering(max_cost=2**24), covering(QUICK)
LONG = 1000  # tokens: from here the reference, one token after the other, takes a second and more
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def verdicts(provider, case, dtype, **options):
    """Return a readable line for each row that failed."""
    return [
        f"{row.output}: {row.error:.2e} > {row.limit:.0e} (max {row.max_abs:.1e})"
        for row in check(provider, case, dtype, **options)
        if not row.ok
    ]


def chunk(backend):
    return lambda *x, **options: gdn.chunk_gated_delta_rule(*x, backend=backend, **options)


def recurrent(backend):
    def provider(q, k, v, g, beta, **options):
        return gdn.fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, backend=backend, **options)

    return provider


def dtypes(backend, number):
    """Return the dtypes of a case: all three of `triton`; for `eager` fp32 and one of four in turn."""
    return set(DTYPES[:3]) if backend == "triton" else {torch.float32, DTYPES[number % 4]}


def chunk_dtypes(backend, case):
    """Return the dtypes of a case of `test_chunk`: for long ones on `eager`, all four in turn."""
    if backend == "triton" or case.lengths.T < LONG:
        return dtypes(backend, COVERING.index(case))
    alike = [c for c in COVERING if c.lengths == case.lengths]
    return {DTYPES[(alike.index(case) + LENGTHS.index(case.lengths)) % 4]}


def test_every_length_and_every_gate_row_is_there():
    assert {case.lengths for case in COVERING} == set(LENGTHS)
    assert gates(torch.bfloat16, "random")["o"] == 5e-3 and gates(torch.float16, "negative")["dg"] == 3e-2
    assert gates(torch.float32, "random")["dq"] == 1e-5 and gates(torch.float64, "correlated")["dg"] == 1e-9


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_chunk(backend, device, case):
    for dtype in chunk_dtypes(backend, case):
        bad = verdicts(chunk(backend), case, dtype, device=device)
        assert not bad, f"{dtype}: {bad}"


@pytest.mark.parametrize("case", [c for c in COVERING if c.lengths.T <= 150], ids=str)
def test_recurrent(backend, device, case):
    for dtype in dtypes(backend, 0):
        bad = verdicts(recurrent(backend), case, dtype, device=device)
        assert not bad, f"{dtype}: {bad}"


@pytest.mark.interpret
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small(backend, device, case):
    """Every pair of choices also holds on problems that are small enough for an interpreter."""
    for dtype in {torch.float32, DTYPES[SMALL.index(case) % 3]}:
        bad = verdicts(chunk(backend), case, dtype, device=device)
        assert not bad, f"{dtype}: {bad}"


@pytest.mark.interpret
@pytest.mark.parametrize("case", SMALL[::6], ids=str)
def test_small_recurrent(backend, device, case):
    """The recurrent form holds too. An interpreter is slow at it, so long cases take one dtype in turn."""
    few, turn = case.lengths.T == 1, SMALL.index(case) // 6 % 3
    for dtype in DTYPES[:3] if few else [DTYPES[turn]]:
        bad = verdicts(recurrent(backend), case, dtype, device=device)
        assert not bad, f"{dtype}: {bad}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_and_slow(backend, device, dtype):
    """A state stays accurate over thousands of tokens."""
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("triton refuses fp64")
    case = Case(
        "slow", lengths=LENGTHS[15], heads=(1, 2), sizes=(32, 32), state="wide", use_qk_l2norm_in_kernel=True
    )
    assert not verdicts(chunk(backend), case, dtype, device=device)


@pytest.mark.interpret
def test_writes_that_take_back_what_was_written(backend, device):
    """With identical keys and beta = 1 a state is a sum of differences; coherent errors would add up."""
    identical = (c for c in COVERING if c.keys == "identical" and c.gate == "slow" and c.lengths.T == 129)
    case = replace(next(identical), heads=(2, 2), sizes=(100, 100))
    assert not verdicts(chunk(backend), case, torch.bfloat16, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_eager_on_a_gpu(case):
    """`eager` agrees on a CUDA device, where it does not read the lengths of packed sequences."""
    for dtype in (torch.float32, torch.bfloat16):
        for function in (chunk("eager"), recurrent("eager")):
            assert not verdicts(function, case, dtype, device="cuda")
