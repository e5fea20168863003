"""Pass states through runs or segments in one launch; see `PropagateProblem`.

The sums of a head are the same whatever the number of heads, so that a rank that folds all heads and one that
folds a part of them compute the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn.backends.triton.launch import Launch, PlanCache, device_guard, kernel, machine
from gdn.backends.triton.lib import dot
from gdn.problem.propagate import PropagateProblem

BV = 16  # columns of S of a CTA: with 32, M and its parts spill registers on sm_90


@kernel
def propagate_runs_kernel(
    first_ptr, add_ptr, map_ptr, steps_ptr, dst_ptr,
    heads, num_steps, add_batch, add_head, map_batch, map_head, dst_batch, dst_head,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, ADD_ROW: tl.constexpr, MAP_ROW: tl.constexpr,
    DST_ROW: tl.constexpr, V_FIRST: tl.constexpr, TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute S <- M S + N (M^T S with TRANSPOSED) run after run; store the S that steps ask for.

    One CTA: one batch row, head and BV of the W columns; S stays in registers over all runs.
    Grid: B x heads x cdiv(W, BV).  Warps: 8 at K = 128, else 4.  Shared memory: Triton's, for MMA operands.
    Each step reads three offsets in rows of a tensor from HBM, equal for all CTAs. A step without M reads no
    S: a NaN in it ends there. MMAs are as exact as fp32: three of tf32, or PRECISION ieee.
    """
    strips = tl.cdiv(W, BV)
    strip = tl.program_id(0) % strips
    head = (tl.program_id(0) // strips) % heads
    batch = tl.program_id(0) // (strips * heads)
    ks = tl.arange(0, BK)
    columns = strip * BV + tl.arange(0, BV)
    is_tile = (ks < K)[:, None] & (columns < W)[None, :]
    is_added = is_tile & (columns < V)[None, :]
    is_square = (ks < K)[:, None] & (ks < K)[None, :]
    if TRANSPOSED:
        square = ks[None, :] * MAP_ROW + ks[:, None]
    else:
        square = ks[:, None] * MAP_ROW + ks[None, :]
    if V_FIRST:
        place = columns[None, :] * DST_ROW + ks[:, None]
    else:
        place = ks[:, None] * DST_ROW + columns[None, :]
    if first_ptr is None:
        S = tl.zeros([BK, BV], tl.float32)
    else:
        first = (batch.to(tl.int64) * heads + head) * (K * W)
        S = tl.load(first_ptr + first + ks[:, None] * W + columns[None, :], mask=is_tile, other=0.0)
    # offsets count rows, so that the compiler knows what divides an address: loads from HBM are wide
    add_place = batch.to(tl.int64) * add_batch + head.to(tl.int64) * add_head
    map_place = batch.to(tl.int64) * map_batch + head.to(tl.int64) * map_head
    dst_place = batch.to(tl.int64) * dst_batch + head.to(tl.int64) * dst_head
    for i in range(num_steps):
        store = tl.load(steps_ptr + 3 * i)
        add = tl.load(steps_ptr + 3 * i + 1)
        mapped = tl.load(steps_ptr + 3 * i + 2)
        if store >= 0:
            tl.store(dst_ptr + (dst_place + store) * DST_ROW + place, S, mask=is_tile)
        if add >= 0:
            N = tl.load(
                add_ptr + (add_place + add) * ADD_ROW + ks[:, None] * ADD_ROW + columns[None, :],
                mask=is_added, other=0.0,
            )  # fmt: skip
            if mapped >= 0:
                M = tl.load(map_ptr + (map_place + mapped) * MAP_ROW + square, mask=is_square, other=0.0)
                S = dot(M, S, N, PRECISION)
            else:
                S = N


class _Plan:
    """Hold the launch of one kind of problem and its steps on the device, three offsets in rows each."""

    def __init__(self, p: PropagateProblem) -> None:
        is_v_first = p.dst.stride(-1) != 1
        rows = p.add.stride(-2), p.map.stride(-2), p.dst.stride(-1 if is_v_first else -2)
        K, W = p.K, p.dst.shape[-1]
        _, _, B, heads = p.dst.shape[:4]
        add_row, map_row, dst_row = rows
        offsets = []
        for store, add, mapped in p.steps:
            places = (p.dst, store, dst_row), (p.add, add, add_row), (p.map, mapped, map_row)
            offsets.append([_rows(*place) for place in places])
        # the caller may be in inference mode, and a later call in none
        with torch.inference_mode(False):
            self.steps = torch.tensor(offsets, dtype=torch.int64, device=p.device).flatten()
        strides = [
            x.stride(dim) // row
            for x, row in zip((p.add, p.map, p.dst), rows, strict=True)
            for dim in (2, 3)
        ]  # fmt: skip
        constants = {
            "K": K, "V": p.V, "W": W, "ADD_ROW": add_row, "MAP_ROW": map_row, "DST_ROW": dst_row,
            "V_FIRST": is_v_first, "TRANSPOSED": p.is_transposed, "BK": max(16, triton.next_power_of_2(K)),
            "BV": BV, "PRECISION": "ieee" if machine(p.device).kind == "hip" else "tf32x3",
        }  # fmt: skip
        grid = B * heads * triton.cdiv(W, BV)
        self.launch = Launch(
            propagate_runs_kernel, grid, (heads, len(p.steps), *strides), constants, 8 if K > 64 else 4
        )


_plans: PlanCache[_Plan] = PlanCache()


def propagate_states(problem: PropagateProblem) -> None:
    """Implement `Backend.propagate_states`."""
    p = problem
    if p.dst.numel() == 0:
        return
    first = None if p.first is None else p.first.contiguous()
    layout = [(x.shape, x.stride(), x.dtype) for x in (p.dst, p.add, p.map)]
    key = (*layout, first is None, p.steps, p.is_transposed, p.device)
    with device_guard(p.device):
        plan = _plans.get(key, lambda: _Plan(p))
        plan.launch(first, p.add, p.map, plan.steps, p.dst)


def _rows(x: Tensor, place: int, row: int) -> int:
    """Return the offset of a place in rows; -1 for none."""
    if place < 0:
        return -1
    i, j = divmod(place, x.shape[1])
    return (i * x.stride(0) + j * x.stride(1)) // row
