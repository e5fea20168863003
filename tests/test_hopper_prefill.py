"""Simulate prefills of a pool on the Hopper backend, with checkpoints and snapshots."""

import pytest
import torch
from conftest import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)


from kit.hopper import (
    check_checkpoints,
    checkpoint_options,
    error,
    make_prefill,
    run_prefill,
    set_consumers,
    set_fast_path,
    set_segments,
    simulated,
)

import gdn
from gdn.backends import hopper
from gdn.reference.integers import round_columns


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize(
    "every, segment, D, consumers",
    [(None, None, 128, 2), (64, None, 128, 1), (128, 2, 128, 2), (64, None, 64, 2), (128, 2, 64, 2)],
)
def test_prefill_of_a_pool(monkeypatch, every, segment, D, consumers):
    """Run the Hopper forward between Triton's gather, snapshot and scatter; compare with `eager`."""
    set_consumers(monkeypatch, consumers)
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    set_segments(monkeypatch, segment)
    lengths = (200, 0, 70, 64, 195)
    x = make_prefill((1, 2), D, *lengths) | checkpoint_options(every, 2, D, *lengths)
    found, expected = (run_prefill(name, "cpu", x) for name in ("hopper", "eager"))
    assert all(error(x, y.double()) < 5e-3 for x, y in zip(found, expected, strict=True))


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("D, is_on, consumers", [(64, False, 2), (128, False, 2), (128, True, 1)])
def test_checkpoints_have_the_bits_of_the_state(monkeypatch, D, is_on, consumers):
    """Store checkpoints in fp32, not in the tokens' dtype."""
    set_consumers(monkeypatch, consumers)
    set_fast_path(monkeypatch, is_on)
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    check_checkpoints("cpu", D)


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("every, segment, D", [(64, None, 64), (128, 2, 128)])
def test_prefill_of_an_int16_pool(monkeypatch, every, segment, D):
    """Run the Hopper forward on states that a gather widens; snapshots and final states are rounded again."""
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    set_segments(monkeypatch, segment)
    lengths = (200, 0, 70, 64, 195)
    x = make_prefill((1, 2), D, *lengths) | checkpoint_options(every, 2, D, *lengths)
    n, scale = round_columns(x["state"].mT.double())
    found = []
    for name in ("hopper", "eager"):
        pool = gdn.Int16Pool(n.mT.clone(), scale.clone())
        o, held, kept = run_prefill(name, "cpu", x | {"state": pool})
        assert held is pool
        found.append((o, kept, pool.read(torch.arange(13), state_v_first=True)))
    assert all(error(y, z.double()) < 5e-3 for y, z in zip(*found, strict=True))
    # the slots of sequences and snapshots; one sequence is empty, one has no slot
    before = gdn.Int16Pool(n.mT, scale).read(torch.arange(13), state_v_first=True)
    moved = (found[0][2] != before).flatten(1).any(1)
    assert moved.nonzero().flatten().tolist() == [4, 5, 7, 8, 9, 11, 12]
