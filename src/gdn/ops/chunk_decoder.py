"""Decode with the bits of the chunked forward: compute a row's chunk again for each of its tokens."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn.notation import Decay, Keys, Offsets, PerHead, Q, State, Values
from gdn.ops.rule import chunk_gated_delta_rule
from gdn.problem import CHUNK, Problem, check_decoder, check_next_token, host_offsets, parse


class _Row(NamedTuple):
    """Say where the first tokens of a row are, and how many of them fill whole chunks."""

    batch_row: int
    first: int
    whole: int
    rest: int

    def take_whole(self, x: Tensor) -> Tensor:
        """Return the view of the tokens in whole chunks, [1, whole, ...]."""
        return x.narrow(0, self.batch_row, 1).narrow(1, self.first, self.whole)

    def take_rest(self, x: Tensor) -> Tensor:
        """Return the view of the tokens behind them, [rest, ...]."""
        return x.select(0, self.batch_row).narrow(0, self.first + self.whole, self.rest)


def _rows(p: Problem) -> list[_Row]:
    """Return the rows of a dense batch, or of packed sequences, whose offsets are read on the host."""
    bounds = [(row, 0, p.T) for row in range(p.B)]
    if p.cu_seqlens is not None:
        offsets = host_offsets(p.cu_seqlens, None, p.T, read_device=True)
        assert offsets is not None
        bounds = [(0, start, end) for start, end in pairwise(offsets)]
    return [
        _Row(row, start, (end - start) // CHUNK * CHUNK, (end - start) % CHUNK) for row, start, end in bounds
    ]


class ChunkDecoder:
    """Decode token by token with exactly the arithmetic of the chunked forward, for reinforcement learning.

    The log probabilities of a rollout by `decode` differ from those of the training forward in the last bits,
    since a packet of few tokens is computed otherwise than a chunk. A decoder holds each row's state at the
    start of its chunk and the tokens since, and computes the whole chunk for every token. The outputs of all
    calls together then have the bits of

        chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, batch_invariant=True, backend=backend)

    on the row's tokens, with or without gradients.

    Args:
        state    [B, HV, K, V] of the rows at their first token, or V first; it is copied, in the dtype of
                 the rule's states from the first call on
        backend  "eager" or "triton"; None: `triton` on a GPU, else `eager`. The training forward must name
                 the same. `hopper` scales a chunk by its last token, so that earlier tokens depend on it.
        options  those of `chunk_gated_delta_rule` on the gates, norms, scale and layout of the state:
                 scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, lower_bound,
                 use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first

    Bits:   a row's do not depend on the other rows. On `eager` on a CPU they rely on a BLAS that rounds each
            matrix of a batch as it does alone, as oneMKL does; elsewhere all operands have the same shapes.
    Raises: as the rule; TypeError for another option; ValueError for a token of other shapes, dtypes or gates
            than those before it. No row has changed then.
    Cost:   some 64 times the flop of `decode`, and twice its bytes of states and more. No call but `prefill`
            waits for the GPU, and the state is updated in place: from the second `decode` on, a call can be
            captured in a CUDA graph.

    Example:
        >>> import torch, gdn
        >>> q, k, v = (torch.randn(1, 70, 2, 16) for _ in range(3))
        >>> o, _ = gdn.chunk_gated_delta_rule(q, k, v, batch_invariant=True, use_qk_l2norm_in_kernel=True)
        >>> decoder = gdn.ChunkDecoder(torch.zeros(1, 2, 16, 16), use_qk_l2norm_in_kernel=True)
        >>> some = [decoder.prefill(q[:, :60], k[:, :60], v[:, :60])]
        >>> some += [decoder.decode(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1]) for i in range(60, 70)]
        >>> torch.equal(torch.cat(some, 1), o)
        True
    """

    def __init__(self, state: State, *, backend: str | None = None, **options: Any) -> None:
        check_decoder(state, backend, options)
        # written by later calls, which may be outside of inference mode
        with torch.inference_mode(False), torch.no_grad():
            self.state = state.detach().clone()
            self.count = torch.zeros(state.shape[0], dtype=torch.int64, device=state.device)
        self._options = options | {
            "backend": backend or ("triton" if state.is_cuda else "eager"), "batch_invariant": True,
            "output_final_state": True,
        }  # fmt: skip
        self._tokens: list[Tensor | None] = []  # q, k, v, g, beta of the rows' chunks, [B, C, ...]

    @torch.inference_mode(False)
    @torch.no_grad()
    def prefill(
        self, q: Q, k: Keys, v: Values, g: Decay | None = None, beta: PerHead | None = None,
        *, cu_seqlens: Offsets | None = None,
    ) -> Values:  # fmt: skip
        """Run the first tokens of each row, dense [B, T, ...] or packed; return o like the rule.

        The lengths are read on the host. Raises ValueError if a row has tokens already.
        """
        if self._tokens:
            raise ValueError("prefill: expected the first call of a decoder")
        given, B = [q, k, v, g, beta], self.state.shape[0]
        problem = parse(q, k, v, g, beta, cu_seqlens=cu_seqlens, **self._options)
        rows = _rows(problem)
        if len(rows) != B:
            raise ValueError(f"q: expected {B} rows as in state, got {len(rows)} in {list(q.shape)}")
        self.state = self.state.to(problem.state_dtype)
        pieces: list[tuple[_Row, Tensor]] = []
        if any(row.whole > 0 for row in rows):
            offsets = torch.tensor([0, *(row.whole for row in rows)], device=q.device).cumsum(0)
            part = [None if x is None else torch.cat([row.take_whole(x) for row in rows], 1) for x in given]
            outputs, final = self._run(part, cu_seqlens=offsets)
            self.state.copy_(final)
            pieces = list(zip(rows, outputs.split([row.whole for row in rows], 1), strict=True))
        held = [None if x is None else x.new_zeros(B, CHUNK, *x.shape[2:]) for x in given]
        for buffer, x in zip(held, given, strict=True):
            if buffer is not None and x is not None:
                for target, row in zip(buffer, rows, strict=True):
                    target[: row.rest].copy_(row.take_rest(x))
        outputs, _ = self._run(held)
        self.count.copy_(torch.tensor([row.rest for row in rows], device="cpu"))
        self._tokens = held
        # the dtype is that of autocast, where it is on
        o = torch.zeros_like(v, dtype=outputs.dtype)
        for row, piece in pieces:
            row.take_whole(o).copy_(piece)
        for row, piece in zip(rows, outputs, strict=True):
            row.take_rest(o).copy_(piece[: row.rest])
        return o

    @torch.inference_mode(False)
    @torch.no_grad()
    def decode(self, q: Q, k: Keys, v: Values, g: Decay | None = None, beta: PerHead | None = None) -> Values:
        """Run one more token of each row, [B, 1, ...]; return o [B, 1, HV, V]."""
        given = [q, k, v, g, beta]
        problem = parse(q, k, v, g, beta, initial_state=self.state, **self._options)
        check_next_token(problem, self._tokens)
        if not self._tokens:
            self._tokens = [None if x is None else x.new_zeros(len(x), CHUNK, *x.shape[2:]) for x in given]
            self.state = self.state.to(problem.state_dtype)
        place = torch.arange(CHUNK, device=q.device)
        for buffer, x in zip(self._tokens, given, strict=True):
            if buffer is not None and x is not None:
                lead = (..., *(None,) * (x.dim() - 2))
                # tokens of the chunk before are cleared: a NaN among them would reach this chunk as 0 NaN
                buffer.masked_fill_((place > self.count[:, None])[lead], 0)
                buffer.copy_(torch.where((place == self.count[:, None])[lead], x, buffer))
        o, final = self._run(self._tokens)
        o = o.gather(1, self.count[:, None, None, None].expand(-1, 1, *o.shape[2:]))
        # only a whole chunk moves the state: so does the forward
        is_whole = self.count == CHUNK - 1
        self.state.copy_(torch.where(is_whole[:, None, None, None], final, self.state))
        self.count.copy_(torch.where(is_whole, 0, self.count + 1))
        return o

    def _run(self, tokens: list[Tensor | None], **options: Any) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = tokens
        assert q is not None and k is not None and v is not None
        o, final = chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=self.state, **options, **self._options
        )
        assert final is not None
        return o, final
