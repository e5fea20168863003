"""gdn as a provider: its public functions on the tensors of a benchmark's problem."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gdn
from gdn_bench.providers.provider import TOKENS, Bind, Bound, Options, Provider, Tensors

MAX_PACKET = 16  # tokens of a row that one replay_decode takes


def gdn_provider(backend: str | None = None) -> Provider:
    """Return gdn, on the backend that it chooses or on one by name (`gdn:NAME`)."""

    def chunk(tensors: Tensors, options: Options) -> Bound:
        arguments: dict[str, Any] = {**tensors, **options, "backend": backend}
        if "cu_seqlens" in tensors:
            # an engine has the offsets on the CPU, too
            arguments["cu_seqlens_cpu"] = tensors["cu_seqlens"].cpu()
        return Bound(lambda: gdn.chunk_gated_delta_rule(**arguments))

    def decode(tensors: Tensors, options: Options) -> Bound:
        pool, index, arguments = tensors["pool"], tensors["read_index"].long(), _on_pool(tensors, options)
        return Bound(lambda: gdn.decode(**arguments, backend=backend), lambda o: (o, pool[index].float()))

    def int16(tensors: Tensors, options: Options) -> Bound:
        # a pool of its own with two slots for each row, one read and one written: each call does equal work
        states, v_first = tensors["pool"][tensors["read_index"].long()], options["state_v_first"]
        (B, HV, *_), (V, K) = states.shape, states.shape[2:] if v_first else states.shape[:1:-1]
        held = gdn.allocate_int16_pool(
            2 * B, num_v_heads=HV, head_k_dim=K, head_v_dim=V, state_v_first=v_first, device=states.device
        )
        read, written = torch.randperm(2 * B, device=states.device).split(B)
        held.write(read, states, state_v_first=v_first)
        arguments = _on_pool(tensors, options) | {"state": held, "read_index": read.int()}
        arguments |= {"write_index": written.int()}
        return Bound(
            lambda: gdn.decode(**arguments, backend=backend),
            lambda o: (o, held.read(written, state_v_first=v_first)),
        )

    def pool(tensors: Tensors, options: Options) -> Bound:
        arguments, index = prefill_arguments(tensors, options), tensors["read_index"].long()
        states = tensors["pool"]
        return Bound(lambda: gdn.prefill(**arguments, backend=backend), lambda o: (o, states[index].float()))

    name = f"gdn:{backend}" if backend else "gdn"
    pooled = {"decode": decode, "pool": pool, "int16": int16}
    binds = {"prefill": chunk, "train": chunk, **pooled, **_packets(backend)}
    return Provider(name, binds)


def prefill_arguments(tensors: Tensors, options: Options) -> dict[str, Any]:
    """Return the arguments of gdn.prefill; dense rows are packed."""
    q, k, v = (tensors[name].flatten(0, 1)[None] for name in ("q", "k", "v"))
    gates = {name: tensors[name].flatten(0, 1)[None] for name in ("g", "beta") if name in tensors}
    if options["use_gate_in_kernel"] != options["use_beta_sigmoid_in_kernel"]:
        raise NotImplementedError("prefill: takes raw logits of both gates, or of none")
    if options["use_gate_in_kernel"]:
        gates = {
            "a": gates["g"],
            "b": gates["beta"],
            "A_log": tensors["A_log"],
            "dt_bias": tensors["dt_bias"],
        }
    offsets = tensors.get("cu_seqlens")
    if offsets is None:
        rows, length = tensors["q"].shape[:2]
        offsets = length * torch.arange(rows + 1, device=q.device)
    names = ("scale", "use_qk_l2norm_in_kernel", "allow_neg_eigval", "state_v_first")
    return {
        "q": q, "k": k, "v": v, "state": tensors["pool"], "cu_seqlens": offsets,
        "state_index": tensors["read_index"], "out": v.new_empty(v.shape),
        **gates, **{name: options[name] for name in names},
    }  # fmt: skip


def _packets(backend: str | None) -> dict[str, Bind]:
    """Return the jobs of `packets.WAYS`, and of `packets.HISTORY`."""

    def states(tensors: Tensors, options: Options) -> Bound:
        pool, arguments = tensors["pool"], _on_pool(tensors, options)
        kept = pool.new_empty(*tensors["v"].shape[:2], *pool.shape[1:])

        def run() -> tuple[Tensor, Tensor]:
            return gdn.decode(**arguments, write="none", intermediate=kept, backend=backend), kept

        return Bound(run, lambda results: (results[0], results[1].flatten(0, 1).float()))

    def written(tensors: Tensors, options: Options, write: str, is_exact: bool) -> Bound:
        pool, index, arguments = tensors["pool"], tensors["read_index"].long(), _on_pool(tensors, options)

        def run() -> Tensor:
            return gdn.decode(**arguments, write=write, exact_packet=is_exact, backend=backend)

        return Bound(run, lambda o: (o, None if write == "none" else pool[index].float()))

    def replay(tensors: Tensors, options: Options) -> Bound:
        pool, index = tensors["pool"], tensors["read_index"].long()
        commit, arguments = _history(tensors, options, backend)

        def restore(o: Tensor) -> tuple[Tensor, Tensor | None]:
            commit()
            return o, pool[index].float()

        return Bound(lambda: gdn.replay_decode(**arguments, backend=backend), restore)

    def fold(tensors: Tensors, options: Options) -> Bound:
        pool, index = tensors["pool"], tensors["read_index"].long()
        commit, arguments = _history(tensors, options, backend)
        o = gdn.replay_decode(**arguments, backend=backend)
        return Bound(commit, lambda _: (o, pool[index].float()))

    return {
        "history": partial(_with_history, backend=backend),
        "states": states,
        "final": partial(written, write="final", is_exact=True),
        "chunk": partial(written, write="none", is_exact=False),
        "chunk final": partial(written, write="final", is_exact=False),
        "replay": replay,
        "fold": fold,
    }


def _with_history(tensors: Tensors, options: Options, backend: str | None) -> Bound:
    """Return the job of `packets.HISTORY`."""
    x, index = tensors, tensors["read_index"].long()
    _, arguments = _history(tensors, options, backend)
    start = x["cursor"].new_zeros(len(x["cursor"]), 3, dtype=torch.int32)
    _, used, _ = start.unbind(1)
    used[index] = x["accepted"].int()
    pool, u, k, G = (arguments.pop(name) for name in ("state", "history_u", "history_k", "history_G"))
    held = gdn.HistoryPool(pool, u, k, G, start.clone())
    del arguments["cursor"]

    def run() -> Tensor:
        # each call does equal work: some rows are folded; the copy of the cursors is timed with it
        held.cursor.copy_(start)
        return gdn.decode_with_history(**arguments, pool=held, use_history=True, backend=backend)

    def restore(o: Tensor) -> tuple[Tensor, Tensor]:
        v_first = options["state_v_first"]
        gdn.fold_history(held, x["read_index"], state_v_first=v_first, backend=backend)
        return o, pool[index].float()

    return Bound(run, restore)


def _on_pool(tensors: Tensors, options: Options) -> dict[str, Any]:
    """Return the arguments of `decode`, with memory for its output."""
    return {
        **_tokens(tensors), **{name: tensors[name] for name in ("A_log", "dt_bias", "read_index")},
        **{name: options[name] for name in ("scale", "use_qk_l2norm_in_kernel", "state_v_first")},
        "state": tensors["pool"], "out": torch.empty_like(tensors["v"]),
    }  # fmt: skip


def _tokens(tensors: Tensors, prefix: str = "") -> dict[str, Tensor]:
    """Return q, k, v, a, b; with a prefix, those of the tokens before."""
    return {own: tensors[prefix + name] for own, name in zip("qkvab", TOKENS, strict=True)}


def _history(
    tensors: Tensors, options: Options, backend: str | None
) -> tuple[Callable[[], tuple[()]], dict[str, Any]]:
    """Return a function that folds a history and the packet after it, and arguments of `replay_decode`."""
    x, index = tensors, tensors["read_index"].long()
    arguments = _on_pool(tensors, options)
    arguments |= {name: x[name] for name in ("history_u", "history_k", "history_G", "cursor")}
    T, cursor = x["q"].shape[1], x["cursor"]
    for start in range(0, x["past_q"].shape[1], MAX_PACKET):
        cursor[index] = start
        past = {name: y[:, start : start + MAX_PACKET] for name, y in _tokens(x, "past_").items()}
        gdn.replay_decode(**{**arguments, **past, "out": None}, backend=backend)
    cursor[index] = x["accepted"].to(cursor.dtype)
    pool, u, k, G = (x[name][None] for name in ("pool", "history_u", "history_k", "history_G"))
    whole, v_first = torch.full_like(x["read_index"], T), options["state_v_first"]

    def commit() -> tuple[()]:
        # room of all places: every history is folded; the cursors stay, so that each call does equal work
        gdn.replay_commit(
            pool, u, k, G, cursor, x["read_index"], whole, room=u.shape[2], update_cursor=False,
            state_v_first=v_first, backend=backend,
        )  # fmt: skip
        return ()

    return commit, arguments
