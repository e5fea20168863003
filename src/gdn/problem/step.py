"""Check the decode step of a whole layer: convolution, gated delta rule and gated norm, one token per row.

The fields have the names of the arguments of `gdn.decode_step`, where they are documented.
"""

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from gdn.notation import ConvPool, ConvWeight, HeadParam, Index, Pool
from gdn.problem import addressing, check
from gdn.problem.layer import GATES, ConvUpdateProblem, NormProblem
from gdn.problem.serving import DecodeProblem, parse_packed


@dataclass(frozen=True)
class StepProblem:
    """Hold one checked decode step of a layer. `conv_state`, `state` and `out` are written."""

    mixed_qkv: Tensor
    conv_state: ConvPool
    conv_weight: ConvWeight
    conv_bias: Tensor | None
    a: Tensor
    b: Tensor
    A_log: HeadParam
    dt_bias: HeadParam | None
    state: Pool
    conv_index: Index | None
    read_index: Index | None
    write_index: Index | None
    z: Tensor | None
    norm_weight: Tensor | None
    out: Tensor
    num_k_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_activation: str | None
    norm_eps: float
    norm_activation: str | None
    scale: float
    use_qk_l2norm_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
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
    def W(self) -> int:
        return self.conv_weight.shape[1]

    @property
    def has_norm(self) -> bool:
        return self.z is not None or self.norm_weight is not None

    def arguments(self) -> tuple[Any, ...]:
        """Return the fields in order, the arguments of the torch operator."""
        return tuple([getattr(self, name) for name in _FIELDS])

    def conv(self, out: Tensor) -> ConvUpdateProblem:
        """Return the first stage: the convolution of mixed_qkv, written to `out` [B, D]."""
        return ConvUpdateProblem(
            self.mixed_qkv.unsqueeze(1), self.conv_state, self.conv_weight, self.conv_bias, self.conv_slots,
            None, None, out.unsqueeze(1), self.conv_activation, self.null_slot, self.backend,
        )  # fmt: skip

    def decode(self, mixed: Tensor, out: Tensor) -> DecodeProblem:
        """Return the second stage: the decode of `mixed`, the convolved tokens, to `out` [B, HV, V]."""
        keys = self.H * self.K
        q, k, v = mixed.unsqueeze(1).split([keys, keys, self.HV * self.V], 2)
        return DecodeProblem(
            q.unflatten(2, (self.H, self.K)), k.unflatten(2, (self.H, self.K)),
            v.unflatten(2, (self.HV, self.V)), self.state, None, None, self.a.unsqueeze(1),
            self.b.unsqueeze(1), self.A_log, self.dt_bias, None, self.read_index, None, None,
            self.write_index, None, None, None, out.unsqueeze(1), None, self.scale,
            self.use_qk_l2norm_in_kernel, self.allow_neg_eigval, self.state_v_first, "final", self.null_slot,
            False, True, self.backend,
        )  # fmt: skip

    def norm(self, o: Tensor) -> NormProblem:
        """Return the third stage, if there is one: the gated norm of o [B, HV, V]."""
        return NormProblem(o, self.z, self.norm_weight, self.norm_eps, self.norm_activation, self.backend)

    @property
    def conv_slots(self) -> Index | None:
        """Return the slot of the convolution window of each row; None: the row's number."""
        return self.read_index if self.conv_index is None else self.conv_index


_FIELDS = tuple(f.name for f in fields(StepProblem))


def parse_step(
    mixed_qkv: Any, conv_state: Any, conv_weight: Any, conv_bias: Any, a: Any, b: Any, A_log: Any,
    dt_bias: Any, state: Any, *, num_k_heads: Any, head_k_dim: Any, head_v_dim: Any, conv_activation: Any,
    z: Any, norm_weight: Any, norm_eps: Any, norm_activation: Any, scale: Any, use_qk_l2norm_in_kernel: Any,
    allow_neg_eigval: Any, state_v_first: Any, conv_index: Any, read_index: Any, write_index: Any,
    null_slot: Any, out: Any, backend: Any,
) -> StepProblem:  # fmt: skip
    """Check a call of `decode_step` without reading tensor contents; allocate `out` if it is None."""
    use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first = check.flags(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )  # fmt: skip
    check.backend(backend)
    check.choice("conv_activation", conv_activation, GATES[:2])
    check.choice("norm_activation", norm_activation, GATES)
    check.number("norm_eps", norm_eps)
    q, k, v, raw_a, raw_b, o = parse_packed(
        mixed_qkv, a, b, num_k_heads, head_k_dim, head_v_dim, out, is_dense=True
    )
    dims = addressing.tokens(q, k, v)
    addressing.gates(None, None, raw_a, raw_b, A_log, dt_bias, allow_neg_eigval, dims)
    addressing.packing(q, None, None, dims)
    addressing.pool("state", q, state, False, state_v_first, null_slot, dims)
    for name, index in (
        ("conv_index", conv_index), ("read_index", read_index), ("write_index", write_index)
    ):  # fmt: skip
        if index is not None:
            addressing.index(name, index, "N", dims)
    _convolution(conv_state, conv_weight, conv_bias, mixed_qkv.shape[1])
    if read_index is None:
        check.enough_slots("state", dims["slots"], dims["N"], "read_index")
        if conv_index is None:
            check.enough_slots("conv_state", conv_state.shape[0], dims["N"], "conv_index")
    _norm(z, norm_weight, v.shape)
    addressing.out(q, v, o)
    addressing.places(
        "decode_step", q, mixed_qkv=mixed_qkv, conv_state=conv_state, conv_weight=conv_weight,
        conv_bias=conv_bias, a=a, b=b, A_log=A_log, dt_bias=dt_bias, state=state, conv_index=conv_index,
        read_index=read_index, write_index=write_index, z=z, norm_weight=norm_weight, out=out,
    )  # fmt: skip
    return StepProblem(
        mixed_qkv, conv_state, conv_weight, conv_bias, a, b, A_log, dt_bias, state, conv_index, read_index,
        write_index, z, norm_weight, v.new_empty(*a.shape, v.shape[3]) if out is None else out, num_k_heads,
        head_k_dim, head_v_dim, conv_activation, float(norm_eps), norm_activation,
        addressing.scale(scale, dims), use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, null_slot,
        backend,
    )  # fmt: skip


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
