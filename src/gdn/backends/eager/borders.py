"""Compute what context parallelism exchanges at the borders of a rank with plain PyTorch; see `Backend`.

    N | M   the state scan of columns [v | 0] from [S_0 | 0] or [0 | I]: no queries, no outputs
    C       the reverse state scan alone: no gradient of a token

Only rows that enter and leave need these scans besides the rule itself. With a decay per key channel the rule
and its backward are run in their place: the stages have a decay per head.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn.backends.backend import Borders, FinishBackward, FinishForward, Gradients, Kept
from gdn.backends.borders import begin_whole, row_index, saved_of, start_columns, states_at, with_initial
from gdn.backends.eager import stages
from gdn.backends.eager.gate import activate
from gdn.backends.eager.rule import chunk_backward, chunk_forward
from gdn.backends.eager.tiling import Tiling
from gdn.notation import GSum, Keys, Q, State, UValues, Values, WKeys
from gdn.problem import Problem


def forward_begin(problem: Problem, borders: Borders, save: bool) -> tuple[Tensor | None, FinishForward]:
    """Implement `Backend.forward_begin`."""

    def run(p: Problem) -> tuple[Values, State | None, Kept]:
        o, final, saved = chunk_forward(p, save)
        return o, final, tuple(saved)

    if borders.leaving and not borders.entering:
        return begin_whole(problem, borders, run)
    transfers = _transfers(problem, borders) if borders.leaving else None
    return transfers, lambda initial_state: run(with_initial(problem, initial_state))


def backward_begin(
    problem: Problem, kept: Kept, do: Tensor | None, dS: Tensor | None, borders: Borders
) -> tuple[Tensor | None, FinishBackward]:
    """Implement `Backend.backward_begin`."""
    finish = partial(_differentiate, problem, kept, do)
    if not borders.entering:
        return None, finish
    if borders.leaving:
        if problem.is_per_channel:
            before = finish(dS) if do is not None or dS is not None else finish(_no_gradient(problem))
            assert before.dinitial_state is not None
            return states_at(before.dinitial_state, borders.entering, problem.state_v_first), finish
        return _entering_gradient(problem, do, dS, borders), finish
    # nothing comes from another rank: the gradients are final
    gradients = finish(dS)
    assert gradients.dinitial_state is not None
    C = states_at(gradients.dinitial_state, borders.entering, problem.state_v_first)
    return C, lambda _: gradients


def _differentiate(problem: Problem, kept: Kept, do: Tensor | None, dS: Tensor | None) -> Gradients:
    return chunk_backward(problem, saved_of(kept), do, dS)


def _no_gradient(p: Problem) -> Tensor:
    return p.v.new_zeros(p.state_shape, dtype=p.state_dtype)


def _operands(p: Problem) -> tuple[Q, Keys, GSum, WKeys, UValues]:
    """Return q and k, normalised, G, w and u of the rule, in the computing dtype."""
    q, k = p.q.to(p.state_dtype), p.k.to(p.state_dtype)
    if p.use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    g, beta = activate(p)
    G = stages.chunk_cumsum(g.squeeze(-1), p.cu_seqlens)
    A_inv = stages.solve_tril(stages.chunk_kkt(k, beta, G, p.cu_seqlens), p.cu_seqlens)
    return q, k, G, *stages.wy_transform(k, p.v.to(p.state_dtype), beta, G, A_inv, p.cu_seqlens)


def _transfers(p: Problem, borders: Borders) -> Tensor:
    """Return N | M [leaving, HV, K, V+K]: columns of a state do not mix, so one scan computes both."""
    start = torch.cat(start_columns(p, borders), -1)
    if p.is_per_channel:
        columns = replace(p, v=F.pad(p.v, (0, p.K)), state_v_first=False, output_final_state=True)
        _, final, _ = chunk_forward(with_initial(columns, start), False)
        assert final is not None
        return final[row_index(borders.leaving, final.device)]
    _, k, G, w, u = _operands(p)
    _, _, ends = stages.chunk_state(k, w, F.pad(u, (0, p.K)), G, start, p.cu_seqlens)
    return ends[row_index(borders.leaving, ends.device)]


def _entering_gradient(p: Problem, do: Tensor | None, dS: Tensor | None, borders: Borders) -> Tensor:
    """Return C [entering, HV, K, V] from do and the caller's dS alone."""
    q, k, G, w, _ = _operands(p)
    t = Tiling.from_tokens(q, p.cu_seqlens)
    q_c, k_c, w_c, G_c = t.to_chunks(q) * p.scale, t.to_chunks(k), t.to_chunks(w), t.sums_to_chunks(G)
    do_c = t.to_chunks(torch.zeros_like(p.v) if do is None else do)
    out, through = stages.end_decays(G_c, t.dtype)
    k_out, q_into = out[..., None] * k_c, G_c.to(t.dtype).exp()[..., None] * q_c
    # the part of dv_new that is of this chunk's outputs, for all chunks in one BLAS call
    dv_c = (stages.decay_matrix(G_c, t.dtype, diagonal=0) * (q_c @ k_c.mT)).mT @ do_c
    given = dS.mT if dS is not None and p.state_v_first else dS
    states = t.copy_states(given, (*do_c.shape[1:3], p.K, p.V))
    for i in reversed(t.steps()):
        n = t.sequence[i]
        dv = dv_c[i] + k_out[i] @ states[n]
        states[n] = through[i] * states[n] + q_into[i].mT @ do_c[i] - w_c[i].mT @ dv
    return states[: t.N].flatten(1, 2)[row_index(borders.entering, states.device)]
