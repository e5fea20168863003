"""Test training of the layer on two processes: data parallel, and with sharded parameters."""

import os
import socket

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

import gdn


def layer():
    torch.manual_seed(0)
    return gdn.GatedDeltaNet(32, num_k_heads=2, num_v_heads=2, head_k_dim=16, head_v_dim=16)


def train(rank: int, port: int, kind: str) -> None:
    """Compare the gradients of one row on each process with those of both rows on one."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    x = torch.randn(2, 70, 32, generator=torch.Generator().manual_seed(1))
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
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")
@pytest.mark.parametrize("kind", ["data parallel", "sharded"])
def test_gradients_are_those_of_one_process(kind):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(train, (port, kind), nprocs=2)
