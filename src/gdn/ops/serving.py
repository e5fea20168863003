"""Provide gdn::decode and gdn::decode_functional: a few tokens per row on the state pool of an engine.

The operators have the fields of their problem as arguments, in order. They write the tensors marked in their
schema, and have no gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as _functorch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from gdn import settings
from gdn.backends import select
from gdn.notation import HeadParam, Index, Keys, Offsets, PerHead, Pool, Q, Values
from gdn.ops.library import Signature, define, guarded, is_plain, library
from gdn.ops.repeats import remember, seen_before
from gdn.problem import DecodeProblem, ReplayProblem
from gdn.problem.serving import one_state_per_row, parse_decode, parse_packed
from gdn.problem.step import StepProblem

Repeatable = DecodeProblem | ReplayProblem | StepProblem


def decode(
    q: Q,
    k: Keys,
    v: Values,
    state: Pool,
    *,
    g: PerHead | None = None,
    beta: PerHead | None = None,
    a: PerHead | None = None,
    b: PerHead | None = None,
    A_log: HeadParam | None = None,
    dt_bias: HeadParam | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Offsets | None = None,
    max_seqlen: int | None = None,
    read_index: Tensor | None = None,
    num_accepted: Index | None = None,
    ring_pos: Index | None = None,
    write_index: Tensor | None = None,
    intermediate: Tensor | None = None,
    intermediate_row: Index | None = None,
    parent: Tensor | None = None,
    write: str = "final",
    null_slot: int | None = None,
    round_state: bool = False,
    exact_packet: bool = True,
    out: Values | None = None,
    backend: str | None = None,
) -> Values:
    """Run a few tokens for each row of a batch, with the states in the pool of an engine.

        S <- e^g S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q

    Tokens:               shape                 dtype
        q, k              [B, T, H, K]          bf16, fp16, fp32 (fp64 on eager), one for q, k, v, out
        v                 [B, T, HV, V]         dtype of q; value head j reads key head j // (HV // H)
        cu_seqlens        [B+1] int             packed: q is [1, total, H, K] and so on, and row n has tokens
                                                cu_seqlens[n]:cu_seqlens[n+1]; T varies by row and may be 0
        max_seqlen        int or None           bound of T if packed; required if cu_seqlens is on a GPU
        out               as v, or None         gets the result and is returned; None: a new tensor
    Gates:
        g, beta           [B, T, HV] or None    any float; natural log decay per token, and write strength;
                                                None: no decay, ones
        a, b              [B, T, HV]            any float; raw logits in place of g and beta:
        A_log, dt_bias    [HV], [HV] or None    g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)
        allow_neg_eigval  bool                  True: beta = 2 sigmoid(b)
    Where to read:
        state             [slots, HV, K, V]     fp32, bf16, fp16 (fp64 only with fp64 q), any slot stride;
                                                updated in place; with ring_pos [slots, R, HV, K, V]
        state_v_first     bool                  True: states are [..., HV, V, K], as in serving engines
        read_index        [B] or [B, columns]   int; the slot that each row reads; None: the row's number.
                                                A table is read at column clamp(num_accepted, 1, columns) - 1
        num_accepted      [B] int or None       only with a table; None: 1
        ring_pos          [B] int or None       the row reads ring entry ring_pos % R
        parent            [B, >=T] int or None  token t continues from the state after token parent[t] < t,
                                                read from intermediate in its dtype; negative: from the pool.
                                                parent[:, 0] is ignored; a value above t - 1 counts as t - 1
        null_slot         None or 0             0: slot 0 is padding as well
    Where to write:
        write             str                   "final": the state after the last token goes to the place that
                                                the row read, or to slot write_index [B]; "all": the state
                                                after token t goes to slot write_index[:, t], or to ring entry
                                                (ring_pos + 1 + t) % R; "none": the pool is not written
        write_index       [B] or [B, >=T] int   see write
        intermediate      [rows, >=T, HV, K, V] any float, any row stride; gets the state after each token
        intermediate_row  [B] int or None       the row of intermediate for each row; None: the row's number
    Numerics:
        scale             number or None        None: K ** -0.5
        use_qk_l2norm_in_kernel  bool           q, k <- x * rsqrt(sum(x * x) + 1e-6), before scale
        round_state       bool                  True: round the state to the pool's dtype after each token
        exact_packet      bool                  False: allow the chunk form on tensor cores; not with
                                                round_state. NaN in k, v or a gate then affects the whole row
        backend           str or None           None: chosen automatically; a named one never falls back

    Returns: o [B, T, HV, V] (or [1, total, HV, V], zero past cu_seqlens[-1]), dtype of q.

    Padding: a row whose read slot is below 0 (below 1 with null_slot=0) or past the pool outputs zeros, and
            no state is read or written for it. With `parent` this also holds for an invalid
            intermediate_row. Any other invalid place to write is skipped alone. Two rows must not write one
            slot, and no row may read a slot that another row writes.
    Bits:   T tokens at once equal T single steps bit for bit with an fp32 pool, and with round_state for
            other pools. The bits of a row do not depend on the other rows, unless exact_packet=False.
    Raises: TypeError, ValueError, NotImplementedError as in `gdn.problem`; ValueError if a gradient is
            required; no tensor has been modified then.
    Cost:   6 K V flop per token and value head; per row one state is read and, with "final", one written.
    Source: arXiv:2412.06464, equation 10.

    Example:
        >>> import torch, gdn
        >>> pool = torch.zeros(10, 4, 16, 16)
        >>> q, k = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
        >>> o = gdn.decode(q, k, torch.randn(2, 1, 4, 16), pool, read_index=torch.tensor([7, -1]))
        >>> o.shape, bool(o[1].any()), pool.flatten(1).any(1).nonzero().tolist()
        (torch.Size([2, 1, 4, 16]), False, [[7]])
    """
    tensors = (
        q, k, v, state, g, beta, a, b, A_log, dt_bias, cu_seqlens, read_index, num_accepted, ring_pos,
        write_index, intermediate, intermediate_row, parent,
    )  # fmt: skip
    options = (
        max_seqlen, scale, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, write, null_slot,
        round_state, exact_packet, backend,
    )  # fmt: skip
    key, again = seen_before((*tensors, out), cu_seqlens, options, (state, intermediate, out))
    if again is not None:
        out = v.new_empty(v.shape) if out is None else out
        again(*tensors, out)
        return out
    problem = parse_decode(
        q, k, v, state, g=g, beta=beta, a=a, b=b, A_log=A_log, dt_bias=dt_bias, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, read_index=read_index,
        num_accepted=num_accepted, ring_pos=ring_pos, write_index=write_index, intermediate=intermediate,
        intermediate_row=intermediate_row, parent=parent, write=write, null_slot=null_slot,
        round_state=round_state, exact_packet=exact_packet, out=out, backend=backend,
    )  # fmt: skip
    if is_plain(q):
        again = run_checked("decode", problem)
        if key is not None:
            remember(key, unchecked("decode", problem, _AFTER_OUT) if again is None else again)
    else:
        _decode_op(*problem.arguments())
    return problem.out


def decode_packed(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: HeadParam,
    dt_bias: HeadParam | None,
    state: Pool,
    *,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Offsets | None = None,
    max_seqlen: int | None = None,
    read_index: Tensor | None = None,
    num_accepted: Index | None = None,
    ring_pos: Index | None = None,
    write_index: Tensor | None = None,
    intermediate: Tensor | None = None,
    intermediate_row: Index | None = None,
    parent: Tensor | None = None,
    write: str = "final",
    null_slot: int | None = None,
    round_state: bool = False,
    exact_packet: bool = True,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Run `decode` on rows of q | k | v, the output of a layer's convolution, and on raw gate logits.

        g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b);   then as in `decode`

    Args:                        shape                       dtype
        mixed_qkv                [tokens, 2 H K + HV V]      bf16, fp16, fp32; any row stride; not copied
        a, b                     [tokens, HV]                any float; raw logits
        A_log, dt_bias           [HV]                        any float; dt_bias may be None
        state                    [slots, HV, K, V]           as in `decode`
        num_k_heads              int                         H
        head_k_dim, head_v_dim   int                         K, V
        out                      [tokens, HV, V] or None     gets the result and is returned
    The other arguments are those of `decode`. Without cu_seqlens each token is a row (B = tokens, T = 1).

    Returns: o [tokens, HV, V], dtype of mixed_qkv.
    Raises, cost, source: as `decode`.
    """
    rest = (
        A_log, dt_bias, cu_seqlens, read_index, num_accepted, ring_pos, write_index, intermediate,
        intermediate_row, parent,
    )  # fmt: skip
    options = (
        max_seqlen, scale, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, write, null_slot,
        round_state, exact_packet, backend, num_k_heads, head_k_dim, head_v_dim,
    )  # fmt: skip
    key, again = seen_before(
        (mixed_qkv, state, a, b, *rest, out), cu_seqlens, options, (state, intermediate, out)
    )
    if again is not None:
        out = mixed_qkv.new_empty(*a.shape, head_v_dim) if out is None else out
        again(mixed_qkv, mixed_qkv, mixed_qkv, state, None, None, a, b, *rest, out)
        return out
    q, k, v, a, b, out = parse_packed(
        mixed_qkv, a, b, num_k_heads, head_k_dim, head_v_dim, out, is_dense=cu_seqlens is None
    )
    problem = parse_decode(
        q, k, v, state, g=None, beta=None, a=a, b=b, A_log=A_log, dt_bias=dt_bias, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, read_index=read_index,
        num_accepted=num_accepted, ring_pos=ring_pos, write_index=write_index, intermediate=intermediate,
        intermediate_row=intermediate_row, parent=parent, write=write, null_slot=null_slot,
        round_state=round_state, exact_packet=exact_packet, out=out, backend=backend,
    )  # fmt: skip
    if is_plain(q):
        again = run_checked("decode", problem)
        if key is not None and again is not None:
            remember(key, again.packed(problem, mixed_qkv))
    else:
        _decode_op(*problem.arguments())
    return problem.out.squeeze(1 if cu_seqlens is None else 0)


def decode_functional(
    q: Q,
    k: Keys,
    v: Values,
    state: Pool,
    *,
    g: PerHead | None = None,
    beta: PerHead | None = None,
    a: PerHead | None = None,
    b: PerHead | None = None,
    A_log: HeadParam | None = None,
    dt_bias: HeadParam | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Offsets | None = None,
    max_seqlen: int | None = None,
    round_state: bool = False,
    exact_packet: bool = True,
    backend: str | None = None,
) -> tuple[Values, Pool]:
    """Run `decode` without side effects, for export: return (o, new_state) and leave `state` unchanged.

    The arguments are those of `decode`, but state is [B, HV, K, V] (or [B, HV, V, K]), one state per row.

    Returns:
        o          [B, T, HV, V]    dtype of q
        new_state  shape and dtype of state, contiguous; bit for bit the state that `decode` writes
    Raises, cost, source: as `decode`; the cost includes one copy of the state.
    """
    problem = parse_decode(
        q, k, v, state, g=g, beta=beta, a=a, b=b, A_log=A_log, dt_bias=dt_bias, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, read_index=None,
        num_accepted=None, ring_pos=None, write_index=None, intermediate=None, intermediate_row=None,
        parent=None,
        write="final", null_slot=None, round_state=round_state, exact_packet=exact_packet, out=None,
        backend=backend,
    )  # fmt: skip
    args = one_state_per_row(problem).arguments()
    o, new_state = _decode_functional_op(*args[:11], *args[_AFTER_OUT:])
    return o, new_state


def _decode(*args: Any) -> None:
    run_checked("decode", DecodeProblem(*args))


def run_checked(name: str, problem: DecodeProblem | ReplayProblem) -> Any:
    """Check the offsets of packed rows, then call `run_backend`."""
    p = problem
    if p.cu_seqlens is not None:
        p.spans(read_device=settings.debug())
    given = (p.q, p.k, p.v, p.g, p.beta, p.a, p.b, p.A_log, p.dt_bias)
    return run_backend(Signature(name, TOKENS, ("o",)), p, given)


def run_backend(signature: Signature, problem: Repeatable, given: tuple[Tensor | None, ...]) -> Any:
    """Run the function of the backend; return its result, None or a launch to repeat (`gdn.ops.repeats`).

    given: the inputs that debug mode tests for NaN.
    """
    again = None

    def run() -> tuple[Tensor]:
        nonlocal again
        again = getattr(select(problem), signature.name)(problem)
        return (problem.out,)

    guarded(signature, problem.out.device, given, run, problem)
    return again


def unchecked(name: str, problem: Repeatable, first_option: int) -> Callable[..., None]:
    """Return a function that repeats the call without checks, for a backend that returned no launch."""
    kind, device, function = type(problem), problem.out.device, getattr(select(problem), name)
    options: tuple[Any, ...] = problem.arguments()[first_option:]
    signature = Signature(name, ())

    def run(*tensors: Tensor | None) -> None:
        other = kind(*tensors, *options)  # type: ignore[arg-type]
        guarded(signature, device, (), lambda: function(other))

    return run


def _decode_functional(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, v, state, *rest = args
    state = state.clone(memory_format=torch.contiguous_format)
    out = v.new_empty(v.shape)
    _decode(q, k, v, state, *rest[:7], *(None,) * 7, out, *rest[7:])
    return out, state


def _embed(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Replace decode_functional by the kernel of a backend while a compiler traces it.

    An AOTInductor package then runs without this library. The operator remains in an exported program, for
    tensors on the CPU, for tensors with unknown strides, and for problems that only `eager` supports.
    """
    q, k, v, state, *rest = args
    gates, options = rest[:7], list(rest[7:])
    known = all(isinstance(s, int) for x in args if isinstance(x, Tensor) for s in x.stride())
    if q.device.type == "cpu" or not known or not _functorch.decompose_custom_triton_ops:
        return mode.__torch_dispatch__(op, types, args, kwargs)
    with mode:
        o, new_state, kept = v.new_empty(v.shape), state, None
        if isinstance(q.shape[1], int) and q.shape[1] == 1 and gates[-1] is None:
            # the state after the only token is new_state, so the kernel writes it there without a copy first
            new_state = torch.empty_like(state, memory_format=torch.contiguous_format)
            kept, options[_WRITE] = new_state.unsqueeze(1), "none"
        else:
            new_state = state = state.clone(memory_format=torch.contiguous_format)
        where = (None, None, None, None, kept, None, None, o)
        problem = DecodeProblem(q, k, v, state, *gates, *where, *options)  # type: ignore[call-arg]
        backend = select(problem)
        if backend.name != "eager":
            backend.decode(problem)
            return o, new_state
    return mode.__torch_dispatch__(op, types, args, kwargs)


def nothing(*args: Any) -> None:
    """Do nothing: the fake of an operator that only writes its arguments."""


TOKENS = ("q", "k", "v", "g", "beta", "a", "b", "A_log", "dt_bias")
GATES = "Tensor? g, Tensor? beta, Tensor? a, Tensor? b, Tensor? A_log, Tensor? dt_bias"
_ROW_OPTIONS = (
    "SymInt? max_seqlen, float scale, bool use_qk_l2norm_in_kernel, bool allow_neg_eigval, "
    "bool state_v_first, str write, int? null_slot, bool round_state, bool exact_packet, str? backend"
)
_AFTER_OUT = 19  # position of the first option in DecodeProblem
_decode_op = define(
    "decode",
    f"(Tensor q, Tensor k, Tensor v, Tensor(a!) state, {GATES}, Tensor? cu_seqlens, Tensor? read_index, "
    "Tensor? num_accepted, Tensor? ring_pos, Tensor? write_index, Tensor(b!)? intermediate, "
    f"Tensor? intermediate_row, Tensor? parent, Tensor(c!) out, {_ROW_OPTIONS}) -> ()",
    _decode,
    nothing,
)
_WRITE = 5  # position of `write` in _ROW_OPTIONS
_decode_functional_op = define(
    "decode_functional",
    f"(Tensor q, Tensor k, Tensor v, Tensor state, {GATES}, Tensor? cu_seqlens, {_ROW_OPTIONS}) -> "
    "(Tensor o, Tensor new_state)",
    _decode_functional,
    lambda q, k, v, state, *rest: (v.new_empty(v.shape), state.new_empty(state.shape)),
)
torch.library.register_torch_dispatch("gdn::decode_functional", FunctionalTensorMode, _embed, lib=library)
