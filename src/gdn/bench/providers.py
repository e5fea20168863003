"""Who is timed: gdn and its peers, each given the same problem in its own conventions.

A provider binds a problem's tensors once, which may convert layouts and dtypes, and then runs as often as
asked: only the run is timed. Tensors and options are named as `cases.inputs` names them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import gdn
from gdn.bench.accuracy import Provider as Function

TOKENS = ("q", "k", "v", "g", "beta")  # what a row has of each token
MOST = 16  # tokens that replay takes at once
Tensors = Mapping[str, Tensor]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Bound:
    """run() is one call; restore() reads what it returned as (o, final state) in the caller's layout."""

    run: Callable[[], Any]
    restore: Callable[[Any], tuple[Tensor, Tensor | None]] = lambda results: results

    def __call__(self) -> tuple[Tensor, Tensor | None]:
        return self.restore(self.run())


Bind = Callable[[Tensors, Options], Bound]


@dataclass(frozen=True)
class Provider:
    """One way to compute each job; a job it does not do is left out.

    binds: job -> function of tensors and options; raises NotImplementedError for what it cannot take.
        prefill, train    the whole rule, without gradients and with
        decode            a token per row; the states to step lie in `pool` at `read_index`
        states, ...       several tokens per row, in a way of `packets.WAYS` and on its tensors; restore()
                          gives None for states that are left nowhere, those of `states` as [B * T, HV, ...]
    """

    name: str
    binds: Mapping[str, Bind]

    def function(self, job: str) -> Function:
        """The job as accuracy judges it: a function of tensors, on a pool of its own."""

        def call(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor | None]:
            given = {"q": q, "k": k, "v": v, **arguments}
            tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
            options = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
            if job == "decode":
                tensors |= in_pool(tensors.pop("initial_state"))
            return self.binds[job](tensors, options)()

        return call


def in_pool(states: Tensor) -> dict[str, Tensor]:
    """A pool that holds these states in other slots than their rows' numbers, and NaN in one more."""
    B = states.shape[0]
    index = torch.arange(B, 0, -1, device=states.device, dtype=torch.int32)
    pool = states.new_full((B + 1, *states.shape[1:]), float("nan"))
    pool[index.long()] = states
    return {"pool": pool, "read_index": index}


def ours(backend: str | None = None) -> Provider:
    """gdn, on the backend that it chooses or on one by name (`gdn:NAME`)."""

    def chunk(tensors: Tensors, options: Options) -> Bound:
        arguments: dict[str, Any] = {**tensors, **options, "backend": backend}
        if "cu_seqlens" in tensors:
            # as an engine has them
            arguments["cu_seqlens_cpu"] = tensors["cu_seqlens"].cpu()
        return Bound(lambda: gdn.chunk_gated_delta_rule(**arguments))

    def decode(tensors: Tensors, options: Options) -> Bound:
        pool, index, arguments = tensors["pool"], tensors["read_index"].long(), _on_pool(tensors, options)
        return Bound(lambda: gdn.decode(**arguments, backend=backend), lambda o: (o, pool[index].float()))

    name = f"gdn:{backend}" if backend else "gdn"
    return Provider(name, {"prefill": chunk, "train": chunk, "decode": decode, **_packets(backend)})


def _packets(backend: str | None) -> dict[str, Bind]:
    """The ways of `packets.WAYS`."""

    def states(tensors: Tensors, options: Options) -> Bound:
        pool, arguments = tensors["pool"], _on_pool(tensors, options)
        kept = pool.new_empty(*tensors["v"].shape[:2], *pool.shape[1:])

        def run() -> tuple[Tensor, Tensor]:
            return gdn.decode(**arguments, write="none", intermediate=kept, backend=backend), kept

        return Bound(run, lambda found: (found[0], found[1].flatten(0, 1).float()))

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
        "states": states,
        "final": partial(written, write="final", is_exact=True),
        "chunk": partial(written, write="none", is_exact=False),
        "chunk final": partial(written, write="final", is_exact=False),
        "replay": replay,
        "fold": fold,
    }


def _on_pool(tensors: Tensors, options: Options) -> dict[str, Any]:
    """Arguments of `decode`, with memory for its output."""
    return {
        **_tokens(tensors), **{name: tensors[name] for name in ("A_log", "dt_bias", "read_index")},
        **{name: options[name] for name in ("scale", "use_qk_l2norm_in_kernel", "state_v_first")},
        "state": tensors["pool"], "out": torch.empty_like(tensors["v"]),
    }  # fmt: skip


def _tokens(tensors: Tensors, prefix: str = "") -> dict[str, Tensor]:
    """q, k, v, a, b; with a prefix, of the tokens before."""
    return {own: tensors[prefix + name] for own, name in zip("qkvab", TOKENS, strict=True)}


def _history(
    tensors: Tensors, options: Options, backend: str | None
) -> tuple[Callable[[], tuple[()]], dict[str, Any]]:
    """What folds a history and the packet behind it, and the arguments of `replay_decode` on this history."""
    x, index = tensors, tensors["read_index"].long()
    arguments = _on_pool(tensors, options)
    arguments |= {name: x[name] for name in ("history_u", "history_k", "history_G", "cursor")}
    T, cursor = x["q"].shape[1], x["cursor"]
    for start in range(0, x["past_q"].shape[1], MOST):
        cursor[index] = start
        past = {name: y[:, start : start + MOST] for name, y in _tokens(x, "past_").items()}
        gdn.replay_decode(**{**arguments, **past, "out": None}, backend=backend)
    cursor[index] = x["accepted"].to(cursor.dtype)
    pool, u, k, G = (x[name][None] for name in ("pool", "history_u", "history_k", "history_G"))
    whole, v_first = torch.full_like(x["read_index"], T), options["state_v_first"]

    def commit() -> tuple[()]:
        # room for all places: every history is folded, and the cursors stay for the next call
        gdn.replay_commit(
            pool, u, k, G, cursor, x["read_index"], whole, room=u.shape[2], update_cursor=False,
            state_v_first=v_first, backend=backend,
        )  # fmt: skip
        return ()

    return commit, arguments


PEERS = {  # name -> package to import
    "fla": "fla",
    "flash_qla": "flash_qla",
    "flashinfer": "flashinfer",
    "transformers": "transformers",
}
NAMES = ("gdn", *PEERS)


def load(name: str) -> Provider | str:
    """The provider of that name, or why it is absent. ValueError for a name that nobody has."""
    if name == "gdn" or name.startswith("gdn:"):
        return ours(name.partition(":")[2] or None)
    if name not in PEERS:
        raise ValueError(f"providers: expected some of {', '.join(NAMES)}, gdn:BACKEND, got {name!r}")
    if find_spec(PEERS[name]) is None:
        return "not installed"
    try:
        peer: Provider = getattr(import_module("gdn.bench.peers"), name)()
    except Exception as error:
        # a peer's import looks for compilers and devices, and fails in ways of its own
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return peer
