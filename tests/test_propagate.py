"""Compare the launch that passes states through runs with plain PyTorch in fp64."""

from dataclasses import replace

import pytest
import torch
from conftest import INTERPRETED

from gdn.backends import load, select
from gdn.problem.propagate import PropagateProblem, RunStep

J, B, HEADS = 5, 2, 3
# three runs pass a state on; the first resets, and so does the one whose M holds NaN
STEPS = tuple(RunStep(j, J - 1 - j, j if j not in (0, 3) else -1) for j in range(J - 1))
STEPS = (*STEPS, RunStep(J - 1, -1, -1))


def problem_of(K: int, V: int, *, is_transposed: bool, is_v_first: bool, wide: bool) -> PropagateProblem:
    """Return a problem in fp64. wide: S has columns that N has not, and begins with numbers."""
    generator = torch.Generator().manual_seed(K)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    W = V + K if wide else V
    # as `owner` receives them: heads before runs
    transfers = draw(J, HEADS, 1, B, K, V + K).movedim(1, 3) / K**0.5
    transfers[3] = torch.nan
    transfers[1] = draw(*transfers.shape[1:])
    dst = torch.full((J, 1, B, HEADS, *((W, K) if is_v_first else (K, W))), -1.0, dtype=torch.float64)
    dst = dst.mT if is_v_first else dst
    add = transfers[..., :V].nan_to_num(0.5)
    first = draw(B, HEADS, K, W) if wide else None
    return PropagateProblem(dst, add, transfers[..., V:], first, STEPS, is_transposed)


def narrow(p: PropagateProblem, device: str, heads: slice = slice(None)) -> PropagateProblem:
    """Return the problem of some heads in fp32 on a device."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, torch.float32)

    first = None if p.first is None else moved(p.first[:, heads])
    dst, add, maps = (moved(x[:, :, :, heads]) for x in (p.dst, p.add, p.map))
    return replace(p, dst=dst, add=add, map=maps, first=first)


def check(device: str, K: int, V: int, **kind: bool) -> None:
    p = problem_of(K, V, **kind)
    load("eager").propagate_states(p)
    got = narrow(p, device)
    load("triton").propagate_states(got)
    assert torch.isfinite(p.dst).all()
    error = ((got.dst.cpu().double() - p.dst).norm() / p.dst.norm()).item()
    assert error <= 2e-6, error
    # a part of the heads has the bits of all of them: `gather` and `owner` fold differently many
    part = narrow(p, device, slice(1, 2))
    load("triton").propagate_states(part)
    assert torch.equal(part.dst, got.dst[:, :, :, 1:2])


KINDS = [
    {"is_transposed": False, "is_v_first": False, "wide": False},
    {"is_transposed": True, "is_v_first": True, "wide": False},
    {"is_transposed": False, "is_v_first": False, "wide": True},
]


@pytest.mark.interpret
@pytest.mark.skipif(not INTERPRETED, reason="expected kernels to be interpreted")
@pytest.mark.parametrize("kind", KINDS)
def test_a_launch_passes_states_as_plain_pytorch(kind):
    check("cpu", 20, 12, **kind)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_a_launch_passes_states_on_a_gpu(kind, K):
    check("cuda", K, K, **kind)


@pytest.mark.interpret
@pytest.mark.skipif(not INTERPRETED, reason="expected kernels to be interpreted")
def test_large_maps_are_folded_by_eager():
    p = narrow(problem_of(16, 16, **KINDS[0]), "cpu")
    assert select(p).name == "triton"
    assert select(replace(p, dst=torch.empty(1, 1, 1, 1, 256, 256))).name == "eager"
