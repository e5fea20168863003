"""Time the whole layer of gdn, FLA and Transformers: 2048 wide, 16/32 heads of 128, 16,384 tokens.

All have equal weights in bf16. First, y and the gradient of the input are compared with the reference of the
layer in fp64 on the first tokens. A layer rounds at each projection, so its limits are twice those of the
rule.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gdn
from gdn import reference
from gdn.reference.layer import causal_conv1d, rms_norm_gated
from gdn.testing import accuracy
from gdn_bench.passes.gpu import Session, noted
from gdn_bench.problems import jobs
from gdn_bench.problems.workloads import Cost, choose_workloads
from gdn_bench.providers import models
from gdn_bench.results import rows
from gdn_bench.results.rows import Row
from gdn_bench.timing import graph

DTYPE = torch.bfloat16
JUDGED_TOKENS, FACTOR = 256, 2.0
GRADIENT = "dx"


@dataclass(frozen=True)
class Shape:
    """Describe the timed layer."""

    hidden: int = 2048
    heads: tuple[int, int] = (16, 32)
    size: int = 128
    tokens: int = 16384

    def __str__(self) -> str:
        return f"{self.heads[0]}/{self.heads[1]} {self.hidden} wide 1x{self.tokens}"


SHAPE = Shape()
JOBS = ("forward", "forward+backward")


@dataclass(frozen=True)
class Held:
    """Hold a layer as a function, its module, and a context in which it is called."""

    call: Callable[[Tensor], Tensor]
    module: nn.Module
    context: Callable[[], AbstractContextManager[object]] = nullcontext


Make = Callable[[gdn.GatedDeltaNet, Shape], Held]  # a layer with the weights of the first


def run(session: Session, shape: Shape = SHAPE) -> Iterator[Row]:
    """Yield the rows of forward, and of forward with backward, of every layer."""
    session.ceilings = session.ceilings or graph.ceilings(session.device)
    for job in JOBS:
        case = f"{shape} {job}"
        able = [name for name in session.providers if _has_layer(name)]
        if not session.wants(case) or all(session.has("layer", name, case) for name in able):
            continue
        if session.is_over:
            yield {"pass": "layer", "case": case, "provider": "all", "skipped": "out of time"}
            continue
        yield from ({"pass": "layer", **row} for row in measured(session, shape, job))
        graph.release()


def measured(session: Session, shape: Shape, job: str, makers: Mapping[str, Make] | None = None) -> list[Row]:
    """Return the rows of one job: make every layer, compare it with the reference, time the right ones."""
    device, with_backward = session.device, job == "forward+backward"
    torch.manual_seed(0)
    first = gdn.GatedDeltaNet(
        shape.hidden, *shape.heads, head_k_dim=shape.size, head_v_dim=shape.size, device=device, dtype=DTYPE
    )
    makers = makers or {name: partial(_made, name) for name in session.providers if _has_layer(name)}
    x = torch.randn(1, shape.tokens, shape.hidden, device=device, dtype=DTYPE)
    dy = torch.randn_like(x)
    wanted = answers(lambda x: layer_reference(first, x), _start(x).double(), _start(dy).double())
    by_name: dict[str, Row] = {}
    prepared: dict[str, graph.Prepared] = {}
    for name, make in makers.items():
        head = {"case": f"{shape} {job}", "provider": name, "dtype": "bfloat16", "T": shape.tokens, "N": 1}
        row = by_name[name] = {**head, "H": shape.heads[0], "HV": shape.heads[1], "K": shape.size}
        row["backend"] = jobs.default_backend(name, shape.heads, device)
        with noted(row):
            layer = make(first, shape)
            with layer.context():
                row |= verdict(answers(layer.call, _start(x), _start(dy)), wanted)
                if row["ok"]:
                    call = _call(layer, x, dy, with_backward)
                    row["peak_mb"] = round(graph.peak_memory(call, device) / 1e6, 1)
                    prepared[name] = graph.prepare([call], device, is_eager=session.is_eager)
    for name, seconds in (graph.interleaved(prepared, device) if prepared else {}).items():
        by_name[name] |= rows.speed(cost(shape, with_backward), session.ceilings, seconds, prepared[name])
    rows.add_ratios(by_name)
    return list(by_name.values())


def layer_reference(layer: gdn.GatedDeltaNet, x: Tensor) -> Tensor:
    """Compute the layer in fp64 from the functions of gdn.reference."""
    p = {name: value.detach().double() for name, value in layer.named_parameters()}
    H, HV = layer.num_k_heads, layer.num_v_heads
    qkv, _ = causal_conv1d(F.linear(x, p["in_proj_qkv.weight"]), p["conv1d.weight"], None, activation="silu")
    q, k, v = qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    o, _ = reference.gated_delta_rule(
        q.unflatten(-1, (H, -1)), k.unflatten(-1, (H, -1)), v.unflatten(-1, (HV, -1)),
        F.linear(x, p["in_proj_a.weight"]), F.linear(x, p["in_proj_b.weight"]), A_log=p["A_log"],
        dt_bias=p["dt_bias"], use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    z = F.linear(x, p["in_proj_z.weight"]).unflatten(-1, (HV, -1))
    normed = rms_norm_gated(o, z, p["norm.weight"], eps=layer.norm.eps, activation=layer.norm.activation)
    return F.linear(normed.flatten(-2), p["out_proj.weight"])


def answers(call: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Return y and the gradient of x."""
    x = x.detach().requires_grad_()
    y = call(x)
    return {"y": y.detach(), GRADIENT: torch.autograd.grad(y, x, dy)[0]}


def verdict(outputs: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Row:
    """Return the errors beside the reference; y may have twice the limit of o, dx twice that of dq."""
    gates = accuracy.error_limits(DTYPE, "random")
    limits = {"y": FACTOR * gates["o"], GRADIENT: FACTOR * gates["dq"]}
    errors = {x: accuracy.measure_error(outputs[x], wanted[x], limits[x], lambda: 0.0)[0] for x in limits}
    share = max(errors[x] / limits[x] for x in limits)
    return {"ok": share <= 1, "error": max(errors.values()), "errors": errors, "share_of_limit": share}


def cost(shape: Shape, with_backward: bool) -> Cost:
    """Return the flop of projections and rule, and the bytes of x, the weights, y and their gradients."""
    (H, HV), K, T = shape.heads, shape.size, shape.tokens
    weights = shape.hidden * (2 * H * K + 3 * HV * K + 2 * HV)
    rule = choose_workloads("train" if with_backward else "prefill", [f"{H}/{HV} 1x{T}"])[0].cost
    times = 3 if with_backward else 1
    return Cost(times * 2 * (2 * T * shape.hidden + weights), times * 2 * T * weights + rule.flop)


def fla(first: gdn.GatedDeltaNet, shape: Shape) -> Held:
    """Return FLA's layer with these weights; q, k and v have a projection and a convolution each."""
    from fla.layers import GatedDeltaNet

    theirs = GatedDeltaNet(
        hidden_size=shape.hidden, expand_v=1, head_dim=shape.size, num_heads=shape.heads[0],
        num_v_heads=shape.heads[1], mode="chunk", conv_size=4, norm_eps=first.norm.eps,
    ).to(first.out_proj.weight)  # fmt: skip
    mine, parts = first.state_dict(), [first.key_dim, first.key_dim, first.value_dim]
    weights = {"A_log": mine["A_log"], "dt_bias": mine["dt_bias"]}
    for name, projection, taps in zip(
        "qkv", mine["in_proj_qkv.weight"].split(parts), mine["conv1d.weight"].split(parts), strict=True
    ):
        weights |= {f"{name}_proj.weight": projection, f"{name}_conv1d.weight": taps.view(len(taps), 1, -1)}
    names = {"a_proj": "in_proj_a", "b_proj": "in_proj_b", "g_proj": "in_proj_z", "o_proj": "out_proj"}
    weights |= {f"{own}.weight": mine[f"{other}.weight"] for own, other in names.items()}
    theirs.load_state_dict({**weights, "o_norm.weight": mine["norm.weight"]})
    theirs.A_log.data, theirs.dt_bias.data = mine["A_log"], mine["dt_bias"]
    theirs.train()
    return Held(lambda x: theirs(x)[0], theirs)


def transformers(first: gdn.GatedDeltaNet, shape: Shape) -> Held:
    """Return Transformers' Qwen3.5 layer on its own plain PyTorch."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config: Any = Qwen3_5TextConfig(
        hidden_size=shape.hidden, linear_num_key_heads=shape.heads[0], linear_num_value_heads=shape.heads[1],
        linear_key_head_dim=shape.size, linear_value_head_dim=shape.size, num_hidden_layers=1,
        layer_types=["linear_attention"], rms_norm_eps=first.norm.eps,
    )  # fmt: skip
    theirs = Qwen3_5GatedDeltaNet(config, 0).to(first.out_proj.weight)
    weights = first.state_dict()
    taps = weights["conv1d.weight"]
    theirs.load_state_dict({**weights, "conv1d.weight": taps.view(len(taps), 1, -1)})
    theirs.A_log.data, theirs.dt_bias.data = weights["A_log"], weights["dt_bias"]
    return Held(theirs, theirs, models.plain)


def gdn_layer(first: gdn.GatedDeltaNet, shape: Shape, backend: str | None) -> Held:
    """Return gdn.GatedDeltaNet with these weights, on the backend that it chooses or on one by name."""
    own = gdn.GatedDeltaNet(
        shape.hidden, *shape.heads, head_k_dim=shape.size, head_v_dim=shape.size, backend=backend,
        device=first.out_proj.weight.device, dtype=DTYPE,
    )  # fmt: skip
    own.load_state_dict(first.state_dict())
    return Held(own, own)


def _has_layer(provider: str) -> bool:
    return provider.startswith("gdn") or provider in ("fla", "transformers")


def _made(provider: str, first: gdn.GatedDeltaNet, shape: Shape) -> Held:
    if provider.startswith("gdn"):
        return gdn_layer(first, shape, provider.partition(":")[2] or None)
    return {"fla": fla, "transformers": transformers}[provider](first, shape)


def _call(layer: Held, x: Tensor, dy: Tensor, with_backward: bool) -> Callable[[], Any]:
    def forward() -> Tensor:
        with torch.no_grad(), layer.context():
            return layer.call(x)

    if not with_backward:
        return forward
    leaf, parameters = x.detach().requires_grad_(), list(layer.module.parameters())

    def step() -> Any:
        with layer.context():
            return torch.autograd.grad(layer.call(leaf), [leaf, *parameters], dy)

    return step


def _start(x: Tensor) -> Tensor:
    return x[:, :JUDGED_TOKENS]
