"""Compare calls on the tokens of each rank with the reference recurrence on all tokens.

The functions run on every rank of `kit.ranks`; the comparison is on rank 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

import gdn
from gdn import reference

TOKENS = ("q", "k", "v", "g", "beta")
# log decays, of normal numbers; "strong": M of a run of 30 tokens is 0 in fp32, "reset": every seventh token
GATES = {
    "mild": lambda x: torch.nn.functional.logsigmoid(x) / 16,
    "none": torch.zeros_like,
    "slow": lambda x: torch.nn.functional.logsigmoid(x) / 1024,
    "strong": lambda x: -5 - x.abs(),
    "reset": lambda x: torch.where(
        (torch.arange(x.shape[1]) % 7 == 3).view(1, -1, *[1] * (x.ndim - 2)), -1e6, x / 16 - 0.5
    ),
}
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class Sharded:
    """Hold one problem on all ranks: arguments of the context, sequences, sizes, options of the call."""

    context: Mapping[str, Any] = field(default_factory=dict)
    T: int = 90
    offsets: tuple[int, ...] | None = None
    B: int = 1
    H: int = 3
    HV: int = 6
    K: int = 8
    V: int = 12
    dtype: torch.dtype = torch.float64
    options: Mapping[str, Any] = field(default_factory=dict)
    has_channels: bool = False  # a decay per key channel
    gate: str = "mild"  # of GATES; without an effect where gates are computed inside
    backend: str | None = None
    absent: tuple[str, ...] = ()  # tensors that are None

    @property
    def N(self) -> int:
        """Return the number of sequences."""
        return self.B if self.offsets is None else len(self.offsets) - 1

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of gates and states: fp32 beside q, k and v in 16 bits."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Return the global offsets."""
        return None if self.offsets is None else torch.tensor(self.offsets)


def inputs(p: Sharded) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the tensors of the call on all tokens, on the CPU, and the gradients of its two outputs."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = p.wide) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x = {name: draw(p.B, p.T, p.H, p.K, dtype=p.dtype) for name in ("q", "k")}
    x["v"] = draw(p.B, p.T, p.HV, p.V, dtype=p.dtype)
    if not p.options.get("use_qk_l2norm_in_kernel"):
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    channels = (p.K,) if p.has_channels else ()
    x["g"] = draw(p.B, p.T, p.HV, *channels)
    if p.options.get("use_gate_in_kernel"):
        x["g"] -= 2
        x |= {"A_log": draw(p.HV) / 4, "dt_bias": draw(p.HV, *channels) / 4}
    else:
        x["g"] = GATES[p.gate](x["g"])
    x["beta"] = draw(p.B, p.T, p.HV)
    if not p.options.get("use_beta_sigmoid_in_kernel"):
        x["beta"] = x["beta"].sigmoid()
    size = (p.V, p.K) if p.options.get("state_v_first") else (p.K, p.V)
    x["initial_state"] = draw(p.N, p.HV, *size)
    do, dS = draw(p.B, p.T, p.HV, p.V, dtype=p.dtype), draw(p.N, p.HV, *size)
    return {n: t for n, t in x.items() if n not in p.absent}, do, dS


def expected(p: Sharded) -> dict[str, Tensor]:
    """Return outputs and gradients of the reference recurrence in fp64, on all tokens."""
    x, do, dS = inputs(p)
    leaves = {name: t.double().requires_grad_() for name, t in x.items()}
    o, S = reference.gated_delta_rule(**leaves, **p.options, cu_seqlens=p.cu_seqlens)
    torch.autograd.backward([o, S], [do.double(), dS.double()])
    return {"o": o.detach(), "final_state": S.detach(), **{f"d{n}": t.grad for n, t in leaves.items()}}


def device_of_rank() -> torch.device:
    """Return the device of this rank: a GPU with NCCL."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def computed(p: Sharded, context: Any) -> dict[str, Tensor]:
    """Return outputs and gradients of the call on the tokens of this rank, on the device of the ranks.

    Rows of initial_state that begin no sequence are NaN: they may not be read. Final rows get the gradient of
    their sequence, other rows none.
    """
    given, do, dS = inputs(p)
    device = device_of_rank()
    x, do, dS = {n: t.to(device) for n, t in given.items()}, do.to(device), dS.to(device)
    pieces = context.pieces(p.cu_seqlens, batch=p.B)
    local = {n: context.shard(t, 1) if n in TOKENS else t for n, t in x.items()}
    if "initial_state" in x:
        local["initial_state"] = context.shard_states(x["initial_state"], p.cu_seqlens).clone()
        local["initial_state"][[i for i, piece in enumerate(pieces) if not piece.is_first]] = torch.nan
    dS = context.shard_states(dS, p.cu_seqlens).clone()
    dS[[i for i, piece in enumerate(pieces) if not piece.is_last]] = 0
    leaves = {n: t.clone().requires_grad_() for n, t in local.items()}
    options = {**p.options, "backend": p.backend, "cp_context": context, "output_final_state": True}
    if p.cu_seqlens is not None:
        options |= {"cu_seqlens": p.cu_seqlens.to(device), "cu_seqlens_cpu": p.cu_seqlens}
    o, S = gdn.chunk_gated_delta_rule(**leaves, **options)
    assert o.dtype == p.dtype and S.dtype == p.wide and S.shape == dS.shape
    torch.autograd.backward([o, S], [context.shard(do, 1), dS])
    return {"o": o.detach(), "final_state": S.detach(), **{f"d{n}": t.grad for n, t in leaves.items()}}


def gathered(p: Sharded, context: Any, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return on every rank the outputs and gradients of all ranks, with the shapes of `expected`."""
    pieces = context.pieces(p.cu_seqlens, batch=p.B)
    whole = {}
    for name, x in local.items():
        if name in ("o", *(f"d{n}" for n in TOKENS)):
            whole[name] = context.unshard(x, 1)
        elif name == "final_state":
            whole[name] = context.gather_states(x, p.cu_seqlens, batch=p.B)
        elif name == "dinitial_state":
            whole[name] = x.new_zeros(p.N, *x.shape[1:])
            for row, piece in enumerate(pieces):
                if piece.is_first:
                    whole[name][piece.sequence] = x[row]
                else:
                    assert not x[row].any(), "a row that is not read has a gradient"
            dist.all_reduce(whole[name], group=context._groups.whole)
        else:
            whole[name] = x.double()
            dist.all_reduce(whole[name], group=context._groups.whole)
    return whole


def errors(p: Sharded, context: Any) -> dict[str, float]:
    """Return on rank 0 the relative error of each output and gradient, of all ranks together."""
    found = gathered(p, context, computed(p, context))
    if context.rank != 0:
        return {}
    want = expected(p)
    return {name: relative(x, want[name]) for name, x in found.items()}


def relative(x: Tensor, want: Tensor) -> float:
    """Return norm(x - want) / norm(want); infinite for NaN or a wrong shape."""
    if x.shape != want.shape or not bool(x.isfinite().all()):
        return float("inf")
    want = want.to(x.device)
    distance = float((x.double() - want.double()).norm())
    return 0.0 if distance == 0 else distance / max(float(want.double().norm()), 1e-30)
