"""Check `struct`, which groups the values of the Gluon kernels: fields, cache key, simulation."""

import pytest
import torch
from conftest import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("expected Triton", allow_module_level=True)

from typing import Any

import triton.experimental.gluon.language as gl
from kit.gluon_simulator import simulate
from triton.experimental import gluon

from gdn.backends.hopper.gluon import kernel, struct


def pair_of(*names):
    """Make a struct with fields of these names in this order, and a kernel whose text does not name them."""
    Pair = struct(type("Pair", (), {"__annotations__": dict.fromkeys(names, Any)}))

    @gluon.jit
    def make_pair(x, y):
        return Pair(x, y)

    return make_pair


def test_the_order_of_fields_is_in_the_cache_key():
    """A binary made with the old order of fields must not be found on disk."""
    keys = [pair_of(*names).cache_key for names in (("a", "b"), ("a", "b"), ("b", "a"))]
    assert keys[0] == keys[1] != keys[2]


def test_fields_are_checked():
    Pair = struct(type("Pair", (), {"__annotations__": {"a": Any, "b": Any}}))
    pair = Pair(1, b=None)
    assert pair.a.value == 1 and pair.b.value is None
    for values, named in (((1,), {}), ((1, 2), {"c": 3}), ((), {"a": 1, "c": 2})):
        with pytest.raises(TypeError, match=r"Pair: expected \('a', 'b'\)"):
            Pair(*values, **named)


@struct
class Position:
    x_ptr: Any
    i: Any
    step: Any

    @gluon.jit
    def advance_by(self, n):
        return Position(self.x_ptr, self.i + n * self.step, self.step)


@kernel
def _store_kernel(x_ptr, n, STEP: gl.constexpr):
    position = Position(x_ptr=x_ptr, i=0, step=STEP).advance_by(n)
    gl.store(position.x_ptr + position.i, 1.0)


def test_the_simulator_knows_structs():
    """Methods are bound, and fields hold the simulator's values."""
    x = torch.zeros(8)
    simulate(_store_kernel, 1, x, 3, 2)
    assert x.tolist() == [0, 0, 0, 0, 0, 0, 1, 0]
