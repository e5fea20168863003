"""Compute one sequence on all ranks, and compare it with one process. Run it as

torchrun --standalone --nproc-per-node 2 examples/two_ranks.py
"""

import torch
from torch import distributed

import gdn


def main() -> None:
    distributed.init_process_group("gloo")
    torch.manual_seed(0)  # the same layer and tokens on every rank
    layer = gdn.GatedDeltaNet(hidden_size=64, num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=16)
    hidden = torch.randn(1, 1000, 64)

    context = gdn.ContextParallel(distributed.group.WORLD, num_tokens=1000)
    y = layer(context.shard(hidden, dim=1), cp_context=context)
    y.square().sum().backward()

    want = layer(hidden)
    error = (context.unshard(y.detach(), dim=1) - want).norm() / want.norm()
    print(f"rank {context.rank} of {context.world_size}: {y.shape[1]} tokens, relative error {error:.1e}")
    assert error < 1e-5
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
