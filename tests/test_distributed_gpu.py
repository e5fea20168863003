"""Compare 2, 4 and 8 ranks with NCCL, a GPU each, with one process: errors, bits, CUDA graphs, training.

NCCL_NVLS_ENABLE=0 pytest tests/test_distributed_gpu.py        (the variable where NVLink multicast is absent)
NCCL_NVLS_ENABLE=0 pytest tests/test_distributed_gpu.py -k R4  (four ranks alone)

Tests of more ranks than there are GPUs are skipped. `tests/test_distributed_layouts.py` runs the same
functions with gloo, on small problems.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.exchanges import CASES, cases_of, compare_exchanges, context_of, exchanges_of
from kit.ranks import Ranks, share_ranks
from kit.sharded import LIMITS, Sharded, device_of_rank
from kit.split_models import Sizes, compare_layer, distance, train
from torch import distributed as dist

import gdn
from gdn_bench.timing.ranks import Rank

pytestmark = pytest.mark.gpu
LIMIT = 300  # seconds of one function: kernels compile at first
NUM_RERUNS, NUM_STEPS = 5, 4
SIZES = Sizes(hidden=256, H=4, HV=8, K=64, V=64, T=500)


def needs_gpus(R: int) -> Any:
    """Return the parameter of R ranks, which fewer GPUs skip."""
    is_missing = torch.cuda.device_count() < R
    return pytest.param(R, id=f"R{R}", marks=pytest.mark.skipif(is_missing, reason=f"needs {R} GPUs"))


@pytest.fixture(scope="module", params=[needs_gpus(R) for R in (2, 4, 8)])
def held(request: pytest.FixtureRequest) -> Iterator[tuple[int, list[Ranks]]]:
    """Hold the ranks that the tests of one number of ranks share, and end them."""
    started: list[Ranks] = []
    yield request.param, started
    for ranks in started:
        ranks.close()


@pytest.fixture
def group(held: tuple[int, list[Ranks]]) -> Ranks:
    """Return the ranks of an NCCL group."""
    R, started = held
    return share_ranks(started, R, LIMIT, "nccl")


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_the_reference_recurrence(group, name, backend):
    case = cases_of(group.num_ranks)[name]
    if backend == "hopper" and (case.has_channels or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("hopper refuses it")
    for wrong in group.run(compare_exchanges, replace(case, backend=backend), NUM_RERUNS, limit=LIMIT):
        assert not wrong


def replay(rank: int, exchange: str) -> list[str]:
    """Return the outputs of a recorded step whose bits differ from those of eager mode, on other inputs."""
    device, R = device_of_rank(), dist.get_world_size()
    context = context_of(Sharded(), exchange)

    def draw(seed: int) -> list[Any]:
        generator = torch.Generator(device).manual_seed(seed + rank)
        q, k, v = (
            torch.randn(1, 512, heads, 128, generator=generator, device=device, dtype=torch.bfloat16)
            for heads in (R, R, 2 * R)
        )
        g, beta = (torch.rand(1, 512, 2 * R, generator=generator, device=device) for _ in range(2))
        return [q, k, v, -g / 8, beta]

    leaves = [x.requires_grad_() for x in draw(0)]
    results: list[torch.Tensor] = []

    def step() -> tuple[torch.Tensor, ...]:
        o, _ = gdn.chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, cp_context=context)
        results[:] = [o.detach(), *torch.autograd.grad(o, leaves, o.detach())]
        return tuple(results)

    graph = Rank(rank, R, device).record(step)
    recorded = list(results)
    with torch.no_grad():
        for x, y in zip(leaves, draw(10), strict=True):
            x.copy_(y)
    graph.replay()
    found = [x.clone() for x in recorded]
    names = ("o", "dq", "dk", "dv", "dg", "dbeta")
    return [n for n, x, y in zip(names, found, step(), strict=True) if not torch.equal(x, y)]


@pytest.mark.parametrize("exchange", ["gather", "owner", "nodes", "heads"])
def test_a_recorded_step_has_the_bits_of_eager_mode(group, exchange):
    if exchange not in exchanges_of(group.num_ranks, group.num_ranks):
        pytest.skip("two ranks are one node")
    assert group.run(replay, exchange, limit=LIMIT) == [[]] * group.num_ranks


def test_a_layer_on_ranks_of_heads_and_of_tokens_computes_as_one_process(group):
    for errors in group.run(compare_layer, SIZES, torch.float32, limit=LIMIT):
        assert max(errors.values()) <= LIMITS[torch.float32], errors


@pytest.mark.parametrize("layout", ["tp x cp", "dp x cp", "dp x cp, replicated", "dp x cp x tp"])
def test_layouts_train_as_one_process(group, layout):
    if group.num_ranks < 4:
        pytest.skip("two axes of the mesh have two ranks each")
    ((is_done, want),) = group.outcomes(train, None, SIZES, NUM_STEPS, limit=LIMIT, only=[0])
    assert is_done, want
    assert want[-1] < 0.99 * want[0]
    for losses in group.run(train, layout, SIZES, NUM_STEPS, limit=LIMIT):
        assert distance(losses, want) <= 1e-5
