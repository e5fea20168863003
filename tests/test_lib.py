"""Test device functions that kernels share."""

import pytest
import torch
import triton.language as tl

from gdn.backends.triton import launch
from gdn.backends.triton.launch import Launch
from gdn.backends.triton.lib import load_wide, store_wide


@launch.kernel
def _round_trip(x_ptr, upper_ptr, rest_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < n
    store_wide(upper_ptr, rest_ptr, i, tl.load(x_ptr + i), mask)
    tl.debug_barrier()
    upper = tl.load(upper_ptr + i, mask=mask, other=0.0)
    tl.store(y_ptr + i, load_wide(upper, rest_ptr, i, mask))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_in_24_bits(triton_device, dtype):
    """24 bits lose at most 2^-16 of a number, the upper half alone half an ulp, and fp32 storage nothing."""
    size = torch.logspace(-37, 37, 256, base=10)
    x = size * torch.randn(256).sign() * (1 + torch.rand(256))
    x[:3] = torch.tensor([0.0, float("inf"), -float("inf")])
    # three NaN, the first with the bits that a GPU produces
    x[3:6] = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    x, upper = x.to(triton_device), torch.ones(256, dtype=dtype, device=triton_device)
    full = torch.full((256,), 99, dtype=torch.int8, device=triton_device)
    rest = None if dtype == torch.float32 else full
    y = torch.full((256,), float("nan"), device=triton_device)
    Launch(_round_trip, 1, (200,), {"BLOCK": 256}, num_warps=1)(x, upper, rest, y)
    assert (y[200:] == 0).all() and (upper[200:] == 1).all() and (rest is None or (rest[200:] == 99).all())
    for kept, lost in ((y, 2**-16), (upper.float(), 2**-8 + 2**-16)):
        assert torch.equal(kept[:3], x[:3]) and kept[3:6].isnan().all()
        error = ((kept[6:200] - x[6:200]) / x[6:200]).abs().max()
        assert error <= (0 if rest is None else lost)
