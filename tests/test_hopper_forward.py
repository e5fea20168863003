"""Simulate whole forwards of the Hopper backend on the CPU: general path, order of work items."""

from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON

from gdn.problem import parse
from gdn.testing import inputs, packed, rows

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit import gluon_simulator
from kit.hopper import (
    BASE,
    CASES,
    LIMITS,
    Simulated,
    check_nan_stays,
    error,
    forward,
    reference,
    set_consumers,
    set_fast_path,
    set_segments,
    set_short,
    simulated,
    watch_flags,
)

from gdn.backends.hopper import cost, rule, scans
from gdn.backends.triton.chunks import Table
from gdn.backends.triton.launch import PlanCache, machine
from gdn.backends.triton.rule import run as chunked
from gdn.backends.triton.rule.run import chunk_backward as backward


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("name, consumers", [*((name, 2) for name in CASES), ("packed", 1), ("options", 1)])
def test_simulated(monkeypatch, name, consumers):
    """Compare outputs and states with the reference recurrence; outputs of other tokens are zero."""
    set_consumers(monkeypatch, consumers)
    case = CASES[name]
    given = inputs(case, torch.bfloat16)
    o, final, saved = forward(given)
    expected = reference(given)
    limit = LIMITS.get(case.keys, 5e-3)
    assert error(o, expected[0]) < limit and error(final, expected[1]) < limit
    assert all(x is None for x in saved)


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
def test_identical_keys_of_64():
    """Keep split operands at K = 64: outputs would be off by 1.4e-2 if v_new were rounded once."""
    case = replace(BASE, sizes=(64, 64), lengths=rows(64), keys="identical", gate="none", state="none")
    given = inputs(case, torch.bfloat16)
    assert all(
        error(x, y) < LIMITS["identical"] for x, y in zip(forward(given)[:2], reference(given), strict=True)
    )


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("D", [64, 128])
def test_decays_of_any_size(monkeypatch, D):
    """Mix chunks whose decay fits fp32 (up to 2^-92) with others: the two compute decays differently."""
    flags = watch_flags(monkeypatch)
    case = replace(BASE, sizes=(D, D), lengths=rows(384)._replace(B=1))
    given = inputs(case, torch.bfloat16)
    per_token = torch.tensor([0.0, -0.5, -0.99, -1.0, -3.0, -100.0])
    given.tensors["g"].copy_(per_token.repeat_interleave(64)[None, :, None])
    o, final, _ = forward(given)
    if D == 128:
        assert flags[0].flatten(0, -2).tolist() == [[n] * 2 for n in (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)]
    expected = reference(given)
    chunks = zip(o.split(64, 1), expected[0].split(64, 1), strict=True)
    assert all(error(x, y) < 5e-3 for x, y in chunks) and error(final, expected[1]) < 5e-3


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("name, consumers", [("packed", 2), ("options", 1), ("few keys, options", 2)])
def test_ctas_take_tile_after_tile(monkeypatch, name, consumers):
    """Run with one SM: CTAs that take tile after tile give the bits of CTAs with one tile each."""
    set_consumers(monkeypatch, consumers)
    set_fast_path(monkeypatch)
    # a CTA of `solve` steps by two or eight value heads, with carries into key heads and chunks
    case = replace(CASES[name], heads=(2, 10), lengths=packed(200, 0, 33, 130, tail=29), batch_invariant=True)
    given = inputs(case, torch.bfloat16)
    expected = forward(given)[:2]
    monkeypatch.setattr(cost, "num_sms", lambda device: 1)
    monkeypatch.setattr(rule, "_forwards", PlanCache())
    assert all(torch.equal(x, y) for x, y in zip(forward(given)[:2], expected, strict=True))


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("is_short", [False, True])
def test_no_work_item_is_taken_before_the_counter_is_zeroed(monkeypatch, is_short):
    """Start the scan before `solve` has completed: it must wait even if no sequence has a token."""
    set_short(monkeypatch, is_short)
    case = replace(BASE, heads=(1, 1), lengths=packed(0, 0, 0, tail=70))
    given = inputs(case, torch.bfloat16)
    expected = forward(given)[:2]
    monkeypatch.setattr(cost, "num_sms", lambda device: 1)
    monkeypatch.setattr(rule, "_forwards", PlanCache())
    call = Simulated.__call__

    def early(launch, *tensors):
        if launch.kernel in (scans.persistent_scan_kernel, scans.short_scan_kernel):
            count = tensors[-1].fill_(1000)
            monkeypatch.setitem(gluon_simulator.STANDINS, "gdc_wait", lambda: count.remainder_(1000))
        call(launch, *tensors)

    monkeypatch.setattr(Simulated, "__call__", early)
    assert all(torch.equal(x, y) for x, y in zip(forward(given)[:2], expected, strict=True))


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("segment, is_on", [(None, False), (1, False), (1, True)])
def test_nan_stays_in_its_sequence(monkeypatch, segment, is_on):
    """Keep NaN in its sequence, though a chunk that ends early loads tokens of the next one."""
    set_segments(monkeypatch, segment)
    set_fast_path(monkeypatch, is_on)
    check_nan_stays("cpu", forward)


@pytest.mark.interpret
@simulated
@pytest.mark.parametrize("num_sms, unit", [(132, 1), (1, 8)])
def test_the_longest_sequences_come_first(monkeypatch, num_sms, unit):
    """Sort sequences by chunks or units of them, stably; the table says where each and its chunks are."""
    monkeypatch.setattr("gdn.backends.triton.chunks._BLOCK", 64)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 400, (70,), generator=generator)
    lengths[[3, 69]] = torch.tensor([0, 1000])
    given = inputs(replace(BASE, heads=(1, 1), lengths=packed(*lengths.tolist())), torch.bfloat16)
    p = parse(**given.tensors, **given.options, backend="triton")
    table = Table(p, replace(machine(p.device), num_sms=num_sms))
    counts = -(-lengths // 64)
    firsts = counts.cumsum(0) - counts
    order = torch.sort(counts // unit, descending=True, stable=True).indices
    longest = torch.stack((order, p.cu_seqlens[order], lengths[order], firsts[order]), 1)
    found = table.make(p.cu_seqlens)
    assert found[table.total_at] == counts.sum() and len(found) == table.total_at + 1
    found = found[2 * table.bound : -1].view(70, 5)
    assert found.tolist() == torch.cat((firsts[:, None], longest), 1).tolist()
    assert found[0, 1] == 69 and (unit > 1 or found[-1, 3] == 0)


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("name, saves, used", [
    ("packed", False, 6), ("options", False, 6), ("packed", True, 8),
])  # fmt: skip
@pytest.mark.parametrize("num_sms", [132, 1])
def test_solve_skips_unused_entries(monkeypatch, name, saves, used, num_sms):
    """Solve the chunks that sequences have and the tokens past them, of a bound that the host knows.

    A forward for a backward solves all, as that may read them. Each TMA load of k has a tile.
    """
    monkeypatch.setattr(cost, "num_sms", lambda device: num_sms)
    monkeypatch.setattr(rule, "CTAS_PER_SM", {128: 12 if num_sms > 1 else 3})
    monkeypatch.setattr(rule, "_forwards", PlanCache())
    solved, loads, is_solve, call = [], [], [], Simulated.__call__
    load, store = gluon_simulator.STANDINS["tma_load"], gluon_simulator.STANDINS["tma_store"]

    def loaded(descriptor, corner, *rest):
        if is_solve:
            loads.append(corner)
        load(descriptor, corner, *rest)

    def stored(descriptor, corner, *rest):
        if len(corner) == 3:
            solved.append(int(corner[0]))
        store(descriptor, corner, *rest)

    def watched(launch, *tensors):
        if launch.kernel is rule.solve_kernel:
            is_solve.append(True)
        call(launch, *tensors)
        is_solve.clear()

    monkeypatch.setattr(Simulated, "__call__", watched)
    monkeypatch.setitem(gluon_simulator.STANDINS, "tma_load", loaded)
    monkeypatch.setitem(gluon_simulator.STANDINS, "tma_store", stored)
    given = inputs(CASES[name], torch.bfloat16)
    p = parse(**given.tensors, **given.options, backend="triton")
    rule.chunk_forward(p, saves)
    # four rows of blocks of A_inv; a saved one has two halves
    assert sorted(solved) == [tile for tile in range(2 * used) for _ in range(2 if saves else 4)]
    assert len(loads) == 2 * used * (4 if p.use_qk_l2norm_in_kernel else 2)


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("consumers, is_short", [(1, False), (2, False), (2, True)])
def test_the_scan_takes_the_longest_first(monkeypatch, consumers, is_short):
    """Scan all heads of a sequence, then the next: sorted by chunks, stably."""
    set_consumers(monkeypatch, consumers)
    set_short(monkeypatch, is_short)
    monkeypatch.setattr(cost, "num_sms", lambda device: 1)
    monkeypatch.setattr(rule, "_forwards", PlanCache())
    load, call, found = gluon_simulator.STANDINS["tma_load"], Simulated.__call__, []

    def recorded(descriptor, corner, *rest):
        if len(corner) == 4 and descriptor.dtype == torch.bfloat16:
            found.append((int(corner[1]), int(corner[2])))
        load(descriptor, corner, *rest)

    def watched(launch, *tensors):
        with monkeypatch.context() as patched:
            if launch.kernel in (scans.persistent_scan_kernel, scans.short_scan_kernel):
                patched.setitem(gluon_simulator.STANDINS, "tma_load", recorded)
            call(launch, *tensors)

    monkeypatch.setattr(Simulated, "__call__", watched)
    case = replace(BASE, heads=(2, 2), lengths=packed(60, 0, 64, 129, 10, 300))
    forward(inputs(case, torch.bfloat16))
    firsts = {0: 0, 60: 2, 124: 3, 253: 4, 263: 5}
    items = dict.fromkeys((firsts[token], head) for token, head in found if token in firsts)
    assert list(items) == [(n, head) for n in (5, 3, 0, 2, 4) for head in range(2)]


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize(
    "name, segment, consumers",
    [("packed", 1, 1), ("rows with tails", None, 2), ("few keys", None, 2), ("few keys, options", 1, 2)],
)
def test_saved_tensors(monkeypatch, name, segment, consumers):
    """On the general path, save what Triton's forward saves; o has the bits of a forward without saving.

    At K = V = 64 the sum of hi and lo is Triton's A_inv.
    """
    set_consumers(monkeypatch, consumers)
    set_segments(monkeypatch, segment)
    given = inputs(replace(CASES[name], batch_invariant=True), torch.bfloat16)
    problem = parse(**given.tensors, **given.options, backend="hopper")
    set_fast_path(monkeypatch, False)
    o, final, saved = rule.chunk_forward(problem, True)
    expected = chunked.chunk_forward(replace(problem, backend="triton"), True)
    assert all(torch.equal(x, y) for x, y in zip((o, final), forward(given)[:2], strict=True))
    assert saved.has_split_inverse == (problem.K == 64)
    for x, y, shape in zip(saved, expected[2], rule.saves(problem), strict=True):
        assert (x is None) == (y is None) == (shape is None)
        assert x is None or (x.shape, x.dtype) == shape
        whole = x.sum(2, dtype=y.dtype) if x is saved.A_inv and saved.has_split_inverse else x
        assert x is None or error(whole, y.double()) < 5e-3


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("name", ["options", "few keys, options"])
def test_backward_from_the_saved_tensors(name):
    """Compare gradients with those from the tensors that Triton's forward saves."""
    given = inputs(CASES[name], torch.bfloat16)
    problem = parse(**given.tensors, **given.options, backend="hopper")
    kept = rule.chunk_forward(problem, True)[2], chunked.chunk_forward(problem, True)[2]
    found = (backward(problem, saved, given.do, given.dfinal_state) for saved in kept)
    assert all(x is None or error(x, y.double()) < 1e-2 for x, y in zip(*found, strict=True))
