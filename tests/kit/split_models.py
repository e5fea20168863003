"""Split a layer and a small model over heads, tokens and sequences, and compare them with whole ones.

The functions run on every rank of `kit.ranks`: with NCCL, a GPU each, or with gloo.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

import gdn
from kit.exchanges import mesh_of
from kit.sharded import device_of_rank, relative

VOCAB, ROWS = 32, 2


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes of a layer, and the number of tokens of a sequence."""

    hidden: int = 16
    H: int = 4
    HV: int = 8
    K: int = 4
    V: int = 4
    T: int = 64


def make_layer(s: Sizes, dtype: torch.dtype = torch.float32) -> gdn.GatedDeltaNet:
    return gdn.GatedDeltaNet(s.hidden, s.H, s.HV, s.K, s.V, with_conv_bias=True, dtype=dtype)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of all parameters by the names of the whole layer; they replace the parameters."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.grad)
    return {name: whole(x) for name, x in module.state_dict().items()}


def compare_layer(rank: int, s: Sizes, dtype: torch.dtype) -> dict[str, float]:
    """Return the errors of outputs and gradients of a layer with heads on two ranks, tokens on R / 2."""
    mesh, device = mesh_of(cp=dist.get_world_size() // 2, tp=2), device_of_rank()
    layers = []
    for _ in range(2):
        torch.manual_seed(1)
        layers.append(make_layer(s, dtype).to(device))
    alone, model = layers
    gdn.distributed.tensor_parallel(model, mesh["tp"])
    context = gdn.ContextParallel(mesh["cp"], num_tokens=s.T)
    generator = torch.Generator().manual_seed(2)
    x, dy = torch.randn(2, ROWS, s.T, s.hidden, generator=generator, dtype=torch.float64).to(device, dtype)
    mine = context.shard(x, 1).requires_grad_()
    y = model(mine, cp_context=context)
    y.backward(context.shard(dy, 1))
    for parameter in model.parameters():
        local = parameter.grad.to_local()
        total = local.contiguous()
        dist.all_reduce(total, group=mesh["cp"].get_group())
        local.copy_(total)
    x.requires_grad_()
    want = alone(x)
    want.backward(dy)
    got = {"y": context.unshard(y.detach(), 1), "dx": context.unshard(mine.grad, 1), **gradients(model)}
    original = {"y": want.detach(), "dx": x.grad, **gradients(alone)}
    assert got.keys() == original.keys()
    return {name: relative(t, original[name]) for name, t in got.items()}


class Model(nn.Module):
    """Predict tokens with two layers."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = nn.Embedding(VOCAB, s.hidden), nn.Linear(s.hidden, VOCAB)
        self.mixers = nn.ModuleList(make_layer(s) for _ in range(2))

    def forward(self, ids: Tensor, context: Any = None) -> Tensor:
        x = self.embed(ids)
        for mixer in self.mixers:
            x = x + mixer(F.rms_norm(x, (x.shape[-1],)), cp_context=context)
        return self.head(F.rms_norm(x, (x.shape[-1],)))


def axes_of(layout: str, R: int) -> dict[str, int]:
    """Return the mesh of a layout over R ranks: of different sequences, of tokens, of heads."""
    if layout == "tp":
        return {"dp": 1, "cp": 1, "tp": R}
    dp, tp = (2 if axis in layout else 1 for axis in ("dp", "tp"))
    return {"dp": dp, "cp": R // (dp * tp), "tp": tp}


class Run:
    """Hold a model under a layout, its optimizer and its losses; None: one process, without a layout."""

    def __init__(
        self, layout: str | None, s: Sizes = Sizes(), optimizer: Any = torch.optim.Adam, rate: float = 1e-2
    ) -> None:
        from torch.distributed.fsdp import fully_shard

        self.model, self.context, self.sizes = Model(s).to(device_of_rank()), None, s
        self.mesh: Any = None
        if layout is not None:
            mesh = self.mesh = mesh_of(**axes_of(layout, dist.get_world_size()))
            self.context = gdn.ContextParallel(mesh["cp"], num_tokens=s.T)
            shards = mesh["cp"]
            if mesh["dp"].size() > 1:
                # of two dimensions: FSDP2 replicates over the first one
                shards = mesh["dp", "cp"] if "replicated" in layout else mesh["dp", "cp"]._flatten("shards")
            if mesh["tp"].size() > 1:
                gdn.distributed.tensor_parallel(self.model, mesh["tp"])
            gdn.distributed.fully_shard_layers(self.model, mesh=shards)
            fully_shard(self.model, mesh=shards)
        # foreach refuses a list with DTensors of several meshes
        self.optimizer = optimizer(self.model.parameters(), rate, foreach=False)

    def step(self) -> float:
        """Train on the rows of this rank; return the loss of all rows."""
        s, context, mesh = self.sizes, self.context, self.mesh
        ids = torch.randint(0, VOCAB, (ROWS, s.T + 1), generator=torch.Generator().manual_seed(6))
        ids = ids.to(device_of_rank())
        if mesh is not None:
            ids = ids.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        inputs, labels = ids[:, :-1], ids[:, 1:]
        if context is not None:
            inputs, labels = context.shard(inputs, 1), context.shard(labels, 1)
        logits = self.model(inputs, context)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (ROWS * s.T)
        total = loss.detach().clone()
        if mesh is not None:
            for axis in ("cp", "dp"):
                dist.all_reduce(total, group=mesh[axis].get_group())
                # FSDP2 averages gradients over the ranks of tokens and of sequences
                loss = loss * mesh[axis].size()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(total)


def train(rank: int, layout: str | None, s: Sizes, num_steps: int) -> list[float]:
    """Return the losses of steps of SGD, which sees a wrong factor of all gradients; Adam does not."""
    run = Run(layout, s, torch.optim.SGD, 0.5)
    return [run.step() for _ in range(num_steps)]


def distance(losses: list[float], want: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / b for a, b in zip(losses, want, strict=True))
