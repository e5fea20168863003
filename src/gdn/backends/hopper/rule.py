"""Launch the chunked forward: `gates` and `solve` for each chunk, then the state scan (`walk`).

Where sequences and heads are few, `split` cuts sequences into segments that are scanned at the same time.

HBM bytes per token and value head at K = V = 128 in bf16, HV = H: gates 14, solve 368; scan: q, k, v, o 1024,
A_inv 96, factors 16. Sum 1518; 32 more of chunks that are not well-conditioned, and 256 with l2norm. The
tensors saved for a backward add 560 (A_inv has its zeros then), or 1040 where states are kept in fp32.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdn import settings
from gdn.backends.backend import Saved
from gdn.backends.hopper import cost, split
from gdn.backends.hopper.chunk import TILE
from gdn.backends.hopper.factors import BOX, LEAST, ROWS
from gdn.backends.hopper.gates import gates_kernel
from gdn.backends.hopper.solve import solve_kernel
from gdn.backends.hopper.walk import walk_kernel
from gdn.backends.select import other_launches
from gdn.backends.triton.launch import (
    Launch,
    PlanCache,
    Step,
    TensorSpec,
    allocate,
    allocate_placeholders,
    compile_ahead,
    device_guard,
    tensor_spec,
)
from gdn.backends.triton.launch.pdl import PDL
from gdn.backends.triton.rule import describe as rules
from gdn.backends.triton.rule import run as chunked
from gdn.backends.triton.rule.describe import to_kernel_layout
from gdn.backends.triton.rule.zero_unused import zero_unused_tiles
from gdn.problem import CHUNK, Problem

GLIDES = True  # well-conditioned chunks take the fast path: see `chunk`
STRIP = 64  # value rows of S^T of a consumer warpgroup
REGISTERS = {2: 128, 1: 120}  # maxnreg of the scan by consumers a CTA; warp_specialize distributes them
# CTAs (of one warp) of `solve` that fit an SM, with 168 registers a thread and 18 or 26 KB each, by K = V
WARPS = {128: 12, 64: 8}
HEADS = 8  # of a CTA of `gates`
# shared memory of the TMA blocks: halves of A_inv, fp32 states, tokens of q, k, v, boxes of factors
HALF = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
WIDE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
TOKENS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
VECTOR = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@dataclass(frozen=True)
class Forward:
    """Hold the launches of one forward and the specs of the tensors they write."""

    # A_inv, factors, final, o, table, next; G, S_in, q_rstd, k_rstd for a backward; those of `spans`
    specs: tuple[TensorSpec | None, ...]
    table: Launch | None
    gates: Launch | None
    solve: Launch
    spans: split.Spans | None
    walk: Launch

    def steps(self, p: Problem, new: list[Tensor | None]) -> Iterator[Step]:
        """Yield the launches and their tensors, in order."""
        A_inv, factors, final, o, table, jobs_taken, G, S_in, q_rstd, k_rstd, *rest = new
        assert A_inv is not None and factors is not None and o is not None
        if self.table is not None:
            yield self.table, (p.cu_seqlens, table)
        # only a packed batch has tokens of no sequence, whose outputs `solve` zeroes
        tail = None if table is None else o
        q_d, k_d, v_d = (_descriptor(x, (1, CHUNK, 1, STRIP), TOKENS) for x in (p.q, p.k, p.v))
        tiles: tuple[Any, ...] = (
            k_d,
            v_d,
            *(_descriptor(half, (1, CHUNK // 2, CHUNK), HALF) for half in halves_of(A_inv)),
            _descriptor(factors.view(-1, CHUNK), (BOX.value, CHUNK), VECTOR),
        )
        halves: tuple[Any, ...] = (
            *tiles[2:4],
            q_d if p.use_qk_l2norm_in_kernel else None,
            k_d,
        )
        gates = (p.g, p.beta, p.A_log, p.dt_bias, table, factors)
        if self.gates is not None:
            yield self.gates, (*gates, G)
        yield self.solve, (*halves, *gates, q_rstd, k_rstd, tail, jobs_taken)
        # o and S_in are stored by TMA, [C, 64] and [K, 64] elements at a time
        out: tuple[Any, ...] = (
            _descriptor(o.view(-1, p.HV * p.V), (CHUNK, STRIP), TILE.value),
            None if S_in is None else _descriptor(S_in.view(-1, p.V), (p.K, STRIP), _tile_of(S_in)),
        )
        if self.spans is None:
            ends = (p.initial_state, final, p.cu_seqlens, table)
            yield self.walk, (q_d, *tiles, *out, *ends, o, factors, jobs_taken)
        else:
            yield from self.spans.steps(p, tiles, factors, table, rest)
            states, jobs, *_ = rest
            yield self.walk, (q_d, *tiles, *out, states, final, None, jobs, o, factors, jobs_taken)


_forwards: PlanCache[Forward] = PlanCache()


def chunk_forward(problem: Problem, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
    """Implement `Backend.chunk_forward`."""
    o, final, saved = forward(to_kernel_layout(problem), rules.operand_dtype(problem) if save else None)
    if save:
        A_inv = saved.A_inv
        # K = 64: `triton`'s backward reads A_inv in fp32, not as split bf16
        if A_inv is not None and A_inv.dim() > 4:
            saved = replace(saved, A_inv=A_inv.sum(2, dtype=torch.float32))
        zero_unused_tiles(problem, saved)
    return o, final, saved


def forward(p: Problem, kept: torch.dtype | None) -> tuple[Tensor, Tensor | None, Saved]:
    """Compute o, the final state and the saved tensors like triton's forward, which runs empty problems.

    `kept` is the dtype of the saved states; None: nothing is saved. At K = 64 the saved A_inv is split bf16,
    [.., 2, C, C].
    """
    if p.q.numel() == 0 or p.N == 0:
        return chunked.forward(p, kept)
    p = _aligned(p)
    with device_guard(p.device):
        cuts = cost.cuts_of(p)
        chains = cost.chains_of(p, cuts)
        plan = _forwards.get(
            (rules.problem_key(p), cuts, chains, kept), lambda: _first(p, cuts, chains, kept)
        )
        new = allocate(p.device, plan.specs)
        for launch, tensors in plan.steps(p, new):
            launch(*tensors)
    A_inv, _, final, o, _, _, G, S_in, q_rstd, k_rstd, *_ = new
    assert o is not None
    if kept is None:
        return o, final, Saved()
    # without its zeros, or with B in its place, it is of no use to a backward
    if A_inv is not None and A_inv.shape[-1] < CHUNK:
        A_inv = None
    return o, final, Saved(G, A_inv, S_in, None, q_rstd, k_rstd)


def _first(p: Problem, cuts: cost.Cuts | None, chains: int, kept: torch.dtype | None) -> Forward:
    # compile ahead, then plan the first forward of a kind
    a = rules.describe(p)
    # with no backend named, `triton` may get a smaller problem of the kind: compile its launches ahead, too
    is_shared = settings.backend(p.backend) is None

    def steps() -> Iterator[Step]:
        yield from launches(p, kept)
        yield from other_launches(p, kept, "hopper")

    compile_ahead(p.device, ("hopper", kept, rules.kind_key(p, a), is_shared), steps)
    return _plan(p, a, cuts, chains, kept)


def launches(problem: Problem, kept: torch.dtype | None) -> Iterator[Step]:
    """Yield the launches of forwards of this kind at any size, with stand-ins for the tensors they write."""
    p, tensors = problem, (problem.q, problem.k, problem.v)
    if not all(map(_is_copyable, tensors)):
        # the forward will copy them; to compile, one token has all that a binary depends on
        q, k, v = (x.new_empty((1, 1, *x.shape[2:])) for x in tensors)
        p = replace(p, form=None, q=q, k=k, v=v)
    a = rules.describe(p)
    widths, _ = split.COMBINE[p.K]
    for cuts, one_each in itertools.product((None, cost.equal(1)), (True, False)):
        chains, width = (1, widths[0]) if one_each else (2, widths[-1])
        plan = _plan(p, a, cuts, chains, kept, width, one_each)
        new = allocate_placeholders(p.device, plan.specs)
        # TMA descriptors need real strides: one tile of each tensor that has a descriptor
        for i in (0, 1, 3, 7):
            x = plan.specs[i]
            new[i] = None if x is None else allocate(p.device, [tensor_spec((1, 1, *x[0][2:]), x[2])])[0]
        yield from plan.steps(p, new)


def _plan(
    p: Problem, a: rules.Description, cuts: cost.Cuts | None, chains: int, kept: torch.dtype | None,
    width: int | None = None, one_each: bool | None = None,
) -> Forward:  # fmt: skip
    """Plan the launches of a forward; `kept` as in `forward`.

    `cuts`: of sequences into segments, None: they are not cut. `chains`: consumer warpgroups of a CTA of the
    scan, at most one for each 64 values. `width`: value columns of a CTA of `split.combine_kernel`.
    `one_each`: no CTA of `solve` has more than one tile. The last two follow from the problem where None.
    """
    numbers, tiles = rules.shape_scalars(p), (p.num_chunks, p.HV)
    G, _, _, _, q_rstd, k_rstd = rules.saves(p)
    # A forward for a backward (states in q's dtype at K = 128) stores A_inv whole. Any other at K = 128 omits
    # the zero upper right quarter, 32 HBM bytes a token and head, and has B for well-conditioned chunks.
    is_spare = p.K == 2 * STRIP and kept is not p.q.dtype
    tile = (3 * CHUNK // 2, CHUNK // 2) if is_spare else (CHUNK, CHUNK)
    parts = (2,) if p.K == CHUNK else ()
    glides = GLIDES and is_spare
    S_in = None if kept is None else ((*tiles, p.K, p.V), kept)
    gates, solve = _of_tiles(p, a, kept, glides, one_each)
    numbers = (*numbers, a.entries)
    spans = None
    if cuts is not None:
        spans = split.plan(p, cuts, numbers, width or split.width_of(p), glides, gates is not None)
    jobs = p.N * p.HV if spans is None else spans.jobs_of_walk
    chains = min(chains, p.V // STRIP)
    # with one consumer a CTA and V = 128, two CTAs share a work item
    jobs *= p.V // STRIP // chains
    walk = Launch(
        walk_kernel,
        # persistent: 1 CTA an SM, as a CTA takes nearly all of an SM's shared memory
        min(jobs, cost.num_sms(p.device)),
        (*numbers, jobs),
        {"V_FIRST": p.state_v_first, "GLIDES": glides, "CHAINS": chains, "D": p.K},
        4,
        options={"maxnreg": REGISTERS[chains], **PDL},
        num_descriptors=8,
        seconds=2.0 * chains,
    )
    specs = (
        tensor_spec((*tiles, *parts, *tile), p.q.dtype),
        tensor_spec((a.entries, p.HV, ROWS.value, CHUNK), torch.float32),
        tensor_spec(p.state_shape, torch.float32) if p.output_final_state else None,
        tensor_spec(p.v.shape, p.v.dtype),
        a.spec,
        tensor_spec((1,), torch.int32),
        *(None if kept is None or x is None else tensor_spec(*x) for x in (G, S_in, q_rstd, k_rstd)),
        *(() if spans is None else spans.specs),
    )
    return Forward(specs, a.launch, gates, solve, spans, walk)


def _of_tiles(
    p: Problem, a: rules.Description, kept: torch.dtype | None, glides: bool, one_each: bool | None
) -> tuple[Launch | None, Launch]:
    """Plan `gates`, or None where `solve` reads the gates itself, and `solve`; arguments as in `_plan`."""
    T, HV, ratio, per_row = rules.shape_scalars(p)
    count, programs = a.entries * HV, WARPS[p.K] * cost.num_sms(p.device)
    one_each = count <= programs if one_each is None else one_each
    # a backward needs G; with batch_invariant the kernel that sums G may not depend on the batch
    is_prepared = kept is not None or not one_each or p.batch_invariant
    strides, activation = rules.gate_strides(p.g, p.beta), {**a.activation, "RESET": LEAST}
    gates = Launch(
        gates_kernel,
        a.entries * -(-HV // HEADS),
        (*strides, T, HV, per_row),
        {"C": CHUNK, "BH": HEADS, **activation},
        4,
        options=PDL,
    )
    kind = {"NORM": p.use_qk_l2norm_in_kernel, "GLIDES": glides, "D": p.K}
    solve = Launch(
        solve_kernel,
        min(count, programs),
        (*strides, T, HV, ratio, per_row, p.scale, count),
        {"PREPARED": is_prepared, **activation, **kind},
        1,
        options={"maxnreg": 168, **PDL},
        num_descriptors=4,
        seconds=2.2,
    )
    return gates if is_prepared else None, solve


def halves_of(A_inv: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the upper and lower C / 2 rows of tiles [.., C, C], or [.., 3 C / 2, C / 2].

    The latter lack the zero upper right quarter. A TMA load of 64 columns reads it as zeros, and a TMA store
    does not write it, since it is out of the view's bounds.
    """
    width = A_inv.shape[-1]
    size, upper = A_inv.shape[-2] * width, CHUNK // 2 * width
    shape = (A_inv.numel() // size, CHUNK // 2)
    return (
        A_inv.as_strided((*shape, width), (size, width, 1)),
        A_inv.as_strided((*shape, CHUNK), (size, CHUNK, 1), A_inv.storage_offset() + upper),
    )


def _tile_of(x: Tensor) -> gl.NVMMASharedLayout:
    return TILE.value if x.element_size() == 2 else WIDE


def _descriptor(x: Tensor, block: tuple[int, ...], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Make the TMA descriptor of x in blocks; all checks but that of the address are cached."""
    # host time: a new descriptor checks shape, strides and layout each time, so copy a checked one
    found = object.__new__(TensorDescriptor)
    found.__dict__.update(_described(x.shape, x.stride(), x.dtype, block, layout))
    found.base = x
    return found


@lru_cache(4096)
def _described(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, block: tuple[int, ...],
    layout: gl.NVMMASharedLayout,
) -> dict[str, Any]:  # fmt: skip
    nowhere = torch.empty(0, dtype=dtype)
    return vars(TensorDescriptor(nowhere, list(shape), list(strides), list(block), layout))


def _aligned(p: Problem) -> Problem:
    """Return the problem with q, k, v copied where TMA cannot read them.

    TMA needs addresses and strides that are multiples of 16 bytes. NVIDIA does not document strides of 0, so
    those are copied, too.
    """
    q, k, v = _copyable(p.q), _copyable(p.k), _copyable(p.v)
    # `form` covers neither addresses nor the strides of copies: without it the launches are looked up anew
    return p if q is p.q and k is p.k and v is p.v else replace(p, form=None, q=q, k=k, v=v)


def _copyable(x: Tensor) -> Tensor:
    # clone, not contiguous(): an axis of one element is contiguous with any stride, and would not be copied
    return x if _is_copyable(x) else x.clone(memory_format=torch.contiguous_format)


def _is_copyable(x: Tensor) -> bool:
    row, token, head, _ = x.stride()
    is_spread = row * token * head == 0
    return not is_spread and (x.data_ptr() | x.element_size() * (row | token | head)) % 16 == 0
