"""Compare every exchange of context parallelism with the reference recurrence, on 2, 4 or 8 ranks.

The functions run on every rank of `kit.ranks`: with NCCL, a GPU each, or with gloo.
"""

import functools
from dataclasses import replace

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gdn
from gdn.testing.accuracy import error_limits
from kit.sharded import LIMITS, Sharded, computed, device_of_rank, expected, gathered, relative

T = 600
GATES = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
# where the runs of unequal shards end; with four and eight ranks a packed sequence crosses several borders
UNEQUAL = {2: (130,), 4: (130, 230, 420), 8: (130, 150, 230, 300, 310, 420, 500)}


def cases_of(R: int, K: int = 128, V: int = 128, dtype: torch.dtype = torch.bfloat16) -> dict[str, Sharded]:
    """Return the problems of R ranks. Sequences cross up to R - 1 borders, or 2 R - 2 in zig-zag."""
    wide = Sharded({"num_tokens": T}, T=T, H=R, HV=2 * R, K=K, V=V, dtype=dtype)
    zigzag = [*range(R), *range(R - 1)[::-1]]
    ends = [T * i // (2 * R) for i in range(1, 2 * R + 1)]
    return {
        "contiguous": wide,
        "64 channels": replace(wide, K=K // 2, V=V // 2),
        "no decay": replace(wide, gate="none"),
        "strong gates": replace(wide, gate="strong"),
        "resets, unequal, packed": replace(
            wide, context={"runs": runs_of(range(R), (*UNEQUAL[R], T))},
            offsets=(0, 70, 130, 200, 200, 590, 600), gate="reset", options={"state_v_first": True},
        ),
        "packed without a crossing": replace(
            wide, offsets=(0, 75, 150, 150, 200, 225, 300, 375, 450, 500, 525, 600)
        ),
        "headtail, gates inside": replace(
            wide, context={"order": "headtail", "num_tokens": T}, options={**GATES, "allow_neg_eigval": True}
        ),
        # the last rank has one run, of double length
        "zigzag of two rows": replace(
            wide, context={"runs": runs_of(zigzag, (*ends[: R - 1], *ends[R:]))}, B=2, options={"scale": 0.3}
        ),
        "a run of two tokens": replace(wide, context={"runs": runs_with_a_short_one(R)}),
        "a rank without tokens": replace(
            wide, absent=("beta",),
            context={"runs": runs_of(range(1, R), [T * i // (R - 1) for i in range(1, R)])},
        ),
        "no states, no gate": replace(wide, absent=("initial_state", "g")),
        "fewer key heads than ranks": replace(wide, H=R // 2, HV=R, offsets=(0, 8, 600)),
        "a decay per key channel": replace(wide, has_channels=True, offsets=(0, 100, 600)),
    }  # fmt: skip


def runs_of(ranks: range | list[int], ends: tuple[int, ...] | list[int]) -> list[tuple[int, int, int]]:
    """Return runs (rank, start, stop) from their ranks and ends, in the order of tokens."""
    return list(zip(ranks, (0, *ends[:-1]), ends, strict=True))


def runs_with_a_short_one(R: int) -> list[tuple[int, int, int]]:
    """Return R + 1 runs: that of the last rank has two tokens and lies in the middle."""
    middle, blocks = R // 2, [*range(R - 1), 0]
    ranks = [*blocks[:middle], R - 1, *blocks[middle:]]
    ends = [T * i // R for i in range(1, R + 1)]
    return runs_of(ranks, [*ends[:middle], T // 2 + 2, *ends[middle:]])


CASES = tuple(cases_of(2))


@functools.cache
def mesh_of(**sizes: int) -> DeviceMesh:
    """Return the mesh of all ranks with these dimensions: one for each process, as groups are expensive."""
    return init_device_mesh(device_of_rank().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def exchanges_of(R: int, H: int) -> tuple[str, ...]:
    """Return the exchanges that R ranks and H key heads allow; nodes have two ranks."""
    return ("gather", "owner", *(["nodes"] if R >= 4 else []), *(["heads"] if H >= R else []))


def context_of(p: Sharded, exchange: str) -> gdn.ContextParallel:
    """Return a context of all ranks: for `nodes`, of R / 2 nodes of two ranks."""
    mesh = mesh_of(nodes=dist.get_world_size() // 2, ranks=2) if exchange == "nodes" else dist.group.WORLD
    return gdn.ContextParallel(mesh, exchange=exchange, **p.context)


def compare_exchanges(rank: int, p: Sharded, num_reruns: int) -> list[str]:
    """Return what is wrong on this rank: errors above their limits, and bits that differ.

    Each exchange has its own bits in every run; `gather` and `owner` have the same.
    """
    narrow = error_limits(p.dtype, "random")
    limits = dict.fromkeys(narrow, LIMITS[p.dtype]) if p.dtype in LIMITS else narrow
    limits["dinitial_state"] = limits["dh0"]
    want, wrong, firsts = expected(p), [], {}
    for exchange in exchanges_of(dist.get_world_size(), p.H):
        context = context_of(p, exchange)
        first = firsts[exchange] = computed(p, context)
        for name, x in gathered(p, context, first).items():
            error = relative(x, want[name])
            wrong += [] if error <= limits[name] else [f"{exchange} {name} is off by {error:.1e}"]
        for _ in range(num_reruns):
            wrong += [f"{exchange}, bits of {n}" for n in different(first, computed(p, context))]
    return wrong + [f"owner beside gather, bits of {n}" for n in different(firsts["gather"], firsts["owner"])]


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors whose bits differ."""
    return [name for name, x in one.items() if not torch.equal(x, other[name])]
