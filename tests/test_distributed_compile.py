"""Compare compiled calls of a context, in one graph, with calls in eager mode; count the collectives."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import gdn
from gdn.distributed import collectives

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")

T = 70
# rank 0 has the first and the last run, rank 1 has runs in the middle
ZIGZAG = [(0, 0, 10), (1, 10, 40), (0, 40, 44), (1, 44, 53), (0, 53, T)]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the collectives that start."""
    counts: Counter[str] = Counter()

    def count(name: str) -> Callable[..., Any]:
        right = getattr(collectives._operators, name)

        def run(*args: Any) -> Any:
            counts[name] += 1
            return right(*args)

        return run

    names = ("all_gather_into_tensor", "all_to_all_single", "wait_tensor")
    with mock.patch.object(collectives, "_operators", mock.Mock(**{n: count(n) for n in names})):
        yield counts


def mix(x: Tensor, weight: Tensor, g: Tensor, state: Tensor, context: Any) -> Tensor:
    """Compute a convolution and the rule on its outputs, from a state, and use the states at the end."""
    y, window = gdn.causal_conv1d(
        x, weight, activation="silu", initial_state=state[:, 0, :, :3].repeat(1, 9, 1),
        output_final_state=True, cp_context=context,
    )  # fmt: skip
    q, k, v = (y[..., i * 24 : i * 24 + 24].unflatten(-1, (3, 8)) for i in range(3))
    o, final = gdn.chunk_gated_delta_rule(
        q, k, v, g, use_qk_l2norm_in_kernel=True, initial_state=state, output_final_state=True,
        cp_context=context,
    )  # fmt: skip
    return o.sum() + final.square().sum() + window.square().sum()


def step(run: Any, tensors: list[Tensor], *others: Any) -> list[Any]:
    """Return the collectives of a forward and of a backward, the output and all gradients."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    with counted() as forward:
        y = run(*leaves, *others)
    with counted() as backward:
        gradients = torch.autograd.grad(y.square().sum(), leaves)
    return [forward, backward, y.detach(), *gradients]


GROUP: list[Any] = []


def two_ranks() -> Any:
    """Return a group of ranks 0 and 1, made once."""
    if not GROUP:
        GROUP.append(dist.new_group([0, 1], use_local_synchronization=True))
    return GROUP[0]


def compare(rank: int, kind: str) -> list[list[Any]]:
    """Return what a call gives in eager mode and compiled."""
    context = gdn.ContextParallel(two_ranks(), runs=ZIGZAG, exchange="owner")
    generator = torch.Generator().manual_seed(2)
    function: Any = mix
    if kind == "layer, packed":
        torch.manual_seed(1)
        layer, offsets = gdn.GatedDeltaNet(16, 3, 6, 8, 8), torch.tensor([0, 5, 25, 25, 38, T])

        def function(x: Tensor, *parameters: Tensor) -> Tensor:
            return layer(x, cu_seqlens=offsets, cp_context=context)

        tensors, others = [context.shard(torch.randn(1, T, 16, generator=generator), 1)], []
    else:
        x, weight = torch.randn(2, T, 72, generator=generator), torch.randn(72, 4, generator=generator)
        g = context.shard(-torch.rand(2, T, 3, generator=generator), 1)
        state = context.shard_states(torch.randn(2, 3, 8, 8, generator=generator))
        tensors, others = [context.shard(x, 1), weight, g, state], [context]
    # a context of equal value comes and goes: the compiled call has the same name for both
    gdn.ContextParallel(two_ranks(), runs=ZIGZAG, exchange="owner")
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)
    # the partitioner would rather compute again than keep
    with torch._functorch.config.patch(aggressive_recomputation=True):
        return [step(run, tensors, *others) for run in (function, compiled)]


@pytest.mark.parametrize("kind", ["layer, packed", "states of two rows"])
def test_one_graph_exchanges_once(ranks, kind):
    for is_done, found in ranks.outcomes(compare, kind, only=[0, 1]):
        assert is_done, found
        want, got = found
        # two halves of the exchange and a halo, each way
        assert want[0]["all_to_all_single"] == want[1]["all_to_all_single"] == 3
        assert got[:2] == want[:2], "each exchange once, forward and backward"
        torch.testing.assert_close(got[2:], want[2:], rtol=1e-4, atol=1e-5)
