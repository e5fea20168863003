"""Pass the states of a sequence from segment to segment: see `segments`."""

import triton.language as tl

from gdn.backends.triton.launch import jit, kernel
from gdn.backends.triton.launch.pdl import wait_then_launch_dependents
from gdn.backends.triton.lib import dot, split_bf16, state_pointers

ENTERING, LEAVING = tl.constexpr(1), tl.constexpr(2)  # the state comes from another rank, goes to one


@jit
def pass_segment(M, S, N, D: tl.constexpr):
    """Return M S + N in fp32."""
    if D == 64:
        return dot(M, S, N, "tf32x3")
    else:
        # split bf16 on the tensor cores: hi hi + hi lo + lo hi; without lo lo the error is 1e-5
        M_high, M_low = split_bf16(M, tl.bfloat16)
        S_high, S_low = split_bf16(S, tl.bfloat16)
        return tl.dot(M_high, S_high, tl.dot(M_high, S_low, tl.dot(M_low, S_high, N)))


@kernel
def propagate_states_kernel(
    transfers_ptr, ranges_ptr, initial_ptr, states_ptr, borders_ptr,
    HV,
    D: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, STAGES: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Compute the states that enter the segments of a sequence, BV value columns of them.

    One CTA: one sequence, value head and BV columns, segment after segment; S stays in registers.
    Grid: sequences x HV x D / BV.  Warps: 8 at K = 128, 4 at K = 64.
    Shared memory: Triton's, for STAGES pipeline stages of the loop that loads M and N, and for MMA operands.
    """
    strip = tl.program_id(0) % (D // BV)
    head = (tl.program_id(0) // (D // BV)) % HV
    n = tl.program_id(0) // (D // BV * HV)
    first = tl.load(ranges_ptr + 2 * n)
    num_segments = tl.load(ranges_ptr + 2 * n + 1)
    ks = tl.arange(0, D)
    vs = strip * BV + tl.arange(0, BV)
    place, mask = state_pointers(0, ks, vs, D, D, V_FIRST)
    if initial_ptr is None:
        S = tl.zeros([D, BV], tl.float32)
    else:
        S = tl.load(initial_ptr + (n.to(tl.int64) * HV + head) * (D * D) + place).to(tl.float32)
    # `segment_transfer` writes M and N to HBM; above, the caller's state and the ranges, two launches old,
    # need no wait
    wait_then_launch_dependents()
    tl.store(states_ptr + (first.to(tl.int64) * HV + head) * (D * D) + place, S, mask=mask)
    # one segment: the scan only needs the initial state
    if num_segments == 1:
        return
    # the segment whose M and N are the first of the sequence: with OWN the last segments have none
    target = first
    if OWN:
        target -= n
    square = ks[:, None] * D + ks[None, :]
    columns = ks[:, None] * D + vs[None, :]
    begin = 1
    if borders_ptr is not None:
        # a state that comes from another rank passes through the first segment, too
        begin = 1 - (tl.load(borders_ptr + n) & ENTERING)
    if begin == 1:
        S = tl.load(transfers_ptr + (2 * target.to(tl.int64) * HV + head) * (D * D) + columns)
    for i in tl.range(begin, num_segments - 1, num_stages=STAGES):
        segment = (first + i).to(tl.int64)
        tl.store(states_ptr + (segment * HV + head) * (D * D) + place, S, mask=mask)
        zero = 2 * (target + i).to(tl.int64) * HV + head
        M = tl.load(transfers_ptr + (zero + HV) * (D * D) + square)
        N = tl.load(transfers_ptr + zero * (D * D) + columns)
        S = pass_segment(M, S, N, D)
    tl.store(
        states_ptr + ((first + num_segments - 1).to(tl.int64) * HV + head) * (D * D) + place, S, mask=mask
    )
