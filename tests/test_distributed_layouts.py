"""Run four ranks: nodes of two, and a model under context and tensor parallelism, FSDP2, checkpoints."""

import os
import re
from typing import Any
from unittest import mock

import pytest
import torch
from kit import forks
from kit import ranks as kit
from kit.exchanges import cases_of, compare_exchanges, mesh_of
from kit.processes import ROOT
from kit.sharded import LIMITS, Sharded, errors
from kit.split_models import Run, Sizes, compare_layer, distance, train
from torch import Tensor
from torch import distributed as dist

import gdn
from gdn.distributed import nodes

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")


@pytest.fixture(scope="module")
def four_ranks():
    with kit.started(4) as ranks:
        yield ranks


RUNS = [(1, 0, 9), (0, 9, 20), (2, 20, 31), (3, 31, 44), (0, 44, 52), (3, 52, 60), (1, 60, 75), (2, 75, 90)]
NODES = {
    "contiguous": Sharded({"num_tokens": 90}, B=2),
    "headtail, packed": Sharded({"order": "headtail", "num_tokens": 90}, offsets=(0, 2, 41, 41, 77, 90)),
    "drawn": Sharded({"runs": RUNS}, H=1, HV=3),
    "ranks without tokens": Sharded({"runs": [(3, 0, 40), (0, 40, 90)]}, offsets=(0, 10, 90)),
    "a node without tokens": Sharded({"runs": [(3, 0, 40), (2, 40, 90)]}, offsets=(0, 10, 90)),
}


def fold_by_nodes(rank: int, wrong: bool) -> dict[str, float]:
    """Return the largest error of each case; wrong: with an M of a whole group of runs that is dropped."""
    mesh = mesh_of(nodes=2, ranks=2)
    right = nodes.fold_transfers

    def drop(transfers: Tensor, passes: Any, V: int, backend: str | None) -> Tensor:
        found = right(transfers, passes, V, backend)
        found[..., V:] = 0
        return found

    found = {}
    for name, case in NODES.items():
        context = gdn.ContextParallel(mesh, exchange="nodes", **case.context)
        assert (context.world_size, context.rank) == (4, rank)
        with mock.patch.object(nodes, "fold_transfers", drop if wrong else right):
            found[name] = max(errors(case, context).values(), default=0.0)
    return found


def test_nodes_fold_the_states_of_the_reference_recurrence(four_ranks):
    found, *_ = four_ranks.run(fold_by_nodes, False)
    assert max(found.values()) <= 1e-10, found
    found, *_ = four_ranks.run(fold_by_nodes, True)
    assert found["drawn"] > 1e-3, "a dropped M of a node"


@pytest.mark.parametrize(
    "name",
    ["resets, unequal, packed", "zigzag of two rows", "a run of two tokens", "fewer key heads than ranks"],
)
def test_every_exchange_computes_the_reference_recurrence(four_ranks, name):
    case = cases_of(4, 16, 16, torch.float32)[name]
    for wrong in four_ranks.run(compare_exchanges, case, 1):
        assert not wrong


def test_a_layer_on_ranks_of_heads_and_of_tokens_computes_as_one_process(four_ranks):
    for errors_of_rank in four_ranks.run(compare_layer, Sizes(), torch.float64):
        assert max(errors_of_rank.values()) <= LIMITS[torch.float64], errors_of_rank


def test_layouts_train_as_one_process(four_ranks):
    want = run_on(four_ranks, train, None, Sizes(), 4)
    assert want[-1] < 0.99 * want[0]
    for layout in ("tp x cp", "dp x cp", "dp x cp, replicated", "dp x cp x tp"):
        assert distance(run_on(four_ranks, train, layout, Sizes(), 4), want) <= 1e-5, layout


def states(run: Run) -> dict[str, Any]:
    model, optimizer = gdn.distributed.get_state_dict(run.model, run.optimizer)
    return {"model": model, "optimizer": optimizer}


def save(rank: int, layout: str | None, folder: str) -> list[float]:
    """Train two steps, save, train two more; return the losses."""
    import torch.distributed.checkpoint as dcp

    run = Run(layout)
    losses = [run.step() for _ in range(2)]
    dcp.save(states(run), checkpoint_id=folder, no_dist=layout is None)
    return losses + [run.step() for _ in range(2)]


def load(rank: int, layout: str | None, folder: str) -> list[float]:
    """Load, train two steps, and return the losses."""
    import torch.distributed.checkpoint as dcp

    run = Run(layout)
    state = states(run)
    dcp.load(state, checkpoint_id=folder, no_dist=layout is None)
    gdn.distributed.set_state_dict(run.model, run.optimizer, state["model"], state["optimizer"])
    return [run.step() for _ in range(2)]


def run_on(ranks: kit.Ranks, function: Any, layout: str | None, *args: Any) -> list[float]:
    """Return the losses of a layout, which are the same on all its ranks; None is one process."""
    outcomes = ranks.outcomes(function, layout, *args, only=None if layout else [0])
    assert all(is_done for is_done, _ in outcomes), outcomes
    losses = [x for _, x in outcomes]
    assert losses.count(losses[0]) == len(losses)
    return losses[0]


def test_a_checkpoint_of_one_layout_continues_under_another(four_ranks, tmp_path):
    want = run_on(four_ranks, save, None, str(tmp_path / "None"))
    assert want[-1] < 0.99 * want[1]
    for saved, others in (("tp x cp", ["tp", "dp x cp", None]), (None, ["tp x cp"])):
        folder = str(tmp_path / str(saved))
        losses = want if saved is None else run_on(four_ranks, save, saved, folder)
        assert distance(losses, want) <= 1e-5, saved
        assert run_on(four_ranks, load, saved, folder) == losses[2:], saved
        for loaded in others:
            assert distance(run_on(four_ranks, load, loaded, folder), losses[2:]) <= 1e-5, (saved, loaded)


@pytest.mark.slow
def test_the_example_continues_after_a_kill(tmp_path):
    """The last rank is killed after step 3; torchrun starts both again, which repeat step 3."""
    options = ["--steps", "4", "--every", "2", "--kill-at", "3", "--folder", str(tmp_path), "--tp", "2"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = forks.python(
        *launcher, "examples/train_many.py", *options, cwd=ROOT, timeout=120,
        env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.findall(r"begins after step (\d)", done.stdout) == ["0", "2"]
    losses = re.findall(r"step (\d): loss (\S+)", done.stdout)
    assert [step for step, _ in losses] == ["1", "2", "3", "3", "4"]
    assert losses[2] == losses[3], "step 3 again, from the checkpoint of step 2"
    assert sorted(x.name for x in tmp_path.iterdir()) == ["2", "4"]
