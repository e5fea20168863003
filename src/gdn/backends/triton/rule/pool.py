"""Read and update states in an engine's pool: a forward takes slots in place of initial and final states."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from gdn.backends.triton.launch import jit
from gdn.problem import PrefillProblem

UNIT = tl.constexpr(16)  # elements; a constant factor of the strides, so that loads of states are vectorised


@dataclass(frozen=True)
class StatePool:
    """Hold the pool of a prefill, whose states are dense, and the tensor that gets the outputs."""

    state: Tensor
    index: Tensor
    out_index: Tensor | None
    has_initial: Tensor | None
    is_updated: bool
    lowest: int  # of the valid slots
    out: Tensor | None  # None: a new tensor

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that say which slot a sequence reads and writes, in the kernels' order."""
        return self.index, self.out_index, self.has_initial

    @property
    def scalars(self) -> tuple[int, ...]:
        """Return the strides and the slots, in the kernels' order."""
        strides = (0 if x is None else x.stride(0) for x in self.tensors)
        n, h = (stride // UNIT.value for stride in self.state.stride()[:2])
        return n, h, *strides, self.state.shape[0], self.lowest

    @property
    def kind(self) -> Hashable:
        """Return what identifies the binaries."""
        dtypes = (None if x is None else x.dtype for x in (self.state, *self.tensors))
        return *dtypes, self.is_updated

    @property
    def key(self) -> Hashable:
        """Return everything that launches depend on, except the addresses of tensors."""
        return self.scalars, self.kind, self.out is None


NO_POOL: tuple[tuple[None, ...], tuple[int, ...]] = ((None,) * 3, (0,) * 7)  # tensors and scalars without one


def pool_of(p: PrefillProblem) -> StatePool | None:
    """Return the pool that a forward can read and update in place; None: its states have to be gathered."""
    inner = (p.K, 1) if p.state_v_first else (p.V, 1)
    is_dense = p.state.stride()[2:] == inner and not any(x % UNIT.value for x in p.state.stride()[:2])
    # a checkpoint at the end is the final state, a snapshot may be any state: both read copies. States in
    # int16 are widened and rounded by copies, too
    if not is_dense or p.keeps_states or p.column_scale is not None or p.K * p.V % UNIT.value != 0:
        return None
    return StatePool(
        p.state, p.state_index, p.out_state_index, p.has_initial_state, p.update_state,
        0 if p.null_slot is None else 1, p.out if _is_direct(p) else None,
    )  # fmt: skip


def _is_direct(p: PrefillProblem) -> bool:
    """Return True if the kernels can store o in the caller's tensor: dense, aligned, of no input's memory."""
    if not p.out.is_contiguous() or p.out.data_ptr() % 16 != 0:
        return False
    memory = p.out.untyped_storage().data_ptr()
    inputs = (p.q, p.k, p.v, p.g, p.beta, p.a, p.b, p.state)
    return all(x is None or x.untyped_storage().data_ptr() != memory for x in inputs)


class Slots(NamedTuple):
    """Hold which slots sequences read and write; `index` is None where states are [N, HV, K, V]."""

    index: Any
    out_index: Any
    has_initial: Any
    state_n: Any  # strides of the pool in UNIT
    state_h: Any
    index_n: Any
    out_index_n: Any
    has_initial_n: Any
    slots: Any
    lowest: Any


@jit
def locate_initial(slots, n, head, HV, SIZE: tl.constexpr):
    """Return the first element of a sequence's initial state of SIZE elements, and if it is read."""
    if slots.index is None:
        return (n.to(tl.int64) * HV + head) * SIZE, True
    else:
        slot = tl.load(slots.index + n * slots.index_n).to(tl.int64)
        is_read = (slot >= slots.lowest) & (slot < slots.slots)
        if slots.has_initial is not None:
            is_read &= tl.load(slots.has_initial + n * slots.has_initial_n) != 0
        return (slot * slots.state_n + head * slots.state_h) * UNIT, is_read


@jit
def locate_final(slots, n, head, total):
    """Return the first element in the pool of a sequence's final state, and if it is written.

    That of an empty sequence is not.
    """
    slot = tl.load(slots.index + n * slots.index_n).to(tl.int64)
    is_written = (slot >= slots.lowest) & (slot < slots.slots) & (total > 0)
    if slots.out_index is not None:
        slot = tl.load(slots.out_index + n * slots.out_index_n).to(tl.int64)
        is_written &= (slot >= slots.lowest) & (slot < slots.slots)
    return (slot * slots.state_n + head * slots.state_h) * UNIT, is_written
