"""Hold one block of chunks of the rule, and view, multiply and allocate its tensors.

Shapes: R, M the block's grid, P = R M, H key heads, r value heads per key head. A decay per key channel has
rows of its own for each value head: q and k are repeated before, so H is HV and r is 1.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gdn.backends.eager.blocks import Block
from gdn.problem import CHUNK, Problem


@dataclass(frozen=True)
class Chunks:
    """Hold one block of a problem, in the computing dtype: what the passes over the states read.

    S is multiplied by the rows that enter a chunk, q above k, and takes up the rows that leave it. A decay
    per head is a factor beside both; a decay per key channel is in the rows, and these factors are 1.
    """

    X: Tensor  # [P, H, 2C, K] q above k, normalised
    rstd: Tensor | None  # [P, H, 2C, 1] 1 / norm of their rows
    v: Tensor  # [P, H, r, C, V]
    beta: Tensor  # [P, H, r, C, 1]
    rows_in: Tensor  # [P, H, 2C, K] rows of q above those of k that enter
    rows_out: Tensor  # [P, H, C, K] rows of k that leave
    start_decay: Tensor  # [P, H, r, C, 1] decay of the rows that enter from the chunk's start
    end_decay: Tensor  # [P, H, r, C, 1] decay of the rows that leave to the chunk's end
    chunk_decay: Tensor  # [P, H, 1 or K, r, 1] decay of S through the chunk
    has_row_factors: ClassVar[bool] = True  # start_decay and end_decay are not 1

    @property
    def C(self) -> int:
        return self.v.shape[3]

    @property
    def q(self) -> Tensor:
        return self.X[:, :, : self.C]

    @property
    def k(self) -> Tensor:
        return self.X[:, :, self.C :]

    @property
    def rows_of_q(self) -> Tensor:
        return self.rows_in[:, :, : self.C]

    @property
    def rows_of_k(self) -> Tensor:
        return self.rows_in[:, :, self.C :]

    def scores(self) -> Tensor:
        """Return P / scale [P, H, r, C, C], the products of q and k with their decays, else 0."""
        raise NotImplementedError

    def solve(self) -> Tensor:
        """Return A_inv = (I + A)^-1 [P, H, r, C, C]."""
        raise NotImplementedError

    def chunk_decay_bwd(self, SdS: Tensor, i: slice) -> Tensor:
        """Return the gradient of the log of chunk_decay from S dS [M, H, r, K, V] of the chunks i."""
        raise NotImplementedError

    def scores_bwd(self, v_new: Tensor, Y: Tensor, t: "StateGradients") -> tuple[Tensor, Tensor]:
        """Return dX [P, H, 2C, K] and dg [P, H, r, C, 1 or K]; add the rest of its gradient to t.dbeta.

        t: the gradients that came through the states; its tensors may be overwritten.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class StateGradients:
    """Hold the gradients of a block that came through the states."""

    drows_in: Tensor  # [P, H, 2C, K]
    drows_out: Tensor  # [P, H, C, K]
    dbeta: Tensor  # [P, H, r, C]
    row_dots: Tensor  # [P, H, r, 2C] <row, gradient of the row> of the rows that enter, but for beta
    out_dots: Tensor  # [P, H, C, r V] products of rows that leave with dS and v_new, summed over V: <k, dk>
    d_through: Tensor  # [P, H, r] or [P, H, r, K] gradient of the log of chunk_decay


def load_rows(p: Problem, block: Block) -> tuple[Tensor, Tensor | None]:
    """Return X = [q; k] [P, H, 2C, K] of a block, normalised, and 1 / norm of its rows."""
    q, k = block.take(p.q), block.take(p.k)  # [R, M, C, H, K]
    C, dtype = q.shape[2], p.state_dtype
    X = torch.empty(q.shape[0] * q.shape[1], p.H, 2 * C, p.K, dtype=dtype, device=p.device)
    if not p.use_qk_l2norm_in_kernel:
        X[:, :, :C] = heads_first(q.to(dtype, copy=True))
        X[:, :, C:] = heads_first(k.to(dtype, copy=True))
        return X, None
    # the norms read tokens in memory order: long contiguous reads, and the next pass finds them in cache
    norms = [torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype) for x in (q, k)]
    rstd = torch.cat([heads_first(x) for x in norms], dim=2).square_().add_(1e-6).rsqrt_()
    torch.mul(heads_first(q), rstd[:, :, :C], out=X[:, :, :C])
    torch.mul(heads_first(k), rstd[:, :, C:], out=X[:, :, C:])
    return X, rstd


def heads_first(x: Tensor) -> Tensor:
    """Return x [R, M, C, H, D] as [P, H, C, D], a view where the grid allows it."""
    return x.flatten(0, 1).transpose(1, 2)


def load_heads(p: Problem, block: Block, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a block's tokens of x [B, T, HV, D] as [P, H, r, C, D] in the computing dtype.

    It is a copy in memory order: reading tokens head by head, 0.5 KB at a time, takes three times as long.
    """
    return heads_first(block.take(x).to(dtype or p.state_dtype, copy=True)).unflatten(1, (p.H, -1))


def allocate_result(p: Problem, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a result over tokens or chunks; zeros where not all of it may be written (packed, T <= 32)."""
    make = torch.empty if p.cu_seqlens is None and p.T > CHUNK // 2 else torch.zeros
    return make(shape, dtype=dtype, device=p.device)


def view_tokens(x: Tensor, block: Block) -> Tensor:
    """Return x [P, H, r, C, D] as [R, M, C, HV, D], a view."""
    return x.flatten(1, 2).transpose(1, 2).unflatten(0, block.grid)


def split_heads(x: Tensor, p: Problem) -> Tensor:
    """Return x [P, H, L, r V] as [P, H, L, r, V], a view: the value heads as an axis."""
    return x.unflatten(-1, (-1, p.V))


def split_heads_first(x: Tensor, p: Problem) -> Tensor:
    """Return x [P, H, L, r V] as [P, H, r, L, V], a view: the value heads as an axis before the rows."""
    return x.unflatten(-1, (-1, p.V)).transpose(2, 3)


def allocate_like(x: Tensor) -> Tensor:
    """Allocate a contiguous tensor of x's shape."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def bmm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b over equal leading dims, as one batch."""
    lead = a.shape[:-2]
    x, y = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
    if out is None:
        return torch.bmm(x, y).view(*lead, a.shape[-2], b.shape[-1])
    torch.bmm(x, y, out=out.view(-1, *out.shape[-2:]))
    return out


def solve_tril(A: Tensor) -> Tensor:
    """Return (I + A)^-1, reading A below the diagonal only."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return torch.linalg.solve_triangular(A, eye.expand_as(A), upper=False, unitriangular=True)


def baddbmm(acc: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> None:
    """Compute acc <- beta acc + alpha a @ b in place, over equal leading dims."""
    x, y = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
    acc.view(-1, *acc.shape[-2:]).baddbmm_(x, y, alpha=alpha, beta=beta)
