"""accuracy.md for every backend: each pair of choices met, forward and backward, against the law in fp64."""

import pytest
import torch

import gdn
from gdn.bench.accuracy import check, gates
from gdn.bench.cases import LENGTHS, QUICK, Case, covering

COVERING = covering(max_cost=2**24)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def verdicts(provider, case, dtype, **options):
    """The rows that failed, readable."""
    return [
        f"{row.output}: {row.error:.2e} > {row.limit:.0e} (max {row.max_abs:.1e})"
        for row in check(provider, case, dtype, **options)
        if not row.ok
    ]


def test_every_length_and_every_gate_row_is_there():
    assert {case.lengths for case in COVERING} == set(LENGTHS)
    assert gates(torch.bfloat16, "random")["o"] == 5e-3 and gates(torch.float16, "negative")["dg"] == 3e-2
    assert gates(torch.float32, "random")["dq"] == 1e-5 and gates(torch.float64, "correlated")["dg"] == 1e-9


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_chunk(backend, case):
    # each case in one dtype of four, in turn, and every case in fp32, the strictest that all backends share
    for dtype in {torch.float32, DTYPES[COVERING.index(case) % 4]}:
        bad = verdicts(lambda *x, **o: gdn.chunk_gated_delta_rule(*x, backend=backend, **o), case, dtype)
        assert not bad, f"{dtype}: {bad}"


def recurrent(backend):
    def provider(q, k, v, g, beta, **options):
        return gdn.fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, backend=backend, **options)

    return provider


@pytest.mark.parametrize("case", [c for c in COVERING if c.lengths.T <= 150], ids=str)
def test_recurrent(backend, case):
    assert not verdicts(recurrent(backend), case, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_and_slow(backend, dtype):
    """The state carries for thousands of tokens."""
    case = Case(
        "slow", lengths=LENGTHS[15], heads=(1, 2), sizes=(32, 32), state="wide", use_qk_l2norm_in_kernel=True
    )
    assert not verdicts(lambda *x, **o: gdn.chunk_gated_delta_rule(*x, backend=backend, **o), case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", covering(QUICK), ids=str)
def test_on_a_gpu(backend, case):
    """The same problems on a CUDA device, where the lengths of packed sequences are not read."""
    for dtype in (torch.float32, torch.bfloat16):
        for function in (
            lambda *x, **o: gdn.chunk_gated_delta_rule(*x, backend=backend, **o),
            recurrent(backend),
        ):
            assert not verdicts(function, case, dtype, device="cuda")
