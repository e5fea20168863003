"""Compare calls on the tokens of each rank with the reference recurrence on all tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

import gdn
from gdn import reference

TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
TOKENS = TENSORS[:5]


@dataclass(frozen=True)
class Sharded:
    """Hold one problem on all ranks: the context's arguments, sequences, sizes and options of the call."""

    context: dict[str, Any]
    T: int = 100
    offsets: tuple[int, ...] | None = None
    B: int = 1
    H: int = 2
    HV: int = 4
    K: int = 8
    V: int = 12
    dtype: torch.dtype = torch.float64
    options: tuple[tuple[str, Any], ...] = ()
    with_state: bool = True
    seed: int = 0

    @property
    def N(self) -> int:
        return self.B if self.offsets is None else len(self.offsets) - 1


def inputs(p: Sharded) -> tuple[dict[str, Tensor], dict[str, Any], Tensor, Tensor]:
    """Return the tensors and options of the call on all tokens, and the gradients of its two outputs."""
    generator = torch.Generator().manual_seed(p.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(p.dtype)

    options = dict(p.options)
    x = {"q": draw(p.B, p.T, p.H, p.K), "k": draw(p.B, p.T, p.H, p.K), "v": draw(p.B, p.T, p.HV, p.V)}
    if not options.get("use_qk_l2norm_in_kernel"):
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    if options.get("use_gate_in_kernel"):
        x |= {"g": draw(p.B, p.T, p.HV) - 2, "A_log": draw(p.HV) / 4, "dt_bias": draw(p.HV) / 4}
    else:
        x["g"] = torch.nn.functional.logsigmoid(draw(p.B, p.T, p.HV)) / 16
    beta = draw(p.B, p.T, p.HV)
    x["beta"] = beta if options.get("use_beta_sigmoid_in_kernel") else beta.sigmoid()
    size = (p.V, p.K) if options.get("state_v_first") else (p.K, p.V)
    if p.with_state:
        x["initial_state"] = draw(p.N, p.HV, *size)
    do, dS = draw(p.B, p.T, p.HV, p.V), draw(p.N, p.HV, *size)
    return x, options, do, dS.to(torch.promote_types(p.dtype, torch.float32))


def expected(p: Sharded) -> dict[str, Tensor]:
    """Return outputs and gradients of the reference recurrence in fp64, on all tokens."""
    x, options, do, dS = inputs(p)
    leaves = {name: t.double().requires_grad_() for name, t in x.items()}
    cu_seqlens = None if p.offsets is None else torch.tensor(p.offsets)
    o, S = reference.gated_delta_rule(**leaves, **options, cu_seqlens=cu_seqlens)
    torch.autograd.backward([o, S], [do.double(), dS.double()])
    return {"o": o.detach(), "final_state": S.detach(), **{f"d{n}": t.grad for n, t in leaves.items()}}


def computed(p: Sharded, context: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the leaves, outputs and gradients of the call on the tokens of this rank.

    Rows of initial_state that begin no sequence are NaN: they may not be read. Final rows get the gradient of
    their sequence, other rows none.
    """
    x, options, do, dS = inputs(p)
    cu_seqlens = None if p.offsets is None else torch.tensor(p.offsets)
    pieces = context.pieces(cu_seqlens, batch=p.B)
    local = {n: context.shard(t, 1) if n in TOKENS else t for n, t in x.items()}
    sequences = torch.tensor([piece.sequence for piece in pieces], dtype=torch.int64)
    if p.with_state:
        local["initial_state"] = context.shard_states(x["initial_state"], cu_seqlens)
        unread = [i for i, piece in enumerate(pieces) if not piece.is_first]
        local["initial_state"][unread] = torch.nan
    dS = dS[sequences]
    dS[[i for i, piece in enumerate(pieces) if not piece.is_last]] = 0
    leaves = {n: t.clone().requires_grad_() for n, t in local.items()}
    o, S = gdn.chunk_gated_delta_rule(
        **leaves, **options, cu_seqlens=cu_seqlens, cp_context=context, output_final_state=True
    )
    torch.autograd.backward([o, S], [context.shard(do, 1), dS])
    return leaves, {"o": o.detach(), "final_state": S.detach()}, {f"d{n}": t.grad for n, t in leaves.items()}


def errors(p: Sharded, context: Any, want: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each output and gradient, of all ranks together."""
    _, outputs, gradients = computed(p, context)
    cu_seqlens = None if p.offsets is None else torch.tensor(p.offsets)
    pieces = context.pieces(cu_seqlens, batch=p.B)
    found = {}
    with torch.no_grad():
        for name, x in (outputs | gradients).items():
            if name in ("o", *(f"d{n}" for n in TOKENS)):
                whole = context.unshard(x, 1)
            elif name == "final_state":
                whole = context.gather_states(x, cu_seqlens, batch=p.B)
            elif name == "dinitial_state":
                whole = _sum(torch.zeros(p.N, *x.shape[1:], dtype=x.dtype), x, pieces)
            else:
                whole = x.double()
                dist.all_reduce(whole)
            found[name] = relative(whole, want[name])
    return found


def _sum(whole: Tensor, rows: Tensor, pieces: Any) -> Tensor:
    """Return the gradients of all initial states; rows that begin no sequence have to be zero."""
    for row, piece in enumerate(pieces):
        if piece.is_first:
            whole[piece.sequence] = rows[row]
        else:
            assert not rows[row].any(), "a row that is not read has a gradient"
    dist.all_reduce(whole)
    return whole


def relative(x: Tensor, want: Tensor) -> float:
    """Return norm(x - want) / norm(want); infinite for NaN or a wrong shape."""
    if x.shape != want.shape or not bool(x.isfinite().all()):
        return float("inf")
    distance = float((x.double() - want.double()).norm())
    return 0.0 if distance == 0 else distance / max(float(want.double().norm()), 1e-30)
