"""Training with packed sequences.

Documents have different lengths. Padding them to the longest wastes time; *packing* puts them one after the
other in one row and tells the layer where each one begins. This tutorial trains a small model on packed
documents and checks that no document sees another one. It runs on a CPU in a few seconds:

    python docs/tutorials/packed.py
"""

# %% ## A task that needs the state
#
# A document is a random string of letters, written twice. Nothing can predict the first half. The second
# half can be predicted by a model that remembers which letter followed which: a key is a letter, its value
# the next letter. This is what a state of the delta rule stores.

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gdn

LETTERS = 16


def document(length: int, draw: torch.Generator) -> Tensor:
    """Return a permutation of some letters, twice."""
    half = torch.randperm(LETTERS, generator=draw)[:length]
    return torch.cat([half, half])


def pack(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return all tokens in one row [1, T], and the offsets [N + 1] between which a document lies."""
    lengths = torch.tensor([0, *(len(x) for x in documents)])
    return torch.cat(documents)[None], lengths.cumsum(0)


# %% ## A model of one layer
#
# `GatedDeltaNet` takes `cu_seqlens`: its short convolution and its recurrence both start anew at every
# offset. Everything else of the model (embedding, norm, head) works token by token and needs no offsets.


class Model(nn.Module):
    """An embedding, one GatedDeltaNet layer with a residual, and a head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, width)
        self.layer = gdn.GatedDeltaNet(width, num_k_heads=2, num_v_heads=2, head_k_dim=32, head_v_dim=32)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, LETTERS, bias=False)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return logits [1, T, LETTERS]."""
        x = self.embed(tokens)
        x = x + self.layer(x, cu_seqlens=cu_seqlens)
        return self.head(self.norm(x))


# %% ## The loss
#
# A token predicts the next token of its own document. The last token of a document has no next one. Here
# only the second halves count.


def targets_of(documents: list[Tensor]) -> Tensor:
    """Return the next token of each token [T], and -100, which the loss ignores, where none is asked for."""
    found = []
    for tokens in documents:
        wanted = torch.full_like(tokens, -100)
        start = len(tokens) // 2
        wanted[start:-1] = tokens[start + 1 :]
        found.append(wanted)
    return torch.cat(found)


def loss_of(model: Model, documents: list[Tensor]) -> Tensor:
    """Return the mean loss of packed documents."""
    tokens, offsets = pack(documents)
    return F.cross_entropy(model(tokens, offsets)[0], targets_of(documents))


# %% ## No document sees another one
#
# The loss of the packed row equals the loss of each document alone, and so do the gradients. On a CPU the
# difference is rounding. Without `cu_seqlens` the layer would mix the documents, and no error would say so:
# this is the most frequent mistake with packed data.


def check(model: Model, documents: list[Tensor]) -> None:
    """Compare gradients of packed documents with those of one document at a time."""
    model.zero_grad()
    loss_of(model, documents).backward()
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = sum(int((targets_of([x]) >= 0).sum()) for x in documents)
    for tokens in documents:
        share = int((targets_of([tokens]) >= 0).sum()) / total
        (share * loss_of(model, [tokens])).backward()
    for one, other in zip(packed, model.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-3, atol=1e-5)


# %% ## Training
#
# Each step packs 24 documents of 4 to 16 letters a half. Padding to the longest would compute 1.6 times as
# many tokens.
#
# ![Loss of the second halves against training steps](packed.svg)


def train(steps: int, draw: torch.Generator) -> tuple[list[float], float]:
    """Return the losses, and the tokens that padding would have needed per packed token."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses, packed, padded = [], 0, 0
    for step in range(steps):
        halves = torch.randint(4, LETTERS + 1, (24,), generator=draw).tolist()
        documents = [document(half, draw) for half in halves]
        packed, padded = packed + 2 * sum(halves), padded + 48 * max(halves)
        if step == 0:
            check(model, documents)
        optimizer.zero_grad()
        loss = loss_of(model, documents)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, padded / packed


def draw_losses(losses: list[float], path: Path) -> None:
    """Draw the loss against steps, and the loss of a guess."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(losses, label="second halves")
    axes.axhline(
        torch.tensor(float(LETTERS)).log(), color="black", linewidth=1, linestyle=":", label="a guess"
    )
    axes.set_xlabel("training step, 24 packed documents each")
    axes.set_ylabel("nats per token")
    axes.set_ylim(bottom=0)
    axes.set_title("A GatedDeltaNet layer learns to repeat (CPU, fp32)", fontsize=10)
    axes.legend(frameon=False)
    axes.grid(alpha=0.35, linewidth=0.5)
    figure.savefig(path, metadata={"Date": None})


# %% ## Further
#
# On a GPU the same code runs on Triton kernels; `torch.compile(model, fullgraph=True, dynamic=True)` keeps
# one graph for all packings. Pass `cu_seqlens_cpu=` to `chunk_gated_delta_rule` where the offsets are at
# hand on the CPU: they help to plan, and nothing is copied back from the GPU. Transformers models take
# packed rows through their own arguments: see [Transformers](../transformers.md).


def main() -> None:
    """Train, print and draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".svg"))
    parser.add_argument("--steps", type=int, default=220)
    options = parser.parse_args()
    losses, ratio = train(options.steps, torch.Generator().manual_seed(1))
    draw_losses(losses, options.out)
    print(
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats; padding: {ratio:.2f} times the tokens; {options.out}"
    )


if __name__ == "__main__":
    main()
