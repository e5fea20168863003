"""Decodes and packets with options that wait for a GPU: strips, prefetches, other orders of the MMAs."""

import importlib

import pytest
import torch
from kit import api
from kit.serving import TOLERANCE, error, inputs, moved, pool_of, same_bits

from gdn.ops import fastpath

NAN = float("nan")
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def serving(monkeypatch):
    """Return a function that sets a constant of a module of `serving`; no plan is kept."""
    monkeypatch.setattr("gdn.backends.triton.launch.PlanCache.get", lambda cache, key, make: make())

    def set_constant(module, name, value):
        module = importlib.import_module(f"gdn.backends.triton.serving.{module}")
        monkeypatch.setattr(module, name, value)
        fastpath._calls.clear()

    yield set_constant
    fastpath._calls.clear()


def run(device, x, **options):
    """Run a decode on copies; return its output and pool, and the names of its kernels."""
    launches = importlib.import_module("gdn.backends.triton.launch.launches")
    names, call = [], launches.Launch.__call__

    def record(self, *tensors):
        names.append(self.kernel.__name__)
        return call(self, *tensors)

    x = moved(x, device)
    out = torch.full_like(x["v"], NAN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches.Launch, "__call__", record)
        api.decode(**x, out=out, backend="triton", **options)
    return out.cpu(), x["state"].cpu(), names


PACKED = {"cu_seqlens": torch.tensor([0, 3, 3, 6]), "read_index": torch.tensor([2, -1, 0])}
ROWS = {"read_index": torch.tensor([2, -1, 0])}
MOVED = ROWS | {"write_index": torch.tensor([1, 3, 9])}


@pytest.mark.interpret
@pytest.mark.parametrize(
    "rows, tokens, K, dtype, pool, raw, options",
    [
        (1, 7, 64, BF16, BF16, True, {**PACKED, "max_seqlen": 3}),
        (3, 4, 128, BF16, F32, True, MOVED),
        (3, 6, 64, BF16, BF16, False, ROWS | {"round_state": True}),
        (3, 2, 64, F32, F32, False, ROWS | {"write": "none", "scale": 0.3, "use_qk_l2norm_in_kernel": False}),
    ],
)
def test_strips_change_no_bit(triton_device, serving, rows, tokens, K, dtype, pool, raw, options):
    """A program that takes all tiles of a state computes what programs of one tile each do."""
    x = inputs(rows, tokens, 1, 2, K, 64, dtype, raw=raw) | {"state": pool_of(4, HV=2, K=K, V=64, dtype=pool)}
    x |= {name: options[name] for name in options if isinstance(options[name], torch.Tensor)}
    options = {name: value for name, value in options.items() if name not in x}
    serving("decode_strips", "RESIDENT", 0)
    got = []
    for is_used in (False, True):
        serving("decode_strips", "IN_USE", is_used)
        got.append(run(triton_device, x, **options))
    assert [x[2] for x in got] == [["decode_kernel"], ["decode_strips_kernel"]]
    assert all(same_bits(a, b) for a, b in zip(got[0][:2], got[1][:2], strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("split", ["bf16, transposed", "bf16 apart", "bf16 apart, transposed"])
@pytest.mark.parametrize("tokens", [5, 13])
def test_other_mmas_of_the_triangular_system(triton_device, serving, split, tokens):
    """MMAs that do not wait for each other agree; the transposed inverse has the bits of the plain one."""
    x = inputs(2, tokens, 1, 2, 64, 32, BF16, raw=True) | {"state": pool_of(2, HV=2, K=64, V=32)}
    usual = run(triton_device, x, exact_packet=False)
    serving("packet", "SPLIT", split)
    got = run(triton_device, x, exact_packet=False)
    assert got[2] == ["packet_kernel"]
    for a, b in zip(got[:2], usual[:2], strict=True):
        assert same_bits(a, b) if split == "bf16, transposed" else error(a, b) <= TOLERANCE[BF16]


@pytest.mark.interpret
def test_short_packets_on_fp32_states_are_exact(triton_device, serving):
    """With EXACT_TOKENS a packet that writes an fp32 state has the bits of tokens one by one."""
    x = inputs(2, 4, 1, 2, 64, 32, BF16, raw=True) | {"state": pool_of(2, HV=2, K=64, V=32)}
    exact = run(triton_device, x)
    assert run(triton_device, x, exact_packet=False)[2] == ["packet_kernel"]
    serving("packet", "EXACT_TOKENS", 4)
    got = run(triton_device, x, exact_packet=False)
    assert got[2] == ["decode_kernel"]
    assert all(same_bits(a, b) for a, b in zip(got[:2], exact[:2], strict=True))


@pytest.mark.interpret
def test_prefetches_change_no_bit(triton_device, serving):
    """Programs that prefetch for the one that takes their place compute what they did, in every row."""
    x = inputs(3, 12, 1, 2, 64, 64, BF16, raw=True)
    x |= ROWS | {"state": pool_of(4, HV=2, K=64, V=64, dtype=BF16)}
    serving("packet", "FILLED", 0)
    usual = run(triton_device, x, exact_packet=False, write="none")
    for name, value in (("FETCHED_STRIPS", 4), ("PREFETCHES_AHEAD", True)):
        serving("packet", name, value)
        got = run(triton_device, x, exact_packet=False, write="none")
        assert all(same_bits(a, b) for a, b in zip(got[:2], usual[:2], strict=True))
