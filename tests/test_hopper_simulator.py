"""Check that the simulator of Gluon kernels sees a broken protocol of mbarriers."""

import pytest
from conftest import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

import triton.experimental.gluon.language as gl
from kit.gluon_simulator import simulate
from triton.experimental import gluon

from gdn.backends.hopper.gluon import mbarrier


@gluon.jit
def _waits(barrier):
    mbarrier.wait(barrier, 0)


@gluon.jit
def _arrives_twice(barrier):
    mbarrier.arrive(barrier, count=1)
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _stuck_kernel():
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=3)
    gl.warp_specialize([(_waits, (barriers.index(0),)), (_arrives_twice, (barriers.index(0),))], [4], [24])


def test_the_simulator_sees_a_broken_protocol(monkeypatch):
    """Fail when a barrier gets two of the three arrivals that it counts."""
    monkeypatch.setattr("kit.gluon_simulator.SECONDS", 0.1)
    with pytest.raises(AssertionError, match="does not complete"):
        simulate(_stuck_kernel, 1)
