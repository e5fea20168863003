"""Check the decode step of a whole layer: convolution, gated delta rule and gated norm, one token per row.

The fields have the names of the arguments of `gdn.decode_step`, where they are documented.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from gdn.notation import ConvPool, ConvWeight, GateBias, HeadParam, Index, Pool
from gdn.problem import addressing, check
from gdn.problem.declaration import WRITTEN, Declared, SymInt, declared
from gdn.problem.history import HistoryProblem, check_ring, check_use_history
from gdn.problem.layer import GATES, ConvUpdateProblem, NormProblem
from gdn.problem.replay import check_history_dtypes
from gdn.problem.serving import DecodeProblem, Numerics, check_packed, packed_views


@dataclass(frozen=True)
class Layer:
    """Declare the tensors of a layer's decode step, and the sizes and activations of its parts."""

    mixed_qkv: Tensor
    conv_state: Annotated[ConvPool, WRITTEN]
    conv_weight: ConvWeight
    conv_bias: Tensor | None
    a: Tensor
    b: Tensor
    A_log: HeadParam | None
    dt_bias: GateBias | None
    state: Annotated[Pool, WRITTEN]
    column_scale: Annotated[Tensor | None, WRITTEN]
    remainder: Annotated[Tensor | None, WRITTEN]
    conv_index: Index | None
    read_index: Index | None
    write_index: Index | None
    z: Tensor | None
    norm_weight: Tensor | None
    history_u: Annotated[Tensor | None, WRITTEN]
    history_k: Annotated[Tensor | None, WRITTEN]
    history_G: Annotated[Tensor | None, WRITTEN]
    cursor: Annotated[Tensor | None, WRITTEN]
    out: Annotated[Tensor, WRITTEN]
    num_k_heads: SymInt
    head_k_dim: SymInt
    head_v_dim: SymInt
    conv_activation: str | None
    norm_eps: float
    norm_activation: str | None


@declared
@dataclass(frozen=True)
class StepProblem(Declared, Numerics, Layer):
    """Hold one checked decode step of a layer, on a pool of states or of states with histories."""

    room: int | None
    use_history: bool | None
    null_slot: int | None
    backend: str | None

    @property
    def x(self) -> Tensor:
        """Return mixed_qkv, the tensor with the device and dtype of the problem."""
        return self.mixed_qkv

    @property
    def K(self) -> int:
        return self.head_k_dim

    @property
    def V(self) -> int:
        return self.head_v_dim

    @property
    def H(self) -> int:
        return self.num_k_heads

    @property
    def HV(self) -> int:
        return self.a.shape[1]

    @property
    def is_per_channel(self) -> bool:
        """Return True if a is of each key channel [B, HV, K], False if it is of a head."""
        return self.a.dim() == 3

    @property
    def W(self) -> int:
        return self.conv_weight.shape[1]

    @property
    def has_norm(self) -> bool:
        return self.z is not None or self.norm_weight is not None

    def conv(self, out: Tensor) -> ConvUpdateProblem:
        """Return the first stage: the convolution of mixed_qkv, written to `out` [B, D]."""
        return ConvUpdateProblem(
            x=self.mixed_qkv.unsqueeze(1), state=self.conv_state, weight=self.conv_weight,
            bias=self.conv_bias, state_index=self.conv_slots, ring_pos=None, num_accepted=None,
            out=out.unsqueeze(1), activation=self.conv_activation, null_slot=self.null_slot,
            backend=self.backend,
        )  # fmt: skip

    def decode(self, mixed: Tensor, out: Tensor | None) -> DecodeProblem:
        """Return the second stage: the decode of `mixed`, the convolved tokens, to `out` [B, HV, V]."""
        # named one by one: Dynamo of PyTorch 2.11 breaks its graph at `vars` of a frozen dataclass
        given = {
            "mixed_qkv": mixed, "a": self.a, "b": self.b, "out": out,
            "num_k_heads": self.H, "head_k_dim": self.K, "head_v_dim": self.V,
        }  # fmt: skip
        views = packed_views(given, is_dense=True)
        return DecodeProblem(
            **views, state=self.state, g=None, beta=None, A_log=self.A_log, dt_bias=self.dt_bias,
            column_scale=self.column_scale, cu_seqlens=None, read_index=self.read_index, num_accepted=None,
            ring_pos=None, write_index=self.write_index, intermediate=None, intermediate_row=None,
            parent=None, max_seqlen=None, scale=self.scale, lower_bound=self.lower_bound,
            use_qk_l2norm_in_kernel=self.use_qk_l2norm_in_kernel,
            allow_neg_eigval=self.allow_neg_eigval, state_v_first=self.state_v_first, write="final",
            null_slot=self.null_slot, round_state=False, exact_packet=True, backend=self.backend,
        )  # fmt: skip

    @property
    def has_history(self) -> bool:
        """Return True if the slots have histories."""
        return self.cursor is not None

    def with_history(self, mixed: Tensor, out: Tensor | None) -> HistoryProblem:
        """Return the second stage for slots with histories: `decode_with_history` of one token per row."""
        p = self.decode(mixed, out)
        assert self.history_u is not None and self.history_k is not None and self.room is not None
        assert self.history_G is not None and self.cursor is not None
        return HistoryProblem(
            q=p.q, k=p.k, v=p.v, state=p.state, history_u=self.history_u, history_k=self.history_k,
            history_G=self.history_G, cursor=self.cursor, g=None, beta=None, a=p.a, b=p.b, A_log=p.A_log,
            dt_bias=p.dt_bias, column_scale=p.column_scale, remainder=self.remainder, cu_seqlens=None,
            read_index=p.read_index, num_accepted=None, out=p.out, max_seqlen=None, scale=p.scale,
            lower_bound=p.lower_bound, use_qk_l2norm_in_kernel=p.use_qk_l2norm_in_kernel,
            allow_neg_eigval=p.allow_neg_eigval,
            state_v_first=p.state_v_first, room=self.room, use_history=self.use_history,
            null_slot=self.null_slot, backend=self.backend,
        )  # fmt: skip

    def norm(self, o: Tensor) -> NormProblem:
        """Return the third stage, if there is one: the gated norm of o [B, HV, V]."""
        return NormProblem(o, self.z, self.norm_weight, self.norm_eps, self.norm_activation, self.backend)

    @property
    def conv_slots(self) -> Index | None:
        """Return the slot of the convolution window of each row; None: the row's number."""
        return self.read_index if self.conv_index is None else self.conv_index


def parse_step(**given: Any) -> StepProblem:
    """Check a call of `decode_step` without reading tensor contents; allocate `out` if it is None."""
    p = StepProblem.draft(given)
    check.backend(p.backend)
    check.choice("conv_activation", p.conv_activation, GATES[:2])
    check.choice("norm_activation", p.norm_activation, GATES)
    check.eps("norm_eps", p.norm_eps)
    check_packed(given)
    views = p.decode(p.mixed_qkv, p.out)
    dims = addressing.tokens(views.q, views.k, views.v)
    addressing.gates(views, dims)
    addressing.packing(views.q, None, None, dims)
    addressing.pool(views, False, dims, p.has_history)
    for name in ("conv_index", "read_index", "write_index"):
        if getattr(p, name) is not None:
            addressing.index(name, getattr(p, name), "N", dims)
    _history(p, dims)
    _convolution(p.conv_state, p.conv_weight, p.conv_bias, p.mixed_qkv.shape[1])
    if p.read_index is None:
        check.enough_slots("state", dims["slots"], dims["N"], "read_index")
        if p.conv_index is None:
            check.enough_slots("conv_state", p.conv_state.shape[0], dims["N"], "conv_index")
    _norm(p.z, p.norm_weight, views.v.shape)
    addressing.out(views.q, views.v, views.out)
    addressing.devices("decode_step", p.mixed_qkv, p, "mixed_qkv")
    out = views.v.new_empty(*p.b.shape, views.v.shape[3]) if p.out is None else p.out
    p.complete(out=out, scale=addressing.scale(p.scale, dims), norm_eps=float(p.norm_eps))
    return p


def _history(p: StepProblem, dims: dict[str, int]) -> None:
    """Check the histories of the slots, if there are any."""
    check_use_history(p.use_history, p.state)
    if not p.has_history:
        if p.use_history is not None:
            raise ValueError(f"use_history: expected None without a HistoryPool, got {p.use_history}")
        return
    if p.write_index is not None:
        raise ValueError("write_index: expected None with a HistoryPool, got a tensor")
    rule = p.with_history(p.mixed_qkv, p.out)
    check_ring(rule, dims)
    check_history_dtypes(rule)


def _convolution(state: Any, weight: Any, bias: Any, channels: int) -> None:
    dims = {"D": channels}
    check.floating("conv_weight", weight)
    check.shape("conv_weight", weight, "D W", dims)
    if dims["W"] < 1:
        raise ValueError(f"conv_weight: expected W >= 1, got {list(weight.shape)}")
    if bias is not None:
        check.floating("conv_bias", bias)
        check.shape("conv_bias", bias, "D", dims)
    check.floating("conv_state", state)
    check.shape("conv_state", state, "slots D L", dims)
    if dims["L"] < dims["W"] - 1:
        raise ValueError(f"conv_state: expected L >= W-1 = {dims['W'] - 1} columns, got L={dims['L']}")
    check.writable("conv_state", state)


def _norm(z: Any, weight: Any, shape: Any) -> None:
    """Check z and norm_weight against the shape of v, [B, 1, HV, V]."""
    dims = {"B": shape[0], "HV": shape[2], "V": shape[3]}
    if z is not None:
        check.floating("z", z)
        check.shape("z", z, "B HV V", dims)
    if weight is not None:
        check.floating("norm_weight", weight)
        check.shape("norm_weight", weight, "V", dims)
