"""Profile a call, and add up the time of its kernels by kind.

Plain PyTorch has no kernels of the rule: its time is in matmuls, elementwise and other kernels.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

# kind -> parts of names of kernels, of gdn's, FLA's and PyTorch's; the first kind with one counts
KINDS: dict[str, tuple[str, ...]] = {
    "attention": ("flash_fwd", "flash_bwd", "fmha", "scaled_dot_product", "sdpa", "pytorch_flash"),
    "convolution": ("conv",),
    "rule, backward": (
        "gradients_kernel", "reverse_", "backward_factors", "gates_bwd", "state_bwd", "rows_bwd", "pairs",
        "plan_slabs", "values_bwd", "finish_bwd", "bwd_kernel_dhu", "chunk_bwd", "recompute_w_u_fwd",
        "prepare_wy_repr_bwd", "gdn_fused_bwd", "l2norm_bwd",
    ),
    "rule, forward": (
        "scan_kernel", "solve_kernel", "gates_kernel", "segment", "propagate_states", "prepare_kernel",
        "state_kernel", "output_kernel", "table_kernel", "chunk_", "solve_tril", "cumsum", "l2norm",
    ),
    "norms": ("norm",),
    "matmuls": ("nvjet", "gemm", "cutlass", "xmma", "splitk", "aten::mm", "addmm", "bmm", "cublas"),
    "optimizer": ("adam", "multi_tensor"),
    "loss": ("softmax", "nll_loss", "cross_entropy"),
    "elementwise": ("elementwise", "copy", "catarray", "memset", "memcpy", "fill", "reduce_kernel"),
    "other": ("",),
}  # fmt: skip


def kind_of(name: str) -> str:
    """Return the kind of a kernel."""
    low = name.lower()
    return next(kind for kind, parts in KINDS.items() if any(part in low for part in parts))


def by_kind(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the time of each kind of kernel, in the order of KINDS; kinds without time are absent."""
    sums = dict.fromkeys(KINDS, 0.0)
    for name, time in times:
        sums[kind_of(name)] += time
    return {kind: time for kind, time in sums.items() if time > 0}


def profile(call: Callable[[], Any], device: torch.device, calls: int = 2) -> list[tuple[str, float]]:
    """Return the ms of each kernel of a call, longest first; on a CPU those of operators."""
    activity = torch.profiler.ProfilerActivity
    is_gpu = device.type == "cuda"
    with torch.profiler.profile(activities=[activity.CUDA if is_gpu else activity.CPU]) as profiler:
        for _ in range(calls):
            call()
        if is_gpu:
            torch.cuda.synchronize(device)
    events = profiler.key_averages()
    times = [(x.key, x.self_device_time_total if is_gpu else x.self_cpu_time_total) for x in events]
    return sorted(((name, us / 1e3 / calls) for name, us in times if us > 0), key=lambda x: -x[1])
