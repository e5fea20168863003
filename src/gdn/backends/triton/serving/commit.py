"""Commit: copy the accepted states of all layers into their slots, in one launch.

A program copies a block of one entry of one layer, with one read and one write. The axes after slot and step
are merged into one where both tensors are contiguous along them, as states and windows are; else there are up
to four.

For a pool in int16 a program has some columns of a state in registers, as in `decode`, whose rounding it has:
the integers and scales are those that a decode of the accepted tokens stores.
"""

from collections.abc import Hashable
from dataclasses import replace
from math import prod

import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton.launch import Launch, PlanCache, device_guard, jit, kernel, machine, unit_of
from gdn.backends.triton.serving.pool_lib import store_state
from gdn.backends.triton.serving.recurrent_lib import locate_program, tile_indices, tile_pointers
from gdn.backends.triton.serving.state_tiles import magic_numbers, pick_tile, state_strides
from gdn.backends.triton.serving.structs import Accepted, HeadStates, TileColumns
from gdn.problem import CommitProblem

BYTES = 8192  # bytes that a program writes: 4 stores of 16 bytes for each of its 128 threads
MOST_AXES = 4


@jit
def locate_state(accepted, i):
    """Return slot, row and step of copy i: entries first, then those with a second slot."""
    entry = tl.where(i >= accepted.n, i - accepted.n, i)
    row = tl.load(accepted.row_ptr + entry * accepted.row_stride).to(tl.int64)
    slot = tl.load(accepted.slot_ptr + entry * accepted.slot_stride).to(tl.int64)
    step = tl.load(accepted.step_ptr + entry * accepted.step_stride).to(tl.int64)
    if accepted.extra_slot_ptr is not None:
        is_extra = i >= accepted.n
        if is_extra:
            slot = tl.load(accepted.extra_slot_ptr + entry * accepted.extra_slot_stride).to(tl.int64)
            step = tl.load(accepted.extra_step_ptr + entry * accepted.extra_step_stride).to(tl.int64)
    return slot, row, step


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
    accepted = Accepted(
        dst_index_ptr, src_row_ptr, step_ptr, extra_dst_index_ptr, extra_step_ptr, index_n, row_n, step_n,
        extra_index_n, extra_step_n, n,
    )  # fmt: skip
    slot, row, step = locate_state(accepted, i)
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


@kernel
def commit_columns_kernel(
    dst_ptr, column_scale_ptr, src_ptr, dst_index_ptr, src_row_ptr, step_ptr, extra_dst_index_ptr,
    extra_step_ptr,
    dst_l, dst_n, dst_h, dst_k, dst_v, src_l, src_n, src_t, src_h, src_k, src_v,
    scale_l, scale_n, scale_h, scale_v, index_n, row_n, step_n, extra_index_n, extra_step_n,
    n, L, HV, HV_magic, HV_s, slots, rows, T,
    K: tl.constexpr, V: tl.constexpr, A: tl.constexpr, J: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    R_FIRST: tl.constexpr, AXIS: tl.constexpr, SRC_AXIS: tl.constexpr, UNIT: tl.constexpr,
    SRC_UNIT: tl.constexpr,
):  # fmt: skip
    """Store src[layer, row, step] in dst[layer, slot], rounded to int16 with a scale per column of V.

    Program (entry, layer, head, block): a tile of A * B value columns, with all keys, in fp32 registers.
    Grid: entries * L * HV * blocks, blocks fastest; warps of `pick_tile`, which is 1; no PDL. Reads a tile in
    the dtype of src from HBM; writes it in int16, and a scale for each column.
    """
    entry_and_layer, head, block = locate_program(HV, HV_magic, HV_s, tl.cdiv(V, A * B))
    layer = entry_and_layer % L
    accepted = Accepted(
        dst_index_ptr, src_row_ptr, step_ptr, extra_dst_index_ptr, extra_step_ptr, index_n, row_n, step_n,
        extra_index_n, extra_step_n, n,
    )  # fmt: skip
    slot, row, step = locate_state(accepted, entry_and_layer // L)
    if (slot < 0) | (slot >= slots) | (row < 0) | (row >= rows) | (step < 0) | (step >= T):
        return
    head = head.to(tl.int64)
    keys, values = tile_indices(block, A, J, B, W, AXIS, R_FIRST)
    has_value = values < V
    mask = (keys < K) & has_value[:, None, :, None]
    src_ptr += (layer * src_l + row * src_n + step * src_t + head * src_h) * SRC_UNIT
    # zeros past K do not change the largest element of a column
    S = tl.load(
        tile_pointers(src_ptr, keys, values, src_k, src_v, SRC_UNIT, SRC_AXIS), mask=mask, other=0.0
    ).to(tl.float32)
    # a maximum on a GPU drops NaN, and src may have one beside finite elements
    has_nan = tl.max(tl.max((S != S).to(tl.int32), 1), 2)
    S = tl.where(has_nan[:, None, :, None] != 0, float("nan"), S)
    # layers stand where a pool of one layer has its slots, slots where a ring has its entries
    states = HeadStates(
        dst_ptr + head * dst_h * UNIT, dst_l, dst_n, dst_k, dst_v, column_scale_ptr + head * scale_h,
        scale_l, scale_n, scale_v,
    )  # fmt: skip
    store_state(S, states, TileColumns(keys, values, mask, has_value), layer, slot, UNIT, AXIS)


_plans: PlanCache[Launch] = PlanCache()


def commit(problem: CommitProblem) -> None:
    """See `Backend`; writes problem.dst, and problem.column_scale for a pool in int16."""
    p = problem
    if p.column_scale is not None:
        if p.dst.numel() > 0:
            with device_guard(p.dst.device):
                launch = _plans.get(_key(p), lambda: _plan_columns(p))
                launch(p.dst, p.column_scale, p.src, *_indices(p))
        return
    axes = _axes(p.dst, p.src)
    if len(axes) > MOST_AXES:
        # more axes than the kernel divides by: one launch for each index of the first
        for i in range(p.dst.shape[2]):
            commit(replace(p, dst=p.dst.select(2, i), src=p.src.select(3, i)))
        return
    with device_guard(p.dst.device):
        launch = _plans.get(_key(p), lambda: _plan(p, axes))
        launch(p.dst, p.src, *_indices(p))


def _indices(p: CommitProblem) -> tuple[Tensor | None, ...]:
    return p.dst_index, p.src_row, p.step, p.extra_dst_index, p.extra_step


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
    tensors = (p.dst, p.src, *_indices(p), p.column_scale)
    return (
        p.dst.device, p.state_v_first,
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors),
    )  # fmt: skip


def _plan(p: CommitProblem, axes: list[tuple[int, int, int]]) -> Launch:
    (L, slots), (rows, T), size = p.dst.shape[:2], p.src.shape[1:3], prod(p.dst.shape[2:])
    # a small state is one block, without idle lanes
    block = min(BYTES // p.dst.element_size(), triton.next_power_of_2(max(1, size)))
    blocks, n = triton.cdiv(size, block), p.dst_index.shape[0]
    unit = unit_of(*p.dst.stride()[:2], *p.src.stride()[:3], size)
    padded = [*axes, *[(1, 0, 0)] * (MOST_AXES - len(axes))]
    scalars = (
        *(s // unit for s in (*p.dst.stride()[:2], *p.src.stride()[:3])),
        *_index_strides(p), n, L, slots, rows, T, blocks, size // unit,
        *(a[0] for a in padded[1:]), *(a[1] for a in padded), *(a[2] for a in padded),
    )  # fmt: skip
    constants = {
        "BLOCK": block, "AXES": len(axes), "DENSE": axes[-1][1:] == (1, 1), "UNIT": unit,
    }  # fmt: skip
    return Launch(commit_kernel, _copies(p) * L * blocks, scalars, constants, 4)


def _plan_columns(p: CommitProblem) -> Launch:
    assert p.column_scale is not None
    (L, slots, HV), (rows, T) = p.dst.shape[:3], p.src.shape[1:3]
    V, K = p.dst.shape[3:] if p.state_v_first else p.dst.shape[:-3:-1]
    axis, unit, dst = state_strides(p.dst, K, V, p.state_v_first)
    src_axis, src_unit, src = state_strides(p.src, K, V, p.state_v_first)
    tile = pick_tile(
        K, V, axis or "k", p.dst.element_size(), unit if axis else 1, machine(p.dst.device)
    )  # fmt: skip
    scalars = (
        *dst, *src, *p.column_scale.stride(), *_index_strides(p), p.dst_index.shape[0], L, HV,
        *magic_numbers(HV), slots, rows, T,
    )  # fmt: skip
    constants = {
        "K": K, "V": V, **tile.constants(), "AXIS": axis, "SRC_AXIS": src_axis, "UNIT": unit,
        "SRC_UNIT": src_unit,
    }  # fmt: skip
    programs = _copies(p) * L * HV * tile.blocks(V)
    return Launch(commit_columns_kernel, programs, scalars, constants, tile.num_warps)


def _index_strides(p: CommitProblem) -> tuple[int, ...]:
    return tuple(0 if x is None else x.stride(0) for x in _indices(p))


def _copies(p: CommitProblem) -> int:
    """Return the number of states to copy in a layer, with those for second slots."""
    return p.dst_index.shape[0] * (1 if p.extra_dst_index is None else 2)
