"""Compare layers that are split over the heads with whole ones, on gloo and CPUs."""

import pytest
import torch
from kit.sharded import relative
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gdn

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")

T = 70


def layer(dtype: torch.dtype = torch.float64) -> gdn.GatedDeltaNet:
    torch.manual_seed(1)
    return gdn.GatedDeltaNet(16, 6, 12, 4, 8, with_conv_bias=True, dtype=dtype)


def tokens(num: int, *size: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(num, *size, generator=generator, dtype=torch.float64))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of all parameters by the names of the whole layer; they replace the parameters."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.grad)
    return {name: whole(x) for name, x in module.state_dict().items()}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


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
