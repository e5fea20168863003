"""Check the tensors and options of one call of the gated delta rule; return one frozen Problem."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gdn.notation import Decay, GateBias, HeadParam, Keys, Offsets, PerHead, Q, State, Values
from gdn.problem import check
from gdn.problem.declaration import Declared, declared
from gdn.problem.shapes import Shapes

RESET = (
    -1000.0
)  # a lower log decay counts as this one: e^-1000 is 0 in every dtype, and sums keep their resolution

# what a ChunkDecoder may have of the rule's options: those that are the same for all tokens of a row
DECODER_OPTIONS = (
    "scale", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "A_log", "dt_bias", "lower_bound",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "exact", "recompute",
    "batch_invariant", "output_final_state",
)  # fmt: skip


@runtime_checkable
class ContextParallel(Protocol):
    """Describe a context that computes the tokens of this rank; `gdn.ContextParallel` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def rule(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return o and the local states of `chunk_gated_delta_rule`; arguments: those of `parse`."""
        ...

    def causal_conv1d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return y and the local windows of `causal_conv1d`."""
        ...

    def explain(self, arguments: Mapping[str, Any]) -> tuple["Problem", Any]:
        """Return the problem of this rank and a report of its exchange, without asking another rank."""
        ...

    def overlap(self, work: Callable[[], Any]) -> "ContextParallel":
        """Return a context for one call that runs `work` while the exchange of the call is on its way."""
        ...


_context_classes: set[type] = set()


def check_context(context: Any, **pool: Any) -> None:
    """Raise TypeError unless context is a ContextParallel, NotImplementedError for an argument of a pool."""
    # the check of a protocol reads every member: once for a class is enough
    if type(context) not in _context_classes and not isinstance(context, ContextParallel):
        raise TypeError(f"cp_context: expected a gdn.ContextParallel or None, got {type(context).__name__}")
    _context_classes.add(type(context))
    for name, value in pool.items():
        if value is not None:
            raise NotImplementedError(
                f"{name}: expected None with cp_context, got one (compute on ranks, then gather_states)"
            )


@declared
@dataclass(frozen=True)
class Problem(Declared, Shapes):
    """Hold one checked call of the rule; the fields are the arguments of the torch operators, in order.

    The tensors have the names and shapes of `notation`. With the in-kernel options `g` and `beta` hold raw
    logits. `backend` is the name that the caller passed, or None.

    Two fields are no arguments. Problems that share a `layout_key` differ only in the addresses of their
    tensors. With `may_overwrite` nobody reads q and k after this backward, so it may store dq and dk there.
    """

    q: Q
    k: Keys
    v: Values
    g: Decay | None
    beta: PerHead | None
    A_log: HeadParam | None
    dt_bias: GateBias | None
    initial_state: State | None
    cu_seqlens: Offsets | None
    cu_seqlens_cpu: Offsets | None
    scale: float
    lower_bound: float | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    exact: bool
    batch_invariant: bool
    recompute: bool
    backend: str | None
    layout_key: Hashable = field(default=None, compare=False, repr=False)
    may_overwrite: bool = field(default=False, compare=False, repr=False)

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def is_per_channel(self) -> bool:
        """Return True if g decays each key channel by itself, False if it decays a head."""
        return self.g is not None and self.g.dim() == 4

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the dtype of initial and final state and of all sums: fp32, or fp64 for fp64 inputs."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the initial and final state, in the layout that the caller chose."""
        last = (self.V, self.K) if self.state_v_first else (self.K, self.V)
        return (self.N, self.HV, *last)

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that have gradients, in field order: those of `Gradients`."""
        return (self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias, self.initial_state)


_DEFAULTS = dict.fromkeys(Problem.declaration.names) | dict.fromkeys(Problem.declaration.flags, False)
_DEFAULTS |= {"exact": True}


def parse(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    beta: Any = None,
    *,
    cp_context: ContextParallel | None = None,
    **options: Any,
) -> Problem:
    """Check a call of the gated delta rule without reading tensor contents.

    `options` are other fields of Problem; the defaults are those of `chunk_gated_delta_rule`.

    Raises:
        TypeError            for an argument of the wrong kind (no tensor, an integer tensor, no bool)
        ValueError           for shapes, dtypes, devices or options that contradict each other
        NotImplementedError  for a cp_context: a context checks its own calls
    """
    p = Problem.draft({**_DEFAULTS, **options, "q": q, "k": k, "v": v, "g": g, "beta": beta})
    check.backend(p.backend)
    if cp_context is not None:
        check_context(cp_context)
        raise NotImplementedError(
            "cp_context: expected None, got a context; only chunk_gated_delta_rule computes with one"
        )
    dims = _check_tokens(p)
    _check_gates(p, dims)
    cu_seqlens, cu_seqlens_cpu = p.cu_seqlens, p.cu_seqlens_cpu
    dims["N"] = dims["B"] if cu_seqlens is None else check.offsets("q", cu_seqlens, cu_seqlens_cpu, dims)
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu: expected None without cu_seqlens, got a tensor")
    if p.initial_state is not None:
        check.floating("initial_state", p.initial_state)
        check.shape("initial_state", p.initial_state, "N HV V K" if p.state_v_first else "N HV K V", dims)
    check.companions(
        q, "q", k=k, v=v, g=g, beta=beta, A_log=p.A_log, dt_bias=p.dt_bias, initial_state=p.initial_state
    )
    if cu_seqlens is not None and cu_seqlens.device.type != "cpu":
        check.companions(q, "q", cu_seqlens=cu_seqlens)
    scale = dims["K"] ** -0.5 if p.scale is None else p.scale
    check.number("scale", scale)
    p.complete(scale=float(scale))
    return p


def _check_tokens(p: Problem) -> dict[str, int]:
    for name, x in (("q", p.q), ("k", p.k), ("v", p.v)):
        check.floating(name, x)
    dims: dict[str, int] = {}
    check.shape("q", p.q, "B T H K", dims)
    check.shape("k", p.k, "B T H K", dims)
    check.time_first(p.v, dims)
    check.shape("v", p.v, "B T HV V", dims)
    check.same_dtype(p.q, "q", k=p.k, v=p.v)
    if dims["K"] < 1 or dims["V"] < 1:
        raise ValueError(f"v: expected K >= 1 and V >= 1, got K={dims['K']}, V={dims['V']}")
    if dims["H"] < 1 or dims["HV"] < dims["H"] or dims["HV"] % dims["H"]:
        raise ValueError(f"v: expected HV to be a multiple of H={dims['H']}, got HV={dims['HV']}")
    if p.g is not None:
        check.decay("g", p.g, "B T HV", dims)
    if p.beta is not None:
        check.floating("beta", p.beta)
        check.shape("beta", p.beta, "B T HV", dims)
    return dims


def _check_gates(p: Problem, dims: dict[str, int]) -> None:
    if p.use_gate_in_kernel and p.g is None:
        raise ValueError("g: expected the raw logits [B, T, HV] with use_gate_in_kernel=True, got None")
    if p.use_gate_in_kernel:
        if p.A_log is None and p.lower_bound is None:
            raise ValueError("A_log: expected a tensor [HV] with use_gate_in_kernel=True, got None")
        check.gate_parameters(p.A_log, p.dt_bias, p.lower_bound, "HV K" if p.is_per_channel else "HV", dims)
    else:
        check.no_gate_parameters(p, "use_gate_in_kernel=True")
    if p.use_beta_sigmoid_in_kernel and p.beta is None:
        raise ValueError(
            "beta: expected the logits [B, T, HV] with use_beta_sigmoid_in_kernel=True, got None"
        )
    if p.allow_neg_eigval and not p.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True with it, got False")


def check_decoder(state: Any, backend: Any, options: Mapping[str, Any]) -> None:
    """Raise unless these make a ChunkDecoder: states of rows, a backend, and options of the rule."""
    check.floating("state", state)
    if state.dim() != 4:
        raise ValueError(f"state: expected shape [B, HV, K, V], got {list(state.shape)}")
    if backend not in (None, "eager", "triton"):
        raise ValueError(f"backend: expected None, eager or triton, got {backend}")
    for name, value in options.items():
        if name not in DECODER_OPTIONS:
            raise TypeError(f"ChunkDecoder: expected options of {', '.join(DECODER_OPTIONS)}, got {name}")
        if name in ("batch_invariant", "output_final_state") and value is not True:
            raise ValueError(f"{name}: expected True, got {value}")


def check_next_token(p: Problem, held: Sequence[Tensor | None]) -> None:
    """Raise ValueError unless p has one token a row, of the kinds of the rows' tokens before it.

    held: q, k, v, g and beta of those tokens, [B, C, ...] or None; nothing for a first token.
    """
    if p.T != 1:
        raise ValueError(f"q: expected one token a row, [B, 1, H, K], got {list(p.q.shape)}")
    for name, before in zip(("q", "k", "v", "g", "beta"), held, strict=False):
        old, new = (None if x is None else (*x.shape[2:], x.dtype) for x in (before, getattr(p, name)))
        if old != new:
            wanted, got = ("None" if x is None else f"[B, 1, {', '.join(map(str, x))}]" for x in (old, new))
            raise ValueError(f"{name}: expected {wanted} as in the calls before, got {got}")


def host_offsets(
    cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, T: int, *, read_device: bool
) -> list[int] | None:
    """Return the offsets as checked Python ints, or None if they are on a device and read_device is False.

    Raises ValueError unless 0 = cu_seqlens[0] <= cu_seqlens[1] <= ... <= cu_seqlens[N] <= T, and unless both
    tensors that are read hold the same offsets.
    """
    offsets: list[int] | None = None
    for name, x in (("cu_seqlens_cpu", cu_seqlens_cpu), ("cu_seqlens", cu_seqlens)):
        if x is None or (x.device.type != "cpu" and not read_device):
            continue
        values = x.tolist()
        if values[0] != 0:
            raise ValueError(f"{name}: expected the first offset 0, got {values[0]}")
        for n, (a, b) in enumerate(zip(values[:-1], values[1:], strict=True)):
            if b < a:
                raise ValueError(f"{name}: expected non-decreasing offsets, got {a} then {b} at position {n}")
        if values[-1] > T:
            raise ValueError(f"{name}: expected the last offset to be at most T={T}, got {values[-1]}")
        if offsets is not None and values != offsets:
            raise ValueError(f"{name}: expected the numbers of cu_seqlens_cpu {offsets}, got {values}")
        offsets = values
    return offsets
