"""The reverse state scan in segments: simulated on the CPU, and its cost."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON

from gdn.problem import parse
from gdn.testing import Case, inputs, packed, rows

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit.hopper import Simulated, error, simulated

from gdn.backends.hopper import cost as forward_cost
from gdn.backends.hopper.backward import cost, plan, segments
from gdn.backends.hopper.backward.cost import Segmentation
from gdn.backends.hopper.cost import Cut, equal_lengths
from gdn.backends.triton.chunks import Table
from gdn.backends.triton.launch import PlanCache, allocate, machine
from gdn.backends.triton.rule import run as chunked

BASE = Case(sizes=(128, 128), heads=(1, 1), state="wide")
CASES = {
    "no decay": (replace(BASE, lengths=packed(200, 0, 70, tail=29), gate="none"), Cut(1, 9, 1)),
    "V first, narrow": (replace(BASE, lengths=rows(257), state="narrow", state_v_first=True), Cut(2, 1, 1)),
    # the decay of the segment in the middle is 0 in fp32
    "gone": (replace(BASE, lengths=rows(200), gate="slow"), Cut(1, 9, 1)),
    "few keys": (replace(BASE, sizes=(64, 64), lengths=packed(200, 0, 70), gate="none"), Cut(1, 9, 1)),
}  # fmt: skip


def set_schedule(monkeypatch, segmentation=None, consumers=2):
    """Set how the backward is scheduled, whatever the cost model says."""
    monkeypatch.setattr(plan, "schedule_of", lambda p: (consumers, segmentation))
    monkeypatch.setattr(plan, "_plans", PlanCache())


@pytest.fixture
def simulated_kernels(monkeypatch):
    for module in (plan, segments):
        monkeypatch.setattr(module, "Launch", Simulated)


def backward(given):
    problem = parse(**given.tensors, **given.options, backend="triton")
    saved = chunked.chunk_forward(problem, True)[2]
    return plan.chunk_backward(problem, saved, given.do, given.dfinal_state)


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_kernels")
@pytest.mark.parametrize("name, consumers", zip(CASES, ((2, 1), (2, 2), (2, 1), (1, 1)), strict=True))
def test_segments(monkeypatch, name, consumers):
    """Segments change no gradient by more than the rounding of dS; the last tokens keep their bits."""
    case, cut = CASES[name]
    given = inputs(case, torch.bfloat16)
    if name == "gone":
        given.tensors["g"][:, 128:192] = -2.0
    set_schedule(monkeypatch, consumers=consumers[0])
    whole = backward(given)
    maps, call = [], Simulated.__call__

    def watched(launch, *tensors):
        call(launch, *tensors)
        if launch.kernel is segments.reverse_transfer_kernel:
            maps.append(tensors[-1].unflatten(0, (-1, 2))[1:, 1].abs().amax((1, 2, 3)))

    monkeypatch.setattr(Simulated, "__call__", watched)
    set_schedule(monkeypatch, Segmentation(cut, *consumers), consumers[0])
    found = backward(given)
    for x, y in zip(found, whole, strict=True):
        assert (x is None) == (y is None) and (x is None or error(x, y.double()) < 3e-3)
    assert torch.equal(found.dv[:, -64:], whole.dv[:, -64:])
    assert (maps[0][0] == 0) == (name == "gone")


@pytest.mark.interpret
@simulated
@pytest.mark.parametrize("cut", [Cut(3, 2, 1)])
def test_work_items_cover_all_chunks(cut):
    """Cover each token of many sequences once, last tokens first; other CTAs get empty work items."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4, (66,), generator=generator) * 70
    lengths[[7, 65]] = torch.tensor([1000, 0])
    given = inputs(replace(BASE, lengths=packed(*lengths.tolist())), torch.bfloat16)
    p = parse(**given.tensors, **given.options, backend="triton")
    table = Table(p, machine(p.device))
    launches = segments.plan_launches(p, Segmentation(cut, 2, 2), (p.T, 1, 1, 0, table.bound))
    _, scan_items, transfer_items, ranges, _ = allocate(p.device, launches.specs)
    factors = torch.zeros((table.bound, 1, 8, 64))
    launches.plan(factors, p.cu_seqlens, table.make(p.cu_seqlens), scan_items, transfer_items, ranges)
    scan_items, transfer_items, ranges = scan_items.tolist(), transfer_items.tolist(), ranges.tolist()
    num_segments = chunk = 0
    for n, length in enumerate(lengths.tolist()):
        chunks = -(-length // 64)
        before, _ = cut.segments(chunks)
        sizes = [segment for count, segment in before for _ in range(count)]
        count = 1 + len(sizes)
        assert ranges[n] == [num_segments, count]
        end, found = chunks, {}
        for i in range(count):
            begin = 0 if i == count - 1 else end - sizes[i]
            tokens = min(64 * end, length) - 64 * begin
            found[i] = [0, int(p.cu_seqlens[n]) + 64 * begin, tokens, chunk + begin]
            assert tokens > 0 or length == 0
            end = begin
        chunk += chunks
        # the segment of the first tokens first
        assert scan_items[num_segments : num_segments + count] == [
            [*found[i], n if i == count - 1 else -1, num_segments + i] for i in (count - 1, *range(count - 1))
        ]
        expected = [
            [*found[i], 2 * (num_segments + i) + is_map, n if i == 0 else -1]
            for i, is_map in itertools.product(range(count - 1), (0, 1))
            if i > 0 or not is_map
        ]
        own = transfer_items[2 * num_segments : 2 * (num_segments + count)]
        assert own[: len(expected)] == expected
        assert all(item[2] == 0 and item[4:] == [-1, -1] for item in own[len(expected) :])
        num_segments += count
    assert all(item[2] == 0 and item[4] == -1 for item in scan_items[num_segments:])
    assert all(item[2] == 0 and item[4:] == [-1, -1] for item in transfer_items[2 * num_segments :])


def test_a_full_gpu_is_not_cut():
    """Cut long sequences of few heads only, and where that is at least 10 % faster."""
    for HV, N, chunks in itertools.product((1, 8, 16, 32, 64, 132), (1, 8), (1, 2, 64, 512)):
        distribution = equal_lengths(N, chunks)
        found = cost._best_segmentation(HV, (distribution,), 132)
        if chunks <= 2 or N * HV >= 132:
            assert found is None
        elif found is not None:
            whole = cost._whole_time(HV, distribution, 132)
            assert cost._cut_time(HV, distribution, found, 132) < forward_cost.GAIN * whole
    assert cost._best_segmentation(8, (equal_lengths(1, 128),), 132) is not None
    assert cost._best_segmentation(8, (equal_lengths(1, 512),), 132) is not None
    given = inputs(replace(BASE, lengths=rows(20000)), torch.bfloat16)
    problem = parse(**given.tensors, **given.options)
    assert cost.segmentation_of(problem) is not None
    assert cost.segmentation_of(replace(problem, batch_invariant=True)) is None
