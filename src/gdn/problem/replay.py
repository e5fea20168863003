"""Check the calls of speculation by replay: verify a packet on a state and its history; commit tokens.

The fields have the names of the arguments of `gdn.ops.replay`, where they are documented.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from gdn.notation import HeadParam, Index, Keys, Offsets, PerHead, Pool, Q, Values
from gdn.problem import addressing, check
from gdn.problem.rule import host_offsets
from gdn.problem.serving import OnPool


@dataclass(frozen=True)
class ReplayProblem(OnPool):
    """Hold one checked packet per row. The history and `out` are written, `state` and `cursor` are not."""

    q: Q
    k: Keys
    v: Values
    state: Pool
    history_u: Tensor
    history_k: Tensor
    history_G: Tensor
    cursor: Tensor
    g: PerHead | None
    beta: PerHead | None
    a: PerHead | None
    b: PerHead | None
    A_log: HeadParam | None
    dt_bias: HeadParam | None
    cu_seqlens: Offsets | None
    read_index: Index | None
    out: Values
    max_seqlen: int | None
    scale: float
    use_qk_l2norm_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    null_slot: int | None
    backend: str | None

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
        return max((count for _, count in self.spans(read_device=False) or ()), default=0)

    def arguments(self) -> tuple[Any, ...]:
        """Return the fields in order, the arguments of the torch operator."""
        return tuple([getattr(self, name) for name in _REPLAY_FIELDS])

    def spans(self, *, read_device: bool) -> list[tuple[int, int]] | None:
        """Return (first token, number of tokens) of every row, tokens numbered through the batch.

        Returns None if the offsets are on a device and read_device is False.
        """
        if self.cu_seqlens is None:
            T = self.q.shape[1]
            return [(row * T, T) for row in range(self.q.shape[0])]
        offsets = host_offsets(self.cu_seqlens, None, self.q.shape[1], read_device=read_device)
        return None if offsets is None else addressing.spans(offsets, self.max_seqlen)


@dataclass(frozen=True)
class KeepProblem:
    """Hold one checked commit after verification, for all layers. `state` and `cursor` are written."""

    state: Tensor
    history_u: Tensor
    history_k: Tensor
    history_G: Tensor
    cursor: Tensor
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
    def dtype(self) -> torch.dtype:
        """Return the dtype of all computation: fp32, or fp64 for pools in fp64."""
        return torch.float64 if self.state.dtype == torch.float64 else torch.float32

    def arguments(self) -> tuple[Any, ...]:
        """Return the fields in order, the arguments of the torch operator."""
        return tuple([getattr(self, name) for name in _KEEP_FIELDS])


_REPLAY_FIELDS = tuple(f.name for f in fields(ReplayProblem))
_KEEP_FIELDS = tuple(f.name for f in fields(KeepProblem))


def parse_replay(
    q: Any, k: Any, v: Any, state: Any, history_u: Any, history_k: Any, history_G: Any, cursor: Any, *,
    g: Any, beta: Any, a: Any, b: Any, A_log: Any, dt_bias: Any, scale: Any, use_qk_l2norm_in_kernel: Any,
    allow_neg_eigval: Any, state_v_first: Any, cu_seqlens: Any, max_seqlen: Any, read_index: Any,
    null_slot: Any, out: Any, backend: Any,
) -> ReplayProblem:  # fmt: skip
    """Check a call of `replay_decode` without reading tensor contents; allocate `out` if it is None."""
    use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first = check.flags(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )  # fmt: skip
    check.backend(backend)
    dims = addressing.tokens(q, k, v)
    addressing.gates(g, beta, a, b, A_log, dt_bias, allow_neg_eigval, dims)
    addressing.packing(q, cu_seqlens, max_seqlen, dims)
    addressing.pool("state", q, state, False, state_v_first, null_slot, dims)
    _history(history_u, history_k, history_G, cursor, "", dims)
    for name, x in (("history_u", history_u), ("history_k", history_k)):
        if x.dtype == torch.float64 and q.dtype != torch.float64:
            raise ValueError(f"{name}: expected at most float32 with q in {q.dtype}, got {x.dtype}")
    if dims.get("M") is not None and dims["M"] > dims["places"]:
        raise ValueError(
            f"history_G: expected room for {dims['M']} tokens on axis 1, got {list(history_G.shape)}"
        )
    if read_index is None:
        check.enough_slots("state", dims["slots"], dims["N"], "read_index")
    else:
        addressing.index("read_index", read_index, "N", dims)
    addressing.out(q, v, out)
    addressing.places(
        "replay_decode", q, k=k, v=v, state=state, history_u=history_u, history_k=history_k,
        history_G=history_G, cursor=cursor, g=g, beta=beta, a=a, b=b, A_log=A_log, dt_bias=dt_bias,
        read_index=read_index, out=out,
    )  # fmt: skip
    return ReplayProblem(
        q, k, v, state, history_u, history_k, history_G, cursor, g, beta, a, b, A_log, dt_bias, cu_seqlens,
        read_index, v.new_empty(v.shape) if out is None else out, max_seqlen, addressing.scale(scale, dims),
        use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, null_slot, backend,
    )  # fmt: skip


def parse_keep(
    state: Any, history_u: Any, history_k: Any, history_G: Any, cursor: Any, index: Any, accepted: Any,
    room: Any, update_cursor: Any, state_v_first: Any, null_slot: Any, backend: Any,
) -> KeepProblem:  # fmt: skip
    """Check a call of `replay_commit` without reading tensor contents."""
    update_cursor, state_v_first = check.flags(update_cursor=update_cursor, state_v_first=state_v_first)
    check.backend(backend)
    dims: dict[str, int] = {}
    check.floating("state", state)
    check.shape("state", state, "layers slots HV V K" if state_v_first else "layers slots HV K V", dims)
    check.writable("state", state)
    addressing.null(null_slot)
    _history(history_u, history_k, history_G, cursor, "layers ", dims)
    if dims["H"] < 1 or dims["HV"] < dims["H"] or dims["HV"] % dims["H"]:
        raise ValueError(f"history_k: expected H to divide HV={dims['HV']}, got {list(history_k.shape)}")
    addressing.index("index", index, "n", dims)
    addressing.index("accepted", accepted, "n", dims)
    if isinstance(room, bool) or not isinstance(room, int):
        raise TypeError(f"room: expected an int, got {type(room).__name__}")
    if not 1 <= room <= dims["places"]:
        raise ValueError(f"room: expected 1 to {dims['places']} (the places of a history), got {room}")
    histories = {"history_u": history_u, "history_k": history_k, "history_G": history_G, "cursor": cursor}
    check.companions(state, "state", index=index, accepted=accepted, **histories)
    check.no_gradient("replay_commit", state=state, **histories)
    return KeepProblem(
        state, history_u, history_k, history_G, cursor, index, accepted, room, update_cursor, state_v_first,
        null_slot, backend,
    )  # fmt: skip


def _history(u: Any, k: Any, G: Any, cursor: Any, lead: str, dims: dict[str, int]) -> None:
    """Check the history of each slot and the cursor, the number of its places in use."""
    for name, x in (("history_u", u), ("history_k", k)):
        check.floating(name, x)
    check.floating("history_G", G)
    if G.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"history_G: expected dtype float64 or float32, got {G.dtype}")
    check.shape("history_u", u, f"{lead}slots places HV V", dims)
    check.shape("history_k", k, f"{lead}slots places H K", dims)
    check.shape("history_G", G, f"{lead}slots places HV", dims)
    for name, x in (("history_u", u), ("history_k", k), ("history_G", G)):
        if x is not G and x.numel() and x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name}: expected a contiguous last axis, got strides {list(x.stride())}")
        check.writable(name, x)
    check.integral("cursor", cursor)
    check.shape("cursor", cursor, "slots", dims)
    check.writable("cursor", cursor)
