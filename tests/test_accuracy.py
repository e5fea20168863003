"""accuracy.md for every backend: each pair of choices met, forward and backward, against the law in fp64."""

from dataclasses import replace

import pytest
import torch

import gdn
from gdn.testing.accuracy import check
from gdn.testing.accuracy import error_limits as gates
from gdn.testing.cases import LENGTHS, QUICK, Case, covering

COVERING, SMALL = covering(max_cost=2**24), covering(QUICK)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def verdicts(provider, case, dtype, **options):
    """The rows that failed, readable."""
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
    """fp32, the strictest that all backends share, and one of four in turn; all three that `triton` takes."""
    return set(DTYPES[:3]) if backend == "triton" else {torch.float32, DTYPES[number % 4]}


def test_every_length_and_every_gate_row_is_there():
    assert {case.lengths for case in COVERING} == set(LENGTHS)
    assert gates(torch.bfloat16, "random")["o"] == 5e-3 and gates(torch.float16, "negative")["dg"] == 3e-2
    assert gates(torch.float32, "random")["dq"] == 1e-5 and gates(torch.float64, "correlated")["dg"] == 1e-9


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_chunk(backend, device, case):
    for dtype in dtypes(backend, COVERING.index(case)):
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
    """Every pair of choices again, on problems small enough for an interpreter."""
    for dtype in {torch.float32, DTYPES[SMALL.index(case) % 3]}:
        bad = verdicts(chunk(backend), case, dtype, device=device)
        assert not bad, f"{dtype}: {bad}"


@pytest.mark.interpret
@pytest.mark.parametrize("case", SMALL[::6], ids=str)
def test_small_recurrent(backend, device, case):
    """A token at a time, which takes an interpreter long: one dtype in turn where there are many tokens."""
    few, turn = case.lengths.T == 1, SMALL.index(case) // 6 % 3
    for dtype in DTYPES[:3] if few else [DTYPES[turn]]:
        bad = verdicts(recurrent(backend), case, dtype, device=device)
        assert not bad, f"{dtype}: {bad}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_and_slow(backend, device, dtype):
    """The state carries for thousands of tokens."""
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("triton refuses fp64")
    case = Case(
        "slow", lengths=LENGTHS[15], heads=(1, 2), sizes=(32, 32), state="wide", use_qk_l2norm_in_kernel=True
    )
    assert not verdicts(chunk(backend), case, dtype, device=device)


@pytest.mark.interpret
def test_writes_that_take_back_what_was_written(backend, device):
    """Identical keys and beta = 1: a state is the sum of differences, so that one coherent error adds up."""
    identical = (c for c in COVERING if c.keys == "identical" and c.gate == "slow" and c.lengths.T == 129)
    case = replace(next(identical), heads=(2, 2), sizes=(100, 100))
    assert not verdicts(chunk(backend), case, torch.bfloat16, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_eager_on_a_gpu(case):
    """The same problems on a CUDA device, where the lengths of packed sequences are not read."""
    for dtype in (torch.float32, torch.bfloat16):
        for function in (chunk("eager"), recurrent("eager")):
            assert not verdicts(function, case, dtype, device="cuda")
