"""The chunked rule's forward: Triton's `prepare`, then one Gluon kernel in the place of the state pass.

Where sequences and heads are few, that of spans of sequences at the same time: see `split`.

Bytes per token and value head, K = V = 128 in bf16, HV = H, options on: 810 + q, k, v, o 1024, A_inv and P
256, factors 20: 2110, as with `triton.scan`.
"""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdn.backends.backend import Saved
from gdn.backends.hopper import split
from gdn.backends.hopper.walk import walk_kernel
from gdn.backends.triton import plans, whole
from gdn.backends.triton.launch import Launch, allocate, on
from gdn.backends.triton.rule import tidy
from gdn.problem import CHUNK, Problem

SIZE, HALF = 128, 64  # of K and of V; value rows of a chain
TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
TOKENS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
VECTOR = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def chunk_forward(problem: Problem, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
    """See `Backend`. What a backward wants kept is Triton's to make, as is a problem without tokens."""
    p = tidy(problem)
    if save or p.q.numel() == 0 or p.N == 0:
        return whole.chunk_forward(problem, save)
    with on(p.device):
        plan = plans.fused_plan(p)
        new = allocate(p.device, plan.rooms)
        *before, _ = plan.steps(p, new)
        for launch, tensors in before:
            launch(*tensors)
        _, A_inv, P, factors, _, _, _, _, final, o, table = new
        assert A_inv is not None and P is not None and factors is not None and o is not None
        per_row = -(-p.T // CHUNK)
        entries = per_row * p.B if table is None else (table.shape[0] - p.N) // 2
        numbers = (p.T, p.HV, p.HV // p.H, per_row, entries)
        q_d, k_d = (_descriptor(_aligned(x), [1, CHUNK, 1, SIZE], TOKENS) for x in (p.q, p.k))
        v_d = _descriptor(_aligned(p.v), [1, CHUNK, 1, HALF], TOKENS)
        A_d, P_d = (_descriptor(x.view(-1, CHUNK), [CHUNK, CHUNK], TILE) for x in (A_inv, P))
        f_d = _descriptor(factors.view(-1, CHUNK), [1, CHUNK], VECTOR)
        o_d = _descriptor(o, [1, CHUNK, 1, HALF], TOKENS)
        programs, initial, offsets = p.N * p.HV, p.initial_state, p.cu_seqlens
        span = split.span_of(p)
        if span is not None:
            spans = split.plan(p, span, numbers)
            jobs, end_jobs, ranges, ends, states = allocate(p.device, spans.rooms)
            spans.jobs(factors, offsets, table, jobs, end_jobs, ranges)
            spans.ends(k_d, v_d, A_d, f_d, factors, ends, end_jobs)
            spans.combine(ends, ranges, initial, states)
            programs, initial, offsets, table = spans.programs, states, None, jobs
        constants = {"V_FIRST": p.state_v_first}
        walk = Launch(walk_kernel, programs, numbers, constants, 4, options={"maxnreg": 128})
        walk(q_d, k_d, v_d, A_d, P_d, f_d, o_d, factors, initial, final, offsets, table, o)
    return o, final, Saved()


def _descriptor(x: Tensor, block: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy where no tensor copy could read it: 16 bytes must divide its address and strides."""
    if x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:3]):
        return x
    # whatever strides an axis of one element has, which is contiguous with any
    return x.clone(memory_format=torch.contiguous_format)
