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

TOKENS = ("q", "k", "v", "g", "beta")  # tensors with an entry for each token
POOLED = ("decode", "pool", "int16")  # jobs whose states lie in a pool
Tensors = Mapping[str, Tensor]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Bound:
    """Hold a call: run() makes it, restore() converts its results to (o, final state) as gdn has them."""

    run: Callable[[], Any]
    restore: Callable[[Any], tuple[Tensor, Tensor | None]] = lambda results: results

    def __call__(self) -> tuple[Tensor, Tensor | None]:
        return self.restore(self.run())


Bind = Callable[[Tensors, Options], Bound]


@dataclass(frozen=True)
class Provider:
    """Hold one implementation of each job that it has.

    binds: job -> function of tensors and options; raises NotImplementedError for unsupported problems.
        prefill, train    the whole rule, without gradients and with
        decode            a token per row; its states lie in `pool` at `read_index`
        int16             the same on a copy of the states in int16; peers keep them in bf16
        pool              prompts, whose states lie in `pool` at `read_index` before and after
        states, ...       several tokens per row, one job for each of `packets.WAYS`; restore() returns None
        for
                          states that are not kept, those of `states` as [B * T, HV, ...]
    """

    name: str
    binds: Mapping[str, Bind]

    def function(self, job: str) -> Function:
        """Return the job as a function that `gdn.testing.check` can run, on a pool of its own."""

        def call(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor | None]:
            given = {"q": q, "k": k, "v": v, **arguments}
            tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
            options = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
            if job in POOLED:
                tensors |= put_in_pool(tensors.pop("initial_state"))
            return self.binds[job](tensors, options)()

        return call


def put_in_pool(states: Tensor) -> dict[str, Tensor]:
    """Return a pool with these states in slots other than their rows' numbers, and NaN in one more slot."""
    B = states.shape[0]
    index = torch.arange(B, 0, -1, device=states.device, dtype=torch.int32)
    pool = states.new_full((B + 1, *states.shape[1:]), float("nan"))
    pool[index.long()] = states
    return {"pool": pool, "read_index": index}
