"""Check the decodes of a serving engine: one decode step on its state pools.

The fields have the names of the arguments of `gdn.ops.serving`, where they are documented.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from gdn.notation import Decay, GateBias, HeadParam, Index, Keys, Offsets, PerHead, Pool, Q, Values
from gdn.problem import addressing, check
from gdn.problem.declaration import WRITTEN, Declared, SymInt, declared
from gdn.problem.rule import host_offsets
from gdn.problem.shapes import Shapes


@dataclass(frozen=True)
class PoolTokens:
    """Declare the tokens of a call and the pool of states that they continue."""

    q: Q
    k: Keys
    v: Values
    state: Annotated[Pool, WRITTEN]


@dataclass(frozen=True)
class Gates:
    """Declare the gates: g and beta, or the raw logits a and b with A_log, or all None."""

    g: Decay | None
    beta: PerHead | None
    a: Decay | None
    b: PerHead | None
    A_log: HeadParam | None
    dt_bias: GateBias | None


@dataclass(frozen=True)
class ColumnScale:
    """Declare the scales of a pool of integers, one for each column of V; None for a pool of floats."""

    column_scale: Annotated[Tensor | None, WRITTEN]


@dataclass(frozen=True)
class Remainder:
    """Declare the 4 bits that only folds read beside states in int8; None for a pool without them."""

    remainder: Annotated[Tensor | None, WRITTEN]


@dataclass(frozen=True)
class Rows:
    """Declare the rows of a call, dense or packed, and the slots that they read."""

    cu_seqlens: Offsets | None
    read_index: Tensor | None


@dataclass(frozen=True)
class Packet:
    """Declare the output of rows of a few tokens, and the bound of their number."""

    out: Annotated[Values, WRITTEN]
    max_seqlen: SymInt | None


@dataclass(frozen=True)
class Numerics:
    """Declare the options of the recurrence that every serving call has."""

    scale: float
    lower_bound: float | None
    use_qk_l2norm_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool


class OnPool(Shapes):
    """Provide the dtype, the slot test and the rank of the gate that decode, prefill and replay share."""

    state: Pool
    column_scale: Tensor | None = None  # where the fields of a problem have none, its states are floats
    remainder: Tensor | None = None  # likewise: none beside the states
    null_slot: int | None
    g: Decay | None
    a: Decay | None

    @property
    def is_per_channel(self) -> bool:
        """Return True if g or a is of each key channel, False if it is of a head."""
        given = self.a if self.g is None else self.g
        return given is not None and given.dim() == 4

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all computation: fp32, or fp64 for fp64 inputs."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def is_slot(self, slot: int) -> bool:
        """Return True if `slot` is in the pool and is not the null slot."""
        return (0 if self.null_slot is None else 1) <= slot < self.state.shape[0]


@dataclass(frozen=True)
class Addressing:
    """Declare where a decode reads and writes states beside the slots of `Rows`."""

    num_accepted: Index | None
    ring_pos: Index | None
    write_index: Tensor | None
    intermediate: Annotated[Tensor | None, WRITTEN]
    intermediate_row: Index | None
    parent: Tensor | None


@dataclass(frozen=True)
class DecodeOptions:
    """Declare the options of a decode."""

    write: str
    null_slot: int | None
    round_state: bool
    exact_packet: bool
    backend: str | None


@declared
@dataclass(frozen=True)
class DecodeProblem(
    Declared, DecodeOptions, Numerics, Packet, Addressing, Rows, ColumnScale, Gates, PoolTokens, OnPool
):
    """Hold one checked decode; dense [B, T, ...], or packed [1, total, ...] with cu_seqlens."""

    def token_ranges(self, *, read_device: bool) -> list[tuple[int, int]] | None:
        """Return (first token, number of tokens) of every row, tokens numbered through the batch.

        Returns None if the offsets are on a device and read_device is False. Raises ValueError for bad
        offsets, and for a row longer than max_seqlen or than axis 1 of a per-token tensor.
        """
        if self.cu_seqlens is None:
            T = self.q.shape[1]
            return [(row * T, T) for row in range(self.q.shape[0])]
        offsets = host_offsets(self.cu_seqlens, None, self.q.shape[1], read_device=read_device)
        if offsets is None:
            return None
        token_ranges = addressing.token_ranges(offsets, self.max_seqlen)
        longest = max((count for _, count in token_ranges), default=0)
        for name, x in (("intermediate", self.intermediate), ("parent", self.parent)):
            addressing.columns(name, x, longest)
        if self.write == "all":
            addressing.columns("write_index", self.write_index, longest)
        return token_ranges


@dataclass(frozen=True)
class PackedTokens:
    """Declare rows of q | k | v, the pool of states that they continue, and the raw logits of their gates."""

    mixed_qkv: Tensor
    state: Annotated[Pool, WRITTEN]
    a: Tensor
    b: Tensor
    A_log: HeadParam | None
    dt_bias: GateBias | None


@declared
@dataclass(frozen=True)
class PackedCall(Declared, DecodeOptions, Numerics, Packet, Addressing, Rows, ColumnScale, PackedTokens):
    """Declare the arguments of `decode_packed`; its problem is a DecodeProblem, on views of mixed_qkv."""

    num_k_heads: SymInt
    head_k_dim: SymInt
    head_v_dim: SymInt


def parse_decode(**given: Any) -> DecodeProblem:
    """Check a call of `decode` without reading tensor contents; allocate `out` if it is None."""
    p = DecodeProblem.draft(given)
    check.backend(p.backend)
    addressing.write(p.write, p.round_state, p.exact_packet)
    dims = addressing.tokens(p.q, p.k, p.v)
    addressing.gates(p, dims)
    addressing.packing(p.q, p.cu_seqlens, p.max_seqlen, dims)
    addressing.pool(p, p.ring_pos is not None, dims)
    addressing.reading(p.read_index, p.num_accepted, p.ring_pos, dims)
    addressing.writing(p.write, p.write_index, p.ring_pos, dims)
    addressing.intermediate(p.intermediate, p.intermediate_row, p.parent, p.state_v_first, dims)
    addressing.out(p.q, p.v, p.out)
    addressing.devices("decode", p.q, p)
    p.complete(out=addressing.output(p.v, p.out), scale=addressing.scale(p.scale, dims))
    return p


def check_one_state_per_row(problem: DecodeProblem) -> None:
    """Raise ValueError unless the pool has one state for each row."""
    if problem.state.shape[0] != problem.N:
        raise ValueError(
            f"state: expected one state for each of B={problem.N} rows, got {list(problem.state.shape)}"
        )


def parse_packed(
    *, mixed_qkv: Any, num_k_heads: Any, head_k_dim: Any, head_v_dim: Any, **given: Any
) -> DecodeProblem:
    """Check a call of `decode_packed` without reading tensor contents; allocate `out` if it is None."""
    sizes = {"num_k_heads": num_k_heads, "head_k_dim": head_k_dim, "head_v_dim": head_v_dim}
    packed = {"mixed_qkv": mixed_qkv, **sizes, **{name: given[name] for name in ("a", "b", "out")}}
    check_packed(packed)
    check.no_gradient("decode_packed", mixed_qkv=mixed_qkv)
    views = packed_views(packed, is_dense=given["cu_seqlens"] is None)
    return parse_decode(**{**given, **views, "g": None, "beta": None})


def check_packed(given: Mapping[str, Any]) -> None:
    """Check the tensors and sizes of `decode_packed` and `decode_step` that `packed_views` reads."""
    for name in ("num_k_heads", "head_k_dim", "head_v_dim"):
        size = given[name]
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
            raise TypeError(f"{name}: expected an int, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")
    H, K, V = given["num_k_heads"], given["head_k_dim"], given["head_v_dim"]
    mixed_qkv, out = given["mixed_qkv"], given["out"]
    check.floating("mixed_qkv", mixed_qkv)
    dims = {"K": K}
    check.shape("mixed_qkv", mixed_qkv, "tokens columns", dims)
    for name in ("a", "b"):
        check.floating(name, given[name])
    last = given["b"].shape[-1:]
    if last and dims["columns"] == 2 * H * K + last[0] * V:
        # two of three tensors have the same heads, so an error names the third
        dims["HV"] = last[0]
    check.decay("a", given["a"], "tokens HV", dims)
    check.shape("b", given["b"], "tokens HV", dims)
    if dims["columns"] != 2 * H * K + dims["HV"] * V:
        raise ValueError(
            f"mixed_qkv: expected 2 * {H} * {K} + {dims['HV']} * {V} = {2 * H * K + dims['HV'] * V} columns, "
            f"got {list(mixed_qkv.shape)}"
        )
    if out is not None:
        check.floating("out", out)
        check.shape("out", out, "tokens HV V", dims | {"V": V})


def packed_views(given: Mapping[str, Any], *, is_dense: bool) -> dict[str, Any]:
    """Return q, k, v, a, b and out (or None) of checked arguments, shaped for `decode`.

    With is_dense each token is a row of its own, otherwise all tokens are in one packed batch row.
    """
    H, K, V = given["num_k_heads"], given["head_k_dim"], given["head_v_dim"]
    a, b, out = given["a"], given["b"], given["out"]
    q, k, v = given["mixed_qkv"].split([H * K, H * K, a.shape[1] * V], 1)
    views = {
        "q": q.unflatten(1, (H, K)), "k": k.unflatten(1, (H, K)), "v": v.unflatten(1, (a.shape[1], V)),
        "a": a, "b": b, "out": out,
    }  # fmt: skip
    return {name: None if x is None else x.unsqueeze(1 if is_dense else 0) for name, x in views.items()}
