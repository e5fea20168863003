"""What kernels share."""

import pytest
import torch
import triton.language as tl

from gdn.backends.triton import launch
from gdn.backends.triton.launch import Launch
from gdn.backends.triton.lib import load_wide, store_wide


@launch.kernel
def _there_and_back(x_ptr, upper_ptr, rest_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < n
    store_wide(upper_ptr, rest_ptr, 0, i, tl.load(x_ptr + i, mask=mask, other=0.0), mask)
    tl.debug_barrier()
    tl.store(y_ptr + i, load_wide(upper_ptr, rest_ptr, 0, i, i < BLOCK), mask=i < BLOCK)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_in_24_bits(triton_device, dtype):
    """At most 2^-16 of a number is lost, in fp16's range or not; nothing where there is room for fp32."""
    size = torch.logspace(-37, 37, 200, base=10)
    x = (size * torch.randn(200).sign() * (1 + torch.rand(200))).to(triton_device)
    x[:3] = torch.tensor([0.0, float("inf"), -float("inf")])
    upper = torch.zeros(256, dtype=dtype, device=triton_device)
    rest = None if dtype == torch.float32 else torch.zeros(256, dtype=torch.uint8, device=triton_device)
    y = torch.full((256,), float("nan"), device=triton_device)
    Launch(_there_and_back, 1, (200,), {"BLOCK": 256}, num_warps=1)(x, upper, rest, y)
    assert (y[200:] == 0).all() and torch.equal(y[:3], x[:3])
    error = ((y[3:200] - x[3:]) / x[3:]).abs().max()
    assert error <= (0 if rest is None else 2**-16)
