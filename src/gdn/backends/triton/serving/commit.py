"""Commit: copy the accepted states of all layers into their slots, in one launch.

A program copies a block of one entry of one layer, with one read and one write. The axes after slot and step
are merged into one where both tensors are contiguous along them, as states and windows are; else there are up
to four.
"""

from collections.abc import Hashable
from dataclasses import replace
from math import prod

import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton.launch import Launch, PlanCache, device_guard, kernel, unit_of
from gdn.problem import CommitProblem

BYTES = 8192  # bytes that a program writes: 4 stores of 16 bytes for each of its 128 threads
MOST_AXES = 4


@kernel
def commit_kernel(
    dst_ptr, src_ptr, dst_index_ptr, src_row_ptr, step_ptr, extra_dst_index_ptr, extra_step_ptr,
    dst_l, dst_n, src_l, src_n, src_t, index_n, row_n, step_n, extra_index_n, extra_step_n,
    n, L, slots, rows, T, blocks, size,
    size1, size2, size3, dst0, dst1, dst2, dst3, src0, src1, src2, src3,
    BLOCK: tl.constexpr, AXES: tl.constexpr, DENSE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Copy dst[layer, slot] = src[layer, row, step] for one block of one entry.

    Program (entry, layer, block), blocks fastest; grid: entries * L * blocks; 4 warps; no PDL. Reads up to
    BLOCK elements from HBM into registers and writes as many: at most BYTES bytes. Element e of an entry has
    coordinates (i0, i1, i2, i3), of which the last AXES are used.
    """
    block = tl.program_id(0) % blocks
    layer = (tl.program_id(0) // blocks % L).to(tl.int64)
    i = (tl.program_id(0) // blocks // L).to(tl.int64)
    entry = tl.where(i >= n, i - n, i)
    row = tl.load(src_row_ptr + entry * row_n).to(tl.int64)
    slot = tl.load(dst_index_ptr + entry * index_n).to(tl.int64)
    step = tl.load(step_ptr + entry * step_n).to(tl.int64)
    if extra_dst_index_ptr is not None:
        is_extra = i >= n
        if is_extra:
            slot = tl.load(extra_dst_index_ptr + entry * extra_index_n).to(tl.int64)
            step = tl.load(extra_step_ptr + entry * extra_step_n).to(tl.int64)
    if (slot < 0) | (slot >= slots) | (row < 0) | (row >= rows) | (step < 0) | (step >= T):
        return
    e = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = e < size * UNIT
    if DENSE and AXES == 1:
        # contiguous in both: no divisions, and 16-byte loads and stores
        at_dst, at_src = e, e
    else:
        at_dst, at_src = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        if AXES > 3:
            at_dst, at_src, e = at_dst + e % size3 * dst3, at_src + e % size3 * src3, e // size3
        if AXES > 2:
            at_dst, at_src, e = at_dst + e % size2 * dst2, at_src + e % size2 * src2, e // size2
        if AXES > 1:
            at_dst, at_src, e = at_dst + e % size1 * dst1, at_src + e % size1 * src1, e // size1
        at_dst, at_src = at_dst + e * dst0, at_src + e * src0
    # one read from HBM, and below one write: the bytes of the states are the cost
    x = tl.load(src_ptr + (layer * src_l + row * src_n + step * src_t) * UNIT + at_src, mask=mask)
    # mixed dtypes go through fp32 in registers; fp64 is converted directly
    if src_ptr.dtype.element_ty != dst_ptr.dtype.element_ty and dst_ptr.dtype.element_ty != tl.float64:
        x = x.to(tl.float32)
    tl.store(
        dst_ptr + (layer * dst_l + slot * dst_n) * UNIT + at_dst, x.to(dst_ptr.dtype.element_ty), mask=mask
    )


_plans: PlanCache[Launch] = PlanCache()


def commit(problem: CommitProblem) -> None:
    """See `Backend`; writes problem.dst."""
    p = problem
    axes = _axes(p.dst, p.src)
    if len(axes) > MOST_AXES:
        # more axes than the kernel divides by: one launch for each index of the first
        for i in range(p.dst.shape[2]):
            commit(replace(p, dst=p.dst.select(2, i), src=p.src.select(3, i)))
        return
    with device_guard(p.dst.device):
        launch = _plans.get(_key(p), lambda: _plan(p, axes))
        launch(p.dst, p.src, p.dst_index, p.src_row, p.step, p.extra_dst_index, p.extra_step)


def _axes(dst: Tensor, src: Tensor) -> list[tuple[int, int, int]]:
    """Return (size, stride in dst, stride in src) of a slot's axes; merge neighbours contiguous in both."""
    axes: list[tuple[int, int, int]] = []
    for size, d, s in zip(dst.shape[2:], dst.stride()[2:], src.stride()[3:], strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1:] == (size * d, size * s):
            # one axis less is one division less per element
            axes[-1] = (axes[-1][0] * size, d, s)
        else:
            axes.append((size, d, s))
    return axes or [(1, 1, 1)]


def _key(p: CommitProblem) -> Hashable:
    """Return everything that the launch depends on, except the addresses of tensors."""
    tensors = (p.dst, p.src, p.dst_index, p.src_row, p.step, p.extra_dst_index, p.extra_step)
    return (
        p.dst.device,
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors),
    )


def _plan(p: CommitProblem, axes: list[tuple[int, int, int]]) -> Launch:
    (L, slots), (rows, T), size = p.dst.shape[:2], p.src.shape[1:3], prod(p.dst.shape[2:])
    # a small state is one block, without idle lanes
    block = min(BYTES // p.dst.element_size(), triton.next_power_of_2(max(1, size)))
    blocks, n = triton.cdiv(size, block), p.dst_index.shape[0]
    unit = unit_of(*p.dst.stride()[:2], *p.src.stride()[:3], size)
    padded = [*axes, *[(1, 0, 0)] * (MOST_AXES - len(axes))]
    indices = (p.dst_index, p.src_row, p.step, p.extra_dst_index, p.extra_step)
    scalars = (
        *(s // unit for s in (*p.dst.stride()[:2], *p.src.stride()[:3])),
        *(0 if x is None else x.stride(0) for x in indices), n, L, slots, rows, T, blocks, size // unit,
        *(a[0] for a in padded[1:]), *(a[1] for a in padded), *(a[2] for a in padded),
    )  # fmt: skip
    constants = {
        "BLOCK": block, "AXES": len(axes), "DENSE": axes[-1][1:] == (1, 1), "UNIT": unit,
    }  # fmt: skip
    entries = n if p.extra_dst_index is None else 2 * n
    return Launch(commit_kernel, entries * L * blocks, scalars, constants, 4)
