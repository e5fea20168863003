"""Check the calls of a serving engine: one decode step, one prefill or one commit on its state pools.

The fields have the names of the arguments of `gdn.ops.serving`, where they are documented.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gdn.notation import HeadParam, Index, Keys, Mask, Offsets, PerHead, Pool, Q, Values
from gdn.problem import addressing, check
from gdn.problem.rule import Problem, host_offsets


class OnPool:
    """Provide the sizes, the dtype and the slot test that decode, prefill and replay share."""

    q: Q
    v: Values
    state: Pool
    cu_seqlens: Offsets | None
    null_slot: int | None

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
        """Return N, the rows of a decode or the sequences of a prefill."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all computation: fp32, or fp64 for fp64 inputs."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def is_slot(self, slot: int) -> bool:
        """Return True if `slot` is in the pool and is not the null slot."""
        return (0 if self.null_slot is None else 1) <= slot < self.state.shape[0]


@dataclass(frozen=True)
class DecodeProblem(OnPool):
    """Hold one checked decode; dense [B, T, ...], or packed [1, total, ...] with cu_seqlens.

    `state`, `intermediate` and `out` are written. The gates are g and beta, or a, b and A_log, or all None.
    """

    q: Q
    k: Keys
    v: Values
    state: Pool
    g: PerHead | None
    beta: PerHead | None
    a: PerHead | None
    b: PerHead | None
    A_log: HeadParam | None
    dt_bias: HeadParam | None
    cu_seqlens: Offsets | None
    read_index: Tensor | None
    num_accepted: Index | None
    ring_pos: Index | None
    write_index: Tensor | None
    intermediate: Tensor | None
    intermediate_row: Index | None
    parent: Tensor | None
    out: Values
    max_seqlen: int | None
    scale: float
    use_qk_l2norm_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    write: str
    null_slot: int | None
    round_state: bool
    exact_packet: bool
    backend: str | None

    def arguments(self) -> tuple[Any, ...]:
        """Return the fields in order, the arguments of the torch operators."""
        return tuple([getattr(self, name) for name in _DECODE_FIELDS])

    def spans(self, *, read_device: bool) -> list[tuple[int, int]] | None:
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
        spans = addressing.spans(offsets, self.max_seqlen)
        longest = max((count for _, count in spans), default=0)
        for name, x in (("intermediate", self.intermediate), ("parent", self.parent)):
            addressing.columns(name, x, longest)
        if self.write == "all":
            addressing.columns("write_index", self.write_index, longest)
        return spans


@dataclass(frozen=True)
class PrefillProblem(OnPool):
    """Hold one checked prefill of packed sequences. `state`, `checkpoints` and `out` are written."""

    q: Q
    k: Keys
    v: Values
    state: Pool
    g: PerHead | None
    beta: PerHead | None
    a: PerHead | None
    b: PerHead | None
    A_log: HeadParam | None
    dt_bias: HeadParam | None
    cu_seqlens: Offsets
    state_index: Index
    out_state_index: Index | None
    has_initial_state: Mask | None
    checkpoints: Tensor | None
    checkpoint_offsets: Index | None
    snapshot_pos: Index | None
    snapshot_index: Index | None
    out: Values
    scale: float
    use_qk_l2norm_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    batch_invariant: bool
    update_state: bool
    checkpoint_every: int
    null_slot: int | None
    backend: str | None

    def arguments(self) -> tuple[Any, ...]:
        """Return the fields in order, the arguments of the torch operators."""
        return tuple([getattr(self, name) for name in _PREFILL_FIELDS])

    def offsets(self, *, read_device: bool) -> list[int] | None:
        """Return cu_seqlens as checked ints; None if it is on a device and read_device is False."""
        return host_offsets(self.cu_seqlens, None, self.q.shape[1], read_device=read_device)

    @property
    def keeps_states(self) -> bool:
        """Return True if the call stores states between the first and last token: checkpoints, snapshots."""
        return self.checkpoints is not None or self.snapshot_pos is not None

    @cached_property
    def rule(self) -> Problem:
        """Return the Problem of the rule for the whole prefill, without initial states."""
        is_raw = self.a is not None
        g, beta = (self.a, self.b) if is_raw else (self.g, self.beta)
        return Problem(
            self.q, self.k, self.v, g, beta, self.A_log, self.dt_bias, None, self.cu_seqlens, None,
            self.scale, True, self.use_qk_l2norm_in_kernel, is_raw, is_raw, self.allow_neg_eigval,
            self.state_v_first, True, self.batch_invariant, self.backend,
        )  # fmt: skip


@dataclass(frozen=True)
class CommitProblem:
    """Hold one checked commit: dst [L, slots, ...], src [L, rows, T, ...], the rest [n]. `dst` is written."""

    dst: Tensor
    src: Tensor
    dst_index: Index
    src_row: Index
    step: Index
    extra_dst_index: Index | None
    extra_step: Index | None
    backend: str | None = None

    def arguments(self) -> tuple[Any, ...]:
        """Return the tensors in order, the arguments of the torch operator."""
        return (
            self.dst,
            self.src,
            self.dst_index,
            self.src_row,
            self.step,
            self.extra_dst_index,
            self.extra_step,
        )


_DECODE_FIELDS = tuple(f.name for f in fields(DecodeProblem))
_PREFILL_FIELDS = tuple(f.name for f in fields(PrefillProblem))


def parse_decode(
    q: Any, k: Any, v: Any, state: Any, *, g: Any, beta: Any, a: Any, b: Any, A_log: Any, dt_bias: Any,
    scale: Any, use_qk_l2norm_in_kernel: Any, allow_neg_eigval: Any, state_v_first: Any, cu_seqlens: Any,
    max_seqlen: Any, read_index: Any, num_accepted: Any, ring_pos: Any, write_index: Any, intermediate: Any,
    intermediate_row: Any, parent: Any, write: Any, null_slot: Any, round_state: Any, exact_packet: Any,
    out: Any, backend: Any,
) -> DecodeProblem:  # fmt: skip
    """Check a call of `decode` without reading tensor contents; allocate `out` if it is None."""
    use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, round_state, exact_packet = check.flags(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, round_state=round_state, exact_packet=exact_packet,
    )  # fmt: skip
    check.backend(backend)
    addressing.write(write, round_state, exact_packet)
    dims = addressing.tokens(q, k, v)
    addressing.gates(g, beta, a, b, A_log, dt_bias, allow_neg_eigval, dims)
    addressing.packing(q, cu_seqlens, max_seqlen, dims)
    addressing.pool("state", q, state, ring_pos is not None, state_v_first, null_slot, dims)
    addressing.reading(read_index, num_accepted, ring_pos, dims)
    addressing.writing(write, write_index, ring_pos, dims)
    addressing.intermediate(intermediate, intermediate_row, parent, state_v_first, dims)
    addressing.out(q, v, out)
    addressing.places(
        "decode", q, k=k, v=v, state=state, g=g, beta=beta, a=a, b=b, A_log=A_log, dt_bias=dt_bias,
        read_index=read_index, num_accepted=num_accepted, ring_pos=ring_pos, write_index=write_index,
        intermediate=intermediate, intermediate_row=intermediate_row, parent=parent, out=out,
    )  # fmt: skip
    return DecodeProblem(
        q, k, v, state, g, beta, a, b, A_log, dt_bias, cu_seqlens, read_index, num_accepted, ring_pos,
        write_index, intermediate, intermediate_row, parent, v.new_empty(v.shape) if out is None else out,
        max_seqlen, addressing.scale(scale, dims), use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first,
        write, null_slot, round_state, exact_packet, backend,
    )  # fmt: skip


def one_state_per_row(problem: DecodeProblem) -> DecodeProblem:
    """Return the problem unchanged; raise ValueError unless the pool has one state for each row."""
    if problem.state.shape[0] != problem.N:
        raise ValueError(
            f"state: expected one state for each of B={problem.N} rows, got {list(problem.state.shape)}"
        )
    return problem


def parse_packed(
    mixed_qkv: Any,
    a: Any,
    b: Any,
    num_k_heads: Any,
    head_k_dim: Any,
    head_v_dim: Any,
    out: Any,
    *,
    is_dense: bool,
) -> tuple[Any, ...]:
    """Check the tensors of `decode_packed`; return views q, k, v, a, b and out (or None) shaped for `decode`.

    With is_dense each token is a row of its own, otherwise all tokens are in one packed batch row.
    """
    for name, size in (("num_k_heads", num_k_heads), ("head_k_dim", head_k_dim), ("head_v_dim", head_v_dim)):
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
            raise TypeError(f"{name}: expected an int, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")
    check.floating("mixed_qkv", mixed_qkv)
    dims: dict[str, int] = {}
    check.shape("mixed_qkv", mixed_qkv, "tokens columns", dims)
    for name, x in (("a", a), ("b", b)):
        check.floating(name, x)
        check.shape(name, x, "tokens HV", dims)
    keys, values = num_k_heads * head_k_dim, dims["HV"] * head_v_dim
    if dims["columns"] != 2 * keys + values:
        raise ValueError(
            f"mixed_qkv: expected 2 * {num_k_heads} * {head_k_dim} + {dims['HV']} * {head_v_dim} = "
            f"{2 * keys + values} columns, got {list(mixed_qkv.shape)}"
        )
    if out is not None:
        check.floating("out", out)
        check.shape("out", out, "tokens HV V", dims | {"V": head_v_dim})
    q, k, v = mixed_qkv.split([keys, keys, values], 1)
    q, k = q.unflatten(1, (num_k_heads, head_k_dim)), k.unflatten(1, (num_k_heads, head_k_dim))
    v = v.unflatten(1, (dims["HV"], head_v_dim))
    return tuple(None if x is None else x.unsqueeze(1 if is_dense else 0) for x in (q, k, v, a, b, out))


def parse_prefill(
    q: Any, k: Any, v: Any, state: Any, *, cu_seqlens: Any, g: Any, beta: Any, a: Any, b: Any, A_log: Any,
    dt_bias: Any, allow_neg_eigval: Any, scale: Any, use_qk_l2norm_in_kernel: Any, state_v_first: Any,
    batch_invariant: Any, state_index: Any, out_state_index: Any, has_initial_state: Any, update_state: Any,
    checkpoints: Any, checkpoint_every: Any, checkpoint_offsets: Any, snapshot_pos: Any, snapshot_index: Any,
    null_slot: Any, out: Any, backend: Any,
) -> PrefillProblem:  # fmt: skip
    """Check a call of `prefill` without reading tensor contents; allocate `out` if it is None."""
    use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, batch_invariant, update_state = check.flags(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, batch_invariant=batch_invariant, update_state=update_state,
    )  # fmt: skip
    check.backend(backend)
    dims = addressing.tokens(q, k, v)
    addressing.gates(g, beta, a, b, A_log, dt_bias, allow_neg_eigval, dims)
    dims["N"] = check.offsets("q", cu_seqlens, None, dims)
    addressing.pool("state", q, state, False, state_v_first, null_slot, dims)
    addressing.index("state_index", state_index, "N", dims)
    if out_state_index is not None:
        if not update_state:
            raise ValueError("out_state_index: expected None with update_state=False, got a tensor")
        addressing.index("out_state_index", out_state_index, "N", dims)
    if has_initial_state is not None:
        check.tensor("has_initial_state", has_initial_state)
        if has_initial_state.dtype != torch.bool:
            raise TypeError(f"has_initial_state: expected a bool tensor, got {has_initial_state.dtype}")
        check.shape("has_initial_state", has_initial_state, "N", dims)
    addressing.checkpoints(q, checkpoints, checkpoint_every, checkpoint_offsets, state_v_first, dims)
    if snapshot_pos is not None or snapshot_index is not None:
        addressing.index("snapshot_pos", snapshot_pos, "N", dims)
        addressing.index("snapshot_index", snapshot_index, "N", dims)
    addressing.out(q, v, out)
    addressing.places(
        "prefill", q, k=k, v=v, state=state, g=g, beta=beta, a=a, b=b, A_log=A_log, dt_bias=dt_bias,
        state_index=state_index, out_state_index=out_state_index, has_initial_state=has_initial_state,
        checkpoints=checkpoints, checkpoint_offsets=checkpoint_offsets, snapshot_pos=snapshot_pos,
        snapshot_index=snapshot_index, out=out,
        cu_seqlens=None if cu_seqlens.device.type == "cpu" else cu_seqlens,
    )  # fmt: skip
    return PrefillProblem(
        q, k, v, state, g, beta, a, b, A_log, dt_bias, cu_seqlens, state_index, out_state_index,
        has_initial_state, checkpoints, checkpoint_offsets, snapshot_pos, snapshot_index,
        v.new_empty(v.shape) if out is None else out, addressing.scale(scale, dims), use_qk_l2norm_in_kernel,
        allow_neg_eigval, state_v_first, batch_invariant, update_state, checkpoint_every, null_slot, backend,
    )  # fmt: skip


def parse_commit(
    dst: Any, src: Any, dst_index: Any, src_row: Any, step: Any, extra_dst_index: Any, extra_step: Any
) -> CommitProblem:
    """Check a call of `commit` without reading tensor contents."""
    check.floating("dst", dst)
    check.floating("src", src)
    if dst.dim() < 2:
        raise ValueError(f"dst: expected shape [L, slots, ...], got {list(dst.shape)}")
    if src.dim() != dst.dim() + 1 or src.shape[0] != dst.shape[0] or src.shape[3:] != dst.shape[2:]:
        rest = "".join(f", {size}" for size in dst.shape[2:])
        raise ValueError(f"src: expected shape [L={dst.shape[0]}, rows, T{rest}], got {list(src.shape)}")
    check.writable("dst", dst)
    dims: dict[str, int] = {}
    addressing.index("dst_index", dst_index, "n", dims)
    addressing.index("src_row", src_row, "n", dims)
    addressing.index("step", step, "n", dims)
    if extra_dst_index is not None or extra_step is not None:
        addressing.index("extra_dst_index", extra_dst_index, "n", dims)
        addressing.index("extra_step", extra_step, "n", dims)
    indices = {
        "dst_index": dst_index, "src_row": src_row, "step": step, "extra_dst_index": extra_dst_index,
        "extra_step": extra_step,
    }  # fmt: skip
    check.companions(dst, "dst", src=src, **indices)
    check.no_gradient("commit", dst=dst, src=src)
    return CommitProblem(dst, src, dst_index, src_row, step, extra_dst_index, extra_step)
