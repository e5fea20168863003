"""Compute the pairs of tokens of a chunk where a decay is of a head: one factor beside products of q and k.

With D_ij = e^(G_i - G_j) for i >= j, A = beta D k k^T below the diagonal and P = scale D q k^T. Value heads
that share a key head share these products, so q and k are never repeated.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gdn.backends.eager.blocks import Block
from gdn.backends.eager.chunks import Chunks, StateGradients, baddbmm, bmm, load_heads, load_rows, solve_tril
from gdn.problem import Problem


@dataclass(frozen=True)
class HeadChunks(Chunks):
    """Hold a block with a decay per head; its rows are q and k."""

    D: Tensor  # [P, H, r, C, C] e^(G_i - G_j) for i >= j, else 0
    XK: Tensor  # [P, H, 2C, C] [q; k] k^T

    @property
    def qk(self) -> Tensor:
        """Return q k^T [P, H, 1, C, C]."""
        return self.XK[:, :, None, : self.C]

    @property
    def kk(self) -> Tensor:
        """Return k k^T [P, H, 1, C, C]."""
        return self.XK[:, :, None, self.C :]

    def scores(self) -> Tensor:
        return self.D * self.qk

    def solve(self) -> Tensor:
        # A is one new tile per value head, up to 16 KB in fp32: beta multiplies it in place
        return solve_tril((self.D * self.kk).mul_(self.beta))

    def chunk_decay_bwd(self, SdS: Tensor, i: slice) -> Tensor:
        return SdS.sum((-1, -2)) * self.chunk_decay[i, :, 0, :, 0]

    def scores_bwd(self, v_new: Tensor, Y: Tensor, t: StateGradients) -> tuple[Tensor, Tensor]:
        """Implement `Chunks.scores_bwd`.

        d(D q k^T) = do v_new^T and dA = -dr v_new^T below the diagonal. Every g_t with j < t <= i decays pair
        (i, j), so dg_t is a sum over i >= t and then over j < t, without cancellation.
        """
        dG = self._state_dG(t)
        # do v_new^T and dr v_new^T in one BLAS call of 2 C = 128 rows
        E = bmm(Y, v_new.mT).unflatten(3, (2, self.C)).mul_(self.D[:, :, :, None])  # [P, H, r, 2, C, C]
        Eq, Ek = E.unbind(3)
        Ek.neg_().diagonal(dim1=-2, dim2=-1).zero_()
        pairs = Ek * self.kk
        t.dbeta.add_(pairs.sum(-1))
        pairs.mul_(self.beta).addcmul_(Eq, self.qk)
        Ek.mul_(self.beta)
        dXK = (E[:, :, 0] if E.shape[2] == 1 else E.sum(2)).flatten(2, 3)
        dX, dk = t.drows_in, t.drows_out
        baddbmm(dX, dXK, self.k)
        baddbmm(dk, dXK.mT, self.X)
        dX[:, :, self.C :] += dk
        # the sum over i >= t is a BLAS call with a triangle of ones; tril_ keeps j < t
        upper = torch.ones(self.C, self.C, dtype=E.dtype, device=E.device).triu_()
        dg = bmm(upper.expand_as(pairs), pairs).tril_(-1).sum(-1).double()
        # g_t is a term of G of token t and of every later token of the chunk: add the sum of their dG
        return dX, dg.add_(dG.flip(-1).cumsum(-1).flip(-1))[..., None]

    def _state_dG(self, t: StateGradients) -> Tensor:
        """Return dG [P, H, r, C] through the states in float64: its terms nearly cancel in dg, its sums."""
        d_out = t.out_dots.unflatten(-1, (-1, self.v.shape[4])).sum(-1).transpose(2, 3)[..., :-1].double()
        dG = t.row_dots[..., : self.C].double() + self.beta[..., 0] * t.row_dots[..., self.C :]
        # e^(G_C - G_t) is 1 at the last token: its gradient, + in G_C and - in G_t, is left out there
        dG[..., :-1] -= d_out
        dG[..., -1] += t.d_through + d_out.sum(-1)
        return dG


def load_head_chunks(p: Problem, block: Block, g: Tensor, beta: Tensor) -> HeadChunks:
    """Load a block: normalised q and k, v, beta, the decays, and the products of q, k with k."""
    X, rstd = load_rows(p, block)
    C, dtype = X.shape[2] // 2, p.state_dtype
    G = load_heads(p, block, g, g.dtype).cumsum(3)  # [P, H, r, C, 1]
    # g is zero past a short chunk's end, so the last row of G is always G_C
    end = G[:, :, :, -1:]
    # clamped on both sides: no exponent is positive, and exp is ten times slower where it underflows
    D = (G - G.mT).to(dtype).clamp_(-104 if dtype == torch.float32 else -746, 0).exp_().tril_()
    return HeadChunks(
        X=X,
        rstd=rstd,
        v=load_heads(p, block, p.v),
        beta=load_heads(p, block, beta[..., None]),
        rows_in=X,
        rows_out=X[:, :, C:],
        start_decay=G.exp().to(dtype),
        end_decay=(end - G).exp().to(dtype),
        chunk_decay=end.exp().to(dtype).transpose(2, 3),
        D=D,
        # q k^T and k k^T in one BLAS call of 2 C = 128 rows
        XK=bmm(X, X[:, :, C:].mT),
    )
