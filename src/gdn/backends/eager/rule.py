"""Compute the chunked rule with plain PyTorch: batched matmuls, block by block, and a written backward.

With X = [q; k] of a chunk, D_ij = e^(G_i - G_j) for i >= j, S the state that enters it, and A = beta D k k^T
below the diagonal:

    v_new = (I + A)^-1 beta (v - e^G k S)
    o     = scale (e^G q S + (D q k^T) v_new)
    S    <- e^(G_C) S + k^T (e^(G_C - G) v_new)

e^G q and e^G k are the rows that enter a chunk, e^(G_C - G) k those that leave it. `heads` computes A and
D q k^T for a decay per head, `channels` for a decay per key channel; the passes over S are the same. Shapes
are those of `chunks`; value heads that share a key head are columns of one matmul.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gdn.backends.backend import Gradients, Saved, Shape
from gdn.backends.eager.alignment import align_start, zero_aligned_rows
from gdn.backends.eager.blocks import Block, Step, plan_blocks
from gdn.backends.eager.channels import load_channel_chunks
from gdn.backends.eager.chunks import (
    Chunks,
    StateGradients,
    allocate_like,
    allocate_result,
    baddbmm,
    bmm,
    load_heads,
    split_heads,
    split_heads_first,
    view_tokens,
)
from gdn.backends.eager.gate import activate, activate_bwd
from gdn.backends.eager.heads import load_head_chunks
from gdn.problem import CHUNK, RESET, Problem


def chunk_forward(problem: Problem, save: bool) -> tuple[Tensor, Tensor | None, Saved]:
    """Implement `Backend.chunk_forward`: about 6 K V + 4 C (K + V) flop per token and value head."""
    p, g, beta = _prepare(problem)
    o = allocate_result(p, p.v.shape, p.v.dtype)
    saved = Saved(*(allocate_result(p, *s) if s and save else None for s in saves(p)))
    plan = plan_blocks(p)
    S = _initial_states(p, p.initial_state, plan.order)
    for block in plan.blocks:
        c = _load_block(p, block, g, beta, for_backward=False)
        A_inv = c.solve()
        XS, v_new = _forward_states(p, block, c, A_inv, S, saved.S_in)
        # e^G q S is the accumulator of the BLAS call for D q k^T v_new: no further pass adds the two
        o_block = split_heads_first(XS[:, :, : c.C], p)
        if c.has_row_factors:
            o_block = torch.mul(c.start_decay, o_block, out=allocate_like(v_new))
        baddbmm(o_block, c.scores(), v_new, alpha=p.scale, beta=p.scale)
        block.put(o, view_tokens(o_block, block))
        if saved.A_inv is not None:
            block.save_chunks(saved.A_inv[..., : c.C, : c.C], A_inv.flatten(1, 2))
        if saved.v_new is not None:
            block.save_chunks(saved.v_new[..., : c.C, :], v_new.flatten(1, 2))
    return o, _final_states(p, S, plan.order) if p.output_final_state else None, saved


def recompute_saved(problem: Problem, saved: Saved) -> Saved:
    """Implement `Backend.recompute_saved`: pass S through the chunks again, with the saved A_inv."""
    p, g, beta = _prepare(replace(problem, recompute=False))
    given = saved.A_inv
    assert given is not None
    full = Saved(*(allocate_result(p, *s) if s else None for s in saves(p)))
    plan = plan_blocks(p)
    S = _initial_states(p, p.initial_state, plan.order)
    for block in plan.blocks:
        c = _load_block(p, block, g, beta, for_backward=False)
        A_inv = _load_saved(p, block, given[..., : c.C, : c.C], S.dtype)
        _, v_new = _forward_states(p, block, c, A_inv, S, full.S_in)
        assert full.v_new is not None
        block.save_chunks(full.v_new[..., : c.C, :], v_new.flatten(1, 2))
    return replace(full, A_inv=given)


def _forward_states(
    p: Problem, block: Block, c: Chunks, A_inv: Tensor, S: Tensor, S_in: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Advance S through the block, step by step; returns X S [P, H, 2C, r V] and v_new [P, H, r, C, V]."""
    # r = beta v - (beta e^G) k S: factors of the whole block at once, so a step adds one addcmul
    beta_v, kS_factor = torch.mul(c.beta, c.v, out=allocate_like(c.v)), -c.beta * c.start_decay
    XS = torch.empty(*c.rows_in.shape[:3], S.shape[-1], dtype=S.dtype, device=S.device)
    v_new = allocate_like(c.v)
    decayed_v = _allocate_columns(c) if c.has_row_factors else v_new[:, :, 0]
    for step in block.steps:
        i = slice(step.start, step.stop)
        S_i = S[step.rows]
        if S_in is not None:
            block.save_step(S_in, step, split_heads_first(S_i, p).flatten(1, 2))
        # q S and k S in one BLAS call: a matmul of 64 rows runs at half the speed of one of 128
        bmm(c.rows_in[i], S_i, out=XS[i])
        kS = split_heads_first(XS[i, :, c.C :], p)
        bmm(A_inv[i], torch.addcmul(beta_v[i], kS_factor[i], kS, out=beta_v[i]), out=v_new[i])
        if c.has_row_factors:
            torch.mul(c.end_decay[i], v_new[i], out=split_heads_first(decayed_v[i], p))
        # in place: the BLAS call accumulates onto the decayed S, without a temporary of its size
        _apply_decay(S_i, c.chunk_decay[i])
        baddbmm(S_i, c.rows_out[i].mT, decayed_v[i])
        _store_states(S, step, S_i)
    return XS, v_new


def saves(problem: Problem) -> tuple[Shape | None, ...]:
    """Return the specs of Saved, in the computing dtype; summing G again is cheaper than saving it."""
    p, dtype = problem, problem.state_dtype
    return (
        None,
        ((p.num_chunks, p.HV, CHUNK, CHUNK), dtype),
        None if p.recompute else ((p.num_chunks, p.HV, p.K, p.V), dtype),
        None if p.recompute else ((p.num_chunks, p.HV, CHUNK, p.V), dtype),
        None,
        None,
        None,
    )


def chunk_backward(problem: Problem, saved: Saved, do: Tensor | None, dS: Tensor | None) -> Gradients:
    """Implement `Backend.chunk_backward`: about twice the forward's flop; blocks run from last to first."""
    p, g, beta = _prepare(problem)
    if saved.A_inv is None or saved.S_in is None or saved.v_new is None:
        saved = chunk_forward(replace(problem, recompute=False), True)[2]
    assert saved.A_inv is not None and saved.S_in is not None and saved.v_new is not None
    do = torch.zeros_like(p.v) if do is None else do
    dv, dg, dbeta = (allocate_result(p, x.shape, x.dtype) for x in (p.v, g, beta))
    # copies of q and k are summed before they are rounded
    dtype = p.q.dtype if p.H == problem.H else p.state_dtype
    dq, dk = (allocate_result(p, x.shape, dtype) for x in (p.q, p.k))
    plan = plan_blocks(p)
    dstate = _initial_states(p, dS, plan.order)
    for block in reversed(plan.blocks):
        c = _load_block(p, block, g, beta, for_backward=True)
        A_inv, v_new, S = (
            _load_saved(p, block, x, dstate.dtype)
            for x in (saved.A_inv[..., : c.C, : c.C], saved.v_new[..., : c.C, :], saved.S_in)
        )
        Y = torch.empty(*c.v.shape[:3], 2 * c.C, p.V, dtype=dstate.dtype, device=p.device)
        # scale multiplies do once, so that every gradient below includes it
        torch.mul(load_heads(p, block, do), p.scale, out=Y[..., : c.C, :])
        t = _states_bwd(p, block, c, A_inv, v_new, S, Y, dstate)
        dX, dg_block = c.scores_bwd(v_new, Y, t)
        # adjoint of n = x rstd: dx = rstd (dn - n <n, dn>), for q and k in the same passes
        if c.rstd is not None:
            dX.addcmul_(c.X, (c.X * dX).sum(-1, keepdim=True), value=-1).mul_(c.rstd)
        block.put(dq, view_tokens(dX[:, :, None, : c.C], block))
        block.put(dk, view_tokens(dX[:, :, None, c.C :], block))
        block.put(dv, view_tokens(Y[..., c.C :, :].mul_(c.beta), block))
        block.put(dg, view_tokens(dg_block, block))
        block.put(dbeta[..., None], view_tokens(t.dbeta[..., None], block))
    # a reset passes no gradient: the rounding error of a zero dg, times a g of -1e6, would reach dA_log
    dg.masked_fill_(g <= RESET, 0)
    dg_in, dbeta_in, dA_log, ddt_bias = activate_bwd(p, dg, dbeta)
    dS0 = None if p.initial_state is None else _final_states(p, dstate, plan.order).to(p.initial_state.dtype)
    dq, dk = (x if x.shape == problem.q.shape else _sum_repeated(x, problem.q) for x in (dq, dk))
    return Gradients(dq, dk, dv, dg_in, dbeta_in, dA_log, ddt_bias, dS0)


def _states_bwd(
    p: Problem, block: Block, c: Chunks, A_inv: Tensor, v_new: Tensor, S: Tensor, Y: Tensor, dstate: Tensor
) -> StateGradients:
    """Pass dstate back through the block's steps, and return the gradients that depend on it.

    The upper half of Y [P, H, r, 2C, V] holds scale do; the lower is filled with dr, the gradient of the
    right-hand side (I + A) v_new. One operand for both makes the matmuls nearly twice as fast as two.
    """
    C, do = c.C, Y[..., : c.C, :]
    Z = torch.empty(
        *c.rows_in.shape[:3], dstate.shape[-1], dtype=Y.dtype, device=Y.device
    )  # [e^G do; -e^G dr]
    # value heads as columns: one matmul per key head serves all of its value heads
    decayed_v, kdS, W = _allocate_columns(c), _allocate_columns(c), _allocate_columns(c)
    torch.mul(c.end_decay, v_new, out=split_heads_first(decayed_v, p))
    torch.mul(c.start_decay, do, out=split_heads_first(Z[:, :, :C], p))
    dv_new = bmm(c.scores().mT, do)
    dk = torch.empty(*decayed_v.shape[:3], p.K, dtype=Y.dtype, device=Y.device)  # of the rows that leave
    d_through = []
    minus_decay, beta_columns = -c.start_decay, c.beta.transpose(2, 3)
    overlap = allocate_like(S[: block.steps[0].stop - block.steps[0].start])
    for step in reversed(block.steps):
        i = slice(step.start, step.stop)
        dS_i = dstate[step.rows]
        bmm(c.rows_out[i], dS_i, out=kdS[i])
        dr = bmm(A_inv[i].mT, dv_new[i].addcmul_(c.end_decay[i], split_heads_first(kdS[i], p)))
        Y[i, :, :, C:] = dr
        Zk = Z[i, :, C:]
        torch.mul(dr, minus_decay[i], out=split_heads_first(Zk, p))
        torch.mul(split_heads(Zk, p), beta_columns[i], out=split_heads(W[i], p))
        bmm(decayed_v[i], dS_i.mT, out=dk[i])
        # the product for <S, dS> takes a buffer that all steps reuse: no page faults of new memory
        product = torch.mul(S[i], split_heads_first(dS_i, p), out=overlap[: step.stop - step.start])
        d_through.append(c.chunk_decay_bwd(product, i))
        _apply_decay(dS_i, c.chunk_decay[i])
        baddbmm(dS_i, c.rows_of_q[i].mT, Z[i, :, :C])
        baddbmm(dS_i, c.rows_of_k[i].mT, W[i])
        _store_states(dstate, step, dS_i)
    drows, row_dots = _state_read_bwd(c, Z.unflatten(-1, (-1, p.V)), S)
    dbeta = row_dots[..., C:] + (Y[..., C:, :] * c.v).sum(-1)
    # the steps ran from last to first
    return StateGradients(drows, dk, dbeta, row_dots, kdS.mul_(decayed_v), torch.cat(d_through[::-1]))


def _state_read_bwd(c: Chunks, Z: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Return dX = [1; beta] Z S^T of the rows X that enter, summed over value heads, and <X, Z S^T> of each.

    These gradients come through the state S that enters a chunk. Z is [P, H, 2C, r, V], S [P, H, r, K, V];
    the results are [P, H, 2C, K] and [P, H, r, 2C].
    """
    parts, row_dots = [], []
    # a BLAS call per value head: <X, Z S^T> of each head is needed before the sum over heads
    for j, Z_j in enumerate(Z.unbind(3)):
        part = bmm(Z_j, S[:, :, j].mT)
        row_dots.append((part * c.rows_in).sum(-1))
        part[:, :, c.C :] *= c.beta[:, :, j]
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0), torch.stack(row_dots, dim=2)


def _prepare(problem: Problem) -> tuple[Problem, Tensor, Tensor]:
    """Return the problem, its g [B, T, HV, 1 or K] and its beta, after their activations.

    Value heads with a decay per key channel share no rows, so each gets its own copy of q and k.
    """
    p, (g, beta) = problem, activate(problem)
    if p.is_per_channel and p.HV != p.H:
        q, k = (x.repeat_interleave(p.HV // p.H, 2) for x in (p.q, p.k))
        p = replace(p, q=q, k=k)
    return p, g, beta


def _sum_repeated(dx: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x [B, T, H, K] from that of its copies [B, T, HV, K]."""
    return dx.unflatten(2, (x.shape[2], -1)).sum(3).to(x.dtype)


def _load_block(p: Problem, block: Block, g: Tensor, beta: Tensor, *, for_backward: bool) -> Chunks:
    """Load a block and compute the decays and the products of its pairs of tokens."""
    if p.is_per_channel:
        return load_channel_chunks(p, block, g, beta, for_backward)
    return load_head_chunks(p, block, g, beta)


def _load_saved(p: Problem, block: Block, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a block's chunks of x [NC, HV, ...] as [P, H, r, ...] in the computing dtype."""
    x = block.read_chunks(x).to(dtype)
    return (align_start(x) if p.batch_invariant else x).unflatten(1, (p.H, -1))


def _allocate_columns(c: Chunks) -> Tensor:
    """Allocate one row per token with the value heads as columns [P, H, C, r V]."""
    P, H, r, C, V = c.v.shape
    return torch.empty(P, H, C, r * V, dtype=c.v.dtype, device=c.v.device)


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
    x = split_heads_first(S, p).flatten(1, 2)
    x = x.mT if p.state_v_first else x
    out = torch.empty(p.state_shape, dtype=S.dtype, device=S.device)
    return out.copy_(x) if order is None else out.index_copy_(0, order, x.contiguous())
