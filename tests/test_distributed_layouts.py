"""Run four ranks: nodes of two, and a model under context and tensor parallelism, FSDP2, checkpoints."""

import os
import re
from typing import Any
from unittest import mock

import pytest
import torch
from kit import forks
from kit import ranks as kit
from kit.processes import ROOT
from kit.sharded import Sharded, errors
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import gdn
from gdn.distributed import nodes

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")

T, VOCAB = 64, 32
LAYOUTS = {"tp x cp": (2, 2), "tp": (1, 4)}  # ranks of context (and FSDP2), of heads


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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))
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


class Model(nn.Module):
    """Predict tokens with two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.mixers = nn.ModuleList(gdn.GatedDeltaNet(16, 4, 8, 4, 4, with_conv_bias=True) for _ in range(2))

    def forward(self, ids: Tensor, context: Any = None) -> Tensor:
        x = self.embed(ids)
        for mixer in self.mixers:
            x = x + mixer(F.rms_norm(x, (16,)), cp_context=context)
        return self.head(F.rms_norm(x, (16,)))


class Run:
    """Hold a model under a layout, its optimizer and its losses."""

    def __init__(self, layout: str | None, **policy: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        self.model, self.context = Model(), None
        if layout is not None:
            num_contexts, num_heads = LAYOUTS[layout]
            mesh = init_device_mesh("cpu", (num_contexts, num_heads), mesh_dim_names=("cp", "tp"))
            self.context = gdn.ContextParallel(mesh["cp"], num_tokens=T)
            gdn.distributed.tensor_parallel(self.model, mesh["tp"])
            gdn.distributed.fully_shard_layers(self.model, mesh=mesh["cp"], **policy)
            fully_shard(self.model, mesh=mesh["cp"], **policy)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)

    def step(self) -> float:
        ids = torch.randint(0, VOCAB, (1, T + 1), generator=torch.Generator().manual_seed(6))
        inputs, labels, context = ids[:, :-1], ids[:, 1:], self.context
        if context is not None:
            inputs, labels = context.shard(inputs, 1), context.shard(labels, 1)
        logits = self.model(inputs, context)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / T
        total = loss.detach().clone()
        if context is not None:
            dist.all_reduce(total, group=context._groups.whole)
            loss = loss * context.world_size  # FSDP2 averages gradients over the ranks of tokens
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(total)


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


def distance(losses: list[float], want: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, want, strict=True))


def run_on(ranks: kit.Ranks, function: Any, layout: str | None, folder: str) -> list[float]:
    """Return the losses of a layout, which are the same on all its ranks; None is one process."""
    outcomes = ranks.outcomes(function, layout, folder, only=None if layout else [0])
    assert all(is_done for is_done, _ in outcomes), outcomes
    losses = [x for _, x in outcomes]
    assert losses.count(losses[0]) == len(losses)
    return losses[0]


def test_a_checkpoint_of_one_layout_continues_under_another(four_ranks, tmp_path):
    want = run_on(four_ranks, save, None, str(tmp_path / "None"))
    assert want[-1] < 0.99 * want[1]
    for saved, others in (("tp x cp", ["tp", None]), (None, ["tp x cp"])):
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
