"""The chunked forward as others see it: what it saves of a packed problem holds nothing that was not written.

Sequences leave tiles over: `Problem.num_chunks` is a bound, as nobody reads their lengths on the host. No
kernel reads these tiles, but an operator returns them, and debug mode looks for NaN in what leaves.
"""

import triton.language as tl
from torch import Tensor

from gdn.backends.backend import Saved
from gdn.backends.triton import rule
from gdn.backends.triton.chunks import chunks_before
from gdn.backends.triton.launch import Launch, Plans, kernel, on
from gdn.problem import CHUNK, Problem

_BLOCK = 1024  # offsets that a program reads at once
_PROGRAMS = 64  # at most, of a head: they share what is left over


@kernel
def _clear_kernel(
    cu_seqlens_ptr, G_ptr, A_inv_ptr, S_in_ptr, q_rstd_ptr, k_rstd_ptr, N, T, HV, ratio, tiles, programs,
    STATE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    lanes = tl.arange(0, BLOCK)
    for i in range(chunks_before(cu_seqlens_ptr, N, C, BLOCK) + own, tiles, programs):
        tile = tl.full([1], i, tl.int64) * HV + head
        for x in range(0, C * C, BLOCK):
            tl.store(A_inv_ptr + tile * (C * C) + x + lanes, tl.zeros([BLOCK], A_inv_ptr.dtype.element_ty))
        for x in range(0, STATE, BLOCK):
            places, mask = S_in_ptr + tile * STATE + x + lanes, x + lanes < STATE
            tl.store(places, tl.zeros([BLOCK], S_in_ptr.dtype.element_ty), mask=mask)
    end = tl.load(cu_seqlens_ptr + N).to(tl.int32)
    for t in range(end + own * BLOCK, T, programs * BLOCK):
        tokens = (t + lanes).to(tl.int64)
        is_past = tokens < T
        tl.store(G_ptr + tokens * HV + head, tl.zeros([BLOCK], tl.float64), mask=is_past)
        if q_rstd_ptr is not None:
            place = tokens * (HV // ratio) + head // ratio
            is_mine = is_past & (head % ratio == 0)
            tl.store(q_rstd_ptr + place, tl.zeros([BLOCK], tl.float32), mask=is_mine)
            tl.store(k_rstd_ptr + place, tl.zeros([BLOCK], tl.float32), mask=is_mine)


_launches: Plans[Launch] = Plans()


def chunk_forward(problem: Problem, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
    """See `Backend`."""
    o, final, saved = rule.chunk_forward(problem, save)
    if save:
        clear(problem, saved)
    return o, final, saved


def clear(problem: Problem, saved: Saved) -> None:
    """What no kernel has written, if it is packed."""
    cu_seqlens = problem.cu_seqlens
    # where no operator returns it, and in no debug mode, nobody sees it
    if cu_seqlens is not None and problem.form is None:
        with on(problem.device):
            _clear(problem, cu_seqlens.to(problem.device, non_blocking=True).contiguous(), saved)


def _clear(p: Problem, cu_seqlens: Tensor, saved: Saved) -> None:
    """Zeros in the tiles of no chunk and for the tokens of no sequence."""
    A_inv, S_in, norms = saved.A_inv, saved.S_in, (saved.q_rstd, saved.k_rstd)
    assert A_inv is not None and S_in is not None
    key = (p.q.shape, p.v.shape, p.N, p.device, cu_seqlens.dtype, A_inv.dtype, S_in.dtype, norms[0] is None)
    _launches.get(key, lambda: _plan(p))(cu_seqlens, saved.G, A_inv, S_in, *norms)


def _plan(p: Problem) -> Launch:
    programs = max(1, min(p.N, _PROGRAMS))
    numbers = (p.N, p.T, p.HV, p.HV // p.H, p.num_chunks, programs)
    constants = {"STATE": p.K * p.V, "C": CHUNK, "BLOCK": _BLOCK}
    return Launch(_clear_kernel, programs * p.HV, numbers, constants, num_warps=4)
