"""Compare compiled calls of a context, in one graph, with calls in eager mode; count the collectives."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import gdn
from gdn.distributed import collectives, operators

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


def keep_contexts_on_one_rank(rank: int) -> list[float]:
    """Return the errors of compiled calls with a new context each, of which rank 0 keeps all alive."""
    x, kept, errors = torch.randn(1, 40, 2, 8), [], []

    def call(x: Tensor, context: Any) -> Tensor:
        o, _ = gdn.chunk_gated_delta_rule(x, x, x, use_qk_l2norm_in_kernel=True, cp_context=context)
        y, _ = gdn.causal_conv1d(o.flatten(2), o.new_ones(16, 4), cp_context=context)
        return y

    want = call(x, gdn.ContextParallel(two_ranks(), order="headtail"))
    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        context = gdn.ContextParallel(two_ranks(), order="headtail")
        kept.append(context if rank == 0 else None)
        errors.append(float((compiled(x, context) - want).abs().max()))
        del context
        gc.collect()
    return errors


def test_which_calls_are_known_does_not_depend_on_what_lives(ranks):
    """A rank that took an older context of equal value for the call would not wait for the comparison."""
    for is_done, errors in ranks.outcomes(keep_contexts_on_one_rank, only=[0, 1]):
        assert is_done, errors
        assert len(errors) == 3 and max(errors) < 1e-6


# arguments of the context, offsets, rows, tokens of rank 1 of 3
SHAPES: list[tuple[dict[str, Any], tuple[int, ...] | None, int, int]] = [
    ({"exchange": "gather"}, None, 2, 70),
    ({"order": "headtail"}, None, 2, 70),
    ({"order": "headtail", "exchange": "owner"}, (0, 100, 100, 210), 1, 70),
    ({"runs": [(0, 0, 50), (2, 50, 90)]}, None, 1, 0),
]


def test_operators_declare_the_shapes_of_their_results(backend, device):
    """Compare the fakes, which a compiler reads, with what rank 1 of 3 computes on torch's fake group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    calls: list[Any] = []
    contexts: list[Any] = []  # operators know a context by its name, as long as it lives

    def recorded(name: str) -> Any:
        op = getattr(operators, name)
        return mock.patch.object(operators, name, lambda *args: calls.append((op, args)) or op(*args))

    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    try:
        for arguments, offsets, B, T in SHAPES:
            context = gdn.ContextParallel(dist.group.WORLD, check="never", **arguments)
            contexts.append(context)
            cu_seqlens = None if offsets is None else torch.tensor(offsets, device=device)
            q = torch.randn(B, T, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            v = torch.randn(B, T, 4, 64, device=device, dtype=torch.bfloat16)
            options = {"cu_seqlens": cu_seqlens, "use_qk_l2norm_in_kernel": True, "backend": backend}
            with ExitStack() as stack:
                names = ("rank_forward", "rank_backward", "rank_windows", "rank_windows_bwd")
                for name in names:
                    stack.enter_context(recorded(name))
                o, _ = operators.compiled_rule(context._name, {"q": q, "k": q, "v": v, **options})
                y, _ = operators.compiled_conv(
                    context._name, q.flatten(2), torch.randn(128, 4, device=device), None,
                    {"cu_seqlens": cu_seqlens, "activation": None},
                )  # fmt: skip
                (o.sum() + y.sum()).backward()
        # an operator with an autograd formula is called again within it
        assert len(calls) == 6 * len(SHAPES)
        for op, args in calls:
            torch.library.opcheck(op, args, test_utils="test_faketensor")
        o, _ = operators.compiled_rule(contexts[-1]._name, {"q": q, "k": q, "v": v})
        contexts.clear()
        del context
        with pytest.raises(RuntimeError, match="cp_context: expected the context to live until the backward"):
            o.sum().backward()
    finally:
        dist.destroy_process_group()
