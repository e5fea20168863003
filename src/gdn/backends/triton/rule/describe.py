"""Describe a problem: the table of chunks, dtypes, block sizes and strides that its launches share."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from gdn.backends.backend import Shape
from gdn.backends.triton.chunks import Table
from gdn.backends.triton.launch import Launch, TensorSpec, machine, unit_of
from gdn.backends.triton.rule.choose import fp32_mma, fp32_state_operands
from gdn.backends.triton.rule.pairs import NUM_FACTORS
from gdn.problem import CHUNK, Problem


@dataclass(frozen=True)
class Description:
    """Hold what the launches of a problem share."""

    table: Table | None
    entries: int  # chunks that grids are made for: an upper bound where sequences are packed
    unit: int  # of the strides of row, token and head
    precision: str  # of MMAs with fp32 operands: tf32, tf32x3 or ieee
    BK: int
    block: int  # key columns of one MMA, in kernels that loop over K: bounds registers and shared memory
    activation: dict[str, bool]

    @property
    def launch(self) -> Launch | None:
        """Return the launch that makes the table, or None for dense problems."""
        return None if self.table is None else self.table.launch

    @property
    def spec(self) -> TensorSpec | None:
        """Return the buffer spec of the table, or None for dense problems."""
        return None if self.table is None else self.table.spec

    @property
    def sizes(self) -> dict[str, int]:
        """Return the constants of block sizes and of the unit of strides."""
        return {"BK": self.BK, "C": CHUNK, "UNIT": self.unit}


def describe(p: Problem, *others: Tensor) -> Description:
    """Describe a problem. `others`: tensors [B, T, heads, .] whose strides are counted in the same unit."""
    gpu = machine(p.device)
    # packed sequences: the table of chunks is made on the device
    table = None if p.cu_seqlens is None else Table(p, gpu)
    strides = [s for x in (p.q, p.k, p.v, *others) for s in x.stride()[:3]]
    if p.is_per_channel:
        # rows of g, and of q_in and k_in, are loaded as those of q and k are
        assert p.g is not None
        strides += [*p.g.stride()[:3], p.K]
    BK = max(16, triton.next_power_of_2(p.K))
    is_half = intermediate_dtype(p).itemsize < 4
    return Description(
        table=table,
        entries=p.num_chunks if table is None else table.bound,
        unit=unit_of(*strides),
        precision="tf32" if is_half else "ieee" if gpu.kind == "hip" else "tf32x3",
        BK=BK,
        block=min(BK, 32 if p.q.dtype == torch.float32 else 128),
        activation={"SIGMOID": p.use_beta_sigmoid_in_kernel, "NEGATIVE": p.allow_neg_eigval},
    )


def to_kernel_layout(problem: Problem) -> Problem:
    """Return the problem with tensors in the layout that the kernels read; copy only unusual layouts.

    Loads of q, k and v are vectorised along the last axis, which must therefore have stride 1.
    """
    p = problem
    changed: dict[str, Tensor] = {}
    for name in ("q", "k", "v", "g") if p.is_per_channel else ("q", "k", "v"):
        x = getattr(p, name)
        if x.stride(-1) != 1:
            changed[name] = with_dense_rows(x)
    for name in ("A_log", "dt_bias", "initial_state", "cu_seqlens"):
        x = getattr(p, name)
        if x is not None and not x.is_contiguous():
            changed[name] = x.contiguous()
    # an asynchronous copy: the host does not wait for the GPU
    if p.cu_seqlens is not None and p.cu_seqlens.device != p.device:
        changed["cu_seqlens"] = p.cu_seqlens.to(p.device, non_blocking=True)
    return replace(p, **changed) if changed else p  # type: ignore[arg-type]


def with_dense_rows(x: Tensor) -> Tensor:
    """Return x, or a copy of it if its last axis has a stride other than 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def saves(problem: Problem) -> tuple[Shape | None, ...]:
    """Return the shapes of Saved: all but v_new, which the backward recomputes from S_in with two MMAs.

    With `recompute` there are factors in the place of S_in.
    """
    p, dtype = problem, operand_dtype(problem)
    tiles = (p.num_chunks, p.HV)
    # norms are per key head
    rstd = ((p.B, p.T, p.H), torch.float32) if p.use_qk_l2norm_in_kernel else None
    return (
        # sums per key channel would be 8 K bytes a token; the backward adds g up again
        None if p.is_per_channel else ((p.B, p.T, p.HV), torch.float64),
        ((*tiles, CHUNK, CHUNK), dtype),
        None if p.recompute else ((*tiles, p.K, p.V), dtype),
        None,
        rstd,
        rstd,
        # the rows of a decay per key channel are no smaller than S_in: the whole forward runs again
        ((*tiles, NUM_FACTORS, CHUNK), torch.float32) if p.recompute and not p.is_per_channel else None,
    )


def operand_dtype(p: Problem) -> torch.dtype:
    """Return the dtype of MMA operands that read the state."""
    return torch.float32 if fp32_state_operands(p) else p.q.dtype


def intermediate_dtype(p: Problem) -> torch.dtype:
    """Return the dtype of tensors that pass through HBM between kernels and are not multiplied by a state."""
    return torch.float32 if fp32_mma(p) else p.q.dtype


def problem_key(p: Problem) -> Hashable:
    """Return everything that the launches depend on, except the addresses of tensors."""
    if p.layout_key is not None:
        # otherwise built from shapes, strides, dtypes and options: a Python tuple, no read of the GPU
        return p.layout_key
    q, k, v, g, beta, cu = p.q, p.k, p.v, p.g, p.beta, p.cu_seqlens
    return (
        q.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device,
        None if g is None else (g.stride(), g.dtype),
        None if beta is None else (beta.stride(), beta.dtype),
        None if cu is None else (p.N, cu.dtype),
        None if p.A_log is None else p.A_log.dtype,
        None if p.dt_bias is None else p.dt_bias.dtype,
        None if p.initial_state is None else p.initial_state.dtype,
        p.scale, p.lower_bound, p.output_final_state, p.use_qk_l2norm_in_kernel,
        p.use_beta_sigmoid_in_kernel, p.allow_neg_eigval, p.state_v_first, p.batch_invariant, p.recompute,
    )  # fmt: skip


def kind_key(p: Problem, description: Description) -> Hashable:
    """Return what identifies the binaries of a problem, including those for other sizes."""
    dtypes = (
        None if x is None else x.dtype
        for x in (p.q, p.g, p.beta, p.A_log, p.dt_bias, p.initial_state, p.cu_seqlens)
    )
    return (
        *dtypes, p.is_per_channel, p.lower_bound is None, p.K, p.V, description.unit, p.output_final_state,
        p.use_qk_l2norm_in_kernel, p.use_beta_sigmoid_in_kernel, p.allow_neg_eigval, p.state_v_first,
        p.batch_invariant, p.recompute,
    )  # fmt: skip


def tensors_of(p: Problem) -> tuple[Tensor | None, ...]:
    """Return a problem's tensors in the order that the sequences of `launches` expect."""
    return (p.q, p.k, p.v, p.g, p.beta, p.A_log, p.dt_bias, p.initial_state, p.cu_seqlens)


def unit_strides(unit: int, *tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of row, token and head, in units; a constant unit lets Triton vectorise loads."""
    return tuple(s // unit for x in tensors for s in x.stride()[:3])


def state_strides(p: Problem, unit: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the strides, in units, of what a state pass reads as q and k: these, or rows per value head."""
    if not p.is_per_channel:
        return unit_strides(unit, p.q), unit_strides(unit, p.k)
    # the row k_out of a token and head follows its k_in in HBM
    q_in = (p.T * p.HV * p.K // unit, p.HV * p.K // unit, p.K // unit)
    return q_in, tuple(2 * s for s in q_in)


def gate_strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return the strides of row, token and head of gates, in elements; zeros for one that is absent."""
    return tuple(s for x in tensors for s in ((0, 0, 0) if x is None else x.stride()))


def shape_scalars(p: Problem) -> tuple[int, ...]:
    """Return T, HV, ratio, chunks_per_row, which every kernel takes."""
    return (p.T, p.HV, p.HV // p.H, (p.T + CHUNK - 1) // CHUNK)


def state_scalars(p: Problem) -> tuple[int, ...]:
    """Return the scalars of a state pass: those of `shape_scalars`; rows per value head share no key head."""
    T, HV, ratio, chunks_per_row = shape_scalars(p)
    return T, HV, 1 if p.is_per_channel else ratio, chunks_per_row
