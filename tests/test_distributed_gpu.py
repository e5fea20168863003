"""Compare two ranks with NCCL, a GPU each, with the reference on all tokens: errors, bits, CUDA graphs.

NCCL_NVLS_ENABLE=0 pytest tests/test_distributed_gpu.py    (the variable where NVLink multicast is absent)
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.ranks import Ranks, share_ranks
from kit.sharded import Sharded, computed, expected, gathered, relative
from torch import distributed as dist

import gdn
from gdn.testing.accuracy import error_limits
from gdn_bench.timing.ranks import Rank

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]  # fmt: skip
BF16 = torch.bfloat16
LIMIT = 300  # seconds of one function: kernels compile at first
GATES = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
WIDE = Sharded({"num_tokens": 600}, T=600, H=2, HV=4, K=128, V=128, dtype=BF16)
# the cases of gloo's tests on two ranks
CASES = {
    "contiguous": WIDE,
    "64 channels": replace(WIDE, K=64, V=64),
    "no decay": replace(WIDE, gate="none"),
    "strong gates": replace(WIDE, gate="strong"),
    "resets, unequal, packed": replace(
        WIDE, context={"runs": [(0, 0, 130), (1, 130, 600)]}, offsets=(0, 70, 130, 200, 200, 590, 600),
        gate="reset", options={"state_v_first": True},
    ),
    "packed without a crossing": replace(WIDE, offsets=(0, 200, 200, 300, 450, 600)),
    "headtail, gates inside": replace(
        WIDE, context={"order": "headtail", "num_tokens": 600}, options={**GATES, "allow_neg_eigval": True}
    ),
    "zigzag of two rows": replace(
        WIDE, context={"runs": [(0, 0, 150), (1, 150, 450), (0, 450, 600)]}, B=2, options={"scale": 0.3}
    ),
    "a run of two tokens": replace(WIDE, context={"runs": [(0, 0, 300), (1, 300, 302), (0, 302, 600)]}),
    "a rank without tokens": replace(WIDE, context={"runs": [(1, 0, 600)]}, absent=("beta",)),
    "no states, no gate": replace(WIDE, absent=("initial_state", "g")),
    "one key head": replace(WIDE, H=1, HV=2, offsets=(0, 8, 600)),
    "a decay per key channel": replace(WIDE, has_channels=True, offsets=(0, 250, 600)),
}  # fmt: skip


@pytest.fixture(scope="module")
def pairs() -> Iterator[list[Ranks]]:
    """Hold the ranks that the tests share, and end them."""
    started: list[Ranks] = []
    yield started
    for ranks in started:
        ranks.close()


@pytest.fixture
def pair(pairs: list[Ranks]) -> Ranks:
    """Return two ranks of an NCCL group."""
    return share_ranks(pairs, 2, LIMIT, "nccl")


def compare(rank: int, p: Sharded) -> list[str]:
    """Return what is wrong on this rank: errors above their limits, and bits that differ between runs."""
    want, limits = expected(p), error_limits(p.dtype, "random")
    limits["dinitial_state"] = limits["dh0"]
    wrong = []
    for exchange in ("gather", "owner", *(("heads",) if p.H >= 2 else ())):
        context = gdn.ContextParallel(dist.group.WORLD, exchange=exchange, **p.context)
        first = computed(p, context)
        for name, x in gathered(p, context, first).items():
            error = relative(x, want[name])
            wrong += [] if error <= limits[name] else [f"{exchange} {name} is off by {error:.1e}"]
        for _ in range(5):
            again = computed(p, context)
            wrong += [f"{exchange} bits of {n}" for n, x in first.items() if not torch.equal(x, again[n])]
    return wrong


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("name", CASES)
def test_two_gpus_compute_the_reference_recurrence(pair, name, backend):
    case = CASES[name]
    if backend == "hopper" and (case.has_channels or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("hopper refuses it")
    for found in pair.run(compare, replace(case, backend=backend), limit=LIMIT):
        assert not found


def replay(rank: int, exchange: str) -> list[str]:
    """Return the outputs of a recorded step whose bits differ from those of eager mode, on other inputs."""
    device = torch.device("cuda", rank)
    context = gdn.ContextParallel(dist.group.WORLD, exchange=exchange)

    def draw(seed: int) -> list[Any]:
        generator = torch.Generator(device).manual_seed(seed + rank)
        q, k, v = (
            torch.randn(1, 512, H, 128, generator=generator, device=device, dtype=BF16) for H in (2, 2, 4)
        )
        g, beta = (torch.rand(1, 512, 4, generator=generator, device=device) for _ in range(2))
        return [q, k, v, -g / 8, beta]

    leaves = [x.requires_grad_() for x in draw(0)]
    results: list[torch.Tensor] = []

    def step() -> tuple[torch.Tensor, ...]:
        o, _ = gdn.chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, cp_context=context)
        results[:] = [o.detach(), *torch.autograd.grad(o, leaves, o.detach())]
        return tuple(results)

    graph = Rank(rank, 2, device).record(step)
    recorded = list(results)
    with torch.no_grad():
        for x, y in zip(leaves, draw(10), strict=True):
            x.copy_(y)
    graph.replay()
    found = [x.clone() for x in recorded]
    names = ("o", "dq", "dk", "dv", "dg", "dbeta")
    return [n for n, x, y in zip(names, found, step(), strict=True) if not torch.equal(x, y)]


@pytest.mark.parametrize("exchange", ["gather", "owner", "heads"])
def test_a_recorded_step_has_the_bits_of_eager_mode(pair, exchange):
    assert pair.run(replay, exchange, limit=LIMIT) == [[], []]
