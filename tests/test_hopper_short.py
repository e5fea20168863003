"""Check the scan of many short sequences, whose states move by TMA, by its simulation on the CPU."""

import threading
from dataclasses import replace

import pytest
import torch
from conftest import GPU, HAS_TRITON, INTERPRETED
from kit.serving import same_bits

from gdn.problem import parse
from gdn.testing import inputs, packed, rows

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit import gluon_simulator
from kit.hopper import (
    BASE,
    CASES,
    Simulated,
    check_nan_stays,
    forward,
    on_hopper,
    set_fast_path,
    set_segments,
    set_short,
    simulated,
)
from test_prefill_pool import OPTIONS, make_call, run_call

from gdn.backends import hopper
from gdn.backends.hopper import cost, rule, scans
from gdn.backends.triton.launch import PlanCache
from gdn.backends.triton.rule.pool import StatePool

# sequences of no, one and several chunks, more of them than CTAs
MANY = packed(70, 0, 33, 128, 200, 1, 0, 64, tail=29)
SHORT_CASES = {
    "rows": replace(BASE, lengths=rows(129)),
    "packed": replace(CASES["packed"], lengths=MANY),
    "V first": replace(BASE, lengths=MANY, state_v_first=True, use_qk_l2norm_in_kernel=True, is_strided=True),
    "fast": replace(BASE, lengths=packed(192, 64, 130, 256), gate="slow"),
    "no state": replace(BASE, lengths=MANY, state="none"),
    "few keys": replace(CASES["few keys"], lengths=MANY),
    "few keys, V first": replace(CASES["few keys"], lengths=packed(70, 0, 300), state_v_first=True),
}


def set_ctas(monkeypatch, count):
    monkeypatch.setattr(cost, "num_sms", lambda device: count)
    monkeypatch.setattr(rule, "_forwards", PlanCache())


def scan_both_ways(monkeypatch, call):
    """Return the results of a call by `persistent_scan_kernel` and by `short_scan_kernel`."""
    kernels, launched = [], Simulated.__call__

    def watched(launch, *tensors):
        kernels.append(launch.kernel)
        launched(launch, *tensors)

    monkeypatch.setattr(Simulated, "__call__", watched)
    results = []
    for is_short, kernel in ((False, scans.persistent_scan_kernel), (True, scans.short_scan_kernel)):
        set_short(monkeypatch, is_short)
        results.append(call())
        assert kernels[-1] is kernel
    return results


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("name, ctas, is_on", [
    (name, ctas, is_on) for name, case in SHORT_CASES.items() for ctas in (1, 3)
    for is_on in ((True, False) if case.sizes[0] == 128 and ctas == 1 else (True,))
])  # fmt: skip
def test_bits(monkeypatch, name, ctas, is_on):
    """Demand the bits of `persistent_scan_kernel`."""
    given = inputs(SHORT_CASES[name], torch.bfloat16)
    set_ctas(monkeypatch, ctas)
    set_fast_path(monkeypatch, is_on)
    expected, found = scan_both_ways(monkeypatch, lambda: forward(given)[:2])
    assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("D, name", [*((128, name) for name in OPTIONS), (64, "bf16, V first, other slots")])
def test_bits_of_a_pool(monkeypatch, D, name):
    """Demand the bits of `persistent_scan_kernel` of o and of all memory of a pool with NaN between slots."""
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    set_ctas(monkeypatch, 2)
    x = make_call(name, D, HV=2)
    expected, found = scan_both_ways(monkeypatch, lambda: run_call("hopper", x))
    assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))
    memory = [state.as_strided((state.untyped_storage().nbytes() // state.element_size(),), (1,), 0)
              for _, state in (found, expected)]  # fmt: skip
    assert same_bits(*memory)


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("name", ["packed", "few keys"])
def test_shared_memory_is_overwritten_after_its_stores(monkeypatch, name):
    """Let each TMA store read shared memory as late as it may: when its thread waits for it."""
    store, mine = gluon_simulator.STANDINS["tma_store"], threading.local()

    def store_late(*arguments):
        vars(mine).setdefault("stores", []).append(arguments)

    def wait(pending):
        stores = vars(mine).get("stores", [])
        while len(stores) > pending:
            store(*stores.pop(0))

    given = inputs(SHORT_CASES[name], torch.bfloat16)
    set_ctas(monkeypatch, 1)
    set_short(monkeypatch)
    expected = forward(given)[:2]
    monkeypatch.setitem(gluon_simulator.STANDINS, "tma_store", store_late)
    monkeypatch.setitem(gluon_simulator.STANDINS, "tma_store_wait", wait)
    assert all(same_bits(x, y) for x, y in zip(forward(given)[:2], expected, strict=True))


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("name", ["packed", "V first", "few keys"])
def test_each_state_is_moved_once(monkeypatch, name):
    """Load and store the halves of each state once; past the last item a CTA reads no HBM."""
    moved = {"tma_load": [], "tma_store": []}

    def watch(name):
        move = gluon_simulator.STANDINS[name]

        def watched(descriptor, corner, *rest):
            if descriptor.dtype == torch.float32 and len(corner) == 4:
                moved[name].append(tuple(map(int, corner)))
            move(descriptor, corner, *rest)

        return watched

    for action in moved:
        monkeypatch.setitem(gluon_simulator.STANDINS, action, watch(action))
    case = SHORT_CASES[name]
    given = inputs(case, torch.bfloat16)
    set_ctas(monkeypatch, 3)
    set_short(monkeypatch)
    forward(given)
    N = len(given.tensors["initial_state"])
    halves = [(0, 0), (64, 0) if case.state_v_first else (0, 64)][: case.sizes[1] // 64]
    expected = sorted((n, head, *half) for n in range(N) for head in range(2) for half in halves)
    assert sorted(moved["tma_store"]) == expected
    assert sorted(x for x in moved["tma_load"] if x[0] < N) == expected
    # one swap more than items in each CTA: zeros arrive
    assert len(moved["tma_load"]) - len(expected) == 3 * len(halves)


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
def test_nan_stays_in_its_sequence(monkeypatch):
    """Keep NaN in its sequence, though states and stages of one CTA hold one sequence after the other."""
    set_ctas(monkeypatch, 1)
    set_short(monkeypatch)
    check_nan_stays("cpu", forward)


@pytest.mark.skipif(INTERPRETED, reason="expected no interpreter")
def test_the_choice(monkeypatch):
    """Choose the kernel for many short sequences with states that TMA can move, and for nothing else."""
    case = replace(BASE, heads=(1, 16), lengths=rows(64)._replace(B=20))
    given = inputs(case, torch.bfloat16)

    def chosen(kept=None, pool=None, cuts=None, **changed):
        p = parse(**given.tensors | changed, **given.options, backend="hopper")
        return scans.moves_states(p, cuts, kept, pool)

    state = given.tensors["initial_state"]
    assert chosen() and chosen(initial_state=None)
    # states that enter chunks are stored; segments
    assert not chosen(kept=torch.bfloat16) and not chosen(cuts=cost.equal_cuts(1))
    # two dtypes in one place: final states are fp32
    narrow = state.bfloat16()
    assert not chosen(initial_state=narrow)
    pool = StatePool(narrow, torch.arange(20), None, None, True, 0, None)
    assert chosen(initial_state=narrow, pool=pool)
    # an address that TMA cannot read
    odd = torch.zeros(state.numel() + 1)[1:].view_as(state).copy_(state)
    assert not chosen(initial_state=odd)
    monkeypatch.setattr(scans, "STATES_BY_TMA", False)
    assert not chosen()
    monkeypatch.undo()
    given.options["output_final_state"] = False
    assert chosen() and chosen(initial_state=narrow) and not chosen(initial_state=None)
    given.options["output_final_state"] = True
    # an item for each CTA, or long ones
    for count, length in ((8, 64), (20, 64 * 9)):
        given = inputs(replace(case, lengths=rows(length)._replace(B=count)), torch.bfloat16)
        assert not chosen()
    given = inputs(replace(case, lengths=packed(*[300, 1, 64, 0] * 6)), torch.bfloat16)
    assert chosen()


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
def test_segments_keep_their_scan(monkeypatch):
    """Scan sequences that are cut into segments by `persistent_scan_kernel`."""
    set_short(monkeypatch)
    set_segments(monkeypatch, 1)
    monkeypatch.setattr(scans, "short_scan_kernel", None)
    forward(inputs(SHORT_CASES["rows"], torch.bfloat16))


def run_on_a_gpu(monkeypatch, call):
    """Demand the same bits of a call by both kernels, many times; the rule itself must choose."""
    chosen, choose = [], rule.moves_states
    monkeypatch.setattr(rule, "moves_states", lambda *given: chosen.append(choose(*given)) or chosen[-1])
    with monkeypatch.context() as patch:
        patch.setattr(scans, "STATES_BY_TMA", False)
        expected = call()
        assert not any(chosen)
    chosen.clear()
    for _ in range(20):
        assert all(same_bits(x, y) for x, y in zip(call(), expected, strict=True))
    assert all(chosen)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("D, is_v_first, state", [
    (128, True, "wide"), (128, False, "wide"), (128, True, "none"), (64, True, "wide"),
])  # fmt: skip
def test_on_a_gpu(monkeypatch, D, is_v_first, state):
    """Scan 80 sequences of 0 to 300 tokens, of which some are well-conditioned."""
    lengths = torch.randint(0, 301, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    case = replace(BASE, sizes=(D, D), heads=(8, 16), state_v_first=is_v_first, state=state, gate="slow")
    given = inputs(replace(case, lengths=packed(*lengths, tail=29)), torch.bfloat16, device=GPU)
    run_on_a_gpu(monkeypatch, lambda: forward(given)[:2])
    given = inputs(replace(case, lengths=rows(128)._replace(B=64)), torch.bfloat16, device=GPU)
    run_on_a_gpu(monkeypatch, lambda: forward(given)[:2])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("D", [64, 128])
def test_a_pool_on_a_gpu(monkeypatch, D, name):
    """Scan prompts of 64 heads on a pool in place."""
    x = make_call(name, D, HV=64, lengths=(500, 0, 64, 1, 129), device=GPU)
    run_on_a_gpu(monkeypatch, lambda: run_call("hopper", x))
