"""Forwards for a backward whose well-conditioned chunks take the fast path: on the CPU."""

from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON

from gdn.problem import parse
from gdn.testing import inputs, packed, poison_memory, rows

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit.hopper import BASE, error, reference, set_consumers, simulate_launches, simulated, watch_flags

from gdn.backends.hopper import rule
from gdn.backends.triton.launch import PlanCache

pytestmark = [pytest.mark.interpret, simulated]

# case, consumers of the scan, and which chunks are well-conditioned
CASES = {
    "rows": (replace(BASE, lengths=rows(129)._replace(B=1), gate="none"), 1, [1, 1, 0]),
    "packed": (
        replace(
            BASE, lengths=packed(70, 0, 64, tail=3), use_qk_l2norm_in_kernel=True, state_v_first=True,
            beta="sigmoid", heads=(1, 1),
        ), 2, [1, 0, 1],
    ),
    "identical keys": (replace(BASE, lengths=rows(64)._replace(B=1), keys="identical"), 2, [0]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_saving_on_the_fast_path(monkeypatch, name):
    """Outputs match the reference, and states are nearer to it than on the general path."""
    case, consumers, expected_flags = CASES[name]
    simulate_launches(monkeypatch)
    set_consumers(monkeypatch, consumers)
    flags = watch_flags(monkeypatch)
    given = inputs(case, torch.bfloat16)
    problem = parse(**given.tensors, **given.options, backend="triton")
    o, S = reference(given)
    results = {}
    for is_fast in (True, False):
        monkeypatch.setattr(rule, "FAST_PATH", is_fast)
        monkeypatch.setattr(rule, "_forwards", PlanCache())
        results[is_fast] = rule.chunk_forward(problem, True)
    chunks = flags[0][: len(expected_flags)]
    assert chunks[:, 0].tolist() == expected_flags and chunks.amin(1).tolist() == expected_flags
    (fast_o, fast_S, saved), (general_o, general_S, general) = results[True], results[False]
    # the backward reads the same A_inv and G, and better states
    assert torch.equal(saved.A_inv, general.A_inv) and torch.equal(saved.G, general.G)
    if any(expected_flags):
        assert error(fast_o, o) < min(5e-3, 1.1 * error(general_o, o))
        assert error(fast_S, S) < min(5e-3, 0.8 * error(general_S, S))
        assert not torch.equal(saved.S_in, general.S_in)
    else:
        assert torch.equal(fast_o, general_o) and torch.equal(fast_S, general_S)


def test_unused_chunks_of_split_inverses_are_zero(monkeypatch):
    """At K = V = 64 both parts of A_inv are zero in chunks of no sequence, which an operator returns."""
    simulate_launches(monkeypatch)
    given = inputs(replace(BASE, sizes=(64, 64), lengths=packed(70, 0, 33, tail=3)), torch.bfloat16)
    problem = parse(**given.tensors, **given.options, backend="triton")
    with poison_memory():
        saved = rule.chunk_forward(problem, True)[2]
    used = saved.A_inv[:3]
    assert saved.A_inv.shape == (problem.num_chunks, 2, 2, 64, 64) and problem.num_chunks > 3
    assert not saved.A_inv[3:].any() and used.isfinite().all() and used[:, :, 1].any()
