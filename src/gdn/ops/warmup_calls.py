"""List the calls of each engine for `warmup`: (function, form, call on small tensors of its own)."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gdn.ops import conv as short_conv
from gdn.ops.gate import gate
from gdn.ops.int16 import Int16Pool
from gdn.ops.norm import rms_norm_gated
from gdn.ops.prefill import commit, prefill
from gdn.ops.replay import replay_commit, replay_decode
from gdn.ops.rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from gdn.ops.serving import decode, decode_functional, decode_packed
from gdn.ops.step import decode_step
from gdn.ops.warmup_sizes import LENGTH, Sizes

Call = tuple[str, str, Callable[[], Any]]
PLACES = (16, 32)  # of a replay history: one block of the kernel, and two


def layer(s: Sizes, training: bool) -> Iterator[Call]:
    """Yield calls of the rule on whole sequences, and of the gate and the norm around it."""
    for N, T in s.prompts():
        yield "chunk_gated_delta_rule", f"N={N} T={T}", partial(_rule, s, N, T, training)
    x = s.tokens(1, LENGTH)
    given = {**x, **s.active(1, LENGTH), "output_final_state": True, "backend": s.backend}
    yield "fused_recurrent_gated_delta_rule", "", partial(fused_recurrent_gated_delta_rule, **given)
    for lead in ((1, LENGTH), (LENGTH,)):
        yield "gate", f"{len(lead) + 1}-D", partial(gate, **s.raw(*lead), backend=s.backend)
    weight = torch.ones(s.V, dtype=s.dtype, device=s.device)
    yield "rms_norm_gated", "", partial(rms_norm_gated, x["v"], x["v"], weight, backend=s.backend)


def _rule(s: Sizes, N: int, T: int, training: bool) -> None:
    options: dict[str, Any] = {"output_final_state": True, "backend": s.backend}
    options["cu_seqlens"] = s.offsets(N, T)
    leaves = [*s.tokens(1, N * T).values(), *s.active(1, N * T).values()]
    leaves = [x.detach().requires_grad_(training) for x in leaves]
    with torch.set_grad_enabled(training):
        o, final_state = chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, **options)
    if training and final_state is not None:
        torch.autograd.grad((o, final_state), leaves, (torch.ones_like(o), torch.ones_like(final_state)))


def windows(s: Sizes, engine: str) -> Iterator[Call]:
    """Yield calls of the convolution on the windows of an engine, in both memory layouts of the channels."""
    # vLLM has filters in fp32 where a decay is per key channel
    dtype = torch.float32 if engine == "vllm" and s.is_per_channel else s.dtype
    weight = torch.zeros(s.channels, s.W, dtype=dtype, device=s.device)
    more: dict[str, Any] = {"activation": "silu", "backend": s.backend}
    x, index = s.mixed(1, LENGTH), s.index(1)
    packed: dict[str, Any] = {"cu_seqlens": s.offsets(1, LENGTH), **more}
    null: dict[str, Any] = {"null_slot": 0} if engine == "vllm" else {}
    begins = torch.zeros(1, dtype=torch.bool, device=s.device)
    yield "causal_conv1d", engine, partial(short_conv.causal_conv1d, x, weight, **more)
    wide = torch.zeros(s.channels, s.W + 1, dtype=dtype, device=s.device)
    before = torch.zeros(1, s.channels, s.W, dtype=s.dtype, device=s.device)
    for taps, window in ((weight, before[..., 1:]), (wide, before)):
        states: dict[str, Any] = {"initial_state": window, "output_final_state": True}
        call = partial(short_conv.causal_conv1d, x, taps, **states, **packed)
        yield "causal_conv1d", f"{engine} initial_state", call
    apart = torch.zeros(2, s.channels, s.W - 1 + s.T, dtype=s.dtype, device=s.device)
    for name, pool in (("", apart), (" beside", torch.zeros_like(apart.mT).mT)):
        # vLLM and SGLang store the window at the front of a longer block
        window = pool[:, :, : s.W - 1] if engine in ("vllm", "sglang") else pool
        for has in (None, begins):
            states = {"state": window, "state_index": index, "has_initial_state": has}
            call = partial(short_conv.causal_conv1d, x, weight, **states, **packed, **null)
            yield "causal_conv1d", f"{engine} pool{name}", call
        ways: list[dict[str, Any]] = [{}, {"ring_pos": index}, {"num_accepted": index}]
        for where, T in ((where, T) for where in ways for T in sorted({1, s.T})):
            kind = next(iter(where), "window")
            given = {**where, **null, "state_index": index, **more}
            held = pool if where else window
            step = partial(short_conv.causal_conv1d_update, s.mixed(1, T), held, weight, **given)
            yield "causal_conv1d_update", f"{engine} {kind}{name} T={T}", step


def _decode(s: Sizes, form: str, gates: str, lead: tuple[int, int], **where: Any) -> Call:
    given = {**s.tokens(*lead), **getattr(s, gates)(*lead), **s.conventions}
    return "decode", f"{form} {gates}", partial(decode, **given, **where)


def _packed(s: Sizes, pool: Tensor | Int16Pool, **where: Any) -> Call:
    widths: dict[str, Any] = {"num_k_heads": s.H, "head_k_dim": s.K, "head_v_dim": s.V, **s.conventions}
    return "decode_packed", "", partial(decode_packed, s.mixed(1), **s.raw(1), state=pool, **widths, **where)


def _dtype_of(pool: Tensor | Int16Pool) -> torch.dtype:
    return pool.dtype if isinstance(pool, Tensor) else pool.state.dtype


def _prefill(
    s: Sizes, gates: str, pool: Tensor | Int16Pool, prompts: list[tuple[int, int]] | None = None, *,
    index: torch.dtype | None = None, begins: bool = False, splits: bool = False, checkpoints: bool = False,
    snapshots: bool = False, **options: Any,
) -> Iterator[Call]:  # fmt: skip
    """Yield calls of `prefill`; by default one for every number of prompts."""
    asked = {"begins": begins, "splits": splits, "checkpoints": checkpoints, "snapshots": snapshots}
    for N, T in s.prompts() if prompts is None else prompts:
        given = {**s.tokens(1, N * T), **getattr(s, gates)(1, N * T), **s.conventions}
        slots = s.index(N, dtype=index)
        where: dict[str, Any] = {"state": s.pool(_dtype_of(pool), 2 * N)}
        where |= {"cu_seqlens": s.offsets(N, T), "state_index": slots}
        if begins:
            where["has_initial_state"] = torch.zeros(N, dtype=torch.bool, device=s.device)
        if splits:
            where["out_state_index"] = slots + N
        if checkpoints:
            where["checkpoints"] = s.states(torch.float32, N * (T // 64) + 1)
            where |= {"checkpoint_every": 64, "checkpoint_offsets": slots}
        if snapshots:
            where |= {"snapshot_pos": slots, "snapshot_index": slots + N}
        call = partial(prefill, **{**given, **where, **options})
        words = " ".join(name for name, is_asked in asked.items() if is_asked)
        yield "prefill", f"{gates} N={N} T={T} {words}", call


def own(s: Sizes, dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of the public functions in each protocol, with the gates and indices of `s`."""
    pool, row, is_int16 = s.pool(dtype, s.T + 1), s.index(1), dtype == torch.int16
    layers = s.pool(dtype, 1, s.T + 1)
    layout: dict[str, Any] = {"state_v_first": s.v_first} if is_int16 else {}
    for T in sorted({1, s.T}):
        functional = partial(decode_functional, state=s.kept(dtype, 1), **s.conventions)
        for gates in () if is_int16 else s.gates:
            given = {**s.tokens(1, T), **getattr(s, gates)(1, T)}
            yield "decode_functional", f"T={T} {gates}", partial(functional, **given)
        once = partial(commit, layers, s.kept(dtype, 1, 1, T), row, row, row, **layout)
        yield "commit", f"T={T}", once
        yield "commit", f"T={T} tracked", partial(once, extra_dst_index=row + 1, extra_step=row)
    for gates in s.gates:
        yield from _protocols(s, dtype, gates)
        for T in () if is_int16 else s.packets():
            yield from _packets(s, dtype, gates, T) if min(PLACES) >= T else ()
        yield from _prefills(s, gates, pool)
    by_offsets: dict[str, Any] = {"cu_seqlens": s.offsets(1, 1), "max_seqlen": 1}
    for rows in ({}, by_offsets):
        yield _packed(s, pool, read_index=row, **rows)
    yield from _steps(s, pool, row)


def _protocols(s: Sizes, dtype: torch.dtype, gates: str) -> Iterator[Call]:
    """Yield decode calls with one token, a packet, and packed rows.

    For states narrower than fp32 each call also runs with round_state.
    """
    pool, row = s.pool(dtype, s.T + 1), s.index(1)
    by_offsets: dict[str, Any] = {"cu_seqlens": s.offsets(1, s.T), "max_seqlen": s.T}
    for T, rows in ((1, {}), (s.T, {}), (s.T, by_offsets)):
        ring, kept, table = s.pool(dtype, 2, 2), s.kept(dtype, 1, T), s.index(1, T)
        here: dict[str, Any] = {"state": pool, "read_index": row}
        verify = here | {"write": "none", "intermediate": kept}
        forms: dict[str, dict[str, Any]] = {
            "rows": {"state": s.pool(dtype, 1)},
            "index": here,
            "P1": here | {"state": ring, "ring_pos": row, "write": "all"},
            "P2": here | {"read_index": table, "num_accepted": row, "write_index": table, "write": "all"},
            "P3": verify,
            "P3 by row": verify | {"intermediate_row": row},
            "P4": verify | {"parent": table},
            "P4 by row": verify | {"parent": table, "intermediate_row": row},
            "P6": here | {"write_index": row},
        }
        for name, where in forms.items():
            form = f"{name} T={T}{' by offsets' if rows else ''}"
            yield _decode(s, form, gates, (1, T), **where, **rows)
            if dtype != torch.float32:
                yield _decode(s, f"{form} rounded", gates, (1, T), **where, **rows, round_state=True)


def _prefills(s: Sizes, gates: str, pool: Tensor | Int16Pool) -> Iterator[Call]:
    """Yield prefill calls.

    The kernels of the rule depend on the number of prompts, and where they update the pool in place on the
    choice of slots: run all of these, and snapshots, for every number. The kernels around the rule depend on
    what is stored: run every choice of stored states for one prompt only.
    """
    writes: tuple[dict[str, Any], ...] = ({}, {"splits": True}, {"update_state": False})
    for begins, more in product((False, True), writes):
        yield from _prefill(s, gates, pool, begins=begins, **more)
    yield from _prefill(s, gates, pool, snapshots=True)
    for begins, (checkpoints, snapshots) in product(
        (False, True), ((True, False), (False, True), (True, True))
    ):
        stored = {"begins": begins, "checkpoints": checkpoints, "snapshots": snapshots}
        for more in writes:
            yield from _prefill(s, gates, pool, [(1, LENGTH)], **(stored | more))


def _steps(
    s: Sizes, pool: Tensor | Int16Pool, row: Tensor, taps: torch.dtype | None = None,
    norm_dtype: torch.dtype | None = None, **options: Any,
) -> Iterator[Call]:  # fmt: skip
    """Yield calls of decode_step, with a norm and without; tile sizes depend on the number of rows."""
    for N in s.batches():
        weight = torch.zeros(s.channels, s.W, dtype=taps or s.dtype, device=s.device)
        windows = torch.zeros(2, s.channels, s.W - 1, dtype=s.dtype, device=s.device)
        widths: dict[str, Any] = {"num_k_heads": s.H, "head_k_dim": s.K, "head_v_dim": s.V}
        given: dict[str, Any] = {"conv_state": windows, "conv_weight": weight, "conv_bias": None}
        given |= {"state": pool, **widths, **s.conventions, **options}
        # slot -1 makes every row padding
        given |= {"mixed_qkv": s.mixed(N), "read_index": row.repeat(N) - 1, **s.raw(N)}
        gate = torch.zeros(N, s.HV, s.V, dtype=s.dtype, device=s.device)
        ones = torch.ones(s.V, dtype=norm_dtype or s.dtype, device=s.device)
        norm: dict[str, Any] = {"z": gate, "norm_weight": ones}
        for form, more in (("normed", norm), ("bare", {})):
            yield "decode_step", f"{form} N={N}", partial(decode_step, **given, **more)


def _packets(s: Sizes, dtype: torch.dtype, gates: str, T: int) -> Iterator[Call]:
    """Yield calls that use tensor cores, with tiles for few rows and for many.

    They are replay (P5), with histories in the dtype of the activations, and the chunk form of decode.
    """
    for N in sorted({1, s.rows if len(s.batches()) > 1 else 1}):
        pool, rows = s.pool(dtype, N), s.index(N)
        u = torch.zeros(N, max(PLACES), s.HV, s.V, dtype=s.dtype, device=s.device)
        k = torch.zeros(N, max(PLACES), s.H, s.K, dtype=s.dtype, device=s.device)
        wide = torch.float32 if s.is_per_channel else torch.float64
        G = torch.zeros(N, max(PLACES), *s.decay_shape, dtype=wide, device=s.device)
        history: dict[str, Any] = {"history_u": u, "history_k": k, "history_G": G}
        more: dict[str, Any] = {"state_v_first": s.v_first, "backend": s.backend}
        where: dict[str, Any] = {"state": pool, "read_index": rows, **s.conventions}
        by_offsets: dict[str, Any] = {"cu_seqlens": s.offsets(N, T), "max_seqlen": T}
        for lead, packed in (((N, T), {}), ((1, N * T), by_offsets)):
            given = {**s.tokens(*lead), **getattr(s, gates)(*lead), **where, **packed}
            form = f"{gates} T={T} N={N}{' by offsets' if packed else ''}"
            for P in PLACES:
                held = {name: x[:, :P] for name, x in history.items()}
                called = partial(replay_decode, **given, **held, cursor=rows * 0)
                yield "replay_decode", f"{form}, {P} places", called
            yield "decode", f"chunk form {form}", partial(decode, **given, exact_packet=False)
        for P in PLACES:
            each = (pool[None], u[None, :, :P], k[None, :, :P], G[None, :, :P], rows * 0, rows, rows)
            yield "replay_commit", f"T={T} N={N}, {P} places", partial(replay_commit, *each, room=T, **more)


def vllm(s: Sizes, dtype: torch.dtype) -> Iterator[Call]:
    """Yield the calls of vLLM: packed decode, rows by index or block table, prompts with gathered states."""
    pool, row, table = s.pool(dtype, s.T + 1), s.index(1), s.index(1, s.T)
    yield _packed(s, pool, read_index=row, null_slot=0)
    if s.is_per_channel:
        # filters in fp32, and a norm with a sigmoid
        gated: dict[str, Any] = {"norm_activation": "sigmoid"}
        yield from _steps(s, pool, row, torch.float32, null_slot=0, **gated)
        x, weight = s.tokens(1, LENGTH)["v"], torch.ones(s.V, device=s.device)
        for w in (weight, weight.to(s.dtype)):
            norm = partial(rms_norm_gated, x, x, w, activation="sigmoid", backend=s.backend)
            yield "rms_norm_gated", "vllm sigmoid", norm
    else:
        yield from _steps(s, pool, row, null_slot=0)
    for snapshots in (False, True):
        yield from _prefill(s, "raw", pool, begins=True, snapshots=snapshots, null_slot=0)
    for gates in ("raw", "active"):
        one: dict[str, Any] = {"cu_seqlens": s.offsets(1, 1), "max_seqlen": 1, "read_index": row}
        yield _decode(s, "vllm index", gates, (1, 1), state=pool, null_slot=0, **one)
        many: dict[str, Any] = {"cu_seqlens": s.offsets(1, s.T), "max_seqlen": s.T, "write": "all"}
        many |= {"read_index": table, "write_index": table, "num_accepted": row, "null_slot": 0}
        yield _decode(s, f"vllm table T={s.T}", gates, (1, s.T), state=pool, **many)
    for N in s.batches():
        yield "chunk_gated_delta_rule", f"vllm N={N}", partial(_from_states, s, dtype, N)
    yield from _prefill(
        s, "active", s.pool(torch.float32, 1), index=torch.int64, use_qk_l2norm_in_kernel=False
    )


def _from_states(s: Sizes, dtype: torch.dtype, N: int) -> None:
    chunk_gated_delta_rule(
        **s.tokens(1, N * LENGTH), **s.active(1, N * LENGTH), initial_state=s.pool(dtype, N),
        output_final_state=True, state_v_first=True, cu_seqlens=s.offsets(N, LENGTH), backend=s.backend,
    )  # fmt: skip


def sglang(s: Sizes, dtype: torch.dtype) -> Iterator[Call]:
    """Yield the calls of SGLang: decode, drafts in chains and trees, prompts tracked in fp32 or not."""
    pool, row, kept = s.pool(dtype, 2), s.index(1), s.pool(dtype, 1, s.T)
    if s.is_per_channel:
        # filters in fp32, and Kimi K3's norm with weights in fp32
        yield from _steps(s, pool, row, torch.float32, norm_activation="sigmoid", norm_dtype=torch.float32)
    wide = s.index(1, dtype=torch.int64)
    # windows of the drafts: each in its own memory, or views of one shared tensor (chains)
    window = torch.zeros(1, 2, s.channels, s.W - 1, dtype=s.dtype, device=s.device)
    apart = window[:, :1, None].repeat(1, 1, s.T, 1, 1)
    within = torch.zeros(1, 1, s.channels, s.T + s.W - 2, dtype=s.dtype, device=s.device)
    windows = ((window, apart), (window, within.unfold(3, s.W - 1, 1).transpose(2, 3)))
    yield _packed(s, pool, read_index=row)
    for gates in ("raw", "active"):
        one: dict[str, Any] = {"cu_seqlens": s.offsets(1, 1), "max_seqlen": 1, "read_index": row}
        yield _decode(s, "sglang index", gates, (1, 1), state=pool, **one)
        for rows in (None, row, wide):
            for parent in (None, s.index(1, s.T), s.index(1, s.T, dtype=torch.int64)):
                verify: dict[str, Any] = {"read_index": row, "write": "none", "intermediate": kept}
                verify |= {"cu_seqlens": s.offsets(1, s.T), "max_seqlen": s.T, "parent": parent}
                form = f"sglang verify T={s.T}"
                yield _decode(s, form, gates, (1, s.T), state=pool, intermediate_row=rows, **verify)
    moves: list[tuple[Tensor, Tensor]] = [(pool[None], kept[None]), *windows]
    for step in (row, wide):
        tracked: list[dict[str, Any]] = [{}, {"extra_dst_index": wide, "extra_step": step}]
        for rows in (row, wide):
            for more in tracked:
                for moved in moves:
                    yield "commit", f"sglang T={s.T}", partial(commit, *moved, row, rows, step, **more)
    # a kernel of channels gets logits, and writes the pool
    gates = "raw" if s.is_per_channel else "active"
    yield from _prefill(s, gates, pool)
    if not s.is_per_channel:
        yield from _prefill(s, gates, pool, update_state=False)
    yield from _prefill(s, gates, pool, checkpoints=True)
    # tracked states pass through a pool in fp32
    between = s.pool(torch.float32, 2)
    yield from _prefill(s, gates, between, snapshots=True)
    yield "commit", "sglang tracked", partial(commit, pool[None], between[None, :, None], row, row, row)


def lmdeploy(s: Sizes, dtype: torch.dtype) -> Iterator[Call]:
    """Yield the calls of LMDeploy: dense rows with int64 slots, rings with int32 positions, split slots."""
    pool, ring, wide = s.pool(dtype, 2), s.pool(dtype, 2, max(2, s.T)), s.index(1, dtype=torch.int64)
    yield from _steps(s, pool, wide)
    for gates in ("raw", "active"):
        yield _decode(s, "lmdeploy index", gates, (1, 1), state=pool, read_index=wide)
        where: dict[str, Any] = {"state": ring, "read_index": wide, "ring_pos": s.index(1)}
        for T in sorted({1, s.T}):
            yield _decode(s, f"lmdeploy ring T={T}", gates, (1, T), write="all", round_state=True, **where)
        for splits in (False, True):
            yield from _prefill(s, gates, pool, index=torch.int64, begins=True, splits=splits)


ENGINES: dict[str, Callable[[Sizes, torch.dtype], Iterator[Call]]] = {
    "gdn": own, "vllm": vllm, "sglang": sglang, "lmdeploy": lmdeploy,
}  # fmt: skip
