"""Make the TMA descriptors of a forward: the blocks that one load or store moves, and their shared memory."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdn.backends.hopper.factors import BOX_LINES, LINE, NUM_LINES
from gdn.backends.hopper.scan.operands import BF16_TILE, FP32_ROWS
from gdn.problem import CHUNK, Problem

# shared memory of the TMA blocks: rows of A_inv, fp32 states, tokens of q, k, v, boxes of factors
A_INV_ROWS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
FP32_STATE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
TOKENS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
FP32_SLOTS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)
FACTOR_ROWS = FP32_ROWS.value
FACTOR_LINES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
BLOCK = 16  # rows and columns of a block of A_inv


def inverse_tile(has_zeros: bool) -> tuple[int, int]:
    """Return the shape in HBM of a tile of A_inv: [C, C], or 10 blocks of 16 without the zero blocks."""
    return (CHUNK, CHUNK) if has_zeros else (10 * BLOCK, BLOCK)


def describe_inverse_rows(A_inv: Tensor) -> tuple[TensorDescriptor | None, ...]:
    """Return four TMA descriptors of tiles of A_inv, which move C columns of some of the C rows of a tile.

    Tiles [C, C] need two: the upper and the lower rows. Tiles without zero blocks need four, of 16 rows each:
    1, 2, 3 and 4 blocks, row after row. A TMA load reads the zero blocks right of them as zeros, and a TMA
    store does not write these, since they are out of the bounds of the descriptor's tensor.
    """
    has_zeros = A_inv.shape[-1] == CHUNK
    rows = CHUNK // 2 if has_zeros else BLOCK
    widths = (CHUNK, CHUNK) if has_zeros else range(BLOCK, CHUNK + 1, BLOCK)
    size = A_inv.shape[-2] * A_inv.shape[-1]
    described: list[TensorDescriptor | None] = []
    first = A_inv.storage_offset()
    for width in widths:
        x = A_inv.as_strided((A_inv.numel() // size, rows, width), (size, width, 1), first)
        described.append(make_descriptor(x, (1, rows, CHUNK), A_INV_ROWS))
        first += rows * width
    return (*described, *[None] * (4 - len(described)))


def describe_factors(factors: Tensor) -> TensorDescriptor:
    """Return the TMA descriptor of boxes of factors [.., NUM_ROWS, C], in lines of 128 bytes.

    The tensor of the descriptor ends with the last line of a tile that is written. So the load of a tile's
    second box reads no others from HBM.
    """
    line, lines = LINE.value, NUM_LINES.value
    size = factors.shape[-2] * factors.shape[-1]
    x = factors.as_strided((factors.numel() // size, lines, line), (size, line, 1))
    return make_descriptor(x, (1, BOX_LINES.value, line), FACTOR_LINES)


def state_layout(x: Tensor) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a block of states, bf16 or fp32."""
    return BF16_TILE.value if x.element_size() == 2 else FP32_STATE


def states_layout(x: Tensor) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a block of states [N, HV, D, D], bf16 or fp32."""
    return TOKENS if x.element_size() == 2 else FP32_SLOTS


def make_descriptor(x: Tensor, block: tuple[int, ...], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Make the TMA descriptor of x in blocks; all checks but that of the address are cached."""
    # host time: a new descriptor checks shape, strides and layout each time, so copy a checked one
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(_checked_fields(x.shape, x.stride(), x.dtype, block, layout))
    descriptor.base = x
    return descriptor


@lru_cache(4096)
def _checked_fields(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, block: tuple[int, ...],
    layout: gl.NVMMASharedLayout,
) -> dict[str, Any]:  # fmt: skip
    empty = torch.empty(0, dtype=dtype)
    return vars(TensorDescriptor(empty, list(shape), list(strides), list(block), layout))


def align(p: Problem) -> Problem:
    """Return the problem with q, k, v copied where TMA cannot read them.

    TMA needs addresses and strides that are multiples of 16 bytes. NVIDIA does not document strides of 0, so
    those are copied, too.
    """
    q, k, v = make_aligned(p.q), make_aligned(p.k), make_aligned(p.v)
    # `layout_key` covers neither addresses nor the strides of copies: without it, launches are looked up anew
    return p if q is p.q and k is p.k and v is p.v else replace(p, layout_key=None, q=q, k=k, v=v)


def align_placeholders(p: Problem) -> Problem:
    """Return the problem, with q, k and v of a single token if `align` would copy one: enough to compile.

    Initial states that `to_kernel_layout` would copy become a single one.
    """
    state = p.initial_state
    if state is not None and not state.is_contiguous():
        p = replace(p, layout_key=None, initial_state=state.new_empty((1, *state.shape[1:])))
    tensors = (p.q, p.k, p.v)
    if all(map(is_aligned, tensors)):
        return p
    q, k, v = (x.new_empty((1, 1, *x.shape[2:])) for x in tensors)
    return replace(p, layout_key=None, q=q, k=k, v=v)


def make_aligned(x: Tensor) -> Tensor:
    """Return a tensor [B, T, heads, columns] where TMA can read it: itself, or a copy."""
    # clone, not contiguous(): an axis of one element is contiguous with any stride, and would not be copied
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def is_aligned(x: Tensor) -> bool:
    """Return True if TMA can read the tensor where it is."""
    row, token, head, _ = x.stride()
    has_zero_stride = row * token * head == 0
    return not has_zero_stride and (x.data_ptr() | x.element_size() * (row | token | head)) % 16 == 0
