"""A provider: one implementation of the gated delta rule, by job, on a benchmark's tensors.

A provider binds the tensors of a problem once, which may convert layouts and dtypes. The bound call then
runs as often as asked, and only these runs are timed. Tensors and options have the names of
`gdn.testing.inputs`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn.testing.accuracy import Provider as Function

TOKENS = ("q", "k", "v", "g", "beta")  # what a row has of each token
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
                tensors |= put_in_pool(tensors.pop("initial_state"))
            return self.binds[job](tensors, options)()

        return call


def put_in_pool(states: Tensor) -> dict[str, Tensor]:
    """A pool that holds these states in other slots than their rows' numbers, and NaN in one more."""
    B = states.shape[0]
    index = torch.arange(B, 0, -1, device=states.device, dtype=torch.int32)
    pool = states.new_full((B + 1, *states.shape[1:]), float("nan"))
    pool[index.long()] = states
    return {"pool": pool, "read_index": index}
