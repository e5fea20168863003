"""Check the calls around the rule in a layer: causal convolution, gated norm, arguments of the layer."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from gdn.notation import Channels, ConvPool, ConvState, ConvWeight, Index, Mask, Offsets
from gdn.problem import check
from gdn.problem.declaration import WRITTEN, Declared, declared
from gdn.problem.shapes import Sequences

GATES = (None, "silu", "sigmoid")  # activations of the gated norm


@declared
@dataclass(frozen=True)
class ConvProblem(Declared, Sequences):
    """Hold one checked causal convolution. `state` excludes `initial_state`; packed tokens have B = 1."""

    x: Channels
    weight: ConvWeight
    bias: Tensor | None
    initial_state: ConvState | None
    state: Annotated[ConvPool | None, WRITTEN]
    state_index: Index | None
    has_initial_state: Mask | None
    cu_seqlens: Offsets | None
    cu_seqlens_cpu: Offsets | None
    activation: str | None
    output_final_state: bool
    null_slot: int | None
    backend: str | None

    @property
    def B(self) -> int:
        return self.x.shape[0]

    @property
    def T(self) -> int:
        return self.x.shape[1]

    @property
    def W(self) -> int:
        """Return W, the taps of the convolution: the newest input and the W - 1 before it."""
        return self.weight.shape[1]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.N, self.x.shape[2], self.W - 1)


@declared
@dataclass(frozen=True)
class ConvUpdateProblem(Declared):
    """Hold one checked step of the convolution on a pool; x, out [B, T, D]."""

    x: Channels
    state: Annotated[ConvPool, WRITTEN]
    weight: ConvWeight
    bias: Tensor | None
    state_index: Index | None
    ring_pos: Index | None
    num_accepted: Index | None
    out: Annotated[Channels, WRITTEN]
    activation: str | None
    null_slot: int | None
    backend: str | None


@declared
@dataclass(frozen=True)
class NormProblem(Declared):
    """Hold one checked gated RMS norm: x and z [..., D], weight [D]."""

    x: Tensor
    z: Tensor | None
    weight: Tensor | None
    eps: float
    activation: str | None
    backend: str | None


def parse_conv(**given: Any) -> ConvProblem:
    """Check a call of `causal_conv1d` without reading tensor contents; raise like `gdn.problem.parse`."""
    p = ConvProblem.draft(given)
    check.backend(p.backend)
    check.choice("activation", p.activation, (None, "silu"))
    dims: dict[str, int] = {}
    _check_channels(p, "B T D", dims)
    x, cu_seqlens, cu_seqlens_cpu = p.x, p.cu_seqlens, p.cu_seqlens_cpu
    dims["N"] = dims["B"] if cu_seqlens is None else check.offsets("x", cu_seqlens, cu_seqlens_cpu, dims)
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu: expected None without cu_seqlens, got a tensor")
    if p.initial_state is not None:
        check.floating("initial_state", p.initial_state)
        check.shape("initial_state", p.initial_state, "N D W-1", dims | {"W-1": dims["W"] - 1})
    if p.state is None:
        for name in ("state_index", "has_initial_state", "null_slot"):
            value = getattr(p, name)
            if value is not None:
                raise ValueError(f"{name}: expected None without state, got {_kind(value)}")
    else:
        _check_conv_pool(p, dims)
    check.companions(
        x, "x", weight=p.weight, bias=p.bias, initial_state=p.initial_state, state=p.state,
        state_index=p.state_index, has_initial_state=p.has_initial_state,
    )  # fmt: skip
    if cu_seqlens is not None and cu_seqlens.device.type != "cpu":
        check.companions(x, "x", cu_seqlens=cu_seqlens)
    return p


def _check_conv_pool(p: ConvProblem, dims: dict[str, int]) -> None:
    if p.initial_state is not None:
        raise ValueError("initial_state: expected None with state (the pool holds it), got a tensor")
    if p.output_final_state:
        raise ValueError("output_final_state: expected False with state (the pool takes it), got True")
    _check_pool(p, dims, dims["W"] - 1, "W-1")
    _check_rows("state_index", p.state_index, "N", dims)
    if p.state_index is None:
        check.enough_slots("state", dims["slots"], dims["N"], "state_index")
    if p.has_initial_state is not None:
        check.tensor("has_initial_state", p.has_initial_state)
        if p.has_initial_state.dtype != torch.bool:
            raise TypeError(f"has_initial_state: expected a bool tensor, got {p.has_initial_state.dtype}")
        check.shape("has_initial_state", p.has_initial_state, "N", dims)
    check.no_gradient("causal_conv1d with state", x=p.x, weight=p.weight, bias=p.bias, state=p.state)


def parse_conv_update(**given: Any) -> ConvUpdateProblem:
    """Check a call of `causal_conv1d_update`, reading no tensor contents; allocate `out` if it is None."""
    p = ConvUpdateProblem.draft(given)
    check.backend(p.backend)
    check.choice("activation", p.activation, (None, "silu"))
    x, out = p.x, p.out
    check.tensor("x", x)
    dims: dict[str, int] = {}
    if x.dim() not in (2, 3):
        raise ValueError(f"x: expected shape [B, D] or [B, T, D], got {list(x.shape)}")
    axes = "B D" if x.dim() == 2 else "B T D"
    _check_channels(p, axes, dims)
    if p.ring_pos is not None and p.num_accepted is not None:
        raise ValueError("num_accepted: expected None with ring_pos, got a tensor")
    T = dims.get("T", 1)
    if p.num_accepted is not None:
        _check_pool(p, dims, dims["W"] - 1 + max(T - 1, 0), "W-1+T-1 with num_accepted")
    else:
        _check_pool(p, dims, dims["W"] - 1, "W-1")
    for name in ("state_index", "ring_pos", "num_accepted"):
        _check_rows(name, getattr(p, name), "B", dims)
    if p.state_index is None:
        check.enough_slots("state", dims["slots"], dims["B"], "state_index")
    if out is not None:
        check.floating("out", out)
        check.writable("out", out)
        check.shape("out", out, axes, dims)
        check.same_dtype(x, "x", out=out)
    check.companions(
        x, "x", state=p.state, weight=p.weight, bias=p.bias, state_index=p.state_index, ring_pos=p.ring_pos,
        num_accepted=p.num_accepted, out=out,
    )  # fmt: skip
    check.no_gradient("causal_conv1d_update", x=x, state=p.state, weight=p.weight, bias=p.bias, out=out)
    out = x.new_empty(x.shape) if out is None else out
    if x.dim() == 2:
        x, out = x.unsqueeze(1), out.unsqueeze(1)
    p.complete(x=x, out=out)
    return p


def parse_norm(**given: Any) -> NormProblem:
    """Check a call of `rms_norm_gated` without reading tensor contents."""
    p = NormProblem.draft(given)
    x, z, weight = p.x, p.z, p.weight
    check.backend(p.backend)
    check.choice("activation", p.activation, GATES)
    check.floating("x", x)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: expected shape [..., D] with D >= 1, got {list(x.shape)}")
    if z is not None:
        check.floating("z", z)
        if z.shape != x.shape:
            raise ValueError(f"z: expected shape {list(x.shape)} (that of x), got {list(z.shape)}")
    if weight is not None:
        check.floating("weight", weight)
        check.shape("weight", weight, "D", {"D": x.shape[-1]})
    check.companions(x, "x", z=z, weight=weight)
    check.eps("eps", p.eps)
    p.complete(eps=float(p.eps))
    return p


def check_layer(gate: Any, backend: Any, norm_eps: Any, flags: dict[str, Any], **sizes: Any) -> None:
    """Raise unless all sizes are positive ints and num_v_heads is a multiple of num_k_heads.

    flags: options by name that must be bools
    """
    check.backend(backend)
    check.eps("norm_eps", norm_eps)
    check.flags(flags, tuple(flags))
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name}: expected an int, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{name}: expected a positive size, got {size}")
    H, HV = sizes["num_k_heads"], sizes["num_v_heads"]
    if HV % H:
        raise ValueError(f"num_v_heads: expected a multiple of num_k_heads={H}, got {HV}")
    check.choice("output_gate", gate, GATES[1:])


def check_kimi(gate_rank: Any, lower_bound: Any) -> None:
    """Raise unless gate_rank is a positive int or None, and lower_bound a number below 0 or None."""
    if gate_rank is not None:
        if isinstance(gate_rank, bool) or not isinstance(gate_rank, int):
            raise TypeError(f"gate_rank: expected an int or None, got {type(gate_rank).__name__}")
        if gate_rank < 1:
            raise ValueError(f"gate_rank: expected a positive size, got {gate_rank}")
    check.gate_parameters(None, None, lower_bound, "", {})


def check_hidden(
    hidden: Any, attention_mask: Any, cu_seqlens: Any, hidden_size: int, dtype: torch.dtype | None
) -> None:
    """Raise unless the inputs fit the layer and each other.

    hidden must be [B, T, hidden_size] in dtype. A mask [B, T' >= T] and cu_seqlens exclude each other.
    """
    check.floating("hidden", hidden)
    dims = {"hidden_size": hidden_size}
    check.shape("hidden", hidden, "B T hidden_size", dims)
    if dtype is not None and hidden.dtype != dtype:
        raise ValueError(f"hidden: expected dtype {dtype} (that of the layer's weights), got {hidden.dtype}")
    if cu_seqlens is not None:
        if attention_mask is not None:
            raise ValueError("attention_mask: expected None with cu_seqlens, got a tensor")
        check.offsets("hidden", cu_seqlens, None, dims)
    if attention_mask is None:
        return
    check.tensor("attention_mask", attention_mask)
    B, T = dims["B"], dims["T"]
    shape = list(attention_mask.shape)
    if len(shape) != 2 or shape[0] != B or shape[1] < T:
        raise ValueError(f"attention_mask: expected shape [B={B}, at least T={T}], got {shape}")
    check.companions(hidden, "hidden", attention_mask=attention_mask)


def check_cache(cache: Any, kind: type, N: int, weight: Tensor, heads: tuple[int, int, int]) -> None:
    """Raise unless cache is None or has class `kind`, N sequences and the sizes of this layer.

    weight: [D, W] of the convolution; heads: HV, K, V.
    """
    if cache is None:
        return
    if not isinstance(cache, kind):
        raise TypeError(f"cache: expected a {kind.__name__} or None, got {type(cache).__name__}")
    shapes = {"conv_state": (N, weight.shape[0], weight.shape[1] - 1), "state": (N, *heads)}
    for name, shape in shapes.items():
        x = getattr(cache, name)
        if x is None:
            continue
        check.floating(f"cache: {name}", x)
        if tuple(x.shape) != shape:
            raise ValueError(
                f"cache: expected {name} of shape {list(shape)} for N={N} sequences, got {list(x.shape)}"
            )


def _check_channels(p: ConvProblem | ConvUpdateProblem, axes: str, dims: dict[str, int]) -> None:
    check.floating("x", p.x)
    check.floating("weight", p.weight)
    check.shape("x", p.x, axes, dims)
    check.shape("weight", p.weight, "D W", dims)
    if dims["D"] < 1 or dims["W"] < 1:
        raise ValueError(f"weight: expected D >= 1 and W >= 1, got D={dims['D']}, W={dims['W']}")
    if p.bias is not None:
        check.floating("bias", p.bias)
        check.shape("bias", p.bias, "D", dims)


def _check_pool(p: Any, dims: dict[str, int], columns: int, formula: str) -> None:
    check.floating("state", p.state)
    check.shape("state", p.state, "slots D L", dims)
    if dims["L"] < columns:
        raise ValueError(f"state: expected L >= {formula} = {columns} columns, got L={dims['L']}")
    check.writable("state", p.state)
    if p.null_slot is not None and (isinstance(p.null_slot, bool) or p.null_slot != 0):
        raise ValueError(f"null_slot: expected None or 0, got {p.null_slot!r}")


def _check_rows(name: str, index: Any, axes: str, dims: dict[str, int]) -> None:
    if index is not None:
        check.integral(name, index)
        check.shape(name, index, axes, dims)


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)
