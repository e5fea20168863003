"""Simulate well-conditioned chunks, which take the fast path of the state scan."""

from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON

from gdn.testing import inputs, rows

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)


from kit.hopper import (
    BASE,
    FAST_CASES,
    LIMITS,
    error,
    forward,
    reference,
    set_consumers,
    set_fast_path,
    set_segments,
    simulated,
    watch_flags,
)


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("name, consumers", [(name, 1 + i % 2) for i, name in enumerate(FAST_CASES)])
def test_well_conditioned_chunks(monkeypatch, name, consumers):
    """Compare with the reference recurrence; the bits differ from those of the general path."""
    flags = watch_flags(monkeypatch)
    set_consumers(monkeypatch, consumers)
    case, segment, expected_flags = FAST_CASES[name]
    set_segments(monkeypatch, segment)
    given = inputs(case, torch.bfloat16)
    o, final, _ = forward(given)
    expected = reference(given)
    limit = LIMITS.get(case.keys, 5e-3)
    assert error(o, expected[0]) < limit and error(final, expected[1]) < limit
    found = flags[0].flatten(0, -2)
    if expected_flags is not None:
        assert found[: len(expected_flags)].tolist() == [[x] * case.heads[1] for x in expected_flags]
    set_fast_path(monkeypatch, False)
    assert torch.equal(o, forward(given)[0]) == (not (found == 1.0).any())


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("consumers", [1, 2])
def test_both_paths_by_turns(monkeypatch, consumers):
    """Send single chunks to the general path: by identical keys, or by a decay that leaves nothing."""
    flags = watch_flags(monkeypatch)
    set_consumers(monkeypatch, consumers)
    given = inputs(replace(BASE, lengths=rows(390)._replace(B=1), gate="none"), torch.bfloat16)
    x = given.tensors
    x["k"][:, 64:128] = x["k"][:, :1]
    x["k"][:, 256:320] = x["k"][:, 1:2]
    x["g"][:, 128:192] = -2.0
    o, final, _ = forward(given)
    assert flags[0].flatten(0, -2).tolist() == [[n] * 2 for n in (1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0)]
    expected = reference(given)
    assert error(o, expected[0]) < 5e-3 and error(final, expected[1]) < 5e-3
