"""The backward of Hopper in passes: the plan of the passes, and the bits of a backward without them."""

import os
from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON

import gdn
from gdn.problem import CHUNK, parse
from gdn.testing import Case, inputs, packed, rows

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit.hopper import Simulated, on_hopper, simulated
from test_hopper_backward import check

from gdn.backends.hopper import cost as forward_cost
from gdn.backends.hopper import rule
from gdn.backends.hopper.backward import cost, plan, segments, slabs
from gdn.backends.hopper.backward.cost import Segmentation
from gdn.backends.hopper.cost import Cut
from gdn.backends.triton.chunks import Table
from gdn.backends.triton.launch import PlanCache, allocate, machine
from gdn.backends.triton.rule import run as chunked

BASE = Case(sizes=(128, 128), heads=(1, 2), state="wide")
PACKED = replace(BASE, lengths=packed(65, 0, 70, 1, tail=30), state="narrow", state_v_first=True)
CUT = replace(BASE, lengths=packed(200, 0, 70), heads=(1, 1))
thorough = pytest.mark.skipif("GDN_TEST_SEEDS" not in os.environ, reason="expected GDN_TEST_SEEDS")


def set_slab(monkeypatch, slab):
    """Let a pass have so many chunks, or all (None)."""
    monkeypatch.setattr(plan, "slab_of", lambda p: slab)
    monkeypatch.setattr(plan, "_plans", PlanCache())


def expected_passes(slots, group, size):
    """Return the (sequence, distance from its end) of each slot of each pass."""
    order = [
        (head + s, distance)
        for head in range(0, len(slots), group)
        for distance in range(max(slots[head : head + group]))
        for s, count in enumerate(slots[head : head + group])
        if distance < count
    ]
    return [order[i : i + size] for i in range(0, len(order), size)]


@pytest.mark.interpret
@simulated
@pytest.mark.parametrize(
    "lengths, group, size", [(packed(130, 0, 1, 500, 0, 70, tail=70), 2, 3), (rows(129), 4, 5)]
)
def test_passes_cover_all_chunks(lengths, group, size):
    """A pass has the next chunks of each sequence from its end; all are in one pass, empty sequences too."""
    given = inputs(replace(BASE, lengths=lengths), torch.bfloat16)
    p = parse(**given.tensors, **given.options, backend="triton")
    per_row = -(-p.T // CHUNK)
    table = None if p.cu_seqlens is None else Table(p, machine(p.device))
    bound = p.num_chunks if table is None else table.bound
    launches = slabs.plan_launches(p, size, group, None, (p.T, 2, 2, per_row, bound))
    work, chunks, _ = allocate(p.device, launches.specs)
    work.fill_(-7), chunks.fill_(-7)
    made = None if table is None else table.make(p.cu_seqlens)
    launches.plan(made, None, work, chunks)
    if made is None:
        sequences = [(n, n, 0, p.T, n * per_row) for n in range(p.N)]
    else:
        sequences = [
            (n, 0, first, length, chunk)
            for _, n, first, length, chunk in made[2 * bound : table.total_at].view(-1, 5).tolist()
        ]
        assert [length for *_, length, _ in sequences][:2] == [500, 130]
    counts = [-(-length // CHUNK) for *_, length, _ in sequences]
    passes = expected_passes([max(x, 1) for x in counts], group, size)
    assert len(passes) <= len(work)
    after = []  # slots behind those of all sequences
    for i, (items, slots) in enumerate(zip(work.tolist(), chunks.tolist(), strict=True)):
        own = passes[i] if i < len(passes) else []
        expected, filled = [], [None] * len(own)
        for s in dict.fromkeys(s for s, _ in sorted(own, key=lambda x: x[0])):
            n, row, first, length, chunk = sequences[s]
            distances = [distance for x, distance in own if x == s]
            end, begin = counts[s] - distances[0], max(counts[s] - distances[-1] - 1, 0)
            start, goal = n if distances[0] == 0 else -1 - s, n if begin == 0 else -2 - s
            slot = sum(x < s for x, _ in own)
            tokens = min(end * CHUNK, length) - begin * CHUNK if counts[s] else 0
            token = row * p.T + first + begin * CHUNK
            expected.append([token, tokens, chunk + begin, goal, start, slot])
            for j in range(len(distances)):
                left = min(length - (begin + j) * CHUNK, CHUNK)
                place = own.index((s, distances[-1 - j]))
                filled[place] = [token + j * CHUNK, left, chunk + begin + j, slot + j]
        count = items[0][0]
        assert [x[1:7] for x in items[1 : 1 + count] if x[4:6] != [-1, -1]] == expected
        assert all(x[2] == 0 for x in items[1 : 1 + count] if x[4:6] == [-1, -1])
        # the chunks that are scanned last come first
        assert slots[::-1][: len(own)] == filled
        after += [x[:2] for x in slots[::-1][len(own) :]]
    tail = [] if made is None else made[: 2 * bound].view(-1, 2)[sum(counts) :].tolist()
    assert [x for x in after[: len(tail)] if x[1]] == [x for x in tail if x[1]]
    assert all(x[1] == 0 for x in after[len(tail) :])
    assert (made is None) != any(x[1] < 0 for x in after)


def backward(given, has_final=True, may_overwrite=False):
    p = parse(**given.tensors, **given.options, backend="triton")
    saved = chunked.chunk_forward(p, True)[2]
    p = replace(p, may_overwrite=may_overwrite)
    return plan.chunk_backward(p, saved, given.do, given.dfinal_state if has_final else None)


@pytest.mark.interpret
@simulated
@pytest.mark.parametrize(
    "case, size, segmentation",
    [
        (PACKED, 3, None),
        pytest.param(replace(BASE, lengths=rows(129)), 4, None, marks=thorough),
        pytest.param(CUT, 2, Segmentation(Cut(1, 9, 1), 2, 1), marks=thorough),
    ],
    ids=["packed", "rows", "segments"],
)
def test_passes_change_no_bit(monkeypatch, case, size, segmentation):
    """Gradients have the bits of a backward in one pass, and match the reference; two sequences a group.

    They have them too where dq and dk take the memory of q and k.
    """
    for module in (plan, segments):
        monkeypatch.setattr(module, "Launch", Simulated)
    monkeypatch.setattr(plan, "schedule_of", lambda p: (2, segmentation))
    monkeypatch.setattr(forward_cost, "num_sms", lambda device: 4)
    given = inputs(case, torch.bfloat16)
    set_slab(monkeypatch, None)
    whole = backward(given)
    set_slab(monkeypatch, size)
    q, k = (given.tensors[name].clone() for name in "qk")
    own = replace(given, tensors={**given.tensors, "q": q, "k": k})
    found = backward(own, may_overwrite=True)
    assert (found.dq.data_ptr(), found.dk.data_ptr()) == (q.data_ptr(), k.data_ptr())
    for x, y in zip(found, whole, strict=True):
        assert (x is None) == (y is None) and (x is None or torch.equal(x, y))
    if "GDN_TEST_SEEDS" in os.environ:
        check(given, case, given.do, given.dfinal_state)


def test_size_of_a_pass(monkeypatch):
    """A pass has 24 MiB of dS; a backward that has few passes runs in one, as all do without recompute."""
    given = inputs(replace(BASE, heads=(16, 32), lengths=rows(64)._replace(B=1)), torch.bfloat16)
    p = parse(**given.tensors, **given.options)
    long = replace(p, q=p.q.expand(1, 64, 16, 128).repeat(1, 96, 1, 1))
    assert long.num_chunks == 96
    assert cost.slab_of(long) is None
    monkeypatch.setattr(cost, "SLABS", True)
    assert cost.slab_of(long) == 24
    assert cost.slab_of(p) is None
    monkeypatch.setattr(cost, "SLABS", False)
    # with recompute 64 MiB, unless the boundary states of many sequences take what a pass saves
    assert cost.slab_of(replace(long, recompute=True)) == 64
    many = replace(p, q=p.q.expand(96, 64, 16, 128), v=p.v.expand(96, 64, 32, 128), recompute=True)
    assert many.num_chunks == many.N == 96 and cost.slab_of(many) is None


def trains(test):
    """Run a test on an sm_90 GPU."""
    return pytest.mark.gpu(on_hopper(test))


GPU_CASES = {
    "rows": replace(BASE, heads=(16, 32), lengths=rows(2048)._replace(B=4)),
    "packed": replace(
        BASE, heads=(16, 32), lengths=packed(3000, 1, 0, 640, 64, *[70] * 20, 2000, tail=300),
        state="narrow", state_v_first=True, use_qk_l2norm_in_kernel=True,
    ),
    "segments": replace(BASE, heads=(2, 8), lengths=rows(8192)._replace(B=1), gate="slow"),
    "no state": replace(BASE, heads=(4, 4), lengths=rows(1000)._replace(B=9), state="none"),
}  # fmt: skip


@trains
@pytest.mark.parametrize("name", GPU_CASES)
def test_passes_change_no_bit_on_a_gpu(monkeypatch, name):
    """Gradients have the bits of a backward in one pass, whatever its chunks; in a CUDA graph, too."""
    given = inputs(GPU_CASES[name], torch.bfloat16, device="cuda")
    p = parse(**given.tensors, **given.options, backend="hopper")
    saved = rule.chunk_forward(p, True)[2]
    dfinal = None if name == "no state" else given.dfinal_state

    def run():
        return plan.chunk_backward(p, saved, given.do, dfinal)

    set_slab(monkeypatch, None)
    assert (plan.schedule_of(p)[1] is not None) == (name == "segments")
    whole = run()
    for size in (5, 24):
        set_slab(monkeypatch, size)
        for _ in range(3):
            assert all(x is y is None or torch.equal(x, y) for x, y in zip(run(), whole, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for x in captured:
        if x is not None:
            x.fill_(float("nan"))
    graph.replay()
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(captured, whole, strict=True))


@trains
def test_passes_take_less_memory(monkeypatch):
    """The peak memory of a step falls by nearly all of dS."""
    monkeypatch.setattr(plan, "_plans", PlanCache())
    given = inputs(replace(GPU_CASES["rows"], state="none", lengths=rows(4096)._replace(B=4)), torch.bfloat16)
    leaves = {name: x.cuda().requires_grad_() for name, x in given.tensors.items()}
    do, peaks = given.do.cuda(), []
    for is_on in (False, True):
        monkeypatch.setattr(cost, "SLABS", is_on)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            o, _ = gdn.chunk_gated_delta_rule(**leaves, **given.options, backend="hopper")
            torch.autograd.grad(o, list(leaves.values()), do)
        peaks.append(torch.cuda.max_memory_allocated())
    dS = 4 * 64 * 32 * 128 * 128 * 2
    # one pass, and the boundary states in fp32 of four sequences
    assert peaks[0] - peaks[1] > dS - (24 << 20) - 4 * 32 * 128 * 128 * 4 - (8 << 20)
