"""Simulate sequences that are cut into segments: M, N, and the states that enter them."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON

from gdn.problem import parse
from gdn.testing import inputs, packed, rows

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)


from kit.hopper import (
    BASE,
    CUT_CASES,
    LIMITS,
    Simulated,
    error,
    forward,
    reference,
    set_consumers,
    set_segments,
    simulated,
)

from gdn.backends.hopper import cost, segments
from gdn.backends.hopper.cost import Cut, Cuts, OwnCut, OwnCuts
from gdn.backends.triton.chunks import Table
from gdn.backends.triton.launch import allocate, machine

# two segments of sequences of 3 to 9 chunks, then two long ones, a short one and a rest
OWN = OwnCuts(OwnCut(1, 4, 2), OwnCut(2, 7, 1), 3)


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("cut, consumers", [(Cut(2, 9, 2), 1), (Cut(3, 1, 1), 2)])
@pytest.mark.parametrize("name", CUT_CASES)
def test_segments(monkeypatch, name, cut, consumers):
    """Compare with the reference recurrence; the first two segments have the bits of the uncut scan."""
    set_consumers(monkeypatch, consumers)
    case = CUT_CASES[name]
    given = inputs(case, torch.bfloat16)
    whole = forward(given)[0]
    set_segments(monkeypatch, cut)
    o, final, _ = forward(given)
    expected = reference(given)
    limit = LIMITS.get(case.keys, 5e-3)
    assert error(o, expected[0]) < limit and error(final, expected[1]) < limit
    first = 64 * (cut.long + (cut.long if cut.longs > 1 else cut.short))
    if case.lengths.ends is not None:
        first = min(first, case.lengths.ends[1])
    assert torch.equal(o[:, :first], whole[:, :first])


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("has_decays", [False, True])
@pytest.mark.parametrize(
    "gate, zero_maps", [("none", ()), ("slow", ()), ("strong", (1, 2)), ("second", (1,)), ("third", (2,))]
)
def test_zero_maps_are_not_scanned(monkeypatch, gate, zero_maps, has_decays):
    """Leave M zero, and scan no chunk of it, where a segment's decay is 0 in fp32; the first has no M.

    Segments have 192 tokens.
    """
    set_segments(monkeypatch, 3)
    lengths, call = [], Simulated.__call__

    def watched(launch, *tensors):
        call(launch, *tensors)
        if launch.kernel is segments.segment_transfer_kernel:
            *_, transfers, items = tensors
            lengths.extend(items.view(8, 2, -1)[..., 2].tolist())  # of both heads
            maps = transfers.view(4, 2, 2, -1)[1:3, 1]
            assert [(M == 0).all() for M in maps] == [n in zero_maps for n in (1, 2)]

    monkeypatch.setattr(Simulated, "__call__", watched)
    alone = {"second": slice(192, 384), "third": slice(384, 576)}
    case = replace(BASE, lengths=rows(640), gate="slow" if gate in alone else gate)
    given = inputs(replace(case, batch_invariant=has_decays), torch.bfloat16)
    if gate in alone:
        given.tensors["g"][:, alone[gate]] = -2.0
    o, final, _ = forward(given)
    second, third = (0 if n in zero_maps else 192 for n in (1, 2))
    assert lengths == [[n, n] for n in (192, 192, second, 192, third, 0, 0, 0)]
    expected = reference(given)
    assert error(o, expected[0]) < 5e-3 and error(final, expected[1]) < 5e-3


@pytest.mark.interpret
@simulated
@pytest.mark.parametrize("cut", [Cut(2, 9, 2), Cut(3, 2, 1), Cut(2, 1, 3), OWN])
def test_work_items_cover_all_chunks(monkeypatch, cut):
    """Cover each token of many sequences once, and each final state; other CTAs get empty work items.

    Where each sequence has a cut of its own, the segments before the last alone have items of the transfer.
    """
    monkeypatch.setattr(cost, "LONG_FROM", 10)
    is_own = isinstance(cut, OwnCuts)
    generator = torch.Generator().manual_seed(0)
    # own cuts: 12 sequences, as the interpreter takes a second for 30 work items
    lengths = torch.randint(0, 4, (12 if is_own else 70,), generator=generator) * 70
    lengths[[7, -1]] = torch.tensor([1000, 0])
    given = inputs(replace(BASE, heads=(1, 1), lengths=packed(*lengths.tolist())), torch.bfloat16)
    p = parse(**given.tensors, **given.options, backend="triton")
    table = Table(p, machine(p.device))
    # the tensors hold the segments of the other cut, too
    cuts = cut if is_own else Cuts(cut, Cut(1, 9, 1))
    plan = segments.plan_launches(p, cuts, (p.T, 1, 1, 0, table.bound), 16, False, False)
    _, scan_items, transfer_items, ranges, _ = allocate(p.device, plan.specs)
    plan.plan(
        None,
        None,
        None,
        None,
        p.cu_seqlens,
        table.make(p.cu_seqlens),
        scan_items,
        transfer_items,
        ranges,
        None,
    )
    scan_items, transfer_items, ranges = scan_items.tolist(), transfer_items.tolist(), ranges.tolist()
    num_segments, chunk, num_transfers = 0, 0, 0
    for n, length in enumerate(lengths.tolist()):
        chosen = cut.cut_of(-(-length // 64)) if is_own else cut
        before, _ = ((), 0) if chosen is None else chosen.segments(-(-length // 64))
        sizes = [segment for count, segment in before for _ in range(count)]
        count = 1 + len(sizes)
        assert ranges[n] == [num_segments, count]
        begin, found = 0, {}
        for i in range(count):
            end = length if i == count - 1 else begin + 64 * sizes[i]
            found[i] = [0, int(p.cu_seqlens[n]) + begin, end - begin, chunk + begin // 64]
            begin = end
            assert found[i][2] > 0 or length == 0
        chunk += -(-length // 64)
        # the last first
        assert scan_items[num_segments : num_segments + count] == [
            [*found[i], n if i == count - 1 else -1, num_segments + i] for i in (count - 1, *range(count - 1))
        ]
        # N of the first, N and M of each but the last; no other has a goal
        expected = [
            [*found[i], 2 * (num_transfers + i) + is_map, n if i == 0 else -1]
            for i, is_map in itertools.product(range(count - 1), (0, 1))
            if i > 0 or not is_map
        ]
        own = transfer_items[2 * num_transfers : 2 * (num_transfers + count - is_own)]
        assert own[: len(expected)] == expected
        assert all(item[2] == 0 and item[4:] == [-1, -1] for item in own[len(expected) :])
        num_segments += count
        num_transfers += count - is_own
    assert len(scan_items) >= num_segments
    assert all(item[2] == 0 and item[4] == -1 for item in scan_items[num_segments:])
    assert all(item[2] == 0 and item[4:] == [-1, -1] for item in transfer_items[2 * num_transfers :])


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize(
    "gate, has_open, has_decays, is_few",
    [
        ("strong", False, True, True), ("slow", False, True, False), ("strong", True, True, False),
        ("strong", False, False, False),
    ],
)  # fmt: skip
def test_decays_decide_on_the_cut(monkeypatch, gate, has_open, has_decays, is_few):
    """Take the cut for few M if decays of chunks are stored and at most a quarter of the heads have one.

    With one head of the two that never decays, half have one.
    """
    cuts = Cuts(Cut(3, 9, 3), Cut(4, 1, 1))
    monkeypatch.setattr(cost, "cuts_of", lambda problem, has_pool=False: cuts)
    found, call = [], Simulated.__call__

    def watched(launch, *tensors):
        call(launch, *tensors)
        if launch.kernel is segments.plan_segments_kernel:
            *_, scan_items, _, ranges, _ = tensors
            found.extend([ranges[0, 1].item(), scan_items.view(-1, 2, scan_items.shape[1])[1, 0, 2].item()])

    monkeypatch.setattr(Simulated, "__call__", watched)
    given = inputs(replace(BASE, lengths=packed(450), gate=gate, batch_invariant=has_decays), torch.bfloat16)
    if has_open:
        given.tensors["g"][..., 1] = 0.0
    o, final, _ = forward(given)
    assert found == ([3, 256] if is_few else [3, 192])
    expected = reference(given)
    assert error(o, expected[0]) < 5e-3 and error(final, expected[1]) < 5e-3
