"""Check the calls of speculation by replay: verify a packet on a state and its history; commit tokens.

The fields have the names of the arguments of `gdn.ops.replay`, where they are documented.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from gdn.notation import Index, Offsets, Pool
from gdn.problem import addressing, check
from gdn.problem.declaration import WRITTEN, Declared, declared
from gdn.problem.rule import host_offsets
from gdn.problem.serving import Gates, Numerics, OnPool, Packet, PoolTokens, Rows


@dataclass(frozen=True)
class History:
    """Declare the updates of each slot's accepted tokens, and the number of them.

    history_G holds the sums of g for a decay per head, and g itself for one per key channel: K sums in fp64
    would be too many bytes, and sums in fp32 too coarse after a reset.
    """

    history_u: Annotated[Tensor, WRITTEN]
    history_k: Annotated[Tensor, WRITTEN]
    history_G: Annotated[Tensor, WRITTEN]
    cursor: Tensor


class OnHistory(OnPool):
    """Provide the places of a history, and the tokens of the rows of a call on it."""

    history_G: Tensor
    cu_seqlens: Offsets | None
    max_seqlen: int | None

    @property
    def places(self) -> int:
        """Return the number of tokens that the history of a slot can hold."""
        return self.history_G.shape[1]

    @property
    def longest(self) -> int:
        """Return a bound of the number of tokens in a row."""
        if self.cu_seqlens is None:
            return self.q.shape[1]
        if self.max_seqlen is not None:
            return self.max_seqlen
        # max_seqlen is required for offsets on a device, so these are on the CPU
        return max((count for _, count in self.token_ranges(read_device=False) or ()), default=0)

    def token_ranges(self, *, read_device: bool) -> list[tuple[int, int]] | None:
        """Return (first token, number of tokens) of every row, tokens numbered through the batch.

        Returns None if the offsets are on a device and read_device is False.
        """
        if self.cu_seqlens is None:
            T = self.q.shape[1]
            return [(row * T, T) for row in range(self.q.shape[0])]
        offsets = host_offsets(self.cu_seqlens, None, self.q.shape[1], read_device=read_device)
        return None if offsets is None else addressing.token_ranges(offsets, self.max_seqlen)


@declared
@dataclass(frozen=True)
class ReplayProblem(Declared, Numerics, Packet, Rows, Gates, History, PoolTokens, OnHistory):
    """Hold one checked packet per row."""

    state: Pool  # only read, unlike that of PoolTokens, whose place among the arguments it keeps
    null_slot: int | None
    backend: str | None


@declared
@dataclass(frozen=True)
class KeepProblem(Declared):
    """Hold one checked commit after verification, for all layers."""

    state: Annotated[Tensor, WRITTEN]
    history_u: Tensor
    history_k: Tensor
    history_G: Tensor
    cursor: Annotated[Tensor, WRITTEN]
    index: Index
    accepted: Index
    room: int
    update_cursor: bool
    state_v_first: bool
    null_slot: int | None
    backend: str | None

    @property
    def K(self) -> int:
        return self.history_k.shape[4]

    @property
    def V(self) -> int:
        return self.history_u.shape[4]

    @property
    def places(self) -> int:
        return self.history_G.shape[2]

    @property
    def is_per_channel(self) -> bool:
        """Return True if the history is of decays per key channel, False if it is of sums per head."""
        return self.history_G.dim() == 5

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all computation: fp32, or fp64 for pools in fp64."""
        return torch.float64 if self.state.dtype == torch.float64 else torch.float32


def parse_replay(**given: Any) -> ReplayProblem:
    """Check a call of `replay_decode` without reading tensor contents; allocate `out` if it is None."""
    p = ReplayProblem.draft(given)
    check.backend(p.backend)
    dims = addressing.tokens(p.q, p.k, p.v)
    addressing.gates(p, dims)
    addressing.packing(p.q, p.cu_seqlens, p.max_seqlen, dims)
    addressing.pool(p, False, dims)
    check_history(p, "", dims)
    check_history_dtypes(p)
    if dims.get("M") is not None and dims["M"] > dims["places"]:
        raise ValueError(
            f"history_G: expected room for {dims['M']} tokens on axis 1, got {list(p.history_G.shape)}"
        )
    addressing.one_slot_per_row(p.read_index, dims)
    addressing.out(p.q, p.v, p.out)
    addressing.devices("replay_decode", p.q, p)
    p.complete(out=addressing.output(p.v, p.out), scale=addressing.scale(p.scale, dims))
    return p


def parse_keep(**given: Any) -> KeepProblem:
    """Check a call of `replay_commit` without reading tensor contents."""
    p = KeepProblem.draft(given)
    check.backend(p.backend)
    dims: dict[str, int] = {}
    check.floating("state", p.state)
    check.shape("state", p.state, "layers slots HV V K" if p.state_v_first else "layers slots HV K V", dims)
    check.writable("state", p.state)
    addressing.null(p.null_slot)
    check_history(p, "layers ", dims)
    check_history_heads(p, dims)
    addressing.index("index", p.index, "n", dims)
    addressing.index("accepted", p.accepted, "n", dims)
    if isinstance(p.room, bool) or not isinstance(p.room, int):
        raise TypeError(f"room: expected an int, got {type(p.room).__name__}")
    if not 1 <= p.room <= dims["places"]:
        raise ValueError(f"room: expected 1 to {dims['places']} (the places of a history), got {p.room}")
    histories = {
        "history_u": p.history_u, "history_k": p.history_k, "history_G": p.history_G, "cursor": p.cursor,
    }  # fmt: skip
    check.companions(p.state, "state", index=p.index, accepted=p.accepted, **histories)
    check.no_gradient("replay_commit", state=p.state, **histories)
    return p


def check_history_heads(p: Any, dims: dict[str, int]) -> None:
    """Raise ValueError unless the key heads of a history divide the value heads."""
    if dims["H"] < 1 or dims["HV"] < dims["H"] or dims["HV"] % dims["H"]:
        raise ValueError(f"history_k: expected H to divide HV={dims['HV']}, got {list(p.history_k.shape)}")


def check_history_dtypes(p: Any) -> None:
    """Raise ValueError for a history in fp64 beside tokens in another dtype."""
    for name, x in (("history_u", p.history_u), ("history_k", p.history_k)):
        if x.dtype == torch.float64 and p.q.dtype != torch.float64:
            raise ValueError(f"{name}: expected at most float32 with q in {p.q.dtype}, got {x.dtype}")


def check_history(p: Any, lead: str, dims: dict[str, int], cursor_axes: str = "slots") -> None:
    """Check the history of each slot and the cursor, which says what places are in use."""
    u, k, G, cursor = p.history_u, p.history_k, p.history_G, p.cursor
    for name, x in (("history_u", u), ("history_k", k)):
        check.floating(name, x)
    check.floating("history_G", G)
    if G.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"history_G: expected dtype float64 or float32, got {G.dtype}")
    check.shape("history_u", u, f"{lead}slots places HV V", dims)
    check.shape("history_k", k, f"{lead}slots places H K", dims)
    axes = f"{lead}slots places HV"
    check.shape("history_G", G, f"{axes} K" if p.is_per_channel else axes, dims)
    for name, x in (("history_u", u), ("history_k", k), ("history_G", G)):
        if (x is not G or p.is_per_channel) and x.numel() and x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name}: expected a contiguous last axis, got strides {list(x.stride())}")
        check.writable(name, x)
    check.integral("cursor", cursor)
    check.shape("cursor", cursor, cursor_axes, dims)
    check.writable("cursor", cursor)
