"""Provide gdn::decode and gdn::decode_functional: a few tokens per row on the state pool of an engine.

The operators have the fields of their problem as arguments, in order. They write the tensors marked in their
schema, and have no gradient.
"""

from typing import Any

import torch
from torch import Tensor

from gdn._torch_compat import FunctionalTensorMode, decomposes_kernels
from gdn.backends import select
from gdn.notation import Decay, GateBias, HeadParam, Index, Keys, Offsets, PerHead, Pool, Q, Values
from gdn.ops.fastpath import CachedCall, PoolFunction, Tensors
from gdn.ops.int16 import Int16Pool, tensors_of
from gdn.ops.library import Signature, define, library
from gdn.problem import DecodeProblem
from gdn.problem.serving import PackedCall, check_one_state_per_row, parse_decode, parse_packed


def decode(
    q: Q,
    k: Keys,
    v: Values,
    state: Pool | Int16Pool,
    *,
    g: Decay | None = None,
    beta: PerHead | None = None,
    a: Decay | None = None,
    b: PerHead | None = None,
    A_log: HeadParam | None = None,
    dt_bias: GateBias | None = None,
    lower_bound: float | None = None,
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
        max_seqlen        int or None           bound of T if packed (see Longer rows); required if cu_seqlens
                                                is on a GPU
        out               as v, or None         gets the result and is returned; None: a new tensor
    Gates:
        g, beta           [B, T, HV] or None    any float; natural log decay per token, and write strength;
                                                None: no decay, ones
        a, b              [B, T, HV]            any float; raw logits in place of g and beta:
        A_log, dt_bias    [HV], [HV] or None    g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)
        lower_bound       number < 0 or None    g = lower_bound sigmoid(exp(A_log) (a + dt_bias)); A_log may
                                                be None with it: exp(A_log) = 1
        With a decay per key channel g and a are [B, T, HV, K] and dt_bias is [HV, K].
        allow_neg_eigval  bool                  True: beta = 2 sigmoid(b)
    Where to read:
        state             [slots, HV, K, V]     fp32, bf16, fp16 (fp64 only with fp64 q), any slot stride;
                                                updated in place; with ring_pos [slots, R, HV, K, V]. An
                                                `Int16Pool` has them in int16, and a scale per column of V
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
        round_state       bool                  True: round the state as the pool does after each token
        exact_packet      bool                  False: allow the chunk form on tensor cores, which a GPU uses
                                                where it is faster; not with round_state. NaN in k, v or a
                                                gate then affects the whole row
        backend           str or None           None: chosen automatically; a named one never falls back

    Returns: o [B, T, HV, V] (or [1, total, HV, V], zero past cu_seqlens[-1]), dtype of q.

    Padding: a row whose read slot is below 0 (below 1 with null_slot=0) or past the pool outputs zeros, and
            no state is read or written for it. With `parent` this also holds for an invalid
            intermediate_row. Any other invalid place to write is skipped alone. Two rows must not write one
            slot, and no row may read a slot that another row writes.
    Longer rows: max_seqlen chooses kernels, and offsets on a GPU are not read to check it (with GDN_DEBUG=1
            they are: ValueError, as for offsets on the CPU). In a row of more tokens every output and state
            is right, or NaN where the kernel or a per-token tensor is for fewer tokens. Other rows are right.
    Bits:   T tokens at once equal T single steps bit for bit with an fp32 pool, and with round_state for
            other pools. The bits of a row do not depend on the other rows; with exact_packet=False those of
            packed rows depend on max_seqlen.
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
    states, column_scale = tensors_of(state)
    tensors = (
        q, k, v, states, g, beta, a, b, A_log, dt_bias, column_scale, cu_seqlens, read_index, num_accepted,
        ring_pos, write_index, intermediate, intermediate_row, parent,
    )  # fmt: skip
    options = (
        max_seqlen, scale, lower_bound, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, write,
        null_slot, round_state, exact_packet, backend,
    )  # fmt: skip
    return _decode(q, tensors, out, options)


def decode_packed(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: HeadParam | None,
    dt_bias: GateBias | None,
    state: Pool | Int16Pool,
    *,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    scale: float | None = None,
    lower_bound: float | None = None,
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
        lower_bound              number < 0 or None          as in `decode`; a [tokens, HV, K] and
                                                             dt_bias [HV, K] decay key channels
        state                    [slots, HV, K, V]           as in `decode`
        num_k_heads              int                         H
        head_k_dim, head_v_dim   int                         K, V
        out                      [tokens, HV, V] or None     gets the result and is returned
    The other arguments are those of `decode`. Without cu_seqlens each token is a row (B = tokens, T = 1).

    Returns: o [tokens, HV, V], dtype of mixed_qkv.
    Raises, cost, source: as `decode`.
    """
    states, column_scale = tensors_of(state)
    tensors = (
        mixed_qkv, states, a, b, A_log, dt_bias, column_scale, cu_seqlens, read_index, num_accepted, ring_pos,
        write_index, intermediate, intermediate_row, parent,
    )  # fmt: skip
    options = (
        max_seqlen, scale, lower_bound, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, write,
        null_slot, round_state, exact_packet, backend, num_k_heads, head_k_dim, head_v_dim,
    )  # fmt: skip
    return _decode_packed(mixed_qkv, tensors, out, options)


def decode_functional(
    q: Q,
    k: Keys,
    v: Values,
    state: Pool,
    *,
    g: Decay | None = None,
    beta: PerHead | None = None,
    a: Decay | None = None,
    b: PerHead | None = None,
    A_log: HeadParam | None = None,
    dt_bias: GateBias | None = None,
    lower_bound: float | None = None,
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
        q=q, k=k, v=v, state=state, g=g, beta=beta, a=a, b=b, A_log=A_log, dt_bias=dt_bias,
        cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, scale=scale, lower_bound=lower_bound,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, write="final", null_slot=None, round_state=round_state,
        exact_packet=exact_packet, backend=backend, **_FUNCTIONAL.absent,
    )  # fmt: skip
    check_one_state_per_row(problem)
    o, new_state = _decode_functional_op(*_FUNCTIONAL.arguments_of(problem))
    return o, new_state


class _PackedFunction(PoolFunction):
    """Run decode_packed, whose problem is a decode of views of mixed_qkv."""

    def result(self, problem: Any) -> Tensor:
        out: Tensor = problem.out.squeeze(1 if problem.cu_seqlens is None else 0)
        return out

    def cache(self, problem: Any, launch: Any, given: Tensors) -> CachedCall | None:
        """Return a launch that takes mixed_qkv; None without one, where the views are made in every call."""
        if launch is None:
            return None
        mixed_qkv, *_ = given
        packed, output = launch.packed(problem, mixed_qkv), self.result(problem).shape
        return CachedCall(self.signature, problem.without_tensors(), select(problem), packed, output)


def _decode_functional(*args: Any) -> tuple[Tensor, Tensor]:
    problem, _ = _FUNCTIONAL.split(args)
    state = problem.state.clone(memory_format=torch.contiguous_format)
    problem.complete(state=state, out=problem.v.new_empty(problem.v.shape))
    _decode.run(problem)
    return problem.out, state


def _decode_functional_fake(*args: Any) -> tuple[Tensor, Tensor]:
    problem, _ = _FUNCTIONAL.split(args)
    v, state = problem.v, problem.state
    return v.new_empty(v.shape), state.new_empty(state.shape)


def _embed(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Replace decode_functional by the kernel of a backend while a compiler traces it.

    An AOTInductor package then runs without this library. The operator remains in an exported program, for
    tensors on the CPU, for tensors with unknown strides, and for problems that only `eager` supports.
    """
    given = _FUNCTIONAL.fields_of(args)
    q, v, state = given["q"], given["v"], given["state"]
    has_strides = all(isinstance(s, int) for x in args if isinstance(x, Tensor) for s in x.stride())
    if q.device.type == "cpu" or not has_strides or not decomposes_kernels():
        return mode.__torch_dispatch__(op, types, args, kwargs)
    with mode:
        o, new_state = v.new_empty(v.shape), state
        _, T, _, _ = q.shape
        if isinstance(T, int) and T == 1 and given["cu_seqlens"] is None:
            # the state after the only token is new_state, so the kernel writes it there without a copy first
            new_state = torch.empty_like(state, memory_format=torch.contiguous_format)
            given |= {"intermediate": new_state.unsqueeze(1), "write": "none"}
        else:
            new_state = given["state"] = state.clone(memory_format=torch.contiguous_format)
        problem = DecodeProblem(**{**given, "out": o})
        backend = select(problem)
        if backend.name != "eager":
            backend.decode(problem)
            return o, new_state
    return mode.__torch_dispatch__(op, types, args, kwargs)


TOKENS = ("q", "k", "v", "g", "beta", "a", "b", "A_log", "dt_bias")  # inputs that debug mode tests for NaN
_SIGNATURE = Signature("decode", TOKENS, ("o",))
_decode = PoolFunction(_SIGNATURE, DecodeProblem, parse_decode)
_decode_packed = _PackedFunction(_SIGNATURE, PackedCall, parse_packed, _decode.operator)
_FUNCTIONAL = DecodeProblem.declaration.without(
    "column_scale", "read_index", "num_accepted", "ring_pos", "write_index", "intermediate",
    "intermediate_row", "parent", "out", written=False,
)  # fmt: skip
_decode_functional_op = define(
    "decode_functional",
    f"({_FUNCTIONAL.schema}) -> (Tensor o, Tensor new_state)",
    _decode_functional,
    _decode_functional_fake,
)
torch.library.register_torch_dispatch("gdn::decode_functional", FunctionalTensorMode, _embed, lib=library)
