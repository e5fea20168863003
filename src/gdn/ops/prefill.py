"""Provide gdn::prefill and gdn::commit: prompts on a state pool, and copies of accepted states."""

from typing import Any

from torch import Tensor

from gdn import settings
from gdn.backends import select
from gdn.notation import Decay, GateBias, HeadParam, Index, Keys, Mask, Offsets, PerHead, Pool, Q, Values
from gdn.ops.history import HistoryPool
from gdn.ops.int16 import Int16Pool, tensors_of
from gdn.ops.library import Signature, define_writer, guarded
from gdn.ops.serving import TOKENS
from gdn.problem import CommitProblem, PrefillProblem
from gdn.problem.commit import parse_commit
from gdn.problem.prefill import parse_prefill


def prefill(
    q: Q,
    k: Keys,
    v: Values,
    state: Pool | Int16Pool | HistoryPool,
    *,
    cu_seqlens: Offsets,
    g: Decay | None = None,
    beta: PerHead | None = None,
    a: Decay | None = None,
    b: PerHead | None = None,
    A_log: HeadParam | None = None,
    dt_bias: GateBias | None = None,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    batch_invariant: bool = False,
    state_index: Index,
    out_state_index: Index | None = None,
    has_initial_state: Mask | None = None,
    update_state: bool = True,
    checkpoints: Tensor | None = None,
    checkpoint_every: int = 0,
    checkpoint_offsets: Index | None = None,
    snapshot_pos: Index | None = None,
    snapshot_index: Index | None = None,
    null_slot: int | None = None,
    out: Values | None = None,
    backend: str | None = None,
) -> Values:
    """Run packed prompts in chunks of 64 tokens, with the states in the pool of an engine.

        S <- e^g S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q

    Args:                   shape                 dtype
        q, k                [1, total, H, K]      bf16, fp16, fp32 (fp64 on eager), one for q, k, v, out
        v                   [1, total, HV, V]     dtype of q; value head j reads key head j // (HV // H)
        state               [slots, HV, K, V]     as in `decode`, also an Int16Pool, or a HistoryPool of any
                                                  dtype (see below); read and updated in place
        cu_seqlens          [N+1] int             sequence n is tokens cu_seqlens[n]:cu_seqlens[n+1]; it may
                                                  be empty
        g, beta, a, b, A_log, dt_bias, lower_bound, allow_neg_eigval, scale, use_qk_l2norm_in_kernel,
        state_v_first, null_slot, out, backend    as in `decode`, gates [1, total, HV], or [1, total, HV, K]
                                                  for g and a
        batch_invariant     bool                  True: the bits of a sequence do not depend on the others
        state_index         [N] int               the slot of each sequence
        out_state_index     [N] int or None       the slot that gets the final state; None: state_index
        has_initial_state   [N] bool or None      False: start from zero without reading the slot; None: all
                                                  True
        update_state        bool                  False: write no final state
        checkpoints         [rows, HV, K, V]      fp32 (or fp64 with fp64 q); row checkpoint_offsets[n] + i
                                                  gets the state after (i + 1) * checkpoint_every tokens of
                                                  sequence n, for every such position in the sequence
        checkpoint_every    int                   a positive multiple of 64 with checkpoints, else 0
        checkpoint_offsets  [N] int               negative: store none of this sequence; rows past the end
                                                  are skipped
        snapshot_pos        [N] int or None       store the state after this number of tokens in slot
                                                  snapshot_index[n]; 0: the initial state; negative or past
                                                  the end of the sequence: store none
        snapshot_index      [N] int               required with snapshot_pos

    Returns: o [1, total, HV, V], dtype of q; zero past cu_seqlens[-1].

    Padding: a sequence whose slot is invalid (see `decode`) outputs zeros, and no state, checkpoint or
            snapshot is read or written for it. If only a slot to write is invalid, only that write is
            skipped. An empty sequence leaves its slots unchanged (a snapshot at 0 is stored). No slot may be
            written twice, and no slot that one sequence reads may be written by another.
    Histories: on a HistoryPool the histories of slots that a sequence continues are folded first, and those
            of slots that get a state are emptied; drafts of the last call are dropped. Outputs and states are
            then those of a prefill on the folded states. One launch more for each on a GPU.
    Raises: TypeError, ValueError, NotImplementedError as in `gdn.problem`; ValueError if a gradient is
            required; no tensor has been modified then.
    Cost:   that of `chunk_gated_delta_rule`. On a GPU dense states are read and updated in place and o is
            stored in a contiguous `out`; with checkpoints, snapshots, other strides of a state, or where
            `hopper` cuts a prompt into segments, states and o are copied. So are states in integers: two
            copies in fp32 of each sequence's state, of 4.2 MB together for 32 heads of 128 x 128. A snapshot
            within a chunk computes up to 63 tokens again.
    Source: arXiv:2412.06464, section 3.3.
    """
    names = ("remainder", "history_u", "history_k", "history_G", "cursor", "room")
    histories: dict[str, Any] = dict.fromkeys(names)
    if isinstance(state, HistoryPool):
        # named one by one: Dynamo of PyTorch 2.11 breaks its graph at `vars` of a frozen dataclass
        histories = {name: getattr(state, name) for name in names}
        states, column_scale = state.state, state.column_scale
    else:
        states, column_scale = tensors_of(state)
    problem = parse_prefill(
        **histories, state=states, column_scale=column_scale,
        q=q, k=k, v=v, cu_seqlens=cu_seqlens, g=g, beta=beta, a=a, b=b, A_log=A_log,
        dt_bias=dt_bias, lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval,
        scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=state_v_first,
        batch_invariant=batch_invariant, state_index=state_index, out_state_index=out_state_index,
        has_initial_state=has_initial_state, update_state=update_state, checkpoints=checkpoints,
        checkpoint_every=checkpoint_every, checkpoint_offsets=checkpoint_offsets, snapshot_pos=snapshot_pos,
        snapshot_index=snapshot_index, null_slot=null_slot, out=out, backend=backend,
    )  # fmt: skip
    _prefill_op(*problem.arguments())
    return problem.out


def commit(
    dst: Tensor | Int16Pool,
    src: Tensor,
    dst_index: Index,
    src_row: Index,
    step: Index,
    *,
    extra_dst_index: Index | None = None,
    extra_step: Index | None = None,
    state_v_first: bool = False,
) -> None:
    """Copy the accepted states of all layers to their slots, after verification.

        dst[:, dst_index[i]] = src[:, src_row[i], step[i]],   also for extra_dst_index and extra_step

    Args:                     shape                  dtype
        dst                   [L, slots, ...]        any float, any stride; written. An `Int16Pool` of all
                                                     layers has [L, slots, HV, K, V] and scales
        src                   [L, rows, T, ...]      any float; the intermediate states of `decode`, per layer
        dst_index             [n] int                slot
        src_row               [n] int                row of src
        step                  [n] int                token of this row, from 0; negative: copy none
        extra_dst_index       [n] int or None        a second slot, for example for a prefix cache
        extra_step            [n] int or None        the token for the second slot
        state_v_first         bool                   layout of the states of an Int16Pool, as in `decode`; not
                                                     used for tensors

    An entry whose slot, row or step is out of range is skipped. No slot may be written twice.
    Bits:   an Int16Pool gets the bits that `decode` of the accepted tokens writes, if src is in fp32, with
            and without round_state; scales are stored with the integers.
    Raises: TypeError, ValueError, NotImplementedError as in `gdn.problem`; no tensor has been modified then.
    Cost:   one read and one write per copied state.
    """
    states, column_scale = tensors_of(dst)
    problem = parse_commit(
        dst=states, src=src, dst_index=dst_index, src_row=src_row, step=step,
        extra_dst_index=extra_dst_index, extra_step=extra_step, column_scale=column_scale,
        state_v_first=state_v_first,
    )  # fmt: skip
    _commit_op(*problem.arguments())


def _prefill(*args: Any) -> None:
    problem = PrefillProblem(*args)
    problem.offsets(read_device=settings.debug())

    def run() -> tuple[Tensor]:
        backend = select(problem)
        if problem.has_history:
            backend.fold_history(problem.fold())
        backend.prefill(problem)
        return (problem.out,)

    guarded(_PREFILL, problem.q.device, run, problem)


def _commit(*args: Any) -> None:
    problem = CommitProblem(*args)

    def run() -> tuple[()]:
        select(problem).commit(problem)
        return ()

    guarded(_COMMIT, problem.dst.device, run, problem)


_PREFILL = Signature("prefill", TOKENS, ("o",))
_COMMIT = Signature("commit", ())
_prefill_op = define_writer("prefill", PrefillProblem.declaration, _prefill)
_commit_op = define_writer("commit", CommitProblem.declaration, _commit)
