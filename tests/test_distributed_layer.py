"""Compare the layer, and the training of a small hybrid model, on three ranks with one process."""

import re
from typing import Any

import pytest
import torch
from kit import forks
from kit.processes import ROOT
from kit.sharded import relative
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import gdn

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")

T = 70
ZIGZAG = [(0, 0, 10), (1, 10, 25), (2, 25, 40), (2, 40, 51), (1, 51, 53), (0, 53, T)]
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...] | None, int]] = {
    "contiguous": ({"num_tokens": T}, None, 1),
    "two rows, zigzag": ({"runs": ZIGZAG}, None, 2),
    "packed, zigzag": ({"runs": ZIGZAG, "exchange": "owner"}, (0, 5, 25, 25, 52, T), 1),
    "a rank without tokens": ({"runs": [(1, 0, 40), (0, 40, T)]}, (0, 38, T), 1),
}


def layer(dtype: torch.dtype) -> gdn.GatedDeltaNet:
    torch.manual_seed(1)
    return gdn.GatedDeltaNet(16, 3, 6, 8, 8, with_conv_bias=True, dtype=dtype)


def mix(rank: int, name: str) -> float:
    """Return the largest error of outputs and gradients in fp64, on rank 0 for all ranks."""
    arguments, offsets, B = CASES[name]
    context = gdn.ContextParallel(dist.group.WORLD, **arguments)
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    x, dy = torch.randn(2, B, T, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole, model = layer(torch.float64), layer(torch.float64)
    mine = context.shard(x, 1).requires_grad_()
    y = model(mine, cu_seqlens=cu_seqlens, cp_context=context)
    y.backward(context.shard(dy, 1))
    x.requires_grad_()
    want = whole(x, cu_seqlens=cu_seqlens)
    want.backward(dy)
    errors = [relative(context.unshard(y.detach(), 1), want.detach())]
    errors.append(relative(context.unshard(mine.grad, 1), x.grad))
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(one.grad)
        errors.append(relative(one.grad, other.grad))
    return max(errors)


@pytest.mark.parametrize("name", CASES)
def test_ranks_mix_as_one_process(ranks, name):
    assert max(ranks.run(mix, name)) <= 1e-10


class Order(TorchDispatchMode):
    """Record the order of collectives, waits and matmuls; these by the largest size of their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1]
        if func.namespace == "_c10d_functional":
            self.events.append("wait" if name == "wait_tensor" else "start")
        elif name in ("mm", "addmm"):
            self.events.append(max(size for x in args for size in x.shape))
        return func(*args, **(kwargs or {}))


def during(events: list[Any]) -> list[list[int]]:
    """Return the matmuls that are launched while each collective is on its way."""
    found, is_under_way = [], False
    for event in events:
        if event == "start":
            assert not is_under_way
            found.append([])
        if event in ("start", "wait"):
            is_under_way = event == "start"
        elif is_under_way:
            found[-1].append(event)
    assert not is_under_way
    return found


def overlap(rank: int) -> tuple[list[Any], list[Any]]:
    """Return the events of a forward and of a backward of a layer."""
    context, model = (
        gdn.ContextParallel(dist.group.WORLD, num_tokens=30, exchange="gather"),
        layer(torch.float32),
    )
    x = torch.randn(1, 10, 16, requires_grad=True)
    model(x, cp_context=context)  # compares the calls of all ranks
    with Order() as forward:
        y = model(x, cp_context=context)
    with Order() as backward:
        y.sum().backward()
    return forward.events, backward.events


def test_exchanges_hide_under_the_projections(ranks):
    """The halo is on its way under in_proj_a and in_proj_b, the states under in_proj_z; back in reverse."""
    for forward, backward in ranks.run(overlap):
        # hidden_size is 16; the projections have 96 (q, k, v), 6 + 6 (a, b) and 48 (z) outputs
        assert forward[0] == 96
        assert during(forward) == [[16, 16], [48]], forward
        # two matmuls of a projection: the gradients of its input and of its weight
        assert during(backward) == [[48, 48], [16] * 4], backward


class Large(TorchDispatchMode):
    """Record the operators that return new memory of at least so many elements."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.names = least, list[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, Tensor) and first.numel() >= self.least and not func.is_view:
            self.names.append(func.name())
        return out


def large_of_halo(rank: int) -> tuple[list[str], list[str]]:
    """Return the large operators of a convolution, forward and backward, without a context and with one."""
    context = gdn.ContextParallel(dist.group.WORLD, num_tokens=3 * 64)
    x, weight = torch.randn(1, 64, 8), torch.randn(8, 4)
    names = []
    for given in (None, context, context):
        leaf = x.clone().requires_grad_()
        with Large(x.numel()) as large:
            y, _ = gdn.causal_conv1d(leaf, weight, cp_context=given)
            y.backward(torch.ones_like(y))
        names.append([n for n in large.names if n != "aten::ones_like"])
    return names[0], names[-1]


def test_a_halo_copies_no_inputs(ranks):
    for alone, with_context in ranks.run(large_of_halo):
        assert sorted({*with_context} - {*alone}) in ([], ["aten::index_put_"]), (alone, with_context)


def refuse(rank: int) -> None:
    context = gdn.ContextParallel(dist.group.WORLD, num_tokens=30)
    model, x = layer(torch.float32), torch.zeros(1, 10, 16)
    with pytest.raises(NotImplementedError, match="cache: expected None with cp_context, got one"):
        model(x, cache=gdn.GatedDeltaNetCache(), cp_context=context)
    with pytest.raises(NotImplementedError, match="attention_mask: expected None with cp_context"):
        model(x, attention_mask=torch.ones(1, 10), cp_context=context)
    with pytest.raises(TypeError, match="cp_context: expected a gdn.ContextParallel or None, got str"):
        model(x, cp_context="cp")


def test_a_cache_and_a_mask_are_refused(ranks):
    ranks.run(refuse)


class Hybrid(nn.Module):
    """Predict tokens with three GatedDeltaNet layers and one of causal attention, as Qwen3.5 is built."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 24)
        self.mixers = nn.ModuleList(gdn.GatedDeltaNet(24, 3, 6, 8, 8) for _ in range(3))
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.head = nn.Linear(24, 32)

    def forward(self, ids: Tensor, positions: Tensor, context: Any, has_context: bool = True) -> Tensor:
        x = self.embed(ids)
        for i, mixer in enumerate(self.mixers):
            x = x + mixer(F.rms_norm(x, (24,)), cp_context=context if has_context else None)
            if i == 1:
                x = x + self.attend(F.rms_norm(x, (24,)), positions, context)
        return self.head(F.rms_norm(x, (24,)))

    def attend(self, x: Tensor, positions: Tensor, context: Any) -> Tensor:
        """Attend to the keys and values of all ranks."""
        q, k, v = self.qkv(x).chunk(3, -1)
        if context is not None:
            k, v = context.unshard(torch.cat([k, v], -1), 1).chunk(2, -1)
        mask = torch.arange(k.shape[1]) <= positions[:, None]
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def train(rank: int, order: str | None, has_context: bool = True, num_steps: int = 20) -> list[float]:
    """Return the losses of steps of Adam; order None: every rank has all tokens."""
    torch.manual_seed(3)
    model = Hybrid()
    ids = torch.randint(0, 32, (1, T + 1))
    # a repeated piece of text: the loss falls
    ids[:, 30:60] = ids[:, :30]
    positions, context = torch.arange(T), None
    inputs, labels = ids[:, :-1], ids[:, 1:]
    if order is not None:
        context = gdn.ContextParallel(dist.group.WORLD, order=order, num_tokens=T)
        inputs, labels = (context.shard(x, 1) for x in (inputs, labels))
        positions = context.shard(positions, 0)
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-3), []
    for _ in range(num_steps):
        logits = model(inputs, positions, context, has_context)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / T
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if context is not None:
            dist.all_reduce(total)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        losses.append(float(total))
        optimizer.step()
    return losses


def test_a_hybrid_model_trains_as_on_one_process(ranks):
    ((is_done, want),) = ranks.outcomes(train, None, only=[0])
    assert is_done, want
    assert want[-1] < 0.95 * want[0]
    for order in ("contiguous", "headtail"):
        for losses in ranks.run(train, order):
            assert max(abs(a - b) / b for a, b in zip(losses, want, strict=True)) <= 1e-5, order
    # layers that take their shard for a sequence give another loss: the comparison sees it
    losses, *_ = ranks.run(train, "contiguous", False, 3)
    assert max(abs(a - b) / b for a, b in zip(losses, want, strict=False)) > 1e-3


@pytest.mark.slow
def test_the_example_runs_under_torchrun():
    """torchrun --standalone chooses a free port by itself."""
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "examples/two_ranks.py",
    ]
    done = forks.python(*command, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d of 2: 500 tokens", done.stdout)) == [
        "rank 0 of 2: 500 tokens", "rank 1 of 2: 500 tokens",
    ]  # fmt: skip
