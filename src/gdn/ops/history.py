"""Provide gdn::decode_with_history and gdn::fold_history: decode on states that are written now and then.

A token adds an outer product of K + V values to the K V values of a state. `decode` reads and writes the
whole state for it. Here the K + V values go into the history of the slot and the state is only read. A full
history is folded into the state in the launch that decodes the next token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn._torch_compat import is_plain
from gdn.backends import select
from gdn.backends.eager.integers import states_of
from gdn.notation import Decay, GateBias, HeadParam, Index, Keys, Offsets, PerHead, Pool, Q, Values
from gdn.ops.fastpath import PoolFunction
from gdn.ops.int16 import read_slots, write_slots
from gdn.ops.library import Signature, define_writer, guarded
from gdn.ops.serving import TOKENS
from gdn.problem import FoldProblem, HistoryProblem, check
from gdn.problem.history import (
    COLUMNS,
    check_pool_dtypes,
    check_pool_sizes,
    check_sizes,
    parse_fold,
    parse_history,
)


@dataclass(frozen=True)
class HistoryPool:
    """Hold a pool of states whose slots have a history and a cursor, for one layer or for several.

    `allocate_history_pool` makes one; an engine may also give views of its own memory.

        state of a slot = e^(G_P) S + sum_(j < P) e^(G_P - G_j) k_j u_j^T,   P places of its history in use

    Fields:         shape                     dtype
        state       [slots, HV, K, V]         fp32, bf16, fp16, or integers with scales; any strides; with
                                              state_v_first [.., V, K]
        history_u   [slots, places, HV, V]    any float; what each token wrote: d, divided by the norm of k
                                              with use_qk_l2norm_in_kernel
        history_k   [slots, places, H, K]     any float; k as passed
        history_G   [slots, places, HV]       fp64; sums of g since the state was written. With a decay per
                                              key channel [slots, places, HV, K] in fp32: g itself
        cursor      [slots, 3]                int32: the first place in use, the places in use, and a count of
                                              the kernel, 0 between calls
        room        int                       the most tokens of a call's row, at most half of the places
        column_scale  [slots, HV, V]          fp32: the scales of states in int16, as those of an `Int16Pool`,
                                              or in int8; None for floats
        remainder   [slots, HV, K / 2, V]     uint8, K / 2 rounded up, with state_v_first [.., V, K / 2]: 4
                                              more bits of states in int8, of keys 2 j and 2 j + 1 in the low
                                              and the high half of a byte; None: without them

    States in int8: a token reads `state` alone, a fold reads and writes both.
        S_kv = (15 state_kv + remainder_kv) column_scale_v, column_scale_v = max_k |S_kv| / 1905; or, without
        a remainder, S_kv = state_kv column_scale_v, column_scale_v = max_k |S_kv| / 127

    With several layers each tensor has a leading axis of layers, and `pool[layer]` is the pool of one layer.
    A history is a ring of `places`. It is folded when fewer than `room` places would be left for the next
    call.
    """

    state: Pool
    history_u: Tensor
    history_k: Tensor
    history_G: Tensor
    cursor: Tensor
    room: int = 1
    column_scale: Tensor | None = None
    remainder: Tensor | None = None

    def __getitem__(self, layer: int) -> "HistoryPool":
        """Return the pool of one layer, whose tensors are views."""
        state, u, k, G, cursor = (x[layer] for x in self._always())
        scale, low = (None if x is None else x[layer] for x in (self.column_scale, self.remainder))
        return HistoryPool(state, u, k, G, cursor, self.room, scale, low)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors of the pool: state, history_u, history_k, history_G, cursor; for integers, then
        column_scale, and remainder if there is one."""
        given = (x for x in (self.column_scale, self.remainder) if x is not None)
        return *self._always(), *given

    def _always(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the tensors that every pool has."""
        return self.state, self.history_u, self.history_k, self.history_G, self.cursor

    @property
    def bytes_per_slot(self) -> int:
        """Return the bytes of a slot in one layer: its state, its history and its cursor."""
        return sum(x[(0,) * (self.cursor.dim() - 1)].nbytes for x in self.tensors())

    def read(
        self, index: Index, *, state_v_first: bool = False, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the states of the slots `index` [n] of one layer in a float dtype: [n, HV, K, V].

        They are without what the histories hold: call `fold_history` first. A slot below 0 or past the pool
        reads as zeros. Raises TypeError, ValueError for wrong tensors.
        """
        return read_slots(states_of(self, state_v_first), index, state_v_first, dtype)

    def write(self, index: Index, states: Tensor, *, state_v_first: bool = False) -> None:
        """Store `states` [n, HV, K, V] of any float in slots `index` [n] of one layer; empty their histories.

        Integers are rounded as a fold rounds them. `prefill` takes the pool itself and does the same for the
        states that it stores; this is for states of other origin. A slot below 0 or past the pool is
        skipped; no slot may be written twice. Raises TypeError, ValueError for wrong tensors; nothing is
        written then.
        """
        check.writable("cursor", self.cursor)
        write_slots(states_of(self, state_v_first), index, states, state_v_first)
        self.reset(index)

    def reset(self, index: Index) -> None:
        """Empty the histories of the slots `index` [n] in every layer, for new or rewritten states.

        Call it where other code writes the states of slots; `prefill` on the pool itself does it. A slot
        below 0 or past the pool is skipped. It can be captured in a CUDA graph. Raises TypeError, ValueError
        unless index is [n] of int32 or int64.
        """
        check.integral("index", index)
        check.shape("index", index, "n", {})
        *_, slots, _ = self.cursor.shape
        is_reset = (torch.arange(slots, device=index.device)[:, None] == index).any(1)
        self.cursor.masked_fill_(is_reset.to(self.cursor.device)[:, None], 0)

    def explain(self, rows: int, tokens: int = 1, dtype: torch.dtype = torch.bfloat16) -> str:
        """Return, in a line, what `decode_with_history` does by itself for so many rows, and its backend."""
        last = self.cursor.shape[0] - 1
        # all layers have the same sizes
        pool = self[last] if self.cursor.dim() > 2 else self
        (_, _, H, K), (_, _, HV, V) = pool.history_k.shape, pool.history_u.shape
        q = pool.history_k.new_empty(rows, tokens, H, K, dtype=dtype)
        v, given = q.new_empty(rows, tokens, HV, V), dict.fromkeys(_decode_with_history.arguments.names)
        flags = dict.fromkeys(("use_qk_l2norm_in_kernel", "allow_neg_eigval"), False)
        is_v_first = tuple(pool.state.shape[2:]) != (K, V)
        given |= {"q": q, "k": q, "v": v, "room": self.room, "state_v_first": is_v_first, **flags}
        given |= {"state": pool.state, "history_u": pool.history_u, "history_k": pool.history_k}
        given |= {"history_G": pool.history_G, "cursor": pool.cursor, "column_scale": pool.column_scale}
        given |= {"remainder": pool.remainder}
        given["read_index"] = torch.zeros(rows, dtype=torch.int32, device=pool.state.device)
        problem = parse_history(**given)
        backend = select(problem)
        way = "appends to the histories" if backend.appends_history(problem) else "writes every state"
        return f"{backend.name}: {way} ({rows} rows x {HV} heads of {K} x {V})"


def allocate_history_pool(
    *lead: int,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    places: int = 16,
    room: int = 1,
    state_dtype: torch.dtype = torch.float32,
    history_dtype: torch.dtype = torch.bfloat16,
    with_remainder: bool = True,
    state_v_first: bool = False,
    decay: str = "head",
    device: torch.device | str | None = None,
) -> HistoryPool:
    """Allocate zero states and empty histories for `lead`: slots, or layers and slots.

    Args:
        num_k_heads, num_v_heads    H, HV
        head_k_dim, head_v_dim      K, V
        places                      tokens that the history of a slot holds, 2 to 32
        room                        the most tokens of a row in later calls, at most half of the places
        state_dtype, history_dtype  dtypes of the states, and of u and k; int16 and int8: states with scales
        with_remainder              states in int8 have a remainder of 4 bits, which folds read
        state_v_first               layout of the states
        decay                       "head" or "channel": what a number of g decays
        device                      None: PyTorch's default device

    Returns: a HistoryPool, whose `bytes_per_slot` is the memory of a slot in one layer.
    Raises: TypeError, ValueError for sizes out of range, and for other dtypes.
    Cost:   at 16/32 heads of 128 x 128 a place takes 12.5 KB in bf16, and a state 2.1 MB in fp32.
    """
    check_sizes(lead, decay, places, room)
    check_pool_sizes(
        lead, num_k_heads=num_k_heads, num_v_heads=num_v_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim
    )
    check_pool_dtypes(state_dtype, history_dtype)
    H, HV, K, V = num_k_heads, num_v_heads, head_k_dim, head_v_dim
    history = (*lead, places)
    decays, dtype = ((HV, K), torch.float32) if decay == "channel" else ((HV,), torch.float64)
    tensors = (
        ((*lead, HV, *((V, K) if state_v_first else (K, V))), state_dtype),
        ((*history, HV, V), history_dtype),
        ((*history, H, K), history_dtype),
        ((*history, *decays), dtype),
        ((*lead, COLUMNS), torch.int32),
    )
    state, u, k, G, cursor = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in tensors)
    scale = low = None
    if state_dtype in (torch.int16, torch.int8):
        scale = torch.zeros(*lead, HV, V, dtype=torch.float32, device=device)
    if state_dtype == torch.int8 and with_remainder:
        pairs = -(-K // 2)  # of keys, in a byte
        sizes = (V, pairs) if state_v_first else (pairs, V)
        low = torch.zeros(*lead, HV, *sizes, dtype=torch.uint8, device=device)
    return HistoryPool(state, u, k, G, cursor, room, scale, low)


def decode_with_history(
    q: Q,
    k: Keys,
    v: Values,
    pool: HistoryPool,
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
    num_accepted: Index | None = None,
    use_history: bool | None = None,
    null_slot: int | None = None,
    out: Values | None = None,
    backend: str | None = None,
) -> Values:
    """Run a token, or up to pool.room tokens, for each row; append what they write to the slot's history.

        S = e^(G_P) state + sum_(j < P) e^(G_P - G_j) k_j u_j^T,   P places in use;   then as `decode`:
        S <- e^g S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q
        if P + T > places - room:   state <- S before the tokens, and the history holds the tokens alone

    One launch does all of it: it appends, folds the rows whose history is full, and moves the cursors, each
    decided on the device. Nothing follows it, and it can be captured in a CUDA graph.

    Args:            shape                 dtype
        pool         HistoryPool           of one layer; all its tensors are updated in place
        read_index   [B] int or None       the slot of each row; None: the row's number
        num_accepted [B] int or None       None: all tokens are kept. A tensor: this call's tokens are drafts,
                                           and it says how many drafts of the slot's last call are kept, 0 to
                                           T; 0 for a slot without drafts
        use_history  bool or None          True: append. False: fold what the history holds, then run
                                           `decode`, which writes the state. None: append where measurements
                                           have shown it faster (`HistoryPool.explain`), and always with
                                           num_accepted or states in int8, for which False raises
        q, k, v, the gates, scale, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
        max_seqlen, null_slot, out, backend    as in `decode`
    use_history may differ from call to call: both ways continue from any history.

    Returns: o [B, T, HV, V] (or [1, total, HV, V], zero past cu_seqlens[-1]), dtype of q.

    Padding: a row without a valid slot outputs zeros, and no memory is read or written for it. No two rows
            may have the same slot.
    Bits:   a row does not depend on the rows around it, where use_history is True or False. The results equal
            those of `decode` within rounding; with use_history=False, and empty histories, bit for bit.
    Raises: TypeError, ValueError, NotImplementedError as in `gdn.problem`; ValueError if a gradient is
            required; no tensor has been modified then. `triton` supports rows of up to 16 tokens; `hopper`
            one token a row on states of 128 x 128 in bf16 or fp32, with the bits of `triton`.
    Cost:   per row one state and P places read, T places written; a fold also writes the state. Without
            appending one state is read and written.
    Source: arXiv:2412.06464, section 3.3, on one short chunk.

    Example:
        >>> import torch, gdn
        >>> pool = gdn.allocate_history_pool(
        ...     8, num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=16)
        >>> x, v, slots = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 4, 16), torch.tensor([5])
        >>> for _ in range(3):
        ...     o = gdn.decode_with_history(x, x, v, pool, read_index=slots, use_history=True)
        >>> pool.cursor[5].tolist(), bool(pool.state.any())
        ([0, 3, 0], False)
        >>> gdn.fold_history(pool, slots)
        >>> pool.cursor[5].tolist(), bool(pool.state[5].any())
        ([0, 0, 0], True)
    """
    _check_pool(pool)
    tensors = (
        q, k, v, *pool._always(), g, beta, a, b, A_log, dt_bias, pool.column_scale, pool.remainder,
        cu_seqlens, read_index, num_accepted,
    )  # fmt: skip
    options = (
        max_seqlen, scale, lower_bound, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, pool.room,
        use_history, null_slot, backend,
    )  # fmt: skip
    return _decode_with_history(q, tensors, out, options)


def fold_history(
    pool: HistoryPool,
    index: Index,
    *,
    num_accepted: Index | None = None,
    state_v_first: bool = False,
    null_slot: int | None = None,
    backend: str | None = None,
) -> None:
    """Fold the histories of some slots into their states, for code that reads the states.

        S <- e^(G_P) S + sum_(j < P) e^(G_P - G_j) k_j u_j^T;   P = 0

    Args:            shape             dtype
        pool         HistoryPool       of one layer; `state` and `cursor` are updated in place
        index        [n] int           slots to fold; an invalid slot is skipped, and none may occur twice
        num_accepted [n] int or None   as in `decode_with_history`: how many drafts of the last call to keep
        state_v_first, null_slot, backend    as in `decode`

    Call it before anything else reads a state: a prefix cache, another machine, `decode`. A slot with an
    empty history keeps the bits of its state.
    Raises: TypeError, ValueError, NotImplementedError as in `gdn.problem`; no tensor has been modified then.
    Cost:   per folded slot one state is read and written and its history read; one launch.
    Source: as `decode_with_history`.
    """
    _check_pool(pool)
    problem = parse_fold(
        state=pool.state, history_u=pool.history_u, history_k=pool.history_k, history_G=pool.history_G,
        cursor=pool.cursor, column_scale=pool.column_scale, remainder=pool.remainder, index=index,
        num_accepted=num_accepted, room=pool.room, state_v_first=state_v_first, null_slot=null_slot,
        backend=backend,
    )  # fmt: skip
    if is_plain(pool.state):
        _fold(problem)
    else:
        _FOLD_OPERATOR(*problem.arguments())


def _check_pool(pool: Any) -> None:
    if not isinstance(pool, HistoryPool):
        raise TypeError(f"pool: expected a HistoryPool, got {type(pool).__name__}")


def _fold(problem: FoldProblem) -> None:
    def run() -> tuple[()]:
        select(problem).fold_history(problem)
        return ()

    guarded(_FOLD, problem.state.device, run, problem)


_FOLD = Signature("fold_history", ())
_FOLD_OPERATOR = define_writer(
    "fold_history", FoldProblem.declaration, lambda *args: _fold(FoldProblem(*args))
)
_decode_with_history = PoolFunction(
    Signature("decode_with_history", TOKENS, ("o",)), HistoryProblem, parse_history
)
