"""Provide gdn::replay_decode and gdn::replay_commit: verify draft tokens on a state that is only read.

The state after a token has HV K V elements; the update that a token writes to it has HV V + H K + HV, which
is 1.2 % of that at 16/32 heads of 128 x 128. Drafts are therefore verified without writing the state. Moving
a cursor rolls back the rejected tokens, and a full history of accepted tokens is added to the state.
"""

from torch import Tensor

from gdn._torch_compat import is_plain
from gdn.backends import select
from gdn.notation import Decay, GateBias, HeadParam, Index, Keys, Offsets, PerHead, Pool, Q, Values
from gdn.ops.fastpath import PoolFunction
from gdn.ops.library import Signature, define_writer, guarded
from gdn.ops.serving import TOKENS
from gdn.problem import KeepProblem, ReplayProblem
from gdn.problem.replay import parse_keep, parse_replay


def replay_decode(
    q: Q,
    k: Keys,
    v: Values,
    state: Pool,
    history_u: Tensor,
    history_k: Tensor,
    history_G: Tensor,
    cursor: Tensor,
    *,
    g: Decay | None = None,
    beta: PerHead | None = None,
    a: Decay | None = None,
    b: PerHead | None = None,
    A_log: HeadParam | None = None,
    dt_bias: GateBias | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Offsets | None = None,
    max_seqlen: int | None = None,
    read_index: Index | None = None,
    null_slot: int | None = None,
    out: Values | None = None,
    backend: str | None = None,
) -> Values:
    """Run a packet of tokens for each row on a state that is only read; store the update of each token.

        S = e^(G_P) state + sum_(j < P) e^(G_P - G_j) k_j u_j^T,   P = cursor[slot];   then as `decode`:
        S <- e^g S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q

    Token t of a row stores u, k and G, the sum of g since the state was written, at place P + t in the
    history of its slot. The cursor is not changed: `replay_commit` advances it by the accepted tokens.

    Args:           shape                      dtype
        history_u   [slots, places, HV, V]     any float (fp64 only with fp64 q); holds d, with
                                               use_qk_l2norm_in_kernel divided by the norm of k
        history_k   [slots, places, H, K]      any float (fp64 only with fp64 q); holds k as passed
        history_G   [slots, places, HV]        fp64; or fp32, which is coarse after a reset (g = -1e6). With a
                                               decay per key channel [slots, places, HV, K], fp32: holds g
                                               itself, no sums
        cursor      [slots] int                number of places in use, clamped to 0 .. places; 0 after the
                                               state itself was written. All layers share one cursor
        read_index  [B] int or None            the slot of each row; None: the row's number
        q, k, v, state, the gates, scale, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first,
        cu_seqlens, max_seqlen, null_slot, out, backend    as in `decode`
    The last axis of history_u and history_k is contiguous; the other strides are free.

    Returns: o [B, T, HV, V] (or [1, total, HV, V], zero past cu_seqlens[-1]), dtype of q.

    Padding: a row without a valid slot outputs zeros, and no memory is read or written for it. A token past
            the last place is computed and not stored. No two rows may have the same slot.
    Bits:   a row does not depend on the rows around it. The results equal those of `decode` within rounding,
            not bit for bit, because the packet is computed as a chunk.
    Raises: TypeError, ValueError, NotImplementedError as in `gdn.problem`; ValueError if a gradient is
            required; no tensor has been modified then. `triton` supports packets of up to 16 tokens.
    Cost:   per row one state and P tokens of history are read, and T tokens of history written.
    Source: arXiv:2412.06464, section 3.3, on one short chunk.

    Example:
        >>> import torch, gdn
        >>> state, cursor = torch.zeros(1, 8, 4, 16, 16), torch.zeros(8, dtype=torch.int32)
        >>> u, k = torch.zeros(1, 8, 8, 4, 16), torch.zeros(1, 8, 8, 2, 16)
        >>> G, slot = torch.zeros(1, 8, 8, 4, dtype=torch.float64), torch.tensor([5])
        >>> x, draft = torch.randn(1, 3, 2, 16), torch.randn(1, 3, 4, 16)
        >>> o = gdn.replay_decode(x, x, draft, state[0], u[0], k[0], G[0], cursor, read_index=slot)
        >>> gdn.replay_commit(state, u, k, G, cursor, slot, torch.tensor([2]), room=3)
        >>> cursor.tolist(), bool(state.any())
        ([0, 0, 0, 0, 0, 2, 0, 0], False)
    """
    tensors = (
        q, k, v, state, history_u, history_k, history_G, cursor, g, beta, a, b, A_log, dt_bias, cu_seqlens,
        read_index,
    )  # fmt: skip
    options = (
        max_seqlen, scale, lower_bound, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, null_slot,
        backend,
    )  # fmt: skip
    return _replay_decode(q, tensors, out, options)


def replay_commit(
    state: Tensor,
    history_u: Tensor,
    history_k: Tensor,
    history_G: Tensor,
    cursor: Tensor,
    index: Index,
    accepted: Index,
    *,
    room: int,
    update_cursor: bool = True,
    state_v_first: bool = False,
    null_slot: int | None = None,
    backend: str | None = None,
) -> None:
    """Advance the cursors by the accepted tokens, after verification; fold full histories into their states.

        P = cursor[slot] + accepted
        if P + room > places:   S <- e^(G_P) S + sum_(j < P) e^(G_P - G_j) k_j u_j^T;   P = 0
        cursor[slot] = P

    Args:               shape                            dtype
        state           [layers, slots, HV, K, V]        fp32, bf16, fp16; any stride; written where folded
        history_u, history_k, history_G                  as in `replay_decode`, with a leading axis of layers
        cursor          [slots] int                      updated in place
        index           [n] int                          slots that were verified
        accepted        [n] int                          tokens of the last packet to keep; clamped to
                                                         0 .. room and to the places of the history
        room            int, 1 to places                 places to leave free: the length of the longest
                                                         later packet. With room = places every history is
                                                         folded
        update_cursor   bool                             False: leave the cursors unchanged; for layers in
                                                         separate tensors, True only for the last one
        state_v_first, null_slot, backend                as in `decode`

    An invalid slot is skipped. No slot may occur twice. A caller that writes the state of a slot itself, for
    example by `prefill`, must set its cursor to 0. A caller that reads the state, for example for a prefix
    cache, must fold first.
    Raises: TypeError, ValueError, NotImplementedError as in `gdn.problem`; no tensor has been modified then.
    Cost:   per folded slot and layer one state is read and written and its history read; two launches.
    Source: as `replay_decode`.
    """
    problem = parse_keep(
        state=state, history_u=history_u, history_k=history_k, history_G=history_G, cursor=cursor,
        index=index, accepted=accepted, room=room, update_cursor=update_cursor, state_v_first=state_v_first,
        null_slot=null_slot, backend=backend,
    )  # fmt: skip
    if is_plain(state):
        _commit(problem)
    else:
        _COMMIT_OPERATOR(*problem.arguments())


def _commit(problem: KeepProblem) -> None:
    def run() -> tuple[()]:
        select(problem).replay_commit(problem)
        return ()

    guarded(_COMMIT, problem.state.device, run, problem)


_COMMIT = Signature("replay_commit", ())
_COMMIT_OPERATOR = define_writer(
    "replay_commit", KeepProblem.declaration, lambda *args: _commit(KeepProblem(*args))
)
_replay_decode = PoolFunction(Signature("replay_decode", TOKENS, ("o",)), ReplayProblem, parse_replay)
