"""Who is timed: gdn and its peers, each given the same problem in its own conventions.

A provider binds a problem's tensors once, which may convert layouts and dtypes, and then runs as often as
asked: only the run is timed. Tensors and options are named as `cases.inputs` names them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import gdn
from gdn.bench.accuracy import Provider as Function

ON_A_POOL = ("decode", "spec")  # jobs that get `pool` and `read_index` in place of `initial_state`
Tensors = Mapping[str, Tensor]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Bound:
    """run() is one call; restore() reads what it returned as (o, final state) in the caller's layout."""

    run: Callable[[], Any]
    restore: Callable[[Any], tuple[Tensor, Tensor]] = lambda results: results

    def __call__(self) -> tuple[Tensor, Tensor]:
        return self.restore(self.run())


Bind = Callable[[Tensors, Options], Bound]


@dataclass(frozen=True)
class Provider:
    """One way to compute each job; a job it does not do is left out.

    binds: job -> function of tensors and options; raises NotImplementedError for what it cannot take.
        prefill, train    the whole rule, without gradients and with
        decode            a token per row; the states to step lie in `pool` at `read_index`
        spec              several tokens per row; the pool is left alone, and the state after each token is
                          kept elsewhere: restore() gives those as [B * T, HV, ...]
    """

    name: str
    binds: Mapping[str, Bind]

    def function(self, job: str) -> Function:
        """The job as accuracy judges it: a function of tensors, on a pool of its own."""

        def call(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
            given = {"q": q, "k": k, "v": v, **arguments}
            tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
            options = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
            if job in ON_A_POOL:
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
        return Bound(lambda: gdn.chunk_gated_delta_rule(**arguments))

    def decode(tensors: Tensors, options: Options) -> Bound:
        pool, index = tensors["pool"], tensors["read_index"]
        q, k, v, a, b, A_log, dt_bias = (tensors[x] for x in ("q", "k", "v", "g", "beta", "A_log", "dt_bias"))
        out = torch.empty_like(v)
        flags = {name: options[name] for name in ("scale", "use_qk_l2norm_in_kernel", "state_v_first")}

        def run() -> Tensor:
            return gdn.decode(
                q, k, v, pool, a=a, b=b, A_log=A_log, dt_bias=dt_bias, read_index=index, out=out,
                backend=backend, **flags,
            )  # fmt: skip

        return Bound(run, lambda o: (o, pool[index.long()].float()))

    def spec(tensors: Tensors, options: Options) -> Bound:
        pool, v = tensors["pool"], tensors["v"]
        q, k, a, b, A_log, dt_bias = (tensors[x] for x in ("q", "k", "g", "beta", "A_log", "dt_bias"))
        out, kept = torch.empty_like(v), pool.new_empty(*v.shape[:2], *pool.shape[1:])
        flags = {name: options[name] for name in ("scale", "use_qk_l2norm_in_kernel", "state_v_first")}

        def run() -> tuple[Tensor, Tensor]:
            o = gdn.decode(
                q, k, v, pool, a=a, b=b, A_log=A_log, dt_bias=dt_bias, read_index=tensors["read_index"],
                write="none", intermediate=kept, out=out, backend=backend, **flags,
            )  # fmt: skip
            return o, kept

        return Bound(run, lambda found: (found[0], found[1].flatten(0, 1).float()))

    name = f"gdn:{backend}" if backend else "gdn"
    return Provider(name, {"prefill": chunk, "train": chunk, "decode": decode, "spec": spec})


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
