"""Simulate the scan of many short sequences, whose states move by TMA: the bits are those of the other scan."""

from dataclasses import replace

import pytest
import torch
from conftest import HAS_TRITON
from kit.serving import same_bits

from gdn.problem import parse
from gdn.testing import inputs, packed, rows

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from kit import gluon_simulator
from kit.hopper import BASE, CASES, Simulated, forward, set_fast_path, set_short, simulated
from test_prefill_pool import OPTIONS, make_call, run_call

from gdn.backends import hopper
from gdn.backends.hopper import cost, rule, scans
from gdn.backends.triton.launch import PlanCache

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


def watch_kernels(monkeypatch):
    """Return a list to which each simulated launch appends its kernel."""
    found, call = [], Simulated.__call__

    def watched(launch, *tensors):
        found.append(launch.kernel)
        call(launch, *tensors)

    monkeypatch.setattr(Simulated, "__call__", watched)
    return found


@pytest.mark.interpret
@simulated
@pytest.mark.usefixtures("simulated_launches")
@pytest.mark.parametrize("name, ctas, is_on", [
    (name, ctas, is_on) for name, case in SHORT_CASES.items() for ctas in (1, 3)
    for is_on in ((True, False) if case.sizes[0] == 128 and ctas == 1 else (True,))
])  # fmt: skip
def test_states_by_tma(monkeypatch, name, ctas, is_on):
    """Demand the bits of `persistent_scan_kernel`."""
    given = inputs(SHORT_CASES[name], torch.bfloat16)
    set_ctas(monkeypatch, ctas)
    set_fast_path(monkeypatch, is_on)
    kernels = watch_kernels(monkeypatch)
    set_short(monkeypatch, False)
    expected = forward(given)[:2]
    assert kernels[-1] is scans.persistent_scan_kernel
    set_short(monkeypatch, True)
    found = forward(given)[:2]
    assert kernels[-1] is scans.short_scan_kernel
    assert all(x is y or same_bits(x, y) for x, y in zip(found, expected, strict=True))
