"""Provide pools of states in int16 with a scale per column of V: the bytes of bf16, and a smaller error."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn.backends.eager.conv import repeat_valid
from gdn.backends.eager.integers import ColumnStates, read_states
from gdn.notation import Index
from gdn.problem import check
from gdn.problem.history import check_pool_sizes


@dataclass(frozen=True)
class Int16Pool:
    """Hold a pool of states in int16, with an fp32 scale for each column of V, for one layer or for several.

    `allocate_int16_pool` makes one; an engine may also give views of its own memory. `decode`,
    `decode_packed`, `decode_step` and `prefill` take it as `state`, and `commit` as `dst`.

        S_kv = state_kv column_scale_v;   stored:   column_scale_v = max_k |S_kv| / 32767
                                                    state_kv = S_kv / column_scale_v, to the nearest integer

    Fields:          shape                dtype
        state        [slots, HV, K, V]    int16, any strides; with state_v_first [slots, HV, V, K]; with
                                          ring_pos [slots, R, HV, K, V]
        column_scale [slots, HV, V]       fp32, any strides; with ring_pos [slots, R, HV, V]

    With several layers both have a leading axis of layers, and `pool[layer]` is the pool of one layer.

    Error:  each element is at most half a scale off: 1 / 65,534 of the largest element of its column. A
            state in bf16 is 1 / 512 of each element off.
    Bytes:  2 per element and 4 per column: 1.016 of bf16's with K = 128.
    Bits:   a state that is read and stored again keeps its bits, and a decay alone is exact to fp32: it
            changes the scales.
    Limits: a column whose largest element is below 2^-100 is stored as zeros. A column that holds NaN or
            infinity gets the scale NaN, and all of it reads as NaN; other columns and heads do not change.
    """

    state: Tensor
    column_scale: Tensor

    def __getitem__(self, layer: int) -> "Int16Pool":
        """Return the pool of one layer, whose tensors are views."""
        return Int16Pool(self.state[layer], self.column_scale[layer])

    @property
    def bytes_per_slot(self) -> int:
        """Return the bytes of a slot in one layer, for a pool without rings."""
        place = (0,) * (self.column_scale.dim() - 2)
        return self.state[place].nbytes + self.column_scale[place].nbytes

    def read(
        self, index: Index, *, state_v_first: bool = False, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the states of the slots `index` [n] of one layer in a float dtype: [n, HV, K, V].

        A slot below 0 or past the pool reads as zeros. Raises TypeError, ValueError for wrong tensors.
        """
        held = ColumnStates(self.state, self.column_scale, state_v_first)
        return read_slots(held, index, state_v_first, dtype)

    def write(self, index: Index, states: Tensor, *, state_v_first: bool = False) -> None:
        """Round `states` [n, HV, K, V] of any float, and store them in the slots `index` [n] of one layer.

        A slot below 0 or past the pool is skipped. No slot may be written twice.
        Raises TypeError, ValueError for wrong tensors; nothing is written then.
        """
        held = ColumnStates(self.state, self.column_scale, state_v_first)
        write_slots(held, index, states, state_v_first)


def allocate_int16_pool(
    *lead: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    state_v_first: bool = False,
    device: torch.device | str | None = None,
) -> Int16Pool:
    """Allocate zero states in int16 and their scales for `lead`: slots, or layers and slots.

    Args:
        num_v_heads                 HV
        head_k_dim, head_v_dim      K, V
        state_v_first               layout of the states
        device                      None: PyTorch's default device

    Returns: an Int16Pool, whose `bytes_per_slot` is the memory of a slot in one layer.
    Raises: TypeError, ValueError for sizes out of range.
    A ring of R states per slot is `allocate_int16_pool(slots, R, ...)`.
    """
    check_pool_sizes(lead, num_v_heads=num_v_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim)
    if not lead:
        raise TypeError("allocate_int16_pool: expected slots, or layers and slots, got nothing")
    HV, last = num_v_heads, (head_v_dim, head_k_dim) if state_v_first else (head_k_dim, head_v_dim)
    return Int16Pool(
        torch.zeros(*lead, HV, *last, dtype=torch.int16, device=device),
        torch.zeros(*lead, HV, head_v_dim, dtype=torch.float32, device=device),
    )


def tensors_of(state: Any) -> tuple[Any, Tensor | None]:
    """Return the states of a pool and the scales of their columns; None for the scales of floats."""
    return (state.state, state.column_scale) if isinstance(state, Int16Pool) else (state, None)


def read_slots(held: Tensor | ColumnStates, index: Index, state_v_first: bool, dtype: torch.dtype) -> Tensor:
    """Return the states of some slots of a pool of one layer in a float dtype; zeros for an invalid slot."""
    _check_slots(held, index, state_v_first)
    if dtype not in check.FLOATS:
        raise TypeError(f"dtype: expected one of {', '.join(map(str, check.FLOATS))}, got {dtype}")
    index, (slots, *sizes) = index.long(), held.shape
    if slots == 0:
        return torch.zeros(*index.shape, *sizes, dtype=dtype, device=index.device)
    is_slot = (index >= 0) & (index < slots)
    states = read_states(held[index.clamp(0, slots - 1)], dtype)
    return states.masked_fill_(~is_slot[:, None, None, None], 0)


def write_slots(held: Tensor | ColumnStates, index: Index, states: Tensor, state_v_first: bool) -> None:
    """Store `states` of any float in some slots of a pool of one layer, rounded; skip invalid slots."""
    _check_slots(held, index, state_v_first)
    check.floating("states", states)
    axes = "n HV V K" if state_v_first else "n HV K V"
    sizes = (*index.shape, *held.shape[1:])
    check.shape("states", states, axes, dict(zip(axes.split(), sizes, strict=True)))
    check.no_gradient("write", states=states)
    for name, x in zip(("state", "column_scale", "remainder"), _tensors_of(held), strict=False):
        check.writable(name, x)
    index, slots = index.long(), held.shape[0]
    if len(index) == 0 or slots == 0:
        return
    is_slot = (index >= 0) & (index < slots)
    # a skipped row repeats the write of another one: the host would wait for a device to select rows
    index, row = repeat_valid(
        is_slot, index.clamp(0, slots - 1), torch.arange(len(index), device=index.device)
    )
    # an index makes copies, which are written back
    old, new = held[index], held[index]
    # 16-bit arithmetic has too few bits for the integers
    new.copy_(states[row].to(torch.promote_types(states.dtype, torch.float32)))
    is_any = is_slot.any()
    for x, before, after in zip(_tensors_of(held), _tensors_of(old), _tensors_of(new), strict=True):
        x[index] = torch.where(is_any, after, before)


def _tensors_of(held: Tensor | ColumnStates) -> list[Tensor]:
    """Return the tensors that hold some states."""
    if isinstance(held, Tensor):
        return [held]
    return [x for x in (held.state, held.column_scale, held.remainder) if x is not None]


def _check_slots(held: Tensor | ColumnStates, index: Any, state_v_first: bool) -> None:
    """Check the tensors of a pool of one layer, and slots of it."""
    dims: dict[str, int] = {}
    state = held if isinstance(held, Tensor) else held.state
    check.tensor("state", state)
    check.shape("state", state, "slots HV V K" if state_v_first else "slots HV K V", dims)
    if not isinstance(held, Tensor):
        check.shape("column_scale", held.column_scale, "slots HV V", dims)
    check.integral("index", index)
    check.shape("index", index, "n", dims)
