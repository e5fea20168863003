"""Check the calls of decoding with a history: run tokens on a state and its history; fold a history.

The fields have the names of the arguments of `gdn.ops.history`, where they are documented. The history of a
slot is a ring of places, so that a fold never waits for what reads the places that new tokens take.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from gdn.notation import Index, Pool
from gdn.problem import addressing, check
from gdn.problem.declaration import WRITTEN, Declared, declared
from gdn.problem.replay import (
    History,
    OnHistory,
    check_history,
    check_history_dtypes,
    check_history_heads,
)
from gdn.problem.serving import (
    ColumnScale,
    DecodeProblem,
    Gates,
    Numerics,
    Packet,
    PoolTokens,
    Remainder,
    Rows,
)

MAX_PLACES = 32  # of a history: two blocks of 16, whose scores fit into the registers of one warp
COLUMNS = 3  # of a cursor: the first place in use, the places in use, the programs of a kernel that are done


@dataclass(frozen=True)
class Accepted:
    """Declare how many tokens of the last packet of each row are kept."""

    num_accepted: Index | None


@declared
@dataclass(frozen=True)
class HistoryProblem(
    Declared, Numerics, Packet, Accepted, Rows, Remainder, ColumnScale, Gates, History, PoolTokens, OnHistory
):
    """Hold one checked step of decoding with a history; `cursor` is written, unlike that of `History`."""

    cursor: Annotated[Tensor, WRITTEN]
    room: int
    use_history: bool | None
    null_slot: int | None
    backend: str | None

    def token_ranges(self, *, read_device: bool) -> list[tuple[int, int]] | None:
        """Do as for any packet; raise ValueError for a row of more tokens than the pool has room for."""
        ranges = OnHistory.token_ranges(self, read_device=read_device)
        if self.cu_seqlens is not None:
            check_longest(max((count for _, count in ranges or ()), default=0), self.room)
        return ranges

    @property
    def must_append(self) -> bool:
        """Return True if the plain way does not exist: for drafts, and for int8, which only folds write."""
        return self.num_accepted is not None or self.state.dtype == torch.int8

    def fold(self) -> "FoldProblem":
        """Return the fold of the histories of this call's rows."""
        # without read_index row n has slot n: the slots past the rows keep their histories
        names = ("state", "history_u", "history_k", "history_G", "cursor", "column_scale", "remainder")
        held = {name: getattr(self, name) for name in names}
        if self.read_index is None:
            held = {name: None if x is None else x[: self.N] for name, x in held.items()}
        return FoldProblem(
            **held, index=self.read_index, num_accepted=None, room=self.room,
            state_v_first=self.state_v_first, null_slot=self.null_slot, backend=self.backend,
        )  # fmt: skip

    def decode(self) -> DecodeProblem:
        """Return the same tokens as a plain decode, which writes every state."""
        return DecodeProblem(
            q=self.q, k=self.k, v=self.v, state=self.state, g=self.g, beta=self.beta, a=self.a, b=self.b,
            A_log=self.A_log, dt_bias=self.dt_bias, column_scale=self.column_scale,
            cu_seqlens=self.cu_seqlens, read_index=self.read_index,
            num_accepted=None, ring_pos=None, write_index=None, intermediate=None, intermediate_row=None,
            parent=None, out=self.out, max_seqlen=self.max_seqlen, scale=self.scale,
            lower_bound=self.lower_bound, use_qk_l2norm_in_kernel=self.use_qk_l2norm_in_kernel,
            allow_neg_eigval=self.allow_neg_eigval, state_v_first=self.state_v_first, write="final",
            null_slot=self.null_slot, round_state=False, exact_packet=True, backend=self.backend,
        )  # fmt: skip


@declared
@dataclass(frozen=True)
class FoldProblem(Declared):
    """Hold one checked fold of the histories of some slots, or of all if `index` is None."""

    state: Annotated[Pool, WRITTEN]
    history_u: Tensor
    history_k: Tensor
    history_G: Tensor
    cursor: Annotated[Tensor, WRITTEN]
    column_scale: Annotated[Tensor | None, WRITTEN]
    remainder: Annotated[Tensor | None, WRITTEN]
    index: Index | None
    num_accepted: Index | None
    room: int
    state_v_first: bool
    null_slot: int | None
    backend: str | None

    @property
    def N(self) -> int:
        """Return the number of slots to fold."""
        return self.state.shape[0] if self.index is None else self.index.shape[0]

    @property
    def K(self) -> int:
        return self.history_k.shape[3]

    @property
    def V(self) -> int:
        return self.history_u.shape[3]

    @property
    def H(self) -> int:
        return self.history_k.shape[2]

    @property
    def HV(self) -> int:
        return self.history_u.shape[2]

    @property
    def places(self) -> int:
        return self.history_G.shape[1]

    @property
    def is_per_channel(self) -> bool:
        """Return True if the history is of decays per key channel, False if it is of sums per head."""
        return self.history_G.dim() == 4

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all computation: fp32, or fp64 for pools in fp64."""
        return torch.float64 if self.state.dtype == torch.float64 else torch.float32

    def is_slot(self, slot: int) -> bool:
        """Return True if `slot` is in the pool and is not the null slot."""
        return (0 if self.null_slot is None else 1) <= slot < self.state.shape[0]


def parse_history(**given: Any) -> HistoryProblem:
    """Check a call of `decode_with_history` without reading tensor contents; allocate `out` if it is None."""
    p = HistoryProblem.draft(given)
    check.backend(p.backend)
    check_use_history(p.use_history, p.state)
    if p.use_history is False and p.num_accepted is not None:
        raise ValueError("use_history: expected None or True with num_accepted, got False")
    dims = addressing.tokens(p.q, p.k, p.v)
    addressing.gates(p, dims)
    addressing.packing(p.q, p.cu_seqlens, p.max_seqlen, dims)
    addressing.pool(p, False, dims, has_history=True)
    check_ring(p, dims)
    check_history_dtypes(p)
    if dims.get("M") is not None:
        check_longest(dims["M"], p.room)
    addressing.one_slot_per_row(p.read_index, dims)
    if p.num_accepted is not None:
        addressing.index("num_accepted", p.num_accepted, "N", dims)
    addressing.out(p.q, p.v, p.out)
    addressing.devices("decode_with_history", p.q, p)
    p.complete(out=addressing.output(p.v, p.out), scale=addressing.scale(p.scale, dims))
    return p


def parse_fold(**given: Any) -> FoldProblem:
    """Check a call of `fold_history` without reading tensor contents."""
    p = FoldProblem.draft(given)
    check.backend(p.backend)
    dims: dict[str, int] = {}
    addressing.check_states(p.state, p.column_scale, has_history=True)
    check.shape("state", p.state, "slots HV V K" if p.state_v_first else "slots HV K V", dims)
    check.writable("state", p.state)
    if p.column_scale is not None:
        addressing.column_scale(p.column_scale, "slots HV V", dims)
    addressing.null(p.null_slot)
    check_ring(p, dims)
    check_history_heads(p, dims)
    addressing.index("index", p.index, "n", dims)
    if p.num_accepted is not None:
        addressing.index("num_accepted", p.num_accepted, "n", dims)
    tensors = {
        "history_u": p.history_u, "history_k": p.history_k, "history_G": p.history_G, "cursor": p.cursor,
        "column_scale": p.column_scale, "remainder": p.remainder,
    }  # fmt: skip
    check.companions(p.state, "state", index=p.index, num_accepted=p.num_accepted, **tensors)
    check.no_gradient("fold_history", state=p.state, **tensors)
    return p


def check_ring(p: Any, dims: dict[str, int]) -> None:
    """Check the history of each slot, its cursor, the room for a packet, and the remainder of int8."""
    check_history(p, "", dims, "slots columns")
    if p.remainder is not None:
        addressing.remainder(p.remainder, p.state, p.state_v_first, dims)
    places, columns = dims["places"], dims["columns"]
    if columns != COLUMNS or p.cursor.dtype != torch.int32 or p.cursor.stride(1) != 1:
        raise ValueError(
            f"cursor: expected [slots, {COLUMNS}] in int32 with a contiguous last axis, as HistoryPool "
            f"describes it, got {list(p.cursor.shape)} in {p.cursor.dtype}, strides {list(p.cursor.stride())}"
        )
    if not 2 <= places <= MAX_PLACES:
        raise ValueError(f"history_G: expected 2 to {MAX_PLACES} places, got {list(p.history_G.shape)}")
    check_room(p.room, places)


def check_sizes(lead: Any, decay: Any, places: Any, room: Any) -> None:
    """Check the sizes of a pool of histories before it is allocated."""
    if len(lead) not in (1, 2):
        raise TypeError(f"allocate_history_pool: expected slots, or layers and slots, got {list(lead)}")
    names = ("slots",) if len(lead) == 1 else ("layers", "slots")
    sizes = {**dict(zip(names, lead, strict=True)), "places": places, "room": room}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name}: expected an int, got {type(size).__name__}")
    check.choice("decay", decay, ("head", "channel"))
    if not 2 <= places <= MAX_PLACES:
        raise ValueError(f"places: expected 2 to {MAX_PLACES}, got {places}")
    check_room(room, places)


def check_pool_sizes(lead: Any, **sizes: Any) -> None:
    """Check the sizes of a pool before it is allocated: those of its first axes, heads and their sizes."""
    for name, size in [*((f"lead[{i}]", x) for i, x in enumerate(lead)), *sizes.items()]:
        least = 0 if name.startswith("lead") else 1
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name}: expected an int, got {type(size).__name__}")
        if size < least:
            raise ValueError(f"{name}: expected at least {least}, got {size}")
    H, HV = sizes.get("num_k_heads", 1), sizes["num_v_heads"]
    if HV % H:
        raise ValueError(f"num_v_heads: expected a multiple of num_k_heads={H}, got {HV}")


def check_pool_dtypes(state_dtype: Any, history_dtype: Any) -> None:
    """Check the dtypes of a pool of histories before it is allocated."""
    kinds = (
        ("state_dtype", state_dtype, (*check.FLOATS, torch.int16, torch.int8)),
        ("history_dtype", history_dtype, check.FLOATS),
    )
    for name, dtype, choices in kinds:
        if dtype not in choices:
            raise TypeError(f"{name}: expected one of {', '.join(map(str, choices))}, got {dtype}")


def check_use_history(use_history: Any, state: Any) -> None:
    """Check the caller's choice of the way; states in int8 have no plain one, which writes every token."""
    if use_history is not None and not isinstance(use_history, bool):
        raise TypeError(f"use_history: expected a bool or None, got {type(use_history).__name__}")
    if use_history is False and isinstance(state, Tensor) and state.dtype == torch.int8:
        raise ValueError("use_history: expected None or True with states in int8, got False")


def check_longest(tokens: int, room: int) -> None:
    """Raise ValueError if a row has more tokens than `room`."""
    if tokens > room:
        raise ValueError(f"room: expected at least {tokens}, the most tokens of a row, got {room}")


def check_room(room: Any, places: int) -> None:
    """Check the most tokens of a row: a full history is folded beside the places of the new tokens."""
    if isinstance(room, bool) or not isinstance(room, int):
        raise TypeError(f"room: expected an int, got {type(room).__name__}")
    if not 1 <= room <= places // 2:
        raise ValueError(f"room: expected 1 to {places // 2}, half of {places} places, got {room}")
