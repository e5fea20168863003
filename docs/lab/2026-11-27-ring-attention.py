"""Train a Transformers Qwen3.5 on two GPUs by one call, beside one GPU.

    python docs/lab/2026-11-27-ring-attention.py

The model is unmodified: three gated delta rule layers and one of attention, which torch's ring runs. For each
dtype the ranks print the errors of the loss and of all gradients against one process in fp32, the same of one
GPU in the dtype, and the losses of 20 steps of Adam. `--cpu` runs toy sizes on gloo, where torch has no ring:
the attention is that of tests/test_distributed_transformers.py.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gdn

VOCAB, RANKS = 128, 2


def model_of(width: int, dtype: torch.dtype, device: str):
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(3)
    head = min(width // 4, 128)
    options = {
        "vocab_size": VOCAB, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": head, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": head, "linear_value_head_dim": head,
        "max_position_embeddings": 65536, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "attn_implementation": "sdpa",
    }  # fmt: skip
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**options)).to(device, dtype)


def batch(num_tokens: int, device: str):
    ids = torch.randint(3, VOCAB, (1, num_tokens + 1), generator=torch.Generator().manual_seed(4)).to(device)
    positions = torch.arange(num_tokens, device=device)[None]
    return {"input_ids": ids[:, :-1].clone(), "position_ids": positions, "shift_labels": ids[:, 1:].clone()}


def step(model, x, num_tokens: int) -> float:
    """Return the loss of this process's tokens, after the backward."""
    loss = model(**x, labels=x["shift_labels"], use_cache=False, num_items_in_batch=num_tokens).loss
    loss.backward()
    return loss.detach()


def on_ranks(model, mesh, num_tokens: int, device: str, attention) -> float:
    """Return the loss of all tokens; the gradients are summed over the ranks."""
    x = batch(num_tokens, device)
    options = {"buffers": list(x.values()), "buffer_seq_dims": [1, 1, 1]}
    with gdn.context_parallel(model, mesh, **options), attention():
        loss = step(model, x, num_tokens)
    dist.all_reduce(loss)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return float(loss)


def errors(model, exact) -> str:
    """Return the error of all gradients, and the largest of one parameter, in 1e-3."""
    pairs = [
        (x.grad.double(), y.grad.double())
        for x, y in zip(model.parameters(), exact.parameters(), strict=True)
    ]
    every = [((x - y).norm() / y.norm().clamp(min=1e-12)).item() for x, y in pairs]
    whole = sum((x - y).norm() ** 2 for x, y in pairs) / sum(y.norm() ** 2 for _, y in pairs)
    return f"{whole.sqrt().item() * 1e3:.3f} (largest {max(every) * 1e3:.2f})"


def work(rank: int, folder: str, args) -> None:
    device, attention = "cuda", contextlib.nullcontext
    if args.cpu:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
        from test_distributed_transformers import attention_on_ranks as attention

        device = "cpu"
    else:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if args.cpu else "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    mesh = init_device_mesh(device, (RANKS,), mesh_dim_names=("cp",))
    width, num_tokens = (64, 128) if args.cpu else (512, 8192)
    say = print if rank == 0 else lambda *x, **y: None
    with gdn.patch_transformers():
        exact = model_of(width, torch.float32, device)
        want = float(step(exact, batch(num_tokens, device), num_tokens))
        for dtype in (torch.float32,) if args.cpu else (torch.bfloat16, torch.float32):
            try:
                alone, model = (model_of(width, dtype, device) for _ in range(2))
                found = float(step(alone, batch(num_tokens, device), num_tokens))
                total = on_ranks(model, mesh, num_tokens, device, attention)
                say(
                    f"{dtype}: loss {want:.6f}, one {found - want:+.1e}, ranks {total - want:+.1e}; "
                    f"gradients in 1e-3: one {errors(alone, exact)}, ranks {errors(model, exact)}",
                    flush=True,
                )
                pairs = [(m, torch.optim.Adam(m.parameters(), 1e-3)) for m in (alone, model)]
                losses: list[tuple[float, float]] = []
                for _ in range(20):
                    for _m, optimizer in pairs:
                        optimizer.step()
                        optimizer.zero_grad()
                    losses.append(
                        (
                            float(step(alone, batch(num_tokens, device), num_tokens)),
                            on_ranks(model, mesh, num_tokens, device, attention),
                        )
                    )
                apart = max(abs(a - b) for a, b in losses)
                say(
                    f"{dtype}: 20 steps of Adam, {losses[0][0]:.4f} to {losses[-1][0]:.4f}, "
                    f"apart by {apart:.1e}",
                    flush=True,
                )
            except Exception as e:
                say(f"{dtype}: FAILED {type(e).__name__}: {str(e)[:600]}", flush=True)
                break
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder, args), RANKS)
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
