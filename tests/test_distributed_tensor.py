"""Compare layers that are split over the heads with whole ones, on gloo and CPUs."""

import functools
from typing import Any

import pytest
import torch
from kit.exchanges import mesh_of
from kit.sharded import relative
from kit.split_models import gradients, whole
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate

import gdn

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")

T = 70


def layer(dtype: torch.dtype = torch.float64) -> gdn.GatedDeltaNet:
    torch.manual_seed(1)
    return gdn.GatedDeltaNet(16, 6, 12, 4, 8, with_conv_bias=True, dtype=dtype)


def tokens(num: int, *size: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(num, *size, generator=generator, dtype=torch.float64))


def mix(rank: int, sequence_parallel: bool) -> float:
    """Return the largest error of output, gradients and state_dict of a layer over three ranks."""
    mesh, alone, model = mesh_of(tp=3), layer(), layer()
    if rank > 0:
        # the weights are those of rank 0
        nn.init.zeros_(model.out_proj.weight)
    gdn.distributed.tensor_parallel(model, mesh, sequence_parallel=sequence_parallel)
    x, dy = tokens(2, 2, 72, 16)
    mine = slice(rank * 24, rank * 24 + 24) if sequence_parallel else slice(None)
    local = x[:, mine].clone().requires_grad_()
    y = model(local)
    y.backward(dy[:, mine])
    x.requires_grad_()
    want = alone(x)
    want.backward(dy)
    errors = [relative(y, want[:, mine]), relative(local.grad, x.grad[:, mine])]
    assert model.in_proj_z.weight.shape == (12 * 8 // 3, 16), "a rank computes a third of the heads"
    for read in (nn.Module.state_dict, gradients):
        found, original = read(model), read(alone)
        assert {n: x.shape for n, x in found.items()} == {n: x.shape for n, x in original.items()}
        errors += [relative(whole(x), original[name]) for name, x in found.items()]
    return max(errors)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_with_heads_mix_as_one_process(ranks, sequence_parallel):
    assert max(ranks.run(mix, sequence_parallel)) <= 1e-10


def load_whole(rank: int) -> None:
    """Load the plain state_dict of a whole layer, as a checkpoint of one process has it."""
    mesh, alone, model = mesh_of(tp=3), layer(), layer()
    nn.init.ones_(model.in_proj_qkv.weight)
    gdn.distributed.tensor_parallel(model, mesh)
    model.load_state_dict(alone.state_dict())
    for name, x in model.state_dict().items():
        assert torch.equal(whole(x), alone.state_dict()[name]), name


def test_a_split_layer_loads_the_weights_of_a_whole_one(ranks):
    ranks.run(load_whole)


def refuse(rank: int) -> None:
    mesh = mesh_of(tp=3)
    split = gdn.distributed.tensor_parallel
    for module, others, error, message in (
        (
            gdn.GatedDeltaNet(16, 4, 4, 4, 4),
            mesh,
            ValueError,
            "expected key heads divisible by tp, got 4 and 3",
        ),
        (
            nn.Sequential(gdn.GatedDeltaNet(16, 4, 4, 4, 4)),
            mesh,
            ValueError,
            "0: expected key heads divisible",
        ),
        (nn.Linear(2, 2), mesh, ValueError, "module: expected GatedDeltaNet layers, got none in Linear"),
        (layer(), dist.group.WORLD, TypeError, "mesh: expected a DeviceMesh, got ProcessGroup"),
        (layer(), mesh_of(cp=1, tp=3), ValueError, "mesh: expected one dimension, got 2"),
        (split(layer(), mesh), mesh, ValueError, "expected a whole layer, got a DTensor as A_log"),
    ):
        with pytest.raises(error, match=message):
            split(module, others)
    adapted = layer()
    adapted.in_proj_z = nn.Sequential(adapted.in_proj_z)
    with pytest.raises(
        ValueError, match="expected the parameters of GatedDeltaNet alone, got in_proj_z.0.wei"
    ):
        split(adapted, mesh)
    assert type(adapted) is gdn.GatedDeltaNet and adapted.num_k_heads == 6
    model = split(layer(), mesh)
    with pytest.raises(TypeError, match="hidden: expected a local tensor, got a DTensor"):
        model(DTensor.from_local(torch.zeros(1, 3, 16, dtype=torch.float64), mesh, [Replicate()]))


def test_errors_name_what_does_not_fit(ranks):
    ranks.run(refuse)


def gates(rank: int, is_split: bool) -> list[torch.dtype]:
    """Return the dtypes of two parameters and of the output inside a forward in bf16 by FSDP2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = mesh_of(dp=1, tp=3) if is_split else mesh_of(dp=3, tp=1)
    model, found = layer(torch.float32), []
    if is_split:
        gdn.distributed.tensor_parallel(model, mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    gdn.distributed.fully_shard_layers(model, mesh=mesh["dp"], mp_policy=policy)
    root = fully_shard(nn.Sequential(model), mesh=mesh["dp"], mp_policy=policy)

    def look(norm: nn.Module, inputs: Any, y: Tensor) -> None:
        found.extend([model.A_log.dtype, model.in_proj_z.weight.dtype, y.dtype])

    model.norm.register_forward_hook(look)
    root(torch.randn(1, 70, 16)).square().mean().backward()
    assert model._parameters["A_log"].grad.dtype == torch.float32
    assert all(p.grad is not None for p in model.parameters())
    return found


@pytest.mark.parametrize("is_split", [False, True])
def test_fsdp_in_bf16_keeps_the_gates_in_fp32(ranks, is_split):
    bf16 = torch.bfloat16
    assert ranks.run(gates, is_split) == [[torch.float32, bf16, bf16]] * 3


def train_sharded(rank: int, recompute: bool) -> list[Tensor]:
    """Return the outputs and gradients of two steps under FSDP2, which gathers parameters anew backward."""
    from torch.distributed.fsdp import fully_shard

    mesh, model = mesh_of(dp=3, tp=1), layer(torch.float32)
    model.recompute = recompute
    gdn.distributed.fully_shard_layers(model, mesh=mesh["dp"])
    root = fully_shard(nn.Sequential(model), mesh=mesh["dp"])
    x = tokens(3, 1, 70, 16)[rank].float()
    found = []
    for _ in range(2):
        y = root(x)
        y.square().mean().backward()
        found += [y.detach(), *(p.grad.full_tensor() for p in model.parameters())]
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad)
        model.zero_grad()
    return found


def test_a_layer_computes_again_under_fsdp(ranks):
    """Parameters that FSDP2 gathers for the backward are not taken for changed ones."""
    for plain, again in zip(ranks.run(train_sharded, False), ranks.run(train_sharded, True), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


def recompute(rank: int, exchange: str, kind: str) -> tuple[dict[str, int], list[Tensor]]:
    """Return the number of collectives of a step with activation checkpointing, and the gradients."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    context, model = gdn.ContextParallel(dist.group.WORLD, num_tokens=T, exchange=exchange), layer()
    x = tokens(1, 1, T, 16)[0]
    mine = context.shard(x, 1).requires_grad_()
    run = functools.partial(model, cp_context=context)
    run(mine)  # compares the call on all ranks, which is counted otherwise

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_exchange = op.namespace == "_c10d_functional"
        return CheckpointPolicy.MUST_SAVE if is_exchange else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    with CommDebugMode() as counter:
        y = run(mine) if kind == "none" else checkpoint(run, mine, **options)
        y.square().sum().backward()
    counts = {str(op): n for op, n in counter.get_comm_counts().items()}
    return counts, [mine.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("exchange", ["gather", "heads"])
def test_activation_checkpointing_repeats_no_exchange_that_a_policy_keeps(ranks, exchange):
    kinds = ("none", "full", "selective")
    plain, full, selective = (ranks.run(recompute, exchange, kind) for kind in kinds)
    for rank in range(3):
        counts, gradients = plain[rank]
        assert selective[rank][0] == counts, "an exchange ran again"
        assert sum(full[rank][0].values()) > sum(counts.values()), "without a policy the forward runs again"
        for found in (full, selective):
            assert all(map(torch.equal, found[rank][1], gradients))
