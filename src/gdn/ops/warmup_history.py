"""List the calls of decoding with a history for `warmup`: (function, form, call on small tensors)."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from gdn.ops.history import HistoryPool, allocate_history_pool, decode_with_history, fold_history
from gdn.ops.prefill import prefill
from gdn.ops.step import decode_step
from gdn.ops.warmup_calls import PLACES, Call
from gdn.ops.warmup_sizes import Sizes


def history(s: Sizes, dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls that append to histories, with drafts and without, or fold them and decode; prefills."""
    for N in sorted({1, s.rows if len(s.batches()) > 1 else 1}):
        for T in s.packets():
            for places in (P for P in PLACES if 2 * T <= P):
                pool = _pool(s, dtype, N, T, places)
                for gates in s.gates:
                    yield from _decodes(s, pool, gates, T)
                options: dict[str, Any] = {"state_v_first": s.v_first, "backend": s.backend}
                for drafts in (None, s.index(N)):
                    called = partial(fold_history, pool, s.index(N), num_accepted=drafts, **options)
                    yield "fold_history", f"N={N} T={T}, {places} places", called
        for places in PLACES:
            yield from _steps(s, _pool(s, dtype, N, 1, places))
    for N, T in s.prompts():
        yield from _prefills(s, _pool(s, dtype, 2 * N, 1, min(PLACES)), N, T)


def _pool(s: Sizes, dtype: torch.dtype, N: int, T: int, places: int) -> HistoryPool:
    return allocate_history_pool(
        N, num_k_heads=s.H, num_v_heads=s.HV, head_k_dim=s.K, head_v_dim=s.V, places=places, room=T,
        state_dtype=dtype, history_dtype=s.dtype, state_v_first=s.v_first,
        decay="channel" if s.is_per_channel else "head", device=s.device,
    )  # fmt: skip


def _decodes(s: Sizes, pool: HistoryPool, gates: str, T: int) -> Iterator[Call]:
    """Yield calls of T tokens for each slot, in dense rows and in packed ones."""
    N, places = pool.cursor.shape[0], pool.history_u.shape[1]
    where: dict[str, Any] = {"pool": pool, "read_index": s.index(N), **s.conventions}
    by_offsets: dict[str, Any] = {"cu_seqlens": s.offsets(N, T), "max_seqlen": T}
    for lead, packed in (((N, T), {}), ((1, N * T), by_offsets)):
        given = {**s.tokens(*lead), **getattr(s, gates)(*lead), **where, **packed}
        form = f"{gates} T={T} N={N}{' by offsets' if packed else ''}, {places} places"
        for more in (*_ways(pool), {"num_accepted": s.index(N)}):
            yield "decode_with_history", form, partial(decode_with_history, **given, **more)


def _prefills(s: Sizes, pool: HistoryPool, N: int, T: int) -> Iterator[Call]:
    """Yield prefills of N prompts, whole and with stored states; each has the fold before it."""
    slots, begins = s.index(N), torch.zeros(N, dtype=torch.bool, device=s.device)
    kept = torch.zeros(N * (T // 64) + 1, *pool.state.shape[1:], device=s.device)
    forms: dict[str, dict[str, Any]] = {
        "": {},
        "begins": {"has_initial_state": begins},
        "splits": {"out_state_index": slots + N},
        "stored": {
            "has_initial_state": begins, "checkpoints": kept, "checkpoint_every": 64,
            "checkpoint_offsets": slots, "snapshot_pos": slots, "snapshot_index": slots + N,
        },
    }  # fmt: skip
    for gates in s.gates:
        given = {**s.tokens(1, N * T), **getattr(s, gates)(1, N * T), **s.conventions, "state": pool}
        given |= {"cu_seqlens": s.offsets(N, T), "state_index": slots}
        for name, more in forms.items():
            called = partial(prefill, **given, **more)
            yield "prefill", f"{gates} N={N} T={T} {name} with a history", called


def _steps(s: Sizes, pool: HistoryPool) -> Iterator[Call]:
    """Yield calls of decode_step, with a norm and without."""
    N = pool.cursor.shape[0]
    window = torch.zeros(N, s.channels, s.W - 1, dtype=s.dtype, device=s.device)
    weight = torch.zeros(s.channels, s.W, dtype=s.dtype, device=s.device)
    given: dict[str, Any] = {"conv_state": window, "conv_weight": weight, "conv_bias": None, "state": pool}
    given |= {"num_k_heads": s.H, "head_k_dim": s.K, "head_v_dim": s.V, "read_index": s.index(N)}
    z = torch.zeros(N, s.HV, s.V, dtype=s.dtype, device=s.device)
    norm: dict[str, Any] = {"z": z, "norm_weight": torch.ones(s.V, dtype=s.dtype, device=s.device)}
    for way in _ways(pool):
        for more in ({}, norm):
            called = partial(decode_step, s.mixed(N), **given, **s.raw(N), **s.conventions, **more)
            yield "decode_step", f"N={N} with a history", partial(called, **way)


def _ways(pool: HistoryPool) -> list[dict[str, Any]]:
    """Return the choices of the way that a pool has: states in int8 have no plain one."""
    return [{"use_history": uses} for uses in (True, False) if uses or pool.state.dtype != torch.int8]
