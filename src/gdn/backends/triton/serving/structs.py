"""Group what the kernels of this folder pass to their device functions.

Kernels have flat parameter lists: they are the interface of the host and of torch.compile. A kernel's first
lines put its parameters into the structs below. They exist while Triton traces only: the machine code is the
same as with flat parameters.

A NamedTuple holds pointers, strides and other values of registers; None where a tensor is absent. Triton
turns a Python number in a NamedTuple that is assigned to a variable into a tensor, so constants are kept
apart, in a `Constants` object that `group_constants` returns.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.runtime.jit import ConstexprFunction


class Slots(NamedTuple):
    """Say which slot of the pool a row reads."""

    read_index_ptr: Any  # None: row n reads slot n
    num_accepted_ptr: Any  # None, or which column of the read index holds the slot
    ring_pos_ptr: Any  # None, or the entry of the slot's ring
    row_stride: Any
    column_stride: Any
    accepted_stride: Any
    ring_stride: Any
    columns: Any
    entries: Any


class Accepted(NamedTuple):
    """Say which states a commit copies, and to which slots; a second slot of each entry is optional."""

    slot_ptr: Any
    row_ptr: Any
    step_ptr: Any
    extra_slot_ptr: Any  # None: one slot for each entry
    extra_step_ptr: Any
    slot_stride: Any
    row_stride: Any
    step_stride: Any
    extra_slot_stride: Any
    extra_step_stride: Any
    n: Any


class Gates(NamedTuple):
    """Hold the gates' pointers: g and beta, or the raw logits a and b with A_log and dt_bias."""

    g_ptr: Any
    beta_ptr: Any
    a_ptr: Any
    b_ptr: Any
    A_log_ptr: Any
    dt_bias_ptr: Any


class GateStrides(NamedTuple):
    """Hold the gates' strides of row, token and head, in elements."""

    g_b: Any
    g_t: Any
    g_h: Any
    beta_b: Any
    beta_t: Any
    beta_h: Any
    A_log_h: Any
    dt_bias_h: Any


class GateParameters(NamedTuple):
    """Hold the parameters of the gate of raw logits, in registers."""

    rate: Any  # exp(A_log)
    bias: Any
    lower_bound: Any  # None: the softplus form


class ChannelGates(NamedTuple):
    """Hold the gates of a row and head with a decay per key channel; g_t, g_b and g_h are in UNITs."""

    given: Any  # Gates
    strides: Any  # GateStrides
    n: Any
    first: Any
    head: Any
    g_k: Any  # strides of channels, None where they are contiguous
    bias_k: Any
    rate: Any  # exp(A_log)
    lower_bound: Any  # None: the softplus form


class Packet(NamedTuple):
    """Say where q and k of a row and head begin in HBM, how many tokens there are, and their strides."""

    q_ptr: Any
    k_ptr: Any
    count: Any  # tokens that the program computes
    total: Any  # tokens of the row: more than `count` if it is longer than `max_seqlen` allows
    q_t: Any
    k_t: Any
    q_k: Any
    k_k: Any


class Strip(NamedTuple):
    """Say where some value columns of a state, or of a token's row, begin, and how they are strided.

    `vs` are the columns counted from the strip's first, `left` is how many exist from there on.
    """

    ptr: Any
    vs: Any
    left: Any
    inner: Any  # stride of the keys of a state, or of tokens
    outer: Any  # stride of the columns


class History(NamedTuple):
    """Say where the history of a slot begins in HBM, how many places are used, and the strides of places."""

    u_ptr: Any
    k_ptr: Any
    G_ptr: Any
    count: Any
    u_p: Any
    k_p: Any
    G_p: Any
    first: Any  # of a ring: the place of the first token, and the number of places; else None
    places: Any


class Sums(NamedTuple):
    """Hold sums of g, split into hi + lo, up to the rows of a packet, or up to the end of a history."""

    high: Any
    low: Any


class RowSums(NamedTuple):
    """Hold sums of g in fp64: over a packet up to each of its rows, and over the history before it."""

    packet: Any
    past: Any


class Appended(NamedTuple):
    """Say to which places of the history a packet's rows go, and which rows go there."""

    places: Any
    is_kept: Any


class HeadStates(NamedTuple):
    """Say where the states of a head begin in a pool, and the scales of their columns, with their strides."""

    ptr: Any
    slot_stride: Any
    entry_stride: Any  # of a ring
    key_stride: Any
    column_stride: Any
    scale_ptr: Any  # None for a pool of floats
    scale_slot: Any
    scale_entry: Any
    scale_column: Any


class ColumnScales(NamedTuple):
    """Say where the scales of a head's columns begin, and the remainders of int8, with their strides."""

    ptr: Any  # None for a pool of floats
    column: Any
    low_ptr: Any  # None without a remainder
    low_pair: Any  # of two keys, in a byte
    low_column: Any


class Remainders(NamedTuple):
    """Say where the 4-bit remainders of a pool in int8 begin, with their strides."""

    ptr: Any
    slot_stride: Any
    entry_stride: Any  # heads, where a ring has its entries
    pair_stride: Any  # of two keys, in a byte
    column_stride: Any


class TileColumns(NamedTuple):
    """Say which keys and value columns of a state a program has in registers, and which of them exist."""

    ks: Any
    vs: Any
    in_state: Any
    has_value: Any


class Tokens(NamedTuple):
    """Say where the tensors of a row and head begin in HBM, and their token strides (q_t, k_t in UNITs)."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    g_ptr: Any  # None: no decay
    beta_ptr: Any  # None: 1
    q_t: Any
    k_t: Any
    v_t: Any
    g_t: Any
    beta_t: Any
    has_channel: Any  # of a decay per key channel


class Token(NamedTuple):
    """Hold one token in registers, as it was loaded."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any


class Constants:
    """Hold constants of a kernel by name, each a tl.constexpr."""

    def __init__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, tl.constexpr(value))

    def __repr__(self) -> str:
        # Triton names the instances of a device function by the text of its constants
        return "_".join(f"{name}{x.value}" for name, x in vars(self).items())

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


STRUCTS = (
    Slots, Accepted, Gates, GateStrides, GateParameters, ChannelGates, Packet, Strip, History, Sums, RowSums,
    Appended, HeadStates, ColumnScales, Remainders, TileColumns, Tokens, Token,
)  # fmt: skip
# a constant that `group_constants` reads, because Triton's cache key of a kernel has no fields of structs:
# with two fields swapped, the stale binary would be found in the cache on disk
FIELDS = tl.constexpr(str([(x.__name__, x._fields) for x in STRUCTS]))


class StructsFunction(ConstexprFunction):
    """Bring the structs along where Inductor copies the source of a kernel into a file of its own.

    It copies the device functions and constexpr functions that a kernel calls, but no classes.
    """

    @property
    def src(self) -> str:
        """Return the function's source, and the import of all structs."""
        names = ", ".join(x.__name__ for x in (*STRUCTS, Constants))
        return f"{self._src}\nfrom {__name__} import {names}\n"


@StructsFunction
def group_constants(**values):
    """Return the constants as one object: C.K, C.V and so on are constants in any device function."""
    return Constants(values) if FIELDS else None
