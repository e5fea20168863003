"""Compute the gated delta rule on whole sequences, a part of the heads on each rank: the all-to-all form.

Every rank sends each other rank the heads that the other one owns, computes its own heads over all tokens,
and gets its tokens of all heads back. Each head is computed as on one device, so with `batch_invariant=True`
the bits are those of one device, unless `hopper` cuts a sequence by its length and the number of heads. It
moves more bytes than an exchange of states from some 256 tokens a rank on, and needs at least one key head a
rank.

All tensors of a call are sent before the first is waited for. In HBM each is copied once: before it is sent
to shards of heads, or after it has come back to shards of tokens (`gdn.distributed.cost.heads_copied`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from gdn.distributed import local
from gdn.distributed.collectives import Pending, all_to_all, start_all_to_all
from gdn.distributed.exchange import split_heads
from gdn.distributed.local import NAMES
from gdn.distributed.plan import Plan, index, make_plan
from gdn.distributed.redistribute import to_global_order, to_rank_order
from gdn.problem import Problem

Tensors: TypeAlias = Sequence[Tensor | None]


@dataclass(frozen=True)
class Heads:
    """Move tokens and states between shards of tokens and shards of heads.

    plans   the plan of every rank
    ranges  the key heads of every rank
    """

    plans: tuple[Plan, ...]
    rank: int
    group: ProcessGroup
    ranges: tuple[range, ...]

    @property
    def num_local(self) -> tuple[int, ...]:
        """Return the number of tokens of each rank."""
        return self.plans[0].table.num_local

    def heads_of(self, rank: int, ratio: int) -> range:
        """Return a rank's heads, where `ratio` of them go with each key head."""
        return range(self.ranges[rank].start * ratio, self.ranges[rank].stop * ratio)

    def widths(self, ratio: int) -> list[int]:
        """Return the number of heads of each rank, where `ratio` of them go with each key head."""
        return [len(self.heads_of(r, ratio)) for r in range(len(self.plans))]

    def to_heads(self, tensors: Tensors, ratios: Sequence[int]) -> list[Tensor | None]:
        """Return each tensor as [B, T, own heads, ...] from [B, local T, heads, ...] on each rank."""
        return _exchange(self._start_to_heads, tensors, ratios)

    def to_tokens(self, tensors: Tensors, ratios: Sequence[int]) -> list[Tensor | None]:
        """Return [B, local T, heads, ...] from [B, T, own heads, ...] on each rank: undo `to_heads`."""
        return _exchange(self._start_to_tokens, tensors, ratios)

    def _start_to_heads(self, x: Tensor, ratio: int) -> Pending:
        """Start to send each rank its heads of the local tokens: one pass over x in HBM, which packs them.

        Blocks arrive in the order of ranks. Where this is the order of tokens they are the result as they
        are; otherwise, and for B > 1, `wait` makes one more pass.
        """
        table, widths = self.plans[0].table, self.widths(ratio)
        B, n, _, *size = x.shape
        own, row = widths[self.rank], math.prod(size)
        counts = [B * n * w * row for w in widths]
        send = x.new_empty(x.numel())
        for block, part in zip(send.split(counts), x.split(widths, 2), strict=True):
            block.view(part.shape).copy_(part)
        got = [B * m * own * row for m in self.num_local]

        def arrange(flat: Tensor) -> Tensor:
            if B == 1 and table.is_in_rank_order:
                return flat.view(B, table.num_tokens, own, *size)
            blocks = zip(flat.split(got), self.num_local, strict=True)
            return to_global_order([block.view(B, m, own, *size) for block, m in blocks], table, 1)

        return start_all_to_all(send, got, counts, self.group).then(arrange)

    def _start_to_tokens(self, x: Tensor, ratio: int) -> Pending:
        """Start to send each rank its tokens of the own heads; `wait` makes one pass, which joins the heads.

        Where the tokens of each rank are one block of x, it is sent as it is; otherwise a pass packs it.
        """
        table, widths = self.plans[0].table, self.widths(ratio)
        B, _, own, *size = x.shape
        n, row = self.num_local[self.rank], math.prod(size)
        if B > 1 or (B == 1 and not table.is_in_rank_order):
            x = to_rank_order(x, table)
        got = [B * n * w * row for w in widths]

        def arrange(flat: Tensor) -> Tensor:
            blocks = zip(flat.split(got), widths, strict=True)
            return torch.cat([block.view(B, n, w, *size) for block, w in blocks], 2)

        counts = [B * m * own * row for m in self.num_local]
        return start_all_to_all(x.flatten(), got, counts, self.group).then(arrange)

    def rows_to_heads(self, rows: Tensor, is_first: bool, ratio: int) -> Tensor:
        """Return [N, own heads, ...] from the rows of local states where a sequence begins (or ends)."""
        counts = [len(border_rows(plan, is_first)) for plan in self.plans]
        mine = [row for row, _ in border_rows(self.plans[self.rank], is_first)]
        send = rows[index(mine, rows.device)].movedim(1, 0)
        widths = self.widths(ratio)
        own, row = widths[self.rank], math.prod(rows.shape[2:])
        got = all_to_all(
            send.flatten(), [own * c * row for c in counts], [w * len(mine) * row for w in widths], self.group
        )
        blocks = got.split([own * c * row for c in counts])
        whole = torch.cat([x.view(own, c, *rows.shape[2:]) for x, c in zip(blocks, counts, strict=True)], 1)
        order = [n for plan in self.plans for _, n in border_rows(plan, is_first)]
        out = whole.new_zeros(self.plans[0].num_sequences, own, *rows.shape[2:])
        out[index(order, rows.device)] = whole.movedim(0, 1)
        return out

    def rows_to_tokens(self, states: Tensor, is_first: bool, ratio: int) -> Tensor:
        """Return rows of local states from [N, own heads, ...]; zero where no sequence begins (or ends)."""
        own, size = states.shape[1], states.shape[2:]
        counts = [len(border_rows(plan, is_first)) for plan in self.plans]
        order = [n for plan in self.plans for _, n in border_rows(plan, is_first)]
        send = states[index(order, states.device)].flatten()
        widths = self.widths(ratio)
        plan, row = self.plans[self.rank], math.prod(size)
        mine = [row for row, _ in border_rows(plan, is_first)]
        got = all_to_all(
            send, [w * len(mine) * row for w in widths], [own * c * row for c in counts], self.group
        )
        blocks = got.split([w * len(mine) * row for w in widths])
        out = states.new_zeros(len(plan.pieces), sum(widths), *size)
        out[index(mine, states.device)] = torch.cat(
            [x.view(len(mine), w, *size) for x, w in zip(blocks, widths, strict=True)], 1
        )
        return out


def _exchange(
    start: Callable[[Tensor, int], Pending], tensors: Tensors, ratios: Sequence[int]
) -> list[Tensor | None]:
    """Start the all-to-all of each tensor, then wait for each: one is packed while another is on its way."""
    pending = [None if x is None else start(x, r) for x, r in zip(tensors, ratios, strict=True)]
    moved: list[Tensor | None] = []
    while pending:
        # the received blocks are freed as soon as they are joined
        one = pending.pop(0)
        moved.append(None if one is None else one.wait())
    return moved


def make_heads(plan: Plan, offsets: tuple[int, ...] | None, H: int, group: ProcessGroup) -> Heads:
    """Return the exchange of heads of a call that `check_heads` passes."""
    R = plan.table.num_ranks
    plans = tuple(make_plan(plan.table, offsets, plan.batch, r) for r in range(R))
    return Heads(plans, plan.rank, group, tuple(split_heads(H, R)))


def check_heads(H: int, R: int) -> None:
    """Raise ValueError where a rank would own no key head."""
    if R > H:
        raise ValueError(
            f"exchange: expected at most {H} ranks for {H} key heads, got {R}; 'owner' has no such limit"
        )


def border_rows(plan: Plan, is_first: bool) -> list[tuple[int, int]]:
    """Return (row of the local states, sequence) where a sequence begins, or ends."""
    return [
        (row, piece.sequence)
        for row, piece in enumerate(plan.pieces)
        if (piece.is_first if is_first else piece.is_last)
    ]


def rule(problem: Problem, heads: Heads) -> tuple[Tensor, Tensor | None]:
    """Return o and local states, with gradients. The problem has global offsets and local tokens and states.

    A row of the state whose sequence goes on elsewhere is zero: no rank computes the state at a border.
    """
    without = local.with_tensors(problem, (None,) * len(NAMES))
    return _Rule.apply(without, heads, *problem.differentiable)  # type: ignore[no-any-return]


class _Rule(torch.autograd.Function):
    """Differentiate `rule`."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, heads: Heads, *tensors: Tensor | None) -> Any:
        q, k, v, g, beta, A_log, dt_bias, state = tensors
        assert q is not None and v is not None
        ratio = v.shape[2] // q.shape[2]
        ratios = (1, 1, ratio, ratio, ratio)
        moved = heads.to_heads(tensors[:5], ratios)
        own = heads.heads_of(heads.rank, ratio)
        parameters = [None if x is None else x[own.start : own.stop] for x in (A_log, dt_bias)]
        rows = None if state is None else heads.rows_to_heads(state, True, ratio)
        whole = local.with_tensors(problem, (*moved, *parameters, rows))
        o, final, saved = local.forward(whole, any(ctx.needs_input_grad))
        ctx.problem, ctx.heads, ctx.ratios, ctx.num_heads = problem, heads, ratios, v.shape[2]
        ctx.save_for_backward(*whole.differentiable, *saved)
        ctx.set_materialize_grads(False)
        states = None if final is None else heads.rows_to_tokens(final, False, ratio)
        return *heads.to_tokens([o], [ratio]), states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None) -> tuple[Any, ...]:
        heads, (*_, ratio) = ctx.heads, ctx.ratios
        kept = ctx.saved_tensors  # read once: activation checkpointing unpacks each tensor once
        tensors, saved = kept[: len(NAMES)], kept[len(NAMES) :]
        whole = local.with_tensors(ctx.problem, tensors)
        plan, v, S = heads.plans[heads.rank], whole.v, whole.state_shape[2:]
        # a rank whose output is not used sends zeros: the other ranks wait for its part
        if do is None:
            do = v.new_zeros(v.shape[0], plan.num_local, ctx.num_heads, v.shape[3])
        (do,) = heads.to_heads([do], [ratio])
        if whole.output_final_state:
            if dS is None:
                dS = v.new_zeros(len(plan.pieces), ctx.num_heads, *S, dtype=whole.state_dtype)
            dS = heads.rows_to_heads(dS, False, ratio)
        *moved, dA_log, ddt_bias, rows = local.backward(whole, tuple(saved), do, dS)
        gradients = heads.to_tokens(moved, ctx.ratios)
        # the other ranks have the gradients of the other heads
        own = heads.heads_of(heads.rank, ratio)
        for x in (dA_log, ddt_bias):
            # dt_bias has an axis of key channels where each of them decays by itself
            around = (0, 0) * (0 if x is None else x.dim() - 1) + (own.start, ctx.num_heads - own.stop)
            gradients.append(None if x is None else torch.nn.functional.pad(x, around))
        gradients.append(None if rows is None else heads.rows_to_tokens(rows, True, ratio))
        needs = ctx.needs_input_grad[2:]
        return (None, None, *(x if need else None for x, need in zip(gradients, needs, strict=True)))
