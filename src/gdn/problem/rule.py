"""Check the tensors and options of one call of the gated delta rule; return one frozen Problem."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gdn.notation import HeadParam, Keys, Offsets, PerHead, Q, State, Values
from gdn.problem import check

CHUNK = 64  # tokens per chunk, in every backend and in the saved tensors of a forward
RESET = (
    -1000.0
)  # a lower log decay counts as this one: e^-1000 is 0 in every dtype, and sums keep their resolution


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


def check_context(context: Any, **pool: Any) -> None:
    """Raise TypeError unless context is a ContextParallel, NotImplementedError for an argument of a pool."""
    if not isinstance(context, ContextParallel):
        raise TypeError(f"cp_context: expected a gdn.ContextParallel or None, got {type(context).__name__}")
    for name, value in pool.items():
        if value is not None:
            raise NotImplementedError(
                f"{name}: expected None with cp_context, got one (compute on ranks, then gather_states)"
            )


@dataclass(frozen=True)
class Problem:
    """Hold one checked call of the rule; the fields are the arguments of the torch operators, in order.

    The tensors have the names and shapes of `notation`. With the in-kernel options `g` and `beta` hold raw
    logits. `backend` is the name that the caller passed, or None.

    `form` is not an argument. Problems that share one `form` object differ only in the addresses of tensors.
    """

    q: Q
    k: Keys
    v: Values
    g: PerHead | None
    beta: PerHead | None
    A_log: HeadParam | None
    dt_bias: HeadParam | None
    initial_state: State | None
    cu_seqlens: Offsets | None
    cu_seqlens_cpu: Offsets | None
    scale: float
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    exact: bool
    batch_invariant: bool
    backend: str | None
    form: Hashable = field(default=None, compare=False, repr=False)

    @property
    def B(self) -> int:
        return self.q.shape[0]

    @property
    def T(self) -> int:
        return self.q.shape[1]

    @property
    def H(self) -> int:
        return self.q.shape[2]

    @property
    def HV(self) -> int:
        return self.v.shape[2]

    @property
    def K(self) -> int:
        return self.q.shape[3]

    @property
    def V(self) -> int:
        return self.v.shape[3]

    @property
    def N(self) -> int:
        """Return N, the number of sequences."""
        return self.B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks in all sequences.

        For packed sequences it is the bound sum ceil(T_n / C) <= floor((T + N (C - 1)) / C).
        """
        if self.cu_seqlens is None:
            return self.B * ((self.T + CHUNK - 1) // CHUNK)
        return (self.T + self.N * (CHUNK - 1)) // CHUNK

    @property
    def device(self) -> torch.device:
        return self.q.device

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
        """Return the tensors that have gradients, in field order."""
        return (self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias, self.initial_state)

    def of(self, tensors: Sequence[Tensor | None], form: Hashable) -> "Problem":
        """Return this problem with other tensors, in field order.

        This bypasses __init__, which takes 2.4 us longer in a frozen dataclass.
        """
        values = vars(self).copy()
        (
            values["q"], values["k"], values["v"], values["g"], values["beta"], values["A_log"],
            values["dt_bias"], values["initial_state"], values["cu_seqlens"], values["cu_seqlens_cpu"],
        ) = tensors  # fmt: skip
        values["form"] = form
        problem = object.__new__(Problem)
        object.__setattr__(problem, "__dict__", values)
        return problem

    def arguments(self) -> tuple[Any, ...]:
        """Return the fields in order without `form`, the arguments of the torch operators."""
        return tuple([getattr(self, name) for name in _ARGUMENTS])


_ARGUMENTS = tuple(f.name for f in fields(Problem) if f.name != "form")


def parse(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    beta: Any = None,
    *,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: ContextParallel | None = None,
    exact: bool = True,
    batch_invariant: bool = False,
    backend: Any = None,
) -> Problem:
    """Check a call of the gated delta rule without reading tensor contents.

    Raises:
        TypeError            for an argument of the wrong kind (no tensor, an integer tensor, no bool)
        ValueError           for shapes, dtypes, devices or options that contradict each other
        NotImplementedError  for a cp_context: a context checks its own calls
    """
    (
        output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, state_v_first, exact, batch_invariant,
    ) = check.flags(
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first, exact=exact,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    check.backend(backend)
    if cp_context is not None:
        raise NotImplementedError(
            "cp_context: expected None, got a context; only chunk_gated_delta_rule computes with one"
        )
    dims = _check_tokens(q, k, v, g, beta)
    _check_gates(
        g, beta, A_log, dt_bias, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, dims
    )
    dims["N"] = dims["B"] if cu_seqlens is None else check.offsets("q", cu_seqlens, cu_seqlens_cpu, dims)
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu: expected None without cu_seqlens, got a tensor")
    if initial_state is not None:
        check.floating("initial_state", initial_state)
        check.shape("initial_state", initial_state, "N HV V K" if state_v_first else "N HV K V", dims)
    check.companions(
        q, "q", k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state
    )
    if cu_seqlens is not None and cu_seqlens.device.type != "cpu":
        check.companions(q, "q", cu_seqlens=cu_seqlens)
    if scale is None:
        scale = dims["K"] ** -0.5
    check.number("scale", scale)
    return Problem(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, float(scale),
        output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, state_v_first, exact, batch_invariant, backend,
    )  # fmt: skip


def _check_tokens(q: Any, k: Any, v: Any, g: Any, beta: Any) -> dict[str, int]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.floating(name, x)
    dims: dict[str, int] = {}
    check.shape("q", q, "B T H K", dims)
    check.shape("k", k, "B T H K", dims)
    check.time_first(v, dims)
    check.shape("v", v, "B T HV V", dims)
    check.same_dtype(q, "q", k=k, v=v)
    if dims["K"] < 1 or dims["V"] < 1:
        raise ValueError(f"v: expected K >= 1 and V >= 1, got K={dims['K']}, V={dims['V']}")
    if dims["H"] < 1 or dims["HV"] < dims["H"] or dims["HV"] % dims["H"]:
        raise ValueError(f"v: expected HV to be a multiple of H={dims['H']}, got HV={dims['HV']}")
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            check.floating(name, x)
            check.shape(name, x, "B T HV", dims)
    return dims


def _check_gates(
    g: Any, beta: Any, A_log: Any, dt_bias: Any, with_gate: bool, with_sigmoid: bool, negative: bool,
    dims: dict[str, int],
) -> None:  # fmt: skip
    if with_gate and g is None:
        raise ValueError("g: expected the raw logits [B, T, HV] with use_gate_in_kernel=True, got None")
    if with_gate and A_log is None:
        raise ValueError("A_log: expected a tensor [HV] with use_gate_in_kernel=True, got None")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is None:
            continue
        if not with_gate:
            raise ValueError(f"{name}: expected None without use_gate_in_kernel=True, got a tensor")
        check.floating(name, x)
        check.shape(name, x, "HV", dims)
    if with_sigmoid and beta is None:
        raise ValueError(
            "beta: expected the logits [B, T, HV] with use_beta_sigmoid_in_kernel=True, got None"
        )
    if negative and not with_sigmoid:
        raise ValueError("allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True with it, got False")


def host_offsets(
    cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, T: int, *, read_device: bool
) -> list[int] | None:
    """Return the offsets as checked Python ints, or None if they are on a device and read_device is False.

    Raises ValueError unless 0 = cu_seqlens[0] <= cu_seqlens[1] <= ... <= cu_seqlens[N] <= T, and unless both
    tensors that are read hold the same offsets.
    """
    found: list[int] | None = None
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
        if found is not None and values != found:
            raise ValueError(f"{name}: expected the numbers of cu_seqlens_cpu {found}, got {values}")
        found = values
    return found
