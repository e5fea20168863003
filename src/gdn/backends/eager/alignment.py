"""Place the operands of gemm at addresses like those of new memory.

torch allocates CPU memory at multiples of 64 bytes, but row n of a tensor begins wherever n rows end. A BLAS
may round a product differently there: on CPUs of other makers than Intel, oneMKL gives other bits for an
operand whose address is not a multiple of 16 bytes. Thus a row of a batch has the bits of the row alone only
if both begin at a multiple of ALIGNMENT.
"""

import math

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: where torch allocates, and the widest vector register


def zero_aligned_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [N, ...] whose N rows are contiguous and begin at multiples of ALIGNMENT."""
    # at most 63 bytes of padding per row
    size = math.prod(shape[1:])
    return torch.zeros(shape[0], _row_stride(size, dtype), dtype=dtype, device=device)[:, :size].view(shape)


def align_rows(x: Tensor) -> Tensor:
    """Return a new contiguous x [N, ...] as it is, or a copy whose rows begin at multiples of ALIGNMENT."""
    # the only row begins where torch allocates, at a multiple of 64 bytes
    if x.shape[0] < 2:
        return x
    size = math.prod(x.shape[1:])
    stride = _row_stride(size, x.dtype)
    if stride == size:
        return x
    return x.new_empty(x.shape[0], stride)[:, :size].view(x.shape).copy_(x)


def align_start(x: Tensor) -> Tensor:
    """Return x as it is, or a copy in new memory if x does not begin at a multiple of ALIGNMENT."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def _row_stride(size: int, dtype: torch.dtype) -> int:
    """Return `size` elements rounded up to a multiple of ALIGNMENT bytes."""
    unit = ALIGNMENT // dtype.itemsize
    return -(-size // unit) * unit
