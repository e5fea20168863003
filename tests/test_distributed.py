"""Test training of the layer on three ranks: data parallel, and with sharded parameters."""

import pytest
import torch
from torch import distributed as dist

import gdn

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")


def layer():
    torch.manual_seed(0)
    return gdn.GatedDeltaNet(32, num_k_heads=2, num_v_heads=2, head_k_dim=16, head_v_dim=16)


def train(rank: int, kind: str) -> None:
    """Compare the gradients of one row on each rank with those of all rows on one."""
    x = torch.randn(dist.get_world_size(), 70, 32, generator=torch.Generator().manual_seed(1))
    alone, model = layer(), layer()
    alone(x).square().mean().backward()
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    model(x[rank : rank + 1]).square().mean().backward()
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        grad = other.grad.full_tensor() if kind == "sharded" else other.grad
        torch.testing.assert_close(grad, one.grad)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data parallel", "sharded"])
def test_gradients_are_those_of_one_process(ranks, kind):
    ranks.run(train, kind)
