"""Train a small model on many ranks: context parallelism, tensor parallelism and FSDP2. Run it as

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/train_many.py --tp 2 --folder build/many

A sequence lies on world size / tp ranks, and FSDP2 splits the parameters over them. Started again, after
a kill or with other numbers of ranks, it continues from the last checkpoint in the folder. To see this, let
it kill one rank: --kill-at 25. Without the variable, ranks that torchrun starts again may look for each other
at the addresses of the killed ones, as they share one store (seen with PyTorch 2.13).
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import gdn

T, VOCAB, WIDTH = 512, 64, 64


class Model(nn.Module):
    """Predict tokens with two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mixers = nn.ModuleList(gdn.GatedDeltaNet(WIDTH, 4, 8, 16, 16) for _ in range(2))

    def forward(self, ids: Tensor, context: gdn.ContextParallel) -> Tensor:
        x = self.embed(ids)
        for mixer in self.mixers:
            x = x + mixer(F.rms_norm(x, (WIDTH,)), cp_context=context)
        return self.head(F.rms_norm(x, (WIDTH,)))


def build(mesh: DeviceMesh) -> tuple[Model, torch.optim.Optimizer]:
    """Return the model, split over both axes of the mesh, and its optimizer."""
    torch.manual_seed(0)  # the same weights on every rank
    model = Model().to(mesh.device_type)
    gdn.distributed.tensor_parallel(model, mesh["tp"])
    gdn.distributed.fully_shard_layers(model, mesh=mesh["cp"])
    fully_shard(model, mesh=mesh["cp"])
    # on a GPU the default, foreach, refuses a list that holds both tensors and DTensors
    return model, torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)


def batch(step: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the tokens of a step and the tokens after them: one of four pieces of text, repeated."""
    piece = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(step % 4))
    ids = piece.repeat(1, T // 40 + 2)[:, : T + 1].to(device)
    return ids[:, :-1], ids[:, 1:]


def last_checkpoint(folder: Path) -> int:
    """Return the step of the last complete checkpoint, or 0: the metadata are written last."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = gdn.distributed.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def train(options: argparse.Namespace, mesh: DeviceMesh) -> None:
    device = mesh.device_type
    context = gdn.ContextParallel(mesh["cp"], num_tokens=T)
    model, optimizer = build(mesh)
    is_first = distributed.get_rank() == 0
    start = last_checkpoint(options.folder)
    if start:
        state = states(model, optimizer)
        checkpoint.load(state, checkpoint_id=options.folder / str(start))
        gdn.distributed.set_state_dict(model, optimizer, state["model"], state["optimizer"])
    if is_first:
        print(f"{mesh.shape[0]} x {mesh.shape[1]} ranks, begins after step {start}", flush=True)
    for step in range(start + 1, options.steps + 1):
        inputs, labels = (context.shard(x, dim=1) for x in batch(step, device))
        logits = model(inputs, context)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / T
        # FSDP2 averages gradients over the ranks of a sequence, whose losses are parts of one sum
        (loss * context.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        distributed.all_reduce(total, group=mesh["cp"].get_group())
        if is_first:
            print(f"step {step}: loss {total:.6f}", flush=True)
        if step == options.kill_at and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            distributed.barrier()
            if distributed.get_rank() == distributed.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if step % options.every == 0:
            checkpoint.save(states(model, optimizer), checkpoint_id=options.folder / str(step))


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small model on many ranks")
    parser.add_argument("--tp", type=int, default=1, help="ranks over which the heads are split")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are")
    parser.add_argument("--kill-at", type=int, default=0, help="step after which one rank is killed, once")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    size = (distributed.get_world_size() // options.tp, options.tp)
    train(options, init_device_mesh(device, size, mesh_dim_names=("cp", "tp")))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
