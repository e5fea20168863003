"""Zero the entries of saved tensors that no kernel has written.

`Problem.num_chunks` is an upper bound, because the host does not read the lengths of packed sequences. The
saved tensors of a packed problem therefore have chunks that no sequence uses. No kernel reads them, but an
operator returns them, and PyTorch's debug mode checks returned tensors for NaN.
"""

import torch
import triton.language as tl
from torch import Tensor

from gdn.backends.backend import Saved
from gdn.backends.triton.chunks import count_chunks_before
from gdn.backends.triton.launch import Launch, PlanCache, device_guard, kernel
from gdn.problem import CHUNK, Problem

_BLOCK = 1024  # elements that a program stores at once, and offsets of cu_seqlens that it loads at once
_PROGRAMS = 64  # most programs per value head; they share the unused chunks


@kernel
def _clear_kernel(
    cu_seqlens_ptr, G_ptr, A_inv_ptr, S_in_ptr, q_rstd_ptr, k_rstd_ptr, N, T, HV, ratio, tiles, programs,
    STATE: tl.constexpr, INVERSE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # G, A_inv, S_in, q_rstd, k_rstd = 0 in chunks of no sequence and at tokens past the last sequence.
    # Program (own, head) zeros every `programs`-th unused chunk of one value head, and every `programs`-th
    # block of BLOCK tokens past the end. Grid: min(N, _PROGRAMS) * HV, heads fastest; 4 warps; no PDL.
    # Reads cu_seqlens; writes, per head, INVERSE + STATE elements an unused chunk and 8 to 16 bytes a token.
    own = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    lanes = tl.arange(0, BLOCK)
    # the number of used chunks is summed on the device: reading it on the host would stall the stream
    for i in range(count_chunks_before(cu_seqlens_ptr, N, C, BLOCK) + own, tiles, programs):
        # int64: the offset of a chunk in HBM may exceed 32 bits
        tile = tl.full([1], i, tl.int64) * HV + head
        for x in range(0, INVERSE, BLOCK):
            tl.store(A_inv_ptr + tile * INVERSE + x + lanes, tl.zeros([BLOCK], A_inv_ptr.dtype.element_ty))
        for x in range(0, STATE, BLOCK):
            places, mask = S_in_ptr + tile * STATE + x + lanes, x + lanes < STATE
            tl.store(places, tl.zeros([BLOCK], S_in_ptr.dtype.element_ty), mask=mask)
    end = tl.load(cu_seqlens_ptr + N).to(tl.int32)
    # tokens past the last sequence have no G and no norms
    for t in range(end + own * BLOCK, T, programs * BLOCK):
        tokens = (t + lanes).to(tl.int64)
        is_past = tokens < T
        if G_ptr is not None:
            tl.store(G_ptr + tokens * HV + head, tl.zeros([BLOCK], tl.float64), mask=is_past)
        if q_rstd_ptr is not None:
            place = tokens * (HV // ratio) + head // ratio
            # norms exist per key head: only its first value head stores them to HBM
            is_owned = is_past & (head % ratio == 0)
            tl.store(q_rstd_ptr + place, tl.zeros([BLOCK], tl.float32), mask=is_owned)
            tl.store(k_rstd_ptr + place, tl.zeros([BLOCK], tl.float32), mask=is_owned)


_launches: PlanCache[Launch] = PlanCache()


def zero_unused_tiles(problem: Problem, saved: Saved) -> None:
    """Zero what no kernel has written in the saved tensors of a packed problem."""
    cu_seqlens = problem.cu_seqlens
    # `layout_key` is None for calls of the operator and in debug mode; else nothing reads unused entries
    if cu_seqlens is not None and problem.layout_key is None:
        with device_guard(problem.device):
            zero = _zero_on_device if saved.S_in is not None else _mask_unused
            zero(problem, cu_seqlens.to(problem.device, non_blocking=True).contiguous(), saved)


def _zero_on_device(p: Problem, cu_seqlens: Tensor, saved: Saved) -> None:
    """Launch the kernel that zeros chunks of no sequence and tokens of no sequence."""
    A_inv, S_in, norms = saved.A_inv, saved.S_in, (saved.q_rstd, saved.k_rstd)
    assert A_inv is not None and S_in is not None
    # everything that the launch depends on, except the addresses of tensors
    dtypes = (cu_seqlens.dtype, A_inv.dtype, S_in.dtype)
    # two tiles of split bf16, else one
    inverse = A_inv.shape[2:].numel()
    key = (p.q.shape, p.v.shape, p.N, p.device, *dtypes, inverse, saved.G is None, norms[0] is None)
    _launches.get(key, lambda: _plan(p, inverse))(cu_seqlens, saved.G, A_inv, S_in, *norms)


def _mask_unused(p: Problem, cu_seqlens: Tensor, saved: Saved) -> None:
    """Zero the same entries of what `recompute` saves, without reading a length on the host."""
    num_used = (cu_seqlens.diff() + (CHUNK - 1)).div(CHUNK, rounding_mode="floor").sum()
    is_unused = torch.arange(p.num_chunks, device=p.device) >= num_used
    is_past = torch.arange(p.T, device=p.device) >= cu_seqlens[-1]
    for x in (saved.A_inv, saved.factors):
        if x is not None:
            x.masked_fill_(is_unused[:, None, None, None], 0)
    for x in (saved.G, saved.q_rstd, saved.k_rstd):
        if x is not None:
            x.masked_fill_(is_past[None, :, None], 0)


def _plan(p: Problem, inverse: int) -> Launch:
    programs = max(1, min(p.N, _PROGRAMS))
    scalars = (p.N, p.T, p.HV, p.HV // p.H, p.num_chunks, programs)
    constants = {"STATE": p.K * p.V, "INVERSE": inverse, "C": CHUNK, "BLOCK": _BLOCK}
    return Launch(_clear_kernel, programs * p.HV, scalars, constants, num_warps=4)
