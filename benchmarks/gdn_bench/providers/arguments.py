"""Arguments of peers from the tensors of a problem, and the reasons for which a peer does not support one."""

import torch
from torch import Tensor

from gdn_bench.providers.provider import Options, Tensors


def require_heads(tensors: Tensors) -> None:
    """Raise NotImplementedError for a decay per key channel."""
    if "g" in tensors and tensors["g"].dim() == 4:
        raise NotImplementedError("supports a decay per head only")


def require_tensors(tensors: Tensors, *names: str) -> list[Tensor]:
    """Return tensors by name; NotImplementedError names those that the problem lacks."""
    missing = [name for name in names if name not in tensors]
    if missing:
        raise NotImplementedError(f"needs {', '.join(missing)}")
    return [tensors[name] for name in names]


def require_half(q: Tensor, v: Tensor) -> None:
    """Raise NotImplementedError for other dtypes than bf16 and fp16, and for sizes other than 128."""
    if q.dtype not in (torch.bfloat16, torch.float16) or (q.shape[3], v.shape[3]) != (128, 128):
        raise NotImplementedError("supports bf16 and fp16 with K = V = 128 only")


def convert_offsets(tensors: Tensors, dtype: torch.dtype) -> Tensor | None:
    """Return cu_seqlens in a dtype: the same object if it has it, since peers cache by identity."""
    offsets = tensors.get("cu_seqlens")
    return None if offsets is None else offsets.to(dtype)


def activate_gates(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Return log decay and beta, from raw logits by PyTorch operators if the options say so."""
    g, beta = require_tensors(tensors, "g", "beta")
    if options["use_gate_in_kernel"]:
        A_log, dt_bias, bound = tensors.get("A_log"), tensors.get("dt_bias"), options.get("lower_bound")
        a = g.float() if dt_bias is None else g.float() + dt_bias
        rate = g.new_ones(g.shape[2]) if A_log is None else A_log.float().exp()
        rate = rate[:, None] if g.dim() == 4 else rate
        g = -rate * torch.nn.functional.softplus(a) if bound is None else bound * (rate * a).sigmoid()
    if options["use_beta_sigmoid_in_kernel"]:
        beta = beta.float().sigmoid() * (2 if options["allow_neg_eigval"] else 1)
    return g, beta
