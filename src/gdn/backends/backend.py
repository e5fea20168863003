"""Define a backend: a frozen value with one function per operation.

A backend for another GPU is a folder with some kernels and a `dataclasses.replace` of an existing backend.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn.notation import ChunkInverse, ChunkStates, ChunkValues, GSum, InverseNorm, State, Values
from gdn.problem import HistoryProblem, Problem
from gdn.problem.propagate import PropagateProblem


@dataclass(frozen=True)
class Saved:
    """Hold the saved tensors of a forward, in one form for all backends: any backward can follow any forward.

    Chunks are numbered sequence by sequence; a packed batch has `problem.num_chunks` of them, and the surplus
    ones are unused. Each chunk has a whole tile, even at a sequence's ragged end, so that no store needs a
    bound. A backend saves a tensor if that is cheaper than recomputing it; the backward recomputes each None.
    G is float64, the others have any float dtype.
    """

    G: GSum | None = None
    A_inv: ChunkInverse | None = None  # or A_inv - 1, or split bf16 [NC, HV, 2, C, C]: see its backend
    S_in: ChunkStates | None = None  # [K, V] in either layout of the caller
    v_new: ChunkValues | None = None  # A_inv (beta v) - A_inv (beta e^G k) S_in; zero past the chunk's end
    q_rstd: InverseNorm | None = None  # with l2norm in the kernel
    k_rstd: InverseNorm | None = None
    factors: Tensor | None = None  # [NC, HV, rows, C], of the backend that saved it: only with `recompute`

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.G, self.A_inv, self.S_in, self.v_new, self.q_rstd, self.k_rstd, self.factors))

    @property
    def has_split_inverse(self) -> bool:
        """Return True if A_inv is split bf16: the sum over axis 2, in fp32, is the matrix."""
        return self.A_inv is not None and self.A_inv.dim() == 5


@dataclass(frozen=True)
class Gradients:
    """Hold the gradients of one call, each in the dtype of its tensor; None where the tensor was None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor | None
    dbeta: Tensor | None
    dA_log: Tensor | None
    ddt_bias: Tensor | None
    dinitial_state: Tensor | None

    def __iter__(self) -> Iterator[Tensor | None]:
        gates = (self.dg, self.dbeta, self.dA_log, self.ddt_bias)
        return iter((self.dq, self.dk, self.dv, *gates, self.dinitial_state))


@dataclass(frozen=True)
class Borders:
    """Hold the rows of states that cross the borders of a rank in context parallelism, in order.

    The initial state of an `entering` row comes from another rank; the final state of a `leaving` row goes to
    one. A row may be both. with_maps: a row of some rank is both, so that all ranks exchange N | M; False:
    they exchange N alone, and a backend may leave M out.
    """

    entering: tuple[int, ...]
    leaving: tuple[int, ...]
    with_maps: bool = True


Shape = tuple[tuple[int, ...], torch.dtype]
# the tensors that a backward needs: those of Saved, in order, and further ones of the backend
Kept = tuple[Tensor | None, ...]
FinishForward = Callable[[State | None], tuple[Values, State | None, Kept]]
FinishBackward = Callable[[Tensor | None], Gradients]


@dataclass(frozen=True)
class Backend:
    """Hold one function per operation. Each gets a checked problem and returns new tensors, unless in place.

    refuses(problem)         -> None if the backend supports the problem, else the reason
    refuses_backward(problem)                -> the same of chunk_backward after any backend's forward, where
                                                it differs from `refuses`
    refuses_recurrent(problem)               -> the same of recurrent_forward
    saves(problem)           -> (shape, dtype) of each tensor of Saved, in order; None for one not saved
    chunk_forward(problem, save)             -> o, final_state or None, Saved
    recompute_saved(problem, saved)          -> Saved as without `recompute`, to the bit, from what
                                                chunk_forward saves with it
    chunk_backward(problem, saved, do, dS)   -> Gradients; do or dS (gradient of final_state) may be None
    forward_launches(problem, dtype of S_in, pool) -> launches, with their tensors, of forwards of this kind
                                                at any size; other backends compile them ahead
                                                (`other_launches`); pool: see `triton.rule.pool`, or None
    backward_launches(problem, saved, do, dS) -> the same of backwards, on what `triton` makes of a backward's
                                                arguments; none where this backend has another's backward
    recurrent_forward(problem)               -> o, final_state or None
    forward_begin(problem, borders, save)    -> transfers N | M [leaving, HV, K, V+K] or None, finish. A row's
                                                S_end = M S_start + N; M = 0 where it does not enter.
                                                finish(initial_state) -> o, final_state or None, kept
    backward_begin(problem, kept, do, dS, borders) -> C [entering, HV, K, V] or None, finish. C: the gradient
                                                of the initial state; finish(dS) -> Gradients, with the
                                                gradients that other ranks have for leaving rows added to dS
    propagate_states(problem)                -> None: writes the states of `PropagateProblem`
    appends_history(problem)                 -> True if decode_with_history appends to the histories, False if
                                                it folds them and decodes plainly
    The other functions are the stages of `gdn.stages`, the serving functions, and the convolution, gate and
    norms of a layer. Their signatures are those of the functions in `ops`, after checking. The RMS norms take
    a `NormProblem`; that of rms_norm_zero_centred has a weight and no z.
    """

    name: str
    refuses: Callable[[Any], str | None]
    saves: Callable[[Problem], tuple[Shape | None, ...]]
    chunk_forward: Callable[[Problem, bool], tuple[Values, State | None, Saved]]
    recompute_saved: Callable[[Problem, Saved], Saved]
    chunk_backward: Callable[[Problem, Saved, Tensor | None, Tensor | None], Gradients]
    forward_launches: Callable[[Problem, torch.dtype | None, Any], Iterable[Any]]
    backward_launches: Callable[[Problem, Saved, Tensor, Tensor | None], Iterable[Any]]
    recurrent_forward: Callable[[Problem], tuple[Values, State | None]]
    forward_begin: Callable[[Problem, Borders, bool], tuple[Tensor | None, FinishForward]]
    backward_begin: Callable[
        [Problem, Kept, Tensor | None, Tensor | None, Borders], tuple[Tensor | None, FinishBackward]
    ]
    propagate_states: Callable[[PropagateProblem], None]
    chunk_cumsum: Callable[..., Any]
    chunk_cumsum_bwd: Callable[..., Any]
    chunk_gate_cumsum: Callable[..., Any]
    chunk_gate_cumsum_bwd: Callable[..., Any]
    chunk_kkt: Callable[..., Any]
    chunk_kkt_bwd: Callable[..., Any]
    solve_tril: Callable[..., Any]
    solve_tril_bwd: Callable[..., Any]
    wy_transform: Callable[..., Any]
    wy_transform_bwd: Callable[..., Any]
    chunk_state: Callable[..., Any]
    chunk_state_bwd: Callable[..., Any]
    chunk_output: Callable[..., Any]
    chunk_output_bwd: Callable[..., Any]
    decode: Callable[..., Any]
    decode_step: Callable[..., Any]
    prefill: Callable[..., Any]
    commit: Callable[..., Any]
    replay_decode: Callable[..., Any]
    replay_commit: Callable[..., Any]
    decode_with_history: Callable[..., Any]
    fold_history: Callable[..., Any]
    appends_history: Callable[[HistoryProblem], bool]
    gate: Callable[..., Any]
    gate_bwd: Callable[..., Any]
    causal_conv1d: Callable[..., Any]
    causal_conv1d_bwd: Callable[..., Any]
    causal_conv1d_update: Callable[..., Any]
    rms_norm_gated: Callable[..., Any]
    rms_norm_gated_bwd: Callable[..., Any]
    rms_norm_zero_centred: Callable[..., Any]
    refuses_backward: Callable[[Problem], str | None] | None = None
    refuses_recurrent: Callable[[Problem], str | None] | None = None
