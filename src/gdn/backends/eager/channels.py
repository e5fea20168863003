"""Compute the pairs of tokens of a chunk where each key channel decays by itself, exactly for any gate.

    A_ij = beta_i sum_c k_ic k_jc D_ijc, i > j;    P_ij = scale sum_c q_ic k_jc D_ijc, i >= j

D_ijc is e to the sum of g over the tokens j + 1 .. i of channel c. Pairs are grouped by level: at the level
of width w the chunk is cut into pieces of 2 w tokens, where i is in the second half and j in the first. Then
D is the product of the decay from the middle to i and the decay from j to the middle, and the pairs of a
piece are one matmul:

    (decay from the middle) [q; k]  times  ((decay to the middle) k)^T

Both factors are at most 1, and each exponent is a sum of terms of one sign, so nothing overflows and no
rounding error is amplified, whatever g is: a reset of one channel, or thousands of nats a token.

The forward multiplies the rows of a level, in place, by the decays through pieces of w tokens, and so gets
those of width 2 w: a piece has one exponent per channel, a token none of its own. The backward needs the
decays of each level by themselves, as e to sums, where those of width 2 w come from those of width w by one
addition. It adds up dg by the same levels, from the whole chunk down to single tokens, and subtracts nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn.backends.eager.blocks import Block
from gdn.backends.eager.chunks import Chunks, StateGradients, bmm, load_heads, load_rows, solve_tril
from gdn.problem import Problem


class Range(NamedTuple):
    """Hold what keeps the operands and results of matmuls out of the subnormal numbers of a dtype.

    A CPU multiplies subnormal numbers a hundred times slower. A decay below e^lowest counts as 0, operands of
    pairs are multiplied by `scale`, a power of 2, and pairs below `least` count as 0.
    """

    lowest: float
    scale: float
    least: float


RANGES = {
    torch.float32: Range(-70.0, 2.0**38, 2.0**-100),
    torch.float64: Range(-600.0, 2.0**400, 2.0**-860),
}


@dataclass(frozen=True)
class Level:
    """Hold the operands of the pairs of one level: n pieces of 2 w tokens a chunk."""

    decays: Tensor  # [P, H, n, 2, w, K] to the middle in the first half, from the middle in the second
    rows: Tensor  # [P, H, n, 2, w, K] q and k of the second halves, with their decays, times the scale
    columns: Tensor  # [P, H, n, w, K] k of the first halves, with their decays, times the scale
    scale: float

    @property
    def w(self) -> int:
        return self.columns.shape[3]

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x [..., C, D] of the first and of the second halves, [..., n, w, D] each, as views."""
        first, second = x.unflatten(-2, (-1, 2, self.w)).unbind(-3)
        return first, second


class Pairs(NamedTuple):
    """Hold the pairs of tokens of a block, and its rows with their decays."""

    products: Tensor  # [P, H, 2, C, C] of q, and below the diagonal of k, with k, decayed; zero above it
    rows_in: Tensor  # [P, H, 2, C, K] q and k with the decay from the chunk's start to the token
    rows_out: Tensor  # [P, H, C, K] k with the decay from the token to the chunk's end
    chunk_decay: Tensor  # [P, H, K] through the chunk
    is_mild: bool  # no factor and no product is near the subnormal numbers


class Decays(NamedTuple):
    """Hold what the backward reads of a block besides its pairs."""

    decay_in: Tensor  # [P, H, C, K] from the chunk's start to the token
    decay_out: Tensor  # [P, H, C, K] from the token to the chunk's end
    levels: Sequence[Level]  # of width 1, 2, 4, ...


@dataclass(frozen=True)
class ChannelChunks(Chunks):
    """Hold a block with a decay per key channel, whose rows hold the decays; H is HV, and r is 1."""

    has_row_factors: ClassVar[bool] = False
    pairs: Pairs
    decays: Decays | None  # None in a forward

    def scores(self) -> Tensor:
        return self.pairs.products[:, :, :1]

    def solve(self) -> Tensor:
        A_inv = solve_tril(self.pairs.products[:, :, 1:] * self.beta)
        if self.pairs.is_mild:
            return A_inv
        # a product of pairs may be subnormal, and the matmul with A_inv slow
        return F.hardshrink(A_inv, RANGES[A_inv.dtype].least)

    def chunk_decay_bwd(self, SdS: Tensor, i: slice) -> Tensor:
        return SdS.sum(-1) * self.chunk_decay[i, ..., 0].transpose(2, 3)

    def scores_bwd(self, v_new: Tensor, Y: Tensor, t: StateGradients) -> tuple[Tensor, Tensor]:
        """Implement `Chunks.scores_bwd`, with dP = do v_new^T and dA = -dr v_new^T below the diagonal."""
        C, decays = self.C, self.decays
        assert decays is not None
        E = bmm(Y[:, :, 0], v_new[:, :, 0].mT).unflatten(2, (2, C))  # [P, H, 2, C, C]
        Eq, Ek = E.unbind(2)
        # no level holds a pair above the diagonal, and the products of k there are zero
        Ek.neg_()
        t.dbeta.add_((Ek * self.pairs.products[:, :, 1]).sum(-1).unsqueeze(2))
        Ek.mul_(self.beta[:, :, 0])
        # the rows' own decays first, and the gradient of the log of each: before and after are of g's sums
        before = _along(self.rows_in, t.drows_in)
        before[:, :, -1] += t.d_through[:, :, 0]
        after = self.rows_out * t.drows_out
        dX = t.drows_in.unflatten(2, (2, C)).mul_(decays.decay_in.unsqueeze(2))
        dq, dk = dX.unbind(2)
        dk.addcmul_(t.drows_out, decays.decay_out)
        for level in reversed(decays.levels):
            before, after = _sums_bwd(level, before, after)
            d = _place_of(E, level.w).permute(0, 1, 5, 2, 3, 4).flatten(3, 4)  # [P, H, n, 2w, w]
            rows = level.rows.flatten(3, 4)
            drows = bmm(d, level.columns).unflatten(3, (2, level.w))
            dcolumns = bmm(d.mT, rows)
            to_middle, from_middle = level.decays.unbind(3)
            # rows and columns have the factor `scale`, so a product of one of them and a decay has it, too
            unscale = 1 / level.scale
            first, second = level.halves(dX)
            first[:, :, 1].addcmul_(dcolumns, to_middle, value=unscale)
            second.addcmul_(drows.transpose(2, 3), from_middle.unsqueeze(2), value=unscale)
            level.halves(after)[0].addcmul_(dcolumns, level.columns, value=unscale**2)
            level.halves(before)[1].add_(drows.mul_(level.rows).sum(3), alpha=unscale**2)
        # a token's own pair has no decay
        own = Eq.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dq.addcmul_(own, self.k)
        dk.addcmul_(own, self.q)
        # the sums over single tokens are g itself
        return dX.flatten(2, 3), before.unsqueeze(2)


def load_channel_chunks(
    p: Problem, block: Block, g: Tensor, beta: Tensor, for_backward: bool
) -> ChannelChunks:
    """Load a block: normalised q and k, v, beta, rows, and the products of all pairs."""
    X, rstd = load_rows(p, block)
    C = X.shape[2] // 2
    halves = X.unflatten(2, (2, C))
    g_block = load_heads(p, block, g)[:, :, 0]
    decays = None
    if for_backward:
        pairs, decays = compute_levels(halves, g_block)
    else:
        pairs = compute_products(halves, g_block)
    one = torch.ones((), dtype=X.dtype, device=X.device).expand(X.shape[0], X.shape[1], 1, C, 1)
    return ChannelChunks(
        X=X,
        rstd=rstd,
        v=load_heads(p, block, p.v),
        beta=load_heads(p, block, beta[..., None]),
        rows_in=pairs.rows_in.flatten(2, 3),
        rows_out=pairs.rows_out,
        start_decay=one,
        end_decay=one,
        chunk_decay=pairs.chunk_decay[..., None, None],
        pairs=pairs,
        decays=decays,
    )


def compute_products(X: Tensor, g: Tensor) -> Pairs:
    """Return the pairs of X [P, H, 2, C, K], q above k, and g [P, H, C, K], for a forward."""
    lowest, scale, least = RANGES[g.dtype]
    sums = [g]  # over pieces of 1, 2, 4, ..., C tokens
    while sums[-1].shape[2] > 1:
        first, second = sums[-1].unflatten(2, (-1, 2)).unbind(3)
        sums.append(first + second)
    mild_sums = _count_mild(sums, lowest)
    is_mild = mild_sums == len(sums)
    scale = 1.0 if is_mild else scale
    decays = _exp(g, lowest, mild_sums > 0, torch.empty_like(g))
    # q and k of a token side by side: the second half of each piece is one matrix, so BLAS reads it in place
    rows = torch.empty(*g.shape[:3], 2, g.shape[3], dtype=X.dtype, device=X.device)
    torch.mul(X.transpose(2, 3), (decays if is_mild else decays * scale).unsqueeze(3), out=rows)
    columns = X[:, :, 1] * scale
    products = torch.zeros(*X.shape[:3], X.shape[3], X.shape[3], dtype=X.dtype, device=X.device)
    for level in range(len(sums) - 1):
        w = 1 << level
        second = rows.unflatten(2, (-1, 2, w))[:, :, :, 1]  # [P, H, n, w, 2, K]
        first = columns.unflatten(2, (-1, 2, w))[:, :, :, 0]  # [P, H, n, w, K]
        values = bmm(second.flatten(3, 4), first.mT).unflatten(3, (w, 2))
        _place_of(products, w).copy_(values.permute(0, 1, 4, 3, 5, 2))
        if level > 0:
            decays = _exp(sums[level], lowest, level < mild_sums, decays[:, :, : sums[level].shape[2]])
        through_first, through_second = decays.unflatten(2, (-1, 2)).unbind(3)
        second.mul_(through_first[:, :, :, None, None])
        first.mul_(through_second[:, :, :, None])
        if level + 1 >= mild_sums:
            for x in (second, first):
                torch.ops.aten.hardshrink.out(x, math.exp(lowest) * scale, out=x)
    if not is_mild:
        products = F.hardshrink(products, least * scale**2).mul_(scale**-2)
        columns.mul_(1 / scale)
    _place_own_pairs(products, X)
    rows_in = torch.mul(rows.transpose(2, 3), 1 / scale, out=torch.empty_like(X))
    chunk_decay = _exp(sums[-1], lowest, is_mild, sums[-1])[:, :, 0]
    return Pairs(products, rows_in, columns, chunk_decay, is_mild)


def compute_levels(X: Tensor, g: Tensor) -> tuple[Pairs, Decays]:
    """Return the pairs of X [P, H, 2, C, K], q above k, and g [P, H, C, K], and the decays of each level."""
    lowest, scale, least = RANGES[g.dtype]
    # a chunk that decays less in every channel has no smaller factor
    is_mild = _count_mild([g.sum(2)], lowest) > 0
    scaled, scale = (X, 1.0) if is_mild else (X * scale, scale)
    products = torch.zeros(*X.shape[:3], X.shape[3], X.shape[3], dtype=X.dtype, device=X.device)
    # sums over the tokens of a piece up to this one, and over those after it; pieces of one token first
    before, after, levels, w = g.clone(), torch.zeros_like(g), [], 1
    while w < g.shape[2]:
        befores, afters = (x.unflatten(2, (-1, 2, w)) for x in (before, after))
        decays = torch.empty_like(befores)
        to_middle, from_middle = decays.unbind(3)
        _exp(afters[:, :, :, 0], lowest, is_mild, to_middle)
        _exp(befores[:, :, :, 1], lowest, is_mild, from_middle)
        second = scaled.unflatten(3, (-1, 2, w))[:, :, :, :, 1].transpose(2, 3)
        rows = torch.empty(second.shape, dtype=X.dtype, device=X.device)
        torch.mul(second, from_middle.unsqueeze(3), out=rows)
        columns = scaled[:, :, 1].unflatten(2, (-1, 2, w))[:, :, :, 0] * to_middle
        # at once, while rows and columns are in the CPU cache
        values = bmm(rows.flatten(3, 4), columns.mT).unflatten(3, (2, w))
        if not is_mild:
            values = F.hardshrink(values, least * scale**2).mul_(scale**-2)
        _place_of(products, w).copy_(values.permute(0, 1, 3, 4, 5, 2))
        levels.append(Level(decays, rows, columns, scale))
        whole = befores[..., -1:, :]  # the sum over each half
        afters[:, :, :, 0] += whole[:, :, :, 1]
        befores[:, :, :, 1] += whole[:, :, :, 0]
        w *= 2
    _place_own_pairs(products, X)
    decay_in, decay_out = (_exp(x, lowest, is_mild, x) for x in (before, after))
    rows_in, rows_out = X * decay_in.unsqueeze(2), X[:, :, 1] * decay_out
    # g is zero past a short chunk's end, so the last row is the decay of the whole chunk
    pairs = Pairs(products, rows_in, rows_out, decay_in[:, :, -1], is_mild)
    return pairs, Decays(decay_in, decay_out, levels)


def _count_mild(sums: Sequence[Tensor], lowest: float) -> int:
    """Return how many of the sums, each of pieces of the one before, have no value below `lowest`.

    It is 0 where no sum may be read: the host would wait for the queue of a device.
    """
    count = len(sums) if sums[0].device.type == "cpu" and sums[0].numel() > 0 else 0
    while count > 0 and not float(sums[count - 1].amin()) >= lowest:
        count -= 1
    return count


def _place_of(pairs: Tensor, w: int) -> Tensor:
    """Return the pairs of the level of width w [P, H, 2, w, w, n] in pairs [P, H, 2, C, C], as a view."""
    n = pairs.shape[-1] // (2 * w)
    x = pairs.unflatten(-1, (n, 2, w)).unflatten(3, (n, 2, w))  # [P, H, 2, n, 2, w, n, 2, w]
    return x[:, :, :, :, 1, :, :, 0].diagonal(dim1=3, dim2=5)


def _place_own_pairs(products: Tensor, X: Tensor) -> None:
    """Write the products of each token's q and k, which do not decay, to the diagonal."""
    products[:, :, 0].diagonal(dim1=-2, dim2=-1).copy_((X[:, :, 0] * X[:, :, 1]).sum(-1))


def _exp(sums: Tensor, lowest: float, is_mild: bool, out: Tensor) -> Tensor:
    """Write e^sums to `out`, 0 below `lowest`; is_mild: no sum is lower."""
    if is_mild:
        return torch.exp(sums, out=out)
    # exp is fifty times slower where it underflows
    torch.clamp(sums, min=lowest - 1, out=out)
    return torch.threshold_(out.exp_(), math.exp(lowest), 0.0)


def _sums_bwd(level: Level, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Pass the gradients of the sums over pieces of 2 w tokens, in place, to those over pieces of w."""
    befores, afters = (x.unflatten(2, (-1, 2, level.w)) for x in (before, after))
    to_first = befores[:, :, :, 1].sum(3)
    befores[:, :, :, 1, -1] += afters[:, :, :, 0].sum(3)
    befores[:, :, :, 0, -1] += to_first
    return before, after


def _along(rows: Tensor, drows: Tensor) -> Tensor:
    """Return the sum over q and k of rows times drows [P, H, C, K], from [P, H, 2C, K]."""
    q, k = (rows * drows).unflatten(2, (2, -1)).unbind(2)
    return q + k
