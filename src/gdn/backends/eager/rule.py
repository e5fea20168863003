"""Compute the chunked rule with plain PyTorch: batched matmuls, block by block, and a written backward.

With X = [q; k] of a chunk, D_ij = e^(G_i - G_j) for i >= j, S the state that enters it, and A = beta D k k^T
below the diagonal:

    v_new = (I + A)^-1 beta (v - e^G k S)
    o     = scale (e^G q S + (D q k^T) v_new)
    S    <- e^(G_C) S + k^T (e^(G_C - G) v_new)

Value heads that share a key head are columns of one matmul, so q and k are never repeated. Shapes: R, M the
block's grid, P = R M, H key heads, r value heads per key head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gdn.backends.backend import Gradients, Saved, Shape
from gdn.backends.eager.alignment import align_start, zero_aligned_rows
from gdn.backends.eager.blocks import Block, Step, plan_blocks
from gdn.backends.eager.gate import activate, activate_bwd
from gdn.problem import CHUNK, RESET, Problem


@dataclass(frozen=True)
class Chunks:
    """Hold one block of a problem, in the computing dtype."""

    X: Tensor  # [P, H, 2C, K] q above k, normalised
    rstd: Tensor | None  # [P, H, 2C, 1] 1 / norm of their rows
    v: Tensor  # [P, H, r, C, V]
    beta: Tensor  # [P, H, r, C, 1]
    start_decay: Tensor  # e^G           [P, H, r, C, 1] decay from the chunk's start
    end_decay: Tensor  # e^(G_C - G)    [P, H, r, C, 1] decay to the chunk's end
    chunk_decay: Tensor  # e^(G_C)    [P, H, 1, r, 1] decay through the chunk
    D: Tensor  # [P, H, r, C, C] e^(G_i - G_j) for i >= j, else 0
    XK: Tensor  # [P, H, 2C, C] [q; k] k^T

    @property
    def C(self) -> int:
        return self.D.shape[-1]

    @property
    def q(self) -> Tensor:
        return self.X[:, :, : self.C]

    @property
    def k(self) -> Tensor:
        return self.X[:, :, self.C :]

    @property
    def qk(self) -> Tensor:
        """Return q k^T [P, H, 1, C, C]."""
        return self.XK[:, :, None, : self.C]

    @property
    def kk(self) -> Tensor:
        """Return k k^T [P, H, 1, C, C]."""
        return self.XK[:, :, None, self.C :]


def chunk_forward(problem: Problem, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
    """Implement `Backend.chunk_forward`: about 6 K V + 4 C (K + V) flop per token and value head."""
    p = problem
    g, beta = activate(p)
    o = _allocate_result(p, p.v.shape, p.v.dtype)
    saved = Saved(*(_allocate_result(p, *s) if s and save else None for s in saves(p)))
    plan = plan_blocks(p)
    S = _initial_states(p, p.initial_state, plan.order)
    for block in plan.blocks:
        c = _load_block(p, block, g, beta)
        # A = beta D k k^T in one new tile per value head, up to 16 KB in fp32: beta multiplies it in place
        A_inv = _solve_tril((c.D * c.kk).mul_(c.beta))
        XS, v_new = _forward_states(p, block, c, A_inv, S, saved.S_in)
        # e^G q S is the accumulator of the BLAS call for D q k^T v_new: no further pass adds the two
        o_block = torch.mul(c.start_decay, _split_heads_first(XS[:, :, : c.C], p), out=_allocate_like(v_new))
        _baddbmm(o_block, c.D * c.qk, v_new, alpha=p.scale, beta=p.scale)
        block.put(o, _view_tokens(o_block, block))
        if saved.A_inv is not None and saved.v_new is not None:
            block.save_chunks(saved.A_inv[..., : c.C, : c.C], A_inv.flatten(1, 2))
            block.save_chunks(saved.v_new[..., : c.C, :], v_new.flatten(1, 2))
    return o, _final_states(p, S, plan.order) if p.output_final_state else None, saved


def _forward_states(
    p: Problem, block: Block, c: Chunks, A_inv: Tensor, S: Tensor, S_in: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Advance S through the block, step by step; returns X S [P, H, 2C, r V] and v_new [P, H, r, C, V]."""
    # r = beta v - (beta e^G) k S: factors of the whole block at once, so a step adds one addcmul
    beta_v, kS_factor = torch.mul(c.beta, c.v, out=_allocate_like(c.v)), -c.beta * c.start_decay
    XS = torch.empty(*c.X.shape[:3], S.shape[-1], dtype=S.dtype, device=S.device)
    v_new, decayed_v = _allocate_like(c.v), _allocate_columns(c)
    for step in block.steps:
        i = slice(step.start, step.stop)
        S_i = S[step.rows]
        if S_in is not None:
            block.save_step(S_in, step, _split_heads_first(S_i, p).flatten(1, 2))
        # q S and k S in one BLAS call: a matmul of 64 rows runs at half the speed of one of 128
        _bmm(c.X[i], S_i, out=XS[i])
        kS = _split_heads_first(XS[i, :, c.C :], p)
        _bmm(A_inv[i], torch.addcmul(beta_v[i], kS_factor[i], kS, out=beta_v[i]), out=v_new[i])
        torch.mul(c.end_decay[i], v_new[i], out=_split_heads_first(decayed_v[i], p))
        # in place: the BLAS call accumulates onto the decayed S, without a temporary of its size
        _apply_decay(S_i, c.chunk_decay[i])
        _baddbmm(S_i, c.k[i].mT, decayed_v[i])
        _store_states(S, step, S_i)
    return XS, v_new


def saves(problem: Problem) -> tuple[Shape | None, ...]:
    """Return the specs of Saved, in the computing dtype; summing G again is cheaper than saving it."""
    p, dtype = problem, problem.state_dtype
    return (
        None,
        ((p.num_chunks, p.HV, CHUNK, CHUNK), dtype),
        ((p.num_chunks, p.HV, p.K, p.V), dtype),
        ((p.num_chunks, p.HV, CHUNK, p.V), dtype),
        None,
        None,
    )


def chunk_backward(problem: Problem, saved: Saved, do: Tensor | None, dS: Tensor | None) -> Gradients:
    """Implement `Backend.chunk_backward`: about twice the forward's flop; blocks run from last to first."""
    p = problem
    if saved.A_inv is None or saved.S_in is None or saved.v_new is None:
        saved = chunk_forward(p, True)[2]
    assert saved.A_inv is not None and saved.S_in is not None and saved.v_new is not None
    g, beta = activate(p)
    do = torch.zeros_like(p.v) if do is None else do
    dq, dk, dv, dg, dbeta = (_allocate_result(p, x.shape, x.dtype) for x in (p.q, p.k, p.v, g, beta))
    plan = plan_blocks(p)
    dstate = _initial_states(p, dS, plan.order)
    for block in reversed(plan.blocks):
        c = _load_block(p, block, g, beta)
        A_inv, v_new, S = (
            _load_saved(p, block, x, dstate.dtype)
            for x in (saved.A_inv[..., : c.C, : c.C], saved.v_new[..., : c.C, :], saved.S_in)
        )
        Y = torch.empty(*c.v.shape[:3], 2 * c.C, p.V, dtype=dstate.dtype, device=p.device)
        # scale multiplies do once, so that every gradient below includes it
        torch.mul(_load_heads(p, block, do), p.scale, out=Y[..., : c.C, :])
        t = _states_bwd(p, block, c, A_inv, v_new, S, Y, dstate)
        dg_block = _scores_bwd(c, v_new, Y, t)
        dX = t.dX
        dX[:, :, c.C :] += t.dk
        # adjoint of n = x rstd: dx = rstd (dn - n <n, dn>), for q and k in the same passes
        if c.rstd is not None:
            dX.addcmul_(c.X, (c.X * dX).sum(-1, keepdim=True), value=-1).mul_(c.rstd)
        block.put(dq, _view_tokens(dX[:, :, None, : c.C], block))
        block.put(dk, _view_tokens(dX[:, :, None, c.C :], block))
        block.put(dv, _view_tokens(Y[..., c.C :, :].mul_(c.beta), block))
        block.put(dg[..., None], _view_tokens(dg_block[..., None], block))
        block.put(dbeta[..., None], _view_tokens(t.dbeta[..., None], block))
    # a reset passes no gradient: the rounding error of a zero dg, times a g of -1e6, would reach dA_log
    dg.masked_fill_(g <= RESET, 0)
    dg_in, dbeta_in, dA_log, ddt_bias = activate_bwd(p, dg, dbeta)
    dS0 = None if p.initial_state is None else _final_states(p, dstate, plan.order).to(p.initial_state.dtype)
    return Gradients(dq, dk, dv, dg_in, dbeta_in, dA_log, ddt_bias, dS0)


@dataclass(frozen=True)
class StateGradients:
    """Hold the gradients of a block that came through the states."""

    dX: Tensor  # [P, H, 2C, K]
    dk: Tensor  # [P, H, C, K] to be added to dX's lower half
    dbeta: Tensor  # [P, H, r, C]
    dG: Tensor  # [P, H, r, C] float64: its terms nearly cancel in dg, the sums of it


def _states_bwd(
    p: Problem, block: Block, c: Chunks, A_inv: Tensor, v_new: Tensor, S: Tensor, Y: Tensor, dstate: Tensor
) -> StateGradients:
    """Pass dstate back through the block's steps, and return the gradients that depend on it.

    The upper half of Y [P, H, r, 2C, V] holds scale do; the lower is filled with dr, the gradient of the
    right-hand side (I + A) v_new. One operand for both makes the matmuls nearly twice as fast as two.
    """
    C, do = c.C, Y[..., : c.C, :]
    Z = torch.empty(*c.X.shape[:3], dstate.shape[-1], dtype=Y.dtype, device=Y.device)  # [e^G do; -e^G dr]
    # value heads as columns: one matmul per key head serves all of its value heads
    decayed_v, kdS, W = _allocate_columns(c), _allocate_columns(c), _allocate_columns(c)
    torch.mul(c.end_decay, v_new, out=_split_heads_first(decayed_v, p))
    torch.mul(c.start_decay, do, out=_split_heads_first(Z[:, :, :C], p))
    dv_new = _bmm((c.D * c.qk).mT, do)
    dk = torch.empty(*decayed_v.shape[:3], p.K, dtype=Y.dtype, device=Y.device)
    dG_end = torch.empty(Y.shape[:3], dtype=Y.dtype, device=Y.device)
    minus_decay, beta_columns = -c.start_decay, c.beta.transpose(2, 3)
    overlap = _allocate_like(S[: block.steps[0].stop - block.steps[0].start])
    for step in reversed(block.steps):
        i = slice(step.start, step.stop)
        dS_i = dstate[step.rows]
        _bmm(c.k[i], dS_i, out=kdS[i])
        dr = _bmm(A_inv[i].mT, dv_new[i].addcmul_(c.end_decay[i], _split_heads_first(kdS[i], p)))
        Y[i, :, :, C:] = dr
        Zk = Z[i, :, C:]
        torch.mul(dr, minus_decay[i], out=_split_heads_first(Zk, p))
        torch.mul(_split_heads(Zk, p), beta_columns[i], out=_split_heads(W[i], p))
        _bmm(decayed_v[i], dS_i.mT, out=dk[i])
        # the product for <S, dS> takes a buffer that all steps reuse: no page faults of new memory
        product = torch.mul(S[i], _split_heads_first(dS_i, p), out=overlap[: step.stop - step.start])
        dG_end[i] = product.sum((-1, -2)) * c.chunk_decay[i, :, 0, :, 0]
        _apply_decay(dS_i, c.chunk_decay[i])
        _baddbmm(dS_i, c.q[i].mT, Z[i, :, :C])
        _baddbmm(dS_i, c.k[i].mT, W[i])
        _store_states(dstate, step, dS_i)
    dX, row_dots = _state_read_bwd(c, Z.unflatten(-1, (-1, p.V)), S)
    dbeta = row_dots[..., C:] + (Y[..., C:, :] * c.v).sum(-1)
    d_out = _split_heads(kdS.mul_(decayed_v), p).sum(-1).transpose(2, 3)[..., :-1].double()
    dG = row_dots[..., :C].double() + c.beta[..., 0] * row_dots[..., C:]
    # e^(G_C - G_t) is 1 at the last token: its gradient, + in G_C and - in G_t, is left out there
    dG[..., :-1] -= d_out
    dG[..., -1] += dG_end + d_out.sum(-1)
    return StateGradients(dX, dk, dbeta, dG)


def _state_read_bwd(c: Chunks, Z: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Return dX = [1; beta] Z S^T summed over value heads, and <X, Z S^T> of each value head.

    These gradients come through the state S that enters a chunk. Z is [P, H, 2C, r, V], S [P, H, r, K, V];
    the results are [P, H, 2C, K] and [P, H, r, 2C].
    """
    parts, row_dots = [], []
    # a BLAS call per value head: <X, Z S^T> of each head is needed before the sum over heads
    for j, Z_j in enumerate(Z.unbind(3)):
        part = _bmm(Z_j, S[:, :, j].mT)
        row_dots.append((part * c.X).sum(-1))
        part[:, :, c.C :] *= c.beta[:, :, j]
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0), torch.stack(row_dots, dim=2)


def _scores_bwd(c: Chunks, v_new: Tensor, Y: Tensor, t: StateGradients) -> Tensor:
    """Add the gradients through q k^T and k k^T of the chunk to t.dX, t.dk and t.dbeta; return dg.

    d(D q k^T) = do v_new^T and dA = -dr v_new^T below the diagonal. Every g_t with j < t <= i decays pair
    (i, j), so dg_t is a sum over i >= t and then over j < t, without cancellation.
    """
    # do v_new^T and dr v_new^T in one BLAS call of 2 C = 128 rows
    E = _bmm(Y, v_new.mT).unflatten(3, (2, c.C)).mul_(c.D[:, :, :, None])  # [P, H, r, 2, C, C]
    Eq, Ek = E.unbind(3)
    Ek.neg_().diagonal(dim1=-2, dim2=-1).zero_()
    pairs = Ek * c.kk
    t.dbeta.add_(pairs.sum(-1))
    pairs.mul_(c.beta).addcmul_(Eq, c.qk)
    Ek.mul_(c.beta)
    dXK = (E[:, :, 0] if E.shape[2] == 1 else E.sum(2)).flatten(2, 3)
    _baddbmm(t.dX, dXK, c.k)
    _baddbmm(t.dk, dXK.mT, c.X)
    # the sum over i >= t is a BLAS call with a triangle of ones; tril_ keeps j < t
    upper = torch.ones(c.C, c.C, dtype=E.dtype, device=E.device).triu_()
    dg = _bmm(upper.expand_as(pairs), pairs).tril_(-1).sum(-1).double()
    # g_t is a term of G of token t and of every later token of the chunk: add the sum of their dG
    return dg.add_(t.dG.flip(-1).cumsum(-1).flip(-1))


def _load_block(p: Problem, block: Block, g: Tensor, beta: Tensor) -> Chunks:
    """Load a block: normalised q and k, v, beta, the decays, and the products of q, k with k."""
    q, k = block.take(p.q), block.take(p.k)  # [R, M, C, H, K]
    C, dtype = q.shape[2], p.state_dtype
    X = torch.empty(q.shape[0] * q.shape[1], p.H, 2 * C, p.K, dtype=dtype, device=p.device)
    rstd = None
    if p.use_qk_l2norm_in_kernel:
        # the norms read tokens in memory order: long contiguous reads, and the next pass finds them in cache
        norms = [torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype) for x in (q, k)]
        rstd = torch.cat([_heads_first(x) for x in norms], dim=2).square_().add_(1e-6).rsqrt_()
        torch.mul(_heads_first(q), rstd[:, :, :C], out=X[:, :, :C])
        torch.mul(_heads_first(k), rstd[:, :, C:], out=X[:, :, C:])
    else:
        X[:, :, :C] = _heads_first(q.to(dtype, copy=True))
        X[:, :, C:] = _heads_first(k.to(dtype, copy=True))
    G = _load_heads(p, block, g[..., None], g.dtype).cumsum(3)  # [P, H, r, C, 1]
    # g is zero past a short chunk's end, so the last row of G is always G_C
    end = G[:, :, :, -1:]
    # clamped on both sides: no exponent is positive, and exp is ten times slower where it underflows
    D = (G - G.mT).to(dtype).clamp_(-104 if dtype == torch.float32 else -746, 0).exp_().tril_()
    return Chunks(
        X=X,
        rstd=rstd,
        v=_load_heads(p, block, p.v),
        beta=_load_heads(p, block, beta[..., None]),
        start_decay=G.exp().to(dtype),
        end_decay=(end - G).exp().to(dtype),
        chunk_decay=end.exp().to(dtype).transpose(2, 3),
        D=D,
        # q k^T and k k^T in one BLAS call of 2 C = 128 rows
        XK=_bmm(X, X[:, :, C:].mT),
    )


def _load_saved(p: Problem, block: Block, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a block's chunks of x [NC, HV, ...] as [P, H, r, ...] in the computing dtype."""
    x = block.load_chunks(x).to(dtype)
    return (align_start(x) if p.batch_invariant else x).unflatten(1, (p.H, -1))


def _heads_first(x: Tensor) -> Tensor:
    """Return x [R, M, C, H, D] as [P, H, C, D], a view where the grid allows it."""
    return x.flatten(0, 1).transpose(1, 2)


def _load_heads(p: Problem, block: Block, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a block's tokens of x [B, T, HV, D] as [P, H, r, C, D] in the computing dtype.

    It is a copy in memory order: reading tokens head by head, 0.5 KB at a time, takes three times as long.
    """
    return _heads_first(block.take(x).to(dtype or p.state_dtype, copy=True)).unflatten(1, (p.H, -1))


def _allocate_result(p: Problem, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a result over tokens or chunks; zeros where not all of it may be written (packed, T <= 32)."""
    make = torch.empty if p.cu_seqlens is None and p.T > CHUNK // 2 else torch.zeros
    return make(shape, dtype=dtype, device=p.device)


def _view_tokens(x: Tensor, block: Block) -> Tensor:
    """Return x [P, H, r, C, D] as [R, M, C, HV, D], a view."""
    return x.flatten(1, 2).transpose(1, 2).unflatten(0, block.grid)


def _split_heads(x: Tensor, p: Problem) -> Tensor:
    """Return x [P, H, L, r V] as [P, H, L, r, V], a view: the value heads as an axis."""
    return x.unflatten(-1, (-1, p.V))


def _split_heads_first(x: Tensor, p: Problem) -> Tensor:
    """Return x [P, H, L, r V] as [P, H, r, L, V], a view: the value heads as an axis before the rows."""
    return x.unflatten(-1, (-1, p.V)).transpose(2, 3)


def _allocate_like(x: Tensor) -> Tensor:
    """Allocate a contiguous tensor of x's shape."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _allocate_columns(c: Chunks) -> Tensor:
    """Allocate one row per token with the value heads as columns [P, H, C, r V]."""
    P, H, r, C, V = c.v.shape
    return torch.empty(P, H, C, r * V, dtype=c.v.dtype, device=c.v.device)


def _solve_tril(A: Tensor) -> Tensor:
    """Return (I + A)^-1, reading A below the diagonal only."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return torch.linalg.solve_triangular(A, eye.expand_as(A), upper=False, unitriangular=True)


def _apply_decay(S_i: Tensor, chunk_decay: Tensor) -> None:
    """Multiply S_i [M, H, K, r V] by e^(G_C) of each value head, in place."""
    S_i.unflatten(-1, (chunk_decay.shape[3], -1)).mul_(chunk_decay)


def _store_states(S: Tensor, step: Step, S_i: Tensor) -> None:
    """Write S[step.rows] = S_i if rows are an index; for a slice S_i is a view of S already."""
    if isinstance(step.rows, Tensor):
        S.index_copy_(0, step.rows, S_i)


def _initial_states(p: Problem, initial: Tensor | None, order: Tensor | None) -> Tensor:
    """Return the caller's states as a new [N, H, K, r V] in the plan's order; zeros for None.

    With batch_invariant=True a gemm reads the states of one sequence: these begin at an aligned address, as
    those of a sequence alone do.
    """
    zeros = zero_aligned_rows if p.batch_invariant else torch.zeros
    S = zeros((p.N, p.H, p.K, p.HV // p.H, p.V), dtype=p.state_dtype, device=p.device)
    if initial is not None:
        x = initial.mT if p.state_v_first else initial
        x = x if order is None else x[order]
        S.copy_(x.unflatten(1, (p.H, -1)).transpose(2, 3))
    return S.flatten(3)


def _final_states(p: Problem, S: Tensor, order: Tensor | None) -> Tensor:
    """Return S [N, H, K, r V] in the plan's order as a new contiguous tensor in the caller's layout."""
    x = _split_heads_first(S, p).flatten(1, 2)
    x = x.mT if p.state_v_first else x
    out = torch.empty(p.state_shape, dtype=S.dtype, device=S.device)
    return out.copy_(x) if order is None else out.index_copy_(0, order, x.contiguous())


def _bmm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b over equal leading dims, as one batch."""
    lead = a.shape[:-2]
    x, y = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
    if out is None:
        return torch.bmm(x, y).view(*lead, a.shape[-2], b.shape[-1])
    torch.bmm(x, y, out=out.view(-1, *out.shape[-2:]))
    return out


def _baddbmm(acc: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> None:
    """Compute acc <- beta acc + alpha a @ b in place, over equal leading dims."""
    x, y = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
    acc.view(-1, *acc.shape[-2:]).baddbmm_(x, y, alpha=alpha, beta=beta)
